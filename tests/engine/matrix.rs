//! Every algorithm over every wire, in worlds of several sizes: data that differ by rank and position, results against
//! what each rank can compute alone.

use std::cell::Cell;
use std::time::Duration;

use ncclx_rs::algo::{self, Chunking, Collective, Scaling, ScratchLimit, Setting};
use ncclx_rs::{Communicator, Counts, OpKind, Rank, ReduceOp, SharedMemory, Topology};

use crate::ucx_process;
use crate::world::{Wire, buffer, host_of, run, world_hinted};

const SIZES: [usize; 5] = [2, 3, 5, 9, 17];
/// Elements of eight bytes a block: none, one, uneven and tiny, announced; and of the largest, together about 1 MiB.
const BLOCKS: [usize; 4] = [0, 1, 7, 1025];
const MEBIBYTE: usize = (1 << 20) / size_of::<f64>();
const LIMIT: Duration = Duration::from_secs(60);
const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max];

/// Whole numbers, so that sums are exact in any order; the rank with the largest changes from element to element.
fn value(rank: usize, index: usize) -> f64 {
    ((rank + 1) * 10_007 * (index + 3) % 65_521) as f64
}

fn values(rank: usize, range: std::ops::Range<usize>) -> Vec<f64> {
    range.map(|index| value(rank, index)).collect()
}

fn reduced(op: ReduceOp, size: usize, range: std::ops::Range<usize>) -> Vec<f64> {
    let one = |index| {
        let each = (0..size).map(|rank| value(rank, index));
        match op {
            ReduceOp::Max => each.fold(f64::MIN, f64::max),
            ReduceOp::Avg => each.sum::<f64>() / size as f64,
            _ => each.sum(),
        }
    };
    range.map(one).collect()
}

/// One rank's part in the tests of one communicator.
struct Part<'a> {
    comm: &'a Communicator,
    algorithm: &'static str,
    topo: &'a Topology,
    me: usize,
    size: usize,
    /// The algorithm does something.
    has_run: Cell<bool>,
}

