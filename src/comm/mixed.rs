//! Collectives by a vendor's library within the ranks that are alike, and by the engine of the CPU between these and others: the
//! setting `engine=mixed`. What this composes is in [`algo::islands`](crate::algo::islands).
//!
//! One collective of the CPU's engine is all that ranks call: it is what they compare, record, wait for and end. A rank among others
//! that are alike calls the library while that collective waits for it, on the thread of its caller. So what fails on a rank, or takes
//! too long, ends the collective on all, and with it what the library has on their streams: its communicator is given up, and
//! the next collective begins another one.

use std::time::{Duration, Instant};

use smallvec::smallvec;

use crate::algo::islands::{self, BEGIN, END, GATHERED, SPREAD, WORD};
use crate::algo::{Collective, IslandCall, Islands};
use crate::buffer::Buffer;
use crate::comm::check::{self, Checked, RankAndSize};
use crate::comm::communicator::Communicator;
use crate::comm::device::tell_all;
use crate::comm::island::{Member, Mixed, Turn, next_generation};
use crate::comm::through_host::{Refusal, device_error};
use crate::counts::Counts;
use crate::deadline::{deadline_after, nap};
use crate::device::in_flight::Runner;
use crate::device::vendor::calls::{self, Called};
use crate::device::vendor::{Patience, VendorComm};
use crate::engine::flight_recorder::Bytes;
use crate::engine::region::{Region, Spaces, Words};
use crate::engine::request::Request;
use crate::error::{Error, InitError};
use crate::op::{Mode, Op, OpKind};
use crate::schedule::Slice;
use crate::sync::{Arc, Mutex, lock};
use crate::sys::cuda::{
    CudaError, Current, DeviceBytes, DeviceMemory, Relaxed, Stream, StreamHandle, copy_from_host, copy_to_host,
};
use crate::sys::team::Team;
use crate::types::{DType, Rank, ReduceOp, Tag};
use crate::work::{Submitted, Work};

impl Communicator {
    /// Begins a collective on memory of the host, where a library moves data of others. None: it does not go that way.
    #[cold]
    #[inline(never)]
    pub(super) fn begin_among_islands(
        &self,
        op: &Op,
        checked: &Checked,
        timeout: Duration,
    ) -> Result<Option<Submitted>, Error> {
        let Some(call) = island_call(op, checked) else { return Ok(None) };
        let mixed = self.find_islands(op, checked, None, timeout)?;
        if let Some(member) = &mixed.member {
            let called = Call { op, checked, call, mixed: &mixed, member, timeout };
            return Ok(Some(Submitted::Pending(self.run_on_island(&called, None)?)));
        }
        let spaces = Spaces::new(Region::of(&op.inputs), Region::of(&op.outputs), checked.dtype.size());
        // The average of all is the sum of what each has divided by their number, as libraries have it.
        let reduce = op.kind.reduce_op().map(|reduce| self.by_library(reduce));
        let request = request(&mixed.islands, (call, checked), reduce, spaces, timeout);
        let begun =
            self.enter(op, |engine, driver| Ok(engine.start_collective(request, op.mode == Mode::Blocking, driver)))?;
        if let Submitted::Pending(work) = &begun {
            learn(&mixed, work);
        }
        Ok(Some(begun))
    }

    /// Runs a collective on memory of a device, if this rank is among others that are alike and the library has it. None: it
    /// goes through memory of the host.
    pub(super) fn begin_on_island(&self, op: &Op, stream: StreamHandle) -> Result<Option<Work>, Error> {
        if !self.device.is_mixed() || !matches!(op.kind, OpKind::AllReduce(_) | OpKind::Broadcast { .. }) {
            return Ok(None);
        }
        let checked = check::collective(op, None, RankAndSize { me: self.rank(), size: self.size() })?;
        let Some(call) = island_call(op, &checked) else { return Ok(None) };
        self.check_no_capture(op, stream)?;
        let timeout = op.timeout.unwrap_or_else(|| self.timeout());
        let mixed = self.find_islands(op, &checked, Some(stream.device()), timeout)?;
        let Some(member) = &mixed.member else { return Ok(None) };
        let called = Call { op, checked: &checked, call, mixed: &mixed, member, timeout };
        self.run_on_island(&called, Some(stream)).map(Some)
    }

