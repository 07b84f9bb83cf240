//! The communicator: the handle on a group of ranks, and what it is made from.
//!
//! Floors, of which each uses only those below: `communicator`, with `registry`, `split`, `blocking`, `on_device`, `window` and `launch` on
//! it, and `mixed` on these; then `device`; then `wireup`, `failure_detector` and `island`; then `bootstrap`; then `store`, `check`, `data`, `address`, `summary` and
//! `framing`.

pub mod address;
mod blocking;
pub mod bootstrap;
mod check;
mod communicator;
mod data;
mod device;
mod failure_detector;
mod framing;
mod group;
mod island;
pub mod launch;
mod mixed;
mod on_device;
mod other_hosts;
mod registry;
mod split;
pub mod store;
mod summary;
#[cfg(feature = "tch")]
mod tensors;
mod through_host;
mod window;
mod wireup;

pub use communicator::{CommOptions, Communicator};
pub use data::Data;
pub use launch::Launch;
pub use registry::{dumps, write_dumps};
pub use split::LibraryPart;

pub use crate::engine::callbacks::call_elsewhere;
