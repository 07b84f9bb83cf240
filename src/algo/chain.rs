//! Chains: every rank passes on each piece of the data as it comes; the pipeline of Pješivac-Grbović et al., "Performance analysis
//! of MPI collective operations", 2007.
//!
//! Each rank receives and sends all data once, the least possible, while a piece takes n − 1 messages to come to the last rank.
//! So chains are for long data on few ranks.

use crate::algo::group::{Group, chunks};
use crate::schedule::{Action, Builder, Slice};
use crate::types::Rank;

/// The root's `data` goes to everyone's `data`, from the root on, around.
pub fn broadcast(builder: &mut Builder, group: &Group, root: Rank, data: Slice, chunk: usize) {
    let Neighbours { before, after } = Neighbours::from(group, group.position(root));
    for part in chunks(data, chunk) {
        if let Some(from) = before {
            builder.push(Action::Recv { from, into: part });
        }
        if let Some(to) = after {
            builder.push(Action::Send { to, from: part });
        }
    }
}

/// Everyone's `data` is combined into the root's, which is the last; on other ranks `data` ends undefined.
pub fn reduce(builder: &mut Builder, group: &Group, root: Rank, data: Slice, chunk: usize) {
    let Neighbours { before, after } = Neighbours::from(group, group.position(root) + 1);
    for part in chunks(data, chunk) {
        if let Some(from) = before {
            builder.push(Action::RecvReduce { from, into: part });
        }
        if let Some(to) = after {
            builder.push(Action::Send { to, from: part });
        }
    }
}

/// This rank's neighbours in a chain.
struct Neighbours {
    /// From whom pieces come; nobody for the first.
    before: Option<Rank>,
    /// To whom they go; nobody for the last.
    after: Option<Rank>,
}

impl Neighbours {
    /// In the chain that begins at the position `first`.
    fn from(group: &Group, first: usize) -> Neighbours {
        let (size, me) = (group.size(), group.me());
        let place = (me + size - first % size) % size;
        Neighbours {
            before: (place > 0).then(|| group.rank(me + size - 1)),
            after: (place + 1 < size).then(|| group.rank(me + 1)),
        }
    }
}
