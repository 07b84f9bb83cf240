//! Ranks on NUMA nodes, which they say they are on.

use std::sync::Arc;
use std::time::Duration;

use ncclx_rs::algo::{self, Chunking, Collective, Scaling, ScratchLimit, Setting};
use ncclx_rs::comm::store::MemoryStore;
use ncclx_rs::schedule::Schedule;
use ncclx_rs::{CommOptions, Communicator, Counts, Rank, ReduceOp, Topology};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::{Value, json};

use crate::cases::{ELEMENT, cases};
use crate::log_capture;
use crate::schedules::{check, topologies};
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

/// One host with ranks on these nodes.
fn on_nodes(nodes: impl IntoIterator<Item = u32>) -> Topology {
    let nodes: Vec<Option<u32>> = nodes.into_iter().map(Some).collect();
    Topology::single_host(nodes.len()).on_nodes(&nodes)
}

fn setting(topo: &Topology, me: usize, element: usize) -> Setting<'_> {
    let (scaling, scratch) = (Scaling::Nothing, ScratchLimit::UNBOUNDED);
    Setting { me: Rank::from(me), topo, element, scaling, chunking: Chunking::Chunks, scratch }
}

#[test]
fn collectives_by_node_are_right_in_worlds_up_to_12() {
    let mut done = 0;
    for size in 1..=12 {
        let mut random = StdRng::seed_from_u64(size as u64);
        for hosts in topologies(size, &mut random) {
            let topo = on_nodes((0..size).map(|rank| hosts.host_of(Rank::from(rank)) as u32));
            for case in cases(size, &mut random) {
                check(Some("numa"), &case, &topo, size as u64);
                done += usize::from(algo::plan_with("numa", &case.of(0), setting(&topo, 0, ELEMENT)).is_some());
            }
        }
    }
    assert!(done > 500, "{done} collectives");
}

#[test]
fn ranks_take_the_steps_between_nodes_that_they_take_between_hosts() {
    for nodes in [&[0, 0, 1, 1][..], &[0, 1, 0, 1, 0, 1], &[0, 0, 0, 1, 1], &[5, 5, 9, 9, 2, 2, 7, 7]] {
        let (size, topo) = (nodes.len(), on_nodes(nodes.iter().copied()));
        let hosts = Topology::new(&nodes.iter().map(u32::to_string).collect::<Vec<_>>());
        for case in cases(size, &mut StdRng::seed_from_u64(1)) {
            for me in 0..size {
                let plan = |name, topo| {
                    let steps = |schedule: Schedule| (schedule.steps, schedule.scratch, schedule.sums);
                    algo::plan_with(name, &case.of(me), setting(topo, me, ELEMENT)).map(steps)
                };
                assert_eq!(plan("numa", &topo), plan("hierarchical", &hosts), "{case:?} on nodes {nodes:?}");
            }
        }
    }
}

