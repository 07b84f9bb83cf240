//! The threads of a process that see to its devices: the watch looks at operations in flight, the reaper gives memory back.
//!
//! While something is in flight the watch looks ten times a second, and every millisecond while a stream has to be released or
//! a caller wants to learn of an end soon; else it sleeps. It never calls the driver. The reaper gives back what communicators
//! have left, once nothing is in flight. Calls that free memory wait for the device, and so perhaps for an operation that is
//! put on it meanwhile: if that fails, only the watch can end it. Both threads run from the first setup on, before anything is
//! in flight. Communicators of a vendor's library, which wait for other ranks as they end, the watch has end all at once, and the
//! reaper waits for each before its memory goes.

use std::any::Any;
use std::sync::Once;
use std::time::{Duration, Instant};

use crate::device::in_flight::{Look, Runner, Watched};
use crate::device::vendor::VendorComm;
use crate::device::vendor::ending::{self, Ending, Leaving};
use crate::sync::{self, Arc, AtomicBool, Condvar, Mutex, MutexGuard, Ordering, lock};
use crate::sys::cuda::Relaxed;
use crate::sys::exit::at_exit;
use crate::sys::fork::PerProcess;

#[derive(Default)]
struct Watch {
    state: Mutex<State>,
    /// Notified when something is to be watched, or has been left.
    changed: Condvar,
    /// Notified when something can be given back, or has been.
    turned: Condvar,
}

#[derive(Default)]
struct State {
    watched: Vec<Arc<dyn Watched>>,
    graphs: Vec<Arc<dyn Replayed>>,
    left: Vec<Left>,
    /// What can be given back now.
    idle: Vec<Left>,
    is_giving_back: bool,
    is_ending: bool,
    /// Whether all that was left before the process ends, and is not in flight, can be given back.
    is_sorted: bool,
    is_watching: bool,
    has_reaper: bool,
}

/// A part of a graph, which runs without being submitted.
pub(crate) trait Replayed: Send + Sync {
    /// Looks how far it is.
    fn tick(&self, now: Instant) -> Look;

    /// Whether it runs.
    fn is_busy(&self) -> bool;

    /// What is to be given back once it will not run any more; returned only once.
    fn take(&self) -> Option<Left>;
}

/// What a communicator has left, and what it had in flight.
pub(crate) struct Left {
    in_flight: Vec<Arc<dyn Watched>>,
    /// What ends before the memory goes, and the ends that have begun.
    libraries: Vec<Arc<VendorComm>>,
    endings: Vec<Ending>,
    memory: Box<dyn Any + Send>,
}

impl Left {
    pub(crate) fn new(in_flight: Vec<Arc<dyn Watched>>, memory: Box<dyn Any + Send>) -> Left {
        Left { in_flight, libraries: Vec::new(), endings: Vec::new(), memory }
    }

    /// Whether an operation has not ended on the device although it failed long ago.
    fn is_stuck(&self) -> bool {
        self.in_flight.iter().any(|in_flight| in_flight.is_stuck())
    }

    /// Has the communicators of a library end.
    fn begin_to_end(&mut self) {
        if !self.is_stuck() {
            self.endings = self.libraries.iter().filter_map(|library| library.end()).collect();
        }
    }

    /// Gives the memory back, unless an operation that has not ended may use it.
    fn give_back(self) {
        if self.is_stuck() {
            log::warn!("an operation on a device has not ended: its memory is not given back");
            std::mem::forget(self.memory);
        }
    }
}

static WATCH: PerProcess<Arc<Watch>> = PerProcess::unset();

/// Begins the threads, if they are not there yet.
///
/// # Errors
/// The system cannot start a thread.
pub(crate) fn begin() -> std::io::Result<()> {
    // A forked child inherits the registration from its parent, which does no harm.
    static AT_EXIT: Once = Once::new();
    WATCH.get().begin()?;
    end_with_the_process(&AT_EXIT)
}

