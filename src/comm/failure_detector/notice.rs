//! The messages between ranks that monitor each other.

use crate::engine::failures::{Departed, Departure};
use crate::engine::heartbeat::{Heartbeat, IN_FLIGHT_BYTES_MAX, InFlight, RankState};
use crate::error::{LinkDown, beginning};
use crate::signature::Signature;
use crate::types::Rank;

/// A message of the failure detector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// The sender leaves. That is no loss.
    Goodbye,
    /// A rank is gone: the sender itself, or another.
    Departed(Departed),
    /// Ranks wait in a collective, or have not called it.
    Heartbeat(Heartbeat),
}

const GOODBYE: u8 = 1;
const LOST: u8 = 2;
const LEFT: u8 = 3;
const WAITING: u8 = 4;
const ABSENT: u8 = 5;
/// Of a collective on devices.
const WAITING_ON_DEVICE: u8 = 6;
const ABSENT_ON_DEVICE: u8 = 7;

/// Kind; a rank, or a heartbeat's round; a collective's number, or a number of collectives; the length of the body. All
/// numbers are little endian.
const HEADER_BYTES: usize = 1 + 4 + 8 + 2;

/// The longest body: the text of a cause, or a heartbeat's interval, the state of its ranks, and these.
const BODY_BYTES_MAX: usize = 1024;

const SIGNATURE_BYTES: usize = 4 + 4 + 8;

/// The longest notice.
pub(super) const NOTICE_BYTES_MAX: usize = HEADER_BYTES + BODY_BYTES_MAX;

/// An operation in flight: its age, the length of the text, and the text.
const IN_FLIGHT_BYTES: usize = size_of::<u64>() + size_of::<u16>() + IN_FLIGHT_BYTES_MAX;

/// How many ranks fit into one heartbeat.
pub(super) fn ranks_max(state: &RankState) -> usize {
    let state = match state {
        RankState::Waiting(_) => SIGNATURE_BYTES,
        RankState::Absent(_) => IN_FLIGHT_BYTES,
    };
    (BODY_BYTES_MAX - size_of::<u64>() - state) / size_of::<u32>()
}

