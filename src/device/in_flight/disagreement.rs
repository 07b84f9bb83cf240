//! Collectives on whose arguments the ranks disagree.

use super::InFlight;
use crate::device::call_log::{Disagreement, LoggedCall};
use crate::device::control::FailureKind;
use crate::error::Error;

impl InFlight {
    /// Fails operation `number`, which is collective `sequence` of the communicator and which this rank has called so, unlike another
    /// rank, by its name in the communicator. The ranks of this host are told; the error is that of the call.
    pub(crate) fn disagree(&self, number: u64, sequence: u64, call: LoggedCall, other: Disagreement) -> Error {
        let detail = call.disagreement(sequence, self.control.name(self.control.me()), other);
        let error = Error::Mismatch { operation: call.signature().to_string(), detail };
        self.fail(number, FailureKind::Mismatch, other.rank, error.clone());
        error
    }
}
