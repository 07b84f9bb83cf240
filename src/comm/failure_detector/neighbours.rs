//! Which ranks monitor each other.

use std::collections::BTreeSet;

use crate::types::Rank;

/// The ranks that `me` monitors, and that monitor it.
///
/// They are its neighbours in a ring, and on both sides the rank about the square root of the size away. So every rank has at
/// least two monitors where there are as many other ranks, a notice reaches all ranks in about as many steps as that root,
/// and no rank has more than four connections.
pub(crate) fn neighbours(me: Rank, size: usize) -> BTreeSet<Rank> {
    let steps = [1, size.isqrt()];
    let both_ways = steps.iter().flat_map(|step| [me.index() + step, me.index() + size - step]);
    both_ways.map(|place| Rank::from(place % size)).filter(|rank| *rank != me).collect()
}

/// In a world of up to so many ranks all are neighbours.
pub(super) const ALL_NEIGHBOURS: usize = 5;

/// In how many steps a notice reaches all of so many ranks, at most.
pub(super) fn steps_to_all(size: usize) -> usize {
    size.isqrt() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In how many steps a notice of rank 0 reaches all ranks.
    fn steps_taken(size: usize) -> usize {
        let mut known = BTreeSet::from([Rank(0)]);
        for steps in 0.. {
            if known.len() == size {
                return steps;
            }
            let told: Vec<Rank> = known.iter().flat_map(|rank| neighbours(*rank, size)).collect();
            known.extend(told);
        }
        unreachable!("ranks are finite")
    }

    #[test]
    fn a_notice_reaches_all_ranks_in_few_steps() {
        for size in (1..70).chain([100, 500, 1000]) {
            assert_eq!(neighbours(Rank(0), size).len() == size - 1, size <= ALL_NEIGHBOURS, "{size} ranks");
            assert!(steps_taken(size) <= steps_to_all(size), "{size} ranks: {} steps", steps_taken(size));
        }
    }

    #[test]
    fn monitoring_is_mutual_and_cheap() {
        for size in 1..100 {
            for me in (0..size).map(Rank::from) {
                let monitored = neighbours(me, size);
                assert!(monitored.len() <= 4 && monitored.len() >= 2.min(size - 1), "{size} ranks: {monitored:?}");
                assert!(monitored.iter().all(|rank| *rank != me && neighbours(*rank, size).contains(&me)));
            }
        }
    }
}
