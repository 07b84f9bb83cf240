//! Messages by a vendor's library, on the fake one of tests/fakenccl.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use ncclx_rs::config::NcclFields;
use ncclx_rs::sync::{Arc, Ordering};
use ncclx_rs::sys::cuda::Stream;
use ncclx_rs::sys::nccl::{NcclCall, NcclComm, Progress, UniqueId, Vendor};
use ncclx_rs::{Error, Op, Work};

use crate::graphs::wait_until;
use crate::harness::{Software, alone, calls_of_nccl, context, is_alone};
use crate::messages::{
    CELL, Item, abort_ends_what_waits, both_ways, cut_otherwise, disagree, disagree_in_a_batch, exchange, exchanges,
    outcome, ping, recv, there_and_back, to_itself,
};
use crate::ranks::{OnDevice, Process, hosts_on, of_processes, world_on};
use crate::vendor::library;

/// With cells of 16 KiB, where the engine's own streams carry messages.
const NCCL: &[(&str, &str)] = &[("engine", "nccl"), ("device_staging_bytes", "65536")];
const RCCL: &[(&str, &str)] = &[("engine", "rccl"), ("device_staging_bytes", "65536")];
const STREAMS: &[(&str, &str)] = &[("engine", "streams"), ("device_staging_bytes", "65536")];
const FOUR: (&str, &str) = ("SOFTCUDA_DEVICES", "4");
const WEAK: &[(&str, &str)] =
    &[FOUR, ("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1"), ("FAKENCCL_LAUNCH_US", "300")];
const ONE_QUEUE: &[(&str, &str)] = &[FOUR, ("SOFTCUDA_QUEUES", "1"), ("SOFTCUDA_DELAY_US", "30")];
const DEVICES: &[u32] = &[0, 1, 2, 3];
/// Two ranks of different hosts, and a third one.
const TWO_HOSTS: &[(&str, u32)] = &[("a", 0), ("b", 1), ("b", 2)];

/// Everybody's messages with everybody, so that all pairs are set up.
fn meet_all(rank: &OnDevice) -> Vec<Item> {
    let all = exchange(rank, rank.comm.size(), 0);
    assert_eq!(outcome(rank.batch(&all)), Ok(()));
    rank.comm.barrier().expect("all are there");
    all
}

/// More messages than the log has room for, most of them without data, before anybody waits.
fn many_messages(rank: OnDevice) {
    let other = 1 - rank.me();
    let empty = || (0..6).flat_map(|_| [rank.sends(other, 0, 0), rank.receives(other, 0, 0)]);
    let items: Vec<Item> = empty().chain([rank.sends(other, 0, 3), rank.receives(other, 0, 3)]).collect();
    let works: Vec<Work> = (0..200).map(|_| rank.batch(&items).expect("a work")).collect();
    works.iter().for_each(|work| work.wait(None).expect("success"));
    rank.check(&items);
    rank.leave(items);
}

#[test]
fn messages_are_right_by_each_library() {
    alone("vendor_messages::messages_are_right_by_each_library", &[&[FOUR], WEAK], || {
        for hints in [NCCL, RCCL] {
            let before = calls_of_nccl("sends");
            for what in [there_and_back, both_ways, cut_otherwise, many_messages, to_itself] {
                world_on(&DEVICES[..2], hints, what);
            }
            for size in 1..=4 {
                world_on(&DEVICES[..size], hints, |rank| {
                    let batches = exchanges(&rank, size);
                    rank.leave(batches);
                });
            }
            let sends = calls_of_nccl("sends") - before;
            assert_eq!(sends > 400, hints == NCCL, "{sends} by NCCL, with {hints:?}");
        }
    });
}

