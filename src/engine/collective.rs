//! Collectives: one at a time, in the order issued, each by its plan.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::algo::{Chunking, Collective, Scaling, Setting};
use crate::engine::body::Body;
use crate::engine::completion::{Completion, OpId};
use crate::engine::frame::{Failed, FrameKind, Header, MatchSpace, RtsInfo, Scope};
use crate::engine::heartbeat::{Heartbeat, Pulse};
use crate::engine::plan::{Executed, Plan, PlanCache};
use crate::engine::progress::Engine;
use crate::engine::recv_buffer::{RecvAction, RecvBuffer, Sink};
use crate::engine::reduce::{self, Operands};
use crate::engine::region::{Region, Scratch, Spaces};
use crate::error::{Error, rank_list};
use crate::schedule::{Action, Slice, Space, StepId};
use crate::signature::Signature;
use crate::sync::Arc;
use crate::types::{DType, Rank, ReduceOp};
use crate::work::Work;

/// A collective as it is submitted.
pub(crate) struct Request {
    pub(crate) collective: Collective,
    pub(crate) signature: Signature,
    pub(crate) reduce: Option<ReduceOp>,
    pub(crate) dtype: DType,
    pub(crate) spaces: Spaces,
    pub(crate) timeout: Duration,
}

impl Request {
    /// Takes a step that needs no other rank, of as many as `world`.
    pub(crate) fn compute(&self, action: Action, world: usize) {
        let dtype = self.dtype;
        let region = |slice| self.spaces.region(slice);
        match action {
            Action::Send { .. } | Action::Recv { .. } | Action::RecvReduce { .. } => {}
            // In place. `copy_from` would find that out run by run.
            Action::Copy { from, into } if self.spaces.begin_alike(from, into) => {}
            Action::Copy { from, into } if into.space == Space::Sums && from.space != Space::Sums => {
                self.spaces.each_block(into, from, |into, blocks| reduce::widen(dtype, into, blocks[0]));
            }
            Action::Copy { from, into } => region(into).copy_from(&region(from)),
            Action::Reduce { from, into } => {
                let operands = self.operands(into);
                region(into).zip(&region(from), |into, from| reduce::combine(operands, into, from));
            }
            Action::Fold { from, into, position } => {
                let operands = self.operands(into);
                let position = position as usize;
                self.spaces.each_block(into, from, |into, blocks| reduce::fold(operands, into, position, blocks));
            }
            Action::Scale { slice } => {
                if let Some(ReduceOp::PreMulSum(factor)) = self.reduce {
                    region(slice).each_mut(|run| reduce::scale(dtype, factor, run));
                }
            }
            Action::Average { from, into } if from == into => {
                region(into).each_mut(|run| reduce::divide(dtype, world, run));
            }
            Action::Average { from, into } => {
                let operands = self.operands(from);
                self.spaces.each_block(into, from, |into, blocks| reduce::average(operands, world, into, blocks));
            }
        }
    }

    /// What is combined in the memory of `slice`.
    fn operands(&self, slice: Slice) -> Operands {
        match slice.space {
            Space::Sums => Operands::Sums(self.dtype),
            _ => Operands::Elements(self.reduce.unwrap_or(ReduceOp::Sum), self.dtype),
        }
    }

    /// Whether what it sends was just written, as a rule: intermediate results, of data short enough to stay in the cache.
    pub(crate) fn sends_cache_hot(&self) -> bool {
        matches!(self.collective, Collective::AllReduce { .. }) && self.spaces.output.len() <= HOT_MAX_BYTES
    }

    /// The header of a message that is sent at once.
    pub(crate) fn header(&self, sequence: u64, message: u32, len: usize) -> Header {
        let signature = self.signature;
        Header {
            signature,
            index: message,
            ..Header::control(FrameKind::Eager, MatchSpace::Collective, sequence, 0, len as u64)
        }
    }

    /// The place that a step receives into, if it does.
    pub(crate) fn buffer(&self, action: Action, completion: Completion) -> Option<RecvBuffer> {
        let (into, action) = match action {
            Action::RecvReduce { into, .. } => (into, RecvAction::Reduce(self.operands(into))),
            Action::Recv { into, .. } => (into, RecvAction::Store),
            _ => return None,
        };
        Some(RecvBuffer { region: self.spaces.region(into), action, completion, received: 0 })
    }
}

