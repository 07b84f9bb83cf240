//! What collectives on devices send to other hosts and receive from there.
//!
//! A stream copies a message into pinned memory and counts it in a word; the relay sends it and counts in another word, for
//! which the stream waits before it uses the memory again. The other way, the relay receives into pinned memory once the stream
//! is done with what lay there, and counts; the stream waits for that. Both ends count the messages in the order of the
//! schedules, so no call of the driver is needed here, and none is made.

use std::collections::VecDeque;
use std::time::Instant;

use rustc_hash::FxHashMap;

use crate::device::control::{Control, Failure, FailureKind, LIBRARY_GIVEN_UP};
use crate::device::network::{Ledger, NetworkMemory, Parcel, Traffic};
use crate::device::other_hosts::Missing;
use crate::engine::body::Body;
use crate::engine::completion::{Completion, OpId};
use crate::engine::context::{OpContext, next_look};
use crate::engine::failures::Suspect;
use crate::engine::frame::{Failed, FrameKind, Header, MatchSpace, RtsInfo};
use crate::engine::per_rank::PerRank;
use crate::engine::recv_buffer::{RecvAction, RecvBuffer, Sink};
use crate::engine::region::Region;
use crate::op::CollectiveKind;
use crate::signature::Signature;
use crate::sync::Arc;
use crate::types::Rank;

/// This rank's end of the way to other hosts.
pub(crate) struct Pier {
    pub(crate) control: Arc<Control>,
    /// The lane in whose words streams count.
    pub(crate) lane: usize,
    pub(crate) memory: Arc<NetworkMemory>,
}

/// The rank that has told of a failure, and the failure.
type Reported = (Rank, Failure);

struct Message {
    peer: Rank,
    /// The operation, and the message's index: twice its number among those between the two ranks in this direction that are not
    /// sent in leads, or one more than twice that among those that are. Of these two kinds each comes in the same order at both
    /// ends, and not both together.
    sequence: u64,
    index: u32,
    signature: Signature,
    /// Where it lies.
    half: usize,
    offset: usize,
    bytes: usize,
    /// Of an inbound message: how many the stream must be done with before it.
    taken: u64,
    is_done: bool,
}

/// Messages of one direction, in the order in which the stream counts them.
struct Queue {
    /// The number of the first one.
    first: u64,
    messages: VecDeque<Message>,
    /// How many of the messages have begun.
    begun: usize,
}

impl Queue {
    fn new() -> Queue {
        Queue { first: 1, messages: VecDeque::new(), begun: 0 }
    }

    /// The next one to begin, and its number.
    fn next(&self) -> Option<(u64, &Message)> {
        Some((self.first + self.begun as u64, self.messages.get(self.begun)?))
    }

    fn get(&self, number: u64) -> Option<&Message> {
        self.messages.get(usize::try_from(number.checked_sub(self.first)?).ok()?)
    }

    /// Notes that a message is done. Returns the number up to which all are done, if it has grown.
    fn done(&mut self, number: u64) -> Option<u64> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.messages.get_mut(index)?.is_done = true;
        let before = self.first;
        while self.messages.front().is_some_and(|message| message.is_done) {
            self.messages.pop_front();
            self.first += 1;
            self.begun -= 1;
        }
        (self.first > before).then_some(self.first - 1)
    }

    /// Drops the messages of this operation and of later ones. Returns the numbers of those that had begun.
    fn drop_from(&mut self, sequence: u64) -> Vec<u64> {
        let kept = self.messages.partition_point(|message| message.sequence < sequence);
        let begun = (kept..self.begun).map(|index| self.first + index as u64).collect();
        self.messages.truncate(kept);
        self.begun = self.begun.min(kept);
        begun
    }
}

/// A message that came before its receive.
enum Unexpected {
    Whole(Vec<u8>),
    Rts(RtsInfo),
}

/// What this rank has called.
struct Call {
    sequence: u64,
    signature: Signature,
    /// Of an all_to_all, the bytes of the blocks that it sends to ranks of other hosts.
    blocks: FxHashMap<Rank, u64>,
}

/// By other end, and by whether they are sent in leads, how many messages there are.
type Counts = FxHashMap<(Rank, bool), u32>;

/// A message's place among all: sender, operation, position between the two ranks.
type Key = (Rank, u64, u32);

