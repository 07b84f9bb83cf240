//! The messages that two hubs exchange, each in one active message: a header, and in a piece a stream's bytes behind it.

use crate::types::Rank;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The next bytes of a stream. Its number counts the pieces before it.
    Piece,
    /// From who has opened a stream: asks for the first credit, which shows that both ways work.
    Probe,
    /// From who reads a stream. Its number is the cost of what was read; the first, with 0, answers the probe.
    Credit,
}

/// What every message begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) from: Rank,
    /// Names the stream, and nobody can guess it: UCX takes messages of whoever reaches its port.
    pub(super) session: u64,
    pub(super) number: u64,
}

impl Header {
    pub(super) const BYTES: usize = 24;

    pub(super) fn encode(&self) -> [u8; Header::BYTES] {
        let kind = match self.kind {
            Kind::Piece => 1u32,
            Kind::Probe => 2,
            Kind::Credit => 3,
        };
        let mut bytes = [0; Header::BYTES];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.from.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.session.to_le_bytes());
        bytes[16..].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    /// That of a message; none if it is none of ours.
    pub(super) fn decode(message: &[u8]) -> Option<Header> {
        let (kind, rest) = message.split_first_chunk()?;
        let (from, rest) = rest.split_first_chunk()?;
        let (session, rest) = rest.split_first_chunk()?;
        let (number, payload) = rest.split_first_chunk()?;
        let kind = match u32::from_le_bytes(*kind) {
            1 if !payload.is_empty() => Kind::Piece,
            2 => Kind::Probe,
            3 => Kind::Credit,
            _ => return None,
        };
        let from = Rank(u32::from_le_bytes(*from));
        Some(Header { kind, from, session: u64::from_le_bytes(*session), number: u64::from_le_bytes(*number) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_as_it_was_written() {
        for kind in [Kind::Piece, Kind::Probe, Kind::Credit] {
            let header = Header { kind, from: Rank(70_000), session: u64::MAX - 3, number: 1 << 40 };
            let mut message = header.encode().to_vec();
            assert_eq!(Header::decode(&message), (kind != Kind::Piece).then_some(header), "a piece has bytes");
            message.push(7);
            assert_eq!(Header::decode(&message), Some(header));
            assert!((0..Header::BYTES).all(|len| Header::decode(&message[..len]).is_none()), "it is cut off");
        }
        assert_eq!(Header::decode(&[9; 100]), None);
    }
}
