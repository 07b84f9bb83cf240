//! The words of a ring that its writer and its reader share: how each learns what the other has done, and wakes it.
//!
//! Positions are published with Release and read with Acquire by the other side. Before it sleeps, a side forgets the
//! rings so far, sets its flag, issues a SeqCst fence and looks at the other's position once more; after it moved its own
//! position, a side issues a SeqCst fence, looks at the other's flag, takes it and rings. One of the two sees the other,
//! so no wake is lost. Rings are forgotten first because the other side may take the flag late, for a position that has
//! been seen long ago: the ring that follows must wake, since the next position finds no flag.
//! `tests/models` checks that in every interleaving.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Positions, flags and the count of withdrawals, as they lie at the beginning of a ring's memory. All zero at first.
#[derive(Debug, Default)]
#[repr(C)]
pub struct RingWords {
    head: Apart<AtomicU64>,
    tail: Apart<AtomicU64>,
    reader_asleep: Apart<AtomicU32>,
    writer_asleep: Apart<AtomicU32>,
    withdrawals: Apart<AtomicU64>,
}

/// On cache lines of its own, two of them because processors fetch lines in pairs.
#[derive(Debug, Default)]
#[repr(C, align(128))]
struct Apart<T>(T);

impl RingWords {
    // ---- the writer's side ----

    /// The reader's position: what lies before may be overwritten.
    pub fn head(&self) -> u64 {
        // Acquire: pairs with the reader's Release, so that its reads of the room are over.
        self.head.0.load(Ordering::Acquire)
    }

    /// Shows the reader what lies before `tail`. True: it sleeps, and the caller must ring.
    pub fn publish(&self, tail: u64) -> bool {
        // Release: pairs with the reader's Acquire, so that it sees the bytes.
        self.tail.0.store(tail, Ordering::Release);
        take(&self.reader_asleep.0)
    }

    /// Asks to be rung for room, after `forget` has forgotten the rings so far. The writer must look for some once more
    /// before it sleeps.
    pub fn arm_writer(&self, forget: impl FnOnce()) {
        arm(&self.writer_asleep.0, forget);
    }

    /// Ends what [`RingWords::arm_writer`] began.
    pub fn disarm_writer(&self) {
        self.writer_asleep.0.store(0, Ordering::SeqCst);
    }

    /// Counts that the writer takes memory back that it had offered to the reader. To be called before the memory is
    /// used for something else.
    pub fn withdraw(&self) {
        self.withdrawals.0.fetch_add(1, Ordering::SeqCst);
        // SeqCst: what is written to the memory from now on is seen by a reader no earlier than the count, which it
        // looks at after it has read; pairs with the fence in `withdrawals`.
        fence(Ordering::SeqCst);
    }

    // ---- the reader's side ----

    /// The writer's position: what lies before can be read.
    pub fn tail(&self) -> u64 {
        // Acquire: pairs with the writer's Release, so that the bytes are visible.
        self.tail.0.load(Ordering::Acquire)
    }

    /// Lets the writer overwrite what lies before `head`. True: it sleeps, and the caller must ring.
    pub fn release(&self, head: u64) -> bool {
        // Release: pairs with the writer's Acquire, so that it reuses the room only now.
        self.head.0.store(head, Ordering::Release);
        take(&self.writer_asleep.0)
    }

    /// Asks to be rung for bytes, after `forget` has forgotten the rings so far. The reader must look for some once more
    /// before it sleeps.
    pub fn arm_reader(&self, forget: impl FnOnce()) {
        arm(&self.reader_asleep.0, forget);
    }

    /// Ends what [`RingWords::arm_reader`] began.
    pub fn disarm_reader(&self) {
        self.reader_asleep.0.store(0, Ordering::SeqCst);
    }

    /// How often the writer has taken memory back, to be asked after the memory was read.
    pub fn withdrawals(&self) -> u64 {
        // SeqCst: see `withdraw`.
        fence(Ordering::SeqCst);
        self.withdrawals.0.load(Ordering::SeqCst)
    }
}

fn arm(flag: &AtomicU32, forget: impl FnOnce()) {
    forget();
    flag.store(1, Ordering::SeqCst);
    // SeqCst: pairs with the fence of the side that moves its position; see the module's text.
    fence(Ordering::SeqCst);
}

/// Takes a wish to be woken, if there is one.
fn take(flag: &AtomicU32) -> bool {
    // SeqCst: pairs with the fence of the side that sets the flag; see the module's text.
    fence(Ordering::SeqCst);
    flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::SeqCst) != 0
}
