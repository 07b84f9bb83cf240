use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{self, ThreadId};

use super::*;
use crate::sync::{self, AtomicBool, Mutex, lock};
use crate::sys::fork::testing::holds_in_a_child;

fn pool() -> Arc<Pool> {
    Pool::new(PATIENCE, || {})
}

/// The threads that did parts of work that goes on until all of the team are at it.
fn at_work(pool: &Arc<Pool>, others: usize) -> BTreeSet<String> {
    let (threads, here) = (AtomicUsize::new(0), Mutex::new(BTreeSet::new()));
    pool.share(others, others + 1, &|_| {
        lock(&here).insert(thread::current().name().unwrap_or_default().to_owned() + &format!("{:?}", id()));
        threads.fetch_add(1, Ordering::SeqCst);
        while threads.load(Ordering::SeqCst) <= others {
            thread::yield_now();
        }
    });
    here.into_inner().expect("no panic")
}

fn id() -> ThreadId {
    thread::current().id()
}

#[test]
fn every_part_is_done_once_and_by_all() {
    let pool = pool();
    for others in [1, 3, 3, 2] {
        let here = at_work(&pool, others);
        assert_eq!(here.len(), others + 1, "{here:?}");
        assert_eq!(here.iter().filter(|name| name.starts_with("ncclx_rs team")).count(), others);
    }
    for count in [0, 1, 2, 1000] {
        let done: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
        pool.share(3, count, &|index| _ = done[index].fetch_add(1, Ordering::Relaxed));
        assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == 1));
    }
    pool.close();
}

#[test]
fn threads_that_slept_come_again() {
    let pool = Pool::new(Duration::ZERO, || {});
    at_work(&pool, 2);
    thread::sleep(Duration::from_millis(20)); // so that they sleep
    assert_eq!(at_work(&pool, 2).len(), 3);
    pool.close();
}

#[test]
fn work_inside_work_and_beside_it_is_done_alone() {
    let pool = pool();
    let inner = AtomicUsize::new(0);
    pool.share(1, 4, &|_| {
        let outer = id();
        pool.share(1, 3, &|_| {
            assert_eq!(id(), outer);
            inner.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(inner.into_inner(), 12);
    pool.close();
}

#[test]
fn a_panic_anywhere_ends_the_call_and_not_the_pool() {
    let pool = pool();
    let caller = id();
    for is_caller in [true, false] {
        let (met, done) = (AtomicBool::new(false), AtomicUsize::new(0));
        let ended = catch_unwind(AssertUnwindSafe(|| {
            pool.share(1, 1000, &|_| {
                // The two meet, so that each does some.
                if (id() == caller) == is_caller {
                    met.store(true, Ordering::SeqCst);
                    panic!("part of a test");
                }
                while !met.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
                done.fetch_add(1, Ordering::SeqCst);
            });
        }));
        let panic = ended.expect_err("the panic comes to the caller");
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"part of a test"));
        let so_far = done.load(Ordering::SeqCst);
        thread::sleep(Duration::from_millis(5));
        assert_eq!(done.load(Ordering::SeqCst), so_far, "nobody is at it any more");
        assert_eq!(at_work(&pool, 1).len(), 2, "the pool works on");
    }
    pool.close();
}

#[test]
fn work_is_cut_from_some_length_on() {
    let team = Team { others: 2 };
    assert_eq!([0, 2 * PART_BYTES - 1, 2 * PART_BYTES, 1 << 30].map(|bytes| team.parts(bytes)), [1, 1, 2, 12]);
    assert_eq!(Team::ALONE.parts(1 << 30), 1);
}

#[test]
fn a_team_leaves_a_core_to_the_thread_that_calls() {
    assert_eq!(Team::chosen(Threads::Exactly(200), || unreachable!("it is set")).threads(), 201);
    let least = AtomicUsize::new(OTHERS_MAX);
    let chosen = [9, 100, 3, 4, 1, 0, 8].map(|cpus| Team::with_spare(&least, cpus).threads());
    assert_eq!(chosen, [8, 8, 3, 3, 1, 1, 1]);
    assert!(Team::chosen(Threads::Auto, || 1).is_alone() && LEAST.load(Ordering::Relaxed) == 0);
}

#[test]
fn runs_and_what_belongs_to_them_are_cut_alike() {
    // Elements of two bytes beside sums of eight, of a length that nothing divides.
    let count: u32 = 300_007;
    let elements: Vec<[u8; 2]> = (0..count).map(|index| (index as u16).to_ne_bytes()).collect();
    for others in [0, 1, 3] {
        let mut sums = vec![[0u8; 8]; count as usize];
        let (blocks, calls) = ([elements.as_flattened(); 2], AtomicUsize::new(0));
        Team::of(others).spread((sums.as_flattened_mut(), 8), (&blocks, 2), |sums, blocks| {
            calls.fetch_add(1, Ordering::Relaxed);
            let [one, two] = [0, 1].map(|block: usize| blocks[block].as_chunks::<2>().0);
            let sums = sums.as_chunks_mut::<8>().0;
            assert_eq!((one.len(), two.len()), (sums.len(), sums.len()));
            for ((sum, one), two) in sums.iter_mut().zip(one).zip(two) {
                let number = u64::from(u16::from_ne_bytes(*one)) * 3 + u64::from(u16::from_ne_bytes(*two));
                *sum = (u64::from_ne_bytes(*sum) + number).to_ne_bytes();
            }
        });
        assert!((0..count).all(|index| sums[index as usize] == (u64::from(index as u16) * 4).to_ne_bytes()));
        assert_eq!(calls.into_inner() > 1, others > 0);
    }
}

#[test]
fn a_forked_child_has_threads_of_its_own() {
    let work = || {
        let mut items = vec![0; 1000];
        Team::of(2).each(&mut items, |item| *item += 1);
        items.iter().all(|item| *item == 1)
    };
    assert!(work() && !fork::is_child());
    assert!(holds_in_a_child(|| {
        LEAST.store(OTHERS_MAX, Ordering::Relaxed);
        work() && fork::is_child() && Team::chosen(Threads::Auto, || 64).is_alone()
    }));
}

#[test]
fn a_caller_to_which_the_system_gives_no_thread_works_alone() {
    assert!(holds_in_a_child(|| {
        let pool = pool();
        let taken = std::fs::read_to_string("/proc/self/statm").expect("of this process");
        let pages: u64 = taken.split(' ').next().expect("a number").parse().expect("a number");
        // Less than a thread's stack.
        let most = libc::rlimit { rlim_cur: (pages << 12) + (1 << 20), rlim_max: libc::RLIM_INFINITY };
        // SAFETY: the limit outlives the call.
        let is_limited = unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const most) } == 0;
        // Stacks of threads that have ended are used again.
        while sync::spawn("", || thread::sleep(Duration::from_secs(600))).is_ok() {}
        let mut is_done = is_limited;
        for count in [3, 100] {
            let done = AtomicUsize::new(0);
            pool.share(2, count, &|_| _ = done.fetch_add(1, Ordering::Relaxed));
            is_done &= done.into_inner() == count;
        }
        is_done && pool.threads() == (0, false)
    }));
}
