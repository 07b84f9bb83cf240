//! Device memory for an allocator such as PyTorch's, which other processes can map: the engine's own, or that of a vendor's
//! library for communicators that go by it.
//!
//! The memory belongs to no communicator; communicators of a library register what their calls pass of it. Callers of
//! [`allocate`] and [`free`] hold locks of their own, so neither writes a log, which may wait for locks too. A forked child can neither use nor give back what its parent has allocated.

use std::collections::HashMap;

pub use crate::device::regions::MemoryError;
use crate::device::regions::{Memory, Region, Regions};
use crate::sync::{Arc, Mutex, lock};
use crate::sys::cuda::{Code, Context, CudaError, Device, DeviceBytes, DevicePtr, SharedDeviceMemory};
use crate::sys::fork::PerProcess;
use crate::sys::nccl::{Feature, LibraryMemory, Nccl, NcclError};

/// What allocates device memory for a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allocates {
    /// The engine.
    Engine,
    /// The vendor's library by which the communicator's tensors go.
    Library,
    /// The engine, since the library cannot: this says why.
    InPlaceOfLibrary(String),
}

#[derive(Default)]
struct Allocated {
    /// By device. They stay: to make one anew takes long.
    contexts: HashMap<u32, Arc<Context>>,
    /// What allocates for communicators that go by a library.
    library: Option<Arc<Nccl>>,
    memory: Regions,
}

static ALLOCATED: PerProcess<Mutex<Allocated>> = PerProcess::unset();

/// Has [`allocate_by_library`] take this library, unless it has one: the memory of one serves the others as well.
///
/// # Errors
/// It has no allocator.
pub fn use_library(library: &Arc<Nccl>) -> Result<(), NcclError> {
    if !library.features().contains(&Feature::Memory) {
        return Err(library.lacks(Feature::Memory));
    }
    lock(ALLOCATED.get()).library.get_or_insert_with(|| library.clone());
    Ok(())
}

/// Allocates at least `bytes` bytes, with any content, on this device. Returns their address.
pub fn allocate(bytes: usize, device: u32) -> Result<u64, MemoryError> {
    let context = context(device)?;
    let memory = SharedDeviceMemory::new(&context, bytes)?;
    Ok(keep(Memory::Own(memory), context))
}

/// As [`allocate`], by the vendor's library.
pub fn allocate_by_library(bytes: usize, device: u32) -> Result<u64, MemoryError> {
    let library = lock(ALLOCATED.get()).library.clone().ok_or(MemoryError::NoLibrary)?;
    let context = context(device)?;
    let memory = LibraryMemory::new(&library, &context.enter()?, bytes)?;
    Ok(keep(Memory::Library(memory), context))
}

fn context(device: u32) -> Result<Arc<Context>, CudaError> {
    let mut allocated = lock(ALLOCATED.get());
    if let Some(context) = allocated.contexts.get(&device) {
        return Ok(context.clone());
    }
    let context = Context::primary(Device::new(device)?)?;
    allocated.contexts.insert(device, context.clone());
    Ok(context)
}

fn keep(memory: Memory, context: Arc<Context>) -> u64 {
    let region = Region::new(memory, context);
    let address = region.begin().to_bits();
    let refused = lock(ALLOCATED.get()).memory.insert(region);
    assert!(refused.is_none(), "what an allocator returns is where nothing is");
    address
}

/// Gives back what [`allocate`] or [`allocate_by_library`] has returned. Waits for what streams do with it, and ends its
/// registrations.
///
/// # Errors
/// The driver or the library refused it, and the memory stays; or this process has not allocated it.
pub fn free(address: u64) -> Result<(), MemoryError> {
    let at = DevicePtr::from_bits(address);
    let unknown = CudaError::Call { call: "cuMemUnmap", code: Code::InvalidValue };
    let region = lock(ALLOCATED.get()).memory.get(at).ok_or(unknown.clone())?;
    // A library does not wait, and not all drivers do when memory is unmapped.
    region.wait()?;
    let removed = lock(ALLOCATED.get()).memory.remove(at);
    // Another thread may have been faster.
    match removed.ok_or(unknown.clone())?.end()? {
        Some(Memory::Own(memory)) => Ok(memory.free()?),
        Some(Memory::Library(memory)) => Ok(memory.free(&region.context().enter()?)?),
        Some(Memory::Lent { .. }) | None => Err(unknown.into()),
    }
}

/// The piece of memory that was allocated here and has all these bytes.
pub(crate) fn around(bytes: DeviceBytes<'_>) -> Option<Arc<Region>> {
    lock(ALLOCATED.get()).memory.around(bytes)
}
