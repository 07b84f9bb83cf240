use std::collections::VecDeque;

use super::*;
use crate::algo::collective::{Chunking, ScratchLimit};
use crate::algo::{Collective, plan};
use crate::schedule::{Schedule, check};
use crate::sync::Arc;
use crate::topo::Topology;

/// A rank that takes its steps in their order, on elements of eight bytes.
struct Machine {
    schedule: Schedule,
    next: usize,
    input: Vec<u64>,
    output: Vec<u64>,
    scratch: Vec<u64>,
    /// What is on its device.
    device: Vec<u64>,
}

impl Machine {
    fn memory(&mut self, slice: Slice) -> &mut [u64] {
        let space = match slice.space {
            Space::Input => &mut self.input,
            Space::Output => &mut self.output,
            _ => &mut self.scratch,
        };
        &mut space[slice.offset..][..slice.len]
    }
}

/// The world that is tested: ranks in islands, as they call something together.
struct World {
    islands: Arc<Islands>,
    call: IslandCall,
    count: usize,
    machines: Vec<Machine>,
    wires: Vec<VecDeque<Vec<u64>>>,
    /// A rank on whose device the result never is.
    stuck: Option<usize>,
}

fn data(rank: usize, count: usize) -> Vec<u64> {
    (0..count).map(|at| (rank as u64 + 1) * 1000 + at as u64).collect()
}

impl World {
    fn new(groups: &[&[u32]], call: IslandCall, count: usize) -> World {
        World::within(ScratchLimit::DEFAULT, groups, call, count)
    }

    /// One whose ranks may take so much memory to combine in.
    fn within(scratch: ScratchLimit, groups: &[&[u32]], call: IslandCall, count: usize) -> World {
        let ranks = groups.iter().map(|group| group.len()).sum::<usize>();
        let groups = groups.iter().map(|group| group.iter().copied().map(Rank).collect()).collect();
        let islands = Arc::new(Islands::new(groups));
        let topo = Topology::single_host(ranks);
        let collective = Collective::ByIslands { call, count, islands: islands.clone() };
        let machine = |me: usize| {
            let setting = Setting {
                me: Rank::from(me),
                topo: &topo,
                element: 8,
                scaling: Scaling::Nothing,
                chunking: Chunking::Chunks,
                scratch,
            };
            let schedule = plan(&collective, setting);
            let bounded = Setting { scratch: ScratchLimit::at_most(1), ..setting };
            let calls = |schedule: &Schedule| {
                schedule.steps.iter().filter(|step| matches!(step.action, Action::Await { .. })).count()
            };
            let bounded = plan(&collective, bounded);
            assert_eq!(calls(&bounded), calls(&schedule), "it is never cut: its caller's part is done once");
            let group = &islands.groups()[islands.group_of(Rank::from(me))];
            let own = data(me, count);
            let (input, output, device) = match group.len() {
                1 => (own, vec![7; count], vec![]),
                members => {
                    let part = islands.part_of(Rank::from(me), count).len;
                    let mut output = vec![7; part + members];
                    let place = group.iter().position(|rank| rank.index() == me).expect("it is in its group");
                    output[part + place] = 100 + me as u64;
                    (vec![], output, own)
                }
            };
            Machine { scratch: vec![0; schedule.scratch], schedule, next: 0, input, output, device }
        };
        let machines: Vec<Machine> = (0..ranks).map(machine).collect();
        let schedules: Vec<Schedule> = machines.iter().map(|machine| machine.schedule.clone()).collect();
        check(&schedules).expect("schedules that fit together");
        World { islands, call, count, machines, wires: vec![VecDeque::new(); ranks * ranks], stuck: None }
    }

    /// Which ranks wait for their callers, all of a group and all for the same; nothing if not all of it do.
    fn group_that_waits(&self) -> Option<(Vec<usize>, u32)> {
        self.islands.groups().iter().filter(|group| group.len() > 1).find_map(|group| {
            let numbers: Vec<Option<u32>> = group
                .iter()
                .map(|rank| {
                    let machine = &self.machines[rank.index()];
                    match machine.schedule.steps.get(machine.next)?.action {
                        Action::Await { number, .. } => Some(number),
                        _ => None,
                    }
                })
                .collect();
            let number = numbers[0]?;
            numbers
                .iter()
                .all(|other| *other == Some(number))
                .then(|| (group.iter().map(|rank| rank.index()).collect(), number))
        })
    }

