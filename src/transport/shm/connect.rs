//! How a ring gets from the process that makes it to the one that reads it.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::error::LinkDown;
use crate::sys::memory::RingMemory;
use crate::sys::peer_memory::PeerMemory;
use crate::sys::socket;
use crate::transport::auth::Identity;
use crate::transport::handshake::{Opening, is_passing};
use crate::transport::pending::{Candidate, Proved};
use crate::transport::shm::channel::{Bell, ShmInlet, ShmOutlet};
use crate::transport::{Accepted, shortage};
use crate::types::Rank;

/// What the opener still has to do: prove itself, then hand over the ring.
#[derive(Debug)]
pub(super) struct Introduction {
    opening: Opening,
    proved: bool,
    ring: OwnedFd,
}

impl Introduction {
    /// Goes as far as it can. True: the peer has the ring.
    pub(super) fn drive(&mut self, stream: &mut UnixStream) -> Result<bool, LinkDown> {
        if !self.proved {
            self.proved = self.opening.drive(stream)?;
        }
        if !self.proved {
            return Ok(false);
        }
        match socket::send_fd(stream, self.ring.as_fd()) {
            Ok(()) => Ok(true),
            Err(error) if is_passing(&error) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// An outlet on a fresh connection. It takes bytes once both sides have proved themselves and the peer has the ring.
pub(super) fn open(
    identity: Identity,
    peer: Rank,
    bell: Bell,
    memory: RingMemory,
    ring: OwnedFd,
    lends: bool,
) -> ShmOutlet {
    let introduction = Introduction { opening: Opening::new(identity, peer), proved: false, ring };
    ShmOutlet::new(memory, bell, introduction, lends)
}

/// Drives an accepted connection until its ring is here. `size` is that of the communicator.
pub(super) fn accept(candidate: &mut Candidate<UnixStream>, size: usize) -> Result<Option<RingMemory>, LinkDown> {
    if candidate.rank.is_none() {
        candidate.rank = candidate.accepting.drive(&mut candidate.stream)?;
    }
    if candidate.rank.is_none() {
        return Ok(None);
    }
    let fd = match socket::recv_fd(&candidate.stream) {
        Ok(fd) => fd,
        Err(error) if is_passing(&error) => return Ok(None),
        Err(error) => return Err(shortage::while_opening(error, size)),
    };
    Ok(Some(RingMemory::open(fd.as_fd())?))
}

/// The inlet of a connection whose ring is here.
pub(super) fn inlet(proved: Proved<UnixStream, RingMemory>) -> Accepted {
    let Proved { rank, stream, registration, brought } = proved;
    let writer = PeerMemory::behind(stream.as_fd()).ok();
    (rank, Box::new(ShmInlet::new(brought, Bell::new(stream, registration), writer)))
}
