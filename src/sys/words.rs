//! Words that the processes of a host share: each at the start of a cache line of its own, written by one of them.
//!
//! Where a line is written by one process alone, the rest of it may hold what belongs to the word.
//! The segment is a memfd(2) of which nobody can take pages away.
#![allow(unsafe_code, reason = "maps shared memory")]

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

use crate::sync::AtomicU64;
use crate::sys::memfd::{self, Pages};

/// Words of 64 bits, all zero at first, mapped into this process.
#[derive(Debug)]
pub struct SharedWords {
    base: NonNull<u8>,
    count: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping is owned and stays at its address until drop; words are only accessed atomically.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// A new segment of so many words.
    pub fn new(count: usize) -> io::Result<SharedWords> {
        SharedWords::map(memfd::create(mapped(count) as u64, Pages::Now)?, count)
    }

    /// The segment that another process has made, of as many words as it has there.
    pub fn open(fd: OwnedFd, count: usize) -> io::Result<SharedWords> {
        if !memfd::cannot_shrink(&fd)? || rustix::fs::fstat(&fd)?.st_size != mapped(count) as i64 {
            return Err(io::Error::other(format!("a segment that is not one of {count} words")));
        }
        SharedWords::map(fd, count)
    }

    fn map(fd: OwnedFd, count: usize) -> io::Result<SharedWords> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), mapped(count), access, MapFlags::SHARED, fd.as_fd(), 0) }?;
        Ok(SharedWords { base: NonNull::new(base.cast()).expect("mmap never returns null"), count, fd })
    }

    /// How many words there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The word of this number.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn word(&self, index: usize) -> &AtomicU64 {
        &self.line(index)[0]
    }

    /// The whole line that begins with the word of this number.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn line(&self, index: usize) -> &[AtomicU64; WORDS_A_LINE] {
        let offset = self.offset(index);
        // SAFETY: the offset is inside the mapping.
        let line = unsafe { self.base.add(offset) };
        // SAFETY: it is aligned to a line and the line is inside the mapping, which lives as long as self and is only
        // accessed atomically.
        unsafe { line.cast::<[AtomicU64; WORDS_A_LINE]>().as_ref() }
    }

    /// Where in the segment a word is.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn offset(&self, index: usize) -> usize {
        assert!(index < self.count, "word {index} of {}", self.count);
        index * LINE
    }

    /// Where the segment lies, and how many bytes it has.
    pub(crate) fn mapping(&self) -> (*mut c_void, usize) {
        (self.base.as_ptr().cast(), mapped(self.count))
    }
}

impl AsFd for SharedWords {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `map`, and nothing borrowed from self outlives it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), mapped(self.count)) };
    }
}

fn mapped(count: usize) -> usize {
    (count * LINE).max(1).next_multiple_of(rustix::param::page_size())
}

/// Words of different writers are not to share a line of any processor's cache.
const LINE: usize = 64;

/// The words that a line has room for.
pub const WORDS_A_LINE: usize = LINE / size_of::<u64>();

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Ordering;

    #[test]
    fn a_word_is_the_same_in_two_mappings() {
        let words = SharedWords::new(100).expect("words");
        let fd = || words.as_fd().try_clone_to_owned().expect("a descriptor");
        let other = SharedWords::open(fd(), 100).expect("the same words");
        words.word(99).store(7, Ordering::Release);
        assert_eq!((other.word(99).load(Ordering::Acquire), other.word(98).load(Ordering::Acquire)), (7, 0));
        words.line(98)[7].store(8, Ordering::Release);
        assert_eq!(other.line(98).each_ref().map(|word| word.load(Ordering::Acquire)), [0, 0, 0, 0, 0, 0, 0, 8]);
        assert_eq!(other.word(99).load(Ordering::Acquire), 7, "a line does not reach into the next");
        assert!(SharedWords::open(fd(), 1000).is_err(), "there are fewer");
    }

    #[test]
    fn segments_that_could_shrink_are_refused() {
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::ALLOW_SEALING).expect("a memfd");
        rustix::fs::ftruncate(&fd, mapped(1) as u64).expect("its size");
        assert!(SharedWords::open(fd, 1).is_err());
    }
}
