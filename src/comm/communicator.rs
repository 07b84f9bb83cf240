//! A group of ranks that communicate, and one rank's handle on it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::algo::{ScratchLimit, put};
use crate::buffer::{Buffer, Memory};
use crate::comm::bootstrap::{self, Bootstrap, Keys, RankInfo};
use crate::comm::check::{self, Checked, RankAndSize};
use crate::comm::device::DeviceSide;
use crate::comm::failure_detector::{DetectorThread, FailureDetector, Findings, Manner, neighbours};
use crate::comm::registry;
use crate::comm::store::Store;
use crate::comm::summary::{self, Summary};
use crate::comm::wireup::{Directory, Purpose, Transports};
use crate::config::{AlgorithmChoice, Config, DumpSignal};
use crate::device::vendor::ending::Leaving;
use crate::engine::callbacks;
use crate::engine::completion::Finished;
use crate::engine::driver::{Driver, Polling, refused};
use crate::engine::flight_recorder::Recorder;
use crate::engine::heartbeat::Absence;
use crate::engine::message::{Direction, MessageRequest};
use crate::engine::progress::Engine;
use crate::engine::region::{Region, Spaces};
use crate::engine::request::Request;
use crate::engine::window::{RmaOp, RmaRequest};
use crate::error::{Error, InitError};
use crate::op::{CollectiveKind, Mode, Op, OpKind};
use crate::sync::{Arc, AtomicU64, Mutex, Ordering, Weak, lock};
use crate::sys::cache;
use crate::sys::cuda::StreamHandle;
use crate::sys::limits;
use crate::sys::numa::{self, Home};
use crate::sys::poller::Poller;
use crate::sys::team::Team;
use crate::topo::{Cpus, Topology};
use crate::transport::auth::Identity;
use crate::transport::shortage::Claim;
use crate::types::{Frame, Rank, Source};
use crate::window::WindowId;
use crate::work::{Submitted, Work};

/// What a communicator is made from.
#[derive(Clone)]
pub struct CommOptions {
    /// The name in messages. The same on every rank.
    pub name: String,
    /// This process's rank.
    pub rank: Rank,
    /// The number of ranks.
    pub size: usize,
    /// Where the ranks find each other. Keys of one communicator must not meet those of another.
    pub store: Arc<dyn Store>,
    /// The time limit of operations that have none of their own; the configuration's when absent. Joining takes no
    /// longer either, nor longer than the setting `connect_timeout_seconds`.
    pub timeout: Option<Duration>,
    /// Settings for this communicator alone, by name; see [`crate::config`].
    pub hints: Vec<(String, String)>,
}

/// One rank's handle on a communicator.
///
/// Operations are submitted in the same order on every rank. Collectives run in that order; point-to-point messages
/// run beside them. All methods may be called from any thread.
///
/// Methods such as [`all_reduce`](Communicator::all_reduce) take slices and return when the result is there.
/// [`submit`](Communicator::submit) takes any [`Op`] on memory that the caller looks after, and does not wait.
///
/// ```
/// use std::sync::Arc;
/// use ncclx_rs::comm::store::MemoryStore;
/// use ncclx_rs::{CommOptions, Communicator, Rank, ReduceOp};
///
/// let store = Arc::new(MemoryStore::default());
/// let ranks: Vec<_> = (0..2)
///     .map(|rank| {
///         let store = store.clone();
///         std::thread::spawn(move || -> Result<f32, ncclx_rs::Error> {
///             let options = CommOptions {
///                 name: "example".into(), rank: Rank(rank), size: 2, store, timeout: None, hints: vec![],
///             };
///             let comm = Communicator::new(options)?;
///             let mut value = [rank as f32 + 1.0];
///             comm.all_reduce(&mut value, ReduceOp::Sum)?;
///             comm.shutdown()?;
///             Ok(value[0])
///         })
///     })
///     .collect();
/// for rank in ranks {
///     assert_eq!(rank.join().unwrap()?, 3.0);
/// }
/// # Ok::<(), ncclx_rs::Error>(())
/// ```
pub struct Communicator {
    name: String,
    place: RankAndSize,
    timeout_millis: AtomicU64,
    configured_timeout: Duration,
    stack_frames: usize,
    /// Whether this rank may map other ranks' parts of windows.
    pub(super) maps_windows: bool,
    pub(super) driver: Arc<Driver>,
    pub(super) device: DeviceSide,
    /// None for a world of one, and when this rank has left.
    detector: Mutex<Option<FailureDetector>>,
    /// None when this rank has left.
    claim: Mutex<Option<Claim>>,
    pub(super) inherited: Inherited,
}

