//! Windows in the memory of devices: each rank maps the others' parts, and accesses are copies and words on its stream.
//!
//! All ranks take part in a registration, where each hands its memory over as file descriptors. From then on a put is a copy
//! into mapped memory, a signal the write of a word, and a rank that waits for a signal puts a wait for that word on its
//! stream. Nothing of the other rank takes part. A graph does the same with words of its own, whenever it runs. Accesses to
//! ranks of other hosts take [another way](far).

use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::time::Duration;

use smallvec::SmallVec;

use crate::buffer::Buffer;
use crate::device::accesses::{Accesses, Awaited, Flight};
use crate::device::control::{Control, FailureKind};
use crate::device::far_windows::{FarMemory, FarWindows, FarWords};
use crate::device::graph::number_of;
use crate::device::graph_waits::{GraphWait, Numbers};
use crate::device::in_flight::{Ends, InFlight, named};
use crate::device::landing::LandingThread;
use crate::device::lane::{Stretches, copy, flush};
use crate::device::recordings::Recordings;
use crate::device::routes::{Route, Steps};
use crate::device::signals::{self, InGraph, Line, SLOTS, Signals, Step, Told};
use crate::device::watch;
use crate::device::words::{ControlLayout, SLOTS as ROOM};
use crate::error::{Error, UsageError};
use crate::sync::{Arc, Mutex, lock};
use crate::sys::cuda::{
    Batch, Context, CudaError, Current, DeviceBytes, Event, ImportedMemory, RegisteredWords, Relaxed, Stream,
    StreamHandle, StreamId, Width,
};
use crate::sys::words::SharedWords;
use crate::types::Rank;
use crate::window::WindowId;
use crate::work::{Entry, Work};

mod far;
mod registration;

/// What is done to a peer's part of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// The window gets the buffers' bytes, from this offset on.
    Put(usize),
    /// The buffers get the window's bytes, from this offset on.
    Get(usize),
    /// The peer gets a signal.
    Signal,
    /// This rank takes a signal of the peer.
    WaitSignal,
}

/// An access as it is submitted. Its range has been checked.
pub(crate) struct AccessRequest<'a> {
    pub(crate) window: WindowId,
    pub(crate) peer: Rank,
    pub(crate) access: Access,
    /// What is written to the peer's memory, or filled from it.
    pub(crate) buffers: &'a [Buffer],
    pub(crate) stream: StreamHandle,
    pub(crate) timeout: Duration,
    /// The call, for errors.
    pub(crate) call: String,
}

impl AccessRequest<'_> {
    /// Whether it runs in the order of the calls to its peer, whatever the streams: puts, gets and signals do, waits do not.
    fn is_chained(&self) -> bool {
        self.access != Access::WaitSignal
    }
}

/// What windows need of a communicator's device.
pub(crate) struct Wanted {
    pub(crate) comm: String,
    /// The lane of their numbers and marks.
    pub(crate) lane: usize,
    pub(crate) layout: ControlLayout,
    pub(crate) context: Arc<Context>,
    pub(crate) words: Arc<SharedWords>,
    pub(crate) registered: Arc<RegisteredWords>,
    pub(crate) width: Width,
    /// Why the ranks' devices cannot copy from each other, if so.
    pub(crate) obstacle: Option<&'static str>,
    /// How many ranks there are on all hosts.
    pub(crate) world: usize,
    /// Carries accesses to other hosts, if there are several hosts.
    pub(crate) hosts: Option<Arc<dyn FarWindows>>,
    /// The bytes of a cell for accesses to other hosts.
    pub(crate) cell: usize,
}

/// A communicator's windows on its device.
pub(crate) struct Windows {
    comm: String,
    lane: usize,
    /// This rank, and its place on its host.
    me: Rank,
    seat: Rank,
    layout: ControlLayout,
    obstacle: Option<&'static str>,
    control: Arc<Control>,
    world: usize,
    hosts: Option<OtherHosts>,
    signals: Signals,
    accesses: Arc<Accesses>,
    /// Held while a call submits. The driver's calls queue and do not wait.
    state: Mutex<Option<State>>,
}

