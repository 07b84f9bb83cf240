//! What a hub knows of one peer: its endpoint, and the stream each way.

use std::io::IoSlice;

use crate::error::LinkDown;
use crate::sys::ucx::{Arrived, COPIED_MAX, Device, Recipient, Version};
use crate::transport::runs::Runs;
use crate::transport::ucx::header::{Header, Kind};
use crate::transport::ucx::ordered::Ordered;
use crate::transport::ucx::reads::Reads;
use crate::types::Rank;

/// The way to a peer.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) recipient: Recipient,
    pub(super) devices: Vec<String>,
    /// Software sends what UCX has taken, which takes system calls and may take more turns of it.
    pub(super) is_software: bool,
    pub(super) reads: Reads,
    pub(super) to: Option<Outgoing>,
    pub(super) from: Option<Incoming>,
}

/// The stream to a peer.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) session: u64,
    /// The peer has answered the probe.
    pub(super) is_granted: bool,
    /// How many pieces were sent.
    pub(super) sent: u64,
    /// What they cost, and how much of that the peer has read.
    spent: u64,
    credited: u64,
    pub(super) is_armed: bool,
}

/// The stream from a peer.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) session: u64,
    /// A message of the peer has arrived, which waits for the answer.
    pub(super) is_probed: bool,
    /// The peer counts it as open.
    pub(super) is_open: bool,
    /// The pieces that its reader has not taken: no more than the peer has credit for, which only a peer that errs exceeds.
    pub(super) pieces: Ordered<Arrived>,
    pub(super) is_armed: bool,
}

impl Link {
    pub(super) fn new(recipient: Recipient, devices: &[Device], version: Version) -> Link {
        let reads = Reads::new(devices, version);
        let is_software = devices.iter().any(Device::is_software);
        let devices = devices.iter().map(ToString::to_string).collect();
        Link { recipient, devices, is_software, reads, to: None, from: None }
    }

    /// Why it is of no use any more, if it is not.
    pub(super) fn down(&self) -> Option<LinkDown> {
        self.recipient.failure().map(|failure| LinkDown::new(format!("UCX: {failure}")))
    }

    /// Sends a message without bytes of a stream. What opens one is as long as any: UCX sends the first long message only once it
    /// has an answer of the peer's UCX, which must not come later, when the peer may be busy with something else.
    pub(super) fn send(&mut self, header: Header) -> Result<(), LinkDown> {
        let len = if header.number == 0 { MESSAGE_BYTES } else { Header::BYTES };
        let mut bytes = self.recipient.buffer(len);
        bytes.extend_from_slice(&header.encode());
        bytes.resize(len, 0);
        self.recipient.send(bytes).map_err(|error| LinkDown::new(format!("UCX: {error}")))
    }

    /// Sends bytes to the peer, as far as there is credit; how many.
    pub(super) fn write(&mut self, me: Rank, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        let Some(outgoing) = &mut self.to else { return Ok(0) };
        let (mut head, mut body, mut done) = (head, Runs::new(body), 0);
        while head.len() + body.left > 0 && outgoing.has_room() {
            let Outgoing { session, sent: number, .. } = *outgoing;
            let mut bytes = self.recipient.buffer(MESSAGE_BYTES);
            bytes.extend_from_slice(&Header { kind: Kind::Piece, from: me, session, number }.encode());
            bytes.extend_from_slice(head);
            let mut room = PIECE_BYTES.min(body.left);
            done += head.len() + room;
            while room > 0 {
                let run = body.take(room);
                bytes.extend_from_slice(run);
                room -= run.len();
            }
            head = &[];
            outgoing.spent += cost(bytes.len());
            self.recipient.send(bytes).map_err(|error| LinkDown::new(format!("UCX: {error}")))?;
            outgoing.sent += 1;
        }
        Ok(done)
    }
}

impl Outgoing {
    pub(super) fn new(session: u64) -> Outgoing {
        Outgoing { session, is_granted: false, sent: 0, spent: 0, credited: 0, is_armed: false }
    }

    pub(super) fn has_room(&self) -> bool {
        self.is_granted && self.spent - self.credited + KEPT_COST <= WINDOW
    }

    /// Takes a credit. One that the peer cannot have given counts as none.
    pub(super) fn credit(&mut self, number: u64) {
        self.is_granted = true;
        if number <= self.spent {
            self.credited = self.credited.max(number);
        }
    }
}

impl Incoming {
    pub(super) fn new(session: u64) -> Incoming {
        Incoming { session, is_probed: false, is_open: false, pieces: Ordered::new(WINDOW), is_armed: false }
    }
}

/// What unread pieces of a stream may cost at their reader. UCX itself has no limit.
pub(super) const WINDOW: u64 = 1024;

/// After what cost the reader tells that it has read so much.
pub(super) const CREDIT_INTERVAL: u64 = WINDOW / 8;

/// What a message costs: a kibibyte each, as many as its reader's memory for it takes.
pub(super) fn cost(message: usize) -> u64 {
    if message <= COPIED_MAX { 1 } else { KEPT_COST }
}

/// Twice the eight of UCX's memory for one message: 64 of them can be under way, as much as fast networks take to be busy.
const KEPT_COST: u64 = 16;

/// The most bytes of a body that go with one piece. Bodies are cut at multiples of this, which no element crosses. With a head and
/// the headers, ours and UCX's, it fits into the 8,256 bytes that UCX's transports send at a time.
const PIECE_BYTES: usize = 8192 - 64;

const MESSAGE_BYTES: usize = Header::BYTES + 64 + PIECE_BYTES;
