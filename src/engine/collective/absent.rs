//! What ranks do while others wait in a collective that they have not called.

use std::collections::BTreeMap;

use super::Collectives;
use crate::engine::heartbeat::{Absence, Heartbeat, InFlight, RankState};
use crate::error::rank_list;
use crate::types::Rank;

/// What absent ranks have told.
#[derive(Default)]
pub(super) struct AbsentRanks {
    /// The collective in which this rank waits for them.
    sequence: u64,
    by_rank: BTreeMap<Rank, InFlight>,
    /// The collective and the round of the last heartbeat that this rank has sent because it was absent itself.
    told: Option<(u64, u32)>,
}

impl AbsentRanks {
    /// Notes what others tell while this rank waits in collective `sequence`.
    fn note(&mut self, sequence: u64, ranks: impl Iterator<Item = Rank>, in_flight: &InFlight) {
        if self.sequence != sequence {
            self.sequence = sequence;
            self.by_rank.clear();
        }
        self.by_rank.extend(ranks.map(|rank| (rank, in_flight.clone())));
    }

    /// What those of `missing`, in their order, had in flight instead of collective `sequence`: the first few of it.
    pub(super) fn describe(&self, sequence: u64, missing: &[Rank]) -> String {
        let mut groups: Vec<(InFlight, Vec<Rank>)> = Vec::new();
        let told = self.by_rank.iter().filter(|_| self.sequence == sequence);
        for (rank, in_flight) in told.filter(|(rank, _)| missing.binary_search(rank).is_ok()) {
            match groups.iter_mut().find(|(group, _)| group.what == in_flight.what) {
                Some((group, ranks)) => {
                    group.millis = group.millis.min(in_flight.millis);
                    ranks.push(*rank);
                }
                None => groups.push((in_flight.clone(), vec![*rank])),
            }
        }
        let first = groups.iter().take(GROUPS_MAX);
        first.map(|(group, ranks)| format!("; rank(s) {} had {group}", rank_list(ranks))).collect()
    }
}

/// How many operations an error names.
const GROUPS_MAX: usize = 4;

impl Collectives {
    /// Notes what absent ranks do, if this rank waits for them.
    pub(super) fn others_are_absent(&mut self, me: Rank, heartbeat: &Heartbeat, in_flight: &InFlight) {
        if let Some(active) = self.active.as_ref().filter(|active| active.sequence >= heartbeat.sequence) {
            let others = heartbeat.ranks.iter().copied().filter(|rank| *rank != me);
            self.absent.note(active.sequence, others, in_flight);
        }
    }

    /// Whether ranks wait in a collective that this one has not called, and do not know what it does, as far as these heartbeats
    /// tell.
    pub(crate) fn absence(&self, heartbeats: &[Heartbeat]) -> Option<Absence> {
        self.send_heartbeat.as_ref()?;
        let waiting = heartbeats.iter().filter(|heartbeat| matches!(heartbeat.state, RankState::Waiting(_)));
        let ahead = waiting.filter(|heartbeat| heartbeat.sequence >= self.next);
        let Heartbeat { round, again_millis, .. } = *ahead.max_by_key(|heartbeat| heartbeat.round)?;
        let is_news = self.absent.told < Some((self.next, round));
        is_news.then_some(Absence { sequence: self.next, round, again_millis })
    }

    /// Tells all ranks what this one does while others wait in a collective that it has not called.
    pub(crate) fn tell_absence(&mut self, me: Rank, absence: Absence, in_flight: InFlight) {
        let Absence { sequence, round, again_millis } = absence;
        self.absent.told = Some((sequence, round));
        if let Some(send) = &self.send_heartbeat {
            send(Heartbeat { sequence, state: RankState::Absent(in_flight), round, again_millis, ranks: vec![me] });
        }
    }
}
