//! One-sided windows: puts land, signals are counted, and the target need not take part.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ncclx_rs::{Communicator, Error, GetPath, Mode, Op, OpKind, Rank, ReduceOp, SharedMemory, Window, Work};

use crate::world::{Wire, buffer, op, run, wires, world, world_with};

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
    for wire in wires() {
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
    for wire in wires() {
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
    for wire in wires() {
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
    for wire in wires() {
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
    world(wires()[0], 2, |comm| {
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
    for wire in wires() {
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
    for wire in wires() {
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
fn accumulations_of_all_ranks_count() {
    for wire in wires() {
        // Shorter than a frame, and several fragments; at an odd address, where no element is aligned.
        for count in [5, 200_000] {
            world(wire, 3, move |comm| {
                let me = comm.rank().index();
                let mut memory = vec![0u8; 8 * (count + 1)];
                let window = comm.window_register(buffer(&mut memory)).expect("register");
                for to in 0..3 {
                    let kind = || OpKind::Accumulate { window: window.id(), to: Rank::from(to), offset: 3 };
                    let mut addends: Vec<i64> = (0..count as i64).map(|at| at + (1 << 40) * me as i64).collect();
                    run(comm, kind(), vec![buffer(&mut addends)], vec![]).expect("accumulate");
                    addends.fill(-1); // it is over, its memory is the caller's again
                    run(comm, kind(), vec![buffer(&mut addends)], vec![]).expect("accumulate");
                }
                comm.window_fence(window.id()).expect("fence");
                let (sums, _) = memory[3..3 + 8 * count].as_chunks();
                let sums: Vec<i64> = sums.iter().map(|bytes| i64::from_ne_bytes(*bytes)).collect();
                assert!(sums.iter().enumerate().all(|(at, sum)| *sum == 3 * at as i64 + 3 * (1 << 40) - 3));
                assert_eq!((&memory[..3], &memory[8 * count + 3..]), ([0; 3].as_slice(), [0; 5].as_slice()));
                comm.window_deregister(window.id()).expect("deregister");
            });
        }
    }
}

/// What another rank has written, in an order that only the kernel and mappings of both know (tests/tsan.supp).
fn arrived(memory: &[u8]) -> Vec<u8> {
    memory.to_vec()
}

#[test]
fn what_was_put_is_there_after_a_flush() {
    for wire in wires() {
        let flushed = Arc::new(AtomicBool::new(false));
        world(wire, 3, move |comm| {
            let mut memory = vec![0u8; LARGE];
            let window = comm.window_register(buffer(&mut memory)).expect("register");
            let (id, me) = (window.id(), comm.rank().0);
            let flush = |to| run(comm, OpKind::Flush { window: id, to: Rank(to) }, vec![], vec![]);
            (0..3).for_each(|to| flush(to).expect("nothing to wait for"));
            if me == 0 {
                let (mut long, mut short) = (vec![5; LARGE], [6; 3]);
                let to = Rank(1);
                let works = [
                    start(comm, OpKind::Put { window: id, to, offset: 0 }, &mut long),
                    start(comm, OpKind::Put { window: id, to, offset: LARGE - 3 }, &mut short),
                ];
                flush(1).expect("flush");
                flushed.store(true, Ordering::SeqCst);
                works.iter().for_each(|work| work.wait(None).expect("written"));
                comm.window_flush_all(id).expect("flush");
            } else if me == 1 {
                while !flushed.load(Ordering::SeqCst) {
                    std::thread::sleep(SHORT / 100); // outside the engine
                }
                assert_eq!(arrived(&memory), [vec![5; LARGE - 3], vec![6; 3]].concat());
            }
            comm.window_deregister(id).expect("deregister");
            let error = run(comm, OpKind::Flush { window: id, to: Rank(0) }, vec![], vec![]).expect_err("it is gone");
            assert!(matches!(&error, Error::Usage(usage) if usage.argument == "window"), "{error}");
        });
    }
}

#[test]
fn a_fence_shows_what_all_ranks_have_put() {
    for wire in wires() {
        world(wire, 3, |comm| {
            let me = comm.rank().index();
            let mut memory = vec![0u8; 3 * LARGE / 4];
            let part = memory.len() / 3;
            let window = comm.window_register(buffer(&mut memory)).expect("register");
            for round in 1..4 {
                let mut data = vec![10 * round + me as u8; part];
                let kind = |to| OpKind::Put { window: window.id(), to: Rank::from(to), offset: me * part };
                let works: Vec<Work> = (0..3).map(|to| start(comm, kind(to), &mut data)).collect();
                comm.window_fence(window.id()).expect("fence");
                works.iter().for_each(|work| work.wait(None).expect("written"));
                for from in 0..3 {
                    let written = &memory[from * part..(from + 1) * part];
                    assert!(written.iter().all(|byte| *byte == 10 * round + from as u8));
                }
                comm.window_fence(window.id()).expect("nobody puts before all have read");
            }
            comm.window_deregister(window.id()).expect("deregister");
            assert!(matches!(comm.window_fence(window.id()), Err(Error::Usage(_))));
        });
    }
}

#[test]
fn a_rank_that_does_not_fence_is_named() {
    for wire in wires() {
        world(wire, 2, |comm| {
            let mut memory = [0u8; 4];
            let window = comm.window_register(buffer(&mut memory)).expect("register");
            let result = match comm.rank().0 {
                0 => comm.window_fence(window.id()),
                _ => run(comm, OpKind::Barrier, vec![], vec![]),
            };
            let text = result.expect_err("they differ").to_string();
            assert!(text.contains("window_fence()") && text.contains("barrier()"), "{text}");
            comm.window_fence(window.id()).expect("the communicator works on");
            comm.window_deregister(window.id()).expect("deregister");
        });
    }
}

#[test]
fn what_cannot_be_added_is_refused_at_its_origin() {
    world(wires()[0], 2, |comm| {
        let mut memory = [0u8; 16];
        let window = comm.window_register(buffer(&mut memory)).expect("register");
        let add =
            |inputs, offset| run(comm, OpKind::Accumulate { window: window.id(), to: Rank(1), offset }, inputs, vec![]);
        let error = add(vec![buffer(&mut [1u8; 2]), buffer(&mut [1u32; 2])], 0).expect_err("two types");
        assert!(error.to_string().contains("accumulate: argument `tensors`: expected all of one dtype"), "{error}");
        let error = add(vec![buffer(&mut [1u64; 2])], 8).expect_err("too long");
        assert!(error.to_string().contains("exceeds the window size"), "{error}");
        comm.window_fence(window.id()).expect("the communicator works on");
        comm.window_deregister(window.id()).expect("deregister");
        assert_eq!(memory, [0; 16]);
    });
}

/// A window of every rank's elements, in memory that the other ranks can map, if it is `shared`.
fn gathered_window(comm: &Communicator, count: usize, shared: bool) -> (Result<SharedMemory<f32>, Vec<f32>>, Window) {
    let mut memory = match shared {
        true => Ok(SharedMemory::<f32>::new(count * comm.size()).expect("memory")),
        false => Err(vec![0.0; count * comm.size()]),
    };
    let lent = buffer(memory.as_mut().map_or_else(|vec| &mut vec[..], |shared| &mut shared[..]));
    let window = comm.window_register(lent).expect("register");
    (memory, window)
}

#[test]
fn a_persistent_all_gather_repeats() {
    for wire in wires() {
        for (size, count, shared) in
            [(1, 5, true), (2, 3, true), (2, 200_000, true), (3, 100_000, true), (3, 100_000, false)]
        {
            world(wire, size, move |comm| {
                let me = comm.rank().index();
                let (mut memory, window) = gathered_window(comm, count, shared);
                let kind = || OpKind::AllGatherPersistent { window: window.id() };
                for turn in 0..20 {
                    let all = memory.as_mut().map_or_else(|vec| &mut vec[..], |shared| &mut shared[..]);
                    let mut input = vec![(me * 100 + turn) as f32; count];
                    let op = op(kind(), vec![buffer(&mut input)], vec![buffer(all)]);
                    let mode = if turn % 2 == 0 { Mode::Async } else { Mode::Blocking };
                    if me == turn % size {
                        std::thread::sleep(SHORT / 500);
                    }
                    comm.submit(Op { mode, ..op }).expect("all_gather_p").wait(None).expect("all_gather_p");
                    for rank in 0..size {
                        let block = &all[rank * count..(rank + 1) * count];
                        assert!(block.iter().all(|value| *value == (rank * 100 + turn) as f32), "turn {turn}, {rank}");
                    }
                }
                comm.window_deregister(window.id()).expect("deregister");
            });
        }
    }
}

#[test]
fn accesses_to_mapped_parts_keep_their_order() {
    for wire in wires() {
        world(wire, 2, |comm| {
            const COUNT: usize = 1 << 19;
            let (me, peer) = (comm.rank().index(), Rank::from(1 - comm.rank().index()));
            let mut memory = SharedMemory::<f32>::new(COUNT).expect("memory");
            let window = comm.window_register(buffer(&mut memory[..])).expect("register");
            let at = |offset| OpKind::Put { window: window.id(), to: peer, offset };
            for round in 0..10 {
                let (mut ones, mut value) = (vec![1.0f32; COUNT], vec![(me * 10 + round) as f32; COUNT]);
                let mut seen = vec![0.0f32; COUNT];
                let get = OpKind::Get { window: window.id(), from: peer, offset: 0 };
                let add = OpKind::Accumulate { window: window.id(), to: peer, offset: 0 };
                // Each but the accumulation is a copy, unless the accumulation is still on its way.
                let added = comm.submit(Op { mode: Mode::Async, ..op(add, vec![buffer(&mut ones)], vec![]) });
                let put = comm.submit(Op { mode: Mode::Async, ..op(at(0), vec![buffer(&mut value)], vec![]) });
                let got = comm.submit(Op { mode: Mode::Async, ..op(get, vec![], vec![buffer(&mut seen)]) });
                for work in [added, put, got] {
                    work.expect("an access").wait(None).expect("it ends");
                }
                assert!(seen.iter().all(|seen| *seen == value[0]), "round {round}: a put before a get is there");
                signal(comm, &window, peer.index()).expect("signal");
                wait_signal(comm, &window, peer.index()).expect("wait_signal");
                let expected = (peer.index() * 10 + round) as f32;
                assert!(memory.iter().all(|value| *value == expected), "round {round}: the put came last");
                run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier");
            }
            // Nothing travels any more. A part of a part, and what lies around it stays.
            comm.window_fence(window.id()).expect("fence");
            let before = memory.to_vec();
            let (mut value, mut seen) = (vec![-1.0f32 - me as f32; 3], vec![0.0f32; 2]);
            run(comm, at(40), vec![buffer(&mut value)], vec![]).expect("put");
            let get = OpKind::Get { window: window.id(), from: peer, offset: 44 };
            run(comm, get, vec![], vec![buffer(&mut seen)]).expect("get");
            assert_eq!(seen, value[1..]);
            signal(comm, &window, peer.index()).expect("signal");
            wait_signal(comm, &window, peer.index()).expect("wait_signal");
            assert_eq!(memory[10..13], [-1.0 - peer.0 as f32; 3]);
            assert!(memory[..10] == before[..10] && memory[13..] == before[13..]);
            comm.window_deregister(window.id()).expect("deregister");
        });
    }
}

#[test]
fn ranks_that_differ_in_a_persistent_all_gather_are_told() {
    for wire in wires() {
        world(wire, 2, |comm| {
            const COUNT: usize = 100_000;
            let me = comm.rank().index();
            let (first, second) = (gathered_window(comm, COUNT, true), gathered_window(comm, COUNT, true));
            let gather = |(memory, window): &mut (Result<SharedMemory<f32>, Vec<f32>>, Window), count: usize| {
                let all = memory.as_mut().expect("shared");
                let kind = OpKind::AllGatherPersistent { window: window.id() };
                let mut input = vec![1.0f32; COUNT];
                run(comm, kind, vec![buffer(&mut input[..count])], vec![buffer(&mut all[..2 * count])])
            };
            let mut windows = [first, second];
            // Each rank into another one.
            let error = gather(&mut windows[me], COUNT).expect_err("they differ");
            assert!(matches!(error, Error::Mismatch { .. }), "{error}");
            assert!(error.to_string().contains(&format!("all_gather_p(200000 × float32, window {me})")), "{error}");
            let error = gather(&mut windows[0], COUNT - 1).expect_err("a part of the window").to_string();
            assert!(
                error.contains("all_gather_p: argument `output`: expected this rank's part of the window"),
                "{error}"
            );
            gather(&mut windows[0], COUNT).expect("they agree");
            for (_, window) in &windows {
                comm.window_deregister(window.id()).expect("deregister");
            }
            let error = gather(&mut windows[0], COUNT).expect_err("it is gone").to_string();
            assert!(error.contains("expected a registered window"), "{error}");
            let mut uneven = vec![0.0f32; 2 * COUNT];
            let window = comm.window_register(buffer(&mut uneven[..2 * (COUNT - me)])).expect("register");
            let (kind, mut input) = (OpKind::AllGatherPersistent { window: window.id() }, vec![1.0f32; COUNT - me]);
            let output = buffer(&mut uneven[..2 * (COUNT - me)]);
            let error = run(comm, kind, vec![buffer(&mut input)], vec![output]).expect_err("uneven").to_string();
            assert!(
                error.contains("argument `window`: expected parts of") && error.contains("on all ranks"),
                "{error}"
            );
            comm.window_deregister(window.id()).expect("deregister");
        });
    }
}

#[test]
fn a_part_in_shared_memory_is_mapped_by_the_other_ranks() {
    for wire in wires() {
        world(wire, 2, move |comm| {
            let (me, peer) = (comm.rank().index(), Rank::from(1 - comm.rank().index()));
            let mut memory = SharedMemory::<u8>::new(10_000).expect("memory");
            let window = comm.window_register(buffer(&mut memory[100..200 + me])).expect("register");
            if comm.host_of(peer) != comm.host_of(comm.rank()) {
                let error = comm.window_map(window.id(), peer).expect_err("another host");
                assert!(error.to_string().contains("expected a rank on the same host"), "{error}");
                return comm.window_deregister(window.id()).expect("deregister");
            }
            let mapped = comm.window_map(window.id(), peer).expect("mapped");
            assert_eq!(mapped.len(), 100 + peer.index());
            let path = comm.window_get_path(window.id(), peer).expect("a path");
            let expected = if wire == Wire::Shm { GetPath::Mapped } else { GetPath::Messages };
            // Over UCX that depends on what it goes through.
            assert!(wire == Wire::Ucx || path == expected, "{path:?}");
            mapped.copy_in(99, &[7 + me as u8]);
            comm.window_fence(window.id()).expect("fence");
            assert_eq!(memory[199], 7 + peer.0 as u8);
            let mut byte = [0];
            mapped.copy_out(99, &mut byte);
            assert_eq!(byte, [7 + me as u8]);
            let error = comm.window_map(window.id(), Rank(2)).expect_err("no such rank");
            assert!(error.to_string().contains("window_map: argument `rank`: expected a rank in [0, 2)"), "{error}");
            comm.window_deregister(window.id()).expect("deregister");
            assert!(comm.window_map(window.id(), peer).is_err());
            let error = comm.window_get_path(window.id(), peer).expect_err("it is gone");
            assert!(error.to_string().contains("expected a registered window"), "{error}");
            let mut elsewhere = vec![0u8; 100];
            let window = comm.window_register(buffer(&mut elsewhere)).expect("register");
            let error = comm.window_map(window.id(), peer).expect_err("other memory");
            assert!(error.to_string().contains("whose part lies in shared memory"), "{error}");
            comm.window_deregister(window.id()).expect("deregister");
        });
    }
}

#[test]
fn what_does_not_fit_is_refused_at_its_origin() {
    for wire in wires() {
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
    for wire in wires() {
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
    for wire in wires() {
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
    for wire in wires() {
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

#[test]
fn a_window_stays_until_the_copies_of_other_threads_have_ended() {
    const BYTES: usize = 64 << 20;
    world(Wire::Shm, 2, |comm| {
        let (me, mut memory) = (comm.rank().index(), SharedMemory::<u8>::new(BYTES).expect("memory"));
        let window = comm.window_register(buffer(&mut memory[..])).expect("register");
        std::thread::scope(|scope| {
            if me == 0 {
                let (began, begun) = std::sync::mpsc::channel();
                let window = &window;
                scope.spawn(move || {
                    let mut ones = vec![1u8; BYTES];
                    while put(comm, window, 1, 0, &mut ones).is_ok() {
                        let _ = began.send(());
                    }
                });
                begun.recv().expect("a put");
            }
            comm.window_deregister(window.id()).expect("deregister");
            memory.fill(2);
        });
        // No thread of rank 0 puts any more.
        run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier");
        assert!(memory.iter().all(|byte| *byte == 2), "a put came after the window's end");
    });
}
