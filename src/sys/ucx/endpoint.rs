//! A connection to one peer: a worker with its one endpoint.
#![allow(unsafe_code, reason = "calls a library in C")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use super::context::{Context, RegisteredMemory};
use super::functions::{
    BUSY, EndpointAttributes, EndpointParams, Functions, IN_PROGRESS, OK, RawEndpoint, RawKey, RawWorker,
    RequestParams, Status, TransportEntry, WorkerParams, status_of,
};
use super::library::UcxError;
use crate::sync::{Arc, AtomicU32, Ordering};
use crate::sys::fork::Private;
use crate::sys::lent_bytes::LentBytes;

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

/// A connection to one peer, by which this process reads the peer's memory while the peer reads this one's. One thread at a time
/// uses it, and has to call [`Endpoint::progress`] again and again: otherwise neither side's reads go on.
///
/// The peer is trusted: over some devices, the library itself reads and writes what a peer names. Dropping it ends all reads.
pub struct Endpoint {
    context: Arc<Context>,
    worker: RawWorker,
    raw: RawEndpoint,
    /// The negative status with which it has failed.
    failure: Arc<AtomicU32>,
    gets: Vec<Get>,
    events: RawFd,
    _private: Private,
}

// SAFETY: whoever has it uses it alone, which is the thread mode of its worker.
unsafe impl Send for Endpoint {}

/// A read under way.
struct Get {
    token: u64,
    request: *mut c_void,
    key: RawKey,
    /// Where it writes to.
    _into: (Arc<LentBytes>, Arc<RegisteredMemory>),
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("is_connected", &!self.raw.is_null()).finish_non_exhaustive()
    }
}

impl Endpoint {
    /// An endpoint that is not connected.
    ///
    /// # Errors
    /// The system or a device refuses a resource.
    pub fn new(context: &Arc<Context>) -> Result<Endpoint, UcxError> {
        let (ucx, functions) = (context.ucx(), context.ucx().functions());
        let (params, mut worker) = (WorkerParams::serialized(), null_mut());
        // SAFETY: the context lives, and the structure says which of its fields count.
        let status = unsafe { (functions.worker_create)(context.raw(), &raw const params, &raw mut worker) };
        ucx.check("ucp_worker_create", status)?;
        let mut events: c_int = -1;
        // SAFETY: the worker was just made, of a context with the feature of wake-ups.
        let status = unsafe { (functions.worker_get_efd)(worker, &raw mut events) };
        let private = ucx.check("ucp_worker_get_efd", status).and_then(|()| {
            // SAFETY: a descriptor of the worker, which stays open as long as that.
            let private = Private::new(unsafe { BorrowedFd::borrow_raw(events) });
            private.map_err(|cause| UcxError::Call { call: "fstat", reason: cause.to_string() })
        });
        let private = private.inspect_err(|_| {
            // SAFETY: made above, and used by nobody.
            unsafe { (functions.worker_destroy)(worker) };
        })?;
        Ok(Endpoint {
            context: context.clone(),
            worker,
            raw: null_mut(),
            failure: Arc::default(),
            gets: Vec::new(),
            events,
            _private: private,
        })
    }

    fn functions(&self) -> &Functions {
        self.context.ucx().functions()
    }

    /// By which the peer connects its own endpoint.
    ///
    /// # Errors
    /// The library lacks memory.
    pub fn address(&self) -> Result<Vec<u8>, UcxError> {
        let (mut packed, mut len) = (null_mut::<c_void>(), 0);
        // SAFETY: the worker lives, and it writes to a pointer and a number, which live.
        let status = unsafe { (self.functions().worker_get_address)(self.worker, &raw mut packed, &raw mut len) };
        self.context.ucx().check("ucp_worker_get_address", status)?;
        // SAFETY: the library made so many bytes there, which stay until they are released below.
        let address = unsafe { std::slice::from_raw_parts(packed.cast::<u8>(), len) }.to_vec();
        // SAFETY: made by the call above, and not used any more.
        unsafe { (self.functions().worker_release_address)(self.worker, packed) };
        Ok(address)
    }

