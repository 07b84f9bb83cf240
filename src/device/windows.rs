//! Windows in the memory of devices: each rank maps the others' parts, and accesses are copies and words on its stream.
//!
//! At the registration, which all ranks take part in, each hands its memory over as file descriptors. From then on a put is a
//! copy into what is mapped, a signal the write of a word, and who waits for it has his stream wait for that word. Nobody of
//! the other rank takes part.

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
use crate::device::in_flight::{Ends, InFlight, named};
use crate::device::lane::{copy, flush};
use crate::device::setup::{AllGather, Failure, failed, split, tell};
use crate::device::signals::{self, SLOTS, Signals};
use crate::device::watch;
use crate::device::words::{ControlLayout, SLOTS as ROOM};
use crate::error::{Error, UsageError};
use crate::sync::{Arc, Mutex, lock};
use crate::sys::cuda::{
    Batch, Capture, Context, CudaError, Current, DeviceBytes, Event, ExportError, ImportedMemory, RegisteredWords,
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
    /// Its name.
    pub(crate) operation: &'static str,
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
    /// Whether each slot of words is in use.
    slots: [bool; SLOTS],
    exposed: HashMap<WindowId, Exposed>,
}

/// The stream of the last access to a rank's memory, and where it ends there.
struct Chain {
    last: Option<StreamId>,
    end: Event,
}

