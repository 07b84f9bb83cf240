//! The sending end: a connection that is made while bytes may already wait for it.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::error::{Down, LinkDown};
use crate::sync::{Arc, AtomicUsize, Ordering};
use crate::sys::limits;
use crate::sys::poller::{Interest, Poller, StreamName, Watched};
use crate::sys::socket::{self, PeerTimeout};
use crate::sys::tcp_info::{self, TcpStats};
use crate::transport::auth::{Identity, Secret};
use crate::transport::handshake::{HANDSHAKE_TIMEOUT_FULL, Opening, is_passing};
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
    /// Of the greeting, so many bytes have been written. When the connection was begun.
    Greeting(Greeting, usize, Instant),
    /// The acceptor takes the rail into its stream. Bytes on one that it might not know would be missed at the stream's end.
    Joining(Instant),
    /// Bytes flow.
    Open,
}

impl Stage {
    fn connecting() -> Stage {
        Stage::Connecting { since: Instant::now() }
    }
}

/// A connection on which nothing has come. Somebody else may listen there, or the peer, which does not accept it yet.
#[derive(Debug)]
struct Silent {
    target: Target,
    stream: Watched<Stream>,
    opening: Opening,
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
    /// What was left for the next address, and is gone back to once it is no longer silent.
    silent: Vec<Silent>,
    failures: Failures,
    current: Target,
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
    /// One of them may take another connection.
    is_busy: bool,
}

impl Failures {
    fn add(&mut self, address: SocketAddr, down: &LinkDown) {
        self.texts.push(format!("{address}: {}", down.cause));
        self.is_refused |= matches!(down.kind, Down::Refused | Down::HungUp);
        self.is_busy |= down.kind == Down::Busy;
    }

