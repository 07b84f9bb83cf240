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

use crate::sys::simd::{Kernel, widest};
use crate::types::{DType, ReduceOp};

pub(crate) use average::{average, divide, widen};

/// What is combined, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Operands {
    /// Elements of tensors.
    Elements(ReduceOp, DType),
    /// Sums of elements of this type, in a type that holds those of all ranks; they are added.
    Sums(DType),
}

impl Operands {
    /// Bytes per operand.
    pub(crate) fn size(self) -> usize {
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
pub(crate) fn combine(operands: Operands, into: &mut [u8], from: &[u8]) {
    assert_eq!(into.len(), from.len(), "operands of equal length");
    widest(Dispatch { operands, job: Combine { into, from } });
}

/// `into = … ⊕ blocks[position - 1] ⊕ into ⊕ blocks[position] ⊕ …`, in that order, rounded once at the end.
///
/// # Panics
/// As [`combine`], and when there is no such position.
pub(crate) fn fold(operands: Operands, into: &mut [u8], position: usize, blocks: &[&[u8]]) {
    assert!(blocks.iter().all(|block| block.len() == into.len()), "operands of equal length");
    let (before, after) = blocks.split_at(position);
    widest(Dispatch { operands, job: Fold { before, into, after } });
}

/// Multiplies by a factor. Integers truncate toward zero.
///
/// # Panics
/// When the type has no products (see [`ReduceOp::supports`]).
pub(crate) fn scale(dtype: DType, factor: f64, data: &mut [u8]) {
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

/// An element in memory and the wider type it is computed in.
trait Element: Copy {
    type Wide: Copy + Default;
    /// An array.
    type Bytes: Copy;
    fn split(bytes: &[u8]) -> &[Self::Bytes];
    fn split_mut(bytes: &mut [u8]) -> &mut [Self::Bytes];
    fn load(bytes: Self::Bytes) -> Self::Wide;
    fn store(wide: Self::Wide) -> Self::Bytes;
}

macro_rules! element {
    ($($t:ty, $wide:ty, $widen:expr, $narrow:expr;)*) => { $(
        impl Element for $t {
            type Wide = $wide;
            type Bytes = [u8; size_of::<$t>()];
            #[inline(always)]
            fn split(bytes: &[u8]) -> &[Self::Bytes] {
                bytes.as_chunks().0
            }
            #[inline(always)]
            fn split_mut(bytes: &mut [u8]) -> &mut [Self::Bytes] {
                bytes.as_chunks_mut().0
            }
            #[inline(always)]
            fn load(bytes: Self::Bytes) -> $wide {
                ($widen)(<$t>::from_ne_bytes(bytes))
            }
            #[inline(always)]
            fn store(wide: $wide) -> Self::Bytes {
                let narrow: $t = ($narrow)(wide);
                narrow.to_ne_bytes()
            }
        }
    )* };
}

element! {
    u8, u8, |x| x, |x| x;
    i8, i8, |x| x, |x| x;
    u16, u16, |x| x, |x| x;
    i16, i16, |x| x, |x| x;
    u32, u32, |x| x, |x| x;
    i32, i32, |x| x, |x| x;
    u64, u64, |x| x, |x| x;
    i64, i64, |x| x, |x| x;
    i128, i128, |x| x, |x| x;
    f16, f32, widen_f16, narrow_f16;
    bf16, f32, widen_bf16, narrow_bf16;
    f32, f32, |x| x, canonical_f32;
    f64, f64, |x| x, canonical_f64;
    Truth, u8, |x: Truth| x.0, Truth;
}

/// A truth value: any byte but zero is true; results are 0 and 1.
#[derive(Clone, Copy)]
struct Truth(u8);

impl Truth {
    fn from_ne_bytes(bytes: [u8; 1]) -> Truth {
        Truth(u8::from(bytes[0] != 0))
    }

    fn to_ne_bytes(self) -> [u8; 1] {
        [self.0]
    }
}

/// As `f16::to_f32`, without a branch on the value, so that the loop vectorises. After Giesen, "half-float conversion",
/// <https://gist.github.com/rygorous/2144712>.
#[inline(always)]
fn widen_f16(x: f16) -> f32 {
    const EXPONENT: u32 = 0x7c00 << 13;
    const BIAS: u32 = (127 - 15) << 23;
    const LEAST_NORMAL: u32 = BIAS + (1 << 23);
    let bits = u32::from(x.to_bits());
    let magnitude = (bits & 0x7fff) << 13;
    let (exponent, normal) = (magnitude & EXPONENT, magnitude + BIAS);
    // Where the exponent is zero, the sum has an implicit leading one too many.
    let subnormal = (f32::from_bits(magnitude + LEAST_NORMAL) - f32::from_bits(LEAST_NORMAL)).to_bits();
    let quiet = if magnitude > EXPONENT { 0x0040_0000 } else { 0 };
    let infinite_or_nan = (normal + BIAS) | quiet;
    let finite = if exponent == 0 { subnormal } else { normal };
    f32::from_bits(((bits & 0x8000) << 16) | if exponent == EXPONENT { infinite_or_nan } else { finite })
}

/// As `f16::from_f32`, to nearest, ties to even, without a branch on the value; see `widen_f16`.
#[inline(always)]
fn narrow_f16(x: f32) -> f16 {
    const INFINITE: u32 = 0x7f80_0000;
    const TOO_LARGE: u32 = (127 + 16) << 23;
    const LEAST_NORMAL: u32 = (127 - 14) << 23;
    // Its last bit weighs as much as that of a subnormal, so adding it rounds there.
    const ALIGN: u32 = (127 - 15 + 23 - 10 + 1) << 23;
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0x0fff + odd) >> 13;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(ALIGN)).to_bits().wrapping_sub(ALIGN);
    let finite = if magnitude < LEAST_NORMAL { subnormal } else { normal };
    let rounded = if magnitude >= TOO_LARGE { 0x7c00 } else { finite };
    let number = ((bits >> 16) & 0x8000) | rounded;
    f16::from_bits(if magnitude > INFINITE { 0x7e00 } else { number as u16 })
}

#[inline(always)]
fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Rounds to nearest, ties to even, without a branch on the value, so that the loop vectorises.
#[inline(always)]
fn narrow_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    bf16::from_bits(if x.is_nan() { 0x7fc0 } else { rounded })
}

