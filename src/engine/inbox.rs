//! What arrives from one peer: bytes in, frames out.

use std::io;

use crate::engine::frame::{Encoded, Header};
use crate::engine::outbox::{OpRef, Owner};
use crate::engine::reduce::{self, Operands};
use crate::engine::region::Region;
use crate::error::LinkDown;
use crate::transport::{Inlet, Location};

/// What happens to received elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Arrival {
    /// They replace what is there.
    Store,
    /// They are combined with what is there.
    Reduce(Operands),
}

/// Where a message goes.
#[derive(Debug)]
pub(crate) struct Placement {
    pub(crate) region: Region,
    pub(crate) arrival: Arrival,
    pub(crate) owner: Owner,
    /// Bytes that have arrived.
    pub(crate) filled: usize,
}

impl Placement {
    /// Whether the whole message has arrived.
    pub(crate) fn is_full(&self) -> bool {
        self.filled == self.region.len()
    }

    /// Whether this can take the next `len` bytes: some, no more than are missing, and whole elements to be combined.
    pub(crate) fn fits(&self, len: usize) -> bool {
        let element = match self.arrival {
            Arrival::Store => 1,
            Arrival::Reduce(operands) => operands.size(),
        };
        len > 0 && len <= self.region.len() - self.filled && len.is_multiple_of(element)
    }

    /// Takes bytes that arrived, as many as make whole elements; returns how many.
    pub(crate) fn take(&mut self, bytes: &[u8]) -> usize {
        match self.arrival {
            Arrival::Store => {
                self.region.write(self.filled, bytes);
                self.filled += bytes.len();
                bytes.len()
            }
            Arrival::Reduce(operands) => {
                let mut done = 0;
                let whole = bytes.len() - bytes.len() % operands.size();
                while done < whole {
                    let run = self.region.run_mut(self.filled);
                    let take = run.len().min(whole - done);
                    reduce::combine(operands, &mut run[..take], &bytes[done..done + take]);
                    done += take;
                    self.filled += take;
                }
                whole
            }
        }
    }
}

/// Where a frame's payload goes.
#[derive(Debug)]
pub(crate) enum Sink {
    Place(Placement),
    /// Kept until somebody wants it.
    Heap(Vec<u8>),
    /// Read and forgotten: its operation is over.
    Discard,
}

impl Sink {
    /// Takes a whole payload.
    fn take(&mut self, payload: &[u8]) {
        match self {
            Sink::Place(placement) => _ = placement.take(payload),
            Sink::Heap(bytes) => bytes.extend_from_slice(payload),
            Sink::Discard => {}
        }
    }
}

/// What comes next in a stream for whom expects a certain frame.
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
    inlet: Box<dyn Inlet>,
    body: Option<(Header, Sink, usize)>,
}

impl Inbox {
    pub(crate) fn new(inlet: Box<dyn Inlet>) -> Self {
        Inbox { inlet, body: None }
    }

    /// Moves bytes until a frame is complete, and returns its header and what took its payload; nothing when the bytes run
    /// out first. `begin` says where the payload that follows a header goes. `moved` is set if any bytes came.
    pub(crate) fn poll(
        &mut self,
        moved: &mut bool,
        begin: impl FnOnce(Header) -> Sink,
    ) -> Result<Option<(Header, Sink)>, LinkDown> {
        if self.body.is_none() {
            let bytes = self.inlet.peek()?;
            let Some(header) = Header::decode(bytes)? else { return Ok(None) };
            *moved = true;
            let mut sink = begin(header);
            let frame = header.size() + header.payload();
            if frame <= AT_ONCE_BYTES
                && let Some(payload) = bytes.get(header.size()..frame)
            {
                // To take bytes out of a stream costs more than to look at a short frame.
                sink.take(payload);
                self.inlet.consume(frame);
                return Ok(Some((header, sink)));
            }
            self.inlet.consume(header.size());
            self.body = Some((header, sink, header.payload()));
        }
        self.receive_body(moved)
    }

    /// Moves bytes until the frame that has begun is complete or they run out.
    fn receive_body(&mut self, moved: &mut bool) -> Result<Option<(Header, Sink)>, LinkDown> {
        let Some((_, sink, left)) = &mut self.body else { return Ok(None) };
        while *left > 0 {
            let taken = receive(self.inlet.as_mut(), sink, *left)?;
            if taken == 0 {
                return Ok(None);
            }
            *moved = true;
            *left -= taken;
        }
        Ok(self.body.take().map(|(header, sink, _)| (header, sink)))
    }

