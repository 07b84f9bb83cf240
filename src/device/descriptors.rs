//! File descriptors from every rank of a host to every other one.
//!
//! Each rank opens a [`Post`] and tells the others its address, on a channel that nobody else can read or write. Then each rank
//! connects to every other one and sends its descriptors. A caller must be of this user and know the address's nonce; other
//! callers are dropped. No thread is begun, and nothing waits longer than the deadline.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use serde::{Deserialize, Serialize};

use crate::sys::{limits, random, socket};
use crate::types::Rank;

/// Why descriptors did not come or go.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandoverError {
    /// Ranks have not handed theirs over in time.
    #[error("ranks {missing:?} have not handed their file descriptors over in time")]
    Missing {
        /// Which ones.
        missing: Vec<u32>,
    },
    /// Ranks have not listened in time.
    #[error("ranks {unreached:?} have not taken a call in time")]
    Deaf {
        /// Which ones.
        unreached: Vec<u32>,
    },
    /// This rank or another one has left: its descriptors will not come.
    #[error("a rank has left")]
    Left,
    /// A rank is gone, or cannot be reached.
    #[error("rank {rank} cannot be reached: {cause}")]
    Unreachable {
        /// Which one.
        rank: u32,
        /// What the system said.
        cause: io::Error,
    },
    /// The system refused something.
    #[error("{what} failed: {cause}")]
    Os {
        /// What was asked for.
        what: &'static str,
        /// What the system said.
        cause: io::Error,
    },
}

impl HandoverError {
    /// The error with the ranks' names in place of their numbers.
    #[must_use]
    pub fn naming(self, names: &[Rank]) -> HandoverError {
        let name = |rank: u32| names.get(rank as usize).map_or(rank, |name| name.0);
        let all = |ranks: Vec<u32>| ranks.into_iter().map(name).collect();
        match self {
            HandoverError::Missing { missing } => HandoverError::Missing { missing: all(missing) },
            HandoverError::Deaf { unreached } => HandoverError::Deaf { unreached: all(unreached) },
            HandoverError::Unreachable { rank, cause } => HandoverError::Unreachable { rank: name(rank), cause },
            HandoverError::Left | HandoverError::Os { .. } => self,
        }
    }
}

/// Where a rank takes descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    name: Vec<u8>,
    nonce: [u8; NONCE],
}

/// One exchange's listener.
#[derive(Debug)]
pub struct Post {
    listener: UnixListener,
    address: Address,
}

impl Post {
    /// Listens under an unguessable name.
    pub fn open() -> Result<Post, HandoverError> {
        let random: [u8; 16 + NONCE] =
            random::bytes().map_err(|cause| HandoverError::Os { what: "a random name", cause })?;
        let (name, nonce) = random.split_first_chunk::<16>().expect("it is longer");
        let name = format!("ncclx_rs-{:032x}", u128::from_le_bytes(*name)).into_bytes();
        let listener = socket::listen_unix(&name);
        let listener = listener.map_err(|cause| HandoverError::Os { what: "a Unix socket", cause })?;
        let nonce = nonce.try_into().expect("what is left");
        Ok(Post { listener, address: Address { name, nonce } })
    }

