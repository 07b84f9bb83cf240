//! The C boundary of csrc/ncclx_abi.h: the engine's functions for the shim.
//!
//! # Safety
//! All raw pointers here come from the shim, which this crate's build script compiles from csrc/. The two check each
//! other's size when the shim is loaded. The shim guarantees the contract of the header: arguments live for the call. A
//! communicator, a handle and a part are ours; each comes back once, through `destroy`, `release` and `inherit` or `part_free`. The shim's work keeps the
//! memory of buffers until the completion callback, which is the contract of `Buffer::from_raw`. It keeps that of a window
//! until the window is deregistered.
//!
//! No panic leaves this module. Where the engine may use memory of tensors, a panic ends the process: after an error, the
//! shim would free that memory. Elsewhere a panic becomes an error.
#![allow(unsafe_code, reason = "the C boundary")]

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use ncclx_rs::comm::LibraryPart;
use ncclx_rs::comm::store::Store;
use ncclx_rs::sys::cuda::{Device, Provider, provider};
use ncclx_rs::sys::segment::MappedMemory;
use ncclx_rs::{CommOptions, Communicator, Mode, Op, Rank, SharedMemory, StreamHandle, WindowId, Work};
use pyo3::prelude::*;

use crate::convert::{self, Numbers, Status};
use crate::{logging, shim, stack};

mod entry;
mod memory;

use entry::{
    ERROR_BYTES, RawBuffer, RawError, buffers, duration, failure, guarded, or_end, slice, string, without_tensors,
};
use memory::{Drops, allocates, memory_deregister, memory_register};

#[repr(C)]
struct RawOp {
    kind: u32,
    reduce: u32,
    factor: f64,
    timeout_ms: i64,
    peer: i32,
    tag: u32,
    blocking: u32,
    device: i32,
    inputs: *const RawBuffer,
    inputs_len: u64,
    outputs: *const RawBuffer,
    outputs_len: u64,
    in_counts: *const u64,
    out_counts: *const u64,
    counts_len: u64,
    window: u64,
    offset: u64,
    stream: u64,
    factor_at: *const RawBuffer,
}

type WriteBytes = unsafe extern "C" fn(*mut c_void, *const u8, u64);

#[repr(C)]
#[derive(Clone, Copy)]
struct RawStore {
    context: *mut c_void,
    set: unsafe extern "C" fn(*mut c_void, *const c_char, *const u8, u64, *mut RawError) -> i32,
    get: unsafe extern "C" fn(*mut c_void, *const c_char, i64, WriteBytes, *mut c_void, *mut RawError) -> i32,
    host: *const c_char,
}

#[repr(C)]
struct RawInit {
    name: *const c_char,
    rank: i32,
    size: i32,
    timeout_ms: i64,
    hints: *const *const c_char,
    hints_len: u64,
    store: RawStore,
}

type Done = unsafe extern "C" fn(*mut c_void, i32, *const c_char);
type Job = unsafe extern "C" fn(*mut c_void);

