//! NVIDIA's run-time compiler, or AMD's hipRTC, which has the same functions: a library that is looked for when it is needed.
//! Nothing is linked.
#![allow(unsafe_code, reason = "calls a library in C")]

use std::borrow::Cow;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::os::unix::Library;

use crate::sys::library::{as_listed, functions};

/// The names of the library, by the version of CUDA.
const NAMES: [(u32, &str); 2] = [(13, "libnvrtc.so.13"), (12, "libnvrtc.so.12")];

/// Those of hipRTC.
const HIP_NAMES: [&str; 2] = ["libhiprtc.so.7", "libhiprtc.so"];

type Code = c_int;
type Program = *mut c_void;

/// The compiler.
pub struct Nvrtc {
    functions: Functions,
    version: (u32, u32),
    architectures: Vec<u32>,
    // Never unloaded: the process may be ending, whose destructors are the library's too.
    _library: ManuallyDrop<Library>,
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc").field("version", &self.version).finish_non_exhaustive()
    }
}

/// Why there is no compiler, or no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NvrtcError {
    /// No folder has it.
    #[error("{0}")]
    Missing(String),
    /// A library lacks a function.
    #[error("{path} lacks {function}")]
    Function {
        /// The library.
        path: PathBuf,
        /// What it lacks.
        function: &'static str,
    },
    /// A call failed.
    #[error("{call}: {reason}{}{log}", if log.is_empty() { "" } else { "\n" })]
    Call {
        /// Which.
        call: &'static str,
        /// What NVRTC says.
        reason: String,
        /// What it says of the source.
        log: String,
    },
}

// As nvrtc.h declares them since CUDA 11.2.
functions! {
    needed {
        error_string = "nvrtcGetErrorString"(Code) -> *const c_char;
        version = "nvrtcVersion"(*mut c_int, *mut c_int) -> Code;
        create = "nvrtcCreateProgram"(
            *mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        ) -> Code;
        compile = "nvrtcCompileProgram"(Program, c_int, *const *const c_char) -> Code;
        log_size = "nvrtcGetProgramLogSize"(Program, *mut usize) -> Code;
        log = "nvrtcGetProgramLog"(Program, *mut c_char) -> Code;
        cubin_size = "nvrtcGetCUBINSize"(Program, *mut usize) -> Code;
        cubin = "nvrtcGetCUBIN"(Program, *mut c_char) -> Code;
        destroy = "nvrtcDestroyProgram"(*mut Program) -> Code;
    }
    optional {
        architecture_count = "nvrtcGetNumSupportedArchs"(*mut c_int) -> Code;
        architectures = "nvrtcGetSupportedArchs"(*mut c_int) -> Code;
    }
}

impl Nvrtc {
    /// Loads the newest one of `folders`, else of where the system looks. A driver runs nothing of a version of CUDA that is
    /// newer than its own, `newest`.
    pub fn load(folders: &[PathBuf], newest: u32) -> Result<Nvrtc, NvrtcError> {
        let names = NAMES.iter().filter(|(version, _)| *version <= newest).map(|(_, name)| *name);
        let what = format!("NVRTC of CUDA {newest} or before");
        Nvrtc::first(folders, names, &what, as_listed)
    }

    /// Loads hipRTC from one of `folders`, else from where the system looks.
    pub fn load_for_hip(folders: &[PathBuf]) -> Result<Nvrtc, NvrtcError> {
        Nvrtc::first(folders, HIP_NAMES.into_iter(), "hipRTC", |name| match name {
            "nvrtcGetCUBINSize" => Cow::Borrowed("hiprtcGetCodeSize"),
            "nvrtcGetCUBIN" => Cow::Borrowed("hiprtcGetCode"),
            name => Cow::Owned(name.replacen("nvrtc", "hiprtc", 1)),
        })
    }

