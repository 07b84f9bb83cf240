//! The control segment: where the words of the ranks of one host lie.

use crate::device::counters::Word;
use crate::types::Rank;

/// Which word of the segment is which, for so many ranks and lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordLayout {
    ranks: usize,
    lanes: usize,
}

impl WordLayout {
    /// The words of `ranks` ranks that have `lanes` lanes each.
    pub fn new(ranks: usize, lanes: usize) -> WordLayout {
        WordLayout { ranks, lanes }
    }

    /// How many ranks there are.
    pub fn ranks(self) -> usize {
        self.ranks
    }

    /// How many words there are.
    pub fn count(self) -> usize {
        2 * self.lanes * self.ranks * self.ranks
    }

    /// The number of a lane's word. Those that one rank waits for lie together.
    ///
    /// ```
    /// use ncclx_rs::Rank;
    /// use ncclx_rs::device::counters::Word;
    /// use ncclx_rs::device::words::WordLayout;
    /// let layout = WordLayout::new(3, 2);
    /// assert_eq!(layout.count(), 36);
    /// let head = Word::Head { sender: Rank(2), receiver: Rank(0) };
    /// let tail = Word::Tail { sender: Rank(0), receiver: Rank(1) };
    /// assert_eq!((layout.index(0, head), layout.index(0, tail), layout.index(1, head)), (2, 4, 20));
    /// ```
    ///
    /// # Panics
    /// When there is no such lane or rank.
    pub fn index(self, lane: usize, word: Word) -> usize {
        let (waits, writes, kind) = match word {
            Word::Head { sender, receiver } => (receiver, sender, 0),
            Word::Tail { sender, receiver } => (sender, receiver, 1),
        };
        assert!(lane < self.lanes && self.has(waits) && self.has(writes), "no {word:?} on lane {lane} of {self:?}");
        ((lane * self.ranks + waits.index()) * 2 + kind) * self.ranks + writes.index()
    }

    fn has(self, rank: Rank) -> bool {
        rank.index() < self.ranks
    }
}
