//! Lowering: one rank's schedule of a segment as the operations that it puts on a stream, in one program or in
//! [two](crate::device::halves).
//!
//! # Words
//! Two words belong to each ordered pair of ranks. The *head* counts the messages that the sender has published: the sender's
//! stream writes it, the receiver's stream waits for it. The *tail* counts the messages that the receiver is done with: the
//! receiver's stream writes it, and the sender's stream waits for it before it uses their staging memory again. Words only
//! grow, and each has one writer. Both ends count alike, because the k-th send to a peer meets its k-th receive.
//!
//! # Order
//! Operations are in the order of the schedule's steps. Ranks can take those one after the other, and no send waits for its
//! receive. So a program runs to its end on a single queue, in whatever order the other ranks run theirs.
//!
//! # Other hosts
//! A message to a rank of another host goes into pinned memory, and one from there comes through such memory; see
//! [`network`](crate::device::network). So a program knows ranks by their places on their host, except in the [`Traffic`] with
//! other hosts.
//!
//! # Staging
//! A segment uses one half of the staging memory, the next segment the other. No send waits inside a segment: before the stream
//! writes to a half, it waits only for the readers of the segment before the last.

use std::ops::Range;

use crate::algo::{self, Chunking, Collective, Scaling, ScratchLimit, Setting};
use crate::device::halves::Phase;
use crate::device::layout::{Cell, Layout};
use crate::device::network::{Parcel, Traffic};
use crate::schedule::{Action, Schedule, Slice, Space, Step, StepId};
use crate::topo::Topology;
use crate::types::Rank;

/// What a stream does for one segment of a collective, or for a part of one. Values of words are counted from its beginning;
/// see [`counters`](crate::device::counters).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// In the order in which they are submitted.
    pub operations: Vec<DriverCall>,
    /// By peer, the messages that go to it.
    pub sent: Vec<Sent>,
    /// By peer, how many messages come from it.
    pub received: Vec<u32>,
    /// The messages to and from other hosts.
    pub traffic: Traffic,
}

impl Program {
    /// One that does nothing, on a host of so many ranks.
    pub(crate) fn nothing(ranks: usize) -> Program {
        let (sent, received) = (vec![Sent::default(); ranks], vec![0; ranks]);
        Program { operations: Vec::new(), sent, received, traffic: Traffic::default() }
    }

    /// How much memory it takes.
    pub(crate) fn bytes(&self) -> usize {
        let of = |operation: &DriverCall| match operation {
            DriverCall::Words(words) => words.len() * size_of::<WordOperation>(),
            DriverCall::Kernel(Kernel::Fold { others, .. }) => others.len() * size_of::<Location>(),
            DriverCall::Kernel(Kernel::Average { blocks, .. }) => blocks.len() * size_of::<Location>(),
            DriverCall::Copy { .. } | DriverCall::Kernel(_) => 0,
        };
        let operations: usize = self.operations.iter().map(|operation| size_of::<DriverCall>() + of(operation)).sum();
        operations + self.traffic.bytes() + self.sent.len() * (size_of::<Sent>() + size_of::<u32>())
    }
}

/// The messages that a program sends to one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// How many they are.
    pub messages: u32,
    /// How many there are up to the last that lies in staging memory; zero if none does.
    pub staged: u32,
}

/// One call of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriverCall {
    /// Waits for words and writes words, in this order.
    Words(Vec<WordOperation>),
    /// Copies bytes.
    Copy {
        /// From where.
        from: Location,
        /// To where; of the same length.
        into: Location,
    },
    /// Launches a kernel.
    Kernel(Kernel),
}

/// What is done to a word. Numbers count the messages of the pair in this program, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordOperation {
    /// Waits until this message has been published.
    Await {
        /// Its sender.
        from: Rank,
        /// Its number.
        number: u32,
    },
    /// Says that the messages up to this one have been published.
    Publish {
        /// Their receiver.
        to: Rank,
        /// The last one's number.
        number: u32,
    },
    /// Says that this rank is done with the messages up to this one.
    Release {
        /// Their sender.
        from: Rank,
        /// The last one's number.
        number: u32,
    },
    /// Waits until the messages from other hosts up to this one have come.
    AwaitInbound {
        /// Its number among all messages from other hosts.
        number: u32,
    },
    /// Says that the messages to other hosts up to this one are ready.
    PublishOutbound {
        /// Its number among all messages to other hosts.
        number: u32,
    },
    /// Says that this rank is done with the messages from other hosts up to this one.
    ReleaseInbound {
        /// Its number among all messages from other hosts.
        number: u32,
    },
}

