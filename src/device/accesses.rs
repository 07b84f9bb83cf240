//! Accesses to windows that are in flight on a device, and how they end.
//!
//! Each rank numbers its own accesses, which end in any order, as their streams come to them. Only an access that waits for a
//! signal or another host can take longer than its copies. Streams are [released](crate::device::in_flight) as for collectives:
//! a rank that gives up first leaves a mark, and nothing that any stream does after that counts. A rank that leaves with
//! nothing in flight, and in no replay, has spoiled nothing: its mark concerns only ranks that wait for it. Ranks of other
//! hosts are told.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::device::control::{Control, Failure, FailureKind, far, is_reached};
use crate::device::far_windows::{FarWindows, FarWord, FarWords};
use crate::device::graph_waits::Home;
use crate::device::in_flight::{
    DRAIN_TIMEOUT, Ends, Halt, InFlight, Look, Watched, blame, closed_by_fork, detail, named, reported, wait_driving,
};
use crate::device::marks::{HARMLESS, Marks, SPOILT, concerns_all};
use crate::device::signals::{Line, Signals, Told};
use crate::error::Error;
use crate::sync::{Arc, AtomicBool, Mutex, Ordering, lock};
use crate::sys::cuda::Width;
use crate::sys::fork::Origin;
use crate::sys::words::SharedWords;
use crate::types::Rank;
use crate::window::WindowId;
use crate::work::{Drive, Work};

/// An access that is about to be put on a stream.
#[derive(Debug)]
pub(crate) struct Flight {
    /// Its number on this rank.
    pub(crate) number: u64,
    /// The call, for errors.
    pub(crate) call: String,
    pub(crate) window: WindowId,
    pub(crate) work: Work,
    pub(crate) limit: Duration,
    /// The words that its stream waits for, with the greatest value of each.
    pub(crate) awaits: SmallVec<[Awaited; 2]>,
    /// When its stream was first seen to have reached it. Its time limit counts from then.
    pub(crate) started: Option<Instant>,
    /// Whether a caller wants to hear of its end soon.
    pub(crate) is_close: bool,
}

/// What a stream waits for from another rank.
#[derive(Clone, Debug)]
pub(crate) struct Awaited {
    from: Rank,
    words: Arc<SharedWords>,
    width: Width,
    /// The number of the word, and the value that the stream waits for.
    word: usize,
    value: u64,
    /// What the rank has not done, for the error of a time limit.
    missing: &'static str,
    /// The number of the word that says that a signal of a graph is there.
    in_graph: Option<usize>,
}

impl Awaited {
    /// `count` signals of a rank of this host.
    pub(crate) fn signal(signals: &Signals, line: Line, count: u64, from: Rank) -> Awaited {
        let (words, width) = signals.words();
        let word = signals.index(line, Told::Count);
        let in_graph = Some(signals.index(line, Told::Ready));
        Awaited { from, words: words.clone(), width, word, value: count, missing: SIGNAL, in_graph }
    }

    /// A value of a word for a rank of another host.
    pub(crate) fn far(far: &FarWords, word: FarWord, value: u64) -> Awaited {
        let (words, width) = far.words();
        let (from, missing) = match word {
            FarWord::Signals { from, .. } => (from, SIGNAL),
            FarWord::Answered(rank) => (rank, "did not send what was asked of it"),
            FarWord::Ready(rank) | FarWord::Done(rank) | FarWord::Landed(rank) => {
                (rank, "did not take what was put before")
            }
        };
        Awaited { from, words: words.clone(), width, word: far.index(word), value, missing, in_graph: None }
    }

    fn has_come(&self) -> bool {
        is_reached(self.words.word(self.word).load(Ordering::Acquire), self.value, self.width)
    }

    /// Lets the stream pass. To be repeated, as [`Control::release`].
    fn release(&self) {
        self.words.word(self.word).store(far(self.value, self.width), Ordering::Release);
    }

