//! Who calls a rank's socket.

use rustix::process::Uid;

use super::*;
use crate::error::Down;
use crate::sys::socket::connect_unix;
use crate::sys::team::Team;
use crate::transport::auth::Secret;
use crate::transport::testing::{names, opened};
use crate::transport::{MemoryAddress, RecvStream};

/// Any that is not this process's.
const OTHER_USER: u32 = 54_321;

fn transport(me: u32) -> ShmTransport {
    let identity = Identity { comm: [1; 16], me: Rank(me), size: 2, secret: Secret::new([5; 32]) };
    let settings = RingSettings { bytes: rustix::param::page_size(), peer_can_read: false, line_ownership: Switch::On };
    ShmTransport::new(identity, Poller::new().unwrap(), settings).unwrap()
}

/// So many connections to `name` by a thread of another user; none where this process may not have such threads.
fn call_as_other(name: &[u8], count: usize) -> Option<Vec<UnixStream>> {
    let call = || {
        // Of this thread alone, which ends soon.
        rustix::thread::set_thread_res_uid(None, Uid::from_raw(OTHER_USER), None).ok()?;
        Some((0..count).map(|_| connect_unix(name).unwrap()).collect())
    };
    std::thread::scope(|scope| scope.spawn(call).join().unwrap())
}

#[test]
fn callers_of_another_user_keep_nobody_out() {
    let (mut opener, mut acceptor) = (transport(0), transport(1));
    let Some(callers) = call_as_other(&socket_name(&acceptor.address()), 300) else {
        assert!(std::env::var("NCCLX_RS_CI").is_err(), "CI lacks what the test needs: root");
        eprintln!("skipped: it takes root");
        return;
    };
    let mut send_stream = opener.open(Rank(1), &acceptor.address(), Detour::Possible).unwrap();
    let mut accepted = Vec::new();
    // Two turns for the queue; the rest is the handshake.
    for _ in 0..10 {
        accepted.extend(acceptor.accept());
        send_stream.write(&[], &[]).unwrap();
    }
    assert_eq!(accepted.len(), 1, "who belongs here has not waited for who does not");
    assert_eq!(acceptor.accepting_until(), None, "no caller of another user is let in");
    drop(callers);
}

#[test]
fn a_ring_that_the_peer_cannot_map_leaves_shared_memory_and_takes_no_bytes() {
    let (mut opener, acceptor) = (transport(0), transport(1));
    let mut send_stream = opener.open(Rank(1), &acceptor.address(), Detour::Possible).unwrap();
    let (mut stream, _) = acceptor.listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut accepting = crate::transport::handshake::Accepting::new(acceptor.identity.clone());
    while accepting.drive(&mut stream).unwrap().is_none() {
        assert_eq!(send_stream.write(b"head", &[]), Ok(0));
    }
    while socket::look_at_fd(&stream).is_err() {
        assert_eq!(send_stream.write(b"head", &[]), Ok(0));
    }
    assert!(!send_stream.is_open());
    drop(stream);
    assert_eq!(send_stream.write(b"head", &[]).unwrap_err().kind, Down::Unfit);
}

#[test]
fn what_was_sent_before_the_end_is_shown_until_it_is_consumed() {
    let (mut opener, mut acceptor) = (transport(0), transport(1));
    let (mut send_stream, mut recv_stream) = opened(&mut opener, &mut acceptor, Detour::Possible);
    assert_eq!(send_stream.write(b"onetwo", &[]).unwrap(), 6);
    drop(send_stream);
    while recv_stream.end().is_none() {
        assert!(recv_stream.arm(), "there are bytes");
        recv_stream.disarm();
    }
    for rest in [b"onetwo".as_slice(), b"two"] {
        assert_eq!(recv_stream.peek().unwrap(), rest);
        assert_eq!(recv_stream.peek().unwrap(), rest, "to look takes nothing away");
        recv_stream.consume(3);
    }
    assert_eq!(recv_stream.peek().unwrap_err(), recv_stream.end().unwrap());
    assert!(recv_stream.read(&mut [0; 8]).is_err());
}

/// A stream from rank 0 to rank 1 through a ring of a page, and the poller of each.
fn stream() -> ([Poller; 2], Box<dyn SendStream>, Box<dyn RecvStream>) {
    let (mut opener, mut acceptor) = (transport(0), transport(1));
    let (send_stream, recv_stream) = opened(&mut opener, &mut acceptor, Detour::Possible);
    ([opener.poller, acceptor.poller], send_stream, recv_stream)
}

#[test]
fn an_armed_reader_is_named_also_if_it_reads_its_writers_memory_meanwhile() {
    let ([_, poller], mut send_stream, mut recv_stream) = stream();
    for letter in [b"a", b"b"] {
        assert!(!recv_stream.arm());
        assert_eq!(names(&poller), []);
        assert_eq!(send_stream.write(letter, &[]), Ok(1));
        let here = MemoryAddress::of(letter.as_ptr() as u64, 1);
        // Whether the system lets it is of no interest.
        let _ = recv_stream.read_memory(here, &mut [0], Team::ALONE);
        assert_eq!(names(&poller), [StreamName::From(Rank(0))]);
        recv_stream.disarm();
        assert_eq!(recv_stream.peek().unwrap(), letter);
        recv_stream.consume(1);
        // It looks at the ring, and the bell that has rung must not name it again.
        recv_stream.named();
        assert_eq!(names(&poller), []);
    }
}

#[test]
fn an_armed_writer_is_named_once_the_reader_has_made_room() {
    let ([poller, _], mut send_stream, mut recv_stream) = stream();
    let (payload, mut piece) = (vec![7; 1024], vec![0; 1024]);
    for _ in 0..3 {
        while send_stream.write(&[], &[io::IoSlice::new(&payload)]).unwrap() > 0 {}
        assert!(!send_stream.arm());
        assert_eq!(names(&poller), []);
        while recv_stream.read(&mut piece).unwrap() > 0 {}
        assert_eq!(names(&poller), [StreamName::To(Rank(1))]);
        send_stream.disarm();
        send_stream.write(&[], &[]).unwrap();
        assert_eq!(names(&poller), [], "the bell has been heard");
    }
}
