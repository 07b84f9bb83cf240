//! One-sided operations on windows: put, get, accumulate, flush, signal, wait for a signal. The target's part is taken by
//! whichever of its threads makes progress; see [`crate::window`].
//!
//! A put's payload lands in the target's window as it arrives. The stream keeps order, so a signal that follows a put
//! from the same rank is counted after the put's last byte. Since a long put travels in fragments, between which other
//! messages get their turn, what this rank sends to one peer after it waits here until it is written ([`PutOrder`]). So the
//! answer to a flush says that what was put before is there. What comes after a get waits for its bytes, which the target may
//! send from the window as it is then. Where all ranks have mapped all parts of a window, puts and gets
//! are copies that the caller makes, unless something that travels comes before; see
//! [`Communicator::access`](crate::comm::communicator). Where a transport reads the target's memory by itself, so do gets
//! ([`RemoteReads`]), unless something that this rank has put there is unflushed. A target's elements are added to under the engine's lock, so
//! accumulations of several ranks do not lose each other.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::engine::body::Body;
use crate::engine::call::Call;
use crate::engine::completion::{Completion, OpId};
use crate::engine::context::OpContext;
use crate::engine::endpoint::Endpoints;
use crate::engine::flight_recorder::Bytes;
use crate::engine::frame::{DEREGISTERED, End, FRAGMENT_BYTES, Failed, FrameKind, Header, MatchSpace};
use crate::engine::recv_buffer::{RecvAction, RecvBuffer, Sink};
use crate::engine::reduce::Operands;
use crate::engine::region::{Region, WindowParts};
use crate::engine::remote_reads::{ReadEnd, Remote, RemoteRead, RemoteReads};
use crate::error::Error;
use crate::signature::Signature;
use crate::sync::Arc;
use crate::sys::segment::MappedMemory;
use crate::transport::Exposure;
use crate::types::{DType, Rank, ReduceOp};
use crate::window::{GetPath, Window, WindowId};
use crate::work::Work;

/// What is done to a window.
#[derive(Clone, Debug)]
pub(crate) enum RmaOp {
    /// The peer's window gets the region's bytes, from `offset` on.
    Put { offset: usize, from: Region },
    /// The region gets the peer's window's bytes, from `offset` on.
    Get { offset: usize, into: Region },
    /// The region's elements are added to the peer's window's, from `offset` on.
    Accumulate { offset: usize, from: Region, dtype: DType },
    /// What was put and accumulated before is waited for.
    Flush,
    /// The peer gets a signal.
    Signal,
    /// A signal of the peer is taken.
    WaitSignal,
}

impl RmaOp {
    /// The operation that does this to `peer`'s part of `window`.
    pub(crate) fn call(&self, peer: Rank, window: WindowId) -> Call {
        match self {
            RmaOp::Put { from, .. } => Call::Put { bytes: from.len(), to: peer, window },
            RmaOp::Get { into, .. } => Call::Get { bytes: into.len(), from: peer, window },
            RmaOp::Accumulate { from, .. } => Call::Accumulate { bytes: from.len(), to: peer, window },
            RmaOp::Flush => Call::Flush { to: peer, window },
            RmaOp::Signal => Call::Signal { to: peer, window },
            RmaOp::WaitSignal => Call::WaitSignal { from: peer, window },
        }
    }

    /// How much of this process's memory it reads or writes.
    pub(crate) fn bytes(&self) -> Bytes {
        match self {
            RmaOp::Put { from, .. } | RmaOp::Accumulate { from, .. } => Bytes { read: from.len(), written: 0 },
            RmaOp::Get { into, .. } => Bytes { read: 0, written: into.len() },
            RmaOp::Flush | RmaOp::Signal | RmaOp::WaitSignal => Bytes::default(),
        }
    }

    /// The range of the peer's part that it reads or writes: where it begins, and its length.
    pub(crate) fn range(&self) -> Option<(usize, usize)> {
        match self {
            RmaOp::Put { offset, from } | RmaOp::Accumulate { offset, from, .. } => Some((*offset, from.len())),
            RmaOp::Get { offset, into } => Some((*offset, into.len())),
            RmaOp::Flush | RmaOp::Signal | RmaOp::WaitSignal => None,
        }
    }
}

/// A one-sided operation as it is submitted.
pub(crate) struct RmaRequest {
    pub(crate) window: WindowId,
    pub(crate) peer: Rank,
    pub(crate) access: RmaOp,
    pub(crate) timeout: Duration,
    pub(crate) work: Work,
}