impl Part<'_> {
    /// Whether the algorithm does this collective: another would run it else, which has its own turn.
    fn does(&self, collective: Collective, average: bool) -> bool {
        let scaling = if average { Scaling::Sum { bytes: 8 } } else { Scaling::Nothing };
        let setting = Setting {
            me: Rank(0),
            topo: self.topo,
            element: 8,
            scaling,
            chunking: Chunking::Chunks,
            scratch: ScratchLimit::UNBOUNDED,
        };
        let does = algo::plan_with(self.algorithm, &collective, setting).is_some();
        self.has_run.set(self.has_run.get() || does);
        does
    }

    fn compare(&self, what: &str, block: usize, got: &[f64], expected: &[f64]) {
        let Part { comm, algorithm, me, size, .. } = self;
        // A mean is rounded once by the engine and once here.
        let close = |(got, expected): (&f64, &f64)| (got - expected).abs() <= expected.abs() * 2.0 * f64::EPSILON;
        let wrong = got.iter().zip(expected).position(|pair| !close(pair));
        assert!(
            wrong.is_none() && got.len() == expected.len(),
            "{algorithm}, {comm:?}, rank {me} of {size}, {what} of {block}: element {wrong:?}"
        );
    }

    /// Every collective that the algorithm does, on blocks of so many elements. True: there is one.
    fn run(&self, block: usize) -> bool {
        let Part { comm, me, size, .. } = *self;
        let (whole, root) = (block * size, Rank::from(size / 2));
        let (own, mine) = (values(me, 0..whole), me * block..(me + 1) * block);
        for op in OPS {
            let average = op == ReduceOp::Avg;
            if self.does(Collective::AllReduce { count: whole }, average) {
                let mut data = own.clone();
                comm.all_reduce(&mut data, op).expect("all_reduce");
                self.compare(op.name(), block, &data, &reduced(op, size, 0..whole));
            }
            if self.does(Collective::Reduce { count: whole, root }, average) {
                let mut data = own.clone();
                comm.reduce(&mut data, op, root).expect("reduce");
                let expected = if comm.rank() == root { reduced(op, size, 0..whole) } else { own.clone() };
                self.compare("reduce", block, &data, &expected);
            }
            if self.does(Collective::ReduceScatter { counts: Counts::equal(block, size) }, average) {
                let mut data = vec![0.0; block];
                comm.reduce_scatter(&mut data, &own, op).expect("reduce_scatter");
                self.compare("reduce_scatter", block, &data, &reduced(op, size, mine.clone()));
            }
        }
        let gathered: Vec<f64> = (0..size).flat_map(|rank| values(rank, 0..block)).collect();
        if self.does(Collective::Broadcast { count: whole, root }, false) {
            let mut data = own.clone();
            comm.broadcast(&mut data, root).expect("broadcast");
            self.compare("broadcast", block, &data, &values(root.index(), 0..whole));
        }
        if self.does(Collective::AllGather { counts: Counts::equal(block, size) }, false) {
            let mut data = vec![0.0; whole];
            comm.all_gather(&mut data, &own[..block]).expect("all_gather");
            self.compare("all_gather", block, &data, &gathered);
        }
        if self.does(Collective::AllGatherIntoParts { count: block }, false) {
            let mut memory = SharedMemory::<f64>::new(whole).expect("memory");
            let window = comm.window_register(buffer(&mut memory[..])).expect("register").id();
            let mut input = own[..block].to_vec();
            let (inputs, outputs) = (vec![buffer(&mut input)], vec![buffer(&mut memory[..])]);
            run(comm, OpKind::AllGatherPersistent { window }, inputs, outputs).expect("all_gather_p");
            comm.window_deregister(window).expect("deregister");
            self.compare("all_gather_p", block, &memory, &gathered);
        }
        if self.does(Collective::Gather { count: block, root }, false) {
            let mut data = vec![0.0; whole];
            comm.gather(&mut data, &own[..block], root).expect("gather");
            let expected = if comm.rank() == root { gathered } else { vec![0.0; whole] };
            self.compare("gather", block, &data, &expected);
        }
        if self.does(Collective::Scatter { count: block, root }, false) {
            let mut data = vec![0.0; block];
            comm.scatter(&mut data, &own, root).expect("scatter");
            self.compare("scatter", block, &data, &values(root.index(), mine.clone()));
        }
        let counts = Counts::equal(block, size);
        if self.does(Collective::AllToAll { send: counts.clone(), recv: counts }, false) {
            let mut data = vec![0.0; whole];
            comm.all_to_all(&mut data, &own).expect("all_to_all");
            let expected: Vec<f64> = (0..size).flat_map(|rank| values(rank, mine.clone())).collect();
            self.compare("all_to_all", block, &data, &expected);
        }
        if self.does(Collective::Barrier, false) {
            comm.barrier().expect("barrier");
        }
        self.has_run.get()
    }
}

fn everything_over(wire: Wire) {
    everything_with(wire, "0");
}

/// The same, where so many threads of each rank share long copies and reductions.
fn everything_with(wire: Wire, threads: &'static str) {
    for algorithm in algo::names() {
        for size in SIZES {
            let hosts: Vec<&str> = (0..size).map(|rank| host_of(wire, rank, size)).collect();
            let topo = Topology::new(&hosts);
            world_hinted(wire, size, LIMIT, &[("algorithm", algorithm), ("threads", threads)], move |comm| {
                let part =
                    Part { comm, algorithm, topo: &topo, me: comm.rank().index(), size, has_run: Cell::new(false) };
                let blocks = BLOCKS.into_iter().chain([MEBIBYTE / size]);
                let runs: Vec<bool> = blocks.map(|block| part.run(block)).collect();
                let expected = match algorithm {
                    // Between ranks of the CPU alone no library runs.
                    "local" | "islands" => false,
                    "hierarchical" => wire == Wire::Mixed && size > 2,
                    _ => true,
                };
                assert!(
                    runs.iter().all(|runs| *runs == expected),
                    "{algorithm} with {size} ranks over {wire:?}: {runs:?}"
                );
            });
        }
    }
}

#[test]
fn every_algorithm_is_right_over_shared_memory() {
    everything_over(Wire::Shm);
}

#[test]
fn every_algorithm_is_right_with_teams_of_threads() {
    everything_with(Wire::Shm, "3");
}

#[test]
fn every_algorithm_is_right_over_tcp() {
    everything_over(Wire::Tcp);
}

#[test]
fn every_algorithm_is_right_between_hosts() {
    everything_over(Wire::Mixed);
}

#[test]
fn every_algorithm_is_right_over_ucx() {
    if ucx_process::is_under_test() {
        everything_over(Wire::Ucx);
    }
}
