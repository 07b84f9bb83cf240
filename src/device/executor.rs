//! The executor of collectives on a device: puts them on the caller's stream, and returns at once.

use std::fmt::Display;
use std::time::{Duration, Instant};

use crate::algo::{Collective, put};
use crate::buffer::Buffer;
use crate::counts::Counts;
use crate::device::all_to_all;
use crate::device::call_log::{Blocks, CallMemory, Capture as Captured, LoggedCall};
use crate::device::control::{Control, FailureKind};
use crate::device::far_windows::FarWindows;
use crate::device::graph::{CaptureSite, Graphs, Home, number_of};
use crate::device::in_flight::{self, By, Ends, Halt, InFlight};
use crate::device::kernels::{MAX_BLOCKS, Module};
use crate::device::lane::{Edges, Lane, Stretches, Submission, Tensors};
use crate::device::launch::{self, LaunchError, Launcher, Launches, LoadError};
use crate::device::lower::Program;
use crate::device::network::{NetworkMemory, Traffic};
use crate::device::other_hosts::{Exchange, OtherHosts};
use crate::device::plans::{Plan, Plans, Room};
use crate::device::regions::Regions;
use crate::device::ring_lane::RingLane;
use crate::device::rounds::{self, Rounds};
use crate::device::segment::{Segment, StagingTooSmall};
use crate::device::setup::{Member, Parts, Presence};
use crate::device::staging::{Staging, StagingKind};
use crate::device::timer::Timer;
use crate::device::vendor::calls::{self, Calls, Unfit};
use crate::device::vendor::ending::Leaving;
use crate::device::vendor::{Patience, SubmitError, VendorComm};
use crate::device::watch;
use crate::device::windows::{self, AllParts, Windows};
use crate::device::words::ControlLayout;
use crate::error::{Error, InitError, UsageError};
use crate::schedule::Space;
use crate::signature::Signature;
use crate::sync::{Arc, Mutex, lock};
use crate::sys::cuda::{Context, CudaError, Current, DeviceBytes, DeviceMemory, Event, Relaxed, Stream, StreamId};
use crate::topo::Topology;
use crate::types::Rank;
use crate::work::{Entry, Work};

mod capture;
mod part;
mod request;

pub(crate) use request::CollectiveRequest;
use request::LibraryCall;

/// What the executor asks of its communicator.
pub(crate) trait Ranks: Presence {
    /// Records an operation in the flight recorder under its number among the operations on the device.
    fn begin(&self, signature: Signature, sequence: u64, inputs: &[Buffer], outputs: &[Buffer]) -> Entry;

    /// Sends these bytes to every rank and returns the bytes of all ranks, by rank. Waits for all of them.
    fn all_gather(&self, own: Vec<u8>, timeout: Duration) -> Result<Vec<Vec<u8>>, Error>;

    /// Waits until all ranks have called this, and returns the greatest of their numbers.
    fn greatest(&self, own: u64, timeout: Duration) -> Result<u64, Error> {
        let told = self.all_gather(own.to_le_bytes().to_vec(), timeout)?;
        // Bytes that are no number count as zero.
        let number = |bytes: Vec<u8>| bytes.try_into().map(u64::from_le_bytes).unwrap_or_default();
        Ok(told.into_iter().map(number).fold(own, u64::max))
    }
}

/// The settings that it takes.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The algorithm that is set for all ranks, if one is.
    pub(crate) algorithm: Option<String>,
    /// Whether it measures how long operations take.
    pub(crate) is_timed: bool,
    /// Why it runs no programs, if it runs none.
    pub(crate) no_programs: Option<&'static str>,
}

/// A communicator's executor for one device.
pub(crate) struct Executor {
    comm: String,
    me: Rank,
    device: u32,
    control: Arc<Control>,
    in_flight: Arc<InFlight>,
    pub(crate) windows: Windows,
    /// The exchange with other hosts, if there are any.
    hosts: Option<Arc<dyn Exchange>>,
    /// Why this rank, or else another one, has no compiler of kernels.
    no_compiler: Option<String>,
    /// Why it runs only what the library has, if so.
    no_programs: Option<&'static str>,
    /// Locked while an operation is submitted. Calls of the driver queue work and do not wait.
    state: Mutex<Option<State>>,
}

