//! Whatever can be combined: collectives, algorithms, types, reductions, lengths, worlds, devices, hosts, streams and captures, as
//! seeds
//! draw them. The CPU's half of the same communicator says what is right, to
//! the bit.
//!
//! `NCCLX_RS_SAMPLES` says how many seeds, from `NCCLX_RS_SAMPLE` on; what fails names its seed.

use ncclx_rs::algo;
use ncclx_rs::sys::cuda::{DeviceMemory, Stream, copy_from_host, copy_to_host};
use ncclx_rs::types::Arithmetic;
use ncclx_rs::{Buffer, Counts, DType, Mode, Op, OpKind, Rank, ReduceOp, StreamHandle};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::harness::{context, is_alone, number, seeds};
use crate::ranks::{OnDevice, Process, of_processes};
use crate::recording::{self, Graph};

/// Numbers whose sums and products are rounded and stay small: of any digits, from -2 to 2, whole ones where a type has no others,
/// and any bits where it cannot be computed with.
fn values(dtype: DType, count: usize, random: &mut StdRng) -> Vec<u8> {
    let float = |width: usize, random: &mut StdRng| {
        let number = random.random_range(-2.0..2.0f64);
        match (dtype, width) {
            // The upper half of a float32; the sum of exponent and digits of a half, of numbers from 2⁻¹⁴ to 2.
            (DType::BF16, _) => u64::from((number as f32).to_bits() >> 16),
            (_, 2) => u64::from(random.random_range(0x0400..0x4000u16) | (u16::from(number < 0.0) << 15)),
            (_, 4) => u64::from((number as f32).to_bits()),
            _ => number.to_bits(),
        }
    };
    let (size, mut bytes) = (dtype.size(), Vec::with_capacity(count * dtype.size()));
    for _ in 0..count {
        match dtype.arithmetic() {
            Arithmetic::Bool => bytes.push(random.random_range(0..2)),
            Arithmetic::Integer => {
                bytes.extend_from_slice(&random.random_range(-2..=2i64).to_le_bytes()[..size]);
            }
            Arithmetic::Float => bytes.extend_from_slice(&float(size, random).to_le_bytes()[..size]),
            Arithmetic::Complex => {
                for _ in 0..2 {
                    bytes.extend_from_slice(&float(size / 2, random).to_le_bytes()[..size / 2]);
                }
            }
            Arithmetic::None => bytes.extend((0..size).map(|_| random.random::<u8>())),
        }
    }
    bytes
}

/// One collective, as a rank sees it: the elements of its input and of its output, where it has them.
#[derive(Clone, Debug)]
struct Drawn {
    kind: OpKind,
    dtype: DType,
    input: Option<usize>,
    output: Option<usize>,
    is_in_place: bool,
}

impl Drawn {
    /// The same collective on every rank that draws from the same seed.
    fn new(me: usize, size: usize, random: &mut StdRng) -> Drawn {
        let root = random.random_range(0..size);
        let (is_root, root) = (root == me, Rank::from(root));
        let dtype = *DType::ALL.choose(random).expect("types");
        let ops: Vec<ReduceOp> = ReduceOp::all(-2.75).into_iter().filter(|op| op.supports(dtype)).collect();
        let op = ops.choose(random).copied();
        let n = *[0, 1, 7, 1000, 20_000].choose(random).expect("lengths");
        let counts: Vec<Vec<usize>> =
            (0..size).map(|_| (0..size).map(|_| random.random_range(0..=n / size + 1)).collect()).collect();
        let is_in_place = random.random();
        let (kind, input, output) = match (random.random_range(0..8), op) {
            (0, Some(op)) => (OpKind::AllReduce(op), Some(n), Some(n)),
            (1, Some(op)) => (OpKind::Reduce { op, root }, Some(n), Some(n)),
            (2, Some(op)) => (OpKind::ReduceScatter(op), Some(n * size), Some(n)),
            (0 | 3, _) => (OpKind::Broadcast { root }, Some(n), Some(n)),
            (1 | 4, _) => (OpKind::AllGather, Some(n), Some(n * size)),
            (2 | 5, _) => (OpKind::Gather { root }, Some(n), is_root.then_some(n * size)),
            (6, _) => (OpKind::Scatter { root }, is_root.then_some(n * size), Some(n)),
            _ => {
                let send: Counts = counts[me].iter().copied().collect();
                let recv: Counts = counts.iter().map(|row| row[me]).collect();
                let (sent, received) = (send.total(), recv.total());
                (OpKind::AllToAll { send, recv }, Some(sent), Some(received))
            }
        };
        let is_in_place = match kind {
            OpKind::Broadcast { .. } => true,
            OpKind::AllReduce(_) => is_in_place,
            _ => false,
        };
        Drawn { kind, dtype, input, output, is_in_place }
    }

