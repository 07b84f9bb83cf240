//! A poller: threads sleep on it for every file descriptor that a communicator waits for.
//!
//! Level triggered: a descriptor that stays ready wakes the next wait at once. Format and semantics: epoll(7), eventfd(2).

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime};

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

    /// Takes a descriptor's owner in, and watches nothing yet. Forked children do not inherit the descriptor from now on.
    pub fn own<S: AsFd>(&self, owner: S) -> Watched<S> {
        Watched { private: Private::new(owner.as_fd()).ok(), owner, poller: self.clone(), entry: None }
    }

    /// Watches a descriptor until its owner is dropped.
    pub fn watch<S: AsFd>(&self, owner: S, interest: Interest) -> io::Result<Watched<S>> {
        let mut watched = self.own(owner);
        watched.watch(interest)?;
        Ok(watched)
    }

    /// The same for a descriptor of a stream, which [`Poller::look`] names.
    pub fn watch_named<S: AsFd>(&self, owner: S, interest: Interest, name: StreamName) -> io::Result<Watched<S>> {
        let mut watched = self.own(owner);
        watched.add(interest, name.data())?;
        Ok(watched)
    }

    /// A descriptor of a stream, as in [`Poller::watch_named`], that becomes ready after so long, and stays so.
    pub fn alarm(&self, after: Duration, name: StreamName) -> io::Result<Watched<OwnedFd>> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        // A time of zero would never come.
        let first = timespec(after.max(Duration::from_nanos(1)));
        let once = Itimerspec { it_interval: timespec(Duration::ZERO), it_value: first };
        timerfd_settime(&timer, TimerfdTimerFlags::empty(), &once)?;
        self.watch_named(timer, Interest::Read, name)
    }

    /// Sleeps until a watched descriptor is ready, [`Poller::wake`] is called, or `timeout` has passed. May return early.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<()> {
        let timeout = timeout.map(|timeout| timespec(timeout.min(SLEEP_MAX)));
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

/// A poller is ready while one of its descriptors is, so another one can watch it.
impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.epoll.as_fd()
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}

/// The owner of a file descriptor that a poller watches, or may watch: it does not when this is dropped, which closes it.
#[derive(Debug)]
pub struct Watched<S: AsFd> {
    /// Also where nothing watches it.
    private: Option<Private>,
    owner: S,
    poller: Poller,
    entry: Option<Entry>,
}

/// How a descriptor is watched.
#[derive(Debug)]
struct Entry {
    interest: Interest,
    /// What its events carry.
    data: u64,
}

impl<S: AsFd> Watched<S> {
    /// Whether the poller watches it.
    pub fn is_watched(&self) -> bool {
        self.entry.is_some()
    }

    /// Begins to watch it. It must not be watched.
    pub fn watch(&mut self, interest: Interest) -> io::Result<()> {
        self.add(interest, UNNAMED)
    }

    fn add(&mut self, interest: Interest, data: u64) -> io::Result<()> {
        if self.private.is_none() {
            self.private = Some(Private::new(self.owner.as_fd())?);
        }
        let event = epoll::EventData::new_u64(data);
        epoll::add(&self.poller.shared.epoll, &self.owner, event, interest.flags())?;
        self.entry = Some(Entry { interest, data });
        Ok(())
    }

    /// Has another poller watch it, as the descriptor of a stream.
    pub fn move_to(&mut self, poller: &Poller, interest: Interest, name: StreamName) -> io::Result<()> {
        self.leave();
        self.poller = poller.clone();
        self.add(interest, name.data())
    }

    /// Watches it no longer.
    pub fn leave(&mut self) {
        if self.entry.take().is_some() {
            // It fails only if the descriptor is no longer in the set, which is the aim.
            let _ = epoll::delete(&self.poller.shared.epoll, &self.owner);
        }
    }

    /// Changes what is watched for.
    pub fn set(&mut self, interest: Interest) -> io::Result<()> {
        self.modify(|entry| entry.interest = interest)
    }

    /// Has [`Poller::look`] name the stream from now on that the descriptor turned out to be of.
    pub fn name(&mut self, name: StreamName) -> io::Result<()> {
        self.modify(|entry| entry.data = name.data())
    }

