//! Operations on tensors of devices through memory of the host and by the engine of the CPU: the setting `engine=host`.
//!
//! So ranks on devices of different vendors and ranks without any make one communicator: all call the same operations of the
//! CPU's engine. The caller's thread waits for its stream, copies and waits for the operation.

use crate::buffer::{Buffer, Buffers};
use crate::comm::check;
use crate::comm::communicator::Communicator;
use crate::error::{Error, InitError, UsageError};
use crate::op::{Mode, Op, OpKind};
use crate::sync::Arc;
use crate::sys::cuda::{Context, CudaError, Current, Device, Stream, StreamHandle, copy_from_host, copy_to_host};
use crate::work::Work;

impl Communicator {
    /// As [`run_through_host`](Communicator::run_through_host), of one operation.
    pub(super) fn begin_through_host(
        &self,
        op: &Op,
        factor: Option<Buffer>,
        stream: StreamHandle,
    ) -> Result<Work, Error> {
        if factor.is_some() {
            let expected = "a factor that is a number of the host, which alone engine=host takes".to_owned();
            let (operation, got) = (op.kind.name().to_owned(), "one in the memory of a device".to_owned());
            return Err(UsageError { operation, argument: "op", expected, got }.into());
        }
        self.run_through_host(std::slice::from_ref(op), stream)
    }

    /// Runs operations together, each as the CPU's engine runs it, and returns the work of the last one, which has ended.
    pub(super) fn run_through_host(&self, ops: &[Op], stream: StreamHandle) -> Result<Work, Error> {
        let operation = ops[0].kind.name();
        let driver = |error: CudaError| Error::Device { operation: operation.to_owned(), cause: error.to_string() };
        for op in ops {
            self.check_through_host(op)?;
        }
        if stream.is_captured().map_err(driver)? {
            let what = "engine=host waits for its stream, which nothing in a CUDA graph can: take engine=streams";
            return Err(self.refused(operation, what));
        }
        let context = Device::new(stream.device()).and_then(Context::primary).map_err(driver)?;
        let stream = Stream::of_caller(&context, stream);
        stream.synchronize().map_err(driver)?;
        let current = context.enter().map_err(driver)?;
        let mut copies = Copies { current: &current, all: Vec::new() };
        let ops: Vec<Op> = ops.iter().map(|op| copies.of(op)).collect::<Result<_, _>>().map_err(driver)?;
        let works: Vec<Result<Work, Error>> =
            ops.iter().map(|op| Ok(self.begin(op)?.into_work(&self.driver))).collect();
        if works.iter().any(|work| matches!(work, Err(error) if !matches!(error, Error::Usage(_)))) {
            // What has failed may have begun, so the copies stay for ever.
            std::mem::forget(std::mem::take(&mut copies.all));
        }
        // Also after an error all are waited for: while one is in flight it uses its copies.
        let ended = works.into_iter().map(|work| work.and_then(|work| work.wait(None).map(|()| work)));
        let ended: Vec<Result<Work, Error>> = ended.collect();
        let last = ended.into_iter().collect::<Result<Vec<Work>, Error>>()?.pop();
        copies.give_back(&context).map_err(driver)?;
        Ok(last.expect("an operation"))
    }

    /// Refuses what only other engines have, before anything is sent.
    fn check_through_host(&self, op: &Op) -> Result<(), Error> {
        check::memory(op)?;
        if op.kind.is_access() || matches!(op.kind, OpKind::AllGatherPersistent { .. }) {
            return Err(self.without_windows(op.kind.name()));
        }
        Ok(())
    }

    /// The error of an operation on a window in the memory of a device.
    pub(super) fn without_windows(&self, operation: &str) -> Error {
        self.refused(operation, "engine=host has no windows in the memory of devices")
    }

    fn refused(&self, operation: &str, cause: &str) -> Error {
        InitError::Config(format!("communicator `{}`: {operation}: {cause}", self.name())).into()
    }
}

/// Copies in memory of the host of what operations read and write on a device.
struct Copies<'a> {
    current: &'a Current<'a>,
    /// Each with its copy: memory that is named several times has one.
    all: Vec<Copied>,
}

struct Copied {
    on_device: Buffer,
    copy: Vec<u8>,
    is_written: bool,
}

impl Copies<'_> {
    /// An operation on copies.
    fn of(&mut self, op: &Op) -> Result<Op, CudaError> {
        let mut copies = |buffers: &[Buffer], is_output| -> Result<Buffers, CudaError> {
            buffers.iter().map(|buffer| self.copy(*buffer, is_output)).collect()
        };
        let (inputs, outputs) = (copies(&op.inputs, false)?, copies(&op.outputs, true)?);
        Ok(Op { kind: op.kind.clone(), inputs, outputs, timeout: op.timeout, mode: Mode::Async })
    }

    fn copy(&mut self, on_device: Buffer, is_output: bool) -> Result<Buffer, CudaError> {
        let known = self.all.iter().position(|known| known.on_device == on_device);
        let index = match known {
            Some(index) => index,
            None => {
                let mut copy = vec![0; on_device.bytes()];
                // Outputs too: not every rank of every operation writes all of its own.
                if let Some(bytes) = on_device.device_bytes().filter(|bytes| !bytes.is_empty()) {
                    copy_to_host(self.current, bytes, &mut copy)?;
                }
                self.all.push(Copied { on_device, copy, is_written: false });
                self.all.len() - 1
            }
        };
        let copied = &mut self.all[index];
        copied.is_written |= is_output;
        Ok(copied.buffer())
    }

    /// Copies what was written to the device. What is put on any stream later finds it.
    fn give_back(self, context: &Arc<Context>) -> Result<(), CudaError> {
        for Copied { on_device, copy, .. } in self.all.iter().filter(|copied| copied.is_written) {
            if let Some(bytes) = on_device.device_bytes().filter(|bytes| !bytes.is_empty()) {
                copy_from_host(self.current, copy, bytes)?;
            }
        }
        // A copy from memory that is not pinned may return when that has only been read.
        Stream::default_of(context).synchronize()
    }
}

impl Copied {
    #[allow(unsafe_code, reason = "the engine's buffer is memory that nobody touches until the operation has ended")]
    fn buffer(&mut self) -> Buffer {
        // SAFETY: the vector's memory stays where it is until `run_through_host` has seen all operations end, or for ever; only
        // then is it read again.
        unsafe { Buffer::from_raw(self.copy.as_mut_ptr(), self.on_device.len(), self.on_device.dtype()) }
    }
}
