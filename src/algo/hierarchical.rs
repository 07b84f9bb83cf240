//! Compositions for several hosts: what can stay inside a host does, and between hosts each byte goes once.
//!
//! The idea of leaders is that of Karonis et al., "Exploiting hierarchy in parallel computer networks to optimize
//! collective operation performance", 2000; the striped all_reduce, in which every local rank is the leader of its
//! piece, is what NCCL and Horovod call hierarchical all-reduce. An all_gather in which all ranks of a host take a part of what
//! goes between hosts, and pass it on as it comes, is that of Kandalla et al., "Designing multi-leader-based allgather algorithms
//! for multi-core clusters", 2009.

use crate::algo::collective::{Chunking, DIRECT_MAX_RANKS, Setting};
use crate::algo::group::{Group, chunks, pieces};
use crate::algo::{binomial, bruck, chain, direct, halving_doubling, ring, van_de_geijn};
use crate::schedule::{Action, Builder, Slice, Space};
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

    /// The ranks of this rank's host.
    fn ranks(&self) -> &'a [Rank] {
        &self.setting.topo.hosts()[self.setting.topo.host_of(self.setting.me)]
    }

    /// The other hosts' ranks, from the next host on, around.
    fn after(&self) -> impl Iterator<Item = &'a [Rank]> {
        let (hosts, home) = (self.setting.topo.hosts(), self.setting.topo.host_of(self.setting.me));
        (1..hosts.len()).map(move |step| hosts[(home + step) % hosts.len()].as_slice())
    }

    /// The same from the host before on, backwards.
    fn before(&self) -> impl Iterator<Item = &'a [Rank]> {
        let (hosts, home) = (self.setting.topo.hosts(), self.setting.topo.host_of(self.setting.me));
        (1..hosts.len()).map(move |step| hosts[(home + hosts.len() - step) % hosts.len()].as_slice())
    }

    /// The rank of every host at this rank's place there. Each host has as many.
    fn across(&self) -> Group {
        let place = self.local.me();
        Group::new(self.setting.topo.hosts().iter().map(|ranks| ranks[place]).collect(), self.setting.me)
    }

    /// Whether every host has as many ranks.
    fn are_alike(&self) -> bool {
        self.setting.topo.hosts().iter().all(|ranks| ranks.len() == self.local.size())
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
    if hosts.are_alike() {
        let chunk = setting.chunk_to_fold(setting.bytes_in(data.space), data.len, size - 1);
        let me = hosts.local.me();
        let stripes = pieces(data, size);
        direct::reduce_scatter(builder, &hosts.local, &stripes, stripes[me], chunk);
        builder.outward();
        all_reduce_across(builder, &hosts.across(), setting, stripes[me], chunk);
        direct::all_gather(builder, &hosts.local, stripes[me], &stripes, chunk);
    } else {
        let chunk = setting.chunk_of(data);
        let leaders = hosts.leaders(Rank(0));
        let leader = hosts.leader(&leaders);
        binomial::reduce(builder, &hosts.local, leader, data, chunk);
        builder.outward();
        if let Some(group) = hosts.leading(&leaders) {
            all_reduce_across(builder, &group, setting, data, chunk);
        }
        binomial::broadcast(builder, &hosts.local, leader, data, chunk);
    }
}

/// A piece at a time, so that what comes before and after within each host is done to other pieces meanwhile.
fn all_reduce_across(builder: &mut Builder, group: &Group, setting: &Setting<'_>, data: Slice, chunk: usize) {
    for part in chunks(data, chunk) {
        if part.len * setting.bytes_in(part.space) <= DOUBLING_MAX_BYTES {
            halving_doubling::all_reduce_doubling(builder, group, part);
        } else {
            halving_doubling::all_reduce_halving(builder, group, part);
        }
    }
}

