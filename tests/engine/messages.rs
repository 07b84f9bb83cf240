//! Point-to-point messages: matching, order, and running beside collectives.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use ncclx_rs::comm::store::MemoryStore;
use ncclx_rs::sys::process::{bind_to_cpu, current_cpu};
use ncclx_rs::{CommOptions, Communicator, Mode, Op, OpKind, Rank, ReduceOp, Source, Tag};
use rustix::thread::sched_getaffinity;
use rustix::time::{ClockId, clock_gettime};

use crate::lacking::lacks;
use crate::world::{buffer, op, run, wires, world};

fn send(to: usize, tag: u32) -> OpKind {
    OpKind::Send { to: Rank::from(to), tag: Tag(tag) }
}

fn recv(from: usize, tag: u32) -> OpKind {
    OpKind::Recv { from: Source::Rank(Rank::from(from)), tag: Tag(tag) }
}

/// Starts to send to or receive from a rank.
pub(crate) fn start(kind: OpKind, data: &mut [i32]) -> Op {
    let memory = vec![buffer(data)];
    let (inputs, outputs) = if matches!(kind, OpKind::Send { .. }) { (memory, vec![]) } else { (vec![], memory) };
    Op { mode: Mode::Async, ..op(kind, inputs, outputs) }
}

#[test]
fn both_sides_may_send_first() {
    for wire in wires() {
        for count in [0, 1, 500, 300_000] {
            world(wire, 2, move |comm| {
                let peer = 1 - comm.rank().index();
                let mut out = vec![comm.rank().0 as i32 + 5; count];
                let mut back = vec![0; count];
                let sent = comm.submit(start(send(peer, 0), &mut out)).expect("send");
                let received = comm.submit(start(recv(peer, 0), &mut back)).expect("recv");
                received.wait(None).expect("recv");
                sent.wait(None).expect("send");
                assert!(back.iter().all(|value| *value == peer as i32 + 5));
            });
        }
    }
}

#[test]
fn empty_messages_arrive_however_many_are_unread() {
    // They take more than the receiver has room for, so that the last wait at the sender.
    const COUNT: usize = 17_000;
    for wire in wires() {
        world(wire, 2, |comm| {
            if comm.rank().0 == 0 {
                let sent: Vec<_> = (0..COUNT).map(|_| comm.submit(start(send(1, 0), &mut [])).expect("send")).collect();
                comm.submit(start(send(1, 1), &mut [5])).expect("send").wait(None).expect("send");
                sent.into_iter().for_each(|work| work.wait(None).expect("send"));
            } else {
                let mut last = [0];
                comm.submit(start(recv(0, 1), &mut last)).expect("recv").wait(None).expect("recv");
                assert_eq!(last, [5]);
                for _ in 0..COUNT {
                    comm.submit(start(recv(0, 0), &mut [])).expect("recv").wait(None).expect("recv");
                }
            }
        });
    }
}

#[test]
fn a_ring_of_blocking_sends_before_the_receives_completes() {
    for wire in wires() {
        for size in [2, 3] {
            world(wire, size, move |comm| {
                let me = comm.rank().index();
                let before = (me + size - 1) % size;
                let mut out = vec![me as i32; 300_000];
                let mut back = vec![0; 300_000];
                comm.submit(start(send((me + 1) % size, 0), &mut out)).expect("send").wait(None).expect("send");
                out.fill(-1); // the send is over, its memory is the caller's again
                comm.submit(start(recv(before, 0), &mut back)).expect("recv").wait(None).expect("recv");
                assert!(back.iter().all(|value| *value == before as i32));
            });
        }
    }
}

#[test]
fn blocking_sends_complete_also_where_a_collective_comes_before_the_receives() {
    for wire in wires() {
        world(wire, 3, |comm| {
            let me = comm.rank().index();
            let mut out: Vec<Vec<i32>> = (0..3).map(|round| vec![3 * me as i32 + round; 600_000]).collect();
            for one in &mut out {
                comm.submit(start(send((me + 1) % 3, 0), one)).expect("send").wait(None).expect("send");
                one.fill(-1);
            }
            run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier");
            let before = (me + 2) % 3;
            for round in 0..3 {
                let mut back = vec![0; 600_000];
                comm.submit(start(recv(before, 0), &mut back)).expect("recv").wait(None).expect("recv");
                assert!(back.iter().all(|value| *value == 3 * before as i32 + round));
            }
        });
    }
}

