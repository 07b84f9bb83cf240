//! The tensors and scratch memory of one operation, as the engine reads and writes them.
//!
//! # Safety
//! This is the one place of the engine that dereferences [`Buffer`]s. It relies on their contract (see
//! [`Buffer::from_raw`]): from submission to completion the memory is valid and the program does not write it. A [`Region`]
//! therefore must not outlive its operation: the engine drops every region of an operation before it completes the
//! operation's work. Schedules order conflicting steps, and one thread at a time holds the engine's lock, so no two
//! slices made here are alive at the same time except where a function takes both. The memory of a window is lent in
//! the same way, from its registration until it is concealed. Pinned memory for messages of devices is the engine's own: words
//! say whether it or a stream may use it.
#![allow(unsafe_code, reason = "the engine's only access to callers' memory")]

use std::io::IoSlice;
use std::ptr::NonNull;
use std::slice;

use smallvec::SmallVec;

use crate::buffer::Buffer;
use crate::device::network::NetworkMemory;
use crate::schedule::{Slice, Space};
use crate::sync::Arc;
use crate::sys::lent_bytes::LentBytes;
use crate::sys::segment::MappedMemory;
use crate::sys::team::Team;
use crate::types::DType;

/// Bytes that lie in one run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    ptr: *mut u8,
    len: usize,
}

impl Piece {
    /// `len` bytes from `offset` on.
    ///
    /// # Panics
    /// When they are not inside. Nothing behind this looks before it touches memory.
    fn part(self, offset: usize, len: usize) -> Piece {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(is_inside, "{len} bytes at {offset} of a run of {}", self.len);
        Piece { ptr: self.ptr.wrapping_add(offset), len }
    }

    /// At most so many pieces, end to end, which begin at multiples of a cache line's bytes from the beginning.
    fn cut(self, parts: usize) -> impl Iterator<Item = Piece> {
        let each = self.len.div_ceil(parts).next_multiple_of(64).max(1);
        (0..self.len).step_by(each).map(move |offset| self.part(offset, each.min(self.len - offset)))
    }
}

// SAFETY: a Piece is a Buffer or a part of one, and Buffer is Send; or it is memory of the engine, which is for all threads.
unsafe impl Send for Piece {}

/// Bytes of an operation's memory.
#[derive(Clone, Debug)]
pub(crate) enum Region {
    /// One run, as mostly.
    Run(Piece),
    /// Several, and how many bytes they have together.
    Runs(Vec<Piece>, usize),
}

impl Default for Region {
    fn default() -> Region {
        Region::Run(Piece { ptr: NonNull::dangling().as_ptr(), len: 0 })
    }
}

impl Region {
    /// All bytes of `buffers`, end to end.
    #[inline]
    pub(crate) fn of(buffers: &[Buffer]) -> Region {
        let piece = |buffer: &Buffer| Piece { ptr: buffer.ptr(), len: buffer.bytes() };
        match buffers {
            [] => Region::default(),
            [buffer] => Region::Run(piece(buffer)),
            _ => Region::joined(buffers.iter().map(piece)),
        }
    }

    /// A half of a device's memory for messages to other hosts. The region keeps the memory alive.
    pub(crate) fn outbound(memory: &NetworkMemory, half: usize) -> Region {
        let (ptr, len) = memory.outbound_address(half);
        Region::Run(Piece { ptr, len })
    }

    /// The same of messages from other hosts.
    pub(crate) fn inbound(memory: &NetworkMemory, half: usize) -> Region {
        let (ptr, len) = memory.inbound_address(half);
        Region::Run(Piece { ptr, len })
    }

    /// All bytes of `pieces`, end to end.
    #[inline(never)]
    fn joined(pieces: impl Iterator<Item = Piece>) -> Region {
        let pieces: Vec<Piece> = pieces.filter(|piece| piece.len > 0).collect();
        let len = pieces.iter().map(|piece| piece.len).sum();
        match pieces.as_slice() {
            [] => Region::default(),
            [piece] => Region::Run(*piece),
            _ => Region::Runs(pieces, len),
        }
    }

    fn pieces(&self) -> &[Piece] {
        match self {
            Region::Run(piece) => slice::from_ref(piece),
            Region::Runs(pieces, _) => pieces,
        }
    }

    /// The number of bytes.
    pub(crate) fn len(&self) -> usize {
        match self {
            Region::Run(piece) => piece.len,
            Region::Runs(_, len) => *len,
        }
    }

    /// Where the bytes are, if they are in one run.
    pub(crate) fn address(&self) -> Option<u64> {
        match self {
            Region::Run(piece) if piece.len > 0 => Some(piece.ptr as u64),
            _ => None,
        }
    }

