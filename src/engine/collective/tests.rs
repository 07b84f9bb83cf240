use std::time::Duration;

use super::*;
use crate::algo::Collective;
use crate::engine::call::Call;
use crate::engine::flight_recorder::Bytes;
use crate::engine::mock_peer::Harness;
use crate::engine::region::{Region, Spaces, Words};
use crate::types::DType;

/// Submits a broadcast from rank 1.
fn broadcast(harness: &mut Harness, words: &mut Words, timeout: Duration) -> Work {
    let root = Rank(1);
    let signature = Signature { operation: 3, root: root.0, count: 1, ..Signature::default() };
    let entry = harness.engine.begin(Call::Collective(signature), Bytes::default());
    let work = Work::new(Harness::no_progress(), entry);
    let region = Region::of(&[words.buffer()]);
    let request = Request {
        collective: Collective::Broadcast { count: 1, root },
        signature,
        reduce: None,
        dtype: DType::U64,
        spaces: Spaces::new(region.clone(), region, 8),
        timeout,
    };
    harness.engine.submit_collective(request, Executed::default(), work.clone());
    work
}

#[test]
fn what_follows_a_collective_that_ran_out_of_time_is_not_slept_through() {
    let (mut harness, mut words, mut more) = (Harness::new(), Words::new(vec![0]), Words::new(vec![0]));
    let first = broadcast(&mut harness, &mut words, Duration::ZERO);
    let second = broadcast(&mut harness, &mut more, Duration::from_secs(60));
    assert!(harness.engine.progress(true), "the first has ended, so that there is more to do");
    assert!(first.is_done() && !second.is_done());
    harness.engine.progress(true);
    assert!(harness.engine.next_deadline().is_some(), "the second is under way");
}
