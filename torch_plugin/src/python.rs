//! Calls of Python from threads of the engine.
#![allow(unsafe_code, reason = "the C boundary")]

use std::ffi::c_void;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

unsafe extern "C" {
    fn ncclx_shim_call(function: *mut c_void, arguments: *mut c_void);
}

/// Calls a Python function; `sys.unraisablehook` gets its exceptions. Does not return if the interpreter ends during the
/// call: before 3.14, Python then unwinds the stacks of threads that are inside it, which Rust does not survive.
pub(crate) fn call(function: &Bound<'_, PyAny>, arguments: &Bound<'_, PyTuple>) {
    // SAFETY: both are alive and the GIL is held by their lifetimes. The shim lets no unwinding out.
    unsafe { ncclx_shim_call(function.as_ptr().cast(), arguments.as_ptr().cast()) }
}
