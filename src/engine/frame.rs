//! What travels on a stream: a header, then the payload that it announces.
//!
//! A short message is one `Eager` frame. Of a long one, the sender sends an `Rts` frame. The message travels in `Data`
//! frames once its receiver has answered with `Rtr`, so no stream is blocked by data that no rank wants yet. If the `Rts`
//! frame says where the message lies, the receiver may read it there, and answers with `Ats`. Who knows from the schedule of a
//! collective what will come asks for it by `Ready`, and saves the way there and back.
//! All integers are little endian.

use std::ops::Deref;

use crate::config::EagerBytes;
use crate::error::LinkDown;
use crate::signature::Signature;
use crate::sys::segment::SegmentId;
use crate::transport::MemoryAddress;
use crate::types::Rank;

/// The size of the longest header.
pub(crate) const HEADER_MAX: usize = 64;

/// The size of the header of a frame that has neither a token nor an address. In shared memory, it and a short payload
/// lie in one cache line.
const HEADER_MIN: usize = 40;

/// The longest text of a `Fail` frame.
pub(crate) const FAIL_TEXT_MAX: usize = 4096;

/// The most payload of one `Data` or `Put` frame: what other messages to the same peer wait for at most.
pub(crate) const FRAGMENT_BYTES: usize = 256 * 1024;

/// Why an operation is cut off whose window is gone.
pub(crate) const DEREGISTERED: &str = "the window was deregistered in the meantime";

/// Why the bytes of a message do not come, or do not come on, whose receiver waits for them.
pub(crate) const GIVEN_UP: &str = "it gave the message up";

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum FrameKind {
    /// A whole message.
    Eager = 1,
    /// Ready to send: a message of `len` bytes waits at the sender under `token`, in its memory at `address` if there is one.
    Rts = 2,
    /// Ready to receive: the receiver has a buffer for the message `token` of the frame's addressee, from byte `len` on; `index` is a
    /// [`RtrReason`].
    Rtr = 3,
    /// The next bytes of the message `token` of the frame's sender.
    Data = 4,
    /// The sender gave an operation up: a collective by `key`, a message by `token`. The payload says why; `index` is a
    /// [`Reason`], a message's [`End`], or the kind of a device's failure. A collective's `token` is one more than the rank that
    /// is the reason, or zero.
    Fail = 5,
    /// The message `token` of the frame's sender is no longer at the address that its `Rts` named.
    Invalidated = 6,
    /// The receiver has taken `len` bytes of eager point-to-point messages out of its buffer; of messages between devices, so many
    /// pieces on lane `index`, and its sender has called `key`; of accesses to windows of devices, its sender is done with `key`.
    Credit = 7,
    /// The next bytes of the window `key`, from byte `token` on.
    Put = 8,
    /// The sender wants `len` bytes of the window `key`, from byte `signature.count` on, as `Data` under `token`.
    Get = 9,
    /// What the sender has put into the window `key` is there.
    Signal = 10,
    /// Acknowledge to send: the receiver has read the message `token` out of the memory of the frame's addressee.
    Ats = 11,
    /// The next elements to add to the window `key`, from byte `token` on, of the type `signature.dtype`.
    Accumulate = 12,
    /// The sender wants to know when what it has put into the window `key` is there. `token` is its name for the question.
    Flush = 13,
    /// The answer to `token` of the frame's addressee: all is there, or there is no window `key` if `index` is not zero.
    Flushed = 14,
    /// The receiver has a buffer for the collective's message `key`, `index` of `len` bytes, of which it has had no `Rts`.
    Ready = 15,
}

impl FrameKind {
    /// Whether its header has a token and an address.
    fn has_token(self) -> bool {
        !matches!(self, FrameKind::Eager | FrameKind::Credit | FrameKind::Ready)
    }

    /// The size of its header.
    fn header_bytes(self) -> usize {
        if self.has_token() { HEADER_MAX } else { HEADER_MIN }
    }

