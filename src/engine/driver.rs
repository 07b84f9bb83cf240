//! Which thread makes progress.
//!
//! A thread that waits for a work drives the engine itself: it spins for a short while, then sleeps on the poller. At
//! most one thread sleeps there, the one that owns progress; other waiting threads sleep until progress has no owner. When
//! no thread waits and operations are in flight, a progress thread owns it. An idle communicator's threads all sleep.

use std::time::{Duration, Instant};

use crate::engine::callbacks;
use crate::engine::completion::Finished;
use crate::engine::failures::{Departed, OnLoss};
use crate::engine::heartbeat::{Absence, Heartbeat, InFlight};
use crate::engine::progress::Engine;
use crate::engine::wait_policy::Wait;
use crate::error::Error;
use crate::sync::{self, Arc, AtomicBool, AtomicUsize, Condvar, Mutex, NoUnwinding, Ordering, Weak, lock};
use crate::sys::file_writer::await_written;
use crate::sys::fork::Origin;
use crate::sys::poller::Poller;
use crate::sys::process::current_cpu;
use crate::work::{Drive, Work};

/// What a thread that waits does before it sleeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Polling {
    /// How long it polls before it sleeps.
    pub(crate) time: Duration,
    /// Whether it yields its CPU after every poll: set on oversubscribed hosts. Elsewhere it yields while another rank waits
    /// on its CPU. To sleep and to be woken for each message takes several times as long.
    pub(crate) yield_when_idle: bool,
}

/// Whether a thread owns progress: it alone may sleep on the poller.
#[derive(Default)]
struct Ownership {
    is_owned: bool,
    thread_started: bool,
    closing: bool,
}

/// The shared state of a communicator's threads.
pub(crate) struct Driver {
    /// The driver itself, for the progress thread to hold.
    this: Weak<Driver>,
    engine: Mutex<Engine>,
    poller: Poller,
    ownership: Mutex<Ownership>,
    /// Threads that wait to own progress, or for another thread to complete their work.
    owner_changed: Condvar,
    /// The progress thread, while it has nothing to do.
    progress_thread_wanted: Condvar,
    /// Threads inside `drive_until`, which the progress thread gives way to.
    waiters: AtomicUsize,
    /// Whether the progress owner sleeps on the poller, or is about to.
    asleep: AtomicBool,
    polling: Polling,
    name: String,
    origin: Origin,
}

impl Driver {
    pub(crate) fn new(engine: Engine, poller: Poller, polling: Polling) -> Arc<Driver> {
        Arc::new_cyclic(|this| Driver {
            this: Weak::clone(this),
            name: engine.name().to_owned(),
            origin: Origin::here(),
            engine: Mutex::new(engine),
            poller,
            ownership: Mutex::new(Ownership::default()),
            owner_changed: Condvar::new(),
            progress_thread_wanted: Condvar::new(),
            waiters: AtomicUsize::new(0),
            asleep: AtomicBool::new(false),
            polling,
        })
    }

    /// Runs `f` on the engine, under its lock.
    pub(crate) fn with_engine<T>(&self, f: impl FnOnce(&mut Engine) -> T) -> T {
        f(&mut lock(&self.engine))
    }

    /// As [`with_engine`](Driver::with_engine); none in a forked child, where the lock may be held for ever.
    pub(crate) fn with_engine_here<T>(&self, f: impl FnOnce(&mut Engine) -> T) -> Option<T> {
        self.is_here().then(|| self.with_engine(f))
    }

    /// Makes progress once. True: something moved.
    fn step(&self, woke: bool) -> bool {
        let (moved, finished) = {
            let mut engine = lock(&self.engine);
            (engine.progress(woke), engine.take_finished())
        };
        self.announce(&finished, 1);
        hand_to_callers(finished);
        moved
    }

    /// Wakes the threads whose works ended, of which `own` is the calling one.
    fn announce(&self, finished: &[Work], own: usize) {
        if finished.is_empty() {
            return;
        }
        // Here and below, the engine's lock orders the flags. A thread that waits sets its flag before it takes the lock, and
        // looks at its work after. A thread that completes works does so under the lock, and looks at the flags after.
        // `tests/models` checks that.
        if self.waiters.load(Ordering::SeqCst) > own {
            let _ownership = lock(&self.ownership);
            self.owner_changed.notify_all();
        }
        self.wake();
    }

