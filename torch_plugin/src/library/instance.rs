//! The program's side of the boundary to a backend's library: calls the functions of its table.
//!
//! # Safety
//! The table is that of a library which `load` has checked, and which follows the contract in `ncclx_rs_backend::abi`.
//! What it gives out, an `Instance` or a `Work` holds and gives back once. Memory that it is lent belongs to tensors that
//! are held until it cannot be used any more.
#![allow(unsafe_code, reason = "the C boundary")]

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use ncclx_rs_backend::abi::{OK, PENDING, RawBuffer, RawBytes, RawError, RawJoin, RawOperation, RawTable, take_bytes};
use ncclx_rs_backend::{DType, ErrorKind};
use pyo3::prelude::*;

use super::store::PythonStore;

/// Why a call failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) kind: ErrorKind,
    pub(crate) text: String,
}

/// What a backend joins with, beside the store.
pub(crate) struct Joining<'a> {
    pub(crate) name: &'a str,
    pub(crate) device: &'a str,
    pub(crate) rank: u32,
    pub(crate) size: u32,
    pub(crate) timeout_ms: u64,
    pub(crate) hints: &'a [(String, String)],
    pub(crate) store_host: &'a str,
}

/// A tensor's memory.
#[derive(Clone, Copy)]
pub(crate) struct Lent {
    pub(crate) address: usize,
    pub(crate) len: u64,
    /// The position in `DType::ALL`.
    pub(crate) dtype: usize,
}

impl Lent {
    /// The address behind the last byte.
    pub(crate) fn end(self) -> usize {
        let len = usize::try_from(self.len).unwrap_or(usize::MAX);
        self.address.saturating_add(len.saturating_mul(DType::ALL[self.dtype].size()))
    }

    fn raw(self) -> RawBuffer {
        let ptr = std::ptr::with_exposed_provenance_mut(self.address);
        RawBuffer { ptr, len: self.len, dtype: self.dtype as u32, reserved: 0 }
    }
}

/// An operation; numbers as in `RawOperation`.
pub(crate) struct Request<'a> {
    pub(crate) name: &'a str,
    pub(crate) kind: u32,
    pub(crate) reduce: u32,
    pub(crate) factor: f64,
    pub(crate) peer: u32,
    pub(crate) timeout_ms: u64,
    pub(crate) blocking: bool,
    pub(crate) inputs: Vec<Lent>,
    pub(crate) outputs: Vec<Lent>,
    pub(crate) send_counts: Vec<u64>,
    pub(crate) recv_counts: Vec<u64>,
}

/// What the library gave out.
#[derive(Clone, Copy)]
struct Handle(*mut c_void);

impl Handle {
    fn raw(self) -> *mut c_void {
        self.0
    }
}

// SAFETY: the contract lets any thread use it.
unsafe impl Send for Handle {}
// SAFETY: as for Send.
unsafe impl Sync for Handle {}

/// Tensors that a library may still use, with the handle of the operation if there is one.
struct Kept {
    work: Option<Handle>,
    tensors: Vec<Py<PyAny>>,
}

/// A backend object of the library.
pub(crate) struct Instance {
    table: &'static RawTable,
    member: Handle,
    /// Of operations whose works are gone before their end.
    kept: Mutex<Vec<Kept>>,
}

impl Instance {
    pub(crate) fn join(
        table: &'static RawTable,
        joining: &Joining<'_>,
        store: PythonStore,
    ) -> Result<Instance, Failure> {
        let hints: Vec<RawBytes> =
            joining.hints.iter().flat_map(|(name, value)| [RawBytes::of(name), RawBytes::of(value)]).collect();
        let raw = RawJoin {
            name: RawBytes::of(joining.name),
            device: RawBytes::of(joining.device),
            rank: joining.rank,
            size: joining.size,
            timeout_ms: joining.timeout_ms,
            hints: hints.as_ptr(),
            hints_len: joining.hints.len() as u64,
            store: store.into_raw(RawBytes::of(joining.store_host)),
        };
        let mut made = null_mut();
        // SAFETY: complete, and alive for the call; the store is handed over.
        told(|error| unsafe { (table.join)(&raw const raw, &raw mut made, error) })?;
        Ok(Instance { table, member: Handle(made), kept: Mutex::default() })
    }