    /// Which ranks are alike. The ranks find that out in a collective of its own before the first one that depends on it, which
    /// compares what they have called, too.
    fn find_islands(
        &self,
        op: &Op,
        checked: &Checked,
        device: Option<u32>,
        timeout: Duration,
    ) -> Result<Arc<Mixed>, Error> {
        let operation = op.kind.name();
        if !self.driver.is_here() {
            return Err(self.driver.forked_error(operation));
        }
        let mut exchange = |own| self.exchange_cards(op, checked, own, timeout);
        self.device.islands(self, operation, device, &mut exchange)
    }

    /// Tells all ranks what this one has, and returns what all have.
    fn exchange_cards(
        &self,
        op: &Op,
        checked: &Checked,
        mut card: Vec<u8>,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, Error> {
        // White space behind JSON means nothing.
        card.resize(CARD_BYTES, b' ');
        let words = card.chunks_exact(WORD).map(|word| u64::from_ne_bytes(word.try_into().expect("as many bytes")));
        let (mut own, mut all) = (Words::new(words.collect()), Words::new(vec![0; self.size() * CARD_BYTES / WORD]));
        let [input, output] = [&mut own, &mut all].map(|words| Region::of(&[words.buffer()]));
        let request = Request {
            collective: Collective::AllGather { counts: Counts::equal(CARD_BYTES, self.size()) },
            signature: checked.signature,
            reduce: None,
            dtype: DType::U8,
            spaces: Spaces::new(input, output, DType::U8.size()),
            timeout,
        };
        let op = empty(op.kind.clone(), Mode::Blocking);
        let begun = self.enter(&op, |engine, driver| Ok(engine.start_collective(request, true, driver)))?;
        // It lasts until the engine no longer uses `own` and `all`.
        begun.wait()?;
        let bytes: Vec<u8> = all.get().iter().flat_map(|word| word.to_ne_bytes()).collect();
        Ok(bytes.chunks_exact(CARD_BYTES).map(<[u8]>::to_vec).collect())
    }

    /// Tells the other ranks what has failed here before the collective has begun. Of misuse they learn nothing: it sends nothing.
    fn tell_unless_usage(&self, op: &Op, error: &Error) {
        if !matches!(error, Error::Usage(_)) {
            self.tell_failure(&op.kind, error);
        }
    }

    /// What the library does with the elements of one rank, where this is called of all ranks.
    fn by_library(&self, reduce: ReduceOp) -> ReduceOp {
        if reduce == ReduceOp::Avg { ReduceOp::PreMulSum(1.0 / self.size() as f64) } else { reduce }
    }

    fn run_on_island(&self, called: &Call<'_>, stream: Option<StreamHandle>) -> Result<Work, Error> {
        let operation = called.op.kind.name();
        let failed = |error| Refusal::Failed(device_error(operation)(error));
        // One after the other: they share the communicator of the library and the memory for what goes to other groups.
        let mut turn = lock(&called.member.turn);
        self.driver.check_open(operation)?;
        let outcome = (|| {
            // These calls spoil captures of other threads otherwise.
            let relaxed = Relaxed::enter().map_err(failed)?;
            let context = &called.member.context;
            let stream = match stream {
                Some(handle) => Stream::of_caller(context, handle),
                None => Stream::new(context, 0).map_err(failed)?,
            };
            self.wait_for(&stream, operation, called.timeout).map_err(Refusal::Failed)?;
            let current = context.enter().map_err(failed)?;
            let scratch = called.scratch().map_err(failed)?;
            called.bring(&current, &stream, called.whole(scratch.as_ref())).map_err(failed)?;
            turn.make_room(self.name(), called.staged_bytes()).map_err(Refusal::Failed)?;
            Ok((relaxed, stream, current, scratch))
        })();
        let (_relaxed, stream, current, scratch) = match outcome {
            Ok(made) => made,
            Err(Refusal::Captured) => unreachable!("it has been asked before"),
            Err(Refusal::Failed(error)) => {
                self.tell_unless_usage(called.op, &error);
                return Err(error);
            }
        };
        let whole = called.whole(scratch.as_ref());
        let staging = Region::of(&[turn.staging.buffer()]).part(0, called.staged_bytes());
        let on_device = OnDevice { comm: self, called, current: &current, stream: &stream, whole, staging };
        let work = on_device.run(&mut turn)?;
        called.take_back(&current, &stream, scratch.as_ref()).map_err(device_error(operation))?;
        Ok(work)
    }
}

fn learn(mixed: &Arc<Mixed>, work: &Work) {
    let mixed = mixed.clone();
    work.on_complete(move |result| mixed.learn(&result));
}

/// What of a collective goes by islands, if it does: the same on all ranks, whatever memory they call it with.
fn island_call(op: &Op, checked: &Checked) -> Option<IslandCall> {
    let (call, count) = match checked.collective {
        Collective::AllReduce { count } => (IslandCall::AllReduce, count),
        Collective::Broadcast { count, root } => (IslandCall::Broadcast { root }, count),
        _ => return None,
    };
    let is_long = count.saturating_mul(checked.dtype.size()) >= MIN_BYTES;
    (is_long && calls::has(checked.dtype, op.kind.reduce_op())).then_some(call)
}

/// Shorter data go through memory of the host as they are: two calls of a library and the rounds beside them take longer than to copy
/// so little.
const MIN_BYTES: usize = 16 * 1024;

/// The bytes that a rank tells of itself.
const CARD_BYTES: usize = 1024;

fn request(
    islands: &Arc<Islands>,
    (call, checked): (IslandCall, &Checked),
    reduce: Option<ReduceOp>,
    spaces: Spaces,
    timeout: Duration,
) -> Request {
    let (Collective::AllReduce { count } | Collective::Broadcast { count, .. }) = checked.collective else {
        unreachable!("no other goes by islands")
    };
    let collective = Collective::ByIslands { call, count, islands: islands.clone() };
    Request { collective, signature: checked.signature, reduce, dtype: checked.dtype, spaces, timeout }
}

/// An operation that says what is called, and not of which memory.
fn empty(kind: OpKind, mode: Mode) -> Op {
    Op { kind, inputs: smallvec![], outputs: smallvec![], timeout: None, mode }
}

/// A collective of a rank that others are like.
struct Call<'a> {
    op: &'a Op,
    checked: &'a Checked,
    call: IslandCall,
    mixed: &'a Arc<Mixed>,
    member: &'a Member,
    timeout: Duration,
}

