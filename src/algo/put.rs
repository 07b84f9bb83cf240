//! Ranks write to each other's memory themselves. Each has lent a part of a window, and all can write to all of it.
//!
//! A rank says to each peer that its part may be written, and each writes to a part once it has heard that of its owner, and says
//! then that it has. These two messages are empty, and no rank asks for an address. They are the post and the complete of
//! MPI's general active target synchronization (MPI 4.1, 12.5.2).

use crate::algo::collective::Collective;
use crate::algo::group::Group;
use crate::schedule::{Action, Builder, Slice, Space};

/// An all_gather by this algorithm, in place of one whose blocks have the same length: if a setting names it, or none is named
/// and it is faster for so many elements a rank.
pub(crate) fn instead_of(
    all_gather: &Collective,
    named: Option<&str>,
    is_faster: impl FnOnce(usize) -> bool,
) -> Option<Collective> {
    let Collective::AllGather { counts } = all_gather else { return None };
    let count = counts[0];
    let is_chosen = named.map_or_else(|| is_faster(count), |name| name == NAME);
    is_chosen.then_some(Collective::AllGatherIntoParts { count })
}

/// Writes `own` to block `me` of everyone's part; all blocks of this rank's part are there in the end.
pub fn all_gather(builder: &mut Builder, world: &Group, own: Slice) {
    let (size, me, count) = (world.size(), world.me(), own.len);
    let empty = Slice::empty();
    for step in 1..size {
        builder.push(Action::Send { to: world.rank(me + step), from: empty });
    }
    // While the others come.
    builder.push(Action::Copy { from: own, into: Slice::new(Space::Output, me * count, count) });
    for step in 1..size {
        let peer = (me + step) % size;
        let may_be_written = builder.push(Action::Recv { from: world.rank(peer), into: empty });
        let into = Slice::new(Space::Parts, (peer * size + me) * count, count);
        let written = builder.push_after(may_be_written, Action::Copy { from: own, into });
        builder.push_after(written, Action::Send { to: world.rank(peer), from: empty });
    }
    for step in 1..size {
        builder.push(Action::Recv { from: world.rank(me + size - step), into: empty });
    }
}

/// The name of this algorithm.
pub(super) const NAME: &str = "put";

/// Shorter blocks get there sooner as messages in shared memory, which take one way and not two.
pub(crate) const MIN_BYTES: usize = 256 * 1024;
