//! Locks, atomics and threads of the engine, in one place so that a model checker can replace them.

pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};

/// Locks `mutex`, also after a panic of an earlier holder, which must not end the communicator.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Starts a detached thread. A panic on it ends the process: others would wait for ever for what it was to do.
pub fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    #[cfg(test)]
    if testing::gets_none() {
        return Err(rustix::io::Errno::AGAIN.into());
    }
    let run = || {
        let guard = NoUnwinding;
        run();
        std::mem::forget(guard);
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(run).map(|_| ())
}

/// Ends the process when it is dropped: what a panic has left behind would have others wait for ever, or take memory that is
/// still in use for free. Who comes to the end without one forgets it.
pub(crate) struct NoUnwinding;

impl Drop for NoUnwinding {
    fn drop(&mut self) {
        log::error!("a panic within the engine, which ends the process");
        std::process::abort();
    }
}

/// What tests of processes that get no thread begin with.
#[cfg(test)]
pub(crate) mod testing {
    use std::cell::Cell;

    thread_local! {
        static GETS_NONE: Cell<bool> = const { Cell::new(false) };
    }

    /// Does something while this thread can start no other.
    pub(crate) fn without_threads<T>(f: impl FnOnce() -> T) -> T {
        GETS_NONE.set(true);
        let result = f();
        GETS_NONE.set(false);
        result
    }

    pub(super) fn gets_none() -> bool {
        GETS_NONE.get()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    /// Set in a process whose thread is to panic.
    const PANICS: &str = "NCCLX_RS_TEST_PANICS";

    #[test]
    fn a_panic_on_a_thread_of_the_engine_ends_the_process() {
        if std::env::var_os(PANICS).is_some() {
            super::spawn("panics", || panic!("as it is to")).expect("a thread");
            return std::thread::sleep(Duration::from_secs(60));
        }
        let own = std::env::current_exe().expect("a program");
        let test = "sync::tests::a_panic_on_a_thread_of_the_engine_ends_the_process";
        let mut program = Command::new(own);
        program.args([test, "--exact"]).env(PANICS, "1").stdout(Stdio::null()).stderr(Stdio::null());
        assert_eq!(program.status().expect("it ran").signal(), Some(libc::SIGABRT));
    }
}
