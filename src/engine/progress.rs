//! All state of a communicator's operations, and the loop that moves it forward.

use std::collections::hash_map;
use std::path::PathBuf;
use std::time::Instant;

use rustc_hash::FxHashMap;

use crate::engine::body::Body;
use crate::engine::buffered_send::{Detaching, PendingSend};
use crate::engine::call::Call;
use crate::engine::collective::Collectives;
use crate::engine::completion::{Completion, Finished, OpId};
use crate::engine::connector::{OPENING_CHECK, Route, Way};
use crate::engine::failures::Failures;
use crate::engine::flight_recorder::{Bytes, Recorder};
use crate::engine::frame::{FAIL_TEXT_MAX, FRAGMENT_BYTES, Failed, FrameKind, Header, MatchSpace, RtrReason, Scope};
use crate::engine::heartbeat::SendHeartbeat;
use crate::engine::inbox::Inbox;
use crate::engine::message::{Messages, credits_for};
use crate::engine::outbox::Outbox;
use crate::engine::reach::DRAIN_TIMEOUT;
use crate::engine::recv_buffer::{RecvBuffer, Sink};
use crate::engine::single_copy::Readings;
use crate::engine::wait_policy::{Cpu, Wait};
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
    pub(super) is_draining: bool,
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

/// What a communicator's operations share.
pub(crate) struct Engine {
    pub(crate) me: Rank,
    pub(crate) name: String,
    /// Names the communicator among all, in hexadecimal digits.
    pub(crate) id: String,
    pub(crate) topo: Topology,
    pub(crate) eager_bytes: usize,
    /// Longer messages are offered to be read where they lie.
    pub(crate) single_copy_bytes: usize,
    /// The host has more ranks than cores, or nobody is to poll.
    pub(crate) oversubscribed: bool,
    pub(crate) cpu: Cpu,
    /// The algorithm that the configuration forces, where it has one for the shape.
    pub(crate) algorithm: Option<String>,
    pub(super) transports: Vec<Box<dyn Transport>>,
    pub(crate) peers: Vec<Peer>,
    pub(crate) collectives: Collectives,
    pub(crate) messages: Messages,
    pub(crate) windows: Windows,
    /// Own long messages that are announced, by token.
    pub(crate) pending_sends: FxHashMap<u64, PendingSend>,
    pub(crate) detaching: Detaching,
    next_token: u64,
    /// Buffers for long messages that were asked for, by sender and token.
    recv_buffers: FxHashMap<(Rank, u64), RecvBuffer>,
    pub(crate) readings: Readings,
    /// Works that ended and whose callbacks have not been run.
    pub(crate) finished: Finished,
    /// Why the operation that ended last failed, if it did.
    pub(crate) failure: Option<String>,
    /// Why nothing can be submitted any more.
    pub(crate) closed: Option<String>,
    pub(crate) failures: Failures,
    /// Somebody tells of ranks that are gone, also of those that no operation waits for.
    pub(crate) is_watched: bool,
    /// None where nobody listens.
    pub(crate) send_heartbeat: Option<SendHeartbeat>,
    turns: u32,
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

impl Engine {
    pub(crate) fn new(
        name: String,
        me: Rank,
        topo: Topology,
        transports: Vec<Box<dyn Transport>>,
        routes: Vec<Vec<Route>>,
    ) -> Engine {
        let peers = routes.into_iter().map(|route| Peer { way: Way::new(route), ..Peer::default() }).collect();
        let members = (0..topo.size()).map(Rank::from).collect();
        let readings = Readings::new(topo.size());
        Engine {
            me,
            name,
            id: "0".repeat(32),
            topo,
            eager_bytes: 8192,
            single_copy_bytes: 0,
            oversubscribed: false,
            cpu: Cpu::default(),
            algorithm: None,
            transports,
            peers,
            collectives: Collectives::default(),
            messages: Messages::default(),
            windows: Windows::default(),
            pending_sends: FxHashMap::default(),
            detaching: Detaching::default(),
            next_token: 0,
            recv_buffers: FxHashMap::default(),
            readings,
            finished: Finished::new(),
            failure: None,
            closed: None,
            failures: Failures::default(),
            is_watched: false,
            send_heartbeat: None,
            turns: 0,
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

    /// Ends an operation that has a handle; see [`Engine::ended`].
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
        self.collectives.is_idle() && self.messages.is_idle() && self.windows.is_idle() && self.pending_sends.is_empty()
    }

    /// Moves everything as far as it goes without waiting. `woke` says that the thread just slept, so that the rarer
    /// checks are due. True: something moved.
    pub(crate) fn progress(&mut self, woke: bool) -> bool {
        let rare = self.slow_path_due() || woke;
        let mut moved = false;
        if rare {
            self.accept();
            self.check_connections();
        }
        self.transports.iter_mut().for_each(|transport| transport.look());
        for peer in 0..self.peers.len() {
            if self.peers[peer].inbox.as_mut().is_some_and(|inbox| !inbox.is_silent()) {
                moved |= self.progress_recv(Rank::from(peer));
            }
            moved |= self.progress_send(Rank::from(peer));
        }
        moved |= self.progress_collectives();
        if self.has_reads() {
            // What others wait for goes first: reading may take long.
            (0..self.peers.len()).for_each(|peer| moved |= self.progress_send(Rank::from(peer)));
            moved |= self.progress_reads();
        }
        moved |= self.buffer_blocked_send();
        if rare {
            self.expire(Instant::now());
        }
        self.dump_due();
        moved
    }

    /// Counts a turn. True: the rarer checks are due with it.
    pub(crate) fn slow_path_due(&mut self) -> bool {
        self.turns = self.turns.wrapping_add(1);
        self.turns.is_multiple_of(SLOW_PATH_INTERVAL)
    }

    /// Writes the flight recorder down after a failure. The others are told of it first, since a folder may be slow.
    pub(crate) fn dump_due(&mut self) {
        if let Some(reason) = self.dump_due.take() {
            (0..self.peers.len()).for_each(|peer| _ = self.progress_send(Rank::from(peer)));
            self.dump_failure(&reason);
        }
    }

    /// Asks every stream to wake the poller. True: there is something to do now. Ended by [`Engine::disarm`].
    pub(crate) fn arm(&mut self) -> bool {
        let mut ready = self.can_read_now() || self.detaching.is_copying();
        for peer in &mut self.peers {
            ready |= peer.inbox.as_mut().is_some_and(|inbox| inbox.arm());
            ready |= peer.outbox.is_waiting() && peer.ending.is_none() && peer.outbox.arm();
        }
        ready
    }

    /// Ends what [`Engine::arm`] began.
    pub(crate) fn disarm(&mut self) {
        for peer in &mut self.peers {
            if let Some(inbox) = &mut peer.inbox {
                inbox.disarm();
            }
            peer.outbox.disarm();
        }
    }

    /// Publishes that this rank waits on `cpu`, and says how it waits next.
    pub(crate) fn next_wait(&mut self, cpu: u32, now: Instant) -> Wait {
        let mut is_shared = false;
        for peer in &mut self.peers {
            peer.outbox.publish_cpu(cpu);
            is_shared |= peer.inbox.as_ref().is_some_and(|inbox| inbox.peer_cpu() == Some(cpu));
        }
        self.cpu.next_wait(is_shared, now)
    }

    /// When something is due at the latest, such as the end of the next operation's time.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let ending = self.peers.iter().filter_map(|peer| peer.ending.as_ref()).map(|(_, since)| *since + DRAIN_TIMEOUT);
        let operations = [
            self.collectives.next_deadline(),
            self.messages.next_deadline(),
            self.next_detaching(),
            self.windows.next_deadline(),
        ];
        let strangers = self.transports.iter().filter_map(|transport| transport.accepting_until());
        let opening = self.peers.iter().filter_map(|peer| peer.way.due());
        let is_opening = self.peers.iter().any(|peer| peer.outbox.is_opening());
        let opened = is_opening.then(|| Instant::now() + OPENING_CHECK);
        operations.into_iter().flatten().chain(ending).chain(strangers).chain(opening).chain(opened).min()
    }

