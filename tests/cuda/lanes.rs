//! Collectives that need no kernel, on streams: of several segments, in worlds of threads and of processes.

use std::os::fd::AsFd;
use std::time::Duration;

use ncclx_rs::algo::{self, Collective, Scaling};
use ncclx_rs::device::counters::Word;
use ncclx_rs::device::lane::{Edges, Kernels, Lane, Places, Submission, Tensors};
use ncclx_rs::device::lower::{Kernel, Staged};
use ncclx_rs::device::segment::Cut;
use ncclx_rs::device::staging::Staging;
use ncclx_rs::device::words::WordLayout;
use ncclx_rs::schedule::{Action, Builder, Slice, Space};
use ncclx_rs::sync::{Arc, Ordering};
use ncclx_rs::sys::cuda::{
    Batch, Context, CudaError, Current, Device, DeviceBytes, DeviceMemory, Module, RegisteredWords, Stream, Width,
    copy_from_host, copy_to_host,
};
use ncclx_rs::sys::words::SharedWords;
use ncclx_rs::{Counts, Rank, Topology};

use crate::harness::{Software, alone, context, is_alone};
use crate::processes::{Process, of_processes};
use crate::world::{Others, of_threads, shared, words};

/// Bytes of an element, and of half the staging memory.
const ELEMENT: usize = 4;
const HALF: usize = 4096;

struct NoKernels;

impl Kernels for NoKernels {
    fn code(&self) -> Option<&Arc<Module>> {
        None
    }

    fn launch(&self, _: &Current<'_>, _: &Stream, kernel: &Kernel, _: &Places<'_>) -> Result<(), CudaError> {
        panic!("{kernel:?} in a collective that computes nothing")
    }
}

/// The memory of an operation on a single host, whose segments share what the engine lends.
fn tensors<'a>(
    input: &'a [DeviceBytes<'a>],
    output: &'a [DeviceBytes<'a>],
    scratch: DeviceBytes<'a>,
    sums: DeviceBytes<'a>,
) -> Tensors<'a> {
    let (scratch, sums) = ([scratch; 2], [sums; 2]);
    Tensors { input, output, scratch, sums, parts: &[], element: ELEMENT, sum: ELEMENT }
}

/// What the test runs in a world of so many ranks: most take several segments.
fn collectives(size: usize) -> Vec<Collective> {
    let last = Rank::from(size - 1);
    vec![
        Collective::AllGather { counts: Counts::equal(1500, size) },
        Collective::AllGather { counts: (0..size).map(|rank| 397 * rank % 1900).collect() },
        Collective::Broadcast { count: 3000, root: Rank(0) },
        Collective::Barrier,
        Collective::Gather { count: 700, root: last },
        Collective::Scatter { count: 700, root: last },
        Collective::Broadcast { count: 1, root: last },
    ]
}

/// The element of this number in what a rank has.
fn element(rank: usize, index: usize) -> u32 {
    (rank * 1_000_003 + index * 7 + 1) as u32
}

/// What a rank has, and what it has to get; nothing if that stays undefined.
fn data(collective: &Collective, me: usize, size: usize) -> (Vec<u32>, usize, Option<Vec<u32>>) {
    let block = |rank: usize, from: usize, len: usize| (from..from + len).map(move |index| element(rank, index));
    let own = |len| block(me, 0, len).collect::<Vec<_>>();
    match collective {
        Collective::AllGather { counts } => {
            let expected: Vec<u32> = (0..size).flat_map(|rank| block(rank, 0, counts[rank])).collect();
            (own(counts[me]), expected.len(), Some(expected))
        }
        Collective::Broadcast { count, root } => (own(*count), *count, Some(block(root.index(), 0, *count).collect())),
        Collective::Gather { count, root } if root.index() == me => {
            let expected: Vec<u32> = (0..size).flat_map(|rank| block(rank, 0, *count)).collect();
            (own(*count), expected.len(), Some(expected))
        }
        Collective::Gather { count, .. } => (own(*count), 0, None),
        Collective::Scatter { count, root } => {
            let input = if root.index() == me { own(count * size) } else { vec![] };
            (input, *count, Some(block(root.index(), me * count, *count).collect()))
        }
        Collective::Barrier => (vec![], 0, None),
        other => unreachable!("{other:?}"),
    }
}

