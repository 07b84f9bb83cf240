//! Opens a backend's library and checks that it fits.
#![allow(unsafe_code, reason = "loads a library and reads its table")]

use std::ffi::c_void;
use std::path::{Path, PathBuf};

use ncclx_rs_backend::abi::{ABI_VERSION, RawBytes, RawTable, SYMBOL, TableFunction};

/// A loaded library.
pub(crate) struct Loaded {
    pub(crate) table: &'static RawTable,
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) methods: Vec<String>,
}

/// The reason why a library cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    #[error("{} cannot be read: {cause}", path.display())]
    Unreadable { path: PathBuf, cause: std::io::Error },
    #[error("{} has no symbol `{SYMBOL}`, which a backend for ncclx_rs exports with `export_backend!`{hint}", path.display())]
    NoBackend { path: PathBuf, hint: &'static str },
    #[error("{} cannot be loaded: {}", path.display(), reason(cause))]
    Refused { path: PathBuf, cause: libloading::Error },
    #[error(
        "{} was built for version {theirs} of the interface of backends, and this ncclx_rs has version {ABI_VERSION}; \
         build it against the crate ncclx_rs_backend of this ncclx_rs",
        path.display()
    )]
    Version { path: PathBuf, theirs: u32 },
    #[error("{}: its table has {theirs} bytes, and version {ABI_VERSION} of the interface has {}", path.display(), size_of::<RawTable>())]
    Size { path: PathBuf, theirs: u32 },
}

/// The system's error message.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Loads a library and never unloads it: its threads and values may live as long as the process.
pub(crate) fn open(path: &Path) -> Result<Loaded, LoadError> {
    let path = path.to_path_buf();
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(cause) => return Err(LoadError::Unreadable { path, cause }),
    };
    // Searched before loading: loading another kind of library would run its initialisers, or fail for lack of its own
    // dependencies.
    if memchr::memmem::find(&bytes, SYMBOL.as_bytes()).is_none() {
        let torchcomms = memchr::memmem::find(&bytes, b"create_dynamic_loader_").is_some();
        return Err(LoadError::NoBackend { path, hint: if torchcomms { TORCHCOMMS } else { "" } });
    }
    // SAFETY: its initialisers are those of a backend that the user has named, run as any dependency's.
    let library = match unsafe { libloading::Library::new(&path) } {
        Ok(library) => library,
        Err(cause) => return Err(LoadError::Refused { path, cause }),
    };
    // SAFETY: the symbol of this name has this type in every version of the interface.
    let found = unsafe { library.get::<TableFunction>(SYMBOL) }.map(|function| *function);
    let Ok(function) = found else { return Err(LoadError::NoBackend { path, hint: "" }) };
    std::mem::forget(library);
    let table = function();
    // SAFETY: the first two fields are there in every version, and live as long as the library, which stays.
    let [version, size] = unsafe { table.cast::<[u32; 2]>().read() };
    if version != ABI_VERSION {
        return Err(LoadError::Version { path, theirs: version });
    }
    if (size as usize) < size_of::<RawTable>() {
        return Err(LoadError::Size { path, theirs: size });
    }
    // SAFETY: of this version and at least as long, so that all fields are there; it lives as above.
    let table = unsafe { &*table };
    // SAFETY: a constant of the library, which stays.
    let name = unsafe { table.name.text() };
    // SAFETY: as the name.
    let version = unsafe { table.version.text() };
    Ok(Loaded { table, name, version, methods: methods(table) })
}

fn methods(table: &RawTable) -> Vec<String> {
    unsafe extern "C" fn append(sink: *mut c_void, bytes: RawBytes) {
        // SAFETY: `sink` is the vector below, lent for the call.
        let methods = unsafe { &mut *sink.cast::<Vec<String>>() };
        // SAFETY: the library passes bytes that live for the call.
        methods.push(unsafe { bytes.text() });
    }
    let mut methods: Vec<String> = Vec::new();
    // SAFETY: the library's function, with a function and a sink that belong together.
    unsafe { (table.methods)(append, (&raw mut methods).cast()) };
    methods
}

const TORCHCOMMS: &str =
    "; it is a backend in C++ for torchcomms (`create_dynamic_loader_...`), which works with torchcomms alone";
