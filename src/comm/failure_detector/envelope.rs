//! What travels on a connection that communicators share: notices, each of which says of which communicator it is.
//!
//! ```text
//! number (4)   of the communicator on this connection, and of its two ranks; 0 is the one that the connection was opened for
//! kind (1)     JOIN, NOTICE or LEAVE
//! length (2)   of what follows: what JOIN says, a notice, or nothing
//! ```
//!
//! JOIN: the communicator (16), the rank that speaks and the rank that listens (4 each), and the proof that its sender knows the
//! communicator's secret (32). All numbers are little endian.

use super::notice::NOTICE_BYTES_MAX;
use crate::error::LinkDown;
use crate::transport::auth::{Membership, PROOF_BYTES};
use crate::types::Rank;

/// A message on a shared connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// From now on the number stands for this, with the proof of it.
    Join(Membership, [u8; PROOF_BYTES]),
    /// A notice, as bytes.
    Notice(Vec<u8>),
    /// The number stands for nothing any more. Without a goodbye before, that is a loss.
    Leave,
}

const JOIN: u8 = 1;
const NOTICE: u8 = 2;
const LEAVE: u8 = 3;

const HEADER_BYTES: usize = 4 + 1 + 2;
const JOIN_BYTES: usize = 16 + 4 + 4 + PROOF_BYTES;

/// Appends a message to `bytes`.
pub(super) fn encode(bytes: &mut Vec<u8>, number: u32, content: &Content) {
    let (kind, body) = match content {
        Content::Join(Membership { comm, from, to }, proof) => {
            let ranks = [from.0.to_le_bytes(), to.0.to_le_bytes()].concat();
            (JOIN, [comm.as_slice(), &ranks, proof].concat())
        }
        Content::Notice(notice) => (NOTICE, notice.clone()),
        Content::Leave => (LEAVE, Vec::new()),
    };
    bytes.extend(number.to_le_bytes());
    bytes.push(kind);
    bytes.extend(u16::try_from(body.len()).expect("a notice is short").to_le_bytes());
    bytes.extend(body);
}

/// The first message in `bytes`, its number and its length; none while it is not complete.
pub(super) fn decode(bytes: &[u8]) -> Result<Option<(u32, Content, usize)>, LinkDown> {
    let Some((header, body)) = bytes.split_at_checked(HEADER_BYTES) else { return Ok(None) };
    let number = u32::from_le_bytes(std::array::from_fn(|i| header[i]));
    let (kind, len) = (header[4], usize::from(u16::from_le_bytes([header[5], header[6]])));
    let is_right = match kind {
        JOIN => len == JOIN_BYTES,
        NOTICE => len <= NOTICE_BYTES_MAX,
        LEAVE => len == 0,
        _ => false,
    };
    if !is_right {
        return Err(LinkDown::new(format!(
            "it sent a message of {len} bytes and of kind {kind} to the failure detector"
        )));
    }
    let Some(body) = body.get(..len) else { return Ok(None) };
    let rank = |at: usize| Rank(u32::from_le_bytes(std::array::from_fn(|i| body[at + i])));
    let content = match kind {
        JOIN => {
            let membership = Membership { comm: std::array::from_fn(|i| body[i]), from: rank(16), to: rank(20) };
            Content::Join(membership, std::array::from_fn(|i| body[24 + i]))
        }
        NOTICE => Content::Notice(body.to_vec()),
        _ => Content::Leave,
    };
    Ok(Some((number, content, HEADER_BYTES + len)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn messages_survive_the_wire(
            number: u32, kind in 0..3, comm: [u8; 16], from: u32, to: u32, proof: [u8; PROOF_BYTES],
            notice in prop::collection::vec(any::<u8>(), 0..NOTICE_BYTES_MAX), behind: Vec<u8>,
        ) {
            let content = match kind {
                0 => Content::Join(Membership { comm, from: Rank(from), to: Rank(to) }, proof),
                1 => Content::Notice(notice),
                _ => Content::Leave,
            };
            let mut bytes = Vec::new();
            encode(&mut bytes, number, &content);
            let len = bytes.len();
            prop_assert_eq!(decode(&bytes[..len - 1]), Ok(None));
            prop_assert_eq!(decode(&[bytes, behind].concat()), Ok(Some((number, content, len))));
        }

        #[test]
        fn arbitrary_bytes_are_messages_or_refused(bytes: Vec<u8>) {
            if let Ok(Some((_, _, len))) = decode(&bytes) {
                prop_assert!(len <= bytes.len());
            }
        }
    }

    #[test]
    fn messages_of_unknown_kinds_and_of_other_lengths_are_refused() {
        for (kind, len) in [(0, 0), (JOIN, JOIN_BYTES - 1), (NOTICE, NOTICE_BYTES_MAX + 1), (LEAVE, 1), (4, 0)] {
            let [low, high] = (len as u16).to_le_bytes();
            let refused = decode(&[0, 0, 0, 0, kind, low, high]).expect_err("it is refused before it has come");
            assert!(refused.cause.contains(&format!("of {len} bytes and of kind {kind}")), "{refused}");
        }
    }
}
