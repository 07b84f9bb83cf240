//! The flight recorder: the last operations of a communicator, in a fixed amount of memory.

use std::time::{Duration, Instant};

use crate::engine::call::Call;
use crate::types::{Frame, Rank, Source};

/// An operation as it is remembered.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    /// How many operations came before it on this rank.
    pub(crate) number: u64,
    pub(crate) call: Call,
    /// Its place among the collectives, the messages or the accesses to windows. Those on a device count apart.
    pub(crate) sequence: u64,
    pub(crate) is_on_device: bool,
    /// How many bytes of the caller's memory it reads and writes.
    pub(crate) bytes: Bytes,
    /// Of an operation that sends in the call that submits it: right after; of one that never had to wait: as it ended.
    pub(crate) submitted: Instant,
    /// When a collective's turn came; that of other operations comes at once. On a device: when its stream was first seen to have
    /// reached it, which is looked at ten times a second; of one that succeeded in between, as it was seen to have ended.
    pub(crate) started: Option<Instant>,
    pub(crate) ended: Option<Instant>,
    /// What few operations have, apart, since every record is written in full.
    rest: Option<Box<Rest>>,
}

#[derive(Clone, Debug, Default)]
struct Rest {
    failure: Option<String>,
    stack: Vec<Frame>,
    took: Option<Duration>,
}

impl Record {
    /// Why it failed.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.rest.as_ref()?.failure.as_deref()
    }

    /// How long it took by the clock of its device, where that is measured and known.
    pub(crate) fn took(&self) -> Option<Duration> {
        self.rest.as_ref()?.took
    }

    /// Where the program called it, the innermost frame first, if the program has told.
    pub(crate) fn stack(&self) -> &[Frame] {
        self.rest.as_ref().map_or(&[], |rest| &rest.stack)
    }
}

/// How much of the caller's memory an operation reads and writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bytes {
    pub(crate) read: usize,
    pub(crate) written: usize,
}

/// A ring of records, where operations in flight are never overwritten.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    capacity: usize,
    next: u64,
    ring: Vec<Record>,
    /// Records in flight whose place in the ring another one has taken.
    kept: Vec<Record>,
}

impl Recorder {
    /// Remembers `capacity` operations beside those in flight, rounded up to a power of two; none at all if that is zero.
    pub(crate) fn new(capacity: usize) -> Recorder {
        let capacity = if capacity == 0 { 0 } else { capacity.min(CAPACITY_MAX).next_power_of_two() };
        Recorder { capacity, next: 0, ring: Vec::new(), kept: Vec::new() }
    }

    /// Where operation `number` is in the ring.
    fn place(&self, number: u64) -> usize {
        // A power of two needs no division, which would take as long as all else that is done here.
        number as usize & self.capacity.wrapping_sub(1)
    }

    /// Notes an operation that is submitted and perhaps `starts` at once, and gives it a number.
    pub(crate) fn submitted(&mut self, call: Call, sequence: u64, bytes: Bytes, now: Instant, starts: bool) -> u64 {
        let number = self.next;
        self.next += 1;
        if self.capacity == 0 {
            return number;
        }
        let started = starts.then_some(now);
        let record = Record {
            number,
            call,
            sequence,
            is_on_device: false,
            bytes,
            submitted: now,
            started,
            ended: None,
            rest: None,
        };
        if self.ring.len() < self.capacity {
            self.ring.push(record);
        } else {
            let place = self.place(number);
            let old = &mut self.ring[place];
            if old.ended.is_none() {
                self.kept.push(std::mem::replace(old, record));
            } else {
                *old = record;
            }
        }
        number
    }

    /// Notes that an operation's turn has come.
    pub(crate) fn started(&mut self, number: u64, now: Instant) {
        if let Some(record) = self.find(number) {
            record.started = Some(now);
        }
    }

    /// Notes that the stream of an operation was seen to have reached it. The first time counts.
    pub(crate) fn reached(&mut self, number: u64, now: Instant) {
        if let Some(record) = self.find(number) {
            record.started.get_or_insert(now);
        }
    }

    /// Notes that an operation runs on a device.
    pub(crate) fn is_on_device(&mut self, number: u64) {
        if let Some(record) = self.find(number) {
            record.is_on_device = true;
        }
    }

    /// Notes how many bytes an operation reads and writes, where that is not what the engine does of it.
    pub(crate) fn moves(&mut self, number: u64, bytes: Bytes) {
        if let Some(record) = self.find(number) {
            record.bytes = bytes;
        }
    }

    /// Notes how long an operation took by the clock of its device.
    pub(crate) fn took(&mut self, number: u64, time: Duration) {
        if let Some(record) = self.find(number) {
            record.rest.get_or_insert_default().took = Some(time);
        }
    }

    /// Notes where the program called an operation.
    pub(crate) fn called_from(&mut self, number: u64, stack: Vec<Frame>) {
        if let Some(record) = self.find(number) {
            record.rest.get_or_insert_default().stack = stack;
        }
    }

    /// Notes when and how an operation ended, and for a receive from any rank, whose message it got.
    pub(crate) fn ended(&mut self, number: u64, now: Instant, failure: Option<String>, source: Option<Rank>) {
        if let Some(record) = self.find(number) {
            record.ended = Some(now);
            if failure.is_some() {
                record.rest.get_or_insert_default().failure = failure;
            }
            if let (Call::Recv { from, .. }, Some(source)) = (&mut record.call, source) {
                *from = Source::Rank(source);
            }
            self.kept.retain(|record| record.ended.is_none());
        }
    }

