//! UCX, the library of RDMA networks: looked for when it is needed, and never linked.
//!
//! Of its protocol layer, UCP, one-sided reads (`ucp_get_nbx`) and active messages are used: no atomics, which it lacks where it
//! reports the death of peers, and no writes, which an owner of memory could not stop. Names are UCP's. Its structures only ever grow, and a
//! mask says which fields are set; those here are of ucp.h 1.14 to 1.22.

mod configuration;
mod context;
mod endpoint;
#[cfg(test)]
pub(crate) mod fake;
mod functions;
mod gets;
mod library;
mod messages;
mod worker;

pub use configuration::Reach;
pub use context::{Context, RegisteredMemory};
pub use endpoint::Endpoint;
pub use library::{Ucx, UcxError, Version, look_in};
pub use messages::{Arrived, COPIED_MAX, Messenger, Recipient};
pub use worker::Device;
