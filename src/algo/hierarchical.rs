//! Compositions for several hosts: what can stay inside a host does, and between hosts each byte goes once.
//!
//! The idea of leaders is that of Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize
//! collective operation performance", 2000; the striped all_reduce, in which every local rank is the leader of its
//! piece, is what NCCL and Horovod call hierarchical all-reduce.

use crate::algo::bruck::{self, BRUCK_MAX_BYTES};
use crate::algo::collective::{DIRECT_MAX_RANKS, Setting};
use crate::algo::group::{Group, chunks, pieces};
use crate::algo::{binomial, direct, halving_doubling, ring};
use crate::schedule::{Action, Builder, Slice};
use crate::types::Rank;

/// A rank's view of the hosts.
struct Hosts<'a> {
    setting: &'a Setting<'a>,
    local: Group,
}

impl<'a> Hosts<'a> {
    fn new(setting: &'a Setting<'a>) -> Self {
        let host = setting.topo.host_of(setting.me);
        let local = Group::new(setting.topo.hosts()[host].clone(), setting.me);
        Hosts { setting, local }
    }

    /// The rank of every host at this rank's place there. Each host has as many.
    fn across(&self) -> Group {
        let place = self.local.me();
        Group::new(self.setting.topo.hosts().iter().map(|ranks| ranks[place]).collect(), self.setting.me)
    }

    /// One rank of every host: `root` on its own host, the first elsewhere.
    fn leaders(&self, root: Rank) -> Vec<Rank> {
        let topo = self.setting.topo;
        let leader = |ranks: &Vec<Rank>| if topo.same_host(ranks[0], root) { root } else { ranks[0] };
        topo.hosts().iter().map(leader).collect()
    }

    /// The leaders as a group, on a leader.
    fn leading(&self, leaders: &[Rank]) -> Option<Group> {
        leaders.contains(&self.setting.me).then(|| Group::new(leaders.to_vec(), self.setting.me))
    }

    /// This rank's host's leader.
    fn leader(&self, leaders: &[Rank]) -> Rank {
        leaders[self.setting.topo.host_of(self.setting.me)]
    }
}

/// Combines everyone's `data` into everyone's `data`.
pub fn all_reduce(builder: &mut Builder, setting: &Setting<'_>, data: Slice) {
    let hosts = Hosts::new(setting);
    let size = hosts.local.size();
    let chunk = setting.chunk_of(data);
    if setting.topo.hosts().iter().all(|ranks| ranks.len() == size) {
        let me = hosts.local.me();
        let stripes = pieces(data, size);
        direct::reduce_scatter(builder, &hosts.local, &stripes, stripes[me], chunk);
        all_reduce_across(builder, &hosts.across(), setting, stripes[me]);
        direct::all_gather(builder, &hosts.local, stripes[me], &stripes, chunk);
    } else {
        let leaders = hosts.leaders(Rank(0));
        let leader = hosts.leader(&leaders);
        binomial::reduce(builder, &hosts.local, leader, data, chunk);
        if let Some(group) = hosts.leading(&leaders) {
            all_reduce_across(builder, &group, setting, data);
        }
        binomial::broadcast(builder, &hosts.local, leader, data, chunk);
    }
}

fn all_reduce_across(builder: &mut Builder, group: &Group, setting: &Setting<'_>, data: Slice) {
    if data.len * setting.bytes_in(data.space) <= DOUBLING_MAX_BYTES {
        halving_doubling::all_reduce_doubling(builder, group, data);
    } else {
        halving_doubling::all_reduce_halving(builder, group, data);
    }
}

/// The root's `data` goes to everyone's `data`.
pub fn broadcast(builder: &mut Builder, setting: &Setting<'_>, root: Rank, data: Slice) {
    let hosts = Hosts::new(setting);
    let leaders = hosts.leaders(root);
    let chunk = setting.chunk_of(data);
    if let Some(group) = hosts.leading(&leaders) {
        binomial::broadcast(builder, &group, root, data, chunk);
    }
    binomial::broadcast(builder, &hosts.local, hosts.leader(&leaders), data, chunk);
}

/// Everyone's `data` is combined into the root's; on other ranks `data` ends undefined.
pub fn reduce(builder: &mut Builder, setting: &Setting<'_>, root: Rank, data: Slice) {
    let hosts = Hosts::new(setting);
    let leaders = hosts.leaders(root);
    let chunk = setting.chunk_of(data);
    binomial::reduce(builder, &hosts.local, hosts.leader(&leaders), data, chunk);
    if let Some(group) = hosts.leading(&leaders) {
        binomial::reduce(builder, &group, root, data, chunk);
    }
}

