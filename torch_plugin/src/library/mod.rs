//! Backends in shared libraries, for the Python package.
//!
//! `load` opens a library, `instance` calls its functions, and the library calls `store`. This module has the Python
//! classes.

mod instance;
mod load;
mod store;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ncclx_rs_backend::abi::{KINDS, REDUCE_OPS};
use ncclx_rs_backend::{DType, ErrorKind};
use pyo3::exceptions::{PyImportError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use self::instance::{Failure, Instance, Joining, Request, TensorMemory, Work};
use self::store::PythonStore;
use crate::memory::address_of;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Library>()?;
    module.add_class::<LibraryBackend>()?;
    module.add_class::<LibraryWork>()
}

/// A shared library with a backend. It stays loaded until the process ends.
#[pyclass(frozen, module = "ncclx_rs._native")]
struct Library {
    loaded: load::Loaded,
}

#[pymethods]
impl Library {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let loaded = py.detach(|| load::open(&path));
        Ok(Library { loaded: loaded.map_err(|error| PyImportError::new_err(error.to_string()))? })
    }

    /// The backend's name.
    #[getter]
    fn name(&self) -> String {
        self.loaded.name.clone()
    }

    /// The backend's version.
    #[getter]
    fn version(&self) -> String {
        self.loaded.version.clone()
    }

    /// The names of the backend's own methods.
    #[getter]
    fn methods(&self) -> Vec<String> {
        self.loaded.methods.clone()
    }

    /// Joins a communicator.
    #[expect(clippy::too_many_arguments, reason = "one for each argument of a backend's join")]
    fn join(
        &self,
        py: Python<'_>,
        name: &str,
        device: &str,
        rank: u32,
        size: u32,
        timeout_ms: u64,
        hints: Vec<(String, String)>,
        store: Py<PyAny>,
        store_host: &str,
    ) -> PyResult<LibraryBackend> {
        let joining = Joining { name, device, rank, size, timeout_ms, hints: &hints, store_host };
        let store = PythonStore::new(store);
        let joined = py.detach(|| Instance::join(self.loaded.table, &joining, store));
        Ok(LibraryBackend { instance: Arc::new(joined.map_err(raised)?) })
    }
}

/// One rank's membership in a communicator of a library's backend.
#[pyclass(frozen, module = "ncclx_rs._native")]
struct LibraryBackend {
    instance: Arc<Instance>,
}

#[pymethods]
impl LibraryBackend {
    /// Starts an operation. Its tensors are kept until it has ended.
    #[expect(clippy::too_many_arguments, reason = "one for each field of an operation")]
    fn submit(
        &self,
        py: Python<'_>,
        name: &str,
        kind: &str,
        inputs: Vec<Bound<'_, PyAny>>,
        outputs: Vec<Bound<'_, PyAny>>,
        reduce: (String, f64),
        peer: u32,
        send_counts: Vec<u64>,
        recv_counts: Vec<u64>,
        timeout_ms: u64,
        blocking: bool,
    ) -> PyResult<LibraryWork> {
        let request = Request {
            name,
            kind: position(&KINDS, kind, "kind")?,
            reduce: position(&REDUCE_OPS, &reduce.0, "op")?,
            factor: reduce.1,
            peer,
            timeout_ms,
            blocking,
            inputs: memory_of(name, &inputs)?,
            outputs: memory_of(name, &outputs)?,
            send_counts,
            recv_counts,
        };
        let tensors = inputs.into_iter().chain(outputs).map(Bound::unbind).collect();
        let work = py.detach(|| Work::submit(&self.instance, &request, tensors));
        Ok(LibraryWork { work: work.map_err(raised)? })
    }

    /// Runs one of the backend's own methods; the answer is JSON, or empty.
    fn call(&self, py: Python<'_>, method: &str, arguments: &str, tensors: Vec<Bound<'_, PyAny>>) -> PyResult<String> {
        let memory = memory_of(method, &tensors)?;
        if let Some((first, second)) = overlapping(&memory) {
            let text = format!("{method}: tensors {first} and {second} share memory; expected each to have its own");
            return Err(PyValueError::new_err(text));
        }
        py.detach(|| self.instance.call(method, arguments, &memory)).map_err(raised)
    }

