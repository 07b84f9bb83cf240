//! A store over TCP: one process serves it, all processes connect to it.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::interface::Store;
use super::protocol::{REPLY_HEADER_BYTES, Reply, Request, identity};
use super::server::Server;

use crate::comm::framing::{read, write};
use crate::deadline::deadline_after;
use crate::error::StoreError;
use crate::sys::net;
use crate::transport::auth::{AuthError, Opener, Secret};
use crate::transport::tls::Stream;
use crate::types::Rank;

/// How long the server may take to reply, beside the time that the request tells it to wait.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a request tries to connect to a server that has answered before.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long one address may take to accept a connection while others are left to try.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause of a `get` that asks again: 100,000 ranks then ask 20,000 times a second.
const LONGEST_GET_PAUSE: Duration = Duration::from_secs(5);

/// A store over TCP: one process serves it, on a thread of its own, and all processes connect to it.
///
/// Keys and values are bounded: see [`KEY_LIMIT`](super::KEY_LIMIT) and [`VALUE_LIMIT`](super::VALUE_LIMIT). With a
/// secret, both sides of every connection prove that they know it ([`TcpStore::serve_with`]). Without one, every process
/// that can connect can read and write, so the address must be reachable by the job alone.
///
/// ```
/// use std::time::Duration;
/// use ncclx_rs::comm::store::{Store, TcpStore};
///
/// let served = TcpStore::serve("127.0.0.1:0")?;
/// let other = TcpStore::connect(served.address(), Duration::from_secs(10))?;
/// other.set("key", b"value").expect("the store is there");
/// assert_eq!(served.get("key", Duration::ZERO), Ok(b"value".to_vec()));
/// # Ok::<(), ncclx_rs::Error>(())
/// ```
pub struct TcpStore {
    address: String,
    host: String,
    secret: Option<Secret>,
    server: Option<Server>,
}

impl TcpStore {
    /// Serves a store at `address`, a host or IP address with a port. Port 0 takes a free port; `[::]` listens on every
    /// address. The store ends when this is dropped.
    pub fn serve(address: &str) -> Result<TcpStore, StoreError> {
        TcpStore::serve_with(address, None)
    }

    /// As [`TcpStore::serve`]. With a `secret`, every client must prove that it knows it;
    /// [`shared_secret`](crate::comm::bootstrap::shared_secret) returns that of the settings.
    pub fn serve_with(address: &str, secret: Option<Secret>) -> Result<TcpStore, StoreError> {
        let listen = || -> io::Result<(TcpListener, SocketAddr)> {
            let mut last = io::Error::new(ErrorKind::NotFound, "the host has no address");
            // Those of IPv4 first: `localhost` has one of each kind, and others may say 127.0.0.1.
            let mut candidates: Vec<_> = address.to_socket_addrs()?.collect();
            candidates.sort_by_key(SocketAddr::is_ipv6);
            for candidate in candidates {
                match net::listen(candidate).and_then(|listener| Ok((listener.local_addr()?, listener))) {
                    Ok((bound, listener)) => return Ok((listener, bound)),
                    // At another address, others would not find this store, but what has the port here.
                    Err(error) if error.kind() == ErrorKind::AddrInUse => return Err(error),
                    Err(error) => last = error,
                }
            }
            Err(last)
        };
        let (listener, bound) = listen().map_err(|error| cannot_listen(address, &error))?;
        let called = SocketAddr::new(reachable(bound.ip()), bound.port());
        TcpStore::start(listener, called.to_string(), called.ip().to_string(), secret)
    }

