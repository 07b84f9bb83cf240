//! What a context is configured by: the variables `UCX_*`, files of the library's, and what is set otherwise here.
#![allow(unsafe_code, reason = "calls a library in C")]

use std::ffi::{CStr, CString};
use std::io;
use std::ptr::{NonNull, null, null_mut};

use super::functions::{PRINT_CONFIG, RawConfig};
use super::library::{Ucx, UcxError};

/// The memory that a context moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The host's: what is done with the context calls no GPU's driver, which waits for the device whenever it likes.
    Host,
    /// A GPU's, too, where the library has ways to it.
    HostAndDevices,
}

/// The library's configuration for one context.
pub(super) struct Configuration<'a> {
    ucx: &'a Ucx,
    raw: RawConfig,
}

impl Configuration<'_> {
    pub(super) fn new(ucx: &Ucx, reach: Reach) -> Result<Configuration<'_>, UcxError> {
        let mut raw = null_mut();
        // SAFETY: no prefix and no file are allowed, and it writes to a pointer, which lives.
        let status = unsafe { (ucx.functions().config_read)(null(), null(), &raw mut raw) };
        ucx.check("ucp_config_read", status)?;
        let configuration = Configuration { ucx, raw };
        for (name, variable, value) in SETTINGS {
            if std::env::var_os(variable).is_none() {
                configuration.set(name, value)?;
            }
        }
        if reach == Reach::Host {
            let ways = without_gpus(&configuration.ways()?);
            configuration.set(c"TLS", &CString::new(ways).expect("text that the library has printed"))?;
        }
        Ok(configuration)
    }

    pub(super) fn raw(&self) -> RawConfig {
        self.raw
    }

    fn set(&self, name: &CStr, value: &CStr) -> Result<(), UcxError> {
        // SAFETY: it was read; both texts end with NUL, and are copied.
        let status = unsafe { (self.ucx.functions().config_modify)(self.raw, name.as_ptr(), value.as_ptr()) };
        self.ucx.check("ucp_config_modify", status)
    }

    /// What `UCX_TLS` is, by the environment or a file.
    fn ways(&self) -> Result<String, UcxError> {
        let failed = || UcxError::Call { call: "open_memstream", reason: io::Error::last_os_error().to_string() };
        let (mut text, mut len) = (null_mut(), 0);
        // SAFETY: it keeps a pointer and a number, which live longer than the stream.
        let stream = unsafe { libc::open_memstream(&raw mut text, &raw mut len) };
        let stream = NonNull::new(stream).ok_or_else(failed)?;
        // SAFETY: it was read, the stream is open, and no title is asked for.
        unsafe { (self.ucx.functions().config_print)(self.raw, stream.as_ptr(), null(), PRINT_CONFIG) };
        // SAFETY: opened above, and not used any more.
        if unsafe { libc::fclose(stream.as_ptr()) } != 0 {
            return Err(failed());
        }
        // SAFETY: the stream has left so many bytes there.
        let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), len) };
        let printed = String::from_utf8_lossy(bytes).into_owned();
        // SAFETY: the stream's memory, which is its opener's to free.
        unsafe { libc::free(text.cast()) };
        Ok(printed.lines().find_map(|line| line.strip_prefix("UCX_TLS=")).unwrap_or(ALL).to_owned())
    }
}

impl Drop for Configuration<'_> {
    fn drop(&mut self) {
        // SAFETY: it was read, and contexts have copies.
        unsafe { (self.ucx.functions().config_release)(self.raw) };
    }
}

/// What a process that sets no variable has otherwise than UCX has it: the name, the variable, the value.
const SETTINGS: [(&CStr, &str, &CStr); 3] = [
    // Otherwise shared memory reports no peer's death, and is not taken for endpoints that ask for such reports.
    (c"MM_ERROR_HANDLING", "UCX_MM_ERROR_HANDLING", c"y"),
    // Otherwise a registration that has ended stays in a cache, and a device serves who has its key. Known from 1.14 on.
    (c"RCACHE_ENABLE", "UCX_RCACHE_ENABLE", c"n"),
    // Otherwise the system's reads of other processes' memory are not taken for endpoints that ask for such reports: UCX would have
    // to revoke keys to memory of messages under way, which are never lent here (`RequestParams::eager`).
    (c"CMA_MEMORY_INVALIDATE", "UCX_CMA_MEMORY_INVALIDATE", c"y"),
];

/// The list of all ways.
const ALL: &str = "all";

/// UCX's ways to GPUs, by its names for several.
const OF_GPUS: [(&str, &[&str]); 5] = [
    ("cuda", &["cuda_copy", "cuda_ipc", "gdr_copy"]),
    ("rocm", &["rocm_copy", "rocm_ipc", "rocm_gdr"]),
    ("ze", &["ze_copy", "ze_ipc", "ze_gdr"]),
    ("gaudi", &["gaudi_gdr"]),
    ("rc_gda", &[]),
];

/// A list of ways without those to GPUs. The alias `ib` stays, by which UCX from 1.20 on also takes `rc_gda`.
fn without_gpus(list: &str) -> String {
    let of_gpus = |way: &str| OF_GPUS.iter().any(|(several, ways)| *several == way || ways.contains(&way));
    match list.strip_prefix('^') {
        None if list != ALL => {
            let kept = list.split(',').filter(|way| !of_gpus(way.trim().trim_start_matches('\\')));
            kept.collect::<Vec<_>>().join(",")
        }
        excluded => {
            let excluded = excluded.into_iter().chain(OF_GPUS.iter().map(|(several, _)| *several));
            format!("^{}", excluded.collect::<Vec<_>>().join(","))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::ucx::fake::{self, Fake};

    #[test]
    fn deaths_are_reported_and_registrations_end_unless_variables_say_otherwise() {
        let _context = Fake::context();
        let set = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let expected = [
            set("CMA_MEMORY_INVALIDATE", "y"),
            set("MM_ERROR_HANDLING", "y"),
            set("RCACHE_ENABLE", "n"),
            // A file excludes `tcp`.
            set("TLS", "^tcp,cuda,rocm,ze,gaudi,rc_gda"),
        ];
        assert_eq!(fake::settings(), expected.into());
    }

    #[test]
    fn ways_to_gpus_are_left_out() {
        assert_eq!(without_gpus("all"), "^cuda,rocm,ze,gaudi,rc_gda");
        assert_eq!(without_gpus("^tcp,ud"), "^tcp,ud,cuda,rocm,ze,gaudi,rc_gda");
        assert_eq!(without_gpus(r"posix,cuda_copy, cuda_ipc,cma,\gdr_copy,rocm,\rc,rc_gda"), r"posix,cma,\rc");
        // UCX says that nothing is left.
        assert_eq!([without_gpus("cuda"), without_gpus("")], ["", ""]);
    }
}
