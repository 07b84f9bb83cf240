//! The communicator: what ranks form together, and the door through which every operation goes.

pub mod address;
pub mod bootstrap;
mod check;
mod communicator;
mod guest;
mod join;
pub mod launch;
mod links;
mod root;
mod slices;
mod split;
pub mod store;
mod stream;

pub use communicator::{CommOptions, Communicator};
pub use launch::Launch;
