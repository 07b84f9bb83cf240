//! The store in which the ranks of a new communicator find each other.
#![allow(unsafe_code, reason = "calls the loader's functions")]

use std::ffi::c_void;
use std::fmt;
use std::time::Duration;

use crate::abi::{OK, RawBytes, RawError, RawStore};

/// A map that every rank of the communicator sees, and no other communicator. Its methods may be called from any thread,
/// until the backend is finalized or dropped.
pub struct Store {
    raw: RawStore,
    host: Option<String>,
}

// SAFETY: the contract in `abi` lets any thread call the functions.
unsafe impl Send for Store {}
// SAFETY: as for Send.
unsafe impl Sync for Store {}

impl Store {
    /// # Safety
    /// `raw` follows the contract in `abi`, and is given to no other.
    pub(crate) unsafe fn new(raw: RawStore, host: Option<String>) -> Store {
        Store { raw, host }
    }

    /// Binds `key` to `value`. An error is what the store says.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        let mut error = RawError::EMPTY;
        let (key, value) = (RawBytes::of(key), RawBytes::of_bytes(value));
        // SAFETY: the context is released by `drop` alone; key, value and error live for the call.
        let status = unsafe { (self.raw.set)(self.raw.context, key, value, &raw mut error) };
        outcome(status, &error)
    }

    /// The value of `key`, which it waits for until `timeout` has passed.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        unsafe extern "C" fn take(sink: *mut c_void, bytes: RawBytes) {
            // SAFETY: `sink` is the vector below, lent for the call.
            let sink = unsafe { &mut *sink.cast::<Vec<u8>>() };
            // SAFETY: the loader passes bytes that live for the call.
            sink.extend_from_slice(unsafe { bytes_of(bytes) });
        }
        let mut error = RawError::EMPTY;
        let mut value: Vec<u8> = Vec::new();
        let (key, sink) = (RawBytes::of(key), (&raw mut value).cast());
        // SAFETY: as in `set`; `take` and `sink` belong together.
        let status = unsafe { (self.raw.get)(self.raw.context, key, millis(timeout), take, sink, &raw mut error) };
        outcome(status, &error).map(|()| value)
    }

    /// Waits until `key` has a value, or fails once `timeout` has passed.
    pub fn wait(&self, key: &str, timeout: Duration) -> Result<(), String> {
        let mut error = RawError::EMPTY;
        let key = RawBytes::of(key);
        // SAFETY: as in `set`.
        let status = unsafe { (self.raw.wait)(self.raw.context, key, millis(timeout), &raw mut error) };
        outcome(status, &error)
    }

    /// The host that serves the store, if there is one: the way to it is a way to the other ranks.
    pub fn host(&self) -> Option<&str> {
        self.host.as_deref()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: this object alone has the context, and is gone after this.
        unsafe { (self.raw.release)(self.raw.context) };
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("host", &self.host).finish_non_exhaustive()
    }
}

fn outcome(status: i32, error: &RawError) -> Result<(), String> {
    if status == OK { Ok(()) } else { Err(error.read()) }
}

fn millis(timeout: Duration) -> i64 {
    i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX)
}

/// # Safety
/// The bytes live as long as the result.
pub(crate) unsafe fn bytes_of<'a>(bytes: RawBytes) -> &'a [u8] {
    if bytes.len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(bytes.ptr, bytes.len as usize) }
}
