use std::time::Duration;

use super::*;
use crate::device::control::{Control, FailureKind};
use crate::device::in_flight::tests::Completes;
use crate::device::in_flight::{By, Halt, Look, Watched};
use crate::device::words::ControlLayout;
use crate::sync::Ordering;
use crate::sys::cuda::Width;
use crate::sys::words::SharedWords;
use crate::work::Entry;

/// One rank's end of a pair. The tests write the words of its streams.
struct Side {
    lanes: [Arc<InFlight>; 2],
    control: Arc<Control>,
    words: Arc<SharedWords>,
    layout: ControlLayout,
}

/// The ends of the pair of ranks 3 and 5 of eight.
fn sides() -> [Side; 2] {
    let layout = ControlLayout::new(2, 2);
    let words = Arc::new(SharedWords::new(layout.count()).expect("words"));
    [Rank(0), Rank(1)].map(|me| {
        let control = Control::new(words.clone(), layout, me, Width::Bits64).of_some(vec![Rank(3), Rank(5)], 8);
        let control = Arc::new(control);
        let lane = |lane| InFlight::new("test".to_owned(), lane, control.clone(), Arc::new(Completes::default()), None);
        Side { lanes: [lane(0), lane(1)], control: control.clone(), words: words.clone(), layout }
    })
}

const LONG: Duration = Duration::from_secs(1000);

impl Side {
    /// A batch of one message each way. This rank's stream waits for the other rank's message.
    fn begin(&self, number: u64, limit: Duration) -> Work {
        self.begin_by(By::Programs, number, limit)
    }

    fn begin_by(&self, by: By, number: u64, limit: Duration) -> Work {
        let me = self.control.me();
        let other = Rank(1 - me.0);
        let entry = Entry { operation: "send", sequence: number, number, began: Instant::now() };
        let work = Work::new(Arc::new(Several::new("test".to_owned(), self.lanes.to_vec())), entry);
        let batch = Batch::new(vec![work.clone()], 2);
        let awaits = |lane: usize| match lane == me.index() {
            true => vec![],
            false => vec![(lane, Word::Head { sender: other, receiver: me }, number)],
        };
        let peer = self.control.name(other);
        let place = |lane: usize| {
            let in_flight = self.lanes[lane].clone();
            PartInFlight { in_flight, peer, first: number, last: number, awaits: Awaits::Words(awaits(lane)) }
        };
        batch.place(vec![place(0), place(1)]);
        for (lane, in_flight) in self.lanes.iter().enumerate() {
            let way = [(Rank(3), Rank(5)), (Rank(5), Rank(3))][lane];
            let part = BatchPart::new(format!("lane {lane}"), number, way, peer, batch.clone());
            in_flight.begin(number, part, work.clone(), limit, by);
        }
        work
    }

    fn starts(&self, number: u64) {
        for lane in 0..2 {
            self.words.word(self.layout.started(self.control.me(), lane, number)).store(number, Ordering::Release);
        }
    }

    /// Has a message come on a lane for which the other rank's stream waits.
    fn sends(&self, lane: usize, number: u64) {
        let head = Word::Head { sender: self.control.me(), receiver: Rank(1 - self.control.me().0) };
        self.words.word(self.layout.lane_words().index(lane, head)).store(number, Ordering::Release);
    }

    fn ends(&self, lane: usize, number: u64) {
        self.words.word(self.layout.done(self.control.me(), lane, number)).store(number, Ordering::Release);
    }

    fn tick(&self, now: Instant) -> [Look; 2] {
        [self.lanes[0].tick(now), self.lanes[1].tick(now)]
    }
}

#[test]
fn a_batch_ends_with_its_last_part() {
    let [side, _] = sides();
    let work = side.begin(1, LONG);
    side.ends(1, 1);
    assert!(!work.poll(), "the other part has not ended");
    side.ends(0, 1);
    assert!(work.poll());
    assert_eq!(work.result(), Some(Ok(())));
}

#[test]
fn what_fails_one_part_fails_all_at_both_ranks() {
    let [side, other] = sides();
    let (work, theirs) = (side.begin(1, LONG), other.begin(1, LONG));
    let error = Error::Device { operation: "send".to_owned(), cause: "it broke".to_owned() };
    side.lanes[0].fail(1, FailureKind::Driver, Rank(3), error.clone());
    let now = Instant::now();
    assert_eq!((side.tick(now), other.tick(now)), ([Look::Soon; 2], [Look::Soon; 2]), "all are released");
    for lane in 0..2 {
        side.ends(lane, 1);
        other.ends(lane, 1);
    }
    assert!(work.poll() && theirs.poll());
    assert_eq!(work.result(), Some(Err(error)));
    assert!(matches!(theirs.result(), Some(Err(Error::Remote { rank: 3, .. }))), "{theirs:?}");
}

#[test]
fn only_the_part_that_the_stream_waits_for_is_late() {
    let [side, _] = sides();
    let work = side.begin(1, Duration::from_secs(1));
    side.starts(1);
    let now = Instant::now();
    side.tick(now);
    let later = now + Duration::from_secs(2);
    // What is sent waits for nobody; what is received, for rank 5.
    assert_eq!(side.lanes[0].tick(later), Look::Later);
    assert_eq!(side.lanes[1].tick(later), Look::Soon);
    assert_eq!(side.lanes[0].tick(later), Look::Soon, "they fail together");
    side.ends(0, 1);
    side.ends(1, 1);
    assert!(work.poll());
    let Some(Err(Error::Timeout { detail, .. })) = work.result() else { panic!("{work:?}") };
    assert_eq!(detail, "device message 1 from rank 5 to rank 3: rank 5 did not call it");
}

#[test]
fn a_part_that_a_library_may_have_lost_fails_when_the_stream_waits_for_no_other() {
    let [side, other] = sides();
    let _work = side.begin_by(By::Library, 1, LONG);
    side.starts(1);
    let now = Instant::now();
    other.control.give_up_library(0);
    let look = |seconds| side.lanes[0].tick(now + Duration::from_secs(seconds));
    assert_eq!((look(0), look(3)), (Look::Later, Look::Later), "it waits for the message on the other lane");
    other.sends(1, 1);
    assert_eq!((look(10), look(11)), (Look::Later, Look::Later));
    assert_eq!(look(13), Look::Soon);
}

#[test]
fn what_another_rank_gave_up_is_told_once_to_who_calls_it_later() {
    let [side, other] = sides();
    let detail = "they differ".to_owned();
    let error = Error::Mismatch { operation: "recv".to_owned(), detail };
    other.lanes[0].fail_too(3, &error);
    assert!(side.lanes[0].halt_before(1, 2, &"send").is_none(), "those before are sound");
    for (first, last) in [(3, 3), (2, 4)] {
        let halt = side.lanes[0].halt_before(first, last, &"send");
        assert!(matches!(halt, Some(Halt::Failed(Error::Mismatch { .. }))), "{halt:?}");
    }
    // This rank has ended message 3: it begins anew, as the other rank does at its next call.
    assert!(matches!(side.lanes[0].halt_before(4, 4, &"send"), Some(Halt::Mismatch)));
    assert!(side.lanes[1].halt_before(4, 4, &"recv").is_none(), "the other direction goes on");
}
