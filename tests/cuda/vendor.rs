//! Collectives by a vendor's library, on the fake one of tests/fakenccl.

use std::time::{Duration, Instant};

use ncclx_rs::config::NcclFields;
use ncclx_rs::sync::{Arc, Ordering};
use ncclx_rs::sys::cuda::DeviceMemory;
use ncclx_rs::sys::nccl::{Nccl, NcclComm, Progress, UniqueId, Vendor};
use ncclx_rs::{Counts, Error, OpKind, Rank, ReduceOp};

use crate::graphs::wait_until;
use crate::harness::{Software, alone, calls_of_nccl, context};
use crate::ranks::{OnDevice, data, hosts_on, total, world_on};

const NCCL: &[(&str, &str)] = &[("engine", "nccl")];
const FOUR: (&str, &str) = ("SOFTCUDA_DEVICES", "4");

/// How often a library, and nothing else here, has put something on a stream.
fn launches() -> u64 {
    Software::new().expect("the software CUDA").uses("cuLaunchHostFunc")
}

pub(crate) fn library(vendor: Vendor) -> Arc<Nccl> {
    let variable = match vendor {
        Vendor::Nccl => "NCCLX_RS_NCCL_LIBRARY",
        Vendor::Rccl => "NCCLX_RS_RCCL_LIBRARY",
    };
    let path = std::env::var_os(variable).expect("tests/softcuda/run sets it");
    Arc::new(Nccl::load(vendor, Some(path.as_ref()), &[]).expect("the fake one"))
}

/// Each kind of collective, with blocks of as many elements for each rank, or of some that differ.
pub(crate) fn all_collectives(rank: &OnDevice, len: usize) {
    let (me, size) = (rank.me(), rank.comm.size());
    let parts: Vec<Vec<f32>> = (0..size).map(|rank| data(rank, len)).collect();
    let run = |kind: OpKind, inputs: &[&DeviceMemory], outputs: &[&DeviceMemory]| {
        rank.submit(kind, inputs, outputs).expect("a work").wait(None).expect("success");
    };
    let memory = |values: &[f32]| rank.memory(values);
    let zeros = |len: usize| rank.memory(&vec![-1.0; len]);
    let (own, sum) = (memory(&parts[me]), total(size, len));
    let output = zeros(len);
    run(OpKind::AllReduce(ReduceOp::Sum), &[&own], &[&output]);
    assert_eq!(rank.values(&output), sum, "{len}");
    let average: Vec<f32> = sum.iter().map(|sum| sum / size as f32).collect();
    run(OpKind::AllReduce(ReduceOp::Avg), &[&own], &[&output]);
    assert_eq!(rank.values(&output), average, "{len}");
    let scaled: Vec<f32> = sum.iter().map(|sum| sum * 0.5).collect();
    run(OpKind::AllReduce(ReduceOp::PreMulSum(0.5)), &[&own], &[&output]);
    assert_eq!(rank.values(&output), scaled, "{len}");
    for root in (0..size).map(Rank::from) {
        let here = memory(&parts[me]);
        run(OpKind::Reduce { op: ReduceOp::Sum, root }, &[&here], &[&here]);
        if root.index() == me {
            assert_eq!(rank.values(&here), sum);
        }
        let here = memory(&parts[me]);
        run(OpKind::Broadcast { root }, &[&here], &[&here]);
        assert_eq!(rank.values(&here), parts[root.index()]);
        let is_root = root.index() == me;
        let all = zeros(size * len);
        let of_root = [&all];
        run(OpKind::Gather { root }, &[&own], &of_root[..usize::from(is_root)]);
        if is_root {
            assert_eq!(rank.values(&all), parts.concat());
        }
        let (all, mine) = (memory(&parts.concat()), zeros(len));
        let of_root = [&all];
        run(OpKind::Scatter { root }, &of_root[..usize::from(is_root)], &[&mine]);
        assert_eq!(rank.values(&mine), parts[me]);
    }
    let all = zeros(size * len);
    run(OpKind::AllGather, &[&own], &[&all]);
    assert_eq!(rank.values(&all), parts.concat());
    let each: Vec<DeviceMemory> = (0..size).map(|_| zeros(len)).collect();
    run(OpKind::AllGather, &[&own], &each.iter().collect::<Vec<_>>());
    each.iter().zip(&parts).for_each(|(each, part)| assert_eq!(&rank.values(each), part));
    let blocks = memory(&vec![parts[me].clone(); size].concat());
    run(OpKind::ReduceScatter(ReduceOp::Sum), &[&blocks], &[&output]);
    assert_eq!(rank.values(&output), sum);
    let each: Vec<DeviceMemory> = (0..size).map(|_| memory(&parts[me])).collect();
    run(OpKind::ReduceScatter(ReduceOp::Sum), &each.iter().collect::<Vec<_>>(), &[&output]);
    assert_eq!(rank.values(&output), sum);
    uneven(rank, len, &run);
    run(OpKind::Barrier, &[], &[]);
}

