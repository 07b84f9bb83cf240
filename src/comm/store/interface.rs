//! The interface of all stores.

use std::time::Duration;

/// A map that every rank of one communicator sees, and no other communicator writes to.
///
/// Errors are text, since their cause depends on the service behind the map.
pub trait Store: Send + Sync {
    /// Binds `key` to `value`.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String>;

    /// The value of `key`. Waits up to `timeout` until it is set.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, String>;

    /// Whether a value stays, and may be replaced. Otherwise each rank gets once what is set, in that order.
    fn keeps_values(&self) -> bool {
        true
    }

    /// The host name or address that serves the store, if there is one. The network interface that leads to it most likely
    /// leads to the other ranks.
    fn rendezvous_host(&self) -> Option<String>;
}
