//! Calls whose stream is being captured in a graph.

use super::{Executor, LANE, Ranks, Request, State, Way, kernels};
use crate::device::graph::Place;
use crate::device::graph_lane::{Capturing, Purpose, Work};
use crate::device::ring_lane::RingLane;
use crate::error::Error;
use crate::schedule::Space;
use crate::signature::Signature;

/// The least bytes of half the staging memory of a graph's lane: devices allocate no less.
const LEAST_HALF: usize = 1 << 20;

impl Executor {
    /// Puts a collective into a capture. All ranks have called it.
    ///
    /// # Errors
    /// Nothing has been put there, unless the driver has refused something.
    pub(super) fn capture(
        &self,
        state: &mut State,
        place: Place<'_>,
        (number, call): (u64, Signature),
        way: &Way,
        request: &Request<'_>,
        ranks: &dyn Ranks,
    ) -> Result<(), Error> {
        // Nothing of it will be on a stream that says when it is done.
        self.control.pass(LANE, number);
        let purpose = state.purpose(way);
        let mut all_gather = |own| ranks.all_gather(own, request.timeout);
        let prepared = state.graphs.prepare(place, purpose, request.timeout, &mut all_gather, &|| ranks.are_there());
        // What could not be made is told to all, and each can go on. Else ranks may be at different places.
        let is_reported = |error: &Error| matches!(error, Error::Init(_));
        prepared.inspect_err(|error| {
            if !is_reported(error) {
                self.in_flight.fail_next(error.clone())
            }
        })?;
        let [inputs, outputs] = request.stretches();
        let element = request.dtype.size();
        let work = match way {
            Way::Plan(plan) => {
                let sum = request.scaling.bytes_in(Space::Sums, element);
                Work::Plan { segments: &plan.segments, element, sum }
            }
            Way::Rounds(rounds, _) => Work::Rounds(rounds),
        };
        let kernels = kernels(&state.launcher, request, state.lane.ranks());
        let operation = Capturing { call, limit: request.timeout, work, inputs: &inputs, outputs: &outputs };
        let submitted = state.graphs.submit(place, purpose, &operation, &kernels);
        submitted.map_err(|error| self.broken(number, call.to_string(), &error))
    }
}

impl State {
    /// What a graph's lane must do for this.
    fn purpose(&self, way: &Way) -> Purpose {
        match way {
            Way::Plan(plan) => {
                let half = plan.staging.next_power_of_two().max(LEAST_HALF);
                Purpose::Plans { half: half.min(self.half) }
            }
            Way::Rounds(..) => Purpose::Rounds { half: RingLane::half(self.lane.ranks(), self.rings.cell()) },
        }
    }
}
