//! The side of the bootstrap that listens: it authenticates joiners and answers them. Rank 0 does so for all ranks; in a
//! large world a [leader](super::groups) for its group, and a rank that passes the table on for those below it in the
//! [tree](super::tree).
//!
//! One thread serves all connections, and no connection can delay the others: sockets do not block, a connection that has not
//! proved itself within [`PROOF_TIMEOUT`] is dropped, and a turn looks only at those that have something.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

use super::groups::Groups;
use super::protocol::{Came, HELLO, Joiner, Keys, ListenerState, Next, Relayed};
use crate::comm::framing::{ReadBuffer, WriteBuffer};
use crate::sync::Arc;
use crate::sys::poller::SLEEP_MAX;
use crate::sys::socket;
use crate::transport::handshake::{Channel, is_passing};
use crate::transport::tls::{Stream, Tls};
use crate::types::Rank;

/// How long a connection may take to prove that it knows the secret.
const PROOF_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a leader may leave its connection open behind the whole answer. The system delivers that also to one that is stopped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long to stop accepting after the system refused to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many connections may be unauthenticated at once, beyond one for each rank; also how many to accept in a row.
const UNAUTHENTICATED_MAX: usize = 256;

/// The event data of the listener; those of connections count from 0.
const LISTENER: u64 = u64::MAX;

/// The event data of a socket of somebody else.
const OTHER: u64 = u64::MAX - 1;

/// How many events are taken at a time.
const EVENTS_MAX: usize = 256;

/// What has become of a rank.
pub(super) enum Event {
    /// It has proved that it knows the secret, to this server or to its leader. The error says why it cannot take part.
    Joined(Rank, Result<Box<Joiner>, String>),
    /// It has its answer, and its connection is closed.
    Answered(Rank),
    /// Its connection has ended before that. With a leader's, the ranks that join through it are gone, too.
    Left(Rank),
}

