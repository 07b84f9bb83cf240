//! Messages in CUDA graphs: what replays move, and what becomes of those that cannot go on.

use std::time::Duration;

use ncclx_rs::sys::cuda::{DeviceMemory, Stream};
use ncclx_rs::{Error, Op, OpKind, ReduceOp};

use crate::graphs::{ONE_QUEUE, REPLAY_LIMIT, WEAK};
use crate::harness::{alone, context, has_devices, is_alone};
use crate::messages::{CELL, SMALL, recv, send};
use crate::moving::{self, Moving};
use crate::ranks::{OnDevice, Process, data, of_processes, world, world_on};
use crate::recording::{Graph, Mode};
use crate::windows::{Part, put, signal, wait_signal};

/// Ranks hand on what they have in one batch, or each message for itself, the first rank's receive before its send.
pub(crate) fn ring(rank: &OnDevice, len: usize, is_batch: bool) -> Moving<DeviceMemory> {
    let (me, size) = (rank.me(), rank.comm.size());
    let (next, last) = ((me + 1) % size, (me + size - 1) % size);
    Moving::new(rank, len, rank.memory(&vec![-1.0; len]), |came, own| {
        let sends = rank.op(&rank.stream, send(next, 3), &[own], &[], None);
        let receives = rank.op(&rank.stream, recv(last, 3), &[], &[came], None);
        let batches: Vec<Vec<Op>> = match (is_batch, me) {
            (true, _) => vec![vec![sends, receives]],
            (false, 0) => vec![vec![receives], vec![sends]],
            (false, _) => vec![vec![sends], vec![receives]],
        };
        for batch in batches {
            let work = rank.comm.submit_batch(&batch).expect("a work");
            work.wait(None).expect("it has ended for who captures");
        }
        rank.copy(came, own);
    })
}

#[test]
fn every_replay_moves_on_what_the_ranks_have() {
    alone("message_graphs::every_replay_moves_on_what_the_ranks_have", &[&[], WEAK], || {
        for (devices, len) in [(vec![0], 10), (vec![0; 2], 5 * CELL + 7), (vec![0, 1, 0], 2 * CELL), (vec![1; 4], 3)] {
            if !has_devices(&devices) {
                continue;
            }
            world_on(&devices, SMALL, |rank| {
                let ring = ring(&rank, len, true);
                ring.replay_and_check(&rank, 7);
                rank.leave(ring);
            });
        }
    });
}

#[test]
fn messages_of_a_capture_need_no_batch() {
    alone("message_graphs::messages_of_a_capture_need_no_batch", &[&[], WEAK], || {
        for (size, len) in [(2, 4 * CELL + 1), (3, 0), (3, CELL)] {
            world(size, SMALL, |rank| {
                let ring = ring(&rank, len, false);
                ring.replay_and_check(&rank, 5);
                rank.leave(ring);
            });
        }
    });
}

#[test]
fn ranks_replay_a_thousand_times_at_different_places() {
    const NAME: &str = "message_graphs::ranks_replay_a_thousand_times_at_different_places";
    moving::a_thousand_times(NAME, |rank| ring(rank, 100, true));
}

/// Three collectives, a batch of messages, and a put with its signal, again and again.
fn everything(rank: &OnDevice, replays: usize) {
    const LEN: usize = 200;
    let (me, size) = (rank.me(), rank.comm.size());
    let (next, last) = ((me + 1) % size, (me + size - 1) % size);
    let (part, own, came) = (Part::new(rank, LEN), rank.memory(&data(me, LEN)), rank.memory(&[0.0; LEN]));
    let (sum, all) = (rank.memory(&[0.0; LEN]), rank.memory(&vec![0.0; LEN * size]));
    rank.comm.barrier().expect("all are there");
    let graph = Graph::of(&rank.stream, Mode::Global, || {
        rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&own], &[&sum]).expect("a sum");
        rank.submit(OpKind::AllGather, &[&own], &[&all]).expect("a gathering");
        rank.submit(put(&part, next, 0), &[&own], &[]).expect("a put");
        rank.submit(signal(&part, next), &[], &[]).expect("a signal");
        let batch = [
            rank.op(&rank.stream, send(last, 0), &[&own], &[], None),
            rank.op(&rank.stream, recv(next, 0), &[], &[&came], None),
        ];
        rank.comm.submit_batch(&batch).expect("a batch");
        rank.submit(wait_signal(&part, last), &[], &[]).expect("a wait");
        rank.copy(&came, &own);
        rank.submit(OpKind::Barrier, &[], &[]).expect("a barrier");
    });
    rank.comm.barrier().expect("all are there");
    (0..replays).for_each(|_| graph.replay(&rank.stream));
    // Before the last replay each had what that rank has at first.
    let at = |rank: usize| data((rank + replays - 1) % size, LEN);
    assert!(rank.values(&own) == data((me + replays) % size, LEN), "rank {me}");
    assert!(part.values(rank) == at(last), "what rank {last} put on rank {me}");
    assert!(rank.values(&all) == (0..size).flat_map(at).collect::<Vec<_>>(), "what rank {me} gathered");
    assert!(rank.values(&sum) == crate::ranks::total(size, LEN), "the sum on rank {me}");
    rank.comm.barrier().expect("all are there");
    rank.comm.window_deregister(part.id).expect("an end");
}

