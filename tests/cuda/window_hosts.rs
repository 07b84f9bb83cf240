//! Windows in device memory, between ranks of several hosts, which one machine poses as.

use std::sync::Barrier;
use std::time::Duration;

use ncclx_rs::sync::{AtomicBool, Ordering};
use ncclx_rs::sys::cuda::{DeviceMemory, SharedDeviceMemory, Stream, copy_from_host, copy_to_host};
use ncclx_rs::{Buffer, Buffers, DType, Error, Mode, Op, OpKind, Rank, ReduceOp, StreamHandle, Window, Work};

use crate::graphs::wait_until;
use crate::harness::{Software, alone, context, is_alone};
use crate::messages::open_files;
use crate::ranks::{OnDevice, Process, data, hosts, hosts_on, of_processes};
use crate::recording;
use crate::stopped::wait_until_stopped;
use crate::windows::{
    Part, TWO_DEVICES, announce_on_another_stream, collectives_and_accesses, come_and_go, different_memory, do_now,
    end_before_the_other_leaves, end_in_any_order, exchange, expose_a_part, exposed, get, many_accesses,
    memory_is_refused, no_signal, put, signal, submit_on, too_many_windows, wait_for_one_that_leaves, wait_signal,
    what_does_not_fit,
};

type Settings = [(&'static str, &'static str)];

/// Cells of 16 KiB, so that most of what is put takes many.
const HINTS: &Settings = &[("device_staging_bytes", "65536"), ("single_copy_bytes", "0")];
const CELL: usize = 16384;

const LATE: &Settings = &[("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1"), ("SOFTCUDA_HOST_POINTERS_DIFFER", "1")];

#[test]
fn ranks_of_several_hosts_reach_windows_of_each_other() {
    alone("window_hosts::ranks_of_several_hosts_reach_windows_of_each_other", &[&[], LATE], || {
        for places in ["ab", "aabb", "aaab", "aba"] {
            hosts(places, HINTS, |rank| {
                exchange(&rank, places.len());
                rank.leave(());
            });
        }
    });
}

#[test]
fn devices_of_several_hosts_do_so_too() {
    alone("window_hosts::devices_of_several_hosts_do_so_too", &[TWO_DEVICES], || {
        hosts_on(&[("a", 0), ("a", 1), ("b", 0), ("b", 1)], HINTS, |rank| {
            exchange(&rank, 4);
            rank.leave(());
        });
    });
}

#[test]
fn processes_of_several_hosts_do_so_too() {
    const NAME: &str = "window_hosts::processes_of_several_hosts_do_so_too";
    if !is_alone(NAME) {
        if context().is_some() {
            of_processes(NAME, &[LATE, &[], LATE, &[]]);
        }
        return;
    }
    let process = Process::new(NAME);
    let host = if process.rank.index() < 2 { "a" } else { "b" };
    let rank = process.join("windows", 0, &[HINTS, &[("host_id", host)]].concat());
    exchange(&rank, process.size);
    rank.leave(());
}

/// What two ranks do within a host, and what three do.
const OF_TWO: &[fn(OnDevice)] = &[
    announce_on_another_stream,
    end_in_any_order,
    many_accesses,
    come_and_go,
    too_many_windows,
    expose_a_part,
    what_does_not_fit,
    different_memory,
    wait_for_one_that_leaves,
    end_before_the_other_leaves,
];
const OF_THREE: &[fn(OnDevice)] = &[memory_is_refused, no_signal, collectives_and_accesses];

#[test]
fn two_ranks_do_between_hosts_what_they_do_within_one() {
    alone("window_hosts::two_ranks_do_between_hosts_what_they_do_within_one", &[&[], LATE], || {
        OF_TWO.iter().for_each(|what| hosts("ab", HINTS, what));
    });
}

#[test]
fn three_ranks_do_between_hosts_what_they_do_within_one() {
    alone("window_hosts::three_ranks_do_between_hosts_what_they_do_within_one", &[&[], LATE], || {
        for places in ["aab", "abb", "abc"] {
            OF_THREE.iter().for_each(|what| hosts(places, HINTS, what));
        }
    });
}

/// Memory of bytes that may begin anywhere.
struct Bytes {
    memory: DeviceMemory,
    skip: usize,
    len: usize,
}

