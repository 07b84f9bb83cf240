//! One-sided windows: puts land, signals are counted, and the target need not take part.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ncclx_rs::{Communicator, Error, Mode, Op, OpKind, Rank, ReduceOp, Window, Work};

use crate::world::{WIRES, buffer, op, run, world, world_with};

const SHORT: Duration = Duration::from_secs(1);

/// More than a stream takes at once, in many fragments.
const LARGE: usize = 10 << 20;

fn put(comm: &Communicator, window: &Window, to: usize, offset: usize, data: &mut [u8]) -> Result<(), Error> {
    let kind = OpKind::Put { window: window.id(), to: Rank::from(to), offset };
    run(comm, kind, vec![buffer(data)], vec![])
}

fn signal(comm: &Communicator, window: &Window, to: usize) -> Result<(), Error> {
    run(comm, OpKind::Signal { window: window.id(), to: Rank::from(to) }, vec![], vec![])
}

fn wait_signal(comm: &Communicator, window: &Window, from: usize) -> Result<(), Error> {
    run(comm, OpKind::WaitSignal { window: window.id(), from: Rank::from(from) }, vec![], vec![])
}

/// Starts without waiting.
fn start(comm: &Communicator, kind: OpKind, data: &mut [u8]) -> Work {
    let memory = if data.is_empty() { vec![] } else { vec![buffer(data)] };
    comm.submit(Op { mode: Mode::Async, ..op(kind, memory, vec![]) }).expect("an operation that can work")
}

#[test]
fn a_ring_of_put_signal_wait_moves_the_data() {
    for wire in WIRES {
        for (size, count) in [(1, 1000), (2, 7), (3, 700_000)] {
            world(wire, size, move |comm| {
                let me = comm.rank().index();
                let (next, before) = ((me + 1) % size, (me + size - 1) % size);
                let mut memory = vec![99; count * size];
                let window = comm.window_register(buffer(&mut memory)).expect("register");
                for round in 0..10 {
                    let mut data = vec![me as u8 * 10 + round; count];
                    put(comm, &window, next, me * count, &mut data).expect("put");
                    data.fill(77); // the put is over, its memory is the caller's again
                    signal(comm, &window, next).expect("signal");
                    wait_signal(comm, &window, before).expect("wait_signal");
                    let place = &memory[before * count..(before + 1) * count];
                    assert!(place.iter().all(|byte| *byte == before as u8 * 10 + round));
                    run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier"); // the next put overwrites it
                }
                comm.window_deregister(window.id()).expect("deregister");
                let untouched = (0..size).filter(|part| *part != before);
                untouched.for_each(|part| assert!(memory[part * count..(part + 1) * count].iter().all(|b| *b == 99)));
            });
        }
    }
}

#[test]
fn a_signal_does_not_overtake_the_long_put_before_it() {
    for wire in WIRES {
        world(wire, 2, |comm| {
            let mut memory = vec![0u8; LARGE];
            let window = comm.window_register(buffer(&mut memory)).expect("register");
            if comm.rank().0 == 0 {
                let (mut long, mut short) = (vec![5; LARGE], [6; 3]);
                let (id, to) = (window.id(), Rank(1));
                let works = [
                    start(comm, OpKind::Put { window: id, to, offset: 0 }, &mut long),
                    start(comm, OpKind::Put { window: id, to, offset: LARGE - 3 }, &mut short),
                    start(comm, OpKind::Signal { window: id, to }, &mut []),
                ];
                works.iter().for_each(|work| work.wait(None).expect("written"));
            } else {
                wait_signal(comm, &window, 0).expect("wait_signal");
                assert!(memory[..LARGE - 3].iter().all(|byte| *byte == 5));
                assert_eq!(memory[LARGE - 3..], [6; 3]);
            }
            comm.window_deregister(window.id()).expect("deregister");
        });
    }
}

#[test]
fn a_target_that_does_nothing_still_takes_a_put() {
    for wire in WIRES {
        let written = Arc::new(AtomicBool::new(false));
        world(wire, 2, move |comm| {
            let mut memory = vec![0u8; LARGE];
            let window = comm.window_register(buffer(&mut memory)).expect("register");
            if comm.rank().0 == 0 {
                put(comm, &window, 1, 0, &mut vec![8; LARGE]).expect("put");
                signal(comm, &window, 1).expect("signal");
                written.store(true, Ordering::SeqCst);
            } else {
                while !written.load(Ordering::SeqCst) {
                    std::thread::sleep(SHORT / 100); // outside the engine: only the put's own time limit ends this
                }
                wait_signal(comm, &window, 0).expect("wait_signal");
                assert!(memory.iter().all(|byte| *byte == 8));
            }
            comm.window_deregister(window.id()).expect("deregister");
        });
    }
}

