//! What two cores of this host can exchange through memory, apart from any protocol.
//!
//! Two threads, each bound to a core, hand buffers to each other as a ring's writer and reader do. A line of cache that both
//! cores hold is shared: whoever writes to it first has to make the other core give it up. A reader that stores a byte into
//! each line that it has read owns these lines instead, and a writer takes an owned line over at a lower price, or at a higher
//! one: that depends on the processor and on how far the cores are apart.

use std::hint::{black_box, spin_loop};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, lock};
use crate::sys::cma::PeerMemory;
use crate::sys::process::{bind_to_cpu, own_cpus};

/// The bytes of a line of cache.
const LINE_BYTES: usize = 64;

/// As much as lies in a ring: it fits into the cores' own caches.
const LINES: usize = 4096;
/// How often each figure is measured; the median counts.
const ROUNDS: usize = 15;
const ROUND_TRIPS: u64 = 500;
/// What one process reads of another's memory at a time.
const PAGES: usize = 256;
const PAGE_BYTES: usize = 4096;
/// More than caches hold.
const COPY_BYTES: usize = 64 << 20;
/// After so many looks in vain a thread gives its core away, which the other one may need.
const LOOKS: u32 = 10_000;

/// What was measured between two cores. Rates are in GB/s, of 10⁹ bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// The numbers of the cores: the writer's and the reader's.
    pub cpus: [u32; 2],
    /// How long a line takes there and back, in nanoseconds.
    pub round_trip: f64,
    /// The rate of writing to lines that both cores share.
    pub write_shared: f64,
    /// The same where the reader has stored a byte into each line.
    pub write_owned: f64,
    /// The rate of reading lines that the other core has written.
    pub read: f64,
    /// The same where the reader stores a byte into each line.
    pub read_owning: f64,
    /// What it takes to read a page of another process's memory, in nanoseconds, among [`PAGES`] of one call; none where the
    /// system does not let a process read another one's memory.
    pub page: Option<f64>,
    /// The rate of copying memory that no cache holds, on the reader's core.
    pub memcpy: f64,
}

