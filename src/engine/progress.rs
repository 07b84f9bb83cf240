//! The engine: all state of a communicator's operations, and the loop that moves it forward.
//!
//! The parts below know nothing of each other's operations. They return what has come and what is done, and the engine
//! passes it on to the protocol that it is for.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::engine::buffered_send::BufferedSends;
use crate::engine::call::Call;
use crate::engine::collective::Collectives;
use crate::engine::completion::{Completion, Finished, OpId};
use crate::engine::connector::FindRoutes;
use crate::engine::context::OpContext;
use crate::engine::device_accesses::DeviceAccesses;
use crate::engine::device_messages::DeviceMessages;
use crate::engine::device_waits::DeviceWaits;
use crate::engine::endpoint::Endpoints;
use crate::engine::failures::Failures;
use crate::engine::flight_recorder::{Bytes, Recorder};
use crate::engine::frame::{End, FrameKind, Header, MatchSpace, Reason};
use crate::engine::heartbeat::{Absence, Heartbeat, InFlight, RankState};
use crate::engine::message::{MessageRequest, Messages};
use crate::engine::plan::Executed;
use crate::engine::recv_buffer::Sink;
use crate::engine::relay::Relay;
use crate::engine::request::Request;
use crate::engine::rndv::Rendezvous;
use crate::engine::wait_policy::{Cpu, Wait};
use crate::engine::window::{RmaRequest, Windows};
use crate::error::{Error, LinkDown};
use crate::signature::Signature;
use crate::sys::numa::Home;
use crate::topo::Topology;
use crate::transport::{Transport, Watcher};
use crate::types::Rank;
use crate::window::WindowId;
use crate::work::{Entry, Work};

/// The operations of one communicator.
pub(crate) struct Engine {
    /// Names the communicator among all, in hexadecimal digits.
    pub(crate) id: String,
    pub(crate) context: OpContext,
    pub(crate) collectives: Collectives,
    pub(crate) messages: Messages,
    pub(crate) windows: Windows,
    pub(crate) relay: Relay,
    pub(crate) device_waits: DeviceWaits,
    pub(crate) device_messages: DeviceMessages,
    pub(crate) device_accesses: DeviceAccesses,
    pub(crate) buffered_sends: BufferedSends,
    pub(crate) cpu: Cpu,
    turns: u32,
    /// What the job calls this communicator's ranks.
    pub(crate) members: Vec<Rank>,
    /// The NUMA node that this rank is on, if its host has several.
    pub(crate) home: Option<Home>,
    /// Where the flight recorder is written when an operation fails.
    pub(crate) dump_directory: Option<PathBuf>,
    /// When that was done last.
    pub(crate) dumped: Option<Instant>,
    /// How many files of dumps were begun.
    pub(crate) dump_files: u64,
}

impl Engine {
    pub(crate) fn new(
        name: String,
        me: Rank,
        topo: Topology,
        transports: Vec<Box<dyn Transport>>,
        find_routes: FindRoutes,
        watcher: Box<dyn Watcher>,
    ) -> Engine {
        let size = topo.size();
        let context = OpContext {
            me,
            topo,
            endpoints: Endpoints::new(name, me, transports, size, find_routes, watcher),
            rndv: Rendezvous::new(size),
            recorder: Recorder::default(),
            failures: Failures::default(),
            finished: Finished::new(),
            closed: None,
            dump_due: None,
            lost_found: Vec::new(),
            deserted: Vec::new(),
        };
        Engine {
            id: "0".repeat(32),
            context,
            collectives: Collectives::new(size),
            messages: Messages::new(size),
            windows: Windows::default(),
            relay: Relay::new(size),
            device_waits: DeviceWaits::default(),
            device_messages: DeviceMessages::default(),
            device_accesses: DeviceAccesses::default(),
            buffered_sends: BufferedSends::default(),
            cpu: Cpu::default(),
            turns: 0,
            members: (0..size).map(Rank::from).collect(),
            home: None,
            dump_directory: None,
            dumped: None,
            dump_files: 0,
        }
    }

