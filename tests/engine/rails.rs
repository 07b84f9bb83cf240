//! Streams by TCP that have several connections.

use std::time::Duration;

use ncclx_rs::{Communicator, OpKind, Rank, ReduceOp, Tag};

use crate::world::{Wire, run, world_hinted};

const LIMIT: Duration = Duration::from_secs(60);

/// Collectives and messages of many lengths, checked.
fn exchange(comm: &Communicator) {
    let (me, size) = (comm.rank().0, u32::try_from(comm.size()).expect("a few"));
    for count in [0, 1, 1_000, 70_000, 1_500_000] {
        let mut data: Vec<u32> = (0..count).map(|index| index * (me + 1)).collect();
        comm.all_reduce(&mut data, ReduceOp::Sum).expect("all are there");
        let sum = (1..=size).sum::<u32>();
        assert!(data.into_iter().eq((0..count).map(|index| index.wrapping_mul(sum))), "all_reduce of {count}");
        let input: Vec<u32> = (0..count * size).map(|index| index.wrapping_mul(me + 7)).collect();
        let mut output = vec![0; (count * size) as usize];
        comm.all_to_all(&mut output, &input).expect("all are there");
        let from = |index: u32| (me * count + index % count.max(1)).wrapping_mul(index / count.max(1) + 7);
        assert!(output.into_iter().eq((0..count * size).map(from)), "all_to_all of {count}");
    }
    run(comm, OpKind::Barrier, vec![], vec![]).expect("all are there");
}

#[test]
fn collectives_over_several_connections_are_right() {
    for (wire, streams) in [(Wire::Tcp, "2"), (Wire::Tls, "3"), (Wire::Mixed, "16"), (Wire::Tcp, "5")] {
        world_hinted(wire, 3, LIMIT, &[("tcp_streams", streams)], exchange);
    }
}

#[test]
fn the_flight_recorder_tells_how_many_connections_work() {
    let told = |streams: &'static str| {
        world_hinted(Wire::Tcp, 2, LIMIT, &[("tcp_streams", streams)], |comm| {
            exchange(comm);
            // Those that are not needed may still be on their way.
            let rails = loop {
                let dump: serde_json::Value = serde_json::from_str(&comm.dump("asked for")).expect("JSON");
                let rails = dump["peers"][0]["rails"].clone();
                if rails.is_null() || rails["working"] == 3 {
                    break rails;
                }
            };
            run(comm, OpKind::Barrier, vec![], vec![]).expect("both are there");
            rails
        })
    };
    let all = serde_json::json!({"rails": 3, "working": 3, "dropped": 0, "reopened": 0});
    assert_eq!((told("1"), told("3")), (vec![serde_json::Value::Null; 2], vec![all; 2]));
}

#[test]
fn a_rank_that_leaves_at_once_has_sent_everything() {
    for turn in 0..20u8 {
        world_hinted(Wire::Tcp, 2, LIMIT, &[("tcp_streams", "4")], move |comm| {
            let mut data = vec![turn; 60_000];
            if comm.rank() == Rank(0) {
                comm.send(&data, Rank(1), Tag(0)).expect("it is there");
            } else {
                std::thread::sleep(Duration::from_millis(u64::from(turn)));
                data.fill(0xff);
                comm.recv(&mut data, Rank(0), Tag(0)).expect("it was there");
                assert!(data.iter().all(|byte| *byte == turn));
            }
        });
    }
}
