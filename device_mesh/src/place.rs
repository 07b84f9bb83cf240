//! Which rank comes where, so that the groups that talk most stay inside a host.

/// The ranks, host by host in the order in which the hosts first appear, and in their own order within a host.
///
/// Laid out in this order, a grid's last dimension is inside a host wherever the hosts' sizes allow.
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
