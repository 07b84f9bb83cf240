//! What two processes say to each other while a rank joins: a mutual proof of the job's secret, then bounded frames.
//!
//! ```text
//! joiner                                   rank 0
//!   HELLO  rank  nonce          ───────►
//!                               ◄───────   nonce  HMAC("rank 0", …)
//!   HMAC("joiner", …)           ───────►
//!   length  JSON Arrival        ───────►
//!                               ◄───────   length  JSON Reply
//! ```
//!
//! Both proofs cover both nonces, the communicator's id, the joiner's rank and what is unique to the TLS session, so that
//! none can be used twice, sent back or passed on. Until the joiner's proof is checked, rank 0 reads messages of fixed
//! length only. All of it goes through TLS if rank 0 has it; a joiner that cannot take part there says why without.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use hmac::{Hmac, Mac};
use rand::TryRngCore;
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::build::Build;
use crate::algo::Tuning;
use crate::config::Config;
use crate::error::InitError;
use crate::sys::process::ProcessId;
use crate::topo::Cpus;
use crate::transport::auth::Binding;
pub use crate::transport::auth::Secret;
use crate::types::Rank;

/// The longest description of one rank.
pub(super) const INFO_LIMIT: usize = 64 << 10;

/// The longest table of all ranks.
pub(super) const TABLE_LIMIT: usize = 64 << 20;

pub(super) const PROOF_BYTES: usize = 32;
pub(super) const NONCE_BYTES: usize = 32;

pub(super) const HELLO: &[u8; 8] = b"ncclx_rs";
const HELLO_BYTES: usize = HELLO.len() + size_of::<u32>() + NONCE_BYTES;
const LENGTH_BYTES: usize = size_of::<u32>();

/// What tells a communicator's connections from all others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Keys {
    /// Names this communicator among all.
    pub comm_id: [u8; 16],
    /// What its connections prove to know.
    pub secret: Secret,
}

impl Keys {
    /// Keys that nobody has had before, from the operating system's randomness.
    pub fn random() -> io::Result<Keys> {
        Ok(Keys { comm_id: random()?, secret: Secret::new(random()?) })
    }

    /// The keys that are used where ranks know `shared` beside those that rank 0 has published.
    pub(super) fn mixed(&self, shared: Option<&Secret>) -> Keys {
        let secret = shared.map_or(self.secret, |shared| shared.derive("ncclx_rs communicator", self.secret.bytes()));
        Keys { secret, ..*self }
    }

    fn mac(&self, side: &str, rank: Rank, nonces: &Nonces) -> Hmac<Sha256> {
        let mut mac = Hmac::new_from_slice(self.secret.bytes()).expect("HMAC takes a key of any length");
        mac.update(&nonces.binding);
        mac.update(side.as_bytes());
        mac.update(&nonces.joiner);
        mac.update(&nonces.root);
        mac.update(&self.comm_id);
        mac.update(&rank.0.to_le_bytes());
        mac
    }
}

/// What the settings say that ranks know beside the store, in one secret; none if they say nothing.
pub fn shared_secret(config: &Config) -> Result<Option<Secret>, InitError> {
    let (job, group) = (config.job_secret.read("job_secret")?, config.group_secret.read("group_secret")?);
    Ok(match (job, group) {
        (None, None) => None,
        (job, group) => {
            let of = |text: Option<Vec<u8>>, what: &str| Secret::new([0; 32]).derive(what, &text.unwrap_or_default());
            Some(of(job, "ncclx_rs job secret").derive("ncclx_rs group secret", of(group, "").bytes()))
        }
    })
}

/// What a rank tells all others about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankInfo {
    /// The rank.
    #[serde(with = "rank_number")]
    pub rank: Rank,
    /// The host it runs on; ranks with equal identities share one.
    pub host_id: String,
    /// For each transport by name, what peers need to reach this rank.
    pub addresses: BTreeMap<String, Vec<u8>>,
    /// Its process, for those on the same host.
    pub process: ProcessId,
    /// The CPUs it may run on.
    pub cpus: Cpus,
    /// What it was built from.
    pub build: Build,
    /// The number of ranks it expects.
    pub world_size: u32,
    /// The communicator's name.
    pub name: String,
    /// The algorithm it asks for, if it does. Rank 0's holds for all; where another rank asks for another, no rank joins.
    pub algorithm: Option<String>,
}

mod rank_number {
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::types::Rank;

    pub(super) fn serialize<S: Serializer>(rank: &Rank, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(rank.0)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Rank, D::Error> {
        u32::deserialize(deserializer).map(Rank)
    }
}

/// What a joiner says after its proof: itself, or why it cannot take part.
pub(super) type Arrival = Result<RankInfo, String>;

/// What all ranks know once they are complete.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct World {
    /// Every rank, in order.
    pub(super) ranks: Vec<RankInfo>,
    /// Rank 0's tuning file, so that all choose the same algorithms.
    pub(super) tuning: Tuning,
}