/// A message that came before it was asked for.
enum Unexpected {
    Whole(Vec<u8>),
    Rts(RtsInfo),
}

/// Why another rank gave a collective up.
struct Failure {
    reporter: Rank,
    /// The rank whose loss is the reason.
    lost: Option<Rank>,
    text: String,
}

/// A message's place among all: sender, sequence number, position between the two ranks.
type Key = (Rank, u64, u32);

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
}

/// A rank that is gone and without which the collective cannot end. It may have left because another one is lost, of
/// which this rank is told soon.
struct Suspect {
    rank: Rank,
    cause: String,
    until: Option<Instant>,
}

/// The collectives of one communicator.
#[derive(Default)]
pub(crate) struct Collectives {
    next: u64,
    queue: VecDeque<(Request, Work)>,
    active: Option<Active>,
    /// Receives of the active collective that wait, with their steps.
    posted: FxHashMap<Key, StepId>,
    unexpected: FxHashMap<Key, (Signature, Unexpected)>,
    /// Collectives that other ranks gave up before this rank came to them.
    failed: BTreeMap<u64, Failure>,
    pub(crate) plans: PlanCache,
    scratch: Scratch,
    /// `blocked` and `ready` of the collective before, to be used again.
    spare: (Vec<u32>, VecDeque<StepId>),
}

impl Collectives {
    pub(crate) fn is_idle(&self) -> bool {
        self.active.is_none() && self.queue.is_empty()
    }

    /// Whether nothing has come of collectives that this rank has not called.
    pub(crate) fn has_no_news(&self) -> bool {
        self.unexpected.is_empty() && self.failed.is_empty()
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
        let judgement = active.suspect.as_ref().and_then(|suspect| suspect.until);
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
}

impl Engine {
    /// Begins a collective: now, or once those before it have ended. One of which steps are taken comes first.
    pub(crate) fn submit_collective(&mut self, request: Request, taken: Executed, work: Work) {
        let is_first = self.collectives.is_idle();
        self.collectives.next += 1;
        if is_first {
            let now = work.began();
            self.start(self.collectives.next - 1, request, taken, work, now);
            self.progress_collectives();
        } else {
            self.collectives.queue.push_back((request, work));
        }
    }

    /// Starts, advances and completes collectives as far as they go. True: something moved.
    pub(crate) fn progress_collectives(&mut self) -> bool {
        let mut moved = false;
        loop {
            if self.collectives.active.is_none() && !self.start_next() {
                return moved;
            }
            while let Some(step) = self.collectives.active.as_mut().and_then(|active| active.ready.pop_front()) {
                moved = true;
                self.run_step(step);
            }
            match &self.collectives.active {
                Some(active) if active.left == 0 => self.finish_active(Ok(())),
                Some(_) => return moved,
                None => {}
            }
            moved = true;
        }
    }

    fn start_next(&mut self) -> bool {
        let Some((request, work)) = self.collectives.queue.pop_front() else { return false };
        let sequence = self.collectives.next - self.collectives.queue.len() as u64 - 1;
        self.start(sequence, request, Executed::default(), work, Instant::now());
        true
    }

    /// The collective's plan, which becomes a part of what the ranks must agree on, and its scratch memory.
    pub(crate) fn prepare(&mut self, request: &mut Request) -> Arc<Plan> {
        let element = request.dtype.size();
        let scaling = match request.reduce {
            Some(ReduceOp::PreMulSum(_)) => Scaling::Inputs,
            // The average of one is that one, with all its bits.
            Some(ReduceOp::Avg) if self.peers.len() > 1 => {
                request.spaces.sum = Operands::Sums(request.dtype).size();
                Scaling::Sum { bytes: request.spaces.sum }
            }
            _ => Scaling::Nothing,
        };
        let setting = Setting { me: self.me, topo: &self.topo, element, scaling, chunking: Chunking::Chunks };
        let forced = self.algorithm.as_deref();
        let plan = self.collectives.plans.plan(&request.collective, setting, forced);
        request.signature.algorithm = plan.algorithm;
        let (scratch, sums) = ((plan.schedule.scratch, element), (plan.schedule.sums, request.spaces.sum));
        if scratch.0 > 0 || sums.0 > 0 {
            (request.spaces.scratch, request.spaces.sums) = self.collectives.scratch.regions(scratch, sums);
        }
        plan
    }

