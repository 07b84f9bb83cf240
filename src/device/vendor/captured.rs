//! What ranks tell each other of a call of a library in a capture, and whether it goes together.
//!
//! A graph runs what was captured again and again, so all ranks, of all hosts, agree before anything is in it.

use serde::{Deserialize, Serialize};

use crate::device::call_log::{Blocks, Difference, Disagreement, LoggedCall};
use crate::types::Rank;

/// What a rank has called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ToldCall {
    number: u64,
    call: [u64; LoggedCall::WORDS],
    /// The elements of the blocks of an all_to_all, by rank.
    sent: Vec<u64>,
    received: Vec<u64>,
    /// A rank with which the library has not connected it.
    unconnected: Option<u32>,
}

/// Why nothing goes into the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// This rank and another one have called something else, or two others.
    Disagreement(Disagreement),
    /// The ranks are at other numbers.
    Number { rank: Rank, number: u64 },
    /// The library would connect these two in the capture.
    Unconnected(Rank, Rank),
}

impl ToldCall {
    pub(crate) fn new(
        number: u64,
        call: LoggedCall,
        blocks: Option<Blocks<'_>>,
        unconnected: Option<Rank>,
    ) -> ToldCall {
        let counts = |of: fn(&Blocks<'_>) -> Vec<u64>| blocks.as_ref().map(of).unwrap_or_default();
        let sent = counts(|blocks| blocks.sent.iter().map(|count| count as u64).collect());
        let received = counts(|blocks| blocks.received.iter().map(|count| count as u64).collect());
        let unconnected = unconnected.map(|rank| rank.0);
        ToldCall { number, call: call.to_words(), sent, received, unconnected }
    }

    /// Why what all ranks have told, by rank, does not go together: found on every rank alike.
    pub(crate) fn obstacle(told: &[ToldCall], me: Rank) -> Option<Obstacle> {
        let ranks = || told.iter().enumerate().map(|(rank, told)| (Rank::from(rank), told));
        let own = &told[me.index()];
        if let Some((rank, other)) = ranks().find(|(_, other)| other.number != own.number) {
            return Some(Obstacle::Number { rank, number: other.number });
        }
        let call = LoggedCall::from_words(own.call);
        let differs = |other: &ToldCall| !call.goes_with(&LoggedCall::from_words(other.call));
        if let Some((rank, other)) = ranks().find(|(_, other)| differs(other)) {
            let what = Difference::Call(LoggedCall::from_words(other.call));
            return Some(Obstacle::Disagreement(Disagreement { rank, what }));
        }
        for ((sender, from), (receiver, into)) in ranks().flat_map(|from| ranks().map(move |into| (from, into))) {
            let counts = from.sent.get(receiver.index()).zip(into.received.get(sender.index()));
            if let Some((sent, expected)) = counts.filter(|(sent, expected)| sent != expected) {
                let what = Difference::Block { sender, sent: *sent, receiver, expected: *expected };
                return Some(Obstacle::Disagreement(Disagreement { rank: sender, what }));
            }
        }
        let lacking = ranks().find_map(|(rank, told)| Some((rank, told.unconnected?)));
        lacking.map(|(rank, peer)| Obstacle::Unconnected(rank, Rank(peer)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::Counts;
    use crate::device::call_log::{CallMemory, Capture};
    use crate::signature::Signature;

    fn call(memory: CallMemory) -> LoggedCall {
        LoggedCall::new(Signature::from_words([5, 7]), 1, Capture::Captured).with_memory(memory)
    }

    fn told(sent: &[usize], received: &[usize]) -> ToldCall {
        let [sent, received] = [sent, received].map(|counts| counts.iter().copied().collect::<Counts>());
        let blocks = Blocks { sent: &sent, received: &received };
        ToldCall::new(3, call(CallMemory::None), Some(blocks), None)
    }

    #[test]
    fn calls_that_are_alike_go_together() {
        let plain = ToldCall::new(3, call(CallMemory::Plain), None, None);
        let none = ToldCall::new(3, call(CallMemory::None), None, None);
        for me in 0..3 {
            assert_eq!(ToldCall::obstacle(&[plain.clone(), none.clone(), plain.clone()], Rank(me)), None);
        }
        assert_eq!(ToldCall::obstacle(&[told(&[1, 2], &[1, 4]), told(&[4, 0], &[2, 0])], Rank(1)), None);
    }

    #[test]
    fn a_rank_at_neither_end_of_a_block_finds_it_too() {
        let all = [told(&[0, 2, 0], &[0; 3]), told(&[0; 3], &[3, 0, 0]), told(&[0; 3], &[0; 3])];
        for me in 0..3 {
            let Some(Obstacle::Disagreement(found)) = ToldCall::obstacle(&all, Rank(me)) else { panic!("rank {me}") };
            let block = Difference::Block { sender: Rank(0), sent: 2, receiver: Rank(1), expected: 3 };
            assert_eq!(found.what, block);
        }
    }

    #[test]
    fn every_rank_finds_what_stands_in_the_way() {
        let registered = ToldCall::new(3, call(CallMemory::Registered), None, None);
        let plain = ToldCall::new(3, call(CallMemory::Plain), None, None);
        for me in 0..2 {
            let found = ToldCall::obstacle(&[registered.clone(), plain.clone()], Rank(me));
            assert!(matches!(found, Some(Obstacle::Disagreement(_))), "{found:?}");
        }
        let late = ToldCall { number: 4, ..plain.clone() };
        let found = ToldCall::obstacle(&[plain.clone(), late], Rank(0));
        assert_eq!(found, Some(Obstacle::Number { rank: Rank(1), number: 4 }));
        let new = ToldCall { unconnected: Some(0), ..plain.clone() };
        for me in 0..2 {
            let found = ToldCall::obstacle(&[plain.clone(), new.clone()], Rank(me));
            assert_eq!(found, Some(Obstacle::Unconnected(Rank(1), Rank(0))));
        }
    }
}