    /// The communicator's name.
    pub(crate) fn name(&self) -> &str {
        self.context.endpoints.name()
    }

    /// Why nothing can be submitted any more.
    pub(crate) fn closed(&self) -> Option<&str> {
        self.context.closed.as_deref()
    }

    /// The error of an operation on a closed communicator.
    pub(crate) fn closed_error(&self, operation: &str, how: &str) -> Error {
        Error::Closed { operation: operation.to_owned(), comm: self.name().to_owned(), how: how.to_owned() }
    }

    /// Whether all ranks are there, this one too.
    pub(crate) fn is_whole(&self) -> bool {
        let failures = &self.context.failures;
        self.context.closed.is_none() && !failures.has_lost() && !failures.has_left()
    }

    /// Refuses an operation that cannot be submitted any more.
    #[inline(always)]
    pub(crate) fn check_open(&self, operation: &str) -> Result<(), Error> {
        if self.context.closed.is_none() && !self.context.failures.has_lost() {
            return Ok(());
        }
        Err(self.refusal(operation))
    }

    #[cold]
    fn refusal(&self, operation: &str) -> Error {
        let lost = || self.loss_of(operation).expect("it is closed or has lost a rank");
        self.closed().map_or_else(lost, |how| self.closed_error(operation, how))
    }

    /// Works that ended since this was asked last, whose callbacks have not been run.
    pub(crate) fn take_finished(&mut self) -> Finished {
        std::mem::take(&mut self.context.finished)
    }

    // ---- submission ----

    /// Notes an operation that is submitted now, which reads and writes so many bytes.
    pub(crate) fn begin(&mut self, call: Call, bytes: Bytes) -> Entry {
        let (sequence, starts) = match call {
            Call::Collective(_) => (self.collectives.next_sequence(), self.collectives.is_idle()),
            Call::Send { .. } | Call::Recv { .. } => (self.messages.next_id(), true),
            _ => (self.windows.next_id(), true),
        };
        let began = Instant::now();
        let number = self.context.recorder.submitted(call, sequence, bytes, began, starts);
        Entry { operation: call.name(), sequence, number, began }
    }

    /// Notes an operation on a device, which counts its operations itself. It starts once its stream reaches it.
    pub(crate) fn begin_on_device(&mut self, call: Call, sequence: u64, bytes: Bytes) -> Entry {
        if let Call::Collective(_) = call {
            self.device_waits.calls(sequence);
        }
        let began = Instant::now();
        let number = self.context.recorder.submitted(call, sequence, bytes, began, false);
        self.context.recorder.is_on_device(number);
        Entry { operation: call.name(), sequence, number, began }
    }

    /// The ranks that are known to have called a collective which this rank has not.
    pub(crate) fn ahead(&self) -> Vec<Rank> {
        let is_ahead = |rank: &Rank| self.collectives.called(*rank) > self.collectives.next_sequence();
        (0..self.context.size()).map(Rank::from).filter(is_ahead).collect()
    }

    /// Notes that streams have reached operations on a device.
    pub(crate) fn started_on_device(&mut self, works: &[Work], now: Instant) {
        works.iter().for_each(|work| self.context.recorder.reached(work.number(), now));
    }

    /// Notes how long an operation took by the clock of its device.
    pub(crate) fn took_on_device(&mut self, work: &Work, time: Duration) {
        self.context.recorder.took(work.number(), time);
    }

    /// Ends an operation that the engine makes no progress on: one of a device.
    pub(crate) fn end_on_device(&mut self, work: &Work, result: Result<(), Error>) {
        if result.is_ok() {
            // Unless it was seen before.
            self.context.recorder.reached(work.number(), Instant::now());
        }
        self.context.finish(work.clone(), result, None);
        self.write_due_dump();
    }

    /// Begins a collective: now, or once those before it have ended. One of which steps are executed comes first.
    pub(crate) fn submit_collective(&mut self, request: Request, executed: Executed, work: Work) {
        self.collectives.submit(&mut self.context, request, executed, work);
        self.handle_losses();
    }

