//! What a schedule is made for: a collective's shape, and the setting of the rank that runs it.

use crate::algo::alike::{IslandCall, Islands};
use crate::algo::direct;
use crate::algo::group::Group;
use crate::counts::Counts;
use crate::op::CollectiveKind;
use crate::schedule::{Builder, Schedule, Slice, Space};
use crate::sync::Arc;
use crate::topo::Topology;
use crate::types::Rank;

/// The shape of a collective, all counts in elements. The input and output spaces of the schedule hold, end to end:
///
/// | collective | input | output |
/// |---|---|---|
/// | all_reduce, reduce, broadcast | `count` | `count`; may be the same memory |
/// | all_gather | `counts[me]` | the sum of `counts`, by rank |
/// | all_gather into parts | `count` | `count` a rank: this rank's part |
/// | reduce_scatter | the sum of `counts`, by rank | `counts[me]` |
/// | all_to_all | the sum of `send`, by rank | the sum of `recv`, by rank |
/// | equal all_to_all | `count` a rank | `count` a rank |
/// | gather | `count` | on the root `count` a rank, else nothing |
/// | scatter | on the root `count` a rank, else nothing | `count` |
/// | barrier | nothing | nothing |
/// | by islands | a rank alone as above, another one nothing | `count`; of another one its part and a word for each rank of its group |
///
/// Inputs are never written unless they are the output's own memory. A broadcast reads the root's input and writes
/// every rank's output. A reduce writes the root's output alone; other ranks work in scratch memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Everyone gets the reduction.
    AllReduce {
        /// Elements.
        count: usize,
    },
    /// The root gets the reduction.
    Reduce {
        /// Elements.
        count: usize,
        /// Who gets it.
        root: Rank,
    },
    /// Everyone gets the root's data.
    Broadcast {
        /// Elements.
        count: usize,
        /// Whose data.
        root: Rank,
    },
    /// Everyone gets everyone's block.
    AllGather {
        /// Elements by rank.
        counts: Counts,
    },
    /// Everyone writes its block to the parts of a window of all ranks.
    AllGatherIntoParts {
        /// Elements a rank.
        count: usize,
    },
    /// Everyone gets its block of the reduction.
    ReduceScatter {
        /// Elements by rank.
        counts: Counts,
    },
    /// Everyone gets its block of everyone's data.
    AllToAll {
        /// This rank's elements for each rank.
        send: Counts,
        /// This rank's elements from each rank.
        recv: Counts,
    },
    /// The same, where all ranks know that all their blocks are equal.
    EqualAllToAll {
        /// Elements for and from each rank.
        count: usize,
    },
    /// The root gets everyone's block.
    Gather {
        /// Elements a rank.
        count: usize,
        /// Who gets them.
        root: Rank,
    },
    /// Everyone gets its block of the root's data.
    Scatter {
        /// Elements a rank.
        count: usize,
        /// Whose data.
        root: Rank,
    },
    /// No data.
    Barrier,
    /// Among ranks that are alike the caller moves data: see [`islands`](crate::algo::islands).
    ByIslands {
        /// What.
        call: IslandCall,
        /// Elements.
        count: usize,
        /// Who is alike.
        islands: Arc<Islands>,
    },
}

impl Collective {
    /// A collective of this kind, with rank 0 as its root: of `count` elements, or of `block` elements on each of `ranks` where
    /// it is about blocks.
    pub(crate) fn of_kind(kind: CollectiveKind, count: usize, block: usize, ranks: usize) -> Collective {
        let (root, counts) = (Rank(0), || Counts::equal(block, ranks));
        match kind {
            CollectiveKind::AllReduce => Collective::AllReduce { count },
            CollectiveKind::Reduce => Collective::Reduce { count, root },
            CollectiveKind::Broadcast => Collective::Broadcast { count, root },
            CollectiveKind::AllGather | CollectiveKind::AllGatherPersistent | CollectiveKind::WindowRegister => {
                Collective::AllGather { counts: counts() }
            }
            CollectiveKind::ReduceScatter => Collective::ReduceScatter { counts: counts() },
            CollectiveKind::AllToAll => Collective::AllToAll { send: counts(), recv: counts() },
            CollectiveKind::Gather => Collective::Gather { count: block, root },
            CollectiveKind::Scatter => Collective::Scatter { count: block, root },
            CollectiveKind::Barrier | CollectiveKind::WindowDeregister | CollectiveKind::WindowFence => {
                Collective::Barrier
            }
        }
    }

    /// What it is called where it is not a part of a window's registration or its end.
    pub(crate) fn kind(&self) -> CollectiveKind {
        match self {
            Collective::AllReduce { .. } => CollectiveKind::AllReduce,
            Collective::Reduce { .. } => CollectiveKind::Reduce,
            Collective::Broadcast { .. } => CollectiveKind::Broadcast,
            Collective::AllGather { .. } => CollectiveKind::AllGather,
            Collective::AllGatherIntoParts { .. } => CollectiveKind::AllGatherPersistent,
            Collective::ReduceScatter { .. } => CollectiveKind::ReduceScatter,
            Collective::AllToAll { .. } | Collective::EqualAllToAll { .. } => CollectiveKind::AllToAll,
            Collective::Gather { .. } => CollectiveKind::Gather,
            Collective::Scatter { .. } => CollectiveKind::Scatter,
            Collective::Barrier => CollectiveKind::Barrier,
            Collective::ByIslands { call: IslandCall::AllReduce, .. } => CollectiveKind::AllReduce,
            Collective::ByIslands { call: IslandCall::Broadcast { .. }, .. } => CollectiveKind::Broadcast,
        }
    }

