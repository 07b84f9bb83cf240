//! UCX between hosts: active messages, which RDMA devices carry, beside an authenticated connection through TCP.
//!
//! A stream is opened as that of TCP is, by a connection over which both sides prove themselves. Through it they tell each other
//! the addresses of their workers, and then each sees that a message of the other arrives. No byte counts as sent before that, so
//! an obstacle leaves another transport free to take the stream. The connection stays: its end shows that the other process is
//! gone. UCX has no secrets and no encryption, so it is not used where TLS is.
//!
//! A communicator has one worker for all its peers, made when the first stream is opened. On InfiniBand a worker holds tens of
//! megabytes of receive buffers, and on every kind of device some descriptors, which a worker for each peer would take for each
//! peer. So no stream has a descriptor that tells of its messages: [`Hub`] knows which streams have some.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod handover;
mod header;
mod hub;
mod link;
#[cfg(test)]
mod mock_peer;
mod offer;
mod ordered;
mod reads;
mod recv_stream;
mod send_stream;

use std::io;
use std::net::{IpAddr, TcpListener};
use std::time::Instant;

use crate::config::TcpStreams;
use crate::error::LinkDown;
use crate::sync::Arc;
use crate::sys::net;
use crate::sys::poller::{Interest, Poller, StreamName, Watched};
use crate::sys::socket::PeerTimeout;
use crate::transport::auth::Identity;
use crate::transport::pending::{Pending, Proved};
use crate::transport::tcp::Address;
use crate::transport::tcp::connect::Connection;
use crate::transport::ucx::handover::Caller;
use crate::transport::ucx::hub::Hub;
use crate::transport::ucx::recv_stream::UcxRecvStream;
use crate::transport::ucx::send_stream::UcxSendStream;
use crate::transport::{Accepted, Detour, Expose, SendStream, TakeRead, Transport};
use crate::types::Rank;

pub(crate) use offer::{Allowed, Need, Offer, offer};

/// The transport of one communicator.
#[derive(Debug)]
pub struct UcxTransport {
    identity: Identity,
    poller: Poller,
    advertise: Vec<IpAddr>,
    port: u16,
    timeout: PeerTimeout,
    listener: Watched<TcpListener>,
    pending: Pending<Caller>,
    hub: Arc<Hub>,
}

impl UcxTransport {
    /// Listens on every address. Peers learn those of `advertise`, the best first. UCX is loaded when the first stream is opened.
    pub(crate) fn new(
        identity: Identity,
        allowed: Allowed,
        need: Need,
        poller: Poller,
        advertise: Vec<IpAddr>,
        timeout: PeerTimeout,
    ) -> io::Result<Self> {
        let listener = net::listen_anywhere()?;
        let port = listener.local_addr()?.port();
        let listener = poller.watch(listener, Interest::Read)?;
        let pending = Pending::new(identity.clone(), poller.clone());
        let hub = Hub::new(identity.me, allowed, need, poller.clone());
        Ok(UcxTransport { identity, poller, advertise, port, timeout, listener, pending, hub })
    }
}

impl Transport for UcxTransport {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn address(&self) -> Vec<u8> {
        Address::new(self.advertise.clone(), self.port, TcpStreams::ONE).encode()
    }

    fn open(&mut self, peer: Rank, address: &[u8], detour: Detour) -> Result<Box<dyn SendStream>, LinkDown> {
        let targets = Address::targets(address)?;
        let identity = self.identity.clone();
        let connection = Connection::begin(identity, None, peer, targets, &self.poller, self.timeout, 1)?;
        Ok(Box::new(UcxSendStream::new(connection, peer, detour, self.hub.clone())))
    }

    fn accept(&mut self) -> Vec<Accepted> {
        self.hub.begin_to_accept();
        self.pending.admit_tcp(&self.listener, self.timeout, Caller::new);
        let hub = &self.hub;
        let accepted = self.pending.drive(|candidate| handover::accept(candidate, hub));
        self.pending.watch(&mut self.listener);
        let recv_stream = |Proved { rank, stream, received, .. }| -> Accepted {
            (rank, Box::new(UcxRecvStream::new(stream, received)))
        };
        accepted.into_iter().map(recv_stream).collect()
    }

    fn holds_bytes(&self) -> bool {
        self.hub.holds_bytes()
    }

    fn exposer(&self) -> Option<Arc<dyn Expose>> {
        Some(self.hub.clone())
    }

    fn take_reads(&mut self, take: &mut TakeRead<'_>) {
        self.hub.take_reads(take);
    }

    fn shortage(&self) -> Option<String> {
        self.pending.shortage()
    }

    fn accepting_until(&self) -> Option<Instant> {
        self.pending.due()
    }

    fn look(&mut self, named: &mut Vec<StreamName>) -> bool {
        self.hub.look(named)
    }

    fn arm(&mut self) -> bool {
        self.hub.arm()
    }
}

#[cfg(test)]
mod tests;