struct State {
    me: Rank,
    topo: Topology,
    /// The place of this rank on its host, and how many ranks there are on all hosts.
    seat: Rank,
    world: usize,
    layout: ControlLayout,
    context: Arc<Context>,
    lane: Lane,
    /// The lane of all_to_alls, of which no rank knows all blocks.
    rings: RingLane,
    launcher: Launcher,
    /// The vendor's library that runs most collectives, if the ranks have chosen one.
    vendor: Option<Vendor>,
    plans: Plans,
    timer: Timer,
    scratch: DeviceMemory,
    sums: DeviceMemory,
    /// How many operations came before the ranks last began anew: the greatest number of any rank.
    before: u64,
    /// The number of the last operation since then.
    number: u64,
    /// That of the last one that the library has put on a stream; zero if there is none.
    by_library: u64,
    /// The id of the last operation's stream, and the event at its end there. Another stream may have the handle by now.
    last: Option<StreamId>,
    end: Event,
    /// The graphs in which operations are captured.
    graphs: Graphs,
    /// The bytes of half the staging memory.
    half: usize,
    /// The bytes of half of the memory for messages to other hosts.
    network: usize,
}

/// The lane of collectives. Its operations use the words of this lane, or those of the rings.
pub(crate) const LANE: usize = 0;
const RINGS: usize = 1;
/// The lane of accesses to windows, which have words of their own.
const WINDOWS: usize = 2;

const LANES: usize = 3;

/// The layout of an executor's words on a host with so many ranks, and how many words it needs.
pub(crate) fn words(ranks: usize) -> (ControlLayout, usize) {
    let layout = ControlLayout::new(ranks, LANES);
    (layout, layout.count() + Windows::words(ranks))
}

/// The bytes of half of each of an executor's staging memories: `staging` for collectives other than all_to_alls, then what
/// all_to_alls need among so many ranks.
pub(crate) fn halves(staging: usize, ranks: usize) -> [usize; 2] {
    [staging, RingLane::half(ranks, cell(staging))]
}

/// The bytes of a ring's cell, given the bytes of half of a rank's staging memory.
pub(crate) fn cell(staging: usize) -> usize {
    // Long enough that copying a chunk takes longer than submitting it.
    (staging / 4).min(1 << 20)
}

/// How a collective runs.
enum Prepared {
    Plan(Arc<Plan>),
    /// An all_to_all: rounds within the host, and programs between hosts if there are several.
    Rounds(Rounds, Option<Box<Far>>),
}

/// The part of an all_to_all that goes to other hosts and comes from there.
struct Far {
    segment: Segment,
    programs: Vec<Program>,
}

/// What runs a collective: programs, or a vendor's library.
enum Run<'a> {
    /// These write to the parts of a window, if any are given.
    Programs(Prepared, Option<AllParts>),
    Vendor(Arc<VendorComm>, Calls<'a>),
}

/// A vendor's communicator, and a byte for barriers.
struct Vendor {
    comm: Arc<VendorComm>,
    spare: Arc<DeviceMemory>,
}

