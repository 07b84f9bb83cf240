//! Parts of a batch of messages, which are in flight on several lanes and fail together.

use crate::device::counters::Word;
use crate::device::in_flight::{self, Called, Ends, InFlight, closed_by_fork, wait_driving};
use crate::error::Error;
use crate::sync::{Arc, Mutex, OnceLock, lock};
use crate::sys::fork::Origin;
use crate::types::Rank;
use crate::work::{Drive, Work};
use std::fmt;
use std::time::Instant;

/// The messages of a batch between two ranks in one direction.
#[derive(Debug)]
pub(crate) struct BatchPart {
    /// The call, for errors.
    text: String,
    /// The number of the first message. The part has that of the last one.
    first: u64,
    peer: Rank,
    /// `from rank 0 to rank 1`.
    way: String,
    batch: Arc<Batch>,
}

/// A word that a stream waits for: its lane, which it is, and the greatest value.
pub(crate) type Awaited = (usize, Word, u64);

/// What a stream waits for in the lane of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Lateness {
    /// Nothing.
    None,
    /// For the other rank, which has called it, to go on.
    NotFinished,
    /// For the other rank to call it.
    NotCalled,
}

impl BatchPart {
    /// A part of `batch`: messages that go this way, between this rank and `peer`.
    pub(crate) fn new(text: String, first: u64, (from, to): (Rank, Rank), peer: Rank, batch: Arc<Batch>) -> BatchPart {
        BatchPart { text, first, peer, way: format!("from rank {from} to rank {to}"), batch }
    }
}

impl in_flight::Part for BatchPart {
    fn first(&self) -> u64 {
        self.first
    }

    fn lateness(&self, lane: usize, number: u64) -> Option<String> {
        let (way, peer) = (&self.way, self.peer);
        let of_lane = |place: &&PartInFlight| place.peer == peer && place.in_flight.lane().0 == lane;
        let own = self.batch.places().iter().find(of_lane).map_or(Lateness::None, PartInFlight::lateness);
        if own < self.batch.lateness() {
            return None;
        }
        Some(match own {
            Lateness::NotCalled => format!("device message {number} {way}: rank {peer} did not call it"),
            Lateness::NotFinished => {
                format!("device message {number} {way}: both ranks called it; rank {peer} did not finish its part")
            }
            Lateness::None => {
                format!("device message {number} {way}: both ranks did their part, but the stream does not end")
            }
        })
    }

    fn is_released(&self) -> bool {
        self.batch.places().iter().all(|place| place.in_flight.is_released())
    }

    fn started(&self, ends: &dyn Ends, now: Instant) {
        ends.started(&self.batch.works, now);
    }

    fn ended(&self, ends: &dyn Ends, result: Result<(), Error>) {
        self.batch.part_ended(ends, result);
    }

    fn fail_all(&self, error: &Error) {
        self.batch.fail(error);
    }
}

impl From<BatchPart> for Called {
    fn from(part: BatchPart) -> Called {
        Called::Part(Arc::new(part))
    }
}

impl fmt::Display for BatchPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Where a part of a batch is in flight.
#[derive(Clone, Debug)]
pub(crate) struct PartInFlight {
    pub(crate) in_flight: Arc<InFlight>,
    /// The rank at the other end.
    pub(crate) peer: Rank,
    /// The numbers of its first message and of its last one.
    pub(crate) first: u64,
    pub(crate) last: u64,
    pub(crate) awaits: Awaits,
}

/// What the stream of messages waits for.
#[derive(Clone, Debug)]
pub(crate) enum Awaits {
    /// These words.
    Words(Vec<Awaited>),
    /// The other rank, as a vendor's library waits for it.
    Library,
}

impl PartInFlight {
    fn lateness(&self) -> Lateness {
        let (lane, control) = self.in_flight.lane();
        let is_behind =
            |(lane, word, value): &Awaited| !control.behind(*lane, [(*word, *value)].into_iter()).is_empty();
        let is_done = match &self.awaits {
            Awaits::Words(words) => !words.iter().any(is_behind),
            // Only the end at the other rank tells how far a library is.
            Awaits::Library => control.local(self.peer).is_some_and(|peer| control.has_ended(peer, lane, self.last)),
        };
        match is_done {
            true => Lateness::None,
            false if control.has_called(self.peer, lane, self.last) => Lateness::NotFinished,
            false => Lateness::NotCalled,
        }
    }
}

/// A batch of messages: one work, which ends when all parts have ended, with the first error of any.
#[derive(Debug)]
pub(crate) struct Batch {
    /// The caller's first, then those of the other messages.
    works: Vec<Work>,
    left: Mutex<Left>,
    /// Set once, before anything of the batch is in flight.
    places: OnceLock<Vec<PartInFlight>>,
}

#[derive(Debug)]
struct Left {
    parts: usize,
    error: Option<Error>,
}

impl Batch {
    pub(crate) fn new(works: Vec<Work>, parts: usize) -> Arc<Batch> {
        let left = Mutex::new(Left { parts, error: None });
        Arc::new(Batch { works, left, places: OnceLock::new() })
    }

    /// Notes where its parts will be in flight.
    pub(crate) fn place(&self, places: Vec<PartInFlight>) {
        self.places.set(places).expect("said once");
    }

    /// Ends a part. The last one to end also ends the works.
    fn part_ended(&self, ends: &dyn Ends, result: Result<(), Error>) {
        let outcome = {
            let mut left = lock(&self.left);
            left.parts -= 1;
            left.error = left.error.take().or(result.err());
            (left.parts == 0).then(|| left.error.clone().map_or(Ok(()), Err))
        };
        if let Some(outcome) = outcome {
            self.works.iter().for_each(|work| ends.ended(work, outcome.clone()));
        }
    }

    /// What its stream waits for.
    fn lateness(&self) -> Lateness {
        self.places().iter().map(PartInFlight::lateness).max().unwrap_or(Lateness::None)
    }

    /// The handle that its caller has.
    pub(crate) fn work(&self) -> &Work {
        &self.works[0]
    }

    /// Where its parts are in flight.
    pub(crate) fn places(&self) -> &[PartInFlight] {
        self.places.get().map_or(&[], |places| places)
    }

    /// Gives up all its parts, since one has failed, so that the stream which they share runs out.
    pub(crate) fn fail(&self, error: &Error) {
        // Keeps the first cause, which names the message at fault.
        lock(&self.left).error.get_or_insert_with(|| error.clone());
        self.places().iter().for_each(|PartInFlight { in_flight, first, .. }| in_flight.fail_too(*first, error));
    }
}

/// Ends the works of operations that are in flight on several lanes.
pub(crate) struct Several {
    comm: String,
    origin: Origin,
    all: Vec<Arc<InFlight>>,
}

impl Several {
    /// The operations in flight on all of these.
    pub(crate) fn new(comm: String, all: Vec<Arc<InFlight>>) -> Several {
        Several { comm, origin: Origin::here(), all }
    }
}

impl Drive for Several {
    fn poll(&self) {
        if self.origin.is_here() {
            self.all.iter().for_each(|in_flight| in_flight.look());
        }
    }

    fn watch_closely(&self, work: &Work) {
        self.all.iter().for_each(|in_flight| in_flight.watch_closely(work));
    }

    fn drive(&self, work: &Work, deadline: Option<Instant>) {
        if !self.origin.is_here() {
            return closed_by_fork(work, &self.comm);
        }
        wait_driving(work, deadline, || self.poll());
    }
}

#[cfg(test)]
mod tests;
