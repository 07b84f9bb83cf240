//! Disagreement, absence, loss and abort: every rank gets an error that names the cause.

use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::time::Duration;

use ncclx_rs::{Error, Mode, Op, OpKind, Rank, ReduceOp, Source, Tag};

use crate::world::{buffer, op, run, wires, world, world_with};

const SHORT: Duration = Duration::from_secs(1);

/// The ranks that have not called a collective and those that have, as the text of its time-out lists them.
pub(crate) fn missing_and_callers(text: &str) -> (&str, &str) {
    let lists = || {
        let (_, rest) = text.split_once(": rank(s) ")?;
        let (missing, rest) = rest.split_once(" did not call it; rank(s) ")?;
        let (came, _) = rest.split_once(" did")?;
        Some((missing, came))
    };
    lists().unwrap_or_else(|| panic!("no lists of ranks: {text}"))
}

#[test]
fn a_mismatched_size_fails_on_every_rank_and_the_group_works_on() {
    for wire in wires() {
        for (most, one) in [(3, 6), (30_000, 60_000), (0, 5)] {
            world(wire, 3, move |comm| {
                let count = if comm.rank().0 == 1 { one } else { most };
                let mut data = vec![1f32; count];
                let memory = buffer(&mut data);
                let error = run(comm, OpKind::AllReduce(ReduceOp::Sum), vec![memory], vec![memory]);
                let text = error.expect_err("sizes differ").to_string();
                assert!(text.contains(&format!("{most} × float32")), "{text}");
                assert!(text.contains(&format!("{one} × float32")), "{text}");
                let mut data = vec![1f32; 10];
                let memory = buffer(&mut data);
                run(comm, OpKind::AllReduce(ReduceOp::Sum), vec![memory], vec![memory]).expect("the group works on");
                assert_eq!(data, [3.0; 10]);
            });
        }
    }
}

#[test]
fn different_collectives_are_named_on_every_rank() {
    for wire in wires() {
        world(wire, 3, |comm| {
            let mut data = vec![1f32; 10];
            let memory = vec![buffer(&mut data)];
            let kind = match comm.rank().0 {
                0 => OpKind::Broadcast { root: Rank(0) },
                _ => OpKind::AllReduce(ReduceOp::Sum),
            };
            let sum = || run(comm, OpKind::AllReduce(ReduceOp::Sum), memory.clone(), memory.clone());
            // The root may be done before it hears of the others. Then its next call fails, and with it theirs.
            let first = run(comm, kind, memory.clone(), memory.clone());
            let (late, text) = match first {
                Ok(()) if comm.rank().0 == 0 => (true, sum().expect_err("they differed").to_string()),
                first => (false, first.expect_err("they differ").to_string()),
            };
            assert!(text.contains("collective 0: ") && text.contains("broadcast"), "{text}");
            assert!(text.contains("all_reduce"), "{text}");
            if !late {
                let text = sum().err().map(|error| error.to_string());
                assert!(text.as_ref().is_none_or(|text| text.contains("collective 0: ")), "{text:?}");
            }
            sum().expect("the group works on");
        });
    }
}

#[test]
fn a_root_may_shut_down_before_the_others_have_called() {
    for wire in wires() {
        let has_broadcast = Arc::new(Barrier::new(3));
        world(wire, 3, move |comm| {
            // A stream that is opened needs the other rank.
            run(comm, OpKind::Barrier, vec![], vec![]).expect("all are there");
            let mut data = [if comm.rank().0 == 0 { 7 } else { 0 }; 4];
            let memory = vec![buffer(&mut data)];
            let broadcast = || run(comm, OpKind::Broadcast { root: Rank(0) }, memory.clone(), memory.clone());
            if comm.rank().0 == 0 {
                broadcast().expect("its part is done");
                has_broadcast.wait();
                comm.shutdown().expect("an end");
            } else {
                has_broadcast.wait();
                broadcast().expect("the root has left its data");
                assert_eq!(data, [7; 4]);
            }
        });
    }
}

