//! Every operation on every type against arithmetic done one value at a time.

use super::element::{narrow_bf16, narrow_f16, widen_f16};
use super::*;
use crate::types::Arithmetic;

const LENGTHS: [usize; 5] = [0, 1, 7, 64, 1001];

const OPS: [ReduceOp; 9] = ReduceOp::all(3.0);

/// A value that every type holds exactly, as do its sums and products with another.
fn small(index: usize, seed: usize) -> i64 {
    ((index * 7 + seed * 5) % 11) as i64
}

fn bytes(dtype: DType, values: impl Iterator<Item = i64>) -> Vec<u8> {
    values
        .flat_map(|x| match dtype {
            DType::Bool => vec![u8::from(x % 2 == 1)],
            DType::F16 => f16::from_f32(x as f32).to_ne_bytes().to_vec(),
            DType::BF16 => bf16::from_f32(x as f32).to_ne_bytes().to_vec(),
            DType::F32 => (x as f32).to_ne_bytes().to_vec(),
            DType::F64 => (x as f64).to_ne_bytes().to_vec(),
            DType::C64 => [(x as f32).to_ne_bytes(), (-x as f32).to_ne_bytes()].concat(),
            DType::C128 => [(x as f64).to_ne_bytes(), (-x as f64).to_ne_bytes()].concat(),
            DType::C32 => [f16::from_f32(x as f32).to_ne_bytes(), f16::from_f32(-x as f32).to_ne_bytes()].concat(),
            _ => x.to_ne_bytes()[..dtype.size()].to_vec(),
        })
        .collect()
}

fn reference(op: ReduceOp, dtype: DType, a: i64, b: i64) -> i64 {
    let (a, b) = if dtype == DType::Bool { (a % 2, b % 2) } else { (a, b) };
    match op {
        ReduceOp::Sum if dtype == DType::Bool => a | b,
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => a + b,
        ReduceOp::Product => a * b,
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::BitAnd => a & b,
        ReduceOp::BitOr => a | b,
        ReduceOp::BitXor => a ^ b,
    }
}

fn supported() -> impl Iterator<Item = (ReduceOp, DType)> {
    OPS.into_iter()
        .flat_map(|op| DType::ALL.iter().map(move |dtype| (op, *dtype)))
        .filter(|(op, dtype)| op.supports(*dtype))
}

#[test]
fn combine_and_fold_agree_with_scalar_arithmetic() {
    for (op, dtype) in supported() {
        for len in LENGTHS {
            let block = |seed: usize| bytes(dtype, (0..len).map(move |index| small(index, seed)));
            let expected = bytes(dtype, (0..len).map(|i| reference(op, dtype, small(i, 0), small(i, 1))));
            let mut combined = block(0);
            combine(Operands::Elements(op, dtype), &mut combined, &block(1));
            assert_eq!(combined, expected, "{op:?} {dtype} {len}");
            for position in 0..2 {
                let mut folded = block(position);
                fold(Operands::Elements(op, dtype), &mut folded, position, &[&block(1 - position)]);
                assert_eq!(folded, expected, "fold {op:?} {dtype} {len} {position}");
            }
        }
    }
}

fn all_but<const SIZE: usize>(position: usize, values: &[[u8; SIZE]]) -> Vec<&[u8]> {
    values.iter().enumerate().filter(|(other, _)| *other != position).map(|(_, value)| &value[..]).collect()
}

#[test]
fn a_fold_rounds_once() {
    // In bfloat16 each one is lost beside 256 on its own; together they are not.
    let values = [256.0, 1.0, 1.0].map(|x| bf16::from_f32(x).to_ne_bytes());
    for position in 0..3 {
        let mut into = values[position];
        fold(Operands::Elements(ReduceOp::Sum, DType::BF16), &mut into, position, &all_but(position, &values));
        assert_eq!(bf16::from_ne_bytes(into).to_f32(), 258.0, "{position}");
    }
}

#[test]
fn a_fold_keeps_the_order_of_the_blocks() {
    // One is lost beside 2³⁰ in single precision, unless the larger numbers have gone before it comes.
    let large = 2f32.powi(30);
    for (values, sum) in [([large, -large, 1.0], 1.0), ([large, 1.0, -large], 0.0), ([1.0, large, -large], 0.0)] {
        let values = values.map(f32::to_ne_bytes);
        for position in 0..3 {
            let mut into = values[position];
            fold(Operands::Elements(ReduceOp::Sum, DType::F32), &mut into, position, &all_but(position, &values));
            assert_eq!(f32::from_ne_bytes(into), sum, "{position}");
        }
    }
}

