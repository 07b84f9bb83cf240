//! The library's side of the boundary: the functions of a [`RawTable`] for any [`Backend`].
//!
//! # Safety
//! The loader calls every function under the contract in `abi`: arguments are complete and live for the call, and the
//! objects of `join` and `submit` come back at most once. No panic leaves a function.
#![allow(unsafe_code, reason = "the C boundary")]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::abi::{
    ABI_VERSION, OK, PENDING, RawBuffer, RawBytes, RawError, RawJoin, RawOperation, RawTable, WriteBytes,
};
use crate::check::check;
use crate::error::{Error, ErrorKind};
use crate::operation::{Buffer, DType, Mode, OpKind, Operation, ReduceOp};
use crate::store::Store;
use crate::tensor::Tensor;
use crate::{Backend, Join, Work};

/// The table of a backend, which [`export_backend!`](crate::export_backend) puts into the library.
pub const fn table<B: Backend>() -> RawTable {
    RawTable {
        abi_version: ABI_VERSION,
        size: size_of::<RawTable>() as u32,
        name: RawBytes::of(B::NAME),
        version: RawBytes::of(B::VERSION),
        methods: methods::<B>,
        join: join::<B>,
        destroy: destroy::<B>,
        submit: submit::<B>,
        call: call::<B>,
        set_timeout: set_timeout::<B>,
        abort: abort::<B>,
        finalize: finalize::<B>,
        work_wait,
        work_release,
    }
}

/// A backend with its rank and size, which the checks need.
struct Member<B> {
    backend: B,
    rank: u32,
    size: u32,
}

type AnyWork = Box<dyn Work>;

// ---- the table's functions ----

unsafe extern "C" fn methods<B: Backend>(write: WriteBytes, sink: *mut c_void) {
    for method in B::METHODS {
        // SAFETY: the loader's function with its sink.
        unsafe { write(sink, RawBytes::of(method)) };
    }
}

unsafe extern "C" fn join<B: Backend>(raw: *const RawJoin, made: *mut *mut c_void, error: *mut RawError) -> i32 {
    guarded(error, || {
        // SAFETY: complete, and alive for the call.
        let raw = unsafe { raw.read() };
        // SAFETY: as above.
        let host = unsafe { raw.store.host.text() };
        // SAFETY: the loader hands the store over.
        let store = unsafe { Store::new(raw.store, (!host.is_empty()).then_some(host)) };
        // SAFETY: twice as many texts as pairs.
        let hints = unsafe { slice(raw.hints, 2 * raw.hints_len) };
        // SAFETY: each a text that lives for the call.
        let hints: Vec<String> = hints.iter().map(|hint| unsafe { hint.text() }).collect();
        let backend = B::join(Join {
            // SAFETY: a text that lives for the call.
            name: unsafe { raw.name.text() },
            // SAFETY: a text that lives for the call.
            device: unsafe { raw.device.text() },
            rank: raw.rank,
            size: raw.size,
            timeout: Duration::from_millis(raw.timeout_ms),
            hints: hints.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect(),
            store,
        })?;
        let member = Box::new(Member { backend, rank: raw.rank, size: raw.size });
        // SAFETY: the loader's place for the result.
        unsafe { made.write(Box::into_raw(member).cast()) };
        Ok(OK)
    })
}

unsafe extern "C" fn destroy<B: Backend>(member: *mut c_void) {
    // SAFETY: made by `join`, given back once.
    let member = unsafe { Box::from_raw(member.cast::<Member<B>>()) };
    discard(member);
}

unsafe extern "C" fn submit<B: Backend>(
    member: *mut c_void,
    raw: *const RawOperation,
    made: *mut *mut c_void,
    error: *mut RawError,
) -> i32 {
    guarded(error, || {
        // SAFETY: made by `join`, not yet given back.
        let member = unsafe { member_of::<B>(member) };
        // SAFETY: complete, and alive for the call.
        let raw = unsafe { &*raw };
        // SAFETY: its lists and texts too.
        let operation = unsafe { operation(raw) }?;
        check(&operation, member.rank, member.size)?;
        let work: AnyWork = member.backend.submit(operation)?;
        // SAFETY: the loader's place for the result.
        unsafe { made.write(Box::into_raw(Box::new(work)).cast()) };
        Ok(OK)
    })
}

