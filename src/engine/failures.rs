//! What the departure of a rank ends.
//!
//! An operation that finds a peer gone fails by itself. What comes here was noticed without one, and holds for all ranks
//! alike: after a loss nothing new begins, and what is in flight ends, by itself within [`GRACE`] or with an error.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::engine::progress::Engine;
use crate::error::{Error, LinkDown};
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

/// Wants to know of a loss.
pub(crate) type OnLoss = Box<dyn FnOnce(Error) + Send>;

/// What a core knows of ranks that are gone for good.
#[derive(Default)]
pub(crate) struct Failures {
    /// The first that was lost.
    lost: Option<Lost>,
    /// Of those that left, the one that had gone through the fewest collectives.
    left: Option<(u64, Rank, String)>,
    on_loss: Option<OnLoss>,
    /// Those whose loss has been logged.
    told: BTreeSet<Rank>,
}

#[derive(Clone)]
struct Lost {
    rank: Rank,
    cause: String,
    since: Instant,
    /// What was in flight has ended.
    has_drained: bool,
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
}

impl Engine {
    /// Ends what `departed` makes impossible; see [`Engine::end_after_loss`] for the rest.
    pub(crate) fn departed(&mut self, departed: &Departed) {
        let Departed { rank, how, cause } = departed;
        if self.closed.is_some() {
            return;
        }
        match *how {
            Departure::Lost => self.break_off(*rank, cause),
            Departure::Left { called } => {
                log::info!("communicator `{}` rank {}: rank {rank} has left: {cause}", self.name, self.me);
                if self.failures.left.as_ref().is_none_or(|(least, ..)| called < *least) {
                    self.failures.left = Some((called, *rank, cause.clone()));
                }
                self.end_collectives_after_leave();
            }
        }
    }

    fn break_off(&mut self, rank: Rank, cause: &str) {
        self.warn_of_loss(rank, cause);
        if self.failures.lost.is_none() {
            let lost = Lost { rank, cause: cause.to_owned(), since: Instant::now(), has_drained: false };
            self.failures.lost = Some(lost);
        }
        self.lose(rank, &LinkDown::new(cause));
        self.resolve_suspect();
    }

    /// Logs that `rank` is lost, once.
    pub(crate) fn warn_of_loss(&mut self, rank: Rank, cause: &str) {
        if self.closed.is_none() && self.failures.told.insert(rank) {
            log::warn!("communicator `{}` rank {}: rank {rank} is lost: {cause}", self.name, self.me);
        }
    }

    /// The error of `operation` because a rank is lost, if one is.
    pub(crate) fn loss_of(&self, operation: &str) -> Option<Error> {
        self.failures.lost.as_ref().map(|lost| lost.error(operation.to_owned()))
    }

    /// The same for all operations.
    pub(crate) fn loss(&self) -> Option<Error> {
        self.loss_of(&format!("communicator `{}`", self.name))
    }

    /// Ends every operation if a rank is lost and they have had their time. When that will be, if it is not now.
    pub(crate) fn end_after_loss(&mut self, now: Instant) -> Option<Instant> {
        let (is_settled, is_closed) = (self.is_settled(), self.closed.is_some());
        let lost = self.failures.lost.as_mut().filter(|lost| !lost.has_drained && !is_closed)?;
        let due = lost.since + GRACE;
        if now < due && !is_settled {
            return Some(due);
        }
        lost.has_drained = true;
        let lost = lost.clone();
        self.end_all(&|operation| lost.error(operation));
        let reason = lost.error(format!("communicator `{}`", self.name)).to_string();
        self.dump_due.get_or_insert(reason);
        None
    }

    /// How the others have to take it if this rank leaves now; nothing if all are at the end already, because of a loss.
    pub(crate) fn departure(&self, how: &str) -> Option<Departed> {
        if self.failures.lost.is_some() {
            return None;
        }
        let cause = match &self.failure {
            Some(failure) => format!("{how}, after it had failed: {failure}"),
            None => how.to_owned(),
        };
        let how = Departure::Left { called: self.collectives.current() };
        Some(Departed { rank: self.me, how, cause })
    }

