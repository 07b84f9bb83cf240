//! Operations on tensors in the memory of a CUDA device.
//!
//! A communicator has one device, that of its first operation there. At this operation all ranks set up together what they
//! share; from then on no rank waits for another one to submit.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::buffer::Buffer;
use crate::comm::check::{self, RankAndSize};
use crate::comm::island::Mixed;
use crate::comm::other_hosts::ThroughEngine;
use crate::config::Config;
use crate::deadline::deadline_after;
use crate::device::executor::{self, CollectiveRequest, Executor, LANE, Ranks};
use crate::device::far_windows::FarWindows;
use crate::device::in_flight::Ends;
use crate::device::messages::{BatchRequest, Message, Messages, Peers};
use crate::device::other_hosts::Exchange;
use crate::device::pairs::{Libraries, PairSetup};
use crate::device::regions::Regions;
use crate::device::rounds::Direction;
use crate::device::setup::{self, AllGather, Parts, Wanted};
use crate::device::vendor::VendorComm;
use crate::device::vendor::ending::Leaving;
use crate::device::vendor::part::Part;
use crate::device::words::ControlLayout;
use crate::engine::collective;
use crate::engine::driver::Driver;
use crate::engine::relay::Pier;
use crate::error::{Error, InitError, UsageError};
use crate::op::{Op, OpKind};
use crate::signature::Signature;
use crate::sync::{Arc, Mutex, OnceLock, lock};
use crate::sys::cuda::{Provider, Relaxed, StreamHandle};
use crate::types::{Rank, Source, Tag};
use crate::work::Work;

mod island;
mod memory;
mod parts;
mod windows;

/// What a communicator has on a device.
pub(super) struct DeviceSide {
    algorithm: Option<String>,
    is_timed: bool,
    pub(super) is_high_priority_stream: bool,
    /// The identity of this rank's host.
    host: String,
    /// The bytes of half of a rank's staging memory.
    staging_bytes: usize,
    libraries: Libraries,
    executor: OnceLock<Arc<Executor>>,
    /// Held while the ranks set up: why they never can.
    setup: Mutex<Option<Error>>,
    /// Sends and receives, which need no setup of all ranks.
    messages: OnceLock<Messages>,
    /// A communicator of the library that was split from that of others, until the setup.
    part: Mutex<Option<Part>>,
    /// Which ranks are alike, with `engine=mixed`.
    mixed: Mutex<Option<Arc<Mixed>>>,
}

impl DeviceSide {
    pub(super) fn new(config: &Config, host: &str) -> DeviceSide {
        let libraries = Libraries {
            engine: config.engine,
            files: [&config.nccl_library, &config.rccl_library].map(|file| file.as_ref().map(PathBuf::from)),
            fields: Arc::new(config.nccl_config.clone()),
            ranks_per_root: config.nccl_ranks_per_root,
            limit: config.connect_timeout,
            lent: Arc::default(),
        };
        DeviceSide {
            algorithm: config.algorithm.name().map(str::to_owned),
            is_timed: config.device_timing,
            is_high_priority_stream: config.is_high_priority_stream,
            host: host.to_owned(),
            staging_bytes: config.device_staging.get(),
            libraries,
            executor: OnceLock::new(),
            setup: Mutex::new(None),
            messages: OnceLock::new(),
            part: Mutex::new(None),
            mixed: Mutex::new(None),
        }
    }

    /// Whether operations go through memory of the host, by the CPU's engine. Nothing else asks for it.
    fn goes_through_host(&self) -> bool {
        self.libraries.engine.goes_through_host()
    }

