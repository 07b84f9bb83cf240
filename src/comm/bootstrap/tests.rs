//! The bootstrap of a large world: ranks that end in the middle of it, and what it sends beside what is simulated.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::build::Build;
use super::context::JoinContext;
use super::groups::Groups;
use super::joiner;
use super::protocol::{Host, INFO_BYTES_MAX, JoinRequest, Joiner, Keys, frame};
use super::rank_info::{Common, RankInfo};
use super::relay;
use super::reply::{JoinReply, World};
use super::server::{Event, Server};
use super::simulated::bytes_at_rank_0;
use super::{Bootstrap, ROOT_KEY, join, join_by};
use crate::algo::Tuning;
use crate::comm::store::{MemoryStore, Store};
use crate::config::Config;
use crate::error::InitError;
use crate::sync::Arc;
use crate::sys::process::ProcessId;
use crate::topo::Cpus;
use crate::types::Rank;

pub(super) const LONG: Duration = Duration::from_secs(60);

/// Nine hosts of eight ranks.
pub(super) const SIZE: usize = 72;

/// These ranks in groups, the last of which is shorter.
pub(super) const GROUPS: Groups = Groups { size: SIZE, ranks: 16 };

/// The first rank of the second host, which passes the table on to the host's others.
const FIRST: usize = 8;

pub(super) fn config(rank: usize) -> Config {
    let hints = [("host_id".to_owned(), format!("host {}", rank / 8))];
    Config::resolve_with(&|_| None, &hints).expect("a setting")
}

fn join_as(rank: usize, store: &dyn Store) -> Result<Bootstrap, InitError> {
    join("test", Rank::from(rank), SIZE, store, &config(rank), |_| Ok(BTreeMap::new()))
}

