//! The handle of an operation in flight: whether it is done, its result, and its callbacks.
//!
//! A [`Work`] is completed once, by the engine. A thread that waits for it makes progress meanwhile, through `Drive`, so
//! that no other thread must be woken for an operation that its caller waits for.

use std::fmt;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::sync::{Arc, AtomicBool, AtomicUsize, Mutex, Ordering, lock};
use crate::sys::file_writer::await_written;
use crate::types::Rank;

/// Makes progress on behalf of a waiting thread.
pub(crate) trait Drive: Send + Sync {
    /// Makes progress until `work` is done or `deadline` has passed.
    fn drive(&self, work: &Work, deadline: Option<Instant>);

    /// Notices works that have ended without anybody's progress, as on a device.
    fn poll(&self) {}

    /// Notices soon that `work` has ended, though no thread waits for it.
    fn watch_closely(&self, _work: &Work) {}
}

type Callback = Box<dyn FnOnce(Result<(), Error>) + Send>;

#[derive(Default)]
struct State {
    result: Option<Result<(), Error>>,
    source: Option<Rank>,
    callbacks: Vec<Callback>,
}

/// The identity of a submitted operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// Its name.
    pub(crate) operation: &'static str,
    /// Its position among the communicator's collectives, its messages or its accesses to windows.
    pub(crate) sequence: u64,
    /// Its place in the flight recorder.
    pub(crate) number: u64,
    /// When it was submitted.
    pub(crate) began: Instant,
}

/// The outcome of a submission.
#[derive(Debug)]
pub(crate) enum Submitted {
    Pending(Work),
    /// The operation has succeeded; a handle is made only on request. A receive got its message from the rank.
    Completed(Entry, Option<Rank>),
}

impl Submitted {
    /// Blocks until the operation has ended. Returns the sender of a received message.
    pub(crate) fn wait(self) -> Result<Option<Rank>, Error> {
        match self {
            Submitted::Pending(work) => work.wait(None).map(|()| work.source()),
            Submitted::Completed(_, source) => Ok(source),
        }
    }

    /// The operation's handle.
    pub(crate) fn into_work(self, driver: &Arc<impl Drive + 'static>) -> Work {
        match self {
            Submitted::Pending(work) => work,
            Submitted::Completed(entry, source) => {
                let work = Work::new(driver.clone(), entry);
                work.complete(Ok(()), source);
                work
            }
        }
    }
}

struct Inner {
    done: AtomicBool,
    /// Threads inside `wait`, which run the callbacks before they leave.
    waiters: AtomicUsize,
    state: Mutex<State>,
    driver: Arc<dyn Drive>,
    entry: Entry,
}

/// An operation in flight or done. Clones are the same operation.
#[derive(Clone)]
pub struct Work {
    inner: Arc<Inner>,
}

impl Work {
    /// An operation in flight.
    pub(crate) fn new(driver: Arc<dyn Drive>, entry: Entry) -> Self {
        let state = Mutex::new(State::default());
        let (done, waiters) = (AtomicBool::new(false), AtomicUsize::new(0));
        Work { inner: Arc::new(Inner { done, waiters, state, driver, entry }) }
    }

    /// Whether the operation has ended, well or badly.
    pub fn is_done(&self) -> bool {
        // Acquire: pairs with the Release in `complete`, so that the data the engine wrote is visible.
        self.inner.done.load(Ordering::Acquire)
    }

    /// As [`Work::is_done`], and looks first, where nobody may have noticed the end: an operation on a device ends by itself.
    pub fn poll(&self) -> bool {
        if !self.is_done() {
            self.inner.driver.poll();
        }
        self.is_done()
    }

    /// Has the end noticed within milliseconds, for callbacks that cannot wait. An operation on a device ends by itself, which
    /// without this, if nobody waits or asks, is noticed within a tenth of a second.
    pub fn watch_closely(&self) {
        if !self.is_done() {
            self.inner.driver.watch_closely(self);
        }
    }

    /// The result; none while the operation is in flight.
    pub fn result(&self) -> Option<Result<(), Error>> {
        lock(&self.inner.state).result.clone()
    }

    /// Blocks until the operation has ended. If `timeout` passes before, that is an error, and the operation stays in flight.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<(), Error> {
        if !self.is_done() {
            let deadline = timeout.and_then(|limit| Instant::now().checked_add(limit));
            // Relaxed, here and below: the lock of `state`, which `complete` and `run_callbacks` take, orders them.
            self.inner.waiters.fetch_add(1, Ordering::Relaxed);
            self.inner.driver.drive(self, deadline);
            self.inner.waiters.fetch_sub(1, Ordering::Relaxed);
        }
        self.run_callbacks().unwrap_or_else(|| {
            Err(Error::Timeout {
                operation: format!("waiting for {}", self.inner.entry.operation),
                waited: timeout.unwrap_or_default(),
                detail: "the operation is still in flight".to_owned(),
            })
        })
    }

    /// Calls `callback` with the result: now if the operation has ended, else once it does, on a thread that waits for it or
    /// on the engine's thread for callbacks.
    pub fn on_complete(&self, callback: impl FnOnce(Result<(), Error>) + Send + 'static) {
        let mut state = lock(&self.inner.state);
        match state.result.clone() {
            None => state.callbacks.push(Box::new(callback)),
            Some(result) => {
                drop(state);
                callback(result);
            }
        }
    }

    /// The sender of a received message.
    pub fn source(&self) -> Option<Rank> {
        lock(&self.inner.state).source
    }

    /// The position among the communicator's collectives, or among its point-to-point operations.
    pub fn sequence(&self) -> u64 {
        self.inner.entry.sequence
    }

    /// The operation's place in the flight recorder.
    pub(crate) fn number(&self) -> u64 {
        self.inner.entry.number
    }

    /// The operation's name.
    pub(crate) fn operation(&self) -> &'static str {
        self.inner.entry.operation
    }

    /// Whether both are handles of the same operation.
    pub(crate) fn is(&self, other: &Work) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// When it was submitted.
    pub(crate) fn began(&self) -> Instant {
        self.inner.entry.began
    }

    /// The time since submission.
    pub(crate) fn age(&self) -> Duration {
        self.inner.entry.began.elapsed()
    }

    /// Completes the operation; callbacks wait for [`Work::run_callbacks`]. The first result stays.
    pub(crate) fn complete(&self, result: Result<(), Error>, source: Option<Rank>) {
        let mut state = lock(&self.inner.state);
        if state.result.is_none() {
            state.result = Some(result);
            state.source = source;
            // Release: pairs with the Acquire in `is_done`.
            self.inner.done.store(true, Ordering::Release);
        }
    }

    /// Runs the callbacks of an ended operation that have not run yet, and returns its result; none while it is in flight.
    /// Must be called without an engine lock.
    pub(crate) fn run_callbacks(&self) -> Option<Result<(), Error>> {
        let mut state = lock(&self.inner.state);
        let result = state.result.clone()?;
        let callbacks = std::mem::take(&mut state.callbacks);
        drop(state);
        if result.is_err() {
            // Whoever hears of a failure finds what is written of it.
            await_written();
        }
        for callback in callbacks {
            callback(result.clone());
        }
        Some(result)
    }

    /// Whether an ended operation has callbacks that no waiting thread will run.
    pub(crate) fn wants_callbacks_run(&self) -> bool {
        self.inner.waiters.load(Ordering::Relaxed) == 0 && !lock(&self.inner.state).callbacks.is_empty()
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work")
            .field("operation", &self.inner.entry.operation)
            .field("sequence", &self.inner.entry.sequence)
            .field("result", &self.result())
            .finish()
    }
}
