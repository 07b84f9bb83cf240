//! Graphs that hand what a rank has to the next one with every replay, in whatever way.

use ncclx_rs::Error;
use ncclx_rs::sys::cuda::DeviceMemory;

use crate::graphs::{ONE_QUEUE, WEAK, wait_until};
use crate::harness::{Software, alone, context, is_alone};
use crate::ranks::{OnDevice, Process, data, of_processes, of_processes_that_end, world};
use crate::recording::{Graph, Mode};

/// Such a graph, with what it uses besides what the rank has.
pub(crate) struct Moving<T> {
    graph: Graph,
    own: DeviceMemory,
    len: usize,
    pub(crate) used: T,
}

impl<T> Moving<T> {
    /// Of so many elements a rank, as `body` moves them into `own`.
    pub(crate) fn new(rank: &OnDevice, len: usize, used: T, body: impl FnOnce(&T, &DeviceMemory)) -> Moving<T> {
        let own = rank.memory(&data(rank.me(), len));
        // What tests do before and after would spoil captures of other threads.
        rank.comm.barrier().expect("all are there");
        let graph = Graph::of(&rank.stream, Mode::Global, || body(&used, &own));
        rank.comm.barrier().expect("all are there");
        Moving { graph, own, len, used }
    }

    pub(crate) fn replay(&self, rank: &OnDevice) {
        self.graph.replay(&rank.stream);
    }

    /// What is there after so many replays.
    pub(crate) fn check(&self, rank: &OnDevice, replays: usize) {
        let (me, size) = (rank.me(), rank.comm.size());
        let from = (me + size * replays - replays) % size;
        assert!(rank.values(&self.own) == data(from, self.len), "rank {me} of {size} after {replays} replays");
    }

    /// Replays it so often, and looks each time.
    pub(crate) fn replay_and_check(&self, rank: &OnDevice, times: usize) {
        for replays in 1..=times {
            self.replay(rank);
            self.check(rank, replays);
        }
    }
}

/// The ranks of this test are processes that replay it a thousand times. Nothing holds them together but their parts.
pub(crate) fn a_thousand_times<T>(test: &str, new: impl FnOnce(&OnDevice) -> Moving<T>) {
    if !is_alone(test) {
        if context().is_some() {
            of_processes(test, &[&[], WEAK, ONE_QUEUE]);
            of_processes(test, &[ONE_QUEUE, WEAK]);
        }
        return;
    }
    let process = Process::new(test);
    let rank = process.join("skewed", 0, &[]);
    let moving = new(&rank);
    (0..1000).for_each(|_| moving.replay(&rank));
    moving.check(&rank, 1000);
    rank.leave(moving);
}

/// Rank 1 of this test's three processes ends after the first replay; `next` is what the others call then.
pub(crate) fn until_a_rank_dies<T>(
    test: &str,
    new: impl FnOnce(&OnDevice) -> Moving<T>,
    next: impl FnOnce(&OnDevice, &Moving<T>) -> Error,
) {
    if !is_alone(test) {
        if context().is_some() {
            of_processes_that_end(test, &[&[], WEAK, ONE_QUEUE], &[true, false, true]);
        }
        return;
    }
    let process = Process::new(test);
    let rank = process.join("dying", 0, &[]);
    let moving = new(&rank);
    moving.replay_and_check(&rank, 1);
    rank.comm.barrier().expect("all are there");
    if rank.me() == 1 {
        std::process::abort();
    }
    (0..3).for_each(|_| moving.replay(&rank));
    rank.stream.synchronize().expect("replays that end");
    let error = next(&rank, &moving);
    assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
    rank.comm.abort("the test is over");
}

/// One of two ranks replays it when both have left.
pub(crate) fn without_its_communicator<T>(
    test: &str,
    hints: &[(&str, &str)],
    new: impl Fn(&OnDevice) -> Moving<T> + Sync,
) {
    alone(test, &[&[]], || {
        let Some(software) = Software::new() else { return };
        let living = software.living();
        world(2, hints, |rank| {
            let moving = new(&rank);
            moving.replay_and_check(&rank, 1);
            rank.comm.barrier().expect("all are there");
            rank.comm.shutdown().expect("an end");
            if rank.me() == 0 {
                (0..2).for_each(|_| moving.replay(&rank));
            }
            rank.stream.synchronize().expect("replays that end");
        });
        wait_until("what graphs had is given back", || software.living() <= living);
    });
}