/// An operation in flight.
struct InFlight {
    call: Call,
    window: WindowId,
    peer: Rank,
    deadline: Option<Instant>,
    work: Work,
}

impl InFlight {
    /// Whether it is for the peer to take or to answer.
    fn accesses_peer(&self) -> bool {
        !matches!(self.call, Call::WaitSignal { .. })
    }
}

/// This rank's part of a window.
struct Exposed {
    region: Region,
    /// What lets peers read it without this rank's help, where a transport can.
    exposure: Option<Exposure>,
    /// The parts that this rank can read so, by rank; empty if there are none.
    remotes: Vec<Option<Remote>>,
    /// Absent until every rank has told its size.
    window: Option<Window>,
    /// Where all ranks can access all parts themselves.
    parts: Option<Arc<WindowParts>>,
    /// Signals that no operation has waited for yet, by sender.
    signals: HashMap<Rank, u64>,
    /// Operations that wait for a signal, by sender, the oldest first.
    waits: HashMap<Rank, VecDeque<u64>>,
}

/// A frame that has not been given to the outbox yet.
struct Queued {
    id: u64,
    header: Header,
    body: Body,
    completion: Completion,
}

/// The order of what goes to one peer.
#[derive(Default)]
struct PutOrder {
    /// The put under way that takes more than one frame.
    long: Option<u64>,
    /// The gets under way, which only other gets may overtake.
    gets: BTreeSet<u64>,
    /// What must not overtake them.
    waiting: VecDeque<Queued>,
}

impl PutOrder {
    /// The next that may go now.
    fn next(&mut self) -> Option<Queued> {
        let is_free = |next: &Queued| self.gets.is_empty() || next.header.kind == FrameKind::Get;
        self.waiting.front().filter(|next| self.long.is_none() && is_free(next))?;
        let next = self.waiting.pop_front()?;
        if next.header.kind == FrameKind::Get {
            self.gets.insert(next.id);
        } else if next.header.payload() > FRAGMENT_BYTES {
            self.long = Some(next.id);
        }
        Some(next)
    }

    /// Nothing waits for operation `id` any more.
    fn ends(&mut self, id: u64) {
        self.gets.remove(&id);
        self.long = self.long.filter(|long| *long != id);
    }

    /// Whether nothing is under way or waits.
    fn is_idle(&self) -> bool {
        self.long.is_none() && self.gets.is_empty() && self.waiting.is_empty()
    }
}

/// The windows of one communicator and the operations on them.
#[derive(Default)]
pub(crate) struct Windows {
    registered: u64,
    exposed: HashMap<WindowId, Exposed>,
    next: u64,
    in_flight: BTreeMap<u64, InFlight>,
    flows: HashMap<Rank, PutOrder>,
    /// The last operation that has changed a rank's part, where no flush after it has been answered.
    unflushed: BTreeMap<(WindowId, Rank), u64>,
    /// How many callers copy to or from parts of a window by themselves.
    copies: HashMap<WindowId, usize>,
    reads: RemoteReads,
}

impl Windows {
    /// Whether no operation is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Whether other ranks may access this one's memory at any time.
    pub(crate) fn is_open(&self) -> bool {
        !self.exposed.is_empty()
    }

    /// Ends other ranks' access to this one's memory.
    pub(crate) fn unexpose_all(&mut self) {
        self.exposed.clear();
    }

    /// Whether this rank has something on its way to parts of `window`, or copies there.
    pub(crate) fn accesses_parts(&self, window: WindowId) -> bool {
        self.copies.contains_key(&window) || self.in_flight.values().any(|op| op.window == window && op.accesses_peer())
    }

    /// A caller begins to copy to or from a part of `window` by itself.
    pub(crate) fn copy_begins(&mut self, window: WindowId) {
        *self.copies.entry(window).or_default() += 1;
    }

    /// Such a copy has ended.
    pub(crate) fn copy_ends(&mut self, window: WindowId) {
        if let Entry::Occupied(mut copies) = self.copies.entry(window) {
            *copies.get_mut() -= 1;
            if *copies.get() == 0 {
                copies.remove();
            }
        }
    }

    /// Whether callers copy to or from parts of any window by themselves.
    pub(crate) fn has_copies(&self) -> bool {
        !self.copies.is_empty()
    }

