//! Accesses to windows of devices on other hosts: what streams have made ready for them, and what comes from there.
//!
//! When a stream has counted an item, its engine sends it: a put's piece with data out of a cell, other items alone. The other
//! rank's engine receives into the cell of the same number, and hands items over in their order to
//! [`Lands`](crate::device::far_windows::Lands). Once an item has landed, that engine tells the sender, and sends it what it
//! asked for; the sender's engine counts that for the stream that waits. No call of the driver is made here.
//!
//! Once a rank of this host has given accesses up, the engine sends nothing that streams count after that.

use std::collections::VecDeque;
use std::time::Instant;

use rustc_hash::FxHashMap;

use crate::device::control::{Failure, FailureKind};
use crate::device::far_windows::{FarMemory, FarWord, Landing, Port};
use crate::device::marks::{HARMLESS, SPOILT};
use crate::device::rounds::CELLS;
use crate::device::routes::{Item, UNDER_WAY};
use crate::device::signals::SLOTS;
use crate::engine::body::Body;
use crate::engine::completion::{AccessTransfer, Completion, OpId};
use crate::engine::context::{OpContext, next_look};
use crate::engine::failures::Suspect;
use crate::engine::frame::{Failed, FrameKind, Header, MatchSpace};
use crate::engine::recv_buffer::{RecvAction, RecvBuffer, Sink};
use crate::engine::region::Region;
use crate::signature::Signature;
use crate::types::Rank;

/// Things that begin in order and end in any order: how far they are.
struct Order<T> {
    /// The number of the first one, from 1.
    first: u64,
    /// Each, and whether it has ended.
    things: VecDeque<(T, bool)>,
}

impl<T> Order<T> {
    fn new() -> Order<T> {
        Order { first: 1, things: VecDeque::new() }
    }

    fn next(&self) -> u64 {
        self.first + self.things.len() as u64
    }

    fn push(&mut self, thing: T) {
        self.things.push_back((thing, false));
    }

    fn end(&mut self, number: u64) {
        let index = number.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        if let Some((_, has_ended)) = index.and_then(|index| self.things.get_mut(index)) {
            *has_ended = true;
        }
    }

    /// The first thing, if it has ended.
    fn front(&self) -> Option<&T> {
        self.things.front().filter(|(_, has_ended)| *has_ended).map(|(thing, _)| thing)
    }

    fn pop(&mut self) {
        if self.things.pop_front().is_some() {
            self.first += 1;
        }
    }

    /// How many have ended, up to the first that has not.
    fn ended(&self) -> u64 {
        self.first - 1
    }
}

/// A piece that a get asks for.
#[derive(Clone, Copy)]
struct Answer {
    cell: usize,
    bytes: usize,
}

/// What goes to a rank and comes from it.
struct Pair {
    memory: FarMemory,
    // ---- what this rank does to the other's windows ----
    /// Items, with their slots, that the other rank is not known to be done with. One ends when it has left.
    sent: Order<(usize, Item)>,
    /// How many items have begun to leave, and how many the other rank is done with.
    begun: u64,
    done: u64,
    /// Pieces that this rank has asked for; one ends when it has come. And how many have begun to come.
    asked: Order<Answer>,
    coming: u64,
    // ---- what the other rank does to this one's windows ----
    /// Items, with their slots, that have begun to come. One ends when it is there, and goes when it is handed over.
    come: Order<(usize, Item)>,
    /// Items that are handed over and not known to be done: their numbers, and the pieces that they ask for.
    landing: VecDeque<(u64, Option<Answer>)>,
    landed: u64,
    /// By cell, the number of the last item that has come into it.
    last: [u64; CELLS],
    /// How many pieces of puts have begun to come, and how many pieces the items handed over ask for.
    pieces: u64,
    answers: u64,
    /// Answers that are sent; one ends when it has left.
    answered: Order<()>,
    /// Nothing more goes or comes.
    is_over: bool,
}