#[test]
fn signals_are_counted_by_sender_and_kept() {
    for wire in WIRES {
        world_with(wire, 3, SHORT * 10, |comm| {
            let window = comm.window_register(buffer::<u8>(&mut [])).expect("register");
            let me = comm.rank().0;
            for _ in 0..me * 100 {
                signal(comm, &window, 0).expect("signal");
            }
            run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier");
            if me == 0 {
                for _ in 0..100 {
                    wait_signal(comm, &window, 1).expect("each signal ends one wait");
                    wait_signal(comm, &window, 2).expect("each signal ends one wait");
                    wait_signal(comm, &window, 2).expect("each signal ends one wait");
                }
                for from in [1, 2] {
                    let kind = OpKind::WaitSignal { window: window.id(), from: Rank(from) };
                    let late = Op { timeout: Some(SHORT / 10), ..op(kind, vec![], vec![]) };
                    let error = comm.submit(late).expect("wait_signal").wait(None).expect_err("all are taken");
                    assert!(error.to_string().contains(&format!("rank {from} did not signal")), "{error}");
                }
            }
            run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier");
            if me == 1 {
                signal(comm, &window, 0).expect("signal");
            } else if me == 0 {
                wait_signal(comm, &window, 1).expect("a wait that timed out has not taken it");
            }
            comm.window_deregister(window.id()).expect("deregister");
        });
    }
}

#[test]
fn a_signal_to_oneself_wakes_the_thread_that_waits() {
    world(WIRES[0], 2, |comm| {
        let window = comm.window_register(buffer::<u8>(&mut [])).expect("register");
        let kind = OpKind::WaitSignal { window: window.id(), from: comm.rank() };
        let wait = Op { timeout: Some(SHORT * 100_000), ..op(kind, vec![], vec![]) }; // who misses it hangs
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| comm.submit(wait).expect("wait_signal").wait(None));
            std::thread::sleep(SHORT / 10); // lets the other thread sleep first
            signal(comm, &window, comm.rank().index()).expect("signal");
            waiting.join().expect("no panic").expect("wait_signal");
        });
        comm.window_deregister(window.id()).expect("deregister");
    });
}

#[test]
fn windows_are_apart_and_run_beside_collectives() {
    for wire in WIRES {
        world(wire, 2, |comm| {
            let (me, peer) = (comm.rank().index(), 1 - comm.rank().index());
            let mut memory = [[0u8; 4]; 3];
            let [first, second, third] = &mut memory;
            let windows: Vec<Window> =
                [first, second, third].map(|part| comm.window_register(buffer(part)).expect("register")).into();
            for (index, window) in windows.iter().enumerate() {
                put(comm, window, peer, 1, &mut [(me * 10 + index) as u8; 2]).expect("put");
            }
            let waits: Vec<Work> = windows
                .iter()
                .map(|window| start(comm, OpKind::WaitSignal { window: window.id(), from: Rank::from(peer) }, &mut []))
                .collect();
            let mut sum = vec![1i32; 50_000];
            let shared = buffer(&mut sum);
            run(comm, OpKind::AllReduce(ReduceOp::Sum), vec![shared], vec![shared]).expect("all_reduce");
            assert!(sum.iter().all(|value| *value == 2));
            assert!(waits.iter().all(|wait| !wait.is_done()));
            run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier");
            for index in [2, 0, 1] {
                signal(comm, &windows[index], peer).expect("signal");
                waits[index].wait(None).expect("wait_signal");
                let value = (peer * 10 + index) as u8;
                assert_eq!(memory[index], [0, value, value, 0]);
            }
            comm.window_deregister(windows[1].id()).expect("deregister");
            put(comm, &windows[2], peer, 3, &mut [7]).expect("the others stay");
            let error = put(comm, &windows[1], peer, 0, &mut [7]).expect_err("it is gone");
            assert!(matches!(&error, Error::Usage(usage) if usage.argument == "window"), "{error}");
            assert!(comm.window_deregister(windows[1].id()).is_err());
            signal(comm, &windows[2], peer).expect("signal");
            wait_signal(comm, &windows[2], peer).expect("wait_signal");
            assert_eq!(memory[2][3], 7);
        });
    }
}

