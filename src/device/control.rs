//! The control segment: where the ranks of a host see how far each other's streams and processes are.
//!
//! One rank makes the segment, the others map it, and streams write to it, too. Every word has one writer, or only grows, or
//! may be overwritten only in a lane that has failed. The segment has no locks, so a process may die at any point. A rank never
//! trusts what another process has written to be a valid index, length or text.

use smallvec::SmallVec;

use crate::device::call_log::{Blocks, Difference, Disagreement, LoggedCall};
use crate::device::counters::Word;
use crate::device::record;
use crate::device::words::{COUNT_SLOTS, ControlLayout, SLOTS, TEXT_LINES};
use crate::error::beginning;
use crate::sync::{Arc, AtomicU64, Mutex, Ordering, fence, lock};
use crate::sys::cuda::Width;
use crate::sys::words::{SharedWords, WORDS_A_LINE};
use crate::types::Rank;

/// A control segment as one of its ranks sees it.
#[derive(Debug)]
pub(crate) struct Control {
    words: Arc<SharedWords>,
    layout: ControlLayout,
    /// This rank's place among the ranks of its host. Ranks are places here, unless a comment says names.
    me: Rank,
    width: Width,
    /// By place, the name of each rank: its number in the communicator.
    names: Vec<Rank>,
    /// How many ranks the communicator has.
    size: usize,
    /// Held while this rank writes a failure, which several of its threads may do.
    failing: Mutex<()>,
}

/// A failure that a rank reports on one lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) lane: usize,
    /// The first operation of the lane that it may have spoiled.
    pub(crate) number: u64,
    pub(crate) kind: FailureKind,
    /// The rank at fault, by its name.
    pub(crate) rank: Rank,
    /// The cause in words; of a longer text the first 512 bytes.
    pub(crate) text: String,
}

/// Why an operation has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailureKind {
    /// Ranks have called different operations.
    Mismatch,
    /// A time limit has passed.
    Timeout,
    /// A rank has died.
    PeerLost,
    /// The rank that reports it has left.
    Left,
    /// A call of the driver has failed.
    Driver,
}

/// Sent in place of the number of a [`FailureKind`]: the rank has given up the library that runs operations of a lane.
pub(crate) const LIBRARY_GIVEN_UP: u32 = u32::MAX;

impl FailureKind {
    const ALL: [FailureKind; 5] =
        [FailureKind::Mismatch, FailureKind::Timeout, FailureKind::PeerLost, FailureKind::Left, FailureKind::Driver];

    /// The kind of this number; `Driver` for an unknown one.
    pub(crate) fn numbered(number: u32) -> FailureKind {
        FailureKind::ALL.get(number as usize).copied().unwrap_or(FailureKind::Driver)
    }
}

impl Control {
    /// The segment in these words, which are zero at first, as rank `me` sees it. `width` says how much of a word the streams
    /// of all ranks look at and write.
    ///
    /// # Panics
    /// When there are fewer words than the layout has, or no such rank.
    pub(crate) fn new(words: Arc<SharedWords>, layout: ControlLayout, me: Rank, width: Width) -> Control {
        assert!(me.index() < layout.ranks() && layout.count() <= words.count(), "rank {me} of {layout:?}");
        let names: Vec<Rank> = (0..layout.ranks()).map(Rank::from).collect();
        Control { words, layout, me, width, size: names.len(), names, failing: Mutex::new(()) }
    }

    /// The segment of some of a communicator's `size` ranks, which have these names there.
    ///
    /// # Panics
    /// When there is not a name for each.
    pub(crate) fn of_some(self, names: Vec<Rank>, size: usize) -> Control {
        assert_eq!(names.len(), self.layout.ranks());
        Control { names, size, ..self }
    }

    /// This rank, by its place on the host.
    pub(crate) fn me(&self) -> Rank {
        self.me
    }

    /// The segment's lines, and their layout.
    pub(crate) fn lines(&self) -> (&SharedWords, ControlLayout) {
        (self.words.as_ref(), self.layout)
    }

    /// Whether the rank of this name has called an operation; true for a rank of another host.
    pub(crate) fn has_called(&self, rank: Rank, lane: usize, number: u64) -> bool {
        self.local(rank).is_none_or(|rank| self.calls_of(rank, lane) >= number)
    }

    /// The name of a rank.
    pub(crate) fn name(&self, rank: Rank) -> Rank {
        self.names[rank.index()]
    }

