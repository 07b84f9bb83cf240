//! Accepted connections that have not proved themselves yet: bounded in number and in time.

use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use crate::error::{Down, LinkDown};
use crate::sys::limits;
use crate::sys::poller::{Interest, Poller, StreamName, Watched};
use crate::sys::socket::{self, PeerTimeout};
use crate::transport::auth::{Identity, Secret};
use crate::transport::handshake::{Accepting, HANDSHAKE_TIMEOUT, HANDSHAKE_TIMEOUT_CROWDED, HANDSHAKE_TIMEOUT_FULL};
use crate::transport::shortage;
use crate::types::Rank;

/// A connection in its handshake.
#[derive(Debug)]
pub(crate) struct Candidate<S: AsFd> {
    /// Not watched while this process has nothing left for it.
    pub(crate) stream: Watched<S>,
    pub(crate) accepting: Accepting,
    /// Set once the handshake is done and only the transport's own part is missing.
    pub(crate) rank: Option<Rank>,
    since: Instant,
}

/// A connection that has proved itself.
#[derive(Debug)]
pub(crate) struct Proved<S: AsFd, T> {
    pub(crate) rank: Rank,
    pub(crate) stream: Watched<S>,
    /// What only the two ends know.
    pub(crate) session: Option<Secret>,
    /// What the transport's own part has received.
    pub(crate) received: T,
}

/// All connections of one listener that are in their handshake.
#[derive(Debug)]
pub(crate) struct Pending<S: AsFd> {
    identity: Identity,
    /// How many connections each stream has.
    streams: usize,
    poller: Poller,
    /// The oldest first.
    candidates: Vec<Candidate<S>>,
    /// There was no room for one that waited when the listener was asked last.
    is_crowded: bool,
    shortage: Option<Shortage>,
}

/// The system refuses a resource that accepting takes.
#[derive(Debug)]
struct Shortage {
    cause: String,
    /// When to accept again; until then, connections wait in the listener's queue.
    retry_at: Instant,
}

impl<S: AsFd> Pending<S> {
    pub(crate) fn new(identity: Identity, poller: Poller) -> Self {
        Pending { identity, streams: 1, poller, candidates: Vec::new(), is_crowded: false, shortage: None }
    }

    /// The same, where each stream has so many connections.
    pub(crate) fn with_streams(mut self, streams: usize) -> Self {
        self.streams = streams;
        self
    }

    /// What this process lacks, in words.
    fn describe(&self, error: &io::Error) -> String {
        shortage::describe(error, self.identity.size, self.streams)
    }

    /// Whether another connection can be accepted.
    fn has_room(&self) -> bool {
        self.candidates.len() < CANDIDATES_MAX
    }

    /// Whether this process lacks something for an accepted connection.
    fn has_unwatched(&self) -> bool {
        self.candidates.iter().any(|candidate| !candidate.stream.is_watched())
    }

    /// Whether to wait before the system is asked again for what it refused.
    fn is_paused(&self) -> bool {
        self.shortage.as_ref().is_some_and(|shortage| shortage.retry_at > Instant::now())
    }

    /// The resource that this process lacks to accept connections, if any.
    pub(crate) fn shortage(&self) -> Option<String> {
        self.shortage.as_ref().map(|shortage| shortage.cause.clone())
    }

    /// Stops accepting for a while, since the system has refused a resource.
    fn pause(&mut self, cause: String) {
        let retry_at = Instant::now() + ACCEPT_PAUSE;
        if self.shortage.is_none() {
            log::warn!("rank {}: connections of other ranks have to wait: {cause}", self.identity.me);
        }
        self.shortage = Some(Shortage { cause, retry_at });
    }

    /// Accepts connections of `listener`, as far as there is room. `accept` accepts the next one: none if it is refused, or
    /// closed already.
    pub(crate) fn admit(&mut self, listener: BorrowedFd<'_>, mut accept: impl FnMut() -> io::Result<Option<S>>) {
        self.is_crowded = false;
        // Connections that stay in the queue wake the poller again.
        for _ in 0..ACCEPTED_PER_TURN {
            if !self.has_room() {
                self.is_crowded = socket::has_caller(listener);
                return;
            }
            if self.is_paused() {
                return;
            }
            match accept() {
                Ok(Some(stream)) => self.add(stream),
                Ok(None) => {}
                // The system refuses a descriptor before it checks whether a connection waits.
                Err(error) if error.kind() == ErrorKind::WouldBlock || !socket::has_caller(listener) => {
                    if !self.has_unwatched() {
                        self.shortage = None;
                    }
                    return;
                }
                Err(error) => return self.pause(self.describe(&error)),
            }
        }
    }

