//! A worker, and its endpoints to peers: what reads of memory and messages have in common.
#![allow(unsafe_code, reason = "calls a library in C")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use super::context::Context;
use super::functions::{
    BUSY, EndpointAttributes, EndpointParams, Functions, IN_PROGRESS, OK, RawEndpoint, RawWorker, RequestParams,
    Status, TransportEntry, WorkerParams, status_of,
};
use super::library::{UcxError, Version};
use crate::sync::{Arc, AtomicBool, AtomicU32, Ordering};
use crate::sys::fork::Private;

/// What bytes to a peer go through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// UCX's name of the way, such as `tcp` or `rc_mlx5`.
    pub transport: String,
    /// The device, such as `eth0` or `mlx5_0:1`.
    pub device: String,
}

impl Device {
    /// Whether it is an RDMA device, which reads by itself what a peer has.
    pub fn is_rdma(&self) -> bool {
        RDMA.contains(&self.transport.as_str())
    }

    /// Whether what it has taken may wait in this process for a processor's time.
    pub fn is_software(&self) -> bool {
        !self.is_rdma() && !self.is_shared_memory() && !COPIERS.contains(&self.transport.as_str())
    }

    /// Whether this version of UCX reads a peer's memory through it without that process's help. Elsewhere the peer's UCX answers, which
    /// can end the peer's process (`check_devices` of `rdma/ucx.rs`).
    pub fn reads_alone(&self, version: Version) -> bool {
        self.is_rdma() || (self.is_cma() && version >= Version::READS_BY_CMA)
    }

    /// Whether it is the system's calls that read and write other processes' memory.
    pub fn is_cma(&self) -> bool {
        self.transport == "cma"
    }

    /// Whether it is shared memory.
    pub fn is_shared_memory(&self) -> bool {
        SHARED_MEMORY.contains(&self.transport.as_str())
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.transport, self.device)
    }
}

/// Those of InfiniBand and RoCE. `ud` reads nothing by itself, and `srd` (EFA) does so on some devices only.
const RDMA: [&str; 3] = ["rc_verbs", "rc_mlx5", "dc_mlx5"];

const SHARED_MEMORY: [&str; 3] = ["posix", "sysv", "xpmem"];

/// Those that copy between processes within a call, or within one process.
const COPIERS: [&str; 3] = ["cma", "knem", "self"];

/// A worker. One thread at a time uses it and its endpoints.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) context: Arc<Context>,
    raw: RawWorker,
    events: RawFd,
    _private: Private,
}

// SAFETY: whoever has it uses it alone, which is its thread mode.
unsafe impl Send for Worker {}

impl Worker {
    pub(super) fn new(context: &Arc<Context>) -> Result<Worker, UcxError> {
        let (ucx, functions) = (context.ucx(), context.ucx().functions());
        let (params, mut raw) = (WorkerParams::serialized(), null_mut());
        // SAFETY: the context lives, and the structure says which of its fields count.
        let status = unsafe { (functions.worker_create)(context.raw(), &raw const params, &raw mut raw) };
        ucx.check("ucp_worker_create", status)?;
        let mut events: c_int = -1;
        // SAFETY: the worker was just made, of a context with the feature of wake-ups.
        let status = unsafe { (functions.worker_get_efd)(raw, &raw mut events) };
        let private = ucx.check("ucp_worker_get_efd", status).and_then(|()| {
            // SAFETY: a descriptor of the worker, which stays open as long as that.
            let private = Private::new(unsafe { BorrowedFd::borrow_raw(events) });
            private.map_err(|cause| UcxError::Call { call: "fstat", reason: cause.to_string() })
        });
        let private = private.inspect_err(|_| {
            // SAFETY: made above, and used by nobody.
            unsafe { (functions.worker_destroy)(raw) };
        })?;
        Ok(Worker { context: context.clone(), raw, events, _private: private })
    }

    pub(super) fn functions(&self) -> &Functions {
        self.context.ucx().functions()
    }

    pub(super) fn raw(&self) -> RawWorker {
        self.raw
    }

    /// By which peers connect endpoints of theirs.
    pub(super) fn address(&self) -> Result<Vec<u8>, UcxError> {
        let (mut packed, mut len) = (null_mut::<c_void>(), 0);
        // SAFETY: the worker lives, and it writes to a pointer and a number, which live.
        let status = unsafe { (self.functions().worker_get_address)(self.raw, &raw mut packed, &raw mut len) };
        self.context.ucx().check("ucp_worker_get_address", status)?;
        // SAFETY: the library made so many bytes there, which stay until they are released below.
        let address = unsafe { std::slice::from_raw_parts(packed.cast::<u8>(), len) }.to_vec();
        // SAFETY: made by the call above, and not used any more.
        unsafe { (self.functions().worker_release_address)(self.raw, packed) };
        Ok(address)
    }

    /// Goes on with what is under way, as far as that is possible now, and for a while at most. True: something moved.
    pub(super) fn progress(&self) -> bool {
        for turn in 0..PROGRESS_MAX {
            // SAFETY: the worker lives, and is used by this thread alone.
            if unsafe { (self.functions().worker_progress)(self.raw) } == 0 {
                return turn > 0;
            }
        }
        true
    }

    /// Whether this thread may sleep until the [descriptor](AsFd) is readable. Otherwise there is progress to make first.
    pub(super) fn arm(&self) -> Result<bool, UcxError> {
        // SAFETY: the worker lives, and is used by this thread alone.
        match unsafe { (self.functions().worker_arm)(self.raw) } {
            BUSY => Ok(false),
            status => self.context.ucx().check("ucp_worker_arm", status).map(|()| true),
        }
    }

