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

    /// Whether there are some of which the log has not heard.
    pub(super) fn is_any(&self) -> bool {
        !self.due.is_empty()
    }

    /// Logs what is due, while so many rails are left.
    pub(super) fn warn(&mut self, left: usize) {
        if !self.is_any() {
            return;
        }
        let (me, peer) = match self.stream {
            StreamName::To(peer) => (self.me, format!("to rank {peer}")),
            StreamName::From(peer) => (self.me, format!("from rank {peer}")),
        };
        for failure in self.take_due(Instant::now()) {
            log::warn!("rank {me}: of the connections {peer}, {failure}; {left} go on without it");
        }
    }

    /// What is due at `now`. The poller names the stream when the next is.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<String> {
        let age = |since: &Instant| now.saturating_duration_since(*since);
        let due: Vec<_> = self.due.extract_if(.., |(since, _)| age(since) >= WARN_AFTER).collect();
        match self.due.first() {
            _ if due.is_empty() => {}
            Some((since, _)) => self.alarm.set(WARN_AFTER.saturating_sub(age(since))),
            None => self.alarm.clear(),
        }
        due.into_iter().map(|(_, failure)| failure).collect()
    }

    /// No rail is left for now: there is nothing to say until one is.
    pub(super) fn hold_back(&mut self) {
        self.alarm.clear();
    }

    /// Forgets everything: the stream has ended.
    pub(super) fn forget(&mut self) {
        self.due.clear();
        self.alarm.clear();
    }
}

/// How long after the end of a rail the others go on, if the peer is not about to leave.
const WARN_AFTER: Duration = Duration::from_millis(300);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::testing::names;

    const NAME: StreamName = StreamName::To(Rank(1));

    fn failures(poller: &Poller) -> Failures {
        Failures::new(Rank(0), NAME, 3, poller)
    }

    #[test]
    fn of_each_rail_the_log_hears_once_the_others_have_gone_on_for_a_while() {
        let poller = Poller::new().unwrap();
        let mut failures = failures(&poller);
        assert!(!failures.is_any());
        failures.note(1, "has failed");
        let first = Instant::now();
        assert_eq!((failures.take_due(first), failures.is_any()), (vec![], true));
        poller.wait(None).unwrap();
        assert_eq!(names(&poller), [NAME], "there is something to say");
        failures.note(2, "has failed too");
        assert_eq!(failures.take_due(first + WARN_AFTER), ["rail 2 of 3 has failed"]);
        assert_eq!((names(&poller), failures.is_any()), (vec![], true));
        poller.wait(None).unwrap();
        assert_eq!(names(&poller), [NAME]);
        assert_eq!(failures.take_due(Instant::now() + WARN_AFTER), ["rail 3 of 3 has failed too"]);
        assert_eq!((names(&poller), failures.is_any()), (vec![], false));
    }

    #[test]
    fn of_a_stream_that_ends_the_log_hears_nothing() {
        let poller = Poller::new().unwrap();
        let mut failures = failures(&poller);
        failures.note(0, "has failed");
        failures.forget();
        assert_eq!((failures.take_due(Instant::now() + WARN_AFTER), failures.is_any()), (vec![], false));
        poller.wait(Some(2 * WARN_AFTER)).unwrap();
        assert_eq!(names(&poller), []);
    }
}
