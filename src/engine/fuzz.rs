//! A rank with operations in flight, and a peer that sends it what the fuzzer likes.

use std::time::{Duration, Instant};

use crate::algo::Collective;
use crate::config::Switch;
use crate::counts::Counts;
use crate::engine::flight_recorder::Bytes;
use crate::engine::frame::{HEADER_MAX, Header};
use crate::engine::message::{Direction, MessageRequest};
use crate::engine::mock_peer::Harness;
use crate::engine::progress::Engine;
use crate::engine::region::{Region, Spaces, Words};
use crate::engine::request::Request;
use crate::engine::window::{RmaOp, RmaRequest};
use crate::fuzz_input::Input;
use crate::signature::Signature;
use crate::types::{DType, Rank, ReduceOp, Source, Tag};
use crate::window::WindowId;
use crate::work::{Submitted, Work};

const PEER: Rank = Rank(1);
const TIMEOUT: Duration = Duration::from_secs(60);

/// The input says what this rank begins, and what the peer sends meanwhile.
pub(crate) fn frames(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut run = FuzzRun::new();
    while !input.is_empty() {
        run.act(&mut input);
        run.check();
    }
    run.harness.engine.close("aborted: the input has ended");
    assert!(run.in_flight.iter().all(|(work, _)| work.is_done()), "an operation outlived its communicator");
}

struct FuzzRun {
    harness: Harness,
    /// The window that is open, and its memory. While there is one, operations are never ended in the call that begins them.
    window: Option<(WindowId, Words)>,
    /// Operations with their memory, which is freed as soon as they are done.
    in_flight: Vec<(Work, Vec<Words>)>,
}

impl FuzzRun {
    fn new() -> FuzzRun {
        let mut harness = Harness::new();
        let window = Some(lend(&mut harness.engine));
        FuzzRun { harness, window, in_flight: Vec::new() }
    }

    fn act(&mut self, input: &mut Input<'_>) {
        match input.byte() % 10 {
            0 => {
                let count = input.byte();
                self.harness.send(input.take(count.into()));
            }
            1 | 2 => self.frame(input),
            3 => {
                let direction = match input.byte() % 3 {
                    0 => Direction::Send(PEER),
                    1 => Direction::Receive(Source::Rank(PEER)),
                    _ => Direction::Receive(Source::Any),
                };
                self.message(direction, input);
            }
            4 => self.collective(input),
            5 => self.access(input),
            6 => {
                let mut wire = self.harness.wire();
                let changes = input.byte();
                wire.invalidations += u64::from(changes % 2);
                wire.is_far = changes & 2 != 0;
                let count = input.byte();
                wire.memory = input.take(count.into()).to_vec();
            }
            7 => {
                self.harness.engine.context.rndv.eager_bytes = 8 * usize::from(input.byte());
                self.harness.engine.context.rndv.single_copy_bytes = 8 * usize::from(input.byte());
                // What is chosen by the clock cannot be played again.
                let single_copy = if input.byte().is_multiple_of(2) { Switch::On } else { Switch::Off };
                self.harness.engine.context.rndv.single_copy = single_copy;
            }
            8 => self.harness.engine.expire(Instant::now() + 2 * TIMEOUT),
            _ => match self.window.take() {
                Some((window, _lent)) => self.harness.engine.conceal(window),
                None => self.window = Some(lend(&mut self.harness.engine)),
            },
        }
        self.harness.settle();
    }

    /// What must hold whatever the peer has sent.
    fn check(&mut self) {
        self.in_flight.retain(|(work, _)| !work.is_done());
        self.harness.engine.context.finished.clear();
        let mut wire = self.harness.wire();
        let sent = std::mem::take(&mut wire.from_engine);
        let mut rest = sent.as_slice();
        while !rest.is_empty() {
            let header = Header::decode(rest).expect("a header").expect("a whole one");
            rest = rest.get(header.size() + header.payload()..).expect("its payload");
        }
        let unread = wire.unread;
        drop(wire);
        if self.harness.engine.context.endpoints.lost(PEER).is_none() {
            assert!(unread < HEADER_MAX, "the stream stalls");
            assert!(!self.harness.engine.can_read_now(), "a message is not read although it could be");
        }
    }