    /// The caller of collective `sequence` has done what that waited for.
    pub(crate) fn go_on(&mut self, sequence: u64) {
        self.collectives.go_on(&mut self.context, sequence);
        self.handle_losses();
    }

    /// The caller of collective `sequence` cannot do what that waits for.
    pub(crate) fn give_up(&mut self, sequence: u64, error: Error) {
        self.collectives.give_up(&mut self.context, sequence, error);
        self.handle_losses();
        self.write_due_dump();
    }

    /// Starts a message operation.
    pub(crate) fn submit_message(&mut self, request: MessageRequest, work: Work) {
        self.messages.submit(&mut self.context, request, work);
        self.handle_losses();
    }

    /// Starts an operation on a window that can be used, on a range inside it.
    pub(crate) fn submit_rma(&mut self, request: RmaRequest) {
        self.windows.submit(&mut self.context, request);
        self.handle_losses();
    }

    /// Takes this rank's part of a window back: nothing of the engine refers to its memory afterwards.
    pub(crate) fn conceal(&mut self, window: WindowId) {
        self.windows.conceal(&mut self.context, window);
        self.handle_losses();
    }

    /// Notes that ranks wait in a collective, or what they do instead.
    pub(crate) fn heartbeat_arrives(&mut self, heartbeat: &Heartbeat, now: Instant) {
        if self.closed().is_some() {
            return;
        }
        if heartbeat.on_device {
            self.device_waits.heartbeat_arrives(heartbeat, now);
        } else {
            self.collectives.heartbeat_arrives(&mut self.context, heartbeat, now);
            self.handle_losses();
        }
    }

    /// The answers that this rank owes to ranks that wait for it.
    pub(crate) fn absences(&mut self, heartbeats: &[Heartbeat], now: Instant) -> Vec<Absence> {
        if self.closed().is_some() || self.collectives.send_heartbeat.is_none() {
            return Vec::new();
        }
        let answers = [self.collectives.absence(heartbeats, now), self.device_waits.absence(heartbeats, now)];
        answers.into_iter().flatten().collect()
    }

    /// Tells all ranks what this one does, unless it has called a collective since.
    pub(crate) fn tell_absence(&mut self, absence: Absence, in_flight: InFlight) {
        let Absence { on_device, sequence, round, again_millis } = absence;
        let next = if on_device { self.device_waits.next() } else { self.collectives.next_sequence() };
        if sequence == next {
            let (state, ranks) = (RankState::Absent(in_flight), vec![self.context.me]);
            self.send_heartbeat(Heartbeat { on_device, sequence, state, round, again_millis, ranks });
        }
    }

    /// Tells all ranks that this one waits in a collective on its device: which round of that it is, and after how long the next one follows.
    pub(crate) fn waits_on_device(&mut self, sequence: u64, call: Signature, round: (u32, Duration)) {
        self.send_heartbeat(Heartbeat::waiting(self.context.me, true, sequence, call, round));
    }

    fn send_heartbeat(&self, heartbeat: Heartbeat) {
        if self.closed().is_none()
            && let Some(send) = &self.collectives.send_heartbeat
        {
            send(heartbeat);
        }
    }

    // ---- the loop ----

    /// Whether there is anything to drive: operations, also those of a device of which others may tell, windows that others
    /// may access, bytes that wait to be written, or streams being opened.
    pub(crate) fn is_busy(&self) -> bool {
        let may_be_told = self.windows.is_open() || self.relay.is_listening();
        !self.is_settled() || may_be_told || self.context.endpoints.is_busy()
    }

    /// Whether no operation is in flight, nor a message that outlives its operation.
    pub(crate) fn is_settled(&self) -> bool {
        let is_idle = self.collectives.is_idle() && self.messages.is_idle() && self.windows.is_idle();
        let is_device_idle = self.relay.is_idle() && self.device_messages.is_idle() && self.device_accesses.is_idle();
        is_idle && is_device_idle && self.context.rndv.is_idle() && self.context.deserted.is_empty()
    }

