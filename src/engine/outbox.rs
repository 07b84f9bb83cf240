//! What waits to be written to one peer.

use std::collections::VecDeque;

use crate::engine::body::{Body, Slices};
use crate::engine::completion::{Completion, OpId};
use crate::engine::frame::{
    DEREGISTERED, Encoded, End, FRAGMENT_BYTES, Failed, FrameKind, GIVEN_UP, Header, MatchSpace,
};
use crate::engine::vain_looks::VainLooks;
use crate::error::LinkDown;
use crate::sys::tcp_info::TcpStats;
use crate::transport::{LaneStats, RailStats, Read, RemoteMemory, SendStream};

/// How the connections to a peer do.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LinkStats {
    /// What the kernel knows of them, if there are any.
    pub(crate) tcp: Option<TcpStats>,
    /// What has become of them, if there are several.
    pub(crate) rails: Option<RailStats>,
    /// What carries the stream to the peer, if it shares a connection.
    pub(crate) lane: Option<LaneStats>,
}

/// A message on its way: one frame, or as many `Data`, `Put` or `Accumulate` frames as its body needs.
#[derive(Debug)]
struct Outgoing {
    header: Header,
    body: Body,
    completion: Completion,
    /// Where the current frame's payload begins in the body.
    offset: usize,
}

impl Outgoing {
    /// The payload of the current frame, as a range of the body.
    fn frame_end(&self) -> usize {
        match self.header.kind {
            FrameKind::Data | FrameKind::Put | FrameKind::Accumulate => {
                self.body.len().min(self.offset + FRAGMENT_BYTES)
            }
            _ => self.body.len(),
        }
    }

    /// The header of the current frame, whose payload ends at `end`.
    fn frame_header(&self, end: usize) -> Header {
        let header = self.header;
        let len = if header.payload() > 0 { (end - self.offset) as u64 } else { header.len };
        let names_place = matches!(header.kind, FrameKind::Put | FrameKind::Accumulate);
        let token = if names_place { header.token + self.offset as u64 } else { header.token };
        Header { len, token, ..header }
    }

    /// What comes in place of the rest of a message of `op`, if its receiver has asked for it and hears of its end by nothing else.
    fn end_early(&self, op: OpId) -> Option<Outgoing> {
        let Header { kind: FrameKind::Data, match_space: MatchSpace::PointToPoint, token, .. } = self.header else {
            return None;
        };
        let text = if let OpId::Window(_) = op { DEREGISTERED } else { GIVEN_UP };
        let header = Failed::Message { token, by: End::Sender }.header(text.len());
        let body = Body::of_bytes(text.as_bytes());
        Some(Outgoing { header, body, completion: Completion::NONE, offset: 0 })
    }
}

/// The sending side of one peer.
#[derive(Default)]
pub(crate) struct Outbox {
    send_stream: Option<Box<dyn SendStream>>,
    queue: VecDeque<Outgoing>,
    /// Bytes written of the frame at the head of the queue, header included; its encoded header.
    written: usize,
    head: Option<Encoded>,
    vain: VainLooks,
}

impl Outbox {
    /// Whether a stream has been opened.
    pub(crate) fn is_open(&self) -> bool {
        self.send_stream.is_some()
    }

    /// Attaches the stream.
    pub(crate) fn open(&mut self, mut send_stream: Box<dyn SendStream>) {
        // What was invalidated before counts where the frames that tell of it go: no stream before has taken any.
        let told = self.queue.iter().filter(|outgoing| outgoing.header.kind == FrameKind::Invalidated).count();
        (0..told).for_each(|_| send_stream.invalidate());
        self.send_stream = Some(send_stream);
        self.vain = VainLooks::default();
    }

    /// Drops a stream that has not taken any bytes; they go to the next.
    pub(crate) fn close(&mut self) {
        self.send_stream = None;
    }

    /// Whether bytes wait.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether the stream is opened but the peer has not accepted it yet.
    pub(crate) fn is_opening(&self) -> bool {
        self.send_stream.as_ref().is_some_and(|send_stream| !send_stream.is_open())
    }

    /// Whether the peer has accepted the stream, which may have ended since.
    pub(crate) fn was_accepted(&self) -> bool {
        self.send_stream.as_ref().is_some_and(|send_stream| send_stream.was_accepted())
    }

    /// Whether an operation's message waits here.
    pub(crate) fn holds(&self, op: OpId) -> bool {
        self.queue.iter().any(|outgoing| outgoing.completion.op == op)
    }

    /// The bytes of the engine in long messages that wait here.
    pub(crate) fn held(&self) -> usize {
        self.queue.iter().map(|outgoing| outgoing.body.held()).sum()
    }

