//! What a communicator's failure detector knows, and how one check advances it.

use std::collections::HashSet;
use std::time::Instant;

use super::gossip::Gossip;
use super::incoming::{Heard, Incoming, Listener};
use super::links::{Cut, Links};
use super::manner::Protection;
use super::monitor::PeerMonitor;
use super::notice::{Notice, ranks_max};
use super::outgoing::Member;
use crate::engine::failures::{Departed, Departure};
use crate::engine::heartbeat::Heartbeat;
use crate::error::LinkDown;
use crate::transport::Transport;
use crate::transport::auth::Identity;
use crate::types::Rank;

/// What a check has found that this rank did not know.
pub(crate) struct Findings {
    /// Ranks that are gone.
    pub(crate) departed: Vec<Departed>,
    /// Of ranks that wait in a collective, or that have not called it.
    pub(crate) heartbeats: Vec<Heartbeat>,
}

impl Findings {
    pub(super) fn is_empty(&self) -> bool {
        self.departed.is_empty() && self.heartbeats.is_empty()
    }
}

/// The monitors of a communicator's neighbours, and what they have shown.
pub(super) struct DetectorState {
    identity: Identity,
    protection: Protection,
    /// Until all neighbours have connected.
    transports: Vec<Box<dyn Transport>>,
    /// Of the neighbours that are not gone, and of those that leave and wait to hear this rank.
    monitors: Vec<PeerMonitor>,
    /// Ranks whose departure has been passed on.
    known: HashSet<Rank>,
    gossip: Gossip,
    /// This rank has announced that it leaves.
    is_leaving: bool,
}

impl DetectorState {
    pub(super) fn new(
        identity: Identity,
        protection: Protection,
        transports: Vec<Box<dyn Transport>>,
        monitors: Vec<PeerMonitor>,
    ) -> DetectorState {
        let (known, gossip) = (HashSet::new(), Gossip::default());
        DetectorState { identity, protection, transports, monitors, known, gossip, is_leaving: false }
    }

    /// The communicator and this rank of it.
    pub(super) fn key(&self) -> ([u8; 16], Rank) {
        (self.identity.comm, self.identity.me)
    }

    fn monitor(&mut self, peer: Rank) -> Option<&mut PeerMonitor> {
        self.monitors.iter_mut().find(|monitor| monitor.peer == peer)
    }

    /// Accepts and opens connections without blocking.
    pub(super) fn connect(&mut self, member: Member, links: &mut Links, now: Instant) {
        for (from, recv_stream) in self.transports.iter_mut().flat_map(|transport| transport.accept()) {
            // Where nobody listens to it, other communicators of its process may have joined it.
            let monitor = self.monitors.iter_mut().find(|monitor| monitor.peer == from);
            let listens = monitor.is_some_and(PeerMonitor::begin_to_hear);
            let link = Incoming::new(recv_stream, listens.then_some((member, from)), self.protection.clone());
            link.into_iter().for_each(|link| links.accept(link));
        }
        for monitor in &mut self.monitors {
            monitor.connect(member, &self.identity, &mut self.transports, links, now);
        }
    }

