//! Numbered pieces in their order, whichever comes first: UCX promises none.

use std::collections::VecDeque;

/// Pieces that have come and were not taken.
#[derive(Debug)]
pub(super) struct Ordered<T> {
    /// The next to be taken is the first. Those that have not come are none.
    pieces: VecDeque<Option<T>>,
    taken: u64,
    /// How far behind the next one a piece may be.
    limit: u64,
}

impl<T> Ordered<T> {
    pub(super) fn new(limit: u64) -> Ordered<T> {
        Ordered { pieces: VecDeque::new(), taken: 0, limit }
    }

    /// Keeps a piece with so many before it. One that is beyond the limit, or has come before, is dropped.
    pub(super) fn keep(&mut self, number: u64, piece: T) {
        let Some(place) = number.checked_sub(self.taken).filter(|place| *place < self.limit) else { return };
        let place = place as usize;
        if self.pieces.len() <= place {
            self.pieces.resize_with(place + 1, || None);
        }
        self.pieces[place].get_or_insert(piece);
    }

    /// Whether the next piece is there.
    pub(super) fn has_next(&self) -> bool {
        self.pieces.front().is_some_and(Option::is_some)
    }

    /// Takes all pieces before the first that has not come.
    pub(super) fn take(&mut self, into: &mut VecDeque<T>) {
        while self.has_next() {
            into.extend(self.pieces.pop_front().flatten());
            self.taken += 1;
        }
    }

    /// How many were taken.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(ordered: &mut Ordered<char>) -> String {
        let mut into = VecDeque::new();
        ordered.take(&mut into);
        into.into_iter().collect()
    }

    #[test]
    fn pieces_that_come_in_any_order_are_taken_in_theirs() {
        let mut ordered = Ordered::new(8);
        ordered.keep(2, 'c');
        ordered.keep(1, 'b');
        assert!(!ordered.has_next(), "the first has not come");
        assert_eq!(taken(&mut ordered), "");
        ordered.keep(0, 'a');
        ordered.keep(4, 'e');
        assert!(ordered.has_next());
        assert_eq!((taken(&mut ordered).as_str(), ordered.taken()), ("abc", 3));
        assert!(!ordered.has_next(), "one is missing");
        ordered.keep(3, 'd');
        assert_eq!((taken(&mut ordered).as_str(), ordered.taken()), ("de", 5));
    }

    #[test]
    fn what_comes_twice_or_has_no_room_is_dropped() {
        let mut ordered = Ordered::new(4);
        ordered.keep(0, 'a');
        ordered.keep(0, 'x');
        assert_eq!(taken(&mut ordered), "a");
        for number in [0, 5, u64::MAX] {
            ordered.keep(number, 'x');
        }
        ordered.keep(4, 'e');
        "bcd".chars().zip(1..).for_each(|(letter, number)| ordered.keep(number, letter));
        assert_eq!(taken(&mut ordered), "bcde");
    }
}
