//! A peer whose frames a test writes by hand, and whose memory is a list of bytes.

use std::io::{self, IoSlice};
use std::time::{Duration, Instant};

use crate::algo::Collective;
use crate::engine::call::Call;
use crate::engine::connector::Route;
use crate::engine::flight_recorder::Bytes;
use crate::engine::frame::Header;
use crate::engine::message::{Direction, MessageRequest};
use crate::engine::plan::Executed;
use crate::engine::progress::Engine;
use crate::engine::region::{Region, Spaces, Words};
use crate::engine::request::Request;
use crate::error::LinkDown;
use crate::signature::Signature;
use crate::sync::{Arc, Mutex, MutexGuard, lock};
use crate::sys::lent_bytes::LentBytes;
use crate::sys::poller::StreamName;
use crate::sys::team::Team;
use crate::topo::Topology;
use crate::transport::{
    Accepted, Detour, MemoryAddress, Read, RecvStream, RemoteMemory, SendStream, TakeRead, Transport, Watcher,
};
use crate::types::{DType, Rank, Tag};
use crate::work::{Drive, Work};

/// What lies between rank 0, which is an engine, and rank 1, which is the test.
#[derive(Default)]
pub(crate) struct MockWire {
    /// What rank 1 has sent and rank 0 has not read.
    pub(crate) to_engine: Vec<u8>,
    /// What rank 0 has sent.
    pub(crate) from_engine: Vec<u8>,
    /// How much of what rank 1 has sent waits in the stream, as of rank 0's last look.
    pub(crate) unread: usize,
    /// Whether nothing follows that.
    pub(crate) ended: bool,
    /// After how many looks in vain rank 0 is to arm a stream, if that is not as usual.
    pub(crate) patience: Option<u32>,
    /// Whether rank 0 has armed its stream to rank 1.
    is_armed: bool,
    /// How often rank 0 has looked at a stream of any rank, and how often a thread of its that sleeps was woken.
    pub(crate) looks: usize,
    pub(crate) wakes: usize,
    /// How often rank 0 has asked its listener, and whether somebody connects to that.
    pub(crate) accepts: usize,
    pub(crate) has_caller: bool,
    /// So many ranks, from rank 2 on, have opened streams to rank 0 in which nothing comes.
    pub(crate) crowd: usize,
    /// Rank 1's memory from address 1 on, as far as it can be read.
    pub(crate) memory: Vec<u8>,
    /// Whether neither rank can read the other's memory.
    pub(crate) is_far: bool,
    /// How often rank 1 has invalidated memory.
    pub(crate) invalidations: u64,
    /// How often rank 0 has.
    pub(crate) engine_invalidations: u64,
    /// What rank 0 can read of rank 1 without its help, from address 0 on; nothing if it is none.
    pub(crate) exposed: Option<Vec<u8>>,
    /// The tokens, addresses and lengths of what rank 0 is reading there, of which three may be under way.
    pub(crate) reads: Vec<(u64, u64, usize)>,
    /// Whether that ends, and well.
    pub(crate) reads_end: Option<bool>,
    /// Whether rank 0's stream to rank 1 is down.
    pub(crate) broken: bool,
    /// Whether rank 0's stream to rank 1 has no room.
    pub(crate) full: bool,
    /// For how many bytes it has room, if that is limited.
    pub(crate) room: Option<usize>,
    /// Whether rank 0's stream to rank 1 is still being opened.
    pub(crate) is_opening: bool,
    /// Whether bytes that it has taken wait in rank 0's process.
    pub(crate) holds: bool,
    /// Whether rank 0 cannot open a stream to anyone.
    pub(crate) refuses: bool,
    /// The CPU that rank 1 waits on, and the one that rank 0 does, as far as they have told.
    pub(crate) cpu: Option<u32>,
    pub(crate) engine_cpu: Option<u32>,
}

impl MockWire {
    fn patience(&self) -> u32 {
        self.patience.unwrap_or(u32::MAX)
    }

    fn has_room(&self) -> bool {
        !self.full && self.room != Some(0)
    }
}

/// Rank 0, and what the test holds of rank 1.
pub(crate) struct Harness {
    pub(crate) engine: Engine,
    wire: Arc<Mutex<MockWire>>,
}

