//! Which ranks share a host. Plain data, so that one machine can pose as many.

use crate::types::Rank;

/// Where every rank of a communicator runs.
///
/// ```
/// use ncclx_rs::{Rank, Topology};
/// let topo = Topology::new(&["a", "a", "b"]);
/// assert_eq!(topo.hosts(), [vec![Rank(0), Rank(1)], vec![Rank(2)]]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    host_of: Vec<usize>,
    hosts: Vec<Vec<Rank>>,
}

impl Topology {
    /// Groups ranks by equal host identity; hosts are numbered by their first rank.
    pub fn new<T: AsRef<str>>(host_of_rank: &[T]) -> Self {
        let mut names: Vec<&str> = Vec::new();
        let mut hosts: Vec<Vec<Rank>> = Vec::new();
        let mut host_of = Vec::with_capacity(host_of_rank.len());
        for (index, name) in host_of_rank.iter().map(AsRef::as_ref).enumerate() {
            let host = names.iter().position(|known| *known == name).unwrap_or_else(|| {
                names.push(name);
                hosts.push(Vec::new());
                names.len() - 1
            });
            host_of.push(host);
            hosts[host].push(Rank::from(index));
        }
        Topology { host_of, hosts }
    }

    /// All ranks on one host.
    pub fn single_host(size: usize) -> Self {
        Topology::new(&vec![""; size])
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.host_of.len()
    }

    /// The ranks of each host, ascending.
    pub fn hosts(&self) -> &[Vec<Rank>] {
        &self.hosts
    }

    /// The index into [`Topology::hosts`] of the host that `rank` runs on.
    pub fn host_of(&self, rank: Rank) -> usize {
        self.host_of[rank.index()]
    }

    /// Whether two ranks share a host.
    pub fn same_host(&self, a: Rank, b: Rank) -> bool {
        self.host_of(a) == self.host_of(b)
    }
}