/// The number, or the one NaN that is ever stored. By its bits, since a NaN that is only computed with may be any.
#[inline(always)]
fn canonical_f32(x: f32) -> f32 {
    f32::from_bits(if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() })
}

/// As `canonical_f32`.
#[inline(always)]
fn canonical_f64(x: f64) -> f64 {
    f64::from_bits(if x.is_nan() { 0x7ff8_0000_0000_0000 } else { x.to_bits() })
}

/// Numbers among which there are two zeros and NaN.
trait Float: Copy {
    /// The lesser, -0 being less than 0; a NaN if one is.
    fn least(self, other: Self) -> Self;
    /// The greater, 0 being greater than -0; a NaN if one is.
    fn greatest(self, other: Self) -> Self;
}

macro_rules! float {
    ($($t:ty),*) => { $(
        impl Float for $t {
            /// Each comparison gives its right side where the two are equal or one is a NaN. So the two agree but for zeros
            /// and NaN, where their bits together are -0 or a NaN.
            #[inline(always)]
            fn least(self, other: $t) -> $t {
                let (one, two) = (if self < other { self } else { other }, if other < self { other } else { self });
                <$t>::from_bits(one.to_bits() | two.to_bits())
            }

            #[inline(always)]
            fn greatest(self, other: $t) -> $t {
                -(-self).least(-other)
            }
        }
    )* };
}

float!(f32, f64);

/// Something to be done with elements of one type under one binary operation.
trait Job {
    fn run<E: Element>(self, op: impl Fn(E::Wide, E::Wide) -> E::Wide + Copy);
}

struct Combine<'a> {
    into: &'a mut [u8],
    from: &'a [u8],
}

impl Job for Combine<'_> {
    #[inline(always)]
    fn run<E: Element>(self, op: impl Fn(E::Wide, E::Wide) -> E::Wide + Copy) {
        each(E::split_mut(self.into), E::split(self.from), |into, from| E::store(op(E::load(into), E::load(from))));
    }
}

struct Fold<'a> {
    before: &'a [&'a [u8]],
    into: &'a mut [u8],
    after: &'a [&'a [u8]],
}

