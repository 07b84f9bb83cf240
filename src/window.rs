//! Windows: memory that a rank exposes to the other ranks, which read and write it without its taking part (MPI's RMA).
//!
//! [`Communicator::window_register`](crate::Communicator::window_register) makes one on every rank. To write, a rank
//! submits [`OpKind::Put`](crate::OpKind::Put) and then [`OpKind::Signal`](crate::OpKind::Signal). The owner submits
//! [`OpKind::WaitSignal`](crate::OpKind::WaitSignal); then it sees everything that the signalling rank had put before. A put
//! alone notifies its target of nothing. [`OpKind::Get`](crate::OpKind::Get) reads the current content, and
//! [`OpKind::Accumulate`](crate::OpKind::Accumulate) adds to it. [`OpKind::Flush`](crate::OpKind::Flush) waits until what was
//! put before is there, and [`Communicator::window_fence`](crate::Communicator::window_fence) until what all ranks have put is.
//! Parts that lie in a [`SharedMemory`](crate::SharedMemory) can be mapped by the other ranks of the host
//! ([`Communicator::window_map`](crate::Communicator::window_map)). Where all do, on one host, puts and gets are copies that the
//! caller makes. [`OpKind::AllGatherPersistent`](crate::OpKind::AllGatherPersistent) gathers into a window again and again.
//!
//! Windows in the memory of CUDA devices are accessed by [`Mode::Stream`](crate::Mode::Stream), in the order of streams: a
//! signal announces what was put before it on any stream, and what follows a wait on its stream sees it.
//!
//! ```
//! # use std::sync::Arc;
//! # use ncclx_rs::comm::store::MemoryStore;
//! # use ncclx_rs::{Buffer, Buffers, CommOptions, Communicator, DType, Mode, Op, OpKind, Rank};
//! # let options = CommOptions {
//! #     name: "example".into(),
//! #     rank: Rank(0),
//! #     size: 1,
//! #     store: Arc::new(MemoryStore::default()),
//! #     timeout: None,
//! #     hints: vec![],
//! # };
//! # let comm = Communicator::new(options)?;
//! let (mut memory, mut data) = ([0u8; 4], [7u8; 2]);
//! // SAFETY: both outlive the window, and no code accesses them while they are written.
//! let lent = unsafe { Buffer::from_raw(memory.as_mut_ptr(), 4, DType::U8) };
//! let source = unsafe { Buffer::from_raw(data.as_mut_ptr(), 2, DType::U8) };
//! let window = comm.window_register(lent)?.id();
//! let run = |kind, inputs, outputs| {
//!     comm.submit(Op { kind, inputs, outputs, timeout: None, mode: Mode::Blocking })?.wait(None)
//! };
//! run(OpKind::Put { window, to: Rank(0), offset: 1 }, [source].into(), Buffers::new())?;
//! run(OpKind::Signal { window, to: Rank(0) }, Buffers::new(), Buffers::new())?;
//! run(OpKind::WaitSignal { window, from: Rank(0) }, Buffers::new(), Buffers::new())?;
//! assert_eq!(memory, [0, 7, 7, 0]);
//! let mut copy = [9u8; 3];
//! // SAFETY: as above.
//! let target = unsafe { Buffer::from_raw(copy.as_mut_ptr(), 3, DType::U8) };
//! run(OpKind::Get { window, from: Rank(0), offset: 1 }, Buffers::new(), [target].into())?;
//! assert_eq!(copy, [7, 7, 0]);
//! comm.window_deregister(window)?;
//! # Ok::<(), ncclx_rs::Error>(())
//! ```

use std::fmt;

use crate::buffer::Memory;
use crate::sys::segment::SegmentPlace;
use crate::types::Rank;

/// The id of a window: its number in its communicator, the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WindowId(pub u64);

impl fmt::Display for WindowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How a get reaches a rank's part of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GetPath {
    /// This rank's processor, or its device, copies from memory that it has mapped; also of its own part.
    Mapped,
    /// A transport reads the rank's memory without its help.
    RemoteReads,
    /// That rank answers a message.
    Messages,
}

impl GetPath {
    /// The name in dumps and in Python.
    pub fn name(self) -> &'static str {
        match self {
            GetPath::Mapped => "mapped",
            GetPath::RemoteReads => "remote_reads",
            GetPath::Messages => "messages",
        }
    }
}

/// A registered window. It does not own memory: each rank's is exposed until the window is deregistered or the communicator
/// closes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    id: WindowId,
    sizes: Vec<usize>,
    /// Where the part of each rank can be mapped, if it can.
    places: Vec<Option<SegmentPlace>>,
    /// Where this rank's part lies.
    memory: Memory,
}

impl Window {
    /// Describes the window `id`; `sizes` are the bytes that each rank exposes, this one in `memory`. `places` say where ranks'
    /// memory can be mapped.
    pub(crate) fn new(id: WindowId, sizes: Vec<usize>, places: Vec<Option<SegmentPlace>>, memory: Memory) -> Window {
        Window { id, sizes, places, memory }
    }

    /// The id that operations take.
    pub fn id(&self) -> WindowId {
        self.id
    }

    /// The number of bytes that `rank` exposes; none if there is no such rank.
    pub fn bytes(&self, rank: Rank) -> usize {
        self.sizes.get(rank.index()).copied().unwrap_or(0)
    }

    /// Where the processes of its host can map the part of `rank`; nowhere if it does not lie in memory made for that.
    pub(crate) fn place(&self, rank: Rank) -> Option<SegmentPlace> {
        self.places.get(rank.index()).copied().flatten()
    }

    /// Where this rank's part lies. All ranks' do on the host, or all on CUDA devices.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Refuses `len` bytes from `offset` on if they are not all inside the memory of `rank`.
    pub(crate) fn check(&self, rank: Rank, offset: usize, len: usize) -> Result<(), String> {
        match (offset.checked_add(len), self.bytes(rank)) {
            (Some(end), bytes) if end <= bytes => Ok(()),
            (end, bytes) => {
                let requested = end.unwrap_or(usize::MAX);
                Err(format!("Requested size ({requested} bytes) exceeds the window size ({bytes} bytes)"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_inside_the_window_passes() {
        let window = Window::new(WindowId(0), vec![16, 0], vec![], Memory::Host);
        assert_eq!(window.check(Rank(0), 0, 16), Ok(()));
        assert_eq!(window.check(Rank(0), 16, 0), Ok(()));
        assert_eq!(window.check(Rank(1), 0, 0), Ok(()));
        let refused = window.check(Rank(0), 12, 8).expect_err("beyond the end");
        assert_eq!(refused, "Requested size (20 bytes) exceeds the window size (16 bytes)");
        assert!(window.check(Rank(1), 0, 1).is_err());
        assert!(window.check(Rank(0), usize::MAX, 2).is_err());
        assert!(window.check(Rank(7), 0, 1).is_err());
    }
}
