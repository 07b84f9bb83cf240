//! Shared memory segments: one process makes a segment, the other processes of its host map it.
//!
//! A segment is a memfd(2) whose size is sealed. Another process opens it through /proc, which the system allows to
//! processes of the same user that may inspect each other. It checks the inode, since descriptors are reused.
#![allow(unsafe_code, reason = "maps shared memory")]

use std::collections::BTreeMap;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::RwLock;

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::sys::fork::{Origin, PerProcess};
use crate::sys::memfd::{self, Pages};
use crate::types::Element;

/// The name of a process's segment: its file descriptor there, and the low half of its inode. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentId(u64);

impl SegmentId {
    /// The name as a number, for the wire.
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// The name from a number; none for zero.
    pub fn from_bits(bits: u64) -> Option<SegmentId> {
        (bits != 0).then_some(SegmentId(bits))
    }

    fn new(fd: i32, inode: u64) -> SegmentId {
        SegmentId((fd as u64 + 1) << 32 | inode & u64::from(u32::MAX))
    }

    fn fd(self) -> u64 {
        (self.0 >> 32).wrapping_sub(1)
    }
}

/// Elements in memory that the other processes of this host can map and read in place, zero at first.
///
/// A communicator does so by itself when an operation's data lies in such memory, and on request when it is a part of a window
/// ([`Communicator::window_map`](crate::Communicator::window_map)). Every instance takes a mapping and a file
/// descriptor, so it is meant for a few large buffers that live long.
///
/// A forked child shares the memory with the process that made it. To the child's own communicators it is ordinary memory.
/// The child reads zeros there once the owner has dropped it.
///
/// ```
/// let mut memory = ncclx_rs::SharedMemory::<f32>::new(1000)?;
/// memory[7] = 1.5; // a slice, as far as the program is concerned
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct SharedMemory<T: Element> {
    base: NonNull<T>,
    len: usize,
    origin: Origin,
    fd: OwnedFd,
}

// SAFETY: the mapping is owned, stays at its address until drop, and is reached by the rules of a slice of T, which is
// plain data.
unsafe impl<T: Element> Send for SharedMemory<T> {}
// SAFETY: as above; a shared borrow only reads.
unsafe impl<T: Element> Sync for SharedMemory<T> {}

impl<T: Element> SharedMemory<T> {
    /// Memory for `len` elements.
    ///
    /// # Errors
    /// The machine does not have that much memory, or the process no file descriptor left.
    pub fn new(len: usize) -> io::Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapped = bytes.max(1);
        // The system would accept any size, and kill processes once the memory is used.
        let system = rustix::system::sysinfo();
        if mapped as u128 > u128::from(system.totalram) * u128::from(system.mem_unit) {
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, "this machine has less memory"));
        }
        let fd = memfd::create(mapped as u64, Pages::OnUse)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), mapped, access, MapFlags::SHARED, fd.as_fd(), 0) }?;
        let id = SegmentId::new(fd.as_raw_fd(), rustix::fs::fstat(&fd)?.st_ino);
        segments().insert(base as usize, (bytes, id));
        let base = NonNull::new(base.cast()).expect("mmap never returns null");
        Ok(SharedMemory { base, len, origin: Origin::here(), fd })
    }
}

impl<T: Element> Deref for SharedMemory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping has `len` elements, page-aligned, of a type for which all zero bits are a value, and lives
        // as long as self. Other processes map it to read.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for SharedMemory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and self is borrowed for this alone.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl<T: Element> Drop for SharedMemory<T> {
    fn drop(&mut self) {
        let mapped = (self.len * size_of::<T>()).max(1);
        // A forked child must not free the pages, and does not have the segment in its list.
        if self.origin.is_here() {
            segments().remove(&(self.base.as_ptr() as usize));
            // Frees the pages even while another process still maps them.
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(&self.fd, hole, 0, mapped as u64);
        }
        // SAFETY: the range is the mapping made in `new`, and nothing borrowed from self outlives it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), mapped) };
    }
}

/// This process's segments by address: length and name.
type Segments = BTreeMap<usize, (usize, SegmentId)>;

/// A forked child begins with an empty list, whatever lock another thread of its parent held.
static SEGMENTS: PerProcess<RwLock<Segments>> = PerProcess::unset();

fn segments() -> std::sync::RwLockWriteGuard<'static, Segments> {
    SEGMENTS.get().write().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The segment of this process that contains all `len` bytes from `address` on, and their offset in it.
pub fn locate(address: u64, len: usize) -> Option<(SegmentId, u64)> {
    let segments = SEGMENTS.get().read().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (base, (size, id)) = segments.range(..=address as usize).next_back()?;
    let offset = address as usize - base;
    (offset.checked_add(len)? <= *size).then_some((*id, offset as u64))
}

