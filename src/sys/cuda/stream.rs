//! Streams, events, and what is put on a stream.
#![allow(unsafe_code, reason = "calls the driver")]

use std::time::Duration;

use cudarc::driver::sys::{CUevent, CUstream};

use super::context::{Context, Current};
use super::error::{Code, CudaError};
use super::functions::call;
use super::memory::DeviceBytes;
use super::words::Batch;
use crate::sync::Arc;

/// A stream of a CUDA device, on which the caller has an operation put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamHandle {
    raw: u64,
    device: u32,
}

impl StreamHandle {
    /// The stream that the driver knows by `raw`; zero is the default stream.
    ///
    /// # Safety
    /// It is a stream of the primary context of this device, and lives until the operations on it have ended.
    pub unsafe fn from_raw(raw: u64, device: u32) -> StreamHandle {
        StreamHandle { raw, device }
    }

    /// The driver's number for it.
    pub fn to_raw(self) -> u64 {
        self.raw
    }

    /// The number of its device.
    pub fn device(self) -> u32 {
        self.device
    }
}

/// An order of operations on a device.
#[derive(Debug)]
pub struct Stream {
    pub(super) raw: CUstream,
    context: Arc<Context>,
    is_own: bool,
}

// SAFETY: a stream may be used by any thread.
unsafe impl Send for Stream {}
// SAFETY: the driver locks what calls change.
unsafe impl Sync for Stream {}

/// What tells a stream from all others of its process, also from those that are gone and had the same number, and from
/// those of other threads, which all call their own default stream by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamId(u64);

/// Whether a stream's operations are being recorded for a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capture {
    /// They run.
    Off,
    /// They are recorded, in the capture of this number: the same for all streams that take part in it.
    Active(u64),
    /// Something has spoiled the capture: it can only be ended.
    Spoilt,
}

impl Stream {
    /// A stream that does not wait for the default stream. Of two operations that could run the one of lower `priority` does.
    pub fn new(context: &Arc<Context>, priority: i32) -> Result<Stream, CudaError> {
        let mut raw = std::ptr::null_mut();
        let _current = context.enter()?;
        // SAFETY: `raw` is a place for the result.
        unsafe { call!(cuStreamCreateWithPriority(&raw mut raw, NON_BLOCKING, priority)) }?;
        Ok(Stream { raw, context: context.clone(), is_own: true })
    }

    /// A stream that somebody else has made, by the driver's number for it: zero is the default stream.
    ///
    /// # Safety
    /// It is a stream of this context, and is not destroyed while self is used.
    pub unsafe fn from_raw(context: &Arc<Context>, raw: u64) -> Stream {
        let raw = std::ptr::with_exposed_provenance_mut(raw as usize);
        Stream { raw, context: context.clone(), is_own: false }
    }

    /// The default stream of a context.
    pub fn default_of(context: &Arc<Context>) -> Stream {
        // SAFETY: it is always there.
        unsafe { Stream::from_raw(context, 0) }
    }

    /// The stream on which a caller has an operation put.
    ///
    /// # Panics
    /// When it is a stream of another device.
    pub fn of_caller(context: &Arc<Context>, handle: StreamHandle) -> Stream {
        assert_eq!(handle.device(), context.device().ordinal(), "a stream of another device");
        // SAFETY: that is what the handle's maker promises.
        unsafe { Stream::from_raw(context, handle.to_raw()) }
    }

    /// The driver's number for it.
    pub fn to_raw(&self) -> u64 {
        self.raw.expose_provenance() as u64
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Waits until all of its operations are done. An error says that one of them has failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        // SAFETY: the stream lives as long as self.
        unsafe { call!(cuStreamSynchronize(self.raw)) }
    }

    /// Whether all of its operations are done. An error says that one of them has failed.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _current = self.context.enter()?;
        // SAFETY: the stream lives as long as self.
        match unsafe { call!(cuStreamQuery(self.raw)) } {
            Err(error) if error.code() == Some(Code::NotReady) => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// Copies device memory.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn copy(&self, _: &Current<'_>, from: DeviceBytes<'_>, into: DeviceBytes<'_>) -> Result<(), CudaError> {
        assert_eq!(from.len(), into.len());
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: both are device memory, which no reference is to; what frees it waits for this.
        unsafe { call!(cuMemcpyDtoDAsync_v2(into.ptr().0, from.ptr().0, from.len(), self.raw)) }
    }

