//! A vendor's library that runs collectives and carries messages: [`choice`] decides whether ranks use it, or [`alike`] which, [`calls`] turns a
//! collective into its calls, and by a [`split`] the parts of a communicator get theirs. What calls pass of some memory is
//! [`registered`] first.
//!
//! The library's operations stand between the same words, in the same log and in the same order as the programs of the
//! [`executor`](super::executor), which also runs what the library does not have. No call of the library blocks: its own
//! threads begin communicators and put calls on streams, and this module waits for them. Threads that look at what is in flight
//! [ask](Runner) for failures.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::config::NcclFields;
use crate::deadline::nap;
use crate::device::in_flight::{InFlight, Runner};
use crate::device::regions::Regions;
use crate::device::setup::{AllGather, Member, named, tell};
use crate::error::{Error, InitError};
use crate::sync::{Arc, AtomicBool, AtomicU64, Mutex, OnceLock, Ordering, Weak, lock};
use crate::sys::cuda::{CudaError, Current, Stream};
use crate::sys::fork::Origin;
use crate::sys::nccl::{Feature, Nccl, NcclCall, NcclComm, NcclError, Progress, UniqueId};
use crate::types::Rank;

pub(crate) mod alike;
pub(crate) mod calls;
pub(crate) mod captured;
pub(crate) mod choice;
pub(crate) mod ending;
pub(crate) mod part;
mod registered;
pub(crate) mod split;

use choice::{Decision, Offer, decide};
use ending::{Ending, abort_aside};
use part::Part;

/// A communicator of a library, and what begins another one once it was given up.
///
/// Dropped before it [ends](VendorComm::end), it is given up.
#[derive(Debug)]
pub(crate) struct VendorComm {
    chosen: Chosen,
    origin: Origin,
    raw: Mutex<Arc<NcclComm>>,
    is_given_up: AtomicBool,
    /// How often it was split.
    splits: AtomicU64,
    /// The ends of messages that have been put on streams, which the library has connected.
    connected: Mutex<BTreeSet<MessageEnd>>,
    /// The lane that is told when it is given up.
    lane: OnceLock<Weak<InFlight>>,
}

/// A rank to which messages go, or from which they come.
type MessageEnd = (u32, MessageWay);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum MessageWay {
    Goes,
    Comes,
}

/// How far a call waits until the library has put its calls on streams.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    /// Until the watch gives the communicator up, once the time of what is in flight is over.
    Watched,
    /// For so long, and gives the communicator up itself then: nothing is in flight in a capture.
    Limit(Duration),
}

/// What a rank's communicator is at when ranks begin anew.
#[derive(Debug, Serialize, Deserialize)]
struct Condition {
    /// Whether it may have been used otherwise than on the other ranks.
    is_touched: bool,
    /// Whether CUDA graphs have calls of it.
    is_held: bool,
}

/// A rank that is about to decide with all others.
#[derive(Debug)]
pub(crate) struct Candidate<'a> {
    pub(crate) comm: &'a str,
    pub(crate) me: Rank,
    pub(crate) names: &'a [Rank],
    /// As in [`Chosen`].
    pub(crate) limit: Duration,
    pub(crate) fields: Arc<NcclFields>,
    pub(crate) ranks_per_root: usize,
    pub(crate) offer: Offer,
    pub(crate) library: Option<Arc<Nccl>>,
    /// What the program has lent for calls.
    pub(crate) lent: Arc<Mutex<Regions>>,
    /// What the ranks need not begin, where it was split from the communicator of others.
    pub(crate) part: Option<Part>,
}

/// How a rank's communicator of the library has begun.
#[derive(Debug, Serialize, Deserialize)]
enum Beginning {
    Begun,
    /// Other ranks have not come in time.
    Late,
    Failed(String),
}

