//! Ranks that end in the middle of the bootstrap of a large world.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use super::build::Build;
use super::context::JoinContext;
use super::joiner;
use super::protocol::{Host, INFO_BYTES_MAX, JoinRequest, Joiner, Keys, RankInfo, frame};
use super::relay;
use super::reply::{JoinReply, World};
use super::server::{Event, Server};
use super::{Bootstrap, join};
use crate::algo::Tuning;
use crate::comm::store::{MemoryStore, Store};
use crate::config::Config;
use crate::error::InitError;
use crate::sync::{AtomicBool, Ordering};
use crate::sys::process::ProcessId;
use crate::topo::Cpus;
use crate::types::Rank;

const LONG: Duration = Duration::from_secs(60);

/// Nine hosts of eight ranks.
const SIZE: usize = 72;

/// The first rank of the second host, which passes the table on to the host's others.
const FIRST: usize = 8;

fn config(rank: usize) -> Config {
    let hints = [("host_id".to_owned(), format!("host {}", rank / 8))];
    Config::resolve_with(&|_| None, &hints).expect("a setting")
}

fn join_as(rank: usize, store: &dyn Store) -> Result<Bootstrap, InitError> {
    join("test", Rank::from(rank), SIZE, store, &config(rank), |_| Ok(BTreeMap::new()))
}

fn info(rank: usize, host: &Host) -> RankInfo {
    RankInfo {
        rank: Rank::from(rank),
        host_id: host.id.clone(),
        addresses: BTreeMap::new(),
        process: ProcessId::own(),
        cpus: Cpus::default(),
        build: Build::own(),
        world_size: SIZE as u32,
        name: "test".to_owned(),
        algorithm: None,
        through_host: false,
    }
}

/// How [`FIRST`] ends, which has the table, although there are those that want it.
type End = fn(&Keys, TcpListener);

/// Says that it listens, but does no more.
fn listen_no_more(_: &Keys, listener: TcpListener) {
    drop(listener);
}

/// Takes all of its host in, and ends.
fn hang_up(keys: &Keys, listener: TcpListener) {
    let mut server = Server::new("test", 8, keys, None, listener).expect("a server");
    let (mut joined, deadline) = (0, Instant::now() + LONG);
    while joined < 7 {
        assert!(Instant::now() < deadline, "{joined} have come");
        let events = server.turn(deadline).expect("it goes on");
        joined += events.iter().filter(|event| matches!(event, Event::Joined(_, Ok(_)))).count();
    }
}

/// Joins as [`FIRST`], says that it listens, and ends when it has the table.
fn join_and_end(store: &MemoryStore, end: End) {
    let config = config(FIRST);
    let host = Host::here(&config);
    let deadline = Instant::now() + LONG;
    let rank = Rank::from(FIRST);
    let context = JoinContext { name: "test", rank, size: SIZE, store, config: &config, host: &host, deadline };
    let (_, root) = joiner::find(&context).expect("rank 0 is there");
    let (listener, place) = context.listen().expect("a port");
    let request: JoinRequest = Ok(Joiner { info: info(FIRST, &host), place: Some(place) });
    let request = frame(&request, INFO_BYTES_MAX).expect("a short request");
    let routes = joiner::routes(&root.place, &host).expect("it is near");
    let mut stream = joiner::connect_any(&context, &root.keys, None, Rank(0), &routes, deadline).expect("it listens");
    let (reply, _) = joiner::exchange(&mut stream, &request, SIZE, deadline).expect("an answer");
    assert!(matches!(reply, JoinReply::Complete(_)), "{reply:?}");
    end(&root.keys, listener);
}

#[test]
fn those_that_a_rank_does_not_pass_the_table_to_name_it() {
    let ends: [(End, &str); 2] =
        [(listen_no_more, "either rank 8 has ended"), (hang_up, "before it had passed the table")];
    for (end, words) in ends {
        let store = &MemoryStore::default();
        let another = &Another { store, is_left: AtomicBool::new(true) };
        std::thread::scope(|scope| {
            let joined = |rank| {
                let store: &dyn Store = if rank == FIRST + 1 { another } else { store };
                (rank, scope.spawn(move || join_as(rank, store)))
            };
            let others: Vec<_> = (0..SIZE).filter(|rank| *rank != FIRST).map(joined).collect();
            join_and_end(store, end);
            for (rank, outcome) in others {
                let outcome = outcome.join().expect("no panic");
                if rank / 8 == 1 {
                    let error = outcome.expect_err("nobody has the table for it");
                    assert!(matches!(error, InitError::Unreachable { rank: 8, .. }), "{error}");
                    assert!(error.to_string().contains(words), "{error}");
                } else {
                    assert_eq!(outcome.expect("it has the table").ranks.len(), SIZE);
                }
            }
        });
    }
}

/// A store that may hold what an earlier rank 0 has written, as that of a split does.
struct Another<'a> {
    store: &'a MemoryStore,
    is_left: AtomicBool,
}

impl Store for Another<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        self.store.set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        self.store.get(key, timeout)
    }

    fn skip_earlier_value(&self) -> bool {
        self.is_left.swap(false, Ordering::Relaxed)
    }

    fn rendezvous_host(&self) -> Option<String> {
        None
    }
}

#[test]
fn who_cannot_take_part_gets_no_table_and_takes_no_place() {
    let (config, store, deadline) = (config(FIRST), MemoryStore::default(), Instant::now() + LONG);
    let host = &Host::here(&config);
    let keys = &Keys::random().expect("randomness");
    let context = |rank: usize| JoinContext {
        name: "test",
        rank: Rank::from(rank),
        size: SIZE,
        store: &store,
        config: &config,
        host,
        deadline,
    };
    // On the host of FIRST is one other rank.
    let elsewhere = &Host { id: "elsewhere".to_owned(), ..host.clone() };
    let host_of = |rank| if rank == FIRST || rank == FIRST + 1 { host } else { elsewhere };
    let ranks = (0..SIZE).map(|rank| info(rank, host_of(rank))).collect();
    let world = World { ranks, tuning: Tuning::default() };
    let message = JoinReply::Complete(world.clone()).message().expect("a table")[size_of::<u32>()..].to_vec();
    let (first, second) = (context(FIRST), context(FIRST + 1));
    let (listener, place) = first.listen().expect("a port");
    let routes = joiner::routes(&place, host).expect("it is near");
    std::thread::scope(|scope| {
        let passed = scope.spawn(|| relay::pass_on(&first, keys, None, listener, &world, message));
        let ask = |request: JoinRequest| {
            let request = frame(&request, INFO_BYTES_MAX).expect("a short request");
            let stream = joiner::connect_any(&second, keys, None, first.rank, &routes, deadline);
            joiner::exchange(&mut stream.expect("it listens"), &request, SIZE, deadline)
        };
        let refused = ask(Err("it cannot".to_owned())).expect_err("no table");
        assert_eq!(refused.kind(), ErrorKind::UnexpectedEof, "{refused}");
        let (reply, _) = ask(Ok(Joiner { info: info(FIRST + 1, host), place: None })).expect("the table");
        assert!(matches!(reply, JoinReply::Complete(_)), "{reply:?}");
        passed.join().expect("no panic").expect("it passes the table on");
    });
}
