//! What a communicator has in flight on its device, and how that ends.
//!
//! Each stream tells the host by words how far it is: one word says that an operation has begun, another that it is done. Every
//! thread that looks at these words ends works: a thread that waits for a work, one that asks whether it is done, and the
//! [`watch`](crate::device::watch). None of these threads calls the driver.
//!
//! # Release
//! A stream that waits for a word which no rank will ever write would wait for ever. So when an operation has failed, its rank
//! first stores the mark of the failure. Once the operations before it have ended, the watch writes the words that the stream
//! waits for, until all operations have ended. What the stream writes from then on is no result. So a work is a success only
//! if, *after* its stream has finished it, no rank has a mark of a failure of this operation or of an earlier one.

use std::collections::VecDeque;
use std::fmt::{self, Display};
use std::time::{Duration, Instant};

use crate::deadline::Pulse;
use crate::device::control::{Control, Failure, FailureKind};
use crate::device::counters::Word;
use crate::device::other_hosts::OtherHosts;
use crate::error::Error;
use crate::signature::Signature;
use crate::sync::{Arc, AtomicBool, Mutex, MutexGuard, OnceLock, Ordering, Weak, lock};
use crate::sys::fork::Origin;
use crate::types::Rank;
use crate::work::{Drive, Work};

/// Messages of a batch that are in flight on one lane. They fail together with its others, which are on the same stream.
pub(crate) trait Part: Display + fmt::Debug + Send + Sync {
    /// The number of the first message. The part has that of the last one.
    fn first(&self) -> u64;

    /// The text of what its stream waits for in this lane, where it has this number; nothing if another part has more to tell.
    fn lateness(&self, lane: usize, number: u64) -> Option<String>;

    /// Whether all parts have failed and are released.
    fn is_released(&self) -> bool;

    /// Notes that its stream has reached it.
    fn started(&self, ends: &dyn Ends, now: Instant);

    /// Ends the part.
    fn ended(&self, ends: &dyn Ends, result: Result<(), Error>);

    /// Gives up all parts of the batch, since this one has failed, so that the stream runs out.
    fn fail_all(&self, error: &Error);
}

/// What was called.
#[derive(Clone, Debug)]
pub(crate) enum Called {
    Collective(Signature),
    Part(Arc<dyn Part>),
}

impl From<Signature> for Called {
    fn from(signature: Signature) -> Called {
        Called::Collective(signature)
    }
}

impl fmt::Display for Called {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Called::Collective(signature) => signature.fmt(f),
            Called::Part(part) => part.fmt(f),
        }
    }
}

/// What runs an operation on a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    Programs,
    Library,
}

/// A library that runs operations in place of programs. Only programs wait for words that can be released.
pub(crate) trait Runner: Send + Sync {
    /// Why its operations on streams will not end, if they will not.
    fn failure(&self) -> Option<String>;

    /// Has its operations on streams end, as the failures tell by then that are behind it. It may be called again, under locks of the device,
    /// and takes the engine's.
    fn give_up(&self);

    /// Stores the lane that is [told](InFlight::library_is_given_up) before that is done.
    fn serves(&self, lane: Weak<InFlight>);
}

/// What a communicator does when operations on its device begin and end.
pub(crate) trait Ends: Send + Sync {
    /// The stream has been seen to have reached these operations, perhaps seen before. Called under locks of the device.
    fn started(&self, works: &[Work], now: Instant);

    /// An operation has ended: completes its work.
    fn ended(&self, work: &Work, result: Result<(), Error>);

    /// An operation took so long by the device's clock. It may have ended long ago.
    fn took(&self, work: &Work, time: Duration);

    /// The lost rank, if there is one, as the error of an operation.
    fn loss(&self, operation: &str) -> Option<Error>;

    /// The ranks that wait in a collective on the CPU which this rank has not called.
    fn elsewhere(&self) -> Vec<Rank>;

    /// Tells all ranks that this one waits in collective `sequence` of its device: which round of that it is, and after how long the next
    /// one follows. Called under locks of the device.
    fn waits(&self, sequence: u64, call: Signature, round: (u32, Duration));

    /// What those of `missing` had in flight instead of the collective in which this rank has waited `since`, in words. Called under locks
    /// of the device.
    fn instead(&self, since: Instant, missing: &[Rank]) -> String;
}

