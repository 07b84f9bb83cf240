//! A process that runs out of file descriptors: nobody takes that for the end of a rank, and when there are some again, all
//! goes on.
//!
//! The limit holds for a whole process, so the ranks of these tests run in a child of their own.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use ncclx_rs::{Communicator, Error, Op, OpKind, Rank, Source, Tag};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

use crate::world::{self, Wire, buffer, op, run, world};
use crate::{alone, at_rest, entries};

pub(crate) const SHORT: Duration = Duration::from_secs(2);

/// Names the wire to the child.
const VARIABLE: &str = "NCCLX_RS_TEST_DESCRIPTORS";

/// The wires for two ranks of one host. [`Wire::Mixed`] would put them on two hosts, with TCP between them.
fn wires() -> impl Iterator<Item = Wire> {
    world::wires().into_iter().map(|wire| if wire == Wire::Mixed { Wire::Auto } else { wire })
}

/// Runs the test of this name in a child for each of these wires; what it then is there, in the child.
fn in_child(test: &str, mut wires: impl Iterator<Item = Wire>) -> Option<Wire> {
    if let Ok(wire) = std::env::var(VARIABLE) {
        return wires.find(|known| format!("{known:?}") == wire);
    }
    let _alone = alone();
    let children = wires.map(|wire| {
        let mut child = Command::new(std::env::current_exe().expect("this program"));
        child.args([&format!("descriptors::{test}"), "--exact", "--nocapture"]).env(VARIABLE, format!("{wire:?}"));
        (wire, child.spawn().expect("a child"))
    });
    for (wire, mut child) in children.collect::<Vec<_>>() {
        assert!(child.wait().expect("its end").success(), "{wire:?}");
    }
    None
}

/// Whether ranks of this process have rings to each other.
fn has_ring(wire: Wire) -> bool {
    matches!(wire, Wire::Shm | Wire::Auto)
}

/// The numbers of the descriptors that this process has.
fn descriptors() -> BTreeSet<u64> {
    let names = fs::read_dir("/proc/self/fd").expect("/proc").map(|entry| entry.expect("an entry").file_name());
    names.map(|name| name.to_str().expect("digits").parse().expect("a number")).collect()
}

/// Lets this process open `more` descriptors, or as many as it may. The limit is one of numbers, and the lowest free ones are
/// taken first.
fn allow(more: Option<usize>) {
    let limit = getrlimit(Resource::Nofile);
    let mut current = limit.maximum;
    if let Some(more) = more {
        // The folder itself is one of them, too.
        let mut open = at_rest(descriptors);
        open.retain(|fd| fs::read_link(format!("/proc/self/fd/{fd}")).is_ok());
        current = (0..).filter(|number| !open.contains(number)).nth(more);
    }
    set_limit(current);
}

fn set_limit(current: Option<u64>) {
    let limit = Rlimit { current, ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).expect("a limit below the hard one");
}

pub(crate) fn exchange(comm: &Communicator, timeout: Duration) -> Result<(), Error> {
    let mut data = [7];
    let kind = match comm.rank() {
        Rank(0) => OpKind::Send { to: Rank(1), tag: Tag(0) },
        _ => OpKind::Recv { from: Source::Rank(Rank(0)), tag: Tag(0) },
    };
    let memory = vec![buffer(&mut data)];
    let (inputs, outputs) = if comm.rank() == Rank(0) { (memory, vec![]) } else { (vec![], memory) };
    comm.submit(Op { timeout: Some(timeout), ..op(kind, inputs, outputs) })?.wait(None)
}

/// How long this process's threads have run.
fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).expect("a time")
}

#[test]
fn a_lack_of_descriptors_is_an_error_of_its_own_and_passes() {
    let Some(wire) = in_child("a_lack_of_descriptors_is_an_error_of_its_own_and_passes", wires()) else { return };
    // A stream takes one descriptor to open and one to accept; with a ring, one more for that. Whatever is there, somebody lacks one.
    let needed = if has_ring(wire) { 4 } else { 2 };
    for more in 0..needed {
        let (low, tried) = (Barrier::new(2), Barrier::new(2));
        world(wire, 2, move |comm| {
            if low.wait().is_leader() {
                allow(Some(more));
            }
            low.wait();
            let error = exchange(comm, SHORT).expect_err("there is no descriptor for a stream");
            assert!(matches!(error, Error::Resource { .. } | Error::Timeout { .. }), "{wire:?} {more}: {error}");
            if matches!(error, Error::Resource { .. }) {
                let text = error.to_string();
                assert!(text.contains("no file descriptor left") && text.contains("2 ranks takes up to 50"), "{text}");
            }
            assert!(more > 0 || matches!(error, Error::Resource { .. }), "{wire:?}: {error}");
            assert_eq!(comm.loss(), None);
            tried.wait();
            if tried.wait().is_leader() {
                allow(None);
            }
            tried.wait();
            for _ in 0..3 {
                run(comm, OpKind::Barrier, vec![], vec![]).expect("the communicator works on");
            }
        });
    }
}

