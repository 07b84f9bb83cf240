//! The rendezvous, with threads as ranks.

#![allow(clippy::unwrap_used, reason = "helpers of tests, which clippy does not count as tests")]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ncclx_rs::comm::bootstrap::{Bootstrap, Build, Keys, ROOT_KEY, join};
use ncclx_rs::comm::store::{MemoryStore, Store};
use ncclx_rs::config::Config;
use ncclx_rs::{InitError, Rank, Topology};

/// The script that takes the sources' fingerprint.
#[path = "../../build.rs"]
#[allow(dead_code, reason = "cargo calls its beginning")]
mod script;

const LONG: Duration = Duration::from_secs(60);

#[derive(Default)]
struct CountingStore {
    inner: MemoryStore,
    sets: AtomicUsize,
    gets: AtomicUsize,
    host: Option<String>,
}

impl CountingStore {
    fn calls(&self) -> (usize, usize) {
        (self.sets.load(Ordering::Relaxed), self.gets.load(Ordering::Relaxed))
    }

    /// What rank 0 published, as JSON.
    fn record(&self) -> serde_json::Value {
        serde_json::from_slice(&self.inner.get(ROOT_KEY, LONG).unwrap()).unwrap()
    }

    fn port(&self) -> u16 {
        self.record()["root"]["Listening"]["place"]["port"].as_u64().unwrap().try_into().unwrap()
    }
}

impl Store for CountingStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        self.sets.fetch_add(1, Ordering::Relaxed);
        self.inner.set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        self.gets.fetch_add(1, Ordering::Relaxed);
        self.inner.get(key, timeout)
    }

    fn rendezvous_host(&self) -> Option<String> {
        self.host.clone()
    }
}

fn config(hints: &[(&str, &str)]) -> Config {
    let hints: Vec<_> = hints.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    Config::resolve_with(&|_| None, &hints).unwrap()
}

type Outcome = Result<Bootstrap, InitError>;

fn own_address(rank: usize) -> BTreeMap<String, Vec<u8>> {
    BTreeMap::from([("tcp".to_string(), vec![u8::try_from(rank).unwrap(); 3])])
}

fn join_as(rank: usize, size: usize, store: &dyn Store, config: &Config) -> Outcome {
    join("test", Rank::from(rank), size, store, config, |_: &Keys| Ok(own_address(rank)))
}

