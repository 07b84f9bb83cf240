//! A group of ranks that communicate, and one rank's handle on it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::comm::bootstrap::{self, Bootstrap, Keys};
use crate::comm::check::{self, Place};
use crate::comm::failure_detector::{Watch, Watchman, neighbours};
use crate::comm::registry;
use crate::comm::store::Store;
use crate::comm::summary::{self, Summary};
use crate::comm::wireup::{Links, Purpose};
use crate::config::{Config, DumpSignal};
use crate::engine::collective::Request;
use crate::engine::connector::Route;
use crate::engine::driver::{Driver, Polling};
use crate::engine::flight_recorder::Recorder;
use crate::engine::message::{Direction, MessageRequest};
use crate::engine::progress::Engine;
use crate::engine::region::{Region, Spaces};
use crate::error::{Error, InitError};
use crate::op::{CollectiveKind, Mode, Op, OpKind};
use crate::sync::{Arc, AtomicU64, Mutex, Ordering, lock};
use crate::sys::limits;
use crate::sys::poller::Poller;
use crate::topo::{Cpus, Topology};
use crate::transport::auth::Identity;
use crate::types::{Frame, Rank, Source};
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
    /// The time limit of operations that have none of their own; the configuration's when absent.
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
    place: Place,
    timeout_millis: AtomicU64,
    configured_timeout: Duration,
    stack_frames: usize,
    pub(super) driver: Arc<Driver>,
    /// None for a world of one, and when this rank has left.
    watch: Mutex<Option<Watch>>,
    pub(super) origin: Origin,
}

/// What those that split off take over.
pub(super) struct Origin {
    pub(super) hints: Vec<(String, String)>,
    /// Where the store was.
    pub(super) host: Option<String>,
}

impl Communicator {
    /// Joins the communicator: returns once every rank has come, or fails after the configured time on all that came.
    pub fn new(options: CommOptions) -> Result<Communicator, InitError> {
        let CommOptions { name, rank, size, store, timeout, hints } = options;
        Communicator::meet(name, rank, size, store.as_ref(), timeout, hints)
    }

