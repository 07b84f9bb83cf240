//! The driver behind its safe faces.

use std::ffi::c_void;
use std::os::fd::AsFd;

use ncclx_rs::sync::{Arc, Ordering};
use ncclx_rs::sys::cuda::{
    Attribute, Batch, Capture, Code, Context, CudaError, Device, DeviceBytes, DeviceMemory, DriverVersion, Event,
    Module, PointerInfo, RegisteredWords, SharedDeviceMemory, Stream, Width, copy_from_host, copy_to_host,
    driver_version,
};
use ncclx_rs::sys::words::SharedWords;

use crate::harness::{Software, alone, captured, context, not_run};

fn filled(context: &Arc<Context>, bytes: &[u8]) -> Result<DeviceMemory, CudaError> {
    let memory = DeviceMemory::new(context, bytes.len())?;
    copy_from_host(&context.enter()?, bytes, memory.bytes())?;
    Ok(memory)
}

fn content(context: &Arc<Context>, bytes: DeviceBytes<'_>) -> Result<Vec<u8>, CudaError> {
    let mut content = vec![0; bytes.len()];
    copy_to_host(&context.enter()?, bytes, &mut content)?;
    Ok(content)
}

#[test]
fn devices_say_what_they_are() -> Result<(), CudaError> {
    let Some(context) = context() else { return Ok(()) };
    assert!(driver_version()? >= DriverVersion { major: 12, minor: 0 });
    let devices: Vec<Device> = (0..Device::count()?).map(Device::new).collect::<Result<_, _>>()?;
    assert_eq!((devices[0], devices[0].ordinal()), (context.device(), 0));
    for (index, device) in devices.iter().enumerate() {
        assert!(!device.name()?.is_empty());
        assert!(
            device.attribute(Attribute::CapabilityMajor)? >= 5 && device.attribute(Attribute::Multiprocessors)? > 0
        );
        for other in &devices[..index] {
            assert_ne!(device.uuid()?, other.uuid()?);
            assert_eq!(device.reaches(*other)?, other.reaches(*device)?);
        }
    }
    let missing = Device::new(devices.len() as u32).expect_err("there is none of that number");
    assert_eq!(missing.to_string(), "cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE (101)");
    Ok(())
}

#[test]
fn a_device_can_say_that_it_lacks_something() {
    let lacking: &[(&str, &str)] = &[("SOFTCUDA_ATTRIBUTES", "122=0"), ("SOFTCUDA_DRIVER_VERSION", "12040")];
    alone("fence::a_device_can_say_that_it_lacks_something", &[lacking], || {
        let context = context().expect("the caller has seen one");
        if Software::new().is_none() {
            return;
        }
        assert_eq!(driver_version(), Ok(DriverVersion { major: 12, minor: 4 }));
        let device = context.device();
        assert_eq!(device.attribute(Attribute::WordsOf64Bits), Ok(0));
        for present in [Attribute::VirtualMemory, Attribute::MemoryAsDescriptor] {
            assert_eq!(device.attribute(present), Ok(1), "{present:?}");
        }
    });
}

#[test]
fn a_stream_goes_on_where_an_event_was_recorded() {
    let settings: &[&[(&str, &str)]] = &[&[("SOFTCUDA_DELAY_US", "2000")]];
    alone("fence::a_stream_goes_on_where_an_event_was_recorded", settings, || {
        let context = context().expect("the caller has seen one");
        let run = || -> Result<(), CudaError> {
            let (first, second) = (Stream::new(&context, 0)?, Stream::new(&context, -1)?);
            let copied = Event::new(&context)?;
            let (from, over, into) =
                (filled(&context, &[7; 100])?, filled(&context, &[0; 100])?, filled(&context, &[1; 100])?);
            let current = context.enter()?;
            first.copy(&current, from.bytes(), over.bytes())?;
            copied.record(&current, &first)?;
            second.wait(&current, &copied)?;
            second.copy(&current, over.bytes().part(0, 40), into.bytes().part(60, 40))?;
            second.synchronize()?;
            let expected = [&[1; 60][..], &[7; 40]].concat();
            assert_eq!(content(&context, into.bytes())?, expected);
            Ok(())
        };
        assert_eq!(run(), Ok(()));
    });
}

