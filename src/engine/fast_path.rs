//! Operations that end in the call that submits them.
//!
//! Where the caller waits anyway and nothing else is in flight, the operation's steps are executed right here, in the order
//! of its schedule, for as long as no step has to wait. For short messages that is mostly until the end, and the state that
//! an operation in flight has is never made. At the first step that has to wait, the operation goes on as any other, from
//! there. Both paths send the same bytes, so each rank may choose on its own.

use std::time::{Duration, Instant};

use crate::engine::body::Body;
use crate::engine::call::Call;
use crate::engine::completion::{Completion, OpId};
use crate::engine::flight_recorder::Bytes;
use crate::engine::frame::Header;
use crate::engine::inbox::Next;
use crate::engine::message::{Direction, MessageRequest, message_header};
use crate::engine::plan::{Executed, Plan};
use crate::engine::progress::Engine;
use crate::engine::recv_buffer::{RecvAction, RecvBuffer};
use crate::engine::region::Region;
use crate::engine::request::Request;
use crate::engine::rndv::HOT_EAGER_BYTES;
use crate::schedule::{Action, StepId};
use crate::sync::Arc;
use crate::types::{Rank, Source};
use crate::work::{Drive, Entry, Submitted, Work};

/// How far a step has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepState {
    Done,
    /// Its completion is told when it is done.
    UnderWay,
    NotBegun,
}

impl Engine {
    /// Begins a collective, and ends it if that is possible at once and the caller waits.
    pub(crate) fn start_collective(
        &mut self,
        mut request: Request,
        waits: bool,
        driver: &Arc<impl Drive + 'static>,
    ) -> Submitted {
        let (mut executed, mut recorded) = (Executed::default(), None);
        let has_ended = waits && self.can_take_fast_path() && self.execute(&mut request, &mut executed, &mut recorded);
        let waited = recorded.is_some();
        let entry = recorded.unwrap_or_else(|| self.note_collective(&request));
        if has_ended {
            self.collectives.skip();
            self.completed_inline(&entry, waited, None);
            return Submitted::Completed(entry, None);
        }
        let work = Work::new(driver.clone(), entry);
        self.submit_collective(request, executed, work.clone());
        Submitted::Pending(work)
    }

    /// Notes a collective in the flight recorder.
    fn note_collective(&mut self, request: &Request) -> Entry {
        let bytes = Bytes { read: request.spaces.input.len(), written: request.spaces.output.len() };
        self.begin(Call::Collective(request.signature), bytes)
    }

    /// Begins a message, and ends it if that is possible at once and the caller waits.
    pub(crate) fn run_message(
        &mut self,
        request: MessageRequest,
        waits: bool,
        driver: &Arc<impl Drive + 'static>,
    ) -> Submitted {
        let mut recorded = None;
        let tries = waits && self.can_take_fast_path();
        let state = if tries { self.execute_message(&request, &mut recorded) } else { StepState::NotBegun };
        let waited = recorded.is_some();
        let entry = recorded.unwrap_or_else(|| self.note_message(&request));
        if state == StepState::Done {
            let source = match request.direction {
                Direction::Receive(Source::Rank(from)) => Some(from),
                _ => None,
            };
            self.messages.skip();
            self.completed_inline(&entry, waited, source);
            return Submitted::Completed(entry, source);
        }
        let work = Work::new(driver.clone(), entry);
        match state {
            StepState::UnderWay => _ = self.messages.keep(&request, work.clone()),
            _ => self.submit_message(request, work.clone()),
        }
        Submitted::Pending(work)
    }

    /// Notes a message in the flight recorder.
    fn note_message(&mut self, request: &MessageRequest) -> Entry {
        let (direction, len) = (request.direction, request.region.len());
        self.begin(direction.call(request.tag, len), direction.bytes(len))
    }

    /// Ends an operation that has no handle. One that never waited is recorded as it ends, and reads the clock once.
    fn completed_inline(&mut self, entry: &Entry, waited: bool, source: Option<Rank>) {
        let now = if waited { Instant::now() } else { entry.began };
        self.context.ended(entry.number, now, &Ok(()), source);
    }

    /// Whether nothing is in flight and nothing is known that an operation would have to heed.
    fn can_take_fast_path(&mut self) -> bool {
        if self.slow_path_due() {
            // Whatever else comes must not wait for ever.
            self.turn(true, false);
            return false;
        }
        self.is_settled()
            && !self.windows.is_open()
            && self.collectives.has_no_unexpected()
            && !self.context.failures.has_left()
    }

