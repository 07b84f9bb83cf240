//! Messages whose stream is being captured in a graph.

use super::{BatchRequest, Messages, Peers, State, Stretch, calls_of, plain, put_by_library};
use crate::device::counters::Word;
use crate::device::graph_rings::InGraphs;
use crate::device::graph_waits::GraphWait;
use crate::device::lane::flush;
use crate::device::pairs::{Channel, Library, Pairs, lane};
use crate::device::ring_lane::RingLane;
use crate::device::rounds::{self, Direction, Flow, Rounds};
use crate::device::tokens::Tokens;
use crate::device::vendor::{Patience, SubmitError};
use crate::error::{Error, UsageError};
use crate::sys::cuda::{Batch, CudaError, Current, DeviceBytes, Relaxed, Stream, Width};
use crate::work::Work;

/// Where messages are captured: the stream, and the capture's number.
type Place<'a> = (&'a Current<'a>, &'a Stream, u64);

impl Messages {
    /// Puts messages into a capture. `None`: this rank has to meet another one first. The other ranks call their ends in
    /// captures of their own.
    ///
    /// # Errors
    /// Nothing is in the capture, unless the driver has refused a call.
    pub(super) fn capture(
        &self,
        state: &mut State,
        place: Place<'_>,
        stretches: &[Stretch],
        request: &BatchRequest<'_>,
        peers: &dyn Peers,
    ) -> Result<Option<Work>, Error> {
        let (me, first) = (self.own.me, &request.messages[0]);
        for (peer, _) in stretches.iter().map(|stretch| stretch.channel).filter(|(peer, _)| *peer != me) {
            if state.pairs().pair(peer).is_far() {
                return Err(between_hosts(first.to_string()).into());
            }
        }
        let is_carried = |channel: Channel| state.pairs().library(channel).is_some();
        let has_rings =
            |channel: Channel| channel.0 == me || is_carried(channel) || state.graph_rings[channel.0.index()].is_some();
        self.check_pieces(state, request)?;
        self.check_connected(state, stretches, request, peers)?;
        if !stretches.iter().all(|stretch| has_rings(stretch.channel)) {
            // A rank that called this outside of a capture will not come to set up rings.
            if stretches.iter().any(|stretch| self.is_eager_elsewhere(state, stretch)) {
                self.announce(state, stretches, request, true, peers)?;
            }
            return Ok(None);
        }
        let messages = request.messages.iter().enumerate();
        let messages: Vec<rounds::Message> =
            messages.filter(|(_, message)| !is_carried(message.channel())).map(plain).collect();
        let rounds = state.graph_lane(self).plan(&messages).map_err(|error| self.refused(first, &error))?;
        if rounds.flows.iter().any(|flow| flow.peer == me) {
            return Err(
                self.refused(first, &"what this rank sends itself in a graph, it must receive in the same batch")
            );
        }
        for stretch in stretches {
            self.make_room(state, stretch, request)?;
        }
        // Without this, calls that allocate spoil the capture.
        let relaxed = Relaxed::enter().map_err(|error| self.refused(first, &error))?;
        let works = self.announce(state, stretches, request, true, peers)?;
        for Stretch { channel, messages } in stretches {
            let end = state.rings.memory_mut().end_mut(*channel);
            let number = end.number + 1;
            end.number += messages.len() as u64;
            let last = end.number;
            state.pairs().in_flight(*channel).pass(number, last);
        }
        let put = self.put_in_graph(state, place, stretches, &rounds, request).map_err(|error| {
            let error = Error::Device { operation: first.to_string(), cause: error.to_string() };
            self.give_up(state, stretches, &error);
            error
        });
        drop(relaxed);
        // The caller's works end here, since nobody is told of replays.
        works.iter().for_each(|work| self.ends.ended(work, put.clone()));
        put.map(|()| works.into_iter().next())
    }

