//! AMD's devices, on the software HIP of tests/softcuda/hip: HIP in CUDA's place, RCCL, and worlds of both.

use std::time::Duration;

use ncclx_rs::sys::cuda::{DeviceMemory, Provider, driver_version, provider};
use ncclx_rs::sys::nccl::Vendor;
use ncclx_rs::{Buffer, DType, Error, Mode, Op, OpKind, Rank, ReduceOp, Source, StreamHandle, Tag};

use crate::harness::{Software, alone, calls_of, captured, is_alone, not_run};
use crate::ranks::{OnDevice, Process, data, hosts_on, of_processes, total, world_on};
use crate::vendor::all_collectives;
use crate::vendor_graphs::all_in_a_graph;

const FOUR: (&str, &str) = ("SOFTCUDA_DEVICES", "4");
/// Only with this do streams of the software HIP wait for words.
const WAITS: (&str, &str) = ("SOFTHIP_WAITS", "1");

/// What a process preloads so that its devices are HIP's; nothing where there is no software HIP.
pub(crate) fn preload() -> Option<String> {
    let Some((home, _)) = std::env::var("SOFTCUDA_HOME").ok().zip(Software::new()) else {
        not_run("there is no software HIP");
        return None;
    };
    let others = std::env::var("LD_PRELOAD").unwrap_or_default();
    Some(format!("{home}/hip/libamdhip64.so.7 {others}"))
}

/// Runs `body` in a process of its own, whose devices are HIP's.
fn on_hip(test: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    if is_alone(test) {
        return alone(test, &[], body);
    }
    let Some(preload) = preload() else { return };
    let settings = [settings, &[FOUR, ("LD_PRELOAD", &preload)]].concat();
    alone(test, &[&settings], body);
}

#[test]
fn a_process_has_the_devices_of_the_library_that_it_has_loaded() {
    on_hip("hip::a_process_has_the_devices_of_the_library_that_it_has_loaded", &[], || {
        assert_eq!(provider(), Ok(Provider::Hip));
        assert_eq!(driver_version().expect("a driver").to_string(), "7.1");
    });
    if !is_alone("hip::a_process_has_the_devices_of_the_library_that_it_has_loaded") && Software::new().is_some() {
        assert_eq!(provider(), Ok(Provider::Cuda));
    }
}

/// An all_reduce of whole numbers by a bitwise operation, which no vendor's library has.
fn bitwise(rank: &OnDevice, memory: &DeviceMemory) -> Result<(), Error> {
    let device = rank.context.device().ordinal();
    // SAFETY: the caller keeps the memory, and a test its stream, until the end.
    let buffer = || unsafe { Buffer::on_device(memory.bytes().ptr().to_bits(), 10, DType::I32, device) };
    // SAFETY: as above.
    let mode = Mode::Stream(unsafe { StreamHandle::from_raw(rank.stream.to_raw(), device) });
    let kind = OpKind::AllReduce(ReduceOp::BitAnd);
    let op = Op { kind, inputs: [buffer()].into(), outputs: [buffer()].into(), timeout: None, mode };
    rank.comm.submit(op)?.wait(None)
}

