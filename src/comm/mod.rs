//! The communicator: what ranks form together, and the door through which every operation goes.

pub mod address;
pub mod bootstrap;
mod check;
mod communicator;
mod guest;
mod join;
mod links;
mod root;
pub mod store;
mod window;

pub use communicator::{CommOptions, Communicator};
