//! The engine's store for the Python package. It serves only clients that prove that they know its secret.

use std::time::Duration;

use ncclx_rs::StoreError;
use ncclx_rs::comm::bootstrap::Secret;
use ncclx_rs::comm::store::{Store, TcpStore};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A store of this process or of another.
#[pyclass(frozen, module = "ncclx_rs._native")]
pub(crate) struct SecretStore {
    store: TcpStore,
}

#[pymethods]
impl SecretStore {
    /// Serves a store at a free port of all of this host's addresses, until the store is dropped.
    #[staticmethod]
    fn serve(secret: [u8; 32]) -> PyResult<Self> {
        let serve = |address| TcpStore::serve_with(address, Some(Secret::new(secret)));
        // A kernel may have been built or booted without IPv6.
        let store = serve("[::]:0").or_else(|_| serve("0.0.0.0:0")).map_err(failure)?;
        Ok(SecretStore { store })
    }

    /// Connects to a store at a host or IP address with a port; waits for it up to `timeout`.
    #[staticmethod]
    fn connect(py: Python<'_>, address: &str, secret: [u8; 32], timeout: Duration) -> PyResult<Self> {
        let store =
            py.detach(|| TcpStore::connect_with(address, timeout, Some(Secret::new(secret)))).map_err(failure)?;
        Ok(SecretStore { store })
    }

    /// The port of a store that this process serves.
    #[getter]
    fn port(&self) -> Option<u16> {
        self.store.address().rsplit_once(':').and_then(|(_, port)| port.parse().ok())
    }

    fn set(&self, py: Python<'_>, key: &str, value: &[u8]) -> PyResult<()> {
        py.detach(|| self.store.set(key, value)).map_err(PyRuntimeError::new_err)
    }

    /// The value of `key`; waits for it up to `timeout`.
    fn get<'py>(&self, py: Python<'py>, key: &str, timeout: Duration) -> PyResult<Bound<'py, PyBytes>> {
        let value = py.detach(|| self.store.get(key, timeout)).map_err(PyRuntimeError::new_err)?;
        Ok(PyBytes::new(py, &value))
    }
}

fn failure(error: StoreError) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}
