//! The executor of messages on a device: puts sends and receives, and batches of them, on the caller's stream.
//!
//! Two ranks wait for each other at the first message between them, and set up what they share; later calls return at once. The
//! messages of a batch are one work on one stream and fail together: each rank with a message in the batch is told of the
//! failure. Messages in captures of graphs go through rings of their own.
//!
//! Where a [library](crate::device::vendor) carries the messages of a pair, its calls replace the rings' programs; those of a
//! batch are one group, in captures too. The log, the words of beginning and end, and what fails together are the same.

use std::collections::VecDeque;
use std::fmt::Display;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::buffer::Buffer;
use crate::deadline::deadline_after;
use crate::device::far_pairs::{Carrier, FarPairs};
use crate::device::graph::number_of;
use crate::device::graph_rings::GraphRings;
use crate::device::graph_waits::Numbers;
use crate::device::in_flight::{self, By, Ends, Halt, InFlight, Watched};
use crate::device::message_log::{LoggedMessage, PlaceInCall, called, disagreement};
use crate::device::pairs::{Branch, Channel, LANES, Library, Link, PairSetup, Pairs, lane};
use crate::device::parts::{Awaits, Batch, BatchPart, PartInFlight, Several};
use crate::device::recordings::Recordings;
use crate::device::ring_lane::{Edge, RingLane};
use crate::device::rounds::{self, Direction, Rounds};
use crate::device::setup::Presence;
use crate::device::vendor::ending::Leaving;
use crate::device::vendor::{Patience, SubmitError, VendorComm};
use crate::device::watch;
use crate::device::words::SLOTS;
use crate::error::{Error, InitError, UsageError};
use crate::sync::{Arc, Mutex, MutexGuard, lock};
use crate::sys::cuda::{Capture, Context, CudaError, Current, Device, DeviceBytes, Stream, StreamHandle};
use crate::sys::nccl::NcclCall;
use crate::types::{Rank, Tag};
use crate::work::{Drive, Entry, Work};

mod capture;
mod meetings;

/// One message as a rank calls it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message<'a> {
    pub(crate) peer: Rank,
    pub(crate) direction: Direction,
    pub(crate) tag: Tag,
    /// The memory that is sent, or received into, end to end.
    pub(crate) buffers: &'a [Buffer],
}

impl Message<'_> {
    pub(crate) fn bytes(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.bytes()).sum()
    }

    fn channel(&self) -> Channel {
        (self.peer, self.direction)
    }

    fn logged(&self, captured: Option<PlaceInCall>) -> LoggedMessage {
        LoggedMessage { bytes: self.bytes() as u64, tag: self.tag, captured }
    }

    fn eager(&self) -> LoggedMessage {
        self.logged(None)
    }
}

/// The call in words, as the CPU engine writes it.
impl Display for Message<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&called(self.direction, self.peer, self.eager()))
    }
}

/// One call: messages that go on the stream together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchRequest<'a> {
    pub(crate) messages: &'a [Message<'a>],
    pub(crate) stream: StreamHandle,
    pub(crate) timeout: Duration,
}

impl BatchRequest<'_> {
    fn tensors(&self) -> Vec<SmallVec<[DeviceBytes<'_>; 2]>> {
        let messages = self.messages.iter();
        messages.map(|message| message.buffers.iter().filter_map(Buffer::device_bytes).collect()).collect()
    }

    /// The call of a stretch in words, for errors.
    fn text(&self, stretch: &Stretch) -> String {
        let message = &self.messages[stretch.messages[0]];
        match self.messages.len() {
            1 => message.to_string(),
            count => format!("{message} in a batch of {count} messages"),
        }
    }
}

