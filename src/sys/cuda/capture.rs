//! Captures of streams in graphs: what this thread may do meanwhile, and what lives as long as a graph.
#![allow(unsafe_code, reason = "calls the driver")]

use std::ffi::c_void;
use std::marker::PhantomData;

use cudarc::driver::sys::{CUgraph, CUuserObject};

use super::context::{Context, Current};
use super::device::Device;
use super::error::CudaError;
use super::functions::call;
use super::stream::{Capture, Stream, StreamHandle};
use crate::sync::{Arc, AtomicBool, Ordering};

/// While it lives, no call of this thread spoils a capture, of whichever thread: to allocate memory or to load kernels does
/// otherwise.
#[derive(Debug)]
pub struct Relaxed {
    before: u32,
    _of_this_thread: PhantomData<*const ()>,
}

impl Relaxed {
    /// From now on.
    pub fn enter() -> Result<Relaxed, CudaError> {
        Ok(Relaxed { before: exchange(RELAXED)?, _of_this_thread: PhantomData })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        if let Err(error) = exchange(self.before) {
            log::warn!("calls of this thread go on to spoil no captures: {error}");
        }
    }
}

/// Sets which calls this thread may make during captures. What it was before.
fn exchange(mode: u32) -> Result<u32, CudaError> {
    let mut mode = mode;
    // SAFETY: `mode` is a place for what it was, and one of the driver's modes.
    unsafe { call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)) }?;
    Ok(mode)
}

impl StreamHandle {
    /// Whether its operations are being recorded for a graph, or were until something spoilt that.
    pub fn is_captured(self) -> Result<bool, CudaError> {
        let context = Context::primary(Device::new(self.device())?)?;
        let current = context.enter()?;
        Ok(Stream::of_caller(&context, self).capture(&current)? != Capture::Off)
    }
}

impl Stream {
    /// Whether its operations are being recorded.
    pub fn capture(&self, _: &Current<'_>) -> Result<Capture, CudaError> {
        Ok(self.captures()?.0)
    }

    /// Has a mark set when the graph that it is being recorded for is gone, with all that was made of it, and no replay runs
    /// any more. If this fails, the mark may be set now.
    ///
    /// # Panics
    /// When it is not being recorded.
    pub fn mark_end_of_graph(&self, _: &Current<'_>, mark: &Arc<AtomicBool>) -> Result<(), CudaError> {
        let (capture, graph) = self.captures()?;
        assert!(matches!(capture, Capture::Active(_)), "{capture:?}");
        let mut object: CUuserObject = std::ptr::null_mut();
        let data = Arc::into_raw(mark.clone());
        // SAFETY: `object` is a place for the result. The driver calls the function once, with a reference to the mark that is
        // its own from now on.
        let made = unsafe {
            call!(cuUserObjectCreate(&raw mut object, data.cast_mut().cast(), set_mark, 1, NO_DESTRUCTOR_SYNC))
        };
        if let Err(error) = made {
            // SAFETY: nobody else has taken it.
            drop(unsafe { Arc::from_raw(data) });
            return Err(error);
        }
        // SAFETY: both live; the graph takes over the only reference.
        let kept = unsafe { call!(cuGraphRetainUserObject(graph, object, 1, MOVE)) };
        if kept.is_err() {
            // SAFETY: its reference is still this function's.
            unsafe { call!(cuUserObjectRelease(object, 1)) }?;
        }
        kept
    }

    /// Whether its operations are being recorded, and in which graph.
    fn captures(&self) -> Result<(Capture, CUgraph), CudaError> {
        let (mut status, mut id, mut graph) = (0, 0, std::ptr::null_mut());
        let (dependencies, count) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: three places for results, and null for those that are not wanted.
        unsafe {
            call!(cuStreamGetCaptureInfo_v2(
                self.raw,
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                dependencies,
                count
            ))
        }?;
        let capture = match status {
            0 => Capture::Off,
            1 => Capture::Active(id),
            _ => Capture::Spoilt,
        };
        Ok((capture, graph))
    }
}

/// Called by a thread of the driver, which must not call the driver.
unsafe extern "C" fn set_mark(mark: *mut c_void) {
    // SAFETY: `mark_end_of_graph` has left this reference for here.
    let mark = unsafe { Arc::from_raw(mark.cast_const().cast::<AtomicBool>()) };
    // Partner: who frees what the graph has used. The driver has seen all replays end before.
    mark.store(true, Ordering::Release);
}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: u32 = 2;
/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`.
const NO_DESTRUCTOR_SYNC: u32 = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`.
const MOVE: u32 = 1;
