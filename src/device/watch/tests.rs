use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;
use crate::device::control::Control;
use crate::device::counters::Word;
use crate::device::in_flight::tests::Completes;
use crate::device::in_flight::{By, InFlight};
use crate::device::words::ControlLayout;
use crate::error::Error;
use crate::op::CollectiveKind;
use crate::signature::Signature;
use crate::sync::Ordering;
use crate::sys::cuda::Width;
use crate::sys::words::SharedWords;
use crate::types::Rank;
use crate::work::{Entry, Work};

/// A communicator of one rank. The tests write the words of its stream.
struct Side {
    in_flight: Arc<InFlight>,
    control: Arc<Control>,
    words: Arc<SharedWords>,
    layout: ControlLayout,
}

impl Side {
    fn new() -> Side {
        let layout = ControlLayout::new(1, 1);
        let words = Arc::new(SharedWords::new(layout.count()).expect("words"));
        let control = Arc::new(Control::new(words.clone(), layout, Rank(0), Width::Bits64));
        let ends = Arc::new(Completes::default());
        let in_flight = InFlight::new("test".to_owned(), 0, control.clone(), ends, None);
        Side { in_flight, control, words, layout }
    }

    /// Puts an operation in flight, and has it watched.
    fn begin(&self, watch: &Watch, number: u64) -> Work {
        let entry = Entry { operation: "barrier", sequence: number, number, began: Instant::now() };
        let work = Work::new(self.in_flight.clone(), entry);
        let call = Signature { operation: CollectiveKind::Barrier as u8, ..Signature::default() };
        if self.in_flight.begin(number, call, work.clone(), Duration::from_secs(1000), By::Programs) {
            watch.watch(self.in_flight.clone());
        }
        work
    }

    fn stream_ends(&self, number: u64) {
        self.words.word(self.layout.done(Rank(0), 0, number)).store(number, Ordering::Release);
    }
}

/// Memory that tells which thread has given it back.
struct Memory(Sender<Option<String>>);

impl Drop for Memory {
    fn drop(&mut self) {
        let thread = std::thread::current().name().map(str::to_owned);
        // The test may have ended.
        let _ = self.0.send(thread);
    }
}

fn memory() -> (Box<Memory>, Receiver<Option<String>>) {
    let (sender, receiver) = channel();
    (Box::new(Memory(sender)), receiver)
}

fn watch() -> Arc<Watch> {
    let watch = Arc::new(Watch::default());
    watch.begin().expect("threads");
    watch.begin().expect("they are there");
    watch
}

fn until(is: impl Fn() -> bool) {
    while !is() {
        std::thread::yield_now();
    }
}

#[test]
#[cfg_attr(miri, ignore = "its threads stay")]
fn what_ends_is_noticed_though_nobody_asks() {
    let (watch, side) = (watch(), Side::new());
    for number in 1..4 {
        let work = side.begin(&watch, number);
        side.stream_ends(number);
        until(|| work.is_done());
        assert_eq!(work.result(), Some(Ok(())));
    }
}

#[test]
#[cfg_attr(miri, ignore = "its threads stay")]
fn memory_is_given_back_by_the_reaper_once_nothing_is_in_flight() {
    let (watch, busy, left) = (watch(), Side::new(), Side::new());
    let work = busy.begin(&watch, 1);
    let (memory, given_back) = memory();
    watch.reap(Left::new(vec![left.in_flight.clone()], memory));
    // Once the watch has noticed a later operation's end, it has also looked at this memory.
    let later = left.begin(&watch, 1);
    left.stream_ends(1);
    until(|| later.is_done());
    assert!(given_back.try_recv().is_err(), "another communicator has something in flight");
    busy.stream_ends(1);
    assert_eq!(given_back.recv().expect("it is given back").as_deref(), Some("ncclx_rs reaper"));
    assert!(work.is_done());
}

/// How long after `begin` the watch writes the words that a stream waits for, if the watch has looked at `begin` and nobody
/// wakes it. Adds up the watch's pauses and reads no clock, so that a busy machine changes nothing.
fn time_until_release(side: &Side, begin: Instant) -> Duration {
    let awaited = [(Word::Head { sender: Rank(0), receiver: Rank(0) }, 1)];
    side.in_flight.submitted(0, awaited.into_iter());
    let mut now = begin;
    while !side.control.behind(0, awaited.into_iter()).is_empty() {
        let look = side.in_flight.tick(now);
        now += pause(look).expect("it is in flight, so somebody looks again");
    }
    now - begin
}

