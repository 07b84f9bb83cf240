//! Every interleaving of the lock-free parts, by loom: <https://docs.rs/loom>.
//!
//! The modules under test are the engine's own files. They find loom's atomics and locks under the path where the engine
//! has the standard library's.

#![allow(clippy::arc_with_non_send_sync, reason = "loom runs one thread at a time")]

mod engine;
#[path = "../../src/sys/team/pool.rs"]
#[allow(dead_code, reason = "the engine's own tests use the rest")]
mod pool;
#[path = "../../src/device/record.rs"]
mod record;
#[path = "../../src/sys/ring_sync.rs"]
#[allow(unreachable_pub, dead_code, reason = "it is public in the engine, which uses the rest")]
mod ring_sync;
#[path = "../../src/work.rs"]
#[allow(unreachable_pub, dead_code, reason = "it is public in the engine, which uses the rest")]
mod work;

mod completion;
mod memory;
mod progress;
#[path = "record.rs"]
mod records;
mod sys;
mod team;

use ncclx_rs::{error, types};

/// What `crate::sync` is to the engine.
mod sync {
    pub(crate) use std::sync::{Arc, Weak};

    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

    pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().expect("no panic")
    }

    pub(crate) fn spawn(_: &str, run: impl FnOnce() + 'static) -> std::io::Result<()> {
        loom::thread::spawn(run);
        Ok(())
    }

    /// A panic is the model's result here.
    pub(crate) struct NoUnwinding;

    impl Drop for NoUnwinding {
        fn drop(&mut self) {}
    }
}
