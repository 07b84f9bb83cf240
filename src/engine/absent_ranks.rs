//! What ranks that have not called a collective tell those that wait in it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::engine::heartbeat::{Absence, Heartbeat, InFlight, RankState};
use crate::error::rank_list;
use crate::types::Rank;

/// What ranks that have not called a collective tell those that wait in it: others this one, and this one others.
#[derive(Default)]
pub(crate) struct AbsentRanks {
    /// What absent ranks had in flight, and when this rank was told.
    by_rank: BTreeMap<Rank, (InFlight, Instant)>,
    last_answer: Option<Answer>,
}

/// An answer of this rank, while it had not called collective `sequence`, and how many it had given before it there.
#[derive(Clone, Copy)]
struct Answer {
    sequence: u64,
    round: u32,
    at: Instant,
}

impl Answer {
    /// The one that follows `last`, unless others know that one, who wait and say so again after this time.
    fn after(last: Option<Answer>, sequence: u64, again: Duration, now: Instant) -> Option<Answer> {
        if last.is_some_and(|last| now.saturating_duration_since(last.at) < again / 2) {
            return None;
        }
        let before = last.filter(|last| last.sequence == sequence);
        let round = before.map_or(0, |last| last.round.saturating_add(1));
        Some(Answer { sequence, round, at: now })
    }
}

/// Ranks that had the same in flight.
struct Alike {
    in_flight: InFlight,
    /// When the first of them was last heard of, about when the others were.
    heard: Instant,
    ranks: Vec<Rank>,
}

impl AbsentRanks {
    /// The answer that this rank, which has not called collective `next`, owes to ranks that wait in that or a later one, as far as these
    /// heartbeats tell.
    pub(crate) fn answer<'a>(
        &mut self,
        heartbeats: impl Iterator<Item = &'a Heartbeat>,
        next: u64,
        now: Instant,
    ) -> Option<Absence> {
        let waiting = heartbeats.filter(|heartbeat| matches!(heartbeat.state, RankState::Waiting(_)));
        let ahead = waiting.filter(|heartbeat| heartbeat.sequence >= next);
        let Heartbeat { on_device, again_millis, .. } = *ahead.min_by_key(|heartbeat| heartbeat.again_millis)?;
        let answer = Answer::after(self.last_answer, next, Duration::from_millis(again_millis), now)?;
        self.last_answer = Some(answer);
        Some(Absence { on_device, sequence: next, round: answer.round, again_millis })
    }

    /// Notes what ranks tell while this one waits.
    pub(crate) fn note(&mut self, ranks: &[Rank], in_flight: &InFlight, now: Instant) {
        self.by_rank.extend(ranks.iter().map(|rank| (*rank, (in_flight.clone(), now))));
    }

    /// What those of `missing`, in their order, had in flight instead of a collective in which this rank has waited `since`: first who
    /// had nothing; of many different operations, a few.
    pub(crate) fn describe(&self, since: Instant, missing: &[Rank], now: Instant) -> String {
        let (mut groups, mut others): (Vec<Alike>, Vec<Rank>) = Default::default();
        let told = self.by_rank.iter().filter(|(_, (_, heard))| *heard >= since);
        let told = told.filter(|(rank, _)| missing.binary_search(rank).is_ok());
        let (idle, busy): (Vec<_>, Vec<_>) = told.partition(|(_, (in_flight, _))| in_flight.what.is_empty());
        for (rank, (in_flight, heard)) in idle.into_iter().chain(busy) {
            if let Some(group) = groups.iter_mut().find(|group| group.takes(in_flight, *heard)) {
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
    /// Whether a rank belongs to these: one that has fallen silent since does not.
    fn takes(&self, in_flight: &InFlight, heard: Instant) -> bool {
        let apart = self.heard.max(heard) - self.heard.min(heard);
        self.in_flight.what == in_flight.what && apart < ONE_ROUND
    }

    fn describe(&self, now: Instant) -> String {
        let ago = now.saturating_duration_since(self.heard).as_secs_f64();
        format!("; {ago:.1}s ago rank(s) {} had {}", rank_list(&self.ranks), self.in_flight)
    }
}

/// How many operations an error names.
const GROUPS_MAX: usize = 4;

/// How far apart the answers of ranks may come that answer the same heartbeat.
const ONE_ROUND: Duration = Duration::from_millis(400);
