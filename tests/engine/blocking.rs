//! The methods on slices, against what each rank can compute alone; and communicators that split off.

use std::fmt::Debug;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use ncclx_rs::comm::store::MemoryStore;
use ncclx_rs::{CommOptions, Communicator, Element, Error, InitError, Rank, ReduceOp, Source, Tag, bf16, f16};

use crate::failures::missing_and_callers;
use crate::world::{Wire, wires, world, world_with};

fn me(comm: &Communicator) -> usize {
    comm.rank().index()
}

/// What rank `from` has for rank `to`.
fn block(from: usize, to: usize, count: usize) -> Vec<i64> {
    (0..count).map(|index| (from * 1_000_000 + to * 1000 + index) as i64).collect()
}

fn everywhere(check: fn(&Communicator, usize)) {
    for wire in wires() {
        for size in [1, 2, 3] {
            world(wire, size, move |comm| [0, 1, 70, 20_000].into_iter().for_each(|count| check(comm, count)));
        }
    }
}

#[test]
fn gathers_put_blocks_end_to_end() {
    everywhere(|comm, count| {
        let (size, root) = (comm.size(), Rank::from(comm.size() - 1));
        let expected: Vec<i64> = (0..size).flat_map(|from| block(from, 0, count)).collect();
        let input = block(me(comm), 0, count);
        let mut output = vec![0; size * count];
        comm.all_gather(&mut output, &input).expect("all_gather");
        assert!(output == expected);
        output.fill(0);
        comm.gather(&mut output, &input, root).expect("gather");
        assert!(output == if comm.rank() == root { expected } else { vec![0; size * count] });
    });
}

#[test]
fn scatters_give_each_rank_its_part() {
    everywhere(|comm, count| {
        let (size, root) = (comm.size(), Rank::from(comm.size() - 1));
        let input: Vec<i64> = (0..size).flat_map(|to| block(me(comm), to, count)).collect();
        let mut output = vec![0; count];
        comm.scatter(&mut output, &input, root).expect("scatter");
        assert!(output == block(root.index(), me(comm), count));
        comm.reduce_scatter(&mut output, &input, ReduceOp::Max).expect("reduce_scatter");
        assert!(output == block(size - 1, me(comm), count));
    });
}

#[test]
fn all_to_all_transposes() {
    everywhere(|comm, count| {
        let all = |block: &dyn Fn(usize) -> Vec<i64>| (0..comm.size()).flat_map(block).collect::<Vec<_>>();
        let rank = me(comm);
        let mut output = vec![0; comm.size() * count];
        comm.all_to_all(&mut output, &all(&|to| block(rank, to, count))).expect("all_to_all");
        assert!(output == all(&|from| block(from, rank, count)));
        let length = |from: usize, to: usize| count + from + 2 * to;
        let (input_lengths, output_lengths): (Vec<_>, Vec<_>) =
            (0..comm.size()).map(|other| (length(rank, other), length(other, rank))).unzip();
        let mut output = vec![0; output_lengths.iter().sum()];
        let input = all(&|to| block(rank, to, length(rank, to)));
        comm.all_to_all_v(&mut output, &input, &output_lengths, &input_lengths).expect("all_to_all_v");
        assert!(output == all(&|from| block(from, rank, length(from, rank))));
    });
}

#[test]
fn lists_take_unequal_lengths() {
    everywhere(|comm, count| {
        let length = |rank: usize| count + rank;
        let mut outputs: Vec<Vec<i64>> = (0..comm.size()).map(|rank| vec![0; length(rank)]).collect();
        let mut slices: Vec<&mut [i64]> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
        comm.all_gather_v(&mut slices, &block(me(comm), 0, length(me(comm)))).expect("all_gather_v");
        for (rank, output) in outputs.iter().enumerate() {
            assert!(*output == block(rank, 0, length(rank)));
        }
        let inputs: Vec<&[i64]> = outputs.iter().map(Vec::as_slice).collect();
        let mut output = vec![0; length(me(comm))];
        comm.reduce_scatter_v(&mut output, &inputs, ReduceOp::Min).expect("reduce_scatter_v");
        assert!(output == outputs[me(comm)]);
    });
}

