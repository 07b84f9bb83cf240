//! Shortages of this process's resources, which are no failure of a peer.

use std::io;

use crate::error::LinkDown;
use crate::sys::limits;

/// The error of opening a stream. If this process lacks a resource, the stream may be opened later.
pub(crate) fn while_opening(error: io::Error, size: usize) -> LinkDown {
    if limits::is_shortage(&error) { LinkDown::lacking(describe(&error, size)) } else { error.into() }
}

/// Describes the shortage, and how many descriptors a communicator of `size` ranks takes.
pub(crate) fn describe(error: &io::Error, size: usize) -> String {
    if !limits::lacks_descriptors(error) {
        return format!("this process lacks resources: {error}");
    }
    let limit = limits::descriptors().map_or("none".to_owned(), |limit| limit.to_string());
    format!(
        "this process has no file descriptor left ({error}); a communicator of {size} ranks takes up to {} of them, and \
         the process's limit for everything is {limit} (ulimit -n)",
        descriptors(size)
    )
}

/// How many file descriptors a communicator of `size` ranks takes at most.
pub fn descriptors(size: usize) -> usize {
    OWN_DESCRIPTORS + size.saturating_sub(1) * PEER_DESCRIPTORS
}

/// For each peer: a stream in each direction, each a socket.
const PEER_DESCRIPTORS: usize = 2;

/// For the pollers, the listeners, the bootstrap, and the few neighbours of the failure detector.
const OWN_DESCRIPTORS: usize = 48;
