//! What was called, in words: for errors and for the flight recorder.

use std::fmt;

use crate::signature::Signature;
use crate::types::{DType, Rank, Source, Tag};
use crate::window::WindowId;

/// A call with what matters about its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Collective(Signature),
    Send { bytes: usize, to: Rank, tag: Tag },
    Recv { bytes: usize, from: Source, tag: Tag },
    Put { bytes: usize, to: Rank, window: WindowId },
    Get { bytes: usize, from: Rank, window: WindowId },
    Accumulate { bytes: usize, to: Rank, window: WindowId },
    Flush { to: Rank, window: WindowId },
    Signal { to: Rank, window: WindowId },
    WaitSignal { from: Rank, window: WindowId },
}

impl Call {
    /// Whether every rank calls it, in the same order.
    pub(crate) fn is_collective(&self) -> bool {
        matches!(self, Call::Collective(_))
    }

    /// The other rank, if there is one and it is named.
    pub(crate) fn peer(&self) -> Option<Rank> {
        match *self {
            Call::Collective(_) | Call::Recv { from: Source::Any, .. } => None,
            Call::Send { to, .. }
            | Call::Put { to, .. }
            | Call::Accumulate { to, .. }
            | Call::Flush { to, .. }
            | Call::Signal { to, .. } => Some(to),
            Call::Recv { from: Source::Rank(from), .. } | Call::Get { from, .. } | Call::WaitSignal { from, .. } => {
                Some(from)
            }
        }
    }

    /// A message's tag.
    pub(crate) fn tag(&self) -> Option<Tag> {
        match *self {
            Call::Send { tag, .. } | Call::Recv { tag, .. } => Some(tag),
            _ => None,
        }
    }

    /// A collective's element type.
    pub(crate) fn dtype(&self) -> Option<DType> {
        match self {
            Call::Collective(signature) => DType::ALL.get(usize::from(signature.dtype)).copied(),
            _ => None,
        }
    }

    /// The operation's name.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Call::Collective(signature) => signature.operation(),
            Call::Send { .. } => "send",
            Call::Recv { .. } => "recv",
            Call::Put { .. } => "put",
            Call::Get { .. } => "get",
            Call::Accumulate { .. } => "accumulate",
            Call::Flush { .. } => "flush",
            Call::Signal { .. } => "signal",
            Call::WaitSignal { .. } => "wait_signal",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name();
        match *self {
            Call::Collective(signature) => write!(f, "{signature}"),
            Call::Send { bytes, to, tag } => write!(f, "{name}({bytes} bytes to rank {to}, tag {})", tag.0),
            Call::Recv { bytes, from: Source::Rank(from), tag } => {
                write!(f, "{name}({bytes} bytes from rank {from}, tag {})", tag.0)
            }
            Call::Recv { bytes, from: Source::Any, tag } => {
                write!(f, "{name}({bytes} bytes from any rank, tag {})", tag.0)
            }
            Call::Put { bytes, to, window } | Call::Accumulate { bytes, to, window } => {
                write!(f, "{name}({bytes} bytes to rank {to}, window {window})")
            }
            Call::Get { bytes, from, window } => write!(f, "{name}({bytes} bytes from rank {from}, window {window})"),
            Call::Signal { to, window } | Call::Flush { to, window } => {
                write!(f, "{name}(to rank {to}, window {window})")
            }
            Call::WaitSignal { from, window } => write!(f, "{name}(from rank {from}, window {window})"),
        }
    }
}