    /// The first library of these names. `renamed` says what it calls a function of NVRTC.
    fn first(
        folders: &[PathBuf],
        names: impl Iterator<Item = &'static str> + Clone,
        what: &str,
        renamed: impl Fn(&'static str) -> Cow<'static, str>,
    ) -> Result<Nvrtc, NvrtcError> {
        let places = names.clone().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
        for path in places.filter(|path| path.exists()).chain(names.map(PathBuf::from)) {
            // SAFETY: the library's initialisers ask nothing of who loads it.
            if let Ok(library) = unsafe { Library::new(&path) } {
                return Nvrtc::of(library, &path, renamed);
            }
        }
        Err(NvrtcError::Missing(format!("no {what}, neither in {folders:?} nor in the system")))
    }

    fn of(
        library: Library,
        path: &Path,
        renamed: impl Fn(&'static str) -> Cow<'static, str>,
    ) -> Result<Nvrtc, NvrtcError> {
        let functions = Functions::of(&library, renamed)
            .map_err(|function| NvrtcError::Function { path: path.to_owned(), function })?;
        let mut nvrtc =
            Nvrtc { functions, version: (0, 0), architectures: Vec::new(), _library: ManuallyDrop::new(library) };
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: it writes to two numbers, which live.
        nvrtc.check("nvrtcVersion", unsafe { (functions.version)(&raw mut major, &raw mut minor) })?;
        nvrtc.version = (major as u32, minor as u32);
        let (Some(count_of), Some(list)) = (functions.architecture_count, functions.architectures) else {
            return Ok(nvrtc);
        };
        // SAFETY: it writes to a number, which lives.
        nvrtc.check("nvrtcGetNumSupportedArchs", unsafe { count_of(&raw mut count) })?;
        let mut architectures = vec![0; count.max(0) as usize];
        // SAFETY: it writes as many numbers as it said.
        nvrtc.check("nvrtcGetSupportedArchs", unsafe { list(architectures.as_mut_ptr()) })?;
        nvrtc.architectures = architectures.into_iter().map(|architecture| architecture as u32).collect();
        Ok(nvrtc)
    }

    /// The version of CUDA that it belongs to.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// What it compiles for: 90 is compute capability 9.0. hipRTC does not say.
    pub fn architectures(&self) -> &[u32] {
        &self.architectures
    }

    /// Compiles CUDA C++ to the code of a device.
    pub fn compile(&self, name: &str, source: &str, options: &[String]) -> Result<Vec<u8>, NvrtcError> {
        let text = |text: &str| CString::new(text).expect("no NUL in it");
        let (name, source) = (text(name), text(source));
        let options: Vec<CString> = options.iter().map(|option| text(option)).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let functions = &self.functions;
        let mut program = Compilation { functions: *functions, program: std::ptr::null_mut() };
        let (at, none) = (&raw mut program.program, std::ptr::null());
        // SAFETY: the texts end with NUL and live; it writes to the program, which does, too; there are no headers.
        let created = unsafe { (functions.create)(at, source.as_ptr(), name.as_ptr(), 0, none, none) };
        self.check("nvrtcCreateProgram", created)?;
        // SAFETY: the program is one; there are as many options as it is told, which live and end with NUL.
        let compiled = unsafe { (functions.compile)(program.program, pointers.len() as c_int, pointers.as_ptr()) };
        if compiled != 0 {
            let log =
                self.output(&program, "nvrtcGetProgramLog", functions.log_size, functions.log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
            return Err(NvrtcError::Call { call: "nvrtcCompileProgram", reason: self.reason(compiled), log });
        }
        self.output(&program, "nvrtcGetCUBIN", functions.cubin_size, functions.cubin)
    }

    fn output(
        &self,
        program: &Compilation,
        call: &'static str,
        size: unsafe extern "C" fn(Program, *mut usize) -> Code,
        get: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    ) -> Result<Vec<u8>, NvrtcError> {
        let mut bytes = 0;
        // SAFETY: the program is one; it writes to a number, which lives.
        self.check(call, unsafe { size(program.program, &raw mut bytes) })?;
        let mut output = vec![0u8; bytes];
        // SAFETY: the program is one; it writes as many bytes as it said.
        self.check(call, unsafe { get(program.program, output.as_mut_ptr().cast()) })?;
        Ok(output)
    }

    fn check(&self, call: &'static str, code: Code) -> Result<(), NvrtcError> {
        let failed = || NvrtcError::Call { call, reason: self.reason(code), log: String::new() };
        if code == 0 { Ok(()) } else { Err(failed()) }
    }

    fn reason(&self, code: Code) -> String {
        // SAFETY: it takes any number.
        let text = unsafe { (self.functions.error_string)(code) };
        if text.is_null() {
            return format!("error {code}");
        }
        // SAFETY: the library's own text, which stays and ends with NUL.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// A program that goes when it is dropped.
struct Compilation {
    functions: Functions,
    program: Program,
}

impl Drop for Compilation {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: it is a program, and nothing uses it any more.
            unsafe { (self.functions.destroy)(&raw mut self.program) };
        }
    }
}
