//! Mixed operations for a long time: all numbers are right, and memory, file descriptors and threads do not grow.
//!
//! `make soak` does a million of them; `NCCLX_RS_SOAK_OPERATIONS` says how many.

use std::fs;
use std::time::{Duration, Instant};

use ncclx_rs::{Communicator, Mode, Op, OpKind, Rank, ReduceOp, Source, Tag, Work};

use crate::ucx_process::{is_under_test, run_through};
use crate::world::{Wire, buffer, op, run, wires, world_with};
use crate::{Random, alone, entries};

const SIZE: usize = 4;
const SEED: u64 = 20;
const BURST: usize = 8;
const SPLIT_EVERY: usize = 300;
/// No operation takes longer, also where the ranks have to share a core with others: most take less than a millisecond.
const OPERATION_MAX: Duration = Duration::from_secs(10);
/// The threads that call back stay: one, and one more for each time that all were busy.
const CALLBACK_THREADS: usize = 2;

/// What a process holds.
#[derive(Clone, Copy, Debug)]
struct Holdings {
    resident_kib: usize,
    files: usize,
    threads: usize,
}

impl Holdings {
    fn now() -> Holdings {
        let status = fs::read_to_string("/proc/self/status").expect("/proc");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a resident size");
        let resident_kib = line.trim().trim_end_matches(" kB").parse().expect("a number of KiB");
        Holdings { resident_kib, files: entries("fd"), threads: entries("task") }
    }