    /// Wakes the thread that sleeps on the poller, if one does.
    fn wake(&self) {
        if self.asleep.load(Ordering::SeqCst) {
            self.poller.wake();
        }
    }

    /// Tells everyone about works that ended outside `step`, as by an abort.
    pub(crate) fn flush_finished(&self) {
        self.tell(self.with_engine(|engine| engine.take_finished()));
    }

    /// Ends a work that nothing in the engine makes progress on: one of a device.
    pub(crate) fn end(&self, work: &Work, result: Result<(), Error>) {
        let finished = self.with_engine(|engine| {
            engine.end_on_device(work, result);
            engine.take_finished()
        });
        self.announce(&finished, 0);
        hand_to_callers(finished);
    }

    /// Tells everyone about works that have ended, and runs their callbacks. Must be called without an engine lock.
    pub(crate) fn tell(&self, finished: Finished) {
        self.announce(&finished, 0);
        for work in finished {
            work.run_callbacks();
        }
    }

    /// Tells the operations of ranks that are gone, of which some may have been told before. When to call again, though
    /// no more have gone.
    pub(crate) fn departed(&self, departed: &[Departed]) -> Option<Instant> {
        let (finished, due, is_busy) = {
            let mut engine = lock(&self.engine);
            if !departed.is_empty() {
                // What has come before counts.
                engine.progress(true);
            }
            departed.iter().for_each(|departed| engine.departed(departed));
            let due = engine.end_after_loss(Instant::now());
            engine.write_due_dump();
            (engine.take_finished(), due, engine.is_busy())
        };
        if !departed.is_empty() {
            // What moved here may need what a thread that sleeps did not ask the poller for, such as room to write.
            self.wake();
        }
        self.announce(&finished, 0);
        hand_to_callers(finished);
        self.tell_of_loss();
        if is_busy && due.is_some() {
            self.want_progress_thread();
        }
        due
    }

    /// Tells the operations of ranks that wait in a collective, and of those that do not. As which answers this rank is to
    /// [tell](Driver::tell_absence) others what it does meanwhile.
    pub(crate) fn heartbeats_arrive(&self, heartbeats: &[Heartbeat]) -> Vec<Absence> {
        let (finished, is_busy, absences) = {
            let mut engine = lock(&self.engine);
            // What has come before counts.
            engine.progress(true);
            let now = Instant::now();
            heartbeats.iter().for_each(|heartbeat| engine.heartbeat_arrives(heartbeat, now));
            engine.write_due_dump();
            (engine.take_finished(), engine.is_busy(), engine.absences(heartbeats, now))
        };
        // A collective that failed has to tell other ranks, which takes streams and a thread that drives them.
        let hands_over = is_busy && !finished.is_empty();
        // As in `departed`.
        self.wake();
        self.announce(&finished, 0);
        hand_to_callers(finished);
        if hands_over {
            self.want_progress_thread();
        }
        absences
    }

    /// Tells others what this rank does while they wait in a collective that it has not called.
    pub(crate) fn tell_absence(&self, absence: Absence, in_flight: InFlight) {
        self.with_engine(|engine| engine.tell_absence(absence, in_flight));
    }

    /// Has `on_loss` called, on a thread kept for such calls, once a rank is lost.
    pub(crate) fn on_loss(&self, on_loss: OnLoss) {
        if !self.is_here() {
            return;
        }
        // Dropped without the engine's lock.
        let _forgotten = self.with_engine(|engine| engine.set_on_loss(on_loss));
        self.tell_of_loss();
    }

    fn tell_of_loss(&self) {
        if let Some((on_loss, error)) = self.with_engine(Engine::take_on_loss) {
            callbacks::call_elsewhere(Box::new(move || {
                await_written();
                on_loss(error);
            }));
        }
    }

    /// Whether this process made it. A forked child has neither its threads nor its connections.
    pub(crate) fn is_here(&self) -> bool {
        self.origin.is_here()
    }

    /// Refuses an operation that cannot be submitted any more, or that a forked child submits.
    pub(crate) fn check_open(&self, operation: &str) -> Result<(), Error> {
        self.check_here(operation)?;
        self.with_engine(|engine| engine.check_open(operation)).inspect_err(refused)
    }

    /// Refuses an operation in a forked child, where the engine's lock may be held for ever, and streams are the parent's.
    pub(crate) fn check_here(&self, operation: &str) -> Result<(), Error> {
        if self.is_here() { Ok(()) } else { Err(self.forked_error(operation)) }
    }

