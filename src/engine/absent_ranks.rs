//! What ranks that have not called a collective have told those that wait in it.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::engine::heartbeat::InFlight;
use crate::error::rank_list;
use crate::types::Rank;

/// What absent ranks had in flight, and when this rank was told.
#[derive(Default)]
pub(crate) struct AbsentRanks {
    /// The collective in which this rank waits for them.
    sequence: u64,
    by_rank: BTreeMap<Rank, (InFlight, Instant)>,
}

/// Ranks that had the same in flight.
struct Alike {
    in_flight: InFlight,
    /// When the first of them was last heard of.
    heard: Instant,
    ranks: Vec<Rank>,
}

impl AbsentRanks {
    /// Notes what ranks tell while this one waits in collective `sequence`.
    pub(crate) fn note(&mut self, sequence: u64, ranks: &[Rank], in_flight: &InFlight, now: Instant) {
        if self.sequence != sequence {
            self.sequence = sequence;
            self.by_rank.clear();
        }
        self.by_rank.extend(ranks.iter().map(|rank| (*rank, (in_flight.clone(), now))));
    }

    /// What those of `missing`, in their order, had in flight instead of collective `sequence`; of many different operations, the
    /// first few.
    pub(crate) fn describe(&self, sequence: u64, missing: &[Rank], now: Instant) -> String {
        let (mut groups, mut others): (Vec<Alike>, Vec<Rank>) = Default::default();
        let told = self.by_rank.iter().filter(|_| self.sequence == sequence);
        for (rank, (in_flight, heard)) in told.filter(|(rank, _)| missing.binary_search(rank).is_ok()) {
            if let Some(group) = groups.iter_mut().find(|group| group.in_flight.what == in_flight.what) {
                group.in_flight.millis = group.in_flight.millis.min(in_flight.millis);
                group.heard = group.heard.min(*heard);
                group.ranks.push(*rank);
            } else if groups.len() < GROUPS_MAX {
                groups.push(Alike { in_flight: in_flight.clone(), heard: *heard, ranks: vec![*rank] });
            } else {
                others.push(*rank);
            }
        }
        let mut text: String = groups.iter().map(|group| group.describe(now)).collect();
        if !others.is_empty() {
            text += &format!("; rank(s) {} had others", rank_list(&others));
        }
        text
    }
}

impl Alike {
    fn describe(&self, now: Instant) -> String {
        let ago = now.saturating_duration_since(self.heard).as_secs_f64();
        format!("; {ago:.1}s ago rank(s) {} had {}", rank_list(&self.ranks), self.in_flight)
    }
}

/// How many operations an error names.
const GROUPS_MAX: usize = 3;
