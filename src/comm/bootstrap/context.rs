//! What both sides of the bootstrap start from: one rank's arguments, and the record that rank 0 writes to the store.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::build::Build;
use super::protocol::{Host, Keys, Place};
use crate::algo::Tuning;
use crate::comm::address;
use crate::comm::store::Store;
use crate::config::Config;
use crate::error::InitError;
use crate::sys::net;
use crate::transport::tls::Protection;
use crate::types::Rank;

/// The one key of the store that is used.
pub const ROOT_KEY: &str = "ncclx_rs/root";

/// What the store holds under [`ROOT_KEY`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StoreRecord {
    /// What rank 0 was built from. A rank built from other sources can read this at least.
    pub(super) build: Build,
    pub(super) root: RootRecord,
}

/// How far rank 0 is.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum RootRecord {
    /// It waits for the other ranks.
    Listening(RootAddress),
    /// It could not start.
    Failed { cause: String },
    /// It waits no longer.
    Ended(JoinFailure),
}

/// Why a communicator has not come about, on all ranks. Rank 0 also writes it to the store, for ranks that have not reached it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum JoinFailure {
    /// Some ranks have not joined in time.
    Missing { missing: Vec<u32>, waited: Duration },
    /// The ranks do not fit together.
    Refused { cause: String },
}

impl JoinFailure {
    /// What this error of rank 0 is for the other ranks.
    pub(super) fn of(error: &InitError) -> JoinFailure {
        match error {
            InitError::Missing { missing, waited, .. } => {
                JoinFailure::Missing { missing: missing.clone(), waited: *waited }
            }
            error => JoinFailure::Refused { cause: error.to_string() },
        }
    }

    /// The error of a rank that learns of it.
    pub(super) fn into_error(self, context: &JoinContext<'_>) -> InitError {
        match self {
            JoinFailure::Missing { missing, waited } => context.missing(missing, waited),
            JoinFailure::Refused { cause } => InitError::Config(cause),
        }
    }
}

/// Where rank 0 listens, and what a joiner must have in common with it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RootAddress {
    pub(super) place: Place,
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
    pub(super) size: usize,
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
        InitError::Missing { comm: self.name.to_string(), missing, waited }
    }

    pub(super) fn unreachable(&self, rank: Rank, cause: impl Into<String>) -> InitError {
        InitError::Unreachable { comm: self.name.to_string(), rank: rank.0, cause: cause.into() }
    }

    pub(super) fn store_failed(&self, cause: String) -> InitError {
        InitError::Store { comm: self.name.to_string(), key: ROOT_KEY.to_string(), cause }
    }
}
