//! One-sided reads and writes through transports, over every wire: bytes arrive where they should and nowhere else, and only those
//! with a key get any.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ncclx_rs::rdma::{Key, Kind, MemoryRegion, Pending, RdmaError, RemoteBuffer, Span, Transport};
use ncclx_rs::sys::lent_bytes::LentBytes;
use ncclx_rs::sys::socket;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::lacking::lacks;
use crate::ucx_process;

mod ucx;

/// A test that takes longer hangs.
const LONG: Duration = Duration::from_secs(300);

type Settings = &'static [(&'static str, &'static str)];

/// The settings of each wire, and its name.
const WIRES: [(Settings, &str); 3] = [
    (&[("transport", "shm")], "shared memory"),
    (&[("transport", "shm"), ("single_copy_bytes", "0")], "shared memory"),
    (&[("transport", "tcp")], "tcp"),
];

/// The wire of a process of [`ucx_process`], whose environment says what UCX goes through.
const UCX: [(Settings, &str); 1] = [(&[("transport", "ucx")], "ucx")];

fn wires() -> &'static [(Settings, &'static str)] {
    if ucx_process::is_under_test() { &UCX } else { &WIRES }
}

fn transport(settings: &[(&str, &str)]) -> Transport {
    let hints: Vec<_> = settings.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    Transport::new(&hints).expect("a transport")
}

/// Two transports that are connected to each other.
fn pair(settings: &[(&str, &str)]) -> (Transport, Transport) {
    let (one, other) = (transport(settings), transport(settings));
    let (mine, theirs) = (one.bind().expect("bind"), other.bind().expect("bind"));
    one.connect(&theirs, LONG).expect("connect");
    other.connect(&mine, LONG).expect("connect");
    (one, other)
}

fn each_wire(test: impl Fn(Transport, Transport)) {
    for (settings, name) in wires() {
        let (one, other) = pair(settings);
        assert_eq!((one.wire(), other.wire()), (Some(*name), Some(*name)));
        test(one, other);
    }
}

fn lent(bytes: Vec<u8>) -> Arc<LentBytes> {
    Arc::new(LentBytes::owned(bytes))
}

/// What the other transport has written, in an order that only the kernel and mappings of both know (tests/tsan.supp).
fn arrived(bytes: &LentBytes) -> Vec<u8> {
    let mut copy = vec![0; bytes.len()];
    bytes.copy_out(0, &mut copy);
    copy
}

fn whole(local: &Arc<LentBytes>, remote: RemoteBuffer) -> Vec<Span> {
    vec![Span { local: local.clone(), offset: 0, len: local.len(), remote }]
}

fn write(transport: &Transport, local: &Arc<LentBytes>, remote: RemoteBuffer) -> Result<(), RdmaError> {
    transport.post(Kind::Write, whole(local, remote), LONG)?.wait(None)
}

fn read(transport: &Transport, local: &Arc<LentBytes>, remote: RemoteBuffer) -> Result<(), RdmaError> {
    transport.post(Kind::Read, whole(local, remote), LONG)?.wait(None)
}

fn numbers(seed: u64, len: usize) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..len).map(|_| random.random()).collect()
}

#[test]
fn bytes_of_any_size_arrive_where_they_should_and_nowhere_else() {
    each_wire(|one, _other| {
        for (turn, len) in [0, 1, 7, 4095, 16 * 1024, 65_537, (3 << 20) + 5].into_iter().enumerate() {
            let (before, after) = (3 + turn, 5);
            let memory = MemoryRegion::new(lent(vec![0xee; before + len + after]));
            let remote = memory.remote_buffer(before, len).expect("inside");
            let sent = numbers(turn as u64, len);
            write(&one, &lent(sent.clone()), remote).expect("write");
            let there = arrived(memory.bytes());
            assert!(there[before..before + len] == sent[..], "{len} bytes");
            assert!(there[..before].iter().chain(&there[before + len..]).all(|byte| *byte == 0xee), "{len} bytes");
            let local = lent(vec![0xdd; len + 20]);
            let span = Span { local: local.clone(), offset: 11, len, remote };
            one.post(Kind::Read, vec![span], LONG).expect("post").wait(None).expect("read");
            let here = arrived(&local);
            assert!(here[11..11 + len] == sent[..], "{len} bytes");
            assert!(here[..11].iter().chain(&here[11 + len..]).all(|byte| *byte == 0xdd), "{len} bytes");
        }
    });
}

