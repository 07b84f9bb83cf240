//! The communicator: what ranks form together, and the door through which every operation goes.

pub mod address;
mod blocking;
pub mod bootstrap;
mod build;
mod check;
mod communicator;
mod data;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod guest;
mod join;
pub mod launch;
mod links;
mod live;
mod root;
mod split;
pub mod store;
mod stream;
mod summary;
#[cfg(feature = "tch")]
mod tensors;
mod watch;
mod window;

pub use communicator::{CommOptions, Communicator};
pub use data::Data;
pub use launch::Launch;
pub use live::{dumps, write_dumps};

pub use crate::engine::callbacks::call_elsewhere;
