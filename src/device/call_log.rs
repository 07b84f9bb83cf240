//! What a rank tells the others of its host about a call, and how two calls differ.

use crate::counts::Counts;
use crate::device::record;
use crate::signature::Signature;
use crate::sync::{AtomicU64, Ordering};
use crate::types::Rank;

/// The part of a call that must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LoggedCall {
    signature: Signature,
    segments: u32,
    capture: Capture,
    memory: CallMemory,
}

/// Whether a vendor's library finds all memory of a rank's call registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum CallMemory {
    /// It gets none, or no library does the call.
    None = 0,
    /// It does not.
    Plain = 1,
    /// It does.
    Registered = 2,
}

/// Whether a call is recorded in a CUDA graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Capture {
    /// The call runs at once.
    Eager,
    /// The call runs when the graph does.
    Captured,
}

/// Another rank has made another call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Disagreement {
    pub(crate) rank: Rank,
    pub(crate) what: Difference,
}

/// What differs between the calls of two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Difference {
    /// The calls themselves: this is the other rank's.
    Call(LoggedCall),
    /// The elements of a block, in an all_to_all.
    Block {
        /// The rank that sends it.
        sender: Rank,
        /// How many it sends.
        sent: u64,
        /// The rank that receives it.
        receiver: Rank,
        /// How many it expects.
        expected: u64,
    },
}

/// The elements of the blocks that a rank sends in an all_to_all, and of those that it receives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blocks<'a> {
    pub(crate) sent: &'a Counts,
    pub(crate) received: &'a Counts,
}

impl Disagreement {
    /// The same disagreement, with other names of the ranks.
    pub(crate) fn named(self, name: impl Fn(Rank) -> Rank) -> Disagreement {
        let what = match self.what {
            Difference::Call(call) => Difference::Call(call),
            Difference::Block { sender, sent, receiver, expected } => {
                Difference::Block { sender: name(sender), sent, receiver: name(receiver), expected }
            }
        };
        Disagreement { rank: name(self.rank), what }
    }
}

impl LoggedCall {
    /// A call that runs as so many segments.
    pub(crate) fn new(signature: Signature, segments: u32, capture: Capture) -> LoggedCall {
        LoggedCall { signature, segments, capture, memory: CallMemory::None }
    }

    /// The same, with memory that the library finds so.
    pub(crate) fn with_memory(self, memory: CallMemory) -> LoggedCall {
        LoggedCall { memory, ..self }
    }

    /// Whether two ranks' calls go together.
    pub(crate) fn goes_with(&self, other: &LoggedCall) -> bool {
        let mixes = self.memory != other.memory && ![self.memory, other.memory].contains(&CallMemory::None);
        !mixes && LoggedCall { memory: other.memory, ..*self } == *other
    }

    /// Whether it is recorded in a CUDA graph.
    pub(crate) fn is_captured(&self) -> bool {
        self.capture == Capture::Captured
    }

    pub(crate) fn signature(&self) -> Signature {
        self.signature
    }

    /// How a call of `me` differs from that of another rank, in words.
    ///
    /// The number is that of the collective.
    pub(crate) fn disagreement(&self, number: u64, me: Rank, other: Disagreement) -> String {
        let Disagreement { rank, what } = other;
        let theirs = match what {
            Difference::Call(theirs) => theirs,
            Difference::Block { sender, sent, receiver, expected } => {
                return format!(
                    "the ranks disagree on the sizes of collective {number}, {self}: rank {sender} sends {sent} elements to \
                     rank {receiver}, which expects {expected}"
                );
            }
        };
        let how = |capture| match capture {
            Capture::Eager => "eagerly",
            Capture::Captured => "in a graph's capture",
        };
        if self.signature != theirs.signature {
            self.signature.disagreement(number, me, rank, &theirs.signature)
        } else if self.capture != theirs.capture {
            let (call, ours, theirs) = (self.signature, how(self.capture), how(theirs.capture));
            format!("the ranks disagree on collective {number}: rank {me} called {call} {ours}, rank {rank} {theirs}")
        } else if self.segments == theirs.segments {
            let how = |memory| if memory == CallMemory::Registered { "registered" } else { "not registered" };
            let (call, ours, theirs) = (self.signature, how(self.memory), how(theirs.memory));
            format!(
                "the ranks disagree on the memory of collective {number}, {call}: that of rank {me} is {ours} with the vendor's \
                 library, that of rank {rank} is {theirs}; take memory of get_mem_allocator(), or registered tensors, on all \
                 ranks or on none"
            )
        } else {
            let (ours, theirs) = (self.segments, theirs.segments);
            format!(
                "the ranks disagree on how to run collective {number}: rank {me} cuts it into {ours} segments, rank {rank} into \
                 {theirs}"
            )
        }
    }

    /// Writes the call into a line of the log, with what `store` stores elsewhere.
    pub(crate) fn publish(&self, line: &Line, number: u64, store: impl FnOnce()) {
        let [mark, words @ ..] = line;
        let values = self.to_words();
        record::publish(mark, number, || {
            words.iter().zip(values).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
            store();
        });
    }

    /// The call of this number, if a line of the log has it, with what `load` loads elsewhere.
    pub(crate) fn read<T>(line: &Line, number: u64, load: impl FnOnce() -> T) -> Option<(LoggedCall, T)> {
        let [mark, words @ ..] = line;
        let load = || (words.each_ref().map(|word| word.load(Ordering::Relaxed)), load());
        let ([first, second, segments, capture, memory, ..], beside) = record::read(mark, number, load)?;
        Some((LoggedCall::from_words([first, second, segments, capture, memory]), beside))
    }

    /// How many words a call takes.
    pub(crate) const WORDS: usize = 5;

    /// The call as words.
    pub(crate) fn to_words(self) -> [u64; LoggedCall::WORDS] {
        let [first, second] = self.signature.to_words();
        let is_captured = self.capture == Capture::Captured;
        [first, second, u64::from(self.segments), u64::from(is_captured), self.memory as u64]
    }

    /// What [`to_words`](LoggedCall::to_words) made; of other words anything.
    pub(crate) fn from_words([first, second, segments, capture, memory]: [u64; LoggedCall::WORDS]) -> LoggedCall {
        let capture = if capture == 0 { Capture::Eager } else { Capture::Captured };
        let signature = Signature::from_words([first, second]);
        let memory = match memory {
            0 => CallMemory::None,
            1 => CallMemory::Plain,
            _ => CallMemory::Registered,
        };
        LoggedCall { signature, segments: segments as u32, capture, memory }
    }
}

/// The call in words, as `all_reduce(SUM, 20 × float32)`.
impl std::fmt::Display for LoggedCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.signature.fmt(f)
    }
}

type Line = [AtomicU64; crate::sys::words::WORDS_A_LINE];
