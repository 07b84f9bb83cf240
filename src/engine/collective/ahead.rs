//! Running ahead: what a rank has yet to hear of a collective that has ended on it.
//!
//! The empty messages that a schedule waits for last only tell what their senders have called. A collective ends without them,
//! and the next one ends once they have come: a root whose part is done need not wait for ranks that come later. If one of them
//! tells of another call, or that its rank has failed, the next collective fails here in its place.

use super::{Collectives, Failure, tell_others};
use crate::engine::context::OpContext;
use crate::engine::frame::{Failed, Header, Reason};
use crate::engine::owed::Owed;
use crate::engine::plan::Plan;
use crate::signature::Signature;
use crate::types::Rank;

impl Collectives {
    /// Whether messages of the collective that ended last have not come, though their senders are there.
    pub(crate) fn awaits_word(&self, ctx: &OpContext) -> bool {
        self.owed.ranks().any(|rank| ctx.lost(rank).is_none())
    }

    /// Whether the next collective has nothing to wait for of the one before.
    #[inline]
    pub(crate) fn has_heard(&self) -> bool {
        self.owed.is_empty()
    }

    /// The sender of a message of the collective before that has not come, and the message's header.
    pub(crate) fn next_word(&self) -> Option<(Rank, Header)> {
        self.owed.words().next()
    }

    /// The header of the message that `from` owes, if it owes one.
    #[inline]
    pub(crate) fn word_of(&self, from: Rank) -> Option<Header> {
        self.owed.words().find_map(|(owing, word)| (owing == from).then_some(word))
    }

    pub(crate) fn heard(&mut self, from: Rank) {
        self.owed.heard(from);
    }

    /// Collective `sequence` ends, though these last messages of its plan may not have come.
    pub(crate) fn run_ahead(&mut self, sequence: u64, signature: Signature, plan: &Plan) {
        if plan.own_steps() == plan.schedule.steps.len() {
            return;
        }
        let unexpected = &mut self.unexpected;
        let last = plan.words().filter(|(from, index)| unexpected.remove(&(*from, sequence, *index)).is_none());
        self.owed = Owed::new(sequence, signature, last);
    }

    /// Something has come of the collective that ended last, which its sender called by `theirs`.
    pub(super) fn word_arrives(&mut self, ctx: &mut OpContext, from: Rank, theirs: Signature) {
        let Some(text) = self.owed.disagreement(ctx.me, from, &theirs) else { return self.owed.heard(from) };
        self.fail_late(ctx, Failure { reporter: from, is_mismatch: true, lost: None, is_late: true, text });
    }

    /// Ends the next collective in place of the one that has ended, and tells every other rank.
    pub(super) fn fail_late(&mut self, ctx: &mut OpContext, failure: Failure) {
        self.owed.clear();
        let sequence = self.current();
        tell_others(ctx, Failed::Collective { sequence, reason: Reason::Earlier, lost: None }, &failure.text);
        if self.active.is_some() {
            self.fail_active_remotely(ctx, failure);
        } else {
            self.failed.entry(sequence).or_insert(Failure { is_late: true, ..failure });
        }
    }

