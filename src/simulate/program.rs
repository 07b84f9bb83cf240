//! The schedules of all ranks, or other lists of what they do, as compact as an event needs them.

use super::error::{MAX_STEPS, SimulateError};
use super::time::Time;
use super::world::World;
use crate::schedule::{Action, Schedule, Slice, Space, StepId};
use crate::types::Rank;

/// The number of a step among those of all ranks.
pub(super) type StepNumber = u32;

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Sends its bytes to the peer.
    Send,
    /// Receives its bytes from the peer.
    Receive,
    /// Receives, and combines what comes.
    ReceiveReduce,
    /// Combines its bytes with others.
    Reduce,
    /// Copies its bytes.
    Copy,
    /// Works for as many femtoseconds as it has bytes.
    Work,
    /// Nothing: a copy of memory onto itself.
    Nothing,
}

/// A step. The receive that a send meets is found by the sender and `sequence`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) bytes: u64,
    pub(super) peer: u32,
    /// How many messages to the same peer stand before it in the schedule.
    pub(super) sequence: u32,
    pub(super) kind: Kind,
    /// It belongs to a collective, whose long messages wait for their receivers.
    pub(super) may_wait: bool,
}

/// What a rank does that runs no schedule of a collective.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    /// Sends a message.
    Send { to: Rank, bytes: u64 },
    /// Receives the next message of that rank.
    Receive { from: Rank, bytes: u64 },
    /// Needs its processor.
    Work(Time),
}

/// The tasks of a rank, each with those that it waits for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tasks(Vec<(Task, Vec<StepId>)>);

impl Tasks {
    /// Adds a task. Messages between two ranks have the order in which their tasks are added.
    pub(crate) fn push(&mut self, task: Task, after: impl Into<Vec<StepId>>) -> StepId {
        self.0.push((task, after.into()));
        (self.0.len() - 1) as StepId
    }

    /// The bytes that it receives, and those that it sends.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> (u64, u64) {
        self.0.iter().fold((0, 0), |(received, sent), (task, _)| match task {
            Task::Receive { bytes, .. } => (received + bytes, sent),
            Task::Send { bytes, .. } => (received, sent + bytes),
            Task::Work(_) => (received, sent),
        })
    }
}

/// Whether the input of a collective is its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placement {
    /// It is, as in PyTorch's all_reduce, reduce and broadcast.
    InPlace,
    /// It lies elsewhere.
    Apart,
}

/// What ranks and hosts send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Messages, also those without content.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Traffic {
    fn add(&mut self, bytes: u64) {
        self.messages += 1;
        self.bytes += bytes;
    }
}

/// The schedules of the ranks so far.
#[derive(Debug)]
pub(super) struct Program<'a> {
    world: &'a World,
    pub(super) steps: Vec<Step>,
    /// For each rank, its first step; then the end.
    first: Vec<StepNumber>,
    /// How many steps each step waits for.
    pub(super) waits_for: Vec<u32>,
    /// For each step, the first of its `dependents`; then the end.
    first_dependent: Vec<u32>,
    dependents: Vec<StepNumber>,
    /// For each rank, its receives by sender and in order: the sender, the step. They begin where `first_receive` says.
    receives: Vec<(u32, StepNumber)>,
    first_receive: Vec<u32>,
    /// What each rank sends.
    pub(super) sent: Vec<Traffic>,
    /// What the ranks of each host send to other hosts.
    pub(super) sent_by_hosts: Vec<Traffic>,
}

impl<'a> Program<'a> {
    /// No steps, in this world.
    pub(super) fn new(world: &'a World) -> Self {
        Program {
            world,
            steps: Vec::new(),
            first: vec![0],
            waits_for: Vec::new(),
            first_dependent: vec![0],
            dependents: Vec::new(),
            receives: Vec::new(),
            first_receive: vec![0],
            sent: Vec::with_capacity(world.ranks()),
            sent_by_hosts: vec![Traffic::default(); world.hosts()],
        }
    }

    /// The steps of a rank.
    pub(super) fn of_rank(&self, rank: u32) -> std::ops::Range<StepNumber> {
        self.first[rank as usize]..self.first[rank as usize + 1]
    }

    /// The steps of the same rank that wait for this one.
    pub(super) fn dependents(&self, step: StepNumber) -> &[StepNumber] {
        let bounds = [step as usize, step as usize + 1].map(|at| self.first_dependent[at] as usize);
        &self.dependents[bounds[0]..bounds[1]]
    }

    /// The receive that a send of `from` meets.
    ///
    /// # Panics
    /// When there is none: the schedules do not fit together.
    pub(super) fn receive_of(&self, from: u32, send: &Step) -> StepNumber {
        let peer = send.peer as usize;
        let receives = &self.receives[self.first_receive[peer] as usize..self.first_receive[peer + 1] as usize];
        let first = receives.partition_point(|(sender, _)| *sender < from);
        let (sender, step) = receives[first + send.sequence as usize];
        let fits = sender == from && self.steps[step as usize].bytes == send.bytes;
        assert!(fits, "a send of rank {from} to rank {peer} meets no receive of its length");
        step
    }

