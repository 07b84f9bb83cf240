//! Messages between devices of different hosts: the pieces that streams put into the cells of rings.
//!
//! Two ranks of one host share a ring's words and cells. Two ranks of different hosts each have a copy, and their engines keep
//! both alike. When the sender's stream has counted a piece in the head, its engine sends the piece; the receiver's engine puts
//! it into the cell of the same number and counts it in the head there. When the receiver's stream has counted a piece in the
//! tail, its engine tells the sender's, which counts in the tail there. So streams run the same programs as within a host. A
//! sender's stream never has more pieces under way than there are cells, so there is room for whatever comes. No call of the
//! driver is made here.
//!
//! Where a vendor's library carries the data, there are no pieces: each rank tells the other one what it calls, and listens
//! until the call has ended.
//!
//! The engine writes the other rank's calls and failures into this rank's control segment, as that rank would within a host. So
//! code that compares calls or looks for failures finds both there.

use std::collections::VecDeque;
use std::time::Instant;

use rustc_hash::FxHashMap;

use crate::device::control::{Failure, FailureKind, LIBRARY_GIVEN_UP};
use crate::device::counters::Word;
use crate::device::far_pairs::FarPair;
use crate::device::message_log::{LoggedMessage, disagreement};
use crate::device::rounds::{CELLS, Direction};
use crate::device::words::SLOTS;
use crate::engine::body::Body;
use crate::engine::completion::{Completion, OpId};
use crate::engine::context::{OpContext, next_look};
use crate::engine::failures::Suspect;
use crate::engine::frame::{Failed, FrameKind, Header, MatchSpace};
use crate::engine::recv_buffer::{RecvAction, RecvBuffer, Sink};
use crate::engine::region::Region;
use crate::signature::Signature;
use crate::types::{Rank, Tag};

/// A piece of an outbound message.
struct Piece {
    /// The message's number, and what was called.
    message: u64,
    logged: LoggedMessage,
    /// Its number, from 0, among the pieces with data; `None` if it has no data.
    chunk: Option<u64>,
    bytes: usize,
    is_done: bool,
}

/// What goes to a rank.
struct Outbound {
    lane: usize,
    head: Word,
    tail: Word,
    /// Added to numbers on the wire. It grows when the ranks begin anew.
    base: u64,
    /// In the order in which the stream counts them.
    pieces: VecDeque<Piece>,
    /// The number of the first one.
    first: u64,
    /// How many of the pieces have begun.
    begun: usize,
    /// How many pieces with data have been submitted, have left, and have been taken out of the receiver's cells.
    chunks: u64,
    left: u64,
    taken: u64,
    /// The last message called.
    called: Option<(u64, LoggedMessage)>,
}

/// What comes from a rank.
struct Inbound {
    lane: usize,
    head: Word,
    tail: Word,
    base: u64,
    /// Whether each piece that has begun to come is there, in order; and the number of the first one.
    coming: VecDeque<bool>,
    first: u64,
    /// How many pieces with data have begun to come, and how many the sender knows to be taken.
    chunks: u64,
    told: u64,
    /// The message whose pieces come, what its sender has called, and how much of it is still to come.
    message: u64,
    logged: LoggedMessage,
    rest: u64,
    /// How many pieces this rank has called, and how many with data; the last message, and the last that the sender was told
    /// of.
    pieces: u64,
    wanted: u64,
    called: Option<(u64, LoggedMessage)>,
    told_called: u64,
    /// From this message on nothing is taken.
    failed: u64,
}

impl Outbound {
    fn new(FarPair { lanes: [lane, _], words: [head, tail, ..], .. }: &FarPair, base: u64) -> Outbound {
        let (lane, head, tail, pieces) = (*lane, *head, *tail, VecDeque::new());
        Outbound { lane, head, tail, base, pieces, first: 1, begun: 0, chunks: 0, left: 0, taken: 0, called: None }
    }

