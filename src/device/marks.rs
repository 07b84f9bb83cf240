//! What ranks tell each other of failed accesses to windows.
//!
//! Ranks of one host see each other's marks in the control segment. Ranks of other hosts send messages, which the engine notes
//! here. A mark either spoils everything, or concerns only ranks that wait for the rank that has left it.

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
    /// By rank of another host, the failure that it has reported, or why it is gone.
    told: Mutex<BTreeMap<Rank, Failure>>,
    /// Whether any rank of another host has a failure, to be asked without the lock.
    has_told: AtomicBool,
}

/// The numbers of marks: one spoils everything, the other concerns only ranks that wait for the rank that has left it.
pub(crate) const SPOILT: u64 = 0;
pub(crate) const HARMLESS: u64 = 1;

/// The lane of collectives.
const COLLECTIVES: usize = 0;

impl Marks {
    /// No marks yet. Ranks of this host leave theirs on this lane.
    pub(crate) fn new(control: Arc<Control>, lane: usize) -> Marks {
        Marks { control, lane, told: Mutex::default(), has_told: AtomicBool::new(false) }
    }

    pub(crate) fn leave(&self, failure: &Failure) {
        self.control.fail(failure);
    }

    /// Notes a failure that a rank of another host has reported. Of two the one that spoils more stays, else the first.
    pub(crate) fn note(&self, reporter: Rank, failure: Failure) {
        let mut told = lock(&self.told);
        if told.get(&reporter).is_none_or(|known| failure.number < known.number) {
            told.insert(reporter, failure);
        }
        // Release: a thread that finds this set finds the failure, by the Acquire in `is_reported`.
        self.has_told.store(true, Ordering::Release);
    }

    fn is_reported(&self) -> bool {
        self.has_told.load(Ordering::Acquire)
    }

    /// A failure of another rank that may have spoiled what any rank sees, and the rank that reports it.
    pub(crate) fn spoilt(&self) -> Option<(Rank, Failure)> {
        let others = self.control.ranks().filter(|rank| *rank != self.control.me());
        self.spoilt_by(others).or_else(|| {
            let told = self.is_reported().then(|| lock(&self.told))?;
            let mut spoilt = told.iter().filter(|(_, failure)| failure.number == SPOILT);
            spoilt.next().map(|(rank, failure)| (*rank, failure.clone()))
        })
    }

    /// Whether no rank of this host has failed so that streams here may go on with wrong data: nothing that they count from
    /// then on is to leave this host.
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

    /// The failure of a rank, or why it is gone; nothing for this rank itself.
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
