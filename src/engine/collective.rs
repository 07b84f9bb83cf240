//! Collectives: one at a time, in the order issued, each by its plan.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::algo::{Scaling, ScratchLimit};
use crate::deadline::Pulse;
use crate::engine::absent_ranks::AbsentRanks;
use crate::engine::body::Body;
use crate::engine::completion::{Completion, OpId};
use crate::engine::context::OpContext;
use crate::engine::failures::Suspect;
use crate::engine::frame::{Failed, FrameKind, Header, MatchSpace, Reason, RtsInfo};
use crate::engine::heartbeat::{Heartbeat, RankState, SendHeartbeat};
use crate::engine::owed::Owed;
use crate::engine::per_rank::PerRank;
use crate::engine::plan::{Executed, Plan, PlanCache};
use crate::engine::question::Question;
use crate::engine::recv_buffer::{RecvBuffer, Sink};
use crate::engine::reduce::Operands;
use crate::engine::region::{Region, Scratch, Spaces};
use crate::engine::request::Request;
use crate::engine::rndv::{HOT_EAGER_BYTES, Known};
use crate::error::Error;
use crate::schedule::{Action, StepId};
use crate::signature::Signature;
use crate::sync::Arc;
use crate::types::{DType, Rank, ReduceOp};
use crate::work::Work;

/// A message that came before it was asked for.
enum Unexpected {
    Whole(Vec<u8>),
    Rts(RtsInfo),
}

/// Why another rank gave a collective up.
struct Failure {
    reporter: Rank,
    /// The ranks disagree about it, as this rank would have found in its turn.
    is_mismatch: bool,
    /// The rank whose loss is the reason.
    lost: Option<Rank>,
    /// It is that of the collective before, which had ended on this rank.
    is_late: bool,
    text: String,
}

/// A message's place among all: the other rank, sequence number, position between the two ranks.
type Key = (Rank, u64, u32);

/// A receive of the active collective that waits.
struct Posted {
    step: StepId,
    /// The sender has been told that there is a buffer.
    has_asked: bool,
}

struct Active {
    sequence: u64,
    request: Request,
    work: Work,
    plan: Arc<Plan>,
    /// Per step, how many others it still waits for.
    blocked: Vec<u32>,
    ready: VecDeque<StepId>,
    left: usize,
    deadline: Option<Instant>,
    pulse: Pulse,
    suspect: Option<Suspect>,
    /// The step in which it waits for its caller, and what for.
    awaits: Option<(StepId, u32)>,
    /// What follows when its steps are done.
    question: Option<Box<Question>>,
    /// The number of its plan's first message to each other rank, and from there.
    first_message: u32,
}

/// What another rank is known to have called.
#[derive(Clone, Copy, Default)]
struct Caller {
    /// One more than the last collective that it is known to have called.
    called: u64,
    /// Until when its last heartbeat tells that it waits in a collective.
    heartbeat_deadline: Option<Instant>,
}

/// The collectives of one communicator.
pub(crate) struct Collectives {
    /// The algorithm that the configuration forces, where it has one for the shape.
    pub(crate) algorithm: Option<String>,
    /// None where no rank is to be told.
    pub(crate) send_heartbeat: Option<SendHeartbeat>,
    /// By rank.
    callers: PerRank<Caller>,
    absent_ranks: AbsentRanks,
    next: u64,
    queue: VecDeque<(Request, Work)>,
    active: Option<Active>,
    /// Receives of the active collective that wait.
    posted: FxHashMap<Key, Posted>,
    unexpected: FxHashMap<Key, (Signature, Unexpected)>,
    /// Messages of this rank that their receivers have asked for before they are sent, with their lengths.
    asked: FxHashMap<Key, (Signature, u64)>,
    /// The tokens of those of the active collective that wait to be asked for.
    announced: FxHashMap<Key, u64>,
    /// Collectives that other ranks gave up before this rank came to them.
    failed: BTreeMap<u64, Failure>,
    pub(crate) plans: PlanCache,
    /// That of the question before an all_to_all.
    question: Option<Arc<Plan>>,
    /// How much memory copies may take. The same on every rank.
    pub(crate) scratch_limit: ScratchLimit,
    scratch: Scratch,
    /// What has not come of the collective that ended last. Nothing follows that one until it has.
    owed: Owed,
    /// `blocked` and `ready` of the collective before, to be used again.
    spare: (Vec<u32>, VecDeque<StepId>),
}

