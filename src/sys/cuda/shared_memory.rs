//! Device memory that other processes can map: made so here, or found to be so.
//!
//! Physical memory has a handle, and stays until all processes that have one have given it back and nothing is mapped to it
//! any more. What PyTorch's allocators lend consists of one such piece, or of several at addresses that follow each other.
#![allow(unsafe_code, reason = "calls the driver")]

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use cudarc::driver::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemGenericAllocationHandle,
    CUmemLocation, CUmemLocationType,
};

use super::context::Context;
use super::error::{Code, CudaError};
use super::functions::call;
use super::memory::DeviceBytes;
use crate::sync::Arc;

/// Device memory that several processes can map, and that stays until the last of them has given it back.
#[derive(Debug)]
pub struct SharedDeviceMemory {
    // In this order they go.
    addresses: Addresses,
    pages: Pages,
}

impl SharedDeviceMemory {
    /// At least so many bytes of device memory, with anything in them.
    pub fn new(context: &Arc<Context>, len: usize) -> Result<SharedDeviceMemory, CudaError> {
        let _current = context.enter()?;
        let properties = properties(context);
        let (mut granularity, kind) = (0, CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM);
        // SAFETY: `granularity` is a place for the result, and the properties are whole.
        unsafe { call!(cuMemGetAllocationGranularity(&raw mut granularity, &raw const properties, kind)) }?;
        // What no multiple is near is more than any device has.
        let len = len.max(1).checked_next_multiple_of(granularity.max(1)).unwrap_or(len);
        let mut handle = 0;
        // SAFETY: as above.
        unsafe { call!(cuMemCreate(&raw mut handle, len, &raw const properties, 0)) }?;
        let pages = Pages::new(handle, context);
        let addresses = Addresses::map(context, &[(&pages, len)])?;
        Ok(SharedDeviceMemory { addresses, pages })
    }

    /// Maps memory that another process has exported, of as many bytes as it has there.
    pub fn import(context: &Arc<Context>, fd: BorrowedFd<'_>, len: usize) -> Result<SharedDeviceMemory, CudaError> {
        let pages = Pages::import(context, fd)?;
        let addresses = Addresses::map(context, &[(&pages, len)])?;
        Ok(SharedDeviceMemory { addresses, pages })
    }

    /// The memory as a file descriptor, with which another process can import it.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        self.pages.export()
    }

    /// All of it, which may be more than was asked for.
    pub fn bytes(&self) -> DeviceBytes<'_> {
        self.addresses.bytes()
    }

    /// Gives it back, as dropping it does, and returns what did not work, which then stays.
    pub fn free(mut self) -> Result<(), CudaError> {
        self.addresses.give_back()?;
        self.pages.give_back()
    }
}

/// Why other processes cannot map memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// It was allocated so that it cannot be handed over.
    #[error("it was allocated in a way that lets no other process map it")]
    Closed,
    /// The driver refused something.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// Memory as other processes can import it: pieces at addresses that follow each other.
#[derive(Debug)]
pub struct Exported {
    /// Each with its length.
    pub pieces: Vec<(OwnedFd, usize)>,
    /// Where in them the memory begins.
    pub offset: usize,
}

/// Hands over memory that somebody else has allocated, with what lies around it in the same allocations.
pub fn export(context: &Arc<Context>, bytes: DeviceBytes<'_>) -> Result<Exported, ExportError> {
    let _current = context.enter()?;
    let (begin, end) = (bytes.ptr().to_bits(), bytes.ptr().to_bits() + bytes.len() as u64);
    let (mut pieces, mut offset, mut next) = (Vec::new(), 0, begin);
    while next < end {
        let (mut base, mut len) = (0, 0);
        // SAFETY: both are places for results; any address may be asked about.
        unsafe { call!(cuMemGetAddressRange_v2(&raw mut base, &raw mut len, next)) }?;
        let pages = Pages::of(context, base)?;
        if pieces.is_empty() {
            offset = (begin - base) as usize;
        }
        pieces.push((pages.export()?, len));
        next = base + len as u64;
    }
    Ok(Exported { pieces, offset })
}

/// Memory of another process, mapped here in one piece.
#[derive(Debug)]
pub struct ImportedMemory {
    // In this order they go.
    addresses: Addresses,
    _pages: Vec<Pages>,
}

impl ImportedMemory {
    /// Maps pieces, each of as many bytes as it has where it was exported.
    pub fn new(context: &Arc<Context>, pieces: &[(BorrowedFd<'_>, usize)]) -> Result<ImportedMemory, CudaError> {
        let pages = pieces.iter().map(|(fd, _)| Pages::import(context, *fd)).collect::<Result<Vec<_>, _>>()?;
        let lengths = pieces.iter().map(|(_, len)| *len);
        let addresses = Addresses::map(context, &pages.iter().zip(lengths).collect::<Vec<_>>())?;
        Ok(ImportedMemory { addresses, _pages: pages })
    }

    /// All of it.
    pub fn bytes(&self) -> DeviceBytes<'_> {
        self.addresses.bytes()
    }
}

const AS_DESCRIPTOR: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn location(context: &Context) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.device().raw }
}