/// The accesses between this rank's windows and those of other hosts.
#[derive(Default)]
pub(crate) struct DeviceAccesses {
    port: Option<Port>,
    pairs: FxHashMap<Rank, Pair>,
    /// Ranks that cannot be reached.
    suspects: Vec<Suspect>,
    /// When something moved last.
    moved: Option<Instant>,
}

impl DeviceAccesses {
    /// Begins, before any rank of another host knows of a window here.
    pub(crate) fn open(&mut self, port: Port) {
        self.pairs = port.memory.iter().map(|(peer, memory)| (*peer, Pair::new(memory.clone()))).collect();
        self.port = Some(port);
    }

    /// Whether nothing waits to go, and nothing that has come waits to be done.
    pub(crate) fn is_idle(&self) -> bool {
        self.pairs.values().all(Pair::is_idle)
    }

    /// Whether everything that was to go to windows of this slot is done, or will never be.
    pub(crate) fn is_settled(&self, slot: usize) -> bool {
        self.pairs.values().all(|pair| pair.is_over || pair.sent.things.iter().all(|((of, _), _)| *of != slot))
    }

    /// When to look at words again.
    pub(crate) fn next_look(&self) -> Option<Instant> {
        (!self.is_idle()).then(|| next_look(self.moved))
    }

    // ---- steps ----

    pub(crate) fn submit(&mut self, ctx: &mut OpContext, peer: Rank, slot: usize, items: &[Item]) {
        let Some(pair) = self.pairs.get_mut(&peer).filter(|pair| !pair.is_over) else { return };
        items.iter().for_each(|item| pair.sent.push((slot, *item)));
        // A stream to the peer tells of the peer's end.
        ctx.endpoints.connect(peer);
        if let Some(cause) = ctx.lost(peer) {
            self.suspect(peer, cause);
        }
        self.moved = Some(Instant::now());
        self.progress(ctx);
    }

    /// Sends what streams have made ready and what was asked for, and tells of what is done. True: something moved.
    pub(crate) fn progress(&mut self, ctx: &mut OpContext) -> bool {
        let Some(port) = &self.port else { return false };
        let mut moved = false;
        let mut lost = Vec::new();
        for (peer, pair) in self.pairs.iter_mut().filter(|(_, pair)| !pair.is_over) {
            while pair.can_send(port, *peer) {
                moved = true;
                pair.send_next(ctx, port, *peer);
                lost.extend(ctx.lost(*peer).map(|cause| (*peer, cause)));
            }
            moved |= pair.hand_over(port, *peer);
            moved |= pair.tell_landed(ctx, port, *peer);
        }
        lost.into_iter().for_each(|(peer, cause)| self.suspect(peer, cause));
        if moved {
            self.moved = Some(Instant::now());
        }
        moved
    }

    /// Something between this rank and another has left or come.
    pub(crate) fn done(&mut self, peer: Rank, transfer: AccessTransfer, number: u64) {
        if let (Some(port), Some(pair)) = (&self.port, self.pairs.get_mut(&peer)) {
            match transfer {
                AccessTransfer::ItemSent => {
                    pair.sent.end(number);
                    pair.count_done(port, peer);
                }
                AccessTransfer::ItemReceived => pair.come.end(number),
                AccessTransfer::AnswerSent => {
                    pair.answered.end(number);
                    pair.forget_answers();
                }
                AccessTransfer::AnswerReceived => pair.answer_is_there(port, peer, number),
            }
            self.moved = Some(Instant::now());
        }
    }

    // ---- arrivals ----

    pub(crate) fn arrives(&mut self, ctx: &OpContext, from: Rank, header: Header) -> Sink {
        self.buffer(ctx, from, header).map_or(Sink::Discard, Sink::Buffer)
    }

