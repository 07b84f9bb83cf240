//! A shared memory ring: slots and a ring of bytes, with one writer and one reader in different processes.
//!
//! The memory is a memfd(2). It has no name, so no other process can open it, and nothing is left behind however the
//! processes end. Its pages are allocated when it is made, so that a lack of memory is an error then and not a signal later.
//! Its size is sealed, so that neither side can take pages from the other.
//!
//! The writer makes it, so its pages would come from the writer's NUMA node. Before it takes them, it has them come from that of the
//! reader: a core waits longer for what it reads in another node's memory than for what it writes there.
//!
//! The ring's pages are mapped twice, back to back: any run of up to `capacity` bytes is contiguous, also across the end.
#![allow(unsafe_code, reason = "maps shared memory")]

use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

use crate::sync::Arc;
use crate::sys::memfd::{self, Pages};
use crate::sys::numa;
use crate::sys::ring_sync::{Mark, RingWords};

/// A ring, mapped into this process.
///
/// Positions count slots and bytes since the beginning. The other process is an authenticated rank of the same job. Whatever
/// it writes, no access goes outside the mapping, but it can garble its own bytes.
#[derive(Debug)]
pub struct ShmRing {
    memory: Arc<Memory>,
    base: NonNull<u8>,
    /// Where the slots begin, behind the words. Stored, since the page size is a call of libc.
    slots: NonNull<u8>,
    /// Where the ring begins, behind the slots.
    data: NonNull<u8>,
    capacity: usize,
}

// SAFETY: the mapping stays at its address for as long as `memory` is owned; shared words and marks are accessed atomically, and
// other bytes only by the one reader or the one writer that owns them by the marks and the reader's positions.
unsafe impl Send for ShmRing {}

