//! Windows in device memory: accesses by streams, and what becomes of them when a rank does not do its part.

use std::time::Duration;

use ncclx_rs::device::allocator;
use ncclx_rs::sys::cuda::{SharedDeviceMemory, Stream, copy_from_host, copy_to_host};
use ncclx_rs::{Buffer, Buffers, DType, Error, Mode, Op, OpKind, Rank, ReduceOp, StreamHandle, WindowId, Work};

use crate::harness::{alone, context, is_alone};
use crate::ranks::{OnDevice, Process, data, of_processes, total, world, world_on};

/// Orders that are missing show under these.
pub(crate) const WEAK: &[(&str, &str)] = &[("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1")];
pub(crate) const TWO_DEVICES: &[(&str, &str)] =
    &[("SOFTCUDA_DEVICES", "2"), ("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1")];

/// A rank's part of a window.
pub(crate) struct Part {
    pub(crate) memory: SharedDeviceMemory,
    len: usize,
    pub(crate) id: WindowId,
}

impl Part {
    /// Memory for `len` elements, all of them -1, in a window.
    pub(crate) fn new(rank: &OnDevice, len: usize) -> Part {
        let memory = SharedDeviceMemory::new(&rank.context, (4 * len).max(1)).expect("memory");
        let begin: Vec<u8> = (0..len).flat_map(|_| (-1f32).to_ne_bytes()).collect();
        let current = rank.context.enter().expect("a context");
        copy_from_host(&current, &begin, memory.bytes().part(0, 4 * len)).expect("a copy");
        let id = rank.comm.window_register(exposed(rank, &memory, len)).expect("a window").id();
        Part { memory, len, id }
    }

    pub(crate) fn values(&self, rank: &OnDevice) -> Vec<f32> {
        let mut bytes = vec![0; 4 * self.len];
        rank.stream.synchronize().expect("a stream that ends");
        let current = rank.context.enter().expect("a context");
        copy_to_host(&current, self.memory.bytes().part(0, bytes.len()), &mut bytes).expect("a copy");
        bytes.chunks(4).map(|value| f32::from_ne_bytes(value.try_into().expect("four bytes"))).collect()
    }
}

pub(crate) fn exposed(rank: &OnDevice, memory: &SharedDeviceMemory, len: usize) -> Buffer {
    // SAFETY: tests keep memory until the end.
    unsafe { Buffer::on_device(memory.bytes().ptr().to_bits(), len, DType::F32, rank.context.device().ordinal()) }
}

pub(crate) fn put(part: &Part, to: usize, offset: usize) -> OpKind {
    OpKind::Put { window: part.id, to: Rank::from(to), offset: 4 * offset }
}

pub(crate) fn get(part: &Part, from: usize, offset: usize) -> OpKind {
    OpKind::Get { window: part.id, from: Rank::from(from), offset: 4 * offset }
}

pub(crate) fn signal(part: &Part, to: usize) -> OpKind {
    OpKind::Signal { window: part.id, to: Rank::from(to) }
}

pub(crate) fn wait_signal(part: &Part, from: usize) -> OpKind {
    OpKind::WaitSignal { window: part.id, from: Rank::from(from) }
}

/// Puts an operation without memory on another stream than the rank's own.
pub(crate) fn submit_on(rank: &OnDevice, stream: &Stream, kind: OpKind) -> Work {
    // SAFETY: the stream lives until the end of the test.
    let mode = Mode::Stream(unsafe { StreamHandle::from_raw(stream.to_raw(), rank.context.device().ordinal()) });
    let op = Op { kind, inputs: Buffers::new(), outputs: Buffers::new(), timeout: None, mode };
    rank.comm.submit(op).expect("a work")
}

pub(crate) fn do_now(rank: &OnDevice, kind: OpKind) -> Result<(), Error> {
    rank.submit(kind, &[], &[])?.wait(None)
}

