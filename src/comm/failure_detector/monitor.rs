//! One rank's connection to one that it watches.

use std::io::IoSlice;
use std::time::{Duration, Instant};

use crate::comm::failure_detector::notice::News;
use crate::engine::connector::{OPENING_CHECK, Way};
use crate::error::LinkDown;
use crate::sys::poller::Registration;
use crate::sys::process::Process;
use crate::transport::{RecvStream, SendStream, Transport};
use crate::types::Rank;

/// What a look at a connection has shown.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// What the other rank told.
    pub(super) news: Vec<News>,
    /// The other rank is gone, and did not say goodbye.
    pub(super) loss: Option<String>,
}

/// A stream in each direction, and the other's process where it can be seen.
pub(super) struct Edge {
    pub(super) peer: Rank,
    size: usize,
    process: Option<(Process, Registration)>,
    way: Way,
    send_stream: Option<Box<dyn SendStream>>,
    recv_stream: Option<Box<dyn RecvStream>>,
    outgoing: Vec<u8>,
    /// What has come of news that are not complete.
    incoming: Vec<u8>,
    /// The first sign of the other's end, and when it was seen. Its goodbye may be on its way in the other stream.
    ending: Option<(String, Instant)>,
}

impl Edge {
    /// Begins without a stream, for which there is a way.
    pub(super) fn new(peer: Rank, size: usize, way: Way, process: Option<(Process, Registration)>) -> Edge {
        let (outgoing, incoming) = (Vec::new(), Vec::new());
        Edge { peer, size, process, way, send_stream: None, recv_stream: None, outgoing, incoming, ending: None }
    }

    /// Opens the stream, if there is none and there may be one now.
    pub(super) fn reach(&mut self, transports: &mut [Box<dyn Transport>], now: Instant) {
        if self.send_stream.is_some() || self.ending.is_some() {
            return;
        }
        match self.way.open(self.peer, transports, now) {
            Ok(send_stream) => self.send_stream = send_stream,
            Err(down) => self.ending = Some((down.cause, now)),
        }
    }

    /// Takes the stream that the other has opened.
    pub(super) fn accept(&mut self, recv_stream: Box<dyn RecvStream>) {
        self.recv_stream.get_or_insert(recv_stream);
    }

    /// Queues news.
    pub(super) fn tell(&mut self, news: &News) {
        if self.send_stream.is_some() || self.way.due().is_some() {
            self.outgoing.extend(news.encode());
        }
    }

    /// Queues news that may be left out, as they are repeated: where the other rank has not read much of what was told.
    pub(super) fn mention(&mut self, news: &News) {
        if self.outgoing.len() < UNREAD_MAX {
            self.tell(news);
        }
    }

    /// Whether what was told has left this process, or never can.
    pub(super) fn is_flushed(&mut self) -> bool {
        let flushed =
            |send_stream: &mut Box<dyn SendStream>| send_stream.is_open() && send_stream.flushed().unwrap_or(true);
        self.ending.is_some() || (self.outgoing.is_empty() && self.send_stream.as_mut().is_none_or(flushed))
    }

    /// Writes what waits, and reads what has come. The other's news are read after the signs of its end were looked for,
    /// so that a goodbye said before that end is not missed.
    pub(super) fn look(&mut self, now: Instant) -> Seen {
        self.write(now);
        if self.process.as_ref().is_some_and(|(process, _)| process.has_ended()) {
            self.process = None;
            self.ending = Some(("its process has ended".to_owned(), now));
        }
        let mut seen = Seen::default();
        let read = self.read(&mut seen.news);
        if let Err(down) = read {
            seen.loss = Some(self.ending.take().map_or(down.cause, |(cause, _)| cause));
        } else if let Some((cause, since)) = &self.ending
            && now.duration_since(*since) >= LINGER
        {
            seen.loss = Some(cause.clone());
        }
        seen
    }

    /// Writes what waits, as far as there is room.
    pub(super) fn write(&mut self, now: Instant) {
        let Some(send_stream) = &mut self.send_stream else { return };
        // Without bytes, a write notices the end.
        let written = send_stream.write(&[], &[]).and_then(|_| match self.outgoing.as_slice() {
            [] => Ok(0),
            waiting => send_stream.write(&[], &[IoSlice::new(waiting)]),
        });
        match written {
            Ok(written) => drop(self.outgoing.drain(..written)),
            Err(down) => {
                self.send_stream = None;
                if let Err(down) = self.way.ended(down, now) {
                    self.ending.get_or_insert((down.cause, now));
                }
            }
        }
    }

    fn read(&mut self, news: &mut Vec<News>) -> Result<(), LinkDown> {
        let Some(recv_stream) = &mut self.recv_stream else { return Ok(()) };
        let mut bytes = [0; NEWS_BYTES];
        loop {
            while let Some((next, len)) = News::decode(&self.incoming, self.size)? {
                self.incoming.drain(..len);
                news.push(next);
                if news.last() == Some(&News::Bye) {
                    return Ok(());
                }
            }
            match recv_stream.read(&mut bytes)? {
                0 => return Ok(()),
                count => self.incoming.extend_from_slice(&bytes[..count]),
            }
        }
    }

    /// When to look again although nothing happens.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let opening =
            self.send_stream.as_ref().filter(|send_stream| !send_stream.is_open()).map(|_| now + OPENING_CHECK);
        let ending = self.ending.as_ref().map(|(_, since)| *since + LINGER);
        ending.into_iter().chain(opening).chain(self.way.due()).min()
    }

    /// Asks for the poller to wake. True: there is something to look at now.
    pub(super) fn arm(&mut self) -> bool {
        let waiting = !self.outgoing.is_empty();
        let writable = self.send_stream.as_mut().is_some_and(|send_stream| waiting && send_stream.arm());
        self.recv_stream.as_mut().is_some_and(|recv_stream| recv_stream.arm()) || writable
    }

    /// Ends what `arm` began.
    pub(super) fn disarm(&mut self) {
        if let Some(send_stream) = &mut self.send_stream {
            send_stream.disarm();
        }
        if let Some(recv_stream) = &mut self.recv_stream {
            recv_stream.disarm();
        }
    }
}

/// How much is read at a time.
const NEWS_BYTES: usize = 2048;

/// How much waits at most for a rank that does not read, as one that is stopped.
const UNREAD_MAX: usize = 64 << 10;

/// How long a goodbye may be on its way after the first sign of an end.
const LINGER: Duration = Duration::from_millis(100);
