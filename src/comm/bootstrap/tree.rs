//! By which ways the table of all ranks reaches each of them.
//!
//! In a small world rank 0 sends it to all. In a large one it goes down a tree, in which no rank but a leader sends it more than
//! 2 [`FAN_OUT`] times: from rank 0 to the first rank of each host, as in a heap of the hosts, and within each host likewise.
//! A rank below rank 0 that has joined through a [leader](super::groups) gets it from the leader instead, since rank 0 has no
//! connection to it. All ranks derive the same tree from the table.

use std::collections::HashMap;

use super::groups::Groups;
use crate::types::Rank;

/// Up to so many ranks get the table from rank 0, which has a connection to each.
pub(super) const STAR_RANKS: usize = 64;

/// To how many first ranks of hosts the first rank of a host sends the table; and any rank, to ranks of its host.
const FAN_OUT: usize = 16;

/// From whom each rank but rank 0 gets the table.
pub(super) struct Tree {
    parents: Vec<Rank>,
}

impl Tree {
    /// The tree of ranks on these hosts, in the order of ranks.
    pub(super) fn over<'a>(hosts: impl ExactSizeIterator<Item = &'a str>, groups: Groups) -> Tree {
        let mut parents = vec![Rank(0); hosts.len()];
        if parents.len() <= STAR_RANKS {
            return Tree { parents };
        }
        // The ranks of each host, which are numbered as they first appear.
        let mut ranks_of: Vec<Vec<Rank>> = Vec::new();
        let mut numbers = HashMap::new();
        for (rank, host) in hosts.enumerate() {
            let number = *numbers.entry(host).or_insert(ranks_of.len());
            if number == ranks_of.len() {
                ranks_of.push(Vec::new());
            }
            ranks_of[number].push(Rank::from(rank));
        }
        let firsts: Vec<Rank> = ranks_of.iter().map(|ranks| ranks[0]).collect();
        for heap in [firsts].iter().chain(&ranks_of) {
            for (place, rank) in heap.iter().enumerate().skip(1) {
                parents[rank.index()] = heap[(place - 1) / FAN_OUT];
            }
        }
        // That makes no circle: each rank gets it from one with a lower number, as before.
        for (rank, parent) in parents.iter_mut().enumerate().filter(|(_, parent)| **parent == Rank(0)) {
            *parent = groups.listener_of(Rank::from(rank));
        }
        Tree { parents }
    }

    /// The rank that sends the table to `rank`, which is not rank 0.
    pub(super) fn parent(&self, rank: Rank) -> Rank {
        self.parents[rank.index()]
    }

    /// The ranks that `rank` sends the table to.
    pub(super) fn children(&self, rank: Rank) -> Vec<Rank> {
        let others = self.parents.iter().enumerate().skip(1);
        others.filter(|(_, parent)| **parent == rank).map(|(child, _)| Rank::from(child)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often the table is sent one after the other until each rank has it, with `host` as the host of a rank.
    fn depths(groups: Groups, host: impl Fn(usize) -> usize) -> Vec<usize> {
        let size = groups.size;
        let names: Vec<String> = (0..size).map(|rank| host(rank).to_string()).collect();
        let tree = Tree::over(names.iter().map(String::as_str), groups);
        let most = |rank: usize| match () {
            () if size <= STAR_RANKS => STAR_RANKS,
            () if groups.leads(Rank::from(rank)) => 4 * FAN_OUT,
            () => 2 * FAN_OUT,
        };
        let mut children = vec![0; size];
        let depth_of = |rank: usize| {
            let ways = std::iter::successors(Some(Rank::from(rank)), |rank| Some(tree.parent(*rank)));
            ways.take_while(|rank| *rank != Rank(0)).take(size).count()
        };
        for rank in 1..size {
            let parent = tree.parent(Rank::from(rank));
            children[parent.index()] += 1;
            let (own, theirs) = (&names[rank], &names[parent.index()]);
            let is_first = names.iter().position(|name| name == own) == Some(rank);
            let is_by_leader = parent != Rank(0) && parent == groups.listener_of(Rank::from(rank));
            let is_known = own == theirs || is_first || is_by_leader || size <= STAR_RANKS;
            assert!(is_known, "only a host's first rank gets it from elsewhere");
            assert!(parent != Rank(0) || groups.listener_of(Rank::from(rank)) == Rank(0), "rank 0 knows it");
        }
        for (rank, count) in children.iter().enumerate() {
            assert!(*count <= most(rank), "rank {rank} of {size} sends it {count} times");
            assert_eq!(tree.children(Rank::from(rank)).len(), *count);
        }
        (0..size).map(depth_of).collect()
    }

    #[test]
    fn every_rank_gets_the_table_by_few_ranks_of_which_none_sends_it_often() {
        for size in [1, 2, 64, 65, 66, 100, 1000] {
            for ranks_per_host in [1, 3, 8, 1000] {
                for host in [|rank, of| rank / of, |rank: usize, of: usize| rank % of] {
                    for group in [size, 16, 128] {
                        let groups = if size <= STAR_RANKS { Groups::one(size) } else { Groups { size, ranks: group } };
                        let deepest = depths(groups, |rank| host(rank, ranks_per_host)).into_iter().max();
                        let limit = if size <= STAR_RANKS { 1 } else { 8 };
                        assert!(deepest.is_some_and(|deepest| deepest <= limit), "{size} ranks, {deepest:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_world_of_a_hundred_thousand_takes_a_handful_of_steps() {
        let names: Vec<String> = (0..100_000).map(|rank| (rank / 8).to_string()).collect();
        let tree = Tree::over(names.iter().map(String::as_str), Groups::of(names.len()));
        let mut depths = vec![0; names.len()];
        for rank in 1..names.len() {
            let parent = tree.parent(Rank::from(rank));
            assert!(parent.index() < rank, "of hosts in the order of ranks");
            depths[rank] = depths[parent.index()] + 1;
        }
        assert_eq!(depths.iter().max(), Some(&5));
    }
}
