//! What ranks tell each other of accesses to windows that have failed.
//!
//! Those of a host see marks of each other in the control segment; those of other hosts tell in messages, which the engine
//! notes here. A mark either spoils everything, or concerns only who waits for the rank that has left it.

use std::collections::BTreeMap;

use crate::device::control::{Control, Failure, FailureKind};
use crate::sync::{Arc, AtomicBool, Mutex, Ordering, lock};
use crate::types::Rank;

/// The marks that the ranks of a communicator have left.
#[derive(Debug)]
pub(crate) struct Marks {
    control: Arc<Control>,
    /// The lane of windows.
    lane: usize,
    /// By rank of another host, what it has told, or why it is gone.
    told: Mutex<BTreeMap<Rank, Failure>>,
    /// Whether there is any, to be asked without the lock.
    has_told: AtomicBool,
}

/// The number of a mark that spoils everything, and that of one which concerns only who waits for the rank.
pub(crate) const SPOILT: u64 = 0;
pub(crate) const HARMLESS: u64 = 1;

/// The lane of collectives.
const COLLECTIVES: usize = 0;

impl Marks {
    /// None yet. Those of ranks of this host are marks of this lane.
    pub(crate) fn new(control: Arc<Control>, lane: usize) -> Marks {
        Marks { control, lane, told: Mutex::default(), has_told: AtomicBool::new(false) }
    }

    /// Leaves this rank's mark.
    pub(crate) fn leave(&self, failure: &Failure) {
        self.control.fail(failure);
    }

    /// Notes what a rank of another host has told. Of two failures the one that spoils more stays, else the first.
    pub(crate) fn note(&self, reporter: Rank, failure: Failure) {
        let mut told = lock(&self.told);
        if told.get(&reporter).is_none_or(|known| failure.number < known.number) {
            told.insert(reporter, failure);
        }
        // Release: who finds this finds what was told before it, by the Acquire in `is_reported`.
        self.has_told.store(true, Ordering::Release);
    }

    fn is_reported(&self) -> bool {
        self.has_told.load(Ordering::Acquire)
    }

    /// What another rank has given up, if it may have spoiled what anybody sees; and which rank.
    pub(crate) fn spoilt(&self) -> Option<(Rank, Failure)> {
        let others = self.control.ranks().filter(|rank| *rank != self.control.me());
        self.spoilt_by(others).or_else(|| {
            let told = self.is_reported().then(|| lock(&self.told))?;
            let mut spoilt = told.iter().filter(|(_, failure)| failure.number == SPOILT);
            spoilt.next().map(|(rank, failure)| (*rank, failure.clone()))
        })
    }

    /// Whether no rank of this host has given up what streams here may have gone on with: nothing that they count from there on
    /// is to leave this host.
    pub(crate) fn is_sound(&self) -> bool {
        self.spoilt_by(self.control.ranks()).is_none()
    }

    fn spoilt_by(&self, mut seats: impl Iterator<Item = Rank>) -> Option<(Rank, Failure)> {
        seats.find_map(|seat| {
            let own = self.control.failure_of(seat, self.lane).filter(|failure| failure.number == SPOILT);
            let collective = || self.control.failure_of(seat, COLLECTIVES).filter(concerns_all);
            own.or_else(collective).map(|failure| (self.control.name(seat), failure))
        })
    }

    /// What a rank has given up, or why it is gone; nothing of this rank itself.
    pub(crate) fn of(&self, rank: Rank) -> Option<Failure> {
        match self.control.local(rank) {
            Some(seat) => self.control.failure_of(seat, self.lane).filter(|_| seat != self.control.me()),
            None => self.is_reported().then(|| lock(&self.told).get(&rank).cloned()).flatten(),
        }
    }
}

/// Whether what has failed in collectives concerns accesses to windows too: what those move may have come through a window.
pub(crate) fn concerns_all(failure: &Failure) -> bool {
    !matches!(failure.kind, FailureKind::Mismatch | FailureKind::Left)
}
