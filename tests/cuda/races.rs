//! The races that the design of streams has to win, each under many seeds of the software CUDA's delays.
//!
//! `NCCLX_RS_RACE_SEEDS` says how many, from `NCCLX_RS_RACE_SEED` on; what fails names its seed.

use std::time::Duration;

use ncclx_rs::sys::cuda::{DeviceMemory, Stream};
use ncclx_rs::{Counts, Error, OpKind, Rank, ReduceOp, Work};

use crate::harness::{alone, context, is_alone, number, seeds};
use crate::messages::{CELL, SMALL, recv, send};
use crate::ranks::{OnDevice, Process, data, hosts, of_processes, total, world};
use crate::recording::{Graph, Mode};

/// What every seed has: delays, and writes that other streams see late.
const WEAK: &[(&str, &str)] = &[("SOFTCUDA_DELAY_US", "80"), ("SOFTCUDA_GAP_US", "20"), ("SOFTCUDA_WEAK", "1")];

/// Halves of 64 KiB.
const SHORT: &[(&str, &str)] = &[("device_staging_bytes", "65536")];

/// The elements of a half.
const HALF: usize = 16_384;

/// Runs `body` in a process for every seed, with its number. It is called in the test of that name.
fn under_seeds(test: &str, settings: &[(&str, &str)], body: impl FnOnce(u64)) {
    if !is_alone(test) && context().is_none() {
        return;
    }
    let seeds: Vec<String> = seeds("NCCLX_RS_RACE_SEED", "NCCLX_RS_RACE_SEEDS").map(|seed| seed.to_string()).collect();
    let settings: Vec<Vec<(&str, &str)>> =
        seeds.iter().map(|seed| [settings, &[("SOFTCUDA_SEED", &seed[..])]].concat()).collect();
    let settings: Vec<&[(&str, &str)]> = settings.iter().map(|settings| &settings[..]).collect();
    alone(test, &settings, || body(number("SOFTCUDA_SEED").expect("it has one")));
}

/// Runs `body` on three ranks that are processes. The stream of the second one pauses for so many microseconds at most; those
/// of the others never do. It is called in the test of that name.
fn beside_a_slow_rank(test: &str, microseconds: &str, body: impl FnOnce(OnDevice)) {
    if is_alone(test) {
        body(Process::new(test).join("slow", 0, SHORT));
    } else if context().is_some() {
        of_processes(test, &[&[], &[("SOFTCUDA_DELAY_US", microseconds), ("SOFTCUDA_SEED", "1")], &[]]);
    }
}

/// Has a rank's stream come late, by so many copies.
fn delay(rank: &OnDevice, stream: &Stream, copies: usize, memory: &DeviceMemory) {
    let current = rank.context.enter().expect("a context");
    for _ in 0..copies {
        stream.copy(&current, memory.bytes(), memory.bytes()).expect("a copy");
    }
}

/// Broadcasts and all_gathers of several segments, one after the other, with other data each time.
fn segments(rank: &OnDevice, seed: u64) -> Vec<DeviceMemory> {
    let (me, size, len) = (rank.me(), rank.comm.size(), 2 * HALF + 5);
    let mut kept = Vec::new();
    for turn in 0..4 {
        let of = |rank: usize| data(10 * turn + rank, len);
        let (own, all) = (rank.memory(&of(me)), rank.memory(&vec![-1.0; len * size]));
        let root = (turn + seed as usize) % size;
        let sent = rank.memory(&if me == root { of(50) } else { vec![-1.0; len] });
        delay(rank, &rank.stream, (me * 7 + seed as usize + turn) % 5, &own);
        rank.submit(OpKind::AllGather, &[&own], &[&all]).expect("a gathering");
        rank.submit(OpKind::Broadcast { root: Rank::from(root) }, &[&sent], &[&sent]).expect("a broadcast");
        kept.push((turn, own, all, sent));
    }
    for (turn, _, all, sent) in &kept {
        let of = |rank: usize| data(10 * turn + rank, len);
        assert!(
            rank.values(all) == (0..size).flat_map(of).collect::<Vec<_>>(),
            "what rank {me} gathered in turn {turn}"
        );
        assert!(rank.values(sent) == of(50), "what came to rank {me} in turn {turn}");
    }
    kept.into_iter().flat_map(|(_, own, all, sent)| [own, all, sent]).collect()
}

fn segments_under(test: &str, settings: &[(&str, &str)]) {
    under_seeds(test, settings, |seed| {
        world(3, SHORT, |rank| {
            let kept = segments(&rank, seed);
            rank.leave(kept);
        });
    });
}

/// R1: the word that frees a half comes late, and the sender is two segments ahead.
#[test]
fn a_half_is_written_again_only_when_it_has_been_read() {
    const LATE: &[(&str, &str)] = &[("SOFTCUDA_DELAY_US", "200"), ("SOFTCUDA_GAP_US", "50")];
    segments_under("races::a_half_is_written_again_only_when_it_has_been_read", LATE);
}

