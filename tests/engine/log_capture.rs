//! Captures what the engine logs. All tests of this process share one logger.

use std::sync::{Mutex, Once, PoisonError};

struct LogCapture(Mutex<Vec<(log::Level, String)>>);

static LOG_CAPTURE: LogCapture = LogCapture(Mutex::new(Vec::new()));

impl log::Log for LogCapture {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = (record.level(), record.args().to_string());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    fn flush(&self) {}
}

/// Captures records of every level from now on.
pub(crate) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        log::set_logger(&LOG_CAPTURE).expect("no other logger in this process");
        log::set_max_level(log::LevelFilter::Trace);
    });
}

/// The captured records of all tests.
pub(crate) fn lines() -> Vec<(log::Level, String)> {
    LOG_CAPTURE.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
}
