//! What programs do wrong, or at a bad moment.

use std::time::{Duration, Instant};

use ncclx_rs::comm::store::MemoryStore;
use ncclx_rs::sync::{Arc, Mutex, Ordering};
use ncclx_rs::sys::cuda::{Batch, DeviceMemory, RegisteredWords, Stream, Width};
use ncclx_rs::sys::words::SharedWords;
use ncclx_rs::{Counts, Error, OpKind, Rank, ReduceOp, Work};

use crate::harness::{Software, alone, context, is_alone};
use crate::messages::{recv, send};
use crate::ranks::{OnDevice, Process, data, of_processes, total, world};
use crate::windows::{Part, signal, wait_signal};

/// Copies memory to other memory on the rank's stream.
type Copying = fn(&OnDevice, &DeviceMemory, &DeviceMemory) -> Result<Work, Error>;

#[test]
fn a_collective_comes_after_one_on_a_destroyed_stream_of_the_same_number() {
    let all_gather: Copying = |rank, from, into| rank.submit(OpKind::AllGather, &[from], &[into]);
    comes_after_a_destroyed_stream(
        "trouble::a_collective_comes_after_one_on_a_destroyed_stream_of_the_same_number",
        all_gather,
    );
}

#[test]
fn a_message_comes_after_one_on_a_destroyed_stream_of_the_same_number() {
    let to_itself: Copying = |rank, from, into| {
        let op = |kind, inputs, outputs| rank.op(&rank.stream, kind, inputs, outputs, None);
        rank.comm.submit_batch(&[op(send(0, 0), &[from], &[]), op(recv(0, 0), &[], &[into])])
    };
    comes_after_a_destroyed_stream(
        "trouble::a_message_comes_after_one_on_a_destroyed_stream_of_the_same_number",
        to_itself,
    );
}

fn comes_after_a_destroyed_stream(test: &str, copy: Copying) {
    alone(test, &[&[]], || {
        world(1, &[], |mut rank| {
            let memory = [[1.0, 2.0], [0.0; 2], [0.0; 2]].map(|values| rank.memory(&values));
            let [first, second, third] = &memory;
            rank.submit(OpKind::Barrier, &[], &[]).and_then(|work| work.wait(None)).expect("a setup");
            // What is on the stream waits for a word.
            let words = Arc::new(SharedWords::new(1).expect("a word"));
            let registered = RegisteredWords::new(&rank.context, &words).expect("a registration");
            let mut batch = Batch::new(Width::Bits64);
            batch.wait(registered.word(0), 1);
            let current = rank.context.enter().expect("a context");
            rank.stream.submit(&current, &mut batch).expect("a wait");
            drop(current);
            let works = [copy(&rank, first, second).expect("a work")];
            let (number, other) = (rank.stream.to_raw(), Stream::new(&rank.context, 0).expect("a stream"));
            drop(std::mem::replace(&mut rank.stream, other));
            let mut made: Vec<Stream> = Vec::new();
            while made.last().is_none_or(|stream| stream.to_raw() != number) {
                assert!(made.len() < 1000, "numbers are not used again");
                made.push(Stream::new(&rank.context, 0).expect("a stream"));
            }
            let again = made.pop().expect("made above");
            let other = std::mem::replace(&mut rank.stream, again);
            let last = copy(&rank, second, third).expect("a work");
            // The device has time to run it now, if nothing holds it.
            for _ in 0..100 {
                other.synchronize().expect("a stream");
                std::thread::yield_now();
            }
            words.word(0).store(1, Ordering::Release);
            assert!(works.iter().chain([&last]).all(|work| work.wait(None) == Ok(())));
            assert_eq!(rank.values(third), [1.0, 2.0], "it has read what the first operation wrote");
            drop((registered, other, made));
            rank.leave(memory);
        });
    });
}

#[test]
fn limits_may_be_of_any_length() {
    alone("trouble::limits_may_be_of_any_length", &[&[]], || {
        world(2, &[], |rank| {
            let memory = rank.memory(&[1.0]);
            let sum = |limit| rank.submit_within(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory], Some(limit));
            // The first one sets up, too.
            sum(Duration::MAX).and_then(|work| work.wait(None)).expect("a sum");
            assert_eq!(rank.values(&memory), [2.0]);
            if rank.me() == 0 {
                let outcome = sum(Duration::ZERO).and_then(|work| work.wait(None));
                let Err(Error::Timeout { detail, .. }) = &outcome else { panic!("{outcome:?}") };
                assert!(detail.contains("device collective 2: rank(s) 1 did not call it"), "{detail}");
            }
            rank.leave(memory);
        });
    });
}

