//! Heartbeats: ranks that wait in a collective say so again and again.
//!
//! Ranks that exchange nothing with each other learn from them which ranks have called a collective, and with what
//! arguments. So a timeout names the ranks that have not. Heartbeats travel beside the operations' streams: none is opened
//! for them.

use std::time::{Duration, Instant};

use crate::signature::Signature;
use crate::types::Rank;

/// Tells that ranks wait in a collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Heartbeat {
    pub(crate) sequence: u64,
    pub(crate) signature: Signature,
    /// Counts a rank's heartbeats in this collective.
    pub(crate) round: u32,
    /// After how many milliseconds these ranks send the next one, if they still wait.
    pub(crate) again_millis: u64,
    pub(crate) ranks: Vec<Rank>,
}

/// Sends a heartbeat of this rank to the others. Called under the engine's lock: it must not block.
pub(crate) type SendHeartbeat = Box<dyn Fn(Heartbeat) + Send>;

/// When a collective's next heartbeat is due.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pulse {
    /// None if it is beyond the clock's range.
    pub(crate) due: Option<Instant>,
    interval: Duration,
    round: u32,
}

impl Pulse {
    /// Of a collective that starts now and may take `timeout`.
    pub(crate) fn new(now: Instant, timeout: Duration) -> Pulse {
        let due = now.checked_add(HEARTBEAT_AFTER.min(timeout / 4));
        Pulse { due, interval: HEARTBEAT_AFTER.max(timeout / 8), round: 0 }
    }

    /// Takes the heartbeat that is due at `now`, if one is: its round, and after how long the next one follows.
    pub(crate) fn beat(&mut self, now: Instant) -> Option<(u32, Duration)> {
        self.due.filter(|due| *due <= now)?;
        let round = self.round;
        self.round = round.saturating_add(1);
        self.due = now.checked_add(self.interval);
        Some((round, self.interval))
    }
}

/// How long a collective waits before its first heartbeat, and at least before each further one.
const HEARTBEAT_AFTER: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::select;
    use crate::engine::mock_peer::Harness;
    use crate::engine::region::Words;
    use crate::error::Error;
    use crate::work::Work;

    /// A broadcast from the last of so many ranks, for which rank 0 waits.
    fn waiting(size: u32, words: &mut Words) -> (Harness, Work, Signature) {
        let mut harness = Harness::of(size as usize);
        let work = harness.broadcast(Rank(size - 1), words, Duration::from_secs(1));
        let signature = harness.engine.collectives.signature().expect("it runs");
        (harness, work, signature)
    }

    fn heartbeat(signature: Signature, ranks: impl Iterator<Item = u32>) -> Heartbeat {
        Heartbeat { sequence: 0, signature, round: 0, again_millis: 500, ranks: ranks.map(Rank).collect() }
    }

    #[test]
    fn a_timeout_names_the_ranks_that_sent_no_heartbeat_also_in_large_worlds() {
        let mut words = Words::new(vec![0]);
        let (mut harness, work, signature) = waiting(300, &mut words);
        let now = Instant::now();
        harness.engine.heartbeat_arrives(&heartbeat(signature, (0..300).filter(|rank| rank % 100 != 7)), now);
        harness.engine.expire(now + Duration::from_secs(2));
        let Some(Err(Error::Timeout { detail, .. })) = work.result() else { panic!("{:?}", work.result()) };
        assert!(detail.contains("rank(s) 7, 107, 207 did not call it"), "{detail}");
    }

    #[test]
    fn a_heartbeat_tells_of_another_call() {
        let mut words = Words::new(vec![0]);
        let (mut harness, work, signature) = waiting(3, &mut words);
        let another = Signature { count: 2, ..signature };
        harness.engine.heartbeat_arrives(&Heartbeat { sequence: 1, ..heartbeat(another, 1..2) }, Instant::now());
        assert!(work.result().is_none(), "that is the next one");
        harness.engine.heartbeat_arrives(&heartbeat(another, 0..1), Instant::now());
        assert!(work.result().is_none(), "its own comes back");
        harness.engine.heartbeat_arrives(&heartbeat(another, 1..2), Instant::now());
        assert!(matches!(work.result(), Some(Err(Error::Mismatch { .. }))), "{:?}", work.result());
    }

    #[test]
    fn a_heartbeat_tells_of_another_algorithm() {
        let mut words = Words::new(vec![0]);
        let (mut harness, work, signature) = waiting(4, &mut words);
        let another = Signature { algorithm: select::number("ring"), ..signature };
        assert_ne!(another, signature);
        harness.engine.heartbeat_arrives(&heartbeat(another, 2..3), Instant::now());
        let Some(Err(Error::Mismatch { detail, .. })) = work.result() else { panic!("{:?}", work.result()) };
        assert!(detail.contains("rank 2 ring"), "{detail}");
    }

    #[test]
    fn a_waiting_rank_sends_heartbeats_and_opens_no_stream_for_them() {
        let mut words = Words::new(vec![0]);
        let (mut harness, _work, signature) = waiting(3, &mut words);
        let (send, sent) = std::sync::mpsc::channel();
        harness.engine.collectives.send_heartbeat =
            Some(Box::new(move |heartbeat| send.send(heartbeat).expect("it is heard")));
        let frames = harness.wire().from_engine.len();
        let later = Instant::now() + Duration::from_millis(300);
        harness.engine.expire(later);
        let expected = Heartbeat { ranks: vec![Rank(0)], ..heartbeat(signature, 0..1) };
        assert_eq!(sent.try_iter().collect::<Vec<_>>(), [expected]);
        assert_eq!(harness.wire().from_engine.len(), frames, "rank 1 has nothing to do with the broadcast");
    }

    #[test]
    fn heartbeats_come_early_in_short_time_limits_and_seldom_in_long_ones() {
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let mut short = Pulse::new(now, second);
        assert_eq!(short.due, Some(now + second / 4));
        assert_eq!(short.beat(now), None, "it is not due yet");
        assert_eq!(short.beat(now + second / 4), Some((0, HEARTBEAT_AFTER)));
        assert_eq!(short.beat(now + second), Some((1, HEARTBEAT_AFTER)));
        let mut long = Pulse::new(now, second * 800);
        assert_eq!(long.due, Some(now + HEARTBEAT_AFTER));
        assert_eq!(long.beat(now + second), Some((0, second * 100)));
        assert_eq!(long.due, Some(now + second * 101));
    }
}
