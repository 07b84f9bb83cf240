//! Memory for a vendor's library: what its allocator gives, and what programs lend for calls.

use std::fmt::Display;

use super::DeviceSide;
use crate::buffer::{Buffer, Memory};
use crate::device::allocator::{self, Allocates};
use crate::device::regions::{self, Owner, Region};
use crate::error::{Error, InitError, UsageError};
use crate::sync::lock;
use crate::sys::cuda::{Context, Device, DevicePtr};
use crate::sys::nccl::Feature;

impl DeviceSide {
    pub(in crate::comm) fn allocates(&self, comm: &str) -> Result<Allocates, Error> {
        let (offer, library) = self.libraries.offer();
        let engine = offer.choice.name();
        match (library, offer.library) {
            (Some(library), _) => Ok(match allocator::use_library(&library) {
                Ok(()) => Allocates::Library,
                Err(error) => Allocates::InPlaceOfLibrary(error.to_string()),
            }),
            (None, Some(Err(cause))) => {
                let text = format!("communicator `{comm}`: engine={engine}: {cause}; or take engine=streams");
                Err(InitError::Config(text).into())
            }
            (None, _) => Ok(Allocates::Engine),
        }
    }

    /// Takes memory for calls of the library. Without one, it is given back at once.
    pub(in crate::comm) fn lend(&self, operation: &str, memory: Buffer, owner: Owner) -> Result<(), Error> {
        let device = on_device(operation, memory)?;
        if self.libraries.offer().1.is_none_or(|library| !library.features().contains(&Feature::Memory)) {
            return Ok(());
        }
        let context = Device::new(device).and_then(Context::primary).map_err(|error| failed(operation, &error))?;
        let region = Region::new(regions::Memory::Lent { buffer: memory, _owner: owner }, context);
        let refused = lock(&self.libraries.lent).insert(region);
        refused.map_or(Ok(()), |_| {
            Err(unexpected(
                operation,
                "memory that begins elsewhere than what is registered",
                "some that is registered",
            ))
        })
    }

    /// Gives back what was lent, once the device does nothing with it.
    pub(in crate::comm) fn give_back(&self, operation: &str, memory: Buffer) -> Result<(), Error> {
        on_device(operation, memory)?;
        let lent = lock(&self.libraries.lent).remove(DevicePtr::from_bits(memory.ptr() as u64));
        let ended = lent.map_or(Ok(None), |region| region.end());
        ended.map(drop).map_err(|error| failed(operation, &error))
    }
}

fn failed(operation: &str, error: &dyn Display) -> Error {
    Error::Device { operation: operation.to_owned(), cause: error.to_string() }
}

fn on_device(operation: &str, memory: Buffer) -> Result<u32, Error> {
    match memory.memory() {
        Memory::Device(device) => Ok(device),
        Memory::Host => Err(unexpected(operation, "memory of a CUDA device", "memory of the host")),
    }
}

fn unexpected(operation: &str, expected: &str, got: &str) -> Error {
    let (operation, expected, got) = (operation.to_owned(), expected.to_owned(), got.to_owned());
    UsageError { operation, argument: "memory", expected, got }.into()
}