/// As docs/cuda.md says. How late the system wakes the watch comes on top.
const RELEASED_WITHIN: Duration = Duration::from_secs(1);

#[test]
fn a_stream_is_released_within_a_second_of_its_limit() {
    // Wherever between two looks the limit falls.
    for number in 0..40 {
        let (side, limit, begin) = (Side::new(), Duration::from_millis(30_001 + 97 * number), Instant::now());
        let entry = Entry { operation: "barrier", sequence: 1, number: 1, began: begin };
        let work = Work::new(side.in_flight.clone(), entry);
        side.in_flight.begin(1, Signature::default(), work, limit, By::Programs);
        side.words.word(side.layout.started(Rank(0), 0, 1)).store(1, Ordering::Release);
        assert_eq!(side.in_flight.tick(begin), Look::Later);
        let took = time_until_release(&side, begin);
        assert!(limit <= took && took <= limit + RELEASED_WITHIN, "{took:?} with a limit of {limit:?}");
    }
}

#[test]
fn a_stream_is_released_within_a_second_of_an_abort() {
    let (side, begin) = (Side::new(), Instant::now());
    let entry = Entry { operation: "barrier", sequence: 1, number: 1, began: begin };
    let work = Work::new(side.in_flight.clone(), entry);
    side.in_flight.begin(1, Signature::default(), work, Duration::from_secs(1000), By::Programs);
    let before = side.in_flight.tick(begin);
    side.in_flight.leave(Error::Closed { operation: String::new(), comm: "test".to_owned(), how: "left".to_owned() });
    let asleep = pause(before).expect("it looks again");
    let took = asleep + time_until_release(&side, begin + asleep);
    assert!(took <= RELEASED_WITHIN, "{took:?}");
}

#[test]
#[cfg_attr(miri, ignore = "its threads stay")]
fn memory_of_an_operation_that_never_ends_stays() {
    let (watch, stuck, other) = (watch(), Side::new(), Side::new());
    let limit = Duration::from_secs(3600);
    let entry = Entry { operation: "barrier", sequence: 1, number: 1, began: Instant::now() };
    stuck.in_flight.begin(1, Signature::default(), Work::new(stuck.in_flight.clone(), entry), limit, By::Programs);
    let error = Error::Closed { operation: String::new(), comm: "test".to_owned(), how: "left".to_owned() };
    stuck.in_flight.leave(error);
    let now = Instant::now();
    stuck.in_flight.tick(now);
    assert_eq!(stuck.in_flight.tick(now + limit), Look::Never);
    let ((kept, is_kept), (memory, given_back)) = (memory(), memory());
    watch.reap(Left::new(vec![stuck.in_flight.clone()], kept));
    watch.reap(Left::new(vec![other.in_flight.clone()], memory));
    given_back.recv().expect("it is given back");
    assert!(is_kept.try_recv().is_err(), "the device may still use it");
}

#[test]
#[cfg_attr(miri, ignore = "its threads stay")]
fn at_the_end_of_the_process_the_reaper_is_awaited_and_begins_nothing_more() {
    /// Memory that takes until the test goes on.
    struct Slow(Sender<()>, Receiver<()>);
    impl Drop for Slow {
        fn drop(&mut self) {
            self.0.send(()).expect("the test listens");
            self.1.recv().expect("the test tells");
        }
    }
    let (watch, side) = (watch(), Side::new());
    let ((begun, has_begun), (go_on, may_go_on)) = (channel(), channel());
    let (memory, given_back) = memory();
    watch.reap(Left::new(vec![side.in_flight.clone()], Box::new(Slow(begun, may_go_on))));
    has_begun.recv().expect("it is being given back");
    watch.reap(Left::new(vec![side.in_flight.clone()], memory));
    // A reaper that hangs in the driver holds the process up for a while only.
    watch.end(Duration::ZERO);
    assert!(lock(&watch.state).is_giving_back);
    go_on.send(()).expect("the reaper listens");
    watch.end(Duration::from_secs(1000));
    assert!(!lock(&watch.state).is_giving_back);
    until(|| {
        let state = lock(&watch.state);
        state.left.is_empty() && state.idle.is_empty()
    });
    assert!(given_back.try_recv().is_err(), "nothing is given back any more");
}
