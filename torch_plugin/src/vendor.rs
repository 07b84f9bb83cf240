//! The vendors' libraries of collectives, for Python.

use std::path::PathBuf;

use ncclx_rs::config::UcxChoice;
use ncclx_rs::device::allocator;
use ncclx_rs::sync::Arc;
use ncclx_rs::sys::nccl::{Feature, Nccl, Vendor};
use ncclx_rs::sys::ucx::Ucx;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::config;

/// What is known of a library: its file, its version, and what it lacks of what a newer one can do.
type Found = (PathBuf, String, Vec<&'static str>);

/// Loads the library `nccl`, `rccl` or `ucx`: that of the settings, or the first that is found.
#[pyfunction]
pub(crate) fn vendor_library(py: Python<'_>, name: &str, packages: Vec<PathBuf>) -> PyResult<Found> {
    let config = config::resolved(&[])?;
    let (vendor, named) = match name {
        "nccl" => (Vendor::Nccl, config.nccl_library),
        "rccl" => (Vendor::Rccl, config.rccl_library),
        "ucx" => return ucx(py, config.ucx, packages),
        _ => return Err(PyValueError::new_err(format!("vendor_library: expected nccl, rccl or ucx, got {name}"))),
    };
    let named = named.map(PathBuf::from);
    // Its initialisers may take a while.
    let library = py.detach(|| Nccl::load(vendor, named.as_deref(), &packages));
    let library = library.map_err(|error| PyOSError::new_err(error.to_string()))?;
    let lacks = Feature::ALL.iter().filter(|feature| !library.features().contains(feature));
    Ok((library.path().to_owned(), library.version().to_string(), lacks.map(|feature| feature.text()).collect()))
}

/// Has UCX looked for in the folder of the environment's packages, where communicators take it too.
pub(crate) fn look_for_ucx(py: Python<'_>) -> PyResult<()> {
    let folder = py.import("sysconfig")?.call_method1("get_path", ("purelib",))?.extract()?;
    ncclx_rs::sys::ucx::look_in(folder);
    Ok(())
}

/// Whether a library allocates for communicators that are set to `nccl` or `rccl`, or as the settings say; else why not, if it
/// should. It does from now on.
#[pyfunction]
#[pyo3(signature = (library, packages))]
pub(crate) fn allocates(py: Python<'_>, library: Option<&str>, packages: Vec<PathBuf>) -> PyResult<(bool, String)> {
    let config = config::resolved(&[])?;
    let (vendor, named) = match library.unwrap_or(config.engine.name()) {
        "nccl" => (Vendor::Nccl, config.nccl_library),
        "rccl" => (Vendor::Rccl, config.rccl_library),
        _ => return Ok((false, String::new())),
    };
    let library = py.detach(|| Nccl::load(vendor, named.map(PathBuf::from).as_deref(), &packages));
    let library = library.map_err(|error| PyOSError::new_err(error.to_string()))?;
    let set = allocator::use_library(&Arc::new(library));
    Ok((set.is_ok(), set.err().map(|error| error.to_string()).unwrap_or_default()))
}

fn ucx(py: Python<'_>, choice: UcxChoice, packages: Vec<PathBuf>) -> PyResult<Found> {
    let named = match choice {
        UcxChoice::Off => return Err(PyOSError::new_err("the setting `ucx` is off")),
        UcxChoice::Auto => None,
        UcxChoice::File(path) => Some(path),
    };
    let library = py.detach(|| Ucx::load(named.as_deref(), &packages));
    let library = library.map_err(|error| PyOSError::new_err(error.to_string()))?;
    Ok((library.path().to_owned(), library.version().to_string(), Vec::new()))
}
