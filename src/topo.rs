//! Topology: which ranks share a host, and which CPUs. Plain data, so that one machine can stand for several hosts.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::types::Rank;

/// The host of every rank of a communicator.
///
/// ```
/// use ncclx_rs::{Rank, Topology};
/// let topo = Topology::new(&["a", "a", "b"]);
/// assert_eq!(topo.hosts(), [vec![Rank(0), Rank(1)], vec![Rank(2)]]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    host_of: Vec<u32>,
    hosts: Vec<Vec<Rank>>,
}

impl Topology {
    /// Groups ranks by equal host identity; hosts are numbered by their first rank.
    pub fn new<T: AsRef<str>>(host_of_rank: &[T]) -> Self {
        let mut numbers: HashMap<&str, u32> = HashMap::new();
        let mut hosts: Vec<Vec<Rank>> = Vec::new();
        let mut host_of = Vec::with_capacity(host_of_rank.len());
        for (rank, name) in (0..host_of_rank.len()).map(Rank::from).zip(host_of_rank) {
            // A host has at least one rank, so there are no more hosts than ranks have numbers.
            let host = *numbers.entry(name.as_ref()).or_insert(hosts.len() as u32);
            host_of.push(host);
            match hosts.get_mut(host as usize) {
                Some(ranks) => ranks.push(rank),
                None => hosts.push(vec![rank]),
            }
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
        self.host_of[rank.index()] as usize
    }

    /// The place of `rank` among the ranks of its host.
    ///
    /// ```
    /// use ncclx_rs::{Rank, Topology};
    /// let topo = Topology::new(&["a", "b", "a"]);
    /// assert_eq!([0, 1, 2].map(|rank| topo.seat(Rank(rank))), [Rank(0), Rank(0), Rank(1)]);
    /// ```
    pub fn seat(&self, rank: Rank) -> Rank {
        let seat = self.hosts[self.host_of(rank)].binary_search(&rank);
        Rank::from(seat.expect("the ranks of a host are ascending, and this is one of them"))
    }

    /// Whether two ranks share a host.
    pub fn same_host(&self, a: Rank, b: Rank) -> bool {
        self.host_of(a) == self.host_of(b)
    }
}

/// The CPUs that a rank may run on.
///
/// ```
/// use ncclx_rs::topo::Cpus;
/// let bound = [3, 5].map(|cpu| Cpus::new([cpu], None));
/// assert_eq!(Cpus::shared_by(&bound), 2);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpus {
    /// The first and the last number of each run.
    runs: Vec<(u32, u32)>,
    /// How many the rank may use at a time, where that is fewer.
    quota: Option<u32>,
}

impl Cpus {
    /// The CPUs with these numbers. The system lets the rank use at most `quota` of them at a time.
    pub fn new(numbers: impl IntoIterator<Item = u32>, quota: Option<u32>) -> Self {
        let runs = merged(numbers.into_iter().map(|number| (number, number)).collect());
        Cpus { runs, quota }
    }

    /// How many CPUs the ranks of one host share: each CPU that any of them may run on counts once. A quota counts if all
    /// ranks have one, since that is usually the quota of their common container.
    pub fn shared_by<'a>(ranks: impl IntoIterator<Item = &'a Cpus>) -> usize {
        let (mut runs, mut quotas) = (Vec::new(), Vec::new());
        for Cpus { runs: own, quota } in ranks {
            runs.extend(own);
            quotas.push(quota.map_or(usize::MAX, |quota| quota as usize));
        }
        let length = |(first, last): (u32, u32)| (last - first) as usize + 1;
        let all = merged(runs).into_iter().map(length).sum::<usize>();
        all.min(quotas.into_iter().max().unwrap_or(0))
    }

    /// How many whole CPUs a rank that may run on these has for itself, if each CPU is shared evenly by all of `ranks`, it among
    /// them, that may run there. A quota is shared by all.
    ///
    /// ```
    /// use ncclx_rs::topo::Cpus;
    /// let [one, other] = [0..6, 4..8].map(|cpus| Cpus::new(cpus, None));
    /// assert_eq!(one.share([&one, &other]), 5);
    /// ```
    pub fn share<'a>(&self, ranks: impl IntoIterator<Item = &'a Cpus>) -> usize {
        let ranks: Vec<&Cpus> = ranks.into_iter().collect();
        let includes = |rank: &Cpus, cpu| rank.runs.iter().any(|(first, last)| (*first..=*last).contains(&cpu));
        let users = |cpu| ranks.iter().filter(|rank| includes(rank, cpu)).count();
        let own = self.runs.iter().flat_map(|(first, last)| *first..=*last);
        let share: f64 = own.map(|cpu| 1.0 / users(cpu).max(1) as f64).sum();
        let quota = self.quota.map_or(usize::MAX, |quota| quota as usize / ranks.len().max(1));
        // Thirds of three CPUs are one, also as they are added here.
        ((share + 1e-6) as usize).min(quota)
    }
}

