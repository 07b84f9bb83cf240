//! The executor of messages on a device: puts sends and receives, and batches of them, on the caller's stream.
//!
//! Two ranks set up what they share at the first message between them, and wait for each other there. From then on a call
//! returns at once. The messages of a batch are one work on one stream, so they fail together: whatever fails one of them is
//! told to all ranks that have a message in it.

use std::collections::VecDeque;
use std::fmt::Display;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::buffer::Buffer;
use crate::deadline::deadline_after;
use crate::device::far_pairs::FarPairs;
use crate::device::in_flight::{self, Ends, Halt, Watched};
use crate::device::message_log::{LoggedMessage, called, disagreement};
use crate::device::pairs::{Asked, Channel, LANES, Link, Own, Pair, Pairs, lane};
use crate::device::parts::{Batch, Part, Place, Several};
use crate::device::ring_lane::{Edge, RingLane};
use crate::device::rounds::{self, Direction, Rounds};
use crate::device::setup::{Failure, Presence};
use crate::device::watch;
use crate::device::words::SLOTS;
use crate::error::{Error, InitError, UsageError};
use crate::sync::{Arc, Mutex, MutexGuard, lock};
use crate::sys::cuda::{Capture, Context, CudaError, Current, Device, DeviceBytes, Stream, StreamHandle};
use crate::types::{Rank, Tag};
use crate::work::{Drive, Entry, Work};

/// One message as a rank calls it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message<'a> {
    pub(crate) peer: Rank,
    pub(crate) direction: Direction,
    pub(crate) tag: Tag,
    /// What is sent, or where it goes, end to end.
    pub(crate) buffers: &'a [Buffer],
}

impl Message<'_> {
    /// Its bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.bytes()).sum()
    }

    fn channel(&self) -> Channel {
        (self.peer, self.direction)
    }

    fn logged(&self) -> LoggedMessage {
        LoggedMessage { bytes: self.bytes() as u64, tag: self.tag }
    }
}

/// The call in words, as the CPU's engine has it.
impl Display for Message<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&called(self.direction, self.peer, self.logged()))
    }
}

/// What a rank calls: messages that go on together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) messages: &'a [Message<'a>],
    pub(crate) stream: StreamHandle,
    pub(crate) timeout: Duration,
}

/// What a communicator offers to messages on its device.
pub(crate) trait Peers: Presence + Sync {
    /// Notes a message in the flight recorder.
    fn begin(&self, message: &Message<'_>, number: u64) -> Entry;

    /// Tells a rank something, in the background.
    fn tell(&self, peer: Rank, tag: Tag, told: Vec<u8>) -> Result<(), Error>;

    /// Waits for what a rank tells.
    fn hear(&self, peer: Rank, tag: Tag, timeout: Duration) -> Result<Vec<u8>, Error>;
}

/// A communicator's executor of messages on one device.
pub(crate) struct Messages {
    own: Own,
    ends: Arc<dyn Ends>,
    /// What carries messages to other hosts and from there.
    far: Arc<dyn FarPairs>,
    /// Held while something is submitted. The driver's calls queue, they do not wait.
    state: Mutex<Option<State>>,
    /// What is there without that lock.
    links: Mutex<Links>,
    /// By peer and lane, held while ranks wait for each other: why they have not come together, if one of them gave up.
    meetings: Vec<[Mutex<Option<Error>>; LANES]>,
}

struct State {
    rings: RingLane<Pairs>,
    /// What this rank has sent itself and not received, or the other way round.
    unmet: VecDeque<LoggedMessage>,
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
    /// Their places in the call.
    messages: SmallVec<[usize; 2]>,
}

/// Where two ranks wait for each other before messages between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meeting {
    SetUp(Rank),
    Anew(Channel),
}

impl Messages {
    /// Nothing is set up yet.
    pub(crate) fn new(own: Own, ends: Arc<dyn Ends>, far: Arc<dyn FarPairs>) -> Messages {
        let rings = RingLane::on(Pairs::new(own.me, own.size), own.me, own.size);
        let state = Mutex::new(Some(State { rings, unmet: VecDeque::new() }));
        let meetings = (0..own.size).map(|_| Default::default()).collect();
        Messages { own, ends, far, state, links: Mutex::default(), meetings }
    }

