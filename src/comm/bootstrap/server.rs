//! The side of the bootstrap that listens: it authenticates joiners and answers them. Rank 0 does so for all ranks, and in a
//! large world a rank that passes the table on for those below it in the [tree](super::tree).
//!
//! One thread serves all connections, and no connection can delay the others: sockets do not block, a connection that has not
//! proved itself within [`PROOF_TIMEOUT`] is dropped, and a turn looks only at those that have something.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

use super::protocol::{HELLO, JoinRequest, Joiner, Keys, ListenerState, Next};
use crate::comm::framing::{ReadBuffer, WriteBuffer};
use crate::sync::Arc;
use crate::sys::socket;
use crate::transport::handshake::{Channel, is_passing};
use crate::transport::tls::{Stream, Tls};
use crate::types::Rank;

/// How long a connection may take to prove that it knows the secret.
const PROOF_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to stop accepting after the system refused to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many connections may be unauthenticated at once, beyond one for each rank; also how many to accept in a row.
const UNAUTHENTICATED_MAX: usize = 256;

/// The event data of the listener; those of connections count from 0.
const LISTENER: u64 = u64::MAX;

/// How many events are taken at a time.
const EVENTS_MAX: usize = 256;

/// What has become of a rank.
pub(super) enum Event {
    /// It has proved that it knows the secret. The error says why it cannot take part.
    Joined(Rank, Result<Box<Joiner>, String>),
    /// It has its answer, and its connection is closed.
    Answered(Rank),
    /// Its connection has ended before that.
    Left(Rank),
}

/// Listens for joiners until it is dropped.
pub(super) struct Server<'a> {
    name: &'a str,
    size: usize,
    keys: &'a Keys,
    tls: Option<&'a Tls>,
    listener: TcpListener,
    /// None is accepted before this, since the system has refused a connection.
    accept_after: Option<Instant>,
    refusal_logged: bool,
    epoll: OwnedFd,
    connections: HashMap<u64, Connection>,
    /// How many connections have come.
    accepted: u64,
    /// The connections in the order in which they came, and when each has to have proved itself. Some have, or are gone.
    unproved: VecDeque<(Instant, u64)>,
    unauthenticated: usize,
}

impl<'a> Server<'a> {
    /// Serves those that connect to `listener` for the communicator `name` of `size` ranks.
    pub(super) fn new(
        name: &'a str,
        size: usize,
        keys: &'a Keys,
        tls: Option<&'a Tls>,
        listener: TcpListener,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        Ok(Server {
            name,
            size,
            keys,
            tls,
            listener,
            accept_after: None,
            refusal_logged: false,
            epoll,
            connections: HashMap::new(),
            accepted: 0,
            unproved: VecDeque::new(),
            unauthenticated: 0,
        })
    }

    /// Sleeps until something happens or `deadline` is reached, and does what there is to do.
    pub(super) fn turn(&mut self, deadline: Instant) -> io::Result<Vec<Event>> {
        let now = Instant::now();
        self.drop_expired(now);
        if self.accept_after.is_some_and(|after| now >= after) {
            self.accept_after = None;
            self.watch_listener(true)?;
        }
        let proof = self.unproved.front().map(|(proof, _)| *proof);
        let until = [proof, self.accept_after].into_iter().flatten().fold(deadline, Instant::min);
        let mut events = Vec::new();
        for data in self.wait(until.saturating_duration_since(now))? {
            match data {
                LISTENER => self.accept()?,
                number => events.extend(self.advance(number)?),
            }
        }
        Ok(events)
    }

    /// Gives their answer to the ranks that have joined and have none. What a socket does not take at once is sent by turns.
    pub(super) fn answer(&mut self, answer: impl Fn(Rank) -> Arc<[u8]>) -> io::Result<()> {
        for (number, connection) in &mut self.connections {
            if let Some(rank) = connection.rank
                && !connection.is_answered
            {
                connection.is_answered = true;
                connection.outgoing = WriteBuffer::new(answer(rank));
                watch(&self.epoll, *number, connection)?;
            }
        }
        Ok(())
    }