/// Averages of one number a rank, by elements at once and by sums that are added one after the other.
fn averages<const SIZE: usize>(dtype: DType, operands: &[[u8; SIZE]]) -> [Vec<u8>; 2] {
    let (len, world) = (LENGTHS[4], operands.len());
    let blocks: Vec<Vec<u8>> = operands.iter().map(|operand| operand.repeat(len)).collect();
    let mut at_once = vec![0; len * SIZE];
    let slices: Vec<&[u8]> = blocks.iter().map(Vec::as_slice).collect();
    average(Operands::Elements(ReduceOp::Avg, dtype), world, &mut at_once, &slices);
    let sums = Operands::Sums(dtype);
    let mut sum = vec![0; len * SIZE / dtype.size() * sums.size()];
    let mut next = sum.clone();
    for (index, block) in blocks.iter().enumerate() {
        if index == 0 {
            widen(dtype, &mut sum, block);
        } else {
            widen(dtype, &mut next, block);
            combine(sums, &mut sum, &next);
        }
    }
    let mut by_sums = vec![0; len * SIZE];
    average(sums, world, &mut by_sums, &[&sum]);
    [at_once, by_sums].map(|result| {
        assert_eq!(result, result[..SIZE].repeat(len), "every element alike");
        result[..SIZE].to_vec()
    })
}

#[test]
fn averages_are_those_of_sums_that_the_type_does_not_hold() {
    macro_rules! check {
        ($($dtype:ident: $t:ty [$($operand:expr),*] = $average:expr;)*) => { $(
            let operands: &[$t] = &[$($operand),*];
            let bytes: Vec<_> = operands.iter().map(|operand| operand.to_ne_bytes()).collect();
            let average: $t = $average;
            for got in averages(DType::$dtype, &bytes) {
                assert_eq!(got, average.to_ne_bytes(), "{operands:?}");
            }
        )* };
    }
    let half = f16::from_f32;
    check! {
        I8: i8 [100, 100, 100, 100] = 100;
        I8: i8 [-128, -128, -128] = -128;
        I8: i8 [-7, 0] = -3;
        U8: u8 [255, 255, 254] = 254;
        I16: i16 [i16::MAX, i16::MAX, i16::MAX - 2] = i16::MAX - 1;
        U16: u16 [u16::MAX, u16::MAX] = u16::MAX;
        I32: i32 [-7, 8] = 0;
        I32: i32 [i32::MIN, i32::MIN] = i32::MIN;
        U32: u32 [u32::MAX, u32::MAX, 2] = 2_863_311_530;
        I64: i64 [i64::MAX, i64::MAX, i64::MAX - 4] = i64::MAX - 2;
        I64: i64 [i64::MIN, i64::MIN, i64::MAX] = -3_074_457_345_618_258_603;
        U64: u64 [u64::MAX, u64::MAX, u64::MAX - 3] = u64::MAX - 1;
        F16: f16 [half(30_000.0), half(30_000.0), half(30_000.0), half(30_000.0)] = half(30_000.0);
        F16: f16 [half(2048.0), half(1.0), half(1.0), half(2.0)] = half(513.0);
        BF16: bf16 [bf16::MAX, bf16::MIN, bf16::ONE] = bf16::from_f32(1.0 / 3.0);
        F32: f32 [3.0, -1.0] = 1.0;
        F64: f64 [3.0, -2.0] = 0.5;
    }
    let ([a, b], [c, d]) = (half(60_000.0).to_ne_bytes(), half(-60_000.0).to_ne_bytes());
    let complex = [a, b, c, d];
    assert_eq!(averages(DType::C32, &[complex; 2]), [complex, complex]);
}

#[test]
fn an_average_in_place_is_that_of_one_block() {
    for (dtype, data, expected) in [
        (DType::F32, [3.0f32, -1.0].map(f32::to_ne_bytes).concat(), [1.5f32, -0.5].map(f32::to_ne_bytes).concat()),
        (DType::C128, [3.0f64, -1.0].map(f64::to_ne_bytes).concat(), [1.5f64, -0.5].map(f64::to_ne_bytes).concat()),
    ] {
        let mut divided = data.clone();
        divide(dtype, 2, &mut divided);
        assert_eq!(divided, expected);
        average(Operands::Elements(ReduceOp::Avg, dtype), 2, &mut divided, &[&data]);
        assert_eq!(divided, expected);
    }
}

