//! Every call of the driver fails once.

use std::os::fd::AsFd;

use ncclx_rs::sync::Arc;
use ncclx_rs::sys::cuda::{
    Attribute, Batch, Context, CudaError, Device, DeviceMemory, Event, Module, PointerInfo, RegisteredWords,
    SharedDeviceMemory, Stream, Width, copy_from_host, copy_to_host, driver_version,
};
use ncclx_rs::sys::words::SharedWords;

use crate::harness::{Software, alone};

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
    "cuCtxPopCurrent_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuEventDestroy_v2",
    "cuMemAddressFree",
    "cuMemFree_v2",
    "cuMemHostUnregister",
    "cuMemRelease",
    "cuMemUnmap",
    "cuModuleUnload",
    "cuStreamDestroy_v2",
];

/// Calls that the software CUDA does not have fail.
const SURE: &[&str] = &["cuDriverGetVersion", "cuInit"];

#[test]
fn a_call_that_fails_is_named_and_nothing_leaks() {
    alone("faults::a_call_that_fails_is_named_and_nothing_leaks", &[&[]], || {
        let Some(software) = Software::new() else {
            eprintln!("not run: only the software CUDA has calls fail");
            return;
        };
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
                        assert!(GIVE_BACK.contains(&call.as_str()) || call == "cuCtxPushCurrent_v2", "{call} {number}");
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
