//! Collectives that reduce, on streams: every type by every operation and algorithm, with the bits of the CPU's engine.

use std::os::fd::AsFd;
use std::path::Path;

use ncclx_rs::algo::{self, Collective, Scaling};
use ncclx_rs::device::kernels::Module;
use ncclx_rs::device::kernels::cache::Cache;
use ncclx_rs::device::kernels::compile::CompileError;
use ncclx_rs::device::lane::{Edges, Lane, Submission, Tensors};
use ncclx_rs::device::launch::{LaunchError, Launcher, LoadError, Sources};
use ncclx_rs::device::lower::{InPlace, Staged};
use ncclx_rs::device::segment::{Cut, Segment};
use ncclx_rs::device::staging::Staging;
use ncclx_rs::device::words::WordLayout;
use ncclx_rs::schedule::{Action, Builder, Slice, Space};
use ncclx_rs::sync::{Arc, Ordering};
use ncclx_rs::sys::cuda::{
    Context, CudaError, Device, DeviceBytes, DeviceMemory, RegisteredWords, Stream, Width, copy_from_host, copy_to_host,
};
use ncclx_rs::sys::words::SharedWords;
use ncclx_rs::{Counts, DType, Rank, ReduceOp, Topology};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::harness::{Software, alone, not_run};
use crate::numbers::numbers;
use crate::nvrtc::folders;
use crate::simulation::{self, Part, Reduction};
use crate::world::{Others, of_threads, words};

/// Bytes of half the staging memory, and about of a tensor: that takes several segments.
const HALF: usize = 4096;
const LONG: usize = 6000;

const OPS: [ReduceOp; 9] = ReduceOp::all(-2.75);

/// Where the compiler is; what it makes stays from run to run.
fn sources() -> Sources {
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels");
    Sources { folders: folders(), cache: Some(Cache::new(kept, 1 << 30)) }
}

/// A launcher with the kernels of these types; nothing on a machine that has no compiler.
fn launcher(context: &Arc<Context>, size: usize, dtypes: &[DType]) -> Option<Launcher> {
    let mut launcher = Launcher::new(context, size, Some(sources())).expect("a device");
    for dtype in dtypes {
        match launcher.prepare(*dtype) {
            Ok(()) => {}
            Err(LaunchError::Load(LoadError::Compile(error @ CompileError::NoCompiler { .. }))) => {
                assert!(std::env::var("NCCLX_RS_CI").is_err(), "CI lacks what the test needs: {error}");
                not_run(&error.to_string());
                return None;
            }
            Err(error) => panic!("{dtype}: {error}"),
        }
    }
    Some(launcher)
}

/// A collective as all ranks run it, on tensors of one type.
struct Job {
    whole: Collective,
    name: &'static str,
    reduction: Reduction,
    is_in_place: bool,
    /// The elements of a block of a segment.
    segment: usize,
    /// The bytes of its tensors in the memory of each rank.
    input: usize,
    output: usize,
}

impl Job {
    fn staged(&self, size: usize, from: usize) -> Staged {
        let cut = Cut::new(self.name, &self.whole, size).segment(Rank(0), from, self.segment).expect("no all_to_all");
        plan(self.name, &cut.collective, size, self.reduction).expect("as the first segment")
    }

    /// Where each segment begins.
    fn begins(&self, size: usize) -> impl Iterator<Item = usize> + use<> {
        (0..Cut::new(self.name, &self.whole, size).longest_block()).step_by(self.segment)
    }

    /// At which elements of the input and the output the memory of a rank is the same, if it works in place.
    fn same(&self, collective: &Collective, me: usize) -> Option<InPlace> {
        let input = match collective {
            Collective::ReduceScatter { counts } => (0..me).map(|rank| counts[rank]).sum(),
            Collective::Reduce { root, .. } if root.index() != me => return None,
            _ => 0,
        };
        self.is_in_place.then_some(InPlace { input, output: 0 })
    }

    /// The byte at which a rank has the output.
    fn output(&self, me: usize) -> usize {
        self.same(&self.whole, me).map_or(self.output, |same| self.input + same.input * self.reduction.dtype.size())
    }