    /// The setting of what runs operations.
    pub(super) fn engine(&self) -> &'static str {
        self.libraries.engine.name()
    }

    /// Waits until nothing is in flight on the device, for `limit` at most.
    pub(super) fn drain(&self, limit: Duration) {
        if let Some(executor) = self.executor.get() {
            executor.drain(limit);
        }
        if let Some(messages) = self.messages.get() {
            messages.drain(limit);
        }
    }

    /// Gives up what is on the device.
    pub(super) fn leave(&self, comm: &str, how: &str, leaving: Leaving) {
        let (operation, comm) = ("an operation in flight".to_owned(), comm.to_owned());
        let error = Error::Closed { operation, comm, how: how.to_owned() };
        if let Some(messages) = self.messages.get() {
            messages.leave(&error);
        }
        if let Some(executor) = self.executor.get() {
            executor.leave(error);
        }
        if leaving == Leaving::AfterFailure {
            self.give_up_libraries();
        }
    }

    /// Gives up the vendor's libraries. By then, all that is given up is marked, since streams go on with what these leave behind; and
    /// there is an engine that tells other hosts.
    fn give_up_libraries(&self) {
        if let Some(messages) = self.messages.get() {
            messages.give_up_libraries();
        }
        if let Some(executor) = self.executor.get() {
            executor.give_up_library();
        }
    }

    /// Gives back what the communicator has on the device. The engine is closed by then, so no thread waits in here for ranks.
    pub(super) fn close(&self, leaving: Leaving) {
        // What was never registered goes at once.
        let lent = std::mem::take(&mut *lock(&self.libraries.lent));
        if let Some(executor) = self.executor.get() {
            executor.close(lent, leaving);
        }
        if let Some(messages) = self.messages.get() {
            messages.close(leaving);
        }
        let part = lock(&self.part).take();
        if leaving == Leaving::AfterFailure {
            part.into_iter().for_each(Part::give_up);
        }
        self.close_island(leaving);
    }
}

/// Why the ranks could not set up.
enum Refusal {
    /// A rank lacked something, such as memory, which it may have at the next call: then all try again.
    ForNow(Error),
    /// They do not fit together, or do not hear each other.
    ForGood(Error),
}

impl Refusal {
    /// The refusal of a step in which each rank tells all what it has made: `error` is the same on all of them.
    fn of(error: Error) -> Refusal {
        match error {
            Error::Init(InitError::Os { .. }) => Refusal::ForNow(error),
            error => Refusal::ForGood(error),
        }
    }
}

/// What a communicator lends to its device.
pub(super) trait Group: Ranks + Peers {
    fn name(&self) -> &str;
    fn place(&self) -> RankAndSize;
    fn driver(&self) -> &Arc<Driver>;

    /// Runs operations through memory of the host, and returns the work of the last one, which has ended.
    fn through_host(&self, ops: &[Op], factor: Option<Buffer>, stream: StreamHandle) -> Result<Work, Error>;

    /// Sends bytes to a rank in the background.
    fn send_bytes(&self, data: Vec<u8>, to: Rank, tag: Tag) -> Result<(), Error>;

    /// Receives as many bytes from a rank.
    fn recv_bytes(&self, data: &mut [u8], from: Rank, tag: Tag, timeout: Duration) -> Result<(), Error>;
}

impl DeviceSide {
    /// Sets up what operations on a device need, with all ranks.
    pub(super) fn prepare(&self, group: &impl Group, device: u32, timeout: Duration) -> Result<(), Error> {
        let operation = "prepare_device";
        group.driver().check_open(operation)?;
        if self.goes_through_host() {
            return Ok(());
        }
        self.executor(group, operation, device, timeout).map(drop)
    }

    /// Puts an operation on a stream of the device in whose memory its buffers lie, and its factor if it has one there; or several
    /// together, as [`check::batch`] wants them. Or has them go through memory of the host.
    pub(super) fn run(
        &self,
        group: &impl Group,
        ops: &[Op],
        factor: Option<Buffer>,
        stream: StreamHandle,
        timeout: Duration,
    ) -> Result<Work, Error> {
        if self.goes_through_host() {
            return group.through_host(ops, factor, stream);
        }
        let [op] = ops else { return self.run_batch(group, ops, stream, timeout) };
        if !group.driver().is_here() {
            return Err(group.driver().forked_error(op.kind.name()));
        }
        match op.kind {
            OpKind::Send { .. } | OpKind::Recv { .. } => return self.run_batch(group, ops, stream, timeout),
            ref kind if kind.is_access() => return self.access(group, op, stream, timeout),
            _ => {}
        }
        let (checked, window) = match op.kind {
            OpKind::AllGatherPersistent { window } => (check::into_window(op, window, group.place())?, Some(window)),
            _ => (check::collective(op, None, group.place())?, None),
        };
        group.driver().check_open(op.kind.name())?;
        let executor = self.executor(group, op.kind.name(), stream.device(), timeout)?;
        if let Some(window) = window {
            let known = group.driver().with_engine(|engine| engine.windows.window(window).cloned());
            let known = known.ok_or_else(|| check::unknown_window(op.kind.name(), window))?;
            check::persistent(op, &known, executor.windows.own_address(window).unwrap_or(0), group.place())?;
        }
        let request = CollectiveRequest {
            collective: checked.collective,
            signature: checked.signature,
            reduce: op.kind.reduce_op(),
            factor,
            dtype: checked.dtype,
            scaling: collective::scaling(op.kind.reduce_op(), checked.dtype, group.place().size),
            inputs: &op.inputs,
            outputs: &op.outputs,
            window,
            stream,
            timeout,
        };
        executor.collective(&request, group)
    }