    /// What went wrong in the collective that has ended last, if that was heard later and nothing has failed for it.
    pub(crate) fn late_failure(&self) -> Option<&str> {
        self.failed.get(&self.current()).filter(|failure| failure.is_late).map(|failure| failure.text.as_str())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::algo::Collective;
    use crate::engine::frame::{FrameKind, MatchSpace};
    use crate::engine::mock_peer::Harness;
    use crate::engine::region::{Region, Spaces, Words};
    use crate::engine::request::Request;
    use crate::error::{Error, LinkDown};
    use crate::types::DType;
    use crate::work::{Submitted, Work};

    const LONG: Duration = Duration::from_secs(60);

    fn broadcast_from(root: u32) -> Signature {
        Signature { operation: 3, root, count: 1, ..Signature::default() }
    }

    /// Rank 0 broadcasts a word, and does not wait.
    fn broadcast(harness: &mut Harness) -> Work {
        let mut words = Words::new(vec![7]);
        let work = harness.broadcast(Rank(0), &mut words, LONG);
        harness.settle();
        work
    }

    /// A broadcast that ends in the call, if it can.
    fn call(harness: &mut Harness, root: u32, words: &mut Words) -> Submitted {
        let region = Region::of(&[words.buffer()]);
        let request = Request {
            collective: Collective::Broadcast { count: 1, root: Rank(root) },
            signature: broadcast_from(root),
            reduce: None,
            dtype: DType::U64,
            spaces: Spaces::new(region.clone(), region, 8),
            timeout: LONG,
        };
        harness.engine.start_collective(request, true, &Harness::no_progress())
    }

    /// As all ranks run it.
    fn called(harness: &mut Harness) -> Signature {
        let sent = harness.sent();
        sent.iter().find(|header| header.kind == FrameKind::Eager).expect("the word").signature
    }

    /// Rank 1 tells that it has called a collective so.
    fn tell(harness: &mut Harness, sequence: u64, signature: Signature) {
        let header = Header::control(FrameKind::Eager, MatchSpace::Collective, sequence, 0, 0);
        harness.send(&Header { signature, ..header }.encode());
    }

    /// What rank 0 has told of failures, by the number of the collective.
    fn failures(harness: &mut Harness) -> Vec<(u64, u32)> {
        let sent = harness.sent();
        sent.iter().filter(|header| header.kind == FrameKind::Fail).map(|header| (header.key, header.index)).collect()
    }

    fn harness() -> Harness {
        let mut harness = Harness::new();
        harness.engine.context.rndv.single_copy_bytes = harness.engine.context.rndv.eager_bytes;
        harness.settle();
        harness
    }

    #[test]
    fn a_root_is_one_collective_ahead_and_no_more() {
        let mut harness = harness();
        let first = broadcast(&mut harness);
        assert_eq!(first.result(), Some(Ok(())), "nobody else has called it");
        assert!(harness.engine.is_settled() && !harness.engine.has_ended());
        let (signature, second) = (called(&mut harness), broadcast(&mut harness));
        assert_eq!(harness.sent().len(), 1, "the second one's data leave");
        assert!(!second.is_done() && !harness.engine.arm(), "it waits without a turn that goes on");
        harness.engine.disarm();
        tell(&mut harness, 0, signature);
        assert_eq!(second.result(), Some(Ok(())));
        tell(&mut harness, 1, signature);
        assert!(harness.engine.has_ended());
        // What comes early is not waited for.
        tell(&mut harness, 2, signature);
        assert_eq!(broadcast(&mut harness).result(), Some(Ok(())));
        assert!(harness.engine.has_ended());
    }

    #[test]
    fn calls_that_end_at_once_are_as_far_ahead() {
        let mut harness = harness();
        let mut words = Words::new(vec![7]);
        let mut run = |harness: &mut Harness| call(harness, 0, &mut words);
        assert!(matches!(run(&mut harness), Submitted::Completed(..)));
        let signature = called(&mut harness);
        for sequence in 0..3 {
            let header = Header::control(FrameKind::Eager, MatchSpace::Collective, sequence, 0, 0);
            harness.wire().to_engine.extend_from_slice(&Header { signature, ..header }.encode());
            assert!(matches!(run(&mut harness), Submitted::Completed(..)), "the word for {sequence} is there");
        }
        let Submitted::Pending(work) = run(&mut harness) else { panic!("it is two ahead") };
        harness.settle();
        assert!(!work.is_done());
        tell(&mut harness, 3, signature);
        assert_eq!(work.result(), Some(Ok(())));
        assert!(!harness.engine.collectives.has_heard(), "the fifth one's word has not come");
    }

    #[test]
    fn a_word_opens_the_stream_that_it_needs() {
        let (mut harness, mut words) = (Harness::of(3), Words::new(vec![0]));
        let begun = call(&mut harness, 2, &mut words);
        harness.settle();
        assert_eq!(harness.sent().len(), 1, "nothing else goes to rank 1 or comes from there");
        assert!(matches!(begun, Submitted::Pending(_)), "the root's data have not come");
    }

    #[test]
    fn a_disagreement_ends_the_next_collective_and_the_one_after_that_works() {
        for is_under_way in [true, false] {
            let mut harness = harness();
            let first = broadcast(&mut harness);
            let signature = called(&mut harness);
            let early = is_under_way.then(|| broadcast(&mut harness));
            tell(&mut harness, 0, broadcast_from(1));
            assert_eq!(failures(&mut harness), [(1, Reason::Earlier as u32)], "rank 1 does not wait for its part");
            assert_eq!(harness.engine.collectives.late_failure().is_some(), !is_under_way, "an end would tell of it");
            let second = early.unwrap_or_else(|| broadcast(&mut harness));
            let Some(Err(Error::Mismatch { detail, .. })) = second.result() else { panic!("{second:?}") };
            assert!(detail.contains("disagree on collective 0:"), "{detail}");
            assert_eq!(first.result(), Some(Ok(())));
            // What rank 1 has sent meanwhile of what failed here is nothing.
            tell(&mut harness, 1, signature);
            assert_eq!(broadcast(&mut harness).result(), Some(Ok(())));
            tell(&mut harness, 2, signature);
            assert!(harness.engine.has_ended() && failures(&mut harness).is_empty());
        }
    }

    #[test]
    fn a_failure_of_another_rank_ends_the_next_collective_unless_it_is_known_already() {
        for (reason, is_news) in [(Reason::Own, true), (Reason::Mismatch, true), (Reason::Earlier, false)] {
            let mut harness = harness();
            broadcast(&mut harness);
            harness.sent();
            let failed = Failed::Collective { sequence: 0, reason, lost: None };
            harness.send(&[&*failed.header(4).encode(), b"text"].concat());
            let second = broadcast(&mut harness);
            match second.result() {
                Some(Err(Error::Remote { rank: 1, cause, .. })) if reason == Reason::Own => assert_eq!(cause, "text"),
                Some(Err(Error::Mismatch { detail, .. })) if reason == Reason::Mismatch => assert_eq!(detail, "text"),
                Some(Ok(())) if !is_news => {}
                other => panic!("{reason:?}: {other:?}"),
            }
            assert_eq!(failures(&mut harness), if is_news { vec![(1, Reason::Earlier as u32)] } else { vec![] });
        }
    }

    #[test]
    fn a_rank_that_goes_before_it_has_said_what_it_called_ends_the_next_collective() {
        for is_under_way in [true, false] {
            let mut harness = harness();
            broadcast(&mut harness);
            let early = is_under_way.then(|| broadcast(&mut harness));
            harness.engine.lose(Rank(1), &LinkDown::new("it closed the connection"));
            assert!(!harness.engine.collectives.awaits_word(&harness.engine.context), "no end is waited for");
            let second = early.unwrap_or_else(|| broadcast(&mut harness));
            harness.settle();
            assert!(matches!(second.result(), Some(Err(Error::PeerLost { rank: 1, .. }))), "{second:?}");
        }
    }

    #[test]
    fn nobody_has_more_to_say_of_a_collective_that_failed_for_the_one_before() {
        let mut harness = Harness::of(3);
        harness.engine.context.rndv.single_copy_bytes = harness.engine.context.rndv.eager_bytes;
        harness.settle();
        assert_eq!(broadcast(&mut harness).result(), Some(Ok(())));
        let failed = Failed::Collective { sequence: 0, reason: Reason::Earlier, lost: None };
        // Rank 2 is told the same, and does not call it any more.
        harness.send(&[&*failed.header(4).encode(), b"text"].concat());
        assert!(harness.engine.has_ended() && failures(&mut harness).is_empty());
    }

    #[test]
    fn a_root_that_does_not_listen_or_has_left_need_not_be_told() {
        for has_left in [false, true] {
            let (mut harness, mut words) = (harness(), Words::new(vec![0]));
            let signature = {
                let mut other = self::harness();
                let _work = other.broadcast(Rank(1), &mut Words::new(vec![0]), LONG);
                other.engine.collectives.signature().expect("it runs")
            };
            let header = Header { signature, ..Header::control(FrameKind::Eager, MatchSpace::Collective, 0, 0, 8) };
            harness.send(&[&*header.encode(), &7u64.to_ne_bytes()].concat());
            harness.wire().full = true;
            if has_left {
                harness.engine.lose(Rank(1), &LinkDown::new("it closed the connection"));
            }
            let work = harness.broadcast(Rank(1), &mut words, LONG);
            harness.settle();
            assert_eq!((work.result(), words.get()), (Some(Ok(())), [7].as_slice()), "it has left: {has_left}");
            assert_eq!(harness.engine.is_busy(), !has_left, "the word goes out when there is room");
        }
    }
}
