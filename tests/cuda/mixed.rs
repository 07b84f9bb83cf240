//! A vendor's library within the ranks that are alike, the engine of the CPU between these and others (`engine=mixed`).

use std::time::{Duration, Instant};

use ncclx_rs::sys::cuda::{DeviceMemory, Provider, Stream, provider};
use ncclx_rs::sys::nccl::Vendor;
use ncclx_rs::{Buffer, Communicator, DType, Error, Mode, Op, OpKind, Rank, ReduceOp, StreamHandle};

use crate::harness::{Software, alone, calls_of, captured, is_alone};
use crate::hip::preload;
use crate::ranks::{OnDevice, Process, data, of_processes_that_end, total, world_on};
use crate::vendor::all_collectives;

/// A device for each rank.
const DEVICES: (&str, &str) = ("SOFTCUDA_DEVICES", "6");
const MIXED: [(&str, &str); 1] = [("engine", "mixed")];
/// So long that a library moves them: 40 KB.
const LEN: usize = 10_000;

/// Ranks as processes, one for each letter: of CUDA, HIP or the CPU alone. Their devices are numbered by rank.
fn on(test: &str, ranks: &str, special: &[(usize, (&str, &str))], body: impl FnOnce(&Process, Option<u32>)) {
    of_kinds(test, ranks, special, None, body);
}

/// As [`on`]; one of the ranks may end badly.
fn of_kinds(
    test: &str,
    ranks: &str,
    special: &[(usize, (&str, &str))],
    ends_badly: Option<usize>,
    body: impl FnOnce(&Process, Option<u32>),
) {
    if !is_alone(test) {
        let Some(preload) = preload() else { return };
        let hip = [DEVICES, ("LD_PRELOAD", &preload)];
        let own = |(rank, kind): (usize, char)| -> Vec<(&str, &str)> {
            let mut settings = match kind {
                'c' => vec![DEVICES],
                'h' => hip.to_vec(),
                _ => vec![("LD_PRELOAD", "")],
            };
            settings.extend(special.iter().filter(|(other, _)| *other == rank).map(|(_, setting)| *setting));
            settings
        };
        let settings: Vec<Vec<(&str, &str)>> = ranks.chars().enumerate().map(own).collect();
        let settings: Vec<&[(&str, &str)]> = settings.iter().map(|own| &own[..]).collect();
        let expected: Vec<bool> = (0..settings.len()).map(|rank| Some(rank) != ends_badly).collect();
        of_processes_that_end(test, &settings, &expected);
        return;
    }
    let process = Process::new(test);
    let has_device = ranks.as_bytes()[process.rank.index()] != b'-';
    body(&process, has_device.then_some(process.rank.0));
}

/// A rank with a device, or one without.
enum Member {
    OnDevice(OnDevice, DeviceMemory),
    OnHost(Communicator),
}

impl Member {
    fn join(process: &Process, name: &str, device: Option<u32>, hints: &[(&str, &str)]) -> Member {
        match device {
            Some(device) => {
                let rank = process.join(name, device, hints);
                let memory = rank.memory(&vec![0.0; LEN]);
                Member::OnDevice(rank, memory)
            }
            None => Member::OnHost(process.join_without_device(name, hints)),
        }
    }

    fn comm(&self) -> &Communicator {
        match self {
            Member::OnDevice(rank, _) => &rank.comm,
            Member::OnHost(comm) => comm,
        }
    }

    /// Runs a collective in place, on a tensor of these numbers where this rank has it.
    fn run(&self, kind: OpKind, values: &[f32]) -> Result<Vec<f32>, Error> {
        match self {
            Member::OnDevice(rank, _) => {
                let memory = rank.memory(values);
                rank.submit(kind, &[&memory], &[&memory])?.wait(None)?;
                Ok(rank.values(&memory))
            }
            Member::OnHost(comm) => on_host(comm, kind, values),
        }
    }

    fn sum(&self, len: usize) -> Result<Vec<f32>, Error> {
        self.run(OpKind::AllReduce(ReduceOp::Sum), &data(self.comm().rank().index(), len))
    }

    fn leave(self) {
        match self {
            Member::OnDevice(rank, memory) => rank.leave(memory),
            Member::OnHost(comm) => {
                comm.barrier().expect("all are there");
                comm.shutdown().expect("an end");
            }
        }
    }
}

