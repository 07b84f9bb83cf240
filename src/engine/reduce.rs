//! Arithmetic on elements as they lie in memory, for every dtype and reduce operation from one generic loop.
//!
//! Elements are read and written by their bytes, so nothing needs to be aligned; the loops are simple enough for the
//! compiler to vectorise, for each instruction set of [`simd`](crate::sys::simd). Half precision is computed in single
//! precision. Averages have a module of their own.
//!
//! The operations are commutative to the bit, so that ranks which combine the same two values in different order agree.
//! Therefore every NaN that is stored is the one that PyTorch's constants are, whichever NaN came in: processors keep one
//! operand's payload, and which, depends on the order. And the minimum and the maximum take -0 for less than 0.

use half::{bf16, f16};

use crate::sys::simd::{Arithmetic, Halves, Kernel, widest};
use crate::types::{DType, ReduceOp};

use element::{
    Accumulators, Element, Float, Half, Job, STRETCH, Truth, accumulate, combine_each, store_each, undefined,
};

pub use average::{average, divide, widen};
pub use element::Operands;

impl Operands {
    /// Bytes per operand.
    pub fn size(self) -> usize {
        match self {
            Operands::Elements(_, dtype) => dtype.size(),
            Operands::Sums(dtype) => average::sum_size(dtype),
        }
    }
}

/// `into = into ⊕ from`, element by element.
///
/// # Panics
/// When the lengths differ, or the operation is not defined on the type (see [`ReduceOp::supports`]).
pub fn combine(operands: Operands, into: &mut [u8], from: &[u8]) {
    assert_eq!(into.len(), from.len(), "operands of equal length");
    widest(Dispatch { operands, job: Combine { into, from } });
}

/// `into = … ⊕ blocks[position - 1] ⊕ into ⊕ blocks[position] ⊕ …`, in that order, rounded once at the end.
///
/// # Panics
/// As [`combine`], and when there is no such position.
pub fn fold(operands: Operands, into: &mut [u8], position: usize, blocks: &[&[u8]]) {
    assert!(blocks.iter().all(|block| block.len() == into.len()), "operands of equal length");
    let (before, after) = blocks.split_at(position);
    widest(Dispatch { operands, job: Fold { before, into, after } });
}

/// Multiplies by a factor. Integers truncate toward zero.
///
/// # Panics
/// When the type has no products (see [`ReduceOp::supports`]).
pub fn scale(dtype: DType, factor: f64, data: &mut [u8]) {
    let _default = Arithmetic::default_here();
    match dtype {
        DType::U8 => scale_each::<u8>(data, factor),
        DType::I8 => scale_each::<i8>(data, factor),
        DType::U16 => scale_each::<u16>(data, factor),
        DType::I16 => scale_each::<i16>(data, factor),
        DType::U32 => scale_each::<u32>(data, factor),
        DType::I32 => scale_each::<i32>(data, factor),
        DType::U64 => scale_each::<u64>(data, factor),
        DType::I64 => scale_each::<i64>(data, factor),
        DType::F16 | DType::C32 => scale_each::<f16>(data, factor),
        DType::BF16 => scale_each::<bf16>(data, factor),
        DType::F32 | DType::C64 => scale_each::<f32>(data, factor),
        DType::F64 | DType::C128 => scale_each::<f64>(data, factor),
        _ => undefined(ReduceOp::PreMulSum(factor), dtype),
    }
}

struct Combine<'a> {
    into: &'a mut [u8],
    from: &'a [u8],
}

impl Job for Combine<'_> {
    #[inline(always)]
    fn run<E: Element>(self, means: E::Means, op: impl Fn(E::Wide, E::Wide) -> E::Wide + Copy) {
        combine_each::<E>(means, E::split_mut(self.into), E::split(self.from), op);
    }
}

struct Fold<'a> {
    before: &'a [&'a [u8]],
    into: &'a mut [u8],
    after: &'a [&'a [u8]],
}

impl<'a> Job for Fold<'a> {
    #[inline(always)]
    fn run<E: Element>(self, means: E::Means, op: impl Fn(E::Wide, E::Wide) -> E::Wide + Copy) {
        // A stretch of wide accumulators at a time: rounded once, and each block is read in runs.
        let mut wide = Accumulators([E::Wide::default(); STRETCH]);
        for (index, into) in E::split_mut(self.into).chunks_mut(STRETCH).enumerate() {
            let (start, len) = (index * STRETCH, into.len());
            let stretches =
                |blocks: &'a [&'a [u8]]| blocks.iter().map(move |block| &E::split(block)[start..start + len]);
            let wide = &mut wide.0[..len];
            let blocks = stretches(self.before).chain([&*into]).chain(stretches(self.after));
            accumulate::<E, _>(means, wide, blocks, |element| element, op);
            store_each::<E, _>(means, into, wide, |wide| wide);
        }
    }
}