/// The algorithm that does a collective without a kernel.
fn segments(whole: &Collective, size: usize, name: &str) -> Option<usize> {
    let topo = Topology::single_host(size);
    let plan = |len| {
        let cut = Cut::new(name, whole, size).segment(Rank(0), 0, len).expect("no all_to_all");
        Staged::plan(name, &cut.collective, &topo, ELEMENT, Scaling::Nothing)
    };
    plan(1)?;
    Some(
        Cut::new(name, whole, size)
            .longest(HALF, |len| plan(len).expect("as with one element").bytes())
            .expect("one fits"),
    )
}

/// What one rank submits for one collective, and what has to come of it.
struct Job {
    whole: Collective,
    name: &'static str,
    segment: usize,
    input: DeviceMemory,
    output: DeviceMemory,
    expected: Option<Vec<u32>>,
}

impl Job {
    /// The output as a list of tensors, of which one is empty.
    fn tensors(&self) -> [DeviceBytes<'_>; 4] {
        let (all, elements) = (self.output.bytes(), self.output.bytes().len() / ELEMENT);
        let ends = [elements / 5, elements / 5, elements - elements / 3, elements].map(|end| end * ELEMENT);
        let mut begin = 0;
        ends.map(|end| {
            let tensor = all.part(begin, end - begin);
            begin = end;
            tensor
        })
    }
}

/// Everything that a rank submits.
fn jobs(context: &Arc<Context>, me: usize, size: usize) -> Result<Vec<Job>, CudaError> {
    let mut jobs = vec![];
    for whole in collectives(size) {
        for name in algo::names() {
            let Some(segment) = segments(&whole, size, name) else { continue };
            let (input, len, expected) = data(&whole, me, size);
            let bytes: Vec<u8> = input.iter().flat_map(|value| value.to_ne_bytes()).collect();
            let (input, output) =
                (DeviceMemory::new(context, bytes.len())?, DeviceMemory::new(context, len * ELEMENT)?);
            if !bytes.is_empty() {
                copy_from_host(&context.enter()?, &bytes, input.bytes())?;
            }
            jobs.push(Job { whole: whole.clone(), name, segment, input, output, expected });
        }
    }
    Ok(jobs)
}

/// One rank: everything three times, by every algorithm, without waiting in between.
fn rank(me: usize, size: usize, width: Width, words: SharedWords, others: &mut impl Others) -> Result<(), CudaError> {
    let context = Context::primary(Device::new(0)?)?;
    let words = Arc::new(RegisteredWords::new(&context, &Arc::new(words))?);
    let mut staging = Staging::new(&context, Rank::from(me), size, HALF)?;
    assert_eq!(staging.half(), HALF);
    let (fd, len) = staging.export().expect("own memory");
    for (other, fd) in others.exchange(fd).into_iter().enumerate() {
        staging.import(Rank::from(other), fd.as_fd(), len).expect("memory of another");
    }
    let (stream, jobs) = (Stream::new(&context, 0)?, jobs(&context, me, size)?);
    let lent = DeviceMemory::new(&context, 16 * HALF)?;
    let (scratch, sums) = (lent.bytes(), lent.bytes().part(0, 0));
    let mut lane = Lane::new(1, Rank::from(me), WordLayout::new(size, 2), words, staging, width);
    let topo = Topology::single_host(size);
    let current = context.enter()?;
    for job in jobs.iter().cycle().take(3 * jobs.len()) {
        let (input, output) = (&[job.input.bytes()][..], &job.tensors()[..]);
        let tensors = tensors(input, output, scratch, sums);
        for from in (0..Cut::new(job.name, &job.whole, size).longest_block().max(1)).step_by(job.segment) {
            let segment =
                Cut::new(job.name, &job.whole, size).segment(Rank::from(me), from, job.segment).expect("no all_to_all");
            let staged = Staged::plan(job.name, &segment.collective, &topo, ELEMENT, Scaling::Nothing);
            let program = staged.expect("as the first segment").program(Rank::from(me), None);
            let submission =
                Submission { program: &program, segment: &segment, tensors: &tensors, edges: Edges::default() };
            lane.submit(&current, &stream, &submission, &NoKernels)?;
        }
    }
    stream.synchronize()?;
    assert!(jobs.len() >= collectives(size).len());
    for Job { whole, name, output, expected, .. } in &jobs {
        let mut bytes = vec![0; output.bytes().len()];
        if !bytes.is_empty() {
            copy_to_host(&current, output.bytes(), &mut bytes)?;
        }
        let element = |bytes: &[u8]| u32::from_ne_bytes(bytes.try_into().expect("an element"));
        let values: Vec<u32> = bytes.chunks(ELEMENT).map(element).collect();
        let is_right = expected.as_ref().is_none_or(|expected| *expected == values);
        assert!(is_right, "rank {me} of {size}: {name} for {whole:?}");
    }
    // What goes waits for the device, which in a world of threads is everybody's.
    others.barrier();
    Ok(())
}

