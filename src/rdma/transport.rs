//! A transport: one's own side of a pair of connections between two processes.

use std::fmt;
use std::io;
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::comm::address;
use crate::config::{Config, TransportChoice};
use crate::error::UsageError;
use crate::rdma::client::{Client, UCX};
use crate::rdma::error::RdmaError;
use crate::rdma::memory::check_range;
use crate::rdma::pending::Pending;
use crate::rdma::server::Server;
use crate::rdma::span::{Kind, Span};
use crate::rdma::ucx;
use crate::rdma::wire::{Address, VERSION, Wire};
use crate::sync::{Arc, Mutex, lock};
use crate::sys::fork::Origin;
use crate::sys::ucx::{Context, Endpoint};
use crate::sys::{cma, net, random, socket};
use crate::transport::auth::Secret;
use crate::transport::tls::Tls;
use crate::transport::ucx::{Need, Offer, offer};

/// Reads and writes the memory of one other process, and lets that one access what this process has registered. Dropping it ends
/// what is in flight.
pub struct Transport {
    config: Config,
    packages: Vec<PathBuf>,
    origin: Origin,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    bound: Option<(Vec<u8>, Server)>,
    client: Peer,
}

/// How far the connection to the peer is.
#[derive(Default)]
enum Peer {
    #[default]
    None,
    /// A thread connects, without the lock.
    Connecting,
    Connected(Client),
    /// Closed before it was connected.
    Closed,
}

impl Peer {
    fn client(&self) -> Option<&Client> {
        if let Peer::Connected(client) = self { Some(client) } else { None }
    }
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.state);
        let peer = state.client.client().map(Client::peer);
        f.debug_struct("Transport").field("bound", &state.bound.is_some()).field("peer", &peer).finish_non_exhaustive()
    }
}

impl Transport {
    /// A transport that is not bound. Of the settings it heeds `transport`, `ucx`, `single_copy_bytes`, `socket_ifname`, `tls`,
    /// `timeout_seconds` and `peer_timeout_seconds`.
    ///
    /// # Errors
    /// A setting is not valid.
    pub fn new(hints: &[(String, String)]) -> Result<Transport, RdmaError> {
        Transport::with_packages(hints, Vec::new())
    }

    /// As [`Transport::new`]. UCX is also looked for in these folders of Python packages.
    ///
    /// # Errors
    /// A setting is not valid.
    pub fn with_packages(hints: &[(String, String)], packages: Vec<PathBuf>) -> Result<Transport, RdmaError> {
        let config = Config::resolve(hints)?;
        Ok(Transport { config, packages, origin: Origin::here(), state: Mutex::default() })
    }

    /// How long an operation may take if the caller does not say.
    pub fn default_timeout(&self) -> Duration {
        self.config.timeout
    }

    /// Begins to serve a peer. Returns what the peer connects by. It contains a secret: only the peer may see it. A second call
    /// returns the same.
    ///
    /// # Errors
    /// The host has no address to advertise, or the system refuses a socket or thread.
    pub fn bind(&self) -> Result<Vec<u8>, RdmaError> {
        self.check_process("bind")?;
        let mut state = lock(&self.state);
        if let Some((bytes, _)) = &state.bound {
            return Ok(bytes.clone());
        }
        let interfaces = net::interfaces().map_err(|cause| os("bind", &cause))?;
        let hosts = address::advertised(&interfaces, self.config.socket_interfaces.as_deref(), None)?;
        let tcp = net::listen_anywhere().map_err(|cause| os("bind", &cause))?;
        let port = tcp.local_addr().map_err(|cause| os("bind", &cause))?.port();
        let lacking = |cause| os("bind", &cause);
        let id: [u8; 16] = random::bytes().map_err(lacking)?;
        let mut name = b"ncclx_rs_rdma_".to_vec();
        name.extend(id.iter().flat_map(|byte| format!("{byte:02x}").into_bytes()));
        let unix = socket::listen_unix(&name).map_err(|cause| os("bind", &cause))?;
        let secret = Secret::new(random::bytes().map_err(lacking)?);
        // What other hosts send would travel in the clear.
        let has_tls = Tls::new(&self.config, &secret)?.is_some();
        let is_open = self.config.transport.has_tcp() && !has_tls;
        let ucx = self.ucx("bind", has_tls)?;
        let address = Address {
            version: VERSION,
            id,
            secret,
            host: net::host_identity(),
            pid: std::process::id(),
            unix: name,
            tcp: hosts.into_iter().filter(|_| is_open).map(|host| (host, port).into()).collect(),
        };
        let bytes = serde_json::to_vec(&address).expect("an address is plain data");
        self.allow_readers();
        let server =
            Server::start(address, ucx, unix, tcp, self.config.peer_timeout).map_err(|cause| os("bind", &cause))?;
        state.bound = Some((bytes.clone(), server));
        Ok(bytes)
    }

