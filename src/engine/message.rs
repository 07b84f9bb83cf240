//! Point-to-point messages: matched by sender and tag in the order issued, beside the collectives.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::engine::body::Body;
use crate::engine::call::Call;
use crate::engine::completion::{Completion, OpId};
use crate::engine::context::OpContext;
use crate::engine::flight_recorder::Bytes;
use crate::engine::frame::{End, Failed, FrameKind, Header, MatchSpace, RtsInfo};
use crate::engine::per_rank::PerRank;
use crate::engine::recv_buffer::{RecvAction, RecvBuffer, Sink};
use crate::engine::region::Region;
use crate::error::Error;
use crate::types::{Rank, Source, Tag};
use crate::work::Work;

/// Which way a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Send(Rank),
    Receive(Source),
}

impl Direction {
    /// The operation that moves so many bytes.
    pub(crate) fn call(self, tag: Tag, bytes: usize) -> Call {
        match self {
            Direction::Send(to) => Call::Send { bytes, to, tag },
            Direction::Receive(from) => Call::Recv { bytes, from, tag },
        }
    }

    /// What moving so many bytes reads and writes.
    pub(crate) fn bytes(self, bytes: usize) -> Bytes {
        match self {
            Direction::Send(_) => Bytes { read: bytes, written: 0 },
            Direction::Receive(_) => Bytes { read: 0, written: bytes },
        }
    }
}

/// A message operation as it is submitted.
pub(crate) struct MessageRequest {
    pub(crate) direction: Direction,
    pub(crate) tag: Tag,
    pub(crate) region: Region,
    pub(crate) timeout: Duration,
}

/// An operation in flight.
struct InFlight {
    call: Call,
    direction: Direction,
    since: Instant,
    deadline: Option<Instant>,
    work: Work,
}

/// A receive that waits for its message.
struct Posted {
    id: u64,
    from: Source,
    tag: Tag,
    region: Region,
}

/// A message that came before its receive.
struct Unexpected {
    from: Rank,
    tag: Tag,
    content: Content,
}

enum Content {
    Whole(Vec<u8>),
    Rts(RtsInfo),
}

/// Credits for eager messages between this rank and a peer, in bytes.
#[derive(Clone, Copy, Default)]
struct Credits {
    /// What the peer may still keep unread of this rank's messages.
    used: u64,
    /// What was taken of the peer's messages since it was told.
    owed: u64,
}

/// The point-to-point operations of one communicator.
pub(crate) struct Messages {
    next: u64,
    in_flight: FxHashMap<u64, InFlight>,
    posted: Vec<Posted>,
    unexpected: VecDeque<Unexpected>,
    /// By peer.
    credits: PerRank<Credits>,
}

