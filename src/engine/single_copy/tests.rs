//! Both sides of a message that is read where it lies, against a peer whose frames are written by hand.

use std::time::{Duration, Instant};

use super::*;
use crate::config::Switch;
use crate::engine::body::Body;
use crate::engine::context::OpContext;
use crate::engine::copying::OVERLAP_BYTES;
use crate::engine::frame::{Header, RtrReason};
use crate::engine::message::Direction;
use crate::engine::mock_peer::Harness;
use crate::engine::reduce::Operands;
use crate::engine::region::{Region, Words};
use crate::engine::rndv::Known;
use crate::types::{DType, ReduceOp, Source};
use crate::work::Work;

const TOKEN: u64 = 5;

impl Harness {
    fn receive(&mut self, words: &mut Words) -> Work {
        self.start(Direction::Receive(Source::Rank(Rank(1))), words, Duration::from_secs(60))
    }

    /// Offers `memory` as rank 1, which moves nothing else.
    fn rts(&mut self, memory: &[u64], len: usize) {
        self.offer_while(false, memory, len);
    }

    fn offer_while(&mut self, is_busy: bool, memory: &[u64], len: usize) {
        self.announce(is_busy, memory, len);
        self.settle();
    }

    /// The same, of which rank 0 has not heard yet.
    fn announce(&mut self, is_busy: bool, memory: &[u64], len: usize) {
        self.wire().memory = memory.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let announce = Header::control(FrameKind::Rts, MatchSpace::PointToPoint, 0, TOKEN, 8 * len as u64);
        let address = Some(MemoryAddress { address: 1, segment: None });
        self.wire().to_engine.extend_from_slice(&Header { address, is_busy, ..announce }.encode());
    }

    fn tell(&mut self, kind: FrameKind, token: u64, payload: &[u64]) {
        let payload: Vec<u8> = payload.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let header = Header::control(kind, MatchSpace::PointToPoint, 0, token, payload.len() as u64).encode();
        self.send(&[&*header, &payload].concat());
    }

    fn kinds(&mut self) -> Vec<(FrameKind, u64)> {
        self.sent().iter().map(|header| (header.kind, header.len)).collect()
    }
}

#[test]
fn a_message_is_read_where_it_lies() {
    for receive_first in [true, false] {
        let (mut harness, mut words) = (Harness::new(), Words::new(vec![0; 3]));
        let early = receive_first.then(|| harness.receive(&mut words));
        harness.rts(&[7, 8, 9], 3);
        let work = early.unwrap_or_else(|| harness.receive(&mut words));
        assert!(work.is_done() && words.get() == [7, 8, 9]);
        assert_eq!(harness.kinds(), [(FrameKind::Ats, 0)]);
    }
}

#[test]
fn a_message_that_takes_several_turns_is_not_slept_on() {
    let message: Vec<u64> = (0..BYTES_PER_TURN as u64 / 8 + 1).collect();
    let (mut harness, mut words) = (Harness::new(), Words::new(vec![0; message.len()]));
    let work = harness.receive(&mut words);
    harness.announce(true, &message, message.len());
    // A turn of a thread that takes no other one.
    harness.engine.progress(true);
    assert!(harness.engine.arm() && !work.is_done());
    harness.engine.disarm();
    harness.settle();
    assert!(work.is_done() && words.get() == message);
    assert!(!harness.engine.arm(), "now it may sleep");
    harness.engine.disarm();
}

#[test]
fn what_cannot_be_read_is_asked_for_from_there_on() {
    for readable in [0, 2] {
        let (mut harness, mut words) = (Harness::new(), Words::new(vec![0; 3]));
        let work = harness.receive(&mut words);
        harness.rts(&[7, 8, 9][..readable], 3);
        assert!(!work.is_done());
        assert_eq!(harness.kinds(), [(FrameKind::Rtr, 8 * readable as u64)]);
        harness.tell(FrameKind::Data, TOKEN, &[7, 8, 9][readable..]);
        assert!(work.is_done() && words.get() == [7, 8, 9]);
    }
}

#[test]
fn nothing_is_believed_while_it_is_unknown_what_was_withdrawn() {
    let (mut harness, mut words) = (Harness::new(), Words::new(vec![0; 1]));
    let work = harness.receive(&mut words);
    harness.wire().invalidations = 1;
    harness.rts(&[7], 1);
    assert!(!work.is_done() && !harness.engine.can_read_now());
    harness.tell(FrameKind::Invalidated, TOKEN + 1, &[]);
    assert!(work.is_done() && words.get() == [7]);
}

