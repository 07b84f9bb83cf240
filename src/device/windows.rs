//! Windows in the memory of devices: each rank maps the others' parts, and accesses are copies and words on its stream.
//!
//! At the registration, which all ranks take part in, each hands its memory over as file descriptors. From then on a put is a
//! copy into what is mapped, a signal the write of a word, and who waits for it has his stream wait for that word. Nobody of
//! the other rank takes part. A graph does the same with words of its own, whenever it runs.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::buffer::Buffer;
use crate::deadline::deadline_after;
use crate::device::accesses::{Accesses, Awaited, Flight};
use crate::device::control::{Control, FailureKind};
use crate::device::descriptors::{Address, Post};
use crate::device::graph::number_of;
use crate::device::graph_waits::{GraphWait, Numbers};
use crate::device::in_flight::{Ends, InFlight, named};
use crate::device::lane::{copy, flush};
use crate::device::recordings::Recordings;
use crate::device::setup::{AllGather, Failure, failed, split, tell};
use crate::device::signals::{self, InGraph, Line, SLOTS, Signals, Step, Told};
use crate::device::watch;
use crate::device::words::{ControlLayout, SLOTS as ROOM};
use crate::error::Error;
use crate::sync::{Arc, Mutex, lock};
use crate::sys::cuda::{
    Batch, Context, CudaError, Current, DeviceBytes, Event, ExportError, ImportedMemory, RegisteredWords, Relaxed,
    Stream, StreamHandle, StreamId, Width, export,
};
use crate::sys::words::SharedWords;
use crate::types::Rank;
use crate::window::WindowId;
use crate::work::{Entry, Work};

/// What is done to a peer's part of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// It gets the buffers' bytes, from an offset on.
    Put(usize),
    /// The buffers get its bytes, from an offset on.
    Get(usize),
    /// The peer gets a signal.
    Signal,
    /// A signal of the peer is taken.
    WaitSignal,
}

/// An access as it is submitted. Its range has been checked.
pub(crate) struct Request<'a> {
    pub(crate) window: WindowId,
    pub(crate) peer: Rank,
    pub(crate) access: Access,
    /// What is written to the peer, or filled from there.
    pub(crate) buffers: &'a [Buffer],
    pub(crate) stream: StreamHandle,
    pub(crate) timeout: Duration,
    /// The call, for errors.
    pub(crate) call: String,
}

impl Request<'_> {
    /// Whether it comes in the order of the calls to its peer, whatever the streams, as what is done to one rank's memory and told
    /// of it does.
    fn is_chained(&self) -> bool {
        self.access != Access::WaitSignal
    }
}

/// What windows need of a communicator's device.
pub(crate) struct Wanted {
    pub(crate) comm: String,
    /// The lane whose numbers and marks are theirs.
    pub(crate) lane: usize,
    pub(crate) me: Rank,
    pub(crate) layout: ControlLayout,
    pub(crate) context: Arc<Context>,
    pub(crate) words: Arc<SharedWords>,
    pub(crate) registered: Arc<RegisteredWords>,
    pub(crate) width: Width,
    /// Why the ranks' devices cannot copy from each other, if so.
    pub(crate) obstacle: Option<&'static str>,
}

/// A communicator's windows on its device.
pub(crate) struct Windows {
    comm: String,
    lane: usize,
    me: Rank,
    layout: ControlLayout,
    obstacle: Option<&'static str>,
    signals: Signals,
    accesses: Arc<Accesses>,
    /// Held while something is submitted. The driver's calls queue, they do not wait.
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
    /// Captures. In them what is done to a peer's memory and told of it comes one after the other, and so do the waits for its
    /// signals of a slot.
    recordings: Recordings<(Rank, Option<usize>)>,
    /// Those of operations in graphs.
    numbers: Numbers,
}

/// The stream of the last access to a rank's memory, and where it ends there.
struct Chain {
    last: Option<StreamId>,
    end: Event,
}

/// A registered window.
struct Exposed {
    slot: usize,
    /// By rank. Graphs keep them too.
    parts: Arc<Vec<Part>>,
    /// By rank, the signals sent, and those waited for.
    sent: Vec<u64>,
    taken: Vec<u64>,
}

