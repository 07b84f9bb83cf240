//! What one rank may have unread at another, and what it gets back for it, against a peer whose frames are written by hand.

use super::*;
use crate::engine::failures::{Departed, Departure};
use crate::engine::frame::FRAGMENT_BYTES;
use crate::engine::mock_peer::Harness;
use crate::engine::region::Words;
use crate::error::LinkDown;
use crate::work::Submitted;

const WINDOW: usize = 1 << 20;
/// As long as a message goes unasked.
const LENGTHS: [usize; 5] = [0, 8, 1000, 2048, 4096];
const LIMIT: Duration = Duration::from_secs(60);
const RECEIVE: Direction = Direction::Receive(Source::Rank(Rank(1)));

fn harness() -> Harness {
    let mut harness = Harness::new();
    harness.engine.context.rndv.single_copy_bytes = harness.engine.context.rndv.eager_bytes;
    harness.settle();
    harness
}

/// The memory of a message of so many bytes.
fn words(bytes: usize) -> Words {
    Words::new(vec![0; bytes / 8])
}

/// Starts a message whose caller waits for it. True: it has ended already.
fn ends_at_once(harness: &mut Harness, direction: Direction, words: &mut Words) -> bool {
    let region = Region::of(&[words.buffer()]);
    let request = MessageRequest { direction, tag: Tag(0), region, timeout: LIMIT };
    match harness.engine.run_message(request, true, &Harness::no_progress()) {
        Submitted::Completed(..) => true,
        Submitted::Pending(_) => false,
    }
}

/// The headers of all that rank 0 has sent since the last call.
fn sent(harness: &mut Harness) -> Vec<Header> {
    let bytes = std::mem::take(&mut harness.wire().from_engine);
    let (mut headers, mut rest) = (Vec::new(), bytes.as_slice());
    while let Some(header) = Header::decode(rest).expect("a header") {
        rest = &rest[header.size() + header.payload()..];
        headers.push(header);
    }
    headers
}

/// What messages of so many bytes take of the window.
fn cost(lengths: impl IntoIterator<Item = usize>) -> usize {
    lengths.into_iter().map(|len| len + 64).sum()
}

/// How much of the window rank 0 has taken since the last call.
fn taken(harness: &mut Harness) -> usize {
    let headers = sent(harness);
    cost(headers.iter().filter(|header| header.kind == FrameKind::Eager).map(|header| header.payload()))
}

/// How much credit rank 0 has given since the last call.
fn given(harness: &mut Harness) -> usize {
    let headers = sent(harness);
    headers.iter().filter(|header| header.kind == FrameKind::Credit).map(|header| header.len as usize).sum()
}

#[test]
fn what_is_unread_fills_the_window_and_never_exceeds_it() {
    for waits in [false, true] {
        for len in LENGTHS {
            let (mut harness, mut words) = (harness(), words(len));
            let mut send_more_than = |harness: &mut Harness, room: usize| {
                for _ in 0..room / cost([len]) + 9 {
                    if waits {
                        ends_at_once(harness, Direction::Send(Rank(1)), &mut words);
                    } else {
                        harness.start(Direction::Send(Rank(1)), &mut words, LIMIT);
                    }
                }
            };
            let mut free = WINDOW;
            for credit in [0, 4 * cost([len]), WINDOW / 2] {
                if credit > 0 {
                    harness.send(
                        &Header::control(FrameKind::Credit, MatchSpace::PointToPoint, 0, 0, credit as u64).encode(),
                    );
                }
                free += credit;
                send_more_than(&mut harness, free);
                let taken = taken(&mut harness);
                assert!(taken <= free, "{taken} bytes in messages of {len}, for {free}");
                free -= taken;
                assert!(free < cost([len]), "{free} bytes are free, and messages of {len} wait");
            }
        }
    }
}

/// How a message of rank 1 meets its receive.
#[derive(Clone, Copy, Debug)]
enum Meeting {
    /// It is there, and its receiver waits.
    AtOnce,
    /// Its receive was there before.
    Expected,
    /// It was kept.
    Kept,
    /// It was expected, or kept, and has another length.
    ExpectedInVain,
    KeptInVain,
}

#[test]
fn every_message_that_is_taken_is_given_credit_for() {
    use Meeting::*;
    for meeting in [AtOnce, Expected, Kept, ExpectedInVain, KeptInVain] {
        for len in [8, 4096] {
            let context = format!("{meeting:?}, messages of {len}");
            let mut harness = harness();
            let message = [&*message_header(Tag(0), len).encode(), &vec![0; len]].concat();
            let mut into = words(if matches!(meeting, ExpectedInVain | KeptInVain) { len + 8 } else { len });
            let (mut read, mut back, mut at_once) = (0, 0, 0);
            // More than ten windows where messages are long.
            for _ in 0..2700 {
                match meeting {
                    AtOnce => {
                        harness.wire().to_engine.extend_from_slice(&message);
                        at_once += usize::from(ends_at_once(&mut harness, RECEIVE, &mut into));
                    }
                    Expected | ExpectedInVain => {
                        let receive = harness.start(RECEIVE, &mut into, LIMIT);
                        harness.send(&message);
                        assert!(receive.is_done(), "{context}");
                    }
                    Kept | KeptInVain => {
                        harness.send(&message);
                        assert_eq!(given(&mut harness), 0, "{context}: it is not taken yet");
                        assert!(harness.start(RECEIVE, &mut into, LIMIT).is_done(), "{context}");
                    }
                }
                read += cost([len]);
                back += given(&mut harness);
                assert!(back <= read, "{context}: {back} bytes of credit for {read}");
                assert!(read - back < WINDOW / 4, "{context}: {back} bytes of credit for {read}");
            }
            // From time to time it looks after other things instead.
            assert!(at_once > 2000 || !matches!(meeting, AtOnce), "{context}: {at_once} at once");
        }
    }
}

