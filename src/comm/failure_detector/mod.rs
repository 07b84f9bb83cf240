//! The failure detector: notices ranks that are gone, also while no operation is in flight, and tells all others.
//!
//! Every rank keeps connections to a few other ranks ([`neighbours`]), which carry nothing but notices ([`notice`]). A
//! connection that ends without a goodbye, or a process of this host that ends, is a loss. A rank that learns of a loss
//! tells its neighbours, so that all ranks learn of it. Heartbeats of ranks that wait in a collective spread in the same
//! way ([`gossip`]). One thread per process serves all communicators of the process.

mod gossip;
mod monitor;
mod neighbours;
mod notice;
mod state;
mod thread;

use std::collections::BTreeSet;
use std::io;
use std::time::{Duration, Instant};

use crate::comm::bootstrap::RankInfo;
use crate::engine::connector::{Connector, Route};
use crate::engine::failures::Departed;
use crate::engine::heartbeat::Heartbeat;
use crate::sync::{Arc, lock};
use crate::sys::fork::Origin;
use crate::sys::poller::Interest;
use crate::sys::process::Process;
use crate::transport::Transport;
use crate::types::Rank;
use monitor::PeerMonitor;
use notice::Notice;
use state::{DetectorState, Registration};

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
    /// Starts to monitor the ranks that `routes` lead to. `report` gets what the detector finds, on the detector's thread; it
    /// returns when it is to be called again although nothing has happened.
    pub(super) fn start(
        me: Rank,
        ranks: &[RankInfo],
        mut transports: Vec<Box<dyn Transport>>,
        routes: Vec<(Rank, Vec<Route>)>,
        thread: Arc<DetectorThread>,
        report: impl Fn(&Findings) -> Option<Instant> + Send + Sync + 'static,
    ) -> io::Result<FailureDetector> {
        // Monitoring is mutual, so ranks that this rank does not monitor do not connect.
        let used: BTreeSet<usize> = routes.iter().flat_map(|(_, routes)| routes).map(|route| route.transport).collect();
        let mut index = 0..;
        transports.retain(|_| index.next().is_some_and(|index| used.contains(&index)));
        let monitors = routes.into_iter().map(|(peer, routes)| {
            let reindex = |route: Route| Route { transport: used.range(..route.transport).count(), ..route };
            // Looked up before the connection is made: if that succeeds, the process was alive and the number was its own.
            let process = Process::find(&ranks[peer.index()].process).ok();
            let process = process.and_then(|process| thread.poller().watch(process, Interest::Read).ok());
            let way = Connector::new(routes.into_iter().map(reindex));
            let mut monitor = PeerMonitor::new(peer, ranks.len(), way, process);
            monitor.connect(&mut transports, Instant::now());
            monitor
        });
        let monitors = monitors.collect();
        let state = DetectorState::new(me, transports, monitors);
        let registration = Arc::new(Registration::new(state, Box::new(report)));
        thread.add(Arc::clone(&registration))?;
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
        self.announce(&Notice::Goodbye, timeout);
    }

    /// Tells all ranks that this rank is gone. Waits as [`FailureDetector::say_goodbye`] does.
    pub(super) fn announce_departure(&self, departed: Departed, timeout: Duration) {
        self.announce(&Notice::Departed(departed), timeout);
    }

    fn announce(&self, notice: &Notice, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let mut state = lock(&self.registration.state);
        state.leave(notice);
        loop {
            state.check();
            let left = deadline.saturating_duration_since(Instant::now());
            if state.is_flushed() || left.is_zero() {
                return;
            }
            let waited = self.registration.checked.wait_timeout(state, left.min(FLUSH_CHECK));
            state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
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

/// How often a leaving rank checks whether its notice has been sent.
const FLUSH_CHECK: Duration = Duration::from_millis(5);
