//! What travels on a connection that communicators share.
//!
//! ```text
//! lane (4)     the number of the lane on this connection
//! length (3)   of what follows
//! kind (1)     what that is
//! ```
//!
//! OPEN: the communicator (16), the rank that writes and the rank that reads (4 each), and the proof that the opener knows the
//! communicator's secret (32). CREDIT: how many bytes the reader has taken (4). All numbers are little endian.

use crate::error::LinkDown;
use crate::transport::auth::{Membership, PROOF_BYTES};
use crate::types::Rank;

/// What a piece is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The writer opens the lane.
    Open,
    /// Bytes of the lane.
    Data,
    /// The writer has ended: no more pieces have this number.
    End,
    /// The reader takes the lane.
    Accepted,
    /// The reader has taken bytes.
    Credit,
    /// Nobody reads the lane, or nobody does any more.
    Closed,
}

/// The header of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PieceHeader {
    pub(crate) lane: u32,
    pub(crate) kind: Kind,
    /// Of what follows.
    pub(crate) len: usize,
}

/// The size of a header.
pub(crate) const HEADER_BYTES: usize = 8;

/// The most bytes of a lane in one piece: others wait for their turn no longer than for that.
pub(crate) const PIECE_BYTES_MAX: usize = 256 << 10;

/// The size of what OPEN says.
pub(super) const OPEN_BYTES: usize = 16 + 4 + 4 + PROOF_BYTES;

const KINDS: [Kind; 6] = [Kind::Open, Kind::Data, Kind::End, Kind::Accepted, Kind::Credit, Kind::Closed];

impl PieceHeader {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let place = KINDS.iter().position(|kind| *kind == self.kind).expect("it is one of all kinds");
        let len = u32::try_from(self.len).expect("a piece is short").to_le_bytes();
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&self.lane.to_le_bytes());
        bytes[4..7].copy_from_slice(&len[..3]);
        bytes[7] = place as u8;
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<PieceHeader, LinkDown> {
        let lane = u32::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        let len = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], 0]) as usize;
        let kind = KINDS.get(usize::from(bytes[7])).copied();
        let is_right = match kind {
            Some(Kind::Open) => len == OPEN_BYTES,
            Some(Kind::Data) => (1..=PIECE_BYTES_MAX).contains(&len),
            Some(Kind::End | Kind::Accepted | Kind::Closed) => len == 0,
            Some(Kind::Credit) => len == 4,
            None => false,
        };
        match kind {
            Some(kind) if is_right => Ok(PieceHeader { lane, kind, len }),
            _ => Err(LinkDown::new(format!(
                "it sent a piece of {len} bytes and of kind {} on a shared connection: expected up to {PIECE_BYTES_MAX} \
                 bytes of a lane, or a message about one",
                bytes[7]
            ))),
        }
    }
}

/// What OPEN says.
pub(crate) fn encode_open(Membership { comm, from, to }: &Membership, proof: &[u8; PROOF_BYTES]) -> [u8; OPEN_BYTES] {
    let mut bytes = [0; OPEN_BYTES];
    bytes[..16].copy_from_slice(comm);
    bytes[16..20].copy_from_slice(&from.0.to_le_bytes());
    bytes[20..24].copy_from_slice(&to.0.to_le_bytes());
    bytes[24..].copy_from_slice(proof);
    bytes
}

pub(super) fn decode_open(bytes: &[u8; OPEN_BYTES]) -> (Membership, [u8; PROOF_BYTES]) {
    let rank = |at: usize| Rank(u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i])));
    let membership = Membership { comm: std::array::from_fn(|i| bytes[i]), from: rank(16), to: rank(20) };
    (membership, std::array::from_fn(|i| bytes[24 + i]))
}
