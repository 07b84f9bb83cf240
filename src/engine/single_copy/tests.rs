//! Both sides of a message that is read where it lies, against a peer whose frames are written by hand.

use std::time::{Duration, Instant};

use super::*;
use crate::engine::frame::Header;
use crate::engine::message::Direction;
use crate::engine::mock_peer::Scene;
use crate::engine::reduce::Operands;
use crate::engine::region::{Region, Words};
use crate::types::{DType, ReduceOp, Source};
use crate::work::Work;

const TOKEN: u64 = 5;

impl Scene {
    fn receive(&mut self, words: &mut Words) -> Work {
        self.start(Direction::Receive(Source::Rank(Rank(1))), words, Duration::from_secs(60))
    }

    /// Offers `memory` as rank 1, which moves nothing else.
    fn offer(&mut self, memory: &[u64], len: usize) {
        self.offer_while(false, memory, len);
    }

    fn offer_while(&mut self, is_busy: bool, memory: &[u64], len: usize) {
        self.link().memory = memory.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let announce = control(FrameKind::Announce, Lane::PointToPoint, 0, TOKEN, 8 * len as u64);
        let location = Some(Location { address: 1, segment: None });
        self.send(&Header { location, is_busy, ..announce }.encode());
    }

    fn tell(&mut self, kind: FrameKind, token: u64, payload: &[u64]) {
        let payload: Vec<u8> = payload.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let header = control(kind, Lane::PointToPoint, 0, token, payload.len() as u64).encode();
        self.send(&[&*header, &payload].concat());
    }

    fn kinds(&mut self) -> Vec<(FrameKind, u64)> {
        self.sent().iter().map(|header| (header.kind, header.len)).collect()
    }
}

#[test]
fn a_message_is_read_where_it_lies() {
    for receive_first in [true, false] {
        let (mut scene, mut words) = (Scene::new(), Words::new(vec![0; 3]));
        let early = receive_first.then(|| scene.receive(&mut words));
        scene.offer(&[7, 8, 9], 3);
        let work = early.unwrap_or_else(|| scene.receive(&mut words));
        assert!(work.is_done() && words.get() == [7, 8, 9]);
        assert_eq!(scene.kinds(), [(FrameKind::Taken, 0)]);
    }
}

#[test]
fn what_cannot_be_read_is_asked_for_from_there_on() {
    for readable in [0, 2] {
        let (mut scene, mut words) = (Scene::new(), Words::new(vec![0; 3]));
        let work = scene.receive(&mut words);
        scene.offer(&[7, 8, 9][..readable], 3);
        assert!(!work.is_done());
        assert_eq!(scene.kinds(), [(FrameKind::Grant, 8 * readable as u64)]);
        scene.tell(FrameKind::Data, TOKEN, &[7, 8, 9][readable..]);
        assert!(work.is_done() && words.get() == [7, 8, 9]);
    }
}

#[test]
fn nothing_is_believed_while_it_is_unknown_what_was_withdrawn() {
    let (mut scene, mut words) = (Scene::new(), Words::new(vec![0; 1]));
    let work = scene.receive(&mut words);
    scene.link().withdrawals = 1;
    scene.offer(&[7], 1);
    assert!(!work.is_done() && !scene.core.can_read_lent());
    scene.tell(FrameKind::Withdrawn, TOKEN + 1, &[]);
    assert!(work.is_done() && words.get() == [7]);
}

#[test]
fn what_was_withdrawn_is_asked_for() {
    for receive_first in [true, false] {
        let (mut scene, mut words) = (Scene::new(), Words::new(vec![0; 1]));
        let early = receive_first.then(|| scene.receive(&mut words));
        scene.link().withdrawals = 1;
        scene.offer(&[666], 1);
        scene.tell(FrameKind::Withdrawn, TOKEN, &[]);
        let work = early.unwrap_or_else(|| scene.receive(&mut words));
        assert_eq!(scene.kinds(), [(FrameKind::Grant, 0)]);
        scene.tell(FrameKind::Data, TOKEN, &[7]);
        assert!(work.is_done() && words.get() == [7]);
    }
}

#[test]
fn a_sender_is_done_when_its_receiver_gives_up() {
    let (mut scene, mut words) = (Scene::new(), Words::new(vec![0; 1]));
    let work = scene.receive(&mut words);
    scene.link().withdrawals = 1; // so that the reading does not end
    scene.offer(&[7], 1);
    scene.core.check_message_deadlines(Instant::now() + Duration::from_secs(61));
    scene.settle();
    assert!(work.is_done());
    assert_eq!(scene.kinds(), [(FrameKind::Taken, 0)]);
}

#[test]
fn a_send_ends_when_it_is_taken() {
    let (mut scene, mut words) = (Scene::new(), Words::new(vec![7]));
    scene.core.eager_bytes = 0;
    let work = scene.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
    let announce = scene.sent()[0];
    let address = words.get().as_ptr() as u64;
    assert_eq!(announce.kind, FrameKind::Announce);
    assert_eq!(announce.location, Some(Location { address, segment: None }));
    assert!(!work.is_done());
    scene.tell(FrameKind::Taken, announce.token, &[]);
    assert!(work.is_done());
    scene.tell(FrameKind::Taken, announce.token, &[]); // once more does no harm
}