impl Executor {
    /// An executor on what the ranks have set up together.
    pub(crate) fn new(
        comm: String,
        me: Rank,
        Options { algorithm, is_timed, no_programs }: Options,
        parts: Parts,
        vendor: Option<Arc<VendorComm>>,
        ends: Arc<dyn Ends>,
        (hosts, far_windows): (Arc<dyn Exchange>, Arc<dyn FarWindows>),
    ) -> Result<Executor, Error> {
        let Parts { context, words, registered, staging, network, width, topo, members } = parts;
        let [staging, cells] = <[Staging; 2]>::try_from(staging).expect("as many as `halves` wants");
        let (seat, world, half) = (topo.seat(me), members.len(), staging.half());
        // Where segments are skewed, two use scratch memory at a time.
        let (scratch_bytes, at_a_time) = (2 * half, if network.is_some() { 2 } else { 1 });
        let room = Room { half, scratch: scratch_bytes / at_a_time, network: NetworkMemory::half_beside(half) };
        let here = topo.hosts()[topo.host_of(me)].clone();
        let (layout, _) = self::words(here.len());
        let control = Arc::new(Control::new(words.clone(), layout, seat, width).of_some(here, world));
        let hosts = network.is_some().then_some(hosts);
        let obstacle =
            (staging.kind() == StagingKind::Host).then_some("the ranks' devices do not reach each other's memory");
        let sharing = members.iter().filter(|member| member.device == members[me.index()].device).count();
        let memory = || -> Result<_, CudaError> {
            let launcher = Launcher::new(&context, sharing, None)?;
            let scratch = [DeviceMemory::new(&context, scratch_bytes)?, DeviceMemory::new(&context, scratch_bytes)?];
            Ok((launcher, scratch, Event::new(&context)?, Timer::new(&context, ends.clone(), is_timed)?))
        };
        let (mut launcher, [scratch, sums], end, timer) = memory().map_err(|error| setup_failed(&comm, &error))?;
        watch::begin().map_err(|error| no_threads(&comm, &error))?;
        // Without a compiler only reductions are refused.
        let no_compiler = match launcher.find_compiler() {
            Ok(()) => None,
            Err(LaunchError::Driver(error)) => return Err(setup_failed(&comm, &error)),
            Err(error) => Some(error.to_string()),
        };
        let own = &members[me.index()];
        let is_beside = |other: &Member| other.device == own.device && other.process == own.process;
        if no_compiler.is_none() && members.iter().filter(|member| is_beside(member)).count() > 1 {
            // Loading kernels waits for the device, which may wait for a rank that is another thread of this process.
            let mut all = Module::all().map(Module::dtype);
            all.try_for_each(|dtype| launcher.prepare(dtype)).map_err(|error| no_kernels(&comm, &error))?;
        }
        let registered = Arc::new(registered);
        let lane = Lane::new(LANE, seat, layout.lane_words(), registered.clone(), staging, width);
        let lane = lane.with_network(network.map(Arc::new));
        let rings = RingLane::new(RINGS, seat, layout.lane_words(), registered.clone(), cells, width);
        let plans = Plans::new(me, topo.clone(), algorithm, room);
        let device = context.device().ordinal();
        let in_flight_hosts = hosts.clone().map(|hosts| hosts as Arc<dyn OtherHosts>);
        let in_flight = InFlight::new(comm.clone(), LANE, control.clone(), ends.clone(), in_flight_hosts);
        if let Some(vendor) = &vendor {
            in_flight.is_run_by(vendor.clone());
        }
        let spare = vendor.as_ref().map(|_| DeviceMemory::new(&context, 1)).transpose();
        let spare = spare.map_err(|error| setup_failed(&comm, &error))?;
        let vendor = vendor.zip(spare).map(|(comm, spare)| Vendor { comm, spare: Arc::new(spare) });
        let graphs = Graphs::new(Home {
            comm: comm.clone(),
            me,
            size: world,
            host: members[me.index()].host.clone(),
            context: context.clone(),
            in_flight: in_flight.clone(),
        });
        let state = State {
            me,
            topo,
            seat,
            world,
            layout,
            context: context.clone(),
            lane,
            rings,
            launcher,
            vendor,
            plans,
            scratch,
            sums,
            timer,
            before: 0,
            number: 0,
            by_library: 0,
            last: None,
            end,
            graphs,
            half,
            network: room.network,
        };
        let wanted = windows::Wanted {
            comm: comm.clone(),
            lane: WINDOWS,
            layout,
            context,
            words,
            registered,
            width,
            obstacle,
            world,
            hosts: hosts.is_some().then_some(far_windows),
            cell: cell(half),
        };
        let windows = Windows::new(wanted, &control, &in_flight, ends).map_err(|error| setup_failed(&comm, &error))?;
        let state = Mutex::new(Some(state));
        Ok(Executor { comm, me, device, control, in_flight, windows, hosts, no_compiler, no_programs, state })
    }

    /// Why this rank has no compiler of kernels, if it has none.
    pub(crate) fn no_compiler(&self) -> Option<String> {
        self.no_compiler.clone()
    }

    /// Refuses reductions by kernels from now on, as every rank does, because `rank` has no compiler.
    pub(crate) fn lacks_compiler(&mut self, rank: Rank, why: &str) {
        self.no_compiler = Some(format!("rank {rank}: {why}"));
    }

    /// Where there are other hosts: the words and the memory for messages to and from there.
    pub(crate) fn network(&self) -> Option<(Arc<Control>, Arc<NetworkMemory>)> {
        let memory = lock(&self.state).as_ref()?.lane.network()?;
        Some((self.control.clone(), memory))
    }