    /// Takes the next frame if it has this header, whose bytes are `head`. Its payload goes to `place`.
    pub(crate) fn expect(&mut self, header: Header, head: &Encoded, place: &impl Fn() -> Placement) -> Next {
        if self.body.is_some() {
            return Next::Other;
        }
        // The end of a stream is for `poll` to tell.
        let Ok(bytes) = self.inlet.peek() else { return Next::Other };
        if bytes.is_empty() {
            return Next::Nothing;
        }
        let Some(behind) = bytes.strip_prefix(&**head) else { return Next::Other };
        let payload = header.payload();
        if let Some(whole) = behind.get(..payload) {
            place().take(whole);
            self.inlet.consume(head.len() + payload);
            return Next::Expected;
        }
        self.inlet.consume(head.len());
        let mut place = place();
        // In shared memory it lies by itself, and to begin with it in parts would take longer.
        match self.inlet.peek().ok().and_then(|bytes| bytes.get(..payload)) {
            Some(whole) => {
                place.take(whole);
                self.inlet.consume(payload);
            }
            None => self.body = Some((header, Sink::Place(place), payload)),
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
    pub(crate) fn cancel(&mut self, op: OpRef) {
        if let Some((_, sink, _)) = &mut self.body
            && matches!(sink, Sink::Place(placement) if placement.owner.op == op)
        {
            *sink = Sink::Discard;
        }
    }

    /// Copies bytes of the peer's memory; see [`Inlet::read_memory`].
    pub(crate) fn read_memory(&mut self, from: Location, into: &mut [u8]) -> io::Result<usize> {
        self.inlet.read_memory(from, into)
    }

    /// How often the peer has taken back memory that it had offered.
    pub(crate) fn withdrawals(&self) -> u64 {
        self.inlet.withdrawals()
    }

    /// Whether a payload is being received for `op`.
    pub(crate) fn serves(&self, op: OpRef) -> bool {
        matches!(&self.body, Some((_, Sink::Place(placement), _)) if placement.owner.op == op)
    }

    /// Whether to look for frames is in vain, as far as is known.
    pub(crate) fn is_silent(&mut self) -> bool {
        self.inlet.is_silent()
    }

    /// Asks to be woken when bytes come. True: there are some now.
    pub(crate) fn arm(&mut self) -> bool {
        self.inlet.arm()
    }

    /// Ends what `arm` began.
    pub(crate) fn disarm(&mut self) {
        self.inlet.disarm();
    }

    /// The CPU that the peer waited on last, if it has told.
    pub(crate) fn peer_cpu(&self) -> Option<u32> {
        self.inlet.writer_cpu()
    }
}

/// Moves at most `left` bytes from the stream to the sink.
fn receive(inlet: &mut dyn Inlet, sink: &mut Sink, left: usize) -> Result<usize, LinkDown> {
    match sink {
        Sink::Place(placement) if placement.arrival == Arrival::Store => {
            let run = placement.region.run_mut(placement.filled);
            let room = run.len().min(left);
            let taken = inlet.read(&mut run[..room])?;
            placement.filled += taken;
            Ok(taken)
        }
        Sink::Heap(bytes) => {
            let start = bytes.len();
            bytes.resize(start + left, 0);
            let taken = inlet.read(&mut bytes[start..])?;
            bytes.truncate(start + taken);
            Ok(taken)
        }
        Sink::Place(placement) => {
            let bytes = inlet.peek()?;
            // In runs, so that the sender gets room while the rest is combined.
            let available = bytes.len().min(left).min(COMBINE_BYTES);
            let taken = placement.take(&bytes[..available]);
            inlet.consume(taken);
            Ok(taken)
        }
        Sink::Discard => {
            let taken = inlet.peek()?.len().min(left);
            inlet.consume(taken);
            Ok(taken)
        }
    }
}

/// How much is combined at a time.
const COMBINE_BYTES: usize = 32 * 1024;

/// The longest frame that is taken out of its stream at once.
const AT_ONCE_BYTES: usize = 16 * 1024;
