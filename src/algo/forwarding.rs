//! All_to_alls in which ranks pass on what is for others, so that each sends few messages. All blocks have the same length.
//!
//! Among ranks: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
//! message-passing systems", 1997. By hosts that have as many ranks each: first the ranks of a host exchange what is for the ranks at
//! the same places of all hosts, then those at the same places do: Kumar, Mamidala and Panda, "Scaling alltoall collective on multi-core
//! systems", 2008.

use crate::algo::collective::{DIRECT_MAX_RANKS, Setting};
use crate::algo::direct;
use crate::algo::group::{Group, pieces};
use crate::schedule::{Action, Builder, Slice};
use crate::types::Rank;

/// Sends block r of `from`, whose blocks follow each other, to position r, and receives position r's block into block r of `into`.
pub fn all_to_all(builder: &mut Builder, setting: &Setting<'_>, from: Slice, into: Slice) {
    if !goes_by_hosts(setting) {
        return exchange(builder, &setting.world(), setting, bruck_max_bytes(setting), (from, into));
    }
    let hosts = setting.topo.hosts();
    let neighbours = Group::new(hosts[setting.topo.host_of(setting.me)].clone(), setting.me);
    let place = neighbours.me();
    let across = Group::new(hosts.iter().map(|ranks| ranks[place]).collect(), setting.me);
    let [outer, inner] = [hosts.len(), neighbours.size()];
    // By place, and by host within it: first those for the place at any host, then those from the place of this host.
    let [sent, received] = [from; 2].map(|like| builder.beside(like, from.len));
    let at_place = |to: usize| hosts.iter().map(move |ranks| ranks[to].index());
    let numbers: Vec<usize> = (0..inner).flat_map(at_place).collect();
    rearrange(builder, &numbers, from, sent, Apart::From);
    exchange(builder, &neighbours, setting, NEAR_BLOCK_MAX_BYTES, (sent, received));
    // By host, and by place within it.
    let [outward, inward] = [from; 2].map(|like| builder.beside(like, from.len));
    let by_host: Vec<usize> = (0..inner).flat_map(|of| (0..outer).map(move |host| host * inner + of)).collect();
    rearrange(builder, &by_host, received, outward, Apart::Into);
    exchange(builder, &across, setting, FAR_BLOCK_MAX_BYTES, (outward, inward));
    let numbers: Vec<usize> = hosts.iter().flatten().copied().map(Rank::index).collect();
    rearrange(builder, &numbers, inward, into, Apart::Into);
}

/// Whether blocks of so many elements are exchanged faster so than by a message to each rank.
pub(super) fn pays(setting: &Setting<'_>, count: usize) -> bool {
    let block = count.saturating_mul(setting.element);
    let held = block.saturating_mul(4 * setting.topo.size());
    block <= bruck_max_bytes(setting)
        || (goes_by_hosts(setting) && block <= HOSTS_BLOCK_MAX_BYTES && held <= setting.scratch.limit())
}

/// Whether there are several hosts with as many ranks each, more than one.
fn goes_by_hosts(setting: &Setting<'_>) -> bool {
    let hosts = setting.topo.hosts();
    let local = hosts[0].len();
    hosts.len() > 1 && local > 1 && hosts.iter().all(|ranks| ranks.len() == local)
}

/// How long blocks may be that all ranks of the world pass on.
fn bruck_max_bytes(setting: &Setting<'_>) -> usize {
    let are_apart = setting.topo.hosts().len() == setting.topo.size();
    if are_apart { FAR_BLOCK_MAX_BYTES } else { NEAR_BLOCK_MAX_BYTES }
}

/// The same among the members of a group, by Bruck's algorithm where blocks are that short and there are many.
fn exchange(
    builder: &mut Builder,
    group: &Group,
    setting: &Setting<'_>,
    bruck_max_bytes: usize,
    (from, into): (Slice, Slice),
) {
    let size = group.size();
    let len = from.len / size;
    if size > DIRECT_MAX_RANKS && len * setting.bytes_in(from.space) <= bruck_max_bytes {
        return bruck(builder, group, from, into);
    }
    direct::all_to_all(builder, group, &pieces(from, size), &pieces(into, size), |count| {
        setting.delimited_chunk(count)
    });
}

