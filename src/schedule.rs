//! Schedules: a collective as data, the steps of one rank and their dependencies.
//!
//! Offsets and lengths count elements. The spaces `Input` and `Output` are the operation's tensors laid end to end;
//! `Scratch` and `Sums` are memory that the engine lends for the operation; `Parts` is memory of all ranks.
//!
//! ```
//! use ncclx_rs::schedule::{Action, Builder, Slice, Space};
//! use ncclx_rs::Rank;
//! let all = Slice::new(Space::Output, 0, 8);
//! let mut builder = Builder::new("example");
//! builder.push(Action::RecvReduce { from: Rank(1), into: all });
//! builder.push(Action::Send { to: Rank(2), from: all });
//! let schedule = builder.finish();
//! assert_eq!(schedule.steps[1].after.as_slice(), [0]); // it sends what the step before received
//! ```

use smallvec::SmallVec;

use crate::types::Rank;

mod action;
mod frame;
mod slice;
mod uses;

pub use action::Action;
pub(crate) use frame::{Frame, Run};
pub use slice::{Slice, Space, StepId};
use uses::{After, Uses};

/// An action and the earlier steps that it must wait for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What is done.
    pub action: Action,
    /// The steps that must be complete before, ascending. Each has a smaller id, so no cycle is possible. Most indirect
    /// dependencies are left out.
    pub after: SmallVec<[StepId; 4]>,
}

/// All steps of one rank in one collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The algorithm, for traces and tests.
    pub name: &'static str,
    /// The steps in an order that satisfies their dependencies.
    pub steps: Vec<Step>,
    /// Elements of scratch memory needed.
    pub scratch: usize,
    /// Elements of memory for sums needed.
    pub sums: usize,
    /// The steps before this one only prepare what goes to other hosts: see [`Builder::outward`].
    pub inward: StepId,
    /// How many of the first steps send empty messages that only tell what this rank has called, and how many of the last ones
    /// receive such messages. Neither holds the collective up.
    pub words: (usize, usize),
}

/// Writes a schedule in program order and derives the dependencies from the memory that the steps touch.
///
/// Ranks try the steps in this order first, so a send that does not depend on a receive must come before it.
#[derive(Debug)]
pub struct Builder {
    name: &'static str,
    steps: Vec<Step>,
    scratch: usize,
    sums: usize,
    /// Where the memory of what is appended is, while that is a piece of a collective.
    frame: Option<Frame>,
    /// How much of `scratch` and `sums` the first piece has reserved.
    piece: (usize, usize),
    /// The memory that the steps after the fence use.
    uses: Uses,
    /// Steps before this one are waited for by every later step.
    fence: Option<StepId>,
    fence_pending: bool,
    inward: StepId,
    words: (usize, usize),
}

impl Builder {
    /// An empty schedule of the algorithm `name`.
    pub fn new(name: &'static str) -> Self {
        Builder {
            name,
            steps: Vec::new(),
            scratch: 0,
            sums: 0,
            frame: None,
            piece: (0, 0),
            uses: Uses::default(),
            fence: None,
            fence_pending: false,
            inward: 0,
            words: (0, 0),
        }
    }

    /// Reserves `len` elements of scratch memory.
    ///
    /// # Panics
    /// When a `usize` cannot hold the number of all that are reserved.
    pub fn scratch(&mut self, len: usize) -> Slice {
        Builder::reserve(Space::Scratch, &mut self.scratch, len)
    }

    /// Reserves memory for `len` sums.
    ///
    /// # Panics
    /// As [`Builder::scratch`].
    pub fn sums(&mut self, len: usize) -> Slice {
        Builder::reserve(Space::Sums, &mut self.sums, len)
    }

    /// Reserves memory for `len` elements of the type of the elements of `like`.
    ///
    /// # Panics
    /// As [`Builder::scratch`].
    pub fn beside(&mut self, like: Slice, len: usize) -> Slice {
        match like.space {
            Space::Sums => self.sums(len),
            Space::Input | Space::Output | Space::Scratch | Space::Parts => self.scratch(len),
        }
    }

    fn reserve(space: Space, reserved: &mut usize, len: usize) -> Slice {
        let slice = Slice::new(space, *reserved, len);
        *reserved = reserved.checked_add(len).expect("no more scratch memory than there can be");
        slice
    }

    /// Appends what `write` does for a piece of a collective, whose memory is where `frame` says. Every other piece reserves
    /// the same memory.
    pub(crate) fn within(&mut self, frame: Frame, write: impl FnOnce(&mut Builder)) {
        let (all, index) = ((self.scratch, self.sums), frame.index());
        (self.scratch, self.sums) = if index % 2 == 0 { (0, 0) } else { self.piece };
        self.frame = Some(frame);
        write(self);
        self.frame = None;
        if index == 0 {
            self.piece = (self.scratch, self.sums);
        }
        (self.scratch, self.sums) = (self.scratch.max(all.0), self.sums.max(all.1));
        // Each piece has such steps of its own.
        self.inward = 0;
    }

    /// Appends a step. It waits for every earlier step that wrote memory that it uses, or read memory that it writes.
    pub fn push(&mut self, action: Action) -> StepId {
        let Some(frame) = &self.frame else { return self.append(action) };
        let placed = frame.placed(action);
        placed.into_iter().map(|action| self.append(action)).last().expect("an action is one at least")
    }