/// Those whose blocks differ in length.
fn uneven(rank: &OnDevice, len: usize, run: &impl Fn(OpKind, &[&DeviceMemory], &[&DeviceMemory])) {
    let (me, size) = (rank.me(), rank.comm.size());
    let lengths: Vec<usize> = (0..size).map(|rank| if rank == 1 { 0 } else { len + 3 * rank }).collect();
    let blocks: Vec<Vec<f32>> = lengths.iter().enumerate().map(|(rank, len)| data(rank, *len)).collect();
    let each: Vec<DeviceMemory> = lengths.iter().map(|len| rank.memory(&vec![-1.0; *len])).collect();
    run(OpKind::AllGather, &[&rank.memory(&blocks[me])], &each.iter().collect::<Vec<_>>());
    each.iter().zip(&blocks).for_each(|(each, block)| assert_eq!(&rank.values(each), block));
    let (each, own) = (blocks.iter().map(|block| rank.memory(block)), rank.memory(&vec![-1.0; lengths[me]]));
    let each: Vec<DeviceMemory> = each.collect();
    run(OpKind::ReduceScatter(ReduceOp::Sum), &each.iter().collect::<Vec<_>>(), &[&own]);
    let expected: Vec<f32> = blocks[me].iter().map(|value| value * size as f32).collect();
    assert_eq!(rank.values(&own), expected);
    let block = |from: usize, to: usize| data(from * size + to, (from + 2 * to) % 3 * len);
    let sent: Vec<Vec<f32>> = (0..size).map(|to| block(me, to)).collect();
    let expected: Vec<Vec<f32>> = (0..size).map(|from| block(from, me)).collect();
    let counts = |blocks: &[Vec<f32>]| -> Counts { blocks.iter().map(Vec::len).collect() };
    let (input, output) = (rank.memory(&sent.concat()), rank.memory(&vec![-1.0; counts(&expected).total()]));
    run(OpKind::AllToAll { send: counts(&sent), recv: counts(&expected) }, &[&input], &[&output]);
    assert_eq!(rank.values(&output), expected.concat());
}

#[test]
fn every_collective_is_right_by_each_library() {
    let weak: &[(&str, &str)] =
        &[FOUR, ("SOFTCUDA_DELAY_US", "50"), ("SOFTCUDA_WEAK", "1"), ("FAKENCCL_LAUNCH_US", "300")];
    alone("vendor::every_collective_is_right_by_each_library", &[&[FOUR], weak], || {
        let worlds: [(&str, usize, &[usize]); 4] =
            [("nccl", 1, &[3]), ("nccl", 2, &[0, 1000]), ("rccl", 3, &[1]), ("nccl", 4, &[20_001])];
        for (engine, size, lengths) in worlds {
            let before = launches();
            world_on(&[0, 1, 2, 3][..size], &[("engine", engine)], |rank| {
                lengths.iter().for_each(|len| all_collectives(&rank, *len));
                rank.leave(());
            });
            assert!(launches() > before, "{engine} was not called");
        }
    });
}

#[test]
fn each_version_is_called_as_it_wants() {
    let versions = ["22703", "22809", "22907", "23007", "23102", "23203"];
    let settings: Vec<[(&str, &str); 2]> = versions.map(|version| [FOUR, ("FAKENCCL_VERSION", version)]).to_vec();
    let settings: Vec<&[(&str, &str)]> = settings.iter().map(|settings| &settings[..]).collect();
    alone("vendor::each_version_is_called_as_it_wants", &settings, || {
        let wanted: u32 = std::env::var("FAKENCCL_VERSION").expect("set above").parse().expect("a number");
        assert_eq!(library(Vendor::Nccl).version().to_code(), wanted);
        world_on(&[0, 1], NCCL, |rank| {
            all_collectives(&rank, 100);
            rank.leave(());
        });
    });
}

