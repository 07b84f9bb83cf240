//! Staging memory: two halves a rank, which the other ranks of the host map.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::sync::Arc;
use crate::sys::cuda::{Context, CudaError, DeviceBytes, SharedDeviceMemory};
use crate::types::Rank;

/// The staging memory of all ranks, as one of them reaches it.
#[derive(Debug)]
pub struct Staging {
    me: Rank,
    half: usize,
    context: Arc<Context>,
    /// By rank; nothing for one whose memory is not mapped yet.
    memory: Vec<Option<SharedDeviceMemory>>,
}

impl Staging {
    /// This rank's own memory, of two halves of so many bytes, among those of so many ranks.
    pub fn new(context: &Arc<Context>, me: Rank, ranks: usize, half: usize) -> Result<Staging, CudaError> {
        let mut memory: Vec<_> = (0..ranks).map(|_| None).collect();
        memory[me.index()] = Some(SharedDeviceMemory::new(context, 2 * half)?);
        Ok(Staging { me, half, context: context.clone(), memory })
    }

    /// The bytes of a half.
    pub fn half(&self) -> usize {
        self.half
    }

    /// Own memory for the others, with its length there.
    pub fn export(&self) -> Result<(OwnedFd, usize), CudaError> {
        let own = self.memory[self.me.index()].as_ref().expect("own memory is there from the start");
        Ok((own.export()?, own.bytes().len()))
    }

    /// Maps what another rank has exported; once, however often it is called.
    pub fn import(&mut self, of: Rank, fd: BorrowedFd<'_>, len: usize) -> Result<(), CudaError> {
        let place = &mut self.memory[of.index()];
        if place.is_none() {
            *place = Some(SharedDeviceMemory::import(&self.context, fd, len)?);
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
