use super::*;
use crate::device::call_log::{Capture, LoggedCall};
use crate::device::words::ControlLayout;
use crate::error::InitError;
use crate::op::CollectiveKind;
use crate::sys::cuda::Width;
use crate::sys::words::SharedWords;
use crate::types::DType;
use crate::work::Entry;

/// A communicator that completes works, and may lose a rank.
#[derive(Default)]
pub(crate) struct Completes {
    /// By number in the flight recorder, the operations that streams were seen to have reached, and when.
    started: Mutex<Vec<(u64, Instant)>>,
    lost: Mutex<Option<Error>>,
    /// What was told of waits: the collective, and which round.
    waits: Mutex<Vec<(u64, u32)>>,
}

impl Ends for Completes {
    fn started(&self, works: &[Work], now: Instant) {
        lock(&self.started).extend(works.iter().map(|work| (work.number(), now)));
    }

    fn ended(&self, work: &Work, result: Result<(), Error>) {
        work.complete(result, None);
    }

    fn took(&self, _: &Work, _: Duration) {}

    fn loss(&self, _: &str) -> Option<Error> {
        lock(&self.lost).clone()
    }

    fn elsewhere(&self) -> Vec<Rank> {
        Vec::new()
    }

    fn waits(&self, sequence: u64, _: Signature, (round, _): (u32, Duration)) {
        lock(&self.waits).push((sequence, round));
    }

    fn instead(&self, _: Instant, missing: &[Rank]) -> String {
        missing.iter().map(|rank| format!("; rank {rank} slept")).collect()
    }
}

const BOTH: [Rank; 2] = [Rank(0), Rank(1)];

/// One rank of two. The tests write the words of its stream.
struct Side {
    in_flight: Arc<InFlight>,
    control: Arc<Control>,
    words: Arc<SharedWords>,
    layout: ControlLayout,
    ends: Arc<Completes>,
}

const LANE: usize = 0;

/// Both ranks of a host.
fn sides() -> [Side; 2] {
    sides_named(&BOTH)
}

/// The same two as a communicator names them that has others on another host.
fn sides_named(names: &[Rank; 2]) -> [Side; 2] {
    let layout = ControlLayout::new(2, 1);
    let words = Arc::new(SharedWords::new(layout.count()).expect("words"));
    [Rank(0), Rank(1)].map(|me| {
        let control = Control::new(words.clone(), layout, me, Width::Bits64).of_some(names.to_vec(), 4);
        let (control, ends) = (Arc::new(control), Arc::new(Completes::default()));
        let in_flight = InFlight::new("test".to_owned(), LANE, control.clone(), ends.clone(), None);
        Side { in_flight, control, words: words.clone(), layout, ends }
    })
}

fn call() -> Signature {
    let (operation, dtype) = (CollectiveKind::AllReduce as u8, DType::F32 as u8);
    Signature { operation, dtype, reduction: 0, count: 5, ..Signature::default() }
}

impl Side {
    fn begin(&self, number: u64, limit: Duration) -> Work {
        self.begin_by(By::Programs, number, limit)
    }

    fn begin_by(&self, by: By, number: u64, limit: Duration) -> Work {
        let entry = Entry { operation: "all_reduce", sequence: number, number, began: Instant::now() };
        let work = Work::new(self.in_flight.clone(), entry);
        self.in_flight.begin(number, call(), work.clone(), limit, by);
        work
    }

    fn stream_starts(&self, number: u64) {
        self.words.word(self.layout.started(self.control.me(), LANE, number)).store(number, Ordering::Release);
    }

    fn stream_ends(&self, number: u64) {
        self.words.word(self.layout.done(self.control.me(), LANE, number)).store(number, Ordering::Release);
    }

    fn break_at(&self, number: u64) {
        let error = Error::Device { operation: "all_reduce".to_owned(), cause: "it broke".to_owned() };
        self.in_flight.fail(number, FailureKind::Driver, self.control.me(), error);
    }
}

const LONG: Duration = Duration::from_secs(1000);

