//! Sends, receives and batches of communicators on device memory.

use std::time::Duration;

use ncclx_rs::sys::cuda::{DeviceMemory, Stream};
use ncclx_rs::{Error, Op, OpKind, Rank, ReduceOp, Source, Tag, Work};

use crate::graphs::wait_until;
use crate::harness::{alone, is_alone};
use crate::ranks::{OnDevice, Process, of_processes, world, world_on};

/// Cells of 16 KiB.
pub(crate) const SMALL: &[(&str, &str)] = &[("device_staging_bytes", "65536")];

/// The elements of a cell.
pub(crate) const CELL: usize = 4096;

/// Settings under which what is missing shows.
const WEAK: &[(&str, &str)] = &[("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_GAP_US", "10"), ("SOFTCUDA_WEAK", "1")];
const ONE_QUEUE: &[(&str, &str)] = &[("SOFTCUDA_QUEUES", "1"), ("SOFTCUDA_DELAY_US", "30"), ("SOFTCUDA_WEAK", "1")];

pub(crate) fn send(to: usize, tag: u32) -> OpKind {
    OpKind::Send { to: Rank::from(to), tag: Tag(tag) }
}

pub(crate) fn recv(from: usize, tag: u32) -> OpKind {
    OpKind::Recv { from: Source::Rank(Rank::from(from)), tag: Tag(tag) }
}

/// What only this message has.
fn data(from: usize, to: usize, number: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| ((from * 4001 + to * 613 + number * 127 + at * 7) % 65_521) as f32).collect()
}

/// A message of a batch, with its memory.
pub(crate) struct Item {
    pub(crate) kind: OpKind,
    pub(crate) memory: DeviceMemory,
    /// What is received.
    pub(crate) expected: Option<Vec<f32>>,
}

impl OnDevice {
    pub(crate) fn sends(&self, to: usize, number: usize, len: usize) -> Item {
        let memory = self.memory(&data(self.me(), to, number, len));
        Item { kind: send(to, 0), memory, expected: None }
    }

    pub(crate) fn receives(&self, from: usize, number: usize, len: usize) -> Item {
        let expected = Some(data(from, self.me(), number, len));
        Item { kind: recv(from, 0), memory: self.memory(&vec![-1.0; len]), expected }
    }

    pub(crate) fn op_of(&self, stream: &Stream, item: &Item) -> Op {
        let memory = [&item.memory];
        let (inputs, outputs) = if item.expected.is_some() { (&[][..], &memory[..]) } else { (&memory[..], &[][..]) };
        self.op(stream, item.kind.clone(), inputs, outputs, None)
    }

    pub(crate) fn batch(&self, items: &[Item]) -> Result<Work, Error> {
        let ops: Vec<Op> = items.iter().map(|item| self.op_of(&self.stream, item)).collect();
        self.comm.submit_batch(&ops)
    }

    pub(crate) fn one(&self, item: &Item) -> Result<Work, Error> {
        self.comm.submit(self.op_of(&self.stream, item))
    }

    /// Asserts that everything has come.
    pub(crate) fn check(&self, items: &[Item]) {
        for (number, item) in items.iter().enumerate() {
            if let Some(expected) = &item.expected {
                assert!(&self.values(&item.memory) == expected, "message {number} of rank {}", self.me());
            }
        }
    }
}

pub(crate) fn there_and_back(rank: OnDevice) {
    let (me, mut kept) = (rank.me(), Vec::new());
    for (round, len) in [1, 0, 3, CELL, 2 * CELL, 5 * CELL + 7, 1].into_iter().enumerate() {
        let (to, back) = match me {
            0 => (rank.sends(1, round, len), rank.receives(1, round + 100, len)),
            _ => (rank.receives(0, round, len), rank.sends(0, round + 100, len)),
        };
        for item in [&to, &back] {
            rank.one(item).expect("a work").wait(None).expect("success");
        }
        kept.extend([to, back]);
    }
    rank.check(&kept);
    rank.leave(kept);
}

#[test]
fn a_message_comes_back_as_it_went() {
    let settings = [&[][..], WEAK];
    alone("messages::a_message_comes_back_as_it_went", &settings, || {
        world(2, SMALL, there_and_back);
    });
}

