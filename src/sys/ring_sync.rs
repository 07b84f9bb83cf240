//! What the writer and the reader of a ring tell each other: how each learns what the other has done, and wakes it.
//!
//! What is written goes from slot to slot, of which each begins with its [`Mark`]: the number of the lap, once the slot is
//! complete. A reader that waits looks at the mark of the slot to come, so a short message reaches it with the one cache
//! line that it lies in.
//!
//! A mark is set with Release and read with Acquire, and so are the positions up to which the reader is done. Before it
//! sleeps, a side forgets the rings so far, sets its flag, issues a SeqCst fence and looks once more for what it waits for;
//! after it has published, a side issues a SeqCst fence, looks at the other's flag, takes it and rings. One of the two sees
//! the other, so no wake is lost. Rings are forgotten first because the other side may take the flag late, for what has
//! been seen long ago: the ring that follows must wake, since what comes next finds no flag.
//! `tests/models` checks that in every interleaving.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Tells that a slot is complete, and what came with it, in a number that the two sides agree on.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Mark(AtomicU64);

impl Mark {
    /// Shows the reader what was written in lap `lap`, from one on. [`RingWords::published`] is to be called some time after.
    pub fn set(&self, lap: u32, content: u32) {
        // Release: pairs with the reader's Acquire, so that it sees the bytes.
        self.0.store(u64::from(lap) << 32 | u64::from(content), Ordering::Release);
    }

    /// What came with the slot in lap `lap`; nothing while it is not complete.
    pub fn get(&self, lap: u32) -> Option<u32> {
        // Acquire: pairs with the writer's Release.
        let mark = self.0.load(Ordering::Acquire);
        ((mark >> 32) as u32 == lap).then_some(mark as u32)
    }
}

/// How far a side has come since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Slots.
    pub slots: u64,
    /// Bytes of the ring.
    pub bytes: u64,
}

/// The reader's positions, flags, the count of invalidations and the writer's CPU, as they lie at the beginning of a ring's
/// memory. All zero at first.
#[derive(Debug, Default)]
#[repr(C)]
pub struct RingWords {
    done: Apart<[AtomicU64; 2]>,
    reader_asleep: Apart<AtomicU32>,
    writer_asleep: Apart<AtomicU32>,
    invalidations: Apart<AtomicU64>,
    /// One more than the CPU's number.
    writer_cpu: Apart<AtomicU32>,
}

/// On cache lines of its own, two of them because processors fetch lines in pairs.
#[derive(Debug, Default)]
#[repr(C, align(128))]
struct Apart<T>(T);

impl RingWords {
    // ---- the writer's side ----

    /// What the reader is done with, which may be overwritten.
    pub fn done(&self) -> Position {
        let [slots, bytes] = &self.done.0;
        // Acquire: pairs with the reader's Release, so that its reads of the room are over.
        Position { slots: slots.load(Ordering::Acquire), bytes: bytes.load(Ordering::Acquire) }
    }

    /// Sees to a reader that sleeps although marks have been set. True: it does, and the caller must ring.
    pub fn published(&self) -> bool {
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

    /// Tells on which CPU the writer waits, or waited last.
    pub fn publish_cpu(&self, cpu: u32) {
        // Only news, since the reader looks at it all the time. Relaxed, as in `writer_cpu`: the value stands alone.
        if self.writer_cpu() != Some(cpu) {
            self.writer_cpu.0.store(cpu.wrapping_add(1), Ordering::Relaxed);
        }
    }

    /// Counts that the writer takes memory back that it had offered to the reader. To be called before the memory is
    /// used for something else.
    pub fn invalidate(&self) {
        self.invalidations.0.fetch_add(1, Ordering::SeqCst);
        // SeqCst: what is written to the memory from now on is seen by a reader no earlier than the count, which it
        // looks at after it has read; pairs with the fence in `invalidations`.
        fence(Ordering::SeqCst);
    }

    // ---- the reader's side ----

    /// Lets the writer overwrite what the reader is done with. True: it sleeps, and the caller must ring.
    pub fn release(&self, done: Position) -> bool {
        let [slots, bytes] = &self.done.0;
        // Release: pairs with the writer's Acquire, so that it reuses the room only now.
        bytes.store(done.bytes, Ordering::Release);
        slots.store(done.slots, Ordering::Release);
        take(&self.writer_asleep.0)
    }

    /// Asks to be rung for slots, after `forget` has forgotten the rings so far. The reader must look for one once more
    /// before it sleeps.
    pub fn arm_reader(&self, forget: impl FnOnce()) {
        arm(&self.reader_asleep.0, forget);
    }

    /// Ends what [`RingWords::arm_reader`] began.
    pub fn disarm_reader(&self) {
        self.reader_asleep.0.store(0, Ordering::SeqCst);
    }

    /// The CPU that the writer waited on last, if it has told.
    pub fn writer_cpu(&self) -> Option<u32> {
        self.writer_cpu.0.load(Ordering::Relaxed).checked_sub(1)
    }

    /// How often the writer has taken memory back, to be asked after the memory was read.
    pub fn invalidations(&self) -> u64 {
        // SeqCst: see `withdraw`.
        fence(Ordering::SeqCst);
        self.invalidations.0.load(Ordering::SeqCst)
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
