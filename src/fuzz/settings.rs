//! Fuzz target of settings: the environment and hints.

use std::net::IpAddr;
use std::time::Instant;

use crate::comm::Launch;
use crate::comm::address::advertised;
use crate::config::Config;
use crate::sys::net::Interface;

/// Lines `NAME=value` are the environment, lines `-name=value` hints.
pub(super) fn config(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let settings: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once('=')).collect();
    let variable = |name: &str| settings.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    let hint = |(key, value): &(&str, &str)| Some((key.strip_prefix('-')?.to_owned(), (*value).to_owned()));
    let hints: Vec<(String, String)> = settings.iter().filter_map(hint).collect();
    match Config::resolve_with(&variable, &hints) {
        Ok(config) => check(&config),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    match Launch::resolve(&variable) {
        Ok(launch) => assert!(launch.rank.index() < launch.size && launch.master.is_none_or(|master| master.port > 0)),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// What the rest of the engine relies on.
fn check(config: &Config) {
    let now = Instant::now();
    assert!(now.checked_add(config.timeout).is_some() && now.checked_add(config.connect_timeout).is_some());
    assert!(config.shm_ring_bytes.get().is_power_of_two());
    let host = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("ib0", "fd00::1"), ("eth1", "fe80::1")];
    let host = host.map(|(name, address)| Interface {
        name: name.to_owned(),
        address: address.parse::<IpAddr>().expect("an address"),
        prefix: 24,
        up: true,
    });
    if let Ok(addresses) = advertised(&host, config.socket_interfaces.as_deref(), None) {
        assert!(!addresses.is_empty() && addresses.iter().all(|one| host.iter().any(|each| each.address == *one)));
    }
}
