//! TCP between hosts, over IPv4 and IPv6, with TLS or without: a connection for each direction.

mod channel;
pub(super) mod connect;

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::error::LinkDown;
use crate::sys::net;
use crate::sys::poller::{Interest, Poller, Watched};
use crate::sys::socket::PeerTimeout;
use crate::transport::auth::Identity;
use crate::transport::pending::{Pending, Proved};
use crate::transport::tcp::channel::TcpRecvStream;
use crate::transport::tcp::connect::{Connection, Held};
use crate::transport::tls::{Stream, Tls};
use crate::transport::{Accepted, Detour, SendStream, Transport};
use crate::types::Rank;

/// Where a rank listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Address {
    hosts: Vec<IpAddr>,
    port: u16,
}

impl Address {
    pub(super) fn new(hosts: Vec<IpAddr>, port: u16) -> Address {
        Address { hosts, port }
    }

    /// As it is published.
    pub(super) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("addresses are plain data")
    }

    /// Where to call a rank that has published this, the best first.
    pub(super) fn targets(published: &[u8]) -> Result<VecDeque<SocketAddr>, LinkDown> {
        let address: Address = serde_json::from_slice(published)
            .map_err(|error| LinkDown::new(format!("its published address is not one: {error}")))?;
        Ok(address.hosts.into_iter().map(|host| (host, address.port).into()).collect())
    }
}

/// The transport of one communicator.
#[derive(Debug)]
pub struct TcpTransport {
    identity: Identity,
    tls: Option<Tls>,
    poller: Poller,
    advertise: Vec<IpAddr>,
    port: u16,
    timeout: PeerTimeout,
    listener: Watched<TcpListener>,
    pending: Pending<Stream>,
    held: Held,
}

impl TcpTransport {
    /// Listens on every address. Peers learn those of `advertise`, the best first.
    pub(crate) fn new(
        identity: Identity,
        tls: Option<Tls>,
        poller: Poller,
        advertise: Vec<IpAddr>,
        timeout: PeerTimeout,
    ) -> io::Result<Self> {
        let listener = net::listen_anywhere()?;
        let port = listener.local_addr()?.port();
        let listener = poller.watch(listener, Interest::Read)?;
        let pending = Pending::new(identity.clone(), poller.clone());
        Ok(TcpTransport { identity, tls, poller, advertise, port, timeout, listener, pending, held: Held::default() })
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn address(&self) -> Vec<u8> {
        Address::new(self.advertise.clone(), self.port).encode()
    }

    fn open(&mut self, peer: Rank, address: &[u8], _: Detour) -> Result<Box<dyn SendStream>, LinkDown> {
        let targets = Address::targets(address)?;
        let connection =
            Connection::begin(self.identity.clone(), self.tls.clone(), peer, targets, &self.poller, self.timeout)?;
        Ok(Box::new(connection.counted_in(&self.held)))
    }

    fn accept(&mut self) -> Vec<Accepted> {
        let tls = self.tls.as_ref();
        self.pending.admit_tcp(&self.listener, self.timeout, |stream| Stream::accept(stream, tls));
        let accepted = self.pending.drive(|candidate| {
            candidate.rank = candidate.accepting.drive(&mut *candidate.stream)?;
            Ok(candidate.rank.map(|_| ()))
        });
        self.pending.watch(&mut self.listener);
        let recv_stream =
            |proved: Proved<Stream, ()>| -> Accepted { (proved.rank, Box::new(TcpRecvStream::new(proved.stream))) };
        accepted.into_iter().map(recv_stream).collect()
    }

    fn holds_bytes(&self) -> bool {
        self.held.is_any()
    }

    fn shortage(&self) -> Option<String> {
        self.pending.shortage()
    }

    fn accepting_until(&self) -> Option<Instant> {
        self.pending.due()
    }
}

#[cfg(test)]
mod tests;
