//! Threads that make progress for each other: those that wait, and the progress thread.

use std::time::{Duration, Instant};

use loom::thread;

use crate::engine::driver::{Driver, Polling};
use crate::engine::progress::Engine;
use crate::sync::Arc;
use crate::sys::poller::Poller;
use crate::work::{Entry, Work};

/// A driver with works in flight, and the wire over which their ends come.
fn in_flight(count: usize) -> (Arc<Driver>, Vec<Work>, Poller) {
    let wire = Poller::default();
    let polling = Polling { time: Duration::ZERO, yield_when_idle: false };
    let driver = Driver::new(Engine { wire: wire.clone(), ..Engine::default() }, wire.clone(), polling);
    let entry = |number| Entry { operation: "barrier", sequence: 0, number: number as u64, began: Instant::now() };
    let work = |number| Work::new(driver.clone(), entry(number));
    let works: Vec<Work> = (0..count).map(work).collect();
    driver.with_engine(|engine| engine.in_flight.clone_from(&works));
    (driver, works, wire)
}

/// Tries the interleavings with few switches, which is enough to err.
fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

fn wait_for(work: Work) -> thread::JoinHandle<()> {
    thread::spawn(move || assert_eq!(work.wait(None), Ok(())))
}

#[test]
fn a_waiting_thread_sees_the_end_that_comes() {
    check(3, || {
        let (driver, works, wire) = in_flight(1);
        let waiter = wait_for(works[0].clone());
        wire.deliver(0);
        waiter.join().expect("no panic");
        driver.close();
    });
}

#[test]
fn each_that_waits_sees_its_end_at_once_whoever_drives() {
    for first in [0, 1] {
        check(3, move || {
            let (driver, works, wire) = in_flight(2);
            let mut waiters = [wait_for(works[first].clone()), wait_for(works[1 - first].clone())].into_iter();
            for number in [first, 1 - first] {
                wire.deliver(number);
                waiters.next().expect("one for each").join().expect("no panic");
            }
            driver.close();
        });
    }
}

#[test]
fn what_nobody_waits_for_ends_on_the_progress_thread() {
    check(2, || {
        let (driver, works, wire) = in_flight(2);
        driver.wake_progress_thread().expect("a thread");
        let waiter = wait_for(works[0].clone());
        wire.deliver(0);
        wire.deliver(1);
        waiter.join().expect("no panic");
        // Only the progress thread drives this one.
        while !works[1].is_done() {
            thread::yield_now();
        }
        driver.close();
    });
}

#[test]
fn a_waiting_thread_is_told_of_an_abort() {
    check(3, || {
        let (driver, works, _) = in_flight(1);
        let waiter = wait_for(works[0].clone());
        driver.with_engine(|engine| engine.end(0));
        driver.flush_finished();
        waiter.join().expect("no panic");
        driver.close();
    });
}
