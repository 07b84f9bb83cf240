//! Ranks that have not called a collective in which others wait: this one, and others.

use std::time::Instant;

use super::Collectives;
use crate::engine::heartbeat::{Absence, Heartbeat, InFlight, RankState};
use crate::types::Rank;

impl Collectives {
    /// Notes how far absent ranks have come, and what they do, if this rank waits for them.
    pub(super) fn others_are_absent(&mut self, heartbeat: &Heartbeat, in_flight: &InFlight, now: Instant) {
        heartbeat.ranks.iter().for_each(|rank| self.note_called(*rank, heartbeat.sequence));
        if let Some(active) = self.active.as_ref().filter(|active| active.sequence >= heartbeat.sequence) {
            self.absent_ranks.note(active.sequence, &heartbeat.ranks, in_flight, now);
        }
    }

    /// Whether ranks wait in a collective that this one has not called, and ask anew what it does, as far as these heartbeats tell.
    pub(crate) fn absence(&mut self, heartbeats: &[Heartbeat]) -> Option<Absence> {
        self.send_heartbeat.as_ref()?;
        let waiting = heartbeats.iter().filter(|heartbeat| matches!(heartbeat.state, RankState::Waiting(_)));
        let ahead = waiting.filter(|heartbeat| heartbeat.sequence >= self.next);
        let last = ahead.max_by_key(|heartbeat| (heartbeat.sequence, heartbeat.round))?;
        let asked = Some((last.sequence, last.round));
        if asked <= self.asked_for {
            return None;
        }
        self.asked_for = asked;
        let round = self.absences;
        self.absences = round.saturating_add(1);
        Some(Absence { sequence: self.next, round, again_millis: last.again_millis })
    }

    /// Tells all ranks what this one does, unless it has called a collective since.
    pub(crate) fn tell_absence(&mut self, me: Rank, absence: Absence, in_flight: InFlight) {
        let Absence { sequence, round, again_millis } = absence;
        if let Some(send) = self.send_heartbeat.as_ref().filter(|_| sequence == self.next) {
            send(Heartbeat { sequence, state: RankState::Absent(in_flight), round, again_millis, ranks: vec![me] });
        }
    }
}