#[test]
fn a_root_that_has_gone_on_to_something_else_holds_nobody_up() {
    for wire in wires() {
        let all_have = Arc::new(Barrier::new(3));
        world(wire, 3, move |comm| {
            let mut data = [if comm.rank().0 == 0 { 7 } else { 0 }; 4];
            let memory = vec![buffer(&mut data)];
            // Streams from the root are open, and those to it are not, or it has not accepted them yet.
            if comm.rank().0 == 0 {
                for to in [Rank(1), Rank(2)] {
                    run(comm, OpKind::Send { to, tag: Tag(0) }, memory.clone(), vec![]).expect("a message");
                }
            } else {
                let from = Source::Rank(Rank(0));
                run(comm, OpKind::Recv { from, tag: Tag(0) }, vec![], memory.clone()).expect("a message");
            }
            run(comm, OpKind::Broadcast { root: Rank(0) }, memory.clone(), memory).expect("all call it");
            // Nobody calls the communicator before all are here.
            all_have.wait();
            assert_eq!(data, [7; 4]);
        });
    }
}

#[test]
fn a_rank_that_does_not_call_is_named_in_the_timeout() {
    for wire in wires() {
        world_with(wire, 3, SHORT * 2, |comm| {
            if comm.rank().0 == 2 {
                let mut data = [0i32];
                let kind = OpKind::Recv { from: Source::Rank(Rank(0)), tag: Tag(3) };
                let receive = Op { timeout: Some(SHORT * 4), ..op(kind, vec![], vec![buffer(&mut data)]) };
                comm.submit(receive).expect("submitted").wait(None).expect_err("nobody sends");
                return;
            }
            let text = run(comm, OpKind::Barrier, vec![], vec![]).expect_err("rank 2 is late").to_string();
            assert!(text.contains("barrier"), "{text}");
            assert_eq!(missing_and_callers(&text), ("2", "0, 1"));
            assert!(text.contains("s ago rank(s) 2 had recv(4 bytes from rank 0, tag 3) of communicator `"), "{text}");
        });
    }
}

#[test]
fn a_rank_that_aborts_after_a_timeout_still_tells_the_cause() {
    for wire in wires() {
        world(wire, 3, |comm| {
            if comm.rank().0 == 2 {
                std::thread::sleep(SHORT * 4); // the rank that is late is the subject of the test
                return;
            }
            let timeout = (comm.rank().0 == 0).then_some(SHORT * 2);
            let barrier = Op { timeout, ..op(OpKind::Barrier, vec![], vec![]) };
            let text = comm.submit(barrier).expect("submitted").wait(None).expect_err("rank 2 is late").to_string();
            comm.abort("a rank is late");
            assert!(text.contains("barrier"), "{text}");
            assert_eq!(missing_and_callers(&text), ("2", "0, 1"));
            assert!(!text.contains(" had "), "whose the operations of this process are is not known: {text}");
        });
    }
}

#[test]
fn a_message_nobody_sends_times_out_and_the_group_works_on() {
    for wire in wires() {
        world(wire, 2, |comm| {
            if comm.rank().0 == 0 {
                let mut data = [0i32];
                let kind = OpKind::Recv { from: Source::Rank(Rank(1)), tag: Tag(3) };
                let receive =
                    Op { timeout: Some(SHORT / 4), mode: Mode::Async, ..op(kind, vec![], vec![buffer(&mut data)]) };
                let error = comm.submit(receive).expect("recv").wait(None).expect_err("nobody sends");
                assert!(error.to_string().contains("rank 1 did not send it"), "{error}");
            }
            run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier");
        });
    }
}

#[test]
fn a_message_of_another_length_fails() {
    for wire in wires() {
        for count in [4, 100_000] {
            world(wire, 2, move |comm| {
                if comm.rank().0 == 0 {
                    let mut data = vec![0i32; count];
                    let kind = OpKind::Send { to: Rank(1), tag: Tag(0) };
                    let result = run(comm, kind, vec![buffer(&mut data)], vec![]);
                    assert_eq!(result.is_err(), count > 4, "a long message's sender learns of it");
                } else {
                    let mut data = vec![0i32; count + 1];
                    let kind = OpKind::Recv { from: Source::Rank(Rank(0)), tag: Tag(0) };
                    let error = run(comm, kind, vec![], vec![buffer(&mut data)]).expect_err("lengths differ");
                    assert!(matches!(error, Error::Mismatch { .. }), "{error}");
                }
                run(comm, OpKind::Barrier, vec![], vec![]).expect("the group works on");
            });
        }
    }
}

