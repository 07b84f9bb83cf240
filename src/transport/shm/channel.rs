//! The two ends of a ring.

use std::collections::HashMap;
use std::io::{self, IoSlice, Read, Write};
use std::os::unix::net::UnixStream;

use crate::error::LinkDown;
use crate::sys::memory::RingMemory;
use crate::sys::peer_memory::PeerMemory;
use crate::sys::poller::Registration;
use crate::sys::segment::{PeerSegment, SegmentId};
use crate::transport::handshake::is_passing;
use crate::transport::shm::connect::Introduction;
use crate::transport::{Inlet, Location, Outlet};

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
    memory: RingMemory,
    bell: Bell,
    tail: u64,
    /// What is left to do before the peer has the ring.
    introduction: Option<Introduction>,
    lends: bool,
}

impl ShmOutlet {
    pub(super) fn new(memory: RingMemory, bell: Bell, introduction: Introduction, lends: bool) -> Self {
        ShmOutlet { memory, bell, tail: 0, introduction: Some(introduction), lends }
    }

    /// The bytes of room. The peer's position is checked, since it is the peer's to write.
    fn room(&self) -> Result<usize, LinkDown> {
        let used = self.tail.wrapping_sub(self.memory.words().head());
        let capacity = self.memory.capacity();
        if used > capacity as u64 {
            return Err(LinkDown::new("the peer garbled the shared ring"));
        }
        Ok(capacity - used as usize)
    }

    /// Shows the reader what has been written.
    fn publish(&mut self) {
        if self.memory.words().publish(self.tail) {
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

impl Outlet for ShmOutlet {
    fn write(&mut self, bytes: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        self.introduce()?;
        if self.bell.ended {
            return Err(gone());
        }
        if bytes.is_empty() {
            if self.introduction.is_none() {
                self.bell.drain();
            }
            return if self.bell.ended { Err(gone()) } else { Ok(0) };
        }
        if self.introduction.is_some() {
            // Bytes count as sent once they outlive this process, which they do when the peer has the ring.
            return Ok(0);
        }
        let longest = run(&self.memory);
        let begin = self.tail;
        let mut published = begin;
        'full: for slice in bytes {
            let mut left: &[u8] = slice;
            while !left.is_empty() {
                let take = left.len().min(self.room()?).min(longest);
                if take == 0 {
                    // Nothing of the next slice either, though there may be room by then.
                    break 'full;
                }
                let (run, rest) = left.split_at(take);
                self.memory.write(self.tail, run);
                self.tail += take as u64;
                left = rest;
                if self.tail - published >= longest as u64 {
                    self.publish();
                    published = self.tail;
                }
            }
        }
        if self.tail > published {
            self.publish();
        }
        Ok((self.tail - begin) as usize)
    }

    fn arm(&mut self) -> bool {
        if self.introduction.is_some() {
            // The socket wakes for the handshake's next message.
            return false;
        }
        self.memory.words().arm_writer(|| self.bell.drain());
        self.bell.ended || self.room().is_ok_and(|room| room > 0)
    }

    fn disarm(&mut self) {
        self.memory.words().disarm_writer();
    }

    fn is_open(&self) -> bool {
        self.introduction.is_none()
    }

    fn lends(&self) -> bool {
        self.lends
    }

    fn withdraw(&mut self) {
        self.memory.words().withdraw();
    }

    fn flushed(&mut self) -> Result<bool, LinkDown> {
        // Nothing is taken before the peer has the ring, whose memory then outlives this process.
        Ok(true)
    }
}

/// The reading end.
#[derive(Debug)]
pub(super) struct ShmInlet {
    memory: RingMemory,
    bell: Bell,
    /// The writer's process, where it is known.
    writer: Option<PeerMemory>,
    /// Its segments that are mapped here.
    segments: HashMap<SegmentId, PeerSegment>,
    head: u64,
    /// The position that the writer knows of.
    released: u64,
    /// The writer is gone and nothing was taken since the last look.
    stalled: bool,
}

impl ShmInlet {
    pub(super) fn new(memory: RingMemory, bell: Bell, writer: Option<PeerMemory>) -> Self {
        ShmInlet { memory, bell, writer, segments: HashMap::new(), head: 0, released: 0, stalled: false }
    }

    fn available(&self) -> Result<usize, LinkDown> {
        let available = self.memory.words().tail().wrapping_sub(self.head);
        if available > self.memory.capacity() as u64 {
            return Err(LinkDown::new("the peer garbled the shared ring"));
        }
        Ok(available as usize)
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
}

impl Inlet for ShmInlet {
    fn peek(&mut self) -> Result<&[u8], LinkDown> {
        let available = self.look()?;
        Ok(self.memory.bytes(self.head, available))
    }

    fn consume(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        self.stalled = false;
        self.head += count as u64;
        // Not for every short message, since a word that both sides touch each time makes them wait for each other. The
        // writer lacks no more than a run of room, so it never waits for what has been read.
        if self.head - self.released >= run(&self.memory) as u64 {
            self.released = self.head;
            if self.memory.words().release(self.head) {
                self.bell.ring();
            }
        }
    }

    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        let longest = run(&self.memory);
        let mut done = 0;
        while done < into.len() {
            let count = self.look()?.min(into.len() - done).min(longest);
            if count == 0 {
                break;
            }
            into[done..done + count].copy_from_slice(self.memory.bytes(self.head, count));
            self.consume(count);
            done += count;
        }
        Ok(done)
    }

    fn read_memory(&mut self, from: Location, into: &mut [u8]) -> io::Result<usize> {
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

    fn withdrawals(&self) -> u64 {
        self.memory.words().withdrawals()
    }

    fn arm(&mut self) -> bool {
        self.memory.words().arm_reader(|| self.bell.drain());
        self.bell.ended || self.available().is_ok_and(|available| available > 0)
    }

    fn disarm(&mut self) {
        self.memory.words().disarm_reader();
    }
}

/// How much either side moves before the other sees it, so that both copy at the same time.
fn run(memory: &RingMemory) -> usize {
    memory.capacity() / 8
}

/// How many segments of one peer stay mapped.
const SEGMENTS_MAX: usize = 64;
