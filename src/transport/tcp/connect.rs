//! The sending end: a connection that is made while bytes may already wait for it.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::error::{Down, LinkDown};
use crate::sync::{Arc, AtomicUsize, Ordering};
use crate::sys::limits;
use crate::sys::poller::{Interest, Poller, StreamName, Watched};
use crate::sys::socket::{self, PeerTimeout};
use crate::sys::tcp_info::{self, TcpStats};
use crate::transport::auth::{Identity, Secret};
use crate::transport::handshake::{Opening, is_passing};
use crate::transport::tcp::greeting::{GREETING_BYTES, Greeting, JOINED};
use crate::transport::tcp::paths::Target;
use crate::transport::tls::{Stream, Tls};
use crate::transport::{PATIENCE_WITH_CALLS, SendStream, shortage};
use crate::types::Rank;

/// The stage of a connection.
#[derive(Debug)]
enum Stage {
    /// The kernel is connecting.
    Connecting { since: Instant },
    /// Both sides prove that they know the secret.
    Proving(Opening),
    /// Of the greeting, so many bytes have been written.
    Greeting(Greeting, usize),
    /// The acceptor takes the rail into its stream. Bytes on one that it might not know would be missed at the stream's end.
    Joining,
    /// Bytes flow.
    Open,
}

/// A connection to a peer, which tries the peer's addresses one after the other.
#[derive(Debug)]
pub(in crate::transport) struct Connection {
    identity: Identity,
    tls: Option<Tls>,
    peer: Rank,
    poller: Poller,
    /// Addresses not tried yet.
    targets: VecDeque<Target>,
    failures: Failures,
    current: SocketAddr,
    greeting: Option<Greeting>,
    stream: Watched<Stream>,
    stage: Stage,
    /// What only the two ends know, once both have proved themselves.
    session: Option<Secret>,
    timeout: PeerTimeout,
    /// How many connections each stream has.
    streams: usize,
    holding: Holding,
}

/// How many of a transport's open streams hold bytes: such that TLS has taken and the kernel has not, or those that may have
/// to be sent again.
#[derive(Clone, Debug, Default)]
pub(super) struct Held(Arc<AtomicUsize>);

impl Held {
    pub(super) fn is_any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

/// Whether one stream does.
#[derive(Debug, Default)]
pub(super) struct Holding {
    held: Held,
    holds: bool,
}

impl Holding {
    /// Counts in `held`.
    pub(super) fn counted_in(held: &Held) -> Holding {
        Holding { held: held.clone(), holds: false }
    }

    pub(super) fn holds(&self) -> bool {
        self.holds
    }

    pub(super) fn set(&mut self, holds: bool) {
        match (self.holds, holds) {
            (false, true) => _ = self.held.0.fetch_add(1, Ordering::Relaxed),
            (true, false) => _ = self.held.0.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
        self.holds = holds;
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.set(false);
    }
}

/// Why the tried addresses failed.
#[derive(Debug, Default)]
struct Failures {
    texts: Vec<String>,
    /// At one of them nobody takes connections, or somebody has stopped to.
    is_refused: bool,
}

impl Connection {
    /// Starts with the first address that the system accepts.
    pub(in crate::transport) fn begin(
        identity: Identity,
        tls: Option<Tls>,
        peer: Rank,
        mut targets: VecDeque<Target>,
        poller: &Poller,
        timeout: PeerTimeout,
        streams: usize,
    ) -> Result<Self, LinkDown> {
        let mut failures = Failures::default();
        let needs = (identity.size, streams);
        let (current, stream) = next_attempt(&mut targets, &mut failures, poller, peer, needs, tls.as_ref())?;
        let poller = poller.clone();
        let (stage, holding) = (Stage::Connecting { since: Instant::now() }, Holding::default());
        let (greeting, session) = (None, None);
        Ok(Connection {
            identity,
            tls,
            peer,
            poller,
            targets,
            failures,
            current,
            greeting,
            stream,
            stage,
            session,
            timeout,
            streams,
            holding,
        })
    }

