//! The log of messages: what the two ends of a message have called.

use crate::device::control::Control;
use crate::device::record;
use crate::device::rounds::Direction;
use crate::device::words::SLOTS;
use crate::sync::Ordering;
use crate::types::{Rank, Tag};

/// What the two ends of a message must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LoggedMessage {
    pub(crate) bytes: u64,
    pub(crate) tag: Tag,
    /// Its place in its call, if it is in a graph's capture: there both ends must cut messages into calls alike.
    pub(crate) captured: Option<PlaceInCall>,
}

/// A message's place, from 1 on, among the messages of its direction in one call, and how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlaceInCall {
    pub(crate) place: u32,
    pub(crate) of: u32,
}

impl PlaceInCall {
    /// As a word, which is zero for what is not captured.
    fn to_word(captured: Option<PlaceInCall>) -> u64 {
        captured.map_or(0, |PlaceInCall { place, of }| u64::from(place) << 32 | u64::from(of))
    }

    fn from_word(word: u64) -> Option<PlaceInCall> {
        (word != 0).then_some(PlaceInCall { place: (word >> 32) as u32, of: word as u32 })
    }
}

/// What a rank has called, in words.
pub(crate) fn called(direction: Direction, peer: Rank, message: LoggedMessage) -> String {
    let LoggedMessage { bytes, tag, captured } = message;
    let place = match captured {
        None => String::new(),
        Some(PlaceInCall { of: 1, .. }) => " in a graph's capture".to_owned(),
        Some(PlaceInCall { place, of }) => format!(" in a graph's capture, as message {place} of {of} of a batch"),
    };
    match direction {
        Direction::Send => format!("send({bytes} bytes to rank {peer}, tag {}){place}", tag.0),
        Direction::Receive => format!("recv({bytes} bytes from rank {peer}, tag {}){place}", tag.0),
    }
}

/// How the two ends of a message differ, in words: what this rank has called, and what the other one.
pub(crate) fn disagreement(
    number: u64,
    (me, direction, ours): (Rank, Direction, LoggedMessage),
    (peer, theirs): (Rank, LoggedMessage),
) -> String {
    let (from, to, other) = match direction {
        Direction::Send => (me, peer, Direction::Receive),
        Direction::Receive => (peer, me, Direction::Send),
    };
    let (ours, theirs) = (called(direction, peer, ours), called(other, me, theirs));
    format!(
        "the ranks disagree on message {number} from rank {from} to rank {to}: rank {me} called {ours}, rank {peer} called \
         {theirs}"
    )
}

impl Control {
    /// Tells the other rank of a message, the next on its lane, and compares it with what that rank has called. To be done
    /// before anything of it is on a stream, and when there [is room](Control::has_room_for_message). Numbers count from 1.
    ///
    /// Of two ranks that call different messages, at least one gets the error: see `record::publish`.
    ///
    /// # Errors
    /// The other rank's call, if it differs.
    pub(crate) fn enter_message(&self, lane: usize, number: u64, message: LoggedMessage) -> Result<(), LoggedMessage> {
        let theirs = self.compare_message(lane, number, message);
        // Only now: the other rank may then overwrite the message that was compared with a later one.
        let (words, layout) = self.lines();
        words.word(layout.last_call(self.me(), lane)).store(number, Ordering::Release);
        theirs
    }

    /// [`enter_message`](Control::enter_message) for a rank of another host. This process may hear of its message after a later
    /// one.
    ///
    /// # Errors
    /// The call of the rank of this host, if it differs.
    pub(crate) fn hear_message(&self, lane: usize, number: u64, message: LoggedMessage) -> Result<(), LoggedMessage> {
        let ours = self.compare_message(lane, number, message);
        self.note_called(lane, number);
        ours
    }