    /// The rank of this name, if it is on this host.
    pub(crate) fn local(&self, name: Rank) -> Option<Rank> {
        self.names.iter().position(|known| *known == name).map(Rank::from)
    }

    pub(crate) fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.layout.ranks()).map(Rank::from)
    }

    // ---- operations ----

    /// Whether a rank's stream has come to an operation of a lane.
    pub(crate) fn has_started(&self, rank: Rank, lane: usize, number: u64) -> bool {
        self.has_reached(self.layout.started(rank, lane, number), number)
    }

    /// Whether a rank's stream is done with an operation of a lane. What the stream wrote before can then be seen.
    pub(crate) fn has_ended(&self, rank: Rank, lane: usize, number: u64) -> bool {
        self.has_reached(self.layout.done(rank, lane, number), number)
    }

    /// Whether this rank may call an operation: the earlier one that used its slots is done here, hence called by all ranks.
    pub(crate) fn has_room(&self, lane: usize, number: u64, has_blocks: bool) -> bool {
        number
            .checked_sub(Control::slots(has_blocks))
            .is_none_or(|earlier| earlier == 0 || self.has_ended(self.me, lane, earlier))
    }

    /// How many operations may be under way, with counts of blocks or without.
    pub(crate) fn slots(has_blocks: bool) -> u64 {
        if has_blocks { COUNT_SLOTS as u64 } else { SLOTS as u64 }
    }

    /// Some streams write only 32 bits. That is enough: the numbers of operations in one slot are few laps apart.
    fn has_reached(&self, index: usize, number: u64) -> bool {
        is_reached(self.words.word(index).load(Ordering::Acquire), number, Width::Bits32)
    }

    // ---- the call log ----

    /// Tells the other ranks of the next call on a lane, and compares it with theirs. [There must be room](Control::has_room),
    /// and nothing of the call on a stream yet. Numbers count from 1. All ranks must make the same call. In an all_to_all,
    /// which has blocks, each rank must send as much as the receiver expects.
    ///
    /// Of two ranks that make different calls, at least one gets the error, also if both make them at once: each publishes its
    /// own call before it looks for the other's, see `record::publish`.
    ///
    /// # Errors
    /// A rank has called another operation.
    pub(crate) fn enter(
        &self,
        lane: usize,
        number: u64,
        call: LoggedCall,
        blocks: Option<Blocks<'_>>,
    ) -> Result<(), Disagreement> {
        self.words.word(self.layout.last_call(self.me, lane)).store(number, Ordering::Relaxed);
        let store = || {
            let Some(Blocks { sent, received }) = blocks else { return };
            for peer in self.ranks() {
                let [own_sent, own_received] = self.counts(self.me, lane, number, peer);
                own_sent.store(sent[peer.index()] as u64, Ordering::Relaxed);
                own_received.store(received[peer.index()] as u64, Ordering::Relaxed);
            }
        };
        call.publish(self.words.line(self.layout.call(self.me, lane, number)), number, store);
        self.compare(lane, number, call, blocks)
    }

    /// Compares a call that was [entered](Control::enter) with what other ranks have called by now.
    ///
    /// # Errors
    /// A rank has called another operation.
    pub(crate) fn compare(
        &self,
        lane: usize,
        number: u64,
        call: LoggedCall,
        blocks: Option<Blocks<'_>>,
    ) -> Result<(), Disagreement> {
        let others = self.ranks().filter(|rank| *rank != self.me);
        // A rank that uses the slot for a later call is done with this one, and no rank is done before all agree.
        let mut differences = others
            .filter_map(|rank| Some(Disagreement { rank, what: self.differs(rank, lane, number, call, blocks)? }));
        differences.next().map_or(Ok(()), Err)
    }

    /// Finds a rank that has called the operation of this number outside of a capture.
    ///
    /// # Errors
    /// There is one.
    pub(crate) fn none_is_eager(&self, lane: usize, number: u64) -> Result<(), Disagreement> {
        let mut eager = self.ranks().filter_map(|rank| {
            let theirs = self.call_of(rank, lane, number).filter(|theirs| !theirs.is_captured())?;
            Some(Disagreement { rank, what: Difference::Call(theirs) })
        });
        eager.next().map_or(Ok(()), Err)
    }

    /// Counts an operation that all ranks have called as done, since no stream runs it.
    pub(crate) fn pass(&self, lane: usize, number: u64) {
        for index in [self.layout.started(self.me, lane, number), self.layout.done(self.me, lane, number)] {
            self.words.word(index).store(number, Ordering::Release);
        }
    }

    /// How what a rank has called under this number differs from the own call.
    fn differs(
        &self,
        rank: Rank,
        lane: usize,
        number: u64,
        call: LoggedCall,
        blocks: Option<Blocks<'_>>,
    ) -> Option<Difference> {
        let line = self.words.line(self.layout.call(rank, lane, number));
        let counts = || self.counts(rank, lane, number, self.me).map(|count| count.load(Ordering::Relaxed));
        let (theirs, [their_sent, their_received]) = LoggedCall::read(line, number, counts)?;
        if !call.goes_with(&theirs) {
            return Some(Difference::Call(theirs));
        }
        let Blocks { sent, received } = blocks?;
        let (sent, received) = (sent[rank.index()] as u64, received[rank.index()] as u64);
        if their_sent != received {
            Some(Difference::Block { sender: rank, sent: their_sent, receiver: self.me, expected: received })
        } else if sent != their_received {
            Some(Difference::Block { sender: self.me, sent, receiver: rank, expected: their_received })
        } else {
            None
        }
    }

    /// What a rank sends to a peer, and what it receives from it, in elements.
    fn counts(&self, rank: Rank, lane: usize, number: u64, peer: Rank) -> [&AtomicU64; 2] {
        let (line, first) = self.layout.counts(rank, lane, number, peer);
        let line = self.words.line(line);
        [&line[first], &line[first + 1]]
    }

    /// What a rank has called under this number; nothing if it has not come there, or is [`SLOTS`] calls beyond.
    pub(crate) fn call_of(&self, rank: Rank, lane: usize, number: u64) -> Option<LoggedCall> {
        LoggedCall::read(self.words.line(self.layout.call(rank, lane, number)), number, || ()).map(|(call, ())| call)
    }

    /// The number of a rank's last call; zero if there was none.
    pub(crate) fn calls_of(&self, rank: Rank, lane: usize) -> u64 {
        self.words.word(self.layout.last_call(rank, lane)).load(Ordering::Relaxed)
    }

    // ---- failures ----

    /// Tells the other ranks of a failure, before anything that it spoils can reach them.
    ///
    /// The first failure of a lane stays until the lane is [reset](Control::reset). A later failure of an earlier operation
    /// replaces only its number and its kind: ranks might go on after a disagreement, but not after other kinds.
    pub(crate) fn fail(&self, failure: &Failure) {
        let _failing = lock(&self.failing);
        let place = self.words.line(self.layout.failure(self.me, failure.lane));
        let [mark, number, kind, rank, len, ..] = place;
        let epoch = self.epoch(failure.lane);
        if mark.load(Ordering::Relaxed) == epoch {
            if failure.number < number.load(Ordering::Relaxed) {
                kind.store(failure.kind as u64, Ordering::Relaxed);
                // Release: a rank that reads the number finds the kind, by the Acquire in `failure_of`.
                number.store(failure.number, Ordering::Release);
            }
            // Orders this before what the caller does next, as `record::publish` does.
            fence(Ordering::SeqCst);
            return;
        }
        let text = beginning(&failure.text, TEXT_BYTES);
        record::publish(mark, epoch, || {
            number.store(failure.number, Ordering::Relaxed);
            kind.store(failure.kind as u64, Ordering::Relaxed);
            rank.store(u64::from(failure.rank.0), Ordering::Relaxed);
            len.store(text.len() as u64, Ordering::Relaxed);
            for (word, bytes) in self.text(self.me, failure.lane).zip(text.as_bytes().chunks(size_of::<u64>())) {
                let mut value = [0; size_of::<u64>()];
                value[..bytes.len()].copy_from_slice(bytes);
                word.store(u64::from_le_bytes(value), Ordering::Relaxed);
            }
        });
    }

    /// What has failed on a rank's lane since the lane was last reset.
    pub(crate) fn failure_of(&self, rank: Rank, lane: usize) -> Option<Failure> {
        let [mark, values @ ..] = self.words.line(self.layout.failure(rank, lane));
        let (mut values, text) = record::read(mark, self.epoch(lane), || {
            let load = |word: &AtomicU64| word.load(Ordering::Acquire);
            let text: Vec<u8> = self.text(rank, lane).flat_map(|word| load(word).to_le_bytes()).collect();
            (values.each_ref().map(load).into_iter(), text)
        })?;
        let mut next = || values.next().unwrap_or_default();
        let (number, kind, culprit, len) = (next(), next(), next(), next());
        let culprit = u32::try_from(culprit).ok().map(Rank).filter(|rank| rank.index() < self.size);
        let known = usize::try_from(kind).ok().and_then(|kind| FailureKind::ALL.get(kind)).copied();
        let text = &text[..text.len().min(usize::try_from(len).unwrap_or(usize::MAX))];
        Some(Failure {
            lane,
            number,
            kind: known.unwrap_or(FailureKind::Driver),
            rank: culprit.unwrap_or(self.name(rank)),
            text: String::from_utf8_lossy(text).into_owned(),
        })
    }

    /// The failure that may have spoiled an operation, if there is one, and the name of the rank that reports it. Of several
    /// failures it is the one with the smallest number.
    ///
    /// An operation has succeeded if it has [ended](Control::has_ended) here and there is no failure *after that*: a rank
    /// reports its failure before it [releases](Control::release) its stream, so before the stream writes anything wrong.
    pub(crate) fn first_failure(&self, lane: usize, number: u64) -> Option<(Rank, Failure)> {
        let failures = self.ranks().filter_map(|rank| Some((rank, self.failure_of(rank, lane)?)));
        let first = failures.filter(|(_, failure)| failure.number <= number).min_by_key(|(_, failure)| failure.number);
        first.map(|(reporter, failure)| (self.name(reporter), failure))
    }

    /// Notes that this rank has given up the library that runs operations of a lane. What it has sent in them may be lost.
    pub(crate) fn give_up_library(&self, lane: usize) {
        self.library(self.me, lane).store(self.epoch(lane), Ordering::Release);
    }

    /// Whether a rank has done so since the lane was last reset.
    pub(crate) fn has_given_up_library(&self, rank: Rank, lane: usize) -> bool {
        self.library(rank, lane).load(Ordering::Acquire) == self.epoch(lane)
    }

    /// Beside the failure, of which it is no part.
    fn library(&self, rank: Rank, lane: usize) -> &AtomicU64 {
        let [.., library] = self.words.line(self.layout.failure(rank, lane));
        library
    }

    fn text(&self, rank: Rank, lane: usize) -> impl Iterator<Item = &AtomicU64> {
        let first = self.layout.failure(rank, lane) + 1;
        (first..first + TEXT_LINES).flat_map(|line| self.words.line(line))
    }

    // ---- other hosts ----

    /// Whether this rank's stream has made so many messages to other hosts ready.
    pub(crate) fn is_outbound_ready(&self, lane: usize, number: u64) -> bool {
        self.has_counted(lane, Word::Outbound { of: self.me }, number)
    }

    /// Whether this rank's stream is done with so many messages from other hosts.
    pub(crate) fn is_inbound_taken(&self, lane: usize, number: u64) -> bool {
        self.has_counted(lane, Word::Taken { of: self.me }, number)
    }

    /// Whether a word of a lane has come to this number.
    pub(crate) fn has_counted(&self, lane: usize, word: Word, number: u64) -> bool {
        let word = self.words.word(self.layout.lane_words().index(lane, word));
        is_reached(word.load(Ordering::Acquire), number, self.width)
    }

    /// Tells this rank's stream that so many messages to other hosts have been sent.
    pub(crate) fn tell_sent(&self, lane: usize, number: u64) {
        let word = self.layout.lane_words().index(lane, Word::Sent { of: self.me });
        self.words.word(word).store(number, Ordering::Release);
    }

    /// Tells this rank's stream that so many messages from other hosts have come.
    pub(crate) fn tell_received(&self, lane: usize, number: u64) {
        let word = self.layout.lane_words().index(lane, Word::Inbound { of: self.me });
        self.words.word(word).store(number, Ordering::Release);
    }

    /// Writes a count to a word of a lane, in place of another rank's stream.
    pub(crate) fn count(&self, lane: usize, word: Word, number: u64) {
        let word = self.layout.lane_words().index(lane, word);
        self.words.word(word).store(number, Ordering::Release);
    }

    /// Notes that this rank has called operations up to this number.
    pub(crate) fn note_called(&self, lane: usize, number: u64) {
        self.words.word(self.layout.last_call(self.me, lane)).fetch_max(number, Ordering::Release);
    }

    // ---- the words of lanes ----

    /// The names of the ranks whose streams have not written the values that this rank's stream waits for: the sender of a head
    /// has not come so far, the receiver of a tail is not done.
    pub(crate) fn behind(&self, lane: usize, expected: impl Iterator<Item = (Word, u64)>) -> Vec<Rank> {
        let words = self.layout.lane_words();
        let is_behind = |word, value| {
            let found = self.words.word(words.index(lane, word)).load(Ordering::Acquire);
            !is_reached(found, value, self.width)
        };
        // Words that the CPU engine writes wait for other hosts.
        let behind = expected.filter(|(word, value)| is_behind(*word, *value)).filter_map(|(word, _)| writer(word));
        let mut behind: SmallVec<[Rank; 8]> = behind.map(|rank| self.name(rank)).collect();
        behind.sort_unstable();
        behind.dedup();
        behind.into_vec()
    }

    /// Lets this rank's stream pass all its waits: sets words of a lane far beyond the last values that the stream waits for.
    /// Call [`fail`](Control::fail) first, and repeat this until all operations are done, since another rank's stream may still
    /// write the words.
    ///
    /// # Panics
    /// When this rank's stream does not wait for one of the words.
    pub(crate) fn release(&self, lane: usize, words: impl Iterator<Item = (Word, u64)>) {
        for (word, last) in words {
            assert_eq!(waiter(word), Some(self.me), "{word:?} is released by who waits for it");
            let value = far(last, self.width);
            self.words.word(self.layout.lane_words().index(lane, word)).store(value, Ordering::Release);
        }
    }

    /// How often a lane was reset, plus one: a mark is not zero.
    fn epoch(&self, lane: usize) -> u64 {
        self.words.word(self.layout.epoch(lane)).load(Ordering::Acquire).wrapping_add(1)
    }

    /// Makes this rank's part of a lane as new: what its stream waits for, its operations and calls. Failures are past.
    ///
    /// Every rank calls it once no stream has anything of the lane, and no rank uses the lane until all have called it. Hence
    /// it stands between two barriers.
    pub(crate) fn reset(&self, lane: usize) {
        let (me, layout) = (self.me, self.layout);
        let peers = self
            .ranks()
            .flat_map(|peer| [Word::Head { sender: peer, receiver: me }, Word::Tail { sender: me, receiver: peer }]);
        let network =
            [Word::Outbound { of: me }, Word::Sent { of: me }, Word::Inbound { of: me }, Word::Taken { of: me }];
        let words = peers.chain(network).map(|word| layout.lane_words().index(lane, word));
        let slots = (0..SLOTS as u64).flat_map(|slot| {
            [layout.started(me, lane, slot), layout.done(me, lane, slot), layout.call(me, lane, slot)]
        });
        for index in words.chain(slots).chain([layout.last_call(me, lane)]) {
            self.words.word(index).store(0, Ordering::Release);
        }
        if me == Rank(0) {
            self.words.word(layout.epoch(lane)).fetch_add(1, Ordering::Release);
        }
    }
}

