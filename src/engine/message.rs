//! Point-to-point messages: matched by sender and tag in the order issued, beside the collectives.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::engine::body::Body;
use crate::engine::call::Call;
use crate::engine::completion::{Completion, OpId};
use crate::engine::flight_recorder::Bytes;
use crate::engine::frame::{Failed, FrameKind, Header, MatchSpace, RtsInfo};
use crate::engine::progress::Engine;
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

/// The point-to-point operations of one communicator.
#[derive(Default)]
pub(crate) struct Messages {
    next: u64,
    in_flight: FxHashMap<u64, InFlight>,
    posted: Vec<Posted>,
    unexpected: VecDeque<Unexpected>,
}

impl Messages {
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Whether no message waits to be received.
    pub(crate) fn has_no_news(&self) -> bool {
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
}

impl Engine {
    /// Starts a message operation.
    pub(crate) fn submit_message(&mut self, request: MessageRequest, work: Work) {
        let id = self.keep_message(&request, work);
        let MessageRequest { direction, tag, region, .. } = request;
        match direction {
            Direction::Send(to) if to == self.me => self.send_to_self(id, tag, &region),
            Direction::Send(to) => self.start_message_send(id, to, tag, region),
            Direction::Receive(from) => self.start_message_receive(Posted { id, from, tag, region }),
        }
    }

    /// Counts the operation among those in flight, under an id.
    pub(crate) fn keep_message(&mut self, request: &MessageRequest, work: Work) -> u64 {
        let id = self.messages.next;
        self.messages.next += 1;
        let MessageRequest { direction, tag, ref region, timeout } = *request;
        let call = direction.call(tag, region.len());
        let since = work.began();
        let deadline = since.checked_add(timeout);
        self.messages.in_flight.insert(id, InFlight { call, direction, since, deadline, work });
        id
    }

    /// Whether `to` has room for a message of `len` bytes that it did not ask for.
    pub(crate) fn may_send_eagerly(&mut self, to: Rank, len: usize) -> bool {
        self.is_eager(to, len, false) && self.peers[to.index()].unread + eager_cost(len) <= EAGER_WINDOW
    }

    /// Counts a message that `to` did not ask for.
    pub(crate) fn sent_eagerly(&mut self, to: Rank, len: usize) {
        self.peers[to.index()].unread += eager_cost(len);
    }

    /// `from` has taken `bytes` of eager messages.
    pub(crate) fn credit(&mut self, from: Rank, bytes: u64) {
        let unread = &mut self.peers[from.index()].unread;
        *unread = unread.saturating_sub(bytes);
    }

    fn start_message_send(&mut self, id: u64, to: Rank, tag: Tag, region: Region) {
        if let Some(cause) = self.lost(to).map(str::to_owned) {
            return self.fail_message_lost(id, to, cause);
        }
        let len = region.len();
        let eager = self.may_send_eagerly(to, len);
        if eager {
            self.sent_eagerly(to, len);
        }
        let header = message_header(tag, len);
        let completion = Completion { op: OpId::Message(id), step: 0 };
        self.send_message(to, header, Body::of(region), completion, eager);
        if let Some(cause) = self.lost(to).map(str::to_owned) {
            self.fail_message_lost(id, to, cause);
        }
    }

    /// A message to this rank itself goes to its receive, or through memory of the engine until there is one.
    fn send_to_self(&mut self, id: u64, tag: Tag, region: &Region) {
        match self.take_posted(self.me, tag) {
            Some(posted) => {
                if let Some(mut buffer) = self.message_placement(&posted, self.me, region.len() as u64) {
                    buffer.region.copy_from(region);
                    self.message_done(posted.id, Some(self.me));
                }
                self.message_done(id, None);
            }
            None => {
                let content = Content::Whole(region.to_vec(0, region.len()));
                self.message_done(id, None);
                self.messages.unexpected.push_back(Unexpected { from: self.me, tag, content });
            }
        }
    }

