//! Transports between two processes for the Python package, which checks arguments (`_transport.py`).
#![allow(unsafe_code, reason = "lends the memory of tensors")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ncclx_rs::rdma::{Kind, MemoryRegion, Pending, RdmaError, RemoteBuffer, Span, Transport};
use ncclx_rs::sys::lent_bytes::LentBytes;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::logging;
use crate::memory::address_of;

/// Adds the classes to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<RdmaRegistration>()?;
    module.add_class::<RdmaConnection>()?;
    module.add_class::<RdmaOperation>()
}

/// The registered memory of a tensor on the CPU or a CUDA device.
#[pyclass(frozen, module = "ncclx_rs._native")]
pub(crate) struct RdmaRegistration {
    memory: MemoryRegion,
}

#[pymethods]
impl RdmaRegistration {
    #[new]
    fn new(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let is = |what| tensor.getattr(what).and_then(|is| is.extract::<bool>());
        let (is_on_cpu, is_on_device) = (is("is_cpu")?, is("is_cuda")?);
        if !(is_on_cpu || is_on_device) || !tensor.call_method0("is_contiguous")?.extract::<bool>()? {
            return Err(PyValueError::new_err(
                "RdmaMemory: argument `tensor`: expected a contiguous tensor on the CPU or a CUDA device",
            ));
        }
        let is_lazily = |what| tensor.call_method0(what).and_then(|is| is.extract::<bool>());
        if is_lazily("is_conj")? || is_lazily("is_neg")? {
            return Err(PyValueError::new_err(
                "RdmaMemory: argument `tensor`: expected a tensor whose memory has its values, got a lazily conjugated or negated \
                 one (`resolve_conj()` and `resolve_neg()` make one)",
            ));
        }
        let none = || {
            PyValueError::new_err(
                "RdmaMemory: argument `tensor`: expected a tensor with memory of its own (of a DTensor pass `to_local()`)",
            )
        };
        let address = address_of(tensor)?.ok_or_else(none)?;
        let len: usize = tensor.getattr("nbytes")?.extract()?;
        let storage = tensor.call_method0("untyped_storage")?.unbind();
        let ptr = std::ptr::with_exposed_provenance_mut(address);
        let bytes = match is_on_device {
            // SAFETY: the tensor is contiguous, and its storage has all its bytes, so they lie there; `storage` keeps them.
            true => unsafe { LentBytes::on_device(ptr, len, Box::new(storage)) },
            // SAFETY: as above.
            false => unsafe { LentBytes::from_raw(ptr, len, Box::new(storage)) },
        };
        Ok(RdmaRegistration { memory: MemoryRegion::new(Arc::new(bytes)) })
    }

    /// The address, the length and the key of `length` bytes from `offset` on, for other processes.
    fn remote_buffer(&self, py: Python<'_>, offset: usize, length: usize) -> PyResult<(u64, usize, String)> {
        let made = py.detach(|| self.memory.remote_buffer(offset, length));
        made.map(|buffer| (buffer.address, buffer.len, buffer.key.reveal())).map_err(|error| exception(&error))
    }

    /// Takes all keys back.
    fn deregister(&self, py: Python<'_>) {
        py.detach(|| self.memory.deregister());
    }
}

impl Drop for RdmaRegistration {
    fn drop(&mut self) {
        // Without Python's lock: it waits for accesses under way.
        Python::attach(|py| py.detach(|| self.memory.deregister()));
    }
}

/// A run of bytes of an operation: the registration, the offset and length there, and the remote address, length and key.
type RawSpan<'py> = (Bound<'py, RdmaRegistration>, usize, usize, u64, usize, String);

/// A transport.
#[pyclass(frozen, module = "ncclx_rs._native")]
pub(crate) struct RdmaConnection {
    transport: Transport,
}

