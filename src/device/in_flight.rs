//! What a communicator has in flight on its device, and how that ends.
//!
//! Streams tell the host how far they are by words: one that says that an operation has begun, one that it is done. Whoever
//! looks at them ends the works: the thread that waits for one, who asks, and the [`watch`](crate::device::watch). None of
//! them calls the driver.
//!
//! # Release
//! A stream that waits for a word of a rank that will never write it would wait for ever. When an operation has failed, its
//! rank first stores the mark of the failure; once those before it have ended, the watch writes the words that its stream waits
//! for, until its operations have ended. From there on what the stream writes is not the result of the collective, so a work is a success only if no
//! rank has a mark of a failure of this operation, or of one before it, *after* its stream has finished it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::device::control::{Control, Failure, FailureKind};
use crate::device::counters::Word;
use crate::error::{Error, rank_list};
use crate::signature::Signature;
use crate::sync::{Arc, AtomicBool, Mutex, Ordering, lock};
use crate::sys::fork::Origin;
use crate::types::Rank;
use crate::work::{Drive, Work};

/// What the communicator does when operations on its device end.
pub(crate) trait Ends: Send + Sync {
    /// An operation has ended: completes its work.
    fn ended(&self, work: &Work, result: Result<(), Error>);

    /// The lost rank, if there is one, as the error of an operation.
    fn loss(&self, operation: &str) -> Option<Error>;

    /// The ranks that wait in a collective on the CPU which this rank has not called.
    fn elsewhere(&self) -> Vec<Rank>;
}

/// An operation that has been submitted.
#[derive(Debug)]
struct Flight {
    number: u64,
    call: Signature,
    work: Work,
    limit: Duration,
    /// When its stream was first seen to have reached it: only from there on its time counts.
    started: Option<Instant>,
}

/// Why nothing more is submitted.
#[derive(Clone, Debug)]
pub(crate) enum Halt {
    /// The ranks disagreed. They begin anew at the next operation.
    Mismatch,
    /// For good.
    Failed(Error),
}

#[derive(Debug, Default)]
struct State {
    flights: VecDeque<Flight>,
    /// The number of the last operation.
    last: u64,
    /// How many came before the ranks last began anew.
    before: u64,
    /// The first failure, by which operations end that this rank itself gave up.
    failed: Option<(u64, Error)>,
    halt: Option<Halt>,
    /// By lane of words, those that the stream waits for, and the greatest values.
    awaits: Vec<(usize, Vec<(Word, u64)>)>,
    is_watched: bool,
    is_stuck: bool,
    /// The last operation whose end somebody wants to be told soon.
    closely: Option<u64>,
    /// Has whoever watches look at once.
    look_soon: Option<fn()>,
    /// Since when the words are being written that the stream waits for.
    released: Option<Instant>,
}

/// What is in flight on one lane.
pub(crate) struct InFlight {
    comm: String,
    origin: Origin,
    lane: usize,
    control: Arc<Control>,
    ends: Arc<dyn Ends>,
    state: Mutex<State>,
    /// Whether an operation is in flight, to be asked without the lock.
    is_busy: AtomicBool,
}

/// When the watch looks again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// When something is submitted.
    Never,
    /// In a while.
    Later,
    /// At once: a stream has to be released, or somebody wants to be told of an end.
    Soon,
}

impl InFlight {
    /// Nothing in flight on this lane.
    pub(crate) fn new(comm: String, lane: usize, control: Arc<Control>, ends: Arc<dyn Ends>) -> Arc<InFlight> {
        let (state, is_busy) = (Mutex::default(), AtomicBool::new(false));
        Arc::new(InFlight { comm, origin: Origin::here(), lane, control, ends, state, is_busy })
    }

    /// Notes an operation that is about to be put on a stream. True: somebody has to watch it.
    pub(crate) fn begin(&self, number: u64, call: Signature, work: Work, limit: Duration) -> bool {
        let mut state = lock(&self.state);
        state.last = number;
        if state.flights.is_empty() {
            // What was released before has run out; this has its own time to do so.
            state.released = None;
        }
        state.flights.push_back(Flight { number, call, work, limit, started: None });
        // Relaxed, here and below: a hint; the lock orders the rest.
        self.is_busy.store(true, Ordering::Relaxed);
        !std::mem::replace(&mut state.is_watched, true)
    }

    /// Notes how to have whoever watches look at once.
    pub(crate) fn is_watched_by(&self, look_soon: fn()) {
        lock(&self.state).look_soon = Some(look_soon);
    }

