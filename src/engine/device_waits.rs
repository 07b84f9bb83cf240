//! Collectives on devices: which of them this rank has called, and what ranks do that have not called one in which others wait.

use std::time::Instant;

use crate::engine::absent_ranks::AbsentRanks;
use crate::engine::heartbeat::{Absence, Heartbeat, RankState};
use crate::types::Rank;

/// What the ranks of a communicator tell each other of its collectives on devices.
#[derive(Default)]
pub(crate) struct DeviceWaits {
    /// The last collective that this rank has called; they are counted from one.
    called: u64,
    absent_ranks: AbsentRanks,
}

impl DeviceWaits {
    /// Notes that this rank calls a collective.
    pub(crate) fn calls(&mut self, sequence: u64) {
        self.called = sequence;
    }

    /// The first collective that it has not called.
    pub(crate) fn next(&self) -> u64 {
        self.called + 1
    }

    /// Notes what absent ranks do.
    pub(crate) fn heartbeat_arrives(&mut self, heartbeat: &Heartbeat, now: Instant) {
        if let RankState::Absent(in_flight) = &heartbeat.state
            && heartbeat.sequence <= self.called
        {
            self.absent_ranks.note(&heartbeat.ranks, in_flight, now);
        }
    }

    /// The answer that this rank owes to ranks that wait in a collective that it has not called, as far as these heartbeats tell.
    pub(crate) fn absence(&mut self, heartbeats: &[Heartbeat], now: Instant) -> Option<Absence> {
        let next = self.next();
        let heartbeats = heartbeats.iter().filter(|heartbeat| heartbeat.on_device);
        self.absent_ranks.answer(heartbeats, next, now)
    }

    /// What those of `missing`, in their order, had in flight instead of a collective in which this rank has waited `since`.
    pub(crate) fn describe(&self, since: Instant, missing: &[Rank], now: Instant) -> String {
        self.absent_ranks.describe(since, missing, now)
    }
}
