//! Calls whose stream is being captured in a graph.

use super::request::LibraryCall;
use super::{CollectiveRequest, Executor, LANE, Prepared, Ranks, State, kernels};
use crate::device::control::FailureKind;
use crate::device::graph::CaptureSite;
use crate::device::graph_lane::{CapturedWork, Capturing, Purpose};
use crate::device::graph_library::LibraryCalls;
use crate::device::in_flight;
use crate::device::ring_lane::RingLane;
use crate::device::setup;
use crate::device::vendor::captured::{Obstacle, ToldCall};
use crate::error::Error;
use crate::schedule::Space;
use crate::signature::Signature;
use crate::types::Rank;

/// The least bytes of half the staging memory of a graph's lane: devices allocate no less.
const LEAST_HALF: usize = 1 << 20;

impl Executor {
    /// Puts the library's calls of a collective into a capture. All ranks of this host have called it; those of others tell
    /// here what they have.
    ///
    /// # Errors
    /// The ranks do not go together, which is the same on all; or the driver or the library has refused something.
    pub(super) fn capture_calls(
        &self,
        state: &mut State,
        place: CaptureSite<'_>,
        &LibraryCall { number, call, blocks, comm, spare, calls }: &LibraryCall<'_>,
        request: &CollectiveRequest<'_>,
        ranks: &dyn Ranks,
    ) -> Result<(), Error> {
        let (signature, limit) = (call.signature(), request.timeout);
        let names: Vec<Rank> = (0..state.world).map(Rank::from).collect();
        let own = ToldCall::new(state.before + number, call, blocks, comm.unconnected(calls));
        let mut all_gather = |own| ranks.all_gather(own, limit).map_err(|error| in_flight::named(error, signature));
        let told: Vec<ToldCall> = setup::tell(&self.comm, &names, &mut all_gather, Ok(own))
            // A rank that has not come to this is somewhere else.
            .inspect_err(|error| self.in_flight.fail_too(number, error))?;
        match ToldCall::obstacle(&told, self.me) {
            None => {}
            Some(Obstacle::Disagreement(other)) => {
                return Err(self.in_flight.disagree(number, state.before + number, call, other));
            }
            Some(Obstacle::Number { rank, number: theirs }) => {
                let detail =
                    format!("rank {rank} calls device collective {theirs}, this rank {}", state.before + number);
                let error = Error::Mismatch { operation: signature.to_string(), detail };
                self.in_flight.fail(number, FailureKind::Mismatch, rank, error.clone());
                return Err(error);
            }
            Some(Obstacle::Unconnected(rank, peer)) => {
                self.control.pass(LANE, number);
                let cause = format!(
                    "{} connects two ranks at their first message, which a capture may not allow, and rank {rank} has had none \
                     with rank {peer} in a direction: call the operation once before the capture",
                    comm.library()
                );
                return Err(self.refused(&signature, &cause));
            }
        }
        // No stream will say when this operation is done.
        self.control.pass(LANE, number);
        let made = state.graphs.prepare_library(place, (comm, spare), limit, &mut all_gather, &|| ranks.are_there());
        made.inspect_err(|error| {
            if !matches!(error, Error::Init(_)) {
                self.in_flight.fail_next(error.clone());
            }
        })?;
        let submitted = state.graphs.submit_library(place, &LibraryCalls { call: signature, limit, calls });
        submitted.map_err(|error| self.broken(number, signature.to_string(), &error))
    }

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
