//! A poller: threads sleep on it for every file descriptor that a communicator waits for.
//!
//! Level triggered: a descriptor that stays ready wakes the next wait at once. Format and semantics: epoll(7), eventfd(2).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use crate::sync::Arc;
use crate::sys::fork::Private;
use crate::types::Rank;

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

/// A stream, as the poller names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamName {
    /// The stream to a rank.
    To(Rank),
    /// The stream from a rank.
    From(Rank),
}

impl StreamName {
    /// What its events carry, and [`WAKE`] and [`UNNAMED`] are not.
    fn data(self) -> u64 {
        match self {
            StreamName::To(rank) => TO << 32 | u64::from(rank.0),
            StreamName::From(rank) => FROM << 32 | u64::from(rank.0),
        }
    }

    /// The stream whose events carry `data`.
    fn of(data: u64) -> Option<StreamName> {
        let rank = Rank(data as u32);
        match data >> 32 {
            TO => Some(StreamName::To(rank)),
            FROM => Some(StreamName::From(rank)),
            _ => None,
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

    /// Watches a copy of `fd` until the registration is dropped. Forked children inherit neither.
    pub fn add(&self, fd: BorrowedFd<'_>, interest: Interest) -> io::Result<Registration> {
        self.add_with(fd, interest, UNNAMED)
    }

    /// The same for a descriptor of a stream, which [`Poller::look`] names.
    pub fn add_named(&self, fd: BorrowedFd<'_>, interest: Interest, name: StreamName) -> io::Result<Registration> {
        self.add_with(fd, interest, name.data())
    }

    fn add_with(&self, fd: BorrowedFd<'_>, interest: Interest, data: u64) -> io::Result<Registration> {
        let original = Private::new(fd)?;
        let fd = fd.try_clone_to_owned()?;
        let private = [original, Private::new(fd.as_fd())?];
        let registration = Registration { poller: self.clone(), fd, interest, data, _private: private };
        let data = epoll::EventData::new_u64(data);
        epoll::add(&self.shared.epoll, &registration.fd, data, interest.flags())?;
        Ok(registration)
    }

    /// Sleeps until a watched descriptor is ready, [`Poller::wake`] is called, or `timeout` has passed. May return early.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = timeout.map(|limit| Timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        let mut woken = false;
        self.collect(timeout.as_ref(), |data| woken |= data == WAKE)?;
        if woken {
            // Cleared at once. If another thread was faster, there is nothing to read.
            let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        }
        Ok(())
    }

    /// Appends the streams that are ready now to `named`, some at most; the next look begins with the others. True: a descriptor
    /// is ready that has no name. It does not sleep, and leaves a call of [`Poller::wake`] to the thread that does.
    pub fn look(&self, named: &mut Vec<StreamName>) -> io::Result<bool> {
        let mut has_unnamed = false;
        self.collect(Some(&Timespec { tv_sec: 0, tv_nsec: 0 }), |data| {
            named.extend(StreamName::of(data));
            has_unnamed |= data == UNNAMED;
        })?;
        Ok(has_unnamed)
    }

    /// Waits for events and tells what they carry.
    fn collect(&self, timeout: Option<&Timespec>, mut tell: impl FnMut(u64)) -> io::Result<()> {
        let none = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(UNNAMED) };
        let mut events = [none; EVENTS_MAX];
        match epoll::wait(&self.shared.epoll, &mut events, timeout) {
            Ok(count) => events[..count].iter().for_each(|event| tell(event.data.u64())),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
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
    /// What its events carry.
    data: u64,
    _private: [Private; 2],
}

impl Registration {
    /// Changes what is watched for.
    pub fn set(&mut self, interest: Interest) -> io::Result<()> {
        if self.interest != interest {
            self.modify(interest, self.data)?;
            self.interest = interest;
        }
        Ok(())
    }

    /// Has [`Poller::look`] name the stream from now on that the descriptor turned out to be of.
    pub fn name(&mut self, name: StreamName) -> io::Result<()> {
        self.modify(self.interest, name.data())?;
        self.data = name.data();
        Ok(())
    }

    fn modify(&self, interest: Interest, data: u64) -> io::Result<()> {
        let data = epoll::EventData::new_u64(data);
        Ok(epoll::modify(&self.poller.shared.epoll, self.fd.as_fd(), data, interest.flags())?)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // It fails only if the descriptor is no longer in the set, which is the aim.
        let _ = epoll::delete(&self.poller.shared.epoll, self.fd.as_fd());
    }
}

/// The event data of the descriptor that `wake` writes to.
const WAKE: u64 = 0;

/// The event data of descriptors that are no stream's, such as a listener's.
const UNNAMED: u64 = 1;

/// The upper half of a stream's event data; the lower half is the rank.
const TO: u64 = 1;
const FROM: u64 = 2;

/// How many events are taken at a time.
const EVENTS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
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
    fn a_look_names_what_is_ready_and_leaves_a_wake_to_the_sleeping_thread() {
        let poller = Poller::new().expect("a poller");
        let (mut near, far) = UnixStream::pair().expect("a pair");
        let look = || {
            let mut named = Vec::new();
            let has_unnamed = poller.look(&mut named).expect("a look");
            (named, has_unnamed)
        };
        let mut registration = poller.add(far.as_fd(), Interest::Read).expect("a registration");
        near.write_all(b"x").expect("a byte");
        assert_eq!(look(), (vec![], true), "it is no stream's yet");
        for name in [StreamName::From(Rank(0)), StreamName::To(Rank(u32::MAX))] {
            registration.name(name).expect("a name");
            poller.wake();
            for _ in 0..2 {
                assert_eq!(look(), (vec![name], false), "the byte is still there");
            }
        }
        (&far).read_exact(&mut [0]).expect("the byte");
        assert_eq!(look(), (vec![], false));
        registration.set(Interest::Write).expect("another interest");
        assert_eq!(look(), (vec![StreamName::To(Rank(u32::MAX))], false), "it keeps its name");
        drop(registration);
        poller.wait(None).expect("the wake");
    }

    #[test]
    fn of_more_streams_than_one_look_names_each_has_its_turn() {
        let poller = Poller::new().expect("a poller");
        let (mut near, far) = UnixStream::pair().expect("a pair");
        near.write_all(b"x").expect("a byte");
        let copies: Vec<_> = (0..200).map(|_| far.try_clone().expect("a copy")).collect();
        let add = |(rank, far): (usize, &UnixStream)| {
            poller.add_named(far.as_fd(), Interest::Read, StreamName::From(Rank::from(rank))).expect("a registration")
        };
        let _registrations: Vec<_> = copies.iter().enumerate().map(add).collect();
        let mut named = Vec::new();
        (0..200usize.div_ceil(EVENTS_MAX)).for_each(|_| assert!(!poller.look(&mut named).expect("a look")));
        let mut ranks: Vec<u32> = named
            .iter()
            .map(|name| match name {
                StreamName::From(rank) => rank.0,
                StreamName::To(_) => panic!("{name:?}"),
            })
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        assert_eq!(ranks, (0..200).collect::<Vec<_>>());
    }
}