/// What a communicator offers to messages on its device.
pub(crate) trait Peers: Presence + Sync {
    /// Notes a message in the flight recorder.
    fn begin(&self, message: &Message<'_>, number: u64) -> Entry;

    /// Sends a rank bytes, in the background.
    fn tell(&self, peer: Rank, tag: Tag, told: Vec<u8>) -> Result<(), Error>;

    /// Waits for the bytes that a rank sends by `tell`.
    fn hear(&self, peer: Rank, tag: Tag, timeout: Duration) -> Result<Vec<u8>, Error>;
}

/// A communicator's executor of messages on one device.
pub(crate) struct Messages {
    own: PairSetup,
    ends: Arc<dyn Ends>,
    /// Carries messages to and from other hosts.
    far: Arc<dyn FarPairs>,
    /// Held while a call submits. The driver's calls queue and do not wait.
    state: Mutex<Option<State>>,
    /// Used without the lock of `state`.
    links: Mutex<Links>,
    /// By peer and lane: held while this rank waits for the peer. It holds why this rank gave up the setup, if it did.
    meetings: Vec<[Mutex<Option<Error>>; LANES]>,
}

struct State {
    rings: RingLane<Pairs>,
    /// What this rank has sent itself and not yet received, or the other way round.
    unmet: VecDeque<LoggedMessage>,
    /// By peer, the rings of messages in graphs.
    graph_rings: Vec<Option<GraphRings>>,
    /// Captures, in which the messages of a channel follow each other.
    recordings: Recordings<Channel>,
    /// The numbers of operations in graphs.
    numbers: Numbers,
}

#[derive(Default)]
struct Links {
    /// Why this rank has left.
    left: Option<Error>,
    all: Vec<Arc<Link>>,
}

/// The messages of a call between two ranks in one direction.
struct Stretch {
    channel: Channel,
    /// The messages' places in the call.
    messages: SmallVec<[usize; 2]>,
}

impl Messages {
    pub(crate) fn new(own: PairSetup, ends: Arc<dyn Ends>, far: Arc<dyn FarPairs>) -> Messages {
        let rings = RingLane::on(Pairs::new(own.me, own.size), own.me, own.size);
        let graph_rings = (0..own.size).map(|_| None).collect();
        let (recordings, numbers) = (Recordings::new(), Numbers::default());
        let state = Mutex::new(Some(State { rings, unmet: VecDeque::new(), graph_rings, recordings, numbers }));
        let meetings = (0..own.size).map(|_| Default::default()).collect();
        Messages { own, ends, far, state, links: Mutex::default(), meetings }
    }

    pub(crate) fn device(&self) -> u32 {
        self.own.device
    }

    /// Puts messages on the caller's stream.
    ///
    /// # Errors
    /// After a usage error nothing is on the stream. After any other error none of the messages succeeds.
    pub(crate) fn submit(&self, request: &BatchRequest<'_>, peers: &dyn Peers) -> Result<Work, Error> {
        let stretches = stretches(request.messages);
        self.check(request, &stretches)?;
        let until = deadline_after(Instant::now(), request.timeout);
        loop {
            let mut meetings = self.meetings_before(&stretches, request, false)?;
            if meetings.is_empty() {
                let mut state = lock(&self.state);
                let Some(state) = state.as_mut() else { return Err(self.closed(&request.messages[0])) };
                // Another thread's call may have failed since.
                if let Some(work) = self.submit_to(state, &stretches, request, peers)? {
                    return Ok(work);
                }
            }
            let capture = self.ask(request);
            let in_graph = match capture {
                Ok(capture) => number_of(capture, || request.messages[0].to_string())?.is_some(),
                Err(_) => false,
            };
            if in_graph {
                meetings = self.meetings_before(&stretches, request, true)?;
            }
            let asked = capture.map(|_| ());
            self.meet(&meetings, &asked, request, until, peers).inspect_err(|error| {
                if let Some(state) = lock(&self.state).as_ref() {
                    self.give_up(state, &stretches, error);
                }
            })?;
        }
    }

    /// Asks the driver whether the stream is being captured. If that fails, the setup tells the other ranks.
    fn ask(&self, request: &BatchRequest<'_>) -> Result<Capture, CudaError> {
        let context = Context::primary(Device::new(self.own.device)?)?;
        let current = context.enter()?;
        Stream::of_caller(&context, request.stream).capture(&current)
    }

    fn check(&self, request: &BatchRequest<'_>, stretches: &[Stretch]) -> Result<(), Error> {
        let Some(long) = stretches.iter().find(|stretch| stretch.messages.len() > SLOTS) else { return Ok(()) };
        Err(UsageError {
            operation: request.messages[long.messages[0]].to_string(),
            argument: "ops",
            expected: format!("at most {SLOTS} messages of a batch to a rank, and as many from it"),
            got: long.messages.len().to_string(),
        }
        .into())
    }

    // ---- submission ----

