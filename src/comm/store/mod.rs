//! The rendezvous store: the little that ranks must share before they can talk to each other.
//!
//! [`MemoryStore`] serves threads of one process, [`TcpStore`] processes; PyTorch brings its own.
//!
//! ```
//! use std::time::Duration;
//! use ncclx_rs::comm::store::{MemoryStore, Store};
//! let store = MemoryStore::default();
//! store.set("key", b"value")?;
//! assert_eq!(store.get("key", Duration::ZERO)?, b"value");
//! # Ok::<(), String>(())
//! ```

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod memory;
mod protocol;
mod server;
mod tcp;

use std::time::Duration;

pub use memory::MemoryStore;
pub use protocol::{KEY_LIMIT, VALUE_LIMIT};
pub use tcp::TcpStore;

use crate::sync::Arc;
use crate::transport::auth::{Identity, Secret};
use crate::types::Rank;

/// A map that every rank of one communicator sees, and no other communicator writes to.
///
/// Failures are told in words, for they come from whatever serves the map.
pub trait Store: Send + Sync {
    /// Binds `key` to `value`.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String>;

    /// The value of `key`, which it waits for until `timeout` has passed.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String>;

    /// The host name or address that serves the store, if there is one: the way to it is a way to the other ranks.
    fn rendezvous_host(&self) -> Option<String>;
}

/// A part of another store, for one communicator among several that share it.
///
/// ```
/// use std::sync::Arc;
/// use ncclx_rs::comm::store::{MemoryStore, PrefixStore, Store};
/// let shared = Arc::new(MemoryStore::default());
/// let part = PrefixStore::new("first", shared.clone());
/// part.set("key", b"value")?;
/// assert_eq!(shared.get("first/key", std::time::Duration::ZERO)?, b"value");
/// # Ok::<(), String>(())
/// ```
#[derive(Clone)]
pub struct PrefixStore {
    prefix: String,
    store: Arc<dyn Store>,
}

impl PrefixStore {
    /// The keys of `store` that begin with `prefix` and a slash.
    pub fn new(prefix: impl Into<String>, store: Arc<dyn Store>) -> Self {
        PrefixStore { prefix: prefix.into(), store }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        self.store.set(&self.key(key), value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        self.store.get(&self.key(key), timeout)
    }

    fn rendezvous_host(&self) -> Option<String> {
        self.store.rendezvous_host()
    }
}

/// The parties of a store that asks for a secret, as those of a communicator: 0 serves, 1 is any client.
fn identity(me: Rank, secret: Secret) -> Identity {
    Identity { comm: *b"ncclx_rs   store", me, size: 2, secret }
}
