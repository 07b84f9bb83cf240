//! Recursive doubling and halving: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
//! in MPICH", 2005; the combination for all_reduce is Rabenseifner's.
//!
//! ⌈log₂ n⌉ rounds between ranks whose positions differ in one bit. In a world that is not a power of two, the first
//! ranks pair up: one of each pair hands its data over before and gets the result after.

use crate::algo::direct;
use crate::algo::group::{Group, chunks, run_of_pieces};
use crate::schedule::{Action, Builder, Slice};
use crate::types::Rank;

/// Combines everyone's `data` into everyone's `data`: log₂ n messages of all data each, for short messages.
///
/// Both partners of a round combine the same two values; since the operations are commutative to the bit, everyone ends
/// with the same bits. The farthest partner comes first, as in [`all_reduce_halving`], so that both give the same bits.
pub fn all_reduce_doubling(builder: &mut Builder, group: &Group, data: Slice) {
    let theirs = builder.beside(data, data.len);
    with_power_of_two(builder, group, data, |builder, cube| {
        let mut bit = cube.size / 2;
        while bit > 0 {
            let partner = cube.rank(cube.me ^ bit);
            // Received beside the data, since both partners send at once: neither send ends before its receive begins.
            builder.push(Action::Send { to: partner, from: data });
            builder.push(Action::Recv { from: partner, into: theirs });
            builder.push(Action::Reduce { from: theirs, into: data });
            bit /= 2;
        }
    });
}

/// Combines everyone's `data` into everyone's `data`: halves are exchanged until everyone has one piece, then the pieces
/// are gathered the same way back. The least data on the wire in the fewest rounds.
pub fn all_reduce_halving(builder: &mut Builder, group: &Group, data: Slice) {
    with_power_of_two(builder, group, data, |builder, cube| {
        let run = |first, count| run_of_pieces(data, first, count, cube.size);
        let mut half = cube.size / 2;
        while half > 0 {
            let partner = cube.rank(cube.me ^ half);
            let kept = cube.me & !(half - 1);
            builder.push(Action::Send { to: partner, from: run(kept ^ half, half) });
            builder.push(Action::RecvReduce { from: partner, into: run(kept, half) });
            half /= 2;
        }
        let mut half = 1;
        while half < cube.size {
            let partner = cube.rank(cube.me ^ half);
            let held = cube.me & !(half - 1);
            builder.push(Action::Send { to: partner, from: run(held, half) });
            builder.push(Action::Recv { from: partner, into: run(held ^ half, half) });
            half *= 2;
        }
    });
}

/// Everyone's `data` is combined into the root's; on other ranks `data` ends undefined. As [`all_reduce_halving`], but the pieces
/// go to the root alone.
pub fn reduce_halving(builder: &mut Builder, group: &Group, root: Rank, data: Slice, chunk: usize) {
    // The last position is never one of a pair, so that the root has its own data to the end.
    let group = group.starting_at(group.position(root) + 1);
    let Some(cube) = enter_cube(builder, &group, data, chunk) else { return };
    let run = |first, count| run_of_pieces(data, first, count, cube.size);
    let mut half = cube.size / 2;
    while half > 0 {
        let partner = cube.rank(cube.me ^ half);
        let kept = cube.me & !(half - 1);
        direct::send_in_chunks(builder, partner, run(kept ^ half, half), chunk);
        for into in chunks(run(kept, half), chunk) {
            builder.push(Action::RecvReduce { from: partner, into });
        }
        half /= 2;
    }
    let mut half = 1;
    while half < cube.size {
        let partner = cube.rank(cube.me ^ half);
        let held = cube.me & !(half - 1);
        // The root is the last: all of its bits are set.
        if cube.me & half == 0 {
            return direct::send_in_chunks(builder, partner, run(held, half), chunk);
        }
        direct::receive_in_chunks(builder, partner, run(held ^ half, half), chunk);
        half *= 2;
    }
}

/// A power-of-two selection of a group.
struct Cube<'a> {
    group: &'a Group,
    size: usize,
    /// How many pairs there are in which one rank stands in for both.
    pairs: usize,
    me: usize,
}

impl Cube<'_> {
    fn rank(&self, position: usize) -> Rank {
        self.group.rank(if position < self.pairs { 2 * position + 1 } else { position + self.pairs })
    }
}

fn with_power_of_two(
    builder: &mut Builder,
    group: &Group,
    data: Slice,
    exchange: impl FnOnce(&mut Builder, &Cube<'_>),
) {
    let Some(cube) = enter_cube(builder, group, data, data.len.max(1)) else {
        builder.push(Action::Recv { from: group.rank(group.me() + 1), into: data });
        return;
    };
    exchange(builder, &cube);
    if cube.me < cube.pairs {
        builder.push(Action::Send { to: group.rank(group.me() - 1), from: data });
    }
}

/// The cube as this rank sees it; nothing on a rank that hands its data over and is not in it.
fn enter_cube<'a>(builder: &mut Builder, group: &'a Group, data: Slice, chunk: usize) -> Option<Cube<'a>> {
    let (size, me) = (group.size(), group.me());
    let cube = 1 << size.ilog2();
    let pairs = size - cube;
    let paired = me < 2 * pairs;
    if paired && me.is_multiple_of(2) {
        direct::send_in_chunks(builder, group.rank(me + 1), data, chunk);
        return None;
    }
    if paired {
        for into in chunks(data, chunk) {
            builder.push(Action::RecvReduce { from: group.rank(me - 1), into });
        }
    }
    Some(Cube { group, size: cube, pairs, me: if paired { me / 2 } else { me - pairs } })
}
