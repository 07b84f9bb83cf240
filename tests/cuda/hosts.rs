//! Operations between ranks of several hosts, which one machine poses as.

use std::time::Duration;

use ncclx_rs::sys::cuda::DeviceMemory;
use ncclx_rs::{Counts, Error, OpKind, Rank, ReduceOp, Work};

use crate::harness::alone;
use crate::messages::{
    CELL, Item, SMALL, both_ways, cut_otherwise, disagree, disagree_in_a_batch, exchanges, many_messages, outcome,
    ping, recv, send, there_and_back,
};
use crate::ranks::{OnDevice, data, hosts, total};
use crate::recording::{Graph, Mode};
use crate::windows::{Part, put};

/// Several segments, and a last one that is shorter.
const HINTS: &[(&str, &str)] = &[("device_staging_bytes", "65536"), ("single_copy_bytes", "0")];
const LENGTHS: [usize; 4] = [1, 3, 1000, 150_000];

type Settings = [(&'static str, &'static str)];

const LATE: &Settings = &[("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1"), ("SOFTCUDA_HOST_POINTERS_DIFFER", "1")];

/// Returns memory that must stay: to give it back waits for the device, and so for the other ranks.
fn expect_sum(rank: &OnDevice, len: usize) -> DeviceMemory {
    let (me, size) = (rank.me(), rank.comm.size());
    let memory = rank.memory(&data(me, len));
    rank.sum(&memory).expect("a sum");
    assert_eq!(rank.values(&memory), total(size, len), "{len} on rank {me} of {size}");
    memory
}

/// Every collective that is served, several at a time.
fn collectives(rank: OnDevice) {
    let (me, size) = (rank.me(), rank.comm.size());
    let mut kept: Vec<DeviceMemory> = vec![];
    for len in LENGTHS {
        let all: Vec<Vec<f32>> = (0..size).map(|rank| data(rank, len)).collect();
        let zeros = |len| rank.memory(&vec![0.0; len]);
        let [sum, most, own] = [0, 1, 2].map(|_| rank.memory(&data(me, len)));
        let root = Rank::from(size - 1);
        let spread = rank.memory(&data(me, len));
        let (reduced, gathered, scattered) = (zeros(len), zeros(size * len), zeros(len));
        let (blocks, at_root) = (rank.memory(&all.concat()), zeros(size * len));
        let blocks_to_root = [&at_root];
        let at_the_root = usize::from(me + 1 == size);
        let served = [
            rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&sum], &[&sum]),
            rank.submit(OpKind::AllReduce(ReduceOp::Max), &[&most], &[&most]),
            rank.submit(OpKind::AllGather, &[&own], &[&gathered]),
            rank.submit(OpKind::ReduceScatter(ReduceOp::Sum), &[&blocks], &[&scattered]),
            rank.submit(OpKind::Broadcast { root }, &[&spread], &[&spread]),
            rank.submit(OpKind::Reduce { op: ReduceOp::Sum, root }, &[&own], &[&reduced]),
            rank.submit(OpKind::Gather { root }, &[&own], &blocks_to_root[..at_the_root]),
            rank.submit(OpKind::Barrier, &[], &[]),
        ];
        for work in served {
            work.expect("a work").wait(None).expect("success");
        }
        let what = format!("{len} on rank {me} of {size}");
        assert_eq!(rank.values(&sum), total(size, len), "{what}");
        let maximum = |at: usize| all.iter().map(|data| data[at]).fold(f32::MIN, f32::max);
        assert_eq!(rank.values(&most), (0..len).map(maximum).collect::<Vec<_>>(), "{what}");
        assert_eq!(rank.values(&gathered), all.concat(), "{what}");
        let block: Vec<f32> = all[me].iter().map(|value| value * size as f32).collect();
        assert_eq!(rank.values(&scattered), block, "{what}");
        assert_eq!(rank.values(&spread), all[size - 1], "{what}");
        if me + 1 == size {
            assert_eq!(rank.values(&reduced), total(size, len), "{what}");
            assert_eq!(rank.values(&at_root), all.concat(), "{what}");
        }
        kept.extend([sum, most, own, spread, reduced, gathered, scattered, blocks, at_root]);
    }
    rank.leave(kept);
}

