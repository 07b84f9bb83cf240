//! Operations in flight and ranks that give up the library that runs them. What such a rank has sent in an operation that it has ended
//! may be lost, so that the operation never ends on others.

use std::time::{Duration, Instant};

use super::{Flight, InFlight, State, named, reported};
use crate::device::control::FailureKind;
use crate::error::Error;

/// How long a stream may stay in an operation once a later one has failed.
const CUT_TIMEOUT: Duration = Duration::from_secs(2);

impl InFlight {
    /// Why the first operation in flight will not end, although only later ones have failed: ranks that have ended it give up the library
    /// for those, or because they leave.
    pub(super) fn cut_off(&self, state: &mut State, now: Instant) -> Option<Error> {
        self.runner.get()?;
        let Flight { call, started, .. } = state.flights.front()?;
        let error = match &state.failed {
            Some((_, error)) => named(error.clone(), call),
            None => {
                let elsewhere = self.hosts.as_ref().and_then(|hosts| hosts.failure());
                let mut failures = self.control.failures(self.lane).chain(elsewhere);
                let (reporter, failure) = failures.find(|(_, failure)| failure.kind != FailureKind::Left)?;
                reported(reporter, failure, call)
            }
        };
        let started = *started;
        let since = *state.given_up.get_or_insert(now);
        (now.saturating_duration_since(since.max(started?)) >= CUT_TIMEOUT).then_some(error)
    }

    /// Whether ranks of this host may still need the library for what came before a disagreement, after which all go on.
    pub(super) fn is_library_needed(&self, state: &State) -> bool {
        let Some((number, Error::Mismatch { .. })) = &state.failed else { return false };
        let has_ended = |rank| self.control.has_ended(rank, self.lane, number - 1);
        self.runner.get().is_some() && !self.control.ranks().all(has_ended)
    }
}
