//! What a hostile or late peer may send: frames written by hand.

use super::*;
use crate::engine::mock_peer;
use crate::engine::reduce::Operands;
use crate::engine::region::Words;
use crate::transport::READ_MAX;
use crate::types::{DType, ReduceOp};

/// Rank 0 with a window of two words, to which rank 1 writes by hand.
struct Harness {
    peer: mock_peer::Harness,
    words: Words,
    window: WindowId,
}

impl Harness {
    fn new() -> Harness {
        let mut peer = mock_peer::Harness::new();
        let mut words = Words::new(vec![0; 2]);
        let window = peer.engine.windows.expose(Region::of(&[words.buffer()]));
        Harness { peer, words, window }
    }

    fn header(kind: FrameKind, window: u64, token: u64, len: u64) -> Vec<u8> {
        Header::control(kind, MatchSpace::PointToPoint, window, token, len).encode().to_vec()
    }

    fn send(&mut self, bytes: &[u8]) {
        self.peer.send(bytes);
    }

    fn signals(&self) -> u64 {
        self.peer.engine.windows.exposed[&self.window].signals.get(&Rank(1)).copied().unwrap_or(0)
    }
}

#[test]
fn a_put_lands_where_its_frames_say() {
    let mut harness = Harness::new();
    let id = harness.window.0;
    harness.send(&Harness::header(FrameKind::Put, id, 8, 8));
    harness.send(&7u64.to_ne_bytes());
    harness.send(&Harness::header(FrameKind::Signal, id, 0, 0));
    assert_eq!((harness.words.get(), harness.signals()), ([0, 7].as_slice(), 1));
}

#[test]
fn frames_for_what_is_not_lent_are_dropped_and_the_stream_goes_on() {
    let mut harness = Harness::new();
    let id = harness.window.0;
    for (window, offset, len) in [(id, 9, 8), (id, u64::MAX, 8), (id, 0, 17), (id + 1, 0, 8), (u64::MAX, 0, 0)] {
        harness.send(&Harness::header(FrameKind::Put, window, offset, len));
        harness.send(&vec![0xff; len as usize]);
    }
    harness.send(&Harness::header(FrameKind::Signal, id + 1, 0, 0));
    assert_eq!((harness.words.get(), harness.signals()), ([0, 0].as_slice(), 0));
    harness.send(&Harness::header(FrameKind::Signal, id, 0, 0));
    assert_eq!(harness.signals(), 1);
}

#[test]
fn the_greatest_numbers_are_numbers_like_others() {
    let mut harness = Harness::new();
    for kind in [FrameKind::Rts, FrameKind::Rtr, FrameKind::Get, FrameKind::Credit] {
        for match_space in [MatchSpace::Collective, MatchSpace::PointToPoint] {
            harness.send(&Header::control(kind, match_space, u64::MAX, u64::MAX, u64::MAX).encode());
        }
    }
    assert!(harness.peer.engine.context.endpoints.lost(Rank(1)).is_none());
}

#[test]
fn half_an_element_does_not_hold_up_the_stream() {
    let (mut harness, mut sum) = (Harness::new(), Words::new(vec![0; 2]));
    let region = Region::of(&[sum.buffer()]);
    let action = RecvAction::Reduce(Operands::Elements(ReduceOp::Sum, DType::U64));
    harness.peer.engine.context.rndv.expect(Rank(1), 5, RecvBuffer::new(region, action, Completion::NONE));
    harness.send(&Harness::header(FrameKind::Data, 0, 5, 4));
    harness.send(&[1; 4]);
    harness.send(&Harness::header(FrameKind::Signal, harness.window.0, 0, 0));
    assert_eq!((sum.get(), harness.signals()), ([0, 0].as_slice(), 1));
}

