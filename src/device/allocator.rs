//! Device memory for an allocator such as PyTorch's, which other processes can map.
//!
//! The memory belongs to no communicator. Callers of [`allocate`] and [`free`] hold locks of their own, so neither writes a
//! log, which may wait for locks too. A forked child can neither use nor give back what its parent has allocated.

use std::collections::HashMap;

use crate::sync::{Arc, Mutex, lock};
use crate::sys::cuda::{Code, Context, CudaError, Device, SharedDeviceMemory};
use crate::sys::fork::PerProcess;

#[derive(Default)]
struct Allocated {
    /// By device. They stay: to make one anew takes long.
    contexts: HashMap<u32, Arc<Context>>,
    /// By address.
    memory: HashMap<u64, SharedDeviceMemory>,
}

static ALLOCATED: PerProcess<Mutex<Allocated>> = PerProcess::unset();

/// Allocates at least `bytes` bytes, with any content, on this device. Returns their address.
pub fn allocate(bytes: usize, device: u32) -> Result<u64, CudaError> {
    let context = {
        let mut allocated = lock(ALLOCATED.get());
        match allocated.contexts.get(&device) {
            Some(context) => context.clone(),
            None => {
                let context = Context::primary(Device::new(device)?)?;
                allocated.contexts.insert(device, context.clone());
                context
            }
        }
    };
    let memory = SharedDeviceMemory::new(&context, bytes)?;
    let address = memory.bytes().ptr().to_bits();
    lock(ALLOCATED.get()).memory.insert(address, memory);
    Ok(address)
}

/// Gives back what [`allocate`] has returned. Waits for what streams do with it.
///
/// # Errors
/// The driver refused it, and the memory stays; or this process has not allocated it.
pub fn free(address: u64) -> Result<(), CudaError> {
    let memory = lock(ALLOCATED.get()).memory.remove(&address);
    let unknown = CudaError::Call { call: "cuMemUnmap", code: Code::InvalidValue };
    memory.ok_or(unknown)?.free()
}
