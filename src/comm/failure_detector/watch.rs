//! All failure detectors of a process, and the connections that they share.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::incoming::{Heard, Listener, Listeners};
use super::links::{Cut, Links};
use super::notice::Notice;
use super::outgoing::{Member, Place};
use super::state::{DetectorState, Findings};
use crate::engine::heartbeat::Heartbeat;
use crate::error::LinkDown;
use crate::sync::{Arc, AtomicBool, Mutex, Ordering, lock};
use crate::sys::poller::Poller;
use crate::transport::auth::Membership;
use crate::types::Rank;

/// Reports findings to the communicator. Returns when to report again at the latest, although nothing has happened.
pub(super) type Report = Box<dyn Fn(&Findings) -> Option<Instant> + Send + Sync>;

/// What a communicator shares with the detector thread.
pub(super) struct Registration {
    pub(super) member: Member,
    /// Heartbeats of this rank to be sent. The engine adds them under its own lock, so this lock is only held to add or to
    /// take them.
    pub(super) own_heartbeats: Mutex<Vec<Heartbeat>>,
    report: Report,
    /// Whether the communicator wants to be told that nothing has happened: others are left in peace by what happens elsewhere.
    wants_more: AtomicBool,
}

impl Registration {
    /// Reports to the communicator, whose lock that takes. Returns when to do so again at the latest.
    pub(super) fn report(&self, findings: &Findings) -> Option<Instant> {
        let again = (self.report)(findings);
        // Relaxed, here and below: one thread reports, and checks.
        self.wants_more.store(again.is_some(), Ordering::Relaxed);
        again
    }
}

/// A communicator's detector.
struct Entry {
    registration: Arc<Registration>,
    state: DetectorState,
    /// The communicator is gone, and its neighbours are to hear of that until then.
    closing: Option<Instant>,
}

/// The detectors by their communicators.
#[derive(Default)]
struct Entries {
    by_member: FxHashMap<Member, Entry>,
    by_key: FxHashMap<([u8; 16], Rank), Member>,
}

impl Listeners for Entries {
    fn find(&self, membership: &Membership) -> Option<Listener<'_>> {
        let member = *self.by_key.get(&(membership.comm, membership.to))?;
        Some(self.by_member.get(&member)?.state.listener(member, membership.from))
    }

    fn hear(&mut self, (member, peer): Place, heard: Heard) -> Result<(), LinkDown> {
        self.by_member.get_mut(&member).map_or(Ok(()), |entry| entry.state.hear(peer, heard))
    }
}

/// All that the detector thread looks after.
pub(super) struct Watch {
    links: Links,
    entries: Entries,
    /// How many communicators there have been.
    members: u64,
    /// Since when there is no communicator.
    idle: Option<Instant>,
}

/// What a check has found.
pub(super) struct Checked {
    /// To be reported, without a lock.
    pub(super) findings: Vec<(Arc<Registration>, Findings)>,
    /// When to check again at the latest, which is now if something is ready.
    pub(super) next: Option<Instant>,
}

impl Watch {
    /// Nothing yet. Connections are watched by this poller.
    pub(super) fn new(poller: Poller) -> Watch {
        Watch { links: Links::new(poller), entries: Entries::default(), members: 0, idle: None }
    }

    /// Looks after another communicator.
    pub(super) fn add(&mut self, state: DetectorState, report: Report) -> Arc<Registration> {
        let member = Member(self.members);
        self.members += 1;
        let (own_heartbeats, wants_more) = (Mutex::default(), AtomicBool::new(false));
        let registration = Arc::new(Registration { member, own_heartbeats, report, wants_more });
        self.entries.by_key.insert(state.key(), member);
        self.entries.by_member.insert(member, Entry { registration: registration.clone(), state, closing: None });
        let now = Instant::now();
        self.connect(now);
        self.write(now);
        registration
    }

    /// The communicator is gone. Its neighbours hear of that, as soon as they can.
    pub(super) fn remove(&mut self, member: Member) {
        let now = Instant::now();
        if let Some(entry) = self.entries.by_member.get_mut(&member) {
            entry.closing = Some(now + CLOSING_TIMEOUT);
        }
        self.close_what_can_be(now);
        self.write(now);
    }

    /// Sends a rank's last notice.
    pub(super) fn leave(&mut self, member: Member, notice: &Notice) {
        if let Some(entry) = self.entries.by_member.get_mut(&member) {
            entry.state.leave(notice, &mut self.links);
        }
    }

