//! Bootstrap, NCCL's word: ranks that share only a store come to know each other.
//!
//! Rank 0 is the root. It listens and publishes its address, with the communicator's secret, in one `set`. Every other
//! rank is a joiner: it reads the address in one `get`, connects, proves that it knows the secret and describes itself.
//! Once all ranks have joined, the root sends each of them the table of all ranks. In a large world ranks join through leaders, which
//! use a key of the store each, and the root sends the table to a few ranks, which pass it on; it tells each other rank whom to ask.
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

mod build;
mod context;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod groups;
mod joiner;
#[cfg(test)]
mod joiner_tests;
mod leader;
#[cfg(test)]
mod leader_tests;
mod measured;
mod protocol;
mod rank_info;
mod relay;
mod reply;
mod root;
mod roster;
mod server;
mod simulated;
mod table;
#[cfg(test)]
mod tests;
mod tree;

use std::collections::BTreeMap;
use std::time::Instant;

pub use build::Build;
use context::JoinContext;
pub use context::ROOT_KEY;
use groups::Groups;
pub(crate) use measured::measure_start;
use protocol::Host;
pub use protocol::{Keys, Secret, shared_secret};
pub use rank_info::{Addresses, Common, RankInfo};
use reply::World;
#[cfg(test)]
pub(crate) use simulated::addresses_of;
pub use simulated::simulate_start;

use crate::algo::Tuning;
use crate::comm::store::Store;
use crate::config::Config;
use crate::deadline::deadline_after;
use crate::error::InitError;
use crate::sync::Arc;
use crate::sys::process::{self, ProcessId};
use crate::topo::Cpus;
use crate::types::Rank;

/// What every rank knows once all have joined.
#[derive(Clone, Debug)]
pub struct Bootstrap {
    /// Names this communicator among all.
    pub comm_id: [u8; 16],
    /// Both sides of each connection prove that they know it.
    pub secret: Secret,
    /// Every rank, in order.
    pub ranks: Vec<RankInfo>,
    /// Rank 0's tuning file.
    pub tuning: Tuning,
    /// Rank 0's setting `scratch_bytes`.
    pub scratch_bytes: usize,
}

/// The id of this rank's host.
pub(super) fn host_id(config: &Config) -> String {
    Host::here(config).id
}

/// Joins the communicator `name` as `rank` of `size`. Returns when all ranks have joined, or fails at the timeout.
///
/// `store` must be this communicator's own. `addresses` makes the transports, which need the keys, and returns what
/// peers need to reach each. A world of one rank uses neither store nor network.
pub fn join(
    name: &str,
    rank: Rank,
    size: usize,
    store: &dyn Store,
    config: &Config,
    addresses: impl FnMut(&Keys) -> Result<BTreeMap<String, Vec<u8>>, InitError>,
) -> Result<Bootstrap, InitError> {
    // A leader needs a key of its own.
    let groups = if store.keeps_values() { Groups::of(size) } else { Groups::one(size) };
    join_by(groups, name, rank, store, config, addresses)
}

fn join_by(
    groups: Groups,
    name: &str,
    rank: Rank,
    store: &dyn Store,
    config: &Config,
    mut addresses: impl FnMut(&Keys) -> Result<BTreeMap<String, Vec<u8>>, InitError>,
) -> Result<Bootstrap, InitError> {
    let (start, size) = (Instant::now(), groups.size);
    let world_size = u32::try_from(size).ok().filter(|size| rank.0 < *size).ok_or_else(|| {
        InitError::Config(format!("communicator `{name}`: there is no rank {rank} in a world of {size}"))
    })?;
    let host = Host::here(config);
    let deadline = deadline_after(start, config.connect_timeout);
    let context = JoinContext { name, rank, groups, store, config, host: &host, deadline };
    let mut describe = |keys: &Keys| {
        let (cpus, quota) = process::own_cpus();
        Ok(RankInfo {
            rank,
            host_id: host.id.as_str().into(),
            addresses: addresses(keys)?.into(),
            process: ProcessId::own(),
            cpus: Cpus::new(cpus, quota).on_node(config.numa_node.number().filter(|_| config.numa_collectives)),
            common: Arc::new(Common {
                build: Build::own(),
                world_size,
                name: name.to_string(),
                algorithm: config.algorithm.name().map(str::to_owned),
                through_host: Some(config.engine).filter(|engine| engine.goes_through_host()),
            }),
        })
    };
    let (keys, World { ranks, tuning, scratch_bytes }) = if size == 1 {
        let keys = context.new_keys()?;
        let own = describe(&keys)?;
        (keys, World { ranks: vec![own], tuning: context.tuning()?, scratch_bytes: config.scratch_bytes })
    } else if rank == Rank(0) {
        root::serve(&context, describe)?
    } else {
        joiner::join_root(&context, describe)?
    };
    Ok(Bootstrap { comm_id: keys.comm_id, secret: keys.secret, ranks, tuning, scratch_bytes })
}
