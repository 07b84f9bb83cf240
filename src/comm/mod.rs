//! The communicator: what ranks form together, and the door through which every operation goes.

pub mod address;
mod blocking;
pub mod bootstrap;
mod check;
mod communicator;
mod data;
mod failure_detector;
mod framing;
pub mod launch;
mod registry;
mod split;
pub mod store;
mod summary;
#[cfg(feature = "tch")]
mod tensors;
mod window;
mod wireup;

pub use communicator::{CommOptions, Communicator};
pub use data::Data;
pub use launch::Launch;
pub use registry::{dumps, write_dumps};

pub use crate::engine::callbacks::call_elsewhere;