#[test]
fn streams_carry_what_no_library_is_asked_for() {
    alone("vendor_messages::streams_carry_what_no_library_is_asked_for", &[&[FOUR]], || {
        world_on(&DEVICES[..3], STREAMS, |rank| {
            let batches = exchanges(&rank, 3);
            rank.leave(batches);
        });
        assert_eq!(calls_of_nccl("sends"), 0);
    });
}

#[test]
fn a_batch_is_one_group_and_a_message_one_call() {
    alone("vendor_messages::a_batch_is_one_group_and_a_message_one_call", &[&[FOUR]], || {
        world_on(DEVICES, NCCL, |rank| {
            let (me, size) = (rank.me(), rank.comm.size());
            let mut kept = meet_all(&rank);
            let counts = || ["groups", "sends", "receives"].map(calls_of_nccl);
            let before = counts();
            rank.comm.barrier().expect("all have counted");
            let others = || (0..size).filter(|other| *other != me);
            let sends = others().map(|to| rank.sends(to, 1, 3 * CELL));
            let batch: Vec<Item> = sends.chain(others().map(|from| rank.receives(from, 1, 3 * CELL))).collect();
            assert_eq!(outcome(rank.batch(&batch)), Ok(()));
            rank.check(&batch);
            rank.comm.barrier().expect("all are done");
            let after = counts();
            // Four ranks, each with a batch of three messages to the others and three from them.
            assert_eq!([0, 1, 2].map(|at| after[at] - before[at]), [4, 12, 12]);
            rank.comm.barrier().expect("all have counted");
            kept.extend(ping(&rank, 2));
            rank.comm.barrier().expect("all are done");
            let last = counts();
            assert_eq!([0, 1, 2].map(|at| last[at] - after[at]), [4, 2, 2], "a message each way");
            rank.leave((kept, batch));
        });
    });
}

/// The receiver comes late, when the sender has begun to leave.
fn sent_last(rank: OnDevice) {
    let mut kept = ping(&rank, 0);
    if rank.me() == 0 {
        let item = rank.sends(1, 1, 100);
        assert_eq!(outcome(rank.one(&item)), Ok(()));
        rank.stream.synchronize().expect("a stream that ends");
        kept.push(item);
    } else {
        // Nothing tells when the other's end has begun. A receive that comes before that is right by an abort, too.
        let item = rank.receives(0, 1, 100);
        wait_until("the other rank leaves", || calls_of_nccl("destroys") % 4 == 2);
        assert_eq!(outcome(rank.one(&item)), Ok(()));
        kept.push(item);
        rank.check(&kept);
    }
    rank.comm.shutdown().expect("an end");
}

#[test]
fn what_is_sent_last_arrives() {
    alone("vendor_messages::what_is_sent_last_arrives", &[&[FOUR]], || {
        world_on(&DEVICES[..2], NCCL, sent_last);
        let shared = &[NCCL, &[("nccl_config", "splitShare=1")]].concat();
        world_on(&DEVICES[..2], shared, sent_last);
    });
}

/// Each sends on what it has to the next rank, in a batch, round and round.
fn round_and_round(rank: OnDevice) {
    let (me, size) = (rank.me(), rank.comm.size());
    let (next, last) = ((me + 1) % size, (me + size - 1) % size);
    let turn = |number| [rank.sends(next, number, 20 * CELL + 1), rank.receives(last, number, 20 * CELL + 1)];
    let batches: Vec<[Item; 2]> = (0..4).map(turn).collect();
    let works: Vec<Work> = batches.iter().map(|batch| rank.batch(batch).expect("a work")).collect();
    works.iter().for_each(|work| work.wait(None).expect("success"));
    batches.iter().for_each(|batch| rank.check(batch));
    rank.leave(batches);
}

#[test]
fn long_sends_cross_and_go_round_in_a_batch() {
    alone("vendor_messages::long_sends_cross_and_go_round_in_a_batch", &[&[FOUR], WEAK], || {
        for size in [2, 3, 4] {
            world_on(&DEVICES[..size], NCCL, round_and_round);
        }
    });
}

