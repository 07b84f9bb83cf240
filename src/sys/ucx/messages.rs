//! Active messages: a worker to which many peers send, and this process's ways to send to them.
#![allow(unsafe_code, reason = "calls a library in C")]

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::{c_uint, c_void};
use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{NonNull, null, null_mut};

use super::context::Context;
use super::functions::{
    IN_PROGRESS, MESSAGE_HAS_DATA, MessageAttributes, MessageHandlerParams, OK, RequestParams, Status, status_of,
};
use super::gets::Gets;
use super::library::UcxError;
use super::worker::{Device, Link, Worker};
use crate::sync::{Arc, AtomicBool, Mutex, MutexGuard, Ordering, lock};
use crate::sys::fork::Origin;
use crate::sys::lent_bytes::LentBytes;

/// A worker that takes messages. Whoever expects some calls [`Messenger::progress`] again and again; also what others send goes on
/// by that alone, where no device does it. Clones are the same worker.
///
/// Peers are trusted. In a forked child nothing of it is touched, also when it is dropped.
#[derive(Clone)]
pub struct Messenger {
    shared: Arc<Shared>,
}

/// A message's data.
enum Data {
    /// In the library's memory, and how many bytes.
    Kept(NonNull<u8>, usize),
    /// A copy of few.
    Copied(Box<[u8]>),
}

struct Shared {
    /// None once it is given up.
    worker: Option<Worker>,
    /// Held by whoever calls the library with the worker, and whoever looks at `kept`.
    turn: Mutex<()>,
    /// The messages that have come. The handler writes to it, in calls of the worker.
    kept: Box<UnsafeCell<Vec<Data>>>,
    /// An endpoint has failed.
    has_failed: Arc<AtomicBool>,
    origin: Origin,
}

// SAFETY: the worker and `kept` are used with `turn` held alone; its descriptor, which is all else of the worker, never changes.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn worker(&self) -> (&Worker, MutexGuard<'_, ()>) {
        let turn = lock(&self.turn);
        (self.worker.as_ref().expect("it is there until this is dropped"), turn)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Some(worker) = self.worker.take() else { return };
        if !self.origin.is_here() {
            // Its connections are the parent's.
            return std::mem::forget(worker);
        }
        self.kept.get_mut().drain(..).for_each(|data| release(&worker, &data));
    }
}

impl fmt::Debug for Messenger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Messenger").finish_non_exhaustive()
    }
}

impl Messenger {
    /// A worker without peers.
    ///
    /// # Errors
    /// The system or a device refuses a resource.
    pub fn new(context: &Arc<Context>) -> Result<Messenger, UcxError> {
        let worker = Worker::new(context)?;
        let kept = Box::new(UnsafeCell::new(Vec::new()));
        let params = MessageHandlerParams::keeping(NUMBER, keep, kept.get().cast());
        // SAFETY: the worker was just made, and ends before `kept` does.
        let status = unsafe { (worker.functions().set_message_handler)(worker.raw(), &raw const params) };
        context.ucx().check("ucp_worker_set_am_recv_handler", status)?;
        let shared = Shared {
            worker: Some(worker),
            turn: Mutex::new(()),
            kept,
            has_failed: Arc::default(),
            origin: Origin::here(),
        };
        Ok(Messenger { shared: Arc::new(shared) })
    }

    /// What it was made of.
    pub fn context(&self) -> Arc<Context> {
        self.shared.worker().0.context.clone()
    }

    /// By which peers send to it.
    ///
    /// # Errors
    /// The library lacks memory.
    pub fn address(&self) -> Result<Vec<u8>, UcxError> {
        let (worker, _turn) = self.shared.worker();
        worker.address()
    }

    /// Goes on with what is under way, as far as that is possible now, and appends the messages that have come. Those of a peer
    /// come in any order. True: something moved.
    pub fn progress(&self, into: &mut Vec<Arrived>) -> bool {
        let (worker, _turn) = self.shared.worker();
        let moved = worker.progress();
        // SAFETY: the turn is held, and no call of the worker is under way.
        let kept = unsafe { &mut *self.shared.kept.get() };
        into.extend(kept.drain(..).map(|data| Arrived { shared: self.shared.clone(), data }));
        moved
    }

    /// Whether this thread may sleep until the [descriptor](AsFd) is readable. Otherwise there is progress to make first.
    ///
    /// # Errors
    /// The system refuses.
    pub fn arm(&self) -> Result<bool, UcxError> {
        let (worker, _turn) = self.shared.worker();
        worker.arm()
    }

    /// Whether an endpoint has failed since this was asked last.
    pub fn take_failed(&self) -> bool {
        self.shared.has_failed.load(Ordering::Relaxed) && self.shared.has_failed.swap(false, Ordering::Relaxed)
    }

