use super::*;
use crate::device::control::{Control, FailureKind};
use crate::device::in_flight::{Ends, Halt};
use crate::device::words::ControlLayout;
use crate::sync::Arc;
use crate::work::Work;

/// Nothing is in flight, and a rank may be lost.
#[derive(Default)]
struct Nobody {
    lost: Mutex<Option<Error>>,
}

impl Ends for Nobody {
    fn started(&self, _: &[Work], _: Instant) {}

    fn ended(&self, _: &Work, _: Result<(), Error>) {}

    fn took(&self, _: &Work, _: Duration) {}

    fn loss(&self, _: &str) -> Option<Error> {
        lock(&self.lost).clone()
    }

    fn elsewhere(&self) -> Vec<Rank> {
        Vec::new()
    }

    fn waits(&self, _: u64, _: Signature, _: (u32, Duration)) {}

    fn instead(&self, _: Instant, _: &[Rank]) -> String {
        String::new()
    }
}

/// One rank of two. The tests write the words of its stream.
struct Side {
    replay: Replay,
    in_flight: Arc<InFlight>,
    control: Arc<Control>,
    ends: Arc<Nobody>,
}

/// Both ranks of a host, with one operation: each sends the other two messages, one of them with data.
fn sides() -> [Side; 2] {
    let (control_layout, layout) = (ControlLayout::new(2, 1), TokenLayout::new(2));
    let control_words = Arc::new(SharedWords::new(control_layout.count()).expect("words"));
    let words = Arc::new(SharedWords::new(layout.count()).expect("words"));
    [Rank(0), Rank(1)].map(|me| {
        let control = Arc::new(Control::new(control_words.clone(), control_layout, me, Width::Bits64));
        let ends = Arc::new(Nobody::default());
        let in_flight = InFlight::new("test".to_owned(), 0, control.clone(), ends.clone(), None);
        let replay = Replay::new("test".to_owned(), me, words.clone(), layout, Width::Bits64, in_flight.clone());
        let side = Side { replay, in_flight, control, ends };
        let awaits = vec![(side.head(), 2), (side.tail(), 1)];
        let operation = Captured { call: Signature::default(), limit: LIMIT, tokens: vec![side.other()], awaits };
        assert_eq!(side.replay.next(), 0);
        side.replay.note(operation);
        side
    })
}

const LIMIT: Duration = Duration::from_secs(10);

impl Side {
    fn other(&self) -> Rank {
        Rank(1 - self.replay.me.0)
    }

    fn head(&self) -> Word {
        Word::Head { sender: self.other(), receiver: self.replay.me }
    }

    fn tail(&self) -> Word {
        Word::Tail { sender: self.replay.me, receiver: self.other() }
    }

    fn value(&self, lane: usize, word: Word) -> u64 {
        self.replay.words.word(self.replay.layout.words().index(lane, word)).load(Ordering::Acquire)
    }

    /// What a stream writes.
    fn write(&self, lane: usize, word: Word, value: u64) {
        self.replay.words.word(self.replay.layout.words().index(lane, word)).store(value, Ordering::Release);
    }

    fn stream_is(&self, place: Option<Busy>) {
        self.replay.busy().store(place.map_or(0, Busy::to_word), Ordering::Release);
    }

    /// Whether its stream passes whatever it waits for.
    fn is_released(&self) -> bool {
        self.value(TOKENS, self.tail()) == 1
            && self.value(COUNTS, self.head()) > 1 << 60
            && self.value(COUNTS, self.tail()) > 1 << 60
    }

    fn has_failed(&self) -> Option<Error> {
        match self.in_flight.halt() {
            Some(Halt::Failed(error)) => Some(error),
            other => {
                assert!(other.is_none(), "{other:?}");
                None
            }
        }
    }
}

#[test]
fn a_word_tells_where_a_stream_is() {
    for place in [Busy::Begins(0), Busy::Runs(0), Busy::Begins(7), Busy::Runs(1000)] {
        let word = place.to_word();
        assert!(word > 0 && Busy::from_word(word) == Some(place) && Busy::from_word(word | SEEN) == Some(place));
    }
    assert_eq!(Busy::from_word(0), None);
}

#[test]
fn every_line_of_a_graphs_lane_has_one_use() {
    let layout = TokenLayout::new(3);
    let ranks = || (0..3).map(Rank);
    let mut lines: Vec<usize> = ranks().map(|rank| layout.busy(rank)).collect();
    for (sender, receiver) in ranks().flat_map(|sender| ranks().map(move |receiver| (sender, receiver))) {
        for lane in [COUNTS, TOKENS] {
            lines.push(layout.words().index(lane, Word::Head { sender, receiver }));
            lines.push(layout.words().index(lane, Word::Tail { sender, receiver }));
        }
    }
    // The words for other hosts, to which graphs send nothing.
    for (lane, of) in [COUNTS, TOKENS].into_iter().flat_map(|lane| ranks().map(move |of| (lane, of))) {
        let words = [Word::Outbound { of }, Word::Sent { of }, Word::Inbound { of }, Word::Taken { of }];
        lines.extend(words.map(|word| layout.words().index(lane, word)));
    }
    lines.sort_unstable();
    assert_eq!(lines, (0..layout.count()).collect::<Vec<_>>());
}