/// R2: the word that frees a half is seen before the copy is done that reads it.
#[test]
fn a_half_is_free_only_after_the_copy() {
    segments_under("races::a_half_is_free_only_after_the_copy", WEAK);
}

/// A graph whose every replay broadcasts something else, moves what the ranks have in a ring, and adds it up.
fn replays(rank: &OnDevice, seed: u64) -> (Graph, Vec<DeviceMemory>) {
    let (me, size, len, turns) = (rank.me(), 3, 100, 30);
    let (next, last) = ((me + 1) % size, (me + 2) % size);
    let (own, came, sum) = (rank.memory(&data(me, len)), rank.memory(&[0.0; 100]), rank.memory(&[0.0; 100]));
    let first = rank.memory(&[0.0; 100]);
    let told: Vec<DeviceMemory> = (0..turns).map(|turn| rank.memory(&data(turn, len))).collect();
    let seen: Vec<DeviceMemory> = (0..turns).map(|_| rank.memory(&[0.0; 100])).collect();
    let copy = |from: &DeviceMemory, into: &DeviceMemory| {
        let current = rank.context.enter().expect("a context");
        rank.stream.copy(&current, from.bytes(), into.bytes()).expect("a copy");
    };
    rank.comm.barrier().expect("all are there");
    let graph = Graph::of(&rank.stream, Mode::Global, || {
        rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&own], &[&sum]).expect("a sum");
        let batch = [
            rank.op(&rank.stream, send(next, 0), &[&own], &[], None),
            rank.op(&rank.stream, recv(last, 0), &[], &[&came], None),
        ];
        rank.comm.submit_batch(&batch).expect("a batch");
        copy(&came, &own);
        rank.submit(OpKind::Broadcast { root: Rank(0) }, &[&first], &[&first]).expect("a broadcast");
    });
    rank.comm.barrier().expect("all are there");
    for (told, seen) in told.iter().zip(&seen) {
        delay(rank, &rank.stream, (me * 5 + seed as usize) % 4, &sum);
        if me == 0 {
            copy(told, &first);
        }
        graph.replay(&rank.stream);
        copy(&first, seen);
    }
    assert!(rank.values(&own) == data(me, len) && rank.values(&sum) == total(size, len), "rank {me}");
    for (turn, seen) in seen.iter().enumerate() {
        assert!(rank.values(seen) == data(turn, len), "what replay {turn} brought to rank {me}");
    }
    (graph, [told, seen, vec![own, came, sum, first]].into_iter().flatten().collect())
}

/// R3: a sender's next replay begins before the receiver has made the words of this one zero.
#[test]
fn a_replay_begins_when_the_one_before_has_been_received() {
    under_seeds("races::a_replay_begins_when_the_one_before_has_been_received", WEAK, |seed| {
        world(3, SHORT, |rank| {
            let kept = replays(&rank, seed);
            rank.leave(kept);
        });
    });
}

/// The same where one rank's stream is much slower than the others'.
#[test]
fn a_replay_begins_when_a_slow_rank_has_received_the_one_before() {
    const NAME: &str = "races::a_replay_begins_when_a_slow_rank_has_received_the_one_before";
    beside_a_slow_rank(NAME, "2000", |rank| {
        let kept = replays(&rank, 1);
        rank.leave(kept);
    });
}

/// What a rank finds of a sum that one of them came late to: it is right, or it is no success; and its stream runs out.
fn is_sound(rank: &OnDevice, outcome: Result<Work, Error>, memory: &DeviceMemory, len: usize) {
    let ended = outcome.and_then(|work| work.wait(None));
    rank.stream.synchronize().expect("a stream that runs out");
    if ended.is_ok() {
        assert!(
            rank.values(memory) == total(rank.comm.size(), len),
            "a success with a wrong sum on rank {}",
            rank.me()
        );
    }
}

/// One of three ranks comes about when the time limit of the first one is over.
fn about_the_limit(test: &str, len: usize) {
    under_seeds(test, WEAK, |seed| {
        world(3, SHORT, |rank| {
            let (me, memory) = (rank.me(), rank.memory(&data(rank.me(), len)));
            rank.sum(&rank.memory(&[1.0])).expect("all are set up");
            rank.comm.barrier().expect("all are there");
            if me == 2 {
                // The watch looks ten times a second, from when the stream has reached the operation.
                std::thread::sleep(Duration::from_millis(180 + seed * 29 % 240));
            }
            let limit = if me == 0 { Duration::from_millis(200) } else { Duration::from_secs(100) };
            let outcome = rank.submit_within(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory], Some(limit));
            is_sound(&rank, outcome, &memory, len);
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            rank.comm.abort("the test is over");
        });
    });
}

