//! What ranks do together before their first operation on a device, and what becomes of it where that fails.

use std::time::Duration;

use ncclx_rs::comm::store::MemoryStore;
use ncclx_rs::sync::Arc;
use ncclx_rs::sys::cuda::{Context, Device, DeviceMemory, driver_version};
use ncclx_rs::{
    Buffer, CommOptions, Communicator, DType, Error, Mode, Op, OpKind, Rank, ReduceOp, StreamHandle, UsageError,
};

use crate::harness::{Software, alone, context, is_alone, not_run, program, watch};
use crate::ranks::{OnDevice, Process, data, of_processes, total, world_on};

/// Several segments, and a last one that is shorter.
const HINTS: &[(&str, &str)] = &[("device_staging_bytes", "65536")];
const LENGTHS: [usize; 3] = [1, 1000, 50_000];

type Settings = [(&'static str, &'static str)];

/// No device reaches the other's memory, and the host's memory has another address there.
const APART: &Settings = &[("SOFTCUDA_PEERS", "0"), ("SOFTCUDA_HOST_POINTERS_DIFFER", "1")];
const APART_LATE: &Settings = &[("SOFTCUDA_PEERS", "0"), ("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1")];
/// Of a process: ranks that are threads of one must not share it.
const IN_ONE_QUEUE: &Settings = &[("SOFTCUDA_QUEUES", "1")];
const LATE: &Settings = &[("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1"), ("SOFTCUDA_HOST_POINTERS_DIFFER", "1")];

/// Adds, moves and waits; the results are right.
fn collectives(rank: OnDevice) {
    let (me, size) = (rank.me(), rank.comm.size());
    let memory = LENGTHS.map(|len| rank.memory(&data(me, len)));
    let all = LENGTHS.map(|len| rank.memory(&vec![0.0; size * len]));
    for (len, (memory, all)) in LENGTHS.into_iter().zip(memory.iter().zip(&all)) {
        let expected: Vec<f32> = (0..size).flat_map(|rank| data(rank, len)).collect();
        let work = rank.submit(OpKind::AllGather, &[memory], &[all]).expect("a work");
        rank.sum(memory).expect("a sum");
        assert_eq!(work.wait(None), Ok(()));
        assert_eq!(rank.values(all), expected, "{len} on rank {me} of {size}");
        assert_eq!(rank.values(memory), total(size, len), "{len} on rank {me} of {size}");
    }
    rank.leave((memory, all));
}

#[test]
fn ranks_as_threads_work_on_one_device_and_on_two() {
    let settings: &[&Settings] = &[&[], LATE, APART, APART_LATE];
    alone("setup::ranks_as_threads_work_on_one_device_and_on_two", settings, || {
        let several = Device::count().expect("devices") > 1;
        let devices: &[&[u32]] = &[&[0], &[0, 0], &[0; 4], &[0, 1], &[1, 0], &[0, 0, 0, 1], &[0, 1, 0, 1]];
        for devices in devices.iter().filter(|devices| several || !devices.contains(&1)) {
            world_on(devices, HINTS, collectives);
        }
    });
}

#[test]
fn ranks_as_processes_work_on_one_device_and_on_two() {
    const TEST: &str = "setup::ranks_as_processes_work_on_one_device_and_on_two";
    if is_alone(TEST) {
        let process = Process::new(TEST);
        let several = Device::count().expect("devices") > 1;
        for (number, apart) in [false, true].into_iter().filter(|apart| several || !apart).enumerate() {
            let device = u32::from(apart && process.rank.index() == process.size - 1);
            collectives(process.join(&format!("group {number}"), device, HINTS));
        }
        return;
    }
    if context().is_none() {
        return;
    }
    for settings in [&[], LATE, APART, APART_LATE, IN_ONE_QUEUE] {
        for size in [1, 2, 4] {
            of_processes(TEST, &vec![settings; size]);
        }
    }
}

/// Whether what keeps ranks from their setup passes.
#[derive(Clone, Copy, PartialEq)]
enum Obstacle {
    /// The next call tries again, and sets up.
    Passes,
    /// It is the same at each call.
    Stays,
}

/// What an operation on a device of a communicator ends with that could not be set up, while the CPU's half works on. Nothing is
/// left. Then what the next one does.
fn refused(process: &Process, obstacle: Obstacle) -> String {
    let software = Software::new().expect("asked for before");
    let rank = process.join("refused", 0, HINTS);
    let memory = rank.memory(&data(rank.me(), 10));
    let living = software.living();
    let error = rank.sum(&memory).expect_err("a rank cannot");
    assert!(!matches!(error, Error::Timeout { .. }), "{error}");
    let expected = (1..=process.size).sum::<usize>() as f32;
    assert_eq!(rank.sum_on_the_cpu(), Ok(expected));
    assert_eq!(software.living(), living, "{error}");
    match obstacle {
        Obstacle::Stays => {
            assert_eq!(rank.sum(&memory).expect_err("as before"), error);
            let barrier = rank.submit(OpKind::Barrier, &[], &[]).map(|_| ());
            assert_eq!(barrier, Err(error.clone()), "of any operation");
            assert_eq!(software.living(), living, "{error}");
        }
        Obstacle::Passes => {
            rank.sum(&memory).expect("all try again");
            assert_eq!(rank.values(&memory), total(process.size, 10));
        }
    }
    rank.leave(memory);
    error.to_string()
}