/// Whether a word that only grows has come to `value`. A word of 32 bits wraps around: there the shorter distance decides.
pub(crate) fn is_reached(found: u64, value: u64, width: Width) -> bool {
    match width {
        Width::Bits32 => (found as u32).wrapping_sub(value as u32).cast_signed() >= 0,
        Width::Bits64 => found >= value,
    }
}

/// A value far beyond `last`, the greatest value that a stream waits for.
pub(crate) fn far(last: u64, width: Width) -> u64 {
    match width {
        Width::Bits32 => u64::from((last as u32).wrapping_add(1 << 30)),
        Width::Bits64 => last.wrapping_add(1 << 62),
    }
}

/// The rank whose stream writes a word; nothing if none does.
pub(crate) fn writer(word: Word) -> Option<Rank> {
    match word {
        Word::Head { sender, .. } => Some(sender),
        Word::Tail { receiver, .. } => Some(receiver),
        Word::Outbound { of } | Word::Taken { of } => Some(of),
        Word::Sent { .. } | Word::Inbound { .. } => None,
    }
}

/// The rank whose stream waits for a word; nothing if none does.
pub(crate) fn waiter(word: Word) -> Option<Rank> {
    match word {
        Word::Head { receiver, .. } => Some(receiver),
        Word::Tail { sender, .. } => Some(sender),
        Word::Sent { of } | Word::Inbound { of } => Some(of),
        Word::Outbound { .. } | Word::Taken { .. } => None,
    }
}

const TEXT_BYTES: usize = TEXT_LINES * WORDS_A_LINE * size_of::<u64>();

#[cfg(test)]
mod tests;
