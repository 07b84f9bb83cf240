//! Simulated collectives, and the measured parameters of their model.

use ncclx_rs::comm::bootstrap::simulate_start as run_start;
use ncclx_rs::measure::{Measured, measure};
use ncclx_rs::simulate::{Case, Model, Report, SimulateError, Traffic, World, simulate as run};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Makes the module's functions known.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(check_parameters, module)?)?;
    module.add_function(wrap_pyfunction!(check_world, module)?)?;
    module.add_function(wrap_pyfunction!(simulate, module)?)?;
    module.add_function(wrap_pyfunction!(simulate_start, module)?)?;
    module.add_function(wrap_pyfunction!(measure_parameters, module)?)
}

/// Checks parameters as JSON.
#[pyfunction]
fn check_parameters(parameters: &str) -> PyResult<()> {
    Model::parse(parameters).map(|_| ()).map_err(PyValueError::new_err)
}

/// Checks the size of a world.
#[pyfunction]
fn check_world(ranks_per_host: usize, hosts: usize) -> PyResult<()> {
    World::new(ranks_per_host, hosts).map(|_| ()).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Simulates one collective in one world.
#[pyfunction]
#[pyo3(signature = (parameters, collective, algorithm, bytes, *, ranks_per_host, hosts, late))]
#[allow(clippy::too_many_arguments, reason = "Python names them")]
fn simulate<'py>(
    py: Python<'py>,
    parameters: &str,
    collective: &str,
    algorithm: &str,
    bytes: usize,
    ranks_per_host: usize,
    hosts: usize,
    late: Vec<(usize, f64)>,
) -> PyResult<Bound<'py, PyDict>> {
    let model = Model::parse(parameters).map_err(PyValueError::new_err)?;
    let case = Case { collective, algorithm, bytes };
    let report = py.detach(|| run(&case, &World::new(ranks_per_host, hosts)?, &model, &late)).map_err(refused)?;
    told(py, &report, ranks_per_host, hosts)
}

/// Simulates how the ranks of one world meet.
#[pyfunction]
#[pyo3(signature = (parameters, *, ranks_per_host, hosts, late))]
fn simulate_start<'py>(
    py: Python<'py>,
    parameters: &str,
    ranks_per_host: usize,
    hosts: usize,
    late: Vec<(usize, f64)>,
) -> PyResult<Bound<'py, PyDict>> {
    let model = Model::parse(parameters).map_err(PyValueError::new_err)?;
    let report = py.detach(|| run_start(&World::new(ranks_per_host, hosts)?, &model, &late)).map_err(refused)?;
    told(py, &report, ranks_per_host, hosts)
}

fn refused(error: SimulateError) -> PyErr {
    match error {
        SimulateError::Steps { .. } | SimulateError::Table { .. } | SimulateError::Time => {
            PyRuntimeError::new_err(error.to_string())
        }
        _ => PyValueError::new_err(error.to_string()),
    }
}

/// A report by the names of its figures.
fn told<'py>(py: Python<'py>, report: &Report, ranks_per_host: usize, hosts: usize) -> PyResult<Bound<'py, PyDict>> {
    let found = PyDict::new(py);
    found.set_item("bytes", report.bytes)?;
    found.set_item("seconds", report.time.seconds())?;
    found.set_item("late_costs", report.time.minus(report.time_without_late).seconds())?;
    let ranks = (ranks_per_host * hosts) as f64;
    for (whose, most, total, count) in [
        ("rank", report.rank_most, report.rank_total, ranks),
        ("host", report.host_most, report.host_total, hosts as f64),
    ] {
        let Traffic { messages, bytes } = most;
        found.set_item(format!("{whose}_messages_max"), messages)?;
        found.set_item(format!("{whose}_messages_mean"), total.messages as f64 / count)?;
        found.set_item(format!("{whose}_bytes_max"), bytes)?;
        found.set_item(format!("{whose}_bytes_mean"), total.bytes as f64 / count)?;
    }
    Ok(found)
}

/// Measures the parameters between two ranks of this host: seconds by name.
#[pyfunction]
fn measure_parameters(py: Python<'_>) -> PyResult<Vec<(&'static str, f64)>> {
    let found = py.detach(measure).map_err(|error| PyRuntimeError::new_err(format!("measure_parameters: {error}")))?;
    let Measured { latency, overhead, gap, gap_per_byte, reduce_per_byte, copy_per_byte, admit, relay, table_per_rank } =
        found;
    Ok(vec![
        ("latency", latency),
        ("overhead", overhead),
        ("gap", gap),
        ("gap_per_byte", gap_per_byte),
        ("reduce_per_byte", reduce_per_byte),
        ("copy_per_byte", copy_per_byte),
        ("admit", admit),
        ("relay", relay),
        ("table_per_rank", table_per_rank),
    ])
}