    fn submit(&mut self, message: u64, logged: LoggedMessage, cell: usize) {
        let mut rest = logged.bytes;
        loop {
            let bytes = rest.min(cell as u64) as usize;
            rest -= bytes as u64;
            let chunk = (bytes > 0).then_some(self.chunks);
            self.chunks += u64::from(bytes > 0);
            self.pieces.push_back(Piece { message, logged, chunk, bytes, is_done: false });
            if rest == 0 {
                break;
            }
        }
        self.called = Some((message, logged));
    }

    /// Notes that a piece has left.
    fn done(&mut self, number: u64) {
        let index = number.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        let Some(piece) = index.and_then(|index| self.pieces.get_mut(index)) else { return };
        piece.is_done = true;
        while let Some(Piece { is_done: true, chunk, .. }) = self.pieces.front() {
            self.left += u64::from(chunk.is_some());
            self.pieces.pop_front();
            self.first += 1;
            self.begun -= 1;
        }
    }

    /// Drops the pieces of this message and of later ones. Returns the numbers of those that had begun.
    fn drop_from(&mut self, message: u64) -> Vec<u64> {
        let kept = self.pieces.partition_point(|piece| piece.message < message);
        let begun = (kept..self.begun).map(|index| self.first + index as u64).collect();
        self.pieces.truncate(kept);
        self.begun = self.begun.min(kept);
        begun
    }
}

impl Inbound {
    fn new(FarPair { lanes: [_, lane], words: [.., head, tail], .. }: &FarPair, base: u64) -> Inbound {
        Inbound {
            lane: *lane,
            head: *head,
            tail: *tail,
            base,
            coming: VecDeque::new(),
            first: 1,
            chunks: 0,
            told: 0,
            message: 0,
            logged: LoggedMessage { bytes: 0, tag: Tag(0), captured: None },
            rest: 0,
            pieces: 0,
            wanted: 0,
            called: None,
            told_called: 0,
            failed: u64::MAX,
        }
    }

    /// Notes that a piece is there. Returns the number up to which all are there, if it has grown.
    fn done(&mut self, number: u64) -> Option<u64> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        *self.coming.get_mut(index)? = true;
        let before = self.first;
        while self.coming.front() == Some(&true) {
            self.coming.pop_front();
            self.first += 1;
        }
        (self.first > before).then_some(self.first - 1)
    }
}

/// The messages between this rank's device and that of one rank of another host.
struct Pair {
    far: FarPair,
    outbound: Outbound,
    inbound: Inbound,
    /// The last message of each direction that a vendor's library carries and that has not ended here: outbound, then inbound.
    by_library: [Option<u64>; 2],
}

/// The messages between this rank's device and those of other hosts.
#[derive(Default)]
pub(crate) struct DeviceMessages {
    pairs: FxHashMap<Rank, Pair>,
    /// Ranks that cannot be reached.
    suspects: Vec<Suspect>,
    /// When something moved last.
    moved: Option<Instant>,
}

impl DeviceMessages {
    /// Begins with a rank once the two have set up, before the other rank sends anything.
    pub(crate) fn open(&mut self, peer: Rank, far: FarPair) {
        let (outbound, inbound) = (Outbound::new(&far, 0), Inbound::new(&far, 0));
        self.pairs.insert(peer, Pair { far, outbound, inbound, by_library: [None; 2] });
    }

    /// Gives up what was begun with a rank, of which nothing is on any stream.
    pub(crate) fn forget(&mut self, ctx: &mut OpContext, peer: Rank) {
        if let Some(mut pair) = self.pairs.remove(&peer) {
            pair.drop_all(ctx, peer);
        }
    }

    /// Whether nothing is to go, and nothing to be told.
    pub(crate) fn is_idle(&self) -> bool {
        self.pairs.values().all(Pair::is_idle)
    }

    /// When to look at the streams' words again.
    pub(crate) fn next_look(&self) -> Option<Instant> {
        (!self.is_idle()).then(|| next_look(self.moved))
    }

    // ---- steps ----