#[test]
fn what_was_withdrawn_is_asked_for() {
    for receive_first in [true, false] {
        let (mut harness, mut words) = (Harness::new(), Words::new(vec![0; 1]));
        let early = receive_first.then(|| harness.receive(&mut words));
        harness.wire().invalidations = 1;
        harness.rts(&[666], 1);
        harness.tell(FrameKind::Invalidated, TOKEN, &[]);
        let work = early.unwrap_or_else(|| harness.receive(&mut words));
        assert_eq!(harness.kinds(), [(FrameKind::Rtr, 0)]);
        harness.tell(FrameKind::Data, TOKEN, &[7]);
        assert!(work.is_done() && words.get() == [7]);
    }
}

#[test]
fn a_sender_is_done_when_its_receiver_gives_up() {
    let (mut harness, mut words) = (Harness::new(), Words::new(vec![0; 1]));
    let work = harness.receive(&mut words);
    harness.wire().invalidations = 1; // so that the reading does not end
    harness.rts(&[7], 1);
    harness.engine.expire(Instant::now() + Duration::from_secs(61));
    harness.settle();
    assert!(work.is_done());
    assert_eq!(harness.kinds(), [(FrameKind::Ats, 0)]);
}

#[test]
fn a_send_ends_when_it_is_taken() {
    let (mut harness, mut words) = (Harness::new(), Words::new(vec![7]));
    harness.engine.context.rndv.eager_bytes = 0;
    let work = harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
    let announce = harness.sent()[0];
    let address = words.get().as_ptr() as u64;
    assert_eq!(announce.kind, FrameKind::Rts);
    assert_eq!(announce.address, Some(MemoryAddress { address, segment: None }));
    assert!(!work.is_done());
    harness.tell(FrameKind::Ats, announce.token, &[]);
    assert!(work.is_done());
    harness.tell(FrameKind::Ats, announce.token, &[]); // once more does no harm
}

#[test]
fn only_its_receiver_disposes_of_a_message() {
    let (mut harness, mut words) = (Harness::new(), Words::new(vec![7]));
    harness.engine.context.rndv.eager_bytes = 0;
    let work = harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
    let token = harness.sent()[0].token;
    assert_eq!(harness.engine.context.rndv.ats_arrives(Rank(0), token), None);
    assert!(!work.is_done());
    harness.tell(FrameKind::Ats, token, &[]);
    assert!(work.is_done());
}

#[test]
fn memory_is_withdrawn_before_an_operation_ends_early() {
    let (mut harness, mut words) = (Harness::new(), Words::new(vec![7]));
    harness.engine.context.rndv.eager_bytes = 0;
    let work = harness.start(Direction::Send(Rank(1)), &mut words, Duration::ZERO);
    harness.settle();
    assert!(work.is_done() && harness.wire().engine_invalidations == 1);
    assert_eq!(harness.kinds().last().map(|(kind, _)| *kind), Some(FrameKind::Invalidated));
    let work = harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
    harness.engine.close("aborted: for a test");
    assert!(work.is_done() && harness.wire().engine_invalidations == 2);
}

#[test]
fn a_peer_that_cannot_read_is_offered_nothing_more() {
    for (why, offered) in [(RtrReason::Chosen, true), (RtrReason::CannotRead, false)] {
        let (mut harness, mut words) = (Harness::new(), Words::new(vec![7, 8]));
        harness.engine.context.rndv.eager_bytes = 0;
        let work = harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
        let grant = Header::control(FrameKind::Rtr, MatchSpace::PointToPoint, 0, harness.sent()[0].token, 8);
        harness.send(&Header { index: why as u32, ..grant }.encode());
        assert!(work.is_done());
        let data = std::mem::take(&mut harness.wire().from_engine);
        assert_eq!(data[data.len() - 8..], 8u64.to_ne_bytes()); // from the second word on
        harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
        assert_eq!(harness.sent()[0].address.is_some(), offered);
    }
}

#[test]
fn a_long_message_is_asked_for_where_its_sender_has_the_time() {
    let len = OVERLAP_BYTES / 8;
    let message: Vec<u64> = (0..len as u64).collect();
    for (oversubscribed, sends, is_busy, kind) in [
        (false, false, false, FrameKind::Rtr),
        (true, false, false, FrameKind::Rtr),
        // It has to read this rank's message meanwhile.
        (false, true, false, FrameKind::Ats),
        (false, false, true, FrameKind::Ats),
    ] {
        let (mut harness, mut words, mut own) = (Harness::new(), Words::new(vec![0; len]), Words::new(vec![7]));
        harness.engine.context.rndv.oversubscribed = oversubscribed;
        harness.engine.context.rndv.eager_bytes = 0;
        if sends {
            harness.start(Direction::Send(Rank(1)), &mut own, Duration::from_secs(60));
            harness.sent();
        }
        let work = harness.receive(&mut words);
        harness.offer_while(is_busy, &message, len);
        assert_eq!((harness.sent()[0].kind, work.is_done()), (kind, kind == FrameKind::Ats));
        harness.tell(FrameKind::Data, TOKEN, &message);
        assert!(work.is_done() && words.get() == message);
    }
}

