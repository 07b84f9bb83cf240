//! Memory that an operation reads or writes, and the contract of its lifetime.

use smallvec::SmallVec;

use crate::types::DType;

/// The memory on one side of an operation: mostly one run.
pub type Buffers = SmallVec<[Buffer; 1]>;

/// A run of elements in host memory that somebody else owns.
///
/// # Lifetime
/// The engine reads and writes the memory between [`Communicator::submit`](crate::Communicator::submit) and the
/// completion of the [`Work`](crate::Work) it returns, and never after. The owner keeps it allocated that long, does
/// not write to inputs and does not touch outputs.
///
/// The memory of a [`Window`](crate::Window) is lent from its registration to the end of its deregistration. Meanwhile
/// its owner reads what signals have told it of, and nobody touches what a put may be writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    ptr: *mut u8,
    len: usize,
    dtype: DType,
}

// SAFETY: a Buffer is an address with a length; whoever dereferences it relies on the contract of `from_raw`, which
// does not depend on the thread.
#[allow(unsafe_code, reason = "raw memory handle: the contract is stated at from_raw")]
unsafe impl Send for Buffer {}

// SAFETY: as for Send: a shared Buffer only gives out its address.
#[allow(unsafe_code, reason = "raw memory handle: the contract is stated at from_raw")]
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Describes `len` elements of `dtype` at `ptr`.
    ///
    /// # Safety
    /// From submission to completion of every operation that the buffer is used in, the memory is valid for reads and
    /// writes of `len * dtype.size()` bytes (reads alone where it is only an input) and is not written by anyone else.
    /// `ptr` may dangle when `len` is zero.
    #[allow(unsafe_code, reason = "raw memory handle: the contract is stated here")]
    pub unsafe fn from_raw(ptr: *mut u8, len: usize, dtype: DType) -> Self {
        Buffer { ptr, len, dtype }
    }

    /// The first byte.
    pub fn ptr(self) -> *mut u8 {
        self.ptr
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
    pub fn bytes(self) -> usize {
        self.len * self.dtype.size()
    }
}
