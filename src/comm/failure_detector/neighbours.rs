//! Who watches whom.

use std::collections::BTreeSet;

use crate::types::Rank;

/// The ranks that `me` watches, which watch it too: those beside it in a circle, and on both sides one about the square
/// root of the size away. So every rank has two watchers or more, news pass from one to all in about as many steps as
/// that root, and no rank has more than four connections.
pub(in crate::comm) fn neighbours(me: Rank, size: usize) -> BTreeSet<Rank> {
    let steps = [1, size.isqrt()];
    let both_ways = steps.iter().flat_map(|step| [me.index() + step, me.index() + size - step]);
    both_ways.map(|place| Rank::from(place % size)).filter(|rank| *rank != me).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In how many steps news of rank 0 are everywhere.
    fn reach(size: usize) -> usize {
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
    fn news_pass_to_all_in_few_steps() {
        for size in (1..70).chain([100, 500, 1000]) {
            assert!(reach(size) <= size.isqrt() + 1, "{size} ranks: {} steps", reach(size));
        }
    }

    #[test]
    fn watching_is_mutual_and_cheap() {
        for size in 1..100 {
            for me in (0..size).map(Rank::from) {
                let watched = neighbours(me, size);
                assert!(watched.len() <= 4 && watched.len() >= 2.min(size - 1), "{size} ranks: {watched:?}");
                assert!(watched.iter().all(|rank| *rank != me && neighbours(*rank, size).contains(&me)));
            }
        }
    }
}
