//! A lane of a CUDA graph: collectives put into a capture, with words and memory of the graph's own.
//!
//! A lane serves one rank's operations of one graph, and lives as long as the graph or anything made of it. It counts by
//! [`tokens`](crate::device::tokens), so the graph can run again and again.

use std::time::{Duration, Instant};

use crate::device::counters::Word;
use crate::device::graph_mark::GraphMark;
use crate::device::in_flight::{InFlight, Look};
use crate::device::lane::{Edges, Kernels, Lane, LaneWords, Submission, Tensors, flush};
use crate::device::lower::{DriverCall, Kernel, Location, Program};
use crate::device::replay::{Busy, COUNTS, Captured, Replay, TOKENS, TokenLayout};
use crate::device::ring_lane::RingLane;
use crate::device::rounds::Rounds;
use crate::device::segment::Segment;
use crate::device::setup::Parts;
use crate::device::tokens::{Step, Tokens};
use crate::device::watch::{Left, Replayed};
use crate::schedule::{Slice, Space};
use crate::signature::Signature;
use crate::sync::{Arc, Mutex, lock};
use crate::sys::cuda::{Batch, Context, CudaError, Current, DeviceBytes, DeviceMemory, Event, Module, Stream};
use crate::types::Rank;

/// What a lane is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Collectives that every rank can plan for all, through halves of staging memory of so many bytes.
    Plans {
        /// The bytes.
        half: usize,
    },
    /// All_to_alls, through halves that have a cell for each rank.
    Rounds {
        /// The bytes.
        half: usize,
    },
}

impl Purpose {
    /// The bytes of half its staging memory.
    pub(crate) fn half(self) -> usize {
        match self {
            Purpose::Plans { half } | Purpose::Rounds { half } => half,
        }
    }

    /// Whether a lane for this purpose also serves `other`.
    pub(crate) fn serves(self, other: Purpose) -> bool {
        match (self, other) {
            (Purpose::Plans { half }, Purpose::Plans { half: wanted }) => half >= wanted,
            (Purpose::Rounds { half }, Purpose::Rounds { half: wanted }) => half == wanted,
            _ => false,
        }
    }
}

/// A graph's lane. The executor uses it while the graph is captured, the watch for as long as the lane lives.
pub(crate) struct GraphLane {
    purpose: Purpose,
    replay: Replay,
    mark: GraphMark,
    /// Taken out when it is to be given back.
    memory: Mutex<Option<GraphMemory>>,
}

/// The part of a lane that must not go while a replay runs.
struct GraphMemory {
    me: Rank,
    context: Arc<Context>,
    layout: TokenLayout,
    counts: LaneWords,
    tokens: LaneWords,
    lanes: Lanes,
    /// New operations use the last ones, earlier operations the shorter ones before.
    scratch: Vec<DeviceMemory>,
    sums: Vec<DeviceMemory>,
    /// Of the kernels in the graph.
    code: Vec<Arc<Module>>,
    _end: Arc<Event>,
}

enum Lanes {
    Plans(Lane),
    Rounds(RingLane),
}

/// What is put into a capture, the same on every rank.
pub(crate) enum CapturedWork<'a> {
    Plan {
        /// In their order.
        programs: &'a [(Arc<Segment>, Arc<Program>)],
        /// The bytes of an element.
        element: usize,
        /// The bytes of a sum.
        sum: usize,
    },
    /// The messages of an all_to_all.
    Rounds(&'a Rounds),
}

/// An operation to be captured.
pub(crate) struct Capturing<'a> {
    pub(crate) call: Signature,
    pub(crate) limit: Duration,
    pub(crate) captured: CapturedWork<'a>,
    pub(crate) inputs: &'a [DeviceBytes<'a>],
    pub(crate) outputs: &'a [DeviceBytes<'a>],
}

