//! Waits in CUDA graphs, as the host sees them: how those end in a replay that cannot go on.
//!
//! A stream says by a word that it is in an operation of a graph, and in which. The watch marks what it finds there, so that it
//! tells a wait from the same one in a later replay. If what is waited for will never come, or not in time, it lets the stream
//! pass, now and in all later replays of the graph; what these compute is no result.

use std::any::Any;
use std::time::{Duration, Instant};

use crate::device::control::{far, is_reached};
use crate::device::in_flight::{Look, Watched};
use crate::device::watch::{Left, Replayed};
use crate::error::Error;
use crate::sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering, lock};
use crate::sys::cuda::{CudaError, Current, Stream, Width};
use crate::sys::words::SharedWords;
use crate::types::Rank;

/// To whom a wait belongs: what fails it, and what fails with it.
pub(crate) trait Home: Send + Sync {
    /// Why a rank will do nothing more for an operation in a graph, or why this rank itself does nothing more.
    fn obstacle(&self, call: &str, peer: Rank) -> Option<Error>;

    /// Lets nothing more succeed, and tells the other ranks.
    fn fail(&self, error: Error);

    /// What is in flight beside graphs.
    fn in_flight(self: Arc<Self>) -> Arc<dyn Watched>;
}

/// A wait in a graph, for one other rank.
pub(crate) struct GraphWait {
    /// The number of the operation, which its stream writes.
    pub(crate) operation: u64,
    pub(crate) call: String,
    pub(crate) limit: Duration,
    pub(crate) words: Arc<SharedWords>,
    pub(crate) width: Width,
    /// The number of the word that tells where the stream is.
    pub(crate) busy: usize,
    /// The words that it waits for, with the greatest values.
    pub(crate) awaits: Vec<(usize, u64)>,
    /// The rank that writes them.
    pub(crate) peer: Rank,
    /// What that rank has not done, for the error of a time limit.
    pub(crate) missing: &'static str,
    pub(crate) home: Arc<dyn Home>,
}

/// The waits of one graph, as one rank of a communicator has captured them.
pub(crate) struct GraphWaits {
    comm: String,
    /// Set when the graph is gone.
    mark: Arc<AtomicBool>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waits: Vec<GraphWait>,
    /// By wait, since when its stream was found in it.
    found: Vec<Option<Instant>>,
    is_broken: bool,
    /// What must not go while a replay runs, by the place that it belongs to, if it belongs to one.
    kept: Vec<(Option<usize>, Box<dyn Any + Send>)>,
}

impl GraphWaits {
    /// None yet.
    pub(crate) fn new(comm: String) -> Arc<GraphWaits> {
        Arc::new(GraphWaits { comm, mark: Arc::default(), state: Mutex::default() })
    }

    /// Lives until the graph is gone that a stream is captured for.
    pub(crate) fn belong(&self, current: &Current<'_>, stream: &Stream) -> Result<(), CudaError> {
        stream.mark_end_of_graph(current, &self.mark)
    }

    /// Whether its graph is still there.
    pub(crate) fn lives(&self) -> bool {
        // Partner: the driver's thread that sets it.
        !self.mark.load(Ordering::Acquire)
    }

    /// Notes a wait, before it can run.
    pub(crate) fn note(&self, wait: GraphWait) {
        let mut state = lock(&self.state);
        state.found.push(None);
        state.waits.push(wait);
    }

    /// Keeps something for as long as the graph is there.
    pub(crate) fn keep(&self, kept: impl Any + Send) {
        lock(&self.state).kept.push((None, Box::new(kept)));
    }

    /// The same, of a place of which it keeps nothing yet.
    pub(crate) fn keep_for<T: Any + Send>(&self, place: usize, kept: impl FnOnce() -> T) {
        if !self.keeps(place) {
            lock(&self.state).kept.push((Some(place), Box::new(kept())));
        }
    }