    pub(crate) fn rts_arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) {
        if let Some(buffer) = self.buffer(ctx, from, header) {
            ctx.receive(from, header.rts(), MatchSpace::DeviceAccess, buffer);
        }
    }

    fn buffer(&mut self, ctx: &OpContext, from: Rank, header: Header) -> Option<RecvBuffer> {
        let port = self.port.as_ref()?;
        let pair = self.pairs.get_mut(&from).filter(|pair| !pair.is_over)?;
        let buffer = match Wire::of(header) {
            Some(Wire::Answer) => pair.answer_buffer(from, header),
            Some(Wire::Item(slot, item)) => pair.item_buffer(port, from, header, slot, item),
            None => None,
        };
        if buffer.is_none() {
            let (comm, me, key) = (ctx.endpoints.name(), ctx.me, header.key);
            log::warn!(
                "communicator `{comm}` rank {me}: dropped rank {from}'s access {key} to a window, which it must not send"
            );
        }
        buffer
    }

    /// A rank tells how many items it is done with.
    pub(crate) fn notice_arrives(&mut self, from: Rank, header: Header) {
        if let (Some(port), Some(pair)) = (&self.port, self.pairs.get_mut(&from)) {
            pair.done = header.key.clamp(pair.done, pair.begun);
            pair.count_done(port, from);
            self.moved = Some(Instant::now());
        }
    }

    /// A rank of another host has given accesses up.
    pub(crate) fn failed_elsewhere(&mut self, ctx: &mut OpContext, from: Rank, header: Header, text: String) {
        let Some(port) = &self.port else { return };
        let rank = header.culprit(ctx.size()).unwrap_or(from);
        let number = if header.key == HARMLESS { HARMLESS } else { SPOILT };
        port.marks.note(from, Failure { lane: 0, number, kind: FailureKind::numbered(header.index), rank, text });
        if let Some(pair) = self.pairs.get_mut(&from) {
            pair.end(ctx, from);
        }
    }

    // ---- ends ----

    /// Carries nothing any more, and tells the ranks of other hosts why.
    pub(crate) fn fail(&mut self, ctx: &mut OpContext, failure: &Failure) {
        let failed = Failed::DeviceAccess { number: failure.number, kind: failure.kind as u32, culprit: failure.rank };
        for (peer, pair) in &mut self.pairs {
            // A rank that leaves opens no streams to tell.
            if failure.kind != FailureKind::Left || ctx.endpoints.is_connected(*peer) {
                ctx.endpoints.send_failure(*peer, failed, &failure.text);
            }
            pair.end(ctx, *peer);
        }
    }

    /// Marks ranks as gone that have been unreachable for a while: in that time the engine may hear why, perhaps of another
    /// rank.
    pub(crate) fn check(&mut self, ctx: &mut OpContext, now: Instant) {
        let Some(port) = &self.port else { return };
        let mut due = Vec::new();
        self.suspects.retain(|suspect| {
            let Some(blamed) = ctx.blame(suspect, now) else { return true };
            due.push((suspect.rank, blamed));
            false
        });
        for (peer, (rank, text)) in due {
            let kind = if rank == peer { FailureKind::Left } else { FailureKind::PeerLost };
            port.marks.note(peer, Failure { lane: 0, number: HARMLESS, kind, rank, text });
            if let Some(pair) = self.pairs.get_mut(&peer) {
                pair.end(ctx, peer);
            }
        }
    }

    fn suspect(&mut self, rank: Rank, cause: String) {
        if !self.suspects.iter().any(|suspect| suspect.rank == rank) {
            self.suspects.push(Suspect::new(rank, cause));
        }
    }

    /// Suspects `peer`, which is gone, if there can be accesses with it.
    pub(crate) fn lose(&mut self, ctx: &OpContext, peer: Rank, cause: &str) {
        if ctx.closed.is_none() && self.pairs.get(&peer).is_some_and(|pair| !pair.is_over) {
            self.suspect(peer, cause.to_owned());
        }
    }

    /// Drops everything, for good.
    pub(crate) fn end(&mut self, ctx: &mut OpContext) {
        self.pairs.iter_mut().for_each(|(peer, pair)| pair.end(ctx, *peer));
    }

    /// Gives the memory back, after the [end](DeviceAccesses::end).
    pub(crate) fn close(&mut self) {
        self.pairs.clear();
        self.port = None;
    }
}

