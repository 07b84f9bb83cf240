//! The words of windows: how many signals each rank has sent each other one.
//!
//! They lie in the control segment, behind all else. A window has a slot of them while it is registered, the same on every
//! rank. The sender's stream writes a word, the receiver's waits for it, and it only grows until the slot is free again.

use crate::device::control::{far, is_reached};
use crate::sync::{Arc, Ordering};
use crate::sys::cuda::Width;
use crate::sys::words::SharedWords;
use crate::types::Rank;

/// The words of the windows of a communicator.
#[derive(Clone, Debug)]
pub(crate) struct Signals {
    words: Arc<SharedWords>,
    /// The number of the first word.
    first: usize,
    ranks: usize,
    width: Width,
}

/// How many windows can be registered at once.
pub(crate) const SLOTS: usize = 64;

/// How many words so many ranks need.
pub(crate) fn count(ranks: usize) -> usize {
    SLOTS * ranks * ranks
}

impl Signals {
    /// Those of so many ranks, from this word on.
    ///
    /// # Panics
    /// When there are fewer.
    pub(crate) fn new(words: Arc<SharedWords>, first: usize, ranks: usize, width: Width) -> Signals {
        assert!(first + count(ranks) <= words.count(), "{} words", words.count());
        Signals { words, first, ranks, width }
    }

    /// The number of the word that tells `receiver` of signals from `sender`.
    pub(crate) fn index(&self, slot: usize, receiver: Rank, sender: Rank) -> usize {
        let (to, from) = (receiver.index(), sender.index());
        assert!(slot < SLOTS && to < self.ranks && from < self.ranks, "no word of {slot} from {from} to {to}");
        self.first + (slot * self.ranks + to) * self.ranks + from
    }

    /// Whether so many signals have come.
    pub(crate) fn have_come(&self, word: usize, count: u64) -> bool {
        is_reached(self.words.word(word).load(Ordering::Acquire), count, self.width)
    }

    /// Lets the stream pass that waits for so many signals. To be repeated, as for [`Control`](crate::device::control::Control).
    pub(crate) fn release(&self, word: usize, count: u64) {
        self.words.word(word).store(far(count, self.width), Ordering::Release);
    }

    /// Makes what `receiver` waits for as new. No rank may use the slot.
    pub(crate) fn reset(&self, slot: usize, receiver: Rank) {
        for sender in (0..self.ranks).map(Rank::from) {
            self.words.word(self.index(slot, receiver, sender)).store(0, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn signals(first: usize, ranks: usize) -> Signals {
        let words = SharedWords::new(first + count(ranks)).expect("words");
        Signals::new(Arc::new(words), first, ranks, Width::Bits64)
    }

    #[test]
    fn every_word_has_one_use() {
        let (first, ranks) = (7, 3);
        let signals = signals(first, ranks);
        let all = || (0..ranks).map(Rank::from);
        let words: BTreeSet<usize> = (0..SLOTS)
            .flat_map(|slot| all().flat_map(move |to| all().map(move |from| (slot, to, from))))
            .map(|(slot, to, from)| signals.index(slot, to, from))
            .collect();
        assert_eq!(words, (first..first + count(ranks)).collect());
    }

    #[test]
    fn a_reset_is_of_the_receivers_words_alone() {
        let signals = signals(0, 2);
        let words = [(0, 1, 0), (0, 1, 1), (0, 0, 1), (1, 1, 0)]
            .map(|(slot, to, from)| signals.index(slot, Rank(to), Rank(from)));
        words.iter().for_each(|word| signals.release(*word, 0));
        signals.reset(0, Rank(1));
        assert_eq!(words.map(|word| signals.have_come(word, 1)), [false, false, true, true]);
    }
}
