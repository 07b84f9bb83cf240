//! How communicators of a vendor's library end, on the fake one of tests/fakenccl.

use std::sync::Barrier;
use std::time::Duration;

use ncclx_rs::comm::store::Store;
use ncclx_rs::sync::{AtomicBool, Ordering};
use ncclx_rs::sys::cuda::DeviceMemory;
use ncclx_rs::{Error, OpKind, Rank, ReduceOp};

use crate::graphs::wait_until;
use crate::harness::{alone, calls_of_nccl, context, is_alone};
use crate::log_capture;
use crate::messages::{Item, outcome, ping};
use crate::ranks::{OnDevice, Process, data, of_processes, of_processes_that_end, total, world_on};
use crate::recording::{self, Mode};

const NCCL: &[(&str, &str)] = &[("engine", "nccl"), ("device_staging_bytes", "65536")];
const MIXED: &[(&str, &str)] = &[("engine", "mixed")];
const FOUR: (&str, &str) = ("SOFTCUDA_DEVICES", "4");
/// As NCCL within a host.
const TOGETHER: (&str, &str) = ("FAKENCCL_TOGETHER", "1");

/// Whether the log says that an end took longer than it is waited for.
fn has_warned() -> bool {
    log_capture::lines().iter().any(|(_, line)| line.contains("has not ended within"))
}

/// How many communicators of the library the process has destroyed, given up, and seen the end of.
fn counts() -> [u64; 3] {
    ["destroys", "aborts", "ends"].map(calls_of_nccl)
}

fn broadcast(rank: &OnDevice, memory: &DeviceMemory) -> Result<(), Error> {
    rank.submit(OpKind::Broadcast { root: Rank(0) }, &[memory], &[memory])?.wait(None)
}

/// What the first rank sends last, and what the other one has for it.
fn last(rank: &OnDevice) -> Item {
    if rank.me() == 0 { rank.sends(1, 9, 100) } else { rank.receives(0, 9, 100) }
}

fn wait_for_stream(rank: &OnDevice) {
    rank.stream.synchronize().expect("a stream that ends");
}

#[test]
fn all_communicators_begin_to_end_at_once() {
    alone("vendor_ends::all_communicators_begin_to_end_at_once", &[&[FOUR]], || {
        log_capture::start();
        let (begin, have_begun) = (Barrier::new(2), AtomicBool::new(false));
        let run = |rank: OnDevice| {
            let (kept, item) = (ping(&rank, 0), last(&rank));
            begin.wait();
            if rank.me() == 1 {
                wait_until("the ends", || have_begun.load(Ordering::Acquire));
            }
            assert_eq!(outcome(rank.one(&item)), Ok(()));
            wait_for_stream(&rank);
            rank.check(&[item]);
            rank.comm.shutdown().expect("an end");
            drop(kept);
        };
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| world_on(&[0, 1], NCCL, run));
            }
            // Of each of these worlds, the two directions of a pair at rank 0, where nothing waits to be sent in one.
            wait_until("the ends have begun", || counts() == [6, 0, 3]);
            assert!(!has_warned(), "none was waited for before another one");
            have_begun.store(true, Ordering::Release);
        });
        wait_until("all ends", || counts() == [12, 0, 12]);
        assert_eq!(calls_of_nccl("breaches"), 0);
    });
}

#[test]
fn what_a_peer_does_not_take_holds_up_nothing_else_for_ever() {
    alone("vendor_ends::what_a_peer_does_not_take_holds_up_nothing_else_for_ever", &[&[FOUR]], || {
        log_capture::start();
        let has_gone_on = AtomicBool::new(false);
        world_on(&[0, 1], NCCL, |rank| {
            let (kept, item) = (ping(&rank, 0), last(&rank));
            if rank.me() == 1 {
                wait_until("the other rank", || has_gone_on.load(Ordering::Acquire));
            }
            assert_eq!(outcome(rank.one(&item)), Ok(()));
            wait_for_stream(&rank);
            rank.comm.shutdown().expect("an end");
            if rank.me() == 0 {
                wait_until("a warning", has_warned);
                // Another communicator's end is waited for after this one's.
                world_on(&[2, 3], NCCL, |other| {
                    let memory = other.memory(&data(other.me(), 100));
                    other.sum(&memory).expect("a sum");
                    assert_eq!(other.values(&memory), total(2, 100));
                    other.leave(memory);
                });
                wait_until("the other communicator's ends", || counts() == [4, 0, 3]);
                has_gone_on.store(true, Ordering::Release);
            }
            rank.check(&[item]);
            drop(kept);
        });
        wait_until("all ends", || counts() == [6, 0, 6]);
    });
}

