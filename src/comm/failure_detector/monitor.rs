//! The monitor of one neighbour: the connection to it, and its process.

use std::io::IoSlice;
use std::time::{Duration, Instant};

use crate::comm::failure_detector::notice::Notice;
use crate::engine::connector::{Connector, OPENING_CHECK};
use crate::error::LinkDown;
use crate::sys::poller::Watched;
use crate::sys::process::Process;
use crate::transport::{RecvStream, SendStream, Transport};
use crate::types::Rank;

/// What a check of a neighbour has shown.
#[derive(Debug, Default)]
pub(super) struct Observed {
    /// The notices that have come from it.
    pub(super) notices: Vec<Notice>,
    /// Why it counts as lost: it is gone, and did not say goodbye.
    pub(super) loss: Option<String>,
}

/// A stream in each direction, and the neighbour's process where it is visible.
pub(super) struct PeerMonitor {
    pub(super) peer: Rank,
    size: usize,
    process: Option<Watched<Process>>,
    connector: Connector,
    send_stream: Option<Box<dyn SendStream>>,
    recv_stream: Option<Box<dyn RecvStream>>,
    outgoing: Vec<u8>,
    /// The bytes of a notice that is not complete.
    incoming: Vec<u8>,
    /// The first sign that the neighbour is gone, and when it was seen. A goodbye may still be in the other stream.
    end: Option<(String, Instant)>,
}

impl PeerMonitor {
    /// A monitor of `peer` without a stream yet.
    pub(super) fn new(peer: Rank, size: usize, connector: Connector, process: Option<Watched<Process>>) -> PeerMonitor {
        let (outgoing, incoming) = (Vec::new(), Vec::new());
        PeerMonitor {
            peer,
            size,
            process,
            connector,
            send_stream: None,
            recv_stream: None,
            outgoing,
            incoming,
            end: None,
        }
    }

    /// Opens the stream, if there is none and the next attempt is due.
    pub(super) fn connect(&mut self, transports: &mut [Box<dyn Transport>], now: Instant) {
        if self.send_stream.is_some() || self.end.is_some() {
            return;
        }
        match self.connector.open(self.peer, transports, now) {
            Ok(send_stream) => self.send_stream = send_stream,
            Err(down) => self.end = Some((down.cause, now)),
        }
    }

    /// Takes the stream that the neighbour has opened.
    pub(super) fn accept(&mut self, recv_stream: Box<dyn RecvStream>) {
        self.recv_stream.get_or_insert(recv_stream);
    }

    /// Queues a notice.
    pub(super) fn send(&mut self, notice: &Notice) {
        if self.send_stream.is_some() || self.connector.due().is_some() {
            self.outgoing.extend(notice.encode());
        }
    }

    /// Queues a notice that is repeated later; drops it if the neighbour has left much unread.
    pub(super) fn send_if_room(&mut self, notice: &Notice) {
        if self.outgoing.len() < UNREAD_MAX {
            self.send(notice);
        }
    }

    /// Whether every notice has left this process, or never can.
    pub(super) fn is_flushed(&mut self) -> bool {
        let flushed =
            |send_stream: &mut Box<dyn SendStream>| send_stream.is_open() && send_stream.flushed().unwrap_or(true);
        self.end.is_some() || (self.outgoing.is_empty() && self.send_stream.as_mut().is_none_or(flushed))
    }

    /// Writes and reads without blocking. Notices are read after looking for signs of an end, so that a goodbye before that
    /// end is not missed.
    pub(super) fn check(&mut self, now: Instant) -> Observed {
        self.write(now);
        if self.process.as_ref().is_some_and(|process| process.has_ended()) {
            self.process = None;
            self.end = Some(("its process has ended".to_owned(), now));
        }
        let mut observed = Observed::default();
        let read = self.read(&mut observed.notices);
        if let Err(down) = read {
            observed.loss = Some(self.end.take().map_or(down.cause, |(cause, _)| cause));
        } else if let Some((cause, since)) = &self.end
            && now.duration_since(*since) >= LINGER_TIMEOUT
        {
            observed.loss = Some(cause.clone());
        }
        observed
    }

    /// Writes queued notices, as far as there is room.
    pub(super) fn write(&mut self, now: Instant) {
        let Some(send_stream) = &mut self.send_stream else { return };
        // A write without bytes notices a broken connection.
        let written = send_stream.write(&[], &[]).and_then(|_| match self.outgoing.as_slice() {
            [] => Ok(0),
            waiting => send_stream.write(&[], &[IoSlice::new(waiting)]),
        });
        match written {
            Ok(written) => drop(self.outgoing.drain(..written)),
            Err(down) => {
                self.send_stream = None;
                if let Err(down) = self.connector.ended(down, now) {
                    self.end.get_or_insert((down.cause, now));
                }
            }
        }
    }

    fn read(&mut self, notices: &mut Vec<Notice>) -> Result<(), LinkDown> {
        let Some(recv_stream) = &mut self.recv_stream else { return Ok(()) };
        let mut bytes = [0; READ_BYTES];
        loop {
            while let Some((next, len)) = Notice::decode(&self.incoming, self.size)? {
                self.incoming.drain(..len);
                notices.push(next);
                if notices.last() == Some(&Notice::Goodbye) {
                    return Ok(());
                }
            }
            match recv_stream.read(&mut bytes)? {
                0 => return Ok(()),
                count => self.incoming.extend_from_slice(&bytes[..count]),
            }
        }
    }

    /// When to check again although nothing happens.
    pub(super) fn next_check(&self, now: Instant) -> Option<Instant> {
        let opening =
            self.send_stream.as_ref().filter(|send_stream| !send_stream.is_open()).map(|_| now + OPENING_CHECK);
        let end = self.end.as_ref().map(|(_, since)| *since + LINGER_TIMEOUT);
        end.into_iter().chain(opening).chain(self.connector.due()).min()
    }

    /// Asks the poller to wake. True: something is ready now.
    pub(super) fn arm(&mut self) -> bool {
        let waiting = !self.outgoing.is_empty();
        let writable = self.send_stream.as_mut().is_some_and(|send_stream| waiting && send_stream.arm());
        self.recv_stream.as_mut().is_some_and(|recv_stream| recv_stream.arm()) || writable
    }

    /// Undoes [`PeerMonitor::arm`].
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
const READ_BYTES: usize = 2048;

/// How many bytes may wait for a neighbour that does not read, such as a stopped process.
const UNREAD_MAX: usize = 64 << 10;

/// How long a goodbye may take after the first sign of an end.
const LINGER_TIMEOUT: Duration = Duration::from_millis(100);
