//! A rank that comes late to one collective leaves no trace: later ones cost what they did before.

use std::fs;
use std::time::Duration;

use ncclx_rs::OpKind;

use crate::alone;
use crate::world::{Wire, run, world};

const RANKS: usize = 12;

/// Longer than a collective waits before it tells the others.
const LATE: Duration = Duration::from_millis(1200);

#[test]
fn nobody_opens_streams_because_a_rank_is_late() {
    let _alone = alone();
    for wire in [Wire::Tcp, Wire::Shm] {
        let counts = world(wire, RANKS, |comm| {
            let barrier = || run(comm, OpKind::Barrier, vec![], vec![]).expect("all come");
            // A stream that one rank opens is accepted the next time the other makes progress.
            let settled = || {
                (0..20).for_each(|_| barrier());
                let sockets = sockets();
                barrier();
                sockets
            };
            let before = settled();
            if comm.rank().0 == 5 {
                std::thread::sleep(LATE); // the rank that is late is the subject of the test
            }
            (before, settled())
        });
        for (before, after) in counts {
            // Two sockets more for each rank that opens one stream; some of the former may be accepted late.
            assert!(after < before + 2 * RANKS, "{wire:?}: {before} sockets became {after}");
        }
    }
}

/// How many sockets this process has. Its other descriptors come and go: other ranks count at the same time.
fn sockets() -> usize {
    let descriptors = fs::read_dir("/proc/self/fd").expect("a folder of /proc");
    let targets = descriptors.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}