    /// Does what is in a batch, in its order; in as few calls of the driver as that takes.
    pub fn submit(&self, _: &Current<'_>, batch: &mut Batch<'_>) -> Result<(), CudaError> {
        for operations in batch.operations.chunks_mut(Batch::LONGEST) {
            let (count, first) = (operations.len() as u32, operations.as_mut_ptr());
            // SAFETY: there are so many operations, each on a word of registered memory.
            unsafe { call!(cuStreamBatchMemOp_v2(self.raw, count, first, 0)) }?;
        }
        Ok(())
    }

    /// What comes next waits until an event's last record is reached.
    pub fn wait(&self, _: &Current<'_>, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live.
        unsafe { call!(cuStreamWaitEvent(self.raw, event.raw, 0)) }
    }

    /// Which one it is.
    pub fn id(&self, _: &Current<'_>) -> Result<StreamId, CudaError> {
        let mut id = 0;
        // SAFETY: `id` is a place for the result.
        unsafe { call!(cuStreamGetId(self.raw, &raw mut id)) }?;
        Ok(StreamId(id))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.is_own {
            // SAFETY: made in `new`; the driver ends it once its operations are done.
            self.context.give_back(|| unsafe { call!(cuStreamDestroy_v2(self.raw)) });
        }
    }
}

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// A place in a stream.
#[derive(Debug)]
pub struct Event {
    raw: CUevent,
    context: Arc<Context>,
}

// SAFETY: an event may be used by any thread.
unsafe impl Send for Event {}
// SAFETY: the driver locks what calls change.
unsafe impl Sync for Event {}

impl Event {
    /// An event that is nowhere yet: who waits for it goes on.
    pub fn new(context: &Arc<Context>) -> Result<Event, CudaError> {
        Event::with_flags(context, WITHOUT_TIMES)
    }

    fn with_flags(context: &Arc<Context>, flags: u32) -> Result<Event, CudaError> {
        let mut raw = std::ptr::null_mut();
        let _current = context.enter()?;
        // SAFETY: `raw` is a place for the result.
        unsafe { call!(cuEventCreate(&raw mut raw, flags)) }?;
        Ok(Event { raw, context: context.clone() })
    }

    /// Puts it behind everything that is on a stream.
    pub fn record(&self, _: &Current<'_>, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both live.
        unsafe { call!(cuEventRecord(self.raw, stream.raw)) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made in `new`; the driver keeps what still waits for it.
        self.context.give_back(|| unsafe { call!(cuEventDestroy_v2(self.raw)) });
    }
}

/// A moment of the device's clock: when a stream reaches a place.
#[derive(Debug)]
pub struct Moment(Event);

impl Moment {
    /// A moment of no stream yet.
    pub fn new(context: &Arc<Context>) -> Result<Moment, CudaError> {
        Event::with_flags(context, 0).map(Moment)
    }

    /// Takes the moment at which everything that is on a stream is done.
    pub fn record(&self, current: &Current<'_>, stream: &Stream) -> Result<(), CudaError> {
        self.0.record(current, stream)
    }

    /// How long before it `earlier` was; nothing if it is still to come. Both have been recorded, the earlier one first on the
    /// same stream. To half a microsecond.
    pub fn since(&self, _: &Current<'_>, earlier: &Moment) -> Result<Option<Duration>, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: both live, and `milliseconds` is a place for the result.
        let result = unsafe { call!(cuEventElapsedTime(&raw mut milliseconds, earlier.0.raw, self.0.raw)) };
        match result {
            Err(error) if error.code() == Some(Code::NotReady) => Ok(None),
            result => result.map(|()| Some(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))),
        }
    }
}

/// `CU_EVENT_DISABLE_TIMING`.
const WITHOUT_TIMES: u32 = 2;
