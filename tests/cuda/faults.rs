//! Every call of the driver fails once.

use std::os::fd::AsFd;
use std::time::Duration;

use ncclx_rs::sync::Arc;
use ncclx_rs::sys::cuda::{
    Attribute, Batch, Context, CudaError, Device, DeviceMemory, Event, Module, PointerInfo, RegisteredWords, Relaxed,
    SharedDeviceMemory, Stream, Width, copy_from_host, copy_to_host, driver_version,
};
use ncclx_rs::sys::words::SharedWords;
use ncclx_rs::{Error, OpKind, Rank, ReduceOp, Source, Tag};

use crate::harness::{Software, alone, context, is_alone};
use crate::ranks::{OnDevice, Process, data, of_processes};
use crate::recording::{Mode, begin, end};

/// Uses every call that needs no kernel.
fn exercise() -> Result<(), CudaError> {
    driver_version()?;
    assert!(Device::count()? > 0);
    let device = Device::new(0)?;
    device.name()?;
    device.uuid()?;
    device.attribute(Attribute::WordsOf64Bits)?;
    device.reaches(device)?;
    let context = Context::primary(device)?;
    let words = Arc::new(SharedWords::new(2).expect("words"));
    let registered = RegisteredWords::new(&context, &words)?;
    let (memory, shared) = (DeviceMemory::new(&context, 100)?, SharedDeviceMemory::new(&context, 100)?);
    let imported = SharedDeviceMemory::import(&context, shared.export()?.as_fd(), shared.bytes().len())?;
    let _relaxed = Relaxed::enter()?;
    let (stream, event) = (Stream::new(&context, 0)?, Event::new(&context)?);
    // SAFETY: the image ends with a zero.
    let _module = unsafe { Module::load(&context, b".version 9.0\n.target sm_90\n\0") }?;
    let current = context.enter()?;
    PointerInfo::of(&current, memory.bytes().ptr().to_bits())?;
    copy_from_host(&current, &[1; 100], memory.bytes())?;
    stream.capture(&current)?;
    stream.copy(&current, memory.bytes(), shared.bytes().part(0, 100))?;
    event.record(&current, &stream)?;
    stream.wait(&current, &event)?;
    let mut batch = Batch::new(Width::Bits64);
    batch.write(registered.word(0), 1);
    batch.wait(registered.word(0), 1);
    stream.submit(&current, &mut batch)?;
    stream.synchronize()?;
    copy_to_host(&current, imported.bytes().part(0, 100), &mut [0; 100])
}

/// Calls that give something back: where they fail it is lost, and the log says so.
const GIVE_BACK: &[&str] = &[
    "cuDevicePrimaryCtxRelease_v2",
    "cuEventDestroy_v2",
    "cuMemAddressFree",
    "cuMemFree_v2",
    "cuMemHostUnregister",
    "cuMemRelease",
    "cuMemUnmap",
    "cuModuleUnload",
    "cuStreamDestroy_v2",
    "cuThreadExchangeStreamCaptureMode",
];

/// What enters a context, and leaves it.
const ENTER: [&str; 2] = ["cuCtxGetCurrent", "cuCtxSetCurrent"];

/// Calls of the tests.
const OWN: &[&str] = &[
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
];

/// Calls that the software CUDA does not have fail.
const SURE: &[&str] = &["cuDriverGetVersion", "cuInit"];

#[test]
fn a_call_that_fails_is_named_and_nothing_leaks() {
    alone("faults::a_call_that_fails_is_named_and_nothing_leaks", &[&[]], || {
        let Some(software) = Software::new() else { return };
        exercise().expect("nothing fails");
        let (calls, living) = (software.calls(), software.living());
        assert!(calls.len() > 35, "{calls:?}");
        for call in calls.into_iter().filter(|call| !SURE.contains(&call.as_str())) {
            let before = software.uses(&call);
            exercise().expect("nothing fails");
            for number in 1..=software.uses(&call) - before {
                let (uses, living) = (software.uses(&call), software.living());
                software.plant(&call, uses + number);
                let result = exercise();
                match result {
                    Err(CudaError::Call { call: named, .. }) => assert_eq!(named, call),
                    // What gives something back enters the context, and does without if it must.
                    Ok(()) => {
                        assert!(
                            GIVE_BACK.contains(&call.as_str()) || ENTER.contains(&call.as_str()),
                            "{call} {number}"
                        );
                    }
                    Err(error) => panic!("{call}: {error}"),
                }
                if !GIVE_BACK.contains(&call.as_str()) {
                    assert_eq!(software.living(), living, "use {number} of {call}");
                }
            }
        }
        assert!(living <= software.living());
        exercise().expect("nothing fails any more");
    });
}