/// An operation that has been submitted.
#[derive(Debug)]
struct Flight {
    number: u64,
    call: Called,
    work: Work,
    limit: Duration,
    by: By,
    /// From when the watch first saw that the stream had reached it: only from then on its time counts, and it tells that it waits.
    pulse: Option<Pulse>,
    /// Whether other hosts have been told that this rank waits in it.
    is_reported: bool,
}

impl Flight {
    /// The first number that fails with it.
    fn first(&self) -> u64 {
        match &self.call {
            Called::Collective(_) => self.number,
            Called::Part(part) => part.first(),
        }
    }

    /// Whether nothing holds up its stream, once it has failed.
    fn is_released(&self) -> bool {
        match &self.call {
            Called::Collective(_) => true,
            Called::Part(part) => part.is_released(),
        }
    }

    /// When the watch first saw that its stream had reached it.
    fn started(&self) -> Option<Instant> {
        self.pulse.map(|pulse| pulse.began)
    }

    /// Notes that its stream has reached it, and tells `ends`.
    fn start(&mut self, ends: &dyn Ends, now: Instant) {
        self.pulse = Some(Pulse::new(now, self.limit));
        match &self.call {
            Called::Collective(_) => ends.started(std::slice::from_ref(&self.work), now),
            Called::Part(part) => part.started(ends, now),
        }
    }

    /// Ends it with a result, and tells `ends`.
    fn end(self, ends: &dyn Ends, result: Result<(), Error>) {
        match self.call {
            Called::Collective(_) => ends.ended(&self.work, result),
            Called::Part(part) => part.ended(ends, result),
        }
    }
}

/// Why nothing more is submitted.
#[derive(Clone, Debug)]
pub(crate) enum Halt {
    /// The ranks disagreed. They begin anew at the next operation.
    Mismatch,
    /// An operation has failed for good.
    Failed(Error),
}

#[derive(Debug, Default)]
struct State {
    flights: VecDeque<Flight>,
    /// The number of the last operation.
    last: u64,
    /// How many operations came before the ranks last began anew.
    before: u64,
    /// The failure of the earliest operation: that operation and all later ones end with its error.
    failed: Option<(u64, Error)>,
    /// Parts of batches that fail with it, to be told once the lock is free.
    spread: Vec<(Arc<dyn Part>, Error)>,
    halt: Option<Halt>,
    /// By lane, the words that the stream waits for, and the greatest values.
    awaits: Vec<(usize, Vec<(Word, u64)>)>,
    is_watched: bool,
    is_stuck: bool,
    /// The last operation for which `watch_closely` was called.
    closely: Option<u64>,
    /// Has the watch look at once.
    look_soon: Option<fn()>,
    /// Since when a rank is known to have given up its library.
    given_up: Option<Instant>,
    /// Since when failed operations are to be released.
    failing: Option<Instant>,
    /// Since when nothing holds up the stream that has been released.
    released: Option<Instant>,
}

/// The operations in flight on one lane.
pub(crate) struct InFlight {
    comm: String,
    origin: Origin,
    lane: usize,
    control: Arc<Control>,
    ends: Arc<dyn Ends>,
    /// The engine that exchanges messages with other hosts, if there are any.
    hosts: Option<Arc<dyn OtherHosts>>,
    /// The library that runs operations of this lane, if there is one.
    runner: OnceLock<Arc<dyn Runner>>,
    state: Mutex<State>,
    /// Whether an operation is in flight, to be asked without the lock.
    is_busy: AtomicBool,
    /// Whether failed operations have been released, likewise.
    is_released: AtomicBool,
}

/// When the watch looks again: a later variant is sooner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Look {
    /// When something is submitted.
    Never,
    /// In a while.
    Later,
    /// At once: a stream has to be released, or a caller wants to learn of an end soon.
    Soon,
}

/// Operations that the watch looks at until none is in flight.
pub(crate) trait Watched: Send + Sync {
    /// Looks at all operations in flight: which have ended, have failed on another rank, or take too long.
    fn tick(&self, now: Instant) -> Look;

    /// Whether an operation has not ended on the device a while after it failed.
    fn is_stuck(&self) -> bool;

    /// Stores the function that has the watch look at once.
    fn is_watched_by(&self, look_soon: fn());
}

