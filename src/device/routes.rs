//! How accesses to the windows of a rank on another host run: what the stream does, and what the engine carries.
//!
//! An access becomes *items*: pieces to put, pieces to get, and signals. Items are numbered for each pair of ranks, and the
//! other end does them in order. The stream counts in one word the items that it has made ready. It puts pieces into [`CELLS`]
//! cells of pinned memory in turn, and fills a cell again once the other end is done with the item that lay there. Pieces that
//! it gets come into as many other cells; it asks for a piece once it has emptied that piece's cell.
//!
//! Accesses to one rank come one after the other, whatever their streams, so a route needs no more than these counts.

use crate::device::rounds::CELLS;

/// What the other end does for an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    /// Copies a cell into a window, from an offset on.
    Put {
        /// Where it begins in the window.
        offset: usize,
        /// The bytes.
        bytes: usize,
        /// The cell, here and at the other end.
        cell: usize,
    },
    /// Copies a part of a window, from an offset on, into a cell.
    Get {
        /// Where it begins in the window.
        offset: usize,
        /// The bytes.
        bytes: usize,
        /// The cell, here and at the other end.
        cell: usize,
    },
    /// Counts a signal: so many have come then.
    Signal {
        /// How many.
        count: u64,
    },
}

/// What a stream does for an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It waits until the other end is done with so many items.
    AwaitDone(u64),
    /// It waits until so many pieces that it has asked for have come.
    AwaitAnswer(u64),
    /// It copies bytes of the caller's, from an offset on, into a cell.
    Fill {
        /// Where they begin in the caller's memory.
        from: usize,
        /// How many.
        bytes: usize,
        /// The cell.
        cell: usize,
    },
    /// It copies bytes out of a cell into the caller's memory, from an offset on.
    Take {
        /// Where they begin in the caller's memory.
        into: usize,
        /// How many.
        bytes: usize,
        /// The cell.
        cell: usize,
    },
    /// It says that so many items are ready.
    Publish(u64),
}

/// What an access becomes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// What the engine carries, in order.
    pub items: Vec<Item>,
    /// What the stream does, in order.
    pub actions: Vec<Action>,
}

/// The way to one rank of another host.
#[derive(Clone, Debug)]
pub struct Route {
    /// The bytes of a cell.
    cell: usize,
    /// The items so far.
    items: u64,
    /// The pieces put so far, and by cell the number of the last item that lay there; zero if none did.
    pieces: u64,
    last: [u64; CELLS],
    /// The pieces asked for so far.
    answers: u64,
}

impl Route {
    /// A route with cells of so many bytes.
    ///
    /// # Panics
    /// When a cell has no bytes.
    pub fn new(cell: usize) -> Route {
        assert!(cell > 0, "a cell without bytes");
        Route { cell, items: 0, pieces: 0, last: [0; CELLS], answers: 0 }
    }

    /// Takes up a put of so many bytes to an offset of a window.
    ///
    /// ```
    /// use ncclx_rs::device::routes::{Action, Item, Route};
    /// let steps = Route::new(8).put(100, 10);
    /// let pieces = [Item::Put { offset: 100, bytes: 8, cell: 0 }, Item::Put { offset: 108, bytes: 2, cell: 1 }];
    /// assert_eq!(steps.items, pieces);
    /// assert_eq!(steps.actions[..2], [Action::Fill { from: 0, bytes: 8, cell: 0 }, Action::Publish(1)]);
    /// ```
    pub fn put(&mut self, offset: usize, len: usize) -> Steps {
        let mut steps = Steps::default();
        for (from, bytes) in self.cuts(len) {
            let cell = (self.pieces % CELLS as u64) as usize;
            self.pieces += 1;
            self.items += 1;
            let emptied = std::mem::replace(&mut self.last[cell], self.items);
            steps.items.push(Item::Put { offset: offset + from, bytes, cell });
            steps.actions.extend(credit(self.items, emptied));
            steps.actions.extend([Action::Fill { from, bytes, cell }, Action::Publish(self.items)]);
        }
        steps
    }

    /// Takes up a get of so many bytes from an offset of a window.
    pub fn get(&mut self, offset: usize, len: usize) -> Steps {
        let mut steps = Steps::default();
        let (before, first) = (self.items, self.answers);
        let cuts: Vec<(usize, usize)> = self.cuts(len).collect();
        let cell = |index: usize| ((first + index as u64) % CELLS as u64) as usize;
        for (index, (from, bytes)) in cuts.iter().enumerate() {
            steps.items.push(Item::Get { offset: offset + from, bytes: *bytes, cell: cell(index) });
        }
        self.items += cuts.len() as u64;
        self.answers += cuts.len() as u64;
        let asks = |index: usize| {
            let item = before + index as u64 + 1;
            credit(item, 0).into_iter().chain([Action::Publish(item)])
        };
        (0..cuts.len().min(CELLS)).for_each(|index| steps.actions.extend(asks(index)));
        for (index, (into, bytes)) in cuts.iter().enumerate() {
            steps.actions.push(Action::AwaitAnswer(first + index as u64 + 1));
            steps.actions.push(Action::Take { into: *into, bytes: *bytes, cell: cell(index) });
            if index + CELLS < cuts.len() {
                steps.actions.extend(asks(index + CELLS));
            }
        }
        steps
    }

