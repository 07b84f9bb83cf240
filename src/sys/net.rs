//! This host's identity, network interfaces and listeners.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};

use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};

/// One address of a network interface; an interface with several stands for each of them once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The name, as in `ip address`.
    pub name: String,
    /// The address.
    pub address: IpAddr,
    /// How many of its bits are those of its subnet.
    pub prefix: u8,
    /// Whether it can carry traffic now.
    pub up: bool,
}

/// Every address of this host's network interfaces, in the kernel's order.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let listed = if_addrs::get_if_addrs()?;
    let interface = |listed: if_addrs::Interface| Interface {
        address: listed.ip(),
        prefix: match &listed.addr {
            if_addrs::IfAddr::V4(address) => address.prefixlen,
            if_addrs::IfAddr::V6(address) => address.prefixlen,
        },
        up: listed.is_loopback() || listed.is_oper_up(),
        name: listed.name,
    };
    Ok(listed.into_iter().map(interface).collect())
}

/// Whether this host has network devices that read and write memory (RDMA): InfiniBand, RoCE, iWARP or EFA.
pub fn has_rdma_devices() -> bool {
    std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some())
}

/// The source address of packets from this host to `host`; none if there is no route or no such host.
pub fn source_toward(host: &str) -> Option<IpAddr> {
    // Connecting a datagram socket chooses the route and sends nothing, so any port will do.
    const DISCARD: u16 = 9;
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let toward = |to: SocketAddr| {
        let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect(to).ok()?;
        Some(socket.local_addr().ok()?.ip().to_canonical())
    };
    (bare, DISCARD).to_socket_addrs().ok()?.find_map(toward)
}

/// The identity of the kernel and its network namespace: processes with the same identity reach each other over loopback.
pub fn host_identity() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_string())
        .unwrap_or_else(|_| rustix::system::uname().nodename().to_string_lossy().into_owned());
    let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{boot} {}", namespace.to_string_lossy())
}

/// A listener on a free port of every address of this host, IPv6 and IPv4 alike. Accepting from it does not block.
pub fn listen_anywhere() -> io::Result<TcpListener> {
    listen_everywhere(0).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => io::Error::new(error.kind(), no_port_is_free()),
        _ => error,
    })
}

/// As thousands of ranks on one host take them.
fn no_port_is_free() -> String {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let range = range.split_whitespace().collect::<Vec<_>>().join(" to ");
    format!("this host has no free TCP port, all of net.ipv4.ip_local_port_range ({range}) are taken")
}

/// A listener on `port` of every address of this host, IPv6 and IPv4 alike. Accepting from it does not block.
pub fn listen_everywhere(port: u16) -> io::Result<TcpListener> {
    let any = |ip: IpAddr| listen(SocketAddr::new(ip, port));
    // A kernel may have been built or booted without IPv6.
    any(Ipv6Addr::UNSPECIFIED.into()).or_else(|error| match error.kind() {
        ErrorKind::AddrInUse => Err(error),
        _ => any([0; 4].into()),
    })
}

/// A listener on `address`, where IPv6's "any" stands for IPv4 too. Accepting from it does not block.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    // All ranks of a job may connect at once; the kernel reduces the number to its limit.
    const BACKLOG: i32 = 4096;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    // The kernel may still hold connections of an earlier job on the same port.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(TcpListener::from(socket))
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn loopback_is_listed_and_routes_to_itself() {
        let listed = interfaces().unwrap();
        assert!(listed.iter().any(|interface| interface.address.is_loopback() && interface.up), "{listed:?}");
        assert_eq!(source_toward("127.0.0.1"), Some([127, 0, 0, 1].into()));
        assert_eq!(source_toward("no such host"), None);
    }

    #[test]
    fn a_host_keeps_its_identity() {
        assert_eq!(host_identity(), host_identity());
        assert!(host_identity().len() > 1);
    }

    #[test]
    fn the_ports_that_are_taken_are_named() {
        let text = no_port_is_free();
        let (first, last) = text.split_once('(').unwrap().1.split_once(')').unwrap().0.split_once(" to ").unwrap();
        assert!(first.parse::<u16>().unwrap() < last.parse::<u16>().unwrap(), "{text}");
    }

    #[test]
    fn the_listener_takes_both_families() {
        let listener = listen_anywhere().unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect(("127.0.0.1", port)).unwrap();
        if listener.local_addr().unwrap().is_ipv6() && TcpListener::bind("[::1]:0").is_ok() {
            TcpStream::connect(("::1", port)).unwrap();
        }
    }
}