impl Candidate<'_> {
    /// Decides with all ranks. Returns what they begin communicators of the library with, if they use one,
    /// and what they need not begin, if all have a part of one split.
    ///
    /// # Errors
    /// Those of [`decide`] and of `all_gather`. The same on all ranks.
    pub(crate) fn choose(
        self,
        members: &[Member],
        all_gather: &mut AllGather<'_>,
    ) -> Result<Option<(Chosen, Option<Part>)>, Error> {
        let Candidate { comm, me, names, limit, fields, ranks_per_root, offer, library, lent, part } = self;
        let part = part.filter(|part| part.fits(library.as_deref(), &fields));
        let offer = Offer { part: part.as_ref().map(Part::id), ..offer };
        let offers: Vec<Offer> = tell(comm, names, all_gather, Ok(offer))?;
        let library = match decide(comm, names, &offers, members)? {
            Decision::Streams => return Ok(None),
            Decision::Vendor => library.expect("every rank has one, as all have told"),
        };
        let part = part.filter(|part| offers.iter().all(|offer| offer.part == Some(part.id())));
        let (comm, names) = (comm.to_owned(), names.to_vec());
        let registers = offers.iter().all(|offer| offer.registers);
        Ok(Some((Chosen { library, comm, me, names, limit, fields, ranks_per_root, registers, lent }, part)))
    }
}

/// What ranks begin communicators of a library with.
#[derive(Clone, Debug)]
pub(crate) struct Chosen {
    library: Arc<Nccl>,
    comm: String,
    me: Rank,
    names: Vec<Rank>,
    /// How long at most to wait for the other ranks when one begins.
    limit: Duration,
    fields: Arc<NcclFields>,
    ranks_per_root: usize,
    /// Whether the libraries of all ranks register memory.
    registers: bool,
    lent: Arc<Mutex<Regions>>,
}

impl Chosen {
    /// Its name and version.
    pub(crate) fn library(&self) -> String {
        format!("{} {}", self.library.name(), self.library.version())
    }

    /// Begins a communicator with all ranks. It waits for them so long, while they `are_there`.
    ///
    /// # Errors
    /// The library fails on a rank, and those of `all_gather`. The same on all ranks.
    pub(crate) fn begin(
        &self,
        current: &Current<'_>,
        timeout: Duration,
        all_gather: &mut AllGather<'_>,
        are_there: &dyn Fn() -> bool,
    ) -> Result<Arc<VendorComm>, Error> {
        Ok(self.with(Arc::new(begin(self, current, timeout, all_gather, are_there)?)))
    }

    /// Takes a communicator that all ranks have already.
    pub(crate) fn take(&self, part: Part) -> Arc<VendorComm> {
        self.with(part.taken())
    }

    fn with(&self, raw: Arc<NcclComm>) -> Arc<VendorComm> {
        let (chosen, origin, raw) = (self.clone(), Origin::here(), Mutex::new(raw));
        let (is_given_up, splits) = (AtomicBool::new(false), AtomicU64::new(0));
        let (connected, lane) = (Mutex::default(), OnceLock::new());
        Arc::new(VendorComm { chosen, origin, raw, is_given_up, splits, connected, lane })
    }
}

/// What ranks tell before a communicator begins.
#[derive(Debug, Serialize, Deserialize)]
struct Root {
    /// Whether its library lets ranks meet at several of them.
    has_roots: bool,
    /// Of a rank at which others meet: the unique id, or why it has none.
    id: Option<Result<Vec<u8>, String>>,
}

/// Whether a run of at most so many ranks meets at this one, the first of the run. The library has runs that differ by one rank at most,
/// the longer ones first.
fn is_root(rank: usize, ranks: usize, ranks_per_root: usize) -> bool {
    let roots = if ranks_per_root == 0 { 1 } else { ranks.div_ceil(ranks_per_root) };
    let (length, longer) = (ranks / roots, ranks % roots);
    let first = |root: usize| root * length + root.min(longer);
    (0..roots).any(|root| first(root) == rank)
}

