//! What both sides of the bootstrap start from: one rank's arguments, and the record that rank 0 and leaders write to the store.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::build::Build;
use super::groups::Groups;
use super::protocol::{Host, Keys, Place};
use crate::algo::Tuning;
use crate::comm::address;
use crate::comm::store::Store;
use crate::config::Config;
use crate::error::InitError;
use crate::sys::net;
use crate::transport::tls::Protection;
use crate::types::Rank;

/// The key of the store under which rank 0 says where it listens. The [leaders](super::groups) of a large world use one each, too.
pub const ROOT_KEY: &str = "ncclx_rs/root";

/// How long an answer may take at least to reach those that wait for it.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// How long the store may take to tell why rank 0 waits no longer.
pub(super) const STORE_TIMEOUT: Duration = Duration::from_secs(5);

/// The key of a rank at which others join.
fn key_of(rank: Rank) -> String {
    if rank == Rank(0) { ROOT_KEY.to_owned() } else { format!("ncclx_rs/leader/{rank}") }
}

/// What the store holds under the key of rank 0, or of a leader.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StoreRecord {
    /// What the writer was built from. A rank built from other sources can read this at least.
    pub(super) build: Build,
    pub(super) root: RootRecord,
}

/// How far the writer is.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum RootRecord {
    /// It waits for the other ranks.
    Listening(RootAddress),
    /// It could not start.
    Failed { cause: String },
    /// It waits no longer: this communicator has not come about. A leader that has not found rank 0 does not know which. Where the store
    /// keeps no values, it follows the record by which it was to be found.
    Ended { comm_id: Option<[u8; 16]>, failure: JoinFailure },
    /// Under a leader's key: rank 0 waits no longer, and its own record says why. That may be long.
    RootEnded,
}

impl RootRecord {
    /// The communicator that the writer speaks of, if it says.
    pub(super) fn comm_id(&self) -> Option<[u8; 16]> {
        match self {
            RootRecord::Listening(root) => Some(root.keys.comm_id),
            RootRecord::Ended { comm_id, .. } => *comm_id,
            RootRecord::Failed { .. } | RootRecord::RootEnded => None,
        }
    }
}

/// Why a communicator has not come about, on all ranks. Rank 0 also writes it to the store, for ranks that have not reached it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum JoinFailure {
    /// Some ranks have not joined in time.
    Missing { missing: Vec<u32>, waited: Duration },
    /// The ranks do not fit together.
    Refused { cause: String },
    /// A leader, which says so to those that join through it, does not reach rank 0.
    Unreachable { cause: String },
}

impl JoinFailure {
    /// What this error of rank 0 is for the other ranks.
    pub(super) fn of(error: &InitError) -> JoinFailure {
        match error {
            InitError::Missing { missing, waited, .. } => {
                JoinFailure::Missing { missing: missing.clone(), waited: *waited }
            }
            InitError::Unreachable { rank: 0, cause, .. } => JoinFailure::Unreachable { cause: cause.clone() },
            error => JoinFailure::Refused { cause: error.to_string() },
        }
    }

    /// The error of a rank that learns of it.
    pub(super) fn into_error(self, context: &JoinContext<'_>) -> InitError {
        match self {
            JoinFailure::Missing { missing, waited } => context.missing(missing, waited),
            JoinFailure::Refused { cause } => InitError::Config(cause),
            JoinFailure::Unreachable { cause } => context.unreachable(Rank(0), cause),
        }
    }
}

/// Where rank 0 or a leader listens, and what a joiner must have in common with rank 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RootAddress {
    pub(super) place: Place,
    /// How many ranks rank 0 expects, itself included.
    pub(super) world_size: u32,
    /// How long rank 0 waits for the other ranks.
    pub(super) timeout: Duration,
    pub(super) keys: Keys,
    /// Whether rank 0 mixes a job secret or group secret into these keys.
    pub(super) uses_job_secret: bool,
    pub(super) protection: Protection,
}

/// The arguments of one rank's [`join`](super::join).
pub(super) struct JoinContext<'a> {
    pub(super) name: &'a str,
    pub(super) rank: Rank,
    /// The world, and how it is cut.
    pub(super) groups: Groups,
    pub(super) store: &'a dyn Store,
    pub(super) config: &'a Config,
    pub(super) host: &'a Host,
    pub(super) deadline: Instant,
}