/// Every rank puts a part into every other one's, again and again, and each of them says when it has read it.
pub(crate) fn exchange(rank: &OnDevice, size: usize) {
    let me = rank.me();
    let part = Part::new(rank, 1000 * size);
    let peers: Vec<usize> = (0..size).filter(|peer| *peer != me).collect();
    let copy = rank.memory(&vec![0.0; 1000 * size]);
    // To free memory waits for the device, which may wait for this rank: so it stays until the end, here and below.
    let mut kept = Vec::new();
    for round in 0..8 {
        let of = |from: usize, to: usize| data(1 + from * 5 + to * 3 + round, 1000);
        let sources: Vec<_> = (0..size).map(|to| rank.memory(&of(me, to))).collect();
        for (to, source) in sources.iter().enumerate() {
            rank.submit(put(&part, to, 1000 * me), &[source], &[]).expect("a put");
            rank.submit(signal(&part, to), &[], &[]).expect("a signal");
        }
        for from in 0..size {
            rank.submit(wait_signal(&part, from), &[], &[]).expect("a wait");
        }
        rank.submit(get(&part, me, 0), &[], &[&copy]).expect("a get").wait(None).expect("success");
        let expected: Vec<f32> = (0..size).flat_map(|from| of(from, me)).collect();
        assert_eq!(rank.values(&copy), expected, "round {round} on rank {me} of {size}");
        // The next round overwrites it.
        for peer in &peers {
            rank.submit(signal(&part, *peer), &[], &[]).expect("a signal");
        }
        for peer in &peers {
            rank.submit(wait_signal(&part, *peer), &[], &[]).expect("a wait");
        }
        kept.push(sources);
    }
    rank.comm.window_deregister(part.id).expect("an end");
}

#[test]
fn what_is_put_is_there_after_the_signal() {
    alone("windows::what_is_put_is_there_after_the_signal", &[&[], WEAK], || {
        for size in 1..=4 {
            world(size, &[], |rank| {
                exchange(&rank, size);
                rank.leave(());
            });
        }
    });
}

#[test]
fn devices_reach_windows_of_each_other() {
    alone("windows::devices_reach_windows_of_each_other", &[TWO_DEVICES], || {
        world_on(&[0, 1, 1], &[], |rank| {
            exchange(&rank, 3);
            rank.leave(());
        });
    });
}

#[test]
fn devices_that_do_not_reach_each_other_have_no_windows() {
    const APART: &[(&str, &str)] = &[("SOFTCUDA_DEVICES", "2"), ("SOFTCUDA_PEERS", "0")];
    alone("windows::devices_that_do_not_reach_each_other_have_no_windows", &[APART], || {
        world_on(&[0, 1, 1], &[], |rank| {
            let memory = SharedDeviceMemory::new(&rank.context, 40).expect("memory");
            let refused = || rank.comm.window_register(exposed(&rank, &memory, 10)).expect_err("they are apart");
            let error = refused();
            assert!(!matches!(error, Error::Timeout { .. } | Error::Closed { .. }), "{error}");
            let text = error.to_string();
            let expected = ["CUDA on rank 0: the memory of its window", "devices do not reach each other's memory"];
            assert!(expected.iter().all(|part| text.contains(part)), "{text}");
            assert_eq!(refused(), error, "each time");
            // All else goes on.
            let sum = rank.memory(&data(rank.me(), 10));
            rank.sum(&sum).expect("a sum");
            assert_eq!(rank.values(&sum), total(3, 10));
            let mut bytes = [0u8; 8];
            // SAFETY: the memory outlives the window, and nobody uses it.
            let host = unsafe { Buffer::from_raw(bytes.as_mut_ptr(), 8, DType::U8) };
            let hosts = rank.comm.window_register(host).expect("a window of the host").id();
            rank.comm.window_deregister(hosts).expect("an end");
            rank.leave((memory, sum));
        });
    });
}

#[test]
fn processes_reach_windows_of_each_other() {
    const NAME: &str = "windows::processes_reach_windows_of_each_other";
    if !is_alone(NAME) {
        if context().is_some() {
            let one_queue: &[(&str, &str)] = &[("SOFTCUDA_QUEUES", "1"), ("SOFTCUDA_DELAY_US", "50")];
            of_processes(NAME, &[WEAK, one_queue, &[]]);
        }
        return;
    }
    let process = Process::new(NAME);
    let rank = process.join("windows", 0, &[]);
    exchange(&rank, process.size);
    rank.leave(());
}