/// Measures the link between two cores, which takes about a second.
///
/// # Errors
/// The cores are one, or a thread cannot be bound to one of them.
pub fn measure(cpus: [u32; 2]) -> io::Result<Link> {
    let [writer, reader] = cpus;
    if writer == reader {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("two cores are expected, got {writer} twice")));
    }
    if let Some(cpu) = cpus.iter().find(|cpu| !own_cpus().0.contains(cpu)) {
        let reason = format!("this process may not run on core {cpu}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    let lines = Mutex::new(vec![[0; LINE_BYTES]; LINES]);
    let round_trip = both(cpus, |turn| turn.go_and_come(true), |turn| turn.go_and_come(false))?.0;
    let handed_over = |is_owned| both(cpus, |turn| turn.write(&lines), |turn| turn.read(&lines, is_owned));
    let (write_shared, read) = handed_over(false)?;
    let (write_owned, read_owning) = handed_over(true)?;
    // Written, since pages that nobody has written to are all one.
    let pages = vec![1u8; PAGES * PAGE_BYTES];
    let page = both(cpus, |_| (), |_| read_pages(&pages))?.1;
    let memcpy = both(cpus, |_| (), |_| copy())?.1;
    Ok(Link { cpus, round_trip, write_shared, write_owned, read, read_owning, page, memcpy })
}

/// Whose turn it is, in a line of its own: the writer's if the number is even.
#[derive(Default)]
#[repr(align(64))]
struct Turn(AtomicU64);

impl Turn {
    fn wait_for(&self, number: u64) {
        let mut looks = 0;
        while self.0.load(Ordering::Acquire) != number {
            looks += 1;
            if looks % LOOKS == 0 {
                std::thread::yield_now();
            }
            spin_loop();
        }
    }

    fn end(&self, number: u64) {
        self.0.store(number + 1, Ordering::Release);
    }

    /// Nanoseconds a round trip.
    fn go_and_come(&self, is_first: bool) -> f64 {
        let mut number = u64::from(!is_first);
        median(|| {
            let begin = Instant::now();
            for _ in 0..ROUND_TRIPS {
                self.wait_for(number);
                self.end(number);
                number += 2;
            }
            begin.elapsed().as_secs_f64() * 1e9 / ROUND_TRIPS as f64
        })
    }

    /// The rate at which lines are written that the reader has read.
    fn write(&self, lines: &Lines) -> f64 {
        let (from, mut number) = (vec![[1; LINE_BYTES]; LINES], 0);
        median(|| {
            self.wait_for(number);
            let rate = rate(LINE_BYTES * LINES, || lock(lines).copy_from_slice(&from));
            self.end(number);
            number += 2;
            rate
        })
    }

    /// The rate at which lines are read that the writer has written, and owned if they are to be.
    fn read(&self, lines: &Lines, is_owned: bool) -> f64 {
        let (mut into, mut number) = (vec![[0; LINE_BYTES]; LINES], 1);
        median(|| {
            self.wait_for(number);
            let rate = rate(LINE_BYTES * LINES, || {
                let mut lines = lock(lines);
                into.copy_from_slice(&lines);
                black_box(&mut into);
                if is_owned {
                    lines.iter_mut().for_each(|line| line[0] = 0);
                }
            });
            self.end(number);
            number += 2;
            rate
        })
    }
}

/// What is handed over. Its lock is free whenever somebody's turn comes.
type Lines = Mutex<Vec<[u8; LINE_BYTES]>>;

/// Runs something on both cores at once.
fn both<W: Send, R: Send>(
    cpus: [u32; 2],
    write: impl FnOnce(&Turn) -> W + Send,
    read: impl FnOnce(&Turn) -> R + Send,
) -> io::Result<(W, R)> {
    let (turn, bound, is_lacking) = (Turn::default(), Barrier::new(2), AtomicBool::new(false));
    // Neither begins, and would wait for the other, where one could not be bound or has no thread.
    let bind = |cpu| {
        let result = bind_to_cpu(cpu);
        is_lacking.fetch_or(result.is_err(), Ordering::Relaxed);
        bound.wait();
        result.map(|()| !is_lacking.load(Ordering::Relaxed))
    };
    let (written, read) = std::thread::scope(|scope| {
        let thread = || std::thread::Builder::new();
        let writing = thread().spawn_scoped(scope, || bind(cpus[0]).map(|go| go.then(|| write(&turn))))?;
        let reading = thread().spawn_scoped(scope, || bind(cpus[1]).map(|go| go.then(|| read(&turn))));
        let reading = reading.inspect_err(|_| {
            is_lacking.store(true, Ordering::Relaxed);
            bound.wait();
        })?;
        Ok::<_, io::Error>((writing.join().expect("no panic"), reading.join().expect("no panic")))
    })?;
    let (written, read) = (written?, read?);
    Ok((written.expect("both are bound"), read.expect("both are bound")))
}

/// Nanoseconds a page of another process's memory: of this process's own, which takes as long.
fn read_pages(pages: &[u8]) -> Option<f64> {
    let (one, _other) = UnixStream::pair().ok()?;
    let memory = PeerMemory::behind(one.as_fd()).ok()?;
    let mut into = vec![0; pages.len()];
    let mut is_read = true;
    let seconds = median(|| {
        let begin = Instant::now();
        is_read &= memory.read(pages.as_ptr() as u64, &mut into).is_ok_and(|count| count == pages.len());
        begin.elapsed().as_secs_f64()
    });
    is_read.then(|| seconds * 1e9 / PAGES as f64)
}

fn copy() -> f64 {
    let (from, mut into) = (vec![1u8; COPY_BYTES], vec![0u8; COPY_BYTES]);
    median(|| {
        rate(COPY_BYTES, || {
            into.copy_from_slice(&from);
            black_box(&mut into);
        })
    })
}

/// GB/s, of 10⁹ bytes, of what moves so many bytes.
fn rate(bytes: usize, work: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    work();
    bytes as f64 / begin.elapsed().max(Duration::from_nanos(1)).as_secs_f64() / 1e9
}

fn median(mut measure: impl FnMut() -> f64) -> f64 {
    let mut found: Vec<f64> = (0..ROUNDS).map(|_| measure()).collect();
    found.sort_by(f64::total_cmp);
    found[ROUNDS / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_cores() -> Option<[u32; 2]> {
        let [one, two, ..] = own_cpus().0[..] else {
            eprintln!("not run: there is one core");
            return None;
        };
        Some([one, two])
    }

    #[test]
    fn every_figure_of_a_link_is_measured() {
        let Some([one, two]) = two_cores() else { return };
        let (cpus, _) = own_cpus();
        let link = measure([one, two]).expect("a link");
        let page = link.page.expect("a process may read its own memory");
        let rates = [link.write_shared, link.write_owned, link.read, link.read_owning, link.memcpy];
        let mut figures = [&[link.round_trip, page], &rates[..]].concat().into_iter();
        assert!(figures.all(|figure| figure.is_finite() && figure > 0.0), "{link:?}");
        assert_eq!(own_cpus().0, cpus, "this thread stays where it may run");
    }

    #[test]
    fn each_side_runs_on_its_own_core() {
        let Some([one, two]) = two_cores() else { return };
        let found = both([two, one], |_| own_cpus().0, |_| own_cpus().0).expect("both are bound");
        assert_eq!(found, (vec![two], vec![one]));
        let result = both([one, 100_000], |_| panic!("the other one would never come"), |_| ());
        assert!(result.is_err(), "there is no such core");
    }

    #[test]
    fn a_reader_that_owns_lines_has_stored_into_each_of_them() {
        let (cpus, _) = own_cpus();
        // They take turns, also on one core.
        let cpus = [cpus[0], cpus[cpus.len() - 1]];
        for (is_owned, first) in [(false, 1), (true, 0)] {
            let lines = Mutex::new(vec![[7; LINE_BYTES]; LINES]);
            both(cpus, |turn| turn.write(&lines), |turn| turn.read(&lines, is_owned)).expect("both are bound");
            let mut expected = [1; LINE_BYTES];
            expected[0] = first;
            assert!(lock(&lines).iter().all(|line| *line == expected), "owned: {is_owned}");
        }
    }

    #[test]
    fn cores_that_are_none_are_refused() {
        let first = own_cpus().0[0];
        for (cpus, expected) in [
            ([first, first], format!("two cores are expected, got {first} twice")),
            ([first, 100_000], "this process may not run on core 100000".to_owned()),
        ] {
            assert_eq!(measure(cpus).expect_err("no link").to_string(), expected);
        }
    }
}
