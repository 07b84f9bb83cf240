use std::os::fd::AsFd;
use std::sync::Barrier;
use std::thread;

use super::*;
use crate::counts::Counts;
use crate::device::call_log::{CallMemory, Capture};
use crate::op::CollectiveKind;
use crate::signature::Signature;
use crate::types::DType;

/// The ranks of a host, each with a mapping of its own.
fn host(ranks: usize, width: Width) -> Vec<Control> {
    let layout = ControlLayout::new(ranks, 2);
    let first = SharedWords::new(layout.count()).expect("words");
    let fd = || first.as_fd().try_clone_to_owned().expect("a descriptor");
    let words = || Arc::new(SharedWords::open(fd(), layout.count()).expect("the same words"));
    (0..ranks).map(|me| Control::new(words(), layout, Rank::from(me), width)).collect()
}

fn all_reduce(count: u64) -> LoggedCall {
    let operation = CollectiveKind::AllReduce as u8;
    let dtype = DType::F32 as u8;
    LoggedCall::new(Signature { operation, dtype, reduction: 1, count, ..Signature::default() }, 1, Capture::Eager)
}

fn timeout(number: u64, text: &str) -> Failure {
    Failure { lane: 1, number, kind: FailureKind::Timeout, rank: Rank(1), text: text.to_owned() }
}

fn head(sender: u32, receiver: u32) -> Word {
    Word::Head { sender: Rank(sender), receiver: Rank(receiver) }
}

fn tail(sender: u32, receiver: u32) -> Word {
    Word::Tail { sender: Rank(sender), receiver: Rank(receiver) }
}

#[test]
fn operations_start_and_end_by_their_numbers_lap_after_lap() {
    let host = host(2, Width::Bits64);
    let (me, other) = (&host[0], &host[1]);
    for number in [1, SLOTS as u64 - 1, SLOTS as u64, SLOTS as u64 + 1, u64::from(u32::MAX) + 5] {
        assert!(!me.has_started(Rank(1), 1, number) && !me.has_ended(Rank(1), 1, number), "{number}");
        let write = |index| other.words.word(index).store(number, Ordering::Release);
        write(other.layout.started(Rank(1), 1, number));
        assert!(me.has_started(Rank(1), 1, number) && !me.has_ended(Rank(1), 1, number), "{number}");
        write(other.layout.done(Rank(1), 1, number));
        assert!(me.has_ended(Rank(1), 1, number), "{number}");
        assert!(
            !me.has_ended(Rank(0), 1, number) && !me.has_ended(Rank(1), 0, number),
            "neither its rank nor its lane"
        );
        assert!(!me.has_ended(Rank(1), 1, number + SLOTS as u64), "a later one of the slot is not done");
    }
    assert!(me.has_ended(Rank(1), 1, 1), "a slot that is used anew says that the earlier is done");
}

#[test]
fn streams_that_write_half_a_word_end_operations_beyond_it() {
    let host = host(1, Width::Bits32);
    let number = (1 << 32) + 7;
    let done = host[0].words.word(host[0].layout.done(Rank(0), 0, number));
    done.store(u64::from((number - SLOTS as u64) as u32), Ordering::Release);
    assert!(!host[0].has_ended(Rank(0), 0, number));
    done.store(7, Ordering::Release);
    assert!(host[0].has_ended(Rank(0), 0, number));
}

#[test]
fn a_slot_is_free_once_its_operation_is_done_here() {
    let host = host(1, Width::Bits64);
    let (control, slots) = (&host[0], SLOTS as u64);
    assert!([1, 2, slots].iter().all(|number| control.has_room(0, *number, false)));
    assert!(!control.has_room(0, slots + 1, false));
    control.words.word(control.layout.done(Rank(0), 0, 1)).store(1, Ordering::Release);
    assert!(control.has_room(0, slots + 1, false) && !control.has_room(0, slots + 2, false));
}

#[test]
fn who_comes_second_finds_another_call() {
    let host = host(2, Width::Bits64);
    assert_eq!((host[0].calls_of(Rank(1), 0), host[0].enter(0, 1, all_reduce(5), None)), (0, Ok(())));
    assert_eq!(host[1].enter(0, 1, all_reduce(5), None), Ok(()));
    assert_eq!(host[1].enter(0, 2, all_reduce(6), None), Ok(()), "the other has not come there");
    assert_eq!((host[0].calls_of(Rank(1), 0), host[0].calls_of(Rank(1), 1)), (2, 0));
    let error = host[0].enter(0, 2, all_reduce(7), None).expect_err("the ranks disagree");
    assert_eq!(error, Disagreement { rank: Rank(1), what: Difference::Call(all_reduce(6)) });
    assert_eq!(
        all_reduce(7).disagreement(2, Rank(0), error),
        "the ranks disagree on collective 2: rank 0 called all_reduce(SUM, 7 × float32), rank 1 called all_reduce(SUM, 6 × float32)"
    );
    assert_eq!(host[1].call_of(Rank(0), 0, 2), Some(all_reduce(7)), "the finder's call can be named, too");
}