fn on_host(comm: &Communicator, kind: OpKind, values: &[f32]) -> Result<Vec<f32>, Error> {
    let mut values = values.to_vec();
    let (ptr, len) = (values.as_mut_ptr().cast(), values.len());
    // SAFETY: the vector stays, and is left alone, until the operation has ended.
    let buffer = || unsafe { Buffer::from_raw(ptr, len, DType::F32) };
    let op = Op { kind, inputs: [buffer()].into(), outputs: [buffer()].into(), timeout: None, mode: Mode::Async };
    comm.submit(op)?.wait(None)?;
    Ok(values)
}

/// How often this process's library was called for groups of calls.
fn groups_of_calls() -> u64 {
    let is_hip = provider() == Ok(Provider::Hip);
    calls_of(if is_hip { Vendor::Rccl } else { Vendor::Nccl }, "groups")
}

/// The same; 0 if it has no device.
fn calls_in_groups(has_device: bool) -> u64 {
    if has_device { groups_of_calls() } else { 0 }
}

/// How often this process has copied between its device and memory of the host.
fn copied() -> u64 {
    let software = Software::new().expect("the software CUDA");
    software.uses("cuMemcpyDtoH_v2") + software.uses("cuMemcpyHtoD_v2")
}

/// Sums and more of all ranks, as the CPU's engine has them.
fn results(member: &Member, size: usize) {
    let me = member.comm().rank().index();
    for len in [0, LEN, LEN + 1, 100_003] {
        assert_eq!(member.sum(len).expect("a sum"), total(size, len));
        for root in 0..size {
            let kind = OpKind::Broadcast { root: Rank::from(root) };
            assert_eq!(member.run(kind, &data(me, len)).expect("a broadcast"), data(root, len));
        }
    }
    let all: Vec<Vec<f32>> = (0..size).map(|rank| data(rank, LEN)).collect();
    let each = |f: fn(f32, f32) -> f32| -> Vec<f32> {
        (0..LEN).map(|at| all.iter().map(|data| data[at]).reduce(f).expect("a rank")).collect()
    };
    let run = |op| member.run(OpKind::AllReduce(op), &data(me, LEN)).expect("a reduction");
    assert_eq!(run(ReduceOp::Max), each(f32::max));
    assert_eq!(run(ReduceOp::Min), each(f32::min));
    let sum = total(size, LEN);
    assert_eq!(run(ReduceOp::PreMulSum(0.5)), sum.iter().map(|sum| sum / 2.0).collect::<Vec<_>>());
    for (average, sum) in run(ReduceOp::Avg).iter().zip(&sum) {
        assert!((average - sum / size as f32).abs() < 1e-3, "{average}, {sum}");
    }
}

#[test]
fn libraries_serve_those_that_are_alike_and_the_host_the_rest() {
    const NAME: &str = "mixed::libraries_serve_those_that_are_alike_and_the_host_the_rest";
    on(NAME, "chch-", &[], |process, device| {
        for (name, hints) in [
            ("one host", vec![("host_id", "one")]),
            ("two hosts", vec![("host_id", ["a", "b"][process.rank.index() / 2 % 2])]),
        ] {
            let member = Member::join(process, name, device, &[&MIXED[..], &hints].concat());
            results(&member, process.size);
            let calls = calls_in_groups(device.is_some());
            let error = match member.comm().rank().0 {
                4 => {
                    // Long after the others.
                    std::thread::sleep(Duration::from_millis(500));
                    member.sum(LEN + 5).expect_err("others call something else")
                }
                _ => member.sum(LEN).expect_err("one calls something else"),
            };
            assert!(matches!(error, Error::Mismatch { .. }), "{error:?}");
            assert_eq!(calls_in_groups(device.is_some()), calls, "no library has moved anything");
            assert_eq!(member.sum(LEN).expect("they go on"), total(process.size, LEN));
            member.leave();
        }
        assert_eq!(device.is_some(), device.is_some_and(|_| groups_of_calls() > 0));
    });
}

#[test]
fn groups_may_differ_in_size() {
    const NAME: &str = "mixed::groups_may_differ_in_size";
    on(NAME, "ccc-hh", &[], |process, device| {
        let member = Member::join(process, "sizes", device, &MIXED);
        results(&member, process.size);
        member.leave();
    });
}

