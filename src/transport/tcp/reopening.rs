//! Rails that have broken, or could not be opened, are opened again: when, and by which connections.
//!
//! An attempt is a connection like the first ones: it proves the secret, has TLS, and says in its greeting which rail of which
//! stream it is. Nothing here waits. Whoever looks after the stream drives what is under way from time to time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::error::LinkDown;
use crate::sys::poller::Poller;
use crate::sys::socket::PeerTimeout;
use crate::transport::auth::Identity;
use crate::transport::tcp::connect::{ATTEMPT_TIMEOUT, Connection};
use crate::transport::tcp::greeting::Greeting;
use crate::transport::tcp::paths::{self, Target};
use crate::transport::tls::Tls;
use crate::types::Rank;

/// How the connections of a stream are opened.
#[derive(Debug)]
pub(super) struct Opener {
    pub(super) identity: Identity,
    pub(super) tls: Option<Tls>,
    pub(super) peer: Rank,
    pub(super) poller: Poller,
    pub(super) timeout: PeerTimeout,
    /// Drawn for the stream, where the acceptor expects greetings.
    pub(super) token: Option<[u8; 16]>,
    /// For each of its connections, what to try.
    pub(super) paths: Vec<VecDeque<Target>>,
}

impl Opener {
    /// Begins the connection that the stream begins with, or that one of its rails does.
    pub(super) fn begin(&self, rail: usize) -> Result<Connection, LinkDown> {
        self.connect(rail, 0, self.paths[rail].clone())
    }

    fn connect(&self, rail: usize, generation: u32, targets: VecDeque<Target>) -> Result<Connection, LinkDown> {
        let (identity, tls, rails) = (self.identity.clone(), self.tls.clone(), self.paths.len());
        let connection = Connection::begin(identity, tls, self.peer, targets, &self.poller, self.timeout, rails)?;
        Ok(connection.with(self.token.map(|token| Greeting { token, rail, rails, generation })))
    }
}

/// When a rail is opened again: after pauses that grow until it has worked for a while.
#[derive(Clone, Copy, Debug)]
struct Schedule {
    /// How long to pause when it fails next.
    pause: Duration,
    /// Since when it works, if it does.
    works_since: Option<Instant>,
    /// When to begin the next attempt, if one is to come.
    due: Option<Instant>,
}

impl Schedule {
    const NEW: Schedule = Schedule { pause: PAUSE_MIN, works_since: None, due: None };

    fn works(&mut self, now: Instant) {
        (self.works_since, self.due) = (Some(now), None);
    }

    /// It has broken, or an attempt to open it has failed.
    fn fails(&mut self, now: Instant) {
        // One that breaks again and again costs more than it carries.
        if self.works_since.take().is_some_and(|since| now.saturating_duration_since(since) >= PAUSE_MAX) {
            self.pause = PAUSE_MIN;
        }
        self.due = Some(now + self.pause);
        self.pause = (2 * self.pause).min(PAUSE_MAX);
    }

    /// Whether to begin an attempt, which it then counts as begun.
    fn take_due(&mut self, now: Instant) -> bool {
        self.due.take_if(|due| *due <= now).is_some()
    }
}

/// A rail as far as it may have to be opened again.
#[derive(Debug)]
struct Rail {
    schedule: Schedule,
    /// The way that it went last.
    way: Option<Target>,
    attempt: Option<Attempt>,
}

/// A connection that is being opened, and until when that may take.
#[derive(Debug)]
struct Attempt {
    connection: Connection,
    until: Instant,
}

/// The rails of a stream as far as they may have to be opened again.
#[derive(Debug)]
pub(super) struct Reopening {
    opener: Opener,
    rails: Vec<Rail>,
    has_ended: bool,
}

impl Reopening {
    pub(super) fn new(opener: Opener) -> Reopening {
        let rail = || Rail { schedule: Schedule::NEW, way: None, attempt: None };
        let rails = opener.paths.iter().map(|_| rail()).collect();
        Reopening { opener, rails, has_ended: false }
    }

