//! Bruck's all_gather: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in
//! multiport message-passing systems", 1997. Thakur, Rabenseifner and Gropp, 2005, show for which lengths it pays.
//!
//! ⌈log₂ n⌉ rounds in a world of any size; in each, a rank passes on what it has, so that it has twice as much.

use crate::algo::direct;
use crate::algo::group::{Group, run_of_pieces};
use crate::schedule::{Action, Builder, Slice};

/// Up to this size of all blocks together, a message costs more than copying them.
pub const BRUCK_MAX_BYTES: usize = 64 * 1024;

/// Spreads everyone's `own`, which is as long as block `me`, into everyone's `blocks`, which follow each other.
pub fn all_gather(builder: &mut Builder, group: &Group, own: Slice, blocks: &[Slice]) {
    let (size, me) = (group.size(), group.me());
    // Memory for the blocks in the order from this rank's on, around. There, what a rank has is always one run, and so is
    // what it passes on. Where the first so many blocks end:
    let mut ends = vec![0];
    ends.extend((0..size).scan(0, |end, step| {
        *end += blocks[(me + step) % size].len;
        Some(*end)
    }));
    let around = builder.beside(own, ends[size]);
    let run = |first: usize, count: usize| around.part(ends[first], ends[first + count] - ends[first]);
    builder.push(Action::Copy { from: own, into: run(0, 1) });
    let mut held = 1;
    while held < size {
        let count = held.min(size - held);
        builder.push(Action::Send { to: group.rank(me + size - held), from: run(0, count) });
        builder.push(Action::Recv { from: group.rank(me + held), into: run(held, count) });
        held += count;
    }
    let behind = run(0, size - me);
    builder.push(Action::Copy { from: behind, into: Slice::new(blocks[me].space, blocks[me].offset, behind.len) });
    if me > 0 {
        let before = run(size - me, me);
        builder.push(Action::Copy { from: before, into: Slice::new(blocks[0].space, blocks[0].offset, before.len) });
    }
}

/// Spreads the pieces of `data`, one a position, where they are: piece `me` is this rank's, the others are received. The member at
/// position 0 has all of them and receives none.
pub fn all_gather_in_place(builder: &mut Builder, group: &Group, data: Slice, chunk: usize) {
    let (size, me) = (group.size(), group.me());
    // So many pieces from that of position `first` on, around: a run that goes past the end is two.
    let runs = |first: usize, count: usize| {
        let first = first % size;
        let before = count.min(size - first);
        let run = |first, count| (count > 0).then(|| run_of_pieces(data, first, count, size));
        [run(first, before), run(0, count - before)].into_iter().flatten()
    };
    let mut held = 1;
    while held < size {
        let count = held.min(size - held);
        if me != held {
            let to = group.rank(me + size - held);
            runs(me, count).for_each(|run| direct::send_in_chunks(builder, to, run, chunk));
        }
        if me != 0 {
            let from = group.rank(me + held);
            runs(me + held, count).for_each(|run| direct::receive_in_chunks(builder, from, run, chunk));
        }
        held += count;
    }
}
