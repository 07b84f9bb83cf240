//! The wire protocol between a client and the server of a [`TcpStore`](super::TcpStore).
//!
//! A connection carries one request at a time, each answered by one reply. Numbers are little endian.
//!
//! ```text
//! request   "ncclxkv1"   kind u8   key length u32   value length u32   wait u64   key   value
//!           kinds: 1 ping, 2 set, 3 get; wait is how many milliseconds a get waits for its key to be set
//!                  4 greet, answered by a challenge; 5 prove, with the answer as value, answered by a proof
//!                  (the messages of `transport/auth.rs`; a store with a secret serves authenticated clients only)
//! reply     kind u8   length u32   bytes
//!           kinds: 1 done, 2 value, 3 absent, 4 refused (the bytes say why)
//!           absent may come before the wait is over, where many wait: the client asks again
//! ```

use std::time::Duration;

use crate::transport::auth::{ANSWER_BYTES, Identity, Secret};
use crate::types::Rank;

/// The longest key of a [`TcpStore`](super::TcpStore), in bytes.
pub const KEY_LIMIT: usize = 4 << 10;

/// The longest value of a [`TcpStore`](super::TcpStore), in bytes.
pub const VALUE_LIMIT: usize = 1 << 20;

pub(super) const HEADER_BYTES: usize = 25;
pub(super) const REPLY_HEADER_BYTES: usize = 5;

const MAGIC: &[u8; 8] = b"ncclxkv1";

const PING: u8 = 1;
const SET: u8 = 2;
const GET: u8 = 3;
const GREET: u8 = 4;
const PROVE: u8 = 5;

const DONE: u8 = 1;
const VALUE: u8 = 2;
const ABSENT: u8 = 3;
const REFUSED: u8 = 4;

/// A client's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request<'a> {
    /// Asks whether a store answers.
    Ping,
    /// Binds the key to the value.
    Set { key: &'a str, value: &'a [u8] },
    /// Asks for the key's value, and waits up to `wait` until it is set.
    Get { key: &'a str, wait: Duration },
    /// Begins the proof that the client knows the secret.
    Greet,
    /// Proves that the client knows the secret.
    Prove { answer: &'a [u8; ANSWER_BYTES] },
}

/// The fixed part of a request. Its lengths are within the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    kind: u8,
    key: usize,
    value: usize,
    wait: u64,
}

impl Header {
    pub(super) fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Header, String> {
        let fields = || {
            let (kind, rest) = bytes.strip_prefix(MAGIC)?.split_first()?;
            let (key, rest) = rest.split_first_chunk()?;
            let (value, wait) = rest.split_first_chunk()?;
            let length = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes) as usize;
            let wait = u64::from_le_bytes(wait.try_into().ok()?);
            Some(Header { kind: *kind, key: length(key), value: length(value), wait })
        };
        let header = fields().ok_or("it does not speak this protocol")?;
        within("key", header.key, KEY_LIMIT)?;
        within("value", header.value, VALUE_LIMIT)?;
        let fits = match header.kind {
            PING | GREET => header.key == 0 && header.value == 0,
            PROVE => header.key == 0 && header.value == ANSWER_BYTES,
            SET => true,
            GET => header.value == 0,
            _ => false,
        };
        if fits { Ok(header) } else { Err(format!("it asks for something unknown, of kind {}", header.kind)) }
    }

    /// Whether the request belongs to the proof of the secret.
    pub(super) fn is_proof(self) -> bool {
        matches!(self.kind, GREET | PROVE)
    }

    /// The number of bytes that follow.
    pub(super) fn body(self) -> usize {
        self.key + self.value
    }
}

impl<'a> Request<'a> {
    /// Parses the request that `header` announced from the bytes that follow it.
    pub(super) fn parse(header: Header, body: &'a [u8]) -> Result<Self, String> {
        let parts = body.split_at_checked(header.key).filter(|(_, value)| value.len() == header.value);
        let (key, value) = parts.ok_or("its request has another length than announced")?;
        let key = str::from_utf8(key).map_err(|error| format!("its key is not text: {error}"))?;
        Ok(match header.kind {
            PING => Request::Ping,
            GREET => Request::Greet,
            PROVE => Request::Prove { answer: value.try_into().map_err(|_| "its answer has another length")? },
            SET => Request::Set { key, value },
            _ => Request::Get { key, wait: Duration::from_millis(header.wait) },
        })
    }

    /// The request's bytes. The error says what is too long.
    pub(super) fn encode(&self) -> Result<Vec<u8>, String> {
        let (kind, key, value, wait) = match *self {
            Request::Ping => (PING, "", [].as_slice(), Duration::ZERO),
            Request::Set { key, value } => (SET, key, value, Duration::ZERO),
            Request::Get { key, wait } => (GET, key, [].as_slice(), wait),
            Request::Greet => (GREET, "", [].as_slice(), Duration::ZERO),
            Request::Prove { answer } => (PROVE, "", answer.as_slice(), Duration::ZERO),
        };
        let wait = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        let (key_length, value_length) =
            (within("key", key.len(), KEY_LIMIT)?, within("value", value.len(), VALUE_LIMIT)?);
        let lengths = [key_length.to_le_bytes(), value_length.to_le_bytes()].concat();
        Ok([MAGIC.as_slice(), &[kind], &lengths, &wait.to_le_bytes(), key.as_bytes(), value].concat())
    }
}

