//! Every algorithm, for worlds of 1 to 64 ranks, against a sequential reference.
//!
//! All ranks' schedules run in one thread, one enabled step of some rank at a time, in an order drawn from a seed. A send
//! ends, as it may on a real wire, only when its receive has begun: a schedule that relies on buffering deadlocks here.
//! Messages without content are the exception, on the wire as here: a signal never waits.

use std::collections::VecDeque;

use ncclx_rs::algo::{self, Chunking, Collective, Scaling, ScratchLimit, Setting};
use ncclx_rs::schedule::{self, Action, Schedule, Slice, Space};
use ncclx_rs::{Counts, Rank, Topology};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::cases::{Case, ELEMENT, SCALINGS, cases, division, factor};

/// One rank's memory, and which of its steps are done.
struct Machine<'a> {
    schedule: &'a Schedule,
    input: Vec<u64>,
    output: Vec<u64>,
    scratch: Vec<u64>,
    sums: Vec<u64>,
    factor: u64,
    division: u64,
    done: Vec<bool>,
    left: usize,
    /// Per step, its position among the messages between the two ranks.
    message: Vec<usize>,
    /// Per rank, the steps that send to it, and those that receive from it.
    sends: Vec<Vec<usize>>,
    receives: Vec<Vec<usize>>,
}

impl<'a> Machine<'a> {
    fn new(schedule: &'a Schedule, rank: usize, input: Vec<u64>, output: usize, size: usize) -> Self {
        let (mut sends, mut receives) = (vec![Vec::new(); size], vec![Vec::new(); size]);
        let number = |step: usize, messages: &mut Vec<usize>| {
            messages.push(step);
            messages.len() - 1
        };
        let message = schedule.steps.iter().enumerate().map(|(step, what)| match what.action {
            Action::Send { to, .. } => number(step, &mut sends[to.index()]),
            Action::Recv { from, .. } | Action::RecvReduce { from, .. } => number(step, &mut receives[from.index()]),
            _ => 0,
        });
        let (message, steps) = (message.collect(), schedule.steps.len());
        Machine {
            schedule,
            input,
            output: vec![0xbeef; output],
            scratch: vec![0xdead; schedule.scratch],
            sums: vec![0xfade; schedule.sums],
            factor: factor(rank),
            division: division(size),
            done: vec![false; steps],
            left: steps,
            message,
            sends,
            receives,
        }
    }

    fn can_take(&self, step: usize) -> bool {
        !self.done[step] && self.schedule.steps[step].after.iter().all(|earlier| self.done[*earlier as usize])
    }

    fn slice(&self, slice: Slice) -> &[u64] {
        let space = match slice.space {
            Space::Input => &self.input,
            Space::Output => &self.output,
            Space::Scratch => &self.scratch,
            Space::Sums => &self.sums,
            Space::Parts => panic!("{}: touches the parts of others other than by copies there", self.schedule.name),
        };
        &space[slice.offset..slice.offset + slice.len]
    }

    fn slice_mut(&mut self, slice: Slice) -> &mut [u64] {
        let space = match slice.space {
            Space::Input => panic!("{}: writes its input", self.schedule.name),
            Space::Output => &mut self.output,
            Space::Scratch => &mut self.scratch,
            Space::Sums => &mut self.sums,
            Space::Parts => panic!("{}: touches the parts of others other than by copies there", self.schedule.name),
        };
        &mut space[slice.offset..slice.offset + slice.len]
    }

    /// Whether the message `number` to rank `to` has been sent.
    fn has_sent(&self, to: usize, number: usize) -> bool {
        self.sends[to].get(number).is_some_and(|step| self.done[*step])
    }

    fn finish(&mut self, step: usize) {
        self.done[step] = true;
        self.left -= 1;
    }

    fn add(&mut self, into: Slice, values: &[u64]) {
        self.slice_mut(into).iter_mut().zip(values).for_each(|(a, b)| *a = a.wrapping_add(*b));
    }
}

/// A step that can be taken now: a local one, or a send together with its receive.
enum Move {
    Local(usize, usize),
    Message { from: (usize, usize), to: (usize, usize) },
}

