//! Ranks that join through leaders, in a small world that is cut as large ones are.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::context::{JoinContext, JoinFailure, REPLY_TIMEOUT, RootAddress, RootRecord};
use super::groups::Groups;
use super::protocol::{
    Came, Host, INFO_BYTES_MAX, JoinRequest, Joiner, JoinerState, Keys, ListenerState, Next, Place, RELAYED_BYTES_MAX,
    Relayed, frame,
};
use super::rank_info::RankInfo;
use super::tests::{GROUPS, LONG, SIZE, config, info, with_context};
use super::{Bootstrap, join_by, joiner, leader};
use crate::comm::store::{MemoryStore, Store};
use crate::config::Config;
use crate::error::InitError;
use crate::sync::{AtomicUsize, Ordering};
use crate::transport::tls::{Protection, Stream};
use crate::types::Rank;

/// A leader, and a rank that joins through it.
const LEADER: usize = 16;
const MEMBER: usize = 21;

type Outcome = Result<Bootstrap, InitError>;

/// One rank's settings: those of its host, and these.
fn with(rank: usize, settings: &[(&str, &str)]) -> Config {
    let host = format!("host {}", rank / 8);
    let hints = [settings, &[("host_id", &host)]].concat();
    let hints: Vec<_> = hints.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    Config::resolve_with(&|_| None, &hints).expect("settings")
}

fn hasty(rank: usize) -> Config {
    with(rank, &[("connect_timeout_seconds", "15")])
}

fn join_as(groups: Groups, rank: usize, store: &dyn Store, config: &Config) -> Outcome {
    join_by(groups, "test", Rank::from(rank), store, config, |_| Ok(BTreeMap::new()))
}

/// All ranks but those in `absent` join, each with these settings; each outcome by rank, while this thread does `meanwhile`.
fn meet(
    store: &dyn Store,
    absent: &[usize],
    config: impl Fn(usize) -> Config + Sync,
    meanwhile: impl FnOnce(),
) -> BTreeMap<usize, Outcome> {
    std::thread::scope(|scope| {
        let config = &config;
        let came = (0..SIZE).filter(|rank| !absent.contains(rank));
        let threads: Vec<_> =
            came.map(|rank| (rank, scope.spawn(move || join_as(GROUPS, rank, store, &config(rank))))).collect();
        meanwhile();
        threads.into_iter().map(|(rank, thread)| (rank, thread.join().expect("no panic"))).collect()
    })
}

fn expect_same_table(outcomes: &BTreeMap<usize, Outcome>) {
    let ranks = &outcomes[&0].as_ref().expect("all come").ranks;
    assert!(ranks.iter().enumerate().all(|(rank, info)| info.rank.index() == rank));
    for (rank, outcome) in outcomes {
        let outcome = outcome.as_ref().unwrap_or_else(|error| panic!("rank {rank}: {error}"));
        assert_eq!(outcome.ranks, *ranks);
    }
}

/// All of them fail with these words.
fn expect_words(outcomes: &BTreeMap<usize, Outcome>, words: &str) {
    for (rank, outcome) in outcomes {
        let error = outcome.as_ref().expect_err("it fails").to_string();
        assert!(error.contains(words), "rank {rank}: {error}");
    }
}

/// A store that counts a rank's calls.
struct Counted<'a> {
    store: &'a dyn Store,
    sets: AtomicUsize,
    gets: AtomicUsize,
}

impl Store for Counted<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        self.sets.fetch_add(1, Ordering::Relaxed);
        self.store.set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        self.gets.fetch_add(1, Ordering::Relaxed);
        self.store.get(key, timeout)
    }

    fn rendezvous_host(&self) -> Option<String> {
        None
    }
}

#[test]
fn all_ranks_get_the_same_table_with_one_store_call_each_and_two_a_leader() {
    for (size, settings) in [
        (SIZE, &[] as &[(&str, &str)]),
        (SIZE, &[("tls", "on")]),
        (SIZE, &[("job_secret", "0123456789abcdef")]),
        // The last rank is alone in its group.
        (81, &[]),
        (82, &[]),
    ] {
        let (groups, store) = (Groups { size, ..GROUPS }, &MemoryStore::default());
        let outcomes = std::thread::scope(|scope| {
            let join = |rank| {
                scope.spawn(move || {
                    let store = Counted { store, sets: AtomicUsize::new(0), gets: AtomicUsize::new(0) };
                    let outcome = join_as(groups, rank, &store, &with(rank, settings));
                    let expected = match groups.leads(Rank::from(rank)) {
                        _ if rank == 0 => (1, 0),
                        true => (1, 1),
                        false => (0, 1),
                    };
                    assert_eq!((store.sets.into_inner(), store.gets.into_inner()), expected, "rank {rank} of {size}");
                    outcome
                })
            };
            let threads: Vec<_> = (0..size).map(join).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).enumerate().collect()
        });
        expect_same_table(&outcomes);
    }
}