    /// Whether a rank is promised what its output holds in the end.
    fn is_reported(&self, me: usize) -> bool {
        !matches!(self.kind, OpKind::Reduce { root, .. } if root.index() != me)
    }

    fn op(&self, input: Option<Buffer>, output: Option<Buffer>, mode: Mode) -> Op {
        Op {
            kind: self.kind.clone(),
            inputs: input.into_iter().collect(),
            outputs: output.into_iter().collect(),
            timeout: None,
            mode,
        }
    }

    /// What the CPU makes of it.
    fn on_the_cpu(&self, rank: &OnDevice, before: &[u8]) -> Vec<u8> {
        // Aligned as every type needs it.
        let memory = |len: Option<usize>| vec![0u128; (len.unwrap_or(0) * self.dtype.size()).div_ceil(16).max(1)];
        let (mut from, mut into) = (memory(self.input), memory(self.output));
        let (input, output) = (from.as_mut_ptr().cast::<u8>(), into.as_mut_ptr().cast::<u8>());
        let output = if self.is_in_place { input } else { output };
        // SAFETY: as long as the memory is, which outlives the operation.
        let buffer = |memory, len: Option<usize>| len.map(|len| unsafe { Buffer::from_raw(memory, len, self.dtype) });
        // SAFETY: what was there before fits.
        unsafe { input.copy_from_nonoverlapping(before.as_ptr(), before.len()) };
        let op = self.op(buffer(input, self.input), buffer(output, self.output), Mode::Blocking);
        rank.comm.submit(op).and_then(|work| work.wait(None)).expect("on the CPU");
        // SAFETY: so long is the output, and nobody writes there any more.
        unsafe { std::slice::from_raw_parts(output, self.output.unwrap_or(0) * self.dtype.size()) }.to_vec()
    }
}

/// An operation with its memory on the device, and what has to be there in the end.
struct OnMemory {
    drawn: Drawn,
    before: Vec<u8>,
    input: DeviceMemory,
    output: DeviceMemory,
    expected: Vec<u8>,
}

impl OnMemory {
    fn new(rank: &OnDevice, drawn: Drawn, seed: u64) -> OnMemory {
        let mut random = StdRng::seed_from_u64(seed);
        let before = values(drawn.dtype, drawn.input.unwrap_or(0), &mut random);
        let expected = drawn.on_the_cpu(rank, &before);
        let memory = |len: usize| DeviceMemory::new(&rank.context, len.max(1)).expect("memory");
        let (input, output) = (memory(before.len()), memory(expected.len()));
        let operation = OnMemory { drawn, before, input, output, expected };
        operation.fill(rank);
        operation
    }

    /// Writes the input, and what must not stay into the output.
    fn fill(&self, rank: &OnDevice) {
        let current = rank.context.enter().expect("a context");
        copy_from_host(&current, &self.before, self.input.bytes().part(0, self.before.len())).expect("a copy");
        copy_from_host(&current, &vec![0xa5; self.expected.len()], self.output.bytes().part(0, self.expected.len()))
            .expect("a copy");
    }

    fn op(&self, rank: &OnDevice, stream: &Stream) -> Op {
        let device = rank.context.device().ordinal();
        // SAFETY: the memory stays until the end.
        let buffer = |memory: &DeviceMemory, len| unsafe {
            Buffer::on_device(memory.bytes().ptr().to_bits(), len, self.drawn.dtype, device)
        };
        // SAFETY: the streams stay until the end.
        let mode = Mode::Stream(unsafe { StreamHandle::from_raw(stream.to_raw(), device) });
        let output = if self.drawn.is_in_place { &self.input } else { &self.output };
        self.drawn.op(
            self.drawn.input.map(|len| buffer(&self.input, len)),
            self.drawn.output.map(|len| buffer(output, len)),
            mode,
        )
    }

    fn check(&self, rank: &OnDevice, what: &str) {
        let output = if self.drawn.is_in_place { &self.input } else { &self.output };
        let mut got = vec![0; self.expected.len()];
        copy_to_host(&rank.context.enter().expect("a context"), output.bytes().part(0, self.expected.len()), &mut got)
            .expect("a copy");
        let is_right = !self.drawn.is_reported(rank.me()) || got == self.expected;
        assert!(is_right, "rank {} of {}, {what}: {:?}", rank.me(), rank.comm.size(), self.drawn);
    }
}

