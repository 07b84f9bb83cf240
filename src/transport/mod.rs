//! Byte streams between ranks: the traits that every transport implements.
//!
//! A stream goes one way, from the rank that opens it to the rank that accepts it. It keeps order and loses nothing until it
//! is down. It is opened when the first byte goes to a peer, so memory grows with the peers in use. Both sides of a stream
//! prove that they know the job's secret before its first byte reaches the reader ([`auth`]).
//!
//! Nothing here blocks. Who has looked at a stream in vain calls `arm` on it, and `disarm` once the [`Poller`] has named it.
//! A thread whose streams are all armed sleeps on the poller.

pub mod auth;
pub(crate) mod handshake;
pub(crate) mod pending;
mod runs;
pub mod shm;
pub(crate) mod shortage;
pub mod tcp;
pub(crate) mod tls;
pub mod ucx;

use std::any::Any;
use std::fmt;
use std::io::{self, IoSlice};
use std::time::Instant;

use serde::Serialize;

use crate::error::LinkDown;
use crate::sync::Arc;
use crate::sys::lent_bytes::LentBytes;
use crate::sys::poller::{Poller, StreamName};
use crate::sys::segment::{self, SegmentId};
use crate::sys::tcp_info::TcpStats;
use crate::sys::team::Team;
use crate::transport::auth::Secret;
use crate::types::Rank;

pub use shortage::descriptors;

/// The address of bytes in a process's memory (UCX: remote address and key).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryAddress {
    /// The address; in a segment, the offset from its beginning.
    pub address: u64,
    /// The shared memory segment that contains the bytes, if one does.
    pub segment: Option<SegmentId>,
}

impl MemoryAddress {
    /// The address of `len` bytes of this process.
    pub fn of(address: u64, len: usize) -> MemoryAddress {
        match segment::locate(address, len) {
            Some((id, offset)) => MemoryAddress { address: offset, segment: Some(id) },
            None => MemoryAddress { address, segment: None },
        }
    }

    /// The address `bytes` further on.
    pub fn plus(self, bytes: usize) -> MemoryAddress {
        MemoryAddress { address: self.address.wrapping_add(bytes as u64), ..self }
    }
}

/// Memory of this process that peers read without its help, by a key, for as long as this lives (UCX: registered memory).
pub struct Exposure {
    key: Vec<u8>,
    _registration: Box<dyn Any + Send>,
}

impl Exposure {
    /// The key, and what peers may read by it until that is dropped.
    pub fn new(key: Vec<u8>, registration: Box<dyn Any + Send>) -> Exposure {
        Exposure { key, _registration: registration }
    }

    /// What peers need beside the address.
    pub fn key(&self) -> &[u8] {
        &self.key
    }
}

impl fmt::Debug for Exposure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory with a key of {} bytes", self.key.len())
    }
}

/// Exposes memory for a transport, without its lock: to register much memory takes long.
pub trait Expose: Send + Sync {
    /// Lets peers read the bytes. None: this transport cannot, or not now.
    fn expose(&self, bytes: &Arc<LentBytes>) -> Option<Exposure>;
}

/// Bytes of a peer that it has [exposed](Exposure).
#[derive(Clone, Copy, Debug)]
pub struct RemoteMemory<'a> {
    /// Where they begin in the peer's memory.
    pub address: u64,
    /// How many: [`READ_MAX`] at most.
    pub len: usize,
    /// By what they are read.
    pub key: &'a [u8],
}

/// What came of a read that was to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// It is under way.
    Begun,
    /// So many are under way that this one has to wait.
    Busy,
    /// This stream reads nothing.
    Unable,
}

/// The most bytes that one read brings.
pub const READ_MAX: usize = 256 * 1024;

/// What is told of a read that has ended: its token, and the memory that begins with what was read, or why nothing was.
pub type TakeRead<'a> = dyn FnMut(u64, Result<&LentBytes, String>) + 'a;

/// What the reader of a shared memory ring knows of its link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RingStats {
    /// Who holds the cache lines that it has read: `shared` by both cores, or `owned` by the reader's.
    pub lines: &'static str,
    /// What copying a byte costs writer and reader together while lines are shared, in picoseconds, where it was measured.
    pub shared: Option<u32>,
    /// The same while they are owned.
    pub owned: Option<u32>,
}

/// What has become of the connections of a stream that has several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RailStats {
    /// How many it is to have.
    pub rails: usize,
    /// How many work.
    pub working: usize,
    /// How often one has broken, or could not be opened.
    pub dropped: u64,
    /// How often one of these was opened again.
    pub reopened: u64,
}

/// What carries a stream that shares its connection with those of other communicators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LaneStats {
    /// The connection's number among those that this process has opened and accepted.
    pub connection: u32,
    /// The stream's number on it.
    pub lane: u32,
    /// How many streams share it now.
    pub lanes: usize,
}

