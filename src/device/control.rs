//! The control segment, as the host reads and writes it: how far streams are, what ranks have called, and what has failed.
//!
//! Every line of it has one writer, a rank or a rank's stream, but for a release. Another process may die, or write anything, at
//! any time: what is read here is compared or shown, and never used as an index.

use crate::device::counters::Word;
use crate::device::words::WordLayout;
use crate::signature::Signature;
use crate::sync::{Arc, AtomicU64, Ordering, fence};
use crate::sys::cuda::Width;
use crate::sys::words::SharedWords;
use crate::types::Rank;

/// Which line of the control segment is which: first the words that the streams of two ranks share, then a page for each rank.
///
/// | part of a rank's page | lines | written by |
/// |---|---|---|
/// | `started`, by lane | [`LOG`] | its stream |
/// | `done`, by lane | [`LOG`] | its stream |
/// | calls, by lane | [`LOG`] | the rank |
/// | the number of what has failed first | 1 | the rank |
/// | failures | [`FAILURES`] times 1 + [`TEXT`] | the rank |
///
/// What belongs to the operation of number k of a lane lies in line k mod [`LOG`] of its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ControlLayout {
    words: WordLayout,
    lanes: usize,
}

/// How many operations of a lane can be in flight.
pub(crate) const LOG: usize = 1024;

/// How many failures a rank can tell of.
const FAILURES: usize = 4;

/// The lines of a failure's text.
const TEXT: usize = TEXT_BYTES / LINE_BYTES;
const TEXT_BYTES: usize = 512;
const LINE_BYTES: usize = 64;

/// A part of a rank's page that has a line for each operation.
#[derive(Clone, Copy, Debug)]
enum Ring {
    Started,
    Done,
    Calls,
}

impl ControlLayout {
    /// The version of this layout.
    pub(crate) const VERSION: u32 = 1;

    /// That of so many ranks with so many lanes.
    pub(crate) fn new(ranks: usize, lanes: usize) -> ControlLayout {
        ControlLayout { words: WordLayout::new(ranks, lanes), lanes }
    }

    /// The words that the streams of two ranks share, which come first.
    pub(crate) fn words(self) -> WordLayout {
        self.words
    }

    /// How many lines there are.
    pub(crate) fn count(self) -> usize {
        self.page(Rank::from(self.words.ranks()))
    }

    /// The line where the stream of a rank says that the operation of this number has begun.
    pub(crate) fn started(self, rank: Rank, lane: usize, number: u64) -> usize {
        self.ring(rank, lane, Ring::Started, number)
    }

    /// The line where it says that it is done.
    pub(crate) fn done(self, rank: Rank, lane: usize, number: u64) -> usize {
        self.ring(rank, lane, Ring::Done, number)
    }

    fn page(self, rank: Rank) -> usize {
        self.words.count() + rank.index() * (3 * self.lanes * LOG + 1 + FAILURES * (1 + TEXT))
    }

    fn ring(self, rank: Rank, lane: usize, ring: Ring, number: u64) -> usize {
        assert!(lane < self.lanes && rank.index() < self.words.ranks(), "no lane {lane} of rank {rank} in {self:?}");
        self.page(rank) + (3 * lane + ring as usize) * LOG + (number % LOG as u64) as usize
    }

    fn mark(self, rank: Rank) -> usize {
        self.page(rank) + 3 * self.lanes * LOG
    }

    fn failure(self, rank: Rank, slot: usize) -> usize {
        self.mark(rank) + 1 + slot * (1 + TEXT)
    }
}

/// A call, as a rank tells the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LoggedCall {
    pub(crate) signature: Signature,
    pub(crate) segments: u32,
    /// Whether it is recorded in a graph.
    pub(crate) is_captured: bool,
}

impl LoggedCall {
    fn encode(&self) -> [u64; 3] {
        let Signature { operation, dtype, reduction, algorithm, root, count } = self.signature;
        let kind = u32::from_le_bytes([operation, dtype, reduction, algorithm]);
        let how = u64::from(self.segments) << 32 | u64::from(self.is_captured);
        [u64::from(root) << 32 | u64::from(kind), count, how]
    }

