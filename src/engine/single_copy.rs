//! Long messages that their receiver reads out of the sender's memory: one copy instead of two, and none of the sender's
//! time.
//!
//! The announcement says where the message lies. The receiver reads it when it has a place for it and answers `Taken`.
//! Where it cannot read, it asks for the message with an `Rtr`, as without an address, and is offered none any more.
//!
//! A sender whose operation ends early takes the address back before it gives the memory away: it counts up in shared
//! memory, and then says `Invalidated`. The receiver looks at the count after each read. While it is ahead of the
//! `Invalidated` frames that have come, what was read may be something else, and is not used.

use std::io;

use crate::config::EagerBytes;
use crate::engine::body::Body;
use crate::engine::buffered_send::PendingSend;
use crate::engine::completion::{Completion, OpId};
use crate::engine::frame::{FrameKind, Header, MatchSpace, RtrReason, RtsInfo};
use crate::engine::inbox::Inbox;
use crate::engine::progress::Engine;
use crate::engine::recv_buffer::{RecvAction, RecvBuffer};
use crate::transport::MemoryAddress;
use crate::types::Rank;

/// A message that is being read.
#[derive(Debug)]
struct Reading {
    from: Rank,
    token: u64,
    match_space: MatchSpace,
    address: MemoryAddress,
    buffer: RecvBuffer,
}

/// What is being read, from all peers.
#[derive(Default)]
pub(crate) struct Readings {
    list: Vec<Reading>,
    /// `Invalidated` frames that came, by sender.
    invalidated: Vec<u64>,
    /// What is read before it is combined with what is there.
    bounce: Vec<u8>,
}

impl Readings {
    pub(crate) fn new(size: usize) -> Readings {
        Readings { list: Vec::new(), invalidated: vec![0; size], bounce: Vec::new() }
    }

    pub(crate) fn clear(&mut self) {
        self.list.clear();
    }

    pub(crate) fn lose(&mut self, peer: Rank) {
        self.list.retain(|reading| reading.from != peer);
    }

    /// Whether something is being read from `peer` for `op`.
    pub(crate) fn serves(&self, op: OpId, peer: Rank) -> bool {
        self.list.iter().any(|reading| reading.from == peer && reading.buffer.completion.op == op)
    }

    /// The operation that reads message `token` of `peer`.
    pub(crate) fn completion(&self, peer: Rank, token: u64) -> Option<Completion> {
        let reading = self.list.iter().find(|reading| (reading.from, reading.token) == (peer, token));
        reading.map(|reading| reading.buffer.completion)
    }
}

/// How far a read came.
enum Read {
    All,
    Some,
    /// The peer has taken memory back, and it is not known yet which.
    Stale,
}

impl Engine {
    // ---- the sender's side ----

    /// Whether a message of `len` bytes is sent to `to` before it is asked for. One that is warm, because it was just
    /// written, is in this core's cache, out of which it gets faster through the ring than by being read where it lies.
    pub(crate) fn is_eager(&mut self, to: Rank, len: usize, is_cache_hot: bool) -> bool {
        self.connect(to);
        let single_copy = self.eager_bytes.min(self.single_copy_bytes);
        if len <= single_copy {
            true
        } else if !self.peer_can_read(to) {
            len <= self.eager_bytes
        } else {
            is_cache_hot && !self.oversubscribed && len <= single_copy.saturating_mul(HOT_FACTOR).min(EagerBytes::MAX)
        }
    }

    /// Where `to` may read the message, if it may.
    pub(crate) fn address_for(&self, to: Rank, body: &Body) -> Option<MemoryAddress> {
        match body {
            Body::Memory(region) if self.peer_can_read(to) => Some(MemoryAddress::of(region.address()?, region.len())),
            _ => None,
        }
    }

    /// `from` has read message `token` where it lies.
    pub(crate) fn ats_arrives(&mut self, from: Rank, token: u64) {
        if let Some(pending) = self.take_pending_send(from, token) {
            self.send_done(pending.completion);
        }
    }

    /// Drops the announced messages for which `drops` holds, so that their memory can be used for something else.
    pub(crate) fn drop_pending_sends(&mut self, drops: impl Fn(&PendingSend) -> bool) {
        let dropped: Vec<u64> = self.pending_sends.iter().filter(|(_, a)| drops(a)).map(|(token, _)| *token).collect();
        for token in dropped {
            if let Some(mut pending) = self.pending_sends.remove(&token) {
                self.invalidate(&mut pending);
            }
        }
    }

    /// Takes back the address of an announced message, if it has one.
    pub(crate) fn invalidate(&mut self, pending: &mut PendingSend) {
        if pending.header.address.take().is_some() {
            self.mark_reads_stale(pending.to);
            let header =
                Header::control(FrameKind::Invalidated, pending.header.match_space, 0, pending.header.token, 0);
            self.send(pending.to, header, Body::Empty, Completion::NONE);
        }
    }

    // ---- the receiver's side ----

    /// Has a buffer for a message whose RTS has come.
    pub(crate) fn take_up(&mut self, from: Rank, rts: RtsInfo, match_space: MatchSpace, buffer: RecvBuffer) {
        match rts.address {
            Some(address) if self.prefers_reading(from, address, rts.is_busy, &buffer) => {
                self.readings.list.push(Reading { from, token: rts.token, match_space, address, buffer });
            }
            _ => self.send_rtr(from, rts.token, match_space, buffer, RtrReason::Chosen),
        }
    }