    /// The bytes as what other processes may read, if they are in one run. Whoever has it drops it before the region's operation ends:
    /// for a window, before it is concealed.
    pub(crate) fn lend(&self) -> Option<Arc<LentBytes>> {
        let Region::Run(Piece { ptr, len: len @ 1.. }) = *self else { return None };
        // SAFETY: the buffers' contract keeps the bytes readable and writable for as long as the region may be used, and whoever has
        // the result, too; of a window's memory the program knows that others access it at any time.
        Some(Arc::new(unsafe { LentBytes::from_raw(ptr, len, Box::new(())) }))
    }

    /// `len` bytes from `offset` on.
    ///
    /// # Panics
    /// When they are not inside the region: a schedule that does not fit its tensors.
    #[inline]
    pub(crate) fn part(&self, offset: usize, len: usize) -> Region {
        match self {
            Region::Run(piece) => Region::Run(piece.part(offset, len)),
            Region::Runs(pieces, whole) => Region::part_of_runs(pieces, *whole, offset, len),
        }
    }

    // Apart from the usual case, which takes few instructions.
    #[inline(never)]
    fn part_of_runs(pieces: &[Piece], whole: usize, offset: usize, len: usize) -> Region {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= whole);
        assert!(is_inside, "{len} bytes at {offset} of a region of {whole}");
        let (mut skip, mut left) = (offset, len);
        Region::joined(pieces.iter().map(|piece| {
            let from = skip.min(piece.len);
            let take = left.min(piece.len - from);
            (skip, left) = (skip - from, left - take);
            piece.part(from, take)
        }))
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
        for piece in self.pieces() {
            if skip < piece.len {
                // SAFETY: skip < piece.len, so the result is inside the piece's allocation.
                return (unsafe { piece.ptr.add(skip) }, piece.len - skip);
            }
            skip -= piece.len;
        }
        (NonNull::dangling().as_ptr(), 0)
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
        let mut bytes = Vec::with_capacity(end - offset);
        slices.iter().for_each(|slice| bytes.extend_from_slice(slice));
        bytes
    }

    /// Copies `from` here, in runs; runs that are the same memory are left alone.
    pub(crate) fn copy_from(&mut self, from: &Region, team: Team) {
        let mut at = 0;
        while at < self.len() {
            let (source, available) = from.locate(at);
            let (target, room) = self.locate(at);
            let take = available.min(room);
            let overlaps = source.addr().abs_diff(target.addr()) < take;
            // What overlaps is copied in one order.
            let parts = if overlaps { 1 } else { team.parts(2 * take) };
            if source == target {
                // In place.
            } else if parts == 1 {
                // SAFETY: both ranges lie in one piece each, valid by the buffers' contract; `copy` allows overlap.
                unsafe { std::ptr::copy(source, target, take) };
            } else {
                let [into, from] = [target, source].map(|ptr| Piece { ptr, len: take });
                let mut pieces: Vec<(Piece, Piece)> = into.cut(parts).zip(from.cut(parts)).collect();
                team.each(&mut pieces, |(into, from)| {
                    // SAFETY: as above, of a part of each; these do not overlap, and no two threads get the same.
                    unsafe { std::ptr::copy_nonoverlapping(from.ptr, into.ptr, into.len) };
                });
            }
            at += take;
        }
    }

    /// Calls `f(into, from)` on runs that correspond.
    ///
    /// `from` and this region do not overlap: they are different spaces or disjoint slices of one.
    pub(crate) fn zip(&mut self, from: &Region, mut f: impl FnMut(&mut [u8], &[u8])) {
        let mut at = 0;
        while at < self.len() {
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
        while at < self.len() {
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
    /// `len` elements of `element` bytes, then as many of another size, with undefined content. Regions given out before are
    /// dead.
    ///
    /// # Panics
    /// When no memory has so many.
    pub(crate) fn regions(&mut self, (len, element): (usize, usize), other: (usize, usize)) -> (Region, Region) {
        let bytes = len.checked_mul(element);
        let all = || bytes?.checked_add(other.0.checked_mul(other.1)?);
        let (bytes, all) = bytes.zip(all()).expect("no more scratch memory than there can be");
        let words = all.div_ceil(size_of::<u64>());
        if self.memory.len() < words {
            self.memory = vec![0; words];
        }
        let all = Piece { ptr: self.memory.as_mut_ptr().cast(), len: all };
        (Region::Run(all.part(0, bytes)), Region::Run(all.part(bytes, all.len - bytes)))
    }

    /// Gives memory back to the system if it is more than `kept` bytes. Regions given out before are dead.
    pub(crate) fn give_back(&mut self, kept: usize) {
        if size_of_val(self.memory.as_slice()) > kept {
            self.memory = Vec::new();
        }
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

/// The parts of a window, which this process reads and writes: its own, and those of other processes, mapped.
#[derive(Debug)]
pub(crate) struct WindowParts {
    /// By rank.
    parts: Vec<Region>,
    /// All, end to end.
    all: Region,
    /// Keeps them mapped.
    _mapped: Vec<MappedMemory>,
}

// SAFETY: the regions are of memory that is mapped as long as this lives, or of the window's; see the module. Nothing changes
// them.
unsafe impl Sync for WindowParts {}

impl WindowParts {
    /// `mapped` are the parts of the other ranks in order, between which `own` is that of rank `me`.
    pub(crate) fn new(me: usize, own: &Region, mapped: Vec<MappedMemory>) -> WindowParts {
        let region = |memory: &MappedMemory| Region::Run(Piece { ptr: memory.as_ptr(), len: memory.len() });
        let mut parts: Vec<Region> = mapped.iter().map(region).collect();
        parts.insert(me, own.clone());
        let all = Region::joined(parts.iter().flat_map(Region::pieces).copied());
        WindowParts { parts, all, _mapped: mapped }
    }

    /// `len` bytes of the part of a rank, from `offset` on.
    ///
    /// # Panics
    /// When they are not inside, or there is no such rank.
    pub(crate) fn of(&self, rank: usize, offset: usize, len: usize) -> Region {
        self.parts[rank].part(offset, len)
    }
}

/// The spaces of a schedule.
#[derive(Debug)]
pub(crate) struct Spaces {
    pub(crate) input: Region,
    pub(crate) output: Region,
    pub(crate) scratch: Region,
    pub(crate) sums: Region,
    /// Only of what is done to all parts of a window.
    pub(crate) parts: Option<Arc<WindowParts>>,
    /// Bytes per element.
    pub(crate) element: usize,
    /// Bytes per sum.
    pub(crate) sum: usize,
}

impl Spaces {
    /// Those of an operation on elements of so many bytes, without scratch memory yet.
    pub(crate) fn new(input: Region, output: Region, element: usize) -> Spaces {
        let (scratch, sums, parts) = (Region::default(), Region::default(), None);
        Spaces { input, output, scratch, sums, parts, element, sum: element }
    }

    /// The number of bytes in `slice`.
    pub(crate) fn bytes(&self, slice: Slice) -> usize {
        bytes_of(slice.len, self.space(slice).1)
    }

    /// The memory of `slice`.
    ///
    /// # Panics
    /// When it is not inside its space.
    pub(crate) fn region(&self, slice: Slice) -> Region {
        let (space, element) = self.space(slice);
        space.part(bytes_of(slice.offset, element), bytes_of(slice.len, element))
    }

    /// Calls `f` on every run of `into` and the parts that correspond of the blocks of as many elements that `from` consists of.
    ///
    /// The two do not overlap: they are different spaces or disjoint slices of one.
    pub(crate) fn each_block(&self, into: Slice, from: Slice, mut f: impl FnMut(&mut [u8], &[&[u8]])) {
        let (mut target, source) = (self.region(into), self.region(from));
        let (element, its) = (self.space(into).1, self.space(from).1);
        let mut at = 0;
        while at < into.len {
            let run = target.run_mut(at * element);
            let starts = (at..from.len).step_by(into.len);
            let mut blocks: SmallVec<[&[u8]; 8]> = starts.map(|start| source.run(start * its)).collect();
            let take = blocks.iter().map(|block| block.len() / its).fold(run.len() / element, usize::min);
            blocks.iter_mut().for_each(|block| *block = &block[..take * its]);
            f(&mut run[..take * element], &blocks);
            at += take;
        }
    }

    /// Bytes per element where `slice` lies.
    pub(crate) fn element_bytes(&self, slice: Slice) -> usize {
        self.space(slice).1
    }

    /// Whether two slices begin at the same byte, each in a space of one run: mostly those of an operation in place.
    pub(crate) fn begin_alike(&self, one: Slice, other: Slice) -> bool {
        let address = |slice: Slice| {
            let (space, element) = self.space(slice);
            Some(space.address()? + bytes_of(slice.offset, element) as u64)
        };
        address(one).is_some_and(|begin| address(other) == Some(begin))
    }

    /// The space that `slice` lies in, and the bytes of each of its elements.
    fn space(&self, slice: Slice) -> (&Region, usize) {
        match slice.space {
            Space::Input => (&self.input, self.element),
            Space::Output => (&self.output, self.element),
            Space::Scratch => (&self.scratch, self.element),
            Space::Sums => (&self.sums, self.sum),
            Space::Parts => {
                let parts = self.parts.as_ref().expect("only schedules for parts of windows have that space");
                (&parts.all, self.element)
            }
        }
    }
}

/// The number of bytes of so many elements.
///
/// # Panics
/// When there is no such number, so that a slice which is outside its space cannot seem to be inside.
fn bytes_of(elements: usize, element: usize) -> usize {
    elements.checked_mul(element).expect("a slice of elements that memory can have")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_part_is_that_part_of_all_bytes(
            mut runs in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..5), 0..5),
            ends in (0.0..=1.0, 0.0..=1.0),
        ) {
            let all = runs.concat();
            let at = |share: f64| (share * all.len() as f64) as usize;
            let (begin, end) = (at(ends.0).min(at(ends.1)), at(ends.0).max(at(ends.1)));
            // SAFETY: the runs outlive the region, and nobody else touches them.
            let buffers = runs.iter_mut().map(|run| unsafe { Buffer::from_raw(run.as_mut_ptr(), run.len(), DType::U8) });
            let region = Region::of(&buffers.collect::<Vec<_>>());
            prop_assert_eq!(region.len(), all.len());
            let part = region.part(begin, end - begin);
            prop_assert_eq!(part.len(), end - begin);
            prop_assert_eq!(part.to_vec(0, part.len()), &all[begin..end]);
            let mut offset = 0;
            let touched = runs.iter().filter(|run| {
                offset += run.len();
                offset.min(end) > (offset - run.len()).max(begin)
            });
            prop_assert_eq!(part.address().is_some(), touched.count() == 1);
        }
    }

    /// Memory of 16 bytes, in one run and in two.
    fn words() -> [Words; 3] {
        [2, 1, 1].map(|count| Words::new(vec![0; count]))
    }

    fn regions([one, two, three]: &mut [Words; 3]) -> [Region; 2] {
        [Region::of(&[one.buffer()]), Region::of(&[two.buffer(), three.buffer()])]
    }

    #[test]
    fn a_part_that_is_not_inside_ends_with_a_panic() {
        for region in regions(&mut words()) {
            for (offset, len) in [(0, 17), (17, 0), (9, 8), (9, usize::MAX - 8), (usize::MAX, 2)] {
                let part = std::panic::AssertUnwindSafe(|| region.part(offset, len));
                assert!(std::panic::catch_unwind(part).is_err(), "{len} bytes at {offset}");
            }
        }
    }

    #[test]
    fn blocks_are_met_run_by_run() {
        let mut words = words();
        let [run, runs] = regions(&mut words);
        // Two blocks of four elements meet four sums of twice their size, and the other way around.
        let all = Slice::new(Space::Output, 0, 8);
        for (output, sums) in [(run.clone(), runs.clone()), (runs, run)] {
            let spaces = Spaces { sums, sum: 4, ..Spaces::new(Region::default(), output, 2) };
            let sums = Slice::new(Space::Sums, 0, 4);
            let mut met = Vec::new();
            spaces.each_block(sums, all, |into, blocks| {
                met.push((into.len(), blocks.iter().map(|block| block.len()).collect::<Vec<_>>()));
            });
            assert!(met.iter().all(|(sums, elements)| *elements == [sums / 2; 2]), "{met:?}");
            assert_eq!(met.iter().map(|(sums, _)| sums).sum::<usize>(), 16);
            spaces.each_block(all.part(0, 4), sums, |into, blocks| assert_eq!(into.len() * 2, blocks[0].len()));
        }
    }

    #[test]
    fn a_slice_that_is_not_inside_its_space_ends_with_a_panic() {
        let mut words = words();
        let [run, runs] = regions(&mut words);
        let spaces = Spaces::new(run, runs, 8);
        let (wraps, wraps_to_one) = (usize::MAX / 8 + 1, usize::MAX / 8 + 2);
        for space in [Space::Input, Space::Output, Space::Scratch, Space::Sums] {
            for (offset, len) in [(0, 3), (wraps, 1), (wraps_to_one, 1), (0, wraps_to_one), (1, usize::MAX)] {
                let slice = Slice::new(space, offset, len);
                let region = std::panic::AssertUnwindSafe(|| spaces.region(slice));
                assert!(std::panic::catch_unwind(region).is_err(), "{slice:?}");
            }
        }
    }
}
