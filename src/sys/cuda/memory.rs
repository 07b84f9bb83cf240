//! Device memory: a process's own, and such as other processes can map.
//!
//! Nothing here dereferences a device address. Host memory that a stream reaches is only what is registered, and of that only
//! words, which are atomic: so no operation of a stream changes what Rust holds a reference to.
#![allow(unsafe_code, reason = "calls the driver")]

use std::ffi::c_void;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use cudarc::driver::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemGenericAllocationHandle,
    CUmemLocation, CUmemLocationType, CUpointer_attribute,
};

use super::context::{Context, Current};
use super::error::{Code, CudaError};
use super::functions::call;
use crate::sync::Arc;

/// An address of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DevicePtr(pub(super) CUdeviceptr);

impl DevicePtr {
    /// The address as a number.
    pub fn to_bits(self) -> u64 {
        self.0
    }
}

/// Bytes of device memory that stays as long as `'a`: what frees it waits for the operations that use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceBytes<'a> {
    ptr: DevicePtr,
    len: usize,
    _memory: PhantomData<&'a ()>,
}

impl<'a> DeviceBytes<'a> {
    pub(super) fn new(base: CUdeviceptr, len: usize) -> DeviceBytes<'a> {
        DeviceBytes { ptr: DevicePtr(base), len, _memory: PhantomData }
    }

    /// Bytes that somebody else has allocated.
    ///
    /// # Safety
    /// They are memory of a device, which nothing but devices reads and writes. They stay as long as `'a` and until what is put
    /// on streams meanwhile has run. `address` may be any number when `len` is zero.
    pub unsafe fn from_raw(address: u64, len: usize) -> DeviceBytes<'a> {
        DeviceBytes::new(address, len)
    }

    /// Where they begin.
    pub fn ptr(self) -> DevicePtr {
        self.ptr
    }

    /// How many they are.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// `len` bytes from the `offset`-th on.
    ///
    /// # Panics
    /// When they do not lie inside these.
    pub fn part(self, offset: usize, len: usize) -> DeviceBytes<'a> {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(is_inside, "{self:?} has no {len} bytes at {offset}");
        DeviceBytes::new(self.ptr.0 + offset as u64, len)
    }
}

/// Device memory of this process alone.
#[derive(Debug)]
pub struct DeviceMemory {
    base: CUdeviceptr,
    len: usize,
    context: Arc<Context>,
}

impl DeviceMemory {
    /// So many bytes, with anything in them.
    pub fn new(context: &Arc<Context>, len: usize) -> Result<DeviceMemory, CudaError> {
        let mut base = 0;
        let _current = context.enter()?;
        // SAFETY: `base` is a place for the result. The driver refuses a length of zero.
        unsafe { call!(cuMemAlloc_v2(&raw mut base, len.max(1))) }?;
        Ok(DeviceMemory { base, len, context: context.clone() })
    }

    /// All of it.
    pub fn bytes(&self) -> DeviceBytes<'_> {
        DeviceBytes::new(self.base, self.len)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; the driver waits for the operations that use it.
        self.context.give_back(|| unsafe { call!(cuMemFree_v2(self.base)) });
    }
}

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
        let len = len.max(1).next_multiple_of(granularity.max(1));
        let mut handle = 0;
        // SAFETY: as above.
        unsafe { call!(cuMemCreate(&raw mut handle, len, &raw const properties, 0)) }?;
        SharedDeviceMemory::map(Pages { handle, context: context.clone() }, len)
    }

    /// Maps memory that another process has exported, of as many bytes as it has there.
    pub fn import(context: &Arc<Context>, fd: BorrowedFd<'_>, len: usize) -> Result<SharedDeviceMemory, CudaError> {
        let _current = context.enter()?;
        let mut handle = 0;
        let fd = std::ptr::without_provenance_mut::<c_void>(fd.as_raw_fd() as usize);
        // SAFETY: `handle` is a place for the result, and a descriptor is handed over as the number in a pointer; what is no
        // memory of a device is refused.
        unsafe { call!(cuMemImportFromShareableHandle(&raw mut handle, fd, AS_DESCRIPTOR)) }?;
        SharedDeviceMemory::map(Pages { handle, context: context.clone() }, len)
    }

    /// The memory as a file descriptor, with which another process can import it.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        let _current = self.pages.context.enter()?;
        let mut fd: RawFd = -1;
        // SAFETY: for a descriptor the place for the result is that of an int.
        unsafe { call!(cuMemExportToShareableHandle((&raw mut fd).cast(), self.pages.handle, AS_DESCRIPTOR, 0)) }?;
        // SAFETY: the driver has just made it, for the caller to close.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// All of it, which may be more than was asked for.
    pub fn bytes(&self) -> DeviceBytes<'_> {
        DeviceBytes::new(self.addresses.base, self.addresses.len)
    }

    fn map(pages: Pages, len: usize) -> Result<SharedDeviceMemory, CudaError> {
        let mut base = 0;
        // SAFETY: `base` is a place for the result.
        unsafe { call!(cuMemAddressReserve(&raw mut base, len, 0, 0, 0)) }?;
        let mut addresses = Addresses { base, len, is_mapped: false, context: pages.context.clone() };
        // SAFETY: the addresses have just been reserved, and there is nothing at them.
        unsafe { call!(cuMemMap(base, len, 0, pages.handle, 0)) }?;
        addresses.is_mapped = true;
        let access = CUmemAccessDesc {
            location: location(&pages.context),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: one description is read, of addresses that are mapped.
        unsafe { call!(cuMemSetAccess(base, len, &raw const access, 1)) }?;
        Ok(SharedDeviceMemory { addresses, pages })
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
    context: Arc<Context>,
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: created or imported by who made self; the pages stay while something is mapped to them.
        self.context.give_back(|| unsafe { call!(cuMemRelease(self.handle)) });
    }
}

