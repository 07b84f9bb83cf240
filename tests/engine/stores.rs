//! The stores: what all of them do, and how the one over TCP fails.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which clippy does not count as tests")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use ncclx_rs::comm::bootstrap::Secret;
use ncclx_rs::comm::store::{KEY_LIMIT, MemoryStore, PrefixStore, Store, TcpStore, VALUE_LIMIT};
use ncclx_rs::{CommOptions, Communicator, Rank, StoreError};

const LONG: Duration = Duration::from_secs(60);

/// Each kind of store, as two parties see it.
fn pairs() -> Vec<(&'static str, [Arc<dyn Store>; 2])> {
    let memory = Arc::new(MemoryStore::default());
    let served = Arc::new(TcpStore::serve("127.0.0.1:0").unwrap());
    let client = Arc::new(TcpStore::connect(served.address(), LONG).unwrap());
    let part = |store: Arc<dyn Store>| Arc::new(PrefixStore::new("part", store));
    vec![
        ("memory", [memory.clone(), memory]),
        ("tcp", [served.clone(), client.clone()]),
        ("prefix", [part(served), part(client)]),
    ]
}

#[test]
fn values_cross_and_are_replaced() {
    let every_byte: Vec<u8> = (0..=255).collect();
    for (kind, [one, other]) in pairs() {
        for value in [every_byte.as_slice(), b"", b"second"] {
            one.set("key", value).unwrap();
            assert_eq!(other.get("key", Duration::ZERO), Ok(value.to_vec()), "{kind}");
        }
        other.set("", b"a key without letters").unwrap();
        assert_eq!(one.get("", Duration::ZERO), Ok(b"a key without letters".to_vec()), "{kind}");
    }
}

#[test]
fn gets_wait_for_their_keys() {
    for (kind, [one, other]) in pairs() {
        std::thread::scope(|scope| {
            let wait = |key: &'static str| {
                let (one, other) = (one.clone(), other.clone());
                [scope.spawn(move || one.get(key, LONG)), scope.spawn(move || other.get(key, LONG))]
            };
            let waiting = [wait("first"), wait("second")];
            std::thread::sleep(Duration::from_millis(50));
            other.set("second", b"2").unwrap();
            one.set("first", b"1").unwrap();
            for (threads, value) in waiting.into_iter().zip([b"1", b"2"]) {
                for thread in threads {
                    assert_eq!(thread.join().unwrap(), Ok(value.to_vec()), "{kind}");
                }
            }
        });
    }
}

#[test]
fn a_get_in_vain_names_key_and_time() {
    for (kind, [_, store]) in pairs() {
        for wait in [Duration::ZERO, Duration::from_millis(20)] {
            let error = store.get("absent", wait).unwrap_err();
            assert!(error.contains("absent`") && error.contains(&format!("{wait:?}")), "{kind}: {error}");
        }
    }
}

#[test]
fn a_prefix_keeps_communicators_apart() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let [a, b] = ["a", "b"].map(|prefix| PrefixStore::new(prefix, store.clone()));
    a.set("key", b"a").unwrap();
    b.set("key", b"b").unwrap();
    assert_eq!(a.get("key", Duration::ZERO), Ok(b"a".to_vec()));
    assert_eq!(store.get("b/key", Duration::ZERO), Ok(b"b".to_vec()));
}

#[test]
fn many_clients_at_once_lose_nothing() {
    let served = TcpStore::serve("127.0.0.1:0").unwrap();
    std::thread::scope(|scope| {
        for rank in 0..64 {
            let address = served.address();
            scope.spawn(move || {
                let store = TcpStore::connect(address, LONG).unwrap();
                store.set(&format!("rank {rank}"), &[rank; 3000]).unwrap();
                let next = (rank + 1) % 64;
                assert_eq!(store.get(&format!("rank {next}"), LONG), Ok(vec![next; 3000]));
            });
        }
    });
}

