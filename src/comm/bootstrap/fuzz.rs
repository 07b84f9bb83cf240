//! What two processes say to each other while a rank joins, and what it finds in the store.

use std::time::{Duration, Instant};

use super::joiner;
use super::protocol::{
    INFO_LIMIT, Introduction, Keys, NONCE_BYTES, Next, PROOF_BYTES, RankInfo, Reception, Reply, Secret, TABLE_LIMIT,
    World, frame_length,
};
use super::root::Seats;
use super::{Build, Host, Party};
use crate::comm::framing::Intake;
use crate::comm::store::Store;
use crate::config::Config;
use crate::fuzz_input::{Input, Wire};
use crate::sys::process::ProcessId;
use crate::topo::Cpus;
use crate::transport::auth::Binding;
use crate::types::Rank;

const WORLD: u32 = 4;

/// Proofs outside TLS.
const UNBOUND: Binding = [0; 32];

/// Strangers at rank 0's door and behind a joiner's call, ranks that describe themselves oddly, and what may stand in a
/// store.
pub(crate) fn bootstrap(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 5 {
        0 => assert!(receive(Reception::new(), input).is_none(), "a stranger was let in"),
        1 => describe(input),
        2 => {
            let introduction = Introduction::new(Rank(1)).expect("random bytes");
            let challenge: [u8; NONCE_BYTES + PROOF_BYTES] = input.array();
            assert!(introduction.answer(&keys(), UNBOUND, &challenge).is_none(), "a stranger was believed");
        }
        3 => outcome(input.rest()),
        _ => notice(input.rest()),
    }
}

/// Drives rank 0's side until the stream ends or it wants no more; what the joiner says of itself.
fn receive(mut reception: Reception, input: Input<'_>) -> Option<(Rank, Result<RankInfo, String>)> {
    let (mut wire, mut intake) = (Wire::new(input), Intake::default());
    while let Some(expected) = reception.expected() {
        assert!(expected <= INFO_LIMIT);
        while !intake.fill(&mut wire, expected).ok()? {}
        if let Next::Joined(rank, arrival) = reception.take(&keys(), UNBOUND, &intake.take()).ok()? {
            return Some((rank, *arrival));
        }
    }
    None
}

/// A rank that has proved itself says what it is.
fn describe(mut input: Input<'_>) {
    let (introduction, mut reception) = (Introduction::new(Rank(2)).expect("random bytes"), Reception::new());
    let Ok(Next::Say(challenge)) = reception.take(&keys(), UNBOUND, &introduction.hello()) else {
        panic!("no challenge")
    };
    let challenge = challenge[..].try_into().expect("a nonce and a proof");
    let proof = introduction.answer(&keys(), UNBOUND, challenge).expect("rank 0 knows the secret");
    assert!(matches!(reception.take(&keys(), UNBOUND, &proof), Ok(Next::Listen)));
    let mut seats = Seats::new(info(0));
    let others = input.byte();
    (1..WORLD).filter(|rank| others >> rank & 1 == 1).for_each(|rank| seats.take(info(rank)).expect("a seat"));
    if let Some((rank, Ok(arrival))) = receive(reception, input) {
        assert_eq!((rank, arrival.rank), (Rank(2), Rank(2)), "one rank spoke for another");
        let free = seats.missing().contains(&2);
        assert!(seats.take(arrival).is_err() || free);
        assert_eq!(seats.table().is_some(), seats.missing().is_empty());
    }
}

/// Rank 0's last word.
fn outcome(bytes: &[u8]) {
    let Some((length, body)) = bytes.split_at_checked(size_of::<u32>()) else { return };
    let Ok(length) = frame_length(length, TABLE_LIMIT) else { return };
    if let Ok(Reply::Complete(World { ranks, .. })) = serde_json::from_slice(&body[..length.min(body.len())])
        && joiner::is_whole(&ranks, WORLD as usize)
    {
        assert_eq!(ranks.len(), WORLD as usize);
    }
}

/// What a store holds in place of rank 0's notice.
struct Odd<'a>(&'a [u8]);

impl Store for Odd<'_> {
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

fn notice(bytes: &[u8]) {
    let (store, config) = (Odd(bytes), Config::default());
    let host = Host { id: "here".to_owned(), machine: "machine".to_owned() };
    let deadline = Instant::now() + config.connect_timeout;
    let party = Party { name: "fuzz", rank: Rank(1), size: 2, store: &store, config: &config, host: &host, deadline };
    match joiner::find(&party) {
        Ok((_, record)) => _ = joiner::routes(&record, &host).map(|routes| assert!(!routes.is_empty())),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn keys() -> Keys {
    Keys { comm_id: [7; 16], secret: Secret::new([9; 32]) }
}

fn info(rank: u32) -> RankInfo {
    RankInfo {
        rank: Rank(rank),
        host_id: "here".to_owned(),
        addresses: [("tcp".to_owned(), b"{}".to_vec())].into(),
        cpus: Cpus::default(),
        build: Build {
            version: "0".to_owned(),
            sources: "0".to_owned(),
            byte_order: "little".to_owned(),
            pointer_bits: 64,
        },
        world_size: WORLD,
        name: "fuzz".to_owned(),
        process: ProcessId::own(),
        algorithm: None,
    }
}
