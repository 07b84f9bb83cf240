//! A connection to one peer: a worker with its one endpoint.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};

use super::context::{Context, RegisteredMemory};
use super::gets::Gets;
use super::library::UcxError;
use super::worker::{Device, Link, Worker};
use crate::sync::Arc;
use crate::sys::lent_bytes::LentBytes;

/// A connection to one peer, by which this process reads the peer's memory while the peer reads this one's. One thread at a time
/// uses it, and has to call [`Endpoint::progress`] again and again: otherwise neither side's reads go on.
///
/// The peer is trusted: over some devices, the library itself reads and writes what a peer names. Dropping it ends all reads.
pub struct Endpoint {
    worker: Worker,
    /// None before it is connected.
    link: Option<Link>,
    gets: Gets,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("is_connected", &self.link.is_some()).finish_non_exhaustive()
    }
}

impl Endpoint {
    /// An endpoint that is not connected.
    ///
    /// # Errors
    /// The system or a device refuses a resource.
    pub fn new(context: &Arc<Context>) -> Result<Endpoint, UcxError> {
        Ok(Endpoint { worker: Worker::new(context)?, link: None, gets: Gets::default() })
    }

    /// By which the peer connects its own endpoint.
    ///
    /// # Errors
    /// The library lacks memory.
    pub fn address(&self) -> Result<Vec<u8>, UcxError> {
        self.worker.address()
    }

    /// Connects to the endpoint with this address. The peer connects to this one's, too.
    ///
    /// # Errors
    /// No device reaches it.
    ///
    /// # Panics
    /// It is connected already.
    pub fn connect(&mut self, address: &[u8]) -> Result<(), UcxError> {
        assert!(self.link.is_none(), "an endpoint connects once");
        self.link = Some(Link::to(&self.worker, address, &Arc::default())?);
        Ok(())
    }

    /// What bytes go through; nothing before it is connected.
    pub fn devices(&self) -> Vec<Device> {
        self.link.as_ref().map_or_else(Vec::new, |link| link.devices(&self.worker))
    }

    /// Lets peers read the bytes, by the key of what is returned.
    ///
    /// # Errors
    /// A device refuses.
    pub fn register(&self, bytes: &LentBytes) -> Result<Arc<RegisteredMemory>, UcxError> {
        RegisteredMemory::of(&self.worker.context, bytes)
    }

    /// Begins to read `len` bytes at `address` of the peer, which the peer's [`RegisteredMemory::key`] opens, to `offset` of
    /// `into`. [`Endpoint::progress`] tells the end by the token.
    ///
    /// # Errors
    /// The memory cannot be registered, or the peer cannot be reached.
    ///
    /// # Panics
    /// The bytes are not all inside `into`, or it is not connected.
    pub fn get(
        &mut self,
        token: u64,
        (address, key): (u64, &[u8]),
        (into, offset, len): (&Arc<LentBytes>, usize, usize),
    ) -> Result<(), UcxError> {
        let link = self.link.as_ref().expect("an endpoint that is connected");
        self.gets.begin((&self.worker, link), token, (address, key), (into, offset, len))
    }

    /// Goes on with both sides' reads, as far as that is possible now. Returns the reads that have ended, and how.
    pub fn progress(&mut self) -> Vec<(u64, Result<(), UcxError>)> {
        self.worker.progress();
        self.gets.take_ended(&self.worker)
    }

    /// Whether this thread may sleep until the [descriptor](AsFd) is readable. Otherwise there is progress to make first.
    ///
    /// # Errors
    /// The system refuses.
    pub fn arm(&mut self) -> Result<bool, UcxError> {
        self.worker.arm()
    }

    /// Why the connection has ended, if it has.
    pub fn failure(&self) -> Option<UcxError> {
        self.link.as_ref()?.failure(&self.worker)
    }

    /// Ends the connection, so that nothing is read any more. False: something did not end.
    fn close(&mut self) -> bool {
        let Some(link) = self.link.take() else { return true };
        let is_closed = link.close(&self.worker);
        self.progress();
        is_closed && self.gets.len() == 0
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let is_closed = self.close();
        if !is_closed {
            log::error!("UCX did not end {} reads of a connection; their memory is never freed", self.gets.len());
            std::mem::forget(std::mem::take(&mut self.gets));
        }
    }
}

impl AsFd for Endpoint {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.worker.as_fd()
    }
}