    /// The elements of a rank's input and output.
    fn lengths(&self, me: usize) -> (usize, usize) {
        match &self.whole {
            Collective::ReduceScatter { counts } => (counts.total(), counts[me]),
            Collective::AllReduce { count } | Collective::Reduce { count, .. } => (*count, *count),
            other => unreachable!("{other:?}"),
        }
    }
}

fn plan(name: &str, collective: &Collective, size: usize, reduction: Reduction) -> Option<Staged> {
    let scaling = match reduction.op {
        ReduceOp::PreMulSum(_) => Scaling::Inputs,
        ReduceOp::Avg => Scaling::Sum { bytes: reduction.sum() },
        _ => Scaling::Nothing,
    };
    Staged::plan(name, collective, &Topology::single_host(size), reduction.dtype.size(), scaling)
}

/// What is run on tensors of a type, and the bytes of each rank's memory for all of it.
fn jobs(dtype: DType, size: usize) -> (Vec<Job>, usize) {
    let (element, last) = (dtype.size(), Rank::from(size - 1));
    let count = LONG / element + 1;
    let collectives = [
        Collective::AllReduce { count },
        Collective::AllReduce { count: 3 },
        Collective::Reduce { count, root: last },
        Collective::ReduceScatter { counts: Counts::equal(count / size, size) },
        Collective::ReduceScatter { counts: (0..size).map(|rank| 131 * rank % 300).collect() },
    ];
    let (mut jobs, mut end) = (vec![], 0);
    for op in OPS.into_iter().filter(|op| op.supports(dtype)) {
        for (whole, name) in collectives.iter().flat_map(|whole| algo::names().map(move |name| (whole, name))) {
            let reduction = Reduction { op, dtype };
            let stage = |len| {
                let cut = Cut::new(name, whole, size).segment(Rank(0), 0, len).expect("no all_to_all");
                plan(name, &cut.collective, size, reduction)
            };
            if stage(1).is_none() {
                continue;
            }
            let segment = Cut::new(name, whole, size).longest(HALF, |len| stage(len).expect("as of one").bytes());
            for is_in_place in [false, true] {
                let segment = *segment.as_ref().expect("one element fits");
                let mut job = Job { whole: whole.clone(), name, reduction, is_in_place, segment, input: 0, output: 0 };
                let lengths: Vec<(usize, usize)> = (0..size).map(|rank| job.lengths(rank)).collect();
                // Beside each other, so that one that is too long shows; aligned to elements only.
                job.input = end + element;
                job.output = job.input + lengths.iter().map(|(input, _)| input).max().expect("a rank") * element;
                end = job.output + lengths.iter().map(|(_, output)| output).max().expect("a rank") * element;
                jobs.push(job);
            }
        }
    }
    (jobs, end)
}

/// What all ranks do with tensors of a type, what is in their memory before, and what has to be there after.
struct Round {
    dtype: DType,
    jobs: Vec<Job>,
    before: Vec<Vec<u8>>,
    after: Vec<Vec<u8>>,
}

impl Round {
    fn new(dtype: DType, size: usize) -> Round {
        let mut random = StdRng::seed_from_u64(dtype as u64);
        let (jobs, bytes) = jobs(dtype, size);
        let part = dtype.size().min(8);
        let before: Vec<Vec<u8>> =
            (0..size).map(|_| numbers(dtype, bytes.next_multiple_of(part), &mut random)).collect();
        let mut after = before.clone();
        for job in &jobs {
            // As the CPU's engine does it: not cut.
            let staged = plan(job.name, &job.whole, size, job.reduction).expect("as a segment");
            let whole = |rank| Cut::new(job.name, &job.whole, size).segment(Rank::from(rank), 0, usize::MAX);
            let wholes: Vec<Segment> = (0..size).map(|rank| whole(rank).expect("no all_to_all")).collect();
            let part = |(rank, memory)| Part {
                schedule: staged.schedule(Rank::from(rank)),
                segment: &wholes[rank],
                memory,
                input: job.input,
                output: job.output(rank),
            };
            let mut parts: Vec<Part<'_>> = after.iter_mut().map(Vec::as_mut_slice).enumerate().map(part).collect();
            simulation::run(&mut parts, job.reduction);
        }
        Round { dtype, jobs, before, after }
    }
}

