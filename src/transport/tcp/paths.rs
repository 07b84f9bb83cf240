//! From which of this host's addresses each rail goes to which of the peer's.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr, TcpStream};

use ipnet::IpNet;

use crate::sys::net::{self, Interface};

/// An address to connect to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::transport) struct Target {
    /// The address of this host to do that from; none for the one that the system chooses.
    pub(in crate::transport) source: Option<IpAddr>,
    pub(in crate::transport) address: SocketAddr,
}

/// For each of `rails` connections to a peer that listens at `theirs`, what to try, in order. `own` are this host's addresses,
/// the best first.
///
/// The rails go round over the networks that both hosts are in: from each interface of this host to the peer's address in the
/// same subnet. Where they share none, an interface goes with the peer's address of the same place in the order. A rail whose
/// network does not lead there takes another.
pub(super) fn paths(own: &[Interface], theirs: &[IpAddr], port: u16, rails: usize) -> Vec<VecDeque<Target>> {
    let anyhow = theirs.iter().map(|address| Target { source: None, address: (*address, port).into() });
    let pairs = if rails > 1 { pairs(own, theirs) } else { Vec::new() };
    let path = |rail: usize| {
        let pair = (!pairs.is_empty()).then(|| pairs[rail % pairs.len()]);
        let first = pair.map(|(source, address)| Target { source: Some(source), address: (address, port).into() });
        first.into_iter().chain(anyhow.clone()).collect()
    };
    (0..rails).map(path).collect()
}

/// What to try for a rail that is to be opened again, which went its `last` way if it was ever open: its own network, and where
/// that did not lead there, the one that did. By the way of another rail it would carry nothing that this one does not.
pub(super) fn again(path: &VecDeque<Target>, last: Option<Target>) -> VecDeque<Target> {
    match path.front() {
        Some(own @ Target { source: Some(_), .. }) => {
            std::iter::once(*own).chain(last.filter(|last| last != own)).collect()
        }
        _ => path.clone(),
    }
}

/// The networks: from where to where. None for a peer on this host.
fn pairs(own: &[Interface], theirs: &[IpAddr]) -> Vec<(IpAddr, IpAddr)> {
    let is_own = |address: &IpAddr| own.iter().any(|interface| interface.address == *address);
    if theirs.first().is_none_or(is_own) {
        return Vec::new();
    }
    // Bridges of containers have the same address on many hosts.
    let theirs: Vec<IpAddr> = theirs.iter().copied().filter(|address| !is_own(address)).collect();
    let (mut pairs, mut names): (Vec<(IpAddr, IpAddr)>, Vec<&str>) = Default::default();
    for interface in own {
        let Ok(subnet) = IpNet::new(interface.address, interface.prefix) else { continue };
        let mut near = theirs.iter().filter(|address| subnet.contains(*address));
        let is_free = |address: &&IpAddr| !pairs.iter().any(|(_, taken)| taken == *address);
        if !names.contains(&interface.name.as_str())
            && let Some(address) = near.clone().find(is_free).or_else(|| near.next())
        {
            pairs.push((interface.address, *address));
            names.push(&interface.name);
        }
    }
    if !pairs.is_empty() {
        return pairs;
    }
    let mut left = theirs;
    for interface in own.iter().filter(|interface| !interface.address.is_loopback()) {
        let fits = |address: &IpAddr| address.is_ipv4() == interface.address.is_ipv4();
        if !names.contains(&interface.name.as_str())
            && let Some(place) = left.iter().position(fits)
        {
            pairs.push((interface.address, left.remove(place)));
            names.push(&interface.name);
        }
    }
    pairs
}

/// From where to where a connection goes.
pub(super) fn target(socket: &TcpStream) -> Option<Target> {
    let source = socket.local_addr().ok()?.ip();
    Some(Target { source: Some(source), address: socket.peer_addr().ok()? })
}

/// From which interface and address a connection goes, and `over` to which address or from which.
pub(super) fn way(socket: &TcpStream, over: &str) -> String {
    let local = socket.local_addr().map(|local| local.ip().to_canonical());
    let interfaces = net::interfaces().unwrap_or_default();
    let is_own = |interface: &&Interface| local.as_ref().is_ok_and(|local| interface.address == *local);
    let name = interfaces.iter().find(is_own).map_or("an unknown interface", |interface| interface.name.as_str());
    let local = local.map_or("an unknown address".to_owned(), |local| local.to_string());
    let remote = socket.peer_addr().map_or("an unknown one".to_owned(), canonical);
    format!("{name}, {local} {over} {remote}")
}

