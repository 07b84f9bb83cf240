//! Compiles the kernels for a device, or takes what was compiled before.

use std::path::{Path, PathBuf};

use crate::device::kernels::cache::{Cache, Key};
use crate::device::kernels::{Module, SOURCE};
use crate::sys::nvrtc::{Nvrtc, NvrtcError};

/// So that the kernels have the CPU's bits: nothing is contracted, flushed or approximated.
const ARITHMETIC: [&str; 4] = ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"];
const LANGUAGE: [&str; 2] = ["--std=c++17", "--device-int128"];
/// The same for hipRTC, which otherwise contracts, and by default does nothing else of that.
const FOR_HIP: [&str; 2] = ["-ffp-contract=off", "-std=c++17"];

/// Why there are no kernels.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// There is no compiler.
    #[error("reductions of CUDA tensors need NVRTC: {reason}. Install it: pip install {}", package(*.newest))]
    NoCompiler {
        /// Why not.
        reason: NvrtcError,
        /// The newest version of CUDA that the driver runs.
        newest: u32,
    },
    /// There is no compiler for AMD's devices.
    #[error("reductions of tensors on AMD's devices need hipRTC, which ROCm has: {0}")]
    NoHipCompiler(NvrtcError),
    /// The compiler knows no device like this one.
    #[error("NVRTC {}.{} does not compile for devices of compute capability {}.{}", .version.0, .version.1, .architecture / 10, .architecture % 10)]
    Architecture {
        /// The device's: 90 is compute capability 9.0.
        architecture: u32,
        /// The compiler's.
        version: (u32, u32),
    },
    /// The compiler does not take the source.
    #[error("the kernels of {module} cannot be compiled: {reason}")]
    Source {
        /// The type of their elements.
        module: &'static str,
        /// Why not.
        reason: NvrtcError,
    },
}

/// The package of pip that has the compiler. From CUDA 13 on its name has no version.
fn package(newest: u32) -> String {
    if newest >= 13 { format!("nvidia-cuda-nvrtc=={newest}.*") } else { format!("nvidia-cuda-nvrtc-cu{newest}") }
}

/// Compiles kernels.
#[derive(Debug)]
pub struct Compiler {
    nvrtc: Nvrtc,
    /// What it calls the devices of HIP that it compiles for, if it is hipRTC.
    hip: Option<String>,
    cache: Option<Cache>,
}

impl Compiler {
    /// The compiler of one of `folders`, else of the system, for a driver that runs up to this version of CUDA. Without a
    /// cache it compiles anew in each process.
    pub fn load(folders: &[PathBuf], newest: u32, cache: Option<Cache>) -> Result<Compiler, CompileError> {
        let nvrtc = Nvrtc::load(folders, newest).map_err(|reason| CompileError::NoCompiler { reason, newest })?;
        Ok(Compiler { nvrtc, hip: None, cache })
    }

    /// The compiler of one of `folders`, else of the system, for AMD's devices that it calls `architecture`.
    pub fn load_for_hip(
        folders: &[PathBuf],
        architecture: String,
        cache: Option<Cache>,
    ) -> Result<Compiler, CompileError> {
        let nvrtc = Nvrtc::load_for_hip(folders).map_err(CompileError::NoHipCompiler)?;
        Ok(Compiler { nvrtc, hip: Some(architecture), cache })
    }

    /// The code of a module for devices of this compute capability: 90 is 9.0. hipRTC compiles for the devices that it was loaded for.
    pub fn module(&self, module: Module, architecture: u32) -> Result<Vec<u8>, CompileError> {
        let (version, known) = (self.nvrtc.version(), self.target(architecture)?);
        let options = self.options(module, known);
        let key = key(&options, version);
        if let Some(cubin) = self.cached(&key) {
            return Ok(cubin);
        }
        let compiled = self.nvrtc.compile("kernels.cu", SOURCE, &options);
        let cubin = compiled.map_err(|reason| CompileError::Source { module: module.name(), reason })?;
        if let Some(Err(error)) = self.cache.as_ref().map(|cache| cache.store(&key, &cubin)) {
            log::warn!("kernels are compiled again in each process, because they cannot be kept: {error}");
        }
        Ok(cubin)
    }

    /// The architecture whose code devices of this compute capability run.
    pub(crate) fn target(&self, architecture: u32) -> Result<u32, CompileError> {
        if self.hip.is_some() {
            return Ok(architecture);
        }
        let version = self.nvrtc.version();
        fitting(architecture, self.nvrtc.architectures()).ok_or(CompileError::Architecture { architecture, version })
    }

