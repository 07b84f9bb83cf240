//! Shared memory within a host: a ring for each direction, and bells by which the sides wake each other.
//!
//! The opener makes the ring and hands it over through a Unix socket once both sides have proved themselves. The bells of all rings
//! of a communicator ring at one socket ([`bells`]), so that one is closed. Where the system does not allow that, it stays as the
//! ring's own bell: a byte wakes a sleeping side, and its end shows that the other process is gone.

mod bells;
mod doorbell;
mod handover;
mod line_ownership;
mod ring_stream;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;

use crate::config::Switch;
use crate::error::LinkDown;
use crate::sync::Arc;
use crate::sys::cma::{self, PeerMemory, Stamp};
use crate::sys::limits;
use crate::sys::poller::{Interest, Poller, StreamName, Watched};
use crate::sys::process::Process;
use crate::sys::random;
use crate::sys::ring_sync::Side;
use crate::sys::shm_ring::ShmRing;
use crate::sys::socket;
use crate::transport::auth::Identity;
use crate::transport::pending::{Pending, Proved};
use crate::transport::shm::bells::{Bells, SharedLine};
use crate::transport::shm::doorbell::Doorbell;
use crate::transport::shm::handover::RingHandover;
use crate::transport::shm::line_ownership::Chooser;
use crate::transport::shm::ring_stream::{ShmRecvStream, ShmSendStream};
use crate::transport::{Accepted, Detour, SendStream, Transport, shortage};
use crate::types::Rank;

/// How a rank uses rings.
#[derive(Clone, Copy, Debug)]
pub struct RingSettings {
    /// The size of those that it makes: a power of two of whole pages.
    pub bytes: usize,
    /// Whether their readers may also read this process's memory.
    pub peer_can_read: bool,
    /// How it reads those of others.
    pub line_ownership: Switch,
    /// The NUMA node that it is on, from which others take the memory of those that it reads.
    pub node: Option<u32>,
    /// Whether those whose other side agrees have no socket of their own.
    pub share_bells: bool,
}

/// The transport of one communicator.
#[derive(Debug)]
pub struct ShmTransport {
    identity: Identity,
    poller: Poller,
    settings: RingSettings,
    /// What the listener's name is made of.
    token: [u8; TOKEN_BYTES],
    listener: Watched<UnixListener>,
    pending: Pending<UnixStream>,
    bells: SharedBells,
}

/// The bells of a communicator, once a ring needs them.
#[derive(Debug)]
enum SharedBells {
    Made(Arc<Bells>),
    Unmade,
    /// Each ring has a socket of its own.
    Unwanted,
}

impl SharedBells {
    /// Has a side of a ring share them with `peer`, which is at the other end of the socket. None: the ring needs that one.
    fn share(
        &mut self,
        identity: &Identity,
        poller: &Poller,
        peer: Rank,
        side: Side,
        ring: &ShmRing,
        socket: &UnixStream,
    ) -> Option<SharedLine> {
        if matches!(self, SharedBells::Unwanted) {
            return None;
        }
        let mut share = || {
            let process = Process::behind(socket.as_fd())?;
            let bells = match self {
                SharedBells::Made(bells) => bells.clone(),
                _ => Bells::new(identity, poller)?,
            };
            *self = SharedBells::Made(bells.clone());
            bells.join(peer, side, ring.kept_words(), process)
        };
        let refused = |error: &io::Error| {
            log::debug!("rank {}: the ring with rank {peer} has a socket of its own: {error}", identity.me);
        };
        share().inspect_err(refused).ok()
    }

    fn made(&self) -> Option<&Bells> {
        match self {
            SharedBells::Made(bells) => Some(bells),
            SharedBells::Unmade | SharedBells::Unwanted => None,
        }
    }
}

impl ShmTransport {
    /// Listens under an unguessable name.
    pub fn new(identity: Identity, poller: Poller, settings: RingSettings) -> io::Result<Self> {
        let token = random::bytes()?;
        let listener = poller.watch(socket::listen_unix(&socket_name(&token))?, Interest::Read)?;
        if settings.peer_can_read {
            cma::allow_readers();
        }
        let pending = Pending::new(identity.clone(), poller.clone());
        let bells = if settings.share_bells { SharedBells::Unmade } else { SharedBells::Unwanted };
        Ok(ShmTransport { identity, poller, settings, token, listener, pending, bells })
    }
}

impl Transport for ShmTransport {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn address(&self) -> Vec<u8> {
        // The number of a node is less than 1024, and other hosts have no use for it.
        let node = self.settings.node.map(|node| (node as u16).to_le_bytes());
        self.token.iter().chain(node.iter().flatten()).copied().collect()
    }