    /// Connects to the transport whose `bind` has returned `peer`, and waits for it up to `timeout`.
    ///
    /// # Errors
    /// These are other bytes, the transport is connected already, or the peer cannot be reached or is another one.
    pub fn connect(&self, peer: &[u8], timeout: Duration) -> Result<(), RdmaError> {
        self.check_process("connect")?;
        let usage = |argument, expected: &str, got: String| UsageError {
            operation: "connect".to_owned(),
            argument,
            expected: expected.to_owned(),
            got,
        };
        let address =
            Address::parse(peer).map_err(|got| usage("peer", "the bytes that the peer's bind returned", got))?;
        let is = |got: String| usage("self", "a transport that was not connected", got);
        {
            let mut state = lock(&self.state);
            match &state.client {
                Peer::Connected(client) => return Err(is(format!("one of {}", client.peer())).into()),
                Peer::Connecting => return Err(is("one that another thread connects".to_owned()).into()),
                Peer::Closed => return Err(is("one that was closed".to_owned()).into()),
                Peer::None => state.client = Peer::Connecting,
            }
        }
        let deadline = Instant::now().checked_add(timeout).unwrap_or_else(|| Instant::now() + DAY);
        let mut started = self.reach(&address, deadline).and_then(|(wire, ucx)| {
            Client::start(wire, ucx, address.name(), self.config.single_copy_bytes > 0)
                .map_err(|cause| os("connect", &cause))
        });
        let mut state = lock(&self.state);
        if let Peer::Closed = state.client {
            drop(state);
            if let Ok(client) = &mut started {
                client.stop();
            }
            let cause = "the transport was closed meanwhile".to_owned();
            return Err(RdmaError::NotConnected { operation: "connect", cause });
        }
        state.client = Peer::None;
        state.client = Peer::Connected(started?);
        Ok(())
    }

    /// UCX, where the settings want it.
    fn ucx(&self, operation: &'static str, has_tls: bool) -> Result<Offer, RdmaError> {
        let offer = offer(&self.config, &self.packages, has_tls);
        match &offer {
            Err(cause) if self.config.transport == TransportChoice::Ucx => {
                Err(RdmaError::Ucx { operation, cause: cause.clone() })
            }
            Err(cause) => {
                log::debug!("{operation}: no UCX: {cause}");
                Ok(offer)
            }
            Ok(_) => Ok(offer),
        }
    }

    /// The peer reads long spans where they lie.
    fn allow_readers(&self) {
        if self.config.single_copy_bytes > 0 {
            cma::allow_readers();
        }
    }

