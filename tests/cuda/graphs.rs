//! Collectives in CUDA graphs: captured, replayed by ranks that are not at the same place, and gone.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use ncclx_rs::sys::cuda::{DeviceMemory, Event, Stream};
use ncclx_rs::{Counts, Error, OpKind, Rank, ReduceOp};

use crate::harness::{Software, alone, has_devices, is_alone};
use crate::ranks::{OnDevice, Process, data, of_processes, of_processes_that_end, total, world, world_on};
use crate::recording::{Graph, Mode, begin, end};

/// What ranks run between their setup and the end of the test, in the worst order that the software CUDA has.
pub(crate) const WEAK: &[(&str, &str)] =
    &[("SOFTCUDA_DELAY_US", "60"), ("SOFTCUDA_WEAK", "1"), ("SOFTCUDA_GAP_US", "20")];
pub(crate) const ONE_QUEUE: &[(&str, &str)] =
    &[("SOFTCUDA_QUEUES", "1"), ("SOFTCUDA_DELAY_US", "30"), ("SOFTCUDA_WEAK", "1")];
const TWO_QUEUES: &[(&str, &str)] = &[("SOFTCUDA_QUEUES", "2"), ("SOFTCUDA_DELAY_US", "30")];

impl OnDevice {
    /// A graph of what `body` puts on this rank's stream and on a branch of it.
    pub(crate) fn captured_on_two(&self, branch: &Stream, body: impl FnOnce()) -> Graph {
        let [forked, joined] = [(), ()].map(|()| Event::new(&self.context).expect("an event"));
        Graph::of(&self.stream, Mode::ThreadLocal, || {
            let current = self.context.enter().expect("a context");
            forked.record(&current, &self.stream).expect("a record");
            branch.wait(&current, &forked).expect("it takes part from here on");
            body();
            joined.record(&current, branch).expect("a record");
            self.stream.wait(&current, &joined).expect("it has come back");
        })
    }

    fn put(&self, kind: OpKind, input: &DeviceMemory, output: &DeviceMemory) {
        self.submit(kind, &[input], &[output]).expect("a work").wait(None).expect("it has ended for who captures");
    }

    pub(crate) fn copy(&self, from: &DeviceMemory, into: &DeviceMemory) {
        let current = self.context.enter().expect("a context");
        self.stream.copy(&current, from.bytes(), into.bytes()).expect("a copy");
    }
}

/// A graph that adds what the ranks have and moves it on, so that every replay has other data than the one before.
struct Machine {
    own: DeviceMemory,
    sum: DeviceMemory,
    all: DeviceMemory,
    _moved: DeviceMemory,
    _nothing: DeviceMemory,
    /// The sums of all replays.
    sums: DeviceMemory,
    graph: Graph,
    block: usize,
    replays: usize,
}

impl Machine {
    /// For so many replays on blocks of so many elements.
    fn new(rank: &OnDevice, mode: Mode, block: usize, replays: usize) -> Machine {
        let size = rank.comm.size();
        let own = rank.memory(&data(rank.me(), block * size));
        let zeros = |len| rank.memory(&vec![0.0; len]);
        let (sum, all, moved) = (zeros(block * size), zeros(block * size * size), zeros(block * size));
        let (sums, nothing) = (zeros(block * size * replays), zeros(0));
        let counts = Counts::equal(block, size);
        // What tests do before and after would spoil captures of other threads; what the engine does must not.
        rank.comm.barrier().expect("all are there");
        let graph = Graph::of(&rank.stream, mode, || {
            rank.put(OpKind::AllReduce(ReduceOp::Sum), &own, &sum);
            rank.put(OpKind::AllGather, &own, &all);
            rank.put(OpKind::AllToAll { send: counts.clone(), recv: counts.clone() }, &own, &moved);
            rank.put(OpKind::Broadcast { root: Rank(0) }, &nothing, &nothing);
            rank.copy(&moved, &own);
        });
        rank.comm.barrier().expect("all are there");
        Machine { own, sum, all, _moved: moved, _nothing: nothing, sums, graph, block, replays }
    }