    /// What has not come, in words.
    fn text(&self) -> String {
        let is_there = |word| self.words.word(word).load(Ordering::Acquire) != 0;
        let in_graph = match self.in_graph.is_some_and(is_there) {
            true => "; its signal in a CUDA graph is there, which a wait_signal in a graph takes",
            false => "",
        };
        format!("rank {} {}{in_graph}", self.from, self.missing)
    }
}

const SIGNAL: &str = "did not signal";

#[derive(Debug, Default)]
struct State {
    flights: Vec<Flight>,
    /// The first failure: no access succeeds after it.
    failed: Option<Error>,
    is_watched: bool,
    is_stuck: bool,
    /// Has the watch look at once.
    look_soon: Option<fn()>,
    /// Since when the watch has been releasing streams.
    released: Option<Instant>,
}

/// The accesses of a communicator that are in flight.
pub(crate) struct Accesses {
    comm: String,
    origin: Origin,
    lane: usize,
    /// This rank, by its name.
    me: Rank,
    control: Arc<Control>,
    marks: Arc<Marks>,
    ends: Arc<dyn Ends>,
    /// The communicator's collectives, which fail too: what they move may have come through a window.
    collectives: Arc<InFlight>,
    /// If there are other hosts.
    hosts: Option<Arc<dyn FarWindows>>,
    state: Mutex<State>,
    /// Whether an access is in flight; read without the lock.
    is_busy: AtomicBool,
}

impl Accesses {
    /// Nothing in flight. Marks and numbers are those of this lane.
    pub(crate) fn new(
        comm: String,
        lane: usize,
        control: Arc<Control>,
        ends: Arc<dyn Ends>,
        collectives: Arc<InFlight>,
        hosts: Option<Arc<dyn FarWindows>>,
    ) -> Arc<Accesses> {
        let (origin, me, marks) =
            (Origin::here(), control.name(control.me()), Arc::new(Marks::new(control.clone(), lane)));
        let (state, is_busy) = (Mutex::default(), AtomicBool::new(false));
        Arc::new(Accesses { comm, origin, lane, me, control, marks, ends, collectives, hosts, state, is_busy })
    }

    /// What ranks tell each other of failures.
    pub(crate) fn marks(&self) -> &Arc<Marks> {
        &self.marks
    }

    /// The communicator's collectives.
    pub(crate) fn collectives(&self) -> Arc<InFlight> {
        self.collectives.clone()
    }

    /// Why nothing more can be submitted.
    pub(crate) fn halt(&self) -> Option<Error> {
        self.failure().or_else(|| self.failure_of_collectives())
    }

