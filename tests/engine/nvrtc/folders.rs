//! Where the compiler is.

use std::fs;
use std::path::{Path, PathBuf};

/// The folders of PyTorch's wheels in the environment of the tests.
pub(crate) fn folders() -> Vec<PathBuf> {
    let environment = std::env::var("VIRTUAL_ENV")
        .map_or_else(|_| Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv"), PathBuf::from);
    let libraries = fs::read_dir(environment.join("lib")).into_iter().flatten().flatten().map(|entry| entry.path());
    let of =
        |python: PathBuf| ["cu13/lib", "cuda_nvrtc/lib"].map(|name| python.join("site-packages/nvidia").join(name));
    libraries.flat_map(of).filter(|folder| folder.exists()).collect()
}