pub(crate) fn both_ways(rank: OnDevice) {
    let other = 1 - rank.me();
    let batch = |number| [rank.sends(other, number, 30 * CELL + 5), rank.receives(other, number, 30 * CELL + 5)];
    let batches: Vec<[Item; 2]> = (0..3).map(batch).collect();
    let works: Vec<Work> = batches.iter().map(|batch| rank.batch(batch).expect("a work")).collect();
    works.iter().for_each(|work| work.wait(None).expect("success"));
    batches.iter().for_each(|batch| rank.check(batch));
    rank.leave(batches);
}

#[test]
fn long_messages_go_both_ways_in_one_batch() {
    let settings = [&[][..], WEAK];
    alone("messages::long_messages_go_both_ways_in_one_batch", &settings, || {
        world(2, SMALL, both_ways);
    });
}

/// Every rank to every rank, itself too: without data, short, one cell, and several.
pub(crate) fn exchange(rank: &OnDevice, size: usize, number: usize) -> Vec<Item> {
    let len = |from: usize, to: usize| match (from * 3 + to * 5 + number) % 4 {
        0 => 0,
        1 => 7,
        more => more * CELL + from,
    };
    let me = rank.me();
    let sends = (0..size).map(|to| rank.sends(to, number, len(me, to)));
    sends.chain((0..size).map(|from| rank.receives(from, number, len(from, me)))).collect()
}

pub(crate) fn exchanges(rank: &OnDevice, size: usize) -> Vec<Vec<Item>> {
    let batches: Vec<Vec<Item>> = (0..3).map(|number| exchange(rank, size, number)).collect();
    let works: Vec<Work> = batches.iter().map(|batch| rank.batch(batch).expect("a work")).collect();
    works.iter().for_each(|work| work.wait(None).expect("success"));
    batches.iter().for_each(|batch| rank.check(batch));
    batches
}

#[test]
fn all_ranks_exchange_with_all_in_a_batch() {
    let settings = [&[][..], WEAK];
    alone("messages::all_ranks_exchange_with_all_in_a_batch", &settings, || {
        for size in [1, 2, 3, 5, 8] {
            world(size, SMALL, |rank| {
                let batches = exchanges(&rank, size);
                rank.leave(batches);
            });
        }
    });
}

#[test]
fn ranks_on_several_devices_exchange_with_all_in_a_batch() {
    let several: &[(&str, &str)] = &[("SOFTCUDA_DEVICES", "3"), ("SOFTCUDA_DELAY_US", "30")];
    let apart: &[(&str, &str)] = &[("SOFTCUDA_DEVICES", "3"), ("SOFTCUDA_PEERS", "0")];
    alone("messages::ranks_on_several_devices_exchange_with_all_in_a_batch", &[several, apart], || {
        world_on(&[0, 1, 2, 0], SMALL, |rank| {
            let batches = exchanges(&rank, 4);
            rank.leave(batches);
        });
    });
}

/// What two ranks do, and what three do, each in a communicator of its own.
const OF_TWO: &[fn(OnDevice)] = &[there_and_back, both_ways, cut_otherwise, many_messages, to_itself];
const OF_THREE: &[fn(OnDevice)] = &[disagree, disagree_in_a_batch];

/// Runs everything on ranks that are processes, of which each has a single queue for all that it does, or few.
fn as_processes(test: &str, size: usize, all: &[fn(OnDevice)]) {
    if is_alone(test) {
        let process = Process::new(test);
        for (number, what) in all.iter().enumerate() {
            what(process.join(&format!("group {number}"), 0, SMALL));
        }
    } else if crate::harness::context().is_some() {
        let two: &[(&str, &str)] = &[("SOFTCUDA_QUEUES", "2"), ("SOFTCUDA_DELAY_US", "30")];
        of_processes(test, &vec![ONE_QUEUE; size]);
        of_processes(test, &[ONE_QUEUE, two, WEAK, &[]][..size]);
    }
}

#[test]
fn messages_of_two_processes_with_one_queue_are_right() {
    as_processes("messages::messages_of_two_processes_with_one_queue_are_right", 2, OF_TWO);
}

#[test]
fn processes_with_one_queue_that_disagree_go_on() {
    as_processes("messages::processes_with_one_queue_that_disagree_go_on", 3, OF_THREE);
}

