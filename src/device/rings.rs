//! The values of the words of rings: how many chunks have gone each way, and which cells are free.
//!
//! The head of a pair counts chunks and messages without data, its tail only chunks, which take the pair's cells in turn. Both
//! words count for as long as the pair lives. Both ends count alike, because they issue the pair's messages in the same order.

use smallvec::SmallVec;

use crate::device::counters::{Word, WordAccess};
use crate::device::rounds::{CELLS, Direction, Flow, RingWord, Rounds};
use crate::types::Rank;

/// What one rank has counted at its ends of the rings of a lane.
#[derive(Clone, Debug)]
pub struct Rings {
    me: Rank,
    /// By peer.
    sent: Vec<Passed>,
    received: Vec<Passed>,
}

/// What has gone through a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Passed {
    /// Chunks, and messages without data.
    published: u64,
    chunks: u64,
}

/// The values that a batch's numbers stand for.
#[derive(Clone, Debug)]
pub struct RingNumbering {
    me: Rank,
    /// By peer, what went before.
    sent: SmallVec<[Passed; 8]>,
    received: SmallVec<[Passed; 8]>,
}

impl Rings {
    /// The rings of rank `me` among so many, through which nothing has gone.
    pub fn new(me: Rank, size: usize) -> Rings {
        Rings { me, sent: vec![Passed::default(); size], received: vec![Passed::default(); size] }
    }

    /// How many messages this rank has sent itself through its ring and not received, as [`Rounds::new`] wants it.
    pub fn ahead(&self) -> i64 {
        let me = self.me.index();
        self.sent[me].published.wrapping_sub(self.received[me].published) as i64
    }

    /// The words that the batches taken up so far wait for, and the greatest values.
    pub(crate) fn awaits(&self) -> impl Iterator<Item = (Word, u64)> + '_ {
        let nothing = |peer: usize, direction| Flow { peer: Rank::from(peer), direction, published: 0, chunks: 0 };
        let flows = (0..self.sent.len())
            .flat_map(move |peer| [Direction::Receive, Direction::Send].map(|way| nothing(peer, way)));
        flows.map(|flow| self.awaits_after(&flow))
    }

    /// The word that a ring's messages wait for, and the greatest value, once this flow is taken up.
    pub(crate) fn awaits_after(&self, flow: &Flow) -> (Word, u64) {
        let (me, peer) = (self.me, flow.peer);
        match flow.direction {
            Direction::Receive => {
                let head = Word::Head { sender: peer, receiver: me };
                (head, self.received[peer.index()].published + flow.published)
            }
            Direction::Send => {
                // The last chunk waits for the one that lay in its cell.
                let chunks = self.sent[peer.index()].chunks + flow.chunks;
                (Word::Tail { sender: me, receiver: peer }, chunks.saturating_sub(CELLS as u64))
            }
        }
    }

    /// Counts what goes through one ring from the beginning.
    pub(crate) fn reset(&mut self, peer: Rank, direction: Direction) {
        let passed = match direction {
            Direction::Send => &mut self.sent,
            Direction::Receive => &mut self.received,
        };
        passed[peer.index()] = Passed::default();
    }

    /// Takes up a batch. Batches that share a pair are taken up, and run, in the same order at both of its ends.
    pub fn take_up(&mut self, rounds: &Rounds) -> RingNumbering {
        let (sent, received) = (SmallVec::from_slice(&self.sent), SmallVec::from_slice(&self.received));
        for flow in &rounds.flows {
            let passed = match flow.direction {
                Direction::Send => &mut self.sent[flow.peer.index()],
                Direction::Receive => &mut self.received[flow.peer.index()],
            };
            passed.published += flow.published;
            passed.chunks += flow.chunks;
        }
        RingNumbering { me: self.me, sent, received }
    }
}

impl RingNumbering {
    /// What an operation of the batch does; nothing if the cell that it would wait for has never been used.
    pub fn access(&self, word: RingWord) -> Option<WordAccess> {
        let me = self.me;
        match word {
            RingWord::Credit { to, chunk } => {
                // All chunks up to this one but the last `CELLS`, which may lie in the ring together.
                let done = (self.sent[to.index()].chunks + chunk + 1).saturating_sub(CELLS as u64);
                (done > 0).then_some(WordAccess::Wait(Word::Tail { sender: me, receiver: to }, done))
            }
            RingWord::Publish { to, number } => {
                let value = self.sent[to.index()].published + number;
                Some(WordAccess::Write(Word::Head { sender: me, receiver: to }, value))
            }
            RingWord::Await { from, number } => {
                let value = self.received[from.index()].published + number;
                Some(WordAccess::Wait(Word::Head { sender: from, receiver: me }, value))
            }
            RingWord::Release { from, chunk } => {
                let value = self.received[from.index()].chunks + chunk + 1;
                Some(WordAccess::Write(Word::Tail { sender: from, receiver: me }, value))
            }
        }
    }

    /// The cell of a chunk of the ring to or from a peer.
    pub fn cell(&self, peer: Rank, direction: Direction, chunk: u64) -> usize {
        let before = match direction {
            Direction::Send => self.sent[peer.index()].chunks,
            Direction::Receive => self.received[peer.index()].chunks,
        };
        ((before + chunk) % CELLS as u64) as usize
    }
}