    /// Whether all ranks that are there are known to have called what this one has, and nothing is in flight.
    pub(crate) fn has_ended(&self) -> bool {
        self.is_settled() && !self.collectives.awaits_word(&self.context)
    }

    /// Moves everything as far as it goes without waiting. `woke` says that the thread just slept, so that most of the rarer
    /// checks are due. True: something moved.
    pub(crate) fn progress(&mut self, woke: bool) -> bool {
        let is_slow_path_due = self.slow_path_due();
        self.turn(is_slow_path_due, woke)
    }

    /// The same; `accepts` says that all of the rarer checks are due.
    pub(crate) fn turn(&mut self, mut accepts: bool, woke: bool) -> bool {
        let is_slow_path = accepts || woke;
        let ended = self.context.finished.len();
        let mut moved = false;
        if is_slow_path || self.look_due() {
            let looked = self.context.endpoints.look();
            self.end_connections(looked.gone);
            // What has woken a thread and is no stream may be a rank that connects, or a time that is over.
            accepts |= looked.is_other_ready || (woke && !looked.is_stream_ready);
        }
        if accepts {
            self.context.endpoints.accept();
        }
        if is_slow_path {
            let gone = self.context.endpoints.check();
            self.end_connections(gone);
        }
        moved |= self.progress_recvs();
        moved |= self.progress_sends();
        moved |= self.collectives.progress(&mut self.context);
        moved |= self.progress_device();
        moved |= self.windows.progress(&mut self.context);
        if self.context.rndv.has_reads() {
            // What others wait for goes first: reading may take long.
            moved |= self.progress_sends();
            moved |= self.progress_reads();
        }
        moved |= self.copy_blocked_send();
        self.handle_losses();
        if is_slow_path {
            self.expire(Instant::now());
        }
        self.write_due_dump();
        // What follows an operation that has run out of time starts in the next turn, which must not be slept through.
        moved || self.context.finished.len() > ended
    }

    /// Moves what operations on the device exchange with other hosts. True: something moved.
    pub(crate) fn progress_device(&mut self) -> bool {
        let mut moved = self.relay.progress(&mut self.context);
        moved |= self.device_messages.progress(&mut self.context);
        moved |= self.device_accesses.progress(&mut self.context);
        moved
    }

    /// Counts a turn. True: the slow path is due with it.
    pub(crate) fn slow_path_due(&mut self) -> bool {
        self.turns = self.turns.wrapping_add(1);
        self.turns.is_multiple_of(SLOW_PATH_INTERVAL)
    }

    /// Whether to see now which streams are ready that a turn does not look at. A thread that gives its core away between two
    /// turns does so in each.
    #[inline]
    fn look_due(&self) -> bool {
        let Some(interval) = self.context.endpoints.look_interval() else { return false };
        self.turns.is_multiple_of(interval) || self.context.rndv.oversubscribed || self.cpu.is_shared
    }

    /// Asks every stream to wake the poller. True: there is something to do now. Ended by [`Engine::disarm`].
    pub(crate) fn arm(&mut self) -> bool {
        // Another thread's turn may have made ready what that thread does not wait for.
        let is_ready = self.can_read_now() || self.buffered_sends.is_copying() || self.collectives.is_ready();
        !self.context.endpoints.arm() || is_ready
    }

    /// Ends what [`Engine::arm`] began.
    pub(crate) fn disarm(&mut self) {
        self.context.endpoints.disarm();
    }

    /// Whether a message can be read out of its sender's memory now.
    pub(crate) fn can_read_now(&self) -> bool {
        self.context.rndv.can_read_now(&self.context.endpoints)
    }

    /// Publishes that this rank waits on `cpu`, and says how it waits next.
    pub(crate) fn next_wait(&mut self, cpu: u32, now: Instant) -> Wait {
        let is_shared = self.context.endpoints.publish_cpu(cpu);
        self.cpu.next_wait(is_shared, now)
    }