impl<'a> Job for Fold<'a> {
    #[inline(always)]
    fn run<E: Element>(self, op: impl Fn(E::Wide, E::Wide) -> E::Wide + Copy) {
        // A stretch of wide accumulators at a time: rounded once, and each block is read in runs.
        let mut wide = Accumulators([E::Wide::default(); STRETCH]);
        for (index, into) in E::split_mut(self.into).chunks_mut(STRETCH).enumerate() {
            let (start, len) = (index * STRETCH, into.len());
            let stretches =
                |blocks: &'a [&'a [u8]]| blocks.iter().map(move |block| &E::split(block)[start..start + len]);
            let blocks = stretches(self.before).chain([&*into]).chain(stretches(self.after));
            accumulate(&mut wide.0[..len], blocks, E::load, op);
            each(into, &wide.0[..len], |_, wide| E::store(wide));
        }
    }
}

/// `wide = block₀ ⊕ block₁ ⊕ …`.
#[inline(always)]
fn accumulate<'a, B: Copy + 'a, W: Copy>(
    wide: &mut [W],
    mut blocks: impl Iterator<Item = &'a [B]>,
    load: impl Fn(B) -> W,
    op: impl Fn(W, W) -> W,
) {
    each(wide, blocks.next().unwrap_or_default(), |_, bytes| load(bytes));
    for block in blocks {
        each(wide, block, |wide, bytes| op(wide, load(bytes)));
    }
}

/// `into = f(into, from)`, element by element.
///
/// By index, and closures by value: iterators of pairs and of chunks, and closures behind references, are called through
/// functions of the standard library that are not `#[inline]`. Without link-time optimisation these stay in another codegen
/// unit; and as they return slices, what calls them is not inlined into a function for more instructions than its own.
#[inline(always)]
fn each<I: Copy, F: Copy>(into: &mut [I], from: &[F], f: impl Fn(I, F) -> I) {
    assert_eq!(into.len(), from.len(), "operands of equal length");
    for index in 0..into.len() {
        into[index] = f(into[index], from[index]);
    }
}

const STRETCH: usize = 512;

/// On whole cache lines: the widest vectors are as long as one.
#[repr(align(64))]
struct Accumulators<W>([W; STRETCH]);

/// A job for the operation and the type, compiled for several instruction sets.
struct Dispatch<J> {
    operands: Operands,
    job: J,
}

impl<J: Job> Kernel for Dispatch<J> {
    #[inline(always)]
    fn run(self) {
        match self.operands {
            Operands::Elements(op, dtype) => dispatch(op, dtype, self.job),
            Operands::Sums(dtype) => average::add(dtype, self.job),
        }
    }
}

#[inline(always)]
fn dispatch(op: ReduceOp, dtype: DType, job: impl Job) {
    macro_rules! integer {
        ($t:ty) => {
            match op {
                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => job.run::<$t>(|a, b| a.wrapping_add(b)),
                ReduceOp::Product => job.run::<$t>(|a, b| a.wrapping_mul(b)),
                ReduceOp::Min => job.run::<$t>(|a, b| a.min(b)),
                ReduceOp::Max => job.run::<$t>(|a, b| a.max(b)),
                ReduceOp::BitAnd => job.run::<$t>(|a, b| a & b),
                ReduceOp::BitOr => job.run::<$t>(|a, b| a | b),
                ReduceOp::BitXor => job.run::<$t>(|a, b| a ^ b),
            }
        };
    }
    macro_rules! float {
        ($t:ty) => {
            match op {
                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => job.run::<$t>(|a, b| a + b),
                ReduceOp::Product => job.run::<$t>(|a, b| a * b),
                ReduceOp::Min => job.run::<$t>(Float::least),
                ReduceOp::Max => job.run::<$t>(Float::greatest),
                ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => undefined(op, dtype),
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
        DType::F16 => float!(f16),
        DType::BF16 => float!(bf16),
        DType::F32 => float!(f32),
        DType::F64 => float!(f64),
        DType::C32 if is_sum(op) => float!(f16),
        DType::C64 if is_sum(op) => float!(f32),
        DType::C128 if is_sum(op) => float!(f64),
        DType::Bool => match op {
            ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => job.run::<Truth>(|a, b| a | b),
            ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => job.run::<Truth>(|a, b| a & b),
            ReduceOp::BitXor => job.run::<Truth>(|a, b| a ^ b),
            ReduceOp::Avg | ReduceOp::PreMulSum(_) => undefined(op, dtype),
        },
        _ => undefined(op, dtype),
    }
}

fn is_sum(op: ReduceOp) -> bool {
    matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_))
}

fn undefined(op: ReduceOp, dtype: DType) {
    panic!("{} is not defined on {dtype}; submission refuses it", op.name());
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
#[cfg(test)]
mod tests;
