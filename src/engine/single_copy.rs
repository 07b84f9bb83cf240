//! Long messages that their receiver reads out of the sender's memory: one copy instead of two, and none of the sender's
//! time.
//!
//! The announcement says where the message lies. The receiver reads it when it has a place for it and answers `Taken`.
//! Where it cannot read, it asks for the message with a `Grant`, as without an address, and is offered none any more.
//!
//! A sender whose operation ends early takes the address back before it gives the memory away: it counts up in shared
//! memory, and then says `Withdrawn`. The receiver looks at the count after each read. While it is ahead of the
//! `Withdrawn` frames that have come, what was read may be something else, and is not used.

use std::io;

use crate::config::EagerBytes;
use crate::engine::buffered_send::Announced;
use crate::engine::frame::{FrameKind, Grant, Lane};
use crate::engine::inbox::{Arrival, Inbox, Placement};
use crate::engine::outbox::{Body, OpRef, Owner};
use crate::engine::progress::{Core, control};
use crate::transport::Location;
use crate::types::Rank;

/// A message as it was announced.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    pub(crate) token: u64,
    pub(crate) len: u64,
    /// Where it lies in the sender's memory, if it may be read there.
    pub(crate) location: Option<Location>,
    /// Whether the sender moves other data meanwhile.
    pub(crate) is_busy: bool,
}

/// A message that is being read.
#[derive(Debug)]
struct Reading {
    from: Rank,
    token: u64,
    lane: Lane,
    location: Location,
    placement: Placement,
}

/// What is being read, from all peers.
#[derive(Default)]
pub(crate) struct Readings {
    list: Vec<Reading>,
    /// `Withdrawn` frames that came, by sender.
    withdrawn: Vec<u64>,
    /// What is read before it is combined with what is there.
    bounce: Vec<u8>,
}

impl Readings {
    pub(crate) fn new(size: usize) -> Readings {
        Readings { list: Vec::new(), withdrawn: vec![0; size], bounce: Vec::new() }
    }

    pub(crate) fn clear(&mut self) {
        self.list.clear();
    }

    pub(crate) fn lose(&mut self, peer: Rank) {
        self.list.retain(|reading| reading.from != peer);
    }

    /// Whether something is being read from `peer` for `op`.
    pub(crate) fn serves(&self, op: OpRef, peer: Rank) -> bool {
        self.list.iter().any(|reading| reading.from == peer && reading.placement.owner.op == op)
    }

    /// The operation that reads message `token` of `peer`.
    pub(crate) fn owner(&self, peer: Rank, token: u64) -> Option<Owner> {
        let reading = self.list.iter().find(|reading| (reading.from, reading.token) == (peer, token));
        reading.map(|reading| reading.placement.owner)
    }
}

/// How far a read came.
enum Read {
    All,
    Some,
    /// The peer has taken memory back, and it is not known yet which.
    Doubtful,
}

impl Core {
    // ---- the sender's side ----

    /// Whether a message of `len` bytes is sent to `to` before it is asked for. One that is warm, because it was just
    /// written, is in this core's cache, out of which it gets faster through the ring than by being read where it lies.
    pub(crate) fn is_eager(&mut self, to: Rank, len: usize, is_warm: bool) -> bool {
        self.reach(to);
        let single_copy = self.eager_bytes.min(self.single_copy_bytes);
        if len <= single_copy {
            true
        } else if !self.lends(to) {
            len <= self.eager_bytes
        } else {
            is_warm && !self.crowded && len <= single_copy.saturating_mul(WARM_FACTOR).min(EagerBytes::MAX)
        }
    }

    /// Where `to` may read the message, if it may.
    pub(crate) fn location_for(&self, to: Rank, body: &Body) -> Option<Location> {
        match body {
            Body::Memory(region) if self.lends(to) => Some(Location::of(region.address()?, region.len())),
            _ => None,
        }
    }

    /// `from` has read message `token` where it lies.
    pub(crate) fn taken(&mut self, from: Rank, token: u64) {
        if let Some(announced) = self.take_announced(from, token) {
            self.written(announced.owner);
        }
    }

    /// Drops the announced messages for which `drops` holds, so that their memory can be used for something else.
    pub(crate) fn drop_announced(&mut self, drops: impl Fn(&Announced) -> bool) {
        let dropped: Vec<u64> = self.announced.iter().filter(|(_, a)| drops(a)).map(|(token, _)| *token).collect();
        for token in dropped {
            if let Some(mut announced) = self.announced.remove(&token) {
                self.withdraw(&mut announced);
            }
        }
    }

    /// Takes back the address of an announced message, if it has one.
    pub(crate) fn withdraw(&mut self, announced: &mut Announced) {
        if announced.header.location.take().is_some() {
            self.doubt(announced.to);
            let header = control(FrameKind::Withdrawn, announced.header.lane, 0, announced.header.token, 0);
            self.send(announced.to, header, Body::Empty, Owner::PROTOCOL);
        }
    }

    // ---- the receiver's side ----

    /// Has a place for a message that was announced.
    pub(crate) fn take_up(&mut self, from: Rank, offer: Offer, lane: Lane, placement: Placement) {
        match offer.location {
            Some(location) if self.prefers_reading(from, location, offer.is_busy, &placement) => {
                self.readings.list.push(Reading { from, token: offer.token, lane, location, placement });
            }
            _ => self.grant(from, offer.token, lane, placement, Grant::Chosen),
        }
    }

