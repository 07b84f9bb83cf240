//! The ring of shared memory between two processes.

use loom::cell::UnsafeCell;
use loom::thread;

use crate::ring_sync::{Mark, Position, RingWords, Side};
use crate::sync::{Arc, AtomicU64, Condvar, Mutex, Ordering, lock};

/// The socket beside a ring: a byte that comes wakes until it is taken out.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn ring(&self) {
        *lock(&self.rung) = true;
        self.changed.notify_one();
    }

    fn drain(&self) {
        *lock(&self.rung) = false;
    }

    fn wait(&self) {
        let mut rung = lock(&self.rung);
        while !*rung {
            rung = self.changed.wait(rung).expect("no panic");
        }
    }
}

/// A ring of one slot, which holds a number.
#[derive(Default)]
struct Ring {
    words: RingWords,
    mark: Mark,
    cell: UnsafeCell<u64>,
    bytes_come: Bell,
    room_comes: Bell,
    /// Whether the bells are those of other rings as well, so that who is woken looks whether it is meant.
    shares_bells: bool,
}

#[allow(unsafe_code, reason = "loom's cells, which report every race")]
impl Ring {
    fn before_sleep(&self, bell: &Bell) {
        if !self.shares_bells {
            bell.drain();
        }
    }

    fn sleep(&self, bell: &Bell, side: Side) {
        loop {
            bell.wait();
            if !self.shares_bells {
                return;
            }
            bell.drain();
            if !self.words.is_armed(side) {
                return;
            }
        }
    }

    fn write(&self, tail: u64) {
        while self.words.done().slots != tail {
            self.words.arm_writer(|| self.before_sleep(&self.room_comes));
            if self.words.done().slots != tail {
                self.sleep(&self.room_comes, Side::Writer);
            }
            self.words.disarm_writer();
        }
        // SAFETY: loom checks that the reader does not look at it meanwhile.
        self.cell.with_mut(|cell| unsafe { *cell = tail + 1 });
        self.mark.set(tail as u32 + 1, 8);
        if self.words.published() {
            self.bytes_come.ring();
        }
    }

    fn read(&self, head: u64) -> u64 {
        let lap = head as u32 + 1;
        while self.mark.get(lap).is_none() {
            self.words.arm_reader(|| self.before_sleep(&self.bytes_come));
            if self.mark.get(lap).is_none() {
                self.sleep(&self.bytes_come, Side::Reader);
            }
            self.words.disarm_reader();
        }
        // SAFETY: loom checks that the writer does not write it meanwhile.
        let number = self.cell.with(|cell| unsafe { *cell });
        if self.words.release(Position { slots: head + 1, bytes: 0 }) {
            self.room_comes.ring();
        }
        number
    }
}

fn check_ring(shares_bells: bool) {
    let mut model = loom::model::Builder::new();
    // Two threads need few switches to err, and without a bound this takes very long.
    model.preemption_bound = Some(3);
    model.check(move || {
        let ring = Arc::new(Ring { shares_bells, ..Ring::default() });
        let writer = Arc::clone(&ring);
        let thread = thread::spawn(move || (0..2).for_each(|tail| writer.write(tail)));
        assert_eq!([ring.read(0), ring.read(1)], [1, 2]);
        thread.join().expect("no panic");
    });
}

#[test]
fn what_is_published_is_there_and_nobody_sleeps_on() {
    check_ring(false);
}

#[test]
fn nobody_sleeps_on_where_rings_share_their_bells() {
    check_ring(true);
}

#[test]
fn what_is_used_for_something_else_is_not_believed() {
    loom::model(|| {
        let shared = Arc::new((RingWords::default(), AtomicU64::new(0)));
        let owner = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            owner.0.invalidate();
            owner.1.store(666, Ordering::Relaxed);
        });
        let (words, memory) = &*shared;
        let read = memory.load(Ordering::Relaxed);
        assert!(words.invalidations() == 1 || read == 0);
        thread.join().expect("no panic");
    });
}
