//! Finding and loading the library of a vendor, and what it can do.
#![allow(unsafe_code, reason = "calls a library in C")]

use std::ffi::{CStr, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libc::{RTLD_NOLOAD, RTLD_NOW};
use libloading::os::unix::Library;

use super::functions::{Code, Functions};
use crate::sys::library::{as_listed, file_of, said};

/// Whose library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// NVIDIA's.
    Nccl,
    /// AMD's.
    Rccl,
}

impl Vendor {
    /// All.
    pub const ALL: [Vendor; 2] = [Vendor::Nccl, Vendor::Rccl];

    /// The library's name.
    pub fn name(self) -> &'static str {
        match self {
            Vendor::Nccl => "NCCL",
            Vendor::Rccl => "RCCL",
        }
    }

    /// Its file, as the system's loader knows it.
    fn file(self) -> &'static str {
        match self {
            Vendor::Nccl => "libnccl.so.2",
            Vendor::Rccl => "librccl.so.1",
        }
    }

    /// The folder below Python's packages in which the vendor's package has it.
    fn package(self) -> &'static str {
        match self {
            Vendor::Nccl => "nvidia/nccl/lib",
            Vendor::Rccl => "_rocm_sdk_libraries/lib",
        }
    }
}

/// A version of a library. RCCL counts as NCCL does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

impl Version {
    /// The first that this engine knows.
    pub const OLDEST: Version = Version { major: 2, minor: 27, patch: 0 };

    /// From `NCCL_VERSION_CODE`, which had fewer digits until 2.8.
    pub fn from_code(code: u32) -> Version {
        let thousand = if code < 10_000 { 1_000 } else { 10_000 };
        Version { major: code / thousand, minor: code % thousand / 100, patch: code % 100 }
    }

    /// Its first two numbers. Libraries that have them alike work together.
    pub fn release(self) -> (u32, u32) {
        (self.major, self.minor)
    }

