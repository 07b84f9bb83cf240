//! Whose devices a process uses: NVIDIA's by CUDA, or AMD's by HIP, whose functions have the same parameters.
#![allow(unsafe_code, reason = "loads a library")]

use std::fmt;

use libc::{RTLD_LAZY, RTLD_LOCAL, RTLD_NOLOAD, c_int};
use libloading::os::unix::Library;
use serde::{Deserialize, Serialize};

/// Whose interface a process calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Provider {
    /// NVIDIA's driver, `libcuda.so.1`.
    Cuda,
    /// AMD's runtime, `libamdhip64.so`. PyTorch calls its devices "cuda" too.
    Hip,
}

impl Provider {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Provider::Cuda => "CUDA",
            Provider::Hip => "HIP",
        }
    }

    /// Whether a function's name is one of its interface.
    pub(super) fn has(self, function: &str) -> bool {
        function.starts_with(if self == Provider::Hip { "hip" } else { "cu" })
    }
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The files of HIP's runtime, the newest first. A system without its development files has only the first.
const HIP_FILES: [&str; 2] = ["libamdhip64.so.7", "libamdhip64.so"];

/// Those of CUDA's driver.
const CUDA_FILES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The library of this process's devices: HIP's if the process has loaded it, as PyTorch for ROCm has; else CUDA's if there is
/// one, else HIP's.
pub(super) fn find() -> Option<(Provider, Library)> {
    let any = |provider, files: [&str; 2], flags| Some((provider, files.iter().find_map(|file| open(file, flags))?));
    any(Provider::Hip, HIP_FILES, RTLD_NOLOAD)
        .or_else(|| any(Provider::Cuda, CUDA_FILES, 0))
        .or_else(|| any(Provider::Hip, HIP_FILES, 0))
}

fn open(file: &str, flags: c_int) -> Option<Library> {
    // SAFETY: this runs the initialisers of a library of this name, which are its vendor's.
    unsafe { Library::open(Some(file), RTLD_LAZY | RTLD_LOCAL | flags) }.ok()
}