impl Bytes {
    fn new(rank: &OnDevice, skip: usize, bytes: &[u8]) -> Bytes {
        let memory = DeviceMemory::new(&rank.context, skip + bytes.len() + 1).expect("memory");
        let current = rank.context.enter().expect("a context");
        let whole = vec![0xee; skip + bytes.len() + 1];
        copy_from_host(&current, &whole, memory.bytes()).expect("a copy");
        copy_from_host(&current, bytes, memory.bytes().part(skip, bytes.len())).expect("a copy");
        Bytes { memory, skip, len: bytes.len() }
    }

    /// In two pieces, where there are enough.
    fn buffers(&self) -> Buffers {
        let cut = self.len / 3;
        let piece = |from: usize, len: usize| {
            let address = self.memory.bytes().ptr().to_bits() + (self.skip + from) as u64;
            // SAFETY: tests keep memory until the end.
            unsafe { Buffer::on_device(address, len, DType::U8, 0) }
        };
        [piece(0, cut), piece(cut, self.len - cut)].into_iter().collect()
    }

    fn values(&self, rank: &OnDevice) -> Vec<u8> {
        let mut bytes = vec![0; self.skip + self.len + 1];
        rank.stream.synchronize().expect("a stream that ends");
        let current = rank.context.enter().expect("a context");
        copy_to_host(&current, self.memory.bytes(), &mut bytes).expect("a copy");
        assert!(bytes[..self.skip].iter().chain(bytes.last()).all(|byte| *byte == 0xee), "what is beside it stays");
        bytes[self.skip..self.skip + self.len].to_vec()
    }
}

fn access(rank: &OnDevice, kind: OpKind, bytes: &Bytes) -> Work {
    // SAFETY: tests keep streams until the end.
    let mode = Mode::Stream(unsafe { StreamHandle::from_raw(rank.stream.to_raw(), 0) });
    let (inputs, outputs) = match kind {
        OpKind::Get { .. } => (Buffers::new(), bytes.buffers()),
        _ => (bytes.buffers(), Buffers::new()),
    };
    rank.comm.submit(Op { kind, inputs, outputs, timeout: None, mode }).expect("a work")
}

#[test]
fn any_number_of_bytes_goes_anywhere_both_ways_at_once() {
    alone("window_hosts::any_number_of_bytes_goes_anywhere_both_ways_at_once", &[&[], LATE], || {
        hosts("ab", HINTS, |rank| {
            let (me, peer) = (rank.me(), Rank::from(1 - rank.me()));
            let lens = [0, 1, 3, 255, CELL - 1, CELL, CELL + 1, 2 * CELL, 5 * CELL + 7, (3 << 20) + 5];
            let (part, mut kept) = (Part::new(&rank, (3 << 18) + 16), Vec::new());
            let of =
                |from: usize, len: usize| -> Vec<u8> { (0..len).map(|at| (at * 7 + at / 251 + from) as u8).collect() };
            for (round, len) in lens.into_iter().enumerate() {
                let (offset, skip) = (1 + round % 7, round % 5);
                let own = Bytes::new(&rank, skip, &of(me, len));
                let [back, theirs] = [3, 2].map(|skip| Bytes::new(&rank, skip, &vec![0; len]));
                let window = part.id;
                // What is got comes after what is put, and before what the signal tells of.
                access(&rank, OpKind::Put { window, to: peer, offset }, &own);
                access(&rank, OpKind::Get { window, from: peer, offset }, &back);
                rank.submit(signal(&part, peer.index()), &[], &[]).expect("a signal");
                rank.submit(wait_signal(&part, peer.index()), &[], &[]).expect("a wait");
                access(&rank, OpKind::Get { window, from: Rank::from(me), offset }, &theirs);
                assert!(back.values(&rank) == of(me, len), "{len} bytes back on rank {me}");
                assert!(theirs.values(&rank) == of(1 - me, len), "{len} bytes on rank {me}");
                // The next round overwrites it.
                rank.submit(signal(&part, peer.index()), &[], &[]).expect("a signal");
                do_now(&rank, wait_signal(&part, peer.index())).expect("a signal");
                kept.push((own, back, theirs));
            }
            rank.comm.window_deregister(part.id).expect("an end");
            rank.leave((part.memory, kept));
        });
    });
}