    /// When something is due at the latest, such as the end of the next operation's time.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let (messages, me) = (&self.messages, self.context.me);
        let since = |id| messages.since(id);
        let copies = self.buffered_sends.next_deadline(&self.context.rndv, me, messages.waiting_senders(), since);
        let deadlines = [
            self.collectives.next_deadline(),
            self.messages.next_deadline(),
            copies,
            self.windows.next_deadline(),
            self.context.deserted_until(),
            self.relay.next_look(),
            self.device_messages.next_look(),
            self.device_accesses.next_look(),
            self.context.endpoints.next_deadline(),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// Whether every byte that should has left this process.
    pub(crate) fn flushed(&mut self) -> bool {
        self.context.endpoints.flushed()
    }

    /// The bytes that wait to be written.
    pub(crate) fn unsent(&self) -> usize {
        self.context.endpoints.unsent()
    }

    /// Ends what runs out of time at `now`.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.collectives.check_deadline(&mut self.context, now);
        self.messages.check_deadlines(&mut self.context, now);
        self.windows.check_deadlines(&mut self.context, now);
        self.context.check_deserted(now);
        self.choose_blocked_sends(now);
        self.handle_losses();
    }

    /// Begins to copy sends that have waited for their receivers while other ranks wait to send to this one.
    pub(crate) fn choose_blocked_sends(&mut self, now: Instant) {
        let OpContext { rndv, endpoints, .. } = &mut self.context;
        let since = |id| self.messages.since(id);
        self.buffered_sends.choose(rndv, endpoints, self.messages.waiting_senders(), since, now);
    }

    /// Copies a piece of a send that is to end from a copy. True: there was some.
    fn copy_blocked_send(&mut self) -> bool {
        let is_copying = self.buffered_sends.is_copying();
        let OpContext { rndv, endpoints, .. } = &mut self.context;
        if let Some(completion) = self.buffered_sends.copy_piece(rndv, endpoints) {
            self.send_done(completion);
        }
        is_copying
    }

    /// Reads messages out of their senders' memory. True: something moved.
    fn progress_reads(&mut self) -> bool {
        let mut done = Vec::new();
        let moved = self.context.rndv.progress_reads(&mut self.context.endpoints, &mut done);
        for (from, completion) in done {
            self.recv_done(from, completion);
        }
        moved
    }

    /// Takes what has come in the streams on the agenda. True: something moved.
    fn progress_recvs(&mut self) -> bool {
        let (mut moved, mut turn) = (false, 0);
        while let Some(peer) = self.context.endpoints.reading(turn) {
            moved |= self.progress_recv(peer);
            // If it has left the list, another has its place.
            turn += usize::from(self.context.endpoints.reading(turn) == Some(peer));
        }
        moved
    }

    /// Writes what waits, as far as there may be room. True: something moved.
    pub(crate) fn progress_sends(&mut self) -> bool {
        let (mut moved, mut turn) = (false, 0);
        while let Some(peer) = self.context.endpoints.writing(turn) {
            moved |= self.progress_send(peer);
            // As above.
            turn += usize::from(self.context.endpoints.writing(turn) == Some(peer));
        }
        moved
    }

    fn progress_send(&mut self, peer: Rank) -> bool {
        let mut done = Vec::new();
        let moved = self.context.endpoints.progress_send(peer, &mut done);
        for completion in done {
            self.send_done(completion);
        }
        moved
    }

    /// Ends the connections to peers that have nothing more to say.
    fn end_connections(&mut self, gone: Vec<(Rank, LinkDown)>) {
        for (peer, down) in gone {
            // This process may not have run meanwhile, and what has come was sent before the end.
            while self.progress_recv(peer) {}
            self.context.endpoints.lose(peer, &down);
        }
        self.handle_losses();
    }