/// Listens for joiners until it is dropped.
pub(super) struct Server<'a> {
    name: &'a str,
    groups: Groups,
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
    /// Serves those that connect to `listener` for the communicator `name`, and those that join through them.
    pub(super) fn new(
        name: &'a str,
        groups: Groups,
        keys: &'a Keys,
        tls: Option<&'a Tls>,
        listener: TcpListener,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        Ok(Server {
            name,
            groups,
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

    /// Has this socket end the sleep of a turn, too, when something comes by it and when it takes something after it has not.
    pub(super) fn watch_other(&self, socket: &TcpStream) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        Ok(epoll::add(&self.epoll, socket, epoll::EventData::new_u64(OTHER), flags)?)
    }

    /// Sleeps until something happens or `deadline` is reached, and does what there is to do.
    pub(super) fn turn(&mut self, deadline: Instant) -> io::Result<Vec<Event>> {
        let now = Instant::now();
        if self.accept_after.is_some_and(|after| now >= after) {
            self.accept_after = None;
            self.watch_listener(true)?;
        }
        let proof = self.unproved.front().map(|(proof, _)| *proof);
        let until = [proof, self.accept_after].into_iter().flatten().fold(deadline, Instant::min);
        let ready = self.wait(until.saturating_duration_since(now))?;
        let mut events = Vec::new();
        for number in ready.iter().filter(|number| ![LISTENER, OTHER].contains(number)) {
            self.advance(*number, &mut events)?;
        }
        // Last, so that no connection is dropped for its age or for new ones while there is something of it to be heard.
        if ready.len() < EVENTS_MAX {
            self.drop_expired(now);
        }
        if ready.contains(&LISTENER) {
            self.accept()?;
        }
        Ok(events)
    }

    /// Gives their answer to the ranks that have joined and have none. What a socket does not take at once is sent by turns.
    pub(super) fn answer(&mut self, answer: impl Fn(Rank) -> Vec<Arc<[u8]>>) -> io::Result<()> {
        for (number, connection) in &mut self.connections {
            if let Some(rank) = connection.rank
                && !connection.is_answered
            {
                connection.is_answered = true;
                answer(rank).into_iter().for_each(|message| connection.outgoing.push(message));
                watch(&self.epoll, *number, connection)?;
            }
        }
        Ok(())
    }

    /// Drops those that have joined and cannot take part, without an answer.
    pub(super) fn drop_refused(&mut self) {
        let refused = self.connections.iter().filter(|(_, connection)| connection.is_refused);
        for number in refused.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.remove(number);
        }
    }

    /// Gives all that have joined their answer, and lets nobody else in. Gives up those that do not take it until `deadline`.
    pub(super) fn finish(mut self, answer: impl Fn(Rank) -> Vec<Arc<[u8]>>, deadline: Instant) -> io::Result<()> {
        self.accept_after = None;
        self.watch_listener(false)?;
        for (_, number) in std::mem::take(&mut self.unproved) {
            self.drop_unless_authenticated(number);
        }
        self.answer(answer)?;
        let mut until = deadline;
        while !self.connections.is_empty() && Instant::now() < until {
            self.turn(until)?;
            if until == deadline && self.connections.values().all(Connection::is_flushed) {
                until = deadline.min(Instant::now() + CLOSE_TIMEOUT);
            }
        }
        let untaken: BTreeSet<Rank> = self.connections.values().filter_map(|connection| connection.rank).collect();
        if !untaken.is_empty() {
            log::warn!("communicator `{}`: ranks {untaken:?} do not take the outcome of the rendezvous", self.name);
        }
        Ok(())
    }

    /// What is ready, after a sleep of at most `limit`. It may end early, as after a signal.
    fn wait(&self, limit: Duration) -> io::Result<Vec<u64>> {
        let limit = Timespec::try_from(limit.min(SLEEP_MAX)).expect("a day is a time");
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
            match socket::admit(self.listener.accept(), |(stream, from)| Connection::new(stream, from, self.groups)) {
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
        while self.unauthenticated > self.groups.size + UNAUTHENTICATED_MAX
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
            self.remove(number);
        }
    }

    /// Ends a connection. Returns the rank that had joined by it.
    fn remove(&mut self, number: u64) -> Option<Rank> {
        let connection = self.connections.remove(&number)?;
        // Where a forked process holds the socket too, it would be watched for as long as that process has it.
        if let Err(error) = epoll::delete(&self.epoll, connection.stream.socket()) {
            log::debug!("communicator `{}`: a connection that ends is not watched: {error}", self.name);
        }
        self.unauthenticated -= usize::from(connection.rank.is_none());
        connection.rank
    }

    /// Reads and writes what a connection has.
    fn advance(&mut self, number: u64, events: &mut Vec<Event>) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(&number) else { return Ok(()) };
        loop {
            match connection.advance(self.keys, self.tls) {
                Ok(None) if connection.is_over() => {
                    events.extend(self.remove(number).map(Event::Answered));
                    return Ok(());
                }
                Ok(None) => break,
                Ok(Some(Came::Joined(rank, request))) => {
                    connection.rank = Some(rank);
                    self.unauthenticated -= 1;
                    let lacks_tls = self.tls.is_some() && !connection.stream.is_protected();
                    let request = match *request {
                        Ok(_) if lacks_tls => Err(format!("rank {rank} joined without TLS, rank 0 has it")),
                        request => request.map(Box::new).map_err(|cause| format!("rank {rank} failed: {cause}")),
                    };
                    connection.is_refused = request.is_err();
                    events.push(Event::Joined(rank, request));
                    if !connection.state.relays() {
                        break;
                    }
                }
                Ok(Some(Came::Relayed(told))) => events.push(match *told {
                    Relayed { rank, joined: Some(request) } => Event::Joined(rank, request.map(Box::new)),
                    Relayed { rank, joined: None } => Event::Left(rank),
                }),
                Err(cause) => {
                    let (from, name) = (connection.from, self.name);
                    match connection.is_answered {
                        true => {
                            log::warn!(
                                "communicator `{name}`: {from} did not take the outcome of the rendezvous: {cause}"
                            )
                        }
                        false => log::warn!("dropped the connection from {from} to communicator `{name}`: {cause}"),
                    }
                    events.extend(self.remove(number).map(Event::Left));
                    return Ok(());
                }
            }
        }
        watch(&self.epoll, number, connection)
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
    /// That rank cannot take part.
    is_refused: bool,
    is_answered: bool,
    /// The other side sends no more.
    has_ended: bool,
}

