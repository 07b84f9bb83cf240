//! Worlds of every size, on one device and on one each, in every way to call, on few queues, with delays and without: each value
//! with each other one's. Every world runs all collectives.

use ncclx_rs::sys::cuda::{DeviceMemory, Stream};
use ncclx_rs::{Counts, OpKind, Rank, ReduceOp, Work};

use crate::harness::{context, is_alone, number};
use crate::ranks::{OnDevice, Process, data, of_processes, total};
use crate::recording::{Graph, Mode};

/// What can be combined, and how many values it has: the sizes of worlds, [`DEVICES`], [`WAYS`], [`QUEUES`] and [`DELAYS`].
const FACTORS: [usize; 5] = [8, DEVICES.len(), WAYS.len(), QUEUES.len(), DELAYS.len()];

#[derive(Clone, Copy, Debug)]
enum Devices {
    One,
    OneEach,
}

const DEVICES: [Devices; 2] = [Devices::One, Devices::OneEach];

#[derive(Clone, Copy, Debug)]
enum Way {
    /// Each is awaited before the next one is called.
    Awaited,
    /// They go on two streams in turn, and are awaited together.
    OnTwoStreams,
    /// A graph has all of them.
    Captured,
}

const WAYS: [Way; 3] = [Way::Awaited, Way::OnTwoStreams, Way::Captured];

/// How many queues the streams of a process share.
const QUEUES: [&str; 3] = ["1", "2", "8"];

/// By how many microseconds operations are late at most.
const DELAYS: [&str; 2] = ["0", "50"];

/// By factor, the number of a value.
type Row = [usize; FACTORS.len()];

/// Two factors, and a value of each.
type Pair = [(usize, usize); 2];

fn all_pairs() -> Vec<Pair> {
    let values = |factor: usize| (0..FACTORS[factor]).map(move |value| (factor, value));
    let pairs = |first: usize, second: usize| values(first).flat_map(move |a| values(second).map(move |b| [a, b]));
    (0..FACTORS.len()).flat_map(|first| (0..first).flat_map(move |second| pairs(first, second))).collect()
}

/// Rows in which every pair is. Each begins with a pair that is in none before, and has of every other factor the value that
/// brings the most pairs of that kind.
fn rows() -> Vec<Row> {
    let (mut missing, mut rows) = (all_pairs(), Vec::new());
    while let Some(&[first, second]) = missing.first() {
        let mut chosen = vec![first, second];
        for factor in (0..FACTORS.len()).filter(|factor| *factor != first.0 && *factor != second.0) {
            let brings = |value: usize| {
                let is_brought =
                    |pair: &&Pair| pair.contains(&(factor, value)) && pair.iter().any(|a| chosen.contains(a));
                missing.iter().filter(is_brought).count()
            };
            let best = (0..FACTORS[factor]).rev().max_by_key(|value| brings(*value)).expect("it has values");
            chosen.push((factor, best));
        }
        missing.retain(|pair| !pair.iter().all(|value| chosen.contains(value)));
        let mut row = [0; FACTORS.len()];
        chosen.iter().for_each(|(factor, value)| row[*factor] = *value);
        rows.push(row);
    }
    rows
}

