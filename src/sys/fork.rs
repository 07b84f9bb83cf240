//! Protects the engine from forks: a forked child can neither keep its parent's connections open nor change its epoll sets.
//!
//! A child inherits every file descriptor, so a connection would stay open in it after the parent's death. Its changes to an
//! epoll set would change the parent's. In a child, each of the engine's descriptors is therefore replaced by one of
//! `/dev/null` with the same number, so that its owner can still close it, or closed where the system refuses that. A child does
//! not inherit threads or usable locks: objects made before a fork recognise by [`Origin`] that they cannot be used.
#![allow(unsafe_code, reason = "pthread_atfork, and state that must not be locked after a fork")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Once;

use rustix::fs::{Mode, OFlags};

use crate::sync::{Arc, AtomicPtr, AtomicU64, Mutex, MutexGuard, Ordering, Weak, lock};

/// How many forks lie between this process and the first one that used the engine.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// What is registered, and how often. Ordered, so that closing thousands needs no search through all for each.
struct Registered<D>(BTreeMap<D, usize>);

type Descriptors = Registered<Descriptor>;

impl<D: Ord> Registered<D> {
    const fn new() -> Self {
        Registered(BTreeMap::new())
    }

    fn add(&mut self, descriptor: D) {
        *self.0.entry(descriptor).or_default() += 1;
    }

    /// Takes back one registration. In a child, where the list has been emptied, there is none.
    fn remove(&mut self, descriptor: D) {
        if let Entry::Occupied(mut kept) = self.0.entry(descriptor) {
            *kept.get_mut() -= 1;
            if *kept.get() == 0 {
                kept.remove();
            }
        }
    }
}

/// The descriptors to replace.
static DESCRIPTORS: Mutex<Descriptors> = Mutex::new(Descriptors::new());

thread_local! {
    /// The lock of `DESCRIPTORS` while this thread forks.
    static HELD: RefCell<Option<MutexGuard<'static, Descriptors>>> = const { RefCell::new(None) };
}

/// The process in which an object was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin(u64);

impl Origin {
    /// This process.
    pub fn here() -> Origin {
        install();
        // Relaxed: it changes while there is one thread.
        Origin(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this is still the same process, and not a forked child of it.
    pub fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }
}

/// Whether this process is a forked child of one that has used the engine.
pub fn is_child() -> bool {
    Origin::here() != Origin(0)
}

/// A file descriptor and its inode, since the number may be reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Descriptor {
    fd: RawFd,
    inode: u64,
}

/// Keeps a file from forked children, until dropped.
#[derive(Debug)]
pub struct Private {
    descriptor: Descriptor,
}

impl Private {
    /// Keeps `fd` from forked children.
    pub fn new(fd: BorrowedFd<'_>) -> std::io::Result<Private> {
        install();
        let descriptor = Descriptor { fd: fd.as_raw_fd(), inode: rustix::fs::fstat(fd)?.st_ino };
        lock(&DESCRIPTORS).add(descriptor);
        Ok(Private { descriptor })
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        lock(&DESCRIPTORS).remove(self.descriptor);
    }
}

/// A value that every process makes for itself at first use, also a forked child.
pub struct PerProcess<T> {
    current: AtomicPtr<(Origin, T)>,
}