fn cut(job: &Job, me: usize, size: usize, from: usize) -> Segment {
    Cut::new(job.name, &job.whole, size).segment(Rank::from(me), from, job.segment).expect("no all_to_all")
}

/// A tensor as a list of some, one of them empty, that are cut anywhere.
fn list<'a>(whole: DeviceBytes<'a>, element: usize, random: &mut StdRng) -> Vec<DeviceBytes<'a>> {
    let elements = whole.len() / element;
    let mut ends: Vec<usize> = (0..random.random_range(0..4)).map(|_| random.random_range(0..=elements)).collect();
    ends.sort_unstable();
    ends.extend(ends.last().copied());
    ends.push(elements);
    let begins = [0].into_iter().chain(ends.iter().copied());
    begins.zip(&ends).map(|(begin, end)| whole.part(begin * element, (end - begin) * element)).collect()
}

/// A rank's lane, whose peers are the other ranks.
fn lane(
    context: &Arc<Context>,
    me: usize,
    size: usize,
    words: SharedWords,
    others: &mut impl Others,
) -> Result<Lane, CudaError> {
    let words = Arc::new(RegisteredWords::new(context, &Arc::new(words))?);
    let mut staging = Staging::new(context, Rank::from(me), size, HALF)?;
    let (fd, len) = staging.export().expect("device memory");
    for (other, fd) in others.exchange(fd).into_iter().enumerate() {
        staging.import(Rank::from(other), fd.as_fd(), len).expect("device memory");
    }
    Ok(Lane::new(0, Rank::from(me), WordLayout::new(size, 2), words, staging, Width::Bits64))
}

/// One rank: all jobs of all rounds, a round without waiting in between.
fn rank(
    me: usize,
    rounds: &[Round],
    size: usize,
    words: SharedWords,
    others: &mut impl Others,
) -> Result<(), CudaError> {
    let context = Context::primary(Device::new(0)?)?;
    let dtypes: Vec<DType> = rounds.iter().map(|round| round.dtype).collect();
    let launcher = launcher(&context, size, &dtypes).expect("as before");
    let mut lane = lane(&context, me, size, words, others)?;
    let stream = Stream::new(&context, 0)?;
    let (lent, longest) = (DeviceMemory::new(&context, 64 * HALF)?, rounds.iter().map(|round| round.before[me].len()));
    let memory = DeviceMemory::new(&context, longest.max().expect("a round"))?;
    // Loading waits for the device, which is everybody's.
    others.barrier();
    let current = context.enter()?;
    let mut random = StdRng::seed_from_u64(me as u64);
    for Round { dtype, jobs, before, after } in rounds {
        let memory = memory.bytes().part(0, before[me].len());
        copy_from_host(&current, &before[me], memory)?;
        for job in jobs {
            let (element, sum) = (dtype.size(), job.reduction.sum());
            let (input, output) = job.lengths(me);
            let input = list(memory.part(job.input, input * element), element, &mut random);
            let output = list(memory.part(job.output(me), output * element), element, &mut random);
            let (scratch, sums) = (lent.bytes().part(0, 32 * HALF), lent.bytes().part(32 * HALF, 32 * HALF));
            let tensors = Tensors {
                input: &input,
                output: &output,
                scratch: [scratch; 2],
                sums: [sums; 2],
                parts: &[],
                element,
                sum,
            };
            let kernels = launcher.kernels(*dtype, Some(job.reduction.op), size);
            for from in job.begins(size) {
                let segment = cut(job, me, size, from);
                let same = job.same(&segment.collective, me);
                let program = job.staged(size, from).program(Rank::from(me), same);
                let submission =
                    Submission { program: &program, segment: &segment, tensors: &tensors, edges: Edges::default() };
                lane.submit(&current, &stream, &submission, &kernels)?;
            }
        }
        stream.synchronize()?;
        let mut found = vec![0; before[me].len()];
        copy_to_host(&current, memory, &mut found)?;
        if let Some(wrong) = (0..found.len()).find(|at| found[*at] != after[me][*at]) {
            let job = jobs.iter().rfind(|job| job.input <= wrong).expect("something is before it");
            let Job { whole, name, reduction, is_in_place, input, output, .. } = job;
            panic!(
                "rank {me} of {size}: {name} for {whole:?} of {reduction:?}, in place: {is_in_place}: byte {wrong}, of input at \
                 {input} and output at {output}, is {:#x}, not {:#x}",
                found[wrong], after[me][wrong],
            );
        }
    }
    // What goes waits for the device.
    others.barrier();
    Ok(())
}