    /// Whether one copy by this rank is faster than two, of which the sender makes one. They overlap run by run in a
    /// ring that stays in the processors' caches, if the sender has nothing else to do.
    fn prefers_reading(&self, from: Rank, location: Location, is_busy: bool, placement: &Placement) -> bool {
        match placement.arrival {
            _ if location.segment.is_some() => true,
            // Combined as they come out of the ring, elements are not copied here at all.
            Arrival::Reduce(..) => self.crowded,
            Arrival::Store if placement.region.len() < OVERLAP_BYTES => true,
            Arrival::Store => is_busy || self.announced.values().any(|announced| announced.to == from),
        }
    }

    /// Whether there are messages to be read.
    pub(crate) fn is_reading(&self) -> bool {
        !self.readings.list.is_empty()
    }

    /// Reads on, a bounded amount. True: something moved.
    pub(crate) fn read_lent(&mut self) -> bool {
        let mut moved = false;
        let mut index = 0;
        while index < self.readings.list.len() {
            let Readings { list, withdrawn, bounce } = &mut self.readings;
            let reading = &mut list[index];
            let known = withdrawn[reading.from.index()];
            let read = match self.peers[reading.from.index()].inbox.as_mut() {
                Some(inbox) => read_some(reading, inbox, known, bounce),
                None => Err(io::ErrorKind::NotConnected.into()),
            };
            match read {
                Ok(Read::Some) => {}
                Ok(Read::Doubtful) => {
                    index += 1;
                    continue;
                }
                Ok(Read::All) => {
                    let reading = self.readings.list.remove(index);
                    self.acknowledge(&reading);
                    self.received(reading.from, reading.placement.owner);
                }
                Err(error) => {
                    let Reading { from, token, lane, placement, .. } = self.readings.list.remove(index);
                    let (name, me) = (&self.name, self.me);
                    log::debug!("communicator `{name}` rank {me}: the memory of rank {from} cannot be read: {error}");
                    self.grant(from, token, lane, placement, Grant::CannotRead);
                }
            }
            moved = true;
            index += 1;
        }
        moved
    }

    /// Whether something can be read now.
    pub(crate) fn can_read_lent(&self) -> bool {
        self.readings.list.iter().any(|reading| {
            let inbox = self.peers[reading.from.index()].inbox.as_ref();
            inbox.is_none_or(|inbox| inbox.withdrawals() == self.readings.withdrawn[reading.from.index()])
        })
    }

    /// Message `token` of `from` is no longer where it was said to be.
    pub(crate) fn withdrawn(&mut self, from: Rank, token: u64) {
        self.readings.withdrawn[from.index()] += 1;
        let is_it = |reading: &Reading| (reading.from, reading.token) == (from, token);
        match self.readings.list.iter().position(is_it) {
            Some(index) => {
                let Reading { lane, placement, .. } = self.readings.list.remove(index);
                self.grant(from, token, lane, placement, Grant::Chosen);
            }
            None => {
                self.collectives.forget_address(from, token);
                self.messages.forget_address(from, token);
            }
        }
    }

    /// Ends the readings of `op`. Their senders are done with them, as after a message that was granted.
    pub(crate) fn cancel_readings(&mut self, op: OpRef) {
        let (cancelled, kept) = std::mem::take(&mut self.readings.list)
            .into_iter()
            .partition::<Vec<_>, _>(|reading| reading.placement.owner.op == op);
        self.readings.list = kept;
        cancelled.iter().for_each(|reading| self.acknowledge(reading));
    }

    fn acknowledge(&mut self, reading: &Reading) {
        let header = control(FrameKind::Taken, reading.lane, 0, reading.token, 0);
        self.send(reading.from, header, Body::Empty, Owner::PROTOCOL);
    }
}

/// Reads a bounded part of a message. `known` counts the `Withdrawn` frames that have come from its sender.
fn read_some(reading: &mut Reading, inbox: &mut Inbox, known: u64, bounce: &mut Vec<u8>) -> io::Result<Read> {
    let Reading { location, placement, .. } = reading;
    let mut budget = BYTES_PER_TURN;
    while !placement.is_full() && budget > 0 {
        let at = location.plus(placement.filled);
        let count = match placement.arrival {
            Arrival::Store => {
                let run = placement.region.run_mut(placement.filled);
                let len = run.len().min(budget);
                inbox.read_memory(at, &mut run[..len])?
            }
            Arrival::Reduce(..) => {
                bounce.resize(BOUNCE_BYTES, 0);
                let len = (placement.region.len() - placement.filled).min(BOUNCE_BYTES);
                inbox.read_memory(at, &mut bounce[..len])?
            }
        };
        if inbox.withdrawals() != known {
            return Ok(Read::Doubtful);
        }
        let taken = match placement.arrival {
            Arrival::Store => {
                placement.filled += count;
                count
            }
            Arrival::Reduce(..) => placement.take(&bounce[..count]),
        };
        if taken == 0 {
            return Err(io::Error::other("less than an element is there"));
        }
        budget = budget.saturating_sub(taken);
    }
    Ok(if placement.is_full() { Read::All } else { Read::Some })
}

/// How many times as long a message out of the cache may be before it is read where it lies.
const WARM_FACTOR: usize = 4;

/// From which length on two copies that overlap are faster than one.
const OVERLAP_BYTES: usize = 64 * 1024;

/// How much of a message is read before other messages get their turn.
const BYTES_PER_TURN: usize = 1 << 20;

/// How much is read before it is combined: it stays in the processor's cache.
const BOUNCE_BYTES: usize = 64 * 1024;

#[cfg(test)]
mod tests;
