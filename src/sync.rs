//! Locks and atomics of the engine, in one place so that a model checker can replace them.

pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};

/// Locks `mutex`; a panic of an earlier holder does not take the communicator down with it.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