impl Collectives {
    /// Of a communicator of so many ranks.
    pub(crate) fn new(size: usize) -> Collectives {
        Collectives {
            algorithm: None,
            send_heartbeat: None,
            callers: PerRank::new(size),
            absent_ranks: AbsentRanks::default(),
            next: 0,
            queue: VecDeque::new(),
            active: None,
            posted: FxHashMap::default(),
            unexpected: FxHashMap::default(),
            asked: FxHashMap::default(),
            announced: FxHashMap::default(),
            failed: BTreeMap::new(),
            plans: PlanCache::default(),
            question: None,
            scratch_limit: ScratchLimit::UNBOUNDED,
            scratch: Scratch::default(),
            owed: Owed::default(),
            spare: (Vec::new(), VecDeque::new()),
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.active.is_none() && self.queue.is_empty()
    }

    /// Whether a turn would go on with a collective, which waits for nothing.
    pub(crate) fn is_ready(&self) -> bool {
        match &self.active {
            Some(active) => (active.left == 0 && self.has_heard()) || !active.ready.is_empty(),
            None => !self.queue.is_empty(),
        }
    }

    /// Whether nothing has come of collectives that this rank has not called.
    pub(crate) fn has_no_unexpected(&self) -> bool {
        self.unexpected.is_empty() && self.asked.is_empty() && self.failed.is_empty()
    }

    /// Counts a collective that ended before it was submitted.
    pub(crate) fn skip(&mut self) {
        self.next += 1;
    }

    /// The sequence number that the next collective gets.
    pub(crate) fn next_sequence(&self) -> u64 {
        self.next
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let active = self.active.as_ref()?;
        let judgement = active.suspect.as_ref().map(|suspect| suspect.until);
        active.deadline.into_iter().chain(active.pulse.due).chain(judgement).min()
    }

    /// Message `token` of `from` must be asked for.
    pub(crate) fn clear_address(&mut self, from: Rank, token: u64) {
        for ((sender, ..), (_, unexpected)) in &mut self.unexpected {
            if let Unexpected::Rts(rts) = unexpected
                && (*sender, rts.token) == (from, token)
            {
                rts.address = None;
            }
        }
    }

    /// What every rank must have called of the collective that runs.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn signature(&self) -> Option<Signature> {
        self.active.as_ref().map(|active| active.request.signature)
    }

    /// The collective that runs now or next: what came for earlier ones is stale.
    pub(crate) fn current(&self) -> u64 {
        self.next - self.queue.len() as u64 - u64::from(self.active.is_some())
    }

    // ---- other ranks ----

    /// Notes how many collectives `rank` has called at least.
    #[inline]
    pub(crate) fn note_called(&mut self, rank: Rank, called: u64) {
        let caller = self.callers.get_mut(rank);
        caller.called = caller.called.max(called);
    }

    /// How many collectives `rank` is known to have called.
    pub(crate) fn called(&self, rank: Rank) -> u64 {
        self.callers.get(rank).called
    }

    /// Notes that ranks wait in a collective, or what they do instead.
    pub(crate) fn heartbeat_arrives(&mut self, ctx: &mut OpContext, heartbeat: &Heartbeat, now: Instant) {
        match &heartbeat.state {
            RankState::Waiting(signature) => self.others_wait(ctx, heartbeat, *signature, now),
            RankState::Absent(in_flight) => self.others_are_absent(heartbeat, in_flight, now),
        }
    }

