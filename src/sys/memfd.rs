//! Memory without a name, which a process hands to others as a descriptor: memfd_create(2).

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

/// When the pages are taken from the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pages {
    /// At once, so that a lack of memory is an error and not a signal later.
    Now,
    /// When they are first used.
    OnUse,
}

/// A new file of so many bytes, all zero, whose size is sealed.
pub(super) fn create(bytes: u64, pages: Pages) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("ncclx_rs", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    if pages == Pages::Now {
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes)?;
    }
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Whether nobody can take pages of the file away.
pub(super) fn cannot_shrink(fd: impl AsFd) -> io::Result<bool> {
    Ok(rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK))
}
