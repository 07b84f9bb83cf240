//! Wireup, UCX's word: opens the transports of one communicator and chooses those that reach each peer.

use std::collections::BTreeMap;

use crate::comm::address;
use crate::comm::bootstrap::RankInfo;
use crate::config::{Config, TcpStreams};
use crate::engine::connector::{FindRoutes, Route};
use crate::error::InitError;
use crate::sys::net;
use crate::sys::poller::Poller;
use crate::sys::socket::PeerTimeout;
use crate::topo::Topology;
use crate::transport::Transport;
use crate::transport::auth::Identity;
use crate::transport::shm::{RingSettings, ShmTransport};
use crate::transport::tcp::TcpTransport;
use crate::transport::tls::Tls;
use crate::types::Rank;

/// What streams are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Operations.
    Data,
    /// Notices of the failure detector: a few bytes, if any.
    FailureDetector,
}

/// A transport and which peers it is for.
struct Entry {
    transport: Box<dyn Transport>,
    locality: Locality,
    purpose: Purpose,
}

impl Entry {
    /// The name that its address is published under.
    fn key(&self) -> String {
        match self.purpose {
            Purpose::Data => self.transport.name().to_owned(),
            Purpose::FailureDetector => format!("{} failure detector", self.transport.name()),
        }
    }
}

/// Which peers a transport is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Locality {
    SameHost,
    Everywhere,
}

/// The transports of one communicator, the preferred ones first.
#[derive(Default)]
pub(crate) struct Transports {
    transports: Vec<Entry>,
}

impl Transports {
    /// Opens the transports that the configuration allows.
    pub(crate) fn open(
        name: &str,
        identity: &Identity,
        config: &Config,
        poller: &Poller,
        rendezvous_host: Option<&str>,
        purpose: Purpose,
    ) -> Result<Transports, InitError> {
        let os = |what: &str| {
            let (comm, what) = (name.to_owned(), what.to_owned());
            move |cause: std::io::Error| InitError::Os { comm, what, cause: cause.to_string() }
        };
        let mut transports = Vec::new();
        let line_ownership = config.shm_line_ownership;
        let (bytes, peer_can_read, timeout) = match purpose {
            Purpose::Data => {
                (config.shm_ring_bytes.get(), config.single_copy_bytes > 0, PeerTimeout::WhileIdle(config.peer_timeout))
            }
            Purpose::FailureDetector => (rustix::param::page_size(), false, PeerTimeout::Always(config.peer_timeout)),
        };
        let streams = match purpose {
            Purpose::Data => config.tcp_streams,
            Purpose::FailureDetector => TcpStreams::ONE,
        };
        if config.transport.has_shm() {
            let settings = RingSettings { bytes, peer_can_read, line_ownership };
            let transport = ShmTransport::new(identity.clone(), poller.clone(), settings)
                .map_err(os("the shared memory transport"))?;
            transports.push(Entry { transport: Box::new(transport), locality: Locality::SameHost, purpose });
        }
        if config.transport.has_tcp() {
            let interfaces = net::interfaces().map_err(os("the list of network interfaces"))?;
            let routed = rendezvous_host.and_then(net::source_toward);
            let advertise = address::advertised(&interfaces, config.socket_interfaces.as_deref(), routed)?;
            let of_address = |address| interfaces.iter().find(|interface| interface.address == address).cloned();
            let advertise = advertise.into_iter().filter_map(of_address).collect();
            let tls = Tls::new(config, &identity.secret)?;
            let transport = TcpTransport::new(identity.clone(), tls, poller.clone(), advertise, streams, timeout)
                .map_err(os("the TCP transport"))?;
            transports.push(Entry { transport: Box::new(transport), locality: Locality::Everywhere, purpose });
        }
        Ok(Transports { transports })
    }

    /// The addresses to publish, by transport name.
    pub(crate) fn addresses(&self) -> BTreeMap<String, Vec<u8>> {
        self.transports.iter().map(|entry| (entry.key(), entry.transport.address())).collect()
    }

