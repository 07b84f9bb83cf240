//! Kernels that combine blocks of device memory element by element: how they are launched.
#![allow(unsafe_code, reason = "launches kernels")]

use std::ffi::c_void;

use super::context::Current;
use super::error::CudaError;
use super::memory::DeviceBytes;
use super::module::{Function, Module};
use super::stream::Stream;
use crate::sync::Arc;
use crate::types::DType;

/// The most blocks that a kernel combines.
pub const MAX_BLOCKS: usize = 128;

/// The parameter by which a kernel has its blocks.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Blocks {
    /// Addresses on the device, in order.
    pub at: [u64; MAX_BLOCKS],
}

const _: () = assert!(size_of::<Blocks>() == 1024, "as in the kernels' source");

/// A kernel that makes as many results as each of its blocks has elements. It touches nothing else, in any grid.
#[derive(Clone, Debug)]
pub struct Combine {
    function: Function,
    parameters: Parameters,
    from: usize,
    into: usize,
}

/// The parameters of a kernel: first come the results' address and, as [`Blocks`] and their number or as the address of
/// the only block, what is combined; then the number of elements, as a `u64`; then these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameters {
    /// Of blocks, nothing else.
    Blocks,
    /// Of blocks, and a divisor, as a `u32`.
    BlocksAndDivisor,
    /// Of one block, nothing else.
    One,
    /// Of one block, and a factor, as an `f64`; a factor's address or zero, and the number of its type, as a `u32`.
    OneAndFactor,
}

/// What a launch passes beside memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Beside<'a> {
    /// Nothing.
    Nothing,
    /// What sums are divided by.
    Divisor(u32),
    /// What elements are multiplied by.
    Factor(f64),
    /// The same, in memory, of this type.
    FactorAt(DeviceBytes<'a>, DType),
}

impl Combine {
    /// A kernel whose elements and results have so many bytes each.
    ///
    /// # Safety
    /// The function has these parameters, and does what the type says. Of a factor's memory it reads what the factor's type has,
    /// whose number is its `DType`'s.
    pub unsafe fn new(function: Function, parameters: Parameters, from: usize, into: usize) -> Combine {
        assert!(from > 0 && into > 0);
        Combine { function, parameters, from, into }
    }

    /// The module that has it.
    pub fn module(&self) -> &Arc<Module> {
        self.function.module()
    }

    /// The bytes of an element, and of a result.
    pub fn sizes(&self) -> (usize, usize) {
        (self.from, self.into)
    }

    /// Puts the kernel on a stream, with at most `most` blocks of threads.
    ///
    /// # Panics
    /// When there is no block or there are more than [`MAX_BLOCKS`], when lengths differ, when a divisor is zero, or when what is
    /// passed beside is not what the kernel has parameters for.
    pub fn launch(
        &self,
        current: &Current<'_>,
        stream: &Stream,
        most: u32,
        into: DeviceBytes<'_>,
        from: &[DeviceBytes<'_>],
        beside: Beside<'_>,
    ) -> Result<(), CudaError> {
        let count = into.len() / self.into;
        let is_whole = into.len() == count * self.into && from.iter().all(|block| block.len() == count * self.from);
        assert!(is_whole, "{into:?} of results, each {}, from {from:?} of {}", self.into, self.from);
        assert!((1..=MAX_BLOCKS).contains(&from.len()), "{} blocks", from.len());
        if count == 0 {
            return Ok(());
        }
        let mut blocks = Blocks { at: [0; MAX_BLOCKS] };
        blocks.at.iter_mut().zip(from).for_each(|(at, block)| *at = block.ptr().to_bits());
        let (mut into, mut many, mut all) = (into.ptr().to_bits(), from.len() as u32, count as u64);
        let (mut divisor, mut factor, mut factor_at, mut factor_type) = (1u32, 1f64, 0u64, 0u32);
        match (self.parameters, beside) {
            (Parameters::Blocks, Beside::Nothing) => {}
            (Parameters::BlocksAndDivisor, Beside::Divisor(by)) if by > 0 => divisor = by,
            (Parameters::One, Beside::Nothing) if many == 1 => {}
            (Parameters::OneAndFactor, Beside::Factor(by)) if many == 1 => factor = by,
            (Parameters::OneAndFactor, Beside::FactorAt(at, dtype)) if many == 1 && at.len() == dtype.size() => {
                (factor_at, factor_type) = (at.ptr().to_bits(), dtype as u32);
            }
            (parameters, beside) => panic!("a kernel of {many} blocks with {parameters:?} has no place for {beside:?}"),
        }
        let first = pointer(&mut into);
        let blocks_at = pointer(&mut blocks);
        let mut parameters = [std::ptr::null_mut(); 6];
        match self.parameters {
            Parameters::Blocks | Parameters::BlocksAndDivisor => {
                let all = [first, blocks_at, pointer(&mut many), pointer(&mut all), pointer(&mut divisor)];
                parameters[..5].copy_from_slice(&all);
            }
            Parameters::One | Parameters::OneAndFactor => {
                let factor = [pointer(&mut factor), pointer(&mut factor_at), pointer(&mut factor_type)];
                // The address of the only block.
                parameters[..3].copy_from_slice(&[first, blocks_at, pointer(&mut all)]);
                parameters[3..].copy_from_slice(&factor);
            }
        }
        // A thread takes 16 bytes of the smaller ones at a time.
        let packets = (count * self.from.min(self.into)).div_ceil(16);
        let grid = packets.div_ceil(THREADS as usize).clamp(1, most.max(1) as usize) as u32;
        // SAFETY: the parameters are those that who made self answers for; the memory that the kernel touches by them is of the
        // lengths that were looked at, and what frees it waits for the kernel.
        unsafe { self.function.launch(current, stream, grid, THREADS, &mut parameters) }
    }
}

/// Threads of a block.
const THREADS: u32 = 256;

fn pointer<T>(value: &mut T) -> *mut c_void {
    std::ptr::from_mut(value).cast()
}
