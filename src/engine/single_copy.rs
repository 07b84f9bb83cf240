//! Single copy: a receiver reads a long message out of its sender's memory, and the sender copies nothing.
//!
//! The sender's RTS says where the message lies. The receiver reads it once it has a buffer for it, and answers with an
//! ATS. Where it cannot read, it asks for the message with an RTR, and the sender gives it no address again.
//!
//! A sender that needs its memory back invalidates the address: it counts up in shared memory, and then sends
//! `Invalidated`. The receiver looks at the count after each read. While the count is ahead of the `Invalidated` frames
//! that have come, what was read may be something else, and is not used.

use std::io;

use crate::engine::completion::{Completion, OpId};
use crate::engine::endpoint::Endpoints;
use crate::engine::frame::{FrameKind, Header, MatchSpace};
use crate::engine::inbox::Inbox;
use crate::engine::per_rank::PerRank;
use crate::engine::recv_buffer::{RecvAction, RecvBuffer};
use crate::sys::team::Team;
use crate::transport::MemoryAddress;
use crate::types::Rank;

/// A message that is being read.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) from: Rank,
    pub(crate) token: u64,
    pub(crate) match_space: MatchSpace,
    pub(crate) address: MemoryAddress,
    pub(crate) buffer: RecvBuffer,
}

impl Reading {
    /// Tells the sender that this rank is done with its memory.
    pub(crate) fn acknowledge(&self, endpoints: &mut Endpoints) {
        endpoints.send_control(self.from, Header::control(FrameKind::Ats, self.match_space, 0, self.token, 0));
    }
}

/// How far a message has been read.
#[derive(Debug)]
pub(crate) enum ReadEnd {
    /// There is more to read.
    More,
    /// Its sender has invalidated memory, and it is not known yet which.
    Stale,
    /// It is read.
    Whole(Reading),
    /// It cannot be read, and has to be asked for.
    Unreadable(Reading),
}

/// What is being read, from all peers.
pub(crate) struct Reads {
    list: Vec<Reading>,
    /// `Invalidated` frames that came, by sender.
    invalidated: PerRank<u64>,
    /// What is read before it is combined with what is there.
    bounce: Vec<u8>,
}

impl Reads {
    /// Of a communicator of so many ranks.
    pub(crate) fn new(size: usize) -> Reads {
        Reads { list: Vec::new(), invalidated: PerRank::new(size), bounce: Vec::new() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn clear(&mut self) {
        self.list.clear();
    }

    /// Has a message read.
    pub(crate) fn push(&mut self, reading: Reading) {
        self.list.push(reading);
    }

    /// Forgets what is read from `peer`, which is lost.
    pub(crate) fn lose(&mut self, peer: Rank) {
        self.list.retain(|reading| reading.from != peer);
    }

    /// Whether something is being read from `peer` for `op`.
    pub(crate) fn serves(&self, op: OpId, peer: Rank) -> bool {
        self.list.iter().any(|reading| reading.from == peer && reading.buffer.completion.op == op)
    }

    /// What waits for message `token` of `peer`.
    pub(crate) fn completion(&self, peer: Rank, token: u64) -> Option<Completion> {
        let reading = self.list.iter().find(|reading| (reading.from, reading.token) == (peer, token));
        reading.map(|reading| reading.buffer.completion)
    }

    /// Reads on in the message at `index`, a bounded amount. A message that has come to its end leaves the list.
    pub(crate) fn read_on(&mut self, index: usize, endpoints: &mut Endpoints, team: Team) -> ReadEnd {
        let Reads { list, invalidated, bounce } = self;
        let reading = &mut list[index];
        let known = invalidated.get(reading.from);
        let read = match endpoints.inbox(reading.from) {
            Some(inbox) => read_some(reading, inbox, known, bounce, team),
            None => Err(io::ErrorKind::NotConnected.into()),
        };
        match read {
            Ok(Read::Some) => ReadEnd::More,
            Ok(Read::Stale) => ReadEnd::Stale,
            Ok(Read::All) => ReadEnd::Whole(self.list.remove(index)),
            Err(error) => {
                let reading = self.list.remove(index);
                let (name, me, from) = (endpoints.name(), endpoints.me(), reading.from);
                log::debug!("communicator `{name}` rank {me}: the memory of rank {from} cannot be read: {error}");
                ReadEnd::Unreadable(reading)
            }
        }
    }

    /// Whether something can be read now.
    pub(crate) fn can_read_now(&self, endpoints: &Endpoints) -> bool {
        self.list.iter().any(|reading| {
            let invalidations = endpoints.invalidations(reading.from);
            invalidations.is_none_or(|count| count == self.invalidated.get(reading.from))
        })
    }

    /// Message `token` of `from` is no longer where its RTS said: it is not read any further.
    pub(crate) fn invalidated(&mut self, from: Rank, token: u64) -> Option<Reading> {
        *self.invalidated.get_mut(from) += 1;
        let index = self.list.iter().position(|reading| (reading.from, reading.token) == (from, token))?;
        Some(self.list.remove(index))
    }

    /// Ends what is read for `op`. The senders are told, as after a message that has been read.
    pub(crate) fn cancel(&mut self, endpoints: &mut Endpoints, op: OpId) {
        let (cancelled, kept) = std::mem::take(&mut self.list)
            .into_iter()
            .partition::<Vec<_>, _>(|reading| reading.buffer.completion.op == op);
        self.list = kept;
        cancelled.iter().for_each(|reading| reading.acknowledge(endpoints));
    }
}

/// How far a read came.
enum Read {
    All,
    Some,
    /// The sender has invalidated memory, and it is not known yet which.
    Stale,
}

/// Reads a bounded part of a message. `known` counts the `Invalidated` frames that have come from its sender.
fn read_some(
    reading: &mut Reading,
    inbox: &mut Inbox,
    known: u64,
    bounce: &mut Vec<u8>,
    team: Team,
) -> io::Result<Read> {
    let Reading { address, buffer, .. } = reading;
    let mut budget = BYTES_PER_TURN;
    while !buffer.is_full() && budget > 0 {
        let at = address.plus(buffer.received);
        let count = match buffer.action {
            RecvAction::Store => {
                let run = buffer.region.run_mut(buffer.received);
                let len = run.len().min(budget);
                inbox.read_memory(at, &mut run[..len], team)?
            }
            RecvAction::Reduce(..) => {
                let most = (BOUNCE_BYTES * team.threads()).min(budget);
                let len = (buffer.region.len() - buffer.received).min(most);
                bounce.resize(bounce.len().max(len), 0);
                inbox.read_memory(at, &mut bounce[..len], team)?
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
            RecvAction::Reduce(..) => buffer.take_by(team, &bounce[..count]),
        };
        if taken == 0 {
            return Err(io::Error::other("less than an element is there"));
        }
        budget = budget.saturating_sub(taken);
    }
    Ok(if buffer.is_full() { Read::All } else { Read::Some })
}

/// How much of a message is read before other messages get their turn.
const BYTES_PER_TURN: usize = 1 << 20;

/// How much each thread reads before it is combined: it stays in the processor's cache.
const BOUNCE_BYTES: usize = 64 * 1024;

#[cfg(test)]
mod tests;