    /// The bytes of messages that wait here, without those of headers.
    pub(crate) fn unsent(&self) -> usize {
        let waiting: usize = self.queue.iter().map(|outgoing| outgoing.body.len() - outgoing.offset).sum();
        waiting.saturating_sub(self.written.saturating_sub(self.head.map_or(0, |head| head.len())))
    }

    /// Begins to read what the peer has exposed.
    pub(crate) fn begin_read(&mut self, token: u64, from: RemoteMemory<'_>) -> Read {
        self.send_stream.as_mut().map_or(Read::Unable, |send_stream| send_stream.begin_read(token, from))
    }

    /// Queues a message.
    pub(crate) fn push(&mut self, header: Header, body: Body, completion: Completion) {
        self.push_from(0, header, body, completion);
    }

    /// Queues the rest of a message whose receiver has its first `offset` bytes. What the peer waits for before it sends goes before
    /// all that has not begun, so that data go both ways at once.
    pub(crate) fn push_from(&mut self, offset: usize, header: Header, body: Body, completion: Completion) {
        let mut outgoing = Outgoing { header, body, completion, offset };
        outgoing.body.give_back(offset);
        match header.kind {
            FrameKind::Ready | FrameKind::Rtr => self.queue.insert(usize::from(self.head.is_some()), outgoing),
            _ => self.queue.push_back(outgoing),
        }
    }

    /// Writes a message of one frame that nothing waits before, or as much of it as there is room for, and queues the rest.
    /// True: nothing is left of it.
    pub(crate) fn write(&mut self, header: Header, body: Body, completion: Completion) -> Result<bool, LinkDown> {
        let head = header.encode();
        let end = head.len() + header.payload();
        let written = match &mut self.send_stream {
            None => Ok(0),
            Some(send_stream) => {
                let mut slices = Slices::new();
                body.io_slices(0, header.payload(), &mut slices);
                send_stream.write(&head, &slices)
            }
        };
        if written == Ok(end) {
            return Ok(true);
        }
        self.written = *written.as_ref().unwrap_or(&0);
        self.head = Some(head);
        self.queue.push_back(Outgoing { header, body, completion, offset: 0 });
        written.map(|_| false)
    }

    /// Whether the peer can read this process's memory, which an open stream tells.
    pub(crate) fn peer_can_read(&self) -> Option<bool> {
        self.send_stream.as_ref().map(|send_stream| send_stream.peer_can_read())
    }

    /// Whether this rank reads what the peer has exposed by itself.
    pub(crate) fn can_read(&self) -> bool {
        self.send_stream.as_ref().is_some_and(|send_stream| send_stream.can_read())
    }

    /// Makes the peer doubt what it reads of this process's memory.
    pub(crate) fn invalidate(&mut self) {
        if let Some(send_stream) = &mut self.send_stream {
            send_stream.invalidate();
        }
    }

    /// Writes as much as there is room for; owners of finished messages are appended to `done`. True: bytes moved.
    pub(crate) fn pump(&mut self, done: &mut Vec<Completion>) -> Result<bool, LinkDown> {
        let Some(send_stream) = &mut self.send_stream else { return Ok(false) };
        let mut moved = false;
        while let Some(outgoing) = self.queue.front_mut() {
            let end = outgoing.frame_end();
            let header = *self.head.get_or_insert_with(|| outgoing.frame_header(end).encode());
            let frame = header.len() + end - outgoing.offset;
            let taken = {
                let mut slices = Slices::new();
                let from = outgoing.offset + self.written.saturating_sub(header.len());
                outgoing.body.io_slices(from, end, &mut slices);
                send_stream.write(&header[self.written.min(header.len())..], &slices)?
            };
            self.written += taken;
            moved |= taken > 0;
            if self.written < frame {
                break;
            }
            self.written = 0;
            self.head = None;
            let Some(mut outgoing) = self.queue.pop_front() else { break };
            if end < outgoing.body.len() {
                // Other messages get their turn between the fragments of a long one.
                outgoing.offset = end;
                outgoing.body.give_back(end);
                self.queue.push_back(outgoing);
            } else {
                done.push(outgoing.completion);
            }
        }
        Ok(moved)
    }

