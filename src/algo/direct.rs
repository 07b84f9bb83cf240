//! Direct algorithms: every rank exchanges with every other, starting with its neighbour so that no rank is everyone's
//! first. One round for any world: the fewest steps, the best in shared memory and for few ranks. The order of peers is
//! that of the pairwise exchange in Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
//! in MPICH", 2005.

use crate::algo::group::{Group, blocks, chunks};
use crate::counts::Counts;
use crate::schedule::{Action, Builder, Slice};
use crate::types::Rank;

/// Sends `data` in pieces of at most `chunk` elements.
pub(super) fn send_in_chunks(builder: &mut Builder, to: Rank, data: Slice, chunk: usize) {
    for from in chunks(data, chunk) {
        builder.push(Action::Send { to, from });
    }
}

/// Receives what [`send_in_chunks`] sends.
pub(super) fn receive_in_chunks(builder: &mut Builder, from: Rank, data: Slice, chunk: usize) {
    for into in chunks(data, chunk) {
        builder.push(Action::Recv { from, into });
    }
}

/// Sends `own` to everyone and receives everyone's block; `own`, which may be block `me`, ends there.
pub fn all_gather(builder: &mut Builder, group: &Group, own: Slice, blocks: &[Slice], chunk: usize) {
    let (size, me) = (group.size(), group.me());
    for step in 1..size {
        send_in_chunks(builder, group.rank(me + step), own, chunk);
    }
    // While the others' blocks are on their way.
    if own != blocks[me] {
        builder.push(Action::Copy { from: own, into: blocks[me] });
    }
    for step in 1..size {
        let from = (me + size - step) % size;
        receive_in_chunks(builder, group.rank(from), blocks[from], chunk);
    }
}

/// Sends block r of `own` to position r; `into` ends as the reduction of everyone's block `me`, combined in the order
/// of the positions and rounded once. `into` may be block `me` of `own`.
pub fn reduce_scatter(builder: &mut Builder, group: &Group, own: &[Slice], into: Slice, chunk: usize) {
    let lanes = lanes_to_fold(builder, group, into, into.len, chunk);
    reduce_scatter_by(builder, group, own, into, chunk, lanes);
}

/// What [`reduce_scatter_by`] takes for blocks of at most so many elements, beside `into`.
pub(super) fn lanes_to_fold(builder: &mut Builder, group: &Group, into: Slice, len: usize, chunk: usize) -> Lanes {
    let others = if group.size() == 2 { 0 } else { group.size() - 1 };
    lanes(builder, into, len, others, chunk)
}

/// As [`reduce_scatter`], in memory that other calls use as well.
pub(super) fn reduce_scatter_by(
    builder: &mut Builder,
    group: &Group,
    own: &[Slice],
    into: Slice,
    chunk: usize,
    lanes: Lanes,
) {
    let (size, me) = (group.size(), group.me());
    send_blocks(builder, group, own, chunk);
    if size == 2 {
        // Two values are rounded once whichever way, so they can be combined as they come.
        for (target, mine) in chunks(into, chunk).zip(chunks(own[me], chunk)) {
            builder.push(Action::Copy { from: mine, into: target });
            builder.push(Action::RecvReduce { from: group.rank(1 - me), into: target });
        }
        return;
    }
    let others = size - 1;
    for (index, (target, mine)) in chunks(into, chunk).zip(chunks(own[me], chunk)).enumerate() {
        let gathered = lanes[index % LANES].part(0, target.len * others);
        let parts = blocks(gathered, &Counts::equal(target.len, others));
        builder.push(Action::Copy { from: mine, into: target });
        for step in 1..size {
            let from = (me + size - step) % size;
            let into = parts[from - usize::from(from > me)];
            builder.push(Action::Recv { from: group.rank(from), into });
        }
        builder.push(Action::Fold { from: gathered, into: target, position: me as u32 });
    }
}

/// As [`reduce_scatter`] of all ranks, but `into` ends as the average. What is sent is as it was given, also where its sum
/// is too large for it.
pub fn average_scatter(builder: &mut Builder, world: &Group, own: &[Slice], into: Slice, chunk: usize) {
    let (size, me) = (world.size(), world.me());
    send_blocks(builder, world, own, chunk);
    let lanes = lanes(builder, into, into.len, size, chunk);
    for (index, (target, mine)) in chunks(into, chunk).zip(chunks(own[me], chunk)).enumerate() {
        let gathered = lanes[index % LANES].part(0, target.len * size);
        let parts = blocks(gathered, &Counts::equal(target.len, size));
        builder.push(Action::Copy { from: mine, into: parts[me] });
        for step in 1..size {
            let from = (me + size - step) % size;
            builder.push(Action::Recv { from: world.rank(from), into: parts[from] });
        }
        builder.push(Action::Average { from: gathered, into: target });
    }
}