impl Call<'_> {
    fn count(&self) -> usize {
        self.op.outputs.iter().map(|buffer| buffer.len()).sum()
    }

    fn element(&self) -> usize {
        self.checked.dtype.size()
    }

    fn bytes(&self) -> usize {
        self.count() * self.element()
    }

    /// The part of the data that this rank exchanges with other groups.
    fn own(&self) -> Slice {
        self.mixed.islands.part_of(self.me(), self.count())
    }

    fn me(&self) -> Rank {
        self.member.ranks[self.member.place]
    }

    /// The bytes of that part, and of the words behind it.
    fn staged_bytes(&self) -> usize {
        (self.own().len + islands::words_len(self.element(), self.member.ranks.len())) * self.element()
    }

    /// How many elements each rank of the group has.
    fn counts(&self) -> Counts {
        self.member.ranks.iter().map(|rank| self.mixed.islands.part_of(*rank, self.count()).len).collect()
    }

    /// Whether the group has what others are to get, of a broadcast because the root is in it.
    fn gives(&self) -> bool {
        match self.call {
            IslandCall::AllReduce => true,
            IslandCall::Broadcast { root } => self.member.ranks.contains(&root),
        }
    }

    /// Whether the group gets something from others.
    fn gets(&self) -> bool {
        self.call == IslandCall::AllReduce || !self.gives()
    }

    /// Memory of the device in which the data lie in one run, if they do not in the program's.
    fn scratch(&self) -> Result<Option<DeviceMemory>, CudaError> {
        match &self.op.outputs[..] {
            [one] if one.device_bytes().is_some() => Ok(None),
            _ => DeviceMemory::new(&self.member.context, self.bytes()).map(Some),
        }
    }

    /// All data on the device.
    fn whole<'b>(&'b self, scratch: Option<&'b DeviceMemory>) -> DeviceBytes<'b> {
        let own = || self.op.outputs[0].device_bytes().expect("there is scratch memory otherwise");
        scratch.map_or_else(own, DeviceMemory::bytes)
    }

    /// Copies what this rank brings to where all data lie.
    fn bring(&self, current: &Current<'_>, stream: &Stream, whole: DeviceBytes<'_>) -> Result<(), CudaError> {
        let brings = match self.call {
            IslandCall::AllReduce => true,
            IslandCall::Broadcast { root } => root == self.me(),
        };
        let is_there = self.op.inputs == self.op.outputs && self.op.inputs[0].ptr() as u64 == whole.ptr().to_bits();
        if !brings || is_there {
            return Ok(());
        }
        if self.op.inputs.iter().all(|buffer| buffer.device_bytes().is_none()) {
            let mut words = Words::new(vec![0; whole.len().div_ceil(WORD)]);
            let mut copy = Region::of(&[words.buffer()]).part(0, whole.len());
            copy.copy_from(&Region::of(&self.op.inputs), Team::ALONE);
            copy_from_host(current, &copy.run(0)[..whole.len()], whole)?;
            // A copy from memory that is not pinned may return when that has only been read.
            return Stream::default_of(&self.member.context).synchronize();
        }
        self.with_parts(&self.op.inputs, whole, |part, buffer| stream.copy(current, buffer, part))
    }

    /// Copies the result to where the program wants it.
    fn take_back(
        &self,
        current: &Current<'_>,
        stream: &Stream,
        scratch: Option<&DeviceMemory>,
    ) -> Result<(), CudaError> {
        let Some(whole) = scratch.map(DeviceMemory::bytes) else { return Ok(()) };
        if self.op.outputs.iter().all(|buffer| buffer.device_bytes().is_none()) {
            let mut words = Words::new(vec![0; whole.len().div_ceil(WORD)]);
            let mut copy = Region::of(&[words.buffer()]).part(0, whole.len());
            copy_to_host(current, whole, &mut copy.run_mut(0)[..whole.len()])?;
            Region::of(&self.op.outputs).copy_from(&copy, Team::ALONE);
            return Ok(());
        }
        self.with_parts(&self.op.outputs, whole, |part, buffer| stream.copy(current, part, buffer))?;
        stream.synchronize()
    }

    /// Calls `f` with the bytes of each buffer, and where these are among all.
    fn with_parts(
        &self,
        buffers: &[Buffer],
        whole: DeviceBytes<'_>,
        mut f: impl FnMut(DeviceBytes<'_>, DeviceBytes<'_>) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut at = 0;
        for bytes in buffers.iter().filter_map(Buffer::device_bytes).filter(|bytes| !bytes.is_empty()) {
            f(whole.part(at, bytes.len()), bytes)?;
            at += bytes.len();
        }
        Ok(())
    }
}