#[test]
fn each_rank_copies_its_part_alone() {
    const NAME: &str = "mixed::each_rank_copies_its_part_alone";
    on(NAME, "cchh", &[], |process, device| {
        let bytes = |engine: &str| {
            let member = Member::join(process, engine, device, &[("engine", engine)]);
            let Member::OnDevice(rank, _) = &member else { panic!("all have devices") };
            let memory = rank.memory(&data(rank.me(), LEN));
            rank.sum(&memory).expect("a sum");
            let software = Software::new().expect("the software CUDA");
            let (copies, before, calls) = (copied(), software.copied_bytes(), groups_of_calls());
            rank.sum(&memory).expect("a sum");
            let used = (copied() - copies, software.copied_bytes() - before, groups_of_calls() - calls);
            drop(memory);
            member.leave();
            used
        };
        assert_eq!(bytes("host"), (2, 2 * 4 * LEN as u64, 0));
        assert_eq!(bytes("mixed"), (2, 4 * LEN as u64, 2), "a reduce_scatter and an all_gather, of halves");
    });
}

#[test]
fn every_collective_is_right_beside_them() {
    const NAME: &str = "mixed::every_collective_is_right_beside_them";
    on(NAME, "chch", &[], |process, device| {
        let rank = process.join("all", device.expect("all have one"), &MIXED);
        [3, 5_000].into_iter().for_each(|len| all_collectives(&rank, len));
        rank.leave(());
    });
}

#[test]
fn one_group_alone_needs_no_copies() {
    alone("mixed::one_group_alone_needs_no_copies", &[&[DEVICES]], || {
        world_on(&[0, 1, 2, 3], &MIXED, |rank| {
            all_collectives(&rank, LEN);
            let memory = rank.memory(&data(rank.me(), LEN));
            rank.sum(&memory).expect("a sum");
            assert_eq!(rank.values(&memory), total(4, LEN));
            rank.leave(memory);
        });
        assert!(groups_of_calls() > 0);
    });
}

/// How a sum of all ranks ends, which is soon.
fn ends(member: &Member, limit: Duration) -> Result<(), Error> {
    member.comm().barrier().expect("all are there");
    member.comm().set_timeout(limit);
    let begin = Instant::now();
    let outcome = member.sum(LEN).map(drop);
    assert!(begin.elapsed() < Duration::from_secs(30), "{:?}: {outcome:?}", begin.elapsed());
    member.comm().set_timeout(Duration::from_secs(60));
    outcome
}

/// What it ends with if it goes wrong.
fn fails(member: &Member, limit: Duration) -> Error {
    ends(member, limit).expect_err("it goes wrong")
}

#[test]
fn what_hangs_in_a_library_ends_on_all_ranks_and_they_go_on() {
    const NAME: &str = "mixed::what_hangs_in_a_library_ends_on_all_ranks_and_they_go_on";
    const PHASE: &str = "NCCLX_RS_TEST_PHASE";
    // Of the second sum: what the group adds up, and what it spreads, when the others have what they want.
    for (phase, launch) in [("adds", "3:hang"), ("spreads", "4:hang"), ("adds", "3:error"), ("spreads", "4:error")] {
        let fault = format!("1:{launch}");
        let phases = (0..5).map(|rank| (rank, (PHASE, phase)));
        let special: Vec<_> = phases.chain([(1, ("FAKENCCL_FAULT", fault.as_str()))]).collect();
        on(NAME, "cc-hh", &special, |process, device| {
            let spreads = std::env::var(PHASE).is_ok_and(|phase| phase == "spreads");
            let is_error = std::env::var("FAKENCCL_FAULT").is_ok_and(|fault| fault.ends_with("error"));
            let member = Member::join(process, "hang", device, &MIXED);
            assert_eq!(member.sum(LEN).expect("a sum"), total(process.size, LEN));
            match ends(&member, Duration::from_secs(3)) {
                Ok(()) => assert!(spreads && process.rank.0 > 1, "it goes wrong"),
                Err(Error::Timeout { detail, .. }) => {
                    assert!(detail.contains("all ranks called it; rank"), "{detail}");
                }
                Err(Error::Remote { cause, .. }) => {
                    assert!(
                        cause.contains("all ranks called it") || cause.contains("a connection was lost"),
                        "{cause}"
                    );
                }
                Err(Error::Device { cause, .. }) => assert!(is_error && cause.contains("was lost"), "{cause}"),
                Err(other) => panic!("{other:?}"),
            }
            // Another communicator of the library, in which the same launch goes wrong again.
            assert_eq!(member.sum(LEN).expect("they go on"), total(process.size, LEN));
            member.leave();
        });
        if is_alone(NAME) {
            return;
        }
    }
}

