//! Communicators of two processes over one connection each way.

use super::*;
use crate::error::LinkDown;
use crate::sync::Arc;
use crate::sys::fork::testing::holds_in_a_child;
use crate::transport::Accepted;
use crate::transport::auth::{Membership, PROOF_BYTES};
use crate::transport::handshake::Accepting;
use crate::transport::tcp::lanes::piece::{Kind, PieceHeader, encode_open};
use crate::transport::tcp::lanes::window::WINDOW_BYTES;
use crate::transport::tcp::trunks::{Sharer, Trunks};

const LIMIT: Duration = Duration::from_secs(60);

fn identity(comm: u8, me: u32) -> Identity {
    Identity { comm: [comm; 16], me: Rank(me), size: 3, secret: Secret::new([comm; 32]) }
}

/// What one of two processes has.
struct Process {
    me: u32,
    trunks: Arc<Trunks>,
    tls: &'static str,
}

impl Process {
    fn pair(tls: &'static str) -> [Process; 2] {
        [0, 1].map(|me| Process { me, trunks: Arc::new(Trunks::new().unwrap()), tls })
    }

    /// Its transport of a communicator, which shares connections of this manner.
    fn transport(&self, comm: u8, manner: &str) -> TcpTransport {
        let identity = identity(comm, self.me);
        let plain = transport(self.me, &config("off", "1"));
        let tls = Tls::new(&config(self.tls, "1"), &Secret::new([9; 32])).unwrap();
        let trunks = self.trunks.clone();
        let sharer =
            Sharer::take(trunks, identity.clone(), manner.to_owned(), tls.clone(), &plain.poller, plain.timeout);
        let (sharer, poller) = (sharer.unwrap(), plain.poller.clone());
        let port = sharer.with_listener(|listener| listener.port());
        TcpTransport { identity, tls, poller, port, entry: Entry::Shared(sharer), ..plain }
    }
}

/// Waits until something holds, which does not take long.
fn until(mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < deadline, "it does not come to hold");
        std::thread::yield_now();
    }
}

/// Both processes' transports of communicators, the streams from process 0 to process 1, and what carries them.
struct Lanes {
    processes: [Process; 2],
    near: Vec<TcpTransport>,
    far: Vec<TcpTransport>,
    to: Vec<Box<dyn SendStream>>,
    from: Vec<Box<dyn RecvStream>>,
}

fn lanes(tls: &'static str, count: u8) -> Lanes {
    let processes = Process::pair(tls);
    let [mut near, mut far] =
        processes.each_ref().map(|process| (0..count).map(|comm| process.transport(comm, "one")).collect::<Vec<_>>());
    let opened = near.iter_mut().zip(&mut far).map(|(near, far)| opened(near, far, Detour::Impossible));
    let (to, from) = opened.unzip();
    Lanes { processes, near, far, to, from }
}

impl Lanes {
    /// Writes to a lane, while its reader reads.
    fn send(&mut self, lane: usize, payload: &[u8]) -> Vec<u8> {
        let (to, from) = (&mut self.to[lane], &mut self.from[lane]);
        let (mut sent, mut received, mut part) = (0, Vec::new(), vec![0; 30_000]);
        until(|| {
            sent += to.write(&[], &[IoSlice::new(&payload[sent..])]).unwrap();
            let count = from.read(&mut part).unwrap();
            received.extend_from_slice(&part[..count]);
            received.len() >= payload.len()
        });
        received
    }

    /// Writes to a lane until it takes nothing more, though nobody reads.
    fn fill(&mut self, lane: usize) -> usize {
        let (bytes, mut sent) = ([lane as u8; 10_000], 0);
        for _ in 0..200 {
            sent += self.to[lane].write(&bytes[..8], &[IoSlice::new(&bytes)]).unwrap();
        }
        sent
    }