    /// The number of its device.
    pub(crate) fn device(&self) -> u32 {
        self.own.device
    }

    /// Puts messages on the caller's stream.
    ///
    /// # Errors
    /// Nothing has been put there after a usage error. After others none of the messages succeeds.
    pub(crate) fn submit(&self, request: &Request<'_>, peers: &dyn Peers) -> Result<Work, Error> {
        let stretches = stretches(request.messages);
        self.check(request, &stretches)?;
        let until = deadline_after(Instant::now(), request.timeout);
        loop {
            let meetings = self.meetings_before(&stretches, request)?;
            if meetings.is_empty() {
                let mut state = lock(&self.state);
                let Some(state) = state.as_mut() else { return Err(self.closed(&request.messages[0])) };
                // Another thread's call may have failed since.
                if let Some(work) = self.submit_to(state, &stretches, request, peers)? {
                    return Ok(work);
                }
            }
            let asked = self.refuse_capture(request)?;
            self.meet(&meetings, &asked, request, until, peers).inspect_err(|error| {
                if let Some(state) = lock(&self.state).as_ref() {
                    self.give_up(state, &stretches, error);
                }
            })?;
        }
    }

    /// Refuses a stream that is being captured, whose capture a setup would spoil. If the driver does not say, the other ranks
    /// are told in the setup.
    fn refuse_capture(&self, request: &Request<'_>) -> Result<Asked, Error> {
        let capture = || -> Result<Capture, CudaError> {
            let context = Context::primary(Device::new(self.own.device)?)?;
            let current = context.enter()?;
            Stream::of_caller(&context, request.stream).capture(&current)
        };
        match capture() {
            Ok(Capture::Active(_) | Capture::Spoilt) => Err(captured(&request.messages[0]).into()),
            asked => Ok(asked.map(|_| ())),
        }
    }

    fn check(&self, request: &Request<'_>, stretches: &[Stretch]) -> Result<(), Error> {
        let Some(long) = stretches.iter().find(|stretch| stretch.messages.len() > SLOTS) else { return Ok(()) };
        Err(UsageError {
            operation: request.messages[long.messages[0]].to_string(),
            argument: "ops",
            expected: format!("at most {SLOTS} messages of a batch to a rank, and as many from it"),
            got: long.messages.len().to_string(),
        }
        .into())
    }

    // ---- where ranks wait for each other ----

    /// The ranks that this rank has to meet before it can submit.
    fn meetings_before(&self, stretches: &[Stretch], request: &Request<'_>) -> Result<Vec<Meeting>, Error> {
        let state = lock(&self.state);
        let Some(state) = state.as_ref() else { return Err(self.closed(&request.messages[0])) };
        let mut meetings = Vec::new();
        let mut add = |meeting| {
            if !meetings.contains(&meeting) {
                meetings.push(meeting);
            }
        };
        for Stretch { channel: channel @ (peer, _), messages } in stretches {
            if state.pairs().by_peer[peer.index()].is_none() {
                add(Meeting::SetUp(*peer));
            } else if let Some(Halt::Mismatch) =
                self.halt(state, *channel, messages.len(), &request.messages[messages[0]])
            {
                // What a rank sends itself it counts at both ends at once.
                add(Meeting::Anew(if *peer == self.own.me { (*peer, Direction::Send) } else { *channel }));
            }
        }
        Ok(meetings)
    }

    /// What is in the way of the next messages of a channel.
    fn halt(&self, state: &State, channel: Channel, count: usize, message: &Message<'_>) -> Option<Halt> {
        let ((peer, direction), number) = (channel, state.pairs().end(channel).number);
        let in_flight = &state.pairs().pair(peer).link.in_flight[lane(self.own.me, peer, direction)];
        in_flight.halt_before(number + 1, number + count as u64, message)
    }

