//! A lane of rings: batches of messages put on streams, with real addresses.

use crate::device::counters::Word;
use crate::device::lane::{Edges, LaneWords, Stretches, copy, cut, flush};
use crate::device::rings::{RingNumbering, Rings};
use crate::device::rounds::{CELLS, Direction, Message, Operation, Place, Rounds, ToSelfError};
use crate::device::staging::Staging;
use crate::device::words::WordLayout;
use crate::sync::Arc;
use crate::sys::cuda::{CudaError, Current, DeviceBytes, RegisteredWords, Stream, Width};
use crate::types::Rank;

/// One rank's ends of the rings to and from all ranks, itself too.
///
/// Both ends of a pair submit its messages in the same order. If that is not on one stream, the caller has a pair's messages
/// of one direction each wait for the one before; messages of different pairs need not wait for each other.
#[derive(Debug)]
pub struct RingLane {
    me: Rank,
    words: LaneWords,
    cells: Staging,
    rings: Rings,
}

impl RingLane {
    /// The lane of this number, through which nothing has gone. Its words and its cells are its own: of the halves of staging
    /// memory each has a cell for every receiver, end to end.
    pub fn new(
        number: usize,
        me: Rank,
        layout: WordLayout,
        words: Arc<RegisteredWords>,
        cells: Staging,
        width: Width,
    ) -> RingLane {
        let words = LaneWords { number, layout, registered: words, width };
        RingLane { me, words, cells, rings: Rings::new(me, layout.ranks()) }
    }

    /// The bytes of half the staging memory that cells of so many bytes for so many ranks take.
    pub fn half(ranks: usize, cell: usize) -> usize {
        ranks * cell
    }

    /// The bytes of a cell.
    pub fn cell(&self) -> usize {
        self.cells.half() / self.words.layout.ranks()
    }

    /// A batch as rounds, which can be submitted next. Of one in which this rank sends itself nothing the rounds are always
    /// the same.
    pub fn plan(&self, messages: &[Message]) -> Result<Rounds, ToSelfError> {
        Rounds::new(self.me, messages, self.cell(), self.rings.ahead())
    }

    /// The words that its batches wait for, and the greatest values.
    pub(crate) fn awaits(&self) -> impl Iterator<Item = (Word, u64)> + '_ {
        self.rings.awaits()
    }

    /// Counts from the beginning. Nothing may be on the lane, on any rank, and its words are zero.
    pub(crate) fn reset(&mut self) {
        self.rings = Rings::new(self.me, self.words.layout.ranks());
    }

    /// Puts a batch on a stream and returns at once. A tensor of the batch is what lies in stretches, end to end.
    ///
    /// # Errors
    /// A call of the driver has failed. What came before it may be on the stream, so the lane is of no use any more.
    ///
    /// # Panics
    /// When the tensors are shorter than what the batch touches.
    pub fn submit(
        &mut self,
        current: &Current<'_>,
        stream: &Stream,
        rounds: &Rounds,
        tensors: &[&[DeviceBytes<'_>]],
        edges: Edges,
    ) -> Result<(), CudaError> {
        let numbering = self.rings.take_up(rounds);
        let mut batch = self.words.batch(edges.starts);
        for operation in &rounds.operations {
            match operation {
                Operation::Word(word) => {
                    if let Some(access) = numbering.access(*word) {
                        self.words.add(&mut batch, access);
                    }
                }
                Operation::Copy { from, into } => {
                    flush(current, stream, &mut batch)?;
                    let bytes = |place| self.bytes(&numbering, tensors, place);
                    copy(current, stream, &bytes(*from), &bytes(*into))?;
                }
            }
        }
        self.words.write(&mut batch, edges.ends);
        flush(current, stream, &mut batch)
    }

    fn bytes<'a>(&'a self, numbering: &RingNumbering, tensors: &[&[DeviceBytes<'a>]], place: Place) -> Stretches<'a> {
        let mut stretches = Stretches::new();
        match place {
            Place::Tensor(part) => cut(tensors[part.tensor], part.offset, part.len, &mut stretches),
            Place::Cell { peer, direction, chunk, len } => {
                let (sender, receiver) = match direction {
                    Direction::Send => (self.me, peer),
                    Direction::Receive => (peer, self.me),
                };
                let half = numbering.cell(peer, direction, chunk);
                stretches.push(self.cells.bytes(sender, half, receiver.index() * self.cell(), len));
            }
        }
        stretches
    }
}

// A half of the staging memory holds one cell of every ring.
const _: () = assert!(CELLS == 2);
