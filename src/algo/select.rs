//! The table of algorithms. The first row that can do a collective and is preferred for its size and world is taken.

use crate::algo::collective::{Chunking, Collective, DIRECT_MAX_RANKS, Scaling, ScratchLimit, Setting, schedule};
use crate::algo::group::{Group, blocks, pieces};
use crate::algo::{
    agreement, binomial, bounded, bruck, chain, direct, dissemination, forwarding, halving_doubling, hierarchical,
    islands, put, ring, van_de_geijn,
};
use crate::counts::Counts;
use crate::schedule::{Action, Builder, Schedule, Slice, Space};
use crate::topo::Topology;
use crate::types::Rank;

/// A row: what it is, what it can do, when it is the best.
struct Row {
    name: &'static str,
    can: fn(&Collective, &Setting<'_>) -> bool,
    prefer: fn(&Collective, &Setting<'_>) -> bool,
    /// The most elements that a rank copies, on whichever rank.
    copies: fn(&Collective, &Setting<'_>) -> usize,
    build: fn(&mut Builder, &Collective, &Setting<'_>),
}

const TABLE: &[Row] = &[
    Row { name: "local", can: is_local, prefer: always, copies: nothing, build: local },
    Row {
        name: "hierarchical",
        can: can_hierarchical,
        prefer: always,
        copies: hierarchical_copies,
        build: build_hierarchical,
    },
    Row { name: "numa", can: can_numa, prefer: prefer_numa, copies: numa_copies, build: build_numa },
    Row {
        name: "recursive_doubling",
        can: |collective, _| matches!(collective, Collective::AllReduce { .. }),
        prefer: |collective, setting| bytes(collective, setting) <= doubling_max_bytes(setting),
        // Also the sums, where these need memory of their own.
        copies: |collective, setting| count(collective) * if setting.widens() { 2 } else { 1 },
        build: |builder, collective, setting| {
            all_reduce(builder, collective, setting, |builder, data| {
                halving_doubling::all_reduce_doubling(builder, &setting.world(), data);
            });
        },
    },
    Row { name: DIRECT, can: can_direct, prefer: prefer_direct, copies: direct_copies, build: build_direct },
    Row {
        name: "rabenseifner",
        can: |collective, _| matches!(collective, Collective::AllReduce { .. } | Collective::Reduce { .. }),
        prefer: |collective, setting| match collective {
            // Of three, two would do what one does in a tree.
            Collective::Reduce { .. } => {
                is_long(collective, setting, BINOMIAL_REDUCE_MAX_BYTES) && setting.topo.size() > 3
            }
            _ => bytes(collective, setting) <= HALVING_MAX_BYTES,
        },
        copies: reduction_copies,
        build: build_rabenseifner,
    },
    Row {
        name: "bruck",
        can: |collective, _| matches!(collective, Collective::AllGather { .. }),
        prefer: |collective, setting| bytes(collective, setting) <= bruck::BRUCK_MAX_BYTES,
        copies: nothing,
        build: build_bruck,
    },
    Row {
        name: "van_de_geijn",
        can: |collective, _| matches!(collective, Collective::Broadcast { .. }),
        prefer: |collective, setting| is_long(collective, setting, BINOMIAL_BROADCAST_MAX_BYTES),
        copies: nothing,
        build: |builder, collective, setting| {
            let Collective::Broadcast { count, root } = *collective else { unreachable!("checked by `can`") };
            broadcast_by(builder, setting, (count, root), van_de_geijn::broadcast);
        },
    },
    Row { name: RING, can: can_ring, prefer: always, copies: ring_copies, build: build_ring },
    Row { name: "binomial", can: can_binomial, prefer: always, copies: reduction_copies, build: build_binomial },
    Row {
        name: "chain",
        can: |collective, _| matches!(collective, Collective::Broadcast { .. } | Collective::Reduce { .. }),
        prefer: always,
        copies: reduction_copies,
        build: build_chain,
    },
    Row {
        name: "dissemination",
        can: |collective, _| matches!(collective, Collective::Barrier),
        prefer: always,
        copies: nothing,
        build: |builder, _, setting| dissemination::barrier(builder, &setting.world()),
    },
    Row {
        name: put::NAME,
        can: |collective, _| matches!(collective, Collective::AllGatherIntoParts { .. }),
        prefer: always,
        copies: nothing,
        build: |builder, collective, setting| {
            let Collective::AllGatherIntoParts { count } = *collective else { unreachable!("checked by `can`") };
            put::all_gather(builder, &setting.world(), input(count));
        },
    },
    Row {
        name: "islands",
        can: |collective, _| matches!(collective, Collective::ByIslands { .. }),
        prefer: always,
        copies: nothing,
        build: |builder, collective, setting| {
            let Collective::ByIslands { call, count, islands } = collective else { unreachable!("checked by `can`") };
            islands::append(builder, setting, (*call, *count), islands);
        },
    },
    Row {
        name: FORWARDING,
        can: can_forward,
        prefer: |collective, _| matches!(collective, Collective::EqualAllToAll { .. }),
        copies: nothing,
        build: |builder, collective, setting| {
            let total = bytes(collective, setting) / setting.element;
            forwarding::all_to_all(builder, setting, input(total), output(total));
        },
    },
];

/// The name of what passes the blocks of an all_to_all on. Who names it sees to it that all blocks are equal on all ranks.
pub(super) const FORWARDING: &str = "forwarding";

/// The name of what has all ranks talk to each other.
pub(super) const DIRECT: &str = "direct";

/// The number of what runs an all_to_all whose ranks [ask](crate::algo::equality) first. The answer tells which algorithm.
pub(crate) const ASKED: u8 = u8::MAX;

/// The name of the ring algorithms.
const RING: &str = "ring";

/// The schedule of `collective` for one rank. Every rank of the world gets schedules that fit together.
///
/// # Panics
/// Never: the table has a row for every collective.
pub fn plan(collective: &Collective, setting: Setting<'_>) -> Schedule {
    build(preferred(collective, &setting).expect("the last rows take what is left"), collective, setting)
}

fn preferred(collective: &Collective, setting: &Setting<'_>) -> Option<&'static Row> {
    TABLE.iter().find(|row| (row.can)(collective, setting) && (row.prefer)(collective, setting))
}

/// The name of the algorithm that [`plan`] takes.
pub(super) fn first(collective: &Collective, setting: &Setting<'_>) -> Option<&'static str> {
    preferred(collective, setting).map(|row| row.name)
}

/// The schedule by the algorithm `name`; nothing if there is none or it does not do this collective.
pub fn plan_with(name: &str, collective: &Collective, setting: Setting<'_>) -> Option<Schedule> {
    let row = TABLE.iter().find(|row| row.name == name && (row.can)(collective, &setting))?;
    Some(build(row, collective, setting))
}

/// The names of the algorithms that can do this collective, in the order of preference.
pub(crate) fn candidates(collective: &Collective, setting: &Setting<'_>) -> impl Iterator<Item = &'static str> {
    TABLE.iter().filter(|row| (row.can)(collective, setting)).map(|row| row.name)
}

/// The algorithms' names, in the order of preference.
pub fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|row| row.name)
}

/// The number by which ranks tell each other what runs a collective. None is zero.
pub(crate) fn number(name: &str) -> u8 {
    let place = TABLE.iter().position(|row| row.name == name);
    place.map_or(0, |place| u8::try_from(place + 1).expect("the table is short"))
}

/// The algorithm with this number.
pub(crate) fn numbered(number: u8) -> Option<&'static str> {
    if number == ASKED {
        return Some("forwarding or direct");
    }
    names().nth(usize::from(number).checked_sub(1)?)
}

/// Whether the order in which an all_reduce by this algorithm combines an element depends on where in the data that lies: on the
/// rank whose stripe it is in.
pub(crate) fn combines_by_stripes(name: &str) -> bool {
    name == RING
}

fn build(row: &Row, collective: &Collective, setting: Setting<'_>) -> Schedule {
    schedule(row.name, |builder| {
        let pieces = bounded::pieces((row.copies)(collective, &setting), &setting);
        if pieces == 1 {
            (row.build)(builder, collective, &setting);
        } else {
            let setting = Setting { scratch: ScratchLimit { pieces, ..setting.scratch }, ..setting };
            for index in 0..pieces {
                let (piece, frame) = bounded::piece(collective, setting.me, index, pieces);
                builder.within(frame, |builder| (row.build)(builder, &piece, &setting));
            }
        }
        agreement::ensure(builder, collective, &setting.world());
    })
}

/// A world of one has no islands.
fn is_local(collective: &Collective, setting: &Setting<'_>) -> bool {
    setting.topo.size() == 1 && !matches!(collective, Collective::ByIslands { .. })
}

fn always(_: &Collective, _: &Setting<'_>) -> bool {
    true
}

fn nothing(_: &Collective, _: &Setting<'_>) -> usize {
    0
}

/// The elements of an all_reduce or a reduce.
fn count(collective: &Collective) -> usize {
    match collective {
        Collective::AllReduce { count } | Collective::Reduce { count, .. } => *count,
        _ => 0,
    }
}

/// Sums have memory of their own if they do not fit into elements; what a reduce combines on other ranks than the root always has.
fn reduction_copies(collective: &Collective, setting: &Setting<'_>) -> usize {
    match collective {
        Collective::AllReduce { .. } if !setting.widens() => 0,
        _ => count(collective),
    }
}

fn ring_copies(collective: &Collective, setting: &Setting<'_>) -> usize {
    match collective {
        Collective::ReduceScatter { counts } => counts.total(),
        _ => reduction_copies(collective, setting),
    }
}

fn direct_copies(collective: &Collective, setting: &Setting<'_>) -> usize {
    match collective {
        Collective::ReduceScatter { counts } if setting.scaling == Scaling::Inputs => counts.total(),
        _ => 0,
    }
}

fn hierarchical_copies(collective: &Collective, setting: &Setting<'_>) -> usize {
    match collective {
        Collective::ReduceScatter { counts } if must_load(setting) => counts.total(),
        // What this host has of the blocks of others, of which each of its ranks takes those of its place.
        Collective::ReduceScatter { counts } => {
            let hosts = setting.topo.hosts();
            let at_place = |place: usize| hosts.iter().map(|ranks| counts[ranks[place].index()]).sum();
            (0..hosts[0].len()).map(at_place).max().unwrap_or(0)
        }
        _ => reduction_copies(collective, setting),
    }
}

/// The bytes that the collective is about, on one rank. All ranks find the same, an all_to_all of unequal blocks aside.
pub(crate) fn bytes(collective: &Collective, setting: &Setting<'_>) -> usize {
    let count = match collective {
        Collective::AllReduce { count }
        | Collective::Reduce { count, .. }
        | Collective::Broadcast { count, .. }
        | Collective::ByIslands { count, .. } => *count,
        Collective::AllGatherIntoParts { count }
        | Collective::Gather { count, .. }
        | Collective::Scatter { count, .. } => count.saturating_mul(setting.topo.size()),
        Collective::AllGather { counts } | Collective::ReduceScatter { counts } => counts.total(),
        Collective::AllToAll { send, .. } => send.total(),
        Collective::EqualAllToAll { count } => count.saturating_mul(setting.topo.size()),
        Collective::Barrier => 0,
    };
    count.saturating_mul(setting.element)
}

// ---- the parts that rows share ----

fn input(len: usize) -> Slice {
    Slice::new(Space::Input, 0, len)
}

fn output(len: usize) -> Slice {
    Slice::new(Space::Output, 0, len)
}

/// This rank's input copied to where it will be combined, and scaled if the operation does.
fn load(builder: &mut Builder, setting: &Setting<'_>, from: Slice, into: Slice) {
    builder.push(Action::Copy { from, into });
    if setting.scaling == Scaling::Inputs {
        builder.push(Action::Scale { slice: into });
    }
}

/// Whether the inputs cannot be combined as they are.
fn must_load(setting: &Setting<'_>) -> bool {
    setting.widens() || setting.scaling == Scaling::Inputs
}

/// Where inputs are combined whose reduction is to be in `result`: there, or where sums have memory of their own.
fn work(builder: &mut Builder, setting: &Setting<'_>, result: Slice) -> Slice {
    if setting.widens() { builder.sums(result.len) } else { result }
}

/// Turns what `work` holds into the `result`, which may be the same memory.
fn conclude(builder: &mut Builder, setting: &Setting<'_>, work: Slice, result: Slice) {
    match setting.scaling {
        Scaling::Sum { .. } => _ = builder.push(Action::Average { from: work, into: result }),
        _ if work == result => {}
        _ => _ = builder.push(Action::Copy { from: work, into: result }),
    }
}

/// An all_reduce whose algorithm gives everyone the whole result.
fn all_reduce(
    builder: &mut Builder,
    collective: &Collective,
    setting: &Setting<'_>,
    combine: impl FnOnce(&mut Builder, Slice),
) {
    let Collective::AllReduce { count } = *collective else { unreachable!("checked by `can`") };
    let work = work(builder, setting, output(count));
    load(builder, setting, input(count), work);
    combine(builder, work);
    conclude(builder, setting, work, output(count));
}

/// A copy of this rank's blocks of a reduce_scatter's input, to be combined in place.
fn loaded_blocks(builder: &mut Builder, setting: &Setting<'_>, counts: &Counts) -> Vec<Slice> {
    let total = counts.total();
    let copy = if setting.widens() { builder.sums(total) } else { builder.scratch(total) };
    load(builder, setting, input(total), copy);
    blocks(copy, counts)
}

/// A reduce: where sums need no memory of their own, the root works in its output, others in scratch memory.
fn reduce(
    builder: &mut Builder,
    setting: &Setting<'_>,
    count: usize,
    root: Rank,
    combine: impl FnOnce(&mut Builder, Slice),
) {
    let is_root = root == setting.me;
    let needs_scratch = !is_root && !setting.widens();
    let work = if needs_scratch { builder.scratch(count) } else { work(builder, setting, output(count)) };
    load(builder, setting, input(count), work);
    combine(builder, work);
    if is_root {
        conclude(builder, setting, work, output(count));
    }
}

fn broadcast(builder: &mut Builder, count: usize, is_root: bool, spread: impl FnOnce(&mut Builder, Slice)) {
    if is_root {
        builder.push(Action::Copy { from: input(count), into: output(count) });
    }
    spread(builder, output(count));
}

/// What spreads or combines a root's data: for a group, in pieces of so many elements.
type Rooted = fn(&mut Builder, &Group, Rank, Slice, usize);

/// A broadcast to all ranks by an algorithm that cuts the data into pieces.
fn broadcast_by(builder: &mut Builder, setting: &Setting<'_>, (count, root): (usize, Rank), spread: Rooted) {
    broadcast(builder, count, root == setting.me, |builder, data| {
        spread(builder, &setting.world(), root, data, setting.chunk_of(data));
    });
}

/// The same for a reduce of all ranks.
fn reduce_by(builder: &mut Builder, setting: &Setting<'_>, (count, root): (usize, Rank), combine: Rooted) {
    reduce(builder, setting, count, root, |builder, data| {
        combine(builder, &setting.world(), root, data, setting.chunk_of(data));
    });
}

/// The output blocks of an all_gather, this rank's filled.
fn own_block_in_place(builder: &mut Builder, counts: &Counts, me: usize) -> Vec<Slice> {
    let all = blocks(output(counts.total()), counts);
    builder.push(Action::Copy { from: input(counts[me]), into: all[me] });
    all
}

// ---- rows ----

fn local(builder: &mut Builder, collective: &Collective, setting: &Setting<'_>) {
    let count = match collective {
        Collective::AllReduce { count } | Collective::Reduce { count, .. } => {
            // The average of one is that one.
            return load(builder, setting, input(*count), output(*count));
        }
        Collective::ReduceScatter { counts } => {
            return load(builder, setting, input(counts[0]), output(counts[0]));
        }
        Collective::Broadcast { count, .. } | Collective::Gather { count, .. } | Collective::Scatter { count, .. } => {
            *count
        }
        Collective::AllGather { counts } => counts[0],
        Collective::AllGatherIntoParts { count } => *count,
        Collective::AllToAll { send, .. } => send[0],
        Collective::EqualAllToAll { count } => *count,
        Collective::Barrier => return,
        Collective::ByIslands { .. } => unreachable!("checked by `can`"),
    };
    builder.push(Action::Copy { from: input(count), into: output(count) });
}

fn can_hierarchical(collective: &Collective, setting: &Setting<'_>) -> bool {
    let hosts = setting.topo.hosts();
    let fits = match collective {
        Collective::AllReduce { .. }
        | Collective::Broadcast { .. }
        | Collective::Reduce { .. }
        | Collective::AllGather { .. } => true,
        Collective::ReduceScatter { .. } => hosts.iter().all(|ranks| ranks.len() == hosts[0].len()),
        _ => false,
    };
    fits && hosts.len() > 1 && hosts.len() < setting.topo.size()
}

fn build_hierarchical(builder: &mut Builder, collective: &Collective, setting: &Setting<'_>) {
    match collective {
        Collective::AllReduce { .. } => {
            all_reduce(builder, collective, setting, |builder, data| hierarchical::all_reduce(builder, setting, data));
        }
        Collective::Broadcast { count, root } => broadcast(builder, *count, *root == setting.me, |builder, data| {
            hierarchical::broadcast(builder, setting, *root, data);
        }),
        Collective::Reduce { count, root } => build_hierarchical_reduce(builder, setting, *count, *root),
        Collective::AllGather { counts } => {
            let all = own_block_in_place(builder, counts, setting.me.index());
            hierarchical::all_gather(builder, setting, &all);
        }
        Collective::ReduceScatter { counts } => {
            let own = if must_load(setting) {
                loaded_blocks(builder, setting, counts)
            } else {
                blocks(input(counts.total()), counts)
            };
            let result = output(counts[setting.me.index()]);
            let work = work(builder, setting, result);
            hierarchical::reduce_scatter(builder, setting, &own, work);
            conclude(builder, setting, work, result);
        }
        _ => unreachable!("checked by `can`"),
    }
}

/// With the NUMA nodes of the only host in the place of hosts, where the ranks are on several. What runs a schedule whole is a
/// device, whose memory is of no node.
fn by_node<'a>(setting: &Setting<'a>) -> Option<Setting<'a>> {
    let topo = setting.topo.by_node().filter(|_| setting.chunking == Chunking::Chunks)?;
    Some(Setting { topo, ..*setting })
}

fn can_numa(collective: &Collective, setting: &Setting<'_>) -> bool {
    by_node(setting).is_some_and(|nodes| can_hierarchical(collective, &nodes))
}

/// Where what goes between nodes takes the most time, and every rank of a node can do as much of it as another.
fn prefer_numa(collective: &Collective, setting: &Setting<'_>) -> bool {
    let nodes = setting.topo.by_node().map_or(&[][..], Topology::hosts);
    let are_alike = nodes.iter().all(|ranks| ranks.len() == nodes[0].len() && ranks.len() > 1);
    are_alike && !matches!(collective, Collective::Reduce { .. }) && bytes(collective, setting) >= NUMA_MIN_BYTES
}

fn numa_copies(collective: &Collective, setting: &Setting<'_>) -> usize {
    by_node(setting).map_or(0, |nodes| hierarchical_copies(collective, &nodes))
}

fn build_numa(builder: &mut Builder, collective: &Collective, setting: &Setting<'_>) {
    build_hierarchical(builder, collective, &by_node(setting).expect("checked by `can`"));
}

fn build_hierarchical_reduce(builder: &mut Builder, setting: &Setting<'_>, count: usize, root: Rank) {
    let by_stripes = hierarchical::reduces_by_stripes(setting, count);
    if by_stripes && root != setting.me && !must_load(setting) {
        return hierarchical::reduce_by_stripes(builder, setting, root, input(count));
    }
    reduce(builder, setting, count, root, |builder, data| match by_stripes {
        true => hierarchical::reduce_by_stripes(builder, setting, root, data),
        false => hierarchical::reduce(builder, setting, root, data),
    });
}

/// A device moves the blocks of an all_to_all as messages.
fn can_forward(collective: &Collective, setting: &Setting<'_>) -> bool {
    let is_equal = match collective {
        Collective::AllToAll { send, recv } => send.are_equal() && recv.are_equal(),
        Collective::EqualAllToAll { .. } => true,
        _ => false,
    };
    is_equal && setting.topo.size() > 1 && setting.chunking == Chunking::Chunks
}

fn can_direct(collective: &Collective, _: &Setting<'_>) -> bool {
    matches!(
        collective,
        Collective::AllReduce { .. }
            | Collective::AllGather { .. }
            | Collective::ReduceScatter { .. }
            | Collective::AllToAll { .. }
            | Collective::EqualAllToAll { .. }
            | Collective::Broadcast { .. }
            | Collective::Gather { .. }
            | Collective::Scatter { .. }
    )
}

fn prefer_direct(collective: &Collective, setting: &Setting<'_>) -> bool {
    let is_short = || bytes(collective, setting) <= DIRECT_BROADCAST_MAX_BYTES;
    match collective {
        Collective::AllToAll { .. } => true,
        Collective::EqualAllToAll { count } => !forwarding::pays(setting, *count),
        _ if setting.topo.size() > DIRECT_MAX_RANKS => false,
        Collective::Broadcast { .. } => setting.topo.hosts().len() == 1 || is_short(),
        _ => true,
    }
}

fn build_direct(builder: &mut Builder, collective: &Collective, setting: &Setting<'_>) {
    let (world, me) = (setting.world(), setting.me.index());
    let size = world.size();
    match collective {
        Collective::AllReduce { count } => {
            let chunk = setting.chunk_to_fold(setting.element, *count, size - 1);
            load(builder, setting, input(*count), output(*count));
            let stripes = pieces(output(*count), size);
            direct_reduce_scatter(builder, setting, &stripes, stripes[me], chunk);
            direct::all_gather(builder, &world, stripes[me], &stripes, chunk);
        }
        Collective::AllGather { counts } => {
            let all = blocks(output(counts.total()), counts);
            direct::all_gather(builder, &world, input(counts[me]), &all, setting.chunk(counts.total()));
        }
        Collective::ReduceScatter { counts } => {
            let own = match setting.scaling {
                Scaling::Inputs => loaded_blocks(builder, setting, counts),
                _ => blocks(input(counts.total()), counts),
            };
            let chunk = setting.chunk_to_fold(setting.element, counts.total(), size - 1);
            direct_reduce_scatter(builder, setting, &own, output(counts[me]), chunk);
        }
        Collective::AllToAll { send, recv } => direct_all_to_all(builder, setting, send, recv),
        Collective::EqualAllToAll { count } => {
            let counts = Counts::equal(*count, size);
            direct_all_to_all(builder, setting, &counts, &counts);
        }
        Collective::Broadcast { count, root } => {
            broadcast_by(builder, setting, (*count, *root), direct::broadcast);
        }
        Collective::Gather { count, root } => {
            let all = (*root == setting.me).then(|| output(Counts::equal(*count, size).total()));
            direct::gather(builder, &world, *root, input(*count), all, setting.chunk(*count));
        }
        Collective::Scatter { count, root } => {
            let all = (*root == setting.me).then(|| input(Counts::equal(*count, size).total()));
            direct::scatter(builder, &world, *root, all, output(*count), setting.chunk(*count));
        }
        _ => unreachable!("checked by `can`"),
    }
}

fn direct_all_to_all(builder: &mut Builder, setting: &Setting<'_>, send: &Counts, recv: &Counts) {
    let (from, into) = (blocks(input(send.total()), send), blocks(output(recv.total()), recv));
    // The totals may differ between ranks, so each pair of ranks goes by what it exchanges.
    direct::all_to_all(builder, &setting.world(), &from, &into, |count| setting.delimited_chunk(count));
}

fn direct_reduce_scatter(builder: &mut Builder, setting: &Setting<'_>, own: &[Slice], into: Slice, chunk: usize) {
    match setting.scaling {
        Scaling::Sum { .. } => direct::average_scatter(builder, &setting.world(), own, into, chunk),
        _ => direct::reduce_scatter(builder, &setting.world(), own, into, chunk),
    }
}

/// Whether the length of a broadcast or reduce counts more than the number of its rounds. What runs a schedule whole cuts the
/// collective itself, into pieces for which the fewest rounds are the fastest.
fn is_long(collective: &Collective, setting: &Setting<'_>, binomial_max_bytes: usize) -> bool {
    let is_cut_here = setting.chunking == Chunking::Chunks;
    is_cut_here && setting.topo.size() > 2 && bytes(collective, setting) > binomial_max_bytes
}

fn build_chain(builder: &mut Builder, collective: &Collective, setting: &Setting<'_>) {
    match *collective {
        Collective::Broadcast { count, root } => broadcast_by(builder, setting, (count, root), chain::broadcast),
        Collective::Reduce { count, root } => reduce_by(builder, setting, (count, root), chain::reduce),
        _ => unreachable!("checked by `can`"),
    }
}

fn build_rabenseifner(builder: &mut Builder, collective: &Collective, setting: &Setting<'_>) {
    match *collective {
        Collective::AllReduce { .. } => all_reduce(builder, collective, setting, |builder, data| {
            halving_doubling::all_reduce_halving(builder, &setting.world(), data);
        }),
        Collective::Reduce { count, root } => {
            reduce_by(builder, setting, (count, root), halving_doubling::reduce_halving);
        }
        _ => unreachable!("checked by `can`"),
    }
}

fn build_bruck(builder: &mut Builder, collective: &Collective, setting: &Setting<'_>) {
    let Collective::AllGather { counts } = collective else { unreachable!("checked by `can`") };
    let all = blocks(output(counts.total()), counts);
    bruck::all_gather(builder, &setting.world(), input(counts[setting.me.index()]), &all);
}

fn can_ring(collective: &Collective, _: &Setting<'_>) -> bool {
    matches!(collective, Collective::AllReduce { .. } | Collective::AllGather { .. } | Collective::ReduceScatter { .. })
}

fn build_ring(builder: &mut Builder, collective: &Collective, setting: &Setting<'_>) {
    let (world, me) = (setting.world(), setting.me.index());
    match collective {
        Collective::AllReduce { count } => {
            let result = output(*count);
            let work = work(builder, setting, result);
            load(builder, setting, input(*count), work);
            let (own, stripes) = (pieces(work, world.size()), pieces(result, world.size()));
            ring::reduce_scatter(builder, &world, &own, setting.chunk_of(work));
            conclude(builder, setting, own[me], stripes[me]);
            ring::all_gather(builder, &world, &stripes, setting.chunk_of(result));
        }
        Collective::AllGather { counts } => {
            let all = own_block_in_place(builder, counts, me);
            ring::all_gather(builder, &world, &all, setting.chunk(counts.total()));
        }
        Collective::ReduceScatter { counts } => {
            let own = loaded_blocks(builder, setting, counts);
            let chunk = setting.chunk_of_elements(setting.bytes_in(own[me].space), counts.total());
            ring::reduce_scatter(builder, &world, &own, chunk);
            conclude(builder, setting, own[me], output(counts[me]));
        }
        _ => unreachable!("checked by `can`"),
    }
}

fn can_binomial(collective: &Collective, _: &Setting<'_>) -> bool {
    matches!(
        collective,
        Collective::Broadcast { .. }
            | Collective::Reduce { .. }
            | Collective::Gather { .. }
            | Collective::Scatter { .. }
    )
}

fn build_binomial(builder: &mut Builder, collective: &Collective, setting: &Setting<'_>) {
    let world = setting.world();
    match *collective {
        Collective::Broadcast { count, root } => broadcast_by(builder, setting, (count, root), binomial::broadcast),
        Collective::Reduce { count, root } => reduce_by(builder, setting, (count, root), binomial::reduce),
        Collective::Gather { count, root } => {
            let all = (root == setting.me).then(|| output(Counts::equal(count, world.size()).total()));
            binomial::gather(builder, &world, root, input(count), all);
        }
        Collective::Scatter { count, root } => {
            let all = (root == setting.me).then(|| input(Counts::equal(count, world.size()).total()));
            binomial::scatter(builder, &world, root, all, output(count));
        }
        _ => unreachable!("checked by `can`"),
    }
}

/// Up to this size the number of rounds decides, and everyone may combine everything. Two ranks do in one round what
/// takes the other algorithms two.
fn doubling_max_bytes(setting: &Setting<'_>) -> usize {
    if setting.topo.size() == 2 { 32 * 1024 } else { 16 * 1024 }
}

/// Up to this size, in worlds too large for the direct exchange, fewer rounds beat the ring's pipelining.
const HALVING_MAX_BYTES: usize = 512 * 1024;

/// Up to these sizes the rounds of a broadcast or reduce count more than that some ranks send or combine all data several times.
const BINOMIAL_BROADCAST_MAX_BYTES: usize = 64 * 1024;
const BINOMIAL_REDUCE_MAX_BYTES: usize = 1024 * 1024;

/// From this size on, ranks of several NUMA nodes go by node. Not measured, since no such host is at hand: as long as data that no
/// cache near a core holds, so that not the number of messages but the memory that they go through decides.
const NUMA_MIN_BYTES: usize = 4 * 1024 * 1024;

/// Up to this size a root that sends to everyone is done sooner than a tree, also where it shares one network card.
const DIRECT_BROADCAST_MAX_BYTES: usize = 16 * 1024;