#[test]
fn ranks_of_several_hosts_do_every_collective() {
    alone("hosts::ranks_of_several_hosts_do_every_collective", &[&[], LATE], || {
        for places in ["ab", "aabb", "aaab", "aba"] {
            hosts(places, HINTS, collectives);
        }
    });
}

/// How many elements go from one rank to another; none at all from some.
fn block(from: usize, to: usize, unit: usize) -> usize {
    if (from + 2 * to).is_multiple_of(5) { 0 } else { unit * (1 + from) + to }
}

/// The elements that go from one rank to another.
fn block_data(from: usize, to: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| (from * 1000 + to * 100 + at % 97) as f32).collect()
}

/// An all_to_all of blocks of these lengths: the memory of both sides, which must stay, and how it has ended.
fn exchange(rank: &OnDevice, len: impl Fn(usize, usize) -> usize) -> ([DeviceMemory; 2], Result<(), Error>) {
    exchange_within(rank, len, None)
}

fn exchange_within(
    rank: &OnDevice,
    len: impl Fn(usize, usize) -> usize,
    limit: Option<Duration>,
) -> ([DeviceMemory; 2], Result<(), Error>) {
    let (me, size) = (rank.me(), rank.comm.size());
    let send: Counts = (0..size).map(|to| len(me, to)).collect();
    let recv: Counts = (0..size).map(|from| len(from, me)).collect();
    let data: Vec<f32> = (0..size).flat_map(|to| block_data(me, to, send[to])).collect();
    let (input, output) = (rank.memory(&data), rank.memory(&vec![-1.0; recv.total()]));
    let work = rank.submit_within(OpKind::AllToAll { send, recv }, &[&input], &[&output], limit);
    let outcome = work.and_then(|work| work.wait(None));
    ([input, output], outcome)
}

#[test]
fn blocks_of_any_length_go_between_hosts_and_within_them() {
    alone("hosts::blocks_of_any_length_go_between_hosts_and_within_them", &[&[], LATE], || {
        for places in ["ab", "aabb", "aaab", "abac"] {
            hosts(places, HINTS, |rank| {
                let (me, size) = (rank.me(), rank.comm.size());
                let mut kept = vec![];
                // Pieces are of 16 KiB among four ranks: less than one, one and a bit, several, and all of one length.
                for unit in [1, 700, 4096, 30_000] {
                    let (unequal, equal) = (|from, to| block(from, to, unit), |_, _| unit);
                    for len in [&unequal as &dyn Fn(usize, usize) -> usize, &equal] {
                        let ([input, output], outcome) = exchange(&rank, len);
                        outcome.expect("success");
                        let expected: Vec<f32> =
                            (0..size).flat_map(|from| block_data(from, me, len(from, me))).collect();
                        assert_eq!(rank.values(&output), expected, "{unit} on rank {me} of {places}");
                        kept.extend([input, output, expect_sum(&rank, 3000)]);
                    }
                }
                rank.leave(kept);
            });
        }
    });
}

