//! Windows of a communicator: all ranks register and deregister them together; each rank accesses them on its own.

use smallvec::smallvec;

use crate::buffer::{Buffer, Memory};
use crate::comm::check;
use crate::comm::communicator::Communicator;
use crate::engine::region::{Region, Words};
use crate::error::Error;
use crate::op::{CollectiveKind, Mode, Op, OpKind};
use crate::window::{Window, WindowId};

impl Communicator {
    /// Exposes `memory` to the other ranks. A collective: every rank calls it, with any number of bytes, and it returns when
    /// all ranks have. [`Communicator::submit`] puts, gets, signals and waits for signals.
    ///
    /// The memory stays exposed until [`Communicator::window_deregister`] returns or the communicator closes; see [`Buffer`].
    /// Memory of a CUDA device must be such as other processes can map: that of [`allocator`](crate::device::allocator), for
    /// example. What streams do with it before is not waited for.
    pub fn window_register(&self, memory: Buffer) -> Result<Window, Error> {
        check::lengths(REGISTER, "memory", &[memory])?;
        let (region, place) = match memory.memory() {
            Memory::Host => (Region::of(&[memory]), 0),
            Memory::Device(device) => {
                self.device.check_device(REGISTER, device)?;
                (Region::default(), 1)
            }
        };
        let id = self.driver.with_engine(|engine| match engine.closed() {
            Some(how) => Err(engine.closed_error(REGISTER, how)),
            // Exposed before another rank can learn that this rank has called.
            None => Ok(engine.windows.expose(region)),
        })?;
        let exchanged = self.exchange([id.0, memory.bytes() as u64, place]);
        let agreed = exchanged.and_then(|answers| self.agree(id, memory, &answers)).and_then(|window| {
            if let Memory::Device(device) = memory.memory() {
                self.device.register_window(self, id, memory, device, self.timeout())?;
            }
            self.driver.with_engine(|engine| engine.windows.set_layout(window.clone()));
            Ok(window)
        });
        if agreed.is_err() {
            self.driver.with_engine(|engine| engine.conceal(id));
            self.driver.flush_finished();
        }
        agreed
    }

    /// Deregisters a window. A collective: every rank calls it, and it returns when no rank accesses the window any more. A
    /// put that no awaited signal follows may not have arrived.
    ///
    /// Also after an error, no rank accesses this rank's memory any more, unless it is a device's and the error says that
    /// accesses are still in flight.
    pub fn window_deregister(&self, window: WindowId) -> Result<(), Error> {
        let known = self.driver.with_engine(|engine| match engine.closed() {
            Some(how) => Err(engine.closed_error(DEREGISTER, how)),
            None => engine
                .windows
                .window(window)
                .map(|_| ())
                .ok_or_else(|| check::unknown_window(DEREGISTER, window).into()),
        });
        known?;
        self.driver.drive_until(|driver| driver.with_engine(|engine| !engine.windows.accesses_peers(window)), None);
        let settled = self.device.settle_window(window, self.timeout());
        let all_came = self.window_barrier();
        self.driver.with_engine(|engine| engine.conceal(window));
        self.device.conceal_window(window);
        self.driver.flush_finished();
        all_came.and_then(|()| self.window_barrier()).and(settled)
    }

    /// Exchanges every rank's id of the new window, its size and whether it is in a device's memory.
    fn exchange(&self, mine: [u64; TOLD]) -> Result<Vec<u64>, Error> {
        let (mut mine, mut all) = (Words::new(mine.to_vec()), Words::new(vec![0; TOLD * self.size()]));
        let op = Op {
            kind: OpKind::AllGather,
            inputs: smallvec![mine.buffer()],
            outputs: smallvec![all.buffer()],
            timeout: None,
            mode: Mode::Blocking,
        };
        // A wait without a timeout lasts until the engine has ended the operation, and no longer uses `mine` and `all`.
        self.collective(&op, Some(CollectiveKind::WindowRegister), self.timeout())?.wait()?;
        Ok(all.get().to_vec())
    }

    fn agree(&self, id: WindowId, memory: Buffer, answers: &[u64]) -> Result<Window, Error> {
        let column = |number| answers.iter().copied().skip(number).step_by(TOLD);
        if let Some((rank, other)) = column(0).enumerate().find(|(_, other)| *other != id.0) {
            let detail = format!("rank {rank} calls it window {other}, rank {} window {id}", self.rank());
            return Err(Error::Mismatch { operation: REGISTER.to_owned(), detail });
        }
        let kind = |place| if place == 0 { "the cpu" } else { "a CUDA device" };
        let own = u64::from(memory.memory() != Memory::Host);
        if let Some((rank, other)) = column(2).enumerate().find(|(_, other)| *other != own) {
            let (other, me, own) = (kind(other), self.rank(), kind(own));
            let detail = format!("rank {rank} exposes memory of {other}, rank {me} memory of {own}");
            return Err(Error::Mismatch { operation: REGISTER.to_owned(), detail });
        }
        let sizes = column(1).map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)).collect();
        Ok(Window::new(id, sizes, memory.memory()))
    }

    fn window_barrier(&self) -> Result<(), Error> {
        let op = Op {
            kind: OpKind::Barrier,
            inputs: smallvec![],
            outputs: smallvec![],
            timeout: None,
            mode: Mode::Blocking,
        };
        self.collective(&op, Some(CollectiveKind::WindowDeregister), self.timeout())?.wait().map(|_| ())
    }
}

/// The words that each rank tells of its part.
const TOLD: usize = 3;

const REGISTER: &str = CollectiveKind::WindowRegister.name();

const DEREGISTER: &str = CollectiveKind::WindowDeregister.name();