#[test]
fn many_operations_in_any_order_reach_their_places() {
    const SLOTS: usize = 64;
    each_wire(|one, _other| {
        let seed: u64 = rand::random();
        println!("seed {seed}");
        let mut random = StdRng::seed_from_u64(seed);
        let size = |slot: usize| 1 + slot * slot * 17;
        let begin = |slot: usize| (0..slot).map(size).sum::<usize>();
        let mut model = vec![0u8; begin(SLOTS)];
        let memory = MemoryRegion::new(lent(model.clone()));
        for _ in 0..20 {
            let mut slots: Vec<usize> = (0..SLOTS).collect();
            slots.shuffle(&mut random);
            let (mut writes, mut reads) = (Vec::new(), Vec::new());
            for slot in slots {
                let remote = memory.remote_buffer(begin(slot), size(slot)).expect("inside");
                if random.random() {
                    let sent = numbers(random.random(), size(slot));
                    model[begin(slot)..begin(slot + 1)].copy_from_slice(&sent);
                    writes.push(one.post(Kind::Write, whole(&lent(sent), remote), LONG).expect("post"));
                } else {
                    let local = lent(vec![0; size(slot)]);
                    let pending = one.post(Kind::Read, whole(&local, remote), LONG).expect("post");
                    reads.push((pending, slot, local));
                }
            }
            writes.iter().for_each(|pending| pending.wait(None).expect("written"));
            for (pending, slot, local) in reads {
                pending.wait(None).expect("read");
                assert!(arrived(&local) == model[begin(slot)..begin(slot + 1)], "slot {slot}");
            }
            assert!(arrived(memory.bytes()) == model);
        }
    });
}

#[test]
fn of_overlapping_writes_each_piece_has_one() {
    each_wire(|one, _other| {
        let len = 600_000;
        let memory = MemoryRegion::new(lent(vec![0; len]));
        let remote = memory.remote_buffer(0, len).expect("inside");
        let pending: Vec<Pending> = (1..9u8)
            .map(|value| one.post(Kind::Write, whole(&lent(vec![value; len]), remote), LONG).expect("post"))
            .collect();
        pending.iter().for_each(|pending| pending.wait(None).expect("written"));
        assert!(arrived(memory.bytes()).iter().all(|byte| (1..9).contains(byte)));
    });
}