/// Where bytes of a process lie for the other processes of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentPlace {
    /// The process.
    pub pid: i32,
    /// Its segment.
    pub id: SegmentId,
    /// The first byte's offset in the segment.
    pub offset: u64,
}

impl SegmentPlace {
    /// The place of `len` bytes of this process from `address` on, if one segment contains them all.
    pub fn of(address: u64, len: usize) -> Option<SegmentPlace> {
        let (id, offset) = locate(address, len)?;
        Some(SegmentPlace { pid: rustix::process::getpid().as_raw_pid(), id, offset })
    }

    /// Maps `len` bytes there, to be read and written.
    ///
    /// # Errors
    /// The segment is gone or shorter, or the system does not let this process open it.
    pub fn map(self, len: usize) -> io::Result<MappedMemory> {
        let (base, mapped) = map_segment(self.pid, self.id, Access::ReadWrite)?;
        let memory = MappedMemory { base, mapped, offset: usize::try_from(self.offset).unwrap_or(usize::MAX), len };
        if memory.offset.checked_add(len).is_some_and(|end| end <= mapped) {
            Ok(memory)
        } else {
            Err(io::Error::other("the memory lies beyond the segment's end"))
        }
    }
}

/// Memory of another process, mapped to be read and written. It stays valid whatever the other process does: once it has freed
/// the memory, this reads zeros.
#[derive(Debug)]
pub struct MappedMemory {
    base: NonNull<u8>,
    mapped: usize,
    offset: usize,
    len: usize,
}

// SAFETY: the mapping is owned and stays at its address until drop.
unsafe impl Send for MappedMemory {}

impl MappedMemory {
    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the bytes from `offset` on.
    ///
    /// # Panics
    /// When they are not all inside.
    pub fn copy_out(&self, offset: usize, into: &mut [u8]) {
        let from = self.at(offset, into.len());
        // SAFETY: the range is inside the mapping, as was just checked, of whose bytes there are no references.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    /// Copies `from` to `offset`.
    ///
    /// # Panics
    /// When that is not all inside.
    pub fn copy_in(&self, offset: usize, from: &[u8]) {
        let into = self.at(offset, from.len());
        // SAFETY: as in `copy_out`; the mapping is writable.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(is_inside, "{len} bytes at {offset} of {}", self.len);
        self.as_ptr().wrapping_add(offset)
    }

    /// The first byte. The other process may change the bytes at any time, so no reference to them may be made.
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: offset is inside the mapping, as `SegmentPlace::map` has checked.
        unsafe { self.base.as_ptr().add(self.offset) }
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `map_segment`, and nothing is borrowed from it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Read,
    ReadWrite,
}

/// Maps segment `id` of process `pid`, after checking its inode and that it can never shrink; returns its length too.
fn map_segment(pid: i32, id: SegmentId, access: Access) -> io::Result<(NonNull<u8>, usize)> {
    let path = format!("/proc/{pid}/fd/{}", id.fd());
    let (mode, protection) = match access {
        Access::Read => (OFlags::RDONLY, ProtFlags::READ),
        Access::ReadWrite => (OFlags::RDWR, ProtFlags::READ | ProtFlags::WRITE),
    };
    // The descriptor may have become a pipe, whose opening would wait for a writer.
    let fd = rustix::fs::open(path, mode | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?;
    let stat = rustix::fs::fstat(&fd)?;
    // What is not a memfd has no seals.
    let sealed = memfd::cannot_shrink(&fd).unwrap_or(false);
    if !sealed || SegmentId::new(id.fd() as i32, stat.st_ino) != id {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the segment is no longer there"));
    }
    let len = usize::try_from(stat.st_size).unwrap_or(0);
    // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
    let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, fd.as_fd(), 0) }?;
    Ok((NonNull::new(base.cast()).expect("mmap never returns null"), len))
}

/// A segment of another process, mapped to be read.
#[derive(Debug)]
pub struct PeerSegment {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is owned and stays at its address until drop.
unsafe impl Send for PeerSegment {}

// SAFETY: it is only read from, into memory that each reader has for itself.
unsafe impl Sync for PeerSegment {}

impl PeerSegment {
    /// Maps segment `id` of process `pid`.
    ///
    /// # Errors
    /// The segment is gone, or the system does not let this process open it.
    pub fn open(pid: i32, id: SegmentId) -> io::Result<PeerSegment> {
        let (base, len) = map_segment(pid, id, Access::Read)?;
        Ok(PeerSegment { base, len })
    }

    /// Copies the bytes from `offset` on. An error if they lie beyond the segment's end.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(into.len() as u64).filter(|end| *end <= self.len as u64);
        if end.is_none() {
            return Err(io::Error::other("the message lies beyond the segment's end"));
        }
        // SAFETY: offset is inside the mapping, as was just checked.
        let from = unsafe { self.base.as_ptr().add(offset as usize) };
        // SAFETY: the range is inside the mapping, whose size is sealed, and `into` is borrowed for this alone. The
        // owner leaves the bytes alone unless it says otherwise, and then the copy is not used.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }
}

impl Drop for PeerSegment {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `open`, and nothing is borrowed from it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> i32 {
        rustix::process::getpid().as_raw_pid()
    }

