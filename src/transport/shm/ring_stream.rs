//! The two ends of a ring.

use std::collections::HashMap;
use std::io::{self, IoSlice, Read, Write};
use std::os::unix::net::UnixStream;

use crate::error::LinkDown;
use crate::sys::cma::PeerMemory;
use crate::sys::poller::Registration;
use crate::sys::ring_sync::Position;
use crate::sys::segment::{PeerSegment, SegmentId};
use crate::sys::shm_ring::{SLOT_BYTES, SLOTS, ShmRing};
use crate::transport::handshake::is_passing;
use crate::transport::shm::handover::Introduction;
use crate::transport::{MemoryAddress, RecvStream, SendStream};

/// The socket beside a ring.
#[derive(Debug)]
pub(super) struct Bell {
    stream: UnixStream,
    ended: bool,
    _registration: Registration,
}

impl Bell {
    pub(super) fn new(stream: UnixStream, registration: Registration) -> Self {
        Bell { stream, ended: false, _registration: registration }
    }

    /// Wakes the other side.
    fn ring(&mut self) {
        // A full socket has enough bytes to wake the other side; a broken one is noticed by `drain`.
        let _ = self.stream.write(&[0]);
    }

    /// Takes the bytes that rang, and notices the end.
    fn drain(&mut self) {
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

fn gone() -> LinkDown {
    LinkDown::new("it closed the connection: its process ended or its communicator was closed")
}

/// The writing end.
#[derive(Debug)]
pub(super) struct ShmOutlet {
    memory: ShmRing,
    bell: Bell,
    /// How much has been written.
    written: Position,
    /// What is left to do before the peer has the ring.
    introduction: Option<Introduction>,
    lends: bool,
}

impl ShmOutlet {
    pub(super) fn new(memory: ShmRing, bell: Bell, introduction: Introduction, lends: bool) -> Self {
        ShmOutlet { memory, bell, written: Position::default(), introduction: Some(introduction), lends }
    }

    /// Whether there is a slot, and so many bytes of the ring. The peer's positions are checked, since they are the peer's to
    /// write.
    fn has_room(&self, bytes: usize) -> Result<bool, LinkDown> {
        let done = self.memory.words().done();
        let (slots, used) = (self.written.slots.wrapping_sub(done.slots), self.written.bytes.wrapping_sub(done.bytes));
        let capacity = self.memory.capacity() as u64;
        if slots > SLOTS || used > capacity {
            return Err(LinkDown::new("the peer garbled the shared ring"));
        }
        Ok(slots < SLOTS && used + aligned(bytes) <= capacity)
    }

    /// Fills a slot with `head` and the next `len` bytes of `body`, for which there is room: what the slot itself does not
    /// take is in the ring.
    fn fill(&mut self, head: &[u8], body: &mut Bytes<'_>, len: usize) {
        let (slot, in_slot) = (self.written.slots, in_slot(head.len(), len));
        // The reader looks at the slot all the time, and takes it away from this core each time that it has been written to.
        // So it is written last and at once.
        let mut at = self.written.bytes;
        if in_slot < head.len() {
            self.memory.write(at, head);
            at += head.len() as u64;
        }
        let mut left = if in_slot > head.len() { 0 } else { len };
        while left > 0 {
            let run = body.take(left);
            self.memory.write(at, run);
            at += run.len() as u64;
            left -= run.len();
        }
        self.written.bytes += aligned((at - self.written.bytes) as usize);
        if in_slot >= head.len() {
            self.memory.write_slot(slot, 0, head);
        }
        let mut filled = head.len();
        while filled < in_slot {
            let run = body.take(in_slot - filled);
            self.memory.write_slot(slot, filled, run);
            filled += run.len();
        }
        let (mark, lap) = self.memory.mark(slot);
        mark.set(lap, content(head.len(), len));
        self.written.slots += 1;
    }

    /// Wakes the reader if it sleeps.
    fn wake(&mut self) {
        if self.memory.words().published() {
            self.bell.ring();
        }
    }

    fn introduce(&mut self) -> Result<(), LinkDown> {
        if let Some(introduction) = &mut self.introduction
            && introduction.drive(&mut self.bell.stream)?
        {
            self.introduction = None;
        }
        Ok(())
    }
}

impl SendStream for ShmOutlet {
    fn write(&mut self, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        self.introduce()?;
        if self.bell.ended {
            return Err(gone());
        }
        let mut body = Bytes::new(body);
        if head.is_empty() && body.left == 0 {
            if self.introduction.is_none() {
                self.bell.drain();
            }
            return if self.bell.ended { Err(gone()) } else { Ok(0) };
        }
        if self.introduction.is_some() {
            // Bytes count as sent once they outlive this process, which they do when the peer has the ring.
            return Ok(0);
        }
        let (mut head, all) = (head, head.len() + body.left);
        let mut left = all;
        let mut unannounced = 0;
        while left > 0 {
            let len = body.left.min(piece(&self.memory));
            if !self.has_room(head.len() + len)? {
                break;
            }
            self.fill(head, &mut body, len);
            left -= head.len() + len;
            unannounced += len;
            head = &[];
            if unannounced >= run(&self.memory) {
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
        if self.introduction.is_some() {
            // The socket wakes for the handshake's next message.
            return false;
        }
        self.memory.words().arm_writer(|| self.bell.drain());
        self.bell.ended || self.has_room(HEAD_MAX + piece(&self.memory)).unwrap_or(true)
    }

    fn disarm(&mut self) {
        self.memory.words().disarm_writer();
    }

    fn is_open(&self) -> bool {
        self.introduction.is_none()
    }

    fn peer_can_read(&self) -> bool {
        self.lends
    }

    fn invalidate(&mut self) {
        self.memory.words().invalidate();
    }

    fn publish_cpu(&mut self, cpu: u32) {
        self.memory.words().publish_cpu(cpu);
    }

    fn flushed(&mut self) -> Result<bool, LinkDown> {
        // Nothing is taken before the peer has the ring, whose memory then outlives this process.
        Ok(true)
    }
}

/// The reading end.
#[derive(Debug)]
pub(super) struct ShmInlet {
    memory: ShmRing,
    bell: Bell,
    /// The writer's process, where it is known.
    writer: Option<PeerMemory>,
    /// Its segments that are mapped here.
    segments: HashMap<SegmentId, PeerSegment>,
    /// What has been read.
    read: Position,
    /// What is left of the slot that is read: in the slot itself, of which so many bytes are taken, then in the ring.
    taken: usize,
    in_slot: usize,
    in_ring: usize,
    /// The positions that the writer knows of.
    released: Position,
    /// The writer is gone and nothing was taken since the last look.
    stalled: bool,
}

impl ShmInlet {
    pub(super) fn new(memory: ShmRing, bell: Bell, writer: Option<PeerMemory>) -> Self {
        ShmInlet {
            memory,
            bell,
            writer,
            segments: HashMap::new(),
            read: Position::default(),
            taken: 0,
            in_slot: 0,
            in_ring: 0,
            released: Position::default(),
            stalled: false,
        }
    }

    /// The number of bytes that are there in one run.
    fn available(&mut self) -> Result<usize, LinkDown> {
        if self.in_slot + self.in_ring == 0 {
            let (mark, lap) = self.memory.mark(self.read.slots);
            let Some(content) = mark.get(lap) else { return Ok(0) };
            let (in_slot, in_ring) = parts(content);
            if in_slot + in_ring == 0 || in_slot > SLOT_BYTES || in_ring > self.memory.capacity() {
                return Err(LinkDown::new("the peer garbled the shared ring"));
            }
            (self.taken, self.in_slot, self.in_ring) = (0, in_slot, in_ring);
        }
        Ok(if self.in_slot > 0 { self.in_slot } else { self.in_ring })
    }

    fn look(&mut self) -> Result<usize, LinkDown> {
        let available = self.available()?;
        if self.bell.ended {
            if self.stalled {
                return Err(gone());
            }
            self.stalled = true;
        }
        Ok(available)
    }

    /// The next `count` bytes, which are in one run.
    fn bytes(&self, count: usize) -> &[u8] {
        if self.in_slot > 0 {
            self.memory.slot_bytes(self.read.slots, self.taken, self.taken + count)
        } else {
            self.memory.bytes(self.read.bytes, count)
        }
    }
}

impl RecvStream for ShmInlet {
    fn peek(&mut self) -> Result<&[u8], LinkDown> {
        let available = self.look()?;
        Ok(self.bytes(available))
    }

    fn consume(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        self.stalled = false;
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
        // Not for every short message, since a word that both sides touch each time makes them wait for each other. The
        // writer lacks no more than an eighth of the room, so it never waits for what has been read.
        let (slots, bytes) = (self.read.slots - self.released.slots, self.read.bytes - self.released.bytes);
        if slots >= SLOTS / 8 || bytes >= run(&self.memory) as u64 {
            self.released = self.read;
            if self.memory.words().release(self.read) {
                self.bell.ring();
            }
        }
    }

    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        let mut done = 0;
        while done < into.len() {
            let count = self.look()?.min(into.len() - done);
            if count == 0 {
                break;
            }
            into[done..done + count].copy_from_slice(self.bytes(count));
            self.consume(count);
            done += count;
        }
        Ok(done)
    }

    fn read_memory(&mut self, from: MemoryAddress, into: &mut [u8]) -> io::Result<usize> {
        let writer = self.writer.ok_or(io::ErrorKind::Unsupported)?;
        let count = match from.segment {
            None => writer.read(from.address, into)?,
            Some(id) => {
                if !self.segments.contains_key(&id) {
                    if self.segments.len() >= SEGMENTS_MAX {
                        self.segments.clear();
                    }
                    self.segments.insert(id, writer.segment(id)?);
                }
                self.segments[&id].read(from.address, into)?;
                into.len()
            }
        };
        // Asked afterwards: another process may have got the number of one that is gone.
        self.bell.drain();
        if self.bell.ended { Err(io::ErrorKind::ConnectionReset.into()) } else { Ok(count) }
    }

    fn invalidations(&self) -> u64 {
        self.memory.words().invalidations()
    }

    fn writer_cpu(&self) -> Option<u32> {
        self.memory.words().writer_cpu()
    }

    fn arm(&mut self) -> bool {
        self.memory.words().arm_reader(|| self.bell.drain());
        self.bell.ended || self.available().is_ok_and(|available| available > 0)
    }

    fn disarm(&mut self) {
        self.memory.words().disarm_reader();
    }
}

/// Bytes in several runs, as they are taken from the front.
struct Bytes<'a> {
    runs: &'a [IoSlice<'a>],
    /// What has been taken of the first run.
    taken: usize,
    left: usize,
}

impl<'a> Bytes<'a> {
    fn new(runs: &'a [IoSlice<'a>]) -> Self {
        Bytes { runs, taken: 0, left: runs.iter().map(|run| run.len()).sum() }
    }