#[test]
fn nothing_is_written_to_a_window_that_was_concealed_amid_a_put() {
    let mut harness = Harness::new();
    harness.send(&Harness::header(FrameKind::Put, harness.window.0, 0, 16));
    harness.send(&7u64.to_ne_bytes());
    assert_eq!(harness.words.get(), [7, 0]);
    harness.peer.engine.conceal(harness.window);
    harness.send(&7u64.to_ne_bytes());
    assert_eq!(harness.words.get(), [7, 0]);
    assert!(harness.peer.engine.context.endpoints.lost(Rank(1)).is_none());
}

/// A frame that adds bytes to the window.
fn addition(dtype: u8, window: u64, offset: u64, len: u64) -> Vec<u8> {
    let signature = Signature { dtype, ..Signature::default() };
    let header = Header::control(FrameKind::Accumulate, MatchSpace::PointToPoint, window, offset, len);
    Header { signature, ..header }.encode().to_vec()
}

#[test]
fn an_accumulate_adds_to_what_is_there() {
    let mut harness = Harness::new();
    let id = harness.window.0;
    for _ in 0..3 {
        harness.send(&addition(DType::U64 as u8, id, 8, 8));
        harness.send(&7u64.to_ne_bytes());
    }
    assert_eq!(harness.words.get(), [0, 21]);
}

#[test]
fn additions_of_what_has_no_sum_or_no_place_are_dropped_and_the_stream_goes_on() {
    let mut harness = Harness::new();
    let (id, dtype) = (harness.window.0, DType::U64 as u8);
    let no_sum = DType::ALL.iter().find(|dtype| !ReduceOp::Sum.supports(**dtype)).expect("a type without sums");
    let strays =
        [(*no_sum as u8, id, 0, 8), (255, id, 0, 8), (dtype, id, 0, 7), (dtype, id, 9, 8), (dtype, id + 1, 0, 8)];
    for (dtype, window, offset, len) in strays {
        harness.send(&addition(dtype, window, offset, len));
        harness.send(&vec![0xff; len as usize]);
    }
    harness.send(&Harness::header(FrameKind::Signal, id, 0, 0));
    assert_eq!((harness.words.get(), harness.signals()), ([0, 0].as_slice(), 1));
}

#[test]
fn a_flush_is_answered_and_an_answer_nobody_waits_for_is_dropped() {
    let mut harness = Harness::new();
    let id = harness.window.0;
    for (window, token) in [(id, 7), (id + 1, 8)] {
        harness.send(&Harness::header(FrameKind::Flush, window, token, 0));
    }
    harness.send(&Harness::header(FrameKind::Flushed, id, 3, 0));
    let sent = std::mem::take(&mut harness.peer.wire().from_engine);
    let mut rest = sent.as_slice();
    let mut answers = Vec::new();
    while !rest.is_empty() {
        let header = Header::decode(rest).expect("a header").expect("a whole one");
        rest = &rest[header.size() + header.payload()..];
        answers.push((header.kind, header.key, header.token, header.index));
    }
    let answer = |window, token, index| (FrameKind::Flushed, window, token, index);
    assert_eq!(answers, [answer(id, 7, 0), answer(id + 1, 8, 1)]);
    assert!(harness.peer.engine.context.endpoints.lost(Rank(1)).is_none());
}

/// Rank 0, whose window rank 1 has a part of with `len` bytes that count up, which rank 0 can read.
struct Reader {
    harness: Harness,
    window: WindowId,
    exposed: Vec<u8>,
}

const BEGIN: usize = 40;

const HOUR: Duration = Duration::from_secs(3600);

impl Reader {
    fn new(len: usize) -> Reader {
        let mut harness = Harness::new();
        let (window, me) = (harness.window, Rank(0));
        let layout = Window::new(window, vec![16, len], vec![None, None], crate::buffer::Memory::Host);
        harness.peer.engine.windows.set_layout(me, layout, None);
        let remote = Remote { address: BEGIN as u64, key: Arc::from([7, 8, 9]) };
        harness.peer.engine.windows.set_remotes(window, vec![None, Some(remote)]);
        let exposed: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        harness.peer.wire().exposed = Some([&[0; BEGIN][..], &exposed].concat());
        harness.peer.settle();
        Reader { harness, window, exposed }
    }