#[test]
fn collectives_of_threads_are_right() {
    let settings: &[(&str, &str)] = &[("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1")];
    alone("lanes::collectives_of_threads_are_right", &[settings], || {
        for size in 1..=8 {
            of_threads(size, |me, words, others| {
                let width = if size % 2 == 0 { Width::Bits64 } else { Width::Bits32 };
                assert_eq!(rank(me, size, width, words, others), Ok(()), "rank {me} of {size}");
            });
        }
    });
}

const PROCESS: &str = "lanes::a_rank_as_a_process";

/// Not a test of its own: what a process of a world does.
#[test]
fn a_rank_as_a_process() {
    if !is_alone(PROCESS) {
        return;
    }
    let Process { me, size, words, mut others } = Process::new(PROCESS);
    let result = rank(me, size, Width::Bits64, words, &mut others);
    assert_eq!(result, Ok(()), "rank {me} of {size}");
}

#[test]
fn collectives_of_processes_are_right_on_few_queues() {
    if context().is_none() {
        return;
    }
    for queues in ["1", "2", "8"] {
        for size in [2, 3, 8] {
            of_processes(PROCESS, size, &[("SOFTCUDA_QUEUES", queues), ("SOFTCUDA_DELAY_US", "100")]);
        }
    }
}

#[test]
fn an_all_gather_takes_no_more_calls_than_it_must() {
    const NAME: &str = "lanes::an_all_gather_takes_no_more_calls_than_it_must";
    alone(NAME, &[&[]], || {
        let Some(software) = Software::new() else { return };
        let run = || -> Result<(), CudaError> {
            let context = Context::primary(Device::new(0)?)?;
            let (size, whole) = (4, Collective::AllGather { counts: Counts::equal(8, 4) });
            let (layout, topo) = (WordLayout::new(size, 2), Topology::single_host(size));
            let segment = Cut::new("direct", &whole, size).segment(Rank(1), 0, 8).expect("no all_to_all");
            let staged = Staged::plan("direct", &whole, &topo, ELEMENT, Scaling::Nothing).expect("direct does it");
            let program = staged.program(Rank(1), None);
            // The other ranks are played by their words and by memory of this one: nobody writes it.
            let control = Arc::new(words(size));
            for index in 0..control.count() {
                control.word(index).store(1 << 40, Ordering::Release);
            }
            let registered = Arc::new(RegisteredWords::new(&context, &control)?);
            let mut staging = Staging::new(&context, Rank(1), size, HALF)?;
            let (fd, len) = staging.export().expect("own memory");
            for other in [0, 2, 3] {
                staging.import(Rank(other), fd.as_fd(), len).expect("memory of another");
            }
            let mut lane = Lane::new(0, Rank(1), layout, registered, staging, Width::Bits64);
            let (memory, stream) = (DeviceMemory::new(&context, 160)?, Stream::new(&context, 0)?);
            let (input, output) = (&[memory.bytes().part(0, 32)][..], &[memory.bytes().part(32, 128)][..]);
            let nothing = memory.bytes().part(0, 0);
            let (scratch, sums) = (nothing, nothing);
            let tensors = tensors(input, output, scratch, sums);
            let current = context.enter()?;
            for round in 0..4 {
                let count = |call| software.uses(call);
                let before = (count("cuStreamBatchMemOp_v2"), count("cuMemcpyDtoDAsync_v2"));
                let submission =
                    Submission { program: &program, segment: &segment, tensors: &tensors, edges: Edges::default() };
                lane.submit(&current, &stream, &submission, &NoKernels)?;
                let batches = count("cuStreamBatchMemOp_v2") - before.0;
                let copies = count("cuMemcpyDtoDAsync_v2") - before.1;
                // Credits once a half is used again; heads, waits, tails. A copy to staging memory, that of the own block, and
                // one of each other rank's.
                assert_eq!((batches, copies), (3 + u64::from(round > 1), 5), "round {round}: {program:#?}");
            }
            stream.synchronize()
        };
        assert_eq!(run(), Ok(()));
    });
}

