//! The target's side: a thread that accepts connections, and one for each that has proved itself, which copies.

use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::rdma::memory::{self, RemoteBuffer};
use crate::rdma::protocol::{Answer, Ask, PIECE_BYTES, REASON_MAX, REQUEST_BYTES, Request, Say};
use crate::rdma::wire::{Address, Wire};
use crate::sync::{Arc, Mutex, lock};
use crate::sys::cma::PeerMemory;
use crate::sys::lent_bytes::LentBytes;
use crate::sys::socket;

/// Serves a transport's peers until it is dropped.
pub(super) struct Server {
    shared: Arc<Shared>,
    /// Its end wakes the thread that accepts.
    waker: UnixStream,
    accepting: Option<JoinHandle<()>>,
}

struct Shared {
    address: Address,
    silence: Duration,
    connections: Mutex<Connections>,
}

#[derive(Default)]
struct Connections {
    ended: bool,
    next: u64,
    open: Vec<(u64, Wire)>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Serves those who connect to `address`, where the listeners are. Connections to other hosts end after so much silence.
    pub(super) fn start(
        address: Address,
        unix: UnixListener,
        tcp: TcpListener,
        silence: Duration,
    ) -> io::Result<Server> {
        let shared = Arc::new(Shared { address, silence, connections: Mutex::default() });
        let (waker, woken) = UnixStream::pair()?;
        let its = shared.clone();
        let accepting = std::thread::Builder::new().name("ncclx_rs rdma".to_owned());
        let accepting = accepting.spawn(move || accept(&its, &unix, &tcp, woken.as_fd()))?;
        Ok(Server { shared, waker, accepting: Some(accepting) })
    }

    /// Ends all connections. Returns when no thread serves any more.
    pub(super) fn stop(&mut self) {
        {
            let mut connections = lock(&self.shared.connections);
            connections.ended = true;
            connections.open.iter().for_each(|(_, wire)| wire.shut_down());
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
    if connections.ended || connections.threads.len() >= CONNECTIONS_MAX {
        return log::warn!("a transport refused a connection: it has {} already", connections.threads.len());
    }
    let number = connections.next;
    connections.next += 1;
    // Held until the thread is listed, so that `stop` finds both.
    let handle = wire.try_clone();
    let its = shared.clone();
    let serving = std::thread::Builder::new().name("ncclx_rs rdma".to_owned());
    let started = handle.and_then(|handle| {
        let thread = serving.spawn(move || {
            serve_connection(&its, wire);
            lock(&its.connections).open.retain(|(other, _)| *other != number);
        })?;
        Ok((handle, thread))
    });
    match started {
        Ok((handle, thread)) => {
            connections.open.push((number, handle));
            connections.threads.push(thread);
        }
        Err(error) => log::warn!("a transport cannot serve a connection: {error}"),
    }
}

fn serve_connection(shared: &Shared, mut wire: Wire) {
    if let Err(error) = wire.accept(&shared.address, Instant::now() + HANDSHAKE_TIMEOUT) {
        if !lock(&shared.connections).ended {
            log::warn!("a transport refused a connection through {}: {error}", wire.name());
        }
        return;
    }
    if let Err(error) = serve_proved(wire)
        && error.kind() != io::ErrorKind::UnexpectedEof
    {
        log::debug!("a transport's connection has ended: {error}");
    }
}

/// Answers the requests of a connection whose sides have proved themselves, until it ends.
pub(super) fn serve_proved(wire: Wire) -> io::Result<()> {
    let mut serving = Serving { peer: wire.peer_memory(), wire, piece: vec![0; PIECE_BYTES] };
    let ended = serving.serve();
    serving.wire.shut_down();
    ended
}

/// One connection.
struct Serving {
    wire: Wire,
    peer: Option<PeerMemory>,
    piece: Vec<u8>,
}

/// How a request ended: the reason, if it was refused.
type Outcome = Result<(), String>;

impl Serving {
    /// Answers requests until the peer ends the connection.
    fn serve(&mut self) -> io::Result<()> {
        loop {
            let mut head = [0; REQUEST_BYTES];
            self.wire.read_exact(&mut head)?;
            let Request { ask, remote, source } = Request::decode(&head).map_err(io::Error::other)?;
            let outcome = match ask {
                Ask::Write => self.write(remote)?,
                Ask::WriteFrom => match self.write_from(remote, source)? {
                    Some(outcome) => outcome,
                    None => {
                        self.answer(Say::CannotRead, &[])?;
                        continue;
                    }
                },
                Ask::Read => self.read(remote)?,
                // The asking side has the address already, and reads there.
                Ask::Locate | Ask::Confirm => touch(remote, 0, remote.len, |_, _| ()),
            };
            match outcome {
                Ok(()) => self.answer(Say::Done, &[])?,
                Err(reason) => {
                    log::warn!("refused a peer's {ask:?} of {} bytes: {reason}", remote.len);
                    self.answer(Say::Failed, &reason.as_bytes()[..reason.len().min(REASON_MAX)])?;
                }
            }
        }
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

/// Accesses `len` of the bytes from `offset` on, if the key opens them now.
fn touch(remote: RemoteBuffer, offset: usize, len: usize, access: impl FnOnce(&LentBytes, usize)) -> Outcome {
    let address = remote.address.wrapping_add(offset as u64);
    memory::access(remote.key, address, len, access).map_err(|refusal| refusal.to_string())
}

/// How long a connection may take to prove itself.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(20);

/// How many connections a transport has at most, those in their handshake included.
const CONNECTIONS_MAX: usize = 64;

/// How long a transport waits for resources that it lacks to accept a connection.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);
