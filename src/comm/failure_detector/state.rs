//! What a communicator's failure detector knows, and how one check advances it.

use std::collections::HashSet;
use std::time::Instant;

use super::gossip::Gossip;
use super::monitor::PeerMonitor;
use super::notice::{Notice, RANKS_MAX};
use crate::engine::failures::{Departed, Departure};
use crate::engine::heartbeat::Heartbeat;
use crate::sync::{Condvar, Mutex, lock};
use crate::transport::Transport;
use crate::types::Rank;

/// What a check has found that this rank did not know.
pub(crate) struct Findings {
    /// Ranks that are gone.
    pub(crate) departed: Vec<Departed>,
    /// Ranks that wait in a collective.
    pub(crate) heartbeats: Vec<Heartbeat>,
}

/// Reports findings to the communicator. Returns when to report again although nothing has happened.
pub(super) type Report = Box<dyn Fn(&Findings) -> Option<Instant> + Send + Sync>;

/// What a communicator shares with the detector thread.
pub(super) struct Registration {
    pub(super) state: Mutex<DetectorState>,
    /// Notified after each check of the thread.
    pub(super) checked: Condvar,
    /// Heartbeats of this rank to be sent. The engine adds them under its own lock, so this lock is only held to add or to
    /// take them.
    pub(super) own_heartbeats: Mutex<Vec<Heartbeat>>,
    report: Report,
}

impl Registration {
    pub(super) fn new(state: DetectorState, report: Report) -> Registration {
        Registration { state: Mutex::new(state), checked: Condvar::new(), own_heartbeats: Mutex::default(), report }
    }

    /// Checks the neighbours and reports what is new. Returns when to check again.
    pub(super) fn check(&self) -> Option<Instant> {
        let own = std::mem::take(&mut *lock(&self.own_heartbeats));
        let (findings, next_check) = {
            let mut state = lock(&self.state);
            state.pass_on(own);
            let findings = state.check();
            (findings, state.arm())
        };
        self.checked.notify_all();
        let next_report = (self.report)(&findings);
        next_check.into_iter().chain(next_report).min()
    }
}

/// The monitors of a communicator's neighbours, and what they have shown.
pub(super) struct DetectorState {
    me: Rank,
    transports: Vec<Box<dyn Transport>>,
    /// Of the neighbours that are neither gone nor leaving.
    monitors: Vec<PeerMonitor>,
    /// Ranks whose departure has been passed on.
    known: HashSet<Rank>,
    gossip: Gossip,
    /// This rank has announced that it leaves.
    is_leaving: bool,
}

impl DetectorState {
    pub(super) fn new(me: Rank, transports: Vec<Box<dyn Transport>>, monitors: Vec<PeerMonitor>) -> DetectorState {
        let (known, gossip) = (HashSet::new(), Gossip::default());
        DetectorState { me, transports, monitors, known, gossip, is_leaving: false }
    }

    /// Accepts, connects, reads and writes without blocking. Returns what is new.
    pub(super) fn check(&mut self) -> Findings {
        self.monitors.iter_mut().for_each(PeerMonitor::disarm);
        for (from, recv_stream) in self.transports.iter_mut().flat_map(|transport| transport.accept()) {
            match self.monitors.iter_mut().find(|monitor| monitor.peer == from) {
                Some(monitor) => monitor.accept(recv_stream),
                None => log::debug!("rank {from} is not one that rank {} watches", self.me),
            }
        }
        let now = Instant::now();
        self.monitors.iter_mut().for_each(|monitor| monitor.connect(&mut self.transports, now));
        let (mut departed, mut ended, mut heartbeats) = (Vec::new(), HashSet::new(), Vec::new());
        for monitor in &mut self.monitors {
            let observed = monitor.check(now);
            for notice in observed.notices {
                match notice {
                    Notice::Goodbye => _ = ended.insert(monitor.peer),
                    Notice::Departed(gone) => departed.push(gone),
                    Notice::Heartbeat(heartbeat) => heartbeats.push(heartbeat),
                }
            }
            if let Some(cause) = observed.loss
                && ended.insert(monitor.peer)
            {
                departed.push(Departed { rank: monitor.peer, how: Departure::Lost, cause });
            }
        }
        // Once this rank has announced that it leaves, neighbours close their connections: that is no loss.
        departed.retain(|gone| !self.is_leaving && self.known.insert(gone.rank));
        self.monitors.retain(|monitor| !ended.contains(&monitor.peer) && !self.known.contains(&monitor.peer));
        for gone in &departed {
            let notice = Notice::Departed(gone.clone());
            self.monitors.iter_mut().for_each(|monitor| monitor.send(&notice));
        }
        // Written now: a neighbour that learns of a loss may leave, and other ranks must not see it leave before they know why.
        if !departed.is_empty() {
            self.monitors.iter_mut().for_each(|monitor| monitor.write(now));
        }
        Findings { departed, heartbeats: self.pass_on(heartbeats) }
    }

    /// Passes the heartbeats that are new here on to the neighbours, and returns them.
    fn pass_on(&mut self, heartbeats: Vec<Heartbeat>) -> Vec<Heartbeat> {
        let new = self.gossip.filter(heartbeats.into_iter());
        for heartbeat in &new {
            for ranks in heartbeat.ranks.chunks(RANKS_MAX) {
                let notice = Notice::Heartbeat(Heartbeat { ranks: ranks.to_vec(), ..heartbeat.clone() });
                self.monitors.iter_mut().for_each(|monitor| monitor.send_if_room(&notice));
            }
        }
        new
    }

    /// Has the poller wake for every monitor. Returns when to check again at the latest, which is now if something is ready.
    fn arm(&mut self) -> Option<Instant> {
        // Arms all monitors, also those after one that is ready.
        let ready = self.monitors.iter_mut().filter_map(|monitor| monitor.arm().then_some(())).count() > 0;
        let now = Instant::now();
        let checks = self.monitors.iter().filter_map(|monitor| monitor.next_check(now));
        let handshakes = self.transports.iter().filter_map(|transport| transport.accepting_until());
        if ready { Some(now) } else { checks.chain(handshakes).min() }
    }

    /// Sends this rank's last notice. Departures found from now on are not reported.
    pub(super) fn leave(&mut self, notice: &Notice) {
        self.monitors.iter_mut().for_each(|monitor| monitor.send(notice));
        self.is_leaving = true;
    }

    /// Whether every notice has left this process, or never can.
    pub(super) fn is_flushed(&mut self) -> bool {
        self.monitors.iter_mut().all(PeerMonitor::is_flushed)
    }

    /// Closes all connections.
    pub(super) fn close(&mut self) {
        self.monitors.clear();
        self.transports.clear();
    }
}