#[test]
fn a_long_message_to_oneself_needs_no_order() {
    world(wires()[0], 1, |comm| {
        let (mut out, mut back) = (vec![5; 300_000], vec![0; 300_000]);
        for receive_first in [true, false] {
            back.fill(0);
            let received = receive_first.then(|| comm.submit(start(recv(0, 0), &mut back)).expect("recv"));
            comm.submit(start(send(0, 0), &mut out)).expect("send").wait(None).expect("send");
            let received = received.unwrap_or_else(|| comm.submit(start(recv(0, 0), &mut back)).expect("recv"));
            received.wait(None).expect("recv");
            assert_eq!(back, out);
        }
    });
}

#[test]
fn tags_match_in_any_order_and_one_tag_keeps_its_order() {
    for wire in wires() {
        world(wire, 2, |comm| {
            if comm.rank().0 == 0 {
                let mut data: Vec<[i32; 1]> = (0..40).map(|i| [i]).collect();
                let works: Vec<_> = data
                    .iter_mut()
                    .enumerate()
                    .map(|(i, one)| comm.submit(start(send(1, i as u32 % 4), one)).expect("send"))
                    .collect();
                works.iter().for_each(|work| work.wait(None).expect("send"));
            } else {
                for tag in [3, 1, 0, 2] {
                    for round in 0..10 {
                        let mut one = [0];
                        comm.submit(start(recv(0, tag), &mut one)).expect("recv").wait(None).expect("recv");
                        assert_eq!(one[0], round * 4 + tag as i32);
                    }
                }
            }
        });
    }
}

#[test]
fn a_receive_from_any_rank_says_whose_message_it_got() {
    for wire in wires() {
        world(wire, 4, |comm| {
            let rank = comm.rank().index();
            if rank == 0 {
                let mut seen = vec![];
                for _ in 1..4 {
                    let mut data = vec![0; 5000];
                    let kind = OpKind::Recv { from: Source::Any, tag: Tag(7) };
                    let work = comm.submit(start(kind, &mut data)).expect("recv");
                    work.wait(None).expect("recv");
                    let source = work.source().expect("a source");
                    assert!(data.iter().all(|value| *value == source.0 as i32));
                    seen.push(source.0);
                }
                seen.sort_unstable();
                assert_eq!(seen, [1, 2, 3]);
            } else {
                let mut data = vec![rank as i32; 5000];
                run(comm, send(0, 7), vec![buffer(&mut data)], vec![]).expect("send");
            }
        });
    }
}

#[test]
fn messages_run_beside_collectives() {
    for wire in wires() {
        world(wire, 2, |comm| {
            let peer = 1 - comm.rank().index();
            let mut late = vec![0; 100_000];
            let received = comm.submit(start(recv(peer, 1), &mut late)).expect("recv");
            for _ in 0..10 {
                assert!(!received.is_done()); // the peer sends after its last all_reduce, which needs this rank's
                let mut data = vec![1i32; 50_000];
                let memory = buffer(&mut data);
                run(comm, OpKind::AllReduce(ReduceOp::Sum), vec![memory], vec![memory]).expect("all_reduce");
                assert!(data.iter().all(|value| *value == 2));
            }
            let mut out = vec![9; 100_000];
            let sent = comm.submit(start(send(peer, 1), &mut out)).expect("send");
            received.wait(None).expect("recv");
            sent.wait(None).expect("send");
            assert!(late.iter().all(|value| *value == 9));
        });
    }
}

/// The most bytes that one rank has unread at another.
const WINDOW: usize = 1 << 20;