    /// Meets all at once, since ranks may come in any order.
    fn meet(
        &self,
        meetings: &[Meeting],
        asked: &Asked,
        request: &Request<'_>,
        until: Instant,
        peers: &dyn Peers,
    ) -> Result<(), Error> {
        let Some((last, others)) = meetings.split_last() else { return Ok(()) };
        std::thread::scope(|scope| {
            let begin = |meeting: &Meeting| {
                let meeting = *meeting;
                let thread = std::thread::Builder::new().name("ncclx_rs setup".to_owned());
                let run = move || self.meet_one(meeting, asked, request, until, peers);
                thread.spawn_scoped(scope, run).map_err(|cause| self.os("a thread that sets up", &cause))
            };
            let threads: Vec<_> = others.iter().map(begin).collect();
            let own = self.meet_one(*last, asked, request, until, peers);
            let join = |thread: Result<std::thread::ScopedJoinHandle<'_, _>, Error>| {
                thread?.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            // All come to an end before one's error is told.
            let ends: Vec<Result<(), Error>> = threads.into_iter().map(join).collect();
            ends.into_iter().chain([own]).collect()
        })
    }

    fn meet_one(
        &self,
        meeting: Meeting,
        asked: &Asked,
        request: &Request<'_>,
        until: Instant,
        peers: &dyn Peers,
    ) -> Result<(), Error> {
        let (Meeting::SetUp(peer) | Meeting::Anew((peer, _))) = meeting;
        let message = request.messages.iter().find(|message| message.peer == peer).expect("it has one");
        match meeting {
            Meeting::SetUp(peer) => self.set_up(peer, asked, message, until, peers),
            Meeting::Anew(channel) => self.begin_anew(channel, message, until, peers),
        }
    }

    /// Sets a pair up with its other rank, if nobody has.
    fn set_up(
        &self,
        peer: Rank,
        asked: &Asked,
        message: &Message<'_>,
        until: Instant,
        peers: &dyn Peers,
    ) -> Result<(), Error> {
        let mut gave_up = lock(&self.meetings[peer.index()][0]);
        if let Some(error) = &*gave_up {
            return Err(in_flight::named(error.clone(), message));
        }
        if lock(&self.state).as_ref().is_none_or(|state| state.pairs().by_peer[peer.index()].is_some()) {
            return Ok(());
        }
        let (me, begin) = (self.own.me, Instant::now());
        let mut silence = None;
        let mut all_gather = |own: Vec<u8>| -> Result<Vec<Vec<u8>>, Error> {
            if peer == me {
                return Ok(vec![own]);
            }
            let heard = peers.tell(peer, Tag::PAIR, own.clone()).and_then(|()| {
                let left = until.saturating_duration_since(Instant::now());
                peers.hear(peer, Tag::PAIR, left)
            });
            let theirs = heard.map_err(|error| {
                let detail = format!(
                    "rank {peer} has not called its first message with rank {me} on a device, at which both set up what they share"
                );
                let error = late(error, message, begin.elapsed(), detail);
                silence = Some(error.clone());
                error
            })?;
            Ok(if me < peer { vec![own, theirs] } else { vec![theirs, own] })
        };
        let made = watch::begin().map_err(|cause| self.os("the threads that watch devices", &cause)).and_then(|()| {
            let are_there = || peers.are_there();
            Pair::set_up(&self.own, peer, asked, until, (&self.ends, &*self.far), &mut all_gather, &are_there)
        });
        if let Some(error) = silence {
            // The other rank finds this in place of what it waits for, if it comes later. So neither waits for ever.
            let told = Failure::new("the setup with another rank", &error).told();
            if let Err(error) = peers.tell(peer, Tag::PAIR, told) {
                log::debug!("rank {peer} is not told that a setup has ended: {error}");
            }
            *gave_up = Some(error);
        }
        let pair = made?;
        {
            let mut links = lock(&self.links);
            if let Some(error) = &links.left {
                pair.link.in_flight.iter().for_each(|in_flight| in_flight.leave(error.clone()));
            }
            links.all.push(pair.link.clone());
        }
        match lock(&self.state).as_mut() {
            Some(state) => state.rings.memory_mut().by_peer[peer.index()] = Some(pair),
            None => return Err(self.closed(message)),
        }
        Ok(())
    }

