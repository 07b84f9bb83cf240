//! The target's side: a thread that accepts connections, and one for each that has proved itself, which copies.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::rdma::memory::{self, Key, Lease, Refusal, RemoteBuffer};
use crate::rdma::protocol::{Answer, Ask, PIECE_BYTES, READS_MAX, REASON_MAX, REQUEST_BYTES, Request, Say};
use crate::rdma::ucx;
use crate::rdma::wire::{Address, Wire};
use crate::sync::{Arc, Mutex, lock};
use crate::sys::cma::PeerMemory;
use crate::sys::fork::Private;
use crate::sys::lent_bytes::LentBytes;
use crate::sys::socket;
use crate::sys::ucx::RegisteredMemory;
use crate::transport::ucx::Offer;

/// Serves a transport's peers until it is dropped.
pub(super) struct Server {
    shared: Arc<Shared>,
    /// Its end wakes the thread that accepts.
    waker: UnixStream,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    address: Address,
    ucx: Offer,
    silence: Duration,
    connections: Mutex<Connections>,
}

#[derive(Default)]
struct Connections {
    ended: bool,
    next: u64,
    /// The oldest first.
    open: Vec<Open>,
    threads: Vec<JoinHandle<()>>,
}

struct Open {
    number: u64,
    wire: Wire,
    /// Whether its peer has proved that it knows the secret.
    is_proved: bool,
}

impl Connections {
    /// Takes the place of the oldest connection without a proof if there are as many as there may be: whoever knows the secret
    /// proves it at once. False: as many as there may be have proved themselves.
    fn make_room(&mut self) -> bool {
        let proved = self.open.iter().filter(|open| open.is_proved).count();
        if proved >= CONNECTIONS_MAX {
            return false;
        }
        if self.open.len() - proved >= UNPROVED_MAX
            && let Some(oldest) = self.open.iter().position(|open| !open.is_proved)
        {
            self.open.remove(oldest).wire.shut_down();
        }
        true
    }

    /// Notes a proof. False: the connection has had to make room before that.
    fn proved(&mut self, number: u64) -> bool {
        let found = self.open.iter_mut().find(|open| open.number == number);
        found.map(|open| open.is_proved = true).is_some()
    }
}

impl Server {
    /// Serves those who connect to `address`, where the listeners are. Connections to other hosts end after so much silence.
    pub(super) fn start(
        address: Address,
        ucx: Offer,
        unix: UnixListener,
        tcp: TcpListener,
        silence: Duration,
    ) -> io::Result<Server> {
        let shared = Arc::new(Shared { address, ucx, silence, connections: Mutex::default() });
        let (waker, woken) = UnixStream::pair()?;
        let private = [Private::new(unix.as_fd())?, Private::new(tcp.as_fd())?];
        let its = shared.clone();
        let accepting = std::thread::Builder::new().name("ncclx_rs rdma".to_owned());
        let accepting = accepting.spawn(move || {
            accept(&its, &unix, &tcp, woken.as_fd());
            // Before the listeners.
            drop(private);
        })?;
        Ok(Server { shared, waker, accepting: Some(accepting) })
    }

    /// Ends all connections. Returns when no thread serves any more.
    pub(super) fn stop(&mut self) {
        {
            let mut connections = lock(&self.shared.connections);
            connections.ended = true;
            connections.open.iter().for_each(|open| open.wire.shut_down());
        }
        // Wakes the thread that accepts.
        let _ = self.waker.shutdown(std::net::Shutdown::Both);
        let threads =
            self.accepting.take().into_iter().chain(std::mem::take(&mut lock(&self.shared.connections).threads));
        for thread in threads.collect::<Vec<_>>() {
            // A panic was printed when it happened.
            let _ = thread.join();
        }
    }
}

fn accept(shared: &Arc<Shared>, unix: &UnixListener, tcp: &TcpListener, woken: BorrowedFd<'_>) {
    loop {
        let mut watched = [unix.as_fd(), tcp.as_fd(), woken].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        if let Err(error) = rustix::event::poll(&mut watched, None)
            && error != rustix::io::Errno::INTR
        {
            return log::error!("a transport accepts no more connections: {error}");
        }
        if lock(&shared.connections).ended {
            return;
        }
        let local = socket::admit(unix.accept(), |(stream, _)| {
            // Before it takes a thread, and one of the places for connections.
            if !socket::is_of_this_user(stream.as_fd())? {
                // Not a warning, since another user could cause any number of them.
                log::debug!("a transport dropped another user's connection");
                return Ok(None);
            }
            Wire::unix(stream).map(Some)
        });
        let local = local.map(Option::flatten);
        let remote = socket::admit(tcp.accept(), |(stream, _)| Wire::tcp(stream, shared.silence));
        for accepted in [local, remote] {
            match accepted {
                Ok(Some(wire)) => admit(shared, wire),
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    log::warn!("a transport cannot accept a connection now: {error}");
                    std::thread::sleep(SHORTAGE_PAUSE);
                }
            }
        }
    }
}