    /// Takes back what has not been sent of `op`, whose memory must not be touched any more; `unsent` is told of each message
    /// of which the peer never hears. A frame that is under way is finished from a copy, since the stream needs its bytes.
    /// A peer that waits for the rest of a message is told that it does not come.
    pub(crate) fn cancel(&mut self, op: OpId, mut unsent: impl FnMut(Header)) {
        let under_way = self.written > 0;
        if !under_way {
            // The header belongs to a frame that may be dropped now.
            self.head = None;
        }
        let (mut first, mut cut_off) = (true, None);
        self.queue.retain_mut(|outgoing| {
            let is_head = std::mem::take(&mut first);
            if outgoing.completion.op != op {
                return true;
            }
            if !(is_head && under_way) {
                unsent(outgoing.header);
                return outgoing.end_early(op).map(|end| *outgoing = end).is_some();
            }
            let end = outgoing.frame_end();
            if end < outgoing.body.len() {
                cut_off = outgoing.end_early(op);
            }
            outgoing.body = outgoing.body.copy(outgoing.offset, end);
            outgoing.offset = 0;
            outgoing.completion = Completion::NONE;
            true
        });
        if let Some(end) = cut_off {
            self.queue.insert(1, end);
        }
    }

    /// Drives a connection that is being made and notices one that broke, without anything to write.
    pub(crate) fn check_connection(&mut self) -> Result<(), LinkDown> {
        self.send_stream.as_mut().map_or(Ok(()), |send_stream| send_stream.write(&[], &[]).map(|_| ()))
    }

    /// Notes whether a write `moved` something. True: it is time to arm the stream, which is one of so many that are written to.
    pub(crate) fn is_blocked(&mut self, moved: bool, written_to: usize) -> bool {
        // Where there is no stream, opening one tells.
        let patience = self.send_stream.as_ref().map_or(1, |send_stream| send_stream.patience());
        self.vain.note(moved, patience, written_to)
    }

    /// Notes that this rank goes to sleep. True: the stream is written to again after that.
    pub(crate) fn sleep(&mut self) -> bool {
        self.vain.sleep()
    }

    /// Asks to be woken when there is room. False: it is not armed, since there is room now.
    pub(crate) fn arm(&mut self) -> bool {
        let has_room = self.send_stream.as_mut().is_some_and(|send_stream| send_stream.arm());
        if has_room {
            self.disarm();
        }
        !has_room
    }

    /// Ends what `arm` began.
    pub(crate) fn disarm(&mut self) {
        if let Some(send_stream) = &mut self.send_stream {
            send_stream.disarm();
        }
    }

    /// Lets the peer know on which CPU this rank waits.
    pub(crate) fn publish_cpu(&mut self, cpu: u32) {
        if let Some(send_stream) = &mut self.send_stream {
            send_stream.publish_cpu(cpu);
        }
    }

    /// How the connections do.
    pub(crate) fn link_stats(&self) -> LinkStats {
        let Some(send_stream) = &self.send_stream else { return LinkStats::default() };
        let (tcp, rails, lane) = (send_stream.tcp_stats(), send_stream.rail_stats(), send_stream.lane_stats());
        LinkStats { tcp, rails, lane }
    }

    /// What bytes go through, where the transport chooses that.
    pub(crate) fn devices(&self) -> Vec<String> {
        self.send_stream.as_ref().map_or_else(Vec::new, |send_stream| send_stream.devices())
    }

    /// Whether everything has left this process.
    pub(crate) fn flushed(&mut self) -> Result<bool, LinkDown> {
        match &mut self.send_stream {
            Some(send_stream) if self.queue.is_empty() => send_stream.flushed(),
            _ => Ok(self.queue.is_empty()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::mock_peer::{MockWire, sending};
    use crate::sync::{Arc, Mutex, lock};

    #[test]
    fn what_was_invalidated_before_a_stream_counts_in_it() {
        let (wire, mut outbox) = (Arc::<Mutex<MockWire>>::default(), Outbox::default());
        for kind in [FrameKind::Invalidated, FrameKind::Rts, FrameKind::Invalidated] {
            outbox.push(Header::control(kind, MatchSpace::PointToPoint, 0, 3, 0), Body::Empty, Completion::NONE);
        }
        outbox.open(sending(&wire));
        assert_eq!(lock(&wire).engine_invalidations, 2);
    }

    #[test]
    fn what_a_peer_waits_for_goes_before_data_that_has_not_begun() {
        let mut outbox = Outbox::default();
        let push = |outbox: &mut Outbox, kind| {
            let header = Header::control(kind, MatchSpace::Collective, 0, 0, 0);
            outbox.push(header, Body::Empty, Completion::NONE);
        };
        push(&mut outbox, FrameKind::Data);
        push(&mut outbox, FrameKind::Data);
        push(&mut outbox, FrameKind::Ready);
        // Now a frame has begun.
        outbox.head = Some(outbox.queue[0].header.encode());
        push(&mut outbox, FrameKind::Rtr);
        push(&mut outbox, FrameKind::Fail);
        let kinds: Vec<FrameKind> = outbox.queue.iter().map(|outgoing| outgoing.header.kind).collect();
        let data = FrameKind::Data;
        assert_eq!(kinds, [FrameKind::Ready, FrameKind::Rtr, data, data, FrameKind::Fail]);
    }
}