#[test]
fn many_ranks_meet_at_several() {
    let old: &[(&str, &str)] = &[FOUR, ("FAKENCCL_VERSION", "22703")];
    alone("vendor::many_ranks_meet_at_several", &[&[FOUR], old], || {
        for (each, roots) in [("1", 3), ("2", 2), ("0", 1), ("128", 1)] {
            let before = ["ids", "several_roots"].map(calls_of_nccl);
            world_on(&[0, 1, 2], &[("engine", "nccl"), ("nccl_ranks_per_root", each)], |rank| {
                all_collectives(&rank, 10);
                rank.leave(());
            });
            let [ids, several] = ["ids", "several_roots"].map(calls_of_nccl);
            assert_eq!(ids - before[0], roots, "{each} a root");
            assert_eq!(several - before[1], if roots > 1 { 3 } else { 0 }, "{each} a root");
        }
    });
}

#[test]
fn operations_on_several_streams_come_one_after_the_other() {
    let delayed: &[(&str, &str)] = &[FOUR, ("SOFTCUDA_DELAY_US", "200"), ("SOFTCUDA_WEAK", "1")];
    alone("vendor::operations_on_several_streams_come_one_after_the_other", &[delayed], || {
        world_on(&[0, 1, 2], NCCL, |rank| {
            let other = ncclx_rs::sys::cuda::Stream::new(&rank.context, 0).expect("a stream");
            let memory = rank.memory(&[1.0; 100]);
            let mut works = Vec::new();
            for turn in 0..6 {
                let stream = if turn % 2 == 0 { &rank.stream } else { &other };
                let (kind, buffers) = (OpKind::AllReduce(ReduceOp::Sum), (&[&memory][..], &[&memory][..]));
                works.push(rank.submit_on(stream, kind, buffers, None).expect("a work"));
            }
            works.iter().for_each(|work| work.wait(None).expect("a sum"));
            assert_eq!(rank.values(&memory), [729.0; 100]);
            rank.leave(memory);
        });
    });
}

/// Three ranks, of which the last one is on another host than the others.
const TWO_HOSTS: &[(&str, u32)] = &[("a", 0), ("a", 1), ("b", 2)];

#[test]
fn ranks_that_call_something_else_are_told_and_go_on() {
    alone("vendor::ranks_that_call_something_else_are_told_and_go_on", &[&[FOUR]], || {
        let disagree = |rank: OnDevice| {
            let me = rank.me();
            let memory = rank.memory(&data(me, 10));
            let one = rank.memory(&[1.0]);
            for _ in 0..3 {
                let op = if me == 1 { ReduceOp::Max } else { ReduceOp::Sum };
                let outcome =
                    rank.submit(OpKind::AllReduce(op), &[&memory], &[&memory]).and_then(|work| work.wait(None));
                let Err(Error::Mismatch { detail, .. }) = &outcome else { panic!("{outcome:?}") };
                assert!(detail.contains("all_reduce(MAX, 10 × float32)") && detail.contains("(SUM, 10"), "{detail}");
                let two = rank.memory(&rank.values(&one));
                rank.sum(&two).expect("they go on");
                assert_eq!(rank.values(&two), [3.0]);
            }
            rank.leave((memory, one));
        };
        world_on(&[0, 1, 2], NCCL, disagree);
        // The one that is alone on its host is told of what the others have found.
        hosts_on(TWO_HOSTS, NCCL, disagree);
    });
}

