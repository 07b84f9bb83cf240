//! Reads of a peer's memory that are under way on one endpoint.
#![allow(unsafe_code, reason = "calls a library in C")]

use std::ffi::c_void;
use std::fmt;
use std::ptr::null_mut;

use super::context::{RegisteredMemory, memory_type_of};
use super::functions::{IN_PROGRESS, OK, RawKey, RequestParams, status_of};
use super::library::UcxError;
use super::worker::{Link, Worker, padded};
use crate::sync::Arc;
use crate::sys::lent_bytes::LentBytes;

/// The reads of one endpoint. Whoever has it closes the endpoint before it drops this, and never frees what has not ended by then.
#[derive(Default)]
pub(super) struct Gets {
    list: Vec<Get>,
}

/// A read under way.
struct Get {
    token: u64,
    request: *mut c_void,
    key: RawKey,
    /// Where it writes to.
    _into: (Arc<RegisteredMemory>, Arc<LentBytes>),
}

// SAFETY: it is used with its endpoint alone.
unsafe impl Send for Get {}

impl fmt::Debug for Gets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} reads", self.list.len())
    }
}

impl Gets {
    /// How many have not been [taken](Gets::take_ended).
    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// Begins to read `len` bytes at `address` of the peer, which the key opens, to `offset` of `into`.
    ///
    /// # Panics
    /// The bytes are not all inside `into`.
    pub(super) fn begin(
        &mut self,
        (worker, link): (&Worker, &Link),
        token: u64,
        (address, key): (u64, &[u8]),
        (into, offset, len): (&Arc<LentBytes>, usize, usize),
    ) -> Result<(), UcxError> {
        let (ucx, functions) = (worker.context.ucx(), worker.functions());
        let registered = RegisteredMemory::of(&worker.context, into)?;
        let (target, packed) = (into.at(offset, len), padded(key));
        let mut key = null_mut();
        // SAFETY: the key is what the library of a trusted peer packed, and zeros behind it; the endpoint lives.
        let status = unsafe { (functions.rkey_unpack)(link.raw(), packed.as_ptr().cast(), &raw mut key) };
        ucx.check("ucp_ep_rkey_unpack", status)?;
        let params = RequestParams::of_memory(registered.raw(), memory_type_of(into));
        // SAFETY: `target` has `len` writable bytes, which are registered and never borrowed, and which `Get` keeps until the
        // request is done; the key was made for this endpoint.
        let begun = unsafe { (functions.get)(link.raw(), target.cast(), len, address, key, &raw const params) };
        let request = match status_of(begun) {
            Err(request) => request,
            Ok(OK) => null_mut(),
            Ok(status) => {
                // SAFETY: unpacked above, and used by nothing.
                unsafe { (functions.rkey_destroy)(key) };
                return Err(ucx.failed("ucp_get_nbx", status));
            }
        };
        self.list.push(Get { token, request, key, _into: (registered, into.clone()) });
        Ok(())
    }

    /// Whether one has ended that was not taken.
    pub(super) fn has_ended(&self, worker: &Worker) -> bool {
        self.list.iter().any(|get| worker.status(get.request) != IN_PROGRESS)
    }

    /// Frees and returns those that have ended, and how.
    pub(super) fn take_ended(&mut self, worker: &Worker) -> Vec<(u64, Result<(), UcxError>)> {
        let mut ended = Vec::new();
        let mut at = 0;
        while at < self.list.len() {
            let status = worker.status(self.list[at].request);
            if status == IN_PROGRESS {
                at += 1;
                continue;
            }
            let get = self.list.swap_remove(at);
            worker.free(get.request);
            // SAFETY: the only read with it has ended.
            unsafe { (worker.functions().rkey_destroy)(get.key) };
            ended.push((get.token, worker.context.ucx().check("ucp_get_nbx", status)));
        }
        ended
    }
}
