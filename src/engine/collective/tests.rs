use std::time::Duration;

use super::*;
use crate::algo::{Collective, select};
use crate::counts::Counts;
use crate::engine::frame::{FrameKind, Header};
use crate::engine::mock_peer::Harness;
use crate::engine::region::Words;
use crate::error::LinkDown;
use crate::op::CollectiveKind;
use crate::transport::MemoryAddress;
use crate::work::Submitted;

#[test]
fn what_follows_a_collective_that_ran_out_of_time_is_not_slept_through() {
    let (mut harness, mut words, mut more) = (Harness::new(), Words::new(vec![0]), Words::new(vec![0]));
    let first = harness.broadcast(Rank(1), &mut words, Duration::ZERO);
    let second = harness.broadcast(Rank(1), &mut more, Duration::from_secs(60));
    assert!(harness.engine.progress(true), "the first has ended, so that there is more to do");
    assert!(first.is_done() && !second.is_done());
    // The first one's thread has what it waits for, and the second one's sleeps before its first turn.
    assert!(harness.engine.arm());
    harness.engine.disarm();
    harness.engine.progress(true);
    assert!(harness.engine.next_deadline().is_some(), "the second is under way");
}

#[test]
fn what_was_read_at_the_end_of_a_turn_is_not_slept_on() {
    let (mut harness, mut words) = (Harness::new(), Words::new(vec![0]));
    harness.settle();
    let work = harness.broadcast(Rank(1), &mut words, Duration::from_secs(60));
    harness.settle();
    let header = harness.engine.collectives.active.as_ref().expect("it waits").request.header(0, 0, 8);
    let address = Some(MemoryAddress { address: 1, segment: None });
    harness.wire().memory = 7u64.to_ne_bytes().to_vec();
    harness.wire().to_engine.extend_from_slice(&Header { kind: FrameKind::Rts, token: 5, address, ..header }.encode());
    // A turn of a thread that takes no other one.
    harness.engine.progress(true);
    assert!(harness.engine.arm() && words.get() == [7] && !work.is_done());
    harness.engine.disarm();
    harness.settle();
    assert_eq!(work.result(), Some(Ok(())));
}

#[test]
fn many_ranks_ask_by_the_same_few_messages_whatever_a_communicator_names() {
    let (ask, tell) = ("recursive_doubling", |name| (false, name));
    for (named, begins) in [
        (None, (true, ask)),
        (Some("ring"), (true, ask)),
        (Some("direct"), tell("direct")),
        (Some("forwarding"), tell("forwarding")),
    ] {
        let mut harness = Harness::of(66);
        harness.engine.collectives.algorithm = named.map(str::to_owned);
        let [mut sent, mut received] = [0; 2].map(|value| Words::new(vec![value; 66]));
        let counts = Counts::equal(1, 66);
        let request = Request {
            collective: Collective::AllToAll { send: counts.clone(), recv: counts },
            signature: Signature { operation: CollectiveKind::AllToAll as u8, ..Signature::default() },
            reduce: None,
            dtype: DType::U64,
            spaces: Spaces::new(Region::of(&[sent.buffer()]), Region::of(&[received.buffer()]), 8),
            timeout: LONG,
        };
        let begun = harness.engine.start_collective(request, true, &Harness::no_progress());
        assert!(matches!(begun, Submitted::Pending(_)), "others are waited for");
        let active = harness.engine.collectives.active.as_ref().expect("it waits");
        let asks = active.request.signature.algorithm == select::ASKED;
        assert_eq!((asks, active.plan.schedule.name), begins, "{named:?}");
    }
}

// ---- long messages that are asked for before they are announced ----

const TOKEN: u64 = 5;
const LONG: Duration = Duration::from_secs(60);

/// Two ranks that cannot read each other's memory, and for which a word is a long message.
fn far() -> Harness {
    let mut harness = Harness::new();
    harness.wire().is_far = true;
    harness.engine.context.rndv.eager_bytes = 0;
    // A stream that is open tells.
    harness.engine.context.endpoints.connect(Rank(1));
    harness.settle();
    harness
}

/// What both ranks call: a broadcast of a word.
fn signature(root: Rank) -> Signature {
    let (mut harness, mut words) = (Harness::new(), Words::new(vec![0]));
    let _work = harness.broadcast(root, &mut words, LONG);
    harness.engine.collectives.signature().expect("it runs")
}