fn begin(
    chosen: &Chosen,
    current: &Current<'_>,
    timeout: Duration,
    all_gather: &mut AllGather<'_>,
    are_there: &dyn Fn() -> bool,
) -> Result<NcclComm, Error> {
    let Chosen { library, comm, me, names, fields, ranks_per_root, .. } = chosen;
    let limit = timeout.min(chosen.limit);
    let failed =
        |cause| InitError::Os { comm: comm.to_owned(), what: format!("a communicator of {}", chosen.library()), cause };
    let has_roots = library.features().contains(&Feature::Roots);
    let is_root = me.index() == 0 || has_roots && is_root(me.index(), names.len(), *ranks_per_root);
    let id = is_root.then(|| library.unique_id().map(|id| id.0.to_vec()).map_err(|error| error.to_string()));
    let told: Vec<Root> = tell(comm, names, all_gather, Ok(Root { has_roots, id }))?;
    // Where a rank cannot meet at several, all meet at the first.
    let several = told.iter().all(|root| root.has_roots);
    let ids = told.into_iter().zip(names).filter_map(|(root, rank)| Some((root.id?, rank)));
    let ids = ids.take(if several { usize::MAX } else { 1 }).map(|(id, rank)| {
        let id = id.map_err(|cause| format!("rank {rank}: {cause}"))?;
        <[u8; 128]>::try_from(id).map(UniqueId).map_err(|id| format!("rank {rank} tells an id of {} bytes", id.len()))
    });
    let ids = ids.collect::<Result<Vec<UniqueId>, String>>().map_err(failed)?;
    let begun = NcclComm::begin(library, current, &ids, (me.0, names.len() as u32), fields);
    let (raw, beginning) = match begun {
        Err(error) => (None, Beginning::Failed(error.to_string())),
        Ok(raw) => match wait(|| raw.progress(), limit, || !are_there()) {
            Ok(Progress::Done) => (Some(raw), Beginning::Begun),
            Ok(Progress::Going) => (Some(raw), Beginning::Late),
            Err(error) => (Some(raw), Beginning::Failed(error.to_string())),
        },
    };
    let told: Result<Vec<Beginning>, Error> = tell(comm, names, all_gather, Ok(beginning));
    match (told.map(|told| problem(names, &told, limit)), raw) {
        (Ok(None), Some(raw)) => Ok(raw),
        (problem, raw) => {
            raw.into_iter().for_each(|raw| abort_aside(Arc::new(raw)));
            Err(failed(problem?.unwrap_or_default()).into())
        }
    }
}

/// Why a communicator has not begun, if it has not: a rank's failure, rather than the ranks that waited for it.
fn problem(names: &[Rank], told: &[Beginning], limit: Duration) -> Option<String> {
    let failed = told.iter().zip(names).find_map(|(beginning, rank)| match beginning {
        Beginning::Failed(cause) => Some(format!("rank {rank}: {cause}")),
        Beginning::Begun | Beginning::Late => None,
    });
    failed.or_else(|| {
        let late: Vec<usize> = (0..told.len()).filter(|rank| matches!(told[*rank], Beginning::Late)).collect();
        (!late.is_empty()).then(|| {
            let ranks = named(names, &late);
            format!("it has not begun within {:.1} s on {ranks}", limit.as_secs_f64())
        })
    })
}

/// Waits until a communicator has done what it was told, a limit has passed, or it is given up.
fn wait(
    progress: impl Fn() -> Result<Progress, NcclError>,
    limit: Duration,
    is_given_up: impl Fn() -> bool,
) -> Result<Progress, NcclError> {
    let begin = Instant::now();
    loop {
        let progress = progress()?;
        let waited = begin.elapsed();
        if progress == Progress::Done || waited >= limit || is_given_up() {
            return Ok(progress);
        }
        nap(waited);
    }
}

