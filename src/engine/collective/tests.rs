use std::time::Duration;

use super::*;
use crate::engine::frame::{FrameKind, Header};
use crate::engine::mock_peer::Harness;
use crate::engine::region::Words;
use crate::transport::MemoryAddress;

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
