//! What the host sees of a graph's replays: how far they are, and how the watch ends those that cannot go on.
//!
//! Nobody tells the host of a replay. A stream says by a word in which operation it is. The watch marks what it finds there, so
//! that it tells an operation that goes on from the same one in a later replay. The words that the operation waits for say
//! which ranks have not done their part. If one of them never will, or not in time, the watch lets the stream pass; this and
//! later replays compute nothing then, but each ends.

use std::time::{Duration, Instant};

use crate::device::control::{far, is_reached, waiter, writer};
use crate::device::counters::Word;
use crate::device::in_flight::{InFlight, Look};
use crate::device::words::WordLayout;
use crate::error::{Error, rank_list};
use crate::signature::Signature;
use crate::sync::{Arc, Mutex, Ordering, lock};
use crate::sys::cuda::Width;
use crate::sys::words::SharedWords;
use crate::types::Rank;

/// Which word of a graph's lane is which: heads and tails, tokens, and where each rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenLayout {
    words: WordLayout,
}

/// The words of heads and tails, as a lane.
pub(crate) const COUNTS: usize = 0;
/// The lane of tokens: each pair's token is the tail.
pub(crate) const TOKENS: usize = 1;

impl TokenLayout {
    pub(crate) fn new(ranks: usize) -> TokenLayout {
        TokenLayout { words: WordLayout::new(ranks, 2) }
    }

    pub(crate) fn words(self) -> WordLayout {
        self.words
    }

    /// The word that says in which operation a rank's stream is.
    pub(crate) fn busy(self, rank: Rank) -> usize {
        assert!(rank.index() < self.words.ranks(), "no rank {rank} in {self:?}");
        self.words.count() + rank.index()
    }

    pub(crate) fn count(self) -> usize {
        self.words.count() + self.words.ranks()
    }
}

/// Where a stream is, by its word, which is zero in no operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Busy {
    /// It waits for the tokens of the operation of this number.
    Begins(usize),
    /// It has come further.
    Runs(usize),
}

impl Busy {
    pub(crate) fn to_word(self) -> u64 {
        match self {
            Busy::Begins(operation) => 2 * operation as u64 + 1,
            Busy::Runs(operation) => 2 * operation as u64 + 2,
        }
    }

    fn from_word(word: u64) -> Option<Busy> {
        let operation = usize::try_from((word & !SEEN).checked_sub(1)?).ok()?;
        Some(if operation % 2 == 0 { Busy::Begins(operation / 2) } else { Busy::Runs(operation / 2) })
    }
}

/// The bit by which the watch marks a stream's word.
const SEEN: u64 = 1 << 31;

/// An operation of a graph.
#[derive(Debug)]
pub(crate) struct Captured {
    pub(crate) call: Signature,
    pub(crate) limit: Duration,
    /// Whose tokens it waits for.
    pub(crate) tokens: Vec<Rank>,
    /// The words that it then waits for, with the greatest values.
    pub(crate) awaits: Vec<(Word, u64)>,
}

/// One rank's replays of the operations of a graph's lane.
pub(crate) struct Replay {
    comm: String,
    me: Rank,
    words: Arc<SharedWords>,
    layout: TokenLayout,
    width: Width,
    in_flight: Arc<InFlight>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    operations: Vec<Captured>,
    /// The value last found in the stream's word, and since when.
    found: Option<(u64, Instant)>,
    is_broken: bool,
}

impl Replay {
    /// On these words, all zero. Every rank makes its own; none uses the lane before all have.
    pub(crate) fn new(
        comm: String,
        me: Rank,
        words: Arc<SharedWords>,
        layout: TokenLayout,
        width: Width,
        in_flight: Arc<InFlight>,
    ) -> Replay {
        let replay = Replay { comm, me, words, layout, width, in_flight, state: Mutex::default() };
        replay.tokens().for_each(|word| replay.store(TOKENS, word, 1));
        replay
    }

    pub(crate) fn next(&self) -> usize {
        lock(&self.state).operations.len()
    }

    pub(crate) fn note(&self, operation: Captured) {
        lock(&self.state).operations.push(operation);
    }

    /// The communicator's operations outside of graphs.
    pub(crate) fn in_flight(&self) -> &Arc<InFlight> {
        &self.in_flight
    }