impl Turn {
    /// Leaves the memory alone for ever, of an operation that may have begun and whose end nobody will see.
    fn forget_staging(&mut self) {
        std::mem::forget(std::mem::replace(&mut self.staging, Words::new(Vec::new())));
    }

    fn make_room(&mut self, comm: &str, bytes: usize) -> Result<(), Error> {
        let len = bytes.div_ceil(WORD);
        if self.staging.get().len() < len {
            let mut words = Vec::new();
            words.try_reserve_exact(len).map_err(|error| InitError::Os {
                comm: comm.to_owned(),
                what: format!("memory of the host for {bytes} bytes of a device"),
                cause: error.to_string(),
            })?;
            words.resize(len, 0);
            self.staging = Words::new(words);
        }
        Ok(())
    }
}

/// The same with what its rank has on its device.
struct OnDevice<'a> {
    comm: &'a Communicator,
    called: &'a Call<'a>,
    current: &'a Current<'a>,
    stream: &'a Stream,
    whole: DeviceBytes<'a>,
    /// This rank's part in memory of the host, and the words of its group.
    staging: Region,
}

/// The communicator of the library that an operation uses, for who ends the operation.
type InUse = Arc<Mutex<Option<Arc<VendorComm>>>>;

impl<'a> OnDevice<'a> {
    /// Runs the collective. Returns its work, which has ended well.
    fn run(mut self, turn: &mut Turn) -> Result<Work, Error> {
        let Call { op, checked, mixed, member, timeout, .. } = *self.called;
        let has_failed = lock(&member.library).as_ref().is_some_and(|library| library.failure().is_some());
        if has_failed {
            turn.generation = 0;
        }
        let word = self.word(member.place);
        self.staging.write(word, &turn.generation.to_ne_bytes());
        let reduce = op.kind.reduce_op().map(|reduce| match reduce {
            ReduceOp::Avg | ReduceOp::PreMulSum(_) => ReduceOp::Sum,
            other => other,
        });
        let spaces = Spaces::new(Region::default(), self.staging.clone(), self.called.element());
        let request = request(&mixed.islands, (self.called.call, checked), reduce, spaces, timeout);
        let empty = empty(op.kind.clone(), Mode::Async);
        let until = deadline_after(Instant::now(), timeout);
        turn.has_begun = false;
        let begun = self.comm.enter(&empty, |engine, driver| Ok(engine.start_collective(request, false, driver)));
        let work = begun.inspect_err(|_| turn.forget_staging())?.into_work(&self.comm.driver);
        let bytes = Bytes { read: self.called.bytes(), written: self.called.bytes() };
        self.comm.driver.with_engine(|engine| engine.context.recorder.moves(work.number(), bytes));
        learn(mixed, &work);
        let in_use = InUse::default();
        // Who ends the operation ends what streams and the library wait for.
        let given_up = in_use.clone();
        work.on_complete(move |result| {
            if let Some(library) = lock(&given_up).take().filter(|_| result.is_err()) {
                library.give_up();
            }
        });
        self.take_steps(&work, &in_use, turn, until);
        let result = work.wait(None);
        if result.is_err() && turn.has_begun {
            turn.generation = 0;
            lock(&member.library).take().inspect(|library| library.give_up());
        }
        result.map(|()| work)
    }