impl GraphLane {
    /// A lane on what the ranks have set up for it. It can be used once all ranks have made theirs.
    ///
    /// It keeps `end` alive, the event that orders the streams of the capture.
    pub(crate) fn new(
        comm: String,
        me: Rank,
        purpose: Purpose,
        parts: Parts,
        end: Arc<Event>,
        in_flight: Arc<InFlight>,
    ) -> GraphLane {
        let Parts { context, words, registered, staging, width, members, .. } = parts;
        let layout = TokenLayout::new(members.len());
        let registered = Arc::new(registered);
        let of = |number| LaneWords { number, layout: layout.words(), registered: registered.clone(), width };
        let staging = staging.into_iter().next().expect("one was wanted");
        let lanes = match purpose {
            Purpose::Plans { .. } => {
                Lanes::Plans(Lane::new(COUNTS, me, layout.words(), registered.clone(), staging, width))
            }
            Purpose::Rounds { .. } => {
                Lanes::Rounds(RingLane::new(COUNTS, me, layout.words(), registered.clone(), staging, width))
            }
        };
        let (counts, tokens) = (of(COUNTS), of(TOKENS));
        let (scratch, sums, code) = (vec![], vec![], vec![]);
        let memory = GraphMemory { me, context, layout, counts, tokens, lanes, scratch, sums, code, _end: end };
        let replay = Replay::new(comm, me, words, layout, width, in_flight);
        GraphLane { purpose, replay, mark: GraphMark::default(), memory: Mutex::new(Some(memory)) }
    }

    pub(crate) fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// Has the lane live until the graph is gone for which `stream` is being captured.
    pub(crate) fn belong(&self, current: &Current<'_>, stream: &Stream) -> Result<(), CudaError> {
        self.mark.belong(current, stream)
    }

    /// Whether its graph is still there.
    pub(crate) fn lives(&self) -> bool {
        self.mark.lives()
    }

    /// Has the lane given back although there is no graph.
    pub(crate) fn give_up(&self) {
        self.mark.give_up();
    }

    /// Puts an operation into the capture of a stream. The lane's operations are captured one after the other.
    ///
    /// # Errors
    /// A call of the driver has failed. The graph is of no use.
    ///
    /// # Panics
    /// When the lane is not for this, or its graph is gone.
    pub(crate) fn submit(
        &self,
        current: &Current<'_>,
        stream: &Stream,
        operation: &Capturing<'_>,
        kernels: &impl Kernels,
    ) -> Result<(), CudaError> {
        let mut memory = lock(&self.memory);
        let memory = memory.as_mut().expect("a graph that is being captured lives");
        memory.submit(current, stream, operation, kernels, &self.replay)
    }
}

impl Replayed for GraphLane {
    fn tick(&self, now: Instant) -> Look {
        self.replay.tick(now)
    }

    fn is_busy(&self) -> bool {
        self.replay.is_busy()
    }

    fn take(&self) -> Option<Left> {
        if self.lives() {
            return None;
        }
        let memory = lock(&self.memory).take()?;
        Some(Left::new(vec![self.replay.in_flight().clone()], Box::new(memory)))
    }
}

impl GraphMemory {
    fn submit(
        &mut self,
        current: &Current<'_>,
        stream: &Stream,
        operation: &Capturing<'_>,
        kernels: &impl Kernels,
        replay: &Replay,
    ) -> Result<(), CudaError> {
        let size = self.layout.words().ranks();
        let tokens = match operation.captured {
            CapturedWork::Plan { programs, element, sum } => {
                self.make_room(programs, element, sum)?;
                Tokens::of_programs(self.me, programs.iter().map(|(_, program)| &**program))
            }
            CapturedWork::Rounds(rounds) => Tokens::of_rounds(self.me, size, rounds),
        };
        let number = replay.next();
        let busy = |place: Busy| Some((self.layout.busy(self.me), place.to_word()));
        let mut begin = self.counts.batch(busy(Busy::Begins(number)));
        self.add(&mut begin, tokens.waits());
        self.counts.write(&mut begin, busy(Busy::Runs(number)));
        self.add(&mut begin, tokens.takes());
        flush(current, stream, &mut begin)?;
        drop(begin);
        let run = self.run(current, stream, operation, kernels);
        // From here on the stream waits for nothing. The end is captured after errors too: earlier parts may be in the graph.
        let mut end = self.counts.batch(Some((self.layout.busy(self.me), 0)));
        self.add(&mut end, tokens.returns());
        let ended = flush(current, stream, &mut end);
        let (call, limit, awaits) = (operation.call, operation.limit, self.awaits());
        replay.note(Captured { call, limit, tokens: tokens.awaited().collect(), awaits });
        run.and(ended)
    }

