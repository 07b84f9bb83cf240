//! Worlds whose ranks are threads of one process.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Barrier, Mutex};

use ncclx_rs::device::words::WordLayout;
use ncclx_rs::sys::words::SharedWords;

/// What ranks need of each other beside streams.
pub(crate) trait Others {
    /// Hands own staging memory to all ranks, and takes theirs.
    fn exchange(&mut self, own: OwnedFd) -> Vec<OwnedFd>;

    /// Returns once all ranks are there.
    fn barrier(&mut self);
}

/// The words of two lanes.
pub(crate) fn words(size: usize) -> SharedWords {
    SharedWords::new(WordLayout::new(size, 2).count()).expect("words")
}

/// The other ranks in threads of this process.
pub(crate) struct Threads<'a> {
    me: usize,
    fds: &'a [Mutex<Option<OwnedFd>>],
    barrier: &'a Barrier,
}

impl Others for Threads<'_> {
    fn exchange(&mut self, own: OwnedFd) -> Vec<OwnedFd> {
        *self.fds[self.me].lock().expect("no panic") = Some(own);
        self.barrier.wait();
        let clone = |fd: &Mutex<Option<OwnedFd>>| {
            let fd = fd.lock().expect("no panic");
            fd.as_ref().expect("all are there").try_clone().expect("a descriptor")
        };
        self.fds.iter().map(clone).collect()
    }

    fn barrier(&mut self) {
        self.barrier.wait();
    }
}

/// Runs a rank in each of so many threads: which it is, with the words of all.
pub(crate) fn of_threads(size: usize, rank: impl Fn(usize, SharedWords, &mut Threads<'_>) + Sync) {
    let (words, barrier) = (words(size), Barrier::new(size));
    let fds: Vec<Mutex<Option<OwnedFd>>> = (0..size).map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for me in 0..size {
            let (words, fds, barrier, rank) = (&words, &fds, &barrier, &rank);
            scope.spawn(move || rank(me, shared(words), &mut Threads { me, fds, barrier }));
        }
    });
}

/// A mapping of its own of the same words.
pub(crate) fn shared(words: &SharedWords) -> SharedWords {
    SharedWords::open(words.as_fd().try_clone_to_owned().expect("a descriptor"), words.count()).expect("the words")
}
