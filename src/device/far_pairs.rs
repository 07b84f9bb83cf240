//! Pairs of ranks on different hosts: what the engine needs to carry their messages, and what it does for them.

use crate::device::control::Control;
use crate::device::counters::Word;
use crate::device::message_log::LoggedMessage;
use crate::device::network::NetworkMemory;
use crate::device::other_hosts::OtherHosts;
use crate::device::rounds::Direction;
use crate::sync::Arc;
use crate::types::Rank;

/// This rank's side of a pair with a rank of another host: words and cells, of which the other rank has its own copy.
#[derive(Debug)]
pub(crate) struct FarPair {
    /// The words as this rank sees them, and as the other rank would see them within a host.
    pub(crate) own: Arc<Control>,
    pub(crate) other: Control,
    /// The cells of both rings.
    pub(crate) memory: Arc<NetworkMemory>,
    /// The bytes of a cell.
    pub(crate) cell: usize,
    /// The lane of messages to the other rank, and of those from it.
    pub(crate) lanes: [usize; 2],
    /// Head and tail of the ring to the other rank, and of that from it.
    pub(crate) words: [Word; 4],
}

/// What carries the data of messages between hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    /// The engine, piece by piece.
    Engine,
    /// A vendor's library. The engine only tells each rank what the other one has called, and how it has failed.
    Library,
}

/// The engine that carries messages between devices of different hosts.
pub(crate) trait FarPairs: Send + Sync {
    /// Begins to carry messages with a rank.
    fn open(&self, peer: Rank, pair: FarPair);

    /// Gives up what was begun with a rank: the setup has failed.
    fn forget(&self, peer: Rank);

    /// The engine, as one lane of a pair uses it.
    fn lane(&self, peer: Rank, lane: usize) -> Arc<dyn OtherHosts>;

    /// Takes up messages to a rank, or from it, of which the first has this number.
    fn submit(
        &self,
        channel: (Rank, Direction),
        first: u64,
        messages: &[LoggedMessage],
        carrier: Carrier,
    ) -> std::io::Result<()>;

    /// Begins a lane anew after a disagreement, when nothing of it is on any stream.
    fn reset(&self, peer: Rank, lane: usize);
}