/// Each of `parts` is a rank, the world size it expects and its settings.
fn meet(store: &dyn Store, parts: &[(usize, usize, Config)]) -> Vec<Outcome> {
    std::thread::scope(|scope| {
        let start = |(rank, size, config)| scope.spawn(move || join_as(rank, size, store, config));
        let threads: Vec<_> = parts.iter().map(|(rank, size, config)| start((*rank, *size, config))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn world(ranks: impl IntoIterator<Item = usize>, size: usize, config: &Config) -> Vec<(usize, usize, Config)> {
    ranks.into_iter().map(|rank| (rank, size, config.clone())).collect()
}

#[test]
fn all_ranks_get_the_same_table_with_one_store_call_each() {
    for size in [1, 2, 3, 8, 64, 65, 200] {
        let store = CountingStore::default();
        let outcomes = meet(&store, &world(0..size, size, &Config::default()));
        let first = outcomes[0].as_ref().unwrap();
        assert_eq!(first.ranks.len(), size);
        for (rank, outcome) in outcomes.iter().enumerate() {
            let bootstrap = outcome.as_ref().unwrap();
            assert_eq!(bootstrap.comm_id, first.comm_id);
            assert_eq!(bootstrap.secret, first.secret);
            assert_eq!(bootstrap.ranks, first.ranks);
            assert_eq!(bootstrap.ranks[rank].rank, Rank::from(rank));
            assert_eq!(bootstrap.ranks[rank].addresses, own_address(rank).into());
        }
        assert_eq!(store.calls(), if size == 1 { (0, 0) } else { (1, size - 1) });
    }
}

/// The settings of a rank whose host has eight, so that a large world has many hosts.
fn posed(rank: usize, settings: &[(&str, &str)]) -> Config {
    config(&[settings, &[("host_id", format!("host {}", rank / 8).as_str())]].concat())
}

#[test]
fn in_a_large_world_the_table_goes_through_other_ranks() {
    const SIZE: usize = 72;
    for settings in [&[] as &[_], &[("tls", "on")], &[("job_secret", "0123456789abcdef")]] {
        let store = CountingStore::default();
        let parts: Vec<_> = (0..SIZE).map(|rank| (rank, SIZE, posed(rank, settings))).collect();
        let outcomes = meet(&store, &parts);
        let ranks = &outcomes[0].as_ref().unwrap().ranks;
        assert!(ranks.iter().enumerate().all(|(rank, info)| *info.host_id == *format!("host {}", rank / 8)));
        for outcome in &outcomes {
            assert_eq!(outcome.as_ref().unwrap().ranks, *ranks);
        }
        assert_eq!(store.calls(), (1, SIZE - 1));
    }
}

#[test]
fn a_rank_of_a_large_world_that_cannot_take_part_ends_it_for_all() {
    const SIZE: usize = 72;
    let store = MemoryStore::default();
    std::thread::scope(|scope| {
        let store = &store;
        let others: Vec<_> =
            (0..SIZE - 1).map(|rank| scope.spawn(move || join_as(rank, SIZE, store, &posed(rank, &[])))).collect();
        let refuse = |_: &Keys| Err(InitError::Config("no shared memory".to_string()));
        join("test", Rank::from(SIZE - 1), SIZE, store, &Config::default(), refuse).unwrap_err();
        for other in others {
            let error = other.join().unwrap().unwrap_err().to_string();
            assert!(error.contains("rank 71 failed: no shared memory"), "{error}");
        }
    });
}

#[test]
fn missing_ranks_are_named_by_all_that_came() {
    let settings = config(&[("connect_timeout_seconds", "3")]);
    let outcomes = meet(&MemoryStore::default(), &world([0, 1, 4], 5, &settings));
    for outcome in outcomes {
        let InitError::Missing { missing, waited, .. } = outcome.unwrap_err() else { panic!("another error") };
        assert_eq!((missing, waited), (vec![2, 3], Duration::from_secs(3)));
    }
}

#[test]
fn a_rank_with_a_shorter_timeout_still_learns_which_ranks_are_missing() {
    let hasty = config(&[("connect_timeout_seconds", "2")]);
    let calm = config(&[("connect_timeout_seconds", "4")]);
    let outcomes = meet(&MemoryStore::default(), &[(0, 3, calm), (2, 3, hasty)]);
    for outcome in outcomes {
        assert!(matches!(outcome, Err(InitError::Missing { missing, .. }) if missing == [1]));
    }
}

#[test]
fn an_absent_root_is_named() {
    let settings = config(&[("connect_timeout_seconds", "0.2")]);
    let error = join_as(1, 2, &MemoryStore::default(), &settings).unwrap_err();
    assert!(matches!(&error, InitError::Missing { missing, .. } if *missing == [0]), "{error}");
}

#[test]
fn a_rank_that_comes_too_late_learns_which_ranks_were_missing() {
    let store = MemoryStore::default();
    assert!(join_as(0, 3, &store, &config(&[("connect_timeout_seconds", "0.1")])).is_err());
    let error = join_as(1, 3, &store, &Config::default()).unwrap_err();
    assert!(matches!(&error, InitError::Missing { missing, .. } if *missing == [1, 2]), "{error}");
}

/// What a root with these settings leaves in the store if it ends without a word: that it listens.
fn record_of_a_root_that_left(store: &CountingStore, settings: &[(&str, &str)]) -> serde_json::Value {
    let settings = config(&[settings, &[("connect_timeout_seconds", "2")]].concat());
    std::thread::scope(|scope| {
        let root = scope.spawn(|| join_as(0, 2, store, &settings));
        let record = store.record();
        assert!(record["root"]["Listening"].is_object(), "{record}");
        root.join().expect("no panic").expect_err("nobody has come");
        record
    })
}

#[test]
fn a_rank_that_is_faster_than_the_next_root_waits_for_it() {
    let store = &CountingStore::default();
    // What the root before has left: where it listened, or that it has ended.
    let listened = record_of_a_root_that_left(store, &[]);
    let ended = store.record();
    assert!(ended["root"]["Ended"].is_object(), "{ended}");
    for left in [listened, ended] {
        store.set(ROOT_KEY, left.to_string().as_bytes()).unwrap();
        std::thread::scope(|scope| {
            let early = scope.spawn(|| join_as(1, 2, store, &Config::default()));
            // Longer than all addresses take to refuse it.
            std::thread::sleep(Duration::from_secs(1));
            assert!(!early.is_finished(), "after {left}");
            join_as(0, 2, store, &Config::default()).unwrap();
            early.join().unwrap().unwrap();
        });
    }
}

#[test]
fn a_root_that_left_is_unreachable_at_each_address() {
    let store = CountingStore::default();
    let record = record_of_a_root_that_left(&store, &[]);
    store.set(ROOT_KEY, record.to_string().as_bytes()).unwrap();
    let error = join_as(1, 2, &store, &config(&[("connect_timeout_seconds", "2")])).unwrap_err();
    let InitError::Unreachable { rank: 0, cause, .. } = &error else { panic!("{error}") };
    let port = store.port();
    assert!(cause.contains(&format!("127.0.0.1:{port}: ")) && cause.contains(&format!("[::1]:{port}: ")), "{error}");
}

#[test]
fn unauthenticated_peers_disturb_no_rank() {
    unauthenticated_peers_disturb_no_rank_with(&Config::default());
    unauthenticated_peers_disturb_no_rank_with(&config(&[("tls", "on")]));
}

fn unauthenticated_peers_disturb_no_rank_with(config: &Config) {
    let store = CountingStore::default();
    std::thread::scope(|scope| {
        let store = &store;
        let root = scope.spawn(|| join_as(0, 2, store, config));
        let port = store.port();
        let call = || TcpStream::connect(("127.0.0.1", port)).unwrap();
        let scan = call();
        scan.shutdown(Shutdown::Both).unwrap();
        let silent = call();
        let mut slow = call();
        slow.write_all(b"ncclx").unwrap();
        let mut browser = call();
        browser.write_all(&[b'G'; 4096]).unwrap();
        let mut liar = call();
        liar.write_all(&[b"ncclx_rs".as_slice(), &1u32.to_le_bytes(), &[0; 32]].concat()).unwrap();
        liar.read_exact(&mut [0; 64]).unwrap();
        liar.write_all(&[0; 32]).unwrap();
        assert_eq!(liar.read(&mut [0]).unwrap_or(0), 0, "a liar is hung up on");
        let joined = join_as(1, 2, store, config).unwrap();
        assert_eq!(root.join().unwrap().unwrap().ranks, joined.ranks);
        drop((silent, slow, browser));
    });
}

#[test]
fn a_rank_with_another_secret_does_not_get_in() {
    let store = CountingStore::default();
    std::thread::scope(|scope| {
        let store = &store;
        let root = scope.spawn(|| join_as(0, 2, store, &config(&[("connect_timeout_seconds", "5")])));
        let mut record = store.record();
        record["root"]["Listening"]["keys"]["secret"] = vec![7; 32].into();
        let forged = MemoryStore::default();
        forged.set(ROOT_KEY, record.to_string().as_bytes()).unwrap();
        let error = join_as(1, 2, &forged, &Config::default()).unwrap_err();
        assert!(error.to_string().contains("does not know the secret"), "{error}");
        assert!(matches!(root.join().unwrap(), Err(InitError::Missing { missing, .. }) if missing == [1]));
    });
}

#[test]
fn nobody_talks_a_rank_out_of_tls() {
    let store = CountingStore::default();
    std::thread::scope(|scope| {
        let store = &store;
        let root = scope.spawn(|| join_as(0, 2, store, &config(&[("tls", "on")])));
        let mut record = store.record();
        record["root"]["Listening"]["protection"] = "None".into();
        let forged = MemoryStore::default();
        forged.set(ROOT_KEY, record.to_string().as_bytes()).unwrap();
        let error = join_as(1, 2, &forged, &Config::default()).unwrap_err().to_string();
        assert!(error.contains("rank 1 joined without TLS, rank 0 has it"), "{error}");
        assert_eq!(root.join().unwrap().unwrap_err().to_string(), error);
    });
}

#[test]
fn a_rank_that_cannot_take_part_ends_it_for_all() {
    let store = CountingStore::default();
    std::thread::scope(|scope| {
        let store = &store;
        let root = scope.spawn(|| join_as(0, 3, store, &Config::default()));
        let second = scope.spawn(|| join_as(1, 3, store, &Config::default()));
        let refuse = |_: &Keys| Err(InitError::Config("no shared memory".to_string()));
        let third = join("test", Rank(2), 3, store, &Config::default(), refuse);
        assert_eq!(third.unwrap_err().to_string(), "no shared memory");
        let error = root.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("rank 2 failed: no shared memory"), "{error}");
        match second.join().unwrap().unwrap_err() {
            InitError::Config(cause) => assert_eq!(cause, error),
            // It came when all was over.
            InitError::Unreachable { rank, .. } => assert_eq!(rank, 0),
            other => panic!("{other}"),
        }
    });
}

#[test]
fn a_rank_that_died_while_it_waited_can_come_again() {
    let store = CountingStore::default();
    std::thread::scope(|scope| {
        let store = &store;
        let root = scope.spawn(|| join_as(0, 3, store, &Config::default()));
        // Joined through a relay that is cut, rank 1 ends, and so does its seat.
        let relay = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut record = store.record();
        let port = std::mem::replace(
            &mut record["root"]["Listening"]["place"]["port"],
            relay.local_addr().unwrap().port().into(),
        );
        let detour = MemoryStore::default();
        detour.set(ROOT_KEY, record.to_string().as_bytes()).unwrap();
        let first = scope.spawn(move || join_as(1, 3, &detour, &Config::default()));
        let (mut near, _) = relay.accept().unwrap();
        let mut far = TcpStream::connect(("127.0.0.1", u16::try_from(port.as_u64().unwrap()).unwrap())).unwrap();
        pass(&mut near, &mut far, 44);
        pass(&mut far, &mut near, 64);
        pass(&mut near, &mut far, 32);
        let mut length = [0; 4];
        near.read_exact(&mut length).unwrap();
        far.write_all(&length).unwrap();
        pass(&mut near, &mut far, u32::from_le_bytes(length) as usize);
        drop((near, far));
        let error = first.join().unwrap().unwrap_err();
        assert!(matches!(error, InitError::Unreachable { rank: 0, .. }), "{error}");
        for outcome in meet(store, &world(1..3, 3, &Config::default())) {
            outcome.unwrap();
        }
        root.join().unwrap().unwrap();
    });
}

fn pass(from: &mut TcpStream, to: &mut TcpStream, count: usize) {
    let mut bytes = vec![0; count];
    from.read_exact(&mut bytes).unwrap();
    to.write_all(&bytes).unwrap();
}

#[test]
fn a_root_that_cannot_begin_says_why() {
    let store = MemoryStore::default();
    let settings = config(&[("socket_ifname", "=no-such-interface")]);
    let own = join_as(0, 2, &store, &settings).unwrap_err().to_string();
    let other = join_as(1, 2, &store, &Config::default()).unwrap_err().to_string();
    assert!(own.contains("no-such-interface") && other.contains(&own), "{other}");
}

#[test]
fn another_world_size_is_named_on_both_sides() {
    let parts = [(0, 3, Config::default()), (1, 4, Config::default())];
    for outcome in meet(&MemoryStore::default(), &parts) {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("world size 4, rank 0 has 3"), "{error}");
    }
}

#[test]
fn a_rank_that_joins_twice_is_named() {
    let parts = world([0, 1, 1], 3, &Config::default());
    for outcome in meet(&MemoryStore::default(), &parts) {
        let error = outcome.unwrap_err();
        assert!(error.to_string().contains("rank 1 joined twice"), "{error}");
    }
}

#[test]
fn a_rank_beyond_the_world_is_refused() {
    let error = join_as(2, 2, &MemoryStore::default(), &Config::default()).unwrap_err().to_string();
    assert!(error.contains("no rank 2 in a world of 2"), "{error}");
}

#[test]
fn loopback_is_not_advertised_where_there_is_another_way() {
    let store = CountingStore { host: Some("127.0.0.1".to_string()), ..CountingStore::default() };
    for outcome in meet(&store, &world(0..2, 2, &Config::default())) {
        outcome.unwrap();
    }
    let record = store.record();
    let addresses = record["root"]["Listening"]["place"]["addresses"].as_array().unwrap();
    let loopback = addresses.iter().filter(|address| ["127.0.0.1", "::1"].contains(&address.as_str().unwrap())).count();
    assert!(loopback == 0 || loopback == addresses.len(), "{addresses:?}");
}

#[test]
fn one_machine_poses_as_several_hosts() {
    let parts: Vec<_> = (0..4).map(|rank| (rank, 4, config(&[("host_id", ["a", "b"][rank / 2])]))).collect();
    for outcome in meet(&MemoryStore::default(), &parts) {
        let hosts: Vec<_> = outcome.unwrap().ranks.into_iter().map(|info| info.host_id).collect();
        assert_eq!(Topology::new(&hosts).hosts().len(), 2);
    }
}

#[test]
fn a_root_with_loopback_only_is_refused_from_another_machine() {
    let store = CountingStore::default();
    let mut record = record_of_a_root_that_left(&store, &[("socket_ifname", "lo"), ("host_id", "there")]);
    record["root"]["Listening"]["place"]["host"]["machine"] = "another".into();
    store.set(ROOT_KEY, record.to_string().as_bytes()).unwrap();
    let error = join_as(1, 2, &store, &config(&[("host_id", "here")])).unwrap_err().to_string();
    for part in ["`there`", "`here`", "127.0.0.1", "loopback"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_rank_of_another_build_is_named_on_both_sides() {
    let store = CountingStore::default();
    std::thread::scope(|scope| {
        let store = &store;
        let root = scope.spawn(|| join_as(0, 2, store, &Config::default()));
        let mut record = store.record();
        record["build"]["sources"] = "0123456789abcdef".into();
        let forged = MemoryStore::default();
        forged.set(ROOT_KEY, record.to_string().as_bytes()).unwrap();
        let error = join_as(1, 2, &forged, &config(&[("host_id", "there")])).unwrap_err().to_string();
        let (own, other) = (Build::own(), Build { sources: "0123456789abcdef".to_owned(), ..Build::own() });
        let expected = format!("rank 1 on host `there` has build {own}, rank 0 has {other}");
        assert!(error.contains(&expected), "{error}");
        assert!(root.join().unwrap().unwrap_err().to_string().contains(&error));
        // Whose notice reads otherwise altogether still says what it was built from.
        record["root"] = "elsewhere".into();
        forged.set(ROOT_KEY, record.to_string().as_bytes()).unwrap();
        let unread = join_as(1, 2, &forged, &config(&[("host_id", "there")])).unwrap_err().to_string();
        assert!(unread.contains(&expected), "{unread}");
    });
}

#[test]
fn every_source_file_counts_for_the_build() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let sources = script::sources(&folder).unwrap();
    assert_eq!(script::fingerprint(&sources), Build::own().sources);
    for part in [
        "engine/frame.rs",
        "algo/ring.rs",
        "schedule.rs",
        "transport/shm/ring_stream.rs",
        "comm/failure_detector/envelope.rs",
        "device/kernels.cu",
    ] {
        let mut changed = sources.clone();
        changed.get_mut(part).unwrap().push_str("// changed");
        assert_ne!(script::fingerprint(&changed), Build::own().sources, "{part}");
    }
    let of = |files: &[(&str, &str)]| {
        script::fingerprint(&files.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect())
    };
    let one = of(&[("a.rs", "x\ny\n"), ("b.rs", "")]);
    assert_eq!(one, of(&[("a.rs", "x\r\ny\r\n"), ("b.rs", "")]), "another way to end a line");
    for other in [
        of(&[("a.rs", "xy\n"), ("b.rs", "")]),
        of(&[("a.rs", "y\nx\n"), ("b.rs", "")]),
        of(&[("a.rs", "x\n"), ("b.rs", "y\n")]),
        of(&[("a.rs", "x\ny\n"), ("c.rs", "")]),
        of(&[("a.rs", "x\ny\n\nb.rs\n")]),
        of(&[("a.rs", "x\ny\nb.rs\n")]),
    ] {
        assert_ne!(one, other);
    }
}
