//! Ring algorithms: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
//!
//! n − 1 steps a phase; in each, every rank passes one block to its right neighbour, in chunks, so that a rank forwards
//! the first chunk of a block while the rest is still on its way. Each rank sends (n − 1)/n of the data a phase, the
//! least possible.

use crate::algo::group::{Group, chunks};
use crate::schedule::{Action, Builder, Slice};

/// Reduces `blocks` (one a position, of this rank's own data) in place: block `me` ends as the reduction.
pub fn reduce_scatter(builder: &mut Builder, group: &Group, blocks: &[Slice], chunk: usize) {
    let (size, me) = (group.size(), group.me());
    for step in 1..size {
        let sent = blocks[(me + size - step) % size];
        let received = blocks[(me + 2 * size - step - 1) % size];
        for from in chunks(sent, chunk) {
            builder.push(Action::Send { to: group.rank(me + 1), from });
        }
        for into in chunks(received, chunk) {
            builder.push(Action::RecvReduce { from: group.rank(me + size - 1), into });
        }
    }
}

/// Spreads `blocks`: block `me` is this rank's, the others are received.
pub fn all_gather(builder: &mut Builder, group: &Group, blocks: &[Slice], chunk: usize) {
    let (size, me) = (group.size(), group.me());
    for step in 1..size {
        let sent = blocks[(me + size + 1 - step) % size];
        let received = blocks[(me + size - step) % size];
        for from in chunks(sent, chunk) {
            builder.push(Action::Send { to: group.rank(me + 1), from });
        }
        for into in chunks(received, chunk) {
            builder.push(Action::Recv { from: group.rank(me + size - 1), into });
        }
    }
}