/// What `act` does as a rank that begins to join.
pub(super) fn with_context<T>(
    rank: usize,
    groups: Groups,
    store: &dyn Store,
    act: impl FnOnce(&JoinContext<'_>) -> T,
) -> T {
    let config = config(rank);
    let host = Host::here(&config);
    let (rank, deadline) = (Rank::from(rank), Instant::now() + LONG);
    act(&JoinContext { name: "test", rank, groups, store, config: &config, host: &host, deadline })
}

pub(super) fn info(rank: usize, host: &Host) -> RankInfo {
    RankInfo {
        rank: Rank::from(rank),
        host_id: host.id.as_str().into(),
        addresses: BTreeMap::new().into(),
        process: ProcessId::own(),
        cpus: Cpus::default(),
        common: Arc::new(Common {
            build: Build::own(),
            world_size: SIZE as u32,
            name: "test".to_owned(),
            algorithm: None,
            through_host: None,
        }),
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
    let mut server = Server::new("test", Groups::one(8), keys, None, listener).expect("a server");
    let (mut joined, deadline) = (0, Instant::now() + LONG);
    while joined < 7 {
        assert!(Instant::now() < deadline, "{joined} have come");
        let events = server.turn(deadline).expect("it goes on");
        joined += events.iter().filter(|event| matches!(event, Event::Joined(_, Ok(_)))).count();
    }
}

/// Joins as [`FIRST`], says that it listens, and ends when it has the table.
fn join_and_end(store: &MemoryStore, end: End) {
    with_context(FIRST, Groups::one(SIZE), store, |context| {
        let (host, deadline) = (context.host, context.deadline);
        let (_, _, root) = joiner::find(context, None, Instant::now()).expect("rank 0 is there");
        let (listener, place) = context.listen().expect("a port");
        let request: JoinRequest = Ok(Joiner { info: info(FIRST, host), place: Some(place) });
        let request = frame(&request, INFO_BYTES_MAX).expect("a short request");
        let routes = joiner::routes(&root.place, host).expect("it is near");
        let mut stream =
            joiner::connect_any(context, &root.keys, None, Rank(0), &routes, deadline, || false).expect("it listens");
        let (reply, _) = joiner::exchange(&mut stream, &request, SIZE, deadline).expect("an answer");
        assert!(matches!(reply, JoinReply::Complete(_)), "{reply:?}");
        end(&root.keys, listener);
    });
}

#[test]
fn those_that_a_rank_does_not_pass_the_table_to_name_it() {
    let ends: [(End, &str); 2] =
        [(listen_no_more, "either rank 8 has ended"), (hang_up, "before it had passed the table")];
    for (end, words) in ends {
        let store = &MemoryStore::default();
        std::thread::scope(|scope| {
            let joined = |rank| (rank, scope.spawn(move || join_as(rank, store)));
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

#[test]
fn who_cannot_take_part_gets_no_table_and_takes_no_place() {
    let (config, store, deadline) = (config(FIRST), MemoryStore::default(), Instant::now() + LONG);
    let host = &Host::here(&config);
    let keys = &Keys::random().expect("randomness");
    let context = |rank: usize| JoinContext {
        name: "test",
        rank: Rank::from(rank),
        groups: Groups::one(SIZE),
        store: &store,
        config: &config,
        host,
        deadline,
    };
    // On the host of FIRST is one other rank.
    let elsewhere = &Host { id: "elsewhere".to_owned(), ..host.clone() };
    let host_of = |rank| if rank == FIRST || rank == FIRST + 1 { host } else { elsewhere };
    let ranks = (0..SIZE).map(|rank| info(rank, host_of(rank))).collect();
    let world = World { ranks, tuning: Tuning::default(), scratch_bytes: 0 };
    let message = JoinReply::Complete(world.clone()).message().expect("a table")[size_of::<u32>()..].to_vec();
    let (first, second) = (context(FIRST), context(FIRST + 1));
    let (listener, place) = first.listen().expect("a port");
    let routes = joiner::routes(&place, host).expect("it is near");
    std::thread::scope(|scope| {
        let passed = scope.spawn(|| relay::pass_on(&first, keys, None, listener, &world, message));
        let ask = |request: JoinRequest| {
            let request = frame(&request, INFO_BYTES_MAX).expect("a short request");
            let stream = joiner::connect_any(&second, keys, None, first.rank, &routes, deadline, || false);
            joiner::exchange(&mut stream.expect("it listens"), &request, SIZE, deadline)
        };
        let refused = ask(Err("it cannot".to_owned())).expect_err("no table");
        assert_eq!(refused.kind(), ErrorKind::UnexpectedEof, "{refused}");
        let (reply, _) = ask(Ok(Joiner { info: info(FIRST + 1, host), place: None })).expect("the table");
        assert!(matches!(reply, JoinReply::Complete(_)), "{reply:?}");
        passed.join().expect("no panic").expect("it passes the table on");
    });
}

/// A store through which ranks find, at rank 0's port, a relay that counts.
struct Counted<'a> {
    store: &'a MemoryStore,
    relay: u16,
}

impl Store for Counted<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        self.store.set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        let mut record: serde_json::Value =
            serde_json::from_slice(&self.store.get(key, timeout)?).map_err(|error| error.to_string())?;
        if key == ROOT_KEY {
            record["root"]["Listening"]["place"]["port"] = self.relay.into();
        }
        Ok(record.to_string().into_bytes())
    }

    fn rendezvous_host(&self) -> Option<String> {
        self.store.rendezvous_host()
    }
}

/// Passes so many connections on to rank 0; how many bytes went there, and how many back.
fn relay(listener: &TcpListener, store: &MemoryStore, connections: usize) -> (u64, u64) {
    let record = store.get(ROOT_KEY, LONG).expect("rank 0 is there");
    let record: serde_json::Value = serde_json::from_slice(&record).expect("JSON");
    let port = record["root"]["Listening"]["place"]["port"].as_u64().expect("a port") as u16;
    let copy = |mut from: TcpStream, mut to: TcpStream| {
        let count = std::io::copy(&mut from, &mut to).expect("both sides live");
        // The other side may have ended both ways.
        let _ = to.shutdown(Shutdown::Write);
        count
    };
    std::thread::scope(|scope| {
        let ways: Vec<_> = (0..connections)
            .map(|_| {
                let (near, _) = listener.accept().expect("a rank comes");
                let far = TcpStream::connect(("127.0.0.1", port)).expect("rank 0 listens");
                let twins = [&near, &far].map(|stream| stream.try_clone().expect("a descriptor"));
                let [near_too, far_too] = twins;
                (scope.spawn(move || copy(near, far)), scope.spawn(move || copy(far_too, near_too)))
            })
            .collect();
        ways.into_iter().fold((0, 0), |(there, back), (one, other)| {
            (there + one.join().expect("no panic"), back + other.join().expect("no panic"))
        })
    })
}

#[test]
fn rank_0_sends_and_receives_the_bytes_that_are_simulated() {
    for groups in [Groups::one(SIZE), GROUPS] {
        compare_with_simulation(groups);
    }
}

fn compare_with_simulation(groups: Groups) {
    let (store, listener) = (&MemoryStore::default(), TcpListener::bind("0.0.0.0:0").expect("a port"));
    let counted = &Counted { store, relay: listener.local_addr().expect("a port").port() };
    let direct = (1..SIZE).filter(|rank| groups.listener_of(Rank::from(*rank)) == Rank(0)).count();
    let (ranks, counts) = std::thread::scope(|scope| {
        let counts = scope.spawn(|| relay(&listener, store, direct));
        let join = |rank: usize| {
            let store: &dyn Store = if rank == 0 { store } else { counted };
            scope
                .spawn(move || join_by(groups, "test", Rank::from(rank), store, &config(rank), |_| Ok(BTreeMap::new())))
        };
        let joined: Vec<_> = (0..SIZE).map(join).collect();
        let joined = joined.into_iter().map(|rank| rank.join().expect("no panic").expect("all come"));
        (joined.last().expect("some").ranks, counts.join().expect("no panic"))
    });
    let joiner = |info: RankInfo| {
        // Of another port, which is as long: the system gives those of five digits.
        let (_, place) = with_context(info.rank.index(), groups, store, |context| context.listen()).expect("a port");
        Joiner { info, place: Some(place) }
    };
    assert_eq!(bytes_at_rank_0(ranks.into_iter().map(joiner).collect(), groups), counts);
}
