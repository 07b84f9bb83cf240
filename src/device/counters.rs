//! The values of a lane's words: how many messages have gone each way, and which staging memory is free.
//!
//! All ranks take up the programs of one lane in the same order, so they count alike without telling each other.

use smallvec::SmallVec;

use crate::device::halves::{Halves, Phase};
use crate::device::lower::{Program, WordOperation};
use crate::types::Rank;

/// What one rank has counted on one lane.
#[derive(Clone, Debug)]
pub struct Counters {
    halves: Halves,
    /// By peer, the messages sent and received so far.
    sent: Vec<u64>,
    received: Vec<u64>,
    /// By half and peer, the number of the last message in it; zero if none was.
    last: [Vec<u64>; 2],
    /// The same, as it was when the segment began that uses the half; zero once the stream waits for it.
    before: [Vec<u64>; 2],
    /// The messages sent to other hosts and received from there so far.
    outbound: u64,
    inbound: u64,
    /// By half, the number of the last message to other hosts in it, and the same as above.
    last_outbound: [u64; 2],
    before_outbound: [u64; 2],
}

/// A word that two ranks share, or that a rank's stream shares with its CPU engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Word {
    /// How many messages `sender` has published for `receiver`.
    Head {
        /// The rank whose stream writes it.
        sender: Rank,
        /// The rank whose stream waits for it.
        receiver: Rank,
    },
    /// How many of these messages `receiver` is done with.
    Tail {
        /// The rank whose stream waits for it.
        sender: Rank,
        /// The rank whose stream writes it.
        receiver: Rank,
    },
    /// How many messages to other hosts a rank's stream has made ready. Its CPU engine looks at the word.
    Outbound {
        /// The rank.
        of: Rank,
    },
    /// How many messages to other hosts a rank's CPU engine has sent. Its stream waits for the word.
    Sent {
        /// The rank.
        of: Rank,
    },
    /// How many messages from other hosts a rank's CPU engine has received. Its stream waits for the word.
    Inbound {
        /// The rank.
        of: Rank,
    },
    /// How many messages from other hosts a rank's stream is done with. Its CPU engine looks at the word.
    Taken {
        /// The rank.
        of: Rank,
    },
}

/// What a stream does to a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordAccess {
    /// The stream waits until the word is at least this value.
    Wait(Word, u64),
    /// The stream writes this value.
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
    outbound: u64,
    inbound: u64,
    credits: SmallVec<[WordAccess; 8]>,
}

impl Counters {
    /// A lane of `size` ranks on which nothing has happened.
    pub fn new(size: usize) -> Counters {
        let zeros = || vec![0; size];
        let halves = || [zeros(), zeros()];
        Counters {
            halves: Halves::default(),
            sent: zeros(),
            received: zeros(),
            last: halves(),
            before: halves(),
            outbound: 0,
            inbound: 0,
            last_outbound: [0; 2],
            before_outbound: [0; 2],
        }
    }

    /// How many messages have been sent to other hosts, and how many received from there.
    pub fn network(&self) -> (u64, u64) {
        (self.outbound, self.inbound)
    }

    /// The number of the last message to a peer that lay in staging memory: the stream waits for no greater value.
    pub fn staged(&self, peer: Rank) -> u64 {
        self.last.iter().map(|half| half[peer.index()]).max().unwrap_or(0)
    }

    /// By peer, how many messages have been received.
    pub fn received(&self) -> &[u64] {
        &self.received
    }

    /// Takes up the program of the next segment, or of the next part of one.
    ///
    /// Every rank takes up one for every segment, also a rank that has nothing to do in it.
    pub fn take_up(&mut self, me: Rank, program: &Program) -> Numbering {
        let phase = program.traffic.phase;
        let half = self.halves.take(phase);
        let (last, before) = (&mut self.last[half], &mut self.before[half]);
        if phase != Phase::Rest {
            before.clone_from(last);
            self.before_outbound[half] = self.last_outbound[half];
        }
        let writes = program.sent.iter().any(|sent| sent.staged > 0);
        let credit = |(reader, number): (usize, &mut u64)| {
            let tail = Word::Tail { sender: me, receiver: Rank::from(reader) };
            Some(std::mem::take(number)).filter(|number| *number > 0).map(|number| WordAccess::Wait(tail, number))
        };
        let readers = before.iter_mut().enumerate().filter(|_| writes);
        let mut credits: SmallVec<[WordAccess; 8]> = readers.filter_map(credit).collect();
        let (outbound, inbound) = (self.outbound, self.inbound);
        self.outbound += program.traffic.outbound.len() as u64;
        self.inbound += program.traffic.inbound.len() as u64;
        if program.traffic.outbound.iter().any(|parcel| parcel.bytes > 0) {
            self.last_outbound[half] = self.outbound;
            let before = std::mem::take(&mut self.before_outbound[half]);
            credits.extend((before > 0).then_some(WordAccess::Wait(Word::Sent { of: me }, before)));
        }
        let (sent, received) = (SmallVec::from_slice(&self.sent), SmallVec::from_slice(&self.received));
        for (peer, now) in program.sent.iter().enumerate().filter(|(_, now)| now.staged > 0) {
            last[peer] = self.sent[peer] + u64::from(now.staged);
        }
        self.sent.iter_mut().zip(&program.sent).for_each(|(sent, now)| *sent += u64::from(now.messages));
        self.received.iter_mut().zip(&program.received).for_each(|(received, now)| *received += u64::from(*now));
        Numbering { me, half, sent, received, outbound, inbound, credits }
    }
}

impl Numbering {
    /// The half of memory that the segment uses, on every rank.
    pub fn half(&self) -> usize {
        self.half
    }

    /// What the stream waits for before the program's operations: for the readers of the messages that lay in this half.
    pub fn credits(&self) -> &[WordAccess] {
        &self.credits
    }

    /// What an operation of the program does.
    pub fn access(&self, operation: WordOperation) -> WordAccess {
        let me = self.me;
        match operation {
            WordOperation::Await { from, number } => WordAccess::Wait(
                Word::Head { sender: from, receiver: me },
                self.received[from.index()] + u64::from(number),
            ),
            WordOperation::Publish { to, number } => {
                WordAccess::Write(Word::Head { sender: me, receiver: to }, self.sent[to.index()] + u64::from(number))
            }
            WordOperation::Release { from, number } => {
                let value = self.received[from.index()] + u64::from(number);
                WordAccess::Write(Word::Tail { sender: from, receiver: me }, value)
            }
            WordOperation::AwaitInbound { number } => {
                WordAccess::Wait(Word::Inbound { of: me }, self.inbound + u64::from(number))
            }
            WordOperation::PublishOutbound { number } => {
                WordAccess::Write(Word::Outbound { of: me }, self.outbound + u64::from(number))
            }
            WordOperation::ReleaseInbound { number } => {
                WordAccess::Write(Word::Taken { of: me }, self.inbound + u64::from(number))
            }
        }
    }
}