#[test]
fn a_limit_counts_within_one_replay_and_names_who_is_missing() {
    let [side, other] = sides();
    let now = Instant::now();
    assert_eq!(side.replay.tick(now), Look::Later);
    side.stream_is(Some(Busy::Runs(0)));
    assert_eq!(side.replay.tick(now), Look::Later);
    // The next replay begins before the watch looks.
    side.stream_is(None);
    side.stream_is(Some(Busy::Runs(0)));
    assert_eq!(side.replay.tick(now + LIMIT), Look::Later, "this one has just begun");
    assert!(side.has_failed().is_none() && !side.is_released());
    side.write(COUNTS, side.head(), 2);
    side.write(COUNTS, side.tail(), 1);
    assert_eq!(side.replay.tick(now + 3 * LIMIT), Look::Later, "it waits for nobody any more");
    side.write(COUNTS, side.tail(), 0);
    assert_eq!(side.replay.tick(now + 3 * LIMIT), Look::Soon);
    assert!(side.is_released());
    let Some(Error::Timeout { detail, .. }) = side.has_failed() else { panic!("{:?}", side.in_flight.halt()) };
    assert_eq!(
        detail,
        "in a replay of a graph: rank(s) 1 did not finish their part; rank(s) 1 are not in this operation"
    );
    let failure = other.control.failure_of(Rank(0), 0).expect("the others are told");
    assert_eq!(failure.kind, FailureKind::Timeout);
    // Later replays end too.
    side.stream_is(None);
    assert_eq!(side.replay.tick(now + 3 * LIMIT), Look::Later);
    side.write(TOKENS, side.tail(), 0);
    side.stream_is(Some(Busy::Begins(0)));
    assert_eq!(side.replay.tick(now + 3 * LIMIT), Look::Soon);
    assert!(side.is_released());
}

#[test]
fn a_token_that_is_out_names_its_rank() {
    let [side, _] = sides();
    let now = Instant::now();
    side.stream_is(Some(Busy::Begins(0)));
    assert_eq!(side.replay.tick(now), Look::Later);
    assert_eq!(side.replay.tick(now + LIMIT), Look::Later, "the token is there");
    side.write(TOKENS, side.tail(), 0);
    assert_eq!(side.replay.tick(now + LIMIT), Look::Soon);
    assert!(matches!(side.has_failed(), Some(Error::Timeout { .. })));
}

#[test]
fn a_rank_that_left_after_it_did_its_part_is_not_missed() {
    let [side, other] = sides();
    let left = || Error::Closed { operation: "a call".to_owned(), comm: "test".to_owned(), how: "left".to_owned() };
    let now = Instant::now();
    side.stream_is(Some(Busy::Runs(0)));
    side.write(COUNTS, side.head(), 2);
    side.write(COUNTS, side.tail(), 1);
    other.in_flight.leave(left());
    side.in_flight.leave(left());
    assert_eq!(side.replay.tick(now), Look::Later);
    assert!(!side.is_released());
    side.stream_is(None);
    assert_eq!(side.replay.tick(now), Look::Later);
    side.stream_is(Some(Busy::Runs(0)));
    side.write(COUNTS, side.head(), 0);
    assert_eq!(side.replay.tick(now), Look::Soon, "there will be no part of it in this one");
    assert!(side.is_released());
}

#[test]
fn a_rank_that_is_lost_ends_the_replays_that_miss_it_alone() {
    let [side, _] = sides();
    let now = Instant::now();
    let loss = |rank| Error::PeerLost { operation: "all_reduce".to_owned(), rank, cause: "it died".to_owned() };
    side.stream_is(Some(Busy::Runs(0)));
    *lock(&side.ends.lost) = Some(loss(7));
    assert_eq!(side.replay.tick(now), Look::Later, "what it misses is another rank's");
    *lock(&side.ends.lost) = Some(loss(1));
    assert_eq!(side.replay.tick(now), Look::Soon);
    assert!(matches!(side.has_failed(), Some(Error::PeerLost { rank: 1, .. })));
}

#[test]
fn a_disagreement_elsewhere_concerns_no_replay() {
    let [side, other] = sides();
    side.stream_is(Some(Busy::Runs(0)));
    let error = Error::Mismatch { operation: "all_reduce".to_owned(), detail: "it differs".to_owned() };
    other.in_flight.fail(3, FailureKind::Mismatch, Rank(1), error);
    assert_eq!(side.replay.tick(Instant::now()), Look::Later);
    assert!(!side.is_released());
}