    /// Ends every operation with the reason that the communicator is `how` ("aborted: …"), and drops every stream.
    pub(crate) fn close(&mut self, how: &str) {
        if self.closed.is_some() {
            return;
        }
        self.announce_failure();
        self.closed = Some(how.to_owned());
        let comm = self.name.clone();
        self.end_all(&|operation| Error::Closed { operation, comm: comm.clone(), how: how.to_owned() });
        self.windows.unexpose_all();
        self.forget_on_loss();
        // What this rank has said of failures still goes out, as far as it goes at once: others learn the cause from it.
        for index in 0..self.peers.len() {
            self.progress_send(Rank::from(index));
        }
        self.peers.iter_mut().for_each(|peer| *peer = Peer { lost: Some(how.to_owned()), ..Peer::default() });
        self.transports.clear();
    }

    /// Ends every operation with the error that `error` makes of its name.
    pub(crate) fn end_all(&mut self, error: &dyn Fn(String) -> Error) {
        self.end_collectives(error);
        self.end_messages(error);
        self.end_rma(error);
        self.drop_pending_sends(|_| true);
        self.detaching.clear();
        self.recv_buffers.clear();
        self.readings.clear();
    }

    /// Tells those that would see this rank leave that it does so after a failure or a loss, and which: it is not the one
    /// to look for. They may not have noticed the loss themselves.
    pub(crate) fn announce_failure(&mut self) {
        let (failure, lost) = match (self.failure.take(), self.loss()) {
            (Some(failure), _) => (failure, None),
            (None, Some(loss)) => (loss.to_string(), self.failures.lost().map(|(rank, _)| rank)),
            (None, None) => return,
        };
        let next = self.collectives.next_sequence();
        for peer in self.other_ranks() {
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

    /// Sends a frame: at once if the stream takes it, else when it has room. Its completion is told when it is written.
    pub(crate) fn send(&mut self, to: Rank, header: Header, body: Body, completion: Completion) {
        self.connect(to);
        if self.lost(to).is_none() && self.write(to, header, body, completion) {
            self.send_done(completion);
        }
    }

    /// As [`Engine::send`], to a peer that is not lost. True: it is written, which the completion is not told.
    pub(crate) fn write(&mut self, to: Rank, header: Header, body: Body, completion: Completion) -> bool {
        let peer = &mut self.peers[to.index()];
        if peer.ending.is_some() || peer.outbox.is_waiting() || body.len() > FRAGMENT_BYTES {
            peer.outbox.push(header, body, completion);
            return false;
        }
        peer.outbox.write(header, body, completion).unwrap_or_else(|down| {
            self.send_stream_closed(to, down);
            false
        })
    }

    /// Sends a message of an operation: at once if it is short, else by an RTS. The completion is told when it is written.
    pub(crate) fn send_message(&mut self, to: Rank, header: Header, body: Body, completion: Completion, eager: bool) {
        if eager {
            self.send(to, Header { kind: FrameKind::Eager, ..header }, body, completion);
        } else {
            let token = self.next_token;
            self.next_token += 1;
            let address = self.address_for(to, &body);
            let header = Header { kind: FrameKind::Rts, token, address, ..header };
            self.pending_sends.insert(token, PendingSend::new(to, header, body, completion));
            self.send(to, header, Body::Empty, Completion::NONE);
        }
    }

    /// Tells the sender of an announced message that there is a place for it.
    pub(crate) fn send_rtr(
        &mut self,
        from: Rank,
        token: u64,
        match_space: MatchSpace,
        buffer: RecvBuffer,
        why: RtrReason,
    ) {
        let header = Header {
            index: why as u32,
            ..Header::control(FrameKind::Rtr, match_space, 0, token, buffer.received as u64)
        };
        self.expect(from, token, buffer);
        self.send(from, header, Body::Empty, Completion::NONE);
    }

    /// Has a place for the message that `from` will send under `token`.
    pub(crate) fn expect(&mut self, from: Rank, token: u64, buffer: RecvBuffer) {
        self.recv_buffers.insert((from, token), buffer);
    }

    /// Tells `to` that an operation has failed here.
    pub(crate) fn send_failure(&mut self, to: Rank, failed: Failed, text: &str) {
        let mut end = text.len().min(FAIL_TEXT_MAX);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let (match_space, key, token, scope) = match failed {
            Failed::Collective { sequence, scope, lost } => {
                (MatchSpace::Collective, sequence, lost.map_or(0, |rank| u64::from(rank.0) + 1), scope)
            }
            Failed::Message(token) => (MatchSpace::PointToPoint, 0, token, Scope::Operation),
        };
        let header =
            Header { index: scope as u32, ..Header::control(FrameKind::Fail, match_space, key, token, end as u64) };
        self.send(to, header, Body::of_bytes(&text.as_bytes()[..end]), Completion::NONE);
    }

    /// Whether `peer` can read this process's memory, as far as is known.
    pub(crate) fn peer_can_read(&self, peer: Rank) -> bool {
        let peer = &self.peers[peer.index()];
        !peer.cannot_read && peer.outbox.peer_can_read()
    }

    /// Marks as stale what `peer` reads of this process's memory, until it knows what has been invalidated.
    pub(crate) fn mark_reads_stale(&mut self, peer: Rank) {
        self.peers[peer.index()].outbox.invalidate();
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
        for peer in self.other_ranks().into_iter().filter(|peer| *peer != lost) {
            let failed = Failed::Collective { sequence: first, scope: Scope::Communicator, lost: Some(lost) };
            self.send_failure(peer, failed, &text);
        }
    }

    /// Drops everything of `op`: nothing of the engine refers to its memory afterwards.
    pub(crate) fn cancel(&mut self, op: OpId) {
        self.drop_pending_sends(|pending| pending.completion.op == op);
        self.cancel_readings(op);
        self.recv_buffers.retain(|_, buffer| buffer.completion.op != op);
        for peer in &mut self.peers {
            let unread = &mut peer.unread;
            peer.outbox.cancel(op, |header| *unread = unread.saturating_sub(credits_for(header)));
            if let Some(inbox) = &mut peer.inbox {
                inbox.cancel(op);
            }
        }
    }

    /// Whether `op` waits for `peer` to take or to bring a message that both know of.
    pub(crate) fn exchanges(&self, op: OpId, peer: Rank) -> bool {
        let entry = &self.peers[peer.index()];
        entry.outbox.holds(op)
            || entry.inbox.as_ref().is_some_and(|inbox| inbox.serves(op))
            || self.pending_sends.values().any(|pending| pending.to == peer && pending.completion.op == op)
            || self.recv_buffers.iter().any(|((from, _), buffer)| *from == peer && buffer.completion.op == op)
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
        self.lose_rma(peer, &cause);
        // A rank that is at its end, as this one may be, ends its streams too: then nothing waits for it.
        if self.finished.len() > ended {
            self.warn_of_loss(peer, &cause);
        }
        self.drop_pending_sends(|pending| pending.to == peer);
        self.readings.lose(peer);
        let entry = &mut self.peers[peer.index()];
        entry.outbox = Outbox::default();
        entry.way.give_up();
        entry.inbox = None;
        entry.ending = None;
        self.recv_buffers.retain(|(from, _), _| *from != peer);
    }

    pub(super) fn accept(&mut self) {
        for (number, transport) in self.transports.iter_mut().enumerate() {
            for (from, recv_stream) in transport.accept() {
                let peer = &mut self.peers[from.index()];
                if !peer.outbox.is_open() {
                    peer.way.follow(number);
                }
                if peer.inbox.is_none() && peer.lost.is_none() {
                    peer.inbox = Some(Box::new(Inbox::new(recv_stream)));
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

    fn check_connections(&mut self) {
        for index in 0..self.peers.len() {
            let peer = &mut self.peers[index];
            match peer.ending.clone() {
                Some((down, since)) => self.drain_or_lose(Rank::from(index), &down, since),
                None if peer.way.due().is_some() => self.connect(Rank::from(index)),
                None => {
                    if let Err(down) = peer.outbox.probe() {
                        self.send_stream_closed(Rank::from(index), down);
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

    fn progress_send(&mut self, peer: Rank) -> bool {
        let entry = &mut self.peers[peer.index()];
        if !entry.outbox.is_waiting() || entry.ending.is_some() {
            return false;
        }
        let mut done = Vec::new();
        let pumped = entry.outbox.pump(&mut done);
        for completion in done {
            self.send_done(completion);
        }
        pumped.unwrap_or_else(|down| {
            self.send_stream_closed(peer, down);
            true
        })
    }

    pub(super) fn progress_recv(&mut self, peer: Rank) -> bool {
        let Some(mut inbox) = self.peers[peer.index()].inbox.take() else { return false };
        self.peers[peer.index()].is_draining = true;
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
                self.peers[peer.index()].is_draining = false;
                return true;
            }
        }
        self.peers[peer.index()].is_draining = false;
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
        match (header.kind, header.match_space) {
            (FrameKind::Eager, MatchSpace::Collective) => self.collective_arrives(from, header),
            (FrameKind::Eager, MatchSpace::PointToPoint) => self.message_arrives(from, header),
            (FrameKind::Rts, MatchSpace::Collective) => self.collective_rts_arrives(from, header),
            (FrameKind::Rts, MatchSpace::PointToPoint) => self.message_rts_arrives(from, header),
            (FrameKind::Rtr, _) => self.rtr_arrives(from, header),
            (FrameKind::Ats, _) => {
                self.ats_arrives(from, header.token);
                Sink::Discard
            }
            (FrameKind::Invalidated, _) => {
                self.invalidation_arrives(from, header.token);
                Sink::Discard
            }
            (FrameKind::Data, _) => match self.recv_buffers.remove(&(from, header.token)) {
                Some(buffer) if buffer.fits(header.payload()) => Sink::Buffer(buffer),
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
    pub(crate) fn take_pending_send(&mut self, to: Rank, token: u64) -> Option<PendingSend> {
        let hash_map::Entry::Occupied(entry) = self.pending_sends.entry(token) else { return None };
        (entry.get().to == to).then(|| entry.remove())
    }

    fn rtr_arrives(&mut self, from: Rank, grant: Header) -> Sink {
        let token = grant.token;
        match self.take_pending_send(from, token) {
            Some(pending) => {
                let peer = &mut self.peers[from.index()];
                peer.cannot_read |= grant.index == RtrReason::CannotRead as u32;
                let offset = usize::try_from(grant.len).unwrap_or(usize::MAX).min(pending.body.len());
                let header = Header { kind: FrameKind::Data, ..pending.header };
                peer.outbox.push_from(offset, header, pending.body, pending.completion);
            }
            // A collective's failure was already sent; a message's sender gave up in the meantime.
            None if grant.match_space == MatchSpace::PointToPoint => {
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
                if header.match_space == MatchSpace::Collective && header.index == Scope::Communicator as u32 {
                    self.peers[from.index()].reported = Some(text.clone());
                }
                match header.match_space {
                    MatchSpace::Collective => self.collective_failed_elsewhere(from, header, text),
                    MatchSpace::PointToPoint => self.message_failed_elsewhere(from, header.token, &text),
                }
            }
            (_, Sink::Buffer(buffer)) if buffer.is_full() => self.recv_done(from, buffer.completion),
            (_, Sink::Buffer(buffer)) => {
                self.recv_buffers.insert((from, header.token), buffer);
            }
            (_, Sink::Heap(bytes)) => match header.match_space {
                MatchSpace::Collective => self.collective_unexpected_complete(from, header, bytes),
                MatchSpace::PointToPoint => self.message_unexpected_complete(from, header, bytes),
            },
            (_, Sink::Discard) => {}
        }
    }

    /// The operation that waits for the grant of `token`, or whose place has it.
    pub(crate) fn completion_of_token(&self, peer: Rank, token: u64) -> Option<Completion> {
        let sent =
            self.pending_sends.get(&token).filter(|pending| pending.to == peer).map(|pending| pending.completion);
        let placed = || self.recv_buffers.get(&(peer, token)).map(|buffer| buffer.completion);
        sent.or_else(placed).or_else(|| self.readings.completion(peer, token))
    }

    pub(crate) fn send_done(&mut self, completion: Completion) {
        match completion.op {
            OpId::Collective(sequence) => self.step_done(sequence, completion.step),
            OpId::Message(id) => self.message_done(id, None),
            OpId::RmaOp(id) => self.rma_done(id),
            OpId::Window(_) | OpId::Protocol => {}
        }
    }

    pub(crate) fn recv_done(&mut self, from: Rank, completion: Completion) {
        match completion.op {
            OpId::Collective(sequence) => self.step_done(sequence, completion.step),
            OpId::Message(id) => self.message_done(id, Some(from)),
            OpId::RmaOp(id) => self.rma_done(id),
            OpId::Window(_) | OpId::Protocol => {}
        }
    }

    /// Ends what runs out of time at `now`.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.check_collective_deadline(now);
        self.check_message_deadlines(now);
        self.check_rma_deadlines(now);
        self.choose_blocked_sends(now);
    }
}

/// How many turns pass between checks for new connections, broken ones, and time. They are system calls, which would take
/// longer than a short operation.
const SLOW_PATH_INTERVAL: u32 = 1024;

/// How many frames of one peer are taken before the next peer's.
const EVENTS_PER_TURN: usize = 32;
