//! One-sided operations on windows: put, get, signal, wait for a signal. The target's part is taken by whichever of its
//! threads makes progress; see [`crate::window`].
//!
//! A put's payload lands in the target's window as it arrives. The stream keeps order, so a signal that follows a put
//! from the same rank is counted after the put's last byte. Since a long put travels in fragments, between which other
//! messages get their turn, what this rank sends to one peer after it waits here until it is written ([`PutOrder`]).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::engine::body::Body;
use crate::engine::call::Call;
use crate::engine::completion::{Completion, OpId};
use crate::engine::flight_recorder::Bytes;
use crate::engine::frame::{FRAGMENT_BYTES, Failed, FrameKind, Header, MatchSpace};
use crate::engine::progress::Engine;
use crate::engine::recv_buffer::{RecvAction, RecvBuffer, Sink};
use crate::engine::region::Region;
use crate::error::Error;
use crate::signature::Signature;
use crate::types::Rank;
use crate::window::{Window, WindowId};
use crate::work::Work;

/// What is done to a window.
#[derive(Clone, Debug)]
pub(crate) enum RmaOp {
    /// The peer's window gets the region's bytes, from `offset` on.
    Put { offset: usize, from: Region },
    /// The region gets the peer's window's bytes, from `offset` on.
    Get { offset: usize, into: Region },
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
            RmaOp::Signal => Call::Signal { to: peer, window },
            RmaOp::WaitSignal => Call::WaitSignal { from: peer, window },
        }
    }

    /// How much of this process's memory it reads or writes.
    pub(crate) fn bytes(&self) -> Bytes {
        match self {
            RmaOp::Put { from, .. } => Bytes { read: from.len(), written: 0 },
            RmaOp::Get { into, .. } => Bytes { read: 0, written: into.len() },
            RmaOp::Signal | RmaOp::WaitSignal => Bytes::default(),
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
    /// Absent until every rank has told its size.
    window: Option<Window>,
    /// Signals that nobody has waited for yet, by sender.
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

/// The way to one peer.
#[derive(Default)]
struct PutOrder {
    /// The put under way that takes more than one frame.
    long: Option<u64>,
    /// What must not overtake it.
    waiting: VecDeque<Queued>,
}

/// The windows of one communicator and the operations on them.
#[derive(Default)]
pub(crate) struct Windows {
    registered: u64,
    exposed: HashMap<WindowId, Exposed>,
    next: u64,
    in_flight: BTreeMap<u64, InFlight>,
    flows: HashMap<Rank, PutOrder>,
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

    /// Whether this rank has something on its way to other ranks' parts of `window`.
    pub(crate) fn accesses_peers(&self, window: WindowId) -> bool {
        self.in_flight.values().any(|op| op.window == window && op.accesses_peer())
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
        let exposed = Exposed { region, window: None, signals: HashMap::new(), waits: HashMap::new() };
        self.exposed.insert(id, exposed);
        id
    }

    /// Notes what every rank lends: the window can be used.
    pub(crate) fn set_layout(&mut self, window: Window) {
        if let Some(exposed) = self.exposed.get_mut(&window.id()) {
            exposed.window = Some(window);
        }
    }

    /// The window `id`, if it can be used.
    pub(crate) fn window(&self, id: WindowId) -> Option<&Window> {
        self.exposed.get(&id)?.window.as_ref()
    }
}

impl Engine {
    /// Starts an operation on a window that can be used, on a range inside it.
    pub(crate) fn submit_rma(&mut self, request: RmaRequest) {
        let id = self.windows.next;
        self.windows.next += 1;
        let RmaRequest { window, peer, access, timeout, work } = request;
        let call = access.call(peer, window);
        let deadline = work.began().checked_add(timeout);
        self.windows.in_flight.insert(id, InFlight { call, window, peer, deadline, work });
        if matches!(access, RmaOp::WaitSignal) {
            self.wait_for_signal(id, window, peer);
        } else if peer == self.me {
            self.rma_self(id, window, access);
        } else {
            self.rma_peer(id, window, peer, access);
        }
    }

    fn rma_self(&mut self, id: u64, window: WindowId, access: RmaOp) {
        match (access, self.windows.exposed.get_mut(&window)) {
            (RmaOp::Put { offset, from }, Some(exposed)) => exposed.region.part(offset, from.len()).copy_from(&from),
            (RmaOp::Get { offset, mut into }, Some(exposed)) => {
                let len = into.len();
                into.copy_from(&exposed.region.part(offset, len));
            }
            (RmaOp::Signal, _) => self.signalled(self.me, window),
            (RmaOp::WaitSignal, _) | (_, None) => {}
        }
        self.rma_done(id);
    }

    fn rma_peer(&mut self, id: u64, window: WindowId, to: Rank, access: RmaOp) {
        self.connect(to);
        if let Some(cause) = self.lost(to).map(str::to_owned) {
            return self.fail_rma_lost(id, to, &cause);
        }
        let completion = Completion { op: OpId::RmaOp(id), step: 0 };
        let frame =
            |kind, token, len: usize| Header::control(kind, MatchSpace::PointToPoint, window.0, token, len as u64);
        let queued = match access {
            RmaOp::Put { from, .. } if from.len() == 0 => return self.rma_done(id),
            RmaOp::Get { into, .. } if into.len() == 0 => return self.rma_done(id),
            RmaOp::Put { offset, from } => {
                let header = frame(FrameKind::Put, offset as u64, from.len());
                Queued { id, header, body: Body::Memory(from), completion }
            }
            RmaOp::Get { offset, into } => {
                let token = GET_TOKENS | id;
                let signature = Signature { count: offset as u64, ..Signature::default() };
                let header = Header { signature, ..frame(FrameKind::Get, token, into.len()) };
                self.expect(to, token, RecvBuffer { region: into, action: RecvAction::Store, completion, received: 0 });
                Queued { id, header, body: Body::Empty, completion: Completion::NONE }
            }
            RmaOp::Signal | RmaOp::WaitSignal => {
                Queued { id, header: frame(FrameKind::Signal, 0, 0), body: Body::Empty, completion }
            }
        };
        self.windows.flows.entry(to).or_default().waiting.push_back(queued);
        self.advance_flow(to);
    }

    /// Gives the outbox what may go to `to` now.
    fn advance_flow(&mut self, to: Rank) {
        let Some(flow) = self.windows.flows.get_mut(&to) else { return };
        let mut now = Vec::new();
        while flow.long.is_none()
            && let Some(queued) = flow.waiting.pop_front()
        {
            if queued.header.payload() > FRAGMENT_BYTES {
                flow.long = Some(queued.id);
            }
            now.push(queued);
        }
        if flow.long.is_none() {
            self.windows.flows.remove(&to);
        }
        for Queued { header, body, completion, .. } in now {
            self.send(to, header, body, completion);
        }
    }

    fn wait_for_signal(&mut self, id: u64, window: WindowId, from: Rank) {
        let Some(exposed) = self.windows.exposed.get_mut(&window) else { return };
        if let Some(count) = exposed.signals.get_mut(&from).filter(|count| **count > 0) {
            *count -= 1;
            return self.rma_done(id);
        }
        exposed.waits.entry(from).or_default().push_back(id);
        // Its end tells that the peer is gone.
        self.connect(from);
        if let Some(cause) = self.lost(from).map(str::to_owned) {
            self.fail_rma_lost(id, from, &cause);
        }
    }

    // ---- arrivals ----

    /// The part of a window that a peer's frame means; nothing, and a line in the log, if there is no such part.
    fn exposed_part(&self, from: Rank, header: Header, offset: u64) -> Option<Region> {
        let exposed = self.windows.exposed.get(&WindowId(header.key));
        let part = exposed.and_then(|exposed| {
            let (offset, len) = (usize::try_from(offset).ok()?, usize::try_from(header.len).ok()?);
            let inside = offset.checked_add(len)? <= exposed.region.len();
            inside.then(|| exposed.region.part(offset, len))
        });
        if part.is_none() {
            self.log_stray(from, header, offset);
        }
        part
    }

    /// Frames for a window that was deregistered may have been on their way; others are the peer's mistake.
    fn log_stray(&self, from: Rank, header: Header, offset: u64) {
        let known = self.windows.exposed.contains_key(&WindowId(header.key));
        let level = if !known && header.key < self.windows.registered { log::Level::Debug } else { log::Level::Warn };
        let (kind, window, len) = (header.kind, header.key, header.len);
        log::log!(
            level,
            "communicator `{}` rank {}: dropped rank {from}'s {kind:?} of {len} bytes at {offset} of window {window}",
            self.name,
            self.me
        );
    }

    pub(crate) fn put_arrives(&mut self, from: Rank, header: Header) -> Sink {
        let Some(region) = self.exposed_part(from, header, header.token) else { return Sink::Discard };
        let completion = Completion { op: OpId::Window(header.key), step: 0 };
        Sink::Buffer(RecvBuffer { region, action: RecvAction::Store, completion, received: 0 })
    }

    pub(crate) fn get_arrives(&mut self, from: Rank, header: Header) -> Sink {
        match self.exposed_part(from, header, header.signature.count) {
            Some(region) => {
                let data =
                    Header::control(FrameKind::Data, MatchSpace::PointToPoint, header.key, header.token, header.len);
                let completion = Completion { op: OpId::Window(header.key), step: 0 };
                self.send(from, data, Body::Memory(region), completion);
            }
            None => {
                let text = format!("window {} has no such bytes on rank {}", header.key, self.me);
                self.send_failure(from, Failed::Message(header.token), &text);
            }
        }
        Sink::Discard
    }

    pub(crate) fn signal_arrives(&mut self, from: Rank, header: Header) -> Sink {
        if self.windows.exposed.contains_key(&WindowId(header.key)) {
            self.signalled(from, WindowId(header.key));
        } else {
            self.log_stray(from, header, 0);
        }
        Sink::Discard
    }

    /// Gives a signal to the oldest operation that waits for it, or keeps it for the next.
    fn signalled(&mut self, from: Rank, window: WindowId) {
        let Some(exposed) = self.windows.exposed.get_mut(&window) else { return };
        match exposed.waits.get_mut(&from).and_then(VecDeque::pop_front) {
            Some(id) => self.rma_done(id),
            None => *exposed.signals.entry(from).or_default() += 1,
        }
    }

    // ---- ends ----

    /// Ends an operation well: its bytes are written or there, its signal is written or taken.
    pub(crate) fn rma_done(&mut self, id: u64) {
        let Some(op) = self.windows.in_flight.remove(&id) else { return };
        self.finish(op.work, Ok(()), None);
        if let Some(flow) = self.windows.flows.get_mut(&op.peer)
            && flow.long == Some(id)
        {
            flow.long = None;
            self.advance_flow(op.peer);
        }
    }

    fn fail_rma(&mut self, id: u64, error: impl FnOnce(String) -> Error) {
        let Some(op) = self.windows.in_flight.remove(&id) else { return };
        self.cancel(OpId::RmaOp(id));
        if let Some(flow) = self.windows.flows.get_mut(&op.peer) {
            flow.waiting.retain(|queued| queued.id != id);
            flow.long = flow.long.filter(|long| *long != id);
        }
        if let Some(exposed) = self.windows.exposed.get_mut(&op.window)
            && let Some(waits) = exposed.waits.get_mut(&op.peer)
        {
            waits.retain(|wait| *wait != id);
        }
        let error = error(op.call.to_string());
        self.finish(op.work, Err(error), None);
        self.advance_flow(op.peer);
    }

    fn fail_rma_lost(&mut self, id: u64, rank: Rank, cause: &str) {
        let Some(op) = self.windows.in_flight.get(&id) else { return };
        let error = Error::PeerLost { operation: op.call.to_string(), rank: rank.0, cause: cause.to_owned() };
        self.fail_rma(id, |_| error.clone());
        self.report_lost(rank, &error);
    }

    pub(crate) fn rma_failed_elsewhere(&mut self, id: u64, text: &str) {
        self.fail_rma(id, |operation| Error::Mismatch { operation, detail: text.to_owned() });
    }

    /// The operations that `wanted` picks, the oldest first.
    fn accesses(&self, wanted: impl Fn(&InFlight) -> bool) -> Vec<u64> {
        self.windows.in_flight.iter().filter(|(_, op)| wanted(op)).map(|(id, _)| *id).collect()
    }

    /// Takes this rank's part of a window back: nothing of the engine refers to its memory afterwards.
    pub(crate) fn conceal(&mut self, window: WindowId) {
        for id in self.accesses(|op| op.window == window) {
            self.fail_rma(id, |operation| Error::Mismatch { operation, detail: WITHDRAWN.to_owned() });
        }
        self.windows.exposed.remove(&window);
        self.cancel(OpId::Window(window.0));
    }

    /// Ends the operations with `peer`. Signals that it sent before stay.
    pub(crate) fn lose_rma(&mut self, peer: Rank, cause: &str) {
        for id in self.accesses(|op| op.peer == peer) {
            self.fail_rma_lost(id, peer, cause);
        }
        self.windows.flows.remove(&peer);
    }

    pub(crate) fn end_rma(&mut self, error: &dyn Fn(String) -> Error) {
        self.windows.flows.clear();
        for id in self.accesses(|_| true) {
            self.fail_rma(id, error);
        }
    }

    /// Ends operations whose time is over. A signal must not arrive without the put before it, so what was to follow
    /// one that ends goes with it.
    pub(crate) fn check_rma_deadlines(&mut self, now: Instant) {
        for id in self.accesses(|op| op.deadline.is_some_and(|deadline| deadline <= now)) {
            let Some(op) = self.windows.in_flight.get(&id) else { continue };
            let (peer, waited) = (op.peer, op.work.age());
            let detail = match op.call {
                Call::Get { .. } => format!("rank {peer} did not answer"),
                Call::WaitSignal { .. } => format!("rank {peer} did not signal"),
                _ => format!("rank {peer} did not take it"),
            };
            let later = match op.call {
                Call::Put { .. } => self.accesses(|op| op.peer == peer && op.accesses_peer()),
                _ => Vec::new(),
            };
            let error = self.timeout(peer.index()..peer.index() + 1, waited, format!("access {id}: {detail}"));
            self.fail_rma(id, error);
            for other in later.into_iter().filter(|other| *other > id) {
                let detail = format!("a put to rank {peer} before it failed");
                self.fail_rma(other, |operation| Error::Timeout { operation, waited, detail });
            }
        }
    }
}

/// Tokens of gets have this bit, which the tokens that their targets give messages never reach.
const GET_TOKENS: u64 = 1 << 63;

/// What became of the window of an operation that is cut off.
const WITHDRAWN: &str = "the window was deregistered in the meantime";

#[cfg(test)]
mod tests;
