//! Tokens: what lets an operation of a CUDA graph run again and again with the same values.
//!
//! The values of words are fixed in a graph, so heads and tails cannot count for ever. In a graph each operation counts from
//! zero. Between operations, the rank that waits for a word makes it zero again, when the other rank no longer writes it. Each
//! pair has a *token* that says when that is: the sender takes it before it sends anything, and the receiver puts it back when
//! it has read everything. At first it is there.
//!
//! # Proof
//! Both ends have the same messages of a pair in an operation. The receiver waits for every one of them, hence for the greatest
//! value of its head, before it makes the head zero and puts the token back. The sender takes the token after that, so it then
//! writes the head, and counts from zero. All that the receiver writes to the tail comes before the token too. So the sender
//! that has taken the token makes the tail zero for good: the receiver writes it only after messages that are sent later. Where
//! all messages of an operation share memory, the sender waits for the tokens of all ranks before it writes there, so no rank
//! still reads what lay there before. Nothing of this counts replays or operations, so it holds between replays as between
//! operations of one. An operation waits for what other ranks do in it, and for the ends of the operations before it. So if all
//! ranks take the operations in one order, and each operation ends when all ranks have come to it, all end.

use crate::device::counters::{Word, WordAccess};
use crate::device::lower::Program;
use crate::device::rounds::{Direction, Rounds};
use crate::types::Rank;

/// What one rank does with the tokens of its pairs in one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    me: Rank,
    /// By peer, whether this rank sends it something.
    sends: Vec<bool>,
    /// By peer, whether this rank receives something from it.
    receives: Vec<bool>,
    /// Whether messages share memory that any rank may still read.
    shares: bool,
}

/// What is done to a word, or to the token of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// To a head or tail.
    Count(WordAccess),
    /// To a token, which belongs to the sender and the receiver of this [`Word::Tail`].
    Token(WordAccess),
}

impl Tokens {
    /// The tokens of an operation that consists of these programs, one after the other.
    ///
    /// # Panics
    /// When there are no programs.
    pub fn of_programs<'a>(me: Rank, programs: impl IntoIterator<Item = &'a Program>) -> Tokens {
        let mut tokens = Tokens { me, sends: vec![], receives: vec![], shares: false };
        for program in programs {
            let size = program.sent.len();
            tokens.sends.resize(size, false);
            tokens.receives.resize(size, false);
            tokens.sends.iter_mut().zip(&program.sent).for_each(|(sends, sent)| *sends |= sent.messages > 0);
            tokens.receives.iter_mut().zip(&program.received).for_each(|(receives, count)| *receives |= *count > 0);
            tokens.shares |= program.sent.iter().any(|sent| sent.staged > 0);
        }
        assert!(!tokens.sends.is_empty(), "an operation without programs");
        tokens
    }

    /// The tokens of a batch among `size` ranks, where each pair has memory of its own.
    pub fn of_rounds(me: Rank, size: usize, rounds: &Rounds) -> Tokens {
        let mut tokens = Tokens { me, sends: vec![false; size], receives: vec![false; size], shares: false };
        for flow in &rounds.flows {
            match flow.direction {
                Direction::Send => tokens.sends[flow.peer.index()] = true,
                Direction::Receive => tokens.receives[flow.peer.index()] = true,
            }
        }
        tokens
    }

    /// The ranks whose tokens this rank waits for.
    pub fn awaited(&self) -> impl Iterator<Item = Rank> + '_ {
        let is_awaited = |peer: &Rank| self.sends[peer.index()] || self.shares && *peer != self.me;
        (0..self.sends.len()).map(Rank::from).filter(is_awaited)
    }

    /// What comes first: waits for tokens.
    pub fn waits(&self) -> impl Iterator<Item = Step> + '_ {
        self.awaited().map(|peer| Step::Token(WordAccess::Wait(self.outward(peer), 1)))
    }

    /// What follows: takes the tokens of the ranks to which this rank sends, and makes their tails zero.
    pub fn takes(&self) -> impl Iterator<Item = Step> + '_ {
        ranks(&self.sends).flat_map(|peer| {
            let tail = self.outward(peer);
            [Step::Token(WordAccess::Write(tail, 0)), Step::Count(WordAccess::Write(tail, 0))]
        })
    }

    /// What comes last: resets the heads of the ranks from which this rank receives to zero, and puts their tokens back.
    pub fn returns(&self) -> impl Iterator<Item = Step> + '_ {
        ranks(&self.receives).flat_map(|peer| {
            let head = Word::Head { sender: peer, receiver: self.me };
            let token = Word::Tail { sender: peer, receiver: self.me };
            [Step::Count(WordAccess::Write(head, 0)), Step::Token(WordAccess::Write(token, 1))]
        })
    }

    fn outward(&self, peer: Rank) -> Word {
        Word::Tail { sender: self.me, receiver: peer }
    }
}

/// The ranks whose flag is set.
fn ranks(flags: &[bool]) -> impl Iterator<Item = Rank> + '_ {
    flags.iter().enumerate().filter(|(_, flag)| **flag).map(|(rank, _)| Rank::from(rank))
}
