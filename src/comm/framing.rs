//! Whole messages over sockets: with a deadline where a thread may wait, and without blocking where one thread serves many
//! connections.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};

use crate::sync::Arc;
use crate::transport::handshake::is_passing;
use crate::transport::tls::Stream;

/// The bytes of one message as they come in. Memory grows with what has come, not with the announced length.
#[derive(Default)]
pub(super) struct ReadBuffer {
    bytes: Vec<u8>,
}

impl ReadBuffer {
    /// Reads until the buffer has `wanted` bytes (true) or no more are ready (false). The end of the stream is an error.
    pub(super) fn fill(&mut self, from: &mut impl Read, wanted: usize) -> io::Result<bool> {
        let mut piece = [0; 4096];
        while self.bytes.len() < wanted {
            let room = piece.len().min(wanted - self.bytes.len());
            match from.read(&mut piece[..room]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.bytes.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Whether no byte of the message has come.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Takes the message out; the next one begins empty.
    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

/// Messages to be written to a socket that does not block.
#[derive(Default)]
pub(super) struct WriteBuffer {
    messages: VecDeque<Arc<[u8]>>,
    /// How many bytes of the first are sent.
    sent: usize,
}

impl WriteBuffer {
    pub(super) fn new(bytes: Arc<[u8]>) -> Self {
        WriteBuffer { messages: [bytes].into(), sent: 0 }
    }

    /// Adds a message behind the others.
    pub(super) fn push(&mut self, bytes: Arc<[u8]>) {
        self.messages.push_back(bytes);
    }

    /// Whether every byte is sent.
    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Writes as many bytes as the socket takes.
    pub(super) fn send(&mut self, to: &mut impl Write) -> io::Result<()> {
        while let Some(message) = self.messages.front() {
            if self.sent == message.len() {
                self.messages.pop_front();
                self.sent = 0;
                continue;
            }
            match to.write(&message[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Writes all of `bytes`, or fails at `deadline`.
pub(super) fn write(stream: &mut Stream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    loop {
        stream.socket().set_write_timeout(Some(left(deadline)?))?;
        let written = if bytes.is_empty() { stream.flush().map(|()| None) } else { stream.write(bytes).map(Some) };
        match written {
            Ok(None) => return Ok(()),
            Ok(Some(count)) => bytes = &bytes[count..],
            Err(error) if is_passing(&error) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Reads `count` bytes, or fails at `deadline`.
pub(super) fn read(stream: &mut Stream, count: usize, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut buffer = ReadBuffer::default();
    loop {
        stream.socket().set_read_timeout(Some(left(deadline)?))?;
        if buffer.fill(stream, count)? {
            return Ok(buffer.take());
        }
    }
}

/// The time until `deadline`; an error once it has passed.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::Error::new(ErrorKind::TimedOut, "no answer")) } else { Ok(left) }
}

/// Polls for at most `limit`. A signal ends the sleep early.
pub(super) fn sleep(watched: &mut [PollFd<'_>], limit: Duration) -> io::Result<()> {
    let limit =
        Timespec { tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: limit.subsec_nanos().into() };
    match poll(watched, Some(&limit)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