    /// The transports that reach `peer`, of which there is at least one, the preferred one first.
    pub(crate) fn routes(
        &self,
        name: &str,
        me: Rank,
        topo: &Topology,
        ranks: &[RankInfo],
        config: &Config,
        peer: Rank,
    ) -> Result<Vec<Route>, InitError> {
        let candidates = self.transports.iter().enumerate();
        let reaching =
            candidates.filter(|(_, entry)| entry.locality == Locality::Everywhere || topo.same_host(me, peer));
        let route = |(transport, entry): (usize, &Entry)| {
            let address = ranks[peer.index()].addresses.get(&entry.key())?.clone();
            Some(Route { transport, address })
        };
        let routes: Vec<Route> = reaching.filter_map(route).collect();
        if routes.is_empty() {
            return Err(InitError::Config(format!(
                "communicator `{name}`: transport {:?} does not reach rank {peer} on host `{}` from rank {me} on host `{}`",
                config.transport,
                ranks[peer.index()].host_id,
                ranks[me.index()].host_id,
            )));
        }
        Ok(routes)
    }

    /// The name of a route's transport.
    pub(crate) fn name(&self, transport: usize) -> &'static str {
        self.transports[transport].transport.name()
    }

    /// The transports, in the order that routes count.
    pub(crate) fn into_transports(self) -> Vec<Box<dyn Transport>> {
        self.transports.into_iter().map(|entry| entry.transport).collect()
    }
}

/// The routes to every rank of a communicator, in one piece of memory: in a large world most of them are never taken.
#[derive(Default)]
pub(crate) struct Directory {
    /// Of each route in turn: the transport, the length of the address, the address.
    bytes: Vec<u8>,
    /// Where those of each rank end.
    ends: Vec<usize>,
}

impl Directory {
    /// Adds the routes to the next rank.
    pub(crate) fn push(&mut self, routes: &[Route]) {
        for Route { transport, address } in routes {
            let length = u32::try_from(address.len()).expect("an address is shorter than the description of its rank");
            self.bytes.push(u8::try_from(*transport).expect("there are a few transports"));
            self.bytes.extend(length.to_le_bytes());
            self.bytes.extend(address);
        }
        self.ends.push(self.bytes.len());
    }

    /// The routes to a rank, the preferred one first.
    pub(crate) fn routes(&self, rank: Rank) -> Vec<Route> {
        let begin = rank.index().checked_sub(1).map_or(0, |before| self.ends[before]);
        let mut rest = &self.bytes[begin..self.ends[rank.index()]];
        let mut routes = Vec::new();
        while let Some((&transport, behind)) = rest.split_first()
            && let Some((length, behind)) = behind.split_first_chunk()
            && let Some((address, behind)) = behind.split_at_checked(u32::from_le_bytes(*length) as usize)
        {
            routes.push(Route { transport: usize::from(transport), address: address.to_vec() });
            rest = behind;
        }
        routes
    }

    /// The transport that each rank is reached by at first.
    pub(crate) fn first_transports(&self) -> impl Iterator<Item = usize> {
        let first = |rank| self.routes(Rank::from(rank)).first().map(|route| route.transport);
        (0..self.ends.len()).filter_map(first)
    }

    /// What the engine asks.
    pub(crate) fn into_routes(mut self) -> FindRoutes {
        self.bytes.shrink_to_fit();
        self.ends.shrink_to_fit();
        Box::new(move |rank| self.routes(rank))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_gives_back_the_routes_of_each_rank() {
        let route = |transport, address: &[u8]| Route { transport, address: address.to_vec() };
        let ranks = [vec![], vec![route(0, b"here"), route(1, b"")], vec![route(1, &[7; 300])], vec![]];
        let mut directory = Directory::default();
        ranks.iter().for_each(|routes| directory.push(routes));
        assert_eq!(directory.first_transports().collect::<Vec<_>>(), [0, 1]);
        assert_eq!(directory.bytes.len(), 4 + 300 + 3 * 5, "five bytes a route beside its address");
        let find_routes = directory.into_routes();
        for (rank, routes) in ranks.iter().enumerate() {
            assert_eq!(find_routes(Rank::from(rank)), *routes);
        }
    }
}
