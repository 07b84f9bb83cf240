//! Device memory of a process, and its addresses.
//!
//! Nothing here dereferences a device address. Host memory that a stream reaches is only what is registered, and of that only
//! words, which are atomic: so no operation of a stream changes what Rust holds a reference to.
#![allow(unsafe_code, reason = "calls the driver")]

use std::marker::PhantomData;

use cudarc::driver::sys::{CUdeviceptr, CUpointer_attribute};

use super::context::{Context, Current};
use super::error::{Code, CudaError};
use super::functions::call;
use crate::sync::Arc;

/// An address of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DevicePtr(pub(super) CUdeviceptr);

impl DevicePtr {
    /// The address that is this number.
    pub fn from_bits(bits: u64) -> DevicePtr {
        DevicePtr(bits)
    }

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