#[test]
fn calls_that_run_otherwise_are_other_calls() {
    let host = host(2, Width::Bits64);
    let signature = Signature { operation: CollectiveKind::Barrier as u8, ..Signature::default() };
    let calls = [(2, Capture::Eager), (3, Capture::Eager), (2, Capture::Captured)];
    let [call, longer, captured] = calls.map(|(segments, capture)| LoggedCall::new(signature, segments, capture));
    host[0].enter(0, 1, call, None).expect("the first");
    let error = host[1].enter(0, 1, longer, None).expect_err("more segments");
    let text = "the ranks disagree on how to run collective 1: rank 1 cuts it into 3 segments, rank 0 into 2";
    assert_eq!(longer.disagreement(1, Rank(1), error), text);
    let error = host[1].enter(0, 1, captured, None).expect_err("a capture");
    let text = "the ranks disagree on collective 1: rank 1 called barrier() in a graph's capture, rank 0 eagerly";
    assert_eq!(captured.disagreement(1, Rank(1), error), text);
}

#[test]
fn registered_memory_goes_with_no_other() {
    let calls =
        [CallMemory::None, CallMemory::Plain, CallMemory::Registered].map(|memory| all_reduce(7).with_memory(memory));
    for first in calls {
        for second in calls {
            let host = host(2, Width::Bits64);
            host[0].enter(0, 1, first, None).expect("the first");
            assert_eq!(host[1].call_of(Rank(0), 0, 1), Some(first));
            let entered = host[1].enter(0, 1, second, None);
            let goes = first == second || [first, second].contains(&calls[0]);
            assert_eq!(entered.is_ok(), goes, "{first:?} and {second:?}");
            if let Err(error) = entered {
                let text = second.disagreement(1, Rank(1), error);
                let expected = "the ranks disagree on the memory of collective 1, all_reduce(SUM, 7 × float32): that of rank 1 is ";
                assert!(text.starts_with(expected), "{text}");
                assert_eq!(text.contains("that of rank 0 is registered"), first == calls[2], "{text}");
            }
        }
    }
    let longer = all_reduce(8).with_memory(CallMemory::None);
    let host = host(2, Width::Bits64);
    host[0].enter(0, 1, calls[2], None).expect("the first");
    assert!(host[1].enter(0, 1, longer, None).is_err(), "it is longer all the same");
}

#[test]
fn blocks_of_other_sizes_are_other_calls() {
    let host = host(5, Width::Bits64);
    let signature = Signature { operation: CollectiveKind::AllToAll as u8, ..Signature::default() };
    let call = LoggedCall::new(signature, 1, Capture::Eager);
    let enter = |me: usize, number: u64, sent: [usize; 5], received: [usize; 5]| {
        let (sent, received) = (Counts::from(sent.to_vec()), Counts::from(received.to_vec()));
        host[me].enter(0, number, call, Some(Blocks { sent: &sent, received: &received }))
    };
    // Many laps.
    for number in 1..400 {
        let count = |from: usize, to: usize| from * 10 + to + number as usize;
        for me in 0..5 {
            let (sent, received) =
                ([0, 1, 2, 3, 4].map(|to| count(me, to)), [0, 1, 2, 3, 4].map(|from| count(from, me)));
            assert_eq!(enter(me, number, sent, received), Ok(()), "{number}");
        }
    }
    enter(4, 400, [0, 7, 0, 0, 0], [9; 5]).expect("the first");
    let error = enter(1, 400, [9; 5], [0, 0, 0, 0, 8]).expect_err("8 are not 7");
    let texts = |me: u32, error| call.disagreement(400, Rank(me), error);
    let expected = "the ranks disagree on the sizes of collective 400, all_to_all(bool): rank 4 sends 7 elements to rank 1, which \
                    expects 8";
    assert_eq!(texts(1, error), expected);
    let error = enter(0, 400, [9, 0, 9, 9, 10], [9, 9, 9, 9, 0]).expect_err("10 are not 9");
    assert!(texts(0, error).ends_with("rank 0 sends 10 elements to rank 4, which expects 9"), "{}", texts(0, error));
    assert!(enter(2, 400, [9; 5], [9; 5]).is_err());
}