    fn start(&mut self, sequence: u64, mut request: Request, taken: Executed, work: Work, now: Instant) {
        let plan = self.prepare(&mut request);
        let (mut blocked, mut ready) = std::mem::take(&mut self.collectives.spare);
        plan.after(taken, &mut blocked, &mut ready);
        self.recorder.started(work.number(), now);
        let deadline = now.checked_add(request.timeout);
        let pulse = Pulse::new(now, request.timeout);
        let left = blocked.len() - taken.steps;
        self.collectives.active =
            Some(Active { sequence, request, work, plan, blocked, ready, left, deadline, pulse, suspect: None });
        if let Some(failure) = self.collectives.failed.remove(&sequence) {
            self.fail_active_remotely(failure);
        } else if let Some((rank, cause)) = self.left_before(sequence) {
            self.fail_active_lost(rank, cause);
        } else {
            self.check_arrived_signatures(sequence);
        }
    }

    /// Compares what came early with what this rank called.
    fn check_arrived_signatures(&mut self, sequence: u64) {
        let early = self.collectives.unexpected.iter().filter(|((_, key, _), _)| *key == sequence);
        let early: Vec<(Rank, Signature)> = early.map(|((from, ..), (signature, _))| (*from, *signature)).collect();
        for (from, signature) in early {
            if !self.check_signature(from, signature) {
                return;
            }
        }
    }

    /// Fails the active collective if `from` called another. True: they agree.
    fn check_signature(&mut self, from: Rank, theirs: Signature) -> bool {
        let Some(active) = &self.collectives.active else { return true };
        let ours = active.request.signature;
        if ours == theirs {
            return true;
        }
        let (sequence, me) = (active.sequence, self.me);
        let detail = if ours.calls_as(&theirs) {
            let (ours, theirs) = (ours.algorithm(), theirs.algorithm());
            format!(
                "the ranks disagree on how to run collective {sequence}: rank {me} chose {ours}, rank {from} {theirs}"
            )
        } else if ours.divides_otherwise(&theirs) {
            format!(
                "the ranks disagree on the sizes of collective {sequence}: rank {me} and rank {from} both called {ours}, but \
                 with other counts a rank"
            )
        } else {
            format!("the ranks disagree on collective {sequence}: rank {me} called {ours}, rank {from} called {theirs}")
        };
        self.fail_active_with(|operation| Error::Mismatch { operation, detail });
        false
    }

    fn run_step(&mut self, step: StepId) {
        let Some(active) = &mut self.collectives.active else { return };
        let (action, message) = (active.plan.schedule.steps[step as usize].action, active.plan.message[step as usize]);
        match action {
            Action::Send { to, from } => {
                let region = active.request.spaces.region(from);
                self.start_send(step, to, region, message);
            }
            Action::Recv { from, .. } | Action::RecvReduce { from, .. } => self.start_receive(step, from, message),
            _ => {
                let sequence = active.sequence;
                active.request.compute(action, self.peers.len());
                self.step_done(sequence, step);
            }
        }
    }

    fn start_send(&mut self, step: StepId, to: Rank, region: Region, message: u32) {
        if let Some(cause) = self.lost(to).map(str::to_owned) {
            return self.suspect(to, cause);
        }
        let Some(active) = &self.collectives.active else { return };
        let len = region.len();
        let is_busy = active.plan.is_busy(&active.request.spaces);
        let header = Header { is_busy, ..active.request.header(active.sequence, message, len) };
        let is_cache_hot = active.request.sends_cache_hot();
        let completion = Completion { op: OpId::Collective(active.sequence), step };
        let eager = self.is_eager(to, len, is_cache_hot);
        self.send_message(to, header, Body::of(region), completion, eager);
        if let Some(cause) = self.lost(to).map(str::to_owned) {
            self.suspect(to, cause);
        }
    }

