//! Windows of a communicator: all ranks register and deregister them together; each rank accesses them on its own.

use smallvec::smallvec;

use crate::buffer::Buffer;
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
    pub fn window_register(&self, memory: Buffer) -> Result<Window, Error> {
        check::lengths(REGISTER, "memory", &[memory])?;
        let id = self.driver.with_engine(|engine| match engine.closed() {
            Some(how) => Err(engine.closed_error(REGISTER, how)),
            // Exposed before another rank can learn that this rank has called.
            None => Ok(engine.windows.expose(Region::of(&[memory]))),
        })?;
        let agreed = self.exchange([id.0, memory.bytes() as u64]).and_then(|answers| self.agree(id, &answers));
        if agreed.is_err() {
            self.driver.with_engine(|engine| engine.conceal(id));
            self.driver.flush_finished();
        }
        agreed
    }

    /// Deregisters a window. A collective: every rank calls it, and it returns when no rank accesses the window any more. A
    /// put that no awaited signal follows may not have arrived.
    ///
    /// Also after an error, no rank accesses this rank's memory any more.
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
        let all_came = self.window_barrier();
        self.driver.with_engine(|engine| engine.conceal(window));
        self.driver.flush_finished();
        all_came.and_then(|()| self.window_barrier())
    }

    /// Exchanges every rank's id of the new window and its size.
    fn exchange(&self, mine: [u64; 2]) -> Result<Vec<u64>, Error> {
        let (mut mine, mut all) = (Words::new(mine.to_vec()), Words::new(vec![0; 2 * self.size()]));
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

    fn agree(&self, id: WindowId, answers: &[u64]) -> Result<Window, Error> {
        let ids = answers.iter().step_by(2);
        let sizes = answers.iter().skip(1).step_by(2);
        if let Some((rank, other)) = ids.enumerate().find(|(_, other)| **other != id.0) {
            let detail = format!("rank {rank} calls it window {other}, rank {} window {id}", self.rank());
            return Err(Error::Mismatch { operation: REGISTER.to_owned(), detail });
        }
        let window = Window::new(id, sizes.map(|bytes| usize::try_from(*bytes).unwrap_or(usize::MAX)).collect());
        self.driver.with_engine(|engine| engine.windows.set_layout(window.clone()));
        Ok(window)
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

const REGISTER: &str = CollectiveKind::WindowRegister.name();

const DEREGISTER: &str = CollectiveKind::WindowDeregister.name();
