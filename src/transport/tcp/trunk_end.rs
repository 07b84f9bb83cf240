//! One end of an open connection that communicators share: what waits to be written to it, and what comes of it.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::error::LinkDown;
use crate::sync::{self, Arc, Mutex, lock};
use crate::sys::poller::{Interest, Watched};
use crate::sys::tcp_info::{self, TcpStats};
use crate::transport::tcp::channel::{Source, ended};
use crate::transport::tcp::connect::{Connection, Held, Holding, passing};
use crate::transport::tcp::greeting::Caller;
use crate::transport::tcp::lanes::piece::{HEADER_BYTES, PieceHeader};
use crate::transport::tcp::lanes::reader::{Part, Reader};

/// The connection.
#[derive(Debug)]
pub(super) enum Wire {
    /// This process has opened it.
    Opened(Box<Connection>),
    /// Another process has.
    Accepted(Watched<Caller>),
}

impl Wire {
    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        match self {
            Wire::Opened(connection) => connection.get(into),
            Wire::Accepted(caller) => caller.read(into),
        }
    }

    /// The same, into one after the other.
    fn read_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> Result<usize, LinkDown> {
        match self {
            Wire::Opened(connection) => connection.get(&mut into[0]),
            Wire::Accepted(caller) => ended(caller.stream.read_vectored(into)),
        }
    }

    fn has_more(&mut self) -> bool {
        match self {
            Wire::Opened(connection) => connection.stream().has_more(),
            Wire::Accepted(caller) => caller.has_more(),
        }
    }

    fn write(&mut self, bytes: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        match self {
            Wire::Opened(connection) => passing(connection.stream().write_vectored(bytes)),
            Wire::Accepted(caller) => passing(caller.stream.write_vectored(bytes)),
        }
    }

    /// Has TLS write what it holds.
    fn pass_on(&mut self) -> Result<(), LinkDown> {
        let flushed = match self {
            Wire::Opened(connection) => return connection.pass_on().map(|_| ()),
            Wire::Accepted(caller) => caller.stream.flush().map(|()| 0),
        };
        passing(flushed).map(|_| ())
    }

    fn has_tls(&mut self) -> bool {
        match self {
            Wire::Opened(connection) => connection.stream().has_tls(),
            Wire::Accepted(caller) => caller.stream.has_tls(),
        }
    }

    fn holds_bytes(&self) -> bool {
        match self {
            Wire::Opened(connection) => connection.holds_bytes(),
            Wire::Accepted(caller) => caller.stream.holds_bytes(),
        }
    }

    fn socket(&self) -> &TcpStream {
        match self {
            Wire::Opened(connection) => connection.socket(),
            Wire::Accepted(caller) => caller.stream.socket(),
        }
    }

    /// Has the poller tell of bytes, and of room if bytes wait for that.
    fn watch(&mut self, is_waiting: bool) {
        match self {
            Wire::Opened(connection) => connection.watch(is_waiting),
            Wire::Accepted(caller) => {
                let interest = if is_waiting { Interest::ReadWrite } else { Interest::Read };
                if let Err(error) = caller.set(interest) {
                    log::error!("watching a shared connection failed: {error}");
                }
            }
        }
    }

    /// Has no poller tell of it any more.
    fn leave(&mut self) {
        match self {
            Wire::Opened(connection) => connection.leave(),
            Wire::Accepted(caller) => caller.leave(),
        }
    }
}

/// One end of the connection.
#[derive(Debug)]
pub(super) struct TrunkEnd {
    /// None once it is down.
    wire: Option<Wire>,
    down: Option<LinkDown>,
    /// Nothing can be written any more, and what the peer had sent is still to be read.
    is_mute: bool,
    reader: Reader,
    buffer: Vec<u8>,
    /// The rest of a piece that the kernel has taken a part of, and messages about lanes; so many bytes of them are written.
    waiting: Vec<u8>,
    written: usize,
    /// How many bytes the kernel was to take; none with TLS, which adds its own.
    sent: Option<u64>,
    /// How many it had delivered before.
    delivered_before: u64,
    holding: Holding,
}

impl TrunkEnd {
    pub(super) fn new(mut wire: Wire, held: &Held) -> TrunkEnd {
        // What was said before was answered, so it has been delivered.
        let delivered_before = tcp_info::tcp_stats(wire.socket()).map(|stats| stats.bytes);
        let counts = delivered_before.is_ok() && !wire.has_tls();
        TrunkEnd {
            sent: counts.then_some(0),
            delivered_before: delivered_before.unwrap_or_default(),
            wire: Some(wire),
            down: None,
            is_mute: false,
            reader: Reader::default(),
            buffer: vec![0; BUFFER_BYTES],
            waiting: Vec::new(),
            written: 0,
            holding: Holding::counted_in(held),
        }
    }

