//! Sockets that never block, and the transfer of a file descriptor between processes (`SCM_RIGHTS`).
#![allow(unsafe_code, reason = "SO_PEERCRED, of which rustix cannot say that the process is not visible from here")]

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};

use crate::sys::limits;

/// A listener in the abstract namespace of the process's network namespace. Its name vanishes with the process.
pub fn listen_unix(name: &[u8]) -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&UnixAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Connects to the [`listen_unix`] listener of that name, which succeeds or fails at once. `WouldBlock` if the listener's queue
/// is full.
pub fn connect_unix(name: &[u8]) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new_abstract_name(name)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket.into())
}

/// The process and the user at the other end of a Unix socket, as they were when it connected. The process is 0 if it is not
/// visible from here, as in another container.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of_val(&credentials) as libc::socklen_t;
    let into = (&raw mut credentials).cast();
    // SAFETY: `into` is a place for `len` bytes, which are plain numbers.
    let status =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, into, &raw mut len) };
    if status == 0 { Ok(credentials) } else { Err(io::Error::last_os_error()) }
}

/// Whether the process at the other end of a Unix socket runs as the user that this one runs as.
pub fn is_of_this_user(socket: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(peer_credentials(socket)?.uid == rustix::process::geteuid().as_raw())
}

/// Starts a connection, from `source` if that is an address. It is made, or has failed, when the socket becomes writable.
pub fn begin_tcp(address: SocketAddr, source: Option<IpAddr>) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    if let Some(source) = source {
        socket.bind(&SockAddr::from(SocketAddr::new(source, 0)))?;
    }
    match socket.connect(&SockAddr::from(address)) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => {}
        Err(error) => return Err(error),
    }
    Ok(socket.into())
}

/// Whether a started connection is made; the error if it has failed.
pub fn is_connected(stream: &TcpStream) -> io::Result<bool> {
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    match stream.peer_addr() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(error),
    }
}

/// When a connection is given up because not even the other host's kernel acknowledges anything (`peer_timeout_seconds`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerTimeout {
    /// After this long, if no bytes are under way. Bytes under way may wait for a reader for any time.
    WhileIdle(Duration),
    /// After this long, also if bytes are under way or wait for room.
    Always(Duration),
}

/// The result of accept(2), passed through `prepare`; none if the peer has closed the connection before. An error concerns all
/// connections: `WouldBlock` if none waits, else a resource that the system refuses.
pub fn admit<C, S>(accepted: io::Result<C>, prepare: impl FnOnce(C) -> io::Result<S>) -> io::Result<Option<S>> {
    let gone = |error: io::Error| {
        log::debug!("a connection ended before it was accepted: {error}");
        Ok(None)
    };
    match accepted.map(prepare) {
        Ok(Ok(stream)) => Ok(Some(stream)),
        Ok(Err(error)) if !limits::is_shortage(&error) => gone(error),
        Err(error) if is_of_caller(&error) => gone(error),
        Ok(Err(error)) | Err(error) => Err(error),
    }
}

/// Whether accept(2) has failed for one connection alone, which it takes off the queue. Linux reports that connection's error
/// as accept's own.
fn is_of_caller(error: &io::Error) -> bool {
    use rustix::io::Errno;
    const ENDS: [Errno; 12] = [
        Errno::CONNABORTED,
        Errno::CONNRESET,
        Errno::HOSTDOWN,
        Errno::HOSTUNREACH,
        Errno::INTR,
        Errno::NETDOWN,
        Errno::NETUNREACH,
        Errno::NONET,
        Errno::NOPROTOOPT,
        Errno::OPNOTSUPP,
        Errno::PROTO,
        Errno::TIMEDOUT,
    ];
    Errno::from_io_error(error).is_some_and(|errno| ENDS.contains(&errno))
}

/// Sends small messages at once, and notices a silent peer.
pub fn tune_tcp(stream: &TcpStream, timeout: PeerTimeout) -> io::Result<()> {
    const PROBES: u32 = 4;
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    let (PeerTimeout::WhileIdle(limit) | PeerTimeout::Always(limit)) = timeout;
    // A third of the time passes before the first probe. The system counts in seconds, and not further than this.
    let countable = |time: Duration| time.clamp(Duration::from_secs(1), KEEPALIVE_MAX);
    let first = countable(limit / 3);
    let interval = countable(limit.saturating_sub(first) / PROBES);
    let keepalive = TcpKeepalive::new().with_time(first).with_interval(interval).with_retries(PROBES);
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_keepalive(&keepalive)?;
    match timeout {
        PeerTimeout::WhileIdle(_) => Ok(()),
        PeerTimeout::Always(limit) => socket.set_tcp_user_timeout(Some(limit.min(USER_TIMEOUT_MAX))),
    }
}

/// Has a connection take no more bytes than it sends soon: so many that it has not sent, beside those that are under way.
pub fn limit_unsent(stream: &TcpStream, bytes: u32) -> io::Result<()> {
    socket2::SockRef::from(stream).set_tcp_notsent_lowat(bytes)
}

