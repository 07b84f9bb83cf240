//! Where two ranks wait for each other before messages between them: to set up what they share, and to begin anew after a
//! disagreement.

use std::time::{Duration, Instant};

use super::{BatchRequest, Message, Messages, Peers, State, Stretch};
use crate::device::graph_rings::GraphRings;
use crate::device::in_flight::{self, Halt};
use crate::device::pairs::{Asked, Channel, Pair, lane};
use crate::device::rounds::Direction;
use crate::device::setup::SetupFailure;
use crate::device::watch;
use crate::error::Error;
use crate::sync::lock;
use crate::sys::cuda::{CudaError, Relaxed};
use crate::types::{Rank, Tag};

/// Why this rank waits for another one before a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meeting {
    SetUp(Rank, Shared),
    Anew(Channel),
}

/// What two ranks set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shared {
    Pair,
    /// The rings for messages in graphs.
    Rings,
}

impl Messages {
    /// The ranks that this rank has to meet before it can submit, outside of graphs or in one.
    pub(super) fn meetings_before(
        &self,
        stretches: &[Stretch],
        request: &BatchRequest<'_>,
        in_graph: bool,
    ) -> Result<Vec<Meeting>, Error> {
        let state = lock(&self.state);
        let Some(state) = state.as_ref() else { return Err(self.closed(&request.messages[0])) };
        let mut meetings = Vec::new();
        let mut add = |meeting| {
            if !meetings.contains(&meeting) {
                meetings.push(meeting);
            }
        };
        for Stretch { channel: channel @ (peer, _), messages } in stretches {
            let Some(pair) = &state.pairs().by_peer[peer.index()] else {
                add(Meeting::SetUp(*peer, Shared::Pair));
                continue;
            };
            let is_carried = *peer == self.own.me || state.pairs().library(*channel).is_some();
            let has_rings = state.graph_rings[peer.index()].is_some() || is_carried || pair.is_far();
            if in_graph && !has_rings {
                add(Meeting::SetUp(*peer, Shared::Rings));
            } else if let Some(Halt::Mismatch) =
                self.halt(state, *channel, messages.len(), &request.messages[messages[0]])
            {
                // A rank that sends itself messages resets both directions at once.
                add(Meeting::Anew(if *peer == self.own.me { (*peer, Direction::Send) } else { *channel }));
            }
        }
        Ok(meetings)
    }

    /// What is in the way of the next messages of a channel.
    pub(super) fn halt(&self, state: &State, channel: Channel, count: usize, message: &Message<'_>) -> Option<Halt> {
        let number = state.pairs().end(channel).number;
        state.pairs().in_flight(channel).halt_before(number + 1, number + count as u64, message)
    }