    fn run_batch(
        &self,
        group: &impl Group,
        ops: &[Op],
        stream: StreamHandle,
        timeout: Duration,
    ) -> Result<Work, Error> {
        let (driver, RankAndSize { me, size }) = (group.driver(), group.place());
        let operation = ops[0].kind.name();
        if !driver.is_here() {
            return Err(driver.forked_error(operation));
        }
        let messages: Vec<Message<'_>> = ops.iter().map(|op| message(op, group.place())).collect::<Result<_, _>>()?;
        group.driver().check_open(operation)?;
        if let Some(executor) = self.executor.get() {
            own_device(executor.device(), operation, stream.device())?;
        }
        let executor = self.messages.get_or_init(|| {
            let own = PairSetup {
                comm: group.name().to_owned(),
                me,
                size,
                device: stream.device(),
                host: self.host.clone(),
                cell: executor::cell(self.staging_bytes),
                libraries: self.libraries.clone(),
            };
            Messages::new(own, Arc::new(Reports(driver.clone())), Arc::new(ThroughEngine(driver.clone())))
        });
        own_device(executor.device(), operation, stream.device())?;
        executor.submit(&BatchRequest { messages: &messages, stream, timeout }, group)
    }

    /// The executor for this device, which the ranks set up at the first call.
    fn executor(
        &self,
        group: &impl Group,
        operation: &str,
        device: u32,
        timeout: Duration,
    ) -> Result<Arc<Executor>, Error> {
        let mut failed = match self.executor.get() {
            Some(executor) => return own_device(executor.device(), operation, device).map(|()| executor.clone()),
            None => lock(&self.setup),
        };
        if let Some(error) = &*failed {
            return Err(error.clone());
        }
        if let Some(messages) = self.messages.get() {
            own_device(messages.device(), operation, device)?;
        }
        // Another thread may have been faster.
        if self.executor.get().is_none() {
            match self.set_up(group, device, timeout) {
                Ok(executor) => {
                    let executor = Arc::new(executor);
                    _ = self.executor.set(executor.clone());
                    // If this rank has left meanwhile, nobody else gives up what the other ranks wait for.
                    group.driver().check_open(operation).inspect_err(|error| {
                        executor.leave(error.clone());
                        executor.close(Regions::default(), Leaving::AfterFailure);
                    })?;
                }
                Err(Refusal::ForNow(error)) => return Err(error),
                Err(Refusal::ForGood(error)) => {
                    *failed = Some(error.clone());
                    return Err(error);
                }
            }
        }
        let executor = self.executor.get().expect("set above, or before");
        own_device(executor.device(), operation, device).map(|()| executor.clone())
    }