    /// What a library does for a group.
    fn move_within(&mut self, group: &[usize], number: u32) {
        let gives = match self.call {
            IslandCall::AllReduce => true,
            IslandCall::Broadcast { root } => group.contains(&root.index()),
        };
        let part = |world: &World, rank: usize| world.islands.part_of(Rank::from(rank), world.count);
        let together = |world: &World| -> Vec<u64> {
            match world.call {
                IslandCall::Broadcast { root } => world.machines[root.index()].device.clone(),
                IslandCall::AllReduce => {
                    (0..world.count).map(|at| group.iter().map(|rank| world.machines[*rank].device[at]).sum()).collect()
                }
            }
        };
        match number {
            BEGIN => {
                for rank in group {
                    let own = part(self, *rank).len;
                    let words: Vec<u64> = group.iter().map(|rank| 100 + *rank as u64).collect();
                    assert_eq!(self.machines[*rank].output[own..], words, "what each says of its library");
                }
            }
            GATHERED if gives => {
                let all = together(self);
                for rank in group {
                    let own = part(self, *rank);
                    self.machines[*rank].output[..own.len].copy_from_slice(&all[own.offset..][..own.len]);
                    self.machines[*rank].device.clone_from(&all);
                }
            }
            SPREAD if self.call == IslandCall::AllReduce || !gives => {
                let mut all = Vec::new();
                group.iter().for_each(|rank| all.extend(&self.machines[*rank].output[..part(self, *rank).len]));
                group.iter().for_each(|rank| self.machines[*rank].device.clone_from(&all));
            }
            _ => {}
        }
        let goes_on = |rank: &&usize| number != END || self.stuck != Some(**rank);
        group.iter().filter(goes_on).for_each(|rank| self.machines[*rank].next += 1);
    }

    /// Takes a rank's next step, if it can.
    fn step(&mut self, me: usize) -> bool {
        let ranks = self.machines.len();
        let machine = &mut self.machines[me];
        let Some(step) = machine.schedule.steps.get(machine.next) else { return false };
        match step.action {
            Action::Await { .. } => return false,
            Action::Send { to, from } => {
                let sent = machine.memory(from).to_vec();
                self.wires[me * ranks + to.index()].push_back(sent);
            }
            Action::Recv { from, into } | Action::RecvReduce { from, into } => {
                let Some(came) = self.wires[from.index() * ranks + me].pop_front() else { return false };
                let adds = matches!(step.action, Action::RecvReduce { .. });
                for (value, came) in machine.memory(into).iter_mut().zip(came) {
                    *value = came + if adds { *value } else { 0 };
                }
            }
            Action::Copy { from, into } => {
                let copied = machine.memory(from).to_vec();
                machine.memory(into).copy_from_slice(&copied);
            }
            Action::Fold { from, into, .. } => {
                let others = machine.memory(from).to_vec();
                for block in others.chunks(into.len.max(1)) {
                    machine.memory(into).iter_mut().zip(block).for_each(|(value, other)| *value += other);
                }
            }
            other => panic!("no island does {other:?}"),
        }
        self.machines[me].next += 1;
        true
    }

    /// Goes on until nothing goes on any more.
    fn go_on(&mut self) {
        let ranks = self.machines.len();
        loop {
            while (0..ranks).any(|rank| self.step(rank)) {}
            match self.group_that_waits() {
                Some((group, number)) => self.move_within(&group, number),
                None => return,
            }
        }
    }

    fn run(mut self) {
        self.go_on();
        let ranks = self.machines.len();
        let expected: Vec<u64> = match self.call {
            IslandCall::Broadcast { root } => data(root.index(), self.count),
            IslandCall::AllReduce => {
                let all: Vec<Vec<u64>> = (0..ranks).map(|rank| data(rank, self.count)).collect();
                (0..self.count).map(|at| all.iter().map(|data| data[at]).sum()).collect()
            }
        };
        let (call, count, islands) = (self.call, self.count, &self.islands);
        for (rank, machine) in self.machines.iter().enumerate() {
            let what = format!("rank {rank}, {call:?} of {count}, {islands:?}");
            assert_eq!(machine.next, machine.schedule.steps.len(), "{what} waits for ever");
            let is_alone = islands.groups()[islands.group_of(Rank::from(rank))].len() == 1;
            let result = if is_alone { &machine.output } else { &machine.device };
            assert_eq!(result, &expected, "{what}");
        }
        assert!(self.wires.iter().all(VecDeque::is_empty));
    }
}