/// What a rank does after the setup: it adds twice, and puts another operation on the stream that nobody waits for.
fn operations(rank: &OnDevice, [memory, _]: &[DeviceMemory; 2]) -> Result<(), Error> {
    rank.sum(memory)?;
    let work = rank.submit(OpKind::AllReduce(ReduceOp::Max), &[memory], &[memory])?;
    rank.sum(memory)?;
    work.wait(None)
}

/// What a rank sends and receives: two batches with the other rank, and a message to itself.
fn messages(rank: &OnDevice, [memory, room]: &[DeviceMemory; 2]) -> Result<(), Error> {
    let (me, other) = (rank.me(), 1 - rank.me());
    let send = |to| rank.op(&rank.stream, send_to(to), &[memory], &[], None);
    let recv = |from| rank.op(&rank.stream, recv_from(from), &[], &[room], None);
    let first = rank.comm.submit_batch(&[send(other), recv(other)])?;
    rank.comm.submit_batch(&[recv(other), send(me), send(other), recv(me)])?.wait(None)?;
    first.wait(None)
}

fn send_to(to: usize) -> OpKind {
    OpKind::Send { to: Rank::from(to), tag: Tag(0) }
}

fn recv_from(from: usize) -> OpKind {
    OpKind::Recv { from: Source::Rank(Rank::from(from)), tag: Tag(0) }
}

/// As `operations`, the first in a graph. What fails on another rank shows at the latest at the second one.
fn replayed(rank: &OnDevice, [memory, _]: &[DeviceMemory; 2]) -> Result<(), Error> {
    begin(&rank.stream, Mode::Global);
    let captured = rank.sum(memory);
    let graph = end(&rank.stream).expect("what failed has not spoilt the capture");
    captured?;
    graph.replay(&rank.stream);
    rank.sum(memory)
}

/// What ranks do.
type Operations = fn(&OnDevice, &[DeviceMemory; 2]) -> Result<(), Error>;

/// Which part of a group's life a call fails in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Setup,
    Later,
    Capture,
}

