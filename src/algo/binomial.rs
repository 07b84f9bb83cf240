//! Binomial trees: ⌈log₂ n⌉ rounds from or to a root; see Thakur, Rabenseifner and Gropp, 2005.
//!
//! Positions are counted from the root. The parent of v is v without its lowest set bit; its subtree is the run of
//! positions from v on, as long as that bit.

use crate::algo::direct;
use crate::algo::group::{Group, chunks, run_of_pieces};
use crate::counts::Counts;
use crate::schedule::{Action, Builder, Slice};
use crate::types::Rank;

/// One rank's place in a tree.
struct Tree<'a> {
    group: &'a Group,
    root: usize,
    /// This rank's position counted from the root.
    me: usize,
}

impl<'a> Tree<'a> {
    fn new(group: &'a Group, root: Rank) -> Self {
        let root = group.position(root);
        let me = (group.me() + group.size() - root) % group.size();
        Tree { group, root, me }
    }

    fn rank(&self, relative: usize) -> Rank {
        self.group.rank(self.root + relative)
    }

    fn parent(&self) -> Option<Rank> {
        (self.me > 0).then(|| self.rank(self.me & (self.me - 1)))
    }

    /// Children as relative positions, those with the largest subtrees first.
    fn children(&self) -> Vec<usize> {
        let limit = if self.me == 0 { self.group.size().next_power_of_two() } else { 1 << self.me.trailing_zeros() };
        let mut bit = limit / 2;
        let mut children = Vec::new();
        while bit > 0 {
            if self.me + bit < self.group.size() {
                children.push(self.me + bit);
            }
            bit /= 2;
        }
        children
    }

    /// The number of positions in the subtree of `relative`.
    fn subtree(&self, relative: usize) -> usize {
        let size = self.group.size();
        if relative == 0 { size } else { (1 << relative.trailing_zeros()).min(size - relative) }
    }
}

/// The root's `data` goes to everyone's `data`.
pub fn broadcast(builder: &mut Builder, group: &Group, root: Rank, data: Slice, chunk: usize) {
    let tree = Tree::new(group, root);
    for part in chunks(data, chunk) {
        if let Some(parent) = tree.parent() {
            builder.push(Action::Recv { from: parent, into: part });
        }
        for child in tree.children() {
            builder.push(Action::Send { to: tree.rank(child), from: part });
        }
    }
}

/// Everyone's `data` is combined into the root's; on other ranks `data` ends undefined.
pub fn reduce(builder: &mut Builder, group: &Group, root: Rank, data: Slice, chunk: usize) {
    let tree = Tree::new(group, root);
    for part in chunks(data, chunk) {
        for child in tree.children().into_iter().rev() {
            builder.push(Action::RecvReduce { from: tree.rank(child), into: part });
        }
        if let Some(parent) = tree.parent() {
            builder.push(Action::Send { to: parent, from: part });
        }
    }
}

/// Everyone's `own` goes to the root's `all`, which holds one block a position; elsewhere `all` is not used.
pub fn gather(builder: &mut Builder, group: &Group, root: Rank, own: Slice, all: Option<Slice>) {
    let tree = Tree::new(group, root);
    let count = own.len;
    // Blocks are kept in the tree's order, which on the root is turned into the order of positions at the end.
    let held = builder.scratch(Counts::equal(count, tree.subtree(tree.me)).total());
    builder.push(Action::Copy { from: own, into: held.part(0, count) });
    for child in tree.children().into_iter().rev() {
        let into = held.part((child - tree.me) * count, tree.subtree(child) * count);
        builder.push(Action::Recv { from: tree.rank(child), into });
    }
    match (tree.parent(), all) {
        (Some(parent), _) => {
            builder.push(Action::Send { to: parent, from: held });
        }
        (None, Some(all)) => {
            for relative in 0..group.size() {
                let position = (tree.root + relative) % group.size();
                let into = all.part(position * count, count);
                builder.push(Action::Copy { from: held.part(relative * count, count), into });
            }
        }
        (None, None) => {}
    }
}

/// The root's `all`, one block a position, goes to everyone's `own`; elsewhere `all` is not used.
pub fn scatter(builder: &mut Builder, group: &Group, root: Rank, all: Option<Slice>, own: Slice) {
    let tree = Tree::new(group, root);
    let count = own.len;
    let held = builder.scratch(Counts::equal(count, tree.subtree(tree.me)).total());
    match (tree.parent(), all) {
        (Some(parent), _) => {
            builder.push(Action::Recv { from: parent, into: held });
        }
        (None, Some(all)) => {
            for relative in 0..group.size() {
                let position = (tree.root + relative) % group.size();
                let from = all.part(position * count, count);
                builder.push(Action::Copy { from, into: held.part(relative * count, count) });
            }
        }
        (None, None) => {}
    }
    for child in tree.children() {
        let from = held.part((child - tree.me) * count, tree.subtree(child) * count);
        builder.push(Action::Send { to: tree.rank(child), from });
    }
    builder.push(Action::Copy { from: held.part(0, count), into: own });
}

/// Of the `data` of the member at position 0, each member receives the pieces, one a position, of its subtree.
pub fn scatter_in_place(builder: &mut Builder, group: &Group, data: Slice, chunk: usize) {
    let tree = Tree::new(group, group.rank(0));
    let run = |relative| run_of_pieces(data, relative, tree.subtree(relative), group.size());
    if let Some(parent) = tree.parent() {
        direct::receive_in_chunks(builder, parent, run(tree.me), chunk);
    }
    for child in tree.children() {
        direct::send_in_chunks(builder, tree.rank(child), run(child), chunk);
    }
}
