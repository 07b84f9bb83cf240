//! What the protocols share, and get with every call: the streams, the rendezvous of long messages, and the ends of
//! operations.

use std::time::{Duration, Instant};

use crate::engine::call::Call;
use crate::engine::completion::{Finished, OpId};
use crate::engine::endpoint::Endpoints;
use crate::engine::failures::{Failures, Suspect};
use crate::engine::flight_recorder::Recorder;
use crate::engine::frame::{Header, MatchSpace, RtsInfo};
use crate::engine::recv_buffer::RecvBuffer;
use crate::engine::rndv::Rendezvous;
use crate::error::Error;
use crate::topo::Topology;
use crate::types::Rank;
use crate::work::Work;

/// What the protocols of one communicator share.
pub(crate) struct OpContext {
    pub(crate) me: Rank,
    pub(crate) topo: Topology,
    pub(crate) endpoints: Endpoints,
    pub(crate) rndv: Rendezvous,
    pub(crate) recorder: Recorder,
    pub(crate) failures: Failures,
    /// Works that ended and whose callbacks have not been run.
    pub(crate) finished: Finished,
    /// Why nothing can be submitted any more.
    pub(crate) closed: Option<String>,
    /// The failure for which the flight recorder is to be written.
    pub(crate) dump_due: Option<String>,
    /// Ranks that operations found gone, with the errors of these, which name whom to blame. The engine tells the other ranks.
    pub(crate) lost_found: Vec<(Rank, Error)>,
    /// Operations whose peer is gone, of whose memory nothing in the engine knows any more: they fail once it is known whom to
    /// blame.
    pub(crate) deserted: Vec<Deserted>,
}

/// An operation whose peer is gone.
pub(crate) struct Deserted {
    suspect: Suspect,
    call: Call,
    work: Work,
}

impl Deserted {
    /// How it fails if this rank is to blame.
    fn error(&self, rank: Rank, cause: String) -> Error {
        Error::PeerLost { operation: self.call.to_string(), rank: rank.0, cause }
    }
}

