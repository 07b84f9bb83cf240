//! The Python extension module `ncclx_rs._native`: the engine behind a c10d backend.
//!
//! It serves every Python and PyTorch; what is made for one of them is the C++ shim in csrc/, which implements c10d's
//! classes. `shim` loads it, and `abi` is the C boundary to it. `config` reads the settings. `allocator` has functions that
//! PyTorch allocates device memory by, and `memory` finds that of tensors. `library` loads backends from shared libraries, `rdma`
//! reads and writes the memory of other processes, `store` serves the rendezvous of reconfigured communicators, `simulate` runs
//! collectives of worlds that are not here, and `logging` passes the engine's records to Python's logging.

mod abi;
mod allocator;
mod config;
mod convert;
mod library;
mod logging;
mod memory;
mod mesh;
mod rdma;
mod shim;
mod simulate;
mod stack;
mod store;
mod vendor;

use std::path::PathBuf;

use ncclx_rs::algo::tuning;
use ncclx_rs::sys::cuda::{Device, driver_version, provider};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// The module. The package imports `torch` and `torch.distributed` before it.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    abi::register(module)?; // first: logging calls Python through it
    logging::install(module)?;
    vendor::look_for_ucx(module.py())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(config::settings, module)?)?;
    module.add_function(wrap_pyfunction!(config::check_settings, module)?)?;
    module.add_function(wrap_pyfunction!(launch_rank_and_size, module)?)?;
    module.add_function(wrap_pyfunction!(pytorch_recorder, module)?)?;
    module.add_function(wrap_pyfunction!(algorithms, module)?)?;
    module.add_function(wrap_pyfunction!(preferred_algorithm, module)?)?;
    module.add_function(wrap_pyfunction!(descriptors_of, module)?)?;
    module.add_function(wrap_pyfunction!(interfaces, module)?)?;
    module.add_function(wrap_pyfunction!(advertised_addresses, module)?)?;
    module.add_function(wrap_pyfunction!(write_dumps, module)?)?;
    module.add_function(wrap_pyfunction!(dumps, module)?)?;
    module.add_function(wrap_pyfunction!(mesh::mesh_grid, module)?)?;
    module.add_function(wrap_pyfunction!(vendor::vendor_library, module)?)?;
    module.add_function(wrap_pyfunction!(vendor::allocates, module)?)?;
    module.add_function(wrap_pyfunction!(cuda_devices, module)?)?;
    module.add_function(wrap_pyfunction!(numa_nodes, module)?)?;
    module.add_function(wrap_pyfunction!(home_node, module)?)?;
    module.add_function(wrap_pyfunction!(measure_link, module)?)?;
    module.add_class::<store::SecretStore>()?;
    simulate::register(module)?;
    library::register(module)?;
    rdma::register(module)
}

/// This process's rank and the number of ranks, from the launcher's environment variables; (0, 1) without a launcher.
#[pyfunction]
fn launch_rank_and_size() -> PyResult<(u32, usize)> {
    let launch = ncclx_rs::Launch::from_env_or_alone().map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    Ok((launch.rank.0, launch.size))
}

/// Whether PyTorch's own flight recorder should record a process group with these hints.
#[pyfunction]
fn pytorch_recorder(hints: Vec<(String, String)>) -> PyResult<bool> {
    Ok(config::resolved(&hints)?.pytorch_recorder)
}

/// The names of the algorithms for a collective, such as `all_reduce`, of `ranks` ranks on `hosts` hosts: those that a tuning file
/// may name, or all.
#[pyfunction]
#[pyo3(signature = (collective, ranks, hosts, *, all=false))]
fn algorithms(collective: &str, ranks: usize, hosts: usize, all: bool) -> PyResult<Vec<&'static str>> {
    let find = if all { tuning::all_algorithms } else { tuning::algorithms };
    let known = find(collective, ranks, hosts);
    known.ok_or_else(|| {
        PyValueError::new_err(format!(
            "algorithms: expected a collective and at least one rank a host, got {collective} of {ranks} ranks on \
             {hosts} hosts"
        ))
    })
}

/// The algorithm that the engine takes for a collective of so many bytes in such a world.
#[pyfunction]
fn preferred_algorithm(collective: &str, ranks: usize, hosts: usize, bytes: usize) -> PyResult<&'static str> {
    tuning::preferred(collective, ranks, hosts, bytes).ok_or_else(|| {
        PyValueError::new_err(format!(
            "preferred_algorithm: expected a collective and at least one rank a host, got {collective} of {ranks} \
             ranks on {hosts} hosts"
        ))
    })
}