    /// Reads everything up to the end of a lane, and why it has ended.
    fn drain(&mut self, lane: usize) -> (usize, LinkDown) {
        let (mut received, mut part) = (0, vec![0; 30_000]);
        let deadline = Instant::now() + LIMIT;
        loop {
            match self.from[lane].read(&mut part) {
                Ok(count) => received += count,
                Err(down) => return (received, down),
            }
            // What the kernel has not taken yet.
            self.near[0].look(&mut Vec::new());
            assert!(Instant::now() < deadline, "it does not end");
        }
    }
}

fn pattern(lane: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + lane) as u8).collect()
}

#[test]
fn communicators_share_one_connection_each_way() {
    for tls in ["off", "on"] {
        let mut lanes = lanes(tls, 4);
        // And back.
        let [first, second] = [&mut lanes.far, &mut lanes.near];
        let back: Vec<_> = first
            .iter_mut()
            .zip(second.iter_mut())
            .map(|(far, near)| {
                let (mut to, mut accepted) = (far.open(Rank(0), &near.address(), Detour::Impossible).unwrap(), vec![]);
                until(|| {
                    to.write(&[], &[]).unwrap();
                    accepted.extend(near.accept());
                    !accepted.is_empty() && to.is_open()
                });
                (to, accepted)
            })
            .collect();
        assert_eq!(lanes.processes.each_ref().map(|process| process.trunks.counts()), [(1, 1); 2]);
        for lane in 0..4 {
            let payload = pattern(lane, 3 << 20);
            assert!(lanes.send(lane, &payload) == payload, "lane {lane}");
            let stats = lanes.to[lane].lane_stats().unwrap();
            assert_eq!((stats.lane, stats.lanes), (lane as u32, 4));
        }
        drop(back);
    }
}

#[test]
fn who_does_not_read_stops_nobody() {
    for tls in ["off", "on"] {
        let mut lanes = lanes(tls, 2);
        let stuck = lanes.fill(0);
        assert!(stuck <= WINDOW_BYTES, "{stuck}");
        let payload = pattern(1, 8 << 20);
        assert!(lanes.send(1, &payload) == payload);
        // What waits is still there.
        let more = lanes.send(0, &[7; 100_000]);
        assert_eq!((more.len() >= 100_000, more[..stuck.min(1000)].iter().all(|byte| *byte == 0)), (true, true));
    }
}

#[test]
fn a_lane_that_ends_in_the_middle_leaves_the_others_and_what_it_has_written() {
    for tls in ["off", "on"] {
        let mut lanes = lanes(tls, 3);
        // The kernel takes a part of a piece at some time, since nobody reads.
        let sent = [lanes.fill(0), lanes.fill(1)];
        drop(lanes.to.remove(0));
        let (received, down) = lanes.drain(0);
        assert_eq!((received, down.cause.as_str()), (sent[0], "it closed the connection"));
        lanes.from.remove(0);
        let payload = pattern(2, 2 << 20);
        assert!(lanes.send(1, &payload) == payload);
    }
}

#[test]
fn the_rest_of_a_piece_is_sent_also_if_its_lane_has_ended() {
    let mut lanes = lanes("off", 40);
    let mut sent = Vec::new();
    // More than the kernels take.
    while !lanes.near[0].holds_bytes() {
        sent.push(lanes.fill(sent.len()));
    }
    sent.iter().for_each(|_| drop(lanes.to.remove(0)));
    for (lane, sent) in sent.iter().enumerate() {
        assert_eq!(lanes.drain(lane).0, *sent, "lane {lane}");
    }
    let (to, from) = (&mut lanes.to[0], &mut lanes.from[sent.len()]);
    until(|| to.write(b"more", &[]).unwrap() == 4);
    until(|| from.peek().unwrap() == b"more");
    let near = &lanes.near[0];
    until(|| {
        to.write(&[], &[]).unwrap();
        !near.holds_bytes()
    });
}

#[test]
fn a_reader_that_ends_is_told_to_its_writer_alone() {
    let mut lanes = lanes("off", 2);
    let sent = lanes.fill(0);
    assert!(sent > 0);
    drop(lanes.from.remove(0));
    let mut down = None;
    until(|| {
        down = lanes.to[0].write(&[], &[]).err();
        down.is_some()
    });
    assert_eq!(down.unwrap().cause, "it closed the connection");
    lanes.to.remove(0);
    let payload = pattern(1, 1 << 20);
    assert!(lanes.send(0, &payload) == payload);
}

