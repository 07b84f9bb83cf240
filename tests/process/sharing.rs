//! What a further communicator of the same processes takes: what processes have for each other counts once.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use ncclx_rs::{Communicator, Error, Rank, ReduceOp};

use crate::world::{Wire, world};
use crate::{alone, at_rest, entries};

/// Descriptors of a communicator of its own: a poller of two, and a listener for each way to others.
fn own(wire: Wire) -> usize {
    2 + if wire == Wire::Auto { 2 } else { 1 }
}

/// What it takes besides once it talks to so many peers. Rings of shared memory have one for all, and one of each process, which
/// all communicators share.
fn of_peers(wire: Wire, peers: usize) -> usize {
    if matches!(wire, Wire::Shm | Wire::Auto) { 1 } else { 2 * peers }
}

/// Waits until this process has no more descriptors than that, the folder's own included: what has been needed to begin goes by
/// itself.
fn settled(most: usize) -> usize {
    let deadline = Instant::now() + Duration::from_secs(30);
    while entries("fd") > most && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    entries("fd")
}

#[test]
fn a_further_communicator_takes_a_few_descriptors_and_through_tcp_two_for_a_peer() {
    let _alone = alone();
    for (wire, size) in
        [Wire::Shm, Wire::Tcp, Wire::Tls, Wire::Auto].into_iter().flat_map(|wire| [(wire, 2), (wire, 9)])
    {
        let barrier = Arc::new(Barrier::new(size));
        world(wire, size, move |comm| {
            // Rank 0 counts for all, which are in this process.
            let count = |most: Option<usize>| {
                barrier.wait();
                let count = (comm.rank() == Rank(0)).then(|| most.map_or_else(|| at_rest(|| entries("fd")), settled));
                barrier.wait();
                count
            };
            let all: Vec<Rank> = (0..size).map(Rank::from).collect();
            let talk_to_all = |comm: &Communicator| {
                let (input, mut output) = (vec![1u8; size], vec![0; size]);
                comm.all_to_all(&mut output, &input).expect("all are there");
            };
            talk_to_all(comm);
            // What is still on its way when the first ones begin.
            drop(comm.split(&all, "first").expect("all are there"));
            let before = count(None).unwrap_or_default();
            const MORE: usize = 4;
            let more: Vec<Communicator> = (0..MORE).map(|_| comm.split(&all, "more").expect("all are there")).collect();
            let made = before + MORE * size * own(wire);
            let counted = count(Some(made));
            assert!(counted.is_none_or(|count| count == made), "{wire:?} {size}: {counted:?} of {made} from {before}");
            more.iter().for_each(talk_to_all);
            let used = made + MORE * size * of_peers(wire, size - 1);
            let counted = count(Some(used));
            assert!(counted.is_none_or(|count| count == used), "{wire:?} {size}: {counted:?} of {used} from {before}");
            drop(more);
            let counted = count(Some(before));
            assert!(counted.is_none_or(|count| count == before), "{wire:?} {size}: {counted:?} of {before}");
        });
    }
}

#[test]
fn the_end_of_one_communicator_leaves_the_others_of_its_ranks() {
    let _alone = alone();
    for wire in [Wire::Shm, Wire::Tcp] {
        world(wire, 3, move |comm| {
            let all = [Rank(0), Rank(1), Rank(2)];
            let [aborted, left, kept] =
                ["aborted", "left", "kept"].map(|name| comm.split(&all, name).expect("all are there"));
            let sum = |comm: &Communicator| {
                let mut value = [1u8];
                comm.all_reduce(&mut value, ReduceOp::Sum).map(|()| value[0])
            };
            for part in [&aborted, &left, &kept] {
                assert_eq!(sum(part), Ok(3));
            }
            if comm.rank() == Rank(1) {
                aborted.abort("of this one alone");
                left.shutdown().expect("it leaves");
            } else {
                let error = sum(&aborted).expect_err("rank 1 has left it");
                assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{wire:?}: {error}");
            }
            for _ in 0..100 {
                assert_eq!((sum(&kept), sum(comm)), (Ok(3), Ok(3)), "{wire:?}");
            }
            assert_eq!((left.loss(), kept.loss(), comm.loss()), (None, None, None), "{wire:?}: nobody is lost");
            comm.barrier().expect("all are there");
        });
    }
}
