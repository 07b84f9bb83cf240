//! The handover of a ring from the process that makes it to the process that reads it (`SCM_RIGHTS`).

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::error::{Down, LinkDown};
use crate::sys::limits;
use crate::sys::shm_ring::ShmRing;
use crate::sys::socket;
use crate::transport::auth::{Identity, Secret};
use crate::transport::handshake::{Opening, is_passing};
use crate::transport::pending::Candidate;
use crate::transport::shm::bells::SharedLine;
use crate::transport::{Detour, shortage};
use crate::types::Rank;

/// The opener's side: proves itself, hands the ring over, and waits until the peer has mapped it.
#[derive(Debug)]
pub(super) struct RingHandover {
    opening: Opening,
    stage: Stage,
    ring: OwnedFd,
    detour: Detour,
    /// By what the ring needs no socket, if the peer agrees.
    line: Option<SharedLine>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Proving,
    Handing,
    Waiting,
    Done,
}

impl RingHandover {
    pub(super) fn new(identity: Identity, peer: Rank, ring: OwnedFd, detour: Detour, line: Option<SharedLine>) -> Self {
        RingHandover { opening: Opening::new(identity, peer), stage: Stage::Proving, ring, detour, line }
    }

    /// By what the ring needs no socket, once the peer has it and has agreed.
    pub(super) fn take_line(&mut self) -> Option<SharedLine> {
        self.line.take()
    }

    /// Advances without blocking. True: the peer has the ring. The error says that shared memory does not lead to the peer, or
    /// that this process was too slow for it.
    pub(super) fn drive(&mut self, stream: &mut UnixStream) -> Result<bool, LinkDown> {
        self.next_stages(stream).map_err(|down| match self.opening.classify(down, &*stream) {
            slow if slow.kind == Down::Busy => slow,
            down => LinkDown::unfit(format!("shared memory with it fails: {down}")),
        })
    }

    /// What only the two ends know, once both have proved themselves.
    pub(super) fn session(&self) -> Option<Secret> {
        self.opening.session()
    }

    fn next_stages(&mut self, stream: &mut UnixStream) -> Result<bool, LinkDown> {
        loop {
            let passed = match self.stage {
                Stage::Proving => {
                    if !self.opening.drive(stream)? {
                        return Ok(false);
                    }
                    self.stage = Stage::Handing;
                    continue;
                }
                Stage::Handing => {
                    let note = Note { waits: self.detour == Detour::Impossible, shares: self.line.is_some() };
                    socket::send_fd(stream, self.ring.as_fd(), note.encode()).map(|()| Stage::Waiting)
                }
                Stage::Waiting => self.hear(stream).map(|()| Stage::Done),
                Stage::Done => return Ok(true),
            };
            match passed {
                Ok(next) => self.stage = next,
                Err(error) if is_passing(&error) => return Ok(false),
                // It is tried again, as one that has to wait.
                Err(error) if limits::is_shortage(&error) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Hears that the peer has the ring, and whether it needs no socket.
    fn hear(&mut self, stream: &mut UnixStream) -> io::Result<()> {
        let mut answer = [0];
        if stream.read(&mut answer)? == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it did not take the ring"));
        }
        if answer != [SHARED]
            && let Some(line) = self.line.take()
        {
            line.decline();
        }
        Ok(())
    }
}

/// The acceptor's side: advances a connection without blocking until its ring is mapped here, and says so. `share` gives that by what
/// a ring needs no socket, if this side can do so; `size` is that of the communicator.
pub(super) fn accept(
    candidate: &mut Candidate<UnixStream>,
    size: usize,
    share: impl FnOnce(Rank, &UnixStream, &ShmRing) -> Option<SharedLine>,
) -> Result<Option<(ShmRing, Option<SharedLine>)>, LinkDown> {
    if candidate.rank.is_none() {
        candidate.rank = candidate.accepting.drive(&mut *candidate.stream)?;
    }
    let Some(rank) = candidate.rank else { return Ok(None) };
    let (fd, said) = match socket::look_at_fd(&candidate.stream) {
        Ok((fd, said)) => (fd, Note::decode(said)),
        Err(error) if is_passing(&error) => return Ok(None),
        Err(error) => return Err(shortage::while_opening(error, size, 1)),
    };
    let ring = ShmRing::open(fd.as_fd()).map_err(|error| {
        let cause = format!("this process has no room for a ring of shared memory: {error}");
        // An opener that has another route does not wait.
        if said.waits && limits::is_shortage(&error) { LinkDown::lacking(cause) } else { LinkDown::new(cause) }
    })?;
    drop(fd);
    socket::drop_fd(&candidate.stream)?;
    let shared = if said.shares { share(rank, &candidate.stream, &ring) } else { None };
    let line = shared.and_then(SharedLine::tried);
    // There is room: the opener has read every earlier message, or it would not have sent the ring.
    candidate.stream.write_all(&[if line.is_some() { SHARED } else { TAKEN }])?;
    Ok(Some((ring, line)))
}

/// What the byte says that goes with the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Note {
    /// There is no other route, so that a reader who lacks memory is waited for.
    waits: bool,
    /// The writer can do without a socket.
    shares: bool,
}

impl Note {
    fn encode(self) -> u8 {
        u8::from(self.waits) | u8::from(self.shares) << 1
    }

    fn decode(byte: u8) -> Note {
        Note { waits: byte & 1 != 0, shares: byte & 2 != 0 }
    }
}

/// The acceptor's byte once the ring is mapped, where the socket stays.
const TAKEN: u8 = 1;

/// The same where it does not.
const SHARED: u8 = 2;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::transport::handshake::HANDSHAKE_TIMEOUT_FULL;

    #[test]
    fn a_caller_that_was_too_slow_for_the_reader_calls_again() {
        let identity = Identity { comm: [1; 16], me: Rank(0), size: 2, secret: Secret::new([5; 32]) };
        let end = |stage, age| {
            let (mut near, far) = UnixStream::pair().unwrap();
            drop(far);
            let opening = Opening::new(identity.clone(), Rank(1)).aged(age);
            let (_, ring) = ShmRing::create(rustix::param::page_size(), None).unwrap();
            RingHandover { opening, stage, ring, detour: Detour::Possible, line: None }
                .drive(&mut near)
                .unwrap_err()
                .kind
        };
        for stage in [Stage::Proving, Stage::Handing, Stage::Waiting] {
            assert_eq!(end(stage, Duration::ZERO), Down::Unfit, "{stage:?}");
            assert_eq!(end(stage, HANDSHAKE_TIMEOUT_FULL), Down::Busy, "{stage:?}");
        }
    }
}
