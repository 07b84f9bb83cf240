//! The program's side of the boundary to a backend's library: it calls the functions of the library's table.
//!
//! # Safety
//! The table is that of a library which `load` has checked, and which follows the contract in `ncclx_rs_backend::abi`.
//! An `Instance` or a `Work` holds each object that the library returns, and gives it back once. Memory that the library
//! gets belongs to tensors that are held until the library can no longer use it.
#![allow(unsafe_code, reason = "the C boundary")]

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use ncclx_rs_backend::abi::{
    OK, PENDING, RawBuffer, RawBytes, RawError, RawJoin, RawOperation, RawTable, append_bytes,
};
use ncclx_rs_backend::{DType, ErrorKind};
use pyo3::prelude::*;

use super::store::PythonStore;

/// Why a call failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) kind: ErrorKind,
    pub(crate) text: String,
}

/// The arguments with which a backend joins, besides the store.
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
pub(crate) struct TensorMemory {
    pub(crate) address: usize,
    pub(crate) len: u64,
    /// The position in `DType::ALL`.
    pub(crate) dtype: usize,
}

impl TensorMemory {
    /// The address after the last byte.
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
    pub(crate) inputs: Vec<TensorMemory>,
    pub(crate) outputs: Vec<TensorMemory>,
    pub(crate) send_counts: Vec<u64>,
    pub(crate) recv_counts: Vec<u64>,
}

/// An object of the library.
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

/// Tensors that a library may still use, and the handle of their operation, if there is one.
struct Held {
    work: Option<Handle>,
    tensors: Vec<Py<PyAny>>,
}

/// A backend object of the library.
pub(crate) struct Instance {
    table: &'static RawTable,
    member: Handle,
    /// Tensors of operations that outlive their works.
    held: Mutex<Vec<Held>>,
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
        checked(|error| unsafe { (table.join)(&raw const raw, &raw mut made, error) })?;
        Ok(Instance { table, member: Handle(made), held: Mutex::default() })
    }

    pub(crate) fn call(&self, method: &str, arguments: &str, tensors: &[TensorMemory]) -> Result<String, Failure> {
        let tensors: Vec<RawBuffer> = tensors.iter().map(|memory| memory.raw()).collect();
        let mut answer: Vec<u8> = Vec::new();
        let (method, arguments) = (RawBytes::of(method), RawBytes::of(arguments));
        let (list, len, sink) = (tensors.as_ptr(), tensors.len() as u64, (&raw mut answer).cast());
        let call = |error| {
            // SAFETY: a member that lives; the caller holds the tensors, which do not overlap, for the call; `sink` is a
            // vector, as `append_bytes` expects.
            unsafe { (self.table.call)(self.member.0, method, arguments, list, len, append_bytes, sink, error) }
        };
        checked(call)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    pub(crate) fn set_timeout(&self, timeout_ms: u64) -> Result<(), Failure> {
        // SAFETY: a member that lives.
        checked(|error| unsafe { (self.table.set_timeout)(self.member.0, timeout_ms, error) }).map(drop)
    }

    pub(crate) fn abort(&self, reason: &str) -> Result<(), Failure> {
        // SAFETY: a member that lives, and a text that does for the call.
        checked(|error| unsafe { (self.table.abort)(self.member.0, RawBytes::of(reason), error) }).map(drop)
    }

    pub(crate) fn finalize(&self) -> Result<(), Failure> {
        // SAFETY: a member that lives.
        checked(|error| unsafe { (self.table.finalize)(self.member.0, error) }).map(drop)
    }

    fn hold(&self, work: Option<Handle>, tensors: Vec<Py<PyAny>>) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).push(Held { work, tensors });
    }

    /// Releases held operations that have ended, and their tensors.
    fn release_completed(&self) {
        // The lock is dropped first: a thread with the interpreter's lock may want it, and the library the interpreter's.
        let held = std::mem::take(&mut *self.held.lock().unwrap_or_else(PoisonError::into_inner));
        for Held { work, tensors } in held {
            match work {
                Some(work) => self.release(work, None, tensors),
                None => self.hold(None, tensors),
            }
        }
    }

    /// Releases an operation and its tensors; holds them if the operation is in flight.
    fn release(&self, work: Handle, ended: Option<Result<(), Failure>>, tensors: Vec<Py<PyAny>>) {
        match ended.or_else(|| self.wait(work, Duration::ZERO)) {
            None => self.hold(Some(work), tensors),
            Some(ended) => {
                self.release_work(work);
                if matches!(ended, Err(Failure { kind: ErrorKind::Panic, .. })) {
                    // After a panic the operation may still be in flight.
                    self.hold(None, tensors);
                }
            }
        }
    }

    fn wait(&self, work: Handle, timeout: Duration) -> Option<Result<(), Failure>> {
        let millis = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        // SAFETY: a work that has not been released.
        match checked(|error| unsafe { (self.table.work_wait)(work.0, millis, error) }) {
            Ok(PENDING) => None,
            ended => Some(ended.map(drop)),
        }
    }

    fn release_work(&self, work: Handle) {
        // SAFETY: made by `submit`; the callers have no further use of it.
        unsafe { (self.table.work_release)(work.0) };
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let held = std::mem::take(self.held.get_mut().unwrap_or_else(PoisonError::into_inner));
        let instance = &*self;
        detached(move || {
            // SAFETY: made by `join`; the instance is being dropped.
            unsafe { (instance.table.destroy)(instance.member.raw()) };
            // After `destroy`, the library no longer uses their tensors.
            held.into_iter().filter_map(|held| held.work).for_each(|work| instance.release_work(work));
        });
    }
}