    /// Takes up messages with a rank, of which the first has this number.
    pub(crate) fn submit(
        &mut self,
        ctx: &mut OpContext,
        (peer, direction): (Rank, Direction),
        first: u64,
        messages: &[LoggedMessage],
    ) {
        let Some(pair) = self.pairs.get_mut(&peer) else { return };
        for (number, message) in (first..).zip(messages) {
            match direction {
                Direction::Send => pair.outbound.submit(number, *message, pair.far.cell),
                Direction::Receive => {
                    let chunks = message.bytes.div_ceil(pair.far.cell as u64);
                    pair.inbound.pieces += chunks.max(1);
                    pair.inbound.wanted += chunks;
                    pair.inbound.called = Some((number, *message));
                }
            }
        }
        self.reach(ctx, peer);
        self.progress(ctx);
    }

    /// Takes up messages with a rank that a vendor's library carries, the first of this number: tells that rank of them, and
    /// listens to it until they have ended.
    pub(crate) fn listen(
        &mut self,
        ctx: &mut OpContext,
        (peer, direction): (Rank, Direction),
        first: u64,
        messages: &[LoggedMessage],
    ) {
        self.reach(ctx, peer);
        let Some(pair) = self.pairs.get_mut(&peer) else { return };
        for called in (first..).zip(messages.iter().copied()) {
            let lane = match direction {
                Direction::Send => {
                    pair.outbound.called = Some(called);
                    pair.outbound.lane
                }
                Direction::Receive => {
                    pair.inbound.called = Some(called);
                    pair.inbound.told_called = called.0;
                    pair.inbound.lane
                }
            };
            let side = pair.side(lane);
            pair.by_library[side] = Some(called.0);
            pair.tell_call(ctx, peer, lane);
        }
    }

    /// The messages of a lane up to this number have ended here.
    pub(crate) fn ended(&mut self, peer: Rank, lane: usize, number: u64) {
        let Some(pair) = self.pairs.get_mut(&peer) else { return };
        let side = pair.side(lane);
        let last = &mut pair.by_library[side];
        *last = last.filter(|last| *last > number);
    }

    /// Connects to a rank: the end of the stream tells of the rank's end.
    fn reach(&mut self, ctx: &mut OpContext, peer: Rank) {
        ctx.endpoints.connect(peer);
        if let Some(cause) = ctx.lost(peer) {
            self.suspect(peer, cause);
        }
        self.moved = Some(Instant::now());
    }

    /// Sends what streams have made ready, and tells of what they have taken. True: something moved.
    pub(crate) fn progress(&mut self, ctx: &mut OpContext) -> bool {
        let mut moved = false;
        let mut lost = Vec::new();
        for (peer, pair) in &mut self.pairs {
            while pair.can_send() {
                moved = true;
                pair.send_next(ctx, *peer);
                lost.extend(ctx.lost(*peer).map(|cause| (*peer, cause)));
            }
            moved |= pair.tell_taken(ctx, *peer);
        }
        lost.into_iter().for_each(|(peer, cause)| self.suspect(peer, cause));
        if moved {
            self.moved = Some(Instant::now());
        }
        moved
    }

    /// A piece to a rank has left.
    pub(crate) fn sent(&mut self, peer: Rank, number: u64) {
        if let Some(pair) = self.pairs.get_mut(&peer) {
            pair.outbound.done(number);
            pair.count_tail();
        }
    }

    /// A piece from a rank is there.
    pub(crate) fn received(&mut self, peer: Rank, number: u64) {
        if let Some(pair) = self.pairs.get_mut(&peer)
            && let Some(last) = pair.inbound.done(number)
        {
            pair.far.own.count(pair.inbound.lane, pair.inbound.head, last);
        }
        self.moved = Some(Instant::now());
    }

    // ---- arrivals ----

