//! A transport: one's own side of a pair of connections between two processes.

use std::fmt;
use std::io;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::comm::address;
use crate::config::Config;
use crate::error::UsageError;
use crate::rdma::client::{Client, Kind, Span};
use crate::rdma::error::RdmaError;
use crate::rdma::memory::check_range;
use crate::rdma::pending::Pending;
use crate::rdma::server::Server;
use crate::rdma::wire::{Address, VERSION, Wire};
use crate::sync::{Mutex, lock};
use crate::sys::fork::Origin;
use crate::sys::{cma, net, random, socket};
use crate::transport::auth::Secret;
use crate::transport::tls::Tls;

/// Reads and writes the memory of one other process, and lets that one access what this process has registered. Dropping it ends
/// what is in flight.
pub struct Transport {
    config: Config,
    origin: Origin,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    bound: Option<(Vec<u8>, Server)>,
    client: Option<Client>,
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.state);
        let peer = state.client.as_ref().map(Client::peer);
        f.debug_struct("Transport").field("bound", &state.bound.is_some()).field("peer", &peer).finish_non_exhaustive()
    }
}

impl Transport {
    /// A transport that is not bound. Of the settings it heeds `transport`, `single_copy_bytes`, `socket_ifname`, `tls`,
    /// `timeout_seconds` and `peer_timeout_seconds`.
    ///
    /// # Errors
    /// A setting is not valid.
    pub fn new(hints: &[(String, String)]) -> Result<Transport, RdmaError> {
        let config = Config::resolve(hints)?;
        Ok(Transport { config, origin: Origin::here(), state: Mutex::default() })
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
        let is_open = self.config.transport.has_tcp() && Tls::new(&self.config, &secret)?.is_none();
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
        if self.config.single_copy_bytes > 0 {
            // The peer reads long spans where they lie.
            cma::allow_readers();
        }
        let server = Server::start(address, unix, tcp, self.config.peer_timeout).map_err(|cause| os("bind", &cause))?;
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
        let mut state = lock(&self.state);
        if let Some(client) = &state.client {
            return Err(usage("self", "a transport that was not connected", format!("one of {}", client.peer())).into());
        }
        let deadline = Instant::now().checked_add(timeout).unwrap_or_else(|| Instant::now() + DAY);
        let wire = self.reach(&address, deadline)?;
        let client = Client::start(wire, address.name(), self.config.single_copy_bytes > 0)
            .map_err(|cause| os("connect", &cause))?;
        state.client = Some(client);
        Ok(())
    }

    /// Opens a connection in the best way that works.
    fn reach(&self, address: &Address, deadline: Instant) -> Result<Wire, RdmaError> {
        let mut failures = Vec::new();
        let mut attempt = |way: String, opened: io::Result<Wire>| match opened.and_then(|mut wire| {
            wire.open(address, deadline)?;
            Ok(wire)
        }) {
            Ok(wire) => Some(wire),
            Err(error) => {
                failures.push(format!("{way}: {error}"));
                None
            }
        };
        if self.config.transport.has_shm() && address.host == net::host_identity() {
            let opened = socket::connect_unix(&address.unix).and_then(Wire::unix);
            if let Some(wire) = attempt("on this host".to_owned(), opened) {
                return Ok(wire);
            }
        }
        let has_tls = Tls::new(&self.config, &address.secret)?.is_some();
        let tcp = if self.config.transport.has_tcp() && !has_tls { address.tcp.as_slice() } else { &[] };
        for target in tcp {
            let left = deadline.saturating_duration_since(Instant::now()).min(ATTEMPT).max(Duration::from_millis(1));
            let opened = TcpStream::connect_timeout(target, left).and_then(|s| Wire::tcp(s, self.config.peer_timeout));
            if let Some(wire) = attempt(target.to_string(), opened) {
                return Ok(wire);
            }
        }
        if failures.is_empty() {
            failures
                .push("the settings `transport` and `tls` of the two leave no way, TCP being without TLS".to_owned());
        }
        Err(RdmaError::Unreachable { peer: address.name(), cause: failures.join("; ") })
    }

    /// Whether it is connected.
    pub fn is_connected(&self) -> bool {
        lock(&self.state).client.as_ref().is_some_and(|client| client.ended().is_none())
    }

    /// How bytes move, once it is connected: `shared memory` or `tcp`.
    pub fn wire(&self) -> Option<&'static str> {
        lock(&self.state).client.as_ref().map(Client::wire)
    }

    /// Begins to write or read spans, and returns at once. The operation ends when all spans have, well or badly. What is in flight
    /// at the same time has no order. A timeout, unlike a refusal by the peer, ends the transport too.
    ///
    /// # Errors
    /// A span is not inside its memory, or longer than the remote one; the transport is not connected.
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
        state.client.as_ref().ok_or_else(not_connected)?.post(kind, spans, timeout)
    }

    fn check_process(&self, operation: &'static str) -> Result<(), RdmaError> {
        if self.origin.is_here() {
            return Ok(());
        }
        let cause = "it was made before this process was forked; make one in the child".to_owned();
        Err(RdmaError::NotConnected { operation, cause })
    }

    /// Ends both connections. What is in flight fails. Returns when nothing of it reads or writes memory any more.
    pub fn close(&self) {
        // A forked child has none of the threads.
        if !self.origin.is_here() {
            return;
        }
        let mut state = lock(&self.state);
        if let Some(client) = &mut state.client {
            client.stop();
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
const ATTEMPT: Duration = Duration::from_secs(10);

/// Longer than any wait.
const DAY: Duration = Duration::from_secs(86_400);
