//! Which of a host's addresses to advertise to the other ranks.
//!
//! ```
//! use ncclx_rs::comm::address::advertised;
//! use ncclx_rs::sys::net::Interface;
//! let interface = |name: &str, address: [u8; 4]| Interface { name: name.into(), address: address.into(), prefix: 24, up: true };
//! let host = [interface("lo", [127, 0, 0, 1]), interface("eth0", [10, 0, 0, 1]), interface("ib0", [10, 1, 0, 1])];
//! assert_eq!(advertised(&host, Some("ib"), None)?, ["10.1.0.1".parse::<std::net::IpAddr>().unwrap()]);
//! # Ok::<(), ncclx_rs::InitError>(())
//! ```

use std::net::IpAddr;

use ipnet::IpNet;

use crate::error::InitError;
use crate::sys::net::Interface;

/// The addresses to advertise, the best first.
///
/// `filter` is the setting `socket_ifname`. `routed` is the address from which this host reaches the rendezvous, and so most
/// likely the other ranks. Loopback is advertised only if there is nothing else or the filter names it. Link-local IPv6 is
/// never advertised, because such an address means nothing on another host.
pub fn advertised(
    interfaces: &[Interface],
    filter: Option<&str>,
    routed: Option<IpAddr>,
) -> Result<Vec<IpAddr>, InitError> {
    let filter = Filter::parse(filter.unwrap_or_default())?;
    let usable = |interface: &&Interface| interface.up && !is_link_local(interface.address);
    let mut chosen: Vec<&Interface> =
        interfaces.iter().filter(usable).filter(|interface| filter.admits(interface)).collect();
    let elsewhere = |interface: &Interface| !interface.address.is_loopback();
    if chosen.iter().any(|interface| elsewhere(interface)) {
        chosen.retain(|interface| elsewhere(interface) || filter.names(interface));
    }
    if chosen.is_empty() {
        return Err(nothing_left(&filter, interfaces));
    }
    chosen.sort_by_key(|interface| preference(interface, routed));
    let mut addresses: Vec<IpAddr> = Vec::with_capacity(chosen.len());
    for interface in chosen {
        if !addresses.contains(&interface.address) {
            addresses.push(interface.address);
        }
    }
    Ok(addresses)
}

/// Lower is better: the routed address, then other network addresses, then those that often repeat on every host.
fn preference(interface: &Interface, routed: Option<IpAddr>) -> u8 {
    const BRIDGES: &[&str] = &["docker", "br-", "virbr", "veth", "cni", "podman", "lxc"];
    let address = interface.address;
    if address.is_loopback() {
        3
    } else if routed == Some(address) {
        0
    } else if BRIDGES.iter().any(|prefix| interface.name.starts_with(prefix)) || is_self_assigned(address) {
        2
    } else {
        1
    }
}

fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

fn is_self_assigned(address: IpAddr) -> bool {
    matches!(address, IpAddr::V4(address) if address.is_link_local())
}

fn nothing_left(filter: &Filter, interfaces: &[Interface]) -> InitError {
    let state = |interface: &Interface| if interface.up { "" } else { " (down)" };
    let list = interfaces.iter().map(|each| format!("{} {}{}", each.name, each.address, state(each)));
    let list = list.collect::<Vec<_>>().join(", ");
    let wish = match filter.text.as_str() {
        "" => "no network interface can be used".to_string(),
        text => format!("socket_ifname `{text}` matches no network interface that can be used"),
    };
    InitError::Config(format!("{wish}; this host has: {list}"))
}

#[derive(Debug)]
struct Filter {
    text: String,
    included: Vec<Pattern>,
    excluded: Vec<Pattern>,
}

#[derive(Debug)]
enum Pattern {
    Prefix(String),
    Exact(String),
    Range(IpNet),
}

impl Filter {
    /// As in NCCL, `^` and `=` before the list apply to every item; an item may also carry its own.
    fn parse(text: &str) -> Result<Filter, InitError> {
        let mut filter = Filter { text: text.trim().to_string(), included: Vec::new(), excluded: Vec::new() };
        let (all_excluded, rest) = strip(&filter.text, '^');
        let (all_exact, rest) = strip(rest, '=');
        for item in rest.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let (excluded, item) = strip(item, '^');
            let (exact, item) = strip(item, '=');
            let pattern = Pattern::parse(item, exact || all_exact).ok_or_else(|| {
                InitError::Config(format!(
                    "socket_ifname is `{text}`: expected names, `=names` and ranges like 10.0.0.0/8, got `{item}`"
                ))
            })?;
            let side = if excluded || all_excluded { &mut filter.excluded } else { &mut filter.included };
            side.push(pattern);
        }
        Ok(filter)
    }

    fn admits(&self, interface: &Interface) -> bool {
        let excluded = self.excluded.iter().any(|pattern| pattern.matches(interface));
        !excluded && (self.included.is_empty() || self.names(interface))
    }

    fn names(&self, interface: &Interface) -> bool {
        self.included.iter().any(|pattern| pattern.matches(interface))
    }
}

