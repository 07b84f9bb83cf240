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
        take_pages(&fd, bytes)?;
    }
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Takes the pages of a file of so many bytes from the system, as [`Pages::Now`] does.
pub(super) fn take_pages(fd: impl AsFd, bytes: u64) -> io::Result<()> {
    // Before Linux 6.10 a signal ends the call and what it has done, so that a long one may never come to its end.
    for begin in (0..bytes).step_by(PAGES_AT_ONCE as usize) {
        let len = PAGES_AT_ONCE.min(bytes - begin);
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(&fd, FallocateFlags::empty(), begin, len))?;
    }
    Ok(())
}

/// How many bytes are taken from the system at once.
const PAGES_AT_ONCE: u64 = 1 << 20;

/// Whether nobody can take pages of the file away.
pub(super) fn cannot_shrink(fd: impl AsFd) -> io::Result<bool> {
    Ok(rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK))
}
