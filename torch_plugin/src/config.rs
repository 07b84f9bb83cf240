//! The engine's settings, for Python.

use ncclx_rs::config::{Config, unknown_hints};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The settings of this process, before which these hints go.
pub(crate) fn resolved(hints: &[(String, String)]) -> PyResult<Config> {
    Config::resolve(hints).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Raises ValueError if a setting of this process or one of these hints has no valid value. Unknown hints are left to whoever uses them.
#[pyfunction]
pub(crate) fn check_settings(mut hints: Vec<(String, String)>) -> PyResult<()> {
    let unknown: Vec<_> = unknown_hints(&hints).into_iter().map(str::to_owned).collect();
    hints.retain(|(name, _)| !unknown.contains(name));
    resolved(&hints).map(drop)
}

/// Every setting: name, environment variables, values, default and meaning.
#[pyfunction]
pub(crate) fn settings() -> Vec<(String, Vec<String>, String, String, String)> {
    Config::describe()
        .into_iter()
        .map(|row| {
            (row.name.to_owned(), row.variables, row.kind.to_owned(), row.default.to_owned(), row.meaning.to_owned())
        })
        .collect()
}