    /// Refuses an operation that does not work between hosts.
    ///
    /// # Errors
    /// The ranks are on several hosts.
    pub(crate) fn check_one_host(&self, operation: &str, what: &str) -> Result<(), UsageError> {
        if self.hosts.is_none() {
            return Ok(());
        }
        Err(UsageError {
            operation: operation.to_owned(),
            argument: "group",
            expected: format!("ranks on one host, as {what} need"),
            got: "ranks on several hosts".to_owned(),
        })
    }

    pub(crate) fn device(&self) -> u32 {
        self.device
    }

    /// Puts a collective on the caller's stream.
    ///
    /// # Errors
    /// After a usage error nothing is on the stream. After any other error the collective succeeds on no rank.
    pub(crate) fn collective(&self, request: &CollectiveRequest<'_>, ranks: &dyn Ranks) -> Result<Work, Error> {
        let operation = || request.signature.to_string();
        let mut state = lock(&self.state);
        let Some(state) = state.as_mut() else { return Err(self.closed(operation())) };
        match self.in_flight.halt() {
            None => {}
            Some(Halt::Mismatch) => {
                // If this fails halfway, ranks may count differently, so nothing more is submitted.
                self.begin_anew(state, ranks, request).inspect_err(|error| self.in_flight.stop(error))?;
            }
            Some(Halt::Failed(error)) => return Err(in_flight::named(error, request.signature)),
        }
        if let Some(error) = self.windows.failure() {
            return Err(in_flight::named(error, request.signature));
        }
        let context = state.context.clone();
        let number = state.number + 1;
        // Even if the driver refuses something here, the other ranks call this operation, so they must be told.
        let driver = |error: CudaError| self.broken(number, operation(), &error);
        let current = context.enter().map_err(driver)?;
        let stream = Stream::of_caller(&context, request.stream);
        let capture = number_of(stream.capture(&current).map_err(driver)?, operation)?;
        // Allocations for a capture must not spoil it.
        let _relaxed = capture.map(|_| Relaxed::enter()).transpose().map_err(driver)?;
        let tensors = request.stretches();
        // Operations that the library lacks run as programs. All ranks choose alike.
        let vendor = state.vendor.as_ref().filter(|_| calls::has(request.dtype, request.reduce));
        let vendor = vendor.map(|vendor| (vendor.comm.clone(), vendor.spare.clone()));
        let run = match &vendor {
            Some((comm, spare)) => {
                let calls = request.calls(&tensors, spare, (self.me, state.world));
                Run::Vendor(comm.clone(), calls.map_err(|unfit| self.unfit(operation(), unfit))?)
            }
            None => {
                // In graphs all parts would have to stay mapped.
                let parts = request.window.filter(|_| capture.is_none()).and_then(|window| self.windows.parts(window));
                let named = state.plans.named();
                let put = parts.as_ref().and_then(|_| put::instead_of(&request.collective, named, |_| true));
                let prepared = state.prepare(request, put.as_ref().unwrap_or(&request.collective));
                let prepared = prepared.map_err(|error| self.refused(&request.signature, &error))?;
                Run::Programs(prepared, parts.filter(|_| put.is_some()))
            }
        };
        if let (Run::Programs(..), Some(_)) = (&run, capture) {
            self.check_one_host(&operation(), "collectives in CUDA graphs by programs for streams")?;
        }
        if let (Run::Programs(..), Some(why)) = (&run, self.no_programs)
            && state.world > 1
        {
            return Err(self.refused(&request.signature, &why));
        }
        if let Run::Programs(Prepared::Plan(plan), _) = &run
            && state.world > MAX_BLOCKS
        {
            let mut programs = plan.programs.iter().map(|(_, program)| program);
            let checked = programs.try_for_each(|program| launch::check(program));
            checked.map_err(|error| self.refused(&request.signature, &error))?;
        }
        if request.reduce.is_some() && matches!(run, Run::Programs(..)) {
            if let Some(why) = &self.no_compiler {
                return Err(self.refused(&request.signature, why));
            }
            state.launcher.prepare(request.dtype).map_err(|error| match error {
                LaunchError::Driver(_) | LaunchError::Load(LoadError::Driver { .. }) => {
                    self.broken(number, operation(), &error)
                }
                // The other ranks need no word of this: they lack the kernels as well, or their timeout names this rank.
                // Collectives without kernels still work.
                error => self.refused(&request.signature, &error),
            })?;
        }
        let (algorithm, segments, memory) = match &run {
            Run::Programs(Prepared::Plan(plan), _) => (plan.algorithm, plan.segments as u32, CallMemory::None),
            Run::Programs(Prepared::Rounds(..), _) => (request.signature.algorithm, 1, CallMemory::None),
            Run::Vendor(comm, calls) => {
                (request.signature.algorithm, calls.pieces, comm.register(&current, &calls.calls))
            }
        };
        let signature = Signature { algorithm, ..request.signature };
        let counts = match &request.collective {
            Collective::AllToAll { send, recv } => Some([send, recv]),
            _ => None,
        };
        // The ranks of this host compare what they send each other.
        let near = counts.map(|counts| counts.map(|counts| state.of_this_host(counts)));
        let blocks = near.as_ref().map(|[sent, received]| Blocks { sent, received });
        self.make_room(number, request.timeout, signature, blocks.is_some())
            .inspect_err(|error| self.in_flight.fail_too(number, error))?;
        state.number = number;
        let sequence = state.before + number;
        let work = Work::new(self.in_flight.clone(), ranks.begin(signature, sequence, request.inputs, request.outputs));
        let mode = if capture.is_some() { Captured::Captured } else { Captured::Eager };
        let call = LoggedCall::new(signature, segments, mode).with_memory(memory);
        let entered = self.control.enter(LANE, number, call, blocks).or_else(|disagreement| {
            // In captures all ranks find what differs between calls of a library, once they have told each other.
            let is_told = capture.is_some() && matches!(run, Run::Vendor(..));
            if is_told { self.control.none_is_eager(LANE, number) } else { Err(disagreement) }
        });
        if let Err(disagreement) = entered {
            let disagreement = disagreement.named(|rank| self.control.name(rank));
            let error = self.in_flight.disagree(number, sequence, call, disagreement);
            self.in_flight.end(&work, Err(error.clone()));
            return Err(error);
        }
        if let Some(capture) = capture {
            let place = CaptureSite { current: &current, stream: &stream, capture };
            let outcome = match &run {
                Run::Programs(prepared, _) => {
                    let compare = || self.control.compare(LANE, number, call, blocks);
                    let met = self.in_flight.meet(number, call, compare, request.timeout);
                    met.and_then(|()| self.capture(state, place, (number, signature), prepared, request, ranks))
                }
                Run::Vendor(comm, calls) => {
                    let (_, spare) = vendor.as_ref().expect("it runs by one");
                    let blocks = counts.map(|[sent, received]| Blocks { sent, received });
                    let called = LibraryCall { number, call, blocks, comm, spare, calls: &calls.calls };
                    let compare = || self.control.none_is_eager(LANE, number);
                    let met = self.in_flight.meet(number, call, compare, request.timeout);
                    met.and_then(|()| self.capture_calls(state, place, &called, request, ranks))
                }
            };
            // The call ends here for its caller: the host is told of no replay.
            self.in_flight.end(&work, outcome.clone());
            return outcome.map(|()| work);
        }
        if let (Some(window), Run::Programs(_, Some(_))) = (request.window, &run) {
            self.windows.gathers(window, number);
        }
        let by = if matches!(run, Run::Vendor(..)) { By::Library } else { By::Programs };
        if self.in_flight.begin(number, signature, work.clone(), request.timeout, by) {
            watch::watch(self.in_flight.clone());
        }
        let taken_up = self.hosts.as_ref().map_or(Ok(()), |hosts| {
            hosts.submit(number, signature, &mut run.traffic())?;
            if let Run::Vendor(..) = run { hosts.listen(number) } else { Ok(()) }
        });
        let submitted = taken_up.map_err(|error| error.to_string()).and_then(|()| {
            let submitted = state.submit(&current, &stream, (number, &work), &run, request, &self.in_flight);
            submitted.map_err(|error| error.to_string())
        });
        if let Err(error) = submitted {
            // If the library's communicator was given up meanwhile, the work reports the failure behind that.
            let is_known = matches!(&run, Run::Vendor(comm, _) if comm.is_given_up());
            let error = (!is_known).then(|| self.broken(number, signature.to_string(), &error));
            state.end(&current, &stream, number);
            return error.map_or(Ok(work), Err);
        }
        Ok(work)
    }

