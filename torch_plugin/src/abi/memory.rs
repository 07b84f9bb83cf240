//! Entries for memory of devices that a vendor's library takes in place.

use std::ffi::c_void;

use ncclx_rs::Communicator;
use ncclx_rs::device::allocator::Allocates;

use super::entry::{RawBuffer, RawError, buffers, failure, guarded, without_tensors, write_text};

/// What keeps a tensor's memory, until this is dropped.
struct Owner {
    kept: *mut c_void,
    let_go: Drops,
}

pub(super) type Drops = unsafe extern "C" fn(*mut c_void);

// SAFETY: the shim lets memory go on any thread, as the header says.
unsafe impl Send for Owner {}
// SAFETY: nothing but its drop uses it.
unsafe impl Sync for Owner {}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: the shim hands both over together, to be called once.
        unsafe { (self.let_go)(self.kept) };
    }
}

pub(super) extern "C" fn allocates(comm: *const Communicator, by_library: *mut u32, error: *mut RawError) -> i32 {
    without_tensors(error, || {
        // SAFETY: given out by `create` and not yet given back.
        let comm = unsafe { &*comm };
        let allocates = comm.allocates().map_err(|error| failure(&error))?;
        // SAFETY: the shim passes a place for the result.
        unsafe { *by_library = u32::from(allocates == Allocates::Library) };
        write_text(error, if let Allocates::InPlaceOfLibrary(why) = &allocates { why } else { "" });
        Ok(())
    })
}

pub(super) extern "C" fn memory_register(
    comm: *const Communicator,
    memory: *const RawBuffer,
    kept: *mut c_void,
    let_go: Drops,
    error: *mut RawError,
) -> i32 {
    let owner = Owner { kept, let_go };
    guarded(error, || {
        // SAFETY: given out by `create` and not yet given back.
        let comm = unsafe { &*comm };
        // SAFETY: one buffer that lives for the call, in memory that the owner keeps.
        let memory = unsafe { buffers(memory, 1) }?;
        comm.register_memory(memory[0], Box::new(owner)).map_err(|error| failure(&error))
    })
}

pub(super) extern "C" fn memory_deregister(
    comm: *const Communicator,
    memory: *const RawBuffer,
    error: *mut RawError,
) -> i32 {
    guarded(error, || {
        // SAFETY: given out by `create` and not yet given back.
        let comm = unsafe { &*comm };
        // SAFETY: one buffer that lives for the call.
        let memory = unsafe { buffers(memory, 1) }?;
        comm.deregister_memory(memory[0]).map_err(|error| failure(&error))
    })
}