    fn decode([what, count, how]: [u64; 3]) -> LoggedCall {
        let [operation, dtype, reduction, algorithm] = (what as u32).to_le_bytes();
        let signature = Signature { operation, dtype, reduction, algorithm, root: (what >> 32) as u32, count };
        LoggedCall { signature, segments: (how >> 32) as u32, is_captured: how & 1 == 1 }
    }
}

/// Another rank has called something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Disagreement {
    pub(crate) rank: Rank,
    pub(crate) theirs: LoggedCall,
}

impl Disagreement {
    /// What the two ranks have called.
    pub(crate) fn describe(&self, number: u64, me: Rank, call: &LoggedCall) -> String {
        let (rank, ours, theirs) = (self.rank, call.signature, self.theirs.signature);
        if !ours.calls_as(&theirs) && ours.divides_otherwise(&theirs) {
            return format!(
                "the ranks disagree on the sizes of device collective {number}: rank {me} and rank {rank} both called {ours}, \
                 but with other counts a rank"
            );
        }
        if !ours.calls_as(&theirs) {
            return format!(
                "the ranks disagree on device collective {number}: rank {me} called {ours}, rank {rank} called {theirs}"
            );
        }
        let way = |call: &LoggedCall| {
            let graph = if call.is_captured { ", in a graph" } else { "" };
            format!("{} in {} segment(s){graph}", call.signature.algorithm(), call.segments)
        };
        format!(
            "the ranks disagree on how to run device collective {number}: rank {me} chose {}, rank {rank} {}",
            way(call),
            way(&self.theirs)
        )
    }
}

/// Why a rank has given up an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailureKind {
    /// The ranks disagree.
    Mismatch,
    /// Its time was over.
    Timeout,
    /// A rank is lost.
    PeerLost,
    /// This rank leaves.
    Left,
    /// A call of the driver has failed.
    Driver,
}

impl FailureKind {
    const ALL: [FailureKind; 5] = {
        use FailureKind::{Driver, Left, Mismatch, PeerLost, Timeout};
        [Mismatch, Timeout, PeerLost, Left, Driver]
    };
}

/// What a rank tells of an operation that it gives up, with all later ones of the lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) lane: usize,
    pub(crate) number: u64,
    pub(crate) kind: FailureKind,
    /// The rank at fault.
    pub(crate) rank: Rank,
    pub(crate) text: String,
}

/// One rank's view of the control segment.
#[derive(Debug)]
pub(crate) struct Control {
    words: Arc<SharedWords>,
    layout: ControlLayout,
    width: Width,
    me: Rank,
}

impl Control {
    /// The view of rank `me`, whose streams write so much of a word.
    ///
    /// # Panics
    /// When there are fewer words than the layout has.
    pub(crate) fn new(words: Arc<SharedWords>, layout: ControlLayout, width: Width, me: Rank) -> Control {
        assert!(layout.count() <= words.count(), "{layout:?} in {} words", words.count());
        Control { words, layout, width, me }
    }

    /// Whose view it is.
    pub(crate) fn me(&self) -> Rank {
        self.me
    }

    /// How many ranks there are.
    pub(crate) fn ranks(&self) -> usize {
        self.layout.words.ranks()
    }

    /// Whether a rank's stream has begun an operation.
    pub(crate) fn has_started(&self, rank: Rank, lane: usize, number: u64) -> bool {
        self.reaches(self.layout.started(rank, lane, number), number)
    }

    /// Whether a rank's stream is done with an operation. What it has written before is visible then.
    pub(crate) fn has_ended(&self, rank: Rank, lane: usize, number: u64) -> bool {
        self.reaches(self.layout.done(rank, lane, number), number)
    }

