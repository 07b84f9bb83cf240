//! Streams over UCX, the real library, in processes of this program whose environment says what it goes through.

#[path = "../../../tests/engine/ucx_library.rs"]
mod ucx_library;

use std::io::IoSlice;
use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Duration;

use super::*;
use crate::config::Config;
use crate::error::Down;
use crate::sys::fork::testing::holds_in_a_child;
use crate::sys::ucx::UcxError;
use crate::transport::RecvStream;
use crate::transport::auth::Secret;
use crate::transport::testing::{names, opened};

/// Says in a process of this program that it is one of those, and which library it takes.
const UNDER_TEST: &str = "NCCLX_RS_TEST_UCX_STREAMS";

const LONG: Duration = Duration::from_secs(60);

#[test]
fn streams_work_over_all_that_is_here() {
    let Some(library) = ucx_library::library() else {
        assert!(std::env::var("NCCLX_RS_CI").is_err(), "CI lacks what the test needs: UCX");
        eprintln!("skipped: it takes UCX");
        return;
    };
    for transports in ["tcp", "posix,cma"] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["transport::ucx::tests::", "--skip", "over_all_that_is_here", "--test-threads", "2"]);
        let output = child.env(UNDER_TEST, &library).env("UCX_TLS", transports).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("ok. 6 passed"), "{transports}: {text}");
    }
}

/// UCX; none outside of a process that is for this.
fn allowed() -> Option<Allowed> {
    let library = std::env::var(UNDER_TEST).ok()?;
    let hints = [("transport".to_owned(), "ucx".to_owned()), ("ucx".to_owned(), library)];
    Some(Allowed::by(&Config::resolve_with(&|_| None, &hints).unwrap(), &[], false).unwrap())
}

/// The transport of one rank of two; none as above.
fn transport(me: u32, need: Need) -> Option<UcxTransport> {
    let allowed = allowed()?;
    let identity = Identity { comm: [1; 16], me: Rank(me), size: 2, secret: Secret::new([5; 32]) };
    let timeout = PeerTimeout::Always(Duration::from_secs(60));
    let here = vec![Ipv4Addr::LOCALHOST.into()];
    Some(UcxTransport::new(identity, allowed, need, Poller::new().unwrap(), here, timeout).unwrap())
}

type Stream = ([UcxTransport; 2], Box<dyn SendStream>, Box<dyn RecvStream>);

/// A stream from rank 0 to rank 1.
fn stream() -> Option<Stream> {
    let (mut opener, mut acceptor) = (transport(0, Need::Any)?, transport(1, Need::Any)?);
    let (send_stream, recv_stream) = opened(&mut opener, &mut acceptor, Detour::Impossible);
    for transport in [&mut opener, &mut acceptor] {
        // What the opening was about.
        while transport.arm() {
            transport.look(&mut Vec::new());
        }
    }
    Some(([opener, acceptor], send_stream, recv_stream))
}

/// What the poller and the transport name, once that is something.
fn named(transport: &mut UcxTransport) -> Vec<StreamName> {
    loop {
        let mut named = names(&transport.poller);
        transport.look(&mut named);
        if !named.is_empty() {
            return named;
        }
    }
}

#[test]
fn a_forked_child_of_a_process_that_has_used_ucx_gets_none() {
    let Some(transport) = transport(0, Need::Any) else { return };
    transport.hub.address().unwrap();
    let allowed = allowed().unwrap();
    assert!(holds_in_a_child(|| allowed.load().is_err_and(|cause| cause == UcxError::Forked.to_string())));
    assert!(allowed.load().is_ok());
}

