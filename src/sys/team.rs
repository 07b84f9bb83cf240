//! Teams: a thread and others of its process that share a long copy or reduction with it.
//!
//! Work is cut along the memory that it touches, and each part is done as all of it would be by one thread. So results are the
//! same, to the bit, for any number of threads.
//!
//! ```
//! use ncclx_rs::sys::team::Team;
//! let (mut into, from) = (vec![0u8; 1 << 20], vec![7u8; 1 << 20]);
//! Team::of(3).spread((&mut into, 1), (&[&from], 1), |into, blocks| into.copy_from_slice(blocks[0]));
//! assert_eq!(into, from);
//! ```
#![allow(unsafe_code, reason = "threads get different items of one slice")]

use std::time::Duration;

use smallvec::SmallVec;

use crate::config::Threads;
use crate::sync::{Arc, AtomicUsize, OnceLock, Ordering};
use crate::sys::fork::{self, PerProcess};
use crate::sys::process;

use pool::Pool;

/// How many threads share the work of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Team {
    others: usize,
}

impl Team {
    /// A thread that does its work itself.
    pub const ALONE: Team = Team { others: 0 };

    /// A thread and so many others.
    pub fn of(others: usize) -> Team {
        if others > 0 {
            // The threads are for the CPUs that this one may run on now: it may be bound to one of them later.
            CPUS.get_or_init(|| process::own_cpus().0);
        }
        Team { others }
    }

    /// The team of a rank that has so many CPUs for itself, as the setting has it.
    pub fn chosen(setting: Threads, cpus: impl FnOnce() -> usize) -> Team {
        match setting {
            Threads::Exactly(others) => Team::of(others),
            // Such as a worker that loads data while its parent trains.
            Threads::Auto if fork::is_child() => Team::ALONE,
            Threads::Auto => Team::with_spare(&LEAST, cpus()),
        }
    }

    /// The team of a rank that has so many CPUs for itself: one is the caller's. A communicator of some ranks of a host does not
    /// know of the others, but an earlier one may have, so the `least` of a process holds for all that follow.
    fn with_spare(least: &AtomicUsize, cpus: usize) -> Team {
        let spare = cpus.saturating_sub(1);
        // Relaxed: the number stands alone.
        Team::of(least.fetch_min(spare, Ordering::Relaxed).min(spare))
    }

    /// Whether there is nobody to share with.
    pub fn is_alone(self) -> bool {
        self.others == 0
    }

    /// The number of threads, the one that calls included.
    pub fn threads(self) -> usize {
        self.others + 1
    }

    /// Into how many parts work is cut that reads and writes so many bytes.
    #[inline]
    pub fn parts(self, bytes: usize) -> usize {
        if self.others == 0 { 1 } else { (bytes / PART_BYTES).clamp(1, PARTS_PER_THREAD * self.threads()) }
    }

    /// Calls `f` on each item, on any thread of the team.
    pub fn each<T: Send>(self, items: &mut [T], f: impl Fn(&mut T) + Sync) {
        if self.others == 0 || items.len() < 2 {
            return items.iter_mut().for_each(f);
        }
        let first = Items(items.as_mut_ptr());
        let others = self.others.min(items.len() - 1);
        POOL.get().0.share(others, items.len(), &|index| {
            // SAFETY: the pool calls this once for each number below the slice's length, and ends before the borrow does.
            f(unsafe { &mut *first.at(index) });
        });
    }

    /// Calls `f` on runs of `into` and the parts that correspond of each of the `blocks`, of which `into` is computed element by
    /// element. Beside the memory stands the size of an element there.
    #[inline]
    pub fn spread(
        self,
        (into, element): (&mut [u8], usize),
        (blocks, its): (&[&[u8]], usize),
        f: impl Fn(&mut [u8], &[&[u8]]) + Sync,
    ) {
        let parts = self.parts(into.len() + blocks.iter().map(|block| block.len()).sum::<usize>());
        if parts < 2 {
            return f(into, blocks);
        }
        let len = (into.len() / element).div_ceil(parts).next_multiple_of(ALIGN);
        let mut runs: Vec<(usize, &mut [u8])> = into.chunks_mut(len * element).enumerate().collect();
        self.each(&mut runs, |(index, into)| {
            let begin = *index * len * its;
            let end = begin + into.len() / element * its;
            let blocks: SmallVec<[&[u8]; 8]> = blocks.iter().map(|block| &block[begin..end]).collect();
            f(into, &blocks);
        });
    }
}

/// Where the items of a slice begin.
struct Items<T>(*mut T);

// SAFETY: each item is used by one thread at a time, which items that are Send allow.
unsafe impl<T: Send> Sync for Items<T> {}

impl<T> Items<T> {
    fn at(&self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }
}

/// The threads of this process.
struct Others(Arc<Pool>);

impl Default for Others {
    fn default() -> Self {
        Others(Pool::new(PATIENCE, || {
            if let Some(cpus) = CPUS.get()
                && let Err(error) = process::bind_to_cpus(cpus)
            {
                log::debug!("a thread for long copies runs where the one that started it may: {error}");
            }
        }))
    }
}

static POOL: PerProcess<Others> = PerProcess::unset();

/// The fewest other threads that a communicator of this process has chosen.
static LEAST: AtomicUsize = AtomicUsize::new(OTHERS_MAX);

/// Where the threads may run.
static CPUS: OnceLock<Vec<u32>> = OnceLock::new();

/// The most other threads unless the setting says more: a few of them take what the memory of a host's node gives.
const OTHERS_MAX: usize = 7;

/// What a part reads and writes, at the least: it takes several times as long as to hand it over to a thread that is awake.
const PART_BYTES: usize = 128 * 1024;

/// More parts than threads, so that none waits long for a slow one.
const PARTS_PER_THREAD: usize = 4;

/// Parts begin at multiples of so many elements, so that two threads do not write to one cache line where the whole begins at one.
const ALIGN: usize = 64;

/// As a thread that waits for other ranks: work comes again soon or not for long.
const PATIENCE: Duration = Duration::from_micros(50);

mod pool;
#[cfg(test)]
mod tests;
