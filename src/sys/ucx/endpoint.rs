//! A connection to one peer: a worker with its one endpoint.
#![allow(unsafe_code, reason = "calls a library in C")]

use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::null_mut;

use super::context::{Context, RegisteredMemory};
use super::functions::{IN_PROGRESS, OK, RawKey, RequestParams, status_of};
use super::library::UcxError;
use super::worker::{Device, Link, Worker, padded};
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
    gets: Vec<Get>,
}

/// A read under way.
struct Get {
    token: u64,
    request: *mut c_void,
    key: RawKey,
    /// Where it writes to.
    _into: (Arc<LentBytes>, Arc<RegisteredMemory>),
}

// SAFETY: it is used with its endpoint alone.
unsafe impl Send for Get {}

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
        Ok(Endpoint { worker: Worker::new(context)?, link: None, gets: Vec::new() })
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
        let raw = self.link.as_ref().expect("an endpoint that is connected").raw();
        let (ucx, functions) = (self.worker.context.ucx(), self.worker.functions());
        let registered = RegisteredMemory::of(&self.worker.context, into)?;
        let (target, packed) = (into.at(offset, len), padded(key));
        let mut key = null_mut();
        // SAFETY: the key is what the library of a trusted peer packed, and zeros behind it; the endpoint lives.
        let status = unsafe { (functions.rkey_unpack)(raw, packed.as_ptr().cast(), &raw mut key) };
        ucx.check("ucp_ep_rkey_unpack", status)?;
        let params = RequestParams::of_memory(registered.raw());
        // SAFETY: `target` has `len` writable bytes, which are registered and never borrowed, and which `Get` keeps until the
        // request is done; the key was made for this endpoint.
        let begun = unsafe { (functions.get)(raw, target.cast(), len, address, key, &raw const params) };
        let request = match status_of(begun) {
            Err(request) => request,
            Ok(OK) => null_mut(),
            Ok(status) => {
                // SAFETY: unpacked above, and used by nothing.
                unsafe { (functions.rkey_destroy)(key) };
                return Err(ucx.failed("ucp_get_nbx", status));
            }
        };
        self.gets.push(Get { token, request, key, _into: (into.clone(), registered) });
        Ok(())
    }

    /// Goes on with both sides' reads, as far as that is possible now. Returns the reads that have ended, and how.
    pub fn progress(&mut self) -> Vec<(u64, Result<(), UcxError>)> {
        self.worker.progress();
        let mut ended = Vec::new();
        let mut at = 0;
        while at < self.gets.len() {
            let status = self.worker.status(self.gets[at].request);
            if status == IN_PROGRESS {
                at += 1;
                continue;
            }
            let get = self.gets.swap_remove(at);
            self.release(&get);
            ended.push((get.token, self.worker.context.ucx().check("ucp_get_nbx", status)));
        }
        ended
    }

    /// Frees what a read had that has ended.
    fn release(&self, get: &Get) {
        self.worker.free(get.request);
        // SAFETY: the only read with it has ended.
        unsafe { (self.worker.functions().rkey_destroy)(get.key) };
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
        is_closed && self.gets.is_empty()
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