    const ALL: [FrameKind; 15] = [
        FrameKind::Eager,
        FrameKind::Rts,
        FrameKind::Rtr,
        FrameKind::Data,
        FrameKind::Fail,
        FrameKind::Invalidated,
        FrameKind::Credit,
        FrameKind::Put,
        FrameKind::Get,
        FrameKind::Signal,
        FrameKind::Ats,
        FrameKind::Accumulate,
        FrameKind::Flush,
        FrameKind::Flushed,
        FrameKind::Ready,
    ];
}

/// Why a message is asked for, although its `Rts` may have said where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum RtrReason {
    /// It could not be read, or that is the faster way.
    Chosen = 0,
    /// The receiver cannot read its sender's memory at all.
    CannotRead = 1,
}

/// Why an operation failed on the rank that tells of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Reason {
    /// A reason of that rank, such as its time limit.
    Own = 0,
    /// A rank is lost: also ranks that came through this operation cannot finish another.
    Loss = 1,
    /// The ranks disagree about it.
    Mismatch = 2,
    /// The collective before, which had ended on that rank: others failed, or disagreed about it.
    Earlier = 3,
}

/// The two ranks of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum End {
    /// The one that has the bytes.
    Sender = 0,
    /// The one that wants them.
    Receiver = 1,
}

/// Collectives and point-to-point messages never match each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum MatchSpace {
    /// `key` is the sequence number, `index` counts the collective's messages from one rank to another.
    Collective = 0,
    /// `key` is the tag, or the window.
    PointToPoint = 1,
    /// As `Collective`, of what a device does.
    Device = 2,
    /// As `PointToPoint`, of devices: `key` counts the pieces of messages.
    DeviceMessage = 3,
    /// Accesses to windows of devices: `key` counts them, or the pieces that they have asked for; `index` is the window's slot.
    DeviceAccess = 4,
}

/// What an RTS says of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RtsInfo {
    pub(crate) token: u64,
    pub(crate) len: u64,
    /// Where it lies in the sender's memory, if it may be read there.
    pub(crate) address: Option<MemoryAddress>,
    /// Whether the sender moves other data meanwhile.
    pub(crate) is_busy: bool,
}

/// An operation as two ranks know it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Failed {
    /// A collective by its sequence number, perhaps because a rank is lost.
    Collective { sequence: u64, reason: Reason, lost: Option<Rank> },
    /// By its sender's token, or the receiver's if that gets it from a window; and the end that has given it up.
    Message { token: u64, by: End },
    /// A collective on a device and all later ones, why, and the rank at fault.
    Device { sequence: u64, kind: u32, culprit: Rank },
    /// A message between two devices and all later ones of its lane, likewise.
    DeviceMessage { lane: usize, sequence: u64, kind: u32, culprit: Rank },
    /// Accesses to windows of devices: all, or those that wait for the rank.
    DeviceAccess { number: u64, kind: u32, culprit: Rank },
}

impl Failed {
    /// The header of the frame that tells of it, in a text of so many bytes.
    pub(crate) fn header(self, len: usize) -> Header {
        let (match_space, key, token, index) = match self {
            Failed::Collective { sequence, reason, lost } => {
                (MatchSpace::Collective, sequence, lost.map_or(0, |rank| u64::from(rank.0) + 1), reason as u32)
            }
            Failed::Message { token, by } => (MatchSpace::PointToPoint, 0, token, by as u32),
            Failed::Device { sequence, kind, culprit } => {
                (MatchSpace::Device, sequence, u64::from(culprit.0) + 1, kind)
            }
            Failed::DeviceMessage { sequence, kind, culprit, .. } => {
                (MatchSpace::DeviceMessage, sequence, u64::from(culprit.0) + 1, kind)
            }
            Failed::DeviceAccess { number, kind, culprit } => {
                (MatchSpace::DeviceAccess, number, u64::from(culprit.0) + 1, kind)
            }
        };
        let root = match self {
            Failed::DeviceMessage { lane, .. } => lane as u32,
            _ => 0,
        };
        let signature = Signature { root, ..Signature::default() };
        Header { index, signature, ..Header::control(FrameKind::Fail, match_space, key, token, len as u64) }
    }
}

