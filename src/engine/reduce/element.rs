//! What the loops of reductions work on: elements as bytes, and how many of them are combined at a time.

use half::{bf16, f16};

use crate::sys::simd::{EIGHT, Halves};
use crate::types::{DType, ReduceOp};

/// What is combined, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operands {
    /// Elements of tensors.
    Elements(ReduceOp, DType),
    /// Sums of elements of this type, in a type that holds those of all ranks; they are added.
    Sums(DType),
}

/// An element in memory and the wider type it is computed in.
pub(super) trait Element: Copy {
    type Wide: Copy + Default;
    /// An array.
    type Bytes: Copy + Default;
    /// By what eight are converted at a time; nothing where the compiler does that as well.
    type Means: Copy;
    const BY_EIGHTS: bool = false;
    fn split(bytes: &[u8]) -> &[Self::Bytes];
    fn split_mut(bytes: &mut [u8]) -> &mut [Self::Bytes];
    fn load(bytes: Self::Bytes) -> Self::Wide;
    fn store(wide: Self::Wide) -> Self::Bytes;

    #[inline(always)]
    fn load_eight(_: Self::Means, bytes: [Self::Bytes; EIGHT]) -> [Self::Wide; EIGHT] {
        let mut wide = [Self::Wide::default(); EIGHT];
        each(&mut wide, &bytes, |_, bytes| Self::load(bytes));
        wide
    }

    #[inline(always)]
    fn store_eight(_: Self::Means, wide: [Self::Wide; EIGHT]) -> [Self::Bytes; EIGHT] {
        let mut bytes = [Self::Bytes::default(); EIGHT];
        each(&mut bytes, &wide, |_, wide| Self::store(wide));
        bytes
    }
}

