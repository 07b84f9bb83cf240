//! What the log hears of a stream's rails that do not work, and of those that do again.

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

    #[cfg(test)]
    pub(super) fn is_set(&self) -> bool {
        self.set.is_some()
    }
}

/// What has become of rails of a stream, of which the log has not heard: it does once the others have gone on for a while, since all
/// end when a rank leaves.
#[derive(Debug)]
pub(super) struct Failures {
    me: Rank,
    stream: StreamName,
    /// How many rails the stream was to have.
    rails: usize,
    due: Vec<(Instant, Event)>,
    alarm: Alarm,
}

/// What has become of a rail, in words.
#[derive(Debug)]
enum Event {
    /// It does not work.
    Failed(String),
    /// It does.
    Back(String),
}

impl Event {
    /// The end of a line of the log, where so many rails work now.
    fn text(self, left: usize) -> String {
        match self {
            Event::Failed(text) => format!("{text}; {left} go on without it"),
            Event::Back(text) => format!("{text}; {left} work now"),
        }
    }
}

impl Failures {
    pub(super) fn new(me: Rank, stream: StreamName, rails: usize, poller: &Poller) -> Failures {
        Failures { me, stream, rails, due: Vec::new(), alarm: Alarm::new(poller, stream) }
    }

    /// Takes down what a rail has done.
    pub(super) fn note(&mut self, number: usize, what: impl Display) {
        self.add(Event::Failed(self.text(number, what)));
    }

    /// Takes down that a rail works again that did not.
    pub(super) fn note_back(&mut self, number: usize, way: &str) {
        self.add(Event::Back(self.text(number, format_args!("({way}) is back"))));
    }

    fn text(&self, number: usize, what: impl Display) -> String {
        format!("rail {} of {} {what}", number + 1, self.rails)
    }

    fn add(&mut self, event: Event) {
        self.due.push((Instant::now(), event));
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
        for event in self.take_due(Instant::now(), left) {
            log::warn!("rank {me}: of the connections {peer}, {event}");
        }
    }

    /// What is due at `now`, while so many rails work. The poller names the stream when the next is.
    pub(super) fn take_due(&mut self, now: Instant, left: usize) -> Vec<String> {
        let age = |since: &Instant| now.saturating_duration_since(*since);
        let due: Vec<_> = self.due.extract_if(.., |(since, _)| age(since) >= WARN_AFTER).collect();
        match self.due.first() {
            _ if due.is_empty() => {}
            Some((since, _)) => self.alarm.set(WARN_AFTER.saturating_sub(age(since))),
            None => self.alarm.clear(),
        }
        due.into_iter().map(|(_, event)| event.text(left)).collect()
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
        assert_eq!((failures.take_due(first, 2), failures.is_any()), (vec![], true));
        poller.wait(None).unwrap();
        assert_eq!(names(&poller), [NAME], "there is something to say");
        failures.note(2, "has failed too");
        assert_eq!(failures.take_due(first + WARN_AFTER, 2), ["rail 2 of 3 has failed; 2 go on without it"]);
        assert_eq!((names(&poller), failures.is_any()), (vec![], true));
        poller.wait(None).unwrap();
        assert_eq!(names(&poller), [NAME]);
        let due = failures.take_due(Instant::now() + WARN_AFTER, 1);
        assert_eq!(due, ["rail 3 of 3 has failed too; 1 go on without it"]);
        assert_eq!((names(&poller), failures.is_any()), (vec![], false));
    }

    #[test]
    fn of_a_rail_that_works_again_the_log_hears_after_its_failure() {
        let poller = Poller::new().unwrap();
        let mut failures = failures(&poller);
        failures.note(1, "has failed");
        failures.note_back(1, "eth1");
        let due = failures.take_due(Instant::now() + WARN_AFTER, 3);
        assert_eq!(due, ["rail 2 of 3 has failed; 3 go on without it", "rail 2 of 3 (eth1) is back; 3 work now"]);
        assert_eq!((names(&poller), failures.is_any()), (vec![], false));
    }

    #[test]
    fn of_a_stream_that_ends_the_log_hears_nothing() {
        let poller = Poller::new().unwrap();
        let mut failures = failures(&poller);
        failures.note(0, "has failed");
        failures.forget();
        assert_eq!((failures.take_due(Instant::now() + WARN_AFTER, 1), failures.is_any()), (vec![], false));
        poller.wait(Some(2 * WARN_AFTER)).unwrap();
        assert_eq!(names(&poller), []);
    }
}