const WORLDS: &[&[&[u32]]] = &[
    &[&[0, 1], &[2, 3], &[4]],
    &[&[0, 1, 2], &[3, 4], &[5]],
    &[&[0, 2, 4], &[1, 3]],
    &[&[0], &[1, 2]],
    &[&[0, 1, 2]],
    &[&[4, 5, 6, 7, 8, 9, 10, 11, 12, 13], &[0], &[1], &[2, 3]],
    &[&[0, 1], &[2], &[3], &[4], &[5], &[6], &[7], &[8], &[9], &[10]],
];

#[test]
fn everyone_has_the_result_whatever_the_groups() {
    for groups in WORLDS {
        for count in [0, 1, 40, 41, 100_003] {
            World::new(groups, IslandCall::AllReduce, count).run();
            World::within(ScratchLimit::at_most(1), groups, IslandCall::AllReduce, count).run();
            let ranks = groups.iter().map(|group| group.len() as u32).sum::<u32>();
            (0..ranks).for_each(|root| World::new(groups, IslandCall::Broadcast { root: Rank(root) }, count).run());
        }
    }
}

#[test]
fn no_rank_of_a_group_ends_before_all_have_the_result() {
    let mut world = World::new(&[&[0, 1, 2], &[3, 4], &[5]], IslandCall::AllReduce, 40);
    world.stuck = Some(1);
    world.go_on();
    let has_ended = world.machines.iter().map(|machine| machine.next == machine.schedule.steps.len());
    assert_eq!(has_ended.collect::<Vec<_>>(), [false, false, false, true, true, true]);
}

#[test]
fn what_callers_do_is_one_after_the_other() {
    for count in [0, 1, 40] {
        for machine in World::new(&[&[0, 1, 2], &[3, 4], &[5]], IslandCall::AllReduce, count).machines {
            let steps = &machine.schedule.steps;
            let waits = |step: &usize| matches!(steps[*step].action, Action::Await { .. });
            let awaits: Vec<usize> = (0..steps.len()).filter(waits).collect();
            for pair in awaits.windows(2) {
                let mut before = vec![pair[1]];
                let mut next = 0;
                while let Some(step) = before.get(next) {
                    before.extend(steps[*step].after.iter().map(|step| *step as usize));
                    next += 1;
                }
                assert!(before.contains(&pair[0]), "{pair:?} of {count}");
            }
        }
    }
}

#[test]
fn each_rank_of_a_group_sends_its_part_of_what_one_alone_sends() {
    let sent = |groups: &[&[u32]], rank: usize| -> usize {
        let world = World::new(groups, IslandCall::AllReduce, 3600);
        let steps = world.machines[rank].schedule.steps.iter();
        steps.map(|step| if let Action::Send { from, .. } = step.action { from.len } else { 0 }).sum()
    };
    // Half of its part, and half of the sum of that; and a word.
    assert_eq!(sent(&[&[0, 1], &[2, 3]], 0), 1800 + 1);
    assert_eq!(sent(&[&[0], &[1]], 0), 3600);
    assert_eq!(sent(&[&[0, 1], &[2, 3, 4], &[5]], 5), 2 * 3600 * 2 / 3);
}

#[test]
fn a_rank_alone_combines_all_runs_in_the_memory_of_one() {
    let groups = [0..64, 64..127, 127..128].map(|group| group.map(Rank).collect::<Vec<_>>());
    let (topo, count, element) = (Topology::single_host(128), 16 << 20, 4);
    let islands = Arc::new(Islands::new(groups.into()));
    let collective = Collective::ByIslands { call: IslandCall::AllReduce, count, islands };
    for scratch in [ScratchLimit::DEFAULT, ScratchLimit::at_most(1)] {
        let setting = Setting {
            me: Rank(127),
            topo: &topo,
            element,
            scaling: Scaling::Nothing,
            chunking: Chunking::Chunks,
            scratch,
        };
        let schedule = plan(&collective, setting);
        let most = scratch.limit().max(count * element / 16);
        assert!((1..=most).contains(&(schedule.scratch * element)), "{} elements", schedule.scratch);
    }
}
