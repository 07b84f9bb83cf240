//! What a hostile or late peer may send: frames written by hand.

use super::*;
use crate::engine::mock_peer;
use crate::engine::reduce::Operands;
use crate::engine::region::Words;
use crate::types::{DType, ReduceOp};

/// Rank 0 with a window of two words, to which rank 1 writes by hand.
struct Harness {
    peer: mock_peer::Harness,
    words: Words,
    window: WindowId,
}

impl Harness {
    fn new() -> Harness {
        let mut peer = mock_peer::Harness::new();
        let mut words = Words::new(vec![0; 2]);
        let window = peer.engine.windows.expose(Region::of(&[words.buffer()]));
        Harness { peer, words, window }
    }

    fn header(kind: FrameKind, window: u64, token: u64, len: u64) -> Vec<u8> {
        Header::control(kind, MatchSpace::PointToPoint, window, token, len).encode().to_vec()
    }

    fn send(&mut self, bytes: &[u8]) {
        self.peer.send(bytes);
    }

    fn signals(&self) -> u64 {
        self.peer.engine.windows.exposed[&self.window].signals.get(&Rank(1)).copied().unwrap_or(0)
    }
}

#[test]
fn a_put_lands_where_its_frames_say() {
    let mut harness = Harness::new();
    let id = harness.window.0;
    harness.send(&Harness::header(FrameKind::Put, id, 8, 8));
    harness.send(&7u64.to_ne_bytes());
    harness.send(&Harness::header(FrameKind::Signal, id, 0, 0));
    assert_eq!((harness.words.get(), harness.signals()), ([0, 7].as_slice(), 1));
}

#[test]
fn frames_for_what_is_not_lent_are_dropped_and_the_stream_goes_on() {
    let mut harness = Harness::new();
    let id = harness.window.0;
    for (window, offset, len) in [(id, 9, 8), (id, u64::MAX, 8), (id, 0, 17), (id + 1, 0, 8), (u64::MAX, 0, 0)] {
        harness.send(&Harness::header(FrameKind::Put, window, offset, len));
        harness.send(&vec![0xff; len as usize]);
    }
    harness.send(&Harness::header(FrameKind::Signal, id + 1, 0, 0));
    assert_eq!((harness.words.get(), harness.signals()), ([0, 0].as_slice(), 0));
    harness.send(&Harness::header(FrameKind::Signal, id, 0, 0));
    assert_eq!(harness.signals(), 1);
}

#[test]
fn the_greatest_numbers_are_numbers_like_others() {
    let mut harness = Harness::new();
    for kind in [FrameKind::Rts, FrameKind::Rtr, FrameKind::Get, FrameKind::Credit] {
        for match_space in [MatchSpace::Collective, MatchSpace::PointToPoint] {
            harness.send(&Header::control(kind, match_space, u64::MAX, u64::MAX, u64::MAX).encode());
        }
    }
    assert!(harness.peer.engine.context.endpoints.lost(Rank(1)).is_none());
}

#[test]
fn half_an_element_does_not_hold_up_the_stream() {
    let (mut harness, mut sum) = (Harness::new(), Words::new(vec![0; 2]));
    let region = Region::of(&[sum.buffer()]);
    let action = RecvAction::Reduce(Operands::Elements(ReduceOp::Sum, DType::U64));
    harness.peer.engine.context.rndv.expect(
        Rank(1),
        5,
        RecvBuffer { region, action, completion: Completion::NONE, received: 0 },
    );
    harness.send(&Harness::header(FrameKind::Data, 0, 5, 4));
    harness.send(&[1; 4]);
    harness.send(&Harness::header(FrameKind::Signal, harness.window.0, 0, 0));
    assert_eq!((sum.get(), harness.signals()), ([0, 0].as_slice(), 1));
}

#[test]
fn nothing_is_written_to_a_window_that_was_concealed_amid_a_put() {
    let mut harness = Harness::new();
    harness.send(&Harness::header(FrameKind::Put, harness.window.0, 0, 16));
    harness.send(&7u64.to_ne_bytes());
    assert_eq!(harness.words.get(), [7, 0]);
    harness.peer.engine.conceal(harness.window);
    harness.send(&7u64.to_ne_bytes());
    assert_eq!(harness.words.get(), [7, 0]);
    assert!(harness.peer.engine.context.endpoints.lost(Rank(1)).is_none());
}

/// A frame that adds bytes to the window.
fn addition(dtype: u8, window: u64, offset: u64, len: u64) -> Vec<u8> {
    let signature = Signature { dtype, ..Signature::default() };
    let header = Header::control(FrameKind::Accumulate, MatchSpace::PointToPoint, window, offset, len);
    Header { signature, ..header }.encode().to_vec()
}

#[test]
fn an_accumulate_adds_to_what_is_there() {
    let mut harness = Harness::new();
    let id = harness.window.0;
    for _ in 0..3 {
        harness.send(&addition(DType::U64 as u8, id, 8, 8));
        harness.send(&7u64.to_ne_bytes());
    }
    assert_eq!(harness.words.get(), [0, 21]);
}

#[test]
fn additions_of_what_has_no_sum_or_no_place_are_dropped_and_the_stream_goes_on() {
    let mut harness = Harness::new();
    let (id, dtype) = (harness.window.0, DType::U64 as u8);
    let no_sum = DType::ALL.iter().find(|dtype| !ReduceOp::Sum.supports(**dtype)).expect("a type without sums");
    let strays =
        [(*no_sum as u8, id, 0, 8), (255, id, 0, 8), (dtype, id, 0, 7), (dtype, id, 9, 8), (dtype, id + 1, 0, 8)];
    for (dtype, window, offset, len) in strays {
        harness.send(&addition(dtype, window, offset, len));
        harness.send(&vec![0xff; len as usize]);
    }
    harness.send(&Harness::header(FrameKind::Signal, id, 0, 0));
    assert_eq!((harness.words.get(), harness.signals()), ([0, 0].as_slice(), 1));
}

#[test]
fn a_flush_is_answered_and_an_answer_nobody_waits_for_is_dropped() {
    let mut harness = Harness::new();
    let id = harness.window.0;
    for (window, token) in [(id, 7), (id + 1, 8)] {
        harness.send(&Harness::header(FrameKind::Flush, window, token, 0));
    }
    harness.send(&Harness::header(FrameKind::Flushed, id, 3, 0));
    let sent = std::mem::take(&mut harness.peer.wire().from_engine);
    let mut rest = sent.as_slice();
    let mut answers = Vec::new();
    while !rest.is_empty() {
        let header = Header::decode(rest).expect("a header").expect("a whole one");
        rest = &rest[header.size() + header.payload()..];
        answers.push((header.kind, header.key, header.token, header.index));
    }
    let answer = |window, token, index| (FrameKind::Flushed, window, token, index);
    assert_eq!(answers, [answer(id, 7, 0), answer(id + 1, 8, 1)]);
    assert!(harness.peer.engine.context.endpoints.lost(Rank(1)).is_none());
}