    /// Why nothing goes and comes any more, if that is so.
    pub(super) fn down(&self) -> Option<&LinkDown> {
        self.down.as_ref()
    }

    /// Whether a piece may be sent: none of another lane has begun.
    pub(super) fn has_room(&self) -> bool {
        !self.holding.holds()
    }

    /// Whether what comes next belongs to a lane's piece that has begun.
    pub(super) fn is_within_piece_of(&self, lane: u32) -> bool {
        self.reader.rest_of(lane).is_some()
    }

    /// Ends the connection.
    pub(super) fn fail(&mut self, down: LinkDown) {
        self.down.get_or_insert(down);
        self.wire = None;
        self.drop_waiting();
    }

    fn drop_waiting(&mut self) {
        self.waiting = Vec::new();
        self.written = 0;
        self.holding.set(false);
    }

    /// A write has failed. At the end that reads, that is of the answers alone: what the peer sent before it closed is still there, and
    /// reading it tells of the end.
    fn write_failed(&mut self, down: LinkDown) {
        let Some(wire @ Wire::Accepted(_)) = &mut self.wire else { return self.fail(down) };
        wire.watch(false);
        self.is_mute = true;
        self.drop_waiting();
    }

    /// Sends a message about a lane, behind what waits.
    pub(super) fn push(&mut self, header: PieceHeader, body: &[u8]) {
        if self.down.is_none() && !self.is_mute {
            self.count(header);
            self.waiting.extend(header.encode());
            self.waiting.extend(body);
            self.flush();
        }
        if self.waiting.len() - self.written > WAITING_BYTES_MAX {
            self.fail(LinkDown::new("it reads nothing of what it is told about lanes of a shared connection"));
        }
    }

    fn count(&mut self, header: PieceHeader) {
        if let Some(sent) = &mut self.sent {
            *sent += (HEADER_BYTES + header.len) as u64;
        }
    }

    /// How many bytes are to be delivered, all that wait included; none if that is not known.
    pub(super) fn sent(&self) -> Option<u64> {
        self.sent
    }