/// What a communicator made by `split` inherits from this one.
pub(super) struct Inherited {
    pub(super) hints: Vec<(String, String)>,
    /// The host of this communicator's store.
    pub(super) host: Option<String>,
}

impl Communicator {
    /// Joins the communicator. Returns once all ranks have joined, or fails on all that have when the time is over.
    pub fn new(options: CommOptions) -> Result<Communicator, InitError> {
        let CommOptions { name, rank, size, store, timeout, hints } = options;
        Communicator::bootstrap_with(name, rank, size, store.as_ref(), timeout, hints)
    }

    pub(super) fn bootstrap_with(
        name: String,
        rank: Rank,
        size: usize,
        store: &dyn Store,
        timeout: Option<Duration>,
        hints: Vec<(String, String)>,
    ) -> Result<Communicator, InitError> {
        if rank.index() >= size {
            return Err(InitError::Config(format!("communicator `{name}`: rank {rank} is not in [0, {size})")));
        }
        limits::raise_descriptors();
        let mut config = Config::resolve(&hints)?;
        config.numa_node = numa::settled(config.numa_node);
        // A shorter operation timeout also limits the wait for all ranks to join.
        config.connect_timeout = config.connect_timeout.min(timeout.unwrap_or(Duration::MAX));
        let os = |what: &str, cause: std::io::Error| InitError::Os {
            comm: name.clone(),
            what: what.to_owned(),
            cause: cause.to_string(),
        };
        let poller = Poller::new().map_err(|cause| os("the event poller", cause))?;
        let thread = DetectorThread::of_process().map_err(|cause| os("the watch for lost ranks", cause))?;
        let (mut transports, mut detector_transports) = (Transports::default(), Transports::default());
        let host = store.rendezvous_host();
        // What fails here is told to the ranks that this one meets.
        let manner = Manner::of(&config, &bootstrap::host_id(&config));
        let has_shm = config.transport.has_shm() && config.transport.has_others_than_ucx();
        let mut claim = Claim::new(size - 1, config.tcp_streams.get());
        let shares = claim.shares(config.shared_streams, &name);
        let shared = manner.as_ref().ok().filter(|_| shares).map(Manner::key);
        let open = |keys: &Keys| -> Result<BTreeMap<String, Vec<u8>>, InitError> {
            manner.as_ref().map_err(InitError::clone)?;
            let identity = Identity { comm: keys.comm_id, me: rank, size, secret: keys.secret };
            let open = |poller: &Poller, purpose| {
                let manner = shared.as_deref();
                Transports::open(&name, &identity, &config, poller, host.as_deref(), purpose, manner)
            };
            // Those of an attempt before watch the same.
            drop(std::mem::take(&mut transports));
            transports = open(&poller, Purpose::Data)?;
            let mut addresses = transports.addresses();
            if size > 1 {
                detector_transports = open(thread.poller(), Purpose::FailureDetector)?;
                // Its thread may run, and would be woken by neighbours that it cannot take in before this rank has joined.
                detector_transports.pause().map_err(|cause| os("the watch for lost ranks", cause))?;
                addresses.extend(detector_transports.addresses());
            }
            Ok(addresses)
        };
        let joined = bootstrap::join(&name, rank, size, store, &config, open);
        let manner = manner?;
        let Bootstrap { ranks, comm_id, secret, tuning, scratch_bytes } = joined?;
        Transports::check(&name, &ranks)?;
        config.algorithm = AlgorithmChoice::told(ranks[0].common.algorithm.as_deref());
        let hosts: Vec<&str> = ranks.iter().map(|info| &*info.host_id).collect();
        let nodes: Vec<Option<u32>> = ranks.iter().map(|info| info.cpus.node()).collect();
        let topo = Topology::new(&hosts).on_nodes(&nodes);
        transports.settle(&name, &topo);
        let own = ranks[rank.index()].clone();
        let routes = |opened: &Transports, peer: &RankInfo| opened.routes(&name, &own, &topo, &config, peer);
        let neighbours = neighbours(rank, size).into_iter().map(|peer| &ranks[peer.index()]);
        let neighbours = neighbours.map(|peer| Ok((peer.clone(), routes(&detector_transports, peer)?)));
        let neighbours = neighbours.collect::<Result<Vec<_>, InitError>>()?;
        let here = &topo.hosts()[topo.host_of(rank)];
        // Ranks of this host are reached by rings, which take none.
        if has_shm {
            claim = Claim::new(size - here.len(), config.tcp_streams.get());
        }
        let cores = Cpus::shared_by(here.iter().map(|rank| &ranks[rank.index()].cpus));
        let oversubscribed = here.len() > cores;
        let cpus = |rank: &Rank| &ranks[rank.index()].cpus;
        let team = Team::chosen(config.threads, || cpus(&rank).share(here.iter().map(cpus)));
        // One after the other, so that of a large world never both are in memory whole.
        let mut directory = Directory::default();
        for peer in ranks {
            directory.push(&if peer.rank == rank { vec![] } else { routes(&transports, &peer)? });
        }
        let home = config.numa_node.number().map(Home::at);
        let polling = Polling { time: config.spin.duration(oversubscribed), yield_when_idle: oversubscribed };
        if log::log_enabled!(log::Level::Info) {
            let first = directory.first_transports().map(|transport| transports.name(transport)).collect();
            let network = summary::network(&config, host.as_deref());
            let (name, topo, config, tuned) = (name.as_str(), &topo, &config, tuning.rows());
            let summary = Summary {
                name,
                rank,
                topo,
                config,
                transports: first,
                network,
                tuned,
                cores,
                is_oversubscribed: oversubscribed,
                team,
                home: home.as_ref(),
            };
            log::info!("{summary}");
        }
        let (transports, find_routes) = (transports.into_transports(), directory.into_routes());
        let watcher = Box::new(poller.clone());
        let mut engine = Engine::new(name.clone(), rank, topo, transports, find_routes, watcher);
        engine.id = comm_id.iter().map(|byte| format!("{byte:02x}")).collect();
        engine.context.recorder = Recorder::new(config.flight_recorder_size);
        let device = DeviceSide::new(&config, &own.host_id);
        engine.home = home;
        engine.dump_directory = config.dump_directory.map(PathBuf::from);
        engine.context.rndv.eager_bytes = config.eager_bytes.get();
        engine.context.rndv.single_copy_bytes = config.single_copy_bytes;
        engine.context.rndv.single_copy = config.single_copy;
        engine.context.rndv.hot_bytes = cache::second_level_bytes() / 2;
        engine.context.rndv.oversubscribed = oversubscribed || polling.time.is_zero();
        engine.context.rndv.team = team;
        engine.collectives.algorithm = config.algorithm.name().map(str::to_owned);
        engine.collectives.plans.tuning = tuning;
        engine.collectives.scratch_limit = ScratchLimit::at_most(scratch_bytes);
        // With two ranks, each notices by itself that the other is gone.
        engine.context.failures.is_watched = size > 2;
        let driver = Driver::new(engine, poller, polling);
        let signal = config.dump_signal.map(DumpSignal::number);
        registry::add(&driver, signal).map_err(|cause| os("the thread that listens for a signal", cause))?;
        let start_detector = || {
            let transports = detector_transports.into_transports();
            let identity = Identity { comm: comm_id, me: rank, size, secret };
            FailureDetector::start(identity, &manner, transports, neighbours, thread, report_to(&driver))
        };
        let detector = (size > 1).then(start_detector).transpose();
        let detector = detector.map_err(|cause| os("the thread that watches for lost ranks", cause))?;
        if let Some(detector) = &detector {
            let send_heartbeat = detector.heartbeat_sender();
            driver.with_engine(|engine| engine.collectives.send_heartbeat = Some(Box::new(send_heartbeat)));
        }
        let configured_timeout = config.timeout;
        let timeout = timeout.unwrap_or(configured_timeout);
        let place = RankAndSize { me: rank, size };
        let stack_frames = config.stack_frames;
        let inherited = Inherited { hints: hints_to_inherit(hints, config.algorithm.name()), host };
        let (timeout_millis, detector) = (AtomicU64::new(millis(timeout)), Mutex::new(detector));
        Ok(Communicator {
            name,
            place,
            timeout_millis,
            configured_timeout,
            stack_frames,
            maps_windows: has_shm,
            driver,
            device,
            detector,
            claim: Mutex::new(Some(claim)),
            inherited,
        })
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.place.me
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.place.size
    }

