//! What the engine logs, for Python's logging.
//!
//! Python takes a record only with its global lock, for which no thread that makes progress may wait. Such a thread puts
//! the record into a queue with room for [`ROOM`] of them and goes on; a thread of our own hands them over. Records that
//! find the queue full are counted, and their number is told. From the interpreter's end on, when Python must not be
//! touched any more, records go to the standard error.

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

use crate::abi;

/// Has Python's logging told of what the engine logs from now on, as far as the environment asks for it.
pub(crate) fn install(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let asked = config::log_level().map_err(|error| PyValueError::new_err(error.to_string()))?;
    let level = asked.unwrap_or(LevelFilter::Warn);
    let own = py.import("ncclx_rs._logging")?;
    module.add_function(wrap_pyfunction!(flush_log, module)?)?;
    module.add_function(wrap_pyfunction!(finish_log, module)?)?;
    // Before there is a logger: it makes itself at home in this process, which may have something to log.
    QUEUE.get();
    // An import that failed is repeated.
    if HAND_OVER.set(own.getattr("hand_over")?.unbind()).is_ok() && log::set_logger(&Bridge).is_ok() {
        log::set_max_level(level);
        py.import("atexit")?.call_method1("register", (own.getattr("finish")?,))?;
        if asked.is_some() {
            own.call_method1("show", (number(level),))?;
        }
    }
    Ok(())
}

/// Waits until all that was logged has been handed over, but not longer than so many seconds. True: it has.
#[pyfunction]
fn flush_log(py: Python<'_>, seconds: f64) -> bool {
    let patience = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO);
    py.detach(|| QUEUE.get().flush(patience))
}

/// Hands over what was logged, and nothing afterwards. False: a handler was not done in time.
#[pyfunction]
fn finish_log(py: Python<'_>) -> bool {
    py.detach(|| QUEUE.get().finish(EXIT_PATIENCE))
}

/// Warns of hints that are not known, by Python's warnings; the error is one that such a warning was made into.
pub(crate) fn warn_of_unknown(hints: &[(String, String)]) -> Result<(), String> {
    let unknown = config::unknown_hints(hints);
    if unknown.is_empty() {
        return Ok(());
    }
    Python::attach(|py| {
        let warned = py.import("ncclx_rs._logging").and_then(|own| own.call_method1("warn_of_hints", (unknown,)));
        warned.map(drop).map_err(|error| error.to_string())
    })
}

/// What the engine's records come to.
struct Bridge;

impl Log for Bridge {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        // Python programs are warned of these in another way: see `warn_of_unknown`.
        if record.target() != UNKNOWN_HINTS {
            QUEUE.get().push(Entry::of(record));
        }
    }

    fn flush(&self) {}
}

/// A record that owns what it says.
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

    /// That so many records found no room.
    fn of_lost(count: u64) -> Entry {
        let text = format!("{count} records were dropped: more came than Python's logging takes");
        Entry { level: Level::Warn, target: "ncclx_rs::log".to_owned(), text, file: None, line: None }
    }

    /// Gives it to Python. False: the interpreter has ended.
    fn deliver(&self) -> bool {
        let Some(hand_over) = HAND_OVER.get() else { return false };
        // Not the file's own name: a program may have set its logger up, and files are renamed.
        let name = self.target.split("::").take(2).collect::<Vec<_>>().join(".");
        let level = number(self.level.to_level_filter());
        let told = Python::try_attach(|py| {
            let record = (name, level, self.file.unwrap_or(""), self.line.unwrap_or(0), &self.text);
            match record.into_pyobject(py) {
                Ok(record) => abi::call_python(hand_over.bind(py), &record),
                Err(error) => error.write_unraisable(py, None),
            }
        });
        told.is_some()
    }

    /// Writes it to the standard error.
    fn print(&self) {
        // There is nobody left to tell of a failure.
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
    /// How many found no room.
    lost: u64,
    /// There is a thread that hands over.
    is_served: bool,
    /// That thread is at one that stands in the queue no more.
    is_busy: bool,
    /// The interpreter ends: nothing is handed over any more.
    is_over: bool,
}

impl State {
    fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.lost == 0 && !self.is_busy
    }

    fn next(&mut self) -> Option<Entry> {
        let entry = self.entries.pop_front();
        // Told behind those that came before.
        entry.or_else(|| (self.lost > 0).then(|| Entry::of_lost(std::mem::take(&mut self.lost))))
    }
}

impl Queue {
    /// Takes a record without waiting for anybody.
    fn push(&'static self, entry: Entry) {
        let mut state = lock(&self.state);
        if !state.is_over && !state.is_served {
            // The first in this process, which may be a forked child.
            let thread = std::thread::Builder::new().name("ncclx_rs_log".to_owned());
            state.is_served = thread.spawn(|| self.serve()).is_ok();
        }
        if state.is_over || !state.is_served {
            drop(state);
            entry.print();
        } else if state.entries.len() < ROOM {
            state.entries.push_back(entry);
            self.changed.notify_all();
        } else {
            state.lost += 1;
        }
    }

    fn serve(&self) {
        SERVES.set(true);
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

    /// Waits until all has been handed over. The thread that hands over does not wait for itself.
    fn flush(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = lock(&self.state);
        while !state.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || SERVES.get() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Hands over what there is, and prints what is left when its time is over. True: nothing was.
    fn finish(&self, patience: Duration) -> bool {
        let is_told = self.flush(patience);
        let mut left = Vec::new();
        let mut state = lock(&self.state);
        state.is_over = true;
        left.extend(std::iter::from_fn(|| state.next()));
        drop(state);
        self.changed.notify_all();
        left.iter().for_each(Entry::print);
        is_told
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

/// How many records wait for Python at most.
const ROOM: usize = 1024;

/// How long the interpreter's end waits for a handler that takes its time.
const EXIT_PATIENCE: Duration = Duration::from_secs(5);

/// `ncclx_rs._logging.hand_over`.
static HAND_OVER: OnceLock<Py<PyAny>> = OnceLock::new();
static QUEUE: PerProcess<Queue> = PerProcess::unset();

thread_local! {
    /// This thread hands records over.
    static SERVES: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}