    fn start_receive(&mut self, step: StepId, from: Rank, message: u32) {
        let Some(active) = &self.collectives.active else { return };
        let sequence = active.sequence;
        let key = (from, sequence, message);
        let early = self.collectives.unexpected.remove(&key);
        match early {
            Some((_, Unexpected::Whole(bytes))) => {
                if let Some(mut buffer) = self.buffer(step, from, bytes.len() as u64) {
                    buffer.take(&bytes);
                    self.step_done(sequence, step);
                }
            }
            Some((_, Unexpected::Rts(rts))) => {
                if let Some(buffer) = self.buffer(step, from, rts.len) {
                    self.take_up(from, rts, MatchSpace::Collective, buffer);
                }
            }
            None => {
                self.connect(from);
                match self.lost(from).map(str::to_owned) {
                    Some(cause) => self.suspect(from, cause),
                    None => {
                        self.collectives.posted.insert(key, step);
                    }
                }
            }
        }
    }

    /// The place that `step` receives into, if it is of the length that arrives; else the collective fails.
    fn buffer(&mut self, step: StepId, from: Rank, len: u64) -> Option<RecvBuffer> {
        let active = self.collectives.active.as_ref()?;
        let completion = Completion { op: OpId::Collective(active.sequence), step };
        let buffer = active.request.buffer(active.plan.schedule.steps[step as usize].action, completion)?;
        let region = &buffer.region;
        if region.len() as u64 != len {
            let detail = format!(
                "the ranks disagree on the sizes of collective {}: rank {} expected {} bytes from rank {from}, which sent {len}",
                active.sequence,
                self.me,
                region.len()
            );
            self.fail_active_with(|operation| Error::Mismatch { operation, detail });
            return None;
        }
        Some(buffer)
    }

    // ---- arrivals ----

    /// The step that waits for `header`, if the message is for the active collective and the ranks agree on it.
    fn posted_step(&mut self, from: Rank, header: Header) -> Result<Option<StepId>, Stale> {
        if header.key < self.collectives.current() {
            return Err(Stale);
        }
        let is_active = self.collectives.active.as_ref().is_some_and(|active| active.sequence == header.key);
        if is_active && !self.check_signature(from, header.signature) {
            return Err(Stale);
        }
        Ok(self.collectives.posted.remove(&(from, header.key, header.index)))
    }

    pub(crate) fn collective_arrives(&mut self, from: Rank, header: Header) -> Sink {
        match self.posted_step(from, header) {
            Err(Stale) => Sink::Discard,
            Ok(None) => Sink::Heap(Vec::new()),
            Ok(Some(step)) => self.buffer(step, from, header.len).map_or(Sink::Discard, Sink::Buffer),
        }
    }

    /// A message that nobody waited for when its header came is complete.
    pub(crate) fn collective_unexpected_complete(&mut self, from: Rank, header: Header, bytes: Vec<u8>) {
        let sequence = header.key;
        match self.posted_step(from, header) {
            Err(Stale) => {}
            Ok(None) => {
                let key = (from, header.key, header.index);
                self.collectives.unexpected.insert(key, (header.signature, Unexpected::Whole(bytes)));
            }
            Ok(Some(step)) => {
                if let Some(mut buffer) = self.buffer(step, from, header.len) {
                    buffer.take(&bytes);
                    self.step_done(sequence, step);
                }
            }
        }
    }

    pub(crate) fn collective_rts_arrives(&mut self, from: Rank, header: Header) -> Sink {
        match self.posted_step(from, header) {
            Err(Stale) => {}
            Ok(None) => {
                let unexpected = Unexpected::Rts(header.rts());
                let key = (from, header.key, header.index);
                self.collectives.unexpected.insert(key, (header.signature, unexpected));
            }
            Ok(Some(step)) => {
                if let Some(buffer) = self.buffer(step, from, header.len) {
                    self.take_up(from, header.rts(), MatchSpace::Collective, buffer);
                }
            }
        }
        Sink::Discard
    }

    /// Fails the active collective if it is `sequence`, which `from` called otherwise.
    pub(crate) fn compare_call(&mut self, from: Rank, sequence: u64, theirs: Signature) {
        if self.collectives.active.as_ref().is_some_and(|active| active.sequence == sequence) {
            self.check_signature(from, theirs);
        }
    }