/// Sends block r of `own` to position r.
fn send_blocks(builder: &mut Builder, group: &Group, own: &[Slice], chunk: usize) {
    let (size, me) = (group.size(), group.me());
    for step in 1..size {
        let to = (me + step) % size;
        send_in_chunks(builder, group.rank(to), own[to], chunk);
    }
}

/// Memory for so many chunks of a block of `len` elements. It goes round, so that what others send takes no more, and
/// combining overlaps with receiving.
fn lanes(builder: &mut Builder, into: Slice, len: usize, blocks: usize, chunk: usize) -> Lanes {
    [(); LANES].map(|()| builder.beside(into, Counts::equal(chunk.min(len), blocks).total()))
}

pub(super) type Lanes = [Slice; LANES];

/// How many chunks are received and combined at once.
pub(super) const LANES: usize = 2;

/// Sends block r of `send` to position r and receives position r's block into block r of `recv`. A block of
/// so many elements is cut by [`delimited_chunks`] into pieces of `chunk(elements)`.
pub fn all_to_all(
    builder: &mut Builder,
    group: &Group,
    send: &[Slice],
    recv: &[Slice],
    chunk: impl Fn(usize) -> usize,
) {
    let (size, me) = (group.size(), group.me());
    for step in 1..size {
        let to = (me + step) % size;
        for part in delimited_chunks(send[to], chunk(send[to].len)) {
            builder.push(Action::Send { to: group.rank(to), from: part });
        }
    }
    // While the others' blocks are on their way.
    builder.push(Action::Copy { from: send[me], into: recv[me] });
    for step in 1..size {
        let from = (me + size - step) % size;
        for part in delimited_chunks(recv[from], chunk(recv[from].len)) {
            builder.push(Action::Recv { from: group.rank(from), into: part });
        }
    }
}

/// `block` cut into pieces of `chunk` elements and one that is shorter, perhaps empty: it tells the end. The pieces of two
/// lengths differ in one that both have, so that a receiver which expects another length notices.
fn delimited_chunks(block: Slice, chunk: usize) -> impl Iterator<Item = Slice> {
    (0..=block.len / chunk).map(move |index| block.part(index * chunk, chunk.min(block.len - index * chunk)))
}

/// The root's `data` goes to everyone's `data`.
pub fn broadcast(builder: &mut Builder, group: &Group, root: Rank, data: Slice, chunk: usize) {
    for part in chunks(data, chunk) {
        if group.rank(group.me()) == root {
            for step in 1..group.size() {
                builder.push(Action::Send { to: group.rank(group.me() + step), from: part });
            }
        } else {
            builder.push(Action::Recv { from: root, into: part });
        }
    }
}

/// Everyone's `own` goes to the root's `all`, which holds one block a position; elsewhere `all` is not used.
pub fn gather(builder: &mut Builder, group: &Group, root: Rank, own: Slice, all: Option<Slice>, chunk: usize) {
    let Some(all) = all else {
        return send_in_chunks(builder, root, own, chunk);
    };
    let blocks = blocks(all, &Counts::equal(own.len, group.size()));
    builder.push(Action::Copy { from: own, into: blocks[group.me()] });
    for step in 1..group.size() {
        let from = (group.me() + step) % group.size();
        receive_in_chunks(builder, group.rank(from), blocks[from], chunk);
    }
}

/// The root's `all`, one block a position, goes to everyone's `own`; elsewhere `all` is not used.
pub fn scatter(builder: &mut Builder, group: &Group, root: Rank, all: Option<Slice>, own: Slice, chunk: usize) {
    let Some(all) = all else {
        return receive_in_chunks(builder, root, own, chunk);
    };
    let blocks = blocks(all, &Counts::equal(own.len, group.size()));
    for step in 1..group.size() {
        let to = (group.me() + step) % group.size();
        send_in_chunks(builder, group.rank(to), blocks[to], chunk);
    }
    builder.push(Action::Copy { from: blocks[group.me()], into: own });
}