impl Messages {
    /// Of a communicator of so many ranks.
    pub(crate) fn new(size: usize) -> Messages {
        Messages {
            next: 0,
            in_flight: FxHashMap::default(),
            posted: Vec::new(),
            unexpected: VecDeque::new(),
            credits: PerRank::new(size),
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Whether no message waits to be received.
    pub(crate) fn has_no_unexpected(&self) -> bool {
        self.unexpected.is_empty()
    }

    /// Counts an operation that ended before it was submitted.
    pub(crate) fn skip(&mut self) {
        self.next += 1;
    }

    /// The id that the next operation gets.
    pub(crate) fn next_id(&self) -> u64 {
        self.next
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.in_flight.values().filter_map(|op| op.deadline).min()
    }

    /// When an operation in flight began.
    pub(crate) fn since(&self, id: u64) -> Option<Instant> {
        self.in_flight.get(&id).map(|op| op.since)
    }

    /// The ranks that wait for this one to receive a long message, and how long that is.
    pub(crate) fn waiting_senders(&self) -> impl Iterator<Item = (Rank, u64)> {
        self.unexpected.iter().filter_map(|unexpected| match &unexpected.content {
            Content::Rts(rts) => Some((unexpected.from, rts.len)),
            Content::Whole(_) => None,
        })
    }

    /// Message `token` of `from` must be asked for.
    pub(crate) fn clear_address(&mut self, from: Rank, token: u64) {
        for unexpected in self.unexpected.iter_mut().filter(|unexpected| unexpected.from == from) {
            if let Content::Rts(rts) = &mut unexpected.content
                && rts.token == token
            {
                rts.address = None;
            }
        }
    }

    // ---- starts ----

    /// Starts a message operation.
    pub(crate) fn submit(&mut self, ctx: &mut OpContext, request: MessageRequest, work: Work) {
        let id = self.keep(&request, work);
        let MessageRequest { direction, tag, region, .. } = request;
        match direction {
            Direction::Send(to) if to == ctx.me => self.send_to_self(ctx, id, tag, &region),
            Direction::Send(to) => self.start_send(ctx, id, to, tag, region),
            Direction::Receive(from) => self.start_receive(ctx, Posted { id, from, tag, region }),
        }
    }

    /// Counts the operation among those in flight, under an id.
    pub(crate) fn keep(&mut self, request: &MessageRequest, work: Work) -> u64 {
        let id = self.next;
        self.next += 1;
        let MessageRequest { direction, tag, ref region, timeout } = *request;
        let call = direction.call(tag, region.len());
        let since = work.began();
        let deadline = since.checked_add(timeout);
        self.in_flight.insert(id, InFlight { call, direction, since, deadline, work });
        id
    }

    /// Whether `to` has room for a message of `len` bytes that it did not ask for.
    pub(crate) fn may_send_eagerly(&self, ctx: &mut OpContext, to: Rank, len: usize) -> bool {
        ctx.rndv.is_eager(&mut ctx.endpoints, to, len, false)
            && self.credits.get(to).used + eager_cost(len) <= EAGER_WINDOW
    }

    /// Counts a message that `to` did not ask for.
    pub(crate) fn use_credits(&mut self, to: Rank, len: usize) {
        self.credits.get_mut(to).used += eager_cost(len);
    }

    /// `from` has taken `bytes` of eager messages.
    pub(crate) fn credits_arrive(&mut self, from: Rank, bytes: u64) {
        let used = &mut self.credits.get_mut(from).used;
        *used = used.saturating_sub(bytes);
    }

    fn start_send(&mut self, ctx: &mut OpContext, id: u64, to: Rank, tag: Tag, region: Region) {
        if let Some(cause) = ctx.lost(to) {
            return self.fail_lost(ctx, id, to, cause);
        }
        let len = region.len();
        let eager = self.may_send_eagerly(ctx, to, len);
        if eager {
            self.use_credits(to, len);
        }
        let header = message_header(tag, len);
        let completion = Completion { op: OpId::Message(id), step: 0 };
        if ctx.rndv.send_message(&mut ctx.endpoints, to, header, Body::of(region), completion, eager) {
            self.done(ctx, id, None);
        }
        if let Some(cause) = ctx.lost(to) {
            self.fail_lost(ctx, id, to, cause);
        }
    }

    /// A message to this rank itself goes to its receive, or through memory of the engine until there is one.
    fn send_to_self(&mut self, ctx: &mut OpContext, id: u64, tag: Tag, region: &Region) {
        match self.take_posted(ctx.me, tag) {
            Some(posted) => {
                if let Some(mut buffer) = self.buffer(ctx, &posted, ctx.me, region.len() as u64) {
                    buffer.region.copy_from(region, ctx.rndv.team);
                    self.done(ctx, posted.id, Some(ctx.me));
                }
                self.done(ctx, id, None);
            }
            None => {
                let content = Content::Whole(region.to_vec(0, region.len()));
                self.done(ctx, id, None);
                self.unexpected.push_back(Unexpected { from: ctx.me, tag, content });
            }
        }
    }

    fn start_receive(&mut self, ctx: &mut OpContext, posted: Posted) {
        let fits = |unexpected: &Unexpected| unexpected.tag == posted.tag && accepts(posted.from, unexpected.from);
        if let Some(position) = self.unexpected.iter().position(fits) {
            let unexpected = self.unexpected.remove(position).expect("the position was just found");
            return self.match_message(ctx, posted, unexpected);
        }
        match posted.from {
            Source::Rank(from) => {
                ctx.endpoints.expect(from);
                if let Some(cause) = ctx.lost(from) {
                    return self.fail_lost(ctx, posted.id, from, cause);
                }
            }
            Source::Any => {
                // Opening streams tells soon when the last possible sender is gone.
                (0..ctx.size()).map(Rank::from).for_each(|peer| ctx.endpoints.connect(peer));
                if let Some((peer, cause)) = last_gone(ctx) {
                    return self.fail_lost(ctx, posted.id, peer, cause);
                }
            }
        }
        self.posted.push(posted);
    }

    fn match_message(&mut self, ctx: &mut OpContext, posted: Posted, unexpected: Unexpected) {
        let len = match &unexpected.content {
            Content::Whole(bytes) => bytes.len() as u64,
            Content::Rts(rts) => rts.len,
        };
        let buffer = self.buffer(ctx, &posted, unexpected.from, len);
        match (unexpected.content, buffer) {
            (Content::Whole(bytes), buffer) => {
                self.return_credits(ctx, unexpected.from, bytes.len());
                if let Some(mut buffer) = buffer {
                    buffer.take(&bytes);
                    self.done(ctx, posted.id, Some(unexpected.from));
                }
            }
            (Content::Rts(rts), Some(buffer)) => {
                ctx.receive(unexpected.from, rts, MatchSpace::PointToPoint, buffer);
            }
            (Content::Rts(RtsInfo { token, len, .. }), None) => {
                let text = format!("rank {} expected {} bytes, not {len}", ctx.me, posted.region.len());
                let failed = Failed::Message { token, by: End::Receiver };
                ctx.endpoints.send_failure(unexpected.from, failed, &text);
            }
        }
    }

    /// The receive's memory, if the message is as long as that; else the receive fails.
    fn buffer(&mut self, ctx: &mut OpContext, posted: &Posted, from: Rank, len: u64) -> Option<RecvBuffer> {
        if posted.region.len() as u64 != len {
            let detail = format!("rank {from} sent {len} bytes, the receive expects {}", posted.region.len());
            self.fail(ctx, posted.id, |operation| Error::Mismatch { operation, detail });
            return None;
        }
        let completion = Completion { op: OpId::Message(posted.id), step: 0 };
        Some(RecvBuffer::new(posted.region.clone(), RecvAction::Store, completion))
    }

    // ---- arrivals ----

    fn take_posted(&mut self, from: Rank, tag: Tag) -> Option<Posted> {
        let fits = |posted: &Posted| posted.tag == tag && accepts(posted.from, from);
        let position = self.posted.iter().position(fits)?;
        Some(self.posted.remove(position))
    }

    pub(crate) fn arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) -> Sink {
        match self.take_posted(from, tag_of(header)) {
            None => Sink::Heap(Vec::new()),
            Some(posted) => {
                self.return_credits(ctx, from, header.payload());
                self.buffer(ctx, &posted, from, header.len).map_or(Sink::Discard, Sink::Buffer)
            }
        }
    }

    /// A message that no receive waited for when its header came is complete.
    pub(crate) fn unexpected_complete(&mut self, ctx: &mut OpContext, from: Rank, header: Header, bytes: Vec<u8>) {
        let unexpected = Unexpected { from, tag: tag_of(header), content: Content::Whole(bytes) };
        self.deliver(ctx, unexpected);
    }

    pub(crate) fn rts_arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) {
        let unexpected = Unexpected { from, tag: tag_of(header), content: Content::Rts(header.rts()) };
        self.deliver(ctx, unexpected);
    }

