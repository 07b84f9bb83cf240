//! The connections of this process's failure detectors: one each way for each other process, whatever the number of
//! communicators.

use std::time::Instant;

use rustc_hash::FxHashMap;

use super::incoming::{Incoming, Listeners};
use super::manner::Way;
use super::outgoing::{Outgoing, Place};
use crate::engine::connector::OPENING_CHECK;
use crate::error::LinkDown;
use crate::sys::poller::{Interest, Poller, Watched};
use crate::sys::process::{Process, ProcessId};

/// All connections.
pub(super) struct Links {
    poller: Poller,
    outgoing: FxHashMap<Way, Outgoing>,
    incoming: Vec<Incoming>,
}

/// A connection to a process that has ended or could not be opened.
pub(super) struct Cut {
    pub(super) down: LinkDown,
    /// The two ends had proved themselves.
    pub(super) has_opened: bool,
    /// For whom it was opened.
    pub(super) opener: Place,
    /// Who used it.
    pub(super) users: Vec<Place>,
}

impl Links {
    /// None yet.
    pub(super) fn new(poller: Poller) -> Links {
        Links { poller, outgoing: FxHashMap::default(), incoming: Vec::new() }
    }

    /// The connection that leads this way.
    pub(super) fn get(&mut self, way: &Way) -> Option<&mut Outgoing> {
        self.outgoing.get_mut(way)
    }

    /// The same, to look at.
    pub(super) fn peek(&self, way: &Way) -> Option<&Outgoing> {
        self.outgoing.get(way)
    }

    /// Keeps a connection that leads this way.
    pub(super) fn insert(&mut self, way: Way, link: Outgoing) {
        self.outgoing.insert(way, link);
    }

    /// The process with this id, where it is visible.
    pub(super) fn find_process(&self, id: &ProcessId) -> Option<Watched<Process>> {
        Process::find(id).ok().and_then(|process| self.poller.watch(process, Interest::Read).ok())
    }

    /// Keeps a connection that has come.
    pub(super) fn accept(&mut self, link: Incoming) {
        self.incoming.push(link);
    }

    /// `place`, which has this number on the connection that leads this way, has nothing more to say and listens no longer.
    pub(super) fn leave(&mut self, way: &Way, place: Place, number: Option<u32>) {
        if let Some(link) = self.outgoing.get_mut(way) {
            link.leave(place, number);
        }
        self.incoming.iter_mut().for_each(|link| link.leave(place));
    }

    /// Writes what waits, as far as there is room, and drops what nobody needs any more. Returns what has ended.
    pub(super) fn write(&mut self) -> Vec<Cut> {
        self.write_to(|_| true)
    }

    /// The same where something waits: to look at a connection takes system calls.
    pub(super) fn write_rest(&mut self) -> Vec<Cut> {
        self.write_to(|link| link.unsent() > 0 || link.users().is_empty())
    }

    fn write_to(&mut self, which: impl Fn(&Outgoing) -> bool) -> Vec<Cut> {
        let mut cuts = Vec::new();
        self.outgoing.retain(|_, link| {
            if !which(link) {
                return true;
            }
            match link.write() {
                Ok(()) => !link.is_over(),
                Err(down) => {
                    let (has_opened, opener, users) = (link.has_opened(), link.opener, link.users().to_vec());
                    cuts.push(Cut { down, has_opened, opener, users });
                    false
                }
            }
        });
        cuts
    }

    /// The numbers of connections that this process has opened, and that others have.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.outgoing.len(), self.incoming.len())
    }

    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.outgoing.is_empty() && self.incoming.is_empty()
    }

    /// Drops all.
    pub(super) fn clear(&mut self) {
        self.outgoing.clear();
        self.incoming.clear();
    }

    /// Reads what has come and hands it to those who listen. Returns where nothing more comes, and why.
    pub(super) fn read(&mut self, listeners: &mut impl Listeners) -> Vec<(Place, LinkDown)> {
        let mut ended = Vec::new();
        self.incoming.retain_mut(|link| {
            let read = link.read(listeners);
            let Err(down) = read else { return true };
            log::debug!("a connection of the failure detector has ended: {down}");
            ended.extend(link.places().map(|place| (place, down.clone())));
            false
        });
        ended
    }

    /// Has the poller wake for every connection. True: something is ready now.
    pub(super) fn arm(&mut self) -> bool {
        // Arms all, also those after one that is ready.
        let writable = self.outgoing.values_mut().filter_map(|link| link.arm().then_some(())).count() > 0;
        self.incoming.iter_mut().filter_map(|link| link.arm().then_some(())).count() > 0 || writable
    }

    /// Undoes [`Links::arm`].
    pub(super) fn disarm(&mut self) {
        self.outgoing.values_mut().for_each(Outgoing::disarm);
        self.incoming.iter_mut().for_each(Incoming::disarm);
    }

    /// When to check again although nothing happens.
    pub(super) fn next_check(&self, now: Instant) -> Option<Instant> {
        self.outgoing.values().any(|link| !link.is_open()).then(|| now + OPENING_CHECK)
    }
}