    /// Gives all that have joined their answer, and lets nobody else in. Gives up those that do not take it until `deadline`.
    pub(super) fn finish(mut self, answer: impl Fn(Rank) -> Arc<[u8]>, deadline: Instant) -> io::Result<()> {
        self.accept_after = None;
        self.watch_listener(false)?;
        self.connections.retain(|_, connection| connection.rank.is_some());
        self.unproved.clear();
        self.unauthenticated = 0;
        self.answer(answer)?;
        while !self.connections.is_empty() && Instant::now() < deadline {
            self.turn(deadline)?;
        }
        Ok(())
    }

    /// What is ready, after a sleep of at most `limit`. A signal ends the sleep early.
    fn wait(&self, limit: Duration) -> io::Result<Vec<u64>> {
        let limit =
            Timespec { tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: limit.subsec_nanos().into() };
        let none = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [none; EVENTS_MAX];
        match epoll::wait(&self.epoll, &mut events, Some(&limit)) {
            Ok(count) => Ok(events[..count].iter().map(|event| event.data.u64()).collect()),
            Err(rustix::io::Errno::INTR) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }

    fn accept(&mut self) -> io::Result<()> {
        for _ in 0..UNAUTHENTICATED_MAX {
            match socket::admit(self.listener.accept(), |(stream, from)| Connection::new(stream, from)) {
                Ok(Some(connection)) => self.take_in(connection)?,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The peer closed the connection before it was accepted.
                Ok(None) => {}
                Err(error) => {
                    if !std::mem::replace(&mut self.refusal_logged, true) {
                        let name = self.name;
                        log::warn!("communicator `{name}`: cannot take a joining rank in, trying again: {error}");
                    }
                    self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
                    self.watch_listener(false)?;
                    break;
                }
            }
        }
        // The oldest connections come first.
        while self.unauthenticated > self.size + UNAUTHENTICATED_MAX
            && let Some((_, number)) = self.unproved.pop_front()
        {
            self.drop_unless_authenticated(number);
        }
        Ok(())
    }

    fn take_in(&mut self, connection: Connection) -> io::Result<()> {
        self.refusal_logged = false;
        let number = self.accepted;
        self.accepted += 1;
        epoll::add(&self.epoll, connection.stream.socket(), epoll::EventData::new_u64(number), connection.interest())?;
        self.connections.insert(number, connection);
        self.unproved.push_back((Instant::now() + PROOF_TIMEOUT, number));
        self.unauthenticated += 1;
        Ok(())
    }

    fn watch_listener(&self, is_watched: bool) -> io::Result<()> {
        let flags = if is_watched { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        Ok(epoll::modify(&self.epoll, &self.listener, epoll::EventData::new_u64(LISTENER), flags)?)
    }

    fn drop_expired(&mut self, now: Instant) {
        while let Some((proof, number)) = self.unproved.front().copied() {
            let waits = self.connections.get(&number).is_some_and(|connection| connection.rank.is_none());
            if waits && now < proof {
                break;
            }
            self.unproved.pop_front();
            self.drop_unless_authenticated(number);
        }
    }

    fn drop_unless_authenticated(&mut self, number: u64) {
        if self.connections.get(&number).is_some_and(|connection| connection.rank.is_none()) {
            self.connections.remove(&number);
            self.unauthenticated -= 1;
        }
    }

    /// Reads and writes what a connection has.
    fn advance(&mut self, number: u64) -> io::Result<Option<Event>> {
        let Some(connection) = self.connections.get_mut(&number) else { return Ok(None) };
        let event = match connection.advance(self.keys, self.tls) {
            Ok(None) if connection.is_answered && connection.is_flushed() => {
                let rank = self.connections.remove(&number).and_then(|connection| connection.rank);
                return Ok(rank.map(Event::Answered));
            }
            Ok(None) => None,
            Ok(Some((rank, request))) => {
                connection.rank = Some(rank);
                self.unauthenticated -= 1;
                let lacks_tls = self.tls.is_some() && !connection.stream.is_protected();
                let request = match request {
                    Ok(_) if lacks_tls => Err(format!("rank {rank} joined without TLS, rank 0 has it")),
                    request => request.map(Box::new).map_err(|cause| format!("rank {rank} failed: {cause}")),
                };
                Some(Event::Joined(rank, request))
            }
            Err(cause) => {
                let (from, name, rank) = (connection.from, self.name, connection.rank);
                match connection.is_answered {
                    true => {
                        log::warn!("communicator `{name}`: {from} did not take the outcome of the rendezvous: {cause}")
                    }
                    false => log::warn!("dropped the connection from {from} to communicator `{name}`: {cause}"),
                }
                self.connections.remove(&number);
                self.unauthenticated -= usize::from(rank.is_none());
                return Ok(rank.map(Event::Left));
            }
        };
        watch(&self.epoll, number, connection)?;
        Ok(event)
    }
}

/// Watches a connection for what it waits for.
fn watch(epoll: &OwnedFd, number: u64, connection: &Connection) -> io::Result<()> {
    let data = epoll::EventData::new_u64(number);
    Ok(epoll::modify(epoll, connection.stream.socket(), data, connection.interest())?)
}

/// A connection to the server.
struct Connection {
    stream: Stream,
    /// Whether it is known if the other side speaks TLS.
    tls_detected: bool,
    from: SocketAddr,
    state: ListenerState,
    incoming: ReadBuffer,
    outgoing: WriteBuffer,
    /// The rank that has joined by this connection: it has proved that it knows the secret, and has sent its request.
    rank: Option<Rank>,
    is_answered: bool,
}

impl Connection {
    fn new(stream: TcpStream, from: SocketAddr) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Connection {
            stream: Stream::plain(stream),
            tls_detected: false,
            from: SocketAddr::new(from.ip().to_canonical(), from.port()),
            state: ListenerState::new(),
            incoming: ReadBuffer::default(),
            outgoing: WriteBuffer::default(),
            rank: None,
            is_answered: false,
        })
    }

