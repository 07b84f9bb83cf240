//! Gets that a rank reads in the target's memory by itself, over UCX, the real library. Over UCX's TCP they travel by frames, and
//! everything else is the same.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use ncclx_rs::comm::store::TcpStore;
use ncclx_rs::{CommOptions, Communicator, Error, GetPath, Mode, Op, OpKind, Rank, Window, Work};

use crate::stopped::wait_until_stopped;
use crate::ucx_process::{allowed, is_under_test};
use crate::world::{Wire, buffer, op, run, world};

/// Whether UCX may go through what reads by itself.
fn may_read() -> bool {
    allowed().split(',').any(|way| way == "cma")
}

/// How many gets of `of` this rank has read by itself, as the flight recorder tells.
fn reads(comm: &Communicator, of: usize) -> u64 {
    let dump: serde_json::Value = serde_json::from_str(&comm.dump("asked for")).expect("JSON");
    let peers = dump["peers"].as_array().expect("the others");
    peers.iter().find(|peer| peer["rank"] == of).expect("another")["remote_reads"].as_u64().expect("a number")
}

fn get(comm: &Communicator, window: &Window, from: usize, offset: usize, into: &mut [u8]) -> Result<(), Error> {
    run(comm, OpKind::Get { window: window.id(), from: Rank::from(from), offset }, vec![], vec![buffer(into)])
}

fn try_get(comm: &Communicator, window: &Window, from: usize, offset: usize, into: &mut [u8]) -> Result<Work, Error> {
    let kind = OpKind::Get { window: window.id(), from: Rank::from(from), offset };
    comm.submit(Op { mode: Mode::Async, ..op(kind, vec![], vec![buffer(into)]) })
}

fn start_get(comm: &Communicator, window: &Window, from: usize, offset: usize, into: &mut [u8]) -> Work {
    try_get(comm, window, from, offset, into).expect("an operation that can work")
}

fn fence(comm: &Communicator, window: &Window) {
    comm.window_fence(window.id()).expect("fence");
}

/// Numbers that a seed decides.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((mixed ^ (mixed >> 31)) % end as u64) as usize
    }

    /// A range within so many bytes: mostly short, sometimes of several pieces.
    fn range(&mut self, bytes: usize) -> (usize, usize) {
        let most = [16, 5_000, bytes][self.below(3)];
        let len = 1 + self.below(most);
        (self.below(bytes - len + 1), len)
    }
}

const RANKS: usize = 3;
/// What each rank puts to each part, and the counters behind that, to which all add.
const LANE: usize = 700_000;
const COUNTERS: usize = 8;
const ROUNDS: u64 = 12;

/// What a rank puts in one round: to which rank, where in its lane, how long and with which byte. All ranks know it.
fn puts(rank: usize, round: u64) -> Vec<(usize, usize, usize, u8)> {
    let mut draw = Draw(round * 1000 + rank as u64);
    let put = |draw: &mut Draw| {
        let to = (rank + 1 + draw.below(RANKS - 1)) % RANKS;
        let (begin, len) = draw.range(LANE);
        (to, begin, len, draw.below(251) as u8)
    };
    (0..6).map(|_| put(&mut draw)).collect()
}