#[test]
fn get_reads_what_the_other_rank_has() {
    for wire in WIRES {
        for count in [1, 3_000_000] {
            world(wire, 3, move |comm| {
                let me = comm.rank().0 as u8;
                let mut memory: Vec<u8> = (0..count + 2).map(|at| (at as u8).wrapping_add(me)).collect();
                let window = comm.window_register(buffer(&mut memory)).expect("register");
                for from in 0..3 {
                    let mut data = vec![9; count];
                    let kind = OpKind::Get { window: window.id(), from: Rank(from), offset: 2 };
                    run(comm, kind, vec![], vec![buffer(&mut data)]).expect("get");
                    assert!(
                        data.iter().enumerate().all(|(at, byte)| *byte == ((at + 2) as u8).wrapping_add(from as u8))
                    );
                }
                comm.window_deregister(window.id()).expect("deregister");
            });
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_at_its_origin() {
    for wire in WIRES {
        world(wire, 2, |comm| {
            let (me, peer) = (comm.rank().index(), 1 - comm.rank().index());
            let mut memory = vec![0u8; 16 + 8 * me]; // each rank lends what it likes
            let window = comm.window_register(buffer(&mut memory)).expect("register");
            let bytes = window.bytes(Rank::from(peer));
            assert_eq!(bytes, 16 + 8 * peer);
            let text = put(comm, &window, peer, bytes - 2, &mut [1; 3]).expect_err("beyond the end").to_string();
            let expected = format!("Requested size ({} bytes) exceeds the window size ({bytes} bytes)", bytes + 1);
            assert!(text.contains(&expected), "{text}");
            let error = signal(comm, &window, 2).expect_err("no such rank");
            assert!(matches!(&error, Error::Usage(usage) if usage.argument == "dst"), "{error}");
            let error = wait_signal(comm, &window, 2).expect_err("no such rank");
            assert!(matches!(&error, Error::Usage(usage) if usage.argument == "src"), "{error}");
            put(comm, &window, peer, bytes - 2, &mut [1; 2]).expect("just inside");
            comm.window_deregister(window.id()).expect("deregister");
        });
    }
}

#[test]
fn a_rank_that_does_not_register_is_named() {
    for wire in WIRES {
        world(wire, 2, |comm| {
            let mut memory = [0u8; 4];
            let result = match comm.rank().0 {
                0 => comm.window_register(buffer(&mut memory)).map(|_| ()),
                _ => run(comm, OpKind::Barrier, vec![], vec![]),
            };
            let text = result.expect_err("they differ").to_string();
            assert!(text.contains("window_register()") && text.contains("barrier()"), "{text}");
        });
    }
}

#[test]
fn a_rank_that_waits_for_a_lost_ranks_signal_is_told() {
    for wire in WIRES {
        world(wire, 2, |comm| {
            let mut memory = [0u8; 4];
            let window = comm.window_register(buffer(&mut memory)).expect("register");
            if comm.rank().0 == 1 {
                signal(comm, &window, 0).expect("signal");
                run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier");
                return comm.abort("the test");
            }
            run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier");
            wait_signal(comm, &window, 1).expect("what it sent before is there");
            let error = wait_signal(comm, &window, 1).expect_err("it is gone");
            assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
            assert!(error.to_string().contains("wait_signal(from rank 1, window 0)"), "{error}");
            let error = put(comm, &window, 1, 0, &mut [1]).expect_err("it is gone");
            assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
            assert!(comm.window_deregister(window.id()).is_err());
        });
    }
}

#[test]
fn deregistering_ends_waits_and_leaves_the_memory_alone() {
    for wire in WIRES {
        world(wire, 2, |comm| {
            let peer = 1 - comm.rank().index();
            let mut memory = vec![0u8; 4];
            let window = comm.window_register(buffer(&mut memory)).expect("register");
            let waits = start(comm, OpKind::WaitSignal { window: window.id(), from: Rank::from(peer) }, &mut []);
            comm.window_deregister(window.id()).expect("deregister");
            let error = waits.wait(None).expect_err("no window, no signal");
            assert!(error.to_string().contains("deregistered"), "{error}");
            drop(memory);
            run(comm, OpKind::Barrier, vec![], vec![]).expect("the group works on");
        });
    }
}