/// Messages between collectives, at the same place on each of three ranks.
fn among_collectives(rank: OnDevice) {
    let mut kept = Vec::new();
    let sum = rank.memory(&[1.0; 3000]);
    for number in 0..4 {
        kept.extend(ping(&rank, 2 * number));
        rank.sum(&sum).expect("a sum");
        let batch = exchange(&rank, 3, number);
        assert_eq!(outcome(rank.batch(&batch)), Ok(()));
        rank.check(&batch);
        kept.extend(batch);
    }
    assert_eq!(rank.values(&sum), [81.0; 3000]);
    rank.leave((kept, sum));
}

#[test]
fn messages_and_collectives_come_in_one_order() {
    alone("vendor_messages::messages_and_collectives_come_in_one_order", &[&[FOUR], WEAK], || {
        world_on(&DEVICES[..3], NCCL, among_collectives);
    });
}

#[test]
fn processes_with_one_queue_exchange_by_it() {
    const NAME: &str = "vendor_messages::processes_with_one_queue_exchange_by_it";
    if !is_alone(NAME) {
        if context().is_some() {
            of_processes(NAME, &[ONE_QUEUE; 3]);
        }
        return;
    }
    let process = Process::new(NAME);
    let exchange = |rank: OnDevice| {
        let batches = exchanges(&rank, 3);
        rank.leave(batches);
    };
    let all: [fn(OnDevice); 5] = [exchange, round_and_round, among_collectives, disagree, disagree_in_a_batch];
    for (number, what) in all.into_iter().enumerate() {
        what(process.join(&format!("group {number}"), process.rank.0, NCCL));
    }
    assert!(calls_of_nccl("sends") >= 10);
}

#[test]
fn messages_of_one_direction_keep_their_order_on_streams_in_turn() {
    let slow: &[(&str, &str)] = &[FOUR, ("SOFTCUDA_DELAY_US", "300"), ("SOFTCUDA_WEAK", "1")];
    alone("vendor_messages::messages_of_one_direction_keep_their_order_on_streams_in_turn", &[slow], || {
        world_on(&DEVICES[..2], NCCL, |rank| {
            let second = Stream::new(&rank.context, 0).expect("a stream");
            let len = |number: usize| 1 + 700 * (number % 7);
            let items: Vec<Item> = match rank.me() {
                0 => (0..20).map(|number| rank.sends(1, number, len(number))).collect(),
                _ => (0..20).map(|number| rank.receives(0, number, len(number))).collect(),
            };
            for (number, item) in items.iter().enumerate() {
                let stream = if number % 2 == 0 { &second } else { &rank.stream };
                rank.comm.submit(rank.op_of(stream, item)).expect("a work");
            }
            second.synchronize().expect("it ends");
            rank.check(&items);
            rank.leave((items, second));
        });
    });
}

#[test]
fn ends_that_call_different_messages_are_told_and_go_on() {
    alone("vendor_messages::ends_that_call_different_messages_are_told_and_go_on", &[&[FOUR], WEAK], || {
        let before = calls_of_nccl("sends");
        world_on(&DEVICES[..3], NCCL, disagree);
        world_on(&DEVICES[..3], NCCL, disagree_in_a_batch);
        assert!(calls_of_nccl("sends") > before + 20);
    });
}

/// The error of a message, the direction that fails it, and that its stream runs out.
fn failed(rank: &OnDevice, items: &[Item], limit: Duration) -> Error {
    let mut ops: Vec<Op> = items.iter().map(|item| rank.op_of(&rank.stream, item)).collect();
    ops[0].timeout = Some(limit);
    let begin = Instant::now();
    let error = outcome(rank.comm.submit_batch(&ops)).expect_err("it goes wrong");
    rank.stream.synchronize().expect("a stream that runs out");
    assert!(begin.elapsed() < Duration::from_secs(20), "it was given up");
    error
}