#[test]
fn hosts_that_disagree_on_a_block_are_told_and_go_on() {
    alone("hosts::hosts_that_disagree_on_a_block_are_told_and_go_on", &[&[], LATE], || {
        hosts("aab", HINTS, |rank| {
            let me = rank.me();
            let mut kept = vec![expect_sum(&rank, 1000)];
            // One sends more than another expects, or less: within a piece, by a piece of 5440, by many.
            for (from, to, sent, expected) in
                [(0, 2, 10, 11), (2, 1, 0, 1), (1, 2, 40_000, 3), (2, 0, 5440, 5440 * 2), (0, 1, 7, 8)]
            {
                let (memory, outcome) = exchange(&rank, |sender, receiver| match (sender, receiver) == (from, to) {
                    true if me == from => sent,
                    true => expected,
                    false => 5,
                });
                // A rank at neither end may have exchanged everything before it hears of that.
                let outcome = match outcome {
                    Ok(()) if me != from && me != to => rank.sum(&kept[0]),
                    outcome => outcome,
                };
                let Err(Error::Mismatch { detail, .. }) = &outcome else { panic!("rank {me}: {outcome:?}") };
                let names = [from, to].map(|rank| format!("rank {rank}"));
                assert!(names.iter().all(|name| detail.contains(name)), "rank {me}: {detail}");
                assert!(detail.contains("disagree on the sizes"), "rank {me}: {detail}");
                rank.stream.synchronize().expect("a stream that ends");
                kept.extend(memory);
                kept.push(expect_sum(&rank, 1000));
            }
            // And on what is called at all.
            let (memory, outcome) = if me == 2 {
                (vec![], rank.sum(&kept[0]))
            } else {
                let (memory, outcome) = exchange(&rank, |_, _| 5);
                (Vec::from(memory), outcome)
            };
            kept.extend(memory);
            let Err(Error::Mismatch { detail, .. }) = &outcome else { panic!("rank {me}: {outcome:?}") };
            assert!(detail.contains("all_reduce(SUM") && detail.contains("all_to_all(float32)"), "{detail}");
            kept.push(expect_sum(&rank, 1000));
            rank.leave(kept);
        });
    });
}

#[test]
fn a_rank_of_another_host_that_does_not_exchange_is_named() {
    alone("hosts::a_rank_of_another_host_that_does_not_exchange_is_named", &[&[]], || {
        hosts("aabb", HINTS, |rank| {
            let me = rank.me();
            let mut kept = vec![expect_sum(&rank, 1000)];
            if me != 3 {
                let (memory, outcome) = exchange_within(&rank, |_, _| 20_000, Some(Duration::from_secs(3)));
                let error = outcome.expect_err("rank 3 does not call").to_string();
                assert!(error.contains("rank(s) 3 did not call it"), "rank {me}: {error}");
                rank.stream.synchronize().expect("a stream that ends");
                kept.extend(memory);
            }
            rank.leave(kept);
        });
    });
}

#[test]
fn many_operations_are_under_way_between_hosts() {
    alone("hosts::many_operations_are_under_way_between_hosts", &[&[]], || {
        hosts("aab", HINTS, |rank| {
            let memory = rank.memory(&[rank.me() as f32, 1.0]);
            let works: Vec<_> = (0..300)
                .map(|_| rank.submit(OpKind::AllReduce(ReduceOp::Max), &[&memory], &[&memory]).expect("a work"))
                .collect();
            assert_eq!(rank.values(&memory), [2.0, 1.0]);
            assert!(works.iter().all(|work| work.wait(None) == Ok(())));
            rank.leave(memory);
        });
    });
}

#[test]
fn hosts_that_disagree_are_told_and_go_on() {
    alone("hosts::hosts_that_disagree_are_told_and_go_on", &[&[], LATE], || {
        // The odd one has its host alone, or shares it.
        for (places, odd) in [("aab", 2), ("aabb", 3), ("ab", 0)] {
            hosts(places, HINTS, |rank| {
                let (me, size) = (rank.me(), rank.comm.size());
                let mut kept = vec![expect_sum(&rank, 1000)];
                for len in [10, 50_000] {
                    let memory = rank.memory(&data(me, len));
                    let op = if me == odd { ReduceOp::Max } else { ReduceOp::Sum };
                    let outcome = rank.submit(OpKind::AllReduce(op), &[&memory], &[&memory]);
                    let outcome = outcome.and_then(|work| work.wait(None));
                    let Err(Error::Mismatch { detail, .. }) = &outcome else { panic!("rank {me}: {outcome:?}") };
                    assert!(detail.contains("all_reduce(MAX") && detail.contains("all_reduce(SUM"), "{detail}");
                    rank.stream.synchronize().expect("a stream that ends");
                    kept.extend([memory, expect_sum(&rank, 1000)]);
                    assert_eq!(rank.sum_on_the_cpu(), Ok((size * (size + 1) / 2) as f32));
                }
                rank.leave(kept);
            });
        }
    });
}