    /// Tells all ranks that a call of the driver has failed in the operation of this number.
    fn broken(&self, number: u64, operation: String, error: &impl Display) -> Error {
        let error = Error::Device { operation, cause: error.to_string() };
        self.in_flight.fail(number, FailureKind::Driver, self.me, error.clone());
        error
    }

    /// After a disagreement: waits until no rank has an operation in flight, and counts from the beginning.
    fn begin_anew(&self, state: &mut State, ranks: &dyn Ranks, request: &CollectiveRequest<'_>) -> Result<(), Error> {
        let timeout = request.timeout;
        let operation = || "the operation after a disagreement".to_owned();
        let in_flight = |waited| Error::Timeout {
            operation: operation(),
            waited,
            detail: "earlier operations are still in flight on the device".to_owned(),
        };
        self.in_flight.wait_for(u64::MAX, timeout).map_err(in_flight)?;
        // A rank that is lost, or has failed for good, would never come to `greatest`.
        let all: Vec<Rank> = (0..state.world).map(Rank::from).collect();
        self.in_flight.obstacle(request.signature, &all).map_or(Ok(()), Err)?;
        state.before = ranks.greatest(state.before + state.number, timeout)?;
        if let Some(hosts) = &self.hosts {
            hosts.reset();
        }
        // Whether the library was called for an operation that not all ranks have called alike.
        let is_touched =
            state.by_library > 0 && self.in_flight.failed_from().is_none_or(|from| state.by_library >= from);
        self.control.reset(LANE);
        self.control.reset(RINGS);
        state.lane.reset();
        state.rings.reset();
        (state.number, state.by_library) = (0, 0);
        if let Some(vendor) = &state.vendor {
            let failed = |error: CudaError| Error::Device { operation: operation(), cause: error.to_string() };
            let current = state.context.enter().map_err(failed)?;
            // The library allocates, which must not spoil a capture.
            let _relaxed = Relaxed::enter().map_err(failed)?;
            let mut all_gather = |own| ranks.all_gather(own, timeout);
            vendor.comm.begin_anew(&current, is_touched, timeout, &mut all_gather, &|| ranks.are_there())?;
        }
        self.in_flight.resume(state.before);
        ranks.greatest(0, timeout).map(|_| ())
    }