/// A group of this name: what its operations on a device end with.
fn group(
    process: &Process,
    name: &str,
    (part, operations): (Part, Operations),
    before: impl FnOnce(),
    after: impl FnOnce(),
) -> Result<(), Error> {
    let software = Software::new().expect("asked for before");
    let rank = process.join(name, 0, &[("device_staging_bytes", "65536")]);
    rank.comm.set_timeout(Duration::from_secs(60));
    let memory = [rank.memory(&data(rank.me(), 100)), rank.memory(&[0.0; 100])];
    let living = software.living();
    let begun = match part {
        Part::Setup => Ok(()),
        Part::Later => operations(&rank, &memory),
        Part::Capture => rank.sum(&memory[0]),
    };
    assert_eq!(begun, Ok(()), "nothing has failed yet");
    rank.comm.barrier().expect("the CPU's half works");
    before();
    let outcome = if part == Part::Capture { replayed(&rank, &memory) } else { operations(&rank, &memory) };
    after();
    if let Err(error) = &outcome {
        assert!(!matches!(error, Error::Timeout { .. }), "{error}");
    }
    // What has failed stays so, or both ranks set up anew; so they end alike.
    let again = if part == Part::Capture { rank.sum(&memory[0]) } else { operations(&rank, &memory) };
    let mut ended_well = [i32::from(again.is_ok())];
    rank.comm.all_reduce(&mut ended_well, ReduceOp::Sum).expect("the CPU's half works");
    assert!(ended_well[0] != 1, "{again:?} after {outcome:?}");
    // Nothing is left of it once the stream has run out, and nobody hangs.
    rank.stream.synchronize().expect("a stream that runs out");
    assert_eq!(rank.sum_on_the_cpu(), Ok(3.0), "after {outcome:?}");
    rank.comm.shutdown().expect("an end");
    while software.living() > living {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(memory);
    outcome
}

/// Every call of the first rank's driver fails once, each in a group of its own.
fn every_call_fails(test: &str, part: (Part, Operations)) {
    if !is_alone(test) {
        if context().is_some() && Software::new().is_some() {
            of_processes(test, &[&[], &[]]);
        }
        return;
    }
    let process = Process::new(test);
    let software = Software::new().expect("asked for before");
    let control = process.join("control", 0, &[]).comm;
    // Kernels are loaded, and the second time shows what is called each time.
    group(&process, "first", part, || {}, || {}).expect("nothing fails");
    let uses = || software.calls().into_iter().map(|call| (software.uses(&call), call)).collect::<Vec<_>>();
    let (mut before, mut after) = (Vec::new(), Vec::new());
    group(&process, "second", part, || before = uses(), || after = uses()).expect("nothing fails");
    let mut faults: Vec<(String, u64)> = Vec::new();
    let is_spared = |call: &str| [SURE, GIVE_BACK, OWN].iter().any(|calls| calls.contains(&call));
    for (after, call) in after.into_iter().filter(|(_, call)| !is_spared(call)) {
        let earlier = before.iter().find(|(_, known)| *known == call).map_or(0, |(uses, _)| *uses);
        faults.extend((1..=after - earlier).map(|number| (call.clone(), number)));
    }
    let mut count = [faults.len() as i32];
    control.broadcast(&mut count, Rank(0)).expect("a number");
    let (mut failed, mut ended_before) = ([0], 0);
    for index in 0..count[0] {
        let fault = faults.get(index as usize).filter(|_| process.rank == Rank(0));
        let plant = || {
            if let Some((call, number)) = fault {
                software.plant(call, software.uses(call) + number);
            }
        };
        let outcome = group(&process, &format!("group {index}"), part, plant, || software.plant("cuInit", u64::MAX));
        let mut of_first = [i32::from(outcome.is_err())];
        control.broadcast(&mut of_first, Rank(0)).expect("a number");
        failed[0] += of_first[0];
        match (&outcome, fault) {
            (Err(error), Some((call, number))) => {
                assert!(error.to_string().contains(call.as_str()), "use {number} of {call}: {error}");
            }
            (Ok(()), Some((call, number))) => {
                // What gives something back enters the context, and does without if it must. Where it cannot be left, it stays.
                assert!(ENTER.contains(&call.as_str()), "use {number} of {call} has failed, and nothing else");
            }
            (Err(error), None) if of_first == [1] => assert!(error.to_string().contains("rank 0"), "{error}"),
            // A last operation may have ended here before the first rank failed in it.
            (Ok(()), None) if of_first == [1] => ended_before += 1,
            (outcome, None) => assert_eq!(*outcome, Ok(())),
        }
    }
    assert!(failed[0] >= 10, "{failed:?} of {count:?}");
    // After what the other rank waits for, the last operation has only its end on the stream: a write and an event.
    assert!(ended_before <= 4, "{ended_before} failures of the other rank went unnoticed here");
    control.shutdown().expect("an end");
}

#[test]
fn a_call_that_fails_in_the_setup_is_told_to_the_other_rank() {
    let what = (Part::Setup, operations as Operations);
    every_call_fails("faults::a_call_that_fails_in_the_setup_is_told_to_the_other_rank", what);
}

#[test]
fn a_call_that_fails_in_a_later_operation_is_told_to_the_other_rank() {
    let what = (Part::Later, operations as Operations);
    every_call_fails("faults::a_call_that_fails_in_a_later_operation_is_told_to_the_other_rank", what);
}

#[test]
fn a_call_that_fails_at_the_first_message_of_a_pair_is_told_to_its_other_rank() {
    let what = (Part::Setup, messages as Operations);
    every_call_fails("faults::a_call_that_fails_at_the_first_message_of_a_pair_is_told_to_its_other_rank", what);
}

#[test]
fn a_call_that_fails_in_a_later_message_is_told_to_the_other_rank() {
    let what = (Part::Later, messages as Operations);
    every_call_fails("faults::a_call_that_fails_in_a_later_message_is_told_to_the_other_rank", what);
}

#[test]
fn a_call_that_fails_in_a_capture_is_told_to_the_other_rank() {
    let what = (Part::Capture, replayed as Operations);
    every_call_fails("faults::a_call_that_fails_in_a_capture_is_told_to_the_other_rank", what);
}