    /// Does what the collective waits for, until it has ended.
    fn take_steps(&mut self, work: &Work, in_use: &InUse, turn: &mut Turn, until: Instant) {
        let (driver, sequence) = (&self.comm.driver, work.sequence());
        loop {
            let awaited = || driver.with_engine(|engine| engine.collectives.awaited(sequence));
            driver.drive_until(|_| work.is_done() || awaited().is_some(), None);
            let Some(number) = awaited() else {
                if work.is_done() {
                    return;
                }
                continue;
            };
            let outcome = match number {
                BEGIN => self.begin(work, in_use, turn, until),
                GATHERED => self.gathered(work, in_use),
                SPREAD => self.spread(in_use),
                END => self.wait_for_device(work, in_use),
                other => unreachable!("no schedule waits for {other}"),
            };
            let finished = driver.with_engine(|engine| {
                match outcome {
                    Ok(()) => engine.go_on(sequence),
                    Err(error) => engine.give_up(sequence, error),
                }
                engine.take_finished()
            });
            driver.tell(finished);
        }
    }

    /// Begins a communicator of the library if not all have the same, and puts what the group does among itself on the stream.
    fn begin(&mut self, work: &Work, in_use: &InUse, turn: &mut Turn, until: Instant) -> Result<(), Error> {
        let Call { member, mixed, call, .. } = *self.called;
        turn.has_begun = true;
        let said: Vec<u64> = (0..member.ranks.len()).map(|place| self.said(place)).collect();
        if let Some(generation) = next_generation(&said) {
            turn.generation = 0;
            let (comm, ranks) = (self.comm, (&member.ranks[..], self.called.me()));
            let number = (Tag::DEVICE, work.sequence());
            let mut all_gather = |own| tell_all(comm, work.operation(), ranks, number, own, until);
            // Half, so that why it has not begun is known before the operation's time is over.
            let limit = until.saturating_duration_since(Instant::now()) / 2;
            // An abort, for one, ends the operation.
            let library = member.chosen.begin(self.current, limit, &mut all_gather, &|| !work.is_done())?;
            let before = lock(&member.library).replace(library);
            before.inspect(|before| before.give_up());
            turn.generation = generation;
        }
        lock(in_use).clone_from(&lock(&member.library));
        if work.is_done() {
            return Ok(());
        }
        let (whole, part) = ([self.whole], [self.part()]);
        match call {
            IslandCall::AllReduce if mixed.islands.groups().len() == 1 => {
                self.submit(in_use, &Collective::AllReduce { count: self.called.count() }, &whole, &whole)
            }
            IslandCall::AllReduce => {
                self.submit(in_use, &Collective::ReduceScatter { counts: self.called.counts() }, &whole, &part)
            }
            IslandCall::Broadcast { root } => match member.ranks.iter().position(|rank| *rank == root) {
                Some(root) => {
                    let collective = Collective::Broadcast { count: self.called.count(), root: Rank::from(root) };
                    self.submit(in_use, &collective, &whole, &whole)
                }
                None => Ok(()),
            },
        }
    }