    /// Sets the timeout of the backend's own methods.
    fn set_timeout(&self, py: Python<'_>, timeout_ms: u64) -> PyResult<()> {
        py.detach(|| self.instance.set_timeout(timeout_ms)).map_err(raised)
    }

    /// Ends operations in flight with errors.
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        py.detach(|| self.instance.abort(reason)).map_err(raised)
    }

    /// Waits until operations in flight have ended, and leaves.
    fn finalize(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.instance.finalize()).map_err(raised)
    }
}

/// An operation of a library's backend.
#[pyclass(frozen, module = "ncclx_rs._native")]
struct LibraryWork {
    work: Work,
}

#[pymethods]
impl LibraryWork {
    /// Waits; returns whether the operation has ended. Raises its error.
    fn wait(&self, py: Python<'_>, timeout_ms: u64) -> PyResult<bool> {
        let limit = Duration::from_millis(timeout_ms);
        let began = Instant::now();
        loop {
            let left = limit.saturating_sub(began.elapsed());
            // In slices, so that signal handlers can run in between, and raise.
            let slice = left.min(WAIT_SLICE);
            if let Some(ended) = py.detach(|| self.work.wait(slice)) {
                return ended.map(|()| true).map_err(raised);
            }
            if left == slice {
                return Ok(false);
            }
            py.check_signals()?;
        }
    }

    /// The kind of the operation's failure: `usage`, `unsupported`, `failure`, `timeout`, `lost` or `panic`; `None` if it
    /// has not failed, or is not known to have ended.
    #[getter]
    fn failure(&self) -> Option<&'static str> {
        self.work.failure().map(|kind| match kind {
            ErrorKind::Usage => "usage",
            ErrorKind::Unsupported => "unsupported",
            ErrorKind::Timeout => "timeout",
            ErrorKind::Lost => "lost",
            ErrorKind::Panic => "panic",
            _ => "failure",
        })
    }
}

fn raised(failure: Failure) -> PyErr {
    match failure.kind {
        ErrorKind::Usage => PyValueError::new_err(failure.text),
        _ => PyRuntimeError::new_err(failure.text),
    }
}

fn position(known: &[&str], name: &str, argument: &str) -> PyResult<u32> {
    let found = known.iter().position(|known| *known == name);
    let unknown = || PyValueError::new_err(format!("{argument}: expected one of {}, got {name}", known.join(", ")));
    found.map(|found| found as u32).ok_or_else(unknown)
}

/// The memory of contiguous tensors.
fn memory_of(operation: &str, tensors: &[Bound<'_, PyAny>]) -> PyResult<Vec<TensorMemory>> {
    let refused = |what: String| PyValueError::new_err(format!("{operation}: a library's backend takes no {what}"));
    let memory = |tensor: &Bound<'_, PyAny>| {
        for view in ["conj", "neg"] {
            if tensor.call_method0(format!("is_{view}"))?.is_truthy()? {
                return Err(refused(format!("views that `resolve_{view}()` would resolve")));
            }
        }
        let none = || refused("tensor without memory of its own (of a DTensor pass `to_local()`)".to_owned());
        let dtype = tensor.getattr("dtype")?.str()?.to_string();
        let name = dtype.strip_prefix("torch.").unwrap_or(&dtype);
        let position = DType::ALL.iter().position(|known| known.name() == name);
        Ok(TensorMemory {
            address: address_of(tensor)?.ok_or_else(none)?,
            len: tensor.call_method0("numel")?.extract()?,
            dtype: position.ok_or_else(|| refused(format!("tensors of {dtype}")))?,
        })
    };
    tensors.iter().map(memory).collect()
}

/// Two of the tensors that share memory.
fn overlapping(tensors: &[TensorMemory]) -> Option<(usize, usize)> {
    let share =
        |first: TensorMemory, second: TensorMemory| first.address.max(second.address) < first.end().min(second.end());
    let mut pairs = (0..tensors.len()).flat_map(|second| (0..second).map(move |first| (first, second)));
    pairs.find(|(first, second)| share(tensors[*first], tensors[*second]))
}

const WAIT_SLICE: Duration = Duration::from_millis(200);