/// The messages of one communicator's device to and from other hosts.
pub(crate) struct Relay {
    pier: Option<Pier>,
    /// Added to an operation's number on the wire. It grows when ranks begin anew.
    base: u64,
    ledger: Ledger,
    outbound: Queue,
    inbound: Queue,
    /// Receives that have begun and wait for their message: their numbers.
    posted: FxHashMap<Key, u64>,
    unexpected: FxHashMap<Key, (Signature, Unexpected)>,
    /// The last calls of this rank.
    calls: VecDeque<Call>,
    /// By rank, the last operation that it is known to have called.
    heard: PerRank<u64>,
    /// The last operation for which the relay listens to other ranks, and the last that has ended.
    listening: u64,
    over: u64,
    failure: Option<Reported>,
    library_given_up_by: Option<Rank>,
    /// A rank that cannot be reached, why, and since when that is known.
    suspect: Option<Suspect>,
    /// When something moved last.
    moved: Instant,
}

impl Relay {
    pub(crate) fn new(size: usize) -> Relay {
        Relay {
            pier: None,
            base: 0,
            ledger: Ledger::default(),
            outbound: Queue::new(),
            inbound: Queue::new(),
            posted: FxHashMap::default(),
            unexpected: FxHashMap::default(),
            calls: VecDeque::new(),
            heard: PerRank::new(size),
            listening: 0,
            over: 0,
            failure: None,
            library_given_up_by: None,
            suspect: None,
            moved: Instant::now(),
        }
    }

    /// Begins, once the ranks have set up.
    pub(crate) fn open(&mut self, pier: Pier) {
        self.pier = Some(pier);
    }

    /// Whether nothing is to go or to come.
    pub(crate) fn is_idle(&self) -> bool {
        self.outbound.messages.is_empty() && self.inbound.messages.is_empty()
    }

    /// Whether the relay listens to other ranks for an operation that exchanges nothing here.
    pub(crate) fn is_listening(&self) -> bool {
        self.listening > self.over
    }

    /// Listens to other ranks until the operation of this number has ended.
    pub(crate) fn listen(&mut self, number: u64) {
        self.listening = self.listening.max(self.base + number);
    }

    /// The operations up to this number have ended.
    pub(crate) fn ended(&mut self, number: u64) {
        self.over = self.over.max(self.base + number);
    }

    /// When to look at the stream's words again.
    pub(crate) fn next_look(&self) -> Option<Instant> {
        let waits = self.outbound.next().is_some() || self.inbound.next().is_some();
        waits.then(|| next_look(Some(self.moved)))
    }

    // ---- steps ----