    /// As [`Version::from_code`] takes it, since 2.9.
    pub fn to_code(self) -> u32 {
        self.major * 10_000 + self.minor * 100 + self.patch
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Why a library is of no use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// It was not found.
    #[error("{file} is in none of {folders:?}, and the system does not find it: {cause}")]
    Missing {
        /// Its name.
        file: &'static str,
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
    /// It is another library, or a damaged one.
    #[error("{path} is no {name}: it lacks {function}")]
    Function {
        /// The library.
        path: PathBuf,
        /// What it should be.
        name: &'static str,
        /// What it lacks.
        function: &'static str,
    },
    /// It is older than what this engine knows.
    #[error("{path} is {name} {version}; {} or newer is needed", Version::OLDEST)]
    TooOld {
        /// The library.
        path: PathBuf,
        /// What it is.
        name: &'static str,
        /// Its version.
        version: Version,
    },
    /// It has been given up, and has not let go of memory.
    #[error("its communicator has been given up, and CUDA graphs hold it until they are destroyed")]
    Held,
    /// It cannot do something.
    #[error("{library} {version} has no {what}")]
    Lacks {
        /// What it is.
        library: &'static str,
        /// Its version.
        version: Version,
        /// What it lacks.
        what: &'static str,
    },
    /// A communicator of it was given up.
    #[error("its communicator has been given up")]
    Gone,
    /// A call failed.
    #[error("{call}: {reason}")]
    Call {
        /// Which.
        call: &'static str,
        /// What the library says.
        reason: String,
    },
}

macro_rules! features {
    ($($(#[doc = $meaning:literal])* $feature:ident, $text:literal, ($major:literal, $minor:literal), [$($function:literal),*];)*) => {
        /// What not every library can do.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Feature {
            $($(#[doc = $meaning])* $feature,)*
        }

        impl Feature {
            /// All.
            pub const ALL: &[Feature] = &[$(Feature::$feature),*];

            /// In words.
            pub fn text(self) -> &'static str {
                match self { $(Feature::$feature => $text,)* }
            }

            /// The first version whose functions have the types that this engine knows.
            fn since(self) -> Version {
                match self { $(Feature::$feature => Version { major: $major, minor: $minor, patch: 0 },)* }
            }

            /// The functions that it takes.
            fn functions(self) -> &'static [&'static str] {
                match self { $(Feature::$feature => &[$($function),*],)* }
            }
        }
    };
}

features! {
    /// `ncclCommSplit`.
    Split, "split", (2, 18), ["ncclCommSplit"];
    /// PREMUL_SUM.
    Factors, "PREMUL_SUM", (2, 11), ["ncclRedOpCreatePreMulSum", "ncclRedOpDestroy"];
    /// `ncclMemAlloc`, and buffers that are registered with a communicator.
    Memory, "registered buffers", (2, 19), ["ncclMemAlloc", "ncclMemFree", "ncclCommRegister", "ncclCommDeregister"];
    /// A communicator that starts from several unique ids.
    Roots, "several roots", (2, 23), ["ncclCommInitRankScalable"];
    /// A communicator of the ranks that are left.
    Shrink, "shrink", (2, 27), ["ncclCommShrink"];
    /// Memory in which all ranks have the same windows.
    Windows, "windows", (2, 27), ["ncclCommWindowRegister", "ncclCommWindowDeregister"];
    /// all_to_all, gather and scatter in one call each.
    Composed, "all_to_all, gather and scatter as calls", (2, 28), ["ncclAlltoAll", "ncclGather", "ncclScatter"];
    /// What is in flight is given up, and the communicator can still be shrunk.
    Revoke, "revoke", (2, 28), ["ncclCommRevoke"];
    /// A communicator with more ranks.
    Grow, "grow", (2, 29), ["ncclCommGrow", "ncclCommGetUniqueId"];
    /// Puts and signals that the host starts.
    OneSided, "put and signal", (2, 29), ["ncclPutSignal", "ncclSignal", "ncclWaitSignal"];
}

/// A vendor's library.
pub struct Nccl {
    vendor: Vendor,
    path: PathBuf,
    version: Version,
    features: Vec<Feature>,
    functions: Functions,
    // Never unloaded: it has threads of its own.
    _library: ManuallyDrop<Library>,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, version) = (&self.path, self.version);
        f.debug_struct("Nccl").field("path", path).field("version", &version).finish_non_exhaustive()
    }
}

impl Nccl {
    /// Loads a vendor's library: the file that a user has named; else the one that the process has loaded already, the one
    /// below a folder of Python packages, or that of the system.
    ///
    /// # Errors
    /// None is found, or the first is of no use: where it is, and why.
    pub fn load(vendor: Vendor, named: Option<&Path>, packages: &[PathBuf]) -> Result<Nccl, NcclError> {
        let file = Path::new(vendor.file());
        if let Some(path) = named {
            return Nccl::open(vendor, path, RTLD_NOW)
                .unwrap_or_else(|cause| Err(NcclError::Broken { path: path.to_owned(), cause: said(&cause) }));
        }
        if let Ok(resident) = Nccl::open(vendor, file, RTLD_NOW | RTLD_NOLOAD) {
            return resident;
        }
        let in_packages = packages.iter().map(|folder| folder.join(vendor.package()).join(file));
        if let Some(path) = in_packages.into_iter().find(|path| path.exists()) {
            return Nccl::load(vendor, Some(&path), &[]);
        }
        Nccl::open(vendor, file, RTLD_NOW).unwrap_or_else(|cause| {
            let folders = packages.iter().map(|folder| folder.join(vendor.package())).collect();
            Err(NcclError::Missing { file: vendor.file(), folders, cause: said(&cause) })
        })
    }

    /// The outer error: there is no such file, or it is no library.
    fn open(vendor: Vendor, path: &Path, flags: c_int) -> Result<Result<Nccl, NcclError>, libloading::Error> {
        // SAFETY: the library's initialisers ask nothing of who loads it.
        let library = unsafe { Library::open(Some(path), flags) }?;
        Ok(Nccl::of(vendor, library, path))
    }

