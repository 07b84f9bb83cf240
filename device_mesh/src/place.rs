//! The order of ranks in a grid that keeps the groups with the most communication inside a host.

/// The ranks host by host: hosts in the order of their first rank, ranks of a host in the order of their numbers.
///
/// In this order, a grid's last dimension stays inside a host wherever the hosts' sizes allow it.
pub(crate) fn by_host(hosts: &[usize]) -> Vec<usize> {
    let first = |host: usize| hosts.iter().position(|other| *other == host);
    let mut ranks: Vec<usize> = (0..hosts.len()).collect();
    ranks.sort_by_key(|&rank| (first(hosts[rank]), rank));
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_one_host_come_together() {
        assert_eq!(by_host(&[7, 7, 7]), [0, 1, 2]);
        assert_eq!(by_host(&[5, 3, 5, 3]), [0, 2, 1, 3]);
        assert_eq!(by_host(&[]), [0; 0]);
    }
}