#[test]
fn a_receiver_that_does_nothing_more_has_told_the_sender_whom_it_refused() {
    for wire in wires() {
        let (tell, told) = mpsc::channel();
        let told = Mutex::new(told);
        world_with(wire, 3, Duration::from_secs(20), move |comm| {
            let (tag, mut long, mut short) = (Tag(7), vec![0i32; 200_000], vec![0i32]);
            let send = |to, data: &mut Vec<i32>| run(comm, OpKind::Send { to, tag }, vec![buffer(data)], vec![]);
            let receive = |from: u32, data: &mut Vec<i32>| {
                run(comm, OpKind::Recv { from: Source::Rank(Rank(from)), tag }, vec![], vec![buffer(data)])
            };
            match comm.rank().0 {
                0 => {
                    std::thread::sleep(Duration::from_millis(300));
                    send(Rank(1), &mut short).expect("it is received");
                }
                1 => {
                    // In which the announcement of rank 2 comes.
                    receive(0, &mut short).expect("it is sent");
                    receive(2, &mut short).expect_err("lengths differ");
                    told.lock().expect("no panic").recv().expect("rank 2 has heard of it");
                }
                _ => {
                    let error = send(Rank(1), &mut long).expect_err("it is refused");
                    assert!(!matches!(error, Error::Timeout { .. }), "{error}");
                    tell.send(()).expect("rank 1 waits");
                }
            }
        });
    }
}

#[test]
fn a_rank_that_leaves_is_named_by_those_that_wait_for_it() {
    for wire in wires() {
        world(wire, 3, |comm| {
            run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier");
            if comm.rank().0 == 1 {
                return comm.abort("the test");
            }
            let text = run(comm, OpKind::Barrier, vec![], vec![]).expect_err("rank 1 left").to_string();
            assert!(text.contains("rank 1 is lost"), "{text}");
        });
    }
}

#[test]
fn abort_ends_a_blocked_wait() {
    for wire in wires() {
        world(wire, 2, |comm| {
            if comm.rank().0 == 1 {
                return;
            }
            std::thread::scope(|scope| {
                let blocked = scope.spawn(|| run(comm, OpKind::Barrier, vec![], vec![]));
                std::thread::sleep(SHORT / 10); // lets the other thread block first
                comm.abort("enough");
                let text = blocked.join().expect("no panic").expect_err("aborted").to_string();
                assert!(text.contains("enough") || text.contains("rank 1"), "{text}");
            });
            let error = run(comm, OpKind::Barrier, vec![], vec![]).expect_err("aborted");
            assert!(matches!(error, Error::Closed { .. }), "{error}");
        });
    }
}

#[test]
fn bad_arguments_are_refused_before_anything_is_sent() {
    world(wires()[0], 2, |comm| {
        let mut data = vec![0f32; 3];
        let memory = vec![buffer(&mut data)];
        let refused = |kind: OpKind, argument: &str| {
            let error = comm.submit(op(kind, memory.clone(), memory.clone())).expect_err(argument);
            assert!(matches!(&error, Error::Usage(usage) if usage.argument == argument), "{error}");
        };
        refused(OpKind::Broadcast { root: Rank(2) }, "root");
        refused(OpKind::AllReduce(ReduceOp::BitAnd), "op");
        refused(OpKind::AllGather, "output");
        refused(OpKind::ReduceScatter(ReduceOp::Sum), "input");
        refused(OpKind::AllToAll { send: vec![1, 1].into(), recv: vec![1, 2].into() }, "input_split_sizes");
        refused(OpKind::Send { to: Rank(9), tag: Tag(0) }, "dst");
        run(comm, OpKind::AllReduce(ReduceOp::Sum), memory.clone(), memory.clone()).expect("the group works");
    });
}