    /// The same, which says this once it is proved.
    pub(super) fn with(mut self, greeting: Option<Greeting>) -> Connection {
        self.greeting = greeting;
        self
    }

    /// The same, which counts in `held` while it is open and holds bytes.
    pub(super) fn counted_in(mut self, held: &Held) -> Connection {
        self.holding = Holding::counted_in(held);
        self
    }

    /// Advances without blocking. True: open.
    pub(in crate::transport) fn drive(&mut self) -> Result<bool, LinkDown> {
        loop {
            match &mut self.stage {
                Stage::Open => return Ok(true),
                Stage::Connecting { since } => match socket::is_connected(self.stream.socket()) {
                    Ok(true) => {
                        socket::tune_tcp(self.stream.socket(), self.timeout)?;
                        self.stream.set(Interest::Read)?;
                        self.stage = Stage::Proving(Opening::new(self.identity.clone(), self.peer));
                    }
                    Ok(false) if since.elapsed() < attempt(self.targets.is_empty(), self.timeout) => return Ok(false),
                    Ok(false) => self.try_next(LinkDown::new("no answer"))?,
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                        self.try_next(LinkDown::refused(error.to_string()))?;
                    }
                    Err(error) => self.try_next(error.into())?,
                },
                Stage::Proving(opening) => match opening.drive(&mut *self.stream) {
                    Ok(true) => {
                        self.session = opening.session();
                        self.stage = self.greeting.map_or(Stage::Open, |greeting| Stage::Greeting(greeting, 0));
                    }
                    Ok(false) => return Ok(false),
                    Err(down) => match opening.classify(down) {
                        slow if slow.kind == Down::Busy => return Err(slow),
                        down => self.try_next(down)?,
                    },
                },
                Stage::Greeting(greeting, written) => match self.stream.write(&greeting.encode()[*written..]) {
                    Ok(count) if *written + count == GREETING_BYTES => {
                        self.stage = if greeting.rails > 1 { Stage::Joining } else { Stage::Open };
                        self.stream.set(Interest::Read)?;
                    }
                    Ok(count) => *written += count,
                    Err(error) if is_passing(&error) => {
                        self.stream.set(Interest::ReadWrite)?;
                        return Ok(false);
                    }
                    Err(error) => return Err(error.into()),
                },
                Stage::Joining => match self.get(&mut [0; JOINED.len()])? {
                    0 => return Ok(false),
                    _ => self.stage = Stage::Open,
                },
            }
        }
    }

    /// The connection's bytes, for whoever uses it for something else than a stream once it is open.
    pub(in crate::transport) fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    /// As a rail: writes some bytes, none if there is no room.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<usize, LinkDown> {
        passing(self.stream.write(bytes))
    }

    /// As a rail: reads some bytes, none if none have come.
    pub(super) fn get(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        match self.stream.read(into) {
            Ok(0) => Err(LinkDown::hung_up("it closed the connection")),
            outcome => passing(outcome),
        }
    }

    /// As a rail: whether TLS holds nothing, after another try.
    pub(super) fn pass_on(&mut self) -> Result<bool, LinkDown> {
        match self.stream.flush() {
            Err(error) if is_passing(&error) => Ok(false),
            outcome => outcome.map(|()| true).map_err(LinkDown::from),
        }
    }

    /// As a rail: whether TLS holds bytes.
    pub(super) fn holds_bytes(&self) -> bool {
        self.stream.holds_bytes()
    }

    /// Has the poller give it this name from now on.
    pub(super) fn name(&mut self, name: StreamName) -> Result<(), LinkDown> {
        Ok(self.stream.name(name)?)
    }

    /// Has the poller tell nothing of it any more.
    pub(super) fn leave(&mut self) {
        self.stream.leave();
    }

    /// The connection's socket.
    pub(super) fn socket(&self) -> &TcpStream {
        self.stream.socket()
    }