    /// Executes steps of a collective. True: all of them. It is recorded when it first has to wait: what it sends before that
    /// leaves first, since another rank waits for it.
    fn execute(&mut self, request: &mut Request, executed: &mut Executed, recorded: &mut Option<Entry>) -> bool {
        if self.collectives.asks(&self.context, &request.collective) {
            return false;
        }
        let plan = self.collectives.prepare(&self.context, request);
        let has_ended = self.execute_steps(&plan, request, executed, recorded);
        executed.plan = (!has_ended).then_some(plan);
        has_ended
    }

    fn execute_steps(
        &mut self,
        plan: &Plan,
        request: &Request,
        executed: &mut Executed,
        recorded: &mut Option<Entry>,
    ) -> bool {
        let sequence = self.collectives.next_sequence();
        let mut note = |engine: &mut Engine| {
            recorded.get_or_insert_with(|| engine.note_collective(request));
        };
        while let Some(step) = plan.schedule.steps[..plan.own_steps()].get(executed.steps) {
            let message = plan.message[executed.steps];
            let completion = Completion { op: OpId::Collective(sequence), step: executed.steps as StepId };
            let state = match step.action {
                Action::Send { to, .. } if plan.only_tells(executed.steps) => {
                    self.context.endpoints.connect(to);
                    let header = request.header(sequence, message, 0);
                    let state = self.send_now(to, header, Region::default(), Completion::NONE);
                    if state == StepState::UnderWay {
                        // It is queued, which is for the loop to go on with.
                        executed.steps += 1;
                        return false;
                    }
                    state
                }
                Action::Send { to, from } => {
                    let region = request.spaces.region(from);
                    let header = request.header(sequence, message, region.len());
                    let ctx = &mut self.context;
                    let is_hot = request.sends_results_of(HOT_EAGER_BYTES);
                    if ctx.rndv.is_eager(&mut ctx.endpoints, to, region.len(), is_hot) {
                        self.send_now(to, header, region, completion)
                    } else {
                        StepState::NotBegun
                    }
                }
                Action::Recv { from, .. } | Action::RecvReduce { from, .. } if !self.hear_before(from, &mut note) => {
                    StepState::NotBegun
                }
                Action::Recv { from, into } | Action::RecvReduce { from, into } => {
                    let header = request.header(sequence, message, request.spaces.bytes(into));
                    let buffer = || request.buffer(step.action, completion).expect("a step that receives");
                    self.receive_now(from, header, &buffer, &mut note)
                }
                // Only who asks for it in its turn takes it.
                Action::Await { .. } => StepState::NotBegun,
                action => {
                    request.compute(action, self.context.size(), self.context.rndv.team);
                    StepState::Done
                }
            };
            match state {
                StepState::Done => executed.steps += 1,
                StepState::UnderWay => {
                    executed.next_has_begun = true;
                    return false;
                }
                StepState::NotBegun => return false,
            }
        }
        while let Some((from, word)) = self.collectives.next_word() {
            if !self.hear(from, word, &mut note) {
                return false;
            }
        }
        self.collectives.run_ahead(sequence, request.signature, plan);
        true
    }

    /// Takes what `from` has yet to send of the collective before, if it comes soon.
    #[inline]
    fn hear_before(&mut self, from: Rank, note: &mut impl FnMut(&mut Engine)) -> bool {
        self.collectives.has_heard() || self.collectives.word_of(from).is_none_or(|word| self.hear(from, word, note))
    }

    fn hear(&mut self, from: Rank, word: Header, note: &mut impl FnMut(&mut Engine)) -> bool {
        let buffer = || RecvBuffer::new(Region::default(), RecvAction::Store, Completion::NONE);
        let is_here = self.receive_now(from, word, &buffer, note) == StepState::Done;
        if is_here {
            self.collectives.heard(from);
        }
        is_here
    }

