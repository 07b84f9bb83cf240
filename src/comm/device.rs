//! Operations on tensors in the memory of a CUDA device.
//!
//! A communicator has one device, that of its first operation there. At this operation all ranks set up together what they
//! share; from then on no rank waits for another one to submit.

use std::time::{Duration, Instant};

use crate::buffer::{Buffer, StreamHandle};
use crate::comm::check;
use crate::comm::communicator::Communicator;
use crate::config::Config;
use crate::device::executor::{Executor, LANES, Ranks, Request};
use crate::device::in_flight::Ends;
use crate::device::setup::{self, Wanted};
use crate::device::words::ControlLayout;
use crate::engine::call::Call;
use crate::engine::collective;
use crate::engine::driver::Driver;
use crate::engine::flight_recorder::Bytes;
use crate::error::{Error, InitError, UsageError};
use crate::op::{Op, OpKind};
use crate::signature::Signature;
use crate::sync::{Arc, Mutex, OnceLock, lock};
use crate::types::{Rank, Source, Tag};
use crate::work::{Entry, Work};

/// What a communicator has on a device.
pub(super) struct DeviceSide {
    /// The algorithm that is set for all ranks, if one is.
    algorithm: Option<String>,
    /// The identity of this rank's host.
    host: String,
    /// The bytes of half of a rank's staging memory.
    staging_bytes: usize,
    executor: OnceLock<Arc<Executor>>,
    /// Held while the ranks set up; why they could not.
    setup: Mutex<Option<Error>>,
}

impl DeviceSide {
    /// Nothing yet.
    pub(super) fn new(config: &Config, host: &str) -> DeviceSide {
        let (algorithm, staging_bytes) = (config.algorithm.clone(), config.device_staging.get());
        DeviceSide {
            algorithm,
            host: host.to_owned(),
            staging_bytes,
            executor: OnceLock::new(),
            setup: Mutex::new(None),
        }
    }

    /// Ends what is on the device: waits for `limit` first.
    pub(super) fn leave(&self, comm: &str, how: &str, limit: Duration) {
        let Some(executor) = self.executor.get() else { return };
        executor.drain(limit);
        let (operation, comm) = ("an operation in flight".to_owned(), comm.to_owned());
        executor.close(Error::Closed { operation, comm, how: how.to_owned() });
    }
}

impl Communicator {
    /// Puts an operation on a stream of the device in whose memory its buffers lie.
    pub(super) fn run_on_device(&self, op: &Op, stream: StreamHandle, timeout: Duration) -> Result<Work, Error> {
        if !self.driver.is_here() {
            return Err(self.driver.forked_error(op.kind.name()));
        }
        match op.kind {
            OpKind::AllToAll { .. }
            | OpKind::Send { .. }
            | OpKind::Recv { .. }
            | OpKind::Put { .. }
            | OpKind::Get { .. }
            | OpKind::Signal { .. }
            | OpKind::WaitSignal { .. } => return Err(check::not_on_devices(op).into()),
            _ => {}
        }
        let checked = check::collective(op, None, self.place())?;
        self.driver.with_engine(|engine| engine.check_open(op.kind.name()))?;
        let executor = self.executor(op, stream.device(), timeout)?;
        let scaling = collective::scaling(op.kind.reduce_op(), checked.dtype, self.size());
        let request = Request {
            collective: checked.collective,
            signature: checked.signature,
            reduce: op.kind.reduce_op(),
            dtype: checked.dtype,
            scaling,
            inputs: &op.inputs,
            outputs: &op.outputs,
            stream,
            timeout,
        };
        executor.collective(&request, self)
    }

    /// The executor for this device, which the ranks set up at the first call.
    fn executor(&self, op: &Op, device: u32, timeout: Duration) -> Result<Arc<Executor>, Error> {
        if let Some(executor) = self.device.executor.get() {
            if executor.device() != device {
                return Err(other_device(op, executor.device(), device).into());
            }
            return Ok(executor.clone());
        }
        let mut failed = lock(&self.device.setup);
        if let Some(error) = &*failed {
            return Err(error.clone());
        }
        if self.device.executor.get().is_none() {
            match self.set_up(device, timeout) {
                Ok(executor) => _ = self.device.executor.set(Arc::new(executor)),
                Err(error) => {
                    *failed = Some(error.clone());
                    return Err(error);
                }
            }
        }
        drop(failed);
        self.executor(op, device, timeout)
    }