    /// Writes the bytes that TLS still holds, and notices a closed connection.
    fn check_connection(&mut self) -> io::Result<usize> {
        if self.stream.has_ended()? { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(0) }
    }

    /// Asks the poller to wake when there is room, if bytes of the engine or of TLS wait.
    pub(super) fn watch(&mut self, armed: bool) {
        let (is_open, holds) = (matches!(self.stage, Stage::Open), self.stream.holds_bytes());
        self.holding.set(is_open && holds);
        let wanted = if armed || holds { Interest::ReadWrite } else { Interest::Read };
        if is_open
            && self.stream.is_watched()
            && let Err(error) = self.stream.set(wanted)
        {
            log::error!("watching a connection failed: {error}");
        }
    }

    fn try_next(&mut self, down: LinkDown) -> Result<(), LinkDown> {
        self.failures.texts.push(format!("{}: {}", self.current, down.cause));
        self.failures.is_refused |= matches!(down.kind, Down::Refused | Down::HungUp);
        let needs = (self.identity.size, self.streams);
        let (targets, failures, tls) = (&mut self.targets, &mut self.failures, self.tls.as_ref());
        (self.current, self.stream) = next_attempt(targets, failures, &self.poller, self.peer, needs, tls)?;
        self.stage = Stage::Connecting { since: Instant::now() };
        Ok(())
    }
}

/// The result of reading or writing, where nothing moves if nothing can now.
pub(super) fn passing(outcome: io::Result<usize>) -> Result<usize, LinkDown> {
    match outcome {
        Err(error) if is_passing(&error) => Ok(0),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(LinkDown::hung_up("it closed the connection")),
        outcome => outcome.map_err(LinkDown::from),
    }
}

fn next_attempt(
    targets: &mut VecDeque<Target>,
    failures: &mut Failures,
    poller: &Poller,
    peer: Rank,
    (size, streams): (usize, usize),
    tls: Option<&Tls>,
) -> Result<(SocketAddr, Watched<Stream>), LinkDown> {
    while let Some(Target { source, address: target }) = targets.pop_front() {
        match socket::begin_tcp(target, source) {
            Ok(socket) => {
                let stream = poller.watch_named(Stream::open(socket, tls), Interest::Write, StreamName::To(peer));
                return Ok((target, stream.map_err(|error| shortage::while_opening(error, size, streams))?));
            }
            Err(error) if limits::is_shortage(&error) => return Err(shortage::while_opening(error, size, streams)),
            Err(error) => failures.texts.push(format!("{target}: {error}")),
        }
    }
    let cause = format!("it cannot be reached at {}", failures.texts.join(", "));
    Err(if failures.is_refused { LinkDown::refused(cause) } else { LinkDown::new(cause) })
}

