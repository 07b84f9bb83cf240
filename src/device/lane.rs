//! A lane: programs put on streams, one after the other, with real addresses.

use smallvec::SmallVec;

use crate::device::counters::{Counters, Word, WordAccess};
use crate::device::lower::{DriverCall, Kernel, Location, Program};
use crate::device::network::NetworkMemory;
use crate::device::segment::Segment;
use crate::device::staging::Staging;
use crate::device::words::WordLayout;
use crate::schedule::Space;
use crate::sync::Arc;
use crate::sys::cuda::{Batch, CudaError, Current, DeviceBytes, Module, RegisteredWords, Stream, Width};
use crate::types::Rank;

/// One rank's end of a lane.
///
/// All ranks put the programs of the same segments on it, in the same order. If these go on several streams, the caller has
/// each program wait for the one before.
#[derive(Debug)]
pub struct Lane {
    me: Rank,
    words: LaneWords,
    staging: Staging,
    /// Only where there are other hosts.
    network: Option<Arc<NetworkMemory>>,
    counters: Counters,
}

/// The words of a lane, and how a stream reaches them.
#[derive(Debug)]
pub(crate) struct LaneWords {
    /// The lane's number.
    pub(crate) number: usize,
    pub(crate) layout: WordLayout,
    pub(crate) registered: Arc<RegisteredWords>,
    pub(crate) width: Width,
}

impl LaneWords {
    /// A batch that begins with this write of a word, if there is one, by which the stream tells the host something.
    pub(crate) fn batch(&self, first: Option<(usize, u64)>) -> Batch<'_> {
        let mut batch = Batch::new(self.width);
        self.write(&mut batch, first);
        batch
    }

    /// Adds the write of a word by which the stream tells the host something, if there is one.
    pub(crate) fn write<'a>(&'a self, batch: &mut Batch<'a>, edge: Option<(usize, u64)>) {
        if let Some((word, value)) = edge {
            batch.write(self.registered.word(word), value);
        }
    }

    /// Adds a wait for a word of the lane, or a write.
    pub(crate) fn add<'a>(&'a self, batch: &mut Batch<'a>, access: WordAccess) {
        let place = |word| self.registered.word(self.layout.index(self.number, word));
        match access {
            WordAccess::Wait(word, value) => batch.wait(place(word), value),
            WordAccess::Write(word, value) => batch.write(place(word), value),
        }
    }
}

/// The memory of an operation: its tensors, and what the engine lends.
#[derive(Clone, Copy, Debug)]
pub struct Tensors<'a> {
    /// The whole input: tensors, end to end.
    pub input: &'a [DeviceBytes<'a>],
    /// The whole output, likewise.
    pub output: &'a [DeviceBytes<'a>],
    /// Scratch memory, enough for a segment, by the half of the staging memory that it uses.
    pub scratch: [DeviceBytes<'a>; 2],
    /// Memory for sums, likewise.
    pub sums: [DeviceBytes<'a>; 2],
    /// The parts of a window of all ranks, where the operation writes to them.
    pub parts: &'a [DeviceBytes<'a>],
    /// The bytes of an element.
    pub element: usize,
    /// The bytes of a sum.
    pub sum: usize,
}

/// The words by which a stream tells the host how far it is, by their numbers, and what it writes there.
#[derive(Clone, Copy, Debug, Default)]
pub struct Edges {
    /// Written before the program.
    pub starts: Option<(usize, u64)>,
    /// Written after it.
    pub ends: Option<(usize, u64)>,
}

/// A program to be put on a stream.
#[derive(Clone, Copy, Debug)]
pub struct Submission<'a> {
    /// The program.
    pub program: &'a Program,
    /// The stretch of the collective that it is for.
    pub segment: &'a Segment,
    /// The memory of the whole operation.
    pub tensors: &'a Tensors<'a>,
    /// What the stream tells the host.
    pub edges: Edges,
}

/// Launches the kernels of programs.
pub trait Kernels {
    /// The code of the kernels, which must stay while a graph has some of them.
    fn code(&self) -> Option<&Arc<Module>>;

    /// Puts a kernel on a stream, by the addresses that `places` gives.
    fn launch(
        &self,
        current: &Current<'_>,
        stream: &Stream,
        kernel: &Kernel,
        places: &Places<'_>,
    ) -> Result<(), CudaError>;
}

