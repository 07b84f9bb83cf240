//! The shim: the C++ half of the extension, a library that is compiled for one PyTorch and one Python.
//!
//! This half is the same for all of them. It asks the package for the file of the shim that fits, loads it and never unloads
//! it. The boundary is csrc/ncclx_abi.h.
#![allow(unsafe_code, reason = "loads a library and calls it")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

type Init = unsafe extern "C" fn(module: *mut c_void, engine: *const c_void) -> i32;
type Call = unsafe extern "C" fn(function: *mut c_void, arguments: *mut c_void);
type TorchVersion = unsafe extern "C" fn() -> *const c_char;

/// The functions that a shim exports.
struct Shim {
    init: Init,
    call: Call,
    torch_version: TorchVersion,
}

static SHIM: OnceLock<Shim> = OnceLock::new();

/// Loads the shim, and has it add the backend's classes to the module. `engine` is the header's table of functions.
pub(crate) fn register<Engine>(module: &Bound<'_, PyModule>, engine: &'static Engine) -> PyResult<()> {
    let shim = match SHIM.get() {
        Some(shim) => shim,
        // Python's import lock lets one thread in here.
        None => {
            let file: PathBuf = module.py().import("ncclx_rs._load")?.call_method0("shim")?.extract()?;
            let loaded = open(&file);
            let loaded =
                loaded.map_err(|error| PyImportError::new_err(format!("{}: {}", file.display(), reason(&error))))?;
            SHIM.get_or_init(|| loaded)
        }
    };
    // SAFETY: it returns a constant of the library, which stays.
    let version = unsafe { (shim.torch_version)() };
    // SAFETY: as above; it ends with a zero.
    let version = unsafe { CStr::from_ptr(version) };
    module.add("torch_build_version", version.to_string_lossy())?;
    // SAFETY: the module is alive and the GIL is held by `module`'s lifetime; the table is a static, which
    // begins with its size, so that the shim refuses another.
    let status = unsafe { (shim.init)(module.as_ptr().cast(), std::ptr::from_ref(engine).cast()) };
    if status == 0 { Ok(()) } else { Err(PyErr::fetch(module.py())) }
}

/// Calls a Python function; `sys.unraisablehook` gets its exceptions. Does not return if the interpreter ends during the
/// call: before 3.14, Python then unwinds the stacks of threads that are inside it, which Rust does not survive.
pub(crate) fn call(function: &Bound<'_, PyAny>, arguments: &Bound<'_, PyTuple>) {
    let shim = SHIM.get().expect("the module loads the shim before anything can call Python");
    // SAFETY: both are alive and the GIL is held by their lifetimes. The shim lets no unwinding out.
    unsafe { (shim.call)(function.as_ptr().cast(), arguments.as_ptr().cast()) }
}

fn open(file: &PathBuf) -> Result<Shim, libloading::Error> {
    let flags: c_int = RTLD_NOW | RTLD_LOCAL;
    // SAFETY: its initialisers are those of this package, for the PyTorch and the Python that run.
    let library = unsafe { Library::open(Some(file), flags) }?;
    // SAFETY: csrc/ncclx_abi.h declares the function so.
    let init = unsafe { library.get::<Init>(b"ncclx_shim_init") }.map(|function| *function)?;
    // SAFETY: as above.
    let call = unsafe { library.get::<Call>(b"ncclx_shim_call") }.map(|function| *function)?;
    // SAFETY: as above.
    let torch_version =
        unsafe { library.get::<TorchVersion>(b"ncclx_shim_torch_version") }.map(|function| *function)?;
    std::mem::forget(library);
    Ok(Shim { init, call, torch_version })
}

/// The system's error message.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