    /// Notes that others wait, and compares what they called with what this rank did.
    fn others_wait(&mut self, ctx: &mut OpContext, heartbeat: &Heartbeat, signature: Signature, now: Instant) {
        // Twice the time that it takes until the next one comes, which may be late.
        let until = now.checked_add(Duration::from_millis(heartbeat.again_millis.saturating_mul(2)));
        for rank in heartbeat.ranks.iter().filter(|rank| **rank != ctx.me) {
            self.note_called(*rank, heartbeat.sequence.saturating_add(1));
            self.callers.get_mut(*rank).heartbeat_deadline = until;
        }
        let Some(from) = heartbeat.ranks.iter().find(|rank| **rank != ctx.me) else { return };
        if self.owed.is_of(heartbeat.sequence) {
            self.word_arrives(ctx, *from, signature);
        } else if self.active.as_ref().is_some_and(|active| active.sequence == heartbeat.sequence) {
            self.check_signature(ctx, *from, signature);
        }
    }

    // ---- steps ----

    /// Begins a collective: now, or once those before it have ended. One of which steps are taken comes first.
    pub(crate) fn submit(&mut self, ctx: &mut OpContext, request: Request, taken: Executed, work: Work) {
        let is_first = self.is_idle();
        self.next += 1;
        if is_first {
            let now = work.began();
            self.start(ctx, self.next - 1, request, taken, work, now);
            self.progress(ctx);
        } else {
            self.queue.push_back((request, work));
        }
    }

    /// Starts, advances and completes collectives as far as they go. True: something moved.
    pub(crate) fn progress(&mut self, ctx: &mut OpContext) -> bool {
        let mut moved = false;
        loop {
            if self.active.is_none() && !self.start_next(ctx) {
                return moved;
            }
            while let Some(step) = self.active.as_mut().and_then(|active| active.ready.pop_front()) {
                moved = true;
                self.run_step(ctx, step);
            }
            match &self.active {
                Some(active) if active.left == 0 && self.has_heard() => self.end_part(ctx),
                Some(_) => return moved,
                None => {}
            }
            moved = true;
        }
    }

    fn start_next(&mut self, ctx: &mut OpContext) -> bool {
        let Some((request, work)) = self.queue.pop_front() else { return false };
        let sequence = self.next - self.queue.len() as u64 - 1;
        self.start(ctx, sequence, request, Executed::default(), work, Instant::now());
        true
    }

    fn start(
        &mut self,
        ctx: &mut OpContext,
        sequence: u64,
        request: Request,
        mut taken: Executed,
        work: Work,
        now: Instant,
    ) {
        let (mut request, question) = self.first_part(ctx, request, &mut taken);
        let plan = taken.plan.take().unwrap_or_else(|| self.prepare(ctx, &mut request));
        let (mut blocked, mut ready) = std::mem::take(&mut self.spare);
        plan.after(&taken, &mut blocked, &mut ready);
        ctx.recorder.started(work.number(), now);
        let deadline = now.checked_add(request.timeout);
        let pulse = Pulse::new(now, request.timeout);
        let left = plan.own_steps() - taken.steps;
        self.active = Some(Active {
            sequence,
            request,
            work,
            plan,
            blocked,
            ready,
            left,
            deadline,
            pulse,
            suspect: None,
            awaits: None,
            question,
            first_message: 0,
        });
        let silent = self.owed.ranks().find_map(|rank| Some((rank, ctx.lost(rank)?)));
        if let Some(failure) = self.failed.remove(&sequence) {
            self.fail_active_remotely(ctx, failure);
        } else if let Some((rank, cause)) = ctx.failures.left_before(sequence) {
            self.fail_active_lost(ctx, rank, cause);
        } else if let Some((rank, cause)) = silent {
            self.suspect(ctx, rank, cause);
        } else {
            self.owed.ranks().for_each(|rank| ctx.endpoints.expect(rank));
            self.check_unexpected_signatures(ctx, sequence);
        }
    }