#[test]
fn a_library_that_does_not_begin_is_an_error_on_all_ranks() {
    const NAME: &str = "mixed::a_library_that_does_not_begin_is_an_error_on_all_ranks";
    on(NAME, "c-hhc", &[(4, ("FAKENCCL_FAULT", "1:init:error"))], |process, device| {
        let member = Member::join(process, "init", device, &MIXED);
        for _ in 0..2 {
            let error = fails(&member, Duration::from_secs(10)).to_string();
            assert!(error.contains("rank 4: ") && error.contains("no interface was found"), "{error}");
        }
        member.comm().barrier().expect("the CPU's engine is not concerned");
        assert_eq!(member.sum(10).expect("what is short needs no library"), total(process.size, 10));
        member.leave();
    });
}

#[test]
fn each_operation_has_its_own_time_for_a_library_to_begin() {
    const NAME: &str = "mixed::each_operation_has_its_own_time_for_a_library_to_begin";
    on(NAME, "c-hhc", &[(4, ("FAKENCCL_FAULT", "1:init:hang"))], |process, device| {
        let member = Member::join(process, "late", device, &MIXED);
        for limit in [2.0, 8.0] {
            let error = fails(&member, Duration::from_secs_f64(limit)).to_string();
            let waited = error.split_once("has not begun within ").and_then(|(_, after)| after.split_once(" s"));
            let waited: f64 = waited.and_then(|(seconds, _)| seconds.parse().ok()).unwrap_or_else(|| panic!("{error}"));
            assert!((limit / 4.0..=limit / 2.0).contains(&waited), "of {limit} s: {error}");
        }
        member.leave();
    });
}

#[test]
fn a_rank_without_their_library_goes_through_the_host_alone() {
    const NAME: &str = "mixed::a_rank_without_their_library_goes_through_the_host_alone";
    for setting in [("NCCLX_RS_NCCL_LIBRARY", "/nowhere/libnccl.so.2"), ("FAKENCCL_VERSION", "22807")] {
        on(NAME, "cchhc", &[(1, setting)], |process, device| {
            let member = Member::join(process, "lacks", device, &MIXED);
            results(&member, process.size);
            assert_eq!(process.rank.0 != 1, calls_in_groups(process.rank.0 != 1) > 0);
            member.leave();
        });
        if is_alone(NAME) {
            return;
        }
    }
}

#[test]
fn ranks_of_which_no_two_are_alike_go_through_the_host() {
    const NAME: &str = "mixed::ranks_of_which_no_two_are_alike_go_through_the_host";
    on(NAME, "ch-", &[], |process, device| {
        let member = Member::join(process, "each", device, &MIXED);
        results(&member, process.size);
        assert_eq!(calls_in_groups(device.is_some()), 0);
        member.leave();
    });
}

/// All know who is alike from then on, also ranks on which it has ended well.
#[test]
fn a_first_operation_that_fails_is_no_disagreement_later() {
    const NAME: &str = "mixed::a_first_operation_that_fails_is_no_disagreement_later";
    // What the group spreads of the first sum, by each of its communicators.
    on(NAME, "cc-hh", &[(1, ("FAKENCCL_FAULT", "1:2:error"))], |process, device| {
        let member = Member::join(process, "first", device, &MIXED);
        for _ in 0..3 {
            match ends(&member, Duration::from_secs(60)) {
                Ok(()) => assert!(process.rank.0 > 1),
                Err(Error::Device { .. } | Error::Remote { .. }) => {}
                Err(other) => panic!("{other:?}"),
            }
            let len = if process.rank.0 == 2 { LEN + 1 } else { LEN };
            let error = member.sum(len).expect_err("they call something else");
            assert!(matches!(error, Error::Mismatch { .. }), "{error:?}");
            assert_eq!(member.sum(10).expect("what is short needs no library"), total(process.size, 10));
        }
        member.leave();
    });
}