    /// The next bytes of one run, as many as `most`. There must be some.
    fn take(&mut self, most: usize) -> &'a [u8] {
        while self.taken == self.runs[0].len() {
            self.runs = &self.runs[1..];
            self.taken = 0;
        }
        let run = &self.runs[0][self.taken..];
        let count = run.len().min(most);
        self.taken += count;
        self.left -= count;
        &run[..count]
    }
}

/// How many bytes of a head and a body of these lengths are in their slot: all, or the head if it has room, or none.
fn in_slot(head: usize, body: usize) -> usize {
    match (head + body, head) {
        (both, _) if both <= SLOT_BYTES => both,
        (_, head) if head <= SLOT_BYTES => head,
        _ => 0,
    }
}

/// What a mark says of a slot with a head and a body of these lengths; see [`parts`].
fn content(head: usize, body: usize) -> u32 {
    let in_slot = in_slot(head, body);
    (in_slot as u32) << 24 | (head + body - in_slot) as u32
}

/// How many bytes are in the slot, and how many in the ring.
fn parts(content: u32) -> (usize, usize) {
    ((content >> 24) as usize, (content & 0xff_ffff) as usize)
}

/// The room that so many bytes take in the ring.
fn aligned(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(ALIGN)
}

/// How much the reader takes before it says so, and the writer writes before it looks for a reader that sleeps.
fn run(memory: &ShmRing) -> usize {
    memory.capacity() / 8
}

/// The most of a body that comes with one slot, so that both sides copy at the same time. Bodies are cut at multiples of
/// this, which no element crosses.
fn piece(memory: &ShmRing) -> usize {
    PIECE_BYTES.min(memory.capacity() / 4)
}

/// The same in rings of the usual size.
const PIECE_BYTES: usize = 8192;

/// The longest head.
const HEAD_MAX: usize = 64;

/// What comes with a slot begins at multiples of this in the ring: cache lines.
const ALIGN: u64 = 64;

/// How many segments of one peer stay mapped.
const SEGMENTS_MAX: usize = 64;
