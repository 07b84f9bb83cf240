//! The log of messages: what the two ends of a message have called.

use crate::device::control::Control;
use crate::device::record;
use crate::device::rounds::Direction;
use crate::device::words::SLOTS;
use crate::sync::Ordering;
use crate::types::{Rank, Tag};

/// A message, as far as both ends must call the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LoggedMessage {
    pub(crate) bytes: u64,
    pub(crate) tag: Tag,
    /// Whether it is in a graph's capture.
    pub(crate) is_captured: bool,
}

/// What a rank has called, in words.
pub(crate) fn called(direction: Direction, peer: Rank, message: LoggedMessage) -> String {
    let LoggedMessage { bytes, tag, is_captured } = message;
    let place = if is_captured { " in a graph's capture" } else { "" };
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
    /// The other rank has called this.
    pub(crate) fn enter_message(&self, lane: usize, number: u64, message: LoggedMessage) -> Result<(), LoggedMessage> {
        let theirs = self.compare_message(lane, number, message);
        // Only now: the other rank may then put a later message in the place of the one that was compared.
        let (words, layout) = self.lines();
        words.word(layout.last_call(self.me(), lane)).store(number, Ordering::Release);
        theirs
    }

    /// The same for a rank of another host, of which this process has heard what it calls. It may hear of a message after a later
    /// one.
    ///
    /// # Errors
    /// The rank of this host has called this.
    pub(crate) fn hear_message(&self, lane: usize, number: u64, message: LoggedMessage) -> Result<(), LoggedMessage> {
        let ours = self.compare_message(lane, number, message);
        self.note_called(lane, number);
        ours
    }

    /// Publishes a message, and compares it with what the other rank has called.
    fn compare_message(&self, lane: usize, number: u64, message: LoggedMessage) -> Result<(), LoggedMessage> {
        let (me, (words, layout)) = (self.me(), self.lines());
        let [mark, bytes, tag, is_captured, ..] = words.line(layout.call(me, lane, number));
        record::publish(mark, number, || {
            bytes.store(message.bytes, Ordering::Relaxed);
            tag.store(u64::from(message.tag.0), Ordering::Relaxed);
            is_captured.store(u64::from(message.is_captured), Ordering::Relaxed);
        });
        let mut others = self.ranks().filter(|rank| *rank != me);
        let theirs = others.find_map(|peer| {
            let [mark, words @ ..] = words.line(layout.call(peer, lane, number));
            let load = || words.each_ref().map(|word| word.load(Ordering::Relaxed));
            let [bytes, tag, is_captured, ..] = record::read(mark, number, load)?;
            Some(LoggedMessage { bytes, tag: Tag(tag as u32), is_captured: is_captured != 0 })
        });
        theirs.filter(|theirs| *theirs != message).map_or(Ok(()), Err)
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
        let message = LoggedMessage { bytes: 40, tag: Tag(1), is_captured: false };
        for (number, (first, second)) in (1..).zip([(&sender, &receiver), (&receiver, &sender)]) {
            assert_eq!(first.enter_message(0, number, message), Ok(()));
            assert_eq!(second.has_called(Rank(4), 0, number), number == 1);
            let others = [
                LoggedMessage { bytes: 39, ..message },
                LoggedMessage { tag: Tag(2), ..message },
                LoggedMessage { is_captured: true, ..message },
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
        let message = LoggedMessage { bytes: 0, tag: Tag(0), is_captured: false };
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
