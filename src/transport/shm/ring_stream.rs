//! The two ends of a stream through a shared memory ring.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::time::Instant;

use crate::error::LinkDown;
use crate::sys::cma::PeerMemory;
use crate::sys::ring_sync::Position;
use crate::sys::segment::{PeerSegment, SegmentId};
use crate::sys::shm_ring::{SLOT_BYTES, SLOTS, ShmRing};
use crate::sys::team::Team;
use crate::transport::auth::Secret;
use crate::transport::runs::Runs;
use crate::transport::shm::doorbell::Doorbell;
use crate::transport::shm::handover::RingHandover;
use crate::transport::shm::line_ownership::{Chooser, Lines, Meter};
use crate::transport::{MemoryAddress, RecvStream, RingStats, SendStream};

fn gone() -> LinkDown {
    LinkDown::new("it closed the connection: its process ended or its communicator was closed")
}

/// The sending end.
#[derive(Debug)]
pub(super) struct ShmSendStream {
    ring: ShmRing,
    doorbell: Doorbell,
    /// The position up to which it has written.
    written: Position,
    /// The rest of the handover, until the peer has the ring.
    handover: Option<RingHandover>,
    /// What only the two ends know, once the peer has the ring.
    session: Option<Secret>,
    peer_can_read: bool,
    meter: Meter,
}

impl ShmSendStream {
    pub(super) fn new(ring: ShmRing, doorbell: Doorbell, handover: RingHandover, peer_can_read: bool) -> Self {
        let (written, meter) = (Position::default(), Meter::default());
        let (handover, session) = (Some(handover), None);
        ShmSendStream { ring, doorbell, written, handover, session, peer_can_read, meter }
    }

    /// Whether a slot and that many bytes of the ring are free. The peer's positions are checked, since the peer writes them.
    fn has_room(&self, bytes: usize) -> Result<bool, LinkDown> {
        let done = self.ring.words().done();
        let (slots, used) = (self.written.slots.wrapping_sub(done.slots), self.written.bytes.wrapping_sub(done.bytes));
        let capacity = self.ring.capacity() as u64;
        if slots > SLOTS || used > capacity {
            return Err(LinkDown::new("the peer garbled the shared ring"));
        }
        Ok(slots < SLOTS && used + aligned(bytes) <= capacity)
    }

    /// Fills a slot with `head` and the next `len` bytes of `body`, for which there is room. Bytes that do not fit into the slot
    /// go to the ring.
    fn fill(&mut self, head: &[u8], body: &mut Runs<'_>, len: usize) {
        let (slot, in_slot) = (self.written.slots, in_slot(head.len(), len));
        // The reader polls the slot, and each write to it fetches its cache lines back to this core. So it is written last, and
        // at once.
        let mut at = self.written.bytes;
        if in_slot < head.len() {
            self.ring.write(at, head);
            at += head.len() as u64;
        }
        let mut left = if in_slot > head.len() { 0 } else { len };
        while left > 0 {
            let run = body.take(left);
            let measured = self.meter.is_due(run.len()).then(Instant::now);
            self.ring.write(at, run);
            if let Some(since) = measured {
                self.meter.record(run.len(), since.elapsed());
            }
            at += run.len() as u64;
            left -= run.len();
        }
        self.written.bytes += aligned((at - self.written.bytes) as usize);
        if in_slot >= head.len() {
            self.ring.write_slot(slot, 0, head);
        }
        let mut filled = head.len();
        while filled < in_slot {
            let run = body.take(in_slot - filled);
            self.ring.write_slot(slot, filled, run);
            filled += run.len();
        }
        let (mark, lap) = self.ring.mark(slot);
        mark.set(lap, content(head.len(), len));
        self.written.slots += 1;
        if let Some((lap, cost)) = self.meter.advance(self.written.bytes, self.ring.capacity()) {
            self.ring.words().publish_write_cost(lap as u32, cost.unwrap_or(0));
        }
    }