/// Some operations at a time: one after the other, beside each other on two streams, or in a graph that is replayed.
fn rounds(rank: &OnDevice, seed: u64, may_capture: bool) -> (Vec<OnMemory>, Vec<Graph>, Stream) {
    let (me, size) = (rank.me(), rank.comm.size());
    let mut random = StdRng::seed_from_u64(seed);
    let second = Stream::new(&rank.context, 0).expect("a stream");
    let (mut kept, mut graphs) = (vec![], vec![]);
    for round in 0..6 {
        let count = random.random_range(1..5);
        let drawn: Vec<Drawn> = (0..count).map(|_| Drawn::new(me, size, &mut random)).collect();
        let how = random.random_range(0..if may_capture { 4 } else { 2 });
        let operations: Vec<OnMemory> = drawn
            .into_iter()
            .enumerate()
            .map(|(at, drawn)| OnMemory::new(rank, drawn, seed ^ (((round * 8 + at) * 64 + me) as u64) << 20))
            .collect();
        let what = format!("seed {seed}, round {round}, way {how}");
        match how {
            0 => {
                for operation in &operations {
                    let work = rank.comm.submit(operation.op(rank, &rank.stream)).expect("a work");
                    work.wait(None).expect("success");
                }
            }
            1 => {
                let streams = [&rank.stream, &second];
                let works: Vec<_> = operations
                    .iter()
                    .enumerate()
                    .map(|(at, operation)| rank.comm.submit(operation.op(rank, streams[at % 2])).expect("a work"))
                    .collect();
                works.iter().for_each(|work| work.wait(None).expect("success"));
            }
            _ => {
                let mode = if how == 2 { recording::Mode::ThreadLocal } else { recording::Mode::Global };
                let graph = Graph::of(&rank.stream, mode, || {
                    for operation in &operations {
                        rank.comm.submit(operation.op(rank, &rank.stream)).expect("a work");
                    }
                });
                for _ in 0..random.random_range(1..4) {
                    // What is done in place has changed its input.
                    rank.stream.synchronize().expect("a stream that ends");
                    operations.iter().for_each(|operation| operation.fill(rank));
                    graph.replay(&rank.stream);
                }
                graphs.push(graph);
            }
        }
        rank.stream.synchronize().expect("a stream that ends");
        second.synchronize().expect("a stream that ends");
        operations.iter().for_each(|operation| operation.check(rank, &what));
        kept.extend(operations);
    }
    (kept, graphs, second)
}

#[test]
fn samples_of_the_whole_product_are_right() {
    const TEST: &str = "product::samples_of_the_whole_product_are_right";
    if is_alone(TEST) {
        let process = Process::new(TEST);
        let sample = Sample::new(number("SOFTCUDA_SEED").expect("it is set"));
        let rank = process.join("product", sample.device(process.rank), &sample.hints(process.rank));
        let kept = rounds(&rank, sample.seed, sample.hosts == 1);
        return rank.leave(kept);
    }
    if context().is_none() {
        return;
    }
    for seed in seeds("NCCLX_RS_SAMPLE", "NCCLX_RS_SAMPLES") {
        let sample = Sample::new(seed);
        let number = seed.to_string();
        let mut settings = sample.settings.clone();
        settings.push(("SOFTCUDA_SEED", &number));
        of_processes(TEST, &vec![&settings[..]; sample.size]);
    }
}

/// A world as the seed draws it.
struct Sample {
    seed: u64,
    size: usize,
    hosts: usize,
    devices: u32,
    staging: &'static str,
    algorithm: &'static str,
    settings: Vec<(&'static str, &'static str)>,
}

impl Sample {
    fn new(seed: u64) -> Sample {
        let mut random = StdRng::seed_from_u64(!seed);
        let (size, hosts) = (random.random_range(1..=8), random.random_range(1..=4));
        let mut draw = |values: &[&'static str]| *values.choose(&mut random).expect("values");
        let (devices, staging) = (draw(&["1", "2", "8"]), draw(&["65536", "1048576"]));
        let mut algorithms: Vec<&'static str> = algo::names().collect();
        algorithms.extend(["auto"; 4]);
        let algorithm = draw(&algorithms);
        let settings = vec![
            ("SOFTCUDA_DEVICES", devices),
            ("SOFTCUDA_QUEUES", draw(&["0", "1", "2", "8"])),
            ("SOFTCUDA_DELAY_US", draw(&["0", "50"])),
            ("SOFTCUDA_GAP_US", draw(&["0", "20"])),
            ("SOFTCUDA_WEAK", draw(&["0", "1"])),
            ("SOFTCUDA_HOST_POINTERS_DIFFER", draw(&["0", "1"])),
        ];
        let devices = devices.parse().expect("a number");
        Sample { seed, size, hosts: hosts.min(size), devices, staging, algorithm, settings }
    }

    fn device(&self, rank: Rank) -> u32 {
        rank.0 % self.devices
    }

    fn hints(&self, rank: Rank) -> [(&'static str, &'static str); 3] {
        let host = ["a", "b", "c", "d"][rank.index() % self.hosts];
        [("device_staging_bytes", self.staging), ("algorithm", self.algorithm), ("host_id", host)]
    }
}
