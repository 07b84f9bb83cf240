//! Shared memory within a host: a ring of bytes a direction, and a socket beside it.
//!
//! The opener makes the ring and hands it over a Unix socket after both sides have proved themselves. The socket then
//! carries one byte whenever a sleeping side has to be woken, and its end tells that the other process is gone.

mod handover;
mod ring_stream;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;

use rand::TryRngCore;
use rand::rngs::OsRng;

use crate::error::LinkDown;
use crate::sys::cma;
use crate::sys::limits;
use crate::sys::poller::{Interest, Poller, Registration};
use crate::sys::shm_ring::ShmRing;
use crate::sys::socket;
use crate::transport::auth::Identity;
use crate::transport::pending::Pending;
use crate::transport::shm::ring_stream::Bell;
use crate::transport::{Accepted, Detour, SendStream, Transport, shortage};
use crate::types::Rank;

/// The transport of one communicator.
#[derive(Debug)]
pub struct ShmTransport {
    identity: Identity,
    poller: Poller,
    ring_bytes: usize,
    lends: bool,
    name: Vec<u8>,
    listener: UnixListener,
    registration: Registration,
    pending: Pending<UnixStream>,
}

impl ShmTransport {
    /// Listens under an unguessable name. Rings that this rank opens have `ring_bytes`, a power of two of whole pages;
    /// with `lends`, their readers may also read this process's memory.
    pub fn new(identity: Identity, poller: Poller, ring_bytes: usize, lends: bool) -> io::Result<Self> {
        // From the system: a forked child's own generator gives the numbers that its parent's gives.
        let mut random = [0; 16];
        OsRng.try_fill_bytes(&mut random).map_err(io::Error::other)?;
        let name = format!("ncclx_rs-{:032x}", u128::from_le_bytes(random)).into_bytes();
        let listener = socket::listen_unix(&name)?;
        let registration = poller.add(listener.as_fd(), Interest::Read)?;
        if lends {
            cma::allow_readers();
        }
        let pending = Pending::new(identity.clone(), poller.clone());
        Ok(ShmTransport { identity, poller, ring_bytes, lends, name, listener, registration, pending })
    }
}

impl Transport for ShmTransport {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn address(&self) -> Vec<u8> {
        self.name.clone()
    }

    fn open(&mut self, peer: Rank, address: &[u8], detour: Detour) -> Result<Box<dyn SendStream>, LinkDown> {
        let size = self.identity.size;
        let gone = |error: io::Error| match error.kind() {
            io::ErrorKind::ConnectionRefused => LinkDown::unfit("its process is gone (connection refused)"),
            io::ErrorKind::WouldBlock => LinkDown::busy("as many wait to be accepted by it as its system lets"),
            _ if limits::is_shortage(&error) => shortage::while_opening(error, size),
            _ => LinkDown::unfit(format!("its Unix socket cannot be called: {error}")),
        };
        let stream = socket::connect_unix(address).map_err(gone)?;
        let lacking = |error: io::Error| {
            if limits::lacks_descriptors(&error) {
                return shortage::while_opening(error, size);
            }
            let cause = format!("there is no shared memory for a ring of {} bytes: {error}", self.ring_bytes);
            match detour {
                Detour::Impossible if limits::is_shortage(&error) => LinkDown::lacking(cause),
                _ => LinkDown::unfit(cause),
            }
        };
        let (memory, fd) = ShmRing::create(self.ring_bytes).map_err(lacking)?;
        let registration = self.poller.add(stream.as_fd(), Interest::Read);
        let registration = registration.map_err(|error| shortage::while_opening(error, size))?;
        let bell = Bell::new(stream, registration);
        let send_stream = handover::open(self.identity.clone(), peer, bell, memory, fd, detour, self.lends);
        Ok(Box::new(send_stream))
    }

    fn accept(&mut self) -> Vec<Accepted> {
        let (me, listener) = (self.identity.me, &self.listener);
        self.pending.admit(listener.as_fd(), || {
            let caller = socket::admit(listener.accept(), |(stream, _)| {
                if !socket::is_of_this_user(stream.as_fd())? {
                    // Not worth a warning, of which they could cause any number.
                    log::debug!("rank {me}: another user's connection was dropped");
                    return Ok(None);
                }
                stream.set_nonblocking(true)?;
                Ok(Some(stream))
            });
            Ok(caller?.flatten())
        });
        let size = self.identity.size;
        let accepted = self.pending.drive(|candidate| handover::accept(candidate, size));
        self.pending.watch(&mut self.registration);
        accepted.into_iter().map(handover::recv_stream).collect()
    }

    fn shortage(&self) -> Option<String> {
        self.pending.shortage()
    }

    fn accepting_until(&self) -> Option<Instant> {
        self.pending.due()
    }
}

#[cfg(test)]
mod tests;
