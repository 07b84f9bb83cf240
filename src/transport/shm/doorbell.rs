//! The doorbell of a ring: wakes the other side, and shows that it is gone.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use crate::sys::poller::Watched;
use crate::sys::socket;
use crate::transport::handshake::is_passing;

/// The socket beside a ring: a byte wakes the other side, and its end shows that the other process is gone.
#[derive(Debug)]
pub(super) struct Doorbell {
    pub(super) stream: Watched<UnixStream>,
    /// The other side has closed the socket.
    pub(super) ended: bool,
}

impl Doorbell {
    pub(super) fn new(stream: Watched<UnixStream>) -> Self {
        Doorbell { stream, ended: false }
    }

    /// Wakes the other side.
    pub(super) fn ring(&mut self) {
        // A full socket already wakes the other side; `drain` notices a broken one.
        let _ = self.stream.write(&[0]);
    }

    /// Notices the end without taking bytes that have come, for which somebody may wait.
    pub(super) fn look_for_end(&mut self) {
        self.ended |= socket::is_hung_up(self.stream.as_fd());
    }

    /// Reads the bytes that have come, and notices the end.
    pub(super) fn drain(&mut self) {
        let mut bytes = [0; 64];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => self.ended = true,
                Ok(count) if count == bytes.len() => continue,
                Ok(_) => {}
                Err(error) => self.ended |= !is_passing(&error),
            }
            return;
        }
    }
}
