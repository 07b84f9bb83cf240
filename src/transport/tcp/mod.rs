//! TCP between hosts, over IPv4 and IPv6, with TLS or without: a connection for each direction, or several of them, the rails.

mod channel;
pub(super) mod connect;
mod failures;
mod greeting;
pub(super) mod paths;
mod rail_recv;
mod rail_send;
mod rails;
mod reopening;
mod tender;

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::config::TcpStreams;
use crate::error::LinkDown;
use crate::sync::{Arc, Weak};
use crate::sys::net::{self, Interface};
use crate::sys::poller::{Interest, Poller, Watched};
use crate::sys::socket::PeerTimeout;
use crate::transport::auth::Identity;
use crate::transport::pending::{Pending, Proved};
use crate::transport::tcp::channel::TcpRecvStream;
use crate::transport::tcp::connect::Held;
use crate::transport::tcp::greeting::{Caller, Greeting};
use crate::transport::tcp::paths::{Target, paths};
use crate::transport::tcp::rail_recv::{Joining, Rails};
use crate::transport::tcp::rail_send::{RailSendStream, SendRails};
use crate::transport::tcp::reopening::Opener;
use crate::transport::tcp::tender::Tender;
use crate::transport::tls::{Stream, Tls};
use crate::transport::{Accepted, Detour, SendStream, Transport, shortage};
use crate::types::Rank;

#[cfg(any(test, fuzzing))]
pub(crate) use rails::fuzz;

/// Where a rank listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Address {
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
    /// For each that has come, the generation of the last connection.
    come: Vec<Option<u32>>,
    joining: Weak<Joining>,
}

impl Bundle {
    /// Whether rails may come, which belong to no other stream, also if this one has ended.
    fn is_expecting(&self) -> bool {
        self.joining.strong_count() > 0 || self.come.contains(&None)
    }

    /// Where a rail joins the stream; none if it may not. A later connection for one takes its place, also where this end does not
    /// know yet that the one before is broken.
    fn joining(&self, greeting: &Greeting) -> Option<Arc<Joining>> {
        let Greeting { rail, rails, generation, .. } = *greeting;
        let is_new = || self.come[rail].is_none_or(|come| come < generation);
        self.joining.upgrade().filter(|_| rails == self.come.len() && is_new())
    }
}

impl Address {
    /// Of a rank that listens at `port` on these hosts, whose streams have up to `streams` connections.
    pub(super) fn new(hosts: Vec<IpAddr>, port: u16, streams: TcpStreams) -> Address {
        Address { hosts, port, streams: streams.get() }
    }

    /// As it is published.
    pub(super) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("addresses are plain data")
    }

    fn parse(published: &[u8]) -> Result<Address, LinkDown> {
        let not_one = |error| LinkDown::new(format!("its published address is not one: {error}"));
        serde_json::from_slice(published).map_err(not_one)
    }

    /// What to try for one connection to a rank that has published this, in order.
    pub(super) fn targets(published: &[u8]) -> Result<VecDeque<Target>, LinkDown> {
        let Address { hosts, port, .. } = Address::parse(published)?;
        Ok(paths(&[], &hosts, port, 1).swap_remove(0))
    }
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
    /// Of the streams with several connections, once there is one.
    tender: Option<Tender>,
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
        let (bundles, held, tender) = (Vec::new(), Held::default(), None);
        Ok(TcpTransport {
            identity,
            tls,
            poller,
            advertise,
            streams,
            port,
            timeout,
            listener,
            pending,
            bundles,
            held,
            tender,
        })
    }

    /// The thread that looks after streams with several connections.
    fn tender(&mut self) -> io::Result<Tender> {
        let tender = self.tender.take().map_or_else(Tender::start, Ok)?;
        Ok(self.tender.insert(tender).clone())
    }

    /// The connections that have come and proved themselves.
    fn proved(&mut self) -> Vec<Proved<Caller, Option<Greeting>>> {
        let tls = self.tls.as_ref();
        self.pending.admit_tcp(&self.listener, self.timeout, |stream| Caller::new(Stream::accept(stream, tls)));
        let has_greeting = self.streams != TcpStreams::ONE;
        let mut proved = self.pending.drive(|candidate| {
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
        proved.iter_mut().for_each(|proved| proved.stream.session = proved.session);
        proved
    }

    /// Takes a connection in that has proved itself: as a stream, or as a rail of one.
    fn take_in(&mut self, from: Rank, mut caller: Watched<Caller>, greeting: Option<Greeting>) -> Option<Accepted> {
        let Some(greeting) = greeting.filter(|greeting| greeting.rails > 1) else {
            return Some((from, Box::new(TcpRecvStream::new(caller))));
        };
        let (me, Greeting { token, rail, rails, generation }) = (self.identity.me, greeting);
        self.bundles.retain(Bundle::is_expecting);
        let known = self.bundles.iter().position(|bundle| bundle.from == from && bundle.token == token);
        let joining = match known {
            Some(place) => self.bundles[place].joining(&greeting),
            // A rail is opened again for a stream that there is. This end may have forgotten one that it has ended.
            None => (generation == 0 && rails <= self.streams.get()).then(Arc::<Joining>::default),
        };
        let Some(joining) = joining else {
            log::warn!("rank {me}: rail {} of {rails} of rank {from} was refused: no stream expects it", rail + 1);
            return None;
        };
        if let Err(down) = caller.welcome() {
            log::debug!("rank {me}: a rail of rank {from} was dropped: {down}");
            return None;
        }
        joining.push(rail, generation, caller);
        if let Some(place) = known {
            self.bundles[place].come[rail] = Some(generation);
            return None;
        }
        let mut come = vec![None; rails];
        come[rail] = Some(generation);
        self.bundles.push(Bundle { from, token, come, joining: Arc::downgrade(&joining) });
        Some((from, Box::new(TcpRecvStream::new(Rails::new(me, from, rails, &self.poller, joining)))))
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn address(&self) -> Vec<u8> {
        let hosts = self.advertise.iter().map(|interface| interface.address).collect();
        Address::new(hosts, self.port, self.streams).encode()
    }

    fn open(&mut self, peer: Rank, address: &[u8], _: Detour) -> Result<Box<dyn SendStream>, LinkDown> {
        let Address { hosts, port, streams } = Address::parse(address)?;
        let rails = self.streams.get().min(streams).max(1);
        let opener = Opener {
            identity: self.identity.clone(),
            tls: self.tls.clone(),
            peer,
            poller: self.poller.clone(),
            timeout: self.timeout,
            token: (streams > 1).then(rand::random),
            paths: paths(&self.advertise, &hosts, port, rails),
        };
        if rails == 1 {
            return Ok(Box::new(opener.begin(0)?.counted_in(&self.held)));
        }
        let mut send_rails = SendRails::new(opener, &self.held);
        for rail in 0..rails {
            send_rails.begin(rail)?;
        }
        let tender = self.tender().map_err(|error| shortage::while_opening(error, self.identity.size, rails))?;
        Ok(Box::new(RailSendStream::new(send_rails, &tender)))
    }

    fn accept(&mut self) -> Vec<Accepted> {
        let proved = self.proved();
        let take_in = |Proved { rank, stream, received, .. }| self.take_in(rank, stream, received);
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