    /// A way to send to the worker with this address, which takes one back.
    ///
    /// # Errors
    /// No device reaches it.
    pub fn recipient(&self, address: &[u8]) -> Result<Recipient, UcxError> {
        let (worker, turn) = self.shared.worker();
        let link = Link::to(worker, address, &self.shared.has_failed)?;
        drop(turn);
        let (shared, spare, gets) = (self.shared.clone(), Vec::new(), Gets::default());
        Ok(Recipient { shared, link: Some(link), sending: VecDeque::new(), spare, gets, flush: null_mut() })
    }
}

impl AsFd for Messenger {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.worker.as_ref().expect("it is there until this is dropped").as_fd()
    }
}

/// Keeps a message.
///
/// # Safety
/// `argument` is the `kept` of a worker, of which a call is under way that holds its turn; the data are as the library says.
unsafe extern "C" fn keep(
    argument: *mut c_void,
    _: *const c_void,
    _: usize,
    data: *mut c_void,
    len: usize,
    attributes: *const MessageAttributes,
) -> Status {
    // SAFETY: as the caller says.
    let attributes = unsafe { &*attributes };
    let Some(data) = NonNull::new(data.cast::<u8>()).filter(|_| attributes.attributes & MESSAGE_HAS_DATA != 0) else {
        // Nothing, or what would have to be asked for: no message of ours.
        return OK;
    };
    // SAFETY: as the caller says; nobody else refers to it meanwhile.
    let kept = unsafe { &mut *argument.cast::<Vec<Data>>() };
    if len > COPIED_MAX {
        kept.push(Data::Kept(data, len));
        return IN_PROGRESS;
    }
    // What the library keeps takes thousands of bytes, also for few.
    // SAFETY: so many bytes, which stay until this returns.
    kept.push(Data::Copied(unsafe { std::slice::from_raw_parts(data.as_ptr(), len) }.into()));
    OK
}

/// Gives a message's data back.
fn release(worker: &Worker, data: &Data) {
    if let Data::Kept(data, _) = data {
        // SAFETY: the worker's, which the handler has kept and nobody has given back.
        unsafe { (worker.functions().release_message)(worker.raw(), data.as_ptr().cast()) };
    }
}

/// A message that has come. One of more than [`COPIED_MAX`] bytes lies in the library's memory.
pub struct Arrived {
    shared: Arc<Shared>,
    data: Data,
}

// SAFETY: nobody else refers to the data, and they are given back with the worker's turn held.
unsafe impl Send for Arrived {}

impl Deref for Arrived {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.data {
            // SAFETY: so many bytes, which the library leaves alone until they are given back.
            Data::Kept(data, len) => unsafe { std::slice::from_raw_parts(data.as_ptr(), *len) },
            Data::Copied(bytes) => bytes,
        }
    }
}

impl fmt::Debug for Arrived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arrived").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl Drop for Arrived {
    fn drop(&mut self) {
        if matches!(self.data, Data::Kept(..)) && self.shared.origin.is_here() {
            let (worker, _turn) = self.shared.worker();
            release(worker, &self.data);
        }
    }
}

/// A peer to which messages are sent. Dropping it ends the connection, and what is under way.
pub struct Recipient {
    shared: Arc<Shared>,
    /// None once it is closed.
    link: Option<Link>,
    /// Messages of which the library still needs the bytes, the oldest first.
    sending: VecDeque<Sending>,
    /// Memory of earlier messages.
    spare: Vec<Vec<u8>>,
    /// Reads of the peer's memory.
    gets: Gets,
    /// A request that ends once all has left; null if there is none.
    flush: *mut c_void,
}

/// A message that is being sent.
struct Sending {
    request: *mut c_void,
    bytes: Vec<u8>,
}

// SAFETY: the requests are used with the worker's turn held alone.
unsafe impl Send for Recipient {}

impl fmt::Debug for Recipient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recipient").field("sending", &self.sending.len()).finish_non_exhaustive()
    }
}

