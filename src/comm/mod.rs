//! The communicator: what ranks form together, and the door through which every operation goes.

mod check;
mod communicator;

pub use communicator::{CommOptions, Communicator};
