//! The communicators of this process, for those who want all flight recorders: a program, or a signal when a job hangs.

use std::io;
use std::path::{Path, PathBuf};

use signal_hook::iterator::Signals;

use crate::engine::driver::Driver;
use crate::sync::{Arc, Mutex, Weak, lock};
use crate::sys::fork::PerProcess;

#[derive(Default)]
struct Live {
    drivers: Vec<Weak<Driver>>,
    /// The signals that a thread listens to.
    signals: Vec<i32>,
}

static LIVE: PerProcess<Mutex<Live>> = PerProcess::unset();

/// Adds a communicator. When `signal` comes, all that have a folder for it write their flight recorders there.
pub(super) fn add(driver: &Arc<Driver>, signal: Option<i32>) -> io::Result<()> {
    let mut live = lock(LIVE.get());
    if let Some(signal) = signal.filter(|signal| !live.signals.contains(signal)) {
        let mut signals = Signals::new([signal])?;
        let listen = move || {
            for _ in signals.forever() {
                drivers().iter().for_each(|driver| driver.with_engine(|engine| engine.dump_configured("a signal")));
            }
        };
        std::thread::Builder::new().name("ncclx_rs_signal".to_owned()).spawn(listen)?;
        live.signals.push(signal);
    }
    live.drivers.retain(|driver| driver.strong_count() > 0);
    live.drivers.push(Arc::downgrade(driver));
    Ok(())
}

fn drivers() -> Vec<Arc<Driver>> {
    lock(LIVE.get()).drivers.iter().filter_map(Weak::upgrade).collect()
}

/// What the flight recorders of all communicators of this process that are open remember; see
/// [`Communicator::dump`](super::Communicator::dump).
pub fn dumps(reason: &str) -> Vec<String> {
    let open = drivers().into_iter();
    open.filter_map(|driver| driver.with_engine(|engine| engine.closed.is_none().then(|| engine.dump(reason))))
        .collect()
}

/// Writes the flight recorders of all communicators of this process that are open; see
/// [`Communicator::write_dump`](super::Communicator::write_dump).
///
/// # Errors
/// What the system says of the folder or of a file.
pub fn write_dumps(folder: &Path, reason: &str) -> io::Result<Vec<PathBuf>> {
    let open = drivers().into_iter();
    let written = open.filter_map(|driver| {
        driver.with_engine(|engine| engine.closed.is_none().then(|| engine.write_dump(folder, reason)))
    });
    written.collect()
}
