//! The threads of a team: each part is done once, and is there when the call returns.

use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::thread;

use crate::pool::Pool;
use crate::sync::Arc;

/// What two threads write to, each to its own.
struct Cells([UnsafeCell<u32>; 2]);

#[allow(unsafe_code, reason = "loom's cells, which report every race")]
// SAFETY: loom checks that no two threads use one cell at once.
unsafe impl Sync for Cells {}

#[allow(unsafe_code, reason = "loom's cells, which report every race")]
fn share(pool: &Arc<Pool>) {
    let cells = Cells([UnsafeCell::new(0), UnsafeCell::new(0)]);
    let shared = &cells;
    pool.share(1, 2, &|index| {
        // SAFETY: loom checks that nobody else uses it meanwhile.
        shared.0[index].with_mut(|cell| unsafe { *cell += 1 });
    });
    // SAFETY: as above.
    assert!(cells.0.iter().all(|cell| cell.with(|cell| unsafe { *cell }) == 1));
}

/// Every interleaving would take many minutes: those with up to so many threads that are stopped where they could go on.
fn check(stopped: usize, model: fn()) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(stopped);
    builder.check(model);
}

#[test]
fn all_parts_are_done_when_the_call_returns() {
    check(3, || {
        let pool = Pool::new(Duration::ZERO, || {});
        share(&pool);
        share(&pool);
        pool.close();
    });
}

#[test]
fn two_that_call_at_once_hinder_nobody() {
    check(2, || {
        let pool = Pool::new(Duration::ZERO, || {});
        let other = thread::spawn({
            let pool = Arc::clone(&pool);
            move || share(&pool)
        });
        share(&pool);
        other.join().expect("no panic");
        pool.close();
    });
}
