//! Through whom ranks join.
//!
//! In a small world all join at rank 0. A large one is cut into groups of consecutive ranks. The first rank of each is its leader:
//! it takes the others of its group in, and tells rank 0 of them over its own connection. Rank 0 leads the first group. So rank 0
//! has a connection to each leader and to each rank of its own group, and not to all ranks.

use std::ops::Range;

use crate::types::Rank;

/// Worlds of so many ranks and more are cut into groups.
const CUT_FROM: usize = 512;

/// The ranks of a group. Up to about 111,800 ranks, neither rank 0 nor a leader has more than a thousand connections at once.
const GROUP_RANKS: usize = 128;

/// How a world is cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Groups {
    /// The ranks of the world.
    pub(super) size: usize,
    /// The ranks of each group; the last may have fewer.
    pub(super) ranks: usize,
}

impl Groups {
    pub(super) fn of(size: usize) -> Groups {
        if size < CUT_FROM { Groups::one(size) } else { Groups { size, ranks: GROUP_RANKS } }
    }

    /// All ranks join at rank 0.
    pub(super) fn one(size: usize) -> Groups {
        Groups { size, ranks: size }
    }

    /// At whom `rank` joins, which is not rank 0.
    pub(super) fn listener_of(&self, rank: Rank) -> Rank {
        match rank.index() % self.ranks {
            0 => Rank(0),
            number => Rank::from(rank.index() - number),
        }
    }

    /// Who joins through `rank`; nobody if it is no leader, or is rank 0.
    pub(super) fn members(&self, rank: Rank) -> Range<u32> {
        let first = rank.index();
        if first == 0 || first >= self.size || !first.is_multiple_of(self.ranks) {
            return 0..0;
        }
        rank.0 + 1..Rank::from((first + self.ranks).min(self.size)).0
    }

    /// Whether others join through `rank`.
    pub(super) fn leads(&self, rank: Rank) -> bool {
        !self.members(rank).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_joins_at_rank_0_or_at_a_leader_that_expects_it() {
        for size in [2, 72, 511, 512, 513, 640, 641, 642, 1000] {
            let groups = Groups::of(size);
            let mut told = vec![0; size];
            for rank in (1..size).map(Rank::from) {
                let at = groups.listener_of(rank);
                assert_eq!(
                    at == Rank(0),
                    size < CUT_FROM || rank.index() < GROUP_RANKS || rank.index() % GROUP_RANKS == 0
                );
                assert!(at == Rank(0) || groups.members(at).contains(&rank.0), "{rank} of {size} at {at}");
                groups.members(rank).for_each(|member| told[member as usize] += 1);
                assert_eq!(groups.leads(rank), !groups.members(rank).is_empty());
            }
            let expected = |rank| usize::from(groups.listener_of(Rank::from(rank)) != Rank(0));
            assert!((1..size).all(|rank| told[rank] == expected(rank)), "{size}");
        }
        assert!(!Groups::of(641).leads(Rank(640)), "a group of one rank has no leader");
        // A rank of another world size may be beyond this one.
        assert!(Groups::of(512).members(Rank(1024)).is_empty() && Groups::one(7).members(Rank(14)).is_empty());
        assert!([1, 3].into_iter().all(|size| Groups::one(size).members(Rank(u32::MAX)).is_empty()));
    }
}