fn moves(machines: &[Machine<'_>]) -> Vec<Move> {
    let mut moves = Vec::new();
    for (rank, machine) in machines.iter().enumerate() {
        for step in (0..machine.done.len()).filter(|step| machine.can_take(*step)) {
            let number = machine.message[step];
            match machine.schedule.steps[step].action {
                Action::Send { from, .. } if from.len == 0 => moves.push(Move::Local(rank, step)),
                Action::Recv { from, into } | Action::RecvReduce { from, into } if into.len == 0 => {
                    if machines[from.index()].has_sent(rank, number) {
                        moves.push(Move::Local(rank, step));
                    }
                }
                Action::Send { to, .. } => {
                    let peer = &machines[to.index()];
                    match peer.receives[rank].get(number) {
                        Some(&receive) if peer.can_take(receive) => {
                            moves.push(Move::Message { from: (rank, step), to: (to.index(), receive) });
                        }
                        _ => {}
                    }
                }
                Action::Recv { .. } | Action::RecvReduce { .. } => {}
                _ => moves.push(Move::Local(rank, step)),
            }
        }
    }
    moves
}

fn take(machines: &mut [Machine<'_>], next: &Move) {
    match *next {
        Move::Message { from: (sender, send), to: (receiver, receive) } => {
            let Action::Send { from, .. } = machines[sender].schedule.steps[send].action else { unreachable!() };
            let data = machines[sender].slice(from).to_vec();
            machines[sender].finish(send);
            match machines[receiver].schedule.steps[receive].action {
                Action::RecvReduce { into, .. } => {
                    same_type(from, into);
                    machines[receiver].add(into, &data);
                }
                Action::Recv { into, .. } => {
                    same_type(from, into);
                    machines[receiver].slice_mut(into).copy_from_slice(&data);
                }
                _ => unreachable!(),
            }
            machines[receiver].finish(receive);
        }
        Move::Local(rank, step) => {
            if let Action::Copy { from, into } = machines[rank].schedule.steps[step].action
                && into.space == Space::Parts
                && into.len > 0
            {
                return put(machines, rank, step, from, into);
            }
            let machine = &mut machines[rank];
            match machine.schedule.steps[step].action {
                action @ (Action::Copy { .. } | Action::CopyBlocks { .. }) => {
                    for (from, into) in action.copies().filter(|(_, into)| into.len > 0) {
                        assert!(from.space != Space::Sums || into.space == Space::Sums, "only averages narrow sums");
                        let data = machine.slice(from).to_vec();
                        machine.slice_mut(into).copy_from_slice(&data);
                    }
                }
                Action::Reduce { from, into } => {
                    same_type(from, into);
                    let data = machine.slice(from).to_vec();
                    machine.add(into, &data);
                }
                // The sum is that of any order; that of the blocks is followed by a test of its own.
                Action::Fold { from, into, .. } => {
                    same_type(from, into);
                    let data = machine.slice(from).to_vec();
                    data.chunks(into.len.max(1)).for_each(|block| machine.add(into, block));
                }
                Action::Scale { slice } => {
                    let factor = machine.factor;
                    machine.slice_mut(slice).iter_mut().for_each(|value| *value = value.wrapping_mul(factor));
                }
                Action::Average { from, into } => {
                    assert!(into.space != Space::Sums, "an average is an element");
                    let (data, division) = (machine.slice(from).to_vec(), machine.division);
                    let target = machine.slice_mut(into);
                    target.fill(0);
                    for (index, value) in data.iter().enumerate() {
                        let sum = &mut target[index % into.len];
                        *sum = sum.wrapping_add(value.wrapping_mul(division));
                    }
                }
                Action::Await { .. } => panic!("nobody calls by islands here"),
                // Only those without content come here.
                Action::Send { .. } | Action::Recv { .. } | Action::RecvReduce { .. } => {}
            }
            machine.finish(step);
        }
    }
}

/// A rank writes to another one's part of a window, which has said that it may be written.
fn put(machines: &mut [Machine<'_>], rank: usize, step: usize, from: Slice, into: Slice) {
    let part = machines[rank].output.len();
    let (peer, place) = (into.offset / part, into.offset % part);
    let name = machines[rank].schedule.name;
    assert!(machines[peer].has_sent(rank, 0), "{name}: rank {rank} writes to rank {peer} before that has called");
    let data = machines[rank].slice(from).to_vec();
    machines[peer].slice_mut(Slice::new(Space::Output, place, into.len)).copy_from_slice(&data);
    machines[rank].finish(step);
}

/// Panics unless both are sums or neither is: only copies and averages turn one into the other.
fn same_type(from: Slice, into: Slice) {
    assert_eq!(from.space == Space::Sums, into.space == Space::Sums, "{from:?} meets {into:?}");
}

pub(crate) fn plan(
    name: Option<&str>,
    case: &Case,
    topo: &Topology,
    (scaling, element): (Scaling, usize),
    scratch: ScratchLimit,
) -> Option<Vec<Schedule>> {
    (0..topo.size())
        .map(|rank| {
            let setting = Setting { me: Rank::from(rank), topo, element, scaling, chunking: Chunking::Chunks, scratch };
            match name {
                Some(name) => algo::plan_with(name, &case.of(rank), setting),
                None => Some(algo::plan(&case.of(rank), setting)),
            }
        })
        .collect()
}

/// Takes all steps in the order in which they are listed, which ranks try first: so none may wait for a message while
/// another one waits for what it has to send later. What each rank has heard of when it is done, a bit for each rank whose
/// call it knows; nothing if they cannot be taken so.
pub(crate) fn heard_in_order(schedules: &[Schedule]) -> Option<Vec<u64>> {
    let size = schedules.len();
    let mut on_the_way = vec![VecDeque::new(); size * size];
    // Per step, what must be known to whom takes it: its own call, what the steps know that it waits for, and its message.
    let mut known: Vec<Vec<u64>> = vec![Vec::new(); size];
    let taken = |known: &[Vec<u64>]| known.iter().map(Vec::len).sum::<usize>();
    loop {
        let before = taken(&known);
        for (rank, schedule) in schedules.iter().enumerate() {
            while let Some(step) = schedule.steps.get(known[rank].len()) {
                let mut knows =
                    step.after.iter().fold(1 << rank, |knows, earlier| knows | known[rank][*earlier as usize]);
                match step.action {
                    Action::Send { to, .. } => on_the_way[rank * size + to.index()].push_back(knows),
                    Action::Recv { from, .. } | Action::RecvReduce { from, .. } => {
                        let Some(told) = on_the_way[from.index() * size + rank].pop_front() else { break };
                        knows |= told;
                    }
                    _ => {}
                }
                known[rank].push(knows);
            }
        }
        if taken(&known) == before {
            let are_done = schedules.iter().zip(&known).all(|(schedule, known)| known.len() == schedule.steps.len());
            return are_done
                .then(|| known.iter().map(|known| known.iter().fold(0, |all, knows| all | knows)).collect());
        }
    }
}

pub(crate) fn check(name: Option<&str>, case: &Case, topo: &Topology, seed: u64) {
    let first = case.of(0);
    for scaling in if reduced(&first).is_some() { &SCALINGS[..] } else { &[Scaling::Nothing] } {
        check_scaled(name, case, topo, seed, (*scaling, ELEMENT), ScratchLimit::UNBOUNDED);
        // In four pieces or eight, of which some may be empty.
        if let Some(elements) = reduced(&first).filter(|elements| *elements > 0 && topo.size() <= 12) {
            check_scaled(
                name,
                case,
                topo,
                seed,
                (*scaling, ELEMENT),
                ScratchLimit::at_most((elements * ELEMENT).div_ceil(2)),
            );
        }
    }
    // Shorter ones go in other ways.
    if matches!(first, Collective::AllGather { .. }) {
        for element in [1, 512] {
            check_scaled(name, case, topo, seed, (Scaling::Nothing, element), ScratchLimit::UNBOUNDED);
        }
    }
}

/// How many elements a reduction is about.
fn reduced(collective: &Collective) -> Option<usize> {
    match collective {
        Collective::AllReduce { count } | Collective::Reduce { count, .. } => Some(*count),
        Collective::ReduceScatter { counts } => Some(counts.total()),
        _ => None,
    }
}

pub(crate) fn check_scaled(
    name: Option<&str>,
    case: &Case,
    topo: &Topology,
    seed: u64,
    (scaling, element): (Scaling, usize),
    scratch: ScratchLimit,
) {
    let Some(schedules) = plan(name, case, topo, (scaling, element), scratch) else { return };
    let size = topo.size();
    let context = || {
        let (name, hosts) = (schedules[0].name, topo.hosts().len());
        format!("{name} for {case:?} on {size} ranks, {hosts} hosts, seed {seed}, {scaling:?}, {scratch:?}")
    };
    schedule::check(&schedules).unwrap_or_else(|mismatch| panic!("{}: {mismatch}", context()));
    let heard = heard_in_order(&schedules).unwrap_or_else(|| panic!("ranks wait for each other: {}", context()));
    let everyone = u64::MAX >> (64 - size);
    assert!(
        size == 1 || heard.iter().all(|heard| *heard == everyone),
        "a rank may end alone: {}: {heard:x?}",
        context()
    );
    for step in schedules.iter().flat_map(|schedule| schedule.steps.iter().enumerate()) {
        assert!(step.1.after.iter().all(|earlier| (*earlier as usize) < step.0), "{}", context());
    }
    let data: Vec<_> = (0..size).map(|rank| case.data(rank, size, scaling)).collect();
    let mut machines: Vec<Machine<'_>> = schedules
        .iter()
        .zip(&data)
        .enumerate()
        .map(|(rank, (schedule, (input, output, _)))| Machine::new(schedule, rank, input.clone(), *output, size))
        .collect();
    let mut random = StdRng::seed_from_u64(seed);
    while machines.iter().any(|machine| machine.left > 0) {
        let moves = moves(&machines);
        assert!(!moves.is_empty(), "deadlock: {}", context());
        // Several moves a scan: they stay possible, since none takes away what another needs.
        for next in moves.choose_multiple(&mut random, 1 + moves.len() / 2) {
            take(&mut machines, next);
        }
        // What others write to a rank's memory has to be there when that rank is done, not when all are.
        for (rank, (machine, (_, _, expected))) in machines.iter().zip(&data).enumerate() {
            let is_wrong = machine.left == 0 && expected.as_ref().is_some_and(|expected| machine.output != *expected);
            assert!(!is_wrong, "rank {rank} is wrong: {}", context());
        }
    }
}

/// Ranks on one host, on two uneven ones, on hosts of two, in turn on hosts of four, and scattered.
pub(crate) fn topologies(size: usize, random: &mut StdRng) -> Vec<Topology> {
    let by = |host: &mut dyn FnMut(usize) -> usize| {
        Topology::new(&(0..size).map(|rank| host(rank).to_string()).collect::<Vec<_>>())
    };
    let mut all = vec![
        Topology::single_host(size),
        by(&mut |rank| usize::from(rank > size / 3)),
        by(&mut |rank| rank / 2),
        by(&mut |rank| rank % size.div_ceil(4)),
        by(&mut |_| random.random_range(0..4)),
    ];
    all.dedup();
    all
}

fn all_algorithms(sizes: impl Iterator<Item = usize>) {
    for size in sizes {
        let seed = size as u64;
        let mut random = StdRng::seed_from_u64(seed);
        for topo in topologies(size, &mut random) {
            let into_parts = |count| Case::Same(Collective::AllGatherIntoParts { count });
            for case in cases(size, &mut random).into_iter().chain([0, 1, 40].map(into_parts)) {
                for name in algo::names().map(Some).chain([None]) {
                    check(name, &case, &topo, seed);
                }
            }
        }
    }
}

#[test]
fn every_algorithm_is_right_in_worlds_up_to_12() {
    all_algorithms(1..=12);
}

#[test]
fn every_algorithm_is_right_in_larger_worlds() {
    // Around the powers of two, where the folding changes; the rest is drawn by the property below.
    all_algorithms([15, 16, 17, 31, 33, 64].into_iter());
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(60))]

    #[test]
    fn every_algorithm_is_right_for_drawn_shapes(size in 1usize..=64, count in 0usize..200, seed: u64) {
        let mut random = StdRng::seed_from_u64(seed);
        let topologies = topologies(size, &mut random);
        let topo = topologies.choose(&mut random).expect("one");
        let root = Rank::from(random.random_range(0..size));
        let counts: Counts = (0..size).map(|_| random.random_range(0..=count.min(40))).collect();
        let cases = [
            Collective::AllReduce { count },
            Collective::Reduce { count, root },
            Collective::Broadcast { count, root },
            Collective::Gather { count: count / 8, root },
            Collective::Scatter { count: count / 8, root },
            Collective::AllGather { counts: counts.clone() },
            Collective::ReduceScatter { counts },
        ];
        for collective in cases {
            for name in algo::names() {
                check(Some(name), &Case::Same(collective.clone()), topo, seed);
            }
        }
    }
}

#[test]
fn data_from_a_root_is_not_answered() {
    for size in 2..=8 {
        let topo = Topology::single_host(size);
        for rank in 1..size {
            let root = Rank(0);
            for collective in [Collective::Broadcast { count: 40, root }, Collective::Scatter { count: 40, root }] {
                let setting = Setting {
                    me: Rank::from(rank),
                    topo: &topo,
                    element: 4,
                    scaling: Scaling::Nothing,
                    chunking: Chunking::Chunks,
                    scratch: ScratchLimit::UNBOUNDED,
                };
                let schedule = algo::plan(&collective, setting);
                let waits = schedule.steps.iter().skip_while(|step| matches!(step.action, Action::Send { .. }));
                let sends_later = waits.filter(|step| matches!(step.action, Action::Send { .. })).count();
                assert_eq!(sends_later, 0, "rank {rank} of {size}: {:?}", schedule.steps);
            }
        }
    }
}

#[test]
fn a_short_all_gather_of_many_ranks_takes_few_messages() {
    for (size, rounds) in [(9, 4), (16, 4), (17, 5), (1024, 10)] {
        let topo = Topology::single_host(size);
        let collective = Collective::AllGather { counts: Counts::equal(8, size) };
        let setting = |rank| Setting {
            me: Rank::from(rank),
            topo: &topo,
            element: 8,
            scaling: Scaling::Nothing,
            chunking: Chunking::Chunks,
            scratch: ScratchLimit::UNBOUNDED,
        };
        let schedules: Vec<Schedule> = (0..size).map(|rank| algo::plan(&collective, setting(rank))).collect();
        for schedule in &schedules {
            let sends = schedule.steps.iter().filter(|step| matches!(step.action, Action::Send { .. })).count();
            assert_eq!((schedule.name, sends), ("bruck", rounds), "{size} ranks");
        }
        assert_eq!(schedule::check(&schedules), Ok(()));
    }
}

/// The schedules of all ranks, by what the table takes.
fn schedules_of(collective: &Collective, topo: &Topology, element: usize, scaling: Scaling) -> Vec<Schedule> {
    let case = Case::Same(collective.clone());
    plan(None, &case, topo, (scaling, element), ScratchLimit::UNBOUNDED).expect("every collective has an algorithm")
}

#[test]
fn the_length_of_a_broadcast_or_reduce_decides_what_runs_it() {
    let (kib, mib) = (1 << 10, 1 << 20);
    let apart = |size: usize| Topology::new(&(0..size).map(|rank| rank.to_string()).collect::<Vec<_>>());
    let name = |is_broadcast: bool, bytes: usize, topo: &Topology, chunking: Chunking| {
        let (count, root) = (bytes / 4, Rank(1));
        let collective =
            if is_broadcast { Collective::Broadcast { count, root } } else { Collective::Reduce { count, root } };
        let setting = Setting {
            me: Rank(0),
            topo,
            element: 4,
            scaling: Scaling::Nothing,
            chunking,
            scratch: ScratchLimit::UNBOUNDED,
        };
        algo::plan(&collective, setting).name
    };
    for (topo, bytes, of_broadcast, of_reduce) in [
        (Topology::single_host(16), 64 * kib, "binomial", "binomial"),
        (Topology::single_host(16), 65 * kib, "van_de_geijn", "binomial"),
        (Topology::single_host(16), 2 * mib, "van_de_geijn", "rabenseifner"),
        (Topology::single_host(1024), 64 * mib, "van_de_geijn", "rabenseifner"),
        (apart(2), 64 * mib, "binomial", "binomial"),
        (apart(3), 2 * mib, "van_de_geijn", "binomial"),
        (apart(4), 2 * mib, "van_de_geijn", "rabenseifner"),
        (Topology::single_host(8), mib, "direct", "binomial"),
        (Topology::single_host(8), 64 * mib, "direct", "rabenseifner"),
    ] {
        let ranks = topo.size();
        assert_eq!(name(true, bytes, &topo, Chunking::Chunks), of_broadcast, "{bytes} bytes, {ranks} ranks");
        assert_eq!(name(false, bytes, &topo, Chunking::Chunks), of_reduce, "{bytes} bytes, {ranks} ranks");
        // A device cuts them itself, into what is short.
        let whole = name(false, bytes, &topo, Chunking::Whole);
        assert_eq!(whole, "binomial", "{bytes} bytes, {ranks} ranks");
    }
}

#[test]
fn long_data_from_a_root_or_to_it_are_sent_and_received_a_few_times_by_each_rank() {
    let hosts_of = |size: usize, host: &dyn Fn(usize) -> usize| {
        Topology::new(&(0..size).map(|rank| host(rank).to_string()).collect::<Vec<_>>())
    };
    for topo in [
        Topology::single_host(1024),
        hosts_of(1024, &|rank| rank),
        hosts_of(1024, &|rank| rank / 8),
        hosts_of(1024, &|rank| rank % 8),
        hosts_of(64, &|rank| rank / 2),
        Topology::single_host(100),
        Topology::single_host(9),
    ] {
        let (size, hosts) = (topo.size(), topo.hosts().len());
        for count in [800_001, 10_000_019] {
            let root = Rank::from(size / 3);
            for (collective, scaling) in [
                (Collective::Broadcast { count, root }, Scaling::Nothing),
                (Collective::Reduce { count, root }, Scaling::Nothing),
                (Collective::Reduce { count, root }, Scaling::Sum { bytes: 8 }),
            ] {
                let schedules = schedules_of(&collective, &topo, 4, scaling);
                let context = format!("{} for {collective:?} on {size} ranks, {hosts} hosts", schedules[0].name);
                assert_eq!(schedule::check(&schedules), Ok(()), "{context}");
                // In a world that is no power of two, a rank hands all its data over before; one that passes a stripe on between
                // hosts does so within its host, too.
                let copies = if size.is_power_of_two() && (hosts == 1 || hosts == size) { 2 } else { 3 };
                // Pieces differ by an element.
                let most = copies * count + size;
                for schedule in &schedules {
                    let (mut sent, mut received) = (0, 0);
                    for step in &schedule.steps {
                        match step.action {
                            Action::Send { from, .. } => sent += from.len,
                            Action::Recv { into, .. } | Action::RecvReduce { into, .. } => received += into.len,
                            _ => {}
                        }
                    }
                    assert!(sent < most && received < most, "{context}: {sent} sent, {received} received");
                }
            }
        }
    }
}

#[test]
fn long_data_goes_once_between_two_hosts() {
    for (hosts, ranks) in [(2, 2), (2, 4), (3, 2), (5, 4)] {
        let (size, count) = (hosts * ranks, 300);
        for root in [0, 1, size - 1].map(Rank::from) {
            let topo = Topology::new(&(0..size).map(|rank| (rank % hosts).to_string()).collect::<Vec<_>>());
            for collective in [Collective::Broadcast { count, root }, Collective::Reduce { count, root }] {
                check(None, &Case::Same(collective.clone()), &topo, size as u64);
                let schedules = schedules_of(&collective, &topo, ELEMENT, Scaling::Nothing);
                let sent: usize =
                    schedules.iter().enumerate().map(|(me, schedule)| sent_to_others(schedule, me, &topo)).sum();
                assert_eq!(sent, (hosts - 1) * count, "{collective:?} on {hosts} hosts of {ranks}");
            }
        }
    }
}

#[test]
fn long_data_of_many_hosts_are_right() {
    let topo = Topology::new(&(0..64).map(|rank| (rank / 2).to_string()).collect::<Vec<_>>());
    let (count, root) = (140, Rank(5));
    for collective in [Collective::Broadcast { count, root }, Collective::Reduce { count, root }] {
        check(None, &Case::Same(collective), &topo, 7);
    }
}

#[test]
fn phases_between_and_within_hosts_overlap() {
    let (hosts, ranks, mib) = (8, 4, 1 << 20);
    let topo = Topology::new(&(0..hosts * ranks).map(|rank| (rank / ranks).to_string()).collect::<Vec<_>>());
    let all_reduce = schedules_of(&Collective::AllReduce { count: 4 * mib }, &topo, 4, Scaling::Nothing);
    for (me, schedule) in all_reduce.iter().enumerate() {
        for step in &schedule.steps {
            if let Action::Send { to, from } = step.action
                && !topo.same_host(Rank::from(me), to)
            {
                assert!(4 * from.len <= mib / 8, "rank {me} first waits for more than a piece of its stripe");
            }
        }
    }
    let counts = Counts::equal(1000, hosts * ranks);
    let reduce_scatter = schedules_of(&Collective::ReduceScatter { counts }, &topo, 4, Scaling::Nothing);
    for (me, schedule) in reduce_scatter.iter().enumerate() {
        let first = schedule.steps.iter().find_map(|step| match step.action {
            Action::Send { from, .. } => Some(from.offset / 1000 / ranks),
            _ => None,
        });
        assert_eq!(first, Some((me / ranks + 1) % hosts), "rank {me} begins with what is for another host");
    }
}

/// The elements that a rank sends to other hosts.
fn sent_to_others(schedule: &Schedule, me: usize, topo: &Topology) -> usize {
    let sent = |step: &schedule::Step| match step.action {
        Action::Send { to, from } if !topo.same_host(Rank::from(me), to) => from.len,
        _ => 0,
    };
    schedule.steps.iter().map(sent).sum()
}

#[test]
fn a_block_of_a_reduce_scatter_goes_once_between_two_hosts() {
    for (hosts, ranks) in [(2, 4), (3, 2), (8, 4), (12, 3)] {
        let (size, each) = (hosts * ranks, 1000);
        let topo = Topology::new(&(0..size).map(|rank| (rank / ranks).to_string()).collect::<Vec<_>>());
        let collective = Collective::ReduceScatter { counts: Counts::equal(each, size) };
        let sent_to_other_hosts = |me: Rank| {
            let chunking = Chunking::Chunks;
            let schedule = algo::plan(
                &collective,
                Setting {
                    me,
                    topo: &topo,
                    element: 4,
                    scaling: Scaling::Nothing,
                    chunking,
                    scratch: ScratchLimit::UNBOUNDED,
                },
            );
            assert_eq!(schedule.name, "hierarchical");
            let sent = |step: &schedule::Step| match step.action {
                Action::Send { to, from } if !topo.same_host(me, to) => from.len,
                _ => 0,
            };
            schedule.steps.iter().map(sent).sum::<usize>()
        };
        for rank in 0..size {
            assert_eq!(sent_to_other_hosts(Rank::from(rank)), (hosts - 1) * each, "{hosts} hosts of {ranks}");
        }
    }
}

/// The schedules of an all_gather of `each` bytes a rank, which fit together, and what the ranks of a host send to other hosts: the
/// most messages of a host, and the bytes of all.
fn all_gather_between_hosts(topo: &Topology, each: usize) -> (usize, usize) {
    let collective = Collective::AllGather { counts: Counts::equal(each, topo.size()) };
    let setting = |me| Setting {
        me,
        topo,
        element: 1,
        scaling: Scaling::Nothing,
        chunking: Chunking::Chunks,
        scratch: ScratchLimit::UNBOUNDED,
    };
    let schedules: Vec<Schedule> =
        (0..topo.size()).map(|rank| algo::plan(&collective, setting(Rank::from(rank)))).collect();
    assert_eq!(schedule::check(&schedules), Ok(()));
    let (mut messages, mut bytes) = (vec![0; topo.hosts().len()], 0);
    for (me, schedule) in schedules.iter().enumerate() {
        assert_eq!(schedule.name, "hierarchical");
        for step in &schedule.steps {
            if let Action::Send { to, from } = step.action
                && !topo.same_host(Rank::from(me), to)
            {
                messages[topo.host_of(Rank::from(me))] += 1;
                bytes += from.len;
            }
        }
    }
    (messages.into_iter().max().unwrap_or(0), bytes)
}

#[test]
fn a_block_of_an_all_gather_goes_once_to_every_other_host() {
    for (hosts, ranks, each, messages) in [
        // The first ranks of the hosts exchange all that they have.
        (8, 4, 8, 3),
        (128, 8, 16, 7),
        // A host's blocks go together,
        (8, 4, 2048, 7),
        (128, 8, 1024, 127),
        // and alone.
        (2, 8, 65_536, 8),
        (8, 4, 65_536, 28),
    ] {
        let size = hosts * ranks;
        for host in [|rank, _, ranks| rank / ranks, |rank, hosts, _| rank % hosts] {
            let host = |rank: usize| -> usize { host(rank, hosts, ranks) };
            let topo = Topology::new(&(0..size).map(|rank| host(rank).to_string()).collect::<Vec<_>>());
            let found = all_gather_between_hosts(&topo, each);
            assert_eq!(found, (messages, (hosts - 1) * size * each), "{each} bytes on {hosts} hosts of {ranks}");
        }
    }
}

#[test]
fn all_gathers_of_many_ranks_on_uneven_hosts_fit_together() {
    for (size, hosts) in [(100, 3), (300, 7), (1024, 30)] {
        let topo = Topology::new(
            &(0..size).map(|rank| (rank * rank / 7 % (1 + rank % hosts)).to_string()).collect::<Vec<_>>(),
        );
        let lengths: Vec<usize> = topo.hosts().iter().map(Vec::len).collect();
        assert!(lengths.iter().max() > lengths.iter().min(), "{lengths:?}");
        for each in [1, 3000, 100_000] {
            let (_, bytes) = all_gather_between_hosts(&topo, each);
            assert_eq!(bytes, (topo.hosts().len() - 1) * size * each, "{each} bytes on {lengths:?}");
        }
    }
}

#[test]
fn schedules_of_much_data_and_of_many_ranks_are_short() {
    let gib = 1 << 30;
    for (size, bytes) in [(8, 16 * gib), (64, 16 * gib), (64, 64), (1024, 1 << 20)] {
        let (count, each) = (bytes / 4, bytes / 4 / size);
        let topologies = [
            Topology::single_host(size),
            Topology::new(&(0..size).map(|rank| (rank / 4).to_string()).collect::<Vec<_>>()),
        ];
        // Of which two differ.
        let uneven: Counts = (0..size).map(|rank| each + usize::from(rank == 1)).collect();
        let root = Rank(3);
        for topo in &topologies {
            for collective in [
                Collective::AllReduce { count },
                Collective::Reduce { count, root },
                Collective::Broadcast { count, root },
                Collective::Gather { count: each, root },
                Collective::Scatter { count: each, root },
                Collective::AllGather { counts: uneven.clone() },
                Collective::ReduceScatter { counts: uneven.clone() },
                Collective::AllToAll { send: uneven.clone(), recv: uneven.clone() },
            ] {
                for scaling in [Scaling::Inputs, Scaling::Sum { bytes: 4 }, Scaling::Sum { bytes: 8 }] {
                    let schedule = algo::plan(
                        &collective,
                        Setting {
                            me: root,
                            topo,
                            element: 4,
                            scaling,
                            chunking: Chunking::Chunks,
                            scratch: ScratchLimit::UNBOUNDED,
                        },
                    );
                    let (steps, name) = (schedule.steps.len(), schedule.name);
                    let waits: usize = schedule.steps.iter().map(|step| step.after.len()).sum();
                    let context = format!(
                        "{bytes} bytes on {size} ranks, {scaling:?}, by {name}: {steps} steps that wait for {waits}"
                    );
                    assert!(waits <= 4 * steps, "{context}");
                    assert!(steps <= 3 * size * PIECES, "{context}");
                }
            }
        }
    }
}

/// Into how many pieces what two ranks exchange is cut at most, or almost.
const PIECES: usize = 260;
