//! Errors, told apart by their cause: the caller, the system, or another rank.

use std::time::Duration;

use crate::types::Rank;

/// A call that cannot work. It is refused before anything is sent, and the communicator is as before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: argument `{argument}`: expected {expected}, got {got}")]
pub struct UsageError {
    /// The operation that was called.
    pub operation: String,
    /// The argument at fault.
    pub argument: &'static str,
    /// What the argument must be.
    pub expected: String,
    /// What it is.
    pub got: String,
}

/// Why a communicator could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InitError {
    /// A setting or argument is not valid.
    #[error("{0}")]
    Config(String),
    /// The rendezvous store failed.
    #[error("rendezvous of communicator `{comm}`: the store failed on `{key}`: {cause}")]
    Store {
        /// The communicator's name.
        comm: String,
        /// The key that was asked for.
        key: String,
        /// The store's error.
        cause: String,
    },
    /// Ranks did not join within the bootstrap timeout.
    #[error("communicator `{comm}`: ranks {missing:?} did not join within {waited:?}{}", others_of(leaders))]
    Missing {
        /// The communicator's name.
        comm: String,
        /// The ranks that did not join.
        missing: Vec<u32>,
        /// Those of them through which others would have joined, in a large world. These cannot come without.
        leaders: Vec<u32>,
        /// How long they were waited for.
        waited: Duration,
    },
    /// A rank could not be reached.
    #[error("communicator `{comm}`: rank {rank} cannot be reached: {cause}")]
    Unreachable {
        /// The communicator's name.
        comm: String,
        /// The unreachable rank.
        rank: u32,
        /// Each address that was tried, and how it failed.
        cause: String,
    },
    /// The operating system refused a resource.
    #[error("communicator `{comm}`: {what}: {cause}")]
    Os {
        /// The communicator's name.
        comm: String,
        /// What was asked for.
        what: String,
        /// What the system said.
        cause: String,
    },
}

fn others_of(leaders: &[u32]) -> String {
    if leaders.is_empty() { String::new() } else { format!("; others cannot join without {leaders:?}") }
}

/// What an error means to the caller, for code that translates errors. Every error has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// The caller's mistake.
    Usage,
    /// The operation failed on this rank.
    Failure,
    /// The communicator could not be made: the store or a rank could not be reached.
    Network,
    /// The operation timed out.
    Timeout,
    /// The operation failed on another rank.
    Remote,
    /// A rank is lost, or this rank has left.
    Lost,
}

impl InitError {
    /// What it means to the caller.
    pub fn class(&self) -> ErrorClass {
        match self {
            InitError::Config(_) => ErrorClass::Usage,
            InitError::Os { .. } | InitError::Missing { .. } => ErrorClass::Failure,
            InitError::Store { .. } | InitError::Unreachable { .. } => ErrorClass::Network,
        }
    }
}

/// Why a process does not know its rank among those launched with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// No launcher has set rank and size.
    #[error(
        "no launcher has told this process its rank and the number of ranks in {variables}; `torchrun --standalone \
         --nproc-per-node 2 PROGRAM` starts two ranks"
    )]
    Absent {
        /// The pairs of variables that were looked for.
        variables: String,
    },
    /// Of a pair of variables, one is not set.
    #[error("{set} is set, but {unset} is not")]
    Half {
        /// The variable that is set.
        set: &'static str,
        /// The variable that is not set.
        unset: &'static str,
    },
    /// A variable has an invalid value.
    #[error("{variable} is `{value}`: expected {expected}")]
    Value {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it should have been.
        expected: String,
    },
    /// The environment names no master, whose store the ranks need.
    #[error("MASTER_ADDR and MASTER_PORT are not set: rank 0's host, and a port that is free there")]
    NoMaster,
    /// torchrun's agent serves PyTorch's own store at the master's port.
    #[error(
        "torchrun serves a store of its own at MASTER_PORT {port}; with --standalone or --rdzv-backend c10d and \
         TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment it leaves the ranks a free port"
    )]
    PortTaken {
        /// The port.
        port: u16,
    },
}

/// Why a store could not be served or reached.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The store cannot be served here.
    #[error("a store cannot be served at `{address}`: {cause}")]
    Listen {
        /// The address to listen on.
        address: String,
        /// What the system said.
        cause: String,
    },
    /// The store does not answer.
    #[error("no store answers at `{address}` within {waited:?}: {cause}")]
    Absent {
        /// The address of the store.
        address: String,
        /// How long.
        waited: Duration,
        /// The error of the last attempt.
        cause: String,
    },
}