struct State {
    context: Arc<Context>,
    registered: Arc<RegisteredWords>,
    width: Width,
    /// The number of the last access.
    number: u64,
    /// By peer, the order of what is done to its memory.
    chains: Vec<Chain>,
    /// The slots of words that windows use, a bit each.
    slots: u64,
    exposed: HashMap<WindowId, Exposed>,
    /// Captures. In each, puts, gets and signals to a peer come one after the other, and so do the waits for its signals in a
    /// slot.
    recordings: Recordings<(Rank, Option<usize>)>,
    /// The numbers of operations in graphs.
    numbers: Numbers,
    /// What accesses to other hosts need, from the first window on.
    far: Option<FarSide>,
}

/// The engine that carries accesses to other hosts.
struct OtherHosts {
    engine: Arc<dyn FarWindows>,
    /// The bytes of a cell.
    cell: usize,
}

/// What this rank has for accesses to and from other hosts.
struct FarSide {
    /// First, so that it is dropped before the memory that it uses.
    landing: LandingThread,
    words: FarWords,
    registered: Arc<RegisteredWords>,
    memory: BTreeMap<Rank, FarMemory>,
    routes: BTreeMap<Rank, Route>,
}

/// The stream of the last access to a rank's memory, and the event at that access's end.
struct Chain {
    last: Option<StreamId>,
    end: Event,
}

struct Exposed {
    slot: usize,
    /// By rank. Graphs keep them too.
    parts: Arc<Vec<Part>>,
    /// By rank, the signals sent, and those waited for.
    sent: Vec<u64>,
    taken: Vec<u64>,
    /// The number of the last collective that writes to the parts.
    gathered: u64,
}

/// A rank's memory, as this one reaches it.
enum Part {
    Own(Buffer),
    Mapped {
        memory: ImportedMemory,
        offset: usize,
        len: usize,
    },
    Empty,
    /// On another host.
    Far,
}

/// All parts of a window, of which each is this rank's own or mapped.
pub(crate) struct AllParts(Arc<Vec<Part>>);

impl AllParts {
    /// Each as a whole, by rank.
    pub(crate) fn bytes(&self) -> Stretches<'_> {
        let whole = |part: &'_ Part| match part {
            Part::Own(buffer) => buffer.bytes(),
            Part::Mapped { len, .. } => *len,
            Part::Empty | Part::Far => 0,
        };
        self.0.iter().filter_map(|part| part.bytes(0, whole(part))).collect()
    }
}

impl Part {
    fn bytes(&self, offset: usize, len: usize) -> Option<DeviceBytes<'_>> {
        match self {
            Part::Own(buffer) => buffer.device_bytes().map(|bytes| bytes.part(offset, len)),
            Part::Mapped { memory, offset: begin, len: all } => {
                Some(memory.bytes().part(*begin, *all).part(offset, len))
            }
            Part::Empty | Part::Far => None,
        }
    }
}

impl Windows {
    pub(crate) fn new(
        wanted: Wanted,
        control: &Arc<Control>,
        collectives: &Arc<InFlight>,
        ends: Arc<dyn Ends>,
    ) -> Result<Windows, CudaError> {
        let Wanted { comm, lane, layout, context, words, registered, width, obstacle, world, hosts, cell } = wanted;
        let signals = Signals::new(words, layout.count(), layout.ranks(), width);
        let chain = |_| Ok::<_, CudaError>(Chain { last: None, end: Event::new(&context)? });
        let chains = (0..world).map(chain).collect::<Result<Vec<_>, _>>()?;
        let (control, seat) = (control.clone(), control.me());
        let me = control.name(seat);
        let accesses = Accesses::new(comm.clone(), lane, control.clone(), ends, collectives.clone(), hosts.clone());
        let hosts = hosts.map(|engine| OtherHosts { engine, cell });
        let (number, slots, exposed, far) = (0, 0, HashMap::new(), None);
        let (recordings, numbers) = (Recordings::new(), Numbers::default());
        let state = State { context, registered, width, number, chains, slots, exposed, recordings, numbers, far };
        let state = Mutex::new(Some(state));
        Ok(Windows { comm, lane, me, seat, layout, obstacle, control, world, hosts, signals, accesses, state })
    }

    /// How many words windows need beside those of a control layout.
    pub(crate) fn words(ranks: usize) -> usize {
        signals::count(ranks)
    }

