//! Splits of the communicator of a vendor's library, on the fake one of tests/fakenccl.

use std::time::Duration;

use ncclx_rs::sync::Ordering;
use ncclx_rs::sys::cuda::Stream;
use ncclx_rs::{Error, OpKind, Rank, ReduceOp};

use crate::graphs::wait_until;
use crate::harness::{alone, calls_of_nccl};
use crate::ranks::{OnDevice, world_on};
use crate::recording::{Graph, Mode};
use crate::vendor::all_collectives;

const NCCL: &[(&str, &str)] = &[("engine", "nccl")];
const FOUR: (&str, &str) = ("SOFTCUDA_DEVICES", "4");

/// How many unique ids the ranks of this process have made, and how often they have split.
fn ids_and_splits() -> (u64, u64) {
    (calls_of_nccl("ids"), calls_of_nccl("splits"))
}

/// What these ranks of a communicator make together; nothing on a rank that is not listed.
fn part(rank: &OnDevice, ranks: &[u32], name: &str) -> Result<Option<OnDevice>, Error> {
    let ranks: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
    let own: &[Rank] = if ranks.contains(&rank.comm.rank()) { &ranks } else { &[] };
    let Some(comm) = rank.comm.split_with_all(own, name)? else { return Ok(None) };
    let stream = Stream::new(&rank.context, 0).expect("a stream");
    Ok(Some(OnDevice { comm, context: rank.context.clone(), stream }))
}

/// The sum of ones.
fn count(rank: &OnDevice) -> Result<f32, Error> {
    let ones = rank.memory(&[1.0; 1000]);
    rank.sum(&ones)?;
    let sum = rank.values(&ones);
    assert!(sum.iter().all(|value| *value == sum[0]), "{sum:?}");
    Ok(sum[0])
}

/// Returns once all ranks are here, by the CPU's engine.
fn meet(rank: &OnDevice) {
    rank.comm.barrier().expect("all are there");
}

#[test]
fn parts_take_the_place_of_their_ranks_in_a_split() {
    let weak: &[(&str, &str)] =
        &[FOUR, ("SOFTCUDA_DELAY_US", "200"), ("SOFTCUDA_WEAK", "1"), ("FAKENCCL_LAUNCH_US", "300")];
    alone("vendor_splits::parts_take_the_place_of_their_ranks_in_a_split", &[&[FOUR], weak], || {
        world_on(&[0, 1, 2, 3], NCCL, |rank| {
            let memory = rank.memory(&[1.0; 1000]);
            rank.sum(&memory).expect("the parent has begun");
            // In flight as the split is called, which the library would refuse.
            let sum = rank.submit(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory]).expect("a work");
            // In another order, alone, and in no part.
            let lists: [&[u32]; 4] = [&[2, 0], &[], &[2, 0], &[3]];
            let own = part(&rank, lists[rank.me()], "part").expect("a split");
            sum.wait(None).expect("a sum");
            assert_eq!(rank.values(&memory)[0], 16.0);
            let places = own.as_ref().map(|own| (own.me(), own.comm.size()));
            assert_eq!(places, [Some((1, 2)), None, Some((0, 2)), Some((0, 1))][rank.me()]);
            if let Some(own) = &own {
                all_collectives(own, 1000);
            }
            meet(&rank);
            assert_eq!(ids_and_splits(), (1, 4), "no part has begun by itself");
            assert_eq!(count(&rank).expect("the parent goes on"), 4.0);
            own.into_iter().for_each(|own| own.leave(()));
            rank.leave(memory);
        });
    });
}

#[test]
fn a_part_is_split_in_its_turn() {
    alone("vendor_splits::a_part_is_split_in_its_turn", &[&[FOUR]], || {
        world_on(&[0, 1, 2, 3], NCCL, |rank| {
            count(&rank).expect("the parent has begun");
            let Some(first) = part(&rank, &[3, 1, 0], "first").expect("a split") else {
                assert_eq!(count(&rank).expect("the parent goes on"), 4.0);
                return rank.leave(());
            };
            assert_eq!(count(&first).expect("a sum"), 3.0);
            // Ranks 0 and 3 of the world.
            if let Some(second) = part(&first, &[2, 0], "second").expect("a split") {
                assert_eq!(second.me(), [0, 9, 9, 1][rank.me()]);
                all_collectives(&second, 100);
                second.leave(());
            }
            all_collectives(&first, 100);
            meet(&first);
            assert_eq!(ids_and_splits(), (1, 4 + 3));
            first.leave(());
            assert_eq!(count(&rank).expect("the parent goes on"), 4.0);
            rank.leave(());
        });
    });
}