    /// The path of a module's entry in the cache, if there is a cache.
    pub fn entry(&self, module: Module, architecture: u32) -> Option<PathBuf> {
        let known = self.target(architecture).ok()?;
        Some(self.cache.as_ref()?.path(&key(&self.options(module, known), self.nvrtc.version())))
    }

    fn options(&self, module: Module, architecture: u32) -> Vec<String> {
        let (fixed, target) = match &self.hip {
            Some(name) => (FOR_HIP.to_vec(), format!("--offload-arch={name}")),
            None => ([&ARITHMETIC[..], &LANGUAGE].concat(), format!("--gpu-architecture=sm_{architecture}")),
        };
        let fixed = fixed.into_iter().map(ToOwned::to_owned);
        fixed.chain([target, format!("-D{}", module.definition())]).collect()
    }

    fn cached(&self, key: &Key) -> Option<Vec<u8>> {
        self.cache.as_ref()?.load(key).unwrap_or_else(|error| {
            log::warn!("kernels that were compiled before cannot be read: {error}");
            None
        })
    }
}

fn key(options: &[String], version: (u32, u32)) -> Key {
    let version = format!("{}.{}", version.0, version.1);
    Key::new([SOURCE, &version].into_iter().chain(options.iter().map(String::as_str)))
}

/// Of the architectures that a compiler knows, the nearest whose code runs on the device: of the same generation and not newer.
fn fitting(architecture: u32, known: &[u32]) -> Option<u32> {
    known.iter().copied().filter(|known| *known <= architecture && known / 10 == architecture / 10).max()
}

/// Where a process that has loaded the runtime of CUDA or HIP may find the compiler of the same wheels: `maps` is what
/// /proc/self/maps holds.
pub fn folders_beside_runtime(maps: &str) -> Vec<PathBuf> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|start| Path::new(&line[start..])));
    let is_runtime = |path: &&Path| {
        let name = path.file_name().map_or(&[][..], |name| name.as_encoded_bytes());
        name.starts_with(b"libcudart") || name.starts_with(b"libamdhip64")
    };
    let mut folders = Vec::new();
    for folder in paths.filter(is_runtime).filter_map(Path::parent) {
        // For CUDA 13 one folder has them both; for CUDA 12 each package has its own.
        let packages = folder.parent().and_then(Path::parent);
        let own = packages.map(|packages| packages.join("cuda_nvrtc/lib"));
        for found in [Some(folder.to_owned()), own].into_iter().flatten() {
            if !folders.contains(&found) {
                folders.push(found);
            }
        }
    }
    folders
}

/// The user's folder for compiled kernels. `variable` looks up an environment variable.
pub fn cache_folder(variable: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(base.join("ncclx_rs/kernels"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_of_the_same_generation_runs_on_newer_devices() {
        let known = [75, 80, 86, 87, 89, 90, 100, 120];
        assert_eq!(fitting(90, &known), Some(90));
        assert_eq!(fitting(88, &known), Some(87));
        assert_eq!(fitting(103, &known), Some(100));
        assert_eq!(fitting(70, &known), None);
        assert_eq!(fitting(110, &known), None);
    }

    #[test]
    fn the_compiler_is_looked_for_beside_the_runtime() {
        let maps = "7f00-7f01 r-xp 00000000 08:01 12 /site/nvidia/cu13/lib/libcudart.so.13\n\
                    7f01-7f02 r--p 00001000 08:01 12 /site/nvidia/cu13/lib/libcudart.so.13\n\
                    7f02-7f03 rw-p 00000000 00:00 0 [heap]\n\
                    7f03-7f04 r-xp 00000000 08:01 13 /lib/libc.so.6";
        assert_eq!(folders_beside_runtime(maps)[0], Path::new("/site/nvidia/cu13/lib"));
        let maps = "7f00-7f01 r-xp 00000000 08:01 12 /site/nvidia/cuda_runtime/lib/libcudart.so.12";
        assert!(folders_beside_runtime(maps).contains(&PathBuf::from("/site/nvidia/cuda_nvrtc/lib")));
    }

    #[test]
    fn the_cache_is_where_the_user_keeps_caches() {
        let folder = |cache: &str, home: &str| {
            let (cache, home) = (cache.to_owned(), home.to_owned());
            cache_folder(move |name| Some(if name == "HOME" { home.clone() } else { cache.clone() }))
        };
        assert_eq!(folder("/var/cache/ada", "/home/ada"), Some("/var/cache/ada/ncclx_rs/kernels".into()));
        assert_eq!(folder("relative", "/home/ada"), Some("/home/ada/.cache/ncclx_rs/kernels".into()));
        assert_eq!(folder("", ""), None);
    }
}