#[test]
fn settings_that_differ_are_those_of_rank_0() {
    alone("trouble::settings_that_differ_are_those_of_rank_0", &[&[]], || {
        let settings: [&[(&str, &str)]; 3] = [
            &[("device_staging_bytes", "65536"), ("algorithm", "ring")],
            &[("device_staging_bytes", "1048576")],
            &[("device_staging_bytes", "131072")],
        ];
        let store = Arc::new(MemoryStore::default());
        std::thread::scope(|scope| {
            for (me, hints) in settings.into_iter().enumerate() {
                let store = store.clone();
                scope.spawn(move || {
                    let rank = OnDevice::new(("mixed", Rank::from(me), 3), store, 0, hints);
                    let memory = rank.memory(&data(me, 50_000));
                    rank.sum(&memory).expect("a sum");
                    assert_eq!(rank.values(&memory), total(3, 50_000));
                    rank.leave(memory);
                });
            }
        });
    });
}

#[test]
fn a_rank_that_calls_on_the_cpu_what_others_call_on_a_device_is_named() {
    alone("trouble::a_rank_that_calls_on_the_cpu_what_others_call_on_a_device_is_named", &[&[]], || {
        world(3, &[], |rank| {
            let memory = rank.memory(&[1.0]);
            rank.sum(&memory).expect("a sum");
            if rank.me() != 1 {
                let (kind, limit) = (OpKind::AllReduce(ReduceOp::Sum), Some(Duration::from_secs(2)));
                let work = rank.submit_within(kind, &[&memory], &[&memory], limit).expect("a work");
                match work.wait(None) {
                    Err(Error::Timeout { detail: text, .. } | Error::Remote { cause: text, .. }) => {
                        let expected =
                            "rank(s) 1 did not call it; rank(s) 0, 2 did; rank(s) 1 called a collective on the CPU";
                        assert!(text.contains(expected), "{text}");
                    }
                    other => panic!("{other:?}"),
                }
                rank.stream.synchronize().expect("a stream that runs out");
            }
            assert_eq!(rank.sum_on_the_cpu(), Ok(6.0), "the CPU's engine is not concerned");
            rank.leave(memory);
        });
    });
}

#[test]
fn what_one_rank_gives_up_ends_though_a_later_call_disagrees() {
    alone("trouble::what_one_rank_gives_up_ends_though_a_later_call_disagrees", &[&[]], || {
        world(3, &[], |rank| {
            let memory = rank.memory(&data(rank.me(), 10));
            rank.sum(&memory).expect("a sum");
            if rank.me() != 2 {
                let limit = Some(Duration::from_secs(1));
                let call = |op| rank.submit_within(OpKind::AllReduce(op), &[&memory], &[&memory], limit);
                let first = call(ReduceOp::Sum).expect("a work");
                let second = call(if rank.me() == 0 { ReduceOp::Max } else { ReduceOp::Min });
                match first.wait(None) {
                    Err(Error::Timeout { detail: text, .. } | Error::Remote { cause: text, .. }) => {
                        assert!(text.contains("rank(s) 2 did not call it") || text.contains("disagree"), "{text}");
                    }
                    other => panic!("{other:?}"),
                }
                second.and_then(|work| work.wait(None)).expect_err("they disagree");
                rank.stream.synchronize().expect("a stream that runs out");
                call(ReduceOp::Sum).expect_err("one of them never came");
            }
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            rank.comm.abort("the test is over");
        });
    });
}

/// Aborts rank 0 at many moments before and after the end of a setup. `call` does something with the other rank of two.
fn abort_about_a_setup(call: impl Fn(&OnDevice, &DeviceMemory) -> Result<(), Error> + Sync) {
    const MOMENTS: u32 = 24;
    let setup = Mutex::new(Duration::ZERO);
    world(2, &[], |rank| {
        let (memory, begin) = (rank.memory(&[1.0]), Instant::now());
        call(&rank, &memory).expect("a call");
        let mut setup = setup.lock().expect("a lock");
        *setup = begin.elapsed().max(*setup);
        drop(setup);
        rank.leave(memory);
    });
    let setup = setup.into_inner().expect("a lock");
    for moment in 0..MOMENTS {
        world(2, &[], |rank| {
            let (memory, begin) = (rank.memory(&[1.0]), Instant::now());
            std::thread::scope(|scope| {
                if rank.me() == 0 {
                    scope.spawn(|| {
                        let at = begin + setup * moment / (MOMENTS / 2);
                        while Instant::now() < at {
                            std::thread::yield_now();
                        }
                        rank.comm.abort("it had enough");
                    });
                }
                // Some may succeed before; none waits for ever.
                while call(&rank, &memory).is_ok() {}
            });
            rank.stream.synchronize().expect("a stream that runs out");
            rank.comm.shutdown().expect("an end");
        });
    }
}