/// Where an operation reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// This rank's own memory.
    Own(Slice),
    /// Staging memory of a rank, in the half that the segment uses.
    Staging {
        /// The rank.
        of: Rank,
        /// The first byte.
        offset: usize,
        /// How many bytes.
        bytes: usize,
    },
    /// Pinned memory for messages to other hosts, in the half that the segment uses.
    Outbound {
        /// The first byte.
        offset: usize,
        /// How many bytes.
        bytes: usize,
    },
    /// Pinned memory for messages from other hosts, likewise.
    Inbound {
        /// The first byte.
        offset: usize,
        /// How many bytes.
        bytes: usize,
    },
}

/// A computation of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// A copy of elements as sums, which have another type.
    Widen {
        /// The elements.
        from: Slice,
        /// The sums.
        into: Slice,
    },
    /// `into = block₀ ⊕ block₁ ⊕ …`, rounded once, as [`Action::Fold`]: `into` is the block at `position`, `others` are the
    /// other blocks.
    Fold {
        /// One block, and the result.
        into: Slice,
        /// Its position among the blocks.
        position: u32,
        /// The others, in order.
        others: Vec<Location>,
    },
    /// As [`Action::Scale`].
    Scale {
        /// What is multiplied.
        slice: Slice,
    },
    /// `into = (block₀ + block₁ + …) / world size`, rounded once, as [`Action::Average`].
    Average {
        /// The result.
        into: Slice,
        /// The blocks, in order: elements, or sums of them.
        blocks: Vec<Location>,
    },
}

/// How the input and the output of an operation in place are the same memory: element `input + i` of the one is element
/// `output + i` of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InPlace {
    /// An element of the input.
    pub input: usize,
    /// Its number in the output.
    pub output: usize,
}

impl InPlace {
    fn is_same(self, from: Slice, into: Slice) -> bool {
        (from.space, into.space) == (Space::Input, Space::Output)
            && from.offset + self.output == into.offset + self.input
    }
}

/// The schedules of all ranks for one segment, and where their messages lie.
#[derive(Clone, Debug)]
pub struct Staged {
    element: usize,
    scaling: Scaling,
    topo: Topology,
    schedules: Vec<Schedule>,
    layouts: Vec<Layouts>,
    /// By rank, how many steps its lead has.
    leads: Vec<usize>,
}

/// Where the messages of one rank lie.
#[derive(Clone, Debug)]
struct Layouts {
    /// In staging memory: those to ranks of its host.
    staging: Layout,
    /// In pinned memory: those to other hosts.
    outbound: Layout,
    /// In pinned memory: those from other hosts.
    inbound: Layout,
}

impl Staged {
    /// Plans `collective` for all ranks by the algorithm of this name; nothing if the algorithm cannot do it.
    ///
    /// # Panics
    /// When the collective is an all_to_all: no rank knows the blocks of all ranks.
    pub fn plan(
        algorithm: &str,
        collective: &Collective,
        topo: &Topology,
        element: usize,
        scaling: Scaling,
    ) -> Option<Staged> {
        assert!(!matches!(collective, Collective::AllToAll { .. }), "no rank knows the blocks of all");
        let setting =
            |me| Setting { me, topo, element, scaling, chunking: Chunking::Whole, scratch: ScratchLimit::UNBOUNDED };
        let plan = |me| algo::plan_with(algorithm, collective, setting(me));
        let schedules = (0..topo.size()).map(Rank::from).map(plan).collect::<Option<_>>()?;
        Some(Staged::of_hosts(topo.clone(), schedules, element, scaling))
    }

    /// The schedules of all ranks of one host; an element has so many bytes.
    pub fn new(schedules: Vec<Schedule>, element: usize, scaling: Scaling) -> Staged {
        Staged::of_hosts(Topology::single_host(schedules.len()), schedules, element, scaling)
    }