/// How many file descriptors a communicator of so many ranks takes at most, as this process is set.
#[pyfunction]
fn descriptors_of(ranks: usize) -> PyResult<usize> {
    Ok(ncclx_rs::transport::descriptors(ranks, config::resolved(&[])?.tcp_streams.get()))
}

/// This host's addresses: the interface's name, the address, and whether it is up.
#[pyfunction]
fn interfaces() -> PyResult<Vec<(String, String, bool)>> {
    let found = ncclx_rs::sys::net::interfaces().map_err(|error| PyOSError::new_err(error.to_string()))?;
    Ok(found.into_iter().map(|one| (one.name, one.address.to_string(), one.up)).collect())
}

/// The addresses that a rank of this host tells the others, the best first. `host` is where the rendezvous is, if that is
/// known.
#[pyfunction]
fn advertised_addresses(host: Option<&str>) -> PyResult<Vec<String>> {
    let refused = |error: ncclx_rs::InitError| PyValueError::new_err(error.to_string());
    let found = ncclx_rs::sys::net::interfaces().map_err(|error| PyOSError::new_err(error.to_string()))?;
    let filter = config::resolved(&[])?.socket_interfaces;
    let routed = host.and_then(ncclx_rs::sys::net::source_toward);
    let told = ncclx_rs::comm::address::advertised(&found, filter.as_deref(), routed).map_err(refused)?;
    Ok(told.iter().map(ToString::to_string).collect())
}

/// The version of CUDA that the driver serves, or of HIP, and the devices' names.
#[pyfunction]
fn cuda_devices() -> PyResult<(String, Vec<String>)> {
    let found = driver_version().and_then(|version| {
        let names = (0..Device::count()?).map(|number| Device::new(number)?.name()).collect::<Result<_, _>>()?;
        Ok((format!("a driver of {} {version}", provider()?), names))
    });
    found.map_err(|error| PyOSError::new_err(error.to_string()))
}

/// A node: its number, the runs of its CPUs, and how far the nodes are from it.
type NumaNode = (u32, Vec<(u32, u32)>, Vec<u32>);

/// The NUMA nodes that the folder `sys` tells of, which is `/sys` outside tests.
#[pyfunction]
fn numa_nodes(sys: PathBuf) -> Vec<NumaNode> {
    let found = ncclx_rs::sys::numa::Nodes::read(&sys);
    found.iter().map(|node| (node.number, node.cpus.clone(), node.distances.clone())).collect()
}

/// The NUMA node that a rank is on which may run where this thread may, and why its memory may not lie there, if so; none if that is
/// no one of several.
#[pyfunction]
fn home_node() -> PyResult<Option<(u32, Option<String>)>> {
    let node = ncclx_rs::sys::numa::settled(config::resolved(&[])?.numa_node).number();
    Ok(node.map(|node| {
        let home = ncclx_rs::sys::numa::Home::at(node);
        (home.node, home.refused)
    }))
}

/// Measures what two cores of this host can exchange through memory: figures by name.
#[pyfunction]
fn measure_link(py: Python<'_>, writer: u32, reader: u32) -> PyResult<Vec<(&'static str, Option<f64>)>> {
    let link = py.detach(|| ncclx_rs::link::measure([writer, reader]));
    let link = link.map_err(|error| PyOSError::new_err(format!("measure_link: {error}")))?;
    Ok(vec![
        ("round_trip", Some(link.round_trip)),
        ("write_shared", Some(link.write_shared)),
        ("write_owned", Some(link.write_owned)),
        ("read", Some(link.read)),
        ("read_owning", Some(link.read_owning)),
        ("page", link.page),
        ("memcpy", Some(link.memcpy)),
    ])
}

/// Writes the flight recorders of this process's communicators to a folder; returns the files' names.
#[pyfunction]
fn write_dumps(py: Python<'_>, folder: PathBuf, reason: &str) -> PyResult<Vec<PathBuf>> {
    Ok(py.detach(|| ncclx_rs::comm::write_dumps(&folder, reason))?)
}

/// The flight recorders of this process's communicators, each as JSON.
#[pyfunction]
fn dumps(py: Python<'_>, reason: &str) -> Vec<String> {
    py.detach(|| ncclx_rs::comm::dumps(reason))
}