impl Notice {
    /// The notice as bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let text = |cause: &str| beginning(cause, BODY_BYTES_MAX).as_bytes().to_vec();
        let (kind, number, count, body) = match self {
            Notice::Goodbye => (GOODBYE, 0, 0, Vec::new()),
            Notice::Departed(Departed { rank, how: Departure::Lost, cause }) => (LOST, rank.0, 0, text(cause)),
            Notice::Departed(Departed { rank, how: Departure::Left { called }, cause }) => {
                (LEFT, rank.0, *called, text(cause))
            }
            Notice::Heartbeat(heartbeat) => {
                let kind = match (&heartbeat.state, heartbeat.on_device) {
                    (RankState::Waiting(_), false) => WAITING,
                    (RankState::Absent(_), false) => ABSENT,
                    (RankState::Waiting(_), true) => WAITING_ON_DEVICE,
                    (RankState::Absent(_), true) => ABSENT_ON_DEVICE,
                };
                (kind, heartbeat.round, heartbeat.sequence, encode_body(heartbeat))
            }
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
        if !(GOODBYE..=ABSENT_ON_DEVICE).contains(&kind) {
            return Err(LinkDown::new(format!("it sent news of unknown kind {kind}")));
        }
        let names_a_rank = kind < WAITING;
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
                let heartbeat = decode_body(kind, body, number, count)
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
    matches!(bytes.first(), Some(WAITING..=ABSENT_ON_DEVICE))
}

/// A heartbeat's interval, the state of its ranks, and these.
fn encode_body(heartbeat: &Heartbeat) -> Vec<u8> {
    let mut body = heartbeat.again_millis.to_le_bytes().to_vec();
    match &heartbeat.state {
        RankState::Waiting(Signature { operation, dtype, reduction, algorithm, root, count }) => {
            body.extend_from_slice(&[*operation, *dtype, *reduction, *algorithm]);
            body.extend_from_slice(&root.to_le_bytes());
            body.extend_from_slice(&count.to_le_bytes());
        }
        RankState::Absent(InFlight { what, millis }) => {
            let what = beginning(what, IN_FLIGHT_BYTES_MAX);
            body.extend_from_slice(&millis.to_le_bytes());
            body.extend_from_slice(&(what.len() as u16).to_le_bytes());
            body.extend_from_slice(what.as_bytes());
        }
    }
    let ranks = heartbeat.ranks.iter().take(ranks_max(&heartbeat.state));
    body.extend(ranks.flat_map(|rank| rank.0.to_le_bytes()));
    body
}

/// The heartbeat with this body; nothing if it is malformed.
fn decode_body(kind: u8, body: &[u8], round: u32, sequence: u64) -> Option<Heartbeat> {
    let (again, body) = body.split_first_chunk()?;
    let (state, ranks) = match kind {
        WAITING | WAITING_ON_DEVICE => decode_waiting(body)?,
        _ => decode_absent(body)?,
    };
    let (ranks, rest) = ranks.as_chunks();
    rest.is_empty().then(|| Heartbeat {
        on_device: kind >= WAITING_ON_DEVICE,
        sequence,
        state,
        round,
        again_millis: u64::from_le_bytes(*again),
        ranks: ranks.iter().map(|rank| Rank(u32::from_le_bytes(*rank))).collect(),
    })
}

/// What ranks called, and the bytes behind it.
fn decode_waiting(body: &[u8]) -> Option<(RankState, &[u8])> {
    let ([operation, dtype, reduction, algorithm], body) = body.split_first_chunk()?;
    let (root, body) = body.split_first_chunk()?;
    let (count, rest) = body.split_first_chunk()?;
    let signature = Signature {
        operation: *operation,
        dtype: *dtype,
        reduction: *reduction,
        algorithm: *algorithm,
        root: u32::from_le_bytes(*root),
        count: u64::from_le_bytes(*count),
    };
    Some((RankState::Waiting(signature), rest))
}

/// What ranks do that have not called it, and the bytes behind that.
fn decode_absent(body: &[u8]) -> Option<(RankState, &[u8])> {
    let (millis, body) = body.split_first_chunk()?;
    let (len, body) = body.split_first_chunk()?;
    let (what, rest) = body.split_at_checked(usize::from(u16::from_le_bytes(*len)))?;
    let what = std::str::from_utf8(what).ok().filter(|what| what.len() <= IN_FLIGHT_BYTES_MAX)?.into();
    Some((RankState::Absent(InFlight { what, millis: u64::from_le_bytes(*millis) }), rest))
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
            on_device: bool, sequence: u64, round: u32, again_millis: u64, count: u64, root: u32, kinds: [u8; 4],
            ranks in prop::collection::vec(0u32..9, 0..250), in_flight in prop::option::of((".{0,60}", 0u64..9)),
        ) {
            let [operation, dtype, reduction, algorithm] = kinds;
            let signature = Signature { operation, dtype, reduction, algorithm, root, count };
            let absent = in_flight.map(|(what, millis)| RankState::Absent(InFlight { what: what.into(), millis }));
            let state = absent.unwrap_or(RankState::Waiting(signature));
            let ranks = ranks.into_iter().map(Rank).take(ranks_max(&state)).collect();
            let notice = Notice::Heartbeat(Heartbeat { on_device, sequence, state, round, again_millis, ranks });
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
            let state = RankState::Waiting(Signature::default());
            Notice::Heartbeat(Heartbeat { on_device: false, sequence: 1, state, round: 0, again_millis: 500, ranks })
                .encode()
        };
        assert!(Notice::decode(&heartbeat(&[8]), 9).is_ok());
        assert!(Notice::decode(&heartbeat(&[9]), 9).is_err(), "there is no rank 9");
        let mut odd = heartbeat(&[8]);
        odd[13] -= 1;
        assert!(Notice::decode(&odd, 9).is_err(), "three quarters of a rank");
    }

    #[test]
    fn operations_in_flight_are_cut_to_what_fits_and_malformed_ones_are_refused() {
        let absent = |what: &str| {
            let state = RankState::Absent(InFlight { what: what.into(), millis: 7 });
            let ranks = vec![Rank(3); ranks_max(&state)];
            Notice::Heartbeat(Heartbeat { on_device: false, sequence: 1, state, round: 0, again_millis: 500, ranks })
        };
        let bytes = absent(&"é".repeat(BODY_BYTES_MAX)).encode();
        let whole = absent(&"é".repeat(IN_FLIGHT_BYTES_MAX / 2));
        assert_eq!(Notice::decode(&bytes, 9), Ok(Some((whole, bytes.len()))));
        let state = RankState::Waiting(Signature::default());
        let ranks = vec![Rank(3); ranks_max(&state)];
        let waiting =
            Notice::Heartbeat(Heartbeat { on_device: false, sequence: 1, state, round: 0, again_millis: 500, ranks });
        assert_eq!(Notice::decode(&waiting.encode(), 9), Ok(Some((waiting.clone(), waiting.encode().len()))));
        assert!(bytes.len() <= NOTICE_BYTES_MAX && waiting.encode().len() <= NOTICE_BYTES_MAX);
        let short = absent("all_reduce").encode();
        let text = HEADER_BYTES + 2 * size_of::<u64>();
        // The second length has 64 ranks be part of the text, which is too long.
        for (byte, value) in [(text, 255), (text + 1, 1), (text + 2, 0xff)] {
            let mut forged = short.clone();
            forged[byte] = value;
            assert!(Notice::decode(&forged, 9).is_err(), "byte {byte} is {value}");
        }
    }
}