    /// Puts messages on the stream. `None`: this rank has to meet another one first.
    fn submit_to(
        &self,
        state: &mut State,
        stretches: &[Stretch],
        request: &BatchRequest<'_>,
        peers: &dyn Peers,
    ) -> Result<Option<Work>, Error> {
        let first = &request.messages[0];
        for Stretch { channel, messages } in stretches {
            match self.halt(state, *channel, messages.len(), &request.messages[messages[0]]) {
                None => {}
                Some(Halt::Mismatch) => return Ok(None),
                Some(Halt::Failed(error)) => {
                    let error = in_flight::named(error, first);
                    self.give_up(state, stretches, &error);
                    return Err(error);
                }
            }
        }
        let context = state.pairs().pair(first.peer).context.clone();
        // The other ranks call their ends whatever the driver refuses here, so they are told.
        let broken = |error: &dyn Display| Error::Device { operation: first.to_string(), cause: error.to_string() };
        let entered = || -> Result<(Current<'_>, Stream, Capture), CudaError> {
            let current = context.enter()?;
            let stream = Stream::of_caller(&context, request.stream);
            let capture = stream.capture(&current)?;
            Ok((current, stream, capture))
        };
        let (current, stream, capture) = entered().map_err(|error| {
            let error = broken(&error);
            self.give_up(state, stretches, &error);
            error
        })?;
        if let Some(id) = number_of(capture, || first.to_string())? {
            let is_carried = |Stretch { channel, .. }: &Stretch| {
                channel.0 == self.own.me || state.pairs().library(*channel).is_some()
            };
            if !stretches.iter().all(is_carried) {
                self.own.libraries.no_streams().map_or(Ok(()), |why| Err(self.refused(first, &why)))?;
            }
            return self.capture(state, (&current, &stream, id), stretches, request, peers);
        }
        let unmet = self.unmet_after(state, request)?;
        self.check_pieces(state, request)?;
        let messages = request.messages.iter().enumerate();
        let messages = messages.filter(|(_, message)| state.pairs().library(message.channel()).is_none());
        let messages: Vec<rounds::Message> = messages.map(plain).collect();
        let rounds = state.rings.plan(&messages).map_err(|error| self.refused(first, &error))?;
        for stretch in stretches {
            self.make_room(state, stretch, request).inspect_err(|error| self.give_up(state, stretches, error))?;
        }
        let batch = self.enter(state, stretches, request, &rounds, peers)?;
        state.unmet = unmet;
        for (stretch, place) in stretches.iter().zip(batch.places()) {
            self.take_off(state, stretch, place, &batch, request);
        }
        let carried = self
            .carry(state, stretches, &batch, request)
            .map_err(|cause| Error::Device { operation: first.to_string(), cause: cause.to_string() });
        let put =
            |()| state.put(&current, &stream, stretches, &rounds, request, &batch).map_err(|error| broken(&error));
        if let Err(error) = carried.and_then(put) {
            // A library's communicator that has been given up meanwhile has a known failure, which the work reports.
            let mut libraries = stretches.iter().filter_map(|stretch| state.pairs().library(stretch.channel));
            let is_known = libraries.any(|library| library.comm.is_given_up());
            if !is_known {
                batch.fail(&error);
            }
            state.end(&current, &stream, stretches);
            if !is_known {
                return Err(error);
            }
        }
        Ok(Some(batch.work().clone()))
    }

    /// Refuses a message in several tensors where a library carries it, which takes one: the other rank may cut the message
    /// otherwise.
    fn check_pieces(&self, state: &State, request: &BatchRequest<'_>) -> Result<(), UsageError> {
        let pieces = |message: &Message<'_>| message.buffers.iter().filter(|buffer| buffer.bytes() > 0).count();
        let mut carried = request.messages.iter().filter(|message| state.pairs().library(message.channel()).is_some());
        let Some(cut) = carried.find(|message| pieces(message) > 1) else { return Ok(()) };
        Err(UsageError {
            operation: cut.to_string(),
            argument: "tensors",
            expected: "one tensor a message, as a vendor's library takes it; engine=streams takes several".to_owned(),
            got: pieces(cut).to_string(),
        })
    }