/// A frame of rank 1 in that broadcast.
fn frame(harness: &mut Harness, kind: FrameKind, root: Rank, payload: &[u64]) {
    let payload: Vec<u8> = payload.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let len = if kind == FrameKind::Eager { 0 } else { 8 };
    let header = Header::control(kind, MatchSpace::Collective, 0, TOKEN, len);
    let header = Header { signature: signature(root), ..header };
    harness.send(&[&*header.encode(), &payload].concat());
}

/// Rank 0 broadcasts a word, of which rank 1 has called the same.
fn send(harness: &mut Harness, words: &mut Words) -> Work {
    frame(harness, FrameKind::Eager, Rank(0), &[]);
    let work = harness.broadcast(Rank(0), words, LONG);
    harness.settle();
    work
}

/// What rank 0 has sent besides that it has called the broadcast.
fn sent(harness: &mut Harness) -> Vec<Header> {
    let mut sent = harness.sent();
    sent.retain(|header| header.kind != FrameKind::Eager);
    sent
}

fn kinds(harness: &mut Harness) -> Vec<FrameKind> {
    sent(harness).iter().map(|header| header.kind).collect()
}

#[test]
fn a_receiver_asks_for_a_long_message_that_has_not_been_announced() {
    let (mut harness, mut words) = (far(), Words::new(vec![0]));
    let work = harness.broadcast(Rank(1), &mut words, LONG);
    harness.settle();
    let [ready] = sent(&mut harness).try_into().expect("one frame");
    assert_eq!((ready.kind, ready.key, ready.index, ready.len), (FrameKind::Ready, 0, 0, 8));
    frame(&mut harness, FrameKind::Data, Rank(1), &[7]);
    assert!(words.get() == [7] && work.result() == Some(Ok(())));
    assert_eq!(kinds(&mut harness), []);
}

#[test]
fn an_announcement_that_crosses_the_question_needs_no_answer() {
    let (mut harness, mut words) = (far(), Words::new(vec![0]));
    let work = harness.broadcast(Rank(1), &mut words, LONG);
    harness.settle();
    assert_eq!(kinds(&mut harness), [FrameKind::Ready]);
    frame(&mut harness, FrameKind::Rts, Rank(1), &[]);
    assert_eq!(kinds(&mut harness), []);
    frame(&mut harness, FrameKind::Data, Rank(1), &[7]);
    assert!(words.get() == [7] && work.result() == Some(Ok(())));
}

#[test]
fn what_can_be_read_or_is_short_or_was_announced_is_not_asked_for() {
    for (is_far, eager_bytes, is_announced, expected) in
        [(false, 0, false, vec![]), (true, 8, false, vec![]), (true, 0, true, vec![FrameKind::Rtr])]
    {
        let (mut harness, mut words) = (far(), Words::new(vec![0]));
        harness.wire().is_far = is_far;
        harness.engine.context.rndv.eager_bytes = eager_bytes;
        if is_announced {
            frame(&mut harness, FrameKind::Rts, Rank(1), &[]);
        }
        let _work = harness.broadcast(Rank(1), &mut words, LONG);
        harness.settle();
        assert_eq!(kinds(&mut harness), expected);
    }
}

#[test]
fn a_sender_that_is_asked_announces_nothing() {
    for asked_first in [true, false] {
        let (mut harness, mut words) = (far(), Words::new(vec![7]));
        if asked_first {
            frame(&mut harness, FrameKind::Ready, Rank(0), &[]);
            assert_eq!(kinds(&mut harness), []);
        }
        let work = send(&mut harness, &mut words);
        if !asked_first {
            assert_eq!(kinds(&mut harness), [FrameKind::Rts]);
            frame(&mut harness, FrameKind::Ready, Rank(0), &[]);
        }
        assert_eq!(kinds(&mut harness), [FrameKind::Data]);
        assert_eq!(work.result(), Some(Ok(())));
        assert!(harness.engine.collectives.asked.is_empty());
    }
}

