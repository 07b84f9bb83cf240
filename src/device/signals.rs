//! The words of windows, by which ranks signal each other.
//!
//! The words lie at the end of the control segment. A window has a slot of them while it is registered, the same on every rank.
//! Outside of graphs a signal is a count: the sender's stream writes it, the receiver's waits for it. It only grows until
//! another window gets the slot.
//!
//! # In graphs
//! Values are fixed in a graph, so two flags replace the count: a signal is *ready* or not, and the sender is *free* to send
//! the next one or not. At first the sender is free. Its stream waits for *free*, clears it, and then sets *ready*; the
//! receiver's stream waits for *ready*, clears it, and then sets *free*. So one of the two ranks at a time writes each word,
//! and a flag that one rank has set only the other one clears. As long as the signals of a rank to another one through a window
//! come one after the other, and so do the waits for them, no signal is lost or taken twice, however often graphs run and
//! however far apart the ranks are. One signal can be on its way; the next one waits until it is taken.

use crate::sync::{Arc, Ordering};
use crate::sys::cuda::Width;
use crate::sys::words::SharedWords;
use crate::types::Rank;

/// The words of the windows of a communicator.
#[derive(Clone, Debug)]
pub(crate) struct Signals {
    words: Arc<SharedWords>,
    /// The number of the first word.
    first: usize,
    ranks: usize,
    width: Width,
}

/// Signals from one rank to another through the window in `slot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) slot: usize,
    pub(crate) receiver: Rank,
    pub(crate) sender: Rank,
}

/// What a word of a line tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// How many signals have been sent outside of graphs.
    Count,
    /// A signal of a graph is there.
    Ready,
    /// The next signal of a graph may be sent.
    Free,
    /// In which operation of a graph the receiver's stream is; zero if in none.
    Waiting,
    /// In which operation the sender's stream is.
    Signalling,
}

/// What a stream does with a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// It waits until the word is at least this.
    Wait(usize, u64),
    /// It writes this.
    Write(usize, u64),
}

/// What one end of a line does in a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InGraph {
    pub(crate) steps: [Step; 5],
    /// The word by which its stream says that it is in the operation.
    pub(crate) busy: usize,
    /// The word that its stream waits for to be one.
    pub(crate) awaited: usize,
}

/// How many windows can be registered at once.
pub(crate) const SLOTS: usize = 64;

/// How many words a line has.
const TOLD: usize = 5;

/// How many words so many ranks need.
pub(crate) fn count(ranks: usize) -> usize {
    SLOTS * ranks * ranks * TOLD
}

impl Signals {
    /// The words of `ranks` ranks, from the word `first` on.
    ///
    /// # Panics
    /// When `words` has fewer.
    pub(crate) fn new(words: Arc<SharedWords>, first: usize, ranks: usize, width: Width) -> Signals {
        assert!(first + count(ranks) <= words.count(), "{} words", words.count());
        Signals { words, first, ranks, width }
    }

    pub(crate) fn index(&self, line: Line, told: Told) -> usize {
        let Line { slot, receiver, sender } = line;
        let (to, from) = (receiver.index(), sender.index());
        assert!(slot < SLOTS && to < self.ranks && from < self.ranks, "no word of {line:?}");
        self.first + ((slot * self.ranks + to) * self.ranks + from) * TOLD + told as usize
    }

    /// The words, and how many bits of a word streams look at.
    pub(crate) fn words(&self) -> (&Arc<SharedWords>, Width) {
        (&self.words, self.width)
    }

    /// What the sender's stream does for a signal of a graph, as the operation of this number.
    pub(crate) fn signal_in_graph(&self, line: Line, operation: u64) -> InGraph {
        self.in_graph(line, operation, Told::Signalling, Told::Free, Told::Ready)
    }

    /// What the receiver's stream does to take it.
    pub(crate) fn wait_in_graph(&self, line: Line, operation: u64) -> InGraph {
        self.in_graph(line, operation, Told::Waiting, Told::Ready, Told::Free)
    }

    fn in_graph(&self, line: Line, operation: u64, busy: Told, awaited: Told, given: Told) -> InGraph {
        let [busy, awaited, given] = [busy, awaited, given].map(|told| self.index(line, told));
        let steps = [
            Step::Write(busy, operation),
            Step::Wait(awaited, 1),
            Step::Write(awaited, 0),
            Step::Write(given, 1),
            Step::Write(busy, 0),
        ];
        InGraph { steps, busy, awaited }
    }

