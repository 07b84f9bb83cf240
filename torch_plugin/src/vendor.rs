//! The vendors' libraries of collectives, for Python.

use std::path::PathBuf;

use ncclx_rs::config::Config;
use ncclx_rs::sys::nccl::{Feature, Nccl, Vendor};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

/// What is known of a library: its file, its version, and what it lacks of what a newer one can do.
type Found = (PathBuf, String, Vec<&'static str>);

/// Loads the library `nccl` or `rccl`: that of the settings, or the first that is found.
#[pyfunction]
pub(crate) fn vendor_library(py: Python<'_>, name: &str, packages: Vec<PathBuf>) -> PyResult<Found> {
    let config = Config::resolve(&[]).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let (vendor, named) = match name {
        "nccl" => (Vendor::Nccl, config.nccl_library),
        "rccl" => (Vendor::Rccl, config.rccl_library),
        _ => return Err(PyValueError::new_err(format!("vendor_library: expected nccl or rccl, got {name}"))),
    };
    let named = named.map(PathBuf::from);
    // Its initialisers may take a while.
    let library = py.detach(|| Nccl::load(vendor, named.as_deref(), &packages));
    let library = library.map_err(|error| PyOSError::new_err(error.to_string()))?;
    let lacks = Feature::ALL.iter().filter(|feature| !library.features().contains(feature));
    Ok((library.path().to_owned(), library.version().to_string(), lacks.map(|feature| feature.text()).collect()))
}