unsafe extern "C" fn call<B: Backend>(
    member: *mut c_void,
    method: RawBytes,
    arguments: RawBytes,
    tensors: *const RawBuffer,
    tensors_len: u64,
    write: WriteBytes,
    sink: *mut c_void,
    error: *mut RawError,
) -> i32 {
    guarded(error, || {
        // SAFETY: made by `join`, not yet given back.
        let member = unsafe { member_of::<B>(member) };
        // SAFETY: texts that live for the call.
        let method = unsafe { method.text() };
        // SAFETY: as above.
        let arguments = unsafe { arguments.text() };
        // SAFETY: a list that lives for the call.
        let buffers = unsafe { buffers(tensors, tensors_len) }?;
        // SAFETY: lent for the call, without overlap.
        let lend = |buffer: Buffer| unsafe { Tensor::lent(buffer) };
        let mut tensors: Vec<Tensor<'_>> = buffers.into_iter().map(lend).collect();
        let answer = member.backend.call(&method, &arguments, &mut tensors)?;
        // SAFETY: the loader's function with its sink.
        unsafe { write(sink, RawBytes::of(&answer)) };
        Ok(OK)
    })
}

unsafe extern "C" fn set_timeout<B: Backend>(member: *mut c_void, timeout_ms: u64, error: *mut RawError) -> i32 {
    guarded(error, || {
        // SAFETY: made by `join`, not yet given back.
        let member = unsafe { member_of::<B>(member) };
        member.backend.set_timeout(Duration::from_millis(timeout_ms));
        Ok(OK)
    })
}

unsafe extern "C" fn abort<B: Backend>(member: *mut c_void, reason: RawBytes, error: *mut RawError) -> i32 {
    guarded(error, || {
        // SAFETY: made by `join`, not yet given back.
        let member = unsafe { member_of::<B>(member) };
        // SAFETY: a text that lives for the call.
        let reason = unsafe { reason.text() };
        member.backend.abort(&reason);
        Ok(OK)
    })
}

unsafe extern "C" fn finalize<B: Backend>(member: *mut c_void, error: *mut RawError) -> i32 {
    // SAFETY: made by `join`, not yet given back.
    guarded(error, || unsafe { member_of::<B>(member) }.backend.finalize().map(|()| OK))
}

unsafe extern "C" fn work_wait(work: *mut c_void, timeout_ms: u64, error: *mut RawError) -> i32 {
    guarded(error, || {
        // SAFETY: made by `submit`, not yet given back.
        let work = unsafe { &*work.cast::<AnyWork>() };
        work.wait(Duration::from_millis(timeout_ms)).map_or(Ok(PENDING), |ended| ended.map(|()| OK))
    })
}

unsafe extern "C" fn work_release(work: *mut c_void) {
    // SAFETY: made by `submit`, given back once.
    let work = unsafe { Box::from_raw(work.cast::<AnyWork>()) };
    discard(work);
}

// ---- helpers ----

/// Runs a function's body; a panic becomes an error with its text.
fn guarded(error: *mut RawError, body: impl FnOnce() -> Result<i32, Error>) -> i32 {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) => return status,
        Ok(Err(failure)) => failure,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a text");
            let failure = Error::new(ErrorKind::Panic, format!("the backend panicked: {text}"));
            discard(panic);
            failure
        }
    };
    // SAFETY: the loader's place for the text, alive for the call.
    unsafe { &mut *error }.write(&failure.text);
    failure.kind as i32
}

/// Drops a value. If that panics, the panic is ignored, and the rest of the value is leaked.
fn discard<T>(value: T) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
        std::mem::forget(panic);
    }
}