#[test]
fn what_fails_after_the_last_call_is_aborted() {
    let later: &[(&str, &str)] = &[FOUR, ("FAKENCCL_FAULT", "1:2:later")];
    alone("vendor_ends::what_fails_after_the_last_call_is_aborted", &[later], || {
        let has_failed = Barrier::new(2);
        world_on(&[0, 1], NCCL, |rank| {
            let memory = rank.memory(&data(rank.me(), 100));
            rank.sum(&memory).expect("a sum");
            rank.sum(&memory).expect("a second one");
            wait_until("a failure", || calls_of_nccl("failures") == 1);
            has_failed.wait();
            rank.comm.shutdown().expect("an end");
        });
        wait_until("both ends", || counts() == [1, 1, 2]);
        assert_eq!(calls_of_nccl("breaches"), 0, "what has failed is not destroyed");
    });
}

#[test]
fn an_abort_gives_the_library_up_though_nothing_is_in_flight() {
    alone("vendor_ends::an_abort_gives_the_library_up_though_nothing_is_in_flight", &[&[FOUR, TOGETHER]], || {
        let are_there = Barrier::new(2);
        world_on(&[0, 1], NCCL, |rank| {
            let (memory, kept) = (rank.memory(&data(rank.me(), 100)), ping(&rank, 0));
            rank.sum(&memory).expect("a sum");
            wait_for_stream(&rank);
            are_there.wait();
            rank.comm.abort("it had enough");
            drop(kept);
        });
        wait_until("all ends", || counts() == [0, 6, 6]);
    });
}

#[test]
fn after_the_loss_of_a_rank_the_library_is_given_up() {
    const NAME: &str = "vendor_ends::after_the_loss_of_a_rank_the_library_is_given_up";
    if !is_alone(NAME) {
        if context().is_some() {
            of_processes_that_end(NAME, &[&[FOUR, TOGETHER], &[FOUR, TOGETHER]], &[true, false]);
        }
        return;
    }
    let process = Process::new(NAME);
    let rank = process.join("main", process.rank.0, NCCL);
    let memory = rank.memory(&data(rank.me(), 100));
    rank.sum(&memory).expect("a sum");
    wait_for_stream(&rank);
    if rank.me() == 1 {
        rank.comm.barrier().expect("both are done");
        std::process::abort();
    }
    rank.comm.barrier().expect("both are done");
    wait_until("a loss", || rank.comm.loss().is_some());
    rank.comm.shutdown().expect("an end");
    wait_until("its end", || counts() == [0, 1, 1]);
}

#[test]
fn an_end_spoils_no_capture_of_another_thread() {
    alone("vendor_ends::an_end_spoils_no_capture_of_another_thread", &[&[FOUR]], || {
        let [begin, end] = [(); 2].map(|()| Barrier::new(2));
        world_on(&[0, 1], NCCL, |rank| {
            let (kept, item) = (ping(&rank, 0), last(&rank));
            if rank.me() == 1 {
                begin.wait();
                assert_eq!(outcome(rank.one(&item)), Ok(()));
                wait_until("the other rank's ends", || calls_of_nccl("ends") == 2);
                end.wait();
                end.wait();
                wait_for_stream(&rank);
                rank.check(&[item]);
                return rank.comm.shutdown().expect("an end");
            }
            assert_eq!(outcome(rank.one(&item)), Ok(()));
            wait_for_stream(&rank);
            rank.comm.shutdown().expect("an end");
            wait_until("its ends have begun", || counts() == [2, 0, 1]);
            recording::begin(&rank.stream, Mode::Global);
            begin.wait();
            end.wait();
            recording::end(&rank.stream).expect("a graph");
            end.wait();
            drop((kept, item));
        });
    });
}

