//! A connection between two transports: a Unix socket within a host, TCP otherwise.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendFlags};
use serde::{Deserialize, Serialize};

use crate::rdma::protocol::{self, Answer, Request, Say};
use crate::sys::cma::PeerMemory;
use crate::sys::fork::Private;
use crate::sys::socket;
use crate::transport::auth::{ANSWER_BYTES, Acceptor, CHALLENGE_BYTES, Identity, Opener, PROOF_BYTES, Secret};
use crate::types::Rank;

/// What `bind` returns: how a transport is reached, and the secret that its peer must know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Address {
    pub(super) version: u32,
    /// Names the transport.
    pub(super) id: [u8; 16],
    pub(super) secret: Secret,
    /// The identity of its host.
    pub(super) host: String,
    pub(super) pid: u32,
    /// Where it listens on its host.
    pub(super) unix: Vec<u8>,
    /// Where it listens for other hosts.
    pub(super) tcp: Vec<SocketAddr>,
}

/// The version of [`Address`] and of the protocol.
pub(super) const VERSION: u32 = 3;

impl Address {
    /// Reads what another transport's `bind` has returned.
    pub(super) fn parse(bytes: &[u8]) -> Result<Address, String> {
        let address: Address = serde_json::from_slice(bytes).map_err(|_| format!("{} other bytes", bytes.len()))?;
        if address.version == VERSION { Ok(address) } else { Err(format!("those of version {}", address.version)) }
    }

    /// How the sides of a connection to it prove themselves: the acceptor is rank 0, the opener rank 1.
    pub(super) fn identity(&self, me: Rank) -> Identity {
        Identity { comm: self.id, me, size: 2, secret: self.secret }
    }

    /// The peer in messages.
    pub(super) fn name(&self) -> String {
        match self.tcp.first() {
            Some(address) => format!("process {} at {address}", self.pid),
            None => format!("process {}", self.pid),
        }
    }
}

enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// A connection whose sides have not proved themselves, or have.
pub(super) struct Wire {
    socket: Socket,
    /// Keeps it from forked children, in which it would stay open.
    _private: Private,
}

impl Wire {
    fn new(socket: Socket) -> io::Result<Wire> {
        let private = Private::new(match &socket {
            Socket::Unix(stream) => stream.as_fd(),
            Socket::Tcp(stream) => stream.as_fd(),
        })?;
        Ok(Wire { socket, _private: private })
    }

    /// A connection within the host. It blocks.
    pub(super) fn unix(stream: UnixStream) -> io::Result<Wire> {
        stream.set_nonblocking(false)?;
        Wire::new(Socket::Unix(stream))
    }

    /// A connection to another host. It blocks.
    pub(super) fn tcp(stream: TcpStream, silence: Duration) -> io::Result<Wire> {
        socket::tune_tcp(&stream, socket::PeerTimeout::WhileIdle(silence))?;
        stream.set_nonblocking(false)?;
        Wire::new(Socket::Tcp(stream))
    }

    /// Another handle of the same connection.
    pub(super) fn try_clone(&self) -> io::Result<Wire> {
        Wire::new(match &self.socket {
            Socket::Unix(stream) => Socket::Unix(stream.try_clone()?),
            Socket::Tcp(stream) => Socket::Tcp(stream.try_clone()?),
        })
    }

    pub(super) fn name(&self) -> &'static str {
        match self.socket {
            Socket::Unix(_) => "shared memory",
            Socket::Tcp(_) => "tcp",
        }
    }

    /// The memory of the process at the other end, on the same host.
    pub(super) fn peer_memory(&self) -> Option<PeerMemory> {
        match &self.socket {
            Socket::Unix(stream) => PeerMemory::behind(stream.as_fd()).ok(),
            Socket::Tcp(_) => None,
        }
    }

    /// Ends both directions, also for threads that wait in them.
    pub(super) fn shut_down(&self) {
        // It fails if the peer was faster.
        let _ = match &self.socket {
            Socket::Unix(stream) => stream.shutdown(Shutdown::Both),
            Socket::Tcp(stream) => stream.shutdown(Shutdown::Both),
        };
    }

    fn limit(&self, limit: Option<Duration>) -> io::Result<()> {
        // Zero would mean no limit.
        let limit = limit.map(|limit| limit.max(Duration::from_millis(1)));
        match &self.socket {
            Socket::Unix(stream) => stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit)),
            Socket::Tcp(stream) => stream.set_read_timeout(limit).and_then(|()| stream.set_write_timeout(limit)),
        }
    }

    /// Reads all of `into` before the deadline, also from a side that sends a byte at a time.
    fn read_before(&mut self, into: &mut [u8], deadline: Instant) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            let left = deadline.checked_duration_since(Instant::now()).ok_or(io::ErrorKind::TimedOut)?;
            self.limit(Some(left))?;
            match self.read(&mut into[done..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Proves the opening side of a connection to the transport at `address`, and has that prove itself.
    pub(super) fn open(&mut self, address: &Address, deadline: Instant) -> io::Result<()> {
        let opener = Opener::new(address.identity(Rank(1)), Rank(0));
        let (mut challenge, mut proof) = ([0; CHALLENGE_BYTES], [0; PROOF_BYTES]);
        self.read_before(&mut challenge, deadline)?;
        let answer = opener.answer(&challenge, &[0; 32]).map_err(io::Error::other)?;
        self.write_all(&answer)?;
        self.read_before(&mut proof, deadline)?;
        opener.check(&proof, &[0; 32]).map_err(io::Error::other)?;
        self.limit(None)
    }

    /// The accepting side of [`Wire::open`].
    pub(super) fn accept(&mut self, address: &Address, deadline: Instant) -> io::Result<()> {
        let acceptor = Acceptor::new(address.identity(Rank(0)));
        self.limit(Some(deadline.saturating_duration_since(Instant::now())))?;
        self.write_all(&acceptor.challenge())?;
        let mut answer = [0; ANSWER_BYTES];
        self.read_before(&mut answer, deadline)?;
        let (_, proof) = acceptor.check(&answer, &[0; 32]).map_err(io::Error::other)?;
        self.write_all(&proof)?;
        self.limit(None)
    }
}

impl Wire {
    /// Asks something, with what follows the header, from a side that may block.
    pub(super) fn ask_before(&mut self, request: Request, packed: &[u8], deadline: Instant) -> io::Result<()> {
        self.limit(Some(deadline.saturating_duration_since(Instant::now())))?;
        self.write_all(&request.encode())?;
        self.write_all(packed)?;
        self.limit(None)
    }

    /// Reads one frame of an answer, from a side that may block.
    pub(super) fn answer_before(&mut self, deadline: Instant) -> io::Result<(Say, Vec<u8>)> {
        let mut head = [0; protocol::ANSWER_BYTES];
        self.read_before(&mut head, deadline)?;
        let answer = Answer::decode(&head).map_err(io::Error::other)?;
        let mut bytes = vec![0; answer.len];
        self.read_before(&mut bytes, deadline)?;
        self.limit(None)?;
        Ok((answer.say, bytes))
    }

    /// Reads what is there; none at the stream's end. `WouldBlock` if nothing is.
    pub(super) fn try_read(&self, into: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::net::recv(self.as_fd(), into, RecvFlags::DONTWAIT)?.1)
    }

    /// Writes as much as there is room for. `WouldBlock` if there is none.
    pub(super) fn try_write(&self, from: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.as_fd(), from, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Unix(stream) => stream.as_fd(),
            Socket::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Read for Wire {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::net::recv(self.as_fd(), into, RecvFlags::empty())?.1)
    }
}

impl Write for Wire {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.as_fd(), from, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
