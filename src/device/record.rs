//! Records in memory that processes share: one writes, the others read, and none waits for another.
//!
//! A record's mark tells which one it is. A writer that dies halfway leaves a record that nobody reads.

use crate::sync::{AtomicU64, Ordering, fence};

/// Writes the record `mark`, which is not zero, in place of the one before: `store` stores what it consists of.
///
/// Then the caller may look at records of others: **of two ranks that publish one and then look at the other's, at least one
/// finds it.** For both fences below have a place in the one order of all such fences. The rank whose fence comes second looks
/// after it, and the other has stored its mark before the first, so the look finds that mark, or a later one.
pub(crate) fn publish(place: &AtomicU64, mark: u64, store: impl FnOnce()) {
    place.store(0, Ordering::Relaxed);
    // With the fence of `read`: who reads some of the new record finds that the old mark is gone.
    fence(Ordering::Release);
    store();
    // With the load of `read`: who finds the mark reads all of the record.
    place.store(mark, Ordering::Release);
    fence(Ordering::SeqCst);
}

/// Reads the record `mark` by `load`; nothing if another is there, or comes meanwhile.
pub(crate) fn read<T>(place: &AtomicU64, mark: u64, load: impl FnOnce() -> T) -> Option<T> {
    if place.load(Ordering::Acquire) != mark {
        return None;
    }
    let record = load();
    fence(Ordering::Acquire);
    (place.load(Ordering::Relaxed) == mark).then_some(record)
}