#[test]
fn a_caller_that_cannot_be_accepted_waits_and_no_thread_spins() {
    let Some(wire) = in_child("a_caller_that_cannot_be_accepted_waits_and_no_thread_spins", wires()) else { return };
    let (low, tried) = (Barrier::new(2), Barrier::new(2));
    world(wire, 2, move |comm| {
        // Rank 0 can open its stream, and then there is nothing left to accept it with.
        if low.wait().is_leader() {
            allow(Some(if has_ring(wire) { 2 } else { 1 }));
        }
        low.wait();
        let (begun, busy) = (Instant::now(), processor_time());
        exchange(comm, SHORT).expect_err("no descriptor is left");
        tried.wait();
        // A thread that spins takes all the time there is; these look for news for a moment, and a few times a second.
        let (took, busy) = (begun.elapsed(), processor_time() - busy);
        assert!(busy < took / 2, "{wire:?}: {busy:?} of {took:?}");
        assert_eq!(comm.loss(), None);
        if tried.wait().is_leader() {
            allow(None);
        }
        tried.wait();
        run(comm, OpKind::Barrier, vec![], vec![]).expect("the communicator works on");
    });
}

#[test]
fn communicators_share_connections_before_descriptors_run_out() {
    const SIZE: usize = 9;
    let test = "communicators_share_connections_before_descriptors_run_out";
    let Some(wire) = in_child(test, [Wire::Tcp].into_iter()) else { return };
    let ready = Barrier::new(SIZE);
    world(wire, SIZE, move |comm| {
        // Of each communicator, nine ranks of this process could have connections to eight others, each way. Two of them could take
        // less than half of the limit, and three more.
        if ready.wait().is_leader() {
            set_limit(Some(600));
        }
        let everyone: Vec<Rank> = (0..SIZE).map(Rank::from).collect();
        let further = ["second", "third"].map(|name| {
            ready.wait();
            comm.split(&everyone, name).expect("all are there")
        });
        let shares = |comm: &Communicator| {
            run(comm, OpKind::Barrier, vec![], vec![]).expect("all are there");
            let dump: serde_json::Value = serde_json::from_str(&comm.dump("asked for")).expect("JSON");
            dump["peers"].as_array().expect("peers").iter().any(|peer| !peer["lane"].is_null())
        };
        assert_eq!([comm, &further[0], &further[1]].map(shares), [false, false, true]);
        further.into_iter().for_each(drop);
        ready.wait();
        assert!(!shares(&comm.split(&everyone, "in place of them").expect("all are there")));
        run(comm, OpKind::Barrier, vec![], vec![]).expect("all are there");
    });
}

#[test]
fn a_communicator_takes_no_more_descriptors_than_errors_say() {
    let _alone = alone();
    for (wire, size) in
        [Wire::Shm, Wire::Tcp, Wire::Tls, Wire::Mixed].into_iter().flat_map(|wire| [(wire, 2), (wire, 9)])
    {
        let before = entries("fd");
        let counts = world(wire, size, move |comm| {
            let mut data = vec![1u8; size];
            let (input, mut output) = (data.clone(), vec![0u8; size]);
            comm.all_to_all(&mut output, &input).expect("all are there");
            data.copy_from_slice(&output);
            run(comm, OpKind::Barrier, vec![], vec![]).expect("all are there");
            let count = entries("fd");
            run(comm, OpKind::Barrier, vec![], vec![]).expect("all are there");
            count
        });
        // All ranks are in this process. Each entry of a folder that a rank reads is one of these, too.
        let most = counts.into_iter().max().expect("a rank") - before - size;
        assert!(most <= size * (48 + 2 * (size - 1)), "{wire:?} {size}: {most}");
    }
}
