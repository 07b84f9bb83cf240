//! What arrives from one peer: bytes in, frames out.

use std::io;

use crate::engine::completion::OpId;
use crate::engine::frame::{Encoded, Header};
use crate::engine::recv_buffer::{RecvAction, RecvBuffer, Sink};
use crate::engine::vain_looks::VainLooks;
use crate::error::LinkDown;
use crate::sys::team::Team;
use crate::transport::{MemoryAddress, RecvStream, RingStats};

/// What is at the head of a stream where a certain frame is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// That frame, which is taken as far as it has come.
    Expected,
    /// Nothing yet.
    Nothing,
    /// Another frame, or the end of the stream.
    Other,
}

/// The receiving side of one peer.
pub(crate) struct Inbox {
    recv_stream: Box<dyn RecvStream>,
    body: Option<(Header, Sink, usize)>,
    /// Whether the next bytes are to be taken by the loop: those of a frame that has begun, or of a stream that is armed.
    is_for_loop: bool,
    is_armed: bool,
    /// Bytes have been seen and left to the loop. A stream may have them already, so that no poller tells of them.
    is_unread: bool,
    vain: VainLooks,
}

impl Inbox {
    pub(crate) fn new(recv_stream: Box<dyn RecvStream>) -> Self {
        let vain = VainLooks::default();
        Inbox { recv_stream, body: None, is_for_loop: false, is_armed: false, is_unread: false, vain }
    }

    /// Moves bytes until a frame is complete, and returns its header and what took its payload; nothing when the bytes run
    /// out first. `begin` says where the payload that follows a header goes. `moved` is set if any bytes came.
    pub(crate) fn poll(
        &mut self,
        moved: &mut bool,
        begin: impl FnOnce(Header) -> Sink,
    ) -> Result<Option<(Header, Sink)>, LinkDown> {
        self.is_unread = false;
        if self.body.is_none() {
            let bytes = self.recv_stream.peek()?;
            let Some(header) = Header::decode(bytes)? else {
                return if bytes.is_empty() { Ok(None) } else { self.nothing_yet() };
            };
            *moved = true;
            let mut sink = begin(header);
            let frame = header.size() + header.payload();
            if frame <= WHOLE_FRAME_MAX
                && let Some(payload) = bytes.get(header.size()..frame)
            {
                // To take bytes out of a stream costs more than to look at a short frame.
                sink.take(payload);
                self.recv_stream.consume(frame);
                return Ok(Some((header, sink)));
            }
            self.recv_stream.consume(header.size());
            self.begin_body(header, sink, header.payload());
        }
        self.receive_body(moved)
    }

    /// Moves bytes until the frame that has begun is complete or they run out.
    fn receive_body(&mut self, moved: &mut bool) -> Result<Option<(Header, Sink)>, LinkDown> {
        let Some((_, sink, left)) = &mut self.body else { return Ok(None) };
        while *left > 0 {
            let taken = receive(self.recv_stream.as_mut(), sink, *left)?;
            if taken == 0 {
                return self.nothing_yet();
            }
            *moved = true;
            *left -= taken;
        }
        self.is_for_loop = self.is_armed;
        Ok(self.body.take().map(|(header, sink, _)| (header, sink)))
    }

    fn begin_body(&mut self, header: Header, sink: Sink, payload: usize) {
        self.body = Some((header, sink, payload));
        self.is_for_loop = true;
    }

    /// The frame that has begun is not complete, which is an error if it never will be.
    fn nothing_yet<T>(&self) -> Result<Option<T>, LinkDown> {
        self.recv_stream.end().map_or(Ok(None), Err)
    }

    /// Takes the next frame if it has this header, whose bytes are `head`. Its payload goes to `buffer`.
    pub(crate) fn expect(&mut self, header: Header, head: &Encoded, buffer: &impl Fn() -> RecvBuffer) -> Next {
        if self.is_for_loop {
            return Next::Other;
        }
        // The end of a stream is for `poll` to tell.
        let Ok(bytes) = self.recv_stream.peek() else { return Next::Other };
        if bytes.is_empty() {
            return Next::Nothing;
        }
        let Some(behind) = bytes.strip_prefix(&**head) else {
            self.is_unread = true;
            return Next::Other;
        };
        let payload = header.payload();
        if let Some(whole) = behind.get(..payload) {
            buffer().take(whole);
            self.recv_stream.consume(head.len() + payload);
            return Next::Expected;
        }
        self.recv_stream.consume(head.len());
        let mut buffer = buffer();
        // In shared memory it lies by itself, and to begin with it in parts would take longer.
        match self.recv_stream.peek().ok().and_then(|bytes| bytes.get(..payload)) {
            Some(whole) => {
                buffer.take(whole);
                self.recv_stream.consume(payload);
            }
            None => self.begin_body(header, Sink::Buffer(buffer), payload),
        }
        Next::Expected
    }

