//! Ranks that have not called a collective in which others wait: this one, and others.

use std::time::{Duration, Instant};

use super::Collectives;
use crate::engine::absent_ranks::Answer;
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

    /// The answer that this rank owes to ranks that wait in a collective that it has not called, as far as these heartbeats tell.
    pub(crate) fn absence(&mut self, heartbeats: &[Heartbeat], now: Instant) -> Option<Absence> {
        self.send_heartbeat.as_ref()?;
        let waiting = heartbeats.iter().filter(|heartbeat| matches!(heartbeat.state, RankState::Waiting(_)));
        let ahead = waiting.filter(|heartbeat| heartbeat.sequence >= self.next);
        let again_millis = ahead.map(|heartbeat| heartbeat.again_millis).min()?;
        let answer = Answer::after(self.answer, self.next, Duration::from_millis(again_millis), now)?;
        self.answer = Some(answer);
        Some(Absence { sequence: answer.sequence, round: answer.round, again_millis })
    }

    /// Tells all ranks what this one does, unless it has called a collective since.
    pub(crate) fn tell_absence(&mut self, me: Rank, absence: Absence, in_flight: InFlight) {
        let Absence { sequence, round, again_millis } = absence;
        if let Some(send) = self.send_heartbeat.as_ref().filter(|_| sequence == self.next) {
            send(Heartbeat { sequence, state: RankState::Absent(in_flight), round, again_millis, ranks: vec![me] });
        }
    }
}
