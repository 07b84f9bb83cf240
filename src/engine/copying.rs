//! Whether a long message within a host goes through the ring or is read where it lies, decided from what messages cost.
//!
//! The ring takes two copies, which overlap piece by piece. Reading takes one, and a call of the system, page by page. Which is
//! faster depends on the processor, on the distance of the cores, on the length, and on where the message is: one that its sender
//! has just written lies in the cache of that core. So the receiver measures how long messages take from when they can come, and
//! chooses for each sender and size of operations. All messages of an operation come the same way, since they wait for each
//! other. No other rank needs to know of it.

use std::time::Instant;

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::engine::completion::OpId;
use crate::engine::recv_buffer::{RecvAction, RecvBuffer, Timed};
use crate::sys::team::Team;
use crate::types::Rank;

use in_step::InStep;
pub(crate) use sample::Copying;
use sample::{Cost, Costs, Sample};

mod in_step;
mod sample;

impl Copying {
    /// The way that is probably the faster. The two copies of the ring overlap, if the sender has nothing else to do.
    pub(crate) fn expected(buffer: &RecvBuffer, is_sender_busy: bool, oversubscribed: bool, team: Team) -> Copying {
        let is_single = match buffer.action {
            // The sender has one thread to copy into the ring.
            _ if !team.is_alone() => true,
            // Combined as they come out of the ring, elements are not copied here at all.
            RecvAction::Reduce(..) => oversubscribed,
            RecvAction::Store => is_sender_busy || buffer.region.len() < OVERLAP_BYTES,
        };
        if is_single { Copying::Single } else { Copying::Ring }
    }
}

/// From which length on two copies that overlap are probably faster than one.
pub(crate) const OVERLAP_BYTES: usize = 64 * 1024;

/// Messages that are alike: from whom, of operations from how many bytes on, as a power of two, and whether they are combined with
/// what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Class {
    from: Rank,
    log2: u8,
    is_reduced: bool,
}

impl Class {
    fn of(from: Rank, buffer: &RecvBuffer, operation_bytes: usize) -> Class {
        let is_reduced = matches!(buffer.action, RecvAction::Reduce(..));
        Class { from, log2: operation_bytes.max(1).ilog2() as u8, is_reduced }
    }
}

/// What long messages of each kind have cost.
#[derive(Debug, Default)]
pub(crate) struct Choices {
    by_class: FxHashMap<Class, Choice>,
    /// Those of which the senders take others meanwhile.
    in_step: FxHashMap<Class, InStep>,
}

/// What is known of the messages of one kind that a rank sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct CopyStats {
    /// Their operations are of at least so many bytes, and of less than twice as many.
    bytes: u64,
    /// Whether they are combined with what is there.
    reduced: bool,
    /// Whether their senders take others meanwhile.
    exchanged: bool,
    /// How the next one comes: through the `ring`, or by a `single` copy.
    copying: &'static str,
    /// What a byte cost through the ring, and when it was read, in picoseconds, where it was measured.
    ring: Option<u32>,
    single: Option<u32>,
}

impl Choices {
    /// How a message of `from` is to come, and notes in its buffer that it can come now. `first` is tried first.
    pub(crate) fn choose(
        &mut self,
        from: Rank,
        buffer: &mut RecvBuffer,
        operation_bytes: usize,
        first: Copying,
        now: Instant,
    ) -> Copying {
        let class = Class::of(from, buffer, operation_bytes);
        let choice = self.by_class.entry(class).or_insert_with(|| Choice::new(first));
        choice.begin(buffer.completion.op);
        note(buffer, &choice.sample, operation_bytes, false, now)
    }

    /// The same for a message of a collective in which its sender takes others meanwhile, and other ranks choose alike.
    pub(crate) fn choose_in_step(
        &mut self,
        from: Rank,
        buffer: &mut RecvBuffer,
        operation_bytes: usize,
        first: Copying,
        now: Instant,
    ) -> Copying {
        let class = Class::of(from, buffer, operation_bytes);
        let choice = self.in_step.entry(class).or_insert_with(|| InStep::new(first));
        choice.begin(buffer.completion.op);
        note(buffer, &choice.sample, operation_bytes, true, now)
    }

    /// A message has come whole, in the way that was chosen for it.
    pub(crate) fn came(&mut self, from: Rank, buffer: &RecvBuffer, now: Instant) {
        let Some(timed) = buffer.timed.as_deref() else { return };
        let class = Class::of(from, buffer, timed.operation_bytes);
        let sample = match timed.is_in_step {
            true => self.in_step.get_mut(&class).map(|choice| &mut choice.sample),
            false => self.by_class.get_mut(&class).map(|choice| &mut choice.sample),
        };
        if let Some(sample) = sample {
            sample.add(*timed, buffer.region.len(), now);
        }
    }

    /// A collective has failed, which may not have begun on all ranks.
    pub(crate) fn count_anew(&mut self) {
        self.in_step.clear();
    }

    /// Forgets `peer`, which is lost.
    pub(crate) fn lose(&mut self, peer: Rank) {
        self.by_class.retain(|class, _| class.from != peer);
        self.in_step.retain(|class, _| class.from != peer);
    }

