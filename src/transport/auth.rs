//! Authentication: both sides prove that they know the job's secret, before any other byte of a connection is read.
//!
//! The acceptor sends a challenge. The opener answers with a proof and its own challenge. The acceptor answers with its
//! proof. A proof is HMAC-SHA256 (RFC 2104, FIPS 198-1) under the job's secret. It covers the side's role, the other side's
//! nonce, the TLS session's binding, the communicator and both ranks. So it is valid for one connection, one direction and
//! one pair of ranks. All messages have a fixed size. Nothing here does I/O.

use std::fmt;

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::sys::random;
use crate::types::Rank;

/// A secret that every rank of a job knows, and no other process.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret([u8; 32]);

impl Secret {
    /// The secret made of `bytes`.
    pub fn new(bytes: [u8; 32]) -> Self {
        Secret(bytes)
    }

    /// The bytes, for keyed hashes.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Another secret, for `purpose`, that does not reveal this one (as in RFC 5869).
    pub fn derive(&self, purpose: &str, salt: &[u8]) -> Secret {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(purpose.as_bytes());
        mac.update(salt);
        Secret(mac.finalize().into_bytes().into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// A value unique to a TLS session (RFC 9266); zeros on a connection without TLS.
pub type Binding = [u8; 32];

/// A rank's identity, and the secret that proves it.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The communicator.
    pub comm: [u8; 16],
    /// This rank.
    pub me: Rank,
    /// The number of ranks.
    pub size: usize,
    /// The job's secret.
    pub secret: Secret,
}

/// Why a handshake failed. It reveals nothing about the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The other side speaks another protocol.
    #[error("the other side does not speak ncclx_rs protocol version {PROTOCOL_VERSION}")]
    Protocol,
    /// A rank of another communicator, or no rank of this one.
    #[error("the other side is not a rank of this communicator")]
    NotARank,
    /// The proof is wrong.
    #[error("the other side does not know the job's secret")]
    Proof,
}

/// The version of the wire format. Sides with different versions refuse each other.
pub const PROTOCOL_VERSION: u32 = 2;

/// The acceptor's first message: magic, version, nonce.
pub const CHALLENGE_BYTES: usize = 8 + 4 + 32;
/// The opener's message: magic, version, communicator, rank, nonce, proof.
pub const ANSWER_BYTES: usize = 8 + 4 + 16 + 4 + 32 + 32;
/// The acceptor's last message.
pub const PROOF_BYTES: usize = 32;

const MAGIC: &[u8; 8] = b"ncclx_rs";

type Nonce = [u8; 32];

/// The opening side of a handshake.
#[derive(Debug)]
pub struct Opener {
    identity: Identity,
    peer: Rank,
    nonce: Nonce,
}

impl Opener {
    /// A handshake with `peer`.
    pub fn new(identity: Identity, peer: Rank) -> Self {
        Opener { identity, peer, nonce: random::any() }
    }

    /// The answer to the acceptor's challenge.
    pub fn answer(
        &self,
        challenge: &[u8; CHALLENGE_BYTES],
        binding: &Binding,
    ) -> Result<[u8; ANSWER_BYTES], AuthError> {
        check_version(challenge)?;
        let Identity { comm, me, secret, .. } = &self.identity;
        let mut answer = [0; ANSWER_BYTES];
        answer[..8].copy_from_slice(MAGIC);
        answer[8..12].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        answer[12..28].copy_from_slice(comm);
        answer[28..32].copy_from_slice(&me.0.to_le_bytes());
        answer[32..64].copy_from_slice(&self.nonce);
        let proof =
            proof(secret, Role::Opener, &challenge[12..], binding, comm, *me, self.peer).finalize().into_bytes();
        answer[64..].copy_from_slice(&proof);
        Ok(answer)
    }

    /// What only the two ends of this connection know, once both have proved themselves.
    pub fn session(&self, challenge: &[u8; CHALLENGE_BYTES], binding: &Binding) -> Secret {
        let Identity { comm, me, secret, .. } = &self.identity;
        session(secret, &[&challenge[12..], &self.nonce], binding, comm, *me, self.peer)
    }

    /// Checks the acceptor's proof.
    pub fn check(&self, theirs: &[u8; PROOF_BYTES], binding: &Binding) -> Result<(), AuthError> {
        let Identity { comm, me, secret, .. } = &self.identity;
        let expected = proof(secret, Role::Acceptor, &self.nonce, binding, comm, *me, self.peer);
        expected.verify_slice(theirs).map_err(|_| AuthError::Proof)
    }
}

/// The accepting side of a handshake.
#[derive(Debug)]
pub struct Acceptor {
    identity: Identity,
    nonce: Nonce,
}

impl Acceptor {
    /// A handshake with the side that opened the connection.
    pub fn new(identity: Identity) -> Self {
        Acceptor { identity, nonce: random::any() }
    }