#[cfg_attr(fuzzing, allow(dead_code, reason = "some of it serves other tests alone"))]
impl Harness {
    pub(crate) fn new() -> Harness {
        Harness::of(2)
    }

    /// Of so many ranks, of which only rank 1 answers.
    pub(crate) fn of(size: usize) -> Harness {
        let wire = Arc::<Mutex<MockWire>>::default();
        let topo = Topology::single_host(size);
        let transport = Box::new(MockTransport { wire: Arc::clone(&wire), accepted: false });
        let watcher = Box::new(MockWatcher(Arc::clone(&wire)));
        let find_routes = |rank: Rank| vec![Route { transport: 0, address: vec![] }; usize::from(rank > Rank(0))];
        let engine = Engine::new("test".to_owned(), Rank(0), topo, vec![transport], Box::new(find_routes), watcher);
        Harness { engine, wire }
    }

    pub(crate) fn wire(&self) -> MutexGuard<'_, MockWire> {
        lock(&self.wire)
    }

    /// Sends bytes as rank 1 and lets rank 0 go as far as it can.
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.wire().to_engine.extend_from_slice(bytes);
        self.settle();
    }

    /// What drives the works of a test, which makes progress itself.
    pub(crate) fn no_progress() -> Arc<NoProgress> {
        Arc::new(NoProgress)
    }

    pub(crate) fn settle(&mut self) {
        while self.engine.progress(true) {}
    }

    /// Starts a message on rank 0 and lets it go as far as it can.
    pub(crate) fn start(&mut self, direction: Direction, words: &mut Words, timeout: Duration) -> Work {
        let region = Region::of(&[words.buffer()]);
        let tag = Tag(0);
        let entry = self.engine.begin(direction.call(tag, region.len()), direction.bytes(region.len()));
        let work = Work::new(Harness::no_progress(), entry);
        self.engine.submit_message(MessageRequest { direction, tag, region, timeout }, work.clone());
        self.settle();
        work
    }

    /// Submits a broadcast of one word from `root`, for which rank 0 waits.
    #[cfg_attr(not(test), allow(dead_code, reason = "the fuzzer makes its own calls"))]
    pub(crate) fn broadcast(&mut self, root: Rank, words: &mut Words, timeout: Duration) -> Work {
        let signature = Signature { operation: 3, root: root.0, count: 1, ..Signature::default() };
        let entry = self.engine.begin(Call::Collective(signature), Bytes::default());
        let work = Work::new(Harness::no_progress(), entry);
        let region = Region::of(&[words.buffer()]);
        let request = Request {
            collective: Collective::Broadcast { count: 1, root },
            signature,
            reduce: None,
            dtype: DType::U64,
            spaces: Spaces::new(region.clone(), region, 8),
            timeout,
        };
        self.engine.submit_collective(request, Executed::default(), work.clone());
        work
    }

    /// The headers of what rank 0 has sent since the last call.
    pub(crate) fn sent(&mut self) -> Vec<Header> {
        let bytes = std::mem::take(&mut self.wire().from_engine);
        let mut rest = bytes.as_slice();
        let mut next = || {
            let header = Header::decode(rest).expect("a header")?;
            rest = &rest[header.size() + header.payload()..];
            Some(header)
        };
        std::iter::from_fn(&mut next).collect()
    }
}

pub(crate) struct NoProgress;

impl Drive for NoProgress {
    fn drive(&self, _: &Work, _: Option<Instant>) {}
}

/// Names what has to do with rank 1.
struct MockWatcher(Arc<Mutex<MockWire>>);

impl Watcher for MockWatcher {
    fn look(&mut self, named: &mut Vec<StreamName>) -> bool {
        let wire = lock(&self.0);
        if wire.ended || !wire.to_engine.is_empty() {
            named.push(StreamName::From(Rank(1)));
        }
        if wire.broken || (wire.is_armed && wire.has_room()) {
            named.push(StreamName::To(Rank(1)));
        }
        // At first rank 1 does.
        wire.has_caller || wire.accepts == 0
    }

    fn wake(&self) {
        lock(&self.0).wakes += 1;
    }
}