impl InFlight {
    /// A lane with nothing in flight.
    pub(crate) fn new(
        comm: String,
        lane: usize,
        control: Arc<Control>,
        ends: Arc<dyn Ends>,
        hosts: Option<Arc<dyn OtherHosts>>,
    ) -> Arc<InFlight> {
        let (state, is_busy, is_released) = (Mutex::default(), AtomicBool::new(false), AtomicBool::new(false));
        let (origin, runner) = (Origin::here(), OnceLock::new());
        Arc::new(InFlight { comm, origin, lane, control, ends, hosts, runner, state, is_busy, is_released })
    }

    /// Stores the library that runs operations of this lane beside programs, before there are any.
    pub(crate) fn is_run_by(self: &Arc<Self>, runner: Arc<dyn Runner>) {
        runner.serves(Arc::downgrade(self));
        assert!(self.runner.set(runner).is_ok(), "there is one library");
    }

    /// Whether a library runs operations of this lane.
    pub(crate) fn is_by_library(&self) -> bool {
        self.runner.get().is_some()
    }

    /// The lane's number, and the words of its ranks.
    pub(crate) fn lane(&self) -> (usize, &Control) {
        (self.lane, &self.control)
    }

    /// Whether failed operations have been released.
    pub(crate) fn is_released(&self) -> bool {
        // Relaxed: only how long a thread waits depends on it.
        self.is_released.load(Ordering::Relaxed)
    }

    /// Notes an operation that is about to be put on a stream. Returns true if the caller must have it watched.
    pub(crate) fn begin(&self, number: u64, call: impl Into<Called>, work: Work, limit: Duration, by: By) -> bool {
        let mut state = lock(&self.state);
        state.last = number;
        if state.flights.is_empty() {
            // Operations released before have run out; this one has its own time to do so.
            (state.failing, state.released) = (None, None);
        }
        let call = call.into();
        state.flights.push_back(Flight { number, call, work, limit, by, pulse: None, is_reported: false });
        // Relaxed, here and below: a hint; the lock orders the rest.
        self.is_busy.store(true, Ordering::Relaxed);
        let is_first = !std::mem::replace(&mut state.is_watched, true);
        if !state.is_sound(number) {
            state.spread_from(number);
        }
        spread(state);
        is_first
    }

    /// Ends an operation that is not put on any stream.
    pub(crate) fn end(&self, work: &Work, result: Result<(), Error>) {
        self.ends.ended(work, result);
    }

    /// Notes the greatest values of a lane's words that the stream waits for, after something has been put on it.
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

    /// As [`halt`](InFlight::halt), for operations `first` to `last` that are about to be put on a stream: looks for failures
    /// on other ranks, too. If another rank has given up one of these operations, that fails here as well, and is not noted
    /// yet. If it has given up an earlier one, which has ended here, this rank goes on as that rank does.
    pub(crate) fn halt_before(&self, first: u64, last: u64, call: &impl Display) -> Option<Halt> {
        let known = self.halt();
        if known.is_some() {
            return known;
        }
        let (reporter, failure) = self.control.first_failure(self.lane, last)?;
        let (from, error) = (failure.number, reported(reporter, failure, call));
        if from >= first {
            return Some(Halt::Failed(error));
        }
        let mut state = lock(&self.state);
        if state.is_sound(from) {
            state.fail(from, error);
        }
        let halt = state.halt.clone();
        spread(state);
        halt
    }

    /// Goes on after a disagreement, once no rank has anything in flight. So many operations came `before`.
    pub(crate) fn resume(&self, before: u64) {
        let mut state = lock(&self.state);
        if matches!(state.halt, Some(Halt::Mismatch)) {
            state.halt = None;
            state.failed = None;
            (state.failing, state.released, state.given_up) = (None, None, None);
            state.last = 0;
            state.closely = None;
            state.before = before;
            state.awaits.clear();
            self.is_released.store(false, Ordering::Relaxed);
        }
    }

    /// The number of the earliest operation that has failed, if one has.
    pub(crate) fn failed_from(&self) -> Option<u64> {
        lock(&self.state).failed.as_ref().map(|(number, _)| *number)
    }

    /// Has all later calls fail with this error.
    pub(crate) fn stop(&self, error: &Error) {
        lock(&self.state).halt = Some(Halt::Failed(error.clone()));
    }

    /// Waits until the operation of this number has ended, for `limit` at most. The error says how long it has waited.
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

    pub(crate) fn is_idle(&self) -> bool {
        !self.is_busy.load(Ordering::Relaxed)
    }