    /// Every other rank has to be told this, and nobody else.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Hands `own` to every rank whose address is in `ranks`. Returns theirs by rank, with copies of `own` at this rank's
    /// place. Asks `are_there` now and then.
    ///
    /// # Panics
    /// When there is no rank `me`, or when there are more than 255 descriptors.
    pub fn exchange(
        self,
        me: Rank,
        ranks: &[Address],
        own: &[BorrowedFd<'_>],
        deadline: Instant,
        are_there: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<OwnedFd>>, HandoverError> {
        assert!(me.index() < ranks.len(), "rank {me} of {}", ranks.len());
        let greeting = |to: &Address| Greeting {
            nonce: to.nonce,
            rank: me.0,
            count: own.len().try_into().expect("no more than 255 descriptors"),
        };
        let copies = own.iter().map(|fd| fd.try_clone_to_owned()).collect::<io::Result<Vec<_>>>();
        let copies = copies.map_err(|cause| HandoverError::Os { what: "a copy of a descriptor", cause })?;
        let mut taken: Vec<Option<Vec<OwnedFd>>> = ranks.iter().map(|_| None).collect();
        taken[me.index()] = Some(copies);
        let mut calls: Vec<Call<'_>> = ranks
            .iter()
            .enumerate()
            .filter(|(rank, _)| *rank != me.index())
            .map(|(rank, to)| Call {
                rank: Rank::from(rank),
                to,
                greeting: greeting(to).to_bytes(),
                stream: None,
                sent: 0,
            })
            .collect();
        let mut callers: Vec<Caller> = Vec::new();
        loop {
            for index in (0..calls.len()).rev() {
                if calls[index].drive(own)? {
                    calls.swap_remove(index);
                }
            }
            self.admit(&mut callers, ranks.len())?;
            for index in (0..callers.len()).rev() {
                match callers[index].drive(&self.address.nonce) {
                    Ok(None) => continue,
                    Ok(Some((rank, fds))) => {
                        if let Some(place @ None) = taken.get_mut(rank.index()) {
                            *place = Some(fds);
                        }
                    }
                    Err(cause) if limits::is_shortage(&cause) => {
                        return Err(HandoverError::Os { what: "taking a file descriptor", cause });
                    }
                    Err(error) => log::debug!("rank {me}: a caller with file descriptors was dropped: {error}"),
                }
                callers.swap_remove(index);
            }
            if calls.is_empty() && taken.iter().all(Option::is_some) {
                return Ok(taken.into_iter().flatten().collect());
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
                let ranks =
                    |absent: &mut dyn Iterator<Item = usize>| absent.map(|rank| rank as u32).collect::<Vec<_>>();
                let missing = ranks(&mut (0..taken.len()).filter(|rank| taken[*rank].is_none()));
                let mut unreached = ranks(&mut calls.iter().map(|call| call.rank.index()));
                unreached.sort_unstable();
                return Err(if missing.is_empty() {
                    HandoverError::Deaf { unreached }
                } else {
                    HandoverError::Missing { missing }
                });
            };
            if !are_there() {
                return Err(HandoverError::Left);
            }
            self.sleep(&callers, left.min(if calls.is_empty() { LOOK } else { AGAIN }))?;
        }
    }

    /// Accepts the connections that wait.
    fn admit(&self, callers: &mut Vec<Caller>, ranks: usize) -> Result<(), HandoverError> {
        // Strangers may call any number of times, so callers that have sent no greeting go first.
        let most = 2 * ranks + UNAUTHENTICATED_MAX;
        loop {
            let caller = socket::admit(self.listener.accept(), |(stream, _)| {
                let is_known = socket::is_of_this_user(stream.as_fd())?;
                stream.set_nonblocking(true)?;
                Ok(is_known.then_some(stream))
            });
            match caller {
                Ok(Some(Some(stream))) => callers.push(Caller::new(stream)),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(cause) => return Err(HandoverError::Os { what: "taking a call", cause }),
            }
            if callers.len() > most {
                let stranger = callers.iter().position(|caller| caller.greeting.is_none());
                callers.remove(stranger.unwrap_or(0));
            }
        }
    }

    /// Sleeps until a caller connects or sends, or `at_most` has passed.
    fn sleep(&self, callers: &[Caller], at_most: Duration) -> Result<(), HandoverError> {
        let streams = callers.iter().map(|caller| caller.stream.as_fd());
        let mut watched: Vec<PollFd<'_>> = std::iter::once(self.listener.as_fd())
            .chain(streams)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let time = Timespec {
            tv_sec: at_most.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: at_most.subsec_nanos().into(),
        };
        match rustix::event::poll(&mut watched, Some(&time)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(cause) => Err(HandoverError::Os { what: "poll", cause: cause.into() }),
        }
    }
}

/// What a caller says first.
#[derive(Clone, Copy, Debug)]
struct Greeting {
    nonce: [u8; NONCE],
    rank: u32,
    count: u8,
}

impl Greeting {
    const BYTES: usize = NONCE + 5;

    fn to_bytes(self) -> [u8; Greeting::BYTES] {
        let mut bytes = [0; Greeting::BYTES];
        bytes[..NONCE].copy_from_slice(&self.nonce);
        bytes[NONCE..][..4].copy_from_slice(&self.rank.to_le_bytes());
        bytes[NONCE + 4] = self.count;
        bytes
    }

    fn from_bytes(bytes: [u8; Greeting::BYTES]) -> Greeting {
        let (nonce, rest) = bytes.split_first_chunk().expect("it is longer");
        let (rank, rest) = rest.split_first_chunk().expect("it is longer");
        Greeting { nonce: *nonce, rank: u32::from_le_bytes(*rank), count: rest[0] }
    }
}

/// This rank's descriptors on their way to another one.
struct Call<'a> {
    rank: Rank,
    to: &'a Address,
    greeting: [u8; Greeting::BYTES],
    stream: Option<UnixStream>,
    /// How many bytes of the greeting, then descriptors.
    sent: usize,
}

impl Call<'_> {
    /// Goes on without blocking. True once everything is sent; the other rank can read it even when this end has closed.
    fn drive(&mut self, own: &[BorrowedFd<'_>]) -> Result<bool, HandoverError> {
        match self.advance(own) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(cause) => Err(HandoverError::Unreachable { rank: self.rank.0, cause }),
        }
    }

