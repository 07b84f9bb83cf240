//! A work that one thread completes while others wait for it, poll it, or hand it callbacks.

use std::time::Instant;

use loom::cell::UnsafeCell;
use loom::thread;

use crate::sync::{Arc, AtomicUsize, Ordering};
use crate::work::{Drive, Entry, Work};

/// A driver on which other threads make progress.
struct Elsewhere;

impl Drive for Elsewhere {
    fn drive(&self, work: &Work, _: Option<Instant>) {
        while !work.is_done() {
            thread::yield_now();
        }
    }
}

fn work() -> Work {
    Work::new(Arc::new(Elsewhere), Entry { operation: "barrier", sequence: 0, number: 0, began: Instant::now() })
}

/// What the engine does when an operation ends.
fn end(work: &Work) {
    work.complete(Ok(()), None);
    if work.wants_callbacks_run() {
        work.run_callbacks();
    }
}

#[test]
#[allow(unsafe_code, reason = "loom's cells, which report every race")]
fn a_thread_that_sees_that_a_work_is_done_sees_its_data() {
    loom::model(|| {
        let (work, data) = (work(), Arc::new(UnsafeCell::new(0)));
        let engine = thread::spawn({
            let (work, data) = (work.clone(), Arc::clone(&data));
            move || {
                // SAFETY: loom checks that nobody reads it meanwhile.
                data.with_mut(|data| unsafe { *data = 7 });
                end(&work);
            }
        });
        if work.is_done() {
            // SAFETY: loom checks that the engine has written it.
            assert_eq!(data.with(|data| unsafe { *data }), 7);
        }
        engine.join().expect("no panic");
    });
}

#[test]
fn a_callback_runs_once_whoever_comes_first() {
    loom::model(|| {
        let (work, calls) = (work(), Arc::new(AtomicUsize::new(0)));
        let engine = thread::spawn({
            let work = work.clone();
            move || end(&work)
        });
        let waiter = thread::spawn({
            let work = work.clone();
            move || assert_eq!(work.wait(None), Ok(()))
        });
        let counted = Arc::clone(&calls);
        work.on_complete(move |result| {
            assert_eq!(result, Ok(()));
            counted.fetch_add(1, Ordering::Relaxed);
        });
        engine.join().expect("no panic");
        waiter.join().expect("no panic");
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    });
}
