//! Which steps used which memory last, so that a new step is not compared with all steps before it.
//!
//! A space is kept as runs of elements with the same users: the last step that wrote them, and the steps that have read them
//! since. A reader waits for the writer. A writer waits for the readers, which have themselves waited for the last writer; or
//! for the last writer if there are no readers. A step is compared only with the runs that it touches, and each step adds at
//! most two runs.

use std::collections::BTreeMap;

use smallvec::SmallVec;

use super::slice::{Slice, Space, StepId};

/// The steps that a step waits for.
pub(super) type After = SmallVec<[StepId; 4]>;

/// The uses of all memory so far.
#[derive(Debug, Default)]
pub(super) struct Uses {
    spaces: [Runs; 5],
    /// How many runs have been looked at.
    #[cfg(test)]
    pub(super) looks: usize,
}

/// Runs by their first element. None is empty and no two overlap.
type Runs = BTreeMap<usize, Run>;

#[derive(Clone, Debug)]
struct Run {
    end: usize,
    writer: Option<StepId>,
    readers: SmallVec<[StepId; 2]>,
}

impl Run {
    /// The steps that a writer of this run waits for.
    fn users(&self) -> impl Iterator<Item = StepId> {
        let writer = self.writer.filter(|_| self.readers.is_empty());
        self.readers.iter().copied().chain(writer)
    }
}

impl Uses {
    /// Notes what step `id` reads and writes, and adds the steps that it waits for to `after`, ascending.
    pub(super) fn add(&mut self, id: StepId, read: Option<Slice>, write: Option<Slice>, after: &mut After) {
        let (read, write) = (read.filter(|slice| slice.len > 0), write.filter(|slice| slice.len > 0));
        if let Some(slice) = read {
            self.read(id, slice, after);
        }
        if let Some(slice) = write {
            self.write(id, slice, after);
        }
        if after.len() > 1 {
            after.sort_unstable();
            after.dedup();
        }
    }

    /// Adds `count` to every step's number.
    pub(super) fn shift(&mut self, steps: StepId) {
        for run in self.spaces.iter_mut().flat_map(BTreeMap::values_mut) {
            run.readers.iter_mut().chain(&mut run.writer).for_each(|step| *step += steps);
        }
    }

    /// Forgets all uses: every later step waits for them anyway.
    pub(super) fn clear(&mut self) {
        self.spaces.iter_mut().for_each(BTreeMap::clear);
    }

    fn read(&mut self, id: StepId, slice: Slice, after: &mut After) {
        let runs = self.runs(slice);
        let mut unused = SmallVec::<[(usize, usize); 4]>::new();
        let mut at = slice.offset;
        for (start, run) in runs.range_mut(slice.offset..slice.end()) {
            if at < *start {
                unused.push((at, *start));
            }
            at = run.end;
            after.extend(run.writer);
            run.readers.push(id);
        }
        if at < slice.end() {
            unused.push((at, slice.end()));
        }
        for (start, end) in unused {
            runs.insert(start, Run { end, writer: None, readers: SmallVec::from_slice(&[id]) });
        }
    }

    fn write(&mut self, id: StepId, slice: Slice, after: &mut After) {
        let runs = self.runs(slice);
        let mut others = SmallVec::<[usize; 8]>::new();
        for (start, run) in runs.range(slice.offset..slice.end()) {
            after.extend(run.users().filter(|user| *user != id));
            if *start != slice.offset {
                others.push(*start);
            }
        }
        for start in others {
            runs.remove(&start);
        }
        runs.insert(slice.offset, Run { end: slice.end(), writer: Some(id), readers: SmallVec::new() });
    }

    /// The runs of a slice's space, of which each lies inside it or outside.
    fn runs(&mut self, slice: Slice) -> &mut Runs {
        let runs = &mut self.spaces[match slice.space {
            Space::Input => 0,
            Space::Output => 1,
            Space::Scratch => 2,
            Space::Sums => 3,
            Space::Parts => 4,
        }];
        for at in [slice.offset, slice.end()] {
            let before = runs.range_mut(..at).next_back();
            if let Some((_, run)) = before.filter(|(_, run)| run.end > at) {
                let behind = run.clone();
                run.end = at;
                runs.insert(at, behind);
            }
        }
        #[cfg(test)]
        {
            self.looks += 2 + runs.range(slice.offset..slice.end()).count();
        }
        runs
    }
}