    /// The operation that is in flight for longest, as far as operations are remembered.
    pub(crate) fn oldest_in_flight(&self) -> Option<&Record> {
        let in_flight = self.kept.iter().chain(&self.ring).filter(|record| record.ended.is_none());
        in_flight.min_by_key(|record| record.number)
    }

    /// Whether operations in flight are remembered.
    pub(crate) fn is_on(&self) -> bool {
        self.capacity > 0
    }

    /// How many operations there were.
    pub(crate) fn count(&self) -> u64 {
        self.next
    }

    /// What is remembered, the oldest first.
    pub(crate) fn records(&self) -> Vec<&Record> {
        let mut records: Vec<_> = self.kept.iter().chain(&self.ring).collect();
        records.sort_unstable_by_key(|record| record.number);
        records
    }

    fn find(&mut self, number: u64) -> Option<&mut Record> {
        let place = self.place(number);
        let in_ring = self.ring.get_mut(place).filter(|record| record.number == number);
        in_ring.or_else(|| self.kept.iter_mut().find(|record| record.number == number))
    }
}

/// The largest power of two.
const CAPACITY_MAX: usize = 1 << (usize::BITS - 1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signature::Signature;
    use crate::types::Tag;

    const COLLECTIVE: Call =
        Call::Collective(Signature { operation: 1, dtype: 0, reduction: 1, algorithm: 0, root: 0, count: 5 });
    const RECV: Call = Call::Recv { bytes: 8, from: Source::Rank(Rank(1)), tag: Tag(3) };
    const BYTES: Bytes = Bytes { read: 40, written: 20 };

    fn run(recorder: &mut Recorder, call: Call) -> u64 {
        let now = Instant::now();
        recorder.submitted(call, 7, BYTES, now, true)
    }

    fn numbers(recorder: &Recorder) -> Vec<u64> {
        recorder.records().iter().map(|record| record.number).collect()
    }

    #[test]
    fn the_last_operations_are_remembered_and_those_in_flight() {
        let mut recorder = Recorder::new(3);
        let waiting = run(&mut recorder, RECV);
        for _ in 0..7 {
            let number = run(&mut recorder, COLLECTIVE);
            recorder.ended(number, Instant::now(), None, None);
        }
        assert_eq!((numbers(&recorder), recorder.count()), (vec![waiting, 4, 5, 6, 7], 8));
        assert!(recorder.records()[0].ended.is_none());
        let younger = run(&mut recorder, COLLECTIVE);
        assert_eq!(recorder.oldest_in_flight().map(|record| record.number), Some(waiting), "from before the ring");
        recorder.ended(younger, Instant::now(), None, None);
        recorder.ended(waiting, Instant::now(), Some("late".to_owned()), None);
        assert_eq!(numbers(&recorder), [5, 6, 7, 8], "the place of one that has ended was taken long ago");
        assert!(recorder.kept.is_empty() && recorder.oldest_in_flight().is_none());
    }

    #[test]
    fn a_record_tells_how_its_operation_went() {
        let mut recorder = Recorder::new(8);
        let number = recorder.submitted(COLLECTIVE, 7, BYTES, Instant::now(), false);
        assert!(recorder.records()[0].started.is_none());
        recorder.started(number, Instant::now());
        recorder.ended(number, Instant::now(), Some("rank 1 is lost".to_owned()), None);
        let record = recorder.records()[0].clone();
        assert_eq!((record.sequence, record.bytes, record.failure()), (7, BYTES, Some("rank 1 is lost")));
        assert!(record.submitted <= record.started.expect("its turn came"));
        assert!(record.started <= record.ended);
        assert!(run(&mut recorder, RECV) == 1 && recorder.records()[1].started.is_some());
    }

    #[test]
    fn an_operation_on_a_device_starts_when_its_stream_is_first_seen_there() {
        let mut recorder = Recorder::new(8);
        let begin = Instant::now();
        let number = recorder.submitted(COLLECTIVE, 7, BYTES, begin, false);
        let [first, second] = [1, 2].map(|after| begin + std::time::Duration::from_secs(after));
        recorder.reached(number, first);
        recorder.reached(number, second);
        assert_eq!(recorder.records()[0].started, Some(first));
    }

    #[test]
    fn a_receive_from_any_rank_tells_whose_message_it_got() {
        let mut recorder = Recorder::new(8);
        let number = run(&mut recorder, Call::Recv { bytes: 8, from: Source::Any, tag: Tag(3) });
        let frame = Frame { name: "train".to_owned(), filename: "train.py".to_owned(), line: 7 };
        recorder.called_from(number, vec![frame.clone()]);
        assert!(recorder.records()[0].call.peer().is_none());
        recorder.ended(number, Instant::now(), None, Some(Rank(1)));
        assert_eq!((recorder.records()[0].call, recorder.records()[0].stack()), (RECV, &[frame][..]));
    }

    #[test]
    fn without_room_nothing_is_remembered() {
        let mut recorder = Recorder::new(0);
        let number = run(&mut recorder, RECV);
        recorder.ended(number, Instant::now(), None, None);
        assert!(recorder.records().is_empty() && recorder.count() == 1);
    }
}
