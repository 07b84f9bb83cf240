//! The CPU engine's arithmetic in the order of schedules: all ranks in one thread.

use std::collections::VecDeque;

use ncclx_rs::device::segment::Segment;
use ncclx_rs::engine::reduce::{self, Operands};
use ncclx_rs::schedule::{Action, Schedule, Slice, Space};
use ncclx_rs::{DType, Rank, ReduceOp};

/// What is computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction {
    pub(crate) op: ReduceOp,
    pub(crate) dtype: DType,
}

impl Reduction {
    /// The bytes of a sum.
    pub(crate) fn sum(self) -> usize {
        if self.op == ReduceOp::Avg { Operands::Sums(self.dtype).size() } else { self.dtype.size() }
    }
}

/// One rank's part of a collective.
pub(crate) struct Part<'a> {
    pub(crate) schedule: &'a Schedule,
    pub(crate) segment: &'a Segment,
    /// What holds the input and the output, and at which bytes.
    pub(crate) memory: &'a mut [u8],
    pub(crate) input: usize,
    pub(crate) output: usize,
}

/// A part that runs.
struct Machine<'a, 'b> {
    part: &'b mut Part<'a>,
    scratch: Vec<u8>,
    sums: Vec<u8>,
    reduction: Reduction,
    next: usize,
}

/// Runs a collective on all ranks.
pub(crate) fn run(parts: &mut [Part<'_>], reduction: Reduction) {
    let world = parts.len();
    let mut wires: Vec<VecDeque<Vec<u8>>> = (0..world * world).map(|_| VecDeque::new()).collect();
    let mut machines = vec![];
    for part in parts {
        let (scratch, sums) = (part.schedule.scratch * reduction.dtype.size(), part.schedule.sums * reduction.sum());
        machines.push(Machine { part, scratch: vec![0xde; scratch], sums: vec![0xad; sums], reduction, next: 0 });
    }
    loop {
        let mut moved = false;
        for (me, machine) in machines.iter_mut().enumerate() {
            while machine.step(me, world, &mut wires) {
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    assert!(machines.iter().all(|machine| machine.next == machine.part.schedule.steps.len()), "a rank waits for ever");
}

impl Machine<'_, '_> {
    /// Takes the next step, if it can.
    fn step(&mut self, me: usize, world: usize, wires: &mut [VecDeque<Vec<u8>>]) -> bool {
        let Some(step) = self.part.schedule.steps.get(self.next) else { return false };
        let wire = |from: usize, to: usize| from * world + to;
        let mut take = |from: Rank| wires[wire(from.index(), me)].pop_front();
        let Reduction { op, dtype } = self.reduction;
        let operands = |slice: Slice| match slice.space {
            Space::Sums => Operands::Sums(dtype),
            _ => Operands::Elements(op, dtype),
        };
        match step.action {
            // As the engine, nothing.
            Action::Fold { into, .. } | Action::Average { into, .. } if into.len == 0 => {}
            Action::Send { to, from } => wires[wire(me, to.index())].push_back(self.read(from)),
            Action::Recv { from, into } => {
                let Some(bytes) = take(from) else { return false };
                self.write(into, &bytes);
            }
            Action::RecvReduce { from, into } => {
                let Some(bytes) = take(from) else { return false };
                self.change(into, |result| reduce::combine(operands(into), result, &bytes));
            }
            Action::Copy { .. } | Action::CopyBlocks { .. } => {
                for (from, into) in step.action.copies() {
                    let mut bytes = self.read(from);
                    if into.space == Space::Sums && from.space != Space::Sums {
                        let mut sums = vec![0; into.len * self.reduction.sum()];
                        reduce::widen(dtype, &mut sums, &bytes);
                        bytes = sums;
                    }
                    self.write(into, &bytes);
                }
            }
            Action::Reduce { from, into } => {
                let bytes = self.read(from);
                self.change(into, |result| reduce::combine(operands(into), result, &bytes));
            }
            Action::Fold { from, into, position } => {
                let bytes = self.read(from);
                let blocks = self.blocks(&bytes, from, into.len);
                self.change(into, |result| reduce::fold(operands(into), result, position as usize, &blocks));
            }
            Action::Scale { slice } => {
                let ReduceOp::PreMulSum(factor) = op else { panic!("nothing to scale by") };
                self.change(slice, |result| reduce::scale(dtype, factor, result));
            }
            Action::Await { .. } => panic!("no program has islands"),
            Action::Average { from, into } => {
                let bytes = self.read(from);
                let blocks = self.blocks(&bytes, from, into.len);
                self.change(into, |result| reduce::average(operands(from), world, result, &blocks));
            }
        }
        self.next += 1;
        true
    }

    fn size(&self, space: Space) -> usize {
        if space == Space::Sums { self.reduction.sum() } else { self.reduction.dtype.size() }
    }

    /// The blocks of `len` elements in the bytes of a slice.
    fn blocks<'c>(&self, bytes: &'c [u8], slice: Slice, len: usize) -> Vec<&'c [u8]> {
        bytes.chunks((len * self.size(slice.space)).max(1)).collect()
    }

    /// Where each element of a slice is in its memory.
    fn places(&self, slice: Slice) -> Vec<usize> {
        let (extent, base, size) = match slice.space {
            Space::Input => (&self.part.segment.input, self.part.input, self.reduction.dtype.size()),
            Space::Output => (&self.part.segment.output, self.part.output, self.reduction.dtype.size()),
            space => {
                let size = self.size(space);
                return (slice.offset..slice.offset + slice.len).map(|index| index * size).collect();
            }
        };
        let runs = extent.parts(slice).flat_map(|run| run.offset..run.offset + run.len);
        let places: Vec<usize> = runs.map(|index| base + index * size).collect();
        assert_eq!(places.len(), slice.len, "{slice:?} lies in {extent:?}");
        places
    }

    fn memory(&self, space: Space) -> &[u8] {
        match space {
            Space::Input | Space::Output => self.part.memory,
            Space::Scratch => &self.scratch,
            Space::Sums => &self.sums,
            Space::Parts => unreachable!("no collective here is of a window"),
        }
    }

    fn read(&self, slice: Slice) -> Vec<u8> {
        let (memory, size) = (self.memory(slice.space), self.size(slice.space));
        self.places(slice).into_iter().flat_map(|at| &memory[at..at + size]).copied().collect()
    }

    fn write(&mut self, slice: Slice, bytes: &[u8]) {
        let (places, size) = (self.places(slice), self.size(slice.space));
        assert_eq!(bytes.len(), places.len() * size, "{slice:?}");
        let memory = match slice.space {
            Space::Input | Space::Output => &mut *self.part.memory,
            Space::Scratch => &mut self.scratch,
            Space::Sums => &mut self.sums,
            Space::Parts => unreachable!("no collective here is of a window"),
        };
        for (at, element) in places.into_iter().zip(bytes.chunks(size)) {
            memory[at..at + size].copy_from_slice(element);
        }
    }

    fn change(&mut self, slice: Slice, change: impl FnOnce(&mut [u8])) {
        let mut bytes = self.read(slice);
        change(&mut bytes);
        self.write(slice, &bytes);
    }
}
