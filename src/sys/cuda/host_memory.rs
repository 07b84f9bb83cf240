//! Host memory that streams reach, and that several processes can map.
//!
//! Streams read and write it, and whoever asks for [`SharedHostMemory::address`]: Rust holds no reference to what is in it.
#![allow(unsafe_code, reason = "maps memory, and calls the driver")]

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use cudarc::driver::sys::CUdeviceptr;
use rustix::mm::{MapFlags, ProtFlags};

use super::context::Context;
use super::error::CudaError;
use super::functions::call;
use super::memory::DeviceBytes;
use super::words::{FOR_ALL_CONTEXTS, MAPPED};
use crate::sync::Arc;
use crate::sys::memfd::{self, Pages};

/// Why there is no memory that processes share.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostMemoryError {
    /// The driver refused it.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The system refused it.
    #[error("{what} failed: {cause}")]
    Os {
        /// What was asked for.
        what: &'static str,
        /// What the system said.
        cause: io::Error,
    },
}

/// Pinned host memory that several processes can map, and that stays until the last of them has given it back.
#[derive(Debug)]
pub struct SharedHostMemory {
    // In this order they go.
    registration: Registration,
    fd: OwnedFd,
}

impl SharedHostMemory {
    /// At least so many bytes, all zero.
    pub fn new(context: &Arc<Context>, len: usize) -> Result<SharedHostMemory, HostMemoryError> {
        let len = len.max(1).next_multiple_of(rustix::param::page_size());
        let fd = memfd::create(len as u64, Pages::Now).map_err(os("memory that processes share"))?;
        SharedHostMemory::map(context, fd, len)
    }

    /// Maps memory that another process has exported, of as many bytes as it has there.
    pub fn import(context: &Arc<Context>, fd: BorrowedFd<'_>, len: usize) -> Result<SharedHostMemory, HostMemoryError> {
        let named = os("a look at another process's memory");
        let is_whole = memfd::cannot_shrink(fd).and_then(|cannot| {
            let size = rustix::fs::fstat(fd)?.st_size;
            Ok(cannot && len > 0 && usize::try_from(size).is_ok_and(|size| size == len))
        });
        match is_whole {
            Ok(true) => {}
            Ok(false) => return Err(named(io::Error::other(format!("it is not {len} bytes that stay")))),
            Err(error) => return Err(named(error)),
        }
        let fd = fd.try_clone_to_owned().map_err(os("a copy of a descriptor"))?;
        SharedHostMemory::map(context, fd, len)
    }

    /// A file descriptor with which another process can import it.
    pub fn export(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// All of it, as the device reaches it; that may be more than was asked for.
    pub fn bytes(&self) -> DeviceBytes<'_> {
        DeviceBytes::new(self.registration.device, self.registration.mapping.len)
    }

    /// Where it lies in this process.
    pub fn address(&self) -> *mut u8 {
        self.registration.mapping.base.cast()
    }

    fn map(context: &Arc<Context>, fd: OwnedFd, len: usize) -> Result<SharedHostMemory, HostMemoryError> {
        let mapping = Mapping::new(fd.as_fd(), len).map_err(os("mmap"))?;
        Ok(SharedHostMemory { registration: Registration::new(context, mapping)?, fd })
    }
}

fn os(what: &'static str) -> impl Fn(io::Error) -> HostMemoryError {
    move |cause| HostMemoryError::Os { what, cause }
}

/// Pages of a file, mapped into this process.
#[derive(Debug)]
struct Mapping {
    base: *mut c_void,
    len: usize,
}

// SAFETY: the mapping is owned and stays at its address until drop, and nothing here accesses what is in it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, fd, 0) }?;
        Ok(Mapping { base, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `new`, which no device reaches any more; nothing borrows from it.
        let _ = unsafe { rustix::mm::munmap(self.base, self.len) };
    }
}

/// A mapping that a device reaches.
#[derive(Debug)]
struct Registration {
    mapping: std::mem::ManuallyDrop<Mapping>,
    device: CUdeviceptr,
    context: Arc<Context>,
}

impl Registration {
    fn new(context: &Arc<Context>, mapping: Mapping) -> Result<Registration, CudaError> {
        let _current = context.enter()?;
        let (host, bytes) = (mapping.base, mapping.len);
        // SAFETY: the mapping is whole pages, and self keeps it until it is unregistered; this process does not access it.
        unsafe { call!(cuMemHostRegister_v2(host, bytes, FOR_ALL_CONTEXTS | MAPPED)) }?;
        let mapping = std::mem::ManuallyDrop::new(mapping);
        let mut registered = Registration { mapping, device: 0, context: context.clone() };
        // SAFETY: `device` is a place for the result, and the memory has just been registered.
        unsafe { call!(cuMemHostGetDevicePointer_v2(&raw mut registered.device, host, 0)) }?;
        Ok(registered)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: registered in `new`; the driver waits for the operations that use it.
        let is_unregistered = self.context.give_back(|| unsafe { call!(cuMemHostUnregister(self.mapping.base)) });
        // Where that failed, the device still reaches the pages, so nothing else may come to lie at their addresses.
        if is_unregistered {
            // SAFETY: nobody uses it after this.
            unsafe { std::mem::ManuallyDrop::drop(&mut self.mapping) };
        }
    }
}