impl<T: Default> PerProcess<T> {
    /// A value that is not made yet.
    pub const fn unset() -> PerProcess<T> {
        PerProcess { current: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// This process's value.
    pub fn get(&'static self) -> &'static T {
        // Acquire, here and below: pairs with the Release of the thread that has made the value.
        let mut current = self.current.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or what a `Box` gave out below, which is never freed.
            if let Some((origin, value)) = unsafe { current.as_ref() }
                && origin.is_here()
            {
                return value;
            }
            let made = Box::into_raw(Box::new((Origin::here(), T::default())));
            match self.current.compare_exchange(current, made, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => current = made,
                Err(faster) => {
                    // SAFETY: made above and given to nobody.
                    drop(unsafe { Box::from_raw(made) });
                    current = faster;
                }
            }
        }
    }
}

impl<T> PerProcess<Mutex<Weak<T>>> {
    /// What this process shares for as long as somebody has it; made if nobody does.
    pub fn shared<E>(&'static self, make: impl FnOnce() -> Result<T, E>) -> Result<Arc<T>, E> {
        let mut current = lock(self.get());
        if let Some(shared) = current.upgrade() {
            return Ok(shared);
        }
        let made = Arc::new(make()?);
        *current = Arc::downgrade(&made);
        Ok(made)
    }
}

/// Registers the handlers, which run at every fork from now on.
fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: functions of this library, which is never unloaded.
        let status = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
        if status != 0 {
            log::error!("forked children will hold connections open: pthread_atfork: error {status}");
        }
    });
}

extern "C" fn before() {
    // It fails in a thread that is ending, which does not fork.
    let _ = HELD.try_with(|held| *held.borrow_mut() = Some(lock(&DESCRIPTORS)));
}

extern "C" fn in_parent() {
    let _ = HELD.try_with(|held| held.borrow_mut().take());
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    let _ = HELD.try_with(|held| {
        if let Some(mut descriptors) = held.borrow_mut().take() {
            replace(&descriptors);
            descriptors.0.clear();
        }
    });
}

fn replace(descriptors: &Descriptors) {
    let open = || rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok();
    let mut nothing = open();
    for descriptor in descriptors.0.keys() {
        // SAFETY: it is looked at only for whether it is open and still the same file.
        let fd = unsafe { BorrowedFd::borrow_raw(descriptor.fd) };
        if !rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_ino == descriptor.inode) {
            continue;
        }
        let put = |nothing: &OwnedFd| {
            // SAFETY: both are open, and the number stays open for its owner.
            unsafe { libc::dup3(nothing.as_raw_fd(), descriptor.fd, libc::O_CLOEXEC) }
        };
        if nothing.as_ref().is_none_or(|nothing| put(nothing) < 0) {
            // SAFETY: its owner, an object of the parent, does nothing with the number here but to close it. A copy that stayed open
            // would hide the parent's end.
            unsafe { libc::close(descriptor.fd) };
            // Where this process had no number left, it has that one now.
            nothing = nothing.or_else(open);
        }
    }
    // Where it has taken the number of one of them, that one's owner closes it.
    if let Some(nothing) = nothing
        && descriptors.0.keys().any(|descriptor| descriptor.fd == nothing.as_raw_fd())
    {
        let _ = nothing.into_raw_fd();
    }
}