/// Has [`end`] called when the process ends, unless this was done.
fn end_with_the_process(once: &Once) -> std::io::Result<()> {
    let mut registered = Ok(());
    once.call_once(|| registered = at_exit(end));
    registered
}

/// Watches operations until none is in flight. The threads have [begun](begin).
pub(crate) fn watch(in_flight: Arc<dyn Watched>) {
    in_flight.is_watched_by(look_soon);
    WATCH.get().watch(in_flight);
}

/// Has the watch look at once, and then as often as the operations in flight ask for.
fn look_soon() {
    let watch = WATCH.get();
    // Under the lock, so that the watch is either waiting or yet to look.
    let state = lock(&watch.state);
    watch.changed.notify_one();
    drop(state);
}

/// Watches a part of a graph until that is gone. The threads have [begun](begin).
pub(crate) fn watch_graph(graph: Arc<dyn Replayed>) {
    WATCH.get().watch_graph(graph);
}

/// Has the reaper drop what holds memory of a device, once nothing is in flight in this process. Where an operation of a lane that
/// uses it has not ended although it failed long ago, the memory stays. The threads have [begun](begin).
pub(crate) fn reap(in_flight: Vec<Arc<dyn Watched>>, memory: Box<dyn Any + Send>) {
    WATCH.get().reap(Left::new(in_flight, memory));
}

/// As [`reap`], of a communicator that leaves these of a vendor's library. They end before the memory goes.
pub(crate) fn reap_with(
    libraries: Vec<Arc<VendorComm>>,
    leaving: Leaving,
    in_flight: Vec<Arc<dyn Watched>>,
    memory: Box<dyn Any + Send>,
) {
    // What runs at the process's end runs in the reverse order: this before what the library, loaded by now, does then.
    static BEFORE_LIBRARIES: Once = Once::new();
    if let Err(error) = end_with_the_process(&BEFORE_LIBRARIES) {
        log::warn!("the end of the process may not wait for a vendor's library: {error}");
    }
    if leaving == Leaving::AfterFailure {
        libraries.iter().for_each(|library| library.give_up());
    }
    WATCH.get().reap(Left { libraries, ..Left::new(in_flight, memory) });
}

/// The process ends: the driver goes now, and must not be called any more.
extern "C" fn end() {
    static HAS_ENDED: AtomicBool = AtomicBool::new(false);
    // Relaxed: one thread ends the process.
    if !HAS_ENDED.swap(true, Ordering::Relaxed) {
        WATCH.get().end(END_TIMEOUT);
    }
}

impl Watch {
    fn begin(self: &Arc<Self>) -> std::io::Result<()> {
        let mut state = lock(&self.state);
        if !state.is_watching {
            let watch = self.clone();
            sync::spawn("ncclx_rs device", move || watch.run())?;
            state.is_watching = true;
        }
        if !state.has_reaper {
            let watch = self.clone();
            sync::spawn("ncclx_rs reaper", move || watch.give_back())?;
            state.has_reaper = true;
        }
        Ok(())
    }

    fn watch(&self, in_flight: Arc<dyn Watched>) {
        lock(&self.state).watched.push(in_flight);
        self.changed.notify_one();
    }

    fn watch_graph(&self, graph: Arc<dyn Replayed>) {
        lock(&self.state).graphs.push(graph);
        self.changed.notify_one();
    }

    fn reap(&self, left: Left) {
        lock(&self.state).left.push(left);
        self.changed.notify_one();
    }

