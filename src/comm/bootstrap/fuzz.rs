//! Fuzz targets of the bootstrap: the messages of both sides, and the record in the store.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::build::Build;
use super::context::JoinContext;
use super::groups::Groups;
use super::joiner;
use super::protocol::{
    Came, Host, Joiner, JoinerState, Keys, ListenerState, NONCE_BYTES, Next, PROOF_BYTES, RELAYED_BYTES_MAX, Secret,
    TABLE_BYTES_MAX, frame_length,
};
use super::rank_info::{Common, RankInfo};
use super::reply::{JoinReply, World};
use super::roster::Roster;
use crate::comm::framing::ReadBuffer;
use crate::comm::store::Store;
use crate::config::Config;
use crate::fuzz_input::{Input, Wire};
use crate::sync::Arc;
use crate::sys::process::ProcessId;
use crate::topo::Cpus;
use crate::transport::auth::Binding;
use crate::types::Rank;

const WORLD: u32 = 4;

/// Rank 3 joins through rank 2.
const GROUPS: Groups = Groups { size: WORLD as usize, ranks: 2 };

/// Proofs outside TLS.
const UNBOUND: Binding = [0; 32];

/// Unauthenticated peers on both sides, descriptions of authenticated ranks, replies, and records in the store.
pub(crate) fn bootstrap(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 5 {
        0 => assert!(receive(ListenerState::new(GROUPS), input).is_empty(), "an unauthenticated peer was let in"),
        1 => describe(input),
        2 => {
            let joiner_state = JoinerState::new(Rank(1)).expect("random bytes");
            let challenge: [u8; NONCE_BYTES + PROOF_BYTES] = input.array();
            assert!(
                joiner_state.answer(&keys(), UNBOUND, &challenge).is_none(),
                "an unauthenticated root was believed"
            );
        }
        3 => outcome(input.rest()),
        _ => store_record(input.rest()),
    }
}

/// Drives the listener's side until the stream or the protocol ends. Returns what it has heard.
fn receive(mut listener_state: ListenerState, input: Input<'_>) -> Vec<Came> {
    let (mut wire, mut buffer, mut heard) = (Wire::new(input), ReadBuffer::default(), Vec::new());
    let mut next = |wanted: usize| {
        assert!(wanted <= RELAYED_BYTES_MAX);
        while !buffer.fill(&mut wire, wanted).ok()? {}
        Some(buffer.take())
    };
    while let Some(message) = listener_state.expected().and_then(&mut next) {
        match listener_state.receive(&keys(), UNBOUND, &message) {
            Ok(Next::Take(came)) => heard.push(came),
            Ok(Next::Read | Next::Write(_)) => {}
            Err(_) => break,
        }
    }
    heard
}

/// The description of an authenticated rank, which leads rank 3.
fn describe(mut input: Input<'_>) {
    let (joiner_state, mut listener_state) =
        (JoinerState::new(Rank(2)).expect("random bytes"), ListenerState::new(GROUPS));
    let Ok(Next::Write(challenge)) = listener_state.receive(&keys(), UNBOUND, &joiner_state.hello()) else {
        panic!("no challenge")
    };
    let challenge = challenge[..].try_into().expect("a nonce and a proof");
    let proof = joiner_state.answer(&keys(), UNBOUND, challenge).expect("rank 0 knows the secret");
    assert!(matches!(listener_state.receive(&keys(), UNBOUND, &proof), Ok(Next::Read)));
    let mut roster = Roster::new(info(0));
    let others = input.byte();
    (1..WORLD).filter(|rank| others >> rank & 1 == 1).for_each(|rank| roster.add(info(rank)).expect("a free entry"));
    for (place, came) in receive(listener_state, input).into_iter().enumerate() {
        let (rank, joined) = match came {
            Came::Joined(rank, request) => (rank, Some(*request)),
            Came::Relayed(told) => (told.rank, told.joined),
        };
        assert_eq!(rank, if place == 0 { Rank(2) } else { Rank(3) }, "one rank spoke for another");
        match joined {
            Some(Ok(Joiner { info, .. })) => {
                assert_eq!(info.rank, rank);
                let free = roster.missing().contains(&rank.0);
                assert!(roster.add(info).is_err() || free);
            }
            Some(Err(_)) => {}
            None => roster.remove(rank),
        }
        assert_eq!(roster.table().is_some(), roster.missing().is_empty());
    }
}

/// Rank 0's reply.
fn outcome(bytes: &[u8]) {
    let Some((length, body)) = bytes.split_at_checked(size_of::<u32>()) else { return };
    let Ok(length) = frame_length(length, TABLE_BYTES_MAX) else { return };
    if let Ok(JoinReply::Complete(World { ranks, tuning, scratch_bytes })) =
        JoinReply::parse(&body[..length.min(body.len())], WORLD as usize)
    {
        assert!(ranks.iter().enumerate().all(|(index, info)| info.rank.index() == index));
        assert_eq!(ranks.len(), WORLD as usize);
        // What it says can be said again, unless that takes more bytes than a rank may have.
        let again = JoinReply::Complete(World { ranks: ranks.clone(), tuning, scratch_bytes }).message();
        let Ok(again) = again else { return };
        let Ok(JoinReply::Complete(world)) = JoinReply::parse(&again[size_of::<u32>()..], WORLD as usize) else {
            panic!("the same is no answer")
        };
        assert_eq!(world.ranks, ranks);
    }
}

/// A store with arbitrary bytes in place of rank 0's record.
struct FuzzedStore<'a>(&'a [u8]);

impl Store for FuzzedStore<'_> {
    fn set(&self, _: &str, _: &[u8]) -> Result<(), String> {
        Ok(())
    }

    fn get(&self, _: &str, _: Duration) -> Result<Vec<u8>, String> {
        Ok(self.0.to_vec())
    }

    fn rendezvous_host(&self) -> Option<String> {
        None
    }
}

fn store_record(bytes: &[u8]) {
    let (store, config) = (FuzzedStore(bytes), Config::default());
    let host = Host { id: "here".to_owned(), machine: "machine".to_owned() };
    let deadline = Instant::now() + config.connect_timeout;
    let context = JoinContext {
        name: "fuzz",
        rank: Rank(1),
        groups: Groups::one(2),
        store: &store,
        config: &config,
        host: &host,
        deadline,
    };
    match joiner::find(&context, None, Instant::now()) {
        Ok((_, _, root)) => _ = joiner::routes(&root.place, &host).map(|routes| assert!(!routes.is_empty())),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn keys() -> Keys {
    Keys { comm_id: [7; 16], secret: Secret::new([9; 32]) }
}

fn info(rank: u32) -> RankInfo {
    RankInfo {
        rank: Rank(rank),
        host_id: "here".into(),
        addresses: BTreeMap::from([("tcp".to_owned(), b"{}".to_vec())]).into(),
        cpus: Cpus::default(),
        process: ProcessId::own(),
        common: Arc::new(Common {
            build: Build {
                version: "0".to_owned(),
                sources: "0".to_owned(),
                byte_order: "little".to_owned(),
                pointer_bits: 64,
            },
            world_size: WORLD,
            name: "fuzz".to_owned(),
            algorithm: None,
            through_host: None,
        }),
    }
}