    /// After a disagreement: waits until no stream of the two ranks has messages of this direction any more, and counts them from
    /// the beginning.
    fn begin_anew(
        &self,
        channel: Channel,
        message: &Message<'_>,
        until: Instant,
        peers: &dyn Peers,
    ) -> Result<(), Error> {
        let ((peer, direction), me) = (channel, self.own.me);
        let number = lane(me, peer, direction);
        let _meeting = lock(&self.meetings[peer.index()][number]);
        let (link, halt) = {
            let state = lock(&self.state);
            let Some(state) = state.as_ref() else { return Err(self.closed(message)) };
            (state.pairs().pair(peer).link.clone(), self.halt(state, channel, 1, message))
        };
        // Another thread may have been faster.
        if !matches!(halt, Some(Halt::Mismatch)) {
            return Ok(());
        }
        let both = [Direction::Send, Direction::Receive];
        let ways = if peer == me { &both[..] } else { std::slice::from_ref(&direction) };
        let begin = Instant::now();
        let anew = || -> Result<(), Error> {
            for way in ways {
                let in_flight = &link.in_flight[lane(me, peer, *way)];
                if peer == me {
                    let (operation, detail) = (message.to_string(), "an earlier batch has failed".to_owned());
                    in_flight.fail_too(1, &Error::Mismatch { operation, detail });
                }
                in_flight.wait_for(u64::MAX, until.saturating_duration_since(begin)).map_err(|waited| {
                    let detail = "earlier messages are still in flight on the device".to_owned();
                    Error::Timeout { operation: message.to_string(), waited, detail }
                })?;
            }
            self.barrier(peer, number, message, until, peers)?;
            if let Some(state) = lock(&self.state).as_mut() {
                for way in ways {
                    link.control.reset(lane(me, peer, *way));
                    if state.pairs().pair(peer).is_far() {
                        self.far.reset(peer, lane(me, peer, *way));
                    }
                    state.rings.reset_ring(peer, *way);
                    state.rings.memory_mut().end_mut((peer, *way)).number = 0;
                }
                if peer == me {
                    state.unmet.clear();
                }
            }
            self.barrier(peer, number, message, until, peers)?;
            // Only now do other threads of this rank go on with it.
            ways.iter().for_each(|way| link.in_flight[lane(me, peer, *way)].resume(0));
            Ok(())
        };
        anew().inspect_err(|error| ways.iter().for_each(|way| link.in_flight[lane(me, peer, *way)].stop(error)))
    }

    /// Waits until both ranks are there.
    fn barrier(
        &self,
        peer: Rank,
        lane: usize,
        message: &Message<'_>,
        until: Instant,
        peers: &dyn Peers,
    ) -> Result<(), Error> {
        if peer == self.own.me {
            return Ok(());
        }
        let (tag, begin) = (Tag::ANEW[lane], Instant::now());
        peers.tell(peer, tag, Vec::new())?;
        let heard = peers.hear(peer, tag, until.saturating_duration_since(begin));
        heard.map(|_| ()).map_err(|error| {
            let detail = format!("rank {peer} has not come to begin anew after a disagreement");
            late(error, message, begin.elapsed(), detail)
        })
    }

    // ---- submission ----

    /// Puts messages on the stream; nothing if this rank has to meet another one first.
    fn submit_to(
        &self,
        state: &mut State,
        stretches: &[Stretch],
        request: &Request<'_>,
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
        // Whatever the driver refuses here, the other ranks will have called it.
        let broken = |error: &CudaError| Error::Device { operation: first.to_string(), cause: error.to_string() };
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
        if capture != Capture::Off {
            return Err(captured(first).into());
        }
        let unmet = self.unmet_after(state, request)?;
        let messages: Vec<rounds::Message> = request.messages.iter().enumerate().map(plain).collect();
        let rounds = state.rings.plan(&messages).map_err(|error| self.refused(first, &error))?;
        for stretch in stretches {
            self.make_room(state, stretch, request)?;
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
            batch.fail(&error);
            state.end(&current, &stream, stretches);
            return Err(error);
        }
        Ok(Some(batch.work().clone()))
    }

    /// Has messages to other hosts and from there carried.
    fn carry(&self, state: &State, stretches: &[Stretch], batch: &Batch, request: &Request<'_>) -> std::io::Result<()> {
        for (Stretch { channel, messages }, place) in stretches.iter().zip(batch.places()) {
            if state.pairs().pair(channel.0).is_far() {
                let logged: Vec<LoggedMessage> = messages.iter().map(|at| request.messages[*at].logged()).collect();
                self.far.submit(*channel, place.first, &logged)?;
            }
        }
        Ok(())
    }

