//! Where tests find UCX.

use std::path::{Path, PathBuf};

/// The library: the one that `NCCLX_RS_TEST_UCX` names, or that of the Python package in the environment of the tests.
pub(crate) fn library() -> Option<PathBuf> {
    let environment = std::env::var("VIRTUAL_ENV")
        .map_or_else(|_| Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv"), PathBuf::from);
    let named = std::env::var_os("NCCLX_RS_TEST_UCX").map(PathBuf::from);
    let folders = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
    let installed = folders.map(|python| python.path().join("site-packages/libucx/lib/libucp.so.0"));
    named.into_iter().chain(installed).find(|file| file.exists())
}
