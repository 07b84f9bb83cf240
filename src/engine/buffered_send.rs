//! Buffered sends, as MPI calls them: long sends that wait for each other end from a copy.
//!
//! A long message waits until its receiver has a buffer for it. Ranks that all send before they receive would wait for
//! ever. So a send that has waited for a while, at a rank for which others wait in the same way, copies its message and
//! ends.
//!
//! One copy is enough for ranks that wait in a circle. The rank whose send ends receives next, which ends the send before
//! it, and so on. In any circle there is a rank for which one with a higher number waits, and these ranks copy. The other
//! ranks copy only if that has not helped after a time in which it should have: what comes next may need all of them.
//!
//! Copies are made a piece a turn. Between two pieces other threads get the engine's lock, and other messages their turn.
//! Copies are given back piece by piece as they are sent, and the bytes that a communicator has in them are limited.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::engine::body::{Body, Copied};
use crate::engine::completion::{Completion, OpId};
use crate::engine::endpoint::Endpoints;
use crate::engine::rndv::{PendingSend, Rendezvous};
use crate::types::Rank;

impl PendingSend {
    /// The bytes of the engine that it has, or will have once it is copied.
    fn held(&self) -> usize {
        if self.copy.is_some() { self.body.len() } else { self.body.held() }
    }

    /// The point-to-point operation that waits for the receiver, unless it is about to end from a copy.
    fn waiting_message(&self) -> Option<u64> {
        match self.completion.op {
            OpId::Message(id) if self.copy.is_none() => Some(id),
            _ => None,
        }
    }
}

/// The sends that are ending from a copy.
pub(crate) struct BufferedSends {
    /// Their tokens; the first is being copied. Some may have been asked for or cancelled since.
    copying: VecDeque<u64>,
    /// When to look again for a send that had to wait for room.
    retry: Option<Instant>,
    /// The most bytes in copies, one longer message aside.
    bytes_max: usize,
}

impl Default for BufferedSends {
    fn default() -> BufferedSends {
        BufferedSends { copying: VecDeque::new(), retry: None, bytes_max: HELD_BYTES_MAX }
    }
}

impl BufferedSends {
    /// Whether there is something to copy now.
    pub(crate) fn is_copying(&self) -> bool {
        !self.copying.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.copying.clear();
    }

    /// Begins to copy sends that have waited for their receivers while other ranks wait to send to this one. `senders` are
    /// those ranks with the lengths of their messages; `since` tells when an operation began.
    pub(crate) fn choose(
        &mut self,
        rndv: &mut Rendezvous,
        endpoints: &Endpoints,
        senders: impl Iterator<Item = (Rank, u64)>,
        since: impl Fn(u64) -> Option<Instant>,
        now: Instant,
    ) {
        if self.retry.is_some_and(|retry| now < retry) {
            return;
        }
        let Some(timeout) = copy_timeout(endpoints.me(), senders) else { return };
        let waits = |id| since(id).is_some_and(|since| now.duration_since(since) >= timeout);
        let waiting = rndv.pending_sends().iter().filter(|(_, pending)| pending.waiting_message().is_some_and(waits));
        let mut tokens: Vec<u64> = waiting.map(|(token, _)| *token).collect();
        // The oldest first, which is the one that a caller waits for.
        tokens.sort_unstable();
        for token in tokens {
            let held = bytes_in_copies(rndv, endpoints);
            let Some(pending) = rndv.pending_send(token) else { continue };
            if held > 0 && held.saturating_add(pending.body.len()) > self.bytes_max {
                self.retry = now.checked_add(SEND_TIMEOUT);
                return;
            }
            pending.copy = Some(Copied::default());
            self.copying.push_back(token);
        }
    }

    /// Copies a piece of what is to be copied. Returns what waited for a send of which this was the last piece.
    pub(crate) fn copy_piece(&mut self, rndv: &mut Rendezvous, endpoints: &mut Endpoints) -> Option<Completion> {
        let token = *self.copying.front()?;
        if let Some(PendingSend { body: Body::Memory(region), copy: Some(copy), .. }) = rndv.pending_send(token) {
            copy.copy_on(region);
            if copy.len() < region.len() {
                return None;
            }
        }
        self.copying.pop_front();
        rndv.continue_from_copy(endpoints, token)
    }