    /// Waits for what ends by itself to end: a communicator's progress thread outlasts it by a moment.
    fn settled(limit: Holdings) -> Holdings {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let now = Holdings::now();
            let settled = now.files <= limit.files && now.threads <= limit.threads + CALLBACK_THREADS;
            if settled || Instant::now() >= deadline {
                return now;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Memory that was freed is not given back at once, and not all of it: that much is no growth.
    fn check_flat(self, before: Holdings, what: &str) {
        const SLACK_KIB: usize = 16 << 10;
        let flat = self.resident_kib <= before.resident_kib + SLACK_KIB
            && self.files <= before.files
            && self.threads <= before.threads + CALLBACK_THREADS;
        assert!(flat, "{what}: {before:?} became {self:?}");
    }
}

/// What `from` has for `to` at `index` in operation `number`.
fn value(number: usize, from: usize, to: usize, index: usize) -> u64 {
    (number * 31 + from * 1009 + to * 17 + index) as u64
}

fn values(number: usize, from: usize, to: usize, count: usize) -> Vec<u64> {
    (0..count).map(|index| value(number, from, to, index)).collect()
}

fn sums(number: usize, size: usize, to: usize, count: usize) -> Vec<u64> {
    (0..count).map(|index| (0..size).map(|from| value(number, from, to, index)).sum()).collect()
}

fn blocks(size: usize, block: impl FnMut(usize) -> Vec<u64>) -> Vec<u64> {
    (0..size).flat_map(block).collect()
}

/// Some operations, the same on every rank; returns how many.
fn turn(comm: &Communicator, random: &mut Random, number: usize) -> usize {
    let (me, size) = (comm.rank().index(), comm.size());
    let width = random.below(15);
    let count = 1 + random.below(1 << width);
    let root = random.below(size);
    let own = values(number, me, 0, count);
    let done = match random.below(9) {
        0 => {
            let mut data = own;
            comm.all_reduce(&mut data, ReduceOp::Sum).map(|()| assert!(data == sums(number, size, 0, count)))
        }
        1 => {
            let mut data = own;
            let reduced = comm.reduce(&mut data, ReduceOp::Sum, Rank::from(root));
            reduced.map(|()| assert!(me != root || data == sums(number, size, 0, count)))
        }
        2 => {
            let mut data = own;
            let sent = comm.broadcast(&mut data, Rank::from(root));
            sent.map(|()| assert!(data == values(number, root, 0, count)))
        }
        3 => {
            let mut all = vec![0; size * count];
            let gathered = comm.all_gather(&mut all, &own);
            gathered.map(|()| assert!(all == blocks(size, |from| values(number, from, 0, count))))
        }
        4 => {
            let (mut mine, all) = (vec![0; count], blocks(size, |to| values(number, me, to, count)));
            let reduced = comm.reduce_scatter(&mut mine, &all, ReduceOp::Sum);
            reduced.map(|()| assert!(mine == sums(number, size, me, count)))
        }
        5 => {
            let (mut got, all) = (vec![0; size * count], blocks(size, |to| values(number, me, to, count)));
            let exchanged = comm.all_to_all(&mut got, &all);
            exchanged.map(|()| assert!(got == blocks(size, |from| values(number, from, me, count))))
        }
        6 => {
            let (before, mut got) = ((me + size - 1) % size, vec![0; count]);
            let ring = comm.send_recv(&mut got, Rank::from(before), &own, Rank::from((me + 1) % size), Tag(7));
            ring.map(|()| assert!(got == values(number, before, 0, count)))
        }
        7 => run(comm, OpKind::Barrier, vec![], vec![]),
        _ => return burst(comm, number, count.min(3000)),
    };
    done.expect("an operation");
    1
}

/// Collectives and messages in flight together, which nobody waits for at first.
fn burst(comm: &Communicator, number: usize, count: usize) -> usize {
    let (me, size) = (comm.rank().index(), comm.size());
    let (after, before) = ((me + 1) % size, (me + size - 1) % size);
    let submit = |kind, inputs, outputs| -> Work {
        comm.submit(Op { mode: Mode::Async, ..op(kind, inputs, outputs) }).expect("a submission")
    };
    let mut data: Vec<_> = (0..BURST).map(|part| values(number + part, me, 0, count)).collect();
    let mut sent = data.clone();
    let mut received = vec![vec![0; count]; BURST];
    let mut works = Vec::new();
    for part in 0..BURST {
        let (to, from) = (Rank::from(after), Source::Rank(Rank::from(before)));
        let memory = vec![buffer(&mut data[part])];
        works.push(submit(OpKind::AllReduce(ReduceOp::Sum), memory.clone(), memory));
        works.push(submit(OpKind::Send { to, tag: Tag(1) }, vec![buffer(&mut sent[part])], vec![]));
        works.push(submit(OpKind::Recv { from, tag: Tag(1) }, vec![], vec![buffer(&mut received[part])]));
    }
    works.iter().for_each(|work| work.wait(None).expect("an operation"));
    for part in 0..BURST {
        assert!(data[part] == sums(number + part, size, 0, count));
        assert!(received[part] == values(number + part, before, 0, count));
    }
    works.len()
}

/// A communicator of some ranks, for a while.
fn split(comm: &Communicator, random: &mut Random, number: usize) -> usize {
    let left_out = random.below(comm.size());
    let ranks: Vec<Rank> = (0..comm.size()).filter(|rank| *rank != left_out).map(Rank::from).collect();
    let mut random = Random(random.next());
    if comm.rank().index() == left_out {
        return 0;
    }
    let part = comm.split(&ranks, "part").expect("split");
    let done = (0..20).map(|more| turn(&part, &mut random, number + more)).sum();
    part.shutdown().expect("shutdown");
    done
}

/// So many operations on `comm`, with a look at the process after each tenth: the first fifth warms up.
#[allow(clippy::print_stdout, reason = "the figures are what `make soak` is for")]
fn soak(comm: &Communicator, wire: Wire, operations: usize) {
    let mut random = Random(SEED);
    let mut baseline = None;
    let (mut done, mut turns) = (0, 0);
    for tenth in 1..=10 {
        while done < operations * tenth / 10 {
            done += turn(comm, &mut random, turns);
            turns += 1;
            if turns % SPLIT_EVERY == 0 {
                split(comm, &mut random, turns);
            }
        }
        comm.barrier().expect("barrier");
        if comm.rank() == Rank(0) {
            let now = baseline.map_or_else(Holdings::now, Holdings::settled);
            println!("{wire:?}: {done} operations by each of {SIZE} ranks, {now:?}");
            match (tenth, baseline) {
                (2, _) => baseline = Some(now),
                (_, Some(before)) => now.check_flat(before, &format!("{wire:?} after {done} operations")),
                _ => {}
            }
        }
        comm.barrier().expect("barrier");
    }
}

#[test]
fn a_long_run_holds_no_more_at_its_end() {
    let _alone = alone();
    let operations = std::env::var("NCCLX_RS_SOAK_OPERATIONS").map_or(20_000, |value| value.parse().expect("a number"));
    let before = Holdings::now();
    let wires = wires();
    for wire in wires.iter().copied() {
        let operations = operations / wires.len();
        world_with(wire, SIZE, OPERATION_MAX, move |comm| soak(comm, wire, operations));
    }
    let after = Holdings::settled(before);
    let threads = before.threads + CALLBACK_THREADS;
    assert!(after.files <= before.files && after.threads <= threads, "{before:?} became {after:?}");
}

/// The bytes that the process has from malloc, also those of libraries: unlike resident memory, without what is free.
#[allow(unsafe_code, reason = "asks the C library")]
fn allocated() -> usize {
    // SAFETY: it only counts.
    let info = unsafe { libc::mallinfo2() };
    info.uordblks + info.hblkhd
}

/// Checks that each of the turns from the first `warm` on leaves less than `most` bytes behind.
fn leaves_nothing_behind(comm: &Communicator, warm: usize, turns: usize, most: usize, mut turn: impl FnMut(usize)) {
    let mut before = 0;
    for number in 1..=turns {
        turn(number);
        if number == warm {
            comm.barrier().expect("barrier");
            before = allocated();
        }
    }
    comm.barrier().expect("barrier");
    let (after, most) = (allocated(), (turns - warm) * most);
    assert!(after <= before + most, "{before} bytes after {warm} turns, {after} after {turns}");
    comm.barrier().expect("barrier");
}

#[test]
fn messages_and_communicators_leave_nothing_behind_through_ucx() {
    let _alone = alone();
    for way in ["tcp", "posix,cma"] {
        run_through(way, &["messages_leave_nothing_behind", "communicators_leave_nothing_behind"], 2);
    }
}

#[test]
fn messages_leave_nothing_behind() {
    if !is_under_test() {
        return;
    }
    let _alone = alone();
    world_with(Wire::Ucx, 2, OPERATION_MAX, |comm| {
        let other = Rank(1 - comm.rank().0);
        // UCX's memory for one message is more than this.
        leaves_nothing_behind(comm, 4000, 12_000, 100, |number| {
            // Every tenth takes several pieces.
            let count = if number.is_multiple_of(10) { 50_000 } else { 1 + number % 2000 };
            let (sent, mut received) = (vec![number as u8; count], vec![0; count]);
            comm.send_recv(&mut received, other, &sent, other, Tag(1)).expect("a message each way");
            assert!(received == sent);
        });
    });
}

#[test]
fn communicators_leave_nothing_behind() {
    if !is_under_test() {
        return;
    }
    let _alone = alone();
    world_with(Wire::Ucx, 2, OPERATION_MAX, |comm| {
        // A worker of UCX takes ten times as much, and an endpoint half of it.
        leaves_nothing_behind(comm, 20, 60, 10_000, |_| {
            let part = comm.split(&[Rank(0), Rank(1)], "part").expect("split");
            let mut sum = vec![1.0; 10_000];
            part.all_reduce(&mut sum, ReduceOp::Sum).expect("all_reduce");
            assert!(sum.iter().all(|value| *value == 2.0));
            part.shutdown().expect("shutdown");
        });
    });
}
