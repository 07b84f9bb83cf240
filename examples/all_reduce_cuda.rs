//! The gradients of `all_reduce.rs` in the memory of a GPU, by cudarc alone: each operation is put on a stream, behind the copy
//! that brings a rank's own gradient and before the one that fetches the average.
//!
//! ```sh
//! cargo run --example all_reduce_cuda    # starts two ranks by itself, on the first GPU
//! ```

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example that shows its result")]
#![allow(unsafe_code, reason = "lends memory and a stream of cudarc to the engine")]

mod ranks;

use std::error::Error;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtrMut};
use ncclx_rs::sys::cuda::Device;
use ncclx_rs::{
    Buffer, Buffers, Communicator, DType, Launch, LaunchError, Mode, Op, OpKind, ReduceOp, StreamHandle, Work,
};

/// The number of the GPU, which all ranks may share.
const DEVICE: u32 = 0;

fn main() {
    if let Err(error) = run() {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    // Without a driver cudarc panics, and this says so.
    Device::new(DEVICE)?;
    match Launch::from_env() {
        Ok(launch) => train(&launch),
        Err(LaunchError::Absent { .. }) => ranks::start(2),
        Err(error) => Err(error.into()),
    }
}

fn train(launch: &Launch) -> Result<(), Box<dyn Error>> {
    let comm = launch.communicator("world")?;
    let stream = CudaContext::new(DEVICE as usize)?.new_stream()?;
    let mut gradient: CudaSlice<f32> = stream.alloc_zeros(2)?;
    let x = launch.rank.0 as f32 / launch.size as f32;
    let y = 3.0 * x + 1.0;
    let (mut slope, mut intercept) = (0.0, 0.0);
    for _ in 0..500 {
        let error = slope * x + intercept - y;
        stream.memcpy_htod(&[error * x, error], &mut gradient)?;
        let work = average(&comm, &stream, &mut gradient)?;
        let average = stream.clone_dtoh(&gradient)?;
        // The stream has ended the operation, so this only asks whether it has failed: the result would be none then.
        work.wait(None)?;
        slope -= 0.5 * average[0];
        intercept -= 0.5 * average[1];
    }
    println!("rank {} of {}: y = {slope:.3} x + {intercept:.3}", launch.rank, launch.size);
    Ok(comm.shutdown()?)
}

/// Puts an all_reduce on the stream, and returns at once.
fn average(comm: &Communicator, stream: &Arc<CudaStream>, data: &mut CudaSlice<f32>) -> Result<Work, ncclx_rs::Error> {
    let len = data.len();
    let raw = stream.cu_stream().expose_provenance() as u64;
    // Orders what other streams do with the memory after this.
    let (address, _lent) = data.device_ptr_mut(stream);
    // SAFETY: the stream is of this device, and stays until its last operation is done, for which `train` waits.
    let handle = unsafe { StreamHandle::from_raw(raw, DEVICE) };
    // SAFETY: the memory has so many elements, stays as long as the stream, and what uses it next is on the same stream.
    let buffer = unsafe { Buffer::on_device(address, len, DType::F32, DEVICE) };
    let buffers = || Buffers::from_iter([buffer]);
    let (kind, mode) = (OpKind::AllReduce(ReduceOp::Avg), Mode::Stream(handle));
    comm.submit(Op { kind, inputs: buffers(), outputs: buffers(), timeout: None, mode })
}