    /// When the next send is to be copied, if no receiver asks for it before. See [`BufferedSends::choose`].
    pub(crate) fn next_deadline(
        &self,
        rndv: &Rendezvous,
        me: Rank,
        senders: impl Iterator<Item = (Rank, u64)>,
        since: impl Fn(u64) -> Option<Instant>,
    ) -> Option<Instant> {
        let timeout = copy_timeout(me, senders)?;
        let waiting = rndv.pending_sends().values().filter_map(PendingSend::waiting_message);
        let first = waiting.filter_map(|id| since(id)?.checked_add(timeout)).min()?;
        Some(self.retry.map_or(first, |retry| retry.max(first)))
    }
}

/// How many bytes sends have in copies, or will have.
fn bytes_in_copies(rndv: &Rendezvous, endpoints: &Endpoints) -> usize {
    rndv.pending_sends().values().map(PendingSend::held).sum::<usize>() + endpoints.held()
}

/// How long rank `me`'s sends wait before they are copied, while `senders` wait to send it messages of these lengths. None
/// if no rank does.
fn copy_timeout(me: Rank, senders: impl Iterator<Item = (Rank, u64)>) -> Option<Duration> {
    let (mut longest, mut is_higher) = (None, false);
    for (from, len) in senders {
        longest = longest.max(Some(len));
        is_higher |= from > me;
    }
    let others_copy = SEND_TIMEOUT * 10 + Duration::from_nanos(longest?.saturating_mul(COPY_NANOS_PER_BYTE));
    Some(if is_higher { SEND_TIMEOUT } else { others_copy })
}

/// How long a long message waits for its receiver before it may be copied out of its sender's way.
const SEND_TIMEOUT: Duration = Duration::from_millis(20);

/// How long another rank may take to copy a byte into memory that it has to get from the system first.
const COPY_NANOS_PER_BYTE: u64 = 4;