#[test]
fn only_its_receiver_disposes_of_a_message() {
    let (mut scene, mut words) = (Scene::new(), Words::new(vec![7]));
    scene.core.eager_bytes = 0;
    let work = scene.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
    let token = scene.sent()[0].token;
    scene.core.taken(Rank(0), token);
    assert!(!work.is_done() && scene.core.take_announced(Rank(0), token).is_none());
    scene.core.taken(Rank(1), token);
    assert!(work.is_done());
}

#[test]
fn memory_is_withdrawn_before_an_operation_ends_early() {
    let (mut scene, mut words) = (Scene::new(), Words::new(vec![7]));
    scene.core.eager_bytes = 0;
    let work = scene.start(Direction::Send(Rank(1)), &mut words, Duration::ZERO);
    scene.settle();
    assert!(work.is_done() && scene.link().core_withdrawals == 1);
    assert_eq!(scene.kinds().last().map(|(kind, _)| *kind), Some(FrameKind::Withdrawn));
    let work = scene.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
    scene.core.close("aborted: for a test");
    assert!(work.is_done() && scene.link().core_withdrawals == 2);
}

#[test]
fn a_peer_that_cannot_read_is_offered_nothing_more() {
    for (why, offered) in [(Grant::Chosen, true), (Grant::CannotRead, false)] {
        let (mut scene, mut words) = (Scene::new(), Words::new(vec![7, 8]));
        scene.core.eager_bytes = 0;
        let work = scene.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
        let grant = control(FrameKind::Grant, Lane::PointToPoint, 0, scene.sent()[0].token, 8);
        scene.send(&Header { index: why as u32, ..grant }.encode());
        assert!(work.is_done());
        let data = std::mem::take(&mut scene.link().from_core);
        assert_eq!(data[data.len() - 8..], 8u64.to_ne_bytes()); // from the second word on
        scene.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
        assert_eq!(scene.sent()[0].location.is_some(), offered);
    }
}

#[test]
fn a_long_message_is_asked_for_where_its_sender_has_the_time() {
    let len = OVERLAP_BYTES / 8;
    let message: Vec<u64> = (0..len as u64).collect();
    for (crowded, sends, is_busy, kind) in [
        (false, false, false, FrameKind::Grant),
        (true, false, false, FrameKind::Grant),
        // It has to read this rank's message meanwhile.
        (false, true, false, FrameKind::Taken),
        (false, false, true, FrameKind::Taken),
    ] {
        let (mut scene, mut words, mut own) = (Scene::new(), Words::new(vec![0; len]), Words::new(vec![7]));
        scene.core.crowded = crowded;
        scene.core.eager_bytes = 0;
        if sends {
            scene.start(Direction::Send(Rank(1)), &mut own, Duration::from_secs(60));
            scene.sent();
        }
        let work = scene.receive(&mut words);
        scene.offer_while(is_busy, &message, len);
        assert_eq!((scene.sent()[0].kind, work.is_done()), (kind, kind == FrameKind::Taken));
        scene.tell(FrameKind::Data, TOKEN, &message);
        assert!(work.is_done() && words.get() == message);
    }
}

#[test]
fn what_is_combined_is_read_where_ranks_share_cores() {
    let (mut scene, mut words) = (Scene::new(), Words::new(vec![0; 20_000]));
    let arrival = Arrival::Reduce(Operands::Elements(ReduceOp::Sum, DType::U64));
    let placement = Placement { region: Region::of(&[words.buffer()]), arrival, owner: Owner::PROTOCOL, filled: 0 };
    for crowded in [false, true] {
        scene.core.crowded = crowded;
        let location = Location { address: 1, segment: None };
        assert_eq!(scene.core.prefers_reading(Rank(1), location, true, &placement), crowded);
    }
}

#[test]
fn reductions_combine_what_they_read_once() {
    let (mut scene, mut words) = (Scene::new(), Words::new((0..20_000).collect()));
    scene.offer(&[3; 20_000], 20_000);
    let inbox = scene.core.peers[1].inbox.as_mut().expect("a stream");
    let owner = Owner::PROTOCOL;
    let arrival = Arrival::Reduce(Operands::Elements(ReduceOp::Sum, DType::U64));
    let placement = Placement { region: Region::of(&[words.buffer()]), arrival, owner, filled: 0 };
    let location = Location { address: 1, segment: None };
    let mut reading = Reading { from: Rank(1), token: TOKEN, lane: Lane::Collective, location, placement };
    assert!(matches!(read_some(&mut reading, inbox, 0, &mut Vec::new()), Ok(Read::All)));
    assert!(words.get().iter().enumerate().all(|(index, word)| *word == index as u64 + 3));
}