#[test]
fn a_missing_member_is_named_to_all() {
    let outcomes = meet(&MemoryStore::default(), &[MEMBER, 70], hasty, || {});
    for outcome in outcomes.into_values() {
        let error = outcome.expect_err("two are missing");
        assert!(matches!(&error, InitError::Missing { missing, .. } if *missing == [21, 70]), "{error}");
        assert!(error.to_string().ends_with("[21, 70] did not join within 15s"), "{error}");
    }
}

#[test]
fn a_missing_leader_is_named_to_all_with_those_that_cannot_join_without() {
    let begin = Instant::now();
    let outcomes = meet(&MemoryStore::default(), &[LEADER], hasty, || {});
    assert!(begin.elapsed() < LONG);
    for (rank, outcome) in outcomes {
        let error = outcome.expect_err("one is missing");
        let InitError::Missing { missing, leaders, .. } = &error else { panic!("rank {rank}: {error}") };
        // One that waits for it may be the first whose time is over.
        let by_group = GROUPS.listener_of(Rank::from(rank)) == Rank(16) && *missing == [16];
        assert!(by_group || missing.iter().copied().eq(16..32), "rank {rank}: {error}");
        assert_eq!(*leaders, [16]);
        assert!(error.to_string().ends_with("did not join within 15s; others cannot join without [16]"), "{error}");
    }
}

#[test]
fn an_absent_root_is_named_to_all() {
    let outcomes = meet(&MemoryStore::default(), &[0], |rank| with(rank, &[("connect_timeout_seconds", "1")]), || {});
    for outcome in outcomes.into_values() {
        let error = outcome.expect_err("rank 0 is missing");
        assert!(matches!(&error, InitError::Missing { missing, .. } if *missing == [0]), "{error}");
    }
}