impl Pattern {
    fn parse(item: &str, exact: bool) -> Option<Pattern> {
        if item.is_empty() {
            None
        } else if item.contains('/') {
            item.parse().ok().map(Pattern::Range)
        } else if let Ok(address) = item.parse::<IpAddr>() {
            Some(Pattern::Range(address.into()))
        } else if exact {
            Some(Pattern::Exact(item.to_string()))
        } else {
            Some(Pattern::Prefix(item.to_string()))
        }
    }

    fn matches(&self, interface: &Interface) -> bool {
        match self {
            Pattern::Prefix(prefix) => interface.name.starts_with(prefix),
            Pattern::Exact(name) => interface.name == *name,
            Pattern::Range(range) => range.contains(&interface.address),
        }
    }
}

fn strip(text: &str, mark: char) -> (bool, &str) {
    text.strip_prefix(mark).map_or((false, text), |rest| (true, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &[(&str, &str)] = &[
        ("lo", "127.0.0.1"),
        ("lo", "::1"),
        ("docker0", "172.17.0.1"),
        ("eth0", "192.168.1.5"),
        ("eth0", "fe80::5"),
        ("eth10", "10.0.0.5"),
        ("ib0", "fd00::5"),
        ("ib0", "2001:db8::5"),
    ];

    fn host(rows: &[(&str, &str)]) -> Vec<Interface> {
        let interface = |(name, address): &(&str, &str)| Interface {
            name: name.to_string(),
            address: address.parse().unwrap(),
            prefix: 24,
            up: true,
        };
        rows.iter().map(interface).collect()
    }

    fn choose(filter: &str, routed: &str) -> Vec<String> {
        let chosen = advertised(&host(HOST), Some(filter), routed.parse().ok()).unwrap();
        chosen.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_routed_address_comes_first_and_bridges_last() {
        let expected = ["10.0.0.5", "192.168.1.5", "fd00::5", "2001:db8::5", "172.17.0.1"];
        assert_eq!(choose("", "10.0.0.5"), expected);
        assert_eq!(choose("", "127.0.0.1")[0], "192.168.1.5");
        assert_eq!(choose("", "fd00::5")[0], "fd00::5");
    }

    #[test]
    fn filters_choose_by_prefix_name_and_range() {
        assert_eq!(choose("eth", ""), ["192.168.1.5", "10.0.0.5"]);
        assert_eq!(choose("=eth0,ib0", ""), ["192.168.1.5", "fd00::5", "2001:db8::5"]);
        assert_eq!(choose("eth1,=ib0", ""), ["10.0.0.5", "fd00::5", "2001:db8::5"]);
        assert_eq!(choose("10.0.0.0/8, fd00::/8", ""), ["10.0.0.5", "fd00::5"]);
        assert_eq!(choose("10.0.0.5", ""), ["10.0.0.5"]);
    }

    #[test]
    fn a_leading_caret_excludes() {
        assert_eq!(choose("^docker,ib", ""), ["192.168.1.5", "10.0.0.5"]);
        assert_eq!(choose("^=eth0,docker0,2001::/16", ""), ["10.0.0.5", "fd00::5"]);
        assert_eq!(choose("eth,^eth10", ""), ["192.168.1.5"]);
    }

    #[test]
    fn loopback_is_advertised_only_when_named_or_alone() {
        assert_eq!(choose("lo", ""), ["127.0.0.1", "::1"]);
        assert_eq!(choose("::1,eth0", ""), ["192.168.1.5", "::1"]);
        assert_eq!(advertised(&host(&HOST[..2]), None, None).unwrap().len(), 2);
        assert_eq!(choose("^eth,ib,docker", ""), ["127.0.0.1", "::1"]);
    }

    #[test]
    fn link_local_ipv6_and_interfaces_that_are_down_are_never_advertised() {
        let mut interfaces = host(HOST);
        interfaces.iter_mut().filter(|interface| interface.name == "eth0").for_each(|interface| interface.up = false);
        let error = advertised(&interfaces, Some("=eth0"), None).unwrap_err().to_string();
        assert!(error.contains("eth0 192.168.1.5 (down)"), "{error}");
    }

    #[test]
    fn a_filter_that_matches_nothing_lists_what_there_is() {
        let error = advertised(&host(HOST), Some("wlan"), None).unwrap_err().to_string();
        assert!(error.contains("`wlan`") && error.contains("eth10 10.0.0.5, ib0 fd00::5"), "{error}");
    }

    #[test]
    fn a_filter_that_is_no_filter_is_refused() {
        for wrong in ["10.0.0.0/99", "eth0,=", "fd00::/x"] {
            let error = advertised(&host(HOST), Some(wrong), None).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }
}
