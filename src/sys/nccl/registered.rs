//! What a communicator knows of memory that was to be registered with it.
#![allow(unsafe_code, reason = "a handle of a library in C goes from thread to thread")]

use std::collections::BTreeMap;

use super::functions::RawHandle;
use crate::sys::cuda::DevicePtr;

/// What has become of memory that was to be registered, by its first byte.
pub(super) type Registered = BTreeMap<DevicePtr, Registration>;

/// What a library has said to it.
#[derive(Debug)]
pub(super) enum Registration {
    Done(Handle),
    /// It failed, or the library is set to register nothing.
    None,
}

#[derive(Debug)]
pub(super) struct Handle(pub(super) RawHandle);

// SAFETY: a number that the library knows a registration by, which any thread may hand it.
unsafe impl Send for Handle {}
