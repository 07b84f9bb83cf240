//! What stands before the bytes of a piece, and what acknowledges pieces.

use crate::error::LinkDown;

/// The header of a piece: 20 bytes, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PieceHeader {
    /// Where in the stream its first byte belongs.
    pub(super) offset: u64,
    /// How many bytes follow.
    pub(super) len: usize,
    /// Whether the receiver is to acknowledge it, and the pieces before it on this rail.
    pub(super) asks: bool,
    /// The rails that the sender neither has nor is about to open again, a bit for each.
    pub(super) given_up: u16,
    /// How often the sender had begun to open a rail again when it said so. What it had begun by then is meant, and no connection
    /// that comes later: on a slow rail, this may come after that.
    pub(super) generation: u32,
}

impl PieceHeader {
    pub(super) fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&self.offset.to_le_bytes());
        bytes[8..12].copy_from_slice(&u32::try_from(self.len).expect("a piece is short").to_le_bytes());
        bytes[12..14].copy_from_slice(&u16::from(self.asks).to_le_bytes());
        bytes[14..16].copy_from_slice(&self.given_up.to_le_bytes());
        bytes[16..].copy_from_slice(&self.generation.to_le_bytes());
        bytes
    }

    /// The header in `bytes`, whose piece must end before `limit`, of a stream with up to so many rails.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES], limit: u64, rails: usize) -> Result<PieceHeader, LinkDown> {
        let half = |at: usize| u16::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let offset = u64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        let len = u32::from_le_bytes(std::array::from_fn(|i| bytes[8 + i])) as usize;
        let (asks, given_up) = (half(12), half(14));
        let generation = u32::from_le_bytes(std::array::from_fn(|i| bytes[16 + i]));
        if len > PIECE_MAX || offset.checked_add(len as u64).is_none_or(|end| end > limit) {
            return Err(LinkDown::new(format!(
                "it sent a piece of {len} bytes at {offset}: expected up to {PIECE_MAX} that end at {limit} at most"
            )));
        }
        if asks > 1 || u32::from(given_up) >> rails != 0 {
            return Err(LinkDown::new(format!(
                "it sent a piece with the marks {asks} and {given_up:#x} over {rails} rails"
            )));
        }
        Ok(PieceHeader { offset, len, asks: asks == 1, given_up, generation })
    }
}

/// The size of a header.
pub(super) const HEADER_BYTES: usize = 20;

/// The size of an acknowledgement: the number of pieces that have been read on its rail.
pub(super) const ACK_BYTES: usize = 8;

/// The longest piece: half of what the engine writes at once, a fragment of 256 KiB with its header.
pub(super) const PIECE_MAX: usize = 128 * 1024 + 64;