/// Runs `run` without the interpreter's lock: it may wait for a thread of the library, which may need that lock. After the
/// interpreter's end it does not run, and what it holds leaks until the process ends.
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
    /// Starts an operation on the memory of `tensors`, which are held until it has ended.
    pub(crate) fn submit(
        instance: &Arc<Instance>,
        request: &Request<'_>,
        tensors: Vec<Py<PyAny>>,
    ) -> Result<Work, Failure> {
        instance.release_completed();
        let inputs: Vec<RawBuffer> = request.inputs.iter().map(|memory| memory.raw()).collect();
        let outputs: Vec<RawBuffer> = request.outputs.iter().map(|memory| memory.raw()).collect();
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
        if let Err(failure) = checked(submit) {
            if failure.kind == ErrorKind::Panic {
                // The operation may be in flight.
                instance.hold(None, tensors);
            }
            return Err(failure);
        }
        Ok(Work { instance: Arc::clone(instance), handle: Handle(made), tensors, ended: OnceLock::new() })
    }

    /// Waits; the operation's result, or `None` if it is in flight after `timeout`.
    pub(crate) fn wait(&self, timeout: Duration) -> Option<Result<(), Failure>> {
        if self.ended.get().is_none() {
            let ended = self.instance.wait(self.handle, timeout)?;
            // Another thread may have set the same result.
            let _ = self.ended.set(ended);
        }
        self.ended.get().cloned()
    }

    /// The kind of its failure, if it is known to have failed.
    pub(crate) fn failure(&self) -> Option<ErrorKind> {
        self.ended.get()?.as_ref().err().map(|failure| failure.kind)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let (handle, ended, tensors) = (self.handle, self.ended.take(), std::mem::take(&mut self.tensors));
        let instance = &self.instance;
        detached(move || instance.release(handle, ended, tensors));
    }
}

/// Makes a call that may fail; returns its status.
fn checked(call: impl FnOnce(*mut RawError) -> i32) -> Result<i32, Failure> {
    let mut error = RawError::EMPTY;
    let status = call(&raw mut error);
    if status == OK || status == PENDING {
        return Ok(status);
    }
    let kind = ErrorKind::ALL.into_iter().find(|kind| *kind as i32 == status);
    Err(Failure { kind: kind.unwrap_or(ErrorKind::Failure), text: error.read() })
}