/// The server's reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// The request is done.
    Done,
    /// The key's value.
    Value(Vec<u8>),
    /// The key was not set in time.
    Absent,
    /// The server refuses the request, for this reason.
    Refused(String),
}

impl Reply {
    /// The reply's bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, bytes) = match self {
            Reply::Done => (DONE, [].as_slice()),
            Reply::Value(value) => (VALUE, value.as_slice()),
            Reply::Absent => (ABSENT, [].as_slice()),
            Reply::Refused(cause) => (REFUSED, cause.as_bytes()),
        };
        let length = u32::try_from(bytes.len()).expect("values and causes are short");
        [[kind].as_slice(), &length.to_le_bytes(), bytes].concat()
    }

    /// The number of bytes that follow a reply's fixed part.
    pub(super) fn length(header: &[u8; REPLY_HEADER_BYTES]) -> Result<usize, String> {
        let [_, length @ ..] = *header;
        let length = u32::from_le_bytes(length) as usize;
        within("reply", length, VALUE_LIMIT).map(|_| length)
    }

    /// Parses the reply whose fixed part is `header`.
    pub(super) fn parse(header: &[u8; REPLY_HEADER_BYTES], bytes: Vec<u8>) -> Result<Reply, String> {
        match header[0] {
            DONE => Ok(Reply::Done),
            VALUE => Ok(Reply::Value(bytes)),
            ABSENT => Ok(Reply::Absent),
            REFUSED => Ok(Reply::Refused(String::from_utf8_lossy(&bytes).into_owned())),
            kind => Err(format!("it answers something unknown, of kind {kind}")),
        }
    }
}

/// The identities of a store's proof, like those of a communicator's ranks: 0 is the server, 1 is any client.
pub(super) fn identity(me: Rank, secret: Secret) -> Identity {
    Identity { comm: *b"ncclx_rs   store", me, size: 2, secret }
}

fn within(what: &str, length: usize, limit: usize) -> Result<u32, String> {
    let fits = u32::try_from(length).ok().filter(|_| length <= limit);
    fits.ok_or_else(|| format!("a {what} of {length} bytes is longer than {limit}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(bytes: &[u8]) -> Result<(), String> {
        let Some((header, body)) = bytes.split_first_chunk() else { return Ok(()) };
        let header = Header::parse(header)?;
        assert!(header.body() <= KEY_LIMIT + VALUE_LIMIT);
        Request::parse(header, &body[..header.body().min(body.len())]).map(|_| ())
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200), known: bool) {
            let bytes = if known { [MAGIC.as_slice(), &bytes].concat() } else { bytes };
            let _ = read(&bytes);
            if let Some((header, rest)) = bytes.split_first_chunk()
                && let Ok(length) = Reply::length(header)
            {
                prop_assert!(length <= VALUE_LIMIT);
                let _ = Reply::parse(header, rest.to_vec());
            }
        }

        #[test]
        fn requests_come_back(key in ".{0,40}", value: Vec<u8>, wait: u32) {
            let wait = Duration::from_millis(wait.into());
            for request in [Request::Ping, Request::Set { key: &key, value: &value }, Request::Get { key: &key, wait }] {
                let bytes = request.encode().unwrap();
                let (header, body) = bytes.split_first_chunk().unwrap();
                let header = Header::parse(header).unwrap();
                prop_assert_eq!(header.body(), body.len());
                prop_assert_eq!(Request::parse(header, body).unwrap(), request);
                for other in [&body[..0], &body[..body.len() / 2], &[body, b"1"].concat()] {
                    prop_assert!(other == body || Request::parse(header, other).is_err());
                }
            }
        }

        #[test]
        fn replies_come_back(value: Vec<u8>, cause in ".{0,40}") {
            for reply in [Reply::Done, Reply::Value(value), Reply::Absent, Reply::Refused(cause)] {
                let bytes = reply.encode();
                let (header, rest) = bytes.split_first_chunk().unwrap();
                prop_assert_eq!(Reply::length(header), Ok(rest.len()));
                prop_assert_eq!(Reply::parse(header, rest.to_vec()), Ok(reply));
            }
        }
    }

    #[test]
    fn what_is_too_long_is_refused_before_it_is_read() {
        let long = "k".repeat(KEY_LIMIT + 1);
        assert!(Request::Set { key: &long, value: b"" }.encode().unwrap_err().contains("key of 4097 bytes"));
        let value = vec![0; VALUE_LIMIT + 1];
        assert!(Request::Set { key: "k", value: &value }.encode().unwrap_err().contains("value of"));
        let mut bytes = Request::Ping.encode().unwrap();
        bytes[9..13].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(read(&bytes).unwrap_err().contains("longer than"));
        assert!(Reply::length(&[VALUE, 255, 255, 255, 255]).is_err());
    }

    #[test]
    fn foreign_protocols_are_refused_by_their_first_bytes() {
        assert!(read(b"GET / HTTP/1.1\r\nHost: example.org\r\n").unwrap_err().contains("does not speak"));
    }
}