    /// Writes what waits, and says whether every notice of a communicator has left this process, or never can.
    pub(super) fn flush(&mut self, member: Member) -> bool {
        self.write(Instant::now());
        let Watch { entries, links, .. } = self;
        entries.by_member.get(&member).is_none_or(|entry| entry.state.is_flushed(links))
    }

    /// Whether there is nothing to look after. What other processes still have open is closed by them, or after a while.
    pub(super) fn is_over(&mut self, now: Instant) -> bool {
        if !self.entries.by_member.is_empty() {
            self.idle = None;
            return false;
        }
        if now >= *self.idle.get_or_insert(now) + CLOSING_TIMEOUT {
            self.links.clear();
        }
        self.links.is_empty()
    }

    /// Accepts, connects, reads and writes without blocking, for all communicators.
    pub(super) fn check(&mut self, now: Instant) -> Checked {
        self.links.disarm();
        for Entry { registration, state, .. } in self.entries.by_member.values_mut() {
            let own = std::mem::take(&mut *lock(&registration.own_heartbeats));
            state.pass_on(own, &mut self.links, now);
        }
        // What has ended is no way for a communicator that begins.
        self.write(now);
        self.connect(now);
        self.write(now);
        for ((member, peer), down) in self.links.read(&mut self.entries) {
            if let Some(entry) = self.entries.by_member.get_mut(&member) {
                entry.state.lose(peer, &down.cause);
            }
        }
        let mut findings = Vec::new();
        for (member, Entry { registration, state, closing }) in &mut self.entries.by_member {
            let found = state.check(*member, &mut self.links, now);
            let is_told = !found.is_empty() || registration.wants_more.load(Ordering::Relaxed);
            if is_told && closing.is_none() {
                findings.push((registration.clone(), found));
            }
        }
        self.close_what_can_be(now);
        // Written now: a neighbour that learns of a loss may leave, and other ranks must not see it leave before they know why.
        let cuts = self.links.write_rest();
        self.take_cuts(cuts, now);
        Checked { findings, next: self.arm(now) }
    }

    /// What is shared with a communicator.
    #[cfg(test)]
    pub(super) fn registration(&self, member: Member) -> Option<Arc<Registration>> {
        self.entries.by_member.get(&member).map(|entry| entry.registration.clone())
    }

    /// The numbers of connections that this process has opened, and that others have.
    #[cfg(test)]
    pub(super) fn links(&self) -> (usize, usize) {
        self.links.counts()
    }

    /// How many transports listen.
    #[cfg(test)]
    pub(super) fn transports(&self) -> usize {
        self.entries.by_member.values().map(|entry| entry.state.transports()).sum()
    }

    fn connect(&mut self, now: Instant) {
        for (member, entry) in &mut self.entries.by_member {
            entry.state.connect(*member, &mut self.links, now);
        }
    }

    /// Writes what waits, as far as there is room, and notices what has ended.
    fn write(&mut self, now: Instant) {
        let cuts = self.links.write();
        self.take_cuts(cuts, now);
    }

    fn take_cuts(&mut self, cuts: Vec<Cut>, now: Instant) {
        for cut in cuts {
            for (member, peer) in &cut.users {
                if let Some(entry) = self.entries.by_member.get_mut(member) {
                    entry.state.cut(*peer, &cut, (*member, *peer) == cut.opener, now);
                }
            }
        }
    }

    /// Drops the communicators that are gone and of which their neighbours have heard, also those that leave and wait for that.
    fn close_what_can_be(&mut self, now: Instant) {
        let Watch { entries: Entries { by_member, by_key }, links, .. } = self;
        by_member.retain(|member, Entry { state, closing, .. }| {
            let is_done = |links: &mut Links| state.is_flushed(links) && !state.is_waited_for();
            let is_over = closing.is_some_and(|until| now >= until || is_done(links));
            if is_over {
                state.close(*member, links);
                by_key.remove(&state.key());
            }
            !is_over
        });
    }

    /// Has the poller wake for all. Returns when to check again at the latest.
    fn arm(&mut self, now: Instant) -> Option<Instant> {
        if self.links.arm() {
            return Some(now);
        }
        let entries = || self.entries.by_member.values();
        if entries().any(|entry| entry.state.can_connect(&self.links, now)) {
            return Some(now);
        }
        let checks = entries().filter_map(|entry| entry.state.next_check());
        let closing = entries().filter_map(|entry| entry.closing);
        let idle = self.idle.map(|since| since + CLOSING_TIMEOUT);
        checks.chain(closing).chain(idle).chain(self.links.next_check(now)).min()
    }
}

/// How long the neighbours of a communicator that is gone may take to hear of it.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(5);
