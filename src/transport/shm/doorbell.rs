//! The doorbell of a ring: wakes the other side, and shows that it is gone.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use crate::sys::poller::Watched;
use crate::sys::socket;
use crate::transport::handshake::is_passing;
use crate::transport::shm::bells::SharedLine;

/// What is beside a ring to ring at the other side.
#[derive(Debug)]
enum Line {
    /// A socket of its own: a byte wakes the other side, and its end shows that the other process is gone.
    Socket(Watched<UnixStream>),
    /// The sockets of both communicators, at which all of their rings ring.
    Shared(SharedLine),
}

/// One end.
#[derive(Debug)]
pub(super) struct Doorbell {
    line: Line,
    /// The other side is known to be gone.
    pub(super) ended: bool,
}

impl Doorbell {
    /// With a socket of its own.
    pub(super) fn new(stream: Watched<UnixStream>) -> Self {
        Doorbell { line: Line::Socket(stream), ended: false }
    }

    /// Without.
    pub(super) fn shared(line: SharedLine) -> Self {
        Doorbell { line: Line::Shared(line), ended: false }
    }

    /// Its own socket, if it has one.
    pub(super) fn socket(&mut self) -> Option<&mut UnixStream> {
        match &mut self.line {
            Line::Socket(stream) => Some(stream),
            Line::Shared(_) => None,
        }
    }

    /// Whether the other side has been woken of all that it is to know.
    pub(super) fn flushed(&self) -> bool {
        match &self.line {
            Line::Socket(_) => true,
            Line::Shared(line) => line.flushed(),
        }
    }

    /// Wakes the other side.
    pub(super) fn ring(&mut self) {
        match &mut self.line {
            // A full socket already wakes the other side; `drain` notices a broken one.
            Line::Socket(stream) => _ = stream.write(&[0]),
            Line::Shared(line) => self.ended |= !line.ring(),
        }
    }

    /// This side is about to sleep.
    pub(super) fn arm(&self) {
        if let Line::Shared(line) = &self.line {
            line.set_armed(true);
        }
    }

    /// Undoes `arm`.
    pub(super) fn disarm(&self) {
        if let Line::Shared(line) = &self.line {
            line.set_armed(false);
        }
    }

    /// Notices the end, also one that nobody has been told of yet, without taking bytes that have come, for which somebody may wait.
    pub(super) fn look_for_end(&mut self) {
        self.ended |= match &self.line {
            Line::Socket(stream) => socket::is_hung_up(stream.as_fd()),
            Line::Shared(line) => line.has_ended() || line.is_process_gone(),
        };
    }

    /// Takes what has been rung, and notices the end.
    pub(super) fn drain(&mut self) {
        let stream = match &mut self.line {
            Line::Socket(stream) => stream,
            Line::Shared(line) => return self.ended |= line.has_ended(),
        };
        let mut bytes = [0; 64];
        loop {
            match stream.read(&mut bytes) {
                Ok(0) => self.ended = true,
                Ok(count) if count == bytes.len() => continue,
                Ok(_) => {}
                Err(error) => self.ended |= !is_passing(&error),
            }
            return;
        }
    }
}
