//! The root's side of the bootstrap: rank 0 authenticates joiners and tells all of them the outcome.
//!
//! One thread serves all connections and no connection can delay the others: sockets do not block, and a connection that
//! has not proved itself within [`PROOF_TIMEOUT`] is dropped.

use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::build::Build;
use super::context::{JoinContext, JoinFailure, ROOT_KEY, RootAddress, RootRecord, StoreRecord};
use super::protocol::{HELLO, JoinRequest, Keys, Next, RankInfo, RootState, shared_secret};
use super::reply::{JoinReply, World};
use super::roster::Roster;
use crate::algo::Tuning;
use crate::comm::framing::{ReadBuffer, WriteBuffer, sleep};
use crate::error::InitError;
use crate::sync::Arc;
use crate::sys::net;
use crate::sys::socket;
use crate::transport::handshake::{Channel, is_passing};
use crate::transport::tls::{Protection, Stream, Tls};
use crate::types::Rank;

/// How long a connection may take to prove that it knows the secret.
const PROOF_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the reply may take to reach all joiners.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// How long to stop accepting after the system refused to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many connections may be unauthenticated at once, beyond one for each rank; also how many to accept in a row.
const UNAUTHENTICATED_MAX: usize = 256;

/// Publishes this rank's address and waits for all ranks.
pub(super) fn serve(
    context: &JoinContext<'_>,
    describe: impl FnOnce(&Keys) -> Result<RankInfo, InitError>,
) -> Result<(Keys, World), InitError> {
    let Prepared { keys, tls, own, listener, address, tuning } = match prepare(context, describe) {
        Ok(prepared) => prepared,
        Err(error) => {
            publish(context, RootRecord::Failed { cause: error.to_string() })?;
            return Err(error);
        }
    };
    publish(context, RootRecord::Listening(address))?;
    let mut server = JoinServer {
        keys: &keys,
        tls: tls.as_ref(),
        listener,
        connections: Vec::new(),
        roster: Roster::new(own),
        accept_after: Instant::now(),
        refusal_logged: false,
    };
    let outcome = server.admit_all(context).map(|ranks| World { ranks, tuning });
    let reply = match &outcome {
        Ok(world) => JoinReply::Complete(world.clone()),
        Err(error) => {
            let failure = JoinFailure::of(error);
            // Before any connection ends: a rank that finds none looks here once more.
            if context.store.keeps_values()
                && let Err(unsaid) = publish(context, RootRecord::Ended(failure.clone()))
            {
                log::warn!("ranks that have not reached rank 0 may not learn why it waits no longer: {unsaid}");
            }
            JoinReply::Failed(failure)
        }
    };
    server.reply_to_all(&reply).map_err(|cause| context.config_error(cause))?;
    Ok((keys, outcome?))
}

/// What rank 0 needs before it can accept joiners.
struct Prepared {
    keys: Keys,
    tls: Option<Tls>,
    own: RankInfo,
    listener: TcpListener,
    address: RootAddress,
    tuning: Tuning,
}

fn prepare(
    context: &JoinContext<'_>,
    describe: impl FnOnce(&Keys) -> Result<RankInfo, InitError>,
) -> Result<Prepared, InitError> {
    let tuning = context.tuning()?;
    let published = context.new_keys()?;
    let shared = shared_secret(context.config)?;
    let keys = published.mixed(shared.as_ref());
    let tls = Tls::new(context.config, &keys.secret)?;
    let own = describe(&keys)?;
    let listener = net::listen_anywhere().map_err(|error| context.os_error("a listening socket", &error))?;
    let port = listener.local_addr().map_err(|error| context.os_error("the listener's port", &error))?.port();
    let address = RootAddress {
        host: context.host.clone(),
        addresses: context.advertised()?,
        port,
        timeout: context.config.connect_timeout,
        keys: published,
        uses_job_secret: shared.is_some(),
        protection: Protection::of(context.config),
    };
    Ok(Prepared { keys, tls, own, listener, address, tuning })
}

fn publish(context: &JoinContext<'_>, root: RootRecord) -> Result<(), InitError> {
    let record = StoreRecord { build: Build::own(), root };
    let value = serde_json::to_vec(&record).map_err(|error| context.store_failed(error.to_string()))?;
    context.store.set(ROOT_KEY, &value).map_err(|cause| context.store_failed(cause))
}

struct JoinServer<'a> {
    keys: &'a Keys,
    tls: Option<&'a Tls>,
    listener: TcpListener,
    connections: Vec<JoinConnection>,
    roster: Roster,
    /// No connection is accepted before this, since the system has refused one.
    accept_after: Instant,
    refusal_logged: bool,
}