    /// The ranks to whose parts of `window` this rank has put something that no flush was answered for.
    pub(crate) fn unflushed(&self, window: WindowId) -> Vec<Rank> {
        let all = (window, Rank(0))..=(window, Rank(u32::MAX));
        self.unflushed.range(all).map(|((_, rank), _)| *rank).collect()
    }

    /// How many gets this rank has read in the memory of `peer` without its help.
    pub(crate) fn remote_reads(&self, peer: Rank) -> u64 {
        self.reads.count(peer)
    }

    /// The id that the next operation gets.
    pub(crate) fn next_id(&self) -> u64 {
        self.next
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.in_flight.values().filter_map(|op| op.deadline).min()
    }

    /// Lends `region` to the other ranks, from now on.
    pub(crate) fn expose(&mut self, region: Region) -> WindowId {
        let id = WindowId(self.registered);
        self.registered += 1;
        let exposed = Exposed {
            region,
            exposure: None,
            remotes: Vec::new(),
            window: None,
            parts: None,
            signals: HashMap::new(),
            waits: HashMap::new(),
        };
        self.exposed.insert(id, exposed);
        id
    }

    /// Keeps what lets peers read this rank's part, until it is concealed.
    pub(crate) fn keep_exposure(&mut self, id: WindowId, exposure: Exposure) {
        if let Some(exposed) = self.exposed.get_mut(&id) {
            exposed.exposure = Some(exposure);
        }
    }

    /// Notes which parts this rank can read without their ranks' help.
    pub(crate) fn set_remotes(&mut self, id: WindowId, remotes: Vec<Option<Remote>>) {
        if let Some(exposed) = self.exposed.get_mut(&id) {
            exposed.remotes = remotes;
        }
    }

    /// Notes what every rank lends: the window can be used. `mapped` are the other ranks' parts, if all ranks have mapped all.
    pub(crate) fn set_layout(&mut self, me: Rank, window: Window, mapped: Option<Vec<MappedMemory>>) {
        if let Some(exposed) = self.exposed.get_mut(&window.id()) {
            exposed.parts = mapped.map(|mapped| Arc::new(WindowParts::new(me.index(), &exposed.region, mapped)));
            exposed.window = Some(window);
        }
    }

    /// The parts of a window, if all ranks access them themselves.
    pub(crate) fn parts(&self, id: WindowId) -> Option<Arc<WindowParts>> {
        self.exposed.get(&id)?.parts.clone()
    }

    /// The address of this rank's part of a window in the host's memory.
    pub(crate) fn own_address(&self, id: WindowId) -> Option<u64> {
        self.exposed.get(&id)?.region.address()
    }

    /// The parts of a window, if this rank may access that of `peer` by itself: nothing that it has put there before is on its way.
    pub(crate) fn reached(&self, id: WindowId, peer: Rank) -> Option<Arc<WindowParts>> {
        let is_settled = !self.unflushed.contains_key(&(id, peer)) && !self.flows.contains_key(&peer);
        self.parts(id).filter(|_| is_settled)
    }

    /// How a get of the part of `peer` in the host's memory goes, where nothing that this rank has put there is on its way.
    pub(crate) fn get_path(&self, endpoints: &Endpoints, id: WindowId, peer: Rank) -> GetPath {
        let has_key = |exposed: &Exposed| exposed.remotes.get(peer.index()).is_some_and(Option::is_some);
        if peer == endpoints.me() || self.parts(id).is_some() {
            GetPath::Mapped
        } else if self.exposed.get(&id).is_some_and(has_key) && endpoints.can_read(peer) {
            GetPath::RemoteReads
        } else {
            GetPath::Messages
        }
    }

    /// The window `id`, if it can be used.
    pub(crate) fn window(&self, id: WindowId) -> Option<&Window> {
        self.exposed.get(&id)?.window.as_ref()
    }

    // ---- starts ----

    /// Starts an operation on a window that can be used, on a range inside it.
    pub(crate) fn submit(&mut self, ctx: &mut OpContext, request: RmaRequest) {
        let id = self.next;
        self.next += 1;
        let RmaRequest { window, peer, access, timeout, work } = request;
        let call = access.call(peer, window);
        let deadline = work.began().checked_add(timeout);
        self.in_flight.insert(id, InFlight { call, window, peer, deadline, work });
        if matches!(access, RmaOp::WaitSignal) {
            self.wait_for_signal(ctx, id, window, peer);
        } else if peer == ctx.me {
            self.access_own(ctx, id, window, access);
        } else {
            self.access_peer(ctx, id, window, peer, access);
        }
    }