    fn reaches(&self, line: usize, value: u64) -> bool {
        // Acquire: pairs with the stream's write, which has a barrier before it.
        let word = self.words.word(line).load(Ordering::Acquire);
        match self.width {
            Width::Bits64 => word >= value,
            Width::Bits32 => (word as u32).wrapping_sub(value as u32) as i32 >= 0,
        }
    }

    /// Tells the other ranks what this one has called, and compares with what they have called.
    ///
    /// Of any two ranks at least one sees the other's call: each first stores its own and then looks, with a fence of one
    /// order for all between the two, so that both cannot have looked before the other has stored.
    pub(crate) fn enter(&self, lane: usize, number: u64, call: LoggedCall) -> Result<(), Disagreement> {
        let entry = self.line(self.layout.ring(self.me, lane, Ring::Calls, number));
        call.encode().into_iter().zip(&entry[1..]).for_each(|(value, word)| word.store(value, Ordering::Relaxed));
        // Release: who sees the number sees the call.
        entry[0].store(number, Ordering::Release);
        fence(Ordering::SeqCst);
        let others = (0..self.ranks()).map(Rank::from).filter(|rank| *rank != self.me);
        for rank in others {
            if let Some(theirs) = self.call(rank, lane, number)
                && theirs != call
            {
                return Err(Disagreement { rank, theirs });
            }
        }
        Ok(())
    }

    /// What a rank has called under this number, if it has.
    fn call(&self, rank: Rank, lane: usize, number: u64) -> Option<LoggedCall> {
        let entry = self.line(self.layout.ring(rank, lane, Ring::Calls, number));
        let has_called = entry[0].load(Ordering::Acquire) == number;
        has_called.then(|| LoggedCall::decode([1, 2, 3].map(|word| entry[word].load(Ordering::Relaxed))))
    }

    /// Whether a rank has called the operation of this number.
    pub(crate) fn has_called(&self, rank: Rank, lane: usize, number: u64) -> bool {
        self.line(self.layout.ring(rank, lane, Ring::Calls, number))[0].load(Ordering::Acquire) >= number
    }

    /// Tells the other ranks that this one gives up an operation. Of several the first by number holds.
    pub(crate) fn fail(&self, failure: &Failure) {
        let mark = self.words.word(self.layout.mark(self.me));
        let before = mark.load(Ordering::Relaxed);
        let slot = match Marked::of(before) {
            Some(marked) if marked.number <= failure.number || marked.slot + 1 >= FAILURES => return,
            Some(marked) => marked.slot + 1,
            None => 0,
        };
        let line = self.layout.failure(self.me, slot);
        let text = clipped(&failure.text, TEXT_BYTES).as_bytes();
        let head = [failure.lane as u64, failure.kind as u64, u64::from(failure.rank.0), text.len() as u64];
        head.into_iter().zip(self.line(line)).for_each(|(value, word)| word.store(value, Ordering::Relaxed));
        for (index, bytes) in text.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            self.line(line + 1 + index / 8)[index % 8].store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
        // Before any word is written that lets streams go on without their data.
        mark.store(Marked { number: failure.number, slot }.encode(), Ordering::SeqCst);
    }

    /// What a rank has given up first.
    pub(crate) fn failure_of(&self, rank: Rank) -> Option<Failure> {
        let Marked { number, slot } = Marked::of(self.words.word(self.layout.mark(rank)).load(Ordering::SeqCst))?;
        let line = self.layout.failure(rank, slot);
        let [lane, kind, culprit, len] = [0, 1, 2, 3].map(|word| self.line(line)[word].load(Ordering::Relaxed));
        let len = (len as usize).min(TEXT_BYTES);
        let words = (0..len.div_ceil(8)).map(|index| &self.line(line + 1 + index / 8)[index % 8]);
        let mut text: Vec<u8> = words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        text.truncate(len);
        let kind = usize::try_from(kind).ok().and_then(|kind| FailureKind::ALL.get(kind));
        Some(Failure {
            lane: lane as usize,
            number,
            kind: *kind.unwrap_or(&FailureKind::Driver),
            rank: Rank(culprit as u32),
            text: String::from_utf8_lossy(&text).into_owned(),
        })
    }