    /// Ends an operation of which nothing is put on a stream.
    pub(crate) fn end(&self, work: &Work, result: Result<(), Error>) {
        self.ends.ended(work, result);
    }

    /// Notes what the stream waits for at most in the words of a lane, after something has been put on it.
    pub(crate) fn submitted(&self, lane: usize, words: impl Iterator<Item = (Word, u64)>) {
        let mut state = lock(&self.state);
        let index = state.awaits.iter().position(|(known, _)| *known == lane).unwrap_or_else(|| {
            state.awaits.push((lane, Vec::new()));
            state.awaits.len() - 1
        });
        let (_, awaits) = &mut state.awaits[index];
        awaits.clear();
        awaits.extend(words);
    }

    /// Why nothing more can be submitted.
    pub(crate) fn halt(&self) -> Option<Halt> {
        self.look();
        lock(&self.state).halt.clone()
    }

    /// Goes on after a disagreement, once nothing is in flight on any rank. So many operations came before.
    pub(crate) fn resume(&self, before: u64) {
        let mut state = lock(&self.state);
        if matches!(state.halt, Some(Halt::Mismatch)) {
            state.halt = None;
            state.failed = None;
            state.released = None;
            state.last = 0;
            state.closely = None;
            state.before = before;
            state.awaits.clear();
        }
    }

    /// Why ranks cannot begin anew after a disagreement: for one of them that was not all. The error of this call.
    pub(crate) fn obstacle(&self, call: Signature) -> Option<Error> {
        let told = |rank| Some((rank, self.control.failure_of(rank, self.lane)?));
        let mut failures = self.control.ranks().filter_map(told);
        let (reporter, failure) = failures.find(|(_, failure)| failure.kind != FailureKind::Mismatch)?;
        Some(reported(reporter, failure, call))
    }

    /// Submits nothing more.
    pub(crate) fn stop(&self, error: &Error) {
        lock(&self.state).halt = Some(Halt::Failed(error.clone()));
    }

    /// Waits until the operation of this number has ended, for `limit` at most. The error says how long.
    pub(crate) fn wait_for(&self, number: u64, limit: Duration) -> Result<(), Duration> {
        let begin = Instant::now();
        while lock(&self.state).flights.front().is_some_and(|flight| flight.number <= number) {
            let waited = begin.elapsed();
            if waited >= limit {
                return Err(waited);
            }
            std::thread::sleep(NAP_MAX);
            self.look();
        }
        Ok(())
    }

    /// Whether the device has not ended something a while after it failed.
    pub(crate) fn is_stuck(&self) -> bool {
        lock(&self.state).is_stuck
    }