/// An address of IPv4 as such.
fn canonical(address: SocketAddr) -> String {
    SocketAddr::new(address.ip().to_canonical(), address.port()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(rows: &[(&str, &str)]) -> Vec<Interface> {
        let interface = |(name, network): &(&str, &str)| {
            let network: IpNet = network.parse().unwrap();
            Interface { name: (*name).to_owned(), address: network.addr(), prefix: network.prefix_len(), up: true }
        };
        rows.iter().map(interface).collect()
    }

    /// The first that each rail tries.
    fn first(own: &[(&str, &str)], theirs: &[&str], rails: usize) -> Vec<String> {
        let theirs: Vec<IpAddr> = theirs.iter().map(|address| address.parse().unwrap()).collect();
        let paths = paths(&host(own), &theirs, 9, rails);
        let text = |target: &Target| {
            let source = target.source.map_or("any".to_owned(), |source| source.to_string());
            format!("{source} to {}", target.address.ip())
        };
        paths.iter().map(|path| text(&path[0])).collect()
    }

    const TWO: &[(&str, &str)] = &[("eth0", "10.0.0.1/24"), ("eth1", "10.0.1.1/24")];

    #[test]
    fn rails_go_round_over_the_networks_that_both_are_in() {
        let expected = ["10.0.0.1 to 10.0.0.2", "10.0.1.1 to 10.0.1.2", "10.0.0.1 to 10.0.0.2"];
        assert_eq!(first(TWO, &["10.0.1.2", "10.0.0.2"], 3), expected);
        assert_eq!(first(TWO, &["10.0.1.2", "10.9.0.2"], 2), ["10.0.1.1 to 10.0.1.2"; 2], "they share one");
    }

    #[test]
    fn an_interface_counts_once_and_so_does_an_address_of_the_peer() {
        let dual = [("eth0", "10.0.0.1/24"), ("eth0", "fd00::1/64"), ("eth1", "10.0.0.7/24")];
        let expected = ["10.0.0.1 to 10.0.0.2", "10.0.0.7 to 10.0.0.8"];
        assert_eq!(first(&dual, &["10.0.0.2", "fd00::2", "10.0.0.8"], 2), expected);
    }

    #[test]
    fn without_a_common_subnet_the_order_counts() {
        let expected = ["10.0.0.1 to 10.7.0.2", "10.0.1.1 to 10.8.0.2"];
        assert_eq!(first(TWO, &["10.7.0.2", "fd00::2", "10.8.0.2"], 2), expected);
    }

    #[test]
    fn one_rail_and_a_peer_of_this_host_go_as_the_system_likes() {
        assert_eq!(first(TWO, &["10.0.1.2", "10.0.0.2"], 1), ["any to 10.0.1.2"]);
        assert_eq!(first(TWO, &["10.0.0.1", "10.0.1.1"], 2), ["any to 10.0.0.1"; 2]);
        let bridge = [("eth0", "10.0.0.1/24"), ("docker0", "172.17.0.1/16")];
        assert_eq!(first(&bridge, &["10.0.0.2", "172.17.0.1"], 2), ["10.0.0.1 to 10.0.0.2"; 2]);
    }

    #[test]
    fn a_rail_that_is_opened_again_tries_its_network_and_the_way_that_it_went() {
        let theirs = ["10.0.0.2", "10.0.1.2"].map(|address| address.parse().unwrap());
        let path = &paths(&host(TWO), &theirs, 9, 2)[1];
        let [own, other] = ["10.0.1", "10.0.0"].map(|net| Target {
            source: Some(format!("{net}.1").parse().unwrap()),
            address: format!("{net}.2:9").parse().unwrap(),
        });
        assert_eq!((again(path, None), again(path, Some(own))), ([own].into(), [own].into()));
        assert_eq!(again(path, Some(other)), [own, other], "it had taken the other's");
        // Where the system chooses.
        let path = &paths(&host(TWO), &["10.0.0.1".parse().unwrap()], 9, 2)[1];
        assert_eq!(again(path, Some(own)), *path);
    }

    #[test]
    fn a_rail_whose_network_does_not_lead_there_tries_every_address() {
        let theirs = ["10.0.0.2", "10.0.1.2"].map(|address| address.parse().unwrap());
        let paths = paths(&host(TWO), &theirs, 9, 2);
        let addresses: Vec<_> = paths[1].iter().map(|target| target.address.to_string()).collect();
        assert_eq!(addresses, ["10.0.1.2:9", "10.0.0.2:9", "10.0.1.2:9"]);
    }
}
