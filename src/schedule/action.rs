//! What a step does.

use super::slice::Slice;
use crate::types::Rank;

/// The action of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Sends a message. The k-th send to a peer matches the peer's k-th receive from this rank, in schedule order.
    Send {
        /// The receiving rank.
        to: Rank,
        /// What is sent.
        from: Slice,
    },
    /// Receives a message.
    Recv {
        /// The sending rank.
        from: Rank,
        /// Where it goes.
        into: Slice,
    },
    /// Receives a message and combines it: `into = into ⊕ message`.
    RecvReduce {
        /// The sending rank.
        from: Rank,
        /// The accumulator.
        into: Slice,
    },
    /// Copies, and widens elements that become sums. A copy of memory onto itself does nothing.
    Copy {
        /// The source.
        from: Slice,
        /// The destination, as long as the source.
        into: Slice,
    },
    /// Copies blocks of equal lengths. Those of the shorter slice follow each other; in the longer one each is as far from the next.
    CopyBlocks {
        /// The source, which begins and ends with a block.
        from: Slice,
        /// The destination, which does too.
        into: Slice,
        /// How many blocks, at least one.
        count: u32,
        /// Whether the first block of the source is the last one of the destination.
        is_reversed: bool,
    },
    /// `into = into ⊕ from`.
    Reduce {
        /// The right operand.
        from: Slice,
        /// The left operand and the result.
        into: Slice,
    },
    /// `into = block₀ ⊕ block₁ ⊕ …` over blocks of `into.len` elements, rounded once. One block is the old content of `into`;
    /// `from` consists of the others.
    Fold {
        /// The other blocks, in order; as long as `into` times a whole number.
        from: Slice,
        /// One of the blocks and the result, apart from `from`.
        into: Slice,
        /// The position of `into` among the blocks. As wide as a [`Rank`]: a larger type makes every step larger.
        position: u32,
    },
    /// Multiplies in place by the rank's own factor of PREMUL_SUM.
    Scale {
        /// What is multiplied.
        slice: Slice,
    },
    /// Waits until the operation's caller has done what this number stands for, on a device. It reads and writes `slice`.
    Await {
        /// What the caller does.
        number: u32,
        /// The memory.
        slice: Slice,
    },
    /// `into = (block₀ + block₁ + …) / world size` over the blocks of `into.len` elements that `from` consists of, rounded
    /// once.
    Average {
        /// The blocks, in order: elements, or sums of them. As long as `into` times a whole number.
        from: Slice,
        /// The result: `from` itself, or apart from it.
        into: Slice,
    },
}

impl Action {
    /// The slice that is read, then the slice that is written.
    pub(crate) fn touches(&self) -> (Option<Slice>, Option<Slice>) {
        match *self {
            Action::Send { from, .. } => (Some(from), None),
            Action::Recv { into, .. } => (None, Some(into)),
            Action::RecvReduce { into, .. } => (None, Some(into)),
            Action::Copy { from, into }
            | Action::CopyBlocks { from, into, .. }
            | Action::Reduce { from, into }
            | Action::Fold { from, into, .. }
            | Action::Average { from, into } => (Some(from), Some(into)),
            Action::Scale { slice } => (None, Some(slice)),
            Action::Await { slice, .. } => (Some(slice), Some(slice)),
        }
    }

    /// The copies that it consists of, each from one slice into another as long: none if it does anything else.
    ///
    /// # Panics
    /// When the slices have no such blocks.
    pub fn copies(&self) -> impl Iterator<Item = (Slice, Slice)> + use<> {
        let (from, into, count, is_reversed) = match *self {
            Action::Copy { from, into } => (from, into, 1, false),
            Action::CopyBlocks { from, into, count, is_reversed } => (from, into, count as usize, is_reversed),
            _ => (Slice::empty(), Slice::empty(), 0, false),
        };
        let len = from.len.min(into.len) / count.max(1);
        let block = move |all: Slice, index: usize| match count {
            1 => all,
            _ => all.part(index * ((all.len - len) / (count - 1)), len),
        };
        (0..count).map(move |index| {
            let target = if is_reversed { count - 1 - index } else { index };
            (block(from, index), block(into, target))
        })
    }
}
