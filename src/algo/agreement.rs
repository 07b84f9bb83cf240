//! Agreement: no rank finishes a collective, or else the one after it, before it knows that all have called the same, so that a
//! disagreement between any two of them is an error on every rank, also where data flows between few. A message's header tells
//! what its sender called, hence it takes no more than messages. Only a rank that has moved data finishes before it has heard of
//! those that it gets no data from.

use crate::algo::collective::{Collective, DIRECT_MAX_RANKS};
use crate::algo::dissemination;
use crate::algo::group::Group;
use crate::schedule::{Action, Builder, Slice};
use crate::types::Rank;

/// What ranks may disagree about without that each of them hears of it by the data that it needs.
enum Doubt {
    Nothing,
    /// The call: the headers of all ranks tell whether it is the same.
    Calls,
    /// How many elements two ranks exchange, which only the two compare.
    Sizes,
}

fn doubt(collective: &Collective) -> Doubt {
    match collective {
        // Without data nobody needs anybody's.
        Collective::AllReduce { count: 0 } => Doubt::Calls,
        Collective::AllGather { counts } | Collective::ReduceScatter { counts } if counts.total() == 0 => Doubt::Calls,
        Collective::AllReduce { .. } | Collective::AllGatherIntoParts { .. } | Collective::Barrier => Doubt::Nothing,
        // They confirm before all else.
        Collective::ByIslands { .. } | Collective::EqualAllToAll { .. } => Doubt::Nothing,
        Collective::AllGather { counts } | Collective::ReduceScatter { counts } if counts.are_equal() => Doubt::Nothing,
        // A rank without elements sends none.
        Collective::AllGather { .. }
        | Collective::ReduceScatter { .. }
        | Collective::Reduce { .. }
        | Collective::Broadcast { .. }
        | Collective::Gather { .. }
        | Collective::Scatter { .. } => Doubt::Calls,
        Collective::AllToAll { .. } => Doubt::Sizes,
    }
}

/// Completes a schedule of `collective` so that the ranks of `world` agree before they finish.
pub(super) fn ensure(builder: &mut Builder, collective: &Collective, world: &Group) {
    match (doubt(collective), world.size()) {
        (Doubt::Nothing, _) => {}
        (Doubt::Calls, ..=DIRECT_MAX_RANKS) if builder.moves_data() => {
            let (told, heard) = hear_of_all(builder, world);
            builder.runs_ahead(told, heard);
        }
        // Two that exchange sizes exchange data.
        (_, 2) | (Doubt::Calls, ..=DIRECT_MAX_RANKS) => _ = hear_of_all(builder, world),
        _ => {
            builder.barrier();
            confirm(builder, world);
        }
    }
}

/// Before all else, a rank sends an empty message to every rank that it sends no data to: no rank waits for data to come and
/// to be answered. Returns how many it sends, and how many it receives behind all else.
fn hear_of_all(builder: &mut Builder, world: &Group) -> (usize, usize) {
    let silent: Vec<_> = others(world).filter(|to| !builder.sends_to(*to)).collect();
    let unheard: Vec<_> = others(world).filter(|from| !builder.receives_from(*from)).collect();
    let numbers = (silent.len(), unheard.len());
    builder.put_first(silent.into_iter().map(|to| Action::Send { to, from: Slice::empty() }));
    for from in unheard {
        builder.push(Action::Recv { from, into: Slice::empty() });
    }
    numbers
}

/// Few ranks, which all come here at the same time, signal each other; for more a barrier takes fewer messages.
pub(super) fn confirm(builder: &mut Builder, world: &Group) {
    if world.size() > DIRECT_MAX_RANKS {
        return dissemination::barrier(builder, world);
    }
    for to in others(world) {
        builder.push(Action::Send { to, from: Slice::empty() });
    }
    for from in others(world) {
        builder.push(Action::Recv { from, into: Slice::empty() });
    }
}

fn others(world: &Group) -> impl Iterator<Item = Rank> {
    (1..world.size()).map(|step| world.rank(world.me() + step))
}
