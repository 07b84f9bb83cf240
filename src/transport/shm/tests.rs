//! Who calls a rank's socket, and how the sides of a ring wake each other.

use std::hash::{DefaultHasher, Hash, Hasher};

use rustix::process::Uid;

use super::*;
use crate::config::NumaNode;
use crate::error::Down;
use crate::sys::numa;
use crate::sys::shm_ring::before_ring;
use crate::sys::socket::connect_unix;
use crate::sys::team::Team;
use crate::transport::MemoryAddress;
use crate::transport::auth::Secret;
use crate::transport::testing::{names, opened};

/// Any that is not this process's.
const OTHER_USER: u32 = 54_321;

fn transport(me: u32) -> ShmTransport {
    on_node(me, None)
}

/// The same on a NUMA node.
fn on_node(me: u32, node: Option<u32>) -> ShmTransport {
    let (bytes, line_ownership) = (rustix::param::page_size(), Switch::On);
    let settings = RingSettings { bytes, peer_can_read: false, line_ownership, node, share_bells: false };
    with(me, 2, settings)
}

/// The same of so many ranks. Those of a test are of one communicator, and of another one than other tests'.
fn with(me: u32, size: usize, settings: RingSettings) -> ShmTransport {
    let mut hasher = DefaultHasher::new();
    std::thread::current().id().hash(&mut hasher);
    let mut comm = [1; 16];
    comm[..8].copy_from_slice(&hasher.finish().to_le_bytes());
    let identity = Identity { comm, me: Rank(me), size, secret: Secret::new([5; 32]) };
    ShmTransport::new(identity, Poller::new().unwrap(), settings).unwrap()
}

/// The same of a rank that does without sockets beside rings, where the other side does.
fn sharing(me: u32, size: usize) -> ShmTransport {
    let settings = RingSettings { share_bells: true, ..transport(me).settings };
    with(me, size, settings)
}

/// The streams that are ready now.
fn ready(transport: &mut ShmTransport) -> Vec<StreamName> {
    let mut named = names(&transport.poller);
    let me = transport.identity.me;
    assert!(!transport.look(&mut named));
    // What is rung at is no stream.
    named.retain(|name| *name != StreamName::From(me));
    named
}