#[test]
fn who_does_not_receive_is_named_at_the_limit() {
    alone("vendor_messages::who_does_not_receive_is_named_at_the_limit", &[&[FOUR], WEAK], || {
        let body = |rank: OnDevice| {
            let mut kept = meet_all(&rank);
            let me = rank.me();
            if me == 0 {
                // Longer than what is on its way without its receiver.
                let item = [rank.sends(1, 1, 9 * CELL)];
                match failed(&rank, &item, Duration::from_millis(700)) {
                    Error::Timeout { operation, detail, .. } => {
                        assert_eq!(operation, "send(147456 bytes to rank 1, tag 0)");
                        assert_eq!(detail, "device message 2 from rank 0 to rank 1: rank 1 did not call it");
                    }
                    other => panic!("{other:?}"),
                }
                let again = rank.sends(1, 2, 1);
                assert!(matches!(outcome(rank.one(&again)), Err(Error::Timeout { .. })), "it ends for good");
                kept.extend(item);
                kept.push(again);
            }
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            if me == 1 {
                let late = rank.receives(0, 1, 9 * CELL);
                let outcome = outcome(rank.one(&late));
                let Err(Error::Remote { rank: 0, cause, .. }) = &outcome else { panic!("{outcome:?}") };
                assert!(cause.contains("rank 1 did not call it"), "{cause}");
                kept.push(late);
            }
            // The other direction, other ranks and collectives go on.
            let others = match me {
                0 => vec![rank.receives(1, 1, 3 * CELL), rank.sends(2, 1, 3 * CELL), rank.receives(2, 1, 3 * CELL)],
                1 => vec![rank.sends(0, 1, 3 * CELL)],
                _ => vec![rank.receives(0, 1, 3 * CELL), rank.sends(0, 1, 3 * CELL)],
            };
            assert_eq!(outcome(rank.batch(&others)), Ok(()));
            rank.check(&others);
            let sum = rank.memory(&[1.0]);
            rank.sum(&sum).expect("a sum");
            rank.leave((kept, others, sum));
        };
        world_on(&DEVICES[..3], NCCL, body);
        hosts_on(TWO_HOSTS, NCCL, body);
    });
}

#[test]
fn a_batch_names_who_does_not_come_to_all_its_ranks() {
    alone("vendor_messages::a_batch_names_who_does_not_come_to_all_its_ranks", &[&[FOUR]], || {
        world_on(&DEVICES[..3], NCCL, |rank| {
            let kept = meet_all(&rank);
            rank.comm.barrier().expect("all are there");
            let items = match rank.me() {
                // Rank 1 does its part; rank 2 never comes.
                0 => vec![rank.receives(2, 1, 3), rank.sends(1, 1, 9 * CELL), rank.receives(1, 1, 9 * CELL)],
                1 => vec![rank.receives(0, 1, 9 * CELL), rank.sends(0, 1, 9 * CELL)],
                _ => vec![],
            };
            if rank.me() == 0 {
                match failed(&rank, &items, Duration::from_secs(2)) {
                    Error::Timeout { operation, detail, .. } => {
                        assert_eq!(detail, "device message 2 from rank 2 to rank 0: rank 2 did not call it");
                        assert_eq!(operation, "recv(12 bytes from rank 2, tag 0) in a batch of 3 messages");
                    }
                    other => panic!("{other:?}"),
                }
            } else if rank.me() == 1 {
                // Its messages may have ended before the other one failed.
                match outcome(rank.batch(&items)) {
                    Ok(()) => {}
                    Err(Error::Remote { rank: 0, cause, .. }) => assert!(cause.contains("rank 2 did not"), "{cause}"),
                    other => panic!("{other:?}"),
                }
                rank.stream.synchronize().expect("a stream that runs out");
            }
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            rank.comm.abort("the test is over");
            drop((kept, items));
        });
    });
}

