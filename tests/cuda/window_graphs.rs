//! Accesses to windows in CUDA graphs: what replays move and signal, and what becomes of those that cannot go on.

use std::time::Duration;

use ncclx_rs::sys::cuda::{DeviceMemory, SharedDeviceMemory, Stream};
use ncclx_rs::{OpKind, ReduceOp, StreamHandle};

use crate::graphs::{REPLAY_LIMIT, WEAK, wait_until};
use crate::harness::{Software, alone, has_devices};
use crate::moving::{self, Moving};
use crate::ranks::{OnDevice, data, world, world_on};
use crate::recording::{Graph, Mode};
use crate::windows::{Part, exposed, get, put, signal, wait_signal};

const LEN: usize = 100;

/// Ranks hand on what they have through a window of each.
fn ring(rank: &OnDevice) -> Moving<Part> {
    let (me, size) = (rank.me(), rank.comm.size());
    let (next, last) = ((me + 1) % size, (me + size - 1) % size);
    Moving::new(rank, LEN, Part::new(rank, LEN), |part, own| {
        let access = |kind, input: &[&DeviceMemory], output: &[&DeviceMemory]| {
            let work = rank.submit(kind, input, output).expect("a work");
            work.wait(None).expect("it has ended for who captures");
        };
        access(put(part, next, 0), &[own], &[]);
        access(signal(part, next), &[], &[]);
        access(wait_signal(part, last), &[], &[]);
        access(get(part, me, 0), &[], &[own]);
        // The next replay overwrites it.
        access(signal(part, last), &[], &[]);
        access(wait_signal(part, next), &[], &[]);
    })
}

#[test]
fn every_replay_moves_on_what_the_ranks_have() {
    alone("window_graphs::every_replay_moves_on_what_the_ranks_have", &[&[], WEAK], || {
        for devices in [vec![0], vec![0; 2], vec![0, 1, 0], vec![1; 4]] {
            if !has_devices(&devices) {
                continue;
            }
            world_on(&devices, &[], |rank| {
                let ring = ring(&rank);
                ring.replay_and_check(&rank, 7);
                rank.comm.window_deregister(ring.used.id).expect("an end");
                rank.leave(ring);
            });
        }
    });
}

#[test]
fn ranks_replay_a_thousand_times_at_different_places() {
    moving::a_thousand_times("window_graphs::ranks_replay_a_thousand_times_at_different_places", ring);
}

#[test]
fn a_graph_has_a_batch_of_everything() {
    alone("window_graphs::a_graph_has_a_batch_of_everything", &[&[], WEAK], || {
        world(3, &[], |rank| {
            let (me, size) = (rank.me(), 3);
            let (part, own, sum) = (Part::new(&rank, LEN), rank.memory(&data(me, LEN)), rank.memory(&[0.0; LEN]));
            let (next, last) = ((me + 1) % size, (me + 2) % size);
            rank.comm.barrier().expect("all are there");
            let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                rank.submit(put(&part, next, 0), &[&own], &[]).expect("a put");
                rank.submit(signal(&part, next), &[], &[]).expect("a signal");
                rank.submit(OpKind::AllReduce(ReduceOp::Max), &[&own], &[&sum]).expect("a maximum");
                rank.submit(wait_signal(&part, last), &[], &[]).expect("a wait");
                rank.submit(get(&part, me, 0), &[], &[&own]).expect("a get");
                // All have read theirs before the next replay.
                rank.submit(OpKind::Barrier, &[], &[]).expect("a barrier");
            });
            for replays in 1..=20 {
                graph.replay(&rank.stream);
                // Eager accesses to the same window go on beside it, with signals of their own.
                rank.submit(signal(&part, next), &[], &[]).expect("a signal");
                rank.submit(wait_signal(&part, last), &[], &[]).expect("a wait").wait(None).expect("a signal");
                assert_eq!(rank.values(&own), data((me + 2 * replays) % size, LEN), "replay {replays}");
            }
            rank.leave((graph, part.memory, own, sum));
        });
    });
}

