//! One place to sleep for everything that a communicator waits for.
//!
//! Level triggered: what is ready and not dealt with wakes the next wait at once. Format and semantics: epoll(7),
//! eventfd(2).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use crate::sync::Arc;
use crate::sys::fork::Private;

/// What a file descriptor is watched for. Its end and errors are always watched.
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
    _private: [Private; 2],
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
        Ok(Poller { shared: Arc::new(Shared { epoll, wake, _private: private }) })
    }

    /// Watches a copy of `fd` until the registration is dropped. Forked children have neither.
    pub fn add(&self, fd: BorrowedFd<'_>, interest: Interest) -> io::Result<Registration> {
        let original = Private::new(fd)?;
        let fd = fd.try_clone_to_owned()?;
        let private = [original, Private::new(fd.as_fd())?];
        epoll::add(&self.shared.epoll, &fd, epoll::EventData::new_u64(0), interest.flags())?;
        Ok(Registration { poller: self.clone(), fd, interest, _private: private })
    }

    /// Sleeps until something watched is ready, [`Poller::wake`] is called, or `timeout` has passed. May return for no
    /// reason.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = timeout.map(|limit| Timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 16];
        let count = match epoll::wait(&self.shared.epoll, &mut events, timeout.as_ref()) {
            Ok(count) => count,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if events[..count].iter().any(|event| event.data.u64() == WAKE) {
            // Emptied at once; when another thread was faster there is nothing to read.
            let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        }
        Ok(())
    }

    /// Ends a wait that is under way, or the next one.
    pub fn wake(&self) {
        // The counter cannot overflow into blocking: it is emptied by every wait, and WouldBlock means it is set.
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
    }
}

/// A watched file descriptor.
#[derive(Debug)]
pub struct Registration {
    poller: Poller,
    fd: OwnedFd,
    interest: Interest,
    _private: [Private; 2],
}

impl Registration {
    /// Changes what is watched for.
    pub fn set(&mut self, interest: Interest) -> io::Result<()> {
        if self.interest != interest {
            let data = epoll::EventData::new_u64(0);
            epoll::modify(&self.poller.shared.epoll, self.fd.as_fd(), data, interest.flags())?;
            self.interest = interest;
        }
        Ok(())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // It fails only if the descriptor is not in the set any more, which is what is wanted.
        let _ = epoll::delete(&self.poller.shared.epoll, self.fd.as_fd());
    }
}

/// The event data of the descriptor that `wake` writes to; watched ones have zero.
const WAKE: u64 = 1;

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
}