    fn interest(&self) -> epoll::EventFlags {
        match self.is_flushed() && !self.is_answered {
            true => epoll::EventFlags::IN,
            false => epoll::EventFlags::IN | epoll::EventFlags::OUT,
        }
    }

    /// Whether every byte for the other side has left this process.
    fn is_flushed(&self) -> bool {
        self.outgoing.is_empty() && !self.stream.holds_bytes()
    }

    /// Learns from the first byte whether the other side speaks TLS. False: no byte has come.
    fn detect_tls(&mut self, tls: Option<&Tls>) -> io::Result<bool> {
        if !self.tls_detected
            && let Some(tls) = tls
        {
            let mut first = [0];
            match self.stream.socket().peek(&mut first) {
                Ok(_) if first[0] == HELLO[0] => {}
                Ok(_) => self.stream.protect(tls),
                Err(error) if is_passing(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        self.tls_detected = true;
        Ok(true)
    }

    /// Reads and answers what has come. Returns the joiner's request once it is complete.
    fn advance(&mut self, keys: &Keys, tls: Option<&Tls>) -> Result<Option<(Rank, JoinRequest)>, String> {
        let closed = |error: io::Error| match error.kind() {
            ErrorKind::UnexpectedEof => "it hung up".to_string(),
            _ => error.to_string(),
        };
        if !self.detect_tls(tls).map_err(closed)? {
            return Ok(None);
        }
        self.send().map_err(closed)?;
        if self.is_answered && self.is_flushed() {
            return Ok(None);
        }
        // After the last message, waits for one more byte: none comes, but the read notices a closed connection.
        while self.incoming.fill(&mut self.stream, self.state.expected().unwrap_or(1)).map_err(closed)? {
            match self.state.receive(keys, self.stream.binding(), &self.incoming.take())? {
                Next::Read => {}
                Next::Write(bytes) => {
                    self.outgoing = WriteBuffer::new(bytes.into());
                    self.send().map_err(closed)?;
                }
                Next::Joined(rank, request) => return Ok(Some((rank, *request))),
            }
        }
        Ok(None)
    }

    fn send(&mut self) -> io::Result<()> {
        self.outgoing.send(&mut self.stream)?;
        self.stream.flush().or_else(|error| if is_passing(&error) { Ok(()) } else { Err(error) })
    }
}
