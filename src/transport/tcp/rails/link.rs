//! What the two ends of a stream over rails have in common.

use crate::error::LinkDown;

/// One rail: a connection that keeps order, loses nothing until it is down, and never blocks.
pub(crate) trait Link: Send {
    /// Writes some bytes, none if there is no room now.
    fn write(&mut self, bytes: &[u8]) -> Result<usize, LinkDown>;

    /// Reads some bytes, none if none have come. An error: none follow.
    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown>;

    /// Whether the link itself holds bytes to read that no poller tells of.
    fn has_more(&mut self) -> bool {
        false
    }

    /// Passes on what the link itself has taken and holds. True: nothing is left of that.
    fn flush(&mut self) -> Result<bool, LinkDown> {
        Ok(true)
    }
}

/// A rail that works no longer.
pub(crate) struct Lost<L> {
    pub(crate) number: usize,
    pub(crate) link: L,
    pub(crate) down: LinkDown,
}

/// The mark of a rail among all of a stream.
pub(super) fn mark(number: usize) -> u16 {
    1 << number
}

/// How far, for each rail, the sender may be ahead of the first byte that is not acknowledged. So much the sender keeps, and the
/// receiver may have to put in order. It is what Linux lets one connection have under way (tcp_wmem).
const WINDOW_PER_RAIL: u64 = 4 << 20;

/// The window of a stream over so many rails.
pub(super) fn window(rails: usize) -> u64 {
    rails as u64 * WINDOW_PER_RAIL
}
