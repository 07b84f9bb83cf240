//! An all_to_all of many ranks, which first learn whether all their blocks are equal.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use ncclx_rs::{Communicator, Element, Error, Mode, Op, OpKind, ReduceOp, Work};

use crate::world::{Wire, buffer, op, run, world_hinted};

/// Fewer never ask. Two hosts have as many each.
const RANKS: usize = 66;

fn blocks_of<T>(counts: &[usize], value: impl Fn(usize, usize) -> T) -> Vec<T> {
    counts
        .iter()
        .enumerate()
        .flat_map(|(rank, count)| (0..*count).map(move |index| (rank, index)))
        .map(|(rank, index)| value(rank, index))
        .collect()
}

/// What `from` sends to `to`, by element.
fn value(from: usize, to: usize, index: usize) -> u32 {
    (from * 1_000_003 + to * 1_009 + index) as u32
}

fn start<T: Element>(
    comm: &Communicator,
    counts: [&[usize]; 2],
    input: &mut [T],
    output: &mut [T],
) -> Result<Work, Error> {
    let [send, recv] = counts.map(|counts| counts.to_vec().into());
    let (inputs, outputs) = (vec![buffer(input)], vec![buffer(output)]);
    comm.submit(Op { mode: Mode::Async, ..op(OpKind::AllToAll { send, recv }, inputs, outputs) })
}

/// Exchanges blocks of the lengths that `count` gives for each two ranks, and looks at what has come.
fn exchange(comm: &Communicator, count: impl Fn(usize, usize) -> usize) -> Result<(), Error> {
    let me = comm.rank().index();
    let send: Vec<usize> = (0..RANKS).map(|to| count(me, to)).collect();
    let recv: Vec<usize> = (0..RANKS).map(|from| count(from, me)).collect();
    let mut input = blocks_of(&send, |to, index| value(me, to, index));
    let mut output = blocks_of(&recv, |_, _| 0);
    start(comm, [&send, &recv], &mut input, &mut output)?.wait(None)?;
    assert!(output == blocks_of(&recv, |from, index| value(from, me, index)), "{comm:?}");
    Ok(())
}

/// How many other ranks this one has a stream to.
fn peers(comm: &Communicator) -> usize {
    let dump: serde_json::Value = serde_json::from_str(&comm.dump("asked for")).expect("JSON");
    dump["peers"].as_array().expect("peers").iter().filter(|peer| !peer["transport"].is_null()).count()
}

/// The call has failed on this rank, not by its time limit, and the next ones work.
fn fails(comm: &Communicator, outcome: Result<(), Error>, because: &str) {
    match outcome {
        Err(Error::Mismatch { detail, .. }) if detail.contains(because) => {}
        other => panic!("rank {}: {other:?} in place of `{because}`", comm.rank()),
    }
    exchange(comm, |_, _| 2).expect("the group works on");
}

fn everywhere(check: impl Fn(&Communicator) + Clone + Send + Sync + 'static) {
    let ring = rustix::param::page_size().to_string();
    for wire in [Wire::Shm, Wire::Tcp, Wire::Mixed] {
        let hints = [("shm_ring_bytes", ring.as_str()), ("tcp_streams", "1")];
        world_hinted(wire, RANKS, Duration::from_secs(120), &hints, check.clone());
    }
}

#[test]
fn blocks_that_are_equal_on_all_ranks_are_forwarded() {
    everywhere(|comm| {
        exchange(comm, |_, _| 3).expect("short blocks");
        exchange(comm, |_, _| 0).expect("no blocks");
        assert!(peers(comm) <= 2 * RANKS / 3, "{} streams", peers(comm));
        exchange(comm, |_, _| 300).expect("longer blocks");
        // Eleven elements for one pair of ranks, and all other blocks as long as ever.
        exchange(comm, |from, to| if (from, to) == (7, 60) { 11 } else { 3 }).expect("one other block");
        assert_eq!(peers(comm), RANKS - 1, "each rank has sent to all");
        exchange(comm, |from, to| (from + to) % 4).expect("unequal blocks");
        exchange(comm, |from, _| from % 3).expect("blocks that are equal for whom they come from");
        exchange(comm, |_, _| 20_000).expect("long blocks");
    });
}

