//! Messages between hosts: they lie in pinned memory, which the CPU engine sends from and receives into.
//!
//! A rank has two halves of memory for what it sends to other hosts, and two for what comes from there: a segment uses one of
//! each, the next segment the others. Four words say how far the rank's stream and its CPU engine are, by counting messages
//! in the order of the stream's programs: how many the stream has made ready, how many of these have been sent, how many have come, and
//! with how many of these the stream is done.

use crate::device::halves::{Halves, Phase};
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
    /// Whether its sender sends it in the lead of a segment.
    pub is_led: bool,
}

/// What one rank exchanges with other hosts in a segment, or in a part of one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// In which part.
    pub phase: Phase,
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
    halves: Halves,
    sent: u64,
    received: u64,
    /// By half, the number of the last message that has come into it; zero if none has.
    last: [u64; 2],
    /// The same, as it was when the segment began that uses the half.
    before: [u64; 2],
}

/// When the messages of a segment, or of a part of one, may go and come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The half of memory.
    pub half: usize,
    /// The messages sent before: the first one may go when one more is ready.
    pub sent: u64,
    /// The messages received before.
    pub received: u64,
    /// The messages may come when the stream is done with so many.
    pub taken: u64,
}

impl Ledger {
    /// Takes up the next segment, or the next part of one.
    ///
    /// ```
    /// use ncclx_rs::Rank;
    /// use ncclx_rs::device::network::{Ledger, Parcel, Traffic};
    /// let inbound = vec![Parcel { peer: Rank(1), offset: 0, bytes: 8, is_led: false }; 2];
    /// let (mut ledger, traffic) = (Ledger::default(), Traffic { inbound, ..Traffic::default() });
    /// let taken: Vec<_> = (0..4).map(|_| ledger.take_up(&traffic).taken).collect();
    /// assert_eq!(taken, [0, 0, 2, 4]); // the third segment uses the memory of the first
    /// ```
    pub fn take_up(&mut self, traffic: &Traffic) -> Turn {
        let (half, sent, received) = (self.halves.take(traffic.phase), self.sent, self.received);
        if traffic.phase != Phase::Rest {
            self.before[half] = self.last[half];
        }
        self.sent += traffic.outbound.len() as u64;
        self.received += traffic.inbound.len() as u64;
        if traffic.inbound.iter().any(|parcel| parcel.bytes > 0) {
            self.last[half] = self.received;
        }
        Turn { half, sent, received, taken: self.before[half] }
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
