//! Dozens of ranks that all have streams to each other, of which most bring nothing most of the time.

use std::time::Duration;

use ncclx_rs::{OpKind, Rank, ReduceOp, Source, Tag};

use crate::messages::start;
use crate::world::{Wire, buffer, run, world_hinted};

const RANKS: usize = 36;

#[test]
fn every_message_comes_also_in_a_stream_that_has_long_brought_nothing() {
    // Small, since there are more than a thousand.
    let ring = (4 * rustix::param::page_size()).to_string();
    for wire in [Wire::Shm, Wire::Tcp, Wire::Tls] {
        let hints = [("shm_ring_bytes", ring.as_str())];
        world_hinted(wire, RANKS, Duration::from_secs(120), &hints, |comm| {
            let me = comm.rank().index();
            // Short ones, long ones, and long ones that whoever is free takes.
            for (pass, count) in [(0, 2), (1, 20_000), (2, 2), (3, 20_000)] {
                if (me + pass) % 5 == 0 {
                    // The others have armed everything and sleep before this one goes on.
                    std::thread::sleep(Duration::from_millis(20));
                }
                for distance in 1..RANKS {
                    let (to, from) = ((me + distance) % RANKS, (me + RANKS - distance) % RANKS);
                    let (mut out, mut back) = (vec![me as i32; count], vec![-1; count]);
                    let tag = Tag((pass * RANKS + distance) as u32);
                    let source = if pass == 3 { Source::Any } else { Source::Rank(Rank::from(from)) };
                    let sent = comm.submit(start(OpKind::Send { to: Rank::from(to), tag }, &mut out)).expect("send");
                    let kind = OpKind::Recv { from: source, tag };
                    comm.submit(start(kind, &mut back)).expect("recv").wait(None).expect("recv");
                    sent.wait(None).expect("send");
                    assert!(back.iter().all(|value| *value == from as i32), "pass {pass}, distance {distance}");
                }
            }
            // What is left of the streams that one collective does not use is there for the next.
            for kind in [OpKind::Barrier, OpKind::AllReduce(ReduceOp::Sum), OpKind::Barrier] {
                let mut data = [me as i32];
                let operands = if kind == OpKind::Barrier { vec![] } else { vec![buffer(&mut data)] };
                run(comm, kind.clone(), operands.clone(), operands).expect("a collective");
                assert!(kind == OpKind::Barrier || data == [(0..RANKS as i32).sum::<i32>()]);
            }
        });
    }
}
