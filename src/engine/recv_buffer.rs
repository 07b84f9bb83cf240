//! Where the bytes of a message go: into its operation's memory, onto the heap until they are wanted, or nowhere.

use std::time::Instant;

use crate::engine::completion::Completion;
use crate::engine::reduce::{self, Operands};
use crate::engine::region::Region;
use crate::sys::team::Team;

/// What happens to received elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RecvAction {
    /// They replace what is there.
    Store,
    /// They are combined with what is there.
    Reduce(Operands),
}

/// Where a message goes.
#[derive(Debug)]
pub(crate) struct RecvBuffer {
    pub(crate) region: Region,
    pub(crate) action: RecvAction,
    pub(crate) completion: Completion,
    /// Bytes that have come.
    pub(crate) received: usize,
    /// Of a message for which there are two ways, which is long: others are not to carry more for it.
    pub(crate) timed: Option<Box<Timed>>,
}

/// What a message is measured by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timed {
    /// When it could come.
    pub(crate) since: Instant,
    /// How much its operation moves.
    pub(crate) operation_bytes: usize,
    /// Whether other ranks choose for theirs what this one does.
    pub(crate) is_in_step: bool,
    /// The number of the sample that it belongs to.
    pub(crate) sample: u64,
}

impl RecvBuffer {
    /// One into which nothing has come.
    pub(crate) fn new(region: Region, action: RecvAction, completion: Completion) -> RecvBuffer {
        RecvBuffer { region, action, completion, received: 0, timed: None }
    }

    /// Whether the whole message has come.
    pub(crate) fn is_full(&self) -> bool {
        self.received == self.region.len()
    }

    /// Whether this can take the next `len` bytes: some, unless the message is empty, no more than are missing, and whole elements
    /// to be combined.
    pub(crate) fn fits(&self, len: usize) -> bool {
        let element = match self.action {
            RecvAction::Store => 1,
            RecvAction::Reduce(operands) => operands.size(),
        };
        let is_some = len > 0 || self.region.len() == 0;
        is_some && len <= self.region.len() - self.received && len.is_multiple_of(element)
    }

    /// Takes bytes that have come, as many as make whole elements; returns how many.
    pub(crate) fn take(&mut self, bytes: &[u8]) -> usize {
        self.take_by(Team::ALONE, bytes)
    }

    /// The same, where a team combines elements.
    pub(crate) fn take_by(&mut self, team: Team, bytes: &[u8]) -> usize {
        match self.action {
            RecvAction::Store => {
                self.region.write(self.received, bytes);
                self.received += bytes.len();
                bytes.len()
            }
            RecvAction::Reduce(operands) => {
                let mut done = 0;
                let whole = bytes.len() - bytes.len() % operands.size();
                while done < whole {
                    let run = self.region.run_mut(self.received);
                    let take = run.len().min(whole - done);
                    let (run, from) = (&mut run[..take], &bytes[done..done + take]);
                    let element = operands.size();
                    team.spread((run, element), (&[from], element), |run, from| {
                        reduce::combine(operands, run, from[0])
                    });
                    done += take;
                    self.received += take;
                }
                whole
            }
        }
    }
}

/// Where a frame's payload goes.
#[derive(Debug)]
pub(crate) enum Sink {
    Buffer(RecvBuffer),
    /// Kept until an operation wants it.
    Heap(Vec<u8>),
    /// Read and forgotten: its operation is over.
    Discard,
}

impl Sink {
    /// Takes a whole payload.
    pub(crate) fn take(&mut self, payload: &[u8]) {
        match self {
            Sink::Buffer(buffer) => _ = buffer.take(payload),
            Sink::Heap(bytes) => bytes.extend_from_slice(payload),
            Sink::Discard => {}
        }
    }
}