/// The root's `data` goes to everyone's `data`.
pub fn broadcast(builder: &mut Builder, setting: &Setting<'_>, root: Rank, data: Slice) {
    let hosts = Hosts::new(setting);
    let is_long = is_long(setting, data.len);
    if is_long && hosts.are_alike() {
        return broadcast_by_stripes(builder, &hosts, root, data);
    }
    let leaders = hosts.leaders(root);
    let chunk = setting.chunk_of(data);
    if let Some(group) = hosts.leading(&leaders) {
        if is_long {
            broadcast_across(builder, &group, setting, root, data, data.len);
        } else {
            binomial::broadcast(builder, &group, root, data, chunk);
        }
    }
    binomial::broadcast(builder, &hosts.local, hosts.leader(&leaders), data, chunk);
}

/// The root gives each other rank of its host a stripe. The ranks with the same stripe pass it on between hosts, and the ranks of
/// a host give each other theirs as they come. The root sends all data once within its host, hence it has no stripe itself.
fn broadcast_by_stripes(builder: &mut Builder, hosts: &Hosts<'_>, root: Rank, data: Slice) {
    let Stripes { home, place, stripes } = Stripes::of(hosts, root, data);
    let (setting, local) = (hosts.setting, &hosts.local);
    let (size, me) = (local.size(), local.me());
    let chunk = setting.chunk_of(data);
    if setting.me == root {
        // A piece of each stripe in turn, so that all of them are on their way at the same time. The first stripe is the longest.
        for index in 0..chunks(stripes[(place + 1) % size], chunk).count() {
            for to in (1..size).map(|step| (place + step) % size) {
                if let Some(from) = chunks(stripes[to], chunk).nth(index) {
                    builder.push(Action::Send { to: local.rank(to), from });
                }
            }
        }
        return;
    }
    if me != place {
        if setting.topo.same_host(setting.me, root) {
            direct::receive_in_chunks(builder, root, stripes[me], chunk);
        }
        broadcast_across(builder, &hosts.across(), setting, home[me], stripes[me], data.len);
        for from in chunks(stripes[me], chunk) {
            for to in (1..size).map(|step| local.rank(me + step)).filter(|to| *to != root) {
                builder.push(Action::Send { to, from });
            }
        }
    }
    for from in (1..size).map(|step| (me + size - step) % size).filter(|from| *from != place) {
        direct::receive_in_chunks(builder, local.rank(from), stripes[from], chunk);
    }
}

/// A long `data` goes to one rank of every host, of which others may have other stripes of the `total` elements.
fn broadcast_across(
    builder: &mut Builder,
    group: &Group,
    setting: &Setting<'_>,
    root: Rank,
    data: Slice,
    total: usize,
) {
    if is_longer(setting, total, (group.size() - 1).saturating_mul(CHAIN_BROADCAST_BYTES_A_HOST)) {
        chain::broadcast(builder, group, root, data, setting.chunk_of(data));
    } else {
        van_de_geijn::broadcast(builder, group, root, data, setting.chunk_of(data));
    }
}

/// Whether a reduce of so many elements goes by [`reduce_by_stripes`].
pub fn reduces_by_stripes(setting: &Setting<'_>, count: usize) -> bool {
    is_long(setting, count) && Hosts::new(setting).are_alike()
}

/// Everyone's `data` is combined into the root's; on other ranks `data` ends undefined.
pub fn reduce(builder: &mut Builder, setting: &Setting<'_>, root: Rank, data: Slice) {
    let hosts = Hosts::new(setting);
    let leaders = hosts.leaders(root);
    let chunk = setting.chunk_of(data);
    binomial::reduce(builder, &hosts.local, hosts.leader(&leaders), data, chunk);
    if let Some(group) = hosts.leading(&leaders) {
        if is_long(setting, data.len) {
            reduce_across(builder, &group, setting, root, data, data.len);
        } else {
            binomial::reduce(builder, &group, root, data, chunk);
        }
    }
}