    /// The failure after which nothing can be submitted, if there is one.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.accesses.failure()
    }

    /// The address of this rank's part of a window.
    pub(crate) fn own_address(&self, window: WindowId) -> Option<u64> {
        self.reached_parts(window)?
            .iter()
            .find_map(|part| if let Part::Own(buffer) = part { Some(buffer.ptr() as u64) } else { None })
    }

    /// The parts of a window, if this rank maps those of all others.
    pub(crate) fn parts(&self, window: WindowId) -> Option<AllParts> {
        let parts = self.reached_parts(window)?;
        let is_mapped = |part: &Part| matches!(part, Part::Own(_) | Part::Mapped { .. });
        parts.iter().all(is_mapped).then_some(AllParts(parts))
    }

    /// Whether this rank copies from the part of `rank` itself.
    pub(crate) fn maps(&self, window: WindowId, rank: Rank) -> bool {
        self.reached_parts(window)
            .is_some_and(|parts| parts.get(rank.index()).is_some_and(|part| !matches!(part, Part::Far)))
    }

    /// The parts of a window, each as this rank reaches it.
    fn reached_parts(&self, window: WindowId) -> Option<Arc<Vec<Part>>> {
        Some(lock(&self.state).as_ref()?.exposed.get(&window)?.parts.clone())
    }

    /// Notes that the collective of this number writes to the parts of a window.
    pub(crate) fn gathers(&self, window: WindowId, number: u64) {
        let mut state = lock(&self.state);
        if let Some(exposed) = state.as_mut().and_then(|state| state.exposed.get_mut(&window)) {
            exposed.gathered = number;
        }
    }

    // ---- accesses ----

    /// Puts an access on the caller's stream, or into its capture. `begin` notes it in the flight recorder, under its number.
    ///
    /// # Errors
    /// After a failure of the driver nothing of the communicator succeeds on the device. After others nothing is on the stream.
    pub(crate) fn submit(&self, request: &AccessRequest<'_>, begin: impl FnOnce(u64) -> Entry) -> Result<Work, Error> {
        let mut state = lock(&self.state);
        let Some(state) = state.as_mut() else { return Err(self.closed(&request.call)) };
        if let Some(error) = self.accesses.halt() {
            return Err(named(error, &request.call));
        }
        let context = state.context.clone();
        let driver = |error: CudaError| self.broken(&request.call, error);
        let current = context.enter().map_err(driver)?;
        let stream = Stream::of_caller(&context, request.stream);
        let capture = stream.capture(&current).map_err(driver)?;
        let capture = number_of(capture, || request.call.clone())?;
        let number = state.number + 1;
        self.accesses.wait_until(request.timeout, |accesses| accesses.has_room(number)).map_err(|waited| {
            let detail = format!("{ROOM} accesses are in flight on the device");
            Error::Timeout { operation: request.call.clone(), waited, detail }
        })?;
        if !state.exposed.contains_key(&request.window) {
            return Err(self.closed(&request.call));
        }
        let is_far = self.control.local(request.peer).is_none();
        if is_far && capture.is_some() {
            return Err(self.not_in_graphs(request));
        }
        state.number = number;
        let work = Work::new(self.accesses.clone(), begin(number));
        if let Some(capture) = capture {
            let captured = self.capture(state, &current, &stream, capture, request).map_err(driver);
            // The caller's work ends here, since nobody is told of replays.
            self.accesses.end(number, &work, captured.clone());
            return captured.map(|()| work);
        }
        let mut plan = self.plan(state, request, number);
        let flight = Flight {
            number,
            call: request.call.clone(),
            window: request.window,
            work: work.clone(),
            limit: request.timeout,
            awaits: std::mem::take(&mut plan.awaits),
            started: None,
            is_close: false,
        };
        if self.accesses.begin(flight) {
            watch::watch(self.accesses.clone());
        }
        let taken_up = if is_far { self.take_up(state, request, &plan) } else { Ok(()) };
        let run = taken_up
            .map_err(|error| error.to_string())
            .and_then(|()| self.run(state, &current, &stream, request, &plan).map_err(|error| error.to_string()));
        if let Err(cause) = run {
            let error = self.broken(&request.call, cause);
            let done = Step::Write(self.layout.done(self.seat, self.lane, number), number);
            if let Err(error) = state.take_steps(&current, &stream, &[done]) {
                log::warn!("nobody will know when a stream ends: {error}");
            }
            return Err(error);
        }
        Ok(work)
    }

    fn plan(&self, state: &mut State, request: &AccessRequest<'_>, number: u64) -> Plan {
        let (seat, lane) = (self.seat, self.lane);
        let before = Step::Write(self.layout.started(seat, lane, number), number);
        let done = Step::Write(self.layout.done(seat, lane, number), number);
        let Some(peer) = self.control.local(request.peer) else {
            let (steps, awaits) = state.plan_far(request);
            return Plan { before, after: SmallVec::from_slice(&[done]), far: Some(steps), awaits };
        };
        let exposed = state.exposed.get_mut(&request.window).expect("looked up before");
        let slot = exposed.slot;
        let mut awaits = SmallVec::new();
        let told = match request.access {
            Access::Put(_) | Access::Get(_) => None,
            Access::Signal => {
                let line = Line { slot, receiver: peer, sender: seat };
                Some(Step::Write(self.signals.index(line, Told::Count), exposed.send_signal(request.peer)))
            }
            Access::WaitSignal => {
                let (line, count) = (Line { slot, receiver: seat, sender: peer }, exposed.take_signal(request.peer));
                awaits.push(Awaited::signal(&self.signals, line, count, request.peer));
                Some(Step::Wait(self.signals.index(line, Told::Count), count))
            }
        };
        Plan { before, after: told.into_iter().chain([done]).collect(), far: None, awaits }
    }

    fn run(
        &self,
        state: &mut State,
        current: &Current<'_>,
        stream: &Stream,
        request: &AccessRequest<'_>,
        plan: &Plan,
    ) -> Result<(), CudaError> {
        let (id, is_chained) = (stream.id(current)?, request.is_chained());
        let chain = &state.chains[request.peer.index()];
        if is_chained && chain.last.is_some_and(|last| last != id) {
            stream.wait(current, &chain.end)?;
        }
        match &plan.far {
            None => state.put_on(current, stream, request, &[plan.before], &plan.after)?,
            Some(steps) => {
                state.take_steps(current, stream, &[plan.before])?;
                state.put_far(current, stream, request, steps)?;
                state.take_steps(current, stream, &plan.after)?;
            }
        }
        if is_chained {
            let chain = &mut state.chains[request.peer.index()];
            chain.end.record(current, stream)?;
            chain.last = Some(id);
        }
        Ok(())
    }

    /// Puts an access into a capture, of which the other ranks need not know.
    fn capture(
        &self,
        state: &mut State,
        current: &Current<'_>,
        stream: &Stream,
        capture: u64,
        request: &AccessRequest<'_>,
    ) -> Result<(), CudaError> {
        // Without this, calls that allocate spoil the capture.
        let _relaxed = Relaxed::enter()?;
        let (me, peer, slot) = (self.seat, request.peer, state.exposed[&request.window].slot);
        let at = self.control.local(peer).expect("graphs have no accesses to other hosts");
        let operation = state.numbers.next();
        let recording = state.recordings.of(&self.comm, capture, current, stream)?;
        let told = match request.access {
            Access::Put(_) | Access::Get(_) => None,
            Access::Signal => {
                let line = Line { slot, receiver: at, sender: me };
                Some((self.signals.signal_in_graph(line, operation), "has not taken the signal before"))
            }
            Access::WaitSignal => {
                let line = Line { slot, receiver: me, sender: at };
                Some((self.signals.wait_in_graph(line, operation), "did not signal in a graph"))
            }
        };
        // Before the graph can run: what it keeps, and what the watch looks for.
        let exposed = &state.exposed[&request.window];
        recording.waits().keep_for(slot, || (exposed.parts.clone(), state.registered.clone()));
        if let Some((InGraph { busy, awaited, .. }, missing)) = told {
            let (words, width) = self.signals.words();
            recording.waits().note(GraphWait {
                operation,
                call: request.call.clone(),
                limit: request.timeout,
                words: words.clone(),
                width,
                busy,
                awaits: vec![(awaited, 1)],
                peer,
                missing,
                library: None,
                home: self.accesses.clone(),
            });
        }
        let chain = (peer, (!request.is_chained()).then_some(slot));
        recording.follow(chain, current, stream)?;
        let steps = told.as_ref().map_or(&[][..], |(told, _)| &told.steps);
        state.put_on(current, stream, request, &[], steps)?;
        let recording = state.recordings.of(&self.comm, capture, current, stream)?;
        recording.ended(chain, &state.context, current, stream)
    }

    /// Tells all ranks that a call of the driver has failed.
    fn broken(&self, call: &str, error: impl Display) -> Error {
        let error = Error::Device { operation: call.to_owned(), cause: error.to_string() };
        self.accesses.fail(FailureKind::Driver, self.me, error.clone());
        error
    }

    fn not_in_graphs(&self, request: &AccessRequest<'_>) -> Error {
        UsageError {
            operation: request.call.clone(),
            argument: "peer",
            expected: "a rank on the same host, as accesses to windows in CUDA graphs need".to_owned(),
            got: format!("rank {} on another host", request.peer),
        }
        .into()
    }

    fn closed(&self, operation: &str) -> Error {
        Error::Closed { operation: operation.to_owned(), comm: self.comm.clone(), how: "left".to_owned() }
    }

    // ---- the end ----

    /// Whether a stream is in a replay. False while another thread submits.
    fn is_replayed(&self) -> bool {
        let state = self.state.try_lock();
        state.is_ok_and(|state| state.as_ref().is_some_and(|state| state.recordings.is_busy()))
    }

    /// Waits until nothing is in flight, for `limit` at most.
    pub(crate) fn drain(&self, limit: Duration) {
        // `leave` gives up what is left then.
        let _ = self.accesses.wait_until(limit, |accesses| {
            accesses.is_idle() && !self.is_replayed() && (0..SLOTS).all(|slot| self.is_settled_far(slot))
        });
    }

    /// Gives up what is in flight, and what would come next, because this rank leaves.
    pub(crate) fn leave(&self, error: Error) {
        self.accesses.leave(error, self.is_replayed());
    }

    /// Has the reaper give memory back once the device no longer uses it, after [`leave`](Windows::leave).
    pub(crate) fn close(&self) {
        let Some(state) = lock(&self.state).take() else { return };
        if let Some(far) = &state.far {
            far.landing.end();
        }
        // Collectives write to parts, too.
        watch::reap(vec![self.accesses.clone(), self.accesses.collectives()], Box::new(state));
    }
}