#[repr(C)]
struct RawEngine {
    size: u32,
    create: extern "C" fn(*const RawInit, *mut *mut Communicator, *mut RawError) -> i32,
    destroy: extern "C" fn(*mut Communicator),
    submit: extern "C" fn(*const Communicator, *const RawOp, *mut *mut Work, *mut RawError) -> i32,
    wait: extern "C" fn(*const Work, i64, *mut RawError) -> i32,
    watch_closely: extern "C" fn(*const Work),
    poll: extern "C" fn(*const Work) -> i32,
    on_complete: extern "C" fn(*const Work, Done, *mut c_void),
    source: extern "C" fn(*const Work) -> i32,
    sequence: extern "C" fn(*const Work) -> u64,
    release: extern "C" fn(*mut Work),
    abort: extern "C" fn(*const Communicator, *const c_char),
    shutdown: extern "C" fn(*const Communicator),
    set_timeout: extern "C" fn(*const Communicator, i64),
    timeout: extern "C" fn(*const Communicator) -> i64,
    collectives: extern "C" fn(*const Communicator) -> u64,
    on_loss: extern "C" fn(*const Communicator, Done, *mut c_void),
    host: extern "C" fn(*const Communicator, i32) -> i32,
    window_register: extern "C" fn(*const Communicator, *const RawBuffer, *mut u64, *mut RawError) -> i32,
    window_deregister: extern "C" fn(*const Communicator, u64, *mut RawError) -> i32,
    window_fence: extern "C" fn(*const Communicator, u64, *mut RawError) -> i32,
    window_map: extern "C" fn(
        *const Communicator,
        u64,
        i32,
        *mut *mut MappedMemory,
        *mut *mut c_void,
        *mut u64,
        *mut RawError,
    ) -> i32,
    unmap: extern "C" fn(*mut MappedMemory),
    window_get_path: extern "C" fn(*const Communicator, u64, i32, *mut *const c_char, *mut u64, *mut RawError) -> i32,
    memory_new: extern "C" fn(u64, *mut *mut SharedMemory<u8>, *mut *mut c_void, *mut RawError) -> i32,
    memory_free: extern "C" fn(*mut SharedMemory<u8>),
    set_members: extern "C" fn(*const Communicator, *const i64, u64),
    call_elsewhere: extern "C" fn(Job, *mut c_void),
    cuda_devices: extern "C" fn(*mut RawError) -> i32,
    submit_batch: extern "C" fn(*const Communicator, *const RawOp, usize, *mut *mut Work, *mut RawError) -> i32,
    prepare_device: extern "C" fn(*const Communicator, i32, *mut RawError) -> i32,
    is_high_priority_stream: extern "C" fn(*const Communicator) -> i32,
    is_captured: extern "C" fn(i32, u64, *mut RawError) -> i32,
    part: extern "C" fn(*const Communicator, *const i32, u64, *mut *mut LibraryPart, *mut RawError) -> i32,
    inherit: extern "C" fn(*const Communicator, *mut LibraryPart),
    part_free: extern "C" fn(*mut LibraryPart),
    allocates: extern "C" fn(*const Communicator, *mut u32, *mut RawError) -> i32,
    memory_register: extern "C" fn(*const Communicator, *const RawBuffer, *mut c_void, Drops, *mut RawError) -> i32,
    memory_deregister: extern "C" fn(*const Communicator, *const RawBuffer, *mut RawError) -> i32,
}

const _: () = assert!(size_of::<RawBuffer>() == 24);
const _: () = assert!(size_of::<RawOp>() == 128);
const _: () = assert!(size_of::<RawStore>() == 32);
const _: () = assert!(size_of::<RawInit>() == 72);
const _: () = assert!(size_of::<RawEngine>() == 312);

static ENGINE: RawEngine = RawEngine {
    size: size_of::<RawEngine>() as u32,
    create,
    destroy,
    submit,
    wait,
    watch_closely,
    poll,
    on_complete,
    source,
    sequence,
    release,
    abort,
    shutdown,
    set_timeout,
    timeout,
    collectives,
    on_loss,
    host,
    window_register,
    window_deregister,
    window_fence,
    window_map,
    unmap,
    window_get_path,
    memory_new,
    memory_free,
    set_members,
    call_elsewhere,
    cuda_devices,
    submit_batch,
    prepare_device,
    is_high_priority_stream,
    is_captured,
    part,
    inherit,
    part_free,
    allocates,
    memory_register,
    memory_deregister,
};

/// Loads the shim, which adds the backend's classes to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    shim::register(module, &ENGINE)
}

// ---- the store ----

struct ShimStore(RawStore);

// SAFETY: the functions behind it may be called from any thread, as the header says; c10d stores lock for themselves.
unsafe impl Send for ShimStore {}
// SAFETY: as for Send.
unsafe impl Sync for ShimStore {}