    /// Resets the words by which this rank's streams wait or say where they are. No rank may use the slot.
    pub(crate) fn reset(&self, slot: usize, me: Rank) {
        for peer in (0..self.ranks).map(Rank::from) {
            let (to_me, from_me) =
                (Line { slot, receiver: me, sender: peer }, Line { slot, receiver: peer, sender: me });
            for told in [Told::Count, Told::Ready, Told::Waiting] {
                self.store(to_me, told, 0);
            }
            self.store(from_me, Told::Free, 1);
            self.store(from_me, Told::Signalling, 0);
        }
    }

    fn store(&self, line: Line, told: Told, value: u64) {
        self.words.word(self.index(line, told)).store(value, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn signals(first: usize, ranks: usize) -> Signals {
        let words = SharedWords::new(first + count(ranks)).expect("words");
        Signals::new(Arc::new(words), first, ranks, Width::Bits64)
    }

    fn line(slot: usize, receiver: u32, sender: u32) -> Line {
        Line { slot, receiver: Rank(receiver), sender: Rank(sender) }
    }

    impl Signals {
        fn value(&self, line: Line, told: Told) -> u64 {
            self.words.word(self.index(line, told)).load(Ordering::Acquire)
        }
    }

    /// Does what a stream does until it has to wait. Returns the steps left.
    fn run<'a>(signals: &Signals, steps: &'a [Step]) -> &'a [Step] {
        for (done, step) in steps.iter().enumerate() {
            match *step {
                Step::Wait(word, value) if signals.words.word(word).load(Ordering::Acquire) < value => {
                    return &steps[done..];
                }
                Step::Wait(..) => {}
                Step::Write(word, value) => signals.words.word(word).store(value, Ordering::Release),
            }
        }
        &[]
    }

    #[test]
    fn every_word_has_one_use() {
        let (first, ranks) = (7, 3);
        let signals = signals(first, ranks);
        let all = || 0..ranks as u32;
        let told = [Told::Count, Told::Ready, Told::Free, Told::Waiting, Told::Signalling];
        let words: BTreeSet<usize> = (0..SLOTS)
            .flat_map(|slot| all().flat_map(move |to| all().map(move |from| line(slot, to, from))))
            .flat_map(|line| told.map(|told| signals.index(line, told)))
            .collect();
        assert_eq!(words, (first..first + count(ranks)).collect());
    }

    #[test]
    fn a_reset_is_of_what_its_rank_waits_for() {
        let signals = signals(0, 2);
        let lines = [line(0, 1, 0), line(0, 1, 1), line(0, 0, 1), line(1, 1, 0)];
        lines.iter().for_each(|line| signals.store(*line, Told::Count, 5));
        signals.reset(0, Rank(1));
        assert_eq!(lines.map(|line| signals.value(line, Told::Count)), [0, 0, 5, 5]);
        assert_eq!(lines.map(|line| signals.value(line, Told::Free)), [0, 1, 1, 0]);
    }

    #[test]
    fn one_signal_of_a_graph_is_on_its_way_and_none_is_lost() {
        let signals = signals(0, 2);
        let line = line(3, 1, 0);
        (0..2).for_each(|rank| signals.reset(3, Rank(rank)));
        let (send, take) = (signals.signal_in_graph(line, 5).steps, signals.wait_in_graph(line, 9).steps);
        for _ in 0..3 {
            let waits = run(&signals, &take);
            assert!(waits.len() == 4 && signals.value(line, Told::Waiting) == 9, "nothing has come");
            assert!(run(&signals, &send).is_empty() && signals.value(line, Told::Signalling) == 0);
            let next = run(&signals, &send);
            assert!(next.len() == 4 && signals.value(line, Told::Signalling) == 5, "the first one is not taken");
            assert!(run(&signals, waits).is_empty() && run(&signals, next).is_empty());
            assert!(run(&signals, &take).is_empty() && signals.value(line, Told::Waiting) == 0);
        }
        assert_eq!(signals.value(line, Told::Count), 0, "those of graphs are not counted");
    }
}
