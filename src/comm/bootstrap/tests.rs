//! Ranks that end in the middle of the bootstrap of a large world.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::build::Build;
use super::context::JoinContext;
use super::joiner;
use super::protocol::{Host, INFO_BYTES_MAX, JoinRequest, Joiner, RankInfo, frame};
use super::reply::JoinReply;
use super::{Bootstrap, join};
use crate::comm::store::MemoryStore;
use crate::config::Config;
use crate::error::InitError;
use crate::sys::process::ProcessId;
use crate::topo::Cpus;
use crate::types::Rank;

/// Nine hosts of eight ranks.
const SIZE: usize = 72;

/// The first rank of the second host, which passes the table on to the host's others.
const FIRST: usize = 8;

fn config(rank: usize) -> Config {
    let hints = [("host_id".to_owned(), format!("host {}", rank / 8))];
    Config::resolve_with(&|_| None, &hints).expect("a setting")
}

fn join_as(rank: usize, store: &MemoryStore) -> Result<Bootstrap, InitError> {
    join("test", Rank::from(rank), SIZE, store, &config(rank), |_| Ok(BTreeMap::new()))
}

/// Joins as [`FIRST`], says that it listens, and ends when it has the table.
fn join_and_end(store: &MemoryStore) {
    let config = config(FIRST);
    let host = Host::here(&config);
    let deadline = Instant::now() + Duration::from_secs(60);
    let rank = Rank::from(FIRST);
    let context = JoinContext { name: "test", rank, size: SIZE, store, config: &config, host: &host, deadline };
    let (_, root) = joiner::find(&context).expect("rank 0 is there");
    let (listener, place) = context.listen().expect("a port");
    drop(listener);
    let info = RankInfo {
        rank,
        host_id: host.id.clone(),
        addresses: BTreeMap::new(),
        process: ProcessId::own(),
        cpus: Cpus::default(),
        build: Build::own(),
        world_size: SIZE as u32,
        name: "test".to_owned(),
        algorithm: None,
    };
    let request: JoinRequest = Ok(Joiner { info, place: Some(place) });
    let request = frame(&request, INFO_BYTES_MAX).expect("a short request");
    let routes = joiner::routes(&root.place, &host).expect("it is near");
    let mut stream = joiner::connect_any(&context, &root.keys, None, Rank(0), &routes, deadline).expect("it listens");
    let (reply, _) = joiner::exchange(&mut stream, &request, SIZE, deadline).expect("an answer");
    assert!(matches!(reply, JoinReply::Complete(_)), "{reply:?}");
}

#[test]
fn those_that_a_rank_does_not_pass_the_table_to_name_it() {
    let store = &MemoryStore::default();
    std::thread::scope(|scope| {
        let joined = |rank| (rank, scope.spawn(move || join_as(rank, store)));
        let others: Vec<_> = (0..SIZE).filter(|rank| *rank != FIRST).map(joined).collect();
        join_and_end(store);
        for (rank, outcome) in others {
            let outcome = outcome.join().expect("no panic");
            if rank / 8 == 1 {
                let error = outcome.expect_err("nobody has the table for it");
                assert!(matches!(error, InitError::Unreachable { rank: 8, .. }), "{error}");
                assert!(error.to_string().contains("either rank 8 has ended"), "{error}");
            } else {
                assert_eq!(outcome.expect("it has the table").ranks.len(), SIZE);
            }
        }
    });
}