#[test]
fn a_store_with_a_secret_serves_only_clients_that_know_it() {
    let [ours, theirs] = [7, 8].map(|byte| Some(Secret::new([byte; 32])));
    let served = TcpStore::serve_with("127.0.0.1:0", ours).unwrap();
    served.set("key", b"value").unwrap();
    let friend = TcpStore::connect_with(served.address(), LONG, ours).unwrap();
    assert_eq!(friend.get("key", Duration::ZERO), Ok(b"value".to_vec()));
    let refusal = |address: &str, secret| TcpStore::connect_with(address, LONG, secret).unwrap_err().to_string();
    let wrong = refusal(served.address(), theirs);
    assert!(wrong.contains("does not know the job's secret"), "{wrong}");
    let without = refusal(served.address(), None);
    assert!(without.contains("prove to know its secret (job_secret)"), "{without}");
    let open = TcpStore::serve("127.0.0.1:0").unwrap();
    let needless = refusal(open.address(), ours);
    assert!(needless.contains("it has no secret (job_secret)"), "{needless}");
    // Requests that do not wait for the proof are not served either.
    let mut hasty = TcpStream::connect(served.address()).unwrap();
    let request = |kind: u8, key: &[u8], value: &[u8]| {
        let lengths = [key.len() as u32, value.len() as u32].map(u32::to_le_bytes).concat();
        [b"ncclxkv1".as_slice(), &[kind], &lengths, &[0; 8], key, value].concat()
    };
    let answer = [0; 96];
    for message in [request(4, b"", b""), request(5, b"", &answer), request(2, b"key", b"forged")] {
        // The server may have hung up.
        let _ = hasty.write_all(&message);
    }
    let _ = hasty.read_to_end(&mut Vec::new());
    assert_eq!(friend.get("key", Duration::ZERO), Ok(b"value".to_vec()));
}

#[test]
fn both_families_and_names_lead_to_the_store() {
    let served = TcpStore::serve("[::]:0");
    let Ok(served) = served else { return };
    let (host, port) = served.address().rsplit_once(':').unwrap();
    assert_eq!((host, served.rendezvous_host().as_deref()), ("127.0.0.1", Some("127.0.0.1")));
    served.set("key", b"1").unwrap();
    for host in ["127.0.0.1", "localhost", "[::1]"] {
        if host == "[::1]" && TcpListener::bind("[::1]:0").is_err() {
            continue;
        }
        let store = TcpStore::connect(&format!("{host}:{port}"), LONG).unwrap();
        assert_eq!(store.get("key", Duration::ZERO), Ok(b"1".to_vec()));
        assert_eq!(store.rendezvous_host().as_deref(), Some(host));
    }
}

/// An address where nobody listens, for now.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn the_server_may_come_later() {
    let address = free_address();
    std::thread::scope(|scope| {
        let client = scope.spawn(|| TcpStore::connect(&address, LONG));
        std::thread::sleep(Duration::from_millis(100));
        let _served = TcpStore::serve(&address).unwrap();
        client.join().unwrap().unwrap();
    });
}

#[test]
fn an_address_can_be_served_again_at_once() {
    let address = free_address();
    for _ in 0..3 {
        let served = TcpStore::serve(&address).unwrap();
        assert!(served.get("key", Duration::ZERO).is_err(), "a new server has no old keys");
        // A connection that the server ends first lingers at its port.
        let _lingers = TcpStream::connect(&address).unwrap();
        TcpStore::connect(&address, LONG).unwrap().set("key", b"").unwrap();
        drop(served);
    }
}

#[test]
fn nobody_at_the_address_is_an_error_that_names_it() {
    let address = free_address();
    let waited = Duration::from_millis(100);
    let error = TcpStore::connect(&address, waited).unwrap_err();
    assert!(matches!(&error, StoreError::Absent { address: named, .. } if *named == address), "{error}");
    assert!(error.to_string().contains("refused") && error.to_string().contains("100ms"), "{error}");
    for wrong in ["127.0.0.1", "127.0.0.1:66000", "no such host:1"] {
        assert!(TcpStore::connect(wrong, waited).unwrap_err().to_string().contains(wrong));
        assert!(TcpStore::serve(wrong).unwrap_err().to_string().contains(wrong));
    }
}

#[test]
fn an_address_in_use_is_an_error_that_names_it() {
    let served = TcpStore::serve("127.0.0.1:0").unwrap();
    let error = TcpStore::serve(served.address()).unwrap_err();
    assert!(matches!(&error, StoreError::Listen { address, .. } if address == served.address()), "{error}");
}

#[test]
fn something_else_at_the_address_is_not_taken_for_a_store() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::scope(|scope| {
        scope.spawn(|| listener.accept().unwrap().0.write_all(b"HTTP/1.1 400 Bad Request\r\n").unwrap());
        let error = TcpStore::connect(&address, LONG).unwrap_err().to_string();
        assert!(error.contains(&address), "{error}");
    });
}

#[test]
fn a_server_that_ends_ends_waiting_requests() {
    let served = TcpStore::serve("127.0.0.1:0").unwrap();
    let client = TcpStore::connect(served.address(), LONG).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| client.get("key", Duration::from_secs(3600)));
        std::thread::sleep(Duration::from_millis(50));
        drop(served);
        let error = waiting.join().unwrap().unwrap_err();
        assert!(error.contains("`key`") && error.contains(client.address()), "{error}");
    });
    let error = client.set("other", b"").unwrap_err();
    assert!(error.contains("`other`") && error.contains("refused"), "{error}");
}