    fn access_own(&mut self, ctx: &mut OpContext, id: u64, window: WindowId, access: RmaOp) {
        match (access, self.exposed.get_mut(&window)) {
            (RmaOp::Put { offset, from }, Some(exposed)) => {
                exposed.region.part(offset, from.len()).copy_from(&from, ctx.rndv.team)
            }
            (RmaOp::Get { offset, mut into }, Some(exposed)) => {
                let len = into.len();
                into.copy_from(&exposed.region.part(offset, len), ctx.rndv.team);
            }
            (RmaOp::Accumulate { offset, from, dtype }, Some(exposed)) => {
                // A copy: the program may add a part of the window to another part of it.
                let bytes = from.to_vec(0, from.len());
                adder(exposed.region.part(offset, bytes.len()), window, dtype).take(&bytes);
            }
            (RmaOp::Signal, _) => self.signalled(ctx, ctx.me, window),
            (RmaOp::Flush | RmaOp::WaitSignal, _) | (_, None) => {}
        }
        self.done(ctx, id);
    }

    fn access_peer(&mut self, ctx: &mut OpContext, id: u64, window: WindowId, to: Rank, access: RmaOp) {
        ctx.endpoints.expect(to);
        if let Some(cause) = ctx.lost(to) {
            return self.fail_lost(ctx, id, cause);
        }
        let completion = Completion { op: OpId::RmaOp(id), step: 0 };
        let frame =
            |kind, token, len: usize| Header::control(kind, MatchSpace::PointToPoint, window.0, token, len as u64);
        let queued = match access {
            RmaOp::Put { from, .. } | RmaOp::Accumulate { from, .. } if from.len() == 0 => return self.done(ctx, id),
            RmaOp::Flush if !self.unflushed.contains_key(&(window, to)) => return self.done(ctx, id),
            RmaOp::Get { into, .. } if into.len() == 0 => return self.done(ctx, id),
            RmaOp::Put { offset, from } => {
                self.unflushed.insert((window, to), id);
                let header = frame(FrameKind::Put, offset as u64, from.len());
                Queued { id, header, body: Body::Memory(from), completion }
            }
            RmaOp::Accumulate { offset, from, dtype } => {
                self.unflushed.insert((window, to), id);
                let signature = Signature { dtype: dtype as u8, ..Signature::default() };
                let header = Header { signature, ..frame(FrameKind::Accumulate, offset as u64, from.len()) };
                Queued { id, header, body: Body::Memory(from), completion }
            }
            RmaOp::Flush => {
                Queued { id, header: frame(FrameKind::Flush, id, 0), body: Body::Empty, completion: Completion::NONE }
            }
            RmaOp::Get { offset, into } => match self.read(ctx, id, window, to, offset, into) {
                Ok(()) => return,
                Err(into) => Windows::get_by_frame(ctx, id, window, to, offset, into),
            },
            RmaOp::Signal | RmaOp::WaitSignal => {
                Queued { id, header: frame(FrameKind::Signal, 0, 0), body: Body::Empty, completion }
            }
        };
        self.flows.entry(to).or_default().waiting.push_back(queued);
        self.advance(ctx, to);
    }

    /// Begins to read in the peer's memory, where that is possible and nothing that this rank has put there is on its way. Otherwise
    /// gives back where the bytes go.
    fn read(
        &mut self,
        ctx: &mut OpContext,
        id: u64,
        window: WindowId,
        peer: Rank,
        offset: usize,
        into: Region,
    ) -> Result<(), Region> {
        let remote = self.exposed.get(&window).and_then(|exposed| exposed.remotes.get(peer.index())?.clone());
        let is_settled = !self.unflushed.contains_key(&(window, peer))
            && self.flows.get(&peer).is_none_or(|flow| flow.long.is_none() && flow.waiting.is_empty());
        let Some(remote) = remote.filter(|_| is_settled) else { return Err(into) };
        let read = RemoteRead { id, peer, remote, offset, into };
        self.reads.begin(&mut ctx.endpoints, read).map_err(|read| read.into)?;
        self.flows.entry(peer).or_default().gets.insert(id);
        Ok(())
    }