    /// Ends the works of operations that streams have finished.
    pub(crate) fn look(&self) {
        if self.is_idle() {
            return;
        }
        self.end_finished(&mut Vec::new());
    }

    fn end_finished(&self, ended: &mut Vec<(Flight, Result<(), Error>)>) {
        {
            let mut state = lock(&self.state);
            while let Some(flight) = state.flights.front()
                && self.control.has_ended(self.control.me(), self.lane, flight.number)
            {
                // Looks for marks after the word of its end, as the module's text says.
                let result = self.outcome(&state, flight);
                let flight = state.flights.pop_front().expect("looked at above");
                if let Err(error) = &result {
                    state.halt_after(error);
                }
                ended.push((flight, result));
            }
            self.is_busy.store(!state.flights.is_empty(), Ordering::Relaxed);
            self.tell_of_end(ended);
        }
        for (flight, result) in ended.drain(..) {
            flight.end(&*self.ends, result);
        }
    }

    /// Has the CPU engine wait for no more failures of ended operations of a library. Under the lock: before the next begins.
    fn tell_of_end(&self, ended: &[(Flight, Result<(), Error>)]) {
        if let (Some(_), Some(hosts), Some((last, _))) = (self.runner.get(), &self.hosts, ended.last()) {
            hosts.ended(last.number);
        }
    }

    /// The result of an operation that its stream has finished.
    fn outcome(&self, state: &State, flight: &Flight) -> Result<(), Error> {
        if let Some((_, error)) = state.failed.as_ref().filter(|_| !state.is_sound(flight.number)) {
            return Err(named(error.clone(), &flight.call));
        }
        let own = self.control.name(self.control.me());
        match self.control.first_failure(self.lane, flight.number) {
            Some((reporter, failure)) if reporter != own => Err(reported(reporter, failure, &flight.call)),
            _ => Ok(()),
        }
    }

    /// Gives up the operation of this number and all later ones. The mark in this rank's page tells the other ranks.
    pub(crate) fn fail(&self, number: u64, kind: FailureKind, culprit: Rank, error: Error) {
        let mut state = lock(&self.state);
        self.give_up(&mut state, number, kind, culprit, error);
        spread(state);
    }

    /// As [`fail`](InFlight::fail), for an operation that fails with another one.
    pub(crate) fn fail_too(&self, number: u64, error: &Error) {
        let (kind, culprit) = self.kind(error);
        self.fail(number, kind, culprit, error.clone());
    }

    /// How this rank reports an error to the others, and the rank at fault.
    fn kind(&self, error: &Error) -> (FailureKind, Rank) {
        blame(error, self.control.name(self.control.me()))
    }

    /// Gives up all operations, since the last step of the setup has failed here. Other ranks may have heard what they wait for
    /// in that step, and so wait for operations of this rank, unless the error is what a rank has told to all of them.
    pub(crate) fn never_begins(&self, error: &Error) {
        if !matches!(error, Error::Init(_)) {
            self.fail_too(1, error);
        }
    }

    fn give_up(&self, state: &mut State, number: u64, kind: FailureKind, culprit: Rank, error: Error) {
        if !state.is_sound(number) {
            return;
        }
        let failure = Failure { lane: self.lane, number, kind, rank: culprit, text: detail(&error) };
        self.control.fail(&failure);
        // Before the release: a released stream makes wrong messages to other hosts ready.
        if let Some(hosts) = &self.hosts {
            hosts.fail(&failure);
        }
        state.fail(number, error);
    }

    /// Gives up all operations in flight and later ones, because this rank leaves.
    pub(crate) fn leave(&self, error: Error) {
        self.give_up_all(FailureKind::Left, self.control.name(self.control.me()), error);
    }

    /// Gives up all operations in flight and later ones.
    pub(crate) fn give_up_all(&self, kind: FailureKind, culprit: Rank, error: Error) {
        // An operation that the stream has finished is no failure.
        self.look();
        let mut state = lock(&self.state);
        let number = state.flights.front().map_or(state.last + 1, Flight::first);
        self.give_up(&mut state, number, kind, culprit, error);
        spread(state);
    }

