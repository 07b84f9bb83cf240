//! Which communicators may share a connection: those whose settings make the same connections, and protect them alike.

use std::time::Duration;

use crate::comm::bootstrap::shared_secret;
use crate::config::{Config, TransportChoice};
use crate::error::InitError;
use crate::sync::Arc;
use crate::sys::process::ProcessId;
use crate::transport::tls;

/// What a communicator's settings say of its connections.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Manner {
    /// This rank's host, which may be posed.
    host_id: String,
    transport: TransportChoice,
    interfaces: Option<String>,
    peer_timeout: Duration,
    pub(super) protection: Protection,
}

/// What protects them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Protection {
    tls: tls::Protection,
    files: [Option<String>; 3],
    /// Follows from the secrets that the ranks have beside the store, and does not reveal them.
    beside_store: Option<[u8; 32]>,
}

impl Manner {
    /// That of a rank of this host.
    pub(crate) fn of(config: &Config, host_id: &str) -> Result<Manner, InitError> {
        let shared = shared_secret(config)?;
        let protection = Protection {
            tls: tls::Protection::of(config),
            files: [&config.tls_certificate, &config.tls_key, &config.tls_ca_file].map(Clone::clone),
            beside_store: shared.map(|shared| *shared.derive("ncclx_rs protection", &[]).bytes()),
        };
        Ok(Manner {
            host_id: host_id.to_owned(),
            transport: config.transport,
            interfaces: config.socket_interfaces.clone(),
            peer_timeout: config.peer_timeout,
            protection,
        })
    }

    /// The same for the same manner within this process, and for no other. It reveals no secret.
    pub(crate) fn key(&self) -> String {
        format!("{self:?}")
    }
}

/// Whose connections may be shared: the process at the other end, the host that it is a rank of, and how it is reached.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Way {
    pub(super) process: ProcessId,
    pub(super) host_id: Arc<str>,
    pub(super) manner: Manner,
}