    /// What is known of the messages of `peer`, the shortest first.
    pub(crate) fn stats(&self, peer: Rank) -> Vec<CopyStats> {
        let alone = self.by_class.iter().map(|(class, choice)| (class, false, choice.next(), choice.costs));
        let in_step = self.in_step.iter().map(|(class, choice)| (class, true, choice.next(), choice.costs));
        let mut stats: Vec<CopyStats> = alone
            .chain(in_step)
            .filter(|(class, ..)| class.from == peer)
            .map(|(class, exchanged, next, [ring, single])| {
                let copying = match next {
                    Copying::Ring => "ring",
                    Copying::Single => "single",
                };
                CopyStats { bytes: 1 << class.log2, reduced: class.is_reduced, exchanged, copying, ring, single }
            })
            .collect();
        stats.sort_by_key(|stats| (stats.bytes, stats.reduced, stats.exchanged));
        stats
    }
}

/// Notes in a message's buffer that it can come now, as one of `sample`, and returns how.
fn note(buffer: &mut RecvBuffer, sample: &Sample, operation_bytes: usize, is_in_step: bool, now: Instant) -> Copying {
    buffer.timed = Some(Box::new(Timed { since: now, operation_bytes, is_in_step, sample: sample.number }));
    sample.copying
}

/// Decides for messages that are alike.
#[derive(Debug)]
struct Choice {
    state: State,
    /// The way that was faster when both were tried, and how often in a row it has been. At first, the one to begin with.
    kept: Copying,
    confirmed: u32,
    /// What each way cost when it was tried last, or used since, in the order of [`Copying`].
    costs: [Option<Cost>; 2],
    sample: Sample,
}

#[derive(Debug)]
enum State {
    /// Both ways are tried in turn.
    Trial([Costs; 2]),
    /// The faster one is kept, for so many operations by now, until `end` or until it costs much more than its `least`.
    Kept { seen: Costs, operations: u32, end: u32, least: Cost },
}

impl Choice {
    fn new(first: Copying) -> Choice {
        let sample = Sample::new(0, first, None);
        Choice { state: State::Trial(Default::default()), kept: first, confirmed: 0, costs: [None; 2], sample }
    }

    /// A message of `op` is to come.
    fn begin(&mut self, op: OpId) {
        if self.sample.op != Some(op) && self.sample.is_over() {
            if let Some(cost) = self.sample.cost() {
                self.came(self.sample.copying, cost);
            }
            self.sample = Sample::new(self.sample.number + 1, self.next(), self.sample.end);
        }
        self.sample.op = Some(op);
        self.sample.chosen += 1;
    }

    /// How the next operation's messages are to come.
    fn next(&self) -> Copying {
        let Choice { kept, .. } = *self;
        match &self.state {
            State::Trial(seen) if seen[kept as usize].0.len() > seen[kept.other() as usize].0.len() => kept.other(),
            _ => kept,
        }
    }

    /// An operation's messages have come so, and cost so much.
    fn came(&mut self, copying: Copying, cost: Cost) {
        match &mut self.state {
            State::Trial(seen) => {
                seen[copying as usize].add(cost);
                let [ring, single] = &*seen;
                if ring.are_below(single) || single.are_below(ring) || ring.are_complete() && single.are_complete() {
                    let tried = ring.0.len().max(single.0.len());
                    self.costs = [ring, single].map(|costs| Some(costs.mean()));
                    self.compare(tried as u64);
                }
            }
            State::Kept { seen, operations, end, least } => {
                *operations += 1;
                seen.add(cost);
                let mut is_due = *operations > *end;
                if seen.are_complete() {
                    let cost = std::mem::take(seen).mean();
                    self.costs[copying as usize] = Some(cost);
                    is_due |= *operations > *end / CALM_ONE_IN && u64::from(cost) * 2 > u64::from(*least) * 3;
                    *least = cost.min(*least);
                }
                if is_due {
                    self.state = State::Trial(Default::default());
                }
            }
        }
    }

    /// Keeps the faster way, now that so many operations have gone each way.
    fn compare(&mut self, tried: u64) {
        let [ring, single] = self.costs.map(|cost| u64::from(cost.unwrap_or(Cost::MAX)));
        let (faster, least) = if single < ring { (Copying::Single, single) } else { (Copying::Ring, ring) };
        self.confirmed = if self.kept == faster { self.confirmed + 1 } else { 0 };
        self.kept = faster;
        // What a trial loses, in operations.
        let loss = tried * ring.abs_diff(single) / least.max(1);
        let interval = (loss * LOSS_ONE_IN).clamp(u64::from(INTERVAL_MIN), u64::from(INTERVAL_MAX)) as u32;
        // Rarely at last, but not at once: both may have been measured badly.
        let end = interval.min(INTERVAL_MIN.saturating_mul(1 << self.confirmed.min(16)));
        self.state = State::Kept { seen: Costs::default(), operations: 0, end, least: least as Cost };
    }
}

/// What trials may lose: one in so many operations.
const LOSS_ONE_IN: u64 = 100;

/// The fewest and the most operations between trials.
const INTERVAL_MIN: u32 = 256;
const INTERVAL_MAX: u32 = 16384;

/// One in so many of these pass before a cost that has risen is a reason to try earlier: it also depends on who wrote a message when.
const CALM_ONE_IN: u32 = 4;

#[cfg(test)]
mod tests;