    /// The name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A number for the host of `rank`: ranks of one host have the same. None if there is no such rank, and in a forked child.
    pub fn host_of(&self, rank: Rank) -> Option<usize> {
        let of = |engine: &mut Engine| engine.context.topo.host_of(rank);
        (rank.index() < self.place.size).then(|| self.driver.with_engine_here(of)).flatten()
    }

    /// The number of collectives submitted so far; 0 in a forked child.
    pub fn sequence(&self) -> u64 {
        self.driver.with_engine_here(|engine| engine.collectives.next_sequence()).unwrap_or(0)
    }

    /// The time limit of operations that have none of their own.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_millis.load(Ordering::Relaxed))
    }

    /// Sets the time limit of operations submitted from now on that have none of their own.
    pub fn set_timeout(&self, timeout: Duration) {
        // Relaxed: the value stands alone.
        self.timeout_millis.store(millis(timeout), Ordering::Relaxed);
    }

    /// The time limit of the settings, which holds where no other was set.
    pub fn configured_timeout(&self) -> Duration {
        self.configured_timeout
    }

    /// The lost rank, if there is one, as an [`Error::PeerLost`]. Every later operation fails with it, and so do those in
    /// flight, unless they end at once. A loss is noticed within a second, also while nothing is in flight, unless the ranks that
    /// watch the lost one for this one have left. A forked child knows of none.
    pub fn loss(&self) -> Option<Error> {
        self.driver.with_engine_here(|engine| engine.loss()).flatten()
    }

    /// Registers a callback for [`Communicator::loss`]. It runs once a rank is lost and no operation is in flight any more, on
    /// a thread that the engine keeps for callbacks. It is dropped if the communicator closes before, or at the next
    /// registration.
    pub fn on_loss(&self, callback: impl FnOnce(Error) + Send + 'static) {
        self.driver.on_loss(Box::new(callback));
    }

    /// Submits an operation. A usage error means that nothing was sent and the communicator is as before.
    ///
    /// After [`Mode::Blocking`] the caller must wait for the work next: no other thread makes progress for it until then.
    pub fn submit(&self, op: Op) -> Result<Work, Error> {
        Ok(self.begin(&op)?.into_work(&self.driver))
    }

    /// Puts sends and receives on a stream of a device together, where they make progress together, and returns at once. The
    /// work ends when all of them have ended. The messages between two ranks should be in one batch at both.
    ///
    /// The first operation's time limit is that of all. A usage error means that nothing was sent.
    pub fn submit_batch(&self, ops: &[Op]) -> Result<Work, Error> {
        let first = check::batch(ops)?;
        let Mode::Stream(stream) = first.mode else { unreachable!("it has been checked") };
        self.device.run(self, ops, None, stream, first.timeout.unwrap_or_else(|| self.timeout()))
    }

    /// Submits an operation, which may complete here if the caller waits for it next.
    pub(super) fn begin(&self, op: &Op) -> Result<Submitted, Error> {
        let timeout = op.timeout.unwrap_or_else(|| self.timeout());
        if let Mode::Stream(stream) = op.mode {
            return self.begin_on_device(op, None, stream, timeout);
        }
        check::placement(op, Memory::Host)?;
        match op.kind {
            OpKind::Send { to, tag } => {
                check::memory(op)?;
                check::peer(op, "dst", to, self.place.size)?;
                self.message(op, Direction::Send(to), tag, Region::of(&op.inputs), timeout)
            }
            OpKind::Recv { from, tag } => {
                check::memory(op)?;
                if let Source::Rank(rank) = from {
                    check::peer(op, "src", rank, self.place.size)?;
                }
                self.message(op, Direction::Receive(from), tag, Region::of(&op.outputs), timeout)
            }
            OpKind::AllGatherPersistent { window } => self.gather_into_window(op, window, timeout),
            ref kind if kind.is_access() => self.access(op, timeout),
            _ => self.collective(op, None, timeout),
        }
    }

    // Apart from what runs on the host, whose calls are short.
    #[inline(never)]
    pub(super) fn begin_on_device(
        &self,
        op: &Op,
        factor: Option<Buffer>,
        stream: StreamHandle,
        timeout: Duration,
    ) -> Result<Submitted, Error> {
        check::placement(op, Memory::Device(stream.device()))?;
        self.device.run(self, std::slice::from_ref(op), factor, stream, timeout).map(Submitted::Pending)
    }

    /// Begins a collective. `called`: the kind that ranks must agree on and errors name, where it is not that of `op` (window
    /// registration).
    pub(super) fn collective(
        &self,
        op: &Op,
        called: Option<CollectiveKind>,
        timeout: Duration,
    ) -> Result<Submitted, Error> {
        let checked = check::collective(op, called, self.place)?;
        if self.device.is_mixed()
            && let Some(begun) = self.begin_among_islands(op, &checked, timeout)?
        {
            return Ok(begun);
        }
        self.enter(op, |engine, driver| {
            let (input, output) = (Region::of(&op.inputs), Region::of(&op.outputs));
            let request = Request {
                collective: checked.collective,
                signature: checked.signature,
                reduce: op.kind.reduce_op(),
                dtype: checked.dtype,
                spaces: Spaces::new(input, output, checked.dtype.size()),
                timeout,
            };
            Ok(engine.start_collective(request, op.mode == Mode::Blocking, driver))
        })
    }

    /// Begins an all_gather into a window, in which ranks write to each other's parts where that is faster. All decide alike.
    #[inline(never)]
    fn gather_into_window(&self, op: &Op, window: WindowId, timeout: Duration) -> Result<Submitted, Error> {
        let checked = check::into_window(op, window, self.place)?;
        self.enter(op, |engine, driver| {
            let known = engine.windows.window(window);
            let known = known.ok_or_else(|| check::unknown_window(op.kind.name(), window))?;
            check::persistent(op, known, engine.windows.own_address(window).unwrap_or(0), self.place)?;
            let Checked { mut collective, dtype, signature } = checked;
            let mut spaces = Spaces::new(Region::of(&op.inputs), Region::of(&op.outputs), dtype.size());
            let named = engine.collectives.algorithm.as_deref();
            let is_faster = |count: usize| count.saturating_mul(dtype.size()) >= put::MIN_BYTES;
            if let Some(parts) = engine.windows.parts(window)
                && let Some(put) = put::instead_of(&collective, named, is_faster)
            {
                collective = put;
                spaces.parts = Some(parts);
            }
            let request = Request { collective, signature, reduce: None, dtype, spaces, timeout };
            Ok(engine.start_collective(request, op.mode == Mode::Blocking, driver))
        })
    }

    fn message(
        &self,
        op: &Op,
        direction: Direction,
        tag: crate::types::Tag,
        region: Region,
        timeout: Duration,
    ) -> Result<Submitted, Error> {
        self.enter(op, |engine, driver| {
            let request = MessageRequest { direction, tag, region, timeout };
            Ok(engine.run_message(request, op.mode == Mode::Blocking, driver))
        })
    }

    /// Begins a one-sided access to a window.
    fn access(&self, op: &Op, timeout: Duration) -> Result<Submitted, Error> {
        check::memory(op)?;
        let (argument, window, peer, access) = match op.kind {
            OpKind::Put { window, to, offset } => {
                ("dst", window, to, RmaOp::Put { offset, from: Region::of(&op.inputs) })
            }
            OpKind::Get { window, from, offset } => {
                ("src", window, from, RmaOp::Get { offset, into: Region::of(&op.outputs) })
            }
            OpKind::Accumulate { window, to, offset } => {
                let dtype = check::addends(op)?;
                ("dst", window, to, RmaOp::Accumulate { offset, from: Region::of(&op.inputs), dtype })
            }
            OpKind::Flush { window, to } => ("dst", window, to, RmaOp::Flush),
            OpKind::Signal { window, to } => ("dst", window, to, RmaOp::Signal),
            OpKind::WaitSignal { window, from } => ("src", window, from, RmaOp::WaitSignal),
            _ => unreachable!("`begin` has matched on the kind"),
        };
        let name = op.kind.name();
        check::peer(op, argument, peer, self.place.size)?;
        let mut copies = None;
        let (begun, left) = self.begin_entered(op, |engine, driver| {
            let known = engine.windows.window(window).ok_or_else(|| check::unknown_window(name, window))?;
            check::access(name, known, Memory::Host, peer, access.range())?;
            let entry = engine.begin(access.call(peer, window), access.bytes());
            let work = Work::new(driver.clone(), entry);
            // What goes to a rank that is lost fails there.
            let reached = engine.windows.reached(window, peer).filter(|_| engine.context.lost(peer).is_none());
            match (&access, reached) {
                (RmaOp::Put { .. } | RmaOp::Get { .. }, Some(parts)) => {
                    engine.windows.copy_begins(window);
                    copies = Some((parts, access, work.clone(), engine.context.rndv.team));
                }
                _ => engine.submit_rma(RmaRequest { window, peer, access, timeout, work: work.clone() }),
            }
            Ok(Submitted::Pending(work))
        })?;
        if let Some((parts, access, work, team)) = copies {
            // Without the engine's lock: it may be long.
            match access {
                RmaOp::Put { offset, from } => parts.of(peer.index(), offset, from.len()).copy_from(&from, team),
                RmaOp::Get { offset, mut into } => {
                    let len = into.len();
                    into.copy_from(&parts.of(peer.index(), offset, len), team);
                }
                _ => unreachable!("only puts and gets are copies"),
            }
            self.driver.with_engine(|engine| engine.windows.copy_ends(window));
            self.driver.end(&work, Ok(()));
        }
        // After the copy, for which an abort waits: callbacks may abort.
        self.hand_over(left);
        Ok(begun)
    }

    /// Runs `begin` on the open engine. Makes the first progress on an asynchronous operation here, and hands the rest over to
    /// the progress thread.
    pub(super) fn enter(
        &self,
        op: &Op,
        begin: impl FnOnce(&mut Engine, &Arc<Driver>) -> Result<Submitted, Error>,
    ) -> Result<Submitted, Error> {
        let (begun, left) = self.begin_entered(op, begin)?;
        self.hand_over(left);
        Ok(begun)
    }

    /// As [`enter`](Communicator::enter), without handing over what is left.
    fn begin_entered(
        &self,
        op: &Op,
        begin: impl FnOnce(&mut Engine, &Arc<Driver>) -> Result<Submitted, Error>,
    ) -> Result<(Submitted, Option<Left>), Error> {
        self.driver.check_here(op.kind.name())?;
        let begun = self.driver.with_engine(|engine| {
            engine.check_open(op.kind.name())?;
            let begun = begin(engine, &self.driver)?;
            let Submitted::Pending(work) = &begun else {
                // Nobody waits for it any more, also if a transport has bytes of it that have not left.
                let needs_progress = engine.context.endpoints.holds_bytes();
                return Ok((begun, needs_progress.then(|| Left { finished: Finished::new(), needs_progress })));
            };
            engine.write_due_dump();
            if op.mode == Mode::Async {
                for _ in 0..FIRST_STEPS {
                    if work.is_done() || !engine.progress(false) {
                        break;
                    }
                }
            }
            // Also if the work itself is done: its bytes may wait in a stream that the peer has not accepted yet. Whoever waits for a
            // work that is not done makes progress.
            let holds_bytes = || work.is_done() && engine.context.endpoints.is_busy();
            let needs_progress = if op.mode == Mode::Async { engine.is_busy() } else { holds_bytes() };
            let mut finished = engine.take_finished();
            // The caller does not have this one yet.
            finished.retain(|other| !other.is(work));
            Ok((begun, Some(Left { finished, needs_progress })))
        });
        begun.inspect_err(refused)
    }

    fn hand_over(&self, left: Option<Left>) {
        let Some(Left { finished, needs_progress }) = left else { return };
        // This caller may never wait, so the waiters of operations that have completed in this call are notified here.
        self.driver.tell(finished);
        if needs_progress {
            // Its memory is in use: whoever waits for it makes progress also without the thread.
            self.driver.want_progress_thread();
        }
    }

    /// Sets the numbers of this communicator's ranks in the job, which the flight recorder writes. The recorder writes this
    /// communicator's own numbers if none are set, or if the list has another length than the communicator.
    pub fn set_members(&self, members: Vec<Rank>) {
        if members.len() == self.place.size {
            self.driver.with_engine_here(|engine| engine.members = members);
        }
    }

    /// How many frames of the caller's stack the flight recorder keeps of each operation.
    pub fn stack_frames(&self) -> usize {
        self.stack_frames
    }

    /// Tells the flight recorder where the program called an operation: frames with the innermost first.
    pub fn called_from(&self, work: &Work, stack: Vec<Frame>) {
        self.driver.with_engine_here(|engine| engine.context.recorder.called_from(work.number(), stack));
    }

    /// The flight recorder's operations and what this rank knows of its peers, as JSON with `reason`. `ncclx-rs diagnose`
    /// reads this format; see `docs/diagnosis.md`. Empty in a forked child.
    pub fn dump(&self, reason: &str) -> String {
        self.driver.with_engine_here(|engine| engine.dump(reason)).unwrap_or_default()
    }

    /// Writes [`Communicator::dump`] to a file in `folder` that only its owner can read, and returns its path.
    ///
    /// # Errors
    /// The system's error if the folder or the file cannot be written, and one in a forked child.
    pub fn write_dump(&self, folder: &Path, reason: &str) -> std::io::Result<PathBuf> {
        self.driver.check_here("write_dump").map_err(std::io::Error::other)?;
        self.driver.with_engine(|engine| engine.dump_file(folder.to_owned(), reason)).write()
    }

    /// Ends every operation in flight on this rank with an error that gives `reason`. The other ranks are told that this rank
    /// has left; their operations that need it fail. Idempotent; callable while other threads wait. Copies that other threads make
    /// to or from parts of windows by themselves are waited for. In a forked child it does nothing, like
    /// [`Communicator::shutdown`] and drop.
    pub fn abort(&self, reason: &str) {
        if !self.driver.is_here() {
            return;
        }
        let how = format!("aborted: {reason}");
        self.driver.with_engine(|engine| {
            if engine.closed().is_none() && !engine.is_settled() {
                engine.dump_failure(&how);
            }
        });
        self.close(&how, Leaving::AfterFailure);
    }

    /// Waits a short while for operations in flight, then leaves, which is no loss to the other ranks. Idempotent.
    pub fn shutdown(&self) -> Result<(), Error> {
        if !self.driver.is_here() {
            return Ok(());
        }
        self.device.drain(OPERATIONS_TIMEOUT);
        let now = Instant::now();
        let settled = |engine: &mut Engine| engine.closed().is_some() || engine.has_ended();
        self.driver.drive_until(|driver| driver.with_engine(settled), now.checked_add(OPERATIONS_TIMEOUT));
        self.driver.with_engine(|engine| {
            if let Some(text) = engine.collectives.late_failure() {
                log::warn!("communicator `{}`: {text}", self.name);
            }
            engine.announce_failure();
        });
        let flushed = |engine: &mut Engine| engine.closed().is_some() || engine.flushed();
        let flush = || {
            let deadline = Instant::now().checked_add(FLUSH_TIMEOUT);
            self.driver.drive_until(|driver| driver.with_engine(flushed), deadline);
            self.driver.with_engine(flushed)
        };
        flush_while_bytes_move(flush, || self.driver.with_engine(|engine| engine.unsent()));
        // Taken out of its lock first: an abort meanwhile does not wait for the goodbye. After an abort it is the abort's.
        let taken = self.driver.with_engine(|engine| {
            let is_open = engine.closed().is_none();
            let detector = is_open.then(|| lock(&self.detector).take()).flatten()?;
            // Ranks that wait for this one in what it has not finished are to hear why it leaves.
            let departed = if engine.has_ended() { None } else { engine.departure("shut down") };
            Some((detector, departed, engine.loss().is_some()))
        });
        match taken {
            Some((detector, Some(departed), _)) => detector.announce_departure(departed, ABORT_TIMEOUT),
            Some((detector, None, has_loss)) => {
                detector.say_goodbye(if has_loss { Duration::ZERO } else { GOODBYE_TIMEOUT });
            }
            None => {}
        }
        self.close("shut down", Leaving::Well);
        Ok(())
    }

    fn close(&self, how: &str, leaving: Leaving) {
        self.device.leave(&self.name, how, leaving);
        let (departed, on_loss, leaving) = self.driver.with_engine(|engine| {
            let departed = engine.departure(how);
            let leaving = if engine.loss().is_some() { Leaving::AfterFailure } else { leaving };
            engine.close(how);
            (departed, engine.forget_on_loss(), leaving)
        });
        // What it owns may be another communicator.
        drop(on_loss);
        self.driver.flush_finished();
        self.driver.close();
        self.device.close(leaving);
        lock(&self.claim).take();
        let detector = lock(&self.detector).take();
        match (detector, departed) {
            (Some(detector), Some(departed)) => detector.announce_departure(departed, ABORT_TIMEOUT),
            (Some(detector), None) => detector.say_goodbye(Duration::ZERO),
            (None, _) => {}
        }
        // Their memory may go from here on.
        self.await_copies();
    }
}