/// Where a program's memory is.
#[derive(Debug)]
pub struct Places<'a> {
    staging: &'a Staging,
    network: Option<&'a NetworkMemory>,
    half: usize,
    segment: &'a Segment,
    tensors: &'a Tensors<'a>,
}

/// Stretches of device memory that belong together.
pub type Stretches<'a> = SmallVec<[DeviceBytes<'a>; 8]>;

impl<'a> Places<'a> {
    /// The bytes of an element.
    pub fn element(&self) -> usize {
        self.tensors.element
    }

    /// The bytes of a sum.
    pub fn sum(&self) -> usize {
        self.tensors.sum
    }

    /// The stretches that a program's memory consists of, in order: it is cut where a segment's blocks or tensors end.
    ///
    /// # Panics
    /// When the tensors are shorter than what the program touches.
    pub fn of(&self, memory: Location) -> Stretches<'a> {
        let Tensors { input, output, scratch, sums, parts, element, sum } = *self.tensors;
        match memory {
            Location::Staging { of, offset, bytes } => one(self.staging.bytes(of, self.half, offset, bytes)),
            Location::Outbound { offset, bytes } => one(self.network().outbound(self.half).part(offset, bytes)),
            Location::Inbound { offset, bytes } => one(self.network().inbound(self.half).part(offset, bytes)),
            Location::Own(slice) => {
                let (extent, whole) = match slice.space {
                    Space::Input => (&self.segment.input, input),
                    Space::Output => (&self.segment.output, output),
                    Space::Scratch => return one(scratch[self.half].part(slice.offset * element, slice.len * element)),
                    Space::Sums => return one(sums[self.half].part(slice.offset * sum, slice.len * sum)),
                    Space::Parts => {
                        let mut stretches = Stretches::new();
                        cut(parts, slice.offset * element, slice.len * element, &mut stretches);
                        return stretches;
                    }
                };
                let mut stretches = Stretches::new();
                for run in extent.parts(slice) {
                    cut(whole, run.offset * element, run.len * element, &mut stretches);
                }
                stretches
            }
        }
    }
}

impl<'a> Places<'a> {
    fn network(&self) -> &'a NetworkMemory {
        self.network.expect("programs of ranks on one host have no messages to others")
    }
}

fn one(bytes: DeviceBytes<'_>) -> Stretches<'_> {
    [bytes].into_iter().collect()
}

/// Appends `len` bytes from the `offset`-th on of tensors that lie end to end.
pub(crate) fn cut<'a>(tensors: &[DeviceBytes<'a>], offset: usize, len: usize, into: &mut Stretches<'a>) {
    let (mut skip, mut left) = (offset, len);
    for tensor in tensors {
        let take = left.min(tensor.len().saturating_sub(skip));
        if take > 0 {
            into.push(tensor.part(skip, take));
        }
        (skip, left) = (skip.saturating_sub(tensor.len()), left - take);
        if left == 0 {
            return;
        }
    }
    assert!(left == 0, "tensors of {} bytes end before {len} at {offset}", total(tensors));
}

