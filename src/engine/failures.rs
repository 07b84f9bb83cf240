//! What is known of failures, and what follows from it: ranks that are gone for good, and the last error.
//!
//! An operation that finds a peer gone fails by itself, once it is known whom to blame ([`Suspect`]). This module handles
//! departures that the failure detector reports; every rank sees the same ones. After a loss nothing new begins. What is in
//! flight ends, by itself within [`DRAIN_TIMEOUT`] or with an error.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::types::Rank;

/// How a rank went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Departure {
    /// It died or was cut off.
    Lost,
    /// It left of its own accord, after it had gone through so many collectives.
    Left { called: u64 },
}

/// A rank that is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Departed {
    pub(crate) rank: Rank,
    pub(crate) how: Departure,
    pub(crate) cause: String,
}

/// A rank that is gone and without which something cannot end. It may have left because another one is lost, of which this rank
/// is told soon.
#[derive(Debug)]
pub(crate) struct Suspect {
    pub(crate) rank: Rank,
    pub(crate) cause: String,
    /// When it is to blame, if nothing else is known by then.
    pub(crate) until: Instant,
}

impl Suspect {
    /// A rank that is noticed to be gone now.
    pub(crate) fn new(rank: Rank, cause: String) -> Suspect {
        Suspect::since(Instant::now(), rank, cause)
    }

    /// A rank that was noticed to be gone at `since`.
    pub(crate) fn since(since: Instant, rank: Rank, cause: String) -> Suspect {
        Suspect { rank, cause, until: since + NOTICE_TIMEOUT }
    }

    /// The same, of an operation that has time until `deadline`.
    pub(crate) fn before(self, deadline: Option<Instant>) -> Suspect {
        Suspect { until: deadline.map_or(self.until, |deadline| deadline.min(self.until)), ..self }
    }
}

/// How long to wait for news of an earlier loss before blaming the rank that left.
const NOTICE_TIMEOUT: Duration = Duration::from_millis(300);

/// The loss callback.
pub(crate) type OnLoss = Box<dyn FnOnce(Error) + Send>;

/// What a rank knows of failures in its communicator.
#[derive(Default)]
pub(crate) struct Failures {
    /// A failure detector reports ranks that are gone, also those that no operation waits for.
    pub(crate) is_watched: bool,
    /// How the operation that ended last failed, if it did.
    pub(crate) last_operation: Option<Error>,
    /// The first rank that was lost.
    lost: Option<Lost>,
    /// Of the ranks that left, the one that had gone through the fewest collectives.
    left: Option<(u64, Rank, String)>,
    /// Why each of the ranks that left did.
    reasons_to_leave: BTreeMap<Rank, String>,
    on_loss: Option<OnLoss>,
    /// Ranks whose loss has been logged.
    logged: BTreeSet<Rank>,
    /// Ranks whose loss the other ranks have been told of.
    reported: BTreeSet<Rank>,
}

/// A rank that is lost.
#[derive(Clone)]
pub(crate) struct Lost {
    rank: Rank,
    cause: String,
    since: Instant,
    /// What was in flight has ended.
    has_drained: bool,
}

impl Lost {
    /// The error of an operation that ends because of it.
    pub(crate) fn error(&self, operation: String) -> Error {
        Error::PeerLost { operation, rank: self.rank.0, cause: self.cause.clone() }
    }
}

/// What a loss means for operations in flight.
pub(crate) enum Drain {
    /// There is no loss, or they have ended.
    Idle,
    /// They may end by themselves until then.
    Until(Instant),
    /// They end now.
    Over(Lost),
}

impl Failures {
    /// Whether a rank has left.
    pub(crate) fn has_left(&self) -> bool {
        self.left.is_some()
    }

    /// The rank that was lost first, and how.
    pub(crate) fn lost(&self) -> Option<(Rank, String)> {
        self.lost.as_ref().map(|lost| (lost.rank, lost.cause.clone()))
    }

    /// Whether a rank is lost.
    #[inline]
    pub(crate) fn has_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// The error of `operation` because a rank is lost, if one is.
    pub(crate) fn loss_of(&self, operation: &str) -> Option<Error> {
        self.lost.as_ref().map(|lost| lost.error(operation.to_owned()))
    }

    /// Notes that a rank is lost. Only the first counts.
    pub(crate) fn record_loss(&mut self, rank: Rank, cause: &str) {
        let lost = || Lost { rank, cause: cause.to_owned(), since: Instant::now(), has_drained: false };
        self.lost.get_or_insert_with(lost);
    }

    /// Notes that a rank has left after it had called so many collectives.
    pub(crate) fn record_left(&mut self, rank: Rank, called: u64, cause: &str) {
        if self.left.as_ref().is_none_or(|(least, ..)| called < *least) {
            self.left = Some((called, rank, cause.to_owned()));
        }
        self.reasons_to_leave.insert(rank, cause.to_owned());
    }

