//! Ranks of one host between which something stands in the way of shared memory.

use ncclx_rs::{OpKind, Rank};
use rustix::process::Uid;

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
        return eprintln!("skipped: it takes root");
    }
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
}