#[test]
fn roots_reduce_and_broadcast() {
    everywhere(|comm, count| {
        let root = Rank::from(comm.size() - 1);
        let mut data = block(me(comm), 0, count);
        comm.reduce(&mut data, ReduceOp::Min, root).expect("reduce");
        assert!(data == block(if comm.rank() == root { 0 } else { me(comm) }, 0, count));
        data = block(me(comm), 0, count);
        comm.broadcast(&mut data, root).expect("broadcast");
        assert!(data == block(root.index(), 0, count));
        comm.barrier().expect("barrier");
    });
}

#[test]
fn every_element_type_is_reduced() {
    fn sums<T: Element + From<u8> + PartialEq + Debug>(comm: &Communicator) {
        let mut data = [T::from(me(comm) as u8 + 1), T::from(7)];
        comm.all_reduce(&mut data, ReduceOp::Sum).expect("all_reduce");
        assert_eq!(data, [T::from(6), T::from(21)]);
    }
    world(Wire::Shm, 3, |comm| {
        sums::<u8>(comm);
        sums::<u16>(comm);
        sums::<u32>(comm);
        sums::<u64>(comm);
        sums::<i16>(comm);
        sums::<i32>(comm);
        sums::<i64>(comm);
        sums::<f16>(comm);
        sums::<bf16>(comm);
        sums::<f32>(comm);
        sums::<f64>(comm);
        let mut data = [-1i8, me(comm) as i8];
        comm.all_reduce(&mut data, ReduceOp::Sum).expect("all_reduce");
        assert_eq!(data, [-3, 3]);
    });
}

#[test]
fn messages_go_around_a_ring() {
    everywhere(|comm, count| {
        let size = comm.size();
        let (next, previous) = (Rank::from((me(comm) + 1) % size), Rank::from((me(comm) + size - 1) % size));
        let mut output = vec![0; count];
        comm.send_recv(&mut output, previous, &block(me(comm), 0, count), next, Tag(3)).expect("send_recv");
        assert!(output == block(previous.index(), 0, count));
    });
}

#[test]
fn a_receive_from_any_rank_tells_whose_message_it_got() {
    world(Wire::Mixed, 3, |comm| {
        if me(comm) > 0 {
            return comm.send(&[me(comm) as u64; 9], Rank(0), Tag(1)).expect("send");
        }
        let mut heard = [0, 1].map(|_| {
            let mut data = [0u64; 9];
            let from = comm.recv(&mut data, Source::Any, Tag(1)).expect("recv");
            assert_eq!(data, [u64::from(from.0); 9]);
            from.0
        });
        heard.sort_unstable();
        assert_eq!(heard, [1, 2]);
    });
}

#[test]
fn lengths_that_cannot_be_right_are_refused_here() {
    world(Wire::Tcp, 2, |comm| {
        let usage = |result: Result<(), Error>, words: &str| {
            let error = result.expect_err("a usage error");
            assert!(matches!(error, Error::Usage(_)) && error.to_string().contains(words), "{error}");
        };
        usage(comm.all_gather(&mut [0; 3], &[0; 2]), "output");
        usage(comm.all_gather_v(&mut [[0u8; 3].as_mut_slice()], &[0; 2]), "output");
        usage(comm.reduce_scatter(&mut [0; 3], &[0; 4], ReduceOp::Sum), "output");
        usage(comm.all_to_all(&mut [0; 2], &[0; 3]), "`input`: expected a number of elements that 2 ranks");
        usage(comm.all_to_all_v(&mut [0; 2], &[0; 2], &[1, 1], &[2]), "input_split_sizes");
        // Of this sum, 64 bits hold 4.
        let wraps = [8, usize::MAX - 3];
        let sums = "expected sizes that add up to the tensor's 4 elements, got a sum beyond 64 bits";
        usage(comm.all_to_all_v(&mut [0; 4], &[0; 4], &[2, 2], &wraps), &format!("`input_split_sizes`: {sums}"));
        usage(comm.all_to_all_v(&mut [0; 4], &[0; 4], &wraps, &[2, 2]), &format!("`output_split_sizes`: {sums}"));
        usage(comm.broadcast(&mut [0; 2], Rank(2)), "root");
        usage(comm.send(&[0; 2], Rank(2), Tag(0)), "dst");
        usage(comm.send_recv(&mut [0], Rank(0), &[0], Rank(2), Tag(0)), "dst");
        usage(comm.send_recv(&mut [0], Rank(2), &[0], Rank(1), Tag(0)), "src");
        usage(comm.all_reduce(&mut [0.0f32], ReduceOp::BitAnd), "float32");
        // Nothing was sent: what comes next is the first.
        let mut heard = [0];
        let other = Rank(1 - comm.rank().0);
        comm.send_recv(&mut heard, other, &[7], other, Tag(0)).expect("send_recv");
        assert_eq!(heard, [7]);
    });
}