/// Gives a connection its thread.
fn admit(shared: &Arc<Shared>, wire: Wire) {
    let mut connections = lock(&shared.connections);
    connections.threads.retain(|thread| !thread.is_finished());
    if connections.ended {
        return;
    }
    if !connections.make_room() {
        return log::warn!("a transport refused a connection: it has {CONNECTIONS_MAX} already");
    }
    let number = connections.next;
    connections.next += 1;
    // Held until the thread is listed, so that `stop` finds both.
    let handle = wire.try_clone();
    let its = shared.clone();
    let serving = std::thread::Builder::new().name("ncclx_rs rdma".to_owned());
    let started = handle.and_then(|handle| {
        let thread = serving.spawn(move || {
            serve_connection(&its, number, wire);
            lock(&its.connections).open.retain(|open| open.number != number);
        })?;
        Ok((handle, thread))
    });
    match started {
        Ok((wire, thread)) => {
            connections.open.push(Open { number, wire, is_proved: false });
            connections.threads.push(thread);
        }
        Err(error) => log::warn!("a transport cannot serve a connection: {error}"),
    }
}

fn serve_connection(shared: &Shared, number: u64, mut wire: Wire) {
    if let Err(error) = wire.accept(&shared.address, Instant::now() + HANDSHAKE_TIMEOUT) {
        if !lock(&shared.connections).ended {
            log::warn!("a transport refused a connection through {}: {error}", wire.name());
        }
        return;
    }
    if !lock(&shared.connections).proved(number) {
        return;
    }
    if let Err(error) = serve_proved(wire, &shared.ucx)
        && error.kind() != io::ErrorKind::UnexpectedEof
    {
        log::debug!("a transport's connection has ended: {error}");
    }
}

/// Answers the requests of a connection whose sides have proved themselves, until it ends.
pub(super) fn serve_proved(wire: Wire, offer: &Offer) -> io::Result<()> {
    let peer = wire.peer_memory();
    let mut serving = Serving { wire, peer, offer, ucx: None, exposed: HashMap::new(), piece: vec![0; PIECE_BYTES] };
    let ended = serving.serve();
    serving.wire.shut_down();
    ended
}

/// One connection.
struct Serving<'a> {
    wire: Wire,
    peer: Option<PeerMemory>,
    offer: &'a Offer,
    /// Before what it exposes, so that it ends first.
    ucx: Option<ucx::Accepted>,
    /// What the peer may read through UCX now, how often, and what keeps it.
    exposed: HashMap<(Key, u64, usize), (usize, Exposed)>,
    piece: Vec<u8>,
}

/// Bytes that stay where they are, also when they are deregistered, until the peer does not read them any more.
struct Exposed {
    /// Before the bytes, so that it ends first.
    registered: Arc<RegisteredMemory>,
    _bytes: Arc<LentBytes>,
}

/// How a request ended: why it was refused, if it was.
type Outcome = Result<(), Refused>;

/// Why a request was refused.
enum Refused {
    /// For this reason.
    Because(String),
    /// The bytes lie on a device, and are to be asked for through UCX.
    OnDevice,
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Refused {
        match refusal {
            Refusal::OnDevice => Refused::OnDevice,
            refusal => Refused::Because(refusal.to_string()),
        }
    }
}

