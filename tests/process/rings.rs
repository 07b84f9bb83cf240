//! A process that has no room for the rings of shared memory: nobody takes that for the end of a rank, and when there is some
//! again, all goes on.
//!
//! The limit holds for a whole process, so the ranks of these tests run in a child of their own.

use std::fs;
use std::process::Command;
use std::sync::Barrier;
use std::time::Duration;

use ncclx_rs::{Error, OpKind};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::alone;
use crate::descriptors::{SHORT, exchange};
use crate::world::{Wire, run, world_hinted};

/// Tells the child that it is one.
const VARIABLE: &str = "NCCLX_RS_TEST_RINGS";

const RING_BYTES: u64 = 32 << 20;

/// Runs the test of this name in a child. True: this is the child.
fn in_child(test: &str) -> bool {
    if std::env::var_os(VARIABLE).is_some() {
        return true;
    }
    let _alone = alone();
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args([&format!("rings::{test}"), "--exact", "--nocapture"]).env(VARIABLE, "1");
    assert!(child.status().expect("a child").success());
    false
}

/// How much address space this process takes.
fn address_space() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").expect("/proc");
    let pages: u64 = pages.split(' ').next().and_then(|pages| pages.parse().ok()).expect("a number");
    pages * rustix::param::page_size() as u64
}

/// Lets this process map so many rings more, or as much as it may. A ring is mapped twice; what else a process maps meanwhile
/// takes less than one.
fn allow(rings: Option<u64>) {
    let limit = getrlimit(Resource::As);
    let room = |rings| address_space() + (2 * rings + 1) * RING_BYTES;
    setrlimit(Resource::As, Rlimit { current: rings.map_or(limit.maximum, |rings| Some(room(rings))), ..limit })
        .expect("a limit below the hard one");
}

/// What two ranks get that exchange a message while they may map so many rings, of which a pair has four when each is mapped by
/// both of its sides. Nobody is lost, and all goes on afterwards.
fn exchange_with(wire: Wire, rings: u64, limit: Duration) -> Vec<Result<(), Error>> {
    let (low, tried) = (Barrier::new(2), Barrier::new(2));
    let ring_bytes = RING_BYTES.to_string();
    world_hinted(wire, 2, Duration::from_secs(60), &[("shm_ring_bytes", &ring_bytes)], move |comm| {
        if low.wait().is_leader() {
            allow(Some(rings));
        }
        low.wait();
        let outcome = exchange(comm, limit);
        assert_eq!(comm.loss(), None, "{wire:?} {rings}: {outcome:?}");
        if tried.wait().is_leader() {
            allow(None);
        }
        tried.wait();
        for _ in 0..3 {
            run(comm, OpKind::Barrier, vec![], vec![]).expect("the communicator works on");
        }
        outcome
    })
}

#[test]
fn a_lack_of_memory_for_rings_is_an_error_of_its_own_and_passes() {
    if !in_child("a_lack_of_memory_for_rings_is_an_error_of_its_own_and_passes") {
        return;
    }
    for rings in 0..4 {
        let outcomes = exchange_with(Wire::Shm, rings, SHORT);
        let is_lack = |outcome: &Result<(), Error>| matches!(outcome, Err(Error::Resource { .. }));
        for outcome in &outcomes {
            if let Err(Error::Resource { detail, .. }) = outcome {
                assert!(detail.contains(" ring of ") && detail.contains(": Cannot allocate memory"), "{detail}");
            } else {
                assert!(matches!(outcome, Ok(()) | Err(Error::Timeout { .. })), "{rings}: {outcome:?}");
            }
        }
        // One ring is mapped by its maker, and what comes next by nobody.
        match rings {
            0 => assert!(outcomes.iter().all(is_lack), "{outcomes:?}"),
            1 => assert!(outcomes.iter().any(is_lack) && outcomes.iter().all(Result::is_err), "{outcomes:?}"),
            _ => {}
        }
    }
}

#[test]
fn ranks_without_memory_for_rings_take_tcp_where_they_may() {
    if !in_child("ranks_without_memory_for_rings_take_tcp_where_they_may") {
        return;
    }
    for rings in 0..4 {
        for outcome in exchange_with(Wire::Auto, rings, Duration::from_secs(30)) {
            outcome.expect("there is another way");
        }
    }
}