#[test]
fn processes_with_one_queue_exchange_with_all_in_a_batch() {
    let exchange = |rank: OnDevice| {
        let batches = exchanges(&rank, 4);
        rank.leave(batches);
    };
    as_processes("messages::processes_with_one_queue_exchange_with_all_in_a_batch", 4, &[exchange]);
}

pub(crate) fn cut_otherwise(rank: OnDevice) {
    let items: Vec<Item> = match rank.me() {
        0 => (0..5).map(|number| rank.sends(1, number, 100 * number)).collect(),
        _ => (0..5).map(|number| rank.receives(0, number, 100 * number)).collect(),
    };
    let cuts: &[usize] = if rank.me() == 0 { &[2, 3] } else { &[1, 1, 3] };
    let (mut rest, mut works) = (&items[..], Vec::new());
    for cut in cuts {
        let (batch, after) = rest.split_at(*cut);
        works.push(rank.batch(batch).expect("a work"));
        rest = after;
    }
    works.iter().for_each(|work| work.wait(None).expect("success"));
    rank.check(&items);
    rank.leave(items);
}

#[test]
fn messages_of_both_ends_meet_whatever_their_batches() {
    let settings = [&[][..], WEAK];
    alone("messages::messages_of_both_ends_meet_whatever_their_batches", &settings, || {
        world(2, SMALL, cut_otherwise);
    });
}

#[test]
fn a_receive_that_is_posted_first_holds_up_no_other_stream() {
    alone("messages::a_receive_that_is_posted_first_holds_up_no_other_stream", &[&[], WEAK], || {
        world(3, SMALL, |rank| {
            let second = Stream::new(&rank.context, 0).expect("a stream");
            let items = match rank.me() {
                0 => vec![rank.receives(1, 0, 9 * CELL), rank.receives(2, 0, 9 * CELL), rank.sends(1, 0, 3)],
                1 => vec![rank.receives(0, 0, 3), rank.sends(0, 0, 9 * CELL)],
                _ => vec![rank.sends(0, 0, 9 * CELL)],
            };
            // All pairs are set up before.
            let all = exchange(&rank, 3, 0);
            rank.batch(&all).expect("a work").wait(None).expect("success");
            let works: Vec<Work> = items
                .iter()
                .enumerate()
                .map(|(number, item)| {
                    let stream = if (rank.me(), number) == (0, 0) { &second } else { &rank.stream };
                    let work = rank.comm.submit(rank.op_of(stream, item)).expect("a work");
                    if rank.me() == 1 {
                        work.wait(None).expect("success");
                    }
                    work
                })
                .collect();
            works.iter().for_each(|work| work.wait(None).expect("success"));
            second.synchronize().expect("it has ended");
            rank.check(&items);
            rank.leave((items, all, second));
        });
    });
}

