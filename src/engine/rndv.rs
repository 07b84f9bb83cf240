//! The rendezvous of long messages: a sender asks, and the bytes travel once the receiver has memory for them.
//!
//! Names as in UCX. A short message is one `Eager` frame. Of a long one, the sender first sends an RTS, and keeps a
//! [`PendingSend`]. The receiver either answers with an RTR, on which `Data` follows, or reads the message where it lies
//! ([`single_copy`](crate::engine::single_copy)) and answers with an ATS. A collective's receiver does not wait for the RTS of
//! what it cannot read: it says that it is ready, and `Data` may come at once.
//!
//! A sender whose operation ends early invalidates the address before it gives the memory away: it counts up in shared
//! memory, and then sends `Invalidated`.

use std::collections::hash_map;
use std::time::Instant;

use rustc_hash::FxHashMap;

use crate::config::{EagerBytes, Switch};
use crate::engine::body::{Body, Copied};
use crate::engine::completion::{Completion, OpId};
use crate::engine::copying::{Choices, CopyStats, Copying};
use crate::engine::endpoint::Endpoints;
use crate::engine::frame::{End, Failed, FrameKind, GIVEN_UP, Header, MatchSpace, RtrReason, RtsInfo};
use crate::engine::per_rank::PerRank;
use crate::engine::recv_buffer::{RecvAction, RecvBuffer};
use crate::engine::single_copy::{ReadEnd, Reading, Reads};
use crate::sys::team::Team;
use crate::transport::MemoryAddress;
use crate::types::Rank;

/// A long message that waits for its receiver.
#[derive(Debug)]
pub(crate) struct PendingSend {
    pub(crate) to: Rank,
    pub(crate) header: Header,
    pub(crate) body: Body,
    pub(crate) completion: Completion,
    /// What is copied of it so far, once its send is to end before its receiver asks for it.
    pub(crate) copy: Option<Copied>,
}

impl PendingSend {
    /// Sends the message to its receiver, which has the first `offset` bytes.
    fn send_data(self, endpoints: &mut Endpoints, offset: usize) {
        let header = Header { kind: FrameKind::Data, ..self.header };
        endpoints.push_from(self.to, offset, header, self.body, self.completion);
    }
}

/// What is known of a long message as it is sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Known {
    /// Its receiver has asked for it.
    pub(crate) is_asked: bool,
    /// It was just written, and lies in this core's own cache.
    pub(crate) is_cache_hot: bool,
}

/// The long messages of one communicator.
pub(crate) struct Rendezvous {
    pub(crate) eager_bytes: usize,
    /// Longer messages may be read where they lie.
    pub(crate) single_copy_bytes: usize,
    /// Whether this rank reads them there.
    pub(crate) single_copy: Switch,
    /// The results of collectives up to so long lie in this core's own cache as they are sent.
    pub(crate) hot_bytes: usize,
    /// The host has more ranks than cores, or no thread is to poll.
    pub(crate) oversubscribed: bool,
    /// The threads that share copies and reductions.
    pub(crate) team: Team,
    /// Own messages whose RTS has been sent, by token.
    pending_sends: FxHashMap<u64, PendingSend>,
    next_token: u64,
    /// Buffers for messages whose RTR has been sent, by sender and token.
    recv_buffers: FxHashMap<(Rank, u64), RecvBuffer>,
    reads: Reads,
    choices: Choices,
    /// By peer, whether it has said that it cannot read this process's memory.
    cannot_read: PerRank<bool>,
}

impl Rendezvous {
    /// Of so many ranks.
    pub(crate) fn new(size: usize) -> Rendezvous {
        Rendezvous {
            eager_bytes: 8192,
            single_copy_bytes: 0,
            single_copy: Switch::Auto,
            hot_bytes: HOT_EAGER_BYTES,
            oversubscribed: false,
            team: Team::ALONE,
            pending_sends: FxHashMap::default(),
            next_token: 0,
            recv_buffers: FxHashMap::default(),
            reads: Reads::new(size),
            choices: Choices::default(),
            cannot_read: PerRank::new(size),
        }
    }

