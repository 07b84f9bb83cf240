//! Lanes: the streams of several communicators over one connection, as data that knows neither sockets nor time.
//!
//! What is written to a lane travels in [pieces](piece), each with a header that names the lane. Each lane has a [window](window) of
//! bytes that its reader has not taken, so that no piece ever waits in the connection for a communicator that does not read.

pub(super) mod piece;
pub(super) mod reader;
#[cfg(test)]
mod tests;
pub(super) mod window;
