//! What a rank has where a vendor's library moves data within the ranks that are alike: the setting `engine=mixed`.

use crate::algo::Islands;
use crate::device::vendor::{Chosen, VendorComm};
use crate::engine::region::Words;
use crate::error::Error;
use crate::signature::RUN_OTHERWISE;
use crate::sync::{Arc, AtomicBool, Mutex, Ordering};
use crate::sys::cuda::Context;
use crate::types::Rank;

/// What all ranks have decided together.
pub(super) struct Mixed {
    pub(super) islands: Arc<Islands>,
    /// What this rank has, if others are like it.
    pub(super) member: Option<Member>,
    /// Whether an operation has shown that some rank has not heard of it.
    is_doubtful: AtomicBool,
}

impl Mixed {
    pub(super) fn new(islands: Islands, member: Option<Member>) -> Mixed {
        Mixed { islands: Arc::new(islands), member, is_doubtful: AtomicBool::new(false) }
    }

    /// Notes how an operation has ended that goes this way. A rank whose exchange has failed exchanges again in place of the
    /// next one, which the ranks then run otherwise, and all hear of that.
    pub(super) fn learn(&self, result: &Result<(), Error>) {
        if matches!(result, Err(Error::Mismatch { detail, .. }) if detail.starts_with(RUN_OTHERWISE)) {
            // Relaxed, here and below: nothing else is read by it.
            self.is_doubtful.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the ranks have to decide again.
    pub(super) fn is_doubtful(&self) -> bool {
        self.is_doubtful.load(Ordering::Relaxed)
    }
}

/// A rank among others that are alike.
pub(super) struct Member {
    pub(super) chosen: Chosen,
    pub(super) context: Arc<Context>,
    /// The ranks that are alike, and this one's place among them.
    pub(super) ranks: Vec<Rank>,
    pub(super) place: usize,
    /// Held by the operation whose turn it is.
    pub(super) turn: Mutex<Turn>,
    /// The communicator of the library, for who closes.
    pub(super) library: Mutex<Option<Arc<VendorComm>>>,
}

/// What operations have one after the other.
pub(super) struct Turn {
    /// The engine's memory for this rank's part of the data.
    pub(super) staging: Words,
    /// Which communicator of the library this rank has, counted by all ranks that are alike; 0: none that works.
    pub(super) generation: u64,
    /// Whether the operation may have put something on a stream.
    pub(super) has_begun: bool,
}

/// The number of the communicator that the ranks begin which say that they have these; none if all have one and the same.
pub(super) fn next_generation(said: &[u64]) -> Option<u64> {
    let newest = *said.iter().max()?;
    (newest == 0 || said.iter().any(|other| *other != newest)).then_some(newest + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::CollectiveKind;
    use crate::signature::Signature;

    #[test]
    fn only_ranks_that_run_the_same_otherwise_make_doubtful_who_is_alike() {
        let ours =
            Signature { operation: CollectiveKind::AllReduce as u8, algorithm: 1, count: 5, ..Signature::default() };
        let differs = |theirs: Signature| {
            let detail = ours.disagreement(7, Rank(0), Rank(1), &theirs);
            let mixed = Mixed::new(Islands::new(vec![vec![Rank(0)], vec![Rank(1)]]), None);
            mixed.learn(&Err(Error::Mismatch { operation: ours.to_string(), detail }));
            mixed.is_doubtful()
        };
        assert!(differs(Signature { algorithm: 2, ..ours }));
        assert!(!differs(Signature { count: 6, ..ours }));
    }

    #[test]
    fn a_communicator_begins_anew_unless_all_have_the_same_one() {
        let next = [[0, 0], [1, 1], [3, 0], [0, 3], [2, 3]].map(|said| next_generation(&said));
        assert_eq!(next, [Some(1), None, Some(4), Some(4), Some(4)]);
    }
}
