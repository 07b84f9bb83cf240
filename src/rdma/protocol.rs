//! What travels on a connection: requests of the side that opened it, and the other side's answers, in the same order.
//!
//! A request is a header, for a `Write` with its bytes behind it, for others with what UCX packed for the peer's UCX. An answer to it is one frame or several: `Data` frames with
//! the bytes that were read, then `Done`, or `Failed` with the reason. All integers are little endian.

use crate::rdma::memory::{Key, Located, RemoteBuffer};

/// What a peer is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Ask {
    /// To write the bytes that follow.
    Write = 1,
    /// To write the bytes that lie at `source` of the asking process.
    WriteFrom = 2,
    /// For the bytes.
    Read = 3,
    /// Where the bytes lie in its memory, and what tells there whether they are still registered.
    Locate = 4,
    /// Whether the bytes are still registered, after a read through UCX, for which it need not keep them any more.
    Confirm = 5,
    /// To connect through UCX to the address that follows.
    Ucx = 6,
    /// To read the bytes at `source` of the asking process through UCX, by the key that follows, and to write them.
    Pull = 7,
    /// For UCX's key to the bytes, which it keeps until it is asked to confirm.
    Expose = 8,
}

impl Ask {
    const ALL: [Ask; 8] =
        [Ask::Write, Ask::WriteFrom, Ask::Read, Ask::Locate, Ask::Confirm, Ask::Ucx, Ask::Pull, Ask::Expose];
}

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) ask: Ask,
    /// The memory that is meant, at the side that is asked.
    pub(super) remote: RemoteBuffer,
    /// Where the bytes lie at the side that asks, for `WriteFrom` and `Pull`.
    pub(super) source: u64,
    /// How many bytes follow that UCX packed, for `Ucx` and `Pull`.
    pub(super) packed: usize,
}

/// The size of a request's header.
pub(super) const REQUEST_BYTES: usize = 48;

impl Request {
    /// One to connect through UCX, to an address of so many bytes.
    pub(super) fn to_connect(packed: usize) -> Request {
        let remote = RemoteBuffer { address: 0, len: 0, key: Key::from_bytes([0; 16]) };
        Request { ask: Ask::Ucx, remote, source: 0, packed }
    }

    pub(super) fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[0] = self.ask as u8;
        bytes[4..8].copy_from_slice(&(self.packed as u32).to_le_bytes());
        bytes[8..24].copy_from_slice(&self.remote.key.to_bytes());
        bytes[24..32].copy_from_slice(&self.remote.address.to_le_bytes());
        bytes[32..40].copy_from_slice(&(self.remote.len as u64).to_le_bytes());
        bytes[40..48].copy_from_slice(&self.source.to_le_bytes());
        bytes
    }

    /// The request, or why it is none of this version.
    pub(super) fn decode(bytes: &[u8; REQUEST_BYTES]) -> Result<Request, String> {
        let ask = Ask::ALL.into_iter().find(|ask| *ask as u8 == bytes[0]);
        let ask = ask.ok_or_else(|| format!("a request of unknown kind {}", bytes[0]))?;
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let packed = u32::from_le_bytes(std::array::from_fn(|i| bytes[4 + i])) as usize;
        let limit = if matches!(ask, Ask::Ucx | Ask::Pull) { PACKED_MAX } else { 0 };
        if packed > limit {
            return Err(format!("a {ask:?} request with {packed} bytes of UCX"));
        }
        let key = Key::from_bytes(std::array::from_fn(|i| bytes[8 + i]));
        let len = usize::try_from(number(32)).map_err(|_| format!("a request for {} bytes", number(32)))?;
        Ok(Request { ask, remote: RemoteBuffer { address: number(24), len, key }, source: number(40), packed })
    }
}

/// What an answer's frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Say {
    /// The next bytes of a read, which follow.
    Data = 1,
    /// The request is done.
    Done = 2,
    /// The request has failed; the reason follows.
    Failed = 3,
    /// The memory of the side that asked cannot be read from here.
    CannotRead = 4,
    /// What UCX packed for the side that asked follows.
    Packed = 5,
    /// Where bytes lie follows.
    Located = 6,
    /// The bytes lie on a device, which only UCX reaches.
    OnDevice = 7,
}

impl Say {
    const ALL: [Say; 7] =
        [Say::Data, Say::Done, Say::Failed, Say::CannotRead, Say::Packed, Say::Located, Say::OnDevice];
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) say: Say,
    /// How many bytes follow.
    pub(super) len: usize,
}