    /// Why `rank` left, if it has said so.
    pub(crate) fn reason_to_leave(&self, rank: Rank) -> Option<&str> {
        self.reasons_to_leave.get(&rank).map(String::as_str)
    }

    /// Why collective `sequence` can never complete, if a rank left before it.
    pub(crate) fn left_before(&self, sequence: u64) -> Option<(Rank, String)> {
        let (called, rank, cause) = self.left.as_ref()?;
        (sequence >= *called).then(|| (*rank, format!("it has left: {cause}")))
    }

    /// Whether the loss of `rank` has not been logged. It is, after this.
    pub(crate) fn is_first_warning(&mut self, rank: Rank) -> bool {
        self.logged.insert(rank)
    }

    /// Whether the other ranks have not been told of the loss of `rank`. They are, after this.
    pub(crate) fn is_first_report(&mut self, rank: Rank) -> bool {
        self.reported.insert(rank)
    }

    /// Whether the other ranks have been told of the loss of `rank`.
    pub(crate) fn is_reported(&self, rank: Rank) -> bool {
        self.reported.contains(&rank)
    }

    /// What a loss means at `now` for what is in flight, if anything is. `Over` comes once.
    pub(crate) fn drain(&mut self, is_settled: bool, now: Instant) -> Drain {
        let Some(lost) = self.lost.as_mut().filter(|lost| !lost.has_drained) else { return Drain::Idle };
        let due = lost.since + DRAIN_TIMEOUT;
        if now < due && !is_settled {
            return Drain::Until(due);
        }
        lost.has_drained = true;
        Drain::Over(lost.clone())
    }

    /// Why this rank leaves, which is `how` ("aborted: …"); nothing after a loss, of which every rank knows.
    /// `failure` is that of the last operation.
    pub(crate) fn cause_to_leave(&self, how: &str, failure: Option<Error>) -> Option<String> {
        if self.lost.is_some() {
            return None;
        }
        Some(match failure {
            Some(failure) => format!("{how}, after it had failed: {failure}"),
            None => how.to_owned(),
        })
    }

    /// Stores the loss callback, or forgets it; see [`Failures::take_on_loss`]. Returns the one before: what a callback owns is
    /// dropped without the engine's lock.
    #[must_use]
    pub(crate) fn set_on_loss(&mut self, on_loss: Option<OnLoss>) -> Option<OnLoss> {
        std::mem::replace(&mut self.on_loss, on_loss)
    }

    /// The loss callback, and the error of `operation`, once a loss has ended everything.
    pub(crate) fn take_on_loss(&mut self, operation: &str) -> Option<(OnLoss, Error)> {
        let error = self.lost.as_ref().filter(|lost| lost.has_drained)?.error(operation.to_owned());
        Some((self.on_loss.take()?, error))
    }
}