/// A rank's memory, as this one reaches it.
enum Part {
    Own(Buffer),
    Mapped { memory: ImportedMemory, offset: usize, len: usize },
    Empty,
}

impl Part {
    fn bytes(&self, offset: usize, len: usize) -> Option<DeviceBytes<'_>> {
        match self {
            Part::Own(buffer) => buffer.device_bytes().map(|bytes| bytes.part(offset, len)),
            Part::Mapped { memory, offset: begin, len: all } => {
                Some(memory.bytes().part(*begin, *all).part(offset, len))
            }
            Part::Empty => None,
        }
    }
}

/// What a rank tells the others of its memory.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    address: Address,
    /// The slots of words that are free here, a bit each.
    free: u64,
    /// The lengths of the pieces, where its memory begins in them, and its length.
    pieces: Vec<usize>,
    offset: usize,
    len: usize,
}

impl Windows {
    /// No window yet.
    pub(crate) fn new(
        wanted: Wanted,
        control: &Arc<Control>,
        collectives: &Arc<InFlight>,
        ends: Arc<dyn Ends>,
    ) -> Result<Windows, CudaError> {
        let Wanted { comm, lane, me, layout, context, words, registered, width, obstacle } = wanted;
        let signals = Signals::new(words, layout.count(), layout.ranks(), width);
        let chain = |_| Ok::<_, CudaError>(Chain { last: None, end: Event::new(&context)? });
        let chains = (0..layout.ranks()).map(chain).collect::<Result<Vec<_>, _>>()?;
        let accesses = Accesses::new(comm.clone(), lane, control.clone(), signals.clone(), ends, collectives.clone());
        let (number, slots, exposed) = (0, 0, HashMap::new());
        let (recordings, numbers) = (Recordings::new(), Numbers::default());
        let state = State { context, registered, width, number, chains, slots, exposed, recordings, numbers };
        let state = Mutex::new(Some(state));
        Ok(Windows { comm, lane, me, layout, obstacle, signals, accesses, state })
    }

    /// How many words beside those of a layout its ranks need.
    pub(crate) fn words(ranks: usize) -> usize {
        signals::count(ranks)
    }