#[test]
fn who_reads_its_own_to_the_end_leaves_nothing_behind_that_no_poller_tells_of() {
    // A record of TLS, and several.
    for len in [12_000, 40_000] {
        let mut lanes = lanes("on", 2);
        until(|| lanes.from.iter_mut().all(|from| !from.arm()));
        lanes.from[0].disarm();
        let payload = pattern(0, len);
        assert_eq!(lanes.to[0].write(&[], &[IoSlice::new(&payload)]), Ok(len));
        assert_eq!(lanes.to[1].write(b"also", &[]), Ok(4));
        // Until all of it has come.
        std::thread::sleep(Duration::from_millis(50));
        let (mut into, mut read) = (vec![0; len], 0);
        until(|| {
            read += lanes.from[0].read(&mut into[read..]).unwrap();
            read == len
        });
        assert!(into == payload);
        let mut named = Vec::new();
        lanes.far[1].look(&mut named);
        assert_eq!(named, [StreamName::From(Rank(0))], "{len}");
        assert_eq!(lanes.from[1].peek(), Ok(&b"also"[..]));
    }
}

#[test]
fn what_another_communicator_takes_out_wakes_those_whom_it_is_for() {
    for tls in ["off", "on"] {
        let mut lanes = lanes(tls, 2);
        let names = |transport: &mut TcpTransport| {
            let mut named = Vec::new();
            transport.look(&mut named);
            named
        };
        until(|| lanes.from.iter_mut().all(|from| !from.arm()));
        lanes.far.iter_mut().chain(&mut lanes.near).for_each(|transport| _ = names(transport));
        // What has woken it before does so no more.
        lanes.far[0].poller.wait(Some(Duration::ZERO)).unwrap();
        assert!(!lanes.far[0].arm(), "it may sleep");
        assert_eq!(lanes.to[0].write(b"wake", &[]), Ok(4));
        // The second communicator's thread is the one that looks.
        until(|| {
            assert_eq!(names(&mut lanes.far[1]), []);
            lanes.far[0].arm()
        });
        let begin = Instant::now();
        lanes.far[0].poller.wait(Some(LIMIT)).unwrap();
        assert!(begin.elapsed() < LIMIT, "nobody has woken it");
        assert_eq!(names(&mut lanes.far[0]), [StreamName::From(Rank(0))]);
        assert_eq!(lanes.from[0].peek(), Ok(&b"wake"[..]));
        // The same for room.
        let sent = lanes.fill(0);
        assert!(sent > 0 && !lanes.to[0].arm(), "there is no room");
        let mut part = vec![0; 30_000];
        until(|| {
            lanes.from[0].read(&mut part).unwrap();
            assert_eq!(names(&mut lanes.near[1]), []);
            lanes.near[0].arm()
        });
        assert_eq!(names(&mut lanes.near[0]), [StreamName::To(Rank(1))]);
        assert!(lanes.to[0].arm(), "there is room now");
    }
}

#[test]
fn who_waits_for_another_lanes_piece_to_leave_is_told_once_it_has() {
    let mut lanes = lanes("off", 40);
    let full = (0..38).find(|lane| {
        lanes.fill(*lane);
        lanes.near[0].holds_bytes()
    });
    let full = full.expect("the kernel takes less than that");
    lanes.near.iter_mut().for_each(|near| _ = near.look(&mut Vec::new()));
    assert_eq!((lanes.to[39].write(b"wait", &[]), lanes.to[39].arm()), (Ok(0), false));
    let (mut part, mut named) = (vec![0; 100_000], Vec::new());
    until(|| {
        (0..=full).for_each(|lane| _ = lanes.from[lane].read(&mut part).unwrap());
        lanes.near[38].look(&mut Vec::new());
        lanes.near[39].arm()
    });
    lanes.near[39].look(&mut named);
    assert_eq!(named, [StreamName::To(Rank(1))]);
    assert_eq!(lanes.to[39].write(b"wait", &[]), Ok(4));
}