    /// Takes up an operation on the device: what its programs send and receive.
    pub(crate) fn submit<'a>(
        &mut self,
        ctx: &mut OpContext,
        number: u64,
        signature: Signature,
        all: impl Iterator<Item = &'a Traffic>,
    ) {
        let sequence = self.base + number;
        let (mut sent, mut received): (Counts, Counts) = Default::default();
        let is_sound = self.is_sound(sequence);
        let (before, tells_sizes) = (self.outbound.messages.len(), tells_sizes(&signature));
        let signature = if tells_sizes { Signature { count: 0, ..signature } } else { signature };
        let (mut blocks, mut expected): (FxHashMap<Rank, u64>, FxHashMap<Rank, u64>) = Default::default();
        for traffic in all {
            let turn = self.ledger.take_up(traffic);
            if tells_sizes {
                count_bytes(&traffic.outbound, &mut blocks);
                count_bytes(&traffic.inbound, &mut expected);
            }
            if !is_sound {
                continue;
            }
            let message = |parcel: &Parcel, counts: &mut Counts, taken| {
                let Parcel { peer, offset, bytes, is_led } = *parcel;
                let count = counts.entry((peer, is_led)).or_default();
                let index = 2 * *count + u32::from(is_led);
                *count += 1;
                Message { peer, sequence, index, signature, half: turn.half, offset, bytes, taken, is_done: false }
            };
            self.outbound.messages.extend(traffic.outbound.iter().map(|parcel| message(parcel, &mut sent, 0)));
            let inbound = traffic.inbound.iter().map(|parcel| message(parcel, &mut received, turn.taken));
            self.inbound.messages.extend(inbound);
        }
        if tells_sizes {
            for message in self.outbound.messages.range_mut(before..) {
                message.signature.count = expected.get(&message.peer).copied().unwrap_or(0);
            }
        }
        self.calls.push_back(Call { sequence, signature, blocks });
        if self.calls.len() > CALLS {
            self.calls.pop_front();
        }
        self.moved = Instant::now();
        let early = self.unexpected.iter().filter(|((_, key, _), _)| *key == sequence);
        let early: Vec<(Rank, Signature)> = early.map(|((from, ..), (signature, _))| (*from, *signature)).collect();
        for (from, theirs) in early {
            self.agrees(ctx, from, (sequence, 0), theirs);
        }
        self.progress(ctx);
    }

    /// Sends and receives what the stream is ready for. True: something moved.
    pub(crate) fn progress(&mut self, ctx: &mut OpContext) -> bool {
        let mut moved = false;
        while self.can_send() {
            moved = true;
            self.send_next(ctx);
        }
        while self.can_receive() {
            moved = true;
            self.receive_next(ctx);
        }
        if moved {
            self.moved = Instant::now();
        }
        moved
    }

    fn can_send(&self) -> bool {
        let (Some((number, message)), Some(Pier { control, lane, .. })) = (self.outbound.next(), &self.pier) else {
            return false;
        };
        // A rank of this host tells of a failure before its stream writes anything wrong, and so before any stream can have
        // counted a message that is wrong because of it.
        control.is_outbound_ready(*lane, number) && control.first_failure(*lane, message.sequence - self.base).is_none()
    }

    fn can_receive(&self) -> bool {
        let (Some((_, message)), Some(Pier { control, lane, .. })) = (self.inbound.next(), &self.pier) else {
            return false;
        };
        control.is_inbound_taken(*lane, message.taken)
    }

    fn send_next(&mut self, ctx: &mut OpContext) {
        let (Some((number, message)), Some(pier)) = (self.outbound.next(), &self.pier) else { return };
        let region = Region::outbound(&pier.memory, message.half).part(message.offset, message.bytes);
        let control = Header::control(FrameKind::Eager, MatchSpace::Device, message.sequence, 0, message.bytes as u64);
        let header = Header { signature: message.signature, index: message.index, ..control };
        let to = message.peer;
        self.outbound.begun += 1;
        let completion = Completion { op: OpId::Outbound(number), step: 0 };
        let eager = ctx.rndv.is_eager(&mut ctx.endpoints, to, region.len(), false);
        if ctx.rndv.send_message(&mut ctx.endpoints, to, header, Body::of(region), completion, eager) {
            self.sent(number);
        }
        if let Some(cause) = ctx.lost(to) {
            self.suspect(to, cause);
        }
    }

    fn receive_next(&mut self, ctx: &mut OpContext) {
        let Some((number, message)) = self.inbound.next() else { return };
        let key = (message.peer, message.sequence, message.index);
        let from = message.peer;
        self.inbound.begun += 1;
        // What a lost rank has only announced does not come.
        let comes = |early: &Unexpected| matches!(early, Unexpected::Whole(_)) || ctx.endpoints.lost(from).is_none();
        let early = self.unexpected.remove(&key).filter(|(_, early)| comes(early));
        match early {
            Some((_, Unexpected::Whole(bytes))) => {
                if let Some(mut buffer) = self.buffer(ctx, number, from, bytes.len() as u64) {
                    buffer.take(&bytes);
                    self.received(number);
                }
            }
            Some((_, Unexpected::Rts(rts))) => {
                if let Some(buffer) = self.buffer(ctx, number, from, rts.len) {
                    ctx.receive(from, rts, MatchSpace::Device, buffer);
                }
            }
            None => {
                self.posted.insert(key, number);
                ctx.endpoints.expect(from);
                if let Some(cause) = ctx.lost(from) {
                    self.suspect(from, cause);
                }
            }
        }
    }

    /// The buffer of message `number`, if its length is the one that arrives; else the operation fails.
    fn buffer(&mut self, ctx: &mut OpContext, number: u64, from: Rank, len: u64) -> Option<RecvBuffer> {
        let (message, pier) = (self.inbound.get(number)?, self.pier.as_ref()?);
        let expected = message.bytes;
        if expected as u64 != len {
            let (sequence, me) = (message.sequence, ctx.me);
            let text = format!(
                "the ranks disagree on the sizes of device collective {}: rank {me} expected {expected} bytes from rank {from}, \
                 which sent {len}",
                sequence - self.base
            );
            self.disagree(ctx, sequence, from, text);
            return None;
        }
        let region = Region::inbound(&pier.memory, message.half).part(message.offset, expected);
        let completion = Completion { op: OpId::Inbound(number), step: 0 };
        Some(RecvBuffer::new(region, RecvAction::Store, completion))
    }

    /// The message of this number has been sent.
    pub(crate) fn sent(&mut self, number: u64) {
        if let (Some(last), Some(pier)) = (self.outbound.done(number), &self.pier) {
            pier.control.tell_sent(pier.lane, last);
        }
    }

    /// The message of this number has come.
    pub(crate) fn received(&mut self, number: u64) {
        if let (Some(last), Some(pier)) = (self.inbound.done(number), &self.pier) {
            pier.control.tell_received(pier.lane, last);
        }
    }

    // ---- arrivals ----

    /// The receive that waits for the message of `header`; an error if no receive ever will.
    fn wanted(&mut self, ctx: &mut OpContext, from: Rank, header: Header) -> Result<Option<u64>, Stale> {
        let sequence = header.key;
        if sequence < self.base {
            return Err(Stale);
        }
        let heard = self.heard.get_mut(from);
        *heard = sequence.max(*heard);
        if !self.agrees(ctx, from, (sequence, header.index), header.signature)
            || header.index == HERE
            || !self.is_sound(sequence)
        {
            return Err(Stale);
        }
        Ok(self.posted.remove(&(from, sequence, header.index)))
    }

    pub(crate) fn arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) -> Sink {
        match self.wanted(ctx, from, header) {
            Err(Stale) => Sink::Discard,
            Ok(None) => Sink::Heap(Vec::new()),
            Ok(Some(number)) => self.buffer(ctx, number, from, header.len).map_or(Sink::Discard, Sink::Buffer),
        }
    }

    /// A message that no receive waited for when its header came is complete.
    pub(crate) fn unexpected_complete(&mut self, ctx: &mut OpContext, from: Rank, header: Header, bytes: Vec<u8>) {
        match self.wanted(ctx, from, header) {
            Err(Stale) => {}
            Ok(None) => self.keep(from, header, Unexpected::Whole(bytes)),
            Ok(Some(number)) => {
                if let Some(mut buffer) = self.buffer(ctx, number, from, header.len) {
                    buffer.take(&bytes);
                    self.received(number);
                }
            }
        }
    }

    pub(crate) fn rts_arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) {
        match self.wanted(ctx, from, header) {
            Err(Stale) => {}
            Ok(None) => self.keep(from, header, Unexpected::Rts(header.rts())),
            Ok(Some(number)) => {
                if let Some(buffer) = self.buffer(ctx, number, from, header.len) {
                    ctx.receive(from, header.rts(), MatchSpace::Device, buffer);
                }
            }
        }
    }

    fn keep(&mut self, from: Rank, header: Header, what: Unexpected) {
        self.unexpected.insert((from, header.key, header.index), (header.signature, what));
    }

    /// Invalidates the address of message `token` of `from`, which must be asked for.
    pub(crate) fn clear_address(&mut self, from: Rank, token: u64) {
        for ((sender, ..), (_, unexpected)) in &mut self.unexpected {
            if let Unexpected::Rts(rts) = unexpected
                && (*sender, rts.token) == (from, token)
            {
                rts.address = None;
            }
        }
    }

    /// Another rank has given up an operation and all later ones.
    pub(crate) fn failed_elsewhere(&mut self, ctx: &mut OpContext, from: Rank, header: Header, text: String) {
        let Some(number) = header.key.checked_sub(self.base) else { return };
        if header.index == LIBRARY_GIVEN_UP {
            self.library_given_up_by.get_or_insert(from);
            return;
        }
        let rank = header.culprit(ctx.size()).unwrap_or(from);
        let kind = FailureKind::numbered(header.index);
        let lane = self.pier.as_ref().map_or(0, |pier| pier.lane);
        self.fail_from(ctx, (from, Failure { lane, number, kind, rank, text }));
    }

    /// Tells all other ranks that this one has given up the library that runs operations.
    pub(crate) fn give_up_library(&mut self, ctx: &mut OpContext) {
        let failed = Failed::Device { sequence: self.base, kind: LIBRARY_GIVEN_UP, culprit: ctx.me };
        self.tell(ctx, failed, "", true);
    }

    /// A rank that has told so, if one has.
    pub(crate) fn library_given_up_by(&self) -> Option<Rank> {
        self.library_given_up_by
    }

    /// Tells all other ranks of a failure, or those to which there is a stream.
    fn tell(&self, ctx: &mut OpContext, failed: Failed, text: &str, only_connected: bool) {
        if ctx.closed.is_some() {
            return;
        }
        let tells = |peer: &Rank| !only_connected || ctx.endpoints.is_connected(*peer);
        for peer in ctx.endpoints.others().into_iter().filter(tells).collect::<Vec<_>>() {
            ctx.endpoints.send_failure(peer, failed, text);
        }
    }

    // ---- ends ----

    /// Whether no failure is known of this operation, or of one before it.
    fn is_sound(&self, sequence: u64) -> bool {
        self.failure.as_ref().is_none_or(|(_, failure)| self.base + failure.number > sequence)
    }

    /// Compares another rank's call with this rank's, if this rank has made it. False: they differ.
    fn agrees(&mut self, ctx: &mut OpContext, from: Rank, (sequence, index): (u64, u32), theirs: Signature) -> bool {
        let Some(call) = self.calls.iter().rev().find(|call| call.sequence == sequence) else { return true };
        let (ours, number) = (call.signature, sequence - self.base);
        let theirs_without = if tells_sizes(&theirs) { Signature { count: 0, ..theirs } } else { theirs };
        let text = if ours != theirs_without {
            ours.disagreement(number, ctx.me, from, &theirs_without)
        } else if tells_sizes(&ours)
            && index != HERE
            && let sent = call.blocks.get(&from).copied().unwrap_or(0)
            && sent != theirs.count
        {
            let (me, expected) = (ctx.me, theirs.count);
            format!(
                "the ranks disagree on the sizes of device collective {number}: rank {me} sends {sent} bytes to rank {from}, \
                 which expects {expected}"
            )
        } else {
            return true;
        };
        self.disagree(ctx, sequence, from, text);
        false
    }

    fn disagree(&mut self, ctx: &mut OpContext, sequence: u64, with: Rank, text: String) {
        let (number, lane) = (sequence - self.base, self.pier.as_ref().map_or(0, |pier| pier.lane));
        let failure = Failure { lane, number, kind: FailureKind::Mismatch, rank: with, text };
        self.fail(ctx, failure);
    }

    /// Gives up the operation of this number and all later ones, and tells all other ranks.
    pub(crate) fn fail(&mut self, ctx: &mut OpContext, failure: Failure) {
        let sequence = self.base + failure.number;
        if !self.is_sound(sequence) {
            return;
        }
        let failed = Failed::Device { sequence, kind: failure.kind as u32, culprit: failure.rank };
        // A rank that leaves opens no streams to tell.
        self.tell(ctx, failed, &failure.text, failure.kind == FailureKind::Left);
        self.fail_from(ctx, (ctx.me, failure));
    }

    /// As [`fail`](Relay::fail), when the other ranks know.
    pub(crate) fn fail_from(&mut self, ctx: &mut OpContext, reported: Reported) {
        let sequence = self.base + reported.1.number;
        if self.is_sound(sequence) {
            self.failure = Some(reported);
            self.drop_from(ctx, sequence);
        }
    }

    /// Drops the messages of this operation and of later ones: nothing of the engine refers to their memory afterwards.
    fn drop_from(&mut self, ctx: &mut OpContext, sequence: u64) {
        for number in self.outbound.drop_from(sequence) {
            ctx.cancel(OpId::Outbound(number), |_, _| ());
        }
        for number in self.inbound.drop_from(sequence) {
            ctx.cancel(OpId::Inbound(number), |_, _| ());
        }
        self.posted.retain(|(_, key, _), _| *key < sequence);
        self.unexpected.retain(|(_, key, _), _| *key < sequence);
    }

    /// Whether the messages of operations before a failure have been sent, so that the stream may use their memory. If there is
    /// no time for that, gives these operations up too.
    pub(crate) fn settle(&mut self, ctx: &mut OpContext, has_time: bool) -> bool {
        let Some(first) = self.outbound.messages.front() else { return true };
        if !has_time {
            let number = first.sequence - self.base;
            let lane = self.pier.as_ref().map_or(0, |pier| pier.lane);
            let (kind, rank) = (FailureKind::Left, ctx.me);
            let text = match &self.failure {
                Some((_, later)) => later.text.clone(),
                None => "it gave up what it had not sent".to_owned(),
            };
            self.fail(ctx, Failure { lane, number, kind, rank, text });
        }
        self.outbound.messages.is_empty()
    }

    /// The failure that is known, if one is.
    pub(crate) fn failure(&mut self, ctx: &mut OpContext, now: Instant) -> Option<Reported> {
        if let Some((rank, text)) = self.suspect.as_ref().and_then(|suspect| ctx.blame(suspect, now)) {
            self.suspect = None;
            let ends = self.outbound.messages.front().into_iter().chain(self.inbound.messages.front());
            if let Some(sequence) = ends.map(|message| message.sequence).min() {
                let (number, lane) = (sequence - self.base, self.pier.as_ref().map_or(0, |pier| pier.lane));
                self.fail(ctx, Failure { lane, number, kind: FailureKind::PeerLost, rank, text });
            }
        }
        self.failure.clone()
    }

    /// Notes that a rank is gone without which something cannot end. The engine hears why soon; another rank may be the cause.
    fn suspect(&mut self, rank: Rank, cause: String) {
        self.suspect.get_or_insert_with(|| Suspect::new(rank, cause));
    }

    /// Suspects `peer`, which is gone, if something waits for it.
    pub(crate) fn lose(&mut self, ctx: &OpContext, peer: Rank, cause: &str) {
        let (sent, received) = (self.outbound.messages.iter(), self.inbound.messages.iter());
        let mut begun = sent.take(self.outbound.begun).chain(received.take(self.inbound.begun));
        if ctx.closed.is_none() && begun.any(|message| message.peer == peer && !message.is_done) {
            self.suspect(peer, cause.to_owned());
        }
    }

    /// Ranks of other hosts that may keep an operation from its end.
    pub(crate) fn missing(&self, ctx: &OpContext, number: u64) -> Missing {
        let sequence = self.base + number;
        let (called, unheard): (Vec<Rank>, Vec<Rank>) = others(ctx).partition(|rank| self.heard.get(*rank) >= sequence);
        let waits = self.inbound.messages.iter().filter(|message| !message.is_done && message.sequence <= sequence);
        let mut slow: Vec<Rank> = waits.map(|message| message.peer).collect();
        slow.sort_unstable();
        slow.dedup();
        slow.retain(|rank| self.heard.get(*rank) >= sequence);
        Missing { unheard, called, slow }
    }

    /// Tells the ranks of other hosts that this one waits in an operation.
    pub(crate) fn tell_of_wait(&mut self, ctx: &mut OpContext, number: u64, signature: Signature) {
        let control = Header::control(FrameKind::Eager, MatchSpace::Device, self.base + number, 0, 0);
        for peer in others(ctx).collect::<Vec<_>>() {
            ctx.endpoints.send_control(peer, Header { signature, index: HERE, ..control });
        }
    }

    /// Begins anew after a disagreement. Nothing is on any rank's stream.
    pub(crate) fn reset(&mut self, ctx: &mut OpContext) {
        self.drop_from(ctx, self.base);
        let base = self.base + EPOCH;
        let pier = self.pier.take();
        *self = Relay { pier, base, ..Relay::new(self.heard.size()) };
    }

    /// Drops everything, for good.
    pub(crate) fn end(&mut self, ctx: &mut OpContext) {
        self.drop_from(ctx, 0);
        self.over = u64::MAX;
    }

    /// Gives the memory back, after the [end](Relay::end).
    pub(crate) fn close(&mut self) {
        self.pier = None;
    }
}

