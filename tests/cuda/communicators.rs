//! Operations of communicators on device memory, as programs call them.

use std::time::{Duration, Instant};

use ncclx_rs::sys::cuda::DeviceMemory;
use ncclx_rs::{Counts, Error, OpKind, Rank, ReduceOp, Work};

use crate::harness::alone;
use crate::ranks::{data, world};

#[test]
fn an_all_reduce_adds_what_all_ranks_have() {
    let weak: &[(&str, &str)] = &[("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1")];
    alone("communicators::an_all_reduce_adds_what_all_ranks_have", &[&[], weak], || {
        for size in 1..=5 {
            world(size, &[("device_staging_bytes", "65536")], |rank| {
                let me = rank.comm.rank().index();
                let lengths = [1, 3, 1000, 50_000];
                let memory = lengths.map(|len| rank.memory(&data(me, len)));
                for (len, memory) in lengths.into_iter().zip(&memory) {
                    let inputs: Vec<Vec<f32>> = (0..size).map(|rank| data(rank, len)).collect();
                    let sum: Vec<f32> = (0..len).map(|at| inputs.iter().map(|input| input[at]).sum()).collect();
                    let work = rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[memory], &[memory]).expect("a work");
                    work.wait(None).expect("a sum");
                    assert_eq!(rank.values(memory), sum, "{len} on rank {me} of {size}");
                }
                rank.leave(memory);
            });
        }
    });
}

#[test]
fn many_operations_are_submitted_before_anybody_waits() {
    alone("communicators::many_operations_are_submitted_before_anybody_waits", &[&[]], || {
        world(3, &[], |rank| {
            let me = rank.comm.rank().index();
            let memory = rank.memory(&[me as f32, 1.0]);
            let all = rank.memory(&[0.0; 6]);
            let mut works = Vec::new();
            for _ in 0..1500 {
                works.push(rank.submit(OpKind::AllReduce(ReduceOp::Max), &[&memory], &[&memory]).expect("a work"));
                works.push(rank.submit(OpKind::AllGather, &[&memory], &[&all]).expect("a work"));
                works.push(rank.submit(OpKind::Barrier, &[], &[]).expect("a work"));
            }
            assert_eq!(rank.values(&all), [2.0, 1.0, 2.0, 1.0, 2.0, 1.0]);
            assert!(works.iter().all(|work| work.wait(None) == Ok(())));
            rank.leave((memory, all));
        });
    });
}

#[test]
fn ranks_that_call_something_else_are_told_and_go_on() {
    alone("communicators::ranks_that_call_something_else_are_told_and_go_on", &[&[]], || {
        world(3, &[], |rank| {
            let me = rank.comm.rank().index();
            let memory = rank.memory(&data(me, 10));
            let one = rank.memory(&[1.0]);
            let op = if me == 1 { ReduceOp::Max } else { ReduceOp::Sum };
            let outcome = rank.submit(OpKind::AllReduce(op), &[&memory], &[&memory]).and_then(|work| work.wait(None));
            let Err(Error::Mismatch { detail, .. }) = &outcome else { panic!("{outcome:?}") };
            assert!(detail.contains("all_reduce(MAX, 10 × float32)") && detail.contains("(SUM, 10"), "{detail}");
            let work = rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&one], &[&one]).expect("a work");
            work.wait(None).expect("a sum");
            assert_eq!(rank.values(&one), [3.0]);
            rank.leave((memory, one));
        });
    });
}

/// The elements that a rank sends another one: none, few, or more than a cell of 16 KiB has.
fn block(from: usize, to: usize) -> usize {
    match (from * 3 + to * 5) % 4 {
        0 => 0,
        1 => 7,
        more => more * 5000 + from,
    }
}

/// An element that no other rank has there.
fn element(from: usize, to: usize, index: usize) -> f32 {
    ((from * 1000 + to * 100 + index * 7) % 65_521) as f32
}

