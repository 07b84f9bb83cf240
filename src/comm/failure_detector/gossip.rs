//! Which heartbeats a rank passes on to its neighbours: each once, and those that come within a short while as one.
//!
//! When a collective keeps all ranks waiting, each of them hears of all others. If each told its neighbours at once of each
//! one that it hears of, that would be a message for every two ranks. So a rank waits with what is new for a part of the time after which
//! its sender speaks again: on the longest way a 32nd of that goes by.
//!
//! Ranks that are absent may have as many different operations in flight as there are ranks. An error names few, so a rank
//! passes on few.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::neighbours::{ALL_NEIGHBOURS, steps_to_all};
use crate::engine::heartbeat::{Heartbeat, InFlight, RankState};
use crate::sync::Arc;
use crate::types::Rank;

/// The heartbeats that a rank has heard, and those that it is to pass on.
#[derive(Default)]
pub(super) struct Gossip {
    /// The collective and the round of each rank's last heartbeat of a kind.
    last: FxHashMap<(Rank, Kind), (u64, u32)>,
    /// What absent ranks have in flight, as far as that is passed on.
    operations: Vec<Arc<str>>,
    /// Since when these are collected.
    collected: Option<Instant>,
    held: Vec<Heartbeat>,
    /// When they are to be passed on.
    due: Option<Instant>,
}

/// Heartbeats that a rank numbers by themselves: of collectives on devices or on the CPU, and of a rank that waits or is absent, which may
/// wait in an earlier collective.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Kind {
    on_device: bool,
    is_absent: bool,
}

/// For how long a heartbeat waits at most at each rank on its way.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// How many different operations of absent ranks a rank passes on.
const OPERATIONS_MAX: usize = 16;

/// Which part of the time until its next one a heartbeat may wait on its whole way.
const PART: u32 = 32;

impl Gossip {
    /// The heartbeats that are new here, those that differ in nothing but their ranks merged into one.
    pub(super) fn filter(&mut self, heartbeats: impl Iterator<Item = Heartbeat>) -> Vec<Heartbeat> {
        let mut new: Vec<Heartbeat> = Vec::new();
        for mut heartbeat in heartbeats {
            let moment = Some((heartbeat.sequence, heartbeat.round));
            let is_absent = matches!(heartbeat.state, RankState::Absent(_));
            let kind = Kind { on_device: heartbeat.on_device, is_absent };
            heartbeat.ranks.retain(|rank| {
                let is_new = self.last.get(&(*rank, kind)).copied() < moment;
                self.last.extend(moment.filter(|_| is_new).map(|moment| ((*rank, kind), moment)));
                is_new
            });
            if !heartbeat.ranks.is_empty() {
                merge(&mut new, heartbeat);
            }
        }
        new
    }

    /// Keeps heartbeats that are new, in a world of so many ranks, until they are to be passed on.
    pub(super) fn hold(&mut self, new: &[Heartbeat], size: usize, now: Instant) {
        let parts = PART * u32::try_from(steps_to_all(size)).unwrap_or(u32::MAX / PART);
        for heartbeat in new {
            if !self.is_passed_on(heartbeat, now) {
                continue;
            }
            let pause = (Duration::from_millis(heartbeat.again_millis) / parts).min(LONGEST_PAUSE);
            let due = if size > ALL_NEIGHBOURS { now + pause } else { now };
            self.due = Some(self.due.map_or(due, |earlier| earlier.min(due)));
            merge(&mut self.held, heartbeat.clone());
        }
    }

    /// Whether a heartbeat is passed on: until ranks speak again, few different operations of absent ranks.
    fn is_passed_on(&mut self, heartbeat: &Heartbeat, now: Instant) -> bool {
        let RankState::Absent(InFlight { what, .. }) = &heartbeat.state else { return true };
        if what.is_empty() {
            return true;
        }
        let until_again = Duration::from_millis(heartbeat.again_millis / 2);
        if self.collected.is_none_or(|since| now.saturating_duration_since(since) >= until_again) {
            self.collected = Some(now);
            self.operations.clear();
        }
        let is_new = !self.operations.contains(what);
        let has_room = self.operations.len() < OPERATIONS_MAX;
        if is_new && has_room {
            self.operations.push(what.clone());
        }
        has_room || !is_new
    }