    /// Replays it once more, and keeps the sum.
    fn replay(&self, rank: &OnDevice, number: usize) {
        self.graph.replay(&rank.stream);
        let current = rank.context.enter().expect("a context");
        let bytes = self.sum.bytes();
        rank.stream.copy(&current, bytes, self.sums.bytes().part(number * bytes.len(), bytes.len())).expect("a copy");
    }

    /// What all replays have made.
    fn check(&self, rank: &OnDevice) {
        let (me, size, block) = (rank.me(), rank.comm.size(), self.block);
        let mut own: Vec<Vec<f32>> = (0..size).map(|rank| data(rank, block * size)).collect();
        let sums = rank.values(&self.sums);
        for number in 0..self.replays {
            let expected: Vec<f32> = (0..block * size).map(|at| own.iter().map(|own| own[at]).sum()).collect();
            let found = &sums[number * block * size..][..block * size];
            assert!(found == expected, "the sum of replay {number} on rank {me} of {size}");
            let before = own.concat();
            if number + 1 == self.replays {
                assert!(rank.values(&self.all) == before, "what was gathered on rank {me} of {size}");
            }
            let from = |to: usize| (0..size).flat_map(move |from| (0..block).map(move |at| (from, to * block + at)));
            own = (0..size).map(|to| from(to).map(|(from, at)| before[from * block * size + at]).collect()).collect();
        }
        assert!(rank.values(&self.own) == own[me], "what was moved to rank {me} of {size}");
    }
}

/// Halves of 64 KiB, so that blocks of some thousand elements are several segments.
const SHORT: &[(&str, &str)] = &[("device_staging_bytes", "65536")];

#[test]
fn every_replay_has_the_results_of_calls() {
    alone("graphs::every_replay_has_the_results_of_calls", &[&[], WEAK], || {
        for (devices, block) in [(vec![0], 10), (vec![0; 2], 700), (vec![0, 1, 0], 9000), (vec![1; 4], 3)] {
            if !has_devices(&devices) {
                continue;
            }
            world_on(&devices, SHORT, |rank| {
                // The ranks set up in the capture, too, and no thread of theirs spoils another one's capture.
                let machine = Machine::new(&rank, Mode::Global, block, 7);
                (0..7).for_each(|number| machine.replay(&rank, number));
                machine.check(&rank);
                rank.leave(machine);
            });
        }
    });
}

#[test]
fn ranks_replay_a_thousand_times_at_different_places() {
    const NAME: &str = "graphs::ranks_replay_a_thousand_times_at_different_places";
    if !is_alone(NAME) {
        if crate::harness::context().is_some() {
            of_processes(NAME, &[&[], WEAK, ONE_QUEUE]);
            of_processes(NAME, &[ONE_QUEUE, TWO_QUEUES]);
        }
        return;
    }
    let process = Process::new(NAME);
    let rank = process.join("skewed", 0, &[]);
    let machine = Machine::new(&rank, Mode::Global, 4, 1000);
    // Nothing holds a rank back but the others' parts.
    (0..1000).for_each(|number| machine.replay(&rank, number));
    machine.check(&rank);
    rank.leave(machine);
}

#[test]
fn graphs_take_turns_with_each_other_and_with_calls() {
    alone("graphs::graphs_take_turns_with_each_other_and_with_calls", &[&[], WEAK], || {
        world(3, SHORT, |rank| {
            let (first, eager) = (Machine::new(&rank, Mode::ThreadLocal, 50, 6), rank.memory(&data(rank.me(), 5000)));
            rank.sum(&eager).expect("a sum between captures");
            let second = Machine::new(&rank, Mode::ThreadLocal, 4000, 6);
            let begun = rank.memory(&[1.0]);
            for number in 0..6 {
                first.replay(&rank, number);
                rank.submit(OpKind::AllReduce(ReduceOp::Max), &[&eager], &[&eager]).expect("a work");
                second.replay(&rank, number);
                rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&begun], &[&begun]).expect("a work");
            }
            assert_eq!(rank.values(&begun), [3f32.powi(6)]);
            assert!(rank.values(&eager) == total(3, 5000));
            first.check(&rank);
            second.check(&rank);
            rank.leave((first, second, eager, begun));
        });
    });
}