    /// Whether it keeps something of a place.
    pub(crate) fn keeps(&self, place: usize) -> bool {
        self.lives() && lock(&self.state).kept.iter().any(|(of, _)| *of == Some(place))
    }
}

impl GraphWait {
    fn word(&self, index: usize) -> &AtomicU64 {
        self.words.word(index)
    }

    /// Whether its stream is in it.
    fn is_on(&self) -> bool {
        self.word(self.busy).load(Ordering::Acquire) & !SEEN == self.operation
    }

    /// Whether something has not come yet.
    fn is_behind(&self) -> bool {
        let has_come =
            |(word, value): &(usize, u64)| is_reached(self.word(*word).load(Ordering::Acquire), *value, self.width);
        !self.awaits.iter().all(has_come)
    }

    /// Since when its stream has been seen waiting, if it waits; marks it.
    fn seen(&self, before: Option<Instant>, now: Instant) -> Option<Instant> {
        let (busy, seen) = (self.word(self.busy), self.operation | SEEN);
        let mark = || busy.compare_exchange(self.operation, seen, Ordering::AcqRel, Ordering::Acquire);
        let since = match mark() {
            Ok(_) => now,
            Err(found) if found == seen => before.unwrap_or(now),
            Err(_) => return None,
        };
        // Streams take back what they have waited for, so this holds only if it is still in there.
        (self.is_behind() && busy.load(Ordering::Acquire) == seen).then_some(since)
    }

    fn timeout(&self, waited: Duration) -> Error {
        let detail = format!("in a replay of a graph: rank {} {}", self.peer, self.missing);
        Error::Timeout { operation: self.call.clone(), waited, detail }
    }

    /// Why it will not end, if so.
    fn obstacle(&self, waited: Duration) -> Option<Error> {
        let late = || (waited >= self.limit).then(|| self.timeout(waited));
        let error = self.home.obstacle(&self.call, self.peer).or_else(late)?;
        // A rank that has left may have done its part before.
        self.is_behind().then_some(error)
    }

    /// Lets its stream pass. To be repeated, as for [`Control`](crate::device::control::Control).
    fn release(&self) {
        for (word, value) in &self.awaits {
            self.word(*word).store(far(*value, self.width), Ordering::Release);
        }
    }
}

impl Replayed for GraphWaits {
    fn tick(&self, now: Instant) -> Look {
        let mut state = lock(&self.state);
        let State { waits, found, is_broken, .. } = &mut *state;
        let mut error = None;
        for (wait, since) in waits.iter().zip(found) {
            *since = wait.seen(*since, now);
            error = error.or_else(|| since.filter(|_| !*is_broken).and_then(|since| wait.obstacle(now - since)));
        }
        if let Some(error) = error {
            log::warn!(
                "communicator `{}`: a CUDA graph's replay cannot go on, and what it computes is undefined, now and later: {error}",
                self.comm
            );
            // All that the graph tells others of, before anything wrong reaches one of them.
            waits.iter().for_each(|wait| wait.home.fail(error.clone()));
            *is_broken = true;
        }
        let passing = waits.iter().filter(|wait| *is_broken && wait.is_on());
        passing.fold(Look::Later, |_, wait| {
            wait.release();
            Look::Soon
        })
    }

    fn is_busy(&self) -> bool {
        lock(&self.state).waits.iter().any(GraphWait::is_on)
    }

    fn take(&self) -> Option<Left> {
        if self.lives() {
            return None;
        }
        let mut state = lock(&self.state);
        let in_flight = state.waits.drain(..).map(|wait| wait.home.in_flight()).collect();
        Some(Left { in_flight, memory: Box::new(std::mem::take(&mut state.kept)) })
    }
}

/// What the watch adds to a stream's word.
const SEEN: u64 = 1 << 31;

/// The numbers of operations in graphs.
#[derive(Debug, Default)]
pub(crate) struct Numbers(u64);

impl Numbers {
    /// The next one. They begin anew after more than a graph can have.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0 % (SEEN - 1) + 1;
        self.0
    }
}
