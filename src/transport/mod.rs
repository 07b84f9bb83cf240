//! Byte streams between ranks: the trait, and the ordered table of what implements it.
//!
//! A stream goes one way, from the rank that opens it to the rank that accepts it, keeps order and loses nothing until
//! it is down. It is opened when the first byte goes to a peer, so memory grows with peers that are talked to. Every
//! stream proves that it knows the job's secret before its first byte reaches the reader ([`auth`]).
//!
//! Nothing here blocks. A thread that has nothing left to do calls `arm` on every stream, waits on the
//! [`Poller`](crate::sys::poller::Poller), and calls `disarm`.

pub mod auth;
pub(crate) mod handshake;
pub(crate) mod pending;
pub mod shm;
pub(crate) mod shortage;
pub mod tcp;
pub(crate) mod tls;

use std::io::{self, IoSlice};
use std::time::Instant;

use crate::error::LinkDown;
use crate::sys::segment::{self, SegmentId};
use crate::sys::tcp_info::Traffic;
use crate::types::Rank;

/// Where bytes lie in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryAddress {
    /// Their address; in a segment, how far they are from its beginning.
    pub address: u64,
    /// The segment that they lie in.
    pub segment: Option<SegmentId>,
}

impl MemoryAddress {
    /// Where the `len` bytes at `address` of this process lie.
    pub fn of(address: u64, len: usize) -> MemoryAddress {
        match segment::locate(address, len) {
            Some((id, offset)) => MemoryAddress { address: offset, segment: Some(id) },
            None => MemoryAddress { address, segment: None },
        }
    }

    /// The place `bytes` further on.
    pub fn plus(self, bytes: usize) -> MemoryAddress {
        MemoryAddress { address: self.address.wrapping_add(bytes as u64), ..self }
    }
}

/// The sending end of a stream.
pub trait SendStream: Send {
    /// Takes as many leading bytes of `head` and then `body` as there is room for, possibly none; they need not outlive the
    /// call. Without any, it drives a connection that is being made and notices one that broke.
    fn write(&mut self, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown>;

    /// Asks for the poller to wake when there is room (only called while bytes wait). True: there is room now.
    fn arm(&mut self) -> bool;

    /// Ends what `arm` began.
    fn disarm(&mut self);

    /// Whether the peer has accepted the stream, and no byte waits in this process. Until then somebody must keep driving
    /// it.
    fn is_open(&self) -> bool;

    /// Whether the peer can read this process's memory ([`RecvStream::read_memory`]).
    fn peer_can_read(&self) -> bool {
        false
    }

    /// Makes the peer doubt what it reads of this process's memory, at once: before memory is used for something else.
    fn invalidate(&mut self) {}

    /// Lets the peer know on which CPU this rank waits, if that is a CPU that it may run on, too.
    fn publish_cpu(&mut self, _cpu: u32) {}

    /// What the kernel knows of how the connection does, where it is one.
    fn traffic(&self) -> Option<Traffic> {
        None
    }

    /// Whether every byte taken so far has left this process, so that it survives this process's exit.
    fn flushed(&mut self) -> Result<bool, LinkDown>;
}

/// The receiving end of a stream.
pub trait RecvStream: Send {
    /// Bytes that can be read now, without copying; more may follow. Empty when there are none. They may end within what was
    /// written at once as its body, but neither within its head nor within an element of up to 64 bytes, unless the rest
    /// comes to be shown with them.
    fn peek(&mut self) -> Result<&[u8], LinkDown>;

    /// Drops the first `count` bytes of what `peek` showed.
    fn consume(&mut self, count: usize);

    /// Moves bytes into `into` and returns how many, possibly none.
    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown>;

    /// Whether to read is in vain, as far as the last [`Transport::look`] has seen: nothing has come for a while.
    fn is_silent(&mut self) -> bool {
        false
    }

    /// Copies bytes of the memory of the process that writes; returns how many, at least one.
    fn read_memory(&mut self, _from: MemoryAddress, _into: &mut [u8]) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// How often the writer has called [`SendStream::invalidate`]. What was read before this is asked is what the memory held
    /// while that had not happened more often.
    fn invalidations(&self) -> u64 {
        0
    }

    /// The CPU that the writer told last ([`SendStream::publish_cpu`]), if it has.
    fn writer_cpu(&self) -> Option<u32> {
        None
    }

    /// Asks for the poller to wake when bytes come. True: there are some now.
    fn arm(&mut self) -> bool;

    /// Ends what `arm` began.
    fn disarm(&mut self);
}

/// A stream that a peer opened, and which rank that is.
pub type Accepted = (Rank, Box<dyn RecvStream>);

/// Whether there is another way to a peer than the one that is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detour {
    /// It is taken where something stands in the way of this one, be it a lack of memory.
    Possible,
    /// What is lacking has to be waited for.
    Impossible,
}

/// A way to move bytes between ranks.
pub trait Transport: Send {
    /// The name in settings and messages.
    fn name(&self) -> &'static str;

    /// What peers need to reach this rank, published through the rendezvous.
    fn address(&self) -> Vec<u8>;

    /// Begins a stream to `peer`; the stream takes bytes at once or later, and goes down when the connection fails.
    fn open(&mut self, peer: Rank, address: &[u8], detour: Detour) -> Result<Box<dyn SendStream>, LinkDown>;

    /// Looks, once for all streams, which have bytes; see [`RecvStream::is_silent`].
    fn look(&mut self) {}

    /// Streams that peers opened and that have proved who they are, since the last call. Never fails because of what a
    /// stranger sent: such connections are dropped and logged.
    fn accept(&mut self) -> Vec<Accepted>;

    /// What this process lacks to accept a stream that a peer may be waiting with, if it does.
    fn shortage(&self) -> Option<String> {
        None
    }

    /// When [`Transport::accept`] must be called at the latest, since a connection is in its handshake, which a peer or a
    /// stranger may have opened; nothing if none is.
    fn accepting_until(&self) -> Option<Instant>;
}
