//! Operations: a plain description of a call, checked once against the communicator before anything is sent.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::buffer::Buffers;
use crate::counts::Counts;
use crate::sys::cuda::StreamHandle;
use crate::types::{Rank, ReduceOp, Source, Tag};
use crate::window::WindowId;

/// Whether the caller goes on at once or waits for the result next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The progress thread completes the operation; submitting never blocks.
    Async,
    /// The caller waits next, and makes progress itself.
    Blocking,
    /// The operation is put on a stream of a CUDA device, in whose memory all its buffers lie. What is put on the stream later
    /// finds its results. Submitting does not wait for it.
    Stream(StreamHandle),
}

/// The kind of an operation with its parameters.
#[derive(Clone, Debug, PartialEq)]
pub enum OpKind {
    /// Every rank ends with the reduction of all ranks' inputs. Lists are reduced element by element, as one message.
    AllReduce(ReduceOp),
    /// The root ends with the reduction of all ranks' inputs.
    Reduce {
        /// How elements combine.
        op: ReduceOp,
        /// The rank that gets the result.
        root: Rank,
    },
    /// The root's outputs are copied to every rank's.
    Broadcast {
        /// Whose data it is.
        root: Rank,
    },
    /// Every rank ends with all ranks' inputs: in one output of `size` equal blocks, or in one output a rank.
    AllGather,
    /// As [`OpKind::AllGather`], into this rank's part of a window, which is the one output. Ranks of one host whose memory others
    /// can map write their inputs there themselves.
    AllGatherPersistent {
        /// Which window. The parts of all ranks have the same length.
        window: WindowId,
    },
    /// Rank r ends with the reduction of all ranks' r-th block: of one input of `size` equal blocks, or of the r-th
    /// input.
    ReduceScatter(ReduceOp),
    /// Rank r's i-th block becomes rank i's r-th block. Counts are in elements, one for each rank.
    AllToAll {
        /// Elements for each rank, in the order they lie in the inputs.
        send: Counts,
        /// Elements from each rank, in the order they lie in the outputs.
        recv: Counts,
    },
    /// The root ends with all ranks' inputs, one output a rank or one of `size` equal blocks; others have no output.
    Gather {
        /// The rank that gets the data.
        root: Rank,
    },
    /// Every rank gets its block of the root's inputs (one a rank, or one of `size` equal blocks); others have none.
    Scatter {
        /// Whose data it is.
        root: Rank,
    },
    /// No rank's barrier completes before all ranks have called it.
    Barrier,
    /// One message to one rank. The inputs are sent end to end.
    Send {
        /// The receiving rank.
        to: Rank,
        /// Must equal the receiver's.
        tag: Tag,
    },
    /// One message from one rank or any. It fills the outputs end to end.
    Recv {
        /// Whose message.
        from: Source,
        /// Must equal the sender's.
        tag: Tag,
    },
    /// Writes the inputs, end to end, to another rank's part of a window. Complete when the inputs may be reused. A later
    /// [`OpKind::Signal`] tells the other rank that the data is there.
    Put {
        /// Which window.
        window: WindowId,
        /// Whose part.
        to: Rank,
        /// The first byte written.
        offset: usize,
    },
    /// Reads another rank's part of a window into the outputs, end to end.
    Get {
        /// Which window.
        window: WindowId,
        /// Whose part.
        from: Rank,
        /// The first byte read.
        offset: usize,
    },
    /// Adds the inputs, end to end, to what another rank's part of a window has, element by element. Accumulations of several
    /// ranks to the same elements all count. Otherwise as [`OpKind::Put`].
    Accumulate {
        /// Which window.
        window: WindowId,
        /// Whose part.
        to: Rank,
        /// The first byte changed.
        offset: usize,
    },
    /// Waits until everything that was put and accumulated before is in another rank's part of a window.
    Flush {
        /// Which window.
        window: WindowId,
        /// Whose part.
        to: Rank,
    },
    /// Tells another rank that everything put before is there. Signals are counted.
    Signal {
        /// Which window.
        window: WindowId,
        /// The rank that gets the signal.
        to: Rank,
    },
    /// Waits for one signal of another rank and takes it.
    WaitSignal {
        /// Which window.
        window: WindowId,
        /// Whose signal.
        from: Rank,
    },
}

