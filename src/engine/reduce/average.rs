//! Averages: sums in a wider type, divided and rounded once.
//!
//! Integers and half precision fit into it, those of all ranks together. Sums of bfloat16 have its range, and single and double
//! precision are summed as they are: their sums may overflow.

use half::{bf16, f16};

use super::element::{
    Accumulators, Element, Half, Job, Operands, STRETCH, accumulate, load_each, store_each, undefined,
};
use crate::sys::simd::{Halves, Kernel, widest};
use crate::types::{DType, ReduceOp};

/// `into = from`, elements turned into sums of one.
///
/// # Panics
/// When the lengths do not correspond, or the type has no averages (see [`ReduceOp::supports`]).
pub fn widen(dtype: DType, into: &mut [u8], from: &[u8]) {
    widest(Summing { dtype, job: Widen { into, from } });
}

/// `into = (block₀ + block₁ + …) / world`; the blocks are elements, or sums of them. Integers truncate toward zero.
///
/// # Panics
/// As [`widen`].
pub fn average(of: Operands, world: usize, into: &mut [u8], blocks: &[&[u8]]) {
    let (Operands::Elements(_, dtype) | Operands::Sums(dtype)) = of;
    widest(Summing { dtype, job: Average { into, blocks, of, world } });
}

/// `data = data / world`, as [`average`] of one block in place.
///
/// # Panics
/// As [`widen`].
pub fn divide(dtype: DType, world: usize, data: &mut [u8]) {
    widest(Summing { dtype, job: Divide { data, world } });
}

/// Bytes of a sum of elements.
///
/// # Panics
/// As [`widen`].
pub(super) fn sum_size(dtype: DType) -> usize {
    let mut size = 0;
    summed(dtype, None, Size { element: dtype.size(), sum: &mut size });
    size
}

/// Does a job with sums.
#[inline(always)]
pub(super) fn add(dtype: DType, job: impl Job) {
    // The sums of half precision are of single precision.
    summed(dtype, None, Add(job));
}

/// An element that can be averaged.
trait Summed: Element {
    /// What its sums are computed in: wide enough for those of more ranks than there can be.
    type Sum: Element<Wide = Self::Sum, Means = ()> + Default;
    fn widened(wide: Self::Wide) -> Self::Sum;
    fn add(one: Self::Sum, other: Self::Sum) -> Self::Sum;
    fn divided(sum: Self::Sum, count: usize) -> Self::Wide;
}

macro_rules! summed {
    ($($t:ty, $sum:ty;)*) => { $(
        impl Summed for $t {
            type Sum = $sum;

            #[inline(always)]
            fn widened(wide: Self::Wide) -> $sum {
                <$sum>::from(wide)
            }

            #[inline(always)]
            fn add(one: $sum, other: $sum) -> $sum {
                one + other
            }

            #[inline(always)]
            fn divided(sum: $sum, count: usize) -> Self::Wide {
                (sum / count as $sum) as Self::Wide
            }
        }
    )* };
}

summed! {
    u8, i32;
    i8, i32;
    u16, i64;
    i16, i64;
    u32, i64;
    i32, i64;
    u64, i128;
    i64, i128;
    f16, f32;
    Half, f32;
    bf16, f32;
    f32, f32;
    f64, f64;
}

/// Something to be done with elements of one type or their sums.
trait SumJob {
    fn run<E: Summed>(self, means: E::Means);
}

#[inline(always)]
fn summed(dtype: DType, halves: Option<Halves>, job: impl SumJob) {
    match dtype {
        DType::U8 => job.run::<u8>(()),
        DType::I8 => job.run::<i8>(()),
        DType::U16 => job.run::<u16>(()),
        DType::I16 => job.run::<i16>(()),
        DType::U32 => job.run::<u32>(()),
        DType::I32 => job.run::<i32>(()),
        DType::U64 => job.run::<u64>(()),
        DType::I64 => job.run::<i64>(()),
        DType::F16 | DType::C32 => match halves {
            Some(halves) => job.run::<Half>(halves),
            None => job.run::<f16>(()),
        },
        DType::BF16 => job.run::<bf16>(()),
        DType::F32 | DType::C64 => job.run::<f32>(()),
        DType::F64 | DType::C128 => job.run::<f64>(()),
        _ => undefined(ReduceOp::Avg, dtype),
    }
}

/// A job for the type, compiled for several instruction sets.
struct Summing<J> {
    dtype: DType,
    job: J,
}

impl<J: SumJob> Kernel for Summing<J> {
    #[inline(always)]
    fn run(self, halves: Option<Halves>) {
        summed(self.dtype, halves, self.job);
    }
}

struct Size<'a> {
    element: usize,
    sum: &'a mut usize,
}

impl SumJob for Size<'_> {
    fn run<E: Summed>(self, _: E::Means) {
        // A complex number is as many elements as its sum.
        *self.sum = self.element / size_of::<E::Bytes>() * size_of::<E::Sum>();
    }
}

struct Add<J>(J);

impl<J: Job> SumJob for Add<J> {
    #[inline(always)]
    fn run<E: Summed>(self, _: E::Means) {
        self.0.run::<E::Sum>((), E::add);
    }
}

struct Widen<'a> {
    into: &'a mut [u8],
    from: &'a [u8],
}

impl SumJob for Widen<'_> {
    #[inline(always)]
    fn run<E: Summed>(self, means: E::Means) {
        let (into, from) = (E::Sum::split_mut(self.into), E::split(self.from));
        load_each::<E, _>(means, into, from, |_, element| E::Sum::store(E::widened(element)));
    }
}

struct Divide<'a> {
    data: &'a mut [u8],
    world: usize,
}

impl SumJob for Divide<'_> {
    #[inline(always)]
    fn run<E: Summed>(self, _: E::Means) {
        for bytes in E::split_mut(self.data) {
            *bytes = E::store(E::divided(E::widened(E::load(*bytes)), self.world));
        }
    }
}

struct Average<'a> {
    into: &'a mut [u8],
    blocks: &'a [&'a [u8]],
    of: Operands,
    world: usize,
}

impl SumJob for Average<'_> {
    #[inline(always)]
    fn run<E: Summed>(self, means: E::Means) {
        match self.of {
            Operands::Elements(..) => self.run_on::<E, E>(means, means, E::widened),
            Operands::Sums(_) => self.run_on::<E, E::Sum>(means, (), |sum| sum),
        }
    }
}

impl Average<'_> {
    /// Averages blocks of elements or sums, `B`.
    #[inline(always)]
    fn run_on<E: Summed, B: Element>(
        self,
        means: E::Means,
        block_means: B::Means,
        widened: impl Fn(B::Wide) -> E::Sum + Copy,
    ) {
        let into = E::split_mut(self.into);
        let whole = into.len() * size_of::<B::Bytes>();
        assert!(self.blocks.iter().all(|block| block.len() == whole), "blocks as long as their average");
        let mut sums = Accumulators([E::Sum::default(); STRETCH]);
        for (index, into) in into.chunks_mut(STRETCH).enumerate() {
            let (start, len) = (index * STRETCH, into.len());
            let sums = &mut sums.0[..len];
            let blocks = self.blocks.iter().map(|block| &B::split(block)[start..start + len]);
            accumulate::<B, _>(block_means, sums, blocks, widened, E::add);
            store_each::<E, _>(means, into, sums, |sum| E::divided(sum, self.world));
        }
    }
}
