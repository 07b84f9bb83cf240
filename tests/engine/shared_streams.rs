//! Communicators that share TCP connections. The ranks of these tests are threads of one process, which shares with itself.

use std::collections::BTreeSet;
use std::time::Duration;

use ncclx_rs::{OpKind, ReduceOp};

use crate::world::{Wire, run, world_hinted};

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn collectives_over_shared_connections_are_right_and_the_flight_recorder_tells_of_each_peers_lane() {
    for wire in [Wire::Tcp, Wire::Tls, Wire::Mixed] {
        world_hinted(wire, 3, LIMIT, &[("shared_streams", "on")], move |comm| {
            let me = comm.rank().0;
            for count in [0, 1, 1_000, 70_000, 1_500_000] {
                let mut data: Vec<u32> = (0..count).map(|index: u32| index.wrapping_mul(me + 1)).collect();
                comm.all_reduce(&mut data, ReduceOp::Sum).expect("all are there");
                assert!(data.into_iter().eq((0..count).map(|index| index.wrapping_mul(6))), "all_reduce of {count}");
            }
            // In which each rank sends to both others.
            run(comm, OpKind::Barrier, vec![], vec![]).expect("all are there");
            let dump: serde_json::Value = serde_json::from_str(&comm.dump("asked for")).expect("JSON");
            let lanes: Vec<_> = dump["peers"].as_array().expect("peers").iter().map(|peer| &peer["lane"]).collect();
            if wire == Wire::Tcp {
                let numbers: BTreeSet<_> = lanes.iter().map(|lane| lane["lane"].to_string()).collect();
                assert!(numbers.len() == 2 && !numbers.contains("null"), "{lanes:?}");
            }
            run(comm, OpKind::Barrier, vec![], vec![]).expect("all are there");
        });
    }
}