impl Connection {
    fn new(stream: TcpStream, from: SocketAddr, groups: Groups) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Connection {
            stream: Stream::plain(stream),
            tls_detected: false,
            from: SocketAddr::new(from.ip().to_canonical(), from.port()),
            state: ListenerState::new(groups),
            incoming: ReadBuffer::default(),
            outgoing: WriteBuffer::default(),
            rank: None,
            is_refused: false,
            is_answered: false,
            has_ended: false,
        })
    }

    fn interest(&self) -> epoll::EventFlags {
        match self.is_flushed() && (!self.is_answered || self.state.relays()) {
            true => epoll::EventFlags::IN,
            false => epoll::EventFlags::IN | epoll::EventFlags::OUT,
        }
    }

    /// Whether every byte for the other side has left this process.
    fn is_flushed(&self) -> bool {
        self.outgoing.is_empty() && !self.stream.holds_bytes()
    }

    /// Whether the other side has its answer, and the connection may be closed. A leader may still be telling of ranks that go:
    /// if that came to a closed connection, the system would reset it, and the end of the answer might be lost.
    fn is_over(&self) -> bool {
        self.is_answered && self.is_flushed() && (self.has_ended || !self.state.relays())
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

    /// Reads and answers what has come. Returns the joiner's request once it is complete, and then what it tells of others.
    fn advance(&mut self, keys: &Keys, tls: Option<&Tls>) -> Result<Option<Came>, String> {
        let closed = |error: io::Error| match error.kind() {
            ErrorKind::UnexpectedEof => "it hung up".to_string(),
            _ => error.to_string(),
        };
        if !self.detect_tls(tls).map_err(closed)? {
            return Ok(None);
        }
        self.send().map_err(closed)?;
        if self.is_answered && self.is_flushed() {
            self.has_ended = self.state.relays() && self.skip().is_err();
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
                Next::Take(came) => return Ok(Some(came)),
            }
        }
        Ok(None)
    }

    /// Reads what has come, to no purpose. The end of the stream is an error.
    fn skip(&mut self) -> io::Result<()> {
        while self.incoming.fill(&mut self.stream, 4096)? {
            self.incoming.take();
        }
        Ok(())
    }

    fn send(&mut self) -> io::Result<()> {
        self.outgoing.send(&mut self.stream)?;
        self.stream.flush().or_else(|error| if is_passing(&error) { Ok(()) } else { Err(error) })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::Shutdown;

    use super::super::protocol::{INFO_BYTES_MAX, JoinRequest, JoinerState, NONCE_BYTES, PROOF_BYTES, frame};
    use super::*;
    use crate::sys::net;

    const LONG: Duration = Duration::from_secs(60);

    /// What a rank says that cannot join, after its proof.
    fn request() -> Vec<u8> {
        let request: JoinRequest = Err("it cannot".to_owned());
        frame(&request, INFO_BYTES_MAX).expect("a short request")
    }

    /// A server for two ranks.
    fn serve(test: impl FnOnce(Server<'_>)) {
        let keys = Keys::random().expect("randomness");
        let listener = net::listen_anywhere().expect("a port");
        test(Server::new("test", Groups::one(2), &keys, None, listener).expect("a server"));
    }

    fn call(server: &Server<'_>) -> TcpStream {
        let port = server.listener.local_addr().expect("it is bound").port();
        TcpStream::connect(("127.0.0.1", port)).expect("it listens")
    }

    /// Lets the server go on until `is_done`.
    fn turn_until(server: &mut Server<'_>, is_done: impl Fn(&Server<'_>) -> bool) {
        let deadline = Instant::now() + LONG;
        while !is_done(server) {
            assert!(Instant::now() < deadline, "it has come to a stop");
            server.turn(deadline).expect("it goes on");
        }
    }

    /// A connection of rank 1, up to its proof and request, which are still to be sent.
    fn begin(server: &mut Server<'_>) -> (TcpStream, Vec<u8>) {
        let (mut stream, number) = (call(server), server.accepted);
        let joiner = JoinerState::new(Rank(1)).expect("randomness");
        stream.write_all(&joiner.hello()).expect("it takes a hello");
        turn_until(server, |server| {
            let connection = server.connections.get(&number);
            connection.is_some_and(|connection| connection.state.expected() == Some(PROOF_BYTES))
        });
        let mut challenge = [0; NONCE_BYTES + PROOF_BYTES];
        stream.read_exact(&mut challenge).expect("a challenge");
        let proof = joiner.answer(server.keys, [0; 32], &challenge).expect("it knows the secret");
        (stream, [proof, request()].concat())
    }

    /// A connection by which rank 1 has joined.
    fn join(server: &mut Server<'_>) -> TcpStream {
        let (mut stream, rest) = begin(server);
        let others = server.unauthenticated - 1;
        stream.write_all(&rest).expect("it takes the rest");
        turn_until(server, |server| server.unauthenticated == others);
        stream
    }

    #[test]
    fn strangers_are_dropped_when_their_time_is_over_or_they_are_too_many() {
        serve(|mut server| {
            let strangers: Vec<_> = (0..3).map(|_| call(&server)).collect();
            turn_until(&mut server, |server| server.accepted == 3);
            let _joined = join(&mut server);
            server.drop_expired(Instant::now());
            assert_eq!((server.connections.len(), server.unauthenticated), (4, 3), "they have time left");
            server.drop_expired(Instant::now() + PROOF_TIMEOUT);
            assert_eq!((server.connections.len(), server.unauthenticated), (1, 0), "one has joined");
            assert!(server.unproved.is_empty());
            drop(strangers);
            let most = server.groups.size + UNAUTHENTICATED_MAX;
            let strangers: Vec<_> = (0..most + 3).map(|_| call(&server)).collect();
            turn_until(&mut server, |server| server.accepted == 4 + most as u64 + 3);
            assert_eq!((server.connections.len(), server.unauthenticated), (1 + most, most));
            drop(strangers);
            turn_until(&mut server, |server| server.unauthenticated == 0);
            assert_eq!(server.connections.len(), 1, "and it is not forgotten");
        });
    }

    #[test]
    fn a_rank_is_heard_before_newer_connections_push_it_out() {
        serve(|mut server| {
            let (mut stream, rest) = begin(&mut server);
            // The listener was ready before this rank is.
            let mut strangers: Vec<_> = (0..10).map(|_| call(&server)).collect();
            turn_until(&mut server, |server| server.accepted == 11);
            strangers.extend((0..server.groups.size + UNAUTHENTICATED_MAX).map(|_| call(&server)));
            stream.write_all(&rest).expect("it takes the rest");
            let events = server.turn(Instant::now() + LONG).expect("it goes on");
            assert!(matches!(&events[..], [Event::Joined(Rank(1), Err(_))]), "{} events", events.len());
        });
    }

    #[test]
    fn a_rank_is_heard_before_its_time_is_over() {
        serve(|mut server| {
            let (mut stream, rest) = begin(&mut server);
            stream.write_all(&rest).expect("it takes the rest");
            // This process has had no core meanwhile.
            server.unproved[0].0 = Instant::now() - Duration::from_millis(1);
            let events = server.turn(Instant::now() + LONG).expect("it goes on");
            assert!(matches!(&events[..], [Event::Joined(Rank(1), Err(_))]), "{} events", events.len());
        });
    }

    #[test]
    fn connections_are_accepted_again_after_a_pause() {
        serve(|mut server| {
            server.accept_after = Some(Instant::now());
            server.watch_listener(false).expect("it is watched");
            let _stranger = call(&server);
            turn_until(&mut server, |server| server.accepted == 1);
        });
    }

    #[test]
    fn a_socket_that_a_forked_process_holds_too_is_not_watched_for_ever() {
        serve(|mut server| {
            let stranger = call(&server);
            turn_until(&mut server, |server| server.accepted == 1);
            let _forked = server.connections[&0].stream.socket().try_clone().expect("a descriptor");
            drop(stranger);
            turn_until(&mut server, |server| server.connections.is_empty());
            assert!(server.wait(Duration::ZERO).expect("it waits").is_empty());
        });
    }

    #[test]
    fn each_rank_gets_one_answer_and_then_the_end() {
        serve(|mut server| {
            let mut stream = join(&mut server);
            // More than a socket takes at once.
            let answer: Arc<[u8]> = vec![7; 32 << 20].into();
            let reader = std::thread::spawn(move || {
                let mut bytes = Vec::new();
                stream.read_to_end(&mut bytes).map(|_| bytes)
            });
            let deadline = Instant::now() + LONG;
            let mut answered = Vec::new();
            while answered.is_empty() {
                server.answer(|_| vec![answer.clone()]).expect("it is watched");
                answered = server.turn(deadline).expect("it goes on");
                assert!(Instant::now() < deadline, "it has come to a stop");
            }
            assert!(matches!(&answered[..], [Event::Answered(Rank(1))]));
            assert!(server.connections.is_empty());
            assert!(reader.join().expect("no panic").expect("an answer") == *answer, "once and whole");
        });
    }

    #[test]
    fn a_rank_that_hangs_up_once_it_has_its_answer_has_not_left() {
        serve(|mut server| {
            let stream = join(&mut server);
            server.answer(|_| vec![vec![7].into()]).expect("it is watched");
            stream.shutdown(Shutdown::Write).expect("it is open");
            let events = server.turn(Instant::now() + LONG).expect("it goes on");
            assert!(matches!(&events[..], [Event::Answered(Rank(1))]), "{} events", events.len());
        });
    }

    #[test]
    fn who_cannot_take_part_can_be_dropped_without_an_answer() {
        serve(|mut server| {
            let mut stream = join(&mut server);
            server.drop_refused();
            assert!(server.connections.is_empty());
            assert_eq!(stream.read(&mut [0]).expect("the end"), 0);
        });
    }

    #[test]
    fn nobody_is_let_in_at_the_end() {
        serve(|mut server| {
            let mut stream = join(&mut server);
            let mut stranger = call(&server);
            server.finish(|_| vec![vec![7].into()], Instant::now() + LONG).expect("it goes on");
            let mut answer = Vec::new();
            assert_eq!(stream.read_to_end(&mut answer).expect("an answer"), 1);
            let end = stranger.read(&mut [0]).expect_err("it was not accepted");
            assert_eq!(end.kind(), ErrorKind::ConnectionReset);
        });
    }
}