pub(crate) fn announce_on_another_stream(rank: OnDevice) {
    let other = Stream::new(&rank.context, 0).expect("a stream");
    let (part, len, mut kept) = (Part::new(&rank, 200_000), 200_000, Vec::new());
    for round in 0..20 {
        if rank.me() == 0 {
            let source = rank.memory(&data(round, len));
            rank.submit(put(&part, 1, 0), &[&source], &[]).expect("a put");
            submit_on(&rank, &other, signal(&part, 1));
            do_now(&rank, wait_signal(&part, 1)).expect("an answer");
            kept.push(source);
        } else {
            do_now(&rank, wait_signal(&part, 0)).expect("a signal");
            assert_eq!(part.values(&rank), data(round, len), "round {round}");
            do_now(&rank, signal(&part, 0)).expect("an answer");
        }
    }
    rank.comm.window_deregister(part.id).expect("an end");
    other.synchronize().expect("a stream that ends");
    rank.leave((part.memory, other, kept));
}

#[test]
fn a_signal_on_another_stream_announces_what_was_put_before() {
    alone("windows::a_signal_on_another_stream_announces_what_was_put_before", &[WEAK], || {
        world(2, &[], announce_on_another_stream);
    });
}

pub(crate) fn end_in_any_order(rank: OnDevice) {
    let (peer, other) = (1 - rank.me(), Stream::new(&rank.context, 0).expect("a stream"));
    let part = Part::new(&rank, 10);
    // Both wait first: neither wait holds up the signal, which is on another stream and is called later.
    let wait = submit_on(&rank, &other, wait_signal(&part, peer));
    do_now(&rank, signal(&part, peer)).expect("a signal");
    wait.wait(None).expect("the peer's");
    rank.comm.window_deregister(part.id).expect("an end");
    rank.leave((part.memory, other));
}

#[test]
fn accesses_on_several_streams_end_in_any_order() {
    alone("windows::accesses_on_several_streams_end_in_any_order", &[&[]], || {
        world(2, &[], end_in_any_order);
    });
}

pub(crate) fn many_accesses(rank: OnDevice) {
    let peer = 1 - rank.me();
    let (part, source) = (Part::new(&rank, 10), rank.memory(&data(3, 10)));
    let mut works = Vec::new();
    for _ in 0..1000 {
        works.push(rank.submit(put(&part, peer, 0), &[&source], &[]).expect("a put"));
        works.push(rank.submit(signal(&part, peer), &[], &[]).expect("a signal"));
    }
    for _ in 0..1000 {
        works.push(rank.submit(wait_signal(&part, peer), &[], &[]).expect("a wait"));
    }
    assert!(works.iter().all(|work| work.wait(None) == Ok(())));
    assert_eq!(part.values(&rank), data(3, 10));
    rank.comm.window_deregister(part.id).expect("an end");
    rank.leave((part.memory, source));
}

#[test]
fn many_accesses_are_submitted_before_anybody_waits() {
    alone("windows::many_accesses_are_submitted_before_anybody_waits", &[&[]], || {
        world(2, &[], many_accesses);
    });
}

pub(crate) fn come_and_go(rank: OnDevice) {
    let (peer, mut kept) = (1 - rank.me(), Vec::new());
    for round in 0..100 {
        let part = Part::new(&rank, 10);
        // Signals that nobody has waited for are not those of a later window.
        let own = rank.memory(&data(round + 50 * rank.me(), 10));
        rank.submit(put(&part, peer, 0), &[&own], &[]).expect("a put");
        do_now(&rank, signal(&part, peer)).expect("a signal");
        if round % 2 == 0 {
            do_now(&rank, signal(&part, peer)).expect("a signal");
        }
        do_now(&rank, wait_signal(&part, peer)).expect("a signal");
        assert_eq!(part.values(&rank), data(round + 50 * peer, 10), "round {round}");
        rank.comm.window_deregister(part.id).expect("an end");
        kept.push(own);
        let gone = do_now(&rank, signal(&part, peer)).expect_err("it is gone");
        assert!(gone.to_string().contains("expected a registered window"), "{gone}");
    }
    rank.leave(kept);
}