/// In each of ⌈log₂ n⌉ rounds a rank sends the blocks whose way has the round's bit so many positions on.
fn bruck(builder: &mut Builder, group: &Group, from: Slice, into: Slice) {
    let (size, me) = (group.size(), group.me());
    let len = from.len / size;
    // Block i is on its way to the rank i positions from where it is.
    let held = builder.beside(from, from.len);
    builder.push(Action::Copy { from: blocks(from, me, size - me, len), into: blocks(held, 0, size - me, len) });
    if me > 0 {
        builder.push(Action::Copy { from: blocks(from, 0, me, len), into: blocks(held, size - me, me, len) });
    }
    let [packed, coming] = [from; 2].map(|like| builder.beside(like, size.div_ceil(2) * len));
    let mut step = 1;
    while step < size {
        let (to, from) = (group.rank(me + step), group.rank(me + size - step));
        // The runs of blocks whose numbers have this bit, of which the last may be shorter.
        let whole = size / (2 * step);
        let rest = (size % (2 * step)).saturating_sub(step);
        let span = if whole > 0 { (2 * whole - 1) * step } else { 0 };
        let runs = [(step, span, whole), (step * (2 * whole + 1), rest, usize::from(rest > 0))];
        let all = whole * step + rest;
        let [packed, coming] = [packed, coming].map(|slice| slice.part(0, all * len));
        let apart = runs.map(|(first, span, _)| if span > 0 { blocks(held, first, span, len) } else { Slice::empty() });
        let dense = |slice| [blocks(slice, 0, whole * step, len), blocks(slice, whole * step, rest, len)];
        for ((from, into), (.., count)) in apart.into_iter().zip(dense(packed)).zip(runs) {
            copy_blocks(builder, from, into, count, false);
        }
        builder.push(Action::Send { to, from: packed });
        builder.push(Action::Recv { from, into: coming });
        for ((from, into), (.., count)) in dense(coming).into_iter().zip(apart).zip(runs) {
            copy_blocks(builder, from, into, count, false);
        }
        step *= 2;
    }
    // Block i has come from the rank i positions before.
    copy_blocks(builder, blocks(held, 0, me + 1, len), blocks(into, 0, me + 1, len), me + 1, true);
    let rest = size - me - 1;
    copy_blocks(builder, blocks(held, me + 1, rest, len), blocks(into, me + 1, rest, len), rest, true);
}

/// Whose blocks are those with the given numbers. Those of the other slice follow each other.
#[derive(Clone, Copy)]
enum Apart {
    From,
    Into,
}

/// Copies all blocks of a slice to other places, by as few steps as blocks that lie as far from each other allow.
fn rearrange(builder: &mut Builder, numbers: &[usize], from: Slice, into: Slice, apart: Apart) {
    let len = from.len / numbers.len();
    let mut at = 0;
    while at < numbers.len() {
        let rest = &numbers[at..];
        let distance = rest.get(1).map_or(1, |next| next.wrapping_sub(rest[0]));
        let follow = rest.windows(2).take_while(|two| two[1].wrapping_sub(two[0]) == distance);
        // A number that is smaller than the one before begins anew.
        let count = if distance < numbers.len() { 1 + follow.count() } else { 1 };
        let span = 1 + (rest[count - 1] - rest[0]);
        let (dense, spread) = (|slice| blocks(slice, at, count, len), |slice| blocks(slice, rest[0], span, len));
        match apart {
            Apart::From => copy_blocks(builder, spread(from), dense(into), count, false),
            Apart::Into => copy_blocks(builder, dense(from), spread(into), count, false),
        }
        at += count;
    }
}

/// Copies so many blocks, as [`Action::CopyBlocks`].
fn copy_blocks(builder: &mut Builder, from: Slice, into: Slice, count: usize, is_reversed: bool) {
    let is_run = count == 1 || (!is_reversed && from.len == into.len);
    match count {
        0 => {}
        _ if is_run => _ = builder.push(Action::Copy { from, into }),
        _ => _ = builder.push(Action::CopyBlocks { from, into, count: count as u32, is_reversed }),
    }
}

/// So many blocks of `len` elements that follow each other.
fn blocks(all: Slice, first: usize, count: usize, len: usize) -> Slice {
    all.part(first * len, count * len)
}

/// Up to these sizes of a block, a message costs more than passing the bytes of others on: within a host, and between hosts.
const NEAR_BLOCK_MAX_BYTES: usize = 1024;
const FAR_BLOCK_MAX_BYTES: usize = 4096;

/// The same where ranks of a host send what they all have for another host together.
const HOSTS_BLOCK_MAX_BYTES: usize = 16 * 1024;
