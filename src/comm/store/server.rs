//! The server of a [`TcpStore`](super::TcpStore): one thread holds the values and serves all clients. No client can delay
//! the others.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::protocol::{HEADER_BYTES, Header, Reply, Request, identity};
use crate::comm::framing::{ReadBuffer, WriteBuffer, sleep};
use crate::deadline::deadline_after;
use crate::sync::Arc;
use crate::sys::fork::{Origin, Private};
use crate::sys::limits;
use crate::sys::socket;
use crate::transport::auth::{Acceptor, Secret};
use crate::types::Rank;

/// How long a client may take to send a request, and to read the reply.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to stop accepting after the system refused to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many clients may be connected at once; more wait in the kernel.
const CLIENTS_MAX: usize = 16 << 10;

/// How many clients wait for their keys at once, by a connection each, where there are descriptors for more. Others are told at once
/// that theirs is absent, and ask again, so that there is always room for those that set one.
const WAITING_MAX: usize = 1 << 10;

/// How many connections to accept before the connected clients are served again.
const ACCEPTED_AT_ONCE: usize = 256;

/// The bytes of all keys and values together.
pub(super) const VALUES_BYTES_MAX: usize = 256 << 20;

/// What an entry costs beside its bytes.
const ENTRY_COST: usize = 128;

/// The serving thread. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Server {
    /// Its end wakes the thread, which polls the other end.
    stop: UnixStream,
    thread: Option<JoinHandle<()>>,
    origin: Origin,
}

impl Server {
    /// Serves the clients that connect to `listener`, which must not block. With a secret, each must prove that it knows it.
    pub(super) fn start(listener: TcpListener, secret: Option<Secret>) -> io::Result<Server> {
        limits::raise_descriptors();
        let (stop, stopped) = UnixStream::pair()?;
        let values = Values::new(VALUES_BYTES_MAX);
        let private = Private::new(listener.as_fd())?;
        let dispatcher = Dispatcher {
            _private: private,
            listener,
            secret,
            stopped,
            clients: Vec::new(),
            values,
            accept_after: Instant::now(),
            refusal_logged: false,
        };
        let thread = std::thread::Builder::new().name("ncclx_rs_store".to_owned()).spawn(move || dispatcher.run())?;
        Ok(Server { stop, thread: Some(thread), origin: Origin::here() })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A forked child has no such thread.
        let Some(thread) = self.thread.take().filter(|_| self.origin.is_here()) else { return };
        // Also where a child has a copy of the descriptor.
        let _ = self.stop.shutdown(Shutdown::Both);
        if thread.join().is_err() {
            log::error!("the store's thread panicked");
        }
    }
}

/// Keys and values, within a limit of bytes.
pub(super) struct Values {
    values: HashMap<String, Vec<u8>>,
    room: usize,
}

/// How many clients may wait at once: a part of the descriptors that this process may have.
fn waiting_max() -> usize {
    limits::descriptors().map_or(WAITING_MAX, |all| WAITING_MAX.min(usize::try_from(all / 4).unwrap_or(usize::MAX)))
}

impl Values {
    pub(super) fn new(room: usize) -> Self {
        Values { values: HashMap::new(), room }
    }