    /// Sends a piece, for which there is room: the first `header.len` bytes of these. What the kernel does not take of it is copied,
    /// as the lane's operation may end before there is room again.
    pub(super) fn send(&mut self, header: PieceHeader, head: &[u8], body: &[IoSlice<'_>]) {
        self.count(header);
        let Some(wire) = &mut self.wire else { return };
        let encoded = header.encode();
        let mut slices: SmallVec<[&[u8]; 8]> = SmallVec::new();
        slices.push(&encoded);
        let mut left = header.len;
        for slice in std::iter::once(head).chain(body.iter().map(|slice| &**slice)) {
            let part = &slice[..slice.len().min(left)];
            left -= part.len();
            if !part.is_empty() {
                slices.push(part);
            }
        }
        let vectored: SmallVec<[IoSlice<'_>; 8]> = slices.iter().map(|slice| IoSlice::new(slice)).collect();
        let mut taken = match wire.write(&vectored) {
            Ok(taken) => taken,
            Err(down) => return self.fail(down),
        };
        if taken < HEADER_BYTES + header.len {
            for slice in slices {
                let skipped = taken.min(slice.len());
                taken -= skipped;
                self.waiting.extend_from_slice(&slice[skipped..]);
            }
        }
        if !self.waiting.is_empty() || wire.holds_bytes() {
            self.settle();
        }
    }

    /// Writes what waits, as far as there is room.
    pub(super) fn flush(&mut self) {
        let Some(wire) = &mut self.wire else { return };
        if self.waiting.is_empty() && !self.holding.holds() {
            return;
        }
        while self.written < self.waiting.len() {
            match wire.write(&[IoSlice::new(&self.waiting[self.written..])]) {
                Ok(0) => break,
                Ok(count) => self.written += count,
                Err(down) => return self.write_failed(down),
            }
        }
        if self.written == self.waiting.len() {
            self.written = 0;
            self.waiting.clear();
            if let Err(down) = wire.pass_on() {
                return self.write_failed(down);
            }
        }
        self.settle();
    }

    /// Has the poller tell of room if bytes wait for it.
    fn settle(&mut self) {
        let Some(wire) = &mut self.wire else { return };
        let holds = !self.waiting.is_empty() || wire.holds_bytes();
        self.holding.set(holds);
        wire.watch(holds);
    }

    /// Reads bytes of a lane right into `into`, as long as nothing but its pieces comes, the first of which has begun. Returns how
    /// many; otherwise as [`TrunkEnd::receive`].
    pub(super) fn receive_for(
        &mut self,
        lane: u32,
        into: &mut [u8],
        mut take: impl FnMut(u32, Part<'_>) -> Result<(), LinkDown>,
    ) -> usize {
        let mut all = 0;
        while all < into.len()
            && let (Some(rest), Some(wire)) = (self.reader.rest_of(lane), &mut self.wire)
        {
            let room = into.len() - all;
            let part = &mut into[all..all + rest.min(room)];
            let (len, mut next) = (part.len(), [0; HEADER_BYTES]);
            let behind = if len == rest { HEADER_BYTES } else { 0 };
            let mut parts = [IoSliceMut::new(part), IoSliceMut::new(&mut next[..behind])];
            let fed = wire.read_vectored(&mut parts).and_then(|count| {
                let direct = count.min(len);
                self.reader.passed(direct);
                all += direct;
                self.reader.feed(&next[..count - direct], &mut take)?;
                Ok(count < len)
            });
            match fed {
                Ok(false) => {}
                Ok(true) => break,
                Err(down) => {
                    self.fail(down);
                    break;
                }
            }
        }
        all
    }

    /// Reads what has come, so many bytes at most, and tells what it is. The error of `take` ends the connection. What TLS has
    /// beyond that is read as well, since no poller would tell of it.
    pub(super) fn receive(&mut self, most: usize, mut take: impl FnMut(u32, Part<'_>) -> Result<(), LinkDown>) {
        let mut left = most;
        while let Some(wire) = &mut self.wire
            && (left > 0 || wire.has_more())
        {
            let len = if left > 0 { BUFFER_BYTES.min(left) } else { BUFFER_BYTES };
            let count = match wire.read(&mut self.buffer[..len]) {
                Ok(0) => return,
                Ok(count) => count,
                Err(down) => return self.fail(down),
            };
            left = left.saturating_sub(count);
            // What is left of less than a buffer comes later, and the poller tells of it.
            if count < len {
                left = 0;
            }
            if let Err(down) = self.reader.feed(&self.buffer[..count], &mut take) {
                return self.fail(down);
            }
        }
    }

    /// Whether the peer's kernel has the first bytes, up to this [number](TrunkEnd::sent), or everything.
    pub(super) fn is_delivered(&self, up_to: Option<u64>) -> Result<bool, LinkDown> {
        let Some(wire) = &self.wire else { return Ok(true) };
        if self.has_room() && !tcp_info::under_way(wire.socket())?.is_any() {
            return Ok(true);
        }
        let delivered = tcp_info::tcp_stats(wire.socket())?.bytes.saturating_sub(self.delivered_before);
        Ok(up_to.is_some_and(|up_to| delivered >= up_to))
    }

    /// The kernel's statistics.
    pub(super) fn tcp_stats(&self) -> Option<TcpStats> {
        tcp_info::tcp_stats(self.wire.as_ref()?.socket()).ok()
    }

    /// Closes the connection once the peer's kernel has everything, or after a while. A closed socket with unread bytes, such as credit
    /// for what was sent last, would lose what is under way.
    pub(super) fn close_when_delivered(mut self) {
        self.flush();
        if let Some(wire) = &mut self.wire {
            wire.leave();
        }
        if self.is_delivered(None).unwrap_or(true) {
            return;
        }
        let end = Arc::new(Mutex::new(self));
        let own = end.clone();
        let closing = sync::spawn("ncclx_rs close", move || lock(&own).deliver(CLOSING_TIMEOUT));
        if let Err(error) = closing {
            log::debug!("there is no thread that waits for the last bytes of a shared connection: {error}");
            lock(&end).deliver(CLOSING_TIMEOUT_ALONE);
        }
    }

    /// Waits until the peer's kernel has everything, so long at most.
    fn deliver(&mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            self.flush();
            self.receive(MUCH, |_, _| Ok(()));
            if self.is_delivered(None).unwrap_or(true) {
                return;
            }
            std::thread::sleep(CLOSING_CHECK);
        }
    }
}

/// How much is read at a time.
const BUFFER_BYTES: usize = 64 << 10;

/// How much one call reads at most.
pub(super) const MUCH: usize = 16 * BUFFER_BYTES;

/// How many bytes may wait for a peer that does not read: a piece, and messages about many lanes.
const WAITING_BYTES_MAX: usize = 4 << 20;

/// How long the last bytes may take to leave.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(5);

/// The same where the thread that ends the last lane has to wait itself, maybe with its engine's lock.
const CLOSING_TIMEOUT_ALONE: Duration = Duration::from_secs(1);

/// How often to look whether they have.
const CLOSING_CHECK: Duration = Duration::from_millis(10);
