//! The bytes of one stream over several connections, its rails: cut into pieces at one end, put in order at the other.
//!
//! Nothing here knows sockets, threads or time. A rail is a [`Link`], which a test may imitate. Each piece says where in the
//! stream its bytes belong. A rail that has room takes the next piece, so that a faster one carries more. The receiver
//! acknowledges, on each rail, how many pieces it has read there, when it is asked to. The sender keeps a copy of a piece until
//! then, so that what a rail had not delivered when it broke is sent again on the others. The receiver drops what it has.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
pub(super) mod link;
mod piece;
pub(super) mod receiver;
pub(super) mod sender;

#[cfg(test)]
mod tests;