/// The mapping.
#[derive(Debug)]
struct Memory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: it gives out nothing but its words, which are only accessed atomically, and is unmapped by its last owner.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn words(&self) -> &RingWords {
        // SAFETY: the words lie at the beginning of the first page, which lives as long as self; every bit pattern is
        // one of theirs, and they are only accessed atomically.
        unsafe { self.base.cast::<RingWords>().as_ref() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the range is the reservation made in `ShmRing::map`, and nothing borrowed from self outlives it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The words of a ring, which stay as long as this does.
#[derive(Clone, Debug)]
pub struct KeptWords(Arc<Memory>);

impl Deref for KeptWords {
    type Target = RingWords;

    fn deref(&self) -> &RingWords {
        self.0.words()
    }
}

impl ShmRing {
    /// Makes a ring of `capacity` bytes, a power of two of whole pages, and a file descriptor of it for the peer. `node` is the NUMA
    /// node that its reader is on, where the memory is to lie if that is known and the system allows it.
    pub fn create(capacity: usize, node: Option<u32>) -> io::Result<(ShmRing, OwnedFd)> {
        check_capacity(capacity)?;
        let len = before_ring() + capacity;
        let fd = memfd::create(len as u64, Pages::OnUse)?;
        let memory = ShmRing::map(fd.as_fd(), capacity)?;
        if let Some(node) = node {
            // Elsewhere the ring is as good, but slower. `numa::may_prefer` has said why, if it is refused.
            let _ = numa::prefer(memory.base.as_ptr(), len, node);
        }
        memfd::take_pages(&fd, len as u64)?;
        Ok((memory, fd))
    }

    /// Maps a ring that another process made, after checking that it can never shrink.
    pub fn open(fd: BorrowedFd<'_>) -> io::Result<ShmRing> {
        let len = rustix::fs::fstat(fd)?.st_size;
        let capacity = usize::try_from(len).ok().and_then(|len| len.checked_sub(before_ring()));
        let capacity = capacity.ok_or_else(|| io::Error::other("a shared segment without data"))?;
        check_capacity(capacity)?;
        if !memfd::cannot_shrink(fd)? {
            return Err(io::Error::other("a shared segment whose size is not sealed"));
        }
        ShmRing::map(fd, capacity)
    }

    fn map(fd: BorrowedFd<'_>, capacity: usize) -> io::Result<ShmRing> {
        let total = before_ring() + 2 * capacity;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice replaces nothing.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), total, ProtFlags::empty(), MapFlags::PRIVATE) }?;
        let base: NonNull<u8> = NonNull::new(base.cast()).expect("mmap never returns null");
        // From here on, whatever fails, what is reserved is given back.
        let memory = Arc::new(Memory { base, len: total });
        // SAFETY: the words' page is a part of the reservation.
        let slots = unsafe { base.add(rustix::param::page_size()) };
        // SAFETY: what lies before the ring is, too.
        let data = unsafe { base.add(before_ring()) };
        let ring = ShmRing { memory, base, slots, data, capacity };
        let base = base.as_ptr().cast();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: [base, base + before_ring + capacity) lies in the reservation just made, which nothing else uses.
        unsafe { rustix::mm::mmap(base, before_ring() + capacity, access, flags, fd, 0) }?;
        // SAFETY: the offset is inside the reservation of before_ring + 2 * capacity bytes.
        let second = unsafe { data.add(capacity) };
        // SAFETY: [second, second + capacity) is the rest of the reservation.
        unsafe { rustix::mm::mmap(second.as_ptr().cast(), capacity, access, flags, fd, before_ring() as u64) }?;
        Ok(ring)
    }

    /// The size of the ring in bytes.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The words by which both sides synchronise.
    #[inline]
    pub fn words(&self) -> &RingWords {
        // SAFETY: as in `Memory::words`; `base` is that of `memory`, which lives as long as self.
        unsafe { self.base.cast::<RingWords>().as_ref() }
    }

    /// The same, which outlive the ring.
    pub fn kept_words(&self) -> KeptWords {
        KeptWords(self.memory.clone())
    }

    /// Slot `number`'s mark, and the lap that `number` is in.
    pub fn mark(&self, number: u64) -> (&Mark, u32) {
        // SAFETY: a slot begins with its mark and is a multiple of its alignment; the slot is inside the mapping, which
        // lives as long as self; every bit pattern is a mark's, and it is only accessed atomically.
        let mark = unsafe { &*self.slot(number).cast::<Mark>() };
        (mark, (number / SLOTS) as u32 + 1)
    }

    /// The bytes from `at` to `end` in slot `number`. Only the reader calls this, for a slot whose mark is set.
    ///
    /// # Panics
    /// When a slot has not as many.
    pub fn slot_bytes(&self, number: u64, at: usize, end: usize) -> &[u8] {
        assert!(at <= end && end <= SLOT_BYTES, "bytes {at} to {end} of a slot of {SLOT_BYTES}");
        // SAFETY: the offset is inside the slot.
        let ptr = unsafe { self.slot(number).add(size_of::<Mark>() + at) };
        // SAFETY: the range is inside the slot, which lives as long as self; the writer does not touch its bytes before the
        // reader has released it.
        unsafe { std::slice::from_raw_parts(ptr, end - at) }
    }

    /// Writes `from` to slot `number`, from its byte `at` on. Only the writer calls this, for a slot that the reader has
    /// released.
    ///
    /// # Panics
    /// When a slot has not as many bytes.
    pub fn write_slot(&mut self, number: u64, at: usize, from: &[u8]) {
        assert!(at + from.len() <= SLOT_BYTES, "{} bytes at {at} of a slot of {SLOT_BYTES}", from.len());
        // SAFETY: the offset is inside the slot.
        let into = unsafe { self.slot(number).add(size_of::<Mark>() + at) };
        // SAFETY: the range is inside the slot; the reader does not touch it before the mark is set, and `from` is ordinary
        // memory of this process, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
    }

    fn slot(&self, number: u64) -> *mut u8 {
        let offset = (number % SLOTS) as usize * (size_of::<Mark>() + SLOT_BYTES);
        // SAFETY: there are `SLOTS` slots from there on, all of them before the ring.
        unsafe { self.slots.as_ptr().add(offset) }
    }

    /// The `len` bytes of the ring from position `head` on. Only the reader calls this, for bytes that came with a slot whose
    /// mark is set.
    ///
    /// # Panics
    /// When `len` is more than the capacity.
    pub fn bytes(&self, head: u64, len: usize) -> &[u8] {
        assert!(len <= self.capacity, "{len} bytes of a ring of {}", self.capacity);
        let ptr = self.data(head);
        // SAFETY: the start is below `capacity` and len is at most that, so the run is inside the double mapping, which
        // lives as long as self; the writer does not touch bytes that the reader has not released.
        unsafe { std::slice::from_raw_parts(ptr, len) }
    }

    /// Copies the bytes from position `head` on into `into`, and takes their cache lines for this core as [`ShmRing::own_lines`]
    /// does. Only the reader calls this, for bytes that came with a slot whose mark is set.
    ///
    /// # Panics
    /// When there are more bytes than the capacity.
    pub fn read_and_own(&mut self, head: u64, into: &mut [u8]) {
        assert!(into.len() <= self.capacity, "{} bytes of a ring of {}", into.len(), self.capacity);
        let ptr = self.data(head);
        let whole = into.len() - into.len() % LINE;
        // One line at a time, so that it is still at hand when it is written to.
        for (line, into) in into[..whole].chunks_exact_mut(LINE).enumerate() {
            // SAFETY: the line is inside the run, whose start is below `capacity` and whose length is at most that, and so inside
            // the double mapping.
            let from = unsafe { ptr.add(line * LINE) };
            // SAFETY: as above; every bit pattern is bytes, and the writer does not touch what the reader has not released.
            let bytes = unsafe { from.cast::<[u8; LINE]>().read_unaligned() };
            into.copy_from_slice(&bytes);
            // SAFETY: as above; the run is this reader's alone until it releases it.
            unsafe { from.write_volatile(bytes[0]) };
        }
        let rest = &mut into[whole..];
        rest.copy_from_slice(self.bytes(head + whole as u64, rest.len()));
        self.own_lines(head + whole as u64, rest.len());
    }

    /// Takes the cache lines of the `len` bytes from position `head` on for this core, by writing to each what is there. Only
    /// the reader calls this, for bytes that came with a slot whose mark is set.
    ///
    /// # Panics
    /// When `len` is more than the capacity.
    pub fn own_lines(&mut self, head: u64, len: usize) {
        assert!(len <= self.capacity, "{len} bytes of a ring of {}", self.capacity);
        let ptr = self.data(head);
        for at in (0..len).step_by(LINE) {
            // SAFETY: inside the run, whose start is below `capacity` and whose length is at most that, and so inside the double
            // mapping.
            let byte = unsafe { ptr.add(at) };
            // SAFETY: as above; the writer does not touch what the reader has not released.
            let value = unsafe { byte.read_volatile() };
            // SAFETY: as above; the run is this reader's alone until it releases it.
            unsafe { byte.write_volatile(value) };
        }
    }

    /// Copies `from` to position `tail` of the ring. Only the writer calls this, for room that the reader has released.
    ///
    /// # Panics
    /// When there are more bytes than the capacity.
    pub fn write(&mut self, tail: u64, from: &[u8]) {
        assert!(from.len() <= self.capacity, "{} bytes into a ring of {}", from.len(), self.capacity);
        let ptr = self.data(tail);
        // SAFETY: as in `bytes`; the reader does not touch bytes that came with no slot yet, and `from` is ordinary memory
        // of this process, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), ptr, from.len()) };
    }

    fn data(&self, position: u64) -> *mut u8 {
        let offset = (position as usize) & (self.capacity - 1);
        // SAFETY: the offset is inside the mapping since it is below the capacity.
        unsafe { self.data.as_ptr().add(offset) }
    }
}

