//! The ranks that take part in an algorithm, in an agreed order.

use crate::counts::Counts;
use crate::schedule::Slice;
use crate::types::Rank;

/// An ordered group of ranks and this rank's position in it. Positions, not ranks, are what algorithms compute with.
#[derive(Clone, Debug)]
pub struct Group {
    members: Members,
    position: usize,
}

#[derive(Clone, Debug)]
enum Members {
    /// Every rank of a world of this size, in order: no list, so that a plan takes no memory and time for it.
    All(usize),
    Listed(Vec<Rank>),
}

impl Group {
    /// The group of `members`, which `me` is one of.
    ///
    /// # Panics
    /// When `me` is not a member.
    pub fn new(members: Vec<Rank>, me: Rank) -> Self {
        let mut group = Group { members: Members::Listed(members), position: 0 };
        group.position = group.position(me);
        group
    }

    /// All ranks of a world of `size`, as seen from `me`.
    ///
    /// # Panics
    /// When `me` is not one of them.
    pub fn world(size: usize, me: Rank) -> Self {
        let mut group = Group { members: Members::All(size), position: 0 };
        group.position = group.position(me);
        group
    }

    /// The same members, counted from the one at `first` on, around.
    pub(super) fn starting_at(&self, first: usize) -> Group {
        let members = (0..self.size()).map(|step| self.rank(first + step)).collect();
        Group { members: Members::Listed(members), position: (self.me() + self.size() - first) % self.size() }
    }

    /// The number of members.
    pub fn size(&self) -> usize {
        match &self.members {
            Members::All(size) => *size,
            Members::Listed(members) => members.len(),
        }
    }

    /// This rank's position.
    pub fn me(&self) -> usize {
        self.position
    }

    /// The rank at `position`, counted around.
    pub fn rank(&self, position: usize) -> Rank {
        let position = position % self.size();
        match &self.members {
            Members::All(_) => Rank::from(position),
            Members::Listed(members) => members[position],
        }
    }

    /// The position of `rank`.
    ///
    /// # Panics
    /// When it is not a member.
    pub fn position(&self, rank: Rank) -> usize {
        let found = match &self.members {
            Members::All(size) => Some(rank.index()).filter(|position| position < size),
            Members::Listed(members) => members.iter().position(|member| *member == rank),
        };
        found.expect("the rank is in the group")
    }
}

/// Consecutive blocks, one a position, of the lengths `counts`, from the start of `all`.
pub fn blocks(all: Slice, counts: &Counts) -> Vec<Slice> {
    let mut offset = 0;
    let next = |count| {
        let block = all.part(offset, count);
        offset += count;
        block
    };
    counts.iter().map(next).collect()
}

/// `parts` nearly equal blocks of `all`.
pub fn pieces(all: Slice, parts: usize) -> Vec<Slice> {
    (0..parts).map(|index| all.piece(index, parts)).collect()
}

/// `count` of `parts` nearly equal pieces of `all` that follow each other, from the `first` on.
pub(super) fn run_of_pieces(all: Slice, first: usize, count: usize, parts: usize) -> Slice {
    let (begin, last) = (all.piece(first, parts), all.piece(first + count - 1, parts));
    Slice::new(all.space, begin.offset, last.offset + last.len - begin.offset)
}

/// `slice` cut into pieces of at most `chunk` elements; one empty piece if it is empty.
pub fn chunks(slice: Slice, chunk: usize) -> impl Iterator<Item = Slice> {
    let count = slice.len.div_ceil(chunk).max(1);
    (0..count).map(move |index| slice.part(index * chunk, chunk.min(slice.len - index * chunk)))
}
