//! Shortages of this process's resources, which are no failure of a peer.

use std::io;

use crate::config::Switch;
use crate::error::LinkDown;
use crate::sync::{AtomicUsize, Ordering};
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
    OWN_DESCRIPTORS + of_peers(size.saturating_sub(1), streams)
}

fn of_peers(peers: usize, streams: usize) -> usize {
    peers * streams * PEER_DESCRIPTORS
}

/// What the streams of this process's communicators take if each talks to all of its peers, over connections of its own.
static CLAIMED: AtomicUsize = AtomicUsize::new(0);

/// One communicator's part of the descriptors that all of this process may come to have for their streams, until it is dropped.
pub(crate) struct Claim(usize);

impl Claim {
    /// That of a communicator with so many peers, whose streams have so many connections each.
    pub(crate) fn new(peers: usize, streams: usize) -> Claim {
        let part = of_peers(peers, streams);
        // Relaxed, here and below: the number stands alone.
        CLAIMED.fetch_add(part, Ordering::Relaxed);
        Claim(part)
    }

    /// Whether the communicator shares connections with others of this process: by the setting, or by itself before descriptors
    /// run out, which it logs.
    pub(crate) fn shares(&self, setting: Switch, name: &str) -> bool {
        let runs_short = || self.0 > 0 && is_much(CLAIMED.load(Ordering::Relaxed), limits::descriptors());
        if setting != Switch::Auto || !runs_short() {
            return setting == Switch::On;
        }
        log::info!("communicator `{name}` shares TCP connections, before this process's descriptors run out");
        true
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        CLAIMED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Whether so many descriptors are more than half of what the process may have for everything; none: without limit.
fn is_much(claimed: usize, limit: Option<u64>) -> bool {
    limit.is_some_and(|limit| claimed as u64 > limit / 2)
}

/// For each peer: a stream in each direction, of sockets. Those of shared memory mostly take none, but there is no telling before.
const PEER_DESCRIPTORS: usize = 2;

/// For the pollers, the listeners, the bootstrap, and the few neighbours of the failure detector.
const OWN_DESCRIPTORS: usize = 48;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_shared_before_descriptors_run_out() {
        assert!(!is_much(512, Some(1024)) && is_much(513, Some(1024)));
        assert!(!is_much(1 << 30, None));
    }

    #[test]
    fn each_connection_of_a_stream_takes_a_descriptor() {
        assert_eq!(descriptors(1, 4), OWN_DESCRIPTORS);
        assert_eq!(descriptors(101, 1), OWN_DESCRIPTORS + 200);
        assert_eq!(descriptors(101, 4), OWN_DESCRIPTORS + 800);
    }
}