    pub(crate) fn arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) -> Sink {
        let buffer = self.pairs.get_mut(&from).and_then(|pair| pair.buffer(ctx, from, header));
        buffer.map_or(Sink::Discard, Sink::Buffer)
    }

    pub(crate) fn rts_arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) {
        let buffer = self.pairs.get_mut(&from).and_then(|pair| pair.buffer(ctx, from, header));
        if let Some(buffer) = buffer {
            ctx.receive(from, header.rts(), MatchSpace::DeviceMessage, buffer);
        }
    }

    /// A rank tells what it has taken, or what it has called.
    pub(crate) fn notice_arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) {
        if let Some(pair) = self.pairs.get_mut(&from) {
            pair.notice_arrives(ctx, from, header);
            self.moved = Some(Instant::now());
        }
    }

    /// Another rank has given up a message and all later ones.
    pub(crate) fn failed_elsewhere(&mut self, ctx: &mut OpContext, from: Rank, header: Header, text: String) {
        let Some(pair) = self.pairs.get_mut(&from) else { return };
        let lane = header.signature.root as usize;
        let Some(number) = pair.base(lane).and_then(|base| header.key.checked_sub(base)) else { return };
        if header.index == LIBRARY_GIVEN_UP {
            return pair.far.other.give_up_library(lane);
        }
        let rank = header.culprit(ctx.size()).unwrap_or(from);
        let kind = FailureKind::numbered(header.index);
        pair.far.other.fail(&Failure { lane, number, kind, rank, text });
        pair.drop_from(ctx, from, lane, number);
    }

    // ---- ends ----

    /// Gives up a message and all later ones of its lane, and tells the other rank.
    pub(crate) fn fail(&mut self, ctx: &mut OpContext, peer: Rank, failure: &Failure) {
        if let Some(pair) = self.pairs.get_mut(&peer) {
            pair.tell_failure(ctx, peer, failure);
        }
    }

    /// Tells the other rank that this one has given up the library that carries messages of a lane.
    pub(crate) fn give_up_library(&mut self, ctx: &mut OpContext, peer: Rank, lane: usize) {
        if let Some(base) = self.pairs.get(&peer).and_then(|pair| pair.base(lane))
            && ctx.closed.is_none()
            && ctx.endpoints.is_connected(peer)
        {
            let failed = Failed::DeviceMessage { lane, sequence: base, kind: LIBRARY_GIVEN_UP, culprit: ctx.me };
            ctx.endpoints.send_failure(peer, failed, "");
        }
    }

    /// As [`fail`](DeviceMessages::fail), when the other rank knows.
    pub(crate) fn give_up(&mut self, ctx: &mut OpContext, peer: Rank, lane: usize, number: u64) {
        if let Some(pair) = self.pairs.get_mut(&peer) {
            pair.drop_from(ctx, peer, lane, number);
        }
    }

    /// Whether everything ready before a failure has been sent, so that the stream may use its memory. If there is no time for
    /// that, gives it up too.
    pub(crate) fn settle(&mut self, ctx: &mut OpContext, peer: Rank, lane: usize, has_time: bool) -> bool {
        let Some(pair) = self.pairs.get_mut(&peer).filter(|pair| pair.outbound.lane == lane) else { return true };
        let Some(front) = pair.outbound.pieces.front() else { return true };
        if !has_time {
            let (number, kind, rank) = (front.message, FailureKind::Left, ctx.me);
            let text = "it gave up what it had not sent".to_owned();
            pair.tell_failure(ctx, peer, &Failure { lane, number, kind, rank, text });
        }
        pair.outbound.pieces.is_empty()
    }

    /// Tells the other rank which call this rank waits in.
    pub(crate) fn tell_of_wait(&mut self, ctx: &mut OpContext, peer: Rank, lane: usize) {
        if let Some(pair) = self.pairs.get_mut(&peer) {
            pair.tell_call(ctx, peer, lane);
        }
    }

    /// Fails messages with ranks that have been unreachable for a while: in that time the engine may hear why, perhaps because
    /// of another rank.
    pub(crate) fn check(&mut self, ctx: &mut OpContext, now: Instant) {
        let mut due = Vec::new();
        self.suspects.retain(|suspect| {
            let Some(blamed) = ctx.blame(suspect, now) else { return true };
            due.push((suspect.rank, blamed));
            false
        });
        for (peer, (rank, text)) in due {
            let Some(pair) = self.pairs.get_mut(&peer) else { continue };
            for lane in [pair.outbound.lane, pair.inbound.lane] {
                let number = pair.first_unfinished(lane);
                pair.far.other.fail(&Failure { lane, number, kind: FailureKind::PeerLost, rank, text: text.clone() });
                pair.drop_from(ctx, peer, lane, number);
            }
        }
    }

    fn suspect(&mut self, rank: Rank, cause: String) {
        if !self.suspects.iter().any(|suspect| suspect.rank == rank) {
            self.suspects.push(Suspect::new(rank, cause));
        }
    }

    /// Suspects `peer`, which is gone, if there can be messages with it.
    pub(crate) fn lose(&mut self, ctx: &OpContext, peer: Rank, cause: &str) {
        if ctx.closed.is_none() && self.pairs.contains_key(&peer) {
            self.suspect(peer, cause.to_owned());
        }
    }

    /// Begins a lane anew after a disagreement. Nothing of it is on any stream of the two ranks.
    pub(crate) fn reset(&mut self, ctx: &mut OpContext, peer: Rank, lane: usize) {
        let Some(pair) = self.pairs.get_mut(&peer) else { return };
        pair.drop_from(ctx, peer, lane, 0);
        if lane == pair.outbound.lane {
            pair.outbound = Outbound::new(&pair.far, pair.outbound.base + EPOCH);
        } else {
            for number in pair.inbound.first..pair.inbound.first + pair.inbound.coming.len() as u64 {
                ctx.cancel(OpId::PieceReceived { peer, number }, |_, _| ());
            }
            pair.inbound = Inbound::new(&pair.far, pair.inbound.base + EPOCH);
        }
        pair.far.other.reset(lane);
    }

    /// Drops everything, for good.
    pub(crate) fn end(&mut self, ctx: &mut OpContext) {
        self.pairs.iter_mut().for_each(|(peer, pair)| pair.drop_all(ctx, *peer));
    }

    /// Gives the memory back, after the [end](DeviceMessages::end).
    pub(crate) fn close(&mut self) {
        self.pairs.clear();
    }
}

