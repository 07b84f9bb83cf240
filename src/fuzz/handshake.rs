//! The proof of the secret at the beginning of every stream.

use crate::fuzz_input::{Input, Wire};
use crate::transport::auth::{ANSWER_BYTES, Acceptor, Binding, CHALLENGE_BYTES, Identity, Opener, PROOF_BYTES, Secret};
use crate::transport::handshake::{Accepting, Channel, Opening};
use crate::types::Rank;

/// Proofs outside TLS.
const UNBOUND: Binding = [0; 32];

impl Channel for Wire<'_> {}

/// An unauthenticated peer on either side, which must never be let in; or two ranks whose messages are changed on their way.
pub(super) fn handshake(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() % 3 {
        0 => {
            let (mut accepting, mut wire) = (Accepting::new(identity(0)), Wire::new(input));
            while let Ok(rank) = accepting.drive(&mut wire) {
                assert_eq!(rank, None, "an unauthenticated peer was let in");
            }
            assert!(wire.sent.len() <= CHALLENGE_BYTES, "an unauthenticated peer was answered");
        }
        1 => {
            let (mut opening, mut wire) = (Opening::new(identity(1), Rank(0)), Wire::new(input));
            while let Ok(proved) = opening.drive(&mut wire) {
                assert!(!proved, "an unauthenticated peer was believed");
            }
            assert!(wire.sent.len() <= ANSWER_BYTES);
        }
        _ => changed(&mut input),
    }
}

/// A handshake with another byte somewhere must fail, and one without must not.
fn changed(input: &mut Input<'_>) {
    let (opener, acceptor) = (Opener::new(identity(1), Rank(0)), Acceptor::new(identity(0)));
    let (message, place, change) = (input.byte() % 3, usize::from(input.byte()), input.byte());
    let mut challenge: [u8; CHALLENGE_BYTES] = acceptor.challenge();
    change_at(0 == message, &mut challenge, place, change);
    let finish = || {
        let mut answer: [u8; ANSWER_BYTES] = opener.answer(&challenge, &UNBOUND).ok()?;
        change_at(1 == message, &mut answer, place, change);
        let (rank, mut proof): (Rank, [u8; PROOF_BYTES]) = acceptor.check(&answer, &UNBOUND).ok()?;
        assert_eq!(rank, Rank(1));
        change_at(2 == message, &mut proof, place, change);
        opener.check(&proof, &UNBOUND).ok()
    };
    assert_eq!(finish().is_some(), change == 0, "byte {place} of message {message}");
}

fn change_at(this_one: bool, message: &mut [u8], place: usize, change: u8) {
    let length = message.len();
    message[place % length] ^= if this_one { change } else { 0 };
}

fn identity(me: u32) -> Identity {
    Identity { comm: [7; 16], me: Rank(me), size: 2, secret: Secret::new([9; 32]) }
}