    /// Submits an operation, without a turn.
    fn submit(&mut self, access: RmaOp, timeout: Duration) -> Work {
        let engine = &mut self.harness.peer.engine;
        let entry = engine.begin(access.call(Rank(1), self.window), access.bytes());
        let work = Work::new(mock_peer::Harness::no_progress(), entry);
        let (window, peer) = (self.window, Rank(1));
        engine.submit_rma(RmaRequest { window, peer, access, timeout, work: work.clone() });
        work
    }

    fn get(&mut self, offset: usize, into: &mut Words) -> Work {
        self.submit(RmaOp::Get { offset, into: Region::of(&[into.buffer()]) }, HOUR)
    }

    fn put(&mut self, from: &mut Words) -> Work {
        self.submit(RmaOp::Put { offset: 0, from: Region::of(&[from.buffer()]) }, HOUR)
    }

    fn reads_end(&mut self, is_well: bool) {
        self.harness.peer.wire().reads_end = Some(is_well);
        self.harness.peer.settle();
    }

    fn reads(&self) -> usize {
        self.harness.peer.wire().reads.len()
    }

    /// Rank 1 answers the last but so many operations, a get of a frame, with these bytes.
    fn answer(&mut self, before: u64, bytes: &[u8]) {
        let token = GET_TOKENS | (self.harness.peer.engine.windows.next_id() - 1 - before);
        let header = Harness::header(FrameKind::Data, self.window.0, token, bytes.len() as u64);
        self.harness.send(&[&header, bytes].concat());
    }

    /// The kinds of the frames that rank 0 has sent since the last call.
    fn sent(&mut self) -> Vec<FrameKind> {
        let sent = std::mem::take(&mut self.harness.peer.wire().from_engine);
        let (mut rest, mut kinds) = (sent.as_slice(), Vec::new());
        while !rest.is_empty() {
            let header = Header::decode(rest).expect("a header").expect("a whole one");
            rest = &rest[header.size() + header.payload()..];
            kinds.push(header.kind);
        }
        kinds
    }

    /// As many bytes as `words` has, from `offset` on.
    fn is_there(&self, words: &Words, offset: usize) -> bool {
        let bytes: Vec<u8> = words.get().iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.exposed[offset..][..bytes.len()] == bytes
    }

    fn remote_reads(&self) -> u64 {
        self.harness.peer.engine.windows.remote_reads(Rank(1))
    }
}

/// One whose stream to rank 1 is open, as after an operation.
fn reader(len: usize) -> Reader {
    let mut reader = Reader::new(len);
    let signal = reader.submit(RmaOp::Signal, HOUR);
    reader.harness.peer.settle();
    assert!(signal.is_done() && reader.sent() == [FrameKind::Signal]);
    reader
}

#[test]
fn gets_are_read_without_a_frame_many_at_once_and_in_pieces() {
    // Of seven pieces, the last one short.
    let (mut reader, mut short) = (reader(7 * READ_MAX - 8), Words::new(vec![0; 3]));
    let mut long = Words::new(vec![0; (7 * READ_MAX - 16) / 8]);
    let (first, second) = (reader.get(5, &mut short), reader.get(3, &mut long));
    reader.harness.peer.settle();
    assert_eq!((reader.reads(), first.is_done(), second.is_done()), (3, false, false));
    reader.reads_end(true);
    assert_eq!((first.result(), second.result()), (Some(Ok(())), Some(Ok(()))));
    assert!(reader.is_there(&short, 5) && reader.is_there(&long, 3));
    assert_eq!((reader.sent(), reader.remote_reads()), (vec![], 2));
}