    /// Serves a store at `port` of this host, which other hosts know as `host`; on loopback only if `host` is loopback.
    pub(crate) fn serve_as(host: &str, port: u16, secret: Option<Secret>) -> Result<TcpStore, StoreError> {
        let address = with_port(host, port);
        // A host's own name may resolve to loopback there, and to a real address on other hosts.
        if host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback()) {
            return TcpStore::serve_with(&address, secret);
        }
        let listener = net::listen_everywhere(port).map_err(|error| cannot_listen(&address, &error))?;
        // This host may be unable to connect to the address that others use.
        TcpStore::start(listener, with_port(&Ipv4Addr::LOCALHOST.to_string(), port), host.to_owned(), secret)
    }

    fn start(
        listener: TcpListener,
        address: String,
        host: String,
        secret: Option<Secret>,
    ) -> Result<TcpStore, StoreError> {
        let server = Server::start(listener, secret).map_err(|error| cannot_listen(&address, &error))?;
        Ok(TcpStore { address, host, secret, server: Some(server) })
    }

    /// Connects to the store at `address`. Tries for `timeout`, since the store may start later.
    pub fn connect(address: &str, timeout: Duration) -> Result<TcpStore, StoreError> {
        TcpStore::connect_with(address, timeout, None)
    }

    /// As [`TcpStore::connect`], to a store that is served with the same `secret` ([`TcpStore::serve_with`]).
    pub fn connect_with(address: &str, timeout: Duration, secret: Option<Secret>) -> Result<TcpStore, StoreError> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host).to_owned();
        let store = TcpStore { address: address.to_owned(), host, secret, server: None };
        let start = Instant::now();
        let absent = |cause| StoreError::Absent { address: address.to_owned(), waited: timeout, cause };
        let mut stream = store.open(deadline_after(start, timeout)).map_err(absent)?;
        match store.ask(&mut stream, &Request::Ping, deadline_after(Instant::now(), REPLY_TIMEOUT)) {
            Ok(Reply::Done) => Ok(store),
            Ok(Reply::Refused(cause)) => Err(absent(cause)),
            Ok(reply) => Err(absent(format!("something else answers: {reply:?}"))),
            Err(cause) => Err(absent(cause)),
        }
    }

    /// Connects to the store that [`TcpStore::serve_as`] serves.
    pub(crate) fn connect_to(
        host: &str,
        port: u16,
        timeout: Duration,
        secret: Option<Secret>,
    ) -> Result<TcpStore, StoreError> {
        TcpStore::connect_with(&with_port(host, port), timeout, secret)
    }

    /// The address to connect to: a host or IP address with a port.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// A new connection; both sides have proved that they know the secret, if there is one.
    fn open(&self, deadline: Instant) -> Result<Stream, String> {
        let mut stream = self.connect_until(deadline)?;
        let Some(secret) = self.secret else { return Ok(stream) };
        let opener = Opener::new(identity(Rank(1), secret), Rank(0));
        let mut say = |request: &Request<'_>| match self.ask(
            &mut stream,
            request,
            deadline_after(Instant::now(), REPLY_TIMEOUT),
        )? {
            Reply::Value(value) => Ok(value),
            Reply::Refused(cause) => Err(cause),
            reply => Err(format!("it answers {reply:?}")),
        };
        let strange = |_| AuthError::Protocol.to_string();
        let challenge = say(&Request::Greet)?.as_slice().try_into().map_err(strange)?;
        let answer = opener.answer(&challenge, &[0; 32]).map_err(|error| error.to_string())?;
        let proof = say(&Request::Prove { answer: &answer })?.as_slice().try_into().map_err(strange)?;
        opener.check(&proof, &[0; 32]).map_err(|error| error.to_string())?;
        Ok(stream)
    }

    /// A new connection. Tries again until `deadline`.
    fn connect_until(&self, deadline: Instant) -> Result<Stream, String> {
        let mut pause = FIRST_PAUSE;
        loop {
            let cause = match self.connect_once(deadline) {
                Ok(stream) => return Ok(stream),
                Err(error) if error.kind() == ErrorKind::InvalidInput => return Err(error.to_string()),
                Err(error) => error.to_string(),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(cause);
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// A connection to the first of the server's addresses that accepts one.
    fn connect_once(&self, deadline: Instant) -> io::Result<Stream> {
        let mut last = io::Error::new(ErrorKind::NotFound, "the host has no address");
        for address in self.address.to_socket_addrs()? {
            let left = deadline.saturating_duration_since(Instant::now());
            // The system call rejects a timeout of zero.
            let timeout = left.clamp(Duration::from_millis(1), CONNECT_TIMEOUT);
            match TcpStream::connect_timeout(&address, timeout) {
                // Linux connects a socket to itself if it happens to choose the target's port as its own.
                Ok(stream) if stream.local_addr()? == address => last = ErrorKind::ConnectionRefused.into(),
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    return Ok(Stream::plain(stream));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn ask(&self, stream: &mut Stream, request: &Request<'_>, deadline: Instant) -> Result<Reply, String> {
        let words = |error: io::Error| match error.kind() {
            ErrorKind::UnexpectedEof => "it hung up".to_owned(),
            _ => error.to_string(),
        };
        write(stream, &request.encode()?, deadline).map_err(words)?;
        let header = read(stream, REPLY_HEADER_BYTES, deadline).map_err(words)?;
        let header = header.as_slice().try_into().expect("as many bytes as were asked for");
        let bytes = read(stream, Reply::length(header)?, deadline).map_err(words)?;
        Reply::parse(header, bytes)
    }

    /// Sends a request on a new connection, so that requests of several threads do not wait for each other.
    fn request(&self, request: &Request<'_>, wait: Duration) -> Result<Reply, String> {
        let mut stream = self.open(deadline_after(Instant::now(), RECONNECT_TIMEOUT))?;
        match self.ask(&mut stream, request, deadline_after(Instant::now(), wait.saturating_add(REPLY_TIMEOUT)))? {
            Reply::Refused(cause) => Err(cause),
            reply => Ok(reply),
        }
    }

    fn failed(&self, doing: &str, key: &str, cause: impl fmt::Display) -> String {
        format!("the store at `{}` did not {doing} `{key}`: {cause}", self.address)
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        match self.request(&Request::Set { key, value }, Duration::ZERO) {
            Ok(Reply::Done) => Ok(()),
            Ok(reply) => Err(self.failed("set", key, format_args!("it answers {reply:?}"))),
            Err(cause) => Err(self.failed("set", key, cause)),
        }
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        let start = Instant::now();
        loop {
            let wait = timeout.saturating_sub(start.elapsed());
            match self.request(&Request::Get { key, wait }, wait) {
                Ok(Reply::Value(value)) => return Ok(value),
                Ok(Reply::Absent) => {}
                Ok(reply) => return Err(self.failed("get", key, format_args!("it answers {reply:?}"))),
                Err(cause) => return Err(self.failed("get", key, cause)),
            }
            let (waited, left) = (start.elapsed(), timeout.saturating_sub(start.elapsed()));
            if left < Duration::from_millis(1) {
                return Err(self.failed("get", key, format_args!("it was not set within {timeout:?}")));
            }
            // Others wait in its place. It learns of the key a quarter later than they do, at most.
            std::thread::sleep((waited / 4).clamp(FIRST_PAUSE, LONGEST_GET_PAUSE).min(left));
        }
    }

    fn rendezvous_host(&self) -> Option<String> {
        Some(self.host.clone())
    }
}

impl fmt::Debug for TcpStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpStore").field("address", &self.address).field("serves", &self.server.is_some()).finish()
    }
}

/// `host` with `port` as one address, IPv6 addresses in brackets.
fn with_port(host: &str, port: u16) -> String {
    if host.parse::<Ipv6Addr>().is_ok() { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The address at which this process connects to its own listener.
fn reachable(bound: IpAddr) -> IpAddr {
    match bound {
        // A listener on IPv6's "any" accepts IPv4 too, and only IPv4's loopback always exists.
        any if any.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        address => address,
    }
}

fn cannot_listen(address: &str, error: &io::Error) -> StoreError {
    StoreError::Listen { address: address.to_owned(), cause: error.to_string() }
}
