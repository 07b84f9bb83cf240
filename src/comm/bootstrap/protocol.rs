//! The messages of the bootstrap: a mutual proof that both sides know the secret, then bounded frames.
//!
//! ```text
//! joiner                                   listener
//!   HELLO  rank  nonce          ───────►
//!                               ◄───────   nonce  HMAC("listener", …)
//!   HMAC("joiner", …)           ───────►
//!   length  JSON JoinRequest    ───────►
//!                               ◄───────   length  JoinReply
//! ```
//!
//! A [leader](super::groups) joins likewise. Behind its request it sends a `length  JSON Relayed` for each that comes to it, and
//! for each that goes. It gets the answers for these in a `JoinReply` before its own.
//!
//! Both proofs cover both nonces, the communicator's id, the joiner's rank and the TLS session's binding. No proof can
//! therefore be used twice, sent back or passed on. Until it has checked the joiner's proof, the listener reads messages of
//! fixed length only. All messages go through TLS if rank 0 uses it; a joiner that cannot use TLS says why without it.
//!
//! The listener is rank 0, a leader, or a rank that passes the table on.

use std::io;
use std::net::IpAddr;

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::groups::Groups;
use super::rank_info::{RankInfo, rank_number};
use crate::config::Config;
use crate::error::InitError;
use crate::sys::net;
use crate::sys::random;
use crate::transport::auth::Binding;
pub use crate::transport::auth::Secret;
use crate::types::Rank;

/// The size limit of one rank's description.
pub(super) const INFO_BYTES_MAX: usize = 64 << 10;

/// The size limit of what a leader tells of another rank: its description, or why it cannot join.
pub(super) const RELAYED_BYTES_MAX: usize = INFO_BYTES_MAX + 256;

/// The size limit of the table of all ranks, and of what it tells of them.
pub(super) const TABLE_BYTES_MAX: usize = 64 << 20;

pub(super) const PROOF_BYTES: usize = 32;
pub(super) const NONCE_BYTES: usize = 32;

pub(super) const HELLO: &[u8; 8] = b"ncclx_rs";
const HELLO_BYTES: usize = HELLO.len() + size_of::<u32>() + NONCE_BYTES;
const LENGTH_BYTES: usize = size_of::<u32>();

/// The keys of one communicator's connections.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Keys {
    /// Names this communicator among all.
    pub comm_id: [u8; 16],
    /// Both sides of each connection prove that they know it.
    pub secret: Secret,
}

impl Keys {
    /// Fresh keys, from the operating system's randomness.
    pub fn random() -> io::Result<Keys> {
        Ok(Keys { comm_id: random::bytes()?, secret: Secret::new(random::bytes()?) })
    }

    /// These keys, which rank 0 has published, mixed with the secret that the ranks got in another way.
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

/// The job secret and the group secret of the settings in one; none if neither is set.
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

/// The joiner's message after its proof: who it is, or why it cannot join.
pub(super) type JoinRequest = Result<Joiner, String>;

/// A rank that joins.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Joiner {
    pub(super) info: RankInfo,
    /// Where it listens, in a world so large that it may have to pass the table on.
    pub(super) place: Option<Place>,
}

/// What a leader tells rank 0 of a rank that joins through it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Relayed {
    #[serde(with = "rank_number")]
    pub(super) rank: Rank,
    /// It has come, or cannot join. None: its connection has ended.
    pub(super) joined: Option<JoinRequest>,
}

/// Where a rank listens for joiners.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    pub(super) host: Host,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) port: u16,
}

/// A rank's host: its real machine id, and the id in use, which `host_id` may override.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Host {
    /// The id in use. It decides everything but loopback: an override cannot make loopback reach another machine.
    pub(super) id: String,
    pub(super) machine: String,
}

impl Host {
    pub(super) fn here(config: &Config) -> Host {
        let machine = net::host_identity();
        Host { id: config.host_id.clone().unwrap_or_else(|| machine.clone()), machine }
    }
}

#[derive(Clone, Debug)]
struct Nonces {
    joiner: [u8; NONCE_BYTES],
    root: [u8; NONCE_BYTES],
    binding: Binding,
}

/// The joiner's half of the proof. The caller moves the bytes.
pub(super) struct JoinerState {
    rank: Rank,
    nonce: [u8; NONCE_BYTES],
}

impl JoinerState {
    pub(super) fn new(rank: Rank) -> io::Result<Self> {
        Ok(JoinerState { rank, nonce: random::bytes()? })
    }

