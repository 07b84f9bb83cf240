//! The broadcast of long data by a scatter and an all_gather: Barnett, Gupta, Payne, Shuler, van de Geijn and Watts,
//! "Interprocessor collective communication library (InterCom)", 1994. Thakur, Rabenseifner and Gropp, 2005, show for which
//! lengths it pays.
//!
//! 2 ⌈log₂ n⌉ rounds in a world of any size, in which the root sends the data less than twice, where a binomial tree has it send
//! them ⌈log₂ n⌉ times.

use crate::algo::group::Group;
use crate::algo::{binomial, bruck};
use crate::schedule::{Builder, Slice};
use crate::types::Rank;

/// The root's `data` goes to everyone's `data`.
pub fn broadcast(builder: &mut Builder, group: &Group, root: Rank, data: Slice, chunk: usize) {
    let group = group.starting_at(group.position(root));
    binomial::scatter_in_place(builder, &group, data, chunk);
    bruck::all_gather_in_place(builder, &group, data, chunk);
}