#[test]
fn parts_of_a_communicator_have_groups_of_their_own() {
    const NAME: &str = "mixed::parts_of_a_communicator_have_groups_of_their_own";
    on(NAME, "cchh-", &[], |process, device| {
        let member = Member::join(process, "whole", device, &MIXED);
        assert_eq!(member.sum(LEN).expect("a sum"), total(process.size, LEN));
        let me = process.rank.0;
        for (name, ranks) in [("without", &[3, 0, 1, 4][..]), ("each", &[2, 0, 4]), ("one", &[1, 0])] {
            let named: Vec<Rank> = ranks.iter().map(|rank| Rank(*rank)).collect();
            let own = if ranks.contains(&me) { &named[..] } else { &[] };
            let Some(part) = member.comm().split_with_all(own, name).expect("a split") else { continue };
            let calls = calls_in_groups(device.is_some());
            let values = data(me as usize, LEN);
            let sum = match &member {
                Member::OnDevice(rank, _) => {
                    let memory = rank.memory(&values);
                    let kind = OpKind::AllReduce(ReduceOp::Sum);
                    let op = rank.op(&rank.stream, kind, &[&memory], &[&memory], None);
                    part.submit(op).expect("a work").wait(None).expect("a sum");
                    rank.values(&memory)
                }
                Member::OnHost(_) => on_host(&part, OpKind::AllReduce(ReduceOp::Sum), &values).expect("a sum"),
            };
            let all: Vec<Vec<f32>> = ranks.iter().map(|rank| data(*rank as usize, LEN)).collect();
            let expected: Vec<f32> = (0..LEN).map(|at| all.iter().map(|data| data[at]).sum()).collect();
            assert_eq!(sum, expected, "{name}");
            let has_another = me < 2 && name != "each";
            assert_eq!(calls_in_groups(device.is_some()) > calls, has_another, "{name}");
            part.barrier().expect("all are there");
            part.shutdown().expect("an end");
        }
        assert_eq!(member.sum(LEN).expect("they go on"), total(process.size, LEN));
        member.leave();
    });
}

#[test]
fn a_rank_of_the_cpu_has_several_in_flight() {
    const NAME: &str = "mixed::a_rank_of_the_cpu_has_several_in_flight";
    on(NAME, "cc-hh", &[], |process, device| {
        let member = Member::join(process, "several", device, &MIXED);
        let Member::OnHost(comm) = &member else {
            (0..10).for_each(|_| assert_eq!(member.sum(LEN).expect("a sum"), total(process.size, LEN)));
            return member.leave();
        };
        let mut all = vec![data(process.rank.index(), LEN); 10];
        let works: Vec<_> = all
            .iter_mut()
            .map(|values| {
                let (ptr, kind) = (values.as_mut_ptr().cast(), OpKind::AllReduce(ReduceOp::Sum));
                // SAFETY: the vectors stay, and are left alone, until the operations have ended.
                let buffer = || unsafe { Buffer::from_raw(ptr, LEN, DType::F32) };
                let (inputs, outputs) = ([buffer()].into(), [buffer()].into());
                comm.submit(Op { kind, inputs, outputs, timeout: None, mode: Mode::Async }).expect("a work")
            })
            .collect();
        works.iter().for_each(|work| work.wait(None).expect("a sum"));
        all.iter().for_each(|sum| assert_eq!(*sum, total(process.size, LEN)));
        member.leave();
    });
}

#[test]
fn a_rank_that_dies_while_its_library_works_is_named() {
    const NAME: &str = "mixed::a_rank_that_dies_while_its_library_works_is_named";
    let body = |process: &Process, device: Option<u32>| {
        let member = Member::join(process, "dies", device, &MIXED);
        member.sum(LEN).expect("a sum");
        member.comm().barrier().expect("all are there");
        if process.rank.0 == 1 {
            std::thread::scope(|scope| {
                scope.spawn(|| member.sum(LEN));
                std::thread::sleep(Duration::from_secs(1));
                std::process::exit(1);
            });
        }
        let error = member.sum(LEN).expect_err("one dies");
        assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error:?}");
    };
    of_kinds(NAME, "cc-hh", &[(1, ("FAKENCCL_FAULT", "1:3:hang"))], Some(1), body);
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    const NAME: &str = "mixed::a_rank_that_does_not_come_is_named";
    on(NAME, "cc-hh", &[], |process, device| {
        let member = Member::join(process, "late", device, &MIXED);
        for (late, has_begun) in [(1, false), (2, false), (1, true), (2, true), (3, true)] {
            if has_begun {
                assert_eq!(member.sum(LEN).expect("a sum"), total(process.size, LEN));
            }
            if process.rank.0 == late {
                member.comm().barrier().expect("all are there");
                std::thread::sleep(Duration::from_secs(4));
                // The others have told of it, and what they were in is over here, too.
                member.sum(LEN).expect_err("it comes too late");
            } else {
                let error = fails(&member, Duration::from_secs(2)).to_string();
                assert!(error.contains(&format!("rank(s) {late} did not call it")), "rank {late} is late: {error}");
            }
            member.comm().set_timeout(Duration::from_secs(60));
            member.comm().barrier().expect("they go on");
        }
        assert_eq!(member.sum(LEN).expect("they go on"), total(process.size, LEN));
        member.leave();
    });
}