/// A job for the operation and the type, compiled for several instruction sets.
struct Dispatch<J> {
    operands: Operands,
    job: J,
}

impl<J: Job> Kernel for Dispatch<J> {
    #[inline(always)]
    fn run(self, halves: Option<Halves>) {
        match self.operands {
            Operands::Elements(op, dtype) => dispatch(op, dtype, halves, self.job),
            Operands::Sums(dtype) => average::add(dtype, self.job),
        }
    }
}

#[inline(always)]
fn dispatch(op: ReduceOp, dtype: DType, halves: Option<Halves>, job: impl Job) {
    macro_rules! integer {
        ($t:ty) => {
            match op {
                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => job.run::<$t>((), |a, b| a.wrapping_add(b)),
                ReduceOp::Product => job.run::<$t>((), |a, b| a.wrapping_mul(b)),
                ReduceOp::Min => job.run::<$t>((), |a, b| a.min(b)),
                ReduceOp::Max => job.run::<$t>((), |a, b| a.max(b)),
                ReduceOp::BitAnd => job.run::<$t>((), |a, b| a & b),
                ReduceOp::BitOr => job.run::<$t>((), |a, b| a | b),
                ReduceOp::BitXor => job.run::<$t>((), |a, b| a ^ b),
            }
        };
    }
    macro_rules! float {
        ($t:ty, $means:expr) => {
            match op {
                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => job.run::<$t>($means, |a, b| a + b),
                ReduceOp::Product => job.run::<$t>($means, |a, b| a * b),
                ReduceOp::Min => job.run::<$t>($means, Float::least),
                ReduceOp::Max => job.run::<$t>($means, Float::greatest),
                ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => undefined(op, dtype),
            }
        };
    }
    macro_rules! half {
        () => {
            match halves {
                Some(halves) => float!(Half, halves),
                None => float!(f16, ()),
            }
        };
    }
    match dtype {
        DType::U8 => integer!(u8),
        DType::I8 => integer!(i8),
        DType::U16 => integer!(u16),
        DType::I16 => integer!(i16),
        DType::U32 => integer!(u32),
        DType::I32 => integer!(i32),
        DType::U64 => integer!(u64),
        DType::I64 => integer!(i64),
        DType::F16 => half!(),
        DType::BF16 => float!(bf16, ()),
        DType::F32 => float!(f32, ()),
        DType::F64 => float!(f64, ()),
        DType::C32 if is_sum(op) => half!(),
        DType::C64 if is_sum(op) => float!(f32, ()),
        DType::C128 if is_sum(op) => float!(f64, ()),
        DType::Bool => match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => job.run::<Truth>((), |a, b| a | b),
            ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => job.run::<Truth>((), |a, b| a & b),
            ReduceOp::BitXor => job.run::<Truth>((), |a, b| a ^ b),
            ReduceOp::Avg | ReduceOp::PreMulSum(_) => undefined(op, dtype),
        },
        _ => undefined(op, dtype),
    }
}

fn is_sum(op: ReduceOp) -> bool {
    matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_))
}

/// Types that can be multiplied by a factor.
trait Scale: Element {
    fn scaled(wide: Self::Wide, factor: f64) -> Self::Wide;
}

macro_rules! scale_integer {
    ($($t:ty),*) => { $(
        impl Scale for $t {
            #[inline(always)]
            fn scaled(x: $t, factor: f64) -> $t {
                // In 128 bits, where every whole factor of the type's range is exact.
                if factor.fract() == 0.0 && factor.abs() <= i64::MAX as f64 {
                    i128::from(x).wrapping_mul(factor as i128) as $t
                } else {
                    (x as f64 * factor) as $t
                }
            }
        }
    )* };
}

macro_rules! scale_float {
    ($($t:ty, $wide:ty);*) => { $(
        impl Scale for $t {
            #[inline(always)]
            fn scaled(x: $wide, factor: f64) -> $wide {
                x * factor as $wide
            }
        }
    )* };
}

scale_integer!(u8, i8, u16, i16, u32, i32, u64, i64);
scale_float!(f16, f32; bf16, f32; f32, f32; f64, f64);

fn scale_each<E: Scale>(data: &mut [u8], factor: f64) {
    for bytes in E::split_mut(data) {
        *bytes = E::store(E::scaled(E::load(*bytes), factor));
    }
}

mod average;
mod element;
#[cfg(test)]
mod tests;
