//! What the opener of a connection says of the stream that it belongs to, where streams may have several rails.
//!
//! A greeting also says that the connection is one which communicators share.
//!
//! It follows the proof of the secret, so that it comes from the rank that the connection was proved to be of. An acceptor with
//! `tcp_streams` above 1 or with `shared_streams` expects it, and its openers know that from its address.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use crate::config::TcpStreams;
use crate::error::LinkDown;
use crate::transport::auth::Secret;
use crate::transport::handshake::is_passing;
use crate::transport::tls::Stream;

/// Which rail a connection is, of which stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    /// Drawn by the opener for the stream.
    pub(super) token: [u8; 16],
    /// The number of the rail.
    pub(super) rail: usize,
    /// How many rails the stream is to have.
    pub(super) rails: usize,
    /// 0 for the connections that the stream begins with. For one that takes the place of a rail that was dropped, how many of
    /// those the opener has begun, this one included: of two for one rail, the one with the greater number is meant.
    pub(super) generation: u32,
}

impl Greeting {
    /// That of a connection which communicators share, where the acceptor says that it does so, too.
    pub(super) const TRUNK: Greeting = Greeting { token: [0; 16], rail: 0, rails: TRUNK_RAILS, generation: 0 };

    /// Whether it is that of a connection which communicators share.
    pub(super) fn is_trunk(&self) -> bool {
        self.rails == TRUNK_RAILS
    }

    pub(super) fn encode(&self) -> [u8; GREETING_BYTES] {
        let byte = |number: usize| u8::try_from(number).expect("there are few rails");
        let mut bytes = [0; GREETING_BYTES];
        bytes[..16].copy_from_slice(&self.token);
        bytes[16..18].copy_from_slice(&[byte(self.rail), byte(self.rails)]);
        bytes[18..].copy_from_slice(&self.generation.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; GREETING_BYTES]) -> Result<Greeting, LinkDown> {
        let (rail, rails) = (usize::from(bytes[16]), usize::from(bytes[17]));
        if (rail >= rails || rails > TcpStreams::MAX) && (rail, rails) != (0, TRUNK_RAILS) {
            return Err(LinkDown::new(format!(
                "it opened rail {rail} of {rails}: expected up to {} of them, counted from 0",
                TcpStreams::MAX
            )));
        }
        let generation = u32::from_le_bytes(std::array::from_fn(|i| bytes[18 + i]));
        Ok(Greeting { token: std::array::from_fn(|i| bytes[i]), rail, rails, generation })
    }
}

/// What the acceptor of a rail answers once it is part of its stream.
pub(super) const JOINED: [u8; 1] = [1];

/// As the number of rails: the connection is shared. No stream has so many.
const TRUNK_RAILS: usize = 255;

/// The size of a greeting.
pub(super) const GREETING_BYTES: usize = 22;

/// An accepted connection, with what has come of its greeting.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) stream: Stream,
    /// What only the two ends know, once both have proved themselves.
    pub(super) session: Option<Secret>,
    greeting: [u8; GREETING_BYTES],
    read: usize,
}

impl Caller {
    pub(super) fn new(stream: Stream) -> Caller {
        Caller { stream, session: None, greeting: [0; GREETING_BYTES], read: 0 }
    }

    /// The greeting, once it has come.
    pub(super) fn greeting(&mut self) -> Result<Option<Greeting>, LinkDown> {
        while self.read < GREETING_BYTES {
            match self.stream.read(&mut self.greeting[self.read..]) {
                Ok(0) => return Err(LinkDown::hung_up("the connection was closed before its greeting")),
                Ok(count) => self.read += count,
                Err(error) if is_passing(&error) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        Greeting::decode(&self.greeting).map(Some)
    }

    /// Tells the opener that the rail is part of its stream.
    pub(super) fn welcome(&mut self) -> Result<(), LinkDown> {
        // There is room for the first byte.
        self.stream.write_all(&JOINED).map_err(LinkDown::from)
    }
}

impl AsFd for Caller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_names_a_rail_that_there_is() {
        let greeting = Greeting { token: [7; 16], rail: 15, rails: 16, generation: 0x0102_0304 };
        assert_eq!(Greeting::decode(&greeting.encode()), Ok(greeting));
        assert!(
            Greeting::decode(&Greeting::TRUNK.encode()).is_ok_and(|trunk| trunk.is_trunk()) && !greeting.is_trunk()
        );
        for (rail, rails) in [(0, 0), (2, 2), (0, 17), (255, 3)] {
            let refused = Greeting::decode(&Greeting { rail, rails, ..greeting }.encode()).unwrap_err();
            assert!(refused.cause.contains(&format!("rail {rail} of {rails}: expected up to 16")), "{refused}");
        }
    }
}
