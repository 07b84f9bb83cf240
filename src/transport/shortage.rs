//! Shortages of this process's resources, which are no failure of a peer.

use std::io;

use crate::error::LinkDown;
use crate::sys::limits;

/// The error of opening a stream, of which those to a peer have so many connections. If this process lacks a resource, the stream
/// may be opened later.
pub(crate) fn while_opening(error: io::Error, size: usize, streams: usize) -> LinkDown {
    if limits::is_shortage(&error) { LinkDown::lacking(describe(&error, size, streams)) } else { error.into() }
}

/// Describes the shortage, and how many descriptors a communicator of `size` ranks takes.
pub(crate) fn describe(error: &io::Error, size: usize, streams: usize) -> String {
    if !limits::lacks_descriptors(error) {
        return format!("this process lacks resources: {error}");
    }
    let limit = limits::descriptors().map_or("none".to_owned(), |limit| limit.to_string());
    format!(
        "this process has no file descriptor left ({error}); a communicator of {size} ranks takes up to {} of them, and \
         the process's limit for everything is {limit} (ulimit -n)",
        descriptors(size, streams)
    )
}

/// How many file descriptors a communicator of `size` ranks takes at most, whose streams have so many connections each
/// (`tcp_streams`).
pub fn descriptors(size: usize, streams: usize) -> usize {
    OWN_DESCRIPTORS + size.saturating_sub(1) * streams * PEER_DESCRIPTORS
}

/// For each peer: a stream in each direction, of sockets. Those of shared memory mostly take none, but there is no telling before.
const PEER_DESCRIPTORS: usize = 2;

/// For the pollers, the listeners, the bootstrap, and the few neighbours of the failure detector.
const OWN_DESCRIPTORS: usize = 48;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_connection_of_a_stream_takes_a_descriptor() {
        assert_eq!(descriptors(1, 4), OWN_DESCRIPTORS);
        assert_eq!(descriptors(101, 1), OWN_DESCRIPTORS + 200);
        assert_eq!(descriptors(101, 4), OWN_DESCRIPTORS + 800);
    }
}