    /// How much memory it takes, beside its own size.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Collective::AllGather { counts } | Collective::ReduceScatter { counts } => counts.bytes(),
            Collective::AllToAll { send, recv } => send.bytes() + recv.bytes(),
            _ => 0,
        }
    }
}

/// Everything but the data that a schedule depends on.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// The rank the schedule is for.
    pub me: Rank,
    /// Who shares a host with whom.
    pub topo: &'a Topology,
    /// Bytes per element.
    pub element: usize,
    /// What is multiplied or divided.
    pub scaling: Scaling,
    /// Whether long messages travel in chunks.
    pub chunking: Chunking,
    /// How much memory copies may take.
    pub scratch: ScratchLimit,
}

/// How much memory a rank may take for copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScratchLimit {
    /// In bytes.
    pub(super) limit: usize,
    /// Into how many pieces the collective is cut of which this one is.
    pub(super) pieces: usize,
}

impl ScratchLimit {
    /// As much as there is: what runs the schedule cuts the collective itself.
    pub const UNBOUNDED: ScratchLimit = ScratchLimit { limit: usize::MAX, pieces: 1 };

    /// What the setting `scratch_bytes` is by default.
    pub const DEFAULT: ScratchLimit = ScratchLimit::at_most(8 << 20);

    /// So many bytes, but a 128th of what it would be otherwise where that is more, so that schedules stay short.
    pub const fn at_most(bytes: usize) -> ScratchLimit {
        ScratchLimit { limit: bytes, pieces: 1 }
    }

    /// How many bytes.
    pub(crate) fn limit(self) -> usize {
        self.limit
    }
}

/// Whether long messages travel in chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Chunking {
    /// In chunks, so that consecutive steps overlap.
    Chunks,
    /// Whole: what runs the schedule cuts the collective itself.
    Whole,
}

/// What a reduction multiplies or divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scaling {
    /// Nothing.
    Nothing,
    /// The inputs, before they are combined (PREMUL_SUM), so that they must be copied first.
    Inputs,
    /// The sum, by the world size (AVG).
    Sum {
        /// Bytes of a sum. As many as of an element where that holds it; else sums have memory of their own.
        bytes: usize,
    },
}

impl Scaling {
    /// Bytes of what lies in `space`, where an element has so many.
    pub(crate) fn bytes_in(self, space: Space, element: usize) -> usize {
        match (space, self) {
            (Space::Sums, Scaling::Sum { bytes }) => bytes,
            _ => element,
        }
    }
}

impl Setting<'_> {
    /// All ranks, as seen from this one.
    pub fn world(&self) -> Group {
        Group::world(self.topo.size(), self.me)
    }

    /// How many elements the pieces of messages have in a collective over `total` elements: short enough that
    /// consecutive steps overlap, long enough that schedules stay small.
    pub(super) fn chunk(&self, total: usize) -> usize {
        self.chunk_of_elements(self.element, total)
    }

    /// As `chunk`, where the messages are pieces of `data`, which may be sums.
    pub(super) fn chunk_of(&self, data: Slice) -> usize {
        self.chunk_of_elements(self.bytes_in(data.space), data.len)
    }

    /// As `chunk`, where each pair of ranks goes by what it exchanges, and the piece that tells the end is shorter than the
    /// others: a little longer than a chunk, so that the usual lengths, powers of two, take no further piece for it.
    pub(super) fn delimited_chunk(&self, total: usize) -> usize {
        self.chunk(total) + (DELIMITED_BYTES / self.element).max(1)
    }

    pub(super) fn chunk_of_elements(&self, element: usize, total: usize) -> usize {
        match self.chunking {
            Chunking::Chunks => {
                let most = CHUNKS_MAX.div_ceil(self.scratch.pieces);
                (CHUNK_BYTES / element).max(total / most).max(1)
            }
            Chunking::Whole => total.max(1),
        }
    }

    /// As `chunk_of_elements`, where a rank holds the chunks of so many others to combine them at once: they take as much as copies
    /// may, or a 16th of the data where that is more.
    pub(super) fn chunk_to_fold(&self, element: usize, total: usize, others: usize) -> usize {
        let chunk = self.chunk_of_elements(element, total);
        if self.chunking == Chunking::Whole || others < 2 {
            return chunk;
        }
        let most = self.scratch.limit.max(total.saturating_mul(element) / FOLDED_PART);
        chunk.min(most / (direct::LANES * others * element)).max(1)
    }

    /// Bytes of what lies in `space`.
    pub(super) fn bytes_in(&self, space: Space) -> usize {
        self.scaling.bytes_in(space, self.element)
    }

    /// Whether sums need memory of their own.
    pub(super) fn widens(&self) -> bool {
        matches!(self.scaling, Scaling::Sum { bytes } if bytes != self.element)
    }
}

/// A schedule whose steps `write` appends.
pub(super) fn schedule(name: &'static str, write: impl FnOnce(&mut Builder)) -> Schedule {
    let mut builder = Builder::new(name);
    write(&mut builder);
    builder.finish()
}

/// Up to this many ranks, everyone talks to everyone.
pub(super) const DIRECT_MAX_RANKS: usize = 8;

/// The length of the pieces that long messages travel in.
const CHUNK_BYTES: usize = 256 * 1024;

/// By how much a chunk is longer where the last tells the end: a cache line, so that pieces begin where lines do.
const DELIMITED_BYTES: usize = 64;

/// Chunks that are combined at once are at most this part of the data, where that is more than copies may take.
const FOLDED_PART: usize = 16;

/// The most pieces that a collective's data is cut into.
const CHUNKS_MAX: usize = 256;
