//! Whom a collective waits for whose time is over.

use std::collections::HashSet;
use std::time::Instant;

use super::Collectives;
use crate::engine::completion::OpId;
use crate::engine::context::OpContext;
use crate::error::rank_list;
use crate::types::Rank;

impl Collectives {
    /// Says which ranks have not called collective `sequence`, or, if all have, which ones this rank waits for, and which
    /// one those may wait for.
    pub(super) fn describe_missing(&self, ctx: &OpContext, sequence: u64, now: Instant) -> String {
        let (came, missing): (Vec<Rank>, Vec<Rank>) =
            (0..ctx.size()).map(Rank::from).partition(|rank| *rank == ctx.me || self.called(*rank) > sequence);
        if !missing.is_empty() {
            let since = self.active.as_ref().map(|active| active.pulse.began);
            let instead = since.map(|since| self.absent_ranks.describe(since, &missing, now)).unwrap_or_default();
            let (missing, came) = (rank_list(&missing), rank_list(&came));
            return format!("collective {sequence}: rank(s) {missing} did not call it; rank(s) {came} did{instead}");
        }
        let posted: HashSet<Rank> = self.posted.keys().map(|(from, ..)| *from).chain(self.owed.ranks()).collect();
        let op = OpId::Collective(sequence);
        let slow: Vec<Rank> =
            came.iter().copied().filter(|rank| posted.contains(rank) || ctx.exchanges(op, *rank)).collect();
        let waits_itself = self.active.as_ref().is_some_and(|active| active.awaits.is_some());
        let whom = match (slow.is_empty(), waits_itself) {
            (true, true) => format!("rank {} waits for its device", ctx.me),
            (false, true) => {
                format!("rank {} waits for its device, and rank(s) {} have not come so far", ctx.me, rank_list(&slow))
            }
            _ => format!("rank(s) {} did not finish their part", rank_list(&slow)),
        };
        let slow = format!("collective {sequence}: all ranks called it; {whom}");
        let others = came.into_iter().filter(|rank| *rank != ctx.me);
        let silent: Vec<Rank> = others.filter(|rank| self.is_silent(*rank, sequence, now)).collect();
        if silent.is_empty() {
            slow
        } else {
            format!("{slow}; rank(s) {} finished it or fell silent", rank_list(&silent))
        }
    }

    /// Whether `rank` has called collective `sequence` and no later one, and no longer says that it waits.
    fn is_silent(&self, rank: Rank, sequence: u64, now: Instant) -> bool {
        let caller = self.callers.get(rank);
        caller.called == sequence + 1 && caller.heartbeat_deadline.is_none_or(|until| until <= now)
    }
}
