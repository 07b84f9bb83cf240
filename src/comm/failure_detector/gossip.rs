//! Which heartbeats a rank passes on to its neighbours: each once, and those that come within a short while as one.
//!
//! When a collective keeps all ranks waiting, each of them hears of all others. If each told its neighbours at once of each
//! one that it hears of, that would be a message for every two ranks. So a rank waits with what is new for a part of the time after which
//! its sender speaks again: on the longest way a 32nd of that goes by.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::neighbours::{ALL_NEIGHBOURS, steps_to_all};
use crate::engine::heartbeat::{Heartbeat, RankState};
use crate::types::Rank;

/// The heartbeats that a rank has heard, and those that it is to pass on.
#[derive(Default)]
pub(super) struct Gossip {
    /// The collective and the round of each rank's last heartbeat.
    last: FxHashMap<Rank, (u64, u32)>,
    /// The same of what ranks have told of collectives that they have not called, and of which they may wait in an earlier one.
    last_absent: FxHashMap<Rank, (u64, u32)>,
    held: Vec<Heartbeat>,
    /// When they are to be passed on.
    due: Option<Instant>,
}

/// For how long a heartbeat waits at most at each rank on its way.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// Which part of the time until its next one a heartbeat may wait on its whole way.
const PART: u32 = 32;

impl Gossip {
    /// The heartbeats that are new here, those that differ in nothing but their ranks merged into one.
    pub(super) fn filter(&mut self, heartbeats: impl Iterator<Item = Heartbeat>) -> Vec<Heartbeat> {
        let mut new: Vec<Heartbeat> = Vec::new();
        for mut heartbeat in heartbeats {
            let moment = Some((heartbeat.sequence, heartbeat.round));
            let last = match heartbeat.state {
                RankState::Waiting(_) => &mut self.last,
                RankState::Absent(_) => &mut self.last_absent,
            };
            heartbeat.ranks.retain(|rank| {
                let is_new = last.get(rank).copied() < moment;
                last.extend(moment.filter(|_| is_new).map(|moment| (*rank, moment)));
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
            let pause = (Duration::from_millis(heartbeat.again_millis) / parts).min(LONGEST_PAUSE);
            let due = if size > ALL_NEIGHBOURS { now + pause } else { now };
            self.due = Some(self.due.map_or(due, |earlier| earlier.min(due)));
            merge(&mut self.held, heartbeat.clone());
        }
    }

    /// What is to be passed on now.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<Heartbeat> {
        if self.due.is_none_or(|due| now < due) {
            return Vec::new();
        }
        self.due = None;
        std::mem::take(&mut self.held)
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
    is_same_state && (one.sequence, one.round, one.again_millis) == (other.sequence, other.round, other.again_millis)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::failure_detector::neighbours::neighbours;
    use crate::engine::heartbeat::InFlight;
    use crate::signature::Signature;

    fn heartbeat(sequence: u64, round: u32, ranks: &[u32]) -> Heartbeat {
        let ranks = ranks.iter().copied().map(Rank).collect();
        let state = RankState::Waiting(Signature::default());
        Heartbeat { sequence, state, round, again_millis: 500, ranks }
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
    }

    #[test]
    fn ranks_that_are_absent_for_the_same_are_told_of_together_and_apart_from_those_that_wait() {
        let absent = |what: &str, millis, ranks: &[u32]| {
            let what = what.to_owned();
            Heartbeat { state: RankState::Absent(InFlight { what, millis }), ..heartbeat(4, 0, ranks) }
        };
        let mut gossip = Gossip::default();
        let told = [absent("recv", 900, &[1]), absent("send", 3, &[2]), absent("recv", 700, &[3])];
        let new = gossip.filter(told.into_iter());
        assert_eq!(new, [absent("recv", 700, &[1, 3]), absent("send", 3, &[2])]);
        assert_eq!(gossip.filter([heartbeat(4, 0, &[1])].into_iter()), [heartbeat(4, 0, &[1])], "now it has called it");
        assert_eq!(gossip.filter([absent("recv", 950, &[1])].into_iter()), []);
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