#[test]
fn four_peers_write_and_read_at_once() {
    for (settings, _) in wires() {
        let memory = Arc::new(MemoryRegion::new(lent(vec![0; 4_000_000])));
        let threads: Vec<_> = (0..4usize)
            .map(|peer| {
                let (one, other) = pair(settings);
                let memory = memory.clone();
                std::thread::spawn(move || {
                    let remote = memory.remote_buffer(1_000_000 * peer, 1_000_000).expect("inside");
                    for turn in 0..10u8 {
                        let sent = lent(vec![10 * peer as u8 + turn; 1_000_000]);
                        write(&one, &sent, remote).expect("write");
                        let local = lent(vec![0; 1_000_000]);
                        read(&other, &local, remote).expect("read");
                        assert!(arrived(&local) == arrived(&sent));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    }
}

#[test]
fn what_a_key_does_not_open_is_refused_and_the_transport_works_on() {
    each_wire(|one, _other| {
        for len in [10, 100_000] {
            let memory = MemoryRegion::new(lent(vec![1; 3 * len]));
            let part = memory.remote_buffer(len, len).expect("inside");
            let forged = RemoteBuffer { key: Key::from_bytes([7; 16]), ..part };
            let grown = RemoteBuffer { len: 2 * len, ..part };
            let before = RemoteBuffer { address: part.address - 1, ..part };
            for (remote, len, reason) in [
                (forged, len, "not registered with this key"),
                (grown, len + 1, "not all inside"),
                (before, len, "not all inside"),
                (RemoteBuffer { address: u64::MAX, ..part }, len, "not all inside"),
            ] {
                let local = lent(vec![9; len]);
                for error in [write(&one, &local, remote), read(&one, &local, remote)] {
                    let text = error.expect_err("refused").to_string();
                    assert!(text.contains(reason) && text.contains("process "), "{text}");
                    assert!(text.contains(&format!("{len} bytes at {:#x}", remote.address)), "{text}");
                }
                assert!(arrived(&local).iter().all(|byte| *byte == 9));
            }
            assert!(arrived(memory.bytes()).iter().all(|byte| *byte == 1));
            write(&one, &lent(vec![2; len]), part).expect("the transport works on");
            memory.deregister();
            let local = lent(vec![9; len]);
            for error in [write(&one, &local, part), read(&one, &local, part)] {
                assert!(matches!(error, Err(RdmaError::Refused { .. })), "{error:?}");
            }
            assert_eq!(arrived(memory.bytes()), [vec![1; len], vec![2; len], vec![1; len]].concat());
        }
        assert!(one.is_connected());
    });
}

#[test]
fn a_batch_names_the_span_that_failed_and_does_the_others() {
    each_wire(|one, _other| {
        let memory = MemoryRegion::new(lent(vec![0; 30]));
        let span = |offset, key: Option<Key>| {
            let remote = memory.remote_buffer(offset, 10).expect("inside");
            let remote = RemoteBuffer { key: key.unwrap_or(remote.key), ..remote };
            Span { local: lent(vec![5; 10]), offset: 0, len: 10, remote }
        };
        let spans = vec![span(0, None), span(10, Some(Key::from_bytes([7; 16]))), span(20, None)];
        let error = one.post(Kind::Write, spans, LONG).expect("post").wait(None).expect_err("the second");
        assert!(error.to_string().contains("refused span 2 of 3, 10 bytes at"), "{error}");
        assert_eq!(arrived(memory.bytes()), [vec![5; 10], vec![0; 10], vec![5; 10]].concat());
        one.post(Kind::Write, vec![], LONG).expect("post").wait(None).expect("nothing to do");
    });
}

#[test]
fn mistakes_are_refused_before_anything_is_sent() {
    let usage = |error: RdmaError| match error {
        RdmaError::Usage(usage) => usage.to_string(),
        other => panic!("{other}"),
    };
    let one = transport(wires()[0].0);
    let memory = MemoryRegion::new(lent(vec![0; 10]));
    let remote = memory.remote_buffer(0, 10).expect("inside");
    let error = read(&one, &lent(vec![0; 5]), remote).expect_err("not connected");
    assert!(matches!(error, RdmaError::NotConnected { .. }), "{error}");
    let error = usage(read(&one, &lent(vec![0; 11]), remote).expect_err("too long"));
    assert!(error.contains("read: argument `local`: expected at most the 10 bytes"), "{error}");
    let error = usage(write(&one, &lent(vec![0; 11]), remote).expect_err("too long"));
    assert!(error.contains("write: argument `local`"), "{error}");
    let span = Span { local: lent(vec![0; 5]), offset: 1, len: 5, remote };
    let error = usage(one.post(Kind::Read, vec![span], LONG).expect_err("outside"));
    assert!(error.contains("expected a range inside 5 bytes, got 5 bytes at 1"), "{error}");
    let error = usage(one.connect(b"something else", LONG).expect_err("no address"));
    assert!(error.contains("the bytes that the peer's bind returned"), "{error}");
    let bound = one.bind().expect("bind");
    assert_eq!(one.bind().expect("bind"), bound);
    one.connect(&bound, LONG).expect("also to itself");
    let error = usage(one.connect(&bound, LONG).expect_err("twice"));
    assert!(error.contains("a transport that was not connected"), "{error}");
    write(&one, &lent(vec![3; 10]), remote).expect("write");
    assert_eq!(arrived(memory.bytes()), [3; 10]);
}

#[test]
fn strangers_are_refused_and_peers_go_on() {
    for (settings, _) in wires() {
        let (one, other) = (transport(settings), transport(settings));
        let (mine, theirs) = (one.bind().expect("bind"), other.bind().expect("bind"));
        let mut forged: serde_json::Value = serde_json::from_slice(&theirs).expect("plain data");
        forged["secret"][0] = (forged["secret"][0].as_u64().expect("a byte") ^ 1).into();
        let forged = serde_json::to_vec(&forged).expect("plain data");
        let error = one.connect(&forged, LONG).expect_err("another secret");
        assert!(matches!(error, RdmaError::Unreachable { .. }), "{error}");
        assert!(!one.is_connected());
        // Strangers that find the port and know nothing. One of them says nothing either.
        let address: serde_json::Value = serde_json::from_slice(&theirs).expect("plain data");
        let port = address["tcp"].get(0).map(|target| target.as_str().expect("an address").to_owned());
        let mut strangers = Vec::new();
        if let Some(port) = port {
            for bytes in [vec![], vec![0xff; 200]] {
                let mut stranger = std::net::TcpStream::connect(&port).expect("it listens");
                stranger.write_all(&bytes).expect("written");
                if !bytes.is_empty() {
                    let mut answer = Vec::new();
                    let _ = stranger.read_to_end(&mut answer); // its challenge, and the end of the connection
                }
                strangers.push(stranger);
            }
        }
        one.connect(&theirs, LONG).expect("connect");
        other.connect(&mine, LONG).expect("connect");
        let memory = MemoryRegion::new(lent(vec![0; 10]));
        write(&one, &lent(vec![3; 10]), memory.remote_buffer(0, 10).expect("inside")).expect("write");
        assert_eq!(arrived(memory.bytes()), [3; 10]);
    }
}

/// A listener that says nothing to those that connect.
fn silent() -> std::net::TcpListener {
    std::net::TcpListener::bind("127.0.0.1:0").expect("it listens")
}

/// The bytes that `transport` has bound with another list of addresses.
fn addressed(transport: &Transport, change: impl FnOnce(&mut Vec<serde_json::Value>)) -> Vec<u8> {
    let mut address: serde_json::Value = serde_json::from_slice(&transport.bind().expect("bind")).expect("plain data");
    change(address["tcp"].as_array_mut().expect("addresses"));
    serde_json::to_vec(&address).expect("plain data")
}

#[test]
fn an_address_that_says_nothing_leaves_time_for_the_others() {
    let (one, other, silent) = (transport(WIRES[2].0), transport(WIRES[2].0), silent());
    let there = silent.local_addr().expect("its address").to_string();
    let theirs = addressed(&other, |addresses| addresses.insert(0, there.into()));
    one.connect(&theirs, LONG).expect("by the second address");
    assert_eq!(one.wire(), Some("tcp"));
}

#[test]
fn a_transport_is_closed_while_it_connects() {
    let (one, other, silent) = (transport(WIRES[2].0), transport(WIRES[2].0), silent());
    let there = silent.local_addr().expect("its address").to_string();
    let theirs = addressed(&other, |addresses| *addresses = vec![there.into()]);
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| one.connect(&theirs, LONG));
        let (stranger, _) = silent.accept().expect("it connects");
        let error = one.connect(&theirs, LONG).expect_err("it connects already").to_string();
        assert!(error.contains("one that another thread connects") && !one.is_connected(), "{error}");
        one.close();
        assert!(!connecting.is_finished(), "nobody has answered");
        drop((stranger, silent));
        let error = connecting.join().expect("no panic").expect_err("it was closed");
        assert!(error.to_string().contains("the transport was closed meanwhile"), "{error}");
    });
    let error = one.connect(&theirs, LONG).expect_err("it was closed").to_string();
    assert!(error.contains("got one that was closed"), "{error}");
}

#[test]
fn a_transport_that_is_closed_before_its_peer_answers_ends_the_connection() {
    let (one, other, silent) = (transport(WIRES[2].0), transport(WIRES[2].0), silent());
    let there = silent.local_addr().expect("its address").to_string();
    let mut peers = Vec::new();
    let theirs = addressed(&other, |addresses| peers = std::mem::replace(addresses, vec![there.into()]));
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| one.connect(&theirs, LONG));
        let (near, _) = silent.accept().expect("it connects");
        one.close();
        let far = std::net::TcpStream::connect(peers[0].as_str().expect("an address")).expect("it listens");
        near.set_read_timeout(Some(LONG)).expect("a limit");
        let (mut to_near, mut from_far) = (near.try_clone().expect("a copy"), far.try_clone().expect("a copy"));
        scope.spawn(move || std::io::copy(&mut from_far, &mut to_near));
        std::io::copy(&mut &near, &mut &far).expect("it ends");
        far.shutdown(std::net::Shutdown::Both).expect("an end for the peer");
        let error = connecting.join().expect("no panic").expect_err("it was closed").to_string();
        assert!(error.contains("the transport was closed meanwhile"), "{error}");
    });
}