/// Reserved addresses of a device, and whether pages are mapped to them.
#[derive(Debug)]
struct Addresses {
    base: CUdeviceptr,
    len: usize,
    is_mapped: bool,
    context: Arc<Context>,
}

impl Drop for Addresses {
    fn drop(&mut self) {
        // SAFETY: mapped by who made self; the driver waits for the operations that use it.
        let unmap = || unsafe { call!(cuMemUnmap(self.base, self.len)) };
        // Addresses to which something stays mapped stay reserved.
        if !self.is_mapped || self.context.give_back(unmap) {
            // SAFETY: reserved by who made self; nothing is mapped there any more.
            self.context.give_back(|| unsafe { call!(cuMemAddressFree(self.base, self.len)) });
        }
    }
}

/// Copies to device memory, and returns when that is done. No stream waits for it.
///
/// # Panics
/// When the lengths differ.
pub fn copy_from_host(_: &Current<'_>, from: &[u8], into: DeviceBytes<'_>) -> Result<(), CudaError> {
    assert_eq!(from.len(), into.len);
    // SAFETY: there are as many bytes, which stay borrowed until it returns.
    unsafe { call!(cuMemcpyHtoD_v2(into.ptr.0, from.as_ptr().cast(), from.len())) }
}

/// Copies from device memory, and returns when that is done. It waits for no stream.
///
/// # Panics
/// When the lengths differ.
pub fn copy_to_host(_: &Current<'_>, from: DeviceBytes<'_>, into: &mut [u8]) -> Result<(), CudaError> {
    assert_eq!(from.len, into.len());
    // SAFETY: there is room for as many bytes, borrowed for this alone until it returns.
    unsafe { call!(cuMemcpyDtoH_v2(into.as_mut_ptr().cast(), from.ptr.0, into.len())) }
}

/// What the driver knows of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointerInfo {
    /// The number of the device.
    pub device: u32,
    /// Whether the memory is the device's, rather than the host's.
    pub is_on_device: bool,
    /// Names the allocation, also when another one has had the address before.
    pub allocation: u64,
}

impl PointerInfo {
    /// What the driver knows of an address; nothing of ordinary memory.
    pub fn of(_: &Current<'_>, address: u64) -> Result<Option<PointerInfo>, CudaError> {
        let (mut device, mut kind, mut allocation) = (0i32, 0u32, 0u64);
        let (ordinal, memory) = (
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        );
        let id = CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
        // SAFETY: the attribute is an int, and this a place for one; any address may be asked about.
        match unsafe { call!(cuPointerGetAttribute((&raw mut device).cast(), ordinal, address)) } {
            Err(CudaError::Call { code: Code::InvalidValue, .. }) => return Ok(None),
            result => result?,
        }
        // SAFETY: as above; it is an unsigned int.
        unsafe { call!(cuPointerGetAttribute((&raw mut kind).cast(), memory, address)) }?;
        // SAFETY: as above; it has 64 bits.
        unsafe { call!(cuPointerGetAttribute((&raw mut allocation).cast(), id, address)) }?;
        Ok(Some(PointerInfo { device: device.unsigned_abs(), is_on_device: kind == ON_DEVICE, allocation }))
    }
}

/// `CU_MEMORYTYPE_DEVICE`.
const ON_DEVICE: u32 = 2;