fn total(tensors: &[DeviceBytes<'_>]) -> usize {
    tensors.iter().map(|tensor| tensor.len()).sum()
}

impl Lane {
    /// The lane of this number, on which nothing has happened. No other lane uses its words and its staging memory.
    pub fn new(
        number: usize,
        me: Rank,
        layout: WordLayout,
        words: Arc<RegisteredWords>,
        staging: Staging,
        width: Width,
    ) -> Lane {
        let words = LaneWords { number, layout, registered: words, width };
        Lane { me, words, staging, network: None, counters: Counters::new(layout.ranks()) }
    }

    /// This lane, with memory for messages to and from other hosts.
    pub fn with_network(self, network: Option<Arc<NetworkMemory>>) -> Lane {
        Lane { network, ..self }
    }

    /// The lane's number of ranks.
    pub fn ranks(&self) -> usize {
        self.words.layout.ranks()
    }

    /// The memory for messages to and from other hosts, if there are any.
    pub(crate) fn network(&self) -> Option<Arc<NetworkMemory>> {
        self.network.clone()
    }

    /// The words that its programs wait for, and the greatest values.
    pub(crate) fn awaits(&self) -> impl Iterator<Item = (Word, u64)> + '_ {
        let me = self.me;
        let (outbound, inbound) = self.counters.network();
        let network = [(Word::Sent { of: me }, outbound), (Word::Inbound { of: me }, inbound)];
        let network = network.into_iter().filter(|_| self.network.is_some());
        let peers = self.counters.received().iter().enumerate();
        let peers = peers.map(|(peer, received)| (Rank::from(peer), *received)).filter(move |(peer, _)| *peer != me);
        let peers = peers.flat_map(move |(peer, received)| {
            let (head, tail) = (Word::Head { sender: peer, receiver: me }, Word::Tail { sender: me, receiver: peer });
            [(head, received), (tail, self.counters.staged(peer))]
        });
        peers.chain(network)
    }

    /// Counts from the beginning. No rank may have anything on the lane, and its words must be zero.
    pub fn reset(&mut self) {
        self.counters = Counters::new(self.ranks());
    }

    /// Puts a segment's program on a stream and returns at once.
    ///
    /// # Errors
    /// A call of the driver has failed. What came before it may be on the stream, so the lane is of no use any more.
    ///
    /// # Panics
    /// When the tensors are shorter than what the program touches.
    pub fn submit(
        &mut self,
        current: &Current<'_>,
        stream: &Stream,
        submission: &Submission<'_>,
        kernels: &impl Kernels,
    ) -> Result<(), CudaError> {
        let Submission { program, segment, tensors, edges } = *submission;
        let numbering = self.counters.take_up(self.me, program);
        let network = self.network.as_deref();
        let places = Places { staging: &self.staging, network, half: numbering.half(), segment, tensors };
        let mut batch = self.words.batch(edges.starts);
        numbering.credits().iter().for_each(|credit| self.words.add(&mut batch, *credit));
        for operation in &program.operations {
            if let DriverCall::Words(words) = operation {
                words.iter().for_each(|word| self.words.add(&mut batch, numbering.access(*word)));
                continue;
            }
            flush(current, stream, &mut batch)?;
            match operation {
                DriverCall::Words(_) => {}
                DriverCall::Copy { from, into } => copy(current, stream, &places.of(*from), &places.of(*into))?,
                DriverCall::Kernel(kernel) => kernels.launch(current, stream, kernel, &places)?,
            }
        }
        self.words.write(&mut batch, edges.ends);
        flush(current, stream, &mut batch)
    }

    /// Has a stream write a word.
    ///
    /// # Errors
    /// A call of the driver has failed.
    pub fn write(&self, current: &Current<'_>, stream: &Stream, word: usize, value: u64) -> Result<(), CudaError> {
        flush(current, stream, &mut self.words.batch(Some((word, value))))
    }
}

/// Submits the operations that a batch has collected.
pub(crate) fn flush(current: &Current<'_>, stream: &Stream, batch: &mut Batch<'_>) -> Result<(), CudaError> {
    stream.submit(current, batch)?;
    batch.clear();
    Ok(())
}

/// Copies stretches into others of the same length in all, which may be cut elsewhere.
pub(crate) fn copy(
    current: &Current<'_>,
    stream: &Stream,
    from: &[DeviceBytes<'_>],
    into: &[DeviceBytes<'_>],
) -> Result<(), CudaError> {
    let (mut from, mut into) = (from.iter().copied(), into.iter().copied());
    let (mut source, mut target) = (from.next(), into.next());
    while let (Some(bytes), Some(place)) = (source, target) {
        let len = bytes.len().min(place.len());
        stream.copy(current, bytes.part(0, len), place.part(0, len))?;
        source = rest(bytes, len).or_else(|| from.next());
        target = rest(place, len).or_else(|| into.next());
    }
    assert!(source.is_none() && target.is_none(), "a copy to memory of another length");
    Ok(())
}

/// What follows the first `len` bytes; nothing if nothing does.
fn rest(bytes: DeviceBytes<'_>, len: usize) -> Option<DeviceBytes<'_>> {
    (len < bytes.len()).then(|| bytes.part(len, bytes.len() - len))
}