impl Header {
    /// The rank at fault that a frame of [`Failed`] names, in a world of so many ranks, unless it is of a message.
    pub(crate) fn culprit(&self, size: usize) -> Option<Rank> {
        let rank = self.token.checked_sub(1).and_then(|rank| u32::try_from(rank).ok()).map(Rank);
        rank.filter(|rank| rank.index() < size)
    }
}

/// A header as bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Encoded {
    bytes: [u8; HEADER_MAX],
    len: usize,
}

impl Deref for Encoded {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: FrameKind,
    pub(crate) match_space: MatchSpace,
    pub(crate) signature: Signature,
    /// The collective's sequence number or the message's tag.
    pub(crate) key: u64,
    /// Which of the collective's messages between the two ranks.
    pub(crate) index: u32,
    /// The sender's name for a long message, or a place in a window.
    pub(crate) token: u64,
    /// The message's length in bytes; for `Data`, `Put` and `Accumulate`, the frame's.
    pub(crate) len: u64,
    /// Where the message of an `Rts` frame lies in its sender's memory, if the receiver may read it there.
    pub(crate) address: Option<MemoryAddress>,
    /// Whether the sender of an `Rts` frame moves other data for the same operation.
    pub(crate) is_busy: bool,
}

impl Header {
    /// The header of a frame that carries no message.
    pub(crate) fn control(kind: FrameKind, match_space: MatchSpace, key: u64, token: u64, len: u64) -> Header {
        Header {
            kind,
            match_space,
            signature: Signature::default(),
            key,
            index: 0,
            token,
            len,
            address: None,
            is_busy: false,
        }
    }

    /// The header as bytes.
    #[inline]
    pub(crate) fn encode(&self) -> Encoded {
        let mut bytes = [0; HEADER_MAX];
        bytes[0] = self.kind as u8;
        bytes[1] = self.match_space as u8;
        bytes[2] = self.signature.operation;
        bytes[3] = self.signature.dtype;
        bytes[4] = self.signature.reduction;
        bytes[5] = u8::from(self.is_busy);
        bytes[6] = self.signature.algorithm;
        bytes[8..12].copy_from_slice(&self.signature.root.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.index.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.signature.count.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.key.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.len.to_le_bytes());
        if self.kind.has_token() {
            bytes[40..48].copy_from_slice(&self.token.to_le_bytes());
            if let Some(address) = self.address {
                bytes[48..56].copy_from_slice(&address.address.to_le_bytes());
                bytes[56..64].copy_from_slice(&address.segment.map_or(0, SegmentId::to_bits).to_le_bytes());
            }
        }
        Encoded { bytes, len: self.size() }
    }