struct MockTransport {
    wire: Arc<Mutex<MockWire>>,
    accepted: bool,
}

impl Transport for MockTransport {
    fn name(&self) -> &'static str {
        "by hand"
    }

    fn address(&self) -> Vec<u8> {
        Vec::new()
    }

    fn open(&mut self, to: Rank, _: &[u8], _: Detour) -> Result<Box<dyn SendStream>, LinkDown> {
        if lock(&self.wire).refuses {
            return Err(LinkDown::new("its process is gone"));
        }
        Ok(Box::new(Sending(if to == Rank(1) { Arc::clone(&self.wire) } else { Arc::default() })))
    }

    fn accept(&mut self) -> Vec<Accepted> {
        lock(&self.wire).accepts += 1;
        if std::mem::replace(&mut self.accepted, true) {
            return Vec::new();
        }
        let stream = |rank: usize| -> Accepted {
            let (wire, is_crowd) = (Arc::clone(&self.wire), rank > 1);
            (Rank::from(rank), Box::new(Receiving { wire, seen: Vec::new(), is_crowd }))
        };
        let crowd = lock(&self.wire).crowd;
        (1..crowd + 2).map(stream).collect()
    }

    fn accepting_until(&self) -> Option<Instant> {
        None
    }

    fn take_reads(&mut self, take: &mut TakeRead<'_>) {
        let wire = &mut *lock(&self.wire);
        let (Some(is_well), Some(exposed)) = (wire.reads_end, &wire.exposed) else { return };
        for (token, address, len) in wire.reads.drain(..) {
            let bytes = LentBytes::owned(exposed[address as usize..][..len].to_vec());
            take(token, if is_well { Ok(&bytes) } else { Err("for a test".to_owned()) });
        }
    }
}

fn gone() -> LinkDown {
    LinkDown::new("it closed the connection")
}

struct Sending(Arc<Mutex<MockWire>>);

/// Rank 0's stream to rank 1.
#[cfg(test)]
pub(crate) fn sending(wire: &Arc<Mutex<MockWire>>) -> Box<dyn SendStream> {
    Box::new(Sending(wire.clone()))
}

impl SendStream for Sending {
    fn write(&mut self, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        let mut wire = lock(&self.0);
        wire.looks += 1;
        if wire.broken {
            return Err(gone());
        }
        if !wire.has_room() {
            return Ok(0);
        }
        let (before, room) = (wire.from_engine.len(), wire.room.unwrap_or(usize::MAX));
        wire.from_engine.extend_from_slice(head);
        body.iter().for_each(|bytes| wire.from_engine.extend_from_slice(bytes));
        let written = room.min(wire.from_engine.len() - before);
        wire.from_engine.truncate(before + written);
        wire.room = wire.room.map(|room| room - written);
        Ok(written)
    }

    fn patience(&self) -> u32 {
        lock(&self.0).patience()
    }

    fn arm(&mut self) -> bool {
        let mut wire = lock(&self.0);
        wire.looks += 1;
        wire.is_armed = true;
        wire.has_room()
    }

    fn disarm(&mut self) {
        lock(&self.0).is_armed = false;
    }

    fn is_open(&self) -> bool {
        self.was_accepted() && !lock(&self.0).holds
    }

    fn was_accepted(&self) -> bool {
        !lock(&self.0).is_opening
    }

    fn peer_can_read(&self) -> bool {
        !lock(&self.0).is_far
    }

    fn invalidate(&mut self) {
        lock(&self.0).engine_invalidations += 1;
    }

    fn can_read(&self) -> bool {
        lock(&self.0).exposed.is_some()
    }

    fn begin_read(&mut self, token: u64, from: RemoteMemory<'_>) -> Read {
        let mut wire = lock(&self.0);
        match wire.reads.len() {
            _ if wire.exposed.is_none() => Read::Unable,
            3.. => Read::Busy,
            _ => {
                wire.reads.push((token, from.address, from.len));
                Read::Begun
            }
        }
    }

    fn publish_cpu(&mut self, cpu: u32) {
        lock(&self.0).engine_cpu = Some(cpu);
    }