/// How many descriptors the poller watches beside its own.
fn watched(transport: &ShmTransport) -> usize {
    let fd = std::os::fd::AsRawFd::as_raw_fd(&transport.poller.as_fd());
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap();
    info.lines().filter(|line| line.starts_with("tfd:")).count() - 1
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
    for (mut opener, mut acceptor) in pairs() {
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
}

#[test]
fn a_ring_lies_where_its_reader_says() {
    let Some(node) = numa::tests::usable_node() else { return };
    // A size that no other test has.
    let bytes = 1 << 22;
    let on = |me, node| {
        let mut transport = on_node(me, node);
        transport.settings.bytes = bytes;
        transport
    };
    for (opens, accepts, policy) in [
        (None, None, "default".to_owned()),
        (Some(node), None, "default".to_owned()),
        (None, Some(node), format!("prefer:{node}")),
        // No such node: the ring is as good.
        (Some(node), Some(NumaNode::MAX), "default".to_owned()),
    ] {
        let (mut opener, mut acceptor) = (on(0, opens), on(1, accepts));
        let (mut send_stream, mut recv_stream) = opened(&mut opener, &mut acceptor, Detour::Possible);
        assert_eq!(send_stream.write(b"one", &[]).unwrap(), 3);
        assert_eq!(recv_stream.peek().unwrap(), b"one");
        assert_eq!(numa::tests::policies(before_ring() + bytes), [policy.as_str(); 2], "{opens:?} to {accepts:?}");
    }
}

/// Ranks 0 and 1: of which neither, one, and both would do without sockets beside rings.
fn pairs() -> [(ShmTransport, ShmTransport); 4] {
    [
        (transport(0), transport(1)),
        (sharing(0, 2), transport(1)),
        (transport(0), sharing(1, 2)),
        (sharing(0, 2), sharing(1, 2)),
    ]
}

#[test]
fn an_armed_reader_is_named_also_if_it_reads_its_writers_memory_meanwhile() {
    for (mut opener, mut acceptor) in pairs() {
        let (mut send_stream, mut recv_stream) = opened(&mut opener, &mut acceptor, Detour::Possible);
        ready(&mut acceptor);
        for letter in [b"a", b"b"] {
            assert!(!recv_stream.arm());
            assert_eq!(ready(&mut acceptor), []);
            assert_eq!(send_stream.write(letter, &[]), Ok(1));
            let here = MemoryAddress::of(letter.as_ptr() as u64, 1);
            // Whether the system lets it is of no interest.
            let _ = recv_stream.read_memory(here, &mut [0], Team::ALONE);
            assert_eq!(ready(&mut acceptor), [StreamName::From(Rank(0))]);
            recv_stream.disarm();
            assert_eq!(recv_stream.peek().unwrap(), letter);
            recv_stream.consume(1);
            // It looks at the ring, and the bell that has rung must not name it again.
            recv_stream.named();
            assert_eq!(ready(&mut acceptor), []);
        }
    }
}

#[test]
fn an_armed_writer_is_named_once_the_reader_has_made_room() {
    for (mut opener, mut acceptor) in pairs() {
        let (mut send_stream, mut recv_stream) = opened(&mut opener, &mut acceptor, Detour::Possible);
        ready(&mut opener);
        let (payload, mut piece) = (vec![7; 1024], vec![0; 1024]);
        for _ in 0..3 {
            while send_stream.write(&[], &[io::IoSlice::new(&payload)]).unwrap() > 0 {}
            assert!(!send_stream.arm());
            assert_eq!(ready(&mut opener), []);
            while recv_stream.read(&mut piece).unwrap() > 0 {}
            assert_eq!(ready(&mut opener), [StreamName::To(Rank(1))]);
            send_stream.disarm();
            send_stream.write(&[], &[]).unwrap();
            assert_eq!(ready(&mut opener), [], "the bell has been heard");
        }
    }
}

#[test]
fn who_leaves_is_seen_at_once_by_either_side_and_by_one_that_does_not_sleep() {
    for (mut opener, mut acceptor) in pairs() {
        let (mut send_stream, recv_stream) = opened(&mut opener, &mut acceptor, Detour::Possible);
        drop(recv_stream);
        assert_eq!(ready(&mut opener), [StreamName::To(Rank(1))]);
        assert!(send_stream.write(&[], &[]).is_err());
        let (send_stream, mut recv_stream) = opened(&mut opener, &mut acceptor, Detour::Possible);
        drop(send_stream);
        assert_eq!(ready(&mut acceptor), [StreamName::From(Rank(0))]);
        recv_stream.named();
        assert!(recv_stream.end().is_some() && recv_stream.peek().is_err());
    }
}

#[test]
fn rings_of_two_that_share_bells_take_no_descriptor_each() {
    let (mut opener, mut acceptor) = (sharing(0, 2), sharing(1, 2));
    // A listener each.
    assert_eq!([watched(&opener), watched(&acceptor)], [1, 1]);
    // One to ring at, and one of the process.
    let streams: Vec<_> = (0..3).map(|_| opened(&mut opener, &mut acceptor, Detour::Possible)).collect();
    assert_eq!([watched(&opener), watched(&acceptor)], [3, 3]);
    drop(streams);
    assert_eq!([watched(&opener), watched(&acceptor)], [2, 2]);
    let (mut opener, mut acceptor) = (transport(0), transport(1));
    let _streams: Vec<_> = (0..3).map(|_| opened(&mut opener, &mut acceptor, Detour::Possible)).collect();
    assert_eq!([watched(&opener), watched(&acceptor)], [4, 4], "a socket each");
}

#[test]
fn more_bells_than_there_is_room_for_wake_the_reader_of_each() {
    const WRITERS: u32 = 300;
    let mut acceptor = sharing(WRITERS, WRITERS as usize + 1);
    let address = acceptor.address();
    let mut streams: Vec<_> = (0..WRITERS)
        .map(|me| {
            let mut opener = sharing(me, WRITERS as usize + 1);
            let mut send_stream = opener.open(acceptor.identity.me, &address, Detour::Possible).unwrap();
            let mut accepted = Vec::new();
            while accepted.is_empty() || !send_stream.is_open() {
                send_stream.write(&[], &[]).unwrap();
                accepted.extend(acceptor.accept());
            }
            (opener, send_stream, accepted.pop().unwrap().1)
        })
        .collect();
    ready(&mut acceptor);
    for (_, send_stream, recv_stream) in &mut streams {
        assert!(!recv_stream.arm());
        assert_eq!(send_stream.write(b"x", &[]), Ok(1));
    }
    let mut named: Vec<_> = ready(&mut acceptor);
    named.sort_by_key(|name| match name {
        StreamName::From(Rank(rank)) | StreamName::To(Rank(rank)) => *rank,
    });
    assert_eq!(named, (0..WRITERS).map(|rank| StreamName::From(Rank(rank))).collect::<Vec<_>>());
    assert!(streams.iter().all(|(opener, ..)| !opener.holds_bytes()), "a full queue is none of theirs");
}

#[test]
fn a_writer_wakes_more_readers_than_its_socket_has_room_for() {
    // A bell takes about 800 bytes of the sender's room, which is 208 KiB where nobody has changed it.
    const READERS: u32 = 400;
    let size = READERS as usize + 1;
    let mut opener = sharing(READERS, size);
    let mut streams: Vec<_> = (0..READERS)
        .map(|me| {
            let mut acceptor = sharing(me, size);
            let mut send_stream = opener.open(Rank(me), &acceptor.address(), Detour::Possible).unwrap();
            let mut accepted = Vec::new();
            while accepted.is_empty() || !send_stream.is_open() {
                send_stream.write(&[], &[]).unwrap();
                accepted.extend(acceptor.accept());
            }
            (acceptor, Some(send_stream), accepted.pop().unwrap().1)
        })
        .collect();
    let from_opener = [StreamName::From(opener.identity.me)];
    for (_, send_stream, recv_stream) in &mut streams {
        assert!(!recv_stream.arm());
        assert_eq!(send_stream.as_mut().unwrap().write(b"x", &[]), Ok(1));
    }
    for (acceptor, _, recv_stream) in &mut streams {
        assert_eq!(ready(acceptor), from_opener);
        assert_eq!(names(&acceptor.poller), [], "the bell has been heard");
        recv_stream.disarm();
        assert_eq!(recv_stream.read(&mut [0; 8]), Ok(1));
    }
    assert!(!opener.holds_bytes() && opener.accepting_until().is_none());
    // Nobody takes its bell before all have rung.
    streams.iter_mut().for_each(|(_, send_stream, _)| drop(send_stream.take()));
    drop(opener);
    assert!(streams.iter_mut().all(|(acceptor, ..)| ready(acceptor) == from_opener));
}

#[test]
fn rings_have_sockets_where_another_has_the_name_of_the_bells() {
    for taken in [0, 1] {
        let (mut opener, mut acceptor) = (sharing(0, 2), sharing(1, 2));
        let identity = [&opener, &acceptor][taken].identity.clone();
        let _other = Bells::new(&identity, &Poller::new().unwrap()).unwrap();
        let (mut send_stream, mut recv_stream) = opened(&mut opener, &mut acceptor, Detour::Possible);
        assert!(!recv_stream.arm());
        assert_eq!(send_stream.write(b"x", &[]), Ok(1));
        assert_eq!(ready(&mut acceptor), [StreamName::From(Rank(0))]);
        assert!(recv_stream.end().is_none());
    }
}