#[test]
fn operations_end_in_their_order_as_their_stream_says() {
    let [side, _] = sides();
    let works = [1, 2, 3].map(|number| side.begin(number, LONG));
    assert_eq!(side.in_flight.tick(Instant::now()), Look::Later);
    side.stream_ends(2);
    assert!(works.iter().all(|work| !work.poll()), "the first one is not done");
    side.stream_ends(1);
    assert!(works[0].poll() && works[1].poll() && !works[2].poll());
    side.stream_ends(3);
    assert_eq!(side.in_flight.tick(Instant::now()), Look::Never);
    assert!(works.iter().all(|work| work.result() == Some(Ok(()))) && side.in_flight.is_idle());
}

#[test]
fn a_stream_that_does_not_run_out_after_a_failure_is_given_up() {
    let [side, _] = sides();
    let (first, second, now) = (side.begin(1, LONG), side.begin(2, LONG), Instant::now());
    side.break_at(1);
    assert_eq!(side.in_flight.tick(now), Look::Soon);
    assert_eq!(side.in_flight.tick(now + DRAIN_TIMEOUT), Look::Soon);
    assert!(!first.is_done() && !side.in_flight.is_stuck());
    assert_eq!(side.in_flight.tick(now + DRAIN_TIMEOUT + Duration::from_millis(1)), Look::Never);
    assert!(matches!(first.result(), Some(Err(Error::Device { .. }))), "{first:?}");
    assert!(matches!(second.result(), Some(Err(Error::Device { .. }))), "{second:?}");
    assert!(side.in_flight.is_stuck() && side.in_flight.is_idle(), "its memory is not given back");
}

#[test]
fn operations_before_the_one_that_failed_end_well_before_streams_are_released() {
    let [side, other] = sides();
    let (first, second, now) = (side.begin(1, LONG), side.begin(2, LONG), Instant::now());
    let awaited =
        [Word::Head { sender: Rank(1), receiver: Rank(0) }, Word::Tail { sender: Rank(0), receiver: Rank(1) }];
    side.in_flight.submitted(LANE, awaited.into_iter().zip([7, 4]));
    side.break_at(2);
    let is_released = || side.control.behind(LANE, awaited.into_iter().zip([7, 4])).is_empty();
    assert_eq!(side.in_flight.tick(now), Look::Later);
    assert!(!is_released(), "the first one still takes what the words announce");
    side.stream_ends(1);
    assert_eq!(side.in_flight.tick(now), Look::Soon);
    assert!(is_released() && first.result() == Some(Ok(())) && !second.is_done());
    side.stream_ends(2);
    assert_eq!(side.in_flight.tick(now), Look::Never);
    assert!(matches!(second.result(), Some(Err(Error::Device { .. }))) && !side.in_flight.is_stuck());
    drop(other);
}

#[test]
fn a_setup_that_fails_on_one_rank_alone_ends_operations_of_others() {
    let call = || "all_reduce".to_owned();
    let closed = || Error::Closed { operation: call(), comm: "test".to_owned(), how: "aborted: enough".to_owned() };
    let told = InitError::Config("no memory on rank 0".to_owned());
    for (error, is_alone) in [(closed(), true), (told.into(), false)] {
        let [leaving, side] = sides();
        leaving.in_flight.never_begins(&error);
        let work = side.begin(1, LONG);
        let look = side.in_flight.tick(Instant::now());
        assert_eq!(look, if is_alone { Look::Soon } else { Look::Later }, "{error:?}");
        side.stream_ends(1);
        match work.wait(None) {
            Err(Error::PeerLost { rank: 0, cause, .. }) if is_alone => assert_eq!(cause, "it aborted: enough"),
            Ok(()) if !is_alone => {}
            other => panic!("{error:?}: {other:?}"),
        }
    }
}

#[test]
fn what_a_driver_refused_on_a_rank_ends_the_other_ranks_operation_at_the_next_look() {
    let [broken, side] = sides();
    let work = side.begin(1, LONG);
    broken.break_at(1);
    assert_eq!(side.in_flight.tick(Instant::now()), Look::Soon, "its stream is released");
    side.stream_ends(1);
    let Err(Error::Remote { rank: 0, cause, .. }) = work.wait(None) else { panic!("{work:?}") };
    assert!(cause.contains("it broke"), "{cause}");
    assert!(matches!(side.in_flight.halt(), Some(Halt::Failed(Error::Remote { rank: 0, .. }))));
}

