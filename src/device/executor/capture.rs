//! Calls whose stream is being captured in a graph.

use super::{CollectiveRequest, Executor, LANE, Prepared, Ranks, State, kernels};
use crate::device::graph::CaptureSite;
use crate::device::graph_lane::{CapturedWork, Capturing, Purpose};
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
    /// The capture is as it was, unless the driver has refused something.
    pub(super) fn capture(
        &self,
        state: &mut State,
        place: CaptureSite<'_>,
        (number, call): (u64, Signature),
        prepared: &Prepared,
        request: &CollectiveRequest<'_>,
        ranks: &dyn Ranks,
    ) -> Result<(), Error> {
        // No stream will say when this operation is done.
        self.control.pass(LANE, number);
        let purpose = state.purpose(prepared);
        let mut all_gather = |own| ranks.all_gather(own, request.timeout);
        let made = state.graphs.prepare(place, purpose, request.timeout, &mut all_gather, &|| ranks.are_there());
        // All ranks are told what could not be made, and can go on. After other errors ranks may be at different places.
        let is_reported = |error: &Error| matches!(error, Error::Init(_));
        made.inspect_err(|error| {
            if !is_reported(error) {
                self.in_flight.fail_next(error.clone())
            }
        })?;
        let [inputs, outputs] = request.stretches();
        let element = request.dtype.size();
        let captured = match prepared {
            Prepared::Plan(plan) => {
                let sum = request.scaling.bytes_in(Space::Sums, element);
                CapturedWork::Plan { programs: &plan.programs, element, sum }
            }
            Prepared::Rounds(rounds, _) => CapturedWork::Rounds(rounds),
        };
        let kernels = kernels(&state.launcher, request, state.lane.ranks());
        let operation = Capturing { call, limit: request.timeout, captured, inputs: &inputs, outputs: &outputs };
        let submitted = state.graphs.submit(place, purpose, &operation, &kernels);
        submitted.map_err(|error| self.broken(number, call.to_string(), &error))
    }
}

impl State {
    /// The purpose of the graph's lane that captures this.
    fn purpose(&self, prepared: &Prepared) -> Purpose {
        match prepared {
            Prepared::Plan(plan) => {
                let half = plan.staging.next_power_of_two().max(LEAST_HALF);
                Purpose::Plans { half: half.min(self.half) }
            }
            Prepared::Rounds(..) => Purpose::Rounds { half: RingLane::half(self.lane.ranks(), self.rings.cell()) },
        }
    }
}