    /// Wakes the reader if it sleeps.
    fn wake(&mut self) {
        if self.ring.words().published() {
            self.doorbell.ring();
        }
    }

    fn hand_over(&mut self) -> Result<(), LinkDown> {
        if let Some(handover) = &mut self.handover
            && let Some(socket) = self.doorbell.socket()
            && handover.drive(socket)?
        {
            self.session = handover.session();
            if let Some(line) = handover.take_line() {
                self.doorbell = Doorbell::shared(line);
            }
            self.handover = None;
        }
        Ok(())
    }
}

impl SendStream for ShmSendStream {
    fn write(&mut self, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        self.hand_over()?;
        if self.doorbell.ended {
            return Err(gone());
        }
        let mut body = Runs::new(body);
        if head.is_empty() && body.left == 0 {
            if self.handover.is_none() {
                self.doorbell.drain();
            }
            return if self.doorbell.ended { Err(gone()) } else { Ok(0) };
        }
        if self.handover.is_some() {
            // Bytes count as sent once they survive this process, which they do when the peer has the ring.
            return Ok(0);
        }
        let (mut head, all) = (head, head.len() + body.left);
        let mut left = all;
        let mut unannounced = 0;
        while left > 0 {
            let len = body.left.min(piece(&self.ring));
            if !self.has_room(head.len() + len)? {
                break;
            }
            self.fill(head, &mut body, len);
            left -= head.len() + len;
            unannounced += len;
            head = &[];
            if unannounced >= run(&self.ring) {
                self.wake();
                unannounced = 0;
            }
        }
        if left < all {
            self.wake();
        }
        Ok(all - left)
    }

    fn arm(&mut self) -> bool {
        if self.handover.is_some() {
            // The socket wakes the poller for the next message of the handover.
            return false;
        }
        self.doorbell.arm();
        self.ring.words().arm_writer(|| self.doorbell.drain());
        self.doorbell.ended || self.has_room(HEAD_MAX + piece(&self.ring)).unwrap_or(true)
    }

    fn disarm(&mut self) {
        self.doorbell.disarm();
        self.ring.words().disarm_writer();
    }

    fn is_open(&self) -> bool {
        self.handover.is_none()
    }

    fn session(&self) -> Option<Secret> {
        self.session
    }

    fn peer_can_read(&self) -> bool {
        self.peer_can_read
    }

    fn invalidate(&mut self) {
        self.ring.words().invalidate();
    }

    fn publish_cpu(&mut self, cpu: u32) {
        self.ring.words().publish_cpu(cpu);
    }

    fn flushed(&mut self) -> Result<bool, LinkDown> {
        // No byte is taken before the peer has the ring, whose memory then survives this process.
        Ok(self.doorbell.flushed())
    }
}

/// The receiving end.
#[derive(Debug)]
pub(super) struct ShmRecvStream {
    ring: ShmRing,
    doorbell: Doorbell,
    /// The memory of the writer's process, where the process is known.
    writer: Option<PeerMemory>,
    /// The writer's segments that are mapped here.
    segments: HashMap<SegmentId, PeerSegment>,
    /// The position up to which it has read.
    read: Position,
    /// Of the current slot: how many bytes of it are read, how many are left in it, and how many are left in the ring.
    taken: usize,
    in_slot: usize,
    in_ring: usize,
    /// The position that the writer knows of.
    released: Position,
    meter: Meter,
    chooser: Chooser,
    session: Option<Secret>,
}

impl ShmRecvStream {
    pub(super) fn new(
        ring: ShmRing,
        doorbell: Doorbell,
        writer: Option<PeerMemory>,
        chooser: Chooser,
        session: Option<Secret>,
    ) -> Self {
        ShmRecvStream {
            ring,
            doorbell,
            writer,
            segments: HashMap::new(),
            read: Position::default(),
            taken: 0,
            in_slot: 0,
            in_ring: 0,
            released: Position::default(),
            meter: Meter::default(),
            chooser,
            session,
        }
    }

