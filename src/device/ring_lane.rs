//! A lane of rings: batches of messages put on streams, with real addresses.

use crate::device::counters::{Word, WordAccess};
use crate::device::lane::{Edges, LaneWords, Stretches, copy, cut, flush};
use crate::device::rings::{RingNumbering, Rings};
use crate::device::rounds::{CELLS, CopyEnd, Direction, Message, Rounds, StreamOperation, ToSelfError};
use crate::device::staging::Staging;
use crate::device::words::WordLayout;
use crate::sync::Arc;
use crate::sys::cuda::{Batch, CudaError, Current, DeviceBytes, DeviceWord, RegisteredWords, Stream, Width};
use crate::types::Rank;

/// Where the words and the cells of a rank's rings are.
pub trait RingMemory {
    /// A word of a ring, and how much of it streams look at.
    fn word(&self, word: Word) -> (DeviceWord<'_>, Width);

    /// A word by which a stream tells the host something, in what is shared with a rank.
    fn edge(&self, peer: Rank, number: usize) -> (DeviceWord<'_>, Width);

    /// The first bytes of a cell of a ring.
    fn bytes(&self, sender: Rank, receiver: Rank, cell: usize, len: usize) -> DeviceBytes<'_>;

    /// How many bytes the cells of the rings with a rank have.
    fn cell(&self, peer: Rank) -> usize;
}

/// What a stream tells the host in a word that is shared with a rank.
#[derive(Clone, Copy, Debug)]
pub struct Edge {
    /// The rank.
    pub peer: Rank,
    /// The word's number in what is shared with it.
    pub word: usize,
    /// What is written.
    pub value: u64,
}

/// The memory of rings that all ranks have set up together.
#[derive(Debug)]
pub struct Together {
    words: LaneWords,
    cells: Staging,
}

impl RingMemory for Together {
    fn word(&self, word: Word) -> (DeviceWord<'_>, Width) {
        let LaneWords { number, layout, registered, width } = &self.words;
        (registered.word(layout.index(*number, word)), *width)
    }

    fn edge(&self, _: Rank, number: usize) -> (DeviceWord<'_>, Width) {
        (self.words.registered.word(number), self.words.width)
    }

    fn bytes(&self, sender: Rank, receiver: Rank, cell: usize, len: usize) -> DeviceBytes<'_> {
        self.cells.bytes(sender, cell, receiver.index() * self.cell(receiver), len)
    }

    fn cell(&self, _: Rank) -> usize {
        self.cells.half() / self.words.layout.ranks()
    }
}

/// One rank's ends of the rings to and from all ranks, itself too.
///
/// Both ends of a pair submit its messages in the same order. If that is not on one stream, the caller has a pair's messages
/// of one direction each wait for the one before; messages of different pairs need not wait for each other.
#[derive(Debug)]
pub struct RingLane<M = Together> {
    me: Rank,
    memory: M,
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
        RingLane::on(Together { words, cells }, me, layout.ranks())
    }

    /// The bytes of half the staging memory that cells of so many bytes for so many ranks take.
    pub fn half(ranks: usize, cell: usize) -> usize {
        ranks * cell
    }

    /// The bytes of a cell.
    pub fn cell(&self) -> usize {
        self.memory.cell(self.me)
    }

    /// The words that its batches wait for, and the greatest values.
    pub(crate) fn awaits(&self) -> impl Iterator<Item = (Word, u64)> + '_ {
        self.rings.awaits()
    }

    /// Counts from the beginning. Nothing may be on the lane, on any rank, and its words are zero.
    pub(crate) fn reset(&mut self) {
        self.rings = Rings::new(self.me, self.memory.words.layout.ranks());
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
        let edge = |(word, value)| Edge { peer: self.me, word, value };
        let (starts, ends) = (edges.starts.map(edge), edges.ends.map(edge));
        self.put(current, stream, rounds, tensors, starts.as_slice(), ends.as_slice())
    }
}

impl<M: RingMemory> RingLane<M> {
    /// Rings in this memory to and from so many ranks, through which nothing has gone.
    pub fn on(memory: M, me: Rank, ranks: usize) -> RingLane<M> {
        RingLane { me, memory, rings: Rings::new(me, ranks) }
    }

