//! Chooses and opens the transports of one communicator, and which of them reaches each peer.

use std::collections::BTreeMap;

use crate::comm::address;
use crate::comm::bootstrap::{Keys, RankInfo};
use crate::config::{Config, TransportChoice};
use crate::engine::core::Route;
use crate::error::InitError;
use crate::sys::net;
use crate::sys::poller::Poller;
use crate::topo::Topology;
use crate::transport::Transport;
use crate::transport::auth::Identity;
use crate::transport::shm::ShmTransport;
use crate::transport::tcp::TcpTransport;
use crate::transport::tls::Tls;
use crate::types::Rank;

/// A transport and where it reaches.
struct Link {
    transport: Box<dyn Transport>,
    reach: Reach,
}

/// Which peers a transport is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reach {
    SameHost,
    Everywhere,
}

/// The transports of one communicator, the preferred ones first.
#[derive(Default)]
pub(crate) struct Links {
    links: Vec<Link>,
}

impl Links {
    /// Opens the transports that the configuration allows.
    pub(crate) fn open(
        name: &str,
        rank: Rank,
        size: usize,
        keys: &Keys,
        config: &Config,
        poller: &Poller,
        rendezvous_host: Option<&str>,
    ) -> Result<Links, InitError> {
        let identity = || Identity { comm: keys.comm_id, me: rank, size, secret: keys.secret };
        let os = |what: &str| {
            let (comm, what) = (name.to_owned(), what.to_owned());
            move |cause: std::io::Error| InitError::Os { comm, what, cause: cause.to_string() }
        };
        let mut links = Vec::new();
        if config.transport != TransportChoice::Tcp {
            let transport = ShmTransport::new(
                identity(),
                poller.clone(),
                config.shm_ring_bytes.get(),
                config.single_copy_bytes > 0,
            )
            .map_err(os("the shared memory transport"))?;
            links.push(Link { transport: Box::new(transport), reach: Reach::SameHost });
        }
        if config.transport != TransportChoice::Shm {
            let interfaces = net::interfaces().map_err(os("the list of network interfaces"))?;
            let routed = rendezvous_host.and_then(net::source_toward);
            let advertise = address::advertised(&interfaces, config.socket_interfaces.as_deref(), routed)?;
            let tls = Tls::new(config, &keys.secret)?;
            let transport =
                TcpTransport::new(identity(), tls, poller.clone(), advertise).map_err(os("the TCP transport"))?;
            links.push(Link { transport: Box::new(transport), reach: Reach::Everywhere });
        }
        Ok(Links { links })
    }

    /// The addresses to publish, by transport name.
    pub(crate) fn addresses(&self) -> BTreeMap<String, Vec<u8>> {
        self.links.iter().map(|link| (link.transport.name().to_owned(), link.transport.address())).collect()
    }

    /// For every peer, the first transport that reaches it.
    pub(crate) fn routes(
        &self,
        name: &str,
        me: Rank,
        topo: &Topology,
        ranks: &[RankInfo],
        config: &Config,
    ) -> Result<Vec<Option<Route>>, InitError> {
        let route_to = |peer: Rank| {
            let candidates = self.links.iter().enumerate();
            candidates.filter(|(_, link)| link.reach == Reach::Everywhere || topo.same_host(me, peer)).find_map(
                |(transport, link)| {
                    let address = ranks[peer.index()].addresses.get(link.transport.name())?.clone();
                    Some(Route { transport, address })
                },
            )
        };
        (0..topo.size())
            .map(Rank::from)
            .map(|peer| match route_to(peer) {
                _ if peer == me => Ok(None),
                Some(route) => Ok(Some(route)),
                None => Err(InitError::Config(format!(
                    "communicator `{name}`: transport {:?} does not reach rank {peer} on host `{}` from rank {me} on host `{}`",
                    config.transport,
                    ranks[peer.index()].host_id,
                    ranks[me.index()].host_id,
                ))),
            })
            .collect()
    }

    /// The transports, in the order that routes count.
    pub(crate) fn into_transports(self) -> Vec<Box<dyn Transport>> {
        self.links.into_iter().map(|link| link.transport).collect()
    }
}