    /// How a request that was not freed does; one that is null has ended well.
    pub(super) fn status(&self, request: *mut c_void) -> Status {
        if request.is_null() {
            return OK;
        }
        // SAFETY: a request that was not freed.
        unsafe { (self.functions().request_check_status)(request) }
    }

    /// Frees a request that has ended.
    pub(super) fn free(&self, request: *mut c_void) {
        if !request.is_null() {
            // SAFETY: it has ended, and is freed once.
            unsafe { (self.functions().request_free)(request) };
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and its endpoints are closed or given up.
        unsafe { (self.functions().worker_destroy)(self.raw) };
    }
}

impl AsFd for Worker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the worker's, which stays open as long as the worker.
        unsafe { BorrowedFd::borrow_raw(self.events) }
    }
}

/// Whether and how an endpoint has failed, as its handler notes.
#[derive(Debug, Default)]
struct Failure {
    /// The negative status.
    status: AtomicU32,
    /// Set too, for whoever looks after many endpoints.
    any: Arc<AtomicBool>,
}

/// An endpoint of a worker to one peer. Its owner closes it before the worker ends.
#[derive(Debug)]
pub(super) struct Link {
    raw: RawEndpoint,
    failure: Arc<Failure>,
}

// SAFETY: a handle that is used with its worker alone.
unsafe impl Send for Link {}

impl Link {
    /// An endpoint to the worker with this address. `any` is set when it fails.
    pub(super) fn to(worker: &Worker, address: &[u8], any: &Arc<AtomicBool>) -> Result<Link, UcxError> {
        let failure = Arc::new(Failure { status: AtomicU32::new(0), any: any.clone() });
        let address = padded(address);
        let argument = Arc::as_ptr(&failure).cast_mut().cast();
        let params = EndpointParams::to(address.as_ptr().cast(), note_failure, argument);
        let mut raw = null_mut();
        // SAFETY: the address is what the library of a trusted peer packed, and zeros behind it; the handler's argument
        // lives until the endpoint is closed, and for ever if that fails.
        let status = unsafe { (worker.functions().ep_create)(worker.raw, &raw const params, &raw mut raw) };
        worker.context.ucx().check("ucp_ep_create", status)?;
        Ok(Link { raw, failure })
    }

    pub(super) fn raw(&self) -> RawEndpoint {
        self.raw
    }

    /// What bytes go through.
    pub(super) fn devices(&self, worker: &Worker) -> Vec<Device> {
        let mut entries = [TransportEntry { transport: null(), device: null() }; DEVICES_MAX];
        let mut attributes = EndpointAttributes::transports(&mut entries);
        // SAFETY: the endpoint lives, and `entries` has as much room as the structure says.
        if unsafe { (worker.functions().ep_query)(self.raw, &raw mut attributes) } != OK {
            return Vec::new();
        }
        let count = (attributes.num_entries as usize).min(DEVICES_MAX);
        let read = |text: *const c_char| {
            // SAFETY: the library's own text, which stays as long as the endpoint and ends with NUL.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let device =
            |entry: &TransportEntry| Some(Device { transport: read(entry.transport)?, device: read(entry.device)? });
        let mut devices: Vec<Device> = Vec::new();
        for device in entries[..count].iter().filter_map(device) {
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        devices
    }

    /// Why it has failed, if it has.
    pub(super) fn failure(&self, worker: &Worker) -> Option<UcxError> {
        // Relaxed: the handler runs in the progress of the thread that asks.
        match self.failure.status.load(Ordering::Relaxed).cast_signed() {
            OK => None,
            status => Some(worker.context.ucx().failed("the connection", status)),
        }
    }

    /// Ends it without waiting for the peer, so that nothing goes on that was under way. False: it did not end, and what it
    /// uses must never be freed.
    pub(super) fn close(self, worker: &Worker) -> bool {
        // UCX queues the failure of an endpoint for the next progress, which crashes (1.22) if the endpoint is closed by then.
        worker.progress();
        let params = RequestParams::forced();
        // SAFETY: the endpoint lives, and is not used after this.
        let closing = unsafe { (worker.functions().ep_close)(self.raw, &raw const params) };
        let request = status_of(closing).err().unwrap_or(null_mut());
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        while worker.status(request) == IN_PROGRESS && Instant::now() < deadline {
            worker.progress();
        }
        let is_closed = worker.status(request) != IN_PROGRESS;
        if is_closed {
            worker.free(request);
        } else {
            // The handler may still be called.
            std::mem::forget(self.failure);
        }
        worker.progress();
        is_closed
    }
}

/// Notes with which status an endpoint has failed.
///
/// # Safety
/// `argument` is the `failure` of an endpoint, which lives.
unsafe extern "C" fn note_failure(argument: *mut c_void, _: RawEndpoint, status: Status) {
    // SAFETY: as the caller says.
    let failure = unsafe { &*argument.cast::<Failure>() };
    failure.status.store(status.cast_unsigned(), Ordering::Relaxed);
    failure.any.store(true, Ordering::Relaxed);
}

/// Bytes that the library reads without being told their number: what it packed says that itself, and zeros end it.
pub(super) fn padded(packed: &[u8]) -> Vec<u8> {
    let mut padded = Vec::with_capacity(packed.len() + PADDING_BYTES);
    padded.extend_from_slice(packed);
    padded.resize(packed.len() + PADDING_BYTES, 0);
    padded
}

/// How much the library might read behind a key or address that is cut off: 64 parts of at most 256 bytes.
const PADDING_BYTES: usize = 64 * 256 + 1024;

/// More than any endpoint has.
const DEVICES_MAX: usize = 64;

/// How often progress is asked for in one call, so that its thread also gets to other things.
const PROGRESS_MAX: usize = 256;

/// How long the end of a connection may take, which takes no peer.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
