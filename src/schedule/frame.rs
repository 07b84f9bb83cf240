//! Where the memory of a piece of a collective is in that of the whole.

use smallvec::{SmallVec, smallvec};

use super::action::Action;
use super::slice::{Slice, Space};

/// A run of a piece's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// Where it begins in the input of the piece.
    pub(crate) offset: usize,
    /// How many elements it has.
    pub(crate) len: usize,
    /// Where it begins in the input of the whole.
    pub(crate) place: usize,
}

/// A piece's place in a collective.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    /// The runs of the piece's input, in order and without gaps.
    input: Vec<Run>,
    /// Where the piece's output begins in that of the whole.
    output: usize,
    index: usize,
}

impl Frame {
    /// The place of the piece `index`.
    pub(crate) fn new(input: Vec<Run>, output: usize, index: usize) -> Frame {
        Frame { input, output, index }
    }

    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// What an action of the piece is in the whole: a copy of input that is in several runs is several.
    ///
    /// # Panics
    /// When another action reads input of several runs.
    pub(super) fn placed(&self, action: Action) -> SmallVec<[Action; 1]> {
        let place = |slice: Slice| match slice.space {
            Space::Input => match self.runs(slice).as_slice() {
                [] => Slice { len: 0, ..slice },
                [one] => *one,
                several => panic!("{action:?} reads input at {} places", several.len()),
            },
            Space::Output => Slice { offset: slice.offset + self.output, ..slice },
            Space::Scratch | Space::Sums | Space::Parts => slice,
        };
        smallvec![match action {
            Action::Copy { from, into } if from.space == Space::Input => {
                let (into, mut done) = (place(into), 0);
                let copies = self.runs(from).into_iter().map(|from| {
                    let into = into.part(done, from.len);
                    done += from.len;
                    Action::Copy { from, into }
                });
                let copies: SmallVec<_> = copies.collect();
                return if copies.is_empty() { smallvec![action] } else { copies };
            }
            Action::CopyBlocks { .. } => {
                let copies = action.copies().map(|(from, into)| Action::Copy { from, into });
                return copies.flat_map(|copy| self.placed(copy)).collect();
            }
            Action::Send { to, from } => Action::Send { to, from: place(from) },
            Action::Recv { from, into } => Action::Recv { from, into: place(into) },
            Action::RecvReduce { from, into } => Action::RecvReduce { from, into: place(into) },
            Action::Copy { from, into } => Action::Copy { from: place(from), into: place(into) },
            Action::Reduce { from, into } => Action::Reduce { from: place(from), into: place(into) },
            Action::Fold { from, into, position } => Action::Fold { from: place(from), into: place(into), position },
            Action::Scale { slice } => Action::Scale { slice: place(slice) },
            Action::Await { number, slice } => Action::Await { number, slice: place(slice) },
            Action::Average { from, into } => Action::Average { from: place(from), into: place(into) },
        }]
    }

    /// Where a slice of the piece's input is, in as few runs as there are. None for an empty one.
    fn runs(&self, slice: Slice) -> SmallVec<[Slice; 1]> {
        let first = self.input.partition_point(|run| run.offset + run.len <= slice.offset);
        let mut found: SmallVec<[Slice; 1]> = SmallVec::new();
        let (mut at, mut left) = (slice.offset, slice.len);
        for run in &self.input[first..] {
            if left == 0 {
                break;
            }
            let (skipped, len) = (at - run.offset, (run.offset + run.len - at).min(left));
            let part = Slice { offset: run.place + skipped, len, ..slice };
            match found.last_mut() {
                Some(last) if last.offset + last.len == part.offset => last.len += len,
                _ if len > 0 => found.push(part),
                _ => {}
            }
            (at, left) = (at + len, left - len);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Rank;

    fn input(offset: usize, len: usize) -> Slice {
        Slice::new(Space::Input, offset, len)
    }

    /// Three blocks, the middle one of nothing, of which the whole has ten elements each.
    fn frame() -> Frame {
        let run = |offset, len, place| Run { offset, len, place };
        Frame::new(vec![run(0, 3, 4), run(3, 0, 14), run(3, 3, 24)], 4, 1)
    }

    #[test]
    fn a_slice_of_a_run_is_where_that_is() {
        let send = |from| frame().placed(Action::Send { to: Rank(1), from });
        assert_eq!(send(input(4, 2)).as_slice(), [Action::Send { to: Rank(1), from: input(25, 2) }]);
        assert_eq!(send(input(0, 0)).as_slice(), [Action::Send { to: Rank(1), from: input(0, 0) }]);
        let into = Slice::new(Space::Output, 1, 2);
        let average = frame().placed(Action::Average { from: Slice::new(Space::Sums, 7, 2), into });
        let placed = Slice::new(Space::Output, 5, 2);
        assert_eq!(average.as_slice(), [Action::Average { from: Slice::new(Space::Sums, 7, 2), into: placed }]);
    }

    #[test]
    fn a_copy_of_several_runs_is_several_copies() {
        let into = Slice::new(Space::Scratch, 100, 5);
        let copies = frame().placed(Action::Copy { from: input(1, 5), into });
        let copy = |from, offset, len| Action::Copy { from, into: Slice::new(Space::Scratch, offset, len) };
        assert_eq!(copies.as_slice(), [copy(input(5, 2), 100, 2), copy(input(24, 3), 102, 3)]);
    }

    #[test]
    fn runs_that_follow_each_other_are_one() {
        let run = |offset, len, place| Run { offset, len, place };
        let frame = Frame::new(vec![run(0, 3, 0), run(3, 3, 3)], 0, 0);
        assert_eq!(frame.runs(input(1, 4)).as_slice(), [input(1, 4)]);
    }

    #[test]
    #[should_panic(expected = "reads input at 2 places")]
    fn a_message_is_of_one_run() {
        frame().placed(Action::Send { to: Rank(1), from: input(2, 2) });
    }
}