/// The connection of a rank that has proved itself and sent these bytes, where it joins.
fn call(store: &dyn Store, rank: usize, request: impl Fn(&JoinContext<'_>) -> Vec<u8>) -> Stream {
    with_context(rank, GROUPS, store, |context| {
        let (_, _, found) = joiner::find(context, None, Instant::now()).expect("it is there");
        let routes = joiner::routes(&found.place, context.host).expect("it is near");
        let at = GROUPS.listener_of(context.rank);
        let mut stream = joiner::connect_any(context, &found.keys, None, at, &routes, context.deadline, || false)
            .expect("it listens");
        stream.write_all(&request(context)).expect("it takes it");
        stream
    })
}

fn request(info: RankInfo, context: &JoinContext<'_>) -> Vec<u8> {
    let request: JoinRequest = Ok(Joiner { info, place: Some(context.listen().expect("a port").1) });
    frame(&request, INFO_BYTES_MAX).expect("a short request")
}

/// Waits until the other side ends.
fn hear_out(stream: &mut Stream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("it ends");
    bytes
}

#[test]
fn a_leader_that_ends_is_missed_and_named_to_its_group() {
    let store = &MemoryStore::default();
    let outcomes = meet(store, &[LEADER], hasty, || {
        let stream = call(store, LEADER, |context| {
            let (_, _, root) = joiner::find(context, None, Instant::now()).expect("rank 0 is there");
            let listener = leader::listen(context, &root).expect("a port");
            listener.set_nonblocking(false).expect("a socket");
            let member = listener.accept().expect("a rank of the group comes");
            drop((listener, member));
            // It has told rank 0 of one, which is gone with it.
            let joined = Some(Ok(Joiner { info: info(MEMBER, context.host), place: None }));
            let told = frame(&Relayed { rank: Rank::from(MEMBER), joined }, RELAYED_BYTES_MAX).expect("short");
            [request(info(LEADER, context.host), context), told].concat()
        });
        drop(stream);
    });
    for (rank, outcome) in outcomes {
        let error = outcome.expect_err("one has ended");
        match GROUPS.listener_of(Rank::from(rank)) {
            // Unless rank 0 has given up by then.
            Rank(16) => assert!(
                matches!(&error, InitError::Unreachable { rank: 16, .. })
                    || matches!(&error, InitError::Missing { leaders, .. } if *leaders == [16]),
                "rank {rank}: {error}"
            ),
            _ => assert!(
                matches!(&error, InitError::Missing { missing, leaders, .. } if missing.iter().copied().eq(16..32) && *leaders == [16]),
                "rank {rank}: {error}"
            ),
        }
    }
}

#[test]
fn a_member_that_died_while_it_waited_can_come_again() {
    let store = &MemoryStore::default();
    let outcomes = meet(store, &[MEMBER], config, || {
        let ended = call(store, MEMBER, |context| request(info(MEMBER, context.host), context));
        drop(ended);
        // Another one that is there at the same time would be one too many.
        let rank = join_as(GROUPS, MEMBER, store, &config(MEMBER)).expect("it is let in");
        assert_eq!(rank.ranks.len(), SIZE);
    });
    expect_same_table(&outcomes);
}

#[test]
fn a_member_that_joins_twice_ends_it_for_all() {
    let store = &MemoryStore::default();
    let outcomes = meet(store, &[70], config, || {
        let mut again = call(store, MEMBER, |context| request(info(MEMBER, context.host), context));
        let answer = hear_out(&mut again);
        assert!(String::from_utf8_lossy(&answer).contains("rank 21 joined twice"));
    });
    expect_words(&outcomes, "rank 21 joined twice, from host `host 2`");
}

#[test]
fn a_leader_speaks_for_its_group_alone() {
    let keys = Keys::random().expect("randomness");
    let config = config(LEADER);
    let host = &Host::here(&config);
    let joiner = |rank| Joiner { info: info(rank, host), place: None };
    let hear = |told: &Relayed| {
        let (leader, mut listener) =
            (JoinerState::new(Rank::from(LEADER)).expect("randomness"), ListenerState::new(GROUPS));
        let Ok(Next::Write(challenge)) = listener.receive(&keys, [0; 32], &leader.hello()) else {
            panic!("no challenge")
        };
        let proof = leader.answer(&keys, [0; 32], challenge[..].try_into().expect("a challenge")).expect("it knows it");
        let request = frame(&JoinRequest::Ok(joiner(LEADER)), INFO_BYTES_MAX).expect("a short request");
        let mut bytes = [proof, request, frame(told, RELAYED_BYTES_MAX).expect("short")].concat();
        loop {
            let rest = bytes.split_off(listener.expected().expect("it goes on"));
            match listener.receive(&keys, [0; 32], &std::mem::replace(&mut bytes, rest))? {
                Next::Take(Came::Relayed(told)) => return Ok(told.rank),
                Next::Take(Came::Joined(..)) | Next::Read => assert!(listener.expected().is_some()),
                Next::Write(_) => panic!("nothing to say"),
            }
        }
    };
    let relayed = |rank, joined| hear(&Relayed { rank: Rank::from(rank), joined });
    assert_eq!(relayed(MEMBER, Some(Ok(joiner(MEMBER)))), Ok(Rank::from(MEMBER)));
    assert_eq!(relayed(31, None), Ok(Rank(31)));
    for refused in [
        relayed(MEMBER, Some(Ok(joiner(MEMBER + 1)))),
        relayed(15, Some(Err("it cannot".to_owned()))),
        relayed(32, None),
        relayed(LEADER, None),
    ] {
        let cause: String = refused.expect_err("it is none of its own");
        assert!(cause.starts_with("rank 16 speaks for rank "), "{cause}");
    }
}

#[test]
fn strangers_at_a_leader_hold_nobody_up() {
    let store = &MemoryStore::default();
    let mut strangers = Vec::new();
    let outcomes = meet(store, &[MEMBER], config, || {
        let record = store.get("ncclx_rs/leader/16", LONG).expect("it listens");
        let record: serde_json::Value = serde_json::from_slice(&record).expect("JSON");
        let port = record["root"]["Listening"]["place"]["port"].as_u64().expect("a port") as u16;
        for words in [&b""[..], b"ncclx", &[b'G'; 4096]] {
            let mut stranger = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
            stranger.write_all(words).expect("it takes that");
            strangers.push(stranger);
        }
        join_as(GROUPS, MEMBER, store, &config(MEMBER)).expect("it is let in");
    });
    expect_same_table(&outcomes);
}

#[test]
fn a_member_that_differs_is_named_to_all() {
    for (groups, name, words) in [
        (Groups { size: SIZE + 1, ..GROUPS }, "test", "has world size 73, rank 0 has 72"),
        (GROUPS, "another", "has communicator name `another`, rank 0 has `test`"),
    ] {
        for rank in [MEMBER, LEADER] {
            let store = &MemoryStore::default();
            let outcomes = meet(store, &[rank], config, || {
                let join = join_by(groups, name, Rank::from(rank), store, &config(rank), |_| Ok(BTreeMap::new()));
                let error = join.expect_err("it differs").to_string();
                assert!(error.contains(words), "{error}");
            });
            expect_words(&outcomes, &format!("rank {rank} on host `host 2` {words}"));
        }
    }
}

#[test]
fn a_rank_that_comes_to_a_leader_of_others_is_named_to_all() {
    let store = &MemoryStore::default();
    let larger = Groups { size: 79, ..GROUPS };
    let words = "rank 75 on host `host 9` has world size 79, rank 64 has 72";
    let outcomes = meet(store, &[70], config, || {
        let error = join_as(larger, 75, store, &config(75)).expect_err("there is no such rank").to_string();
        assert!(error.contains(words), "{error}");
    });
    expect_words(&outcomes, words);
}

#[test]
fn a_rank_whose_leader_no_world_has_is_named_to_all() {
    let larger = Groups { size: 200, ..GROUPS };
    let words = "rank 150 on host `host 18` has world size 200, rank 0 has 72";
    for absent in [&[70][..], &[]] {
        let store = &MemoryStore::default();
        let mut error = None;
        let mut stray = || {
            let begin = Instant::now();
            let outcome = join_as(larger, 150, store, &with(150, &[("connect_timeout_seconds", "60")]));
            assert!(begin.elapsed() < LONG);
            error = Some(outcome.expect_err("there is no such rank").to_string());
        };
        if absent.is_empty() {
            // The others do not need it.
            expect_same_table(&meet(store, absent, config, || {}));
            stray();
        } else {
            expect_words(&meet(store, absent, config, stray), words);
        }
        assert!(error.as_ref().is_some_and(|error| error.contains(words)), "{error:?}");
    }
}

#[test]
fn a_stopped_leader_does_not_hold_rank_0() {
    let store = &MemoryStore::default();
    let mut stopped = None;
    let begin = Instant::now();
    let outcomes = meet(store, &(LEADER..32).collect::<Vec<_>>(), config, || {
        stopped = Some(call(store, LEADER, |context| {
            let told = (LEADER + 1..32).flat_map(|rank| {
                let place = Some(context.listen().expect("a port").1);
                let joined = Some(Ok(Joiner { info: info(rank, context.host), place }));
                frame(&Relayed { rank: Rank::from(rank), joined }, RELAYED_BYTES_MAX).expect("short")
            });
            request(info(LEADER, context.host), context).into_iter().chain(told).collect()
        }));
    });
    assert!(begin.elapsed() < REPLY_TIMEOUT);
    expect_same_table(&outcomes);
    assert!(!hear_out(&mut stopped.expect("it has called")).is_empty(), "it finds its answer when it goes on");
}

#[test]
fn what_another_communicator_left_in_the_store_leads_nobody_astray() {
    let store = &Counted { store: &MemoryStore::default(), sets: AtomicUsize::new(0), gets: AtomicUsize::new(0) };
    with_context(LEADER, GROUPS, store, |context| {
        // Nobody listens there.
        let place = Place { port: 1, ..context.listen().expect("a port").1 };
        let root = RootAddress {
            place,
            world_size: SIZE as u32,
            timeout: LONG,
            keys: Keys::random().expect("randomness"),
            uses_job_secret: false,
            protection: Protection::of(context.config),
        };
        context.publish(context.rank, RootRecord::Listening(root)).expect("it takes it");
        context.publish(Rank(32), RootRecord::RootEnded).expect("it takes it");
        let failure = JoinFailure::Refused { cause: "of another".to_owned() };
        context.publish(Rank(48), RootRecord::Ended { comm_id: Some([7; 16]), failure }).expect("it takes it");
    });
    let outcomes = meet(store, &[LEADER, 32, 48], config, || {
        // Each has read what is there, and each of the three groups twice more: rank 0's record, and its leader's again.
        let deadline = Instant::now() + LONG;
        while store.gets.load(Ordering::Relaxed) < SIZE - 4 + 2 * 45 {
            assert!(Instant::now() < deadline, "nobody looks again");
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::scope(|scope| {
            for leader in [LEADER, 32, 48] {
                scope.spawn(move || join_as(GROUPS, leader, store, &config(leader)).expect("all come"));
            }
        });
    });
    expect_same_table(&outcomes);
}

#[test]
fn a_member_with_another_secret_does_not_get_in() {
    let store = &MemoryStore::default();
    let secret = |rank| if rank == MEMBER { "fedcba9876543210" } else { "0123456789abcdef" };
    let config = |rank| with(rank, &[("connect_timeout_seconds", "15"), ("job_secret", secret(rank))]);
    let mut outcomes = meet(store, &[], config, || {});
    let error = outcomes.remove(&MEMBER).expect("its own").expect_err("it knows another").to_string();
    assert!(error.contains("rank 16 cannot be reached") && error.contains("does not know the secret"), "{error}");
    expect_words(&outcomes, "ranks [21] did not join within 15s");
    let store = &MemoryStore::default();
    let secret = |rank| if rank == MEMBER { &[("job_secret", "0123456789abcdef")] as &[_] } else { &[] };
    let outcomes = meet(store, &[], |rank| with(rank, secret(rank)), || {});
    expect_words(&outcomes, "rank 21 has a job secret, rank 0 none");
}

/// A store that takes nothing from one rank.
struct Deaf<'a>(&'a MemoryStore);

impl Store for Deaf<'_> {
    fn set(&self, _: &str, _: &[u8]) -> Result<(), String> {
        Err("the disk is full".to_owned())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        self.0.get(key, timeout)
    }

    fn rendezvous_host(&self) -> Option<String> {
        None
    }
}