#[test]
fn an_abort_ends_the_setup_for_all() {
    alone("trouble::an_abort_ends_the_setup_for_all", &[&[]], || abort_about_a_setup(|rank, memory| rank.sum(memory)));
}

#[test]
fn an_abort_ends_the_setup_of_a_pair_for_both() {
    alone("trouble::an_abort_ends_the_setup_of_a_pair_for_both", &[&[]], || {
        abort_about_a_setup(|rank, memory| {
            let other = 1 - rank.me();
            let op = if rank.me() == 0 {
                rank.submit(send(other, 0), &[memory], &[])
            } else {
                rank.submit(recv(other, 0), &[], &[memory])
            };
            op?.wait(None)
        });
    });
}

#[test]
fn lists_of_many_tensors_and_of_empty_ones_are_reduced() {
    alone("trouble::lists_of_many_tensors_and_of_empty_ones_are_reduced", &[&[]], || {
        world(2, &[("device_staging_bytes", "65536")], |rank| {
            let lengths: Vec<usize> = (0..150).map(|index| index % 40).collect();
            let memory: Vec<DeviceMemory> = lengths.iter().map(|len| rank.memory(&data(rank.me(), *len))).collect();
            let all: Vec<&DeviceMemory> = memory.iter().collect();
            let sum = |all: &[&DeviceMemory]| {
                let work = rank.submit(OpKind::AllReduce(ReduceOp::Sum), all, all).expect("a work");
                work.wait(None).expect("a sum");
            };
            sum(&all);
            for (len, memory) in lengths.iter().zip(&memory) {
                assert_eq!(rank.values(memory), total(2, *len));
            }
            sum(&[]);
            let empty: Vec<&DeviceMemory> = all.into_iter().filter(|memory| memory.bytes().is_empty()).collect();
            sum(&empty);
            rank.leave(memory);
        });
    });
}

#[test]
fn a_dump_tells_operations_on_a_device_from_those_on_the_cpu() {
    alone("trouble::a_dump_tells_operations_on_a_device_from_those_on_the_cpu", &[&[]], || {
        world(2, &[], |rank| {
            let memory = rank.memory(&[1.0, 1.0]);
            let listed = || -> Vec<(bool, u64)> {
                let dump: serde_json::Value = serde_json::from_str(&rank.comm.dump("asked")).expect("JSON");
                let records = dump["records"].as_array().expect("a list").iter();
                let collectives = records.filter(|record| record["collective"] == true);
                let place = |record: &serde_json::Value| {
                    (record["device"].as_bool().expect("it says"), record["sequence"].as_u64().expect("a number"))
                };
                collectives.map(place).collect()
            };
            for _ in 0..2 {
                rank.sum(&memory).expect("a sum");
                rank.sum_on_the_cpu().expect("a sum");
            }
            assert_eq!(listed(), [(true, 1), (false, 0), (true, 2), (false, 1)]);
            // Ranks that have disagreed count on.
            let op = if rank.me() == 0 { ReduceOp::Max } else { ReduceOp::Min };
            let outcome = rank.submit(OpKind::AllReduce(op), &[&memory], &[&memory]).and_then(|work| work.wait(None));
            assert!(matches!(outcome, Err(Error::Mismatch { .. })), "{outcome:?}");
            rank.sum(&memory).expect("a sum");
            assert_eq!(listed()[4..], [(true, 3), (true, 4)]);
            rank.leave(memory);
        });
    });
}

/// By sequence, how many microseconds each collective took by the device's clock, as a dump tells it. The times are read when
/// the next one is submitted, which follows in that order.
fn device_times(rank: &OnDevice) -> Vec<Option<f64>> {
    rank.stream.synchronize().expect("a stream that ends");
    rank.submit(OpKind::Barrier, &[], &[]).and_then(|work| work.wait(None)).expect("a barrier");
    let dump: serde_json::Value = serde_json::from_str(&rank.comm.dump("asked")).expect("JSON");
    let records = dump["records"].as_array().expect("a list").iter();
    let records = records.filter(|record| record["device"] == true);
    let mut times: Vec<_> = records.map(|record| record["device_microseconds"].as_f64()).collect();
    times.pop();
    times
}

