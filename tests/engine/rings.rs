//! How long messages come within a host, and how readers of rings leave the cache lines that they have read.

use std::time::Duration;

use ncclx_rs::{Communicator, Rank, ReduceOp, Tag};

use crate::world::{Wire, world_hinted};

/// What `comm` says of how the other rank's messages come.
fn told(comm: &Communicator, of: &str) -> serde_json::Value {
    let dump: serde_json::Value = serde_json::from_str(&comm.dump("asked for")).expect("JSON");
    dump["peers"][0][of].clone()
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
        told(comm, "ring")
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

/// So many broadcasts of 1 MiB, in parts, and messages of 256 KiB, from rank 0; what rank 1 tells of its long messages.
fn long_messages(setting: &'static str, count: usize) -> serde_json::Value {
    let hints = [("single_copy", setting), ("single_copy_bytes", "65536")];
    let told = world_hinted(Wire::Shm, 2, Duration::from_secs(60), &hints, move |comm| {
        for round in 0..count {
            let ramp = |len: usize| (0..len).map(|index| (index * 7 + round) as u8).collect::<Vec<_>>();
            let is_root = comm.rank() == Rank(0);
            let mut bytes = if is_root { ramp(1 << 20) } else { vec![0; 1 << 20] };
            comm.broadcast(&mut bytes, Rank(0)).expect("the other rank");
            assert!(bytes == ramp(1 << 20), "broadcast {round}");
            let message = &mut bytes[..256 << 10];
            if is_root {
                comm.send(message, Rank(1), Tag(0)).expect("a receiver");
            } else {
                message.fill(0);
                comm.recv(message, Rank(0), Tag(0)).expect("a sender");
                assert!(*message == ramp(256 << 10), "message {round}");
            }
        }
        told(comm, "copies")
    });
    told[1].clone()
}

#[test]
fn a_rank_measures_for_each_size_whether_to_read_messages_or_to_take_them_from_the_ring() {
    let told = long_messages("auto", 64);
    let sizes: Vec<_> = told.as_array().expect("a list").iter().map(|kind| kind["bytes"].as_u64()).collect();
    assert_eq!(sizes, [Some(256 << 10), Some(1 << 20)], "{told}");
    for kind in told.as_array().expect("a list") {
        assert!(kind["ring"].as_u64() > Some(0) && kind["single"].as_u64() > Some(0), "{told}");
    }
}

#[test]
fn a_setting_says_how_long_messages_come() {
    for setting in ["on", "off"] {
        assert_eq!(long_messages(setting, 4), serde_json::json!([]), "nothing is measured");
    }
}