/// Combines everyone's block r into `into` of rank r, where every host has as many ranks. On each host, the rank at the place
/// of r there combines its host's blocks r, so that between two hosts a block goes once.
pub fn reduce_scatter(builder: &mut Builder, setting: &Setting<'_>, blocks: &[Slice], into: Slice) {
    let hosts = Hosts::new(setting);
    let (me, home) = (hosts.local.me(), setting.topo.host_of(setting.me));
    let total: usize = blocks.iter().map(|block| block.len).sum();
    let chunk = setting.chunk_of_elements(setting.bytes_in(into.space), total);
    let mut of_hosts = Vec::new();
    for (host, ranks) in setting.topo.hosts().iter().enumerate() {
        let blocks: Vec<Slice> = ranks.iter().map(|rank| blocks[rank.index()]).collect();
        let into = if host == home { into } else { builder.beside(into, blocks[me].len) };
        direct::reduce_scatter(builder, &hosts.local, &blocks, into, chunk);
        of_hosts.push(into);
    }
    let across = hosts.across();
    if across.size() <= DIRECT_MAX_RANKS {
        direct::reduce_scatter(builder, &across, &of_hosts, into, chunk);
    } else {
        ring::reduce_scatter(builder, &across, &of_hosts, chunk);
    }
}

/// Spreads `blocks`, one a rank, which follow each other and of which this rank's is in place.
pub fn all_gather(builder: &mut Builder, setting: &Setting<'_>, blocks: &[Slice]) {
    let hosts = Hosts::new(setting);
    let leaders = hosts.leaders(Rank(0));
    let leader = hosts.leader(&leaders);
    let total: usize = blocks.iter().map(|block| block.len).sum();
    if total.saturating_mul(setting.element) <= BRUCK_MAX_BYTES {
        return all_gather_together(builder, &hosts, &leaders, blocks, total);
    }
    let chunk = setting.chunk(total);
    let of = |ranks: &[Rank]| -> Vec<Slice> { ranks.iter().map(|rank| blocks[rank.index()]).collect() };
    let home = setting.topo.host_of(setting.me);
    let local = of(&setting.topo.hosts()[home]);
    direct::all_gather(builder, &hosts.local, blocks[setting.me.index()], &local, chunk);
    for step in 1..leaders.len() {
        if setting.me != leader {
            break;
        }
        let to = leaders[(home + step) % leaders.len()];
        let from = (home + leaders.len() - step) % leaders.len();
        for slice in local.iter().flat_map(|block| chunks(*block, chunk)) {
            builder.push(Action::Send { to, from: slice });
        }
        for into in of(&setting.topo.hosts()[from]).into_iter().flat_map(|block| chunks(block, chunk)) {
            builder.push(Action::Recv { from: leaders[from], into });
        }
    }
    for step in 1..leaders.len() {
        let from = (home + leaders.len() - step) % leaders.len();
        for block in of(&setting.topo.hosts()[from]) {
            binomial::broadcast(builder, &hosts.local, leader, block, chunk);
        }
    }
}

/// The same in the fewest messages: each leader gathers the blocks of its host, the leaders exchange what they have, and what
/// all have goes to the ranks of each host in one piece.
fn all_gather_together(builder: &mut Builder, hosts: &Hosts<'_>, leaders: &[Rank], blocks: &[Slice], total: usize) {
    let (topo, me) = (hosts.setting.topo, hosts.setting.me);
    let leader = hosts.leader(leaders);
    let order = || topo.hosts().iter().flatten();
    // Where the ranks of each host follow each other, nothing has to be put in order.
    let is_ordered = order().is_sorted();
    let all = if is_ordered {
        Slice::new(blocks[0].space, blocks[0].offset, total)
    } else {
        builder.beside(blocks[0], total)
    };
    let mut end = 0;
    let mut take = |len| {
        end += len;
        all.part(end - len, len)
    };
    let length = |rank: &Rank| blocks[rank.index()].len;
    let of_hosts: Vec<Slice> = topo.hosts().iter().map(|ranks| take(ranks.iter().map(length).sum())).collect();
    let own = of_hosts[topo.host_of(me)];
    if me != leader {
        builder.push(Action::Send { to: leader, from: blocks[me.index()] });
    }
    if let Some(group) = hosts.leading(leaders) {
        let mut offset = 0;
        for rank in &topo.hosts()[topo.host_of(me)] {
            let into = own.part(offset, length(rank));
            offset += into.len;
            match *rank {
                rank if rank != me => _ = builder.push(Action::Recv { from: rank, into }),
                _ if is_ordered => {}
                _ => _ = builder.push(Action::Copy { from: blocks[me.index()], into }),
            }
        }
        bruck::all_gather(builder, &group, own, &of_hosts);
    }
    binomial::broadcast(builder, &hosts.local, leader, all, total.max(1));
    if !is_ordered {
        let mut offset = 0;
        for rank in order() {
            let into = blocks[rank.index()];
            builder.push(Action::Copy { from: all.part(offset, into.len), into });
            offset += into.len;
        }
    }
}

/// Up to this size, the number of messages between hosts counts more than their length.
const DOUBLING_MAX_BYTES: usize = 16 * 1024;