/// What ranks 0 and 1 get of a message that goes wrong at the first one, in a group without others.
fn faulty(check: impl Fn(usize, Error) + Sync, limit: Duration) {
    world_on(&DEVICES[..2], NCCL, |rank| {
        let item = match rank.me() {
            0 => [rank.sends(1, 0, 9 * CELL)],
            _ => [rank.receives(0, 0, 9 * CELL)],
        };
        check(rank.me(), failed(&rank, &item, limit));
        rank.comm.barrier().expect("the CPU's engine is not concerned");
        rank.comm.abort("the test is over");
        drop(item);
    });
}

#[test]
fn what_hangs_in_the_library_is_given_up_when_its_time_is_over() {
    let hang: &[(&str, &str)] = &[FOUR, ("FAKENCCL_FAULT", "1:1:hang")];
    alone("vendor_messages::what_hangs_in_the_library_is_given_up_when_its_time_is_over", &[hang], || {
        let check = |me, error| {
            let (Error::Timeout { detail: text, .. } | Error::Remote { cause: text, .. }) = &error else {
                panic!("{error:?} on rank {me}")
            };
            let named =
                |rank| format!("message 1 from rank 0 to rank 1: both ranks called it; rank {rank} did not finish");
            assert!(text.contains(&named(0)) || text.contains(&named(1)), "{text}");
        };
        faulty(check, Duration::from_secs(1));
    });
}

#[test]
fn what_fails_in_the_library_is_told_to_both_ends_soon() {
    let error: &[(&str, &str)] = &[FOUR, ("FAKENCCL_FAULT", "1:1:error")];
    alone("vendor_messages::what_fails_in_the_library_is_told_to_both_ends_soon", &[error], || {
        let check = |me, error| match &error {
            Error::Device { cause, .. } if me == 1 => assert!(cause.contains("a connection was lost"), "{cause}"),
            Error::Remote { rank: 1, cause, .. } if me == 0 => {
                assert!(cause.contains("a connection was lost"), "{cause}");
            }
            other => panic!("{other:?} on rank {me}"),
        };
        faulty(check, Duration::from_secs(100));
    });
}

#[test]
fn what_waits_for_a_rank_that_leaves_ends() {
    alone("vendor_messages::what_waits_for_a_rank_that_leaves_ends", &[&[FOUR]], || {
        let body = |rank: OnDevice| {
            let kept = meet_all(&rank);
            if rank.me() == 0 {
                rank.comm.abort("it had enough");
                return drop(kept);
            }
            let other = 3 - rank.me();
            let items =
                [rank.receives(0, 1, 9 * CELL), rank.receives(other, 1, 9 * CELL), rank.sends(other, 1, 9 * CELL)];
            let outcome = outcome(rank.batch(&items));
            let Err(Error::PeerLost { rank: 0, .. }) = &outcome else { panic!("{outcome:?}") };
            rank.stream.synchronize().expect("a stream that runs out");
            rank.comm.shutdown().expect("an end");
        };
        world_on(&DEVICES[..3], NCCL, body);
        hosts_on(TWO_HOSTS, NCCL, body);
    });
}

#[test]
fn what_is_lost_with_a_rank_that_leaves_fails_soon() {
    alone("vendor_messages::what_is_lost_with_a_rank_that_leaves_fails_soon", &[&[FOUR]], || {
        let lose = |rank: OnDevice| {
            let (kept, ends) = (meet_all(&rank), calls_of_nccl("ends"));
            let item = if rank.me() == 0 { rank.sends(1, 1, 9) } else { rank.receives(0, 1, 9) };
            let gate = (rank.me() == 1).then(|| rank.hold());
            let work = rank.one(&item).expect("a work");
            if rank.me() == 0 {
                work.wait(None).expect("it has left");
                rank.comm.barrier().expect("both have called it");
                rank.comm.abort("it had enough");
                return drop((kept, item));
            }
            rank.comm.barrier().expect("both have called it");
            wait_until("the ends of both directions", || calls_of_nccl("ends") == ends + 2);
            gate.as_ref().expect("made above").0.word(0).store(1, Ordering::Release);
            let outcome = work.wait(Some(Duration::from_secs(60)));
            let Err(Error::PeerLost { rank: 0, .. }) = &outcome else { panic!("{outcome:?}") };
            rank.stream.synchronize().expect("a stream that runs out");
            rank.comm.shutdown().expect("an end");
            drop((kept, item));
        };
        world_on(&DEVICES[..2], NCCL, lose);
        wait_until("all ends", || calls_of_nccl("ends") == 4);
        hosts_on(&[("a", 0), ("b", 1)], NCCL, lose);
    });
}