#[test]
fn unauthenticated_peers_disturb_no_client() {
    let served = TcpStore::serve("127.0.0.1:0").unwrap();
    let call = || TcpStream::connect(served.address()).unwrap();
    let silent = call();
    let mut slow = call();
    slow.write_all(b"ncclx").unwrap();
    let mut browser = call();
    browser.write_all(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = browser.read_to_end(&mut answer);
    let mut large = call();
    large.write_all(&[b"ncclxkv1\x02".as_slice(), &[255; 16]].concat()).unwrap();
    let _ = large.read_to_end(&mut answer);
    assert!(String::from_utf8_lossy(&answer).contains("longer than"));
    let mut babbler = call();
    let wait = [b"ncclxkv1\x03\x01\0\0\0\0\0\0\0".as_slice(), &[255; 8], b"k", b"babble"].concat();
    babbler.write_all(&wait).unwrap();
    assert_eq!(babbler.read(&mut [0]).unwrap_or(0), 0, "who speaks out of turn is hung up on");
    let client = TcpStore::connect(served.address(), LONG).unwrap();
    client.set("key", b"1").unwrap();
    assert_eq!(served.get("key", LONG), Ok(b"1".to_vec()));
    drop((silent, slow));
}

#[test]
fn one_connection_carries_several_requests() {
    let served = TcpStore::serve("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(served.address()).unwrap();
    let ping = [b"ncclxkv1\x01".as_slice(), &[0; 16]].concat();
    stream.write_all(&ping.repeat(3)).unwrap();
    let mut replies = [9; 15];
    stream.read_exact(&mut replies).unwrap();
    assert_eq!(replies, *[1, 0, 0, 0, 0].repeat(3));
}

#[test]
fn many_that_wait_leave_room_for_those_that_set() {
    let served = TcpStore::serve("127.0.0.1:0").unwrap();
    let wait = || {
        let mut stream = TcpStream::connect(served.address()).unwrap();
        let hour = 3_600_000_u64.to_le_bytes();
        let request = [b"ncclxkv1\x03\x03\0\0\0\0\0\0\0".as_slice(), &hour, b"key"].concat();
        stream.write_all(&request).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream
    };
    let mut waiting: Vec<_> = (0..1024).map(|_| wait()).collect();
    let mut reply = [9; 5];
    wait().read_exact(&mut reply).unwrap();
    assert_eq!(reply, [3, 0, 0, 0, 0], "one more asks again");
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| served.get("key", LONG));
        std::thread::sleep(Duration::from_millis(50));
        served.set("key", b"1").unwrap();
        assert_eq!(asking.join().unwrap(), Ok(b"1".to_vec()));
    });
    for stream in &mut waiting {
        let mut reply = [9; 6];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply, *b"\x02\x01\0\0\x001");
    }
}

#[test]
fn long_keys_and_values_are_refused_and_the_longest_are_not() {
    let store = TcpStore::serve("127.0.0.1:0").unwrap();
    let (key, value) = ("k".repeat(KEY_LIMIT), vec![7; VALUE_LIMIT]);
    store.set(&key, &value).unwrap();
    assert_eq!(store.get(&key, Duration::ZERO), Ok(value.clone()));
    assert!(store.set(&format!("{key}k"), b"").unwrap_err().contains("longer than"));
    assert!(store.set("key", &[value, vec![7]].concat()).unwrap_err().contains("longer than"));
}

#[test]
fn a_server_ends_with_clients_connected() {
    let served = TcpStore::serve("127.0.0.1:0").unwrap();
    let mut idle = TcpStream::connect(served.address()).unwrap();
    drop(served);
    assert_eq!(idle.read(&mut [0]).unwrap_or(0), 0);
}

#[test]
fn communicators_meet_in_one_store() {
    let served = Arc::new(TcpStore::serve("127.0.0.1:0").unwrap());
    let ranks: Vec<_> = (0..3)
        .map(|rank| {
            let store = match rank {
                0 => served.clone(),
                _ => Arc::new(TcpStore::connect(served.address(), LONG).unwrap()),
            };
            std::thread::spawn(move || {
                for name in ["first", "second"] {
                    let store = Arc::new(PrefixStore::new(name, store.clone()));
                    let (rank, name) = (Rank(rank), name.to_string());
                    let options = CommOptions { name, rank, size: 3, store, timeout: Some(LONG), hints: vec![] };
                    Communicator::new(options).unwrap().shutdown().unwrap();
                }
            })
        })
        .collect();
    for rank in ranks {
        rank.join().unwrap();
    }
}
