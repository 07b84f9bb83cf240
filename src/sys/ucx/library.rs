//! Finding and loading the library.
#![allow(unsafe_code, reason = "calls a library in C")]

use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libc::{RTLD_NOLOAD, RTLD_NOW};
use libloading::os::unix::Library;

use super::functions::{Functions, Status};
use crate::sync::{Mutex, lock};
use crate::sys::library::{as_listed, file_of, said};

/// The library's file, as the system's loader knows it.
const FILE: &str = "libucp.so.0";

/// The folder below Python's packages in which the packages libucx-cu12 and libucx-cu13 have it.
const PACKAGE: &str = "libucx/lib";

/// Folders of Python packages in which the library is looked for, beside those that a caller names.
static PACKAGES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Has the library also looked for in this folder of Python packages from now on.
pub fn look_in(packages: PathBuf) {
    let mut folders = lock(&PACKAGES);
    if !folders.contains(&packages) {
        folders.push(packages);
    }
}

/// A version of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

impl Version {
    /// The first that this engine knows.
    pub const OLDEST: Version = Version { major: 1, minor: 14, patch: 0 };

    /// The first that is known to read memory through `cma` whatever the length. Older ones may ask the peer's process for few bytes.
    pub const READS_BY_CMA: Version = Version { major: 1, minor: 22, patch: 0 };
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Why the library is of no use, or a call of it failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UcxError {
    /// It was not found.
    #[error("{FILE} is in none of {folders:?}, and the system does not find it: {cause}")]
    Missing {
        /// Where it was looked for.
        folders: Vec<PathBuf>,
        /// What the loader says.
        cause: String,
    },
    /// It cannot be loaded.
    #[error("{path} cannot be loaded: {cause}")]
    Broken {
        /// The library.
        path: PathBuf,
        /// What the loader says.
        cause: String,
    },
    /// It lacks a function.
    #[error("{path} is no UCX: it lacks {function}")]
    Function {
        /// The library.
        path: PathBuf,
        /// The function.
        function: &'static str,
    },
    /// It is too old.
    #[error("{path} is UCX {version}, and {} is the oldest that works", Version::OLDEST)]
    TooOld {
        /// The library.
        path: PathBuf,
        /// Its version.
        version: Version,
    },
    /// It was built for one thread.
    #[error("{path} was built without --enable-mt, so several threads cannot use it")]
    OneThread {
        /// The library.
        path: PathBuf,
    },
    /// It does not reach the memory of CUDA devices.
    #[error(
        "{path} reaches no memory of CUDA devices: it was built without CUDA, found no driver, or UCX_TLS lacks cuda_copy"
    )]
    NoCuda {
        /// The library.
        path: PathBuf,
    },
    /// Its threads are in another process.
    #[error("this process was forked from one that had used UCX, whose threads a fork leaves behind")]
    Forked,
    /// A call has failed.
    #[error("{call}: {reason}")]
    Call {
        /// The function.
        call: &'static str,
        /// What the library says.
        reason: String,
    },
}

/// The library.
pub struct Ucx {
    path: PathBuf,
    version: Version,
    functions: Functions,
    // Never unloaded: it patches functions of the process, and has threads of its own.
    _library: ManuallyDrop<Library>,
}

impl fmt::Debug for Ucx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, version) = (&self.path, self.version);
        f.debug_struct("Ucx").field("path", path).field("version", &version).finish_non_exhaustive()
    }
}

impl Ucx {
    /// Loads the library: the file that a user has named; else the one that the process has loaded already, the system's, or
    /// the one below a folder of Python packages.
    ///
    /// # Errors
    /// None is found, or the first is of no use: where it is, and why.
    pub fn load(named: Option<&Path>, packages: &[PathBuf]) -> Result<Ucx, UcxError> {
        if let Some(path) = named {
            return Ucx::open(path, RTLD_NOW)
                .unwrap_or_else(|cause| Err(UcxError::Broken { path: path.to_owned(), cause: said(&cause) }));
        }
        let file = Path::new(FILE);
        if let Ok(resident) = Ucx::open(file, RTLD_NOW | RTLD_NOLOAD) {
            return resident;
        }
        let cause = match Ucx::open(file, RTLD_NOW) {
            Ok(systems) => return systems,
            Err(cause) => said(&cause),
        };
        let known = lock(&PACKAGES).clone();
        let mut folders: Vec<PathBuf> = packages.iter().chain(&known).map(|folder| folder.join(PACKAGE)).collect();
        folders.dedup();
        match folders.iter().map(|folder| folder.join(FILE)).find(|path| path.exists()) {
            Some(path) => Ucx::load(Some(&path), &[]),
            None => Err(UcxError::Missing { folders, cause }),
        }
    }

    /// The outer error: there is no such file, or it is no library.
    fn open(path: &Path, flags: c_int) -> Result<Result<Ucx, UcxError>, libloading::Error> {
        // SAFETY: the library's initialisers ask nothing of who loads it.
        let library = unsafe { Library::open(Some(path), flags) }?;
        Ok(Ucx::of(library, path))
    }

    fn of(library: Library, path: &Path) -> Result<Ucx, UcxError> {
        let functions = Functions::of(&library, as_listed)
            .map_err(|function| UcxError::Function { path: path.to_owned(), function })?;
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: it writes to three numbers, which live.
        unsafe { (functions.get_version)(&raw mut major, &raw mut minor, &raw mut patch) };
        let version = Version { major, minor, patch };
        let path = file_of(functions.get_version as *const c_void).unwrap_or_else(|| path.to_owned());
        check_version(&path, version)?;
        Ok(Ucx { path, version, functions, _library: ManuallyDrop::new(library) })
    }

    /// A library of these functions.
    #[cfg(test)]
    pub(super) fn with(functions: Functions, version: Version) -> Ucx {
        let library = ManuallyDrop::new(Library::this());
        Ucx { path: PathBuf::new(), version, functions, _library: library }
    }

    /// The library's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    pub(super) fn check(&self, call: &'static str, status: Status) -> Result<(), UcxError> {
        if status == super::functions::OK { Ok(()) } else { Err(self.failed(call, status)) }
    }

    /// The error of a call.
    pub(super) fn failed(&self, call: &'static str, status: Status) -> UcxError {
        // SAFETY: it takes any number.
        let text = unsafe { (self.functions.status_string)(status) };
        // SAFETY: the library's own text, which stays and ends with NUL.
        let text = unsafe { CStr::from_ptr(text) };
        UcxError::Call { call, reason: text.to_string_lossy().into_owned() }
    }
}

fn check_version(path: &Path, version: Version) -> Result<(), UcxError> {
    if version < Version::OLDEST {
        return Err(UcxError::TooOld { path: path.to_owned(), version });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_ucx_is_named() {
        let load = |path: &str| Ucx::load(Some(Path::new(path)), &[]).expect_err("it is none").to_string();
        let missing = load("/nowhere/libucp.so.0");
        let expected = "/nowhere/libucp.so.0 cannot be loaded: /nowhere/libucp.so.0: cannot open shared object file";
        assert!(missing.starts_with(expected), "{missing}");
        assert_eq!(load("libm.so.6"), "libm.so.6 is no UCX: it lacks ucp_get_version");
    }

    #[test]
    fn a_version_that_is_too_old_is_named() {
        let check = |minor| check_version(Path::new("/a/libucp.so.0"), Version { major: 1, minor, patch: 7 });
        assert_eq!(check(14), Ok(()));
        let error = check(13).expect_err("too old").to_string();
        assert_eq!(error, "/a/libucp.so.0 is UCX 1.13.7, and 1.14.0 is the oldest that works");
    }
}