    /// Opens a connection in the best way that works.
    fn reach(&self, address: &Address, deadline: Instant) -> Result<(Wire, Option<Endpoint>), RdmaError> {
        let has_tls = Tls::new(&self.config, &address.secret)?.is_some();
        let ucx = self.ucx("connect", has_tls)?;
        self.allow_readers();
        let is_forced = self.config.transport == TransportChoice::Ucx;
        let mut failures = Vec::new();
        let mut attempt = |way: &str, open: &dyn Fn() -> io::Result<Wire>, limit, context: Option<&Arc<Context>>| {
            let opened = open().and_then(|mut wire| {
                wire.open(address, limit)?;
                let Some(context) = context else { return Ok((wire, None)) };
                let (need, deadline) = match is_forced {
                    true => (Need::Any, deadline),
                    false => (Need::Better, deadline.min(Instant::now() + ATTEMPT_TIMEOUT)),
                };
                let endpoint = ucx::open(&mut wire, context, need, deadline)?;
                Ok((wire, Some(endpoint)))
            });
            opened.map_err(|error| failures.push(format!("{way}: {error}"))).ok()
        };
        if self.config.transport.has_shm() && address.host == net::host_identity() {
            let open = || socket::connect_unix(&address.unix).and_then(Wire::unix);
            // Within a host, UCX does no more than shared memory.
            let context = ucx.as_ref().ok().filter(|_| is_forced);
            if let Some(found) = attempt("on this host", &open, deadline, context) {
                return Ok(found);
            }
        }
        let tcp = if self.config.transport.has_tcp() && !has_tls { address.tcp.as_slice() } else { &[] };
        for (index, target) in tcp.iter().enumerate() {
            // What is silent may be somebody else, as long as there is another address.
            let is_last = index + 1 == tcp.len();
            let limit = if is_last { deadline } else { deadline.min(Instant::now() + ATTEMPT_TIMEOUT) };
            let open = || {
                let left = deadline
                    .saturating_duration_since(Instant::now())
                    .min(ATTEMPT_TIMEOUT)
                    .max(Duration::from_millis(1));
                TcpStream::connect_timeout(target, left).and_then(|s| Wire::tcp(s, self.config.peer_timeout))
            };
            if let Ok(context) = &ucx {
                if let Some(found) = attempt(&target.to_string(), &open, limit, Some(context)) {
                    return Ok(found);
                }
                if is_forced {
                    continue;
                }
                log::info!("{} is not reached through UCX", address.name());
            }
            if let Some(found) = attempt(&target.to_string(), &open, limit, None) {
                return Ok(found);
            }
        }
        if failures.is_empty() {
            failures
                .push("the settings `transport` and `tls` of the two leave no way, TCP being without TLS".to_owned());
        }
        Err(RdmaError::Unreachable { peer: address.name(), cause: failures.join("; ") })
    }

    /// What `tell` says of the connection, unless there is none, as in a forked child.
    fn connection<T>(&self, tell: impl FnOnce(&Client) -> T) -> Option<T> {
        // Its lock may be held for ever.
        if !self.origin.is_here() {
            return None;
        }
        lock(&self.state).client.client().map(tell)
    }

    /// Whether it is connected.
    pub fn is_connected(&self) -> bool {
        self.connection(|client| client.ended().is_none()).unwrap_or(false)
    }

