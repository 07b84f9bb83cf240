//! The connection to another process on which communicators speak: one, however many there are.

use std::io::IoSlice;

use super::envelope::{self, Content};
use super::notice::Notice;
use crate::error::LinkDown;
use crate::sys::poller::Watched;
use crate::sys::process::Process;
use crate::transport::SendStream;
use crate::transport::auth::{Identity, Membership};
use crate::types::Rank;

/// A communicator of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Member(pub(super) u64);

/// A communicator of this process, and the neighbour that is spoken to there.
pub(super) type Place = (Member, Rank);

/// A connection that this process has opened.
pub(super) struct Outgoing {
    stream: Box<dyn SendStream>,
    /// For whom it was opened.
    pub(super) opener: Place,
    /// The process at the other end, where it is visible.
    process: Option<Watched<Process>>,
    /// Who uses it.
    users: Vec<Place>,
    /// The number of the next one that joins.
    next: u32,
    bytes: Vec<u8>,
}

impl Outgoing {
    /// A connection that is being opened for `opener`.
    pub(super) fn new(stream: Box<dyn SendStream>, opener: Place, process: Option<Watched<Process>>) -> Outgoing {
        Outgoing { stream, opener, process, users: vec![opener], next: 1, bytes: Vec::new() }
    }

    /// Has a rank of this process speak to its neighbour at `place`. Its number here; none while the two ends have not proved
    /// themselves.
    pub(super) fn join(&mut self, place: Place, identity: &Identity) -> Option<u32> {
        let session = self.stream.session()?;
        if place == self.opener {
            return Some(0);
        }
        let number = self.next;
        self.next = self.next.checked_add(1)?;
        let Identity { comm, me, secret, .. } = identity;
        let membership = Membership { comm: *comm, from: *me, to: place.1 };
        let join = Content::Join(membership, membership.prove(secret, &session));
        envelope::encode(&mut self.bytes, number, &join);
        self.users.push(place);
        Some(number)
    }

    /// Queues a notice.
    pub(super) fn push(&mut self, number: u32, notice: &Notice) {
        envelope::encode(&mut self.bytes, number, &Content::Notice(notice.encode()));
    }

    /// `place` has nothing more to say.
    pub(super) fn leave(&mut self, place: Place, number: Option<u32>) {
        // The peer knows the opener by the connection itself.
        if let Some(number) = number.or((place == self.opener).then_some(0)) {
            envelope::encode(&mut self.bytes, number, &Content::Leave);
        }
        self.users.retain(|user| *user != place);
    }

    /// Writes what waits, as far as there is room. The error: it is broken, or its process has ended.
    pub(super) fn write(&mut self) -> Result<(), LinkDown> {
        // A write without bytes notices a broken connection.
        self.stream.write(&[], &[])?;
        if !self.bytes.is_empty() {
            let written = self.stream.write(&[], &[IoSlice::new(&self.bytes)])?;
            self.bytes.drain(..written);
        }
        if self.process.as_ref().is_some_and(|process| process.has_ended()) {
            return Err(LinkDown::new("its process has ended"));
        }
        Ok(())
    }

    /// The bytes that wait.
    pub(super) fn unsent(&self) -> usize {
        self.bytes.len()
    }

    /// Whether every byte has left this process, or never can.
    pub(super) fn is_flushed(&mut self) -> bool {
        self.bytes.is_empty() && self.is_open() && self.stream.flushed().unwrap_or(true)
    }

    /// Whether the two ends have proved themselves.
    pub(super) fn has_opened(&self) -> bool {
        self.stream.session().is_some()
    }

    /// Whether the peer has accepted it.
    pub(super) fn is_open(&self) -> bool {
        self.stream.is_open()
    }

    /// Whether nobody needs it any more.
    pub(super) fn is_over(&mut self) -> bool {
        self.users.is_empty() && (self.is_flushed() || !self.has_opened())
    }

    /// Those who use it.
    pub(super) fn users(&self) -> &[Place] {
        &self.users
    }

    /// Asks the poller to wake when there is room. True: there is room now.
    pub(super) fn arm(&mut self) -> bool {
        !self.bytes.is_empty() && self.stream.arm()
    }

    /// Undoes [`Outgoing::arm`].
    pub(super) fn disarm(&mut self) {
        self.stream.disarm();
    }
}