    /// Compares what came early with what this rank called.
    fn check_unexpected_signatures(&mut self, ctx: &mut OpContext, sequence: u64) {
        let Some(ours) = self.active.as_ref().map(|active| active.request.signature) else { return };
        let announced = self.unexpected.iter().map(|(key, (theirs, _))| (*key, *theirs));
        let mut early = announced.chain(self.asked.iter().map(|(key, (theirs, _))| (*key, *theirs)));
        if let Some(((from, ..), theirs)) = early.find(|((_, key, _), theirs)| *key == sequence && *theirs != ours) {
            self.check_signature(ctx, from, theirs);
        }
    }

    /// Fails the active collective if `from` called another. True: they agree.
    fn check_signature(&mut self, ctx: &mut OpContext, from: Rank, theirs: Signature) -> bool {
        let Some(active) = &self.active else { return true };
        let ours = active.request.signature;
        if ours == theirs {
            return true;
        }
        let (sequence, me) = (active.sequence, ctx.me);
        let detail = ours.disagreement(sequence, me, from, &theirs);
        self.fail_active_with(ctx, |operation| Error::Mismatch { operation, detail });
        false
    }

    fn run_step(&mut self, ctx: &mut OpContext, step: StepId) {
        let Some(active) = &mut self.active else { return };
        let (index, plan) = (step as usize, &active.plan);
        let (action, message) = (plan.schedule.steps[index].action, active.first_message + plan.message[index]);
        match action {
            Action::Send { to, from } => {
                let region = active.request.spaces.region(from);
                self.start_send(ctx, step, to, region, message);
            }
            Action::Recv { from, .. } | Action::RecvReduce { from, .. } => self.start_receive(ctx, step, from, message),
            Action::Await { number, .. } => active.awaits = Some((step, number)),
            _ => {
                let sequence = active.sequence;
                active.request.compute(action, ctx.size(), ctx.rndv.team);
                self.step_done(sequence, step);
            }
        }
    }

    fn start_send(&mut self, ctx: &mut OpContext, step: StepId, to: Rank, region: Region, message: u32) {
        let Some(active) = &self.active else { return };
        let (sequence, len) = (active.sequence, region.len());
        if active.plan.only_tells(step as usize) {
            ctx.endpoints.send_control(to, active.request.header(sequence, message, 0));
            return self.step_done(sequence, step);
        }
        if let Some(cause) = ctx.lost(to) {
            return self.suspect(ctx, to, cause);
        }
        let is_busy = active.plan.is_busy(&active.request.spaces);
        let header = active.request.header(sequence, message, len);
        let completion = Completion { op: OpId::Collective(sequence), step };
        let is_hot = active.request.sends_results_of(HOT_EAGER_BYTES);
        let eager = ctx.rndv.is_eager(&mut ctx.endpoints, to, len, is_hot);
        if eager {
            if ctx.endpoints.send(to, header, Body::of(region), completion) {
                self.step_done(sequence, step);
            }
        } else {
            let key = (to, sequence, message);
            let is_asked = self.asked.remove(&key).is_some_and(|(_, asked)| asked == len as u64);
            let is_cache_hot = active.request.sends_results_of(ctx.rndv.hot_bytes);
            let known = Known { is_asked, is_cache_hot };
            // A short message has the same header as on the fast path, which its receiver compares.
            let header = Header { is_busy, ..header };
            let sent = ctx.rndv.send_long(&mut ctx.endpoints, to, header, Body::of(region), completion, known);
            self.announced.extend(sent.map(|token| (key, token)));
        }
        if let Some(cause) = ctx.lost(to) {
            self.suspect(ctx, to, cause);
        }
    }

    fn start_receive(&mut self, ctx: &mut OpContext, step: StepId, from: Rank, message: u32) {
        let Some(active) = &self.active else { return };
        let sequence = active.sequence;
        let key = (from, sequence, message);
        // What a lost rank has only announced does not come.
        let comes = |early: &Unexpected| matches!(early, Unexpected::Whole(_)) || ctx.endpoints.lost(from).is_none();
        let early = self.unexpected.remove(&key).filter(|(_, early)| comes(early));
        match early {
            Some((_, Unexpected::Whole(bytes))) => {
                if let Some(mut buffer) = self.buffer(ctx, step, from, bytes.len() as u64) {
                    buffer.take(&bytes);
                    self.step_done(sequence, step);
                }
            }
            Some((_, Unexpected::Rts(rts))) => {
                if let Some(buffer) = self.buffer(ctx, step, from, rts.len) {
                    self.receive(ctx, from, rts, buffer);
                }
            }
            None => {
                ctx.endpoints.expect(from);
                match ctx.lost(from) {
                    Some(cause) => self.suspect(ctx, from, cause),
                    None => {
                        let has_asked = self.ask(ctx, step, from, message);
                        self.posted.insert(key, Posted { step, has_asked });
                    }
                }
            }
        }
    }