    /// Whether no message waits for its receiver. It may outlive its operation.
    pub(crate) fn is_idle(&self) -> bool {
        self.pending_sends.is_empty()
    }

    // ---- the sender's side ----

    /// Whether a message of `len` bytes is sent to `to` before it is asked for: a longer one too, if it is `hot`, which
    /// was just written.
    pub(crate) fn is_eager(&self, endpoints: &mut Endpoints, to: Rank, len: usize, hot: bool) -> bool {
        endpoints.connect(to);
        let single_copy = self.eager_bytes.min(self.single_copy_bytes);
        if len <= single_copy {
            true
        } else if !self.peer_can_read(endpoints, to) {
            len <= self.eager_bytes
        } else {
            hot && !self.oversubscribed && len <= single_copy.saturating_mul(HOT_FACTOR).min(EagerBytes::MAX)
        }
    }

    /// Whether `peer` can read this process's memory, as far as is known.
    fn peer_can_read(&self, endpoints: &Endpoints, peer: Rank) -> bool {
        endpoints.peer_can_read(peer) == Some(true) && !self.cannot_read.get(peer)
    }

    /// Sends a message of an operation: at once if it is `eager`, else by an RTS. True: it is written, which the completion
    /// is not told.
    pub(crate) fn send_message(
        &mut self,
        endpoints: &mut Endpoints,
        to: Rank,
        header: Header,
        body: Body,
        completion: Completion,
        eager: bool,
    ) -> bool {
        if eager {
            return endpoints.send(to, Header { kind: FrameKind::Eager, ..header }, body, completion);
        }
        self.send_long(endpoints, to, header, body, completion, Known::default());
        false
    }

    /// Sends a long message: by an RTS, unless the receiver has asked for it and is not to read it instead. Returns the token of one
    /// that waits for the receiver to ask.
    pub(crate) fn send_long(
        &mut self,
        endpoints: &mut Endpoints,
        to: Rank,
        header: Header,
        body: Body,
        completion: Completion,
        known: Known,
    ) -> Option<u64> {
        let token = self.next_token;
        self.next_token += 1;
        let address = match &body {
            Body::Memory(region) if !self.goes_through_ring(known) && self.peer_can_read(endpoints, to) => {
                region.address().map(|address| MemoryAddress::of(address, region.len()))
            }
            _ => None,
        };
        if known.is_asked && address.is_none() {
            endpoints.push_from(to, 0, Header { kind: FrameKind::Data, token, ..header }, body, completion);
            return None;
        }
        let header = Header { kind: FrameKind::Rts, token, address, ..header };
        self.pending_sends.insert(token, PendingSend { to, header, body, completion, copy: None });
        endpoints.send_control(to, header);
        endpoints.expect(to);
        address.is_none().then_some(token)
    }

    /// Whether a message is not to be read: one that lies in the cache of this core alone gets there sooner through the ring.
    fn goes_through_ring(&self, known: Known) -> bool {
        known.is_cache_hot && self.team.is_alone() && !self.oversubscribed
    }

    /// `from` has a buffer of `len` bytes for message `token`, which it can only ask for. False: that is not as long.
    pub(crate) fn ready_arrives(&mut self, endpoints: &mut Endpoints, from: Rank, token: u64, len: u64) -> bool {
        if self.pending_sends.get(&token).is_none_or(|pending| pending.header.len != len) {
            return false;
        }
        let Some(pending) = self.take_pending_send(from, token) else { return false };
        pending.send_data(endpoints, 0);
        true
    }

    /// The messages that wait for their receivers, by token.
    pub(crate) fn pending_sends(&self) -> &FxHashMap<u64, PendingSend> {
        &self.pending_sends
    }

    /// The message `token`, if it waits for its receiver.
    pub(crate) fn pending_send(&mut self, token: u64) -> Option<&mut PendingSend> {
        self.pending_sends.get_mut(&token)
    }