impl Pair {
    fn new(memory: FarMemory) -> Pair {
        Pair {
            memory,
            sent: Order::new(),
            begun: 0,
            done: 0,
            asked: Order::new(),
            coming: 0,
            come: Order::new(),
            landing: VecDeque::new(),
            landed: 0,
            last: [0; CELLS],
            pieces: 0,
            answers: 0,
            answered: Order::new(),
            is_over: false,
        }
    }

    fn is_idle(&self) -> bool {
        let Pair { sent, come, landing, answered, asked, is_over, .. } = self;
        let is_empty = sent.things.is_empty() && come.things.is_empty() && answered.things.is_empty();
        *is_over || is_empty && landing.is_empty() && asked.things.is_empty()
    }

    // ---- what this rank does to the other's windows ----

    fn can_send(&self, port: &Port, peer: Rank) -> bool {
        let is_ready =
            self.begun + 1 < self.sent.next() && port.words.has_reached(FarWord::Ready(peer), self.begun + 1);
        // A failure is noted before a stream counts anything wrong.
        is_ready && port.marks.is_sound()
    }

    fn send_next(&mut self, ctx: &mut OpContext, port: &Port, peer: Rank) {
        let number = self.begun + 1;
        let index = (number - self.sent.first) as usize;
        let Some(((slot, item), _)) = self.sent.things.get(index).copied() else { return };
        self.begun = number;
        let region = match item {
            Item::Put { cell, bytes, .. } => Region::outbound(&self.memory.puts, cell).part(0, bytes),
            Item::Get { cell, bytes, .. } => {
                self.asked.push(Answer { cell, bytes });
                Region::default()
            }
            Item::Signal { .. } => Region::default(),
        };
        let header = Wire::Item(slot, item).header(number, region.len());
        if send(ctx, peer, header, region, AccessTransfer::ItemSent, number) {
            self.sent.end(number);
            self.count_done(port, peer);
        }
    }

    /// Tells streams how many items have left and are done at the other rank.
    fn count_done(&mut self, port: &Port, peer: Rank) {
        if self.is_over {
            return;
        }
        while self.sent.first <= self.done && self.sent.front().is_some() {
            self.sent.pop();
        }
        port.words.tell(FarWord::Done(peer), self.sent.ended());
    }

    /// The buffer of a piece that this rank has asked for.
    fn answer_buffer(&mut self, from: Rank, header: Header) -> Option<RecvBuffer> {
        let number = self.coming + 1;
        let index = usize::try_from(number.checked_sub(self.asked.first)?).ok()?;
        let (Answer { cell, bytes }, _) = self.asked.things.get(index)?;
        if header.key != number || header.len != *bytes as u64 {
            return None;
        }
        self.coming = number;
        Some(store(
            Region::inbound(&self.memory.gets, *cell).part(0, *bytes),
            from,
            AccessTransfer::AnswerReceived,
            number,
        ))
    }

    /// Tells the stream of a piece that it waits for.
    fn answer_is_there(&mut self, port: &Port, peer: Rank, number: u64) {
        if self.is_over {
            return;
        }
        self.asked.end(number);
        while self.asked.front().is_some() {
            self.asked.pop();
        }
        port.words.tell(FarWord::Answered(peer), self.asked.ended());
    }

    // ---- what the other rank does to this one's windows ----

