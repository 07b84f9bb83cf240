//! Passes the engine's log records on to Python's logging.
//!
//! Python takes a record only under its global lock, and no progress thread may wait for that. Such a thread puts the
//! record into a queue of up to [`QUEUE_MAX`] records and continues; a delivery thread passes them on. Records are counted
//! while the queue is full, and their number is logged. After the interpreter's end, records go to the standard error.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use log::{Level, LevelFilter, Log, Metadata, Record};
use ncclx_rs::config::{self, UNKNOWN_HINTS};
use ncclx_rs::sync::lock;
use ncclx_rs::sys::fork::PerProcess;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::shim;

/// Connects the engine's log to Python's logging, at the level of the environment.
pub(crate) fn install(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let asked = config::log_level().map_err(|error| PyValueError::new_err(error.to_string()))?;
    let level = asked.unwrap_or(LevelFilter::Warn);
    let own = py.import("ncclx_rs._logging")?;
    module.add_function(wrap_pyfunction!(flush_log, module)?)?;
    module.add_function(wrap_pyfunction!(finish_log, module)?)?;
    // Before the logger is set: the first access registers for forks, which may log.
    QUEUE.get();
    // A program may repeat an import that failed.
    if DELIVER.set(own.getattr("deliver")?.unbind()).is_ok() && log::set_logger(&Bridge).is_ok() {
        log::set_max_level(level);
        py.import("atexit")?.call_method1("register", (own.getattr("finish")?,))?;
        if asked.is_some() {
            own.call_method1("show", (number(level),))?;
        }
    }
    Ok(())
}

/// Waits up to `seconds` until all records so far are delivered; returns whether they are.
#[pyfunction]
fn flush_log(py: Python<'_>, seconds: f64) -> bool {
    let timeout = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO);
    py.detach(|| QUEUE.get().flush(timeout))
}

/// Delivers the records so far, and none afterwards. Returns false if a handler did not return in time.
#[pyfunction]
fn finish_log(py: Python<'_>) -> bool {
    py.detach(|| QUEUE.get().finish(EXIT_TIMEOUT))
}

/// Warns of unknown hints by Python's warnings. An error is a warning that Python's filters turned into an exception.
pub(crate) fn warn_of_unknown(hints: &[(String, String)]) -> PyResult<()> {
    let unknown = config::unknown_hints(hints);
    if unknown.is_empty() {
        return Ok(());
    }
    Python::attach(|py| py.import("ncclx_rs._logging")?.call_method1("warn_of_hints", (unknown,)).map(drop))
}

/// The engine's logger.
struct Bridge;

impl Log for Bridge {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        // `warn_of_unknown` warns Python programs of these.
        if record.target() != UNKNOWN_HINTS {
            QUEUE.get().push(Entry::of(record));
        }
    }

    fn flush(&self) {}
}

/// A record that owns its text.
struct Entry {
    level: Level,
    target: String,
    text: String,
    file: Option<&'static str>,
    line: Option<u32>,
}

impl Entry {
    fn of(record: &Record<'_>) -> Entry {
        Entry {
            level: record.level(),
            target: record.target().to_owned(),
            text: record.args().to_string(),
            file: record.file_static(),
            line: record.line(),
        }
    }

    /// The record of a number of dropped records.
    fn of_lost(count: u64) -> Entry {
        let text = format!("{count} records were dropped: more came than Python's logging takes");
        Entry { level: Level::Warn, target: "ncclx_rs::log".to_owned(), text, file: None, line: None }
    }

    /// Passes it to Python. Returns false if the interpreter has ended.
    fn deliver(&self) -> bool {
        let Some(deliver) = DELIVER.get() else { return false };
        // Without the file's own name: programs configure loggers by name, and files may be renamed.
        let name = self.target.split("::").take(2).collect::<Vec<_>>().join(".");
        let level = number(self.level.to_level_filter());
        let delivered = Python::try_attach(|py| {
            let record = (name, level, self.file.unwrap_or(""), self.line.unwrap_or(0), &self.text);
            match record.into_pyobject(py) {
                Ok(record) => shim::call(deliver.bind(py), &record),
                Err(error) => error.write_unraisable(py, None),
            }
        });
        delivered.is_some()
    }

    /// Writes it to the standard error.
    fn print(&self) {
        // A failure cannot be reported anywhere.
        let _ = writeln!(std::io::stderr(), "{} {}: {}", self.level, self.target, self.text);
    }
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    entries: VecDeque<Entry>,
    /// The number of records that were dropped.
    lost: u64,
    /// Whether there is a delivery thread.
    is_served: bool,
    /// Whether that thread is delivering a record, which it has taken from the queue.
    is_busy: bool,
    /// Whether the interpreter ends: nothing more is delivered.
    is_over: bool,
}

impl State {
    fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.lost == 0 && !self.is_busy
    }

    fn next(&mut self) -> Option<Entry> {
        let entry = self.entries.pop_front();
        // The number comes after the records before it.
        entry.or_else(|| (self.lost > 0).then(|| Entry::of_lost(std::mem::take(&mut self.lost))))
    }
}

impl Queue {
    /// Takes a record without waiting.
    fn push(&'static self, entry: Entry) {
        let mut state = lock(&self.state);
        if !state.is_over && !state.is_served {
            // The first record in this process, which may be a forked child.
            let thread = std::thread::Builder::new().name("ncclx_rs_log".to_owned());
            state.is_served = thread.spawn(|| self.serve()).is_ok();
        }
        if state.is_over || !state.is_served {
            drop(state);
            entry.print();
        } else if state.entries.len() < QUEUE_MAX {
            state.entries.push_back(entry);
            self.changed.notify_all();
        } else {
            state.lost += 1;
        }
    }

    fn serve(&self) {
        IS_DELIVERY_THREAD.set(true);
        let mut state = lock(&self.state);
        while !state.is_over {
            let Some(entry) = state.next() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.is_busy = true;
            drop(state);
            if !entry.deliver() {
                entry.print();
            }
            state = lock(&self.state);
            state.is_busy = false;
            self.changed.notify_all();
        }
    }

    /// Waits until all records are delivered. The delivery thread does not wait for itself.
    fn flush(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = lock(&self.state);
        while !state.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || IS_DELIVERY_THREAD.get() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Delivers the records, and prints those that are left after `timeout`. Returns whether none were left.
    fn finish(&self, timeout: Duration) -> bool {
        let is_delivered = self.flush(timeout);
        let mut left = Vec::new();
        let mut state = lock(&self.state);
        state.is_over = true;
        left.extend(std::iter::from_fn(|| state.next()));
        drop(state);
        self.changed.notify_all();
        left.iter().for_each(Entry::print);
        is_delivered
    }
}

/// Python's number for a level.
fn number(level: LevelFilter) -> u32 {
    match level {
        LevelFilter::Off => 51,
        LevelFilter::Error => 40,
        LevelFilter::Warn => 30,
        LevelFilter::Info => 20,
        LevelFilter::Debug => 10,
        LevelFilter::Trace => 5,
    }
}

/// The most records that wait for Python.
const QUEUE_MAX: usize = 1024;

/// How long the interpreter's end waits for a slow handler.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// `ncclx_rs._logging.deliver`.
static DELIVER: OnceLock<Py<PyAny>> = OnceLock::new();
static QUEUE: PerProcess<Queue> = PerProcess::unset();

thread_local! {
    /// Whether this is the delivery thread.
    static IS_DELIVERY_THREAD: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}
