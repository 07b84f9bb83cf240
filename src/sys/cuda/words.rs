//! Words in host memory that streams wait for and write.
#![allow(unsafe_code, reason = "calls the driver")]

use std::marker::PhantomData;

use cudarc::driver::sys::{
    CUdeviceptr, CUstreamBatchMemOpParams, CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st__bindgen_ty_1,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st,
    CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1, CUstreamBatchMemOpType,
};
use smallvec::SmallVec;

use super::context::Context;
use super::error::CudaError;
use super::functions::call;
use crate::sync::Arc;
use crate::sys::words::SharedWords;

/// A segment of words that a device's streams reach.
#[derive(Debug)]
pub struct RegisteredWords {
    words: Arc<SharedWords>,
    base: CUdeviceptr,
    context: Arc<Context>,
}

/// Where a word is for a device, as long as it is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceWord<'a>(CUdeviceptr, PhantomData<&'a ()>);

impl RegisteredWords {
    /// Registers a segment. The driver waits for the device here and when self goes, so neither is done while something is
    /// in flight.
    pub fn new(context: &Arc<Context>, words: &Arc<SharedWords>) -> Result<RegisteredWords, CudaError> {
        let _current = context.enter()?;
        let (host, bytes) = words.mapping();
        // SAFETY: the mapping is whole pages, and self keeps it until it is unregistered; what is in it is only accessed
        // atomically.
        unsafe { call!(cuMemHostRegister_v2(host, bytes, FOR_ALL_CONTEXTS | MAPPED)) }?;
        let mut registered = RegisteredWords { words: words.clone(), base: 0, context: context.clone() };
        // SAFETY: `base` is a place for the result, and the memory has just been registered.
        unsafe { call!(cuMemHostGetDevicePointer_v2(&raw mut registered.base, host, 0)) }?;
        Ok(registered)
    }

    /// The word of this number.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn word(&self, index: usize) -> DeviceWord<'_> {
        DeviceWord(self.base + self.words.offset(index) as u64, PhantomData)
    }
}

impl Drop for RegisteredWords {
    fn drop(&mut self) {
        // SAFETY: registered in `new`; the driver waits for the operations that use it.
        let is_unregistered = self.context.give_back(|| unsafe { call!(cuMemHostUnregister(self.words.mapping().0)) });
        if !is_unregistered {
            // The device still reaches the pages, so nothing else may come to lie at their addresses.
            std::mem::forget(self.words.clone());
        }
    }
}

/// `CU_MEMHOSTREGISTER_PORTABLE`.
pub(super) const FOR_ALL_CONTEXTS: u32 = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`.
pub(super) const MAPPED: u32 = 2;

/// How much of a word a stream looks at and writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Width {
    /// The lower half, where a device can do no more. Values are compared as if they went round.
    Bits32,
    /// All of it.
    #[default]
    Bits64,
}

/// Waits for words and writes of words, for one call of the driver.
pub struct Batch<'a> {
    pub(super) operations: SmallVec<[CUstreamBatchMemOpParams; 8]>,
    width: Width,
    _words: PhantomData<&'a ()>,
}

impl std::fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Batch of {}", self.operations.len())
    }
}

impl<'a> Batch<'a> {
    /// The most operations that the driver takes at once.
    pub const LONGEST: usize = 256;

    /// An empty one, for words of this width.
    pub fn new(width: Width) -> Batch<'a> {
        Batch { operations: SmallVec::new(), width, _words: PhantomData }
    }

    /// Has the words that come next be of this width.
    pub fn set_width(&mut self, width: Width) {
        self.width = width;
    }

    /// How many operations it has.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Empties it.
    pub fn clear(&mut self) {
        self.operations.clear();
    }

    /// Waits until a word is at least `value`.
    pub fn wait(&mut self, word: DeviceWord<'a>, value: u64) {
        use CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st__bindgen_ty_1 as Value;
        let (operation, value) = match self.width {
            Width::Bits32 => (CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_32, Value { value: value as u32 }),
            Width::Bits64 => (CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WAIT_VALUE_64, Value { value64: value }),
        };
        self.operations.push(CUstreamBatchMemOpParams {
            waitValue: CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st {
                operation,
                address: word.0,
                __bindgen_anon_1: value,
                flags: AT_LEAST,
                alias: 0,
            },
        });
    }

    /// Writes a word, after everything before it can be seen by all.
    pub fn write(&mut self, word: DeviceWord<'a>, value: u64) {
        use CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st__bindgen_ty_1 as Value;
        let (operation, value) = match self.width {
            Width::Bits32 => (CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_32, Value { value: value as u32 }),
            Width::Bits64 => (CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64, Value { value64: value }),
        };
        self.operations.push(CUstreamBatchMemOpParams {
            writeValue: CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st {
                operation,
                address: word.0,
                __bindgen_anon_1: value,
                flags: WITH_BARRIER,
                alias: 0,
            },
        });
    }
}

/// `CU_STREAM_WAIT_VALUE_GEQ`.
const AT_LEAST: u32 = 0;
/// `CU_STREAM_WRITE_VALUE_DEFAULT`.
const WITH_BARRIER: u32 = 0;

// As the driver has them.
const _: () = assert!(size_of::<CUstreamBatchMemOpParams>() == 48);
