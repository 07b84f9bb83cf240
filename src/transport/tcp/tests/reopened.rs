//! Connections of a stream that break and are opened again, through a relay or none.

use std::sync::{Arc, Mutex};

use super::*;
use crate::error::LinkDown;
use crate::transport::RailStats;
use crate::transport::tcp::channel::{Source, TcpRecvStream};

/// What a gate does with those who come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Gate {
    /// Passes them on.
    Open,
    /// Hangs up on them.
    Closed,
    /// Has them wait.
    Waiting,
}

/// A relay with a gate, which gives the ends of each connection that has come: the opener's, and the other if it was passed on.
struct Gated {
    gate: Arc<Mutex<Gate>>,
    come: mpsc::Receiver<(TcpStream, Option<TcpStream>)>,
}

impl Gated {
    /// In front of `port`; the relay's own.
    fn before(port: u16) -> (u16, Gated) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let own = listener.local_addr().unwrap().port();
        let (gate, (tell, come)) = (Arc::new(Mutex::new(Gate::Open)), mpsc::channel());
        let state = gate.clone();
        std::thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                let far = match *state.lock().unwrap() {
                    Gate::Open => Some(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap()),
                    Gate::Waiting => None,
                    Gate::Closed => {
                        near.shutdown(std::net::Shutdown::Both).unwrap();
                        None
                    }
                };
                for (from, to) in far.iter().flat_map(|far| [(&near, far), (far, &near)]) {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    std::thread::spawn(move || {
                        // How it ended is of no interest.
                        let _ = std::io::copy(&mut from, &mut to);
                        to.shutdown(std::net::Shutdown::Both)
                    });
                }
                if tell.send((near, far)).is_err() {
                    return;
                }
            }
        });
        (own, Gated { gate, come })
    }

    fn set(&self, gate: Gate) {
        *self.gate.lock().unwrap() = gate;
    }

    /// The next connection that comes.
    fn next(&self) -> (TcpStream, Option<TcpStream>) {
        self.come.recv_timeout(WATCHDOG).unwrap()
    }
}

/// A stream of two connections that go through a gate.
struct Stream {
    gate: Gated,
    /// The ends of both at the relay.
    ends: Vec<(TcpStream, Option<TcpStream>)>,
    sender: TcpTransport,
    receiver: TcpTransport,
    send_stream: Box<dyn SendStream>,
    recv_stream: Box<dyn RecvStream>,
}

impl Stream {
    fn new(tls: &str) -> Stream {
        let (mut sender, mut receiver) = (transport(0, &config(tls, "2")), transport(1, &config(tls, "2")));
        let mut gate = None;
        let address = through(&receiver, |port| {
            let (own, gated) = Gated::before(port);
            gate = Some(gated);
            own
        });
        let (send_stream, recv_stream) = opened_at(&address, &mut sender, &mut receiver, Detour::Impossible);
        let gate = gate.unwrap();
        let ends = (0..2).map(|_| gate.next()).collect();
        Stream { gate, ends, sender, receiver, send_stream, recv_stream }
    }

    fn stats(&self) -> RailStats {
        self.send_stream.rail_stats().unwrap()
    }

    /// Sends `len` bytes, of which each is checked.
    fn pass(&mut self, len: usize) {
        let payload = content(len);
        assert!(pass(&mut *self.send_stream, &mut *self.recv_stream, &payload, |_| {}) == payload, "{len} bytes");
    }

    /// Ends one of the connections, and looks after the stream until that is noticed, as its user does when it is named.
    fn end(&mut self, place: usize) {
        let before = self.stats().dropped;
        self.ends[place].0.shutdown(std::net::Shutdown::Both).unwrap();
        while self.stats().dropped == before {
            self.send_stream.write(&[], &[]).unwrap();
        }
    }

