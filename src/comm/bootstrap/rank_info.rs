//! What a rank tells all others about itself.
//!
//! Each rank holds what all others tell while it joins, so that memory counts with the square of the world's size on a host. What
//! ranks have in common is therefore held once, by all of whom a [table](super::table) says it once.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::build::Build;
use crate::config::EngineChoice;
use crate::sync::Arc;
use crate::sys::process::ProcessId;
use crate::topo::Cpus;
use crate::types::Rank;

/// What a rank tells all others about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankInfo {
    /// The rank.
    #[serde(with = "rank_number")]
    pub rank: Rank,
    /// The host it runs on; ranks with equal identities share one.
    pub host_id: Arc<str>,
    /// What peers need to reach this rank.
    pub addresses: Addresses,
    /// Its process, for ranks of the same host.
    pub process: ProcessId,
    /// The CPUs it may run on.
    pub cpus: Cpus,
    /// What it tells of the communicator and of itself that others tell as well.
    pub common: Arc<Common>,
}

/// What ranks that fit together have in common, as a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Common {
    /// What the rank was built from.
    pub build: Build,
    /// The number of ranks it expects.
    pub world_size: u32,
    /// The communicator's name.
    pub name: String,
    /// The algorithm that its settings ask for. Rank 0's holds for all ranks; joining fails if another rank asks for another.
    pub algorithm: Option<String>,
    /// Its engine, where that has tensors of devices go through memory of the host.
    pub through_host: Option<EngineChoice>,
}

/// For each transport by name, what peers need to reach a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "BTreeMap<String, Vec<u8>>", into = "BTreeMap<String, Vec<u8>>")]
pub struct Addresses {
    transports: Arc<[String]>,
    /// Of each transport in turn: the length of the address, the address.
    bytes: Box<[u8]>,
}

impl Addresses {
    /// An address for each transport in turn.
    pub(super) fn new<'a>(transports: Arc<[String]>, addresses: impl Iterator<Item = &'a [u8]>) -> Addresses {
        let mut bytes = Vec::new();
        for address in addresses {
            let length = u32::try_from(address.len()).expect("a description of a rank is shorter");
            bytes.extend(length.to_le_bytes());
            bytes.extend(address);
        }
        Addresses { transports, bytes: bytes.into() }
    }

    /// The names of the transports.
    pub(super) fn transports(&self) -> &Arc<[String]> {
        &self.transports
    }

    /// The addresses, in the order of the names.
    pub(super) fn all(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.bytes[..];
        std::iter::from_fn(move || {
            let (length, behind) = rest.split_first_chunk()?;
            let (address, behind) = behind.split_at(u32::from_le_bytes(*length) as usize);
            rest = behind;
            Some(address)
        })
    }

    /// The address for a transport, if the rank has it.
    pub fn get(&self, transport: &str) -> Option<&[u8]> {
        let place = self.transports.iter().position(|name| name == transport)?;
        self.all().nth(place)
    }
}

impl From<BTreeMap<String, Vec<u8>>> for Addresses {
    fn from(addresses: BTreeMap<String, Vec<u8>>) -> Addresses {
        Addresses::new(addresses.keys().cloned().collect(), addresses.values().map(Vec::as_slice))
    }
}

impl From<Addresses> for BTreeMap<String, Vec<u8>> {
    fn from(addresses: Addresses) -> BTreeMap<String, Vec<u8>> {
        addresses.transports.iter().cloned().zip(addresses.all().map(<[u8]>::to_vec)).collect()
    }
}

pub(super) mod rank_number {
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::types::Rank;

    pub(crate) fn serialize<S: Serializer>(rank: &Rank, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u32(rank.0)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Rank, D::Error> {
        u32::deserialize(deserializer).map(Rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_transport_has_its_address() {
        let map: BTreeMap<String, Vec<u8>> =
            [("b".to_owned(), vec![1, 2, 3]), ("a".to_owned(), vec![]), ("c".to_owned(), vec![0; 300])].into();
        let addresses = Addresses::from(map.clone());
        assert_eq!(addresses.get("a"), Some(&[][..]));
        assert_eq!(addresses.get("b"), Some(&[1, 2, 3][..]));
        assert_eq!(addresses.get("c"), Some(&[0; 300][..]));
        assert_eq!(addresses.get("d"), None);
        assert_eq!(BTreeMap::from(addresses), map);
    }
}
