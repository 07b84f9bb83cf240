//! The rendezvous store: the few values that ranks must share before they can connect to each other.
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
mod interface;
mod memory;
mod prefix;
mod protocol;
mod server;
mod tcp;

pub use interface::Store;
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub use protocol::{KEY_LIMIT, VALUE_LIMIT};
pub use tcp::TcpStore;
