//! The memory that steps use, and the number of a step.

/// The memory that a [`Slice`] lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// The operation's input tensors, end to end; never written.
    Input,
    /// The operation's output tensors, end to end.
    Output,
    /// Memory of the engine, undefined at the start.
    Scratch,
    /// Like `Scratch`, for sums of an AVG whose elements are too narrow for them: of the type that sums are computed in.
    Sums,
    /// The parts of a window of all ranks, end to end, of equal length. This rank's own is the operation's output, and is accessed
    /// as that.
    Parts,
}

/// A run of elements in one space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slice {
    /// Where the elements lie.
    pub space: Space,
    /// The first element.
    pub offset: usize,
    /// The number of elements.
    pub len: usize,
}

impl Slice {
    /// The elements from `offset` to `offset + len`.
    pub fn new(space: Space, offset: usize, len: usize) -> Self {
        Slice { space, offset, len }
    }

    /// A message without content: a signal that the sender has come to this step.
    pub fn empty() -> Self {
        Slice::new(Space::Scratch, 0, 0)
    }

    /// `len` elements from the `offset`-th of this slice on.
    ///
    /// # Panics
    /// When they do not lie inside this slice.
    pub fn part(self, offset: usize, len: usize) -> Self {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(is_inside, "{self:?} has no part of {len} elements at {offset}");
        Slice::new(self.space, self.offset + offset, len)
    }

    /// The `index`-th of `parts` nearly equal pieces; earlier pieces are the longer ones.
    pub fn piece(self, index: usize, parts: usize) -> Self {
        let (whole, rest) = (self.len / parts, self.len % parts);
        self.part(index * whole + index.min(rest), whole + usize::from(index < rest))
    }

    pub(super) fn end(self) -> usize {
        self.offset.saturating_add(self.len)
    }

    /// Whether this slice contains every element of `other`.
    pub(crate) fn contains(self, other: Slice) -> bool {
        self.space == other.space && self.offset <= other.offset && other.end() <= self.end()
    }

    /// Whether the slices share an element.
    pub(crate) fn overlaps(self, other: Slice) -> bool {
        let is_apart = self.end() <= other.offset || other.end() <= self.offset;
        self.space == other.space && !is_apart && self.len > 0 && other.len > 0
    }

    /// Whether `next` begins where this one ends.
    pub(crate) fn is_followed_by(self, next: Slice) -> bool {
        self.space == next.space && self.end() == next.offset
    }
}

/// The position of a step in its schedule.
pub type StepId = u32;