#[test]
fn a_graph_has_collectives_messages_and_accesses() {
    const NAME: &str = "message_graphs::a_graph_has_collectives_messages_and_accesses";
    if !is_alone(NAME) {
        if context().is_some() {
            of_processes(NAME, &[&[], WEAK, ONE_QUEUE]);
        }
        return;
    }
    let process = Process::new(NAME);
    let rank = process.join("everything", 0, &[]);
    everything(&rank, 1000);
    rank.leave(());
}

#[test]
fn graphs_take_turns_with_each_other_and_with_calls() {
    alone("message_graphs::graphs_take_turns_with_each_other_and_with_calls", &[&[], WEAK], || {
        world(2, SMALL, |rank| {
            let other = 1 - rank.me();
            let (first, second) = (ring(&rank, 50, true), ring(&rank, 3 * CELL, true));
            let mut kept = Vec::new();
            for replays in 1..=6 {
                first.replay(&rank);
                let eager = [rank.sends(other, replays, 2 * CELL), rank.receives(other, replays, 2 * CELL)];
                rank.batch(&eager).expect("a work");
                second.replay(&rank);
                first.check(&rank, replays);
                second.check(&rank, replays);
                rank.check(&eager);
                kept.push(eager);
            }
            rank.leave((first, second, kept));
        });
    });
}

#[test]
fn messages_of_a_capture_follow_each_other_on_whatever_streams() {
    alone("message_graphs::messages_of_a_capture_follow_each_other_on_whatever_streams", &[WEAK], || {
        world(2, SMALL, |rank| {
            let other = 1 - rank.me();
            let side = Stream::new(&rank.context, 0).expect("a stream");
            let memory: Vec<DeviceMemory> = (0..4).map(|at| rank.memory(&data(at + 9 * rank.me(), 3 * CELL))).collect();
            rank.comm.barrier().expect("all are there");
            let graph = rank.captured_on_two(&side, || {
                for (number, memory) in memory.iter().enumerate() {
                    let stream = if number % 2 == 0 { &side } else { &rank.stream };
                    let place = match rank.me() {
                        0 => (send(other, 0), (&[memory][..], &[][..])),
                        _ => (recv(other, 0), (&[][..], &[memory][..])),
                    };
                    rank.submit_on(stream, place.0, place.1, None).expect("a message");
                }
            });
            graph.replay(&rank.stream);
            graph.replay(&rank.stream);
            for (number, memory) in memory.iter().enumerate() {
                assert!(rank.values(memory) == data(number, 3 * CELL), "message {number}");
            }
            rank.leave((graph, memory, side));
        });
    });
}

#[test]
fn ends_that_disagree_are_told_and_go_on() {
    alone("message_graphs::ends_that_disagree_are_told_and_go_on", &[&[]], || {
        world(2, SMALL, |rank| {
            let ring = ring(&rank, 10, true);
            let memory = rank.memory(&[1.0]);
            if rank.me() == 0 {
                let spoilt = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                    rank.submit(send(1, 0), &[&memory], &[]).expect("it is the first to call");
                });
                rank.comm.barrier().expect("all are there");
                drop(spoilt);
            } else {
                rank.comm.barrier().expect("all are there");
                let error = rank.submit(recv(0, 0), &[], &[&memory]).expect_err("it is not captured");
                assert!(matches!(error, Error::Mismatch { .. }), "{error}");
                let text = error.to_string();
                assert!(
                    text.contains("rank 1 called recv(4 bytes from rank 0, tag 0), rank 0 called send(4 bytes to rank 1, tag 0) in a graph's capture"),
                    "{text}"
                );
            }
            // What rank 0 called before that would fail with it.
            rank.comm.barrier().expect("rank 1 has been told");
            let (to, from) = (1 - rank.me(), 1 - rank.me());
            let eager = [rank.sends(to, 7, 10), rank.receives(from, 7, 10)];
            rank.batch(&eager).expect("they begin anew").wait(None).expect("success");
            rank.check(&eager);
            ring.replay(&rank);
            ring.check(&rank, 1);
            rank.leave((ring, eager, memory));
        });
    });
}

