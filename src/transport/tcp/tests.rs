//! A stream through a relay that overhears it.

use std::io::{IoSlice, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Address, TcpTransport};
use crate::config::Config;
use crate::sys::poller::Poller;
use crate::sys::socket::PeerTimeout;
use crate::transport::auth::{Identity, Secret};
use crate::transport::tls::Tls;
use crate::transport::{Detour, RecvStream, Transport};
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
    TcpTransport::new(identity, tls, Poller::new().unwrap(), vec![Ipv4Addr::LOCALHOST.into()], timeout).unwrap()
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

#[test]
fn a_stream_that_brings_nothing_is_read_again_once_a_look_has_seen_bytes_or_its_end() {
    for tls in ["off", "on"] {
        let config = Config::resolve_with(&|_| None, &[("tls".to_owned(), tls.to_owned())]).unwrap();
        let (mut sender, mut receiver) = (transport(0, &config), transport(1, &config));
        let mut send_stream = sender.open(Rank(1), &receiver.address(), Detour::Impossible).unwrap();
        let mut accepted = Vec::new();
        while accepted.is_empty() || !send_stream.is_open() {
            send_stream.write(&[], &[]).unwrap();
            accepted.extend(receiver.accept());
        }
        let (_, mut recv_stream) = accepted.pop().unwrap();
        let reads_until_silent = |recv_stream: &mut Box<dyn RecvStream>| {
            (0..200).find(|_| recv_stream.is_silent() || !recv_stream.peek().unwrap().is_empty())
        };
        for letter in [b"a", b"b"] {
            assert!(reads_until_silent(&mut recv_stream).unwrap() > 1, "TLS {tls}: not at once");
            receiver.look();
            assert!(recv_stream.is_silent(), "TLS {tls}: nothing has come");
            assert_eq!(send_stream.write(letter, &[]).unwrap(), 1);
            while recv_stream.is_silent() {
                receiver.look();
            }
            while recv_stream.peek().unwrap().is_empty() {}
            assert_eq!(recv_stream.peek().unwrap(), letter);
            recv_stream.consume(1);
            assert!(!recv_stream.is_silent(), "TLS {tls}: more may follow");
        }
        reads_until_silent(&mut recv_stream);
        drop(send_stream);
        while recv_stream.is_silent() {
            receiver.look();
        }
        while recv_stream.peek().is_ok() {}
    }
}

#[test]
fn what_was_sent_before_the_end_is_shown_until_it_is_consumed() {
    for tls in ["off", "on"] {
        let config = Config::resolve_with(&|_| None, &[("tls".to_owned(), tls.to_owned())]).unwrap();
        let (mut sender, mut receiver) = (transport(0, &config), transport(1, &config));
        let mut send_stream = sender.open(Rank(1), &receiver.address(), Detour::Impossible).unwrap();
        let mut accepted = Vec::new();
        while accepted.is_empty() || !send_stream.is_open() {
            send_stream.write(&[], &[]).unwrap();
            accepted.extend(receiver.accept());
        }
        assert_eq!(send_stream.write(b"onetwo", &[]).unwrap(), 6);
        drop(send_stream);
        let (_, recv_stream) = &mut accepted[0];
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