impl Store for ShimStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        let key = std::ffi::CString::new(key).map_err(|error| error.to_string())?;
        let mut error = RawError { text: [0; ERROR_BYTES] };
        // SAFETY: the store's context lives as long as `create`, the only user of this object; see RawInit.
        let status =
            unsafe { (self.0.set)(self.0.context, key.as_ptr(), value.as_ptr(), value.len() as u64, &raw mut error) };
        if status == 0 { Ok(()) } else { Err(text_of(&error)) }
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        unsafe extern "C" fn append(sink: *mut c_void, value: *const u8, len: u64) {
            // SAFETY: `sink` is the Vec below, which nothing else uses during the call.
            let sink = unsafe { &mut *sink.cast::<Vec<u8>>() };
            // SAFETY: the shim passes the value's bytes, alive for the call.
            sink.extend_from_slice(unsafe { slice(value, len) });
        }
        let key = std::ffi::CString::new(key).map_err(|error| error.to_string())?;
        let mut error = RawError { text: [0; ERROR_BYTES] };
        let mut value: Vec<u8> = Vec::new();
        let millis = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
        let sink = (&raw mut value).cast();
        // SAFETY: as in `set`; `append` and `sink` belong together.
        let status = unsafe { (self.0.get)(self.0.context, key.as_ptr(), millis, append, sink, &raw mut error) };
        if status == 0 { Ok(value) } else { Err(text_of(&error)) }
    }

    fn rendezvous_host(&self) -> Option<String> {
        let host = if self.0.host.is_null() {
            None
        } else {
            // SAFETY: not null, so a string that lives as long as the store's context.
            Some(unsafe { string(self.0.host) })
        };
        host.or_else(|| std::env::var("MASTER_ADDR").ok())
    }
}

fn text_of(error: &RawError) -> String {
    let end = error.text.iter().position(|byte| *byte == 0).unwrap_or(ERROR_BYTES);
    String::from_utf8_lossy(&error.text[..end]).into_owned()
}

// ---- entries ----

extern "C" fn create(init: *const RawInit, comm: *mut *mut Communicator, error: *mut RawError) -> i32 {
    without_tensors(error, || {
        // SAFETY: the shim passes a complete NcclxInit that lives for the call.
        let init = unsafe { &*init };
        // SAFETY: 2 * hints_len strings.
        let hints = unsafe { slice(init.hints, 2 * init.hints_len) };
        // SAFETY: each a string that lives for the call.
        let hints: Vec<String> = hints.iter().map(|text| unsafe { string(*text) }).collect();
        let hints: Vec<_> = hints.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect();
        logging::warn_of_unknown(&hints).map_err(|error| (Status::Usage, error.to_string()))?;
        // SAFETY: a string that lives for the call.
        let name = unsafe { string(init.name) };
        let (rank, size) = convert::place(&name, init.rank, init.size).map_err(|error| failure(&error.into()))?;
        let options = CommOptions {
            name,
            rank,
            size,
            store: Arc::new(ShimStore(init.store)),
            timeout: duration(init.timeout_ms),
            hints,
        };
        let made = Communicator::new(options).map_err(|error| (Status::of(error.class()), error.to_string()))?;
        // SAFETY: the shim passes a place for the result.
        unsafe { *comm = Box::into_raw(Box::new(made)) };
        Ok(())
    })
}

extern "C" fn destroy(comm: *mut Communicator) {
    if !comm.is_null() {
        // SAFETY: given out by `create`, given back once.
        or_end(|| drop(unsafe { Box::from_raw(comm) }));
    }
}

extern "C" fn submit(comm: *const Communicator, op: *const RawOp, work: *mut *mut Work, error: *mut RawError) -> i32 {
    guarded(error, || {
        // SAFETY: given out by `create` and not yet given back.
        let comm = unsafe { &*comm };
        // SAFETY: a complete NcclxOp that lives for the call.
        let raw = unsafe { &*op };
        // SAFETY: as above.
        let op = unsafe { operation(raw) }?;
        // SAFETY: none, or one buffer that lives for the call.
        let factor = unsafe { buffers(raw.factor_at, u64::from(!raw.factor_at.is_null())) }?;
        let submitted = match factor.first() {
            Some(factor) => comm.submit_with_factor(op, *factor),
            None => comm.submit(op),
        };
        let submitted = submitted.map_err(|error| failure(&error))?;
        // SAFETY: the shim passes a place for the result.
        unsafe { hand_out(comm, submitted, work) };
        Ok(())
    })
}

