//! Every operation on every type against arithmetic done one value at a time.

use super::*;
use crate::types::Arithmetic;

const LENGTHS: [usize; 5] = [0, 1, 7, 64, 1001];

const OPS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
    ReduceOp::PreMulSum(3.0),
];

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
            combine(op, dtype, &mut combined, &block(1));
            assert_eq!(combined, expected, "{op:?} {dtype} {len}");
            for position in 0..2 {
                let mut folded = block(position);
                fold(op, dtype, &mut folded, position, &[&block(1 - position)]);
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
        fold(ReduceOp::Sum, DType::BF16, &mut into, position, &all_but(position, &values));
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
            fold(ReduceOp::Sum, DType::F32, &mut into, position, &all_but(position, &values));
            assert_eq!(f32::from_ne_bytes(into), sum, "{position}");
        }
    }
}

#[test]
fn averages_truncate_integers_and_divide_the_rest() {
    let mut data = [-7i32, 7, 8].map(i32::to_ne_bytes).concat();
    scale(ReduceOp::Avg, DType::I32, Scaling::Average, 2, &mut data);
    assert_eq!(data, [-3i32, 3, 4].map(i32::to_ne_bytes).concat());
    let mut data = [3.0f32, -1.0].map(f32::to_ne_bytes).concat();
    scale(ReduceOp::Avg, DType::F32, Scaling::Average, 2, &mut data);
    assert_eq!(data, [1.5f32, -0.5].map(f32::to_ne_bytes).concat());
}

#[test]
fn factors_multiply_every_type_they_are_defined_on() {
    for dtype in DType::ALL.iter().copied().filter(|dtype| ReduceOp::PreMulSum(3.0).supports(*dtype)) {
        let mut data = bytes(dtype, 0..9);
        scale(ReduceOp::PreMulSum(3.0), dtype, Scaling::PreMultiply, 4, &mut data);
        assert_eq!(data, bytes(dtype, (0..9).map(|x| x * 3)), "{dtype}");
        scale(ReduceOp::PreMulSum(3.0), dtype, Scaling::Average, 4, &mut data);
        scale(ReduceOp::Sum, dtype, Scaling::PreMultiply, 4, &mut data);
        assert_eq!(data, bytes(dtype, (0..9).map(|x| x * 3)), "{dtype}: no other factor applies");
    }
}

#[test]
fn nan_wins_on_either_side() {
    for op in [ReduceOp::Min, ReduceOp::Max] {
        for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            let mut into = a.to_ne_bytes();
            combine(op, DType::F32, &mut into, &b.to_ne_bytes());
            assert!(f32::from_ne_bytes(into).is_nan());
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
            same(ours, u32::from(f16::from_f32(single).to_bits()), &format_args!("single {:#x}", single.to_bits()));
        }
    }
}
