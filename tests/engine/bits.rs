//! Every rank ends with the same bits, and these are right: any bit patterns, in every type, by every operation.

use std::sync::Arc;
use std::time::Duration;

use half::{bf16, f16};
use ncclx_rs::types::Arithmetic;
use ncclx_rs::{DType, OpKind, Rank, ReduceOp, algo};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::world::{Wire, buffer_as, run, world_hinted};

const SHORT: usize = 1024;
const LONG: usize = 1024 * 1024;

/// The operations; factors are exact, so that only what is too small for the type is rounded before it is added.
fn operations(dtype: DType) -> impl Iterator<Item = ReduceOp> {
    let factor = if dtype.arithmetic() == Arithmetic::Integer { 3.0 } else { 0.5 };
    ReduceOp::all(factor).into_iter().filter(move |op| op.supports(dtype))
}

/// A format of floating-point numbers: how they are stored, and what can be said about their rounding.
#[derive(Clone, Copy)]
struct Format {
    size: usize,
    /// Bits of the fraction.
    fraction: u32,
    /// The largest exponent, which is also the bias.
    bias: i32,
    decode: fn(&[u8]) -> f64,
    encode: fn(f64) -> Vec<u8>,
}

macro_rules! number_format {
    ($t:ty, $fraction:literal, $bias:literal, $to:expr, $from:expr) => {
        Format {
            size: size_of::<$t>(),
            fraction: $fraction,
            bias: $bias,
            decode: |bytes| ($to)(<$t>::from_ne_bytes(bytes.try_into().expect("one number"))),
            encode: |number| <$t>::to_ne_bytes(($from)(number)).to_vec(),
        }
    };
}

impl Format {
    /// That of a type's numbers, or of the parts of its complex numbers.
    fn of(dtype: DType) -> Option<Format> {
        match dtype {
            DType::F16 | DType::C32 => Some(number_format!(f16, 10, 15, f16::to_f64, f16::from_f64)),
            DType::BF16 => Some(number_format!(bf16, 7, 127, bf16::to_f64, bf16::from_f64)),
            DType::F32 | DType::C64 => Some(number_format!(f32, 23, 127, f64::from, |x| x as f32)),
            DType::F64 | DType::C128 => Some(number_format!(f64, 52, 1023, |x| x, |x| x)),
            _ => None,
        }
    }

    /// How far rounding to nearest is off, of a number of size one.
    fn unit(self) -> f64 {
        0.5 * 0.5f64.powi(self.fraction as i32)
    }

    fn least_normal(self) -> f64 {
        2f64.powi(1 - self.bias)
    }

    fn least(self) -> f64 {
        self.least_normal() * 2.0 * self.unit()
    }

    fn greatest(self) -> f64 {
        2f64.powi(self.bias) * (2.0 - 2.0 * self.unit())
    }

    /// The format that averages are summed in.
    fn of_sums(self) -> Format {
        if self.size == 2 { Format::of(DType::F32).expect("a format") } else { self }
    }

    /// PyTorch's NaN.
    fn nan(self) -> Vec<u8> {
        let quiet = (self.encode)(f64::NAN);
        let mut bits = [0; 8];
        bits[..self.size].copy_from_slice(&quiet);
        let magnitude = u64::from_ne_bytes(bits) & !(1 << (8 * self.size - 1));
        magnitude.to_ne_bytes()[..self.size].to_vec()
    }

    /// Numbers of every kind: any bits, those around which arithmetic goes wrong, and some whose sums are plain.
    fn any(self, random: &mut StdRng) -> Vec<u8> {
        let sign = if random.random() { 1.0 } else { -1.0 };
        let number = match random.random_range(0..4) {
            0 => return (0..self.size).map(|_| random.random()).collect(),
            1 => {
                let peculiar = [0.0, self.least(), self.least_normal(), 1.0, self.greatest(), f64::INFINITY];
                *peculiar.choose(random).expect("one of them")
            }
            2 => random.random_range(0.0..self.least_normal() * 2.0),
            _ => random.random_range(0.0..64.0),
        };
        (self.encode)(sign * number)
    }
}