    /// Why accesses have failed.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.look();
        lock(&self.state).failed.clone()
    }

    fn failure_of_collectives(&self) -> Option<Error> {
        match self.collectives.halt() {
            Some(Halt::Failed(error)) => Some(error),
            _ => None,
        }
    }

    /// Notes an access that is about to be put on a stream. True: the caller has it watched.
    pub(crate) fn begin(&self, flight: Flight) -> bool {
        let mut state = lock(&self.state);
        state.flights.push(flight);
        // Relaxed, here and below: a hint; the lock orders the rest.
        self.is_busy.store(true, Ordering::Relaxed);
        !std::mem::replace(&mut state.is_watched, true)
    }

    /// Ends an access that was captured: nothing of it is in flight, and nobody is told of replays.
    pub(crate) fn end(&self, number: u64, work: &Work, result: Result<(), Error>) {
        self.control.pass(self.lane, number);
        self.ends.ended(work, result);
    }

    /// Whether the slots of an access of this number are free.
    pub(crate) fn has_room(&self, number: u64) -> bool {
        self.control.has_room(self.lane, number, false)
    }

    /// Waits until `is_so`, for `limit` at most. The error is the time waited.
    pub(crate) fn wait_until(&self, limit: Duration, is_so: impl Fn(&Accesses) -> bool) -> Result<(), Duration> {
        let begin = Instant::now();
        loop {
            self.look();
            if is_so(self) {
                return Ok(());
            }
            let waited = begin.elapsed();
            if waited >= limit {
                return Err(waited);
            }
            std::thread::sleep(NAP);
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        !self.is_busy.load(Ordering::Relaxed)
    }

    /// Whether an access to this window is in flight.
    pub(crate) fn uses(&self, window: WindowId) -> bool {
        lock(&self.state).flights.iter().any(|flight| flight.window == window)
    }

    /// Gives everything up, and tells the other ranks.
    pub(crate) fn fail(&self, kind: FailureKind, culprit: Rank, error: Error) {
        self.look();
        let mut state = lock(&self.state);
        self.give_up(&mut state, kind, culprit, error);
    }

    fn give_up(&self, state: &mut State, kind: FailureKind, culprit: Rank, error: Error) {
        if state.failed.is_some() {
            return;
        }
        self.mark(SPOILT, kind, culprit, &error);
        self.collectives.give_up_all(kind, culprit, error.clone());
        state.failed = Some(error);
    }

    fn mark(&self, number: u64, kind: FailureKind, rank: Rank, error: &Error) {
        let failure = Failure { lane: self.lane, number, kind, rank, text: detail(error) };
        self.marks.leave(&failure);
        // Before the release: from then on the stream makes wrong data ready for other hosts.
        if let Some(hosts) = &self.hosts {
            hosts.fail(&failure);
        }
    }

    /// Gives up everything in flight, and what would come next, because this rank leaves: in a replay, if `is_replayed`.
    pub(crate) fn leave(&self, error: Error, is_replayed: bool) {
        // Accesses that streams have finished do not fail.
        self.look();
        let mut state = lock(&self.state);
        if state.failed.is_some() {
            return;
        }
        let is_harmless = state.flights.is_empty() && self.collectives.is_idle() && !is_replayed;
        let number = if is_harmless { HARMLESS } else { SPOILT };
        self.mark(number, FailureKind::Left, self.me, &error);
        state.failed = Some(error);
    }

    /// Ends the accesses that streams have finished.
    pub(crate) fn look(&self) {
        if self.is_idle() {
            return;
        }
        let ended = {
            let mut state = lock(&self.state);
            let me = self.control.me();
            // Ends are read before marks, as the module's text asks.
            let is_over = |flight: &mut Flight| self.control.has_ended(me, self.lane, flight.number);
            let over: Vec<Flight> = state.flights.extract_if(.., is_over).collect();
            self.is_busy.store(!state.flights.is_empty(), Ordering::Relaxed);
            let outcome = |flight: Flight| {
                let result = self.outcome(&state, &flight.call);
                (flight.work, result)
            };
            over.into_iter().map(outcome).collect::<Vec<_>>()
        };
        for (work, result) in ended {
            self.ends.ended(&work, result);
        }
    }

    /// The result of an access that its stream has finished.
    fn outcome(&self, state: &State, call: &str) -> Result<(), Error> {
        if let Some(error) = &state.failed {
            return Err(named(error.clone(), call));
        }
        self.spoilt().map_or(Ok(()), |(reporter, failure)| Err(reported(reporter, failure, &call)))
    }

    /// Another rank's failure, if it may have spoiled what any rank sees.
    fn spoilt(&self) -> Option<(Rank, Failure)> {
        let collectives = || self.hosts.as_ref()?.failure().filter(|(_, failure)| concerns_all(failure));
        self.marks.spoilt().or_else(collectives)
    }

    fn timeout(&self, late: &Flight, now: Instant) -> Error {
        let waited = late.started.map_or(Duration::ZERO, |started| now - started);
        let missing = late.awaits.iter().find(|awaited| !awaited.has_come());
        let missing = missing.map_or_else(|| "the device did not finish it".to_owned(), Awaited::text);
        let detail = format!("device access {}: {missing}", late.number);
        Error::Timeout { operation: late.call.clone(), waited, detail }
    }

    /// Gives up everything in flight if this rank finds a failure, or another rank has told of one.
    fn find_failure(&self, state: &mut State, halt: Option<Error>, now: Instant) {
        let Some(first) = state.flights.first() else { return };
        let (call, me) = (first.call.clone(), self.me);
        if let Some(Error::PeerLost { operation, rank, cause }) = self.ends.loss(&call) {
            let error = Error::PeerLost { operation, rank, cause };
            return self.give_up(state, FailureKind::PeerLost, Rank(rank), error);
        }
        if let Some(error) = halt {
            return self.give_up(state, FailureKind::Driver, me, error);
        }
        if let Some((reporter, failure)) = self.spoilt() {
            let error = reported(reporter, failure, &call);
            // A rank that hears of it from this one blames the same culprit.
            let (kind, culprit) = blame(&error, reporter);
            return self.give_up(state, kind, culprit, error);
        }
        let left = state.flights.iter().find_map(|flight| {
            let missing = flight.awaits.iter().filter(|awaited| !awaited.has_come());
            let mut left = missing.filter_map(|awaited| Some((awaited.from, self.marks.of(awaited.from)?)));
            left.next().map(|(from, failure)| (from, reported(from, failure, &flight.call)))
        });
        if let Some((from, error)) = left {
            return self.give_up(state, FailureKind::PeerLost, from, error);
        }
        let is_late = |flight: &&Flight| flight.started.is_some_and(|started| now - started >= flight.limit);
        if let Some(error) = state.flights.iter().find(is_late).map(|late| self.timeout(late, now)) {
            self.give_up(state, FailureKind::Timeout, me, error);
        }
    }
}

