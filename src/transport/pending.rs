//! Accepted connections that have not proved themselves yet: few, and not for long.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::error::{Down, LinkDown};
use crate::sys::poller::{Interest, Poller, Registration};
use crate::transport::auth::Identity;
use crate::transport::handshake::Accepting;
use crate::types::Rank;

/// A connection in its handshake.
#[derive(Debug)]
pub(crate) struct Candidate<S> {
    pub(crate) stream: S,
    pub(crate) accepting: Accepting,
    /// Set once the handshake is done and only the transport's own part is missing.
    pub(crate) rank: Option<Rank>,
    _registration: Registration,
    since: Instant,
}

/// All connections of one listener that are in their handshake.
#[derive(Debug)]
pub(crate) struct Pending<S> {
    identity: Identity,
    poller: Poller,
    candidates: Vec<Candidate<S>>,
}

impl<S: AsFd> Pending<S> {
    pub(crate) fn new(identity: Identity, poller: Poller) -> Self {
        Pending { identity, poller, candidates: Vec::new() }
    }

    /// Whether another connection can be taken.
    pub(crate) fn has_room(&self) -> bool {
        self.candidates.len() < CANDIDATES_MAX
    }

    /// Sees that nobody wakes for callers who must wait.
    pub(crate) fn watch(&self, listener: &mut Registration) {
        let interest = if self.has_room() { Interest::Read } else { Interest::Nothing };
        if let Err(error) = listener.set(interest) {
            log::error!("rank {}: watching a listener failed: {error}", self.identity.me);
        }
    }

    /// When the next connection must have proved itself; nothing if none is in its handshake.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.candidates.iter().map(|candidate| candidate.since).min().map(|oldest| oldest + self.patience())
    }

    fn patience(&self) -> Duration {
        if self.has_room() { PATIENCE } else { CROWDED_PATIENCE }
    }

    /// Begins the handshake on a connection.
    pub(crate) fn add(&mut self, stream: S) {
        match self.poller.add(stream.as_fd(), Interest::Read) {
            Ok(registration) => self.candidates.push(Candidate {
                stream,
                accepting: Accepting::new(self.identity.clone()),
                rank: None,
                _registration: registration,
                since: Instant::now(),
            }),
            Err(error) => log::warn!("rank {}: a connection was dropped: {error}", self.identity.me),
        }
    }

    /// Drives every handshake by `drive`, which gives the finished stream; drops those that fail or take too long.
    pub(crate) fn drive<T>(
        &mut self,
        mut drive: impl FnMut(&mut Candidate<S>) -> Result<Option<T>, LinkDown>,
    ) -> Vec<T> {
        let (me, patience) = (self.identity.me, self.patience());
        let mut finished = Vec::new();
        self.candidates.retain_mut(|candidate| {
            let was_known = candidate.rank.is_some();
            let driven = drive(candidate);
            if !was_known && candidate.rank.is_some() {
                // What is missing now is this side's own doing: nobody may have driven it for a while.
                candidate.since = Instant::now();
            }
            match driven {
                Ok(Some(done)) => {
                    finished.push(done);
                    return false;
                }
                Ok(None) if candidate.since.elapsed() < patience => return true,
                Ok(None) => {
                    log::warn!("rank {me}: a connection was dropped: it did not prove itself within {patience:?}")
                }
                // Whoever has changed its mind, a rank that leaves or a stranger.
                Err(down) if down.kind == Down::HungUp => log::debug!("rank {me}: a connection was dropped: {down}"),
                Err(down) => log::warn!("rank {me}: a connection was dropped: {down}"),
            }
            false
        });
        finished
    }
}

/// How many strangers may be at the door: each takes two file descriptors, of which processes often have 1024.
const CANDIDATES_MAX: usize = 128;

/// How long a connection may take to prove itself.
const PATIENCE: Duration = Duration::from_secs(20);

/// The same while others have to wait for it.
const CROWDED_PATIENCE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::transport::auth::Secret;

    fn aged(pending: &mut Pending<UnixStream>, age: Duration) -> UnixStream {
        let (near, far) = UnixStream::pair().expect("a pair");
        near.set_nonblocking(true).expect("a socket that does not block");
        pending.add(near);
        let candidate = pending.candidates.last_mut().expect("it was added");
        candidate.since = Instant::now().checked_sub(age).expect("a clock that is older");
        far
    }

    fn drive(pending: &mut Pending<UnixStream>) -> usize {
        let none: Vec<Rank> = pending.drive(|candidate| candidate.accepting.drive(&mut candidate.stream));
        assert!(none.is_empty());
        pending.candidates.len()
    }

    #[test]
    fn the_slow_are_dropped_and_earlier_when_others_wait() {
        let identity = Identity { comm: [0; 16], me: Rank(0), size: 2, secret: Secret::new([0; 32]) };
        let mut pending = Pending::new(identity, Poller::new().expect("a poller"));
        assert_eq!(pending.due(), None);
        let _late = aged(&mut pending, PATIENCE);
        let _slow = aged(&mut pending, CROWDED_PATIENCE);
        assert!(pending.due().is_some_and(|due| due <= Instant::now()));
        assert_eq!(drive(&mut pending), 1, "only who is late goes while there is room");
        let _others: Vec<_> = (1..CANDIDATES_MAX).map(|_| aged(&mut pending, Duration::ZERO)).collect();
        assert!(!pending.has_room() && pending.due().is_some_and(|due| due <= Instant::now()));
        assert_eq!(drive(&mut pending), CANDIDATES_MAX - 1);
        assert!(pending.has_room());
    }
}