/// Each of three ranks has its settings, and gets an error with all of these words.
fn all_are_told(test: &str, settings: &[&Settings; 3], obstacle: Obstacle, words: &[&str]) {
    if is_alone(test) {
        let error = refused(&Process::new(test), obstacle);
        assert!(words.iter().all(|word| error.contains(word)), "{words:?} are not all in: {error}");
        return;
    }
    if context().is_none() || Software::new().is_none() {
        return;
    }
    of_processes(test, &settings.map(|own| own));
}

#[test]
fn a_device_without_memory_is_named_on_all_ranks() {
    const TEST: &str = "setup::a_device_without_memory_is_named_on_all_ranks";
    let full = &[("SOFTCUDA_FAULT", "cuMemCreate:1")];
    let words = ["rank 1", "cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", "device_staging_bytes"];
    all_are_told(TEST, &[&[], full, &[]], Obstacle::Passes, &words);
}

#[test]
fn an_old_driver_is_named_on_all_ranks() {
    const TEST: &str = "setup::an_old_driver_is_named_on_all_ranks";
    let old = &[("SOFTCUDA_DRIVER_VERSION", "11080")];
    all_are_told(TEST, &[&[], &[], old], Obstacle::Stays, &["rank 2", "CUDA 11.8", "update the driver"]);
}

#[test]
fn a_device_that_does_not_say_what_it_can_is_named_on_all_ranks() {
    const TEST: &str = "setup::a_device_that_does_not_say_what_it_can_is_named_on_all_ranks";
    let mute = &[("SOFTCUDA_FAULT", "cuDeviceGetUuid_v2:1")];
    all_are_told(TEST, &[mute, &[], &[]], Obstacle::Passes, &["rank 0", "cuDeviceGetUuid_v2"]);
}

#[test]
fn words_that_a_device_does_not_take_are_named_on_all_ranks() {
    const TEST: &str = "setup::words_that_a_device_does_not_take_are_named_on_all_ranks";
    let closed = &[("SOFTCUDA_FAULT", "cuMemHostRegister_v2:1")];
    let words = ["rank 1", "cuMemHostRegister_v2", "the words"];
    all_are_told(TEST, &[&[], closed, &[]], Obstacle::Passes, &words);
}

#[test]
fn what_the_executor_lacks_is_named_on_all_ranks() {
    const TEST: &str = "setup::what_the_executor_lacks_is_named_on_all_ranks";
    // The first events are the setup's.
    let poor = &[("SOFTCUDA_FAULT", "cuEventCreate:1")];
    all_are_told(TEST, &[&[], &[], poor], Obstacle::Passes, &["rank 2", "cuEventCreate"]);
}

/// Ranks of which the second, or each, finds no compiler: what reduces is refused alike on all of them, and all else works.
fn without_a_compiler(test: &str, settings: &[&Settings], lacks: &str) {
    if !is_alone(test) {
        if context().is_some() {
            of_processes(test, settings);
        }
        return;
    }
    let process = Process::new(test);
    let rank = process.join("no compiler", 0, HINTS);
    let (me, size) = (rank.me(), rank.comm.size());
    let [own, all] = [rank.memory(&data(me, 10)), rank.memory(&vec![0.0; 10 * size])];
    let moves = || {
        rank.submit(OpKind::AllGather, &[&own], &[&all]).and_then(|work| work.wait(None)).expect("nothing is reduced");
        assert_eq!(rank.values(&all), (0..size).flat_map(|rank| data(rank, 10)).collect::<Vec<_>>());
        let barrier = rank.submit(OpKind::Barrier, &[], &[]).and_then(|work| work.wait(None));
        assert_eq!(barrier, Ok(()));
    };
    moves();
    for _ in 0..2 {
        let error = rank.sum(&own).expect_err("a compiler is missing");
        assert!(!matches!(error, Error::Timeout { .. } | Error::Remote { .. }), "{error}");
        let text = error.to_string();
        let words = ["all_reduce", lacks, "need NVRTC", "pip install nvidia-cuda-nvrtc"];
        assert!(words.iter().all(|word| text.contains(word)), "{words:?} are not all in: {text}");
        assert_eq!(rank.values(&own), data(me, 10), "nothing was put on the stream");
        moves();
    }
    assert_eq!(rank.sum_on_the_cpu(), Ok((1..=size).sum::<usize>() as f32));
    rank.leave([own, all]);
}

