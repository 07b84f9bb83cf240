//! The tensors and scratch memory of one operation, as the engine reads and writes them.
//!
//! # Safety
//! This is the one place of the engine that dereferences [`Buffer`]s. It relies on their contract (see
//! [`Buffer::from_raw`]): from submission to completion the memory is valid and nobody else writes it. A [`Region`]
//! therefore must not outlive its operation: the engine drops every region of an operation before it completes the
//! operation's work. Schedules order conflicting steps, and one thread at a time holds the engine's lock, so no two
//! slices made here are alive at the same time except where a function takes both. The memory of a window is lent in
//! the same way, from its registration until it is concealed.
#![allow(unsafe_code, reason = "the engine's only access to callers' memory")]

use std::io::IoSlice;

use smallvec::SmallVec;

use crate::buffer::Buffer;
use crate::schedule::{Slice, Space};
use crate::types::DType;

#[derive(Clone, Copy, Debug)]
struct Piece {
    ptr: *mut u8,
    len: usize,
}

/// Bytes of an operation's memory, in one or more runs.
#[derive(Debug, Default)]
pub(crate) struct Region {
    pieces: SmallVec<[Piece; 1]>,
    len: usize,
}

impl Clone for Region {
    fn clone(&self) -> Region {
        // The derived way takes the pieces one by one, which takes longer than all else for a single one.
        Region { pieces: SmallVec::from_slice(&self.pieces), len: self.len }
    }
}

// SAFETY: a Region is a list of Buffer parts, and Buffer is Send.
unsafe impl Send for Region {}

impl Region {
    /// All bytes of `buffers`, end to end.
    pub(crate) fn of(buffers: &[Buffer]) -> Region {
        let mut region = Region::default();
        for buffer in buffers.iter().filter(|buffer| !buffer.is_empty()) {
            region.pieces.push(Piece { ptr: buffer.ptr(), len: buffer.bytes() });
            region.len += buffer.bytes();
        }
        region
    }

    /// The number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Where the bytes are, if they are in one run.
    pub(crate) fn address(&self) -> Option<u64> {
        match self.pieces.as_slice() {
            [piece] => Some(piece.ptr as u64),
            _ => None,
        }
    }

    /// `len` bytes from `offset` on.
    ///
    /// # Panics
    /// When they are not inside the region: a schedule that does not fit its tensors.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Region {
        assert!(offset + len <= self.len, "{len} bytes at {offset} of a region of {}", self.len);
        if let [piece] = self.pieces.as_slice() {
            // SAFETY: offset + len <= piece.len, so the result is inside the piece's allocation or at its end.
            let ptr = unsafe { piece.ptr.add(offset) };
            return Region { pieces: SmallVec::from_buf([Piece { ptr, len }]), len };
        }
        let mut pieces = SmallVec::new();
        let (mut skip, mut left) = (offset, len);
        for piece in &self.pieces {
            if left == 0 {
                break;
            }
            if skip >= piece.len {
                skip -= piece.len;
                continue;
            }
            let take = left.min(piece.len - skip);
            // SAFETY: skip < piece.len, so the result is inside the piece's allocation.
            let ptr = unsafe { piece.ptr.add(skip) };
            pieces.push(Piece { ptr, len: take });
            left -= take;
            skip = 0;
        }
        Region { pieces, len }
    }

    /// The bytes of the run that contains `offset`, from there on, to be read.
    pub(crate) fn run(&self, offset: usize) -> &[u8] {
        let (ptr, len) = self.locate(offset);
        // SAFETY: `locate` gives a range inside one piece, which the buffers' contract keeps readable; the module's
        // rule of one borrower at a time keeps it free of writers.
        unsafe { std::slice::from_raw_parts(ptr, len) }
    }

    /// The bytes of the run that contains `offset`, from there on, to be written.
    pub(crate) fn run_mut(&mut self, offset: usize) -> &mut [u8] {
        let (ptr, len) = self.locate(offset);
        // SAFETY: as in `run`; regions that are written are outputs or scratch, which the contract makes writable.
        unsafe { std::slice::from_raw_parts_mut(ptr, len) }
    }

    fn locate(&self, offset: usize) -> (*mut u8, usize) {
        let mut skip = offset;
        for piece in &self.pieces {
            if skip < piece.len {
                // SAFETY: skip < piece.len, so the result is inside the piece's allocation.
                return (unsafe { piece.ptr.add(skip) }, piece.len - skip);
            }
            skip -= piece.len;
        }
        (std::ptr::NonNull::dangling().as_ptr(), 0)
    }

    /// The bytes from `offset` to `end`, for a gathering write.
    pub(crate) fn io_slices<'a>(&'a self, offset: usize, end: usize, out: &mut SmallVec<[IoSlice<'a>; 4]>) {
        let mut at = offset;
        while at < end {
            let run = self.run(at);
            let take = run.len().min(end - at);
            out.push(IoSlice::new(&run[..take]));
            at += take;
        }
    }

    /// Copies `bytes` to `offset`.
    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8]) {
        let mut done = 0;
        while done < bytes.len() {
            let run = self.run_mut(offset + done);
            let take = run.len().min(bytes.len() - done);
            run[..take].copy_from_slice(&bytes[done..done + take]);
            done += take;
        }
    }

    /// The bytes from `offset` to `end`, copied out.
    pub(crate) fn to_vec(&self, offset: usize, end: usize) -> Vec<u8> {
        let mut slices = SmallVec::new();
        self.io_slices(offset, end, &mut slices);
        slices.iter().flat_map(|slice| slice.iter().copied()).collect()
    }

    /// Copies `from` here, in runs; runs that are the same memory are left alone.
    pub(crate) fn copy_from(&mut self, from: &Region) {
        let mut at = 0;
        while at < self.len {
            let (source, available) = from.locate(at);
            let (target, room) = self.locate(at);
            let take = available.min(room);
            if source != target {
                // SAFETY: both ranges lie in one piece each, valid by the buffers' contract; `copy` allows overlap.
                unsafe { std::ptr::copy(source, target, take) };
            }
            at += take;
        }
    }

    /// Calls `f(into, from)` on runs that correspond.
    ///
    /// `from` and this region do not overlap: they are different spaces or disjoint slices of one.
    pub(crate) fn zip(&mut self, from: &Region, mut f: impl FnMut(&mut [u8], &[u8])) {
        let mut at = 0;
        while at < self.len {
            let source = from.run(at);
            let run = self.run_mut(at);
            let take = run.len().min(source.len());
            f(&mut run[..take], &source[..take]);
            at += take;
        }
    }

    /// Calls `f` on every run.
    pub(crate) fn each_mut(&mut self, mut f: impl FnMut(&mut [u8])) {
        let mut at = 0;
        while at < self.len {
            let run = self.run_mut(at);
            at += run.len();
            f(run);
        }
    }
}

