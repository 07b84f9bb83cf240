//! What runs when the process ends, before libraries that were loaded earlier go.
#![allow(unsafe_code, reason = "atexit")]

use std::io;

/// Has the process call this when it ends by itself, by exit(3) or at the end of its main function.
///
/// # Errors
/// The system has no memory for it.
pub fn at_exit(run: extern "C" fn()) -> io::Result<()> {
    // SAFETY: a function without arguments, which is there as long as the library that it is in.
    match unsafe { libc::atexit(run) } {
        0 => Ok(()),
        _ => Err(io::ErrorKind::OutOfMemory.into()),
    }
}