    /// The number of bytes that can be read in one run.
    fn available(&mut self) -> Result<usize, LinkDown> {
        if self.in_slot + self.in_ring == 0 {
            let (mark, lap) = self.ring.mark(self.read.slots);
            let Some(content) = mark.get(lap) else { return Ok(0) };
            let (in_slot, in_ring) = parts(content);
            if in_slot + in_ring == 0 || in_slot > SLOT_BYTES || in_ring > self.ring.capacity() {
                return Err(LinkDown::new("the peer garbled the shared ring"));
            }
            (self.taken, self.in_slot, self.in_ring) = (0, in_slot, in_ring);
        }
        Ok(if self.in_slot > 0 { self.in_slot } else { self.in_ring })
    }

    /// The next `count` bytes of the current run.
    fn bytes(&self, count: usize) -> &[u8] {
        if self.in_slot > 0 {
            self.ring.slot_bytes(self.read.slots, self.taken, self.taken + count)
        } else {
            self.ring.bytes(self.read.bytes, count)
        }
    }

    /// Copies the next bytes of the current run, which lie in the ring.
    fn copy_from_ring(&mut self, into: &mut [u8]) {
        match self.chooser.lines() {
            Lines::Shared => into.copy_from_slice(self.ring.bytes(self.read.bytes, into.len())),
            Lines::Owned => self.ring.read_and_own(self.read.bytes, into),
        }
    }

    /// Runs `copy`, which takes `len` bytes out of the ring, and measures it if it is time to.
    fn measured(&mut self, len: usize, copy: impl FnOnce(&mut Self)) {
        let since = (self.chooser.measures() && self.meter.is_due(len)).then(Instant::now);
        copy(self);
        if let Some(since) = since {
            self.meter.record(len, since.elapsed());
        }
    }

    /// Goes on behind the next `count` bytes, at least one.
    fn consumed(&mut self, count: usize) {
        if self.in_slot > 0 {
            self.taken += count;
            self.in_slot -= count;
        } else {
            self.read.bytes += count as u64;
            self.in_ring -= count;
        }
        if self.in_slot + self.in_ring > 0 {
            return;
        }
        self.read.bytes = self.read.bytes.next_multiple_of(ALIGN);
        self.read.slots += 1;
        if let Some((lap, read)) = self.meter.advance(self.read.bytes, self.ring.capacity()) {
            let written = self.ring.words().write_cost(lap as u32);
            self.chooser.lap_read(written.zip(read).map(|(written, read)| written.saturating_add(read)));
        }
        // Not after every short message, since a word that both sides touch makes them wait for each other's cache line. The
        // writer is at most an eighth of the room behind, so it never waits for bytes that were read.
        let (slots, bytes) = (self.read.slots - self.released.slots, self.read.bytes - self.released.bytes);
        if slots >= SLOTS / 8 || bytes >= run(&self.ring) as u64 {
            self.released = self.read;
            if self.ring.words().release(self.read) {
                self.doorbell.ring();
            }
        }
    }
}

impl RecvStream for ShmRecvStream {
    fn peek(&mut self) -> Result<&[u8], LinkDown> {
        match self.available()? {
            0 if self.doorbell.ended => Err(gone()),
            available => Ok(self.bytes(available)),
        }
    }

    fn session(&self) -> Option<Secret> {
        self.session
    }

    fn end(&self) -> Option<LinkDown> {
        self.doorbell.ended.then(gone)
    }

