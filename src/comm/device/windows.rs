//! Windows in the memory of a CUDA device.

use std::time::{Duration, Instant};

use super::{DeviceSide, Group, own_device, tell_all};
use crate::buffer::{Buffer, Memory};
use crate::comm::check::{self, RankAndSize};
use crate::deadline::deadline_after;
use crate::device::windows::{Access, AccessRequest};
use crate::engine::call::Call;
use crate::engine::flight_recorder::Bytes;
use crate::error::{Error, InitError};
use crate::op::{Op, OpKind};
use crate::sys::cuda::{Relaxed, StreamHandle};
use crate::types::{Rank, Tag};
use crate::window::{GetPath, WindowId};
use crate::work::Work;

impl DeviceSide {
    /// Refuses a device that is not the communicator's, if it has one.
    pub(in crate::comm) fn check_device(&self, operation: &str, device: u32) -> Result<(), Error> {
        self.executor.get().map_or(Ok(()), |executor| own_device(executor.device(), operation, device))
    }

    /// Lets the other ranks map this one's part of a window, and maps theirs. All ranks call it, with memory of devices.
    pub(in crate::comm) fn register_window(
        &self,
        group: &impl Group,
        window: WindowId,
        memory: Buffer,
        device: u32,
        timeout: Duration,
    ) -> Result<(), Error> {
        if self.goes_through_host() {
            return Err(self.without_windows(group.name(), "window_register"));
        }
        // Mapping memory spoils captures otherwise. Where there is no driver, the setup says so.
        let _relaxed = Relaxed::enter();
        let executor = self.executor(group, "window_register", device, timeout)?;
        // After the setup, in which ranks notice that they are set differently or have devices of several vendors.
        if let Some(why) = self.libraries.no_streams() {
            return Err(InitError::Config(format!("communicator `{}`: window_register: {why}", group.name())).into());
        }
        let are_there = || group.driver().with_engine(|engine| engine.is_whole());
        let RankAndSize { me, size } = group.place();
        let ranks: Vec<Rank> = (0..size).map(Rank::from).collect();
        // What a rank has told of a window that others had given up by then is neither another window's, nor the setup's.
        let mut all_gather = |own| {
            let until = deadline_after(Instant::now(), timeout);
            tell_all(group, "window_register", (&ranks[..], me), (Tag::WINDOW, window.0), own, until)
        };
        executor.windows.register(window, memory, timeout, &mut all_gather, &are_there)
    }

    /// The error of an operation on a window in the memory of a device, where operations go through that of the host.
    pub(in crate::comm) fn without_windows(&self, comm: &str, operation: &str) -> Error {
        let what = format!("engine={} has no windows in the memory of devices", self.engine());
        InitError::Config(format!("communicator `{comm}`: {operation}: {what}")).into()
    }

    /// How a get of a rank's part of a registered window in the memory of devices goes.
    pub(in crate::comm) fn get_path(&self, window: WindowId, rank: Rank) -> GetPath {
        match self.executor.get().is_some_and(|executor| executor.windows.maps(window, rank)) {
            true => GetPath::Mapped,
            false => GetPath::Messages,
        }
    }

    /// Waits until this rank has nothing in flight on its device that accesses a window.
    pub(in crate::comm) fn settle_window(&self, window: WindowId, timeout: Duration) -> Result<(), Error> {
        self.executor.get().map_or(Ok(()), |executor| executor.windows.settle(window, timeout))
    }

    /// Forgets a window, if it is one of a device.
    pub(in crate::comm) fn conceal_window(&self, window: WindowId) {
        if let Some(executor) = self.executor.get() {
            // What other hosts have put is waited for, which spoils captures of other threads otherwise.
            let _relaxed = Relaxed::enter().inspect_err(|error| log::warn!("captures may be spoilt: {error}"));
            executor.windows.conceal(window);
        }
    }

    /// Puts an access to a window on a stream.
    pub(super) fn access(
        &self,
        group: &impl Group,
        op: &Op,
        stream: StreamHandle,
        timeout: Duration,
    ) -> Result<Work, Error> {
        check::memory(op)?;
        check::access_on_device(op)?;
        let sum = |buffers: &[Buffer]| -> usize { buffers.iter().map(|buffer| buffer.bytes()).sum() };
        let (read, written) = (sum(&op.inputs), sum(&op.outputs));
        let (argument, window, peer, access, call): (_, _, Rank, _, _) = match op.kind {
            OpKind::Put { window, to, offset } => {
                ("dst", window, to, Access::Put(offset), Call::Put { bytes: read, to, window })
            }
            OpKind::Get { window, from, offset } => {
                ("src", window, from, Access::Get(offset), Call::Get { bytes: written, from, window })
            }
            OpKind::Signal { window, to } => ("dst", window, to, Access::Signal, Call::Signal { to, window }),
            OpKind::WaitSignal { window, from } => {
                ("src", window, from, Access::WaitSignal, Call::WaitSignal { from, window })
            }
            _ => unreachable!("it has been checked"),
        };
        let name = op.kind.name();
        let RankAndSize { size, .. } = group.place();
        check::peer(op, argument, peer, size)?;
        let driver = group.driver();
        let unknown = || check::unknown_window(name, window);
        driver.with_engine(|engine| {
            engine.check_open(name)?;
            let range = match access {
                Access::Put(offset) => Some((offset, read)),
                Access::Get(offset) => Some((offset, written)),
                Access::Signal | Access::WaitSignal => None,
            };
            let known = engine.windows.window(window).ok_or_else(unknown)?;
            check::access(name, known, Memory::Device(stream.device()), peer, range).map_err(Error::from)
        })?;
        // Without an executor there is no window on a device.
        let executor = self.executor.get().ok_or_else(unknown)?;
        let buffers = if matches!(access, Access::Get(_)) { &op.outputs } else { &op.inputs };
        let request = AccessRequest { window, peer, access, buffers, stream, timeout, call: call.to_string() };
        let bytes = Bytes { read, written };
        executor
            .windows
            .submit(&request, |number| driver.with_engine(|engine| engine.begin_on_device(call, number, bytes)))
    }
}
