//! The streams to other ranks: opened when something goes there or is waited for, and what their ends mean.

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::engine::progress::Engine;
use crate::error::{Error, LinkDown};
use crate::types::Rank;

impl Engine {
    /// Opens the stream to `peer` if there is none. Also the one that waits for a peer opens a stream to it: its end
    /// tells that the peer is gone. What is sent waits while it cannot be opened.
    pub(crate) fn connect(&mut self, peer: Rank) {
        let entry = &mut self.peers[peer.index()];
        if peer == self.me || entry.outbox.is_open() || entry.ending.is_some() || entry.lost.is_some() {
            return;
        }
        let now = Instant::now();
        match entry.way.open(peer, &mut self.transports, now) {
            Ok(Some(send_stream)) => entry.outbox.open(send_stream),
            Ok(None) => {}
            Err(down) => {
                self.send_stream_closed(peer, down.clone());
                self.drain_or_lose(peer, &down, now);
            }
        }
    }

    /// The error of an operation whose time is over, which waited for these ranks: `detail`, and why there are no streams.
    pub(crate) fn timeout(
        &self,
        ranks: Range<usize>,
        waited: Duration,
        mut detail: String,
    ) -> impl FnOnce(String) -> Error + use<> {
        let mut is_short = false;
        for rank in ranks {
            let way = &self.peers[rank].way;
            is_short |= way.is_short();
            if let Some(cause) = way.obstacle() {
                detail += &format!("; there is no connection to rank {rank} yet: {cause}");
            }
        }
        for shortage in self.transports.iter().filter_map(|transport| transport.shortage()) {
            is_short = true;
            detail += &format!("; no connection can be accepted: {shortage}");
        }
        move |operation| match is_short {
            true => Error::Resource { operation, waited, detail },
            false => Error::Timeout { operation, waited, detail },
        }
    }

    /// The stream to `peer` broke or cannot be opened, so that it takes nothing more. What it sent may be on its way in the
    /// other stream, whose own end tells when all has come.
    pub(super) fn send_stream_closed(&mut self, peer: Rank, down: LinkDown) {
        let (entry, now) = (&mut self.peers[peer.index()], Instant::now());
        if entry.lost.is_none() && entry.ending.is_none() {
            match entry.way.ended(down, now) {
                Ok(()) => entry.outbox.close(),
                Err(down) => entry.ending = Some((down, now)),
            }
        }
    }

    /// Waits for the stream from a peer whose other stream broke, if there is one or may be one in its handshake.
    pub(super) fn drain_or_lose(&mut self, peer: Rank, down: &LinkDown, since: Instant) {
        self.accept();
        let may_bring_more = self.peers[peer.index()].inbox.is_some()
            || self.peers[peer.index()].is_draining
            || self.transports.iter().any(|transport| transport.accepting_until().is_some());
        if !may_bring_more || since.elapsed() >= DRAIN_TIMEOUT {
            // This process may not have run meanwhile, and what has come was sent before the end.
            self.progress_recv(peer);
            self.lose(peer, down);
        }
    }
}

/// How long the stream from a peer may outlast the stream to it.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
