//! One-sided reads and writes of registered memory between two processes that need not share a communicator.
//!
//! A process registers [`MemoryRegion`] and hands a [`RemoteBuffer`] out: an address, a length and a key. A process that has both the
//! buffer and a connected [`Transport`] reads and writes the memory; its owner does nothing. The names are those of torchcomms'
//! transport, which is RDMA. Here the wires are the memory of processes of one host, TCP, and UCX, which knows RDMA devices.
//!
//! # How bytes move
//! Each transport has two connections: one that it opens, for its own operations, and one that its peer opens, which it serves
//! by a thread (`server`). Within a host these are Unix sockets. A long write then names where it lies, and the target's thread
//! reads it there (process_vm_readv(2)). Reads ask once where the bytes of a key lie, and read them there, in which the peer takes no
//! part (`direct`). Otherwise, and where the system forbids that, bytes travel in frames (`protocol`). UCX is a third way
//! (`ucx`), in which also either side reads and none writes. An operation's own side is a state machine of one thread that does
//! not block (`client`), so many are in flight at once.
//!
//! # Who may do what
//! [`Transport::bind`] returns a secret. Both sides of a connection prove that they know the target's
//! ([`auth`](crate::transport::auth)); who cannot is refused and logged. A key is 128 random bits, and stands for a range of one
//! memory. The owner looks it up for every piece that it copies, under a lock that [`MemoryRegion::deregister`] takes too, and who
//! copies without it looks whether the key is still good afterwards. So once that returns, nothing is written any more, and no
//! read that ends well has what came later.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use ncclx_rs::rdma::{Kind, MemoryRegion, Span, Transport};
//! use ncclx_rs::sys::lent_bytes::LentBytes;
//!
//! let (one, other) = (Transport::new(&[])?, Transport::new(&[])?);
//! let (mine, theirs) = (one.bind()?, other.bind()?);
//! one.connect(&theirs, Duration::from_secs(60))?;
//! other.connect(&mine, Duration::from_secs(60))?;
//! let memory = MemoryRegion::new(Arc::new(LentBytes::owned(vec![0; 100])));
//! let source = Arc::new(LentBytes::owned(vec![7; 10]));
//! let span = Span { local: source, offset: 0, len: 10, remote: memory.remote_buffer(0, 100)? };
//! one.post(Kind::Write, vec![span], Duration::from_secs(60))?.wait(None)?;
//! let mut there = [0; 12];
//! memory.bytes().copy_out(0, &mut there);
//! assert_eq!(there, [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0, 0]);
//! # Ok::<(), ncclx_rs::rdma::RdmaError>(())
//! ```

mod client;
mod direct;
mod error;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod memory;
mod pending;
mod protocol;
mod server;
mod span;
mod transport;
mod ucx;
mod wire;

pub use error::RdmaError;
pub use memory::{Key, MemoryRegion, RemoteBuffer};
pub use pending::Pending;
pub use span::{Kind, Span};
pub use transport::Transport;
