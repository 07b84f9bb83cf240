//! The ends of a library's communicators, on threads of their own, since the library waits there: for the device, and for other ranks.

use std::sync::PoisonError;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use crate::sync::{self, Arc, Condvar, Mutex, lock};
use crate::sys::cuda::Relaxed;
use crate::sys::fork::PerProcess;
use crate::sys::nccl::NcclComm;

/// How long an end is waited for.
const LIMIT: Duration = Duration::from_secs(5);

/// How a communicator leaves what it has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// As it should: the library sends what calls have left with it.
    Well,
    /// By an abort, or after the loss of a rank: the library is given up.
    AfterFailure,
}

/// The end of a communicator that has begun. Dropped, it is waited for, for a while: the library may still have to send what calls have
/// left with it.
#[derive(Debug)]
pub(crate) struct Ending {
    /// Whose, and of which library.
    what: String,
    has_ended: Receiver<()>,
    until: Instant,
}

impl Ending {
    /// Ends a communicator, of which nothing is on a stream, and first what is registered with it.
    ///
    /// An abort would drop what NCCL's network transports have still to send (`ncclProxyProgress` in its
    /// [proxy.cc](https://github.com/NVIDIA/nccl/blob/v2.30.7-1/src/proxy.cc)), and end what shares with the communicator.
    pub(super) fn begin(what: String, raw: Arc<NcclComm>) -> Ending {
        let (told, has_ended) = mpsc::channel();
        let (name, until) = (what.clone(), Instant::now() + LIMIT);
        aside(Some(until), move || {
            match raw.deregister_all() {
                Ok(()) => raw.destroy(),
                Err(error) => {
                    // Memory that stays registered waits for the end, which must not wait for other ranks then.
                    log::warn!("{name} is aborted, since memory stays registered with it: {error}");
                    raw.abort();
                }
            }
            // Nobody may wait any more.
            _ = told.send(());
        });
        Ending { what, has_ended, until }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let left = self.until.saturating_duration_since(Instant::now());
        if self.has_ended.recv_timeout(left) == Err(mpsc::RecvTimeoutError::Timeout) {
            log::warn!(
                "{} has not ended within {LIMIT:?}: other ranks have not taken what they were sent, or not left",
                self.what
            );
        }
    }
}

/// Gives a communicator up.
pub(super) fn abort_aside(raw: Arc<NcclComm>) {
    // Where graphs hold it, it ends when the program destroys them, which may be never.
    let until = (!raw.is_held()).then(Instant::now);
    aside(until, move || raw.abort());
}

/// Ends a communicator of which nothing was called, so that nobody counts on it.
pub(super) fn destroy_aside(raw: Arc<NcclComm>) {
    aside(Some(Instant::now()), move || raw.destroy());
}

/// Ends a communicator on a thread of its own. The end of the process waits for it until then, and [for a while](wait_for_all) anyway;
/// not at all for none.
fn aside(until: Option<Instant>, end: impl FnOnce() + Send + 'static) {
    let running = until.map(Running::new);
    let run = move || {
        let _running = running;
        // The library frees memory here, which must not spoil a capture of another thread.
        let _relaxed = Relaxed::enter().inspect_err(|error| log::warn!("captures may be spoilt: {error}"));
        end();
    };
    if let Err(error) = sync::spawn("ncclx_rs vendor", run) {
        log::warn!("a communicator of the vendor's library stays: there is no thread to end it: {error}");
    }
}

/// The threads of a process that end communicators: until when the end of the process waits for each.
#[derive(Default)]
struct Threads {
    running: Mutex<Vec<Instant>>,
    /// Notified when one has ended.
    ended: Condvar,
}

static THREADS: PerProcess<Threads> = PerProcess::unset();

/// A thread that ends a communicator.
struct Running(Instant);

impl Running {
    fn new(until: Instant) -> Running {
        lock(&THREADS.get().running).push(until);
        Running(until)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let threads = THREADS.get();
        let mut running = lock(&threads.running);
        if let Some(own) = running.iter().position(|until| *until == self.0) {
            running.swap_remove(own);
        }
        threads.ended.notify_all();
    }
}

/// At the end of the process: waits until no thread ends a communicator any more, as long as somebody may still count on one, and for so
/// long at least. Whether none does.
pub(crate) fn wait_for_all(least: Duration) -> bool {
    let (threads, begin) = (THREADS.get(), Instant::now());
    let mut running = lock(&threads.running);
    while let Some(last) = running.iter().max() {
        let left = (*last).max(begin + least).saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        running = threads.ended.wait_timeout(running, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "its threads stay")]
    fn the_end_of_the_process_waits_for_threads_that_end_communicators() {
        let (go_on, may_go_on) = mpsc::channel();
        let run = Running::new(Instant::now());
        let thread = std::thread::spawn(move || {
            let _running = run;
            may_go_on.recv().expect("the test tells");
        });
        assert!(!wait_for_all(Duration::ZERO), "it is over, and nobody counts on it");
        go_on.send(()).expect("the thread listens");
        assert!(wait_for_all(Duration::from_secs(1000)));
        thread.join().expect("no panic");
        let until = Instant::now() + Duration::from_millis(20);
        let _stuck = Running::new(until);
        assert!(!wait_for_all(Duration::ZERO));
        assert!(Instant::now() >= until, "somebody counted on it until then");
    }
}