impl OpContext {
    /// The number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.endpoints.size()
    }

    /// Why `peer` cannot be reached, if it cannot.
    pub(crate) fn lost(&self, peer: Rank) -> Option<String> {
        self.endpoints.lost(peer).map(str::to_owned)
    }

    /// Whether no more is to be heard of why `peer` is gone: no detector reports losses, or the peer has told.
    fn is_explained(&self, peer: Rank) -> bool {
        !self.failures.is_watched || self.endpoints.has_reported(peer)
    }

    /// `peer` as one that is gone, which an operation finds that has time until `deadline`.
    pub(crate) fn suspect(&self, peer: Rank, cause: String, deadline: Option<Instant>) -> Suspect {
        let since = self.endpoints.lost_at(peer).unwrap_or_else(Instant::now);
        Suspect::since(since, peer, cause).before(deadline)
    }

    /// The rank to blame for one that is gone, and why: once a rank is known to be lost, nothing more will be told of this one,
    /// or that has taken too long.
    pub(crate) fn blame(&self, suspect: &Suspect, now: Instant) -> Option<(Rank, String)> {
        let Suspect { rank, cause, until } = suspect;
        if !self.is_explained(*rank) && !self.failures.has_lost() && *until > now {
            return None;
        }
        let behind = self.failures.lost().or_else(|| self.endpoints.culprit_behind(*rank));
        Some(behind.unwrap_or_else(|| match self.failures.reason_to_leave(*rank) {
            Some(reason) if !self.endpoints.has_reported(*rank) => (*rank, format!("{cause}; it has left: {reason}")),
            _ => (*rank, cause.clone()),
        }))
    }

    /// Ends an operation that cannot do without a rank that is gone, and of whose memory nothing in the engine knows any more: now
    /// or once it is known whom to blame.
    pub(crate) fn desert(&mut self, suspect: Suspect, call: Call, work: Work) {
        self.end_or_keep(Deserted { suspect, call, work }, Instant::now());
    }

    /// Ends the operations whose peers are gone and for which it is known whom to blame.
    pub(crate) fn check_deserted(&mut self, now: Instant) {
        for deserted in std::mem::take(&mut self.deserted) {
            self.end_or_keep(deserted, now);
        }
    }

    fn end_or_keep(&mut self, deserted: Deserted, now: Instant) {
        let Some((rank, cause)) = self.blame(&deserted.suspect, now) else { return self.deserted.push(deserted) };
        let error = deserted.error(rank, cause);
        self.lost_found.push((deserted.suspect.rank, error.clone()));
        self.finish(deserted.work, Err(error), None);
    }

    /// How the operation failed that ended last, if it did, or one that is about to.
    pub(crate) fn last_failure(&self) -> Option<Error> {
        let about_to = |deserted: &Deserted| deserted.error(deserted.suspect.rank, deserted.suspect.cause.clone());
        self.failures.last_operation.clone().or_else(|| self.deserted.first().map(about_to))
    }

    /// When to look at the operations whose peers are gone.
    pub(crate) fn deserted_until(&self) -> Option<Instant> {
        self.deserted.iter().map(|deserted| deserted.suspect.until).min()
    }

    /// Ends the operations whose peers are gone with the error that `error` makes of their names.
    pub(crate) fn end_deserted(&mut self, error: &dyn Fn(String) -> Error) {
        for Deserted { call, work, .. } in std::mem::take(&mut self.deserted) {
            self.finish(work, Err(error(call.to_string())), None);
        }
    }

    /// Has a buffer for a message whose RTS has come.
    pub(crate) fn receive(&mut self, from: Rank, rts: RtsInfo, match_space: MatchSpace, buffer: RecvBuffer) {
        let operation_bytes = buffer.region.len();
        self.rndv.receive(&mut self.endpoints, from, rts, match_space, buffer, operation_bytes);
    }

    /// Whether `op` waits for `peer` to take or to bring a message that both know of.
    pub(crate) fn exchanges(&self, op: OpId, peer: Rank) -> bool {
        self.rndv.exchanges(&self.endpoints, op, peer)
    }

    /// Drops everything of `op`: nothing of the engine refers to its memory afterwards. `unsent` is told of each message of
    /// which its peer never hears.
    pub(crate) fn cancel(&mut self, op: OpId, unsent: impl FnMut(Rank, Header)) {
        self.rndv.cancel(&mut self.endpoints, op, unsent);
    }

    /// Notes that an operation has ended, of whose memory nothing in the engine knows any more.
    pub(crate) fn ended(&mut self, number: u64, now: Instant, result: &Result<(), Error>, source: Option<Rank>) {
        let failure = result.as_ref().err();
        self.recorder.ended(number, now, failure.map(Error::to_string), source);
        // Closing is no failure of its own.
        if self.closed.is_none() {
            if let Some(reason) = failure {
                self.dump_due.get_or_insert_with(|| reason.to_string());
            }
            self.failures.last_operation = failure.cloned();
        }
    }

    /// Ends an operation that has a handle; see [`OpContext::ended`].
    pub(crate) fn finish(&mut self, work: Work, result: Result<(), Error>, source: Option<Rank>) {
        self.ended(work.number(), Instant::now(), &result, source);
        work.complete(result, source);
        self.finished.push(work);
    }
}

/// When to look again at words that a device's stream writes, where something moved last then. What moves is looked at often.
pub(crate) fn next_look(moved: Option<Instant>) -> Instant {
    let now = Instant::now();
    let still = moved.map_or(Duration::ZERO, |moved| now - moved);
    now + (still / 8).clamp(LOOK_MIN, LOOK_MAX)
}

/// How long it is between two looks, at least and at most.
const LOOK_MIN: Duration = Duration::from_micros(50);
const LOOK_MAX: Duration = Duration::from_millis(1);
