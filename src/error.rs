//! What can go wrong, told apart by whose doing it is.

use std::time::Duration;

use crate::types::Rank;

/// A call that could not have worked: found before anything is sent, and the communicator is as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: argument `{argument}`: expected {expected}, got {got}")]
pub struct UsageError {
    /// The operation that was called.
    pub operation: String,
    /// The argument at fault.
    pub argument: &'static str,
    /// What it should have been.
    pub expected: String,
    /// What it was.
    pub got: String,
}

/// Why a communicator did not come to be.
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
        /// What the store said.
        cause: String,
    },
    /// Ranks did not come within the time allowed.
    #[error("communicator `{comm}`: ranks {missing:?} did not join within {waited:?}")]
    Missing {
        /// The communicator's name.
        comm: String,
        /// The ranks that are not there.
        missing: Vec<u32>,
        /// How long they were waited for.
        waited: Duration,
    },
    /// A rank could not be reached.
    #[error("communicator `{comm}`: rank {rank} cannot be reached: {cause}")]
    Unreachable {
        /// The communicator's name.
        comm: String,
        /// The rank that was called.
        rank: u32,
        /// Each address that was tried, with what it answered.
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

/// Why a process does not know its place among those launched with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// No launcher has told.
    #[error("no launcher has told this process its rank and the number of ranks in {variables}")]
    Absent {
        /// The pairs of variables that were looked for.
        variables: String,
    },
    /// Of two variables that belong together, one is missing.
    #[error("{set} is set, but {unset} is not")]
    Half {
        /// The one that is there.
        set: &'static str,
        /// The one that is not.
        unset: &'static str,
    },
    /// A variable has no sensible value.
    #[error("{variable} is `{value}`: expected {expected}")]
    Value {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it should have been.
        expected: String,
    },
    /// Nobody has told where the ranks can meet.
    #[error("MASTER_ADDR and MASTER_PORT are not set: rank 0's host, and a port that is free there")]
    NoMaster,
    /// PyTorch's own store listens where the ranks should meet.
    #[error(
        "torchrun serves a store of its own at MASTER_PORT {port}; with --standalone or --rdzv-backend c10d and \
         TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment it leaves the ranks a free port"
    )]
    PortTaken {
        /// The port.
        port: u16,
    },
}

/// Why there is no store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// It cannot be served here.
    #[error("a store cannot be served at `{address}`: {cause}")]
    Listen {
        /// Where it was to listen.
        address: String,
        /// What the system said.
        cause: String,
    },
    /// It does not answer.
    #[error("no store answers at `{address}` within {waited:?}: {cause}")]
    Absent {
        /// Where it was looked for.
        address: String,
        /// How long.
        waited: Duration,
        /// What came of the last attempt.
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
    /// The launcher's environment does not say what is needed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The rendezvous store could not be served or reached.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The ranks disagree about the operation. It failed on all of them; the communicator works on.
    #[error("{operation}: {detail}")]
    Mismatch {
        /// The operation as this rank called it.
        operation: String,
        /// What each of the two ranks called.
        detail: String,
    },
    /// The operation's time ran out.
    #[error("{operation} timed out after a timeout of {waited:.1?}: {detail}")]
    Timeout {
        /// The operation.
        operation: String,
        /// How long it ran.
        waited: Duration,
        /// Which ranks it waited for.
        detail: String,
    },
    /// The operation's time ran out while this process lacked what it takes, such as file descriptors. No rank is to blame;
    /// the communicator works on.
    #[error("{operation} timed out after a timeout of {waited:.1?} for want of a resource: {detail}")]
    Resource {
        /// The operation.
        operation: String,
        /// How long it ran.
        waited: Duration,
        /// What is lacking, and how much of it is needed.
        detail: String,
    },
    /// Another rank gave the operation up.
    #[error("{operation}: rank {rank} reported: {cause}")]
    Remote {
        /// The operation as this rank called it.
        operation: String,
        /// The rank that gave up first.
        rank: u32,
        /// Its reason.
        cause: String,
    },
    /// A rank died or cannot be reached any more.
    #[error("{operation}: rank {rank} is lost: {cause}")]
    PeerLost {
        /// The operation that noticed.
        operation: String,
        /// The rank that is gone.
        rank: u32,
        /// How that was seen.
        cause: String,
    },
    /// The communicator was aborted or shut down.
    #[error("{operation}: communicator `{comm}` was {how}")]
    Closed {
        /// The operation that was called or cut off.
        operation: String,
        /// The communicator's name.
        comm: String,
        /// "aborted: …" or "shut down".
        how: String,
    },
}

/// A lost connection, or one that is not made, as a transport sees it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause}")]
pub struct LinkDown {
    /// What the system or the peer said.
    pub cause: String,
    pub(crate) kind: Down,
}

/// What a [`LinkDown`] tells of the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Down {
    /// It cannot be reached any more.
    Broken,
    /// It has gone, as ranks that leave do too.
    HungUp,
    /// It has no room for a caller now: the connection may be made later.
    Busy,
    /// It cannot be reached in this way, whether it has gone or something stands between. It may be in another.
    Unfit,
    /// Nothing: it is this process that lacks what a connection takes. It may be made later.
    Lacking,
}

impl LinkDown {
    /// A loss with its reason.
    pub fn new(cause: impl Into<String>) -> Self {
        LinkDown { cause: cause.into(), kind: Down::Broken }
    }

    /// A loss because the other side has gone.
    pub(crate) fn hung_up(cause: impl Into<String>) -> Self {
        LinkDown { cause: cause.into(), kind: Down::HungUp }
    }

    /// A connection that cannot be made in this way.
    pub(crate) fn unfit(cause: impl Into<String>) -> Self {
        LinkDown { cause: cause.into(), kind: Down::Unfit }
    }

    /// A connection for which this process lacks something now.
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

/// A list of ranks, for messages: the first of them where there are very many.
pub(crate) fn rank_list(ranks: &[Rank]) -> String {
    const MANY: usize = 64;
    let named = ranks.iter().take(MANY).map(Rank::to_string).collect::<Vec<_>>().join(", ");
    match ranks.len().saturating_sub(MANY) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}