impl Recipient {
    /// Memory for a message, empty.
    pub fn buffer(&mut self, capacity: usize) -> Vec<u8> {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.reserve(capacity);
        bytes
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The connection has failed.
    pub fn send(&mut self, bytes: Vec<u8>) -> Result<(), UcxError> {
        let (worker, _turn) = self.shared.worker();
        let link = self.link.as_ref().expect("it is open until this is dropped");
        let params = RequestParams::eager();
        // SAFETY: the endpoint lives, and the bytes stay where they are until the request has ended, or for ever.
        let begun = unsafe {
            let (data, len) = (bytes.as_ptr().cast(), bytes.len());
            (worker.functions().send_message)(link.raw(), NUMBER, null(), 0, data, len, &raw const params)
        };
        match status_of(begun) {
            Ok(OK) => give_back(&mut self.spare, bytes),
            Ok(status) => return Err(worker.context.ucx().failed("ucp_am_send_nbx", status)),
            Err(request) => self.sending.push_back(Sending { request, bytes }),
        }
        Ok(())
    }

    /// Takes back the memory of messages that have left. True: the library has the bytes of all.
    pub fn sweep(&mut self) -> bool {
        let (worker, _turn) = self.shared.worker();
        while let Some(Sending { request, .. }) = self.sending.front()
            && worker.status(*request) != IN_PROGRESS
            && let Some(sent) = self.sending.pop_front()
        {
            worker.free(sent.request);
            give_back(&mut self.spare, sent.bytes);
        }
        self.sending.is_empty()
    }

    /// Whether all that was sent has left this process, so that it survives its end.
    ///
    /// # Errors
    /// The connection has failed.
    pub fn flush(&mut self) -> Result<bool, UcxError> {
        let (worker, _turn) = self.shared.worker();
        let link = self.link.as_ref().expect("it is open until this is dropped");
        let ended = if self.flush.is_null() {
            let params = RequestParams::plain();
            // SAFETY: the endpoint lives.
            status_of(unsafe { (worker.functions().ep_flush)(link.raw(), &raw const params) })
        } else {
            match worker.status(self.flush) {
                IN_PROGRESS => Err(self.flush),
                status => {
                    worker.free(self.flush);
                    Ok(status)
                }
            }
        };
        self.flush = ended.err().unwrap_or(null_mut());
        match ended {
            Ok(status) => worker.context.ucx().check("ucp_ep_flush_nbx", status).map(|()| true),
            Err(_) => Ok(false),
        }
    }

    /// Begins to read `len` bytes at `address` of the peer, which the peer's [`RegisteredMemory::key`] opens, to `offset` of
    /// `into`. [`Recipient::take_got`] tells the end by the token, after progress of the worker.
    ///
    /// # Errors
    /// The memory cannot be registered, or the peer cannot be reached.
    ///
    /// # Panics
    /// The bytes are not all inside `into`.
    ///
    /// [`RegisteredMemory::key`]: super::RegisteredMemory::key
    pub fn get(
        &mut self,
        token: u64,
        from: (u64, &[u8]),
        into: (&Arc<LentBytes>, usize, usize),
    ) -> Result<(), UcxError> {
        let (worker, _turn) = self.shared.worker();
        let link = self.link.as_ref().expect("it is open until this is dropped");
        self.gets.begin((worker, link), token, from, into)
    }

    /// The reads that have ended since this was asked last, and how.
    pub fn take_got(&mut self) -> Vec<(u64, Result<(), UcxError>)> {
        let (worker, _turn) = self.shared.worker();
        self.gets.take_ended(worker)
    }

    /// Whether a read has ended that was not taken.
    pub fn has_got(&self) -> bool {
        let (worker, _turn) = self.shared.worker();
        self.gets.has_ended(worker)
    }

    /// What bytes go through.
    pub fn devices(&self) -> Vec<Device> {
        let (worker, _turn) = self.shared.worker();
        self.link.as_ref().map_or_else(Vec::new, |link| link.devices(worker))
    }

    /// Why the connection has failed, if it has.
    pub fn failure(&self) -> Option<UcxError> {
        let (worker, _turn) = self.shared.worker();
        self.link.as_ref()?.failure(worker)
    }
}

impl Drop for Recipient {
    fn drop(&mut self) {
        let Some(link) = self.link.take() else { return };
        if !self.shared.origin.is_here() {
            // It is the parent's, as in the messenger.
            std::mem::forget((link, std::mem::take(&mut self.sending), std::mem::take(&mut self.gets)));
            return;
        }
        let (worker, _turn) = self.shared.worker();
        let is_closed = link.close(worker);
        self.gets.take_ended(worker);
        if self.gets.len() > 0 {
            log::error!("UCX did not end {} reads of a connection; their memory is never freed", self.gets.len());
            std::mem::forget(std::mem::take(&mut self.gets));
        }
        let is_over = |request| worker.status(request) != IN_PROGRESS;
        if is_closed && self.sending.iter().all(|sending| is_over(sending.request)) && is_over(self.flush) {
            self.sending.drain(..).for_each(|sent| worker.free(sent.request));
            worker.free(self.flush);
        } else {
            log::error!("UCX did not end {} sends of a connection; their memory is never freed", self.sending.len());
            std::mem::forget(std::mem::take(&mut self.sending));
        }
    }
}

/// Keeps the memory of a message for a later one.
fn give_back(spare: &mut Vec<Vec<u8>>, mut bytes: Vec<u8>) {
    if spare.len() < SPARE_MAX {
        bytes.clear();
        spare.push(bytes);
    }
}

/// The longest message of which a copy is kept.
pub const COPIED_MAX: usize = 1024;

/// The number of our active messages.
const NUMBER: c_uint = 0;

/// How many messages' memory is kept for one peer.
const SPARE_MAX: usize = 4;

#[cfg(test)]
mod tests;