#[test]
fn an_armed_reader_is_named_once_bytes_have_come_or_the_end() {
    let Some(([_opener, mut acceptor], mut send_stream, mut recv_stream)) = stream() else { return };
    for letter in [b"a", b"b"] {
        assert!(!recv_stream.arm() && !acceptor.arm(), "nothing has come");
        assert_eq!(send_stream.write(letter, &[]), Ok(1));
        // The worker's descriptor wakes the thread, which has no name.
        acceptor.poller.wait(None).unwrap();
        assert_eq!(named(&mut acceptor), [StreamName::From(Rank(0))]);
        recv_stream.disarm();
        assert_eq!(recv_stream.peek().unwrap(), letter);
        assert!(recv_stream.arm(), "it is not consumed");
        recv_stream.consume(1);
    }
    assert!(!recv_stream.arm());
    drop(send_stream);
    assert!(named(&mut acceptor).contains(&StreamName::From(Rank(0))));
    while recv_stream.peek().is_ok() {
        // It looks at the connection.
        recv_stream.named();
    }
}

#[test]
fn an_armed_reader_whose_bytes_another_call_has_taken_wakes_the_sleeper() {
    let Some(([_opener, mut acceptor], mut send_stream, mut recv_stream)) = stream() else { return };
    assert!(!recv_stream.arm() && !acceptor.arm());
    assert_eq!(send_stream.write(b"a", &[]), Ok(1));
    while acceptor.hub.is_idle() {
        acceptor.hub.progress();
    }
    let began = Instant::now();
    acceptor.poller.wait(Some(LONG)).unwrap();
    assert!(began.elapsed() < LONG, "nobody has woken the thread that sleeps");
    assert!(acceptor.arm(), "a stream is ready");
    assert_eq!(named(&mut acceptor), [StreamName::From(Rank(0))]);
}

#[test]
fn a_writer_without_credit_is_named_once_the_reader_has_read() {
    let Some(([mut opener, acceptor], mut send_stream, mut recv_stream)) = stream() else { return };
    let (payload, mut piece) = (vec![7; 1 << 20], vec![0; 1 << 20]);
    for _ in 0..3 {
        let (mut sent, mut received) = (0, 0);
        loop {
            match send_stream.write(b"head", &[IoSlice::new(&payload)]).unwrap() {
                0 => break,
                count => sent += count,
            }
        }
        assert!(sent > 400_000 && sent < 1 << 20, "{sent} bytes are unread");
        assert!(!send_stream.arm(), "there is no room");
        while received < sent {
            received += recv_stream.read(&mut piece).unwrap();
        }
        assert_eq!(named(&mut opener), [StreamName::To(Rank(1))]);
        send_stream.disarm();
        while send_stream.flushed() != Ok(true) {
            // UCX's TCP asks the peer's UCX.
            acceptor.hub.progress();
        }
    }
}

#[test]
fn what_was_sent_before_the_end_is_shown_until_it_is_consumed() {
    let Some((_transports, mut send_stream, mut recv_stream)) = stream() else { return };
    let long = vec![3; 100_000];
    assert_eq!(send_stream.write(b"onetwo", &[IoSlice::new(&long)]), Ok(100_006));
    drop(send_stream);
    let mut seen = Vec::new();
    while let Ok(bytes) = recv_stream.peek() {
        seen.extend_from_slice(bytes);
        let count = bytes.len();
        recv_stream.arm();
        recv_stream.disarm();
        recv_stream.consume(count);
    }
    assert!(seen.starts_with(b"onetwo") && seen[6..] == long);
    assert!(recv_stream.end().is_some() && recv_stream.read(&mut [0; 8]).is_err());
}

#[test]
fn where_no_device_is_better_the_stream_is_left_to_another_transport_and_takes_no_bytes() {
    let (Some(mut opener), Some(mut acceptor)) = (transport(0, Need::Any), transport(1, Need::Better)) else { return };
    let mut send_stream = opener.open(Rank(1), &acceptor.address(), Detour::Possible).unwrap();
    let down = loop {
        assert!(acceptor.accept().is_empty());
        match send_stream.write(b"head", &[]) {
            Ok(count) => assert_eq!(count, 0),
            Err(down) => break down,
        }
    };
    assert_eq!(down.kind, Down::Unfit);
    assert!(down.cause.contains("none of which is an RDMA device"), "{down}");
    assert!(!send_stream.is_open());
}