#[test]
fn a_stream_waits_for_words_and_writes_them() {
    let differ: &[(&str, &str)] = &[("SOFTCUDA_HOST_POINTERS_DIFFER", "1"), ("SOFTCUDA_GAP_US", "1000")];
    alone("fence::a_stream_waits_for_words_and_writes_them", &[&[], differ], || {
        let context = context().expect("the caller has seen one");
        for (width, above) in [(Width::Bits32, 0), (Width::Bits64, 1 << 40)] {
            let run = || -> Result<(), CudaError> {
                let words = Arc::new(SharedWords::new(300).expect("words"));
                let registered = RegisteredWords::new(&context, &words)?;
                let (stream, current) = (Stream::new(&context, 0)?, context.enter()?);
                let mut batch = Batch::new(width);
                batch.wait(registered.word(1), above + 5);
                // More than the driver takes at once.
                for index in 2..300 {
                    batch.write(registered.word(index), above + index as u64);
                }
                assert_eq!((batch.len(), batch.is_empty()), (299, false));
                stream.submit(&current, &mut batch)?;
                words.word(1).store(above + 4, Ordering::Release);
                assert_eq!(words.word(299).load(Ordering::Acquire), 0, "it has not waited");
                words.word(1).store(above + 6, Ordering::Release);
                stream.synchronize()?;
                let value = |index| words.word(index).load(Ordering::Acquire);
                assert!((2..300).all(|index| value(index) == above + index as u64));
                Ok(())
            };
            assert_eq!(run(), Ok(()), "{width:?}");
        }
    });
}

#[test]
fn exported_memory_outlives_its_maker() -> Result<(), CudaError> {
    let Some(context) = context() else { return Ok(()) };
    let memory = SharedDeviceMemory::new(&context, 1000)?;
    let (fd, len) = (memory.export()?, memory.bytes().len());
    assert!(len >= 1000);
    let imported = SharedDeviceMemory::import(&context, fd.as_fd(), len)?;
    copy_from_host(&context.enter()?, &[3; 1000], memory.bytes().part(0, 1000))?;
    drop(memory);
    assert_eq!(content(&context, imported.bytes().part(0, 1000))?, [3; 1000]);
    Ok(())
}

#[test]
fn the_driver_knows_whose_an_address_is() -> Result<(), CudaError> {
    let Some(context) = context() else { return Ok(()) };
    let (memory, ordinary) = (filled(&context, &[1; 64])?, [0u8; 64]);
    let current = context.enter()?;
    let info = PointerInfo::of(&current, memory.bytes().part(10, 1).ptr().to_bits())?.expect("it is known");
    assert_eq!((info.device, info.is_on_device), (0, true));
    let other = filled(&context, &[1; 64])?;
    let next = PointerInfo::of(&current, other.bytes().ptr().to_bits())?.expect("it is known");
    assert_ne!(info.allocation, next.allocation);
    assert_eq!(PointerInfo::of(&current, &raw const ordinary as u64)?, None);
    Ok(())
}

#[test]
fn a_stream_says_whether_it_is_captured() -> Result<(), CudaError> {
    let Some(context) = context() else { return Ok(()) };
    let own = Stream::new(&context, 0)?;
    // SAFETY: `own` lives longer.
    let stream = unsafe { Stream::from_raw(&context, own.to_raw()) };
    let current = stream.context().enter()?;
    assert_eq!(stream.capture(&current)?, Capture::Off);
    let captured = captured(own.to_raw(), || stream.capture(&current));
    assert!(matches!(captured?, Capture::Active(_)));
    assert_eq!(stream.capture(&current)?, Capture::Off);
    // SAFETY: the default stream is always there.
    let default = unsafe { Stream::from_raw(&context, 0) };
    assert_eq!(default.capture(&current)?, Capture::Off);
    Ok(())
}

/// PTX that names a kernel; the software CUDA runs its twin, which `make test-cuda` compiles.
const PTX: &[u8] =
    b".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry places(.param .u64 to) { ret; }\n\0";

#[test]
fn a_kernel_runs_on_a_stream() -> Result<(), CudaError> {
    let Some(context) = context() else { return Ok(()) };
    if std::env::var_os("SOFTCUDA_TWINS").is_none() {
        not_run("this kernel has only a twin");
        return Ok(());
    }
    // SAFETY: the image ends with a zero.
    let module = unsafe { Module::load(&context, PTX) }?;
    let unknown = module.function(c"absent").expect_err("there is none").code();
    assert_eq!(unknown, Some(Code::NotFound));
    let function = module.function(c"places")?;
    let (memory, stream) = (filled(&context, &[0; 32])?, Stream::new(&context, 0)?);
    let mut to = memory.bytes().ptr().to_bits();
    let parameters = &mut [(&raw mut to).cast::<c_void>()];
    // SAFETY: its one parameter is an address with room for a number a thread.
    unsafe { function.launch(&context.enter()?, &stream, 2, 4, parameters) }?;
    stream.synchronize()?;
    let numbers: Vec<u32> = content(&context, memory.bytes())?
        .chunks(4)
        .map(|bytes| u32::from_ne_bytes(bytes.try_into().expect("four bytes")))
        .collect();
    assert_eq!(numbers, [0, 1, 2, 3, 1000, 1001, 1002, 1003]);
    Ok(())
}

#[test]
#[should_panic(expected = "has no 41 bytes at 60")]
fn a_part_lies_inside_the_whole() {
    let Some(context) = context() else { panic!("has no 41 bytes at 60") };
    let memory = DeviceMemory::new(&context, 100).expect("memory");
    memory.bytes().part(60, 41);
}
