//! Threads that do parts of the work of a thread that calls.
//!
//! The caller lays its work out, takes parts of it as the others do, and waits for the parts that others have taken. So a
//! thread that does not run holds nothing up, and what the work refers to outlives it. One piece of work is shared at a time;
//! who comes meanwhile does its own alone.
#![allow(unsafe_code, reason = "threads that outlive a call work on what the call has borrowed")]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::time::{Duration, Instant};

use crate::sync::{self, Arc, AtomicUsize, Condvar, Mutex, Ordering, lock};

/// Work of so many parts.
struct Job<'a> {
    part: &'a (dyn Fn(usize) + Sync),
    count: usize,
    /// The first part that nobody has taken.
    next: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Job<'_> {
    /// Does parts until all are taken. A panic is kept for the caller, and nobody takes more.
    fn work(&self) {
        let parts = || {
            loop {
                // Relaxed: only the number counts. The pool's lock orders what the parts read and write.
                let index = self.next.fetch_add(1, Ordering::Relaxed);
                if index >= self.count {
                    return;
                }
                (self.part)(index);
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(parts)) {
            self.next.store(self.count, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(panic);
        }
    }
}

/// The work that is laid out.
#[derive(Clone, Copy)]
struct Laid(*const Job<'static>);

// SAFETY: whoever gets it under the pool's lock is counted as `inside`, and until then, and until all that are have left, the
// caller keeps the work where it is. All that is in it may be used by several threads.
unsafe impl Send for Laid {}

#[derive(Default)]
struct State {
    laid: Option<Laid>,
    /// How many more threads may join in.
    places: usize,
    threads: usize,
    asleep: usize,
    /// The system gives no more threads.
    is_refused: bool,
    #[cfg(test)]
    is_closed: bool,
}

/// The threads, which are started when they are first needed, and sleep when they are not.
pub(crate) struct Pool {
    /// Held by the thread whose work is shared.
    caller: Mutex<()>,
    state: Mutex<State>,
    /// How often work was laid out; changes under the lock.
    calls: AtomicUsize,
    called: Condvar,
    /// How many threads are at the work; changes under the lock.
    inside: AtomicUsize,
    left: Condvar,
    /// How long a thread looks for what it waits for before it sleeps.
    patience: Duration,
    /// What each thread does first.
    begin: fn(),
}

impl Pool {
    pub(crate) fn new(patience: Duration, begin: fn()) -> Arc<Pool> {
        Arc::new(Pool {
            caller: Mutex::new(()),
            state: Mutex::new(State::default()),
            calls: AtomicUsize::new(0),
            called: Condvar::new(),
            inside: AtomicUsize::new(0),
            left: Condvar::new(),
            patience,
            begin,
        })
    }

    /// Calls `part` once for each number below `count`, on this thread and up to `others` more. Returns when all are done.
    ///
    /// # Panics
    /// As `part` does, once nobody is at the work any more.
    pub(crate) fn share(self: &Arc<Pool>, others: usize, count: usize, part: &(dyn Fn(usize) + Sync)) {
        let job = Job { part, count, next: AtomicUsize::new(0), panic: Mutex::new(None) };
        match self.caller.try_lock() {
            Ok(_caller) => {
                self.start(others);
                self.lay_out(&job, others);
                job.work();
                self.clear();
            }
            Err(_) => job.work(),
        }
        let panic = lock(&job.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Starts threads until there are so many, if the system lets it.
    fn start(self: &Arc<Pool>, others: usize) {
        while self.needs_thread(others) {
            let pool = Arc::clone(self);
            match sync::spawn(THREAD, move || pool.serve()) {
                Ok(()) => lock(&self.state).threads += 1,
                Err(error) => {
                    let mut state = lock(&self.state);
                    state.is_refused = true;
                    let threads = state.threads;
                    drop(state);
                    log::warn!(
                        "the system gives no thread for long copies ({error}): {threads} of {others} share them"
                    );
                }
            }
        }
    }

    fn needs_thread(&self, others: usize) -> bool {
        let state = lock(&self.state);
        state.threads < others && !state.is_refused
    }

    fn lay_out(&self, job: &Job<'_>, others: usize) {
        let mut state = lock(&self.state);
        state.laid = Some(Laid(ptr::from_ref(job).cast()));
        state.places = others;
        // Relaxed: who sees it takes the lock next.
        self.calls.fetch_add(1, Ordering::Relaxed);
        let woken = state.asleep.min(others);
        drop(state);
        (0..woken).for_each(|_| self.called.notify_one());
    }

    /// Takes the work away, and waits for those that are at it.
    fn clear(&self) {
        lock(&self.state).laid = None;
        // Acquire: pairs with the Release of those that leave.
        let is_left = || self.inside.load(Ordering::Acquire) == 0;
        if self.looks_until(is_left) {
            return;
        }
        let mut state = lock(&self.state);
        while !is_left() {
            state = self.left.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    /// What a thread of the pool does.
    fn serve(&self) {
        (self.begin)();
        let mut seen = 0;
        while let Some(laid) = self.next_work(&mut seen) {
            // SAFETY: this thread is inside, as `Laid` says.
            unsafe { &*laid.0 }.work();
            let state = lock(&self.state);
            if self.inside.fetch_sub(1, Ordering::Release) == 1 {
                self.left.notify_all();
            }
            drop(state);
        }
    }

    /// Waits for work that was laid out after `seen`, and enters it. None: the pool is closed.
    fn next_work(&self, seen: &mut usize) -> Option<Laid> {
        loop {
            self.looks_until(|| self.calls.load(Ordering::Relaxed) != *seen);
            let mut state = lock(&self.state);
            while self.calls.load(Ordering::Relaxed) == *seen {
                #[cfg(test)]
                if state.is_closed {
                    return None;
                }
                state.asleep += 1;
                state = self.called.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
                state.asleep -= 1;
            }
            *seen = self.calls.load(Ordering::Relaxed);
            if let Some(laid) = state.laid
                && state.places > 0
            {
                state.places -= 1;
                self.inside.fetch_add(1, Ordering::Relaxed);
                return Some(laid);
            }
        }
    }

    /// Looks for a while whether `is_so`. True: it is.
    fn looks_until(&self, is_so: impl Fn() -> bool) -> bool {
        if self.patience.is_zero() {
            return is_so();
        }
        let began = Instant::now();
        while began.elapsed() < self.patience {
            for _ in 0..LOOKS_PER_TIME {
                if is_so() {
                    return true;
                }
                std::hint::spin_loop();
            }
        }
        is_so()
    }

    /// How many threads there are, and whether the system gives more.
    #[cfg(test)]
    pub(crate) fn threads(&self) -> (usize, bool) {
        let state = lock(&self.state);
        (state.threads, !state.is_refused)
    }

    /// Ends the threads.
    #[cfg(test)]
    pub(crate) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.called.notify_all();
    }
}

const THREAD: &str = "ncclx_rs team";

/// Reading the clock takes longer than a look.
const LOOKS_PER_TIME: usize = 64;
