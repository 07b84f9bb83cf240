//! Heartbeats: ranks that wait in a collective say so again and again, and ranks that have not called it say what they do
//! instead.
//!
//! Ranks that exchange nothing with each other learn from them which ranks have called a collective, and with what
//! arguments. So a timeout names the ranks that have not, and where their programs are. Heartbeats travel beside the operations'
//! streams: none is opened for them.

use std::fmt;
use std::time::{Duration, Instant};

use crate::error::beginning;
use crate::signature::Signature;
use crate::sync::Arc;
use crate::types::Rank;

/// Tells that ranks wait in a collective, or what they do while others wait in one that they have not called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Heartbeat {
    /// Whether the collective is one on devices, which are counted by themselves.
    pub(crate) on_device: bool,
    /// The collective, or the first one that they have not called.
    pub(crate) sequence: u64,
    pub(crate) state: RankState,
    /// Counts a rank's heartbeats in this collective, or its answers while that is the first one that it has not called.
    pub(crate) round: u32,
    /// After how many milliseconds the ranks that wait send the next one, if they still do.
    pub(crate) again_millis: u64,
    pub(crate) ranks: Vec<Rank>,
}

impl Heartbeat {
    /// That rank `me` waits in a collective that it called so: which round of that it is, and after how long the next one follows.
    pub(crate) fn waiting(
        me: Rank,
        on_device: bool,
        sequence: u64,
        call: Signature,
        (round, again): (u32, Duration),
    ) -> Heartbeat {
        let again_millis = again.as_millis().try_into().unwrap_or(u64::MAX);
        Heartbeat { on_device, sequence, state: RankState::Waiting(call), round, again_millis, ranks: vec![me] }
    }
}

/// What ranks do of which a heartbeat tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RankState {
    /// They wait in the collective, which they called so.
    Waiting(Signature),
    /// They have not called it.
    Absent(InFlight),
}

/// The oldest operation that a process has in flight, in whichever communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InFlight {
    /// The operation and its communicator; empty if there is none.
    pub(crate) what: Arc<str>,
    /// For how long, at least.
    pub(crate) millis: u64,
}

impl InFlight {
    /// An operation, in words, of the communicator `comm` that was submitted at `since`.
    pub(crate) fn new(comm: &str, call: impl fmt::Display, is_on_device: bool, since: Instant) -> InFlight {
        let device = if is_on_device { " on its device" } else { "" };
        let what = format!("{call} of communicator `{comm}`{device}");
        let what = beginning(&what, IN_FLIGHT_BYTES_MAX).into();
        InFlight { what, millis: since.elapsed().as_millis().try_into().unwrap_or(u64::MAX) }
    }

    /// No operation is in flight.
    pub(crate) fn nothing() -> InFlight {
        InFlight { what: "".into(), millis: 0 }
    }
}

impl fmt::Display for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.what.is_empty() {
            return f.write_str("no operation in flight");
        }
        write!(f, "{} in flight, for {:.1}s", self.what, Duration::from_millis(self.millis).as_secs_f64())
    }
}

/// The longest text of an operation in flight.
pub(crate) const IN_FLIGHT_BYTES_MAX: usize = 256;

/// An answer that a rank owes to others, which wait in a collective that it has not called: its heartbeat without what it has in
/// flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Absence {
    pub(crate) on_device: bool,
    pub(crate) sequence: u64,
    pub(crate) round: u32,
    pub(crate) again_millis: u64,
}