#[test]
fn a_receive_from_any_rank_blames_the_rank_that_is_known_to_be_lost() {
    for (first, second) in [(1, 2), (2, 1)] {
        let (mut harness, mut words) = (Harness::of(3), words(8));
        let work = harness.start(Direction::Receive(Source::Any), &mut words, LIMIT);
        // Both streams end before the engine looks at either; rank 2 died, and rank 1 left because of that.
        for rank in [first, second] {
            harness.engine.context.endpoints.lose(Rank(rank), &LinkDown::new("it closed the connection"));
        }
        let how = Departure::Lost;
        harness.engine.departed(&Departed { rank: Rank(2), how, cause: "it died".to_owned() });
        let Some(Err(Error::PeerLost { rank, cause, .. })) = work.result() else { panic!("{:?}", work.result()) };
        assert_eq!((rank, cause.as_str()), (2, "it died"), "ranks {first} and {second} are gone");
    }
}

/// A long message of rank 1 is announced.
fn announced(token: u64, len: usize) -> Vec<u8> {
    let header = Header { token, kind: FrameKind::Rts, ..message_header(Tag(0), len) };
    header.encode().to_vec()
}

#[test]
fn a_receiver_hears_of_a_message_that_is_cut_off() {
    let len = 3 * FRAGMENT_BYTES;
    let frame = Header::control(FrameKind::Data, MatchSpace::PointToPoint, 0, 0, 0).size() + FRAGMENT_BYTES;
    // Of the frames of data, so many bytes have gone out when the time limit passes; so many frames go out in the end.
    for (room, frames) in [(0, 0), (10, 1), (1000, 1), (frame, 1), (frame + 1000, 2), (2 * frame + 1000, 3)] {
        let (mut harness, mut words) = (Harness::new(), words(len));
        harness.wire().is_far = true;
        let work = harness.start(Direction::Send(Rank(1)), &mut words, LIMIT);
        let [Header { kind: FrameKind::Rts, token, .. }] = sent(&mut harness)[..] else { panic!("no message") };
        harness.wire().room = Some(room);
        harness.send(&Header::control(FrameKind::Rtr, MatchSpace::PointToPoint, 0, token, 0).encode());
        harness.engine.expire(Instant::now() + 2 * LIMIT);
        assert!(matches!(work.result(), Some(Err(Error::Timeout { .. }))), "{:?}", work.result());
        harness.wire().room = None;
        harness.settle();
        let mut headers = sent(&mut harness);
        if frames < 3 {
            let end = headers.pop().expect("the end");
            assert_eq!((end.kind, end.token, end.index), (FrameKind::Fail, token, End::Sender as u32), "{room}");
        }
        let bytes: usize = headers.iter().map(|header| header.payload()).sum();
        assert!(headers.iter().all(|header| header.kind == FrameKind::Data && header.token == token), "{headers:?}");
        assert_eq!((headers.len(), bytes), (frames, frames * FRAGMENT_BYTES), "{room}");
    }
}

#[test]
fn who_gives_a_message_up_ends_that_one_alone() {
    let (mut harness, len) = (Harness::new(), FRAGMENT_BYTES);
    harness.wire().is_far = true;
    let (mut ours, mut theirs) = (words(len), words(len));
    // Each rank names its first message by the same token.
    let send = harness.start(Direction::Send(Rank(1)), &mut ours, LIMIT);
    let receive = harness.start(RECEIVE, &mut theirs, LIMIT);
    let token = sent(&mut harness)[0].token;
    harness.send(&announced(token, len));
    let text = b"for a test";
    let fail = |by| [&*Failed::Message { token, by }.header(text.len()).encode(), text].concat();
    harness.send(&fail(End::Sender));
    assert!(matches!(receive.result(), Some(Err(Error::Remote { rank: 1, .. }))), "{:?}", receive.result());
    assert!(!send.is_done());
    harness.send(&fail(End::Receiver));
    assert!(matches!(send.result(), Some(Err(Error::Mismatch { .. }))), "{:?}", send.result());
}

#[test]
fn an_empty_message_that_is_announced_arrives() {
    let (mut harness, mut words) = (harness(), words(0));
    let receive = harness.start(RECEIVE, &mut words, LIMIT);
    harness.send(&announced(7, 0));
    assert_eq!(sent(&mut harness).last().map(|header| (header.kind, header.token)), Some((FrameKind::Rtr, 7)));
    harness.send(&Header::control(FrameKind::Data, MatchSpace::PointToPoint, 0, 7, 0).encode());
    assert_eq!(receive.result(), Some(Ok(())));
}