    /// Gives a message to the receive that waits for it, or keeps it for the next.
    fn deliver(&mut self, ctx: &mut OpContext, unexpected: Unexpected) {
        match self.take_posted(unexpected.from, unexpected.tag) {
            Some(posted) => self.match_message(ctx, posted, unexpected),
            None => self.unexpected.push_back(unexpected),
        }
    }

    /// Counts an eager message of `from` as taken, and tells the sender once that is much.
    pub(crate) fn return_credits(&mut self, ctx: &mut OpContext, from: Rank, bytes: usize) {
        if from == ctx.me {
            return;
        }
        let owed = &mut self.credits.get_mut(from).owed;
        *owed += eager_cost(bytes);
        if *owed >= EAGER_WINDOW / 4 {
            let credit = std::mem::take(owed);
            let header = Header::control(FrameKind::Credit, MatchSpace::PointToPoint, 0, 0, credit);
            ctx.endpoints.send_control(from, header);
        }
    }

    // ---- ends ----

    /// Ends an operation well.
    pub(crate) fn done(&mut self, ctx: &mut OpContext, id: u64, source: Option<Rank>) {
        if let Some(op) = self.in_flight.remove(&id) {
            ctx.finish(op.work, Ok(()), source);
        }
    }

    fn fail(&mut self, ctx: &mut OpContext, id: u64, error: impl FnOnce(String) -> Error) {
        if let Some(op) = self.remove(ctx, id) {
            ctx.finish(op.work, Err(error(op.call.to_string())), None);
        }
    }

    fn fail_lost(&mut self, ctx: &mut OpContext, id: u64, rank: Rank, cause: String) {
        if let Some(InFlight { call, deadline, work, .. }) = self.remove(ctx, id) {
            ctx.desert(ctx.suspect(rank, cause, deadline), call, work);
        }
    }

    /// Takes an operation out that has not ended: nothing of the engine refers to its memory afterwards.
    fn remove(&mut self, ctx: &mut OpContext, id: u64) -> Option<InFlight> {
        let op = self.in_flight.remove(&id)?;
        ctx.cancel(OpId::Message(id), |to, header| {
            let used = &mut self.credits.get_mut(to).used;
            *used = used.saturating_sub(credits_for(header));
        });
        self.posted.retain(|posted| posted.id != id);
        Some(op)
    }