    /// The message `token`, if it is `to` that it waits for.
    fn take_pending_send(&mut self, to: Rank, token: u64) -> Option<PendingSend> {
        let hash_map::Entry::Occupied(entry) = self.pending_sends.entry(token) else { return None };
        (entry.get().to == to).then(|| entry.remove())
    }

    /// Has message `token` continue from its copy instead of its operation's memory. Returns what waited for it.
    pub(crate) fn continue_from_copy(&mut self, endpoints: &mut Endpoints, token: u64) -> Option<Completion> {
        let pending = self.pending_sends.get_mut(&token)?;
        let completion = std::mem::replace(&mut pending.completion, Completion::NONE);
        pending.body = Body::Copied(Box::new(pending.copy.take().unwrap_or_default()));
        invalidate(endpoints, pending);
        Some(completion)
    }

    /// Forgets a message, which `to` does not take.
    pub(crate) fn drop_send(&mut self, to: Rank, token: u64) {
        drop(self.take_pending_send(to, token));
    }

    /// `from` has a buffer for a message of this rank.
    pub(crate) fn rtr_arrives(&mut self, endpoints: &mut Endpoints, from: Rank, rtr: Header) {
        match self.take_pending_send(from, rtr.token) {
            Some(pending) => {
                if rtr.index == RtrReason::CannotRead as u32 {
                    *self.cannot_read.get_mut(from) = true;
                }
                let offset = usize::try_from(rtr.len).unwrap_or(usize::MAX).min(pending.body.len());
                pending.send_data(endpoints, offset);
            }
            // A collective's failure was already sent; a message's sender gave up in the meantime.
            None if rtr.match_space == MatchSpace::PointToPoint => {
                let failed = Failed::Message { token: rtr.token, by: End::Sender };
                endpoints.send_failure(from, failed, GIVEN_UP);
            }
            None => {}
        }
    }

    /// `from` has read message `token` where it lies. Returns what waited for that.
    pub(crate) fn ats_arrives(&mut self, from: Rank, token: u64) -> Option<Completion> {
        self.take_pending_send(from, token).map(|pending| pending.completion)
    }

    /// Drops the messages for which `drops` holds, so that their memory can be used for something else.
    fn drop_pending_sends(&mut self, endpoints: &mut Endpoints, drops: impl Fn(&PendingSend) -> bool) {
        self.pending_sends.retain(|_, pending| {
            let is_dropped = drops(pending);
            if is_dropped {
                invalidate(endpoints, pending);
            }
            !is_dropped
        });
    }

    // ---- the receiver's side ----

    /// Has a buffer for a message whose RTS has come, of an operation that moves so much.
    pub(crate) fn receive(
        &mut self,
        endpoints: &mut Endpoints,
        from: Rank,
        rts: RtsInfo,
        match_space: MatchSpace,
        mut buffer: RecvBuffer,
        operation_bytes: usize,
    ) {
        let address = rts.address.filter(|address| {
            let exchanges = rts.is_busy && match_space == MatchSpace::Collective;
            self.copying(from, *address, (rts.is_busy, exchanges), &mut buffer, operation_bytes) == Copying::Single
        });
        match address {
            Some(address) => self.reads.push(Reading { from, token: rts.token, match_space, address, buffer }),
            None => self.send_rtr(endpoints, from, rts.token, match_space, buffer, RtrReason::Chosen),
        }
    }

    /// How to take a message that could be read at `address`.
    fn copying(
        &mut self,
        from: Rank,
        address: MemoryAddress,
        (is_busy, exchanges): (bool, bool),
        buffer: &mut RecvBuffer,
        operation_bytes: usize,
    ) -> Copying {
        match self.single_copy {
            Switch::On => Copying::Single,
            Switch::Off => Copying::Ring,
            Switch::Auto if address.segment.is_some() => Copying::Single,
            Switch::Auto => {
                let is_busy = is_busy || self.pending_sends.values().any(|pending| pending.to == from);
                let expected = Copying::expected(buffer, is_busy, self.oversubscribed, self.team);
                let is_stored = matches!(buffer.action, RecvAction::Store);
                if exchanges && is_stored && self.team.is_alone() && !self.oversubscribed {
                    return self.choices.choose_in_step(from, buffer, operation_bytes, expected, Instant::now());
                }
                if is_busy {
                    // What the ring takes of the sender's time would show in other messages, not in this one.
                    return expected;
                }
                self.choices.choose(from, buffer, operation_bytes, expected, Instant::now())
            }
        }
    }