#[test]
fn connections_that_say_nothing_keep_no_peer_out() {
    let (one, other) = (transport(WIRES[2].0), transport(WIRES[2].0));
    let theirs = other.bind().expect("bind");
    let address: serde_json::Value = serde_json::from_slice(&theirs).expect("plain data");
    let port = address["tcp"][0].as_str().expect("an address");
    // More than it has places for.
    let strangers: Vec<_> = (0..300).map(|_| std::net::TcpStream::connect(port).expect("it listens")).collect();
    one.connect(&theirs, LONG).expect("connect");
    let memory = MemoryRegion::new(lent(vec![0; 10]));
    write(&one, &lent(vec![3; 10]), memory.remote_buffer(0, 10).expect("inside")).expect("write");
    assert_eq!(arrived(memory.bytes()), [3; 10]);
    drop(strangers);
}

/// Any that is not this process's.
const OTHER_USER: u32 = 54_321;

/// So many connections to a socket by a thread of another user; none where this process may not have such threads.
fn call_as_other_user(name: &[u8], count: usize) -> Option<Vec<UnixStream>> {
    let call = || {
        // Of this thread alone, which ends soon.
        rustix::thread::set_thread_res_uid(None, rustix::process::Uid::from_raw(OTHER_USER), None).ok()?;
        Some((0..count).map(|_| socket::connect_unix(name).expect("it listens")).collect())
    };
    std::thread::scope(|scope| scope.spawn(call).join().expect("no panic"))
}

