//! Ranks on NUMA nodes, which they say they are on.

use std::time::Duration;

use ncclx_rs::ReduceOp;
use serde_json::{Value, json};

use crate::world::{Wire, world_hinted};

const LIMIT: Duration = Duration::from_secs(60);

/// What each of two ranks says of its node after a sum, which comes out right.
fn homes(node: &str) -> Vec<Value> {
    world_hinted(Wire::Auto, 2, LIMIT, &[("numa_node", node)], |comm| {
        let mut sums = vec![1f32; 100_000];
        comm.all_reduce(&mut sums, ReduceOp::Sum).expect("the other rank");
        assert!(sums.iter().all(|sum| *sum == 2.0));
        let dump: Value = serde_json::from_str(&comm.dump("asked for")).expect("JSON");
        dump["numa"].clone()
    })
}

#[test]
fn ranks_that_may_not_choose_where_their_memory_lies_work_and_say_so() {
    // No kernel that is built for so many nodes runs on a host with all of them.
    for home in homes("1023") {
        assert_eq!(home["node"], 1023);
        assert!(home["refused"].as_str().is_some_and(|cause| !cause.is_empty()), "{home}");
    }
}

#[test]
fn ranks_say_which_node_they_are_on() {
    for (setting, node) in [("0", json!(0)), ("off", Value::Null)] {
        homes(setting).iter().for_each(|home| assert_eq!(home["node"], node, "numa_node={setting}"));
    }
}