#[test]
fn windows_may_come_and_go_beside_a_capture() {
    alone("window_graphs::windows_may_come_and_go_beside_a_capture", &[&[]], || {
        world(2, &[], |rank| {
            let (peer, first) = (1 - rank.me(), Part::new(&rank, LEN));
            let (own, memory) = (rank.memory(&data(rank.me(), LEN)), SharedDeviceMemory::new(&rank.context, 4 * LEN));
            let memory = memory.expect("memory");
            // SAFETY: the stream lives, and nothing is put there.
            let stream = unsafe { StreamHandle::from_raw(rank.stream.to_raw(), 0) };
            assert_eq!(stream.is_captured(), Ok(false));
            rank.comm.barrier().expect("all are there");
            let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                assert_eq!(stream.is_captured(), Ok(true));
                let second = rank.comm.window_register(exposed(&rank, &memory, LEN)).expect("a window").id();
                rank.submit(put(&first, peer, 0), &[&own], &[]).expect("a put");
                rank.submit(signal(&first, peer), &[], &[]).expect("a signal");
                rank.submit(wait_signal(&first, peer), &[], &[]).expect("a wait");
                rank.comm.window_deregister(second).expect("an end");
            });
            graph.replay(&rank.stream);
            assert_eq!(first.values(&rank), data(peer, LEN));
            rank.leave((graph, first.memory, own, memory));
        });
    });
}