impl Pair {
    fn is_idle(&self) -> bool {
        let Inbound { pieces, wanted, first, told, failed, .. } = self.inbound;
        let has_come = first > pieces && told >= wanted;
        let is_carried = self.by_library.iter().all(Option::is_none);
        self.outbound.pieces.is_empty() && (has_come || failed < u64::MAX) && is_carried
    }

    /// The place of a lane's direction: 0 for outbound, 1 for inbound.
    fn side(&self, lane: usize) -> usize {
        usize::from(lane == self.inbound.lane)
    }

    /// Added to the numbers of a lane on the wire.
    fn base(&self, lane: usize) -> Option<u64> {
        match lane {
            lane if lane == self.outbound.lane => Some(self.outbound.base),
            lane if lane == self.inbound.lane => Some(self.inbound.base),
            _ => None,
        }
    }

    fn can_send(&self) -> bool {
        let Outbound { lane, head, first, begun, .. } = self.outbound;
        let Some(piece) = self.outbound.pieces.get(begun) else { return false };
        let own = &self.far.own;
        // A failure is noted before the stream counts anything wrong.
        own.has_counted(lane, head, first + begun as u64) && own.first_failure(lane, piece.message).is_none()
    }

    fn send_next(&mut self, ctx: &mut OpContext, peer: Rank) {
        let Outbound { base, first, begun, .. } = self.outbound;
        let Some(piece) = self.outbound.pieces.get(begun) else { return };
        let number = first + begun as u64;
        let cell = piece.chunk.map_or(0, |chunk| (chunk % CELLS as u64) as usize);
        let region = Region::outbound(&self.far.memory, cell).part(0, piece.bytes);
        let control =
            Header::control(FrameKind::Eager, MatchSpace::DeviceMessage, base + number, 0, piece.bytes as u64);
        let header = Header { signature: of_message(piece.logged), ..control };
        self.outbound.begun += 1;
        let completion = Completion { op: OpId::PieceSent { peer, number }, step: 0 };
        let eager = ctx.rndv.is_eager(&mut ctx.endpoints, peer, region.len(), false);
        if ctx.rndv.send_message(&mut ctx.endpoints, peer, header, Body::of(region), completion, eager) {
            self.outbound.done(number);
            self.count_tail();
        }
    }