    /// The error of using it in a forked child.
    pub(crate) fn forked_error(&self, operation: &str) -> Error {
        let how = "made by this process's parent, before the fork".to_owned();
        Error::Closed { operation: operation.to_owned(), comm: self.name.clone(), how }
    }

    /// Has the progress thread go on with what is in flight, and starts it the first time.
    pub(crate) fn wake_progress_thread(&self) -> std::io::Result<()> {
        let mut ownership = lock(&self.ownership);
        if !ownership.thread_started
            && !ownership.closing
            && let Some(driver) = self.this.upgrade()
        {
            sync::spawn(PROGRESS_THREAD, move || driver.run_progress_thread())?;
            ownership.thread_started = true;
        }
        if !ownership.is_owned {
            self.progress_thread_wanted.notify_one();
        }
        drop(ownership);
        self.wake();
        Ok(())
    }

    /// As [`Driver::wake_progress_thread`], where operations are in flight already.
    pub(crate) fn want_progress_thread(&self) {
        if let Err(error) = self.wake_progress_thread() {
            let name = &self.name;
            log::error!(
                "communicator `{name}`: the progress thread could not be started, so that operations go on only while a thread \
                 waits for one: {error}"
            );
        }
    }

    /// Ends the progress thread, which needs no join: it holds the driver's memory itself.
    pub(crate) fn close(&self) {
        lock(&self.ownership).closing = true;
        self.owner_changed.notify_all();
        self.progress_thread_wanted.notify_all();
        self.poller.wake();
    }

    /// Drives until `done` or the deadline, on this thread.
    pub(crate) fn drive_until(&self, done: impl Fn(&Driver) -> bool, deadline: Option<Instant>) {
        // Else others would wait for ever for progress that this thread owns.
        let guard = NoUnwinding;
        self.waiters.fetch_add(1, Ordering::SeqCst);
        if !self.spin_until(&done, deadline) {
            self.sleep_until(&done, deadline);
        }
        let others_wait = self.waiters.fetch_sub(1, Ordering::SeqCst) > 1;
        if others_wait {
            let _ownership = lock(&self.ownership);
            self.owner_changed.notify_all();
        } else if self.with_engine(|engine| engine.is_busy()) {
            self.want_progress_thread();
        }
        std::mem::forget(guard);
    }

    /// Drives without sleeping for a while after the last progress. True: done, or out of time.
    fn spin_until(&self, done: &impl Fn(&Driver) -> bool, deadline: Option<Instant>) -> bool {
        let (mut quiet_since, mut yields) = (None, self.polling.yield_when_idle);
        loop {
            let mut moved = false;
            // Reading the clock takes longer than a turn in which nothing moves.
            let turns = if yields || self.polling.time.is_zero() { 1 } else { TURNS_PER_CLOCK_READ };
            for _ in 0..turns {
                moved |= self.step(false);
                if done(self) {
                    return true;
                }
                std::hint::spin_loop();
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| deadline <= now) {
                return true;
            }
            let since = *quiet_since.get_or_insert(now);
            if moved {
                quiet_since = Some(now);
            } else if now - since >= self.polling.time {
                return false;
            } else {
                // To ranks alone: another program on this core might keep it for milliseconds.
                let wait = if self.polling.yield_when_idle { Wait::Yield } else { self.wait_on_cpu(now) };
                match wait {
                    Wait::Spin => {}
                    Wait::Yield => std::thread::yield_now(),
                    Wait::Sleep => return false,
                }
                yields = wait == Wait::Yield;
            }
        }
    }

    fn wait_on_cpu(&self, now: Instant) -> Wait {
        self.with_engine(|engine| engine.next_wait(current_cpu(), now))
    }

    fn sleep_until(&self, done: &impl Fn(&Driver) -> bool, deadline: Option<Instant>) {
        if !self.become_owner(done, deadline) {
            return;
        }
        let is_in_time = || deadline.is_none_or(|deadline| Instant::now() < deadline);
        while !done(self) && is_in_time() {
            self.sleep(deadline, || done(self));
            if self.step(true) {
                while !done(self) && is_in_time() && self.step(false) {}
            }
        }
        lock(&self.ownership).is_owned = false;
    }

