//! What entries of the boundary have in common: errors, panics, and buffers as the shim describes them.

use std::any::Any;
use std::ffi::{CStr, c_char};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ncclx_rs::{Buffer, Buffers, Error};

use crate::convert::{self, Status};

pub(super) const ERROR_BYTES: usize = 4096;

#[repr(C)]
pub(super) struct RawError {
    pub(super) text: [u8; ERROR_BYTES],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawBuffer {
    ptr: *mut u8,
    numel: u64,
    dtype: i32,
    device: i32,
}

/// Runs the body of an entry; a panic ends the process.
pub(super) fn guarded(error: *mut RawError, body: impl FnOnce() -> Result<(), (Status, String)>) -> i32 {
    write_error(error, or_end(body))
}

/// Runs the body of an entry without tensors; a panic becomes a failure with its text.
pub(super) fn without_tensors(error: *mut RawError, body: impl FnOnce() -> Result<(), (Status, String)>) -> i32 {
    let ended = catch_unwind(AssertUnwindSafe(body));
    let internal =
        |panic: Box<dyn Any + Send>| Err((Status::Failure, format!("internal error: {}", panic_text(panic.as_ref()))));
    write_error(error, ended.unwrap_or_else(internal))
}

/// Writes the error of a result; returns its status.
pub(super) fn write_error(error: *mut RawError, result: Result<(), (Status, String)>) -> i32 {
    let Err((status, text)) = result else { return Status::Ok as i32 };
    write_text(error, &text);
    status as i32
}

pub(super) fn write_text(error: *mut RawError, text: &str) {
    // SAFETY: the shim passes a writable NcclxError that lives for the call.
    let error = unsafe { &mut *error };
    let mut end = text.len().min(ERROR_BYTES - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    error.text[..end].copy_from_slice(&text.as_bytes()[..end]);
    error.text[end] = 0;
}

/// Runs the body of an entry that returns no error; a panic ends the process.
pub(super) fn or_end<T>(body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        // Not logged: the record would have to wait for Python's lock.
        let _ = writeln!(
            std::io::stderr(),
            "ncclx_rs: internal error: {}; the process ends, since the engine may still use memory of tensors",
            panic_text(panic.as_ref())
        );
        std::process::abort()
    })
}

pub(super) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_else(|| "a panic".to_owned())
}

pub(super) fn failure(error: &Error) -> (Status, String) {
    (Status::of(error.class()), error.to_string())
}

/// # Safety
/// `data` points to `len` values that live as long as the result; it may be null when `len` is zero.
pub(super) unsafe fn slice<'a, T>(data: *const T, len: u64) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(data, len as usize) }
}

/// # Safety
/// `text` ends with a zero and lives for the call.
pub(super) unsafe fn string(text: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

pub(super) fn duration(millis: i64) -> Option<Duration> {
    u64::try_from(millis).ok().map(Duration::from_millis)
}

/// # Safety
/// `buffers` and `len` are those of a RawOp that lives for the call.
pub(super) unsafe fn buffers(buffers: *const RawBuffer, len: u64) -> Result<Buffers, (Status, String)> {
    // SAFETY: the caller's promise.
    let raw = unsafe { slice(buffers, len) };
    raw.iter()
        .map(|raw| {
            let dtype = convert::dtype(raw.dtype).map_err(|error| failure(&error.into()))?;
            let len = convert::length("tensor", raw.numel).map_err(|error| failure(&error.into()))?;
            // SAFETY: the shim keeps the tensor behind `ptr` until the operation's completion; see the module's text.
            Ok(match u32::try_from(raw.device) {
                // SAFETY: as above; PyTorch's allocator gives the memory of a device out in the order of its streams.
                Ok(device) => unsafe { Buffer::on_device(raw.ptr.addr() as u64, len, dtype, device) },
                // SAFETY: as above.
                Err(_) => unsafe { Buffer::from_raw(raw.ptr, len, dtype) },
            })
        })
        .collect()
}