    /// The frame that asks the peer for bytes, which are expected.
    fn get_by_frame(ctx: &mut OpContext, id: u64, window: WindowId, peer: Rank, offset: usize, into: Region) -> Queued {
        let token = GET_TOKENS | id;
        let header = Header::control(FrameKind::Get, MatchSpace::PointToPoint, window.0, token, into.len() as u64);
        let header = Header { signature: Signature { count: offset as u64, ..Signature::default() }, ..header };
        let completion = Completion { op: OpId::RmaOp(id), step: 0 };
        ctx.rndv.expect(peer, token, RecvBuffer::new(into, RecvAction::Store, completion));
        Queued { id, header, body: Body::Empty, completion: Completion::NONE }
    }

    /// Goes on with what is read in peers' memory. True: something moved.
    pub(crate) fn progress(&mut self, ctx: &mut OpContext) -> bool {
        if self.reads.is_empty() {
            return false;
        }
        let mut ended = Vec::new();
        let moved = self.reads.progress(&mut ctx.endpoints, &mut ended);
        for end in ended {
            match end {
                ReadEnd::Read(id) => self.done(ctx, id),
                ReadEnd::Unreadable(RemoteRead { id, peer, offset, into, .. }) => {
                    let Some(window) = self.in_flight.get(&id).map(|op| op.window) else { continue };
                    // It goes by a frame, before all that was to follow it.
                    let queued = Windows::get_by_frame(ctx, id, window, peer, offset, into);
                    self.flows.entry(peer).or_default().waiting.push_front(queued);
                    self.advance(ctx, peer);
                }
            }
        }
        moved
    }

    /// Gives the outbox what may go to `to` now.
    fn advance(&mut self, ctx: &mut OpContext, to: Rank) {
        let Some(flow) = self.flows.get_mut(&to) else { return };
        let now: Vec<Queued> = std::iter::from_fn(|| flow.next()).collect();
        if flow.is_idle() {
            self.flows.remove(&to);
        }
        for Queued { header, body, completion, .. } in now {
            if ctx.endpoints.send(to, header, body, completion)
                && let OpId::RmaOp(id) = completion.op
            {
                self.done(ctx, id);
            }
        }
    }

    fn wait_for_signal(&mut self, ctx: &mut OpContext, id: u64, window: WindowId, from: Rank) {
        let Some(exposed) = self.exposed.get_mut(&window) else { return };
        if let Some(count) = exposed.signals.get_mut(&from).filter(|count| **count > 0) {
            *count -= 1;
            return self.done(ctx, id);
        }
        exposed.waits.entry(from).or_default().push_back(id);
        // Its end tells that the peer is gone.
        ctx.endpoints.expect(from);
        if let Some(cause) = ctx.lost(from) {
            self.fail_lost(ctx, id, cause);
        }
    }

    // ---- arrivals ----

    /// The part of a window that a peer's frame means; nothing, and a line in the log, if there is no such part.
    fn exposed_part(&self, ctx: &OpContext, from: Rank, header: Header, offset: u64) -> Option<Region> {
        let exposed = self.exposed.get(&WindowId(header.key));
        let part = exposed.and_then(|exposed| {
            let (offset, len) = (usize::try_from(offset).ok()?, usize::try_from(header.len).ok()?);
            let inside = offset.checked_add(len)? <= exposed.region.len();
            inside.then(|| exposed.region.part(offset, len))
        });
        if part.is_none() {
            self.log_stray(ctx, from, header, offset);
        }
        part
    }

    /// Frames for a window that was deregistered may have been on their way; others are the peer's mistake.
    fn log_stray(&self, ctx: &OpContext, from: Rank, header: Header, offset: u64) {
        let known = self.exposed.contains_key(&WindowId(header.key));
        let level = if !known && header.key < self.registered { log::Level::Debug } else { log::Level::Warn };
        let (kind, window, len) = (header.kind, header.key, header.len);
        log::log!(
            level,
            "communicator `{}` rank {}: dropped rank {from}'s {kind:?} of {len} bytes at {offset} of window {window}",
            ctx.endpoints.name(),
            ctx.me
        );
    }

    pub(crate) fn put_arrives(&self, ctx: &OpContext, from: Rank, header: Header) -> Sink {
        let Some(region) = self.exposed_part(ctx, from, header, header.token) else { return Sink::Discard };
        let completion = Completion { op: OpId::Window(header.key), step: 0 };
        Sink::Buffer(RecvBuffer::new(region, RecvAction::Store, completion))
    }