/// The sending end of a stream.
pub trait SendStream: Send {
    /// Takes as many leading bytes of `head` and then `body` as there is room for, possibly none. They need not outlive the call.
    /// A call without bytes advances a connection that is being made, and notices a broken one.
    fn write(&mut self, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown>;

    /// Asks the poller to wake when there is room, and to name the stream; only called while bytes wait. True: there is room
    /// now.
    fn arm(&mut self) -> bool;

    /// Undoes `arm`.
    fn disarm(&mut self);

    /// After how many writes in vain to ask the poller instead, if this is the only stream.
    fn patience(&self) -> u32 {
        PATIENCE
    }

    /// Whether the peer has accepted the stream, and no byte waits in this process. Until then the caller must keep writing,
    /// also without bytes.
    fn is_open(&self) -> bool;

    /// Whether the peer has ever accepted the stream, whatever has become of it since.
    fn was_accepted(&self) -> bool {
        self.is_open()
    }

    /// What only the two ends of the stream's connection know, once both have proved themselves, where it has one connection.
    fn session(&self) -> Option<Secret> {
        None
    }

    /// Whether the peer can read this process's memory ([`RecvStream::read_memory`]).
    fn peer_can_read(&self) -> bool {
        false
    }

    /// Invalidates at once what the peer reads of this process's memory. To be called before memory is used for something else.
    fn invalidate(&mut self) {}

    /// Whether it [reads](SendStream::begin_read) what the peer has exposed, as far as is known.
    fn can_read(&self) -> bool {
        false
    }

    /// Begins to read what the peer has exposed, without its help. [`Transport::take_reads`] tells of the end, with the token, unless
    /// the stream goes down.
    fn begin_read(&mut self, _token: u64, _from: RemoteMemory<'_>) -> Read {
        Read::Unable
    }

    /// Publishes the CPU on which this rank waits, if the peer may run on it too.
    fn publish_cpu(&mut self, _cpu: u32) {}

    /// The kernel's statistics of the connection, if the stream is one.
    fn tcp_stats(&self) -> Option<TcpStats> {
        None
    }

    /// What has become of the connections, if the stream has several.
    fn rail_stats(&self) -> Option<RailStats> {
        None
    }

    /// What carries it, if it shares a connection.
    fn lane_stats(&self) -> Option<LaneStats> {
        None
    }

    /// What bytes go through, where the transport chooses that: each its name of the way and the device.
    fn devices(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether every byte taken so far has left this process, so that it survives this process's exit.
    fn flushed(&mut self) -> Result<bool, LinkDown>;
}

/// The receiving end of a stream.
pub trait RecvStream: Send {
    /// Bytes that can be read now, without copying; empty if there are none. More may follow. The bytes may end within the body
    /// of one write, but not within its head or an element of up to 64 bytes: the rest of that is then shown with them later.
    /// An error: none are left and none follow.
    fn peek(&mut self) -> Result<&[u8], LinkDown>;

    /// What only the two ends of the stream's connection know, where it has one connection.
    fn session(&self) -> Option<Secret> {
        None
    }

    /// Why nothing follows the bytes that `peek` has shown, if that is known.
    fn end(&self) -> Option<LinkDown>;

    /// Drops the first `count` bytes of what `peek` showed.
    fn consume(&mut self, count: usize);

    /// Moves bytes into `into` and returns how many, possibly none. An error: none are left and none follow.
    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown>;

    /// After how many reads in vain to ask the poller instead, if this is the only stream.
    fn patience(&self) -> u32 {
        PATIENCE
    }

    /// The poller has named the stream, although it was not asked to. Whatever made it do so must not do it again and again.
    fn named(&mut self) {}

    /// Copies bytes from the memory of the writer's process, by the threads of the team. Returns how many, at least one: so many
    /// of the first.
    fn read_memory(&mut self, _from: MemoryAddress, _into: &mut [u8], _team: Team) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// How often the writer has called [`SendStream::invalidate`]. Read memory, then call this: if the count has not grown, the
    /// bytes read are valid.
    fn invalidations(&self) -> u64 {
        0
    }

    /// The CPU that the writer published last ([`SendStream::publish_cpu`]), if it has.
    fn writer_cpu(&self) -> Option<u32> {
        None
    }

    /// How the stream's shared memory is read, if it is one of shared memory.
    fn ring_stats(&self) -> Option<RingStats> {
        None
    }

    /// Asks the poller to wake when bytes come, and to name the stream. Nothing is read until it does, or until
    /// [`RecvStream::disarm`]. True: there are bytes now.
    fn arm(&mut self) -> bool;

    /// Undoes `arm`.
    fn disarm(&mut self);
}

/// The patience with streams of which a look in vain costs nanoseconds, and with those of which it costs a system call.
const PATIENCE: u32 = 8192;
pub(crate) const PATIENCE_WITH_CALLS: u32 = 64;

/// Tells which streams of a communicator are ready. All its transports have the same.
pub trait Watcher: Send {
    /// Appends the streams that are ready now to `named`, some at most; the next look begins with the others. True: something
    /// is ready that is no stream, as a listener. Does not sleep.
    fn look(&mut self, named: &mut Vec<StreamName>) -> bool;

    /// Ends the sleep of the thread that sleeps until a stream is ready, or its next one.
    fn wake(&self);
}

impl Watcher for Poller {
    fn look(&mut self, named: &mut Vec<StreamName>) -> bool {
        Poller::look(self, named).unwrap_or_else(|error| {
            // Logged once: the next turn would log it again.
            static LOGGED: std::sync::Once = std::sync::Once::new();
            LOGGED.call_once(|| log::error!("looking for streams that are ready fails: {error}"));
            true
        })
    }

    fn wake(&self) {
        Poller::wake(self);
    }
}

/// A stream that a peer has opened, and the peer's rank.
pub type Accepted = (Rank, Box<dyn RecvStream>);

/// Whether there is another route to a peer than the one that is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detour {
    /// There is: it is used if this route fails, also for a lack of memory.
    Possible,
    /// There is none: a missing resource is waited for.
    Impossible,
}

/// A way to move bytes between ranks.
pub trait Transport: Send {
    /// The name in settings and messages.
    fn name(&self) -> &'static str;