/// Runs everything with tensors of these types.
fn run(dtypes: &[DType], sizes: &[usize]) {
    let context = Context::primary(Device::new(0).expect("a device")).expect("a context");
    if launcher(&context, 1, dtypes).is_none() {
        return;
    }
    for size in sizes.iter().copied() {
        let rounds: Vec<Round> = dtypes.iter().map(|dtype| Round::new(*dtype, size)).collect();
        of_threads(size, |me, words, others| {
            assert_eq!(rank(me, &rounds, size, words, others), Ok(()), "rank {me} of {size}");
        });
    }
}

fn computed() -> Vec<DType> {
    DType::ALL.iter().copied().filter(|dtype| Module::of(*dtype).is_some()).collect()
}

#[test]
fn reductions_have_the_bits_of_the_cpu() {
    let name = "reductions::reductions_have_the_bits_of_the_cpu";
    alone(name, &[&[("SOFTCUDA_DELAY_US", "20")]], || run(&computed(), &[2, 3, 5]));
}

#[test]
fn reductions_are_right_where_memory_is_weak() {
    // A kernel there copies what it touches.
    let settings: &[(&str, &str)] = &[("SOFTCUDA_WEAK", "1"), ("SOFTCUDA_DELAY_US", "20")];
    alone("reductions::reductions_are_right_where_memory_is_weak", &[settings], || {
        run(&[DType::I16, DType::BF16], &[3])
    });
}

#[test]
fn an_all_reduce_takes_no_more_calls_than_it_must() {
    alone("reductions::an_all_reduce_takes_no_more_calls_than_it_must", &[&[]], || {
        let Some(software) = Software::new() else { return };
        let run = |op: ReduceOp, calls: [u64; 3]| -> Result<(), CudaError> {
            let context = Context::primary(Device::new(0)?)?;
            let Some(launcher) = launcher(&context, 1, &[DType::F32]) else { return Ok(()) };
            let (size, whole) = (4, Collective::AllReduce { count: 64 });
            let reduction = Reduction { op, dtype: DType::F32 };
            let segment = Cut::new("direct", &whole, size).segment(Rank(1), 0, 64).expect("no all_to_all");
            let staged = plan("direct", &whole, size, reduction).expect("direct does it");
            let program = staged.program(Rank(1), Some(InPlace { input: 0, output: 0 }));
            // The other ranks are played by their words and by memory of this one: nobody writes it.
            let control = Arc::new(words(size));
            for index in 0..control.count() {
                control.word(index).store(1 << 40, Ordering::Release);
            }
            let registered = Arc::new(RegisteredWords::new(&context, &control)?);
            let mut staging = Staging::new(&context, Rank(1), size, HALF)?;
            let (fd, len) = staging.export().expect("device memory");
            for other in [0, 2, 3] {
                staging.import(Rank(other), fd.as_fd(), len).expect("device memory");
            }
            let mut lane = Lane::new(0, Rank(1), WordLayout::new(size, 2), registered, staging, Width::Bits64);
            let (memory, stream) = (DeviceMemory::new(&context, 256 + 1024)?, Stream::new(&context, 0)?);
            let (tensor, scratch) = ([memory.bytes().part(0, 256)], memory.bytes().part(256, 1024));
            let nothing = memory.bytes().part(0, 0);
            let tensors = Tensors {
                input: &tensor,
                output: &tensor,
                scratch: [scratch; 2],
                sums: [nothing; 2],
                parts: &[],
                element: 4,
                sum: reduction.sum(),
            };
            let kernels = launcher.kernels(DType::F32, Some(op), size);
            let current = context.enter()?;
            for round in 0..4 {
                let counted = ["cuStreamBatchMemOp_v2", "cuMemcpyDtoDAsync_v2", "cuLaunchKernel"];
                let count = || counted.map(|call| software.uses(call));
                let before = count();
                let submission =
                    Submission { program: &program, segment: &segment, tensors: &tensors, edges: Edges::default() };
                lane.submit(&current, &stream, &submission, &kernels)?;
                let made: Vec<u64> = count().iter().zip(before).map(|(after, before)| after - before).collect();
                // Credits once a half is used again.
                let [batches, copies, kernels] = calls;
                let expected = [batches + u64::from(round > 1), copies, kernels];
                assert_eq!(made, expected, "{op:?}, round {round}: {program:#?}");
            }
            stream.synchronize()
        };
        // Heads and waits, heads and waits, tails. Two copies to staging memory, that of the result, one of each other rank's.
        assert_eq!(run(ReduceOp::Sum, [3, 6, 1]), Ok(()));
        // The own block lies beside the others: it is copied before they are waited for.
        assert_eq!(run(ReduceOp::Avg, [4, 7, 1]), Ok(()));
    });
}