#[test]
fn a_rank_of_another_host_that_does_not_come_is_named() {
    alone("hosts::a_rank_of_another_host_that_does_not_come_is_named", &[&[]], || {
        hosts("aabb", HINTS, |rank| {
            let me = rank.me();
            let memory = rank.memory(&data(me, 1000));
            rank.sum(&memory).expect("a sum");
            if me != 3 {
                let limit = Some(Duration::from_secs(3));
                let op = OpKind::AllReduce(ReduceOp::Sum);
                let work = rank.submit_within(op, &[&memory], &[&memory], limit).expect("a work");
                let error = work.wait(None).expect_err("rank 3 does not call").to_string();
                assert!(error.contains("rank(s) 3 did not call it"), "rank {me}: {error}");
                rank.stream.synchronize().expect("a stream that ends");
            }
            rank.leave(memory);
        });
    });
}

#[test]
fn a_rank_that_leaves_ends_what_waits_for_it_on_other_hosts() {
    alone("hosts::a_rank_that_leaves_ends_what_waits_for_it_on_other_hosts", &[&[]], || {
        // Sometimes it leaves before what it has done is on its way.
        for _ in 0..20 {
            hosts("aabb", HINTS, |rank| {
                let memory = rank.memory(&data(rank.me(), 1000));
                rank.sum(&memory).expect("a sum");
                if rank.me() == 3 {
                    return rank.comm.abort("enough");
                }
                let outcome = rank.sum(&memory);
                assert!(matches!(outcome, Err(Error::PeerLost { rank: 3, .. })), "{outcome:?}");
                rank.stream.synchronize().expect("a stream that ends");
            });
        }
    });
}

#[test]
fn the_device_may_be_waited_for_while_a_network_is() {
    alone("hosts::the_device_may_be_waited_for_while_a_network_is", &[&[]], || {
        hosts("ab", HINTS, |rank| {
            let memory = rank.memory(&data(rank.me(), 50_000));
            rank.sum(&memory).expect("a sum");
            let spare = rank.memory(&[0.0; 1000]);
            rank.comm.barrier().expect("all are there");
            let work = rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory]).expect("a work");
            // To give memory back waits for the device, and so for the other host.
            drop(spare);
            assert_eq!(work.wait(None), Ok(()));
            rank.leave(memory);
        });
    });
}

/// What two ranks do that are on two hosts, and what three do, of which two share one.
const OF_TWO: &[fn(OnDevice)] = &[there_and_back, both_ways, cut_otherwise, many_messages];
const OF_THREE: &[fn(OnDevice)] = &[disagree, disagree_in_a_batch];

#[test]
fn messages_between_hosts_are_right() {
    alone("hosts::messages_between_hosts_are_right", &[&[], LATE], || {
        OF_TWO.iter().for_each(|what| hosts("ab", SMALL, what));
    });
}

#[test]
fn batches_go_to_ranks_of_this_host_and_of_others() {
    alone("hosts::batches_go_to_ranks_of_this_host_and_of_others", &[&[], LATE], || {
        for places in ["aabb", "aba", "abc"] {
            hosts(places, SMALL, |rank| {
                let batches = exchanges(&rank, places.len());
                rank.leave(batches);
            });
        }
    });
}

#[test]
fn ends_on_different_hosts_that_disagree_are_told_and_go_on() {
    alone("hosts::ends_on_different_hosts_that_disagree_are_told_and_go_on", &[&[], LATE], || {
        for places in ["abb", "aba", "abc"] {
            OF_THREE.iter().for_each(|what| hosts(places, SMALL, what));
        }
    });
}