    /// The buffer of an item's data, if the item is the next one and there is room for it.
    fn item_buffer(&mut self, port: &Port, from: Rank, header: Header, slot: usize, item: Item) -> Option<RecvBuffer> {
        let number = self.come.next();
        if header.key != number || number > self.landed + UNDER_WAY || slot >= SLOTS {
            return None;
        }
        let region = match item {
            Item::Put { cell, bytes, .. } => {
                let is_free = port.words.has_reached(FarWord::Landed(from), self.last[cell]);
                if cell != (self.pieces % CELLS as u64) as usize || bytes > port.cell || !is_free {
                    return None;
                }
                self.pieces += 1;
                self.last[cell] = number;
                Region::inbound(&self.memory.puts, cell).part(0, bytes)
            }
            Item::Get { bytes, .. } if bytes > port.cell => return None,
            Item::Get { .. } | Item::Signal { .. } => Region::default(),
        };
        self.come.push((slot, item));
        Some(store(region, from, AccessTransfer::ItemReceived, number))
    }

    /// Hands over the items that are there, in their order. True: there were some.
    fn hand_over(&mut self, port: &Port, from: Rank) -> bool {
        let mut moved = false;
        while let Some((slot, item)) = self.come.front().copied() {
            let (item, answer) = match item {
                // The answer that lies in the cell has not left yet.
                Item::Get { .. } if self.answers >= self.answered.ended() + CELLS as u64 => break,
                Item::Get { offset, bytes, .. } => {
                    let cell = (self.answers % CELLS as u64) as usize;
                    self.answers += 1;
                    (Item::Get { offset, bytes, cell }, Some(Answer { cell, bytes }))
                }
                Item::Put { .. } | Item::Signal { .. } => (item, None),
            };
            let number = self.come.first;
            self.come.pop();
            self.landing.push_back((number, answer));
            port.lands.land(Landing { from, number, slot, item });
            moved = true;
        }
        moved
    }

    /// Tells the other rank what is done, and sends it what it asked for. True: there was something.
    fn tell_landed(&mut self, ctx: &mut OpContext, port: &Port, peer: Rank) -> bool {
        let before = self.landed;
        while let Some((number, answer)) = self.landing.front().copied()
            && port.words.has_reached(FarWord::Landed(peer), number)
        {
            self.landing.pop_front();
            self.landed = number;
            if let Some(Answer { cell, bytes }) = answer {
                let number = self.answered.next();
                self.answered.push(());
                let region = Region::outbound(&self.memory.gets, cell).part(0, bytes);
                if send(ctx, peer, Wire::Answer.header(number, bytes), region, AccessTransfer::AnswerSent, number) {
                    self.answered.end(number);
                    self.forget_answers();
                }
            }
        }
        let is_due = self.landed > before;
        if is_due {
            let control = Header::control(FrameKind::Credit, MatchSpace::DeviceAccess, self.landed, 0, 0);
            ctx.endpoints.send_control(peer, control);
        }
        is_due
    }

    fn forget_answers(&mut self) {
        while self.answered.front().is_some() {
            self.answered.pop();
        }
    }

    /// Drops everything, for good: no word that a stream waits for is written any more.
    fn end(&mut self, ctx: &mut OpContext, peer: Rank) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        let mut cancel = |transfer, first, until| {
            for number in first..until {
                ctx.cancel(OpId::Access { peer, transfer, number }, |_, _| ());
            }
        };
        cancel(AccessTransfer::ItemSent, self.sent.first, self.begun + 1);
        cancel(AccessTransfer::ItemReceived, self.come.first, self.come.next());
        cancel(AccessTransfer::AnswerSent, self.answered.first, self.answered.next());
        cancel(AccessTransfer::AnswerReceived, self.asked.first, self.coming + 1);
        self.sent.things.clear();
        self.come.things.clear();
        self.landing.clear();
    }
}

/// Sends something. True: it has left.
fn send(
    ctx: &mut OpContext,
    peer: Rank,
    header: Header,
    region: Region,
    transfer: AccessTransfer,
    number: u64,
) -> bool {
    let completion = Completion { op: OpId::Access { peer, transfer, number }, step: 0 };
    let eager = ctx.rndv.is_eager(&mut ctx.endpoints, peer, region.len(), false);
    ctx.rndv.send_message(&mut ctx.endpoints, peer, header, Body::of(region), completion, eager)
}