extern "C" fn submit_batch(
    comm: *const Communicator,
    ops: *const RawOp,
    count: usize,
    work: *mut *mut Work,
    error: *mut RawError,
) -> i32 {
    guarded(error, || {
        // SAFETY: given out by `create` and not yet given back.
        let comm = unsafe { &*comm };
        // SAFETY: so many complete operations, which live for the call.
        let raw = unsafe { slice(ops, count as u64) };
        // SAFETY: as above.
        let ops: Vec<Op> = raw.iter().map(|raw| unsafe { operation(raw) }).collect::<Result<_, _>>()?;
        let submitted = comm.submit_batch(&ops).map_err(|error| failure(&error))?;
        // SAFETY: the shim passes a place for the result.
        unsafe { hand_out(comm, submitted, work) };
        Ok(())
    })
}

/// Gives the shim the handle of what it has submitted.
///
/// # Safety
/// `work` is a place for the result.
unsafe fn hand_out(comm: &Communicator, submitted: Work, work: *mut *mut Work) {
    if comm.stack_frames() > 0 {
        comm.called_from(&submitted, stack::capture(comm.stack_frames()));
    }
    // SAFETY: the caller's promise.
    unsafe { *work = Box::into_raw(Box::new(submitted)) };
}

/// # Safety
/// `raw` is a complete NcclxOp, whose arrays live for the call. Its memory and stream are as the header says.
unsafe fn operation(raw: &RawOp) -> Result<Op, (Status, String)> {
    // SAFETY: the op's own arrays, of counts_len each.
    let (in_counts, out_counts) = unsafe { counts(raw) };
    let RawOp { kind, reduce, factor, peer, tag, window, offset, .. } = *raw;
    let numbers = Numbers { kind, reduce, factor, peer, tag, in_counts, out_counts, window, offset };
    Ok(Op {
        kind: convert::kind(numbers).map_err(|error| failure(&error.into()))?,
        // SAFETY: the op's own list.
        inputs: unsafe { buffers(raw.inputs, raw.inputs_len) }?,
        // SAFETY: the op's own list.
        outputs: unsafe { buffers(raw.outputs, raw.outputs_len) }?,
        timeout: duration(raw.timeout_ms),
        mode: match u32::try_from(raw.device) {
            // SAFETY: the shim passes a stream of PyTorch, which never destroys one.
            Ok(device) => Mode::Stream(unsafe { StreamHandle::from_raw(raw.stream, device) }),
            Err(_) if raw.blocking != 0 => Mode::Blocking,
            Err(_) => Mode::Async,
        },
    })
}

/// # Safety
/// `raw` is a complete NcclxOp, whose arrays live as long as the result.
unsafe fn counts<'a>(raw: &RawOp) -> (&'a [u64], &'a [u64]) {
    // SAFETY: the caller's promise.
    let sent = unsafe { slice(raw.in_counts, raw.counts_len) };
    // SAFETY: the caller's promise.
    let received = unsafe { slice(raw.out_counts, raw.counts_len) };
    (sent, received)
}

extern "C" fn wait(work: *const Work, timeout_ms: i64, error: *mut RawError) -> i32 {
    guarded(error, || {
        // SAFETY: given out by `submit` and not yet given back.
        let work = unsafe { &*work };
        let ended = match work.wait(duration(timeout_ms)) {
            Err(error) if !work.is_done() => return Err((Status::Pending, error.to_string())),
            // It may have ended just after the time was over: then this tells how.
            Err(_) => work.wait(None),
            ended => ended,
        };
        ended.map_err(|error| (Status::of(error.class()), error.to_string()))
    })
}

extern "C" fn watch_closely(work: *const Work) {
    // SAFETY: given out by `submit` and not yet given back.
    or_end(|| unsafe { &*work }.watch_closely());
}

extern "C" fn poll(work: *const Work) -> i32 {
    or_end(|| {
        // SAFETY: given out by `submit` and not yet given back.
        let work = unsafe { &*work };
        i32::from(work.poll())
    })
}

struct Context(*mut c_void);

// SAFETY: the shim's callbacks may be called from any thread, as the header says.
unsafe impl Send for Context {}

impl Context {
    /// The pointer. A method, so that closures capture the whole Context and not its field.
    fn get(&self) -> *mut c_void {
        self.0
    }
}