/// Sends a heartbeat of this rank to the others. Called under the engine's lock: it must not block.
pub(crate) type SendHeartbeat = Box<dyn Fn(Heartbeat) + Send>;

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, Receiver};

    use super::*;
    use crate::algo::select;
    use crate::engine::call::Call;
    use crate::engine::flight_recorder::Bytes;
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

    /// The heartbeats that its engine sends from now on.
    fn heard(harness: &mut Harness) -> Receiver<Heartbeat> {
        let (send, sent) = mpsc::channel();
        harness.engine.collectives.send_heartbeat =
            Some(Box::new(move |heartbeat| send.send(heartbeat).expect("it is heard")));
        sent
    }

    fn heartbeat(signature: Signature, ranks: impl Iterator<Item = u32>) -> Heartbeat {
        let state = RankState::Waiting(signature);
        Heartbeat {
            on_device: false,
            sequence: 0,
            state,
            round: 0,
            again_millis: 500,
            ranks: ranks.map(Rank).collect(),
        }
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
        let sent = heard(&mut harness);
        let frames = harness.wire().from_engine.len();
        let later = Instant::now() + Duration::from_millis(300);
        harness.engine.expire(later);
        let expected = Heartbeat { ranks: vec![Rank(0)], ..heartbeat(signature, 0..1) };
        assert_eq!(sent.try_iter().collect::<Vec<_>>(), [expected]);
        assert_eq!(harness.wire().from_engine.len(), frames, "rank 1 has nothing to do with the broadcast");
    }

    fn absent(sequence: u64, ranks: impl Iterator<Item = u32>, what: &str, millis: u64) -> Heartbeat {
        let state = RankState::Absent(InFlight { what: what.into(), millis });
        Heartbeat { sequence, state, ..heartbeat(Signature::default(), ranks) }
    }

    #[test]
    fn a_timeout_says_what_the_ranks_that_are_missing_had_in_flight_when_last_heard_of() {
        let mut words = Words::new(vec![0]);
        let (mut harness, work, signature) = waiting(9, &mut words);
        let now = Instant::now();
        for told in [
            absent(0, 1..2, "send", 100),
            absent(0, 1..4, "recv", 2_600),
            absent(0, 4..5, "recv", 2_400),
            absent(0, 5..6, "", 0),
            absent(0, 6..7, "put", 0),
            absent(1, 7..8, "get", 0),
        ] {
            harness.engine.heartbeat_arrives(&told, now);
        }
        harness.engine.heartbeat_arrives(&absent(0, 3..4, "recv", 3_100), now + Duration::from_millis(300));
        harness.engine.heartbeat_arrives(&absent(0, 8..9, "recv", 3_100), now + Duration::from_millis(1500));
        harness.engine.heartbeat_arrives(&heartbeat(signature, 6..7), now);
        harness.engine.expire(now + Duration::from_secs(2));
        let Some(Err(Error::Timeout { detail, .. })) = work.result() else { panic!("{:?}", work.result()) };
        let expected = "collective 0: rank(s) 1, 2, 3, 4, 5, 8 did not call it; rank(s) 0, 6, 7 did; 2.0s ago rank(s) 5 \
                        had no operation in flight; 2.0s ago rank(s) 1, 2, 3, 4 had recv in flight, for 2.4s; 0.5s ago rank(s) 8 \
                        had recv in flight, for 3.1s";
        assert_eq!(detail, expected);
    }

    #[test]
    fn a_timeout_names_few_operations_of_missing_ranks_and_none_from_before() {
        let mut words = Words::new(vec![0]);
        let (mut harness, work, signature) = waiting(9, &mut words);
        let now = Instant::now();
        (1..9).for_each(|rank| {
            harness.engine.heartbeat_arrives(&absent(0, rank..rank + 1, &format!("op {rank}"), 0), now)
        });
        harness.engine.expire(now + Duration::from_secs(2));
        let Some(Err(Error::Timeout { detail, .. })) = work.result() else { panic!("{:?}", work.result()) };
        assert!(detail.contains("had op 4 in flight, for 0.0s; rank(s) 5, 6, 7, 8 had others"), "{detail}");
        let mut words = Words::new(vec![0]);
        let next = harness.broadcast(Rank(8), &mut words, Duration::from_secs(1));
        assert_eq!(harness.engine.collectives.signature(), Some(signature));
        harness.engine.expire(now + Duration::from_secs(4));
        let Some(Err(Error::Timeout { detail, .. })) = next.result() else { panic!("{:?}", next.result()) };
        assert!(detail.ends_with("did not call it; rank(s) 0 did"), "{detail}");
    }

    #[test]
    fn a_rank_tells_what_it_does_whenever_others_say_that_they_wait_for_it() {
        let mut words = Words::new(vec![0]);
        let (mut harness, _work, signature) = waiting(3, &mut words);
        let sent = heard(&mut harness);
        let others = |sequence, round| Heartbeat { sequence, round, ..heartbeat(signature, 1..2) };
        let engine = &mut harness.engine;
        assert_eq!(engine.absences(&[others(0, 0)], Instant::now()), [], "this rank waits there, too");
        assert_eq!(engine.absences(&[absent(1, 1..2, "", 0)], Instant::now()), [], "nobody waits");
        let absence = |sequence, round| Absence { on_device: false, sequence, round, again_millis: 500 };
        let in_flight = InFlight { what: "recv".into(), millis: 3 };
        let begin = Instant::now();
        let mut asked =
            |heartbeats: &[Heartbeat], millis| engine.absences(heartbeats, begin + Duration::from_millis(millis));
        assert_eq!(asked(&[others(1, 0), others(2, 4), others(0, 9)], 0), [absence(1, 0)]);
        assert_eq!(asked(&[others(2, 4)], 200), [], "they have just been told");
        assert_eq!(asked(&[others(1, 0)], 250), [absence(1, 1)], "they ask again, or others do");
        engine.tell_absence(absence(1, 1), in_flight.clone());
        let told = Heartbeat { round: 1, ..absent(1, 0..1, "recv", 3) };
        assert_eq!(sent.try_iter().collect::<Vec<_>>(), [told]);
        let _next = harness.broadcast(Rank(2), &mut Words::new(vec![0]), Duration::from_secs(1));
        harness.engine.tell_absence(absence(1, 2), in_flight);
        assert_eq!(sent.try_iter().count(), 0, "it has called it in the meantime");
        let later = begin + Duration::from_secs(1);
        assert_eq!(harness.engine.absences(&[others(2, 0)], later), [absence(2, 0)], "the next one");
    }

    #[test]
    fn collectives_on_devices_are_waited_for_by_themselves() {
        let mut harness = Harness::of(3);
        let sent = heard(&mut harness);
        let call = Signature { count: 5, ..Signature::default() };
        let begin = Instant::now();
        let later = |millis| begin + Duration::from_millis(millis);
        let on_device = |sequence, heartbeat| Heartbeat { on_device: true, sequence, ..heartbeat };
        let waiting = || on_device(1, heartbeat(call, 1..2));
        let absence = |round| Absence { on_device: true, sequence: 1, round, again_millis: 500 };
        let engine = &mut harness.engine;
        engine.waits_on_device(1, call, (0, Duration::from_millis(500)));
        assert_eq!(sent.try_iter().collect::<Vec<_>>(), [on_device(1, heartbeat(call, 0..1))]);
        assert_eq!(engine.absences(&[waiting()], begin), [absence(0)]);
        engine.tell_absence(absence(0), InFlight::nothing());
        assert_eq!(sent.try_iter().collect::<Vec<_>>(), [on_device(1, absent(1, 0..1, "", 0))]);
        let on_the_cpu = Absence { on_device: false, sequence: 0, ..absence(0) };
        assert_eq!(engine.absences(&[heartbeat(call, 1..2), waiting()], later(300)), [on_the_cpu, absence(1)]);
        engine.begin_on_device(Call::Collective(call), 1, Bytes::default());
        assert_eq!(engine.absences(&[waiting()], later(900)), [], "this rank waits there, too");
        engine.tell_absence(absence(2), InFlight::nothing());
        assert_eq!(sent.try_iter().count(), 0, "it has called it in the meantime");
        engine.heartbeat_arrives(&on_device(2, absent(2, 1..2, "recv", 100)), later(500));
        engine.heartbeat_arrives(&on_device(1, absent(1, 2..3, "recv", 100)), later(500));
        let instead = engine.device_waits.describe(begin, &[Rank(1), Rank(2)], later(1000));
        assert_eq!(instead, "; 0.5s ago rank(s) 2 had recv in flight, for 0.1s", "nobody waits for rank 1");
    }

    #[test]
    fn an_operation_in_flight_is_told_in_few_bytes() {
        let since = Instant::now();
        let in_flight = InFlight::new(&"é".repeat(500), "all_reduce", false, since);
        assert!((IN_FLIGHT_BYTES_MAX - 1..=IN_FLIGHT_BYTES_MAX).contains(&in_flight.what.len()), "{in_flight}");
        let on_device = InFlight::new("data", "all_reduce", true, since).to_string();
        assert_eq!(on_device, "all_reduce of communicator `data` on its device in flight, for 0.0s");
        assert_eq!(InFlight::nothing().to_string(), "no operation in flight");
    }
}