impl JoinContext<'_> {
    pub(super) fn new_keys(&self) -> Result<Keys, InitError> {
        Keys::random().map_err(|error| self.os_error("random bytes", &error))
    }

    /// The table of the tuning file; a table without rows if there is no file.
    pub(super) fn tuning(&self) -> Result<Tuning, InitError> {
        let Some(path) = &self.config.tuning_file else { return Ok(Tuning::default()) };
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string());
        text.and_then(|text| Tuning::parse(&text))
            .map_err(|cause| self.config_error(format!("tuning_file `{path}`: {cause}")))
    }

    /// Listens for joiners. Returns also where other ranks find it.
    pub(super) fn listen(&self) -> Result<(TcpListener, Place), InitError> {
        let listener = net::listen_anywhere().map_err(|error| self.os_error("a listening socket", &error))?;
        let port = listener.local_addr().map_err(|error| self.os_error("the listener's port", &error))?.port();
        let interfaces = net::interfaces().map_err(|error| self.os_error("the list of network interfaces", &error))?;
        let routed = self.store.rendezvous_host().and_then(|host| net::source_toward(&host));
        let addresses = address::advertised(&interfaces, self.config.socket_interfaces.as_deref(), routed)?;
        Ok((listener, Place { host: self.host.clone(), addresses, port }))
    }

    pub(super) fn os_error(&self, what: &str, error: &std::io::Error) -> InitError {
        InitError::Os { comm: self.name.to_string(), what: what.to_string(), cause: error.to_string() }
    }

    pub(super) fn config_error(&self, cause: impl std::fmt::Display) -> InitError {
        InitError::Config(format!("communicator `{}`: {cause}", self.name))
    }

    pub(super) fn missing(&self, missing: Vec<u32>, waited: Duration) -> InitError {
        let leaders = missing.iter().copied().filter(|rank| self.groups.leads(Rank(*rank))).collect();
        InitError::Missing { comm: self.name.to_string(), missing, leaders, waited }
    }

    pub(super) fn unreachable(&self, rank: Rank, cause: impl Into<String>) -> InitError {
        InitError::Unreachable { comm: self.name.to_string(), rank: rank.0, cause: cause.into() }
    }

    /// Tells those that join at `rank` how far it is.
    pub(super) fn publish(&self, rank: Rank, root: RootRecord) -> Result<(), InitError> {
        let record = StoreRecord { build: Build::own(), root };
        let value = serde_json::to_vec(&record).map_err(|error| self.store_failed(rank, error.to_string()))?;
        self.store.set(&key_of(rank), &value).map_err(|cause| self.store_failed(rank, cause))
    }

    /// Why rank 0 or the leader waits no longer, if it has written that: another rank may have made it give up before this one
    /// reached it.
    pub(super) fn failure_in_store(&self) -> Option<InitError> {
        if !self.store.keeps_values() {
            return None;
        }
        let written_by = |rank| {
            let value = self.published(rank, STORE_TIMEOUT).ok()?;
            match serde_json::from_slice(&value).ok()? {
                StoreRecord { root: RootRecord::Ended { failure, .. }, .. } => Some(failure.into_error(self)),
                StoreRecord {
                    root: RootRecord::Listening(_) | RootRecord::Failed { .. } | RootRecord::RootEnded,
                    ..
                } => None,
            }
        };
        let at = self.groups.listener_of(self.rank);
        written_by(Rank(0)).or_else(|| written_by(at).filter(|_| at != Rank(0)))
    }

    /// Until when the table of ranks may take to reach those that wait for it: as long as they would have waited for ranks to join.
    pub(super) fn table_deadline(&self) -> Instant {
        self.deadline.max(Instant::now() + REPLY_TIMEOUT)
    }

    /// What `rank` has published, once it has.
    pub(super) fn published(&self, rank: Rank, timeout: Duration) -> Result<Vec<u8>, String> {
        self.store.get(&key_of(rank), timeout)
    }

    /// What became of the connection to `rank`, at which this one joins, before the outcome came.
    pub(super) fn lost(&self, rank: Rank, error: &std::io::Error, timeout: Duration) -> InitError {
        match error.kind() {
            ErrorKind::TimedOut if rank == Rank(0) => self.missing(vec![0], timeout),
            ErrorKind::TimedOut => self.unreachable(rank, format!("no outcome came in {timeout:?}")),
            ErrorKind::UnexpectedEof => self.unreachable(rank, "it hung up before all ranks had joined"),
            _ => self.unreachable(rank, error.to_string()),
        }
    }

    /// The store failed on the key of this rank.
    pub(super) fn store_failed(&self, rank: Rank, cause: String) -> InitError {
        InitError::Store { comm: self.name.to_string(), key: key_of(rank), cause }
    }
}