#[test]
fn a_stream_that_ended_with_what_another_ones_release_let_through_has_failed() {
    let [broken, side] = sides();
    let (first, second) = (side.begin(1, LONG), side.begin(2, LONG));
    broken.break_at(2);
    side.stream_ends(1);
    side.stream_ends(2);
    assert_eq!(first.wait(None), Ok(()));
    assert!(matches!(second.wait(None), Err(Error::Remote { rank: 0, .. })), "{second:?}");
}

#[test]
fn time_counts_from_where_the_stream_begins_an_operation() {
    let [side, other] = sides();
    let (work, now, limit) = (side.begin(1, Duration::from_secs(10)), Instant::now(), Duration::from_secs(10));
    assert_eq!(side.in_flight.tick(now + 5 * limit), Look::Later, "it waits for its turn");
    side.stream_starts(1);
    assert_eq!(side.in_flight.tick(now + 5 * limit), Look::Later);
    assert_eq!(side.in_flight.tick(now + 6 * limit - Duration::from_millis(1)), Look::Later);
    assert_eq!(side.in_flight.tick(now + 6 * limit), Look::Soon);
    side.stream_ends(1);
    assert!(matches!(work.wait(None), Err(Error::Timeout { .. })), "{work:?}");
    let failure = other.control.failure_of(Rank(0), LANE).expect("it is told");
    assert_eq!((failure.number, failure.kind), (1, FailureKind::Timeout));
}

#[test]
fn the_recorder_is_told_when_streams_reach_operations() {
    let [side, _] = sides();
    let (_works, now) = ([1, 2, 3].map(|number| side.begin(number, LONG)), Instant::now());
    let seen = |after: u64| -> Vec<(u64, Duration)> {
        let now = now + Duration::from_secs(after);
        side.in_flight.tick(now);
        std::mem::take(&mut *lock(&side.ends.started)).into_iter().map(|(number, at)| (number, at - now)).collect()
    };
    assert_eq!(seen(1), [], "its turn has not come");
    side.stream_starts(1);
    side.stream_starts(2);
    assert_eq!(seen(2), [(1, Duration::ZERO), (2, Duration::ZERO)]);
    assert_eq!(seen(3), [], "once");
}

#[test]
fn a_lost_rank_ends_what_is_in_flight() {
    let [side, _] = sides();
    let (work, cause) = (side.begin(1, LONG), "it has ended".to_owned());
    *lock(&side.ends.lost) = Some(Error::PeerLost { operation: "all_reduce".to_owned(), rank: 1, cause });
    assert_eq!(side.in_flight.tick(Instant::now()), Look::Soon);
    side.stream_ends(1);
    assert!(matches!(work.wait(None), Err(Error::PeerLost { rank: 1, .. })), "{work:?}");
}

#[test]
fn a_rank_that_leaves_is_lost_to_the_others() {
    let [left, side] = sides();
    let error = Error::Closed { operation: String::new(), comm: "test".to_owned(), how: "left".to_owned() };
    left.in_flight.leave(error);
    let work = side.begin(1, LONG);
    side.in_flight.tick(Instant::now());
    side.stream_ends(1);
    let Err(Error::PeerLost { rank: 0, cause, .. }) = work.wait(None) else { panic!("{work:?}") };
    assert_eq!(cause, "it left");
}

#[test]
fn a_rank_that_leaves_does_not_give_up_what_its_stream_has_finished() {
    let [left, side] = sides();
    let (ended, works) = (left.begin(1, LONG), side.begin(1, LONG));
    left.stream_ends(1);
    let error = Error::Closed { operation: String::new(), comm: "test".to_owned(), how: "left".to_owned() };
    left.in_flight.leave(error);
    side.stream_ends(1);
    assert_eq!((ended.wait(None), works.wait(None)), (Ok(()), Ok(())));
    assert_eq!(side.control.first_failure(LANE, 2).map(|(rank, failure)| (rank, failure.number)), Some((Rank(0), 2)));
}

