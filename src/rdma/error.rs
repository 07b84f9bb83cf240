//! Why a transport could not be made, or an operation of it failed.

use std::time::Duration;

use crate::error::{InitError, UsageError};

/// Why an operation on a transport failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RdmaError {
    /// The caller's mistake. Nothing was sent.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// The settings are not valid, or the host has no address.
    #[error(transparent)]
    Init(#[from] InitError),
    /// The transport is not connected, or no longer.
    #[error("{operation}: the transport is not connected: {cause}")]
    NotConnected {
        /// What was called.
        operation: &'static str,
        /// Since when, or why.
        cause: String,
    },
    /// The peer could not be reached, or is not the one that made the bytes of `bind`.
    #[error("connect: {peer} cannot be reached: {cause}")]
    Unreachable {
        /// The peer.
        peer: String,
        /// How each way to it failed.
        cause: String,
    },
    /// The settings ask for UCX, which this process cannot use.
    #[error("{operation}: UCX cannot be used: {cause}")]
    Ucx {
        /// What was called.
        operation: &'static str,
        /// Why.
        cause: String,
    },
    /// The system refused a resource.
    #[error("{operation}: {cause}")]
    Os {
        /// What was called.
        operation: &'static str,
        /// What the system said.
        cause: String,
    },
    /// The peer has refused the operation. The transport works on.
    #[error("{operation}: {peer} refused {span}: {cause}")]
    Refused {
        /// The kind of operation.
        operation: &'static str,
        /// The peer.
        peer: String,
        /// Which part of the operation.
        span: String,
        /// The peer's reason.
        cause: String,
    },
    /// The operation has timed out. The transport is of no use any more.
    #[error("{operation}: {peer} did not complete {span} within {waited:.1?}")]
    Timeout {
        /// The kind of operation.
        operation: &'static str,
        /// The peer.
        peer: String,
        /// Which part of the operation.
        span: String,
        /// The time limit.
        waited: Duration,
    },
    /// The connection has ended. The transport is of no use any more.
    #[error("{operation}: the connection to {peer} ended before {span} was complete: {cause}")]
    Broken {
        /// The kind of operation.
        operation: &'static str,
        /// The peer.
        peer: String,
        /// Which part of the operation.
        span: String,
        /// How it ended.
        cause: String,
    },
    /// The caller did not wait for the end. The operation is still in flight.
    #[error("wait: the operation is still in flight after {waited:.1?}")]
    InFlight {
        /// How long it was waited for.
        waited: Duration,
    },
}