    fn consume(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        if self.in_slot == 0 {
            // What is consumed without a copy by this stream costs it nothing while lines are shared.
            self.measured(count, |stream| {
                if stream.chooser.lines() == Lines::Owned {
                    stream.ring.own_lines(stream.read.bytes, count);
                }
            });
        }
        self.consumed(count);
    }

    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        let mut done = 0;
        while done < into.len() {
            let count = self.available()?.min(into.len() - done);
            if count == 0 {
                break;
            }
            let part = &mut into[done..done + count];
            if self.in_slot > 0 {
                part.copy_from_slice(self.bytes(count));
            } else {
                self.measured(count, |stream| stream.copy_from_ring(part));
            }
            self.consumed(count);
            done += count;
        }
        if done == 0 && self.doorbell.ended { Err(gone()) } else { Ok(done) }
    }

    fn read_memory(&mut self, from: MemoryAddress, into: &mut [u8], team: Team) -> io::Result<usize> {
        let writer = self.writer.ok_or(io::ErrorKind::Unsupported)?;
        let count = match from.segment {
            None => {
                let count = read_in_parts(from.address, into, team, |address, into| writer.read(address, into))?;
                if !writer.is_still_there() {
                    return Err(io::ErrorKind::ConnectionReset.into());
                }
                count
            }
            Some(id) => {
                if !self.segments.contains_key(&id) {
                    if self.segments.len() >= SEGMENTS_MAX {
                        self.segments.clear();
                    }
                    self.segments.insert(id, writer.segment(id)?);
                }
                let segment = &self.segments[&id];
                read_in_parts(from.address, into, team, |address, into| {
                    segment.read(address, into).map(|()| into.len())
                })?
            }
        };
        // Checked afterwards, as the stamp above: the writer may have left meanwhile. The bell may have rung for a slot, which has
        // nothing to do with this.
        self.doorbell.look_for_end();
        if self.doorbell.ended { Err(io::ErrorKind::ConnectionReset.into()) } else { Ok(count) }
    }

    fn invalidations(&self) -> u64 {
        self.ring.words().invalidations()
    }

    fn writer_cpu(&self) -> Option<u32> {
        self.ring.words().writer_cpu()
    }

    fn ring_stats(&self) -> Option<RingStats> {
        let [shared, owned] = self.chooser.costs();
        Some(RingStats { lines: self.chooser.lines().name(), shared, owned })
    }

    fn named(&mut self) {
        // A bell that was rung late, for what was seen before, or the end.
        self.doorbell.drain();
    }

    fn arm(&mut self) -> bool {
        self.doorbell.arm();
        self.ring.words().arm_reader(|| self.doorbell.drain());
        self.doorbell.ended || self.available().is_ok_and(|available| available > 0)
    }

    fn disarm(&mut self) {
        self.doorbell.disarm();
        self.ring.words().disarm_reader();
    }
}

/// Reads what lies at `address` with the threads of a team. Returns how many of the first bytes have been read, at least one; the
/// error is that of the first part of which none have.
fn read_in_parts(
    address: u64,
    into: &mut [u8],
    team: Team,
    read: impl Fn(u64, &mut [u8]) -> io::Result<usize> + Sync,
) -> io::Result<usize> {
    let parts = team.parts(2 * into.len());
    if parts < 2 {
        return read(address, into);
    }
    let len = into.len().div_ceil(parts).next_multiple_of(rustix::param::page_size());
    let mut parts: Vec<_> = into.chunks_mut(len).enumerate().map(|(index, part)| (index * len, part, Ok(0))).collect();
    team.each(&mut parts, |(offset, part, count)| *count = read(address.wrapping_add(*offset as u64), part));
    let mut all = 0;
    for (offset, _, count) in parts {
        match count {
            // A part of which only the beginning has been read is the last that counts.
            Ok(count) if all == offset => all += count,
            Err(error) if all == 0 => return Err(error),
            _ => break,
        }
    }
    Ok(all)
}

/// How many bytes of a head and a body of these lengths go to the slot: all, or the head if it fits, or none.
fn in_slot(head: usize, body: usize) -> usize {
    match (head + body, head) {
        (both, _) if both <= SLOT_BYTES => both,
        (_, head) if head <= SLOT_BYTES => head,
        _ => 0,
    }
}

/// The mark's content for a slot with a head and a body of these lengths; see [`parts`].
fn content(head: usize, body: usize) -> u32 {
    let in_slot = in_slot(head, body);
    (in_slot as u32) << 24 | (head + body - in_slot) as u32
}