    /// What this rank has sent itself and not received once these messages are submitted.
    fn unmet_after(&self, state: &State, request: &Request<'_>) -> Result<VecDeque<LoggedMessage>, Error> {
        let own = |direction| {
            let own = request.messages.iter().filter(move |message| message.channel() == (self.own.me, direction));
            own.map(Message::logged)
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

    /// Waits until the log has room for messages: as a driver's queue that is full.
    fn make_room(&self, state: &State, stretch: &Stretch, request: &Request<'_>) -> Result<(), Error> {
        let (peer, direction) = stretch.channel;
        let (lane, link) = (lane(self.own.me, peer, direction), &state.pairs().pair(peer).link);
        let last = state.pairs().end(stretch.channel).number + stretch.messages.len() as u64;
        let Some(earlier) = last.checked_sub(SLOTS as u64).filter(|earlier| *earlier > 0) else { return Ok(()) };
        let begin = Instant::now();
        let waited_for = link.in_flight[lane].wait_for(earlier, request.timeout);
        let is_in_time = waited_for.is_ok() && {
            // The other rank reads the log as it calls, and looks at nothing of ours while it waits.
            while !link.control.has_room_for_message(lane, last) && begin.elapsed() < request.timeout {
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

    /// Tells the other ranks of the messages, and compares them with what those have called.
    fn enter(
        &self,
        state: &mut State,
        stretches: &[Stretch],
        request: &Request<'_>,
        rounds: &Rounds,
        peers: &dyn Peers,
    ) -> Result<Arc<Batch>, Error> {
        let me = self.own.me;
        let mut numbers = vec![0; request.messages.len()];
        let mut places = Vec::new();
        for Stretch { channel: channel @ (peer, direction), messages } in stretches {
            let first = state.pairs().end(*channel).number + 1;
            messages.iter().zip(first..).for_each(|(message, number)| numbers[*message] = number);
            let in_flight = state.pairs().pair(*peer).link.in_flight[lane(me, *peer, *direction)].clone();
            let awaits = state.rings.awaits_after(rounds, *peer, *direction);
            let awaits = awaits.map(|(word, value)| state.pairs().awaited(word, value)).into_iter().collect();
            let last = first + messages.len() as u64 - 1;
            places.push(Place { in_flight, peer: *peer, first, last, awaits });
        }
        let drive: Arc<dyn Drive> = match &places[..] {
            [one] => one.in_flight.clone(),
            several => {
                let all = several.iter().map(|place| place.in_flight.clone()).collect();
                Arc::new(Several::new(self.own.comm.clone(), all))
            }
        };
        let work = |(message, number): (&Message<'_>, &u64)| Work::new(drive.clone(), peers.begin(message, *number));
        let works: Vec<Work> = request.messages.iter().zip(&numbers).map(work).collect();
        for Stretch { channel: (peer, direction), messages } in
            stretches.iter().filter(|stretch| stretch.channel.0 != me)
        {
            let (lane, control) = (lane(me, *peer, *direction), &state.pairs().pair(*peer).link.control);
            for message in messages {
                let (number, logged) = (numbers[*message], request.messages[*message].logged());
                let Err(theirs) = control.enter_message(lane, number, logged) else { continue };
                let operation = request.messages[*message].to_string();
                let detail = disagreement(number, (me, *direction, logged), (*peer, theirs));
                let error = Error::Mismatch { operation, detail };
                self.give_up(state, stretches, &error);
                works.iter().for_each(|work| self.ends.ended(work, Err(error.clone())));
                return Err(error);
            }
        }
        let batch = Batch::new(works, places.len());
        batch.place(places);
        Ok(batch)
    }

    /// Counts messages among those in flight, before anything of them is on the stream.
    fn take_off(&self, state: &mut State, stretch: &Stretch, place: &Place, batch: &Arc<Batch>, request: &Request<'_>) {
        let ((peer, direction), me) = (stretch.channel, self.own.me);
        let message = &request.messages[stretch.messages[0]];
        let text = match request.messages.len() {
            1 => message.to_string(),
            count => format!("{message} in a batch of {count} messages"),
        };
        let way = match direction {
            Direction::Send => (me, peer),
            Direction::Receive => (peer, me),
        };
        let part = Part::new(text, place.first, way, peer, batch.clone());
        let end = state.rings.memory_mut().end_mut(stretch.channel);
        end.number += stretch.messages.len() as u64;
        if place.in_flight.begin(end.number, part, batch.work().clone(), request.timeout) {
            watch::watch(place.in_flight.clone());
        }
    }

    /// Tells all ranks of these messages that they have failed, but those with which nothing is set up.
    fn give_up(&self, state: &State, stretches: &[Stretch], error: &Error) {
        for Stretch { channel: channel @ (peer, direction), .. } in stretches {
            if let Some(pair) = &state.pairs().by_peer[peer.index()] {
                let first = state.pairs().end(*channel).number + 1;
                pair.link.in_flight[lane(self.own.me, *peer, *direction)].fail_too(first, error);
            }
        }
    }

    // ---- the end ----

    /// Waits until nothing is in flight, for `limit` at most.
    pub(crate) fn drain(&self, limit: Duration) {
        let until = deadline_after(Instant::now(), limit);
        for link in self.links().all.clone() {
            for in_flight in &link.in_flight {
                // What is left then is given up.
                let _ = in_flight.wait_for(u64::MAX, until.saturating_duration_since(Instant::now()));
            }
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

    /// Has memory given back once the device does not use it any more. To be called when this rank has left.
    pub(crate) fn close(&self) {
        let Some(state) = lock(&self.state).take() else { return };
        let in_flight = |link: &Arc<Link>| link.in_flight.clone();
        let in_flight = self.links().all.iter().flat_map(in_flight).map(|lane| lane as Arc<dyn Watched>).collect();
        watch::reap_all(in_flight, Box::new(state));
    }

    fn links(&self) -> MutexGuard<'_, Links> {
        lock(&self.links)
    }

    // ---- errors ----

    fn refused(&self, message: &Message<'_>, cause: &impl Display) -> Error {
        let Own { comm, device, .. } = &self.own;
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

    /// Puts all of a batch on the stream.
    fn put(
        &mut self,
        current: &Current<'_>,
        stream: &Stream,
        stretches: &[Stretch],
        rounds: &Rounds,
        request: &Request<'_>,
        batch: &Batch,
    ) -> Result<(), CudaError> {
        let raw = stream.to_raw();
        // Messages of one channel come one after the other, whatever their streams.
        for Stretch { channel, .. } in stretches {
            let end = self.pairs().end(*channel);
            if end.last.is_some_and(|last| last != raw) {
                stream.wait(current, &end.end)?;
            }
        }
        let tensors: Vec<SmallVec<[DeviceBytes<'_>; 2]>> = request
            .messages
            .iter()
            .map(|message| message.buffers.iter().filter_map(Buffer::device_bytes).collect())
            .collect();
        let tensors: Vec<&[DeviceBytes<'_>]> = tensors.iter().map(|tensor| &tensor[..]).collect();
        let [starts, ends] = self.edges(stretches);
        let put = self.rings.put(current, stream, rounds, &tensors, &starts, &ends);
        // Also if not all of it is on the stream: what is may wait for words.
        for Place { in_flight, awaits, .. } in batch.places() {
            for (lane, word, value) in awaits {
                in_flight.submitted(*lane, [(*word, *value)].into_iter());
            }
        }
        put?;
        for Stretch { channel, .. } in stretches {
            let end = self.rings.memory_mut().end_mut(*channel);
            end.end.record(current, stream)?;
            end.last = Some(raw);
        }
        Ok(())
    }

    /// Puts only the end of messages on the stream, of which a part is missing there: it says when the stream has run out.
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

/// The messages of a call by where they go or come from.
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
    rounds::Message { peer, direction, part: rounds::Part { tensor, offset: 0, len: message.bytes() } }
}

/// The error of a rank that another one has not met, with what is known of it.
fn late(error: Error, message: &Message<'_>, waited: Duration, detail: String) -> Error {
    match error {
        Error::Timeout { .. } => Error::Timeout { operation: message.to_string(), waited, detail },
        other => in_flight::named(other, message),
    }
}

fn captured(message: &Message<'_>) -> UsageError {
    UsageError {
        operation: message.to_string(),
        argument: "stream",
        expected: "a stream whose operations run".to_owned(),
        got: "one that is being captured in a graph, in which messages do not take part yet".to_owned(),
    }
}