fn store(region: Region, peer: Rank, transfer: AccessTransfer, number: u64) -> RecvBuffer {
    let completion = Completion { op: OpId::Access { peer, transfer, number }, step: 0 };
    RecvBuffer::new(region, RecvAction::Store, completion)
}

/// What travels, as the header of its message has it.
enum Wire {
    /// An item, for the window that has a slot.
    Item(usize, Item),
    /// A piece that was asked for.
    Answer,
}

/// What a message is, in its signature's `operation`.
const PUT: u8 = 1;
const GET: u8 = 2;
const SIGNAL: u8 = 3;
const ANSWER: u8 = 4;

impl Wire {
    /// The header of a message of so many bytes.
    fn header(&self, number: u64, len: usize) -> Header {
        let (slot, operation, root, count) = match *self {
            Wire::Item(slot, Item::Put { offset, cell, .. }) => (slot, PUT, cell, offset as u64),
            Wire::Item(slot, Item::Get { offset, bytes, .. }) => (slot, GET, bytes, offset as u64),
            Wire::Item(slot, Item::Signal { count }) => (slot, SIGNAL, 0, count),
            Wire::Answer => (0, ANSWER, 0, 0),
        };
        let signature = Signature { operation, root: root as u32, count, ..Signature::default() };
        let control = Header::control(FrameKind::Eager, MatchSpace::DeviceAccess, number, 0, len as u64);
        Header { signature, index: slot as u32, ..control }
    }

    /// What a header says; `None` if no rank sends such a header.
    fn of(header: Header) -> Option<Wire> {
        let Signature { operation, root, count, .. } = header.signature;
        let (slot, len) = (header.index as usize, usize::try_from(header.len).ok()?);
        let offset = || usize::try_from(count).ok();
        Some(match operation {
            PUT if len > 0 && (root as usize) < CELLS => {
                Wire::Item(slot, Item::Put { offset: offset()?, bytes: len, cell: root as usize })
            }
            GET if len == 0 => Wire::Item(slot, Item::Get { offset: offset()?, bytes: root as usize, cell: 0 }),
            SIGNAL if len == 0 => Wire::Item(slot, Item::Signal { count }),
            ANSWER => Wire::Answer,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_travels_is_what_comes() {
        let items = [
            Item::Put { offset: 5, bytes: 9, cell: 1 },
            Item::Get { offset: 1 << 40, bytes: 7, cell: 0 },
            Item::Signal { count: 1 << 50 },
        ];
        for item in items {
            let len = if let Item::Put { bytes, .. } = item { bytes } else { 0 };
            let header = Wire::Item(63, item).header(77, len);
            assert_eq!((header.key, header.len), (77, len as u64));
            assert!(matches!(Wire::of(header), Some(Wire::Item(63, came)) if came == item), "{item:?}");
            // Not with another number of bytes than its kind has.
            let other = Header { len: u64::from(len == 0), ..header };
            assert!(Wire::of(other).is_none(), "{item:?}");
        }
        assert!(matches!(Wire::of(Wire::Answer.header(3, 8)), Some(Wire::Answer)));
        let unknown = Wire::Item(0, Item::Put { offset: 0, bytes: 1, cell: CELLS }).header(1, 1);
        assert!(Wire::of(unknown).is_none(), "no such cell");
    }

    #[test]
    fn what_ends_in_any_order_is_counted_in_its_own() {
        let mut order = Order::new();
        (0..3).for_each(|thing| order.push(thing));
        order.end(2);
        assert_eq!((order.front(), order.ended(), order.next()), (None, 0, 4));
        order.end(1);
        while order.front().is_some() {
            order.pop();
        }
        assert_eq!((order.ended(), order.first, order.next()), (2, 3, 4));
        // Numbers that are not known.
        order.end(1);
        order.end(9);
        assert_eq!(order.front(), None);
    }
}
