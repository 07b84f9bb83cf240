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

/// Sends block r of `from`, whose blocks follow each other, to position r, and receives position r's block into block r of `into`.
pub fn all_to_all(builder: &mut Builder, setting: &Setting<'_>, from: Slice, into: Slice) {
    let hosts = setting.topo.hosts();
    let home = setting.topo.host_of(setting.me);
    let local = hosts[home].len();
    if hosts.len() == 1 || local == 1 || hosts.iter().any(|ranks| ranks.len() != local) {
        return exchange(builder, &setting.world(), setting, from, into);
    }
    let len = from.len / setting.topo.size();
    let neighbours = Group::new(hosts[home].clone(), setting.me);
    let place = neighbours.me();
    let across = Group::new(hosts.iter().map(|ranks| ranks[place]).collect(), setting.me);
    let [outer, inner] = [hosts.len(), local];
    // By place, and by host within it: first those for the place at any host, then those from the place of this host.
    let [sent, received] = [from; 2].map(|like| builder.beside(like, from.len));
    for to in 0..inner {
        for (host, ranks) in hosts.iter().enumerate() {
            let block = blocks(from, ranks[to].index(), 1, len);
            builder.push(Action::Copy { from: block, into: blocks(sent, to * outer + host, 1, len) });
        }
    }
    exchange(builder, &neighbours, setting, sent, received);
    // By host, and by place within it.
    let [outward, inward] = [from; 2].map(|like| builder.beside(like, from.len));
    for of in 0..inner {
        for host in 0..outer {
            let block = blocks(received, of * outer + host, 1, len);
            builder.push(Action::Copy { from: block, into: blocks(outward, host * inner + of, 1, len) });
        }
    }
    exchange(builder, &across, setting, outward, inward);
    for (host, ranks) in hosts.iter().enumerate() {
        for (of, rank) in ranks.iter().enumerate() {
            let block = blocks(inward, host * inner + of, 1, len);
            builder.push(Action::Copy { from: block, into: blocks(into, rank.index(), 1, len) });
        }
    }
}

/// The same among the members of a group, by Bruck's algorithm where that pays.
fn exchange(builder: &mut Builder, group: &Group, setting: &Setting<'_>, from: Slice, into: Slice) {
    let size = group.size();
    let len = from.len / size;
    if size > DIRECT_MAX_RANKS && len * setting.bytes_in(from.space) <= BLOCK_MAX_BYTES {
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
        // The runs of blocks whose numbers have this bit.
        let runs: Vec<_> = (step..size).step_by(2 * step).map(|first| (first, step.min(size - first))).collect();
        let all: usize = runs.iter().map(|(_, count)| count).sum();
        let [packed, coming] = [packed, coming].map(|slice| slice.part(0, all * len));
        let mut copies = Vec::new();
        let mut at = 0;
        for (first, count) in runs {
            builder.push(Action::Copy { from: blocks(held, first, count, len), into: blocks(packed, at, count, len) });
            copies.push(Action::Copy { from: blocks(coming, at, count, len), into: blocks(held, first, count, len) });
            at += count;
        }
        builder.push(Action::Send { to, from: packed });
        builder.push(Action::Recv { from, into: coming });
        for copy in copies {
            builder.push(copy);
        }
        step *= 2;
    }
    // Block i has come from the rank i positions before.
    for number in 0..size {
        let block = blocks(held, number, 1, len);
        builder.push(Action::Copy { from: block, into: blocks(into, (me + size - number) % size, 1, len) });
    }
}

/// So many blocks of `len` elements that follow each other.
fn blocks(all: Slice, first: usize, count: usize, len: usize) -> Slice {
    all.part(first * len, count * len)
}

/// Up to this size of a block, a message costs more than passing the bytes of others on.
const BLOCK_MAX_BYTES: usize = 1024;
