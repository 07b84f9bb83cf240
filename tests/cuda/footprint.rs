//! What stays in memory and open after very many operations: nothing.

use ncclx_rs::sys::cuda::DeviceMemory;
use ncclx_rs::{Counts, OpKind, Rank, ReduceOp, Work};

use crate::harness::{Software, alone};
use crate::messages::{open_files, recv, send};
use crate::ranks::{OnDevice, hosts, world};

/// Several segments for the longest.
const HINTS: &[(&str, &str)] = &[("device_staging_bytes", "65536")];

/// How many operations come first, after which everything has been made, and how many follow.
const FIRST: usize = 5_000;
const OPERATIONS: usize = 100_000;

/// What the allocator may keep.
const MARGIN_KIB: usize = 4 << 10;

/// What a process holds.
#[derive(Debug)]
struct Held {
    kib: usize,
    files: usize,
    threads: usize,
    handles: i64,
}

impl Held {
    fn now(software: &Software) -> Held {
        let status = std::fs::read_to_string("/proc/self/status").expect("Linux has it");
        let memory = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("Linux says so");
        Held {
            kib: memory.trim().trim_end_matches(" kB").parse().expect("a number"),
            files: open_files(),
            threads: std::fs::read_dir("/proc/self/task").expect("a list").count(),
            handles: software.settled(),
        }
    }
}

/// The operations of two ranks, in turn.
struct Load<'a> {
    rank: &'a OnDevice,
    short: [DeviceMemory; 2],
    both: DeviceMemory,
    long: DeviceMemory,
}

impl Load<'_> {
    fn submit(&self, number: usize) -> Work {
        let (me, [one, other], both) = (self.rank.me(), &self.short, &self.both);
        let root = Rank::from(number % 2);
        let (kind, inputs, outputs) = match number % 8 {
            0 => (OpKind::AllReduce(ReduceOp::Sum), vec![one], vec![one]),
            1 => (OpKind::AllGather, vec![one], vec![both]),
            2 => (OpKind::ReduceScatter(ReduceOp::Max), vec![both], vec![one]),
            3 => (OpKind::Broadcast { root }, vec![one], vec![one]),
            4 => {
                let counts = Counts::equal(50, 2);
                (OpKind::AllToAll { send: counts.clone(), recv: counts }, vec![one], vec![other])
            }
            5 => (OpKind::Reduce { op: ReduceOp::Avg, root }, vec![one], vec![one]),
            6 if number % 400 == 6 => (OpKind::AllReduce(ReduceOp::Sum), vec![&self.long], vec![&self.long]),
            6 => (OpKind::Barrier, vec![], vec![]),
            _ if number % 16 / 8 == me => (send(1 - me, 0), vec![one], vec![]),
            _ => (recv(1 - me, 0), vec![], vec![other]),
        };
        self.rank.submit(kind, &inputs, &outputs).expect("a work")
    }

    fn run(&self, numbers: std::ops::Range<usize>) {
        for number in numbers {
            let work = self.submit(number);
            // Some hundred are in flight.
            if number % 300 == 299 {
                work.wait(None).expect("success");
            }
        }
        self.rank.stream.synchronize().expect("a stream that ends");
        self.rank.comm.barrier().expect("the other one has done as many");
    }
}

fn nothing_is_left(rank: OnDevice) {
    let software = Software::new().expect("this is not called without it");
    let memory = |len: usize| rank.memory(&vec![0.0; len]);
    let load = Load { rank: &rank, short: [100; 2].map(memory), both: memory(200), long: memory(40_000) };
    // One rank looks, while the other one waits: they share the process.
    let held = || {
        let held = (rank.me() == 0).then(|| Held::now(&software));
        rank.comm.barrier().expect("both are there");
        held
    };
    load.run(0..FIRST);
    let before = held();
    load.run(FIRST..FIRST + OPERATIONS);
    if let (Some(before), Some(after)) = (before, held()) {
        let is_flat = after.kib <= before.kib + MARGIN_KIB
            && after.files <= before.files
            && after.threads <= before.threads
            && after.handles <= before.handles;
        assert!(is_flat, "{before:?} became {after:?}");
    }
    let Load { short, both, long, .. } = load;
    rank.leave((short, both, long));
}

#[test]
fn a_hundred_thousand_operations_leave_nothing() {
    alone("footprint::a_hundred_thousand_operations_leave_nothing", &[&[]], || {
        if Software::new().is_some() {
            world(2, HINTS, nothing_is_left);
        }
    });
}

#[test]
fn a_hundred_thousand_operations_between_hosts_leave_nothing() {
    alone("footprint::a_hundred_thousand_operations_between_hosts_leave_nothing", &[&[]], || {
        if Software::new().is_some() {
            hosts("ab", HINTS, nothing_is_left);
        }
    });
}
