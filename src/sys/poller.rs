//! A poller: threads sleep on it for every file descriptor that a communicator waits for.
//!
//! Level triggered: a descriptor that stays ready wakes the next wait at once. Format and semantics: epoll(7), eventfd(2).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use rustc_hash::FxHashMap;

use crate::sync::{Arc, AtomicBool, Mutex, Ordering, lock};
use crate::sys::fork::Private;

/// What a file descriptor is watched for. A closed peer and errors are always watched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Bytes to read.
    Read,
    /// Room to write.
    Write,
    /// Either.
    ReadWrite,
    /// Nothing else.
    Nothing,
}

impl Interest {
    fn flags(self) -> epoll::EventFlags {
        match self {
            Interest::Read => epoll::EventFlags::IN,
            Interest::Write => epoll::EventFlags::OUT,
            Interest::ReadWrite => epoll::EventFlags::IN | epoll::EventFlags::OUT,
            Interest::Nothing => epoll::EventFlags::empty(),
        }
    }
}

#[derive(Debug)]
struct Shared {
    epoll: OwnedFd,
    wake: OwnedFd,
    watched: Mutex<Watched>,
    _private: [Private; 2],
}

/// Which of the watched descriptors were ready, by the number that their events carry.
#[derive(Debug, Default)]
struct Watched {
    ready: FxHashMap<u64, Arc<AtomicBool>>,
    last: u64,
}

/// A set of file descriptors to wait for. Clones are the same set.
#[derive(Clone, Debug)]
pub struct Poller {
    shared: Arc<Shared>,
}

impl Poller {
    /// An empty set.
    pub fn new() -> io::Result<Poller> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let private = [Private::new(epoll.as_fd())?, Private::new(wake.as_fd())?];
        Ok(Poller { shared: Arc::new(Shared { epoll, wake, watched: Mutex::default(), _private: private }) })
    }

    /// Watches a copy of `fd` until the registration is dropped. Forked children inherit neither.
    pub fn add(&self, fd: BorrowedFd<'_>, interest: Interest) -> io::Result<Registration> {
        let original = Private::new(fd)?;
        let fd = fd.try_clone_to_owned()?;
        let private = [original, Private::new(fd.as_fd())?];
        let ready = Arc::new(AtomicBool::new(false));
        let number = {
            let mut watched = lock(&self.shared.watched);
            watched.last += 1;
            let number = watched.last;
            watched.ready.insert(number, Arc::clone(&ready));
            number
        };
        let registration = Registration { poller: self.clone(), fd, interest, number, ready, _private: private };
        epoll::add(&self.shared.epoll, &registration.fd, registration.data(), interest.flags())?;
        Ok(registration)
    }

    /// Sleeps until a watched descriptor is ready, [`Poller::wake`] is called, or `timeout` has passed. May return early.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = timeout.map(|limit| Timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        if self.collect(timeout.as_ref())? {
            // Cleared at once. If another thread was faster, there is nothing to read.
            let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        }
        Ok(())
    }

    /// Notes which descriptors are ready now, without sleeping; see [`Registration::was_ready`]. A call of [`Poller::wake`] is
    /// left to the thread that sleeps.
    pub fn look(&self) -> io::Result<()> {
        self.collect(Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).map(drop)
    }

    /// Waits for events and notes their descriptors. True: one event is a call of [`Poller::wake`].
    fn collect(&self, timeout: Option<&Timespec>) -> io::Result<bool> {
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 16];
        let count = match epoll::wait(&self.shared.epoll, &mut events, timeout) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(false),
            Ok(count) => count,
            Err(error) => return Err(error.into()),
        };
        let watched = lock(&self.shared.watched);
        let mut woken = false;
        for event in &events[..count] {
            match watched.ready.get(&event.data.u64()) {
                Some(ready) => ready.store(true, Ordering::Release),
                None => woken |= event.data.u64() == WAKE,
            }
        }
        Ok(woken)
    }

    /// Ends the current wait, or the next one.
    pub fn wake(&self) {
        // The counter cannot overflow: every wait clears it. WouldBlock would mean that it is set.
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
    }
}

/// A watched file descriptor.
#[derive(Debug)]
pub struct Registration {
    poller: Poller,
    fd: OwnedFd,
    interest: Interest,
    number: u64,
    ready: Arc<AtomicBool>,
    _private: [Private; 2],
}

impl Registration {
    /// Whether a wait or a look has seen the descriptor ready since the last call. The next look sees a descriptor that stays
    /// ready again.
    pub fn was_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire) && self.ready.swap(false, Ordering::AcqRel)
    }

    fn data(&self) -> epoll::EventData {
        epoll::EventData::new_u64(self.number)
    }

    /// Changes what is watched for.
    pub fn set(&mut self, interest: Interest) -> io::Result<()> {
        if self.interest != interest {
            epoll::modify(&self.poller.shared.epoll, self.fd.as_fd(), self.data(), interest.flags())?;
            self.interest = interest;
        }
        Ok(())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // It fails only if the descriptor is no longer in the set, which is the aim.
        let _ = epoll::delete(&self.poller.shared.epoll, self.fd.as_fd());
        lock(&self.poller.shared.watched).ready.remove(&self.number);
    }
}

/// The event data of the descriptor that `wake` writes to. The numbers of watched descriptors start at one.
const WAKE: u64 = 0;

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_wake_before_the_wait_is_not_lost() {
        let poller = Poller::new().expect("a poller");
        poller.wake();
        poller.wait(None).expect("a wait that returns");
    }

    #[test]
    fn bytes_wake_a_sleeping_thread() {
        let poller = Poller::new().expect("a poller");
        let (mut near, far) = UnixStream::pair().expect("a pair");
        let _registration = poller.add(far.as_fd(), Interest::Read).expect("a registration");
        let sleeper = std::thread::spawn({
            let poller = poller.clone();
            move || poller.wait(None)
        });
        near.write_all(b"x").expect("a byte");
        sleeper.join().expect("no panic").expect("a wait that returns");
    }

    #[test]
    fn a_look_says_what_is_ready_and_leaves_a_wake_to_the_sleeping_thread() {
        let poller = Poller::new().expect("a poller");
        let (mut near, far) = UnixStream::pair().expect("a pair");
        let registration = poller.add(far.as_fd(), Interest::Read).expect("a registration");
        poller.look().expect("a look");
        assert!(!registration.was_ready());
        near.write_all(b"x").expect("a byte");
        poller.wake();
        for _ in 0..2 {
            poller.look().expect("a look");
            assert!(registration.was_ready(), "the byte is still there");
            assert!(!registration.was_ready(), "no look since");
        }
        drop(registration);
        poller.wait(None).expect("the wake");
    }
}
