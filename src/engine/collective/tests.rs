use std::time::Duration;

use super::*;
use crate::engine::mock_peer::Harness;
use crate::engine::region::Words;

#[test]
fn what_follows_a_collective_that_ran_out_of_time_is_not_slept_through() {
    let (mut harness, mut words, mut more) = (Harness::new(), Words::new(vec![0]), Words::new(vec![0]));
    let first = harness.broadcast(Rank(1), &mut words, Duration::ZERO);
    let second = harness.broadcast(Rank(1), &mut more, Duration::from_secs(60));
    assert!(harness.engine.progress(true), "the first has ended, so that there is more to do");
    assert!(first.is_done() && !second.is_done());
    harness.engine.progress(true);
    assert!(harness.engine.next_deadline().is_some(), "the second is under way");
}