    fn of(vendor: Vendor, library: Library, path: &Path) -> Result<Nccl, NcclError> {
        let functions = Functions::of(&library, as_listed).map_err(|function| {
            let (path, name) = (path.to_owned(), vendor.name());
            NcclError::Function { path, name, function }
        })?;
        // SAFETY: it is looked up and not called.
        let has = |function: &str| unsafe { library.get::<*const c_void>(function) }.is_ok();
        let mut code = 0;
        // SAFETY: it writes to a number, which lives.
        let status = unsafe { (functions.get_version)(&raw mut code) };
        let version = Version::from_code(code.max(0) as u32);
        let path = file_of(functions.get_version as *const c_void).unwrap_or_else(|| path.to_owned());
        let features = features(version, has);
        let library = ManuallyDrop::new(library);
        let nccl = Nccl { vendor, path, version, features, functions, _library: library };
        nccl.check("ncclGetVersion", status)?;
        if version < Version::OLDEST {
            return Err(NcclError::TooOld { path: nccl.path, name: vendor.name(), version });
        }
        Ok(nccl)
    }

    /// The library's name.
    pub fn name(&self) -> &'static str {
        self.vendor.name()
    }

    /// The library's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// What it can do of what not every library can.
    pub fn features(&self) -> &[Feature] {
        &self.features
    }

    /// The error of what it cannot do.
    pub(crate) fn lacks(&self, feature: Feature) -> NcclError {
        NcclError::Lacks { library: self.name(), version: self.version, what: feature.text() }
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    pub(super) fn check(&self, call: &'static str, code: Code) -> Result<(), NcclError> {
        if code == 0 { Ok(()) } else { Err(self.failed(call, code)) }
    }

    /// The error of a call, with what the library says of its last failure.
    pub(super) fn failed(&self, call: &'static str, code: Code) -> NcclError {
        // SAFETY: it takes any number.
        let text = unsafe { (self.functions.get_error_string)(code) };
        // SAFETY: it needs no communicator.
        let detail = unsafe { (self.functions.get_last_error)(std::ptr::null_mut()) };
        let read = |text: *const std::ffi::c_char| {
            // SAFETY: the library's own text, which stays and ends with NUL.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned())
        };
        let text = read(text).unwrap_or_else(|| format!("error {code}"));
        let reason = match read(detail).filter(|detail| !detail.is_empty()) {
            Some(detail) => format!("{text}: {detail}"),
            None => text,
        };
        NcclError::Call { call, reason }
    }
}

/// What a library of a version can do that has some functions.
fn features(version: Version, has: impl Fn(&str) -> bool) -> Vec<Feature> {
    let works =
        |feature: &Feature| version >= feature.since() && feature.functions().iter().all(|function| has(function));
    Feature::ALL.iter().copied().filter(works).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_their_codes() {
        let texts = [22_809, 23_203, 21_000, 2_708].map(|code| Version::from_code(code).to_string());
        assert_eq!(texts, ["2.28.9", "2.32.3", "2.10.0", "2.7.8"]);
        assert_eq!([22_703, 23_203].map(|code| Version::from_code(code).to_code()), [22_703, 23_203]);
        assert!(Version::from_code(22_605) < Version::OLDEST && Version::from_code(22_703) > Version::OLDEST);
    }

    #[test]
    fn a_feature_takes_its_version_and_all_of_its_functions() {
        let version = |minor| Version { major: 2, minor, patch: 3 };
        let all = |_: &str| true;
        assert_eq!(features(version(29), all), Feature::ALL);
        let before = features(version(28), all);
        assert!(before.contains(&Feature::Composed) && !before.contains(&Feature::OneSided), "{before:?}");
        let without = features(version(29), |function| function != "ncclSignal");
        assert!(!without.contains(&Feature::OneSided) && without.contains(&Feature::Grow), "{without:?}");
    }

    #[test]
    fn what_is_no_library_of_the_vendor_is_named() {
        let load =
            |path: &str| Nccl::load(Vendor::Nccl, Some(Path::new(path)), &[]).expect_err("it is none").to_string();
        let missing = load("/nowhere/libnccl.so.2");
        let expected = "/nowhere/libnccl.so.2 cannot be loaded: /nowhere/libnccl.so.2: cannot open shared object file";
        assert!(missing.starts_with(expected), "{missing}");
        let other = load("libm.so.6");
        assert_eq!(other, "libm.so.6 is no NCCL: it lacks ncclGetVersion");
        let folders = [PathBuf::from("/nowhere"), PathBuf::from("/here")];
        let none = Nccl::load(Vendor::Rccl, None, &folders).expect_err("there is none").to_string();
        assert!(none.starts_with("librccl.so.1 is in none of [\"/nowhere/_rocm_sdk_libraries/lib\", "), "{none}");
    }
}
