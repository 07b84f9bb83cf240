//! A c10d store for a backend's library.
#![allow(unsafe_code, reason = "the library calls these functions")]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ncclx_rs_backend::ErrorKind;
use ncclx_rs_backend::abi::{OK, RawBytes, RawError, RawStore, WriteBytes};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// The Python object of a store.
pub(crate) struct PythonStore {
    store: Py<PyAny>,
}

impl PythonStore {
    pub(crate) fn new(store: Py<PyAny>) -> Self {
        PythonStore { store }
    }

    /// The store for the library, which gives it back by `release`.
    pub(crate) fn into_raw(self, host: RawBytes) -> RawStore {
        RawStore { context: Box::into_raw(Box::new(self)).cast(), set, get, wait, release, host }
    }

    fn waited<'py>(&self, py: Python<'py>, key: &str, timeout_ms: u64) -> PyResult<&Bound<'py, PyAny>> {
        let store = self.store.bind(py);
        let timeout = Duration::from_millis(timeout_ms.min(LONGEST_MS));
        store.call_method1("wait", (vec![key], timeout))?;
        Ok(store)
    }
}

unsafe extern "C" fn set(context: *mut c_void, key: RawBytes, value: RawBytes, error: *mut RawError) -> i32 {
    // SAFETY: the library passes the context of `into_raw`.
    let store = unsafe { store(context) };
    // SAFETY: alive for the call.
    let key = unsafe { key.text() };
    // SAFETY: alive for the call.
    let value = unsafe { value.bytes() };
    attached(error, |py| store.store.bind(py).call_method1("set", (key, PyBytes::new(py, value))).map(drop))
}

unsafe extern "C" fn get(
    context: *mut c_void,
    key: RawBytes,
    timeout_ms: u64,
    write: WriteBytes,
    sink: *mut c_void,
    error: *mut RawError,
) -> i32 {
    // SAFETY: the library passes the context of `into_raw`.
    let store = unsafe { store(context) };
    // SAFETY: alive for the call.
    let key = unsafe { key.text() };
    attached(error, |py| {
        let value = store.waited(py, &key, timeout_ms)?.call_method1("get", (&key,))?;
        let value: &[u8] = value.extract()?;
        // SAFETY: the library's function with its sink.
        unsafe { write(sink, RawBytes::of_bytes(value)) };
        Ok(())
    })
}

unsafe extern "C" fn wait(context: *mut c_void, key: RawBytes, timeout_ms: u64, error: *mut RawError) -> i32 {
    // SAFETY: the library passes the context of `into_raw`.
    let store = unsafe { store(context) };
    // SAFETY: alive for the call.
    let key = unsafe { key.text() };
    attached(error, |py| store.waited(py, &key, timeout_ms).map(drop))
}

unsafe extern "C" fn release(context: *mut c_void) {
    // SAFETY: made by `into_raw`, given back once. PyO3 drops the reference later if this thread has no interpreter lock.
    drop(unsafe { Box::from_raw(context.cast::<PythonStore>()) });
}

/// Runs a body under the interpreter's lock; exceptions and panics become an error's text.
fn attached(error: *mut RawError, body: impl FnOnce(Python<'_>) -> PyResult<()>) -> i32 {
    let ran = catch_unwind(AssertUnwindSafe(|| {
        Python::try_attach(|py| body(py).map_err(|error| error.value(py).to_string()))
    }));
    let text = match ran {
        Ok(Some(Ok(()))) => return OK,
        Ok(Some(Err(text))) => text,
        Ok(None) => "the Python interpreter has ended".to_owned(),
        Err(_) => "internal error: a panic".to_owned(),
    };
    // SAFETY: the library's place for the text, alive for the call.
    unsafe { &mut *error }.write(&text);
    ErrorKind::Failure as i32
}

/// # Safety
/// Made by `into_raw`, not yet released.
unsafe fn store<'a>(context: *mut c_void) -> &'a PythonStore {
    // SAFETY: the caller's promise.
    unsafe { &*context.cast() }
}

/// The longest timeout that a timedelta and a store's clock can hold.
const LONGEST_MS: u64 = 1_000_000_000_000;
