//! Ranks that have not called a collective in which others wait: this one, and others.

use std::time::Instant;

use super::Collectives;
use crate::engine::heartbeat::{Absence, Heartbeat, InFlight};

impl Collectives {
    /// Notes how far absent ranks have come, and what they do, if this rank waits for them.
    pub(super) fn others_are_absent(&mut self, heartbeat: &Heartbeat, in_flight: &InFlight, now: Instant) {
        heartbeat.ranks.iter().for_each(|rank| self.note_called(*rank, heartbeat.sequence));
        if self.active.as_ref().is_some_and(|active| active.sequence >= heartbeat.sequence) {
            self.absent_ranks.note(&heartbeat.ranks, in_flight, now);
        }
    }

    /// The answer that this rank owes to ranks that wait in a collective that it has not called, as far as these heartbeats tell.
    pub(crate) fn absence(&mut self, heartbeats: &[Heartbeat], now: Instant) -> Option<Absence> {
        let heartbeats = heartbeats.iter().filter(|heartbeat| !heartbeat.on_device);
        self.absent_ranks.answer(heartbeats, self.next, now)
    }
}
