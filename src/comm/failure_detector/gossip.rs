//! Which heartbeats a rank passes on to its neighbours: each once, and those that come together as one.

use rustc_hash::FxHashMap;

use crate::engine::heartbeat::Heartbeat;
use crate::types::Rank;

/// The heartbeats that a rank has passed on.
#[derive(Default)]
pub(super) struct Gossip {
    /// The collective and the round of each rank's last heartbeat.
    last: FxHashMap<Rank, (u64, u32)>,
}

impl Gossip {
    /// The heartbeats that are new here, those that differ in nothing but their ranks merged into one.
    pub(super) fn filter(&mut self, heartbeats: impl Iterator<Item = Heartbeat>) -> Vec<Heartbeat> {
        let mut new: Vec<Heartbeat> = Vec::new();
        for mut heartbeat in heartbeats {
            let moment = Some((heartbeat.sequence, heartbeat.round));
            heartbeat.ranks.retain(|rank| {
                let is_new = self.last.get(rank).copied() < moment;
                self.last.extend(moment.filter(|_| is_new).map(|moment| (*rank, moment)));
                is_new
            });
            if heartbeat.ranks.is_empty() {
                continue;
            }
            match new.iter_mut().find(|other| is_alike(other, &heartbeat)) {
                Some(other) => other.ranks.append(&mut heartbeat.ranks),
                None => new.push(heartbeat),
            }
        }
        new
    }
}

/// Whether two heartbeats differ in nothing but their ranks.
fn is_alike(one: &Heartbeat, other: &Heartbeat) -> bool {
    (one.sequence, one.round, one.again_millis, one.signature)
        == (other.sequence, other.round, other.again_millis, other.signature)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::failure_detector::neighbours::neighbours;
    use crate::signature::Signature;

    fn heartbeat(sequence: u64, round: u32, ranks: &[u32]) -> Heartbeat {
        let ranks = ranks.iter().copied().map(Rank).collect();
        Heartbeat { sequence, signature: Signature::default(), round, again_millis: 500, ranks }
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

    /// All ranks of a large world wait at once. Every rank hears of every other rank, at most once from each neighbour.
    #[test]
    fn heartbeats_of_all_ranks_reach_all_ranks_at_little_cost() {
        const SIZE: usize = 300;
        let mut ranks: Vec<Gossip> = (0..SIZE).map(|_| Gossip::default()).collect();
        let mut pending: Vec<Vec<Heartbeat>> = (0..SIZE as u32).map(|rank| vec![heartbeat(7, 0, &[rank])]).collect();
        let (mut messages, mut steps) = (0, 0);
        while pending.iter().any(|heartbeats| !heartbeats.is_empty()) {
            let mut next = vec![Vec::new(); SIZE];
            for (rank, heartbeats) in pending.into_iter().enumerate() {
                let new = ranks[rank].filter(heartbeats.into_iter());
                assert!(new.len() <= 1, "heartbeats that are alike are merged");
                for neighbour in neighbours(Rank::from(rank), SIZE) {
                    messages += new.len();
                    next[neighbour.index()].extend(new.iter().cloned());
                }
            }
            pending = next;
            steps += 1;
        }
        assert!(ranks.iter().all(|gossip| gossip.last.len() == SIZE));
        assert!(steps <= SIZE.isqrt() + 3, "{steps} steps");
        assert!(messages <= SIZE * 4 * steps, "{messages} messages");
    }
}