    pub(crate) fn accumulate_arrives(&self, ctx: &OpContext, from: Rank, header: Header) -> Sink {
        let dtype = DType::ALL.get(usize::from(header.signature.dtype)).copied();
        let Some(dtype) =
            dtype.filter(|dtype| ReduceOp::Sum.supports(*dtype) && header.len.is_multiple_of(dtype.size() as u64))
        else {
            self.log_stray(ctx, from, header, header.token);
            return Sink::Discard;
        };
        let Some(region) = self.exposed_part(ctx, from, header, header.token) else { return Sink::Discard };
        Sink::Buffer(adder(region, WindowId(header.key), dtype))
    }

    /// Everything that came before on the stream is in the window already.
    pub(crate) fn flush_arrives(&self, ctx: &mut OpContext, from: Rank, header: Header) {
        let is_there = self.exposed.contains_key(&WindowId(header.key));
        let answer = Header::control(FrameKind::Flushed, MatchSpace::PointToPoint, header.key, header.token, 0);
        ctx.endpoints.send_control(from, Header { index: u32::from(!is_there), ..answer });
    }

    pub(crate) fn flushed_arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) {
        let id = header.token;
        let Some(op) = self.in_flight.get(&id).filter(|op| op.peer == from && matches!(op.call, Call::Flush { .. }))
        else {
            // The answer to a flush that has timed out, or the peer's mistake.
            return;
        };
        if header.index != 0 {
            return self.failed_elsewhere(ctx, id, DEREGISTERED);
        }
        let key = (op.window, from);
        if self.unflushed.get(&key).is_some_and(|last| *last < id) {
            self.unflushed.remove(&key);
        }
        self.done(ctx, id);
    }

    pub(crate) fn get_arrives(&self, ctx: &mut OpContext, from: Rank, header: Header) {
        match self.exposed_part(ctx, from, header, header.signature.count) {
            Some(region) => {
                let data =
                    Header::control(FrameKind::Data, MatchSpace::PointToPoint, header.key, header.token, header.len);
                let completion = Completion { op: OpId::Window(header.key), step: 0 };
                ctx.endpoints.send(from, data, Body::Memory(region), completion);
            }
            None => {
                let text = format!("window {} has no such bytes on rank {}", header.key, ctx.me);
                let failed = Failed::Message { token: header.token, by: End::Sender };
                ctx.endpoints.send_failure(from, failed, &text);
            }
        }
    }

    pub(crate) fn signal_arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) {
        if self.exposed.contains_key(&WindowId(header.key)) {
            self.signalled(ctx, from, WindowId(header.key));
        } else {
            self.log_stray(ctx, from, header, 0);
        }
    }

    /// Gives a signal to the oldest operation that waits for it, or keeps it for the next.
    fn signalled(&mut self, ctx: &mut OpContext, from: Rank, window: WindowId) {
        let Some(exposed) = self.exposed.get_mut(&window) else { return };
        match exposed.waits.get_mut(&from).and_then(VecDeque::pop_front) {
            Some(id) => self.done(ctx, id),
            None => *exposed.signals.entry(from).or_default() += 1,
        }
    }

    // ---- ends ----

    /// Ends an operation well: its bytes are written or there, its signal is written or taken.
    pub(crate) fn done(&mut self, ctx: &mut OpContext, id: u64) {
        let Some(op) = self.in_flight.remove(&id) else { return };
        ctx.finish(op.work, Ok(()), None);
        if let Some(flow) = self.flows.get_mut(&op.peer) {
            flow.ends(id);
            self.advance(ctx, op.peer);
        }
    }

    fn fail(&mut self, ctx: &mut OpContext, id: u64, error: impl FnOnce(String) -> Error) {
        let Some(op) = self.remove(ctx, id) else { return };
        ctx.finish(op.work, Err(error(op.call.to_string())), None);
        self.advance(ctx, op.peer);
    }

    fn fail_lost(&mut self, ctx: &mut OpContext, id: u64, cause: String) {
        let Some(op) = self.remove(ctx, id) else { return };
        ctx.desert(ctx.suspect(op.peer, cause, op.deadline), op.call, op.work);
    }

    /// Takes an operation out that has not ended: nothing of the engine refers to its memory afterwards.
    fn remove(&mut self, ctx: &mut OpContext, id: u64) -> Option<InFlight> {
        let op = self.in_flight.remove(&id)?;
        ctx.cancel(OpId::RmaOp(id), |_, _| ());
        self.reads.cancel(id);
        if let Some(flow) = self.flows.get_mut(&op.peer) {
            flow.waiting.retain(|queued| queued.id != id);
            flow.ends(id);
        }
        if let Some(exposed) = self.exposed.get_mut(&op.window)
            && let Some(waits) = exposed.waits.get_mut(&op.peer)
        {
            waits.retain(|wait| *wait != id);
        }
        Some(op)
    }

    /// The target of an operation has given it up.
    pub(crate) fn failed_elsewhere(&mut self, ctx: &mut OpContext, id: u64, text: &str) {
        self.fail(ctx, id, |operation| Error::Mismatch { operation, detail: text.to_owned() });
    }

    /// The operations that `wanted` picks, the oldest first.
    fn accesses(&self, wanted: impl Fn(&InFlight) -> bool) -> Vec<u64> {
        self.in_flight.iter().filter(|(_, op)| wanted(op)).map(|(id, _)| *id).collect()
    }

    /// Takes this rank's part of a window back: nothing of the engine refers to its memory afterwards.
    pub(crate) fn conceal(&mut self, ctx: &mut OpContext, window: WindowId) {
        // The latest first: what follows one that ends must not go in its place.
        for id in self.accesses(|op| op.window == window).into_iter().rev() {
            self.fail(ctx, id, |operation| Error::Mismatch { operation, detail: DEREGISTERED.to_owned() });
        }
        self.exposed.remove(&window);
        self.unflushed.retain(|(of, _), _| *of != window);
        ctx.cancel(OpId::Window(window.0), |_, _| ());
    }

    /// Ends the operations with `peer`. Signals that it sent before stay.
    pub(crate) fn lose(&mut self, ctx: &mut OpContext, peer: Rank, cause: &str) {
        for id in self.accesses(|op| op.peer == peer) {
            self.fail_lost(ctx, id, cause.to_owned());
        }
        self.flows.remove(&peer);
        self.reads.lose(peer);
    }

    pub(crate) fn end(&mut self, ctx: &mut OpContext, error: &dyn Fn(String) -> Error) {
        self.flows.clear();
        for id in self.accesses(|_| true) {
            self.fail(ctx, id, error);
        }
    }

    /// Ends operations whose time is over. A signal must not arrive without the put before it, so what was to follow
    /// one that ends goes with it.
    pub(crate) fn check_deadlines(&mut self, ctx: &mut OpContext, now: Instant) {
        for id in self.accesses(|op| op.deadline.is_some_and(|deadline| deadline <= now)) {
            let Some(op) = self.in_flight.get(&id) else { continue };
            let (peer, waited) = (op.peer, op.work.age());
            let detail = match op.call {
                Call::Get { .. } | Call::Flush { .. } => format!("rank {peer} did not answer"),
                Call::WaitSignal { .. } => format!("rank {peer} did not signal"),
                _ => format!("rank {peer} did not take it"),
            };
            let failed = if matches!(op.call, Call::Put { .. }) { "a put" } else { "an accumulate" };
            let later = match op.call {
                Call::Put { .. } | Call::Accumulate { .. } => self.accesses(|op| op.peer == peer && op.accesses_peer()),
                _ => Vec::new(),
            };
            let error = ctx.endpoints.timeout(peer.index()..peer.index() + 1, waited, format!("access {id}: {detail}"));
            // The latest first: none goes because the one before it has ended.
            for other in later.into_iter().filter(|other| *other > id).rev() {
                let detail = format!("{failed} to rank {peer} before it failed");
                self.fail(ctx, other, |operation| Error::Timeout { operation, waited, detail });
            }
            self.fail(ctx, id, error);
        }
    }
}

/// What adds elements that come to a part of a window.
fn adder(region: Region, window: WindowId, dtype: DType) -> RecvBuffer {
    let action = RecvAction::Reduce(Operands::Elements(ReduceOp::Sum, dtype));
    let completion = Completion { op: OpId::Window(window.0), step: 0 };
    RecvBuffer::new(region, action, completion)
}

/// Tokens of gets have this bit, which the tokens that their targets give messages never reach.
const GET_TOKENS: u64 = 1 << 63;

#[cfg(test)]
mod tests;