#[test]
fn callers_of_another_user_keep_no_peer_out() {
    let settings = WIRES[0].0;
    let (one, other) = (transport(settings), transport(settings));
    let theirs = other.bind().expect("bind");
    let address: serde_json::Value = serde_json::from_slice(&theirs).expect("plain data");
    let name: Vec<u8> = serde_json::from_value(address["unix"].clone()).expect("a name");
    // More than a transport has places for connections. They stay open, and say nothing.
    let Some(callers) = call_as_other_user(&name, 100) else {
        return lacks("root");
    };
    one.connect(&theirs, LONG).expect("connect");
    assert_eq!(one.wire(), Some("shared memory"));
    for mut caller in &callers {
        caller.set_nonblocking(false).expect("a setting");
        let mut said = Vec::new();
        // Either way the connection has ended.
        let _ = caller.read_to_end(&mut said);
        assert!(said.is_empty(), "another user was given a challenge");
    }
}

#[test]
fn nothing_is_written_once_the_memory_is_deregistered() {
    each_wire(|one, _other| {
        let (len, one) = (1 << 20, Arc::new(one));
        for _ in 0..5 {
            let memory = MemoryRegion::new(lent(vec![0; len]));
            let remote = memory.remote_buffer(0, len).expect("inside");
            let stop = Arc::new(AtomicBool::new(false));
            let (writer, stopped) = (one.clone(), stop.clone());
            let writing = std::thread::spawn(move || {
                let source = lent(vec![7; len]);
                let mut refused = 0;
                while !stopped.load(Ordering::SeqCst) {
                    match write(&writer, &source, remote) {
                        Ok(()) => assert_eq!(refused, 0, "a key does not come back"),
                        Err(RdmaError::Refused { .. }) => refused += 1,
                        Err(other) => panic!("{other}"),
                    }
                }
                refused
            });
            while arrived(memory.bytes())[len - 1] == 0 {
                std::thread::yield_now();
            }
            memory.deregister();
            memory.bytes().copy_in(0, &vec![1; len]);
            std::thread::sleep(Duration::from_millis(20));
            stop.store(true, Ordering::SeqCst);
            writing.join().expect("no panic");
            assert!(arrived(memory.bytes()).iter().all(|byte| *byte == 1), "written after the end");
        }
    });
}