    /// Has the engine carry messages to and from other hosts, or only tell the ranks of them where a library carries them.
    fn carry(
        &self,
        state: &State,
        stretches: &[Stretch],
        batch: &Batch,
        request: &BatchRequest<'_>,
    ) -> std::io::Result<()> {
        for (Stretch { channel, messages }, place) in stretches.iter().zip(batch.places()) {
            if state.pairs().pair(channel.0).is_far() {
                let logged: Vec<LoggedMessage> = messages.iter().map(|at| request.messages[*at].eager()).collect();
                let library = state.pairs().library(*channel);
                let carrier = library.map_or(Carrier::Engine, |_| Carrier::Library);
                self.far.submit(*channel, place.first, &logged, carrier)?;
            }
        }
        Ok(())
    }

    /// What `unmet` will hold once these messages are submitted.
    fn unmet_after(&self, state: &State, request: &BatchRequest<'_>) -> Result<VecDeque<LoggedMessage>, Error> {
        let own = |direction| {
            let own = request.messages.iter().filter(move |message| message.channel() == (self.own.me, direction));
            own.map(Message::eager)
        };
        let earlier = state.unmet.iter().copied();
        let is_ahead = state.rings.ahead() > 0;
        let (sent, received): (Vec<LoggedMessage>, Vec<LoggedMessage>) = match is_ahead {
            true => (earlier.chain(own(Direction::Send)).collect(), own(Direction::Receive).collect()),
            false => (own(Direction::Send).collect(), earlier.chain(own(Direction::Receive)).collect()),
        };
        if let Some((sent, received)) = sent.iter().zip(&received).find(|(sent, received)| sent != received) {
            let me = self.own.me;
            let (sent, received) = (called(Direction::Send, me, *sent), called(Direction::Receive, me, *received));
            return Err(
                self.refused(&request.messages[0], &format!("this rank sends itself {sent}, but calls {received}"))
            );
        }
        let met = sent.len().min(received.len());
        Ok(sent.into_iter().skip(met).chain(received.into_iter().skip(met)).collect())
    }

    /// Waits until the log has room for messages, as for a full queue of the driver.
    fn make_room(&self, state: &State, stretch: &Stretch, request: &BatchRequest<'_>) -> Result<(), Error> {
        let (peer, direction) = stretch.channel;
        let (lane, link) = (lane(self.own.me, peer, direction), &state.pairs().pair(peer).link);
        let last = state.pairs().end(stretch.channel).number + stretch.messages.len() as u64;
        let Some(earlier) = last.checked_sub(SLOTS as u64).filter(|earlier| *earlier > 0) else { return Ok(()) };
        let (begin, in_flight) = (Instant::now(), &link.in_flight[lane]);
        let waited_for = in_flight.wait_for(earlier, request.timeout);
        let is_in_time = waited_for.is_ok() && {
            // The other rank makes room only by its own calls, and wakes nobody.
            while !link.control.has_room_for_message(lane, last) && begin.elapsed() < request.timeout {
                if let Some(error) = in_flight.obstacle(request.messages[stretch.messages[0]], &[peer]) {
                    return Err(error);
                }
                std::thread::sleep(Duration::from_micros(200));
            }
            link.control.has_room_for_message(lane, last)
        };
        if is_in_time {
            return Ok(());
        }
        Err(Error::Timeout {
            operation: request.messages[stretch.messages[0]].to_string(),
            waited: begin.elapsed(),
            detail: format!("{SLOTS} messages are in flight on the device, or rank {peer} has not called them"),
        })
    }

    /// Makes a batch of messages, and tells the other ranks of them.
    fn enter(
        &self,
        state: &State,
        stretches: &[Stretch],
        request: &BatchRequest<'_>,
        rounds: &Rounds,
        peers: &dyn Peers,
    ) -> Result<Arc<Batch>, Error> {
        let place = |Stretch { channel: channel @ (peer, direction), messages }: &Stretch| {
            let first = state.pairs().end(*channel).number + 1;
            let in_flight = state.pairs().in_flight(*channel).clone();
            let awaits = state.rings.awaits_after(rounds, *peer, *direction);
            let awaits = awaits.map(|(word, value)| state.pairs().awaited(word, value)).into_iter().collect();
            let library = state.pairs().library(*channel);
            let awaits = library.map_or(Awaits::Words(awaits), |_| Awaits::Library);
            PartInFlight { in_flight, peer: *peer, first, last: first + messages.len() as u64 - 1, awaits }
        };
        let places: Vec<PartInFlight> = stretches.iter().map(place).collect();
        let works = self.announce(state, stretches, request, false, peers)?;
        let batch = Batch::new(works, places.len());
        batch.place(places);
        Ok(batch)
    }