/// A registered window.
struct Exposed {
    slot: usize,
    /// By rank.
    parts: Vec<Part>,
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
    slot: usize,
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
        let (slots, exposed) = ([false; SLOTS], HashMap::new());
        let state = State { context, registered, width, number: 0, chains, slots, exposed };
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
        let slot = own.as_ref().map(|own| own.slot);
        let shared = self.share(own, offer, memory, timeout, all_gather, are_there);
        let mut state = lock(&self.state);
        match (shared, state.as_mut(), slot) {
            (Ok(parts), Some(state), Some(slot)) => {
                let none = vec![0; parts.len()];
                let exposed = Exposed { slot, parts, sent: none.clone(), taken: none };
                state.exposed.insert(window, exposed);
                Ok(())
            }
            (shared, Some(state), Some(slot)) => {
                state.slots[slot] = false;
                shared.map(|_| ())
            }
            (Ok(parts), _, _) => {
                self.reap(parts);
                Err(self.closed("window_register"))
            }
            (Err(error), _, _) => Err(error),
        }
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
        let mut state = lock(&self.state);
        let slots = &mut state.as_mut().ok_or_else(|| refused("the communicator is closed".to_owned()))?.slots;
        let free = slots.iter().position(|is_taken| !is_taken);
        let slot = free.ok_or_else(|| refused(format!("{SLOTS} windows are registered, which is the most")))?;
        slots[slot] = true;
        let offer =
            Offer { address: post.address().clone(), slot, pieces, offset: exported.offset, len: memory.bytes() };
        Ok((Own { post, exported: exported.pieces, slot, context: context.clone() }, offer))
    }

    /// Hands own memory to all ranks, and maps theirs.
    fn share(
        &self,
        own: Option<Own>,
        offer: Result<Offer, Failure>,
        memory: Buffer,
        timeout: Duration,
        all_gather: &mut AllGather<'_>,
        are_there: &dyn Fn() -> bool,
    ) -> Result<Vec<Part>, Error> {
        let names: Vec<Rank> = (0..self.layout.ranks()).map(Rank::from).collect();
        let offers: Vec<Offer> = tell(&self.comm, &names, all_gather, offer)?;
        let own = own.expect("no rank has told a failure");
        let (parts, told) = split(self.map(own, &offers, memory, timeout, are_there).map(|parts| (parts, ())));
        match (tell(&self.comm, &names, all_gather, told), parts) {
            (Ok(_), parts) => Ok(parts.expect("no rank has told a failure")),
            (Err(error), parts) => {
                // What is mapped goes when the device does nothing.
                if let Some(parts) = parts {
                    self.reap(parts);
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
    ) -> Result<Vec<Part>, Failure> {
        let Own { post, exported, slot, context } = own;
        if let Some(other) = offers.iter().position(|offer| offer.slot != slot) {
            let cause = format!("rank {other} has words {} for it, this rank {slot}", offers[other].slot);
            return Err(Failure { what: "its window".to_owned(), cause });
        }
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
        taken.into_iter().zip(offers).enumerate().map(part).collect()
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
            self.signals.reset(exposed.slot, self.me);
            state.slots[exposed.slot] = false;
        }
        self.reap(exposed.parts);
    }

    fn reap(&self, parts: Vec<Part>) {
        watch::reap(self.accesses.clone(), Box::new(parts));
    }

    // ---- accesses ----

    /// Puts an access on the caller's stream. `begin` notes it in the flight recorder, under its number.
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
        match stream.capture(&current).map_err(driver)? {
            Capture::Off => {}
            Capture::Active(_) | Capture::Spoilt => return Err(captured(request.operation).into()),
        }
        let number = state.number + 1;
        self.accesses.wait_until(request.timeout, |accesses| accesses.has_room(number)).map_err(|waited| {
            let detail = format!("{ROOM} accesses are in flight on the device");
            Error::Timeout { operation: request.call.clone(), waited, detail }
        })?;
        let exposed = state.exposed.get_mut(&request.window);
        let exposed = exposed.ok_or_else(|| self.closed(&request.call))?;
        state.number = number;
        let peer = request.peer;
        let awaits = (request.access == Access::WaitSignal).then(|| {
            exposed.taken[peer.index()] += 1;
            let word = self.signals.index(exposed.slot, self.me, peer);
            Awaited { word, count: exposed.taken[peer.index()], from: peer }
        });
        let work = Work::new(self.accesses.clone(), begin(number));
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
        if let Err(error) = self.put_on(state, &current, &stream, number, request, awaits) {
            let error = self.broken(&request.call, &error);
            let done = Some((self.layout.done(self.me, self.lane, number), number));
            if let Err(error) = state.tell(&current, &stream, done) {
                log::warn!("nobody will know when a stream ends: {error}");
            }
            return Err(error);
        }
        Ok(work)
    }

    /// Puts all of an access on the stream.
    fn put_on(
        &self,
        state: &mut State,
        current: &Current<'_>,
        stream: &Stream,
        number: u64,
        request: &Request<'_>,
        awaits: Option<Awaited>,
    ) -> Result<(), CudaError> {
        let Request { window, peer, access, buffers, .. } = *request;
        let (me, lane) = (self.me, self.lane);
        let started = (self.layout.started(me, lane, number), number);
        let done = (self.layout.done(me, lane, number), number);
        let State { registered, width, chains, exposed, .. } = state;
        let (chain, id) = (&mut chains[peer.index()], stream.id(current)?);
        let exposed = exposed.get_mut(&window).expect("looked up before");
        // What is done to one rank's memory, and told of it, comes one after the other, whatever the streams.
        if awaits.is_none() && chain.last.is_some_and(|last| last != id) {
            stream.wait(current, &chain.end)?;
        }
        let mut batch = Batch::new(*width);
        batch.write(registered.word(started.0), started.1);
        let own: SmallVec<[DeviceBytes<'_>; 8]> = buffers.iter().filter_map(Buffer::device_bytes).collect();
        let len: usize = own.iter().map(|bytes| bytes.len()).sum();
        match access {
            Access::Put(offset) | Access::Get(offset) => {
                flush(current, stream, &mut batch)?;
                if let Some(part) = exposed.parts[peer.index()].bytes(offset, len).filter(|_| len > 0) {
                    match access {
                        Access::Put(_) => copy(current, stream, &own, &[part])?,
                        _ => copy(current, stream, &[part], &own)?,
                    }
                }
            }
            Access::Signal => {
                exposed.sent[peer.index()] += 1;
                let word = self.signals.index(exposed.slot, peer, me);
                batch.write(registered.word(word), exposed.sent[peer.index()]);
            }
            Access::WaitSignal => {
                let Awaited { word, count, .. } = awaits.expect("made for it");
                batch.wait(registered.word(word), count);
            }
        }
        batch.write(registered.word(done.0), done.1);
        flush(current, stream, &mut batch)?;
        if awaits.is_none() {
            chain.end.record(current, stream)?;
            chain.last = Some(id);
        }
        Ok(())
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

    /// Waits until nothing is in flight, for `limit` at most.
    pub(crate) fn drain(&self, limit: Duration) {
        // What is left then is given up.
        let _ = self.accesses.wait_until(limit, Accesses::is_idle);
    }

    /// Gives up what is in flight, and what would come next, because this rank leaves.
    pub(crate) fn leave(&self, error: Error) {
        self.accesses.leave(error);
    }

    /// Has memory given back once the device does not use it any more. To be called when this rank has left.
    pub(crate) fn close(&self) {
        let Some(state) = lock(&self.state).take() else { return };
        watch::reap(self.accesses.clone(), Box::new(state));
    }
}

impl State {
    /// Has a stream write a word.
    fn tell(&self, current: &Current<'_>, stream: &Stream, edge: Option<(usize, u64)>) -> Result<(), CudaError> {
        let mut batch = Batch::new(self.width);
        if let Some((word, value)) = edge {
            batch.write(self.registered.word(word), value);
        }
        flush(current, stream, &mut batch)
    }
}

/// A rank's memory on its way to the others.
struct Own {
    post: Post,
    exported: Vec<(OwnedFd, usize)>,
    slot: usize,
    context: Arc<Context>,
}

fn captured(operation: &'static str) -> UsageError {
    UsageError {
        operation: operation.to_owned(),
        argument: "stream",
        expected: "a stream whose operations run".to_owned(),
        got: "one that is being captured in a graph, which accesses to windows cannot take part in yet".to_owned(),
    }
}

const FROM_WHERE: &str = "allocate from get_mem_allocator()";
