//! The process that keeps the values: one thread for all clients, none of which can hold it up.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::identity;
use super::protocol::{HEADER_BYTES, Header, Reply, Request};
use crate::comm::bootstrap::later;
use crate::comm::framing::{Intake, Outgoing, sleep};
use crate::sync::Arc;
use crate::sys::limits;
use crate::sys::socket;
use crate::transport::auth::{Acceptor, Secret};
use crate::types::Rank;

/// How long a client may take to say what it wants, and to take the answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long to leave callers waiting after the system refused to take one in.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many clients may be connected at once; more wait in the kernel.
const CLIENTS_MAX: usize = 16 << 10;

/// How many callers to take in before those inside have their turn.
const ACCEPTED_AT_ONCE: usize = 256;

/// The bytes of all keys and values together.
pub(super) const SHELF_LIMIT: usize = 256 << 20;

/// What an entry counts beside its bytes.
const ENTRY_COST: usize = 128;

/// A serving thread; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Server {
    /// Its other end wakes the thread when this one closes.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves callers of `listener`, which must not block; those alone that know the secret, if there is one.
    pub(super) fn start(listener: TcpListener, secret: Option<Secret>) -> io::Result<Server> {
        limits::raise_descriptors();
        let (stop, stopped) = UnixStream::pair()?;
        let shelf = Shelf::new(SHELF_LIMIT);
        let desk =
            Desk { listener, secret, stopped, clients: Vec::new(), shelf, rested: Instant::now(), is_refused: false };
        let thread = std::thread::Builder::new().name("ncclx_rs_store".to_owned()).spawn(move || desk.run())?;
        Ok(Server { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("the store's thread panicked");
        }
    }
}

/// Keys and values, within a limit.
pub(super) struct Shelf {
    values: HashMap<String, Vec<u8>>,
    room: usize,
}

impl Shelf {
    pub(super) fn new(room: usize) -> Self {
        Shelf { values: HashMap::new(), room }
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

struct Desk {
    listener: TcpListener,
    secret: Option<Secret>,
    stopped: UnixStream,
    clients: Vec<Client>,
    shelf: Shelf,
    /// When to accept again, after the system refused to.
    rested: Instant,
    /// The system's refusal has been logged.
    is_refused: bool,
}

impl Desk {
    fn run(mut self) {
        loop {
            match self.wait() {
                Ok(Some(ready)) => self.serve(&ready),
                Ok(None) => return,
                Err(error) => {
                    log::error!("the store ends: {error}");
                    return;
                }
            }
            if self.accepts(Instant::now()) {
                self.accept();
            }
        }
    }

    fn accepts(&self, now: Instant) -> bool {
        self.rested <= now && self.clients.len() < CLIENTS_MAX
    }

    /// Sleeps until something happens or is due; what happened, by client, or nothing when the thread must end.
    fn wait(&self) -> io::Result<Option<Vec<PollFlags>>> {
        let now = Instant::now();
        let due = self.clients.iter().map(|client| client.due).chain((self.rested > now).then_some(self.rested)).min();
        let mut watched: Vec<PollFd<'_>> = self.clients.iter().map(Client::interest).collect();
        watched.push(PollFd::new(&self.stopped, PollFlags::IN));
        if self.accepts(now) {
            watched.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        sleep(&mut watched, due.map_or(Duration::MAX, |due| due.saturating_duration_since(now)))?;
        let mut ready: Vec<PollFlags> = watched.iter().take(self.clients.len() + 1).map(PollFd::revents).collect();
        Ok(ready.pop().is_some_and(|stopped| stopped.is_empty()).then_some(ready))
    }

    /// Moves on every client that `ready` marks, that waits for what was just set, or whose time is over.
    fn serve(&mut self, ready: &[PollFlags]) {
        let now = Instant::now();
        for (client, _) in self.clients.iter_mut().zip(ready).filter(|(_, flags)| !flags.is_empty()) {
            client.step(|client| client.advance(&mut self.shelf));
        }
        for client in &mut self.clients {
            client.step(|client| client.look(&self.shelf, now));
        }
        self.clients.retain(|client| !client.gone);
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            match socket::admit(self.listener.accept(), |(stream, from)| Client::admit(stream, from, self.secret)) {
                Ok(Some(client)) => {
                    self.is_refused = false;
                    self.clients.push(client);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The caller hung up before it was its turn.
                Ok(None) => {}
                Err(error) => {
                    if !std::mem::replace(&mut self.is_refused, true) {
                        log::warn!("the store cannot take a client in, trying again: {error}");
                    }
                    self.rested = Instant::now() + ACCEPT_PAUSE;
                    break;
                }
            }
        }
    }
}

/// What a client does.
enum Stage {
    /// Says what kind of request it has.
    Header,
    /// Says the rest of it.
    Body(Header),
    /// Waits for a key.
    Waiting(String),
    /// Takes an answer after which there is no other.
    Leaving,
}

/// How a connection ends.
pub(super) enum End {
    /// By the client, or after its last answer.
    Left,
    /// By the server, which says why.
    Dropped(String),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::UnexpectedEof => End::Left,
            _ => End::Dropped(error.to_string()),
        }
    }
}

pub(super) struct Client<S = TcpStream> {
    stream: S,
    from: SocketAddr,
    /// The proof that it still owes.
    owed: Option<Acceptor>,
    stage: Stage,
    /// When the stage must be over.
    due: Instant,
    intake: Intake,
    outgoing: Outgoing,
    pub(super) gone: bool,
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
    /// A client behind a stream that does not block.
    pub(super) fn new(stream: S, from: SocketAddr, secret: Option<Secret>) -> Self {
        Client {
            stream,
            from: SocketAddr::new(from.ip().to_canonical(), from.port()),
            owed: secret.map(|secret| Acceptor::new(identity(Rank(0), secret))),
            stage: Stage::Header,
            due: Instant::now() + PATIENCE,
            intake: Intake::default(),
            outgoing: Outgoing::default(),
            gone: false,
        }
    }