    /// Waits until this thread owns progress. False: done, or out of time.
    fn become_owner(&self, done: &impl Fn(&Driver) -> bool, deadline: Option<Instant>) -> bool {
        let mut ownership = lock(&self.ownership);
        while ownership.is_owned {
            if done(self) || deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return false;
            }
            self.wake();
            let limit =
                deadline.map_or(OWNER_CHECK_INTERVAL, |deadline| deadline.saturating_duration_since(Instant::now()));
            let waited = self.owner_changed.wait_timeout(ownership, limit.min(OWNER_CHECK_INTERVAL));
            ownership = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        ownership.is_owned = true;
        true
    }

    /// Sleeps until a stream moves, the next operation runs out of time, or the deadline passes. With `alert`, not
    /// at all once a thread waits.
    fn sleep(&self, deadline: Option<Instant>, alert: impl Fn() -> bool) {
        self.asleep.store(true, Ordering::SeqCst);
        let next = {
            let mut engine = lock(&self.engine);
            if engine.arm() { Err(()) } else { Ok(engine.next_deadline()) }
        };
        if let Ok(next) = next
            && !alert()
        {
            let until = next.into_iter().chain(deadline).min();
            let timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
            if let Err(error) = self.poller.wait(timeout) {
                // The next turn would say it again.
                static SAID: std::sync::Once = std::sync::Once::new();
                SAID.call_once(|| log::error!("communicator `{}`: waiting for events fails: {error}", self.name));
            }
        }
        self.asleep.store(false, Ordering::SeqCst);
        self.with_engine(Engine::disarm);
    }

    fn run_progress_thread(self: Arc<Self>) {
        loop {
            let mut ownership = lock(&self.ownership);
            loop {
                if ownership.closing {
                    return;
                }
                let free = !ownership.is_owned && self.waiters.load(Ordering::SeqCst) == 0;
                if free && self.with_engine(|engine| engine.is_busy()) {
                    break;
                }
                ownership =
                    self.progress_thread_wanted.wait(ownership).unwrap_or_else(std::sync::PoisonError::into_inner);
            }
            ownership.is_owned = true;
            drop(ownership);
            self.progress_until_wanted();
            lock(&self.ownership).is_owned = false;
            self.owner_changed.notify_all();
        }
    }

    /// Drives until a thread waits, nothing is in flight, or the communicator closes.
    fn progress_until_wanted(&self) {
        loop {
            let (moved, finished, busy) = {
                let mut engine = lock(&self.engine);
                (engine.progress(true), engine.take_finished(), engine.is_busy())
            };
            self.announce(&finished, 0);
            hand_to_callers(finished);
            if !busy || self.waiters.load(Ordering::SeqCst) > 0 || lock(&self.ownership).closing {
                return;
            }
            if !moved {
                self.sleep(None, || self.waiters.load(Ordering::SeqCst) > 0);
            }
        }
    }
}

impl Drive for Driver {
    fn drive(&self, work: &Work, deadline: Option<Instant>) {
        if !self.is_here() {
            return work.complete(Err(self.forked_error(work.operation())), None);
        }
        self.drive_until(|_| work.is_done(), deadline);
    }
}

/// An operation is refused: who hears of a loss finds what is written of it, as where a [`Work`] fails.
pub(crate) fn refused(error: &Error) {
    if matches!(error, Error::PeerLost { .. }) {
        await_written();
    }
}

/// Sees that callbacks are run, but not here: a callback may wait for progress, which is this thread's to make. Threads
/// that wait for a work run its callbacks themselves.
fn hand_to_callers(finished: Finished) {
    let wanted: Vec<Work> = finished.into_iter().filter(Work::wants_callbacks_run).collect();
    if wanted.iter().all(|work| matches!(work.result(), Some(Ok(())))) {
        return wanted.into_iter().for_each(callbacks::run_elsewhere);
    }
    // Else each that has failed would wait for its dump on a thread of its own.
    callbacks::call_elsewhere(Box::new(move || {
        await_written();
        wanted.into_iter().for_each(callbacks::run_elsewhere);
    }));
}

/// What the progress thread is called. It fits into the 15 bytes that Linux keeps, and no other thread's name begins so.
const PROGRESS_THREAD: &str = "ncclx_rs engine";

/// How many turns a thread that spins makes before it looks at the clock.
const TURNS_PER_CLOCK_READ: usize = 16;

/// How often a thread that waits to own progress looks at its work again.
const OWNER_CHECK_INTERVAL: Duration = Duration::from_millis(20);