    /// The first failure of an operation of this number or of one before it, with the rank that tells of it.
    pub(crate) fn first_failure(&self, lane: usize, number: u64) -> Option<(Rank, Failure)> {
        let ranks = (0..self.ranks()).map(Rank::from);
        let told = ranks.filter_map(|rank| Some((rank, self.failure_of(rank)?)));
        let failures = told.filter(|(_, failure)| failure.lane == lane && failure.number <= number);
        failures.min_by_key(|(_, failure)| failure.number)
    }

    /// The ranks that are behind: that have not published what this rank awaits, or not read what it has published. By peer,
    /// the numbers of the last messages each way.
    pub(crate) fn behind(&self, lane: usize, awaited: &[u64], published: &[u64]) -> Vec<Rank> {
        let reaches = |word, value| self.reaches(self.layout.words.index(lane, word), value);
        let is_behind = |peer: &Rank| {
            let (head, tail) = self.words_of(*peer);
            let value = |list: &[u64]| list.get(peer.index()).copied().unwrap_or(0);
            !reaches(head, value(awaited)) || !reaches(tail, value(published))
        };
        (0..self.ranks()).map(Rank::from).filter(|rank| *rank != self.me).filter(is_behind).collect()
    }

    /// Writes every word that this rank's stream may wait for, so that it goes on. By peer, the numbers of the last messages each
    /// way.
    pub(crate) fn release(&self, lane: usize, awaited: &[u64], published: &[u64]) {
        let ahead = match self.width {
            Width::Bits64 => 1 << 62,
            Width::Bits32 => 1 << 30,
        };
        let store = |word, last: u64| {
            let place: &AtomicU64 = self.words.word(self.layout.words.index(lane, word));
            place.store(last + ahead, Ordering::SeqCst);
        };
        for peer in (0..self.ranks()).map(Rank::from).filter(|rank| *rank != self.me) {
            let (head, tail) = self.words_of(peer);
            let value = |list: &[u64]| list.get(peer.index()).copied().unwrap_or(0);
            store(head, value(awaited));
            store(tail, value(published));
        }
    }

    /// Forgets what has happened on a lane: what this rank has called and given up, how far its stream is, and the words that it
    /// waits for. No stream of any rank may be on the lane.
    pub(crate) fn reset(&self, lane: usize) {
        let zero = |line| self.line(line).iter().for_each(|word| word.store(0, Ordering::SeqCst));
        for peer in (0..self.ranks()).map(Rank::from) {
            let (head, tail) = self.words_of(peer);
            [head, tail].into_iter().for_each(|word| zero(self.layout.words.index(lane, word)));
        }
        for ring in [Ring::Started, Ring::Done, Ring::Calls] {
            (0..LOG as u64).for_each(|number| zero(self.layout.ring(self.me, lane, ring, number)));
        }
        zero(self.layout.mark(self.me));
    }

    /// The two words that this rank waits for of what it shares with a peer.
    fn words_of(&self, peer: Rank) -> (Word, Word) {
        (Word::Head { sender: peer, receiver: self.me }, Word::Tail { sender: self.me, receiver: peer })
    }

    fn line(&self, index: usize) -> &[AtomicU64; 8] {
        self.words.line(index)
    }
}

/// The first operation that a rank has given up, and where the rest is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Marked {
    number: u64,
    slot: usize,
}

impl Marked {
    fn encode(self) -> u64 {
        (self.number * FAILURES as u64 + self.slot as u64).saturating_add(1)
    }

    fn of(mark: u64) -> Option<Marked> {
        let mark = mark.checked_sub(1)?;
        Some(Marked { number: mark / FAILURES as u64, slot: (mark % FAILURES as u64) as usize })
    }
}

/// The beginning of a text, of so many bytes at most.
fn clipped(text: &str, bytes: usize) -> &str {
    let mut end = text.len().min(bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
