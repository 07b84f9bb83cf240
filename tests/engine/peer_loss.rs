//! Ranks that are lost or leave while no operation waits for them: all other ranks learn of it, and a goodbye is no loss.

use std::sync::mpsc;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use ncclx_rs::{Communicator, Error, Mode, Op, OpKind, Rank, ReduceOp, Source, Tag, Work};

use crate::world::{Wire, buffer, op, run, wires, world, world_hinted};

const WATCHDOG: Duration = Duration::from_secs(50);

/// A receive into `data` that no rank sends to.
fn unanswered(comm: &Communicator, from: u32, data: &mut [i32]) -> Work {
    let kind = OpKind::Recv { from: Source::Rank(Rank(from)), tag: Tag(9) };
    comm.submit(Op { mode: Mode::Async, ..op(kind, vec![], vec![buffer(data)]) }).expect("a receive")
}

fn lost_rank(error: &Error) -> Option<u32> {
    match error {
        Error::PeerLost { rank, .. } => Some(*rank),
        _ => None,
    }
}

#[test]
fn idle_ranks_learn_which_rank_aborts_and_what_does_not_need_it_goes_on() {
    for (wire, size) in wires().into_iter().flat_map(|wire| [(wire, 3), (wire, 9)]) {
        let (aborted, through) = (Arc::new(Barrier::new(size)), Arc::new(Barrier::new(size - 1)));
        world(wire, size, move |comm| {
            let victim = size as u32 - 1;
            let mut data = [0; 4];
            run(comm, OpKind::Barrier, vec![], vec![]).expect("all are there");
            if comm.rank().0 == victim {
                let work = unanswered(comm, 0, &mut data);
                comm.abort("the test");
                work.wait(None).expect_err("aborted");
                aborted.wait();
                return;
            }
            let mut beyond = [0; 4];
            let pending = (comm.rank().0 == 0).then(|| unanswered(comm, 1, &mut data));
            aborted.wait();
            let error = run(comm, OpKind::Barrier, vec![], vec![]).expect_err("a rank has left");
            assert!(error.to_string().contains(&format!("rank {victim} is lost")), "{error}");
            assert_eq!(comm.loss(), None, "it told that it left");
            let kind = OpKind::Send { to: Rank(0), tag: Tag(9) };
            match (comm.rank().0, pending) {
                (1, _) => run(comm, kind, vec![buffer(&mut beyond)], vec![]).expect("rank 0 is there"),
                (_, Some(work)) => work.wait(Some(WATCHDOG)).expect("rank 1 is there"),
                _ => {}
            }
            through.wait();
        });
    }
}

#[test]
fn a_rank_that_does_not_watch_another_hears_from_others_that_it_has_left() {
    for wire in wires() {
        let (aborted, through) = (Arc::new(Barrier::new(9)), Arc::new(Barrier::new(9)));
        world(wire, 9, move |comm| {
            run(comm, OpKind::Barrier, vec![], vec![]).expect("all are there");
            if comm.rank().0 == 8 {
                comm.abort("the test");
            }
            aborted.wait();
            // The ranks 0, 2, 5 and 7 watch rank 8, and call nothing. For the data of the others it is not needed.
            if [1, 3, 4, 6].contains(&comm.rank().0) {
                let mut data = [0; 4];
                let memory = vec![buffer(&mut data)];
                let error = run(comm, OpKind::Broadcast { root: Rank(0) }, memory.clone(), memory);
                let error = error.expect_err("rank 8 has left").to_string();
                assert!(error.contains("rank 8") && error.contains("it has left: aborted: the test"), "{error}");
            }
            through.wait();
        });
    }
}

#[test]
fn a_shutdown_is_no_loss() {
    for wire in wires() {
        world(wire, 4, |comm| {
            if comm.rank().0 == 3 {
                return; // and shuts down
            }
            let (tell, told) = mpsc::channel::<()>();
            comm.on_loss(move |error| panic!("{error}, {tell:?}"));
            let deadline = Instant::now() + Duration::from_millis(300);
            while Instant::now() < deadline {
                let mut data = [1; 4];
                let (kind, other) = match comm.rank().0 {
                    0 => (OpKind::Send { to: Rank(1), tag: Tag(0) }, 1),
                    1 => (OpKind::Recv { from: Source::Rank(Rank(0)), tag: Tag(0) }, 0),
                    _ => {
                        std::thread::sleep(Duration::from_millis(10));
                        continue;
                    }
                };
                let memory = vec![buffer(&mut data)];
                let (inputs, outputs) = if other == 1 { (memory, vec![]) } else { (vec![], memory) };
                if let Err(error) = run(comm, kind, inputs, outputs) {
                    // The other was through before, and has left.
                    assert_eq!(lost_rank(&error), Some(other), "{error}");
                    break;
                }
            }
            assert_eq!((comm.loss(), told.try_recv().is_err()), (None, true));
        });
    }
}

#[test]
fn a_rank_that_leaves_idle_fails_only_what_needs_it() {
    for wire in wires() {
        let left = Arc::new(Barrier::new(4));
        world(wire, 4, move |comm| {
            let mut data = [f32::from(comm.rank().0 as u8); 4];
            if comm.rank().0 == 3 {
                comm.abort("the test");
                left.wait();
                return;
            }
            left.wait();
            if comm.rank().0 < 2 {
                let memory = vec![buffer(&mut data)];
                let kind = match comm.rank().0 {
                    0 => OpKind::Send { to: Rank(1), tag: Tag(0) },
                    _ => OpKind::Recv { from: Source::Rank(Rank(0)), tag: Tag(0) },
                };
                run(comm, kind, memory.clone(), memory).expect("two that are there can go on");
                assert_eq!(data, [0.0; 4]);
            }
            let memory = vec![buffer(&mut data)];
            let kind = OpKind::AllReduce(ReduceOp::Sum);
            let error = run(comm, kind, memory.clone(), memory).expect_err("rank 3 has left");
            assert!(error.to_string().contains("rank 3 is lost"), "{error}");
            assert_eq!(comm.loss(), None, "it was idle when it left");
        });
    }
}

#[test]
fn what_a_connection_did_is_known_after_its_end() {
    for (wire, streams) in [(Wire::Tcp, "1"), (Wire::Tls, "1"), (Wire::Tcp, "3"), (Wire::Tls, "3")] {
        world_hinted(wire, 2, WATCHDOG, &[("tcp_streams", streams)], |comm| {
            let mut data = vec![1f32; 1 << 18];
            let memory = vec![buffer(&mut data)];
            run(comm, OpKind::AllReduce(ReduceOp::Sum), memory.clone(), memory).expect("both are there");
            if comm.rank().0 == 1 {
                return; // and shuts down
            }
            run(comm, OpKind::Barrier, vec![], vec![]).expect_err("rank 1 has left");
            let dump: serde_json::Value = serde_json::from_str(&comm.dump("asked for")).expect("JSON");
            let peer = &dump["peers"][0];
            assert!(peer["lost"].is_string(), "{peer}");
            let sent = peer["link"]["bytes"].as_u64();
            assert!(sent >= Some(1 << 19), "half of the elements went to rank 1: {peer}");
        });
    }
}
