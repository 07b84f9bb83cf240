//! TCP between hosts, over IPv4 and IPv6, with TLS or without: a connection for each direction, or several of them, the rails. With
//! `shared_streams`, the communicators of two processes share one connection each way, of which their streams are lanes.

mod channel;
pub(super) mod connect;
mod failures;
mod greeting;
mod inbound;
mod lanes;
mod listener;
mod member;
mod outbound;
pub(super) mod paths;
mod rail_recv;
mod rail_send;
mod rails;
mod reopening;
mod tender;
mod trunk_end;
mod trunks;

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::config::TcpStreams;
use crate::error::LinkDown;
use crate::sync::{Arc, Weak};
use crate::sys::net::Interface;
use crate::sys::poller::{Interest, Poller, StreamName, Watched};
use crate::sys::random;
use crate::sys::socket::PeerTimeout;
use crate::transport::auth::Identity;
use crate::transport::pending::Proved;
use crate::transport::tcp::channel::TcpRecvStream;
use crate::transport::tcp::connect::Held;
use crate::transport::tcp::greeting::{Caller, Greeting};
use crate::transport::tcp::listener::Listener;
use crate::transport::tcp::member::Arrival;
use crate::transport::tcp::paths::{Target, paths};
use crate::transport::tcp::rail_recv::{Joining, Rails};
use crate::transport::tcp::rail_send::{RailSendStream, SendRails};
use crate::transport::tcp::reopening::Opener;
use crate::transport::tcp::tender::Tender;
use crate::transport::tcp::trunks::{Opening, Sharer, Trunks};
use crate::transport::tls::Tls;
use crate::transport::{Accepted, Detour, SendStream, Transport};
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
    /// Names the rank's process and the manner of its connections, which communicators share that do so, too; absent where it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    process: Option<String>,
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
        Address { hosts, port, streams: streams.get(), process: None }
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

/// Where a communicator's connections come in.
#[derive(Debug)]
enum Entry {
    /// To itself alone.
    Own(Listener),
    /// It shares connections with other communicators.
    Shared(Sharer),
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
    entry: Entry,
    bundles: Vec<Bundle>,
    held: Held,
    /// Of the streams with several connections, once there is one.
    tender: Option<Tender>,
}

impl TcpTransport {
    /// Listens on every address. Peers learn those of `advertise`, the best first. Streams have up to `streams` connections. With a
    /// `manner`, communicators of the same share connections; that is for streams of one connection.
    pub(crate) fn new(
        identity: Identity,
        tls: Option<Tls>,
        poller: Poller,
        advertise: Vec<Interface>,
        streams: TcpStreams,
        timeout: PeerTimeout,
        manner: Option<String>,
    ) -> io::Result<Self> {
        let has_rails = streams != TcpStreams::ONE;
        let entry = match manner.filter(|_| !has_rails) {
            Some(manner) => shared_entry(&identity, manner, &tls, &poller, timeout)?,
            None => None,
        };
        let entry = match entry {
            Some(entry) => entry,
            None => {
                Entry::Own(Listener::open(identity.clone(), tls.clone(), &poller, streams.get(), timeout, has_rails)?)
            }
        };
        let port = match &entry {
            Entry::Own(listener) => listener.port(),
            Entry::Shared(sharer) => sharer.with_listener(Listener::port),
        };
        let (bundles, held, tender) = (Vec::new(), Held::default(), None);
        Ok(TcpTransport { identity, tls, poller, advertise, streams, port, timeout, entry, bundles, held, tender })
    }