/// The error of a second all_reduce, on each rank, and that its stream runs out.
fn second(rank: &OnDevice, limit: Duration) -> Error {
    let memory = rank.memory(&[1.0; 1000]);
    rank.sum(&memory).expect("the first is sound");
    let begin = Instant::now();
    let submit = || rank.submit_within(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory], Some(limit));
    let outcome = submit().and_then(|work| work.wait(None));
    rank.stream.synchronize().expect("a stream that runs out");
    assert!(begin.elapsed() < Duration::from_secs(20), "it was given up");
    let error = outcome.expect_err("it goes wrong");
    let again = submit().and_then(|work| work.wait(None));
    assert!(again.is_err(), "nothing goes on after {error}");
    // All are there until the end: what ranks do when one leaves is another test's.
    rank.comm.barrier().expect("the CPU's engine is not concerned");
    rank.comm.abort("the test is over");
    error
}

#[test]
fn what_hangs_is_given_up_when_its_time_is_over() {
    let hang: &[(&str, &str)] = &[FOUR, ("FAKENCCL_FAULT", "1:2:hang")];
    alone("vendor::what_hangs_is_given_up_when_its_time_is_over", &[hang], || {
        world_on(&[0, 1, 2], NCCL, |rank| match second(&rank, Duration::from_secs(2)) {
            Error::Timeout { detail, .. } => {
                let expected = "all ranks called it; rank(s) ";
                assert!(detail.contains(expected) && detail.contains('1'), "{detail}");
            }
            Error::Remote { cause, .. } => assert!(cause.contains("did not finish their part"), "{cause}"),
            other => panic!("{other:?}"),
        });
    });
}

#[test]
fn what_fails_later_is_told_to_all_ranks_soon() {
    let error: &[(&str, &str)] = &[FOUR, ("FAKENCCL_FAULT", "1:2:error")];
    alone("vendor::what_fails_later_is_told_to_all_ranks_soon", &[error], || {
        let fail = |rank: OnDevice| {
            let begin = Instant::now();
            let error = second(&rank, Duration::from_secs(100));
            match &error {
                Error::Device { cause, .. } if rank.me() == 1 => {
                    assert!(cause.contains("unhandled system error: a connection was lost"), "{cause}");
                }
                Error::Remote { rank: 1, cause, .. } if rank.me() != 1 => {
                    assert!(cause.contains("a connection was lost"), "{cause}");
                }
                other => panic!("{other:?} on rank {}", rank.me()),
            }
            assert!(begin.elapsed() < Duration::from_secs(20), "it did not wait for the limit");
        };
        world_on(&[0, 1, 2], NCCL, fail);
        hosts_on(TWO_HOSTS, NCCL, fail);
    });
}

#[test]
fn who_does_not_call_is_named() {
    alone("vendor::who_does_not_call_is_named", &[&[FOUR]], || {
        world_on(&[0, 1, 2], NCCL, |rank| {
            let memory = rank.memory(&[1.0; 1000]);
            rank.sum(&memory).expect("the first is sound");
            rank.comm.barrier().expect("all are there");
            if rank.me() != 2 {
                let limit = Some(Duration::from_secs(3));
                let submitted = rank.submit_within(OpKind::AllReduce(ReduceOp::Sum), &[&memory], &[&memory], limit);
                match submitted.and_then(|work| work.wait(None)).expect_err("one is missing") {
                    Error::Timeout { detail, .. } | Error::Remote { cause: detail, .. } => {
                        assert!(detail.contains("rank(s) 2 did not call it; rank(s) 0, 1 did"), "{detail}");
                    }
                    other => panic!("{other:?}"),
                }
                rank.stream.synchronize().expect("a stream that runs out");
            }
            rank.comm.barrier().expect("the CPU's engine is not concerned");
            rank.comm.abort("the test is over");
        });
    });
}

#[test]
fn what_waits_for_a_rank_that_leaves_ends() {
    alone("vendor::what_waits_for_a_rank_that_leaves_ends", &[&[FOUR]], || {
        world_on(&[0, 1], NCCL, |rank| {
            let memory = rank.memory(&[1.0]);
            rank.sum(&memory).expect("the first is sound");
            rank.comm.barrier().expect("it has ended on both");
            if rank.me() == 0 {
                rank.comm.abort("it had enough");
            } else {
                let outcome = rank.submit(OpKind::Barrier, &[], &[]).and_then(|work| work.wait(None));
                let Err(Error::PeerLost { rank: 0, .. }) = &outcome else { panic!("{outcome:?}") };
                rank.stream.synchronize().expect("a stream that runs out");
                rank.comm.shutdown().expect("an end");
            }
        });
    });
}