    /// Takes a step, unless the client is gone already.
    pub(super) fn step(&mut self, step: impl FnOnce(&mut Self) -> Result<(), End>) {
        if self.gone {
            return;
        }
        match step(self) {
            Ok(()) => {}
            Err(End::Left) => self.gone = true,
            Err(End::Dropped(cause)) => {
                log::warn!("the store dropped the connection from {}: {cause}", self.from);
                self.gone = true;
            }
        }
    }

    /// Writes and reads what can be, up to the end of one request.
    pub(super) fn advance(&mut self, shelf: &mut Shelf) -> Result<(), End> {
        self.outgoing.send(&mut self.stream)?;
        while self.outgoing.is_empty() {
            // From a client that waits no byte comes, but this is how its end shows.
            let expected = match self.stage {
                Stage::Header => HEADER_BYTES,
                Stage::Body(header) => header.body(),
                Stage::Waiting(_) => 1,
                Stage::Leaving => return Err(End::Left),
            };
            if !self.intake.fill(&mut self.stream, expected)? {
                break;
            }
            self.take(shelf)?;
            if matches!(self.stage, Stage::Header) {
                break;
            }
        }
        Ok(())
    }

    /// Takes a whole message.
    fn take(&mut self, shelf: &mut Shelf) -> Result<(), End> {
        let message = self.intake.take();
        match std::mem::replace(&mut self.stage, Stage::Header) {
            Stage::Header => {
                let header = message.as_slice().try_into().expect("as many bytes as were asked for");
                match Header::parse(header) {
                    Ok(header) if self.owed.is_some() && !header.is_proof() => {
                        return self
                            .refuse("it serves those alone that prove to know its secret (job_secret)".to_owned());
                    }
                    Ok(header) => self.stage = Stage::Body(header),
                    Err(cause) => return self.refuse(cause),
                }
            }
            Stage::Body(header) => match Request::parse(header, &message) {
                Ok(Request::Ping) => self.reply(&Reply::Done)?,
                Ok(Request::Greet) => match &self.owed {
                    Some(owed) => self.reply(&Reply::Value(owed.challenge().to_vec()))?,
                    None => return self.refuse("it has no secret (job_secret)".to_owned()),
                },
                Ok(Request::Prove { answer }) => match self.owed.take().map(|owed| owed.check(answer, &[0; 32])) {
                    Some(Ok((_, proof))) => self.reply(&Reply::Value(proof.to_vec()))?,
                    Some(Err(error)) => return self.refuse(error.to_string()),
                    None => return Err(End::Dropped("it speaks out of turn".to_owned())),
                },
                Ok(Request::Set { key, value }) => self.reply(&shelf.set(key, value))?,
                Ok(Request::Get { key, wait }) => match shelf.get(key) {
                    Some(value) => self.reply(&value)?,
                    None => {
                        self.stage = Stage::Waiting(key.to_owned());
                        self.due = later(Instant::now(), wait);
                    }
                },
                Err(cause) => return self.refuse(cause),
            },
            Stage::Waiting(_) | Stage::Leaving => return Err(End::Dropped("it speaks out of turn".to_owned())),
        }
        Ok(())
    }

    /// Answers a client that waits if it can be, and gives up one whose time is over.
    pub(super) fn look(&mut self, shelf: &Shelf, now: Instant) -> Result<(), End> {
        if let Stage::Waiting(key) = &self.stage {
            let found = shelf.get(key);
            if let Some(reply) = found.or((self.due <= now).then_some(Reply::Absent)) {
                self.stage = Stage::Header;
                return self.reply(&reply);
            }
        } else if self.due <= now {
            let idle = matches!(self.stage, Stage::Header) && self.outgoing.is_empty() && self.intake.is_empty();
            return Err(if idle { End::Left } else { End::Dropped(format!("it took more than {PATIENCE:?}")) });
        }
        Ok(())
    }

    fn refuse(&mut self, cause: String) -> Result<(), End> {
        log::warn!("the store refused {}: {cause}", self.from);
        self.stage = Stage::Leaving;
        self.reply(&Reply::Refused(cause))
    }

    fn reply(&mut self, reply: &Reply) -> Result<(), End> {
        self.due = Instant::now() + PATIENCE;
        self.outgoing = Outgoing::new(Arc::from(reply.encode()));
        Ok(self.outgoing.send(&mut self.stream)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_shelf_still_takes_what_replaces() {
        let mut shelf = Shelf::new(2 * (ENTRY_COST + 1 + 10));
        assert_eq!(shelf.set("a", &[0; 10]), Reply::Done);
        assert_eq!(shelf.set("b", &[0; 11]), Reply::Refused("it is full".to_owned()));
        assert_eq!(shelf.set("b", &[0; 10]), Reply::Done);
        assert_eq!(shelf.set("a", &[1; 10]), Reply::Done);
        assert_eq!(shelf.set("c", &[]), Reply::Refused("it is full".to_owned()));
        assert_eq!(shelf.get("a"), Some(Reply::Value(vec![1; 10])));
    }
}