    fn start_message_receive(&mut self, posted: Posted) {
        let fits = |unexpected: &Unexpected| unexpected.tag == posted.tag && accepts(posted.from, unexpected.from);
        if let Some(position) = self.messages.unexpected.iter().position(fits) {
            let unexpected = self.messages.unexpected.remove(position).expect("the position was just found");
            return self.match_message(posted, unexpected);
        }
        match posted.from {
            Source::Rank(from) => {
                self.connect(from);
                if let Some(cause) = self.lost(from).map(str::to_owned) {
                    return self.fail_message_lost(posted.id, from, cause);
                }
            }
            Source::Any => {
                // Opening streams tells soon when the last possible sender is gone.
                (0..self.size()).map(Rank::from).for_each(|peer| self.connect(peer));
            }
        }
        self.messages.posted.push(posted);
    }

    fn match_message(&mut self, posted: Posted, unexpected: Unexpected) {
        let len = match &unexpected.content {
            Content::Whole(bytes) => bytes.len() as u64,
            Content::Rts(rts) => rts.len,
        };
        let buffer = self.message_placement(&posted, unexpected.from, len);
        match (unexpected.content, buffer) {
            (Content::Whole(bytes), buffer) => {
                self.eager_taken(unexpected.from, bytes.len());
                if let Some(mut buffer) = buffer {
                    buffer.take(&bytes);
                    self.message_done(posted.id, Some(unexpected.from));
                }
            }
            (Content::Rts(rts), Some(buffer)) => {
                self.take_up(unexpected.from, rts, MatchSpace::PointToPoint, buffer);
            }
            (Content::Rts(RtsInfo { token, len, .. }), None) => {
                let text = format!("rank {} expected {} bytes, not {len}", self.me, posted.region.len());
                self.send_failure(unexpected.from, Failed::Message(token), &text);
            }
        }
    }

    /// The receive's memory, if the message is as long as that; else the receive fails.
    fn message_placement(&mut self, posted: &Posted, from: Rank, len: u64) -> Option<RecvBuffer> {
        if posted.region.len() as u64 != len {
            let detail = format!("rank {from} sent {len} bytes, the receive expects {}", posted.region.len());
            self.fail_message(posted.id, |operation| Error::Mismatch { operation, detail });
            return None;
        }
        let completion = Completion { op: OpId::Message(posted.id), step: 0 };
        Some(RecvBuffer { region: posted.region.clone(), action: RecvAction::Store, completion, received: 0 })
    }

    // ---- arrivals ----

    fn take_posted(&mut self, from: Rank, tag: Tag) -> Option<Posted> {
        let fits = |posted: &Posted| posted.tag == tag && accepts(posted.from, from);
        let position = self.messages.posted.iter().position(fits)?;
        Some(self.messages.posted.remove(position))
    }

    pub(crate) fn message_arrives(&mut self, from: Rank, header: Header) -> Sink {
        match self.take_posted(from, tag_of(header)) {
            None => Sink::Heap(Vec::new()),
            Some(posted) => {
                self.eager_taken(from, header.payload());
                self.message_placement(&posted, from, header.len).map_or(Sink::Discard, Sink::Buffer)
            }
        }
    }

    pub(crate) fn message_unexpected_complete(&mut self, from: Rank, header: Header, bytes: Vec<u8>) {
        self.deliver(from, tag_of(header), bytes);
    }

    fn deliver(&mut self, from: Rank, tag: Tag, bytes: Vec<u8>) {
        let unexpected = Unexpected { from, tag, content: Content::Whole(bytes) };
        match self.take_posted(from, tag) {
            Some(posted) => self.match_message(posted, unexpected),
            None => self.messages.unexpected.push_back(unexpected),
        }
    }

    pub(crate) fn message_rts_arrives(&mut self, from: Rank, header: Header) -> Sink {
        let tag = tag_of(header);
        let unexpected = Unexpected { from, tag, content: Content::Rts(header.rts()) };
        match self.take_posted(from, tag) {
            Some(posted) => self.match_message(posted, unexpected),
            None => self.messages.unexpected.push_back(unexpected),
        }
        Sink::Discard
    }

