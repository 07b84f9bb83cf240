//! How much memory the schedules of reductions take for what ranks copy.

use ncclx_rs::algo::{self, Chunking, Collective, Scaling, ScratchLimit, Setting};
use ncclx_rs::config::Config;
use ncclx_rs::topo::Topology;
use ncclx_rs::{Counts, Rank};

/// The most pieces that a collective is cut into, and about the most chunks of its data.
const PIECES_MAX: usize = 260;

#[test]
fn simulations_take_what_is_the_default() {
    assert_eq!(ScratchLimit::at_most(Config::default().scratch_bytes), ScratchLimit::DEFAULT);
}

#[test]
fn what_long_reductions_copy_takes_a_bounded_amount_of_memory() {
    let (element, limit) = (4, 8 << 20);
    let by_hosts = |hosts: usize, ranks: usize| {
        Topology::new(&(0..hosts * ranks).map(|rank| (rank / ranks).to_string()).collect::<Vec<_>>())
    };
    for topo in [by_hosts(1, 2), by_hosts(1, 16), by_hosts(2, 4), by_hosts(4, 4), by_hosts(16, 1), by_hosts(2, 64)] {
        let (size, root) = (topo.size(), Rank(1));
        for bytes in [1 << 20, 100 << 20, 1 << 30] {
            let counts = Counts::equal(bytes / element / size, size);
            let on_one = |rank| if rank == 0 { bytes / element } else { 0 };
            let all_on_one = Collective::ReduceScatter { counts: (0..size).map(on_one).collect::<Vec<_>>().into() };
            for collective in [
                Collective::AllReduce { count: bytes / element },
                Collective::Reduce { count: bytes / element, root },
                Collective::ReduceScatter { counts },
                all_on_one.clone(),
            ] {
                for scaling in [Scaling::Nothing, Scaling::Inputs, Scaling::Sum { bytes: 4 }, Scaling::Sum { bytes: 8 }]
                {
                    for name in algo::names() {
                        let setting = |me| Setting {
                            me,
                            topo: &topo,
                            element,
                            scaling,
                            chunking: Chunking::Chunks,
                            scratch: ScratchLimit::at_most(limit),
                        };
                        // A few of many ranks.
                        let most = (0..size).step_by(1 + size / 3 * usize::from(size > 16)).filter_map(|me| {
                            let schedule = algo::plan_with(name, &collective, setting(Rank::from(me)))?;
                            Some((schedule.scratch * element + schedule.sums * 8, schedule.steps.len()))
                        });
                        let Some((taken, steps)) = most.max() else { continue };
                        let context = format!("{name}, {collective:?}, {scaling:?}: {taken} bytes, {steps} steps");
                        // Chunks that are combined at a time come on top, each of a 256th of what is very long.
                        assert!(taken <= 4 * limit.max(bytes / 16), "{context}");
                        // One rank then receives all chunks of all others.
                        let is_short = collective == all_on_one || steps <= 5 * (size + 1) * PIECES_MAX;
                        assert!(is_short, "{context}");
                    }
                }
            }
        }
    }
}
