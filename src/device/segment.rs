//! A long collective is a sequence of shorter ones, each of which fits into staging memory.
//!
//! A segment is the same stretch of every block: of each rank's block, or of the whole data where that is the only block, as in
//! a broadcast. The blocks of an all_reduce by a ring are its stripes, so each element is combined in the order in which it
//! would be if the collective were not cut.

use smallvec::SmallVec;

use crate::algo::Collective;
use crate::algo::group::pieces;
use crate::algo::select::combines_by_stripes;
use crate::counts::Counts;
use crate::schedule::{Slice, Space};
use crate::types::Rank;

/// A collective over a stretch of another one's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The collective over the stretch.
    pub collective: Collective,
    /// Where the elements of its input lie in the whole input.
    pub input: Extent,
    /// Where those of its output lie in the whole output.
    pub output: Extent,
}

/// Where the elements that a schedule counts end to end lie in a tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    runs: SmallVec<[Run; 1]>,
}

/// Elements that lie together in segment and tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first one's number in the segment.
    pub at: usize,
    /// Its number in the whole tensor.
    pub offset: usize,
    /// How many they are.
    pub len: usize,
}

impl Extent {
    /// Stretches of blocks: the offset of each in the tensor, and its length.
    fn of(stretches: impl IntoIterator<Item = (usize, usize)>) -> Extent {
        let mut runs: SmallVec<[Run; 1]> = SmallVec::new();
        let mut at = 0;
        for (offset, len) in stretches.into_iter().filter(|(_, len)| *len > 0) {
            match runs.last_mut() {
                Some(last) if last.offset + last.len == offset => last.len += len,
                _ => runs.push(Run { at, offset, len }),
            }
            at += len;
        }
        Extent { runs }
    }

    /// How much memory it takes, beside its own size.
    fn bytes(&self) -> usize {
        if self.runs.spilled() { self.runs.len() * size_of::<Run>() } else { 0 }
    }

    /// The parts of a slice that lie together in the tensor.
    ///
    /// ```
    /// use ncclx_rs::algo::Collective;
    /// use ncclx_rs::device::segment::Cut;
    /// use ncclx_rs::schedule::{Slice, Space};
    /// use ncclx_rs::{Counts, Rank};
    /// let all_gather = Collective::AllGather { counts: Counts::equal(10, 2) };
    /// let segment = Cut::new("direct", &all_gather, 2).segment(Rank(0), 4, 3).unwrap();
    /// let parts: Vec<_> = segment.output.parts(Slice::new(Space::Output, 2, 2)).map(|run| run.offset).collect();
    /// assert_eq!(parts, [6, 14]); // the last element of the first block's stretch, the first of the second one's
    /// ```
    pub fn parts(&self, slice: Slice) -> impl Iterator<Item = Run> + '_ {
        let (begin, end) = (slice.offset, slice.offset + slice.len);
        let cut = move |run: &Run| {
            let (first, last) = (run.at.max(begin), (run.at + run.len).min(end));
            (first < last).then(|| Run { at: first, offset: run.offset + (first - run.at), len: last - first })
        };
        self.runs.iter().filter_map(cut)
    }
}

impl Segment {
    /// How much memory it takes, beside its own size.
    pub(crate) fn bytes(&self) -> usize {
        self.collective.bytes() + self.input.bytes() + self.output.bytes()
    }

    /// A whole operation, whose programs take elements where they are: so many of its input and of its output.
    pub(crate) fn whole(collective: Collective, input: usize, output: usize) -> Segment {
        Segment { collective, input: Extent::of([(0, input)]), output: Extent::of([(0, output)]) }
    }
}

/// A collective, to be cut into segments.
#[derive(Clone, Copy, Debug)]
pub struct Cut<'a> {
    whole: &'a Collective,
    size: usize,
    /// Whether the blocks of an all_reduce are stripes, one a rank.
    has_stripes: bool,
}

