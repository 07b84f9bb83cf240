//! Reductions whose inputs have to be copied before they are combined, in pieces: so the copies take no more memory than the
//! communicator's setting `scratch_bytes` allows.
//!
//! Each piece is a collective of its own, on a part of the data, one after the other in the schedule. Two have memory at a time, so
//! that the next one begins while the one before it ends. All ranks cut alike: what decides is the same on all.

use super::collective::{Collective, Scaling, Setting};
use crate::counts::Counts;
use crate::schedule::{Frame, Run, Slice, Space};
use crate::types::Rank;

/// The most pieces: about as many as a long message has.
const PIECES_MAX: usize = 256;

/// Into how many pieces a collective is cut of which a rank copies up to so many elements, on whichever rank.
pub(super) fn pieces(copied: usize, setting: &Setting<'_>) -> usize {
    let width = match setting.scaling {
        Scaling::Sum { bytes } => bytes,
        Scaling::Nothing | Scaling::Inputs => setting.element,
    };
    let bytes = copied.saturating_mul(width);
    if bytes <= setting.scratch.limit {
        return 1;
    }
    bytes.div_ceil((setting.scratch.limit / 2).max(1)).min(PIECES_MAX)
}

/// The `index`-th of so many pieces of a collective, and where its memory is for rank `me`.
pub(super) fn piece(collective: &Collective, me: Rank, index: usize, pieces: usize) -> (Collective, Frame) {
    let of = |len: usize| Slice::new(Space::Input, 0, len).piece(index, pieces);
    let of_all = |count: usize| {
        let part = of(count);
        (part.len, Frame::new(vec![Run { offset: 0, len: part.len, place: part.offset }], part.offset, index))
    };
    match collective {
        Collective::AllReduce { count } => {
            let (count, frame) = of_all(*count);
            (Collective::AllReduce { count }, frame)
        }
        Collective::Reduce { count, root } => {
            let (count, frame) = of_all(*count);
            (Collective::Reduce { count, root: *root }, frame)
        }
        Collective::ReduceScatter { counts } => {
            let (mut offset, mut place, mut runs) = (0, 0, Vec::with_capacity(counts.len()));
            for count in counts.iter() {
                let part = of(count);
                runs.push(Run { offset, len: part.len, place: place + part.offset });
                (offset, place) = (offset + part.len, place + count);
            }
            let cut: Counts = runs.iter().map(|run| run.len).collect();
            let frame = Frame::new(runs, of(counts[me.index()]).offset, index);
            (Collective::ReduceScatter { counts: cut }, frame)
        }
        _ => unreachable!("others are not cut"),
    }
}