    /// A message has come whole.
    pub(crate) fn came(&mut self, from: Rank, buffer: &RecvBuffer) {
        if buffer.timed.is_some() {
            self.choices.came(from, buffer, Instant::now());
        }
    }

    /// What messages of `peer` have cost that could come in two ways.
    pub(crate) fn copy_stats(&self, peer: Rank) -> Vec<CopyStats> {
        self.choices.stats(peer)
    }

    /// Whether to ask `from` for a message of so many bytes before it announces that: it is neither sent eagerly nor read where
    /// it lies.
    pub(crate) fn asks_first(&self, endpoints: &Endpoints, from: Rank, len: usize) -> bool {
        len > self.eager_bytes && endpoints.peer_can_read(from) == Some(false)
    }

    /// Tells the sender of a message that there is a buffer for it.
    fn send_rtr(
        &mut self,
        endpoints: &mut Endpoints,
        from: Rank,
        token: u64,
        match_space: MatchSpace,
        buffer: RecvBuffer,
        why: RtrReason,
    ) {
        let header = Header::control(FrameKind::Rtr, match_space, 0, token, buffer.received as u64);
        self.expect(from, token, buffer);
        endpoints.send_control(from, Header { index: why as u32, ..header });
        endpoints.expect(from);
    }

    /// Has a buffer for the message that `from` will send under `token`.
    pub(crate) fn expect(&mut self, from: Rank, token: u64, buffer: RecvBuffer) {
        self.recv_buffers.insert((from, token), buffer);
    }

    /// The buffer for the next bytes of a message, if it has one.
    pub(crate) fn take_buffer(&mut self, from: Rank, token: u64) -> Option<RecvBuffer> {
        self.recv_buffers.remove(&(from, token))
    }

    /// Whether there are messages to be read.
    pub(crate) fn has_reads(&self) -> bool {
        !self.reads.is_empty()
    }

    /// Whether a message can be read now.
    pub(crate) fn can_read_now(&self, endpoints: &Endpoints) -> bool {
        self.reads.can_read_now(endpoints)
    }

    /// Reads on, a bounded amount. What has been read whole is appended to `done`, with its sender. True: something moved.
    pub(crate) fn progress_reads(&mut self, endpoints: &mut Endpoints, done: &mut Vec<(Rank, Completion)>) -> bool {
        let mut moved = false;
        let mut index = 0;
        while index < self.reads.len() {
            match self.reads.read_on(index, endpoints, self.team) {
                ReadEnd::More => moved = true,
                ReadEnd::Stale => {}
                ReadEnd::Whole(reading) => {
                    moved = true;
                    self.came(reading.from, &reading.buffer);
                    reading.acknowledge(endpoints);
                    done.push((reading.from, reading.buffer.completion));
                }
                ReadEnd::Unreadable(Reading { from, token, match_space, mut buffer, .. }) => {
                    moved = true;
                    buffer.timed = None; // it comes both ways
                    self.send_rtr(endpoints, from, token, match_space, buffer, RtrReason::CannotRead);
                }
            }
            index += 1;
        }
        moved
    }

    /// Message `token` of `from` is no longer where its RTS said. False: nothing reads it yet, so that its RTS, if there
    /// is one, has to forget the address.
    pub(crate) fn invalidation_arrives(&mut self, endpoints: &mut Endpoints, from: Rank, token: u64) -> bool {
        let Some(reading) = self.reads.invalidated(from, token) else { return false };
        let Reading { match_space, mut buffer, .. } = reading;
        buffer.timed = None; // it comes both ways
        self.send_rtr(endpoints, from, token, match_space, buffer, RtrReason::Chosen);
        true
    }

