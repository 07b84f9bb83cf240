//! Every collective over every wire, against what each rank can compute alone.

use std::time::Duration;

use half::{bf16, f16};
use ncclx_rs::{Communicator, Element, OpKind, Rank, ReduceOp};

use crate::world::{buffer, run, wires, world, world_hinted};

const SIZES: [usize; 5] = [1, 2, 3, 4, 8];
/// Empty, tiny, eager, and announced in several fragments.
const COUNTS: [usize; 5] = [0, 1, 7, 1025, 200_003];

fn value(rank: usize, index: usize) -> i64 {
    (rank as i64 + 1) * 1_000_003 + index as i64 * 7
}

fn block(rank: usize, count: usize) -> Vec<i64> {
    (0..count).map(|index| value(rank, index)).collect()
}

fn me(comm: &Communicator) -> usize {
    comm.rank().index()
}

fn everywhere(check: impl Fn(&Communicator, usize) + Clone + Send + Sync + 'static) {
    for wire in wires() {
        for size in SIZES {
            let check = check.clone();
            world(wire, size, move |comm| COUNTS.into_iter().for_each(|count| check(comm, count)));
        }
    }
}

#[test]
fn all_reduce_sums() {
    everywhere(|comm, count| {
        let mut data = block(me(comm), count);
        let memory = buffer(&mut data);
        run(comm, OpKind::AllReduce(ReduceOp::Sum), vec![memory], vec![memory]).expect("all_reduce");
        let expected: Vec<i64> = (0..count).map(|i| (0..comm.size()).map(|r| value(r, i)).sum()).collect();
        assert!(data == expected, "{comm:?} {count}");
    });
}

/// Sums whose operands, one a rank, are added in the order of the ranks; in any other order the sum is another.
fn sums_in_the_order_of_the_ranks<T: Element + PartialEq>(comm: &Communicator, operands: [T; 4], sum: T) {
    let mine = operands[me(comm)];
    for count in [400, 400_004] {
        let context = format!("{} × {} by {comm:?}", count, T::DTYPE);
        let mut data = vec![mine; count];
        let memory = buffer(&mut data);
        run(comm, OpKind::AllReduce(ReduceOp::Sum), vec![memory], vec![memory]).expect("all_reduce");
        assert!(data.iter().all(|got| *got == sum), "all_reduce of {context}");
        let (mut inputs, mut output) = (vec![mine; count], vec![mine; count / 4]);
        let memory = inputs.chunks_mut(count / 4).map(|input| buffer(input)).collect();
        run(comm, OpKind::ReduceScatter(ReduceOp::Sum), memory, vec![buffer(&mut output)]).expect("reduce_scatter");
        assert!(output.iter().all(|got| *got == sum), "reduce_scatter of {context}");
    }
}

#[test]
fn direct_sums_are_in_the_order_of_the_ranks() {
    for wire in wires() {
        world_hinted(wire, 4, Duration::from_secs(60), &[("algorithm", "direct")], |comm| {
            // One is lost beside the large numbers. The types of half precision are added in single precision.
            let (single, double) = (2f32.powi(30), 2f64.powi(60));
            sums_in_the_order_of_the_ranks(comm, [single, 1.0, -single, 1.0], 1.0);
            sums_in_the_order_of_the_ranks(comm, [double, 1.0, -double, 1.0], 1.0);
            sums_in_the_order_of_the_ranks(comm, [single, 1.0, -single, 1.0].map(bf16::from_f32), bf16::ONE);
            let half = 2f32.powi(15);
            let least = 2f32.powi(-14);
            sums_in_the_order_of_the_ranks(comm, [half, least, -half, least].map(f16::from_f32), f16::from_f32(least));
        });
    }
}

#[test]
fn reduce_gives_the_root_the_sum_and_leaves_others_alone() {
    everywhere(|comm, count| {
        for root in [0, comm.size() - 1] {
            let mut data = block(me(comm), count);
            let memory = buffer(&mut data);
            let kind = OpKind::Reduce { op: ReduceOp::Sum, root: Rank::from(root) };
            run(comm, kind, vec![memory], vec![memory]).expect("reduce");
            let sum: Vec<i64> = (0..count).map(|i| (0..comm.size()).map(|r| value(r, i)).sum()).collect();
            assert!(data == if me(comm) == root { sum } else { block(me(comm), count) });
        }
    });
}

