//! Which ranks are alike, so that something else than the engine moves data among them: a vendor's library.

use crate::schedule::{Slice, Space};
use crate::types::Rank;

/// The groups of ranks that are alike. The same on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Islands {
    /// Every rank is in one. A rank that is like no other is one alone.
    groups: Vec<Vec<Rank>>,
}

impl Islands {
    /// These groups, in the order of their first ranks. Each has its ranks in order.
    pub fn new(mut groups: Vec<Vec<Rank>>) -> Islands {
        groups.iter_mut().for_each(|group| group.sort());
        groups.sort();
        Islands { groups }
    }

    /// The groups.
    pub fn groups(&self) -> &[Vec<Rank>] {
        &self.groups
    }

    /// The number of the group that a rank is in.
    ///
    /// # Panics
    /// When it is in none.
    pub fn group_of(&self, rank: Rank) -> usize {
        self.groups.iter().position(|group| group.contains(&rank)).expect("every rank is in a group")
    }

    /// The part of `count` elements that a rank has of what its group has together: all that it sends to other groups, and gets
    /// from them. One that is alone has all.
    ///
    /// # Panics
    /// When it is in no group.
    pub fn part_of(&self, rank: Rank, count: usize) -> Slice {
        let group = &self.groups[self.group_of(rank)];
        let place = group.iter().position(|member| *member == rank).expect("the rank is in its group");
        Slice::new(Space::Output, 0, count).piece(place, group.len())
    }

    /// The runs of `count` elements that lie in one part in every group, each with the ranks whose part that is, by group.
    pub(crate) fn runs(&self, count: usize) -> Vec<(Slice, Vec<Rank>)> {
        let all = Slice::new(Space::Output, 0, count);
        let ends = |group: &Vec<Rank>| (0..group.len()).map(|place| all.piece(place, group.len())).collect::<Vec<_>>();
        let parts: Vec<Vec<Slice>> = self.groups.iter().map(ends).collect();
        let mut cuts: Vec<usize> = parts.iter().flatten().map(|part| part.offset + part.len).collect();
        cuts.sort_unstable();
        cuts.dedup();
        let mut begin = 0;
        let mut runs = Vec::new();
        for end in cuts.into_iter().filter(|end| *end > 0) {
            let run = all.part(begin, end - begin);
            let owner = |(group, parts): (&Vec<Rank>, &Vec<Slice>)| {
                group[parts.iter().position(|part| part.contains(run)).expect("parts are cut where runs are")]
            };
            runs.push((run, self.groups.iter().zip(&parts).map(owner).collect()));
            begin = end;
        }
        runs
    }
}

/// What is called of ranks that are in islands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IslandCall {
    /// Everyone gets the reduction.
    AllReduce,
    /// Everyone gets the root's data.
    Broadcast {
        /// Whose data.
        root: Rank,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_lie_in_one_part_of_every_group() {
        let [a, b, c, d, e, f] = [0, 1, 2, 3, 4, 5].map(Rank);
        let islands = Islands::new(vec![vec![f], vec![e, d], vec![a, b, c]]);
        assert_eq!(islands.groups(), [vec![a, b, c], vec![d, e], vec![f]]);
        assert_eq!(islands.part_of(e, 7), Slice::new(Space::Output, 4, 3));
        let runs = islands.runs(7).into_iter().map(|(run, owners)| (run.offset, run.len, owners));
        let expected = [(0, 3, vec![a, d, f]), (3, 1, vec![b, d, f]), (4, 1, vec![b, e, f]), (5, 2, vec![c, e, f])];
        assert_eq!(runs.collect::<Vec<_>>(), expected);
        assert!(islands.runs(0).is_empty());
    }
}