extern "C" fn on_complete(work: *const Work, done: Done, context: *mut c_void) {
    let context = Context(context);
    or_end(|| {
        // SAFETY: given out by `submit` and not yet given back.
        let work = unsafe { &*work };
        work.on_complete(move |result| {
            let (status, text) = match result {
                Ok(()) => (Status::Ok, String::new()),
                Err(error) => failure(&error),
            };
            let text = std::ffi::CString::new(text.replace('\0', " ")).unwrap_or_default();
            // SAFETY: `done` and `context` belong together, and this runs once.
            unsafe { done(context.get(), status as i32, text.as_ptr()) };
        });
    });
}

extern "C" fn source(work: *const Work) -> i32 {
    // SAFETY: given out by `submit` and not yet given back.
    or_end(|| unsafe { &*work }.source().map_or(-1, |rank| rank.0 as i32))
}

extern "C" fn sequence(work: *const Work) -> u64 {
    // SAFETY: given out by `submit` and not yet given back.
    or_end(|| unsafe { &*work }.sequence())
}

extern "C" fn release(work: *mut Work) {
    // SAFETY: given out by `submit`, given back once.
    or_end(|| drop(unsafe { Box::from_raw(work) }));
}

extern "C" fn abort(comm: *const Communicator, reason: *const c_char) {
    or_end(|| {
        // SAFETY: a string that lives for the call.
        let reason = unsafe { string(reason) };
        // SAFETY: given out by `create` and not yet given back.
        unsafe { &*comm }.abort(&reason);
    });
}

extern "C" fn shutdown(comm: *const Communicator) {
    or_end(|| {
        // SAFETY: given out by `create` and not yet given back.
        let comm = unsafe { &*comm };
        // It only fails if operations end with errors, which their works have.
        let _ = comm.shutdown();
    });
}

extern "C" fn set_timeout(comm: *const Communicator, timeout_ms: i64) {
    or_end(|| {
        // SAFETY: given out by `create` and not yet given back.
        let comm = unsafe { &*comm };
        comm.set_timeout(duration(timeout_ms).unwrap_or_else(|| comm.configured_timeout()));
    });
}

extern "C" fn timeout(comm: *const Communicator) -> i64 {
    // SAFETY: given out by `create` and not yet given back.
    or_end(|| i64::try_from(unsafe { &*comm }.timeout().as_millis()).unwrap_or(i64::MAX))
}

extern "C" fn is_high_priority_stream(comm: *const Communicator) -> i32 {
    // SAFETY: given out by `create` and not yet given back.
    or_end(|| i32::from(unsafe { &*comm }.is_high_priority_stream()))
}

extern "C" fn collectives(comm: *const Communicator) -> u64 {
    // SAFETY: given out by `create` and not yet given back.
    or_end(|| unsafe { &*comm }.sequence())
}

/// A loss callback of the shim. Dropped without a call, it reports that there was no loss.
struct LossCallback {
    done: Done,
    context: Context,
    was_called: bool,
}

impl LossCallback {
    fn call(&mut self, status: Status, text: &str) {
        if !std::mem::replace(&mut self.was_called, true) {
            let text = std::ffi::CString::new(text.replace('\0', " ")).unwrap_or_default();
            // SAFETY: `done` and `context` belong together, and this runs once.
            unsafe { (self.done)(self.context.get(), status as i32, text.as_ptr()) };
        }
    }
}

impl Drop for LossCallback {
    fn drop(&mut self) {
        self.call(Status::Ok, "");
    }
}

extern "C" fn on_loss(comm: *const Communicator, done: Done, context: *mut c_void) {
    let mut callback = LossCallback { done, context: Context(context), was_called: false };
    or_end(|| {
        // SAFETY: given out by `create` and not yet given back.
        let comm = unsafe { &*comm };
        comm.on_loss(move |error| callback.call(Status::of(error.class()), &error.to_string()));
    });
}

extern "C" fn host(comm: *const Communicator, rank: i32) -> i32 {
    or_end(|| {
        // SAFETY: given out by `create` and not yet given back.
        let comm = unsafe { &*comm };
        let rank = u32::try_from(rank).ok().map(Rank);
        rank.and_then(|rank| comm.host_of(rank)).map_or(-1, |host| host as i32)
    })
}

