//! Accepted connections that have not proved themselves yet: few, and not for long.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::error::{Down, LinkDown};
use crate::sys::limits;
use crate::sys::poller::{Interest, Poller, Registration};
use crate::sys::socket;
use crate::transport::auth::Identity;
use crate::transport::handshake::{Accepting, HANDSHAKE_TIMEOUT_FULL, PATIENCE};
use crate::transport::shortage;
use crate::types::Rank;

/// A connection in its handshake.
#[derive(Debug)]
pub(crate) struct Candidate<S> {
    pub(crate) stream: S,
    pub(crate) accepting: Accepting,
    /// Set once the handshake is done and only the transport's own part is missing.
    pub(crate) rank: Option<Rank>,
    /// None while this process has no descriptor left for it.
    registration: Option<Registration>,
    since: Instant,
}

/// A connection that has proved itself.
#[derive(Debug)]
pub(crate) struct Proved<S, T> {
    pub(crate) rank: Rank,
    pub(crate) stream: S,
    pub(crate) registration: Registration,
    /// What the transport's own part has brought.
    pub(crate) brought: T,
}

/// All connections of one listener that are in their handshake.
#[derive(Debug)]
pub(crate) struct Pending<S> {
    identity: Identity,
    poller: Poller,
    candidates: Vec<Candidate<S>>,
    shortage: Option<Shortage>,
}

/// The system refuses what it takes to let others in.
#[derive(Debug)]
struct Shortage {
    cause: String,
    /// When to try again: until then, who calls waits in the listener's queue.
    again: Instant,
}

impl<S: AsFd> Pending<S> {
    pub(crate) fn new(identity: Identity, poller: Poller) -> Self {
        Pending { identity, poller, candidates: Vec::new(), shortage: None }
    }

    /// Whether another connection can be taken.
    fn has_room(&self) -> bool {
        self.candidates.len() < CANDIDATES_MAX
    }

    /// Whether a connection inside lacks something.
    fn lacks(&self) -> bool {
        self.candidates.iter().any(|candidate| candidate.registration.is_none())
    }

    /// Whether it is no time to ask the system again for what it refused.
    fn rests(&self) -> bool {
        self.shortage.as_ref().is_some_and(|shortage| shortage.again > Instant::now())
    }

    /// What this process lacks to let others in, if it does.
    pub(crate) fn shortage(&self) -> Option<String> {
        self.shortage.as_ref().map(|shortage| shortage.cause.clone())
    }

    /// Leaves callers waiting for a while, since the system has refused what they take.
    fn rest(&mut self, cause: String) {
        let again = Instant::now() + ACCEPT_PAUSE;
        if self.shortage.is_none() {
            log::warn!("rank {}: connections of other ranks have to wait: {cause}", self.identity.me);
        }
        self.shortage = Some(Shortage { cause, again });
    }

    /// Lets callers of `listener` in, as far as there is room. `accept` takes the next one: nothing if it does not belong here,
    /// or has left.
    pub(crate) fn admit(&mut self, listener: BorrowedFd<'_>, mut accept: impl FnMut() -> io::Result<Option<S>>) {
        // Those that stay in the queue wake the poller again.
        for _ in 0..CALLERS_PER_TURN {
            if !self.has_room() || self.rests() {
                return;
            }
            match accept() {
                Ok(Some(stream)) => self.add(stream),
                Ok(None) => {}
                // The system refuses a descriptor before it looks whether anybody is there.
                Err(error) if error.kind() == ErrorKind::WouldBlock || !socket::has_caller(listener) => {
                    if !self.lacks() {
                        self.shortage = None;
                    }
                    return;
                }
                Err(error) => return self.rest(shortage::describe(&error, self.identity.size)),
            }
        }
    }

    /// Sees that nobody wakes for callers who must wait.
    pub(crate) fn watch(&self, listener: &mut Registration) {
        let interest = if self.has_room() && self.shortage.is_none() { Interest::Read } else { Interest::Nothing };
        if let Err(error) = listener.set(interest) {
            log::error!("rank {}: watching a listener failed: {error}", self.identity.me);
        }
    }

    /// When the next connection must have proved itself, or others may be let in again; nothing if nobody is known to wait.
    pub(crate) fn due(&self) -> Option<Instant> {
        let registered = self.candidates.iter().filter(|candidate| candidate.registration.is_some());
        let oldest = registered.map(|candidate| candidate.since).min();
        let shortage = self.shortage.as_ref().filter(|_| self.has_room() || self.lacks());
        let again = shortage.map(|shortage| shortage.again);
        oldest.map(|oldest| oldest + self.patience()).into_iter().chain(again).min()
    }

    fn patience(&self) -> Duration {
        if self.has_room() { PATIENCE } else { HANDSHAKE_TIMEOUT_FULL }
    }

    /// Begins the handshake on a connection.
    pub(crate) fn add(&mut self, stream: S) {
        let (accepting, since) = (Accepting::new(self.identity.clone()), Instant::now());
        let mut candidate = Candidate { stream, accepting, rank: None, registration: None, since };
        match candidate.register(&self.poller) {
            Ok(()) => {}
            // Whoever it is has come, and would take to be dropped for this rank's end.
            Err(error) if limits::is_shortage(&error) => self.rest(shortage::describe(&error, self.identity.size)),
            Err(error) => return log::warn!("rank {}: a connection was dropped: {error}", self.identity.me),
        }
        self.candidates.push(candidate);
    }