    /// The first message.
    pub fn challenge(&self) -> [u8; CHALLENGE_BYTES] {
        let mut challenge = [0; CHALLENGE_BYTES];
        challenge[..8].copy_from_slice(MAGIC);
        challenge[8..12].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        challenge[12..].copy_from_slice(&self.nonce);
        challenge
    }

    /// What [`Opener::session`] is at the other end, whose answer has been checked.
    pub fn session(&self, answer: &[u8; ANSWER_BYTES], binding: &Binding) -> Secret {
        let Identity { comm, me, secret, .. } = &self.identity;
        let opener = Rank(u32::from_le_bytes(std::array::from_fn(|i| answer[28 + i])));
        session(secret, &[&self.nonce, &answer[32..64]], binding, comm, opener, *me)
    }

    /// Checks the opener's proof. Returns its rank, and this side's proof for it.
    pub fn check(
        &self,
        answer: &[u8; ANSWER_BYTES],
        binding: &Binding,
    ) -> Result<(Rank, [u8; PROOF_BYTES]), AuthError> {
        check_version(answer)?;
        let Identity { comm, me, size, secret } = &self.identity;
        let opener = Rank(u32::from_le_bytes(std::array::from_fn(|i| answer[28 + i])));
        let expected = proof(secret, Role::Opener, &self.nonce, binding, comm, opener, *me);
        expected.verify_slice(&answer[64..]).map_err(|_| AuthError::Proof)?;
        if answer[12..28] != comm[..] || opener.index() >= *size || opener == *me {
            return Err(AuthError::NotARank);
        }
        let own = proof(secret, Role::Acceptor, &answer[32..64], binding, comm, opener, *me);
        Ok((opener, own.finalize().into_bytes().into()))
    }
}

#[derive(Clone, Copy)]
enum Role {
    Opener,
    Acceptor,
}

fn proof(
    secret: &Secret,
    role: Role,
    nonce: &[u8],
    binding: &Binding,
    comm: &[u8; 16],
    opener: Rank,
    acceptor: Rank,
) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(&secret.0).expect("HMAC takes keys of any length");
    mac.update(match role {
        Role::Opener => b"ncclx_rs opener".as_slice(),
        Role::Acceptor => b"ncclx_rs acceptor".as_slice(),
    });
    mac.update(nonce);
    mac.update(binding);
    mac.update(comm);
    mac.update(&opener.0.to_le_bytes());
    mac.update(&acceptor.0.to_le_bytes());
    mac
}

fn session(
    secret: &Secret,
    nonces: &[&[u8]; 2],
    binding: &Binding,
    comm: &[u8; 16],
    opener: Rank,
    acceptor: Rank,
) -> Secret {
    let ranks = [opener.0.to_le_bytes(), acceptor.0.to_le_bytes()].concat();
    secret.derive("ncclx_rs session", &[nonces[0], nonces[1], binding, comm, &ranks].concat())
}

/// One who speaks on a connection that was opened for another communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The communicator.
    pub comm: [u8; 16],
    /// The rank that speaks.
    pub from: Rank,
    /// The rank that it speaks to.
    pub to: Rank,
}

impl Membership {
    /// Proves it by the communicator's secret, for the connection of this session alone.
    pub fn prove(&self, secret: &Secret, session: &Secret) -> [u8; PROOF_BYTES] {
        self.mac(secret, session).finalize().into_bytes().into()
    }

    /// Checks the proof.
    pub fn check(&self, proof: &[u8; PROOF_BYTES], secret: &Secret, session: &Secret) -> Result<(), AuthError> {
        self.mac(secret, session).verify_slice(proof).map_err(|_| AuthError::Proof)
    }

    fn mac(&self, secret: &Secret, session: &Secret) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&secret.0).expect("HMAC takes keys of any length");
        mac.update(b"ncclx_rs membership");
        mac.update(&session.0);
        mac.update(&self.comm);
        mac.update(&self.from.0.to_le_bytes());
        mac.update(&self.to.0.to_le_bytes());
        mac
    }
}