#[test]
fn a_factor_is_read_from_the_device_once_the_kernel_runs() {
    let name = "reductions::a_factor_is_read_from_the_device_once_the_kernel_runs";
    alone(name, &[&[("SOFTCUDA_DELAY_US", "100")]], || {
        let run = || -> Result<(), CudaError> {
            let context = Context::primary(Device::new(0)?)?;
            let Some(launcher) = launcher(&context, 1, &[DType::I32]) else { return Ok(()) };
            let mut scale = Builder::new("example");
            scale.push(Action::Scale { slice: Slice::new(Space::Output, 0, 5) });
            let program = Staged::new(vec![scale.finish()], 4, Scaling::Inputs).program(Rank(0), None);
            let whole = Collective::AllReduce { count: 5 };
            let segment = Cut::new("direct", &whole, 1).segment(Rank(0), 0, 5).expect("no all_to_all");
            let words = Arc::new(RegisteredWords::new(&context, &Arc::new(words(1)))?);
            let staging = Staging::new(&context, Rank(0), 1, HALF)?;
            let mut lane = Lane::new(0, Rank(0), WordLayout::new(1, 2), words, staging, Width::Bits64);
            let (memory, stream) = (DeviceMemory::new(&context, 20 + 4)?, Stream::new(&context, 0)?);
            let (tensor, factors) = ([memory.bytes().part(0, 20)], memory.bytes().part(20, 4));
            let values: Vec<u8> = [1i32, -7, 0, i32::MAX, 4].iter().flat_map(|value| value.to_ne_bytes()).collect();
            let current = context.enter()?;
            copy_from_host(&current, &values, tensor[0])?;
            copy_from_host(&current, &1.0f32.to_ne_bytes(), factors)?;
            // What is on the stream before changes the factor.
            let later = DeviceMemory::new(&context, 4)?;
            copy_from_host(&current, &3.0f32.to_ne_bytes(), later.bytes())?;
            stream.copy(&current, later.bytes(), factors)?;
            let nothing = memory.bytes().part(0, 0);
            let tensors = Tensors {
                input: &tensor,
                output: &tensor,
                scratch: [nothing; 2],
                sums: [nothing; 2],
                parts: &[],
                element: 4,
                sum: 4,
            };
            let kernels = launcher.kernels(DType::I32, Some(ReduceOp::PreMulSum(f64::NAN)), 1);
            let kernels = kernels.with_factor(factors, DType::F32);
            let submission =
                Submission { program: &program, segment: &segment, tensors: &tensors, edges: Edges::default() };
            lane.submit(&current, &stream, &submission, &kernels)?;
            stream.synchronize()?;
            let mut found = vec![0; 20];
            copy_to_host(&current, tensor[0], &mut found)?;
            let found: Vec<i32> =
                found.chunks(4).map(|bytes| i32::from_ne_bytes(bytes.try_into().expect("four"))).collect();
            assert_eq!(found, [3, -21, 0, i32::MAX.wrapping_mul(3), 12]);
            Ok(())
        };
        assert_eq!(run(), Ok(()));
    });
}
