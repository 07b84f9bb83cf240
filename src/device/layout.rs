//! Where a rank's messages of one segment lie: in its staging memory, or in pinned memory for other hosts.
//!
//! In staging memory a message's *cell* follows from the sender's schedule alone. So a receiver, which can plan for every rank,
//! knows where to read without being told.

use crate::schedule::{Action, Schedule, Slice, Space, StepId};
use crate::types::Rank;

/// Cells begin at a multiple of this many bytes, unless one continues another.
pub const ALIGNMENT: usize = 256;

/// Where one message lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The first byte, counted from the beginning of the half of memory that the segment uses.
    pub offset: usize,
    /// The number of bytes.
    pub bytes: usize,
    /// Whether an earlier message of this segment has brought the same elements there.
    pub is_shared: bool,
}

/// The cells of one rank's messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// By step; nothing for a step that has no data here.
    cells: Vec<Option<Cell>>,
    bytes: usize,
}

impl Layout {
    /// The cells of the messages in `schedule`; `element_bytes` gives the size of an element in a space.
    ///
    /// A send of elements that an earlier one has sent, and that have not changed since, shares their cell. A slice that
    /// begins where the one before it ends continues its cell, so that one copy serves both.
    ///
    /// ```
    /// use ncclx_rs::Rank;
    /// use ncclx_rs::device::layout::Layout;
    /// use ncclx_rs::schedule::{Action, Builder, Slice, Space};
    /// let all = Slice::new(Space::Input, 0, 8);
    /// let mut builder = Builder::new("example");
    /// builder.push(Action::Send { to: Rank(1), from: all.part(0, 4) });
    /// builder.push(Action::Send { to: Rank(2), from: all.part(4, 4) });
    /// builder.push(Action::Send { to: Rank(3), from: all.part(4, 4) });
    /// builder.push(Action::Send { to: Rank(1), from: Slice::new(Space::Scratch, 0, 1) });
    /// let layout = Layout::new(&builder.finish(), |_| 2);
    /// let offsets = [0, 1, 2, 3].map(|step| layout.cell(step).unwrap().offset);
    /// assert_eq!((offsets, layout.bytes()), ([0, 8, 8, 256], 258));
    /// ```
    pub fn new(schedule: &Schedule, element_bytes: impl Fn(Space) -> usize) -> Layout {
        Layout::of_sends(schedule, element_bytes, |_| true)
    }

    /// As [`Layout::new`], for the messages to some ranks alone.
    pub fn of_sends(
        schedule: &Schedule,
        element_bytes: impl Fn(Space) -> usize,
        is_to: impl Fn(Rank) -> bool,
    ) -> Layout {
        let mut layout = Layout { cells: vec![None; schedule.steps.len()], bytes: 0 };
        let mut published: Vec<(Slice, usize)> = Vec::new();
        for (step, action) in schedule.steps.iter().map(|step| step.action).enumerate() {
            if let Action::Send { to, from } = action
                && from.len > 0
                && is_to(to)
            {
                let element = element_bytes(from.space);
                let known = published.iter().find(|(slice, _)| slice.contains(from));
                let known = known.map(|(slice, offset)| offset + (from.offset - slice.offset) * element);
                let offset = known.unwrap_or_else(|| layout.reserve(&mut published, from, element));
                layout.cells[step] = Some(Cell { offset, bytes: from.len * element, is_shared: known.is_some() });
            }
            if let (_, Some(written)) = action.touches() {
                published.retain(|(slice, _)| !slice.overlaps(written));
            }
        }
        layout
    }

    /// The cells of the messages that come from some ranks, a separate one for each message.
    pub fn of_receives(
        schedule: &Schedule,
        element_bytes: impl Fn(Space) -> usize,
        is_from: impl Fn(Rank) -> bool,
    ) -> Layout {
        let mut layout = Layout { cells: vec![None; schedule.steps.len()], bytes: 0 };
        for (step, action) in schedule.steps.iter().map(|step| step.action).enumerate() {
            if let Action::Recv { from, into } | Action::RecvReduce { from, into } = action
                && into.len > 0
                && is_from(from)
            {
                let offset = layout.bytes.next_multiple_of(ALIGNMENT);
                let bytes = into.len.saturating_mul(element_bytes(into.space));
                layout.bytes = offset.saturating_add(bytes);
                layout.cells[step] = Some(Cell { offset, bytes, is_shared: false });
            }
        }
        layout
    }

    fn reserve(&mut self, published: &mut Vec<(Slice, usize)>, slice: Slice, element: usize) -> usize {
        let continues = published.last().is_some_and(|(before, offset)| {
            before.is_followed_by(slice) && offset + before.len * element == self.bytes
        });
        let offset = if continues { self.bytes } else { self.bytes.next_multiple_of(ALIGNMENT) };
        self.bytes = offset.saturating_add(slice.len.saturating_mul(element));
        published.push((slice, offset));
        offset
    }

    /// The cell of the message that `step` sends, or receives.
    pub fn cell(&self, step: StepId) -> Option<Cell> {
        self.cells[step as usize]
    }

    /// How many bytes all cells take.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}