/// A rank's operand.
fn operand(dtype: DType, rank: usize, len: usize) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64((dtype as usize * 1000 + rank) as u64);
    match Format::of(dtype) {
        Some(format) => (0..len / format.size).flat_map(|_| format.any(&mut random)).collect(),
        None => (0..len).map(|_| random.random()).collect(),
    }
}

/// What a number must be.
#[derive(Debug)]
enum Expected {
    Bits(Vec<u8>),
    /// So much, but for so much.
    About(f64, f64),
    /// An order of the operands overflows that another one does not: any number, or the one NaN.
    Anything,
}

/// The sum, rounded once, of numbers whose partial sums do not overflow.
fn exact_sum(numbers: &[f64]) -> f64 {
    // Neumaier: what each addition rounds away is added at the end.
    let (mut sum, mut lost) = (0.0f64, 0.0);
    for &x in numbers {
        let next = sum + x;
        lost += if sum.abs() >= x.abs() { (sum - next) + x } else { (x - next) + sum };
        sum = next;
    }
    sum + lost
}

fn expected_sum(format: Format, op: ReduceOp, numbers: &[f64]) -> Expected {
    let count = numbers.len() as f64;
    let (sums, divisor, factor) = match op {
        ReduceOp::Avg => (format.of_sums(), count, 1.0),
        ReduceOp::PreMulSum(factor) => (format, 1.0, factor),
        _ => (format, 1.0, 1.0),
    };
    let terms: Vec<f64> = numbers.iter().map(|x| x * factor).collect();
    let magnitude: f64 = terms.iter().map(|x| x.abs()).filter(|x| x.is_finite()).sum();
    let infinities = |sign: f64| numbers.contains(&(sign * f64::INFINITY));
    if magnitude > sums.greatest() {
        return Expected::Anything;
    }
    match (infinities(1.0), infinities(-1.0)) {
        (true, true) => return Expected::Bits(format.nan()),
        (true, false) => return Expected::Bits((format.encode)(f64::INFINITY)),
        (false, true) => return Expected::Bits((format.encode)(f64::NEG_INFINITY)),
        _ => {}
    }
    if numbers.iter().all(|x| *x == 0.0) {
        let zero = if numbers.iter().all(|x| x.is_sign_negative()) { -0.0 } else { 0.0 };
        return Expected::Bits((format.encode)(zero));
    }
    let result = exact_sum(&terms) / divisor;
    // Each partial sum is rounded in the type of sums, the result in its own; what a factor makes too small, at once.
    let rounding = (count - 1.0) * sums.unit() * magnitude / divisor;
    let narrowing = if matches!(op, ReduceOp::Avg) { format.unit() * result.abs() + format.least() } else { 0.0 };
    let scaling = if factor == 1.0 { 0.0 } else { count * format.least() };
    // The bounds are those of first order, and the reference itself is rounded in double precision.
    Expected::About(result, 1.01 * (rounding + narrowing + scaling) + 2.0 * f64::EPSILON * magnitude)
}

fn expected_product(format: Format, numbers: &[f64]) -> Expected {
    let finite = || numbers.iter().map(|x| x.abs()).filter(|x| x.is_finite() && *x > 0.0);
    let (most, least): (f64, f64) = (finite().map(|x| x.max(1.0)).product(), finite().map(|x| x.min(1.0)).product());
    if most > format.greatest() || least < format.least_normal() {
        return Expected::Anything;
    }
    let (has_zero, has_infinity) = (numbers.contains(&0.0), numbers.iter().any(|x| x.is_infinite()));
    let product: f64 = numbers.iter().product();
    if has_zero && has_infinity {
        Expected::Bits(format.nan())
    } else if has_zero || has_infinity {
        Expected::Bits((format.encode)(product))
    } else {
        Expected::About(product, 1.01 * numbers.len() as f64 * format.unit() * product.abs())
    }
}

fn expected_float(format: Format, op: ReduceOp, operands: &[&[u8]]) -> Expected {
    let numbers: Vec<f64> = operands.iter().map(|bytes| (format.decode)(bytes)).collect();
    if numbers.iter().any(|x| x.is_nan()) {
        return Expected::Bits(format.nan());
    }
    match op {
        ReduceOp::Min => Expected::Bits((format.encode)(numbers.into_iter().min_by(f64::total_cmp).expect("ranks"))),
        ReduceOp::Max => Expected::Bits((format.encode)(numbers.into_iter().max_by(f64::total_cmp).expect("ranks"))),
        ReduceOp::Product => expected_product(format, &numbers),
        _ => expected_sum(format, op, &numbers),
    }
}