/// Scratch memory, kept from operation to operation. Only regions of the running collective refer to it.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    memory: Vec<u64>,
}

impl Scratch {
    /// At least `bytes` bytes, with undefined content. Regions given out before are dead.
    pub(crate) fn region(&mut self, bytes: usize) -> Region {
        let words = bytes.div_ceil(size_of::<u64>());
        if self.memory.len() < words {
            self.memory = vec![0; words];
        }
        if bytes == 0 {
            return Region::default();
        }
        let piece = Piece { ptr: self.memory.as_mut_ptr().cast(), len: bytes };
        Region { pieces: SmallVec::from_buf([piece]), len: bytes }
    }
}

/// Numbers of the engine's own that an operation reads or writes. They outlive the operation.
#[derive(Debug)]
pub(crate) struct Words(Vec<u64>);

impl Words {
    pub(crate) fn new(words: Vec<u64>) -> Words {
        Words(words)
    }

    /// The numbers as an operation's memory.
    pub(crate) fn buffer(&mut self) -> Buffer {
        // SAFETY: the pointer and length are the vector's, which is not resized; that it outlives the operation and is
        // left alone meanwhile is the type's rule.
        unsafe { Buffer::from_raw(self.0.as_mut_ptr().cast(), self.0.len(), DType::U64) }
    }

    /// The numbers, once the operation is over.
    pub(crate) fn get(&self) -> &[u64] {
        &self.0
    }
}

/// The three spaces of a schedule.
#[derive(Debug)]
pub(crate) struct Spaces {
    pub(crate) input: Region,
    pub(crate) output: Region,
    pub(crate) scratch: Region,
    /// Bytes per element.
    pub(crate) element: usize,
}

impl Spaces {
    /// Those of an operation on elements of so many bytes, without scratch memory yet.
    pub(crate) fn new(input: Region, output: Region, element: usize) -> Spaces {
        Spaces { input, output, scratch: Region::default(), element }
    }

    /// The number of bytes in `slice`.
    pub(crate) fn bytes(&self, slice: Slice) -> usize {
        slice.len * self.element
    }

    /// The memory of `slice`.
    pub(crate) fn region(&self, slice: Slice) -> Region {
        let space = match slice.space {
            Space::Input => &self.input,
            Space::Output => &self.output,
            Space::Scratch => &self.scratch,
        };
        space.part(slice.offset * self.element, slice.len * self.element)
    }
}
