//! A rank that comes late to one collective leaves no trace: later ones cost what they did before.

use std::time::Duration;

use ncclx_rs::OpKind;

use crate::world::{Wire, run, world};
use crate::{alone, entries};

/// Longer than a collective waits before it tells the others.
const LATE: Duration = Duration::from_millis(1200);

#[test]
fn nobody_opens_streams_because_a_rank_is_late() {
    let _alone = alone();
    for wire in [Wire::Tcp, Wire::Shm] {
        let counts = world(wire, 12, |comm| {
            let barrier = || run(comm, OpKind::Barrier, vec![], vec![]).expect("all come");
            let settled = || {
                // Between two barriers nobody opens anything, and what the first has opened is accepted.
                barrier();
                barrier();
                let files = entries("fd");
                barrier();
                files
            };
            let before = settled();
            if comm.rank().0 == 5 {
                std::thread::sleep(LATE); // the rank that is late is the subject of the test
            }
            (before, settled())
        });
        for (before, after) in counts {
            // Some more: another rank may just be opening a folder of /proc.
            assert!(after <= before + 12, "{wire:?}: {before} descriptors became {after}");
        }
    }
}
