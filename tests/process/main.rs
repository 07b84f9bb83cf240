//! Tests that look at their whole process: at its sockets, file descriptors, threads and memory. One runs at a time.

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

mod crowd;
mod descriptors;
mod held_bytes;
#[path = "../engine/lacking.rs"]
mod lacking;
mod late_ranks;
mod rings;
mod sharing;
mod soak;
#[path = "../engine/ucx_process.rs"]
#[allow(dead_code, reason = "shared with the engine's tests, which use more of it")]
mod ucx_process;
mod unauthenticated;
#[path = "../engine/world.rs"]
#[allow(dead_code, reason = "shared with the engine's tests, which use more of it")]
mod world;

/// Keeps the other tests of this process waiting.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many entries a folder of `/proc/self` has.
fn entries(folder: &str) -> usize {
    fs::read_dir(format!("/proc/self/{folder}")).expect("a folder of /proc").count()
}

/// What a look finds once it has found the same for a while: connections of the failure detector come and go by themselves.
fn at_rest<T: PartialEq>(look: impl Fn() -> T) -> T {
    let (mut before, mut looks) = (look(), 0);
    while looks < 20 {
        std::thread::sleep(Duration::from_millis(20));
        let now = look();
        looks = if now == before { looks + 1 } else { 0 };
        before = now;
    }
    before
}

/// A number that follows from a seed: SplitMix64, from Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}
