//! What is completed when bytes have left or come: a step of an operation, and at last its work.

use smallvec::SmallVec;

use crate::schedule::StepId;
use crate::types::Rank;
use crate::work::Work;

/// The operation that a message belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpId {
    /// The collective with this sequence number.
    Collective(u64),
    /// The point-to-point operation with this id.
    Message(u64),
    /// The access to a window with this id.
    RmaOp(u64),
    /// Other ranks' accesses to this rank's part of the window with this id.
    Window(u64),
    /// The message to another host of this number, of the communicator's device.
    Outbound(u64),
    /// The message from another host of this number, likewise.
    Inbound(u64),
    /// The piece of this number of the messages to another host's rank, between devices.
    PieceSent { peer: Rank, number: u64 },
    /// The piece of this number of those from there.
    PieceReceived { peer: Rank, number: u64 },
    /// What goes to or comes from a rank of another host, of accesses to windows of devices.
    Access { peer: Rank, transfer: AccessTransfer, number: u64 },
    /// The protocol itself.
    Protocol,
}

/// A message of an access: an item asks for something or brings it, an answer brings what was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessTransfer {
    ItemSent,
    ItemReceived,
    AnswerSent,
    AnswerReceived,
}

/// What is told when a message has been written or received: an operation, and for a collective its step. Named as in UCX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Completion {
    pub(crate) op: OpId,
    pub(crate) step: StepId,
}

impl Completion {
    /// None is told.
    pub(crate) const NONE: Completion = Completion { op: OpId::Protocol, step: 0 };
}

/// Works that ended: mostly one a turn.
pub(crate) type Finished = SmallVec<[Work; 1]>;