/// What tests of forks begin with.
#[cfg(test)]
pub(crate) mod testing {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// Does something while a forked child of this process lives, which does nothing.
    ///
    /// # Panics
    /// When it takes longer than a minute.
    pub(crate) fn beside_a_child<T>(f: impl FnOnce() -> T) -> T {
        // SAFETY: the child calls nothing but what may be called after a fork.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends this process after a minute, which it waits for.
            unsafe { libc::alarm(60) };
            loop {
                // SAFETY: as above.
                unsafe { libc::pause() };
            }
        }
        let result = f();
        // SAFETY: ends a process that was begun above and nobody has waited for.
        unsafe { libc::kill(child, libc::SIGKILL) };
        let mut status = 0;
        // SAFETY: `status` is a place for the result.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(libc::WTERMSIG(status), libc::SIGKILL, "it took longer than a minute");
        result
    }

    /// Has the end of a connection end this process when it writes there, as is usual where nothing is done about SIGPIPE. For a forked
    /// child, as others would not live with that.
    pub(crate) fn end_at_broken_pipes() {
        // SAFETY: it installs no handler.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    }

    /// Whether something holds in a forked child, which is ended after a minute.
    pub(crate) fn holds_in_a_child(f: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child does what the C library allows after a fork, and ends without what the test's process does at its end.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends this process if it hangs.
            unsafe { libc::alarm(60) };
            // Unwinding would end its one thread, which counts as success.
            let holds = catch_unwind(AssertUnwindSafe(f)).unwrap_or(false);
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(!holds)) };
        }
        let mut status = 0;
        // SAFETY: `status` is a place for the result.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        status == 0
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::testing::{beside_a_child, holds_in_a_child};
    use super::*;

    #[test]
    fn a_childs_copy_does_not_keep_a_connection_open() {
        let (near, mut far) = UnixStream::pair().expect("a pair of sockets");
        let private = Private::new(near.as_fd()).expect("an open socket");
        beside_a_child(|| {
            drop((private, near));
            assert_eq!(far.read(&mut [0]).expect("the end of the connection"), 0);
        });
    }

    #[test]
    fn a_child_that_may_open_nothing_keeps_no_connection_open_either() {
        assert!(holds_in_a_child(|| {
            let (near, mut far) = UnixStream::pair().expect("a pair of sockets");
            let private = Private::new(near.as_fd()).expect("an open socket");
            let numbers = near.as_raw_fd().max(far.as_raw_fd()) as u64 + 1;
            let limit = Rlimit { current: Some(numbers), ..getrlimit(Resource::Nofile) };
            setrlimit(Resource::Nofile, limit).expect("a limit below the hard one");
            let copies: Vec<_> = std::iter::from_fn(|| far.try_clone().ok()).collect();
            let has_ended = beside_a_child(|| {
                drop((private, near));
                far.read(&mut [0]).is_ok_and(|count| count == 0)
            });
            drop(copies);
            has_ended
        }));
    }

    #[test]
    fn a_child_knows_that_it_is_one() {
        let origin = Origin::here();
        assert!(origin.is_here() && holds_in_a_child(|| !origin.is_here()));
    }

    #[test]
    fn a_file_is_kept_from_children_until_all_requests_for_that_are_gone() {
        let (near, _far) = UnixStream::pair().expect("a pair of sockets");
        let [first, second] = [(); 2].map(|()| Private::new(near.as_fd()).expect("an open socket"));
        let descriptor = first.descriptor;
        let is_kept = || lock(&DESCRIPTORS).0.contains_key(&descriptor);
        drop(first);
        assert!(is_kept());
        drop(second);
        assert!(!is_kept());
    }

    thread_local! {
        static COMPARISONS: Cell<usize> = const { Cell::new(0) };
    }

    /// Counts how often two are compared.
    #[derive(Eq)]
    struct Counted(u32);

    impl Ord for Counted {
        fn cmp(&self, other: &Self) -> std::cmp::Ordering {
            COMPARISONS.set(COMPARISONS.get() + 1);
            self.0.cmp(&other.0)
        }
    }

    impl PartialOrd for Counted {
        fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
            Some(self.cmp(other))
        }
    }

    impl PartialEq for Counted {
        fn eq(&self, other: &Self) -> bool {
            self.cmp(other).is_eq()
        }
    }

    #[test]
    fn closing_grows_with_the_descriptors_and_not_with_their_square() {
        const COUNT: u32 = 10_000;
        let mut registered = Registered::new();
        (0..COUNT).for_each(|fd| registered.add(Counted(fd)));
        COMPARISONS.set(0);
        (0..COUNT).rev().for_each(|fd| registered.remove(Counted(fd)));
        assert!(registered.0.is_empty());
        assert!((1..100 * COUNT as usize).contains(&COMPARISONS.get()), "{} comparisons", COMPARISONS.get());
    }

    #[test]
    fn all_threads_share_one_value() {
        static VALUE: PerProcess<Mutex<u32>> = PerProcess::unset();
        let threads = (0..8).map(|_| std::thread::spawn(|| *lock(VALUE.get()) += 1));
        threads.collect::<Vec<_>>().into_iter().for_each(|thread| thread.join().expect("no panic"));
        assert_eq!(*lock(VALUE.get()), 8);
    }
}
