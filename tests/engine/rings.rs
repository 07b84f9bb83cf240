//! How readers of shared memory rings leave the cache lines that they have read.

use std::time::Duration;

use ncclx_rs::{Communicator, Rank, ReduceOp, Tag};

use crate::world::{Wire, world_hinted};

/// What `comm` says of the ring through which the other rank's messages come.
fn ring(comm: &Communicator) -> serde_json::Value {
    let dump: serde_json::Value = serde_json::from_str(&comm.dump("asked for")).expect("JSON");
    dump["peers"][0]["ring"].clone()
}

/// Messages of all lengths one way, and sums both ways, through rings as `setting` has them read.
fn traffic(setting: &'static str) -> Vec<serde_json::Value> {
    let hints = [("shm_line_ownership", setting), ("single_copy_bytes", "0")];
    world_hinted(Wire::Shm, 2, Duration::from_secs(60), &hints, |comm| {
        let ramp = |len: usize| (0..len).map(|index| (index * 7 % 253) as u8).collect::<Vec<_>>();
        for len in [1, 120, 121, 4095, 8192, 8193, 65_537, 700_001, 3 << 20] {
            if comm.rank() == Rank(0) {
                comm.send(&ramp(len), Rank(1), Tag(0)).expect("a receiver");
            } else {
                let mut bytes = vec![0; len];
                comm.recv(&mut bytes, Rank(0), Tag(0)).expect("a sender");
                assert!(bytes == ramp(len), "a message of {len} bytes");
            }
            let mut sums: Vec<f32> = (0..len as u32).map(|index| (index % 1000 + comm.rank().0) as f32).collect();
            comm.all_reduce(&mut sums, ReduceOp::Sum).expect("the other rank");
            let expected = (0..len as u32).map(|index| (index % 1000 * 2 + 1) as f32);
            assert!(sums.into_iter().eq(expected), "a sum of {len} numbers");
        }
        ring(comm)
    })
}

#[test]
fn whoever_holds_the_lines_what_is_read_is_what_was_sent() {
    for (setting, lines) in [("on", "owned"), ("off", "shared")] {
        for ring in traffic(setting) {
            assert_eq!(ring, serde_json::json!({"lines": lines, "shared": null, "owned": null}), "nothing is measured");
        }
    }
}

#[test]
fn a_rank_measures_both_ways_and_keeps_the_cheaper() {
    for ring in traffic("auto") {
        let cost = |lines: &str| ring[lines].as_u64().unwrap_or_else(|| panic!("{lines} was not measured: {ring}"));
        assert!(cost("shared") > 0 && cost("owned") > 0, "{ring}");
    }
}