#[test]
fn messages_of_one_direction_keep_their_order_on_streams_in_turn() {
    let slow: &[(&str, &str)] = &[("SOFTCUDA_DELAY_US", "300"), ("SOFTCUDA_WEAK", "1")];
    alone("messages::messages_of_one_direction_keep_their_order_on_streams_in_turn", &[slow, slow, slow], || {
        world(2, SMALL, |rank| {
            let second = Stream::new(&rank.context, 0).expect("a stream");
            let items: Vec<Item> = match rank.me() {
                0 => (0..40).map(|number| rank.sends(1, number, 1 + 700 * (number % 7))).collect(),
                _ => (0..40).map(|number| rank.receives(0, number, 1 + 700 * (number % 7))).collect(),
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

/// What a rank's work, or the call itself, ends with.
pub(crate) fn outcome(work: Result<Work, Error>) -> Result<(), Error> {
    work.and_then(|work| work.wait(None))
}

/// A message each way between ranks 0 and 1, in calls of their own.
pub(crate) fn ping(rank: &OnDevice, number: usize) -> Vec<Item> {
    let items = match rank.me() {
        0 => vec![rank.sends(1, number, 3 * CELL), rank.receives(1, number, 10)],
        1 => vec![rank.receives(0, number, 3 * CELL), rank.sends(0, number, 10)],
        _ => vec![],
    };
    items.iter().for_each(|item| assert_eq!(outcome(rank.one(item)), Ok(())));
    rank.check(&items);
    items
}

pub(crate) fn disagree(rank: OnDevice) {
    let mut kept = ping(&rank, 0);
    for round in 1..4 {
        // Longer than what ends without its receiver, so that both ends are told.
        let long = 5 * CELL;
        let mut item = match rank.me() {
            0 => rank.sends(1, round, long),
            1 => rank.receives(0, round, if round == 2 { long } else { long - 1 }),
            _ => rank.receives(2, round, 1),
        };
        if rank.me() == 2 {
            let items = [rank.sends(2, round, 1), item];
            assert_eq!(outcome(rank.batch(&items)), Ok(()), "it is not concerned");
            kept.extend(items);
        } else {
            if (rank.me(), round) == (1, 2) {
                item.kind = recv(0, 7);
            }
            let outcome = outcome(rank.one(&item));
            let Err(Error::Mismatch { detail, .. }) = &outcome else { panic!("{outcome:?}") };
            let theirs = if round == 2 {
                "recv(81920 bytes from rank 0, tag 7)"
            } else {
                "recv(81916 bytes from rank 0, tag 0)"
            };
            let is_named = detail.contains("send(81920 bytes to rank 1, tag 0)") && detail.contains(theirs);
            assert!(is_named && detail.contains("from rank 0 to rank 1"), "{detail}");
            kept.push(item);
        }
        kept.extend(ping(&rank, round));
        let sum = rank.memory(&[1.0]);
        assert_eq!(rank.sum(&sum), Ok(()), "the group goes on");
        kept.push(Item { kind: OpKind::Barrier, memory: sum, expected: Some(vec![3.0]) });
    }
    rank.leave(kept);
}

#[test]
fn ends_that_call_different_messages_are_told_and_go_on() {
    let settings = [&[][..], WEAK];
    alone("messages::ends_that_call_different_messages_are_told_and_go_on", &settings, || {
        world(3, SMALL, disagree);
    });
}

pub(crate) fn disagree_in_a_batch(rank: OnDevice) {
    let mut kept = Vec::new();
    for number in 0..3 {
        let good = exchange(&rank, 3, 2 * number);
        assert_eq!(outcome(rank.batch(&good)), Ok(()));
        rank.check(&good);
        let me = rank.me();
        let long = |from: usize, to: usize| if (from, to, me) == (0, 1, 1) { 5 * CELL - 1 } else { 5 * CELL };
        let sends = (0..3).filter(|to| *to != me).map(|to| rank.sends(to, number, long(me, to)));
        let receives = (0..3).filter(|from| *from != me).map(|from| rank.receives(from, number, long(from, me)));
        let bad: Vec<Item> = sends.chain(receives).collect();
        let outcome = outcome(rank.batch(&bad));
        let Err(Error::Mismatch { detail, .. }) = &outcome else { panic!("rank {me}: {outcome:?}") };
        assert!(detail.contains("from rank 0 to rank 1"), "{detail}");
        kept.push(good);
        kept.push(bad);
    }
    rank.stream.synchronize().expect("a stream that runs out");
    rank.leave(kept);
}

#[test]
fn a_batch_fails_as_a_whole_and_its_ranks_go_on() {
    let settings = [&[][..], WEAK];
    alone("messages::a_batch_fails_as_a_whole_and_its_ranks_go_on", &settings, || {
        world(3, SMALL, disagree_in_a_batch);
    });
}

#[test]
fn a_peer_that_does_not_come_is_named_and_the_stream_runs_out() {
    alone("messages::a_peer_that_does_not_come_is_named_and_the_stream_runs_out", &[&[], WEAK], || {
        world(3, SMALL, |rank| {
            let all = exchange(&rank, 3, 0);
            assert_eq!(outcome(rank.batch(&all)), Ok(()));
            let limit = Some(Duration::from_secs(2));
            let me = rank.me();
            rank.comm.barrier().expect("all are there");
            let mut items = match me {
                // Rank 1 does its part; rank 2 never comes.
                0 => vec![rank.receives(1, 1, 3 * CELL), rank.sends(1, 1, 1), rank.receives(2, 1, 3 * CELL)],
                1 => vec![rank.sends(0, 1, 3 * CELL), rank.receives(0, 1, 1)],
                _ => vec![],
            };
            if me == 0 {
                let mut ops: Vec<Op> = items.iter().map(|item| rank.op_of(&rank.stream, item)).collect();
                ops[0].timeout = limit;
                let outcome = outcome(rank.comm.submit_batch(&ops));
                let Err(Error::Timeout { detail, operation, .. }) = &outcome else { panic!("{outcome:?}") };
                assert_eq!(detail, "device message 2 from rank 2 to rank 0: rank 2 did not call it");
                assert_eq!(operation, "recv(49152 bytes from rank 2, tag 0) in a batch of 3 messages");
            } else if me == 1 {
                // Its messages may have ended before the other one failed.
                match outcome(rank.batch(&items)) {
                    Ok(()) => {}
                    Err(Error::Remote { rank: 0, cause, .. }) => assert!(cause.contains("rank 2 did not"), "{cause}"),
                    other => panic!("{other:?}"),
                }
            }
            rank.stream.synchronize().expect("a stream that runs out");
            // What had failed comes back.
            if me == 0 {
                let again = rank.receives(2, 2, 1);
                let outcome = outcome(rank.one(&again));
                assert!(matches!(&outcome, Err(Error::Timeout { .. })), "{outcome:?}");
                items.push(again);
            }
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            rank.comm.abort("the test is over");
            drop((all, items));
        });
    });
}

#[test]
fn a_first_message_that_its_peer_does_not_call_names_the_peer_at_both_ends() {
    alone("messages::a_first_message_that_its_peer_does_not_call_names_the_peer_at_both_ends", &[&[]], || {
        world(3, SMALL, |rank| {
            let me = rank.me();
            let item = if me == 0 { rank.sends(1, 0, 5) } else { rank.receives(0, 0, 5) };
            let mut op = rank.op_of(&rank.stream, &item);
            op.timeout = Some(Duration::from_millis(200));
            if me == 0 {
                let outcome = outcome(rank.comm.submit(op));
                let Err(Error::Timeout { detail, .. }) = &outcome else { panic!("{outcome:?}") };
                assert!(detail.contains("rank 1 has not called its first message with rank 0"), "{detail}");
                rank.comm.barrier().expect("the CPU's engine is not concerned");
            } else {
                rank.comm.barrier().expect("the CPU's engine is not concerned");
                if me == 1 {
                    let outcome = outcome(rank.one(&item));
                    let Err(error) = &outcome else { panic!("{outcome:?}") };
                    assert!(error.to_string().contains("CUDA on rank 0"), "{error}");
                }
            }
            // Other pairs and the group go on.
            let other = match me {
                0 => rank.sends(2, 0, 9 * CELL),
                1 => rank.receives(1, 0, 3),
                _ => rank.receives(0, 0, 9 * CELL),
            };
            let mut all = vec![other];
            if me == 1 {
                all.push(rank.sends(1, 0, 3));
            }
            assert_eq!(outcome(rank.batch(&all)), Ok(()));
            rank.check(&all);
            let sum = rank.memory(&[1.0]);
            assert_eq!(rank.sum(&sum), Ok(()));
            rank.leave((all, item, sum));
        });
    });
}

#[test]
fn what_waits_for_a_peer_that_leaves_ends() {
    alone("messages::what_waits_for_a_peer_that_leaves_ends", &[&[], WEAK], || {
        world(3, SMALL, |rank| {
            let all = exchange(&rank, 3, 0);
            assert_eq!(outcome(rank.batch(&all)), Ok(()));
            if rank.me() == 0 {
                rank.comm.abort("it had enough");
                return drop(all);
            }
            let other = 3 - rank.me();
            let items =
                [rank.receives(0, 1, 9 * CELL), rank.receives(other, 1, 9 * CELL), rank.sends(other, 1, 9 * CELL)];
            let outcome = outcome(rank.batch(&items));
            let Err(Error::PeerLost { rank: 0, .. }) = &outcome else { panic!("{outcome:?}") };
            rank.stream.synchronize().expect("a stream that runs out");
            rank.comm.shutdown().expect("an end");
        });
    });
}

/// Rank 0 aborts while its batch with rank 1 waits: both learn why, and their streams run out.
pub(crate) fn abort_ends_what_waits(rank: &OnDevice) {
    if rank.me() == 0 {
        let items = [rank.receives(1, 1, 9 * CELL), rank.sends(1, 1, 9 * CELL)];
        let work = rank.batch(&items).expect("a work");
        rank.comm.barrier().expect("both are there");
        rank.comm.abort("it had enough");
        let outcome = work.wait(None);
        assert!(matches!(&outcome, Err(Error::Closed { how, .. }) if how.contains("enough")), "{outcome:?}");
        rank.stream.synchronize().expect("a stream that runs out");
    } else {
        rank.comm.barrier().expect("both are there");
        let item = rank.sends(0, 1, 9 * CELL);
        let outcome = outcome(rank.one(&item));
        assert!(matches!(&outcome, Err(Error::PeerLost { rank: 0, .. })), "{outcome:?}");
        rank.stream.synchronize().expect("a stream that runs out");
        rank.comm.shutdown().expect("an end");
    }
}

#[test]
fn an_abort_ends_what_waits_on_its_own_stream() {
    alone("messages::an_abort_ends_what_waits_on_its_own_stream", &[&[], WEAK], || {
        world(2, SMALL, |rank| {
            let all = exchange(&rank, 2, 0);
            assert_eq!(outcome(rank.batch(&all)), Ok(()));
            abort_ends_what_waits(&rank);
        });
    });
}

#[test]
fn what_a_rank_sends_before_it_leaves_arrives() {
    alone("messages::what_a_rank_sends_before_it_leaves_arrives", &[&[], WEAK], || {
        world(2, SMALL, |rank| {
            let begin = ping(&rank, 0);
            if rank.me() == 0 {
                let items = [rank.sends(1, 1, 5), rank.sends(1, 2, CELL)];
                items.iter().for_each(|item| assert_eq!(outcome(rank.one(item)), Ok(())));
                rank.stream.synchronize().expect("an end");
                rank.comm.barrier().expect("both are there");
                rank.comm.shutdown().expect("an end");
            } else {
                rank.comm.barrier().expect("both are there");
                let items = [rank.receives(0, 1, 5), rank.receives(0, 2, CELL)];
                for item in &items {
                    // The other rank leaves meanwhile, or has left.
                    assert_eq!(outcome(rank.one(item)), Ok(()));
                }
                rank.check(&items);
                rank.comm.shutdown().expect("an end");
            }
            drop(begin);
        });
    });
}

#[test]
fn a_killed_peer_is_named() {
    const NAME: &str = "messages::a_killed_peer_is_named";
    if !is_alone(NAME) {
        if crate::harness::context().is_some() {
            of_processes(NAME, &[&[], &[], &[]]);
        }
        return;
    }
    let process = Process::new(NAME);
    let rank = process.join("main", 0, SMALL);
    let all = exchange(&rank, 3, 0);
    assert_eq!(outcome(rank.batch(&all)), Ok(()));
    if rank.me() == 2 {
        // An end that the others see as that of a rank which has died.
        std::process::exit(0);
    }
    let other = 1 - rank.me();
    let items = [rank.receives(2, 1, 9 * CELL), rank.receives(other, 1, CELL), rank.sends(other, 1, CELL)];
    let outcome = outcome(rank.batch(&items));
    let Err(Error::PeerLost { rank: 2, .. }) = &outcome else { panic!("{outcome:?}") };
    rank.stream.synchronize().expect("a stream that runs out");
    rank.comm.shutdown().expect("an end");
}

pub(crate) fn to_itself(rank: OnDevice) {
    let me = rank.me();
    // In one batch any length; outside of it what fits into cells.
    let batch = [rank.sends(me, 0, 9 * CELL), rank.receives(me, 0, 9 * CELL)];
    assert_eq!(outcome(rank.batch(&batch)), Ok(()));
    let apart: Vec<Item> = (1..3)
        .map(|number| rank.sends(me, number, CELL))
        .chain((1..3).map(|number| rank.receives(me, number, CELL)))
        .collect();
    apart.iter().for_each(|item| assert_eq!(outcome(rank.one(item)), Ok(())));
    rank.check(&batch);
    rank.check(&apart);
    let (long, other) = (rank.sends(me, 3, CELL + 1), rank.receives(me, 4, 8));
    let refused = outcome(rank.one(&long)).expect_err("it could never end").to_string();
    assert!(refused.contains("put both into one batch"), "{refused}");
    let sent = rank.sends(me, 4, 9);
    assert_eq!(outcome(rank.one(&sent)), Ok(()));
    let refused = outcome(rank.one(&other)).expect_err("another length").to_string();
    assert!(refused.contains("send(36 bytes") && refused.contains("recv(32 bytes"), "{refused}");
    let right = rank.receives(me, 4, 9);
    assert_eq!(outcome(rank.one(&right)), Ok(()), "nothing was put on the stream before");
    rank.check(&[right]);
    rank.leave((batch, apart, long, other, sent));
}

#[test]
fn a_rank_sends_itself_messages() {
    alone("messages::a_rank_sends_itself_messages", &[&[], WEAK], || {
        world(2, SMALL, to_itself);
    });
}

#[test]
fn calls_that_cannot_work_are_refused() {
    alone("messages::calls_that_cannot_work_are_refused", &[&[]], || {
        world(3, SMALL, |rank| {
            let memory = rank.memory(&[1.0]);
            let refused = |kind: OpKind, expected: &str| {
                let result = match kind {
                    OpKind::Recv { .. } => rank.submit(kind, &[], &[&memory]),
                    kind => rank.submit(kind, &[&memory], &[]),
                };
                let Err(Error::Usage(error)) = &result else { panic!("{result:?}") };
                assert!(error.to_string().contains(expected), "{error}");
            };
            refused(send(3, 0), "a rank in [0, 3)");
            refused(recv(3, 0), "a rank in [0, 3)");
            refused(OpKind::Recv { from: Source::Any, tag: Tag(0) }, "name the source, or move the tensor to the CPU");
            let sum = rank.op(&rank.stream, OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory], None);
            assert!(matches!(rank.comm.submit_batch(&[sum]), Err(Error::Usage(_))));
            assert!(matches!(rank.comm.submit_batch(&[]), Err(Error::Usage(_))));
            let kept = exchange(&rank, 3, 1);
            assert_eq!(outcome(rank.batch(&kept)), Ok(()), "nothing has happened");
            rank.leave((memory, kept));
        });
        // With one other rank it is known which it is.
        world(2, SMALL, |rank| {
            let item = if rank.me() == 0 { rank.sends(1, 0, 3) } else { rank.receives(0, 0, 3) };
            let item = match rank.me() {
                0 => item,
                _ => Item { kind: OpKind::Recv { from: Source::Any, tag: Tag(0) }, ..item },
            };
            assert_eq!(outcome(rank.one(&item)), Ok(()));
            rank.check(std::slice::from_ref(&item));
            rank.leave(item);
        });
    });
}

pub(crate) fn many_messages(rank: OnDevice) {
    let other = 1 - rank.me();
    // More than the log has room for, with and without data.
    let items =
        [rank.sends(other, 0, 0), rank.receives(other, 0, 0), rank.sends(other, 0, 3), rank.receives(other, 0, 3)];
    let submit = |_| {
        let ops: Vec<Op> = items.iter().map(|item| rank.op_of(&rank.stream, item)).collect();
        rank.comm.submit_batch(&ops).expect("a work")
    };
    let works: Vec<Work> = (0..1500).map(submit).collect();
    works.iter().for_each(|work| work.wait(None).expect("success"));
    rank.check(&items);
    rank.leave(items);
}

#[test]
fn many_messages_are_submitted_before_anybody_waits() {
    alone("messages::many_messages_are_submitted_before_anybody_waits", &[&[], WEAK], || {
        world(2, SMALL, many_messages);
    });
}

#[test]
fn nothing_is_left_of_many_pairs() {
    const NAME: &str = "messages::nothing_is_left_of_many_pairs";
    alone(NAME, &[&[]], || {
        let Some(software) = crate::harness::Software::new() else { return };
        // What stays for the whole process is made.
        world(4, SMALL, |rank| {
            let batches = exchange(&rank, 4, 0);
            assert_eq!(outcome(rank.batch(&batches)), Ok(()));
            rank.leave(batches);
        });
        let (descriptors, living) = (open_files(), software.settled());
        for _ in 0..5 {
            world(4, SMALL, |rank| {
                let batches = exchange(&rank, 4, 0);
                assert_eq!(outcome(rank.batch(&batches)), Ok(()));
                rank.leave(batches);
            });
        }
        wait_until("handles of CUDA are given back", || software.living() <= living);
        wait_until("descriptors are closed", || open_files() <= descriptors + 2);
    });
}

pub(crate) fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("a list").count()
}
