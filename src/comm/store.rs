//! The rendezvous store: the little that ranks must share before they can talk to each other.
//!
//! ```
//! use std::time::Duration;
//! use ncclx_rs::comm::store::{MemoryStore, Store};
//! let store = MemoryStore::default();
//! store.set("key", b"value")?;
//! assert_eq!(store.get("key", Duration::ZERO)?, b"value");
//! # Ok::<(), String>(())
//! ```

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex, lock};

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

/// A store within one process.
#[derive(Debug, Default)]
pub struct MemoryStore {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        lock(&self.values).insert(key.to_string(), value.to_vec());
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String> {
        let start = Instant::now();
        let mut values = lock(&self.values);
        loop {
            if let Some(value) = values.get(key) {
                return Ok(value.clone());
            }
            let Some(left) = timeout.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) else {
                return Err(format!("`{key}` was not set within {timeout:?}"));
            };
            let waited = self.changed.wait_timeout(values, left);
            (values, _) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    fn rendezvous_host(&self) -> Option<String> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_get_waits_for_its_set() {
        let store = MemoryStore::default();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| store.get("key", Duration::from_secs(60)));
            store.set("other", b"1").unwrap();
            store.set("key", b"2").unwrap();
            assert_eq!(reader.join().unwrap(), Ok(b"2".to_vec()));
        });
    }

    #[test]
    fn a_get_that_waits_in_vain_names_the_key() {
        let error = MemoryStore::default().get("absent", Duration::from_millis(10)).unwrap_err();
        assert!(error.contains("`absent`"), "{error}");
    }
}
