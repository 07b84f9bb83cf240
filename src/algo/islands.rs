//! Compositions for ranks of which some are alike: among those a vendor's library moves data, which is the caller's matter, and
//! between the groups the engine. It is the striped composition of [`hierarchical`](super::hierarchical), with groups that
//! may differ in size: so the data are cut by their length, and what two groups exchange by both cuts.
//!
//! A rank among others that are alike waits for its caller at the steps [`BEGIN`], [`GATHERED`], [`SPREAD`] and [`END`]. Its output is
//! its [part](Islands::part_of) of the data, and behind that a word of each rank of its group, in the group's order, with what each
//! says of its library. Its caller fills its own word before the call, and finds all when it comes to [`BEGIN`]. A rank alone has all data
//! as in any other algorithm.
//!
//! All ranks have called the same before the first one comes to [`BEGIN`]: what a library is given then has all the ranks that
//! it waits for. Each rank of a group says when it has given the library its calls, so that one that does not is known by name; and when
//! all has ended well, before any other rank of the group takes the operation for ended.

use crate::algo::agreement;
use crate::algo::alike::{IslandCall, Islands};
use crate::algo::collective::{DIRECT_MAX_RANKS, Scaling, Setting};
use crate::algo::direct::Lanes;
use crate::algo::group::{Group, pieces};
use crate::algo::{binomial, bruck, direct, ring};
use crate::schedule::{Action, Builder, Slice, Space};
use crate::types::Rank;

/// The words of the group are there; the caller has its library begin.
pub const BEGIN: u32 = 0;
/// What the group has together is in its ranks' parts, in the engine's memory.
pub const GATHERED: u32 = 1;
/// The result is in the ranks' parts; the caller has its library spread them.
pub const SPREAD: u32 = 2;
/// The whole result is on the device.
pub const END: u32 = 3;

/// The bytes of a word.
pub const WORD: usize = 8;

/// How many elements of so many bytes a word takes.
pub fn word_len(element: usize) -> usize {
    WORD.div_ceil(element)
}

/// How many the words of a group of so many ranks take.
pub fn words_len(element: usize, ranks: usize) -> usize {
    word_len(element) * ranks
}

/// Appends a call of so many elements.
pub(super) fn append(
    builder: &mut Builder,
    setting: &Setting<'_>,
    (call, count): (IslandCall, usize),
    islands: &Islands,
) {
    let me = setting.me;
    let home = islands.group_of(me);
    let island = Group::new(islands.groups()[home].clone(), me);
    let own = islands.part_of(me, count);
    agreement::confirm(builder, &setting.world());
    let held = Slice::new(Space::Output, 0, own.len);
    // With the words, which are there where the part is empty: so what the caller does is one after the other.
    let all = Slice::new(Space::Output, 0, own.len + words_len(setting.element, island.size()));
    if island.size() == 1 {
        load(builder, setting, call, held);
    } else {
        share_words(builder, setting, &island, own.len);
        builder.barrier();
        builder.push(Action::Await { number: BEGIN, slice: all });
        say(builder, &island);
        builder.push(Action::Await { number: GATHERED, slice: all });
    }
    if islands.groups().len() > 1 {
        let mut runs = islands.runs(count);
        runs.retain(|(_, owners)| owners.contains(&me));
        let mut lanes = lanes_to_fold(builder, setting, call, &runs);
        for (run, owners) in runs {
            let data = held.part(run.offset - own.offset, run.len);
            exchange(builder, setting, (call, islands), owners, data, lanes);
            // The next run comes while this one is combined.
            lanes.iter_mut().for_each(|lanes| lanes.rotate_left(1));
        }
        if island.size() > 1 {
            builder.barrier();
            builder.push(Action::Await { number: SPREAD, slice: all });
            say(builder, &island);
            builder.push(Action::Await { number: END, slice: all });
        }
    }
    if island.size() > 1 {
        builder.barrier();
        agreement::confirm(builder, &island);
    }
}

