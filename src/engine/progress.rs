//! All state of a communicator's operations, and the loop that moves it forward.

use std::collections::hash_map;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::engine::buffered_send::{Announced, Detaching};
use crate::engine::call::Call;
use crate::engine::collective::Collectives;
use crate::engine::connector::{Route, Way};
use crate::engine::failures::Losses;
use crate::engine::flight_recorder::{Bytes, Recorder};
use crate::engine::frame::{FAIL_TEXT_MAX, FRAGMENT_BYTES, FrameKind, Grant, Header, Lane, Scope, Signature};
use crate::engine::heartbeat::SendHeartbeat;
use crate::engine::inbox::{Inbox, Placement, Sink};
use crate::engine::message::{Messages, credit_for};
use crate::engine::outbox::{Body, OpRef, Outbox, Owner};
use crate::engine::reach::LINGER;
use crate::engine::single_copy::Readings;
use crate::engine::wait_policy::Cpu;
use crate::engine::window::Windows;
use crate::error::{Error, LinkDown};
use crate::sys::tcp_info::Traffic;
use crate::topo::Topology;
use crate::transport::Transport;
use crate::types::Rank;
use crate::work::{Entry, Work};

/// One other rank, as this one sees it.
#[derive(Default)]
pub(crate) struct Peer {
    pub(super) way: Way,
    pub(super) outbox: Outbox,
    pub(crate) inbox: Option<Box<Inbox>>,
    /// The inbox is being emptied, and is not in its place meanwhile. What it brings may have others emptied in between.
    pub(super) is_pumped: bool,
    /// The stream to it broke: why and when. What it sent before may still be on its way.
    pub(super) ending: Option<(LinkDown, Instant)>,
    /// Why it cannot be reached any more.
    pub(super) lost: Option<String>,
    /// What the kernel knew of the connection to it when it was lost.
    last_traffic: Option<Traffic>,
    /// What it said of a loss, for which it will leave.
    pub(crate) reported: Option<String>,
    /// The others know that it is lost.
    told: bool,
    /// One more than the last collective that it is known to have called.
    pub(crate) called: u64,
    /// Until when its last heartbeat tells that it waits in a collective.
    pub(crate) heard_until: Option<Instant>,
    /// It cannot read this process's memory.
    cannot_read: bool,
    /// Bytes of eager messages that it may still keep unread.
    pub(crate) unread: u64,
    /// Bytes of its eager messages that were taken since it was told.
    pub(crate) taken: u64,
}

/// An operation as two ranks know it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Failed {
    /// A collective by its sequence number, perhaps because a rank is lost.
    Collective { sequence: u64, scope: Scope, lost: Option<Rank> },
    /// By its sender's token.
    Message(u64),
}

/// Works that ended: mostly one a turn.
pub(crate) type Finished = SmallVec<[Work; 1]>;

/// What a communicator's operations share.
pub(crate) struct Core {
    pub(crate) me: Rank,
    pub(crate) name: String,
    /// Names the communicator among all, in hexadecimal digits.
    pub(crate) id: String,
    pub(crate) topo: Topology,
    pub(crate) eager_bytes: usize,
    /// Longer messages are offered to be read where they lie.
    pub(crate) single_copy_bytes: usize,
    /// The host has more ranks than cores, or nobody is to poll.
    pub(crate) crowded: bool,
    pub(crate) cpu: Cpu,
    /// The algorithm that the configuration forces, where it has one for the shape.
    pub(crate) algorithm: Option<String>,
    pub(super) transports: Vec<Box<dyn Transport>>,
    pub(crate) peers: Vec<Peer>,
    pub(crate) collectives: Collectives,
    pub(crate) messages: Messages,
    pub(crate) windows: Windows,
    /// Own long messages that are announced, by token.
    pub(crate) announced: FxHashMap<u64, Announced>,
    pub(crate) detaching: Detaching,
    next_token: u64,
    /// Places for long messages that were granted, by sender and token.
    placements: FxHashMap<(Rank, u64), Placement>,
    pub(crate) readings: Readings,
    /// Works that ended and whose callbacks have not been run.
    pub(crate) finished: Finished,
    /// Why the operation that ended last failed, if it did.
    pub(crate) failure: Option<String>,
    /// Why nothing can be submitted any more.
    pub(crate) closed: Option<String>,
    pub(crate) losses: Losses,
    /// Somebody tells of ranks that are gone, also of those that no operation waits for.
    pub(crate) is_watched: bool,
    /// None where nobody listens.
    pub(crate) send_heartbeat: Option<SendHeartbeat>,
    ticks: u32,
    pub(crate) recorder: Recorder,
    /// What the job calls this communicator's ranks.
    pub(crate) members: Vec<Rank>,
    /// Where the flight recorder is written when an operation fails.
    pub(crate) dump_directory: Option<PathBuf>,
    /// When that was done last.
    pub(crate) dumped: Option<Instant>,
    /// The failure for which it is to be done.
    pub(crate) dump_due: Option<String>,
}

