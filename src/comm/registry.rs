//! The registry of this process's communicators: from it, a program or a signal dumps all flight recorders, and others are told
//! what this process has in flight.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use signal_hook::iterator::Signals;

use crate::engine::driver::Driver;
use crate::engine::heartbeat::InFlight;
use crate::engine::progress::Engine;
use crate::sync::{self, Arc, Mutex, Weak, lock};
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
                // One that has left knows nothing more of its peers than when it did.
                let dump = |engine: &mut Engine| {
                    if engine.closed().is_some() { None } else { engine.configured_dump("a signal") }
                };
                let files = drivers().into_iter().filter_map(|driver| driver.with_engine(dump));
                files.for_each(|file| file.write_and_tell());
            }
        };
        sync::spawn("ncclx_rs_signal", listen)?;
        registry.signals.push(signal);
    }
    registry.drivers.retain(|driver| driver.strong_count() > 0);
    registry.drivers.push(Arc::downgrade(driver));
    Ok(())
}

fn drivers() -> Vec<Arc<Driver>> {
    lock(REGISTRY.get()).drivers.iter().filter_map(Weak::upgrade).collect()
}

/// The oldest operation that this process has in flight, in any of its communicators, as far as flight recorders are on. None where
/// that is not known. Of a process that has several ranks of some communicator, only the communicator of `driver` counts: whose
/// operations the others have is not known.
pub(super) fn oldest_in_flight(driver: &Arc<Driver>) -> Option<InFlight> {
    let (mut ids, mut has_several_ranks, mut is_known) = (HashSet::new(), false, true);
    let (mut own, mut oldest) = (None, None);
    for other in drivers() {
        let (id, is_on, first) = other.with_engine(|engine| {
            let recorder = &engine.context.recorder;
            let first = recorder.oldest_in_flight().map(|record| (record.submitted, record.call, record.is_on_device));
            (engine.id.clone(), recorder.is_on(), first.map(|first| (first, engine.name().to_owned())))
        });
        has_several_ranks |= !ids.insert(id);
        is_known &= is_on;
        if Arc::ptr_eq(&other, driver) {
            own.clone_from(&first);
        }
        oldest = [oldest, first].into_iter().flatten().min_by_key(|((since, ..), _)| *since);
    }
    let found = if has_several_ranks { own } else { oldest };
    let in_flight = found.map(|((since, call, on_device), comm)| InFlight::new(&comm, call, on_device, since));
    in_flight.or_else(|| (is_known && !has_several_ranks).then(InFlight::nothing))
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
    let dump = |engine: &mut Engine| engine.closed().is_none().then(|| engine.dump_file(folder.to_owned(), reason));
    let files = drivers().into_iter().filter_map(|driver| driver.with_engine(dump));
    files.map(|file| file.write()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use crate::comm::Communicator;
    use crate::comm::store::MemoryStore;
    use crate::sys::fork::testing::holds_in_a_child;
    use crate::types::Rank;
    use crate::{CommOptions, sync::Arc};

    #[test]
    fn a_forked_child_asks_nothing_of_its_parents_engine() {
        let (name, store) = ("parent".to_owned(), Arc::new(MemoryStore::default()));
        let options = CommOptions { name, rank: Rank(0), size: 1, store, timeout: None, hints: Vec::new() };
        let comm = Communicator::new(options).expect("a world of one");
        let (holds, held) = mpsc::channel();
        let (lets_go, let_go) = mpsc::channel();
        std::thread::scope(|scope| {
            // Another thread is in the engine at the fork, and never leaves it in the child.
            let driver = comm.driver.clone();
            scope.spawn(move || {
                driver.with_engine(|_| {
                    holds.send(()).expect("somebody waits");
                    let_go.recv().expect("an answer");
                });
            });
            held.recv().expect("a thread in the engine");
            assert!(holds_in_a_child(|| {
                comm.on_loss(|_| ());
                comm.set_members(vec![Rank(0)]);
                let knows_nothing = comm.host_of(Rank(0)).is_none() && comm.sequence() == 0 && comm.loss().is_none();
                let writes_nothing = comm.dump("asked").is_empty() && comm.write_dump("/".as_ref(), "asked").is_err();
                knows_nothing && writes_nothing && comm.split(&[Rank(0)], "part").is_err()
            }));
            lets_go.send(()).expect("somebody waits");
        });
        assert_eq!(comm.host_of(Rank(0)), Some(0));
    }
}