/// The most bytes that a communicator has in copies. A longer message is copied alone.
const HELD_BYTES_MAX: usize = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::body::PIECE_BYTES;
    use crate::engine::frame::{End, FRAGMENT_BYTES, FrameKind, Header, MatchSpace};
    use crate::engine::message::{Direction, MessageRequest};
    use crate::engine::mock_peer::Harness;
    use crate::engine::region::Region;
    use crate::engine::region::Words;
    use crate::types::Tag;
    use crate::work::Work;

    const LEN: usize = 3 * PIECE_BYTES + 800;

    fn words(value: u64) -> Words {
        Words::new(vec![value; LEN / 8])
    }

    /// Rank 0, to which rank 1 wants to send a long message.
    fn harness() -> Harness {
        let mut harness = Harness::new();
        harness.settle();
        let announce = Header::control(FrameKind::Rts, MatchSpace::PointToPoint, 9, 7, 1000).encode();
        harness.send(&announce);
        harness
    }

    fn send(harness: &mut Harness, words: &mut Words) -> Work {
        let region = Region::of(&[words.buffer()]);
        let (direction, tag) = (Direction::Send(Rank(1)), Tag(0));
        let entry = harness.engine.begin(direction.call(tag, LEN), direction.bytes(LEN));
        let work = Work::new(Harness::no_progress(), entry);
        let request = MessageRequest { direction, tag, region, timeout: Duration::from_secs(600) };
        harness.engine.submit_message(request, work.clone());
        work
    }

    fn held(harness: &Harness) -> usize {
        bytes_in_copies(&harness.engine.context.rndv, &harness.engine.context.endpoints)
    }

    /// Lets the time pass after which sends are copied.
    fn wait(harness: &mut Harness) {
        let now = Instant::now() + Duration::from_secs(1);
        harness.engine.choose_blocked_sends(now);
    }

    fn send_rtr(harness: &mut Harness, token: u64, from: usize) {
        harness.send(&Header::control(FrameKind::Rtr, MatchSpace::PointToPoint, 0, token, from as u64).encode());
    }

    #[test]
    fn a_copy_takes_no_more_than_the_message_and_grows_by_a_piece_a_turn() {
        for from in [0, 5, 2 * PIECE_BYTES] {
            let (mut harness, mut words) = (harness(), words(3));
            let work = send(&mut harness, &mut words);
            wait(&mut harness);
            for turn in 1..=LEN.div_ceil(PIECE_BYTES) {
                assert!(!work.is_done() && harness.engine.arm(), "turn {turn}: there is more to be copied");
                harness.engine.progress(false);
                let copy =
                    harness.engine.context.rndv.pending_sends().values().find_map(|pending| pending.copy.as_ref());
                let copied = copy.map_or(LEN, Copied::held);
                assert_eq!(copied, LEN.min(turn * PIECE_BYTES), "after {turn} turns");
            }
            assert_eq!((work.result(), held(&harness)), (Some(Ok(())), LEN));
            // The message is the engine's now.
            words = Words::new(vec![4]);
            harness.wire().from_engine.clear();
            send_rtr(&mut harness, 0, from);
            let sent = std::mem::take(&mut harness.wire().from_engine);
            let frames = (LEN - from).div_ceil(FRAGMENT_BYTES);
            let header = Header::decode(&sent).expect("a header").expect("a whole one").size();
            assert_eq!(sent.len(), frames * header + LEN - from);
            let numbers = sent.chunks(header + FRAGMENT_BYTES).flat_map(|frame| &frame[header..]);
            let whole = numbers.zip((from..LEN).map(|at| 3_u64.to_ne_bytes()[at % 8]));
            assert!(whole.into_iter().all(|(sent, expected)| *sent == expected));
            assert_eq!((held(&harness), words.get()), (0, [4].as_slice()));
        }
    }

    #[test]
    fn a_copy_that_its_receiver_refuses_is_given_back() {
        let (mut harness, mut words) = (harness(), words(3));
        let work = send(&mut harness, &mut words);
        wait(&mut harness);
        (0..=LEN.div_ceil(PIECE_BYTES)).for_each(|_| _ = harness.engine.progress(false));
        assert_eq!((work.result(), held(&harness)), (Some(Ok(())), LEN));
        let index = End::Receiver as u32;
        let refusal = Header::control(FrameKind::Fail, MatchSpace::PointToPoint, 0, 0, 5);
        harness.send(&[&*Header { index, ..refusal }.encode(), b"vague"].concat());
        assert_eq!(held(&harness), 0);
        assert!(harness.engine.context.rndv.is_idle(), "nothing is in flight");
    }

    #[test]
    fn a_send_that_is_received_meanwhile_needs_no_copy() {
        let (mut harness, mut words) = (harness(), words(3));
        let work = send(&mut harness, &mut words);
        wait(&mut harness);
        harness.engine.progress(false);
        assert!(held(&harness) > 0 && !work.is_done());
        send_rtr(&mut harness, 0, 0);
        assert_eq!((work.result(), held(&harness)), (Some(Ok(())), 0));
        assert!(!harness.engine.buffered_sends.is_copying());
    }

    #[test]
    fn copies_have_a_limit_and_what_is_beyond_waits() {
        let (mut harness, mut all) = (harness(), [words(1), words(2), words(3)]);
        harness.engine.buffered_sends.bytes_max = 2 * LEN;
        let works = all.each_mut().map(|words| send(&mut harness, words));
        let are_done = || works.each_ref().map(Work::is_done);
        wait(&mut harness);
        while harness.engine.progress(false) {}
        assert_eq!((are_done(), held(&harness)), ([true, true, false], 2 * LEN));
        // The first is received, and there is room.
        send_rtr(&mut harness, 0, 0);
        harness.engine.buffered_sends.retry = None;
        wait(&mut harness);
        while harness.engine.progress(false) {}
        assert_eq!((are_done(), held(&harness)), ([true; 3], 2 * LEN));
        // One that is longer than all there may be is copied alone.
        let (mut harness, mut words) = (self::harness(), words(1));
        harness.engine.buffered_sends.bytes_max = 1;
        let work = send(&mut harness, &mut words);
        wait(&mut harness);
        while harness.engine.progress(false) {}
        assert!(work.is_done());
    }

    #[test]
    fn of_ranks_that_wait_in_a_circle_one_copies_first() {
        let soon = |me: u32, senders: &[(u32, u64)]| {
            let senders = senders.iter().map(|(rank, len)| (Rank(*rank), *len));
            copy_timeout(Rank(me), senders).map(|timeout| timeout == SEND_TIMEOUT)
        };
        assert_eq!(soon(0, &[]), None);
        assert_eq!((soon(0, &[(1, 10)]), soon(1, &[(0, 10)])), (Some(true), Some(false)));
        let circle = (0..5).filter(|me| soon(*me, &[((me + 4) % 5, 10)]) == Some(true)).count();
        assert_eq!(circle, 1);
        assert_eq!(soon(2, &[(1, 10), (3, 10)]), Some(true));
        assert_eq!(soon(2, &[(1, u64::MAX)]), Some(false), "of any length");
    }
}