    /// Waits until the log has room for the operation of this number, as the driver waits when its queue is full.
    fn make_room(&self, number: u64, timeout: Duration, signature: Signature, has_blocks: bool) -> Result<(), Error> {
        if self.control.has_room(LANE, number, has_blocks) {
            return Ok(());
        }
        let slots = Control::slots(has_blocks);
        let earlier = number - slots;
        self.in_flight.wait_for(earlier, timeout).map_err(|waited| Error::Timeout {
            operation: signature.to_string(),
            waited,
            detail: format!("{slots} operations are in flight on the device"),
        })
    }

    /// Waits until nothing is in flight, for `limit` at most.
    pub(crate) fn drain(&self, limit: Duration) {
        let begin = Instant::now();
        // Operations that are left then are given up.
        let _ = self.in_flight.wait_for(u64::MAX, limit);
        // A thread that submits holds the lock: this does not wait for it.
        let is_replayed =
            || self.state.try_lock().is_ok_and(|state| state.as_ref().is_some_and(|state| state.graphs.is_busy()));
        while is_replayed() && begin.elapsed() < limit {
            std::thread::sleep(in_flight::NAP_MAX);
        }
        self.windows.drain(limit.saturating_sub(begin.elapsed()));
    }

    /// Gives up operations in flight and later ones, because this rank leaves. Waits for no thread that submits.
    pub(crate) fn leave(&self, error: Error) {
        self.windows.leave(error.clone());
        self.in_flight.leave(error);
    }

    /// Gives a vendor's library up, after [`leave`](Executor::leave).
    pub(crate) fn give_up_library(&self) {
        self.in_flight.give_up_library();
    }

    /// Gives up all operations, since the last step of the setup has failed here.
    pub(crate) fn never_begins(&self, error: &Error) {
        self.in_flight.never_begins(error);
    }

    /// Has the reaper give memory back once the device does not use it any more, and what the program has lent after it. This
    /// rank must have left before.
    pub(crate) fn close(&self, lent: Regions, leaving: Leaving) {
        self.windows.close();
        let Some(state) = lock(&self.state).take() else { return };
        // A thread that was still setting up when this rank left may have submitted operations since.
        self.in_flight.leave(self.closed("an operation in flight".to_owned()));
        let libraries = state.vendor.iter().map(|vendor| vendor.comm.clone()).collect();
        watch::reap_with(libraries, leaving, vec![self.in_flight.clone()], Box::new((state, lent)));
    }