/// Writes to a connection as much as there is room for. That the other side has closed it is an error and nothing else: writev(2), by
/// which the standard library writes several slices, sends SIGPIPE too, which ends a process unless it is ignored.
pub fn write(stream: BorrowedFd<'_>, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
    let written = match bytes {
        [one] => rustix::net::send(stream, one, SendFlags::NOSIGNAL)?,
        bytes => {
            let most = &bytes[..bytes.len().min(SLICES_MAX)];
            rustix::net::sendmsg(stream, most, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?
        }
    };
    Ok(written)
}

/// Whether the peer has closed a connection on which it sends nothing.
pub fn has_ended(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let mut byte = [0u8];
    match rustix::net::recv(fd, &mut byte[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, count)) => Ok(count == 0),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Whether both directions of a connection have ended.
pub fn is_hung_up(fd: BorrowedFd<'_>) -> bool {
    let mut watched = [PollFd::from_borrowed_fd(fd, PollFlags::empty())];
    rustix::event::poll(&mut watched, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Whether a connection waits to be accepted.
pub fn has_caller(listener: BorrowedFd<'_>) -> bool {
    is_readable(listener)
}

/// Whether something has come that was not read, or the end.
pub fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let mut watched = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    rustix::event::poll(&mut watched, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Hands `fd` over, with a byte. `WouldBlock` when there is no room.
pub fn send_fd(stream: &UnixStream, fd: BorrowedFd<'_>, note: u8) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(stream.as_fd(), &[IoSlice::new(&[note])], &mut control, flags)?;
    Ok(())
}

/// A copy of the file descriptor that [`send_fd`] handed over, and the byte; both stay there until [`drop_fd`]. `WouldBlock`
/// while they have not come; where this process has no descriptor left, the error is that, and the next call may get one.
pub fn look_at_fd(stream: &UnixStream) -> io::Result<(OwnedFd, u8)> {
    let Some(found) = peek_fd(stream)? else {
        // Either this process has no descriptor left, or a security module forbids this one. One may have become free since.
        drop(stream.try_clone()?);
        let forbidden = "no file descriptor came through: the peer sent none, or the system does not allow it";
        return peek_fd(stream)?.ok_or_else(|| io::Error::other(forbidden));
    };
    Ok(found)
}

/// Takes what [`look_at_fd`] has shown off the stream.
pub fn drop_fd(stream: &UnixStream) -> io::Result<()> {
    rustix::net::recv(stream.as_fd(), &mut [0u8][..], RecvFlags::DONTWAIT)?;
    Ok(())
}

/// The next descriptor; none if the system has not let it through.
fn peek_fd(stream: &UnixStream) -> io::Result<Option<(OwnedFd, u8)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    // Peeking leaves a descriptor that cannot be received now in the socket. The system makes a new one each time.
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC | RecvFlags::PEEK;
    let message = rustix::net::recvmsg(stream.as_fd(), &mut [IoSliceMut::new(&mut byte)], &mut control, flags)?;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    if fd.is_none() && message.bytes == 0 {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer closed the connection"));
    }
    Ok(fd.map(|fd| (fd, byte[0])))
}

/// How many slices Linux takes at a time: `UIO_MAXIOV`.
const SLICES_MAX: usize = 1024;

/// The longest time that Linux takes for the first probe, and for the next: `MAX_TCP_KEEPIDLE` and `MAX_TCP_KEEPINTVL`.
const KEEPALIVE_MAX: Duration = Duration::from_secs(32_767);

/// The longest time for bytes under way: milliseconds in a number with a sign.
const USER_TIMEOUT_MAX: Duration = Duration::from_millis(i32::MAX as u64);

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_caller_that_hangs_up_early_is_told_from_what_the_system_refuses() {
        let accepted = |errno: Errno| admit(Err::<u8, _>(errno.into()), Ok);
        let prepared = |errno: Errno| admit(Ok(7), |_| Err::<u8, _>(errno.into()));
        assert!(admit(Ok(7), Ok).is_ok_and(|caller| caller == Some(7)));
        for errno in [Errno::CONNABORTED, Errno::INTR, Errno::PROTO, Errno::HOSTUNREACH, Errno::CONNRESET] {
            assert!(matches!(accepted(errno), Ok(None)), "{errno}");
        }
        for errno in [Errno::INVAL, Errno::NOTCONN, Errno::CONNRESET, Errno::CONNABORTED] {
            assert!(matches!(prepared(errno), Ok(None)), "{errno}");
        }
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM] {
            assert!(accepted(errno).is_err() && prepared(errno).is_err(), "{errno}");
        }
        assert_eq!(accepted(Errno::AGAIN).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        // The caller is still in the queue, so to go on at once would spin.
        assert!(accepted(Errno::PERM).is_err());
    }

    #[test]
    fn any_timeout_suits_a_connection() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        for limit in [Duration::ZERO, Duration::from_secs(60), Duration::from_secs(100_000), Duration::MAX] {
            for timeout in [PeerTimeout::WhileIdle(limit), PeerTimeout::Always(limit)] {
                tune_tcp(&stream, timeout).unwrap_or_else(|error| panic!("{timeout:?}: {error}"));
            }
        }
    }
}
