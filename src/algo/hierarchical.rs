//! Compositions for several hosts: what can stay inside a host does, and between hosts each byte goes once.
//!
//! The idea of leaders is that of Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize
//! collective operation performance", 2000; the striped all_reduce, in which every local rank is the leader of its
//! piece, is what NCCL and Horovod call hierarchical all-reduce.

use crate::algo::collective::Setting;
use crate::algo::group::{Group, chunks, pieces};
use crate::algo::{binomial, direct, halving_doubling};
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
        let across = setting.topo.hosts().iter().map(|ranks| ranks[me]).collect();
        all_reduce_across(builder, &Group::new(across, setting.me), setting, stripes[me]);
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

/// Spreads `blocks`, one a rank, of which this rank's is in place.
pub fn all_gather(builder: &mut Builder, setting: &Setting<'_>, blocks: &[Slice]) {
    let hosts = Hosts::new(setting);
    let leaders = hosts.leaders(Rank(0));
    let leader = hosts.leader(&leaders);
    let total: usize = blocks.iter().map(|block| block.len).sum();
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

/// Up to this size, the number of messages between hosts counts more than their length.
const DOUBLING_MAX_BYTES: usize = 16 * 1024;