#[test]
fn random_gets_among_puts_and_fences_bring_what_was_put() {
    if !is_under_test() {
        return;
    }
    let read = world(Wire::Ucx, RANKS, |comm| {
        let me = comm.rank().index();
        let mut memory = vec![0u8; RANKS * LANE + COUNTERS * 8];
        let window = comm.window_register(buffer(&mut memory)).expect("register");
        let mut model = vec![vec![0u8; RANKS * LANE]; RANKS];
        let mut draw = Draw(me as u64 + 77);
        for round in 0..ROUNDS {
            for (to, begin, len, byte) in puts(me, round) {
                let (place, mut data) = (me * LANE + begin, vec![byte; len]);
                let kind = OpKind::Put { window: window.id(), to: Rank::from(to), offset: place };
                run(comm, kind, vec![buffer(&mut data)], vec![]).expect("put");
                model[to][place..place + len].fill(byte);
                // What this rank has put it sees, flushed or not.
                if draw.below(2) == 0 {
                    comm.window_flush_all(window.id()).expect("flush");
                }
                let (begin, len) = draw.range(LANE);
                let (place, mut got) = (me * LANE + begin, vec![0xff; len]);
                get(comm, &window, to, place, &mut got).expect("get");
                assert!(got == model[to][place..place + len], "round {round}: {len} bytes at {place} of rank {to}");
            }
            for to in 0..RANKS {
                let mut addends = [1u64; COUNTERS];
                let kind = OpKind::Accumulate { window: window.id(), to: Rank::from(to), offset: RANKS * LANE };
                run(comm, kind, vec![buffer(&mut addends)], vec![]).expect("accumulate");
            }
            for other in (0..RANKS).filter(|other| *other != me) {
                for (to, begin, len, byte) in puts(other, round) {
                    model[to][other * LANE + begin..][..len].fill(byte);
                }
            }
            fence(comm, &window);
            // Many at once, of all ranks.
            let ranges: Vec<_> = (0..8).map(|_| (draw.below(RANKS), draw.range(RANKS * LANE))).collect();
            let mut got: Vec<Vec<u8>> = ranges.iter().map(|(_, (_, len))| vec![0xff; *len]).collect();
            let begin = |((from, (begin, _)), into): (&(usize, (usize, usize)), &mut Vec<u8>)| {
                start_get(comm, &window, *from, *begin, into)
            };
            let works: Vec<Work> = ranges.iter().zip(&mut got).map(begin).collect();
            works.iter().for_each(|work| work.wait(None).expect("get"));
            for ((from, (begin, len)), got) in ranges.iter().zip(&got) {
                assert!(*got == model[*from][*begin..][..*len], "round {round}: {len} bytes at {begin} of rank {from}");
            }
            let mut counters = [0u8; COUNTERS * 8];
            get(comm, &window, (me + 1) % RANKS, RANKS * LANE, &mut counters).expect("get");
            let sum = ((round + 1) * RANKS as u64).to_ne_bytes();
            assert!(counters.chunks(8).all(|counter| counter == sum), "{counters:?}");
            comm.barrier().expect("barrier"); // the next puts change what others may still read
        }
        comm.window_deregister(window.id()).expect("deregister");
        (0..RANKS).filter(|rank| *rank != me).map(|rank| reads(comm, rank)).sum::<u64>()
    });
    assert!(read.iter().all(|reads| (*reads > 20) == may_read() && (*reads == 0) != may_read()), "{read:?}");
}

#[test]
fn a_window_is_read_until_it_is_deregistered_and_one_of_the_same_memory_again() {
    if !is_under_test() {
        return;
    }
    world(Wire::Ucx, 2, |comm| {
        let me = comm.rank().index();
        let mut memory = vec![me as u8 + 1; 1 << 20];
        for round in 0..3 {
            let window = comm.window_register(buffer(&mut memory)).expect("register");
            let mut got = vec![0; 1 << 20];
            let early = start_get(comm, &window, 1 - me, 0, &mut got);
            comm.window_deregister(window.id()).expect("deregister");
            // What was under way is waited for.
            early.wait(None).expect("get");
            assert!(got.iter().all(|byte| *byte == 2 - me as u8), "round {round}");
            let error = get(comm, &window, 1 - me, 0, &mut got[..8]).expect_err("it is gone");
            assert!(matches!(error, Error::Usage(_)), "{error}");
        }
        assert_eq!(reads(comm, 1 - me) > 0, may_read());
    });
}

#[test]
fn parts_of_other_sizes_are_checked_where_the_get_begins_and_empty_ones_are_parts() {
    if !is_under_test() {
        return;
    }
    world(Wire::Ucx, 3, |comm| {
        // Rank 2 exposes nothing, and has no key.
        let me = comm.rank().index();
        let mut memory = vec![me as u8; [10, 70_000, 0][me]];
        let window = comm.window_register(buffer(&mut memory)).expect("register");
        let mut got = vec![9; 70_001];
        for _ in 0..3 {
            get(comm, &window, 1, 10_000, &mut got[..60_000]).expect("get");
            assert!(got[..60_000].iter().all(|byte| *byte == 1));
            for (from, offset, len) in [(0, 8, 3), (1, 0, 70_001), (2, 0, 1), (1, usize::MAX, 2)] {
                let error = get(comm, &window, from, offset, &mut got[..len]).expect_err("it is not there");
                assert!(matches!(error, Error::Usage(_)), "{error}");
            }
        }
        comm.window_deregister(window.id()).expect("deregister");
    });
}

/// Where rank 1 of these tests, which is a process of its own, finds the store.
const STORE: &str = "NCCLX_RS_TEST_REMOTE_READS_STORE";

const LONG: usize = 3 << 20;