    pub(crate) fn collective_failed_elsewhere(&mut self, from: Rank, header: Header, text: String) {
        let current = self.collectives.current();
        let sequence = if header.index == Scope::Communicator as u32 { header.key.max(current) } else { header.key };
        let lost = header.token.checked_sub(1).and_then(|rank| u32::try_from(rank).ok()).map(Rank);
        let failure = Failure { reporter: from, lost: lost.filter(|rank| rank.index() < self.size()), text };
        match &self.collectives.active {
            Some(active) if active.sequence == sequence => self.fail_active_remotely(failure),
            _ if sequence >= current => {
                self.collectives.failed.entry(sequence).or_insert(failure);
            }
            _ => {}
        }
    }

    pub(crate) fn step_done(&mut self, sequence: u64, step: StepId) {
        let Some(active) = self.collectives.active.as_mut().filter(|active| active.sequence == sequence) else {
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

    // ---- ends ----

    fn finish_active(&mut self, result: Result<(), Error>) {
        let Some(active) = &mut self.collectives.active else { return };
        let (sequence, work) = (active.sequence, active.work.clone());
        active.ready.clear();
        self.collectives.spare = (std::mem::take(&mut active.blocked), std::mem::take(&mut active.ready));
        self.collectives.active = None;
        if result.is_err() {
            self.cancel(OpId::Collective(sequence));
            self.collectives.posted.clear();
            self.collectives.unexpected.retain(|(_, earlier, _), _| *earlier > sequence);
        }
        self.finish(work, result, None);
    }

    /// Ends the active collective with an error found here, and tells every other rank.
    fn fail_active_with(&mut self, error: impl FnOnce(String) -> Error) {
        let Some(active) = &self.collectives.active else { return };
        let sequence = active.sequence;
        let error = error(active.request.signature.to_string());
        let text = error.to_string();
        let (scope, lost) = match error {
            Error::PeerLost { rank, .. } => (Scope::Communicator, Some(Rank(rank))),
            _ => (Scope::Operation, None),
        };
        self.finish_active(Err(error));
        for peer in self.other_ranks() {
            self.send_failure(peer, Failed::Collective { sequence, scope, lost }, &text);
        }
    }

    fn fail_active_remotely(&mut self, failure: Failure) {
        let Some(active) = &self.collectives.active else { return };
        let operation = active.request.signature.to_string();
        let Failure { reporter, lost, text } = failure;
        self.finish_active(Err(match lost {
            Some(rank) => {
                Error::PeerLost { operation, rank: rank.0, cause: format!("rank {reporter} reported: {text}") }
            }
            None => Error::Remote { operation, rank: reporter.0, cause: text },
        }));
    }

    fn fail_active_lost(&mut self, rank: Rank, cause: String) {
        self.fail_active_with(|operation| Error::PeerLost { operation, rank: rank.0, cause });
    }

    pub(crate) fn other_ranks(&self) -> Vec<Rank> {
        let all = (0..self.size()).map(Rank::from).filter(|rank| *rank != self.me);
        if self.size() <= NOTIFY_MAX_RANKS {
            all.collect()
        } else {
            all.filter(|rank| self.lost(*rank).is_none()).take(NOTIFY_MAX_RANKS).collect()
        }
    }

    /// Ends the active collective if it cannot do without `peer`.
    pub(crate) fn lose_collectives(&mut self, peer: Rank, cause: &str) {
        let Some(active) = &self.collectives.active else { return };
        let waits = self.collectives.posted.keys().any(|(from, ..)| *from == peer)
            || self.exchanges(OpId::Collective(active.sequence), peer);
        if waits {
            self.suspect(peer, cause.to_owned());
        }
    }

    /// Ends the active collective, which cannot do without `rank`: now if it is known why that is gone, else when this rank
    /// has been told of another one's loss, or has not been for a while.
    fn suspect(&mut self, rank: Rank, cause: String) {
        let is_explained = !self.is_watched || self.peers[rank.index()].reported.is_some();
        let Some(active) = &mut self.collectives.active else { return };
        if is_explained {
            return self.fail_active_lost(rank, cause);
        }
        let until = Instant::now().checked_add(NEWS_PATIENCE);
        active.suspect.get_or_insert(Suspect { rank, cause, until });
        self.resolve_suspect();
    }

    /// Ends the active collective if it waits for a rank that is gone and another one's loss is known.
    pub(crate) fn resolve_suspect(&mut self) {
        let suspects = self.collectives.active.as_ref().is_some_and(|active| active.suspect.is_some());
        if suspects && let Some((rank, cause)) = self.failures.lost() {
            self.fail_active_lost(rank, cause);
        }
    }

    /// Ends the active collective if a rank left before it came to that; others fail when their turn comes.
    pub(crate) fn end_collectives_after_leave(&mut self) {
        let active = self.collectives.active.as_ref().map(|active| active.sequence);
        if let Some((rank, cause)) = active.and_then(|sequence| self.left_before(sequence)) {
            self.fail_active_lost(rank, cause);
        }
    }

    pub(crate) fn end_collectives(&mut self, error: &dyn Fn(String) -> Error) {
        if let Some(active) = &self.collectives.active {
            let error = error(active.request.signature.to_string());
            self.finish_active(Err(error));
        }
        while let Some((request, work)) = self.collectives.queue.pop_front() {
            let error = error(request.signature.to_string());
            drop(request);
            self.finish(work, Err(error), None);
        }
        self.collectives.unexpected.clear();
    }

    pub(crate) fn check_collective_deadline(&mut self, now: Instant) {
        let Some(active) = &mut self.collectives.active else { return };
        let sequence = active.sequence;
        if let Some((round, interval)) = active.pulse.beat(now)
            && let Some(send) = &self.send_heartbeat
        {
            let signature = active.request.signature;
            let again_millis = interval.as_millis().try_into().unwrap_or(u64::MAX);
            send(Heartbeat { sequence, signature, round, again_millis, ranks: vec![self.me] });
        }
        if let Some(suspect) = active.suspect.take_if(|suspect| suspect.until.is_some_and(|until| until <= now)) {
            return self.fail_active_lost(suspect.rank, suspect.cause);
        }
        if active.deadline.is_some_and(|deadline| deadline <= now) {
            let waited = active.work.age();
            let error = self.timeout(0..self.size(), waited, self.describe_missing(sequence, now));
            self.fail_active_with(error);
        }
    }

    /// Says which ranks have not called collective `sequence`, or, if all have, which ones this rank waits for, and which
    /// one those may wait for.
    fn describe_missing(&self, sequence: u64, now: Instant) -> String {
        let (came, missing): (Vec<Rank>, Vec<Rank>) =
            (0..self.size()).map(Rank::from).partition(|rank| *rank == self.me || self.has_called(*rank, sequence));
        if !missing.is_empty() {
            let (missing, came) = (rank_list(&missing), rank_list(&came));
            return format!("collective {sequence}: rank(s) {missing} did not call it; rank(s) {came} did");
        }
        let posted: HashSet<Rank> = self.collectives.posted.keys().map(|(from, ..)| *from).collect();
        let op = OpId::Collective(sequence);
        let slow: Vec<Rank> =
            came.iter().copied().filter(|rank| posted.contains(rank) || self.exchanges(op, *rank)).collect();
        let slow = format!(
            "collective {sequence}: all ranks called it; rank(s) {} did not finish their part",
            rank_list(&slow)
        );
        let others = came.into_iter().filter(|rank| *rank != self.me);
        let silent: Vec<Rank> = others.filter(|rank| self.is_silent(*rank, sequence, now)).collect();
        if silent.is_empty() {
            slow
        } else {
            format!("{slow}; rank(s) {} finished it or fell silent", rank_list(&silent))
        }
    }

    /// Whether `rank` has called collective `sequence` and no later one, and no longer says that it waits.
    fn is_silent(&self, rank: Rank, sequence: u64, now: Instant) -> bool {
        let peer = &self.peers[rank.index()];
        peer.called == sequence + 1 && peer.heard_until.is_none_or(|until| until <= now)
    }
}

/// The message belongs to a collective that is over.
struct Stale;

/// How much data a collective may have to find in the cache what it wrote.
const HOT_MAX_BYTES: usize = 512 * 1024;

/// In larger worlds, failures are told to this many ranks, and they time out on the others.
const NOTIFY_MAX_RANKS: usize = 128;

/// How long a rank that is gone may owe that to another one's loss, of which this rank has not heard.
const NEWS_PATIENCE: Duration = Duration::from_millis(300);
