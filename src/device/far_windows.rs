//! Windows of ranks on other hosts: what the engine needs to carry accesses to them, and what it does for them.
//!
//! Two ranks of different hosts each have pinned memory and words for what one does to the other's windows
//! ([`routes`](crate::device::routes)). The engine sends what a stream has made ready. It calls no driver, so it hands what
//! comes to [`Lands`], which puts it into windows.

use std::collections::BTreeMap;

use crate::device::control::{Failure, is_reached};
use crate::device::marks::Marks;
use crate::device::network::NetworkMemory;
use crate::device::routes::Item;
use crate::device::signals::SLOTS;
use crate::sync::{Arc, Ordering};
use crate::sys::cuda::Width;
use crate::sys::words::SharedWords;
use crate::types::Rank;

/// The words by which a rank's streams, its engine and its landing thread tell each other how far they are.
#[derive(Clone, Debug)]
pub(crate) struct FarWords {
    words: Arc<SharedWords>,
    ranks: usize,
    width: Width,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FarWord {
    /// How many items for a rank this rank's streams have made ready. The engine looks at it.
    Ready(Rank),
    /// How many of them that rank is done with. The engine writes it, streams wait for it.
    Done(Rank),
    /// How many of the pieces that this rank asked for have come. The engine writes it, streams wait for it.
    Answered(Rank),
    /// How many items of a rank are done here. The landing thread's stream writes it, the engine looks at it.
    Landed(Rank),
    /// How many signals of a rank have come through the window in `slot`. The landing thread's stream writes it, streams wait.
    Signals {
        /// The sender.
        from: Rank,
        slot: usize,
    },
}

/// The words of a rank, beside those of signals.
const COUNTS: usize = 4;

impl FarWords {
    /// How many a communicator of so many ranks needs.
    pub(crate) fn count(ranks: usize) -> usize {
        ranks * (COUNTS + SLOTS)
    }

    /// The words of a communicator of `ranks` ranks.
    ///
    /// # Panics
    /// When `words` has fewer.
    pub(crate) fn new(words: Arc<SharedWords>, ranks: usize, width: Width) -> FarWords {
        assert!(FarWords::count(ranks) <= words.count(), "{} words", words.count());
        FarWords { words, ranks, width }
    }

    /// The words, and how many bits of a word streams look at.
    pub(crate) fn words(&self) -> (&Arc<SharedWords>, Width) {
        (&self.words, self.width)
    }

    pub(crate) fn index(&self, word: FarWord) -> usize {
        let (rank, place) = match word {
            FarWord::Ready(rank) => (rank, 0),
            FarWord::Done(rank) => (rank, 1),
            FarWord::Answered(rank) => (rank, 2),
            FarWord::Landed(rank) => (rank, 3),
            FarWord::Signals { from, slot } => (from, COUNTS + slot),
        };
        assert!(rank.index() < self.ranks && place < COUNTS + SLOTS, "no {word:?}");
        rank.index() * (COUNTS + SLOTS) + place
    }

    /// Whether a stream has brought a word to this number.
    pub(crate) fn has_reached(&self, word: FarWord, number: u64) -> bool {
        is_reached(self.words.word(self.index(word)).load(Ordering::Acquire), number, self.width)
    }

    /// Writes what streams wait for.
    pub(crate) fn tell(&self, word: FarWord, number: u64) {
        self.words.word(self.index(word)).store(number, Ordering::Release);
    }
}

/// The pinned memory for what this rank and one of another host do to each other's windows.
#[derive(Clone, Debug)]
pub(crate) struct FarMemory {
    /// The cells of puts: outbound to the other rank's windows, inbound to this rank's.
    pub(crate) puts: Arc<NetworkMemory>,
    /// The cells of gets: outbound what the other rank asks for, inbound what this rank asks for.
    pub(crate) gets: Arc<NetworkMemory>,
}

/// An item of a rank of another host that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Landing {
    pub(crate) from: Rank,
    /// Its number among those of that rank.
    pub(crate) number: u64,
    /// The slot of its window.
    pub(crate) slot: usize,
    pub(crate) item: Item,
}

/// Does to this rank's windows what ranks of other hosts ask for.
pub(crate) trait Lands: Send + Sync {
    /// Has an item done after those that came before, and then counted. Waits for nothing and calls no driver.
    fn land(&self, landing: Landing);
}

/// What the engine needs of a rank's windows.
pub(crate) struct Port {
    pub(crate) words: FarWords,
    /// By rank of other hosts.
    pub(crate) memory: BTreeMap<Rank, FarMemory>,
    /// The bytes of a cell.
    pub(crate) cell: usize,
    pub(crate) marks: Arc<Marks>,
    pub(crate) lands: Arc<dyn Lands>,
}

/// The engine that carries accesses to windows of other hosts.
pub(crate) trait FarWindows: Send + Sync {
    /// Begins, before any rank of another host knows of a window here.
    fn open(&self, port: Port);

    /// Takes up items for the window in `slot` of a rank, in the order in which streams make them ready. Even if there are
    /// none, this rank hears of the peer's end from now on.
    fn submit(&self, peer: Rank, slot: usize, items: &[Item]) -> std::io::Result<()>;

    /// Whether everything that was taken up for windows of this slot is done at the other ends, or will never be.
    fn is_settled(&self, slot: usize) -> bool;

    /// Carries nothing any more, and tells the ranks of other hosts why.
    fn fail(&self, failure: &Failure);

    /// The failure of collectives that is known here, if one is, and the rank that has told of it. Lost ranks are noted in the
    /// marks.
    fn failure(&self) -> Option<(Rank, Failure)>;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_word_has_one_use() {
        let ranks = 3;
        let words = Arc::new(SharedWords::new(FarWords::count(ranks)).expect("words"));
        let words = FarWords::new(words, ranks, Width::Bits64);
        let of = |rank| {
            let counts = [FarWord::Ready(rank), FarWord::Done(rank), FarWord::Answered(rank), FarWord::Landed(rank)];
            counts.into_iter().chain((0..SLOTS).map(move |slot| FarWord::Signals { from: rank, slot }))
        };
        let all: BTreeSet<usize> = (0..ranks).map(Rank::from).flat_map(of).map(|word| words.index(word)).collect();
        assert_eq!(all, (0..FarWords::count(ranks)).collect());
    }
}
