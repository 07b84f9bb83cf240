//! The messages between ranks that monitor each other.

use crate::engine::failures::{Departed, Departure};
use crate::engine::heartbeat::Heartbeat;
use crate::error::LinkDown;
use crate::signature::Signature;
use crate::types::Rank;

/// A message of the failure detector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// The sender leaves. That is no loss.
    Goodbye,
    /// A rank is gone: the sender itself, or another.
    Departed(Departed),
    /// Ranks wait in a collective.
    Heartbeat(Heartbeat),
}

const GOODBYE: u8 = 1;
const LOST: u8 = 2;
const LEFT: u8 = 3;
const HEARTBEAT: u8 = 4;

/// Kind; a rank, or a heartbeat's round; a collective's number, or a number of collectives; the length of the body. All
/// numbers are little endian.
const HEADER_BYTES: usize = 1 + 4 + 8 + 2;

/// The longest body: the text of a cause, or a heartbeat's interval, signature and ranks.
const BODY_BYTES_MAX: usize = 1024;

const SIGNATURE_BYTES: usize = 4 + 4 + 8;

/// The longest notice.
pub(super) const NOTICE_BYTES_MAX: usize = HEADER_BYTES + BODY_BYTES_MAX;

/// How many ranks fit into one heartbeat.
pub(super) const RANKS_MAX: usize = (BODY_BYTES_MAX - size_of::<u64>() - SIGNATURE_BYTES) / size_of::<u32>();

impl Notice {
    /// The notice as bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let text = |cause: &str| {
            let mut end = cause.len().min(BODY_BYTES_MAX);
            while !cause.is_char_boundary(end) {
                end -= 1;
            }
            cause.as_bytes()[..end].to_vec()
        };
        let (kind, number, count, body) = match self {
            Notice::Goodbye => (GOODBYE, 0, 0, Vec::new()),
            Notice::Departed(Departed { rank, how: Departure::Lost, cause }) => (LOST, rank.0, 0, text(cause)),
            Notice::Departed(Departed { rank, how: Departure::Left { called }, cause }) => {
                (LEFT, rank.0, *called, text(cause))
            }
            Notice::Heartbeat(heartbeat) => (HEARTBEAT, heartbeat.round, heartbeat.sequence, encode_body(heartbeat)),
        };
        let mut bytes = vec![kind];
        bytes.extend_from_slice(&number.to_le_bytes());
        bytes.extend_from_slice(&count.to_le_bytes());
        bytes.extend_from_slice(&(body.len() as u16).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    /// The first notice in `bytes` and its length; none while it is not complete.
    pub(super) fn decode(bytes: &[u8], size: usize) -> Result<Option<(Notice, usize)>, LinkDown> {
        let Some((header, body)) = bytes.split_at_checked(HEADER_BYTES) else { return Ok(None) };
        let kind = header[0];
        let number = u32::from_le_bytes(std::array::from_fn(|i| header[1 + i]));
        let count = u64::from_le_bytes(std::array::from_fn(|i| header[5 + i]));
        let len = usize::from(u16::from_le_bytes([header[13], header[14]]));
        if !(GOODBYE..=HEARTBEAT).contains(&kind) {
            return Err(LinkDown::new(format!("it sent news of unknown kind {kind}")));
        }
        let names_a_rank = kind != HEARTBEAT;
        if len > BODY_BYTES_MAX || (names_a_rank && number as usize >= size) {
            return Err(LinkDown::new(format!("it sent news of rank {number} with {len} bytes")));
        }
        let Some(body) = body.get(..len) else { return Ok(None) };
        let departed = |how| {
            Notice::Departed(Departed { rank: Rank(number), how, cause: String::from_utf8_lossy(body).into_owned() })
        };
        let notice = match kind {
            GOODBYE => Notice::Goodbye,
            LOST => departed(Departure::Lost),
            LEFT => departed(Departure::Left { called: count }),
            _ => {
                let heartbeat = decode_body(body, number, count)
                    .filter(|heartbeat| heartbeat.ranks.iter().all(|rank| rank.index() < size));
                let malformed = || LinkDown::new(format!("it sent a heartbeat of {len} bytes that is none"));
                Notice::Heartbeat(heartbeat.ok_or_else(malformed)?)
            }
        };
        Ok(Some((notice, HEADER_BYTES + len)))
    }
}

/// Whether bytes are those of a heartbeat, if they are a notice.
pub(super) fn is_heartbeat(bytes: &[u8]) -> bool {
    bytes.first() == Some(&HEARTBEAT)
}