    fn run(&self) {
        let mut next = Look::Never;
        loop {
            let mut state = lock(&self.state);
            state = match pause(next) {
                Some(time) => wait_for(&self.changed, state, time),
                None if state.has_nothing_to_see() => wait(&self.changed, state),
                None => state,
            };
            let is_ending = state.is_ending;
            let (mut watched, mut graphs) = (std::mem::take(&mut state.watched), std::mem::take(&mut state.graphs));
            drop(state);
            let now = Instant::now();
            next = Look::Never;
            watched.retain(|in_flight| {
                let look = in_flight.tick(now);
                next = next.max(look);
                look != Look::Never
            });
            let mut gone = Vec::new();
            graphs.retain(|graph| {
                next = next.max(graph.tick(now));
                let taken = graph.take();
                let stays = taken.is_none();
                gone.extend(taken);
                stays
            });
            let is_idle = !graphs.iter().any(|graph| graph.is_busy());
            let mut state = lock(&self.state);
            state.watched.append(&mut watched);
            state.graphs.append(&mut graphs);
            state.left.append(&mut gone);
            let is_idle = is_idle && state.watched.is_empty();
            let mut left = if is_idle { std::mem::take(&mut state.left) } else { Vec::new() };
            if !left.is_empty() || is_ending {
                drop(state);
                // All at once, since each may wait for other ranks.
                left.iter_mut().for_each(Left::begin_to_end);
                let mut state = lock(&self.state);
                state.idle.append(&mut left);
                state.is_sorted = is_ending;
                self.turned.notify_all();
            }
        }
    }

    /// Runs the reaper.
    fn give_back(&self) {
        // Calls that free memory here must not spoil a capture of another thread.
        let _relaxed = Relaxed::enter().inspect_err(|error| log::warn!("captures may be spoilt: {error}"));
        let mut state = lock(&self.state);
        loop {
            if state.is_ending {
                // The process's memory goes with it.
                std::mem::forget(std::mem::take(&mut state.idle));
            }
            if state.idle.is_empty() {
                state = wait(&self.turned, state);
                continue;
            }
            let mut left = state.idle.remove(0);
            state.is_giving_back = true;
            drop(state);
            // Waits for each.
            left.endings.clear();
            if lock(&self.state).is_ending {
                std::mem::forget(left);
            } else {
                left.give_back();
            }
            state = lock(&self.state);
            state.is_giving_back = false;
            self.turned.notify_all();
        }
    }

    /// Has the reaper begin nothing more, and waits until it has left the driver, for `limit` at most: the reaper may wait for
    /// a device that never ends. Before that, has communicators of a library end as ever, which may have bytes to send.
    fn end(&self, limit: Duration) {
        let mut state = lock(&self.state);
        state.is_ending = true;
        self.changed.notify_one();
        drop(state);
        self.wait_until(limit, |state| state.is_sorted || !state.is_watching);
        if !ending::wait_for_all(limit) {
            log::warn!(
                "the process ends before communicators of a vendor's library have: other ranks may miss what they were sent"
            );
        }
        self.wait_until(limit, |state| !state.is_giving_back);
    }

    /// Waits until something is so, for `limit` at most.
    fn wait_until(&self, limit: Duration, is: impl Fn(&State) -> bool) {
        let begin = Instant::now();
        let mut state = lock(&self.state);
        while !is(&state)
            && let Some(left) = limit.checked_sub(begin.elapsed())
        {
            state = wait_for(&self.turned, state, left);
        }
    }
}

impl State {
    fn has_nothing_to_see(&self) -> bool {
        let is_asked = self.is_ending && !self.is_sorted;
        self.watched.is_empty() && self.graphs.is_empty() && self.left.is_empty() && !is_asked
    }
}

fn wait<'a>(changed: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits until something comes, for `time` at most.
fn wait_for<'a>(changed: &Condvar, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
    changed.wait_timeout(state, time).unwrap_or_else(std::sync::PoisonError::into_inner).0
}

/// How long the watch sleeps until it looks again; nothing if it looks only when notified.
fn pause(look: Look) -> Option<Duration> {
    match look {
        Look::Never => None,
        Look::Later => Some(INTERVAL),
        Look::Soon => Some(RELEASE_INTERVAL),
    }
}

/// How often the watch looks while something is in flight.
const INTERVAL: Duration = Duration::from_millis(100);

/// How often it looks while a stream is released, or a caller wants to learn of an end.
const RELEASE_INTERVAL: Duration = Duration::from_millis(1);

/// How long the end of the process waits for the driver. For communicators of a library it waits until their own limit, too.
const END_TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