    fn set_up(&self, group: &impl Group, device: u32, timeout: Duration) -> Result<Executor, Refusal> {
        // The setup allocates, which spoils captures otherwise. Where there is no driver, the setup says so.
        let _relaxed = Relaxed::enter();
        let RankAndSize { me, size } = group.place();
        let names: Vec<Rank> = (0..size).map(Rank::from).collect();
        let topo = group.driver().with_engine(|engine| engine.context.topo.clone());
        let here = topo.hosts()[topo.host_of(me)].len();
        // The same halves on every host, since rank 0's hold for all.
        let most = topo.hosts().iter().map(Vec::len).max().expect("this rank's, at least");
        let wanted = Wanted {
            comm: group.name(),
            me,
            names: &names,
            device,
            host: &self.host,
            halves: &executor::halves(self.staging_bytes, most),
            stages_alone: true,
            words: executor::words(here).1,
            layout: ControlLayout::VERSION,
            timeout,
        };
        let mut all_gather = |own| all_gather(group, own, timeout);
        let parts = setup::set_up(&wanted, &mut all_gather, &|| group.are_there()).map_err(Refusal::of)?;
        let vendor = self.vendor(group, &names, &parts, timeout, &mut all_gather).map_err(Refusal::ForGood)?;
        let ends = Arc::new(Reports(group.driver().clone()));
        let hosts = Arc::new(ThroughEngine(group.driver().clone()));
        let hosts = (hosts.clone() as Arc<dyn Exchange>, hosts as Arc<dyn FarWindows>);
        let no_programs = self.libraries.no_streams();
        let options = executor::Options { algorithm: self.algorithm.clone(), is_timed: self.is_timed, no_programs };
        let own = Executor::new(group.name().to_owned(), me, options, parts, vendor, ends, hosts);
        // A failure on one rank is an error on all. On all ranks, what may wait for a device is over before any puts something
        // on a stream.
        let own = own.map(|executor| {
            let lacks = executor.no_compiler();
            (executor, lacks)
        });
        let (executor, told) = setup::split(own.map_err(setup::failed("what runs operations")));
        let lacks: Result<Vec<Option<String>>, Error> = setup::tell(group.name(), &names, &mut all_gather, told);
        let lacks = lacks.map_err(|error| {
            executor.iter().for_each(|executor| executor.never_begins(&error));
            Refusal::of(error)
        })?;
        let mut executor = executor.expect("no rank has told a failure");
        if let Some((rank, why)) = names.iter().zip(lacks).find_map(|(rank, lacks)| Some((*rank, lacks?))) {
            executor.lacks_compiler(rank, &why);
        }
        if let Some((control, memory)) = executor.network() {
            let pier = Pier { control, lane: LANE, memory };
            group.driver().with_engine(|engine| engine.relay.open(pier));
        }
        Ok(executor)
    }
}

impl DeviceSide {
    /// The communicator of a vendor's library, if all ranks use one.
    fn vendor(
        &self,
        group: &impl Group,
        names: &[Rank],
        Parts { context, members, .. }: &Parts,
        timeout: Duration,
        all_gather: &mut AllGather<'_>,
    ) -> Result<Option<Arc<VendorComm>>, Error> {
        let (comm, me) = (group.name(), group.place().me);
        let mut candidate = self.libraries.candidate(comm, (me, names));
        candidate.part = lock(&self.part).take().filter(|part| part.device() == context.device().ordinal());
        let current = setup::agree(comm, names, "its context", context.enter(), |_| {}, all_gather)?;
        let Some((chosen, part)) = candidate.choose(members, all_gather)? else {
            if me.index() == 0 && members.iter().any(|member| member.provider == Provider::Hip) {
                log::warn!(
                    "communicator `{comm}`: whether streams of HIP's devices can wait for words has not been shown"
                );
            }
            return Ok(None);
        };
        let begun = match part {
            Some(part) => chosen.take(part),
            None => chosen.begin(&current, timeout, all_gather, &|| group.are_there())?,
        };
        if me.index() == 0 {
            log::info!("communicator `{comm}`: CUDA tensors go by {}", chosen.library());
        }
        Ok(Some(begun))
    }
}

/// The message that an operation calls, if it is valid.
fn message(op: &Op, RankAndSize { me, size }: RankAndSize) -> Result<Message<'_>, UsageError> {
    check::memory(op)?;
    match op.kind {
        OpKind::Send { to, tag } => {
            check::peer(op, "dst", to, size)?;
            Ok(Message { peer: to, direction: Direction::Send, tag, buffers: &op.inputs })
        }
        OpKind::Recv { from, tag } => {
            let peer = match from {
                Source::Rank(from) => from,
                // This can only be the other rank.
                Source::Any if size == 2 => Rank::from(1 - me.index()),
                Source::Any => return Err(check::any_source_on_device(op)),
            };
            check::peer(op, "src", peer, size)?;
            Ok(Message { peer, direction: Direction::Receive, tag, buffers: &op.outputs })
        }
        _ => unreachable!("the kinds of a batch have been checked"),
    }
}

/// Refuses a device that is not the communicator's.
fn own_device(own: u32, operation: &str, device: u32) -> Result<(), Error> {
    if own == device {
        return Ok(());
    }
    Err(UsageError {
        operation: operation.to_owned(),
        argument: "tensors",
        expected: format!("tensors on cuda:{own}, the device of the communicator's earlier operations"),
        got: format!("tensors on cuda:{device}"),
    }
    .into())
}