#[test]
fn an_all_to_all_exchanges_blocks_of_any_length() {
    let weak: &[(&str, &str)] = &[("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1")];
    alone("communicators::an_all_to_all_exchanges_blocks_of_any_length", &[&[], weak], || {
        for size in 1..=5 {
            world(size, &[("device_staging_bytes", "65536")], |rank| {
                let me = rank.comm.rank().index();
                let blocks = |len: &dyn Fn(usize) -> usize, of: &dyn Fn(usize, usize) -> f32| -> Vec<Vec<f32>> {
                    (0..size).map(|peer| (0..len(peer)).map(|index| of(peer, index)).collect()).collect()
                };
                let sent = blocks(&|to| block(me, to), &|to, index| element(me, to, index));
                let expected = blocks(&|from| block(from, me), &|from, index| element(from, me, index));
                let counts = |blocks: &[Vec<f32>]| -> Counts { blocks.iter().map(Vec::len).collect() };
                let kind = OpKind::AllToAll { send: counts(&sent), recv: counts(&expected) };
                // In one tensor, and in lists of them.
                let input = rank.memory(&sent.concat());
                let inputs: Vec<DeviceMemory> = sent.iter().map(|block| rank.memory(block)).collect();
                let outputs: Vec<DeviceMemory> =
                    expected.iter().map(|block| rank.memory(&vec![-1.0; block.len()])).collect();
                let output = rank.memory(&vec![-1.0; counts(&expected).total()]);
                for _ in 0..3 {
                    let work = rank.submit(kind.clone(), &[&input], &[&output]).expect("a work");
                    let (ins, outs): (Vec<_>, Vec<_>) = (inputs.iter().collect(), outputs.iter().collect());
                    let lists = rank.submit(kind.clone(), &ins, &outs).expect("a work");
                    let barrier = rank.submit(OpKind::Barrier, &[], &[]).expect("a work");
                    [work, lists, barrier].iter().for_each(|work| work.wait(None).expect("success"));
                }
                assert_eq!(rank.values(&output), expected.concat(), "rank {me} of {size}");
                for (memory, expected) in outputs.iter().zip(&expected) {
                    assert_eq!(&rank.values(memory), expected, "rank {me} of {size}");
                }
                rank.leave((input, inputs, output, outputs));
            });
        }
    });
}

#[test]
fn many_all_to_alls_are_submitted_before_anybody_waits() {
    alone("communicators::many_all_to_alls_are_submitted_before_anybody_waits", &[&[]], || {
        world(3, &[], |rank| {
            let me = rank.comm.rank().index() as f32;
            let (input, output) = (rank.memory(&[me, me + 10.0, me + 20.0]), rank.memory(&[0.0; 3]));
            let counts = Counts::equal(1, 3);
            let submit = || {
                let kind = OpKind::AllToAll { send: counts.clone(), recv: counts.clone() };
                rank.submit(kind, &[&input], &[&output]).expect("a work")
            };
            let works: Vec<Work> = (0..500).map(|_| submit()).collect();
            assert_eq!(rank.values(&output), [0.0, 1.0, 2.0].map(|from| from + 10.0 * me));
            assert!(works.iter().all(|work| work.wait(None) == Ok(())));
            rank.leave((input, output));
        });
    });
}

#[test]
fn ranks_that_disagree_on_the_sizes_of_an_all_to_all_are_told_and_go_on() {
    let weak: &[(&str, &str)] = &[("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1")];
    const NAME: &str = "communicators::ranks_that_disagree_on_the_sizes_of_an_all_to_all_are_told_and_go_on";
    alone(NAME, &[&[], weak], || {
        world(4, &[], |rank| {
            let me = rank.comm.rank().index();
            let exchange = |send: Vec<usize>, recv: Vec<usize>| {
                let (input, output) =
                    (rank.memory(&vec![1.0; send.iter().sum()]), rank.memory(&vec![0.0; recv.iter().sum()]));
                let kind = OpKind::AllToAll { send: send.into(), recv: recv.into() };
                let outcome = rank.submit(kind, &[&input], &[&output]).and_then(|work| work.wait(None));
                (outcome, (input, output))
            };
            let mut kept = Vec::new();
            for round in 0..3 {
                let (outcome, memory) = exchange(vec![100; 4], vec![100; 4]);
                assert_eq!(outcome, Ok(()), "{round}");
                kept.push(memory);
                // Rank 1 sends rank 3 less than that expects.
                let send = if me == 1 { vec![100, 100, 100, 99] } else { vec![100; 4] };
                let (outcome, memory) = exchange(send, vec![100; 4]);
                kept.push(memory);
                let Err(Error::Mismatch { detail, .. }) = &outcome else { panic!("{outcome:?}") };
                let expected = "rank 1 sends 99 elements to rank 3, which expects 100";
                assert!(detail.contains("on the sizes of collective") && detail.ends_with(expected), "{detail}");
            }
            let (outcome, memory) = exchange(vec![100; 4], vec![100; 4]);
            assert_eq!((outcome, rank.values(&memory.1)), (Ok(()), vec![1.0; 400]));
            rank.leave((kept, memory));
        });
    });
}