/// Rank 0's last word.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// All have joined.
    Complete(World),
    /// Some have not.
    Missing { missing: Vec<u32>, waited: Duration },
    /// The ranks do not fit together.
    Refused { cause: String },
}

#[derive(Clone, Debug)]
struct Nonces {
    joiner: [u8; NONCE_BYTES],
    root: [u8; NONCE_BYTES],
    binding: Binding,
}

/// The joiner's half of the proof; the connection is its caller's.
pub(super) struct Introduction {
    rank: Rank,
    nonce: [u8; NONCE_BYTES],
}

impl Introduction {
    pub(super) fn new(rank: Rank) -> io::Result<Self> {
        Ok(Introduction { rank, nonce: random()? })
    }

    pub(super) fn hello(&self) -> Vec<u8> {
        [HELLO.as_slice(), &self.rank.0.to_le_bytes(), &self.nonce].concat()
    }

    /// The joiner's proof in answer to rank 0's nonce and proof; none when that proof is false.
    pub(super) fn answer(
        &self,
        keys: &Keys,
        binding: Binding,
        challenge: &[u8; NONCE_BYTES + PROOF_BYTES],
    ) -> Option<Vec<u8>> {
        let (root, proof) = challenge.split_first_chunk().expect("a challenge begins with a nonce");
        let nonces = Nonces { joiner: self.nonce, root: *root, binding };
        keys.mac("rank 0", self.rank, &nonces).verify_slice(proof).ok()?;
        Some(keys.mac("joiner", self.rank, &nonces).finalize().into_bytes().to_vec())
    }
}

/// Rank 0's half of the proof, up to the joiner's description of itself: messages in, answers out.
pub(super) struct Reception {
    stage: Stage,
}

enum Stage {
    Hello,
    Proof(Rank, Nonces),
    Length(Rank),
    Info(Rank, usize),
    Done,
}

/// What comes of a message.
pub(super) enum Next {
    /// Nothing until the next message.
    Listen,
    /// These bytes go out.
    Say(Vec<u8>),
    /// The joiner has proved itself and said all it has to say.
    Joined(Rank, Box<Arrival>),
}

impl Reception {
    pub(super) fn new() -> Self {
        Reception { stage: Stage::Hello }
    }

    /// The length of the next message; none after the last.
    pub(super) fn expected(&self) -> Option<usize> {
        match self.stage {
            Stage::Hello => Some(HELLO_BYTES),
            Stage::Proof(..) => Some(PROOF_BYTES),
            Stage::Length(_) => Some(LENGTH_BYTES),
            Stage::Info(_, length) => Some(length),
            Stage::Done => None,
        }
    }

    /// Takes a message of the expected length from a connection with this `binding`; the error says why the sender does
    /// not belong here.
    pub(super) fn take(&mut self, keys: &Keys, binding: Binding, message: &[u8]) -> Result<Next, String> {
        match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::Hello => self.challenge(keys, binding, message),
            Stage::Proof(rank, nonces) => {
                let proved = keys.mac("joiner", rank, &nonces).verify_slice(message);
                proved.map_err(|_| "it does not know the secret".to_string())?;
                self.stage = Stage::Length(rank);
                Ok(Next::Listen)
            }
            Stage::Length(rank) => {
                self.stage = Stage::Info(rank, frame_length(message, INFO_LIMIT)?);
                Ok(Next::Listen)
            }
            Stage::Info(rank, _) => {
                let arrival: Arrival = serde_json::from_slice(message).map_err(|error| error.to_string())?;
                match &arrival {
                    Ok(info) if info.rank != rank => Err(format!("it is rank {rank} and rank {} at once", info.rank)),
                    _ => Ok(Next::Joined(rank, Box::new(arrival))),
                }
            }
            Stage::Done => Err("it speaks out of turn".to_string()),
        }
    }

    fn challenge(&mut self, keys: &Keys, binding: Binding, hello: &[u8]) -> Result<Next, String> {
        let fields = || {
            let (rank, nonce) = hello.strip_prefix(HELLO)?.split_first_chunk()?;
            Some((Rank(u32::from_le_bytes(*rank)), nonce.try_into().ok()?))
        };
        let (rank, joiner) = fields().ok_or("it does not speak this protocol")?;
        let nonces = Nonces { joiner, root: random().map_err(|error| error.to_string())?, binding };
        let proof = keys.mac("rank 0", rank, &nonces).finalize().into_bytes();
        let challenge = [nonces.root.as_slice(), &proof].concat();
        self.stage = Stage::Proof(rank, nonces);
        Ok(Next::Say(challenge))
    }
}

