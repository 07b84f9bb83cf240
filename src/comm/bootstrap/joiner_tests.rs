//! A rank that has read a record of rank 0 which leads nowhere.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use super::context::{RootAddress, RootRecord};
use super::groups::Groups;
use super::tests::{LONG, config, with_context};
use super::{Bootstrap, join};
use crate::comm::store::{MemoryStore, Store};
use crate::config::Config;
use crate::error::InitError;
use crate::transport::tls::Protection;
use crate::types::Rank;

/// Publishes a rank 0 of two ranks, whose port this is.
fn publish(store: &dyn Store) -> TcpListener {
    with_context(0, Groups::one(2), store, |context| {
        let (listener, place) = context.listen().expect("a port");
        let (keys, protection) = (context.new_keys().expect("randomness"), Protection::of(context.config));
        let address = RootAddress { place, world_size: 2, timeout: LONG, keys, uses_job_secret: false, protection };
        context.publish(Rank(0), RootRecord::Listening(address)).expect("published");
        listener.set_nonblocking(false).expect("a mode");
        listener
    })
}

fn join_two(rank: u32, store: &dyn Store, config: &Config) -> Result<Bootstrap, InitError> {
    join("test", Rank(rank), 2, store, config, |_| Ok(BTreeMap::new()))
}

#[test]
fn who_is_not_answered_looks_in_the_store_for_another_rank_0() {
    let (store, config, begin) = (&MemoryStore::default(), &config(0), Instant::now());
    let listener = publish(store);
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| join_two(1, store, config));
        drop(listener.accept().expect("it comes"));
        let root = scope.spawn(|| join_two(0, store, config));
        // It hangs up on whoever comes still.
        listener.set_nonblocking(true).expect("a mode");
        while !joining.is_finished() {
            assert!(begin.elapsed() < LONG, "it goes on with the old one");
            drop(listener.accept());
            std::thread::sleep(Duration::from_millis(1));
        }
        let [joined, found] = [joining, root].map(|rank| rank.join().expect("no panic").expect("they meet"));
        assert_eq!(joined.ranks, found.ranks);
    });
}

/// How long a store takes for a value: of a second, the last attempt to connect leaves less.
const MOMENT: Duration = Duration::from_millis(500);

/// A store that needs a moment for each value, as one that is reached over a network.
struct Far<'a>(&'a MemoryStore);

impl Store for Far<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        self.0.set(key, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        if timeout < MOMENT { Err("no time".to_owned()) } else { self.0.get(key, timeout) }
    }

    fn rendezvous_host(&self) -> Option<String> {
        None
    }
}

#[test]
fn who_is_never_answered_says_where() {
    let store = MemoryStore::default();
    let hints = [("connect_timeout_seconds".to_owned(), "1".to_owned())];
    let config = Config::resolve_with(&|_| None, &hints).expect("a setting");
    let listener = publish(&store);
    let address = listener.local_addr().expect("a port").port().to_string();
    std::thread::spawn(move || while listener.accept().is_ok() {});
    let error = join_two(1, &Far(&store), &config).expect_err("nobody answers");
    assert!(matches!(error, InitError::Unreachable { rank: 0, .. }), "{error}");
    assert!(error.to_string().contains(&address), "{error}");
}
