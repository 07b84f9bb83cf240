//! A number or two for each rank, in worlds of which most ranks are never heard of.
//!
//! The values are in pages, which are made as one of their ranks is first written to. All others read as the default.

use crate::types::Rank;

/// The ranks of a page.
const PAGE: usize = 16;

/// A value for every rank.
#[derive(Clone, Debug)]
pub(crate) struct PerRank<T> {
    size: usize,
    pages: Vec<Option<Box<[T; PAGE]>>>,
}

impl<T: Copy + Default> PerRank<T> {
    /// The default for each of so many ranks.
    pub(crate) fn new(size: usize) -> PerRank<T> {
        PerRank { size, pages: vec![None; size.div_ceil(PAGE)] }
    }

    /// The number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// The value of `rank`.
    #[inline]
    pub(crate) fn get(&self, rank: Rank) -> T {
        self.pages[rank.index() / PAGE].as_ref().map_or_else(T::default, |page| page[rank.index() % PAGE])
    }

    /// The value of `rank`, to be written.
    #[inline]
    pub(crate) fn get_mut(&mut self, rank: Rank) -> &mut T {
        let page = self.pages[rank.index() / PAGE].get_or_insert_with(new_page);
        &mut page[rank.index() % PAGE]
    }
}

#[cold]
fn new_page<T: Copy + Default>() -> Box<[T; PAGE]> {
    Box::new([T::default(); PAGE])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_a_value_of_its_own() {
        let mut values = PerRank::new(100);
        for rank in (0..100).step_by(3) {
            *values.get_mut(Rank(rank)) = rank + 1;
        }
        for rank in 0..100 {
            assert_eq!(values.get(Rank(rank)), if rank % 3 == 0 { rank + 1 } else { 0 });
        }
        assert_eq!(values.size(), 100);
    }

    #[test]
    fn ranks_that_were_never_written_to_take_a_byte_at_most() {
        let mut values: PerRank<[u64; 3]> = PerRank::new(10_000);
        assert!(values.pages.len() * size_of::<Option<Box<[[u64; 3]; PAGE]>>>() <= 10_000);
        for rank in [0, 15, 9_999] {
            assert_eq!(values.get(Rank(rank)), [0; 3]);
            values.get_mut(Rank(rank))[0] = 1;
        }
        assert_eq!(values.pages.iter().flatten().count(), 2, "reading takes no memory");
    }
}