    /// Why collective `sequence` can never complete, if a rank left before it.
    pub(crate) fn left_before(&self, sequence: u64) -> Option<(Rank, String)> {
        let (called, rank, cause) = self.failures.left.as_ref()?;
        (sequence >= *called).then(|| (*rank, format!("it has left: {cause}")))
    }

    /// Keeps who wants to know of a loss; see [`Engine::take_on_loss`].
    pub(crate) fn set_on_loss(&mut self, on_loss: OnLoss) {
        self.failures.on_loss = self.closed.is_none().then_some(on_loss);
    }

    /// Forgets who wants to know of a loss.
    pub(crate) fn forget_on_loss(&mut self) {
        self.failures.on_loss = None;
    }

    /// Who wants to know of the loss, once it has ended everything; to be called without an engine lock.
    pub(crate) fn take_on_loss(&mut self) -> Option<(OnLoss, Error)> {
        let error = self.loss().filter(|_| self.failures.lost.as_ref().is_some_and(|lost| lost.has_drained))?;
        Some((self.failures.on_loss.take()?, error))
    }
}

impl Lost {
    fn error(&self, operation: String) -> Error {
        Error::PeerLost { operation, rank: self.rank.0, cause: self.cause.clone() }
    }
}

/// How long operations that the lost rank may have done its part of can still end well.
const GRACE: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::Collective;
    use crate::engine::call::Call;
    use crate::engine::collective::Request;
    use crate::engine::flight_recorder::Bytes;
    use crate::engine::frame::{FrameKind, Header};
    use crate::engine::message::{Direction, message_header};
    use crate::engine::mock_peer::Harness;
    use crate::engine::plan::Executed;
    use crate::engine::region::{Region, Spaces, Words};
    use crate::signature::Signature;
    use crate::types::{DType, Source, Tag};
    use crate::work::Work;

    fn lost(rank: u32) -> Departed {
        Departed { rank: Rank(rank), how: Departure::Lost, cause: "it died".to_owned() }
    }

    /// A broadcast that waits for rank 1, which is gone.
    fn deserted(harness: &mut Harness, words: &mut Words) -> Work {
        harness.engine.is_watched = true;
        let signature = Signature { operation: 3, root: 1, count: 1, ..Signature::default() };
        let entry = harness.engine.begin(Call::Collective(signature), Bytes::default());
        let work = Work::new(Harness::nobody(), entry);
        let region = Region::of(&[words.buffer()]);
        let request = Request {
            collective: Collective::Broadcast { count: 1, root: Rank(1) },
            signature,
            reduce: None,
            dtype: DType::U64,
            spaces: Spaces::new(region.clone(), region, 8),
            timeout: Duration::from_secs(60),
        };
        harness.engine.submit_collective(request, Executed::default(), work.clone());
        harness.engine.lose(Rank(1), &LinkDown::new("it closed the connection"));
        work
    }

    fn blamed(work: &Work) -> Option<u32> {
        match work.result() {
            Some(Err(Error::PeerLost { rank, .. })) => Some(rank),
            None => None,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn who_left_because_another_was_lost_is_not_blamed() {
        let (mut harness, mut words) = (Harness::of(3), Words::new(vec![7]));
        let work = deserted(&mut harness, &mut words);
        assert_eq!(blamed(&work), None, "there may be news");
        harness.engine.departed(&lost(2));
        assert_eq!(blamed(&work), Some(2));
    }

    #[test]
    fn who_is_gone_without_another_loss_is_blamed_soon() {
        let (mut harness, mut words) = (Harness::of(3), Words::new(vec![7]));
        let work = deserted(&mut harness, &mut words);
        let until = harness.engine.next_deadline().expect("it is waited for news");
        assert!(until < Instant::now() + Duration::from_secs(1));
        harness.engine.expire(until);
        assert_eq!(blamed(&work), Some(1));
    }

    #[test]
    fn who_leaves_after_a_loss_names_the_lost_although_nothing_has_failed_here() {
        let mut harness = Harness::of(3);
        let mut words = Words::new(vec![7]);
        harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
        harness.link().from_engine.clear();
        harness.engine.departed(&lost(2));
        harness.engine.close("shut down");
        let said = harness.link().from_engine.clone();
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
            harness.link().refuses = true;
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
