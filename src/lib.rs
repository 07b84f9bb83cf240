//! Collective communication between processes: shared memory within a host, TCP between hosts.
//!
//! The path of an operation: [`Communicator::submit`] takes an [`Op`], plans a [`schedule`], runs it over the
//! [`transport`]s and completes the [`Work`].

pub mod algo;
pub mod buffer;
pub mod comm;
pub mod config;
pub mod counts;
mod deadline;
pub mod device;
pub mod engine;
pub mod error;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
#[cfg(any(test, fuzzing))]
mod fuzz_input;
pub mod link;
pub mod measure;
pub mod op;
pub mod rdma;
pub mod schedule;
mod signature;
pub mod simulate;
pub mod sync;
pub mod sys;
pub mod topo;
pub mod transport;
pub mod types;
pub mod window;
pub mod work;

// The public interface is:
pub use buffer::{Buffer, Buffers, Memory};
pub use comm::{CommOptions, Communicator, Data, Launch};
pub use counts::Counts;
pub use error::{Error, ErrorClass, InitError, LaunchError, StoreError, UsageError};
pub use half::{bf16, f16};
pub use op::{Mode, Op, OpKind};
pub use sys::cuda::StreamHandle;
pub use sys::segment::SharedMemory;
pub use topo::Topology;
pub use types::{DType, Element, Frame, Rank, ReduceOp, Source, Tag};
pub use window::{GetPath, Window, WindowId};
pub use work::Work;

// Keeps the example in the read-me true.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod read_me {}

// Runs the algorithm that the tutorial writes.
#[cfg(doctest)]
#[doc = include_str!("../docs/tutorials/algorithm.md")]
mod tutorial {}