#[test]
fn a_read_that_ends_well_has_only_what_was_registered() {
    each_wire(|one, _other| {
        for turn in 0..5 {
            let len = 4 << 20;
            let memory = MemoryRegion::new(lent(vec![1; len]));
            let remote = memory.remote_buffer(0, len).expect("inside");
            let locals: Vec<_> = (0..20).map(|_| lent(vec![0; len])).collect();
            let post = |local: &Arc<LentBytes>| one.post(Kind::Read, whole(local, remote), LONG).expect("post");
            let reads: Vec<Pending> = locals.iter().map(post).collect();
            reads[turn].wait(None).expect("still registered");
            memory.deregister();
            memory.bytes().copy_in(0, &vec![9; len]);
            for (read, local) in reads.iter().zip(&locals) {
                match read.wait(None) {
                    Ok(()) => assert!(arrived(local).iter().all(|byte| *byte == 1), "read after the end"),
                    Err(RdmaError::Refused { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
            }
        }
        assert!(one.is_connected());
    });
}

#[test]
fn short_reads_of_a_known_key_are_done_when_they_have_begun() {
    let (one, other) = pair(&[("transport", "shm")]);
    let memory = MemoryRegion::new(lent(numbers(3, 1 << 20)));
    let remote = memory.remote_buffer(0, 1 << 20).expect("inside");
    let local = lent(vec![0; 1000]);
    read(&one, &local, remote).expect("read, after its owner was asked where it lies");
    let part = |at: usize| Span {
        local: local.clone(),
        offset: 100 * at,
        len: 100,
        remote: RemoteBuffer { address: remote.address + 9_000 * at as u64, ..remote },
    };
    let pending = one.post(Kind::Read, (0..10).map(part).collect(), LONG).expect("post");
    assert!(pending.is_done(), "somebody was asked");
    pending.wait(None).expect("read");
    let all = arrived(memory.bytes());
    assert!((0..10).all(|at| arrived(&local)[100 * at..][..100] == all[9_000 * at..][..100]));
    let mut long = part(9);
    long.remote.address += 1 << 20;
    let refused = one.post(Kind::Read, vec![part(1), long], LONG).expect("post").wait(None).expect_err("outside");
    assert!(matches!(refused, RdmaError::Refused { .. }) && refused.to_string().contains("span 2 of 2"), "{refused}");
    memory.deregister();
    let refused = read(&one, &local, remote).expect_err("deregistered");
    assert!(matches!(refused, RdmaError::Refused { .. }), "{refused}");
    drop(other);
}

#[test]
fn a_peer_that_has_closed_is_not_read() {
    let (one, other) = pair(&[("transport", "shm")]);
    let memory = MemoryRegion::new(lent(vec![1; 100]));
    let (local, remote) = (lent(vec![0; 100]), memory.remote_buffer(0, 100).expect("inside"));
    read(&one, &local, remote).expect("read");
    other.close();
    let error = read(&one, &local, remote).expect_err("closed");
    assert!(matches!(error, RdmaError::Broken { .. } | RdmaError::NotConnected { .. }), "{error}");
}

#[test]
fn hundreds_of_long_reads_and_writes_are_in_flight_at_once() {
    each_wire(|one, _other| {
        let (count, len) = (300, 20_000);
        let memory = MemoryRegion::new(lent(numbers(1, count * len)));
        let span = |slot: usize, local: &Arc<LentBytes>| {
            let remote = memory.remote_buffer(0, count * len).expect("inside");
            let remote = RemoteBuffer { address: remote.address + (slot * len) as u64, len, ..remote };
            Span { local: local.clone(), offset: slot * len, len, remote }
        };
        let local = lent(vec![0; count * len]);
        let read = one.post(Kind::Read, (0..count).map(|slot| span(slot, &local)).collect(), LONG).expect("post");
        read.wait(None).expect("read");
        assert!(arrived(&local) == arrived(memory.bytes()));
        let local = lent(numbers(2, count * len));
        let spans = (0..count).map(|slot| span(slot, &local));
        let writes: Vec<_> = spans.map(|span| one.post(Kind::Write, vec![span], LONG).expect("post")).collect();
        writes.iter().for_each(|write| write.wait(None).expect("written"));
        assert!(arrived(&local) == arrived(memory.bytes()));
    });
}

#[test]
fn a_peer_that_closes_ends_what_is_in_flight_and_is_named() {
    each_wire(|one, other| {
        let memory = MemoryRegion::new(lent(vec![0; 64 << 20]));
        let remote = memory.remote_buffer(0, 64 << 20).expect("inside");
        let sources: Vec<_> = (0..20).map(|_| lent(vec![1; 8 << 20])).collect();
        let pending: Vec<Pending> =
            sources.iter().map(|source| one.post(Kind::Write, whole(source, remote), LONG).expect("post")).collect();
        other.close();
        let ends: Vec<_> = pending.iter().map(|pending| pending.wait(None)).collect();
        let broken = |end: &Result<(), RdmaError>| matches!(end, Err(RdmaError::Broken { .. }));
        assert!(ends.iter().all(|end| end.is_ok() || broken(end)), "{ends:?}");
        while one.is_connected() {
            std::thread::yield_now();
        }
        let error = write(&one, &sources[0], remote).expect_err("it is gone");
        assert!(matches!(error, RdmaError::NotConnected { .. }), "{error}");
    });
}

#[test]
fn a_wait_with_a_limit_leaves_the_operation_in_flight() {
    each_wire(|one, _other| {
        let len = 64 << 20;
        let memory = MemoryRegion::new(lent(vec![0; len]));
        let pending =
            one.post(Kind::Write, whole(&lent(vec![1; len]), memory.remote_buffer(0, len).expect("inside")), LONG);
        let pending = pending.expect("post");
        let first = pending.wait(Some(Duration::ZERO));
        assert!(matches!(first, Ok(()) | Err(RdmaError::InFlight { .. })), "{first:?}");
        pending.wait(None).expect("written");
        assert!(pending.is_done() && arrived(memory.bytes()).iter().all(|byte| *byte == 1));
    });
}