fn communicator(rank: u32, store: TcpStore) -> Communicator {
    let hints = vec![("transport".to_owned(), "ucx".to_owned())];
    let (name, timeout) = ("reads".to_owned(), Some(Duration::from_secs(60)));
    Communicator::new(CommOptions { name, rank: Rank(rank), size: 2, store: Arc::new(store), timeout, hints })
        .expect("a communicator")
}

/// Rank 1: has a window, and does nothing until it is killed.
fn target(address: &str) -> ! {
    let comm = communicator(1, TcpStore::connect(address, Duration::from_secs(60)).expect("a store"));
    let mut memory: Vec<u8> = (0..LONG).map(|at| (at % 241) as u8).collect();
    comm.window_register(buffer(&mut memory)).expect("register");
    loop {
        std::thread::park();
    }
}

struct Target(Child);

impl Target {
    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.0.id().to_string()]).status().expect("kill");
        assert!(sent.success());
    }

    fn stop(&self) {
        self.signal("-STOP");
        wait_until_stopped(self.0.id());
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Rank 0 and its window, with rank 1 in the process of the test with this name.
fn with_target(test: &str, memory: &mut [u8]) -> Option<(Communicator, Window, Target)> {
    if !is_under_test() {
        return None;
    }
    if let Ok(address) = std::env::var(STORE) {
        target(&address);
    }
    let store = TcpStore::serve("127.0.0.1:0").expect("a store");
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args(["--exact", &format!("remote_reads::{test}")]).env(STORE, store.address()).stdout(Stdio::null());
    let target = Target(child.spawn().expect("this program"));
    let comm = communicator(0, store);
    let window = comm.window_register(buffer(memory)).expect("register");
    // The stream to it is open after that.
    get(&comm, &window, 1, 0, &mut [0; 8]).expect("get");
    Some((comm, window, target))
}

fn is_there(got: &[u8], offset: usize) -> bool {
    got.iter().enumerate().all(|(at, byte)| *byte == ((offset + at) % 241) as u8)
}

#[test]
fn a_target_that_is_stopped_is_read_all_the_same() {
    let mut memory = vec![0; 8];
    let Some((comm, window, target)) = with_target("a_target_that_is_stopped_is_read_all_the_same", &mut memory) else {
        return;
    };
    let path = if may_read() { GetPath::RemoteReads } else { GetPath::Messages };
    assert_eq!(comm.window_get_path(window.id(), Rank(1)).expect("a path"), path);
    assert_eq!(comm.window_get_path(window.id(), Rank(0)).expect("a path"), GetPath::Mapped);
    target.stop();
    let before = reads(&comm, 1);
    let mut got = vec![0; LONG];
    if may_read() {
        for (offset, len) in [(0, LONG), (5, 1), (1_000_001, 100_000), (LONG - 3, 3)] {
            get(&comm, &window, 1, offset, &mut got[..len]).expect("get");
            assert!(is_there(&got[..len], offset));
            got.fill(0xff);
        }
        assert_eq!(reads(&comm, 1), before + 4);
    } else {
        let kind = OpKind::Get { window: window.id(), from: Rank(1), offset: 0 };
        let timeout = Some(Duration::from_millis(300));
        let answered = comm.submit(Op { timeout, ..op(kind, vec![], vec![buffer(&mut got)]) });
        let error = answered.and_then(|work| work.wait(None)).expect_err("it takes the target").to_string();
        assert!(error.contains("rank 1 did not answer"), "{error}");
    }
    target.signal("-CONT");
    get(&comm, &window, 1, 7, &mut got).expect_err("beyond the end");
    get(&comm, &window, 1, 7, &mut got[..LONG - 7]).expect("get");
    assert!(is_there(&got[..LONG - 7], 7));
}

#[test]
fn a_target_that_is_killed_amid_gets_is_named() {
    let mut memory = vec![0; 8];
    let Some((comm, window, target)) = with_target("a_target_that_is_killed_amid_gets_is_named", &mut memory) else {
        return;
    };
    let error = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut got = vec![vec![0; LONG]; 4];
            loop {
                let works: Vec<_> = got.iter_mut().map(|into| try_get(&comm, &window, 1, 0, into)).collect();
                // All end before their memory goes.
                let ends: Vec<_> = works.into_iter().map(|work| work.and_then(|work| work.wait(None))).collect();
                if let Some(error) = ends.into_iter().find_map(Result::err) {
                    return error;
                }
                assert!(got.iter().all(|got| is_there(got, 0)));
            }
        });
        std::thread::sleep(Duration::from_millis(200)); // amid gets is the subject of the test
        drop(target);
        reader.join().expect("an error")
    });
    assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
}
