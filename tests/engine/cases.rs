//! Collectives as all ranks see them, with data whose result each rank can compute alone.

use ncclx_rs::algo::{Collective, Scaling};
use ncclx_rs::{Counts, Rank};
use rand::Rng;
use rand::rngs::StdRng;

/// What stands for a rank's own factor.
pub(crate) fn factor(rank: usize) -> u64 {
    2 * rank as u64 + 3
}

/// By what is multiplied where the engine divides by so many: unlike a quotient, it tells how often.
pub(crate) fn division(size: usize) -> u64 {
    if size == 1 { 1 } else { 0x2545_f491_4f6c_dd1d }
}

fn value(rank: usize, index: usize) -> u64 {
    (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(index as u64)
}

/// A collective as all ranks see it.
#[derive(Clone, Debug)]
pub(crate) enum Case {
    Same(Collective),
    /// Elements from rank `i` to rank `j` at `[i][j]`.
    AllToAll(Vec<Vec<usize>>),
}

impl Case {
    pub(crate) fn of(&self, rank: usize) -> Collective {
        match self {
            Case::Same(collective) => collective.clone(),
            Case::AllToAll(counts) => Collective::AllToAll {
                send: counts[rank].clone().into(),
                recv: counts.iter().map(|row| row[rank]).collect(),
            },
        }
    }

    /// One rank's input, and what its output must be; nothing where it is undefined.
    pub(crate) fn data(&self, rank: usize, size: usize, scaling: Scaling) -> (Vec<u64>, usize, Option<Vec<u64>>) {
        let own = |rank: usize, count: usize| (0..count).map(|index| value(rank, index)).collect::<Vec<_>>();
        let sum = |range: std::ops::Range<usize>| -> Vec<u64> {
            let (scale, divide): (fn(usize) -> u64, u64) = match scaling {
                Scaling::Inputs => (factor, 1),
                Scaling::Sum { .. } => (|_| 1, division(size)),
                Scaling::Nothing => (|_| 1, 1),
            };
            let term = |rank: usize, index: usize| value(rank, index).wrapping_mul(scale(rank));
            range.map(|i| (0..size).fold(0u64, |sum, r| sum.wrapping_add(term(r, i))).wrapping_mul(divide)).collect()
        };
        match self.of(rank) {
            Collective::AllReduce { count } => (own(rank, count), count, Some(sum(0..count))),
            Collective::Reduce { count, root } => {
                let expected = if rank == root.index() { sum(0..count) } else { vec![0xbeef; count] };
                (own(rank, count), count, Some(expected))
            }
            Collective::Broadcast { count, root } => (own(rank, count), count, Some(own(root.index(), count))),
            Collective::AllGather { counts } => {
                let all: Vec<u64> = (0..size).flat_map(|r| own(r, counts[r])).collect();
                (own(rank, counts[rank]), all.len(), Some(all))
            }
            Collective::AllGatherIntoParts { count } => {
                let all: Vec<u64> = (0..size).flat_map(|r| own(r, count)).collect();
                (own(rank, count), all.len(), Some(all))
            }
            Collective::ReduceScatter { counts } => {
                let start: usize = counts.iter().take(rank).sum();
                (own(rank, counts.total()), counts[rank], Some(sum(start..start + counts[rank])))
            }
            Collective::AllToAll { send, recv } => {
                let Case::AllToAll(counts) = self else { unreachable!() };
                let block = |from: usize, to: usize| {
                    let start: usize = counts[from][..to].iter().sum();
                    (start..start + counts[from][to]).map(move |index| value(from, index))
                };
                let expected: Vec<u64> = (0..size).flat_map(|from| block(from, rank)).collect();
                (own(rank, send.iter().sum()), recv.iter().sum(), Some(expected))
            }
            Collective::EqualAllToAll { count } => {
                let block = |from: usize| (rank * count..(rank + 1) * count).map(move |index| value(from, index));
                (own(rank, count * size), count * size, Some((0..size).flat_map(block).collect()))
            }
            Collective::Gather { count, root } if rank == root.index() => {
                (own(rank, count), count * size, Some((0..size).flat_map(|r| own(r, count)).collect()))
            }
            Collective::Gather { count, .. } => (own(rank, count), 0, Some(vec![])),
            Collective::Scatter { count, root } => {
                let input = if rank == root.index() { own(rank, count * size) } else { vec![] };
                let block = (rank * count..(rank + 1) * count).map(|index| value(root.index(), index));
                (input, count, Some(block.collect()))
            }
            Collective::Barrier => (vec![], 0, Some(vec![])),
            // Its callers have a part in it: src/algo/islands/tests.rs.
            Collective::ByIslands { .. } => unreachable!("no case has islands"),
        }
    }
}

/// A chunk of 256 KiB is 16 elements of this size: small counts exercise the cutting too.
pub(crate) const ELEMENT: usize = 16 * 1024;

/// How reductions scale; the sums of an average may be of the same size or of another.
pub(crate) const SCALINGS: [Scaling; 4] =
    [Scaling::Nothing, Scaling::Inputs, Scaling::Sum { bytes: ELEMENT }, Scaling::Sum { bytes: 4 * ELEMENT }];

/// Collectives of every kind on so many ranks.
pub(crate) fn cases(size: usize, random: &mut StdRng) -> Vec<Case> {
    let mut cases = vec![Case::Same(Collective::Barrier)];
    let mut roots = vec![0, size - 1, random.random_range(0..size)];
    roots.dedup();
    for count in [0, 1, size, 3 * size + 1, 40] {
        cases.push(Case::Same(Collective::AllReduce { count }));
        cases.push(Case::Same(Collective::AllGather { counts: Counts::equal(count, size) }));
        cases.push(Case::Same(Collective::ReduceScatter { counts: Counts::equal(count, size) }));
    }
    for count in [0, 1, 33] {
        for root in roots.iter().map(|root| Rank::from(*root)) {
            cases.push(Case::Same(Collective::Reduce { count, root }));
            cases.push(Case::Same(Collective::Broadcast { count, root }));
            cases.push(Case::Same(Collective::Gather { count, root }));
            cases.push(Case::Same(Collective::Scatter { count, root }));
        }
    }
    let mut uneven = |most: usize| (0..size).map(|_| random.random_range(0..=most)).collect::<Vec<_>>();
    cases.push(Case::Same(Collective::AllGather { counts: uneven(40).into() }));
    cases.push(Case::Same(Collective::ReduceScatter { counts: uneven(40).into() }));
    cases.push(Case::AllToAll((0..size).map(|_| uneven(20)).collect()));
    cases.push(Case::AllToAll(vec![vec![3; size]; size]));
    cases
}
