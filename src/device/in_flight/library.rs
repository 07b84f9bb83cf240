//! Operations in flight and ranks that give up the library that runs them. What such a rank has sent in an operation, which it may have ended,
//! may be lost, and then the operation never ends on others.

use std::time::{Duration, Instant};

use super::{By, Called, Flight, InFlight, State, named, reported};
use crate::error::Error;
use crate::types::Rank;

/// How long a stream may stay in an operation once a rank has given up its library.
const CUT_TIMEOUT: Duration = Duration::from_secs(2);

impl InFlight {
    /// Gives the library up, because this rank leaves, which all its lanes tell by now.
    pub(crate) fn give_up_library(&self) {
        if let Some(runner) = self.runner.get() {
            runner.give_up();
        }
    }

    /// Tells other ranks that this one gives up the library. Takes no lock of this lane, but the engine's.
    pub(crate) fn library_is_given_up(&self) {
        self.control.give_up_library(self.lane);
        if let Some(hosts) = &self.hosts {
            hosts.give_up_library();
        }
    }

    /// Why the first operation in flight, before any that has failed, is given up: a rank has given up its library, and the stream is
    /// still in the operation a while later.
    pub(super) fn cut_off(&self, state: &mut State, now: Instant) -> Option<Error> {
        let first = state.flights.front().filter(|first| first.by == By::Library)?;
        let (Flight { number, call, .. }, started) = (first, first.started()?);
        let culprit = self.library_given_up_by()?;
        if let Called::Part(part) = call
            && part.lateness(self.lane, *number).is_none()
        {
            // Its stream waits for another lane of the batch.
            state.given_up = None;
            return None;
        }
        let since = *state.given_up.get_or_insert(now);
        if now.saturating_duration_since(since.max(started)) < CUT_TIMEOUT {
            return None;
        }
        if let Some((_, error)) = &state.failed {
            return Some(named(error.clone(), call));
        }
        let here = self.control.first_failure(self.lane, u64::MAX);
        let known = here.or_else(|| self.hosts.as_ref()?.failure());
        Some(match known {
            Some((reporter, failure)) => reported(reporter, failure, call),
            None => {
                let cause = "it has given up the vendor's library".to_owned();
                Error::Remote { operation: call.to_string(), rank: culprit.0, cause }
            }
        })
    }

    /// A rank that has given up its library, if one has.
    fn library_given_up_by(&self) -> Option<Rank> {
        let here = self.control.ranks().find(|rank| self.control.has_given_up_library(*rank, self.lane));
        here.map(|rank| self.control.name(rank)).or_else(|| self.hosts.as_ref()?.library_given_up_by())
    }

    /// Whether other ranks of this host may still need the library for collectives before a disagreement, after which all go on.
    pub(super) fn is_library_needed(&self, state: &State) -> bool {
        let Some((number, Error::Mismatch { .. })) = &state.failed else { return false };
        let is_collective = matches!(state.flights.front(), Some(Flight { call: Called::Collective(_), .. }));
        let has_ended = |rank| self.control.has_ended(rank, self.lane, number.saturating_sub(1));
        self.is_by_library() && is_collective && !self.control.ranks().all(has_ended)
    }
}