#[test]
fn a_signal_waits_until_the_one_before_is_taken() {
    alone("window_graphs::a_signal_waits_until_the_one_before_is_taken", &[&[]], || {
        world(2, &[], |rank| {
            let part = Part::new(&rank, 1);
            let peer = 1 - rank.me();
            rank.comm.barrier().expect("all are there");
            let limit = Some(REPLAY_LIMIT);
            let kind = if rank.me() == 0 { signal(&part, peer) } else { wait_signal(&part, peer) };
            let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                rank.submit_within(kind, &[], &[], limit).expect("a work");
            });
            rank.comm.barrier().expect("all have captured it");
            graph.replay(&rank.stream);
            rank.stream.synchronize().expect("a replay that ends");
            rank.comm.barrier().expect("the first one is taken");
            if rank.me() == 0 {
                graph.replay(&rank.stream);
                rank.stream.synchronize().expect("nobody waits for it yet");
                graph.replay(&rank.stream);
                rank.stream.synchronize().expect("a replay that ends");
                let error = rank.submit(signal(&part, 1), &[], &[]).expect_err("nothing goes on").to_string();
                let expected = "in a replay of a graph: rank 1 has not taken the signal before";
                assert!(error.contains("signal(to rank 1, window") && error.contains(expected), "{error}");
            }
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn a_signal_that_does_not_come_names_the_rank_and_the_replay_ends() {
    alone("window_graphs::a_signal_that_does_not_come_names_the_rank_and_the_replay_ends", &[&[], WEAK], || {
        world(3, &[], |rank| {
            let part = Part::new(&rank, 10);
            rank.comm.barrier().expect("all are there");
            if rank.me() == 0 {
                let limit = Some(Duration::from_millis(600));
                let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                    rank.submit_within(wait_signal(&part, 2), &[], &[], limit).expect("a work");
                });
                graph.replay(&rank.stream);
                rank.stream.synchronize().expect("a replay that ends");
                let error = rank.submit(signal(&part, 1), &[], &[]).expect_err("nothing goes on").to_string();
                assert!(error.contains("in a replay of a graph: rank 2 did not signal in a graph"), "{error}");
                // It ends again.
                graph.replay(&rank.stream);
                rank.stream.synchronize().expect("a replay that ends");
                rank.comm.barrier().expect("the CPU's engine is not concerned");
            } else {
                rank.comm.barrier().expect("the CPU's engine is not concerned");
                let error = rank.submit(signal(&part, 0), &[], &[]).and_then(|work| work.wait(None));
                let error = error.expect_err("all are told").to_string();
                assert!(error.contains("rank 2 did not signal in a graph"), "{error}");
            }
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn who_waits_outside_of_a_graph_is_told_of_a_signal_in_one() {
    alone("window_graphs::who_waits_outside_of_a_graph_is_told_of_a_signal_in_one", &[&[]], || {
        world(2, &[], |rank| {
            let part = Part::new(&rank, 10);
            rank.comm.barrier().expect("all are there");
            if rank.me() == 0 {
                let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                    rank.submit(signal(&part, 1), &[], &[]).expect("a work");
                });
                graph.replay(&rank.stream);
                rank.stream.synchronize().expect("a replay that ends");
            }
            rank.comm.barrier().expect("it has signalled");
            if rank.me() == 1 {
                let limit = Some(Duration::from_millis(300));
                let wait = rank.submit_within(wait_signal(&part, 0), &[], &[], limit).expect("a work");
                let error = wait.wait(None).expect_err("that is another signal").to_string();
                assert!(error.contains("its signal in a CUDA graph is there"), "{error}");
            }
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn a_replay_ends_when_a_rank_dies() {
    moving::until_a_rank_dies("window_graphs::a_replay_ends_when_a_rank_dies", ring, |rank, ring| {
        rank.submit(signal(&ring.used, 0), &[], &[]).expect_err("nothing goes on")
    });
}

#[test]
fn words_of_a_window_stay_those_of_the_graphs_that_access_it() {
    alone("window_graphs::words_of_a_window_stay_those_of_the_graphs_that_access_it", &[&[], WEAK], || {
        let Some(software) = Software::new() else { return };
        world(2, &[], |rank| {
            let peer = 1 - rank.me();
            let (first, own) = (Part::new(&rank, 10), rank.memory(&data(5 + rank.me(), 10)));
            rank.comm.barrier().expect("all are there");
            let living = software.living();
            rank.comm.barrier().expect("all have looked");
            // Only one of the ranks has one.
            let graph = (rank.me() == 0).then(|| {
                Graph::of(&rank.stream, Mode::ThreadLocal, || {
                    rank.submit(put(&first, peer, 0), &[&own], &[]).expect("a work");
                    rank.submit(signal(&first, peer), &[], &[]).expect("a work");
                })
            });
            rank.comm.window_deregister(first.id).expect("an end");
            let second = Part::new(&rank, 10);
            if let Some(graph) = &graph {
                graph.replay(&rank.stream);
                rank.stream.synchronize().expect("a replay that ends");
            }
            rank.comm.barrier().expect("all are there");
            let exchange = |part: &Part| {
                let ring = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                    rank.submit(put(part, peer, 0), &[&own], &[]).expect("a work");
                    rank.submit(signal(part, peer), &[], &[]).expect("a work");
                    rank.submit(wait_signal(part, peer), &[], &[]).expect("a work");
                });
                // So the other rank would read too early.
                if rank.me() == 0 {
                    std::thread::sleep(Duration::from_millis(50));
                }
                ring.replay(&rank.stream);
                assert_eq!(part.values(&rank), data(5 + peer, 10), "a signal of another window");
                (0..2).for_each(|_| ring.replay(&rank.stream));
                rank.stream.synchronize().expect("replays that end");
            };
            exchange(&second);
            rank.comm.window_deregister(second.id).expect("an end");
            drop((graph, second));
            rank.comm.barrier().expect("all are there");
            wait_until("what graphs had is given back", || software.living() <= living);
            rank.comm.barrier().expect("all have looked");
            // Of the words that are free again no signal is left.
            let third = Part::new(&rank, 10);
            exchange(&third);
            rank.comm.window_deregister(third.id).expect("an end");
            rank.leave((first, third, own));
        });
    });
}

#[test]
fn a_graph_may_stay_when_its_communicator_goes() {
    moving::without_its_communicator("window_graphs::a_graph_may_stay_when_its_communicator_goes", &[], ring);
}

#[test]
fn what_is_put_on_one_stream_of_a_capture_comes_before_a_signal_on_another() {
    alone("window_graphs::what_is_put_on_one_stream_of_a_capture_comes_before_a_signal_on_another", &[WEAK], || {
        world(2, &[], |rank| {
            let part = Part::new(&rank, LEN);
            let peer = 1 - rank.me();
            let own = rank.memory(&data(rank.me(), LEN));
            let side = Stream::new(&rank.context, 0).expect("a stream");
            rank.comm.barrier().expect("all are there");
            let graph = rank.captured_on_two(&side, || {
                rank.submit(put(&part, peer, 0), &[&own], &[]).expect("a put");
                rank.submit_on(&side, signal(&part, peer), (&[], &[]), None).expect("a signal");
                rank.submit(wait_signal(&part, peer), &[], &[]).expect("a wait");
            });
            graph.replay(&rank.stream);
            assert_eq!(part.values(&rank), data(peer, LEN));
            rank.leave((graph, part.memory, own, side));
        });
    });
}

#[test]
fn waits_on_several_streams_of_a_capture_take_a_signal_each() {
    alone("window_graphs::waits_on_several_streams_of_a_capture_take_a_signal_each", &[&[], WEAK], || {
        world(2, &[], |rank| {
            let (part, peer) = (Part::new(&rank, 1), 1 - rank.me());
            let side = Stream::new(&rank.context, 0).expect("a stream");
            rank.comm.barrier().expect("all are there");
            let graph = rank.captured_on_two(&side, || {
                for stream in [&side, &rank.stream] {
                    let kind = if rank.me() == 0 { signal(&part, peer) } else { wait_signal(&part, peer) };
                    rank.submit_on(stream, kind, (&[], &[]), None).expect("a work");
                }
            });
            (0..100).for_each(|_| graph.replay(&rank.stream));
            rank.stream.synchronize().expect("replays that end");
            rank.leave((graph, part.memory, side));
        });
    });
}