    /// What is to be passed on now: who waits, and behind that what others do instead.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<Heartbeat> {
        if self.due.is_none_or(|due| now < due) {
            return Vec::new();
        }
        self.due = None;
        let mut held = std::mem::take(&mut self.held);
        held.sort_by_key(|heartbeat| matches!(heartbeat.state, RankState::Absent(_)));
        held
    }

    /// When there is something to pass on.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }
}

fn merge(heartbeats: &mut Vec<Heartbeat>, mut heartbeat: Heartbeat) {
    let Some(other) = heartbeats.iter_mut().find(|other| is_alike(other, &heartbeat)) else {
        return heartbeats.push(heartbeat);
    };
    other.ranks.append(&mut heartbeat.ranks);
    if let (RankState::Absent(all), RankState::Absent(one)) = (&mut other.state, heartbeat.state) {
        all.millis = all.millis.min(one.millis);
    }
}

/// Whether two heartbeats differ in nothing but their ranks and the age of what those have in flight.
fn is_alike(one: &Heartbeat, other: &Heartbeat) -> bool {
    let is_same_state = match (&one.state, &other.state) {
        (RankState::Absent(one), RankState::Absent(other)) => one.what == other.what,
        (one, other) => one == other,
    };
    let moment =
        |heartbeat: &Heartbeat| (heartbeat.on_device, heartbeat.sequence, heartbeat.round, heartbeat.again_millis);
    is_same_state && moment(one) == moment(other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::failure_detector::neighbours::neighbours;
    use crate::signature::Signature;

    fn heartbeat(sequence: u64, round: u32, ranks: &[u32]) -> Heartbeat {
        let ranks = ranks.iter().copied().map(Rank).collect();
        let state = RankState::Waiting(Signature::default());
        Heartbeat { on_device: false, sequence, state, round, again_millis: 500, ranks }
    }

    fn absent(what: &str, millis: u64, ranks: &[u32]) -> Heartbeat {
        let what = what.into();
        Heartbeat { state: RankState::Absent(InFlight { what, millis }), ..heartbeat(4, 0, ranks) }
    }

    #[test]
    fn each_rank_is_passed_on_once_a_round() {
        let mut gossip = Gossip::default();
        let mut filter = |heartbeats: &[Heartbeat]| gossip.filter(heartbeats.iter().cloned());
        assert_eq!(filter(&[heartbeat(4, 0, &[1, 2])]), [heartbeat(4, 0, &[1, 2])]);
        assert_eq!(filter(&[heartbeat(4, 0, &[2, 3, 3])]), [heartbeat(4, 0, &[3])]);
        assert_eq!(filter(&[heartbeat(4, 0, &[1]), heartbeat(3, 9, &[2])]), []);
        let next = [heartbeat(4, 1, &[1]), heartbeat(5, 0, &[2]), heartbeat(4, 1, &[3])];
        assert_eq!(filter(&next), [heartbeat(4, 1, &[1, 3]), heartbeat(5, 0, &[2])]);
        let on_device = Heartbeat { on_device: true, ..heartbeat(4, 1, &[1]) };
        let both = [heartbeat(4, 2, &[1]), on_device.clone()];
        assert_eq!(filter(&both), both, "collectives on devices are counted by themselves");
        assert_eq!(filter(&[on_device]), []);
    }

    #[test]
    fn ranks_that_are_absent_for_the_same_are_told_of_together_and_apart_from_those_that_wait() {
        let mut gossip = Gossip::default();
        let told = [absent("recv", 900, &[1]), absent("send", 3, &[2]), absent("recv", 700, &[3])];
        let new = gossip.filter(told.into_iter());
        assert_eq!(new, [absent("recv", 700, &[1, 3]), absent("send", 3, &[2])]);
        assert_eq!(gossip.filter([heartbeat(4, 0, &[1])].into_iter()), [heartbeat(4, 0, &[1])], "now it has called it");
        assert_eq!(gossip.filter([absent("recv", 950, &[1])].into_iter()), []);
    }

    #[test]
    fn of_many_different_operations_of_absent_ranks_a_few_are_passed_on_behind_those_that_wait() {
        let mut gossip = Gossip::default();
        let now = Instant::now();
        for round in 0..2 {
            let now = now + Duration::from_millis(250) * round;
            let told: Vec<_> = (0..99).map(|rank| absent(&format!("recv {}", rank % 33), 0, &[rank])).collect();
            gossip.hold(&told, 300, now);
            gossip.hold(&[heartbeat(4, 0, &[99])], 300, now);
            let due = gossip.take_due(now + LONGEST_PAUSE);
            assert_eq!(due.len(), 1 + OPERATIONS_MAX);
            assert_eq!(due[0], heartbeat(4, 0, &[99]));
            assert_eq!(due[1], absent("recv 0", 0, &[0, 33, 66]));
            let idle = absent("", 0, &[100]);
            gossip.hold(std::slice::from_ref(&idle), 300, now + LONGEST_PAUSE);
            assert_eq!(gossip.take_due(now + 2 * LONGEST_PAUSE), [idle], "who has nothing in flight is always told of");
            gossip.hold(&[absent("recv 32", 0, &[7])], 300, now + Duration::from_millis(200));
            assert_eq!(gossip.due(), None, "no further one in the same round");
        }
    }

    /// All ranks of a large world wait, since moments that differ by up to 200 ms. Every rank hears of every other rank in time, and the
    /// more of it there is, by the fewer messages: each by itself, they would be 1,200 a rank.
    #[test]
    fn heartbeats_of_all_ranks_reach_all_ranks_at_little_cost() {
        const SIZE: usize = 300;
        for (again_millis, messages_max) in [(500, 4 * SIZE), (4_000, 4 * 60), (40_000, 4 * 40)] {
            let start = Instant::now();
            let mut ranks: Vec<Gossip> = (0..SIZE).map(|_| Gossip::default()).collect();
            let mut coming: Vec<Vec<Heartbeat>> = vec![Vec::new(); SIZE];
            let (mut messages, mut millis) = (0, 0);
            // Each step takes a millisecond beside the pause.
            let steps = steps_to_all(SIZE) as u64;
            let most = 200 + (again_millis / 32).min(20 * steps) + steps + 2;
            while ranks.iter().any(|gossip| gossip.last.len() < SIZE || gossip.due().is_some()) {
                assert!(millis <= most, "not all are known after {millis} ms");
                let now = start + Duration::from_millis(millis);
                for (rank, coming) in
                    coming.iter_mut().enumerate().filter(|(rank, _)| rank * 7919 % 200 == millis as usize)
                {
                    coming.push(Heartbeat { again_millis, ..heartbeat(7, 0, &[rank as u32]) });
                }
                let mut next = vec![Vec::new(); SIZE];
                for (rank, (gossip, heard)) in ranks.iter_mut().zip(coming).enumerate() {
                    let new = gossip.filter(heard.into_iter());
                    gossip.hold(&new, SIZE, now);
                    let due = gossip.take_due(now);
                    assert!(due.len() <= 1, "heartbeats that are alike are merged");
                    for neighbour in neighbours(Rank::from(rank), SIZE) {
                        messages += due.len();
                        next[neighbour.index()].extend(due.iter().cloned());
                    }
                }
                (coming, millis) = (next, millis + 1);
            }
            let each = messages / SIZE;
            assert!(each <= messages_max, "again after {again_millis} ms: {each} messages a rank in {millis} ms");
        }
    }
}