/// What a rank alone brings.
fn load(builder: &mut Builder, setting: &Setting<'_>, call: IslandCall, into: Slice) {
    let brings = match call {
        IslandCall::AllReduce => true,
        IslandCall::Broadcast { root } => root == setting.me,
    };
    if brings {
        builder.push(Action::Copy { from: Slice::new(Space::Input, 0, into.len), into });
    }
    if setting.scaling == Scaling::Inputs {
        builder.push(Action::Scale { slice: into });
    }
}

/// Gives everyone of the group everyone's word.
fn share_words(builder: &mut Builder, setting: &Setting<'_>, island: &Group, part: usize) {
    let len = word_len(setting.element);
    let all = Slice::new(Space::Output, part, words_len(setting.element, island.size()));
    let words = pieces(all, island.size());
    let own = words[island.me()];
    if island.size() > DIRECT_MAX_RANKS {
        bruck::all_gather(builder, island, own, &words);
    } else {
        direct::all_gather(builder, island, own, &words, len);
    }
}

/// Says to the others of the group that this rank has come so far. Nothing waits for it but the end.
fn say(builder: &mut Builder, island: &Group) {
    let others = || (1..island.size()).map(|step| island.rank(island.me() + step));
    for to in others() {
        builder.push(Action::Send { to, from: Slice::empty() });
    }
    for from in others() {
        builder.push(Action::Recv { from, into: Slice::empty() });
    }
}

/// Memory for the chunks that are combined at once, enough for the longest of these runs: all of them use it. Nothing where no
/// run is combined in such memory.
fn lanes_to_fold(
    builder: &mut Builder,
    setting: &Setting<'_>,
    call: IslandCall,
    runs: &[(Slice, Vec<Rank>)],
) -> Option<Lanes> {
    let (run, owners) = runs.iter().max_by_key(|(run, _)| run.len)?;
    if call != IslandCall::AllReduce || owners.len() > DIRECT_MAX_RANKS {
        return None;
    }
    let longest = run.piece(0, owners.len());
    let owners = Group::new(owners.clone(), setting.me);
    Some(direct::lanes_to_fold(builder, &owners, longest, longest.len, chunk_to_fold(setting, *run, &owners)))
}

/// How many elements the pieces have that the owners of a run combine; the more, the longer it is.
fn chunk_to_fold(setting: &Setting<'_>, run: Slice, owners: &Group) -> usize {
    setting.chunk_to_fold(setting.bytes_in(run.space), run.len, owners.size() - 1)
}

/// Exchanges a run of the data between its owners, one of each group.
fn exchange(
    builder: &mut Builder,
    setting: &Setting<'_>,
    (call, islands): (IslandCall, &Islands),
    owners: Vec<Rank>,
    data: Slice,
    lanes: Option<Lanes>,
) {
    let chunk = setting.chunk_of(data);
    let root = match call {
        IslandCall::AllReduce => None,
        IslandCall::Broadcast { root } => Some(owners[islands.group_of(root)]),
    };
    let owners = Group::new(owners, setting.me);
    let is_small = owners.size() <= DIRECT_MAX_RANKS;
    match root {
        Some(root) if is_small => direct::broadcast(builder, &owners, root, data, chunk),
        Some(root) => binomial::broadcast(builder, &owners, root, data, chunk),
        None => {
            let stripes = pieces(data, owners.size());
            let own = stripes[owners.me()];
            if let Some(lanes) = lanes {
                let chunk = chunk_to_fold(setting, data, &owners);
                direct::reduce_scatter_by(builder, &owners, &stripes, own, chunk, lanes);
                direct::all_gather(builder, &owners, own, &stripes, chunk);
            } else {
                ring::reduce_scatter(builder, &owners, &stripes, chunk);
                ring::all_gather(builder, &owners, &stripes, chunk);
            }
        }
    }
}

#[cfg(test)]
mod tests;