#[test]
fn the_parts_of_one_that_has_not_begun_begin_by_themselves() {
    alone("vendor_splits::the_parts_of_one_that_has_not_begun_begin_by_themselves", &[&[FOUR]], || {
        world_on(&[0, 1, 2, 3], NCCL, |rank| {
            let own = part(&rank, if rank.me() < 2 { &[0, 1] } else { &[2, 3] }, "half").expect("a split");
            let own = own.expect("each is in one");
            all_collectives(&own, 100);
            meet(&rank);
            assert_eq!(ids_and_splits(), (2, 0));
            assert_eq!(count(&rank).expect("the parent begins later"), 4.0);
            meet(&rank);
            // Ranks that call without all others are as before, also now.
            if rank.me() < 2 {
                let comm = rank.comm.split(&[Rank(1), Rank(0)], "pair").expect("a split");
                let stream = Stream::new(&rank.context, 0).expect("a stream");
                let pair = OnDevice { comm, context: rank.context.clone(), stream };
                assert_eq!(count(&pair).expect("a sum"), 2.0);
                pair.leave(());
            }
            meet(&rank);
            assert_eq!(ids_and_splits(), (4, 0));
            own.leave(());
            rank.leave(());
        });
    });
}

#[test]
fn a_part_outlives_its_parent() {
    alone("vendor_splits::a_part_outlives_its_parent", &[&[FOUR]], || {
        let shared = [("engine", "nccl"), ("nccl_config", "splitShare=1")];
        for (hints, is_aborted) in [(NCCL, false), (NCCL, true), (&shared, false)] {
            world_on(&[0, 1, 2], hints, |rank| {
                count(&rank).expect("the parent has begun");
                let own = part(&rank, &[2, 1, 0], "part").expect("a split").expect("all are in it");
                assert_eq!(count(&own).expect("a sum"), 3.0);
                match is_aborted {
                    true => rank.comm.abort("it had enough"),
                    false => rank.comm.shutdown().expect("an end"),
                }
                meet(&own);
                drop(rank);
                meet(&own);
                // Longer than the reaper takes.
                std::thread::sleep(Duration::from_millis(300));
                all_collectives(&own, 100);
                own.leave(());
            });
        }
    });
}

#[test]
fn what_parts_share_ends_with_the_first_that_is_aborted() {
    alone("vendor_splits::what_parts_share_ends_with_the_first_that_is_aborted", &[&[FOUR]], || {
        let run = |fields: &str| {
            let hints = [("engine", "nccl"), ("nccl_config", fields)];
            world_on(&[0, 1], &hints, |rank| {
                count(&rank).expect("the parent has begun");
                let own = part(&rank, &[0, 1], "part").expect("a split").expect("both are in it");
                // One that has not begun before that does so by itself.
                let unused = part(&rank, &[1, 0], "unused").expect("a split").expect("both are in it");
                assert_eq!(count(&own).expect("a sum"), 2.0);
                let memory = rank.memory(&[1.0]);
                if rank.me() == 0 {
                    let limit = Some(Duration::from_millis(300));
                    let sum = OpKind::AllReduce(ReduceOp::Sum);
                    let late = rank.submit_within(sum, &[&memory], &[&memory], limit).and_then(|work| work.wait(None));
                    assert!(late.is_err(), "rank 1 does not call it, so that it is given up");
                }
                meet(&rank);
                std::thread::sleep(Duration::from_millis(300));
                let outcome = count(&own);
                assert_eq!(outcome.is_err(), fields == "splitShare=1", "{fields}: {outcome:?}");
                assert_eq!(count(&unused).expect("a sum"), 2.0);
                meet(&unused);
                [unused, own, rank].iter().for_each(|each| each.comm.abort("the test is over"));
            });
        };
        ["splitShare=0", "splitShare=1"].into_iter().for_each(run);
    });
}

#[test]
fn an_unused_part_that_leaves_ends_nothing_that_shares_with_it() {
    alone("vendor_splits::an_unused_part_that_leaves_ends_nothing_that_shares_with_it", &[&[FOUR]], || {
        let shared = [("engine", "nccl"), ("nccl_config", "splitShare=1")];
        world_on(&[0, 1], &shared, |rank| {
            count(&rank).expect("the parent has begun");
            part(&rank, &[1, 0], "unused").expect("a split").expect("both are in it").leave(());
            wait_until("the ends of the part", || calls_of_nccl("ends") == 2);
            assert_eq!(count(&rank).expect("the parent goes on"), 2.0);
            assert_eq!(["destroys", "aborts"].map(calls_of_nccl), [2, 0]);
            rank.leave(());
        });
    });
}