fn expected_integer(dtype: DType, op: ReduceOp, operands: &[&[u8]]) -> Vec<u8> {
    let is_signed = matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64);
    let decode = |bytes: &[u8]| {
        let extends = is_signed && bytes[bytes.len() - 1] >= 0x80;
        let mut wide = [if extends { 0xff } else { 0 }; 16];
        wide[..bytes.len()].copy_from_slice(bytes);
        i128::from_le_bytes(wide)
    };
    let operands = operands.iter().map(|bytes| decode(bytes));
    let count = operands.len() as i128;
    let combine: fn(i128, i128) -> i128 = match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum(_) => i128::wrapping_add,
        ReduceOp::Product => i128::wrapping_mul,
        ReduceOp::Min => i128::min,
        ReduceOp::Max => i128::max,
        ReduceOp::BitAnd => |a, b| a & b,
        ReduceOp::BitOr => |a, b| a | b,
        ReduceOp::BitXor => |a, b| a ^ b,
    };
    let combined = operands.reduce(combine).expect("ranks");
    let result = match op {
        ReduceOp::Avg => combined / count,
        ReduceOp::PreMulSum(factor) => combined * factor as i128,
        _ => combined,
    };
    result.to_le_bytes()[..dtype.size()].to_vec()
}

fn expected_truth(op: ReduceOp, operands: &[&[u8]]) -> Vec<u8> {
    let trues = operands.iter().filter(|bytes| bytes[0] != 0).count();
    let is_true = match op {
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => trues > 0,
        ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => trues == operands.len(),
        _ => trues % 2 == 1,
    };
    vec![u8::from(is_true)]
}

/// Fails unless `got` is what the operands combine to. Of so many parts, which take turns, it checks one. What equals `right`,
/// the result of another algorithm that was checked, is not computed again.
fn check(
    (dtype, op): (DType, ReduceOp),
    operands: &[Vec<u8>],
    got: &[u8],
    right: Option<&Vec<u8>>,
    (part, parts): (usize, usize),
    context: &str,
) {
    let format = Format::of(dtype);
    let size = format.map_or(dtype.size(), |format| format.size);
    for (index, got) in got.chunks(size).enumerate().skip(part).step_by(parts) {
        if right.is_some_and(|right| right[index * size..][..size] == *got) {
            continue;
        }
        let numbers: Vec<&[u8]> = operands.iter().map(|operand| &operand[index * size..][..size]).collect();
        let expected = match format {
            Some(format) => expected_float(format, op, &numbers),
            None if dtype == DType::Bool => Expected::Bits(expected_truth(op, &numbers)),
            None => Expected::Bits(expected_integer(dtype, op, &numbers)),
        };
        let decode = |bytes: &[u8]| format.map_or(f64::NAN, |format| (format.decode)(bytes));
        let is_right = match &expected {
            Expected::Bits(bits) => got == *bits,
            Expected::About(number, tolerance) => (decode(got) - number).abs() <= *tolerance,
            Expected::Anything => !decode(got).is_nan() || format.is_some_and(|format| got == format.nan()),
        };
        assert!(is_right, "{context}: {index}: {numbers:x?} make {got:x?} ({}), not {expected:?}", decode(got));
    }
}