    /// Connects to the endpoint with this address. The peer connects to this one's, too.
    ///
    /// # Errors
    /// No device reaches it.
    ///
    /// # Panics
    /// It is connected already.
    pub fn connect(&mut self, address: &[u8]) -> Result<(), UcxError> {
        assert!(self.raw.is_null(), "an endpoint connects once");
        let address = padded(address);
        let argument = Arc::as_ptr(&self.failure).cast_mut().cast();
        let params = EndpointParams::to(address.as_ptr().cast(), note_failure, argument);
        let mut raw = null_mut();
        // SAFETY: the address is what the library of a trusted peer packed, and zeros behind it; the handler's argument
        // lives longer than the worker, which alone calls it.
        let status = unsafe { (self.functions().ep_create)(self.worker, &raw const params, &raw mut raw) };
        self.context.ucx().check("ucp_ep_create", status)?;
        self.raw = raw;
        Ok(())
    }

    /// What bytes go through; nothing before it is connected.
    pub fn devices(&self) -> Vec<Device> {
        if self.raw.is_null() {
            return Vec::new();
        }
        let mut entries = [TransportEntry { transport: null(), device: null() }; DEVICES_MAX];
        let mut attributes = EndpointAttributes::transports(&mut entries);
        // SAFETY: the endpoint lives, and `entries` has as much room as the structure says.
        if unsafe { (self.functions().ep_query)(self.raw, &raw mut attributes) } != OK {
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

    /// Lets peers read the bytes, by the key of what is returned.
    ///
    /// # Errors
    /// A device refuses.
    pub fn register(&self, bytes: &LentBytes) -> Result<Arc<RegisteredMemory>, UcxError> {
        RegisteredMemory::of(&self.context, bytes)
    }

    /// Begins to read `len` bytes at `address` of the peer, which the peer's [`RegisteredMemory::key`] opens, to `offset` of
    /// `into`. [`Endpoint::progress`] tells the end by the token.
    ///
    /// # Errors
    /// The memory cannot be registered, or the peer cannot be reached.
    ///
    /// # Panics
    /// The bytes are not all inside `into`, or it is not connected.
    pub fn get(
        &mut self,
        token: u64,
        (address, key): (u64, &[u8]),
        (into, offset, len): (&Arc<LentBytes>, usize, usize),
    ) -> Result<(), UcxError> {
        assert!(!self.raw.is_null(), "an endpoint that is connected");
        let registered = RegisteredMemory::of(&self.context, into)?;
        let (target, packed) = (into.at(offset, len), padded(key));
        let mut key = null_mut();
        // SAFETY: the key is what the library of a trusted peer packed, and zeros behind it; the endpoint lives.
        let status = unsafe { (self.functions().rkey_unpack)(self.raw, packed.as_ptr().cast(), &raw mut key) };
        self.context.ucx().check("ucp_ep_rkey_unpack", status)?;
        let params = RequestParams::of_memory(registered.raw());
        // SAFETY: `target` has `len` writable bytes, which are registered and never borrowed, and which `Get` keeps until the
        // request is done; the key was made for this endpoint.
        let begun = unsafe { (self.functions().get)(self.raw, target.cast(), len, address, key, &raw const params) };
        let request = match status_of(begun) {
            Err(request) => request,
            Ok(OK) => null_mut(),
            Ok(status) => {
                // SAFETY: unpacked above, and used by nothing.
                unsafe { (self.functions().rkey_destroy)(key) };
                return Err(self.context.ucx().failed("ucp_get_nbx", status));
            }
        };
        self.gets.push(Get { token, request, key, _into: (into.clone(), registered) });
        Ok(())
    }

    /// Goes on with both sides' reads, as far as that is possible now. Returns the reads that have ended, and how.
    pub fn progress(&mut self) -> Vec<(u64, Result<(), UcxError>)> {
        for _ in 0..PROGRESS_MAX {
            // SAFETY: the worker lives, and is used by this thread alone.
            if unsafe { (self.functions().worker_progress)(self.worker) } == 0 {
                break;
            }
        }
        let mut ended = Vec::new();
        let mut at = 0;
        while at < self.gets.len() {
            let status = self.status(self.gets[at].request);
            if status == IN_PROGRESS {
                at += 1;
                continue;
            }
            let get = self.gets.swap_remove(at);
            self.release(&get);
            ended.push((get.token, self.context.ucx().check("ucp_get_nbx", status)));
        }
        ended
    }

    fn status(&self, request: *mut c_void) -> Status {
        if request.is_null() {
            return OK;
        }
        // SAFETY: a request that was not freed.
        unsafe { (self.functions().request_check_status)(request) }
    }

    /// Frees what a read had that has ended.
    fn release(&self, get: &Get) {
        if !get.request.is_null() {
            // SAFETY: it has ended, and is freed once.
            unsafe { (self.functions().request_free)(get.request) };
        }
        // SAFETY: the only read with it has ended.
        unsafe { (self.functions().rkey_destroy)(get.key) };
    }

    /// Whether this thread may sleep until the [descriptor](AsFd) is readable. Otherwise there is progress to make first.
    ///
    /// # Errors
    /// The system refuses.
    pub fn arm(&mut self) -> Result<bool, UcxError> {
        // SAFETY: the worker lives, and is used by this thread alone.
        match unsafe { (self.functions().worker_arm)(self.worker) } {
            BUSY => Ok(false),
            status => self.context.ucx().check("ucp_worker_arm", status).map(|()| true),
        }
    }

    /// Why the connection has ended, if it has.
    pub fn failure(&self) -> Option<UcxError> {
        // Relaxed: the handler runs in the progress of the thread that asks.
        match self.failure.load(Ordering::Relaxed).cast_signed() {
            OK => None,
            status => Some(self.context.ucx().failed("the connection", status)),
        }
    }

    /// Ends the connection, so that nothing is read any more. False: something did not end.
    fn close(&mut self) -> bool {
        if self.raw.is_null() {
            return true;
        }
        let params = RequestParams::forced();
        // SAFETY: the endpoint lives, and is not used after this.
        let closing =
            unsafe { (self.functions().ep_close)(std::mem::replace(&mut self.raw, null_mut()), &raw const params) };
        let request = status_of(closing).err().unwrap_or(null_mut());
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        while self.status(request) == IN_PROGRESS && Instant::now() < deadline {
            self.progress();
        }
        let is_closed = self.status(request) != IN_PROGRESS;
        if is_closed && !request.is_null() {
            // SAFETY: it has ended, and is freed once.
            unsafe { (self.functions().request_free)(request) };
        }
        self.progress();
        is_closed && self.gets.is_empty()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let is_closed = self.close();
        if !is_closed {
            log::error!("UCX did not end {} reads of a connection; their memory is never freed", self.gets.len());
            std::mem::forget(std::mem::take(&mut self.gets));
        }
        // SAFETY: made in `new`, and its endpoint is closed or given up.
        unsafe { (self.functions().worker_destroy)(self.worker) };
    }
}

impl AsFd for Endpoint {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the worker's, which stays open as long as the worker.
        unsafe { BorrowedFd::borrow_raw(self.events) }
    }
}

/// Notes with which status an endpoint has failed.
///
/// # Safety
/// `argument` is the `failure` of an endpoint that lives.
unsafe extern "C" fn note_failure(argument: *mut c_void, _: RawEndpoint, status: Status) {
    // SAFETY: as the caller says.
    let failure = unsafe { &*argument.cast::<AtomicU32>() };
    failure.store(status.cast_unsigned(), Ordering::Relaxed);
}

/// Bytes that the library reads without being told their number: what it packed says that itself, and zeros end it.
fn padded(packed: &[u8]) -> Vec<u8> {
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