/// As [`reduce`], where every host has as many ranks and `data` is the input or what may be overwritten: each host combines every
/// stripe on one of its ranks, those with the same stripe combine it on the root's host, and the root gathers the stripes. It
/// receives all data once within its host for that, hence it has no stripe itself.
pub fn reduce_by_stripes(builder: &mut Builder, setting: &Setting<'_>, root: Rank, data: Slice) {
    let hosts = Hosts::new(setting);
    let Stripes { home, place, stripes } = Stripes::of(&hosts, root, data);
    let (size, me) = (hosts.local.size(), hosts.local.me());
    let own = match data.space {
        Space::Input => builder.beside(data, stripes[me].len),
        _ => stripes[me],
    };
    let chunk = setting.chunk_of(data);
    direct::reduce_scatter(builder, &hosts.local, &stripes, own, chunk);
    if me != place {
        reduce_across(builder, &hosts.across(), setting, home[me], own, data.len);
    }
    if setting.me == root {
        for from in (1..size).map(|step| (me + size - step) % size) {
            direct::receive_in_chunks(builder, hosts.local.rank(from), stripes[from], chunk);
        }
    } else if setting.topo.same_host(setting.me, root) {
        direct::send_in_chunks(builder, root, own, chunk);
    }
}

/// As [`broadcast_across`], for a reduce.
fn reduce_across(builder: &mut Builder, group: &Group, setting: &Setting<'_>, root: Rank, data: Slice, total: usize) {
    if is_longer(setting, total, (group.size() - 1).saturating_mul(CHAIN_REDUCE_BYTES_A_HOST)) {
        chain::reduce(builder, group, root, data, setting.chunk_of(data));
    } else {
        halving_doubling::reduce_halving(builder, group, root, data, setting.chunk_of(data));
    }
}

/// Whether the length of a broadcast or reduce of `count` elements counts more than the number of its rounds. Of two ranks on each
/// of two hosts nobody sends twice anyway, and what runs a schedule whole cuts the collective itself into what is short.
fn is_long(setting: &Setting<'_>, count: usize) -> bool {
    setting.chunking == Chunking::Chunks && setting.topo.size() > 4 && is_longer(setting, count, BINOMIAL_MAX_BYTES)
}

/// Whether `count` elements have more than `bytes`.
fn is_longer(setting: &Setting<'_>, count: usize, bytes: usize) -> bool {
    count.saturating_mul(setting.element) > bytes
}

/// Stripes of data, one for each place on a host but the root's, where every host has as many ranks.
struct Stripes<'a> {
    /// The ranks of the root's host.
    home: &'a [Rank],
    /// The root's place there.
    place: usize,
    /// By place; that at the root's is empty.
    stripes: Vec<Slice>,
}