    /// Reads a header, and refuses what no peer of this version sends. Nothing while it is not complete.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Option<Header>, LinkDown> {
        if bytes.len() < HEADER_MIN {
            return Ok(None);
        }
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let kind = FrameKind::ALL.into_iter().find(|kind| *kind as u8 == bytes[0]);
        let match_space = match bytes[1] {
            0 => Some(MatchSpace::Collective),
            1 => Some(MatchSpace::PointToPoint),
            2 => Some(MatchSpace::Device),
            3 => Some(MatchSpace::DeviceMessage),
            4 => Some(MatchSpace::DeviceAccess),
            _ => None,
        };
        let (Some(kind), Some(match_space)) = (kind, match_space) else {
            return Err(LinkDown::new(format!("the peer sent a frame of unknown kind {}/{}", bytes[0], bytes[1])));
        };
        if bytes.len() < kind.header_bytes() {
            return Ok(None);
        }
        let header = Header {
            kind,
            match_space,
            signature: Signature {
                operation: bytes[2],
                dtype: bytes[3],
                reduction: bytes[4],
                algorithm: bytes[6],
                root: u32_at(8),
                count: u64_at(16),
            },
            key: u64_at(24),
            index: u32_at(12),
            token: if kind.has_token() { u64_at(40) } else { 0 },
            len: u64_at(32),
            address: match kind.has_token().then(|| (u64_at(48), SegmentId::from_bits(u64_at(56)))) {
                None | Some((0, None)) => None,
                Some((address, segment)) => Some(MemoryAddress { address, segment }),
            },
            is_busy: bytes[5] != 0,
        };
        let limit = match kind {
            FrameKind::Fail => FAIL_TEXT_MAX as u64,
            FrameKind::Data | FrameKind::Put | FrameKind::Accumulate => FRAGMENT_BYTES as u64,
            FrameKind::Eager => EagerBytes::MAX as u64,
            _ => u64::MAX,
        };
        if header.len > limit {
            return Err(LinkDown::new(format!("the peer sent a {kind:?} frame of {} bytes", header.len)));
        }
        Ok(Some(header))
    }

    /// The size of the header itself.
    pub(crate) fn size(&self) -> usize {
        self.kind.header_bytes()
    }

    /// One more than the last collective that the sender of this has called, as far as it tells.
    pub(crate) fn called(&self) -> u64 {
        let tells = matches!(self.kind, FrameKind::Eager | FrameKind::Rts | FrameKind::Ready);
        if tells && self.match_space == MatchSpace::Collective { self.key.saturating_add(1) } else { 0 }
    }

    /// What an `Rts` frame says of its message.
    pub(crate) fn rts(&self) -> RtsInfo {
        RtsInfo { token: self.token, len: self.len, address: self.address, is_busy: self.is_busy }
    }

    /// How many payload bytes follow the header.
    pub(crate) fn payload(&self) -> usize {
        match self.kind {
            FrameKind::Eager | FrameKind::Data | FrameKind::Put | FrameKind::Accumulate | FrameKind::Fail => {
                self.len as usize
            }
            FrameKind::Rts
            | FrameKind::Rtr
            | FrameKind::Credit
            | FrameKind::Get
            | FrameKind::Signal
            | FrameKind::Flush
            | FrameKind::Flushed
            | FrameKind::Ats
            | FrameKind::Invalidated
            | FrameKind::Ready => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_header_survives_the_wire(
            kind in 0..FrameKind::ALL.len(), space in 0..5usize, operation: u8, dtype: u8, reduction: u8, algorithm: u8, root: u32,
            count: u64, key: u64, index: u32, token: u64, len in 0u64..4096, address: u64, segment: u64, is_busy: bool,
        ) {
            let segment = SegmentId::from_bits(segment);
            let address = (address != 0 || segment.is_some()).then_some(MemoryAddress { address, segment });
            let signature = Signature { operation, dtype, reduction, algorithm, root, count };
            let match_space = [
                MatchSpace::Collective, MatchSpace::PointToPoint, MatchSpace::Device, MatchSpace::DeviceMessage,
                MatchSpace::DeviceAccess,
            ][space];
            let kind = FrameKind::ALL[kind];
            let (token, address) = if kind.has_token() { (token, address) } else { (0, None) };
            let header = Header { kind, match_space, signature, key, index, token, len, address, is_busy };
            let bytes = header.encode();
            prop_assert_eq!(Header::decode(&bytes), Ok(Some(header)));
            prop_assert_eq!(Header::decode(&bytes[..header.size() - 1]), Ok(None));
            let _ = (signature.to_string(), signature.algorithm());
        }

        #[test]
        fn arbitrary_bytes_never_announce_more_than_the_limit(bytes in prop::array::uniform32(any::<u8>())) {
            let header = [bytes, bytes].concat();
            if let Ok(Some(header)) = Header::decode(&header) {
                prop_assert!(header.payload() <= EagerBytes::MAX);
            }
        }
    }
}