/// Reduces everything in several ways, on ranks that share the checking of what they get.
fn reduce_any_bits(ways: &[(Wire, &'static str)], size: usize, len: usize, are_wanted: fn(DType) -> bool) {
    let dtypes = || DType::ALL.iter().copied().filter(move |dtype| are_wanted(*dtype));
    let operands = |dtype| (0..size).map(|rank| operand(dtype, rank, len)).collect::<Vec<_>>();
    let all: Arc<Vec<_>> = Arc::new(dtypes().map(|dtype| (dtype, operands(dtype))).collect());
    let mut right = Arc::new(Vec::new());
    for &(wire, name) in ways {
        let (all, before) = (Arc::clone(&all), Arc::clone(&right));
        let mut results = world_hinted(wire, size, Duration::from_secs(120), &[("algorithm", name)], move |comm| {
            let me = comm.rank().index();
            let mut results = Vec::new();
            for (dtype, operands) in all.iter() {
                for op in operations(*dtype) {
                    let mut data = operands[me].clone();
                    let memory = buffer_as(&mut data, *dtype);
                    run(comm, OpKind::AllReduce(op), vec![memory], vec![memory]).expect("all_reduce");
                    let context = format!("{} of {dtype}, {len} bytes by {name}, {size} ranks, {wire:?}", op.name());
                    check((*dtype, op), operands, &data, before.get(results.len()), (me, size), &context);
                    results.push((context, data));
                }
            }
            results
        });
        for of_rank in &results {
            let different = of_rank.iter().zip(&results[0]).find(|(one, other)| one != other);
            assert_eq!(different.map(|((context, _), _)| context), None, "ranks differ");
        }
        right = Arc::new(results.swap_remove(0).into_iter().map(|(_, data)| data).collect());
    }
}

/// Reduces everything to the last rank, which checks all of it, in several ways.
fn reduce_any_bits_to_a_root(ways: &[(Wire, &'static str)], size: usize, are_wanted: fn(DType) -> bool) {
    let root = Rank::from(size - 1);
    let mut right = Arc::new(Vec::new());
    for &(wire, name) in ways {
        let before = Arc::clone(&right);
        let results = world_hinted(wire, size, Duration::from_secs(120), &[("algorithm", name)], move |comm| {
            let mut results = Vec::new();
            for dtype in DType::ALL.iter().copied().filter(|dtype| are_wanted(*dtype)) {
                let operands: Vec<_> = (0..size).map(|rank| operand(dtype, rank, LONG)).collect();
                for op in operations(dtype) {
                    let mut data = operands[comm.rank().index()].clone();
                    let memory = buffer_as(&mut data, dtype);
                    run(comm, OpKind::Reduce { op, root }, vec![memory], vec![memory]).expect("reduce");
                    let context = format!("{} of {dtype} by {name}, {size} ranks, {wire:?}", op.name());
                    if comm.rank() == root {
                        check((dtype, op), &operands, &data, before.get(results.len()), (0, 1), &context);
                        results.push(data);
                    } else {
                        assert!(data == operands[comm.rank().index()], "{context}: an input was written");
                    }
                }
            }
            results
        });
        right = Arc::new(results.into_iter().next_back().expect("a root"));
    }
}

fn is_reduced(dtype: DType) -> bool {
    dtype.arithmetic() != Arithmetic::None
}

fn is_narrow_or_complex(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16) || dtype.arithmetic() == Arithmetic::Complex
}

#[test]
fn short_reductions_of_any_bits_end_alike() {
    let by_all = |wire| algo::names().map(move |name| (wire, name));
    for size in [2, 3, 4] {
        reduce_any_bits(&by_all(Wire::Shm).collect::<Vec<_>>(), size, SHORT, is_reduced);
    }
    let ways: Vec<_> = by_all(Wire::Shm).chain(by_all(Wire::Mixed)).collect();
    reduce_any_bits(&ways, 5, SHORT, is_reduced);
}

#[test]
fn long_reductions_of_any_bits_end_alike() {
    let within = ["recursive_doubling", "direct", "rabenseifner", "ring"].map(|name| (Wire::Shm, name));
    reduce_any_bits(&within, 3, LONG, is_reduced);
    reduce_any_bits(&[(Wire::Mixed, "hierarchical"), (Wire::Nodes, "numa")], 4, LONG, is_reduced);
}

#[test]
fn long_reductions_of_any_bits_to_a_root_are_right() {
    reduce_any_bits_to_a_root(&["chain", "rabenseifner"].map(|name| (Wire::Shm, name)), 3, is_reduced);
    reduce_any_bits_to_a_root(&[(Wire::Mixed, "hierarchical")], 4, is_narrow_or_complex);
}

#[test]
fn long_messages_of_narrow_and_complex_types_end_alike_between_hosts() {
    reduce_any_bits(&[(Wire::Tcp, "auto")], 2, LONG, is_narrow_or_complex);
    reduce_any_bits(&[(Wire::Tls, "ring")], 4, LONG, is_narrow_or_complex);
}