#[test]
fn lengths_that_differ_between_ranks_are_an_error_on_all() {
    world(Wire::Shm, 2, |comm| {
        let error = comm.all_reduce(&mut vec![0.0; 2 + me(comm)], ReduceOp::Sum).expect_err("a mismatch").to_string();
        assert!(error.contains("2 × float64") && error.contains("3 × float64"), "{error}");
    });
}

#[test]
fn a_call_that_times_out_returns_and_names_the_missing_rank() {
    let ended = Barrier::new(2);
    world_with(Wire::Shm, 2, Duration::from_millis(200), move |comm| {
        if me(comm) == 0 {
            let error = comm.all_reduce(&mut [0.0; 5], ReduceOp::Sum).expect_err("a timeout");
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
            assert_eq!(missing_and_callers(&error.to_string()), ("1", "0"));
        }
        ended.wait();
    });
}

#[test]
fn parts_of_a_world_work_beside_it() {
    for wire in wires() {
        world(wire, 5, |comm| {
            let even = comm.rank().0.is_multiple_of(2);
            // Evens in reverse order; a list's order is the new one.
            let ranks: &[Rank] = if even { &[Rank(4), Rank(2), Rank(0)] } else { &[Rank(1), Rank(3)] };
            for round in 0..2 {
                let part = comm.split(ranks, &format!("part {even} {round}")).expect("split");
                assert_eq!(ranks[part.rank().index()], comm.rank());
                let mut all = vec![0; part.size()];
                part.all_gather(&mut all, &[comm.rank().0]).expect("all_gather");
                assert_eq!(all, ranks.iter().map(|rank| rank.0).collect::<Vec<_>>());
                if even && me(comm) > 0 {
                    let pair = part.split(&[Rank(0), Rank(1)], "pair").expect("split again");
                    assert_eq!((pair.size(), pair.timeout()), (2, comm.timeout()));
                }
            }
            let alone = comm.split(&[comm.rank()], "alone").expect("split");
            assert_eq!((alone.rank(), alone.size()), (Rank(0), 1));
            comm.barrier().expect("the world goes on");
        });
    }
}

#[test]
fn a_list_that_cannot_be_right_is_refused() {
    world(Wire::Shm, 3, |comm| {
        let refused = |ranks: &[u32], words: &str| {
            let ranks: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
            let error = comm.split(&ranks, "part").expect_err("a usage error");
            assert!(matches!(error, Error::Usage(_)) && error.to_string().contains(words), "{error}");
        };
        refused(&[0, 1, 2, 3], "expected ranks in [0, 3), got 3");
        refused(&[0, 1, 2, 0], "rank 0 twice");
        refused(&[(comm.rank().0 + 1) % 3], "the calling rank");
        refused(&[], "the calling rank");
    });
}

#[test]
fn a_split_without_its_first_rank_ends_like_any_join() {
    let (store, turns) = (Arc::new(MemoryStore::default()), Barrier::new(2));
    let run = &|rank: u32| {
        let hints = vec![("connect_timeout_seconds".to_owned(), "3".to_owned())];
        let (name, store, timeout) = ("world".to_owned(), store.clone(), Some(Duration::from_secs(60)));
        let comm = Communicator::new(CommOptions { name, rank: Rank(rank), size: 2, store, timeout, hints })?;
        // Rank 0 begins when rank 1 has given up, and both begin anew when rank 0 has, too.
        if rank == 0 {
            turns.wait();
        }
        let ended = comm.split(&[Rank(0), Rank(1)], "part").map(|_| ());
        if rank == 1 {
            turns.wait();
        }
        turns.wait();
        // Rank 0's first record is still on its way to rank 1, and leads nowhere.
        let part = comm.split(&[Rank(0), Rank(1)], "part")?;
        part.barrier()?;
        ended
    };
    let errors = std::thread::scope(|scope| [0, 1].map(|rank| scope.spawn(move || run(rank))).map(|rank| rank.join()));
    for (result, absent) in errors.into_iter().zip([1, 0]) {
        let error = result.expect("no panic").expect_err("a missing rank");
        assert!(matches!(&error, Error::Init(InitError::Missing { missing, .. }) if *missing == [absent]), "{error}");
    }
}

