//! `Grid`, ranks in a grid with named dimensions.

use crate::place;

/// A dimension of a grid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dimension {
    /// The name.
    pub name: String,
    /// The number of ranks along it.
    pub size: usize,
    /// The distance of neighbours along it in [`Grid::ranks`].
    pub stride: usize,
}

/// The error of a grid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GridError {
    /// The product of the sizes is not the number of ranks.
    #[error("the dimensions {dimensions} make {product} ranks, but there are {ranks}")]
    Product {
        /// The dimensions, as `dp=2, tp=3`.
        dimensions: String,
        /// The product of their sizes.
        product: usize,
        /// The number of ranks.
        ranks: usize,
    },
    /// A dimension without ranks.
    #[error("dimension `{0}` has size 0")]
    Empty(String),
    /// Two dimensions of one name.
    #[error("there are two dimensions `{0}`")]
    Repeated(String),
    /// No dimension of that name.
    #[error("there is no dimension `{name}` among {known}")]
    Unknown {
        /// The requested name.
        name: String,
        /// The existing names.
        known: String,
    },
    /// Dimensions that cannot be flattened, because they are not adjacent or not in order.
    #[error("dimensions {0} are not neighbours in this order")]
    Apart(String),
    /// A rank that is not in the grid.
    #[error("rank {0} is not in the grid")]
    NotCovered(usize),
}

/// Ranks in a grid with named dimensions, the last of which varies fastest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    dimensions: Vec<Dimension>,
    ranks: Vec<usize>,
}

impl Grid {
    /// Lays out the ranks `0..hosts.len()` host by host, so that the last dimension stays inside a host wherever that is
    /// possible. It should be the dimension with the most communication.
    pub fn new(dimensions: &[(&str, usize)], hosts: &[usize]) -> Result<Grid, GridError> {
        Grid::of(dimensions, place::by_host(hosts))
    }

    /// As [`Grid::new`], but the dimension to keep inside a host is `innermost`.
    pub fn with_innermost(dimensions: &[(&str, usize)], innermost: &str, hosts: &[usize]) -> Result<Grid, GridError> {
        let plain = Grid::new(dimensions, hosts)?;
        let moved = plain.position(innermost)?;
        let mut order: Vec<usize> = (0..dimensions.len()).filter(|dim| *dim != moved).collect();
        order.push(moved);
        let reordered: Vec<(&str, usize)> = order.iter().map(|&dim| dimensions[dim]).collect();
        let placed = Grid::new(&reordered, hosts)?;
        let names: Vec<&str> = dimensions.iter().map(|(name, _)| *name).collect();
        placed.transposed(&names)
    }

    fn of(dimensions: &[(&str, usize)], ranks: Vec<usize>) -> Result<Grid, GridError> {
        let mut grid = Grid { dimensions: Vec::new(), ranks };
        for (index, (name, size)) in dimensions.iter().enumerate() {
            if *size == 0 {
                return Err(GridError::Empty((*name).to_owned()));
            }
            if dimensions[..index].iter().any(|(other, _)| other == name) {
                return Err(GridError::Repeated((*name).to_owned()));
            }
            let stride = dimensions[index + 1..].iter().map(|(_, size)| size).product();
            grid.dimensions.push(Dimension { name: (*name).to_owned(), size: *size, stride });
        }
        let product: usize = dimensions.iter().map(|(_, size)| size).product();
        if product != grid.ranks.len() {
            let all: Vec<String> = dimensions.iter().map(|(name, size)| format!("{name}={size}")).collect();
            return Err(GridError::Product { dimensions: all.join(", "), product, ranks: grid.ranks.len() });
        }
        Ok(grid)
    }

    /// The dimensions, the last of which varies fastest.
    pub fn dimensions(&self) -> &[Dimension] {
        &self.dimensions
    }

    /// The ranks, in the order of the grid.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// The coordinates of `rank`.
    pub fn coordinates(&self, rank: usize) -> Result<Vec<usize>, GridError> {
        let at = self.ranks.iter().position(|other| *other == rank).ok_or(GridError::NotCovered(rank))?;
        Ok(self.dimensions.iter().map(|dim| at / dim.stride % dim.size).collect())
    }

    /// The groups along a dimension. The ranks of a group differ only in that coordinate.
    pub fn groups(&self, name: &str) -> Result<Vec<Vec<usize>>, GridError> {
        let dim = &self.dimensions[self.position(name)?];
        let first = |at: &usize| (at / dim.stride).is_multiple_of(dim.size);
        let group = |at: usize| (0..dim.size).map(|step| self.ranks[at + step * dim.stride]).collect();
        Ok((0..self.ranks.len()).filter(first).map(group).collect())
    }

