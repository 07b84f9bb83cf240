//! The same decision for collectives in which a rank that sends a long message takes others at the same time.
//!
//! Through the ring, such a message takes time of its sender that the sender's own messages want. If one rank tried the ring while the
//! others read, it would find the ring slow and reading fast, and so would each of the others: all would read, though all may be faster
//! through the ring. So ranks try each way at the same time. None tells another: all count the same collectives, and the count says
//! what is tried when. After one that has failed, which may not have begun everywhere, they begin to count anew.

use super::sample::{Copying, Cost, Costs, Sample};
use crate::engine::completion::OpId;

/// Decides for the messages of one rank in collectives of one size.
#[derive(Debug)]
pub(super) struct InStep {
    /// How many have begun.
    operations: u64,
    kept: Copying,
    /// What each way cost in the trial before, in the order of [`Copying`].
    pub(super) costs: [Option<Cost>; 2],
    /// What it costs in this one.
    seen: [Costs; 2],
    pub(super) sample: Sample,
}

impl InStep {
    /// `first` is kept until something is known.
    pub(super) fn new(first: Copying) -> InStep {
        let sample = Sample::new(0, first, None);
        InStep { operations: 0, kept: first, costs: [None; 2], seen: Default::default(), sample }
    }

    /// A message of `op` is to come.
    pub(super) fn begin(&mut self, op: OpId) {
        if self.sample.op != Some(op) {
            let before = self.place();
            if before.is_some_and(is_tried) && self.sample.is_over() {
                self.seen[self.sample.copying as usize].extend(self.sample.cost());
            }
            self.operations += 1;
            if before == Some(TRIAL - 1) {
                self.compare();
            }
            self.sample = Sample::new(self.sample.number + 1, self.next(), self.sample.end);
        }
        self.sample.op = Some(op);
        self.sample.chosen += 1;
    }

    /// Where the present operation is among those from one trial to the next; none has begun before the first.
    fn place(&self) -> Option<u64> {
        self.operations.checked_sub(1).map(|index| index % PERIOD)
    }

    /// How the messages of the present operation come.
    pub(super) fn next(&self) -> Copying {
        match self.place() {
            Some(place) if is_tried(place) && place.is_multiple_of(2) => Copying::Ring,
            Some(place) if is_tried(place) => Copying::Single,
            _ => self.kept,
        }
    }

    /// Keeps the way that is clearly faster: where there is little between them, ranks might decide differently.
    fn compare(&mut self) {
        self.costs = std::mem::take(&mut self.seen).map(|costs| costs.median());
        if let [Some(ring), Some(single)] = self.costs {
            let is_clear = |less: Cost, more: Cost| u64::from(less) * 10 < u64::from(more) * 9;
            if is_clear(ring, single) {
                self.kept = Copying::Ring;
            } else if is_clear(single, ring) {
                self.kept = Copying::Single;
            }
        }
    }
}

fn is_tried(place: u64) -> bool {
    place < TRIAL
}

/// So many operations of each [`PERIOD`] try both ways in turn: the first ones.
const TRIAL: u64 = 16;

/// From the beginning of a trial to that of the next one. A way that costs ten times as much is tried by less than one in 500.
const PERIOD: u64 = 4096;