/// What a call has left to do once the engine's lock is free.
struct Left {
    /// Other operations, which have ended in it.
    finished: Finished,
    needs_progress: bool,
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.driver.is_here() {
            self.close("dropped", Leaving::Well);
        }
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator").field("name", &self.name).field("place", &self.place).finish_non_exhaustive()
    }
}

/// Passes what the failure detector finds on to the communicator's operations.
fn report_to(driver: &Arc<Driver>) -> impl Fn(&Findings) -> Option<Instant> + use<> {
    let this = Arc::downgrade(driver);
    move |findings| {
        let driver = this.upgrade()?;
        if !findings.heartbeats.is_empty() {
            let absences = driver.heartbeats_arrive(&findings.heartbeats);
            if !absences.is_empty() {
                let this = this.clone();
                // This thread must not wait for the locks of other communicators.
                callbacks::call_elsewhere(Box::new(move || tell_absences(&this, &absences)));
            }
        }
        driver.departed(&findings.departed)
    }
}

/// Tells others, which wait for the rank of this communicator, what that does instead.
fn tell_absences(driver: &Weak<Driver>, absences: &[Absence]) {
    if let Some(driver) = driver.upgrade()
        && let Some(in_flight) = registry::oldest_in_flight(&driver)
    {
        absences.iter().for_each(|absence| driver.tell_absence(*absence, in_flight.clone()));
    }
}