    fn open(&mut self, peer: Rank, address: &[u8], detour: Detour) -> Result<Box<dyn SendStream>, LinkDown> {
        let size = self.identity.size;
        let gone = |error: io::Error| match error.kind() {
            io::ErrorKind::ConnectionRefused => LinkDown::unfit("its process is gone (connection refused)"),
            io::ErrorKind::WouldBlock => LinkDown::busy("as many wait to be accepted by it as its system lets"),
            _ if limits::is_shortage(&error) => shortage::while_opening(error, size, 1),
            _ => LinkDown::unfit(format!("its Unix socket cannot be called: {error}")),
        };
        let (token, node) = address.split_at(TOKEN_BYTES.min(address.len()));
        let node = node.try_into().ok().map(|node| u16::from_le_bytes(node).into());
        let stream = socket::connect_unix(&socket_name(token)).map_err(gone)?;
        let lacking = |error: io::Error| {
            if limits::lacks_descriptors(&error) {
                return shortage::while_opening(error, size, 1);
            }
            let cause = format!("there is no shared memory for a ring of {} bytes: {error}", self.settings.bytes);
            match detour {
                Detour::Impossible if limits::is_shortage(&error) => LinkDown::lacking(cause),
                _ => LinkDown::unfit(cause),
            }
        };
        let (ring, fd) = ShmRing::create(self.settings.bytes, node).map_err(lacking)?;
        let Stamp { address, value } = Stamp::own().map_err(LinkDown::from)?;
        ring.words().set_stamp([address, value]);
        let stream = self.poller.watch_named(stream, Interest::Read, StreamName::To(peer));
        let stream = stream.map_err(|error| shortage::while_opening(error, size, 1))?;
        let line = self.bells.share(&self.identity, &self.poller, peer, Side::Writer, &ring, &stream);
        let doorbell = Doorbell::new(stream);
        let handover = RingHandover::new(self.identity.clone(), peer, fd, detour, line);
        Ok(Box::new(ShmSendStream::new(ring, doorbell, handover, self.settings.peer_can_read)))
    }

    fn accept(&mut self) -> Vec<Accepted> {
        let (me, listener) = (self.identity.me, &self.listener);
        self.pending.admit(listener.as_fd(), || {
            let caller = socket::admit(listener.accept(), |(stream, _)| {
                if !socket::is_of_this_user(stream.as_fd())? {
                    // Not a warning, since another user could cause any number of them.
                    log::debug!("rank {me}: another user's connection was dropped");
                    return Ok(None);
                }
                stream.set_nonblocking(true)?;
                Ok(Some(stream))
            });
            Ok(caller?.flatten())
        });
        let (identity, poller, bells) = (&self.identity, &self.poller, &mut self.bells);
        let mut share =
            |peer, socket: &UnixStream, ring: &ShmRing| bells.share(identity, poller, peer, Side::Reader, ring, socket);
        let accepted = self.pending.drive(|candidate| handover::accept(candidate, identity.size, &mut share));
        self.pending.watch(&mut self.listener);
        let line_ownership = self.settings.line_ownership;
        accepted.into_iter().map(|proved| recv_stream(proved, Chooser::new(line_ownership))).collect()
    }

    fn pause(&mut self) -> io::Result<()> {
        self.listener.set(Interest::Nothing)
    }

    fn shortage(&self) -> Option<String> {
        self.pending.shortage()
    }

    fn accepting_until(&self) -> Option<Instant> {
        let waiting = self.bells.made().and_then(Bells::retry_at);
        self.pending.due().into_iter().chain(waiting).min()
    }

    fn holds_bytes(&self) -> bool {
        self.bells.made().is_some_and(Bells::has_waiting)
    }

    fn look(&mut self, named: &mut Vec<StreamName>) -> bool {
        if let Some(bells) = self.bells.made() {
            bells.look(named);
            bells.retry();
        }
        false
    }
}

/// The bytes of an address but for the number of a node, which follows in two where the rank is on one of several.
const TOKEN_BYTES: usize = 16;

/// The name of the Unix socket at which a rank with this token listens.
fn socket_name(token: &[u8]) -> Vec<u8> {
    let digits = token.iter().map(|byte| format!("{byte:02x}"));
    format!("ncclx_rs-{}", digits.collect::<String>()).into_bytes()
}

/// The receiving end of a connection whose ring is mapped here.
fn recv_stream(proved: Proved<UnixStream, (ShmRing, Option<SharedLine>)>, chooser: Chooser) -> Accepted {
    let Proved { rank, stream, session, received: (ring, line) } = proved;
    let [address, value] = ring.words().stamp();
    let writer = PeerMemory::behind(stream.as_fd()).ok().map(|writer| writer.stamped(Stamp { address, value }));
    let doorbell = line.map_or_else(|| Doorbell::new(stream), Doorbell::shared);
    (rank, Box::new(ShmRecvStream::new(ring, doorbell, writer, chooser, session)))
}

#[cfg(test)]
mod tests;
