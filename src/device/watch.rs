//! The thread of a process that watches what is in flight on its devices.
//!
//! While something is in flight it looks ten times a second; else it sleeps. It never calls the driver. What communicators
//! have left is given back by a thread of its own, once nothing is in flight: calls that free memory wait for the device, and so
//! perhaps for an operation that is put on it meanwhile, which only the watch can end if it fails.

use std::any::Any;
use std::time::{Duration, Instant};

use crate::device::in_flight::{InFlight, Look};
use crate::sync::{self, Arc, Condvar, Mutex, lock};
use crate::sys::fork::PerProcess;

#[derive(Default)]
struct Watch {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    watched: Vec<Arc<InFlight>>,
    left: Vec<Left>,
    is_running: bool,
}

/// What a communicator has left, and what it had in flight.
struct Left {
    in_flight: Arc<InFlight>,
    memory: Box<dyn Any + Send>,
}

impl Left {
    /// Gives it back, if the device does not use it any more.
    fn give_back(self) {
        if self.in_flight.is_stuck() {
            log::warn!("an operation on a device has not ended: its memory is not given back");
            std::mem::forget(self.memory);
        }
    }
}

static WATCH: PerProcess<Arc<Watch>> = PerProcess::unset();

/// Watches what is in flight until nothing is.
pub(crate) fn watch(in_flight: &Arc<InFlight>) -> std::io::Result<()> {
    in_flight.is_watched_by(look_soon);
    with(|state| state.watched.push(in_flight.clone()))
}

/// Looks at everything at once, and then as often as what is in flight asks for.
fn look_soon() {
    let watch = WATCH.get();
    // Under the lock, so that the thread is either waiting or yet to look.
    let state = lock(&watch.state);
    watch.changed.notify_one();
    drop(state);
}

/// Drops what holds memory of a device, once nothing is in flight in this process. Where an operation has not ended although
/// it failed long ago, the memory stays.
pub(crate) fn reap(in_flight: Arc<InFlight>, memory: Box<dyn Any + Send>) -> std::io::Result<()> {
    with(|state| state.left.push(Left { in_flight, memory }))
}

fn with(change: impl FnOnce(&mut State)) -> std::io::Result<()> {
    let watch = WATCH.get();
    let mut state = lock(&watch.state);
    change(&mut state);
    if !state.is_running {
        let watch = watch.clone();
        sync::spawn("ncclx_rs device", move || watch.run())?;
        state.is_running = true;
    }
    drop(state);
    watch.changed.notify_one();
    Ok(())
}

impl Watch {
    fn run(&self) {
        let mut next = Look::Never;
        loop {
            let mut state = lock(&self.state);
            state = match next {
                Look::Never => {
                    if state.watched.is_empty() && state.left.is_empty() {
                        self.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner)
                    } else {
                        state
                    }
                }
                Look::Later => self.wait(state, INTERVAL),
                Look::Soon => self.wait(state, RELEASE_INTERVAL),
            };
            let mut watched = std::mem::take(&mut state.watched);
            drop(state);
            let now = Instant::now();
            next = Look::Never;
            watched.retain(|in_flight| {
                let look = in_flight.tick(now);
                next = match (next, look) {
                    (Look::Soon, _) | (_, Look::Soon) => Look::Soon,
                    (Look::Later, _) | (_, Look::Later) => Look::Later,
                    _ => Look::Never,
                };
                look != Look::Never
            });
            let mut state = lock(&self.state);
            state.watched.append(&mut watched);
            let left = if state.watched.is_empty() { std::mem::take(&mut state.left) } else { Vec::new() };
            drop(state);
            give_back(left);
        }
    }

    /// Waits, but not for the whole time if something is submitted anew: what is watched is looked at early then.
    fn wait<'a>(&self, state: sync::MutexGuard<'a, State>, time: Duration) -> sync::MutexGuard<'a, State> {
        self.changed.wait_timeout(state, time).unwrap_or_else(std::sync::PoisonError::into_inner).0
    }
}

/// Gives back what communicators have left, on a thread of its own.
fn give_back(left: Vec<Left>) {
    if left.is_empty() {
        return;
    }
    let number = left.len();
    if let Err(error) = sync::spawn("ncclx_rs reaper", move || left.into_iter().for_each(Left::give_back)) {
        log::warn!("what {number} communicator(s) had on a device goes now, as there is no thread for it: {error}");
    }
}

/// How often it looks while something is in flight.
const INTERVAL: Duration = Duration::from_millis(100);

/// How often it looks while a stream is released.
const RELEASE_INTERVAL: Duration = Duration::from_millis(1);