    /// Tells `from` that there is a buffer for what `step` receives, if that saves time. False: it is not told.
    fn ask(&self, ctx: &mut OpContext, step: StepId, from: Rank, message: u32) -> bool {
        let Some(active) = &self.active else { return false };
        let (Action::Recv { into, .. } | Action::RecvReduce { into, .. }) =
            active.plan.schedule.steps[step as usize].action
        else {
            return false;
        };
        let len = active.request.spaces.bytes(into);
        if !ctx.rndv.asks_first(&ctx.endpoints, from, len) {
            return false;
        }
        let header = active.request.header(active.sequence, message, len);
        ctx.endpoints.send_control(from, Header { kind: FrameKind::Ready, ..header });
        true
    }

    /// The place that `step` receives into.
    fn place(&self, step: StepId) -> Option<RecvBuffer> {
        let active = self.active.as_ref()?;
        let completion = Completion { op: OpId::Collective(active.sequence), step };
        active.request.buffer(active.plan.schedule.steps[step as usize].action, completion)
    }

    /// The place that `step` receives into, if it is of the length that arrives; else the collective fails.
    fn buffer(&mut self, ctx: &mut OpContext, step: StepId, from: Rank, len: u64) -> Option<RecvBuffer> {
        let buffer = self.place(step)?;
        let expected = buffer.region.len();
        if expected as u64 != len {
            let sequence = self.current();
            let me = ctx.me;
            let detail = format!(
                "the ranks disagree on the sizes of collective {sequence}: rank {me} expected {expected} bytes from rank {from}, which sent {len}"
            );
            self.fail_active_with(ctx, |operation| Error::Mismatch { operation, detail });
            return None;
        }
        Some(buffer)
    }

    /// Has a buffer for a message of the active collective whose RTS has come.
    fn receive(&self, ctx: &mut OpContext, from: Rank, rts: RtsInfo, buffer: RecvBuffer) {
        let bytes = |spaces: &Spaces| spaces.input.len().max(spaces.output.len());
        let bytes = self.active.as_ref().map_or(0, |active| bytes(&active.request.spaces));
        ctx.rndv.receive(&mut ctx.endpoints, from, rts, MatchSpace::Collective, buffer, bytes);
    }

    // ---- arrivals ----

    /// Whether what has come is of the active collective, on which the ranks agree, or of a later one.
    fn is_wanted(&mut self, ctx: &mut OpContext, from: Rank, header: Header) -> bool {
        if self.owed.is_of(header.key) {
            self.word_arrives(ctx, from, header.signature);
        }
        let is_active = self.active.as_ref().is_some_and(|active| active.sequence == header.key);
        header.key >= self.current() && (!is_active || self.check_signature(ctx, from, header.signature))
    }

    /// The receive that waits for `header`, if the message is for the active collective and the ranks agree on it.
    fn take_posted(&mut self, ctx: &mut OpContext, from: Rank, header: Header) -> Result<Option<Posted>, Stale> {
        if !self.is_wanted(ctx, from, header) {
            return Err(Stale);
        }
        Ok(self.posted.remove(&(from, header.key, header.index)))
    }