    /// The grids of the dimensions `names`, one for each choice of the other coordinates.
    pub fn slices(&self, names: &[&str]) -> Result<Vec<Grid>, GridError> {
        let kept: Vec<usize> = names.iter().map(|name| self.position(name)).collect::<Result<_, _>>()?;
        if !kept.is_sorted() {
            return Err(GridError::Apart(names.join(", ")));
        }
        let mut slices: Vec<(Vec<usize>, Vec<usize>)> = Vec::new();
        for (at, rank) in self.ranks.iter().enumerate() {
            let others = self.dimensions.iter().enumerate().filter(|(dim, _)| !kept.contains(dim));
            let key: Vec<usize> = others.map(|(_, dim)| at / dim.stride % dim.size).collect();
            match slices.iter_mut().find(|(known, _)| *known == key) {
                Some((_, ranks)) => ranks.push(*rank),
                None => slices.push((key, vec![*rank])),
            }
        }
        let shape: Vec<(&str, usize)> = names.iter().zip(&kept).map(|(name, dim)| (*name, self.size(*dim))).collect();
        slices.into_iter().map(|(_, ranks)| Grid::of(&shape, ranks)).collect()
    }

    /// The grid with the adjacent dimensions `names` joined into one, named `into`.
    pub fn flatten(&self, names: &[&str], into: &str) -> Result<Grid, GridError> {
        let merged: Vec<usize> = names.iter().map(|name| self.position(name)).collect::<Result<_, _>>()?;
        if merged.windows(2).any(|pair| pair[1] != pair[0] + 1) {
            return Err(GridError::Apart(names.join(", ")));
        }
        let size = merged.iter().map(|dim| self.size(*dim)).product();
        let mut shape: Vec<(&str, usize)> = Vec::new();
        for (index, dim) in self.dimensions.iter().enumerate() {
            if merged.first() == Some(&index) {
                shape.push((into, size));
            } else if !merged.contains(&index) {
                shape.push((&dim.name, dim.size));
            }
        }
        Grid::of(&shape, self.ranks.clone())
    }

    /// The grid with the dimension `name` split into `parts`, the last of which varies fastest.
    pub fn unflatten(&self, name: &str, parts: &[(&str, usize)]) -> Result<Grid, GridError> {
        let split = self.position(name)?;
        let mut shape: Vec<(&str, usize)> = Vec::new();
        for (index, dim) in self.dimensions.iter().enumerate() {
            if index == split {
                shape.extend(parts);
            } else {
                shape.push((&dim.name, dim.size));
            }
        }
        Grid::of(&shape, self.ranks.clone())
    }

    /// The grid with its dimensions in the order of `names`, which must name all of them.
    fn transposed(&self, names: &[&str]) -> Result<Grid, GridError> {
        let order: Vec<usize> = names.iter().map(|name| self.position(name)).collect::<Result<_, _>>()?;
        let shape: Vec<(&str, usize)> = names.iter().zip(&order).map(|(name, dim)| (*name, self.size(*dim))).collect();
        let mut target = Grid::of(&shape, self.ranks.clone())?;
        for at in 0..self.ranks.len() {
            let coordinate = |dim: &Dimension| at / dim.stride % dim.size;
            let source: usize = target
                .dimensions
                .iter()
                .zip(&order)
                .map(|(dim, from)| coordinate(dim) * self.dimensions[*from].stride)
                .sum();
            target.ranks[at] = self.ranks[source];
        }
        Ok(target)
    }

    fn position(&self, name: &str) -> Result<usize, GridError> {
        let known = || self.dimensions.iter().map(|dim| dim.name.as_str()).collect::<Vec<_>>().join(", ");
        let found = self.dimensions.iter().position(|dim| dim.name == name);
        found.ok_or_else(|| GridError::Unknown { name: name.to_owned(), known: known() })
    }

