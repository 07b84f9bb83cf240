//! Memory that an operation reads or writes, and the contract of its lifetime.

use std::fmt;

use smallvec::SmallVec;

use crate::sys::cuda::DeviceBytes;
use crate::types::DType;

/// The inputs or outputs of an operation: mostly one buffer.
pub type Buffers = SmallVec<[Buffer; 1]>;

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The host's.
    Host,
    /// That of the CUDA device of this number.
    Device(u32),
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Memory::Host => write!(f, "cpu"),
            Memory::Device(device) => write!(f, "cuda:{device}"),
        }
    }
}

/// A run of elements in memory that the caller owns.
///
/// # Lifetime
/// The engine reads and writes the memory between [`Communicator::submit`](crate::Communicator::submit) and the
/// completion of the [`Work`](crate::Work) it returns, and never after. Until then the owner keeps it allocated, does not
/// write to inputs, and neither reads nor writes outputs.
///
/// The memory of a [`Window`](crate::Window) is exposed from its registration to the end of its deregistration. Meanwhile
/// its owner reads only what a signal has announced, and no thread accesses memory that a put may be writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    ptr: *mut u8,
    len: usize,
    dtype: DType,
    /// The number of the device, or [`HOST`].
    device: i16,
}

/// No device: the memory is the host's.
const HOST: i16 = -1;

// SAFETY: a Buffer is an address with a length. Code that dereferences it relies on the contract of `from_raw`, which does
// not depend on the thread.
#[allow(unsafe_code, reason = "raw memory handle: the contract is stated at from_raw")]
unsafe impl Send for Buffer {}

// SAFETY: as for Send: a shared Buffer only gives out its address.
#[allow(unsafe_code, reason = "raw memory handle: the contract is stated at from_raw")]
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Describes `len` elements of `dtype` at `ptr`.
    ///
    /// # Safety
    /// From submission to completion of every operation that uses the buffer, the memory is valid for reads and writes of
    /// `len * dtype.size()` bytes (for reads, if it is only an input), and only the engine writes it.
    /// `ptr` may dangle when `len` is zero.
    #[allow(unsafe_code, reason = "raw memory handle: the contract is stated here")]
    pub unsafe fn from_raw(ptr: *mut u8, len: usize, dtype: DType) -> Self {
        Buffer { ptr, len, dtype, device: HOST }
    }

    /// Describes `len` elements of `dtype` at `address` in the memory of a CUDA device.
    ///
    /// # Safety
    /// As for [`Buffer::from_raw`], but for the device, and in the order of the operation's stream: from what has been put on
    /// that stream before the submission to what is put on it after. What is done with its [`Buffer::device_bytes`] counts as
    /// an operation.
    ///
    /// # Panics
    /// When `device` is beyond 32,767, which no host has.
    #[allow(unsafe_code, reason = "raw memory handle: the contract is stated here")]
    pub unsafe fn on_device(address: u64, len: usize, dtype: DType, device: u32) -> Self {
        let ptr = std::ptr::without_provenance_mut(address as usize);
        Buffer { ptr, len, dtype, device: i16::try_from(device).expect("no host has as many devices") }
    }

    /// Where the memory lies.
    #[inline]
    pub fn memory(self) -> Memory {
        u32::try_from(self.device).map_or(Memory::Host, Memory::Device)
    }

    /// The first byte.
    pub fn ptr(self) -> *mut u8 {
        self.ptr
    }

    /// The bytes, if they are in the memory of a device: for what an operation puts on its stream.
    ///
    /// ```
    /// use ncclx_rs::{Buffer, DType};
    /// // SAFETY: nothing uses the memory.
    /// let buffer = unsafe { Buffer::on_device(0x7000, 3, DType::F32, 0) };
    /// let bytes = buffer.device_bytes().unwrap();
    /// assert_eq!((bytes.ptr().to_bits(), bytes.len()), (0x7000, 12));
    /// ```
    ///
    /// # Panics
    /// As [`Buffer::bytes`].
    #[allow(unsafe_code, reason = "raw memory handle: the contract is stated at on_device")]
    pub fn device_bytes(&self) -> Option<DeviceBytes<'_>> {
        // SAFETY: who made self answers for it. Its memory stays until what has been put on the operation's stream has run.
        (self.memory() != Memory::Host).then(|| unsafe { DeviceBytes::from_raw(self.ptr as u64, self.bytes()) })
    }

    /// The number of elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The element type.
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// The number of bytes.
    ///
    /// # Panics
    /// When a `usize` cannot hold it. No memory has that many bytes, so every operation refuses the buffer.
    pub fn bytes(self) -> usize {
        self.checked_bytes().expect("a buffer of a length that memory can have")
    }

    fn checked_bytes(self) -> Option<usize> {
        self.len.checked_mul(self.dtype.size())
    }
}

/// The bytes of all buffers together; none if they are more than [`BYTES_MAX`]. Up to there, no sum or product of lengths
/// and offsets within them overflows.
pub(crate) fn bytes(buffers: &[Buffer]) -> Option<usize> {
    let sum = match buffers {
        // The usual case.
        [one] => one.checked_bytes(),
        _ => buffers.iter().try_fold(0, |sum: usize, buffer| sum.checked_add(buffer.checked_bytes()?)),
    };
    sum.filter(|sum| *sum <= BYTES_MAX)
}

/// The most bytes that memory can have: the language's limit for an object.
pub(crate) const BYTES_MAX: usize = isize::MAX as usize;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(unsafe_code, reason = "makes buffers whose memory is never accessed")]
    fn more_bytes_than_memory_can_have_are_none() {
        let of = |len, dtype| {
            // SAFETY: no operation uses the buffer.
            unsafe { Buffer::from_raw(std::ptr::null_mut(), len, dtype) }
        };
        let (most, some) = (of(BYTES_MAX, DType::U8), of(1, DType::U8));
        assert_eq!(bytes(&[]), Some(0));
        assert_eq!(bytes(&[most]), Some(BYTES_MAX));
        assert_eq!(bytes(&[most, some]), None);
        assert_eq!(bytes(&[most, most, some, some]), None, "although their sum wraps to 0");
        assert_eq!(bytes(&[of(usize::MAX / 8 + 2, DType::F64)]), None, "although the product wraps to 8");
        assert_eq!(bytes(&[of(usize::MAX / 8 + 2, DType::F64), some]), None);
    }
}