    /// Whether one copy by this rank is faster than two, of which the sender makes one. They overlap run by run in a
    /// ring that stays in the processors' caches, if the sender has nothing else to do.
    fn prefers_reading(&self, from: Rank, address: MemoryAddress, is_busy: bool, buffer: &RecvBuffer) -> bool {
        match buffer.action {
            _ if address.segment.is_some() => true,
            // Combined as they come out of the ring, elements are not copied here at all.
            RecvAction::Reduce(..) => self.oversubscribed,
            RecvAction::Store if buffer.region.len() < OVERLAP_BYTES => true,
            RecvAction::Store => is_busy || self.pending_sends.values().any(|pending| pending.to == from),
        }
    }

    /// Whether there are messages to be read.
    pub(crate) fn has_reads(&self) -> bool {
        !self.readings.list.is_empty()
    }

    /// Reads on, a bounded amount. True: something moved.
    pub(crate) fn progress_reads(&mut self) -> bool {
        let mut moved = false;
        let mut index = 0;
        while index < self.readings.list.len() {
            let Readings { list, invalidated, bounce } = &mut self.readings;
            let reading = &mut list[index];
            let known = invalidated[reading.from.index()];
            let read = match self.peers[reading.from.index()].inbox.as_mut() {
                Some(inbox) => read_some(reading, inbox, known, bounce),
                None => Err(io::ErrorKind::NotConnected.into()),
            };
            match read {
                Ok(Read::Some) => {}
                Ok(Read::Stale) => {
                    index += 1;
                    continue;
                }
                Ok(Read::All) => {
                    let reading = self.readings.list.remove(index);
                    self.acknowledge(&reading);
                    self.recv_done(reading.from, reading.buffer.completion);
                }
                Err(error) => {
                    let Reading { from, token, match_space, buffer, .. } = self.readings.list.remove(index);
                    let (name, me) = (&self.name, self.me);
                    log::debug!("communicator `{name}` rank {me}: the memory of rank {from} cannot be read: {error}");
                    self.send_rtr(from, token, match_space, buffer, RtrReason::CannotRead);
                }
            }
            moved = true;
            index += 1;
        }
        moved
    }

    /// Whether something can be read now.
    pub(crate) fn can_read_now(&self) -> bool {
        self.readings.list.iter().any(|reading| {
            let inbox = self.peers[reading.from.index()].inbox.as_ref();
            inbox.is_none_or(|inbox| inbox.invalidations() == self.readings.invalidated[reading.from.index()])
        })
    }

    /// Message `token` of `from` is no longer where it was said to be.
    pub(crate) fn invalidation_arrives(&mut self, from: Rank, token: u64) {
        self.readings.invalidated[from.index()] += 1;
        let is_it = |reading: &Reading| (reading.from, reading.token) == (from, token);
        match self.readings.list.iter().position(is_it) {
            Some(index) => {
                let Reading { match_space, buffer, .. } = self.readings.list.remove(index);
                self.send_rtr(from, token, match_space, buffer, RtrReason::Chosen);
            }
            None => {
                self.collectives.clear_address(from, token);
                self.messages.clear_address(from, token);
            }
        }
    }

    /// Ends the readings of `op`. Their senders are done with them, as after a message that was asked for.
    pub(crate) fn cancel_readings(&mut self, op: OpId) {
        let (cancelled, kept) = std::mem::take(&mut self.readings.list)
            .into_iter()
            .partition::<Vec<_>, _>(|reading| reading.buffer.completion.op == op);
        self.readings.list = kept;
        cancelled.iter().for_each(|reading| self.acknowledge(reading));
    }

    fn acknowledge(&mut self, reading: &Reading) {
        let header = Header::control(FrameKind::Ats, reading.match_space, 0, reading.token, 0);
        self.send(reading.from, header, Body::Empty, Completion::NONE);
    }
}

/// Reads a bounded part of a message. `known` counts the `Invalidated` frames that have come from its sender.
fn read_some(reading: &mut Reading, inbox: &mut Inbox, known: u64, bounce: &mut Vec<u8>) -> io::Result<Read> {
    let Reading { address, buffer, .. } = reading;
    let mut budget = BYTES_PER_TURN;
    while !buffer.is_full() && budget > 0 {
        let at = address.plus(buffer.received);
        let count = match buffer.action {
            RecvAction::Store => {
                let run = buffer.region.run_mut(buffer.received);
                let len = run.len().min(budget);
                inbox.read_memory(at, &mut run[..len])?
            }
            RecvAction::Reduce(..) => {
                bounce.resize(BOUNCE_BYTES, 0);
                let len = (buffer.region.len() - buffer.received).min(BOUNCE_BYTES);
                inbox.read_memory(at, &mut bounce[..len])?
            }
        };
        if inbox.invalidations() != known {
            return Ok(Read::Stale);
        }
        let taken = match buffer.action {
            RecvAction::Store => {
                buffer.received += count;
                count
            }
            RecvAction::Reduce(..) => buffer.take(&bounce[..count]),
        };
        if taken == 0 {
            return Err(io::Error::other("less than an element is there"));
        }
        budget = budget.saturating_sub(taken);
    }
    Ok(if buffer.is_full() { Read::All } else { Read::Some })
}

/// How many times as long a message out of the cache may be before it is read where it lies.
const HOT_FACTOR: usize = 4;

/// From which length on two copies that overlap are faster than one.
const OVERLAP_BYTES: usize = 64 * 1024;

/// How much of a message is read before other messages get their turn.
const BYTES_PER_TURN: usize = 1 << 20;

/// How much is read before it is combined: it stays in the processor's cache.
const BOUNCE_BYTES: usize = 64 * 1024;

#[cfg(test)]
mod tests;