fn check_version(message: &[u8]) -> Result<(), AuthError> {
    let fits = message[..8] == MAGIC[..] && message[8..12] == PROTOCOL_VERSION.to_le_bytes();
    if fits { Ok(()) } else { Err(AuthError::Protocol) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &Binding = &[0; 32];

    fn identity(me: u32, secret: u8) -> Identity {
        Identity { comm: [7; 16], me: Rank(me), size: 4, secret: Secret([secret; 32]) }
    }

    #[test]
    fn both_sides_learn_whom_they_talk_to() {
        let (opener, acceptor) = (Opener::new(identity(2, 1), Rank(0)), Acceptor::new(identity(0, 1)));
        let answer = opener.answer(&acceptor.challenge(), PLAIN).expect("an answer");
        let (rank, proof) = acceptor.check(&answer, PLAIN).expect("a good answer");
        assert_eq!(rank, Rank(2));
        assert_eq!(opener.check(&proof, PLAIN), Ok(()));
    }

    #[test]
    fn a_wrong_secret_is_refused_on_both_sides() {
        let (opener, acceptor) = (Opener::new(identity(2, 1), Rank(0)), Acceptor::new(identity(0, 9)));
        let answer = opener.answer(&acceptor.challenge(), PLAIN).expect("an answer");
        assert_eq!(acceptor.check(&answer, PLAIN), Err(AuthError::Proof));
        assert_eq!(opener.check(&[0; PROOF_BYTES], PLAIN), Err(AuthError::Proof));
    }

    #[test]
    fn a_replayed_answer_is_refused() {
        let (opener, first) = (Opener::new(identity(2, 1), Rank(0)), Acceptor::new(identity(0, 1)));
        let answer = opener.answer(&first.challenge(), PLAIN).expect("an answer");
        assert_eq!(Acceptor::new(identity(0, 1)).check(&answer, PLAIN), Err(AuthError::Proof));
    }

    #[test]
    fn an_answer_for_another_rank_or_communicator_is_refused() {
        let acceptor = Acceptor::new(identity(1, 1));
        let misdirected = Opener::new(identity(2, 1), Rank(0)).answer(&acceptor.challenge(), PLAIN).expect("an answer");
        assert_eq!(acceptor.check(&misdirected, PLAIN), Err(AuthError::Proof));
        let other = Identity { comm: [8; 16], ..identity(2, 1) };
        let foreign = Opener::new(other, Rank(1)).answer(&acceptor.challenge(), PLAIN).expect("an answer");
        assert!(acceptor.check(&foreign, PLAIN).is_err());
    }

    #[test]
    fn a_proof_that_was_passed_on_to_another_session_is_refused() {
        let (opener, acceptor) = (Opener::new(identity(2, 1), Rank(0)), Acceptor::new(identity(0, 1)));
        let answer = opener.answer(&acceptor.challenge(), &[1; 32]).expect("an answer");
        assert_eq!(acceptor.check(&answer, &[2; 32]), Err(AuthError::Proof));
        let (_, proof) = acceptor.check(&answer, &[1; 32]).expect("a good answer");
        assert_eq!(opener.check(&proof, &[2; 32]), Err(AuthError::Proof));
    }

    #[test]
    fn both_ends_of_a_connection_know_its_session_and_no_other_connection_has_it() {
        let session = |binding: &Binding| {
            let (opener, acceptor) = (Opener::new(identity(2, 1), Rank(0)), Acceptor::new(identity(0, 1)));
            let challenge = acceptor.challenge();
            let answer = opener.answer(&challenge, binding).expect("an answer");
            acceptor.check(&answer, binding).expect("a good answer");
            let [near, far] = [opener.session(&challenge, binding), acceptor.session(&answer, binding)];
            assert_eq!(near, far);
            assert_ne!(near, opener.session(&challenge, &[9; 32]), "another session of TLS");
            near
        };
        assert_ne!(session(PLAIN), session(PLAIN));
    }

    #[test]
    fn a_membership_is_proved_to_one_rank_in_one_session() {
        let membership = Membership { comm: [7; 16], from: Rank(1), to: Rank(2) };
        let (secret, session) = (Secret([3; 32]), Secret([4; 32]));
        let proof = membership.prove(&secret, &session);
        assert_eq!(membership.check(&proof, &secret, &session), Ok(()));
        assert_eq!(membership.check(&proof, &session, &secret), Err(AuthError::Proof));
        assert_eq!(membership.check(&proof, &secret, &Secret([5; 32])), Err(AuthError::Proof));
        for other in [
            Membership { comm: [8; 16], ..membership },
            Membership { from: Rank(2), ..membership },
            Membership { to: Rank(1), ..membership },
        ] {
            assert_eq!(other.check(&proof, &secret, &session), Err(AuthError::Proof));
        }
    }

    #[test]
    fn garbage_and_truncation_are_refused() {
        let acceptor = Acceptor::new(identity(0, 1));
        assert_eq!(acceptor.check(&[0; ANSWER_BYTES], PLAIN), Err(AuthError::Protocol));
        let opener = Opener::new(identity(2, 1), Rank(0));
        assert_eq!(opener.answer(&[0; CHALLENGE_BYTES], PLAIN), Err(AuthError::Protocol));
        let mut cut = opener.answer(&acceptor.challenge(), PLAIN).expect("an answer");
        cut[80..].fill(0);
        assert_eq!(acceptor.check(&cut, PLAIN), Err(AuthError::Proof));
    }

    #[test]
    fn a_secret_is_never_printed() {
        assert_eq!(format!("{:?}", Secret([0xab; 32])), "Secret(..)");
    }
}
