//! The bytes of one stream over several connections, its rails: cut into pieces at one end, put in order at the other.
//!
//! Nothing here knows sockets, threads or time. A rail is a [`Link`], which a test may imitate. Each piece says where in the
//! stream its bytes belong. A rail that has room takes the next piece, so that a faster one carries more. The receiver
//! acknowledges, on each rail, how many pieces it has read there, when it is asked to. The sender keeps a copy of a piece until
//! then, so that what a rail had not delivered when it broke is sent again on the others. The receiver drops what it has.

mod piece;
mod receiver;
mod sender;

use crate::error::LinkDown;

pub(super) use receiver::Receiver;
pub(super) use sender::{Lost, Sender};

/// One rail: a connection that keeps order, loses nothing until it is down, and never blocks.
pub(super) trait Link: Send {
    /// Writes some bytes, none if there is no room now.
    fn write(&mut self, bytes: &[u8]) -> Result<usize, LinkDown>;

    /// Reads some bytes, none if none have come. An error: none follow.
    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown>;

    /// Passes on what the link itself has taken and holds. True: nothing is left of that.
    fn flush(&mut self) -> Result<bool, LinkDown> {
        Ok(true)
    }
}

/// How far, for each rail, the sender may be ahead of the first byte that is not acknowledged. So much the sender keeps, and the
/// receiver may have to put in order. It is what Linux lets one connection have under way (tcp_wmem).
const WINDOW_PER_RAIL: u64 = 4 << 20;

/// The window of a stream over so many rails.
fn window(rails: usize) -> u64 {
    rails as u64 * WINDOW_PER_RAIL
}

#[cfg(test)]
mod tests;