#[test]
fn windows_come_and_go() {
    alone("windows::windows_come_and_go", &[&[("SOFTCUDA_DELAY_US", "20")]], || {
        world(2, &[], come_and_go);
    });
}

pub(crate) fn too_many_windows(rank: OnDevice) {
    let parts: Vec<Part> = (0..64).map(|_| Part::new(&rank, 1)).collect();
    let memory = SharedDeviceMemory::new(&rank.context, 4).expect("memory");
    let error = rank.comm.window_register(exposed(&rank, &memory, 1)).expect_err("one too many").to_string();
    assert!(
        error.contains("64 windows are registered, or CUDA graphs have accesses to them, which is the most"),
        "{error}"
    );
    rank.comm.window_deregister(parts[9].id).expect("an end");
    let last = rank.comm.window_register(exposed(&rank, &memory, 1)).expect("room again").id();
    for id in parts.iter().map(|part| part.id).filter(|id| *id != parts[9].id).chain([last]) {
        rank.comm.window_deregister(id).expect("an end");
    }
    rank.leave((parts, memory));
}

#[test]
fn more_windows_than_there_are_words_for_are_an_error() {
    alone("windows::more_windows_than_there_are_words_for_are_an_error", &[&[]], || {
        world(2, &[], too_many_windows);
    });
}

pub(crate) fn memory_is_refused(rank: OnDevice) {
    let (own, open) = (rank.memory(&[0.0; 10]), SharedDeviceMemory::new(&rank.context, 40).expect("memory"));
    // SAFETY: the memory lives until the end of the test.
    let closed = unsafe { Buffer::on_device(own.bytes().ptr().to_bits(), 10, DType::F32, 0) };
    let memory = if rank.me() == 1 { closed } else { exposed(&rank, &open, 10) };
    let error = rank.comm.window_register(memory).expect_err("one rank's is not").to_string();
    let expected = "allocate from get_mem_allocator()";
    assert!(error.contains("rank 1") && error.contains(expected), "{error}");
    exchange(&rank, 3);
    rank.leave((own, open));
}

#[test]
fn memory_that_cannot_be_mapped_elsewhere_is_refused_on_all_ranks() {
    alone("windows::memory_that_cannot_be_mapped_elsewhere_is_refused_on_all_ranks", &[&[]], || {
        world(3, &[], memory_is_refused);
    });
}

pub(crate) fn expose_a_part(rank: OnDevice) {
    let address = allocator::allocate(8000, 0).expect("memory");
    // The middle of it. SAFETY: the memory is freed at the end.
    let middle = unsafe { Buffer::on_device(address + 4000, 100, DType::F32, 0) };
    let id = rank.comm.window_register(middle).expect("a window").id();
    let (source, copy) = (rank.memory(&data(7, 100)), rank.memory(&[0.0; 100]));
    let peer = Rank::from(1 - rank.me());
    let kind = OpKind::Put { window: id, to: peer, offset: 0 };
    rank.submit(kind, &[&source], &[]).expect("a put");
    do_now(&rank, OpKind::Signal { window: id, to: peer }).expect("a signal");
    do_now(&rank, OpKind::WaitSignal { window: id, from: peer }).expect("a signal");
    let kind = OpKind::Get { window: id, from: rank.comm.rank(), offset: 0 };
    rank.submit(kind, &[], &[&copy]).expect("a get").wait(None).expect("success");
    assert_eq!(rank.values(&copy), data(7, 100));
    rank.comm.window_deregister(id).expect("an end");
    allocator::free(address).expect("it is given back");
    assert!(allocator::free(address).is_err(), "once");
    rank.leave((source, copy));
}

#[test]
fn memory_of_the_allocator_is_exposed_in_parts() {
    alone("windows::memory_of_the_allocator_is_exposed_in_parts", &[&[]], || {
        world(2, &[], expose_a_part);
    });
}