#[test]
fn a_setting_says_whether_messages_are_read() {
    for (single_copy, kind) in [(Switch::On, FrameKind::Ats), (Switch::Off, FrameKind::Rtr)] {
        for len in [1, OVERLAP_BYTES / 8] {
            let message: Vec<u64> = (0..len as u64).collect();
            let (mut harness, mut words) = (Harness::new(), Words::new(vec![0; len]));
            harness.engine.context.rndv.single_copy = single_copy;
            let _work = harness.receive(&mut words);
            harness.rts(&message, len);
            assert_eq!(harness.sent()[0].kind, kind, "{len} words");
        }
    }
}

#[test]
fn what_a_busy_sender_has_is_read_and_not_measured() {
    let len = OVERLAP_BYTES / 8;
    let message: Vec<u64> = (0..len as u64).collect();
    let (mut harness, mut words) = (Harness::new(), Words::new(vec![0; len]));
    for _ in 0..20 {
        let work = harness.receive(&mut words);
        harness.offer_while(true, &message, len);
        assert!(harness.sent()[0].kind == FrameKind::Ats && work.is_done());
    }
    assert_eq!(harness.engine.context.rndv.copy_stats(Rank(1)), []);
}

#[test]
fn a_message_that_comes_partly_one_way_and_partly_the_other_is_not_measured() {
    let mut words = Words::new(vec![0; 3]);
    for is_withdrawn in [false, true] {
        let mut harness = Harness::new();
        for _ in 0..20 {
            let work = harness.receive(&mut words);
            harness.wire().invalidations += u64::from(is_withdrawn);
            harness.rts(if is_withdrawn { &[7, 8, 9] } else { &[7, 8] }, 3);
            if is_withdrawn {
                harness.tell(FrameKind::Invalidated, TOKEN, &[]);
            }
            let asked = harness.sent();
            assert_eq!(asked[0].kind, FrameKind::Rtr);
            harness.tell(FrameKind::Data, TOKEN, &[7, 8, 9][asked[0].len as usize / 8..]);
            assert!(work.is_done());
        }
        let stats = serde_json::to_value(harness.engine.context.rndv.copy_stats(Rank(1))).expect("JSON");
        assert_eq!((&stats[0]["ring"], &stats[0]["single"]), (&serde_json::Value::Null, &serde_json::Value::Null));
    }
}

#[test]
fn what_one_thread_has_just_written_is_not_offered_where_ranks_have_cores() {
    for (is_cache_hot, oversubscribed, team, is_offered) in [
        (true, false, Team::ALONE, false),
        (true, true, Team::ALONE, true),
        (true, false, Team::of(1), true),
        (false, false, Team::ALONE, true),
    ] {
        let (mut harness, mut words) = (Harness::new(), Words::new(vec![7]));
        let OpContext { rndv, endpoints, .. } = &mut harness.engine.context;
        (rndv.oversubscribed, rndv.team) = (oversubscribed, team);
        endpoints.connect(Rank(1));
        let header = Header::control(FrameKind::Eager, MatchSpace::Collective, 0, 0, 8);
        let (body, known) = (Body::of(Region::of(&[words.buffer()])), Known { is_asked: false, is_cache_hot });
        rndv.send_long(endpoints, Rank(1), header, body, Completion::NONE, known);
        let [announced] = harness.sent().try_into().expect("one frame");
        assert_eq!((announced.kind, announced.address.is_some()), (FrameKind::Rts, is_offered));
    }
}

#[test]
fn reductions_combine_what_they_read_once() {
    let (mut harness, mut words) = (Harness::new(), Words::new((0..20_000).collect()));
    harness.rts(&[3; 20_000], 20_000);
    let inbox = harness.engine.context.endpoints.inbox(Rank(1)).expect("a stream");
    let completion = Completion::NONE;
    let action = RecvAction::Reduce(Operands::Elements(ReduceOp::Sum, DType::U64));
    let buffer = RecvBuffer::new(Region::of(&[words.buffer()]), action, completion);
    let address = MemoryAddress { address: 1, segment: None };
    let mut reading = Reading { from: Rank(1), token: TOKEN, match_space: MatchSpace::Collective, address, buffer };
    assert!(matches!(read_some(&mut reading, inbox, 0, &mut Vec::new(), Team::of(3)), Ok(Read::All)));
    assert!(words.get().iter().enumerate().all(|(index, word)| *word == index as u64 + 3));
}