#[test]
fn an_abort_ends_what_waits_on_its_own_stream() {
    alone("vendor_messages::an_abort_ends_what_waits_on_its_own_stream", &[&[FOUR]], || {
        world_on(&DEVICES[..2], NCCL, |rank| {
            let kept = meet_all(&rank);
            abort_ends_what_waits(&rank);
            drop(kept);
        });
    });
}

#[test]
fn ranks_of_two_hosts_exchange_by_it() {
    alone("vendor_messages::ranks_of_two_hosts_exchange_by_it", &[&[FOUR], WEAK], || {
        let before = calls_of_nccl("sends");
        hosts_on(TWO_HOSTS, NCCL, |rank| {
            let batches = exchanges(&rank, 3);
            rank.leave(batches);
        });
        hosts_on(&TWO_HOSTS[..2], NCCL, many_messages);
        assert!(calls_of_nccl("sends") > before + 400);
    });
}

#[test]
fn ranks_of_two_hosts_hear_what_the_other_one_has_called() {
    alone("vendor_messages::ranks_of_two_hosts_hear_what_the_other_one_has_called", &[&[FOUR]], || {
        hosts_on(&TWO_HOSTS[..2], NCCL, |rank| {
            let mut kept = ping(&rank, 0);
            for round in 1..4 {
                let mut item = match rank.me() {
                    0 => rank.sends(1, round, 9 * CELL),
                    _ => rank.receives(0, round, 9 * CELL - 1),
                };
                if round == 2 && rank.me() == 1 {
                    item = Item { kind: recv(0, 7), ..rank.receives(0, round, 9 * CELL) };
                }
                let work = (rank.me() == 0).then(|| rank.one(&item));
                // What rank 0 has told comes before this.
                rank.comm.barrier().expect("the CPU's engine is not concerned");
                let outcome = outcome(work.unwrap_or_else(|| rank.one(&item)));
                let Err(Error::Mismatch { detail, .. }) = &outcome else { panic!("{outcome:?}") };
                assert!(detail.contains("send(147456 bytes to rank 1, tag 0)"), "{detail}");
                kept.push(item);
                kept.extend(ping(&rank, round));
            }
            rank.leave(kept);
        });
    });
}

#[test]
fn a_message_in_pieces_is_refused() {
    alone("vendor_messages::a_message_in_pieces_is_refused", &[&[FOUR]], || {
        world_on(&DEVICES[..2], NCCL, |rank| {
            let mut kept = meet_all(&rank);
            let item = rank.sends(1 - rank.me(), 1, 4);
            let memory = [&item.memory, &item.memory];
            let outcome = outcome(rank.submit(item.kind.clone(), &memory, &[]));
            let Err(Error::Usage(error)) = &outcome else { panic!("{outcome:?}") };
            assert!(error.to_string().contains("one tensor a message"), "{error}");
            kept.push(item);
            kept.extend(ping(&rank, 2));
            rank.leave(kept);
        });
    });
}