#[test]
fn the_memory_of_a_put_is_free_when_its_stream_goes_on() {
    alone("window_hosts::the_memory_of_a_put_is_free_when_its_stream_goes_on", &[LATE], || {
        hosts("ab", HINTS, |rank| {
            let len = 50_000;
            let (part, one, other) = (Part::new(&rank, len), rank.memory(&data(1, len)), rank.memory(&data(2, len)));
            let source = rank.memory(&data(0, len));
            if rank.me() == 0 {
                rank.submit(put(&part, 1, 0), &[&source], &[]).expect("a put");
                // A local copy into the source, right behind it on the stream.
                rank.submit(put(&part, 0, 0), &[&one], &[]).expect("a put");
                rank.submit(get(&part, 0, 0), &[], &[&source]).expect("a get");
                rank.submit(signal(&part, 1), &[], &[]).expect("a signal");
                assert_eq!(rank.values(&source), data(1, len));
            } else {
                do_now(&rank, wait_signal(&part, 0)).expect("a signal");
                assert_eq!(part.values(&rank), data(0, len));
            }
            rank.comm.barrier().expect("all are there");
            rank.comm.window_deregister(part.id).expect("an end");
            rank.leave((part.memory, one, other, source));
        });
    });
}

#[test]
fn many_accesses_go_on_two_streams_to_peers_here_and_there() {
    alone("window_hosts::many_accesses_go_on_two_streams_to_peers_here_and_there", &[&[], LATE], || {
        hosts("aabb", HINTS, |rank| {
            let (me, size, len, rounds) = (rank.me(), 4, 7000, 60);
            let other = Stream::new(&rank.context, 0).expect("a stream");
            let part = Part::new(&rank, size * len);
            let sources: Vec<DeviceMemory> = (0..rounds).map(|round| rank.memory(&data(me + round, len))).collect();
            for (round, source) in sources.iter().enumerate() {
                for peer in (0..size).filter(|peer| *peer != me) {
                    let streams = if (round + peer) % 2 == 0 { [&rank.stream, &other] } else { [&other, &rank.stream] };
                    let accessed = put(&part, peer, len * me);
                    rank.submit_on(streams[0], accessed, (&[source], &[]), None).expect("a put");
                    submit_on(&rank, streams[1], signal(&part, peer));
                }
            }
            for _ in 0..rounds {
                for peer in (0..size).filter(|peer| *peer != me) {
                    rank.submit(wait_signal(&part, peer), &[], &[]).expect("a wait");
                }
            }
            let last = |from: usize| if from == me { vec![-1.0; len] } else { data(from + rounds - 1, len) };
            assert_eq!(part.values(&rank), (0..size).flat_map(last).collect::<Vec<_>>(), "rank {me}");
            other.synchronize().expect("a stream that ends");
            rank.comm.window_deregister(part.id).expect("an end");
            rank.leave((part.memory, sources, other));
        });
    });
}

#[test]
fn what_another_host_put_is_passed_on_within_one() {
    alone("window_hosts::what_another_host_put_is_passed_on_within_one", &[LATE], || {
        hosts("aabb", HINTS, |rank| {
            let (me, len) = (rank.me(), 30_000);
            let (next, last) = ((me + 1) % 4, (me + 3) % 4);
            let (part, copy) = (Part::new(&rank, len), rank.memory(&vec![0.0; len]));
            let own = rank.memory(&data(9, len));
            if me == 0 {
                rank.submit(put(&part, next, 0), &[&own], &[]).expect("a put");
                rank.submit(signal(&part, next), &[], &[]).expect("a signal");
            }
            rank.submit(wait_signal(&part, last), &[], &[]).expect("a wait");
            if me != 0 {
                rank.submit(get(&part, me, 0), &[], &[&copy]).expect("a get");
                rank.submit(put(&part, next, 0), &[&copy], &[]).expect("a put");
                rank.submit(signal(&part, next), &[], &[]).expect("a signal");
            }
            assert!(part.values(&rank) == data(9, len), "rank {me}");
            rank.comm.window_deregister(part.id).expect("an end");
            rank.leave((part.memory, copy, own));
        });
    });
}