#[test]
fn a_dump_tells_how_long_collectives_took_by_the_devices_clock() {
    alone("trouble::a_dump_tells_how_long_collectives_took_by_the_devices_clock", &[&[]], || {
        world(2, &[("device_timing", "true")], |rank| {
            let memory = rank.memory(&[1.0]);
            let sum = || rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory]).expect("a work");
            let late = Duration::from_millis(500);
            // The setup, too.
            rank.sum(&memory).expect("a sum");
            // More than are timed at a time, since none of them ends on rank 0 before rank 1 comes.
            let submit = || -> Vec<_> { (0..300).map(|_| sum()).collect() };
            let ahead = (rank.me() == 0).then(submit);
            rank.comm.barrier().expect("rank 0 has called");
            if ahead.is_none() {
                std::thread::sleep(late);
            }
            let works = ahead.unwrap_or_else(submit);
            works.iter().for_each(|work| work.wait(None).expect("a sum"));
            let times = device_times(&rank);
            assert!(times.len() == 301 && times[1].is_some(), "{times:?}");
            if rank.me() == 0 {
                assert!(times[1].expect("it was timed") >= 0.8 * late.as_secs_f64() * 1e6, "{times:?}");
                assert_eq!(times.iter().position(Option::is_none), Some(257));
            }
            rank.sum(&memory).expect("a sum");
            let times = device_times(&rank);
            assert!(times.len() == 303 && times[302].is_some_and(|time| time > 0.0), "{times:?}");
            // What cannot be measured is done all the same.
            rank.comm.barrier().expect("both are there");
            let call = "cuEventElapsedTime_v2";
            if let (0, Some(software)) = (rank.me(), Software::new()) {
                software.plant(call, software.uses(call) + 1);
            }
            rank.comm.barrier().expect("both are there");
            (0..2).for_each(|_| rank.sum(&memory).expect("a sum"));
            let times = device_times(&rank);
            let lacking = times[303..].iter().filter(|time| time.is_none()).count();
            let all = rank.comm.size() as f32;
            let mut lack = [lacking as f32, 1.0];
            rank.comm.all_reduce(&mut lack, ReduceOp::Sum).expect("a sum");
            assert!(lack[0] == f32::from(u8::from(Software::new().is_some())) && lack[1] == all, "{times:?}");
            rank.leave(memory);
        });
        world(2, &[], |rank| {
            let memory = rank.memory(&[1.0]);
            rank.sum(&memory).expect("a sum");
            assert_eq!(device_times(&rank), [None]);
            rank.leave(memory);
        });
    });
}

#[test]
fn a_dump_tells_when_a_stream_has_reached_an_operation() {
    alone("trouble::a_dump_tells_when_a_stream_has_reached_an_operation", &[&[]], || {
        world(2, &[], |rank| {
            let memory = rank.memory(&[1.0]);
            // By sequence: the state, and the times at which it was submitted, has started and has ended.
            let record = |sequence: u64| -> (String, [Option<u64>; 3]) {
                let dump: serde_json::Value = serde_json::from_str(&rank.comm.dump("asked")).expect("JSON");
                let mut records = dump["records"].as_array().expect("a list").iter();
                let wanted = |record: &&serde_json::Value| record["device"] == true && record["sequence"] == sequence;
                let record = records.find(wanted).expect("it is remembered");
                let times = ["submitted", "started", "ended"].map(|name| record[name].as_u64());
                (record["state"].as_str().expect("a text").to_owned(), times)
            };
            rank.sum(&memory).expect("a sum");
            let (state, [submitted, started, ended]) = record(1);
            assert!(state == "completed" && submitted <= started && started <= ended && started.is_some(), "{state}");
            let sum = || rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory]).expect("a work");
            if rank.me() == 0 {
                // The stream waits in the first one for the other rank, and reaches the second one afterwards.
                let works = [sum(), sum()];
                let submitted = Instant::now();
                while record(2).0 != "running" {
                    std::thread::yield_now();
                }
                // The watch has looked since: it would have seen the second one, too.
                assert_eq!(record(3).0, "queued");
                let waited = submitted.elapsed();
                rank.comm.barrier().expect("the other one goes on");
                works.iter().for_each(|work| work.wait(None).expect("a sum"));
                let (state, [submitted, started, ended]) = record(3);
                assert!(state == "completed" && started <= ended, "{state}");
                let until_started = started.expect("a time") - submitted.expect("a time");
                // Both are rounded to microseconds.
                assert!(u128::from(until_started) + 2 >= waited.as_micros(), "{until_started} µs of {waited:?}");
            } else {
                rank.comm.barrier().expect("the other one waits");
                [sum(), sum()].iter().for_each(|work| work.wait(None).expect("a sum"));
            }
            rank.leave(memory);
        });
    });
}