#[test]
fn one_that_was_given_up_is_split_by_no_rank() {
    let hang: &[(&str, &str)] = &[FOUR, ("FAKENCCL_FAULT", "1:2:hang")];
    alone("vendor_splits::one_that_was_given_up_is_split_by_no_rank", &[hang], || {
        world_on(&[0, 1, 2], NCCL, |rank| {
            count(&rank).expect("the first is sound");
            let memory = rank.memory(&[1.0]);
            let (sum, limit) = (OpKind::AllReduce(ReduceOp::Sum), Some(Duration::from_secs(1)));
            let late = rank.submit_within(sum, &[&memory], &[&memory], limit).and_then(|work| work.wait(None));
            late.expect_err("rank 1 hangs");
            let own = part(&rank, &[0, 2], "part").expect("each begins by itself");
            if let Some(own) = own {
                assert_eq!(count(&own).expect("a sum"), 2.0);
                own.leave(());
            }
            meet(&rank);
            assert_eq!(ids_and_splits(), (2, 0));
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn one_that_graphs_have_calls_of_is_split_by_no_rank() {
    alone("vendor_splits::one_that_graphs_have_calls_of_is_split_by_no_rank", &[&[FOUR]], || {
        world_on(&[0, 1], NCCL, |rank| {
            let memory = rank.memory(&[1.0; 1000]);
            rank.sum(&memory).expect("the parent has begun");
            rank.stream.synchronize().expect("a stream that ends");
            meet(&rank);
            let graph = Graph::of(&rank.stream, Mode::ThreadLocal, || rank.sum(&memory).expect("a sum"));
            meet(&rank);
            // The replay has yet to come to the library's call.
            let (word, registered) = rank.hold();
            graph.replay(&rank.stream);
            let own = part(&rank, &[1, 0], "part").expect("each begins by itself").expect("both are in it");
            word.word(0).store(1, Ordering::Release);
            assert_eq!(rank.values(&memory), [4.0; 1000]);
            assert_eq!(count(&own).expect("a sum"), 2.0);
            assert_eq!(count(&rank).expect("the parent goes on"), 2.0);
            graph.replay(&rank.stream);
            assert_eq!(rank.values(&memory), [8.0; 1000], "so does the graph");
            meet(&rank);
            assert_eq!(ids_and_splits(), (2, 0));
            own.leave(());
            rank.leave((graph, memory, registered));
        });
    });
}

#[test]
fn the_ranks_that_are_left_begin_by_themselves() {
    alone("vendor_splits::the_ranks_that_are_left_begin_by_themselves", &[&[FOUR]], || {
        world_on(&[0, 1, 2], NCCL, |rank| {
            count(&rank).expect("the parent has begun");
            meet(&rank);
            if rank.me() == 1 {
                return rank.comm.abort("it had enough");
            }
            // While they wait for it, or after they know.
            let ranks = [Rank(0), Rank(2)];
            assert!(rank.comm.part(&ranks).expect("they still have each other").is_none());
            assert_eq!(calls_of_nccl("splits"), 0);
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn a_late_rank_is_waited_for_and_a_missing_one_is_named() {
    alone("vendor_splits::a_late_rank_is_waited_for_and_a_missing_one_is_named", &[&[FOUR]], || {
        world_on(&[0, 1, 2], NCCL, |rank| {
            count(&rank).expect("the parent has begun");
            if rank.me() == 1 {
                std::thread::sleep(Duration::from_secs(1));
            }
            let own = part(&rank, &[1, 0], "late").expect("a split");
            if let Some(own) = own {
                assert_eq!(count(&own).expect("a sum"), 2.0);
                own.leave(());
            }
            meet(&rank);
            assert_eq!(ids_and_splits(), (1, 3));
            // Now it comes when the others have given up.
            let usual = rank.comm.timeout();
            rank.comm.barrier().expect("all are there");
            rank.comm.set_timeout(Duration::from_secs(2));
            if rank.me() == 1 {
                std::thread::sleep(Duration::from_secs(4));
            }
            let error = part(&rank, &[0, 1, 2], "missing").map(drop).expect_err("one is missing").to_string();
            rank.comm.set_timeout(usual);
            let expected =
                "rank 1 did not call it; all ranks of a communicator that NCCL 2.30.7 serves split it together";
            assert!(error.contains(expected), "{error}");
            assert!(rank.me() != 1 || error.contains("split: rank 0 reported: split timed out after"), "{error}");
            meet(&rank);
            assert_eq!(ids_and_splits(), (1, 3), "the library was not called");
            assert_eq!(count(&rank).expect("the parent goes on"), 3.0);
            let own = part(&rank, &[2, 0, 1], "again").expect("a split").expect("all are in it");
            all_collectives(&own, 100);
            meet(&rank);
            assert_eq!(ids_and_splits(), (1, 6));
            own.leave(());
            rank.leave(());
        });
    });
}

#[test]
fn lists_that_do_not_go_together_are_an_error_on_all_ranks() {
    alone("vendor_splits::lists_that_do_not_go_together_are_an_error_on_all_ranks", &[&[FOUR]], || {
        world_on(&[0, 1, 2], NCCL, |rank| {
            count(&rank).expect("the parent has begun");
            let lists: [&[u32]; 3] = [&[0, 1], &[1, 2], &[1, 2]];
            let error = part(&rank, lists[rank.me()], "part").map(drop).expect_err("they overlap");
            let expected = "split: rank 0 makes a part of ranks [0, 1], and rank 1 one of [1, 2]";
            assert_eq!(error.to_string(), expected);
            assert!(matches!(error, Error::Mismatch { .. }), "{error:?}");
            let own = part(&rank, &[0, 1, 2], "again").expect("a split").expect("all are in it");
            assert_eq!(count(&own).expect("a sum") + count(&rank).expect("the parent goes on"), 6.0);
            meet(&rank);
            assert_eq!(ids_and_splits(), (1, 3));
            own.leave(());
            rank.leave(());
        });
    });
}

#[test]
fn a_library_that_does_not_split_is_the_same_error_everywhere() {
    let error: &[(&str, &str)] = &[FOUR, ("FAKENCCL_FAULT", "1:split:error")];
    let hang: &[(&str, &str)] = &[FOUR, ("FAKENCCL_FAULT", "1:split:hang")];
    alone("vendor_splits::a_library_that_does_not_split_is_the_same_error_everywhere", &[error, hang], || {
        let fails = std::env::var("FAKENCCL_FAULT").is_ok_and(|fault| fault.ends_with("error"));
        world_on(&[0, 1, 2], &[("engine", "nccl"), ("connect_timeout_seconds", "2")], |rank| {
            count(&rank).expect("the parent has begun");
            let error = part(&rank, &[0, 1], "part").map(drop).expect_err("rank 1 does not").to_string();
            assert!(error.contains("a split of its communicator of NCCL 2.30.7"), "{error}");
            let expected = match fails {
                true => "rank 1: what was put on a stream: unhandled system error: no memory for a part",
                false => "it has not begun within 2.0 s on ranks [0, 1, 2]",
            };
            assert!(error.contains(expected), "{error}");
            assert_eq!(count(&rank).expect("it goes on with another one"), 3.0);
            meet(&rank);
            assert_eq!(ids_and_splits(), (2, 3));
            rank.leave(());
        });
    });
}

#[test]
fn a_library_without_splits_begins_for_each_part() {
    let library = std::env::var("NCCLX_RS_NCCL_LIBRARY").unwrap_or_default();
    let without = std::path::Path::new(&library).with_file_name("without-split").join("libnccl.so.2");
    let lacks: &[(&str, &str)] = &[FOUR, ("NCCLX_RS_NCCL_LIBRARY", without.to_str().expect("a path"))];
    alone("vendor_splits::a_library_without_splits_begins_for_each_part", &[lacks], || {
        world_on(&[0, 1, 2], NCCL, |rank| {
            count(&rank).expect("the parent has begun");
            if let Some(own) = part(&rank, &[2, 0], "part").expect("each begins by itself") {
                all_collectives(&own, 100);
                own.leave(());
            }
            meet(&rank);
            assert_eq!(ids_and_splits(), (2, 0));
            rank.leave(());
        });
    });
}

#[test]
fn a_part_on_another_device_begins_by_itself() {
    alone("vendor_splits::a_part_on_another_device_begins_by_itself", &[&[FOUR]], || {
        world_on(&[0, 1], NCCL, |rank| {
            count(&rank).expect("the parent has begun");
            let own = part(&rank, &[1, 0], "part").expect("a split").expect("both are in it");
            // Rank 0 goes on where it was, rank 1 elsewhere.
            let device = ncclx_rs::sys::cuda::Device::new([0, 3][rank.me()]).expect("a device");
            let context = ncclx_rs::sys::cuda::Context::primary(device).expect("a context");
            let stream = Stream::new(&context, 0).expect("a stream");
            let own = OnDevice { comm: own.comm, context, stream };
            all_collectives(&own, 100);
            meet(&rank);
            assert_eq!(ids_and_splits(), (2, 2), "all begin where one has to");
            own.leave(());
            rank.leave(());
        });
    });
}