    pub(crate) fn call(&self, method: &str, arguments: &str, tensors: &[Lent]) -> Result<String, Failure> {
        let tensors: Vec<RawBuffer> = tensors.iter().map(|lent| lent.raw()).collect();
        let mut answer: Vec<u8> = Vec::new();
        let (method, arguments) = (RawBytes::of(method), RawBytes::of(arguments));
        let (list, len, sink) = (tensors.as_ptr(), tensors.len() as u64, (&raw mut answer).cast());
        let call = |error| {
            // SAFETY: a member that lives; the caller holds the tensors, which do not overlap, for the call; `sink` is a
            // vector, as `take_bytes` expects.
            unsafe { (self.table.call)(self.member.0, method, arguments, list, len, take_bytes, sink, error) }
        };
        told(call)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    pub(crate) fn set_timeout(&self, timeout_ms: u64) -> Result<(), Failure> {
        // SAFETY: a member that lives.
        told(|error| unsafe { (self.table.set_timeout)(self.member.0, timeout_ms, error) }).map(drop)
    }

    pub(crate) fn abort(&self, reason: &str) -> Result<(), Failure> {
        // SAFETY: a member that lives, and a text that does for the call.
        told(|error| unsafe { (self.table.abort)(self.member.0, RawBytes::of(reason), error) }).map(drop)
    }

    pub(crate) fn finalize(&self) -> Result<(), Failure> {
        // SAFETY: a member that lives.
        told(|error| unsafe { (self.table.finalize)(self.member.0, error) }).map(drop)
    }

    fn keep(&self, work: Option<Handle>, tensors: Vec<Py<PyAny>>) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).push(Kept { work, tensors });
    }

    /// Lets go of kept tensors whose operations have ended since.
    fn sweep(&self) {
        // Not under the lock, which threads with the interpreter's lock want, while the library may want that.
        let kept = std::mem::take(&mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner));
        for Kept { work, tensors } in kept {
            match work {
                Some(work) => self.put_away(work, None, tensors),
                None => self.keep(None, tensors),
            }
        }
    }

    /// Lets go of an operation, and of its tensors once nobody uses them.
    fn put_away(&self, work: Handle, ended: Option<Result<(), Failure>>, tensors: Vec<Py<PyAny>>) {
        match ended.or_else(|| self.wait(work, Duration::ZERO)) {
            None => self.keep(Some(work), tensors),
            Some(ended) => {
                self.release(work);
                if matches!(ended, Err(Failure { kind: ErrorKind::Panic, .. })) {
                    // Which does not tell that the operation has ended.
                    self.keep(None, tensors);
                }
            }
        }
    }

    fn wait(&self, work: Handle, timeout: Duration) -> Option<Result<(), Failure>> {
        let millis = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        // SAFETY: a work that has not been released.
        match told(|error| unsafe { (self.table.work_wait)(work.0, millis, error) }) {
            Ok(PENDING) => None,
            ended => Some(ended.map(drop)),
        }
    }

    fn release(&self, work: Handle) {
        // SAFETY: made by `submit`; the callers have no further use of it.
        unsafe { (self.table.work_release)(work.0) };
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let kept = std::mem::take(self.kept.get_mut().unwrap_or_else(PoisonError::into_inner));
        let instance = &*self;
        detached(move || {
            // SAFETY: made by `join`, and gone from here.
            unsafe { (instance.table.destroy)(instance.member.raw()) };
            // With their tensors, which are nobody's now.
            kept.into_iter().filter_map(|kept| kept.work).for_each(|work| instance.release(work));
        });
    }
}

/// Runs what may wait for a thread of the library without the interpreter's lock, which that thread may want. Not at all
/// once the interpreter is gone, and the process about to be: what `run` holds stays as it is then.
fn detached(run: impl FnOnce() + Send) {
    let run = ManuallyDrop::new(run);
    Python::try_attach(move |py| py.detach(move || ManuallyDrop::into_inner(run)()));
}

/// An operation in flight or done.
pub(crate) struct Work {
    instance: Arc<Instance>,
    handle: Handle,
    tensors: Vec<Py<PyAny>>,
    ended: OnceLock<Result<(), Failure>>,
}

impl Work {
    /// Begins an operation on the memory of `tensors`, which are held until it has ended.
    pub(crate) fn submit(
        instance: &Arc<Instance>,
        request: &Request<'_>,
        tensors: Vec<Py<PyAny>>,
    ) -> Result<Work, Failure> {
        instance.sweep();
        let inputs: Vec<RawBuffer> = request.inputs.iter().map(|lent| lent.raw()).collect();
        let outputs: Vec<RawBuffer> = request.outputs.iter().map(|lent| lent.raw()).collect();
        assert_eq!(request.send_counts.len(), request.recv_counts.len(), "the caller gives both or neither");
        let raw = RawOperation {
            name: RawBytes::of(request.name),
            kind: request.kind,
            reduce: request.reduce,
            factor: request.factor,
            timeout_ms: request.timeout_ms,
            peer: request.peer,
            blocking: request.blocking.into(),
            inputs: inputs.as_ptr(),
            inputs_len: inputs.len() as u64,
            outputs: outputs.as_ptr(),
            outputs_len: outputs.len() as u64,
            send_counts: request.send_counts.as_ptr(),
            recv_counts: request.recv_counts.as_ptr(),
            counts_len: request.send_counts.len() as u64,
        };
        let mut made = null_mut();
        let submit = |error| {
            // SAFETY: a member that lives, an operation that is complete, and memory that `tensors` hold.
            unsafe { (instance.table.submit)(instance.member.0, &raw const raw, &raw mut made, error) }
        };
        if let Err(failure) = told(submit) {
            if failure.kind == ErrorKind::Panic {
                // It may have begun.
                instance.keep(None, tensors);
            }
            return Err(failure);
        }
        Ok(Work { instance: Arc::clone(instance), handle: Handle(made), tensors, ended: OnceLock::new() })
    }

    /// Waits; how the operation ended, or nothing if it is in flight after `timeout`.
    pub(crate) fn wait(&self, timeout: Duration) -> Option<Result<(), Failure>> {
        if self.ended.get().is_none() {
            let ended = self.instance.wait(self.handle, timeout)?;
            // Another thread may have been faster, with the same answer.
            let _ = self.ended.set(ended);
        }
        self.ended.get().cloned()
    }

    /// Why it failed, if it is known to have.
    pub(crate) fn failure(&self) -> Option<ErrorKind> {
        self.ended.get()?.as_ref().err().map(|failure| failure.kind)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let (handle, ended, tensors) = (self.handle, self.ended.take(), std::mem::take(&mut self.tensors));
        let instance = &self.instance;
        detached(move || instance.put_away(handle, ended, tensors));
    }
}

/// Makes a call that may fail; its status.
fn told(call: impl FnOnce(*mut RawError) -> i32) -> Result<i32, Failure> {
    let mut error = RawError::EMPTY;
    let status = call(&raw mut error);
    if status == OK || status == PENDING {
        return Ok(status);
    }
    let kind = ErrorKind::ALL.into_iter().find(|kind| *kind as i32 == status);
    Err(Failure { kind: kind.unwrap_or(ErrorKind::Failure), text: error.read() })
}