/// Merges runs into runs that neither overlap nor touch, in order. A run that ends before it begins is dropped.
fn merged(mut runs: Vec<(u32, u32)>) -> Vec<(u32, u32)> {
    runs.retain(|(first, last)| first <= last);
    runs.sort_unstable();
    let mut apart: Vec<(u32, u32)> = Vec::new();
    for (first, last) in runs {
        match apart.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
            _ => apart.push((first, last)),
        }
    }
    apart
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(ranks: &[Cpus]) -> usize {
        Cpus::shared_by(ranks)
    }

    #[test]
    fn a_host_has_the_cpus_that_any_of_its_ranks_may_run_on() {
        let bound = |cpus: &[u32]| Cpus::new(cpus.iter().copied(), None);
        assert_eq!(shared(&[bound(&[0]), bound(&[1]), bound(&[2])]), 3, "a core each");
        assert_eq!(shared(&[bound(&[7]), bound(&[7])]), 1, "the same core");
        assert_eq!(shared(&[bound(&[3, 1, 0]), bound(&[1, 2]), bound(&[9])]), 5, "some overlap");
        assert_eq!(shared(&[bound(&[0, 1, 2, 3]), bound(&[0, 1, 2, 3])]), 4, "not bound");
        assert_eq!(bound(&[5, 1, 0, 4, 2]), Cpus { runs: vec![(0, 2), (4, 5)], quota: None });
        assert_eq!(shared(&[]), 0);
    }

    #[test]
    fn a_quota_counts_where_all_have_one() {
        let quota = |quota| Cpus::new(0..8, quota);
        assert_eq!(shared(&[quota(Some(2)), quota(Some(3))]), 3);
        assert_eq!(shared(&[quota(Some(2)), quota(None)]), 8);
    }

    #[test]
    fn a_rank_has_its_share_of_each_cpu() {
        let bound = |cpus: std::ops::Range<u32>| Cpus::new(cpus, None);
        let shares = |ranks: &[Cpus]| ranks.iter().map(|rank| rank.share(ranks)).collect::<Vec<_>>();
        assert_eq!(shares(&[bound(0..64), bound(0..64)]), [32, 32], "not bound");
        assert_eq!(shares(&[bound(0..8), bound(8..9), bound(8..16)]), [8, 0, 7], "some bound");
        assert_eq!(shares(&[bound(0..3), bound(0..3), bound(0..3)]), [1, 1, 1]);
        assert_eq!(shares(&[Cpus::new(0..64, Some(9)), bound(64..65)]), [4, 1], "a quota is for all");
        assert_eq!(bound(0..4).share([]), 4);
        assert_eq!(bound(0..4).share(&[bound(0..4), Cpus { runs: vec![(0, u32::MAX), (9, 3)], quota: None }]), 2);
    }

    #[test]
    fn what_another_rank_says_overflows_nothing() {
        let odd = |runs: &[(u32, u32)]| Cpus { runs: runs.to_vec(), quota: None };
        assert_eq!(shared(&[odd(&[(5, 3)]), odd(&[(2, 2)])]), 1);
        assert_eq!(shared(&[odd(&[(0, u32::MAX)]), odd(&[(u32::MAX, u32::MAX)])]), 1 << 32);
    }
}
