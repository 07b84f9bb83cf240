//! The registry of this process's communicators, from which a program or a signal dumps all flight recorders.

use std::io;
use std::path::{Path, PathBuf};

use signal_hook::iterator::Signals;

use crate::engine::driver::Driver;
use crate::engine::heartbeat::InFlight;
use crate::sync::{Arc, Mutex, Weak, lock};
use crate::sys::fork::PerProcess;

#[derive(Default)]
struct Registry {
    drivers: Vec<Weak<Driver>>,
    /// The signals that have a listening thread.
    signals: Vec<i32>,
}

static REGISTRY: PerProcess<Mutex<Registry>> = PerProcess::unset();

/// Adds a communicator. At `signal`, every communicator with a dump directory writes its flight recorder there.
pub(super) fn add(driver: &Arc<Driver>, signal: Option<i32>) -> io::Result<()> {
    let mut registry = lock(REGISTRY.get());
    if let Some(signal) = signal.filter(|signal| !registry.signals.contains(signal)) {
        let mut signals = Signals::new([signal])?;
        let listen = move || {
            for _ in signals.forever() {
                drivers().iter().for_each(|driver| driver.with_engine(|engine| engine.dump_configured("a signal")));
            }
        };
        std::thread::Builder::new().name("ncclx_rs_signal".to_owned()).spawn(listen)?;
        registry.signals.push(signal);
    }
    registry.drivers.retain(|driver| driver.strong_count() > 0);
    registry.drivers.push(Arc::downgrade(driver));
    Ok(())
}

fn drivers() -> Vec<Arc<Driver>> {
    lock(REGISTRY.get()).drivers.iter().filter_map(Weak::upgrade).collect()
}

/// The oldest operation that the rank of this communicator has in flight, in any of its communicators. None where that is not
/// known: if a flight recorder is off, or several ranks of the communicator are in this process, so that others' operations may be
/// those of another rank.
pub(super) fn oldest_in_flight(driver: &Arc<Driver>) -> Option<InFlight> {
    let id = driver.with_engine(|engine| engine.id.clone());
    let (mut ranks, mut all_known, mut own, mut oldest) = (0, true, None, None);
    for other in drivers() {
        let (is_same, is_on, first) = other.with_engine(|engine| {
            let first = engine.context.recorder.oldest_in_flight();
            let first =
                first.map(|record| (record.submitted, InFlight::new(engine.name(), record.call, record.submitted)));
            (engine.id == id, engine.context.recorder.is_on(), first)
        });
        ranks += usize::from(is_same);
        all_known &= is_on;
        if Arc::ptr_eq(&other, driver) {
            own.clone_from(&first);
        }
        oldest = [oldest, first].into_iter().flatten().min_by_key(|(since, _)| *since);
    }
    match (ranks, oldest) {
        (2.., _) => own.map(|(_, in_flight)| in_flight),
        (_, Some((_, in_flight))) => Some(in_flight),
        (_, None) => all_known.then(InFlight::default),
    }
}

/// The dumps of all open communicators of this process; see [`Communicator::dump`](super::Communicator::dump).
pub fn dumps(reason: &str) -> Vec<String> {
    let open = drivers().into_iter();
    open.filter_map(|driver| driver.with_engine(|engine| engine.closed().is_none().then(|| engine.dump(reason))))
        .collect()
}

/// Writes the dumps of all open communicators of this process; see
/// [`Communicator::write_dump`](super::Communicator::write_dump).
///
/// # Errors
/// The system's error if the folder or a file cannot be written.
pub fn write_dumps(folder: &Path, reason: &str) -> io::Result<Vec<PathBuf>> {
    let open = drivers().into_iter();
    let written = open.filter_map(|driver| {
        driver.with_engine(|engine| engine.closed().is_none().then(|| engine.write_dump(folder, reason)))
    });
    written.collect()
}