    /// Has the receiver do what it has to do, until so many connections were opened again. The sender does nothing.
    fn await_reopened(&mut self, count: u64) {
        let begun = Instant::now();
        while self.stats().reopened < count {
            assert!(self.receiver.accept().is_empty(), "it is no stream of its own");
            assert_eq!(self.recv_stream.read(&mut [0; 100]), Ok(0));
            assert!(begun.elapsed() < WATCHDOG, "{:?}", self.stats());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_connection_that_breaks_is_opened_again_and_carries_bytes() {
    for tls in ["off", "on"] {
        let mut stream = Stream::new(tls);
        stream.pass(1 << 20);
        assert_eq!(stream.stats(), RailStats { rails: 2, working: 2, dropped: 0, reopened: 0 });
        // Again and again: one, the other, and the one that has come for the first.
        for (place, count) in [(0, 1), (1, 2), (2, 3)] {
            let before = stream.send_stream.tcp_stats().unwrap().bytes;
            stream.end(place);
            stream.pass(1 << 20);
            stream.await_reopened(count);
            assert_eq!(stream.stats(), RailStats { rails: 2, working: 2, dropped: count, reopened: count });
            let ends = stream.gate.next();
            let far = ends.1.as_ref().unwrap().try_clone().unwrap();
            stream.ends.push(ends);
            let carried = tcp_info::tcp_stats(&far).unwrap().bytes;
            while tcp_info::tcp_stats(&far).unwrap().bytes < carried + (1 << 20) {
                stream.pass(1 << 20);
            }
            // What each has carried counts, once it is acknowledged.
            let begun = Instant::now();
            while stream.send_stream.tcp_stats().unwrap().bytes < before + (2 << 20) {
                assert!(begun.elapsed() < WATCHDOG, "{before} and {}", stream.send_stream.tcp_stats().unwrap().bytes);
            }
        }
    }
}

#[test]
fn while_nothing_leads_there_the_others_go_on_and_it_is_tried_again() {
    let mut stream = Stream::new("off");
    stream.pass(1 << 20);
    // Whoever looks after it has nothing to do any more.
    std::thread::sleep(Duration::from_secs(1));
    stream.gate.set(Gate::Closed);
    stream.end(1);
    // Two attempts in vain.
    let vain = [stream.gate.next(), stream.gate.next()];
    stream.pass(1 << 20);
    assert_eq!(stream.stats(), RailStats { rails: 2, working: 1, dropped: 1, reopened: 0 });
    stream.gate.set(Gate::Open);
    stream.await_reopened(1);
    stream.pass(8 << 20);
    assert_eq!(stream.stats(), RailStats { rails: 2, working: 2, dropped: 1, reopened: 1 });
    drop(vain);
}

/// Reads until the other end is closed.
fn is_closed(mut end: TcpStream) -> bool {
    end.set_read_timeout(Some(WATCHDOG)).unwrap();
    loop {
        match end.read(&mut [0; 100]) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn an_attempt_that_nobody_answers_ends_and_another_follows() {
    let mut stream = Stream::new("off");
    stream.gate.set(Gate::Waiting);
    stream.end(1);
    let (held, _) = stream.gate.next();
    stream.gate.set(Gate::Open);
    stream.pass(1 << 20);
    assert!(is_closed(held));
    stream.await_reopened(1);
    assert_eq!(stream.stats(), RailStats { rails: 2, working: 2, dropped: 1, reopened: 1 });
}

#[test]
fn an_attempt_ends_with_its_stream_and_none_follows() {
    for tls in ["off", "on"] {
        let mut stream = Stream::new(tls);
        stream.gate.set(Gate::Waiting);
        stream.end(0);
        let (held, _) = stream.gate.next();
        let Stream { gate, sender, receiver, send_stream, recv_stream, .. } = stream;
        drop(send_stream);
        assert!(is_closed(held), "TLS {tls}");
        assert!(gate.come.recv_timeout(Duration::from_secs(3)).is_err(), "nobody is left who would use it");
        drop((sender, receiver, recv_stream));
    }
}

#[test]
fn an_attempt_ends_with_the_last_connection_and_none_follows() {
    let mut stream = Stream::new("off");
    stream.gate.set(Gate::Waiting);
    stream.end(0);
    let (held, _) = stream.gate.next();
    stream.ends[1].0.shutdown(std::net::Shutdown::Both).unwrap();
    // The peer is lost as with one connection: at once.
    while stream.send_stream.write(b"bytes", &[]).is_ok() {}
    assert!(stream.send_stream.was_accepted(), "what the peer has sent may be on its way");
    assert!(is_closed(held));
    assert!(stream.gate.come.recv_timeout(Duration::from_secs(3)).is_err(), "the stream has ended");
    assert_eq!(stream.stats(), RailStats { rails: 2, working: 0, dropped: 2, reopened: 0 });
}

#[test]
fn a_stream_whose_last_connection_is_silent_goes_on_by_one_that_is_opened_again() {
    for tls in ["off", "on"] {
        let mut stream = Cuttable::new(tls);
        let payload = content(3_000_000);
        // The one that takes the first piece.
        stream.cut_off(0);
        let (mut sent, mut received, mut piece) = (0, Vec::new(), vec![0; 300_000]);
        let stats = |stream: &Cuttable| stream.send_stream.rail_stats().unwrap();
        let begun = Instant::now();
        while stats(&stream).dropped == 0 {
            let end = payload.len().min(sent + 100_000);
            sent += stream.send_stream.write(&[], &[IoSlice::new(&payload[sent..end.min(1_000_000)])]).unwrap();
            let count = stream.recv_stream.read(&mut piece).unwrap();
            received.extend_from_slice(&piece[..count]);
            assert!(begun.elapsed() < WATCHDOG, "{:?}", stats(&stream));
        }
        stream.cut_off(1);
        while received.len() < payload.len() {
            sent += stream.send_stream.write(&[], &[IoSlice::new(&payload[sent..])]).unwrap();
            assert!(stream.receiver.accept().is_empty(), "it is no stream of its own");
            let count = stream.recv_stream.read(&mut piece).unwrap();
            received.extend_from_slice(&piece[..count]);
            assert!(begun.elapsed() < 2 * WATCHDOG, "{} bytes have come, {:?}", received.len(), stats(&stream));
        }
        assert!(received == payload, "TLS {tls}: the bytes are those that were sent");
    }
}

/// A connection of this rank, which knows the secret if it is of these bytes, and says this.
fn caller(me: u32, secret: u8, receiver: &TcpTransport, greeting: Greeting) -> Connection {
    let targets = [Target { source: None, address: (Ipv4Addr::LOCALHOST, receiver.port).into() }];
    let identity = Identity { comm: [1; 16], me: Rank(me), size: 3, secret: Secret::new([secret; 32]) };
    let poller = Poller::new().unwrap();
    let connection = Connection::begin(identity, None, Rank(1), targets.into(), &poller, receiver.timeout, 2).unwrap();
    connection.with(Some(greeting))
}

/// Whether the receiver takes the connection in. Others may not come by it.
fn joins(mut connection: Connection, stream: &mut Cuttable) -> bool {
    loop {
        assert!(stream.receiver.accept().is_empty(), "it is no stream of its own");
        match connection.drive() {
            Ok(false) => {}
            outcome => return outcome.is_ok(),
        }
    }
}

#[test]
fn a_later_connection_joins_the_stream_of_its_own_rank_alone_and_none_that_has_ended() {
    let mut stream = Cuttable::new("off");
    let greeting = |generation| Greeting { token: [9; 16], rail: 1, rails: 2, generation };
    let join = |stream: &mut Cuttable, me, greeting| joins(caller(me, 5, &stream.receiver, greeting), stream);
    assert!(!join(&mut stream, 2, greeting(1)), "it is another rank's stream");
    assert!(!join(&mut stream, 0, greeting(0)), "it has come");
    assert!(!join(&mut stream, 0, Greeting { rails: 3, ..greeting(1) }), "it has two");
    assert!(!join(&mut stream, 0, Greeting { token: [8; 16], ..greeting(1) }), "there is none");
    // The first connection works, and this end knows of no drop.
    for (generation, joins) in [(3, true), (3, false), (2, false), (4, true)] {
        assert_eq!(join(&mut stream, 0, greeting(generation)), joins, "{generation}");
    }
    assert_eq!(stream.recv_stream.read(&mut [0; 100]), Ok(0), "the stream goes on");
    stream.recv_stream = Box::new(TcpRecvStream::new(NoSource));
    assert!(!join(&mut stream, 0, greeting(5)), "the stream has ended");
}

/// Brings nothing.
struct NoSource;

impl Source for NoSource {
    fn read(&mut self, _into: &mut [u8]) -> Result<usize, LinkDown> {
        Ok(0)
    }

    fn has_more(&mut self) -> bool {
        false
    }
}

#[test]
fn who_does_not_know_the_secret_joins_no_stream() {
    let mut stream = Cuttable::new("off");
    let greeting = Greeting { token: [9; 16], rail: 1, rails: 2, generation: 1 };
    assert!(!joins(caller(0, 6, &stream.receiver, greeting), &mut stream));
    // Nor does one who says the greeting alone.
    let mut plain = TcpStream::connect((Ipv4Addr::LOCALHOST, stream.receiver.port)).unwrap();
    plain.write_all(&greeting.encode()).unwrap();
    plain.write_all(&[0; 200]).unwrap();
    plain.set_nonblocking(true).unwrap();
    loop {
        assert!(stream.receiver.accept().is_empty());
        match plain.read(&mut [0; 100]) {
            Ok(0) => break,
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => break,
            _ => {}
        }
    }
    let payload = content(1 << 20);
    let (send_stream, recv_stream) = (&mut stream.send_stream, &mut *stream.recv_stream);
    assert!(pass(send_stream, recv_stream, &payload, |_| {}) == payload);
    assert_eq!(stream.send_stream.rail_stats(), Some(RailStats { rails: 2, working: 2, dropped: 0, reopened: 0 }));
}