extern "C" fn set_members(comm: *const Communicator, ranks: *const i64, len: u64) {
    or_end(|| {
        // SAFETY: a list of `len` that lives for the call.
        let ranks = unsafe { slice(ranks, len) };
        let known: Option<Vec<Rank>> = ranks.iter().map(|rank| u32::try_from(*rank).ok().map(Rank)).collect();
        if let Some(members) = known {
            // SAFETY: given out by `create` and not yet given back.
            unsafe { &*comm }.set_members(members);
        }
    });
}

extern "C" fn call_elsewhere(job: Job, context: *mut c_void) {
    let context = Context(context);
    or_end(|| {
        // SAFETY: `job` and `context` belong together, and this runs once.
        ncclx_rs::comm::call_elsewhere(Box::new(move || unsafe { job(context.get()) }));
    });
}

extern "C" fn cuda_devices(error: *mut RawError) -> i32 {
    let mut devices = 0;
    let status = without_tensors(error, || {
        devices = Device::count().map_err(|error| (Status::Failure, error.to_string()))?;
        let hidden = match provider() {
            Ok(Provider::Hip) => "HIP shows no device; look at HIP_VISIBLE_DEVICES and rocminfo",
            _ => "the CUDA driver shows no device; look at CUDA_VISIBLE_DEVICES and nvidia-smi",
        };
        if devices == 0 { Err((Status::Failure, hidden.to_owned())) } else { Ok(()) }
    });
    if status == Status::Ok as i32 { devices as i32 } else { -1 }
}

extern "C" fn prepare_device(comm: *const Communicator, device: i32, error: *mut RawError) -> i32 {
    without_tensors(error, || {
        let device = u32::try_from(device).map_err(|_| (Status::Usage, format!("there is no device {device}")))?;
        // SAFETY: given out by `create` and not yet given back.
        unsafe { &*comm }.prepare_device(device).map_err(|error| failure(&error))
    })
}

extern "C" fn is_captured(device: i32, stream: u64, error: *mut RawError) -> i32 {
    let mut captured = false;
    let status = without_tensors(error, || {
        let device = u32::try_from(device).map_err(|_| (Status::Usage, format!("there is no device {device}")))?;
        // SAFETY: the shim passes a stream of this device that its caller holds, and nothing is put there.
        let stream = unsafe { StreamHandle::from_raw(stream, device) };
        captured = stream.is_captured().map_err(|error| (Status::Failure, error.to_string()))?;
        Ok(())
    });
    if status == Status::Ok as i32 { i32::from(captured) } else { -1 }
}

extern "C" fn part(
    comm: *const Communicator,
    ranks: *const i32,
    n: u64,
    part: *mut *mut LibraryPart,
    error: *mut RawError,
) -> i32 {
    without_tensors(error, || {
        // SAFETY: the shim passes a list that lives for the call.
        let ranks = unsafe { slice(ranks, n) }.iter().map(|rank| Rank(*rank as u32)).collect::<Vec<_>>();
        // SAFETY: given out by `create` and not yet given back.
        let made = unsafe { &*comm }.part(&ranks).map_err(|error| failure(&error))?;
        let made = made.map_or(ptr::null_mut(), |made| Box::into_raw(Box::new(made)));
        // SAFETY: the shim passes a place for the result.
        unsafe { *part = made };
        Ok(())
    })
}

extern "C" fn inherit(comm: *const Communicator, part: *mut LibraryPart) {
    or_end(|| {
        // SAFETY: given out by `part`, and the shim gives it back here.
        let part = unsafe { Box::from_raw(part) };
        // SAFETY: given out by `create` and not yet given back.
        unsafe { &*comm }.inherit(*part);
    });
}

extern "C" fn part_free(part: *mut LibraryPart) {
    // SAFETY: given out by `part`, and the shim gives it back here.
    or_end(|| drop(unsafe { Box::from_raw(part) }));
}