#[test]
fn ends_that_cut_messages_into_calls_otherwise_are_told() {
    alone("message_graphs::ends_that_cut_messages_into_calls_otherwise_are_told", &[&[]], || {
        world(2, SMALL, |rank| {
            let (me, ring) = (rank.me(), ring(&rank, 10, true));
            let memory = [(); 2].map(|()| rank.memory(&[1.0]));
            let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                if me == 0 {
                    let batch = memory.each_ref().map(|memory| rank.op(&rank.stream, send(1, 0), &[memory], &[], None));
                    rank.comm.submit_batch(&batch).expect("it is the first to call");
                    rank.comm.barrier().expect("all are there");
                } else {
                    rank.comm.barrier().expect("all are there");
                    let error = rank.submit(recv(0, 0), &[], &[&memory[0]]).expect_err("rank 0 has a batch");
                    let text = error.to_string();
                    assert!(
                        matches!(error, Error::Mismatch { .. })
                            && text.contains("in a graph's capture, as message 1 of 2 of a batch"),
                        "{text}"
                    );
                }
            });
            ring.replay(&rank);
            ring.check(&rank, 1);
            rank.leave((ring, graph, memory));
        });
    });
}

#[test]
fn a_call_outside_of_a_capture_is_found_before_the_ends_set_up() {
    alone("message_graphs::a_call_outside_of_a_capture_is_found_before_the_ends_set_up", &[&[]], || {
        world(2, SMALL, |rank| {
            let other = 1 - rank.me();
            let first = [rank.sends(other, 1, 10), rank.receives(other, 1, 10)];
            rank.batch(&first).expect("a batch").wait(None).expect("success");
            let memory = rank.memory(&[1.0]);
            let error = if rank.me() == 0 {
                rank.comm.barrier().expect("all are there");
                let mut error = None;
                let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                    error = rank.submit(send(1, 0), &[&memory], &[]).err();
                });
                drop(graph);
                error
            } else {
                let work = rank.submit(recv(0, 0), &[], &[&memory]).expect("it is the first to call");
                rank.comm.barrier().expect("all are there");
                work.wait(None).err()
            };
            assert!(matches!(error, Some(Error::Mismatch { .. })), "{error:?}");
            let last = [rank.sends(other, 2, 10), rank.receives(other, 2, 10)];
            rank.batch(&last).expect("they begin anew").wait(None).expect("success");
            rank.check(&last);
            rank.leave((first, last, memory));
        });
    });
}