    /// Why nothing that comes after what has failed can be submitted.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.accesses.failure()
    }

    // ---- registration ----

    /// Maps the memory that all ranks expose. They call it together; what fails on one fails on all.
    ///
    /// It calls `all_gather` as often on every rank, until one of them fails, and asks now and then whether all ranks are there.
    pub(crate) fn register(
        &self,
        window: WindowId,
        memory: Buffer,
        timeout: Duration,
        all_gather: &mut AllGather<'_>,
        are_there: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        let (own, offer) = split(self.offer(memory));
        let (slot, parts) = self.share(own, offer, memory, timeout, all_gather, are_there)?;
        let (none, parts) = (vec![0; parts.len()], Arc::new(parts));
        let mut state = lock(&self.state);
        let Some(state) = state.as_mut() else {
            self.reap(parts);
            return Err(self.closed("window_register"));
        };
        state.slots |= 1 << slot;
        state.exposed.insert(window, Exposed { slot, parts, sent: none.clone(), taken: none });
        Ok(())
    }

    /// What this rank brings: descriptors of its memory, and a place for those of the others.
    fn offer(&self, memory: Buffer) -> Result<(Own, Offer), Failure> {
        const MEMORY: &str = "the memory of its window";
        let refused = |cause: String| Failure { what: MEMORY.to_owned(), cause };
        if let Some(obstacle) = self.obstacle {
            return Err(refused(obstacle.to_owned()));
        }
        let bytes = memory.device_bytes().ok_or_else(|| refused("it is not on a device".to_owned()))?;
        let context = match lock(&self.state).as_ref() {
            Some(state) => state.context.clone(),
            None => return Err(refused("the communicator is closed".to_owned())),
        };
        let exported = export(&context, bytes).map_err(|error| match error {
            ExportError::Closed => refused(format!("{error}: {FROM_WHERE}")),
            error => refused(error.to_string()),
        })?;
        let most = usize::from(u8::MAX);
        if exported.pieces.len() > most {
            let count = exported.pieces.len();
            return Err(refused(format!("it consists of {count} pieces, more than {most}: {FROM_WHERE}")));
        }
        let post = Post::open().map_err(failed("a place for file descriptors"))?;
        let pieces = exported.pieces.iter().map(|(_, len)| *len).collect();
        let free = match lock(&self.state).as_ref() {
            Some(state) => {
                let is_kept = |slot: &usize| state.recordings.keeps(*slot);
                !(0..SLOTS).filter(is_kept).fold(state.slots, |used, slot| used | 1 << slot)
            }
            None => return Err(refused("the communicator is closed".to_owned())),
        };
        let offer =
            Offer { address: post.address().clone(), free, pieces, offset: exported.offset, len: memory.bytes() };
        Ok((Own { post, exported: exported.pieces, context: context.clone() }, offer))
    }

    /// Hands own memory to all ranks, and maps theirs. The words are those of the slot that it returns.
    fn share(
        &self,
        own: Option<Own>,
        offer: Result<Offer, Failure>,
        memory: Buffer,
        timeout: Duration,
        all_gather: &mut AllGather<'_>,
        are_there: &dyn Fn() -> bool,
    ) -> Result<(usize, Vec<Part>), Error> {
        let names: Vec<Rank> = (0..self.layout.ranks()).map(Rank::from).collect();
        let offers: Vec<Offer> = tell(&self.comm, &names, all_gather, offer)?;
        let own = own.expect("no rank has told a failure");
        let (parts, told) = split(self.map(own, &offers, memory, timeout, are_there).map(|parts| (parts, ())));
        match (tell(&self.comm, &names, all_gather, told), parts) {
            (Ok(_), parts) => Ok(parts.expect("no rank has told a failure")),
            (Err(error), parts) => {
                // What is mapped goes when the device does nothing.
                if let Some((_, parts)) = parts {
                    self.reap(Arc::new(parts));
                }
                Err(error)
            }
        }
    }

    fn map(
        &self,
        own: Own,
        offers: &[Offer],
        memory: Buffer,
        timeout: Duration,
        are_there: &dyn Fn() -> bool,
    ) -> Result<(usize, Vec<Part>), Failure> {
        let Own { post, exported, context } = own;
        let slot = offers.iter().fold(u64::MAX, |free, offer| free & offer.free).trailing_zeros() as usize;
        if slot == SLOTS {
            let cause =
                format!("{SLOTS} windows are registered, or CUDA graphs have accesses to them, which is the most");
            return Err(Failure { what: "its window".to_owned(), cause });
        }
        // No rank uses it before all have told that they are through.
        self.signals.reset(slot, self.me);
        let addresses: Vec<Address> = offers.iter().map(|offer| offer.address.clone()).collect();
        let fds: Vec<BorrowedFd<'_>> = exported.iter().map(|(fd, _)| fd.as_fd()).collect();
        let taken = post.exchange(self.me, &addresses, &fds, deadline_after(Instant::now(), timeout), are_there);
        let taken = taken.map_err(failed("the exchange of file descriptors"))?;
        let part = |(rank, (fds, offer)): (usize, (Vec<OwnedFd>, &Offer))| {
            let what = format!("the window's memory on rank {rank}");
            let end = offer.pieces.iter().try_fold(0, |sum: usize, len| sum.checked_add(*len));
            let is_whole = fds.len() == offer.pieces.len()
                && end.is_some_and(|end| offer.offset.checked_add(offer.len).is_some_and(|last| last <= end));
            if !is_whole && offer.len > 0 {
                return Err(failed(&what)("it has handed too little over"));
            }
            if rank == self.me.index() {
                return Ok(Part::Own(memory));
            }
            if offer.len == 0 {
                return Ok(Part::Empty);
            }
            let pieces: Vec<_> = fds.iter().map(AsFd::as_fd).zip(offer.pieces.iter().copied()).collect();
            let memory = ImportedMemory::new(&context, &pieces).map_err(failed(what))?;
            Ok(Part::Mapped { memory, offset: offer.offset, len: offer.len })
        };
        let parts = taken.into_iter().zip(offers).enumerate().map(part).collect::<Result<Vec<_>, _>>()?;
        Ok((slot, parts))
    }

    /// Waits until no access of this rank to a window is in flight.
    pub(crate) fn settle(&self, window: WindowId, timeout: Duration) -> Result<(), Error> {
        self.accesses.wait_until(timeout, |accesses| !accesses.uses(window)).map_err(|waited| Error::Timeout {
            operation: "window_deregister".to_owned(),
            waited,
            detail: format!("accesses to window {window} are still in flight on the device"),
        })
    }

    /// Forgets a window, which no rank accesses any more. What is mapped goes when the device does nothing.
    pub(crate) fn conceal(&self, window: WindowId) {
        let mut state = lock(&self.state);
        let Some(state) = state.as_mut() else { return };
        let Some(exposed) = state.exposed.remove(&window) else { return };
        // Where an access is still in flight its word is, too.
        if !self.accesses.uses(window) {
            state.slots &= !(1 << exposed.slot);
        }
        self.reap(exposed.parts);
    }

    fn reap(&self, parts: Arc<Vec<Part>>) {
        watch::reap(self.accesses.clone(), Box::new(parts));
    }

    // ---- accesses ----

    /// Puts an access on the caller's stream, or into its capture. `begin` notes it in the flight recorder, under its number.
    ///
    /// # Errors
    /// Nothing has been put there after a usage error. After others nothing of the communicator succeeds on the device.
    pub(crate) fn submit(&self, request: &Request<'_>, begin: impl FnOnce(u64) -> Entry) -> Result<Work, Error> {
        let mut state = lock(&self.state);
        let Some(state) = state.as_mut() else { return Err(self.closed(&request.call)) };
        if let Some(error) = self.accesses.halt() {
            return Err(named(error, &request.call));
        }
        let context = state.context.clone();
        let driver = |error: CudaError| self.broken(&request.call, &error);
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
        state.number = number;
        let work = Work::new(self.accesses.clone(), begin(number));
        if let Some(capture) = capture {
            let captured = self.capture(state, &current, &stream, capture, request).map_err(driver);
            // It has ended for who called it: replays tell nobody.
            self.accesses.end(number, &work, captured.clone());
            return captured.map(|()| work);
        }
        let awaits = state.await_signal(request, self.me);
        let flight = Flight {
            number,
            call: request.call.clone(),
            window: request.window,
            work: work.clone(),
            limit: request.timeout,
            awaits,
            started: None,
            is_close: false,
        };
        if self.accesses.begin(flight) {
            watch::watch(self.accesses.clone());
        }
        if let Err(error) = self.run(state, &current, &stream, number, request, awaits) {
            let error = self.broken(&request.call, &error);
            let done = Step::Write(self.layout.done(self.me, self.lane, number), number);
            if let Err(error) = state.take_steps(&current, &stream, &[done]) {
                log::warn!("nobody will know when a stream ends: {error}");
            }
            return Err(error);
        }
        Ok(work)
    }

    /// Puts all of an access on the stream.
    fn run(
        &self,
        state: &mut State,
        current: &Current<'_>,
        stream: &Stream,
        number: u64,
        request: &Request<'_>,
        awaits: Option<Awaited>,
    ) -> Result<(), CudaError> {
        let (me, lane) = (self.me, self.lane);
        let told = match request.access {
            Access::Put(_) | Access::Get(_) => None,
            Access::Signal => {
                let exposed = state.exposed.get_mut(&request.window).expect("looked up before");
                let sent = &mut exposed.sent[request.peer.index()];
                *sent += 1;
                let line = Line { slot: exposed.slot, receiver: request.peer, sender: me };
                Some(Step::Write(self.signals.index(line, Told::Count), *sent))
            }
            Access::WaitSignal => {
                let Awaited { line, count } = awaits.expect("made for it");
                Some(Step::Wait(self.signals.index(line, Told::Count), count))
            }
        };
        let started = Step::Write(self.layout.started(me, lane, number), number);
        let done = Step::Write(self.layout.done(me, lane, number), number);
        let after: SmallVec<[Step; 2]> = told.into_iter().chain([done]).collect();
        let (id, is_chained) = (stream.id(current)?, request.is_chained());
        let chain = &state.chains[request.peer.index()];
        if is_chained && chain.last.is_some_and(|last| last != id) {
            stream.wait(current, &chain.end)?;
        }
        state.put_on(current, stream, request, &[started], &after)?;
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
        request: &Request<'_>,
    ) -> Result<(), CudaError> {
        // What is made for a capture must not spoil it.
        let _relaxed = Relaxed::enter()?;
        let (me, peer, slot) = (self.me, request.peer, state.exposed[&request.window].slot);
        let operation = state.numbers.next();
        let recording = state.recordings.of(&self.comm, capture, current, stream)?;
        let told = match request.access {
            Access::Put(_) | Access::Get(_) => None,
            Access::Signal => {
                let line = Line { slot, receiver: peer, sender: me };
                Some((self.signals.signal_in_graph(line, operation), "has not taken the signal before"))
            }
            Access::WaitSignal => {
                let line = Line { slot, receiver: me, sender: peer };
                Some((self.signals.wait_in_graph(line, operation), "did not signal in a graph"))
            }
        };
        // Before it can run.
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
    fn broken(&self, call: &str, error: &CudaError) -> Error {
        let error = Error::Device { operation: call.to_owned(), cause: error.to_string() };
        self.accesses.fail(FailureKind::Driver, self.me, error.clone());
        error
    }

    fn closed(&self, operation: &str) -> Error {
        Error::Closed { operation: operation.to_owned(), comm: self.comm.clone(), how: "left".to_owned() }
    }

    // ---- the end ----

    /// Whether a stream waits in a replay. A thread that submits is not waited for.
    fn is_replayed(&self) -> bool {
        let state = self.state.try_lock();
        state.is_ok_and(|state| state.as_ref().is_some_and(|state| state.recordings.is_busy()))
    }

    /// Waits until nothing is in flight, for `limit` at most.
    pub(crate) fn drain(&self, limit: Duration) {
        // What is left then is given up.
        let _ = self.accesses.wait_until(limit, |accesses| accesses.is_idle() && !self.is_replayed());
    }

    /// Gives up what is in flight, and what would come next, because this rank leaves.
    pub(crate) fn leave(&self, error: Error) {
        self.accesses.leave(error, self.is_replayed());
    }

    /// Has memory given back once the device does not use it any more. To be called when this rank has left.
    pub(crate) fn close(&self) {
        let Some(state) = lock(&self.state).take() else { return };
        watch::reap(self.accesses.clone(), Box::new(state));
    }
}

impl State {
    /// The signal that an access waits for, if it waits for one.
    fn await_signal(&mut self, request: &Request<'_>, me: Rank) -> Option<Awaited> {
        if request.access != Access::WaitSignal {
            return None;
        }
        let exposed = self.exposed.get_mut(&request.window).expect("looked up before");
        let taken = &mut exposed.taken[request.peer.index()];
        *taken += 1;
        Some(Awaited { line: Line { slot: exposed.slot, receiver: me, sender: request.peer }, count: *taken })
    }

    /// Puts the copies of an access on a stream, between these steps.
    fn put_on(
        &self,
        current: &Current<'_>,
        stream: &Stream,
        request: &Request<'_>,
        before: &[Step],
        after: &[Step],
    ) -> Result<(), CudaError> {
        let Request { peer, access, buffers, .. } = *request;
        self.take_steps(current, stream, before)?;
        let own: SmallVec<[DeviceBytes<'_>; 8]> = buffers.iter().filter_map(Buffer::device_bytes).collect();
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

/// A rank's memory on its way to the others.
struct Own {
    post: Post,
    exported: Vec<(OwnedFd, usize)>,
    context: Arc<Context>,
}

const FROM_WHERE: &str = "allocate from get_mem_allocator()";
