//! A store for ranks that are threads of one process.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::interface::Store;
use crate::sync::{Condvar, Mutex, lock};

/// A store within one process, whose ranks are threads.
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