/// Whether every message of this operation tells how many bytes its sender expects from the receiver, in place of a number of
/// elements that all ranks have.
fn tells_sizes(signature: &Signature) -> bool {
    CollectiveKind::numbered(signature.operation) == Some(CollectiveKind::AllToAll)
}

/// Adds the bytes of messages up, by their other ends.
fn count_bytes(parcels: &[Parcel], bytes: &mut FxHashMap<Rank, u64>) {
    for parcel in parcels {
        *bytes.entry(parcel.peer).or_default() += parcel.bytes as u64;
    }
}

/// The ranks of other hosts.
fn others(ctx: &OpContext) -> impl Iterator<Item = Rank> + '_ {
    (0..ctx.size()).map(Rank::from).filter(|rank| !ctx.topo.same_host(ctx.me, *rank))
}

/// No receive waits for the message.
struct Stale;

/// The index of a message that only tells that its sender waits.
const HERE: u32 = u32::MAX;

/// How many operations there can be before ranks begin anew.
const EPOCH: u64 = 1 << 40;

/// How many calls are kept to be compared: more than can be under way.
const CALLS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::mock_peer::Harness;

    fn message(sequence: u64) -> Message {
        let signature = Signature::default();
        Message { peer: Rank(1), sequence, index: 0, signature, half: 0, offset: 0, bytes: 0, taken: 0, is_done: false }
    }

    #[test]
    fn messages_that_end_in_any_order_are_counted_in_theirs() {
        let mut queue = Queue::new();
        queue.messages.extend([1, 1, 2, 3].map(message));
        queue.begun = 3;
        assert_eq!((queue.done(2), queue.done(1)), (None, Some(2)));
        assert_eq!(queue.next().map(|(number, message)| (number, message.sequence)), Some((4, 3)));
        assert_eq!((queue.drop_from(2), queue.messages.len(), queue.begun), (vec![3], 0, 0));
        assert_eq!(queue.done(3), None, "it is not expected any more");
    }

    fn call(count: u64) -> Signature {
        Signature { operation: 1, count, ..Signature::default() }
    }

    fn submit(harness: &mut Harness, number: u64, signature: Signature) {
        let engine = &mut harness.engine;
        engine.relay.submit(&mut engine.context, number, signature, [].into_iter());
    }

    fn failure(harness: &mut Harness) -> Option<Reported> {
        let engine = &mut harness.engine;
        engine.relay.failure(&mut engine.context, Instant::now())
    }

    fn here(number: u64, signature: Signature) -> Vec<u8> {
        let control = Header::control(FrameKind::Eager, MatchSpace::Device, number, 0, 0);
        Header { signature, index: HERE, ..control }.encode().to_vec()
    }

    #[test]
    fn whoever_calls_something_else_is_found_by_what_it_tells() {
        for is_early in [false, true] {
            let mut harness = Harness::new();
            submit(&mut harness, 1, call(5));
            harness.send(&here(1, call(5)));
            assert!(failure(&mut harness).is_none());
            let other = Header { index: 0, ..Header::decode(&here(2, call(7))).expect("a header").expect("whole") };
            if is_early {
                harness.send(&other.encode());
                submit(&mut harness, 2, call(6));
            } else {
                submit(&mut harness, 2, call(6));
                harness.send(&other.encode());
            }
            let (reporter, failure) = failure(&mut harness).expect("they differ");
            assert_eq!((reporter, failure.number, failure.kind), (Rank(0), 2, FailureKind::Mismatch));
            assert!(failure.text.contains("rank 1 called"), "{}", failure.text);
            let told = Header::decode(&harness.wire().from_engine).expect("a header").expect("a whole one");
            assert_eq!((told.kind, told.match_space, told.key), (FrameKind::Fail, MatchSpace::Device, 2));
        }
    }

    #[test]
    fn what_another_rank_gives_up_is_given_up_until_ranks_begin_anew() {
        let mut harness = Harness::new();
        let told = |sequence: u64, kind: u32, text: &str| {
            let failed = Failed::Device { sequence, kind, culprit: Rank(1) };
            [&*failed.header(text.len()).encode(), text.as_bytes()].concat()
        };
        let gives_up = |sequence| told(sequence, FailureKind::Timeout as u32, "late");
        let gives_library_up = || told(0, LIBRARY_GIVEN_UP, "");
        harness.send(&gives_library_up());
        assert_eq!(harness.engine.relay.library_given_up_by(), Some(Rank(1)));
        assert!(failure(&mut harness).is_none(), "no operation has failed for that");
        harness.send(&gives_up(3));
        let first = failure(&mut harness).expect("it was told");
        assert_eq!((first.0, first.1.number, first.1.kind), (Rank(1), 3, FailureKind::Timeout));
        assert_eq!(first.1.text, "late");
        let engine = &mut harness.engine;
        engine.relay.reset(&mut engine.context);
        assert_eq!(engine.relay.library_given_up_by(), None);
        harness.send(&gives_up(4));
        harness.send(&gives_library_up());
        assert!(failure(&mut harness).is_none(), "that is of before");
        assert_eq!(harness.engine.relay.library_given_up_by(), None);
    }
}