impl<'a> Stripes<'a> {
    fn of(hosts: &Hosts<'a>, root: Rank, data: Slice) -> Stripes<'a> {
        let topo = hosts.setting.topo;
        let home = &topo.hosts()[topo.host_of(root)];
        let place = home.iter().position(|rank| *rank == root).expect("the root is on its host");
        let mut stripes = pieces(data, home.len() - 1);
        stripes.push(data.part(data.len, 0));
        stripes.rotate_right(place + 1);
        Stripes { home, place, stripes }
    }
}

/// Combines everyone's block r into `into` of rank r, where every host has as many ranks. On each host, the rank at the place
/// of r there combines its host's blocks r, so that between two hosts a block goes once.
pub fn reduce_scatter(builder: &mut Builder, setting: &Setting<'_>, blocks: &[Slice], into: Slice) {
    let hosts = Hosts::new(setting);
    let (me, home) = (hosts.local.me(), setting.topo.host_of(setting.me));
    let total: usize = blocks.iter().map(|block| block.len).sum();
    let chunk = setting.chunk_to_fold(setting.bytes_in(into.space), total, hosts.local.size() - 1);
    let longest = setting.topo.hosts().iter().map(|ranks| blocks[ranks[me].index()].len).max().unwrap_or(0);
    let lanes = direct::lanes_to_fold(builder, &hosts.local, into, longest, chunk);
    let mut of_hosts = vec![into; setting.topo.hosts().len()];
    // Each host begins with the blocks of the next one, so that not all send to the same host at first.
    for (host, ranks) in setting.topo.hosts().iter().enumerate().cycle().skip(home + 1).take(of_hosts.len()) {
        let blocks: Vec<Slice> = ranks.iter().map(|rank| blocks[rank.index()]).collect();
        if host != home {
            of_hosts[host] = builder.beside(into, blocks[me].len);
        }
        direct::reduce_scatter_by(builder, &hosts.local, &blocks, of_hosts[host], chunk, lanes);
    }
    builder.outward();
    let across = hosts.across();
    if across.size() <= DIRECT_MAX_RANKS {
        direct::reduce_scatter(builder, &across, &of_hosts, into, chunk);
    } else {
        ring::reduce_scatter(builder, &across, &of_hosts, chunk);
    }
}

/// Spreads `blocks`, one a rank, which follow each other and of which this rank's is in place. What decides how is that more
/// messages between hosts cost time, and fewer leave more to pass on within a host after the last of them has come.
pub fn all_gather(builder: &mut Builder, setting: &Setting<'_>, blocks: &[Slice]) {
    let hosts = Hosts::new(setting);
    let total: usize = blocks.iter().map(|block| block.len).sum();
    let (bytes, count) = (total.saturating_mul(setting.element), setting.topo.hosts().len());
    let messages = (count - 1).saturating_mul(MESSAGE_BYTES);
    if bytes / count > messages {
        return all_gather_by_blocks(builder, &hosts, blocks, setting.chunk(total));
    }
    let order = HostOrder::begin(builder, &hosts, blocks, total);
    if bytes.saturating_mul(blocks.len()) / count <= messages {
        all_gather_by_leaders(builder, &hosts, &order);
    } else {
        all_gather_by_hosts(builder, &hosts, &order, setting.chunk(total));
    }
    order.end(builder, setting.me, blocks);
}

/// Each block goes by itself to one rank of every other host, at the same place there if there is one, and from that rank to the
/// other ranks of its host, while others are still on their way.
fn all_gather_by_blocks(builder: &mut Builder, hosts: &Hosts<'_>, blocks: &[Slice], chunk: usize) {
    let (setting, me) = (hosts.setting, hosts.local.me());
    for ranks in hosts.after() {
        direct::send_in_chunks(builder, ranks[me % ranks.len()], blocks[setting.me.index()], chunk);
    }
    let local: Vec<Slice> = hosts.ranks().iter().map(|rank| blocks[rank.index()]).collect();
    direct::all_gather(builder, &hosts.local, local[me], &local, chunk);
    builder.outward();
    for ranks in hosts.before() {
        // Where steps are taken in order, ranks of a host would otherwise wait for each other before they pass on.
        for (place, rank) in ranks.iter().enumerate().filter(|(place, _)| place % hosts.local.size() == me) {
            pass_on(builder, &hosts.local, ranks[place], blocks[rank.index()], chunk);
        }
        for (place, rank) in ranks.iter().enumerate().filter(|(place, _)| place % hosts.local.size() != me) {
            direct::receive_in_chunks(builder, hosts.local.rank(place), blocks[rank.index()], chunk);
        }
    }
}

/// All blocks of a host go together to one rank of every other host, which passes them on to the other ranks of its host. The ranks
/// of a host take turns at it.
fn all_gather_by_hosts(builder: &mut Builder, hosts: &Hosts<'_>, order: &HostOrder, chunk: usize) {
    let (topo, me) = (hosts.setting.topo, hosts.local.me());
    let local: Vec<Slice> = hosts.ranks().iter().map(|rank| order.blocks[rank.index()]).collect();
    direct::all_gather(builder, &hosts.local, local[me], &local, chunk);
    builder.outward();
    let home = topo.host_of(hosts.setting.me);
    for (turn, ranks) in hosts.after().enumerate().filter(|(turn, _)| turn % hosts.local.size() == me) {
        direct::send_in_chunks(builder, ranks[turn % ranks.len()], order.of_hosts[home], chunk);
    }
    for (turn, ranks) in hosts.before().enumerate() {
        let of_host = order.of_hosts[topo.host_of(ranks[0])];
        if turn % hosts.local.size() == me {
            pass_on(builder, &hosts.local, ranks[turn % ranks.len()], of_host, chunk);
        } else {
            direct::receive_in_chunks(builder, hosts.local.rank(turn), of_host, chunk);
        }
    }
}

/// Receives `data` and sends each piece to the other members of `local` as it comes.
fn pass_on(builder: &mut Builder, local: &Group, from: Rank, data: Slice, chunk: usize) {
    for part in chunks(data, chunk) {
        builder.push(Action::Recv { from, into: part });
        for step in 1..local.size() {
            builder.push(Action::Send { to: local.rank(local.me() + step), from: part });
        }
    }
}

/// In the fewest messages: each leader gathers the blocks of its host, the leaders exchange what they have, and what all have
/// goes to the ranks of each host in one piece.
fn all_gather_by_leaders(builder: &mut Builder, hosts: &Hosts<'_>, order: &HostOrder) {
    let me = hosts.setting.me;
    let leaders = hosts.leaders(Rank(0));
    let leader = hosts.leader(&leaders);
    if me != leader {
        builder.push(Action::Send { to: leader, from: order.blocks[me.index()] });
        builder.outward();
    }
    if let Some(group) = hosts.leading(&leaders) {
        for &from in hosts.ranks().iter().filter(|rank| **rank != me) {
            builder.push(Action::Recv { from, into: order.blocks[from.index()] });
        }
        builder.outward();
        bruck::all_gather(builder, &group, order.of_hosts[group.me()], &order.of_hosts);
    }
    binomial::broadcast(builder, &hosts.local, leader, order.all, order.all.len.max(1));
}

/// The blocks of all ranks in the order of the hosts, so that those of a host follow each other.
struct HostOrder {
    all: Slice,
    of_hosts: Vec<Slice>,
    /// By rank.
    blocks: Vec<Slice>,
}

impl HostOrder {
    /// Where the ranks of each host follow each other, `blocks` are in order; elsewhere they get other memory, with this rank's
    /// block in place.
    fn begin(builder: &mut Builder, hosts: &Hosts<'_>, blocks: &[Slice], total: usize) -> HostOrder {
        let (topo, me) = (hosts.setting.topo, hosts.setting.me.index());
        let is_ordered = topo.hosts().iter().flatten().is_sorted();
        let all = if is_ordered {
            Slice::new(blocks[0].space, blocks[0].offset, total)
        } else {
            builder.beside(blocks[0], total)
        };
        let mut order = HostOrder { all, of_hosts: Vec::new(), blocks: blocks.to_vec() };
        let mut end = 0;
        for ranks in topo.hosts() {
            let begin = end;
            for rank in ranks {
                let len = blocks[rank.index()].len;
                order.blocks[rank.index()] = all.part(end, len);
                end += len;
            }
            order.of_hosts.push(all.part(begin, end - begin));
        }
        if order.blocks[me] != blocks[me] {
            builder.push(Action::Copy { from: blocks[me], into: order.blocks[me] });
        }
        order
    }

    /// Puts all blocks but this rank's to where they belong.
    fn end(self, builder: &mut Builder, me: Rank, blocks: &[Slice]) {
        let others = (0..blocks.len()).filter(|rank| *rank != me.index());
        for (from, into) in others.map(|rank| (self.blocks[rank], blocks[rank])).filter(|(from, into)| from != into) {
            builder.push(Action::Copy { from, into });
        }
    }
}

/// Up to this size, the number of messages between hosts counts more than their length.
const DOUBLING_MAX_BYTES: usize = 16 * 1024;

/// Up to this size of a broadcast or reduce, the fewest rounds are the fastest.
const BINOMIAL_MAX_BYTES: usize = 2 * 1024 * 1024;

/// From so much data a host on, the time until the first piece has gone along a chain of hosts is less than what a chain saves
/// because each host sends all data once.
const CHAIN_BROADCAST_BYTES_A_HOST: usize = 128 * 1024;
const CHAIN_REDUCE_BYTES_A_HOST: usize = 1024 * 1024;

/// About as many bytes within a host take as long as a message between hosts.
const MESSAGE_BYTES: usize = 10 * 1024;