impl Home for Accesses {
    fn obstacle(&self, call: &str, peer: Rank) -> Option<Error> {
        if let Some(error) = self.halt() {
            return Some(named(error, call));
        }
        let lost =
            self.ends.loss(call).filter(|error| matches!(error, Error::PeerLost { rank, .. } if *rank == peer.0));
        let spoilt = || self.spoilt().map(|(reporter, failure)| reported(reporter, failure, &call));
        lost.or_else(spoilt).or_else(|| Some(reported(peer, self.marks.of(peer)?, &call)))
    }

    fn fail(&self, error: Error) {
        let (kind, culprit) = blame(&error, self.me);
        Accesses::fail(self, kind, culprit, error.clone());
        // Even if accesses had failed before: from now on the replay spoils what others see, which this rank's leaving may not
        // have.
        self.mark(SPOILT, kind, culprit, &error);
    }

    fn in_flight(self: Arc<Self>) -> Arc<dyn Watched> {
        self
    }
}

impl Watched for Accesses {
    fn tick(&self, now: Instant) -> Look {
        self.look();
        let halt = self.failure_of_collectives();
        let mut state = lock(&self.state);
        for flight in state.flights.iter_mut().filter(|flight| flight.started.is_none()) {
            if self.control.has_started(self.control.me(), self.lane, flight.number) {
                flight.started = Some(now);
                self.ends.started(std::slice::from_ref(&flight.work), now);
            }
        }
        if state.failed.is_none() {
            self.find_failure(&mut state, halt, now);
        }
        if state.failed.is_some() && !state.flights.is_empty() {
            state.flights.iter().flat_map(|flight| &flight.awaits).for_each(Awaited::release);
            state.released.get_or_insert(now);
        }
        let is_overdue = state.released.is_some_and(|since| now - since > DRAIN_TIMEOUT);
        let given_up = if is_overdue { std::mem::take(&mut state.flights) } else { Vec::new() };
        if !given_up.is_empty() {
            state.is_stuck = true;
            self.is_busy.store(false, Ordering::Relaxed);
        }
        let is_urgent = state.released.is_some() || state.flights.iter().any(|flight| flight.is_close);
        let look = match (state.flights.is_empty(), is_urgent) {
            (true, _) => Look::Never,
            (false, true) => Look::Soon,
            (false, false) => Look::Later,
        };
        state.is_watched = look != Look::Never;
        let failed = state.failed.clone();
        drop(state);
        for flight in given_up {
            log::warn!("{}: the device has not ended it a while after it failed", flight.call);
            let error = failed.clone().map_or(Ok(()), |error| Err(named(error, &flight.call)));
            self.ends.ended(&flight.work, error);
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

impl Drive for Accesses {
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
            let Some(flight) = state.flights.iter_mut().rev().find(|flight| flight.work.is(work)) else { return };
            flight.is_close = true;
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

/// How often a waiting thread looks.
const NAP: Duration = Duration::from_micros(200);