    pub(crate) fn eager_taken(&mut self, from: Rank, bytes: usize) {
        if from == self.me {
            return;
        }
        let taken = &mut self.peers[from.index()].taken;
        *taken += eager_cost(bytes);
        if *taken >= EAGER_WINDOW / 4 {
            let credit = std::mem::take(taken);
            let header = Header::control(FrameKind::Credit, MatchSpace::PointToPoint, 0, 0, credit);
            self.send(from, header, Body::Empty, Completion::NONE);
        }
    }

    // ---- ends ----

    pub(crate) fn message_done(&mut self, id: u64, source: Option<Rank>) {
        if let Some(op) = self.messages.in_flight.remove(&id) {
            self.finish(op.work, Ok(()), source);
        }
    }

    fn fail_message(&mut self, id: u64, error: impl FnOnce(String) -> Error) {
        let Some(op) = self.messages.in_flight.remove(&id) else { return };
        self.cancel(OpId::Message(id));
        self.messages.posted.retain(|posted| posted.id != id);
        let error = error(op.call.to_string());
        self.finish(op.work, Err(error), None);
    }

    fn fail_message_lost(&mut self, id: u64, rank: Rank, cause: String) {
        let Some(op) = self.messages.in_flight.get(&id) else { return };
        let error = Error::PeerLost { operation: op.call.to_string(), rank: rank.0, cause };
        self.fail_message(id, |_| error.clone());
        self.report_lost(rank, &error);
    }

    pub(crate) fn message_failed_elsewhere(&mut self, from: Rank, token: u64, text: &str) {
        match self.completion_of_token(from, token).map(|completion| completion.op) {
            Some(OpId::Message(id)) => {
                self.fail_message(id, |operation| Error::Mismatch { operation, detail: text.to_owned() });
            }
            Some(OpId::RmaOp(id)) => self.rma_failed_elsewhere(id, text),
            _ => {}
        }
    }

    /// Ends the messages to and from `peer`, and receives from any rank when no other rank is left.
    pub(crate) fn lose_messages(&mut self, peer: Rank, cause: &str) {
        let alone = (0..self.size()).map(Rank::from).all(|rank| rank == self.me || self.lost(rank).is_some());
        // What has arrived whole can still be received; what was only announced cannot.
        self.messages
            .unexpected
            .retain(|unexpected| unexpected.from != peer || matches!(unexpected.content, Content::Whole(_)));
        let gone: Vec<u64> = self
            .messages
            .in_flight
            .iter()
            .filter_map(|(id, op)| {
                let affected = match op.direction {
                    Direction::Send(to) => to == peer,
                    Direction::Receive(Source::Rank(from)) => from == peer,
                    Direction::Receive(Source::Any) => alone || self.exchanges(OpId::Message(*id), peer),
                };
                affected.then_some(*id)
            })
            .collect();
        for id in gone {
            self.fail_message_lost(id, peer, cause.to_owned());
        }
    }

    pub(crate) fn end_messages(&mut self, error: &dyn Fn(String) -> Error) {
        let ids: Vec<u64> = self.messages.in_flight.keys().copied().collect();
        for id in ids {
            self.fail_message(id, error);
        }
        self.messages.unexpected.clear();
    }

    pub(crate) fn check_message_deadlines(&mut self, now: Instant) {
        let late = |op: &InFlight| op.deadline.is_some_and(|deadline| deadline <= now);
        let ids: Vec<u64> = self.messages.in_flight.iter().filter(|(_, op)| late(op)).map(|(id, _)| *id).collect();
        for id in ids {
            let Some(op) = self.messages.in_flight.get(&id) else { continue };
            let waited = op.work.age();
            let detail = match op.direction {
                Direction::Send(to) => format!("rank {to} did not receive it"),
                Direction::Receive(Source::Rank(from)) => format!("rank {from} did not send it"),
                Direction::Receive(Source::Any) => "no rank sent it".to_owned(),
            };
            let ranks = match op.direction {
                Direction::Send(peer) | Direction::Receive(Source::Rank(peer)) => peer.index()..peer.index() + 1,
                Direction::Receive(Source::Any) => 0..self.size(),
            };
            let error = self.timeout(ranks, waited, format!("message {id}: {detail}"));
            self.fail_message(id, error);
        }
    }
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
pub(crate) fn credits_for(header: Header) -> u64 {
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