#[test]
fn many_unread_small_messages_are_bounded_and_arrive() {
    for wire in wires() {
        let counted = Barrier::new(2);
        world(wire, 2, move |comm| {
            const MESSAGES: usize = 3000;
            if comm.rank().0 == 0 {
                let mut data = vec![vec![3i32; 500]; MESSAGES];
                let works: Vec<_> =
                    data.iter_mut().map(|one| comm.submit(start(send(1, 0), one)).expect("send")).collect();
                run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier");
                let left = works.iter().filter(|work| work.is_done()).count();
                assert!(left > 0 && left * 2000 <= WINDOW, "{left} messages of 2000 bytes have left, and none is read");
                counted.wait();
                works.iter().for_each(|work| work.wait(None).expect("send"));
            } else {
                run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier");
                counted.wait();
                for _ in 0..MESSAGES {
                    let mut one = vec![0; 500];
                    comm.submit(start(recv(0, 0), &mut one)).expect("recv").wait(None).expect("recv");
                    assert!(one.iter().all(|value| *value == 3));
                }
            }
        });
    }
}

#[test]
fn short_messages_go_before_they_are_asked_for_also_after_many_windows_were_read() {
    for wire in wires() {
        let sent = Barrier::new(2);
        world(wire, 2, move |comm| {
            let mut data = [comm.rank().0 as i32; 500];
            let message = |data: &mut [i32]| match comm.rank().0 {
                0 => run(comm, send(1, 0), vec![buffer(data)], vec![]).expect("send"),
                _ => run(comm, recv(0, 0), vec![], vec![buffer(data)]).expect("recv"),
            };
            for _ in 0..10 * WINDOW / 2000 {
                message(&mut data);
            }
            // Rank 1 has said before it what it has read.
            run(comm, OpKind::Barrier, vec![], vec![]).expect("barrier");
            for round in 0..100 {
                if round == 0 && comm.rank().0 == 1 {
                    sent.wait();
                }
                let mut short = [if comm.rank().0 == 0 { round } else { -1 }];
                message(&mut short);
                assert_eq!(short, [round]);
            }
            if comm.rank().0 == 0 {
                sent.wait();
            }
        });
    }
}

/// The processor time of a rank that sends messages to and fro with another on the same CPU, both of which never sleep.
fn time_on_one_cpu(transport: &str) -> Duration {
    let (store, cpu) = (Arc::new(MemoryStore::default()), current_cpu());
    let run = |rank: usize| {
        let hints = [("transport", transport), ("spin_microseconds", "10000000")];
        let comm = Communicator::new(CommOptions {
            name: transport.to_owned(),
            rank: Rank::from(rank),
            size: 2,
            store: store.clone(),
            timeout: None,
            hints: hints.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
        })
        .expect("the world forms");
        bind_to_cpu(cpu).expect("a CPU that this thread was on");
        let (peer, mut data) = (Rank::from(1 - rank), [0_u8; 8]);
        let mut to_and_fro = || {
            if rank == 0 {
                comm.send(&data, peer, Tag(0)).expect("send");
            }
            comm.recv(&mut data, peer, Tag(0)).expect("recv");
            if rank == 1 {
                comm.send(&data, peer, Tag(0)).expect("send");
            }
        };
        // Opens the streams.
        to_and_fro();
        let now = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).expect("a time");
        let began = now();
        (0..50).for_each(|_| to_and_fro());
        let took = now() - began;
        comm.shutdown().expect("shutdown");
        took
    };
    let run = &run;
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || run(rank)));
        ranks.map(|rank| rank.join().expect("no panic")).into_iter().sum()
    })
}

#[test]
fn ranks_on_one_cpu_give_it_to_each_other() {
    if sched_getaffinity(None).expect("this thread's CPUs").count() < 2 {
        return lacks("a second CPU: with one, ranks always give it away");
    }
    // Over TCP a rank does not know where the others are, and keeps the CPU until the system takes it away.
    let (knows, does_not) = (time_on_one_cpu("shm"), time_on_one_cpu("tcp"));
    assert!(knows * 4 < does_not, "{knows:?} where they know, {does_not:?} where they do not");
}
