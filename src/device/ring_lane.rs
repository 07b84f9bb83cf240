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

    /// A word by which a stream tells the host something, among those shared with a rank.
    fn edge(&self, peer: Rank, number: usize) -> (DeviceWord<'_>, Width);

    /// The first bytes of a cell of a ring.
    fn bytes(&self, sender: Rank, receiver: Rank, cell: usize, len: usize) -> DeviceBytes<'_>;

    /// The bytes of a cell of the rings with a rank.
    fn cell(&self, peer: Rank) -> usize;
}

/// What a stream tells the host in a word that is shared with a rank.
#[derive(Clone, Copy, Debug)]
pub struct Edge {
    /// The rank.
    pub peer: Rank,
    /// The word's number among those shared with that rank.
    pub word: usize,
    /// What the stream writes.
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

/// One rank's ends of the rings to and from all ranks, itself included.
///
/// Both ends of a pair submit its messages in the same order. If the messages of one pair and direction go on several streams,
/// the caller has each wait for the one before. Messages of different pairs need not wait for each other.
#[derive(Debug)]
pub struct RingLane<M = Together> {
    me: Rank,
    memory: M,
    rings: Rings,
}

impl RingLane {
    /// The lane of this number, through which nothing has gone. No other lane uses its words and cells. Each half of the
    /// staging memory has a cell for every receiver, end to end.
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

    /// The bytes of half the staging memory for so many ranks, with cells of so many bytes.
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

    /// Counts from the beginning. No rank may have anything on the lane, and its words must be zero.
    pub(crate) fn reset(&mut self) {
        self.rings = Rings::new(self.me, self.memory.words.layout.ranks());
    }

    /// Puts a batch on a stream and returns at once. The stretches of a tensor are counted end to end.
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

    /// The rounds of a batch, which can be submitted next. They are always the same if this rank sends itself nothing in it.
    pub fn plan(&self, messages: &[Message]) -> Result<Rounds, ToSelfError> {
        Rounds::through(self.me, messages, |peer| self.memory.cell(peer), self.rings.ahead())
    }

    /// How many messages this rank has sent itself and not received; negative if it is the other way round.
    pub(crate) fn ahead(&self) -> i64 {
        self.rings.ahead()
    }

    /// The word that the messages of a ring wait for, and the greatest value, once this batch is submitted; nothing if the
    /// batch has no messages there.
    pub(crate) fn awaits_after(&self, rounds: &Rounds, peer: Rank, direction: Direction) -> Option<(Word, u64)> {
        let mut flows = rounds.flows.iter();
        flows.find(|flow| (flow.peer, flow.direction) == (peer, direction)).map(|flow| self.rings.awaits_after(flow))
    }

    /// Has the ring of one direction count from the beginning. No stream may have anything of it, and its words must be zero.
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

    /// Has a stream write words that tell the host something.
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
