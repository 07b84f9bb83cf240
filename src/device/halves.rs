//! Skew: the lead of a segment goes before the rest of the segment before.
//!
//! A segment that exchanges messages with other hosts is cut in two: its *lead*, in which ranks of a host combine or spread what
//! they have and send it away, and its *rest*, which waits for other hosts. Streams take lead 0, lead 1, rest 0, lead 2, rest 1
//! and so on. So while the network carries what the lead of one segment has sent, the device does the lead of the next.
//!
//! A segment's two programs use the same halves of memory. In a lead nothing waits for the rest of another rank's segment but
//! that of the segment before the last, which comes earlier in the order of every rank: so programs still run to their end on a
//! single queue.

use std::collections::VecDeque;

/// The part of a segment that a program is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// All of it.
    #[default]
    Whole,
    /// What comes before anything of another host is waited for.
    Lead,
    /// What follows.
    Rest,
}

/// The parts of so many segments in the order in which a stream takes them.
pub fn skewed(segments: usize) -> impl Iterator<Item = (usize, Phase)> {
    let behind = (1..=segments).flat_map(move |next| {
        let lead = (next < segments).then_some((next, Phase::Lead));
        lead.into_iter().chain([(next - 1, Phase::Rest)])
    });
    std::iter::once((0, Phase::Lead)).chain(behind)
}

/// Tells which half of memory a program uses: segments take them in turn, and the rest of one takes that of its lead.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Halves {
    next: usize,
    /// Those of segments whose rest is to come.
    led: VecDeque<usize>,
}

impl Halves {
    /// The half of the next program.
    ///
    /// # Panics
    /// When it is the rest of a segment that had no lead.
    pub(crate) fn take(&mut self, phase: Phase) -> usize {
        if phase == Phase::Rest {
            return self.led.pop_front().expect("a lead before each rest");
        }
        let half = self.next;
        self.next = 1 - half;
        if phase == Phase::Lead {
            self.led.push_back(half);
        }
        half
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leads_go_one_segment_before_rests_and_both_use_the_same_half() {
        let order: Vec<_> = skewed(3).collect();
        let (lead, rest) = (Phase::Lead, Phase::Rest);
        assert_eq!(order, [(0, lead), (1, lead), (0, rest), (2, lead), (1, rest), (2, rest)]);
        let mut halves = Halves::default();
        assert_eq!(halves.take(Phase::Whole), 0);
        let taken: Vec<_> = order.iter().map(|(_, phase)| halves.take(*phase)).collect();
        assert_eq!(taken, [1, 0, 1, 1, 0, 1]);
        assert_eq!(halves.take(Phase::Whole), 0);
    }
}
