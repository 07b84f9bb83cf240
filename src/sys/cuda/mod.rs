//! CUDA's driver, or AMD's HIP in its place, behind safe faces, on machines that have one.
//!
//! The library is looked for at run time: nothing of CUDA or ROCm is needed to build this, and one build serves CUDA 12 and 13
//! and HIP 7. On a machine without a driver the first call is an error, [`CudaError::NoDriver`].
//!
//! What is made keeps its [`Context`] and gives itself back when it goes. Calls that run in a context take a [`Current`].

mod capture;
mod combine;
mod context;
mod device;
mod error;
mod functions;
mod host_memory;
mod memory;
mod module;
mod provider;
mod shared_memory;
mod stream;
mod words;

pub use capture::Relaxed;
pub use combine::{Beside, Blocks, Combine, MAX_BLOCKS, Parameters};
pub use context::{Context, Current};
pub use device::{Attribute, Device, DeviceUuid, DriverVersion, driver_version, provider};
pub use error::{Code, CudaError};
pub use host_memory::{HostMemoryError, SharedHostMemory};
pub use memory::{DeviceBytes, DeviceMemory, DevicePtr, PointerInfo, copy_from_host, copy_to_host};
pub use module::{Function, Module};
pub use provider::Provider;
pub use shared_memory::{ExportError, Exported, ImportedMemory, SharedDeviceMemory, export};
pub use stream::{Capture, Event, Moment, Stream, StreamHandle, StreamId};
pub use words::{Batch, DeviceWord, RegisteredWords, Width};
