//! The failure detector: notices ranks that are gone, also while no operation is in flight, and tells all others.
//!
//! Every rank speaks to a few other ranks ([`neighbours`]), and says nothing but notices ([`notice`]). Connections belong to pairs
//! of processes: all communicators speak on the same one ([`links`]), and say of which they are ([`envelope`]). A connection that
//! ends without a goodbye, or a process of this host that ends, is a loss in all of them. A rank that learns of a loss
//! tells its neighbours, so that all ranks learn of it. Heartbeats of ranks that wait in a collective, or that are waited for, spread in the same
//! way ([`gossip`]). One thread per process serves all communicators of the process.

mod envelope;
mod gossip;
mod incoming;
mod links;
mod manner;
mod monitor;
mod neighbours;
mod notice;
mod outgoing;
mod state;
#[cfg(test)]
mod tests;
mod thread;
mod watch;

use std::collections::BTreeSet;
use std::io;
use std::time::{Duration, Instant};

use crate::comm::bootstrap::RankInfo;
use crate::engine::connector::{Connector, Route};
use crate::engine::failures::Departed;
use crate::engine::heartbeat::Heartbeat;
use crate::sync::{Arc, lock};
use crate::sys::fork::Origin;
use crate::transport::Transport;
use crate::transport::auth::Identity;
use manner::Way;
use monitor::PeerMonitor;
use notice::Notice;
use state::DetectorState;
use watch::Registration;

pub(super) use manner::Manner;
pub(super) use neighbours::neighbours;
pub(super) use state::Findings;
pub(super) use thread::DetectorThread;

/// One communicator's failure detector. Ends without a notice when dropped.
pub(super) struct FailureDetector {
    registration: Arc<Registration>,
    thread: Arc<DetectorThread>,
    origin: Origin,
}

impl FailureDetector {
    /// Starts to monitor the neighbours, which the routes lead to. `report` gets what the detector finds, on the detector's thread; it
    /// returns when it is to be called again although nothing has happened. Connections are shared with communicators of the
    /// same manner.
    pub(super) fn start(
        identity: Identity,
        manner: &Manner,
        mut transports: Vec<Box<dyn Transport>>,
        neighbours: Vec<(RankInfo, Vec<Route>)>,
        thread: Arc<DetectorThread>,
        report: impl Fn(&Findings) -> Option<Instant> + Send + Sync + 'static,
    ) -> io::Result<FailureDetector> {
        // Monitoring is mutual, so ranks that this rank does not monitor do not connect.
        let used: BTreeSet<usize> =
            neighbours.iter().flat_map(|(_, routes)| routes).map(|route| route.transport).collect();
        let mut index = 0..;
        transports.retain(|_| index.next().is_some_and(|index| used.contains(&index)));
        let size = identity.size;
        let monitors = neighbours.into_iter().map(|(peer, routes)| {
            let reindex = |route: Route| Route { transport: used.range(..route.transport).count(), ..route };
            let RankInfo { rank, process, host_id, .. } = peer;
            let way = Way { process, host_id, manner: manner.clone() };
            PeerMonitor::new(rank, size, Connector::new(routes.into_iter().map(reindex)), way)
        });
        let state = DetectorState::new(identity, manner.protection.clone(), transports, monitors.collect());
        let registration = thread.add(state, Box::new(report))?;
        Ok(FailureDetector { registration, thread, origin: Origin::here() })
    }

    /// A function that sends a heartbeat of this rank to all ranks. It does not block.
    pub(super) fn heartbeat_sender(&self) -> impl Fn(Heartbeat) + Send + use<> {
        let (registration, poller) = (Arc::downgrade(&self.registration), self.thread.poller().clone());
        move |heartbeat| {
            if let Some(registration) = registration.upgrade() {
                lock(&registration.own_heartbeats).push(heartbeat);
                poller.wake();
            }
        }
    }

    /// Tells the neighbours that this rank leaves, which is no loss. Waits until the notice is sent, at most for `timeout`.
    pub(super) fn say_goodbye(&self, timeout: Duration) {
        self.thread.announce(&self.registration, &Notice::Goodbye, timeout);
    }

    /// Tells all ranks that this rank is gone. Waits as [`FailureDetector::say_goodbye`] does.
    pub(super) fn announce_departure(&self, departed: Departed, timeout: Duration) {
        self.thread.announce(&self.registration, &Notice::Departed(departed), timeout);
    }
}

impl Drop for FailureDetector {
    fn drop(&mut self) {
        // A forked child has no detector thread, and may have inherited locks that no thread releases.
        if self.origin.is_here() {
            self.thread.remove(&self.registration);
        }
    }
}