    fn modify(&mut self, change: impl FnOnce(&mut Entry)) -> io::Result<()> {
        let entry = self.entry.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        let (interest, data) = (entry.interest, entry.data);
        change(entry);
        if (interest, data) != (entry.interest, entry.data) {
            let event = epoll::EventData::new_u64(entry.data);
            let changed = epoll::modify(&self.poller.shared.epoll, &self.owner, event, entry.interest.flags());
            if let Err(error) = changed {
                (entry.interest, entry.data) = (interest, data);
                return Err(error.into());
            }
        }
        Ok(())
    }
}

impl<S: AsFd> Deref for Watched<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.owner
    }
}

impl<S: AsFd> DerefMut for Watched<S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.owner
    }
}

impl<S: AsFd> Drop for Watched<S> {
    fn drop(&mut self) {
        self.leave();
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

/// No sleep is longer. Before Linux 5.11, the system takes no more than 24 days.
pub const SLEEP_MAX: Duration = Duration::from_secs(86_400);

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use crate::sys::fork::testing::beside_a_child;

    #[test]
    fn a_wake_before_the_wait_is_not_lost() {
        let poller = Poller::new().expect("a poller");
        poller.wake();
        poller.wait(None).expect("a wait that returns");
    }

    #[test]
    fn an_alarm_names_its_stream_once_its_time_has_come_and_until_it_is_dropped() {
        let poller = Poller::new().expect("a poller");
        let look = || {
            let mut named = Vec::new();
            poller.look(&mut named).expect("a look");
            named
        };
        let hour = poller.alarm(Duration::from_secs(3600), StreamName::To(Rank(1))).expect("a timer");
        let now = poller.alarm(Duration::ZERO, StreamName::From(Rank(2))).expect("a timer");
        poller.wait(None).expect("a wait that returns");
        assert_eq!([look(), look()], [[StreamName::From(Rank(2))]; 2]);
        drop(now);
        assert_eq!(look(), []);
        drop(hour);
    }

    #[test]
    fn a_childs_copy_does_not_keep_a_connection_open_that_is_not_watched() {
        let poller = Poller::new().expect("a poller");
        for was_watched in [false, true] {
            let (near, mut far) = UnixStream::pair().expect("a pair");
            let mut near = poller.own(near);
            if was_watched {
                near.watch(Interest::Read).expect("a place in the set");
                near.leave();
            }
            beside_a_child(|| {
                drop(near);
                assert_eq!(far.read(&mut [0]).expect("the end of the connection"), 0);
            });
        }
    }

    #[test]
    fn bytes_wake_a_sleeping_thread() {
        let poller = Poller::new().expect("a poller");
        let (mut near, far) = UnixStream::pair().expect("a pair");
        let _far = poller.watch(far, Interest::Read).expect("a place in the set");
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
        let mut far = poller.watch(far, Interest::Read).expect("a place in the set");
        near.write_all(b"x").expect("a byte");
        assert_eq!(look(), (vec![], true), "it is no stream's yet");
        for name in [StreamName::From(Rank(0)), StreamName::To(Rank(u32::MAX))] {
            far.name(name).expect("a name");
            poller.wake();
            for _ in 0..2 {
                assert_eq!(look(), (vec![name], false), "the byte is still there");
            }
        }
        far.read_exact(&mut [0]).expect("the byte");
        assert_eq!(look(), (vec![], false));
        far.set(Interest::Write).expect("another interest");
        assert_eq!(look(), (vec![StreamName::To(Rank(u32::MAX))], false), "it keeps its name");
        drop(far);
        poller.wait(None).expect("the wake");
    }

    #[test]
    fn of_more_streams_than_one_look_names_each_has_its_turn() {
        let poller = Poller::new().expect("a poller");
        let (mut near, far) = UnixStream::pair().expect("a pair");
        near.write_all(b"x").expect("a byte");
        let copies: Vec<_> = (0..200).map(|_| far.try_clone().expect("a copy")).collect();
        let watch = |(rank, far): (usize, UnixStream)| {
            poller.watch_named(far, Interest::Read, StreamName::From(Rank::from(rank))).expect("a place in the set")
        };
        let _watched: Vec<_> = copies.into_iter().enumerate().map(watch).collect();
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
