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
use crate::transport::{Detour, shortage};
use crate::types::Rank;

/// The opener's side: proves itself, hands the ring over, and waits until the peer has mapped it.
#[derive(Debug)]
pub(super) struct RingHandover {
    opening: Opening,
    stage: Stage,
    ring: OwnedFd,
    detour: Detour,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Proving,
    Handing,
    Waiting,
}

impl RingHandover {
    pub(super) fn new(identity: Identity, peer: Rank, ring: OwnedFd, detour: Detour) -> Self {
        RingHandover { opening: Opening::new(identity, peer), stage: Stage::Proving, ring, detour }
    }

    /// Advances without blocking. True: the peer has the ring. The error says that shared memory does not lead to the peer, or
    /// that this process was too slow for it.
    pub(super) fn drive(&mut self, stream: &mut UnixStream) -> Result<bool, LinkDown> {
        self.next_stages(stream).map_err(|down| match self.opening.classify(down) {
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
                Stage::Handing => socket::send_fd(stream, self.ring.as_fd(), note(self.detour)),
                Stage::Waiting => match stream.read(&mut [0]) {
                    Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it did not take the ring")),
                    taken => taken.map(|_| ()),
                },
            };
            match passed {
                Ok(()) if self.stage == Stage::Waiting => return Ok(true),
                Ok(()) => self.stage = Stage::Waiting,
                Err(error) if is_passing(&error) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The acceptor's side: advances a connection without blocking until its ring is mapped here, and says so. `size` is that of
/// the communicator.
pub(super) fn accept(candidate: &mut Candidate<UnixStream>, size: usize) -> Result<Option<ShmRing>, LinkDown> {
    if candidate.rank.is_none() {
        candidate.rank = candidate.accepting.drive(&mut *candidate.stream)?;
    }
    if candidate.rank.is_none() {
        return Ok(None);
    }
    let (fd, said) = match socket::look_at_fd(&candidate.stream) {
        Ok(found) => found,
        Err(error) if is_passing(&error) => return Ok(None),
        Err(error) => return Err(shortage::while_opening(error, size, 1)),
    };
    let memory = ShmRing::open(fd.as_fd()).map_err(|error| {
        let cause = format!("this process has no room for a ring of shared memory: {error}");
        // An opener that has another route does not wait.
        let waits = said == note(Detour::Impossible) && limits::is_shortage(&error);
        if waits { LinkDown::lacking(cause) } else { LinkDown::new(cause) }
    })?;
    drop(fd);
    socket::drop_fd(&candidate.stream)?;
    // There is room: the opener has read every earlier message, or it would not have sent the ring.
    candidate.stream.write_all(&[TAKEN])?;
    Ok(Some(memory))
}

/// The byte that goes with the ring.
fn note(detour: Detour) -> u8 {
    match detour {
        Detour::Possible => 0,
        Detour::Impossible => 1,
    }
}

/// The acceptor's byte once the ring is mapped. Its value has no meaning.
const TAKEN: u8 = 1;

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
            RingHandover { opening, stage, ring, detour: Detour::Possible }.drive(&mut near).unwrap_err().kind
        };
        for stage in [Stage::Proving, Stage::Handing, Stage::Waiting] {
            assert_eq!(end(stage, Duration::ZERO), Down::Unfit, "{stage:?}");
            assert_eq!(end(stage, HANDSHAKE_TIMEOUT_FULL), Down::Busy, "{stage:?}");
        }
    }
}