fn check_capacity(capacity: usize) -> io::Result<()> {
    let page = rustix::param::page_size();
    if capacity.is_power_of_two() && capacity.is_multiple_of(page) && capacity <= CAPACITY_MAX {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "a ring of {capacity} bytes; it must be a power of two, whole pages of {page} bytes, and at most {CAPACITY_MAX}"
    )))
}

/// The bytes before the ring: a page for the words, and the slots.
pub fn before_ring() -> usize {
    let page = rustix::param::page_size();
    page + (SLOTS as usize * (size_of::<Mark>() + SLOT_BYTES)).next_multiple_of(page)
}

const CAPACITY_MAX: usize = 1 << 28;

/// No processor that this runs on has shorter cache lines.
const LINE: usize = 64;

/// The number of slots.
pub const SLOTS: u64 = 256;

/// The bytes that a slot has room for beside its mark: both are two cache lines, which processors fetch together.
pub const SLOT_BYTES: usize = 128 - size_of::<Mark>();

// The smallest page of any system.
const _: () = assert!(size_of::<RingWords>() <= 4096);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_across_the_end_is_contiguous_for_both_sides() {
        let (mut writer, fd) = ShmRing::create(65536, None).expect("a ring");
        let reader = ShmRing::open(fd.as_fd()).expect("the same ring");
        writer.write(65530, b"hello, world");
        assert_eq!(reader.bytes(65530, 12), b"hello, world");
        writer.write_slot(SLOTS + 3, 2, b"hello");
        let (mark, lap) = writer.mark(SLOTS + 3);
        mark.set(lap, 7);
        let (mark, lap) = reader.mark(SLOTS + 3);
        assert_eq!((lap, mark.get(lap), mark.get(lap + 1)), (2, Some(7), None));
        assert_eq!(reader.slot_bytes(3, 2, 7), b"hello");
    }

    #[test]
    fn a_reader_that_takes_lines_leaves_every_byte_as_it_was() {
        let (mut writer, fd) = ShmRing::create(65536, None).expect("a ring");
        let mut reader = ShmRing::open(fd.as_fd()).expect("the same ring");
        let bytes: Vec<u8> = (0..1000u32).map(|number| (number % 251) as u8).collect();
        for head in [0, 1, 63, 65536 - 500] {
            for len in [0, 1, 63, 64, 65, 999, 1000] {
                writer.write(head, &bytes);
                let mut into = vec![0; len];
                reader.read_and_own(head, &mut into);
                assert_eq!(into, bytes[..len], "{len} bytes from {head} on");
                reader.own_lines(head, len);
                assert_eq!(writer.bytes(head, 1000), bytes, "after {len} bytes from {head} on");
            }
        }
    }

    #[test]
    fn a_ring_lies_on_the_node_of_its_reader_for_both_sides() {
        let Some(node) = numa::tests::usable_node() else { return };
        // A size that no other test has.
        let capacity = 1 << 21;
        let policies = || numa::tests::policies(before_ring() + capacity);
        for (node, policy) in [(None, "default".to_owned()), (Some(node), format!("prefer:{node}"))] {
            let (_writer, fd) = ShmRing::create(capacity, node).expect("a ring");
            let blocks = rustix::fs::fstat(&fd).expect("the file").st_blocks * 512;
            assert_eq!(blocks as usize, before_ring() + capacity, "all pages are taken");
            let _reader = ShmRing::open(fd.as_fd()).expect("the same ring");
            assert_eq!(policies(), [policy.as_str(); 2]);
        }
        let beyond = crate::config::NumaNode::MAX;
        let (_ring, _) = ShmRing::create(capacity, Some(beyond)).expect("a ring, on whatever node");
        assert_eq!(policies(), ["default"]);
    }

    #[test]
    fn segments_that_could_shrink_are_refused() {
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::ALLOW_SEALING).expect("a memfd");
        rustix::fs::ftruncate(&fd, (before_ring() + 65536) as u64).expect("its size");
        assert!(ShmRing::open(fd.as_fd()).is_err());
    }

    #[test]
    fn odd_sizes_are_refused() {
        assert!(ShmRing::create(1000, None).is_err());
        assert!(ShmRing::create(3 * 65536, None).is_err());
    }
}
