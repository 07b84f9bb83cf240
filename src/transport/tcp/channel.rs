//! The receiving end: a buffer for headers and short messages. Long messages go directly to the receive buffer.

use std::io::{self, Read};

use crate::error::LinkDown;
use crate::sys::poller::Watched;
use crate::transport::auth::Secret;
use crate::transport::handshake::is_passing;
use crate::transport::tcp::greeting::Caller;
use crate::transport::{PATIENCE_WITH_CALLS, RecvStream};

/// Where the bytes of a stream come from, in order.
pub(super) trait Source: Send {
    /// Reads some bytes, none if none have come. An error: none follow.
    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown>;

    /// Whether there are bytes that the poller does not see. If not, it tells of those that come.
    fn has_more(&mut self) -> bool;

    /// The poller need not tell of what comes.
    fn disarm(&mut self) {}

    /// As [`RecvStream::session`].
    fn session(&self) -> Option<Secret> {
        None
    }
}

/// What a read has brought: none if nothing has come, and an error at the end.
pub(super) fn ended(read: io::Result<usize>) -> Result<usize, LinkDown> {
    match read {
        Ok(0) => Err(LinkDown::new("it closed the connection")),
        Ok(count) => Ok(count),
        Err(error) if is_passing(&error) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// One connection.
impl Source for Watched<Caller> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        ended(self.stream.read(into))
    }

    fn has_more(&mut self) -> bool {
        self.stream.has_more()
    }

    fn session(&self) -> Option<Secret> {
        self.session
    }
}

/// The receiving end of a stream.
#[derive(Debug)]
pub(super) struct TcpRecvStream<S> {
    source: S,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    ended: Option<LinkDown>,
    /// The last bytes went directly to the receive buffer. The next are likely to, once the header before them is known.
    direct: bool,
    /// The buffered bytes were shown and none consumed: the reader needs more.
    waiting: bool,
}

impl<S: Source> TcpRecvStream<S> {
    pub(super) fn new(source: S) -> Self {
        TcpRecvStream {
            source,
            buffer: vec![0; BUFFER_BYTES],
            start: 0,
            end: 0,
            ended: None,
            direct: false,
            waiting: false,
        }
    }

    fn buffered(&self) -> usize {
        self.end - self.start
    }

    /// Reads more if the buffered bytes may be too few for the caller.
    fn fill(&mut self) -> Result<(), LinkDown> {
        if self.buffered() >= ENOUGH {
            return Ok(());
        }
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        if self.ended.is_none() {
            let mut space = std::mem::take(&mut self.buffer);
            let most = if self.direct { ENOUGH } else { BUFFER_BYTES };
            let count = self.receive(&mut space[self.end..most]);
            self.end += count;
            self.waiting &= count == 0;
            self.buffer = space;
            self.direct &= count == 0;
        }
        self.look()
    }

    fn receive(&mut self, into: &mut [u8]) -> usize {
        self.source.read(into).unwrap_or_else(|down| {
            self.ended = Some(down);
            0
        })
    }

    /// Reports the end of the stream once the bytes before it have been consumed.
    fn look(&self) -> Result<(), LinkDown> {
        match &self.ended {
            Some(down) if self.buffered() == 0 => Err(down.clone()),
            _ => Ok(()),
        }
    }
}

impl<S: Source> RecvStream for TcpRecvStream<S> {
    fn peek(&mut self) -> Result<&[u8], LinkDown> {
        self.fill()?;
        self.waiting = true;
        Ok(&self.buffer[self.start..self.end])
    }

    fn consume(&mut self, count: usize) {
        self.start += count;
        self.waiting &= count == 0;
    }

    fn session(&self) -> Option<Secret> {
        self.source.session()
    }

    fn end(&self) -> Option<LinkDown> {
        self.ended.clone()
    }

    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        if self.buffered() > 0 || into.len() < ENOUGH {
            let count = self.peek()?.len().min(into.len());
            into[..count].copy_from_slice(&self.buffer[self.start..self.start + count]);
            self.consume(count);
            return Ok(count);
        }
        let count = if self.ended.is_none() { self.receive(into) } else { 0 };
        self.direct |= count > 0;
        if count == 0 {
            self.look()?;
        }
        Ok(count)
    }

    fn patience(&self) -> u32 {
        PATIENCE_WITH_CALLS
    }

    fn arm(&mut self) -> bool {
        // The poller always watches the socket, but does not see buffered bytes.
        self.ended.is_some() || (self.buffered() > 0 && !self.waiting) || self.source.has_more()
    }

    fn disarm(&mut self) {
        self.source.disarm();
    }
}

const BUFFER_BYTES: usize = 64 * 1024;

/// At least a frame's header and any element.
const ENOUGH: usize = 64;