/// Why not all of an operation is on its stream.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SubmitError {
    #[error(transparent)]
    Driver(#[from] CudaError),
    #[error(transparent)]
    Vendor(#[from] NcclError),
}

impl VendorComm {
    /// Puts calls on a stream together. When it returns they are there, and others may be put behind them.
    pub(crate) fn submit(
        &self,
        current: &Current<'_>,
        stream: &Stream,
        calls: &[NcclCall<'_>],
        patience: Patience,
    ) -> Result<(), NcclError> {
        VendorComm::submit_together(current, &[(self, stream, calls)], patience)
    }

    /// Puts calls of several communicators on a stream each, as one group of the library. When it returns they are there, and
    /// others may be put behind them.
    pub(crate) fn submit_together(
        current: &Current<'_>,
        group: &[(&VendorComm, &Stream, &[NcclCall<'_>])],
        patience: Patience,
    ) -> Result<(), NcclError> {
        let called: Vec<_> = group.iter().filter(|(.., calls)| !calls.is_empty()).collect();
        if called.is_empty() {
            return Ok(());
        }
        let raws: Vec<Arc<NcclComm>> = called.iter().map(|(comm, ..)| lock(&comm.raw).clone()).collect();
        let calls = raws.iter().zip(&called);
        let calls: Vec<_> = calls.map(|(raw, (_, stream, calls))| (&**raw, *stream, *calls)).collect();
        NcclComm::submit_together(current, &calls)?;
        let begin = Instant::now();
        let waits = raws.iter().zip(&called).map(|(raw, (comm, ..))| {
            while raw.progress()? == Progress::Going {
                if let Patience::Limit(limit) = patience
                    && begin.elapsed() >= limit
                {
                    comm.give_up();
                    let reason = format!("the calls are not in the graph after {:.1} s", limit.as_secs_f64());
                    return Err(NcclError::Call { call: "ncclGroupEnd", reason });
                }
                nap(begin.elapsed());
            }
            Ok(())
        });
        // All waits end before the failure of one is returned: the library puts the group on streams together.
        waits.collect::<Vec<_>>().into_iter().collect::<Result<(), NcclError>>()?;
        called.iter().for_each(|(comm, _, calls)| lock(&comm.connected).extend(calls.iter().filter_map(message_end)));
        Ok(())
    }

    /// A rank with which these calls exchange the first message in a direction, if there is one: at that, the library connects
    /// the two, which it cannot do in all captures.
    pub(crate) fn unconnected(&self, calls: &[NcclCall<'_>]) -> Option<Rank> {
        let connected = lock(&self.connected);
        let new = calls.iter().filter_map(message_end).find(|end| !connected.contains(end));
        new.map(|(peer, _)| self.chosen.names[peer as usize])
    }

    /// Its library's name and version.
    pub(crate) fn library(&self) -> String {
        self.chosen.library()
    }

    /// Notes that a CUDA graph has calls of it, until `mark` is set.
    pub(crate) fn hold(&self, mark: &Arc<AtomicBool>) {
        lock(&self.raw).hold(mark.clone());
    }

    /// After a disagreement, when nothing is on any rank's stream: begins another communicator with all ranks, unless none has
    /// used this one otherwise than the others. `is_touched`: this rank may have.
    ///
    /// # Errors
    /// Those of [`Chosen::begin`]; or CUDA graphs have calls of the communicator, which would do nothing from then on and say
    /// nothing of it. The same on all ranks.
    pub(crate) fn begin_anew(
        &self,
        current: &Current<'_>,
        is_touched: bool,
        timeout: Duration,
        all_gather: &mut AllGather<'_>,
        are_there: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        let Chosen { comm, names, .. } = &self.chosen;
        let is_held = lock(&self.raw).is_held();
        let own = Condition { is_touched: is_touched || self.is_given_up(), is_held };
        let told: Vec<Condition> = tell(comm, names, all_gather, Ok(own))?;
        if !told.iter().any(|condition| condition.is_touched) {
            return Ok(());
        }
        if let Some(at) = told.iter().position(|condition| condition.is_held) {
            let (rank, library) = (names[at], self.library());
            let text = format!(
                "communicator `{comm}`: after a disagreement the ranks need another communicator of {library}, but CUDA graphs \
                 of rank {rank} have calls of this one"
            );
            return Err(InitError::Config(text).into());
        }
        // On a thread of its own: the device may wait for a rank that waits for this rank here.
        abort_aside(lock(&self.raw).clone());
        let raw = begin(&self.chosen, current, timeout, all_gather, are_there)?;
        *lock(&self.raw) = Arc::new(raw);
        lock(&self.connected).clear();
        // Relaxed: as in `is_left`.
        self.is_given_up.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Whether it has been given up, for a failure that is known by then.
    pub(crate) fn is_given_up(&self) -> bool {
        // Relaxed: as in `is_left`.
        self.is_given_up.load(Ordering::Relaxed)
    }

    /// Begins to give the communicator back, unless that has been done; waits for nothing. Nothing of it is on a stream. Replays of graphs
    /// that have calls of it do nothing from now on.
    #[must_use = "the end is waited for"]
    pub(crate) fn end(&self) -> Option<Ending> {
        if self.is_left() {
            return None;
        }
        let (raw, what) =
            (lock(&self.raw).clone(), format!("communicator `{}`: its {}", self.chosen.comm, self.library()));
        // The library waits for graphs. What has failed it does not destroy, and frees nothing of it (`ncclCommEnsureReady` in
        // NCCL's [init.cc](https://github.com/NVIDIA/nccl/blob/v2.30.7-1/src/init.cc)).
        let progress = raw.progress();
        if let Err(error) = &progress {
            log::warn!("{what} has failed by its end: {error}");
        }
        if progress != Ok(Progress::Done) {
            self.abort();
            return None;
        }
        if raw.is_held() {
            // Other ranks are not told: little is lost by this, and what they still do may well end.
            abort_aside(raw);
            return None;
        }
        Some(Ending::begin(what, raw))
    }

    fn abort(&self) {
        // First: from then on, what it has sent may be lost.
        if let Some(lane) = self.lane.get().and_then(Weak::upgrade) {
            lane.library_is_given_up();
        }
        abort_aside(lock(&self.raw).clone());
    }

    /// Notes that it is given up or ends. Whether it was before, or is another process's.
    fn is_left(&self) -> bool {
        // Before any lock, which a thread of the parent may hold in a forked child.
        // Relaxed: it only keeps a second thread from giving back the same communicator.
        !self.origin.is_here() || self.is_given_up.swap(true, Ordering::Relaxed)
    }
}

impl Runner for VendorComm {
    fn failure(&self) -> Option<String> {
        lock(&self.raw).progress().err().map(|error| error.to_string())
    }

    fn give_up(&self) {
        if !self.is_left() {
            self.abort();
        }
    }

    fn serves(&self, lane: Weak<InFlight>) {
        assert!(self.lane.set(lane).is_ok(), "it serves one lane");
    }
}

impl Drop for VendorComm {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// The end of a message.
fn message_end(call: &NcclCall<'_>) -> Option<MessageEnd> {
    match *call {
        NcclCall::Send { peer, .. } => Some((peer, MessageWay::Goes)),
        NcclCall::Receive { peer, .. } => Some((peer, MessageWay::Comes)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_meet_in_runs_that_are_as_long() {
        let roots = |ranks: usize, each| (0..ranks).filter(|rank| is_root(*rank, ranks, each)).collect::<Vec<_>>();
        assert_eq!([roots(1, 128), roots(128, 128), roots(1000, 0)], [[0], [0], [0]]);
        assert_eq!(roots(129, 128), [0, 65]);
        assert_eq!(roots(10, 4), [0, 4, 7]);
        assert_eq!(roots(3, 1), [0, 1, 2]);
    }

    #[test]
    fn what_has_failed_comes_before_who_waits_for_it() {
        let names = [Rank(0), Rank(1), Rank(2)];
        let limit = Duration::from_millis(1500);
        let failed = || Beginning::Failed("no interface".to_owned());
        let told = |told: [Beginning; 3]| problem(&names, &told, limit);
        assert_eq!(told([Beginning::Begun, Beginning::Begun, Beginning::Begun]), None);
        let late = told([Beginning::Late, Beginning::Begun, Beginning::Late]).expect("two are late");
        assert_eq!(late, "it has not begun within 1.5 s on ranks [0, 2]");
        let broken = told([Beginning::Late, failed(), Beginning::Late]).expect("one has failed");
        assert_eq!(broken, "rank 1: no interface");
    }
}
