//! What the log hears of a stream's rails that do not work.

use std::fmt::Display;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::sys::poller::{Poller, StreamName, Watched};
use crate::types::Rank;

/// Has the poller name a stream after a while.
#[derive(Debug)]
pub(super) struct Alarm {
    poller: Poller,
    stream: StreamName,
    set: Option<Watched<OwnedFd>>,
}

impl Alarm {
    pub(super) fn new(poller: &Poller, stream: StreamName) -> Alarm {
        Alarm { poller: poller.clone(), stream, set: None }
    }

    /// After so long, instead of what was set before. It stays ready until it is set again or cleared.
    pub(super) fn set(&mut self, after: Duration) {
        // Without one, the stream is looked at when something comes.
        let set = self.poller.alarm(after, self.stream).inspect_err(|error| log::debug!("there is no timer: {error}"));
        self.set = set.ok();
    }

    pub(super) fn clear(&mut self) {
        self.set = None;
    }
}

/// Why rails of a stream do not work, of which the log has not heard: it does once the others have gone on for a while, since all
/// end when a rank leaves.
#[derive(Debug)]
pub(super) struct Failures {
    me: Rank,
    stream: StreamName,
    /// How many rails the stream was to have.
    rails: usize,
    due: Vec<(Instant, String)>,
    alarm: Alarm,
}

impl Failures {
    pub(super) fn new(me: Rank, stream: StreamName, rails: usize, poller: &Poller) -> Failures {
        Failures { me, stream, rails, due: Vec::new(), alarm: Alarm::new(poller, stream) }
    }

    /// Takes down what a rail has done.
    pub(super) fn note(&mut self, number: usize, what: impl Display) {
        self.due.push((Instant::now(), format!("rail {} of {} {what}", number + 1, self.rails)));
        if self.due.len() == 1 {
            self.alarm.set(WARN_AFTER);
        }
    }

    /// Logs what is due, while so many rails are left.
    pub(super) fn warn(&mut self, left: usize) {
        if self.due.is_empty() {
            return;
        }
        let is_due = |(since, _): &mut (Instant, String)| since.elapsed() >= WARN_AFTER;
        let due: Vec<_> = self.due.extract_if(.., is_due).collect();
        if due.is_empty() {
            return;
        }
        let (me, peer) = match self.stream {
            StreamName::To(peer) => (self.me, format!("to rank {peer}")),
            StreamName::From(peer) => (self.me, format!("from rank {peer}")),
        };
        for (_, failure) in due {
            log::warn!("rank {me}: of the connections {peer}, {failure}; {left} go on without it");
        }
        match self.due.first() {
            Some((since, _)) => self.alarm.set(WARN_AFTER.saturating_sub(since.elapsed())),
            None => self.alarm.clear(),
        }
    }

    /// Forgets everything: the stream has ended.
    pub(super) fn forget(&mut self) {
        self.due.clear();
        self.alarm.clear();
    }
}

/// How long after the end of a rail the others go on, if the peer is not about to leave.
const WARN_AFTER: Duration = Duration::from_millis(300);