    pub(super) fn hello(&self) -> Vec<u8> {
        [HELLO.as_slice(), &self.rank.0.to_le_bytes(), &self.nonce].concat()
    }

    /// The joiner's proof in answer to the listener's challenge; none if the proof in the challenge is false.
    pub(super) fn answer(
        &self,
        keys: &Keys,
        binding: Binding,
        challenge: &[u8; NONCE_BYTES + PROOF_BYTES],
    ) -> Option<Vec<u8>> {
        let (root, proof) = challenge.split_first_chunk().expect("a challenge begins with a nonce");
        let nonces = Nonces { joiner: self.nonce, root: *root, binding };
        keys.mac("listener", self.rank, &nonces).verify_slice(proof).ok()?;
        Some(keys.mac("joiner", self.rank, &nonces).finalize().into_bytes().to_vec())
    }
}

/// The listener's half of the proof, up to the joiner's request. The caller moves the bytes.
pub(super) struct ListenerState {
    groups: Groups,
    stage: Stage,
}

enum Stage {
    Hello,
    Proof(Rank, Nonces),
    Length(Rank),
    Info(Rank, usize),
    /// A leader has joined, and more may follow.
    RelayedLength(Rank),
    Relayed(Rank, usize),
    Done,
}

/// What the listener does after a message.
pub(super) enum Next {
    /// Reads the next message.
    Read,
    /// Writes these bytes, then reads the next message.
    Write(Vec<u8>),
    /// Hands this on, then reads the next message.
    Take(Came),
}

/// What a listener hears.
pub(super) enum Came {
    /// The joiner has proved that it knows the secret, and sent its request.
    Joined(Rank, Box<JoinRequest>),
    /// A leader tells of another rank.
    Relayed(Box<Relayed>),
}

impl ListenerState {
    pub(super) fn new(groups: Groups) -> Self {
        ListenerState { groups, stage: Stage::Hello }
    }

    /// Whether the joiner is a leader, which goes on to tell of others.
    pub(super) fn relays(&self) -> bool {
        matches!(self.stage, Stage::RelayedLength(_) | Stage::Relayed(..))
    }

    /// The length of the next message; none after the last.
    pub(super) fn expected(&self) -> Option<usize> {
        match self.stage {
            Stage::Hello => Some(HELLO_BYTES),
            Stage::Proof(..) => Some(PROOF_BYTES),
            Stage::Length(_) | Stage::RelayedLength(_) => Some(LENGTH_BYTES),
            Stage::Info(_, length) | Stage::Relayed(_, length) => Some(length),
            Stage::Done => None,
        }
    }