impl<'a> Cut<'a> {
    /// `whole` on so many ranks, by the algorithm of this name.
    pub fn new(algorithm: &str, whole: &'a Collective, size: usize) -> Cut<'a> {
        Cut { whole, size, has_stripes: combines_by_stripes(algorithm) }
    }

    /// The stripes of an all_reduce, as an algorithm cuts them.
    fn stripes(&self, count: usize) -> Counts {
        pieces(Slice::new(Space::Input, 0, count), self.size).iter().map(|stripe| stripe.len).collect()
    }

    /// The `len` elements from the `from`-th of every block on, as rank `me` has them; fewer where blocks end
    /// before. Nothing for an all_to_all, of which no rank knows all blocks.
    pub fn segment(&self, me: Rank, from: usize, len: usize) -> Option<Segment> {
        let within = |count: usize| len.min(count.saturating_sub(from));
        let cut = |counts: &Counts| match counts.are_equal() {
            true => Counts::equal(within(counts[0]), counts.len()),
            false => counts.iter().map(within).collect(),
        };
        let block = |count: usize| Extent::of([(from, within(count))]);
        let blocks = |counts: &Counts| {
            let mut begin = 0;
            Extent::of(counts.iter().map(|count| {
                let stretch = (begin + from, within(count));
                begin += count;
                stretch
            }))
        };
        let on_root = |root: Rank, count: usize| match root == me {
            true => blocks(&Counts::equal(count, self.size)),
            false => Extent::default(),
        };
        let (collective, input, output) = match *self.whole {
            Collective::AllReduce { count } if self.has_stripes => {
                let stripes = self.stripes(count);
                (Collective::AllReduce { count: cut(&stripes).total() }, blocks(&stripes), blocks(&stripes))
            }
            Collective::AllReduce { count } => {
                (Collective::AllReduce { count: within(count) }, block(count), block(count))
            }
            Collective::Reduce { count, root } => {
                (Collective::Reduce { count: within(count), root }, block(count), block(count))
            }
            Collective::Broadcast { count, root } => {
                (Collective::Broadcast { count: within(count), root }, block(count), block(count))
            }
            Collective::AllGather { ref counts } => {
                (Collective::AllGather { counts: cut(counts) }, block(counts[me.index()]), blocks(counts))
            }
            Collective::ReduceScatter { ref counts } => {
                (Collective::ReduceScatter { counts: cut(counts) }, blocks(counts), block(counts[me.index()]))
            }
            Collective::Gather { count, root } => {
                (Collective::Gather { count: within(count), root }, block(count), on_root(root, count))
            }
            Collective::Scatter { count, root } => {
                (Collective::Scatter { count: within(count), root }, on_root(root, count), block(count))
            }
            // Nothing of it is staged, so it is one segment.
            Collective::AllGatherIntoParts { count } => {
                (self.whole.clone(), block(count), blocks(&Counts::equal(count, self.size)))
            }
            Collective::Barrier => (Collective::Barrier, Extent::default(), Extent::default()),
            Collective::AllToAll { .. } => return None,
            Collective::EqualAllToAll { .. } | Collective::ByIslands { .. } => unreachable!("devices ask for neither"),
        };
        Some(Segment { collective, input, output })
    }

    /// The elements of the longest block: the first segment begins at 0, the last one ends here.
    pub fn longest_block(&self) -> usize {
        match self.whole {
            Collective::AllReduce { count } if self.has_stripes => count.div_ceil(self.size),
            Collective::AllReduce { count }
            | Collective::AllGatherIntoParts { count }
            | Collective::Reduce { count, .. }
            | Collective::Broadcast { count, .. }
            | Collective::Gather { count, .. }
            | Collective::Scatter { count, .. } => *count,
            Collective::AllGather { counts } | Collective::ReduceScatter { counts } => counts.iter().max().unwrap_or(0),
            Collective::AllToAll { .. }
            | Collective::EqualAllToAll { .. }
            | Collective::Barrier
            | Collective::ByIslands { .. } => 0,
        }
    }

    /// How many elements of every block a segment has at most, so that `bytes` of it are no more than `half`. The same on every
    /// rank, as the arguments are.
    pub fn longest(&self, half: usize, mut bytes: impl FnMut(usize) -> usize) -> Result<usize, StagingTooSmall> {
        let mut len = self.longest_block().max(1);
        loop {
            let needed = bytes(len);
            match len {
                _ if needed <= half => return Ok(len),
                1 => return Err(StagingTooSmall { needed, half }),
                _ => len = len.div_ceil(2),
            }
        }
    }
}

/// A segment of one element a block does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("one element a block takes {needed} bytes of staging memory, of which {half} may be used at a time")]
pub struct StagingTooSmall {
    /// The bytes that one rank needs.
    pub needed: usize,
    /// Those that it has.
    pub half: usize,
}