#[test]
fn who_wants_to_be_told_of_an_end_has_the_watch_look_closely_until_then() {
    static CALLS: crate::sync::AtomicUsize = crate::sync::AtomicUsize::new(0);
    let [side, _] = sides();
    side.in_flight.is_watched_by(|| _ = CALLS.fetch_add(1, Ordering::Relaxed));
    let (works, now) = ([1, 2, 3].map(|number| side.begin(number, LONG)), Instant::now());
    assert_eq!(side.in_flight.tick(now), Look::Later);
    works[1].watch_closely();
    works[0].watch_closely();
    assert_eq!(CALLS.load(Ordering::Relaxed), 1, "it looks closely already");
    assert_eq!(side.in_flight.tick(now), Look::Soon);
    side.stream_ends(1);
    assert_eq!(side.in_flight.tick(now), Look::Soon);
    side.stream_ends(2);
    assert_eq!(side.in_flight.tick(now), Look::Later, "the third is nobody's");
    side.stream_ends(3);
    assert_eq!(side.in_flight.tick(now), Look::Never);
    works[2].watch_closely();
    assert_eq!(CALLS.load(Ordering::Relaxed), 1, "it has ended");
}

#[test]
fn what_never_ends_is_given_up_in_its_time_though_a_later_one_has_failed() {
    let (now, limit) = (Instant::now(), Duration::from_secs(10));
    for own in [true, false] {
        let [side, other] = sides();
        let (first, second) = (side.begin(1, limit), side.begin(2, limit));
        side.stream_starts(1);
        let disagreed = Error::Mismatch { operation: String::new(), detail: "they disagree".to_owned() };
        let finder = if own { &side } else { &other };
        finder.in_flight.fail(2, FailureKind::Mismatch, Rank(1), disagreed);
        assert_eq!(side.in_flight.tick(now), Look::Later);
        assert_eq!(side.in_flight.tick(now + limit), Look::Soon, "the first one has taken too long");
        side.stream_ends(1);
        side.stream_ends(2);
        let Err(Error::Timeout { detail, .. }) = first.wait(None) else { panic!("{first:?}") };
        assert!(detail.contains("did not call it"), "{detail}");
        assert!(matches!(second.wait(None), Err(Error::Timeout { .. })), "{second:?}");
        // Ranks go on after a disagreement, but not after a timeout.
        assert!(matches!(side.in_flight.halt(), Some(Halt::Failed(Error::Timeout { .. }))));
        let told = other.control.failure_of(Rank(0), LANE).expect("it is told");
        assert_eq!((told.number, told.kind), (1, FailureKind::Timeout));
    }
}

#[test]
fn ranks_that_disagreed_do_not_go_on_where_a_stream_has_not_come_to_its_end() {
    let [side, other] = sides();
    let (first, now) = (side.begin(1, LONG), Instant::now());
    let disagreed = Error::Mismatch { operation: String::new(), detail: "they disagree".to_owned() };
    side.in_flight.fail(1, FailureKind::Mismatch, Rank(1), disagreed);
    assert_eq!(side.in_flight.tick(now), Look::Soon);
    assert!(matches!(side.in_flight.halt(), Some(Halt::Mismatch)));
    assert_eq!(side.in_flight.tick(now + 2 * DRAIN_TIMEOUT), Look::Never);
    assert!(matches!(first.result(), Some(Err(Error::Mismatch { .. }))) && side.in_flight.is_stuck());
    assert!(matches!(side.in_flight.halt(), Some(Halt::Failed(Error::Device { .. }))));
    let told = other.control.failure_of(Rank(0), LANE).expect("it is told");
    assert_eq!((told.number, told.kind), (0, FailureKind::Driver));
}

#[test]
fn what_comes_after_a_release_has_its_own_time_to_run_out() {
    let [side, _] = sides();
    let (first, now) = (side.begin(1, LONG), Instant::now());
    side.break_at(1);
    assert_eq!(side.in_flight.tick(now), Look::Soon);
    side.stream_ends(1);
    assert_eq!(side.in_flight.tick(now), Look::Never);
    // The second operation's caller looked for failures before the first one failed, and has prepared kernels since.
    let (second, later) = (side.begin(2, LONG), now + 2 * DRAIN_TIMEOUT);
    assert_eq!(side.in_flight.tick(later), Look::Soon);
    assert!(!second.is_done() && !side.in_flight.is_stuck());
    side.stream_ends(2);
    assert_eq!(side.in_flight.tick(later), Look::Never);
    assert!(first.is_done() && second.is_done());
}