/// Calls of the driver that make or map memory wait for the device, as they may; what is submitted makes none.
#[test]
fn submissions_go_on_while_the_device_waits_for_another_rank() {
    const TEST: &str = "trouble::submissions_go_on_while_the_device_waits_for_another_rank";
    const BLOCKING: &[(&str, &str)] = &[("SOFTCUDA_BLOCKING", "all")];
    if !is_alone(TEST) {
        if context().is_some() {
            of_processes(TEST, &[BLOCKING; 2]);
        }
        return;
    }
    let process = Process::new(TEST);
    let rank = process.join("blocking", 0, &[("device_staging_bytes", "65536")]);
    let (me, peer, len) = (rank.me(), 1 - rank.me(), 40_000);
    let part = Part::new(&rank, 10);
    let memory = [rank.memory(&data(me, len)), rank.memory(&data(me, len)), rank.memory(&vec![0.0; 2 * len])];
    let [sum, own, all] = &memory;
    let counts = Counts::equal(len / 2, 2);
    let everything = || -> Vec<Work> {
        let submit = |kind, inputs: &[&DeviceMemory], outputs: &[&DeviceMemory]| {
            rank.submit_within(kind, inputs, outputs, Some(Duration::from_secs(60))).expect("a work")
        };
        let exchange = OpKind::AllToAll { send: counts.clone(), recv: counts.clone() };
        let message = |kind, inputs: &[&DeviceMemory], outputs: &[&DeviceMemory]| {
            rank.op(&rank.stream, kind, inputs, outputs, Some(Duration::from_secs(60)))
        };
        vec![
            submit(OpKind::AllReduce(ReduceOp::Sum), &[sum], &[sum]),
            submit(OpKind::AllGather, &[own], &[all]),
            submit(OpKind::Broadcast { root: Rank(1) }, &[own], &[own]),
            submit(exchange, &[own], &[own]),
            submit(OpKind::Barrier, &[], &[]),
            rank.comm
                .submit_batch(&[message(send(peer, 0), &[sum], &[]), message(recv(peer, 0), &[], &[own])])
                .expect("a batch"),
            submit(signal(&part, peer), &[], &[]),
            submit(wait_signal(&part, peer), &[], &[]),
        ]
    };
    // What is set up and compiled at the first call is there from now on.
    everything().iter().for_each(|work| work.wait(None).expect("success"));
    rank.comm.barrier().expect("all are through");
    if me == 0 {
        // The other rank comes when this one has submitted all of it.
        let works: Vec<Work> = (0..3).flat_map(|_| everything()).collect();
        rank.comm.barrier().expect("the other one goes on");
        works.iter().for_each(|work| work.wait(None).expect("success"));
    } else {
        rank.comm.barrier().expect("the other one has submitted");
        (0..3).for_each(|_| everything().iter().for_each(|work| work.wait(None).expect("success")));
    }
    rank.comm.window_deregister(part.id).expect("an end");
    rank.leave((memory, part.memory));
}

#[test]
fn a_forked_child_leaves_the_device_alone() {
    alone("trouble::a_forked_child_leaves_the_device_alone", &[&[]], || {
        world(2, &[], |rank| {
            let memory = rank.memory(&[1.0]);
            rank.sum(&memory).expect("a sum");
            let work = rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory]).expect("a work");
            if rank.me() == 0 {
                // SAFETY: the child touches nothing whose lock another thread may hold but what says that it is refused.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    let is_refused = rank.sum(&memory).is_err() && (work.is_done() || work.wait(None).is_err());
                    rank.comm.abort("it is forked");
                    drop(rank.comm);
                    // SAFETY: it ends this process, and nothing else.
                    unsafe { libc::_exit(if is_refused { 0 } else { 1 }) };
                }
                let mut status = 0;
                // SAFETY: the child is this process's, and there is a place for the status.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 0));
            }
            work.wait(None).expect("a sum");
            rank.sum(&memory).expect("a sum");
            assert_eq!(rank.values(&memory), [8.0]);
            rank.leave(memory);
        });
    });
}