#[test]
fn what_is_lost_with_a_rank_that_leaves_fails_soon() {
    alone("vendor::what_is_lost_with_a_rank_that_leaves_fails_soon", &[&[FOUR]], || {
        let lose = |rank: OnDevice| {
            let (memory, ends) = (rank.memory(&[1.0]), calls_of_nccl("ends"));
            rank.sum(&memory).expect("the first is sound");
            let gate = (rank.me() == 1).then(|| rank.hold());
            let limit = Some(Duration::from_secs(1000));
            let broadcast = OpKind::Broadcast { root: Rank(0) };
            let work = rank.submit_within(broadcast, &[&memory], &[&memory], limit).expect("a work");
            if rank.me() == 0 {
                work.wait(None).expect("the root waits for nobody");
                rank.comm.barrier().expect("both have called it");
                rank.comm.abort("it had enough");
                return;
            }
            rank.comm.barrier().expect("both have called it");
            wait_until("the other one's end", || calls_of_nccl("ends") > ends);
            gate.as_ref().expect("made above").0.word(0).store(1, Ordering::Release);
            let outcome = work.wait(Some(Duration::from_secs(60)));
            let Err(Error::PeerLost { rank: 0, cause, .. }) = &outcome else { panic!("{outcome:?}") };
            assert!(cause.contains("it had enough"), "{cause}");
            rank.stream.synchronize().expect("a stream that runs out");
            rank.comm.shutdown().expect("an end");
        };
        world_on(&[0, 1], NCCL, lose);
        wait_until("both ends", || calls_of_nccl("ends") == 2);
        hosts_on(&[("a", 0), ("b", 1)], NCCL, lose);
    });
}

/// The text of the error of the first sum, which is the same on all ranks.
fn refusal(devices: &[u32], hints: &[(&str, &str)]) -> String {
    let errors = std::sync::Mutex::new(Vec::new());
    world_on(devices, hints, |rank| {
        let memory = rank.memory(&[1.0]);
        let error = rank.sum(&memory).expect_err("no library");
        errors.lock().expect("no panic").push(error.to_string());
        assert_eq!(rank.sum_on_the_cpu().expect("the CPU's engine is not concerned"), 3.0);
        rank.leave(memory);
    });
    let errors = errors.into_inner().expect("no panic");
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    errors[0].clone()
}

#[test]
fn a_library_that_does_not_begin_is_the_same_error_everywhere() {
    let error: &[(&str, &str)] = &[FOUR, ("FAKENCCL_FAULT", "1:init:error")];
    let hang: &[(&str, &str)] = &[FOUR, ("FAKENCCL_FAULT", "1:init:hang")];
    alone("vendor::a_library_that_does_not_begin_is_the_same_error_everywhere", &[error, hang], || {
        let text = refusal(&[0, 1], &[("engine", "nccl"), ("connect_timeout_seconds", "3")]);
        assert!(text.contains("a communicator of NCCL 2.30.7"), "{text}");
        if std::env::var("FAKENCCL_FAULT").is_ok_and(|fault| fault.ends_with("error")) {
            assert!(text.contains("rank 1: ") && text.contains("no interface was found"), "{text}");
        } else {
            assert!(text.contains("it has not begun within 3.0 s on ranks [0, 1]"), "{text}");
        }
    });
}

#[test]
fn an_abort_ends_the_wait_for_a_library_to_begin() {
    let hang: &[(&str, &str)] = &[FOUR, ("FAKENCCL_FAULT", "1:init:hang")];
    alone("vendor::an_abort_ends_the_wait_for_a_library_to_begin", &[hang], || {
        // Longer than the test may take.
        world_on(&[0, 1], &[("engine", "nccl"), ("connect_timeout_seconds", "3600")], |rank| {
            let memory = rank.memory(&[1.0]);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(500));
                    rank.comm.abort("the test is over");
                });
                rank.sum(&memory).expect_err("it has been aborted");
            });
        });
    });
}

