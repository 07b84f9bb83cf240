//! A stream through a relay that overhears it.

mod crowded;
mod reopened;
mod shared;
mod tended;

use std::io::{IoSlice, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::connect::Connection;
use super::greeting::{Caller, Greeting};
use super::paths::Target;
use super::rail_send::{RailSendStream, SendRails};
use super::reopening::Opener;
use super::{Address, Entry, TcpTransport};
use crate::config::Config;
use crate::error::Down;
use crate::sync::testing::without_threads;
use crate::sys::net::Interface;
use crate::sys::poller::{Poller, StreamName};
use crate::sys::socket::PeerTimeout;
use crate::sys::tcp_info::{self, UnderWay};
use crate::transport::auth::{Identity, Secret};
use crate::transport::pending::Proved;
use crate::transport::testing::{names, opened, opened_at};
use crate::transport::tls::Tls;
use crate::transport::{Detour, RecvStream, SendStream, Transport};
use crate::types::Rank;

impl TcpTransport {
    /// The connections that have come and proved themselves.
    fn proved(&mut self) -> Vec<Proved<Caller, Option<Greeting>>> {
        match &mut self.entry {
            Entry::Own(listener) => listener.proved(),
            Entry::Shared(_) => panic!("it shares connections"),
        }
    }
}

/// Passes one connection on to `port`, and tells what its opener has said.
fn relay(port: u16) -> (u16, JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let own = listener.local_addr().unwrap().port();
    let overheard = std::thread::spawn(move || {
        let (mut near, _) = listener.accept().unwrap();
        let mut far = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        let (mut back_from, mut back_to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
        let back = std::thread::spawn(move || std::io::copy(&mut back_from, &mut back_to).map(|_| ()));
        let (mut said, mut piece) = (Vec::new(), [0; 4096]);
        while let Ok(count @ 1..) = near.read(&mut piece) {
            said.extend_from_slice(&piece[..count]);
            if far.write_all(&piece[..count]).is_err() {
                break;
            }
        }
        drop((near, far));
        // How the way back ended is of no interest.
        let _ = back.join();
        said
    });
    (own, overheard)
}

/// The address of a rank behind a relay, which is made for the rank's port and tells its own.
fn through(receiver: &TcpTransport, relay: impl FnOnce(u16) -> u16) -> Vec<u8> {
    let mut address = Address::parse(&receiver.address()).unwrap();
    address.port = relay(address.port);
    address.encode()
}

/// The transport of one rank of two.
fn transport(me: u32, config: &Config) -> TcpTransport {
    let secret = Secret::new([5; 32]);
    let tls = Tls::new(config, &secret).unwrap();
    let identity = Identity { comm: [1; 16], me: Rank(me), size: 3, secret };
    let timeout = PeerTimeout::Always(Duration::from_secs(60));
    let own = Interface { name: "lo".to_owned(), address: Ipv4Addr::LOCALHOST.into(), prefix: 8, up: true };
    TcpTransport::new(identity, tls, Poller::new().unwrap(), vec![own], config.tcp_streams, timeout, None).unwrap()
}

/// Sends `payload` from one rank to another, of which nobody reads before no more can be written; what a relay overhears.
fn overhear(tls: &str, payload: &[u8]) -> Vec<u8> {
    let config = Config::resolve_with(&|_| None, &[("tls".to_owned(), tls.to_owned())]).unwrap();
    let (mut sender, mut receiver) = (transport(0, &config), transport(1, &config));
    let Address { port: own, .. } = Address::parse(&receiver.address()).unwrap();
    let mut unauthenticated = TcpStream::connect((Ipv4Addr::LOCALHOST, own)).unwrap();
    unauthenticated.write_all(&[b'G'; 1000]).unwrap();
    let (port, overheard) = relay(own);
    let mut send_stream = sender.open(Rank(1), &through(&receiver, |_| port), Detour::Impossible).unwrap();

    let (mut accepted, mut sent, mut vain) = (Vec::new(), 0, 0);
    // Until the relay, too, has no room for more.
    while vain < 100 {
        accepted.extend(receiver.accept());
        let count = send_stream.write(&[], &[IoSlice::new(&payload[sent..])]).unwrap();
        sent += count;
        vain = if sent > 0 && count == 0 { vain + 1 } else { 0 };
        std::thread::sleep(Duration::from_millis(u64::from(vain > 0)));
    }
    let plain = tls == "off";
    assert_eq!((send_stream.is_open(), send_stream.flushed()), (plain, Ok(plain)), "TLS keeps what is left");
    assert!(send_stream.was_accepted());

    let (mut received, mut piece) = (Vec::new(), vec![0; 100_000]);
    while received.len() < payload.len() {
        accepted.extend(receiver.accept());
        let rest = [IoSlice::new(&payload[sent..])];
        sent += send_stream.write(&[], &rest[..usize::from(sent < payload.len())]).unwrap();
        if let Some((from, recv_stream)) = accepted.first_mut() {
            assert_eq!(*from, Rank(0));
            let count = recv_stream.read(&mut piece).unwrap();
            received.extend_from_slice(&piece[..count]);
        }
        std::thread::yield_now();
    }
    assert!(received == payload, "the bytes are those that were sent");
    assert_eq!((send_stream.is_open(), send_stream.flushed()), (true, Ok(true)));
    // The unauthenticated is hung up on.
    let _ = unauthenticated.read_to_end(&mut Vec::new());
    drop((send_stream, accepted));
    overheard.join().unwrap()
}

#[test]
fn a_listener_on_the_wire_reads_messages_without_tls_alone() {
    let text = b"the quick brown fox jumps over the lazy dog; ";
    let payload = text.repeat((32 << 20) / text.len());
    let hears = |tls| overhear(tls, &payload).windows(text.len()).any(|heard| heard == text);
    assert!(hears("off"));
    assert!(!hears("on"));
}

/// TLS, and how many connections a stream has.
const WAYS: [(&str, &str); 4] = [("off", "1"), ("on", "1"), ("off", "3"), ("on", "3")];

fn config(tls: &str, streams: &str) -> Config {
    let hints = [("tls", tls), ("tcp_streams", streams)].map(|(name, value)| (name.to_owned(), value.to_owned()));
    Config::resolve_with(&|_| None, &hints).unwrap()
}

/// The transports of two ranks, and a stream from rank 0 to rank 1.
fn stream(tls: &str, streams: &str) -> ([TcpTransport; 2], Box<dyn SendStream>, Box<dyn RecvStream>) {
    let config = config(tls, streams);
    let (mut sender, mut receiver) = (transport(0, &config), transport(1, &config));
    let (send_stream, recv_stream) = opened(&mut sender, &mut receiver, Detour::Impossible);
    ([sender, receiver], send_stream, recv_stream)
}

#[test]
fn an_armed_stream_is_named_once_bytes_have_come_or_its_end() {
    for (tls, streams) in WAYS {
        let ([_sender, receiver], mut send_stream, mut recv_stream) = stream(tls, streams);
        for letter in [b"a", b"b"] {
            // TLS may have something to say of its own first.
            while !names(&receiver.poller).is_empty() || recv_stream.arm() {
                assert!(recv_stream.peek().unwrap().is_empty());
            }
            assert_eq!(send_stream.write(letter, &[]).unwrap(), 1);
            while names(&receiver.poller) != [StreamName::From(Rank(0))] {}
            recv_stream.disarm();
            while recv_stream.peek().unwrap().is_empty() {}
            assert_eq!(recv_stream.peek().unwrap(), letter);
            recv_stream.consume(1);
        }
        drop(send_stream);
        while !names(&receiver.poller).contains(&StreamName::From(Rank(0))) {}
        while recv_stream.peek().is_ok() {}
    }
}

#[test]
fn bytes_that_were_read_from_the_socket_and_not_consumed_keep_a_stream_from_being_armed() {
    let (_transports, mut send_stream, mut recv_stream) = stream("off", "1");
    assert_eq!(send_stream.write(b"onetwo", &[]).unwrap(), 6);
    while recv_stream.peek().unwrap().len() < 6 {}
    recv_stream.consume(3);
    assert!(recv_stream.arm(), "the socket no longer has them");
    assert_eq!(recv_stream.peek().unwrap(), b"two");
}

#[test]
fn a_stream_is_not_armed_while_tls_holds_what_was_read() {
    for streams in ["1", "3"] {
        let (transports, mut send_stream, mut recv_stream) = stream("on", streams);
        let payload = content(100_000);
        let (mut sent, mut received) = (0, Vec::new());
        while received.len() < payload.len() {
            sent += send_stream.write(&[], &[IoSlice::new(&payload[sent..])]).unwrap();
            let mut piece = [0; 100];
            let count = recv_stream.read(&mut piece).unwrap();
            received.extend_from_slice(&piece[..count]);
            let is_armed = !recv_stream.arm();
            recv_stream.disarm();
            // What is armed and has more to bring is named sooner or later.
            if is_armed && received.len() < payload.len() && sent == payload.len() {
                while names(&transports[1].poller).is_empty() {
                    send_stream.write(&[], &[]).unwrap();
                }
            }
        }
        assert!(received == payload, "{streams} connections");
    }
}

#[test]
fn a_stream_that_was_armed_without_room_is_named_once_there_is_some() {
    for tls in ["off", "on"] {
        let ([sender, _receiver], mut send_stream, mut recv_stream) = stream(tls, "1");
        let (payload, mut piece) = (vec![7; 1 << 20], vec![0; 1 << 20]);
        let mut sent = 0;
        loop {
            match send_stream.write(&[], &[IoSlice::new(&payload)]).unwrap() {
                0 => break,
                count => sent += count,
            }
        }
        assert!(!send_stream.arm());
        assert_eq!(names(&sender.poller), [], "TLS {tls}: nobody has read");
        assert_eq!(sender.holds_bytes(), tls == "on");
        let mut received = 0;
        while names(&sender.poller) != [StreamName::To(Rank(1))] {
            received += recv_stream.read(&mut piece).unwrap();
        }
        while send_stream.flushed() != Ok(true) || received < sent {
            received += recv_stream.read(&mut piece).unwrap();
        }
        send_stream.disarm();
        assert_eq!((names(&sender.poller), sender.holds_bytes()), (vec![], false), "TLS {tls}: nothing waits any more");
        assert!(send_stream.write(&[], &[IoSlice::new(&payload)]).unwrap() > 0);
    }
}

#[test]
fn what_was_sent_before_the_end_is_shown_until_it_is_consumed() {
    for (tls, streams) in WAYS {
        let (_transports, mut send_stream, mut recv_stream) = stream(tls, streams);
        assert_eq!(send_stream.write(b"onetwo", &[]).unwrap(), 6);
        drop(send_stream);
        while recv_stream.end().is_none() {
            recv_stream.peek().unwrap();
        }
        for rest in [b"onetwo".as_slice(), b"two"] {
            assert_eq!(recv_stream.peek().unwrap(), rest, "TLS {tls}");
            assert_eq!(recv_stream.peek().unwrap(), rest, "TLS {tls}: to look takes nothing away");
            recv_stream.consume(3);
        }
        assert_eq!(recv_stream.peek().unwrap_err(), recv_stream.end().unwrap(), "TLS {tls}");
    }
}

/// The bytes of a stream, no two parts of which are alike.
fn content(len: usize) -> Vec<u8> {
    (0..len).map(|place| (place.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

/// Sends `payload` until all of it has come. `during` is told how much has.
fn pass(
    send_stream: &mut dyn SendStream,
    recv_stream: &mut dyn RecvStream,
    payload: &[u8],
    mut during: impl FnMut(usize),
) -> Vec<u8> {
    let (mut sent, mut received, mut piece) = (0, Vec::new(), vec![0; 300_000]);
    while received.len() < payload.len() {
        let end = payload.len().min(sent + 200_000);
        sent += send_stream.write(&[], &[IoSlice::new(&payload[sent..end])]).unwrap();
        let count = recv_stream.read(&mut piece).unwrap();
        received.extend_from_slice(&piece[..count]);
        during(received.len());
    }
    received
}

#[test]
fn a_stream_over_several_connections_brings_every_byte_and_keeps_none() {
    for (tls, streams) in WAYS {
        let ([sender, _receiver], mut send_stream, mut recv_stream) = stream(tls, streams);
        let payload = content(24 << 20);
        let received = pass(&mut *send_stream, &mut *recv_stream, &payload, |_| {});
        assert!(received == payload, "TLS {tls}, {streams} connections: the bytes are those that were sent");
        // Asks for what is not acknowledged, after a while. The system acknowledges late, too.
        let acknowledged = |send_stream: &dyn SendStream| send_stream.tcp_stats().unwrap().bytes;
        while sender.holds_bytes()
            || send_stream.flushed() != Ok(true)
            || acknowledged(&*send_stream) < payload.len() as u64
        {
            send_stream.write(&[], &[]).unwrap();
            assert_eq!(recv_stream.read(&mut [0; 100]), Ok(0));
        }
        assert!(send_stream.is_open());
    }
}

#[test]
fn of_two_ranks_with_different_numbers_of_connections_the_smaller_counts() {
    for (own, theirs, rails) in [("1", "3", 1), ("3", "1", 1), ("4", "2", 2), ("2", "4", 2)] {
        let (mut sender, mut receiver) = (transport(0, &config("off", own)), transport(1, &config("off", theirs)));
        let (mut send_stream, mut recv_stream) = opened(&mut sender, &mut receiver, Detour::Impossible);
        // Each connection that the receiver has is named.
        drop(names(&receiver.poller));
        let payload = content(3 << 20);
        assert!(pass(&mut *send_stream, &mut *recv_stream, &payload, |_| {}) == payload, "{own} and {theirs}");
        drop(send_stream);
        while names(&receiver.poller).len() < rails {}
        assert_eq!(names(&receiver.poller), vec![StreamName::From(Rank(0)); rails], "{own} and {theirs}");
    }
}

#[test]
fn a_process_that_gets_no_thread_for_its_connections_waits_for_one() {
    let [mut sender, mut receiver] = [0, 1].map(|me| transport(me, &config("off", "2")));
    let address = receiver.address();
    let refused = without_threads(|| sender.open(Rank(1), &address, Detour::Impossible).err().unwrap());
    assert_eq!(refused.kind, Down::Lacking, "{refused}");
    opened(&mut sender, &mut receiver, Detour::Impossible);
}

#[test]
fn one_connection_is_published_and_opened_as_ever() {
    let [one, three] = ["1", "3"].map(|streams| transport(0, &config("off", streams)).address());
    assert!(!String::from_utf8(one).unwrap().contains("streams"));
    assert!(String::from_utf8(three).unwrap().contains("\"streams\":3"));
}

/// Passes connections on to `port`, of which the second is closed once it has carried so many bytes.
fn breaking_relay(port: u16, bytes: usize) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let own = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for number in 0.. {
            let Ok((mut near, _)) = listener.accept() else { return };
            let mut far = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
            let (mut back_from, mut back_to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
            std::thread::spawn(move || {
                let (mut piece, mut carried) = ([0; 60_000], 0);
                while let Ok(count @ 1..) = near.read(&mut piece) {
                    carried += count;
                    if number == 1 && carried > bytes {
                        break;
                    }
                    if far.write_all(&piece[..count]).is_err() {
                        break;
                    }
                }
                let _ = near.shutdown(std::net::Shutdown::Both);
                let _ = far.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    own
}

#[test]
fn what_a_broken_connection_has_not_delivered_comes_by_the_others_and_once() {
    for (tls, bytes) in [("off", 1_000_000), ("on", 1_000_000), ("off", 5_000_000), ("off", 70_000)] {
        let (mut sender, mut receiver) = (transport(0, &config(tls, "3")), transport(1, &config(tls, "3")));
        let address = through(&receiver, |port| breaking_relay(port, bytes));
        let (mut send_stream, mut recv_stream) = opened_at(&address, &mut sender, &mut receiver, Detour::Impossible);
        let payload = content(30 << 20);
        let received = pass(&mut *send_stream, &mut *recv_stream, &payload, |_| {});
        assert!(received == payload, "TLS {tls}, after {bytes} bytes: the bytes are those that were sent");
        assert_eq!(recv_stream.read(&mut [0; 100]), Ok(0), "and no more");
        // What came twice is still to be read.
        while send_stream.flushed() != Ok(true) {
            assert_eq!(recv_stream.read(&mut [0; 100]), Ok(0));
        }
        let stats = send_stream.tcp_stats().unwrap();
        assert!(stats.bytes >= payload.len() as u64, "what the broken one carried counts: {stats:?}");
    }
}

/// Passes two connections on to `port`, the second once it is told to, which ends the first.
fn gated_relay(port: u16) -> (u16, mpsc::Sender<()>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let own = listener.local_addr().unwrap().port();
    let (next, told) = mpsc::channel();
    std::thread::spawn(move || {
        loop {
            let (mut near, _) = listener.accept().unwrap();
            let mut far = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
            let (mut back_from, mut back_to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            let end = near.try_clone().unwrap();
            std::thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
            std::thread::spawn(move || {
                // How it ended is of no interest.
                let _ = std::io::copy(&mut near, &mut far);
                far.shutdown(std::net::Shutdown::Both)
            });
            if told.recv().is_err() {
                return;
            }
            end.shutdown(std::net::Shutdown::Both).unwrap();
            if told.recv().is_err() {
                return;
            }
        }
    });
    (own, next)
}

#[test]
fn a_first_connection_that_breaks_before_the_second_has_come_does_not_end_the_stream() {
    for tls in ["off", "on"] {
        let config = config(tls, "2");
        let (mut sender, mut receiver) = (transport(0, &config), transport(1, &config));
        let (port, next) = gated_relay(Address::parse(&receiver.address()).unwrap().port);
        let address = through(&receiver, |_| port);
        let mut send_stream = sender.open(Rank(1), &address, Detour::Impossible).unwrap();
        let (payload, mut piece) = (content(1 << 20), vec![0; 1 << 20]);
        let (mut accepted, mut sent, mut received) = (Vec::new(), 0, Vec::new());
        while received.is_empty() {
            sent += send_stream.write(&[], &[IoSlice::new(&payload[sent..1_000])]).unwrap();
            accepted.extend(receiver.accept());
            if let Some((_, recv_stream)) = accepted.first_mut() {
                let count = recv_stream.read(&mut piece).unwrap();
                received.extend_from_slice(&piece[..count]);
            }
        }
        let (_, mut recv_stream) = accepted.pop().unwrap();
        next.send(()).unwrap();
        // What comes of the broken one is named until it is taken out.
        let mut vain = 0;
        while vain < 100 {
            let is_named = names(&receiver.poller).contains(&StreamName::From(Rank(0)));
            vain = if is_named { 0 } else { vain + 1 };
            let count = recv_stream.read(&mut piece).unwrap();
            received.extend_from_slice(&piece[..count]);
            sent += send_stream.write(&[], &[IoSlice::new(&payload[sent..100_000])]).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        next.send(()).unwrap();
        while received.len() < payload.len() {
            sent += send_stream.write(&[], &[IoSlice::new(&payload[sent..])]).unwrap();
            assert!(receiver.accept().is_empty(), "it is no stream of its own");
            let count = recv_stream.read(&mut piece).unwrap();
            received.extend_from_slice(&piece[..count]);
        }
        assert!(received == payload, "TLS {tls}: the bytes are those that were sent");
        drop(send_stream);
        while recv_stream.read(&mut piece).is_ok() {}
    }
}

#[test]
fn a_rail_joins_the_stream_of_its_own_rank_alone_and_once() {
    let mut receiver = transport(1, &config("off", "3"));
    let address: Address = serde_json::from_slice(&receiver.address()).unwrap();
    let open = |me: u32, rail: usize| {
        let transport = transport(me, &config("off", "3"));
        let targets = [Target { source: None, address: (Ipv4Addr::LOCALHOST, address.port).into() }];
        let (identity, timeout) = (transport.identity.clone(), transport.timeout);
        let connection =
            Connection::begin(identity, None, Rank(1), targets.into(), &transport.poller, timeout, 3).unwrap();
        connection.with(Some(Greeting { token: [9; 16], rail, rails: 3, generation: 0 }))
    };
    let mut callers = [open(0, 0), open(0, 1), open(2, 1), open(0, 1)];
    let (mut accepted, mut joined) = (Vec::new(), [None; 4]);
    while joined.contains(&None) {
        accepted.extend(receiver.accept());
        for (caller, joined) in callers.iter_mut().zip(&mut joined).filter(|(_, joined)| joined.is_none()) {
            *joined = caller.drive().map_or(Some(false), |is_open| is_open.then_some(true));
        }
    }
    let refused = joined.iter().filter(|joined| **joined == Some(false)).count();
    let mut from: Vec<Rank> = accepted.iter().map(|(rank, _)| *rank).collect();
    from.sort();
    assert_eq!((from, refused), (vec![Rank(0), Rank(2)], 1), "two streams, and one rail too many");
    // One that comes after the end of its stream joins no other, and one of more rails than are allowed none either.
    drop(accepted);
    let too_many = Greeting { token: [8; 16], rail: 0, rails: 4, generation: 0 };
    for mut late in [open(0, 2), open(0, 0).with(Some(too_many))] {
        while late.drive().is_ok() {
            assert!(receiver.accept().is_empty());
        }
    }
}

/// Passes connections on to `port`, each with 64 KiB under way for 40 ms, as over a long distance with windows of that size.
fn distant_relay(port: u16) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let own = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        while let Ok((mut near, _)) = listener.accept() {
            let mut far = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
            let (mut back_from, mut back_to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
            std::thread::spawn(move || {
                let mut piece = vec![0; 64 << 10];
                while let Ok(count @ 1..) = near.read(&mut piece) {
                    std::thread::sleep(Duration::from_millis(40));
                    if far.write_all(&piece[..count]).is_err() {
                        return;
                    }
                }
            });
        }
    });
    own
}

#[test]
fn over_a_long_distance_four_connections_carry_more_than_twice_as_much_as_one() {
    let payload = content(2 << 20);
    let time = |streams: &str| {
        let config = config("off", streams);
        let (mut sender, mut receiver) = (transport(0, &config), transport(1, &config));
        let address = through(&receiver, distant_relay);
        let (mut send_stream, mut recv_stream) = opened_at(&address, &mut sender, &mut receiver, Detour::Impossible);
        let begun = Instant::now();
        assert!(pass(&mut *send_stream, &mut *recv_stream, &payload, |_| std::thread::yield_now()) == payload);
        begun.elapsed()
    };
    // What stops the machine for a while makes a time longer, never shorter.
    let times: Vec<_> = (0..3).map(|_| (time("1"), time("4"))).collect();
    assert!(times.iter().any(|(one, four)| *four * 2 < *one), "with one connection, and with four: {times:?}");
}

/// How to open a stream of two connections to rank 1, which listens at this port.
fn opener(sender: &TcpTransport, port: u16, timeout: PeerTimeout) -> Opener {
    let target = Target { source: None, address: (Ipv4Addr::LOCALHOST, port).into() };
    Opener {
        identity: sender.identity.clone(),
        tls: sender.tls.clone(),
        peer: Rank(1),
        poller: sender.poller.clone(),
        timeout,
        token: Some([9; 16]),
        paths: vec![[target].into(); 2],
    }
}

/// A stream over two connections of which each may be cut off.
struct Cuttable {
    sender: TcpTransport,
    receiver: TcpTransport,
    send_stream: RailSendStream,
    recv_stream: Box<dyn RecvStream>,
    /// The sockets of each connection, the opener's first.
    sockets: [[TcpStream; 2]; 2],
}

/// The same, with nobody who looks after it.
struct Untended {
    sender: TcpTransport,
    receiver: TcpTransport,
    rails: SendRails,
    recv_stream: Box<dyn RecvStream>,
    sockets: [[TcpStream; 2]; 2],
}

impl Untended {
    fn new(tls: &str) -> Untended {
        let config = config(tls, "2");
        let (sender, mut receiver) = (transport(0, &config), transport(1, &config));
        let address = Address::parse(&receiver.address()).unwrap();
        // As streams of data have it: the system does not end a silent connection that has something to send.
        let opener = opener(&sender, address.port, PeerTimeout::WhileIdle(10 * WATCHDOG));
        let connections = [0, 1].map(|rail| opener.begin(rail).unwrap());
        let near = connections.each_ref().map(|connection| connection.socket().try_clone().unwrap());
        let mut rails = SendRails::new(opener, &sender.held);
        connections.into_iter().enumerate().for_each(|(rail, connection)| rails.add(rail, connection));
        let (mut far, mut recv_stream) = ([None, None], None);
        while recv_stream.is_none() || rails.working() < 2 {
            rails.write(&[], &[]).unwrap();
            for Proved { rank, stream, received, .. } in receiver.proved() {
                far[received.unwrap().rail] = Some(stream.stream.socket().try_clone().unwrap());
                recv_stream = receiver.take_in(rank, stream, received).or(recv_stream);
            }
        }
        let sockets: Vec<_> = near.into_iter().zip(far).map(|(near, far)| [near, far.unwrap()]).collect();
        let (_, recv_stream) = recv_stream.unwrap();
        Untended { sender, receiver, rails, recv_stream, sockets: sockets.try_into().unwrap() }
    }
}

impl Cuttable {
    fn new(tls: &str) -> Cuttable {
        let Untended { mut sender, receiver, rails, recv_stream, sockets } = Untended::new(tls);
        let send_stream = RailSendStream::new(rails, &sender.tender().unwrap());
        Cuttable { sender, receiver, send_stream, recv_stream, sockets }
    }

    /// Nothing that either end of the connection sends arrives any more, of which no end is told.
    fn cut_off(&self, rail: usize) {
        let nothing = [socket2::SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0)];
        for socket in &self.sockets[rail] {
            socket2::SockRef::from(socket).attach_filter(&nothing).unwrap();
        }
    }

    /// Whether the reader has no room for more on a connection, where more waits in the opener's system.
    fn is_full(&self, rail: usize) -> bool {
        matches!(tcp_info::under_way(&self.sockets[rail][0]), Ok(UnderWay { unacknowledged: 0, unsent: 1.., .. }))
    }

    /// Reads so many bytes, while the sender does what `write` does whenever its poller names the stream.
    fn read(&mut self, len: usize, mut write: impl FnMut(&mut RailSendStream)) -> Vec<u8> {
        let (mut received, mut piece, begun) = (Vec::new(), vec![0; 300_000], Instant::now());
        while received.len() < len {
            if names(&self.sender.poller).contains(&StreamName::To(Rank(1))) {
                write(&mut self.send_stream);
            }
            let count = self.recv_stream.read(&mut piece).unwrap();
            received.extend_from_slice(&piece[..count]);
            if count == 0 {
                self.receiver.poller.wait(Some(Duration::from_millis(20))).unwrap();
            }
            assert!(begun.elapsed() < WATCHDOG, "{} of {len} bytes have come", received.len());
        }
        received
    }
}

const WATCHDOG: Duration = Duration::from_secs(100);

#[test]
fn what_was_written_to_a_silent_connection_comes_by_the_other_also_if_its_writer_does_nothing_more() {
    for (tls, len) in [("off", 5), ("on", 5), ("off", 200_000)] {
        // One of them is where the first piece goes.
        for rail in 0..2 {
            let mut stream = Cuttable::new(tls);
            let payload = content(len);
            stream.cut_off(rail);
            assert_eq!(stream.send_stream.write(&[], &[IoSlice::new(&payload)]), Ok(len));
            assert!(stream.read(len, |_| {}) == payload, "TLS {tls}: the bytes are those that were sent");
        }
    }
}

#[test]
fn a_connection_that_becomes_silent_while_its_reader_has_no_room_is_given_up_too() {
    for rail in 0..2 {
        let mut stream = Cuttable::new("off");
        let (payload, mut sent) = (content(16 << 20), 0);
        // Full, so that nothing is under way: the system asks for room from time to time, and is answered.
        while !(0..2).all(|rail| stream.is_full(rail)) {
            sent += stream.send_stream.write(&[], &[IoSlice::new(&payload[sent..])]).unwrap();
        }
        stream.cut_off(rail);
        assert!(!stream.send_stream.arm(), "it may sleep");
        let received = stream.read(payload.len(), |send_stream| {
            while let count @ 1.. = send_stream.write(&[], &[IoSlice::new(&payload[sent..])]).unwrap() {
                sent += count;
            }
            if sent < payload.len() {
                send_stream.arm();
            }
        });
        assert!(received == payload, "without rail {rail}: the bytes are those that were sent");
    }
}

#[test]
fn a_reader_that_has_no_room_for_long_keeps_its_connections() {
    let mut stream = Cuttable::new("off");
    let (payload, mut sent) = (content(16 << 20), 0);
    let segments = |stream: &Cuttable| stream.sockets.each_ref().map(|[near, _]| tcp_info::tcp_stats(near).unwrap());
    while !(0..2).all(|rail| stream.is_full(rail)) {
        sent += stream.send_stream.write(&[], &[IoSlice::new(&payload[sent..])]).unwrap();
    }
    // Each asks for room more often than a silent one would be given up after.
    let before = segments(&stream);
    let asked =
        |stream: &Cuttable| segments(stream).iter().zip(&before).all(|(now, then)| now.segments > then.segments + 5);
    while !asked(&stream) {
        std::thread::sleep(Duration::from_millis(50));
    }
    for _ in 0..2 {
        let before = segments(&stream);
        let received = stream.read(payload.len(), |send_stream| {
            while let count @ 1.. = send_stream.write(&[], &[IoSlice::new(&payload[sent..])]).unwrap() {
                sent += count;
            }
            send_stream.arm();
        });
        assert!(received == payload, "the bytes are those that were sent");
        let carried: Vec<_> = segments(&stream).iter().zip(&before).map(|(now, then)| now.bytes - then.bytes).collect();
        assert!(carried.iter().all(|bytes| *bytes > 1 << 20), "{carried:?}");
        sent = stream.send_stream.write(&[], &[IoSlice::new(&payload)]).unwrap();
    }
}
