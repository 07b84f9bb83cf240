//! Takes the bytes of a shared connection apart, wherever they are cut.

use crate::error::LinkDown;
use crate::transport::auth::{Membership, PROOF_BYTES};
use crate::transport::tcp::lanes::piece::{HEADER_BYTES, Kind, OPEN_BYTES, PieceHeader, decode_open};

/// What has come, and of which lane it is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// The lane is opened, for these, with this proof.
    Open(Membership, [u8; PROOF_BYTES]),
    /// Bytes of the lane: a piece, or a part of one.
    Data(&'a [u8]),
    /// The lane has ended.
    End,
    /// The lane is taken.
    Accepted,
    /// So many bytes were taken.
    Credit(u32),
    /// Nobody reads the lane.
    Closed,
}

/// The reader of one direction of a connection.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    /// What has come of a header, or of a message about a lane.
    kept: Vec<u8>,
    /// The piece that has begun, and how many bytes of it are missing.
    piece: Option<(PieceHeader, usize)>,
}

impl Reader {
    /// How many bytes come next that are a lane's.
    pub(crate) fn rest_of(&self, lane: u32) -> Option<usize> {
        self.piece.filter(|(header, _)| header.kind == Kind::Data && header.lane == lane).map(|(_, left)| left)
    }

    /// Notes that so many of these have gone to the lane's reader by themselves.
    pub(crate) fn passed(&mut self, count: usize) {
        if let Some((_, left)) = &mut self.piece {
            *left -= count;
            if *left == 0 {
                self.piece = None;
            }
        }
    }

    /// Takes bytes, and tells what they are. The error, also one of `take`: they are not what they must be, and nothing of the
    /// connection counts any more.
    pub(crate) fn feed(
        &mut self,
        mut bytes: &[u8],
        mut take: impl FnMut(u32, Part<'_>) -> Result<(), LinkDown>,
    ) -> Result<(), LinkDown> {
        loop {
            let Some((header, left)) = &mut self.piece else {
                if bytes.is_empty() {
                    return Ok(());
                }
                let Some(header) = keep::<HEADER_BYTES>(&mut self.kept, &mut bytes) else { return Ok(()) };
                let header = PieceHeader::decode(&header)?;
                self.piece = Some((header, header.len));
                continue;
            };
            let PieceHeader { lane, kind, .. } = *header;
            let part = match kind {
                Kind::Data => {
                    if bytes.is_empty() {
                        return Ok(());
                    }
                    let (data, behind) = bytes.split_at((*left).min(bytes.len()));
                    bytes = behind;
                    *left -= data.len();
                    if *left == 0 {
                        self.piece = None;
                    }
                    take(lane, Part::Data(data))?;
                    continue;
                }
                Kind::Open => {
                    let Some(open) = keep::<OPEN_BYTES>(&mut self.kept, &mut bytes) else { return Ok(()) };
                    let (membership, proof) = decode_open(&open);
                    Part::Open(membership, proof)
                }
                Kind::Credit => {
                    let Some(count) = keep::<4>(&mut self.kept, &mut bytes) else { return Ok(()) };
                    Part::Credit(u32::from_le_bytes(count))
                }
                Kind::End => Part::End,
                Kind::Accepted => Part::Accepted,
                Kind::Closed => Part::Closed,
            };
            self.piece = None;
            take(lane, part)?;
        }
    }
}

/// The next `N` bytes, once all have come.
fn keep<const N: usize>(kept: &mut Vec<u8>, bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (next, behind) = bytes.split_at((N - kept.len()).min(bytes.len()));
    *bytes = behind;
    if kept.is_empty() && next.len() == N {
        return next.try_into().ok();
    }
    kept.extend_from_slice(next);
    let whole = kept.as_slice().try_into().ok();
    if whole.is_some() {
        kept.clear();
    }
    whole
}