#[test]
fn a_library_that_is_of_no_use_is_one_line_on_all_ranks() {
    let old: &[(&str, &str)] = &[FOUR, ("FAKENCCL_VERSION", "22605")];
    alone("vendor::a_library_that_is_of_no_use_is_one_line_on_all_ranks", &[old], || {
        let text = refusal(&[0, 1], NCCL);
        assert!(text.contains("engine=nccl: rank 0 has no NCCL: ") && text.contains("2.27.0 or newer"), "{text}");
        assert!(!text.contains('\n'), "{text}");
        let text = refusal(&[0, 1], &[("engine", "nccl"), ("nccl_library", "/nowhere/libnccl.so.2")]);
        assert!(text.contains("/nowhere/libnccl.so.2 cannot be loaded"), "{text}");
        let text = refusal(&[0, 0], NCCL);
        assert!(text.contains("engine=nccl: rank 0 has no NCCL"), "{text}");
    });
}

#[test]
fn a_library_that_nobody_asks_for_is_not_used() {
    alone("vendor::a_library_that_nobody_asks_for_is_not_used", &[&[FOUR]], || {
        let run = |rank: OnDevice| {
            all_collectives_by_either(&rank);
            rank.leave(());
        };
        world_on(&[0, 1], &[], run);
        hosts_on(&[("a", 0), ("a", 1), ("b", 2)], &[("engine", "streams")], run);
        hosts_on(&[("a", 0), ("b", 1)], &[], run);
        assert_eq!(launches(), 0);
        // The second host has several ranks too: what they compare is by their places there.
        hosts_on(&[("a", 0), ("a", 1), ("b", 2), ("b", 3)], NCCL, |rank| {
            all_collectives(&rank, 100);
            rank.leave(());
        });
        assert!(launches() > 0, "as it is set");
    });
}

#[test]
fn its_communicators_are_set_as_the_program_wants() {
    alone("vendor::its_communicators_are_set_as_the_program_wants", &[&[FOUR]], || {
        let set = |fields| [("engine", "nccl"), ("nccl_config", fields)];
        world_on(&[0, 1], &set("minCTAs=2,maxCTAs=4,netName=Socket"), |rank| {
            all_collectives_by_either(&rank);
            rank.leave(());
        });
        let text = refusal(&[0, 1], &set("minCTAs=4,maxCTAs=2"));
        assert!(text.contains("invalid argument: minCTAs 4 is above maxCTAs 2"), "{text}");
        let text = refusal(&[0, 1], &set("minCTAs=2,netName=None"));
        assert!(text.contains("invalid argument: there is no network None"), "{text}");
    });
}

/// What streams do between hosts, too.
fn all_collectives_by_either(rank: &OnDevice) {
    let memory = rank.memory(&[1.0; 3]);
    rank.sum(&memory).expect("a sum");
    assert_eq!(rank.values(&memory), [rank.comm.size() as f32; 3]);
}

#[test]
fn the_face_says_what_the_library_refuses() {
    alone("vendor::the_face_says_what_the_library_refuses", &[&[FOUR]], || {
        let library = library(Vendor::Nccl);
        let id = library.unique_id().expect("an id");
        let fields = Arc::<NcclFields>::default();
        // Two ranks on one device.
        let errors = std::sync::Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let (library, errors, fields) = (&library, &errors, fields.clone());
                scope.spawn(move || {
                    let context = context().expect("the software CUDA");
                    let current = context.enter().expect("a context");
                    let comm =
                        NcclComm::begin(library, &current, &[UniqueId(id.0)], (rank, 2), &fields).expect("a beginning");
                    let error = loop {
                        match comm.progress() {
                            Ok(Progress::Going) => std::thread::sleep(Duration::from_millis(1)),
                            Ok(Progress::Done) => panic!("it has begun"),
                            Err(error) => break error.to_string(),
                        }
                    };
                    errors.lock().expect("no panic").push(error);
                    comm.abort();
                    assert!(comm.is_gone());
                });
            }
        });
        let errors = errors.into_inner().expect("no panic");
        assert!(errors.iter().all(|error| error.contains("invalid usage: Duplicate GPU detected")), "{errors:?}");
        let context = context().expect("the software CUDA");
        let current = context.enter().expect("a context");
        let error = NcclComm::begin(&library, &current, &[id], (2, 2), &fields).expect_err("there is no such rank");
        assert!(error.to_string().contains("invalid argument: there is no such rank"), "{error}");
    });
}