/// How long operations that the lost rank may have done its part of can still end well.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::frame::{Failed, FrameKind, Header, Reason};
    use crate::engine::message::{Direction, message_header};
    use crate::engine::mock_peer::Harness;
    use crate::engine::region::{Region, Words};
    use crate::engine::window::{RmaOp, RmaRequest};
    use crate::error::LinkDown;
    use crate::types::{Source, Tag};
    use crate::work::Work;

    fn lost(rank: u32) -> Departed {
        Departed { rank: Rank(rank), how: Departure::Lost, cause: "it died".to_owned() }
    }

    /// What waits for rank 1, which is gone.
    #[derive(Clone, Copy, Debug)]
    enum Waiting {
        Broadcast,
        Receive,
        /// Submitted after rank 1 had gone.
        LateReceive,
        LateSend,
        Signal,
    }

    const WAITING: [Waiting; 5] =
        [Waiting::Broadcast, Waiting::Receive, Waiting::LateReceive, Waiting::LateSend, Waiting::Signal];

    impl Waiting {
        /// Submits it, with so much time, and has rank 1 go.
        fn desert(self, harness: &mut Harness, words: &mut Words, timeout: Duration) -> Work {
            harness.engine.context.failures.is_watched = true;
            let (down, receive) =
                (LinkDown::new("it closed the connection"), Direction::Receive(Source::Rank(Rank(1))));
            if matches!(self, Waiting::LateReceive | Waiting::LateSend) {
                harness.engine.lose(Rank(1), &down);
            }
            let work = match self {
                Waiting::Broadcast => harness.broadcast(Rank(1), words, timeout),
                Waiting::Receive | Waiting::LateReceive => harness.start(receive, words, timeout),
                Waiting::LateSend => harness.start(Direction::Send(Rank(1)), words, timeout),
                Waiting::Signal => {
                    let window = harness.engine.windows.expose(Region::of(&[words.buffer()]));
                    let (peer, access) = (Rank(1), RmaOp::WaitSignal);
                    let entry = harness.engine.begin(access.call(peer, window), access.bytes());
                    let work = Work::new(Harness::no_progress(), entry);
                    harness.engine.submit_rma(RmaRequest { window, peer, access, timeout, work: work.clone() });
                    work
                }
            };
            harness.engine.lose(Rank(1), &down);
            work
        }
    }

    fn deserted(harness: &mut Harness, words: &mut Words) -> Work {
        Waiting::Broadcast.desert(harness, words, Duration::from_secs(60))
    }

    fn blamed(work: &Work) -> Option<u32> {
        match work.result() {
            Some(Err(Error::PeerLost { rank, .. })) => Some(rank),
            None => None,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_rank_that_left_because_another_was_lost_is_not_blamed() {
        for waiting in WAITING {
            let (mut harness, mut words) = (Harness::of(3), Words::new(vec![7]));
            let work = waiting.desert(&mut harness, &mut words, Duration::from_secs(60));
            assert_eq!(blamed(&work), None, "{waiting:?}: there may be news");
            assert!(!harness.engine.is_settled() && harness.engine.is_busy(), "{waiting:?}");
            harness.engine.departed(&lost(2));
            assert_eq!(blamed(&work), Some(2), "{waiting:?}");
            assert!(harness.engine.is_settled(), "{waiting:?}");
        }
    }

    #[test]
    fn why_a_rank_left_is_told_by_what_waits_for_it() {
        for waiting in WAITING {
            let (mut harness, mut words) = (Harness::of(3), Words::new(vec![7]));
            let work = waiting.desert(&mut harness, &mut words, Duration::from_secs(60));
            let how = Departure::Left { called: 9 };
            let cause = "aborted, after it had failed".to_owned();
            harness.engine.departed(&Departed { rank: Rank(1), how, cause });
            assert_eq!(blamed(&work), None, "{waiting:?}: whom it blames may be told of next");
            harness.engine.expire(Instant::now() + NOTICE_TIMEOUT);
            assert_eq!(blamed(&work), Some(1), "{waiting:?}");
            let error = work.result().expect("it has ended").expect_err("it cannot end well").to_string();
            assert!(error.contains("closed the connection; it has left: aborted, after it had failed"), "{error}");
        }
    }

    #[test]
    fn what_waits_for_a_rank_that_is_gone_ends_with_its_communicator() {
        for waiting in WAITING {
            let (mut harness, mut words) = (Harness::of(3), Words::new(vec![7]));
            let work = waiting.desert(&mut harness, &mut words, Duration::from_secs(60));
            let left = harness.engine.departure("aborted").map(|departed| departed.cause).unwrap_or_default();
            assert_eq!(left.contains("after it had failed"), !matches!(waiting, Waiting::Broadcast), "{left}");
            harness.engine.close("aborted");
            assert!(matches!(work.result(), Some(Err(Error::Closed { .. }))), "{waiting:?}: {:?}", work.result());
        }
    }

    #[test]
    fn a_receive_from_any_rank_ends_where_all_are_gone_before_or_after() {
        for (is_watched, is_late) in [(false, false), (false, true), (true, false), (true, true)] {
            let (mut harness, mut words) = (Harness::of(3), Words::new(vec![7]));
            harness.engine.context.failures.is_watched = is_watched;
            let receive = |harness: &mut Harness, words: &mut Words| {
                harness.start(Direction::Receive(Source::Any), words, Duration::from_secs(60))
            };
            let early = (!is_late).then(|| receive(&mut harness, &mut words));
            for rank in [2, 1] {
                assert!(early.as_ref().is_none_or(|work| !work.is_done()), "rank {rank} may send");
                harness.engine.lose(Rank(rank), &LinkDown::new("it closed the connection"));
            }
            let work = early.unwrap_or_else(|| receive(&mut harness, &mut words));
            assert_eq!(work.is_done(), !is_watched, "late: {is_late}");
            harness.engine.expire(Instant::now() + NOTICE_TIMEOUT);
            assert_eq!(blamed(&work), Some(1), "watched: {is_watched}, late: {is_late}");
        }
    }

    #[test]
    fn whom_a_rank_blames_is_blamed_for_its_end_too() {
        let blames = [(Some(2), 2), (None, 1), (Some(0), 1)];
        for (lost, culprit) in blames {
            let (mut harness, mut words) = (Harness::of(3), Words::new(vec![7]));
            harness.settle();
            // It is one operation further than this rank.
            let failed = Failed::Collective { sequence: 1, reason: Reason::Loss, lost: lost.map(Rank) };
            harness.send(&[&*failed.header(4).encode(), b"text"].concat());
            let work = deserted(&mut harness, &mut words);
            assert_eq!(blamed(&work), Some(culprit), "rank 1 has said that {lost:?} is lost");
        }
    }

    #[test]
    fn who_is_behind_the_end_of_a_rank_is_followed_from_report_to_report() {
        let reports = [
            (vec![], None),
            (vec![(1, 2)], Some(2)),
            (vec![(1, 2), (2, 3)], Some(3)),
            (vec![(1, 1)], None),
            (vec![(1, 2), (2, 1)], Some(2)),
            (vec![(1, 2), (2, 3), (3, 2)], Some(3)),
        ];
        for (reports, culprit) in reports {
            let mut harness = Harness::of(4);
            let ctx = &mut harness.engine.context;
            for (from, lost) in &reports {
                ctx.endpoints.set_reported(Rank(*from), Some(Rank(*lost)), "text".to_owned());
            }
            let behind = ctx.endpoints.culprit_behind(Rank(1)).map(|(rank, _)| rank.0);
            assert_eq!(behind, culprit, "{reports:?}");
            let suspect = Suspect::new(Rank(1), "it closed the connection".to_owned());
            let blamed = ctx.blame(&suspect, suspect.until).map(|(rank, _)| rank.0);
            assert_eq!(blamed, culprit.or(Some(1)), "{reports:?}");
        }
    }

    #[test]
    fn a_rank_that_leaves_after_it_has_failed_for_a_loss_names_the_lost() {
        let (mut harness, mut words) = (Harness::of(3), Words::new(vec![7]));
        harness.settle();
        let work = deserted(&mut harness, &mut words);
        harness.engine.departed(&lost(2));
        assert_eq!(blamed(&work), Some(2));
        let lost = harness.engine.context.failures.last_operation.as_ref().and_then(Error::lost_rank);
        assert_eq!(lost, Some(Rank(2)), "what it announces at its end");
    }

    #[test]
    fn a_rank_that_is_gone_without_another_loss_is_blamed_soon() {
        for waiting in WAITING {
            for timeout in [Duration::from_secs(60), Duration::from_millis(100)] {
                let (mut harness, mut words) = (Harness::of(3), Words::new(vec![7]));
                let work = waiting.desert(&mut harness, &mut words, timeout);
                let until = Instant::now() + timeout.min(NOTICE_TIMEOUT);
                assert!(harness.engine.next_deadline().is_some_and(|due| due <= until), "{waiting:?}");
                harness.engine.expire(until);
                assert_eq!(blamed(&work), Some(1), "{waiting:?} with {timeout:?}");
            }
        }
    }

    #[test]
    fn who_comes_late_does_not_wait_again_for_news_of_a_rank_that_is_gone() {
        let (mut harness, mut words) = (Harness::of(3), Words::new(vec![7]));
        let first = Waiting::Receive.desert(&mut harness, &mut words, Duration::from_secs(60));
        // The clock is the system's, and the rank's end is counted from when it was seen.
        std::thread::sleep(NOTICE_TIMEOUT);
        let second = harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
        assert_eq!(blamed(&second), Some(1));
        harness.engine.expire(Instant::now());
        assert_eq!(blamed(&first), Some(1));
    }

    #[test]
    fn a_rank_that_leaves_after_a_loss_names_the_lost_although_nothing_has_failed_here() {
        let mut harness = Harness::of(3);
        let mut words = Words::new(vec![7]);
        harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
        harness.wire().from_engine.clear();
        harness.engine.departed(&lost(2));
        harness.engine.close("shut down");
        let said = harness.wire().from_engine.clone();
        let header = Header::decode(&said).expect("a header").expect("a whole one");
        let text = &said[header.size()..];
        assert_eq!((header.kind, header.token), (FrameKind::Fail, 2 + 1));
        let text = String::from_utf8_lossy(text);
        assert!(text.starts_with("communicator `test`: rank 2 is lost: it died"), "{text}");
    }

    #[test]
    fn what_a_rank_sent_before_it_left_counts_though_it_cannot_be_reached() {
        for (from, arrives) in [(1, true), (2, false)] {
            let (mut harness, mut words) = (Harness::of(3), Words::new(vec![0]));
            harness.wire().refuses = true;
            let work = harness.start(Direction::Receive(Source::Rank(Rank(from))), &mut words, Duration::from_secs(60));
            assert_eq!(work.is_done(), !arrives, "rank {from}");
            if arrives {
                let header = message_header(Tag(0), 8);
                harness.send(&[&*header.encode(), &7u64.to_ne_bytes()].concat());
                assert!(work.wait(None).is_ok() && words.get() == [7]);
            }
        }
    }
}
