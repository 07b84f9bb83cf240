//! A process that is stopped by a signal.

use std::fs::{self, DirEntry};
use std::io;
use std::time::Duration;

/// Waits until all threads of a process that was sent SIGSTOP stand still: the signal alone is for one of them to see.
pub(crate) fn wait_until_stopped(process: impl std::fmt::Display) {
    let runs = |thread: io::Result<DirEntry>| {
        let stat = fs::read_to_string(thread.expect("an entry").path().join("stat")).unwrap_or_default();
        !stat.is_empty() && !stat.contains(") T ")
    };
    while fs::read_dir(format!("/proc/{process}/task")).expect("it is there").any(runs) {
        std::thread::sleep(Duration::from_millis(1));
    }
}