#[test]
fn a_leader_that_cannot_take_part_ends_it_for_all() {
    let begin = Instant::now();
    let store = &MemoryStore::default();
    let outcomes = meet(store, &[LEADER], config, || {
        join_as(GROUPS, LEADER, &Deaf(store), &config(LEADER)).expect_err("it cannot say where it listens");
    });
    expect_words(
        &outcomes,
        "rank 16 failed: rendezvous of communicator `test`: the store failed on `ncclx_rs/leader/16`",
    );
    for rank in [MEMBER, LEADER] {
        let store = &MemoryStore::default();
        let outcomes = meet(store, &[rank], config, || {
            let refuse = |_: &_| Err(InitError::Config("no shared memory".to_owned()));
            join_by(GROUPS, "test", Rank::from(rank), store, &config(rank), refuse).expect_err("it cannot");
        });
        expect_words(&outcomes, &format!("rank {rank} failed: no shared memory"));
    }
    let store = &MemoryStore::default();
    let outcomes = meet(store, &[LEADER], config, || {
        let boast = |_: &_| Ok([("tcp".to_owned(), vec![0; INFO_BYTES_MAX])].into());
        join_by(GROUPS, "test", Rank::from(LEADER), store, &config(LEADER), boast).expect_err("it is too long");
    });
    expect_words(&outcomes, "rank 16 failed: communicator `test`: a message of ");
    assert!(begin.elapsed() < LONG, "nobody waits for the end of its time");
}

