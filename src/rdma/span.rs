//! What an operation is: which way its bytes go, and where they lie at both sides.

use crate::rdma::memory::RemoteBuffer;
use crate::sync::Arc;
use crate::sys::lent_bytes::LentBytes;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// From this process to the remote one.
    Write,
    /// From the remote process to this one.
    Read,
}

impl Kind {
    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Write => "write",
            Kind::Read => "read",
        }
    }
}

/// One run of bytes of an operation.
#[derive(Clone, Debug)]
pub struct Span {
    /// This process's memory.
    pub local: Arc<LentBytes>,
    /// The first byte there.
    pub offset: usize,
    /// The number of bytes.
    pub len: usize,
    /// The other process's memory, of at least as many bytes: the first ones are meant.
    pub remote: RemoteBuffer,
}