    /// A frame of the format that peers send, with fields that are mostly small numbers, and its payload.
    fn frame(&mut self, input: &mut Input<'_>) {
        let mut bytes = [0; HEADER_MAX];
        bytes[0] = 1 + input.byte() % 16;
        bytes[1] = input.byte() % 2;
        if input.byte().is_multiple_of(2) {
            bytes[2..5].copy_from_slice(&input.array::<3>());
        } else {
            let agreed = self.harness.engine.collectives.signature().unwrap_or_default();
            (bytes[2], bytes[6]) = (SIGNATURE.operation, agreed.algorithm);
        }
        bytes[12..16].copy_from_slice(&(input.number() as u32).to_le_bytes());
        for field in [24, 32, 40, 48, 56] {
            bytes[field..field + 8].copy_from_slice(&input.number().to_le_bytes());
        }
        let header = Header::decode(&bytes).ok().flatten();
        let (size, payload) = header.map_or((bytes.len(), 0), |header| (header.size(), header.payload()));
        // One byte stands for all, so that long payloads need no long inputs.
        let payload = vec![input.byte(); payload.min(PAYLOAD_MAX)];
        self.harness.send(&[&bytes[..size], &payload].concat());
    }

    fn message(&mut self, direction: Direction, input: &mut Input<'_>) {
        let (mut words, tag) = (words(input), Tag(input.byte().into()));
        let region = Region::of(&[words.buffer()]);
        let request = MessageRequest { direction, tag, region, timeout: TIMEOUT };
        let begun = self.harness.engine.run_message(request, input.byte().is_multiple_of(2), &Harness::no_progress());
        self.keep(begun, vec![words]);
    }

    /// Keeps the memory of an operation that is in flight.
    fn keep(&mut self, begun: Submitted, memory: Vec<Words>) {
        if let Submitted::Pending(work) = begun {
            self.in_flight.push((work, memory));
        }
    }

    fn collective(&mut self, input: &mut Input<'_>) {
        let (kind, dtype) = (input.byte(), [DType::U64, DType::F32, DType::F16][usize::from(input.byte() % 3)]);
        let (mut mine, mut theirs) = (words(input), words(input));
        let elements = |words: &Words| words.get().len() * 8 / dtype.size();
        let (count, other) = (elements(&mine), elements(&theirs));
        let (collective, received) = match kind % 4 {
            0 => (Collective::AllReduce { count }, count),
            1 => (Collective::Broadcast { count, root: Rank(u32::from(kind / 4 % 2)) }, count),
            2 => (Collective::AllGather { counts: vec![count, other].into() }, count + other),
            _ => (Collective::AllToAll { send: vec![count, other].into(), recv: Counts::equal(count, 2) }, 2 * count),
        };
        let mut all = Words::new(vec![0; received * dtype.size() / 8]);
        let input = match kind % 4 {
            3 => Region::of(&[mine.buffer(), theirs.buffer()]),
            _ => Region::of(&[mine.buffer()]),
        };
        let output = Region::of(&[all.buffer()]);
        let (signature, reduce, timeout) = (SIGNATURE, Some(ReduceOp::Sum), TIMEOUT);
        let spaces = Spaces::new(input, output, dtype.size());
        let request = Request { collective, signature, reduce, dtype, spaces, timeout };
        let begun = self.harness.engine.start_collective(request, kind / 8 % 2 == 0, &Harness::no_progress());
        self.keep(begun, vec![mine, theirs, all]);
    }

    fn access(&mut self, input: &mut Input<'_>) {
        let (kind, mut words, offset) = (input.byte(), words(input), usize::from(input.byte()));
        let region = Region::of(&[words.buffer()]);
        let access = match kind % 4 {
            0 => RmaOp::Put { offset, from: region },
            1 => RmaOp::Get { offset, into: region },
            2 => RmaOp::Signal,
            3 => RmaOp::Flush,
            4 => RmaOp::Accumulate { offset, from: region, dtype: DType::U64 },
            _ => RmaOp::WaitSignal,
        };
        let Some((window, _)) = &self.window else { return };
        let (window, peer, timeout) = (*window, PEER, TIMEOUT);
        let work =
            Work::new(Harness::no_progress(), self.harness.engine.begin(access.call(peer, window), Bytes::default()));
        self.harness.engine.submit_rma(RmaRequest { window, peer, access, timeout, work: work.clone() });
        self.in_flight.push((work, vec![words]));
    }
}

/// What this rank calls: a peer that agrees needs to get two bytes right.
const SIGNATURE: Signature = Signature { operation: 1, dtype: 0, reduction: 0, algorithm: 0, root: 0, count: 0 };

/// The most payload that comes with a header by itself.
const PAYLOAD_MAX: usize = 4096;

/// Memory for up to 255 numbers.
fn words(input: &mut Input<'_>) -> Words {
    Words::new(vec![0; input.byte().into()])
}

/// Opens a window of 64 bytes.
fn lend(engine: &mut Engine) -> (WindowId, Words) {
    let mut words = Words::new(vec![0; 8]);
    (engine.windows.expose(Region::of(&[words.buffer()])), words)
}