    // ---- one operation ----

    /// The operation of transfer `token` with `peer`, which is the given end of it.
    pub(crate) fn op_of_token(&self, peer: Rank, token: u64, end: End) -> Option<OpId> {
        let completion = match end {
            End::Receiver => self.pending_sends.get(&token).filter(|sent| sent.to == peer).map(|sent| sent.completion),
            End::Sender => {
                let asked = self.recv_buffers.get(&(peer, token)).map(|buffer| buffer.completion);
                asked.or_else(|| self.reads.completion(peer, token))
            }
        };
        completion.map(|completion| completion.op)
    }

    /// Drops everything of `op`: nothing refers to its memory afterwards. `unsent` is told of each message of which its peer
    /// never hears.
    pub(crate) fn cancel(&mut self, endpoints: &mut Endpoints, op: OpId, unsent: impl FnMut(Rank, Header)) {
        self.drop_pending_sends(endpoints, |pending| pending.completion.op == op);
        self.reads.cancel(endpoints, op);
        self.recv_buffers.retain(|_, buffer| buffer.completion.op != op);
        if let OpId::Collective(_) = op {
            self.choices.count_anew();
        }
        endpoints.cancel(op, unsent);
    }

    /// Whether `op` waits for `peer` to take or to bring a message that both know of.
    pub(crate) fn exchanges(&self, endpoints: &Endpoints, op: OpId, peer: Rank) -> bool {
        endpoints.exchanges(op, peer)
            || self.pending_sends.values().any(|pending| pending.to == peer && pending.completion.op == op)
            || self.recv_buffers.iter().any(|((from, _), buffer)| *from == peer && buffer.completion.op == op)
            || self.reads.serves(op, peer)
    }

    // ---- ends ----

    /// Drops what is for or from `peer`, which is lost.
    pub(crate) fn lose(&mut self, endpoints: &mut Endpoints, peer: Rank) {
        self.drop_pending_sends(endpoints, |pending| pending.to == peer);
        self.reads.lose(peer);
        self.choices.lose(peer);
        self.recv_buffers.retain(|(from, _), _| *from != peer);
    }

    /// Drops everything.
    pub(crate) fn clear(&mut self, endpoints: &mut Endpoints) {
        self.drop_pending_sends(endpoints, |_| true);
        self.recv_buffers.clear();
        self.reads.clear();
    }
}

/// Takes back the address of a message, if its RTS has named one.
fn invalidate(endpoints: &mut Endpoints, pending: &mut PendingSend) {
    if pending.header.address.take().is_some() {
        endpoints.mark_reads_stale(pending.to);
        let (match_space, token) = (pending.header.match_space, pending.header.token);
        endpoints.send_control(pending.to, Header::control(FrameKind::Invalidated, match_space, 0, token, 0));
    }
}

/// The results of collectives up to so long are not worth being asked for.
pub(crate) const HOT_EAGER_BYTES: usize = 512 * 1024;

/// How many times as long a cache-hot message may be before it is read where it lies.
const HOT_FACTOR: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::mock_peer::Harness;
    use crate::engine::region::{Region, Words};

    #[test]
    fn after_a_collective_that_has_failed_ranks_count_anew() {
        let (mut harness, mut words) = (Harness::new(), Words::new(vec![0; 4]));
        let (op, ctx) = (OpId::Collective(1), &mut harness.engine.context);
        let mut buffer = RecvBuffer::new(Region::of(&[words.buffer()]), RecvAction::Store, Completion { op, step: 0 });
        ctx.rndv.choices.choose_in_step(Rank(1), &mut buffer, 1 << 20, Copying::Single, Instant::now());
        for (failed, known) in [(OpId::Message(1), 1), (op, 0)] {
            ctx.cancel(failed, |_, _| ());
            assert_eq!(ctx.rndv.copy_stats(Rank(1)).len(), known, "{failed:?}");
        }
    }
}