#[test]
fn a_sender_that_is_ahead_leaves_what_is_still_to_be_read() -> Result<(), CudaError> {
    let Some(context) = context() else { return Ok(()) };
    one_way(&context, 7, true)
}

#[test]
fn a_half_is_free_only_when_it_has_been_read() {
    const NAME: &str = "lanes::a_half_is_free_only_when_it_has_been_read";
    // A pause between the receiver's wait and its copy is longer than what the sender needs to go on.
    let settings = ["1", "2", "3"].map(|seed| [("SOFTCUDA_DELAY_US", "2000"), ("SOFTCUDA_SEED", seed)]);
    alone(NAME, &settings.each_ref().map(|settings| &settings[..]), || {
        let context = context().expect("the parent has one");
        assert_eq!(one_way(&context, 60, false), Ok(()));
    });
}

/// Sends so many segments to a receiver from which nothing comes back but credits. It may be held until the sender is as far
/// as it gets.
fn one_way(context: &Arc<Context>, segments: usize, is_held: bool) -> Result<(), CudaError> {
    let slice = |space| Slice::new(space, 0, 8);
    let (mut sender, mut receiver) = (Builder::new("example"), Builder::new("example"));
    sender.push(Action::Send { to: Rank(1), from: slice(Space::Input) });
    receiver.push(Action::Recv { from: Rank(0), into: slice(Space::Output) });
    let staged = Staged::new(vec![sender.finish(), receiver.finish()], ELEMENT, Scaling::Nothing);
    let (layout, control) = (WordLayout::new(2, 2), Arc::new(words(2)));
    let mut staging = [Staging::new(context, Rank(0), 2, HALF)?, Staging::new(context, Rank(1), 2, HALF)?];
    let (fd, len) = staging[0].export().expect("own memory");
    staging[1].import(Rank(0), fd.as_fd(), len).expect("memory of another");
    let bytes: Vec<u8> = (0..segments * 32).map(|byte| (byte % 251) as u8).collect();
    let (input, output) = (DeviceMemory::new(context, bytes.len())?, DeviceMemory::new(context, bytes.len())?);
    let current = context.enter()?;
    copy_from_host(&current, &bytes, input.bytes())?;
    let nothing = input.bytes().part(0, 0);
    let (scratch, sums) = (nothing, nothing);
    let (inputs, outputs) = ([input.bytes()], [output.bytes()]);
    let tensors = tensors(&inputs, &outputs, scratch, sums);
    let (streams, gate) =
        ([Stream::new(context, 0)?, Stream::new(context, 0)?], Arc::new(SharedWords::new(1).expect("a word")));
    let registered = RegisteredWords::new(context, &gate)?;
    if is_held {
        let mut batch = Batch::new(Width::Bits64);
        batch.wait(registered.word(0), 1);
        streams[1].submit(&current, &mut batch)?;
    }
    let mut lanes = vec![];
    for (me, (staging, stream)) in staging.into_iter().zip(&streams).enumerate() {
        let words = Arc::new(RegisteredWords::new(context, &Arc::new(shared(&control)))?);
        let mut lane = Lane::new(0, Rank::from(me), layout, words, staging, Width::Bits64);
        for from in (0..segments * 8).step_by(8) {
            let whole = Collective::Broadcast { count: segments * 8, root: Rank(0) };
            let segment = Cut::new("binomial", &whole, 2).segment(Rank::from(me), from, 8).expect("no all_to_all");
            let program = staged.program(Rank::from(me), None);
            let submission =
                Submission { program: &program, segment: &segment, tensors: &tensors, edges: Edges::default() };
            lane.submit(&current, stream, &submission, &NoKernels)?;
        }
        lanes.push(lane);
    }
    if is_held {
        // A sender that is wrong has some time to go on.
        let head = layout.index(0, Word::Head { sender: Rank(0), receiver: Rank(1) });
        while control.word(head).load(Ordering::Acquire) < 2 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(20));
        gate.word(0).store(1, Ordering::Release);
    }
    for stream in &streams {
        stream.synchronize()?;
    }
    let mut received = vec![0; bytes.len()];
    copy_to_host(&current, output.bytes(), &mut received)?;
    assert!(received == bytes, "something was overwritten before it was read");
    Ok(())
}