    /// The error of an operation that cannot be run, on this rank or on any.
    fn refused(&self, signature: &Signature, cause: &impl Display) -> Error {
        let operation = signature.operation();
        let text = format!("communicator `{}`: {operation} on cuda:{}: {cause}", self.comm, self.device);
        InitError::Config(text).into()
    }

    fn unfit(&self, operation: String, unfit: Unfit) -> UsageError {
        let expected = "tensors as the vendor's library takes them; engine=streams takes any".to_owned();
        UsageError { operation, argument: "tensors", expected, got: unfit.to_string() }
    }

    fn closed(&self, operation: String) -> Error {
        Error::Closed { operation, comm: self.comm.clone(), how: "left".to_owned() }
    }
}

impl Prepared {
    /// What each of its programs exchanges with other hosts.
    fn traffic(&self) -> Box<dyn Iterator<Item = &Traffic> + '_> {
        match self {
            Prepared::Plan(plan) => Box::new(plan.programs.iter().map(|(_, program)| &program.traffic)),
            Prepared::Rounds(_, far) => {
                Box::new(far.iter().flat_map(|far| &far.programs).map(|program| &program.traffic))
            }
        }
    }
}

impl Run<'_> {
    /// What it exchanges with other hosts by pinned memory.
    fn traffic(&self) -> Box<dyn Iterator<Item = &Traffic> + '_> {
        match self {
            Run::Programs(prepared, _) => prepared.traffic(),
            Run::Vendor(..) => Box::new(std::iter::empty()),
        }
    }
}

impl State {
    /// How this rank runs a call as a collective, which may be another one than was called.
    fn prepare(
        &mut self,
        request: &CollectiveRequest<'_>,
        collective: &Collective,
    ) -> Result<Prepared, StagingTooSmall> {
        let Collective::AllToAll { send, recv } = collective else {
            return self.plans.plan(&request.shape(collective, self.me)).map(Prepared::Plan);
        };
        let element = request.dtype.size();
        let mut messages = rounds::all_to_all(send, recv, element);
        let far = (self.topo.hosts().len() > 1).then(|| self.far(collective, send, recv, element)).transpose()?;
        if far.is_some() {
            messages.retain(|message| self.topo.same_host(self.me, message.peer));
            messages.iter_mut().for_each(|message| message.peer = self.topo.seat(message.peer));
        }
        let rounds = self.rings.plan(&messages);
        let rounds = rounds.expect("it was checked that this rank sends itself what it receives from itself");
        Ok(Prepared::Rounds(rounds, far.map(Box::new)))
    }

    /// The part of an all_to_all that goes to other hosts and comes from there.
    fn far(
        &self,
        collective: &Collective,
        sent: &Counts,
        received: &Counts,
        element: usize,
    ) -> Result<Far, StagingTooSmall> {
        let blocks = all_to_all::Blocks { sent, received, element };
        let programs = all_to_all::programs(&self.topo, self.me, blocks, self.network)?;
        let segment = Segment::whole(collective.clone(), sent.total(), received.total());
        Ok(Far { segment, programs })
    }

    /// The counts of the ranks of this host, by their places there.
    fn of_this_host(&self, counts: &Counts) -> Counts {
        let here = &self.topo.hosts()[self.topo.host_of(self.me)];
        here.iter().map(|rank| counts[rank.index()]).collect()
    }