    /// Of the first operation whose time is over: the first number that fails, and the error.
    fn late(&self, state: &State, now: Instant) -> Option<(u64, Error)> {
        let is_late = |flight: &&Flight| flight.started().is_some_and(|started| now - started >= flight.limit);
        state.flights.iter().filter(is_late).find_map(|late| {
            let Called::Part(part) = &late.call else { return Some((late.number, self.timeout(state, late, now))) };
            let detail = part.lateness(self.lane, late.number)?;
            Some((late.first(), timed_out(late, now, detail)))
        })
    }
}

impl Watched for InFlight {
    fn tick(&self, now: Instant) -> Look {
        let mut ended = Vec::new();
        self.end_finished(&mut ended);
        let mut state = lock(&self.state);
        let (me, lane) = (self.control.me(), self.lane);
        for flight in state.flights.iter_mut().filter(|flight| flight.pulse.is_none()) {
            if !self.control.has_started(me, lane, flight.number) {
                break;
            }
            flight.start(&*self.ends, now);
        }
        if let Some(first) = state.flights.front() {
            let (number, last) = (first.number, state.flights.back().map_or(0, |last| last.number));
            if state.is_sound(number) {
                let (from, call) = (first.first(), first.call.clone());
                if let Some(Error::PeerLost { operation, rank, cause }) = self.ends.loss(&call.to_string()) {
                    let error = Error::PeerLost { operation, rank, cause };
                    self.give_up(&mut state, from, FailureKind::PeerLost, Rank(rank), error);
                } else if let Some((reporter, failure)) = self.control.first_failure(lane, last)
                    && state.is_sound(failure.number)
                {
                    if let Some(hosts) = &self.hosts {
                        hosts.give_up(reporter, &failure);
                    }
                    state.fail(failure.number, reported(reporter, failure, &call));
                } else if let Some((reporter, failure)) = self.failed_elsewhere(last)
                    && state.is_sound(failure.number)
                {
                    let Failure { number, kind, rank, .. } = failure;
                    self.give_up(&mut state, number, kind, rank, reported(reporter, failure, &call));
                } else if let Some(cause) = self.runner.get().and_then(|runner| runner.failure()) {
                    let error = Error::Device { operation: call.to_string(), cause };
                    self.give_up(&mut state, from, FailureKind::Driver, self.control.name(me), error);
                } else if let Some(error) = self.cut_off(&mut state, now) {
                    let (kind, culprit) = self.kind(&error);
                    self.give_up(&mut state, from, kind, culprit, error);
                } else if let Some((from, error)) = self.late(&state, now) {
                    // Also if a later operation has failed: that does not end those before it.
                    self.give_up(&mut state, from, FailureKind::Timeout, self.control.name(me), error);
                }
            }
            // Operations before the one that has failed may still end well.
            if state.is_sound(number) {
                self.tell_of_wait(&mut state, now);
            } else if self.is_settled(&mut state, now) {
                for (lane, words) in &state.awaits {
                    self.control.release(*lane, words.iter().copied());
                }
                if let Some(runner) = self.runner.get() {
                    runner.give_up();
                }
                self.is_released.store(true, Ordering::Relaxed);
                // The same stream may still wait for sound operations of other lanes.
                if state.flights.front().is_none_or(Flight::is_released) {
                    state.released.get_or_insert(now);
                }
            }
        }
        let overdue = state.overdue(now);
        if overdue {
            state.is_stuck = true;
            let abandoned = state.abandon();
            if matches!(state.halt, Some(Halt::Mismatch)) {
                // The ranks would go on, and what is on this stream would run into that.
                let operation = abandoned.first().map(|(flight, _)| flight.call.to_string()).unwrap_or_default();
                let cause = "its stream has not come to an end since the ranks disagreed".to_owned();
                let (number, error) = (state.next(), Error::Device { operation, cause });
                self.give_up(&mut state, number, FailureKind::Driver, self.control.name(me), error);
            }
            self.tell_of_end(&abandoned);
            ended.extend(abandoned);
            self.is_busy.store(false, Ordering::Relaxed);
        }
        let look = match state.flights.front() {
            None => Look::Never,
            Some(first)
                if state.failing.is_some()
                    || self.is_released.load(Ordering::Relaxed)
                    || state.closely.is_some_and(|last| first.number <= last) =>
            {
                Look::Soon
            }
            Some(_) => Look::Later,
        };
        state.is_watched = look != Look::Never;
        spread(state);
        for (flight, result) in ended {
            log::warn!("{}: the device has not ended it a while after it failed", flight.call);
            flight.end(&*self.ends, result);
        }
        look
    }