    /// Tells this rank's stream which cells it may use again: their pieces have left, and the receiver has taken them.
    fn count_tail(&self) {
        let Outbound { lane, tail, left, taken, .. } = self.outbound;
        self.far.own.count(lane, tail, left.min(taken));
    }

    /// Tells the sender how many pieces this rank's stream has taken, and the last call. True: there was something to tell.
    fn tell_taken(&mut self, ctx: &mut OpContext, peer: Rank) -> bool {
        let Inbound { lane, tail, told, .. } = self.inbound;
        let mut taken = told;
        while taken < self.inbound.chunks && self.far.own.has_counted(lane, tail, taken + 1) {
            taken += 1;
        }
        self.inbound.told = taken;
        let called = self.inbound.called.map_or(0, |(number, _)| number);
        let is_due = taken > told || called >= self.inbound.told_called + SLOTS as u64 / 4;
        if is_due {
            self.inbound.told_called = called;
            self.notice(ctx, peer, lane, (called, taken), None);
        }
        is_due
    }

    /// Tells the other rank what this one has called last on a lane.
    fn tell_call(&mut self, ctx: &mut OpContext, peer: Rank, lane: usize) {
        let (called, taken) = match lane {
            lane if lane == self.outbound.lane => (self.outbound.called, 0),
            _ => (self.inbound.called, self.inbound.told),
        };
        if let Some((number, logged)) = called {
            self.notice(ctx, peer, lane, (number, taken), Some(logged));
        }
    }

    fn notice(
        &self,
        ctx: &mut OpContext,
        peer: Rank,
        lane: usize,
        (called, taken): (u64, u64),
        logged: Option<LoggedMessage>,
    ) {
        let base = self.base(lane).unwrap_or(0);
        let control = Header::control(FrameKind::Credit, MatchSpace::DeviceMessage, base + called, 0, taken);
        let signature =
            Signature { operation: u8::from(logged.is_some()), ..logged.map(of_message).unwrap_or_default() };
        ctx.endpoints.send_control(peer, Header { signature, index: lane as u32, ..control });
    }