#[test]
fn a_communicator_wakes_for_what_comes_to_any_connection() {
    let mut lanes = lanes("off", 1);
    until(|| !lanes.from[0].arm());
    lanes.far[0].look(&mut Vec::new());
    let poller = lanes.far[0].poller.clone();
    while !names(&poller).is_empty() {
        lanes.far[0].look(&mut Vec::new());
    }
    let sleeper = std::thread::spawn(move || poller.wait(Some(LIMIT)).map(|()| Instant::now()));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(lanes.to[0].write(b"wake", &[]), Ok(4));
    sleeper.join().unwrap().unwrap();
    let mut named = Vec::new();
    until(|| {
        lanes.far[0].look(&mut named);
        !named.is_empty()
    });
    assert_eq!(named, [StreamName::From(Rank(0))]);
}

/// A stream from the first to the second, which may not share connections; whether it does.
fn shares(near: &mut TcpTransport, far: &mut TcpTransport) -> bool {
    let (mut to, mut from) = opened(near, far, Detour::Impossible);
    until(|| to.write(b"hello", &[]).unwrap() == 5);
    until(|| from.peek().unwrap() == b"hello");
    to.lane_stats().is_some()
}

#[test]
fn of_ranks_with_different_settings_each_pair_finds_a_way() {
    let [near, far] = Process::pair("off");
    let [mut sharing, mut other] = [near.transport(5, "one"), far.transport(5, "one")];
    assert!(shares(&mut sharing, &mut other));
    let mut plain = transport(0, &config("off", "1"));
    plain.identity = identity(5, 2);
    assert!(!shares(&mut plain, &mut other), "the opener has none");
    let mut plain = transport(1, &config("off", "1"));
    let mut sharing = near.transport(1, "one");
    sharing.identity.secret = Secret::new([5; 32]);
    let connection = sharing.open(Rank(1), &plain.address(), Detour::Impossible).unwrap();
    assert!(connection.lane_stats().is_none(), "the acceptor has none");
    drop((connection, plain.accept()));
    let mut rails = transport(2, &config("off", "3"));
    rails.identity = identity(5, 2);
    assert!(!shares(&mut rails, &mut other), "a stream of several connections is not shared");
}

#[test]
fn a_communicator_whose_manner_differs_at_either_end_shares_another_connection() {
    let [near, far] = Process::pair("off");
    let manners = [("one", "one"), ("one", "two"), ("two", "one"), ("one", "one"), ("one", "two")];
    let open = |(comm, (ours, theirs)): (usize, (&str, &str))| {
        let [mut a, mut b] = [near.transport(comm as u8, ours), far.transport(comm as u8, theirs)];
        let streams = opened(&mut a, &mut b, Detour::Impossible);
        (a, b, streams)
    };
    let opened: Vec<_> = manners.into_iter().enumerate().map(open).collect();
    let connections: Vec<_> = opened.iter().map(|(_, _, (to, _))| to.lane_stats().unwrap().connection).collect();
    assert_eq!(connections, [0, 1, 2, 0, 1]);
}

#[test]
fn a_communicator_that_has_ended_takes_no_lane() {
    let [near, far] = Process::pair("off");
    let [mut a, mut b] = [near.transport(1, "one"), far.transport(1, "one")];
    let _kept = opened(&mut a, &mut b, Detour::Impossible);
    let [mut c, d] = [near.transport(2, "one"), far.transport(2, "one")];
    let address = d.address();
    drop(d);
    let mut to = c.open(Rank(1), &address, Detour::Impossible).unwrap();
    let mut down = None;
    until(|| {
        b.look(&mut Vec::new());
        down = to.write(&[], &[]).err();
        down.is_some()
    });
    let down = down.unwrap();
    assert_eq!((down.kind, down.cause.as_str()), (Down::Refused, "it has left the communicator"));
}

