//! The synchronisation of a shared memory ring: how writer and reader learn of each other's progress, and wake each other.
//!
//! The writer fills slot after slot. Each slot begins with its [`Mark`]: the number of the lap, once the slot is complete. A
//! waiting reader polls the mark of the next slot, so a short message reaches it with the one cache line that holds it.
//!
//! A mark is set with Release and read with Acquire, and so are the positions up to which the reader is done. To sleep, a
//! side drains its doorbell, sets its flag, issues a SeqCst fence and checks once more for what it waits for. After it has
//! published, a side issues a SeqCst fence, checks the other's flag, clears it and rings. One of the two sees the other, so
//! no wake is lost. The doorbell is drained first because the other side may clear the flag late, for something that was
//! seen long ago: that ring must wake, since the next publication finds no flag. A doorbell that several rings share is not
//! drained there. Whoever drains it looks which sides are armed and have lost their flag, and wakes those.
//! `tests/models` checks both in every interleaving.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Shows that a slot is complete, and describes its content in a number that the two sides agree on.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Mark(AtomicU64);

impl Mark {
    /// Publishes the slot of lap `lap`, which counts from one. The writer must call [`RingWords::published`] some time after.
    pub fn set(&self, lap: u32, content: u32) {
        // Release: pairs with the reader's Acquire, so that it sees the bytes.
        self.0.store(u64::from(lap) << 32 | u64::from(content), Ordering::Release);
    }

    /// The content of the slot in lap `lap`; none while it is not complete.
    pub fn get(&self, lap: u32) -> Option<u32> {
        // Acquire: pairs with the writer's Release.
        let mark = self.0.load(Ordering::Acquire);
        ((mark >> 32) as u32 == lap).then_some(mark as u32)
    }
}

/// How much a side has written or read since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Slots.
    pub slots: u64,
    /// Bytes of the ring.
    pub bytes: u64,
}

/// The two sides of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The one that writes.
    Writer,
    /// The one that reads.
    Reader,
}

impl Side {
    /// The other one.
    pub fn other(self) -> Side {
        match self {
            Side::Writer => Side::Reader,
            Side::Reader => Side::Writer,
        }
    }
}

/// The reader's positions, flags, the count of invalidations, the writer's CPU and what its copies cost, as they lie at the
/// beginning of a ring's memory. All zero at first.
#[derive(Debug, Default)]
#[repr(C)]
pub struct RingWords {
    done: CacheLine<[AtomicU64; 2]>,
    reader: CacheLine<SideWords>,
    writer: CacheLine<SideWords>,
    invalidations: CacheLine<AtomicU64>,
    /// One more than the CPU's number.
    writer_cpu: CacheLine<AtomicU32>,
    /// The last whole lap's number in the upper half, what a byte of it cost in the lower one.
    write_cost: CacheLine<AtomicU64>,
    /// The address and the value of the writer's stamp.
    stamp: CacheLine<[AtomicU64; 2]>,
}

/// What the other side tells one, and whether to wake it.
#[derive(Debug, Default)]
#[repr(C)]
struct SideWords {
    asleep: AtomicU32,
    is_left_alone: AtomicU32,
}

/// A value on cache lines of its own: two, because processors fetch lines in pairs.
#[derive(Debug, Default)]
#[repr(C, align(128))]
struct CacheLine<T>(T);

impl RingWords {
    // ---- both sides ----

    fn of(&self, side: Side) -> &SideWords {
        match side {
            Side::Writer => &self.writer.0,
            Side::Reader => &self.reader.0,
        }
    }

    /// Whether a side has asked to be rung for, and nobody has cleared its flag to do so yet.
    pub fn is_armed(&self, side: Side) -> bool {
        self.of(side).asleep.load(Ordering::SeqCst) != 0
    }

    /// Says that a side reads and writes no more. The caller must ring.
    pub fn leave(&self, side: Side) {
        // Release: pairs with the Acquire of the other side, so that it finds all that was published before.
        self.of(side.other()).is_left_alone.store(1, Ordering::Release);
    }

    /// Whether the side opposite to this one has left. What it had published before is there.
    pub fn is_left_alone(&self, side: Side) -> bool {
        self.of(side).is_left_alone.load(Ordering::Acquire) != 0
    }

    // ---- the writer's side ----

    /// The position up to which the reader is done, so that the writer may overwrite.
    pub fn done(&self) -> Position {
        let [slots, bytes] = &self.done.0;
        // Acquire: pairs with the reader's Release, so that its reads of the room are over.
        Position { slots: slots.load(Ordering::Acquire), bytes: bytes.load(Ordering::Acquire) }
    }

