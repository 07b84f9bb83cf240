//! What goes wrong on a rank whose tensors go through memory of the host (`engine=host`), and what the others learn of it.

use std::time::{Duration, Instant};

use ncclx_rs::comm::store::MemoryStore;
use ncclx_rs::sync::{Arc, Ordering};
use ncclx_rs::sys::cuda::{Batch, RegisteredWords, Stream, Width};
use ncclx_rs::sys::words::SharedWords;
use ncclx_rs::{
    Buffer, CommOptions, Communicator, DType, Error, Mode, Op, OpKind, Rank, ReduceOp, Source, StreamHandle, Tag,
};

use crate::harness::{Software, alone};
use crate::ranks::{OnDevice, world_on};
use crate::recording;

const TWO: (&str, &str) = ("SOFTCUDA_DEVICES", "2");
const HOST: [(&str, &str); 1] = [("engine", "host")];

fn send_to(to: u32) -> OpKind {
    OpKind::Send { to: Rank(to), tag: Tag(0) }
}

fn recv_from(from: u32) -> OpKind {
    OpKind::Recv { from: Source::Rank(Rank(from)), tag: Tag(0) }
}

#[test]
fn a_call_that_fails_is_told_to_the_other_ranks() {
    alone("through_host::a_call_that_fails_is_told_to_the_other_ranks", &[&[TWO]], || {
        let Some(software) = Software::new() else { return };
        world_on(&[0, 1, 0], &HOST, |rank| {
            rank.comm.set_timeout(Duration::from_secs(20));
            let memory = rank.memory(&[1.0; 10]);
            for call in ["cuStreamQuery", "cuMemcpyDtoH_v2", "cuStreamGetCaptureInfo_v2"] {
                rank.comm.barrier().expect("all are there");
                if rank.me() == 0 {
                    software.plant(call, software.uses(call) + 1);
                }
                rank.comm.barrier().expect("all are there");
                // Whichever rank calls it first.
                let error = rank.sum(&memory).expect_err("it has failed on a rank");
                assert!(error.to_string().contains(call), "{call}: {error}");
                assert!(matches!(error, Error::Device { .. } | Error::Remote { .. }), "{call}: {error:?}");
                let mut who = [f32::from(matches!(error, Error::Device { .. }))];
                rank.comm.all_reduce(&mut who, ReduceOp::Sum).expect("the CPU's half works");
                assert_eq!(who, [1.0], "{call}");
            }
            rank.sum(&memory).expect("they go on");
            assert_eq!(rank.values(&memory), [3.0; 10]);
            rank.leave(memory);
        });
    });
}

#[test]
fn a_rank_without_memory_for_a_copy_says_so_on_all_ranks() {
    alone("through_host::a_rank_without_memory_for_a_copy_says_so_on_all_ranks", &[&[TWO]], || {
        world_on(&[0, 1], &HOST, |rank| {
            let memory = rank.memory(&[1.0; 10]);
            let device = rank.me() as u32;
            let len = if device == 0 { 1 << 60 } else { 10 };
            // SAFETY: nothing is copied of what is too long; the rest stays until the end.
            let buffer = || unsafe { Buffer::on_device(memory.bytes().ptr().to_bits(), len, DType::F32, device) };
            // SAFETY: the stream stays until the end.
            let mode = Mode::Stream(unsafe { StreamHandle::from_raw(rank.stream.to_raw(), device) });
            let kind = OpKind::AllReduce(ReduceOp::Sum);
            let op = Op { kind, inputs: [buffer()].into(), outputs: [buffer()].into(), timeout: None, mode };
            let error = rank.comm.submit(op).and_then(|work| work.wait(None)).expect_err("no host has as much");
            assert!(error.to_string().contains("memory of the host for 4611686018427387904 bytes"), "{error}");
            assert_eq!(matches!(error, Error::Remote { rank: 0, .. }), device == 1, "{error:?}");
            rank.sum(&memory).expect("they go on");
            assert_eq!(rank.values(&memory), [2.0; 10]);
            rank.leave(memory);
        });
    });
}

#[test]
fn nothing_of_a_batch_with_a_mistake_is_sent() {
    alone("through_host::nothing_of_a_batch_with_a_mistake_is_sent", &[&[TWO]], || {
        world_on(&[0, 1], &HOST, |rank| {
            let [wrong, right, room] = [1.0, 2.0, 0.0].map(|value| rank.memory(&[value]));
            let op = |kind, input: &[_], output: &[_]| rank.op(&rank.stream, kind, input, output, None);
            if rank.me() == 0 {
                for mistake in [op(send_to(9), &[&wrong], &[]), op(recv_from(9), &[], &[&room])] {
                    for batch in
                        [[op(send_to(1), &[&wrong], &[]), mistake.clone()], [mistake, op(send_to(1), &[&wrong], &[])]]
                    {
                        let error = rank.comm.submit_batch(&batch).expect_err("there is no rank 9");
                        assert!(matches!(error, Error::Usage(_)), "{error:?}");
                    }
                }
                rank.comm.submit(op(send_to(1), &[&right], &[])).expect("a work").wait(None).expect("it is received");
            } else {
                rank.comm.submit(op(recv_from(0), &[], &[&room])).expect("a work").wait(None).expect("it is sent");
                assert_eq!(rank.values(&room), [2.0]);
            }
            rank.leave([wrong, right, room]);
        });
    });
}