    /// This rank, for one that wants to speak to it.
    pub(super) fn listener(&self, member: Member, from: Rank) -> Listener<'_> {
        let is_watched = self.monitors.iter().any(|monitor| monitor.peer == from && !monitor.is_heard());
        let DetectorState { identity, protection, .. } = self;
        Listener { identity, protection, place: is_watched.then_some((member, from)) }
    }

    /// What has come from `peer`. The error says what is wrong with that.
    pub(super) fn hear(&mut self, peer: Rank, heard: Heard) -> Result<(), LinkDown> {
        self.monitor(peer).map_or(Ok(()), |monitor| monitor.hear(heard))
    }

    /// Nothing more comes from `peer`.
    pub(super) fn lose(&mut self, peer: Rank, cause: &str) {
        if let Some(monitor) = self.monitor(peer) {
            monitor.lose(cause);
        }
    }

    /// The connection to `peer` has ended or could not be opened.
    pub(super) fn cut(&mut self, peer: Rank, cut: &Cut, is_opener: bool, now: Instant) {
        if let Some(monitor) = self.monitor(peer) {
            monitor.cut(cut, is_opener, now);
        }
    }

    /// Whether [`DetectorState::connect`] has something to do now.
    pub(super) fn can_connect(&self, links: &Links, now: Instant) -> bool {
        self.monitors.iter().any(|monitor| monitor.can_connect(links, now))
    }

    /// What is new. Passes it on.
    pub(super) fn check(&mut self, member: Member, links: &mut Links, now: Instant) -> Findings {
        let (mut departed, mut ended, mut heartbeats) = (Vec::new(), HashSet::new(), Vec::new());
        for monitor in &mut self.monitors {
            let observed = monitor.check(now);
            for notice in observed.notices {
                match notice {
                    Notice::Goodbye => monitor.take_goodbye(),
                    Notice::Departed(gone) => departed.push(gone),
                    Notice::Heartbeat(heartbeat) => heartbeats.push(heartbeat),
                }
            }
            if let Some(cause) = observed.loss {
                ended.insert(monitor.peer);
                if !monitor.has_left() {
                    departed.push(Departed { rank: monitor.peer, how: Departure::Lost, cause });
                }
            }
        }
        // Once this rank has announced that it leaves, neighbours close their connections: that is no loss.
        departed.retain(|gone| !self.is_leaving && self.known.insert(gone.rank));
        self.monitors.retain_mut(|monitor| {
            let is_away = monitor.has_left() && !monitor.is_waited_for();
            let is_gone = is_away || ended.contains(&monitor.peer) || self.known.contains(&monitor.peer);
            if is_gone {
                monitor.leave(member, links);
            }
            !is_gone
        });
        // Nobody calls any more, and nobody has to be called.
        if self.monitors.iter().all(|monitor| monitor.is_settled(links)) {
            self.transports.clear();
        }
        for gone in &departed {
            let notice = Notice::Departed(gone.clone());
            self.monitors.iter_mut().for_each(|monitor| monitor.send(&notice, links));
        }
        Findings { departed, heartbeats: self.pass_on(heartbeats, links, now) }
    }

    /// Returns the heartbeats that are new here, and passes those that have waited long enough on to the neighbours.
    pub(super) fn pass_on(&mut self, heartbeats: Vec<Heartbeat>, links: &mut Links, now: Instant) -> Vec<Heartbeat> {
        let new = self.gossip.filter(heartbeats.into_iter());
        self.gossip.hold(&new, self.identity.size, now);
        for heartbeat in self.gossip.take_due(now) {
            for ranks in heartbeat.ranks.chunks(ranks_max(&heartbeat.state)) {
                let notice = Notice::Heartbeat(Heartbeat { ranks: ranks.to_vec(), ..heartbeat.clone() });
                self.monitors.iter_mut().for_each(|monitor| monitor.send_if_room(&notice, links));
            }
        }
        new
    }

    /// When to check again at the latest.
    pub(super) fn next_check(&self) -> Option<Instant> {
        let checks = self.monitors.iter().filter_map(PeerMonitor::next_check);
        let checks = checks.chain(self.gossip.due());
        checks.chain(self.transports.iter().filter_map(|transport| transport.accepting_until())).min()
    }

    /// Sends this rank's last notice. Departures found from now on are not reported.
    pub(super) fn leave(&mut self, notice: &Notice, links: &mut Links) {
        self.monitors.iter_mut().for_each(|monitor| monitor.send(notice, links));
        self.is_leaving = true;
    }

    /// Whether every notice has left this process, or never can.
    pub(super) fn is_flushed(&self, links: &mut Links) -> bool {
        self.monitors.iter().all(|monitor| monitor.is_flushed(links))
    }

    /// Whether a neighbour that leaves waits to hear this rank.
    pub(super) fn is_waited_for(&self) -> bool {
        self.monitors.iter().any(PeerMonitor::is_waited_for)
    }

    /// How many transports listen.
    #[cfg(test)]
    pub(super) fn transports(&self) -> usize {
        self.transports.len()
    }

    /// Leaves all connections, which other communicators may use.
    pub(super) fn close(&mut self, member: Member, links: &mut Links) {
        self.monitors.drain(..).for_each(|mut monitor| monitor.leave(member, links));
        self.transports.clear();
    }
}