    /// Whether the stream is in an operation.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy().load(Ordering::Acquire) != 0
    }

    /// Looks where the stream is; lets it pass if it cannot go on.
    pub(crate) fn tick(&self, now: Instant) -> Look {
        let mut state = lock(&self.state);
        let busy = self.busy().load(Ordering::Acquire);
        if busy == 0 {
            state.found = None;
            return Look::Later;
        }
        if !state.is_broken && !self.breaks(&mut state, busy, now) {
            return Look::Later;
        }
        let counts = (0..self.layout.words().ranks()).map(Rank::from).filter(|peer| *peer != self.me);
        for peer in counts {
            self.store(COUNTS, Word::Head { sender: peer, receiver: self.me }, far(0, self.width));
            self.store(COUNTS, Word::Tail { sender: self.me, receiver: peer }, far(0, self.width));
        }
        self.tokens().for_each(|word| self.store(TOKENS, word, 1));
        Look::Soon
    }

    /// Whether the operation that the stream is in cannot go on, or takes too long. If so, tells other ranks and the log.
    fn breaks(&self, state: &mut State, busy: u64, now: Instant) -> bool {
        let seen = busy | SEEN;
        // Partner: none, the mark only tells one replay's operation from the next one's. What the stream writes meanwhile
        // stays.
        if busy != seen && self.busy().compare_exchange(busy, seen, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return false;
        }
        let since = match state.found {
            Some((found, since)) if busy == seen && found == seen => since,
            _ => now,
        };
        state.found = Some((seen, since));
        let Some(place) = Busy::from_word(seen) else { return false };
        let Some(operation) = state.operations.get(place.operation()) else { return false };
        let missing = self.missing(place, operation);
        // At its end the stream makes words zero, so what was found holds only if the stream is still in there.
        if missing.is_empty() || self.busy().load(Ordering::Acquire) != seen {
            return false;
        }
        let waited = now - since;
        let late = || {
            if waited < operation.limit {
                return None;
            }
            let mut detail =
                format!("in a replay of a graph: rank(s) {} did not finish their part", rank_list(&missing));
            // These ranks may wait for others themselves.
            let elsewhere = self.elsewhere(place.operation());
            if !elsewhere.is_empty() {
                detail += &format!("; rank(s) {} are not in this operation", rank_list(&elsewhere));
            }
            Some(Error::Timeout { operation: operation.call.to_string(), waited, detail })
        };
        let Some(error) = self.in_flight.obstacle(operation.call, &missing).or_else(late) else { return false };
        log::warn!(
            "communicator `{}`: a CUDA graph's replay cannot go on, and what it computes is undefined, now and later: {error}",
            self.comm
        );
        // Before anything wrong reaches another rank.
        self.in_flight.fail_next(error);
        state.is_broken = true;
        true
    }

    /// The ranks that have not done what the operation waits for.
    fn missing(&self, place: Busy, operation: &Captured) -> Vec<Rank> {
        let found = |lane, word| self.words.word(self.layout.words().index(lane, word)).load(Ordering::Acquire);
        let mut missing: Vec<Rank> = match place {
            Busy::Begins(_) => {
                let is_out = |peer: &Rank| found(TOKENS, Word::Tail { sender: self.me, receiver: *peer }) == 0;
                operation.tokens.iter().copied().filter(is_out).collect()
            }
            Busy::Runs(_) => {
                let awaits = operation.awaits.iter();
                let is_behind = |(word, value): &&(Word, u64)| !is_reached(found(COUNTS, *word), *value, self.width);
                awaits.filter(is_behind).filter_map(|(word, _)| writer(*word)).collect()
            }
        };
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    /// The ranks whose streams are not in this operation.
    fn elsewhere(&self, operation: usize) -> Vec<Rank> {
        let is_elsewhere = |rank: &Rank| {
            let busy = self.words.word(self.layout.busy(*rank)).load(Ordering::Acquire);
            Busy::from_word(busy).is_none_or(|place| place.operation() != operation)
        };
        (0..self.layout.words().ranks()).map(Rank::from).filter(is_elsewhere).collect()
    }

    /// The tokens that this rank may wait for.
    fn tokens(&self) -> impl Iterator<Item = Word> + use<> {
        let me = self.me;
        (0..self.layout.words().ranks()).map(move |peer| Word::Tail { sender: me, receiver: Rank::from(peer) })
    }

    fn busy(&self) -> &crate::sync::AtomicU64 {
        self.words.word(self.layout.busy(self.me))
    }

    fn store(&self, lane: usize, word: Word, value: u64) {
        assert_eq!(waiter(word), Some(self.me), "{word:?} is set by who waits for it");
        self.words.word(self.layout.words().index(lane, word)).store(value, Ordering::Release);
    }
}

impl Busy {
    fn operation(self) -> usize {
        match self {
            Busy::Begins(operation) | Busy::Runs(operation) => operation,
        }
    }
}

#[cfg(test)]
mod tests;
