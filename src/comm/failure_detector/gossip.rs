//! Which heartbeats go on to the neighbours: each once, and those that come together as one.

use rustc_hash::FxHashMap;

use crate::engine::heartbeat::Heartbeat;
use crate::types::Rank;

/// What a rank has passed on.
#[derive(Default)]
pub(super) struct Gossip {
    /// Of each rank, the collective and the round of the last heartbeat.
    last: FxHashMap<Rank, (u64, u32)>,
}

impl Gossip {
    /// What is new here of heartbeats that came together: their ranks in as few as possible.
    pub(super) fn learn(&mut self, heartbeats: impl Iterator<Item = Heartbeat>) -> Vec<Heartbeat> {
        let mut learned: Vec<Heartbeat> = Vec::new();
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
            match learned.iter_mut().find(|other| is_alike(other, &heartbeat)) {
                Some(other) => other.ranks.append(&mut heartbeat.ranks),
                None => learned.push(heartbeat),
            }
        }
        learned
    }
}

/// Whether they differ in nothing but their ranks.
fn is_alike(one: &Heartbeat, other: &Heartbeat) -> bool {
    (one.sequence, one.round, one.again_millis, one.signature)
        == (other.sequence, other.round, other.again_millis, other.signature)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::failure_detector::neighbours::neighbours;
    use crate::engine::frame::Signature;

    fn heartbeat(sequence: u64, round: u32, ranks: &[u32]) -> Heartbeat {
        let ranks = ranks.iter().copied().map(Rank).collect();
        Heartbeat { sequence, signature: Signature::default(), round, again_millis: 500, ranks }
    }

    #[test]
    fn each_rank_is_passed_on_once_a_round() {
        let mut gossip = Gossip::default();
        let mut learn = |heartbeats: &[Heartbeat]| gossip.learn(heartbeats.iter().cloned());
        assert_eq!(learn(&[heartbeat(4, 0, &[1, 2])]), [heartbeat(4, 0, &[1, 2])]);
        assert_eq!(learn(&[heartbeat(4, 0, &[2, 3, 3])]), [heartbeat(4, 0, &[3])]);
        assert_eq!(learn(&[heartbeat(4, 0, &[1]), heartbeat(3, 9, &[2])]), []);
        let next = [heartbeat(4, 1, &[1]), heartbeat(5, 0, &[2]), heartbeat(4, 1, &[3])];
        assert_eq!(learn(&next), [heartbeat(4, 1, &[1, 3]), heartbeat(5, 0, &[2])]);
    }

    /// All of a large world wait at once: everyone hears of everyone, and no rank is told of one more often than it has
    /// neighbours.
    #[test]
    fn what_all_say_reaches_all_at_little_cost() {
        const SIZE: usize = 300;
        let mut gossips: Vec<Gossip> = (0..SIZE).map(|_| Gossip::default()).collect();
        let mut told: Vec<Vec<Heartbeat>> = (0..SIZE as u32).map(|rank| vec![heartbeat(7, 0, &[rank])]).collect();
        let (mut messages, mut steps) = (0, 0);
        while told.iter().any(|heartbeats| !heartbeats.is_empty()) {
            let mut next = vec![Vec::new(); SIZE];
            for (rank, heartbeats) in told.into_iter().enumerate() {
                let learned = gossips[rank].learn(heartbeats.into_iter());
                assert!(learned.len() <= 1, "what is alike goes on as one");
                for neighbour in neighbours(Rank::from(rank), SIZE) {
                    messages += learned.len();
                    next[neighbour.index()].extend(learned.iter().cloned());
                }
            }
            told = next;
            steps += 1;
        }
        assert!(gossips.iter().all(|gossip| gossip.last.len() == SIZE));
        assert!(steps <= SIZE.isqrt() + 3, "{steps} steps");
        assert!(messages <= SIZE * 4 * steps, "{messages} messages");
    }
}