    fn append(&mut self, action: Action) -> StepId {
        let id = self.steps.len() as StepId;
        let mut after: After = self.fence.into_iter().collect();
        if self.fence_pending {
            self.fence_pending = false;
            after = (self.fence.unwrap_or(0)..id).collect();
            self.fence = Some(id);
            self.uses.clear();
        } else {
            let (read, write) = action.touches();
            self.uses.add(id, read, write, &mut after);
        }
        self.steps.push(Step { action, after });
        id
    }

    /// Appends a step that waits for an earlier one as well, with which it shares no memory of this rank: one that writes what
    /// another rank has said may be written, or says that it is written.
    pub fn push_after(&mut self, earlier: StepId, action: Action) -> StepId {
        let id = self.push(action);
        let after = &mut self.steps[id as usize].after;
        if let Err(place) = after.binary_search(&earlier) {
            after.insert(place, earlier);
        }
        id
    }

    /// Makes the next step wait for all before it, and all later steps wait for the next step.
    pub fn barrier(&mut self) {
        self.fence_pending = !self.steps.is_empty();
    }

    /// Says that the steps so far are what the ranks of each host do among themselves, before anything of another host is waited
    /// for. No message within a host may be sent before and received after. It orders nothing: what runs long collectives in
    /// segments may do these steps of the next segment first.
    pub fn outward(&mut self) {
        self.inward = self.steps.len() as StepId;
    }

    /// Puts steps that need no memory and wait for nothing before all others. What their messages tell is waited for at the end, so
    /// the schedule has no [inward](Builder::outward) steps any more.
    pub(crate) fn put_first(&mut self, actions: impl Iterator<Item = Action>) {
        let first: Vec<Step> = actions.map(|action| Step { action, after: SmallVec::new() }).collect();
        let later = first.len() as StepId;
        for id in self.steps.iter_mut().flat_map(|step| &mut step.after).chain(&mut self.fence) {
            *id += later;
        }
        self.uses.shift(later);
        self.steps.splice(..0, first);
        self.inward = 0;
    }

    /// Says that the first so many steps, and as many of the last ones, only tell what was called: no rank waits for them.
    pub(crate) fn runs_ahead(&mut self, first: usize, last: usize) {
        debug_assert!(
            self.fence.is_none() && !self.fence_pending,
            "a step that waits for all would wait for words too"
        );
        self.words = (first, last);
    }

    /// Whether a step so far sends or receives data.
    pub(crate) fn moves_data(&self) -> bool {
        self.steps.iter().any(|step| match step.action {
            Action::Send { from: slice, .. } | Action::Recv { into: slice, .. } => slice.len > 0,
            Action::RecvReduce { into, .. } => into.len > 0,
            _ => false,
        })
    }

    /// Whether a step so far sends to `rank`.
    pub(crate) fn sends_to(&self, rank: Rank) -> bool {
        self.steps.iter().any(|step| matches!(step.action, Action::Send { to, .. } if to == rank))
    }

    /// Whether a step so far receives from `rank`.
    pub(crate) fn receives_from(&self, rank: Rank) -> bool {
        let receives = |action| match action {
            Action::Recv { from, .. } | Action::RecvReduce { from, .. } => from == rank,
            _ => false,
        };
        self.steps.iter().any(|step| receives(step.action))
    }

    /// The finished schedule.
    pub fn finish(self) -> Schedule {
        let Builder { name, steps, scratch, sums, inward, words, .. } = self;
        Schedule { name, steps, scratch, sums, inward, words }
    }
}

/// Why schedules of different ranks do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("message {index} from rank {from} to rank {to}: {what}")]
pub struct Mismatch {
    /// The sending rank.
    pub from: Rank,
    /// The receiving rank.
    pub to: Rank,
    /// Its position among the messages from one to the other.
    pub index: usize,
    /// What is wrong with it.
    pub what: String,
}

/// Checks that every send of every rank matches a receive of the same length at its peer, and every receive a send.
pub fn check(all_ranks: &[Schedule]) -> Result<(), Mismatch> {
    let size = all_ranks.len();
    let mut sends = vec![Vec::new(); size * size];
    let mut recvs = vec![Vec::new(); size * size];
    for (me, schedule) in all_ranks.iter().enumerate() {
        for step in &schedule.steps {
            match step.action {
                Action::Send { to, from } => sends[me * size + to.index()].push(from.len),
                Action::Recv { from, into } | Action::RecvReduce { from, into } => {
                    recvs[from.index() * size + me].push(into.len);
                }
                _ => {}
            }
        }
    }
    for (pair, (sent, received)) in sends.iter().zip(&recvs).enumerate() {
        let differs = sent.iter().zip(received).position(|(a, b)| a != b);
        let index = match differs {
            Some(index) => index,
            None if sent.len() == received.len() => continue,
            None => sent.len().min(received.len()),
        };
        let length = |list: &[usize]| list.get(index).map_or("nothing".to_owned(), |len| format!("{len} elements"));
        return Err(Mismatch {
            from: Rank::from(pair / size),
            to: Rank::from(pair % size),
            index,
            what: format!("{} sent, {} expected", length(sent), length(received)),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