#[test]
fn the_first_time_limit_of_a_batch_is_that_of_all() {
    alone("through_host::the_first_time_limit_of_a_batch_is_that_of_all", &[&[TWO]], || {
        world_on(&[0, 1], &HOST, |rank| {
            let memory = [rank.memory(&[0.0]), rank.memory(&[0.0])];
            if rank.me() == 0 {
                let [first, second] = [(&memory[0], Some(Duration::from_millis(100))), (&memory[1], None)]
                    .map(|(room, limit)| rank.op(&rank.stream, recv_from(1), &[], &[room], limit));
                rank.comm.set_timeout(Duration::from_secs(20));
                let begun = Instant::now();
                let error = rank.comm.submit_batch(&[first, second]).expect_err("nothing is sent");
                assert!(matches!(error, Error::Timeout { .. }), "{error}");
                assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
            }
            rank.leave(memory);
        });
    });
}

#[test]
fn a_communicator_that_is_closed_says_so_at_once() {
    alone("through_host::a_communicator_that_is_closed_says_so_at_once", &[&[TWO]], || {
        let Some(software) = Software::new() else { return };
        world_on(&[0], &HOST, |rank: OnDevice| {
            let memory = rank.memory(&[1.0; 10]);
            rank.sum(&memory).expect("one alone");
            rank.comm.shutdown().expect("an end");
            let copied = software.uses("cuMemcpyDtoH_v2");
            for error in [rank.sum(&memory), rank.comm.prepare_device(0)].map(|outcome| outcome.expect_err("closed")) {
                assert!(matches!(error, Error::Closed { .. }), "{error:?}");
            }
            assert_eq!(software.uses("cuMemcpyDtoH_v2"), copied, "nothing is copied for it");
        });
    });
}

#[test]
fn a_stream_that_does_not_come_so_far_is_waited_for_until_the_limit() {
    alone("through_host::a_stream_that_does_not_come_so_far_is_waited_for_until_the_limit", &[&[TWO]], || {
        world_on(&[0, 1], &HOST, |rank| {
            rank.comm.set_timeout(Duration::from_secs(60));
            let memory = rank.memory(&[1.0; 10]);
            let words = Arc::new(SharedWords::new(1).expect("a word"));
            let registered = RegisteredWords::new(&rank.context, &words).expect("a registration");
            if rank.me() == 0 {
                let mut batch = Batch::new(Width::Bits64);
                batch.wait(registered.word(0), 1);
                rank.stream.submit(&rank.context.enter().expect("a context"), &mut batch).expect("a wait");
            }
            let limit = (rank.me() == 0).then_some(Duration::from_millis(200));
            let begun = Instant::now();
            let outcome = rank.submit_within(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory], limit);
            let error = outcome.expect_err("a stream waits").to_string();
            assert!(error.contains("earlier work on its stream has not ended"), "{error}");
            assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
            rank.comm.barrier().expect("they go on");
            // An abort ends the wait as well.
            if rank.me() == 0 {
                let outcome = std::thread::scope(|scope| {
                    let waits = scope.spawn(|| rank.sum(&memory));
                    std::thread::sleep(Duration::from_millis(50));
                    rank.comm.abort("the test is over");
                    waits.join().expect("no panic")
                });
                assert!(matches!(outcome, Err(Error::Closed { .. })), "{outcome:?}");
                words.word(0).store(1, Ordering::Release);
            } else {
                rank.sum(&memory).expect_err("the other one leaves");
                rank.comm.abort("the test is over");
            }
        });
    });
}

#[test]
fn captures_of_other_threads_are_not_spoilt() {
    alone("through_host::captures_of_other_threads_are_not_spoilt", &[&[TWO]], || {
        world_on(&[0, 1], &HOST, |rank| {
            let (memory, captured) = (rank.memory(&[1.0; 10]), Stream::new(&rank.context, 0).expect("a stream"));
            rank.comm.barrier().expect("all have what they need, which spoils captures");
            std::thread::scope(|scope| {
                let (begun, has_begun) = std::sync::mpsc::channel();
                let (ended, has_ended) = std::sync::mpsc::channel();
                let stream = &captured;
                let capture = scope.spawn(move || {
                    recording::begin(stream, recording::Mode::Global);
                    begun.send(()).expect("it waits");
                    has_ended.recv().expect("it is told");
                    recording::end(stream).map(drop)
                });
                has_begun.recv().expect("it begins");
                rank.sum(&memory).expect("another stream is captured");
                ended.send(()).expect("it waits");
                assert_eq!(capture.join().expect("no panic"), Ok(()));
            });
            rank.comm.barrier().expect("no rank captures any more");
            assert_eq!(rank.values(&memory), [2.0; 10]);
            rank.leave((memory, captured));
        });
    });
}

#[test]
fn engine_host_on_some_ranks_alone_is_an_error_on_all() {
    let store = Arc::new(MemoryStore::default());
    std::thread::scope(|scope| {
        for rank in [0, 1, 2] {
            let store = store.clone();
            scope.spawn(move || {
                let engine = if rank == 1 { "host" } else { "auto" };
                let options = CommOptions {
                    name: "mixed".to_owned(),
                    rank: Rank(rank),
                    size: 3,
                    store,
                    timeout: Some(Duration::from_secs(60)),
                    hints: vec![("engine".to_owned(), engine.to_owned())],
                };
                let error = Communicator::new(options).expect_err("they differ").to_string();
                assert!(error.contains("has the engine host, rank 0 has another"), "rank {rank}: {error}");
            });
        }
    });
}