#[test]
fn an_abort_ends_what_the_library_has_begun() {
    const NAME: &str = "mixed::an_abort_ends_what_the_library_has_begun";
    on(NAME, "cc-hh", &[(1, ("FAKENCCL_FAULT", "1:3:hang"))], |process, device| {
        let member = Member::join(process, "abort", device, &MIXED);
        member.sum(LEN).expect("a sum");
        member.comm().barrier().expect("all are there");
        let begin = Instant::now();
        // Of the others, rank 1 hangs in its library, and rank 3 waits for them.
        let aborts = process.rank.0 % 2 == 0;
        let outcome = std::thread::scope(|scope| {
            let hangs = scope.spawn(|| member.sum(LEN));
            std::thread::sleep(Duration::from_millis(500));
            if aborts {
                member.comm().abort("the test is over");
            }
            hangs.join().expect("no panic")
        });
        assert!(matches!(outcome, Err(Error::Closed { .. } | Error::PeerLost { .. })), "{outcome:?}");
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    });
}

#[test]
fn tensors_of_the_host_and_lists_go_the_same_way() {
    const NAME: &str = "mixed::tensors_of_the_host_and_lists_go_the_same_way";
    on(NAME, "cc-hh", &[], |process, device| {
        let member = Member::join(process, "places", device, &MIXED);
        let (me, sum) = (process.rank.index(), OpKind::AllReduce(ReduceOp::Sum));
        assert_eq!(member.sum(LEN).expect("a sum"), total(5, LEN));
        // One rank of each group has its own on the host.
        let outcome = match me {
            0 | 3 => on_host(member.comm(), sum.clone(), &data(me, LEN)),
            _ => member.sum(LEN),
        };
        assert_eq!(outcome.expect("a sum"), total(5, LEN));
        let all = data(me, LEN);
        let (Member::OnDevice(rank, _), true) = (&member, me > 0) else {
            assert_eq!(member.sum(LEN).expect("a sum"), total(5, LEN));
            return member.leave();
        };
        let inputs = [rank.memory(&all[..11]), rank.memory(&all[11..])];
        let outputs = [rank.memory(&all[..5_000]), rank.memory(&all[5_000..])];
        rank.submit(sum, &[&inputs[0], &inputs[1]], &[&outputs[0], &outputs[1]])
            .expect("a work")
            .wait(None)
            .expect("a sum");
        assert_eq!([rank.values(&outputs[0]), rank.values(&outputs[1])].concat(), total(5, LEN));
        assert_eq!([rank.values(&inputs[0]), rank.values(&inputs[1])].concat(), all, "inputs stay");
        drop((inputs, outputs));
        member.leave();
    });
}