    /// Drives every handshake by `drive`, which gives what a finished one has brought; drops those that fail or take too long,
    /// but nobody for what this process lacks.
    pub(crate) fn drive<T>(
        &mut self,
        mut drive: impl FnMut(&mut Candidate<S>) -> Result<Option<T>, LinkDown>,
    ) -> Vec<Proved<S, T>> {
        let (me, patience, rests) = (self.identity.me, self.patience(), self.rests());
        let (mut finished, mut refusal) = (Vec::new(), None);
        for mut candidate in std::mem::take(&mut self.candidates) {
            if candidate.registration.is_none() {
                let registered = if rests { Ok(()) } else { candidate.register(&self.poller) };
                refusal = registered.err().map(|error| shortage::describe(&error, self.identity.size)).or(refusal);
            }
            if candidate.registration.is_none() {
                self.candidates.push(candidate);
                continue;
            }
            let was_known = candidate.rank.is_some();
            let driven = drive(&mut candidate);
            if !was_known && candidate.rank.is_some() {
                // What is missing now is this side's own doing: nobody may have driven it for a while.
                candidate.since = Instant::now();
            }
            match driven {
                Ok(Some(brought)) => finished.extend(candidate.prove(brought)),
                Ok(None) if candidate.since.elapsed() < patience => self.candidates.push(candidate),
                Ok(None) => {
                    log::warn!("rank {me}: a connection was dropped: it did not prove itself within {patience:?}")
                }
                // What has left is nothing to wait for, although it still shows what it sent before.
                Err(down) if down.kind == Down::Lacking && !socket::is_hung_up(candidate.stream.as_fd()) => {
                    refusal = Some(down.cause);
                    // What it has sent would wake the poller all the time.
                    candidate.registration = None;
                    self.candidates.push(candidate);
                }
                // Whoever has changed its mind, a rank that leaves or a stranger.
                Err(down) if down.kind == Down::HungUp => log::debug!("rank {me}: a connection was dropped: {down}"),
                Err(down) => log::warn!("rank {me}: a connection was dropped: {down}"),
            }
        }
        if let Some(cause) = refusal {
            self.rest(cause);
        }
        finished
    }
}

impl<S: AsFd> Candidate<S> {
    fn register(&mut self, poller: &Poller) -> io::Result<()> {
        self.registration = Some(poller.add(self.stream.as_fd(), Interest::Read)?);
        // While there was none, nobody listened.
        self.since = Instant::now();
        Ok(())
    }

    /// The connection, once it is known whose it is.
    fn prove<T>(self, brought: T) -> Option<Proved<S, T>> {
        Some(Proved { rank: self.rank?, stream: self.stream, registration: self.registration?, brought })
    }
}

/// How many strangers may be at the door: each takes two file descriptors, of which processes often have 1024.
const CANDIDATES_MAX: usize = 128;

/// How long to leave callers waiting after the system refused to take one in.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many callers are looked at before the ranks have their turn again.
const CALLERS_PER_TURN: usize = 256;

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
        let none = pending.drive(|candidate| candidate.accepting.drive(&mut candidate.stream));
        assert!(none.is_empty());
        pending.candidates.len()
    }

    #[test]
    fn who_waits_for_what_this_process_lacks_is_kept_until_it_leaves() {
        let identity = Identity { comm: [0; 16], me: Rank(0), size: 2, secret: Secret::new([0; 32]) };
        let mut pending = Pending::new(identity, Poller::new().expect("a poller"));
        let far = aged(&mut pending, Duration::ZERO);
        let lack = |pending: &mut Pending<UnixStream>| {
            // As after the time to rest.
            pending.shortage = None;
            let none = pending.drive(|_| Err::<Option<()>, _>(LinkDown::lacking("no memory")));
            assert!(none.is_empty());
            (pending.candidates.len(), pending.shortage())
        };
        for _ in 0..2 {
            assert_eq!(lack(&mut pending), (1, Some("no memory".to_owned())));
        }
        drop(far);
        assert_eq!(lack(&mut pending), (0, None));
    }

    #[test]
    fn the_slow_are_dropped_and_earlier_when_others_wait() {
        let identity = Identity { comm: [0; 16], me: Rank(0), size: 2, secret: Secret::new([0; 32]) };
        let mut pending = Pending::new(identity, Poller::new().expect("a poller"));
        assert_eq!(pending.due(), None);
        let _late = aged(&mut pending, PATIENCE);
        let _slow = aged(&mut pending, HANDSHAKE_TIMEOUT_FULL);
        assert!(pending.due().is_some_and(|due| due <= Instant::now()));
        assert_eq!(drive(&mut pending), 1, "only who is late goes while there is room");
        let _others: Vec<_> = (1..CANDIDATES_MAX).map(|_| aged(&mut pending, Duration::ZERO)).collect();
        assert!(!pending.has_room() && pending.due().is_some_and(|due| due <= Instant::now()));
        assert_eq!(drive(&mut pending), CANDIDATES_MAX - 1);
        assert!(pending.has_room());
    }
}