    /// How the stream's connections are opened.
    pub(super) fn opener(&self) -> &Opener {
        &self.opener
    }

    /// A rail works, which goes this way.
    pub(super) fn works(&mut self, number: usize, way: Option<Target>, now: Instant) {
        let rail = &mut self.rails[number];
        rail.way = way.or(rail.way);
        rail.schedule.works(now);
    }

    /// A rail has broken, or could not be opened.
    pub(super) fn fails(&mut self, number: usize, now: Instant) {
        if !self.has_ended {
            self.rails[number].schedule.fails(now);
        }
    }

    /// The stream has ended: nothing is opened any more.
    pub(super) fn end(&mut self) {
        self.has_ended = true;
        for rail in &mut self.rails {
            (rail.schedule.due, rail.attempt) = (None, None);
        }
    }

    /// Whether a rail does not work that is to.
    pub(super) fn is_any(&self) -> bool {
        self.rails.iter().any(|rail| rail.schedule.due.is_some() || rail.attempt.is_some())
    }

    /// The rails whose next attempt is to be begun now.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<usize> {
        (0..self.rails.len()).filter(|number| self.rails[*number].schedule.take_due(now)).collect()
    }

    /// Begins an attempt to open a rail by the connection of this generation.
    pub(super) fn begin(&mut self, number: usize, generation: u32, now: Instant) -> Result<(), LinkDown> {
        let targets = paths::again(&self.opener.paths[number], self.rails[number].way);
        let until = now + ATTEMPT_TIMEOUT * u32::try_from(targets.len()).unwrap_or(u32::MAX);
        let connection = self.opener.connect(number, generation, targets)?;
        self.rails[number].attempt = Some(Attempt { connection, until });
        Ok(())
    }

    /// Advances the attempts. Returns the rails whose attempt is over, with its connection or why there is none.
    pub(super) fn drive(&mut self, now: Instant) -> Vec<(usize, Result<Connection, LinkDown>)> {
        let mut over = Vec::new();
        for (number, rail) in self.rails.iter_mut().enumerate() {
            let Some(attempt) = &mut rail.attempt else { continue };
            let down = match attempt.connection.drive() {
                Ok(true) => None,
                Ok(false) if now < attempt.until => continue,
                Ok(false) => Some(LinkDown::new("it was not opened in time")),
                Err(down) => Some(down),
            };
            let connection = rail.attempt.take().map(|attempt| attempt.connection);
            over.extend(connection.map(|connection| (number, down.map_or(Ok(connection), Err))));
        }
        over
    }
}

/// How long after a rail has broken the first attempt begins to open it again. Each pause after an attempt is twice as long as the
/// one before, up to the longest. A rail that has worked for as long as that is as good as new.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// How long it takes until the next attempt, in seconds, which is not begun before.
    fn pause(schedule: &mut Schedule, now: Instant) -> u32 {
        (0..100).find(|seconds| schedule.take_due(now + *seconds * SECOND)).unwrap()
    }

    #[test]
    fn pauses_grow_up_to_half_a_minute() {
        let (mut schedule, now) = (Schedule::NEW, Instant::now());
        assert!(!schedule.take_due(now + 100 * SECOND), "it has not failed");
        let pauses: Vec<u32> = (0..8)
            .map(|_| {
                schedule.fails(now);
                pause(&mut schedule, now)
            })
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 30, 30, 30]);
        assert!(!schedule.take_due(now + 100 * SECOND), "an attempt is under way");
    }

    #[test]
    fn a_rail_that_breaks_soon_after_it_was_opened_again_has_to_wait_for_longer() {
        let (mut schedule, mut now) = (Schedule::NEW, Instant::now());
        for (worked, expected) in [(5, 1), (29, 2), (0, 4), (30, 1), (1, 2)] {
            schedule.works(now);
            assert!(!schedule.take_due(now + 100 * SECOND));
            now += worked * SECOND;
            schedule.fails(now);
            assert_eq!(pause(&mut schedule, now), expected, "after {worked} seconds");
        }
    }
}