    /// Puts what an operation does between its edges into the capture.
    fn run(
        &mut self,
        current: &Current<'_>,
        stream: &Stream,
        operation: &Capturing<'_>,
        kernels: &impl Kernels,
    ) -> Result<(), CudaError> {
        let (input, output) = (operation.inputs, operation.outputs);
        match (&mut self.lanes, &operation.captured) {
            (Lanes::Rounds(rings), CapturedWork::Rounds(rounds)) => {
                rings.reset();
                rings.submit(current, stream, rounds, &[input, output], Edges::default())
            }
            (Lanes::Plans(lane), &CapturedWork::Plan { programs, element, sum }) => {
                lane.reset();
                if let Some(code) = kernels.code().filter(|code| !self.code.iter().any(|kept| Arc::ptr_eq(kept, code)))
                {
                    self.code.push(code.clone());
                }
                let [scratch, sums] =
                    [&self.scratch, &self.sums].map(|all| [all.last().expect("there is room").bytes(); 2]);
                let tensors = Tensors { input, output, scratch, sums, parts: &[], element, sum };
                programs.iter().try_for_each(|(segment, program)| {
                    let submission = Submission { program, segment, tensors: &tensors, edges: Edges::default() };
                    lane.submit(current, stream, &submission, kernels)
                })
            }
            _ => panic!("a lane for something else"),
        }
    }

    /// The words that the last operation waits for, and the greatest values.
    fn awaits(&self) -> Vec<(Word, u64)> {
        match &self.lanes {
            Lanes::Plans(lane) => lane.awaits().collect(),
            Lanes::Rounds(rings) => rings.awaits().collect(),
        }
    }

    fn add<'a>(&'a self, batch: &mut Batch<'a>, steps: impl Iterator<Item = Step>) {
        for step in steps {
            match step {
                Step::Count(access) => self.counts.add(batch, access),
                Step::Token(access) => self.tokens.add(batch, access),
            }
        }
    }

    /// Makes as much scratch memory as these programs use, if there is less. The memory of earlier operations stays.
    fn make_room(
        &mut self,
        programs: &[(Arc<Segment>, Arc<Program>)],
        element: usize,
        sum: usize,
    ) -> Result<(), CudaError> {
        let used = |space| programs.iter().map(|(_, program)| used(program, space)).max().unwrap_or(0);
        let (scratch, sums) = (used(Space::Scratch) * element, used(Space::Sums) * sum);
        grow(&self.context, &mut self.scratch, scratch)?;
        grow(&self.context, &mut self.sums, sums)
    }
}

fn grow(context: &Arc<Context>, memory: &mut Vec<DeviceMemory>, bytes: usize) -> Result<(), CudaError> {
    if memory.last().is_none_or(|last| last.bytes().len() < bytes) {
        memory.push(DeviceMemory::new(context, bytes)?);
    }
    Ok(())
}

/// How many elements of a space a program uses.
fn used(program: &Program, space: Space) -> usize {
    let own = |slice: &Slice| if slice.space == space { slice.offset + slice.len } else { 0 };
    let of = |memory: &Location| if let Location::Own(slice) = memory { own(slice) } else { 0 };
    let all = |blocks: &[Location]| blocks.iter().map(of).max().unwrap_or(0);
    let uses = program.operations.iter().map(|operation| match operation {
        DriverCall::Words(_) => 0,
        DriverCall::Copy { from, into } => of(from).max(of(into)),
        DriverCall::Kernel(Kernel::Widen { from, into }) => own(from).max(own(into)),
        DriverCall::Kernel(Kernel::Scale { slice }) => own(slice),
        DriverCall::Kernel(Kernel::Fold { into, others: blocks, .. } | Kernel::Average { into, blocks }) => {
            own(into).max(all(blocks))
        }
    });
    uses.max().unwrap_or(0)
}
