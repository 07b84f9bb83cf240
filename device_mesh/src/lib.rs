//! Rank-grid arithmetic: ranks in a grid with named dimensions, and the groups along them.
//!
//! ```
//! use ncclx_rs_device_mesh::Grid;
//!
//! let grid = Grid::new(&[("dp", 2), ("tp", 3)], &[0; 6])?;
//! assert_eq!(grid.groups("tp")?, [vec![0, 1, 2], vec![3, 4, 5]]);
//! assert_eq!(grid.groups("dp")?, [vec![0, 3], vec![1, 4], vec![2, 5]]);
//! assert_eq!(grid.flatten(&["dp", "tp"], "world")?.groups("world")?, [vec![0, 1, 2, 3, 4, 5]]);
//! # Ok::<(), ncclx_rs_device_mesh::GridError>(())
//! ```

mod grid;
mod place;

pub use grid::{Dimension, Grid, GridError};
