//! Collectives and messages of a vendor's library in CUDA graphs, on the fake one of tests/fakenccl.

use std::time::{Duration, Instant};

use ncclx_rs::sys::cuda::{DeviceMemory, Stream};
use ncclx_rs::sys::nccl::Vendor;
use ncclx_rs::{Buffer, Counts, DType, Error, Mode as CallMode, Op, OpKind, Rank, ReduceOp, StreamHandle};

use crate::graphs::{REPLAY_LIMIT, rank_2_replays_it_once, wait_until};
use crate::harness::{Software, alone, calls_of, calls_of_nccl};
use crate::message_graphs::ring;
use crate::messages::{Item, exchange, outcome};
use crate::ranks::{OnDevice, data, hosts_on, world_on};
use crate::recording::{Graph, Mode, begin, end};

const NCCL: &[(&str, &str)] = &[("engine", "nccl")];
const FOUR: (&str, &str) = ("SOFTCUDA_DEVICES", "4");
const WEAK: &[(&str, &str)] =
    &[FOUR, ("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1"), ("FAKENCCL_LAUNCH_US", "300")];
const DEVICES: &[u32] = &[0, 1, 2, 3];
/// Three ranks, of which the last one is on another host than the others.
const TWO_HOSTS: &[(&str, u32)] = &[("a", 0), ("a", 1), ("b", 2)];

/// A collective with the memory of this rank.
struct Captured {
    kind: OpKind,
    input: Option<DeviceMemory>,
    output: Option<DeviceMemory>,
}

/// The elements that a rank has before a replay, of which there are enough for a block for each rank.
fn values(rank: usize, turn: usize, len: usize) -> Vec<f32> {
    data(rank + 5 * turn, len)
}

/// Each kind of collective, with blocks of `len` elements.
fn everything(rank: &OnDevice, len: usize) -> Vec<(OpKind, usize, usize)> {
    let (me, size) = (rank.me(), rank.comm.size());
    let counts = Counts::equal(len, size);
    let mut all = vec![
        (OpKind::AllReduce(ReduceOp::Sum), len, len),
        (OpKind::AllReduce(ReduceOp::Max), len, len),
        (OpKind::AllReduce(ReduceOp::PreMulSum(0.5)), len, len),
        (OpKind::AllGather, len, size * len),
        (OpKind::ReduceScatter(ReduceOp::Sum), size * len, len),
        (OpKind::AllToAll { send: counts.clone(), recv: counts }, size * len, size * len),
    ];
    for root in (0..size).map(Rank::from) {
        let at_root = |len: usize| if root.index() == me { len } else { 0 };
        all.push((OpKind::Reduce { op: ReduceOp::Sum, root }, len, len));
        all.push((OpKind::Broadcast { root }, len, len));
        all.push((OpKind::Gather { root }, len, at_root(size * len)));
        all.push((OpKind::Scatter { root }, at_root(size * len), len));
    }
    all
}

/// What a collective makes of what the ranks have.
fn made(kind: &OpKind, (me, size, len): (usize, usize, usize), of: &dyn Fn(usize) -> Vec<f32>) -> Vec<f32> {
    let all: Vec<Vec<f32>> = (0..size).map(of).collect();
    let fold = |from: usize, by: fn(f32, f32) -> f32| -> Vec<f32> {
        let at = |at: usize| all.iter().map(|own| own[from + at]).reduce(by).expect("there are ranks");
        (0..len).map(at).collect()
    };
    let sum = |left: f32, right: f32| left + right;
    let blocks = |from: usize| all.iter().flat_map(|own| own[from..][..len].to_vec()).collect();
    match kind {
        OpKind::AllReduce(ReduceOp::Sum) => fold(0, sum),
        OpKind::AllReduce(ReduceOp::Max) => fold(0, f32::max),
        OpKind::AllReduce(_) => fold(0, sum).iter().map(|sum| sum * 0.5).collect(),
        OpKind::Reduce { .. } => fold(0, sum),
        OpKind::Broadcast { root } => all[root.index()][..len].to_vec(),
        OpKind::AllGather | OpKind::Gather { .. } => blocks(0),
        OpKind::ReduceScatter(_) => fold(me * len, sum),
        OpKind::AllToAll { .. } => blocks(me * len),
        OpKind::Scatter { root } => all[root.index()][me * len..][..len].to_vec(),
        other => panic!("{other:?}"),
    }
}

