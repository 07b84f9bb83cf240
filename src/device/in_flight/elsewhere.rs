//! Operations in flight and ranks of other hosts: their failures, and which ranks an operation waits for.

use std::time::{Duration, Instant};

use super::{Called, Flight, InFlight, State, timed_out};
use crate::device::control::{Failure, FailureKind};
use crate::device::other_hosts::Missing;
use crate::error::{Error, rank_list};
use crate::types::Rank;

/// How long this rank waits in an operation before it tells other hosts so.
const WAIT_NOTICE: Duration = Duration::from_millis(500);

/// How long after a failure the CPU engine may take to send other hosts the messages of earlier operations, and other ranks to end
/// them.
const SETTLE_TIMEOUT: Duration = Duration::from_millis(500);

impl InFlight {
    /// A failure that a rank of another host has reported, or one of the exchange, if it concerns operations up to `last`.
    pub(super) fn failed_elsewhere(&self, last: u64) -> Option<(Rank, Failure)> {
        let (reporter, mut failure) = self.hosts.as_ref()?.failure()?;
        if failure.kind == FailureKind::Left {
            // This rank reports it on its host, where `Left` would mean that this rank leaves.
            (failure.kind, failure.rank) = (FailureKind::PeerLost, reporter);
        }
        (failure.number <= last).then_some((reporter, failure))
    }

    /// Tells other ranks of the first operation in flight, which has not failed, if it takes long: all of a collective, so that absent
    /// ones tell what they do, and once those of other hosts, so that they learn what this rank has called.
    pub(super) fn tell_of_wait(&self, state: &mut State, now: Instant) {
        let before = state.before;
        let Some(first) = state.flights.front_mut() else { return };
        let call = match &first.call {
            Called::Collective(call) => Some(*call),
            Called::Part(_) => None,
        };
        if let Some(call) = call
            && let Some(round) = first.pulse.as_mut().and_then(|pulse| pulse.beat(now))
        {
            self.ends.waits(before + first.number, call, round);
        }
        let Some(hosts) = self.hosts.as_ref().filter(|_| !first.is_reported) else { return };
        let notice = WAIT_NOTICE.min(first.limit / 4);
        if first.started().is_some_and(|started| now.saturating_duration_since(started) >= notice) {
            first.is_reported = true;
            hosts.tell_of_wait(first.number, call);
        }
    }

    /// Whether the stream may be released: what it made ready for other hosts before the failure must be sent first, and after a
    /// disagreement a library stays until other ranks have ended what came before.
    pub(super) fn is_settled(&self, state: &mut State, now: Instant) -> bool {
        let since = *state.failing.get_or_insert(now);
        let has_time = now.saturating_duration_since(since) < SETTLE_TIMEOUT;
        if has_time && self.is_library_needed(state) {
            return false;
        }
        let Some(hosts) = &self.hosts else { return true };
        state.released.is_some() || hosts.settle(has_time)
    }

    /// Where no words tell more of an operation: the ranks of this host whose streams have not come to it; else, those that
    /// have not ended it.
    fn behind(&self, number: u64) -> Vec<Rank> {
        let ranks = |has_reached: &dyn Fn(Rank) -> bool| -> Vec<Rank> {
            self.control.ranks().filter(|rank| !has_reached(*rank)).map(|rank| self.control.name(rank)).collect()
        };
        let late = ranks(&|rank| self.control.has_started(rank, self.lane, number));
        if late.is_empty() { ranks(&|rank| self.control.has_ended(rank, self.lane, number)) } else { late }
    }

    pub(super) fn timeout(&self, state: &State, late: &Flight, now: Instant) -> Error {
        let has_called = |rank: &Rank| self.control.calls_of(*rank, self.lane) >= late.number;
        let number = state.before + late.number;
        let (mut came, mut missing): (Vec<Rank>, Vec<Rank>) = self.control.ranks().partition(has_called);
        came.iter_mut().chain(&mut missing).for_each(|rank| *rank = self.control.name(*rank));
        let there = self.hosts.as_ref().map(|hosts| hosts.missing(late.number));
        let Missing { unheard, called, slow: late_there } = there.unwrap_or_default();
        came.extend(called);
        missing.extend(unheard);
        came.sort_unstable();
        missing.sort_unstable();
        let detail = if missing.is_empty() {
            let behind = |(lane, words): &(usize, Vec<_>)| self.control.behind(*lane, words.iter().copied());
            let mut slow: Vec<Rank> = state.awaits.iter().flat_map(behind).chain(late_there).collect();
            slow.sort_unstable();
            slow.dedup();
            if slow.is_empty() {
                slow = self.behind(late.number);
            }
            format!(
                "device collective {number}: all ranks called it; rank(s) {} did not finish their part",
                rank_list(&slow)
            )
        } else {
            let mut elsewhere = self.ends.elsewhere();
            elsewhere.retain(|rank| missing.contains(rank));
            let elsewhere = match &elsewhere[..] {
                [] => String::new(),
                ranks => format!("; rank(s) {} called a collective on the CPU instead", rank_list(ranks)),
            };
            let instead = late.started().map(|since| self.ends.instead(since, &missing)).unwrap_or_default();
            let (missing, came) = (rank_list(&missing), rank_list(&came));
            format!(
                "device collective {number}: rank(s) {missing} did not call it; rank(s) {came} did{elsewhere}{instead}"
            )
        };
        timed_out(late, now, detail)
    }
}
