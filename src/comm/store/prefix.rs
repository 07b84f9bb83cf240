//! A part of another store.

use std::time::Duration;

use super::interface::Store;
use crate::sync::Arc;

/// A part of another store, for one communicator among several that share the store.
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

    fn keeps_values(&self) -> bool {
        self.store.keeps_values()
    }

    fn rendezvous_host(&self) -> Option<String> {
        self.store.rendezvous_host()
    }
}
