//! What the engine has logged in this process, where all tests share one logger.

use std::sync::{Mutex, Once, PoisonError};

struct Diary(Mutex<Vec<(log::Level, String)>>);

static DIARY: Diary = Diary(Mutex::new(Vec::new()));

impl log::Log for Diary {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = (record.level(), record.args().to_string());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    fn flush(&self) {}
}

/// Has everything logged from now on.
pub(crate) fn begin() {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {
        log::set_logger(&DIARY).expect("no other logger in this process");
        log::set_max_level(log::LevelFilter::Trace);
    });
}

/// What was logged, by any test.
pub(crate) fn lines() -> Vec<(log::Level, String)> {
    DIARY.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
}