/// Why an operation did not complete.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller's mistake.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// The communicator could not be made.
    #[error(transparent)]
    Init(#[from] InitError),
    /// The launcher's environment lacks something.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The rendezvous store could not be served or reached.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The ranks disagree about the operation. It has failed on all of them; the communicator still works.
    #[error("{operation}: {detail}")]
    Mismatch {
        /// The operation as this rank called it.
        operation: String,
        /// The calls of the two ranks.
        detail: String,
    },
    /// The operation has timed out.
    #[error("{operation} timed out after a timeout of {waited:.1?}: {detail}")]
    Timeout {
        /// The operation.
        operation: String,
        /// How long it ran.
        waited: Duration,
        /// Which ranks it waited for.
        detail: String,
    },
    /// The operation has timed out while this process lacked a resource, such as file descriptors. No rank is at fault; the
    /// communicator still works.
    #[error("{operation} timed out after a timeout of {waited:.1?} for want of a resource: {detail}")]
    Resource {
        /// The operation.
        operation: String,
        /// How long it ran.
        waited: Duration,
        /// The missing resource, and how much of it is needed.
        detail: String,
    },
    /// The operation has failed on another rank.
    #[error("{operation}: rank {rank} reported: {cause}")]
    Remote {
        /// The operation as this rank called it.
        operation: String,
        /// The rank on which it failed first.
        rank: u32,
        /// Its reason.
        cause: String,
    },
    /// A rank has died or can no longer be reached.
    #[error("{operation}: rank {rank} is lost: {cause}")]
    PeerLost {
        /// The operation that noticed.
        operation: String,
        /// The lost rank.
        rank: u32,
        /// How the loss was noticed.
        cause: String,
    },
    /// A call of the device's driver has failed. The communicator is of no use any more.
    #[error("{operation}: {cause}")]
    Device {
        /// The operation.
        operation: String,
        /// The call, and what the driver said.
        cause: String,
    },
    /// The communicator was aborted or shut down.
    #[error("{operation}: communicator `{comm}` was {how}")]
    Closed {
        /// The operation that was refused or ended.
        operation: String,
        /// The communicator's name.
        comm: String,
        /// "aborted: …" or "shut down".
        how: String,
    },
}

impl Error {
    /// What it means to the caller.
    pub fn class(&self) -> ErrorClass {
        match self {
            Error::Usage(_) => ErrorClass::Usage,
            Error::Init(error) => error.class(),
            Error::Launch(_) | Error::Store(_) | Error::Mismatch { .. } | Error::Resource { .. } => ErrorClass::Failure,
            Error::Timeout { .. } => ErrorClass::Timeout,
            Error::Remote { .. } => ErrorClass::Remote,
            Error::PeerLost { .. } | Error::Closed { .. } | Error::Device { .. } => ErrorClass::Lost,
        }
    }

    /// The rank that is lost, if that is what it says.
    pub(crate) fn lost_rank(&self) -> Option<Rank> {
        match self {
            Error::PeerLost { rank, .. } => Some(Rank(*rank)),
            _ => None,
        }
    }
}

/// A broken connection, or one that could not be made, as a transport sees it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause}")]
pub struct LinkDown {
    /// The reason, from the system or the peer.
    pub cause: String,
    pub(crate) kind: Down,
}

/// What a [`LinkDown`] shows about the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Down {
    /// It can no longer be reached.
    Broken,
    /// It has closed the connection, as ranks that leave do too.
    HungUp,
    /// Nobody listens there any more: it has ended, or has left because of something that may be told soon.
    Refused,
    /// It has no room for a connection now: another attempt may succeed.
    Busy,
    /// It cannot be reached by this transport. Another transport may reach it.
    Unfit,
    /// Nothing: this process lacks a resource for the connection. Another attempt may succeed.
    Lacking,
}

impl LinkDown {
    /// A loss with its reason.
    pub fn new(cause: impl Into<String>) -> Self {
        LinkDown { cause: cause.into(), kind: Down::Broken }
    }

    /// A loss because the other side has closed the connection.
    pub(crate) fn hung_up(cause: impl Into<String>) -> Self {
        LinkDown { cause: cause.into(), kind: Down::HungUp }
    }

    /// A connection that nobody takes any more.
    pub(crate) fn refused(cause: impl Into<String>) -> Self {
        LinkDown { cause: cause.into(), kind: Down::Refused }
    }

    /// A connection that cannot be made by this transport.
    pub(crate) fn unfit(cause: impl Into<String>) -> Self {
        LinkDown { cause: cause.into(), kind: Down::Unfit }
    }

    /// A connection for which this process lacks a resource now.
    pub(crate) fn lacking(cause: impl Into<String>) -> Self {
        LinkDown { cause: cause.into(), kind: Down::Lacking }
    }

    /// A connection that the other side has no room for now.
    pub(crate) fn busy(cause: impl Into<String>) -> Self {
        LinkDown { cause: cause.into(), kind: Down::Busy }
    }
}

impl From<std::io::Error> for LinkDown {
    fn from(error: std::io::Error) -> Self {
        use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
        let hung_up = matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof);
        LinkDown { cause: error.to_string(), kind: if hung_up { Down::HungUp } else { Down::Broken } }
    }
}

/// The beginning of a text that may take so many bytes, in whole characters.
pub(crate) fn beginning(text: &str, bytes: usize) -> &str {
    let mut end = text.len().min(bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// A list of ranks, for messages; of very many ranks, only the first.
pub(crate) fn rank_list(ranks: &[Rank]) -> String {
    const MANY: usize = 64;
    let named = ranks.iter().take(MANY).map(Rank::to_string).collect::<Vec<_>>().join(", ");
    match ranks.len().saturating_sub(MANY) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}
