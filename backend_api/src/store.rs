//! The store for the rendezvous of a new communicator's ranks.
#![allow(unsafe_code, reason = "calls the loader's functions")]

use std::fmt;
use std::time::Duration;

use crate::abi::{OK, RawBytes, RawError, RawStore, append_bytes};

/// A map that all ranks of the communicator share, and no other communicator. Its methods may be called from any thread,
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
    /// `raw` follows the contract in `abi`, and this object alone uses it.
    pub(crate) unsafe fn new(raw: RawStore, host: Option<String>) -> Store {
        Store { raw, host }
    }

    /// Sets `key` to `value`. An error is the store's text.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        let mut error = RawError::EMPTY;
        let (key, value) = (RawBytes::of(key), RawBytes::of_bytes(value));
        // SAFETY: the context is released by `drop` alone; key, value and error live for the call.
        let status = unsafe { (self.raw.set)(self.raw.context, key, value, &raw mut error) };
        outcome(status, &error)
    }

    /// The value of `key`; waits for it up to `timeout`.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        let mut error = RawError::EMPTY;
        let mut value: Vec<u8> = Vec::new();
        let (key, sink) = (RawBytes::of(key), (&raw mut value).cast());
        // SAFETY: as in `set`; `sink` is a vector, as `append_bytes` expects.
        let status =
            unsafe { (self.raw.get)(self.raw.context, key, millis(timeout), append_bytes, sink, &raw mut error) };
        outcome(status, &error).map(|()| value)
    }

    /// Waits until `key` has a value; fails after `timeout`.
    pub fn wait(&self, key: &str, timeout: Duration) -> Result<(), String> {
        let mut error = RawError::EMPTY;
        let key = RawBytes::of(key);
        // SAFETY: as in `set`.
        let status = unsafe { (self.raw.wait)(self.raw.context, key, millis(timeout), &raw mut error) };
        outcome(status, &error)
    }

    /// The host that serves the store, if there is one. The local address of a connection to it can reach the other ranks.
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

fn millis(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)
}