#[test]
fn numbers_of_lanes_are_given_once_and_then_another_connection_is_opened() {
    let [near, far] = Process::pair("off");
    let open = |comm| {
        let [mut a, mut b] = [near.transport(comm, "one"), far.transport(comm, "one")];
        let streams = opened(&mut a, &mut b, Detour::Impossible);
        let stats = streams.0.lane_stats().unwrap();
        (stats.connection, stats.lane, (a, b, streams))
    };
    let (first, lane, _kept) = open(1);
    assert_eq!(lane, 0);
    near.trunks.writer(first).unwrap().skip_to(u32::MAX);
    let (last, lane, _also) = open(2);
    assert_eq!((last, lane), (first, u32::MAX));
    let (other, lane, _third) = open(3);
    assert!(other != first && lane == 0);
    assert_eq!(near.trunks.counts().0, 2);
}

#[test]
fn the_last_lane_takes_the_connection_with_it_and_loses_no_byte() {
    let mut lanes = lanes("off", 2);
    let sent = [lanes.fill(0), lanes.fill(1)];
    lanes.to.clear();
    assert_eq!(lanes.processes[0].trunks.counts().0, 0);
    for (lane, sent) in sent.into_iter().enumerate() {
        // Slowly, so that credit comes back to a connection that is over.
        std::thread::sleep(Duration::from_millis(20));
        let (received, down) = lanes.drain(lane);
        assert_eq!((received, down.cause.as_str()), (sent, "it closed the connection"));
    }
    until(|| {
        lanes.far[0].look(&mut Vec::new());
        lanes.processes[1].trunks.counts().1 == 0
    });
    // The next one opens another.
    let [near, far] = [lanes.processes[0].transport(9, "one"), lanes.processes[1].transport(9, "one")];
    assert!(shares(&mut { near }, &mut { far }));
}

#[test]
fn the_last_bytes_leave_also_where_no_thread_can_wait_for_that() {
    let mut lanes = lanes("off", 2);
    let sent = [lanes.fill(0), lanes.fill(1)];
    let from = std::mem::take(&mut lanes.from);
    let (tell, told) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        told.recv().unwrap();
        let read = |mut from: Box<dyn RecvStream>| {
            let (mut received, mut part) = (0, vec![0; 30_000]);
            while let Ok(count) = from.read(&mut part) {
                received += count;
            }
            received
        };
        from.into_iter().map(read).collect::<Vec<_>>()
    });
    tell.send(()).unwrap();
    without_threads(|| lanes.to.clear());
    assert_eq!(reader.join().unwrap(), sent);
}

#[test]
fn credit_that_can_no_longer_be_told_loses_nothing_that_was_sent() {
    for tls in ["off", "on"] {
        let mut lanes = lanes(tls, 2);
        // What is of the first lane goes to its window, what is of the second stays with the kernel.
        let sent = lanes.fill(0);
        until(|| {
            lanes.far[0].look(&mut Vec::new());
            lanes.to[0].flushed().unwrap()
        });
        assert_eq!(lanes.to[1].write(&[1; 60_000], &[]), Ok(60_000));
        until(|| lanes.to[1].flushed().unwrap());
        lanes.to.clear();
        // Until the connection is closed, so that to tell that the first lane's bytes are taken is refused.
        std::thread::sleep(Duration::from_millis(300));
        for (lane, sent) in [(0, sent), (1, 60_000)] {
            let (received, down) = lanes.drain(lane);
            assert_eq!((received, down.cause.as_str()), (sent, "it closed the connection"), "TLS {tls}, lane {lane}");
        }
    }
}