impl JoinServer<'_> {
    fn admit_all(&mut self, context: &JoinContext<'_>) -> Result<Vec<RankInfo>, InitError> {
        loop {
            if let Some(table) = self.roster.table() {
                return Ok(table);
            }
            let now = Instant::now();
            if now >= context.deadline {
                return Err(context.missing(self.roster.missing(), context.config.connect_timeout));
            }
            self.connections.retain(|connection| !connection.is_expired(now));
            let ready = self.wait(now, context.deadline).map_err(|error| context.os_error("poll", &error))?;
            self.advance(&ready).map_err(|cause| context.config_error(cause))?;
            if now >= self.accept_after {
                self.accept();
            }
        }
    }

    /// Sleeps until a socket is ready or a time is reached. Returns what is ready, by connection.
    fn wait(&self, now: Instant, deadline: Instant) -> io::Result<Vec<PollFlags>> {
        let pauses = self.accept_after > now;
        let joining = self.connections.iter().filter(|connection| connection.rank.is_none());
        let proofs = joining.map(|connection| connection.proof_deadline);
        let until = proofs.chain([deadline]).chain(pauses.then_some(self.accept_after)).min().unwrap_or(deadline);
        let mut watched: Vec<PollFd<'_>> = self.connections.iter().map(JoinConnection::interest).collect();
        if !pauses {
            watched.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        sleep(&mut watched, until.saturating_duration_since(now))?;
        Ok(watched.iter().take(self.connections.len()).map(PollFd::revents).collect())
    }

    /// Advances every connection that is `ready`. The error is that of an authenticated rank that cannot join.
    fn advance(&mut self, ready: &[PollFlags]) -> Result<(), String> {
        let marked = self.connections.iter_mut().zip(ready).filter(|(_, flags)| !flags.is_empty());
        for (connection, _) in marked {
            match connection.advance(self.keys, self.tls) {
                Ok(None) => {}
                Ok(Some((rank, request))) => {
                    connection.is_authenticated = true;
                    if self.tls.is_some() && !connection.stream.is_protected() && request.is_ok() {
                        return Err(format!("rank {rank} joined without TLS, rank 0 has it"));
                    }
                    self.roster.add(request.map_err(|cause| format!("rank {rank} failed: {cause}"))?)?;
                    connection.rank = Some(rank);
                }
                Err(cause) => {
                    let name = self.roster.name();
                    log::warn!("dropped the connection from {} to communicator `{name}`: {cause}", connection.from);
                    connection.is_closed = true;
                    if let Some(rank) = connection.rank {
                        self.roster.remove(rank);
                    }
                }
            }
        }
        self.connections.retain(|connection| !connection.is_closed);
        Ok(())
    }

    fn accept(&mut self) {
        for _ in 0..UNAUTHENTICATED_MAX {
            match socket::admit(self.listener.accept(), |(stream, from)| JoinConnection::new(stream, from)) {
                Ok(Some(connection)) => {
                    self.refusal_logged = false;
                    self.connections.push(connection);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The peer closed the connection before it was accepted.
                Ok(None) => {}
                Err(error) => {
                    if !std::mem::replace(&mut self.refusal_logged, true) {
                        let name = self.roster.name();
                        log::warn!("communicator `{name}`: cannot take a joining rank in, trying again: {error}");
                    }
                    self.accept_after = Instant::now() + ACCEPT_PAUSE;
                    break;
                }
            }
        }
        let unauthenticated = self.connections.iter().filter(|connection| !connection.is_authenticated).count();
        let mut excess = unauthenticated.saturating_sub(self.roster.size() + UNAUTHENTICATED_MAX);
        // The oldest connections come first.
        self.connections.retain(|connection| {
            let drops = excess > 0 && !connection.is_authenticated;
            excess -= usize::from(drops);
            !drops
        });
    }

    /// Sends `reply` to all authenticated ranks. Gives up those that do not read it in time.
    fn reply_to_all(&mut self, reply: &JoinReply) -> Result<(), String> {
        let message: Arc<[u8]> = reply.message()?.into();
        self.connections.retain(|connection| connection.is_authenticated);
        for connection in &mut self.connections {
            connection.outgoing = WriteBuffer::new(message.clone());
        }
        let deadline = Instant::now() + REPLY_TIMEOUT;
        loop {
            self.connections.retain_mut(|connection| match connection.send() {
                Ok(()) => !connection.is_flushed(),
                Err(error) => {
                    let name = self.roster.name();
                    log::warn!(
                        "communicator `{name}`: {} did not take the outcome of the rendezvous: {error}",
                        connection.from
                    );
                    false
                }
            });
            let left = deadline.saturating_duration_since(Instant::now());
            if self.connections.is_empty() || left.is_zero() {
                return Ok(());
            }
            let sockets = self.connections.iter().map(|connection| connection.stream.socket());
            let mut watched: Vec<PollFd<'_>> = sockets.map(|socket| PollFd::new(socket, PollFlags::OUT)).collect();
            sleep(&mut watched, left).map_err(|error| error.to_string())?;
        }
    }
}

/// A connection to the root, unauthenticated at first.
struct JoinConnection {
    stream: Stream,
    /// Whether it is known if the other side speaks TLS.
    tls_detected: bool,
    from: SocketAddr,
    proof_deadline: Instant,
    state: RootState,
    incoming: ReadBuffer,
    outgoing: WriteBuffer,
    /// The other side has proved that it knows the secret, and has sent its request.
    is_authenticated: bool,
    /// The rank that has joined by this connection.
    rank: Option<Rank>,
    is_closed: bool,
}

impl JoinConnection {
    fn new(stream: TcpStream, from: SocketAddr) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(JoinConnection {
            stream: Stream::plain(stream),
            tls_detected: false,
            from: SocketAddr::new(from.ip().to_canonical(), from.port()),
            proof_deadline: Instant::now() + PROOF_TIMEOUT,
            state: RootState::new(),
            incoming: ReadBuffer::default(),
            outgoing: WriteBuffer::default(),
            is_authenticated: false,
            rank: None,
            is_closed: false,
        })
    }

    fn is_expired(&self, now: Instant) -> bool {
        !self.is_authenticated && now >= self.proof_deadline
    }

    fn interest(&self) -> PollFd<'_> {
        let flags = if self.is_flushed() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
        PollFd::new(self.stream.socket(), flags)
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
