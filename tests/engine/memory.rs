//! Memory that ranks of a host map: results are right, and the receiver reads in place.

use ncclx_rs::{Rank, ReduceOp, SharedMemory, Tag};

use crate::world::{Wire, wires, world};

/// How many segments of other ranks are mapped here: those are the ones without permission to write.
fn mapped_to_read() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the memory map");
    maps.lines().filter(|line| line.contains("memfd:ncclx_rs") && line.contains(" r--s ")).count()
}

#[test]
fn operations_on_shared_memory_are_right_on_every_wire() {
    for wire in wires() {
        for size in [2, 3] {
            world(wire, size, move |comm| {
                let me = comm.rank().index();
                let mut data = SharedMemory::<f32>::new(300_000).expect("memory");
                data.iter_mut().enumerate().for_each(|(index, value)| *value = (me * index % 7) as f32);
                comm.all_reduce(&mut data[..], ReduceOp::Sum).expect("all_reduce");
                let sum = |index: usize| (0..size).map(|rank| (rank * index % 7) as f32).sum::<f32>();
                assert!(data.iter().enumerate().all(|(index, value)| *value == sum(index)));
                // From the middle of one segment into the middle of another.
                comm.broadcast(&mut data[1000..200_000], Rank(0)).expect("broadcast");
                if wire == Wire::Shm {
                    assert!(mapped_to_read() > 0, "no rank has mapped another's memory");
                }
                comm.barrier().expect("barrier");
            });
        }
    }
}

#[test]
fn segments_come_and_go() {
    world(Wire::Shm, 2, |comm| {
        let peer = Rank::from(1 - comm.rank().index());
        for round in 0..200 {
            let mut data = SharedMemory::<i64>::new(20_000 + round).expect("memory");
            data.fill(round as i64);
            if comm.rank().0 == 0 {
                comm.send(&data[..], peer, Tag(0)).expect("send");
            } else {
                data.fill(-1);
                comm.recv(&mut data[..], peer, Tag(0)).expect("recv");
                assert!(data.iter().all(|value| *value == round as i64), "round {round}");
            }
        }
    });
}