#[test]
fn a_connection_of_its_own_keeps_no_other_communicator_awake() {
    let [_, far] = Process::pair("off");
    let (mut one, mut other) = (far.transport(5, "one"), far.transport(6, "one"));
    let mut plain = transport(0, &config("off", "1"));
    plain.identity = identity(5, 2);
    let mut to = plain.open(Rank(1), &one.address(), Detour::Impossible).unwrap();
    // The other communicator takes it in for the one that it is of, which does nothing.
    until(|| {
        other.look(&mut Vec::new());
        to.write(&[], &[]).unwrap();
        to.is_open()
    });
    assert_eq!(to.write(b"hello", &[]), Ok(5));
    // A thread that is not woken sleeps for as long as it may, again and again.
    let mut slept = 0;
    until(|| {
        other.look(&mut Vec::new());
        let begun = Instant::now();
        other.poller.wait(Some(Duration::from_millis(20))).unwrap();
        slept = if begun.elapsed() >= Duration::from_millis(20) { slept + 1 } else { 0 };
        slept == 10
    });
    let (from, mut stream) = one.accept().pop().unwrap();
    until(|| stream.peek().unwrap() == b"hello");
    assert_eq!(from, Rank(2));
}

#[test]
fn a_communicator_looks_after_the_listeners_of_those_that_do_nothing() {
    let [_, process] = Process::pair("off");
    let (idle, mut busy) = (process.transport(0, "one"), process.transport(1, "one"));
    assert_eq!(busy.accepting_until(), None);
    // As many as leave no room: they have less time.
    let connect = |_| std::net::TcpStream::connect(("127.0.0.1", idle.port)).expect("it listens");
    let strangers: Vec<_> = (0..128).map(connect).collect();
    until(|| busy.accept().is_empty() && busy.accepting_until().is_some());
    until(|| {
        // They are idle, and nothing wakes whoever sleeps longer.
        std::thread::sleep(busy.accepting_until().map_or(LIMIT, |until| until - Instant::now()));
        assert!(busy.accept().is_empty());
        strangers.iter().any(|mut stranger| {
            stranger.set_nonblocking(true).expect("a mode");
            // Behind what it was greeted by.
            stranger.read_to_end(&mut Vec::new()).is_ok()
        })
    });
    drop(strangers);
    until(|| busy.accept().is_empty() && busy.accepting_until().is_none());
}

#[test]
fn a_listener_that_ends_while_a_connection_is_opened_is_refused_to_lanes() {
    let [near, far] = Process::pair("off");
    let [mut a, mut b] = [1, 2].map(|comm| near.transport(comm, "one"));
    let [passing, mut staying] = [1, 2].map(|comm| far.transport(comm, "one"));
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    // One that takes the connection, and hangs up before it has said that it is shared.
    let mut address = Address::parse(&passing.address()).unwrap();
    address.port = listener.local_addr().unwrap().port();
    let mut lanes = [(&mut a, address.encode()), (&mut b, staying.address())]
        .map(|(transport, address)| transport.open(Rank(1), &address, Detour::Impossible).unwrap());
    let mut acceptor = Accepting::new(identity(1, 1));
    let (mut caller, _) = listener.accept().unwrap();
    caller.set_nonblocking(true).unwrap();
    let mut greeting = Vec::new();
    until(|| {
        let _ = lanes[0].write(&[], &[]).unwrap();
        let has_proved = acceptor.drive(&mut caller).unwrap().is_some();
        let mut part = [0; 100];
        if has_proved && let Ok(count) = std::io::Read::read(&mut caller, &mut part) {
            greeting.extend_from_slice(&part[..count]);
        }
        !greeting.is_empty()
    });
    drop(caller);
    for lane in &mut lanes {
        let mut down = None;
        until(|| {
            down = lane.write(&[], &[]).err();
            down.is_some()
        });
        assert_eq!(down.map(|down| down.kind), Some(Down::Refused), "another connection may be opened");
    }
    assert!(shares(&mut b, &mut staying));
}