#[test]
fn a_forked_child_ends_nothing_of_its_parent() {
    alone("vendor_ends::a_forked_child_ends_nothing_of_its_parent", &[&[FOUR]], || {
        world_on(&[0, 1], NCCL, |rank| {
            let (memory, kept) = (rank.memory(&data(rank.me(), 100)), ping(&rank, 0));
            rank.sum(&memory).expect("a sum");
            wait_for_stream(&rank);
            if rank.me() == 0 {
                // SAFETY: the child touches nothing whose lock another thread may hold: all wait.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    drop(rank.comm);
                    let threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
                    let is_alone = threads == 1 && counts() == [0; 3];
                    // SAFETY: it ends this process, and nothing else.
                    unsafe { libc::_exit(if is_alone { 0 } else { 1 }) };
                }
                let mut status = 0;
                // SAFETY: the child is this process's, and there is a place for the status.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 0));
            }
            rank.comm.barrier().expect("all are there");
            rank.sum(&memory).expect("the parent goes on");
            rank.leave((memory, kept));
        });
    });
}

/// A sum that the library computes within the ranks that are alike.
fn long_sum(rank: &OnDevice) -> DeviceMemory {
    let memory = rank.memory(&data(rank.me(), 10_000));
    let kind = OpKind::AllReduce(ReduceOp::Sum);
    rank.submit(kind, &[&memory], &[&memory]).expect("a work").wait(None).expect("a sum");
    assert!(calls_of_nccl("groups") > 0, "the library takes part");
    memory
}

#[test]
fn ranks_that_are_alike_hear_of_a_departure_before_the_library_has_ended() {
    let test = "vendor_ends::ranks_that_are_alike_hear_of_a_departure_before_the_library_has_ended";
    alone(test, &[&[FOUR, TOGETHER]], || {
        log_capture::start();
        world_on(&[0, 1], MIXED, |rank| {
            let memory = long_sum(&rank);
            rank.comm.barrier().expect("all are there");
            if rank.me() == 0 {
                rank.comm.shutdown().expect("an end");
            } else {
                rank.comm.barrier().expect_err("the other one has left");
                assert!(!has_warned(), "it was told of that first");
                rank.comm.shutdown().expect("an end");
            }
            drop(memory);
        });
        wait_until("both ends", || counts()[2] == 2);
        assert!(!has_warned(), "none had to wait for long");
        let before = counts();
        world_on(&[0, 1], MIXED, |rank| {
            let memory = long_sum(&rank);
            rank.comm.barrier().expect("all are there");
            rank.comm.abort("it had enough");
            drop(memory);
        });
        wait_until("both ends", || counts() == [before[0], before[1] + 2, before[2] + 2]);
    });
}

/// By when the first rank's process ends.
const LEAVES: &str = "leaves";

#[test]
fn what_a_process_has_sent_last_leaves_before_it_ends() {
    const NAME: &str = "vendor_ends::what_a_process_has_sent_last_leaves_before_it_ends";
    if !is_alone(NAME) {
        if context().is_some() {
            of_processes(NAME, &[&[FOUR], &[FOUR]]);
        }
        return;
    }
    let process = Process::new(NAME);
    let rank = process.join("main", process.rank.0, NCCL);
    let (memory, kept, item) = (rank.memory(&data(rank.me(), 100)), ping(&rank, 0), last(&rank));
    rank.sum(&memory).expect("a sum");
    wait_for_stream(&rank);
    let message = rank.memory(&data(rank.me(), 200));
    if rank.me() == 0 {
        broadcast(&rank, &message).expect("a broadcast");
        assert_eq!(outcome(rank.one(&item)), Ok(()));
        wait_for_stream(&rank);
        rank.comm.shutdown().expect("an end");
        process.store().set(LEAVES, b"now").expect("the store");
        std::process::exit(0);
    }
    process.store().get(LEAVES, Duration::from_secs(60)).expect("the other rank leaves");
    // What it leaves first can go when its process is about to end, and what it leaves next only after that.
    std::thread::sleep(Duration::from_millis(300));
    broadcast(&rank, &message).expect("a broadcast");
    assert_eq!(rank.values(&message), data(0, 200));
    std::thread::sleep(Duration::from_millis(700));
    let work = rank.one(&item).expect("a work");
    work.wait(Some(Duration::from_secs(20))).expect("a message");
    wait_for_stream(&rank);
    rank.check(&[item]);
    rank.comm.shutdown().expect("an end");
    drop(kept);
}
