//! The grid arithmetic of meshes, for Python.

use ncclx_rs_device_mesh::{Grid, GridError};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The groups along one dimension, by the dimension's name.
type Groups = Vec<(String, Vec<Vec<usize>>)>;

/// Lays out ranks in a grid; returns them in the grid's order, and the groups along each dimension.
#[pyfunction]
#[pyo3(signature = (dimensions, hosts, innermost=None))]
pub(crate) fn mesh_grid(
    dimensions: Vec<(String, usize)>,
    hosts: Vec<usize>,
    innermost: Option<&str>,
) -> PyResult<(Vec<usize>, Groups)> {
    lay_out(&dimensions, &hosts, innermost).map_err(|error| PyValueError::new_err(format!("device mesh: {error}")))
}

fn lay_out(
    dimensions: &[(String, usize)],
    hosts: &[usize],
    innermost: Option<&str>,
) -> Result<(Vec<usize>, Groups), GridError> {
    let dimensions: Vec<(&str, usize)> = dimensions.iter().map(|(name, size)| (name.as_str(), *size)).collect();
    let grid = match innermost {
        Some(innermost) => Grid::with_innermost(&dimensions, innermost, hosts)?,
        None => Grid::new(&dimensions, hosts)?,
    };
    let groups = grid.dimensions().iter().map(|dim| Ok((dim.name.clone(), grid.groups(&dim.name)?)));
    let groups = groups.collect::<Result<Groups, GridError>>()?;
    Ok((grid.ranks().to_vec(), groups))
}