impl State {
    /// Puts the copies of an access on a stream, between these steps.
    fn put_on(
        &self,
        current: &Current<'_>,
        stream: &Stream,
        request: &AccessRequest<'_>,
        before: &[Step],
        after: &[Step],
    ) -> Result<(), CudaError> {
        let AccessRequest { peer, access, buffers, .. } = *request;
        self.take_steps(current, stream, before)?;
        let own = buffers.iter().filter_map(Buffer::device_bytes).filter(|bytes| !bytes.is_empty());
        let own: SmallVec<[DeviceBytes<'_>; 8]> = own.collect();
        let len: usize = own.iter().map(|bytes| bytes.len()).sum();
        let part = |offset| self.exposed[&request.window].parts[peer.index()].bytes(offset, len).filter(|_| len > 0);
        match access {
            Access::Put(offset) => part(offset).map_or(Ok(()), |part| copy(current, stream, &own, &[part]))?,
            Access::Get(offset) => part(offset).map_or(Ok(()), |part| copy(current, stream, &[part], &own))?,
            Access::Signal | Access::WaitSignal => {}
        }
        self.take_steps(current, stream, after)
    }

    /// Has a stream wait for words and write them.
    fn take_steps(&self, current: &Current<'_>, stream: &Stream, steps: &[Step]) -> Result<(), CudaError> {
        let mut batch = Batch::new(self.width);
        for step in steps {
            match *step {
                Step::Wait(word, value) => batch.wait(self.registered.word(word), value),
                Step::Write(word, value) => batch.write(self.registered.word(word), value),
            }
        }
        flush(current, stream, &mut batch)
    }
}

impl Exposed {
    /// Counts a signal to a rank. Returns how many it has been sent.
    fn send_signal(&mut self, to: Rank) -> u64 {
        self.sent[to.index()] += 1;
        self.sent[to.index()]
    }

    /// Counts a wait for a signal of a rank. Returns how many there have been.
    fn take_signal(&mut self, from: Rank) -> u64 {
        self.taken[from.index()] += 1;
        self.taken[from.index()]
    }
}

/// What an access becomes on a stream.
struct Plan {
    /// Says that the access has begun.
    before: Step,
    /// What follows the copies; the last step says that the access is done.
    after: SmallVec<[Step; 2]>,
    /// What is done instead of copies, if the peer is on another host.
    far: Option<Steps>,
    /// What the stream waits for.
    awaits: SmallVec<[Awaited; 2]>,
}
