//! Memory that a library reads and writes in place: what the [allocator](crate::device::allocator) gave out, and what programs
//! have lent.
//!
//! NCCL leaves undefined what happens where some ranks of a call pass registered memory and others do not, so each rank tells
//! in the log which it passes. Source: its user guide, "User Buffer Registration".

use super::VendorComm;
use crate::device::allocator;
use crate::device::call_log::CallMemory;
use crate::sync::{Arc, lock};
use crate::sys::cuda::{Current, DeviceBytes};
use crate::sys::nccl::{NcclCall, NcclComm};

impl VendorComm {
    /// Registers the memory of calls, as far as it may be. Whether all of it is registered.
    pub(crate) fn register(&self, current: &Current<'_>, calls: &[NcclCall<'_>]) -> CallMemory {
        if !self.chosen.registers {
            return CallMemory::None;
        }
        let raw = lock(&self.raw).clone();
        let mut memory = CallMemory::None;
        for bytes in calls.iter().flat_map(NcclCall::memory).flatten().filter(|bytes| !bytes.is_empty()) {
            // The library takes calls in place only if both their sides are registered.
            if !self.is_registered(current, &raw, bytes) {
                return CallMemory::Plain;
            }
            memory = CallMemory::Registered;
        }
        memory
    }

    fn is_registered(&self, current: &Current<'_>, raw: &Arc<NcclComm>, bytes: DeviceBytes<'_>) -> bool {
        // One that lies in memory of the allocator needs no registration of its own.
        let region = allocator::around(bytes).or_else(|| lock(&self.chosen.lent).around(bytes));
        let Some(region) = region else { return false };
        region.is_registered(current, raw).unwrap_or_else(|error| {
            let (comm, begin) = (&self.chosen.comm, region.begin().to_bits());
            log::warn!("communicator `{comm}`: the memory at {begin:#x} is not registered: {error}");
            false
        })
    }
}