/// All of [`everything`] and a barrier in one graph, with other data at each replay.
pub(crate) fn all_in_a_graph(rank: &OnDevice, len: usize, counted: impl Fn(&str) -> u64) {
    let (me, size) = (rank.me(), rank.comm.size());
    let captured: Vec<Captured> = everything(rank, len)
        .into_iter()
        .map(|(kind, from, into)| {
            let has_none = matches!(&kind, OpKind::Gather { root } | OpKind::Scatter { root } if root.index() != me);
            let memory = |len: usize| (len > 0 || !has_none).then(|| rank.memory(&vec![-1.0; len]));
            Captured { kind, input: memory(from), output: memory(into) }
        })
        .collect();
    let put = || {
        for Captured { kind, input, output } in &captured {
            let (input, output): (Vec<_>, Vec<_>) = (input.iter().collect(), output.iter().collect());
            rank.submit(kind.clone(), &input, &output).expect("a work").wait(None).expect("it has ended");
        }
        rank.submit(OpKind::Barrier, &[], &[]).expect("a work").wait(None).expect("it has ended");
    };
    // Connects the ranks for messages.
    put();
    rank.stream.synchronize().expect("a stream that ends");
    rank.comm.barrier().expect("all are there");
    let before = Software::new().expect("the software CUDA").uses("cuLaunchKernel");
    let counts = ["captured", "replayed"].map(&counted);
    let graph = Graph::of(&rank.stream, Mode::ThreadLocal, put);
    assert!(counted("captured") > counts[0], "the graph has the library's calls");
    rank.comm.barrier().expect("all are there");
    for turn in 1..4 {
        let of = |rank: usize| values(rank, turn, size * len);
        for Captured { input, .. } in &captured {
            if let Some(input) = input {
                let new = rank.memory(&of(me)[..input.bytes().len() / 4]);
                rank.copy(&new, input);
                rank.stream.synchronize().expect("a stream that ends");
            }
        }
        graph.replay(&rank.stream);
        for Captured { kind, output, .. } in &captured {
            let is_mine = !matches!(kind, OpKind::Reduce { root, .. } if root.index() != me);
            if let Some(output) = output.as_ref().filter(|_| is_mine) {
                assert!(
                    rank.values(output) == made(kind, (me, size, len), &of),
                    "{kind:?} in replay {turn} on rank {me} of {size}"
                );
            }
        }
    }
    assert!(counted("replayed") > counts[1], "replays run the library's calls");
    assert_eq!(Software::new().expect("the software CUDA").uses("cuLaunchKernel"), before, "no program ran");
    rank.comm.barrier().expect("all are done");
}

#[test]
fn every_collective_is_replayed_by_each_library() {
    alone("vendor_graphs::every_collective_is_replayed_by_each_library", &[&[FOUR], WEAK], || {
        for (engine, size, len) in [("nccl", 1, 3), ("nccl", 2, 1000), ("rccl", 3, 1), ("nccl", 4, 20_001)] {
            world_on(&DEVICES[..size], &[("engine", engine)], |rank| {
                let vendor = if engine == "nccl" { Vendor::Nccl } else { Vendor::Rccl };
                all_in_a_graph(&rank, len, |what| calls_of(vendor, what));
                rank.leave(());
            });
        }
    });
}

#[test]
fn ranks_of_several_hosts_replay_together() {
    alone("vendor_graphs::ranks_of_several_hosts_replay_together", &[&[FOUR], WEAK], || {
        hosts_on(TWO_HOSTS, NCCL, |rank| {
            all_in_a_graph(&rank, 300, calls_of_nccl);
            // What the library lacks goes by programs, which are in graphs within a host alone.
            let memory = rank.memory(&[1.0]);
            begin(&rank.stream, Mode::ThreadLocal);
            let outcome = bitwise(&rank, &memory);
            end(&rank.stream).expect("the capture is as it was");
            let error = outcome.expect_err("there are several hosts").to_string();
            assert!(error.contains("ranks on one host, as collectives in CUDA graphs by programs"), "{error}");
            rank.sum(&memory).expect("they go on");
            rank.leave(memory);
        });
    });
}