pub(crate) fn what_does_not_fit(rank: OnDevice) {
    // Parts of different lengths.
    let part = Part::new(&rank, 10 * rank.me());
    let source = rank.memory(&data(1, 10));
    let refused = |kind, inputs: &[_], outputs: &[_]| rank.submit(kind, inputs, outputs).expect_err("refused");
    let beyond = refused(put(&part, 1, 1), &[&source], &[]).to_string();
    assert!(beyond.contains("exceeds the window size (40 bytes)"), "{beyond}");
    let none = refused(get(&part, 0, 0), &[], &[&source]).to_string();
    assert!(none.contains("exceeds the window size (0 bytes)"), "{none}");
    let stranger = refused(signal(&part, 2), &[], &[]).to_string();
    assert!(stranger.contains("a rank in [0, 2)"), "{stranger}");
    // A window of the host is none of the device, and the other way round.
    let mut bytes = [0u8; 8];
    // SAFETY: the memory outlives the window, and nobody uses it.
    let host = unsafe { Buffer::from_raw(bytes.as_mut_ptr(), 8, DType::U8) };
    let hosts = rank.comm.window_register(host).expect("a window").id();
    let misplaced = refused(OpKind::Signal { window: hosts, to: Rank(0) }, &[], &[]).to_string();
    assert!(misplaced.contains("expected a window in memory of cuda:0, got one of cpu"), "{misplaced}");
    let op = Op {
        kind: signal(&part, 0),
        inputs: Buffers::new(),
        outputs: Buffers::new(),
        timeout: None,
        mode: Mode::Blocking,
    };
    let misplaced = rank.comm.submit(op).expect_err("no stream").to_string();
    assert!(misplaced.contains("expected a window in memory of cpu, got one of cuda:0"), "{misplaced}");
    rank.comm.window_deregister(hosts).expect("an end");
    rank.comm.window_deregister(part.id).expect("an end");
    assert_eq!(part.values(&rank), vec![-1.0; 10 * rank.me()]);
    rank.leave((part.memory, source));
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_is_put() {
    alone("windows::what_does_not_fit_is_refused_and_nothing_is_put", &[&[]], || {
        world(2, &[], what_does_not_fit);
    });
}

pub(crate) fn different_memory(rank: OnDevice) {
    let (mut bytes, memory) = ([0u8; 40], SharedDeviceMemory::new(&rank.context, 40).expect("memory"));
    // SAFETY: the memory outlives the test, and nobody uses it.
    let host = unsafe { Buffer::from_raw(bytes.as_mut_ptr(), 40, DType::U8) };
    let own = if rank.me() == 0 { host } else { exposed(&rank, &memory, 10) };
    let error = rank.comm.window_register(own).expect_err("they differ");
    assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    assert!(error.to_string().contains("memory of a CUDA device"), "{error}");
    exchange(&rank, 2);
    rank.leave(memory);
}

#[test]
fn ranks_that_expose_different_kinds_of_memory_are_told() {
    alone("windows::ranks_that_expose_different_kinds_of_memory_are_told", &[&[]], || {
        world(2, &[], different_memory);
    });
}

pub(crate) fn no_signal(rank: OnDevice) {
    let (part, memory) = (Part::new(&rank, 10), rank.memory(&data(rank.me(), 10)));
    if rank.me() == 0 {
        let limit = Some(Duration::from_millis(300));
        let wait = rank.submit_within(wait_signal(&part, 2), &[], &[], limit).expect("a work");
        let later = rank.submit(signal(&part, 1), &[], &[]).expect("a work");
        let error = wait.wait(None).expect_err("nobody signals");
        assert!(matches!(&error, Error::Timeout { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("wait_signal(from rank 2, window") && text.contains("rank 2 did not signal"), "{text}");
        assert!(later.wait(None).is_err(), "what follows on the stream is spoiled");
        rank.stream.synchronize().expect("a stream that runs out");
    } else if rank.me() == 1 {
        // A signal that follows the failure is none.
        let error = do_now(&rank, wait_signal(&part, 0)).expect_err("rank 0 gave up").to_string();
        assert!(error.contains("rank 2 did not signal"), "{error}");
        rank.stream.synchronize().expect("a stream that runs out");
    }
    rank.comm.barrier().expect("the CPU's engine is not concerned");
    // Nothing more succeeds on the device.
    let sum = rank.sum(&memory).expect_err("what is moved may have come through the window");
    assert!(sum.to_string().contains("rank 2 did not signal"), "{sum}");
    assert!(do_now(&rank, signal(&part, 0)).is_err());
    rank.comm.barrier().expect("the CPU's engine is not concerned");
    rank.comm.abort("the test is over");
}

#[test]
fn a_signal_that_does_not_come_names_the_rank_and_the_stream_runs_out() {
    alone("windows::a_signal_that_does_not_come_names_the_rank_and_the_stream_runs_out", &[&[]], || {
        world(3, &[], no_signal);
    });
}

pub(crate) fn wait_for_one_that_leaves(rank: OnDevice) {
    let part = Part::new(&rank, 10);
    if rank.me() == 0 {
        rank.comm.abort("it had enough");
    } else {
        let error = rank.submit(wait_signal(&part, 0), &[], &[]).and_then(|work| work.wait(None));
        assert!(matches!(error, Err(Error::PeerLost { rank: 0, .. })), "{error:?}");
        rank.stream.synchronize().expect("a stream that runs out");
        rank.comm.abort("the test is over");
    }
}

#[test]
fn who_waits_for_a_rank_that_leaves_is_told() {
    alone("windows::who_waits_for_a_rank_that_leaves_is_told", &[&[]], || {
        world(2, &[], wait_for_one_that_leaves);
    });
}

pub(crate) fn end_before_the_other_leaves(rank: OnDevice) {
    let (part, source) = (Part::new(&rank, 10), rank.memory(&data(5, 10)));
    if rank.me() == 0 {
        rank.submit(put(&part, 1, 0), &[&source], &[]).expect("a put");
        do_now(&rank, signal(&part, 1)).expect("a signal");
        rank.comm.shutdown().expect("an end");
    } else {
        let work = rank.submit(wait_signal(&part, 0), &[], &[]).expect("a work");
        rank.stream.synchronize().expect("a signal");
        while rank.comm.loss().is_none() && !work.is_done() {
            std::thread::yield_now();
        }
        work.wait(None).expect("it had ended");
        assert_eq!(part.values(&rank), data(5, 10));
        rank.comm.shutdown().expect("an end");
    }
}

#[test]
fn what_has_ended_stays_a_success_when_the_other_rank_leaves() {
    alone("windows::what_has_ended_stays_a_success_when_the_other_rank_leaves", &[&[]], || {
        world(2, &[], end_before_the_other_leaves);
    });
}

pub(crate) fn collectives_and_accesses(rank: OnDevice) {
    let (me, size) = (rank.me(), 3);
    let (next, last) = ((me + 1) % size, (me + 2) % size);
    let (part, len, mut kept) = (Part::new(&rank, 1000), 1000, Vec::new());
    for _ in 0..10 {
        let (sum, own) = (rank.memory(&data(me, len)), rank.memory(&data(me, len)));
        rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&sum], &[&sum]).expect("a sum");
        rank.submit(put(&part, next, 0), &[&own], &[]).expect("a put");
        rank.submit(signal(&part, next), &[], &[]).expect("a signal");
        rank.submit(wait_signal(&part, last), &[], &[]).expect("a wait");
        assert_eq!(part.values(&rank), data(last, len));
        assert_eq!(rank.values(&sum), total(size, len));
        rank.submit(OpKind::Barrier, &[], &[]).expect("a barrier").wait(None).expect("all are there");
        kept.push((sum, own));
    }
    rank.comm.window_deregister(part.id).expect("an end");
    rank.leave((part.memory, kept));
}

#[test]
fn collectives_and_accesses_go_on_together() {
    alone("windows::collectives_and_accesses_go_on_together", &[WEAK], || {
        world(3, &[], collectives_and_accesses);
    });
}