#[test]
fn a_rank_of_another_host_that_calls_no_message_is_named() {
    alone("hosts::a_rank_of_another_host_that_calls_no_message_is_named", &[&[], LATE], || {
        hosts("abb", SMALL, |rank| {
            let kept = ping(&rank, 0);
            // The receiver does not come, then the sender does not.
            for (number, to) in [(1, 1), (2, 0)] {
                let item = match rank.me() {
                    0 if to == 1 => rank.sends(1, number, 9 * CELL),
                    0 => rank.receives(1, number, 9 * CELL),
                    _ => continue,
                };
                let mut op = rank.op_of(&rank.stream, &item);
                op.timeout = Some(Duration::from_secs(1));
                let outcome = outcome(rank.comm.submit(op));
                let Err(Error::Timeout { detail, .. }) = &outcome else { panic!("{outcome:?}") };
                assert!(detail.contains("rank 1 did not call it"), "{detail}");
                rank.stream.synchronize().expect("a stream that runs out");
            }
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            if rank.me() == 1 {
                let item = rank.receives(0, 1, 9 * CELL);
                let outcome = outcome(rank.one(&item));
                let Err(Error::Remote { rank: 0, cause, .. }) = &outcome else { panic!("{outcome:?}") };
                assert!(cause.contains("rank 1 did not call it"), "{cause}");
            }
            rank.comm.barrier().expect("nor is it here");
            rank.comm.abort("the test is over");
            drop(kept);
        });
    });
}

#[test]
fn messages_end_when_a_rank_of_another_host_leaves() {
    alone("hosts::messages_end_when_a_rank_of_another_host_leaves", &[&[], LATE], || {
        hosts("aab", SMALL, |rank| {
            let all = exchanges(&rank, 3);
            let me = rank.me();
            // Also what waits on the stream of the rank that leaves.
            let others = (0..3).filter(|other| *other != me);
            let items: Vec<Item> = others.map(|other| rank.receives(other, 5, 9 * CELL)).collect();
            let work: Work = rank.batch(&items).expect("a work");
            rank.comm.barrier().expect("all are there");
            if me == 2 {
                rank.comm.abort("it had enough");
                let outcome = work.wait(None);
                assert!(matches!(&outcome, Err(Error::Closed { how, .. }) if how.contains("enough")), "{outcome:?}");
            } else {
                let outcome = work.wait(None);
                assert!(matches!(&outcome, Err(Error::PeerLost { rank: 2, .. })), "{outcome:?}");
            }
            rank.stream.synchronize().expect("a stream that runs out");
            drop((all, items));
        });
    });
}

#[test]
fn what_is_not_done_between_hosts_is_refused_on_all_ranks_and_they_go_on() {
    alone("hosts::what_is_not_done_between_hosts_is_refused_on_all_ranks_and_they_go_on", &[&[]], || {
        hosts("aab", HINTS, |rank| {
            let me = rank.me();
            let first = rank.memory(&data(me, 6));
            let mut kept = vec![expect_sum(&rank, 1000)];
            let refused = |outcome: Result<(), Error>, why: &str| {
                let error = outcome.expect_err(why);
                assert!(matches!(&error, Error::Usage(_)) && error.to_string().contains(why), "rank {me}: {error}");
            };
            let submit = |kind, inputs: &[&DeviceMemory], outputs: &[&DeviceMemory]| {
                rank.submit(kind, inputs, outputs).map(drop)
            };
            let part = Part::new(&rank, 16);
            let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                let captured = submit(OpKind::AllReduce(ReduceOp::Sum), &[&first], &[&first]);
                refused(captured, "ranks on one host, as collectives in CUDA graphs");
                let far = if me == 2 { 0 } else { 2 };
                let captured = submit(put(&part, far, 0), &[&first], &[]);
                refused(captured, "a rank on the same host, as accesses to windows in CUDA graphs need");
                if me != 2 {
                    submit(put(&part, 1 - me, 8), &[&first], &[]).expect("its peer is on this host");
                }
                if me != 1 {
                    let captured = match me {
                        0 => submit(send(2, 0), &[&first], &[]),
                        _ => submit(recv(0, 0), &[], &[&first]),
                    };
                    refused(captured, "ranks on one host, as messages in CUDA graphs");
                }
            });
            kept.push(expect_sum(&rank, 1000));
            graph.replay(&rank.stream);
            rank.stream.synchronize().expect("a replay that ends");
            rank.comm.barrier().expect("all are there");
            let put = if me == 2 { vec![-1.0; 6] } else { data(1 - me, 6) };
            assert_eq!(part.values(&rank)[8..14], put, "only what is within a host is in the graph");
            drop(graph);
            rank.comm.window_deregister(part.id).expect("an end");
            rank.leave((kept, first, part.memory));
        });
    });
}