    /// Puts all of an operation on the stream.
    fn submit(
        &mut self,
        current: &Current<'_>,
        stream: &Stream,
        (number, work): (u64, &Work),
        run: &Run<'_>,
        request: &CollectiveRequest<'_>,
        in_flight: &InFlight,
    ) -> Result<(), SubmitError> {
        // The operations of a lane come one after the other, whatever their streams.
        let id = stream.id(current)?;
        if self.last.is_some_and(|last| last != id) {
            stream.wait(current, &self.end)?;
        }
        let lap = self.timer.begin(current, stream);
        let [inputs, outputs] = request.stretches();
        let (layout, seat) = (self.layout, self.seat);
        let starts = Some((layout.started(seat, LANE, number), number));
        let ends = Some((layout.done(seat, LANE, number), number));
        let parts = match run {
            Run::Programs(_, Some(parts)) => parts.bytes(),
            _ => Stretches::new(),
        };
        let tensors = Tensors {
            input: &inputs,
            output: &outputs,
            scratch: self.of_halves(&self.scratch),
            sums: self.of_halves(&self.sums),
            parts: &parts,
            element: request.dtype.size(),
            sum: request.scaling.bytes_in(Space::Sums, request.dtype.size()),
        };
        let kernels = kernels(&self.launcher, request, self.world);
        let mut put = |segment, program, edges| {
            let submission = Submission { program, segment, tensors: &tensors, edges };
            let submitted = self.lane.submit(current, stream, &submission, &kernels);
            // Also after an error, here and below: the part that is on the stream may wait for words.
            in_flight.submitted(LANE, self.lane.awaits());
            submitted
        };
        // The edges of one part, where the operation has `count` parts.
        let edges =
            |index, count| Edges { starts: starts.filter(|_| index == 0), ends: ends.filter(|_| index + 1 == count) };
        match run {
            Run::Vendor(comm, calls) => {
                let (started, done) = (layout.started(seat, LANE, number), layout.done(seat, LANE, number));
                self.lane.write(current, stream, started, number)?;
                self.by_library = number;
                comm.submit(current, stream, &calls.calls, Patience::Watched)?;
                self.lane.write(current, stream, done, number)?;
            }
            Run::Programs(Prepared::Rounds(rounds, far), _) => {
                let far = far.iter().flat_map(|far| far.programs.iter().map(|program| (&far.segment, program)));
                let count = far.clone().count() + 1;
                // The first program only sends: rounds within the host go on while its messages travel.
                let (first, later) = (far.clone().take(1), far.skip(1));
                for (segment, program) in first.clone() {
                    put(segment, program, edges(0, count))?;
                }
                let before = first.count();
                let tensors = [&inputs[..], &outputs[..]];
                let submitted = self.rings.submit(current, stream, rounds, &tensors, edges(before, count));
                in_flight.submitted(RINGS, self.rings.awaits());
                submitted?;
                for (index, (segment, program)) in (before + 1..).zip(later) {
                    put(segment, program, edges(index, count))?;
                }
            }
            Run::Programs(Prepared::Plan(plan), _) => {
                for (index, (segment, program)) in plan.programs.iter().enumerate() {
                    put(segment, program, edges(index, plan.programs.len()))?;
                }
            }
        }
        self.timer.end(current, stream, lap, work);
        self.end.record(current, stream)?;
        self.last = Some(id);
        Ok(())
    }

    /// Scratch memory, for segments that use either half of the staging memory.
    fn of_halves<'a>(&self, memory: &'a DeviceMemory) -> [DeviceBytes<'a>; 2] {
        let all = memory.bytes();
        if self.topo.hosts().len() == 1 {
            return [all; 2];
        }
        let half = all.len() / 2;
        [all.part(0, half), all.part(half, half)]
    }

    /// Puts only the end of an operation on the stream, where a part of it failed: the end says when the stream has run out.
    fn end(&self, current: &Current<'_>, stream: &Stream, number: u64) {
        if let Err(error) = self.lane.write(current, stream, self.layout.done(self.seat, LANE, number), number) {
            log::warn!("nobody will know when device {} ends: {error}", self.context.device().ordinal());
        }
    }
}

/// The kernels that a call on so many ranks launches.
fn kernels<'a>(launcher: &'a Launcher, request: &'a CollectiveRequest<'_>, ranks: usize) -> Launches<'a> {
    let kernels = launcher.kernels(request.dtype, request.reduce, ranks);
    match request.factor.as_ref().and_then(|factor| Some((factor.device_bytes()?, factor.dtype()))) {
        Some((at, dtype)) => kernels.with_factor(at, dtype),
        None => kernels,
    }
}

fn no_kernels(comm: &str, error: &LaunchError) -> Error {
    let (comm, what) = (comm.to_owned(), "its kernels".to_owned());
    InitError::Os { comm, what, cause: error.to_string() }.into()
}

fn no_threads(comm: &str, cause: &std::io::Error) -> Error {
    let what = "the threads that see to devices".to_owned();
    InitError::Os { comm: comm.to_owned(), what, cause: cause.to_string() }.into()
}

fn setup_failed(comm: &str, error: &CudaError) -> Error {
    InitError::Os { comm: comm.to_owned(), what: "its memory on the device".to_owned(), cause: error.to_string() }
        .into()
}