#[test]
fn a_lane_that_nobody_has_begun_to_read_outlives_its_connection() {
    let [near, far] = Process::pair("off");
    let [mut a, mut b] = [near.transport(1, "one"), far.transport(1, "one")];
    let mut to = a.open(Rank(1), &b.address(), Detour::Impossible).unwrap();
    until(|| {
        to.write(&[], &[]).unwrap();
        b.look(&mut Vec::new());
        to.is_open()
    });
    assert_eq!(to.write(b"last words", &[]), Ok(10));
    drop(to);
    // All that there is of it, its end included.
    for _ in 0..100 {
        b.look(&mut Vec::new());
        std::thread::sleep(Duration::from_millis(1));
    }
    let (_, mut from) = b.accept().pop().unwrap();
    assert_eq!(from.peek(), Ok(&b"last words"[..]));
    from.consume(10);
    assert_eq!(from.peek().unwrap_err().cause, "it closed the connection");
    assert_eq!(far.trunks.counts().1, 0);
}

#[test]
fn what_was_flushed_has_left_this_process() {
    for tls in ["off", "on"] {
        let mut lanes = lanes(tls, 2);
        lanes.fill(0);
        let (to, from) = (&mut lanes.to[0], &mut lanes.from[1]);
        until(|| {
            from.read(&mut [0; 100]).unwrap();
            to.flushed().unwrap()
        });
        assert!(!lanes.near[0].holds_bytes());
    }
}

#[test]
fn what_others_have_not_sent_yet_keeps_no_lane_from_being_flushed() {
    let mut lanes = lanes("off", 7);
    assert_eq!(lanes.to[0].write(b"last", &[]), Ok(4));
    // More than the kernels take, while nobody reads.
    let mut last = 0;
    for lane in 1..7 {
        if lanes.fill(lane) > 0 {
            last = lane;
        }
    }
    until(|| lanes.to[0].flushed().unwrap());
    assert_eq!(lanes.to[last].flushed(), Ok(false));
}

#[test]
fn a_process_that_is_gone_is_gone_for_every_lane() {
    let mut lanes = lanes("off", 3);
    let Lanes { processes: [near, far], near: transports, to, from, far: others } = &mut lanes;
    from.iter_mut().for_each(|from| until(|| !from.arm()));
    // As the system ends it: nothing is said of any lane.
    near.trunks.cut();
    for lane in 0..3 {
        let mut named = Vec::new();
        until(|| {
            others[lane].look(&mut named);
            named.contains(&StreamName::From(Rank(0)))
        });
        assert!(from[lane].peek().is_err());
        assert!(to[lane].write(b"more", &[]).is_err());
        let mut named = Vec::new();
        transports[lane].look(&mut named);
        assert!(named.contains(&StreamName::To(Rank(1))));
    }
    assert_eq!(far.trunks.counts().1, 0);
}

/// A connection to a communicator that shares, whose opener says what it likes, and what both ends have in common.
struct Hostile {
    connection: Connection,
    process: Process,
    receiver: TcpTransport,
    accepted: Vec<Accepted>,
}

impl Hostile {
    fn new() -> Hostile {
        let [_, process] = Process::pair("off");
        let mut receiver = process.transport(1, "one");
        let targets = Address::targets(&receiver.address()).unwrap();
        let (poller, timeout) = (Poller::new().unwrap(), PeerTimeout::Always(LIMIT));
        let connection = Connection::begin(identity(1, 0), None, Rank(1), targets, &poller, timeout, 1).unwrap();
        let mut connection = connection.with(Some(Greeting::TRUNK));
        until(|| {
            receiver.accept();
            connection.drive().unwrap()
        });
        Hostile { connection, process, receiver, accepted: Vec::new() }
    }

    fn say(&mut self, lane: u32, kind: Kind, body: &[u8]) {
        let piece = [&PieceHeader { lane, kind, len: body.len() }.encode(), body].concat();
        assert_eq!(self.connection.put(&piece), Ok(piece.len()));
    }

    /// Opens a lane as `from`, with this proof or the right one.
    fn open(&mut self, lane: u32, from: u32, proof: Option<[u8; PROOF_BYTES]>) {
        let membership = Membership { comm: [1; 16], from: Rank(from), to: Rank(1) };
        let right = membership.prove(&Secret::new([1; 32]), &self.connection.session().unwrap());
        self.say(lane, Kind::Open, &encode_open(&membership, &proof.unwrap_or(right)));
        for _ in 0..3 {
            self.accepted.extend(self.receiver.accept());
            self.receiver.look(&mut Vec::new());
        }
        self.accepted.extend(self.receiver.accept());
    }