/// The folder of the software CUDA itself has none, and is found without this.
const NO_COMPILER: &Settings = &[("LD_LIBRARY_PATH", ""), ("SOFTCUDA_DEVICES", "2")];

#[test]
fn a_rank_without_a_compiler_has_all_refuse_reductions() {
    let test = "setup::a_rank_without_a_compiler_has_all_refuse_reductions";
    without_a_compiler(test, &[&[], NO_COMPILER, &[]], "rank 1: reductions");
}

#[test]
fn ranks_without_a_compiler_refuse_reductions_and_move() {
    let test = "setup::ranks_without_a_compiler_refuse_reductions_and_move";
    without_a_compiler(test, &[NO_COMPILER; 2], "rank 0: reductions");
}

#[test]
fn ranks_of_a_process_without_a_compiler_move() {
    alone("setup::ranks_of_a_process_without_a_compiler_move", &[NO_COMPILER], || {
        world_on(&[0, 0], HINTS, |rank| {
            let memory = rank.memory(&data(0, 10));
            let broadcast = || rank.submit(OpKind::Broadcast { root: Rank(0) }, &[&memory], &[&memory]);
            broadcast().and_then(|work| work.wait(None)).expect("nothing is reduced");
            let error = rank.sum(&memory).expect_err("a compiler is missing").to_string();
            assert!(error.contains("rank 0: reductions of CUDA tensors need NVRTC"), "{error}");
            broadcast().and_then(|work| work.wait(None)).expect("nothing is reduced");
            rank.leave(memory);
        });
    });
}

#[test]
fn a_tensor_on_another_device_is_refused_and_nothing_else_happens() {
    let test = "setup::a_tensor_on_another_device_is_refused_and_nothing_else_happens";
    alone(test, &[&[]], || {
        if Device::count().expect("devices") < 2 {
            not_run("there is one device");
            return;
        }
        world_on(&[0, 0], HINTS, |rank| {
            let memory = rank.memory(&data(rank.me(), 10));
            rank.sum(&memory).expect("a sum");
            let context = Context::primary(Device::new(1).expect("a device")).expect("a context");
            let elsewhere = DeviceMemory::new(&context, 4).expect("memory");
            let buffer = |device| {
                // SAFETY: it is kept until the end.
                unsafe { Buffer::on_device(elsewhere.bytes().ptr().to_bits(), 1, DType::F32, device) }
            };
            let submit = |buffer: Buffer, device| {
                // SAFETY: nothing is put there.
                let mode = Mode::Stream(unsafe { StreamHandle::from_raw(rank.stream.to_raw(), device) });
                let (inputs, outputs) = ([buffer].into_iter().collect(), [buffer].into_iter().collect());
                let kind = OpKind::AllReduce(ReduceOp::Sum);
                rank.comm.submit(Op { kind, inputs, outputs, timeout: None, mode })
            };
            let outcome = submit(buffer(1), 1);
            let Err(Error::Usage(UsageError { expected, got, .. })) = &outcome else { panic!("{outcome:?}") };
            assert!(expected.contains("cuda:0") && got.contains("cuda:1"), "{expected}, {got}");
            let outcome = submit(buffer(1), 0);
            let Err(Error::Usage(usage)) = &outcome else { panic!("{outcome:?}") };
            let text = usage.to_string();
            assert!(text.contains("cuda:0") && text.contains("cuda:1"), "{text}");
            rank.sum(&memory).expect("a sum");
            rank.comm.barrier().expect("all are there");
            drop(elsewhere);
            rank.leave(memory);
        });
    });
}

#[test]
fn without_a_driver_the_error_says_what_is_missing() {
    const TEST: &str = "setup::without_a_driver_the_error_says_what_is_missing";
    if !is_alone(TEST) {
        let output = program(TEST).env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH").output().expect("a process");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    watch(TEST);
    if driver_version().is_ok() {
        not_run("there is a driver");
        return;
    }
    let store = Arc::new(MemoryStore::default());
    std::thread::scope(|scope| {
        for rank in (0..2).map(Rank::from) {
            let store = store.clone();
            scope.spawn(move || {
                let timeout = Some(Duration::from_secs(60));
                let name = "none".to_owned();
                let options = CommOptions { name, rank, size: 2, store, timeout, hints: Default::default() };
                let comm = Communicator::new(options).expect("a communicator");
                // SAFETY: nobody looks at it, since there is no driver.
                let mode = Mode::Stream(unsafe { StreamHandle::from_raw(0, 0) });
                let (inputs, outputs) = (Default::default(), Default::default());
                let outcome = comm.submit(Op { kind: OpKind::Barrier, inputs, outputs, timeout: None, mode });
                let error = outcome.expect_err("there is no driver").to_string();
                assert!(error.contains("communicator `none`: CUDA on rank 0") && error.contains("libcuda"), "{error}");
                comm.barrier().expect("the CPU's half works");
                comm.shutdown().expect("an end");
            });
        }
    });
}