    /// To be called after marks were set. True: the reader sleeps, and the caller must ring.
    pub fn published(&self) -> bool {
        take(&self.reader.0.asleep)
    }

    /// Tells the reader by what to know the writer's program, before it has the ring: an address and a value.
    pub fn set_stamp(&self, stamp: [u64; 2]) {
        // Relaxed, as in `stamp`: the ring is handed over by the system.
        self.stamp.0.iter().zip(stamp).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
    }

    /// Asks the reader to ring when there is room. `drain` empties the doorbell first. The writer must check once more for room
    /// before it sleeps.
    pub fn arm_writer(&self, drain: impl FnOnce()) {
        arm(&self.writer.0.asleep, drain);
    }

    /// Undoes [`RingWords::arm_writer`].
    pub fn disarm_writer(&self) {
        self.writer.0.asleep.store(0, Ordering::SeqCst);
    }

    /// Publishes the CPU on which the writer waits, or waited last.
    pub fn publish_cpu(&self, cpu: u32) {
        // Written only when it changes, since the reader polls it. Relaxed, as in `writer_cpu`: the value stands alone.
        if self.writer_cpu() != Some(cpu) {
            self.writer_cpu.0.store(cpu.wrapping_add(1), Ordering::Relaxed);
        }
    }

    /// Publishes what a byte of lap `lap` of the ring cost the writer; 0 if it was not measured.
    pub fn publish_write_cost(&self, lap: u32, cost: u32) {
        // Relaxed, as in `write_cost`: the value stands alone.
        self.write_cost.0.store(u64::from(lap) << 32 | u64::from(cost), Ordering::Relaxed);
    }

    /// Counts that the writer invalidates memory that the reader may read. To be called before the memory is used for
    /// something else.
    pub fn invalidate(&self) {
        self.invalidations.0.fetch_add(1, Ordering::SeqCst);
        // SeqCst: a reader sees later writes to the memory no earlier than the count, which it checks after it has read; pairs
        // with the fence in `invalidations`.
        fence(Ordering::SeqCst);
    }

    // ---- the reader's side ----

    /// Lets the writer overwrite everything up to `done`. True: the writer sleeps, and the caller must ring.
    pub fn release(&self, done: Position) -> bool {
        let [slots, bytes] = &self.done.0;
        // Release: pairs with the writer's Acquire, so that it reuses the room only now.
        bytes.store(done.bytes, Ordering::Release);
        slots.store(done.slots, Ordering::Release);
        take(&self.writer.0.asleep)
    }

    /// Asks the writer to ring when a slot is complete. `drain` empties the doorbell first. The reader must check once more for
    /// a slot before it sleeps.
    pub fn arm_reader(&self, drain: impl FnOnce()) {
        arm(&self.reader.0.asleep, drain);
    }

    /// Undoes [`RingWords::arm_reader`].
    pub fn disarm_reader(&self) {
        self.reader.0.asleep.store(0, Ordering::SeqCst);
    }

    /// What the writer has told by [`RingWords::set_stamp`].
    pub fn stamp(&self) -> [u64; 2] {
        self.stamp.0.each_ref().map(|word| word.load(Ordering::Relaxed))
    }

    /// The CPU that the writer waited on last, if it has published one.
    pub fn writer_cpu(&self) -> Option<u32> {
        self.writer_cpu.0.load(Ordering::Relaxed).checked_sub(1)
    }

    /// What a byte of lap `lap` cost the writer, if that is the last lap that it has told of, and it has measured it.
    pub fn write_cost(&self, lap: u32) -> Option<u32> {
        let word = self.write_cost.0.load(Ordering::Relaxed);
        ((word >> 32) as u32 == lap && word as u32 != 0).then_some(word as u32)
    }

    /// How often the writer has invalidated memory, to be checked after memory was read.
    pub fn invalidations(&self) -> u64 {
        // SeqCst: see `invalidate`.
        fence(Ordering::SeqCst);
        self.invalidations.0.load(Ordering::SeqCst)
    }
}

fn arm(flag: &AtomicU32, drain: impl FnOnce()) {
    drain();
    flag.store(1, Ordering::SeqCst);
    // SeqCst: pairs with the fence of the side that moves its position; see the module's text.
    fence(Ordering::SeqCst);
}

/// Clears the flag of a side that sleeps. True: it was set.
fn take(flag: &AtomicU32) -> bool {
    // SeqCst: pairs with the fence of the side that sets the flag; see the module's text.
    fence(Ordering::SeqCst);
    flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::SeqCst) != 0
}