    fn of_hosts(topo: Topology, schedules: Vec<Schedule>, element: usize, scaling: Scaling) -> Staged {
        let mut staged = Staged { element, scaling, topo, schedules, layouts: Vec::new(), leads: Vec::new() };
        staged.leads = (0..staged.schedules.len()).map(|rank| staged.lead(Rank::from(rank))).collect();
        let layouts = |(me, schedule): (usize, &Schedule)| {
            let bytes = |space| staged.element_bytes(space);
            let is_local = |peer| staged.topo.same_host(Rank::from(me), peer);
            Layouts {
                staging: Layout::of_sends(schedule, bytes, is_local),
                outbound: Layout::of_sends(schedule, bytes, |peer| !is_local(peer)),
                inbound: Layout::of_receives(schedule, bytes, |peer| !is_local(peer)),
            }
        };
        staged.layouts = staged.schedules.iter().enumerate().map(layouts).collect();
        staged
    }

    /// The bytes of staging memory that one rank's messages take, of the rank that needs most.
    pub fn bytes(&self) -> usize {
        self.layouts.iter().map(|layouts| layouts.staging.bytes()).max().unwrap_or(0)
    }

    /// The same for pinned memory, in each direction.
    pub fn network_bytes(&self) -> usize {
        let of = |layouts: &Layouts| layouts.outbound.bytes().max(layouts.inbound.bytes());
        self.layouts.iter().map(of).max().unwrap_or(0)
    }

    /// The schedule of rank `me`.
    pub fn schedule(&self, me: Rank) -> &Schedule {
        &self.schedules[me.index()]
    }

    /// The program of rank `me`, whose operation may be in place.
    pub fn program(&self, me: Rank, in_place: Option<InPlace>) -> Program {
        let mut lowering = Lowering::new(self, me, in_place);
        lowering.take_all(0..self.schedules[me.index()].steps.len());
        lowering.finish()
    }

    /// The same as two programs: the segment's lead and its rest.
    ///
    /// # Panics
    /// When the leads of two ranks of a host do not fit together.
    pub fn parts(&self, me: Rank, in_place: Option<InPlace>) -> [Program; 2] {
        let (lead, all) = (self.leads[me.index()], self.schedules[me.index()].steps.len());
        let mut lowering = Lowering::new(self, me, in_place);
        lowering.led = self
            .schedules
            .iter()
            .zip(&self.leads)
            .map(|(schedule, lead)| messages(&schedule.steps[..*lead], me))
            .collect();
        lowering.begin(Phase::Lead);
        lowering.take_all(0..lead);
        let first = lowering.cut();
        let here = &self.topo.hosts()[self.topo.host_of(me)];
        assert!(
            here.iter().zip(&first.received).all(|(peer, received)| *received == lowering.led[peer.index()]),
            "a message to rank {me} within its host is sent in the lead of `{}`, and received later, or the other way",
            lowering.schedule.name
        );
        lowering.begin(Phase::Rest);
        lowering.take_all(lead..all);
        [first, lowering.finish()]
    }

    /// How many steps the lead of a rank has: its inward steps, and what follows up to the first that receives anything, or that
    /// sends to a rank of its host, which may receive it in its rest.
    fn lead(&self, me: Rank) -> usize {
        let Schedule { steps, inward, .. } = &self.schedules[me.index()];
        let inward = *inward as usize;
        let ends = |action: Action| match action {
            Action::Send { to, .. } => self.topo.same_host(me, to),
            Action::Recv { .. } | Action::RecvReduce { .. } => true,
            _ => false,
        };
        let more = steps[inward..].iter().position(|step| ends(step.action));
        more.map_or(steps.len(), |more| inward + more)
    }

    fn element_bytes(&self, space: Space) -> usize {
        self.scaling.bytes_in(space, self.element)
    }

    /// The cells of the messages from `sender` to `receiver`, in order; nothing for messages without data.
    fn cells(&self, sender: Rank, receiver: Rank) -> Vec<Option<Cell>> {
        let (schedule, layout) = (&self.schedules[sender.index()], &self.layouts[sender.index()].staging);
        let sends = schedule.steps.iter().enumerate();
        let to_receiver = |action| matches!(action, Action::Send { to, .. } if to == receiver);
        sends.filter(|(_, step)| to_receiver(step.action)).map(|(id, _)| layout.cell(id as StepId)).collect()
    }
}

/// How many of the steps send to `to`.
fn messages(steps: &[Step], to: Rank) -> u32 {
    let sends = |step: &&Step| matches!(step.action, Action::Send { to: peer, .. } if peer == to);
    steps.iter().filter(sends).count() as u32
}

