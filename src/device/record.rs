//! Records in memory that processes share: one writes, the others read, and none waits for another.
//!
//! A record's mark tells which one it is. A writer that dies halfway leaves a record that nobody reads.

use crate::sync::{AtomicU64, Ordering, fence};

/// Writes the record `mark`, which is not zero, in place of the one before: `store` stores its contents.
///
/// Then the caller may look at other ranks' records: **of two ranks that publish one and then look at the other's, at least one
/// finds it.** For the `SeqCst` fences of both ranks have a place in one order. The rank whose fence comes second looks after
/// it, and the other rank has stored its mark before the first fence, so the look finds that mark, or a later one.
pub(crate) fn publish(place: &AtomicU64, mark: u64, store: impl FnOnce()) {
    place.store(0, Ordering::Relaxed);
    // With the fence of `read`: a reader of some of the new record finds that the old mark is gone.
    fence(Ordering::Release);
    store();
    // With the load of `read`: a reader that finds the mark reads all of the record.
    place.store(mark, Ordering::Release);
    fence(Ordering::SeqCst);
}

/// Reads the record `mark` by `load`; nothing if another record is there, or replaces it meanwhile.
pub(crate) fn read<T>(place: &AtomicU64, mark: u64, load: impl FnOnce() -> T) -> Option<T> {
    if place.load(Ordering::Acquire) != mark {
        return None;
    }
    let record = load();
    fence(Ordering::Acquire);
    (place.load(Ordering::Relaxed) == mark).then_some(record)
}