extern "C" fn window_register(
    comm: *const Communicator,
    memory: *const RawBuffer,
    window: *mut u64,
    error: *mut RawError,
) -> i32 {
    guarded(error, || {
        // SAFETY: given out by `create` and not yet given back.
        let comm = unsafe { &*comm };
        // SAFETY: one buffer that lives for the call.
        let memory = unsafe { buffers(memory, 1) }?;
        let made = comm.window_register(memory[0]).map_err(|error| failure(&error))?;
        // SAFETY: the shim passes a place for the result.
        unsafe { *window = made.id().0 };
        Ok(())
    })
}

extern "C" fn window_deregister(comm: *const Communicator, window: u64, error: *mut RawError) -> i32 {
    guarded(error, || {
        // SAFETY: given out by `create` and not yet given back.
        let comm = unsafe { &*comm };
        comm.window_deregister(WindowId(window)).map_err(|error| failure(&error))
    })
}

extern "C" fn window_fence(comm: *const Communicator, window: u64, error: *mut RawError) -> i32 {
    guarded(error, || {
        // SAFETY: given out by `create` and not yet given back.
        let comm = unsafe { &*comm };
        comm.window_fence(WindowId(window)).map_err(|error| failure(&error))
    })
}

extern "C" fn window_map(
    comm: *const Communicator,
    window: u64,
    rank: i32,
    mapping: *mut *mut MappedMemory,
    ptr: *mut *mut c_void,
    bytes: *mut u64,
    error: *mut RawError,
) -> i32 {
    without_tensors(error, || {
        // SAFETY: given out by `create` and not yet given back.
        let comm = unsafe { &*comm };
        let rank = u32::try_from(rank).map_err(|_| (Status::Usage, format!("window_map: there is no rank {rank}")))?;
        let mapped = comm.window_map(WindowId(window), Rank(rank)).map_err(|error| failure(&error))?;
        // SAFETY: the caller's place for the address.
        unsafe { *ptr = mapped.as_ptr().cast() };
        // SAFETY: the caller's place for the length.
        unsafe { *bytes = mapped.len() as u64 };
        // SAFETY: the caller's place for the mapping, which it gives back to `unmap`.
        unsafe { *mapping = Box::into_raw(Box::new(mapped)) };
        Ok(())
    })
}

extern "C" fn unmap(mapping: *mut MappedMemory) {
    // SAFETY: made by `window_map` and given back once.
    or_end(|| drop(unsafe { Box::from_raw(mapping) }));
}

extern "C" fn window_get_path(
    comm: *const Communicator,
    window: u64,
    rank: i32,
    name: *mut *const c_char,
    bytes: *mut u64,
    error: *mut RawError,
) -> i32 {
    without_tensors(error, || {
        // SAFETY: given out by `create` and not yet given back.
        let comm = unsafe { &*comm };
        let rank =
            u32::try_from(rank).map_err(|_| (Status::Usage, format!("window_get_path: there is no rank {rank}")))?;
        let path = comm.window_get_path(WindowId(window), Rank(rank)).map_err(|error| failure(&error))?.name();
        // SAFETY: the caller's place for the name, which lives as long as the program.
        unsafe { *name = path.as_ptr().cast() };
        // SAFETY: the caller's place for its length.
        unsafe { *bytes = path.len() as u64 };
        Ok(())
    })
}

extern "C" fn memory_new(
    bytes: u64,
    memory: *mut *mut SharedMemory<u8>,
    ptr: *mut *mut c_void,
    error: *mut RawError,
) -> i32 {
    without_tensors(error, || {
        let made = usize::try_from(bytes).map_err(std::io::Error::other).and_then(SharedMemory::<u8>::new);
        let mut made = made.map_err(|cause| (Status::Failure, format!("{bytes} bytes of shared memory: {cause}")))?;
        // SAFETY: the caller's place for the address.
        unsafe { *ptr = made.as_mut_ptr().cast() };
        // SAFETY: the caller's place for the memory, which it gives back to `memory_free`.
        unsafe { *memory = Box::into_raw(Box::new(made)) };
        Ok(())
    })
}

extern "C" fn memory_free(memory: *mut SharedMemory<u8>) {
    // SAFETY: made by `memory_new` and given back once.
    or_end(|| drop(unsafe { Box::from_raw(memory) }));
}