    /// Tells the other ranks of the messages, and compares them with what these ranks have called. Returns one work a message.
    fn announce(
        &self,
        state: &State,
        stretches: &[Stretch],
        request: &BatchRequest<'_>,
        is_captured: bool,
        peers: &dyn Peers,
    ) -> Result<Vec<Work>, Error> {
        let me = self.own.me;
        let mut numbers = vec![0; request.messages.len()];
        let mut in_flight: Vec<Arc<InFlight>> = Vec::new();
        for Stretch { channel, messages } in stretches {
            let first = state.pairs().end(*channel).number + 1;
            messages.iter().zip(first..).for_each(|(message, number)| numbers[*message] = number);
            in_flight.push(state.pairs().in_flight(*channel).clone());
        }
        let drive: Arc<dyn Drive> = match &in_flight[..] {
            [one] => one.clone(),
            _ => Arc::new(Several::new(self.own.comm.clone(), in_flight)),
        };
        let work = |(message, number): (&Message<'_>, &u64)| Work::new(drive.clone(), peers.begin(message, *number));
        let works: Vec<Work> = request.messages.iter().zip(&numbers).map(work).collect();
        for Stretch { channel: (peer, direction), messages } in
            stretches.iter().filter(|stretch| stretch.channel.0 != me)
        {
            let (lane, control) = (lane(me, *peer, *direction), &state.pairs().pair(*peer).link.control);
            for (place, message) in (1..).zip(messages) {
                let captured = is_captured.then_some(PlaceInCall { place, of: messages.len() as u32 });
                let (number, logged) = (numbers[*message], request.messages[*message].logged(captured));
                let Err(theirs) = control.enter_message(lane, number, logged) else { continue };
                let operation = request.messages[*message].to_string();
                let detail = disagreement(number, (me, *direction, logged), (*peer, theirs));
                let error = Error::Mismatch { operation, detail };
                self.give_up(state, stretches, &error);
                works.iter().for_each(|work| self.ends.ended(work, Err(error.clone())));
                return Err(error);
            }
        }
        Ok(works)
    }

    /// Counts messages among those in flight, before anything of them is on the stream.
    fn take_off(
        &self,
        state: &mut State,
        stretch: &Stretch,
        place: &PartInFlight,
        batch: &Arc<Batch>,
        request: &BatchRequest<'_>,
    ) {
        let ((peer, direction), me) = (stretch.channel, self.own.me);
        let text = request.text(stretch);
        let way = match direction {
            Direction::Send => (me, peer),
            Direction::Receive => (peer, me),
        };
        let part = BatchPart::new(text, place.first, way, peer, batch.clone());
        let end = state.rings.memory_mut().end_mut(stretch.channel);
        end.number += stretch.messages.len() as u64;
        let by = if place.in_flight.is_by_library() { By::Library } else { By::Programs };
        if place.in_flight.begin(end.number, part, batch.work().clone(), request.timeout, by) {
            watch::watch(place.in_flight.clone());
        }
    }

    /// Tells every rank of these messages that they have failed, if a pair with it is set up.
    fn give_up(&self, state: &State, stretches: &[Stretch], error: &Error) {
        for Stretch { channel: channel @ (peer, _), .. } in stretches {
            if state.pairs().by_peer[peer.index()].is_some() {
                let first = state.pairs().end(*channel).number + 1;
                state.pairs().in_flight(*channel).fail_too(first, error);
            }
        }
    }

    // ---- the end ----

    /// Waits until nothing is in flight, for `limit` at most.
    pub(crate) fn drain(&self, limit: Duration) {
        let until = deadline_after(Instant::now(), limit);
        for link in self.links().all.clone() {
            for in_flight in &link.in_flight {
                // `leave` gives up what is left then.
                let _ = in_flight.wait_for(u64::MAX, until.saturating_duration_since(Instant::now()));
            }
        }
        // `drain` does not wait for a thread that submits, which holds this lock.
        let is_replayed =
            || self.state.try_lock().is_ok_and(|state| state.as_ref().is_some_and(|state| state.recordings.is_busy()));
        while is_replayed() && Instant::now() < until {
            std::thread::sleep(in_flight::NAP_MAX);
        }
    }

    /// Gives up what is in flight, and what would come next, because this rank leaves. It waits for no thread that submits.
    pub(crate) fn leave(&self, error: &Error) {
        let mut links = self.links();
        links.left.get_or_insert_with(|| error.clone());
        let all = links.all.clone();
        drop(links);
        all.iter().flat_map(|link| &link.in_flight).for_each(|in_flight| in_flight.leave(error.clone()));
    }

    /// Gives vendors' libraries up, after [`leave`](Messages::leave).
    pub(crate) fn give_up_libraries(&self) {
        let all = self.links().all.clone();
        all.iter().flat_map(|link| &link.in_flight).for_each(|in_flight| in_flight.give_up_library());
    }

    /// Has the reaper give memory back once the device no longer uses it, after [`leave`](Messages::leave).
    pub(crate) fn close(&self, leaving: Leaving) {
        let Some(state) = lock(&self.state).take() else { return };
        let in_flight = |link: &Arc<Link>| link.in_flight.clone();
        let in_flight = self.links().all.iter().flat_map(in_flight).map(|lane| lane as Arc<dyn Watched>).collect();
        watch::reap_with(state.pairs().libraries(), leaving, in_flight, Box::new(state));
    }

    fn links(&self) -> MutexGuard<'_, Links> {
        lock(&self.links)
    }