/// A heartbeat's interval, signature and ranks.
fn encode_body(heartbeat: &Heartbeat) -> Vec<u8> {
    let Signature { operation, dtype, reduction, algorithm, root, count } = heartbeat.signature;
    let mut body = heartbeat.again_millis.to_le_bytes().to_vec();
    body.extend_from_slice(&[operation, dtype, reduction, algorithm]);
    body.extend_from_slice(&root.to_le_bytes());
    body.extend_from_slice(&count.to_le_bytes());
    let ranks = heartbeat.ranks.iter().take(RANKS_MAX);
    body.extend(ranks.flat_map(|rank| rank.0.to_le_bytes()));
    body
}

/// The heartbeat with this body; nothing if it is malformed.
fn decode_body(body: &[u8], round: u32, sequence: u64) -> Option<Heartbeat> {
    let (again, body) = body.split_first_chunk()?;
    let ([operation, dtype, reduction, algorithm], body) = body.split_first_chunk()?;
    let (root, body) = body.split_first_chunk()?;
    let (count, ranks) = body.split_first_chunk()?;
    let (ranks, rest) = ranks.as_chunks();
    let signature = Signature {
        operation: *operation,
        dtype: *dtype,
        reduction: *reduction,
        algorithm: *algorithm,
        root: u32::from_le_bytes(*root),
        count: u64::from_le_bytes(*count),
    };
    rest.is_empty().then(|| Heartbeat {
        sequence,
        signature,
        round,
        again_millis: u64::from_le_bytes(*again),
        ranks: ranks.iter().map(|rank| Rank(u32::from_le_bytes(*rank))).collect(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn notices_survive_the_wire(rank in 0u32..9, called: Option<u64>, cause in ".{0,40}", behind: Vec<u8>) {
            let how = called.map_or(Departure::Lost, |called| Departure::Left { called });
            let notice = Notice::Departed(Departed { rank: Rank(rank), how, cause });
            let bytes = notice.encode();
            let len = bytes.len();
            prop_assert_eq!(Notice::decode(&bytes[..len - 1], 9), Ok(None));
            prop_assert_eq!(Notice::decode(&[bytes, behind].concat(), 9), Ok(Some((notice, len))));
        }

        #[test]
        fn heartbeats_survive_the_wire(
            sequence: u64, round: u32, again_millis: u64, count: u64, root: u32, kinds: [u8; 4],
            ranks in prop::collection::vec(0u32..9, 0..RANKS_MAX),
        ) {
            let [operation, dtype, reduction, algorithm] = kinds;
            let signature = Signature { operation, dtype, reduction, algorithm, root, count };
            let ranks = ranks.into_iter().map(Rank).collect();
            let notice = Notice::Heartbeat(Heartbeat { sequence, signature, round, again_millis, ranks });
            let bytes = notice.encode();
            let len = bytes.len();
            prop_assert_eq!(Notice::decode(&bytes, 9), Ok(Some((notice, len))));
        }

        #[test]
        fn arbitrary_bytes_are_notices_or_refused(bytes: Vec<u8>) {
            if let Ok(Some((_, len))) = Notice::decode(&bytes, 9) {
                prop_assert!(len <= bytes.len());
            }
        }
    }

    #[test]
    fn long_causes_are_cut_between_characters() {
        let cause = "é".repeat(BODY_BYTES_MAX);
        let notice = Notice::Departed(Departed { rank: Rank(0), how: Departure::Lost, cause }).encode();
        let Ok(Some((Notice::Departed(departed), len))) = Notice::decode(&notice, 1) else { panic!("no notice") };
        assert_eq!((departed.cause.len(), len), (BODY_BYTES_MAX, notice.len()));
        assert_eq!(Notice::decode(&Notice::Goodbye.encode(), 1), Ok(Some((Notice::Goodbye, HEADER_BYTES))));
        assert!(Notice::decode(&[9; 64], 1).is_err(), "an unknown kind");
    }

    #[test]
    fn heartbeats_of_unknown_ranks_and_of_odd_lengths_are_refused() {
        let heartbeat = |ranks: &[u32]| {
            let ranks = ranks.iter().copied().map(Rank).collect();
            let notice = Heartbeat { sequence: 1, signature: Signature::default(), round: 0, again_millis: 500, ranks };
            Notice::Heartbeat(notice).encode()
        };
        assert!(Notice::decode(&heartbeat(&[8]), 9).is_ok());
        assert!(Notice::decode(&heartbeat(&[9]), 9).is_err(), "there is no rank 9");
        let mut odd = heartbeat(&[8]);
        odd[13] -= 1;
        assert!(Notice::decode(&odd, 9).is_err(), "three quarters of a rank");
    }
}