/// A received block that is not copied, but read where it lies.
#[derive(Clone, Copy, Debug)]
struct Alias {
    slice: Slice,
    cell: Location,
}

/// A program being written.
struct Lowering<'a> {
    staged: &'a Staged,
    me: Rank,
    /// The place of this rank on its host.
    seat: Rank,
    in_place: Option<InPlace>,
    schedule: &'a Schedule,
    /// By sender of this host, the cells of its messages to this rank that are to come.
    cells: Vec<std::vec::IntoIter<Option<Cell>>>,
    /// By sender, how many of its messages to this rank are sent in a lead and are to come.
    led: Vec<u32>,
    aliases: Vec<Alias>,
    program: Program,
    /// The operations on words that are being collected.
    words: Vec<WordOperation>,
    /// Copies of short messages, which follow the collected waits for these messages.
    copies: Vec<DriverCall>,
    /// By sender, the last message that has to be released.
    consumed: Vec<u32>,
}

impl<'a> Lowering<'a> {
    fn new(staged: &'a Staged, me: Rank, in_place: Option<InPlace>) -> Lowering<'a> {
        let here = &staged.topo.hosts()[staged.topo.host_of(me)];
        let size = here.len();
        Lowering {
            staged,
            me,
            seat: staged.topo.seat(me),
            in_place,
            schedule: &staged.schedules[me.index()],
            cells: here.iter().map(|sender| staged.cells(*sender, me).into_iter()).collect(),
            led: vec![0; staged.schedules.len()],
            aliases: Vec::new(),
            program: Program::nothing(size),
            words: Vec::new(),
            copies: Vec::new(),
            consumed: vec![0; size],
        }
    }

    /// Begins with a part of the segment.
    fn begin(&mut self, phase: Phase) {
        self.program.traffic.phase = phase;
    }

    fn take_all(&mut self, steps: Range<usize>) {
        for step in steps {
            self.take(step as StepId, self.schedule.steps[step].action);
        }
    }

    fn take(&mut self, step: StepId, action: Action) {
        if let (_, Some(written)) = action.touches() {
            self.aliases.retain(|alias| !alias.slice.overlaps(written));
        }
        match action {
            Action::Send { to, from } => self.send(step, to, from),
            Action::Recv { from, into } => {
                let Some(cell) = self.receive(step, from) else { return };
                if self.stays_in_staging(step, into) {
                    self.aliases.push(Alias { slice: into, cell });
                    return;
                }
                let copy = DriverCall::Copy { from: cell, into: Location::Own(into) };
                self.copies.push(copy);
                if into.len * self.staged.element_bytes(into.space) > SHORT_BYTES {
                    self.flush();
                }
            }
            Action::RecvReduce { from, into } => {
                if let Some(cell) = self.receive(step, from) {
                    self.compute(Kernel::Fold { into, position: 0, others: vec![cell] });
                }
            }
            Action::Copy { .. } | Action::CopyBlocks { .. } => {
                action.copies().for_each(|(from, into)| self.copy(from, into));
            }
            Action::Reduce { from, into } => {
                let others = self.blocks(from, into.len);
                self.compute(Kernel::Fold { into, position: 0, others });
            }
            Action::Fold { from, into, position } => {
                let others = self.blocks(from, into.len);
                self.compute(Kernel::Fold { into, position, others });
            }
            Action::Scale { slice } => self.compute(Kernel::Scale { slice }),
            Action::Await { .. } => unreachable!("no program has islands"),
            Action::Average { from, into } => {
                let blocks = self.blocks(from, into.len);
                self.compute(Kernel::Average { into, blocks });
            }
        }
    }

    /// Copies a message to its cell, and publishes it together with the messages sent right before and after.
    fn send(&mut self, step: StepId, to: Rank, from: Slice) {
        let waits =
            |word: &WordOperation| matches!(word, WordOperation::Await { .. } | WordOperation::AwaitInbound { .. });
        if self.words.iter().any(waits) {
            self.flush();
        }
        if !self.staged.topo.same_host(self.me, to) {
            return self.send_away(step, to, from);
        }
        let to = self.staged.topo.seat(to);
        let sent = &mut self.program.sent[to.index()];
        sent.messages += 1;
        let number = sent.messages;
        if let Some(cell) = self.staged.layouts[self.me.index()].staging.cell(step) {
            sent.staged = number;
            if !cell.is_shared {
                let into = Location::Staging { of: self.seat, offset: cell.offset, bytes: cell.bytes };
                self.push(DriverCall::Copy { from: Location::Own(from), into });
            }
        }
        let earlier =
            |word: &&mut WordOperation| matches!(word, WordOperation::Publish { to: peer, .. } if *peer == to);
        match self.words.iter_mut().find(earlier) {
            Some(WordOperation::Publish { number: last, .. }) => *last = number,
            _ => self.words.push(WordOperation::Publish { to, number }),
        }
    }

    /// The same for a receiver on another host.
    fn send_away(&mut self, step: StepId, to: Rank, from: Slice) {
        let cell = self.staged.layouts[self.me.index()].outbound.cell(step);
        let Cell { offset, bytes, is_shared } = cell.unwrap_or(Cell { offset: 0, bytes: 0, is_shared: true });
        let is_led = self.program.traffic.phase == Phase::Lead;
        self.program.traffic.outbound.push(Parcel { peer: to, offset, bytes, is_led });
        let number = self.program.traffic.outbound.len() as u32;
        if !is_shared {
            self.push(DriverCall::Copy { from: Location::Own(from), into: Location::Outbound { offset, bytes } });
        }
        let earlier = |word: &&mut WordOperation| matches!(word, WordOperation::PublishOutbound { .. });
        match self.words.iter_mut().find(earlier) {
            Some(WordOperation::PublishOutbound { number: last }) => *last = number,
            _ => self.words.push(WordOperation::PublishOutbound { number }),
        }
    }

    /// Waits for the message that `step` receives. Returns where its data lies, if it has any.
    fn receive(&mut self, step: StepId, from: Rank) -> Option<Location> {
        if !self.staged.topo.same_host(self.me, from) {
            let cell = self.staged.layouts[self.me.index()].inbound.cell(step);
            let (offset, bytes) = cell.map_or((0, 0), |cell| (cell.offset, cell.bytes));
            let is_led = self.led[from.index()] > 0;
            self.led[from.index()] -= u32::from(is_led);
            self.program.traffic.inbound.push(Parcel { peer: from, offset, bytes, is_led });
            let number = self.program.traffic.inbound.len() as u32;
            match self.words.last_mut() {
                Some(WordOperation::AwaitInbound { number: last }) => *last = number,
                _ => self.words.push(WordOperation::AwaitInbound { number }),
            }
            return cell.map(|_| Location::Inbound { offset, bytes });
        }
        let from = self.staged.topo.seat(from);
        let received = &mut self.program.received[from.index()];
        let cell = self.cells[from.index()].next().expect("a send for every receive");
        *received += 1;
        let number = *received;
        self.words.push(WordOperation::Await { from, number });
        let Cell { offset, bytes, .. } = cell?;
        self.consumed[from.index()] = number;
        Some(Location::Staging { of: from, offset, bytes })
    }

    /// Whether the message that `step` receives is read once, as a whole block of a reduction, and so need not be copied.
    fn stays_in_staging(&self, step: StepId, into: Slice) -> bool {
        if !matches!(into.space, Space::Scratch | Space::Sums) {
            return false;
        }
        let later = self.schedule.steps[step as usize + 1..].iter().map(|step| step.action);
        let touches = |action: &Action| {
            let (read, written) = action.touches();
            [read, written].into_iter().flatten().any(|slice| slice.overlaps(into))
        };
        let mut uses = later.filter(touches);
        let Some(first) = uses.next() else { return false };
        let (from, len) = match first {
            Action::Reduce { from, into } | Action::Fold { from, into, .. } | Action::Average { from, into } => {
                (from, into.len)
            }
            _ => return false,
        };
        let is_block = into.len == len && from.contains(into) && (into.offset - from.offset).is_multiple_of(len);
        let is_written = first.touches().1.is_some_and(|written| written.overlaps(into));
        let is_read_once = match uses.next() {
            None => true,
            // A later message goes into the same memory.
            Some(Action::Recv { into: again, .. }) => again.contains(into),
            Some(_) => false,
        };
        is_block && !is_written && is_read_once
    }

    /// The blocks of `len` elements that `from` consists of, and where they are.
    fn blocks(&mut self, from: Slice, len: usize) -> Vec<Location> {
        let blocks = (0..from.len.checked_div(len).unwrap_or(0)).map(|index| from.part(index * len, len));
        // Each is read once.
        let mut find = |block: Slice| {
            let place = self.aliases.iter().rposition(|alias| alias.slice == block)?;
            Some(self.aliases.remove(place).cell)
        };
        blocks.map(|block| find(block).unwrap_or(Location::Own(block))).collect()
    }

    /// A copy within this rank's memory, unless that is of nothing or in place.
    fn copy(&mut self, from: Slice, into: Slice) {
        if from.len > 0 && from != into && !self.in_place.is_some_and(|same| same.is_same(from, into)) {
            let is_widened = into.space == Space::Sums && from.space != Space::Sums;
            self.flush();
            self.push(match is_widened {
                true => DriverCall::Kernel(Kernel::Widen { from, into }),
                false => DriverCall::Copy { from: Location::Own(from), into: Location::Own(into) },
            });
        }
    }

    fn compute(&mut self, kernel: Kernel) {
        let len = match &kernel {
            Kernel::Widen { into, .. } | Kernel::Fold { into, .. } | Kernel::Average { into, .. } => into.len,
            Kernel::Scale { slice } => slice.len,
        };
        if len > 0 {
            self.flush();
            self.push(DriverCall::Kernel(kernel));
        }
    }

    /// Appends an operation; a copy that continues the one before it becomes a part of that.
    fn push(&mut self, operation: DriverCall) {
        if let (Some(DriverCall::Copy { from, into }), DriverCall::Copy { from: next, into: target }) =
            (self.program.operations.last_mut(), &operation)
            && let (Some(joined), Some(joined_target)) = (from.joined(*next), into.joined(*target))
        {
            (*from, *into) = (joined, joined_target);
            return;
        }
        self.program.operations.push(operation);
    }

    /// Appends the collected operations on words, and the copies that wait for them.
    fn flush(&mut self) {
        if !self.words.is_empty() {
            self.program.operations.push(DriverCall::Words(std::mem::take(&mut self.words)));
        }
        for copy in std::mem::take(&mut self.copies) {
            self.push(copy);
        }
    }

    /// Ends the program so far: nothing that follows reads what its messages have brought.
    fn cut(&mut self) -> Program {
        self.flush();
        for Alias { slice, cell } in std::mem::take(&mut self.aliases) {
            self.push(DriverCall::Copy { from: cell, into: Location::Own(slice) });
        }
        self.end()
    }

    fn finish(mut self) -> Program {
        self.flush();
        self.end()
    }

    /// Gives back what the program's messages lie in, and takes the program away.
    fn end(&mut self) -> Program {
        let releases = self.consumed.iter_mut().map(std::mem::take).enumerate().filter(|(_, number)| *number > 0);
        let releases = releases.map(|(from, number)| WordOperation::Release { from: Rank::from(from), number });
        let inbound = self.program.traffic.inbound.len() as u32;
        self.words =
            releases.chain((inbound > 0).then_some(WordOperation::ReleaseInbound { number: inbound })).collect();
        self.flush();
        let size = self.consumed.len();
        std::mem::replace(&mut self.program, Program::nothing(size))
    }
}

impl Location {
    /// This and the memory behind it, if `next` begins where this ends.
    fn joined(self, next: Location) -> Option<Location> {
        match (self, next) {
            (Location::Own(slice), Location::Own(next)) if slice.is_followed_by(next) => {
                Some(Location::Own(Slice { len: slice.len + next.len, ..slice }))
            }
            (Location::Staging { of, offset, bytes }, Location::Staging { of: next_of, offset: next, bytes: more })
                if of == next_of && offset + bytes == next =>
            {
                Some(Location::Staging { of, offset, bytes: bytes + more })
            }
            (Location::Outbound { offset, bytes }, Location::Outbound { offset: next, bytes: more })
                if offset + bytes == next =>
            {
                Some(Location::Outbound { offset, bytes: bytes + more })
            }
            (Location::Inbound { offset, bytes }, Location::Inbound { offset: next, bytes: more })
                if offset + bytes == next =>
            {
                Some(Location::Inbound { offset, bytes: bytes + more })
            }
            _ => None,
        }
    }
}

/// Messages up to this size are copied together, once all that are waited for have come.
const SHORT_BYTES: usize = 64 * 1024;