#[test]
fn a_split_that_fails_before_a_rank_has_asked_leaves_nothing_behind() {
    let (folder, store) = (tempfile::tempdir().expect("a folder"), Arc::new(MemoryStore::default()));
    let (folder, both) = (folder.path(), [Rank(0), Rank(1)]);
    let write = |rank: u32| {
        let path = folder.join(rank.to_string());
        std::fs::write(&path, "0123456789abcdef0123456789abcdef").expect("written");
        path
    };
    let run = &|rank: u32| {
        let path = write(rank);
        let hints = [("connect_timeout_seconds", "2".to_owned()), ("job_secret", format!("file:{}", path.display()))];
        let hints = hints.map(|(name, value)| (name.to_owned(), value)).to_vec();
        let (name, store, timeout) = ("world".to_owned(), store.clone(), Some(Duration::from_secs(60)));
        let comm = Communicator::new(CommOptions { name, rank: Rank(rank), size: 2, store, timeout, hints })?;
        if rank == 1 {
            std::fs::remove_file(&path).expect("removed");
        }
        comm.split(&both, "part").map(|_| ()).expect_err("rank 1 cannot read its secret");
        write(rank);
        comm.barrier()?;
        comm.split(&both, "part")?.barrier()
    };
    std::thread::scope(|scope| {
        for rank in [0, 1].map(|rank| scope.spawn(move || run(rank))) {
            rank.join().expect("no panic").expect("the next one works");
        }
    });
}

#[test]
fn a_split_that_fails_leaves_nothing_behind_for_the_next() {
    let all: Vec<Rank> = (0..3).map(Rank).collect();
    world(Wire::Shm, 3, move |comm| {
        let name = if me(comm) == 1 { "other" } else { "part" };
        comm.split(&all, name).expect_err("the names differ");
        let part = comm.split(&all, "part").expect("split");
        let mut sum = [part.rank().0];
        part.all_reduce(&mut sum, ReduceOp::Sum).expect("all_reduce");
        assert_eq!(sum, [3]);
    });
}

#[test]
fn a_split_that_a_rank_does_not_join_names_it() {
    world_with(Wire::Shm, 3, Duration::from_secs(1), |comm| {
        if me(comm) == 2 {
            std::thread::sleep(Duration::from_secs(3));
        } else {
            let ranks: Vec<Rank> = (0..3).map(Rank).collect();
            let error = comm.split(&ranks, "part").expect_err("a missing rank");
            assert!(matches!(&error, Error::Init(InitError::Missing { missing, .. }) if *missing == [2]), "{error}");
        }
    });
}

#[test]
fn a_rank_that_missed_a_split_joins_the_next_one() {
    let all: Vec<Rank> = (0..3).map(Rank).collect();
    world_with(Wire::Shm, 3, Duration::from_secs(2), move |comm| {
        if me(comm) < 2 {
            let error = comm.split(&all, "part").expect_err("a missing rank");
            assert!(matches!(&error, Error::Init(InitError::Missing { missing, .. }) if *missing == [2]), "{error}");
            // After rank 2, which has the record that leads nowhere by then.
            std::thread::sleep(Duration::from_secs(1));
        } else {
            std::thread::sleep(Duration::from_secs(3));
        }
        for _ in 0..2 {
            let part = comm.split(&all, "part").expect("all come");
            part.barrier().expect("it works");
        }
    });
}

/// Calls a communicator when it is dropped.
struct Asking(std::sync::Weak<Communicator>);

impl Drop for Asking {
    fn drop(&mut self) {
        if let Some(comm) = self.0.upgrade() {
            comm.dump("at the end of a callback");
        }
    }
}

#[test]
fn what_a_callback_for_losses_owns_may_call_the_communicator_when_it_is_dropped() {
    let options = |name: &str| CommOptions {
        name: name.to_owned(),
        rank: Rank(0),
        size: 1,
        store: Arc::new(MemoryStore::default()),
        timeout: None,
        hints: vec![],
    };
    let comm = Arc::new(Communicator::new(options("alone")).expect("a communicator"));
    let callback = || {
        let asking = Asking(Arc::downgrade(&comm));
        move |_| drop(asking)
    };
    // By the next one, at the end, and after it.
    comm.on_loss(callback());
    comm.on_loss(callback());
    comm.shutdown().expect("shutdown");
    comm.on_loss(callback());
}