#[test]
fn a_get_that_cannot_be_read_goes_by_a_frame_before_all_that_follows() {
    for begins in [true, false] {
        let (mut reader, mut into, mut from) = (reader(64), Words::new(vec![0; 2]), Words::new(vec![1]));
        if !begins {
            reader.harness.peer.wire().exposed = None;
        }
        let get = reader.get(8, &mut into);
        let (put, signal) = (reader.put(&mut from), reader.submit(RmaOp::Signal, HOUR));
        let works = [&get, &put, &signal];
        if begins {
            reader.harness.peer.settle();
            assert_eq!((reader.sent(), works.map(|work| work.is_done())), (vec![], [false; 3]), "they wait");
            reader.reads_end(false);
        }
        reader.harness.peer.settle();
        assert_eq!((reader.sent(), works.map(|work| work.is_done())), (vec![FrameKind::Get], [false; 3]));
        reader.answer(2, &[7; 16]);
        assert_eq!(reader.sent(), [FrameKind::Put, FrameKind::Signal]);
        assert_eq!((works.map(|work| work.is_done()), reader.remote_reads()), ([true; 3], 0));
    }
}

#[test]
fn a_get_that_asks_is_overtaken_by_other_gets_alone() {
    let (mut reader, mut into, mut more) = (reader(64), Words::new(vec![0; 2]), Words::new(vec![0; 2]));
    reader.harness.peer.wire().exposed = None;
    let mut from = Words::new(vec![1]);
    let gets = [reader.get(0, &mut into), reader.get(8, &mut more)];
    let (put, late) = (reader.put(&mut from), reader.get(0, &mut into));
    reader.harness.peer.settle();
    assert_eq!((reader.sent(), put.is_done()), (vec![FrameKind::Get; 2], false));
    reader.answer(3, &[7; 16]);
    assert_eq!((reader.sent(), gets[0].is_done(), put.is_done()), (vec![], true, false), "the second one is under way");
    reader.answer(2, &[8; 16]);
    assert_eq!((reader.sent(), put.is_done()), (vec![FrameKind::Put, FrameKind::Get], true));
    reader.answer(0, &[9; 16]);
    assert!(late.is_done() && gets[1].is_done() && reader.harness.peer.engine.is_settled());
}

#[test]
fn nothing_that_follows_a_put_goes_once_its_time_is_over() {
    let mut reader = reader(64);
    let mut from = Words::new(vec![1; 2 * FRAGMENT_BYTES / 8]);
    let frame = Harness::header(FrameKind::Put, 0, 0, 0).len() + FRAGMENT_BYTES;
    // The stream has no room: for anything, in the first frame of the put, or between its two.
    for (room, sent) in [(0, 0), (1000, 1), (frame, 1)] {
        reader.harness.peer.wire().room = Some(room);
        let put = RmaOp::Put { offset: 0, from: Region::of(&[from.buffer()]) };
        let put = reader.submit(put, Duration::from_secs(1));
        let signals = [0; 2].map(|_| reader.submit(RmaOp::Signal, HOUR));
        reader.harness.peer.settle();
        // A signal would find room at once.
        reader.harness.peer.wire().room = None;
        reader.harness.peer.engine.expire(Instant::now() + Duration::from_secs(2));
        reader.harness.peer.settle();
        for work in [&put, &signals[0], &signals[1]] {
            assert!(matches!(work.result(), Some(Err(Error::Timeout { .. }))), "{room}: {:?}", work.result());
        }
        assert_eq!(reader.sent(), vec![FrameKind::Put; sent], "{room}");
    }
}

