//! Device memory by a library's own allocator.
#![allow(unsafe_code, reason = "calls a library in C")]

use super::functions::Address;
use super::library::{Feature, Nccl, NcclError};
use crate::sync::Arc;
use crate::sys::cuda::{Current, DeviceBytes};

/// Device memory as a library wants it: with the granularity and the handles that its ways of registering take.
///
/// Dropped without [`LibraryMemory::free`], it stays until the process ends.
#[derive(Debug)]
pub struct LibraryMemory {
    library: Arc<Nccl>,
    address: u64,
    len: usize,
}

impl LibraryMemory {
    /// So many bytes, with anything in them, on the current context's device.
    pub fn new(library: &Arc<Nccl>, _: &Current<'_>, len: usize) -> Result<LibraryMemory, NcclError> {
        let allocate = library.functions().mem_alloc.filter(|_| library.features().contains(&Feature::Memory));
        let allocate = allocate.ok_or_else(|| library.lacks(Feature::Memory))?;
        let mut address: Address = std::ptr::null_mut();
        // A length of zero is refused.
        let len = len.max(1);
        // SAFETY: `address` is a place for the result.
        library.check("ncclMemAlloc", unsafe { allocate(&raw mut address, len) })?;
        Ok(LibraryMemory { library: library.clone(), address: address.expose_provenance() as u64, len })
    }

    /// All of it.
    pub fn bytes(&self) -> DeviceBytes<'_> {
        // SAFETY: the library has allocated it, and only `free` gives it back, which takes self. That something on streams
        // uses it, who calls `free` rules out.
        unsafe { DeviceBytes::from_raw(self.address, self.len) }
    }

    /// Gives it back. Nothing on a stream uses it any more, since the library does not wait, and nothing is registered.
    pub fn free(self, _: &Current<'_>) -> Result<(), NcclError> {
        let free = self.library.functions().mem_free.ok_or_else(|| self.library.lacks(Feature::Memory))?;
        let address: Address = std::ptr::with_exposed_provenance_mut(self.address as usize);
        // SAFETY: from `ncclMemAlloc` of this library, and given back once, as self goes.
        self.library.check("ncclMemFree", unsafe { free(address) })
    }
}