    /// The peer of an operation has given it up: a sender for its own reason, a receiver because the lengths differ.
    pub(crate) fn failed_elsewhere(&mut self, ctx: &mut OpContext, id: u64, from: Rank, by: End, text: String) {
        self.fail(ctx, id, |operation| match by {
            End::Sender => Error::Remote { operation, rank: from.0, cause: text },
            End::Receiver => Error::Mismatch { operation, detail: text },
        });
    }

    /// Ends the messages to and from `peer`, and receives from any rank when no other rank is left.
    pub(crate) fn lose(&mut self, ctx: &mut OpContext, peer: Rank, cause: &str) {
        let last = last_gone(ctx);
        // What has arrived whole can still be received; what was only announced cannot.
        self.unexpected.retain(|unexpected| unexpected.from != peer || matches!(unexpected.content, Content::Whole(_)));
        let mut gone = Vec::new();
        for (id, op) in &self.in_flight {
            let needs_peer = match op.direction {
                Direction::Send(to) => to == peer,
                Direction::Receive(Source::Rank(from)) => from == peer,
                Direction::Receive(Source::Any) => ctx.exchanges(OpId::Message(*id), peer),
            };
            if needs_peer {
                gone.push((*id, peer, cause.to_owned()));
            } else if op.direction == Direction::Receive(Source::Any)
                && let Some((last, cause)) = &last
            {
                gone.push((*id, *last, cause.clone()));
            }
        }
        for (id, peer, cause) in gone {
            self.fail_lost(ctx, id, peer, cause);
        }
    }

    pub(crate) fn end(&mut self, ctx: &mut OpContext, error: &dyn Fn(String) -> Error) {
        let ids: Vec<u64> = self.in_flight.keys().copied().collect();
        for id in ids {
            self.fail(ctx, id, error);
        }
        self.unexpected.clear();
    }

    pub(crate) fn check_deadlines(&mut self, ctx: &mut OpContext, now: Instant) {
        let late = |op: &InFlight| op.deadline.is_some_and(|deadline| deadline <= now);
        let ids: Vec<u64> = self.in_flight.iter().filter(|(_, op)| late(op)).map(|(id, _)| *id).collect();
        for id in ids {
            let Some(op) = self.in_flight.get(&id) else { continue };
            let waited = op.work.age();
            let detail = match op.direction {
                Direction::Send(to) => format!("rank {to} did not receive it"),
                Direction::Receive(Source::Rank(from)) => format!("rank {from} did not send it"),
                Direction::Receive(Source::Any) => "no rank sent it".to_owned(),
            };
            let ranks = match op.direction {
                Direction::Send(peer) | Direction::Receive(Source::Rank(peer)) => peer.index()..peer.index() + 1,
                Direction::Receive(Source::Any) => 0..ctx.size(),
            };
            let error = ctx.endpoints.timeout(ranks, waited, format!("message {id}: {detail}"));
            self.fail(ctx, id, error);
        }
    }
}

/// If all other ranks are gone, the one that went last, and how.
fn last_gone(ctx: &OpContext) -> Option<(Rank, String)> {
    let others = (0..ctx.size()).map(Rank::from).filter(|rank| *rank != ctx.me);
    let last = others.map(|rank| ctx.endpoints.lost_at(rank).map(|at| (at, rank))).collect::<Option<Vec<_>>>()?;
    let (_, rank) = last.into_iter().max()?;
    Some((rank, ctx.lost(rank)?))
}

fn accepts(wanted: Source, from: Rank) -> bool {
    match wanted {
        Source::Rank(rank) => rank == from,
        Source::Any => true,
    }
}

/// The header of a message that is sent before it is asked for.
pub(crate) fn message_header(tag: Tag, len: usize) -> Header {
    Header::control(FrameKind::Eager, MatchSpace::PointToPoint, u64::from(tag.0), 0, len as u64)
}

fn tag_of(header: Header) -> Tag {
    Tag(header.key as u32)
}

/// The credit that a frame takes, until its receiver has taken the message.
fn credits_for(header: Header) -> u64 {
    match (header.kind, header.match_space) {
        (FrameKind::Eager, MatchSpace::PointToPoint) => eager_cost(header.payload()),
        _ => 0,
    }
}

/// What an eager message costs of its receiver's memory.
fn eager_cost(bytes: usize) -> u64 {
    bytes as u64 + 64
}

/// Eager bytes that one rank may have unread at another; further messages wait at their sender.
const EAGER_WINDOW: u64 = 1 << 20;

#[cfg(test)]
mod tests;
