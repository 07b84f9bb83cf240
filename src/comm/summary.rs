//! A communicator's transports, interfaces, algorithms and memory, in one line for the log.

use std::collections::BTreeMap;
use std::fmt;

use crate::comm::address;
use crate::config::Config;
use crate::sys::net::{self, Interface};
use crate::sys::numa::Home;
use crate::sys::team::Team;
use crate::topo::Topology;
use crate::types::Rank;

/// The line that is logged once all ranks have joined.
pub(super) struct Summary<'a> {
    pub(super) name: &'a str,
    pub(super) rank: Rank,
    pub(super) topo: &'a Topology,
    pub(super) config: &'a Config,
    /// For each other rank, the transport that reaches it.
    pub(super) transports: Vec<&'static str>,
    /// The network interfaces, from [`network`].
    pub(super) network: String,
    /// How many rows rank 0's tuning file has.
    pub(super) tuned: usize,
    /// The cores that the ranks of this host share.
    pub(super) cores: usize,
    pub(super) is_oversubscribed: bool,
    /// The threads that share this rank's long copies and reductions.
    pub(super) team: Team,
    /// The NUMA node where its rings are, if there are several.
    pub(super) home: Option<&'a Home>,
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary { name, rank, topo, config, .. } = self;
        let (size, hosts) = (topo.size(), topo.hosts().len());
        let here = topo.hosts()[topo.host_of(*rank)].len();
        write!(f, "communicator `{name}` rank {rank} of {size}: {here} on this host, {hosts} in all; ")?;
        let mut reached: BTreeMap<&str, usize> = BTreeMap::new();
        self.transports.iter().for_each(|transport| *reached.entry(transport).or_default() += 1);
        let reached: Vec<String> = reached.iter().map(|(name, ranks)| format!("{name} to {ranks}")).collect();
        let reached = if reached.is_empty() { "none".to_owned() } else { reached.join(", ") };
        write!(f, "transports: {reached}; interfaces: {}; ", self.network)?;
        f.write_str("algorithms: ")?;
        if let Some(algorithm) = config.algorithm.name() {
            write!(f, "{algorithm} where it can, then ")?;
        }
        match self.tuned {
            0 => f.write_str("the engine's table; ")?,
            rows => write!(f, "{rows} rows of rank 0's tuning file, then the engine's table; ")?,
        }
        let crowd = if self.is_oversubscribed { ", oversubscribed" } else { "" };
        let (ring, eager) = (config.shm_ring_bytes.get(), config.eager_bytes.get());
        write!(f, "cores: {}{crowd}; threads for long copies: {}; ", self.cores, self.team.threads())?;
        write!(f, "memory: {ring} bytes a ring, {eager} a message sent unasked")?;
        self.home.map_or(Ok(()), |home| write!(f, "; rings to this rank: {home}"))
    }
}

/// The interfaces and addresses that the transports advertise to other hosts.
pub(super) fn network(config: &Config, rendezvous_host: Option<&str>) -> String {
    if !config.transport.has_tcp() {
        return "none".to_owned();
    }
    let routed = rendezvous_host.and_then(net::source_toward);
    let interfaces = net::interfaces().unwrap_or_default();
    match address::advertised(&interfaces, config.socket_interfaces.as_deref(), routed) {
        Ok(advertised) => {
            let named = advertised.iter().filter_map(|address| interfaces.iter().find(|each| each.address == *address));
            named.map(|Interface { name, address, .. }| format!("{name} {address}")).collect::<Vec<_>>().join(", ")
        }
        Err(error) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_says_what_a_communicator_runs_on() {
        let hints = [("algorithm", "ring"), ("eager_bytes", "7")].map(|(name, value)| (name.into(), value.into()));
        let (config, topo) = (Config::resolve_with(&|_| None, &hints).unwrap(), Topology::new(&["a", "a", "b", "b"]));
        let summary = Summary {
            name: "main",
            rank: Rank(1),
            topo: &topo,
            config: &config,
            transports: vec!["shm", "tcp", "tcp"],
            network: "eth0 10.0.0.1".to_owned(),
            tuned: 3,
            cores: 1,
            is_oversubscribed: true,
            team: Team::of(2),
            home: None,
        };
        assert_eq!(
            summary.to_string(),
            "communicator `main` rank 1 of 4: 2 on this host, 2 in all; transports: shm to 1, tcp to 2; interfaces: \
             eth0 10.0.0.1; algorithms: ring where it can, then 3 rows of rank 0's tuning file, then the engine's table; \
             cores: 1, oversubscribed; threads for long copies: 3; memory: 262144 bytes a ring, 7 a message sent unasked"
        );
        let home = Home { node: 1, refused: None };
        let alone = Summary { transports: vec![], tuned: 0, is_oversubscribed: false, home: Some(&home), ..summary };
        assert!(alone.to_string().ends_with("sent unasked; rings to this rank: on NUMA node 1"));
        assert!(alone.to_string().contains("transports: none; "));
        assert!(alone.to_string().contains("then the engine's table; cores: 1; "));
    }

    #[test]
    fn interfaces_are_those_that_the_setting_allows() {
        let config = |hint: (&str, &str)| Config::resolve_with(&|_| None, &[(hint.0.into(), hint.1.into())]).unwrap();
        assert_eq!(network(&config(("transport", "shm")), None), "none");
        assert!(network(&config(("socket_ifname", "=lo")), None).starts_with("lo 127.0.0.1"));
    }
}