/// An all_reduce by a bitwise operation, which no library has.
fn bitwise(rank: &OnDevice, memory: &DeviceMemory) -> Result<(), Error> {
    let device = rank.context.device().ordinal();
    // SAFETY: the caller keeps the memory, and a test its stream, until the end.
    let buffer = || unsafe { Buffer::on_device(memory.bytes().ptr().to_bits(), 1, DType::I32, device) };
    // SAFETY: as above.
    let mode = CallMode::Stream(unsafe { StreamHandle::from_raw(rank.stream.to_raw(), device) });
    let kind = OpKind::AllReduce(ReduceOp::BitAnd);
    let op = Op { kind, inputs: [buffer()].into(), outputs: [buffer()].into(), timeout: None, mode };
    rank.comm.submit(op)?.wait(None)
}

#[test]
fn a_graph_has_calls_of_the_library_and_programs_in_their_order() {
    alone("vendor_graphs::a_graph_has_calls_of_the_library_and_programs_in_their_order", &[&[FOUR], WEAK], || {
        world_on(&[0, 1, 2], NCCL, |rank| {
            let branch = Stream::new(&rank.context, 0).expect("a stream");
            // 7, 3 and 1, of which a sum and then what all have in common is made, and that twice.
            let memory = rank.memory(&[f32::from_bits([7, 3, 1][rank.me()])]);
            let others: Vec<DeviceMemory> = (0..4).map(|turn| rank.memory(&data(rank.me() + turn, 2000))).collect();
            rank.sum(&others[0]).expect("a sum");
            rank.stream.synchronize().expect("a stream that ends");
            rank.comm.barrier().expect("all are there");
            let graph = rank.captured_on_two(&branch, || {
                for (turn, memory) in others.iter().enumerate() {
                    let stream = if turn % 2 == 0 { &rank.stream } else { &branch };
                    let kind = OpKind::AllReduce(ReduceOp::Sum);
                    rank.submit_on(stream, kind, (&[memory], &[memory]), None).expect("a work");
                }
                bitwise(&rank, &memory).expect("by a program");
                rank.sum(&others[1]).expect("by the library");
            });
            rank.comm.barrier().expect("all are there");
            graph.replay(&rank.stream);
            assert_eq!(rank.values(&memory), [f32::from_bits(1)]);
            let sum = |turn: usize, rank: usize| data(rank + turn, 2000);
            let summed = |turn: usize| -> Vec<f32> {
                (0..2000).map(|at| (0..3).map(|rank| sum(turn, rank)[at]).sum()).collect()
            };
            let tripled: Vec<f32> = summed(1).iter().map(|value| 3.0 * value).collect();
            assert!(rank.values(&others[1]) == tripled, "the later call saw the earlier one's result");
            assert!(rank.values(&others[3]) == summed(3));
            rank.leave((memory, others, graph, branch));
        });
    });
}

/// A graph that adds up what the ranks have, in place.
fn summing(rank: &OnDevice, memory: &DeviceMemory, limit: Option<Duration>) -> Graph {
    rank.comm.barrier().expect("all are there");
    let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || {
        let kind = OpKind::AllReduce(ReduceOp::Sum);
        rank.submit_within(kind, &[memory], &[memory], limit).expect("a work");
    });
    rank.comm.barrier().expect("all are there");
    graph
}

#[test]
fn graphs_take_turns_with_each_other_and_with_calls() {
    alone("vendor_graphs::graphs_take_turns_with_each_other_and_with_calls", &[&[FOUR], WEAK], || {
        for size in [2, 4] {
            world_on(&DEVICES[..size], NCCL, |rank| {
                let [first, second, eager] = [(); 3].map(|()| rank.memory(&[1.0; 500]));
                rank.sum(&eager).expect("a sum before captures");
                let graphs = [&first, &second].map(|memory| summing(&rank, memory, None));
                for _ in 0..4 {
                    graphs[0].replay(&rank.stream);
                    rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&eager], &[&eager]).expect("a work");
                    graphs[1].replay(&rank.stream);
                    graphs[0].replay(&rank.stream);
                }
                let power = |exponent| (size as f32).powi(exponent);
                assert_eq!(rank.values(&first), [power(8); 500]);
                assert_eq!(rank.values(&second), [power(4); 500]);
                assert_eq!(rank.values(&eager), [power(5); 500]);
                rank.leave((first, second, eager, graphs));
            });
        }
    });
}