/// R4: a rank is released while a late word of another rank lowers what it waits for.
#[test]
fn a_late_word_holds_up_no_release() {
    about_the_limit("races::a_late_word_holds_up_no_release", 3 * HALF);
}

/// R5: one rank gives up, and what its stream then sends makes no success on another one. The data is long enough that each
/// rank adds up a part for all.
#[test]
fn who_gives_up_spoils_no_success() {
    about_the_limit("races::who_gives_up_spoils_no_success", HALF);
}

/// R6: ranks call something different at once, and begin anew while others' streams still run out.
#[test]
fn ranks_that_disagree_at_once_all_know() {
    under_seeds("races::ranks_that_disagree_at_once_all_know", WEAK, |seed| {
        world(3, SHORT, |rank| {
            let (me, mut kept) = (rank.me(), Vec::new());
            for turn in 0..6 {
                let memory = rank.memory(&data(me, 50));
                let other = rank.memory(&data(me, 51));
                rank.comm.barrier().expect("all are there");
                // Two of them agree, and may have begun.
                let own = if (turn + seed as usize) % 3 == me { &other } else { &memory };
                let outcome = rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[own], &[own]);
                let error = outcome.and_then(|work| work.wait(None)).expect_err("they differ");
                assert!(matches!(error, Error::Mismatch { .. }), "turn {turn} on rank {me}: {error}");
                let right = rank.memory(&data(me, HALF + turn));
                rank.sum(&right).expect("they begin anew");
                assert!(rank.values(&right) == total(3, HALF + turn), "turn {turn} on rank {me}");
                kept.push([memory, other, right]);
            }
            rank.leave(kept);
        });
    });
}

/// R7: two sends to one rank on two streams, of which the second is ready first.
#[test]
fn messages_come_in_the_order_of_the_calls() {
    under_seeds("races::messages_come_in_the_order_of_the_calls", WEAK, |seed| {
        world(2, SMALL, |rank| {
            let side = Stream::new(&rank.context, 0).expect("a stream");
            let memory: Vec<DeviceMemory> = (0..6).map(|at| rank.memory(&data(at + 7 * rank.me(), 3 * CELL))).collect();
            for (number, memory) in memory.iter().enumerate() {
                let (late, early) = if number % 2 == 0 { (true, &side) } else { (false, &rank.stream) };
                if late {
                    delay(&rank, early, 3 + (seed as usize + rank.me()) % 4, memory);
                }
                let (kind, buffers) = match rank.me() {
                    0 => (send(1, 0), (&[memory][..], &[][..])),
                    _ => (recv(0, 0), (&[][..], &[memory][..])),
                };
                rank.submit_on(early, kind, buffers, None).expect("a message");
            }
            side.synchronize().expect("a stream that ends");
            for (number, memory) in memory.iter().enumerate() {
                assert!(rank.values(memory) == data(number, 3 * CELL), "message {number}");
            }
            rank.leave((memory, side));
        });
    });
}

/// R8: ranks of two hosts at different segments, and what comes from the other host is late.
#[test]
fn hosts_are_at_different_segments() {
    under_seeds("races::hosts_are_at_different_segments", WEAK, |seed| {
        hosts("aabb", SHORT, |rank| {
            let (me, size, mut kept) = (rank.me(), 4, Vec::new());
            for turn in 0..3 {
                let len = 2 * HALF + 3 + turn;
                let (sum, own) = (rank.memory(&data(me, len)), rank.memory(&data(me, 40 * size)));
                let moved = rank.memory(&vec![0.0; 40 * size]);
                delay(&rank, &rank.stream, (me * 3 + seed as usize + turn) % 6, &sum);
                rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&sum], &[&sum]).expect("a sum");
                let counts = Counts::equal(40, size);
                let exchange = OpKind::AllToAll { send: counts.clone(), recv: counts };
                rank.submit(exchange, &[&own], &[&moved]).expect("an exchange");
                // Of these ranks one sends all, and others nothing.
                let sent = rank.memory(&if me == turn { data(50, len) } else { vec![-1.0; len] });
                let broadcast = OpKind::Broadcast { root: Rank::from(turn) };
                rank.submit(broadcast, &[&sent], &[&sent]).expect("a broadcast");
                kept.push((len, sum, own, moved, sent));
            }
            for (len, sum, _, moved, sent) in &kept {
                assert!(rank.values(sum) == total(size, *len) && rank.values(sent) == data(50, *len), "rank {me}");
                let block = |from: usize| data(from, 40 * size)[40 * me..][..40].to_vec();
                assert!(rank.values(moved) == (0..size).flat_map(block).collect::<Vec<_>>(), "rank {me}");
            }
            rank.leave(kept);
        });
    });
}