    /// The thread that looks after streams with several connections.
    fn tender(&mut self) -> io::Result<Tender> {
        let tender = self.tender.take().map_or_else(Tender::start, Ok)?;
        Ok(self.tender.insert(tender).clone())
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

/// Where the connections of a communicator that shares come in; none if no further one may share.
fn shared_entry(
    identity: &Identity,
    manner: String,
    tls: &Option<Tls>,
    poller: &Poller,
    timeout: PeerTimeout,
) -> io::Result<Option<Entry>> {
    match Sharer::take(Trunks::of_process()?, identity.clone(), manner, tls.clone(), poller, timeout) {
        Ok(sharer) => Ok(Some(Entry::Shared(sharer))),
        // Linux lets 500 pollers watch one.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            let me = identity.me;
            log::warn!("rank {me}: hundreds of communicators of this process share TCP connections, and no more may");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// The stream that has come for a communicator which shares; none if its connection has ended.
fn accepted(sharer: &Sharer, poller: &Poller, me: Rank, arrival: Arrival) -> Option<Accepted> {
    match arrival {
        Arrival::Lane { from, trunk, lane } => Some((from, Box::new(TcpRecvStream::new(sharer.lane(trunk, lane)?)))),
        Arrival::Connection { from, caller } => {
            let mut caller = *caller;
            match caller.move_to(poller, Interest::Read, StreamName::From(from)) {
                Ok(()) => Some((from, Box::new(TcpRecvStream::new(caller)))),
                Err(error) => {
                    log::warn!("rank {me}: a connection of rank {from} was dropped: it cannot be watched: {error}");
                    None
                }
            }
        }
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn address(&self) -> Vec<u8> {
        let hosts = self.advertise.iter().map(|interface| interface.address).collect();
        let process = match &self.entry {
            Entry::Own(_) => None,
            Entry::Shared(sharer) => Some(sharer.process().to_owned()),
        };
        Address { process, ..Address::new(hosts, self.port, self.streams) }.encode()
    }

    fn open(&mut self, peer: Rank, address: &[u8], _: Detour) -> Result<Box<dyn SendStream>, LinkDown> {
        let Address { hosts, port, streams, process } = Address::parse(address)?;
        if let (Entry::Shared(sharer), Some(process)) = (&self.entry, &process) {
            let (tls, timeout) = (self.tls.as_ref(), self.timeout);
            let opening = Opening { tls, targets: Address::targets(address)?, timeout };
            return Ok(Box::new(sharer.open(peer, process, opening)?));
        }
        let rails = self.streams.get().min(streams).max(1);
        let opener = Opener {
            identity: self.identity.clone(),
            tls: self.tls.clone(),
            peer,
            poller: self.poller.clone(),
            timeout: self.timeout,
            token: (streams > 1 || process.is_some()).then(random::any),
            paths: paths(&self.advertise, &hosts, port, rails),
        };
        if rails == 1 {
            return Ok(Box::new(opener.begin(0)?.counted_in(&self.held)));
        }
        let lacking = |error| LinkDown::lacking(format!("this process gets no thread for its connections: {error}"));
        let tender = self.tender().map_err(lacking)?;
        let mut send_rails = SendRails::new(opener, &self.held);
        for rail in 0..rails {
            send_rails.begin(rail)?;
        }
        Ok(Box::new(RailSendStream::new(send_rails, &tender)))
    }

    fn accept(&mut self) -> Vec<Accepted> {
        let proved = match &mut self.entry {
            Entry::Own(listener) => listener.proved(),
            Entry::Shared(sharer) => {
                let (poller, me) = (&self.poller, self.identity.me);
                let arrivals = sharer.take_arrivals().into_iter();
                return arrivals.filter_map(|arrival| accepted(sharer, poller, me, arrival)).collect();
            }
        };
        let take_in = |Proved { rank, stream, received, .. }| self.take_in(rank, stream, received);
        proved.into_iter().filter_map(take_in).collect()
    }

    fn pause(&mut self) -> io::Result<()> {
        match &mut self.entry {
            Entry::Own(listener) => listener.pause(),
            // The poller of trunks serves other communicators, too.
            Entry::Shared(_) => Ok(()),
        }
    }

    fn holds_bytes(&self) -> bool {
        let shares = match &self.entry {
            Entry::Own(_) => false,
            Entry::Shared(sharer) => sharer.holds_bytes(),
        };
        shares || self.held.is_any()
    }

    fn shortage(&self) -> Option<String> {
        match &self.entry {
            Entry::Own(listener) => listener.shortage(),
            Entry::Shared(sharer) => sharer.shortage(),
        }
    }

    fn accepting_until(&self) -> Option<Instant> {
        match &self.entry {
            Entry::Own(listener) => listener.due(),
            Entry::Shared(sharer) => sharer.due(),
        }
    }

    fn look(&mut self, named: &mut Vec<StreamName>) -> bool {
        match &self.entry {
            Entry::Own(_) => false,
            Entry::Shared(sharer) => sharer.look(named),
        }
    }

    fn arm(&mut self) -> bool {
        match &self.entry {
            Entry::Own(_) => false,
            Entry::Shared(sharer) => !sharer.is_idle(),
        }
    }
}

#[cfg(test)]
mod tests;