#[test]
fn amds_devices_have_rccl_without_a_word() {
    // Streams wait for no word here: the software HIP would refuse it.
    on_hip("hip::amds_devices_have_rccl_without_a_word", &[], || {
        world_on(&[0, 1, 2], &[], |rank| {
            all_collectives(&rank, 1000);
            let memory = rank.memory(&[1.0; 10]);
            let error = bitwise(&rank, &memory).expect_err("RCCL has none").to_string();
            assert!(error.contains("all_reduce") && error.contains("RCCL has no such operation"), "{error}");
            assert!(error.ends_with("engine=streams takes them all the same"), "{error}");
            rank.sum(&memory).expect("they go on");
            assert_eq!(rank.values(&memory), [3.0; 10]);
            let (me, copy) = (Rank::from(rank.me()), rank.memory(&[0.0; 10]));
            let to_itself = [
                rank.op(&rank.stream, OpKind::Send { to: me, tag: Tag(0) }, &[&memory], &[], None),
                rank.op(&rank.stream, OpKind::Recv { from: Source::Rank(me), tag: Tag(0) }, &[], &[&copy], None),
            ];
            rank.comm.submit_batch(&to_itself).expect("a work").wait(None).expect("it needs no other rank");
            assert_eq!(rank.values(&copy), [3.0; 10]);
            all_in_a_graph(&rank, 100, |what| calls_of(Vendor::Rccl, what));
            let outcome = captured(rank.stream.to_raw(), || bitwise(&rank, &memory));
            let error = outcome.expect_err("RCCL has none in graphs either").to_string();
            assert!(error.contains("all_reduce") && error.contains("RCCL has no such operation"), "{error}");
            // SAFETY: it stays until the end.
            let exposed =
                unsafe { Buffer::on_device(memory.bytes().ptr().to_bits(), 10, DType::F32, rank.me() as u32) };
            let error = rank.comm.window_register(exposed).expect_err("RCCL has none").to_string();
            assert!(error.contains("window_register: ") && error.contains("engine=streams"), "{error}");
            rank.leave(memory);
        });
        let [nccl, streams] = [("engine", "nccl"), ("engine", "streams")];
        world_on(&[0, 1], &[nccl], |rank| {
            let memory = rank.memory(&[1.0]);
            let error = rank.sum(&memory).expect_err("it is another vendor's").to_string();
            assert!(error.contains("which NCCL does not serve: take engine=rccl"), "{error}");
            rank.leave(memory);
        });
        // Where streams really cannot wait, each rank is told which call has failed.
        world_on(&[0, 1], &[streams], |rank| {
            let memory = rank.memory(&[1.0]);
            let error = rank.sum(&memory).expect_err("its streams wait for no word").to_string();
            assert!(error.contains("hipStreamBatchMemOp failed: HIP's error NOT_SUPPORTED (801)"), "{error}");
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn programs_for_streams_run_where_they_are_asked_for() {
    on_hip("hip::programs_for_streams_run_where_they_are_asked_for", &[WAITS], || {
        let streams = [("engine", "streams")];
        world_on(&[0, 1, 2], &streams, |rank| {
            all_collectives(&rank, 1000);
            let memory = rank.memory(&[f32::from_bits(7); 10]);
            bitwise(&rank, &memory).expect("a kernel that hipRTC has compiled");
            rank.leave(memory);
        });
        hosts_on(&[("a", 0), ("a", 1), ("b", 2)], &streams, |rank| {
            all_collectives(&rank, 300);
            rank.leave(());
        });
    });
}

#[test]
fn ranks_with_devices_of_both_vendors_work_together() {
    const NAME: &str = "hip::ranks_with_devices_of_both_vendors_work_together";
    if !is_alone(NAME) {
        if let Some(preload) = preload() {
            let [cuda, hip]: [&[_]; 2] = [&[FOUR], &[FOUR, WAITS, ("LD_PRELOAD", &preload)]];
            of_processes(NAME, &[cuda, hip, cuda, hip]);
        }
        return;
    }
    let process = Process::new(NAME);
    let me = process.rank.0;
    assert_eq!(provider(), Ok(if me.is_multiple_of(2) { Provider::Cuda } else { Provider::Hip }));
    let refused = process.join("auto", me, &[]);
    let memory = refused.memory(&[1.0]);
    let error = refused.sum(&memory).expect_err("no library serves both").to_string();
    assert!(error.contains("rank 0 is one of CUDA, and that of rank 1 one of HIP"), "{error}");
    refused.leave(memory);
    let refused = process.join("windows", me, &[]);
    refused.comm.set_timeout(Duration::from_secs(30));
    let memory = refused.memory(&[1.0]);
    // SAFETY: it stays until the end.
    let exposed = unsafe { Buffer::on_device(memory.bytes().ptr().to_bits(), 1, DType::F32, me) };
    let error = refused.comm.window_register(exposed).expect_err("no library serves both").to_string();
    assert!(error.contains("rank 0 is one of CUDA, and that of rank 1 one of HIP"), "{error}");
    refused.leave(memory);
    // On one host, where their tensors go through its memory, and on one for each vendor.
    for (name, host) in [("one host", "one"), ("two hosts", ["nvidia", "amd"][me as usize % 2])] {
        let rank = process.join(name, me, &[("engine", "streams"), ("host_id", host)]);
        all_collectives(&rank, 700);
        rank.leave(());
    }
}

/// The sum of gradients of all ranks, and more, where each rank has them where it has.
fn reduce_gradients(process: &Process, name: &str, host: &str, device: Option<u32>) {
    let hints = [("engine", "host"), ("host_id", host)];
    let me = process.rank.index();
    let (size, len) = (process.size, 10_000);
    let expected = total(size, len);
    let block = len / size;
    let Some(device) = device else {
        let comm = process.join_without_device(name, &hints);
        let (mut gradients, mut own) = (data(me, len), vec![0.0; block]);
        comm.reduce_scatter(&mut own[..], &gradients[..], ReduceOp::Sum).expect("a sum");
        assert_eq!(own, expected[me * block..][..block]);
        comm.all_reduce(&mut gradients[..], ReduceOp::Sum).expect("a sum");
        assert_eq!(gradients, expected);
        let mut all = vec![0.0; len];
        comm.all_gather(&mut all[..], &own[..]).expect("all");
        assert_eq!(all, expected);
        comm.send(&own[..], Rank(0), Tag(5)).expect("it is received");
        let error = comm.all_reduce(&mut [1.0f64][..], ReduceOp::Sum).expect_err("others call something else");
        assert!(error.to_string().contains("float32") && error.to_string().contains("float64"), "{error}");
        comm.barrier().expect("they go on");
        return comm.shutdown().expect("an end");
    };
    let rank = process.join(name, device, &hints);
    rank.comm.prepare_device(device).expect("nothing to prepare");
    let run = |kind: OpKind, input: &DeviceMemory, output: &DeviceMemory| {
        rank.submit(kind, &[input], &[output]).expect("a work").wait(None).expect("success");
    };
    let (gradients, own) = (rank.memory(&data(me, len)), rank.memory(&vec![0.0; block]));
    run(OpKind::ReduceScatter(ReduceOp::Sum), &gradients, &own);
    assert_eq!(rank.values(&own), expected[me * block..][..block]);
    run(OpKind::AllReduce(ReduceOp::Sum), &gradients, &gradients);
    assert_eq!(rank.values(&gradients), expected);
    let all = rank.memory(&vec![0.0; len]);
    run(OpKind::AllGather, &own, &all);
    assert_eq!(rank.values(&all), expected);
    if me == 0 {
        let received = rank.memory(&vec![0.0; block]);
        let kind = OpKind::Recv { from: Source::Rank(Rank::from(size - 1)), tag: Tag(5) };
        rank.submit(kind, &[], &[&received]).expect("a work").wait(None).expect("success");
        assert_eq!(rank.values(&received), expected[(size - 1) * block..]);
    }
    let error = rank.sum(&own).expect_err("one calls something else").to_string();
    assert!(error.contains("float32") && error.contains("float64"), "{error}");
    rank.leave((gradients, own, all));
}

#[test]
fn gradients_of_both_vendors_devices_and_of_a_cpu_add_up() {
    const NAME: &str = "hip::gradients_of_both_vendors_devices_and_of_a_cpu_add_up";
    if !is_alone(NAME) {
        if let Some(preload) = preload() {
            let [cuda, hip]: [&[_]; 2] = [&[FOUR], &[FOUR, ("LD_PRELOAD", &preload)]];
            of_processes(NAME, &[cuda, cuda, hip, hip, &[("LD_PRELOAD", "")]]);
        }
        return;
    }
    let process = Process::new(NAME);
    let me = process.rank.0;
    let device = (me < 4).then_some(me);
    if let Some(device) = device {
        assert_eq!(provider(), Ok(if device < 2 { Provider::Cuda } else { Provider::Hip }));
    }
    let host = ["nvidia", "nvidia", "amd", "amd", "cpu"][me as usize];
    reduce_gradients(&process, "one host", "one", device);
    reduce_gradients(&process, "three hosts", host, device);
}

#[test]
fn what_only_other_engines_have_is_refused_through_the_host() {
    alone("hip::what_only_other_engines_have_is_refused_through_the_host", &[&[FOUR]], || {
        world_on(&[0, 1], &[("engine", "host")], |rank| {
            all_collectives(&rank, 500);
            let memory = rank.memory(&[1.0; 10]);
            // SAFETY: it stays until the end.
            let exposed =
                unsafe { Buffer::on_device(memory.bytes().ptr().to_bits(), 10, DType::F32, rank.me() as u32) };
            let error = rank.comm.window_register(exposed).expect_err("they are on devices").to_string();
            assert!(error.contains("engine=host has no windows in the memory of devices"), "{error}");
            let kind = OpKind::AllReduce(ReduceOp::PreMulSum(2.0));
            let op = rank.op(&rank.stream, kind, &[&memory], &[&memory], None);
            // SAFETY: it stays until the end.
            let factor = unsafe { Buffer::on_device(memory.bytes().ptr().to_bits(), 1, DType::F32, rank.me() as u32) };
            let error = rank.comm.submit_with_factor(op, factor).expect_err("on a device").to_string();
            assert!(error.contains("a factor that is a number of the host"), "{error}");
            let current = rank.context.enter().expect("a context");
            let outcome = captured(rank.stream.to_raw(), || rank.sum(&memory));
            drop(current);
            let error = outcome.expect_err("it would wait").to_string();
            assert!(error.contains("nothing in a CUDA graph can: take engine=streams"), "{error}");
            rank.sum(&memory).expect("they go on");
            assert_eq!(rank.values(&memory), [2.0; 10]);
            rank.leave(memory);
        });
    });
}
