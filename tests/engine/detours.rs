//! Ranks of one host between which something stands in the way of shared memory.

use ncclx_rs::{OpKind, Rank};
use rustix::process::Uid;

use crate::lacking::lacks;
use crate::log_capture;
use crate::world::{Wire, run, world};

/// Any that is not this process's.
const OTHER_USER: u32 = 54_321;

/// Whether `comm`'s stream to each of the others is a TCP connection, of which the kernel keeps figures.
fn by_tcp(comm: &ncclx_rs::Communicator) -> Vec<bool> {
    let dump: serde_json::Value = serde_json::from_str(&comm.dump("asked for")).expect("JSON");
    dump["peers"].as_array().expect("the others").iter().map(|peer| peer["link"].is_object()).collect()
}

#[test]
fn ranks_that_may_not_share_memory_take_tcp() {
    if !rustix::process::geteuid().is_root() {
        return lacks("root");
    }
    log_capture::start();
    let detours = world(Wire::Auto, 3, |comm| {
        if comm.rank() == Rank(2) {
            // This thread, and those that it starts: the others hang up on them, and they on the others.
            rustix::thread::set_thread_res_uid(None, Uid::from_raw(OTHER_USER), None).expect("root may");
        }
        for turn in 0..3u32 {
            let input: Vec<u32> = (0..3000).map(|index| index / 1000 + comm.rank().0 * 10 + turn).collect();
            let mut output = vec![0; 3000];
            comm.all_to_all(&mut output, &input).expect("there is another way");
            let expected = (0..3000).map(|index| index / 1000 * 10 + comm.rank().0 + turn);
            assert!(output.into_iter().eq(expected), "wrong numbers");
        }
        run(comm, OpKind::Barrier, vec![], vec![]).expect("all are there");
        by_tcp(comm)
    });
    assert_eq!(detours, [[false, true], [false, true], [true, true]], "that pair alone, and both ways");
    // The communicator's name stands before the first rank.
    let said = log_capture::lines().into_iter().filter(|(_, line)| line.contains(" is reached by "));
    let mut said: Vec<String> = said
        .map(|(level, line)| {
            let line = line.split_once("` ").and_then(|(_, rest)| rest.split_once(", since"));
            format!("{level} {}", line.expect("who, whom and why").0)
        })
        .collect();
    said.sort();
    let line = |me, other| format!("WARN rank {me}: rank {other} is reached by tcp");
    // Whoever tries first finds out. The other one may follow it, and then it has nothing to tell.
    let is_told_of = |other| said.contains(&line(other, 2)) || said.contains(&line(2, other));
    assert!(is_told_of(0) && is_told_of(1), "{said:?}");
    assert!(said.is_sorted_by(|one, next| one < next), "a rank tells of another once: {said:?}");
}