#[test]
fn whole_numbers_of_every_rank_add_up_exactly() {
    const NAME: &str = "mixed::whole_numbers_of_every_rank_add_up_exactly";
    on(NAME, "cc-hh", &[], |process, device| {
        let member = Member::join(process, "integers", device, &MIXED);
        let me = process.rank.index() as i64;
        let own: Vec<i64> = (0..5000).map(|at| ((me + 1) * 0x0123_4567_89ab_cdef) ^ at).collect();
        for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::BitXor] {
            let all =
                (0..5).map(|rank| (0..5000).map(|at| ((rank + 1) * 0x0123_4567_89ab_cdef) ^ at).collect::<Vec<i64>>());
            let combine = |a: i64, b: i64| match op {
                ReduceOp::Sum => a.wrapping_add(b),
                ReduceOp::Product => a.wrapping_mul(b),
                ReduceOp::Min => a.min(b),
                _ => a ^ b,
            };
            let expected = all.reduce(|a, b| a.iter().zip(b).map(|(a, b)| combine(*a, b)).collect()).expect("ranks");
            let kind = OpKind::AllReduce(op);
            let result: Vec<i64> = match &member {
                Member::OnDevice(rank, _) => {
                    let bits: Vec<f32> = own.iter().flat_map(|own| halves(*own)).collect();
                    let memory = rank.memory(&bits);
                    let device = rank.context.device().ordinal();
                    // SAFETY: the memory stays until the operation has ended.
                    let buffer =
                        || unsafe { Buffer::on_device(memory.bytes().ptr().to_bits(), 5000, DType::I64, device) };
                    let mode = mode(&rank.stream, device);
                    let op = Op { kind, inputs: [buffer()].into(), outputs: [buffer()].into(), timeout: None, mode };
                    rank.comm.submit(op).expect("a work").wait(None).expect("success");
                    rank.values(&memory).chunks(2).map(|halves| whole([halves[0], halves[1]])).collect()
                }
                Member::OnHost(comm) => {
                    let mut own = own.clone();
                    comm.all_reduce(&mut own[..], op).expect("success");
                    own
                }
            };
            assert_eq!(result, expected, "{op:?}");
        }
        member.leave();
    });
}

fn halves(value: i64) -> [f32; 2] {
    [value as u64 as u32, (value as u64 >> 32) as u32].map(f32::from_bits)
}

fn whole([low, high]: [f32; 2]) -> i64 {
    (u64::from(low.to_bits()) | (u64::from(high.to_bits()) << 32)) as i64
}

fn mode(stream: &Stream, device: u32) -> Mode {
    // SAFETY: the stream stays until the end.
    Mode::Stream(unsafe { StreamHandle::from_raw(stream.to_raw(), device) })
}

#[test]
fn what_only_other_engines_have_is_refused() {
    alone("mixed::what_only_other_engines_have_is_refused", &[&[DEVICES]], || {
        world_on(&[0, 1], &MIXED, |rank| {
            let memory = rank.memory(&[1.0; LEN]);
            // SAFETY: it stays until the end.
            let exposed =
                unsafe { Buffer::on_device(memory.bytes().ptr().to_bits(), 10, DType::F32, rank.me() as u32) };
            let error = rank.comm.window_register(exposed).expect_err("they are on devices").to_string();
            assert!(error.contains("engine=mixed has no windows in the memory of devices"), "{error}");
            let short = rank.memory(&[1.0; 10]);
            // Before the library has a communicator, and after.
            for sum in [2.0, 4.0] {
                for memory in [&memory, &short] {
                    let current = rank.context.enter().expect("a context");
                    let outcome = captured(rank.stream.to_raw(), || rank.sum(memory));
                    drop(current);
                    let error = outcome.expect_err("it would wait").to_string();
                    assert!(error.contains("engine=mixed waits for its stream"), "{error}");
                }
                rank.sum(&memory).expect("they go on");
                assert_eq!(rank.values(&memory), [sum; LEN]);
            }
            rank.leave((memory, short));
        });
    });
}

#[test]
fn a_forked_child_leaves_the_library_and_the_host_alone() {
    alone("mixed::a_forked_child_leaves_the_library_and_the_host_alone", &[&[DEVICES]], || {
        world_on(&[0, 1], &MIXED, |rank| {
            let memory = rank.memory(&data(rank.me(), LEN));
            rank.sum(&memory).expect("a sum");
            if rank.me() == 0 {
                // SAFETY: the child touches nothing whose lock another thread may hold but what says that it is refused.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: it ends this process if that hangs.
                    unsafe { libc::alarm(20) };
                    let is_refused =
                        rank.sum(&memory).is_err_and(|error| error.to_string().contains("before the fork"));
                    // SAFETY: it ends this process, and nothing else.
                    unsafe { libc::_exit(if is_refused { 0 } else { 1 }) };
                }
                let mut status = 0;
                // SAFETY: the child is this process's, and there is a place for the status.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 0));
            }
            rank.comm.barrier().expect("the child has told nobody anything");
            rank.sum(&memory).expect("they go on");
            let twice: Vec<f32> = total(2, LEN).iter().map(|sum| 2.0 * sum).collect();
            assert_eq!(rank.values(&memory), twice);
            rank.leave(memory);
        });
    });
}