#[test]
fn what_follows_a_get_that_is_read_waits_for_its_end() {
    let (mut reader, mut into, mut more) = (reader(64), Words::new(vec![0; 2]), Words::new(vec![0; 2]));
    let mut from = Words::new(vec![1]);
    let gets = [reader.get(8, &mut into), reader.get(16, &mut more)];
    let put = reader.put(&mut from);
    let late = reader.get(24, &mut into);
    reader.harness.peer.settle();
    assert_eq!((reader.reads(), reader.sent(), put.is_done()), (2, vec![], false));
    reader.reads_end(true);
    assert!(gets.iter().all(|get| get.result() == Some(Ok(()))) && put.is_done() && !late.is_done());
    assert_eq!(reader.sent(), [FrameKind::Put, FrameKind::Get], "the last one must see the put");
}

#[test]
fn a_get_after_a_put_goes_by_a_frame_until_a_flush_was_answered() {
    for accumulates in [false, true] {
        let (mut reader, mut into, mut from) = (reader(64), Words::new(vec![0; 2]), Words::new(vec![1]));
        let from = Region::of(&[from.buffer()]);
        let changed = match accumulates {
            true => RmaOp::Accumulate { offset: 0, from, dtype: DType::U64 },
            false => RmaOp::Put { offset: 0, from },
        };
        reader.submit(changed, HOUR);
        reader.harness.peer.settle();
        reader.get(8, &mut into);
        assert_eq!((reader.reads(), reader.sent().last()), (0, Some(&FrameKind::Get)));
        reader.answer(0, &[7; 16]);
        let flush = reader.submit(RmaOp::Flush, HOUR);
        reader.get(8, &mut into);
        assert_eq!((reader.reads(), reader.sent()), (0, vec![FrameKind::Flush, FrameKind::Get]));
        reader.answer(0, &[7; 16]);
        let id = reader.harness.peer.engine.windows.next_id() - 2;
        let window = reader.window.0;
        reader.harness.send(&Harness::header(FrameKind::Flushed, window, id, 0));
        assert!(flush.is_done());
        let read = reader.get(8, &mut into);
        assert_eq!(reader.reads(), 1);
        reader.reads_end(true);
        assert!(read.is_done() && reader.is_there(&into, 8));
    }
}

#[test]
fn what_is_read_for_a_get_that_is_over_goes_nowhere() {
    let (mut reader, mut into) = (reader(64), Words::new(vec![0; 2]));
    let late = reader.submit(RmaOp::Get { offset: 0, into: Region::of(&[into.buffer()]) }, Duration::ZERO);
    let signal = reader.submit(RmaOp::Signal, HOUR);
    reader.harness.peer.engine.expire(Instant::now());
    let error = late.result().expect("over").expect_err("its time is over").to_string();
    assert!(error.contains("rank 1 did not answer"), "{error}");
    assert!(signal.is_done(), "what waited for it goes on");
    reader.reads_end(true);
    assert_eq!((into.get(), reader.remote_reads()), ([0, 0].as_slice(), 0));
    assert_eq!(reader.reads(), 0, "it has been taken from the transport, which would keep a thread awake for it");
    assert!(reader.harness.peer.engine.is_settled() && reader.harness.peer.engine.windows.reads.is_empty());

    reader.harness.peer.wire().reads_end = None;
    let cut = reader.get(0, &mut into);
    let window = reader.window;
    reader.harness.peer.engine.conceal(window);
    assert!(matches!(cut.result(), Some(Err(Error::Mismatch { .. }))));
    reader.reads_end(true);
    assert_eq!(into.get(), [0, 0]);
}

#[test]
fn a_rank_that_is_lost_ends_what_is_read_of_it() {
    let (mut reader, mut into) = (reader(64), Words::new(vec![0; 2]));
    let get = reader.get(0, &mut into);
    reader.harness.peer.wire().broken = true;
    reader.harness.peer.wire().ended = true;
    reader.harness.peer.settle();
    assert!(matches!(get.result(), Some(Err(Error::PeerLost { rank: 1, .. }))), "{:?}", get.result());
    assert!(reader.harness.peer.engine.windows.reads.is_empty(), "nothing is waited for any more");
    reader.reads_end(true);
    assert_eq!(into.get(), [0, 0]);
}
