//! The driver by way of cudarc, whose dynamic loading takes the software CUDA for the real one: `make test-cuda` runs this.
//!
//! Exits with a panic at the first thing that differs from what a driver does.

use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DriverError, result, sys};
use std::ffi::{CString, c_void};
use std::sync::Arc;

use sys::CUresult::{CUDA_ERROR_INVALID_VALUE, CUDA_SUCCESS};

const PTX: &str = ".version 9.0\n.target sm_90\n places";

fn streams_and_events(context: &Arc<CudaContext>) -> Result<(), DriverError> {
    let (first, second) = (context.new_stream()?, context.new_stream()?);
    let source = first.clone_htod(&[1f32, 2.0, 3.0])?;
    let mut target = second.alloc_zeros::<f32>(3)?;
    let copied = first.record_event(None)?;
    second.wait(&copied)?;
    second.memcpy_dtod(&source, &mut target)?;
    assert_eq!(second.clone_dtoh(&target)?, [1.0, 2.0, 3.0]);
    Ok(())
}

/// The address of a slice, for calls that cudarc does not wrap.
fn address(stream: &CudaStream, slice: &impl DevicePtr<u32>) -> u64 {
    slice.device_ptr(stream).0
}

fn words(context: &Arc<CudaContext>) -> Result<(), DriverError> {
    let (writer, waiter) = (context.new_stream()?, context.new_stream()?);
    let memory = writer.alloc_zeros::<u32>(4)?;
    writer.synchronize()?;
    let word = address(&writer, &memory);
    // SAFETY: the streams and the memory live until the synchronisation below.
    let (waits, writes, refused) = unsafe {
        (
            sys::cuStreamWaitValue32_v2(waiter.cu_stream(), word, 5, 0),
            sys::cuStreamWriteValue32_v2(writer.cu_stream(), word, 5, 0),
            sys::cuStreamWriteValue32_v2(writer.cu_stream(), word + 2, 5, 0),
        )
    };
    assert_eq!((waits, writes, refused), (CUDA_SUCCESS, CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE));
    waiter.synchronize()?;
    assert_eq!(waiter.clone_dtoh(&memory)?[0], 5);
    Ok(())
}

fn graphs(context: &Arc<CudaContext>) -> Result<(), DriverError> {
    let stream = context.new_stream()?;
    let memory = stream.alloc_zeros::<u32>(1)?;
    stream.synchronize()?;
    let word = address(&stream, &memory);
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    // SAFETY: stream and memory outlive the graph.
    let captured = unsafe { sys::cuStreamWriteValue32_v2(stream.cu_stream(), word, 77, 0) };
    assert_eq!(captured, CUDA_SUCCESS);
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
    let graph = stream.end_capture(flags)?.expect("a graph with a node");
    assert_eq!(stream.clone_dtoh(&memory)?, [0]);
    graph.launch()?;
    assert_eq!(stream.clone_dtoh(&memory)?, [77]);
    Ok(())
}

fn kernels(context: &Arc<CudaContext>) -> Result<(), DriverError> {
    let stream = context.new_stream()?;
    let memory = stream.alloc_zeros::<u32>(8)?;
    let mut pointer = address(&stream, &memory);
    let image = CString::new(PTX).expect("no zero in it");
    let name = CString::new("places").expect("no zero in it");
    // SAFETY: the image is PTX with a zero at its end; the kernel takes one pointer, to memory that lives until the end.
    unsafe {
        let module = result::module::load_data(image.as_ptr().cast())?;
        let function = result::module::get_function(module, name)?;
        let mut parameters = [(&raw mut pointer).cast::<c_void>()];
        result::launch_kernel(function, (2, 1, 1), (4, 1, 1), 0, stream.cu_stream(), &mut parameters)?;
        stream.synchronize()?;
        result::module::unload(module)?;
    }
    assert_eq!(stream.clone_dtoh(&memory)?, [0, 1, 2, 3, 1000, 1001, 1002, 1003]);
    Ok(())
}

fn main() -> Result<(), DriverError> {
    // SAFETY: it only opens a library.
    assert!(unsafe { sys::is_culib_present() }, "there is no libcuda");
    let context = CudaContext::new(0)?;
    assert!(context.name()?.starts_with("Software CUDA"));
    assert_eq!(context.compute_capability()?, (9, 0));
    streams_and_events(&context)?;
    words(&context)?;
    graphs(&context)?;
    kernels(&context)?;
    // Memory goes back in the order of its stream: when that has come to it.
    context.synchronize()?;
    println!("cudarc works");
    Ok(())
}
