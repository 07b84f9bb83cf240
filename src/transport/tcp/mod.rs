//! TCP between hosts, over IPv4 and IPv6, with TLS or without: a connection for each direction, or several of them, the rails.

mod channel;
mod connect;
mod greeting;
mod paths;
mod rail_recv;
mod rail_send;
mod rails;

use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::fd::AsFd;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::config::TcpStreams;
use crate::error::{Down, LinkDown};
use crate::sync::{Arc, Weak};
use crate::sys::net::{self, Interface};
use crate::sys::poller::{Interest, Poller, Watched};
use crate::sys::socket::{self, PeerTimeout};
use crate::transport::auth::Identity;
use crate::transport::pending::{Pending, Proved};
use crate::transport::tcp::channel::TcpRecvStream;
use crate::transport::tcp::connect::{Connection, Held};
use crate::transport::tcp::greeting::{Caller, Greeting};
use crate::transport::tcp::paths::paths;
use crate::transport::tcp::rail_recv::{Joining, Rails};
use crate::transport::tcp::rail_send::RailSendStream;
use crate::transport::tls::{Stream, Tls};
use crate::transport::{Accepted, Detour, SendStream, Transport};
use crate::types::Rank;

/// Where a rank listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Address {
    hosts: Vec<IpAddr>,
    port: u16,
    /// Of how many connections streams may be that lead there; absent if of one.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    streams: usize,
}

fn one() -> usize {
    TcpStreams::ONE.get()
}

fn is_one(streams: &usize) -> bool {
    *streams == one()
}

/// A stream from a rank over several rails, some of which may come later.
#[derive(Debug)]
struct Bundle {
    from: Rank,
    token: [u8; 16],
    /// The rails that have come.
    rails: Vec<usize>,
    joining: Weak<Joining>,
}

/// The transport of one communicator.
#[derive(Debug)]
pub struct TcpTransport {
    identity: Identity,
    tls: Option<Tls>,
    poller: Poller,
    /// The addresses that peers learn, the best first.
    advertise: Vec<Interface>,
    streams: TcpStreams,
    port: u16,
    timeout: PeerTimeout,
    listener: Watched<TcpListener>,
    pending: Pending<Caller>,
    bundles: Vec<Bundle>,
    held: Held,
}

impl TcpTransport {
    /// Listens on every address. Peers learn those of `advertise`, the best first. Streams have up to `streams` connections.
    pub(crate) fn new(
        identity: Identity,
        tls: Option<Tls>,
        poller: Poller,
        advertise: Vec<Interface>,
        streams: TcpStreams,
        timeout: PeerTimeout,
    ) -> io::Result<Self> {
        let listener = net::listen_anywhere()?;
        let port = listener.local_addr()?.port();
        let listener = poller.watch(listener, Interest::Read)?;
        let pending = Pending::new(identity.clone(), poller.clone()).with_streams(streams.get());
        let (bundles, held) = (Vec::new(), Held::default());
        Ok(TcpTransport { identity, tls, poller, advertise, streams, port, timeout, listener, pending, bundles, held })
    }

    /// Takes a connection in that has proved itself: as a stream, or as a rail of one.
    fn take_in(&mut self, from: Rank, mut caller: Watched<Caller>, greeting: Option<Greeting>) -> Option<Accepted> {
        let Some(Greeting { token, rail, rails }) = greeting.filter(|greeting| greeting.rails > 1) else {
            return Some((from, Box::new(TcpRecvStream::new(caller))));
        };
        if let Err(down) = caller.welcome() {
            log::debug!("rank {}: a rail of rank {from} was dropped: {down}", self.identity.me);
            return None;
        }
        self.bundles.retain(|bundle| bundle.joining.strong_count() > 0);
        let mut known = self.bundles.iter_mut().filter(|bundle| bundle.from == from && bundle.token == token);
        if let Some(bundle) = known.next() {
            match bundle.joining.upgrade() {
                Some(joining) if !bundle.rails.contains(&rail) => {
                    bundle.rails.push(rail);
                    joining.push(caller);
                }
                _ => log::warn!("rank {}: a second rail {rail} of rank {from} was refused", self.identity.me),
            }
            return None;
        }
        let joining = Arc::new(Joining::default());
        joining.push(caller);
        self.bundles.push(Bundle { from, token, rails: vec![rail], joining: Arc::downgrade(&joining) });
        Some((from, Box::new(TcpRecvStream::new(Rails::new(rails, joining)))))
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn address(&self) -> Vec<u8> {
        let hosts = self.advertise.iter().map(|interface| interface.address).collect();
        let address = Address { hosts, port: self.port, streams: self.streams.get() };
        serde_json::to_vec(&address).expect("addresses are plain data")
    }

    fn open(&mut self, peer: Rank, address: &[u8], _: Detour) -> Result<Box<dyn SendStream>, LinkDown> {
        let Address { hosts, port, streams } = serde_json::from_slice(address)
            .map_err(|error| LinkDown::new(format!("its published address is not one: {error}")))?;
        let (token, rails) = (rand::random(), self.streams.get().min(streams));
        let mut opening = Vec::new();
        let mut missing = None;
        for (rail, targets) in paths(&self.advertise, &hosts, port, rails).into_iter().enumerate() {
            let (identity, tls) = (self.identity.clone(), self.tls.clone());
            let connection = Connection::begin(identity, tls, peer, targets, &self.poller, self.timeout, rails);
            let greeting = (streams > 1).then_some(Greeting { token, rail, rails });
            match connection {
                Ok(connection) => opening.push((rail, connection.with(greeting))),
                // The others may do; what this process lacks, it may lack for them, too.
                Err(down) if rail > 0 && down.kind != Down::Lacking => missing = Some((rail, down)),
                Err(down) => return Err(down),
            }
        }
        if rails == 1
            && let Some((_, connection)) = opening.pop()
        {
            return Ok(Box::new(connection.counted_in(&self.held)));
        }
        let mut stream = RailSendStream::new(self.identity.me, peer, rails, opening, &self.held);
        if let Some((rail, down)) = missing {
            stream.note_missing(rail, &down);
        }
        Ok(Box::new(stream))
    }

    fn accept(&mut self) -> Vec<Accepted> {
        let (listener, timeout, tls) = (&self.listener, self.timeout, self.tls.as_ref());
        self.pending.admit(listener.as_fd(), || {
            socket::admit(listener.accept(), |(stream, _)| {
                socket::tune_tcp(&stream, timeout)?;
                Ok(Caller::new(Stream::accept(stream, tls)))
            })
        });
        let has_greeting = self.streams != TcpStreams::ONE;
        let proved = self.pending.drive(|candidate| {
            if candidate.rank.is_none() {
                candidate.rank = candidate.accepting.drive(&mut candidate.stream.stream)?;
            }
            match candidate.rank {
                None => Ok(None),
                Some(_) if has_greeting => Ok(candidate.stream.greeting()?.map(Some)),
                Some(_) => Ok(Some(None)),
            }
        });
        self.pending.watch(&mut self.listener);
        let take_in = |Proved { rank, stream, received }| self.take_in(rank, stream, received);
        proved.into_iter().filter_map(take_in).collect()
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
