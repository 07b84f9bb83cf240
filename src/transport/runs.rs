//! The bytes of a message's body, which lie in several runs.

use std::io::IoSlice;

/// Bytes in several runs, taken from the front.
pub(super) struct Runs<'a> {
    runs: &'a [IoSlice<'a>],
    /// How many bytes of the first run are taken.
    taken: usize,
    pub(super) left: usize,
}

impl<'a> Runs<'a> {
    pub(super) fn new(runs: &'a [IoSlice<'a>]) -> Self {
        Runs { runs, taken: 0, left: runs.iter().map(|run| run.len()).sum() }
    }

    /// The next bytes of one run, at most `most`. At least one must be left.
    pub(super) fn take(&mut self, most: usize) -> &'a [u8] {
        while self.taken == self.runs[0].len() {
            self.runs = &self.runs[1..];
            self.taken = 0;
        }
        let run = &self.runs[0][self.taken..];
        let count = run.len().min(most);
        self.taken += count;
        self.left -= count;
        &run[..count]
    }
}
