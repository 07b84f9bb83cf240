//! The values of a lane's words: how many messages have gone each way, and which staging memory is free.
//!
//! All ranks take up the programs of one lane in the same order, so they count alike without telling each other.

use smallvec::SmallVec;

use crate::device::lower::{Program, WordOperation};
use crate::types::Rank;

/// What one rank has counted on one lane.
#[derive(Clone, Debug)]
pub struct Counters {
    /// The half of staging memory that the next segment uses.
    half: usize,
    /// By peer, the messages sent and received so far.
    sent: Vec<u64>,
    received: Vec<u64>,
    /// By half and peer, the number of the last message in it; zero if none was.
    last: [Vec<u64>; 2],
}

/// A word that two ranks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Word {
    /// How many messages `sender` has published for `receiver`.
    Head {
        /// Whose stream writes it.
        sender: Rank,
        /// Whose stream waits for it.
        receiver: Rank,
    },
    /// With how many of them `receiver` is done.
    Tail {
        /// Whose stream waits for it.
        sender: Rank,
        /// Whose stream writes it.
        receiver: Rank,
    },
}

/// What is done to a word when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The stream waits until the word is at least this.
    Wait(Word, u64),
    /// The stream writes this.
    Write(Word, u64),
}

/// The values that a program's numbers stand for.
#[derive(Clone, Debug)]
pub struct Numbering {
    me: Rank,
    half: usize,
    /// By peer, the messages sent and received before.
    sent: SmallVec<[u64; 8]>,
    received: SmallVec<[u64; 8]>,
    credits: SmallVec<[Access; 8]>,
}

impl Counters {
    /// A lane of `size` ranks on which nothing has happened.
    pub fn new(size: usize) -> Counters {
        let zeros = || vec![0; size];
        Counters { half: 0, sent: zeros(), received: zeros(), last: [zeros(), zeros()] }
    }

    /// The number of the last message to a peer that lay in staging memory: what the stream waits for is never more.
    pub fn staged(&self, peer: Rank) -> u64 {
        self.last.iter().map(|half| half[peer.index()]).max().unwrap_or(0)
    }

    /// By peer, how many messages have been received.
    pub fn received(&self) -> &[u64] {
        &self.received
    }

    /// Takes up the program of the next segment.
    ///
    /// Every rank takes up one for every segment, also a rank that has nothing to do in it.
    pub fn take_up(&mut self, me: Rank, program: &Program) -> Numbering {
        let half = self.half;
        let last = &mut self.last[half];
        let writes = program.sent.iter().any(|sent| sent.staged > 0);
        let readers = last.iter().enumerate().filter(|(_, number)| writes && **number > 0);
        let credit = |(reader, number): (usize, &u64)| {
            Access::Wait(Word::Tail { sender: me, receiver: Rank::from(reader) }, *number)
        };
        let credits = readers.map(credit).collect();
        let (sent, received) = (SmallVec::from_slice(&self.sent), SmallVec::from_slice(&self.received));
        for (peer, now) in program.sent.iter().enumerate().filter(|(_, now)| now.staged > 0) {
            last[peer] = self.sent[peer] + u64::from(now.staged);
        }
        self.sent.iter_mut().zip(&program.sent).for_each(|(sent, now)| *sent += u64::from(now.messages));
        self.received.iter_mut().zip(&program.received).for_each(|(received, now)| *received += u64::from(*now));
        self.half = 1 - half;
        Numbering { me, half, sent, received, credits }
    }
}

impl Numbering {
    /// The half of staging memory that the segment uses, on every rank.
    pub fn half(&self) -> usize {
        self.half
    }

    /// What the stream waits for before the program's operations: for the readers of what lay in this half.
    pub fn credits(&self) -> &[Access] {
        &self.credits
    }

    /// What an operation of the program does.
    pub fn access(&self, operation: WordOperation) -> Access {
        let me = self.me;
        match operation {
            WordOperation::Await { from, number } => {
                Access::Wait(Word::Head { sender: from, receiver: me }, self.received[from.index()] + u64::from(number))
            }
            WordOperation::Publish { to, number } => {
                Access::Write(Word::Head { sender: me, receiver: to }, self.sent[to.index()] + u64::from(number))
            }
            WordOperation::Release { from, number } => {
                let value = self.received[from.index()] + u64::from(number);
                Access::Write(Word::Tail { sender: from, receiver: me }, value)
            }
        }
    }
}
