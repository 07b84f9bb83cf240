//! The communicator's windows: made and ended by all ranks together, accessed by each alone.

use std::time::Duration;

use smallvec::smallvec;

use crate::buffer::Buffer;
use crate::comm::check;
use crate::comm::communicator::Communicator;
use crate::engine::region::{Region, Words};
use crate::engine::window::{RmaOp, RmaRequest};
use crate::error::{Error, UsageError};
use crate::op::{CollectiveKind, Mode, Op, OpKind};
use crate::window::{Window, WindowId};
use crate::work::{Submitted, Work};

impl Communicator {
    /// Lends `memory` to the other ranks. A collective: every rank calls it, each with as many bytes as it likes, and
    /// it returns when all have. Put, get, signal and wait for signals by [`Communicator::submit`].
    ///
    /// The memory is lent until [`Communicator::window_deregister`] returns or the communicator closes; see [`Buffer`].
    pub fn window_register(&self, memory: Buffer) -> Result<Window, Error> {
        check::lengths(REGISTER, "memory", &[memory])?;
        let id = self.driver.with_engine(|engine| match &engine.closed {
            Some(how) => Err(engine.closed_error(REGISTER, how)),
            // Before any other rank can know that this one has come.
            None => Ok(engine.windows.expose(Region::of(&[memory]))),
        })?;
        let agreed = self.exchange([id.0, memory.bytes() as u64]).and_then(|answers| self.agree(id, &answers));
        if agreed.is_err() {
            self.driver.with_engine(|engine| engine.conceal(id));
            self.driver.flush_finished();
        }
        agreed
    }

    /// Ends a window. A collective: every rank calls it, and it returns when nobody accesses the window any more. What
    /// others have put without a signal that was waited for may not have arrived.
    ///
    /// Also after an error this rank's memory is its owner's again.
    pub fn window_deregister(&self, window: WindowId) -> Result<(), Error> {
        let known = self.driver.with_engine(|engine| match &engine.closed {
            Some(how) => Err(engine.closed_error(DEREGISTER, how)),
            None => engine.windows.window(window).map(|_| ()).ok_or_else(|| unknown(DEREGISTER, window).into()),
        });
        known?;
        self.driver.drive_until(|driver| driver.with_engine(|engine| !engine.windows.accesses_peers(window)), None);
        let all_came = self.window_barrier();
        self.driver.with_engine(|engine| engine.conceal(window));
        self.driver.flush_finished();
        all_came.and_then(|()| self.window_barrier())
    }

    /// Begins an access to a window.
    pub(super) fn access(&self, op: &Op, timeout: Duration) -> Result<Submitted, Error> {
        check::memory(op)?;
        let (argument, window, peer, access) = match op.kind {
            OpKind::Put { window, to, offset } => {
                ("dst", window, to, RmaOp::Put { offset, from: Region::of(&op.inputs) })
            }
            OpKind::Get { window, from, offset } => {
                ("src", window, from, RmaOp::Get { offset, into: Region::of(&op.outputs) })
            }
            OpKind::Signal { window, to } => ("dst", window, to, RmaOp::Signal),
            OpKind::WaitSignal { window, from } => ("src", window, from, RmaOp::WaitSignal),
            _ => unreachable!("the caller has matched on the kind"),
        };
        let name = op.kind.name();
        check::peer(op, argument, peer, self.size())?;
        self.enter(op, |engine, driver| {
            let known = engine.windows.window(window).ok_or_else(|| unknown(name, window))?;
            let range = match &access {
                RmaOp::Put { offset, from } => known.check(peer, *offset, from.len()),
                RmaOp::Get { offset, into } => known.check(peer, *offset, into.len()),
                RmaOp::Signal | RmaOp::WaitSignal => Ok(()),
            };
            range.map_err(|got| UsageError {
                operation: name.to_owned(),
                argument: "offset",
                expected: format!("a range inside the window of rank {peer}"),
                got,
            })?;
            let entry = engine.begin(access.call(peer, window), access.bytes());
            let work = Work::new(driver.clone(), entry);
            engine.submit_rma(RmaRequest { window, peer, access, timeout, work: work.clone() });
            Ok(Submitted::Pending(work))
        })
    }

    /// Every rank's id of the new window and its size.
    fn exchange(&self, mine: [u64; 2]) -> Result<Vec<u64>, Error> {
        let (mut mine, mut all) = (Words::new(mine.to_vec()), Words::new(vec![0; 2 * self.size()]));
        let op = Op {
            kind: OpKind::AllGather,
            inputs: smallvec![mine.buffer()],
            outputs: smallvec![all.buffer()],
            timeout: None,
            mode: Mode::Blocking,
        };
        // Without a limit of its own, the wait lasts until the engine has ended the operation, and with it left `mine`
        // and `all` alone.
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

fn unknown(operation: &str, window: WindowId) -> UsageError {
    UsageError {
        operation: operation.to_owned(),
        argument: "window",
        expected: "a registered window".to_owned(),
        got: window.to_string(),
    }
}

const REGISTER: &str = CollectiveKind::WindowRegister.name();

const DEREGISTER: &str = CollectiveKind::WindowDeregister.name();