    /// Sends or receives a message. It is recorded as a collective is, when it first has to wait.
    fn execute_message(&mut self, request: &MessageRequest, recorded: &mut Option<Entry>) -> StepState {
        let len = request.region.len();
        let header = message_header(request.tag, len);
        let completion = Completion { op: OpId::Message(self.messages.next_id()), step: 0 };
        match request.direction {
            Direction::Send(to)
                if to != self.context.me && self.messages.may_send_eagerly(&mut self.context, to, len) =>
            {
                let state = self.send_now(to, header, request.region.clone(), completion);
                if state != StepState::NotBegun {
                    self.messages.use_credits(to, len);
                }
                state
            }
            Direction::Receive(Source::Rank(from)) if self.messages.has_no_unexpected() => {
                let action = RecvAction::Store;
                let buffer = || RecvBuffer::new(request.region.clone(), action, completion);
                let state = self.receive_now(from, header, &buffer, |engine| {
                    recorded.get_or_insert_with(|| engine.note_message(request));
                });
                if state != StepState::NotBegun {
                    self.messages.return_credits(&mut self.context, from, len);
                }
                state
            }
            _ => StepState::NotBegun,
        }
    }

    /// Sends a message of one frame.
    fn send_now(&mut self, to: Rank, header: Header, region: Region, completion: Completion) -> StepState {
        match self.context.endpoints.write(to, header, Body::of(region), completion) {
            None => StepState::NotBegun,
            Some(true) => StepState::Done,
            Some(false) => StepState::UnderWay,
        }
    }

    /// Receives the message with this header if it is the next, and comes soon. `buffer` is where it goes; `note` is called
    /// whenever it is not there yet.
    fn receive_now(
        &mut self,
        from: Rank,
        header: Header,
        buffer: &impl Fn() -> RecvBuffer,
        mut note: impl FnMut(&mut Engine),
    ) -> StepState {
        let is_none = self.context.rndv.oversubscribed || self.cpu.is_shared;
        let mut budget = SpinBudget { is_none, ..SpinBudget::default() };
        let head = header.encode();
        loop {
            let Some(inbox) = self.context.endpoints.inbox(from) else { return StepState::NotBegun };
            match inbox.expect(header, &head, buffer) {
                Next::Expected => break,
                Next::Nothing => note(self),
                Next::Other => return StepState::NotBegun,
            }
            if !budget.spins_again() {
                return StepState::NotBegun;
            }
        }
        self.collectives.note_called(from, header.called());
        while let Some(inbox) = self.context.endpoints.inbox(from).filter(|inbox| inbox.has_begun()) {
            // The end of a stream is for the next turn to tell.
            if inbox.poll_body().is_err() {
                return StepState::UnderWay;
            }
            if inbox.has_begun() {
                note(self);
                if !budget.spins_again() {
                    return StepState::UnderWay;
                }
            }
        }
        StepState::Done
    }
}

/// How long a stream is looked at for a message that is expected.
#[derive(Default)]
struct SpinBudget {
    is_none: bool,
    looks: u32,
    since: Option<Instant>,
}

impl SpinBudget {
    /// Whether to look once more.
    fn spins_again(&mut self) -> bool {
        self.looks += 1;
        // Reading the clock takes longer than looking into shared memory.
        if self.is_none || !self.looks.is_multiple_of(LOOKS_PER_TIME) {
            return !self.is_none;
        }
        let now = Instant::now();
        now - *self.since.get_or_insert(now) < SPIN_LIMIT
    }
}

/// How long one operation polls: other threads wait for the communicator meanwhile.
const SPIN_LIMIT: Duration = Duration::from_micros(10);

