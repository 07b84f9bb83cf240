//! Accepted connections that have not proved themselves yet: few, and not for long.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::error::LinkDown;
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

    /// Whether no connection is in its handshake.
    pub(crate) fn is_empty(&self) -> bool {
        self.candidates.is_empty()
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
            Err(error) => log::warn!("a connection was dropped: {error}"),
        }
    }

    /// Drives every handshake by `drive`, which gives the finished stream; drops those that fail or take too long.
    pub(crate) fn drive<T>(
        &mut self,
        mut drive: impl FnMut(&mut Candidate<S>) -> Result<Option<T>, LinkDown>,
    ) -> Vec<T> {
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
                Ok(None) if candidate.since.elapsed() < PATIENCE => return true,
                Ok(None) => log::warn!("a connection was dropped: it did not prove itself within {PATIENCE:?}"),
                Err(down) => log::warn!("a connection was dropped: {down}"),
            }
            false
        });
        finished
    }
}

/// How many strangers may be at the door.
const CANDIDATES_MAX: usize = 1024;

/// How long a connection may take to prove itself.
const PATIENCE: Duration = Duration::from_secs(20);