    /// Whether a frame is being received.
    pub(crate) fn has_begun(&self) -> bool {
        self.body.is_some()
    }

    /// Moves what has come of it.
    pub(crate) fn poll_body(&mut self) -> Result<(), LinkDown> {
        self.receive_body(&mut false).map(|_| ())
    }

    /// Forgets what is being received for `op`, whose memory must not be touched any more.
    pub(crate) fn cancel(&mut self, op: OpId) {
        if let Some((_, sink, _)) = &mut self.body
            && matches!(sink, Sink::Buffer(buffer) if buffer.completion.op == op)
        {
            *sink = Sink::Discard;
        }
    }

    /// Copies bytes of the peer's memory; see [`RecvStream::read_memory`].
    pub(crate) fn read_memory(&mut self, from: MemoryAddress, into: &mut [u8], team: Team) -> io::Result<usize> {
        self.recv_stream.read_memory(from, into, team)
    }

    /// How often the peer has invalidated memory whose address it had sent.
    pub(crate) fn invalidations(&self) -> u64 {
        self.recv_stream.invalidations()
    }

    /// How the stream's shared memory is read, if it is one of shared memory.
    pub(crate) fn ring_stats(&self) -> Option<RingStats> {
        self.recv_stream.ring_stats()
    }

    /// Whether a payload is being received for `op`.
    pub(crate) fn serves(&self, op: OpId) -> bool {
        matches!(&self.body, Some((_, Sink::Buffer(buffer), _)) if buffer.completion.op == op)
    }

    /// Notes whether a look `moved` something. True: it is time to arm the stream, which is one of so many that are looked at.
    pub(crate) fn is_silent(&mut self, moved: bool, looked_at: usize) -> bool {
        self.vain.note(moved, self.recv_stream.patience(), looked_at)
    }

    /// Notes that this rank goes to sleep. True: the stream is looked at again after that.
    pub(crate) fn sleep(&mut self) -> bool {
        self.vain.sleep()
    }

    /// Asks to be woken when bytes come. False: it is not armed, since there are some now.
    pub(crate) fn arm(&mut self) -> bool {
        self.is_armed = !self.is_unread && !self.recv_stream.arm();
        if !self.is_armed {
            self.recv_stream.disarm();
        }
        self.is_for_loop = self.is_armed || self.body.is_some();
        self.is_armed
    }

    /// Ends what `arm` began.
    pub(crate) fn disarm(&mut self) {
        self.recv_stream.disarm();
        self.is_armed = false;
        self.is_for_loop = self.body.is_some();
    }

    /// Something is expected: it is looked at for as long as a stream that has just brought something.
    pub(crate) fn expect_more(&mut self) {
        self.vain = VainLooks::default();
    }

    /// The poller has named the stream, which is not armed.
    pub(crate) fn named(&mut self) {
        self.recv_stream.named();
    }

    /// The CPU that the peer waited on last, if it has told.
    pub(crate) fn peer_cpu(&self) -> Option<u32> {
        self.recv_stream.writer_cpu()
    }
}

/// Moves at most `left` bytes from the stream to the sink.
fn receive(recv_stream: &mut dyn RecvStream, sink: &mut Sink, left: usize) -> Result<usize, LinkDown> {
    match sink {
        Sink::Buffer(buffer) if buffer.action == RecvAction::Store => {
            let run = buffer.region.run_mut(buffer.received);
            let room = run.len().min(left);
            let taken = recv_stream.read(&mut run[..room])?;
            buffer.received += taken;
            Ok(taken)
        }
        Sink::Heap(bytes) => {
            let start = bytes.len();
            bytes.resize(start + left, 0);
            let taken = recv_stream.read(&mut bytes[start..])?;
            bytes.truncate(start + taken);
            Ok(taken)
        }
        Sink::Buffer(buffer) => {
            let bytes = recv_stream.peek()?;
            // In runs, so that the sender gets room while the rest is combined.
            let available = bytes.len().min(left).min(COMBINE_BYTES);
            let taken = buffer.take(&bytes[..available]);
            recv_stream.consume(taken);
            Ok(taken)
        }
        Sink::Discard => {
            let taken = recv_stream.peek()?.len().min(left);
            recv_stream.consume(taken);
            Ok(taken)
        }
    }
}

/// How much is combined at a time.
const COMBINE_BYTES: usize = 32 * 1024;

/// The longest frame that is taken out of its stream at once.
const WHOLE_FRAME_MAX: usize = 16 * 1024;