/// Sends every rank bytes, in messages that programs cannot send. Returns what all have sent, by rank.
pub(super) fn all_gather(group: &impl Group, own: Vec<u8>, timeout: Duration) -> Result<Vec<Vec<u8>>, Error> {
    let RankAndSize { me, size } = group.place();
    let others = || (0..size).map(Rank::from).filter(|rank| *rank != me);
    for to in others() {
        tell(group, to, Tag::DEVICE, own.clone())?;
    }
    let until = deadline_after(Instant::now(), timeout);
    let mut all = vec![Vec::new(); size];
    for from in others() {
        all[from.index()] = hear(group, from, Tag::DEVICE, until.saturating_duration_since(Instant::now()))?;
    }
    all[me.index()] = own;
    Ok(all)
}

/// Sends each of these ranks bytes, and returns what all have sent, in their order. They belong to what has this number: what was
/// sent for an earlier one, which has failed, is passed over.
pub(super) fn tell_all(
    group: &impl Group,
    operation: &str,
    (ranks, me): (&[Rank], Rank),
    (tag, number): (Tag, u64),
    own: Vec<u8>,
    until: Instant,
) -> Result<Vec<Vec<u8>>, Error> {
    let told = [&number.to_le_bytes(), &own[..]].concat();
    for to in ranks.iter().filter(|rank| **rank != me) {
        tell(group, *to, tag, told.clone())?;
    }
    let hear_from = |from: Rank| loop {
        let heard = hear(group, from, tag, until.saturating_duration_since(Instant::now()))?;
        let (theirs, said) = heard.split_at_checked(NUMBER).unwrap_or_default();
        let theirs = theirs.try_into().map_or(u64::MAX, u64::from_le_bytes);
        if theirs == number {
            return Ok(said.to_vec());
        }
        if theirs > number {
            let detail = format!("rank {me} has come to number {number}, rank {from} to another one in its place");
            return Err(Error::Mismatch { operation: operation.to_owned(), detail });
        }
    };
    ranks.iter().map(|rank| if *rank == me { Ok(own.clone()) } else { hear_from(*rank) }).collect()
}

/// The bytes of such a number.
const NUMBER: usize = 8;

/// Sends a rank bytes, in a message of a tag that programs cannot use.
pub(super) fn tell(group: &impl Group, to: Rank, tag: Tag, told: Vec<u8>) -> Result<(), Error> {
    let length = u32::try_from(told.len()).expect("some bytes a rank").to_le_bytes();
    group.send_bytes(length.to_vec(), to, tag)?;
    group.send_bytes(told, to, tag)
}

/// Waits for bytes that a rank sends by [`tell`].
pub(super) fn hear(group: &impl Group, from: Rank, tag: Tag, timeout: Duration) -> Result<Vec<u8>, Error> {
    let until = deadline_after(Instant::now(), timeout);
    let mut length = [0; 4];
    group.recv_bytes(&mut length, from, tag, timeout)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > BYTES_MAX {
        let cause = format!("it announces {length} bytes, more than {BYTES_MAX}");
        return Err(Error::Remote { operation: "the setup of the device".to_owned(), rank: from.0, cause });
    }
    let mut bytes = vec![0; length];
    // They are right behind: left there, they would be taken for the next length.
    let left = until.saturating_duration_since(Instant::now()).max(LEAST_WAIT);
    group.recv_bytes(&mut bytes, from, tag, left)?;
    Ok(bytes)
}

/// How long bytes are waited for at least whose length has come.
const LEAST_WAIT: Duration = Duration::from_secs(1);

/// The most that a rank tells the others at a time.
const BYTES_MAX: usize = 1 << 20;

/// Tells the communicator how operations on its device end.
struct Reports(Arc<Driver>);

impl Ends for Reports {
    fn started(&self, works: &[Work], now: Instant) {
        self.0.with_engine(|engine| engine.started_on_device(works, now));
    }

    fn ended(&self, work: &Work, result: Result<(), Error>) {
        self.0.end(work, result);
    }

    fn took(&self, work: &Work, time: Duration) {
        self.0.with_engine(|engine| engine.took_on_device(work, time));
    }

    fn loss(&self, operation: &str) -> Option<Error> {
        self.0.with_engine(|engine| engine.loss_of(operation))
    }

    fn elsewhere(&self) -> Vec<Rank> {
        self.0.with_engine(|engine| engine.ahead())
    }

    fn waits(&self, sequence: u64, call: Signature, round: (u32, Duration)) {
        self.0.with_engine(|engine| engine.waits_on_device(sequence, call, round));
    }

    fn instead(&self, since: Instant, missing: &[Rank]) -> String {
        self.0.with_engine(|engine| engine.device_waits.describe(since, missing, Instant::now()))
    }
}
