//! The window of a lane: how many bytes its writer may have sent that its reader has not taken.

use std::collections::VecDeque;

use crate::error::LinkDown;

/// The window of every lane: some pieces, so that the writer goes on while the reader tells of the first.
pub(crate) const WINDOW_BYTES: usize = 1 << 20;

/// After how many bytes taken the writer is told.
pub(crate) const CREDIT_BYTES: usize = WINDOW_BYTES / 4;

/// How much memory a lane keeps that was busy once.
const KEPT_BYTES: usize = 64 << 10;

/// The writer's side.
#[derive(Debug)]
pub(crate) struct SendWindow {
    room: usize,
}

impl SendWindow {
    pub(crate) fn new() -> SendWindow {
        SendWindow { room: WINDOW_BYTES }
    }

    /// How many bytes may be sent.
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    /// Notes that so many were sent.
    pub(crate) fn sent(&mut self, count: usize) {
        self.room -= count;
    }

    /// The reader has taken so many. The error: it was never sent so many.
    pub(crate) fn credit(&mut self, count: u32) -> Result<(), LinkDown> {
        let room = self.room.saturating_add(count as usize);
        if room > WINDOW_BYTES {
            return Err(LinkDown::new(format!(
                "it took {count} bytes of a lane: expected at most {}, which it was sent",
                WINDOW_BYTES - self.room
            )));
        }
        self.room = room;
        Ok(())
    }
}

/// The reader's side: what has come, and what the writer does not know to be taken.
#[derive(Debug, Default)]
pub(crate) struct RecvWindow {
    bytes: VecDeque<u8>,
    /// Bytes taken, of which the writer has not been told.
    taken: usize,
}

impl RecvWindow {
    /// Keeps what has come. The error: the writer may not have sent so much.
    pub(crate) fn arrive(&mut self, bytes: &[u8]) -> Result<(), LinkDown> {
        self.check(bytes.len())?;
        self.bytes.extend(bytes);
        Ok(())
    }

    /// Notes that so many bytes have come and were taken at once. The error: the writer may not have sent so many.
    pub(crate) fn pass(&mut self, count: usize) -> Result<(), LinkDown> {
        self.check(count)?;
        self.taken += count;
        Ok(())
    }

    fn check(&self, count: usize) -> Result<(), LinkDown> {
        let unread = self.bytes.len() + self.taken + count;
        if unread > WINDOW_BYTES {
            return Err(LinkDown::new(format!(
                "it sent {unread} bytes of a lane that were not taken: expected at most {WINDOW_BYTES}"
            )));
        }
        Ok(())
    }

    /// Whether nothing is left to be taken.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Moves bytes into `into`, and returns how many.
    pub(crate) fn take(&mut self, into: &mut [u8]) -> usize {
        let count = self.bytes.len().min(into.len());
        let (first, second) = self.bytes.as_slices();
        let of_first = first.len().min(count);
        into[..of_first].copy_from_slice(&first[..of_first]);
        into[of_first..count].copy_from_slice(&second[..count - of_first]);
        self.bytes.drain(..count);
        if self.bytes.is_empty() && self.bytes.capacity() > KEPT_BYTES {
            self.bytes = VecDeque::new();
        }
        self.taken += count;
        count
    }

    /// How many bytes to tell the writer of, if that is worth a message.
    pub(crate) fn credit(&mut self) -> Option<u32> {
        if self.taken < CREDIT_BYTES {
            return None;
        }
        u32::try_from(std::mem::take(&mut self.taken)).ok()
    }
}