#[test]
fn ranks_that_disagreed_do_not_wait_for_one_that_stays_away() {
    let [side, other] = sides();
    let disagreed = || Error::Mismatch { operation: String::new(), detail: "they disagree".to_owned() };
    for (side, culprit) in [(&side, Rank(1)), (&other, Rank(0))] {
        side.in_flight.fail(2, FailureKind::Mismatch, culprit, disagreed());
    }
    assert_eq!((side.in_flight.obstacle(call(), &BOTH), other.in_flight.obstacle(call(), &BOTH)), (None, None));
    // On one of them an earlier operation has failed, too.
    other.break_at(1);
    assert!(matches!(side.in_flight.obstacle(call(), &BOTH), Some(Error::Remote { rank: 1, .. })));
}

/// A library that counts how often it is given up.
#[derive(Default)]
struct Library {
    times: crate::sync::AtomicUsize,
    lane: OnceLock<Weak<InFlight>>,
}

impl Library {
    /// One for each rank of both sides.
    fn for_both(sides: &[Side; 2]) -> [Arc<Library>; 2] {
        sides.each_ref().map(|side| {
            let library = Arc::new(Library::default());
            side.in_flight.is_run_by(library.clone());
            library
        })
    }

    fn times(&self) -> usize {
        self.times.load(Ordering::Relaxed)
    }
}

impl Runner for Library {
    fn failure(&self) -> Option<String> {
        None
    }

    fn give_up(&self) {
        if self.times.fetch_add(1, Ordering::Relaxed) == 0 {
            self.lane.get().and_then(Weak::upgrade).expect("its lane").library_is_given_up();
        }
    }

    fn serves(&self, lane: Weak<InFlight>) {
        self.lane.set(lane).expect("one lane");
    }
}

fn left() -> Error {
    Error::Closed { operation: String::new(), comm: "test".to_owned(), how: "left".to_owned() }
}

#[test]
fn what_a_library_may_have_lost_with_another_rank_fails_soon() {
    // Whether a rank that leaves gives its library up, and what runs the operation that it has ended.
    for (gives_up, by) in [(true, By::Library), (false, By::Library), (true, By::Programs)] {
        let (both, now) = (sides(), Instant::now());
        let libraries = Library::for_both(&both);
        let [other, side] = &both;
        let works = [other.begin_by(by, 1, LONG), side.begin_by(by, 1, LONG)];
        other.stream_ends(1);
        side.stream_starts(1);
        let look = |seconds| side.in_flight.tick(now + Duration::from_secs(seconds));
        assert_eq!(look(50), Look::Later);
        other.in_flight.leave(left());
        assert_eq!(libraries[0].times(), 0, "not before all lanes have their mark");
        if gives_up {
            other.in_flight.give_up_library();
        }
        assert_eq!(works[0].result(), Some(Ok(())));
        assert_eq!((look(100), look(101)), (Look::Later, Look::Later), "what was sent may still come");
        let fails = gives_up && by == By::Library;
        assert_eq!(look(103), if fails { Look::Soon } else { Look::Later }, "{gives_up}, {by:?}");
        side.stream_ends(1);
        look(104);
        let outcome = works[1].result().expect("it has ended");
        let is_lost = matches!(&outcome, Err(Error::PeerLost { rank: 0, cause, .. }) if cause == "it left");
        assert_eq!(is_lost, fails, "{gives_up}: {outcome:?}");
    }
}