    // ---- errors ----

    fn refused(&self, message: &Message<'_>, cause: &impl Display) -> Error {
        let PairSetup { comm, device, .. } = &self.own;
        InitError::Config(format!("communicator `{comm}`: {message} on cuda:{device}: {cause}")).into()
    }

    fn closed(&self, message: &Message<'_>) -> Error {
        Error::Closed { operation: message.to_string(), comm: self.own.comm.clone(), how: "left".to_owned() }
    }

    fn os(&self, what: &str, cause: &std::io::Error) -> Error {
        InitError::Os { comm: self.own.comm.clone(), what: what.to_owned(), cause: cause.to_string() }.into()
    }
}

impl State {
    fn pairs(&self) -> &Pairs {
        self.rings.memory()
    }

    fn put(
        &mut self,
        current: &Current<'_>,
        stream: &Stream,
        stretches: &[Stretch],
        rounds: &Rounds,
        request: &BatchRequest<'_>,
        batch: &Batch,
    ) -> Result<(), SubmitError> {
        let id = stream.id(current)?;
        // Messages of one channel come one after the other, whatever their streams.
        for Stretch { channel, .. } in stretches {
            let end = self.pairs().end(*channel);
            if end.last.is_some_and(|last| last != id) {
                stream.wait(current, &end.end)?;
            }
        }
        let tensors = request.tensors();
        let tensors: Vec<&[DeviceBytes<'_>]> = tensors.iter().map(|tensor| &tensor[..]).collect();
        let [starts, ends] = self.edges(stretches);
        let put = if stretches.iter().all(|stretch| self.pairs().library(stretch.channel).is_none()) {
            self.rings.put(current, stream, rounds, &tensors, &starts, &ends).map_err(SubmitError::from)
        } else {
            let by_library = self.rings.write(current, stream, &starts).map_err(SubmitError::from).and_then(|()| {
                self.note_library(stretches);
                let branch = |_, library: &Library| Ok(library.branch.clone());
                put_by_library(self.pairs(), (current, stream), stretches, &tensors, branch, Patience::Watched)
            });
            // What this rank sends itself, by its ring.
            by_library.and_then(|()| Ok(self.rings.put(current, stream, rounds, &tensors, &[], &ends)?))
        };
        // Even if a part is missing on the stream: the rest may wait for words.
        for PartInFlight { in_flight, awaits, .. } in batch.places() {
            let Awaits::Words(words) = awaits else { continue };
            for (lane, word, value) in words {
                in_flight.submitted(*lane, [(*word, *value)].into_iter());
            }
        }
        put?;
        for Stretch { channel, .. } in stretches {
            let end = self.rings.memory_mut().end_mut(*channel);
            end.end.record(current, stream)?;
            end.last = Some(id);
        }
        Ok(())
    }

    /// Notes that a library puts the messages of its channels on streams.
    fn note_library(&mut self, stretches: &[Stretch]) {
        for Stretch { channel, .. } in stretches {
            if self.pairs().library(*channel).is_some() {
                let end = self.rings.memory_mut().end_mut(*channel);
                end.by_library = end.number;
            }
        }
    }

    /// Puts the words of the end on a stream that lacks a part of these messages: they say when the stream has run out.
    fn end(&self, current: &Current<'_>, stream: &Stream, stretches: &[Stretch]) {
        let [_, ends] = self.edges(stretches);
        if let Err(error) = self.rings.write(current, stream, &ends) {
            log::warn!("nobody will know when messages on a device end: {error}");
        }
    }

    /// What the stream tells the host at the beginning and at the end.
    fn edges(&self, stretches: &[Stretch]) -> [Vec<Edge>; 2] {
        [false, true].map(|is_end| {
            let edge = |Stretch { channel, .. }: &Stretch| {
                let ((peer, _), number) = (*channel, self.pairs().end(*channel).number);
                Edge { peer, word: self.pairs().edge_of(*channel, number, is_end), value: number }
            };
            stretches.iter().map(edge).collect()
        })
    }
}

/// Puts what a library carries on the stream, as one group. Each direction of a pair has a communicator. The first one's calls
/// go on the caller's stream, the others' on the streams that `branch` gives, so that all run together; the caller's stream waits
/// for all.
fn put_by_library(
    pairs: &Pairs,
    (current, stream): (&Current<'_>, &Stream),
    stretches: &[Stretch],
    tensors: &[&[DeviceBytes<'_>]],
    mut branch: impl FnMut(Channel, &Library) -> Result<Arc<Branch>, CudaError>,
    patience: Patience,
) -> Result<(), SubmitError> {
    let me = pairs.me();
    let mut parts = Vec::new();
    for stretch in stretches {
        let Some((library, calls)) = calls_of(pairs, stretch, tensors).filter(|(_, calls)| !calls.is_empty()) else {
            continue;
        };
        let (peer, direction) = stretch.channel;
        let order = (me.min(peer), me.max(peer), lane(me, peer, direction));
        parts.push((order, library, calls, branch(stretch.channel, library)?));
    }
    // All ranks put calls on streams in one order, so that streams which share a queue of a device never wait in a circle:
    // of all calls that wait, the first in this order is next at both of its ends.
    parts.sort_unstable_by_key(|(order, ..)| *order);
    let Some(((.., first), others)) = parts.split_first() else { return Ok(()) };
    if !others.is_empty() {
        first.joined.record(current, stream)?;
    }
    for (.., branch) in others {
        branch.stream.wait(current, &first.joined)?;
    }
    let group = parts.iter().enumerate().map(|(number, (_, library, calls, branch))| {
        let stream = if number == 0 { stream } else { &branch.stream };
        (&*library.comm, stream, &calls[..])
    });
    let group: Vec<_> = group.collect();
    let submitted = VendorComm::submit_together(current, &group, patience);
    // Even if a part of the group is missing.
    for (.., branch) in others {
        branch.joined.record(current, &branch.stream)?;
        stream.wait(current, &branch.joined)?;
    }
    Ok(submitted?)
}

/// The calls of a library that carry some messages of a channel, if one does.
fn calls_of<'p, 'a>(
    pairs: &'p Pairs,
    stretch: &Stretch,
    tensors: &[&[DeviceBytes<'a>]],
) -> Option<(&'p Library, Vec<NcclCall<'a>>)> {
    let library = pairs.library(stretch.channel)?;
    let bytes = stretch.messages.iter().flat_map(|message| tensors[*message]);
    // An empty message needs neither a call nor the other rank.
    let calls = bytes.filter(|bytes| !bytes.is_empty()).map(|bytes| library.call(*bytes)).collect();
    Some((library, calls))
}

/// Groups the messages of a call by peer and direction.
fn stretches(messages: &[Message<'_>]) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        let channel = message.channel();
        match stretches.iter_mut().find(|stretch| stretch.channel == channel) {
            Some(stretch) => stretch.messages.push(index),
            None => stretches.push(Stretch { channel, messages: SmallVec::from_slice(&[index]) }),
        }
    }
    stretches
}

/// A message with its place in the call as the number of its tensor.
fn plain((tensor, message): (usize, &Message<'_>)) -> rounds::Message {
    let Message { peer, direction, .. } = *message;
    rounds::Message { peer, direction, part: rounds::TensorPart { tensor, offset: 0, len: message.bytes() } }
}