/// # Safety
/// Made by `join` of the same type, and alive as long as the result.
unsafe fn member_of<'a, B: Backend>(member: *mut c_void) -> &'a Member<B> {
    // SAFETY: the caller's promise.
    unsafe { &*member.cast::<Member<B>>() }
}

/// # Safety
/// Complete, and alive for the call.
unsafe fn operation(raw: &RawOperation) -> Result<Operation, Error> {
    // SAFETY: the operation's own list.
    let send = unsafe { slice(raw.send_counts, raw.counts_len) };
    // SAFETY: the operation's own list.
    let recv = unsafe { slice(raw.recv_counts, raw.counts_len) };
    Ok(Operation {
        // SAFETY: a text that lives for the call.
        name: unsafe { raw.name.text() },
        kind: kind(raw, send, recv)?,
        // SAFETY: the operation's own list.
        inputs: unsafe { buffers(raw.inputs, raw.inputs_len) }?,
        // SAFETY: the operation's own list.
        outputs: unsafe { buffers(raw.outputs, raw.outputs_len) }?,
        timeout: Duration::from_millis(raw.timeout_ms),
        mode: if raw.blocking == 1 { Mode::Blocking } else { Mode::Async },
    })
}

/// The positions of `abi::KINDS`.
fn kind(raw: &RawOperation, send: &[u64], recv: &[u64]) -> Result<OpKind, Error> {
    let counts = |counts: &[u64]| counts.iter().map(|count| length(*count)).collect::<Result<_, _>>();
    let peer = raw.peer;
    Ok(match raw.kind {
        0 => OpKind::Send { to: peer },
        1 => OpKind::Recv { from: peer },
        2 => OpKind::Broadcast { root: peer },
        3 => OpKind::AllReduce(reduce_op(raw)?),
        4 => OpKind::Reduce { op: reduce_op(raw)?, root: peer },
        5 => OpKind::AllGather,
        6 => OpKind::ReduceScatter(reduce_op(raw)?),
        7 => OpKind::AllToAll { send: counts(send)?, recv: counts(recv)? },
        8 => OpKind::Gather { root: peer },
        9 => OpKind::Scatter { root: peer },
        10 => OpKind::Barrier,
        other => return Err(Error::new(ErrorKind::Unsupported, format!("operation {other} is not known"))),
    })
}

fn length(number: u64) -> Result<usize, Error> {
    usize::try_from(number).map_err(|_| Error::usage(format!("expected at most {} elements, got {number}", usize::MAX)))
}

/// The positions of `abi::REDUCE_OPS`.
fn reduce_op(raw: &RawOperation) -> Result<ReduceOp, Error> {
    Ok(match raw.reduce {
        0 => ReduceOp::Sum,
        1 => ReduceOp::Avg,
        2 => ReduceOp::Product,
        3 => ReduceOp::Min,
        4 => ReduceOp::Max,
        5 => ReduceOp::BitAnd,
        6 => ReduceOp::BitOr,
        7 => ReduceOp::BitXor,
        8 => ReduceOp::PreMulSum(raw.factor),
        other => return Err(Error::new(ErrorKind::Unsupported, format!("reduce operation {other} is not known"))),
    })
}

/// # Safety
/// `len` buffers that live for the call.
unsafe fn buffers(list: *const RawBuffer, len: u64) -> Result<Vec<Buffer>, Error> {
    // SAFETY: the caller's promise.
    let list = unsafe { slice(list, len) };
    let known = |raw: &RawBuffer| {
        let dtype = DType::ALL.get(raw.dtype as usize).copied();
        let unknown = || Error::new(ErrorKind::Unsupported, format!("element type {} is not known", raw.dtype));
        Ok(Buffer { ptr: raw.ptr, len: length(raw.len)?, dtype: dtype.ok_or_else(unknown)? })
    };
    list.iter().map(known).collect()
}

/// # Safety
/// `len` values that live as long as the result; null where there are none.
unsafe fn slice<'a, T>(values: *const T, len: u64) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(values, len as usize) }
}