/// A store that takes one value, and ignores others.
#[derive(Default)]
struct First {
    store: MemoryStore,
    set: OnceLock<Result<(), String>>,
}

impl Store for First {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        self.set.get_or_init(|| self.store.set(key, value)).clone()
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        self.store.get(key, timeout)
    }

    fn rendezvous_host(&self) -> Option<String> {
        None
    }
}

#[test]
fn a_leader_that_does_not_reach_rank_0_says_so_to_its_group() {
    // It has what a rank 0 leaves that ends without a word.
    let store = First::default();
    join_as(GROUPS, 0, &store, &with(0, &[("connect_timeout_seconds", "0.5")])).expect_err("nobody comes");
    let store = &store.store;
    let begin = Instant::now();
    // Those that find it there, and one that comes when it has ended.
    let mut outcomes = meet(store, &(0..16).chain([MEMBER]).chain(32..SIZE).collect::<Vec<_>>(), config, || {});
    outcomes.insert(MEMBER, join_as(GROUPS, MEMBER, store, &config(MEMBER)));
    assert_eq!(outcomes.len(), 16);
    assert!(begin.elapsed() < LONG, "nobody waits for another leader of this communicator");
    for (rank, outcome) in outcomes {
        let error = outcome.expect_err("nobody is there");
        assert!(matches!(&error, InitError::Unreachable { rank: 0, .. }), "rank {rank}: {error}");
    }
}
