//! The receiving end of a stream over several connections.

use std::io::Write;

use crate::error::LinkDown;
use crate::sync::{Arc, AtomicBool, Mutex, Ordering, lock};
use crate::sys::poller::Watched;
use crate::transport::handshake::is_passing;
use crate::transport::tcp::channel::Source;
use crate::transport::tcp::greeting::Caller;
use crate::transport::tcp::rails::link::Link;
use crate::transport::tcp::rails::receiver::Receiver;

/// Connections that have come for a stream, which takes them in when it is read.
#[derive(Debug, Default)]
pub(super) struct Joining {
    callers: Mutex<Vec<Watched<Caller>>>,
    is_any: AtomicBool,
}

impl Joining {
    pub(super) fn push(&self, caller: Watched<Caller>) {
        lock(&self.callers).push(caller);
        // Read by `take`.
        self.is_any.store(true, Ordering::Release);
    }

    fn take(&self) -> Vec<Watched<Caller>> {
        // Written by `push`.
        if !self.is_any.load(Ordering::Acquire) {
            return Vec::new();
        }
        self.is_any.store(false, Ordering::Relaxed);
        std::mem::take(&mut *lock(&self.callers))
    }

    fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Acquire)
    }
}

impl Link for Watched<Caller> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize, LinkDown> {
        match self.stream.write(bytes) {
            Err(error) if is_passing(&error) => Ok(0),
            outcome => outcome.map_err(LinkDown::from),
        }
    }

    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        Source::read(self, into)
    }

    fn has_more(&mut self) -> bool {
        Source::has_more(self)
    }
}

/// The rails of a stream, as one source of bytes.
pub(super) struct Rails {
    receiver: Receiver<Watched<Caller>>,
    joining: Arc<Joining>,
}

impl Rails {
    /// A stream that is to have so many rails, which come by `joining`.
    pub(super) fn new(rails: usize, joining: Arc<Joining>) -> Rails {
        Rails { receiver: Receiver::new(rails), joining }
    }
}

impl Source for Rails {
    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        self.joining.take().into_iter().for_each(|caller| self.receiver.add(caller));
        self.receiver.read(into)
    }

    fn has_more(&mut self) -> bool {
        self.joining.is_any() || self.receiver.has_more()
    }
}