    /// As [`admit`](Pending::admit), connections of TCP, of each of which `begin` makes what has to prove itself.
    pub(crate) fn admit_tcp(&mut self, listener: &TcpListener, timeout: PeerTimeout, begin: impl Fn(TcpStream) -> S) {
        self.admit(listener.as_fd(), || {
            socket::admit(listener.accept(), |(stream, _)| {
                socket::tune_tcp(&stream, timeout)?;
                Ok(begin(stream))
            })
        });
    }

    /// Stops polling the listener while no further connection can be accepted.
    pub(crate) fn watch<L: AsFd>(&self, listener: &mut Watched<L>) {
        // Also without room, the first that waits is to be known.
        let is_wanted = (self.has_room() || !self.is_crowded) && self.shortage.is_none();
        let interest = if is_wanted { Interest::Read } else { Interest::Nothing };
        if let Err(error) = listener.set(interest) {
            log::error!("rank {}: watching a listener failed: {error}", self.identity.me);
        }
    }

    /// When the next handshake must be over, or connections may be accepted again; none if no connection is known to wait.
    pub(crate) fn due(&self) -> Option<Instant> {
        let (patience, candidates) = (self.patience(), self.candidates.iter().enumerate());
        let watched = candidates.filter(|(_, candidate)| candidate.stream.is_watched());
        let ends = watched.map(|(place, candidate)| candidate.since + patience.with(place, candidate.rank));
        let shortage = self.shortage.as_ref().filter(|_| self.has_room() || self.has_unwatched());
        ends.chain(shortage.map(|shortage| shortage.retry_at)).min()
    }

    fn patience(&self) -> Patience {
        let oldest = if self.has_room() { HANDSHAKE_TIMEOUT } else { HANDSHAKE_TIMEOUT_FULL };
        let is_short = self.is_crowded && !self.has_room();
        Patience { oldest, others: if is_short { HANDSHAKE_TIMEOUT_CROWDED } else { oldest } }
    }

    /// Begins the handshake on a connection.
    pub(crate) fn add(&mut self, stream: S) {
        let (accepting, since) = (Accepting::new(self.identity.clone()), Instant::now());
        let mut candidate = Candidate { stream: self.poller.own(stream), accepting, rank: None, since };
        match candidate.watch() {
            Ok(()) => {}
            // Kept: to a peer, a dropped connection would mean that this rank has ended.
            Err(error) if limits::is_shortage(&error) => self.pause(self.describe(&error)),
            Err(error) => return log::warn!("rank {}: a connection was dropped: {error}", self.identity.me),
        }
        self.candidates.push(candidate);
    }

    /// Advances every handshake by `drive`, which returns what a complete one has received. Drops connections that fail or take
    /// too long, but none because of a shortage of this process.
    pub(crate) fn drive<T>(
        &mut self,
        mut drive: impl FnMut(&mut Candidate<S>) -> Result<Option<T>, LinkDown>,
    ) -> Vec<Proved<S, T>> {
        let (me, patience, is_paused) = (self.identity.me, self.patience(), self.is_paused());
        let (mut finished, mut refusal) = (Vec::new(), None);
        for mut candidate in std::mem::take(&mut self.candidates) {
            if !candidate.stream.is_watched() {
                let watched = if is_paused { Ok(()) } else { candidate.watch() };
                refusal = watched.err().map(|error| self.describe(&error)).or(refusal);
            }
            if !candidate.stream.is_watched() {
                self.candidates.push(candidate);
                continue;
            }
            let was_known = candidate.rank.is_some();
            let driven = drive(&mut candidate);
            if !was_known && candidate.rank.is_some() {
                // The rest depends on this side alone, which may not have made progress for a while.
                candidate.since = Instant::now();
            }
            let limit = patience.with(self.candidates.len(), candidate.rank);
            match driven {
                Ok(Some(received)) => match candidate.prove(received) {
                    Ok(proved) => finished.push(proved),
                    Err(error) => log::warn!("rank {me}: a connection was dropped: it cannot be watched: {error}"),
                },
                Ok(None) if candidate.since.elapsed() < limit => self.candidates.push(candidate),
                // There may be thousands. A rank calls again.
                Ok(None) if limit == HANDSHAKE_TIMEOUT_CROWDED => {
                    log::debug!("rank {me}: a connection was dropped, since others wait: it had not proved itself yet")
                }
                Ok(None) => log::warn!("rank {me}: a connection was dropped: it did not prove itself within {limit:?}"),
                // What has left is nothing to wait for, although it still shows what it sent before.
                Err(down) if down.kind == Down::Lacking && !socket::is_hung_up(candidate.stream.as_fd()) => {
                    refusal = Some(down.cause);
                    // Its unread bytes would wake the poller all the time.
                    candidate.stream.leave();
                    self.candidates.push(candidate);
                }
                // The peer has closed it: a rank that leaves, or an unauthenticated peer.
                Err(down) if down.kind == Down::HungUp => log::debug!("rank {me}: a connection was dropped: {down}"),
                Err(down) => log::warn!("rank {me}: a connection was dropped: {down}"),
            }
        }
        if let Some(cause) = refusal {
            self.pause(cause);
        }
        finished
    }
}