#[test]
fn operations_of_a_capture_follow_each_other_on_whatever_streams() {
    alone("graphs::operations_of_a_capture_follow_each_other_on_whatever_streams", &[&[], WEAK], || {
        world(2, &[], |rank| {
            let branch = Stream::new(&rank.context, 0).expect("a stream");
            let memory: Vec<DeviceMemory> = (0..4).map(|turn| rank.memory(&data(rank.me() + turn, 20_000))).collect();
            let graph = rank.captured_on_two(&branch, || {
                for (turn, memory) in memory.iter().enumerate() {
                    let stream = if turn % 2 == 0 { &rank.stream } else { &branch };
                    let kind = OpKind::AllReduce(ReduceOp::Sum);
                    rank.submit_on(stream, kind, (&[memory], &[memory]), None).expect("a work");
                }
            });
            graph.replay(&rank.stream);
            for (turn, memory) in memory.iter().enumerate() {
                let expected: Vec<f32> =
                    data(turn, 20_000).iter().zip(data(turn + 1, 20_000)).map(|(a, b)| a + b).collect();
                assert!(rank.values(memory) == expected, "{turn}");
            }
            rank.leave((memory, graph, branch));
        });
    });
}

#[test]
fn a_capture_that_another_rank_does_not_make_is_an_error_on_both() {
    alone("graphs::a_capture_that_another_rank_does_not_make_is_an_error_on_both", &[&[], WEAK], || {
        world(3, &[], |rank| {
            let memory = rank.memory(&[1.0]);
            rank.sum(&memory).expect("a sum");
            for turn in 0..3 {
                let captures = rank.me() == turn;
                if captures {
                    begin(&rank.stream, Mode::ThreadLocal);
                }
                let outcome = rank.submit(OpKind::Barrier, &[], &[]).and_then(|work| work.wait(None));
                let Err(Error::Mismatch { detail, .. }) = &outcome else { panic!("{outcome:?}") };
                assert!(detail.contains("eagerly") && detail.contains("in a graph's capture"), "{detail}");
                if captures {
                    end(&rank.stream).expect("the capture is as it was before");
                }
                // The group goes on, in captures too.
                let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || rank.put(OpKind::Barrier, &memory, &memory));
                graph.replay(&rank.stream);
                rank.sum(&memory).expect("a sum");
                rank.stream.synchronize().expect("replays that end");
            }
            assert_eq!(rank.values(&memory), [81.0]);
            rank.leave(memory);
        });
    });
}

#[test]
fn a_graph_may_stay_when_its_communicator_goes() {
    alone("graphs::a_graph_may_stay_when_its_communicator_goes", &[&[]], || {
        let Some(software) = Software::new() else { return };
        let living = software.living();
        world(2, &[], |rank| {
            let machine = Machine::new(&rank, Mode::ThreadLocal, 100, 2);
            machine.replay(&rank, 0);
            machine.replay(&rank, 1);
            machine.check(&rank);
            rank.comm.barrier().expect("all are there");
            rank.comm.shutdown().expect("an end");
            // Of one rank alone, too: nobody knows when the others replay.
            if rank.me() == 0 {
                software.settled();
                machine.graph.replay(&rank.stream);
                rank.stream.synchronize().expect("a replay that ends");
                machine.graph.replay(&rank.stream);
            }
            rank.stream.synchronize().expect("a replay that ends");
        });
        wait_until("what graphs had is given back", || software.living() <= living);
    });
}