    fn size(&self, dim: usize) -> usize {
        self.dimensions[dim].size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

    /// Up to five dimensions of up to four ranks, and the host of each rank.
    fn worlds() -> impl Strategy<Value = (Vec<(&'static str, usize)>, Vec<usize>)> {
        prop::collection::vec(1usize..=4, 1..=5).prop_flat_map(|sizes| {
            let ranks: usize = sizes.iter().product();
            let shape: Vec<_> = NAMES.into_iter().zip(sizes).collect();
            (Just(shape), prop::collection::vec(0usize..3, ranks))
        })
    }

    proptest! {
        #[test]
        fn groups_partition_the_ranks_and_differ_in_one_coordinate((shape, hosts) in worlds()) {
            let grid = Grid::new(&shape, &hosts).expect("the sizes fit");
            for (dim, (name, size)) in shape.iter().enumerate() {
                let groups = grid.groups(name).expect("a dimension");
                let mut all: Vec<usize> = groups.iter().flatten().copied().collect();
                all.sort_unstable();
                prop_assert!(all.iter().copied().eq(0..hosts.len()));
                for group in groups {
                    prop_assert_eq!(group.len(), *size);
                    let at = |rank: usize| grid.coordinates(rank).expect("in the grid");
                    for (step, rank) in group.iter().enumerate() {
                        let mut expected = at(group[0]);
                        expected[dim] = step;
                        prop_assert_eq!(at(*rank), expected);
                    }
                }
            }
        }

        #[test]
        fn flattening_and_unflattening_undo_each_other((shape, hosts) in worlds()) {
            let grid = Grid::new(&shape, &hosts).expect("the sizes fit");
            let names: Vec<&str> = shape.iter().map(|(name, _)| *name).collect();
            let flat = grid.flatten(&names, "all").expect("neighbours");
            prop_assert_eq!(flat.groups("all").expect("a dimension"), vec![grid.ranks().to_vec()]);
            prop_assert_eq!(flat.unflatten("all", &shape).expect("the sizes fit"), grid);
        }

        #[test]
        fn slices_have_the_groups_of_the_whole((shape, hosts) in worlds(), choice: u8) {
            let grid = Grid::new(&shape, &hosts).expect("the sizes fit");
            let kept: Vec<&str> =
                shape.iter().enumerate().filter(|(i, _)| choice >> i & 1 == 1).map(|(_, (name, _))| *name).collect();
            let slices = grid.slices(&kept).expect("in order");
            for name in kept {
                let mut from_slices: Vec<_> =
                    slices.iter().flat_map(|slice| slice.groups(name).expect("a dimension")).collect();
                let mut whole = grid.groups(name).expect("a dimension");
                from_slices.sort();
                whole.sort();
                prop_assert_eq!(from_slices, whole);
            }
        }

        #[test]
        fn the_innermost_dimension_stays_inside_hosts_that_it_divides(
            sizes in prop::collection::vec(1usize..=3, 1..=4), inner in 0usize..4, hosts in 1usize..4, seed: u64,
        ) {
            let inner = inner % sizes.len();
            let shape: Vec<(&str, usize)> = NAMES.into_iter().zip(sizes.iter().copied()).collect();
            let total: usize = sizes.iter().product();
            let per_host = (total / hosts / sizes[inner]).max(1) * sizes[inner];
            // Each host has whole groups, in any order of ranks.
            let mut of_rank: Vec<usize> = (0..total).map(|at| at / per_host).collect();
            let mut state = seed | 1;
            for at in (1..total).rev() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                of_rank.swap(at, (state >> 33) as usize % (at + 1));
            }
            let grid = Grid::with_innermost(&shape, shape[inner].0, &of_rank).expect("the sizes fit");
            for group in grid.groups(shape[inner].0).expect("a dimension") {
                prop_assert!(group.iter().all(|rank| of_rank[*rank] == of_rank[group[0]]), "{group:?} {of_rank:?}");
            }
        }
    }

    #[test]
    fn grids_that_cannot_be_say_why() {
        let text = |error: GridError| error.to_string();
        let new = |shape: &[(&str, usize)], ranks| text(Grid::new(shape, &vec![0; ranks]).expect_err("wrong"));
        assert_eq!(new(&[("dp", 2), ("tp", 3)], 8), "the dimensions dp=2, tp=3 make 6 ranks, but there are 8");
        assert_eq!(new(&[("dp", 2), ("dp", 3)], 6), "there are two dimensions `dp`");
        assert_eq!(new(&[("dp", 0)], 0), "dimension `dp` has size 0");
        let grid = Grid::new(&[("pp", 2), ("dp", 2), ("tp", 2)], &[0; 8]).expect("the sizes fit");
        assert_eq!(text(grid.groups("ep").expect_err("unknown")), "there is no dimension `ep` among pp, dp, tp");
        assert_eq!(
            text(grid.flatten(&["pp", "tp"], "x").expect_err("apart")),
            "dimensions pp, tp are not neighbours in this order"
        );
        assert_eq!(text(grid.coordinates(8).expect_err("outside")), "rank 8 is not in the grid");
        assert!(grid.unflatten("tp", &[("a", 3)]).is_err());
        assert!(grid.slices(&["tp", "dp"]).is_err());
    }
}
