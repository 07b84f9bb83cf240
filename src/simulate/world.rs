//! A world: how many ranks on how many hosts.

use super::error::SimulateError;
use crate::algo::tuning::MAX_RANKS;
use crate::topo::Topology;

/// Hosts with the same number of ranks each. Ranks are numbered host by host, as launchers do.
#[derive(Clone, Debug)]
pub struct World {
    ranks_per_host: usize,
    topo: Topology,
}

impl World {
    /// A world of `hosts` with `ranks_per_host` each.
    ///
    /// ```
    /// use ncclx_rs::simulate::World;
    /// assert_eq!(World::new(8, 4).unwrap().ranks(), 32);
    /// assert_eq!(World::new(0, 4).unwrap_err().to_string(), "ranks: expected from 1 to 1048576, got 0 on each of 4 hosts");
    /// ```
    pub fn new(ranks_per_host: usize, hosts: usize) -> Result<World, SimulateError> {
        let ranks = ranks_per_host.checked_mul(hosts).filter(|ranks| (1..=MAX_RANKS).contains(ranks));
        let ranks = ranks.ok_or(SimulateError::Ranks { ranks_per_host, hosts })?;
        let host_of: Vec<String> = (0..ranks).map(|rank| (rank / ranks_per_host).to_string()).collect();
        Ok(World { ranks_per_host, topo: Topology::new(&host_of) })
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.topo.size()
    }

    /// The number of hosts.
    pub fn hosts(&self) -> usize {
        self.ranks() / self.ranks_per_host
    }

    /// Who shares a host with whom.
    pub fn topo(&self) -> &Topology {
        &self.topo
    }

    /// The number of the host of a rank.
    pub(crate) fn host_of(&self, rank: u32) -> usize {
        rank as usize / self.ranks_per_host
    }
}