    /// Whether the connection is ended, and why as its first lane tells.
    fn end(mut self) -> Option<String> {
        until(|| {
            self.receiver.look(&mut Vec::new());
            self.connection.get(&mut [0; 100]).is_err()
        });
        let from = self.accepted.first_mut().map(|(_, from)| from)?;
        let mut buffer = vec![0; WINDOW_BYTES];
        loop {
            if let Err(down) = from.read(&mut buffer) {
                return Some(down.cause);
            }
        }
    }
}

#[test]
fn a_peer_that_says_what_it_must_not_is_hung_up_on_with_the_cause() {
    let expect = |cause: &str, say: &dyn Fn(&mut Hostile)| {
        let mut hostile = Hostile::new();
        hostile.open(0, 0, None);
        until(|| {
            hostile.receiver.look(&mut Vec::new());
            hostile.accepted.extend(hostile.receiver.accept());
            !hostile.accepted.is_empty()
        });
        say(&mut hostile);
        let found = hostile.end().unwrap();
        assert!(found.contains(cause), "{found}");
    };
    expect("it wrote to lane 7, which it has not opened", &|hostile| hostile.say(7, Kind::Data, b"x"));
    expect("it wrote to lane 7, which it has not opened", &|hostile| hostile.say(7, Kind::End, &[]));
    expect("it opened lane 0 twice", &|hostile| hostile.open(0, 0, None));
    expect("the other side does not know the job's secret", &|hostile| hostile.open(1, 0, Some([0; PROOF_BYTES])));
    expect("it opened a stream as rank 3 of 3", &|hostile| hostile.open(1, 3, None));
    expect("it opened a stream as rank 1 of 3", &|hostile| hostile.open(1, 1, None));
    let process = |hostile: &Hostile| hostile.process.trunks.clone();
    expect("a connection that communicators with other settings share", &|hostile| {
        let sharer = Process { me: 1, trunks: process(hostile), tls: "off" }.transport(2, "two");
        let membership = Membership { comm: [2; 16], from: Rank(0), to: Rank(1) };
        let proof = membership.prove(&Secret::new([2; 32]), &hostile.connection.session().unwrap());
        hostile.say(1, Kind::Open, &encode_open(&membership, &proof));
        until(|| {
            hostile.receiver.look(&mut Vec::new());
            hostile.accepted[0].1.peek().is_err()
        });
        drop(sharer);
    });
    expect("it said Credit(1) of lane 0", &|hostile| hostile.say(0, Kind::Credit, &1u32.to_le_bytes()));
    expect("it wrote to lane 1, which it has not opened or has ended", &|hostile| {
        hostile.open(1, 0, None);
        hostile.say(1, Kind::End, &[]);
        hostile.say(1, Kind::Data, b"x");
    });
    expect("bytes of a lane that were not taken", &|hostile| {
        let mut sent = 0;
        while sent <= WINDOW_BYTES {
            let piece = [&PieceHeader { lane: 0, kind: Kind::Data, len: 1000 }.encode()[..], &[0; 1000]].concat();
            let mut put = 0;
            until(|| {
                hostile.receiver.look(&mut Vec::new());
                put += hostile.connection.put(&piece[put..]).unwrap_or(piece.len());
                put >= piece.len()
            });
            sent += 1000;
        }
    });
}

#[test]
fn a_forked_child_leaves_its_parents_lanes_alone() {
    let mut lanes = lanes("off", 2);
    assert!(holds_in_a_child(|| {
        // What the child has of them is dropped, as at its exit.
        lanes.to.clear();
        lanes.from.clear();
        lanes.near.clear();
        lanes.far.clear();
        Trunks::of_process().is_ok()
    }));
    for lane in 0..2 {
        let payload = pattern(lane, 1 << 20);
        assert!(lanes.send(lane, &payload) == payload);
    }
}
