//! NVIDIA's library of collectives, NCCL, and AMD's, RCCL, which has the same functions: looked for when it is needed, and
//! never linked.
//!
//! What a library can do is known by its version and its functions together. Source: nccl.h of NCCL 2.27 to 2.32. A
//! [`NcclComm`] is a communicator of such a library that blocks nobody: its [calls](NcclCall) are data, and so is a
//! rank's [`Place`] in a [split](NcclComm::split). [Memory](LibraryMemory) can be [registered](NcclComm::register) with it.

mod communicator;
mod config;
mod functions;
mod library;
mod memory;
mod registered;
mod registration;
mod split;

pub use communicator::{DataType, Factor, NcclCall, NcclComm, Progress, Reduction, UniqueId};
pub use library::{Feature, Nccl, NcclError, Vendor, Version};
pub use memory::LibraryMemory;
pub use split::{Place, Splitting};