impl<S: AsFd> Candidate<S> {
    fn watch(&mut self) -> io::Result<()> {
        self.stream.watch(Interest::Read)?;
        // Its time begins now: before, this side did not read.
        self.since = Instant::now();
        Ok(())
    }

    /// The connection, once its rank is known.
    fn prove<T>(self, received: T) -> io::Result<Proved<S, T>> {
        let Candidate { rank: Some(rank), mut stream, accepting, .. } = self else {
            return Err(ErrorKind::NotConnected.into());
        };
        stream.name(StreamName::From(rank))?;
        Ok(Proved { rank, stream, session: accepting.session(), received })
    }
}

/// How long connections may take to prove themselves. Where others wait, those that have come last are given up soon, so that callers
/// that say nothing do not hold up ranks. The oldest are not, so that of many ranks that are all slow to answer some always get through.
#[derive(Clone, Copy)]
struct Patience {
    oldest: Duration,
    others: Duration,
}

impl Patience {
    /// With the candidate at this place, which may be known as a rank.
    fn with(self, place: usize, rank: Option<Rank>) -> Duration {
        if place < OLDEST || rank.is_some() { self.oldest } else { self.others }
    }
}

/// How many connections may be in their handshake: each takes a file descriptor, of which processes often have 1024.
const CANDIDATES_MAX: usize = 128;

/// How many of them are not given up for those that wait.
const OLDEST: usize = CANDIDATES_MAX / 2;

/// How long to stop accepting after the system refused a resource.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many connections are accepted before operations make progress again.
const ACCEPTED_PER_TURN: usize = 256;

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn aged(pending: &mut Pending<UnixStream>, age: Duration) -> UnixStream {
        let (near, far) = UnixStream::pair().expect("a pair");
        near.set_nonblocking(true).expect("a socket that does not block");
        pending.add(near);
        let candidate = pending.candidates.last_mut().expect("it was added");
        candidate.since = Instant::now().checked_sub(age).expect("a clock that is older");
        far
    }

    fn drive(pending: &mut Pending<UnixStream>) -> usize {
        let none = pending.drive(|candidate| candidate.accepting.drive(&mut *candidate.stream));
        assert!(none.is_empty());
        pending.candidates.len()
    }

    #[test]
    fn a_caller_that_waits_for_what_this_process_lacks_is_kept_until_it_leaves() {
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
        let _late = aged(&mut pending, HANDSHAKE_TIMEOUT);
        let _slow = aged(&mut pending, HANDSHAKE_TIMEOUT_FULL);
        assert!(pending.due().is_some_and(|due| due <= Instant::now()));
        assert_eq!(drive(&mut pending), 1, "only the late connection is dropped while there is room");
        let _others: Vec<_> = (1..CANDIDATES_MAX).map(|_| aged(&mut pending, Duration::ZERO)).collect();
        assert!(!pending.has_room() && pending.due().is_some_and(|due| due <= Instant::now()));
        assert_eq!(drive(&mut pending), CANDIDATES_MAX - 1);
        assert!(pending.has_room());
    }

    #[test]
    fn who_has_come_last_makes_room_for_those_that_wait_and_the_oldest_stay() {
        let identity = Identity { comm: [0; 16], me: Rank(0), size: 2, secret: Secret::new([0; 32]) };
        let mut pending = Pending::new(identity, Poller::new().expect("a poller"));
        let name = format!("ncclx_rs-pending-{}", std::process::id());
        let listener = socket::listen_unix(name.as_bytes()).expect("a name of its own");
        let admit = |pending: &mut Pending<UnixStream>| {
            let accept =
                || socket::admit(listener.accept(), |(stream, _)| stream.set_nonblocking(true).map(|()| stream));
            pending.admit(listener.as_fd(), accept);
        };
        let _crowd: Vec<_> = (0..CANDIDATES_MAX).map(|_| aged(&mut pending, HANDSHAKE_TIMEOUT_CROWDED)).collect();
        pending.candidates.last_mut().expect("the last").rank = Some(Rank(1));
        admit(&mut pending);
        assert!(pending.due().is_some_and(|due| due > Instant::now()));
        assert_eq!(drive(&mut pending), CANDIDATES_MAX, "nobody waits");
        let _caller = socket::connect_unix(name.as_bytes()).expect("it listens");
        admit(&mut pending);
        assert!(pending.due().is_some_and(|due| due <= Instant::now()));
        assert_eq!(drive(&mut pending), OLDEST + 1, "one of the others is a rank");
        admit(&mut pending);
        assert_eq!(drive(&mut pending), OLDEST + 2);
    }
}