#[test]
fn what_has_blocks_finds_less_room() {
    let host = host(1, Width::Bits64);
    let control = &host[0];
    let slots = COUNT_SLOTS as u64;
    assert!(control.has_room(0, slots, true) && !control.has_room(0, slots + 1, true));
    assert!(control.has_room(0, slots + 1, false));
}

#[test]
fn of_two_that_disagree_at_once_one_finds_it() {
    let (host, tries) = (host(2, Width::Bits64), 3000);
    let start = Barrier::new(2);
    let found: Vec<Vec<bool>> = thread::scope(|scope| {
        let ranks = host.iter().enumerate().map(|(me, control)| {
            let start = &start;
            scope.spawn(move || {
                let enter = |number: u64| {
                    // Slots of one lap are filled at once; a barrier keeps the laps apart, as the streams do.
                    start.wait();
                    let differs = !number.is_multiple_of(3);
                    let count = if differs { me as u64 } else { 9 };
                    let found = control.enter(0, number, all_reduce(count), None).is_err();
                    assert!(differs || !found, "the calls of {number} are the same");
                    found
                };
                (1..=tries).map(enter).collect()
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    });
    for number in (1..=tries).filter(|number| number % 3 > 0) {
        let index = number as usize - 1;
        assert!(found[0][index] || found[1][index], "nobody has found that the ranks disagree on {number}");
    }
}

#[test]
fn the_first_failure_stays_until_the_lane_is_reset() {
    let host = host(3, Width::Bits64);
    assert_eq!(host[0].first_failure(1, u64::MAX), None);
    host[2].fail(&timeout(7, "the first"));
    host[2].fail(&timeout(9, "the second"));
    assert_eq!(host[0].failure_of(Rank(2), 1), Some(timeout(7, "the first")));
    assert_eq!((host[0].failure_of(Rank(2), 0), host[0].failure_of(Rank(1), 1)), (None, None));
    assert_eq!(
        (
            host[0].first_failure(1, 6).map(|(_, failure)| failure),
            host[0].first_failure(1, 7).map(|(_, failure)| failure)
        ),
        (None, Some(timeout(7, "the first")))
    );
    host[2].give_up_library(1);
    assert!(host[0].has_given_up_library(Rank(2), 1));
    assert!(!host[0].has_given_up_library(Rank(2), 0) && !host[0].has_given_up_library(Rank(1), 1));
    host[1].fail(&timeout(8, "another rank's"));
    assert_eq!(host[0].first_failure(1, 8).map(|(_, failure)| failure), Some(timeout(7, "the first")));
    host[2].fail(&timeout(6, "it spoils more"));
    assert_eq!(host[0].first_failure(1, 6).map(|(_, failure)| failure), Some(timeout(6, "the first")));
    host.iter().for_each(|control| control.reset(0));
    assert!(host[0].first_failure(1, 8).is_some(), "that was another lane");
    host.iter().for_each(|control| control.reset(1));
    assert_eq!(host[0].first_failure(1, u64::MAX), None);
    host[2].fail(&timeout(1, "new"));
    assert_eq!(
        host[1].first_failure(1, 1).map(|(_, failure)| failure),
        Some(timeout(1, "new")),
        "no word of the longer text before"
    );
}

#[test]
fn a_long_text_ends_with_a_whole_character() {
    let host = host(2, Width::Bits64);
    for (lane, character, count) in [(0, "€", 170), (1, "x", 512)] {
        host[0].fail(&Failure { lane, ..timeout(1, &character.repeat(600)) });
        assert_eq!(host[1].failure_of(Rank(0), lane).expect("a failure").text, character.repeat(count));
    }
}

#[test]
fn two_ranks_fail_at_once_and_a_reader_sees_whole_failures() {
    let host = host(3, Width::Bits64);
    let failure = |me: usize| Failure { rank: Rank::from(me), ..timeout(me as u64, &me.to_string().repeat(500)) };
    for _ in 0..200 {
        let start = Barrier::new(3);
        thread::scope(|scope| {
            for me in [1, 2] {
                let (host, start) = (&host, &start);
                scope.spawn(move || {
                    start.wait();
                    host[me].fail(&failure(me));
                });
            }
            start.wait();
            while (1..3).any(|me| host[0].failure_of(Rank::from(me), 1).is_none()) {
                if let Some((rank, found)) = host[0].first_failure(1, 2) {
                    assert_eq!((rank, &found), (found.rank, &failure(rank.index())));
                }
            }
        });
        assert_eq!(host[0].first_failure(1, 2).map(|(_, failure)| failure), Some(failure(1)));
        host.iter().for_each(|control| control.reset(1));
    }
}

#[test]
fn what_another_process_has_spoilt_is_read_without_harm() {
    let host = host(2, Width::Bits64);
    host[0].enter(0, 1, all_reduce(1), None).expect("the first");
    host[0].fail(&Failure { lane: 0, ..timeout(1, "text") });
    let (layout, words) = (host[0].layout, &host[0].words);
    for index in [layout.call(Rank(0), 0, 1), layout.failure(Rank(0), 0), layout.failure(Rank(0), 0) + 1] {
        // All but the mark.
        words.line(index)[1..].iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
    }
    let error = host[1].enter(0, 1, all_reduce(1), None).expect_err("no such call");
    assert!(all_reduce(1).disagreement(1, Rank(1), error).contains("rank 0 called unknown("));
    let failure = host[1].failure_of(Rank(0), 0).expect("a failure");
    assert_eq!((failure.kind, failure.rank, failure.number), (FailureKind::Driver, Rank(0), u64::MAX));
    assert!(failure.text.contains('\u{fffd}'));
}

#[test]
fn ranks_that_are_behind_are_named_once() {
    let host = host(3, Width::Bits64);
    let expected = [(head(1, 0), 2), (head(2, 0), 2), (tail(0, 1), 1), (tail(0, 2), 0)];
    let behind = || host[0].behind(1, expected.into_iter());
    assert_eq!(behind(), [Rank(1), Rank(2)]);
    let write = |word, value| {
        host[1].words.word(host[1].layout.lane_words().index(1, word)).store(value, Ordering::Release);
    };
    write(head(2, 0), 3);
    write(head(1, 0), 2);
    assert_eq!(behind(), [Rank(1)], "it is not done");
    write(tail(0, 1), 1);
    assert_eq!(behind(), []);
}

#[test]
fn released_words_are_beyond_what_the_stream_waits_for() {
    for (width, last) in
        [(Width::Bits64, 5), (Width::Bits32, 5), (Width::Bits32, (1 << 32) - 3), (Width::Bits32, 1 << 32)]
    {
        let host = host(2, width);
        let expected = [(head(1, 0), last), (tail(0, 1), last)];
        let place = host[0].words.word(host[0].layout.lane_words().index(0, head(1, 0)));
        place.store((last - 1) & u64::from(u32::MAX), Ordering::Relaxed);
        assert_eq!(host[0].behind(0, expected.into_iter()), [Rank(1)], "{width:?} {last}");
        host[0].release(0, expected.into_iter());
        assert_eq!(host[0].behind(0, expected.into_iter()), [], "{width:?} {last}");
        host.iter().for_each(|control| control.reset(0));
        let first = [(head(1, 0), 1), (tail(0, 1), 1)];
        assert_eq!(host[0].behind(0, first.into_iter()), [Rank(1)], "nothing has happened on the lane");
    }
}

#[test]
fn a_reset_lane_counts_from_one_again() {
    let host = host(2, Width::Bits64);
    for number in 1..=3 {
        host[0].enter(0, number, all_reduce(number), None).expect("the first there");
        host[0].words.word(host[0].layout.done(Rank(0), 0, number)).store(number, Ordering::Release);
    }
    host[0].give_up_library(0);
    assert_eq!(host[1].epoch(0), 1);
    host.iter().for_each(|control| control.reset(0));
    assert_eq!((host[1].epoch(0), host[1].epoch(1)), (2, 1));
    assert_eq!((host[1].calls_of(Rank(0), 0), host[1].has_ended(Rank(0), 0, 1)), (0, false));
    assert!(!host[1].has_given_up_library(Rank(0), 0), "it begins another one");
    assert_eq!(host[1].enter(0, 2, all_reduce(7), None), Ok(()), "the calls before are forgotten");
}

#[test]
fn a_failure_of_an_earlier_operation_says_of_which_kind_it_is() {
    let host = host(2, Width::Bits64);
    host[0].fail(&Failure { kind: FailureKind::Mismatch, ..timeout(9, "they disagree") });
    host[0].fail(&timeout(10, "it spoils nothing more"));
    let found = || host[1].failure_of(Rank(0), 1).map(|failure| (failure.number, failure.kind)).expect("it is there");
    assert_eq!(found(), (9, FailureKind::Mismatch));
    host[0].fail(&timeout(5, "it took too long"));
    assert_eq!(found(), (5, FailureKind::Timeout));
}
