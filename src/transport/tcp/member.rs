//! The communicators of this process that share connections: who may be spoken to, and what has come for whom.
//!
//! Any thread that looks at a shared connection takes what has come for all. A stream of another communicator that is armed is then
//! named to that one, whose sleeping thread is woken.

use rustc_hash::FxHashMap;

use crate::sync::{Arc, Mutex, lock};
use crate::sys::poller::{Poller, StreamName, Watched};
use crate::transport::auth::{Identity, Membership};
use crate::transport::tcp::greeting::Caller;
use crate::types::Rank;

/// A stream that has come for a communicator.
#[derive(Debug)]
pub(super) enum Arrival {
    /// A lane, by its number, of the connection with this number.
    Lane { from: Rank, trunk: u32, lane: u32 },
    /// A connection of its own.
    Connection { from: Rank, caller: Box<Watched<Caller>> },
}

/// A communicator of this process.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) identity: Identity,
    /// How its connections are made and protected: only those of one manner are shared.
    pub(super) manner: String,
    poller: Poller,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    ready: Vec<StreamName>,
    arrivals: Vec<Arrival>,
    is_closed: bool,
}

impl Member {
    /// A communicator whose threads sleep on `poller`.
    pub(super) fn new(identity: Identity, manner: String, poller: Poller) -> Member {
        Member { identity, manner, poller, waiting: Mutex::default() }
    }

    /// Names a stream that has become ready.
    pub(super) fn name(&self, name: StreamName) {
        let mut waiting = lock(&self.waiting);
        let is_first = waiting.ready.is_empty();
        if !waiting.ready.contains(&name) {
            waiting.ready.push(name);
        }
        if is_first {
            // Whoever sleeps does so for streams that nothing else names.
            self.poller.wake();
        }
    }

    /// Takes in a stream that a peer has opened; gives it back if the communicator has ended.
    pub(super) fn arrive(&self, arrival: Arrival) -> Result<(), Arrival> {
        let mut waiting = lock(&self.waiting);
        if waiting.is_closed {
            return Err(arrival);
        }
        waiting.arrivals.push(arrival);
        self.poller.wake();
        Ok(())
    }

    /// Appends the streams that have become ready. True: others have come.
    pub(super) fn look(&self, named: &mut Vec<StreamName>) -> bool {
        let mut waiting = lock(&self.waiting);
        named.append(&mut waiting.ready);
        !waiting.arrivals.is_empty()
    }

    /// Whether there is nothing to look at.
    pub(super) fn is_idle(&self) -> bool {
        let waiting = lock(&self.waiting);
        waiting.ready.is_empty() && waiting.arrivals.is_empty()
    }

    /// The streams that have come.
    pub(super) fn take_arrivals(&self) -> Vec<Arrival> {
        std::mem::take(&mut lock(&self.waiting).arrivals)
    }

    /// Whether nothing may come any more.
    pub(super) fn is_closed(&self) -> bool {
        lock(&self.waiting).is_closed
    }

    /// Which of this process's communicators, and which rank of it, it is.
    pub(super) fn place(&self) -> Place {
        (self.identity.comm, self.identity.me)
    }

    /// Nothing may come any more. Returns what has come and was not taken.
    pub(super) fn close(&self) -> Vec<Arrival> {
        let mut waiting = lock(&self.waiting);
        waiting.is_closed = true;
        std::mem::take(&mut waiting.arrivals)
    }
}

/// A communicator and a rank of it.
pub(super) type Place = ([u8; 16], Rank);

/// Those of this process. Ranks of one communicator may be threads of one process.
#[derive(Debug, Default)]
pub(super) struct Members(Mutex<FxHashMap<Place, Arc<Member>>>);

impl Members {
    pub(super) fn add(&self, member: &Arc<Member>) {
        lock(&self.0).insert(member.place(), member.clone());
    }

    pub(super) fn remove(&self, member: &Member) {
        lock(&self.0).remove(&member.place());
    }

    /// Wakes their threads that sleep.
    pub(super) fn wake(&self) {
        lock(&self.0).values().for_each(|member| member.poller.wake());
    }

    /// Whom somebody wants to speak to.
    pub(super) fn find(&self, membership: &Membership) -> Option<Arc<Member>> {
        lock(&self.0).get(&(membership.comm, membership.to)).cloned()
    }
}