    /// Where its words and cells are.
    pub(crate) fn memory_mut(&mut self) -> &mut M {
        &mut self.memory
    }

    /// Where its words and cells are.
    pub(crate) fn memory(&self) -> &M {
        &self.memory
    }

    /// A batch as rounds, which can be submitted next. Of one in which this rank sends itself nothing the rounds are always
    /// the same.
    pub fn plan(&self, messages: &[Message]) -> Result<Rounds, ToSelfError> {
        Rounds::through(self.me, messages, |peer| self.memory.cell(peer), self.rings.ahead())
    }

    /// How many messages this rank has sent itself and not received; negative if it is the other way round.
    pub(crate) fn ahead(&self) -> i64 {
        self.rings.ahead()
    }

    /// The word that the messages of a ring wait for, and the greatest value, once this batch is submitted; nothing if it has
    /// none there.
    pub(crate) fn awaits_after(&self, rounds: &Rounds, peer: Rank, direction: Direction) -> Option<(Word, u64)> {
        let mut flows = rounds.flows.iter();
        flows.find(|flow| (flow.peer, flow.direction) == (peer, direction)).map(|flow| self.rings.awaits_after(flow))
    }

    /// Has the ring of one direction count from the beginning. Nothing of it may be on any stream, and its words are zero.
    pub(crate) fn reset_ring(&mut self, peer: Rank, direction: Direction) {
        self.rings.reset(peer, direction);
    }

    /// As [`submit`](RingLane::submit), with several words that tell the host of beginning and end.
    pub(crate) fn put(
        &mut self,
        current: &Current<'_>,
        stream: &Stream,
        rounds: &Rounds,
        tensors: &[&[DeviceBytes<'_>]],
        starts: &[Edge],
        ends: &[Edge],
    ) -> Result<(), CudaError> {
        let numbering = self.rings.take_up(rounds);
        let mut batch = Batch::new(Width::default());
        self.tell(&mut batch, starts);
        for operation in &rounds.operations {
            match operation {
                StreamOperation::Word(word) => {
                    if let Some(access) = numbering.access(*word) {
                        self.add(&mut batch, access);
                    }
                }
                StreamOperation::Copy { from, into } => {
                    flush(current, stream, &mut batch)?;
                    let bytes = |place| self.bytes(&numbering, tensors, place);
                    copy(current, stream, &bytes(*from), &bytes(*into))?;
                }
            }
        }
        self.tell(&mut batch, ends);
        flush(current, stream, &mut batch)
    }

    /// Has a stream tell the host something.
    pub(crate) fn write(&self, current: &Current<'_>, stream: &Stream, edges: &[Edge]) -> Result<(), CudaError> {
        let mut batch = Batch::new(Width::default());
        self.tell(&mut batch, edges);
        flush(current, stream, &mut batch)
    }

    fn tell<'a>(&'a self, batch: &mut Batch<'a>, edges: &[Edge]) {
        for Edge { peer, word, value } in edges {
            let (place, width) = self.memory.edge(*peer, *word);
            batch.set_width(width);
            batch.write(place, *value);
        }
    }

    fn add<'a>(&'a self, batch: &mut Batch<'a>, access: WordAccess) {
        let (WordAccess::Wait(word, value) | WordAccess::Write(word, value)) = access;
        let (place, width) = self.memory.word(word);
        batch.set_width(width);
        match access {
            WordAccess::Wait(..) => batch.wait(place, value),
            WordAccess::Write(..) => batch.write(place, value),
        }
    }

    fn bytes<'a>(&'a self, numbering: &RingNumbering, tensors: &[&[DeviceBytes<'a>]], place: CopyEnd) -> Stretches<'a> {
        let mut stretches = Stretches::new();
        match place {
            CopyEnd::Tensor(part) => cut(tensors[part.tensor], part.offset, part.len, &mut stretches),
            CopyEnd::Cell { peer, direction, chunk, len } => {
                let (sender, receiver) = match direction {
                    Direction::Send => (self.me, peer),
                    Direction::Receive => (peer, self.me),
                };
                let cell = numbering.cell(peer, direction, chunk);
                stretches.push(self.memory.bytes(sender, receiver, cell, len));
            }
        }
        stretches
    }
}

// A half of the staging memory holds one cell of every ring.
const _: () = assert!(CELLS == 2);