/// The hints for a communicator made by `split`. Another rank may be its rank 0, so every rank sets the algorithm that rank 0
/// has chosen for all.
fn hints_to_inherit(mut hints: Vec<(String, String)>, algorithm: Option<&str>) -> Vec<(String, String)> {
    hints.extend(algorithm.map(|algorithm| ("algorithm".to_owned(), algorithm.to_owned())));
    hints
}

fn millis(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)
}

/// Calls `flush`, which tries for a while, until it has flushed everything, or nothing of what is `unsent` has moved meanwhile.
fn flush_while_bytes_move(mut flush: impl FnMut() -> bool, mut unsent: impl FnMut() -> usize) {
    let mut before = unsent();
    while !flush() {
        let left = unsent();
        if left >= before {
            return;
        }
        before = left;
    }
}

/// How many turns of progress an asynchronous submission makes in the call.
const FIRST_STEPS: usize = 4;

/// How long `shutdown` waits for operations in flight.
const OPERATIONS_TIMEOUT: Duration = Duration::from_secs(10);

/// How long `shutdown` waits until its goodbye is sent. A neighbour may have only just joined.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long `abort` waits for the same. Open connections take a notice at once; only a new one needs time.
const ABORT_TIMEOUT: Duration = Duration::from_secs(1);

/// How long `shutdown` waits for bytes to move that no operation waits for, such as those of a send that has been copied, or the
/// report of a failure.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_goes_on_as_long_as_bytes_move() {
        let tried = |unsent: &[usize]| {
            let (mut tries, mut left) = (0, unsent.iter().copied());
            flush_while_bytes_move(
                || {
                    tries += 1;
                    tries == 4
                },
                || left.next().expect("a number"),
            );
            tries
        };
        assert_eq!(tried(&[900, 500, 30, 0]), 4);
        assert_eq!(tried(&[900, 500, 500]), 2, "a peer that takes nothing");
        assert_eq!(tried(&[900, 901]), 1);
        assert_eq!(tried(&[0, 0]), 1, "bytes that the system holds");
    }
}