impl Core {
    pub(crate) fn new(
        name: String,
        me: Rank,
        topo: Topology,
        transports: Vec<Box<dyn Transport>>,
        routes: Vec<Vec<Route>>,
    ) -> Core {
        let peers = routes.into_iter().map(|route| Peer { way: Way::new(route), ..Peer::default() }).collect();
        let members = (0..topo.size()).map(Rank::from).collect();
        let readings = Readings::new(topo.size());
        Core {
            me,
            name,
            id: "0".repeat(32),
            topo,
            eager_bytes: 8192,
            single_copy_bytes: 0,
            crowded: false,
            cpu: Cpu::default(),
            algorithm: None,
            transports,
            peers,
            collectives: Collectives::default(),
            messages: Messages::default(),
            windows: Windows::default(),
            announced: FxHashMap::default(),
            detaching: Detaching::default(),
            next_token: 0,
            placements: FxHashMap::default(),
            readings,
            finished: Finished::new(),
            failure: None,
            closed: None,
            losses: Losses::default(),
            is_watched: false,
            send_heartbeat: None,
            ticks: 0,
            recorder: Recorder::default(),
            members,
            dump_directory: None,
            dumped: None,
            dump_due: None,
        }
    }

    /// The number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.peers.len()
    }

    /// Notes an operation that is submitted now, which reads and writes so many bytes.
    pub(crate) fn begin(&mut self, call: Call, bytes: Bytes) -> Entry {
        let (sequence, starts) = match call {
            Call::Collective(_) => (self.collectives.next_sequence(), self.collectives.is_idle()),
            Call::Send { .. } | Call::Recv { .. } => (self.messages.next_id(), true),
            _ => (self.windows.next_id(), true),
        };
        let began = Instant::now();
        let number = self.recorder.submitted(call, sequence, bytes, began, starts);
        Entry { operation: call.name(), sequence, number, began }
    }

    /// Notes that an operation has ended, of whose memory nothing in the engine knows any more.
    pub(crate) fn ended(&mut self, number: u64, now: Instant, result: &Result<(), Error>, source: Option<Rank>) {
        let failure = result.as_ref().err().map(Error::to_string);
        self.recorder.ended(number, now, failure.clone(), source);
        // Closing is no failure of its own.
        if self.closed.is_none() {
            if let Some(reason) = &failure {
                self.dump_due.get_or_insert_with(|| reason.clone());
            }
            self.failure = failure;
        }
    }

    /// Ends an operation that has a handle; see [`Core::ended`].
    pub(crate) fn finish(&mut self, work: Work, result: Result<(), Error>, source: Option<Rank>) {
        self.ended(work.number(), Instant::now(), &result, source);
        work.complete(result, source);
        self.finished.push(work);
    }

    /// Whether there is anything to drive: operations, windows that others may access, bytes that wait to be written,
    /// or streams being opened.
    pub(crate) fn is_busy(&self) -> bool {
        let unfinished = |peer: &Peer| peer.outbox.is_waiting() || peer.outbox.is_opening();
        !self.is_settled() || self.windows.is_open() || self.peers.iter().any(unfinished)
    }

    /// Whether no operation is in flight, nor a message that outlives its operation.
    pub(crate) fn is_settled(&self) -> bool {
        self.collectives.is_idle() && self.messages.is_idle() && self.windows.is_idle() && self.announced.is_empty()
    }

    /// Moves everything as far as it goes without waiting. `woke` says that the thread just slept, so that the rarer
    /// checks are due. True: something moved.
    pub(crate) fn progress(&mut self, woke: bool) -> bool {
        let rare = self.is_time_for_rare_checks() || woke;
        let mut moved = false;
        if rare {
            self.accept();
            self.probe();
        }
        self.transports.iter_mut().for_each(|transport| transport.look());
        for peer in 0..self.peers.len() {
            if self.peers[peer].inbox.as_mut().is_some_and(|inbox| !inbox.is_silent()) {
                moved |= self.pump_in(Rank::from(peer));
            }
            moved |= self.pump_out(Rank::from(peer));
        }
        moved |= self.run_collectives();
        if self.is_reading() {
            // What others wait for goes first: reading may take long.
            (0..self.peers.len()).for_each(|peer| moved |= self.pump_out(Rank::from(peer)));
            moved |= self.read_lent();
        }
        moved |= self.copy_crossing_send();
        if rare {
            self.expire(Instant::now());
        }
        self.dump_due();
        moved
    }

    /// Counts a turn. True: the rarer checks are due with it.
    pub(crate) fn is_time_for_rare_checks(&mut self) -> bool {
        self.ticks = self.ticks.wrapping_add(1);
        self.ticks.is_multiple_of(RARE_TICKS)
    }

    /// Writes the flight recorder down after a failure. The others are told of it first, since a folder may be slow.
    pub(crate) fn dump_due(&mut self) {
        if let Some(reason) = self.dump_due.take() {
            (0..self.peers.len()).for_each(|peer| _ = self.pump_out(Rank::from(peer)));
            self.dump_failure(&reason);
        }
    }

    /// Asks every stream to wake the poller. True: there is something to do now. Ended by [`Core::disarm`].
    pub(crate) fn arm(&mut self) -> bool {
        let mut ready = self.can_read_lent() || self.detaching.is_copying();
        for peer in &mut self.peers {
            ready |= peer.inbox.as_mut().is_some_and(|inbox| inbox.arm());
            ready |= peer.outbox.is_waiting() && peer.ending.is_none() && peer.outbox.arm();
        }
        ready
    }

    /// Ends what [`Core::arm`] began.
    pub(crate) fn disarm(&mut self) {
        for peer in &mut self.peers {
            if let Some(inbox) = &mut peer.inbox {
                inbox.disarm();
            }
            peer.outbox.disarm();
        }
    }

    /// When the next operation runs out of time.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let ending = self.peers.iter().filter_map(|peer| peer.ending.as_ref()).map(|(_, since)| *since + LINGER);
        let operations = [
            self.collectives.next_deadline(),
            self.messages.next_deadline(),
            self.next_detaching(),
            self.windows.next_deadline(),
        ];
        let strangers = self.transports.iter().filter_map(|transport| transport.accepting_until());
        let opening = self.peers.iter().filter_map(|peer| peer.way.due());
        operations.into_iter().flatten().chain(ending).chain(strangers).chain(opening).min()
    }

    /// Ends every operation with the reason that the communicator is `how` ("aborted: …"), and drops every stream.
    pub(crate) fn close(&mut self, how: &str) {
        if self.closed.is_some() {
            return;
        }
        self.take_leave();
        self.closed = Some(how.to_owned());
        let comm = self.name.clone();
        self.end_all(&|operation| Error::Closed { operation, comm: comm.clone(), how: how.to_owned() });
        self.windows.conceal_all();
        self.forget_on_loss();
        // What this rank has said of failures still goes out, as far as it goes at once: others learn the cause from it.
        for index in 0..self.peers.len() {
            self.pump_out(Rank::from(index));
        }
        self.peers.iter_mut().for_each(|peer| *peer = Peer { lost: Some(how.to_owned()), ..Peer::default() });
        self.transports.clear();
    }

    /// Ends every operation with the error that `error` makes of its name.
    pub(crate) fn end_all(&mut self, error: &dyn Fn(String) -> Error) {
        self.end_collectives(error);
        self.end_messages(error);
        self.end_accesses(error);
        self.drop_announced(|_| true);
        self.detaching.clear();
        self.placements.clear();
        self.readings.clear();
    }

    /// Tells those that would see this rank leave that it does so after a failure or a loss, and which: it is not the one
    /// to look for. They may not have noticed the loss themselves.
    pub(crate) fn take_leave(&mut self) {
        let (failure, lost) = match (self.failure.take(), self.loss()) {
            (Some(failure), _) => (failure, None),
            (None, Some(loss)) => (loss.to_string(), self.losses.lost().map(|(rank, _)| rank)),
            (None, None) => return,
        };
        let next = self.collectives.next_sequence();
        for peer in self.everyone_else() {
            if self.peers[peer.index()].outbox.is_open() && self.lost(peer).is_none() {
                let failed = Failed::Collective { sequence: next, scope: Scope::Communicator, lost };
                self.send_failure(peer, failed, &failure);
            }
        }
    }

    /// Whether every byte that should has left this process.
    pub(crate) fn flushed(&mut self) -> bool {
        self.peers.iter_mut().all(|peer| peer.lost.is_some() || peer.outbox.flushed().unwrap_or(true))
    }

    /// The error of an operation on a closed communicator.
    pub(crate) fn closed_error(&self, operation: &str, how: &str) -> Error {
        Error::Closed { operation: operation.to_owned(), comm: self.name.clone(), how: how.to_owned() }
    }

    // ---- peers ----

    /// Why `peer` cannot be reached, if it cannot.
    pub(crate) fn lost(&self, peer: Rank) -> Option<&str> {
        self.peers[peer.index()].lost.as_deref()
    }

    /// What the kernel knows of the connection to `peer`, if there is one, or knew when it was lost.
    pub(crate) fn traffic(&self, peer: Rank) -> Option<Traffic> {
        let peer = &self.peers[peer.index()];
        peer.outbox.traffic().or(peer.last_traffic)
    }

    /// Whether `peer` is known to have called the collective `sequence`.
    pub(crate) fn has_called(&self, peer: Rank, sequence: u64) -> bool {
        self.peers[peer.index()].called > sequence
    }

    /// Sends a frame: at once if the stream takes it, else when it has room. Its owner is told when it is written.
    pub(crate) fn send(&mut self, to: Rank, header: Header, body: Body, owner: Owner) {
        self.reach(to);
        if self.lost(to).is_none() && self.write(to, header, body, owner) {
            self.written(owner);
        }
    }

    /// As [`Core::send`], to a peer that is not lost. True: it is written, which the owner is not told.
    pub(crate) fn write(&mut self, to: Rank, header: Header, body: Body, owner: Owner) -> bool {
        let peer = &mut self.peers[to.index()];
        if peer.ending.is_some() || peer.outbox.is_waiting() || body.len() > FRAGMENT_BYTES {
            peer.outbox.push(header, body, owner);
            return false;
        }
        peer.outbox.write(header, body, owner).unwrap_or_else(|down| {
            self.outlet_ended(to, down);
            false
        })
    }

    /// Sends a message of an operation: at once if it is short, else announced. The owner is told when it is written.
    pub(crate) fn send_message(&mut self, to: Rank, header: Header, body: Body, owner: Owner, eager: bool) {
        if eager {
            self.send(to, Header { kind: FrameKind::Eager, ..header }, body, owner);
        } else {
            let token = self.next_token;
            self.next_token += 1;
            let location = self.location_for(to, &body);
            let header = Header { kind: FrameKind::Announce, token, location, ..header };
            self.announced.insert(token, Announced::new(to, header, body, owner));
            self.send(to, header, Body::Empty, Owner::PROTOCOL);
        }
    }

    /// Tells the sender of an announced message that there is a place for it.
    pub(crate) fn grant(&mut self, from: Rank, token: u64, lane: Lane, placement: Placement, why: Grant) {
        let header = Header { index: why as u32, ..control(FrameKind::Grant, lane, 0, token, placement.filled as u64) };
        self.expect(from, token, placement);
        self.send(from, header, Body::Empty, Owner::PROTOCOL);
    }

    /// Has a place for the message that `from` will send under `token`.
    pub(crate) fn expect(&mut self, from: Rank, token: u64, placement: Placement) {
        self.placements.insert((from, token), placement);
    }

    /// Tells `to` that an operation has failed here.
    pub(crate) fn send_failure(&mut self, to: Rank, failed: Failed, text: &str) {
        let mut end = text.len().min(FAIL_TEXT_MAX);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let (lane, key, token, scope) = match failed {
            Failed::Collective { sequence, scope, lost } => {
                (Lane::Collective, sequence, lost.map_or(0, |rank| u64::from(rank.0) + 1), scope)
            }
            Failed::Message(token) => (Lane::PointToPoint, 0, token, Scope::Operation),
        };
        let header = Header { index: scope as u32, ..control(FrameKind::Fail, lane, key, token, end as u64) };
        self.send(to, header, Body::of_bytes(&text.as_bytes()[..end]), Owner::PROTOCOL);
    }

    /// Whether `peer` can read this process's memory, as far as is known.
    pub(crate) fn lends(&self, peer: Rank) -> bool {
        let peer = &self.peers[peer.index()];
        !peer.cannot_read && peer.outbox.lends()
    }

    /// Makes `peer` doubt what it reads of this process's memory, until it knows what has been withdrawn.
    pub(crate) fn doubt(&mut self, peer: Rank) {
        self.peers[peer.index()].outbox.withdraw();
    }

    /// Tells the others that `lost` is, as a message or an access to a window has found out: collectives that it has not
    /// called cannot complete. Those that fail here tell for themselves.
    pub(crate) fn report_lost(&mut self, lost: Rank, error: &Error) {
        let entry = &mut self.peers[lost.index()];
        if std::mem::replace(&mut entry.told, true) {
            return;
        }
        let first = entry.called.max(self.collectives.next_sequence());
        let text = error.to_string();
        for peer in self.everyone_else().into_iter().filter(|peer| *peer != lost) {
            let failed = Failed::Collective { sequence: first, scope: Scope::Communicator, lost: Some(lost) };
            self.send_failure(peer, failed, &text);
        }
    }

    /// Drops everything of `op`: nothing of the engine refers to its memory afterwards.
    pub(crate) fn cancel(&mut self, op: OpRef) {
        self.drop_announced(|announced| announced.owner.op == op);
        self.cancel_readings(op);
        self.placements.retain(|_, placement| placement.owner.op != op);
        for peer in &mut self.peers {
            let unread = &mut peer.unread;
            peer.outbox.cancel(op, |header| *unread = unread.saturating_sub(credit_for(header)));
            if let Some(inbox) = &mut peer.inbox {
                inbox.cancel(op);
            }
        }
    }

    /// Whether `op` waits for `peer` to take or to bring a message that both know of.
    pub(crate) fn exchanges(&self, op: OpRef, peer: Rank) -> bool {
        let entry = &self.peers[peer.index()];
        entry.outbox.holds(op)
            || entry.inbox.as_ref().is_some_and(|inbox| inbox.serves(op))
            || self.announced.values().any(|announced| announced.to == peer && announced.owner.op == op)
            || self.placements.iter().any(|((from, _), placement)| *from == peer && placement.owner.op == op)
            || self.readings.serves(op, peer)
    }

    /// Marks `peer` as gone and ends the operations that cannot do without it.
    pub(crate) fn lose(&mut self, peer: Rank, down: &LinkDown) {
        let entry = &mut self.peers[peer.index()];
        if entry.lost.is_some() {
            return;
        }
        // Who leaves because another rank is lost is not the one to look for.
        let cause = match &entry.reported {
            Some(report) => format!("{}, after it had reported: {report}", down.cause),
            None => down.cause.clone(),
        };
        log::debug!("communicator `{}` rank {}: the streams of rank {peer} have ended: {cause}", self.name, self.me);
        entry.lost = Some(cause.clone());
        entry.last_traffic = entry.outbox.traffic();
        let ended = self.finished.len();
        self.lose_messages(peer, &cause);
        self.lose_collectives(peer, &cause);
        self.lose_accesses(peer, &cause);
        // A rank that is at its end, as this one may be, ends its streams too: then nothing waits for it.
        if self.finished.len() > ended {
            self.warn_of_loss(peer, &cause);
        }
        self.drop_announced(|announced| announced.to == peer);
        self.readings.lose(peer);
        let entry = &mut self.peers[peer.index()];
        entry.outbox = Outbox::default();
        entry.way.give_up();
        entry.inbox = None;
        entry.ending = None;
        self.placements.retain(|(from, _), _| *from != peer);
    }

    pub(super) fn accept(&mut self) {
        for (number, transport) in self.transports.iter_mut().enumerate() {
            for (from, inlet) in transport.accept() {
                let peer = &mut self.peers[from.index()];
                if !peer.outbox.is_open() {
                    peer.way.follow(number);
                }
                if peer.inbox.is_none() && peer.lost.is_none() {
                    peer.inbox = Some(Box::new(Inbox::new(inlet)));
                } else {
                    log::warn!(
                        "communicator `{}` rank {}: a second stream of rank {from} was refused",
                        self.name,
                        self.me
                    );
                }
            }
        }
    }

    fn probe(&mut self) {
        for index in 0..self.peers.len() {
            let peer = &mut self.peers[index];
            match peer.ending.clone() {
                Some((down, since)) => self.linger(Rank::from(index), &down, since),
                None if peer.way.due().is_some() => self.reach(Rank::from(index)),
                None => {
                    if let Err(down) = peer.outbox.probe() {
                        self.outlet_ended(Rank::from(index), down);
                    } else if !peer.outbox.is_opening()
                        && let Some(cause) = peer.way.take_turn()
                    {
                        let (name, me, by) = (&self.name, self.me, peer.way.transport(&self.transports));
                        log::warn!("communicator `{name}` rank {me}: rank {index} is reached by {by}, since {cause}");
                    }
                }
            }
        }
    }

    fn pump_out(&mut self, peer: Rank) -> bool {
        let entry = &mut self.peers[peer.index()];
        if !entry.outbox.is_waiting() || entry.ending.is_some() {
            return false;
        }
        let mut done = Vec::new();
        let pumped = entry.outbox.pump(&mut done);
        for owner in done {
            self.written(owner);
        }
        pumped.unwrap_or_else(|down| {
            self.outlet_ended(peer, down);
            true
        })
    }

    pub(super) fn pump_in(&mut self, peer: Rank) -> bool {
        let Some(mut inbox) = self.peers[peer.index()].inbox.take() else { return false };
        self.peers[peer.index()].is_pumped = true;
        let mut moved = false;
        let mut ended = None;
        for _ in 0..EVENTS_PER_TURN {
            match inbox.poll(&mut moved, |header| self.take_header(peer, header)) {
                Ok(Some((header, sink))) => self.take_payload(peer, header, sink),
                Ok(None) => break,
                Err(down) => {
                    ended = Some(down);
                    break;
                }
            }
            if self.lost(peer).is_some() {
                self.peers[peer.index()].is_pumped = false;
                return true;
            }
        }
        self.peers[peer.index()].is_pumped = false;
        // Back in its place first: an operation whose payload is cut off is one that waits for the peer.
        self.peers[peer.index()].inbox = Some(inbox);
        if let Some(down) = ended {
            self.lose(peer, &down);
            return true;
        }
        moved
    }

    // ---- frames ----

    fn take_header(&mut self, from: Rank, header: Header) -> Sink {
        let peer = &mut self.peers[from.index()];
        peer.called = peer.called.max(header.called());
        match (header.kind, header.lane) {
            (FrameKind::Eager, Lane::Collective) => self.collective_arrives(from, header),
            (FrameKind::Eager, Lane::PointToPoint) => self.message_arrives(from, header),
            (FrameKind::Announce, Lane::Collective) => self.collective_announced(from, header),
            (FrameKind::Announce, Lane::PointToPoint) => self.message_announced(from, header),
            (FrameKind::Grant, _) => self.granted(from, header),
            (FrameKind::Taken, _) => {
                self.taken(from, header.token);
                Sink::Discard
            }
            (FrameKind::Withdrawn, _) => {
                self.withdrawn(from, header.token);
                Sink::Discard
            }
            (FrameKind::Data, _) => match self.placements.remove(&(from, header.token)) {
                Some(placement) if placement.fits(header.payload()) => Sink::Place(placement),
                _ => Sink::Discard,
            },
            (FrameKind::Fail, _) => Sink::Heap(Vec::new()),
            (FrameKind::Credit, _) => {
                self.credit(from, header.len);
                Sink::Discard
            }
            (FrameKind::Put, _) => self.put_arrives(from, header),
            (FrameKind::Get, _) => self.get_arrives(from, header),
            (FrameKind::Signal, _) => self.signal_arrives(from, header),
        }
    }

    /// The message `token`, if it is `to` that it was announced to.
    pub(crate) fn take_announced(&mut self, to: Rank, token: u64) -> Option<Announced> {
        let hash_map::Entry::Occupied(entry) = self.announced.entry(token) else { return None };
        (entry.get().to == to).then(|| entry.remove())
    }

    fn granted(&mut self, from: Rank, grant: Header) -> Sink {
        let token = grant.token;
        match self.take_announced(from, token) {
            Some(announced) => {
                let peer = &mut self.peers[from.index()];
                peer.cannot_read |= grant.index == Grant::CannotRead as u32;
                let offset = usize::try_from(grant.len).unwrap_or(usize::MAX).min(announced.body.len());
                let header = Header { kind: FrameKind::Data, ..announced.header };
                peer.outbox.push_from(offset, header, announced.body, announced.owner);
            }
            // A collective's failure was already sent; a message's sender gave up in the meantime.
            None if grant.lane == Lane::PointToPoint => {
                let text = "the sender gave the message up";
                self.send_failure(from, Failed::Message(token), text);
            }
            None => {}
        }
        Sink::Discard
    }

    fn take_payload(&mut self, from: Rank, header: Header, sink: Sink) {
        match (header.kind, sink) {
            (FrameKind::Fail, Sink::Heap(text)) => {
                let text = String::from_utf8_lossy(&text).into_owned();
                if header.lane == Lane::Collective && header.index == Scope::Communicator as u32 {
                    self.peers[from.index()].reported = Some(text.clone());
                }
                match header.lane {
                    Lane::Collective => self.collective_failed_elsewhere(from, header, text),
                    Lane::PointToPoint => self.message_failed_elsewhere(from, header.token, &text),
                }
            }
            (_, Sink::Place(placement)) if placement.is_full() => self.received(from, placement.owner),
            (_, Sink::Place(placement)) => {
                self.placements.insert((from, header.token), placement);
            }
            (_, Sink::Heap(bytes)) => match header.lane {
                Lane::Collective => self.collective_kept(from, header, bytes),
                Lane::PointToPoint => self.message_kept(from, header, bytes),
            },
            (_, Sink::Discard) => {}
        }
    }

    /// The operation that waits for the grant of `token`, or whose place has it.
    pub(crate) fn owner_of_token(&self, peer: Rank, token: u64) -> Option<Owner> {
        let sent = self.announced.get(&token).filter(|announced| announced.to == peer).map(|announced| announced.owner);
        let placed = || self.placements.get(&(peer, token)).map(|placement| placement.owner);
        sent.or_else(placed).or_else(|| self.readings.owner(peer, token))
    }

    pub(crate) fn written(&mut self, owner: Owner) {
        match owner.op {
            OpRef::Collective(sequence) => self.step_done(sequence, owner.step),
            OpRef::Message(id) => self.message_done(id, None),
            OpRef::Access(id) => self.access_done(id),
            OpRef::Window(_) | OpRef::Protocol => {}
        }
    }

    pub(crate) fn received(&mut self, from: Rank, owner: Owner) {
        match owner.op {
            OpRef::Collective(sequence) => self.step_done(sequence, owner.step),
            OpRef::Message(id) => self.message_done(id, Some(from)),
            OpRef::Access(id) => self.access_done(id),
            OpRef::Window(_) | OpRef::Protocol => {}
        }
    }

    /// Ends what runs out of time at `now`.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.check_collective_deadline(now);
        self.check_message_deadlines(now);
        self.check_access_deadlines(now);
        self.detach_crossing_sends(now);
    }
}

/// A frame that carries no message.
pub(crate) fn control(kind: FrameKind, lane: Lane, key: u64, token: u64, len: u64) -> Header {
    Header { kind, lane, signature: Signature::default(), key, index: 0, token, len, location: None, is_busy: false }
}

/// The end of `start + limit`; nothing for limits beyond the clock's range.
pub(crate) fn deadline(start: Instant, limit: Duration) -> Option<Instant> {
    start.checked_add(limit)
}

/// How many turns pass between checks for new connections, broken ones, and time. They are system calls, which would take
/// longer than a short operation.
const RARE_TICKS: u32 = 1024;

/// How many frames of one peer are taken before the next peer's.
const EVENTS_PER_TURN: usize = 32;