const LOOKS_PER_TIME: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::{Collective, select};
    use crate::engine::flight_recorder::Recorder;
    use crate::engine::frame::FrameKind;
    use crate::engine::mock_peer::Harness;
    use crate::engine::region::{Region, Spaces, Words};
    use crate::error::Error;
    use crate::signature::Signature;
    use crate::types::{DType, ReduceOp, Tag};

    const LIMIT: Duration = Duration::from_secs(60);
    const SUM: Signature = Signature { operation: 1, dtype: 0, reduction: 1, algorithm: 0, root: 0, count: 1 };

    /// As all ranks run it.
    fn by_doubling() -> Signature {
        Signature { algorithm: select::number("recursive_doubling"), ..SUM }
    }

    /// A sum of one number over two ranks.
    fn sum(words: &mut Words) -> Request {
        let region = Region::of(&[words.buffer()]);
        Request {
            collective: Collective::AllReduce { count: 1 },
            signature: SUM,
            reduce: Some(ReduceOp::Sum),
            dtype: DType::U64,
            spaces: Spaces::new(region.clone(), region, 8),
            timeout: LIMIT,
        }
    }

    fn run(harness: &mut Harness, words: &mut Words) -> Submitted {
        harness.engine.start_collective(sum(words), true, &Harness::no_progress())
    }

    fn message(harness: &mut Harness, direction: Direction, words: &mut Words) -> Submitted {
        let region = Region::of(&[words.buffer()]);
        let request = MessageRequest { direction, tag: Tag(3), region, timeout: LIMIT };
        harness.engine.run_message(request, true, &Harness::no_progress())
    }

    /// What rank 1 sends in collective 0.
    fn theirs(signature: Signature, number: u64) -> Vec<u8> {
        let mut words = Words::new(vec![0]);
        let header = Request { signature, ..sum(&mut words) }.header(0, 0, 8);
        [&*header.encode(), &number.to_ne_bytes()].concat()
    }

    fn harness() -> Harness {
        let mut harness = Harness::new();
        harness.engine.context.rndv.single_copy_bytes = harness.engine.context.rndv.eager_bytes;
        harness.engine.context.recorder = Recorder::new(8);
        harness.settle();
        harness
    }

    /// The handle of an operation that has not ended at once.
    fn in_flight(begun: Submitted) -> Work {
        match begun {
            Submitted::Pending(work) => work,
            Submitted::Completed(entry, _) => panic!("{} has ended", entry.operation),
        }
    }

    #[test]
    fn what_needs_nobody_more_ends_at_once() {
        let (mut harness, mut words) = (harness(), Words::new(vec![2]));
        harness.wire().to_engine.extend(theirs(by_doubling(), 40));
        assert!(matches!(run(&mut harness, &mut words), Submitted::Completed(Entry { sequence: 0, .. }, None)));
        assert_eq!(words.get(), [42]);
        assert_eq!(harness.wire().from_engine, theirs(by_doubling(), 2), "rank 1 gets what it always gets");
        assert!(
            harness.engine.is_settled()
                && harness.engine.collectives.current() == 1
                && harness.engine.collectives.called(Rank(1)) > 0
        );
        assert!(harness.engine.context.recorder.records()[0].ended.is_some());
    }

    #[test]
    fn what_has_to_wait_goes_on_from_there() {
        let message = theirs(by_doubling(), 40);
        for there in [0, 3, message.len() - 1] {
            let (mut harness, mut words) = (harness(), Words::new(vec![2]));
            harness.wire().to_engine.extend(&message[..there]);
            let work = in_flight(run(&mut harness, &mut words));
            harness.settle();
            assert!(!work.is_done(), "{there} bytes are there");
            harness.send(&message[there..]);
            assert_eq!((work.result(), words.get()), (Some(Ok(())), [42].as_slice()), "after {there} bytes");
            assert_eq!(harness.wire().from_engine, theirs(by_doubling(), 2), "it is sent once");
        }
    }

    #[test]
    fn the_slow_path_sends_the_same_bytes() {
        let (mut harness, mut words) = (harness(), Words::new(vec![2]));
        let work = in_flight(harness.engine.start_collective(sum(&mut words), false, &Harness::no_progress()));
        harness.settle();
        assert_eq!(harness.wire().from_engine, theirs(by_doubling(), 2));
        harness.send(&theirs(by_doubling(), 40));
        assert_eq!((work.result(), words.get()), (Some(Ok(())), [42].as_slice()));
    }

    #[test]
    fn a_rank_that_has_left_has_sent_its_part() {
        // The header of a rank that is busy with more than this message is not the one that is expected.
        let header = Header { is_busy: true, ..sum(&mut Words::new(vec![0])).header(0, 0, 8) };
        let header = Header { signature: by_doubling(), ..header }.encode();
        let message = [&*header, &40u64.to_ne_bytes()].concat();
        for (there, ends_well) in [(message.len(), true), (message.len() - 1, false), (3, false)] {
            let (mut harness, mut words) = (harness(), Words::new(vec![2]));
            harness.wire().to_engine.extend(&message[..there]);
            harness.wire().ended = true;
            let work = in_flight(run(&mut harness, &mut words));
            harness.settle();
            assert_eq!(
                (work.result() == Some(Ok(()))).then(|| words.get()[0]),
                ends_well.then_some(42),
                "{there} bytes"
            );
            assert_eq!(harness.engine.context.endpoints.lost(Rank(1)), Some("it closed the connection"));
        }
    }

    #[test]
    fn another_call_of_the_other_rank_is_an_error_as_ever() {
        let (mut harness, mut words) = (harness(), Words::new(vec![2]));
        harness.wire().to_engine.extend(theirs(Signature { count: 2, ..by_doubling() }, 40));
        let work = in_flight(run(&mut harness, &mut words));
        harness.settle();
        assert!(matches!(work.result(), Some(Err(Error::Mismatch { .. }))), "{:?}", work.result());
    }

    #[test]
    fn another_algorithm_of_the_other_rank_is_an_error_that_says_so() {
        let ring = Signature { algorithm: select::number("ring"), ..SUM };
        let (mut harness, mut words) = (harness(), Words::new(vec![2]));
        harness.wire().to_engine.extend(theirs(ring, 40));
        let work = in_flight(run(&mut harness, &mut words));
        harness.settle();
        let Some(Err(Error::Mismatch { detail, .. })) = work.result() else { panic!("{:?}", work.result()) };
        let expected = "the ranks disagree on how to run collective 0: rank 0 chose recursive_doubling, rank 1 ring";
        assert_eq!(detail, expected);
        let told = Header::decode(&harness.wire().from_engine[theirs(by_doubling(), 2).len()..])
            .expect("a header")
            .expect("all of it");
        assert_eq!(told.kind, FrameKind::Fail, "rank 1 is told");
    }

    #[test]
    fn messages_end_at_once_and_in_their_order() {
        let (mut harness, mut words) = (harness(), Words::new(vec![7]));
        assert!(matches!(message(&mut harness, Direction::Send(Rank(1)), &mut words), Submitted::Completed(_, None)));
        let sent = std::mem::take(&mut harness.wire().from_engine);
        // The same comes back, behind a message with another tag.
        let other = [&*message_header(Tag(4), 8).encode(), &[0; 8]].concat();
        harness.wire().to_engine.extend([other, sent.clone(), sent].concat());
        words = Words::new(vec![0]);
        let receive = Direction::Receive(Source::Rank(Rank(1)));
        let work = in_flight(message(&mut harness, receive, &mut words));
        harness.settle();
        assert_eq!((work.source(), words.get()), (Some(Rank(1)), [7].as_slice()));
        words = Words::new(vec![0]);
        let work = in_flight(message(&mut harness, receive, &mut words));
        assert_eq!((work.source(), words.get()), (Some(Rank(1)), [7].as_slice()), "it had come before");
    }

    #[test]
    fn a_message_ends_at_once_also_after_its_stream_was_armed() {
        let (mut harness, mut words) = (harness(), Words::new(vec![0]));
        harness.wire().patience = Some(8);
        (0..20).for_each(|_| _ = harness.engine.progress(false));
        let frame = [&*message_header(Tag(3), 8).encode(), &7u64.to_ne_bytes()].concat();
        harness.wire().to_engine.extend_from_slice(&frame);
        let receive = Direction::Receive(Source::Rank(Rank(1)));
        let work = in_flight(message(&mut harness, receive, &mut words));
        harness.settle();
        assert_eq!((work.result(), words.get()), (Some(Ok(())), [7].as_slice()), "the loop disarms the stream");
        words = Words::new(vec![0]);
        harness.wire().to_engine.extend_from_slice(&frame);
        assert!(matches!(message(&mut harness, receive, &mut words), Submitted::Completed(_, Some(Rank(1)))));
        assert_eq!(words.get(), [7]);
    }

    #[test]
    fn a_frame_that_was_left_to_the_loop_is_not_slept_through() {
        let (mut harness, mut words) = (harness(), Words::new(vec![0]));
        let frames = [4, 3].map(|tag| [&*message_header(Tag(tag), 8).encode(), &7u64.to_ne_bytes()].concat());
        harness.wire().to_engine.extend(frames.concat());
        let work = in_flight(message(&mut harness, Direction::Receive(Source::Rank(Rank(1))), &mut words));
        // Another thread makes progress, and would sleep before the one that has called takes its turn.
        assert!(harness.engine.arm(), "what has been seen is to be read");
        harness.engine.disarm();
        harness.settle();
        assert_eq!((work.result(), words.get()), (Some(Ok(())), [7].as_slice()));
        assert!(!harness.engine.arm(), "now it may sleep");
        harness.engine.disarm();
    }
}