#[test]
fn who_gets_messages_of_a_graph_that_cannot_go_on_is_told() {
    alone("message_graphs::who_gets_messages_of_a_graph_that_cannot_go_on_is_told", &[&[], WEAK], || {
        world(3, SMALL, |rank| {
            let (me, memory, limit) = (rank.me(), rank.memory(&[1.0; 10]), Some(Duration::from_millis(600)));
            let came = rank.memory(&[0.0; 10]);
            let all = [1, 2].map(|step| ((me + step) % 3, (me + 3 - step) % 3));
            // To free memory waits for the device, which may wait for this rank: so it stays.
            let first = all.map(|(to, from)| [rank.sends(to, 1, 1), rank.receives(from, 1, 1)]);
            for batch in &first {
                rank.batch(batch).expect("a batch").wait(None).expect("success");
            }
            rank.comm.barrier().expect("all are there");
            let op = |kind, input: &[&DeviceMemory], output: &[&DeviceMemory]| {
                rank.op(&rank.stream, kind, input, output, limit)
            };
            // Rank 2 hands on to rank 0 what comes from rank 1, which never replays it.
            let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                let batch = match me {
                    0 => vec![op(recv(2, 0), &[], &[&came])],
                    1 => vec![op(send(2, 0), &[&memory], &[])],
                    _ => vec![op(recv(1, 0), &[], &[&came]), op(send(0, 0), &[&memory], &[])],
                };
                rank.comm.submit_batch(&batch).expect("a work");
            });
            rank.comm.barrier().expect("all have captured it");
            if me == 2 {
                graph.replay(&rank.stream);
                rank.stream.synchronize().expect("a replay that ends");
            }
            rank.comm.barrier().expect("rank 2 has given up");
            if me == 0 {
                let error = rank.one(&rank.receives(2, 0, 1)).and_then(|work| work.wait(None));
                let text = error.expect_err("rank 2 has no right messages any more").to_string();
                assert!(text.contains("in a replay of a graph: rank 1 did not send"), "{text}");
            }
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn what_a_rank_sends_itself_in_a_graph_it_receives_in_the_same_batch() {
    alone("message_graphs::what_a_rank_sends_itself_in_a_graph_it_receives_in_the_same_batch", &[&[]], || {
        world(1, &[], |rank| {
            let memory = rank.memory(&[1.0]);
            let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                let error = rank.submit(send(0, 0), &[&memory], &[]).expect_err("nothing receives it").to_string();
                assert!(error.contains("it must receive in the same batch"), "{error}");
            });
            rank.leave((graph, memory));
        });
    });
}

#[test]
fn who_captures_no_first_message_is_named() {
    alone("message_graphs::who_captures_no_first_message_is_named", &[&[]], || {
        world(2, &[], |rank| {
            let memory = rank.memory(&[1.0]);
            let other = 1 - rank.me();
            let eager = [rank.sends(other, 1, 10), rank.receives(other, 1, 10)];
            rank.batch(&eager).expect("a batch").wait(None).expect("success");
            rank.comm.barrier().expect("all are there");
            if rank.me() == 0 {
                let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                    let limit = Some(Duration::from_millis(300));
                    let error = rank.submit_within(send(1, 0), &[&memory], &[], limit).expect_err("rank 1 does not");
                    let text = error.to_string();
                    assert!(
                        text.contains("rank 1 has not called its first message with rank 0 in the capture of a graph"),
                        "{text}"
                    );
                });
                drop(graph);
            }
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn a_rank_that_does_not_replay_is_named_and_the_replay_ends() {
    alone("message_graphs::a_rank_that_does_not_replay_is_named_and_the_replay_ends", &[&[], WEAK], || {
        for sender in [0, 1] {
            world(2, SMALL, |rank| {
                let memory = rank.memory(&data(sender, 10));
                let eager =
                    if rank.me() == sender { rank.sends(1 - sender, 0, 1) } else { rank.receives(sender, 0, 1) };
                rank.one(&eager).expect("the setup takes longer");
                rank.comm.barrier().expect("all are there");
                let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                    let limit = Some(REPLAY_LIMIT);
                    let work = match rank.me() == sender {
                        true => rank.submit_within(send(1 - sender, 0), &[&memory], &[], limit),
                        false => rank.submit_within(recv(sender, 0), &[], &[&memory], limit),
                    };
                    work.expect("a work");
                });
                rank.comm.barrier().expect("all have captured it");
                graph.replay(&rank.stream);
                assert!(rank.values(&memory) == data(sender, 10));
                rank.comm.barrier().expect("all have replayed it once");
                if rank.me() == 0 {
                    // A sender's next message needs no receiver, the one after it does.
                    (0..3).for_each(|_| graph.replay(&rank.stream));
                    rank.stream.synchronize().expect("replays that end");
                    let eager = if sender == 0 { rank.sends(1, 0, 1) } else { rank.receives(1, 0, 1) };
                    let error = rank.one(&eager).expect_err("nothing goes on").to_string();
                    let what = if sender == 0 { "has not received what was sent before" } else { "did not send" };
                    assert!(error.contains(&format!("in a replay of a graph: rank 1 {what}")), "{error}");
                }
                rank.comm.barrier().expect("the CPU's engine is not concerned");
                rank.comm.abort("the test is over");
            });
        }
    });
}

#[test]
fn a_replay_ends_when_a_rank_dies() {
    let ring = |rank: &OnDevice| ring(rank, 1000, true);
    moving::until_a_rank_dies("message_graphs::a_replay_ends_when_a_rank_dies", ring, |rank, _| {
        let eager = [rank.sends((rank.me() + 1) % 3, 0, 1), rank.receives((rank.me() + 2) % 3, 0, 1)];
        rank.batch(&eager).expect_err("nothing goes on")
    });
}

#[test]
fn a_graph_may_stay_when_its_communicator_goes() {
    let ring = |rank: &OnDevice| ring(rank, 100, true);
    moving::without_its_communicator("message_graphs::a_graph_may_stay_when_its_communicator_goes", SMALL, ring);
}