impl Serving<'_> {
    /// Answers requests until the peer ends the connection.
    fn serve(&mut self) -> io::Result<()> {
        loop {
            let mut head = [0; REQUEST_BYTES];
            self.receive(&mut head)?;
            let Request { ask, remote, source, packed } = Request::decode(&head).map_err(io::Error::other)?;
            let mut bytes = vec![0; packed];
            self.receive(&mut bytes)?;
            let done = |()| (Say::Done, Vec::new());
            let packed = |bytes| (Say::Packed, bytes);
            let reply: Result<(Say, Vec<u8>), Refused> = match ask {
                Ask::Write => self.write(remote)?.map(done),
                Ask::WriteFrom => match self.write_from(remote, source)? {
                    Some(outcome) => outcome.map(done),
                    None => Ok((Say::CannotRead, Vec::new())),
                },
                Ask::Read => self.read(remote)?.map(done),
                Ask::Locate => {
                    let located = memory::locate(remote.key, remote.address, remote.len);
                    located.map(|located| (Say::Located, located.encode().to_vec())).map_err(Refused::from)
                }
                Ask::Confirm => {
                    self.cover(remote);
                    check(remote).map(done)
                }
                Ask::Pull => self.pull(remote, source, &bytes)?.map(done),
                Ask::Ucx => self.connect(&bytes).map(packed).map_err(Refused::Because),
                Ask::Expose => self.expose(remote)?.map(packed),
            };
            match reply {
                Ok((say, bytes)) => self.answer(say, &bytes)?,
                Err(Refused::OnDevice) => self.answer(Say::OnDevice, &[])?,
                Err(Refused::Because(reason)) => {
                    log::warn!("refused a peer's {ask:?} of {} bytes: {reason}", remote.len);
                    self.answer(Say::Failed, &reason.as_bytes()[..reason.len().min(REASON_MAX)])?;
                }
            }
        }
    }

    /// Reads what the peer sends next. Meanwhile it reads through UCX.
    fn receive(&mut self, into: &mut [u8]) -> io::Result<()> {
        let Some(accepted) = &mut self.ucx else { return self.wire.read_exact(into) };
        let mut done = 0;
        accepted.endpoint.progress();
        while done < into.len() {
            match self.wire.try_read(&mut into[done..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ucx::sleep(&mut accepted.endpoint, &self.wire, PollFlags::IN, None)?;
                    accepted.endpoint.progress();
                    ucx::check(&accepted.endpoint)?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn answer(&mut self, say: Say, bytes: &[u8]) -> io::Result<()> {
        self.wire.write_all(&Answer { say, len: bytes.len() }.encode())?;
        self.wire.write_all(bytes)
    }

    /// Takes the bytes that follow, also those that nobody may write.
    fn write(&mut self, remote: RemoteBuffer) -> io::Result<Outcome> {
        // Before the first piece, so that bytes beyond the end leave those before alone.
        let mut outcome = touch(remote, 0, remote.len, |_, _| ());
        let mut done = 0;
        while done < remote.len {
            let len = PIECE_BYTES.min(remote.len - done);
            let piece = &mut self.piece[..len];
            self.wire.read_exact(piece)?;
            if outcome.is_ok() {
                outcome = touch(remote, done, len, |bytes, offset| bytes.copy_in(offset, piece));
            }
            done += len;
        }
        Ok(outcome)
    }

    /// Reads the bytes in the memory of the peer's process; nothing if that is not possible from here.
    fn write_from(&mut self, remote: RemoteBuffer, source: u64) -> io::Result<Option<Outcome>> {
        let Some(peer) = self.peer else { return Ok(None) };
        let mut outcome = touch(remote, 0, remote.len, |_, _| ());
        let mut done = 0;
        while done < remote.len && outcome.is_ok() {
            let wanted = PIECE_BYTES.min(remote.len - done);
            let piece = &mut self.piece[..wanted];
            let Ok(len) = peer.read(source.wrapping_add(done as u64), piece) else { return Ok(None) };
            // A peer that gives the operation up ends the connection first. So what was read while that is open are the bytes
            // that it meant.
            if socket::is_hung_up(self.wire.as_fd()) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let piece = &piece[..len];
            outcome = touch(remote, done, len, |bytes, offset| bytes.copy_in(offset, piece));
            done += len;
        }
        Ok(Some(outcome))
    }

    /// Connects to an address of UCX. Returns what the peer connects by.
    fn connect(&mut self, address: &[u8]) -> Result<Vec<u8>, String> {
        if self.ucx.is_some() {
            return Err("it is connected through UCX already".to_owned());
        }
        let accepted = ucx::accept(self.offer, address)?;
        Ok(self.ucx.insert(accepted).introduction.clone())
    }

    /// Lets the peer read bytes through UCX. Returns its key to them.
    fn expose(&mut self, remote: RemoteBuffer) -> io::Result<Result<Vec<u8>, Refused>> {
        let (Some(_), Ok(context)) = (&self.ucx, self.offer) else { return Err(stray("a request of UCX without it")) };
        let bytes = match memory::access(remote.key, remote.address, remote.len, |bytes, _| bytes.clone()) {
            Ok(bytes) => bytes,
            Err(refusal) => return Ok(Err(refusal.into())),
        };
        // Reads of one range at a time go by one registration: that of a later one could be another, if the program ends its own
        // meanwhile.
        let (count, exposed) = match self.exposed.entry((remote.key, remote.address, remote.len)) {
            Entry::Occupied(exposed) => exposed.into_mut(),
            Entry::Vacant(place) => match RegisteredMemory::of(context, &bytes) {
                Ok(registered) => place.insert((0, Exposed { registered, _bytes: bytes })),
                Err(error) => return Ok(Err(Refused::Because(error.to_string()))),
            },
        };
        *count += 1;
        let key = exposed.registered.key().to_vec();
        ucx::check_packed("a key", &key)?;
        let reads: usize = self.exposed.values().map(|(count, _)| count).sum();
        if reads > READS_MAX { Err(stray("more reads at once than it may")) } else { Ok(Ok(key)) }
    }

    /// The peer has read bytes.
    fn cover(&mut self, remote: RemoteBuffer) {
        if let Entry::Occupied(mut exposed) = self.exposed.entry((remote.key, remote.address, remote.len)) {
            exposed.get_mut().0 -= 1;
            if exposed.get().0 == 0 {
                exposed.remove();
            }
        }
    }

    /// Reads bytes of the peer through UCX, right to where they are to be.
    fn pull(&mut self, remote: RemoteBuffer, source: u64, key: &[u8]) -> io::Result<Outcome> {
        let (Some(_), Ok(context)) = (&self.ucx, self.offer) else { return Err(stray("a request of UCX without it")) };
        // Before the first piece, so that bytes beyond the end leave those before alone.
        if let Err(reason) = check(remote) {
            return Ok(Err(reason));
        }
        let mut done = 0;
        while done < remote.len {
            let len = PULL_BYTES.min(remote.len - done);
            let offset = done as u64;
            let lease = match memory::lend(remote.key, remote.address.wrapping_add(offset), len) {
                Ok(lease) => lease,
                Err(refusal) => return Ok(Err(refusal.into())),
            };
            // Where that fails, the connection lives on.
            if let Err(error) = RegisteredMemory::of(context, &lease.bytes) {
                return Ok(Err(Refused::Because(error.to_string())));
            }
            let pulled = self.pull_piece((source.wrapping_add(offset), key), &lease, len);
            if pulled.is_err() {
                // Before the lease ends: from here on nothing is written.
                self.ucx = None;
            }
            pulled?;
            done += len;
        }
        Ok(Ok(()))
    }

    fn pull_piece(&mut self, from: (u64, &[u8]), lease: &Lease, len: usize) -> io::Result<()> {
        let accepted = self.ucx.as_mut().expect("it was looked for before");
        let endpoint = &mut accepted.endpoint;
        endpoint.get(0, from, (&lease.bytes, lease.offset, len)).map_err(io::Error::other)?;
        let mut revoked = None;
        loop {
            let ended = endpoint.progress().pop();
            // A peer that gives the operation up ends the connection first.
            if ucx::is_left(&self.wire) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if let Some((_, ended)) = ended {
                return ended.map_err(io::Error::other);
            }
            ucx::check(endpoint)?;
            if lease.is_revoked() && revoked.get_or_insert_with(Instant::now).elapsed() > REVOKED_TIMEOUT {
                return Err(io::Error::other(
                    "memory was deregistered while a peer wrote to it, and the peer does not go on",
                ));
            }
            ucx::sleep(endpoint, &self.wire, PollFlags::RDHUP, Some(REVOKED_CHECK))?;
        }
    }

    fn read(&mut self, remote: RemoteBuffer) -> io::Result<Outcome> {
        if let Err(reason) = touch(remote, 0, remote.len, |_, _| ()) {
            return Ok(Err(reason));
        }
        let mut done = 0;
        while done < remote.len {
            let len = PIECE_BYTES.min(remote.len - done);
            let piece = &mut self.piece[..len];
            if let Err(reason) = touch(remote, done, len, |bytes, offset| bytes.copy_out(offset, piece)) {
                return Ok(Err(reason));
            }
            self.wire.write_all(&Answer { say: Say::Data, len }.encode())?;
            self.wire.write_all(&self.piece[..len])?;
            done += len;
        }
        Ok(Ok(()))
    }
}

/// Touches `len` of the bytes from `offset` on, if the key opens them now and they are the host's.
fn touch(remote: RemoteBuffer, offset: usize, len: usize, touch: impl FnOnce(&LentBytes, usize)) -> Outcome {
    Ok(memory::touch(remote.key, remote.address.wrapping_add(offset as u64), len, touch)?)
}

/// Whether the key opens the bytes now, which may be a device's.
fn check(remote: RemoteBuffer) -> Outcome {
    Ok(memory::access(remote.key, remote.address, remote.len, |_, _| ())?)
}

fn stray(what: &str) -> io::Error {
    io::Error::other(format!("the peer sent {what}"))
}

/// How many bytes are read through UCX between two looks at the key.
const PULL_BYTES: usize = 4 << 20;

/// How long the owner of memory waits for such bytes when it deregisters the memory. Then it ends the connection.
const REVOKED_TIMEOUT: Duration = Duration::from_millis(500);

/// How often a thread that waits for such bytes looks whether the memory was deregistered.
const REVOKED_CHECK: Duration = Duration::from_millis(10);

/// How long a connection may take to prove itself.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(20);

/// How many connections a transport serves at most.
const CONNECTIONS_MAX: usize = 64;

/// How many connections without a proof it has at most besides.
const UNPROVED_MAX: usize = 64;

/// How long a transport waits for resources that it lacks to accept a connection.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);