    /// Publishes a message, and compares it with what the other rank has called.
    fn compare_message(&self, lane: usize, number: u64, message: LoggedMessage) -> Result<(), LoggedMessage> {
        let (me, (words, layout)) = (self.me(), self.lines());
        let [mark, bytes, tag, captured, ..] = words.line(layout.call(me, lane, number));
        record::publish(mark, number, || {
            bytes.store(message.bytes, Ordering::Relaxed);
            tag.store(u64::from(message.tag.0), Ordering::Relaxed);
            captured.store(PlaceInCall::to_word(message.captured), Ordering::Relaxed);
        });
        self.message_of_other(lane, number).filter(|theirs| *theirs != message).map_or(Ok(()), Err)
    }

    /// The message of this number, as the other rank has called it, if it has.
    pub(crate) fn message_of_other(&self, lane: usize, number: u64) -> Option<LoggedMessage> {
        let (me, (words, layout)) = (self.me(), self.lines());
        let mut others = self.ranks().filter(|rank| *rank != me);
        others.find_map(|peer| {
            let [mark, words @ ..] = words.line(layout.call(peer, lane, number));
            let load = || words.each_ref().map(|word| word.load(Ordering::Relaxed));
            let [bytes, tag, captured, ..] = record::read(mark, number, load)?;
            Some(LoggedMessage { bytes, tag: Tag(tag as u32), captured: PlaceInCall::from_word(captured) })
        })
    }

    /// Whether the log has room for a message: the other rank has compared the one whose place it takes.
    pub(crate) fn has_room_for_message(&self, lane: usize, number: u64) -> bool {
        let Some(earlier) = number.checked_sub(SLOTS as u64) else { return true };
        let (me, (words, layout)) = (self.me(), self.lines());
        let mut others = self.ranks().filter(|rank| *rank != me);
        others.all(|peer| words.word(layout.last_call(peer, lane)).load(Ordering::Acquire) >= earlier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::words::ControlLayout;
    use crate::sync::Arc;
    use crate::sys::cuda::Width;
    use crate::sys::words::SharedWords;
    use crate::types::Rank;

    fn ends() -> [Control; 2] {
        let layout = ControlLayout::new(2, 1);
        let words = Arc::new(SharedWords::new(layout.count()).expect("words"));
        [Rank(0), Rank(1)]
            .map(|me| Control::new(words.clone(), layout, me, Width::Bits64).of_some(vec![Rank(4), Rank(7)], 9))
    }

    #[test]
    fn who_calls_a_message_second_finds_what_differs() {
        let [sender, receiver] = ends();
        let message = LoggedMessage { bytes: 40, tag: Tag(1), captured: None };
        for (number, (first, second)) in (1..).zip([(&sender, &receiver), (&receiver, &sender)]) {
            assert_eq!(first.enter_message(0, number, message), Ok(()));
            assert_eq!(second.has_called(Rank(4), 0, number), number == 1);
            let others = [
                LoggedMessage { bytes: 39, ..message },
                LoggedMessage { tag: Tag(2), ..message },
                LoggedMessage { captured: Some(PlaceInCall { place: 1, of: 1 }), ..message },
            ];
            for other in others {
                assert_eq!(second.enter_message(0, number, other), Err(message));
            }
            assert_eq!(second.enter_message(0, number, message), Ok(()));
        }
    }

    #[test]
    fn a_message_takes_the_place_of_one_that_both_ends_have_called() {
        let [sender, receiver] = ends();
        let message = LoggedMessage { bytes: 0, tag: Tag(0), captured: None };
        let slots = SLOTS as u64;
        for number in 1..=slots {
            assert!(sender.has_room_for_message(0, number));
            assert_eq!(sender.enter_message(0, number, message), Ok(()));
        }
        assert!(!sender.has_room_for_message(0, slots + 1));
        assert_eq!(receiver.enter_message(0, 1, message), Ok(()));
        assert!(sender.has_room_for_message(0, slots + 1) && !sender.has_room_for_message(0, slots + 2));
    }
}