fn properties(context: &Context) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: AS_DESCRIPTOR,
        location: location(context),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// Physical memory.
#[derive(Debug)]
struct Pages {
    handle: CUmemGenericAllocationHandle,
    is_held: bool,
    context: Arc<Context>,
}

impl Pages {
    /// What has this handle, which goes with it.
    fn new(handle: CUmemGenericAllocationHandle, context: &Arc<Context>) -> Pages {
        Pages { handle, is_held: true, context: context.clone() }
    }

    fn import(context: &Arc<Context>, fd: BorrowedFd<'_>) -> Result<Pages, CudaError> {
        let _current = context.enter()?;
        let mut handle = 0;
        let fd = std::ptr::without_provenance_mut::<c_void>(fd.as_raw_fd() as usize);
        // SAFETY: `handle` is a place for the result, and a descriptor is handed over as the number in a pointer; what is no
        // memory of a device is refused.
        unsafe { call!(cuMemImportFromShareableHandle(&raw mut handle, fd, AS_DESCRIPTOR)) }?;
        Ok(Pages::new(handle, context))
    }

    /// What is mapped to an address, if other processes can map it too.
    fn of(context: &Arc<Context>, address: CUdeviceptr) -> Result<Pages, ExportError> {
        let mut handle = 0;
        let at = std::ptr::without_provenance_mut::<c_void>(address as usize);
        // SAFETY: `handle` is a place for the result; any address may be asked about.
        match unsafe { call!(cuMemRetainAllocationHandle(&raw mut handle, at)) } {
            Err(CudaError::Call { code: Code::InvalidValue, .. }) => return Err(ExportError::Closed),
            result => result?,
        }
        let pages = Pages::new(handle, context);
        let mut found = properties(context);
        // SAFETY: `found` is a place for the result, and the handle is held.
        unsafe { call!(cuMemGetAllocationPropertiesFromHandle(&raw mut found, handle)) }?;
        let is_open = found.requestedHandleTypes.0 & AS_DESCRIPTOR.0 != 0;
        if is_open { Ok(pages) } else { Err(ExportError::Closed) }
    }

    fn export(&self) -> Result<OwnedFd, CudaError> {
        let _current = self.context.enter()?;
        let mut fd: RawFd = -1;
        // SAFETY: for a descriptor the place for the result is that of an int.
        unsafe { call!(cuMemExportToShareableHandle((&raw mut fd).cast(), self.handle, AS_DESCRIPTOR, 0)) }?;
        // SAFETY: the driver has just made it, for the caller to close.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn give_back(&mut self) -> Result<(), CudaError> {
        if !std::mem::replace(&mut self.is_held, false) {
            return Ok(());
        }
        let _current = self.context.enter();
        // SAFETY: created, imported or retained by who made self; the pages stay while something is mapped to them.
        unsafe { call!(cuMemRelease(self.handle)) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let result = self.give_back();
        self.context.give_back(|| result);
    }
}

/// Reserved addresses of a device, and whether pages are mapped to them.
#[derive(Debug)]
struct Addresses {
    base: CUdeviceptr,
    len: usize,
    /// How many bytes have something mapped to them, from the first on.
    mapped: usize,
    is_reserved: bool,
    context: Arc<Context>,
}

impl Addresses {
    /// Maps pages, each of so many bytes, one after the other.
    fn map(context: &Arc<Context>, pages: &[(&Pages, usize)]) -> Result<Addresses, CudaError> {
        let _current = context.enter()?;
        let len = pages.iter().fold(0, |sum: usize, (_, len)| sum.saturating_add(*len));
        let mut base = 0;
        // SAFETY: `base` is a place for the result.
        unsafe { call!(cuMemAddressReserve(&raw mut base, len, 0, 0, 0)) }?;
        let mut addresses = Addresses { base, len, mapped: 0, is_reserved: true, context: context.clone() };
        for (pages, len) in pages {
            // SAFETY: the addresses have just been reserved, and there is nothing at them.
            unsafe { call!(cuMemMap(base + addresses.mapped as u64, *len, 0, pages.handle, 0)) }?;
            addresses.mapped += len;
        }
        let access = CUmemAccessDesc {
            location: location(context),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: one description is read, of addresses that are mapped.
        unsafe { call!(cuMemSetAccess(base, len, &raw const access, 1)) }?;
        Ok(addresses)
    }

    fn bytes(&self) -> DeviceBytes<'_> {
        DeviceBytes::new(self.base, self.len)
    }

    fn give_back(&mut self) -> Result<(), CudaError> {
        if !std::mem::replace(&mut self.is_reserved, false) {
            return Ok(());
        }
        let _current = self.context.enter();
        if self.mapped > 0 {
            // Addresses to which something stays mapped stay reserved.
            // SAFETY: mapped by who made self; the driver waits for the operations that use it.
            unsafe { call!(cuMemUnmap(self.base, self.mapped)) }?;
        }
        // SAFETY: reserved by who made self; nothing is mapped there any more.
        unsafe { call!(cuMemAddressFree(self.base, self.len)) }
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        let result = self.give_back();
        self.context.give_back(|| result);
    }
}
