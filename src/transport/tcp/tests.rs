//! A stream through a relay that overhears it.

use std::io::{IoSlice, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Address, TcpTransport};
use crate::config::Config;
use crate::sys::net::Interface;
use crate::sys::poller::{Poller, StreamName};
use crate::sys::socket::PeerTimeout;
use crate::transport::auth::{Identity, Secret};
use crate::transport::testing::{names, opened};
use crate::transport::tls::Tls;
use crate::transport::{Detour, RecvStream, SendStream, Transport};
use crate::types::Rank;

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

/// The transport of one rank of two.
fn transport(me: u32, config: &Config) -> TcpTransport {
    let secret = Secret::new([5; 32]);
    let tls = Tls::new(config, &secret).unwrap();
    let identity = Identity { comm: [1; 16], me: Rank(me), size: 2, secret };
    let timeout = PeerTimeout::Always(Duration::from_secs(60));
    let own = Interface { name: "lo".to_owned(), address: Ipv4Addr::LOCALHOST.into(), prefix: 8, up: true };
    TcpTransport::new(identity, tls, Poller::new().unwrap(), vec![own], config.tcp_streams, timeout).unwrap()
}

/// Sends `payload` from one rank to another, of which nobody reads before no more can be written; what a relay overhears.
fn overhear(tls: &str, payload: &[u8]) -> Vec<u8> {
    let config = Config::resolve_with(&|_| None, &[("tls".to_owned(), tls.to_owned())]).unwrap();
    let (mut sender, mut receiver) = (transport(0, &config), transport(1, &config));
    let mut address: Address = serde_json::from_slice(&receiver.address()).unwrap();
    let mut unauthenticated = TcpStream::connect((Ipv4Addr::LOCALHOST, address.port)).unwrap();
    unauthenticated.write_all(&[b'G'; 1000]).unwrap();
    let (port, overheard) = relay(address.port);
    address.port = port;
    let mut send_stream = sender.open(Rank(1), &serde_json::to_vec(&address).unwrap(), Detour::Impossible).unwrap();

    let (mut accepted, mut sent) = (Vec::new(), 0);
    loop {
        accepted.extend(receiver.accept());
        let count = send_stream.write(&[], &[IoSlice::new(&payload[sent..])]).unwrap();
        sent += count;
        if sent > 0 && count == 0 {
            break;
        }
        std::thread::yield_now();
    }
    let plain = tls == "off";
    assert_eq!((send_stream.is_open(), send_stream.flushed()), (plain, Ok(plain)), "TLS keeps what is left");

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

/// The transports of two ranks, and a stream from rank 0 to rank 1.
fn stream(tls: &str) -> ([TcpTransport; 2], Box<dyn SendStream>, Box<dyn RecvStream>) {
    let config = Config::resolve_with(&|_| None, &[("tls".to_owned(), tls.to_owned())]).unwrap();
    let (mut sender, mut receiver) = (transport(0, &config), transport(1, &config));
    let (send_stream, recv_stream) = opened(&mut sender, &mut receiver, Detour::Impossible);
    ([sender, receiver], send_stream, recv_stream)
}

#[test]
fn an_armed_stream_is_named_once_bytes_have_come_or_its_end() {
    for tls in ["off", "on"] {
        let ([_sender, receiver], mut send_stream, mut recv_stream) = stream(tls);
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
        while names(&receiver.poller) != [StreamName::From(Rank(0))] {}
        while recv_stream.peek().is_ok() {}
    }
}

#[test]
fn bytes_that_were_read_from_the_socket_and_not_consumed_keep_a_stream_from_being_armed() {
    let (_transports, mut send_stream, mut recv_stream) = stream("off");
    assert_eq!(send_stream.write(b"onetwo", &[]).unwrap(), 6);
    while recv_stream.peek().unwrap().len() < 6 {}
    recv_stream.consume(3);
    assert!(recv_stream.arm(), "the socket no longer has them");
    assert_eq!(recv_stream.peek().unwrap(), b"two");
}

#[test]
fn a_stream_that_was_armed_without_room_is_named_once_there_is_some() {
    for tls in ["off", "on"] {
        let ([sender, _receiver], mut send_stream, mut recv_stream) = stream(tls);
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
    for tls in ["off", "on"] {
        let (_transports, mut send_stream, mut recv_stream) = stream(tls);
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