    /// Handles a message of the expected length from a connection with this `binding`. The error says why the sender is
    /// refused.
    pub(super) fn receive(&mut self, keys: &Keys, binding: Binding, message: &[u8]) -> Result<Next, String> {
        match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::Hello => self.challenge(keys, binding, message),
            Stage::Proof(rank, nonces) => {
                let proved = keys.mac("joiner", rank, &nonces).verify_slice(message);
                proved.map_err(|_| "it does not know the secret".to_string())?;
                self.stage = Stage::Length(rank);
                Ok(Next::Read)
            }
            Stage::Length(rank) => {
                self.stage = Stage::Info(rank, frame_length(message, INFO_BYTES_MAX)?);
                Ok(Next::Read)
            }
            Stage::Info(rank, _) => {
                let request: JoinRequest = serde_json::from_slice(message).map_err(|error| error.to_string())?;
                match &request {
                    Ok(Joiner { info, .. }) if info.rank != rank => {
                        Err(format!("it is rank {rank} and rank {} at once", info.rank))
                    }
                    _ => {
                        if request.is_ok() && self.groups.leads(rank) {
                            self.stage = Stage::RelayedLength(rank);
                        }
                        Ok(Next::Take(Came::Joined(rank, Box::new(request))))
                    }
                }
            }
            Stage::RelayedLength(leader) => {
                self.stage = Stage::Relayed(leader, frame_length(message, RELAYED_BYTES_MAX)?);
                Ok(Next::Read)
            }
            Stage::Relayed(leader, _) => {
                let told: Relayed = serde_json::from_slice(message).map_err(|error| error.to_string())?;
                let of = match &told.joined {
                    Some(Ok(Joiner { info, .. })) => info.rank,
                    _ => told.rank,
                };
                if of != told.rank || !self.groups.members(leader).contains(&of.0) {
                    return Err(format!("rank {leader} speaks for rank {of}, which does not join through it"));
                }
                self.stage = Stage::RelayedLength(leader);
                Ok(Next::Take(Came::Relayed(Box::new(told))))
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
        let nonces = Nonces { joiner, root: random::bytes().map_err(|error| error.to_string())?, binding };
        let proof = keys.mac("listener", rank, &nonces).finalize().into_bytes();
        let challenge = [nonces.root.as_slice(), &proof].concat();
        self.stage = Stage::Proof(rank, nonces);
        Ok(Next::Write(challenge))
    }
}

/// A message as JSON, with its length in front.
pub(super) fn frame(message: &impl Serialize, limit: usize) -> Result<Vec<u8>, String> {
    framed(&serde_json::to_vec(message).map_err(|error| error.to_string())?, limit)
}

/// A message with its length in front.
pub(super) fn framed(body: &[u8], limit: usize) -> Result<Vec<u8>, String> {
    let length = u32::try_from(body.len()).ok().filter(|_| body.len() <= limit);
    let length = length.ok_or_else(|| format!("a message of {} bytes is longer than {limit}", body.len()))?;
    Ok([length.to_le_bytes().as_slice(), body].concat())
}

/// The length in front of a message.
pub(super) fn frame_length(header: &[u8], limit: usize) -> Result<usize, String> {
    let length = u32::from_le_bytes(header.try_into().map_err(|_| "a length has four bytes".to_string())?);
    match usize::try_from(length) {
        Ok(length) if length <= limit => Ok(length),
        _ => Err(format!("it announces a message of {length} bytes, more than {limit}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Binding = [0; 32];

    fn talk(joiner: &Keys, root: &Keys) -> Result<(), String> {
        let joiner_state = JoinerState::new(Rank(3)).unwrap();
        let mut listener_state = ListenerState::new(Groups::one(4));
        let Next::Write(challenge) = listener_state.receive(root, PLAIN, &joiner_state.hello())? else {
            panic!("no challenge")
        };
        let challenge = challenge.as_slice().try_into().unwrap();
        let proof = joiner_state.answer(joiner, PLAIN, challenge).ok_or("rank 0 does not know the secret")?;
        listener_state.receive(root, PLAIN, &proof).map(|_| ())
    }

    #[test]
    fn equal_keys_agree_and_others_do_not() {
        let keys = Keys::random().unwrap();
        assert_eq!(talk(&keys, &keys), Ok(()));
        let other_secret = Keys { secret: Secret::new([7; 32]), ..keys.clone() };
        assert!(talk(&other_secret, &keys).is_err());
        let mixed = keys.mixed(Some(&Secret::new([7; 32])));
        assert_eq!(talk(&mixed, &mixed), Ok(()));
        assert!(talk(&keys, &mixed).is_err());
        let other_comm = Keys { comm_id: [7; 16], ..keys.clone() };
        assert!(talk(&other_comm, &keys).is_err());
    }

    #[test]
    fn a_proof_cannot_be_sent_back() {
        let keys = Keys::random().unwrap();
        let mut listener_state = ListenerState::new(Groups::one(2));
        let hello = JoinerState::new(Rank(1)).unwrap().hello();
        let Ok(Next::Write(challenge)) = listener_state.receive(&keys, PLAIN, &hello) else { panic!("no challenge") };
        assert!(listener_state.receive(&keys, PLAIN, &challenge[NONCE_BYTES..]).is_err());
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
    fn a_proof_cannot_be_replayed() {
        let keys = Keys::random().unwrap();
        let joiner_state = JoinerState::new(Rank(1)).unwrap();
        let mut proof = None;
        for mut listener_state in [(); 2].map(|()| ListenerState::new(Groups::one(2))) {
            let Ok(Next::Write(challenge)) = listener_state.receive(&keys, PLAIN, &joiner_state.hello()) else {
                panic!("no challenge")
            };
            let challenge = challenge.as_slice().try_into().unwrap();
            let again = proof.is_some();
            let proof = proof.get_or_insert_with(|| joiner_state.answer(&keys, PLAIN, challenge).unwrap());
            assert_eq!(listener_state.receive(&keys, PLAIN, proof).is_err(), again);
        }
    }

    #[test]
    fn foreign_protocols_and_long_messages_are_refused() {
        let keys = Keys::random().unwrap();
        assert!(ListenerState::new(Groups::one(2)).receive(&keys, PLAIN, &[b'G'; HELLO_BYTES]).is_err());
        assert!(frame_length(&u32::MAX.to_le_bytes(), INFO_BYTES_MAX).is_err());
        assert!(frame(&vec![0u8; INFO_BYTES_MAX], INFO_BYTES_MAX).is_err());
    }
}
