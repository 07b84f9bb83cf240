//! The control segment: where the words of the ranks of one host lie.

use crate::device::counters::Word;
use crate::sys::words::WORDS_A_LINE;
use crate::types::Rank;

/// Which word of the segment is which, for so many ranks and lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordLayout {
    /// The number of the first word.
    first: usize,
    ranks: usize,
    lanes: usize,
}

impl WordLayout {
    /// The words of `ranks` ranks that have `lanes` lanes each.
    pub fn new(ranks: usize, lanes: usize) -> WordLayout {
        WordLayout { first: 0, ranks, lanes }
    }

    /// How many ranks there are.
    pub fn ranks(self) -> usize {
        self.ranks
    }

    /// How many words there are.
    pub fn count(self) -> usize {
        2 * self.lanes * self.ranks * (self.ranks + NETWORK_WORDS / 2)
    }

    /// The number of a lane's word. Those that one rank waits for lie together.
    ///
    /// ```
    /// use ncclx_rs::Rank;
    /// use ncclx_rs::device::counters::Word;
    /// use ncclx_rs::device::words::WordLayout;
    /// let layout = WordLayout::new(3, 2);
    /// assert_eq!(layout.count(), 36 + 24); // four more for each rank's messages to and from other hosts
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
            Word::Outbound { of } => return self.network(lane, of, 0),
            Word::Sent { of } => return self.network(lane, of, 1),
            Word::Inbound { of } => return self.network(lane, of, 2),
            Word::Taken { of } => return self.network(lane, of, 3),
        };
        assert!(lane < self.lanes && self.has(waits) && self.has(writes), "no {word:?} on lane {lane} of {self:?}");
        self.first + ((lane * self.ranks + waits.index()) * 2 + kind) * self.ranks + writes.index()
    }

    /// The number of a word for other hosts: these lie behind the words of pairs.
    fn network(self, lane: usize, of: Rank, kind: usize) -> usize {
        assert!(lane < self.lanes && self.has(of), "no words of rank {of} on lane {lane} of {self:?}");
        self.first + 2 * self.lanes * self.ranks * self.ranks + (lane * self.ranks + of.index()) * NETWORK_WORDS + kind
    }

    fn has(self, rank: Rank) -> bool {
        rank.index() < self.ranks
    }
}

/// The words of a rank and a lane for messages to and from other hosts.
const NETWORK_WORDS: usize = 4;

/// Which line of a control segment is which, for so many ranks and lanes.
///
/// How often each lane was reset comes first, then the lanes' words, then what each rank writes alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlLayout {
    ranks: usize,
    lanes: usize,
}

/// How many operations of a lane can be under way at once: operation k uses the slots of operation k − `SLOTS` anew.
pub const SLOTS: usize = 1024;

/// The lines that the text of a failure has.
pub(crate) const TEXT_LINES: usize = 8;

/// How many operations with counts a lane can have under way at once.
pub const COUNT_SLOTS: usize = 128;

impl ControlLayout {
    /// The version of this layout.
    pub(crate) const VERSION: u32 = 5;

    /// The segment of `ranks` ranks that have `lanes` lanes each.
    pub fn new(ranks: usize, lanes: usize) -> ControlLayout {
        ControlLayout { ranks, lanes }
    }

    /// How many ranks there are.
    pub fn ranks(self) -> usize {
        self.ranks
    }

    /// How many lanes there are.
    pub fn lanes(self) -> usize {
        self.lanes
    }

    /// How many lines there are: the number of words for [`SharedWords`](crate::sys::words::SharedWords).
    pub fn count(self) -> usize {
        self.pages() + self.ranks * self.lanes * self.page_lines()
    }

    /// The words of the lanes.
    ///
    /// ```
    /// use ncclx_rs::Rank;
    /// use ncclx_rs::device::counters::Word;
    /// use ncclx_rs::device::words::{ControlLayout, WordLayout};
    /// let (whole, head) = (ControlLayout::new(3, 2), Word::Head { sender: Rank(2), receiver: Rank(0) });
    /// // Behind an epoch a lane.
    /// assert_eq!(whole.lane_words().index(1, head), 2 + WordLayout::new(3, 2).index(1, head));
    /// ```
    pub fn lane_words(self) -> WordLayout {
        WordLayout { first: self.lanes, ranks: self.ranks, lanes: self.lanes }
    }

    /// The word that a rank's stream sets to an operation's number when it reaches that. A later operation uses it again.
    ///
    /// # Panics
    /// When there is no such rank or lane, here and below.
    pub fn started(self, rank: Rank, lane: usize, number: u64) -> usize {
        self.page(rank, lane) + STARTED + slot(number)
    }