    pub(super) fn set(&mut self, key: &str, value: &[u8]) -> Reply {
        let cost = |value: &[u8]| key.len() + value.len() + ENTRY_COST;
        let room = self.room + self.values.get(key).map_or(0, |old| cost(old));
        match room.checked_sub(cost(value)) {
            None => Reply::Refused("it is full".to_owned()),
            Some(left) => {
                self.room = left;
                self.values.insert(key.to_owned(), value.to_owned());
                Reply::Done
            }
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<Reply> {
        self.values.get(key).cloned().map(Reply::Value)
    }
}

struct Dispatcher {
    /// Before the listener, which it keeps from forked children.
    _private: Private,
    listener: TcpListener,
    secret: Option<Secret>,
    stopped: UnixStream,
    clients: Vec<Client>,
    values: Values,
    /// No connection is accepted before this, since the system has refused one.
    accept_after: Instant,
    refusal_logged: bool,
}

impl Dispatcher {
    fn run(mut self) {
        loop {
            match self.wait() {
                Ok(Some(ready)) => self.serve(&ready),
                Ok(None) => break,
                Err(error) => {
                    log::error!("the store ends: {error}");
                    break;
                }
            }
            if self.accepts(Instant::now()) {
                self.accept();
            }
        }
        for client in &self.clients {
            // Also where a child has a copy of the descriptor.
            let _ = client.stream.shutdown(Shutdown::Both);
        }
    }

    fn accepts(&self, now: Instant) -> bool {
        self.accept_after <= now && self.clients.len() < CLIENTS_MAX
    }

    /// Sleeps until a socket is ready or a time is reached. Returns what is ready, by client; nothing when the thread must end.
    fn wait(&self) -> io::Result<Option<Vec<PollFlags>>> {
        let now = Instant::now();
        let deadline = self
            .clients
            .iter()
            .map(|client| client.deadline)
            .chain((self.accept_after > now).then_some(self.accept_after))
            .min();
        let mut watched: Vec<PollFd<'_>> = self.clients.iter().map(Client::interest).collect();
        watched.push(PollFd::new(&self.stopped, PollFlags::IN));
        if self.accepts(now) {
            watched.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        sleep(&mut watched, deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(now)))?;
        let mut ready: Vec<PollFlags> = watched.iter().take(self.clients.len() + 1).map(PollFd::revents).collect();
        Ok(ready.pop().is_some_and(|stopped| stopped.is_empty()).then_some(ready))
    }

    /// Advances every client that is ready, whose key was just set, or whose time is over.
    fn serve(&mut self, ready: &[PollFlags]) {
        let now = Instant::now();
        for (client, _) in self.clients.iter_mut().zip(ready).filter(|(_, flags)| !flags.is_empty()) {
            client.step(|client| client.advance(&mut self.values));
        }
        for client in self.clients.iter_mut().filter(|client| client.waits()).skip(waiting_max()) {
            client.deadline = now;
        }
        for client in &mut self.clients {
            client.step(|client| client.answer_or_expire(&self.values, now));
        }
        self.clients.retain(|client| !client.is_closed);
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            match socket::admit(self.listener.accept(), |(stream, from)| Client::admit(stream, from, self.secret)) {
                Ok(Some(client)) => {
                    self.refusal_logged = false;
                    self.clients.push(client);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The client closed the connection before it was accepted.
                Ok(None) => {}
                Err(error) => {
                    if !std::mem::replace(&mut self.refusal_logged, true) {
                        log::warn!("the store cannot take a client in, trying again: {error}");
                    }
                    self.accept_after = Instant::now() + ACCEPT_PAUSE;
                    break;
                }
            }
        }
    }
}

/// What a client does.
enum Stage {
    /// Sends the fixed part of a request.
    Header,
    /// Sends the rest of it.
    Body(Header),
    /// Waits for a key.
    Waiting(String),
    /// Reads its last reply.
    Leaving,
}

/// Why a connection is closed.
pub(super) enum Closing {
    /// The client has closed it, or has had its last reply.
    Done,
    /// The server closes it, for this reason.
    Failed(String),
}

impl From<io::Error> for Closing {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::UnexpectedEof => Closing::Done,
            _ => Closing::Failed(error.to_string()),
        }
    }
}

pub(super) struct Client<S = TcpStream> {
    stream: S,
    from: SocketAddr,
    /// Checks the proof that the client still has to give.
    acceptor: Option<Acceptor>,
    stage: Stage,
    /// When the stage must be over, or the wait for a key.
    deadline: Instant,
    incoming: ReadBuffer,
    outgoing: WriteBuffer,
    pub(super) is_closed: bool,
}

impl Client {
    fn admit(stream: TcpStream, from: SocketAddr, secret: Option<Secret>) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Client::new(stream, from, secret))
    }

    fn interest(&self) -> PollFd<'_> {
        let flags = if self.outgoing.is_empty() { PollFlags::IN } else { PollFlags::OUT };
        PollFd::new(&self.stream, flags)
    }
}

impl<S: Read + Write> Client<S> {
    /// A client on a stream that does not block.
    pub(super) fn new(stream: S, from: SocketAddr, secret: Option<Secret>) -> Self {
        Client {
            stream,
            from: SocketAddr::new(from.ip().to_canonical(), from.port()),
            acceptor: secret.map(|secret| Acceptor::new(identity(Rank(0), secret))),
            stage: Stage::Header,
            deadline: Instant::now() + REQUEST_TIMEOUT,
            incoming: ReadBuffer::default(),
            outgoing: WriteBuffer::default(),
            is_closed: false,
        }
    }

    fn waits(&self) -> bool {
        matches!(self.stage, Stage::Waiting(_))
    }

    /// Runs `step`, unless the connection is closed already.
    pub(super) fn step(&mut self, step: impl FnOnce(&mut Self) -> Result<(), Closing>) {
        if self.is_closed {
            return;
        }
        match step(self) {
            Ok(()) => {}
            Err(Closing::Done) => self.is_closed = true,
            Err(Closing::Failed(cause)) => {
                log::warn!("the store dropped the connection from {}: {cause}", self.from);
                self.is_closed = true;
            }
        }
    }