    /// Whether nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        !self.is_busy.load(Ordering::Relaxed)
    }

    /// Ends what streams have finished.
    pub(crate) fn look(&self) {
        if self.is_idle() {
            return;
        }
        self.end_finished(&mut Vec::new());
    }

    fn end_finished(&self, ended: &mut Vec<(Work, Result<(), Error>)>) {
        {
            let mut state = lock(&self.state);
            while let Some(flight) = state.flights.front()
                && self.control.has_ended(self.control.me(), self.lane, flight.number)
            {
                // After the word of its end, as the module's text says.
                let result = self.outcome(&state, flight);
                let flight = state.flights.pop_front().expect("looked at above");
                if let Err(error) = &result {
                    state.halt_after(error);
                }
                ended.push((flight.work, result));
            }
            self.is_busy.store(!state.flights.is_empty(), Ordering::Relaxed);
        }
        for (work, result) in ended.drain(..) {
            self.ends.ended(&work, result);
        }
    }

    /// How an operation that its stream has finished has ended.
    fn outcome(&self, state: &State, flight: &Flight) -> Result<(), Error> {
        if let Some((_, error)) = state.failed.as_ref().filter(|_| !state.is_sound(flight.number)) {
            return Err(named(error.clone(), flight.call));
        }
        match self.control.first_failure(self.lane, flight.number) {
            Some((reporter, failure)) if reporter != self.control.me() => Err(reported(reporter, failure, flight.call)),
            _ => Ok(()),
        }
    }

    /// Gives up the operation of this number and all later ones. The other ranks are told by the mark in this rank's page.
    pub(crate) fn fail(&self, number: u64, kind: FailureKind, culprit: Rank, error: Error) {
        let mut state = lock(&self.state);
        self.give_up(&mut state, number, kind, culprit, error);
    }

    fn give_up(&self, state: &mut State, number: u64, kind: FailureKind, culprit: Rank, error: Error) {
        if !state.is_sound(number) {
            return;
        }
        self.control.fail(&Failure { lane: self.lane, number, kind, rank: culprit, text: detail(&error) });
        state.halt_after(&error);
        state.failed = Some((number, error));
    }

    /// Looks at everything in flight: at what has ended, what has failed elsewhere and what takes too long.
    pub(crate) fn tick(&self, now: Instant) -> Look {
        let mut ended = Vec::new();
        self.end_finished(&mut ended);
        let mut state = lock(&self.state);
        let (me, lane) = (self.control.me(), self.lane);
        for flight in state.flights.iter_mut().filter(|flight| flight.started.is_none()) {
            if !self.control.has_started(me, lane, flight.number) {
                break;
            }
            flight.started = Some(now);
        }
        if let Some(first) = state.flights.front() {
            let (number, call, last) = (first.number, first.call, state.flights.back().map_or(0, |last| last.number));
            if state.is_sound(number) {
                if let Some(Error::PeerLost { operation, rank, cause }) = self.ends.loss(&call.to_string()) {
                    let error = Error::PeerLost { operation, rank, cause };
                    self.give_up(&mut state, number, FailureKind::PeerLost, Rank(rank), error);
                } else if let Some((reporter, failure)) = self.control.first_failure(lane, last)
                    && state.is_sound(failure.number)
                {
                    let from = failure.number;
                    let error = reported(reporter, failure, call);
                    state.halt_after(&error);
                    state.failed = Some((from, error));
                } else if let Some(late) = state.late(now) {
                    // Also if a later one has failed: that does not end those before it.
                    let (number, error) = (late.number, self.timeout(&state, late, now));
                    self.give_up(&mut state, number, FailureKind::Timeout, me, error);
                }
            }
            // Operations before the one that has failed may still end well.
            if !state.is_sound(number) {
                for (lane, words) in &state.awaits {
                    self.control.release(*lane, words.iter().copied());
                }
                state.released.get_or_insert(now);
            }
        }
        let overdue = state.overdue(now);
        if overdue {
            state.is_stuck = true;
            ended.extend(state.abandon());
            self.is_busy.store(false, Ordering::Relaxed);
        }
        let look = match state.flights.front() {
            None => Look::Never,
            Some(first) if state.released.is_some() || state.closely.is_some_and(|last| first.number <= last) => {
                Look::Soon
            }
            Some(_) => Look::Later,
        };
        state.is_watched = look != Look::Never;
        drop(state);
        for (work, result) in ended {
            log::warn!("{}: the device has not ended it a while after it failed", work.operation());
            self.ends.ended(&work, result);
        }
        look
    }

    /// Gives up everything in flight, and what would come next, because this rank leaves.
    pub(crate) fn leave(&self, error: Error) {
        // What the stream has finished is no failure.
        self.look();
        let mut state = lock(&self.state);
        let number = state.flights.front().map_or(state.last + 1, |flight| flight.number);
        self.give_up(&mut state, number, FailureKind::Left, self.control.me(), error);
    }

    fn timeout(&self, state: &State, late: &Flight, now: Instant) -> Error {
        let waited = late.started.map_or(Duration::ZERO, |started| now - started);
        let has_called = |rank: &Rank| self.control.calls_of(*rank, self.lane) >= late.number;
        let number = state.before + late.number;
        let (came, missing): (Vec<Rank>, Vec<Rank>) = self.control.ranks().partition(has_called);
        let detail = if missing.is_empty() {
            let behind = |(lane, words): &(usize, Vec<_>)| self.control.behind(*lane, words.iter().copied());
            let mut slow: Vec<Rank> = state.awaits.iter().flat_map(behind).collect();
            slow.sort_unstable();
            slow.dedup();
            format!(
                "device collective {number}: all ranks called it; rank(s) {} did not finish their part",
                rank_list(&slow)
            )
        } else {
            let mut elsewhere = self.ends.elsewhere();
            elsewhere.retain(|rank| missing.contains(rank));
            let elsewhere = match &elsewhere[..] {
                [] => String::new(),
                ranks => format!("; rank(s) {} called a collective on the CPU instead", rank_list(ranks)),
            };
            let (missing, came) = (rank_list(&missing), rank_list(&came));
            format!("device collective {number}: rank(s) {missing} did not call it; rank(s) {came} did{elsewhere}")
        };
        Error::Timeout { operation: late.call.to_string(), waited, detail }
    }
}

