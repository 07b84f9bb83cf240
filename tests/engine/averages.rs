//! AVG divides the exact sum and rounds once, whichever algorithm adds.

use std::fmt::Debug;
use std::time::Duration;

use half::{bf16, f16};
use ncclx_rs::{Communicator, Element, OpKind, Rank, ReduceOp, algo};

use crate::world::{Wire, buffer, run, world_hinted};

/// One element, and several pieces of what the algorithms cut.
const COUNTS: [usize; 2] = [1, 40_003];
/// Operands and averages repeat after so many elements, so no more are computed.
const PERIOD: usize = 4 * 5 * 61;

/// A type whose sums leave it.
trait Number: Element + PartialEq + Debug + Default {
    /// The operand of a rank at a position, as large as the type has them.
    fn operand(rank: usize, index: usize) -> Self;
    /// The average of all ranks' operands at a position.
    fn average(size: usize, index: usize) -> Self;
}

macro_rules! integers {
    ($($t:ty),*) => { $(
        impl Number for $t {
            fn operand(rank: usize, index: usize) -> $t {
                let lower = ((rank + index) % 5) as $t;
                match index % 4 {
                    0 => <$t>::MAX - lower,
                    1 => <$t>::MIN + lower,
                    2 => 100,
                    _ if rank.is_multiple_of(2) => <$t>::MAX / 3 - lower,
                    _ => <$t>::MIN,
                }
            }

            fn average(size: usize, index: usize) -> $t {
                let sum: i128 = (0..size).map(|rank| i128::from(<$t>::operand(rank, index))).sum();
                (sum / size as i128) as $t
            }
        }
    )* };
}

integers!(u8, i8, u16, i16, u32, i32, u64, i64);

macro_rules! floats {
    ($($t:ty),*) => { $(
        impl Number for $t {
            fn operand(rank: usize, index: usize) -> $t {
                // Their sums are exact in single precision, and too large or too long for the types.
                <$t>::from_f32(match index % 4 {
                    0 => 30_000.0,
                    1 => <$t>::MAX.to_f32().min(65_504.0),
                    2 => [256.0, 1.0, 1.0, 2.0][rank % 4],
                    _ => (rank as f32 - 1.0) * 4096.0 + index as f32 % 61.0,
                })
            }

            fn average(size: usize, index: usize) -> $t {
                let sum: f64 = (0..size).map(|rank| <$t>::operand(rank, index).to_f64()).sum();
                <$t>::from_f32((sum / size as f64) as f32)
            }
        }
    )* };
}

floats!(f16, bf16);

fn repeated<T: Copy>(count: usize, number: impl Fn(usize) -> T) -> Vec<T> {
    let period: Vec<T> = (0..PERIOD.min(count)).map(number).collect();
    let mut numbers = period.repeat(count.div_ceil(period.len()));
    numbers.truncate(count);
    numbers
}

fn averages<T: Number>(comm: &Communicator, name: &str) {
    let (rank, size) = (comm.rank().index(), comm.size());
    for count in COUNTS {
        let context = |what: &str| format!("{what} of {count} × {} by {name}, rank {rank} of {size}", T::DTYPE);
        let operands = repeated(count, |index| T::operand(rank, index));
        let expected = repeated(count, |index| T::average(size, index));
        let first_wrong = |got: &[T], expected: &[T]| {
            let wrong = got.iter().zip(expected).position(|(got, expected)| got != expected);
            wrong.map(|index| (index, got[index], expected[index]))
        };

        // As two tensors, of which pieces of the whole know nothing.
        let mut data = operands.clone();
        let (one, two) = data.split_at_mut(count / 3);
        let memory = [buffer(one), buffer(two)];
        run(comm, OpKind::AllReduce(ReduceOp::Avg), memory.to_vec(), memory.to_vec()).expect("all_reduce");
        assert_eq!(first_wrong(&data, &expected), None, "{}", context("all_reduce"));

        let root = size - 1;
        let mut data = operands.clone();
        let memory = buffer(&mut data);
        let kind = OpKind::Reduce { op: ReduceOp::Avg, root: Rank::from(root) };
        run(comm, kind, vec![memory], vec![memory]).expect("reduce");
        let reduced = if rank == root { &expected } else { &operands };
        assert_eq!(first_wrong(&data, reduced), None, "{}", context("reduce"));

        // Each rank gets the whole, so that the inputs are the operands as often as there are ranks.
        let mut inputs = vec![operands.clone(); size];
        let mut output = vec![T::default(); count];
        let memory = inputs.iter_mut().map(|input| buffer(input)).collect();
        run(comm, OpKind::ReduceScatter(ReduceOp::Avg), memory, vec![buffer(&mut output)]).expect("reduce_scatter");
        assert_eq!(first_wrong(&output, &expected), None, "{}", context("reduce_scatter"));
        assert!(inputs.iter().all(|input| *input == operands), "{}", context("the input of reduce_scatter"));
    }
}

#[test]
fn an_average_is_that_of_the_exact_sum_in_every_algorithm() {
    for wire in [Wire::Shm, Wire::Mixed] {
        for size in [1, 2, 3, 4] {
            for name in algo::names() {
                world_hinted(wire, size, Duration::from_secs(60), &[("algorithm", name)], move |comm| {
                    averages::<f16>(comm, name);
                    averages::<bf16>(comm, name);
                    averages::<u8>(comm, name);
                    averages::<i8>(comm, name);
                    averages::<u16>(comm, name);
                    averages::<i16>(comm, name);
                    averages::<u32>(comm, name);
                    averages::<i32>(comm, name);
                    averages::<u64>(comm, name);
                    averages::<i64>(comm, name);
                });
            }
        }
    }
}