    /// Writes and reads without blocking, up to the end of one request.
    pub(super) fn advance(&mut self, values: &mut Values) -> Result<(), Closing> {
        self.outgoing.send(&mut self.stream)?;
        while self.outgoing.is_empty() {
            // A client that waits sends nothing, but a read notices that it has closed the connection.
            let expected = match self.stage {
                Stage::Header => HEADER_BYTES,
                Stage::Body(header) => header.body(),
                Stage::Waiting(_) => 1,
                Stage::Leaving => return Err(Closing::Done),
            };
            if !self.incoming.fill(&mut self.stream, expected)? {
                break;
            }
            self.handle(values)?;
            if matches!(self.stage, Stage::Header) {
                break;
            }
        }
        Ok(())
    }

    /// Handles a complete message.
    fn handle(&mut self, values: &mut Values) -> Result<(), Closing> {
        let message = self.incoming.take();
        match std::mem::replace(&mut self.stage, Stage::Header) {
            Stage::Header => {
                let header = message.as_slice().try_into().expect("as many bytes as were asked for");
                match Header::parse(header) {
                    Ok(header) if self.acceptor.is_some() && !header.is_proof() => {
                        return self
                            .refuse("it serves those alone that prove to know its secret (job_secret)".to_owned());
                    }
                    Ok(header) => self.stage = Stage::Body(header),
                    Err(cause) => return self.refuse(cause),
                }
            }
            Stage::Body(header) => match Request::parse(header, &message) {
                Ok(Request::Ping) => self.reply(&Reply::Done)?,
                Ok(Request::Greet) => match &self.acceptor {
                    Some(acceptor) => self.reply(&Reply::Value(acceptor.challenge().to_vec()))?,
                    None => return self.refuse("it has no secret (job_secret)".to_owned()),
                },
                Ok(Request::Prove { answer }) => {
                    match self.acceptor.take().map(|acceptor| acceptor.check(answer, &[0; 32])) {
                        Some(Ok((_, proof))) => self.reply(&Reply::Value(proof.to_vec()))?,
                        Some(Err(error)) => return self.refuse(error.to_string()),
                        None => return Err(Closing::Failed("it speaks out of turn".to_owned())),
                    }
                }
                Ok(Request::Set { key, value }) => self.reply(&values.set(key, value))?,
                Ok(Request::Get { key, wait }) => match values.get(key) {
                    Some(value) => self.reply(&value)?,
                    None => {
                        self.stage = Stage::Waiting(key.to_owned());
                        self.deadline = deadline_after(Instant::now(), wait);
                    }
                },
                Err(cause) => return self.refuse(cause),
            },
            Stage::Waiting(_) | Stage::Leaving => return Err(Closing::Failed("it speaks out of turn".to_owned())),
        }
        Ok(())
    }

    /// Replies to a client whose key is set or whose wait is over; closes a connection that takes too long.
    pub(super) fn answer_or_expire(&mut self, values: &Values, now: Instant) -> Result<(), Closing> {
        if let Stage::Waiting(key) = &self.stage {
            let found = values.get(key);
            if let Some(reply) = found.or((self.deadline <= now).then_some(Reply::Absent)) {
                self.stage = Stage::Header;
                return self.reply(&reply);
            }
        } else if self.deadline <= now {
            let idle = matches!(self.stage, Stage::Header) && self.outgoing.is_empty() && self.incoming.is_empty();
            return Err(if idle {
                Closing::Done
            } else {
                Closing::Failed(format!("it took more than {REQUEST_TIMEOUT:?}"))
            });
        }
        Ok(())
    }

    fn refuse(&mut self, cause: String) -> Result<(), Closing> {
        log::warn!("the store refused {}: {cause}", self.from);
        self.stage = Stage::Leaving;
        self.reply(&Reply::Refused(cause))
    }

    fn reply(&mut self, reply: &Reply) -> Result<(), Closing> {
        self.deadline = Instant::now() + REQUEST_TIMEOUT;
        self.outgoing = WriteBuffer::new(Arc::from(reply.encode()));
        Ok(self.outgoing.send(&mut self.stream)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::fork::testing::{beside_a_child, holds_in_a_child};
    use crate::sys::net;

    #[test]
    fn a_store_ends_beside_a_forked_child_and_the_child_drops_it_without_the_thread() {
        let start = || Server::start(net::listen_anywhere().expect("a port"), None).expect("a store");
        let server = start();
        beside_a_child(|| drop(server));
        let server = start();
        assert!(holds_in_a_child(|| {
            drop(server);
            true
        }));
    }

    #[test]
    fn a_full_store_still_takes_what_replaces() {
        let mut values = Values::new(2 * (ENTRY_COST + 1 + 10));
        assert_eq!(values.set("a", &[0; 10]), Reply::Done);
        assert_eq!(values.set("b", &[0; 11]), Reply::Refused("it is full".to_owned()));
        assert_eq!(values.set("b", &[0; 10]), Reply::Done);
        assert_eq!(values.set("a", &[1; 10]), Reply::Done);
        assert_eq!(values.set("c", &[]), Reply::Refused("it is full".to_owned()));
        assert_eq!(values.get("a"), Some(Reply::Value(vec![1; 10])));
    }
}