macro_rules! element {
    ($($t:ty, $wide:ty, $widen:expr, $narrow:expr;)*) => { $(
        impl Element for $t {
            type Wide = $wide;
            type Bytes = [u8; size_of::<$t>()];
            type Means = ();
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
pub(super) struct Truth(u8);

impl Truth {
    fn from_ne_bytes(bytes: [u8; 1]) -> Truth {
        Truth(u8::from(bytes[0] != 0))
    }

    fn to_ne_bytes(self) -> [u8; 1] {
        [self.0]
    }
}

/// Half precision where the processor converts it: [`f16`] in all else.
#[derive(Clone, Copy)]
pub(super) struct Half;

impl Element for Half {
    type Wide = f32;
    type Bytes = [u8; 2];
    type Means = Halves;
    const BY_EIGHTS: bool = true;

    #[inline(always)]
    fn split(bytes: &[u8]) -> &[[u8; 2]] {
        f16::split(bytes)
    }

    #[inline(always)]
    fn split_mut(bytes: &mut [u8]) -> &mut [[u8; 2]] {
        f16::split_mut(bytes)
    }

    #[inline(always)]
    fn load(bytes: [u8; 2]) -> f32 {
        <f16 as Element>::load(bytes)
    }

    #[inline(always)]
    fn store(wide: f32) -> [u8; 2] {
        <f16 as Element>::store(wide)
    }

    #[inline(always)]
    fn load_eight(halves: Halves, bytes: [[u8; 2]; EIGHT]) -> [f32; EIGHT] {
        halves.widen(bytes)
    }

    #[inline(always)]
    fn store_eight(halves: Halves, mut wide: [f32; EIGHT]) -> [[u8; 2]; EIGHT] {
        for wide in &mut wide {
            *wide = canonical_f32(*wide);
        }
        halves.narrow(wide)
    }
}

/// As `f16::to_f32`, without a branch on the value, so that the loop vectorises. After Giesen, "half-float conversion",
/// <https://gist.github.com/rygorous/2144712>.
#[inline(always)]
pub(super) fn widen_f16(x: f16) -> f32 {
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
pub(super) fn narrow_f16(x: f32) -> f16 {
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
pub(super) fn narrow_bf16(x: f32) -> bf16 {
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
pub(super) trait Float: Copy {
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
pub(super) trait Job {
    fn run<E: Element>(self, means: E::Means, op: impl Fn(E::Wide, E::Wide) -> E::Wide + Copy);
}

/// How many of so many elements are converted by eights; the rest are, one by one.
#[inline(always)]
fn in_eights<E: Element>(len: usize) -> usize {
    if E::BY_EIGHTS { len / EIGHT * EIGHT } else { 0 }
}

/// `into = into ⊕ from`.
#[inline(always)]
pub(super) fn combine_each<E: Element>(
    means: E::Means,
    into: &mut [E::Bytes],
    from: &[E::Bytes],
    op: impl Fn(E::Wide, E::Wide) -> E::Wide + Copy,
) {
    let in_eights = in_eights::<E>(into.len());
    let ((eights, rest), (from_eights, from_rest)) = (into.split_at_mut(in_eights), from.split_at(in_eights));
    each(eights.as_chunks_mut().0, from_eights.as_chunks().0, |into, from| {
        let mut wide = E::load_eight(means, into);
        each(&mut wide, &E::load_eight(means, from), op);
        E::store_eight(means, wide)
    });
    each(rest, from_rest, |into, from| E::store(op(E::load(into), E::load(from))));
}

/// `wide = f(wide, from)`.
#[inline(always)]
pub(super) fn load_each<E: Element, W: Copy>(
    means: E::Means,
    wide: &mut [W],
    from: &[E::Bytes],
    f: impl Fn(W, E::Wide) -> W + Copy,
) {
    let in_eights = in_eights::<E>(wide.len());
    let ((eights, rest), (from_eights, from_rest)) = (wide.split_at_mut(in_eights), from.split_at(in_eights));
    each(eights.as_chunks_mut().0, from_eights.as_chunks().0, |mut wide: [W; EIGHT], from| {
        each(&mut wide, &E::load_eight(means, from), f);
        wide
    });
    each(rest, from_rest, |wide, from| f(wide, E::load(from)));
}

/// `wide = block₀ ⊕ block₁ ⊕ …`, of elements that are `widened`.
#[inline(always)]
pub(super) fn accumulate<'a, E: Element, W: Copy>(
    means: E::Means,
    wide: &mut [W],
    mut blocks: impl Iterator<Item = &'a [E::Bytes]>,
    widened: impl Fn(E::Wide) -> W + Copy,
    op: impl Fn(W, W) -> W + Copy,
) where
    E::Bytes: 'a,
{
    load_each::<E, W>(means, wide, blocks.next().unwrap_or_default(), |_, element| widened(element));
    for block in blocks {
        load_each::<E, W>(means, wide, block, |wide, element| op(wide, widened(element)));
    }
}

/// `into = f(wide)`.
#[inline(always)]
pub(super) fn store_each<E: Element, W: Copy>(
    means: E::Means,
    into: &mut [E::Bytes],
    wide: &[W],
    f: impl Fn(W) -> E::Wide + Copy,
) {
    let in_eights = in_eights::<E>(into.len());
    let ((eights, rest), (wide_eights, wide_rest)) = (into.split_at_mut(in_eights), wide.split_at(in_eights));
    each(eights.as_chunks_mut().0, wide_eights.as_chunks().0, |_, wide: [W; EIGHT]| {
        let mut narrow = [E::Wide::default(); EIGHT];
        each(&mut narrow, &wide, |_, wide| f(wide));
        E::store_eight(means, narrow)
    });
    each(rest, wide_rest, |_, wide| E::store(f(wide)));
}

/// `into = f(into, from)`, element by element.
///
/// By index, and closures by value: iterators of pairs and of chunks, and closures behind references, are called through
/// functions of the standard library that are not `#[inline]`. Without link-time optimisation these stay in another codegen
/// unit; and as they return slices, what calls them is not inlined into a function for more instructions than its own.
#[inline(always)]
pub(super) fn each<I: Copy, F: Copy>(into: &mut [I], from: &[F], f: impl Fn(I, F) -> I) {
    assert_eq!(into.len(), from.len(), "operands of equal length");
    for index in 0..into.len() {
        into[index] = f(into[index], from[index]);
    }
}

pub(super) const STRETCH: usize = 512;

/// On whole cache lines: the widest vectors are as long as one.
#[repr(align(64))]
pub(super) struct Accumulators<W>(pub(super) [W; STRETCH]);

pub(super) fn undefined(op: ReduceOp, dtype: DType) {
    panic!("{} is not defined on {dtype}; submission refuses it", op.name());
}
