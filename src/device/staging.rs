//! Staging memory: two halves a rank, which the other ranks of the host map.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::sync::Arc;
use crate::sys::cuda::{Context, CudaError, DeviceBytes, HostMemoryError, SharedDeviceMemory, SharedHostMemory};
use crate::types::Rank;

/// Where the staging memory of all ranks lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StagingKind {
    /// On the devices, which reach each other's memory.
    Device,
    /// In pinned memory of the host, which every device reaches.
    Host,
}

/// One rank's memory.
#[derive(Debug)]
enum Memory {
    Device(SharedDeviceMemory),
    Host(SharedHostMemory),
}

impl Memory {
    fn bytes(&self) -> DeviceBytes<'_> {
        match self {
            Memory::Device(memory) => memory.bytes(),
            Memory::Host(memory) => memory.bytes(),
        }
    }
}

/// The staging memory of all ranks, as one of them reaches it.
#[derive(Debug)]
pub struct Staging {
    me: Rank,
    half: usize,
    context: Arc<Context>,
    kind: StagingKind,
    /// By rank; nothing for one whose memory is not mapped yet.
    memory: Vec<Option<Memory>>,
}

impl Staging {
    /// This rank's own memory, of two halves of so many bytes, among those of so many ranks: on the device.
    pub fn new(context: &Arc<Context>, me: Rank, ranks: usize, half: usize) -> Result<Staging, CudaError> {
        let own = Memory::Device(SharedDeviceMemory::new(context, 2 * half)?);
        Ok(Staging::of(context, me, ranks, half, StagingKind::Device, own))
    }

    /// The same in pinned memory of the host.
    pub fn pinned(context: &Arc<Context>, me: Rank, ranks: usize, half: usize) -> Result<Staging, HostMemoryError> {
        let own = Memory::Host(SharedHostMemory::new(context, 2 * half)?);
        Ok(Staging::of(context, me, ranks, half, StagingKind::Host, own))
    }

    fn of(context: &Arc<Context>, me: Rank, ranks: usize, half: usize, kind: StagingKind, own: Memory) -> Staging {
        let mut memory: Vec<_> = (0..ranks).map(|_| None).collect();
        memory[me.index()] = Some(own);
        Staging { me, half, context: context.clone(), kind, memory }
    }

    /// The bytes of a half.
    pub fn half(&self) -> usize {
        self.half
    }

    /// Where the memory lies.
    pub fn kind(&self) -> StagingKind {
        self.kind
    }

    /// A file descriptor of this rank's memory for the others, and its length.
    pub fn export(&self) -> Result<(OwnedFd, usize), HostMemoryError> {
        let own = self.memory[self.me.index()].as_ref().expect("own memory is there from the start");
        let named = |cause: io::Error| HostMemoryError::Os { what: "a copy of a descriptor", cause };
        let fd = match own {
            Memory::Device(memory) => memory.export()?,
            Memory::Host(memory) => memory.export().map_err(named)?,
        };
        Ok((fd, own.bytes().len()))
    }

    /// Maps the memory that another rank has exported, unless it is mapped already.
    pub fn import(&mut self, of: Rank, fd: BorrowedFd<'_>, len: usize) -> Result<(), HostMemoryError> {
        let place = &mut self.memory[of.index()];
        if place.is_none() {
            *place = Some(match self.kind {
                StagingKind::Device => Memory::Device(SharedDeviceMemory::import(&self.context, fd, len)?),
                StagingKind::Host => Memory::Host(SharedHostMemory::import(&self.context, fd, len)?),
            });
        }
        Ok(())
    }

    /// Bytes of one half of a rank's memory.
    ///
    /// # Panics
    /// When they do not lie in it, or when that rank's memory is not mapped.
    pub fn bytes(&self, of: Rank, half: usize, offset: usize, len: usize) -> DeviceBytes<'_> {
        let memory = self.memory[of.index()].as_ref().expect("staging memory is mapped before it is used");
        memory.bytes().part(half * self.half, self.half).part(offset, len)
    }
}
