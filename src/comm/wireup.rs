//! Wireup, UCX's word: opens the transports of one communicator and chooses those that reach each peer.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::comm::address;
use crate::comm::bootstrap::RankInfo;
use crate::config::{Config, TcpStreams, UcxChoice};
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
use crate::transport::ucx::{Allowed, Need, UcxTransport};
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

/// UCX as data may take it; none where it does not. The error says why a rank that takes UCX alone cannot.
fn allowed_ucx(name: &str, me: Rank, config: &Config, has_tls: bool) -> Result<Option<Allowed>, InitError> {
    let allowed = || Allowed::by(config, &[], has_tls);
    if !config.transport.has_others_than_ucx() {
        // The cause is known before others rely on this rank.
        let loaded = allowed().and_then(|allowed| allowed.load().map(|_| allowed));
        return loaded.map(Some).map_err(|cause| no_ucx(name, me, &cause));
    }
    // Beside others it has to be asked for: no RDMA device has shown it to work, and UCX guards nobody's memory.
    if !matches!(config.ucx, UcxChoice::File(_)) {
        return Ok(None);
    }
    Ok(allowed().inspect_err(|cause| log::debug!("communicator `{name}`: no UCX: {cause}")).ok())
}

/// The error of a rank that does without UCX where it must not.
fn no_ucx(name: &str, rank: Rank, cause: &str) -> InitError {
    InitError::Config(format!("communicator `{name}`: rank {rank} does not take UCX: {cause}"))
}

/// Which peers a transport is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Locality {
    SameHost,
    OtherHosts,
    Everywhere,
    /// None: it has turned out to be of no use.
    Nowhere,
}

impl Locality {
    /// Whether it is for a peer, which may be on the same host.
    fn has(self, is_same_host: bool) -> bool {
        match self {
            Locality::SameHost => is_same_host,
            Locality::OtherHosts => !is_same_host,
            Locality::Everywhere => true,
            Locality::Nowhere => false,
        }
    }
}

/// The transports of one communicator, the preferred ones first.
#[derive(Default)]
pub(crate) struct Transports {
    transports: Vec<Entry>,
    /// UCX, where it is used only if it is better than TCP.
    optional_ucx: Option<Allowed>,
}

impl Transports {
    /// Opens the transports that the configuration allows. Connections of data are shared with communicators of the same `manner`.
    pub(crate) fn open(
        name: &str,
        identity: &Identity,
        config: &Config,
        poller: &Poller,
        rendezvous_host: Option<&str>,
        purpose: Purpose,
        manner: Option<&str>,
    ) -> Result<Transports, InitError> {
        let os = |what: &str| {
            let (comm, what) = (name.to_owned(), what.to_owned());
            move |cause: std::io::Error| InitError::Os { comm, what, cause: cause.to_string() }
        };
        let choice = config.transport;
        // The failure detector has connections of its own, which say that a process is gone.
        let has_others = purpose == Purpose::FailureDetector || choice.has_others_than_ucx();
        let (mut transports, mut optional_ucx) = (Vec::new(), None);
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
        if choice.has_shm() && has_others {
            let (node, share_bells) = (config.numa_node.number(), purpose == Purpose::Data);
            let settings = RingSettings { bytes, peer_can_read, line_ownership, node, share_bells };
            let transport = ShmTransport::new(identity.clone(), poller.clone(), settings)
                .map_err(os("the shared memory transport"))?;
            transports.push(Entry { transport: Box::new(transport), locality: Locality::SameHost, purpose });
        }
        if choice.has_tcp() {
            let interfaces = net::interfaces().map_err(os("the list of network interfaces"))?;
            let routed = rendezvous_host.and_then(net::source_toward);
            let hosts = address::advertised(&interfaces, config.socket_interfaces.as_deref(), routed)?;
            let of_address = |host: &IpAddr| interfaces.iter().find(|interface| interface.address == *host).cloned();
            let advertise = hosts.iter().filter_map(of_address).collect();
            let tls = Tls::new(config, &identity.secret)?;
            let takes_ucx = purpose == Purpose::Data && identity.size > 1;
            if takes_ucx && let Some(allowed) = allowed_ucx(name, identity.me, config, tls.is_some())? {
                let (need, locality) = match has_others {
                    true => (Need::Better, Locality::OtherHosts),
                    false => (Need::Any, Locality::Everywhere),
                };
                optional_ucx = has_others.then(|| allowed.clone());
                let (identity, poller) = (identity.clone(), poller.clone());
                let transport = UcxTransport::new(identity, allowed, need, poller, hosts, timeout)
                    .map_err(os("the UCX transport"))?;
                transports.push(Entry { transport: Box::new(transport), locality, purpose });
            }
            if has_others {
                let manner = manner.filter(|_| purpose == Purpose::Data).map(str::to_owned);
                let (identity, poller) = (identity.clone(), poller.clone());
                let transport = TcpTransport::new(identity, tls, poller, advertise, streams, timeout, manner)
                    .map_err(os("the TCP transport"))?;
                transports.push(Entry { transport: Box::new(transport), locality: Locality::Everywhere, purpose });
            }
        }
        Ok(Transports { transports, optional_ucx })
    }