#[test]
fn only_long_collectives_go_by_node_and_only_where_nodes_are_alike() {
    let mib = 1 << 20;
    let count = mib;
    let counts = |size: usize, bytes: usize| Counts::equal(bytes / ELEMENT / size, size);
    let takes = |topo: &Topology, collective: Collective, element| {
        algo::plan(&collective, setting(topo, 1, element)).name == "numa"
    };
    let two = on_nodes([0, 0, 1, 1]);
    assert!(takes(&two, Collective::AllReduce { count }, 4));
    assert!(!takes(&two, Collective::AllReduce { count: count - 1 }, 4), "shorter than 4 MiB");
    assert!(takes(&two, Collective::Broadcast { count, root: Rank(3) }, 4));
    assert!(!takes(&two, Collective::Broadcast { count, root: Rank(3) }, 2));
    assert!(!takes(&two, Collective::Reduce { count, root: Rank(3) }, 4));
    for (bytes, expected) in [(4 * mib, true), (2 * mib, false)] {
        let counts = counts(4, bytes);
        assert_eq!(takes(&two, Collective::AllGather { counts: counts.clone() }, ELEMENT), expected);
        assert_eq!(takes(&two, Collective::ReduceScatter { counts: counts.clone() }, ELEMENT), expected);
        assert!(!takes(&two, Collective::AllToAll { send: counts.clone(), recv: counts }, ELEMENT));
    }
    assert!(!takes(&two, Collective::Barrier, 1));
    let long = || Collective::AllReduce { count: 16 * mib };
    for (nodes, expected) in [
        (&[0, 1, 0, 1, 0, 1][..], true),
        (&[0, 0, 1, 1, 2, 2, 3, 3], true),
        (&[0, 0, 0, 1, 1], false),
        (&[0, 0, 0, 1], false),
        (&[0, 1], false),
        (&[0, 1, 2, 3], false),
        (&[1, 1, 1, 1], false),
    ] {
        assert_eq!(takes(&on_nodes(nodes.iter().copied()), long(), 4), expected, "on nodes {nodes:?}");
    }
    assert!(!takes(&Topology::single_host(4), long(), 4));
    assert!(!takes(&Topology::single_host(4).on_nodes(&[Some(0), Some(0), Some(1), None]), long(), 4));
    let hosts = Topology::new(&["a", "a", "b", "b"]).on_nodes(&[Some(0), Some(1), Some(0), Some(1)]);
    assert_eq!(algo::plan(&long(), setting(&hosts, 1, 4)).name, "hierarchical");
    let on_a_device = Setting { chunking: Chunking::Whole, ..setting(&two, 1, 4) };
    assert_ne!(algo::plan(&long(), on_a_device).name, "numa");
    assert!(algo::plan_with("numa", &long(), on_a_device).is_none());
}

/// The algorithms by which four ranks with these settings run an all_reduce of so many numbers, which comes out right.
fn algorithms_of(count: usize, settings: [&[(&str, &str)]; 4]) -> Vec<String> {
    log_capture::start();
    let store = Arc::new(MemoryStore::default());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = settings
            .iter()
            .enumerate()
            .map(|(rank, settings)| {
                let hints = settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
                let (name, rank, store) = ("nodes".to_owned(), Rank::from(rank), store.clone());
                let options = CommOptions { name, rank, size: 4, store, timeout: Some(LIMIT), hints };
                scope.spawn(move || {
                    let comm = Communicator::new(options).expect("the world forms");
                    let mut sums: Vec<f32> = (0..count).map(|index| (index % 1000 + rank.index()) as f32).collect();
                    comm.all_reduce(&mut sums, ReduceOp::Sum).expect("the other ranks");
                    let expected = (0..count).map(|index| (index % 1000 * 4 + 6) as f32);
                    assert!(sums.into_iter().eq(expected), "a sum of {count} numbers");
                    comm.shutdown().expect("shutdown");
                })
            })
            .collect();
        ranks.into_iter().for_each(|rank| rank.join().expect("no panic"));
    });
    let start = format!("AllReduce {{ count: {count} }} of elements of 4 bytes runs by ");
    log_capture::lines().iter().filter_map(|(_, line)| line.strip_prefix(&start)).map(str::to_owned).collect()
}

#[test]
fn all_ranks_go_by_node_or_none_does() {
    let (zero, one) = (("numa_node", "0"), ("numa_node", "1"));
    // Sizes that no other test has.
    let count = 1_300_001;
    let all = algorithms_of(count, [&[zero], &[one], &[zero], &[one]]);
    assert_eq!(all, ["numa"; 4]);
    for (index, settings) in [
        [&[zero][..], &[one], &[zero], &[one, ("numa_collectives", "false")]],
        [&[zero], &[one], &[zero], &[("numa_node", "off")]],
        [&[zero], &[zero], &[zero], &[zero]],
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(algorithms_of(count + 1 + index, settings), ["direct"; 4], "{settings:?}");
    }
    let short = algorithms_of(30_011, [&[zero], &[one], &[zero], &[one]]);
    assert_eq!(short, ["direct"; 4]);
    let named = [("algorithm", "numa"), zero];
    assert_eq!(algorithms_of(30_013, [&named, &[one], &[zero], &[one]]), ["numa"; 4]);
}
