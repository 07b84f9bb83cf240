//! Ranks that call the same with sizes that do not fit together: an error on every rank, at once, whomever they concern.

use std::time::Duration;

use ncclx_rs::{Buffer, Communicator, Error, OpKind, ReduceOp};

use crate::world::{buffer, run, wires, world, world_hinted};

/// Small worlds exchange directly, larger ones by rings and barriers.
const SIZES: [usize; 2] = [4, 9];

/// The elements of short messages, and of long ones.
const UNITS: [usize; 2] = [1, 40_000];

/// The ranks whose view differs from the others'.
fn is_odd(comm: &Communicator) -> bool {
    [1, 2].contains(&comm.rank().0)
}

fn blocks(data: &mut [f32], counts: &[usize]) -> Vec<Buffer> {
    let mut rest = data;
    let mut block = |count: &usize| {
        let (block, behind) = std::mem::take(&mut rest).split_at_mut(*count);
        rest = behind;
        buffer(block)
    };
    counts.iter().map(&mut block).collect()
}

fn all_gather(comm: &Communicator, counts: &[usize]) -> Result<(), Error> {
    let (mut own, mut all) = (vec![1.0; counts[comm.rank().index()]], vec![0.0; counts.iter().sum()]);
    run(comm, OpKind::AllGather, vec![buffer::<f32>(&mut own)], blocks(&mut all, counts))
}

fn reduce_scatter(comm: &Communicator, counts: &[usize]) -> Result<(), Error> {
    let (mut own, mut all) = (vec![0.0; counts[comm.rank().index()]], vec![1.0; counts.iter().sum()]);
    let kind = OpKind::ReduceScatter(ReduceOp::Sum);
    run(comm, kind, blocks(&mut all, counts), vec![buffer::<f32>(&mut own)])
}

fn all_to_all(comm: &Communicator, send: &[usize], recv: &[usize]) -> Result<(), Error> {
    let (mut input, mut output) = (vec![1f32; send.iter().sum()], vec![0f32; recv.iter().sum()]);
    let kind = OpKind::AllToAll { send: send.to_vec().into(), recv: recv.to_vec().into() };
    run(comm, kind, vec![buffer(&mut input)], vec![buffer(&mut output)])
}

/// The collective has failed on this rank, not by its time limit, and the next one works.
fn fails(comm: &Communicator, what: &str, outcome: Result<(), Error>, because: &str) {
    let me = comm.rank();
    match outcome {
        Err(Error::Mismatch { detail, .. }) if detail.contains(because) => {}
        other => panic!("rank {me} of {}, {what}: {other:?}", comm.size()),
    }
    let mut data = [1f32; 3];
    let memory = vec![buffer(&mut data)];
    run(comm, OpKind::AllReduce(ReduceOp::Sum), memory.clone(), memory).expect("the group works on");
    assert_eq!(data, [comm.size() as f32; 3], "after {what}");
}

#[test]
fn two_ranks_that_disagree_on_splits_fail_all() {
    // Also a chunk, and the longer one of an all_to_all.
    let units = [1, 40_000, 65_536, 65_552];
    for (wire, size) in wires().into_iter().flat_map(|wire| [2, 4, 9].map(|size| (wire, size))) {
        world(wire, size, move |comm| {
            let (me, size) = (comm.rank().index(), comm.size());
            for unit in units {
                // What rank 0 sends to another one, and what that expects. In the largest world it sends nothing else to that.
                let other = if size == 9 { 5 } else { 1 };
                for (sent, expected) in [(1, 2), (2, 1), (2, 3), (3, 2), (0, 3), (3, 0)] {
                    let count = |from: usize, to: usize| unit * (1 + (from + to) % 3);
                    let mut send: Vec<_> = (0..size).map(|to| count(me, to)).collect();
                    let mut recv: Vec<_> = (0..size).map(|from| count(from, me)).collect();
                    all_to_all(comm, &send, &recv).expect("they agree");
                    match me {
                        0 => send[other] = unit * sent,
                        _ if me == other => recv[0] = unit * expected,
                        _ => {}
                    }
                    fails(
                        comm,
                        &format!("{sent} for {expected} times {unit}"),
                        all_to_all(comm, &send, &recv),
                        "the ranks disagree on the sizes",
                    );
                }
            }
        });
    }
}

#[test]
fn blocks_are_forwarded_if_all_are_equal_and_else_all_ranks_fail() {
    let forwarding = [("algorithm", "forwarding")];
    for (wire, size) in wires().into_iter().flat_map(|wire| SIZES.map(|size| (wire, size))) {
        world_hinted(wire, size, Duration::from_secs(60), &forwarding, |comm| {
            let (me, size) = (comm.rank().index(), comm.size());
            for unit in UNITS {
                let equal = vec![2 * unit; size];
                all_to_all(comm, &equal, &equal).expect("they agree");
                // Two of three or more ranks exchange more.
                let mut counts = equal.clone();
                match me {
                    1 => counts[2] = 3 * unit,
                    2 => counts[1] = 3 * unit,
                    _ => {}
                }
                let outcome = all_to_all(comm, &counts, &counts);
                fails(comm, "an unequal block", outcome, "the ranks disagree on how to run");
                // All ranks have unequal blocks: nobody forwards.
                let count = |from: usize, to: usize| unit * (1 + (from + to) % 3);
                let send: Vec<_> = (0..size).map(|to| count(me, to)).collect();
                let recv: Vec<_> = (0..size).map(|from| count(from, me)).collect();
                all_to_all(comm, &send, &recv).expect("they agree");
                let other = vec![if is_odd(comm) { 3 * unit } else { 2 * unit }; size];
                fails(comm, "longer blocks", all_to_all(comm, &other, &other), "the ranks disagree on the sizes");
            }
        });
    }
}

#[test]
fn two_ranks_with_other_counts_fail_all() {
    for (wire, size) in wires().into_iter().flat_map(|wire| SIZES.map(|size| (wire, size))) {
        world(wire, size, |comm| {
            let size = comm.size();
            let equal = vec![3; size];
            let uneven: Vec<_> = (1..=size).collect();
            // The same in all, and for the ranks 1 and 2.
            let differ = |counts: &[usize], by: [isize; 2]| {
                let mut other = counts.to_vec();
                other[0] = other[0].checked_add_signed(by[0]).expect("enough");
                other[size - 1] = other[size - 1].checked_add_signed(by[1]).expect("enough");
                other
            };
            let (turned, askew) = (differ(&uneven, [1, -1]), differ(&equal, [1, -1]));
            let without = differ(&equal, [3, -3]);
            let views =
                [(&uneven, &turned), (&equal, &askew), (&askew, &equal), (&equal, &without), (&without, &equal)];
            for unit in UNITS {
                let times = |counts: &[usize]| counts.iter().map(|count| count * unit).collect::<Vec<_>>();
                for (usual, odd) in views {
                    let counts = times(if is_odd(comm) { odd } else { usual });
                    let what = |name| format!("{name} of {odd:?} against {usual:?}, times {unit}");
                    all_gather(comm, &times(usual)).expect("they agree");
                    fails(comm, &what("all_gather"), all_gather(comm, &counts), "with other counts a rank");
                    reduce_scatter(comm, &times(usual)).expect("they agree");
                    fails(comm, &what("reduce_scatter"), reduce_scatter(comm, &counts), "with other counts a rank");
                }
            }
        });
    }
}