    /// Adds the schedule of the next rank, whose elements have so many bytes.
    pub(super) fn add(
        &mut self,
        schedule: &Schedule,
        element: usize,
        placement: Placement,
    ) -> Result<(), SimulateError> {
        let mut sends = Sends::default();
        let steps = schedule.steps.iter().map(|step| {
            (compact(&step.action, element as u64, placement, |to| sends.count(to)), step.after.as_slice())
        });
        self.add_steps(&steps.collect::<Vec<_>>())
    }

    /// Adds the tasks of the next rank.
    pub(super) fn add_tasks(&mut self, tasks: &Tasks) -> Result<(), SimulateError> {
        let mut sends = Sends::default();
        let steps = tasks.0.iter().map(|(task, after)| {
            let step =
                |kind, bytes, peer: Rank, sequence| Step { bytes, peer: peer.0, sequence, kind, may_wait: false };
            let step = match *task {
                Task::Send { to, bytes } => step(Kind::Send, bytes, to, sends.count(to)),
                Task::Receive { from, bytes } => step(Kind::Receive, bytes, from, 0),
                Task::Work(time) => step(Kind::Work, time.in_femtoseconds(), Rank(0), 0),
            };
            (step, after.as_slice())
        });
        self.add_steps(&steps.collect::<Vec<_>>())
    }

    /// Adds the steps of the next rank, each with those that it waits for.
    fn add_steps(&mut self, added: &[(Step, &[StepId])]) -> Result<(), SimulateError> {
        let before = self.steps.len() as StepNumber;
        let edges: usize = added.iter().map(|(_, after)| after.len()).sum();
        let steps = (self.steps.len() + added.len()) as u64;
        // Edges are few a step; what keeps them countable keeps them from filling memory, too.
        if steps > MAX_STEPS || (self.dependents.len() + edges) as u64 > 4 * MAX_STEPS {
            return Err(SimulateError::Steps { steps, ranks: self.world.ranks() });
        }
        let rank = self.sent.len() as u32;
        self.sent.push(Traffic::default());
        for ((step, _), number) in added.iter().zip(before..) {
            match step.kind {
                Kind::Send => self.count(rank, step),
                Kind::Receive | Kind::ReceiveReduce => self.receives.push((step.peer, number)),
                Kind::Reduce | Kind::Copy | Kind::Work | Kind::Nothing => {}
            }
            self.steps.push(*step);
        }
        self.first.push(self.steps.len() as StepNumber);
        // By step within a sender, since numbers ascend.
        self.receives[self.first_receive[rank as usize] as usize..].sort_unstable();
        self.first_receive.push(self.receives.len() as u32);
        self.link(added, before, edges);
        Ok(())
    }

    fn count(&mut self, rank: u32, send: &Step) {
        self.sent[rank as usize].add(send.bytes);
        let host = self.world.host_of(rank);
        if host != self.world.host_of(send.peer) {
            self.sent_by_hosts[host].add(send.bytes);
        }
    }

    /// Notes for each new step who waits for it.
    fn link(&mut self, added: &[(Step, &[StepId])], before: StepNumber, edges: usize) {
        let base = self.dependents.len() as u32;
        let mut ends = vec![0u32; added.len()];
        for (_, after) in added {
            self.waits_for.push(after.len() as u32);
            after.iter().for_each(|id| ends[*id as usize] += 1);
        }
        // From numbers to beginnings, which become ends as dependents are put in place.
        let mut end = base;
        for count in &mut ends {
            (*count, end) = (end, end + *count);
        }
        self.dependents.resize(base as usize + edges, 0);
        for ((_, after), number) in added.iter().zip(before..) {
            for id in *after {
                let end = &mut ends[*id as usize];
                self.dependents[*end as usize] = number;
                *end += 1;
            }
        }
        self.first_dependent.extend(ends);
    }
}

/// How many messages a rank has sent to each other one so far. Most ranks send to few.
#[derive(Default)]
struct Sends(rustc_hash::FxHashMap<u32, u32>);

impl Sends {
    /// Counts one more; returns how many stood before it.
    fn count(&mut self, to: Rank) -> u32 {
        let sequence = self.0.entry(to.0).or_default();
        *sequence += 1;
        *sequence - 1
    }
}

fn compact(action: &Action, element: u64, placement: Placement, sequence: impl FnOnce(Rank) -> u32) -> Step {
    let step = |kind, slice: Slice, peer: Rank, sequence| Step {
        kind,
        bytes: slice.len as u64 * element,
        peer: peer.0,
        sequence,
        may_wait: true,
    };
    let local = |kind, slice| step(kind, slice, Rank(0), 0);
    match *action {
        Action::Send { to, from } => step(Kind::Send, from, to, sequence(to)),
        Action::Recv { from, into } => step(Kind::Receive, into, from, 0),
        Action::RecvReduce { from, into } => step(Kind::ReceiveReduce, into, from, 0),
        Action::Copy { from, into } => {
            let is_in_place = placement == Placement::InPlace
                && (from.space, into.space) == (Space::Input, Space::Output)
                && from.offset == into.offset;
            local(if is_in_place || from == into { Kind::Nothing } else { Kind::Copy }, from)
        }
        Action::CopyBlocks { from, into, .. } => local(Kind::Copy, if from.len < into.len { from } else { into }),
        Action::Reduce { from, .. } | Action::Fold { from, .. } | Action::Average { from, .. } => {
            local(Kind::Reduce, from)
        }
        Action::Scale { slice } => local(Kind::Reduce, slice),
        Action::Await { slice, .. } => local(Kind::Nothing, slice),
    }
}