    /// Meets all at once, since ranks may come in any order.
    pub(super) fn meet(
        &self,
        meetings: &[Meeting],
        asked: &Asked,
        request: &BatchRequest<'_>,
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
            // All meetings end before the error of one is returned.
            let ends: Vec<Result<(), Error>> = threads.into_iter().map(join).collect();
            ends.into_iter().chain([own]).collect()
        })
    }

    fn meet_one(
        &self,
        meeting: Meeting,
        asked: &Asked,
        request: &BatchRequest<'_>,
        until: Instant,
        peers: &dyn Peers,
    ) -> Result<(), Error> {
        let (Meeting::SetUp(peer, _) | Meeting::Anew((peer, _))) = meeting;
        let message = request.messages.iter().find(|message| message.peer == peer).expect("it has one");
        // Without this, the setup's allocations spoil the capture, this thread's or another one's.
        let relaxed = Relaxed::enter();
        let asked = asked.clone().and(relaxed.as_ref().map(|_| ()).map_err(Clone::clone));
        match meeting {
            Meeting::SetUp(peer, shared) => self.set_up(peer, shared, &asked, message, until, peers),
            Meeting::Anew(channel) => self.begin_anew(channel, message, until, peers),
        }
    }

    /// Sets up `shared` with a peer, unless another thread has.
    fn set_up(
        &self,
        peer: Rank,
        shared: Shared,
        asked: &Asked,
        message: &Message<'_>,
        until: Instant,
        peers: &dyn Peers,
    ) -> Result<(), Error> {
        let mut gave_up = lock(&self.meetings[peer.index()][0]);
        if let Some(error) = &*gave_up {
            return Err(in_flight::named(error.clone(), message));
        }
        let is_there = |state: &State| match shared {
            Shared::Pair => state.pairs().by_peer[peer.index()].is_some(),
            Shared::Rings => state.graph_rings[peer.index()].is_some(),
        };
        if lock(&self.state).as_ref().is_none_or(is_there) {
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
                let what = match shared {
                    Shared::Pair => format!("called its first message with rank {me} on a device"),
                    Shared::Rings => format!("called its first message with rank {me} in the capture of a graph"),
                };
                let detail = format!("rank {peer} has not {what}, at which both set up what they share");
                let error = late(error, message, begin.elapsed(), detail);
                silence = Some(error.clone());
                error
            })?;
            Ok(if me < peer { vec![own, theirs] } else { vec![theirs, own] })
        };
        let are_there = || peers.are_there();
        let made =
            watch::begin().map_err(|cause| self.os("the threads that watch devices", &cause)).and_then(
                |()| match shared {
                    Shared::Pair => {
                        let (own, ends) = (&self.own, (&self.ends, &*self.far));
                        let pair = Pair::set_up(own, peer, asked, until, ends, &mut all_gather, &are_there);
                        pair.map(|pair| (Some(pair), None))
                    }
                    Shared::Rings => {
                        let names = if me < peer { [me, peer] } else { [peer, me] };
                        let rings = GraphRings::set_up(&self.own, names, until, &mut all_gather, &are_there);
                        rings.map(|rings| (None, Some(rings)))
                    }
                },
            );
        if let Some(error) = silence {
            // If the other rank comes later, it finds this in place of the setup, and does not wait for ever.
            let told = SetupFailure::new("the setup with another rank", &error).told();
            if let Err(error) = peers.tell(peer, Tag::PAIR, told) {
                log::debug!("rank {peer} is not told that a setup has ended: {error}");
            }
            *gave_up = Some(error);
        }
        let (pair, rings) = made?;
        if let Some(pair) = &pair {
            let mut links = lock(&self.links);
            if let Some(error) = &links.left {
                pair.link.in_flight.iter().for_each(|in_flight| in_flight.leave(error.clone()));
            }
            links.all.push(pair.link.clone());
        }
        let mut state = lock(&self.state);
        let state = state.as_mut().ok_or_else(|| self.closed(message))?;
        if pair.is_some() {
            state.rings.memory_mut().by_peer[peer.index()] = pair;
        }
        if rings.is_some() {
            state.graph_rings[peer.index()] = rings;
        }
        Ok(())
    }

    /// After a disagreement: waits until no stream of the two ranks has messages of this direction, and restarts the count.
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
            let mut is_touched = false;
            if let Some(state) = lock(&self.state).as_mut() {
                for way in ways {
                    let by_library = state.pairs().end((peer, *way)).by_library;
                    let failed_from = link.in_flight[lane(me, peer, *way)].failed_from();
                    is_touched |= by_library > 0 && failed_from.is_none_or(|from| by_library >= from);
                    state.rings.memory_mut().end_mut((peer, *way)).by_library = 0;
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
            self.begin_library_anew(channel, is_touched, message, until, peers)?;
            self.barrier(peer, number, message, until, peers)?;
            // Only now may other threads of this rank use the lane.
            ways.iter().for_each(|way| link.in_flight[lane(me, peer, *way)].resume(0));
            Ok(())
        };
        anew().inspect_err(|error| ways.iter().for_each(|way| link.in_flight[lane(me, peer, *way)].stop(error)))
    }

    /// Begins another communicator of the library, if one carries these messages, and it may have been used otherwise at one end
    /// than at the other. Nothing of the old one is on any stream.
    fn begin_library_anew(
        &self,
        (peer, direction): Channel,
        is_touched: bool,
        message: &Message<'_>,
        until: Instant,
        peers: &dyn Peers,
    ) -> Result<(), Error> {
        let (library, context) = {
            let state = lock(&self.state);
            let Some(state) = state.as_ref() else { return Err(self.closed(message)) };
            let Some(library) = state.pairs().library((peer, direction)) else { return Ok(()) };
            (library.comm.clone(), state.pairs().pair(peer).context.clone())
        };
        let (me, tag) = (self.own.me, Tag::ANEW[lane(self.own.me, peer, direction)]);
        let failed = |error: CudaError| Error::Device { operation: message.to_string(), cause: error.to_string() };
        let current = context.enter().map_err(failed)?;
        let mut all_gather = |own: Vec<u8>| {
            peers.tell(peer, tag, own.clone())?;
            let theirs = peers.hear(peer, tag, until.saturating_duration_since(Instant::now()))?;
            Ok(if me < peer { vec![own, theirs] } else { vec![theirs, own] })
        };
        let timeout = until.saturating_duration_since(Instant::now());
        library.begin_anew(&current, is_touched, timeout, &mut all_gather, &|| peers.are_there())
    }

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
}

/// The error of a meeting to which the other rank has not come. `detail` is for a timeout.
fn late(error: Error, message: &Message<'_>, waited: Duration, detail: String) -> Error {
    match error {
        Error::Timeout { .. } => Error::Timeout { operation: message.to_string(), waited, detail },
        other => in_flight::named(other, message),
    }
}
