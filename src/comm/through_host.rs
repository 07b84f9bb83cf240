//! Operations on tensors of devices through memory of the host and by the engine of the CPU: the setting `engine=host`.
//!
//! So ranks on devices of different vendors and ranks without any make one communicator: all call the same operations of the
//! CPU's engine. The caller's thread waits for its stream, copies and waits for the operation.

use std::time::{Duration, Instant};

use crate::buffer::{Buffer, Buffers};
use crate::comm::check::{self, RankAndSize};
use crate::comm::communicator::Communicator;
use crate::deadline::nap;
use crate::engine::progress::Engine;
use crate::error::{Error, InitError, UsageError};
use crate::op::{Mode, Op, OpKind};
use crate::sync::Arc;
use crate::sys::cuda::{
    Context, CudaError, Current, Device, Relaxed, Stream, StreamHandle, copy_from_host, copy_to_host,
};
use crate::types::Source;
use crate::work::Work;

impl Communicator {
    /// Runs operations together, each as the CPU's engine runs it, and returns the work of the last one, which has ended. The time
    /// limit of the first is that of all, and begins when the stream has come so far.
    pub(super) fn run_through_host(
        &self,
        ops: &[Op],
        factor: Option<Buffer>,
        stream: StreamHandle,
    ) -> Result<Work, Error> {
        let operation = ops[0].kind.name();
        // Before the device is asked anything: that fails in a forked child, and such a failure is told to the other ranks.
        self.driver.check_here(operation)?;
        if factor.is_some() {
            let engine = self.device.engine();
            let expected = format!("a factor that is a number of the host, which alone engine={engine} takes");
            let (operation, got) = (operation.to_owned(), "one in the memory of a device".to_owned());
            return Err(UsageError { operation, argument: "op", expected, got }.into());
        }
        if let [op] = ops
            && let Some(work) = self.begin_on_island(op, stream)?
        {
            return Ok(work);
        }
        for op in ops {
            self.check_through_host(op)?;
        }
        self.driver.check_open(operation)?;
        let (mut copies, ops) = match self.copied(ops, stream) {
            Ok(copied) => copied,
            Err(Refusal::Captured) => return Err(self.in_a_graph(operation)),
            Err(Refusal::Failed(error)) => {
                self.tell_failure(&ops[0].kind, &error);
                return Err(error);
            }
        };
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
        copies.give_back().map_err(device_error(operation))?;
        Ok(last.expect("an operation"))
    }

    /// Refuses what only other engines have, and what the CPU's engine would refuse, before anything is sent.
    fn check_through_host(&self, op: &Op) -> Result<(), Error> {
        check::memory(op)?;
        match op.kind {
            OpKind::Send { to, .. } => check::peer(op, "dst", to, self.size())?,
            OpKind::Recv { from: Source::Rank(from), .. } => check::peer(op, "src", from, self.size())?,
            OpKind::Recv { from: Source::Any, .. } => {}
            ref kind if kind.is_access() || matches!(kind, OpKind::AllGatherPersistent { .. }) => {
                return Err(self.device.without_windows(self.name(), op.kind.name()));
            }
            _ => _ = check::collective(op, None, RankAndSize { me: self.rank(), size: self.size() })?,
        }
        Ok(())
    }

    /// Waits for the stream, and copies what operations need.
    fn copied(&self, ops: &[Op], stream: StreamHandle) -> Result<(Copies, Vec<Op>), Refusal> {
        let failed = |error| Refusal::Failed(device_error(ops[0].kind.name())(error));
        // These calls spoil captures of other threads otherwise.
        let _relaxed = Relaxed::enter().map_err(failed)?;
        if stream.is_captured().map_err(failed)? {
            return Err(Refusal::Captured);
        }
        let context = Device::new(stream.device()).and_then(Context::primary).map_err(failed)?;
        let limit = ops[0].timeout.unwrap_or_else(|| self.timeout());
        self.wait_for(&Stream::of_caller(&context, stream), ops[0].kind.name(), limit).map_err(Refusal::Failed)?;
        let current = context.enter().map_err(failed)?;
        let mut copies = Copies { context: context.clone(), all: Vec::new() };
        let mut copied = Vec::new();
        for op in ops {
            let mut copies = |buffers: &[Buffer], is_output| -> Result<Buffers, Refusal> {
                buffers
                    .iter()
                    .map(|buffer| {
                        copies.copy(&current, *buffer, is_output).map_err(|error| match error {
                            NoCopy::Driver(error) => failed(error),
                            NoCopy::Memory(cause) => {
                                let what = format!("memory of the host for {} bytes of a device", buffer.bytes());
                                Refusal::Failed(InitError::Os { comm: self.name().to_owned(), what, cause }.into())
                            }
                        })
                    })
                    .collect()
            };
            let (inputs, outputs) = (copies(&op.inputs, false)?, copies(&op.outputs, true)?);
            copied.push(Op { kind: op.kind.clone(), inputs, outputs, timeout: ops[0].timeout, mode: Mode::Async });
        }
        drop(current);
        Ok((copies, copied))
    }