    fn is_stuck(&self) -> bool {
        lock(&self.state).is_stuck
    }

    fn is_watched_by(&self, look_soon: fn()) {
        lock(&self.state).look_soon = Some(look_soon);
    }
}

/// Fails the batches of which a part has failed here, once it has freed the lock.
fn spread(mut state: MutexGuard<'_, State>) {
    let spread = std::mem::take(&mut state.spread);
    drop(state);
    spread.into_iter().for_each(|(part, error)| part.fail_all(&error));
}

fn timed_out(late: &Flight, now: Instant, detail: String) -> Error {
    let waited = late.started().map_or(Duration::ZERO, |started| now - started);
    Error::Timeout { operation: late.call.to_string(), waited, detail }
}

impl State {
    /// Notes that the operation of this number and all later ones have failed.
    fn fail(&mut self, number: u64, error: Error) {
        self.halt_after(&error);
        self.failed = Some((number, error));
        self.spread_from(number);
    }

    /// Notes the batches that have a part in flight here, from this number on: they fail as a whole.
    fn spread_from(&mut self, number: u64) {
        let Some((_, error)) = &self.failed else { return };
        for flight in self.flights.iter().filter(|flight| flight.number >= number) {
            if let Called::Part(part) = &flight.call {
                self.spread.push((part.clone(), error.clone()));
            }
        }
    }

    /// The first failure stays the reason. But ranks could go on after a disagreement, so any other failure replaces that.
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

    /// Whether the stream was released longer than [`DRAIN_TIMEOUT`] ago and has not run out.
    fn overdue(&self, now: Instant) -> bool {
        self.released.is_some_and(|since| now - since > DRAIN_TIMEOUT)
    }

    /// Ends the operations that the device does not end.
    fn abandon(&mut self) -> Vec<(Flight, Result<(), Error>)> {
        let Some((_, error)) = self.failed.clone() else { return Vec::new() };
        let end = |flight: Flight| {
            let result = Err(named(error.clone(), &flight.call));
            (flight, result)
        };
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
            return closed_by_fork(work, &self.comm);
        }
        wait_driving(work, deadline, || self.look());
    }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("comm", &self.comm).field("lane", &self.lane).finish_non_exhaustive()
    }
}

/// Ends a work that this process has inherited from its parent: only the parent has the streams.
pub(crate) fn closed_by_fork(work: &Work, comm: &str) {
    let how = "put on a device by this process's parent, before the fork".to_owned();
    let (operation, comm) = (work.operation().to_owned(), comm.to_owned());
    work.complete(Err(Error::Closed { operation, comm, how }), None);
}

/// Calls `look` until a work is done or a deadline has passed.
pub(crate) fn wait_driving(work: &Work, deadline: Option<Instant>, look: impl Fn()) {
    let begin = Instant::now();
    loop {
        look();
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

/// The same error, with `call` as its operation.
pub(crate) fn named(error: Error, call: impl Display) -> Error {
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

/// How rank `me` reports a failure to the others, and the rank at fault.
pub(crate) fn blame(error: &Error, me: Rank) -> (FailureKind, Rank) {
    match error {
        Error::PeerLost { rank, .. } => (FailureKind::PeerLost, Rank(*rank)),
        Error::Mismatch { .. } => (FailureKind::Mismatch, me),
        Error::Timeout { .. } => (FailureKind::Timeout, me),
        Error::Closed { .. } => (FailureKind::Left, me),
        _ => (FailureKind::Driver, me),
    }
}

/// The error of an operation that failed on another rank.
pub(crate) fn reported(reporter: Rank, failure: Failure, call: &impl Display) -> Error {
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

/// The text of an error for the other ranks.
pub(crate) fn detail(error: &Error) -> String {
    match error {
        Error::Mismatch { detail, .. } => detail.clone(),
        Error::PeerLost { cause, .. } => cause.clone(),
        Error::Closed { how, .. } => format!("it {how}"),
        other => other.to_string(),
    }
}

/// How long a waiting thread spins before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// The bounds of a waiting thread's sleeps.
const NAP_MIN: Duration = Duration::from_micros(20);
pub(crate) const NAP_MAX: Duration = Duration::from_micros(200);

/// How long a released stream may take to run out.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

mod capture;
mod disagreement;
mod elsewhere;
mod library;
#[cfg(test)]
pub(crate) mod tests;