    pub(crate) fn arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) -> Sink {
        match self.take_posted(ctx, from, header) {
            Err(Stale) => Sink::Discard,
            Ok(None) => Sink::Heap(Vec::new()),
            Ok(Some(Posted { step, .. })) => {
                self.buffer(ctx, step, from, header.len).map_or(Sink::Discard, Sink::Buffer)
            }
        }
    }

    /// The place for a message that comes because this rank has asked for it, unless that is over.
    pub(crate) fn asked_arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) -> Option<RecvBuffer> {
        let posted = self.take_posted(ctx, from, header).ok()??;
        self.place(posted.step)
    }

    /// `from` has a buffer for a message of this rank.
    pub(crate) fn ready_arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) {
        if !self.is_wanted(ctx, from, header) {
            return;
        }
        let key = (from, header.key, header.index);
        let token = self.announced.get(&key).copied();
        if !token.is_some_and(|token| ctx.rndv.ready_arrives(&mut ctx.endpoints, from, token, header.len)) {
            self.asked.insert(key, (header.signature, header.len));
        }
    }

    /// A message that no step waited for when its header came is complete.
    pub(crate) fn unexpected_complete(&mut self, ctx: &mut OpContext, from: Rank, header: Header, bytes: Vec<u8>) {
        let sequence = header.key;
        match self.take_posted(ctx, from, header) {
            Err(Stale) => {}
            Ok(None) => {
                let key = (from, header.key, header.index);
                self.unexpected.insert(key, (header.signature, Unexpected::Whole(bytes)));
            }
            Ok(Some(Posted { step, .. })) => {
                if let Some(mut buffer) = self.buffer(ctx, step, from, header.len) {
                    buffer.take(&bytes);
                    self.step_done(sequence, step);
                }
            }
        }
    }

    pub(crate) fn rts_arrives(&mut self, ctx: &mut OpContext, from: Rank, header: Header) {
        match self.take_posted(ctx, from, header) {
            Err(Stale) => {}
            Ok(None) => {
                let unexpected = Unexpected::Rts(header.rts());
                let key = (from, header.key, header.index);
                self.unexpected.insert(key, (header.signature, unexpected));
            }
            Ok(Some(Posted { step, has_asked })) => match self.buffer(ctx, step, from, header.len) {
                // The sender has not seen yet that it is asked, and takes that for the answer.
                Some(buffer) if has_asked && header.address.is_none() => ctx.rndv.expect(from, header.token, buffer),
                Some(buffer) => self.receive(ctx, from, header.rts(), buffer),
                None => {}
            },
        }
    }

    pub(crate) fn failed_elsewhere(&mut self, ctx: &mut OpContext, from: Rank, header: Header, text: String) {
        let current = self.current();
        let sequence = if header.index == Reason::Loss as u32 { header.key.max(current) } else { header.key };
        let lost = header.culprit(ctx.size());
        let is_mismatch = header.index == Reason::Mismatch as u32;
        let failure = Failure { reporter: from, is_mismatch, lost, is_late: false, text };
        if self.owed.is_of(sequence) {
            if header.index == Reason::Earlier as u32 {
                // What went wrong before, this rank knows as well. Nobody has more to say of a collective that fails for it.
                return self.owed.clear();
            }
            return self.fail_late(ctx, failure);
        }
        match &self.active {
            Some(active) if active.sequence == sequence => self.fail_active_remotely(ctx, failure),
            _ if sequence >= current => {
                self.failed.entry(sequence).or_insert(failure);
            }
            _ => {}
        }
    }

    pub(crate) fn step_done(&mut self, sequence: u64, step: StepId) {
        let Some(active) = self.active.as_mut().filter(|active| active.sequence == sequence) else {
            return;
        };
        active.left -= 1;
        for &dependent in &active.plan.dependents[step as usize] {
            let blocked = &mut active.blocked[dependent as usize];
            *blocked -= 1;
            if *blocked == 0 {
                active.ready.push_back(dependent);
            }
        }
    }

    // ---- what the caller does itself ----

    /// What collective `sequence` waits for that its caller does.
    pub(crate) fn awaited(&self, sequence: u64) -> Option<u32> {
        let active = self.active.as_ref().filter(|active| active.sequence == sequence)?;
        active.awaits.map(|(_, number)| number)
    }

    /// The caller has done what collective `sequence` waited for.
    pub(crate) fn go_on(&mut self, ctx: &mut OpContext, sequence: u64) {
        let active = self.active.as_mut().filter(|active| active.sequence == sequence);
        if let Some((step, _)) = active.and_then(|active| active.awaits.take()) {
            self.step_done(sequence, step);
            self.progress(ctx);
        }
    }

    /// The caller cannot do it: ends collective `sequence`, unless that has ended, and tells every other rank.
    pub(crate) fn give_up(&mut self, ctx: &mut OpContext, sequence: u64, error: Error) {
        if self.active.as_ref().is_some_and(|active| active.sequence == sequence) {
            self.fail_active_with(ctx, |_| error);
        }
    }

    // ---- ends ----

    fn finish_active(&mut self, ctx: &mut OpContext, result: Result<(), Error>) {
        let Some(active) = self.active.take() else { return };
        let Active { sequence, request, work, plan, blocked, mut ready, .. } = active;
        ready.clear();
        self.spare = (blocked, ready);
        self.announced.clear();
        // What this rank had sent when it was asked for it.
        self.asked.retain(|(_, asked, _), _| *asked > sequence);
        if result.is_err() {
            ctx.cancel(OpId::Collective(sequence), |_, _| ());
            self.posted.clear();
            self.unexpected.retain(|(_, earlier, _), _| *earlier > sequence);
            self.owed.clear();
        } else {
            self.run_ahead(sequence, request.signature, &plan);
        }
        self.scratch.give_back(self.scratch_limit.limit());
        ctx.finish(work, result, None);
    }

    /// Ends the active collective with an error found here, and tells every other rank.
    fn fail_active_with(&mut self, ctx: &mut OpContext, error: impl FnOnce(String) -> Error) {
        let Some(active) = &self.active else { return };
        let sequence = active.sequence;
        let error = error(active.request.signature.to_string());
        let (reason, lost, text) = match &error {
            Error::PeerLost { .. } => (Reason::Loss, error.lost_rank(), error.to_string()),
            Error::Mismatch { detail, .. } => (Reason::Mismatch, None, detail.clone()),
            _ => (Reason::Own, None, error.to_string()),
        };
        self.finish_active(ctx, Err(error));
        tell_others(ctx, Failed::Collective { sequence, reason, lost }, &text);
    }

    /// Counts the next collective as one that has failed on this rank before it could begin, and tells every other rank. False:
    /// earlier ones have not ended, and nothing is done.
    pub(crate) fn fail_next(&mut self, ctx: &mut OpContext, text: &str) -> bool {
        if !self.is_idle() {
            return false;
        }
        let sequence = self.next;
        self.next += 1;
        self.failed.remove(&sequence);
        self.owed.clear();
        self.unexpected.retain(|(_, earlier, _), _| *earlier > sequence);
        self.asked.retain(|(_, earlier, _), _| *earlier > sequence);
        tell_others(ctx, Failed::Collective { sequence, reason: Reason::Own, lost: None }, text);
        true
    }

    fn fail_active_remotely(&mut self, ctx: &mut OpContext, failure: Failure) {
        let Some(active) = &self.active else { return };
        let operation = active.request.signature.to_string();
        let Failure { reporter, is_mismatch, lost, text, .. } = failure;
        self.finish_active(
            ctx,
            Err(match lost {
                Some(rank) => {
                    Error::PeerLost { operation, rank: rank.0, cause: format!("rank {reporter} reported: {text}") }
                }
                None if is_mismatch => Error::Mismatch { operation, detail: text },
                None => Error::Remote { operation, rank: reporter.0, cause: text },
            }),
        );
    }

    fn fail_active_lost(&mut self, ctx: &mut OpContext, rank: Rank, cause: String) {
        self.fail_active_with(ctx, |operation| Error::PeerLost { operation, rank: rank.0, cause });
    }

    /// Ends the active collective if it cannot do without `peer`.
    pub(crate) fn lose(&mut self, ctx: &mut OpContext, peer: Rank, cause: &str) {
        let Some(active) = &self.active else { return };
        let waits = self.posted.keys().any(|(from, ..)| *from == peer)
            || self.owed.ranks().any(|rank| rank == peer)
            || ctx.exchanges(OpId::Collective(active.sequence), peer);
        if waits {
            self.suspect(ctx, peer, cause.to_owned());
        }
    }

    /// Ends the active collective, which cannot do without `rank`: now if it is known why that is gone, else when this rank
    /// has been told of another one's loss, or has not been for a while.
    fn suspect(&mut self, ctx: &mut OpContext, rank: Rank, cause: String) {
        let Some(active) = &mut self.active else { return };
        let suspect = ctx.suspect(rank, cause, active.deadline);
        match ctx.blame(&suspect, Instant::now()) {
            Some((rank, cause)) => self.fail_active_lost(ctx, rank, cause),
            None => _ = active.suspect.get_or_insert(suspect),
        }
    }

    /// Ends the active collective if it waits for a rank that is gone and it is known whom to blame.
    pub(crate) fn resolve_suspect(&mut self, ctx: &mut OpContext, now: Instant) {
        let suspect = self.active.as_ref().and_then(|active| active.suspect.as_ref());
        if let Some((rank, cause)) = suspect.and_then(|suspect| ctx.blame(suspect, now)) {
            self.fail_active_lost(ctx, rank, cause);
        }
    }

    /// Ends the active collective if a rank left before it came to that; others fail when their turn comes.
    pub(crate) fn end_after_leave(&mut self, ctx: &mut OpContext) {
        let active = self.active.as_ref().map(|active| active.sequence);
        if let Some((rank, cause)) = active.and_then(|sequence| ctx.failures.left_before(sequence)) {
            self.fail_active_lost(ctx, rank, cause);
        }
    }

    pub(crate) fn end(&mut self, ctx: &mut OpContext, error: &dyn Fn(String) -> Error) {
        if let Some(active) = &self.active {
            let error = error(active.request.signature.to_string());
            self.finish_active(ctx, Err(error));
        }
        while let Some((request, work)) = self.queue.pop_front() {
            let error = error(request.signature.to_string());
            drop(request);
            ctx.finish(work, Err(error), None);
        }
        self.unexpected.clear();
        self.asked.clear();
        self.owed.clear();
    }

    pub(crate) fn check_deadline(&mut self, ctx: &mut OpContext, now: Instant) {
        let Some(active) = &mut self.active else { return };
        let sequence = active.sequence;
        if let Some(round) = active.pulse.beat(now)
            && let Some(send) = &self.send_heartbeat
        {
            send(Heartbeat::waiting(ctx.me, false, sequence, active.request.signature, round));
        }
        self.resolve_suspect(ctx, now);
        let Some(active) = &self.active else { return };
        if active.deadline.is_some_and(|deadline| deadline <= now) {
            let waited = active.work.age();
            let error = ctx.endpoints.timeout(0..ctx.size(), waited, self.describe_missing(ctx, sequence, now));
            self.fail_active_with(ctx, error);
        }
    }
}

/// What a reduction of this many ranks multiplies or divides.
#[inline]
pub(crate) fn scaling(reduce: Option<ReduceOp>, dtype: DType, size: usize) -> Scaling {
    match reduce {
        Some(ReduceOp::PreMulSum(_)) => Scaling::Inputs,
        // The average of one is that one, with all its bits.
        Some(ReduceOp::Avg) if size > 1 => Scaling::Sum { bytes: Operands::Sums(dtype).size() },
        _ => Scaling::Nothing,
    }
}

/// Tells every other rank of a failure.
fn tell_others(ctx: &mut OpContext, failed: Failed, text: &str) {
    for peer in ctx.endpoints.others() {
        ctx.endpoints.send_failure(peer, failed, text);
    }
}

/// The message belongs to a collective that is over.
struct Stale;

mod absent;
mod ahead;
mod missing;
mod parts;
mod prepare;
#[cfg(test)]
mod tests;