    #[test]
    fn a_segment_is_found_by_its_bytes_and_read_elsewhere() {
        let mut memory = SharedMemory::<u16>::new(100_000).expect("memory");
        memory[70_000] = 7;
        let address = &raw const memory[70_000] as u64;
        let (id, offset) = locate(address, 2).expect("known");
        assert_eq!(SegmentId::from_bits(id.to_bits()), Some(id));
        assert!(locate(address, 60_001).is_none(), "beyond its end");
        let segment = PeerSegment::open(me(), id).expect("the same segment");
        let mut bytes = [0; 2];
        segment.read(offset, &mut bytes).expect("readable");
        assert_eq!(u16::from_ne_bytes(bytes), 7);
        assert!(segment.read(199_999, &mut bytes).is_err() && segment.read(u64::MAX, &mut bytes).is_err());
    }

    #[test]
    fn a_place_in_a_segment_is_mapped_to_be_written() {
        let mut memory = SharedMemory::<u8>::new(10_000).expect("memory");
        let place = SegmentPlace::of(&raw const memory[5_000] as u64, 100).expect("known");
        let mapped = place.map(100).expect("mapped");
        assert_eq!((mapped.len(), mapped.is_empty()), (100, false));
        mapped.copy_in(99, &[7]);
        assert_eq!(memory[5_099], 7);
        memory[5_000] = 9;
        let mut byte = [0];
        mapped.copy_out(0, &mut byte);
        assert_eq!(byte, [9]);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| mapped.copy_in(100, &[1]))).is_err());
        assert!(place.map(5_001).is_err() && SegmentPlace { offset: u64::MAX, ..place }.map(2).is_err());
        drop(memory);
        assert!(place.map(100).is_err());
        mapped.copy_out(0, &mut byte);
        assert_eq!(byte, [0], "it outlives what it maps");
    }

    #[test]
    fn what_is_gone_gives_its_pages_back_and_is_not_found() {
        let mut memory = SharedMemory::<u8>::new(4096).expect("memory");
        memory.fill(9);
        let (id, offset) = locate(memory.as_ptr() as u64, 4096).expect("known");
        let segment = PeerSegment::open(me(), id).expect("the segment");
        let address = memory.as_ptr() as u64;
        drop(memory);
        assert!(locate(address, 1).is_none() && PeerSegment::open(me(), id).is_err());
        let mut bytes = [1; 4];
        segment.read(offset, &mut bytes).expect("still mapped");
        assert_eq!(bytes, [0; 4]);
    }

    #[test]
    fn a_forked_child_leaves_its_parents_memory_alone() {
        let mut memory = SharedMemory::<u8>::new(10_000).expect("memory");
        memory.fill(9);
        let address = memory.as_ptr() as u64;
        // As while another thread looks something up.
        let looks_up = SEGMENTS.get().read().expect("no panic");
        // SAFETY: the child allocates, which the C library allows after a fork, and waits for nothing.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_listed = locate(address, 1).is_some();
            let is_whole = memory.iter().all(|byte| *byte == 9);
            drop(memory);
            let mut own = SharedMemory::<u8>::new(10).expect("memory of the child's own");
            own.fill(7);
            let own_is_listed = locate(own.as_ptr() as u64, 10).is_some();
            drop(own);
            let is_well = !is_listed && is_whole && own_is_listed;
            // SAFETY: ends the child without what the test's process does at its end.
            unsafe { libc::_exit(i32::from(!is_well)) };
        }
        drop(looks_up);
        assert_eq!(exit_status(child), 0);
        assert!(memory.iter().all(|byte| *byte == 9), "the child has taken the parent's pages");
    }

    /// How a child ends, which is killed if it hangs.
    fn exit_status(child: libc::pid_t) -> i32 {
        let (mut status, begun) = (0, std::time::Instant::now());
        // SAFETY: `status` is a place for the result.
        while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
            if begun.elapsed() > std::time::Duration::from_secs(60) {
                // SAFETY: ends a process that the test began and nobody has waited for.
                unsafe { libc::kill(child, libc::SIGKILL) };
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        status
    }

    #[test]
    fn nothing_fits_into_no_elements() {
        let memory = SharedMemory::<f64>::new(0).expect("memory");
        assert!(memory.is_empty() && locate(memory.as_ptr() as u64, 1).is_none());
        assert!(SharedMemory::<f64>::new(usize::MAX).is_err() && SharedMemory::<f64>::new(1 << 50).is_err());
    }
}