    fn notice_arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) {
        let lane = header.index as usize;
        let Some(called) = self.base(lane).and_then(|base| header.key.checked_sub(base)) else { return };
        if lane == self.outbound.lane {
            self.outbound.taken = header.len.clamp(self.outbound.taken, self.outbound.chunks);
            self.count_tail();
        }
        if header.signature.operation != 0 {
            self.hear(ctx, from, lane, called, message_of(header.signature));
        }
        self.far.other.note_called(lane, called);
    }

    /// The buffer of an inbound piece; `None` if nothing waits for the piece any more.
    fn buffer(&mut self, ctx: &mut OpContext, from: Rank, header: Header) -> Option<RecvBuffer> {
        let inbound = &mut self.inbound;
        let number = header.key.checked_sub(inbound.base)?;
        // Pieces come in the order in which they were sent.
        if number != inbound.first + inbound.coming.len() as u64 {
            log::debug!("piece {number} from rank {from} is of earlier messages");
            return None;
        }
        let is_first = inbound.rest == 0;
        if is_first {
            inbound.message += 1;
            inbound.logged = message_of(header.signature);
            inbound.rest = inbound.logged.bytes;
        }
        let (lane, message, logged) = (inbound.lane, inbound.message, inbound.logged);
        let len = usize::try_from(header.len).ok().filter(|len| *len <= self.far.cell && header.len <= inbound.rest)?;
        inbound.rest -= header.len;
        inbound.coming.push_back(false);
        let chunk = inbound.chunks;
        inbound.chunks += u64::from(len > 0);
        if is_first && !self.hear(ctx, from, lane, message, logged) || message >= self.inbound.failed {
            return None;
        }
        // The stream has taken what lay there, unless the sender does not keep to what it was told.
        let free = (chunk + 1).saturating_sub(CELLS as u64);
        if len > 0 && !self.far.own.has_counted(lane, self.inbound.tail, free) {
            log::warn!("rank {from} sends more than there is room for");
            return None;
        }
        let region = Region::inbound(&self.far.memory, (chunk % CELLS as u64) as usize).part(0, len);
        let completion = Completion { op: OpId::PieceReceived { peer: from, number }, step: 0 };
        Some(RecvBuffer::new(region, RecvAction::Store, completion))
    }

    /// Notes what another rank has called, and compares it with this rank's call. False: they differ.
    fn hear(&mut self, ctx: &mut OpContext, from: Rank, lane: usize, number: u64, theirs: LoggedMessage) -> bool {
        let Err(ours) = self.far.other.hear_message(lane, number, theirs) else { return true };
        let direction = if lane == self.outbound.lane { Direction::Send } else { Direction::Receive };
        let text = disagreement(number, (ctx.me, direction, ours), (from, theirs));
        let failure = Failure { lane, number, kind: FailureKind::Mismatch, rank: ctx.me, text };
        // As if the other rank had found it.
        self.far.other.fail(&failure);
        self.tell_failure(ctx, from, &failure);
        false
    }

    fn tell_failure(&mut self, ctx: &mut OpContext, peer: Rank, failure: &Failure) {
        let Failure { lane, number, kind, rank, ref text } = *failure;
        let Some(base) = self.base(lane) else { return };
        // A rank that leaves opens no streams to tell.
        if kind != FailureKind::Left || ctx.endpoints.is_connected(peer) {
            let failed = Failed::DeviceMessage { lane, sequence: base + number, kind: kind as u32, culprit: rank };
            ctx.endpoints.send_failure(peer, failed, text);
        }
        self.drop_from(ctx, peer, lane, number);
    }

    /// Drops what is to be sent of this message and of later ones, and takes nothing more of them.
    fn drop_from(&mut self, ctx: &mut OpContext, peer: Rank, lane: usize, message: u64) {
        if lane == self.outbound.lane {
            for number in self.outbound.drop_from(message) {
                ctx.cancel(OpId::PieceSent { peer, number }, |_, _| ());
            }
        } else {
            self.inbound.failed = self.inbound.failed.min(message);
        }
    }

    fn drop_all(&mut self, ctx: &mut OpContext, peer: Rank) {
        for lane in [self.outbound.lane, self.inbound.lane] {
            self.drop_from(ctx, peer, lane, 0);
        }
        for number in self.inbound.first..self.inbound.first + self.inbound.coming.len() as u64 {
            ctx.cancel(OpId::PieceReceived { peer, number }, |_, _| ());
        }
    }

    /// The first message of a lane of which not everything has gone or come.
    fn first_unfinished(&self, lane: usize) -> u64 {
        match lane {
            // The engine sees nothing of what a library carries, so all fails; what has ended well stays so.
            lane if self.by_library[self.side(lane)].is_some() => 1,
            lane if lane == self.outbound.lane => {
                let next = self.outbound.called.map_or(1, |(number, _)| number + 1);
                self.outbound.pieces.front().map_or(next, |piece| piece.message)
            }
            _ => self.inbound.message + u64::from(self.inbound.rest == 0 && self.inbound.coming.is_empty()),
        }
    }
}

/// A call, as the header of a piece has it.
fn of_message(LoggedMessage { bytes, tag, .. }: LoggedMessage) -> Signature {
    Signature { count: bytes, root: tag.0, ..Signature::default() }
}

fn message_of(Signature { count, root, .. }: Signature) -> LoggedMessage {
    // Graphs have no messages between hosts.
    LoggedMessage { bytes: count, tag: Tag(root), captured: None }
}

/// How many pieces there can be before ranks begin anew.
const EPOCH: u64 = 1 << 40;
