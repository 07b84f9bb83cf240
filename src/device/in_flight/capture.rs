//! Calls in captures of graphs, and failures of replays: neither is in flight as operations on streams are.

use std::fmt::Display;
use std::time::{Duration, Instant};

use super::{Flight, Halt, InFlight, NAP_MAX, State, named, reported, spread};
use crate::deadline::Pulse;
use crate::device::call_log::{Disagreement, LoggedCall};
use crate::device::control::FailureKind;
use crate::error::{Error, rank_list};
use crate::sync::lock;
use crate::types::Rank;

impl InFlight {
    /// Blocks until all ranks have called the operation of this number, which `compare` looks at. No rank puts anything on a
    /// stream before that.
    ///
    /// # Errors
    /// The calls differ, or a rank will not make its call, or not within `limit`. The other ranks have been told.
    pub(crate) fn meet(
        &self,
        number: u64,
        call: LoggedCall,
        compare: impl Fn() -> Result<(), Disagreement>,
        limit: Duration,
    ) -> Result<(), Error> {
        let (begin, signature) = (Instant::now(), call.signature());
        let mut pulse = Pulse::new(begin, limit);
        let sequence = {
            let mut state = lock(&self.state);
            state.last = number;
            state.before + number
        };
        loop {
            let is_missing = |rank: &Rank| self.control.call_of(*rank, self.lane, number).is_none();
            let missing = self.control.ranks().filter(is_missing);
            let missing: Vec<Rank> = missing.map(|rank| self.control.name(rank)).collect();
            // Before all have come, too: one call that differs is enough to fail.
            if let Err(disagreement) = compare() {
                let disagreement = disagreement.named(|rank| self.control.name(rank));
                return Err(self.disagree(number, sequence, call, disagreement));
            }
            if missing.is_empty() {
                return Ok(());
            }
            let now = Instant::now();
            let waited = now - begin;
            if let Some(round) = pulse.beat(now) {
                self.ends.waits(sequence, signature, round);
            }
            let late = || {
                let instead = self.ends.instead(begin, &missing);
                let detail = format!(
                    "device collective {sequence}, in the capture of a graph: rank(s) {} did not call it{instead}",
                    rank_list(&missing)
                );
                Error::Timeout { operation: signature.to_string(), waited, detail }
            };
            let late = || (waited >= limit).then(late);
            if let Some(error) = self.obstacle(signature, &missing).or_else(late) {
                let (kind, culprit) = self.kind(&error);
                self.fail(number, kind, culprit, error.clone());
                return Err(error);
            }
            std::thread::sleep(NAP_MAX);
        }
    }

    /// Why one of these ranks, by their names, will do nothing more for an operation, or why this rank itself does nothing more.
    pub(crate) fn obstacle(&self, call: impl Display, ranks: &[Rank]) -> Option<Error> {
        if let Some(Halt::Failed(error)) = &lock(&self.state).halt {
            return Some(named(error.clone(), &call));
        }
        let failed = ranks.iter().find_map(|rank| {
            let failure = self.control.failure_of(self.control.local(*rank)?, self.lane)?;
            // After a disagreement the ranks go on.
            (failure.kind != FailureKind::Mismatch).then(|| reported(*rank, failure, &call))
        });
        let lost = || match self.ends.loss(&call.to_string()) {
            Some(Error::PeerLost { rank, .. }) if !ranks.contains(&Rank(rank)) => None,
            error => error,
        };
        failed.or_else(lost)
    }

    /// Notes operations `first` to `last`, which both ranks have called and which are in the capture of a graph.
    pub(crate) fn pass(&self, first: u64, last: u64) {
        (first..=last).for_each(|number| self.control.pass(self.lane, number));
        lock(&self.state).last = last;
    }

    /// Gives up the operations to come, and tells the other ranks. Those in flight are not concerned.
    pub(crate) fn fail_next(&self, error: Error) {
        let (kind, culprit) = self.kind(&error);
        let mut state = lock(&self.state);
        let number = state.next();
        self.give_up(&mut state, number, kind, culprit, error);
        spread(state);
    }

    /// Gives up the operations in flight and those to come, and tells the other ranks. To be called before a library's communicator
    /// is given up for a replay, since that ends eager operations behind the replay as well.
    pub(crate) fn fail_all(&self, error: Error) {
        let (kind, culprit) = self.kind(&error);
        // What the stream has finished is no failure.
        self.look();
        let mut state = lock(&self.state);
        let number = state.flights.front().map_or(u64::MAX, Flight::first).min(state.next());
        self.give_up(&mut state, number, kind, culprit, error);
        spread(state);
    }
}

impl State {
    /// The first number that fails where the operations to come do.
    pub(super) fn next(&self) -> u64 {
        match (&self.halt, &self.failed) {
            // Ranks could go on after a disagreement, but not after this.
            (Some(Halt::Mismatch), Some((failed, _))) => failed.saturating_sub(1),
            _ => self.last + 1,
        }
    }
}