    /// Refuses the first message in a direction where a library carries it.
    fn check_connected(
        &self,
        state: &State,
        stretches: &[Stretch],
        request: &BatchRequest<'_>,
        peers: &dyn Peers,
    ) -> Result<(), Error> {
        let tensors = request.tensors();
        let tensors: Vec<&[DeviceBytes<'_>]> = tensors.iter().map(|tensor| &tensor[..]).collect();
        let is_new = |stretch: &&Stretch| {
            let carried = calls_of(state.pairs(), stretch, &tensors);
            carried.is_some_and(|(library, calls)| library.comm.unconnected(&calls).is_some())
        };
        let Some(new) = stretches.iter().find(is_new) else { return Ok(()) };
        // A rank that called this outside of a capture waits for this one.
        if self.is_eager_elsewhere(state, new) {
            self.announce(state, stretches, request, true, peers)?;
        }
        let library = state.pairs().library(new.channel).expect("it carries it").comm.library();
        let (message, peer) = (&request.messages[new.messages[0]], new.channel.0);
        let cause = format!(
            "{library} connects two ranks at their first message in a direction, which a capture may not allow, and this is the \
             first one with rank {peer}: exchange one before the capture"
        );
        Err(self.refused(message, &cause))
    }

    fn put_in_graph(
        &self,
        state: &mut State,
        (current, stream, id): Place<'_>,
        stretches: &[Stretch],
        rounds: &Rounds,
        request: &BatchRequest<'_>,
    ) -> Result<(), SubmitError> {
        let me = self.own.me;
        let operations = [(); 2].map(|()| state.numbers.next());
        let recording = state.recordings.of(&self.own.comm, id, current, stream)?;
        let pairs = state.rings.memory();
        let memory = InGraphs { pairs, rings: &state.graph_rings };
        let mut rings = RingLane::on(memory, me, self.own.size);
        // Before the graph can run: the watch looks for them.
        for flow in &rounds.flows {
            recording.waits().keep_for(flow.peer.index(), || memory.rings(flow.peer).clone());
            let stretch = stretches.iter().find(|stretch| stretch.channel == (flow.peer, flow.direction));
            let call = request.text(stretch.expect("it has messages"));
            let count = rings.awaits_after(rounds, flow.peer, flow.direction);
            for wait in self.waits(memory, flow, count, operations, &call, request) {
                recording.waits().note(wait);
            }
        }
        let carried: Vec<&Stretch> =
            stretches.iter().filter(|stretch| pairs.library(stretch.channel).is_some()).collect();
        for stretch in &carried {
            // Beside what is kept of rings.
            let (peer, _) = stretch.channel;
            recording.waits().keep_for(self.own.size + peer.index(), || pairs.pair(peer).registered());
            let wait = self.wait_for_library(pairs, stretch, operations[1], request);
            recording.waits().holds(wait.library.as_ref().expect("it is of one"));
            recording.waits().note(wait);
        }
        let tell = |batch: &mut Batch<'_>, operation: u64| -> Result<(), CudaError> {
            for (peer, direction) in carried.iter().map(|stretch| stretch.channel) {
                // As in `memory.tell`, which has the rings' words.
                let mut words = Batch::new(pairs.pair(peer).width());
                pairs.pair(peer).tell(&mut words, lane(me, peer, direction), operation);
                flush(current, stream, &mut words)?;
            }
            flush(current, stream, batch)
        };
        for stretch in stretches {
            recording.follow(stretch.channel, current, stream)?;
        }
        let tokens = Tokens::of_rounds(me, self.own.size, rounds);
        let mut batch = Batch::new(Width::default());
        memory.tell(&mut batch, me, rounds, operations[0]);
        tokens.waits().for_each(|step| memory.add(&mut batch, step));
        memory.tell(&mut batch, me, rounds, operations[1]);
        tokens.takes().for_each(|step| memory.add(&mut batch, step));
        tell(&mut batch, operations[1])?;
        let tensors = request.tensors();
        let tensors: Vec<&[DeviceBytes<'_>]> = tensors.iter().map(|tensor| &tensor[..]).collect();
        let context = &pairs.pair(stretches[0].channel.0).context;
        let branch = |channel, _: &Library| recording.branch(channel, context);
        let patience = Patience::Limit(request.timeout);
        let put = put_by_library(pairs, (current, stream), stretches, &tensors, branch, patience)
            .and_then(|()| Ok(rings.put(current, stream, rounds, &tensors, &[], &[])?));
        // From here on the stream waits for nothing. These steps follow even if `put` has failed: a part of it may be in the
        // graph.
        memory.tell(&mut batch, me, rounds, 0);
        tokens.returns().for_each(|step| memory.add(&mut batch, step));
        put.and(tell(&mut batch, 0).map_err(SubmitError::from))?;
        for stretch in stretches {
            recording.ended(stretch.channel, context, current, stream)?;
        }
        Ok(())
    }

    /// The calls of a library in a graph, as the watch sees them.
    fn wait_for_library(
        &self,
        pairs: &Pairs,
        stretch: &Stretch,
        operation: u64,
        request: &BatchRequest<'_>,
    ) -> GraphWait {
        let (channel @ (peer, direction), pair) = (stretch.channel, pairs.pair(stretch.channel.0));
        let (words, busy) = pair.busy(lane(self.own.me, peer, direction));
        GraphWait {
            operation,
            call: request.text(stretch),
            limit: request.timeout,
            words: words.clone(),
            width: pair.width(),
            busy,
            awaits: Vec::new(),
            peer,
            missing: match direction {
                Direction::Send => "did not receive",
                Direction::Receive => "did not send",
            },
            library: pairs.library(channel).map(|library| library.comm.clone()),
            home: pairs.in_flight(channel).clone(),
        }
    }

    /// Whether the other rank has called the next message, and not in a capture.
    fn is_eager_elsewhere(&self, state: &State, stretch: &Stretch) -> bool {
        let (me, channel @ (peer, direction)) = (self.own.me, stretch.channel);
        let (control, next) = (&state.pairs().pair(peer).link.control, state.pairs().end(channel).number + 1);
        let theirs = control.message_of_other(lane(me, peer, direction), next);
        theirs.is_some_and(|message| message.captured.is_none())
    }

    /// What the stream waits for in a ring: the token if it sends, and then the last of its counts.
    fn waits(
        &self,
        memory: InGraphs<'_>,
        flow: &Flow,
        count: Option<(Word, u64)>,
        [first, second]: [u64; 2],
        call: &str,
        request: &BatchRequest<'_>,
    ) -> Vec<GraphWait> {
        let (me, peer, rings) = (self.own.me, flow.peer, memory.rings(flow.peer));
        let (words, width) = rings.words();
        let wait = |operation, word, value, missing| GraphWait {
            operation,
            call: call.to_owned(),
            limit: request.timeout,
            words: words.clone(),
            width,
            busy: rings.busy(lane(me, peer, flow.direction)),
            awaits: vec![(word, value)],
            peer,
            missing,
            library: None,
            home: memory.pairs.in_flight((peer, flow.direction)).clone(),
        };
        let token = (flow.direction == Direction::Send).then(|| {
            let tail = Word::Tail { sender: me, receiver: peer };
            wait(first, rings.token(memory.local(tail).1), 1, "has not received what was sent before")
        });
        let missing = match flow.direction {
            Direction::Send => "did not receive",
            Direction::Receive => "did not send",
        };
        let count = count.filter(|(_, value)| *value > 0);
        let count = count.map(|(word, value)| wait(second, rings.count(memory.local(word).1), value, missing));
        token.into_iter().chain(count).collect()
    }
}

impl State {
    /// The rings of an operation in a graph, which counts from zero.
    fn graph_lane(&self, messages: &Messages) -> RingLane<InGraphs<'_>> {
        let memory = InGraphs { pairs: self.rings.memory(), rings: &self.graph_rings };
        RingLane::on(memory, messages.own.me, messages.own.size)
    }
}

fn between_hosts(operation: String) -> UsageError {
    UsageError {
        operation,
        argument: "group",
        expected: "ranks on one host, as messages in CUDA graphs need".to_owned(),
        got: "ranks on several hosts".to_owned(),
    }
}