    /// Takes what has come from `peer`, some frames at most. True: something moved.
    pub(crate) fn progress_recv(&mut self, peer: Rank) -> bool {
        let Some(mut inbox) = self.context.endpoints.take_inbox(peer) else { return false };
        let mut moved = false;
        let mut ended = None;
        for _ in 0..FRAMES_PER_TURN {
            match inbox.poll(&mut moved, |header| self.take_header(peer, header)) {
                Ok(Some((header, sink))) => self.take_payload(peer, header, sink),
                Ok(None) => break,
                Err(down) => {
                    ended = Some(down);
                    break;
                }
            }
            self.handle_losses();
        }
        // Back in its place first: an operation whose payload is cut off is one that waits for the peer.
        self.context.endpoints.return_inbox(peer, inbox, moved || ended.is_some());
        if let Some(down) = ended {
            self.lose(peer, &down);
            return true;
        }
        moved
    }

    // ---- what comes and what is done ----

    fn take_header(&mut self, from: Rank, header: Header) -> Sink {
        self.collectives.note_called(from, header.called());
        let ctx = &mut self.context;
        match (header.kind, header.match_space) {
            (FrameKind::Eager, MatchSpace::Collective) => return self.collectives.arrives(ctx, from, header),
            (FrameKind::Eager, MatchSpace::PointToPoint) => return self.messages.arrives(ctx, from, header),
            (FrameKind::Eager, MatchSpace::Device) => return self.relay.arrives(ctx, from, header),
            (FrameKind::Eager, MatchSpace::DeviceMessage) => return self.device_messages.arrives(ctx, from, header),
            (FrameKind::Eager, MatchSpace::DeviceAccess) => return self.device_accesses.arrives(ctx, from, header),
            (FrameKind::Data, space) => {
                let buffer = match ctx.rndv.take_buffer(from, header.token) {
                    None if space == MatchSpace::Collective => self.collectives.asked_arrives(ctx, from, header),
                    known => known,
                };
                return buffer.filter(|buffer| buffer.fits(header.payload())).map_or(Sink::Discard, Sink::Buffer);
            }
            (FrameKind::Put, _) => return self.windows.put_arrives(ctx, from, header),
            (FrameKind::Accumulate, _) => return self.windows.accumulate_arrives(ctx, from, header),
            (FrameKind::Fail, _) => return Sink::Heap(Vec::new()),
            (FrameKind::Rts, MatchSpace::Collective) => self.collectives.rts_arrives(ctx, from, header),
            (FrameKind::Rts, MatchSpace::PointToPoint) => self.messages.rts_arrives(ctx, from, header),
            (FrameKind::Rts, MatchSpace::Device) => self.relay.rts_arrives(ctx, from, header),
            (FrameKind::Rts, MatchSpace::DeviceMessage) => self.device_messages.rts_arrives(ctx, from, header),
            (FrameKind::Rts, MatchSpace::DeviceAccess) => self.device_accesses.rts_arrives(ctx, from, header),
            (FrameKind::Ready, MatchSpace::Collective) => self.collectives.ready_arrives(ctx, from, header),
            (FrameKind::Ready, _) => {}
            (FrameKind::Rtr, _) => ctx.rndv.rtr_arrives(&mut ctx.endpoints, from, header),
            (FrameKind::Ats, _) => {
                if let Some(completion) = ctx.rndv.ats_arrives(from, header.token) {
                    self.send_done(completion);
                }
            }
            (FrameKind::Invalidated, _) => {
                if !ctx.rndv.invalidation_arrives(&mut ctx.endpoints, from, header.token) {
                    self.collectives.clear_address(from, header.token);
                    self.messages.clear_address(from, header.token);
                    self.relay.clear_address(from, header.token);
                }
            }
            (FrameKind::Credit, MatchSpace::DeviceMessage) => self.device_messages.notice_arrives(ctx, from, header),
            (FrameKind::Credit, MatchSpace::DeviceAccess) => self.device_accesses.notice_arrives(from, header),
            (FrameKind::Credit, _) => self.messages.credits_arrive(from, header.len),
            (FrameKind::Get, _) => self.windows.get_arrives(ctx, from, header),
            (FrameKind::Signal, _) => self.windows.signal_arrives(ctx, from, header),
            (FrameKind::Flush, _) => self.windows.flush_arrives(ctx, from, header),
            (FrameKind::Flushed, _) => self.windows.flushed_arrives(ctx, from, header),
        }
        Sink::Discard
    }