    fn advance(&mut self, own: &[BorrowedFd<'_>]) -> io::Result<()> {
        if self.stream.is_none() {
            self.stream = Some(socket::connect_unix(&self.to.name)?);
        }
        let stream = self.stream.as_mut().expect("it is there now");
        while self.sent < Greeting::BYTES {
            self.sent += stream.write(&self.greeting[self.sent..])?;
        }
        for (number, fd) in own.iter().enumerate().skip(self.sent - Greeting::BYTES) {
            socket::send_fd(stream, *fd, number as u8)?;
            self.sent += 1;
        }
        Ok(())
    }
}

/// A connection to this rank, and what has come through it.
struct Caller {
    stream: UnixStream,
    bytes: [u8; Greeting::BYTES],
    received: usize,
    greeting: Option<Greeting>,
    fds: Vec<OwnedFd>,
}

impl Caller {
    fn new(stream: UnixStream) -> Caller {
        Caller { stream, bytes: [0; Greeting::BYTES], received: 0, greeting: None, fds: vec![] }
    }

    /// Goes on without blocking. Once all has come, returns the caller's rank and descriptors.
    fn drive(&mut self, nonce: &[u8; NONCE]) -> io::Result<Option<(Rank, Vec<OwnedFd>)>> {
        match self.advance(nonce) {
            Ok(rank) => Ok(Some((rank, std::mem::take(&mut self.fds)))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn advance(&mut self, nonce: &[u8; NONCE]) -> io::Result<Rank> {
        while self.received < Greeting::BYTES {
            match self.stream.read(&mut self.bytes[self.received..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => self.received += count,
            }
        }
        let greeting = Greeting::from_bytes(self.bytes);
        if greeting.nonce != *nonce {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it does not know the nonce"));
        }
        self.greeting = Some(greeting);
        while self.fds.len() < usize::from(greeting.count) {
            let (fd, _) = socket::look_at_fd(&self.stream)?;
            socket::drop_fd(&self.stream)?;
            self.fds.push(fd);
        }
        Ok(Rank(greeting.rank))
    }
}

const NONCE: usize = 16;

/// Connections of strangers that are kept beside those of ranks.
const UNAUTHENTICATED_MAX: usize = 16;

/// How often it asks whether all ranks are there.
const LOOK: Duration = Duration::from_millis(100);

/// How often to try a full queue of another rank again, which cannot be waited for.
const AGAIN: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    /// A file with a text in it.
    fn file(text: &str) -> OwnedFd {
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let mut file = File::from(fd);
        file.write_all(text.as_bytes()).expect("room");
        file.into()
    }

    fn text(fd: &OwnedFd) -> String {
        let mut bytes = [0; 64];
        let count = rustix::io::pread(fd, &mut bytes[..], 0).expect("it can be read");
        String::from_utf8(bytes[..count].to_vec()).expect("a text")
    }

    fn open(size: usize) -> (Vec<Post>, Vec<Address>) {
        let posts: Vec<Post> = (0..size).map(|_| Post::open().expect("a post")).collect();
        let addresses = posts.iter().map(|post| post.address().clone()).collect();
        (posts, addresses)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(120)
    }

    /// What each rank gets if rank r hands r descriptors over.
    fn all_to_all(posts: Vec<Post>, addresses: &[Address]) {
        std::thread::scope(|scope| {
            for (me, post) in posts.into_iter().enumerate() {
                scope.spawn(move || {
                    let own: Vec<OwnedFd> = (0..me).map(|number| file(&format!("{number} of {me}"))).collect();
                    let own: Vec<_> = own.iter().map(AsFd::as_fd).collect();
                    let taken = post.exchange(Rank::from(me), addresses, &own, soon(), &|| true).expect("all come");
                    for (rank, fds) in taken.iter().enumerate() {
                        let texts: Vec<String> = fds.iter().map(text).collect();
                        let expected: Vec<String> = (0..rank).map(|number| format!("{number} of {rank}")).collect();
                        assert_eq!(texts, expected, "what rank {me} has of rank {rank}");
                    }
                });
            }
        });
    }

    #[test]
    fn every_rank_gets_the_descriptors_of_all() {
        for size in 1..=8 {
            let (posts, addresses) = open(size);
            all_to_all(posts, &addresses);
        }
    }

    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let (mut posts, addresses) = open(3);
        // Only the second rank has called when the time is over.
        let greeting = Greeting { nonce: addresses[0].nonce, rank: 1, count: 0 }.to_bytes();
        let mut call = Call { rank: Rank(0), to: &addresses[0], greeting, stream: None, sent: 0 };
        assert!(call.drive(&[]).expect("it listens"));
        let end = posts.remove(0).exchange(Rank(0), &addresses, &[], Instant::now(), &|| true);
        assert!(matches!(&end, Err(HandoverError::Missing { missing }) if *missing == [2]), "{end:?}");
    }

    #[test]
    fn a_rank_that_is_gone_is_named_at_once() {
        let (mut posts, addresses) = open(2);
        posts.pop();
        let end = posts.remove(0).exchange(Rank(0), &addresses, &[], soon(), &|| true);
        assert!(matches!(&end, Err(HandoverError::Unreachable { rank: 1, .. })), "{end:?}");
    }

    #[test]
    fn nobody_waits_for_a_rank_that_has_left() {
        let (mut posts, addresses) = open(2);
        // The other rank listens, and will never call.
        let asked = std::cell::Cell::new(0);
        let are_there = || asked.replace(asked.get() + 1) < 2;
        let end = posts.remove(0).exchange(Rank(0), &addresses, &[], soon(), &are_there);
        assert!(matches!(&end, Err(HandoverError::Left)), "{end:?}");
        assert_eq!(asked.get(), 3);
    }

    #[test]
    fn who_does_not_know_the_nonce_hands_nothing_over() {
        let (posts, addresses) = open(3);
        // More than are kept: one sends nothing, the others a wrong nonce.
        let strangers: Vec<UnixStream> = (0..3 * UNAUTHENTICATED_MAX)
            .map(|number| {
                let mut stream = socket::connect_unix(&addresses[0].name).expect("room");
                if number > 0 {
                    let wrong = Greeting { nonce: [number as u8; NONCE], rank: 1, count: 1 };
                    stream.write_all(&wrong.to_bytes()).expect("room");
                    socket::send_fd(&stream, file("wrong").as_fd(), 0).expect("room");
                }
                stream
            })
            .collect();
        all_to_all(posts, &addresses);
        drop(strangers);
    }

    #[test]
    fn a_caller_that_breaks_off_may_come_again() {
        let (mut posts, addresses) = open(2);
        let mut broken = socket::connect_unix(&addresses[0].name).expect("room");
        let greeting = Greeting { nonce: addresses[0].nonce, rank: 1, count: 2 };
        broken.write_all(&greeting.to_bytes()).expect("room");
        socket::send_fd(&broken, file("the first of two").as_fd(), 0).expect("room");
        drop(broken);
        let (second, first) = (posts.pop().expect("two"), posts.pop().expect("two"));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let own = file("whole");
                second.exchange(Rank(1), &addresses, &[own.as_fd()], soon(), &|| true).expect("both come");
            });
            let taken = first.exchange(Rank(0), &addresses, &[], soon(), &|| true).expect("both come");
            assert_eq!(taken[1].iter().map(text).collect::<Vec<_>>(), ["whole"]);
        });
    }
}