impl State {
    /// The first failure stays the reason; but what comes beside a disagreement, after which ranks could go on, ends that.
    fn halt_after(&mut self, error: &Error) {
        match (&self.halt, error) {
            (Some(Halt::Failed(_)), _) => {}
            (_, Error::Mismatch { .. }) => self.halt = Some(Halt::Mismatch),
            (_, other) => self.halt = Some(Halt::Failed(other.clone())),
        }
    }

    /// Whether no failure is known of the operation of this number, or of one before it.
    fn is_sound(&self, number: u64) -> bool {
        self.failed.as_ref().is_none_or(|(failed, _)| *failed > number)
    }

    /// The first operation whose time is over.
    fn late(&self, now: Instant) -> Option<&Flight> {
        let is_late = |flight: &&Flight| flight.started.is_some_and(|started| now - started >= flight.limit);
        self.flights.iter().find(is_late)
    }

    /// Whether the stream has been released for long and has not run out.
    fn overdue(&self, now: Instant) -> bool {
        self.released.is_some_and(|since| now - since > DRAIN_TIMEOUT)
    }

    /// Ends what the device will not.
    fn abandon(&mut self) -> Vec<(Work, Result<(), Error>)> {
        let Some((_, error)) = self.failed.clone() else { return Vec::new() };
        let end = |flight: Flight| (flight.work, Err(named(error.clone(), flight.call)));
        self.flights.drain(..).map(end).collect()
    }
}

impl Drive for InFlight {
    fn poll(&self) {
        if self.origin.is_here() {
            self.look();
        }
    }

    fn watch_closely(&self, work: &Work) {
        if !self.origin.is_here() {
            return;
        }
        let look_soon = {
            let mut state = lock(&self.state);
            let Some(flight) = state.flights.iter().rev().find(|flight| flight.work.is(work)) else { return };
            let number = flight.number;
            if state.closely.is_some_and(|last| last >= number) {
                return;
            }
            state.closely = Some(number);
            state.look_soon
        };
        if let Some(look_soon) = look_soon {
            look_soon();
        }
    }

    fn drive(&self, work: &Work, deadline: Option<Instant>) {
        if !self.origin.is_here() {
            let how = "put on a device by this process's parent, before the fork".to_owned();
            let (operation, comm) = (work.operation().to_owned(), self.comm.clone());
            return work.complete(Err(Error::Closed { operation, comm, how }), None);
        }
        let begin = Instant::now();
        loop {
            self.look();
            let now = Instant::now();
            if work.is_done() || deadline.is_some_and(|deadline| deadline <= now) {
                return;
            }
            match now - begin {
                waited if waited < SPIN => std::hint::spin_loop(),
                waited => std::thread::sleep((waited / 8).clamp(NAP_MIN, NAP_MAX)),
            }
        }
    }
}

/// An error as that of another operation.
pub(crate) fn named(error: Error, call: Signature) -> Error {
    let called = call.to_string();
    match error {
        Error::Mismatch { detail, .. } => Error::Mismatch { operation: called, detail },
        Error::Timeout { waited, detail, .. } => Error::Timeout { operation: called, waited, detail },
        Error::Remote { rank, cause, .. } => Error::Remote { operation: called, rank, cause },
        Error::PeerLost { rank, cause, .. } => Error::PeerLost { operation: called, rank, cause },
        Error::Closed { comm, how, .. } => Error::Closed { operation: called, comm, how },
        other => other,
    }
}

/// The error of an operation that failed on another rank.
fn reported(reporter: Rank, failure: Failure, call: Signature) -> Error {
    let operation = call.to_string();
    match failure.kind {
        FailureKind::Mismatch => Error::Mismatch { operation, detail: failure.text },
        FailureKind::PeerLost => {
            let cause = format!("rank {reporter} reported: {}", failure.text);
            Error::PeerLost { operation, rank: failure.rank.0, cause }
        }
        FailureKind::Left => Error::PeerLost { operation, rank: reporter.0, cause: failure.text },
        FailureKind::Timeout | FailureKind::Driver => {
            Error::Remote { operation, rank: reporter.0, cause: failure.text }
        }
    }
}

/// What the other ranks are told of an error.
fn detail(error: &Error) -> String {
    match error {
        Error::Mismatch { detail, .. } => detail.clone(),
        Error::PeerLost { cause, .. } => cause.clone(),
        Error::Closed { how, .. } => format!("it {how}"),
        other => other.to_string(),
    }
}

/// How long a waiting thread looks without sleeping.
const SPIN: Duration = Duration::from_micros(50);

/// The bounds of its naps.
const NAP_MIN: Duration = Duration::from_micros(20);
const NAP_MAX: Duration = Duration::from_micros(200);

/// How long a released stream may take to run out.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