#[test]
fn every_pair_of_values_is_in_a_row() {
    let rows = rows();
    let is_in = |[a, b]: &Pair| rows.iter().any(|row| row[a.0] == a.1 && row[b.0] == b.1);
    let missing: Vec<Pair> = all_pairs().into_iter().filter(|pair| !is_in(pair)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(rows.len() < 30, "{} rows, of which each runs processes", rows.len());
}

/// A collective of this rank, and what its output holds in the end, if that is promised.
struct Case {
    kind: OpKind,
    input: Option<DeviceMemory>,
    /// The input, if it is missing.
    output: Option<DeviceMemory>,
    expected: Option<Vec<f32>>,
}

impl Case {
    fn submit(&self, rank: &OnDevice, stream: &Stream) -> Work {
        let is_in_place = matches!(self.kind, OpKind::Broadcast { .. });
        let (inputs, outputs): (Vec<_>, Vec<_>) = (self.input.iter().collect(), self.output.iter().collect());
        let outputs = if is_in_place { &inputs } else { &outputs };
        rank.submit_on(stream, self.kind.clone(), (&inputs, outputs), None).expect("a work")
    }

    fn check(&self, rank: &OnDevice, row: &str) {
        let Some(expected) = &self.expected else { return };
        let output = self.output.as_ref().or(self.input.as_ref()).expect("it has one");
        assert!(rank.values(output) == *expected, "{:?} on rank {} of {row}", self.kind, rank.me());
    }
}

/// Every collective, on so many elements a rank, or as many in all where it has blocks for ranks.
fn cases(rank: &OnDevice, len: usize) -> Vec<Case> {
    let (me, size, root) = (rank.me(), rank.comm.size(), rank.comm.size() - 1);
    let part = len.div_ceil(size);
    let (is_root, block, whole) = (me == root, me * part..(me + 1) * part, part * size);
    let all = |of: &dyn Fn(usize) -> Vec<f32>| (0..size).flat_map(of).collect::<Vec<f32>>();
    let memory = |values: &[f32]| Some(rank.memory(values));
    let room = |len: usize| Some(rank.memory(&vec![-1.0; len]));
    let (own, long, at) = (data(me, len), data(me, whole), Rank::from(root));
    let case = |kind, input, output, expected| Case { kind, input, output, expected };
    let exchange = OpKind::AllToAll { send: Counts::equal(part, size), recv: Counts::equal(part, size) };
    let (reduced, gathered) = (total(size, len), all(&|from| data(from, len)));
    vec![
        case(OpKind::AllReduce(ReduceOp::Sum), memory(&own), room(len), Some(reduced.clone())),
        case(OpKind::AllGather, memory(&own), room(len * size), Some(gathered.clone())),
        case(OpKind::Broadcast { root: at }, memory(&own), None, Some(data(root, len))),
        case(
            OpKind::ReduceScatter(ReduceOp::Sum),
            memory(&long),
            room(part),
            Some(total(size, whole)[block.clone()].to_vec()),
        ),
        case(exchange, memory(&long), room(whole), Some(all(&|from| data(from, whole)[block.clone()].to_vec()))),
        case(OpKind::Reduce { op: ReduceOp::Sum, root: at }, memory(&own), room(len), is_root.then_some(reduced)),
        case(
            OpKind::Gather { root: at },
            memory(&own),
            if is_root { room(len * size) } else { None },
            is_root.then_some(gathered),
        ),
        case(
            OpKind::Scatter { root: at },
            if is_root { memory(&long) } else { None },
            room(part),
            Some(data(root, whole)[block.clone()].to_vec()),
        ),
    ]
}

/// Several segments of 16,384 elements, and a piece of one.
const LEN: usize = 17_000;

fn run(rank: &OnDevice, way: Way, text: &str) -> (Vec<Case>, Option<Graph>, Stream) {
    let (cases, second) = (cases(rank, LEN), Stream::new(&rank.context, 0).expect("a stream"));
    let mut graph = None;
    match way {
        Way::Awaited => cases.iter().for_each(|case| case.submit(rank, &rank.stream).wait(None).expect("success")),
        Way::OnTwoStreams => {
            let streams = [&rank.stream, &second];
            let works: Vec<Work> =
                cases.iter().zip(streams.iter().cycle()).map(|(case, stream)| case.submit(rank, stream)).collect();
            works.iter().for_each(|work| work.wait(None).expect("success"));
        }
        Way::Captured => {
            let made = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                cases.iter().for_each(|case| _ = case.submit(rank, &rank.stream));
            });
            (0..2).for_each(|_| made.replay(&rank.stream));
            graph = Some(made);
        }
    }
    cases.iter().for_each(|case| case.check(rank, text));
    (cases, graph, second)
}

#[test]
fn every_pair_of_values_goes_together() {
    const TEST: &str = "pairwise::every_pair_of_values_goes_together";
    const ROW: &str = "NCCLX_RS_TEST_ROW";
    if is_alone(TEST) {
        let row = rows()[number(ROW).expect("it is set") as usize];
        let (process, devices) = (Process::new(TEST), DEVICES[row[1]]);
        let device = if let Devices::OneEach = devices { process.rank.0 } else { 0 };
        let rank = process.join("pairwise", device, &[("device_staging_bytes", "65536")]);
        let kept = run(&rank, WAYS[row[2]], &format!("{row:?}"));
        return rank.leave(kept);
    }
    if context().is_none() {
        return;
    }
    for (index, row) in rows().into_iter().enumerate() {
        let (size, index) = (row[0] + 1, index.to_string());
        let all = size.to_string();
        let settings = [
            ("SOFTCUDA_DEVICES", if let Devices::OneEach = DEVICES[row[1]] { &all[..] } else { "1" }),
            ("SOFTCUDA_QUEUES", QUEUES[row[3]]),
            ("SOFTCUDA_DELAY_US", DELAYS[row[4]]),
            ("SOFTCUDA_WEAK", "1"),
            (ROW, &index),
        ];
        of_processes(TEST, &vec![&settings[..]; size]);
    }
}