    fn set_up(&self, device: u32, timeout: Duration) -> Result<Executor, Error> {
        let messages = Messages { comm: self, timeout };
        let DeviceSide { host, staging_bytes, .. } = &self.device;
        let wanted = Wanted {
            comm: self.name(),
            me: self.rank(),
            device,
            host,
            staging_bytes: *staging_bytes,
            words: ControlLayout::new(self.size(), LANES).count(),
            layout: ControlLayout::VERSION,
            patience: timeout,
        };
        let parts = setup::set_up(&wanted, &mut |own| messages.all_gather(own))?;
        let ends = Arc::new(Reports(self.driver.clone()));
        let own = Executor::new(self.name().to_owned(), self.rank(), self.device.algorithm.clone(), parts, ends);
        // What fails on one rank fails on all. And what may wait for a device is over before anything is put on one.
        let cause = own.as_ref().err().map(Error::to_string).unwrap_or_default();
        let told = messages.all_gather(cause.into_bytes())?;
        let own = own?;
        match told.iter().enumerate().find(|(_, cause)| !cause.is_empty()) {
            None => Ok(own),
            Some((rank, cause)) => Err(InitError::Os {
                comm: self.name().to_owned(),
                what: format!("CUDA on rank {rank}"),
                cause: String::from_utf8_lossy(cause).into_owned(),
            }
            .into()),
        }
    }
}

impl Ranks for Communicator {
    fn begin(&self, signature: Signature, number: u64, inputs: &[Buffer], outputs: &[Buffer]) -> Entry {
        let sum = |buffers: &[Buffer]| buffers.iter().map(|buffer| buffer.bytes()).sum();
        let bytes = Bytes { read: sum(inputs), written: sum(outputs) };
        self.driver.with_engine(|engine| engine.begin_on_device(Call::Collective(signature), number, bytes))
    }

    fn barrier(&self, timeout: Duration) -> Result<(), Error> {
        Messages { comm: self, timeout }.all_gather(Vec::new()).map(|_| ())
    }
}

/// What ranks tell each other to set up, as messages that programs cannot send.
struct Messages<'a> {
    comm: &'a Communicator,
    timeout: Duration,
}

impl Messages<'_> {
    /// Tells every rank some bytes. What all have told, by rank.
    fn all_gather(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, Error> {
        let others = || (0..self.comm.size()).map(Rank::from).filter(|rank| *rank != self.comm.rank());
        let length = u32::try_from(own.len()).expect("some bytes a rank").to_le_bytes();
        for to in others() {
            self.comm.send_away(length.to_vec(), to, Tag::DEVICE)?;
            self.comm.send_away(own.clone(), to, Tag::DEVICE)?;
        }
        let until = Instant::now() + self.timeout;
        let receive = |data: &mut [u8], from| {
            let left = until.saturating_duration_since(Instant::now());
            self.comm.recv_within(data, Source::Rank(from), Tag::DEVICE, Some(left))
        };
        let mut all = vec![Vec::new(); self.comm.size()];
        for from in others() {
            let mut length = [0; 4];
            receive(&mut length, from)?;
            let length = u32::from_le_bytes(length) as usize;
            if length > BYTES_MAX {
                let cause = format!("it announces {length} bytes, more than {BYTES_MAX}");
                return Err(Error::Remote { operation: "set-up of the device".to_owned(), rank: from.0, cause });
            }
            let bytes = &mut all[from.index()];
            bytes.resize(length, 0);
            receive(bytes, from)?;
        }
        all[self.comm.rank().index()] = own;
        Ok(all)
    }
}

/// The most that a rank tells the others at a time.
const BYTES_MAX: usize = 1 << 20;

/// Tells the communicator how operations on its device end.
struct Reports(Arc<Driver>);

impl Ends for Reports {
    fn ended(&self, work: &Work, result: Result<(), Error>) {
        self.0.end(work, result);
    }

    fn loss(&self, operation: &str) -> Option<Error> {
        self.0.with_engine(|engine| engine.loss_of(operation))
    }
}

fn other_device(op: &Op, own: u32, other: u32) -> UsageError {
    UsageError {
        operation: op.kind.name().to_owned(),
        argument: "tensors",
        expected: format!("tensors on cuda:{own}, the device of the communicator's earlier operations"),
        got: format!("tensors on cuda:{other}"),
    }
}