    /// Brings this rank's part to where the engine finds it.
    fn gathered(&mut self, work: &Work, in_use: &InUse) -> Result<(), Error> {
        self.wait_for_device(work, in_use)?;
        let part = self.part();
        if !work.is_done() && self.called.gives() && self.called.mixed.islands.groups().len() > 1 && !part.is_empty() {
            let into = &mut self.staging.run_mut(0)[..part.len()];
            copy_to_host(self.current, part, into).map_err(device_error(work.operation()))?;
        }
        Ok(())
    }

    /// Takes this rank's part from there, and puts on the stream what spreads all parts.
    fn spread(&mut self, in_use: &InUse) -> Result<(), Error> {
        if !self.called.gets() {
            return Ok(());
        }
        let part = self.part();
        if !part.is_empty() {
            let failed = device_error(self.called.op.kind.name());
            copy_from_host(self.current, &self.staging.run(0)[..part.len()], part).map_err(&failed)?;
            // A copy from memory that is not pinned may return when that has only been read.
            Stream::default_of(&self.called.member.context).synchronize().map_err(failed)?;
        }
        self.submit(in_use, &Collective::AllGather { counts: self.called.counts() }, &[part], &[self.whole])
    }

    fn submit(
        &self,
        in_use: &InUse,
        collective: &Collective,
        input: &[DeviceBytes<'_>],
        output: &[DeviceBytes<'_>],
    ) -> Result<(), Error> {
        let Call { op, checked, member, .. } = *self.called;
        let Some(library) = lock(in_use).clone() else { return Ok(()) };
        let called = Called {
            collective,
            reduce: op.kind.reduce_op().map(|reduce| self.comm.by_library(reduce)),
            factor: None,
            dtype: checked.dtype,
            input,
            output,
            spare: self.whole,
            me: Rank::from(member.place),
            world: member.ranks.len(),
        };
        let failed = |cause: String| Error::Device { operation: op.kind.name().to_owned(), cause };
        let calls = calls::calls(&called).map_err(|unfit| failed(unfit.to_string()))?;
        let put = library.submit(self.current, self.stream, &calls.calls, Patience::Watched);
        put.map_err(|error| failed(error.to_string()))
    }

    /// Waits until the stream has done what is on it, and no longer than the operation is in flight.
    fn wait_for_device(&self, work: &Work, in_use: &InUse) -> Result<(), Error> {
        let operation = work.operation();
        let (begin, mut asked) = (Instant::now(), Instant::now());
        while !self.stream.is_done().map_err(device_error(operation))? && !work.is_done() {
            if asked.elapsed() >= FAILURE_CHECK_INTERVAL {
                asked = Instant::now();
                if let Some(cause) = lock(in_use).as_ref().and_then(|library| library.failure()) {
                    return Err(Error::Device { operation: operation.to_owned(), cause });
                }
            }
            nap(begin.elapsed());
        }
        Ok(())
    }

    /// This rank's part of the data on the device.
    fn part(&self) -> DeviceBytes<'a> {
        let (own, element) = (self.called.own(), self.called.element());
        self.whole.part(own.offset * element, own.len * element)
    }

    /// Where the word of a rank of the group is.
    fn word(&self, place: usize) -> usize {
        (self.called.own().len + place * islands::word_len(self.called.element())) * self.called.element()
    }

    /// What a rank of the group says of its library.
    fn said(&self, place: usize) -> u64 {
        let word = self.word(place);
        let bytes = self.staging.to_vec(word, word + WORD);
        u64::from_ne_bytes(bytes.try_into().expect("as many bytes as a word has"))
    }
}

/// How long to wait until the library is asked whether something has failed.
const FAILURE_CHECK_INTERVAL: Duration = Duration::from_millis(100);