#[test]
fn what_may_be_read_is_announced_although_it_is_asked_for() {
    for asked_first in [true, false] {
        let (mut harness, mut words) = (far(), Words::new(vec![7]));
        harness.wire().is_far = false;
        if asked_first {
            frame(&mut harness, FrameKind::Ready, Rank(0), &[]);
        }
        let work = send(&mut harness, &mut words);
        if !asked_first {
            frame(&mut harness, FrameKind::Ready, Rank(0), &[]);
        }
        let [announced] = sent(&mut harness).try_into().expect("one frame");
        assert!(announced.kind == FrameKind::Rts && announced.address.is_some() && !work.is_done());
        let answer = Header::control(FrameKind::Ats, MatchSpace::Collective, 0, announced.token, 8);
        harness.send(&answer.encode());
        assert_eq!(work.result(), Some(Ok(())));
        assert!(harness.engine.collectives.asked.is_empty());
    }
}

#[test]
fn a_question_of_another_length_is_answered_by_an_announcement() {
    let ready = Header::control(FrameKind::Ready, MatchSpace::Collective, 0, 0, 16);
    let ready = Header { signature: signature(Rank(0)), ..ready }.encode();
    for asked_first in [true, false] {
        let (mut harness, mut words) = (far(), Words::new(vec![7]));
        if asked_first {
            harness.send(&ready);
        }
        let work = send(&mut harness, &mut words);
        if !asked_first {
            harness.send(&ready);
        }
        assert_eq!(kinds(&mut harness), [FrameKind::Rts]);
        assert!(!work.is_done());
    }
}

#[test]
fn a_question_tells_of_a_disagreement() {
    for asked_first in [true, false] {
        let (mut harness, mut words) = (far(), Words::new(vec![7]));
        let other = Signature { operation: 9, ..Signature::default() };
        let ready = Header { signature: other, ..Header::control(FrameKind::Ready, MatchSpace::Collective, 0, 0, 8) };
        if asked_first {
            harness.send(&ready.encode());
        }
        let work = send(&mut harness, &mut words);
        if !asked_first {
            harness.send(&ready.encode());
        }
        assert!(matches!(work.result(), Some(Err(Error::Mismatch { .. }))));
    }
}

#[test]
fn what_comes_after_the_time_limit_goes_nowhere() {
    let (mut harness, mut words) = (far(), Words::new(vec![0]));
    let work = harness.broadcast(Rank(1), &mut words, LONG);
    harness.settle();
    harness.engine.expire(Instant::now() + 2 * LONG);
    assert!(matches!(work.result(), Some(Err(Error::Timeout { .. }))));
    frame(&mut harness, FrameKind::Data, Rank(1), &[7]);
    assert_eq!(words.get(), [0]);
    // Nor is an old question kept.
    frame(&mut harness, FrameKind::Ready, Rank(0), &[]);
    assert!(harness.engine.collectives.asked.is_empty());
}

#[test]
fn a_rank_whose_end_is_explained_is_blamed_before_one_of_which_there_may_be_news() {
    let (mut harness, mut words) = (Harness::of(4), Words::new(vec![0]));
    harness.engine.context.failures.is_watched = true;
    let work = harness.broadcast(Rank(1), &mut words, Duration::from_secs(60));
    harness.engine.lose(Rank(1), &LinkDown::new("it closed the connection"));
    assert!(!work.is_done(), "there may be news");
    let engine = &mut harness.engine;
    engine.context.endpoints.set_reported(Rank(2), Some(Rank(3)), "text".to_owned());
    engine.collectives.suspect(&mut engine.context, Rank(2), "it closed the connection".to_owned());
    assert!(matches!(work.result(), Some(Err(Error::PeerLost { rank: 3, .. }))), "{:?}", work.result());
}

#[test]
fn what_a_lost_rank_has_announced_is_not_waited_for() {
    let (mut harness, mut words) = (far(), Words::new(vec![0]));
    frame(&mut harness, FrameKind::Rts, Rank(1), &[]);
    harness.wire().broken = true;
    harness.wire().ended = true;
    harness.settle();
    assert!(harness.engine.context.endpoints.lost(Rank(1)).is_some());
    let work = harness.broadcast(Rank(1), &mut words, LONG);
    harness.settle();
    assert!(matches!(work.result(), Some(Err(Error::PeerLost { rank: 1, .. }))), "{:?}", work.result());
}
