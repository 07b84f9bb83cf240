//! All_to_alls of equal blocks: which algorithm exchanges them, by how many messages and steps.

use ncclx_rs::algo::{self, Chunking, Collective, Scaling, ScratchLimit, Setting};
use ncclx_rs::schedule::{self, Action};
use ncclx_rs::{Counts, Rank, Topology};

use crate::cases::{Case, ELEMENT};
use crate::schedules::{check_scaled, plan};

#[test]
fn a_short_all_to_all_that_is_forwarded_takes_few_messages() {
    let by_hosts = |hosts: usize| Topology::new(&(0..8 * hosts).map(|rank| (rank / 8).to_string()).collect::<Vec<_>>());
    let single = Topology::single_host;
    // Elements of eight bytes a block. The barrier at the end, behind which all agree, takes ⌈log₂ n⌉.
    for (topo, block, messages) in [
        (single(9), 1, 4 + 4),
        (single(1000), 128, 10 + 10),
        (single(1000), 129, 999 + 10),
        (by_hosts(8), 1, 7 + 7 + 6),
        (by_hosts(100), 64, 7 + 7 + 10),
        (by_hosts(100), 65, 7 + 99 + 10),
    ] {
        let size = topo.size();
        let counts = Counts::equal(block, size);
        let named = Case::Same(Collective::AllToAll { send: counts.clone(), recv: counts });
        // Ranks that have asked agree before.
        let (known, rounds) = (Case::Same(Collective::EqualAllToAll { count: block }), size.ilog2() as usize);
        let rounds = rounds + usize::from(!size.is_power_of_two());
        for (case, messages) in [(named, messages), (known, messages - rounds)] {
            let (setting, limit) = ((Scaling::Nothing, 8), ScratchLimit::UNBOUNDED);
            let schedules = plan(Some("forwarding"), &case, &topo, setting, limit).expect("equal blocks");
            for schedule in &schedules {
                let sends = schedule.steps.iter().filter(|step| matches!(step.action, Action::Send { .. })).count();
                assert_eq!(sends, messages, "{size} ranks, blocks of {block}");
                assert!(schedule.steps.len() <= 6 * messages + 24, "{} steps", schedule.steps.len());
            }
            assert_eq!(schedule::check(&schedules), Ok(()));
        }
    }
}

#[test]
fn blocks_that_are_known_to_be_equal_come_by_each_algorithm() {
    let hosts = |size: usize, host: &dyn Fn(usize) -> usize| {
        Topology::new(&(0..size).map(|rank| host(rank).to_string()).collect::<Vec<_>>())
    };
    for size in [1, 2, 3, 4, 8, 9, 10, 12, 16, 24, 33, 60, 64] {
        let topologies = [
            Topology::single_host(size),
            hosts(size, &|rank| rank),
            hosts(size, &|rank| rank / 4),
            hosts(size, &|rank| rank % 4),
            // Of a host that comes twice.
            hosts(size, &|rank| [0, 1, 2, 1, 0, 2][rank % 6]),
        ];
        for (topo, element) in topologies.iter().flat_map(|topo| [8, 1024, ELEMENT].map(|element| (topo, element))) {
            for (name, count) in [None, Some("forwarding"), Some("direct")].into_iter().flat_map(|n| [(n, 1), (n, 3)]) {
                let case = Case::Same(Collective::EqualAllToAll { count });
                check_scaled(name, &case, topo, 0, (Scaling::Nothing, element), ScratchLimit::DEFAULT);
            }
        }
    }
}

#[test]
fn the_length_of_equal_blocks_and_the_memory_for_copies_decide_what_exchanges_them() {
    let name = |topo: &Topology, count: usize, scratch: ScratchLimit| {
        let setting =
            Setting { me: Rank(0), topo, element: 8, scaling: Scaling::Nothing, chunking: Chunking::Chunks, scratch };
        algo::plan(&Collective::EqualAllToAll { count }, setting).name
    };
    let by_hosts = |ranks: usize, local: usize| {
        Topology::new(&(0..ranks).map(|rank| (rank / local).to_string()).collect::<Vec<_>>())
    };
    let (unbounded, default) = (ScratchLimit::UNBOUNDED, ScratchLimit::DEFAULT);
    for (topo, count, scratch, expected) in [
        (Topology::single_host(100), 128, default, "forwarding"),
        (Topology::single_host(100), 129, default, "direct"),
        (by_hosts(100, 1), 512, default, "forwarding"),
        (by_hosts(100, 1), 513, default, "direct"),
        (by_hosts(100, 10), 2048, default, "forwarding"),
        (by_hosts(100, 10), 2049, unbounded, "direct"),
        (by_hosts(100, 30), 129, default, "direct"),
        (by_hosts(1024, 8), 256, default, "forwarding"),
        (by_hosts(1024, 8), 257, default, "direct"),
        (by_hosts(1024, 8), 257, unbounded, "forwarding"),
        (by_hosts(4096, 8), 128, default, "forwarding"),
    ] {
        assert_eq!(name(&topo, count, scratch), expected, "{} ranks, blocks of {count}", topo.size());
    }
}