/// The size of a frame's header.
pub(super) const ANSWER_BYTES: usize = 8;

/// The size of a [`Located`].
pub(super) const LOCATED_BYTES: usize = 32;

impl Located {
    pub(super) fn encode(&self) -> [u8; LOCATED_BYTES] {
        let mut bytes = [0; LOCATED_BYTES];
        let numbers = [self.begin, self.len, self.stamp_at, self.stamp];
        bytes.chunks_exact_mut(8).zip(numbers).for_each(|(bytes, number)| bytes.copy_from_slice(&number.to_le_bytes()));
        bytes
    }

    pub(super) fn decode(bytes: &[u8; LOCATED_BYTES]) -> Located {
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[8 * at + i]));
        Located { begin: number(0), len: number(1), stamp_at: number(2), stamp: number(3) }
    }
}

/// The most bytes that follow a frame's header, and that are copied without another look at the key.
pub(super) const PIECE_BYTES: usize = 256 * 1024;

/// The longest reason.
pub(super) const REASON_MAX: usize = 512;

/// The longest that UCX packs: an address, or a key to 64 devices.
pub(super) const PACKED_MAX: usize = 32 * 1024;

/// How many reads through UCX a side has at once, from `Expose` to the answer to `Confirm`.
pub(super) const READS_MAX: usize = 64;

impl Answer {
    pub(super) fn encode(&self) -> [u8; ANSWER_BYTES] {
        let mut bytes = [0; ANSWER_BYTES];
        bytes[0] = self.say as u8;
        bytes[4..].copy_from_slice(&(self.len as u32).to_le_bytes());
        bytes
    }

    /// The frame, or why it is none of this version.
    pub(super) fn decode(bytes: &[u8; ANSWER_BYTES]) -> Result<Answer, String> {
        let say = Say::ALL.into_iter().find(|say| *say as u8 == bytes[0]);
        let say = say.ok_or_else(|| format!("an answer of unknown kind {}", bytes[0]))?;
        let len = u32::from_le_bytes(std::array::from_fn(|i| bytes[4 + i])) as usize;
        let limit = match say {
            Say::Data => PIECE_BYTES,
            Say::Failed => REASON_MAX,
            Say::Packed => PACKED_MAX,
            Say::Located => LOCATED_BYTES,
            Say::Done | Say::CannotRead | Say::OnDevice => 0,
        };
        if len > limit {
            return Err(format!("a {say:?} answer of {len} bytes"));
        }
        Ok(Answer { say, len })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_request_survives_the_wire(ask in 0..8usize, key: [u8; 16], address: u64, len: usize, source: u64) {
            let remote = RemoteBuffer { address, len, key: Key::from_bytes(key) };
            let packed = if matches!(Ask::ALL[ask], Ask::Ucx | Ask::Pull) { source as usize % PACKED_MAX } else { 0 };
            let request = Request { ask: Ask::ALL[ask], remote, source, packed };
            prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
        }

        #[test]
        fn where_bytes_lie_survives_the_wire(begin: u64, len: u64, stamp_at: u64, stamp: u64) {
            let located = Located { begin, len, stamp_at, stamp };
            prop_assert_eq!(Located::decode(&located.encode()), located);
        }

        #[test]
        fn an_answer_announces_no_more_than_its_limit(bytes: [u8; ANSWER_BYTES]) {
            if let Ok(answer) = Answer::decode(&bytes) {
                prop_assert!(answer.len <= PIECE_BYTES);
                prop_assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
            }
        }

        #[test]
        fn any_bytes_are_a_request_or_refused(mut bytes in prop::array::uniform32(any::<u8>()), small: bool, rest in prop::array::uniform16(any::<u8>())) {
            if small {
                bytes[0] %= 10;
                bytes[5..8].fill(0);
            }
            let mut whole = [0; REQUEST_BYTES];
            whole[..32].copy_from_slice(&bytes);
            whole[32..].copy_from_slice(&rest);
            let packed = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]) as usize;
            let limit = if matches!(bytes[0], 6 | 7) { PACKED_MAX } else { 0 };
            let is_request = (1..=8).contains(&bytes[0]) && packed <= limit;
            prop_assert_eq!(Request::decode(&whole).is_ok(), is_request);
        }
    }
}