    /// Waits until the stream has come so far, for `limit` at most, and no longer than this rank is in the communicator.
    pub(super) fn wait_for(&self, stream: &Stream, operation: &str, limit: Duration) -> Result<(), Error> {
        let begin = Instant::now();
        while !stream.is_done().map_err(device_error(operation))? {
            self.driver.check_open(operation)?;
            let waited = begin.elapsed();
            if waited >= limit {
                let detail = "earlier work on its stream has not ended, so that it has not begun".to_owned();
                return Err(Error::Timeout { operation: operation.to_owned(), waited, detail });
            }
            nap(waited);
        }
        Ok(())
    }

    /// Tells the other ranks of a collective that has failed on this rank before it could begin.
    pub(super) fn tell_failure(&self, kind: &OpKind, error: &Error) {
        if matches!(kind, OpKind::Send { .. } | OpKind::Recv { .. }) {
            return;
        }
        let text = error.to_string();
        let is_told =
            |engine: &mut Engine| engine.closed().is_some() || engine.collectives.fail_next(&mut engine.context, &text);
        // After those that are in flight, which end within their time limits.
        self.driver.drive_until(|driver| driver.with_engine(is_told), None);
        self.driver.want_progress_thread();
    }

    /// Refuses an operation on a stream that is being captured.
    pub(super) fn check_no_capture(&self, op: &Op, stream: StreamHandle) -> Result<(), Error> {
        let operation = op.kind.name();
        let asked = Relaxed::enter().and_then(|_relaxed| stream.is_captured());
        match asked.map_err(device_error(operation)) {
            Ok(false) => Ok(()),
            Ok(true) => Err(self.in_a_graph(operation)),
            Err(error) => {
                self.tell_failure(&op.kind, &error);
                Err(error)
            }
        }
    }

    fn in_a_graph(&self, operation: &str) -> Error {
        let engine = self.device.engine();
        let what =
            format!("engine={engine} waits for its stream, which nothing in a CUDA graph can: take engine=streams");
        self.refused(operation, &what)
    }

    fn refused(&self, operation: &str, cause: &str) -> Error {
        InitError::Config(format!("communicator `{}`: {operation}: {cause}", self.name())).into()
    }
}

/// Why nothing has begun.
pub(super) enum Refusal {
    /// The stream is being captured.
    Captured,
    /// The device or the host has failed.
    Failed(Error),
}

/// Why there is no copy.
enum NoCopy {
    Driver(CudaError),
    Memory(String),
}

pub(super) fn device_error(operation: &str) -> impl Fn(CudaError) -> Error {
    move |error| Error::Device { operation: operation.to_owned(), cause: error.to_string() }
}

/// Copies in memory of the host of what operations read and write on a device.
struct Copies {
    context: Arc<Context>,
    /// Each with its copy: memory that is named several times has one.
    all: Vec<Copied>,
}

struct Copied {
    on_device: Buffer,
    copy: Vec<u8>,
    is_written: bool,
}

impl Copies {
    fn copy(&mut self, current: &Current<'_>, on_device: Buffer, is_output: bool) -> Result<Buffer, NoCopy> {
        let known = self.all.iter().position(|known| known.on_device == on_device);
        let index = match known {
            Some(index) => index,
            None => {
                let mut copy = Vec::new();
                copy.try_reserve_exact(on_device.bytes()).map_err(|error| NoCopy::Memory(error.to_string()))?;
                copy.resize(on_device.bytes(), 0);
                // Outputs too: not every rank of every operation writes all of its own.
                if let Some(bytes) = on_device.device_bytes().filter(|bytes| !bytes.is_empty()) {
                    copy_to_host(current, bytes, &mut copy).map_err(NoCopy::Driver)?;
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
    fn give_back(self) -> Result<(), CudaError> {
        let _relaxed = Relaxed::enter()?;
        let current = self.context.enter()?;
        for Copied { on_device, copy, .. } in self.all.iter().filter(|copied| copied.is_written) {
            if let Some(bytes) = on_device.device_bytes().filter(|bytes| !bytes.is_empty()) {
                copy_from_host(&current, copy, bytes)?;
            }
        }
        // A copy from memory that is not pinned may return when that has only been read.
        Stream::default_of(&self.context).synchronize()
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