#[test]
fn broadcast_copies_the_roots_data() {
    everywhere(|comm, count| {
        for root in 0..comm.size() {
            let mut data = block(me(comm), count);
            let memory = buffer(&mut data);
            run(comm, OpKind::Broadcast { root: Rank::from(root) }, vec![memory], vec![memory]).expect("broadcast");
            assert!(data == block(root, count));
        }
    });
}

#[test]
fn all_gather_takes_unequal_blocks() {
    everywhere(|comm, count| {
        let length = |rank: usize| count + rank * (count % 3);
        let mut input = block(me(comm), length(me(comm)));
        let mut outputs: Vec<Vec<i64>> = (0..comm.size()).map(|rank| vec![0; length(rank)]).collect();
        let memory = outputs.iter_mut().map(|output| buffer(output)).collect();
        run(comm, OpKind::AllGather, vec![buffer(&mut input)], memory).expect("all_gather");
        for (rank, output) in outputs.iter().enumerate() {
            assert!(*output == block(rank, length(rank)));
        }
    });
}

#[test]
fn reduce_scatter_takes_unequal_blocks() {
    everywhere(|comm, count| {
        let length = |rank: usize| count + rank * (count % 3);
        let mut inputs: Vec<Vec<i64>> =
            (0..comm.size()).map(|rank| block(me(comm) + 10 * rank, length(rank))).collect();
        let mut output = vec![0i64; length(me(comm))];
        let memory = inputs.iter_mut().map(|input| buffer(input)).collect();
        run(comm, OpKind::ReduceScatter(ReduceOp::Sum), memory, vec![buffer(&mut output)]).expect("reduce_scatter");
        let mine = 10 * me(comm);
        let expected: Vec<i64> =
            (0..output.len()).map(|i| (0..comm.size()).map(|r| value(r + mine, i)).sum()).collect();
        assert!(output == expected);
    });
}

#[test]
fn all_to_all_takes_uneven_splits() {
    everywhere(|comm, count| {
        let length = |from: usize, to: usize| if (from + to) % 4 == 3 { 0 } else { count + from * 2 + to };
        let (size, rank) = (comm.size(), me(comm));
        let send: Vec<usize> = (0..size).map(|to| length(rank, to)).collect();
        let recv: Vec<usize> = (0..size).map(|from| length(from, rank)).collect();
        let mut input: Vec<i64> = (0..size).flat_map(|to| block(rank * 100 + to, send[to])).collect();
        let mut output = vec![0i64; recv.iter().sum()];
        let memory = vec![buffer(&mut output)];
        run(comm, OpKind::AllToAll { send: send.into(), recv: recv.into() }, vec![buffer(&mut input)], memory)
            .expect("all_to_all");
        let expected: Vec<i64> = (0..size).flat_map(|from| block(from * 100 + rank, length(from, rank))).collect();
        assert!(output == expected);
    });
}

#[test]
fn gather_and_scatter_are_rooted() {
    everywhere(|comm, count| {
        let (size, rank) = (comm.size(), me(comm));
        for root in [0, size - 1] {
            let mut own = block(rank, count);
            let mut all = vec![0i64; if rank == root { size * count } else { 0 }];
            let list = |all: &mut Vec<i64>| if rank == root { vec![buffer(all)] } else { vec![] };
            let kind = OpKind::Gather { root: Rank::from(root) };
            run(comm, kind, vec![buffer(&mut own)], list(&mut all)).expect("gather");
            if rank == root {
                assert!(all == (0..size).flat_map(|r| block(r, count)).collect::<Vec<_>>());
            }
            let mut back = vec![0i64; count];
            let kind = OpKind::Scatter { root: Rank::from(root) };
            run(comm, kind, list(&mut all), vec![buffer(&mut back)]).expect("scatter");
            assert!(back == own);
        }
    });
}

#[test]
fn nobody_leaves_a_barrier_before_everybody_came() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    for wire in wires() {
        for size in SIZES {
            let entered = Arc::new(AtomicUsize::new(0));
            world(wire, size, move |comm| {
                for round in 1..=20 {
                    entered.fetch_add(1, Ordering::SeqCst);
                    run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier");
                    assert!(entered.load(Ordering::SeqCst) >= round * comm.size());
                }
            });
        }
    }
}