#[test]
fn ranks_that_capture_something_else_are_told_and_go_on() {
    alone("vendor_graphs::ranks_that_capture_something_else_are_told_and_go_on", &[&[FOUR]], || {
        let disagree = |rank: OnDevice| {
            let (me, [kept, memory]) = (rank.me(), [(); 2].map(|()| rank.memory(&[1.0])));
            rank.sum(&memory).expect("a sum");
            rank.stream.synchronize().expect("a stream that ends");
            let graph = summing(&rank, &kept, None);
            for turn in 0..3 {
                begin(&rank.stream, Mode::ThreadLocal);
                // Another one each time.
                let op = if me == turn { ReduceOp::Max } else { ReduceOp::Sum };
                let outcome =
                    rank.submit(OpKind::AllReduce(op), &[&memory], &[&memory]).and_then(|work| work.wait(None));
                end(&rank.stream).expect("the capture is as it was before");
                let Err(Error::Mismatch { detail, .. }) = &outcome else { panic!("{outcome:?}") };
                assert!(detail.contains("(MAX, 1 ") && detail.contains("(SUM, 1 "), "{detail}");
                // Calls and a graph of before go on, with the communicator of before.
                graph.replay(&rank.stream);
                rank.sum(&memory).expect("they go on");
                rank.stream.synchronize().expect("replays that end");
            }
            assert_eq!(rank.values(&kept), [27.0]);
            assert_eq!(rank.values(&memory), [81.0]);
            rank.leave((kept, memory, graph));
        };
        let before = calls_of_nccl("ids");
        world_on(&[0, 1, 2], NCCL, disagree);
        hosts_on(TWO_HOSTS, NCCL, disagree);
        assert_eq!(calls_of_nccl("ids") - before, 2, "each world has begun once");
    });
}

#[test]
fn blocks_that_differ_in_a_capture_are_found_by_every_rank() {
    alone("vendor_graphs::blocks_that_differ_in_a_capture_are_found_by_every_rank", &[&[FOUR]], || {
        let disagree = |rank: OnDevice| {
            let me = rank.me();
            let memory = rank.memory(&[1.0; 9]);
            let (sent, received) = (rank.memory(&vec![1.0; if me == 2 { 4 } else { 3 }]), rank.memory(&[0.0; 3]));
            rank.sum(&memory).expect("a sum");
            rank.stream.synchronize().expect("a stream that ends");
            rank.comm.barrier().expect("all are there");
            begin(&rank.stream, Mode::ThreadLocal);
            // Rank 2 sends rank 1 another number than that expects.
            let count = |is_other: bool| -> Counts { [1, if is_other { 2 } else { 1 }, 1].into_iter().collect() };
            let kind = OpKind::AllToAll { send: count(me == 2), recv: count(false) };
            let outcome = rank.submit(kind, &[&sent], &[&received]).and_then(|work| work.wait(None));
            end(&rank.stream).expect("the capture is as it was before");
            assert!(matches!(outcome, Err(Error::Mismatch { .. })), "{outcome:?}");
            rank.sum(&memory).expect("they go on");
            assert_eq!(rank.values(&memory), [9.0; 9]);
            rank.leave((memory, sent, received));
        };
        hosts_on(TWO_HOSTS, NCCL, disagree);
    });
}

#[test]
fn a_capture_that_another_rank_does_not_make_is_an_error_on_both() {
    alone("vendor_graphs::a_capture_that_another_rank_does_not_make_is_an_error_on_both", &[&[FOUR]], || {
        world_on(&[0, 1, 2], NCCL, |rank| {
            let memory = rank.memory(&[1.0]);
            rank.sum(&memory).expect("a sum");
            for turn in 0..3 {
                rank.stream.synchronize().expect("a stream that ends");
                rank.comm.barrier().expect("all are there");
                let captures = rank.me() == turn;
                if captures {
                    begin(&rank.stream, Mode::ThreadLocal);
                }
                let outcome = rank.submit(OpKind::Barrier, &[], &[]).and_then(|work| work.wait(None));
                let Err(Error::Mismatch { detail, .. }) = &outcome else { panic!("{outcome:?}") };
                assert!(detail.contains("eagerly") && detail.contains("in a graph's capture"), "{detail}");
                if captures {
                    end(&rank.stream).expect("the capture is as it was before");
                }
                rank.sum(&memory).expect("they go on");
            }
            // In captures, too, though the library's communicator is another one by now.
            rank.stream.synchronize().expect("a stream that ends");
            let graph = summing(&rank, &memory, None);
            graph.replay(&rank.stream);
            assert_eq!(rank.values(&memory), [3f32.powi(5)]);
            rank.leave((memory, graph));
        });
    });
}