#[test]
fn factors_multiply_every_type_they_are_defined_on() {
    for dtype in DType::ALL.iter().copied().filter(|dtype| ReduceOp::PreMulSum(3.0).supports(*dtype)) {
        let mut data = bytes(dtype, 0..9);
        scale(dtype, 3.0, &mut data);
        assert_eq!(data, bytes(dtype, (0..9).map(|x| x * 3)), "{dtype}");
    }
}

/// The bits of floating-point numbers, the parts of complex ones too: of both zeros, the least numbers, one, the largest,
/// infinity and NaNs, quiet and signalling, each with both signs; and PyTorch's NaN.
fn peculiar(dtype: DType) -> (Vec<Vec<u8>>, Vec<u8>) {
    fn all<const SIZE: usize>(
        infinite: u64,
        fraction: u64,
        one: u64,
        bytes: fn(u64) -> [u8; SIZE],
    ) -> (Vec<Vec<u8>>, Vec<u8>) {
        let quiet = fraction.div_ceil(2);
        let magnitudes = [
            0,
            1,
            fraction,
            fraction + 1,
            one,
            infinite - 1,
            infinite,
            infinite | 1,
            infinite | quiet,
            infinite | fraction,
        ];
        let sign = 1 << (8 * SIZE - 1);
        let values =
            magnitudes.into_iter().flat_map(|bits| [bits, bits | sign]).map(|bits| bytes(bits).to_vec()).collect();
        (values, bytes(infinite | quiet).to_vec())
    }
    match dtype {
        DType::F16 | DType::C32 => all(0x7c00, 0x3ff, 0x3c00, |bits| (bits as u16).to_ne_bytes()),
        DType::BF16 => all(0x7f80, 0x7f, 0x3f80, |bits| (bits as u16).to_ne_bytes()),
        DType::F32 | DType::C64 => all(0x7f80_0000, 0x7f_ffff, 0x3f80_0000, |bits| (bits as u32).to_ne_bytes()),
        DType::F64 | DType::C128 => all(0x7ff << 52, (1 << 52) - 1, 0x3ff << 52, u64::to_ne_bytes),
        _ => panic!("{dtype} has no NaN"),
    }
}

/// A floating-point number exactly, and whether it is -0; nothing for a NaN.
fn number(dtype: DType, bytes: &[u8]) -> Option<f64> {
    let number = match dtype {
        DType::F16 | DType::C32 => f64::from(f16::from_ne_bytes(bytes.try_into().expect("two bytes"))),
        DType::BF16 => f64::from(bf16::from_ne_bytes(bytes.try_into().expect("two bytes"))),
        DType::F32 | DType::C64 => f64::from(f32::from_ne_bytes(bytes.try_into().expect("four bytes"))),
        _ => f64::from_ne_bytes(bytes.try_into().expect("eight bytes")),
    };
    (!number.is_nan()).then_some(number)
}

const WITH_NAN: [DType; 7] = [DType::F16, DType::BF16, DType::F32, DType::F64, DType::C32, DType::C64, DType::C128];

#[test]
fn numbers_and_nans_combine_to_the_same_bits_in_either_order() {
    for (op, dtype) in supported().filter(|(_, dtype)| WITH_NAN.contains(dtype)) {
        let (values, nan) = peculiar(dtype);
        for (a, b) in values.iter().flat_map(|a| values.iter().map(move |b| (a, b))) {
            // As many as make vectors of every width, and a rest.
            let (left, right) = (a.repeat(70), b.repeat(70));
            let context = || format!("{op:?} of {dtype} {a:x?} and {b:x?}");
            let mut one = left.clone();
            combine(Operands::Elements(op, dtype), &mut one, &right);
            let element = one[..a.len()].to_vec();
            assert_eq!(one, element.repeat(70), "{}", context());
            let mut other = right.clone();
            combine(Operands::Elements(op, dtype), &mut other, &left);
            assert_eq!(one, other, "{}", context());
            for (into, from, position) in
                [(&left, &right, 0), (&left, &right, 1), (&right, &left, 0), (&right, &left, 1)]
            {
                let mut folded = into.clone();
                fold(Operands::Elements(op, dtype), &mut folded, position, &[from]);
                assert_eq!(folded, one, "fold: {}", context());
            }
            match (number(dtype, a), number(dtype, b), number(dtype, &element)) {
                (None, _, _) | (_, None, _) | (_, _, None) => assert_eq!(element, nan, "{}", context()),
                (Some(x), Some(y), Some(_)) => {
                    let expected = match op {
                        ReduceOp::Min => {
                            if x.total_cmp(&y).is_lt() {
                                a
                            } else {
                                b
                            }
                        }
                        ReduceOp::Max => {
                            if x.total_cmp(&y).is_gt() {
                                a
                            } else {
                                b
                            }
                        }
                        _ => &element,
                    };
                    assert_eq!(&element, expected, "{}", context());
                }
            }
        }
    }
}

