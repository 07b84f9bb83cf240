//! What programs call of a communicator for tensors in the memory of a CUDA device alone.

use crate::buffer::{Buffer, Memory};
use crate::comm::check;
use crate::comm::communicator::Communicator;
use crate::device::allocator::Allocates;
use crate::device::launch;
use crate::error::{Error, UsageError};
use crate::op::{Mode, Op};
use crate::types::ReduceOp;
use crate::work::Work;

impl Communicator {
    /// Sets up what operations on the CUDA device of this number need, which else the first of them does. All ranks call it,
    /// each with its own device; it returns once all have. What fails on a rank is an error on all.
    pub fn prepare_device(&self, device: u32) -> Result<(), Error> {
        self.device.prepare(self, device, self.timeout())
    }

    /// Whether streams that a program makes for this communicator's operations are to have high priority: its setting.
    pub fn is_high_priority_stream(&self) -> bool {
        self.device.is_high_priority_stream
    }

    /// What allocates device memory that this communicator's calls take in place: decided by its setting `engine`, as on every
    /// rank. Where it is a vendor's library, [`allocator::allocate_by_library`](crate::device::allocator::allocate_by_library)
    /// works from now on.
    ///
    /// # Errors
    /// The library is set, and this rank has none.
    pub fn allocates(&self) -> Result<Allocates, Error> {
        self.device.allocates(self.name())
    }

    /// Has a vendor's library (`engine=nccl`) take this device memory in place in later collectives, as it does memory of
    /// [`allocator`](crate::device::allocator) anyway: it is registered when a collective first passes some of it. Ranks need
    /// not call this together, but must all pass registered memory to a collective, or none. Without a library nothing
    /// happens. `owner` keeps the memory, and is dropped when it is no longer registered.
    pub fn register_memory(&self, memory: Buffer, owner: Box<dyn Send + Sync>) -> Result<(), Error> {
        let operation = "register_memory";
        self.driver.check_open(operation)?;
        check::lengths(operation, "memory", &[memory])?;
        self.device.lend(operation, memory, owner)
    }

    /// Ends [`register_memory`](Communicator::register_memory) of this memory. Waits for what streams of the device do; memory
    /// that is not registered is passed over.
    pub fn deregister_memory(&self, memory: Buffer) -> Result<(), Error> {
        let operation = "deregister_memory";
        self.driver.check_here(operation)?;
        self.device.give_back(operation, memory)
    }

    /// As [`submit`](Communicator::submit) of a reduction by [`ReduceOp::PreMulSum`] in [`Mode::Stream`], but its factor is one
    /// number in the memory of the same device, as it is there in the order of the stream. That in the operation is not used.
    pub fn submit_with_factor(&self, op: Op, factor: Buffer) -> Result<Work, Error> {
        let error = |expected: String, got: String| UsageError {
            operation: op.kind.name().to_owned(),
            argument: "op",
            expected,
            got,
        };
        let (Some(ReduceOp::PreMulSum(_)), Mode::Stream(stream)) = (op.kind.reduce_op(), op.mode) else {
            let expected = "PREMUL_SUM on a stream, which alone takes a factor in a device's memory".to_owned();
            return Err(error(expected, "another operation".to_owned()).into());
        };
        let (here, dtype) = (Memory::Device(stream.device()), factor.dtype());
        if factor.memory() != here || factor.len() != 1 || !launch::is_factor(dtype) {
            let expected = format!("a factor of one whole or real number on {here}");
            let got = format!("{} × {dtype} on {}", factor.len(), factor.memory());
            return Err(error(expected, got).into());
        }
        let timeout = op.timeout.unwrap_or_else(|| self.timeout());
        Ok(self.begin_on_device(&op, Some(factor), stream, timeout)?.into_work(&self.driver))
    }
}