    /// Has peers that connect wait, and wake nobody, until the transports accept.
    pub(crate) fn pause(&mut self) -> std::io::Result<()> {
        self.transports.iter_mut().try_for_each(|entry| entry.transport.pause())
    }

    /// Refuses ranks of which one takes UCX alone and another does not offer it. All ranks find the same.
    pub(crate) fn check(name: &str, ranks: &[RankInfo]) -> Result<(), InitError> {
        let offers = |info: &&RankInfo, transport: &str| info.addresses.get(transport).is_some();
        let takes_alone = |info: &&RankInfo| offers(info, "ucx") && !offers(info, "tcp");
        let forced = ranks.iter().find(takes_alone);
        let Some((forced, lacking)) = forced.zip(ranks.iter().find(|info| !offers(info, "ucx"))) else {
            return Ok(());
        };
        let cause = format!("rank {} has transport=ucx alone; set it on both, or on neither", forced.rank);
        Err(no_ucx(name, lacking.rank, &cause))
    }

    /// Loads UCX where it may be better than TCP, which it can be between hosts alone, and does without where that fails.
    pub(crate) fn settle(&mut self, name: &str, topo: &Topology) {
        let Some(allowed) = self.optional_ucx.take() else { return };
        let cause = match topo.hosts().len() {
            1 => "all ranks are on one host".to_owned(),
            _ => match allowed.load() {
                Ok(_) => return,
                Err(cause) => cause,
            },
        };
        log::debug!("communicator `{name}`: no UCX: {cause}");
        for entry in self.transports.iter_mut().filter(|entry| entry.transport.name() == "ucx") {
            entry.locality = Locality::Nowhere;
        }
    }

    /// The addresses to publish, by transport name.
    pub(crate) fn addresses(&self) -> BTreeMap<String, Vec<u8>> {
        self.transports.iter().map(|entry| (entry.key(), entry.transport.address())).collect()
    }

    /// The transports that reach `peer`, of which there is at least one, the preferred one first.
    pub(crate) fn routes(
        &self,
        name: &str,
        own: &RankInfo,
        topo: &Topology,
        config: &Config,
        peer: &RankInfo,
    ) -> Result<Vec<Route>, InitError> {
        let candidates = self.transports.iter().enumerate();
        let reaching = candidates.filter(|(_, entry)| entry.locality.has(topo.same_host(own.rank, peer.rank)));
        let route = |(transport, entry): (usize, &Entry)| {
            let address = peer.addresses.get(&entry.key())?.to_vec();
            Some(Route { transport, address })
        };
        let routes: Vec<Route> = reaching.filter_map(route).collect();
        if routes.is_empty() {
            return Err(InitError::Config(format!(
                "communicator `{name}`: transport {:?} does not reach rank {} on host `{}` from rank {} on host `{}`",
                config.transport, peer.rank, peer.host_id, own.rank, own.host_id,
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
    use crate::comm::bootstrap::addresses_of;
    use crate::transport::Detour;
    use crate::transport::auth::Secret;

    #[test]
    fn addresses_are_as_long_as_those_that_are_simulated() {
        let identity = Identity { comm: [0; 16], me: Rank(3), size: 9, secret: Secret::new([0; 32]) };
        let (config, poller) = (Config::default(), Poller::new().expect("a poller"));
        let lengths = |addresses: BTreeMap<String, Vec<u8>>| -> Vec<(String, usize)> {
            // An address of IPv4 has from 7 to 15 digits, and a port up to five.
            addresses.into_iter().map(|(name, address)| (name, address.len().div_ceil(16))).collect()
        };
        let mut real = BTreeMap::new();
        for purpose in [Purpose::Data, Purpose::FailureDetector] {
            let transports =
                Transports::open("test", &identity, &config, &poller, None, purpose, None).expect("they open");
            real.extend(transports.addresses());
        }
        assert_eq!(lengths(addresses_of(3, 1)), lengths(real));
    }

    #[test]
    fn who_connects_to_paused_transports_wakes_nobody_before_they_accept() {
        let config = Config::default();
        let [theirs, ours] = [(); 2].map(|()| Poller::new().expect("a poller"));
        let open = |me, poller: &Poller| {
            let identity = Identity { comm: [0; 16], me: Rank(me), size: 2, secret: Secret::new([0; 32]) };
            Transports::open("test", &identity, &config, poller, None, Purpose::FailureDetector, None)
                .expect("they open")
        };
        let [mut connecting, mut paused] = [open(0, &theirs), open(1, &ours)];
        paused.pause().expect("they can wait");
        let addresses: Vec<_> = paused.transports.iter().map(|entry| entry.transport.address()).collect();
        let mut streams: Vec<_> = (connecting.transports.iter_mut().zip(&addresses))
            .map(|(entry, address)| entry.transport.open(Rank(1), address, Detour::Impossible).expect("a stream"))
            .collect();
        let is_awake = |poller: &Poller| poller.look(&mut vec![]).expect("a look");
        streams.iter_mut().for_each(|stream| _ = stream.write(&[], &[]));
        assert!(!is_awake(&ours));
        for entry in &mut paused.transports {
            entry.transport.accept();
            streams.iter_mut().for_each(|stream| _ = stream.write(&[], &[]));
        }
        assert!(is_awake(&ours), "their handshakes go on");
    }

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