/// Waits for what another thread does; the harness ends a test that does not end.
pub(crate) fn wait_until(what: &str, done: impl Fn() -> bool) {
    let begin = Instant::now();
    while !done() {
        if begin.elapsed() > Duration::from_secs(100) {
            panic!("{what}: not yet");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_a_graph_had_is_given_back_when_it_is_gone() {
    alone("graphs::what_a_graph_had_is_given_back_when_it_is_gone", &[&[]], || {
        let Some(software) = Software::new() else { return };
        world(2, SHORT, |rank| {
            let memory = rank.memory(&[1.0]);
            rank.sum(&memory).expect("a sum");
            rank.comm.barrier().expect("all are there");
            let living = software.living();
            rank.comm.barrier().expect("all have looked");
            for _ in 0..20 {
                drop(Graph::of(&rank.stream, Mode::ThreadLocal, || rank.sum(&memory).expect("a sum")));
            }
            rank.comm.barrier().expect("all are there");
            wait_until("what graphs had is given back", || software.living() <= living);
            rank.leave(memory);
        });
    });
}

#[test]
fn a_rank_that_does_not_replay_is_named_and_the_replay_ends() {
    alone("graphs::a_rank_that_does_not_replay_is_named_and_the_replay_ends", &[&[], WEAK], || {
        world(3, &[], |rank| {
            let memory = rank.memory(&data(rank.me(), 100));
            let other = rank.memory(&[1.0]);
            rank.sum(&other).expect("the setup takes longer");
            let limit = Some(REPLAY_LIMIT);
            rank.comm.barrier().expect("all are there");
            let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || {
                let kind = OpKind::AllReduce(ReduceOp::Sum);
                rank.submit_within(kind, &[&memory], &[&memory], limit).expect("a work");
            });
            rank_2_replays_it_once(&rank, &memory, &graph);
        });
    });
}

/// How long calls that are replayed wait for ranks that come, and for one that does not.
pub(crate) const REPLAY_LIMIT: Duration = Duration::from_secs(3);

/// Of three ranks with a graph of a sum, whose calls have a short time limit, two replay it once more than rank 2.
pub(crate) fn rank_2_replays_it_once(rank: &OnDevice, memory: &DeviceMemory, graph: &Graph) {
    rank.comm.barrier().expect("all have captured it");
    graph.replay(&rank.stream);
    assert!(rank.values(memory) == total(3, 100), "all replay it once");
    rank.comm.barrier().expect("all are there");
    if rank.me() != 2 {
        let begin = Instant::now();
        graph.replay(&rank.stream);
        rank.stream.synchronize().expect("a replay that ends");
        assert!(begin.elapsed() < Duration::from_secs(20), "it was given up");
        let error = rank.sum(memory).expect_err("the communicator's operations on the device have ended");
        assert!(error.to_string().contains("rank(s) 2 are not in this operation"), "{error}");
        // It ends again, and at once.
        graph.replay(&rank.stream);
        rank.stream.synchronize().expect("a replay that ends");
    }
    rank.comm.barrier().expect("the CPU's engine is not concerned");
    rank.comm.abort("the test is over");
}

#[test]
fn a_replay_ends_when_a_rank_dies() {
    const NAME: &str = "graphs::a_replay_ends_when_a_rank_dies";
    if !is_alone(NAME) {
        if crate::harness::context().is_some() {
            of_processes_that_end(NAME, &[&[], WEAK, ONE_QUEUE], &[true, false, true]);
        }
        return;
    }
    let process = Process::new(NAME);
    let rank = process.join("dying", 0, &[]);
    let memory = rank.memory(&data(rank.me(), 1000));
    let graph = Graph::of(&rank.stream, Mode::Global, || rank.sum(&memory).expect("a sum"));
    graph.replay(&rank.stream);
    assert!(rank.values(&memory) == total(3, 1000));
    rank.comm.barrier().expect("all are there");
    if rank.me() == 1 {
        std::process::abort();
    }
    graph.replay(&rank.stream);
    graph.replay(&rank.stream);
    rank.stream.synchronize().expect("a replay that ends");
    let error = rank.sum(&memory).expect_err("the communicator's operations on the device have ended");
    assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
    rank.comm.abort("the test is over");
}

#[test]
fn what_is_given_back_spoils_no_capture() {
    alone("graphs::what_is_given_back_spoils_no_capture", &[&[]], || {
        let Some(software) = Software::new() else { return };
        let together = Barrier::new(2);
        world(2, &[], |rank| {
            let memory = rank.memory(&[1.0]);
            rank.sum(&memory).expect("a sum");
            rank.stream.synchronize().expect("a stream that ends");
            rank.comm.barrier().expect("all are there");
            let living = software.living();
            rank.comm.barrier().expect("all have looked");
            if rank.me() == 0 {
                begin(&rank.stream, Mode::Global);
            }
            rank.comm.barrier().expect("all are there");
            rank.comm.shutdown().expect("an end");
            if rank.me() == 0 {
                wait_until("some of what communicators had is given back", || software.living() + 10 < living);
                end(&rank.stream).expect("nothing has spoilt it");
            }
            // What the test itself gives back would.
            together.wait();
        });
    });
}
