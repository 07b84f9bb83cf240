//! What long messages cost that came one way: through the ring, or by a single copy.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::engine::completion::OpId;
use crate::engine::recv_buffer::Timed;

/// How a message gets into the receiver's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copying {
    /// The sender copies it into the ring, the receiver out of it.
    Ring,
    /// The receiver reads it where it lies.
    Single,
}

impl Copying {
    pub(super) fn other(self) -> Copying {
        match self {
            Copying::Ring => Copying::Single,
            Copying::Single => Copying::Ring,
        }
    }
}

/// What a message costs, in picoseconds a byte.
pub(super) type Cost = u32;

/// What comes one way at a time: the messages of an operation, or those of several that are in flight together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// It is the so many'th.
    pub(super) number: u64,
    pub(super) copying: Copying,
    /// The last operation.
    pub(super) op: Option<OpId>,
    /// The messages that are to come, and that have come.
    pub(super) chosen: u32,
    pub(super) came: u32,
    pub(super) bytes: u64,
    pub(super) took: Duration,
    /// When a message came last, of this sample or of one before.
    pub(super) end: Option<Instant>,
}

impl Sample {
    pub(super) fn new(number: u64, copying: Copying, end: Option<Instant>) -> Sample {
        Sample { number, copying, op: None, chosen: 0, came: 0, bytes: 0, took: Duration::ZERO, end }
    }

    /// Whether another operation begins another sample. Messages of operations that were given up never come.
    pub(super) fn is_over(&self) -> bool {
        self.came == self.chosen || self.chosen >= IN_FLIGHT_MAX
    }

    /// A message has come. While others came it was not its turn.
    pub(super) fn add(&mut self, timed: Timed, len: usize, now: Instant) {
        let begin = self.end.map_or(timed.since, |end| end.max(timed.since));
        self.end = Some(now);
        if timed.sample == self.number {
            self.took += now.saturating_duration_since(begin);
            self.bytes += len as u64;
            self.came += 1;
        }
    }

    pub(super) fn cost(&self) -> Option<Cost> {
        let cost = (self.took.as_nanos() * 1000).checked_div(u128::from(self.bytes))?;
        Some(Cost::try_from(cost).unwrap_or(Cost::MAX))
    }
}

/// What some operations whose messages came one way have cost, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Costs(pub(super) SmallVec<[Cost; TRIAL_MAX]>);

impl Costs {
    pub(super) fn add(&mut self, cost: Cost) {
        let place = self.0.partition_point(|other| *other < cost);
        self.0.insert(place, cost);
    }

    /// Those during which no thread was off its core, as far as can be told. A way that has many of the others is not fast.
    pub(super) fn undisturbed(&self) -> &[Cost] {
        let most = self.0.first().map_or(Cost::MAX, |least| least.saturating_mul(DISTURBED_FACTOR));
        let count = self.0.partition_point(|cost| *cost <= most);
        &self.0[..count.max(self.0.len() - self.0.len() / DISTURBED_ONE_IN)]
    }

    pub(super) fn extend(&mut self, cost: Option<Cost>) {
        cost.into_iter().for_each(|cost| self.add(cost));
    }

    pub(super) fn median(&self) -> Option<Cost> {
        self.0.get(self.0.len() / 2).copied()
    }

    pub(super) fn mean(&self) -> Cost {
        let counted = self.undisturbed();
        (counted.iter().map(|cost| u64::from(*cost)).sum::<u64>() / counted.len().max(1) as u64) as Cost
    }

    /// Whether each of these is less than each of `others`, and there are enough of both.
    pub(super) fn are_below(&self, others: &Costs) -> bool {
        self.0.len() >= TRIAL_MIN && others.0.len() >= TRIAL_MIN && self.undisturbed().last() < others.0.first()
    }

    pub(super) fn are_complete(&self) -> bool {
        self.0.len() >= TRIAL_MAX
    }
}

/// How many operations go each way in a trial: so many if all are faster one way, and at most.
pub(super) const TRIAL_MIN: usize = 4;
pub(super) const TRIAL_MAX: usize = 16;

/// One that took so many times as long as another one was held up.
pub(super) const DISTURBED_FACTOR: Cost = 8;

/// One in so many is left out for that at most.
pub(super) const DISTURBED_ONE_IN: usize = 4;

/// So many messages of different operations make a sample at most.
pub(super) const IN_FLIGHT_MAX: u32 = 64;
