//! Waits in CUDA graphs, as the host sees them, and how the watch ends those that cannot go on.
//!
//! A stream says by a word in which operation of a graph it is. The watch marks the value that it finds there, so that it tells
//! a wait from the same wait in a later replay. If the other rank will never do its part, or not in time, the watch lets the
//! stream pass, now and in all later replays of the graph; what these compute is no result.

use std::any::Any;
use std::time::{Duration, Instant};

use crate::device::control::{far, is_reached};
use crate::device::graph_mark::GraphMark;
use crate::device::in_flight::{Look, Runner, Watched};
use crate::device::vendor::VendorComm;
use crate::device::watch::{Left, Replayed};
use crate::error::Error;
use crate::sync::{Arc, AtomicU64, Mutex, Ordering, lock};
use crate::sys::cuda::{CudaError, Current, Stream, Width};
use crate::sys::words::SharedWords;
use crate::types::Rank;

/// What a wait belongs to: accesses to windows, or messages. Each fails with the other.
pub(crate) trait Home: Send + Sync {
    /// Why `peer` will do nothing more for an operation in a graph, or why this rank itself does nothing more.
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
    /// The library whose calls it is in, in place of waits for words.
    pub(crate) library: Option<Arc<VendorComm>>,
    pub(crate) home: Arc<dyn Home>,
}

/// The waits of one graph, as one rank of a communicator has captured them.
pub(crate) struct GraphWaits {
    comm: String,
    /// Set when the graph is gone.
    mark: GraphMark,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waits: Vec<GraphWait>,
    /// By wait, since when the watch has found its stream in it.
    found: Vec<Option<Instant>>,
    is_broken: bool,
    /// What must stay while a replay runs, with the place that it belongs to, if it belongs to one.
    kept: Vec<(Option<usize>, Box<dyn Any + Send>)>,
}

impl GraphWaits {
    pub(crate) fn new(comm: String) -> Arc<GraphWaits> {
        Arc::new(GraphWaits { comm, mark: GraphMark::default(), state: Mutex::default() })
    }

    /// Has the mark set once the graph is gone that `stream` is captured for.
    pub(crate) fn belong(&self, current: &Current<'_>, stream: &Stream) -> Result<(), CudaError> {
        self.mark.belong(current, stream)
    }

    /// Whether its graph is still there.
    pub(crate) fn lives(&self) -> bool {
        self.mark.lives()
    }

    /// Notes a wait, before it can run.
    pub(crate) fn note(&self, wait: GraphWait) {
        let mut state = lock(&self.state);
        state.found.push(None);
        state.waits.push(wait);
    }

    /// Notes that its graph has calls of a library.
    pub(crate) fn holds(&self, library: &VendorComm) {
        library.hold(self.mark.shared());
    }

    /// Keeps something for as long as the graph is there.
    pub(crate) fn keep(&self, kept: impl Any + Send) {
        lock(&self.state).kept.push((None, Box::new(kept)));
    }

    /// Keeps something of a place, if nothing of that place is kept.
    pub(crate) fn keep_for<T: Any + Send>(&self, place: usize, kept: impl FnOnce() -> T) {
        if !self.keeps(place) {
            lock(&self.state).kept.push((Some(place), Box::new(kept())));
        }
    }

    /// Whether the graph is there and something of a place kept.
    pub(crate) fn keeps(&self, place: usize) -> bool {
        self.lives() && lock(&self.state).kept.iter().any(|(of, _)| *of == Some(place))
    }
}

impl GraphWait {
    fn word(&self, index: usize) -> &AtomicU64 {
        self.words.word(index)
    }

    /// Whether its stream is in the operation.
    fn is_on(&self) -> bool {
        self.word(self.busy).load(Ordering::Acquire) & !SEEN == self.operation
    }

    /// Whether a word has not come to its value yet, or the stream is still in a library's calls.
    fn is_behind(&self) -> bool {
        if self.library.is_some() {
            return self.is_on();
        }
        let has_come =
            |(word, value): &(usize, u64)| is_reached(self.word(*word).load(Ordering::Acquire), *value, self.width);
        !self.awaits.iter().all(has_come)
    }

    /// Since when the watch has seen its stream wait here, if it waits. Marks the stream's word.
    fn seen(&self, before: Option<Instant>, now: Instant) -> Option<Instant> {
        let (busy, seen) = (self.word(self.busy), self.operation | SEEN);
        let mark = || busy.compare_exchange(self.operation, seen, Ordering::AcqRel, Ordering::Acquire);
        let since = match mark() {
            Ok(_) => now,
            Err(found) if found == seen => before.unwrap_or(now),
            Err(_) => return None,
        };
        // Streams reset the words that they have waited for, so this holds only if the stream is still in there.
        (self.is_behind() && busy.load(Ordering::Acquire) == seen).then_some(since)
    }

    fn timeout(&self, waited: Duration) -> Error {
        let detail = format!("in a replay of a graph: rank {} {}", self.peer, self.missing);
        Error::Timeout { operation: self.call.clone(), waited, detail }
    }

    /// Why the wait will not end, if so.
    fn obstacle(&self, waited: Duration) -> Option<Error> {
        let late = || (waited >= self.limit).then(|| self.timeout(waited));
        let failed = || {
            let cause = self.library.as_ref()?.failure()?;
            Some(Error::Device { operation: self.call.clone(), cause })
        };
        // The other rank may have left once it has done its part, which the library may still be about to end here.
        if self.library.is_some() && waited.is_zero() {
            return None;
        }
        let error = self.home.obstacle(&self.call, self.peer).or_else(failed).or_else(late)?;
        // A rank that has left may have done its part before.
        self.is_behind().then_some(error)
    }

    /// Lets its stream pass. To be repeated, as [`Control::release`](crate::device::control::Control::release).
    fn release(&self) {
        if let Some(library) = &self.library {
            library.give_up();
        }
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
            // Fails every home of the graph's waits, before anything wrong reaches another rank.
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
        Some(Left::new(in_flight, Box::new(std::mem::take(&mut state.kept))))
    }
}

/// The bit by which the watch marks a stream's word.
const SEEN: u64 = 1 << 31;

/// The numbers of operations in graphs.
#[derive(Debug, Default)]
pub(crate) struct Numbers(u64);

impl Numbers {
    /// The next one. Numbers begin anew after more than a graph can have.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0 % (SEEN - 1) + 1;
        self.0
    }
}