    fn flushed(&mut self) -> Result<bool, LinkDown> {
        Ok(true)
    }
}

struct Receiving {
    wire: Arc<Mutex<MockWire>>,
    seen: Vec<u8>,
    /// It is not rank 1's, and brings nothing.
    is_crowd: bool,
}

impl RecvStream for Receiving {
    fn peek(&mut self) -> Result<&[u8], LinkDown> {
        let mut wire = lock(&self.wire);
        wire.looks += 1;
        if self.is_crowd {
            return Ok(&[]);
        }
        self.seen.append(&mut wire.to_engine);
        wire.unread = self.seen.len();
        if wire.ended && self.seen.is_empty() { Err(gone()) } else { Ok(&self.seen) }
    }

    fn end(&self) -> Option<LinkDown> {
        lock(&self.wire).ended.then(gone)
    }

    fn consume(&mut self, count: usize) {
        self.seen.drain(..count);
        lock(&self.wire).unread = self.seen.len();
    }

    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        let count = self.peek()?.len().min(into.len());
        into[..count].copy_from_slice(&self.seen[..count]);
        self.consume(count);
        Ok(count)
    }

    fn patience(&self) -> u32 {
        lock(&self.wire).patience()
    }

    fn read_memory(&mut self, from: MemoryAddress, into: &mut [u8], _: Team) -> io::Result<usize> {
        let wire = lock(&self.wire);
        let there = (from.address as usize).checked_sub(1).and_then(|at| wire.memory.get(at..));
        let there = there.filter(|there| !there.is_empty());
        let there = there.ok_or(io::ErrorKind::PermissionDenied)?;
        let count = there.len().min(into.len());
        into[..count].copy_from_slice(&there[..count]);
        Ok(count)
    }

    fn invalidations(&self) -> u64 {
        lock(&self.wire).invalidations
    }

    fn writer_cpu(&self) -> Option<u32> {
        lock(&self.wire).cpu
    }

    fn arm(&mut self) -> bool {
        let mut wire = lock(&self.wire);
        wire.looks += 1;
        !self.is_crowd && (wire.ended || !wire.to_engine.is_empty())
    }

    fn disarm(&mut self) {
        lock(&self.wire).looks += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::EagerBytes;
    use crate::engine::frame::{FAIL_TEXT_MAX, FRAGMENT_BYTES, FrameKind, Header, MatchSpace};
    use crate::engine::message::message_header;
    use crate::engine::peers::DRAIN_TIMEOUT;
    use crate::engine::wait_policy::Wait;
    use crate::types::Source;

    #[test]
    fn a_frame_longer_than_its_kind_allows_ends_the_connection() {
        for (kind, limit) in [
            (FrameKind::Eager, EagerBytes::MAX),
            (FrameKind::Data, FRAGMENT_BYTES),
            (FrameKind::Put, FRAGMENT_BYTES),
            (FrameKind::Accumulate, FRAGMENT_BYTES),
            (FrameKind::Fail, FAIL_TEXT_MAX),
        ] {
            for len in [limit as u64 + 1, u64::MAX] {
                let mut harness = Harness::new();
                harness.settle();
                harness.send(&Header::control(kind, MatchSpace::PointToPoint, 0, 0, len).encode());
                let lost = harness.engine.context.endpoints.lost(Rank(1)).unwrap_or_default().to_owned();
                assert!(lost.contains(&format!("{kind:?} frame of {len} bytes")), "{lost}");
            }
        }
    }

    #[test]
    fn what_a_rank_sent_before_it_was_lost_is_taken_however_late() {
        let mut harness = Harness::new();
        let mut words = Words::new(vec![0]);
        let receive = harness.start(Direction::Receive(Source::Rank(Rank(1))), &mut words, Duration::from_secs(60));
        harness.wire().broken = true;
        harness.settle();
        std::thread::sleep(DRAIN_TIMEOUT); // as if this process had no core to run on
        let header = Header::control(FrameKind::Eager, MatchSpace::PointToPoint, 0, 0, 8).encode();
        harness.send(&[&*header, &7u64.to_ne_bytes()].concat());
        assert_eq!((receive.result(), words.get()), (Some(Ok(())), [7].as_slice()));
        assert!(harness.engine.context.endpoints.lost(Rank(1)).is_some());
    }

    #[test]
    fn what_a_rank_sent_may_have_been_lost_on_the_way_and_come_later_than_its_end() {
        let mut harness = Harness::new();
        let mut words = Words::new(vec![0]);
        let receive = harness.start(Direction::Receive(Source::Rank(Rank(1))), &mut words, Duration::from_secs(60));
        harness.wire().broken = true;
        // As TLS does, or rails of which none is left.
        harness.wire().holds = true;
        // TCP sends again what was lost after 0.2 s, and after twice as long each time that follows.
        for _ in 0..20 {
            harness.settle();
            std::thread::sleep(Duration::from_millis(100));
        }
        assert!(!receive.is_done());
        let header = Header::control(FrameKind::Eager, MatchSpace::PointToPoint, 0, 0, 8).encode();
        harness.send(&[&*header, &7u64.to_ne_bytes()].concat());
        assert_eq!((receive.result(), words.get()), (Some(Ok(())), [7].as_slice()));
    }

    /// How often rank 0 looks at a peer or at a stream while `act` goes on.
    fn looks(harness: &mut Harness, act: impl FnOnce(&mut Harness)) -> (usize, usize) {
        harness.engine.context.endpoints.take_looks();
        harness.wire().looks = 0;
        act(harness);
        (harness.engine.context.endpoints.take_looks(), harness.wire().looks)
    }

    fn turns(harness: &mut Harness, count: usize) {
        (0..count).for_each(|_| _ = harness.engine.progress(false));
    }

    #[test]
    fn a_stream_that_brings_nothing_costs_a_turn_nothing_until_it_is_named() {
        let (mut harness, mut words) = (Harness::new(), Words::new(vec![0]));
        harness.wire().patience = Some(8);
        harness.settle();
        turns(&mut harness, 20);
        assert_eq!(looks(&mut harness, |harness| turns(harness, 100)), (0, 0), "nothing is expected");
        let receive = harness.start(Direction::Receive(Source::Rank(Rank(1))), &mut words, Duration::from_secs(60));
        assert!(looks(&mut harness, |harness| turns(harness, 4)).1 >= 4, "it may come soon");
        turns(&mut harness, 8);
        assert_eq!(looks(&mut harness, |harness| turns(harness, 100)), (0, 0));
        let message = [&*message_header(Tag(0), 8).encode(), &7u64.to_ne_bytes()].concat();
        harness.wire().to_engine.extend_from_slice(&message);
        turns(&mut harness, 1);
        assert_eq!((receive.result(), words.get()), (Some(Ok(())), [7].as_slice()));
    }

    /// Rank 0, which sends and finds no room, and has armed the stream.
    fn blocked_send(words: &mut Words) -> (Harness, Work) {
        let mut harness = Harness::new();
        harness.engine.context.rndv.single_copy_bytes = harness.engine.context.rndv.eager_bytes;
        harness.wire().patience = Some(8);
        harness.wire().full = true;
        let send = harness.start(Direction::Send(Rank(1)), words, Duration::from_secs(60));
        turns(&mut harness, 20);
        (harness, send)
    }

    #[test]
    fn bytes_without_room_cost_a_turn_nothing_until_there_is_some() {
        let mut words = Words::new(vec![7]);
        let (mut harness, send) = blocked_send(&mut words);
        assert_eq!(looks(&mut harness, |harness| turns(harness, 100)), (0, 0));
        let mut others = Words::new(vec![8]);
        let second = harness.start(Direction::Send(Rank(1)), &mut others, Duration::from_secs(60));
        assert!(harness.engine.is_busy() && !send.is_done());
        harness.wire().full = false;
        turns(&mut harness, 1);
        assert_eq!((send.result(), second.result()), (Some(Ok(())), Some(Ok(()))));
        assert!(!harness.engine.is_busy() && !harness.wire().is_armed);
    }

    #[test]
    fn bytes_that_are_taken_back_leave_nothing_armed() {
        let mut words = Words::new(vec![7]);
        let (mut harness, send) = blocked_send(&mut words);
        assert!(harness.engine.is_busy() && harness.wire().is_armed);
        harness.engine.expire(Instant::now() + Duration::from_secs(61));
        assert!(send.is_done() && !harness.engine.is_busy() && !harness.wire().is_armed);
        let next = harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
        harness.wire().full = false;
        turns(&mut harness, 1);
        assert_eq!(next.result(), Some(Ok(())), "what comes later is written in each turn");
    }

    #[test]
    fn a_stream_that_is_accepted_while_a_thread_sleeps_wakes_it() {
        let mut harness = Harness::new();
        assert!(!harness.engine.arm());
        // Another thread's turn.
        harness.engine.progress(true);
        assert_eq!(harness.wire().wakes, 1, "the one that sleeps has not armed that stream");
    }

    #[test]
    fn what_is_expected_while_a_thread_sleeps_is_for_the_poller_to_tell() {
        let (mut harness, mut words) = (Harness::new(), Words::new(vec![0]));
        harness.settle();
        assert!(!harness.engine.arm());
        let _work = harness.start(Direction::Receive(Source::Rank(Rank(1))), &mut words, Duration::from_secs(60));
        assert_eq!(harness.wire().wakes, 0, "the stream is armed");
    }

    #[test]
    fn what_a_rank_says_of_a_failure_goes_out_at_its_end_where_there_is_room_again() {
        let (mut words, mut more) = (Words::new(vec![7]), Words::new(vec![8]));
        let (mut harness, failed) = blocked_send(&mut words);
        let waits = harness.start(Direction::Send(Rank(1)), &mut more, Duration::from_secs(3600));
        harness.engine.expire(Instant::now() + Duration::from_secs(61));
        assert!(failed.is_done() && !waits.is_done() && harness.wire().is_armed);
        harness.wire().full = false;
        harness.engine.close("aborted: for a test");
        let wire = harness.wire();
        let kind = |at: usize| Header::decode(&wire.from_engine[at..]).expect("a header").expect("a whole one").kind;
        let waited = message_header(Tag(0), 8).encode().len() + 8;
        assert_eq!((kind(0), kind(waited)), (FrameKind::Eager, FrameKind::Fail));
    }

    #[test]
    fn what_comes_onto_the_agenda_while_a_thread_sleeps_wakes_it() {
        let (mut harness, mut words) = (Harness::new(), Words::new(vec![7]));
        harness.engine.context.rndv.single_copy_bytes = harness.engine.context.rndv.eager_bytes;
        harness.settle();
        assert!(!harness.engine.arm());
        assert_eq!(harness.wire().wakes, 0);
        // Another thread sends, and finds no room.
        harness.wire().full = true;
        let _send = harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
        assert_eq!(harness.wire().wakes, 1, "the one that sleeps has not armed the stream to rank 1");
        harness.engine.disarm();
        assert!(!harness.engine.arm());
        // Another thread takes what has come, and what comes next would not wake anyone.
        harness.send(&Header::control(FrameKind::Credit, MatchSpace::PointToPoint, 0, 0, 1).encode());
        assert_eq!(harness.wire().wakes, 2);
        harness.engine.disarm();
        harness.wire().to_engine.push(0);
        assert!(harness.engine.arm(), "a byte is there");
    }

    #[test]
    fn what_is_due_sooner_than_a_sleeping_thread_knows_wakes_it() {
        let (mut harness, mut words) = (Harness::new(), Words::new(vec![7]));
        harness.wire().is_opening = true;
        let _send = harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
        harness.settle();
        assert!(!harness.engine.arm());
        let wakes = harness.wire().wakes;
        // Another thread notices that the stream to rank 1 is down: what is left to read is to be read soon.
        harness.wire().broken = true;
        harness.engine.progress(true);
        assert_eq!(harness.wire().wakes, wakes + 1);
    }

    #[test]
    fn a_turn_in_a_large_world_looks_at_those_that_were_talked_to() {
        let looks = |size| {
            let (mut harness, mut words) = (Harness::of(size), Words::new(vec![7]));
            harness.engine.context.rndv.single_copy_bytes = harness.engine.context.rndv.eager_bytes;
            for to in [Rank(1), Rank(4), Rank::from(size - 1)] {
                harness.start(Direction::Send(to), &mut words, Duration::from_secs(60));
            }
            let engine = &mut harness.engine;
            assert_eq!(engine.context.endpoints.known().len(), 3);
            engine.context.endpoints.take_looks();
            engine.progress(true);
            engine.progress(false);
            engine.progress_sends();
            engine.arm();
            engine.disarm();
            engine.next_wait(3, Instant::now());
            assert!(!engine.is_busy() && engine.flushed() && engine.next_deadline().is_none());
            engine.context.endpoints.take_looks()
        };
        assert_eq!(looks(10_000), looks(10));
    }

    #[test]
    fn a_turn_a_sleep_and_a_message_cost_the_same_among_thousands_of_open_streams() {
        let looks = |crowd: usize| {
            let (mut harness, mut words) = (Harness::of(crowd + 2), Words::new(vec![7]));
            harness.engine.context.rndv.single_copy_bytes = harness.engine.context.rndv.eager_bytes;
            (harness.wire().crowd, harness.wire().patience) = (crowd, Some(64));
            for to in 1..crowd + 2 {
                harness.start(Direction::Send(Rank::from(to)), &mut words, Duration::from_secs(60));
            }
            assert_eq!(harness.engine.context.endpoints.known().len(), crowd + 1);
            harness.engine.next_wait(3, Instant::now());
            turns(&mut harness, 200);
            let idle = looks(&mut harness, |harness| turns(harness, 10));
            let message = looks(&mut harness, |harness| {
                let _ = harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
                let receive = Direction::Receive(Source::Rank(Rank(1)));
                let work = harness.start(receive, &mut words, Duration::from_secs(60));
                turns(harness, 10);
                harness.send(&[&*message_header(Tag(0), 8).encode(), &7u64.to_ne_bytes()].concat());
                assert_eq!(work.result(), Some(Ok(())));
                turns(harness, 10);
            });
            let sleep = looks(&mut harness, |harness| {
                for _ in 0..10 {
                    harness.engine.next_wait(3, Instant::now());
                    assert!(!harness.engine.arm() && !harness.engine.is_busy());
                    assert!(harness.engine.next_deadline().is_none());
                    harness.engine.disarm();
                    harness.engine.progress(true);
                }
            });
            (idle, message, sleep)
        };
        assert_eq!(looks(3_000), looks(10));
        assert_eq!(looks(3_000).0, (0, 0));
    }

    #[test]
    fn a_thread_that_a_stream_has_woken_asks_no_listener() {
        let (mut harness, mut words) = (Harness::new(), Words::new(vec![0]));
        harness.settle();
        let accepts = |harness: &mut Harness| {
            let before = harness.wire().accepts;
            harness.engine.progress(true);
            harness.wire().accepts - before
        };
        assert_eq!(accepts(&mut harness), 1, "a connection may have to be given up");
        let receive = harness.start(Direction::Receive(Source::Rank(Rank(1))), &mut words, Duration::from_secs(60));
        let message = [&*message_header(Tag(0), 8).encode(), &7u64.to_ne_bytes()].concat();
        harness.wire().to_engine.extend_from_slice(&message);
        assert_eq!(accepts(&mut harness), 0);
        assert_eq!(receive.result(), Some(Ok(())));
        harness.wire().to_engine.extend_from_slice(&message);
        harness.wire().has_caller = true;
        assert_eq!(accepts(&mut harness), 1);
    }

    #[test]
    fn streams_that_brought_nothing_through_some_sleeps_cost_the_next_ones_nothing() {
        let (mut harness, mut words) = (Harness::of(52), Words::new(vec![7]));
        harness.engine.context.rndv.single_copy_bytes = harness.engine.context.rndv.eager_bytes;
        (harness.wire().crowd, harness.wire().patience) = (50, Some(8192));
        for to in 1..52 {
            harness.start(Direction::Send(Rank(to)), &mut words, Duration::from_secs(60));
        }
        let sleep = |harness: &mut Harness| {
            assert!(!harness.engine.arm());
            harness.engine.disarm();
            harness.engine.progress(true);
        };
        for _ in 0..2 {
            assert!(looks(&mut harness, sleep).1 > 50, "they are looked at for a while, also after a sleep");
        }
        (0..10).for_each(|_| sleep(&mut harness));
        assert_eq!(looks(&mut harness, sleep), (0, 0));
    }

    #[test]
    fn what_is_taken_back_before_it_was_sent_leaves_its_credit() {
        let mut harness = Harness::new();
        let mut words = Words::new(vec![0; 512]);
        harness.engine.context.rndv.single_copy_bytes = harness.engine.context.rndv.eager_bytes;
        harness.wire().full = true;
        // Together more than a receiver keeps unread.
        for _ in 0..300 {
            let send = harness.start(Direction::Send(Rank(1)), &mut words, Duration::ZERO);
            assert!(matches!(send.result(), Some(Err(crate::Error::Timeout { .. }))), "{:?}", send.result());
        }
        harness.wire().full = false;
        let send = harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
        assert_eq!(send.result(), Some(Ok(())), "it goes at once");
    }

    #[test]
    fn a_peer_whose_frames_are_being_taken_is_not_lost_while_another_ones_are() {
        let mut harness = Harness::of(3);
        harness.settle();
        harness.wire().refuses = true;
        let endpoints = &mut harness.engine.context.endpoints;
        // As it is while a frame of rank 1 is dealt with.
        let inbox = endpoints.take_inbox(Rank(1)).expect("a stream");
        assert!(endpoints.take_inbox(Rank(2)).is_none(), "no stream has come from rank 2");
        endpoints.connect(Rank(1));
        assert_eq!(endpoints.lost(Rank(1)), None, "more of it may be in its inbox");
        endpoints.return_inbox(Rank(1), inbox, false);
    }

    #[test]
    fn a_stream_that_is_being_opened_is_looked_after_before_its_operations_time_is_over() {
        let mut harness = Harness::new();
        harness.wire().is_opening = true;
        harness.wire().full = true;
        let mut words = Words::new(vec![0; 2]);
        harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(3600));
        let last = harness.engine.messages.next_deadline();
        assert!(harness.engine.next_deadline() < last, "another address may be due");
        harness.wire().is_opening = false;
        assert_eq!(harness.engine.next_deadline(), last, "the poller tells what comes");
    }

    #[test]
    fn ranks_know_with_whom_they_share_a_cpu() {
        let (mut harness, mut words) = (Harness::new(), Words::new(vec![0]));
        let began = Instant::now();
        assert_eq!(harness.engine.next_wait(3, began), Wait::Spin, "no stream is there yet");
        let _send = harness.start(Direction::Send(Rank(1)), &mut words, Duration::from_secs(60));
        assert_eq!(harness.engine.next_wait(3, began), Wait::Spin, "the other rank has not told");
        harness.wire().cpu = Some(3);
        assert_eq!(harness.engine.next_wait(3, began), Wait::Sleep);
        assert_eq!(harness.engine.next_wait(4, began), Wait::Spin);
        assert_eq!(harness.wire().engine_cpu, Some(4));
    }

    #[test]
    fn a_long_send_to_a_rank_that_is_gone_leaves_nothing_behind() {
        let (mut harness, mut words) = (Harness::of(3), Words::new(vec![7]));
        harness.settle();
        harness.wire().refuses = true;
        harness.engine.context.rndv.eager_bytes = 0;
        let send = harness.start(Direction::Send(Rank(2)), &mut words, Duration::from_secs(60));
        assert!(matches!(send.result(), Some(Err(crate::Error::PeerLost { rank: 2, .. }))), "{:?}", send.result());
        assert!(harness.engine.is_settled(), "no message waits for it");
    }

    #[test]
    fn an_announcement_of_any_length_takes_no_memory() {
        let mut harness = Harness::new();
        harness.send(&Header::control(FrameKind::Rts, MatchSpace::PointToPoint, 0, 7, u64::MAX).encode());
        let mut words = Words::new(vec![0; 2]);
        let receive = harness.start(Direction::Receive(Source::Rank(Rank(1))), &mut words, Duration::from_secs(60));
        let error = receive.result().expect("an end").expect_err("another length");
        assert!(matches!(error, crate::Error::Mismatch { .. }), "{error}");
    }
}