    /// What peers need to reach this rank, published at the bootstrap.
    fn address(&self) -> Vec<u8>;

    /// Opens a stream to `peer`. The stream takes bytes at once or later, and goes down when the connection fails.
    fn open(&mut self, peer: Rank, address: &[u8], detour: Detour) -> Result<Box<dyn SendStream>, LinkDown>;

    /// The streams that peers have opened and authenticated since the last call. Never fails because of unauthenticated peers:
    /// their connections are dropped and logged.
    fn accept(&mut self) -> Vec<Accepted>;

    /// Peers that connect wake nobody until the first [`Transport::accept`]. They wait meanwhile.
    fn pause(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Whether bytes that open streams have taken wait in this process.
    fn holds_bytes(&self) -> bool {
        false
    }

    /// What lets peers read this process's memory, where the transport can.
    fn exposer(&self) -> Option<Arc<dyn Expose>> {
        None
    }

    /// Tells of reads that have ended since this was asked last. Asked again and again while reads are under way.
    fn take_reads(&mut self, _take: &mut TakeRead<'_>) {}

    /// What this process lacks to accept a stream that a peer may be waiting with, if it does.
    fn shortage(&self) -> Option<String> {
        None
    }

    /// When [`Transport::accept`] must be called at the latest, because a connection is in its handshake; none if none is.
    fn accepting_until(&self) -> Option<Instant>;

    /// Appends the streams that are ready now and have no descriptor of their own that would tell the poller, as
    /// [`Watcher::look`] does. True: [`Transport::accept`] has something to do.
    fn look(&mut self, _named: &mut Vec<StreamName>) -> bool {
        false
    }

    /// Asks the poller to wake for what streams share, once all of them are armed. True: there is something to do now.
    fn arm(&mut self) -> bool {
        false
    }
}

/// What the tests of each transport begin with.
#[cfg(test)]
mod testing {
    use super::*;

    /// The ends of a stream from the rank of `opener` to rank 1, which is that of `acceptor`.
    pub(super) fn opened(
        opener: &mut dyn Transport,
        acceptor: &mut dyn Transport,
        detour: Detour,
    ) -> (Box<dyn SendStream>, Box<dyn RecvStream>) {
        let address = acceptor.address();
        opened_at(&address, opener, acceptor, detour)
    }

    /// The same, where the way to the acceptor leads through this address.
    pub(super) fn opened_at(
        address: &[u8],
        opener: &mut dyn Transport,
        acceptor: &mut dyn Transport,
        detour: Detour,
    ) -> (Box<dyn SendStream>, Box<dyn RecvStream>) {
        let mut send_stream = opener.open(Rank(1), address, detour).unwrap();
        let mut accepted = Vec::new();
        while accepted.is_empty() || !send_stream.is_open() {
            send_stream.write(&[], &[]).unwrap();
            accepted.extend(acceptor.accept());
        }
        let (_, recv_stream) = accepted.pop().unwrap();
        (send_stream, recv_stream)
    }

    /// The streams that are ready now.
    pub(super) fn names(poller: &Poller) -> Vec<StreamName> {
        let mut named = Vec::new();
        poller.look(&mut named).unwrap();
        named
    }
}