impl SendStream for Connection {
    fn write(&mut self, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        if !self.drive()? {
            return Ok(0);
        }
        let outcome = match (head, body) {
            ([], []) => self.check_connection(),
            ([], body) => self.stream.write_vectored(body),
            (head, []) => self.stream.write(head),
            (head, body) => {
                let mut bytes: SmallVec<[IoSlice<'_>; 8]> = SmallVec::new();
                bytes.push(IoSlice::new(head));
                bytes.extend_from_slice(body);
                self.stream.write_vectored(&bytes)
            }
        };
        self.watch(false);
        match outcome {
            Ok(count) => Ok(count),
            Err(error) if is_passing(&error) => Ok(0),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(LinkDown::new("it closed the connection")),
            Err(error) => Err(error.into()),
        }
    }

    fn arm(&mut self) -> bool {
        self.watch(true);
        false
    }

    fn disarm(&mut self) {
        self.watch(false);
    }

    fn patience(&self) -> u32 {
        PATIENCE_WITH_CALLS
    }

    fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Open) && !self.stream.holds_bytes()
    }

    fn session(&self) -> Option<Secret> {
        self.session
    }

    fn tcp_stats(&self) -> Option<TcpStats> {
        if !matches!(self.stage, Stage::Open) {
            return None;
        }
        tcp_info::tcp_stats(self.stream.socket()).ok()
    }

    fn flushed(&mut self) -> Result<bool, LinkDown> {
        // The kernel delivers the bytes that it has taken, also after this process's end.
        let flushed = self.stream.flush();
        self.watch(false);
        match flushed {
            Ok(()) => Ok(true),
            Err(error) if is_passing(&error) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// How long an address is tried: the last for as long as a connection may be silent.
fn attempt(is_last: bool, timeout: PeerTimeout) -> Duration {
    let (PeerTimeout::WhileIdle(limit) | PeerTimeout::Always(limit)) = timeout;
    if is_last { limit.max(ATTEMPT_TIMEOUT) } else { ATTEMPT_TIMEOUT }
}

/// How long one address is tried while there are others.
pub(super) const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;
    use crate::transport::auth::Secret;
    use crate::transport::handshake::HANDSHAKE_TIMEOUT_FULL;

    /// A listener that accepts nothing, with connections that fill its queue, so that its host does not answer more.
    fn silent() -> (TcpListener, Vec<TcpStream>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        // To listen again shortens the queue.
        rustix::net::listen(&listener, 0).unwrap();
        let mut callers = Vec::new();
        loop {
            let caller = socket::begin_tcp(listener.local_addr().unwrap(), None).unwrap();
            let mut watched = [rustix::event::PollFd::new(&caller, rustix::event::PollFlags::OUT)];
            let is_made =
                rustix::event::poll(&mut watched, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 100_000_000 }));
            if is_made.unwrap() == 0 {
                return (listener, callers);
            }
            callers.push(caller);
        }
    }

    fn connection(targets: &[&TcpListener], timeout: Duration) -> Connection {
        let identity = Identity { comm: [1; 16], me: Rank(0), size: 2, secret: Secret::new([5; 32]) };
        let target = |listener: &&TcpListener| Target { source: None, address: listener.local_addr().unwrap() };
        let targets = targets.iter().map(target).collect();
        let poller = Poller::new().unwrap();
        Connection::begin(identity, None, Rank(1), targets, &poller, PeerTimeout::WhileIdle(timeout), 1).unwrap()
    }

    fn age(connection: &mut Connection, age: Duration) {
        connection.stage = Stage::Connecting { since: Instant::now().checked_sub(age).expect("a clock that is older") };
    }

    #[test]
    fn a_caller_that_was_too_slow_for_the_acceptor_calls_again() {
        for (age, kind) in [(Duration::ZERO, Down::Refused), (HANDSHAKE_TIMEOUT_FULL, Down::Busy)] {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let mut connection = connection(&[&listener], ATTEMPT_TIMEOUT);
            drop(listener.accept().unwrap());
            let opening = Opening::new(connection.identity.clone(), Rank(1)).aged(age);
            connection.stage = Stage::Proving(opening);
            connection.stream.socket().set_nonblocking(false).unwrap();
            assert_eq!(connection.drive().unwrap_err().kind, kind, "{age:?}");
        }
    }

    #[test]
    fn an_address_that_does_not_answer_is_given_up_for_the_next_and_the_last_at_the_timeout() {
        let (first, _callers) = silent();
        let (second, _others) = silent();
        let mut connection = connection(&[&first, &second], ATTEMPT_TIMEOUT * 3);
        assert_eq!(connection.drive(), Ok(false));
        assert_eq!(connection.current, first.local_addr().unwrap());
        for _ in 0..2 {
            age(&mut connection, ATTEMPT_TIMEOUT);
            assert_eq!(connection.drive(), Ok(false));
            assert_eq!(connection.current, second.local_addr().unwrap(), "there is no other");
        }
        age(&mut connection, ATTEMPT_TIMEOUT * 3);
        assert!(connection.drive().unwrap_err().cause.contains("no answer"));
    }
}