    pub(super) fn meet(
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
        // Who gives operations less time than joining has does not want to wait longer for that either.
        config.connect_timeout = config.connect_timeout.min(timeout.unwrap_or(Duration::MAX));
        let os = |what: &str, cause: std::io::Error| InitError::Os {
            comm: name.clone(),
            what: what.to_owned(),
            cause: cause.to_string(),
        };
        let poller = Poller::new().map_err(|cause| os("the event poller", cause))?;
        let watchman = Watchman::on_duty().map_err(|cause| os("the watch for lost ranks", cause))?;
        let (mut links, mut news) = (Links::default(), Links::default());
        let host = store.rendezvous_host();
        let open = |keys: &Keys| -> Result<BTreeMap<String, Vec<u8>>, InitError> {
            let identity = Identity { comm: keys.comm_id, me: rank, size, secret: keys.secret };
            let open =
                |poller: &Poller, purpose| Links::open(&name, &identity, &config, poller, host.as_deref(), purpose);
            links = open(&poller, Purpose::Data)?;
            let mut addresses = links.addresses();
            if size > 1 {
                news = open(watchman.poller(), Purpose::News)?;
                addresses.extend(news.addresses());
            }
            Ok(addresses)
        };
        let Bootstrap { ranks, comm_id, tuning, .. } = bootstrap::join(&name, rank, size, store, &config, open)?;
        config.algorithm = ranks[0].algorithm.clone();
        let hosts: Vec<&str> = ranks.iter().map(|info| info.host_id.as_str()).collect();
        let topo = Topology::new(&hosts);
        let route = |links: &Links, peer| links.routes(&name, rank, &topo, &ranks, &config, peer);
        let reach = |peer| if peer == rank { Ok(vec![]) } else { route(&links, peer) };
        let routes: Vec<Vec<Route>> = (0..size).map(Rank::from).map(reach).collect::<Result<_, _>>()?;
        let watched = neighbours(rank, size).into_iter().map(|peer| Ok((peer, route(&news, peer)?)));
        let watched = watched.collect::<Result<Vec<_>, InitError>>()?;
        let here = &topo.hosts()[topo.host_of(rank)];
        let cores = Cpus::shared_by(here.iter().map(|rank| &ranks[rank.index()].cpus));
        let oversubscribed = here.len() > cores;
        let polling = Polling { time: config.spin.duration(oversubscribed), yields: oversubscribed };
        if log::log_enabled!(log::Level::Info) {
            let transports = routes.iter().filter_map(|routes| Some(links.name(routes.first()?.transport))).collect();
            let network = summary::network(&config, host.as_deref());
            let (name, topo, config, tuned) = (name.as_str(), &topo, &config, tuning.rows());
            let summary = Summary {
                name,
                rank,
                topo,
                config,
                transports,
                network,
                tuned,
                cores,
                is_oversubscribed: oversubscribed,
            };
            log::info!("{summary}");
        }
        let mut engine = Engine::new(name.clone(), rank, topo, links.into_transports(), routes);
        engine.id = comm_id.iter().map(|byte| format!("{byte:02x}")).collect();
        engine.recorder = Recorder::new(config.flight_records);
        engine.dump_directory = config.dump_directory.map(PathBuf::from);
        engine.eager_bytes = config.eager_bytes.get();
        engine.single_copy_bytes = config.single_copy_bytes;
        engine.oversubscribed = oversubscribed || polling.time.is_zero();
        engine.algorithm.clone_from(&config.algorithm);
        engine.collectives.plans.tuning = tuning;
        // With one other rank, it is nobody else.
        engine.is_watched = size > 2;
        let driver = Driver::new(engine, poller, polling);
        let watch = (size > 1).then(|| Watch::begin(rank, &ranks, news.into_transports(), watched, watchman, &driver));
        let watch = watch.transpose().map_err(|cause| os("the thread that watches for lost ranks", cause))?;
        let signal = config.dump_signal.map(DumpSignal::number);
        registry::add(&driver, signal).map_err(|cause| os("the thread that listens for a signal", cause))?;
        let configured_timeout = config.timeout;
        let timeout = timeout.unwrap_or(configured_timeout);
        let place = Place { me: rank, size };
        let stack_frames = config.stack_frames;
        let origin = Origin { hints: inherited(hints, config.algorithm.as_deref()), host };
        let (timeout_millis, watch) = (AtomicU64::new(millis(timeout)), Mutex::new(watch));
        Ok(Communicator { name, place, timeout_millis, configured_timeout, stack_frames, driver, watch, origin })
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

    /// A number for the host that `rank` is on: ranks of one host have the same. Nothing for ranks there are not.
    pub fn host_of(&self, rank: Rank) -> Option<usize> {
        (rank.index() < self.place.size).then(|| self.driver.with_engine(|engine| engine.topo.host_of(rank)))
    }

    /// The number of collectives submitted so far.
    pub fn sequence(&self) -> u64 {
        self.driver.with_engine(|engine| engine.collectives.next_sequence())
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

    /// The time limit that settings and the environment give, which holds where no other was set.
    pub fn configured_timeout(&self) -> Duration {
        self.configured_timeout
    }

    /// The rank that is lost, if one is, as an [`Error::PeerLost`]: what every operation fails with from then on, and those
    /// in flight unless they end at once. It is noticed within a second, also while nothing is in flight.
    pub fn loss(&self) -> Option<Error> {
        self.driver.with_engine(|engine| engine.loss())
    }

    /// Has `tell` called with [`Communicator::loss`] once a rank is lost and no operation is in flight any more, on a thread
    /// that the engine keeps for such calls. It is dropped when the communicator closes before that, or another is given.
    pub fn on_loss(&self, tell: impl FnOnce(Error) + Send + 'static) {
        self.driver.on_loss(Box::new(tell));
    }

    /// Begins an operation. A usage error means that nothing was sent and the communicator is as before.
    ///
    /// After [`Mode::Blocking`] the caller waits for the work next; nobody else drives it until then.
    pub fn submit(&self, op: Op) -> Result<Work, Error> {
        Ok(self.begin(&op)?.into_work(&self.driver))
    }

    /// Begins an operation, which may end here if the caller waits for it next.
    pub(super) fn begin(&self, op: &Op) -> Result<Submitted, Error> {
        let timeout = op.timeout.unwrap_or_else(|| self.timeout());
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
            OpKind::Put { .. } | OpKind::Get { .. } | OpKind::Signal { .. } | OpKind::WaitSignal { .. } => {
                self.access(op, timeout)
            }
            _ => self.collective(op, None, timeout),
        }
    }

    /// Begins a collective, which may be called otherwise than by what it does.
    pub(super) fn collective(
        &self,
        op: &Op,
        called: Option<CollectiveKind>,
        timeout: Duration,
    ) -> Result<Submitted, Error> {
        let checked = check::collective(op, called, self.place)?;
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

    /// Runs `begin` on the open core, and for asynchronous operations takes the first steps at once and has the rest driven
    /// in the background.
    pub(super) fn enter(
        &self,
        op: &Op,
        begin: impl FnOnce(&mut Engine, &Arc<Driver>) -> Result<Submitted, Error>,
    ) -> Result<Submitted, Error> {
        if !self.driver.is_here() {
            return Err(self.driver.forked_error(op.kind.name()));
        }
        let (begun, left) = self.driver.with_engine(|engine| {
            if let Some(how) = &engine.closed {
                return Err(engine.closed_error(op.kind.name(), how));
            }
            if let Some(error) = engine.loss_of(op.kind.name()) {
                return Err(error);
            }
            let begun = begin(engine, &self.driver)?;
            let Submitted::Pending(work) = &begun else { return Ok((begun, None)) };
            engine.dump_due();
            if op.mode == Mode::Async {
                for _ in 0..FIRST_STEPS {
                    if work.is_done() || !engine.progress(false) {
                        break;
                    }
                }
            }
            // Also when the work itself is done: its bytes may wait in a stream that the peer has not accepted yet.
            let is_left_alone = op.mode == Mode::Async && engine.is_busy();
            let mut finished = std::mem::take(&mut engine.finished);
            // Nobody can know of this one yet.
            finished.retain(|other| !other.is(work));
            Ok((begun, Some((finished, is_left_alone))))
        })?;
        let Some((finished, is_left_alone)) = left else { return Ok(begun) };
        // Who has nothing to wait for drives nothing, so threads whose operations have ended with this one are told here.
        self.driver.tell(finished);
        if is_left_alone {
            self.driver.hand_over().map_err(|cause| InitError::Os {
                comm: self.name.clone(),
                what: "the background thread".to_owned(),
                cause: cause.to_string(),
            })?;
        }
        Ok(begun)
    }

    /// Has the flight recorder call the ranks by their numbers in the job, of which this communicator may be a part.
    /// Without, and where there are not as many as ranks, it calls them as this communicator does.
    pub fn set_members(&self, members: Vec<Rank>) {
        if members.len() == self.place.size {
            self.driver.with_engine(|engine| engine.members = members);
        }
    }

    /// How many frames of the caller's stack the flight recorder wants of each operation.
    pub fn stack_frames(&self) -> usize {
        self.stack_frames
    }

    /// Tells the flight recorder where the program called an operation: frames with the innermost first.
    pub fn called_from(&self, work: &Work, stack: Vec<Frame>) {
        self.driver.with_engine(|engine| engine.recorder.called_from(work.number(), stack));
    }

    /// What the flight recorder remembers, with what this rank knows of the others, as JSON; `reason` becomes a part of it.
    /// The format is that of the files that `ncclx-rs diagnose` reads; see `docs/diagnosis.md`.
    pub fn dump(&self, reason: &str) -> String {
        self.driver.with_engine(|engine| engine.dump(reason))
    }

    /// Writes [`Communicator::dump`] to a file in `folder`, which only its owner can read, and returns its name.
    ///
    /// # Errors
    /// What the system says of the folder or the file.
    pub fn write_dump(&self, folder: &Path, reason: &str) -> std::io::Result<PathBuf> {
        self.driver.with_engine(|engine| engine.write_dump(folder, reason))
    }

    /// Ends every operation in flight with an error that says `reason`, on this rank. The others are told that it has left,
    /// and fail at what needs it. Idempotent; callable while other threads wait. In a forked child it does nothing, as the
    /// other ways to end a communicator.
    pub fn abort(&self, reason: &str) {
        if !self.driver.is_here() {
            return;
        }
        let how = format!("aborted: {reason}");
        self.driver.with_engine(|engine| {
            if engine.closed.is_none() && !engine.is_settled() {
                engine.dump_failure(&how);
            }
        });
        self.close(&how);
    }

    /// Lets what is in flight finish within a short grace, then leaves, which is no loss to the others. Idempotent.
    pub fn shutdown(&self) -> Result<(), Error> {
        if !self.driver.is_here() {
            return Ok(());
        }
        let now = Instant::now();
        let settled = |engine: &mut Engine| engine.closed.is_some() || engine.is_settled();
        self.driver.drive_until(|driver| driver.with_engine(settled), now.checked_add(OPERATIONS_GRACE));
        self.driver.with_engine(Engine::announce_failure);
        let flushed = |engine: &mut Engine| engine.closed.is_some() || engine.flushed();
        self.driver.drive_until(|driver| driver.with_engine(flushed), Instant::now().checked_add(PROTOCOL_GRACE));
        if let Some(watch) = lock(&self.watch).take() {
            let all_know = self.driver.with_engine(|engine| engine.loss().is_some());
            watch.say_goodbye(if all_know { Duration::ZERO } else { GOODBYE_GRACE });
        }
        self.close("shut down");
        Ok(())
    }

    fn close(&self, how: &str) {
        let departed = self.driver.with_engine(|engine| {
            let departed = engine.departure(how);
            engine.close(how);
            departed
        });
        self.driver.flush_finished();
        self.driver.close();
        let watch = lock(&self.watch).take();
        match (watch, departed) {
            (Some(watch), Some(departed)) => watch.say_gone(departed, ABORT_GRACE),
            (Some(watch), None) => watch.say_goodbye(Duration::ZERO),
            (None, _) => {}
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.driver.is_here() {
            self.close("dropped");
        }
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator").field("name", &self.name).field("place", &self.place).finish_non_exhaustive()
    }
}

/// The settings of a communicator for those that split off, whose rank 0 may be another: what rank 0 decided for all is
/// every rank's own there.
fn inherited(mut hints: Vec<(String, String)>, algorithm: Option<&str>) -> Vec<(String, String)> {
    hints.extend(algorithm.map(|algorithm| ("algorithm".to_owned(), algorithm.to_owned())));
    hints
}

fn millis(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)
}

/// How many turns of progress an asynchronous submission makes itself.
const FIRST_STEPS: usize = 4;

/// How long `shutdown` waits for operations in flight.
const OPERATIONS_GRACE: Duration = Duration::from_secs(10);

/// How long `shutdown` waits until those that watch this rank know that it leaves. They may have just begun.
const GOODBYE_GRACE: Duration = Duration::from_secs(5);

/// How long `abort` does. Connections that are made take news at once; only one that has just begun needs time.
const ABORT_GRACE: Duration = Duration::from_secs(1);

/// How long `shutdown` waits for bytes that no operation waits for, such as news of a failure.
const PROTOCOL_GRACE: Duration = Duration::from_secs(1);