#[test]
fn an_all_to_all_that_a_rank_does_not_call_ends() {
    alone("communicators::an_all_to_all_that_a_rank_does_not_call_ends", &[&[]], || {
        world(3, &[], |rank| {
            let memory = rank.memory(&data(rank.comm.rank().index(), 30));
            let counts = Counts::equal(10, 3);
            let exchange = |limit| {
                let kind = OpKind::AllToAll { send: counts.clone(), recv: counts.clone() };
                rank.submit_within(kind, &[&memory], &[&memory], limit).expect("a work")
            };
            exchange(None).wait(None).expect("all are there");
            rank.comm.barrier().expect("all are there");
            if rank.comm.rank() != Rank(2) {
                match exchange(Some(Duration::from_secs(2))).wait(None) {
                    Err(Error::Timeout { detail: text, .. } | Error::Remote { cause: text, .. }) => {
                        assert!(text.contains("device collective 2: rank(s) 2 did not call it"), "{text}");
                    }
                    other => panic!("{other:?}"),
                }
                rank.stream.synchronize().expect("a stream that runs out");
            }
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn a_rank_that_does_not_come_is_named_and_the_stream_runs_out() {
    alone("communicators::a_rank_that_does_not_come_is_named_and_the_stream_runs_out", &[&[]], || {
        world(3, &[], |rank| {
            let me = rank.comm.rank().index();
            let memory = rank.memory(&data(me, 10));
            let first = rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory]).expect("a work");
            first.wait(None).expect("a sum");
            rank.comm.barrier().expect("all are there");
            if me != 2 {
                let (kind, limit) = (OpKind::AllReduce(ReduceOp::Sum), Some(Duration::from_secs(2)));
                let work = rank.submit_within(kind, &[&memory], &[&memory], limit).expect("a work");
                let begin = Instant::now();
                match work.wait(None) {
                    Err(Error::Timeout { detail, .. }) => {
                        let expected = "device collective 2: rank(s) 2 did not call it; rank(s) 0, 1 did";
                        assert!(detail.starts_with(expected), "{detail}");
                    }
                    Err(Error::Remote { cause, .. }) => assert!(cause.contains("rank(s) 2 did not call it"), "{cause}"),
                    other => panic!("{other:?}"),
                }
                rank.stream.synchronize().expect("a stream that runs out");
                assert!(begin.elapsed() < Duration::from_secs(20), "it was released");
            }
            // All are there until the end: what ranks do when one leaves is another test's.
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn what_waits_for_a_rank_that_leaves_ends() {
    alone("communicators::what_waits_for_a_rank_that_leaves_ends", &[&[]], || {
        world(2, &[], |rank| {
            let memory = rank.memory(&[1.0]);
            let first = rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory]).expect("a work");
            first.wait(None).expect("a sum");
            if rank.comm.rank() == Rank(0) {
                rank.comm.abort("it had enough");
            } else {
                let outcome = rank.submit(OpKind::Barrier, &[], &[]).and_then(|work| work.wait(None));
                let Err(Error::PeerLost { rank: 0, .. }) = &outcome else { panic!("{outcome:?}") };
                rank.stream.synchronize().expect("a stream that runs out");
                rank.comm.shutdown().expect("an end");
            }
        });
    });
}