#[test]
fn an_abort_releases_the_own_stream_and_those_of_other_hosts() {
    alone("window_hosts::an_abort_releases_the_own_stream_and_those_of_other_hosts", &[&[], LATE], || {
        hosts("aabb", HINTS, |rank| {
            let part = Part::new(&rank, 10);
            let peer = (rank.me() + 2) % 4;
            let wait = rank.submit(wait_signal(&part, peer), &[], &[]).expect("a work");
            rank.comm.barrier().expect("all wait");
            if rank.me() == 3 {
                rank.comm.abort("it had enough");
                assert!(wait.wait(None).is_err());
            } else {
                let outcome = wait.wait(None);
                assert!(matches!(outcome, Err(Error::PeerLost { rank: 3, .. })), "{outcome:?}");
            }
            rank.stream.synchronize().expect("a stream that runs out");
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn a_killed_rank_of_another_host_is_named() {
    const NAME: &str = "window_hosts::a_killed_rank_of_another_host_is_named";
    if !is_alone(NAME) {
        if context().is_some() {
            of_processes(NAME, &[&[], &[], &[], &[]]);
        }
        return;
    }
    let process = Process::new(NAME);
    let host = if process.rank.index() < 2 { "a" } else { "b" };
    let rank = process.join("main", 0, &[HINTS, &[("host_id", host)]].concat());
    exchange(&rank, 4);
    let (part, memory) = (Part::new(&rank, 300_000), rank.memory(&data(1, 300_000)));
    if rank.me() == 3 {
        // An end that the others see as that of a rank which has died.
        std::process::exit(0);
    }
    let work = match rank.me() {
        // It cannot be put without the rank, nor got.
        0 => rank.submit(put(&part, 3, 0), &[&memory], &[]),
        1 => rank.submit(get(&part, 3, 0), &[], &[&memory]),
        _ => rank.submit(wait_signal(&part, 3), &[], &[]),
    };
    let outcome = work.and_then(|work| work.wait(None));
    let Err(Error::PeerLost { rank: 3, .. }) = &outcome else { panic!("rank {}: {outcome:?}", rank.me()) };
    rank.stream.synchronize().expect("a stream that runs out");
    rank.comm.shutdown().expect("an end");
}

#[test]
fn a_rank_that_takes_nothing_is_named_by_who_puts() {
    const NAME: &str = "window_hosts::a_rank_that_takes_nothing_is_named_by_who_puts";
    if !is_alone(NAME) {
        if context().is_some() {
            of_processes(NAME, &[&[], &[]]);
        }
        return;
    }
    let process = Process::new(NAME);
    let host = if process.rank.index() == 0 { "a" } else { "b" };
    let rank = process.join("main", 0, &[HINTS, &[("host_id", host)]].concat());
    let (part, memory) = (Part::new(&rank, 300_000), rank.memory(&data(1, 300_000)));
    let mut peer = [0i32; 2];
    peer[rank.me()] = std::process::id().cast_signed();
    rank.comm.all_reduce(&mut peer, ReduceOp::Sum).expect("their numbers");
    if rank.me() == 1 {
        // SAFETY: it stops this process, until the other one goes on with it.
        unsafe { libc::raise(libc::SIGSTOP) };
        rank.comm.abort("the test is over");
        return;
    }
    wait_until_stopped(peer[1]);
    let limit = Some(Duration::from_millis(500));
    let work = rank.submit_within(put(&part, 1, 0), &[&memory], &[], limit).expect("a work");
    let error = work.wait(None).expect_err("it is not taken").to_string();
    assert!(error.contains("put(1200000 bytes to rank 1"), "{error}");
    assert!(error.contains("rank 1 did not take what was put before"), "{error}");
    rank.stream.synchronize().expect("a stream that runs out");
    // SAFETY: the process is the other rank's.
    assert_eq!(unsafe { libc::kill(peer[1], libc::SIGCONT) }, 0);
    rank.comm.abort("the test is over");
}

#[test]
fn nothing_is_left_of_many_windows_and_accesses() {
    alone("window_hosts::nothing_is_left_of_many_windows_and_accesses", &[&[]], || {
        let Some(software) = Software::new() else { return };
        let all = || {
            hosts("aabb", HINTS, |rank| {
                exchange(&rank, 4);
                rank.leave(());
            });
        };
        // What stays for the whole process is made.
        all();
        let threads = || std::fs::read_dir("/proc/self/task").expect("a list").count();
        let (descriptors, living, before) = (open_files(), software.settled(), threads());
        (0..5).for_each(|_| all());
        wait_until("handles of CUDA are given back", || software.living() <= living);
        wait_until("descriptors are closed", || open_files() <= descriptors + 2);
        wait_until("threads end", || threads() <= before + 2);
    });
}

#[test]
fn accesses_make_nothing_that_stays() {
    alone("window_hosts::accesses_make_nothing_that_stays", &[&[]], || {
        let Some(software) = Software::new() else { return };
        hosts("ab", HINTS, |rank| {
            let (part, peer) = (Part::new(&rank, 50_000), 1 - rank.me());
            let memory = rank.memory(&data(3, 50_000));
            let round = || {
                rank.submit(put(&part, peer, 0), &[&memory], &[]).expect("a put");
                rank.submit(signal(&part, peer), &[], &[]).expect("a signal");
                do_now(&rank, wait_signal(&part, peer)).expect("a signal");
            };
            round();
            rank.comm.barrier().expect("all are there");
            let living = software.living();
            rank.comm.barrier().expect("all are there");
            (0..200).for_each(|_| round());
            rank.comm.barrier().expect("all are there");
            assert_eq!(software.living(), living, "handles of CUDA");
            rank.comm.window_deregister(part.id).expect("an end");
            rank.leave((part.memory, memory));
        });
    });
}

#[test]
fn a_failure_is_told_to_other_hosts_after_a_rank_has_left() {
    alone("window_hosts::a_failure_is_told_to_other_hosts_after_a_rank_has_left", &[&[]], || {
        hosts("abc", HINTS, |rank| {
            let part = Part::new(&rank, 10);
            match rank.me() {
                // Nobody waits for it.
                2 => return rank.comm.abort("it had enough"),
                0 => {
                    let limit = Some(Duration::from_secs(2));
                    let wait = rank.submit_within(wait_signal(&part, 1), &[], &[], limit).expect("a work");
                    assert!(matches!(wait.wait(None), Err(Error::Timeout { .. })));
                }
                _ => {
                    let error = do_now(&rank, wait_signal(&part, 0)).expect_err("rank 0 gives up").to_string();
                    assert!(error.contains("rank 1 did not signal"), "{error}");
                }
            }
            rank.stream.synchronize().expect("a stream that runs out");
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn what_was_put_is_there_when_its_window_is_deregistered() {
    alone("window_hosts::what_was_put_is_there_when_its_window_is_deregistered", &[&[], LATE], || {
        hosts("ab", HINTS, |rank| {
            let len = 100_000;
            let (part, source) = (Part::new(&rank, len), rank.memory(&data(5, len)));
            if rank.me() == 0 {
                rank.submit(put(&part, 1, 0), &[&source], &[]).expect("a put");
            }
            rank.comm.window_deregister(part.id).expect("an end");
            let expected = if rank.me() == 0 { vec![-1.0; len] } else { data(5, len) };
            assert!(part.values(&rank) == expected, "rank {}", rank.me());
            rank.leave((part.memory, source));
        });
    });
}

/// Two ranks put what each [has](data) into the other's part.
fn give_each_other(rank: &OnDevice, part: &Part, source: &DeviceMemory) {
    let peer = 1 - rank.me();
    rank.submit(put(part, peer, 0), &[source], &[]).expect("a put");
    rank.submit(signal(part, peer), &[], &[]).expect("a signal");
    do_now(rank, wait_signal(part, peer)).expect("a signal");
    assert_eq!(part.values(rank), data(peer, 10));
}

/// Registers memory on a rank whose device is held up until `given_up`, by when the other rank has.
fn register_too_late(rank: &OnDevice, memory: Buffer, given_up: &AtomicBool) -> Result<Window, Error> {
    let (word, registered) = rank.hold();
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_until("the other rank gives up", || given_up.load(Ordering::Acquire));
            word.word(0).store(1, Ordering::Release);
        });
        rank.comm.window_register(memory)
    });
    drop(registered);
    outcome
}

#[test]
fn what_a_rank_tells_too_late_of_a_window_is_taken_for_nothing_else() {
    // The first window of other hosts takes memory of the host, which waits for the device.
    const BLOCKING: &Settings = &[("SOFTCUDA_DEVICES", "2"), ("SOFTCUDA_BLOCKING", "all")];
    alone("window_hosts::what_a_rank_tells_too_late_of_a_window_is_taken_for_nothing_else", &[BLOCKING], || {
        let given_up = AtomicBool::new(false);
        hosts_on(&[("a", 0), ("b", 1)], HINTS, |rank| {
            let (me, device) = (rank.me(), rank.context.device().ordinal());
            let open = SharedDeviceMemory::new(&rank.context, 40).expect("memory");
            let [sum, closed, source] = [(); 3].map(|()| rank.memory(&data(me, 10)));
            rank.sum(&sum).expect("a sum");
            let usual = rank.comm.timeout();
            rank.comm.barrier().expect("all are there");
            rank.comm.set_timeout(Duration::from_secs(1));
            let outcome = if me == 0 {
                let outcome = rank.comm.window_register(exposed(&rank, &open, 10));
                given_up.store(true, Ordering::Release);
                outcome
            } else {
                register_too_late(&rank, exposed(&rank, &open, 10), &given_up)
            };
            assert!(matches!(outcome, Err(Error::Timeout { .. })), "rank {me}: {outcome:?}");
            rank.comm.set_timeout(usual);
            rank.comm.barrier().expect("all have given up");
            // What ranks agree on as they begin anew.
            let op = if me == 0 { ReduceOp::Max } else { ReduceOp::Sum };
            let outcome = rank.submit(OpKind::AllReduce(op), &[&sum], &[&sum]).and_then(|work| work.wait(None));
            assert!(matches!(outcome, Err(Error::Mismatch { .. })), "rank {me}: {outcome:?}");
            rank.sum(&sum).expect("they go on");
            // SAFETY: the memory lives until the end of the test.
            let refused = unsafe { Buffer::on_device(closed.bytes().ptr().to_bits(), 10, DType::F32, device) };
            let memory = if me == 1 { refused } else { exposed(&rank, &open, 10) };
            let error = rank.comm.window_register(memory).expect_err("rank 1's cannot be mapped").to_string();
            assert!(error.contains("rank 1") && error.contains("allocate from get_mem_allocator()"), "{error}");
            let part = Part::new(&rank, 10);
            give_each_other(&rank, &part, &source);
            rank.comm.window_deregister(part.id).expect("an end");
            rank.leave((part.memory, open, sum, closed, source));
        });
    });
}

#[test]
fn a_deregistration_spoils_no_capture_of_another_thread() {
    alone("window_hosts::a_deregistration_spoils_no_capture_of_another_thread", &[TWO_DEVICES], || {
        hosts_on(&[("a", 0), ("b", 1)], HINTS, |rank| {
            let (part, stream) = (Part::new(&rank, 10), Stream::new(&rank.context, 0).expect("a stream"));
            rank.comm.barrier().expect("all have registered");
            let [begun, over] = [(); 2].map(|()| Barrier::new(2));
            let outcome = std::thread::scope(|scope| {
                if rank.me() == 0 {
                    scope.spawn(|| {
                        let _current = rank.context.enter().expect("a context");
                        recording::begin(&stream, recording::Mode::Global);
                        begun.wait();
                        over.wait();
                        recording::end(&stream).expect("nothing has spoilt it");
                    });
                    begun.wait();
                }
                let outcome = rank.comm.window_deregister(part.id);
                rank.comm.barrier().expect("all have deregistered");
                if rank.me() == 0 {
                    over.wait();
                }
                outcome
            });
            assert_eq!(outcome, Ok(()));
            assert_eq!(Software::new().map_or(0, |software| software.breaches()), 0);
            rank.leave((part.memory, stream));
        });
    });
}

#[test]
fn a_forked_child_leaves_windows_of_other_hosts_alone() {
    alone("window_hosts::a_forked_child_leaves_windows_of_other_hosts_alone", &[&[]], || {
        hosts("ab", HINTS, |rank| {
            let (part, source) = (Part::new(&rank, 10), rank.memory(&data(rank.me(), 10)));
            rank.comm.barrier().expect("all have registered");
            if rank.me() == 0 {
                // SAFETY: the child touches nothing whose lock another thread may hold: all wait.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: it ends this process if that hangs.
                    unsafe { libc::alarm(20) };
                    drop(rank.comm);
                    // SAFETY: it ends this process, and nothing else.
                    unsafe { libc::_exit(0) };
                }
                let mut status = 0;
                // SAFETY: the child is this process's, and there is a place for the status.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 0));
            }
            rank.comm.barrier().expect("all are there");
            give_each_other(&rank, &part, &source);
            rank.comm.window_deregister(part.id).expect("an end");
            rank.leave((part.memory, source));
        });
    });
}
