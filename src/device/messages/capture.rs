//! Messages whose stream is being captured in a graph.

use super::{BatchRequest, Messages, Peers, State, Stretch, plain};
use crate::device::counters::Word;
use crate::device::graph_rings::InGraphs;
use crate::device::graph_waits::GraphWait;
use crate::device::lane::flush;
use crate::device::pairs::{Channel, lane};
use crate::device::ring_lane::RingLane;
use crate::device::rounds::{self, Direction, Flow, Rounds};
use crate::device::tokens::Tokens;
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
        let has_rings = |(peer, _): Channel| peer == me || state.graph_rings[peer.index()].is_some();
        if !stretches.iter().all(|stretch| has_rings(stretch.channel)) {
            // A rank that called this outside of a capture will not come to set up rings.
            if stretches.iter().any(|stretch| self.is_eager_elsewhere(state, stretch)) {
                self.announce(state, stretches, request, true, peers)?;
            }
            return Ok(None);
        }
        let messages: Vec<rounds::Message> = request.messages.iter().enumerate().map(plain).collect();
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

    fn put_in_graph(
        &self,
        state: &mut State,
        (current, stream, id): Place<'_>,
        stretches: &[Stretch],
        rounds: &Rounds,
        request: &BatchRequest<'_>,
    ) -> Result<(), CudaError> {
        let me = self.own.me;
        let operations = [(); 2].map(|()| state.numbers.next());
        let recording = state.recordings.of(&self.own.comm, id, current, stream)?;
        let memory = InGraphs { pairs: state.rings.memory(), rings: &state.graph_rings };
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
        for stretch in stretches {
            recording.follow(stretch.channel, current, stream)?;
        }
        let tokens = Tokens::of_rounds(me, self.own.size, rounds);
        let mut batch = Batch::new(Width::default());
        memory.tell(&mut batch, me, rounds, operations[0]);
        tokens.waits().for_each(|step| memory.add(&mut batch, step));
        memory.tell(&mut batch, me, rounds, operations[1]);
        tokens.takes().for_each(|step| memory.add(&mut batch, step));
        flush(current, stream, &mut batch)?;
        let tensors = request.tensors();
        let tensors: Vec<&[DeviceBytes<'_>]> = tensors.iter().map(|tensor| &tensor[..]).collect();
        let put = rings.put(current, stream, rounds, &tensors, &[], &[]);
        // From here on the stream waits for nothing. These steps follow even if `put` has failed: a part of it may be in the
        // graph.
        memory.tell(&mut batch, me, rounds, 0);
        tokens.returns().for_each(|step| memory.add(&mut batch, step));
        put.and(flush(current, stream, &mut batch))?;
        let context = &state.rings.memory().pair(stretches[0].channel.0).context;
        stretches.iter().try_for_each(|stretch| recording.ended(stretch.channel, context, current, stream))
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
