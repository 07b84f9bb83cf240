//! Libraries that are loaded at run time and never linked: their functions by name, and what the loader says of them.
#![allow(unsafe_code, reason = "asks the loader about functions of a library")]

use std::borrow::Cow;
use std::error::Error;
use std::ffi::{CStr, OsStr, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Defines `Functions`, a library's functions that are called. What not every version has may be missing.
///
/// Their types must be those of the library's header, in every version that has them.
macro_rules! functions {
    (
        needed { $($needed:ident = $needed_name:literal ($($needed_argument:ty),*) -> $needed_result:ty;)* }
        optional { $($optional:ident = $optional_name:literal ($($argument:ty),*) -> $result:ty;)* }
    ) => {
        /// What is called of a library. What not every version has may be missing.
        #[derive(Clone, Copy)]
        pub(super) struct Functions {
            $(pub(super) $needed: unsafe extern "C" fn($($needed_argument),*) -> $needed_result,)*
            $(pub(super) $optional: Option<unsafe extern "C" fn($($argument),*) -> $result>,)*
        }

        impl Functions {
            /// Those of a library, or the name of one that it lacks. `name` says what the library calls a function of this list.
            pub(super) fn of(
                library: &libloading::os::unix::Library,
                name: impl Fn(&'static str) -> std::borrow::Cow<'static, str>,
            ) -> Result<Functions, &'static str> {
                Ok(Functions {
                    $($needed: {
                        // SAFETY: whoever lists it says that the library's header declares it with this type.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($needed_argument),*) -> $needed_result>(&*name($needed_name))
                        };
                        *found.map_err(|_| $needed_name)?
                    },)*
                    $($optional: {
                        // SAFETY: likewise, of every version that has it.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> $result>(&*name($optional_name))
                        };
                        found.ok().map(|found| *found)
                    },)*
                })
            }
        }
    };
}
pub(super) use functions;

/// The name of a function in a library that calls it as it is listed.
pub(super) fn as_listed(name: &'static str) -> Cow<'static, str> {
    Cow::Borrowed(name)
}

/// What the loader says.
pub(super) fn said(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// The file that a function has been loaded from.
pub(super) fn file_of(function: *const c_void) -> Option<PathBuf> {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: it takes any address, and writes to what lives.
    if unsafe { libc::dladdr(function, found.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: of zeroes it is a value, too.
    let name = unsafe { found.assume_init() }.dli_fname;
    // SAFETY: the loader's text, which stays as long as the library and ends with NUL.
    (!name.is_null()).then(|| PathBuf::from(OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes())))
}
