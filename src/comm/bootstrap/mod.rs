//! The rendezvous: how ranks that share only a store come to know each other.
//!
//! Rank 0 listens and publishes where, with the job's secret, in one `set`; every other rank learns it in one `get`,
//! connects, describes itself, and gets the table of all ranks once they are complete.
//!
//! ```
//! use std::collections::BTreeMap;
//! use ncclx_rs::{Rank, comm::{bootstrap::join, store::MemoryStore}, config::Config};
//! let (store, config) = (MemoryStore::default(), Config::default());
//! std::thread::scope(|scope| {
//!     let join = |rank| join("example", Rank(rank), 2, &store, &config, |_| Ok(BTreeMap::new()));
//!     let other = scope.spawn(move || join(1));
//!     assert_eq!(join(0)?.ranks, other.join().expect("no panic")?.ranks);
//!     Ok::<(), ncclx_rs::InitError>(())
//! })?;
//! # Ok::<(), ncclx_rs::InitError>(())
//! ```

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

mod build;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod joiner;
mod protocol;
mod root;

use super::address;
use super::store::Store;
use crate::algo::Tuning;
use crate::config::Config;
use crate::error::InitError;
use crate::sys::net;
use crate::sys::process::{self, ProcessId};
use crate::topo::Cpus;
use crate::transport::tls::Protection;
use crate::types::Rank;
pub use build::Build;
use protocol::World;
pub use protocol::{Keys, RankInfo, Secret, shared_secret};

/// The one key of the store that is used.
pub const ROOT_KEY: &str = "ncclx_rs/root";

/// What every rank knows once all have joined.
#[derive(Clone, Debug)]
pub struct Bootstrap {
    /// Names this communicator among all.
    pub comm_id: [u8; 16],
    /// What its connections prove to know.
    pub secret: Secret,
    /// Every rank, in order.
    pub ranks: Vec<RankInfo>,
    /// Rank 0's tuning file.
    pub tuning: Tuning,
}

/// Joins the communicator `name` as `rank` of `size`, and returns when all ranks have or the time is over.
///
/// `store` must be this communicator's own. `addresses` makes the transports, which need the keys, and returns what
/// peers need to reach each. A world of one rank uses neither store nor network.
pub fn join(
    name: &str,
    rank: Rank,
    size: usize,
    store: &dyn Store,
    config: &Config,
    addresses: impl FnOnce(&Keys) -> Result<BTreeMap<String, Vec<u8>>, InitError>,
) -> Result<Bootstrap, InitError> {
    let start = Instant::now();
    let world_size = u32::try_from(size).ok().filter(|size| rank.0 < *size).ok_or_else(|| {
        InitError::Config(format!("communicator `{name}`: there is no rank {rank} in a world of {size}"))
    })?;
    let host = Host::here(config);
    let party = Party { name, rank, size, store, config, host: &host, deadline: later(start, config.connect_timeout) };
    let describe = |keys: &Keys| {
        let (cpus, quota) = process::own_cpus();
        Ok(RankInfo {
            rank,
            host_id: host.id.clone(),
            addresses: addresses(keys)?,
            process: ProcessId::own(),
            cpus: Cpus::new(cpus, quota),
            build: Build::own(),
            world_size,
            name: name.to_string(),
            algorithm: config.algorithm.clone(),
        })
    };
    let (keys, World { ranks, tuning }) = if size == 1 {
        let keys = party.new_keys()?;
        let own = describe(&keys)?;
        (keys, World { ranks: vec![own], tuning: party.tuning()? })
    } else if rank == Rank(0) {
        root::host(&party, describe)?
    } else {
        joiner::attend(&party, describe)?
    };
    Ok(Bootstrap { comm_id: keys.comm_id, secret: keys.secret, ranks, tuning })
}

/// The moment after `patience`; a time that no clock reaches is cut to a century.
pub(in crate::comm) fn later(from: Instant, patience: Duration) -> Instant {
    from + patience.min(Duration::from_secs(100 * 366 * 86400))
}

/// What the store holds.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Notice {
    /// What rank 0 was built from: who was built from other sources can read this at least.
    pub(super) build: Build,
    pub(super) root: RootNotice,
}

/// How rank 0 is.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum RootNotice {
    /// It waits for the others.
    Here(Record),
    /// It could not begin.
    Failed { cause: String },
}

/// Where rank 0 listens.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) host: Host,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) port: u16,
    /// How long rank 0 waits for the others.
    pub(super) patience: Duration,
    pub(super) keys: Keys,
    /// Whether rank 0 mixes what else the ranks know into these keys.
    pub(super) mixes: bool,
    pub(super) protection: Protection,
}

/// The host of a rank, as it is and as it poses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Host {
    /// What counts for everything but loopback, which a pose cannot stretch to other machines.
    pub(super) id: String,
    pub(super) machine: String,
}

impl Host {
    fn here(config: &Config) -> Host {
        let machine = net::host_identity();
        Host { id: config.host_id.clone().unwrap_or_else(|| machine.clone()), machine }
    }
}

/// One rank on its way in.
pub(super) struct Party<'a> {
    pub(super) name: &'a str,
    pub(super) rank: Rank,
    pub(super) size: usize,
    pub(super) store: &'a dyn Store,
    pub(super) config: &'a Config,
    pub(super) host: &'a Host,
    pub(super) deadline: Instant,
}

impl Party<'_> {
    pub(super) fn new_keys(&self) -> Result<Keys, InitError> {
        Keys::random().map_err(|error| self.system("random bytes", &error))
    }

    /// The table of the tuning file; one without rows if there is none.
    pub(super) fn tuning(&self) -> Result<Tuning, InitError> {
        let Some(path) = &self.config.tuning_file else { return Ok(Tuning::default()) };
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string());
        text.and_then(|text| Tuning::parse(&text))
            .map_err(|cause| self.misfit(format!("tuning_file `{path}`: {cause}")))
    }

    /// The addresses of this host that other hosts may know.
    pub(super) fn advertised(&self) -> Result<Vec<IpAddr>, InitError> {
        let interfaces = net::interfaces().map_err(|error| self.system("the list of network interfaces", &error))?;
        let routed = self.store.rendezvous_host().and_then(|host| net::source_toward(&host));
        address::advertised(&interfaces, self.config.socket_interfaces.as_deref(), routed)
    }

    pub(super) fn system(&self, what: &str, error: &std::io::Error) -> InitError {
        InitError::Os { comm: self.name.to_string(), what: what.to_string(), cause: error.to_string() }
    }

    pub(super) fn misfit(&self, cause: impl std::fmt::Display) -> InitError {
        InitError::Config(format!("communicator `{}`: {cause}", self.name))
    }

    pub(super) fn missing(&self, missing: Vec<u32>, waited: Duration) -> InitError {
        InitError::Missing { comm: self.name.to_string(), missing, waited }
    }

    pub(super) fn unreachable(&self, rank: Rank, cause: impl Into<String>) -> InitError {
        InitError::Unreachable { comm: self.name.to_string(), rank: rank.0, cause: cause.into() }
    }

    pub(super) fn store_failed(&self, cause: String) -> InitError {
        InitError::Store { comm: self.name.to_string(), key: ROOT_KEY.to_string(), cause }
    }
}