    /// Takes up a signal, after which so many have been sent through its window.
    pub fn signal(&mut self, count: u64) -> Steps {
        self.items += 1;
        let actions = credit(self.items, 0).into_iter().chain([Action::Publish(self.items)]).collect();
        Steps { items: vec![Item::Signal { count }], actions }
    }

    /// Where pieces begin, and how long they are.
    fn cuts(&self, len: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let cell = self.cell;
        (0..len).step_by(cell).map(move |from| (from, cell.min(len - from)))
    }
}

/// What an item waits for: the other end is done with the item that lay in its cell, and at most [`UNDER_WAY`] are under way.
fn credit(item: u64, emptied: u64) -> Option<Action> {
    let done = emptied.max(item.saturating_sub(UNDER_WAY));
    (done > 0).then_some(Action::AwaitDone(done))
}

/// How many items can be on their way to a rank. This bounds what an engine keeps of them.
pub const UNDER_WAY: u64 = 1024;

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// The other end and the engine, which do everything as late as they may: only when the stream waits.
    #[derive(Default)]
    struct World {
        window: Vec<u8>,
        /// The cells of what goes, at either end, and of what comes.
        cells: [[Vec<u8>; CELLS]; 2],
        queue: VecDeque<Item>,
        published: u64,
        done: u64,
        answered: u64,
        signals: u64,
    }

    impl World {
        fn do_next(&mut self) {
            assert!(self.published > self.done, "the stream waits for what it has not made ready");
            match self.queue.pop_front().expect("a ready item is known") {
                Item::Put { offset, bytes, cell } => {
                    self.window[offset..offset + bytes].copy_from_slice(&self.cells[0][cell]);
                }
                Item::Get { offset, bytes, cell } => {
                    self.cells[1][cell] = self.window[offset..offset + bytes].to_vec();
                    self.answered += 1;
                }
                Item::Signal { count } => self.signals = count,
            }
            self.done += 1;
        }

        fn run(&mut self, steps: Steps, memory: &mut [u8]) {
            self.queue.extend(steps.items);
            for action in steps.actions {
                match action {
                    Action::AwaitDone(count) => (self.done..count).for_each(|_| self.do_next()),
                    Action::AwaitAnswer(count) => {
                        while self.answered < count {
                            self.do_next();
                        }
                    }
                    Action::Fill { from, bytes, cell } => {
                        let is_used = self
                            .queue
                            .iter()
                            .take((self.published - self.done) as usize)
                            .any(|item| matches!(item, Item::Put { cell: used, .. } if *used == cell));
                        assert!(!is_used, "cell {cell} is filled while an item on its way lies there");
                        self.cells[0][cell] = memory[from..from + bytes].to_vec();
                    }
                    Action::Take { into, bytes, cell } => {
                        memory[into..into + bytes].copy_from_slice(&std::mem::take(&mut self.cells[1][cell]));
                    }
                    Action::Publish(count) => {
                        assert_eq!(count, self.published + 1);
                        self.published = count;
                        assert!(self.published - self.done <= UNDER_WAY, "too many are under way");
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_put_is_got_again_however_it_is_cut() {
        for cell in [1, 3, 8, 100] {
            let (mut route, mut world) = (Route::new(cell), World { window: vec![0; 64], ..World::default() });
            for round in 0..50u64 {
                let (offset, len) = (round as usize % 7, round as usize % 50);
                let mut data: Vec<u8> = (0..len).map(|at| (at as u64 + 13 * round) as u8).collect();
                let mut copy = vec![0; len];
                world.run(route.put(offset, len), &mut data);
                world.run(route.signal(round + 1), &mut []);
                world.run(route.get(offset, len), &mut copy);
                assert_eq!(copy, data, "round {round} with cells of {cell}");
                // A get is done after what came before it.
                assert!(len == 0 || world.signals == round + 1);
            }
        }
    }

    #[test]
    fn signals_wait_for_those_long_before() {
        let (mut route, mut world) = (Route::new(1), World::default());
        for count in 1..=3 * UNDER_WAY {
            world.run(route.signal(count), &mut []);
        }
        assert_eq!((world.published, world.done), (3 * UNDER_WAY, 2 * UNDER_WAY));
    }

    #[test]
    fn nothing_becomes_nothing() {
        let mut route = Route::new(4);
        assert_eq!((route.put(3, 0), route.get(3, 0)), (Steps::default(), Steps::default()));
    }
}
