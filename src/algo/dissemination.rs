//! Dissemination barrier: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988.
//!
//! ⌈log₂ n⌉ rounds; in round k every rank signals the one 2ᵏ further on. After the last, each has heard of all.

use crate::algo::group::Group;
use crate::schedule::{Action, Builder, Slice};

/// Appends a barrier over `group`. Steps before it must be fenced off by the caller if the barrier is to follow them.
pub fn barrier(builder: &mut Builder, group: &Group) {
    let (size, me) = (group.size(), group.me());
    let mut distance = 1;
    while distance < size {
        builder.push(Action::Send { to: group.rank(me + distance), from: Slice::empty() });
        builder.push(Action::Recv { from: group.rank(me + size - distance), into: Slice::empty() });
        builder.barrier();
        distance *= 2;
    }
}