#[test]
fn a_factor_leaves_one_nan() {
    for dtype in WITH_NAN {
        let (values, nan) = peculiar(dtype);
        for value in values {
            let mut scaled = value.repeat(2);
            scale(dtype, 0.0, &mut scaled);
            let is_number = number(dtype, &value).is_some_and(f64::is_finite);
            assert!(is_number || scaled == nan.repeat(2), "{dtype} {value:x?} times 0: {scaled:x?}");
        }
    }
}

#[test]
fn bfloat16_rounds_as_the_reference_does() {
    for bits in (0..=u32::MAX).step_by(65_521) {
        let x = f32::from_bits(bits);
        let (ours, theirs) = (narrow_bf16(x), bf16::from_f32(x));
        assert!(ours == theirs || (ours.is_nan() && theirs.is_nan()), "{x:e}");
    }
}

#[test]
fn only_bytes_that_are_numbers_are_reduced() {
    for dtype in DType::ALL.iter().filter(|dtype| dtype.arithmetic() == Arithmetic::None) {
        assert!(OPS.iter().all(|op| !op.supports(*dtype)));
    }
}

#[test]
fn half_precision_is_converted_as_ieee_754_says() {
    let same = |ours: u32, theirs: u32, what: &dyn std::fmt::Display| assert_eq!(ours, theirs, "{what}");
    for bits in 0..=u16::MAX {
        let half = f16::from_bits(bits);
        same(widen_f16(half).to_bits(), half.to_f32().to_bits(), &format_args!("half {bits:#x}"));
    }
    // All signs and exponents, with fractions around every place where rounding changes.
    for high in 0..1u32 << 20 {
        for low in [0, 1, 0x7ff, 0x800, 0xfff] {
            let single = f32::from_bits(high << 12 | low);
            let ours = u32::from(narrow_f16(single).to_bits());
            let theirs = if single.is_nan() { 0x7e00 } else { f16::from_f32(single).to_bits() };
            same(ours, u32::from(theirs), &format_args!("single {:#x}", single.to_bits()));
        }
    }
}

#[test]
fn half_precision_is_converted_alike_by_eights_and_one_by_one() {
    let sums = Operands::Sums(DType::F16);
    let halves: Vec<u16> = (0..=u16::MAX).collect();
    let mut widened = vec![0; 4 * halves.len()];
    widen(DType::F16, &mut widened, &halves.iter().flat_map(|half| half.to_ne_bytes()).collect::<Vec<_>>());
    for (bits, got) in halves.iter().zip(widened.as_chunks::<4>().0) {
        let expected = widen_f16(f16::from_bits(*bits));
        let expected = if expected.is_nan() { 0x7fc0_0000 } else { expected.to_bits() };
        assert_eq!(u32::from_ne_bytes(*got), expected, "half {bits:#x}");
    }
    let lows = [0, 1, 0x7ff, 0x800, 0xfff];
    for high in (0..1u32 << 20).step_by(1 << 10) {
        let singles: Vec<u32> = (high..high + (1 << 10)).flat_map(|high| lows.map(|low| high << 12 | low)).collect();
        let bytes: Vec<u8> = singles.iter().flat_map(|single| single.to_ne_bytes()).collect();
        let mut narrowed = vec![0; 2 * singles.len()];
        average(sums, 1, &mut narrowed, &[&bytes]);
        for (bits, got) in singles.iter().zip(narrowed.as_chunks::<2>().0) {
            let expected = narrow_f16(f32::from_bits(*bits)).to_bits();
            assert_eq!(u16::from_ne_bytes(*got), expected, "single {bits:#x}");
        }
    }
}