#[test]
fn what_keeps_two_ranks_from_it_is_an_error_at_both() {
    alone("vendor_messages::what_keeps_two_ranks_from_it_is_an_error_at_both", &[&[FOUR]], || {
        let refused = |rank: OnDevice, expected: &str| {
            let item = match rank.me() {
                0 => rank.sends(1, 0, 3),
                _ => rank.receives(0, 0, 3),
            };
            let error = outcome(rank.one(&item)).expect_err("no library").to_string();
            assert!(error.contains(expected), "{error}");
            rank.leave(item);
        };
        world_on(&[0, 0], NCCL, |rank| refused(rank, "engine=nccl: ranks [0, 1] use one device, which NCCL refuses"));
        let missing = &[("engine", "nccl"), ("nccl_library", "/nowhere/libnccl.so.2")];
        world_on(&DEVICES[..2], missing, |rank| refused(rank, "rank 0 has no NCCL: /nowhere/libnccl.so.2 cannot be"));
    });
}

#[test]
fn nothing_is_left_of_many_pairs() {
    alone("vendor_messages::nothing_is_left_of_many_pairs", &[&[FOUR]], || {
        let Some(software) = Software::new() else { return };
        let run = || {
            world_on(DEVICES, NCCL, |rank| {
                let kept = meet_all(&rank);
                rank.leave(kept);
            });
        };
        // What stays for the whole process is made.
        run();
        let living = software.settled();
        for _ in 0..3 {
            run();
        }
        wait_until("handles of CUDA are given back", || software.living() <= living);
    });
}

#[test]
fn the_fake_library_refuses_a_receive_of_another_length() {
    alone("vendor_messages::the_fake_library_refuses_a_receive_of_another_length", &[&[FOUR]], || {
        let library = library(Vendor::Nccl);
        let id = library.unique_id().expect("an id");
        let (fields, is_refused) = (Arc::<NcclFields>::default(), Barrier::new(2));
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let (library, fields, is_refused) = (&library, fields.clone(), &is_refused);
                scope.spawn(move || {
                    let context = context_of(rank);
                    let current = context.enter().expect("a context");
                    let comm = NcclComm::begin(library, &current, &[UniqueId(id.0)], (rank, 2), &fields).expect("one");
                    let settled = |comm: &NcclComm| loop {
                        match comm.progress() {
                            Ok(Progress::Going) => std::thread::sleep(Duration::from_millis(1)),
                            other => break other,
                        }
                    };
                    assert_eq!(settled(&comm), Ok(Progress::Done));
                    let stream = Stream::new(&context, 0).expect("a stream");
                    let memory = ncclx_rs::sys::cuda::DeviceMemory::new(&context, 8).expect("memory");
                    let call = match rank {
                        0 => NcclCall::Send { from: memory.bytes(), peer: 1 },
                        _ => NcclCall::Receive { into: memory.bytes().part(0, 4), peer: 0 },
                    };
                    NcclComm::submit_together(&current, &[(&comm, &stream, &[call])]).expect("they are put there");
                    if rank == 0 {
                        assert_eq!(settled(&comm), Ok(Progress::Done));
                        stream.synchronize().expect("it is short");
                    } else {
                        let error = loop {
                            match comm.progress() {
                                Ok(_) => std::thread::sleep(Duration::from_millis(1)),
                                Err(error) => break error.to_string(),
                            }
                        };
                        assert!(error.contains("rank 0 sends 8 bytes, rank 1 receives 4"), "{error}");
                    }
                    // An abort would drop what the other rank has not looked at.
                    is_refused.wait();
                    comm.abort();
                    stream.synchronize().expect("a stream that runs out");
                });
            }
        });
    });
}

/// The context of the device of this number.
fn context_of(device: u32) -> Arc<ncclx_rs::sys::cuda::Context> {
    let _ = context().expect("the software CUDA");
    let device = ncclx_rs::sys::cuda::Device::new(device).expect("a device");
    ncclx_rs::sys::cuda::Context::primary(device).expect("a context")
}
