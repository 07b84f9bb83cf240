//! Numbers of elements, one for each rank.

use std::ops::Index;

/// How many elements each rank has. Equal numbers take no memory of their own, however they were made.
///
/// ```
/// use ncclx_rs::Counts;
/// let counts: Counts = vec![3, 0, 4].into();
/// assert_eq!((counts.len(), counts.total(), counts[2]), (3, 7, 4));
/// assert_eq!(Counts::from(vec![5, 5]), Counts::equal(5, 2));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Counts(Kind);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Equal {
        each: usize,
        ranks: usize,
    },
    /// Numbers of which at least two differ.
    Unequal(Box<[usize]>),
}

impl Counts {
    /// The same number on each of `ranks` ranks.
    pub const fn equal(each: usize, ranks: usize) -> Counts {
        Counts(Kind::Equal { each, ranks })
    }

    /// The number of ranks.
    pub fn len(&self) -> usize {
        match &self.0 {
            Kind::Equal { ranks, .. } => *ranks,
            Kind::Unequal(counts) => counts.len(),
        }
    }

    /// Whether there are no ranks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether all ranks have the same number.
    pub fn are_equal(&self) -> bool {
        matches!(self.0, Kind::Equal { .. })
    }

    /// The bytes of heap memory that they take.
    pub(crate) fn bytes(&self) -> usize {
        match &self.0 {
            Kind::Equal { .. } => 0,
            Kind::Unequal(counts) => size_of_val(&**counts),
        }
    }

    /// The elements of all ranks together.
    ///
    /// # Panics
    /// When a `usize` cannot hold their number.
    pub fn total(&self) -> usize {
        self.checked_total().expect("counts whose sum was checked when they came in")
    }

    /// The elements of all ranks together; none if a `usize` cannot hold their number.
    pub fn checked_total(&self) -> Option<usize> {
        match &self.0 {
            Kind::Equal { each, ranks } => each.checked_mul(*ranks),
            Kind::Unequal(counts) => counts.iter().try_fold(0, |sum: usize, count| sum.checked_add(*count)),
        }
    }

    /// A number that other counts are unlikely to have; zero for equal counts, which their sum identifies.
    pub(crate) fn fingerprint(&self) -> u32 {
        let Kind::Unequal(counts) = &self.0 else { return 0 };
        // FNV-1a over whole numbers: a change of any number or of their order changes the result.
        let mix = |hash: u64, count: &usize| (hash ^ *count as u64).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
        let hash = counts.iter().fold(0xcbf2_9ce4_8422_2325, mix);
        ((hash ^ (hash >> 32)) as u32).max(1)
    }

    /// The numbers by rank.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        (0..self.len()).map(|rank| self[rank])
    }
}

impl Index<usize> for Counts {
    type Output = usize;

    fn index(&self, rank: usize) -> &usize {
        match &self.0 {
            Kind::Equal { each, ranks } => {
                assert!(rank < *ranks, "there is no rank {rank} among {ranks}");
                each
            }
            Kind::Unequal(counts) => &counts[rank],
        }
    }
}

impl FromIterator<usize> for Counts {
    fn from_iter<I: IntoIterator<Item = usize>>(counts: I) -> Counts {
        let mut counts = counts.into_iter();
        let Some(each) = counts.next() else { return Counts::equal(0, 0) };
        let mut ranks = 1;
        for count in &mut counts {
            if count != each {
                let same = std::iter::repeat_n(each, ranks);
                return Counts(Kind::Unequal(same.chain([count]).chain(counts).collect()));
            }
            ranks += 1;
        }
        Counts::equal(each, ranks)
    }
}

impl From<Vec<usize>> for Counts {
    fn from(counts: Vec<usize>) -> Counts {
        counts.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn they_are_the_numbers_they_were_made_of(numbers in proptest::collection::vec(0..3_usize, 0..6)) {
            let counts = Counts::from(numbers.clone());
            prop_assert_eq!(counts.iter().collect::<Vec<_>>(), numbers.clone());
            prop_assert_eq!((counts.len(), counts.total()), (numbers.len(), numbers.iter().sum()));
            prop_assert_eq!(counts.are_equal(), numbers.windows(2).all(|pair| pair[0] == pair[1]));
        }
    }

    #[test]
    fn a_sum_that_is_too_large_is_none() {
        assert_eq!(Counts::from(vec![8, usize::MAX - 3, 6]).checked_total(), None);
        assert_eq!(Counts::from(vec![8, usize::MAX - 8]).checked_total(), Some(usize::MAX));
        assert_eq!(Counts::equal(usize::MAX / 2, 3).checked_total(), None);
        assert_eq!(Counts::equal(usize::MAX / 2, 2).checked_total(), Some(usize::MAX - 1));
    }

    #[test]
    fn a_fingerprint_tells_unequal_counts_apart() {
        let of = |counts: &[usize]| Counts::from(counts.to_vec()).fingerprint();
        assert_eq!((of(&[3, 3, 3]), of(&[])), (0, 0));
        let (one, turned) = (of(&[1, 2, 3]), of(&[2, 1, 3]));
        assert!(one > 0 && one == of(&[1, 2, 3]));
        assert!(one != turned && one != of(&[1, 2, 3, 0]) && one != of(&[0, 2, 4]) && one != of(&[1, 2, 1 << 40]));
    }
}