    /// The word that a rank's stream sets to an operation's number when the operation is done. A later operation uses it again.
    pub fn done(self, rank: Rank, lane: usize, number: u64) -> usize {
        self.page(rank, lane) + DONE + slot(number)
    }

    /// The word that counts how often a lane has been reset.
    pub(crate) fn epoch(self, lane: usize) -> usize {
        assert!(lane < self.lanes, "no lane {lane} of {self:?}");
        lane
    }

    /// The line of a rank's call of this number.
    pub(crate) fn call(self, rank: Rank, lane: usize, number: u64) -> usize {
        self.page(rank, lane) + CALLS + slot(number)
    }

    /// The word that has the number of a rank's last call.
    pub(crate) fn last_call(self, rank: Rank, lane: usize) -> usize {
        self.page(rank, lane) + LAST_CALL
    }

    /// The line of a rank's failure; the lines of its text follow. Its last word tells by itself that the rank has given up its library.
    pub(crate) fn failure(self, rank: Rank, lane: usize) -> usize {
        self.page(rank, lane) + FAILURE
    }

    /// How much a rank sends to a peer, and receives from it: a line, and the number of the first of two words in it.
    pub(crate) fn counts(self, rank: Rank, lane: usize, number: u64, peer: Rank) -> (usize, usize) {
        assert!(peer.index() < self.ranks, "no rank {peer} in {self:?}");
        let first = self.page(rank, lane) + COUNTS + (number % COUNT_SLOTS as u64) as usize * self.count_lines();
        (first + peer.index() / PEERS_A_LINE, 2 * (peer.index() % PEERS_A_LINE))
    }

    fn page(self, rank: Rank, lane: usize) -> usize {
        assert!(rank.index() < self.ranks && lane < self.lanes, "no lane {lane} of rank {rank} in {self:?}");
        self.pages() + (rank.index() * self.lanes + lane) * self.page_lines()
    }

    fn page_lines(self) -> usize {
        COUNTS + COUNT_SLOTS * self.count_lines()
    }

    fn count_lines(self) -> usize {
        self.ranks.div_ceil(PEERS_A_LINE)
    }

    fn pages(self) -> usize {
        let words = self.lane_words();
        words.first + words.count()
    }
}

fn slot(number: u64) -> usize {
    (number % SLOTS as u64) as usize
}

/// The lines of what one rank writes on one lane.
const STARTED: usize = 0;
const DONE: usize = STARTED + SLOTS;
const CALLS: usize = DONE + SLOTS;
const LAST_CALL: usize = CALLS + SLOTS;
const FAILURE: usize = LAST_CALL + 1;
const COUNTS: usize = FAILURE + 1 + TEXT_LINES;

/// Two counts a peer.
const PEERS_A_LINE: usize = WORDS_A_LINE / 2;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_line_has_one_use() {
        let (ranks, lanes) = (5, 2);
        let layout = ControlLayout::new(ranks, lanes);
        let mut lines = vec![];
        for lane in 0..lanes {
            lines.push(layout.epoch(lane));
            for (me, other) in
                (0..ranks).flat_map(|me| (0..ranks).map(move |other| (Rank::from(me), Rank::from(other))))
            {
                lines.push(layout.lane_words().index(lane, Word::Head { sender: other, receiver: me }));
                lines.push(layout.lane_words().index(lane, Word::Tail { sender: me, receiver: other }));
            }
            for rank in (0..ranks).map(Rank::from) {
                let network = [
                    Word::Outbound { of: rank },
                    Word::Sent { of: rank },
                    Word::Inbound { of: rank },
                    Word::Taken { of: rank },
                ];
                lines.extend(network.map(|word| layout.lane_words().index(lane, word)));
                for number in 0..SLOTS as u64 {
                    lines.extend([layout.started(rank, lane, number), layout.done(rank, lane, number)]);
                    lines.push(layout.call(rank, lane, number));
                }
                lines.push(layout.last_call(rank, lane));
                lines.extend((0..=TEXT_LINES).map(|line| layout.failure(rank, lane) + line));
                let counts = |number| (0..ranks).map(move |peer| layout.counts(rank, lane, number, Rank::from(peer)));
                let counts: BTreeSet<_> = (0..COUNT_SLOTS as u64).flat_map(counts).collect();
                assert_eq!(counts.len(), COUNT_SLOTS * ranks);
                lines.extend(counts.into_iter().map(|(line, _)| line).collect::<BTreeSet<_>>());
            }
        }
        assert_eq!(lines.len(), layout.count());
        assert_eq!(lines.into_iter().collect::<BTreeSet<_>>(), (0..layout.count()).collect());
    }
}