/// A message behind its length.
pub(super) fn frame(body: &impl Serialize, limit: usize) -> Result<Vec<u8>, String> {
    let body = serde_json::to_vec(body).map_err(|error| error.to_string())?;
    let length = u32::try_from(body.len()).ok().filter(|_| body.len() <= limit);
    let length = length.ok_or_else(|| format!("a message of {} bytes is longer than {limit}", body.len()))?;
    Ok([length.to_le_bytes().as_slice(), &body].concat())
}

/// The length that stands before a message.
pub(super) fn frame_length(header: &[u8], limit: usize) -> Result<usize, String> {
    let length = u32::from_le_bytes(header.try_into().map_err(|_| "a length has four bytes".to_string())?);
    match usize::try_from(length) {
        Ok(length) if length <= limit => Ok(length),
        _ => Err(format!("it announces a message of {length} bytes, more than {limit}")),
    }
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    rand::rngs::OsRng.try_fill_bytes(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Binding = [0; 32];

    fn talk(joiner: &Keys, root: &Keys) -> Result<(), String> {
        let introduction = Introduction::new(Rank(3)).unwrap();
        let mut reception = Reception::new();
        let Next::Say(challenge) = reception.take(root, PLAIN, &introduction.hello())? else { panic!("no challenge") };
        let challenge = challenge.as_slice().try_into().unwrap();
        let proof = introduction.answer(joiner, PLAIN, challenge).ok_or("rank 0 does not know the secret")?;
        reception.take(root, PLAIN, &proof).map(|_| ())
    }

    #[test]
    fn equal_keys_agree_and_others_do_not() {
        let keys = Keys::random().unwrap();
        assert_eq!(talk(&keys, &keys), Ok(()));
        let stranger = Keys { secret: Secret::new([7; 32]), ..keys.clone() };
        assert!(talk(&stranger, &keys).is_err());
        let mixed = keys.mixed(Some(&Secret::new([7; 32])));
        assert_eq!(talk(&mixed, &mixed), Ok(()));
        assert!(talk(&keys, &mixed).is_err());
        let neighbour = Keys { comm_id: [7; 16], ..keys.clone() };
        assert!(talk(&neighbour, &keys).is_err());
    }

    #[test]
    fn a_proof_cannot_be_sent_back() {
        let keys = Keys::random().unwrap();
        let mut reception = Reception::new();
        let hello = Introduction::new(Rank(1)).unwrap().hello();
        let Ok(Next::Say(challenge)) = reception.take(&keys, PLAIN, &hello) else { panic!("no challenge") };
        assert!(reception.take(&keys, PLAIN, &challenge[NONCE_BYTES..]).is_err());
    }

    #[test]
    fn each_shared_secret_counts() {
        let shared = |hints: &[(&str, &str)]| {
            let hints: Vec<_> = hints.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
            shared_secret(&Config::resolve_with(&|_| None, &hints).unwrap()).unwrap().map(|secret| *secret.bytes())
        };
        let (one, other) = ("0123456789abcdef", "fedcba9876543210");
        assert_eq!(shared(&[]), None);
        let all = [
            shared(&[("job_secret", one)]),
            shared(&[("job_secret", other)]),
            shared(&[("group_secret", one)]),
            shared(&[("job_secret", one), ("group_secret", other)]),
            shared(&[("job_secret", other), ("group_secret", one)]),
        ];
        let distinct: std::collections::BTreeSet<_> = all.into_iter().flatten().collect();
        assert_eq!(distinct.len(), all.len());
    }

    #[test]
    fn a_proof_cannot_be_said_again() {
        let keys = Keys::random().unwrap();
        let introduction = Introduction::new(Rank(1)).unwrap();
        let mut proof = None;
        for reception in [&mut Reception::new(), &mut Reception::new()] {
            let Ok(Next::Say(challenge)) = reception.take(&keys, PLAIN, &introduction.hello()) else {
                panic!("no challenge")
            };
            let challenge = challenge.as_slice().try_into().unwrap();
            let again = proof.is_some();
            let proof = proof.get_or_insert_with(|| introduction.answer(&keys, PLAIN, challenge).unwrap());
            assert_eq!(reception.take(&keys, PLAIN, proof).is_err(), again);
        }
    }

    #[test]
    fn strangers_and_long_messages_are_refused() {
        let keys = Keys::random().unwrap();
        assert!(Reception::new().take(&keys, PLAIN, &[b'G'; HELLO_BYTES]).is_err());
        assert!(frame_length(&u32::MAX.to_le_bytes(), INFO_LIMIT).is_err());
        assert!(frame(&vec![0u8; INFO_LIMIT], INFO_LIMIT).is_err());
    }
}