#[test]
fn time_to_lose_something_counts_from_where_the_stream_begins_an_operation() {
    let (both, now) = (sides(), Instant::now());
    let [library, _] = Library::for_both(&both);
    let [other, side] = &both;
    let _works = [1, 2].map(|number| side.begin_by(By::Library, number, LONG));
    let look = |seconds| side.in_flight.tick(now + Duration::from_secs(seconds));
    library.give_up();
    assert_eq!((look(0), look(100)), (Look::Later, Look::Later), "its turn has not come");
    side.stream_starts(1);
    assert_eq!((look(200), look(201)), (Look::Later, Look::Later));
    side.stream_ends(1);
    side.stream_starts(2);
    assert_eq!((look(300), look(301), look(303)), (Look::Later, Look::Later, Look::Soon));
    let told = other.control.failure_of(Rank(1), LANE).expect("it is told");
    assert_eq!((told.number, told.kind), (2, FailureKind::Driver));
    assert!(told.text.contains("it has given up the vendor's library"), "{}", told.text);
}

#[test]
fn what_fails_later_ends_nothing_while_all_have_their_libraries() {
    let (both, now) = (sides(), Instant::now());
    let libraries = Library::for_both(&both);
    let works = both.each_ref().map(|side| [1, 2].map(|number| side.begin_by(By::Library, number, LONG)));
    both.iter().for_each(|side| side.stream_starts(1));
    both[0].break_at(2);
    for seconds in [0, 3, 6] {
        let look = |side: &Side| side.in_flight.tick(now + Duration::from_secs(seconds));
        assert_eq!([look(&both[0]), look(&both[1])], [Look::Later; 2]);
    }
    assert_eq!([libraries[0].times(), libraries[1].times()], [0, 0]);
    both.iter().for_each(|side| side.stream_ends(1));
    assert!(works.iter().all(|works| works[0].wait(None) == Ok(())), "{works:?}");
}

#[test]
fn after_a_disagreement_a_library_stays_until_others_have_ended_what_came_before() {
    for others_end in [true, false] {
        let (both, now) = (sides(), Instant::now());
        let [_, library] = Library::for_both(&both);
        let [other, side] = &both;
        let _works = [side.begin_by(By::Library, 1, LONG), side.begin_by(By::Library, 2, LONG)];
        side.stream_ends(1);
        let disagreed = Error::Mismatch { operation: String::new(), detail: "they disagree".to_owned() };
        other.in_flight.fail(2, FailureKind::Mismatch, Rank(1), disagreed);
        assert_eq!((side.in_flight.tick(now), library.times()), (Look::Soon, 0), "the other one may need it");
        if others_end {
            other.stream_ends(1);
        }
        let later = now + Duration::from_millis(if others_end { 1 } else { 600 });
        assert_eq!((side.in_flight.tick(later), library.times()), (Look::Soon, 1), "{others_end}");
    }
}

#[test]
fn a_wait_in_a_collective_is_told_to_all_again_and_again() {
    let [side, _] = sides();
    let (_work, now) = (side.begin(1, Duration::from_secs(8)), Instant::now());
    let told_after = |millis| {
        side.in_flight.tick(now + Duration::from_millis(millis));
        std::mem::take(&mut *lock(&side.ends.waits))
    };
    assert_eq!(told_after(10_000), [], "its turn has not come");
    side.stream_starts(1);
    assert_eq!(told_after(20_000), []);
    assert_eq!([told_after(20_500), told_after(20_700), told_after(21_500)], [vec![(1, 0)], vec![], vec![(1, 1)]]);
    side.in_flight.tick(now + Duration::from_secs(28));
    let error = side.in_flight.halt().map(|halt| format!("{halt:?}")).expect("its time is over");
    assert!(error.contains("did; rank 0 slept; rank 1 slept"), "{error}");
}

#[test]
fn who_captures_a_collective_tells_that_it_waits_and_names_who_does_not_come() {
    let [side, _] = sides_named(&[Rank(2), Rank(3)]);
    let call = LoggedCall::new(call(), 1, Capture::Captured);
    side.control.enter(LANE, 1, call, None).expect("it is the first there");
    let met = side.in_flight.meet(1, call, || Ok(()), Duration::from_millis(400));
    let Err(Error::Timeout { detail, .. }) = met else { panic!("{met:?}") };
    assert!(detail.ends_with("rank(s) 3 did not call it; rank 3 slept"), "{detail}");
    assert_eq!(*lock(&side.ends.waits), [(1, 0)]);
}