#[test]
fn a_disagreement_outside_does_not_silence_graphs() {
    alone("vendor_graphs::a_disagreement_outside_does_not_silence_graphs", &[&[FOUR]], || {
        world_on(&[0, 1], NCCL, |rank| {
            let memory = rank.memory(&[1.0]);
            rank.sum(&memory).expect("a sum");
            rank.stream.synchronize().expect("a stream that ends");
            let graph = summing(&rank, &memory, None);
            // Rank 0 has it on its stream before rank 1 calls.
            let op = if rank.me() == 0 { ReduceOp::Sum } else { ReduceOp::Max };
            if rank.me() == 1 {
                rank.comm.barrier().expect("rank 0 has called");
            }
            let work = rank.submit(OpKind::AllReduce(op), &[&memory], &[&memory]);
            if rank.me() == 0 {
                rank.comm.barrier().expect("rank 1 may call");
            }
            let outcome = work.and_then(|work| work.wait(None));
            assert!(matches!(outcome, Err(Error::Mismatch { .. })), "{outcome:?}");
            // Its replays would do nothing with the communicator that has been given up, and nobody would be told.
            let error = rank.sum(&memory).expect_err("graphs have its communicator").to_string();
            assert!(error.contains("CUDA graphs of rank 0 have calls of this one"), "{error}");
            assert!(rank.sum(&memory).is_err(), "nothing goes on");
            rank.stream.synchronize().expect("a stream that runs out");
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            drop(graph);
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn a_rank_that_does_not_replay_is_named_and_the_replay_ends() {
    alone("vendor_graphs::a_rank_that_does_not_replay_is_named_and_the_replay_ends", &[&[FOUR], WEAK], || {
        world_on(&[0, 1, 2], NCCL, |rank| {
            let memory = rank.memory(&data(rank.me(), 100));
            let graph = {
                let other = rank.memory(&[1.0]);
                rank.sum(&other).expect("a sum");
                rank.stream.synchronize().expect("a stream that ends");
                summing(&rank, &memory, Some(REPLAY_LIMIT))
            };
            rank_2_replays_it_once(&rank, &memory, &graph);
        });
    });
}

#[test]
fn what_is_behind_a_replay_that_is_given_up_is_no_success() {
    alone("vendor_graphs::what_is_behind_a_replay_that_is_given_up_is_no_success", &[&[FOUR], WEAK], || {
        world_on(&[0, 1], NCCL, |rank| {
            let memory = rank.memory(&[1.0]);
            rank.sum(&memory).expect("the first is sound");
            rank.stream.synchronize().expect("a stream that ends");
            let graph = summing(&rank, &memory, Some(REPLAY_LIMIT));
            rank.comm.barrier().expect("all are there");
            if rank.me() == 0 {
                graph.replay(&rank.stream);
                let behind = rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory]).expect("a work");
                let error = behind.wait(None).expect_err("its library is given up for the replay").to_string();
                assert!(error.contains("in a replay of a graph: rank(s) 1 are not in this operation"), "{error}");
                rank.stream.synchronize().expect("a stream that runs out");
            }
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            drop(graph);
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn an_abort_ends_replays_of_all_ranks() {
    alone("vendor_graphs::an_abort_ends_replays_of_all_ranks", &[&[FOUR]], || {
        for is_elsewhere in [false, true] {
            world_on(&[0, 1], NCCL, |rank| {
                let memory = rank.memory(&[1.0]);
                rank.sum(&memory).expect("a sum");
                rank.stream.synchronize().expect("a stream that ends");
                let graph = summing(&rank, &memory, Some(Duration::from_secs(300)));
                if rank.me() == 0 {
                    graph.replay(&rank.stream);
                    std::thread::sleep(Duration::from_millis(250));
                }
                rank.comm.barrier().expect("a replay waits for rank 1");
                let begin = Instant::now();
                if (rank.me() == 1) == is_elsewhere {
                    rank.comm.abort("it had enough");
                }
                rank.stream.synchronize().expect("a stream that runs out");
                assert!(begin.elapsed() < Duration::from_secs(20), "it did not wait for the limit");
                drop((graph, memory));
                rank.comm.abort("the test is over");
            });
        }
    });
}

#[test]
fn what_fails_in_a_replay_is_told() {
    // The second launch of rank 1: its replay.
    let error: &[(&str, &str)] = &[FOUR, ("FAKENCCL_FAULT", "1:2:error")];
    alone("vendor_graphs::what_fails_in_a_replay_is_told", &[error], || {
        world_on(&[0, 1, 2], NCCL, |rank| {
            let memory = rank.memory(&[1.0]);
            rank.sum(&memory).expect("the first is sound");
            rank.stream.synchronize().expect("a stream that ends");
            let graph = summing(&rank, &memory, Some(Duration::from_secs(300)));
            graph.replay(&rank.stream);
            rank.stream.synchronize().expect("a stream that runs out");
            let error = rank.sum(&memory).expect_err("it goes wrong").to_string();
            assert!(error.contains("a connection was lost"), "{error}");
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            drop(graph);
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn a_graph_may_stay_when_its_communicator_goes() {
    alone("vendor_graphs::a_graph_may_stay_when_its_communicator_goes", &[&[FOUR]], || {
        let Some(software) = Software::new() else { return };
        let run = || {
            world_on(&[0, 1], NCCL, |rank| {
                let memory = rank.memory(&[1.0]);
                rank.sum(&memory).expect("a sum");
                rank.stream.synchronize().expect("a stream that ends");
                let graph = summing(&rank, &memory, None);
                graph.replay(&rank.stream);
                assert_eq!(rank.values(&memory), [4.0]);
                rank.comm.barrier().expect("all are there");
                rank.comm.shutdown().expect("an end, which waits for no graph");
                // Of one rank alone, too: nobody knows when the others replay.
                if rank.me() == 0 {
                    graph.replay(&rank.stream);
                }
                rank.stream.synchronize().expect("a replay that ends");
            });
        };
        run();
        let living = software.settled();
        run();
        wait_until("what graphs had is given back", || software.living() <= living);
    });
}

#[test]
fn messages_in_a_graph_may_stay_when_their_communicator_goes() {
    alone("vendor_graphs::messages_in_a_graph_may_stay_when_their_communicator_goes", &[&[FOUR]], || {
        let Some(software) = Software::new() else { return };
        let run = || {
            world_on(&[0, 1], NCCL, |rank| {
                let kept = meet_all(&rank);
                let ring = ring(&rank, 100, true);
                ring.replay_and_check(&rank, 1);
                rank.comm.barrier().expect("all are there");
                rank.comm.shutdown().expect("an end, which waits for no graph");
                if rank.me() == 0 {
                    (0..2).for_each(|_| ring.replay(&rank));
                }
                rank.stream.synchronize().expect("replays that end");
                drop((kept, ring));
            });
        };
        run();
        let living = software.settled();
        run();
        wait_until("what graphs had is given back", || software.living() <= living);
    });
}

#[test]
fn what_a_graph_had_is_given_back_when_it_is_gone() {
    alone("vendor_graphs::what_a_graph_had_is_given_back_when_it_is_gone", &[&[FOUR]], || {
        let Some(software) = Software::new() else { return };
        world_on(&[0, 1], NCCL, |rank| {
            let memory = rank.memory(&[1.0]);
            rank.sum(&memory).expect("a sum");
            rank.stream.synchronize().expect("a stream that ends");
            rank.comm.barrier().expect("all are there");
            let living = software.living();
            rank.comm.barrier().expect("all have looked");
            (0..10).for_each(|_| drop(summing(&rank, &memory, None)));
            rank.comm.barrier().expect("all are there");
            wait_until("what graphs had is given back", || software.living() <= living);
            rank.leave(memory);
        });
    });
}

#[test]
fn what_would_connect_ranks_in_a_capture_is_an_error_on_all() {
    alone("vendor_graphs::what_would_connect_ranks_in_a_capture_is_an_error_on_all", &[&[FOUR]], || {
        world_on(&[0, 1, 2], NCCL, |rank| {
            let memory = rank.memory(&[1.0; 3]);
            rank.sum(&memory).expect("a sum");
            rank.stream.synchronize().expect("a stream that ends");
            rank.comm.barrier().expect("all are there");
            let kind = || OpKind::AllToAll { send: Counts::equal(1, 3), recv: Counts::equal(1, 3) };
            let other = rank.memory(&[0.0; 3]);
            let call = || rank.submit(kind(), &[&memory], &[&other]).and_then(|work| work.wait(None));
            rank.comm.barrier().expect("all are there");
            begin(&rank.stream, Mode::Global);
            let error = call().expect_err("the ranks are not connected").to_string();
            end(&rank.stream).expect("the capture is as it was before");
            assert!(error.contains("call the operation once before the capture"), "{error}");
            rank.comm.barrier().expect("all are there");
            call().expect("it connects");
            rank.stream.synchronize().expect("a stream that ends");
            rank.comm.barrier().expect("all are there");
            let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || call().expect("they are connected"));
            graph.replay(&rank.stream);
            assert_eq!(rank.values(&other), [3.0; 3]);
            rank.leave((memory, other, graph));
        });
    });
}

/// Everybody's messages with everybody, so that all pairs are connected.
fn meet_all(rank: &OnDevice) -> Vec<Item> {
    let all = exchange(rank, rank.comm.size(), 0);
    assert_eq!(outcome(rank.batch(&all)), Ok(()));
    rank.stream.synchronize().expect("a stream that ends");
    rank.comm.barrier().expect("all are there");
    all
}

#[test]
fn messages_and_batches_are_replayed() {
    alone("vendor_graphs::messages_and_batches_are_replayed", &[&[FOUR], WEAK], || {
        for engine in ["nccl", "rccl"] {
            for (size, is_batch) in [(2, true), (2, false), (3, false), (4, true)] {
                world_on(&DEVICES[..size], &[("engine", engine)], |rank| {
                    let vendor = if engine == "nccl" { Vendor::Nccl } else { Vendor::Rccl };
                    let counted = || ["captured", "replayed"].map(|what| calls_of(vendor, what));
                    let mut kept = meet_all(&rank);
                    let before = counted();
                    rank.comm.barrier().expect("all have counted");
                    let ring = ring(&rank, 5003, is_batch);
                    ring.replay_and_check(&rank, 4);
                    assert!(counted().iter().zip(&before).all(|(now, before)| now > before));
                    rank.comm.barrier().expect("all are done");
                    // And outside of it they go on as they went.
                    kept.extend(meet_all(&rank));
                    rank.leave((kept, ring));
                });
            }
        }
    });
}

#[test]
fn a_first_message_in_a_capture_is_an_error_that_says_so() {
    alone("vendor_graphs::a_first_message_in_a_capture_is_an_error_that_says_so", &[&[FOUR]], || {
        world_on(&[0, 1], NCCL, |rank| {
            let item = if rank.me() == 0 { rank.sends(1, 0, 3) } else { rank.receives(0, 0, 3) };
            rank.comm.barrier().expect("all are there");
            begin(&rank.stream, Mode::ThreadLocal);
            let error = outcome(rank.one(&item)).expect_err("they are not connected").to_string();
            end(&rank.stream).expect("the capture is as it was before");
            assert!(error.contains("exchange one before the capture"), "{error}");
            rank.comm.barrier().expect("all are there");
            let kept = meet_all(&rank);
            rank.leave((item, kept));
        });
    });
}

#[test]
fn a_message_that_is_not_replayed_is_named_and_the_replay_ends() {
    alone("vendor_graphs::a_message_that_is_not_replayed_is_named_and_the_replay_ends", &[&[FOUR]], || {
        world_on(&[0, 1], NCCL, |rank| {
            let kept = meet_all(&rank);
            let item = if rank.me() == 0 { rank.sends(1, 0, 50_000) } else { rank.receives(0, 0, 50_000) };
            rank.comm.barrier().expect("all are there");
            rank.comm.set_timeout(Duration::from_millis(700));
            let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || assert_eq!(outcome(rank.one(&item)), Ok(())));
            rank.comm.set_timeout(Duration::from_secs(60));
            rank.comm.barrier().expect("all are there");
            if rank.me() == 1 {
                graph.replay(&rank.stream);
                rank.stream.synchronize().expect("a replay that ends");
                let error = outcome(rank.one(&item)).expect_err("this direction has failed").to_string();
                assert!(error.contains("in a replay of a graph: rank 0 did not send"), "{error}");
            }
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            drop(graph);
            rank.comm.abort("the test is over");
            drop((kept, item));
        });
    });
}