#[test]
fn calls_follow_each_other_without_waiting() {
    everywhere(|comm| {
        let me = comm.rank().index();
        let counts = [3, 1, 300].map(|count| [count; RANKS]);
        let mut data =
            counts.map(|counts| (blocks_of(&counts, |to, index| value(me, to, index)), blocks_of(&counts, |_, _| 0)));
        let mut sum = [1u32; 5];
        let mut works = Vec::new();
        for (counts, (input, output)) in counts.iter().zip(&mut data) {
            works.push(start(comm, [counts; 2], input, output).expect("it begins"));
            let memory = vec![buffer(&mut sum)];
            let op = op(OpKind::AllReduce(ReduceOp::Max), memory.clone(), memory);
            works.push(comm.submit(Op { mode: Mode::Async, ..op }).expect("it begins"));
        }
        works.into_iter().for_each(|work| work.wait(None).expect("it ends"));
        for (counts, (_, output)) in counts.iter().zip(&data) {
            assert!(*output == blocks_of(counts, |from, index| value(from, me, index)), "{comm:?}");
        }
    });
}

#[test]
fn what_the_ranks_disagree_on_is_an_error_on_all() {
    everywhere(|comm| {
        let me = comm.rank().index();
        let is_odd = [1, 2].contains(&me);
        // Each rank has equal blocks, but two have longer ones.
        let counts = [if is_odd { 4 } else { 3 }; RANKS];
        let (mut input, mut output) = (vec![0u32; counts.iter().sum()], vec![0u32; counts.iter().sum()]);
        let outcome = start(comm, [&counts, &counts], &mut input, &mut output).and_then(|work| work.wait(None));
        fails(comm, outcome, "the ranks disagree on the sizes");
        // What a rank sends is not what it gets.
        let mut counts = [[3; RANKS], [if is_odd { 4 } else { 3 }; RANKS]];
        counts[1][me] = 3;
        let (mut input, mut output) = (vec![0u32; counts[0].iter().sum()], vec![0u32; counts[1].iter().sum()]);
        let outcome = start(comm, [&counts[0], &counts[1]], &mut input, &mut output).and_then(|work| work.wait(None));
        fails(comm, outcome, "the ranks disagree on the sizes");
        // Elements of another type.
        let counts = [2; RANKS];
        let outcome = if is_odd {
            start(comm, [&counts; 2], &mut vec![0i64; 2 * RANKS], &mut vec![0i64; 2 * RANKS])
                .and_then(|work| work.wait(None))
        } else {
            exchange(comm, |_, _| 2)
        };
        fails(comm, outcome, "the ranks disagree on collective");
        // What the ranks ask each other looks like this.
        let outcome = if is_odd {
            let mut words = [0u64; 2];
            let memory = vec![buffer(&mut words)];
            run(comm, OpKind::AllReduce(ReduceOp::Min), memory.clone(), memory)
        } else {
            exchange(comm, |_, _| 2)
        };
        fails(comm, outcome, "the ranks disagree on collective");
    });
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let given_up = Arc::new(Barrier::new(RANKS));
    world_hinted(Wire::Shm, RANKS, Duration::from_secs(3), &[("shm_ring_bytes", "4096")], move |comm| {
        if comm.rank().index() == 40 {
            given_up.wait();
            assert!(exchange(comm, |_, _| 1).is_err(), "the others have given it up");
        } else {
            let error = exchange(comm, |_, _| 1).expect_err("a rank is missing").to_string();
            given_up.wait();
            // On a busy machine not all may have told by then that they wait.
            let missing = error.split_once(" did not call it").map(|(missing, _)| missing);
            assert!(missing.is_some_and(|missing| missing.contains("40")), "{error}");
        }
        exchange(comm, |_, _| 1).expect("the group works on");
    });
}