    /// What they mean where no address is left.
    fn down(&self) -> LinkDown {
        let cause = format!("it cannot be reached at {}", self.texts.join(", "));
        match self {
            Failures { is_busy: true, .. } => LinkDown::busy(cause),
            Failures { is_refused: true, .. } => LinkDown::refused(cause),
            _ => LinkDown::new(cause),
        }
    }
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
        let first = next_attempt(&mut targets, &mut failures, poller, peer, needs, tls.as_ref())?;
        let Some((current, stream)) = first else { return Err(failures.down()) };
        let (poller, silent) = (poller.clone(), Vec::new());
        let (stage, holding) = (Stage::connecting(), Holding::default());
        let (greeting, session) = (None, None);
        Ok(Connection {
            identity,
            tls,
            peer,
            poller,
            targets,
            silent,
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
                &mut Stage::Connecting { since } => match socket::is_connected(self.stream.socket()) {
                    Ok(true) => {
                        socket::tune_tcp(self.stream.socket(), self.timeout)?;
                        self.stream.set(Interest::Read)?;
                        self.stage = Stage::Proving(Opening::new(self.identity.clone(), self.peer).since(since));
                    }
                    Ok(false) if since.elapsed() < self.attempt() => {
                        if !self.turn_back() {
                            return Ok(false);
                        }
                    }
                    Ok(false) => self.try_next(LinkDown::new("no answer"))?,
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                        self.try_next(LinkDown::refused(error.to_string()))?;
                    }
                    Err(error) => self.try_next(error.into())?,
                },
                Stage::Proving(opening) => match opening.drive(&mut *self.stream) {
                    Ok(true) => {
                        self.session = opening.session();
                        self.silent.clear();
                        let greet = |greeting| Stage::Greeting(greeting, 0, opening.begun());
                        self.stage = self.greeting.map_or(Stage::Open, greet);
                    }
                    Ok(false) if opening.is_challenged() => {
                        // The others would wake for nothing. They are tried again if it is not the peer that speaks here.
                        self.targets.extend(self.silent.drain(..).map(|silent| silent.target));
                        return Ok(false);
                    }
                    Ok(false) => {
                        let is_late = opening.begun().elapsed() >= ATTEMPT_TIMEOUT;
                        let goes_on = self.turn_back() || is_late && self.try_another()?;
                        if !goes_on {
                            // If somebody has spoken elsewhere, the peer is there.
                            let is_elsewhere = is_late && self.failures.is_busy;
                            return if is_elsewhere { Err(self.failures.down()) } else { Ok(false) };
                        }
                    }
                    Err(down) => {
                        let down = opening.classify(down, &*self.stream);
                        if down.kind == Down::Busy && opening.is_challenged() {
                            return Err(down);
                        }
                        self.try_next(down)?;
                    }
                },
                Stage::Greeting(greeting, written, begun) => match self.stream.write(&greeting.encode()[*written..]) {
                    Ok(count) if *written + count == GREETING_BYTES => {
                        self.stage = if greeting.rails > 1 { Stage::Joining(*begun) } else { Stage::Open };
                        self.stream.set(Interest::Read)?;
                    }
                    Ok(count) => *written += count,
                    Err(error) if is_passing(&error) => {
                        self.stream.set(Interest::ReadWrite)?;
                        return Ok(false);
                    }
                    Err(error) => return Err(unless_slow(error.into(), *begun)),
                },
                &mut Stage::Joining(begun) => match self.get(&mut [0; JOINED.len()]) {
                    Ok(0) => return Ok(false),
                    Ok(_) => self.stage = Stage::Open,
                    Err(down) => return Err(unless_slow(down, begun)),
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

    /// How long this address may leave a call unanswered: the last for as long as a connection may be silent.
    fn attempt(&self) -> Duration {
        let (PeerTimeout::WhileIdle(limit) | PeerTimeout::Always(limit)) = self.timeout;
        let is_last = self.targets.is_empty() && self.silent.is_empty() && !self.failures.is_busy;
        if is_last { limit.max(ATTEMPT_TIMEOUT) } else { ATTEMPT_TIMEOUT }
    }

    /// Goes on with another address, as this one does not lead there.
    fn try_next(&mut self, down: LinkDown) -> Result<(), LinkDown> {
        self.failures.add(self.current.address, &down);
        if let Some((target, stream)) = self.next_attempt()? {
            (self.current, self.stream, self.stage) = (target, stream, Stage::connecting());
        } else if let Some(Silent { target, stream, opening }) = self.silent.pop() {
            (self.current, self.stream, self.stage) = (target, stream, Stage::Proving(opening));
        } else {
            return Err(self.failures.down());
        }
        Ok(())
    }

    /// Tries the next address beside this one, which is silent. False: there is none now.
    fn try_another(&mut self) -> Result<bool, LinkDown> {
        match self.next_attempt() {
            Ok(Some((target, stream))) => self.go_on_with(target, stream, Stage::connecting()),
            Ok(None) => return Ok(false),
            // It is tried once this process has what that takes.
            Err(down) if down.kind == Down::Lacking => return Ok(false),
            Err(down) => return Err(down),
        }
        Ok(true)
    }

    /// Goes back to a connection that is no longer silent. False: there is none.
    fn turn_back(&mut self) -> bool {
        let speaks = |silent: &Silent| socket::is_readable(silent.stream.as_fd());
        let Some(place) = self.silent.iter().position(speaks) else { return false };
        let Silent { target, stream, opening } = self.silent.remove(place);
        self.go_on_with(target, stream, Stage::Proving(opening));
        true
    }

    /// Goes on with this connection instead of the one that there is, which is kept if it is silent.
    fn go_on_with(&mut self, target: Target, stream: Watched<Stream>, stage: Stage) {
        let target = std::mem::replace(&mut self.current, target);
        let stream = std::mem::replace(&mut self.stream, stream);
        match std::mem::replace(&mut self.stage, stage) {
            Stage::Proving(opening) => self.silent.push(Silent { target, stream, opening }),
            _ => self.targets.push_front(target),
        }
    }

    fn next_attempt(&mut self) -> Result<Option<(Target, Watched<Stream>)>, LinkDown> {
        let needs = (self.identity.size, self.streams);
        next_attempt(&mut self.targets, &mut self.failures, &self.poller, self.peer, needs, self.tls.as_ref())
    }
}

/// What the end of a connection that was begun then means while it is not open: the acceptor hangs up on slow callers too.
fn unless_slow(down: LinkDown, begun: Instant) -> LinkDown {
    match down.kind {
        Down::HungUp if begun.elapsed() >= HANDSHAKE_TIMEOUT_FULL => LinkDown::busy(down.cause),
        _ => down,
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

/// Begins with the next address that the system accepts. None: there is no other.
fn next_attempt(
    targets: &mut VecDeque<Target>,
    failures: &mut Failures,
    poller: &Poller,
    peer: Rank,
    (size, streams): (usize, usize),
    tls: Option<&Tls>,
) -> Result<Option<(Target, Watched<Stream>)>, LinkDown> {
    while let Some(target) = targets.front().copied() {
        let watch = |socket| poller.watch_named(Stream::open(socket, tls), Interest::Write, StreamName::To(peer));
        match socket::begin_tcp(target.address, target.source).and_then(watch) {
            Err(error) if limits::is_shortage(&error) => return Err(shortage::while_opening(error, size, streams)),
            begun => {
                targets.pop_front();
                match begun {
                    Ok(stream) => return Ok(Some((target, stream))),
                    Err(error) => failures.texts.push(format!("{}: {error}", target.address)),
                }
            }
        }
    }
    Ok(None)
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
        self.was_accepted() && !self.stream.holds_bytes()
    }

    fn was_accepted(&self) -> bool {
        matches!(self.stage, Stage::Open)
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

/// How long one address is tried while there are others.
pub(super) const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;
    use crate::config::Config;
    use crate::transport::handshake::{Accepting, HANDSHAKE_TIMEOUT_CROWDED};

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
        connection_with("off", targets, timeout)
    }

    fn connection_with(tls: &str, targets: &[&TcpListener], timeout: Duration) -> Connection {
        let config = Config::resolve_with(&|_| None, &[("tls".to_owned(), tls.to_owned())]).unwrap();
        let tls = Tls::new(&config, &Secret::new([5; 32])).unwrap();
        let identity = Identity { comm: [1; 16], me: Rank(0), size: 2, secret: Secret::new([5; 32]) };
        let target = |listener: &&TcpListener| Target { source: None, address: listener.local_addr().unwrap() };
        let targets = targets.iter().map(target).collect();
        let poller = Poller::new().unwrap();
        Connection::begin(identity, tls, Rank(1), targets, &poller, PeerTimeout::WhileIdle(timeout), 1).unwrap()
    }

    fn age(connection: &mut Connection, age: Duration) {
        connection.stage = Stage::Connecting { since: Instant::now().checked_sub(age).expect("a clock that is older") };
    }

    #[test]
    fn a_caller_that_was_too_slow_for_the_acceptor_calls_again() {
        for (tls, age, kind) in [
            ("off", HANDSHAKE_TIMEOUT_CROWDED, Down::Refused),
            ("off", HANDSHAKE_TIMEOUT_FULL, Down::Busy),
            ("on", HANDSHAKE_TIMEOUT_CROWDED, Down::Busy),
        ] {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let mut connection = connection_with(tls, &[&listener], ATTEMPT_TIMEOUT);
            drop(listener.accept().unwrap());
            let opening = Opening::new(connection.identity.clone(), Rank(1)).aged(age);
            connection.stage = Stage::Proving(opening);
            connection.stream.socket().set_nonblocking(false).unwrap();
            assert_eq!(connection.drive().unwrap_err().kind, kind, "TLS {tls}, {age:?}");
        }
    }

    #[test]
    fn a_caller_that_was_too_slow_to_say_what_it_is_calls_again() {
        let greeting = Greeting { token: [9; 16], rail: 0, rails: 2, generation: 0 };
        for (age, kind) in [(Duration::ZERO, Down::HungUp), (HANDSHAKE_TIMEOUT_FULL, Down::Busy)] {
            let begun = Instant::now().checked_sub(age).expect("a clock that is older");
            for stage in [Stage::Greeting(greeting, 0, begun), Stage::Joining(begun)] {
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
                let mut connection = connection(&[&listener], ATTEMPT_TIMEOUT);
                drop(listener.accept().unwrap());
                connection.stage = stage;
                connection.stream.socket().set_nonblocking(false).unwrap();
                assert_eq!(connection.drive().unwrap_err().kind, kind, "{age:?}");
            }
        }
    }

    /// How a connection ends whose first listener speaks and hangs up as if that were so long after it was begun.
    fn cut_short(targets: &[&TcpListener], age: Duration) -> LinkDown {
        let mut connection = connection(targets, ATTEMPT_TIMEOUT);
        let mut accepting = Accepting::new(Identity { me: Rank(1), ..connection.identity.clone() });
        let (mut theirs, _) = targets[0].accept().unwrap();
        theirs.set_nonblocking(true).unwrap();
        assert_eq!(accepting.drive(&mut theirs), Ok(None), "it has said something");
        let is_challenged = |stage: &Stage| matches!(stage, Stage::Proving(opening) if opening.is_challenged());
        while !is_challenged(&connection.stage) {
            assert_eq!(connection.drive(), Ok(false));
        }
        drop(theirs);
        if let Stage::Proving(opening) = std::mem::replace(&mut connection.stage, Stage::Open) {
            connection.stage = Stage::Proving(opening.aged(age));
        }
        loop {
            if let Err(down) = connection.drive() {
                return down;
            }
        }
    }

    #[test]
    fn a_caller_that_has_to_make_room_calls_again_and_one_that_is_not_believed_does_not() {
        let [listener, other] = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        for (age, kind) in [(Duration::ZERO, Down::Refused), (HANDSHAKE_TIMEOUT_CROWDED, Down::Busy)] {
            let down = cut_short(&[&listener], age);
            assert_eq!(down.kind, kind, "{down}");
        }
        let down = cut_short(&[&listener, &other], HANDSHAKE_TIMEOUT_CROWDED);
        assert_eq!(down.kind, Down::Busy, "{down}");
        other.set_nonblocking(true).unwrap();
        assert!(other.accept().is_err(), "the peer is where somebody spoke");
    }

    #[test]
    fn an_address_that_does_not_answer_is_given_up_for_the_next_and_the_last_at_the_timeout() {
        let (first, _callers) = silent();
        let (second, _others) = silent();
        let mut connection = connection(&[&first, &second], ATTEMPT_TIMEOUT * 3);
        assert_eq!(connection.drive(), Ok(false));
        assert_eq!(connection.current.address, first.local_addr().unwrap());
        for _ in 0..2 {
            age(&mut connection, ATTEMPT_TIMEOUT);
            assert_eq!(connection.drive(), Ok(false));
            assert_eq!(connection.current.address, second.local_addr().unwrap(), "there is no other");
        }
        age(&mut connection, ATTEMPT_TIMEOUT * 3);
        assert!(connection.drive().unwrap_err().cause.contains("no answer"));
    }

    /// As if the connection had been made so long ago, and nothing had come since.
    fn hush(connection: &mut Connection, age: Duration) {
        connection.stage = Stage::Proving(Opening::new(connection.identity.clone(), Rank(1)).aged(age));
    }

    #[test]
    fn an_address_that_says_nothing_is_left_for_the_next_and_gone_back_to_once_it_speaks() {
        for speaks in 0..2 {
            let listeners = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
            let addresses = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
            let mut connection = connection(&listeners.each_ref(), ATTEMPT_TIMEOUT);
            let mut theirs = Vec::new();
            for (listener, next) in listeners.iter().zip([addresses[1]; 2]) {
                theirs.push(listener.accept().unwrap().0);
                assert_eq!(connection.drive(), Ok(false));
                hush(&mut connection, ATTEMPT_TIMEOUT);
                assert_eq!(connection.drive(), Ok(false));
                assert_eq!(connection.current.address, next, "there is no third");
            }
            let mut accepting = Accepting::new(Identity { me: Rank(1), ..connection.identity.clone() });
            theirs[speaks].set_nonblocking(true).unwrap();
            while !connection.drive().unwrap() {
                accepting.drive(&mut theirs[speaks]).unwrap();
            }
            assert_eq!(connection.current.address, addresses[speaks]);
            assert_eq!(theirs[1 - speaks].read(&mut [0]).unwrap(), 0, "the other is hung up on");
        }
    }

    #[test]
    fn who_hangs_up_after_a_long_silence_keeps_nobody_from_the_others() {
        let [first, second] = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        let mut connection = connection(&[&first, &second], ATTEMPT_TIMEOUT);
        let theirs = first.accept().unwrap().0;
        assert_eq!(connection.drive(), Ok(false));
        hush(&mut connection, HANDSHAKE_TIMEOUT_FULL);
        drop(theirs);
        while connection.current.address != second.local_addr().unwrap() {
            assert_eq!(connection.drive(), Ok(false));
        }
        drop(second.accept().unwrap());
        let down = loop {
            if let Err(down) = connection.drive() {
                break down;
            }
        };
        assert_eq!(down.kind, Down::Busy, "the first may be the peer, for which this side was too slow");
    }
}