#[pymethods]
impl RdmaConnection {
    #[new]
    fn new(hints: Vec<(String, String)>, packages: Vec<PathBuf>) -> PyResult<Self> {
        logging::warn_of_unknown(&hints)?;
        let transport = Transport::with_packages(&hints, packages).map_err(|error| exception(&error))?;
        Ok(RdmaConnection { transport })
    }

    fn bind<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = py.detach(|| self.transport.bind()).map_err(|error| exception(&error))?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn connect(&self, py: Python<'_>, peer: &[u8], timeout: Option<Duration>) -> PyResult<()> {
        let timeout = timeout.unwrap_or_else(|| self.transport.default_timeout());
        py.detach(|| self.transport.connect(peer, timeout)).map_err(|error| exception(&error))
    }

    fn is_connected(&self, py: Python<'_>) -> bool {
        py.detach(|| self.transport.is_connected())
    }

    /// How bytes move, once it is connected.
    fn wire(&self, py: Python<'_>) -> Option<&'static str> {
        py.detach(|| self.transport.wire())
    }

    /// What UCX goes through.
    fn devices(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| self.transport.devices())
    }

    /// Begins to write or read spans.
    fn post(
        &self,
        py: Python<'_>,
        writes: bool,
        spans: Vec<RawSpan<'_>>,
        timeout: Option<Duration>,
    ) -> PyResult<RdmaOperation> {
        let spans: Result<Vec<Span>, RdmaError> = spans
            .into_iter()
            .map(|(local, offset, len, address, remote_len, key)| {
                let remote = RemoteBuffer { address, len: remote_len, key: key.parse()? };
                Ok(Span { local: local.get().memory.bytes().clone(), offset, len, remote })
            })
            .collect();
        let spans = spans.map_err(|error| exception(&error))?;
        let kind = if writes { Kind::Write } else { Kind::Read };
        let timeout = timeout.unwrap_or_else(|| self.transport.default_timeout());
        let pending = py.detach(|| self.transport.post(kind, spans, timeout)).map_err(|error| exception(&error))?;
        Ok(RdmaOperation { pending })
    }

    /// Ends what is in flight, and both connections.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.transport.close());
    }
}

impl Drop for RdmaConnection {
    fn drop(&mut self) {
        // Without Python's lock: it waits for threads to end.
        Python::attach(|py| py.detach(|| self.transport.close()));
    }
}

/// An operation in flight or done.
#[pyclass(frozen, module = "ncclx_rs._native")]
pub(crate) struct RdmaOperation {
    pending: Pending,
}

#[pymethods]
impl RdmaOperation {
    /// Waits for its end, and at most for `limit`; raises its error.
    fn wait(&self, py: Python<'_>, limit: Option<Duration>) -> PyResult<()> {
        let began = Instant::now();
        loop {
            let left = limit.map(|limit| limit.saturating_sub(began.elapsed()));
            // In slices, so that signal handlers can run in between, and raise.
            let slice = left.map_or(WAIT_SLICE, |left| left.min(WAIT_SLICE));
            match py.detach(|| self.pending.wait(Some(slice))) {
                Err(RdmaError::InFlight { .. }) if left != Some(slice) => py.check_signals()?,
                Err(RdmaError::InFlight { waited }) => {
                    return Err(exception(&RdmaError::InFlight { waited: limit.unwrap_or(waited) }));
                }
                ended => return ended.map_err(|error| exception(&error)),
            }
        }
    }

    fn is_done(&self) -> bool {
        self.pending.is_done()
    }
}

fn exception(error: &RdmaError) -> PyErr {
    let text = error.to_string();
    match error {
        RdmaError::Usage(_) => PyValueError::new_err(text),
        RdmaError::Os { .. } => PyOSError::new_err(text),
        RdmaError::InFlight { .. } => PyTimeoutError::new_err(text),
        _ => PyRuntimeError::new_err(text),
    }
}

const WAIT_SLICE: Duration = Duration::from_millis(200);
