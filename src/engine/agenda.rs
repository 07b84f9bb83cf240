//! What a turn of the loop has to look at: lists of ranks instead of all peers.
//!
//! A stream that may move is on a list that each turn goes through. One that has been looked at in vain for a while is armed:
//! the poller, or the bell of its shared memory, tells when it may move again. So a turn costs what moves, however many streams
//! there are. A stream that is armed must not be touched before it is disarmed: what wakes it comes once.

use crate::engine::per_rank::PerRank;
use crate::types::Rank;

/// A list of ranks. Each rank is on it once at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum List {
    /// Streams from these are read in each turn.
    Reading,
    /// Streams from these are armed.
    Silent,
    /// What waits for these is written in each turn.
    Writing,
    /// What waits for these has no room; their streams are armed.
    Blocked,
    /// Streams to these are being opened, are to be opened later, or end.
    Unsettled,
}

/// The lists.
pub(crate) struct Agenda {
    lists: [Vec<Rank>; LISTS],
    /// Where each rank is in each list, counted from one; zero if it is not there.
    places: PerRank<[u32; LISTS]>,
}

const LISTS: usize = 5;

impl Agenda {
    /// Empty lists, for so many ranks.
    pub(crate) fn new(size: usize) -> Agenda {
        Agenda { lists: [const { Vec::new() }; LISTS], places: PerRank::new(size) }
    }

    /// The ranks of a list.
    #[inline]
    pub(crate) fn ranks(&self, list: List) -> &[Rank] {
        &self.lists[list as usize]
    }

    /// Whether a list has a rank.
    pub(crate) fn has(&self, list: List, rank: Rank) -> bool {
        self.places.get(rank)[list as usize] > 0
    }

    /// Puts a rank at the end of a list. True: it was not there.
    pub(crate) fn insert(&mut self, list: List, rank: Rank) -> bool {
        let place = &mut self.places.get_mut(rank)[list as usize];
        if *place > 0 {
            return false;
        }
        let ranks = &mut self.lists[list as usize];
        ranks.push(rank);
        *place = ranks.len() as u32;
        true
    }

    /// Takes a rank off a list, in which the last one takes its place. True: it was there.
    pub(crate) fn remove(&mut self, list: List, rank: Rank) -> bool {
        if !self.has(list, rank) {
            return false;
        }
        let place = std::mem::take(&mut self.places.get_mut(rank)[list as usize]);
        let ranks = &mut self.lists[list as usize];
        ranks.swap_remove(place as usize - 1);
        if let Some(&moved) = ranks.get(place as usize - 1) {
            self.places.get_mut(moved)[list as usize] = place;
        }
        true
    }

    /// Takes a rank off all lists.
    pub(crate) fn forget(&mut self, rank: Rank) {
        for list in [List::Reading, List::Silent, List::Writing, List::Blocked, List::Unsettled] {
            self.remove(list, rank);
        }
    }

    /// Whether streams are armed.
    #[inline]
    pub(crate) fn has_armed(&self) -> bool {
        !self.ranks(List::Silent).is_empty() || !self.ranks(List::Blocked).is_empty()
    }

    /// Whether a turn looks at no stream.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.ranks(List::Reading).is_empty() && self.ranks(List::Writing).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_on_a_list_once_and_leaves_the_others_where_they_are_found() {
        let mut agenda = Agenda::new(10_000);
        for rank in [7, 9_999, 0, 7, 3] {
            assert_eq!(agenda.insert(List::Reading, Rank(rank)), !agenda.ranks(List::Silent).contains(&Rank(rank)));
            agenda.insert(List::Silent, Rank(rank));
        }
        assert_eq!(agenda.ranks(List::Reading), [Rank(7), Rank(9_999), Rank(0), Rank(3)]);
        assert!(agenda.remove(List::Reading, Rank(7)) && !agenda.remove(List::Reading, Rank(7)));
        assert_eq!(agenda.ranks(List::Reading), [Rank(3), Rank(9_999), Rank(0)]);
        assert!(agenda.remove(List::Reading, Rank(3)) && agenda.remove(List::Reading, Rank(0)));
        assert!(agenda.has(List::Reading, Rank(9_999)) && !agenda.has(List::Reading, Rank(0)));
        assert!(agenda.has(List::Silent, Rank(7)) && agenda.has_armed(), "another list");
        assert!(!agenda.is_empty());
        for rank in [7, 9_999, 0, 3] {
            agenda.forget(Rank(rank));
        }
        assert!(agenda.is_empty() && !agenda.has_armed());
    }
}
