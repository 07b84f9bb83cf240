//! Messages between hosts: they lie in pinned memory, which the CPU engine sends from and receives into.
//!
//! A rank has two halves of memory for what it sends to other hosts, and two for what comes from there: a segment uses one of
//! each, the next segment the others. Four words say how far the rank's stream and its CPU engine are, by counting messages
//! in the order of the schedules: how many the stream has made ready, how many of these have been sent, how many have come, and
//! with how many of these the stream is done.

use crate::sync::Arc;
use crate::sys::cuda::{Context, DeviceBytes, HostMemoryError, SharedHostMemory};
use crate::types::Rank;

/// A message to or from a rank of another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parcel {
    /// The other rank.
    pub peer: Rank,
    /// Its first byte in the half of memory that the segment uses.
    pub offset: usize,
    /// Its bytes, perhaps none.
    pub bytes: usize,
}

/// What one rank exchanges with other hosts in a segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// What it sends, in the order in which its stream makes it ready.
    pub outbound: Vec<Parcel>,
    /// What it receives, in the order in which its stream waits for it.
    pub inbound: Vec<Parcel>,
}

impl Traffic {
    /// How much memory it takes, beside its own size.
    pub(crate) fn bytes(&self) -> usize {
        (self.outbound.len() + self.inbound.len()) * size_of::<Parcel>()
    }
}

/// How the CPU engine counts the messages of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    half: usize,
    sent: u64,
    received: u64,
    /// By half, the number of the last message that has come into it; zero if none has.
    last: [u64; 2],
}

/// When the messages of a segment may go and come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The half of memory.
    pub half: usize,
    /// The messages sent before: the first one of the segment may go when one more is ready.
    pub sent: u64,
    /// The messages received before.
    pub received: u64,
    /// The messages of the segment may come when the stream is done with so many.
    pub taken: u64,
}

impl Ledger {
    /// Takes up the next segment.
    ///
    /// ```
    /// use ncclx_rs::Rank;
    /// use ncclx_rs::device::network::{Ledger, Parcel, Traffic};
    /// let inbound = vec![Parcel { peer: Rank(1), offset: 0, bytes: 8 }; 2];
    /// let (mut ledger, traffic) = (Ledger::default(), Traffic { outbound: vec![], inbound });
    /// let taken: Vec<_> = (0..4).map(|_| ledger.take_up(&traffic).taken).collect();
    /// assert_eq!(taken, [0, 0, 2, 4]); // the third segment uses the memory of the first
    /// ```
    pub fn take_up(&mut self, traffic: &Traffic) -> Turn {
        let Ledger { half, sent, received, last } = *self;
        self.sent += traffic.outbound.len() as u64;
        self.received += traffic.inbound.len() as u64;
        if traffic.inbound.iter().any(|parcel| parcel.bytes > 0) {
            self.last[half] = self.received;
        }
        self.half = 1 - half;
        Turn { half, sent, received, taken: last[half] }
    }
}

/// The pinned memory of one rank for messages to and from other hosts.
#[derive(Debug)]
pub struct NetworkMemory {
    half: usize,
    /// Two halves for messages to other hosts, and two for messages from there.
    memory: SharedHostMemory,
}

impl NetworkMemory {
    /// The bytes of a half, where half the staging memory has `staging` bytes.
    pub fn half_beside(staging: usize) -> usize {
        staging.min(HALF_MAX)
    }

    /// Allocates four halves of `half` bytes.
    pub fn new(context: &Arc<Context>, half: usize) -> Result<NetworkMemory, HostMemoryError> {
        Ok(NetworkMemory { half, memory: SharedHostMemory::new(context, 4 * half)? })
    }

    /// The bytes of a half.
    pub(crate) fn half(&self) -> usize {
        self.half
    }

    /// The address in this process of a half for messages to other hosts, and its length.
    pub(crate) fn outbound_address(&self, half: usize) -> (*mut u8, usize) {
        assert!(half < 2, "half {half}");
        (self.memory.address().wrapping_add(half * self.half), self.half)
    }

    /// The address of a half for messages from other hosts, and its length.
    pub(crate) fn inbound_address(&self, half: usize) -> (*mut u8, usize) {
        assert!(half < 2, "half {half}");
        (self.memory.address().wrapping_add((2 + half) * self.half), self.half)
    }

    /// A half for messages to other hosts, as the device reaches it.
    pub fn outbound(&self, half: usize) -> DeviceBytes<'_> {
        self.memory.bytes().part(half * self.half, self.half)
    }

    /// A half for messages from other hosts, as the device reaches it.
    pub fn inbound(&self, half: usize) -> DeviceBytes<'_> {
        self.memory.bytes().part((2 + half) * self.half, self.half)
    }
}

/// More would only make the network wait for longer segments.
const HALF_MAX: usize = 4 << 20;