    /// How bytes move, once it is connected: `shared memory`, `tcp` or `ucx`.
    pub fn wire(&self) -> Option<&'static str> {
        self.connection(Client::wire)
    }

    /// What UCX goes through, once it is connected by `ucx`: each its name of the way and the device, as `tcp/eth0`. Nothing
    /// where UCX is older than 1.13, which does not tell.
    pub fn devices(&self) -> Vec<String> {
        self.connection(|client| client.devices().to_vec()).unwrap_or_default()
    }

    /// Begins to write or read spans, and returns at once. The operation ends when all spans have, well or badly. What is in flight
    /// at the same time has no order. A timeout, unlike a refusal by the peer, ends the transport too.
    ///
    /// # Errors
    /// A span is not inside its memory, or longer than the remote one, or a CUDA device's where the transport does not go through UCX;
    /// the transport is not connected.
    pub fn post(&self, kind: Kind, spans: Vec<Span>, timeout: Duration) -> Result<Pending, RdmaError> {
        let operation = kind.name();
        self.check_process(operation)?;
        for span in &spans {
            check_range(operation, span.offset, span.len, span.local.len())?;
            if span.len > span.remote.len {
                return Err(UsageError {
                    operation: operation.to_owned(),
                    argument: "local",
                    expected: format!("at most the {} bytes of the remote buffer", span.remote.len),
                    got: format!("{} bytes", span.len),
                }
                .into());
            }
        }
        let state = lock(&self.state);
        let not_connected = || RdmaError::NotConnected { operation, cause: "connect was not called".to_owned() };
        let client = state.client.client().ok_or_else(not_connected)?;
        if client.wire() != UCX && spans.iter().any(|span| span.local.is_on_device()) {
            return Err(UsageError {
                operation: operation.to_owned(),
                argument: "local",
                expected: "memory of the CPU, or a transport through UCX (the hint transport=ucx)".to_owned(),
                got: format!("memory of a CUDA device, and a transport through {}", client.wire()),
            }
            .into());
        }
        client.post(kind, spans, timeout)
    }

    fn check_process(&self, operation: &'static str) -> Result<(), RdmaError> {
        if self.origin.is_here() {
            return Ok(());
        }
        let cause = "it was made before this process was forked; make one in the child".to_owned();
        Err(RdmaError::NotConnected { operation, cause })
    }

    /// Ends both connections. What is in flight fails. Returns when nothing of it reads or writes memory any more. A thread that is
    /// connecting ends with an error once the peer answers, or at its time limit.
    pub fn close(&self) {
        // A forked child has none of the threads.
        if !self.origin.is_here() {
            return;
        }
        let mut state = lock(&self.state);
        match &mut state.client {
            Peer::Connected(client) => client.stop(),
            connecting @ Peer::Connecting => *connecting = Peer::Closed,
            Peer::None | Peer::Closed => {}
        }
        if let Some((_, server)) = &mut state.bound {
            server.stop();
        }
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        self.close();
    }
}

fn os(operation: &'static str, cause: &io::Error) -> RdmaError {
    RdmaError::Os { operation, cause: cause.to_string() }
}

/// How long one address of a peer is tried.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);

/// Longer than any wait.
const DAY: Duration = Duration::from_secs(86_400);

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::sys::fork::testing::holds_in_a_child;

    /// The sockets whose lines in a table of the kernel hold `text`, by the column of the inode.
    fn sockets(table: &str, text: &str, column: usize) -> Vec<String> {
        let table = fs::read_to_string(table).expect("a table");
        let lines = table.lines().filter(|line| line.contains(text));
        lines.map(|line| format!("socket:[{}]", line.split_whitespace().nth(column).expect("an inode"))).collect()
    }

    /// Whether this process has one of them open.
    fn has_open(sockets: &[String]) -> bool {
        let files = fs::read_dir("/proc/self/fd").expect("the open files");
        let links = files.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        links.into_iter().any(|link| sockets.iter().any(|socket| link.as_os_str() == socket.as_str()))
    }

    #[test]
    fn a_forked_child_does_not_listen() {
        let transport = Transport::new(&[]).expect("a transport");
        let address = Address::parse(&transport.bind().expect("bind")).expect("an address");
        let name = String::from_utf8(address.unix.clone()).expect("letters");
        let port = format!(":{:04X} ", address.tcp[0].port());
        let listeners = [
            sockets("/proc/self/net/unix", &name, 6),
            ["tcp", "tcp6"].map(|table| sockets(&format!("/proc/self/net/{table}"), &port, 9)).concat(),
        ];
        for listener in &listeners {
            assert!(has_open(listener), "{listener:?}");
            assert!(holds_in_a_child(|| !has_open(listener)), "{listener:?}");
        }
    }
}