impl OpKind {
    /// The name in messages: PyTorch's, in snake case.
    pub fn name(&self) -> &'static str {
        match self {
            OpKind::AllReduce(_) => CollectiveKind::AllReduce.name(),
            OpKind::Reduce { .. } => CollectiveKind::Reduce.name(),
            OpKind::Broadcast { .. } => CollectiveKind::Broadcast.name(),
            OpKind::AllGather => CollectiveKind::AllGather.name(),
            OpKind::AllGatherPersistent { .. } => CollectiveKind::AllGatherPersistent.name(),
            OpKind::ReduceScatter(_) => CollectiveKind::ReduceScatter.name(),
            OpKind::AllToAll { .. } => CollectiveKind::AllToAll.name(),
            OpKind::Gather { .. } => CollectiveKind::Gather.name(),
            OpKind::Scatter { .. } => CollectiveKind::Scatter.name(),
            OpKind::Barrier => CollectiveKind::Barrier.name(),
            OpKind::Send { .. } => "send",
            OpKind::Recv { .. } => "recv",
            OpKind::Put { .. } => "put",
            OpKind::Get { .. } => "get",
            OpKind::Accumulate { .. } => "accumulate",
            OpKind::Flush { .. } => "flush",
            OpKind::Signal { .. } => "signal",
            OpKind::WaitSignal { .. } => "wait_signal",
        }
    }

    /// The reduce operation, for the kinds that have one.
    pub fn reduce_op(&self) -> Option<ReduceOp> {
        match *self {
            OpKind::AllReduce(op) | OpKind::ReduceScatter(op) | OpKind::Reduce { op, .. } => Some(op),
            _ => None,
        }
    }

    /// Whether it is an access to a window.
    pub(crate) fn is_access(&self) -> bool {
        use OpKind::{Accumulate, Flush, Get, Put, Signal, WaitSignal};
        matches!(self, Put { .. } | Get { .. } | Accumulate { .. } | Flush { .. } | Signal { .. } | WaitSignal { .. })
    }
}

macro_rules! collective_kinds {
    ($($(#[$attribute:meta])* $kind:ident = $number:literal, $name:literal;)*) => {
        /// The kinds of collectives, with their numbers on the wire and their names in tuning files.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[repr(u8)]
        pub(crate) enum CollectiveKind {
            $($(#[$attribute])* $kind = $number,)*
        }

        impl CollectiveKind {
            #[cfg(test)]
            const ALL: &[CollectiveKind] = &[$(CollectiveKind::$kind,)*];

            /// The kind with a number, if there is one.
            pub(crate) fn numbered(number: u8) -> Option<CollectiveKind> {
                match number {
                    $($number => Some(CollectiveKind::$kind),)*
                    _ => None,
                }
            }

            /// The name in errors and logs.
            pub(crate) const fn name(self) -> &'static str {
                match self {
                    $(CollectiveKind::$kind => $name,)*
                }
            }
        }
    };
}

collective_kinds! {
    AllReduce = 1, "all_reduce";
    Reduce = 2, "reduce";
    Broadcast = 3, "broadcast";
    AllGather = 4, "all_gather";
    ReduceScatter = 5, "reduce_scatter";
    AllToAll = 6, "all_to_all";
    Gather = 7, "gather";
    Scatter = 8, "scatter";
    Barrier = 9, "barrier";
    #[serde(skip)] WindowRegister = 10, "window_register";
    #[serde(skip)] WindowDeregister = 11, "window_deregister";
    #[serde(skip)] WindowFence = 12, "window_fence";
    #[serde(skip)] AllGatherPersistent = 13, "all_gather_p";
}

/// An operation: its kind, its memory, and how long it may take.
#[derive(Clone, Debug)]
pub struct Op {
    /// The kind, with its parameters.
    pub kind: OpKind,
    /// Memory to read. For in-place operations (all_reduce, reduce, broadcast) the same as `outputs`.
    pub inputs: Buffers,
    /// Memory to write.
    pub outputs: Buffers,
    /// The time limit; the communicator's when absent.
    pub timeout: Option<Duration>,
    /// How the caller waits.
    pub mode: Mode,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectives_are_found_by_their_numbers() {
        for &kind in CollectiveKind::ALL {
            assert_eq!(CollectiveKind::numbered(kind as u8), Some(kind));
        }
        assert_eq!((CollectiveKind::numbered(0), CollectiveKind::numbered(14)), (None, None));
    }

    #[test]
    fn collectives_have_the_same_name_in_files_and_those_of_windows_have_none_there() {
        for &kind in CollectiveKind::ALL {
            let is_of_windows = kind.name().starts_with("window_") || kind == CollectiveKind::AllGatherPersistent;
            let written = serde_json::to_value(kind).ok();
            assert_eq!(written, (!is_of_windows).then(|| kind.name().into()));
            let read = serde_json::from_value(kind.name().into()).ok();
            assert_eq!(read, (!is_of_windows).then_some(kind));
        }
    }
}