/// How many bytes are in the slot, and how many in the ring.
fn parts(content: u32) -> (usize, usize) {
    ((content >> 24) as usize, (content & 0xff_ffff) as usize)
}

/// The room that this many bytes take in the ring.
fn aligned(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(ALIGN)
}

/// How many bytes the reader reads before it releases them, and the writer writes before it wakes a sleeping reader.
fn run(ring: &ShmRing) -> usize {
    ring.capacity() / 8
}

/// The most bytes of a body that go with one slot, so that both sides copy at the same time. Bodies are cut at multiples of
/// this, which no element crosses.
fn piece(ring: &ShmRing) -> usize {
    PIECE_BYTES.min(ring.capacity() / 4)
}

/// The same for rings of the default size.
const PIECE_BYTES: usize = 8192;

/// The longest head.
const HEAD_MAX: usize = 64;

/// The bytes of a slot begin at multiples of this in the ring: cache lines.
const ALIGN: u64 = 64;

/// How many segments of one peer stay mapped.
const SEGMENTS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::config::Switch;
    use crate::sys::cma::Stamp;
    use crate::sys::poller::{Interest, Poller};

    /// Reads a message of bytes, of which none can be read in the `hole`, at an odd address.
    fn read(team: Team, len: usize, hole: Range<usize>) -> (io::Result<usize>, Vec<u8>) {
        const ADDRESS: u64 = 12_345;
        let mut into = vec![0; len];
        let count = read_in_parts(ADDRESS, &mut into, team, |address, into| {
            let begin = (address - ADDRESS) as usize;
            let end = if begin < hole.end { hole.start } else { len };
            let count = into.len().min(end.saturating_sub(begin));
            into[..count].iter_mut().zip(begin..).for_each(|(byte, index)| *byte = index as u8 | 1);
            if count > 0 { Ok(count) } else { Err(io::Error::other(begin.to_string())) }
        });
        (count, into)
    }

    #[test]
    fn what_another_program_than_the_writers_has_in_its_memory_is_not_believed() {
        let poller = Poller::new().unwrap();
        let (socket, _far) = UnixStream::pair().unwrap();
        let this = PeerMemory::behind(socket.as_fd()).unwrap();
        let own = Stamp::own().unwrap();
        let (message, mut into) = (*b"a message", [0; 9]);
        for (value, outcome) in [(own.value, Ok(9)), (own.value ^ 2, Err(io::ErrorKind::ConnectionReset))] {
            let (ring, _) = ShmRing::create(rustix::param::page_size(), None).unwrap();
            let doorbell = Doorbell::new(poller.watch(socket.try_clone().unwrap(), Interest::Read).unwrap());
            let writer = Some(this.stamped(Stamp { value, ..own }));
            let mut stream = ShmRecvStream::new(ring, doorbell, writer, Chooser::new(Switch::On), None);
            let from = MemoryAddress { address: message.as_ptr() as u64, segment: None };
            let read = stream.read_memory(from, &mut into, Team::ALONE);
            assert_eq!(read.map_err(|error| error.kind()), outcome);
        }
        assert_eq!(into, message);
    }

    #[test]
    fn a_message_is_read_up_to_what_is_the_first_that_cannot_be() {
        let len = 1_000_001;
        for others in [0, 1, 3] {
            let team = Team::of(others);
            for begin in [1, 4096, 262_143, 262_144, 700_000, len - 1, len] {
                for end in [begin + 1, len] {
                    let (count, into) = read(team, len, begin..end);
                    assert_eq!(count.expect("something is there"), begin, "{others} more threads");
                    assert!(into[..begin].iter().enumerate().all(|(index, byte)| *byte == index as u8 | 1));
                }
            }
            assert_eq!(read(team, len, 0..len).0.expect_err("nothing is there").to_string(), "0");
        }
    }
}