    fn take_payload(&mut self, from: Rank, header: Header, sink: Sink) {
        let ctx = &mut self.context;
        match (header.kind, sink) {
            (FrameKind::Fail, Sink::Heap(text)) => {
                self.take_failure(from, header, String::from_utf8_lossy(&text).into_owned());
            }
            (_, Sink::Buffer(buffer)) if buffer.is_full() => {
                ctx.rndv.came(from, &buffer);
                self.recv_done(from, buffer.completion);
            }
            (_, Sink::Buffer(buffer)) => ctx.rndv.expect(from, header.token, buffer),
            (_, Sink::Heap(bytes)) => match header.match_space {
                MatchSpace::Collective => self.collectives.unexpected_complete(ctx, from, header, bytes),
                MatchSpace::PointToPoint => self.messages.unexpected_complete(ctx, from, header, bytes),
                MatchSpace::Device => self.relay.unexpected_complete(ctx, from, header, bytes),
                // There is always room for what is wanted.
                MatchSpace::DeviceMessage | MatchSpace::DeviceAccess => {}
            },
            (_, Sink::Discard) => {}
        }
    }

    /// Another rank has given an operation up.
    fn take_failure(&mut self, from: Rank, header: Header, text: String) {
        let ctx = &mut self.context;
        match header.match_space {
            MatchSpace::Collective => {
                if header.index == Reason::Loss as u32 {
                    ctx.endpoints.set_reported(from, header.culprit(ctx.size()), text.clone());
                }
                self.collectives.failed_elsewhere(ctx, from, header, text);
            }
            MatchSpace::Device => self.relay.failed_elsewhere(ctx, from, header, text),
            MatchSpace::DeviceMessage => self.device_messages.failed_elsewhere(ctx, from, header, text),
            MatchSpace::DeviceAccess => self.device_accesses.failed_elsewhere(ctx, from, header, text),
            MatchSpace::PointToPoint => {
                let by = if header.index == End::Sender as u32 { End::Sender } else { End::Receiver };
                match ctx.rndv.op_of_token(from, header.token, by) {
                    Some(OpId::Message(id)) => self.messages.failed_elsewhere(ctx, id, from, by, text),
                    Some(OpId::RmaOp(id)) => self.windows.failed_elsewhere(ctx, id, &text),
                    // Its sender has gone on with a copy.
                    Some(OpId::Protocol) if by == End::Receiver => ctx.rndv.drop_send(from, header.token),
                    _ => {}
                }
            }
        }
    }

    /// The bytes that `completion` waited for are written, or read by their receiver.
    fn send_done(&mut self, completion: Completion) {
        self.done(completion, None);
    }

    /// The bytes that `completion` waited for have come from `from`.
    fn recv_done(&mut self, from: Rank, completion: Completion) {
        self.done(completion, Some(from));
    }

    fn done(&mut self, completion: Completion, source: Option<Rank>) {
        match completion.op {
            OpId::Collective(sequence) => self.collectives.step_done(sequence, completion.step),
            OpId::Message(id) => self.messages.done(&mut self.context, id, source),
            OpId::RmaOp(id) => self.windows.done(&mut self.context, id),
            OpId::Outbound(number) => self.relay.sent(number),
            OpId::Inbound(number) => self.relay.received(number),
            OpId::PieceSent { peer, number } => self.device_messages.sent(peer, number),
            OpId::PieceReceived { peer, number } => self.device_messages.received(peer, number),
            OpId::Access { peer, transfer, number } => self.device_accesses.done(peer, transfer, number),
            OpId::Window(_) | OpId::Protocol => {}
        }
    }
}

/// How many turns pass between checks for new connections, broken ones, and time. They are system calls, which would take
/// longer than a short operation.
const SLOW_PATH_INTERVAL: u32 = 1024;

/// How many frames of one peer are taken before the next peer's.
const FRAMES_PER_TURN: usize = 32;
