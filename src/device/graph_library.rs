//! A vendor's library in a CUDA graph: its calls put into a capture, and what the host sees of replays.
//!
//! Around each call the stream says by a word of the graph's own that it is in there, so that the watch sees a replay that does
//! not go on: a time limit passes, a rank is lost, has given up or left, or the library has failed. Then the watch gives the
//! library's communicator up, which ends what streams wait for; this and later replays compute nothing, but each ends. The
//! ranks of a host see each other's words, which tell who has not come to the call.
//!
//! The library holds the communicator until its graphs are gone, also one that was given up (NCCL 2.26 and later,
//! `commDestroySync` of its `src/init.cc`).

use std::time::{Duration, Instant};

use crate::device::graph_mark::GraphMark;
use crate::device::in_flight::{InFlight, Look, Runner};
use crate::device::lane::flush;
use crate::device::setup::Parts;
use crate::device::vendor::{Patience, SubmitError, VendorComm};
use crate::device::watch::{Left, Replayed};
use crate::error::{Error, rank_list};
use crate::signature::Signature;
use crate::sync::{Arc, AtomicU64, Mutex, Ordering, lock};
use crate::sys::cuda::{Batch, CudaError, Current, DeviceMemory, Event, RegisteredWords, Stream, Width};
use crate::sys::nccl::NcclCall;
use crate::sys::words::SharedWords;
use crate::types::Rank;

/// One rank's calls of a library in one graph. The executor uses it while the graph is captured, the watch as long as it lives.
pub(crate) struct GraphLibrary {
    comm: String,
    me: Rank,
    /// The ranks of this host.
    here: Vec<Rank>,
    /// All other ranks.
    others: Vec<Rank>,
    /// By rank, in which call its stream is; zero in none.
    words: Arc<SharedWords>,
    in_flight: Arc<InFlight>,
    library: Arc<VendorComm>,
    mark: GraphMark,
    state: Mutex<State>,
    /// Taken out when it is to be given back.
    memory: Mutex<Option<Memory>>,
}

/// What must not go while a replay runs.
struct Memory {
    registered: RegisteredWords,
    width: Width,
    _end: Arc<Event>,
    /// What barriers add up.
    _spare: Arc<DeviceMemory>,
}

#[derive(Default)]
struct State {
    calls: Vec<Captured>,
    /// The value last found in this rank's word, and since when.
    found: Option<(u64, Instant)>,
    is_broken: bool,
}

struct Captured {
    call: Signature,
    limit: Duration,
}

/// A collective to be captured.
pub(crate) struct LibraryCalls<'a> {
    pub(crate) call: Signature,
    pub(crate) limit: Duration,
    pub(crate) calls: &'a [NcclCall<'a>],
}

impl GraphLibrary {
    /// On what the ranks have set up for it: a word for each rank. It keeps `end` alive, the event that orders the streams of
    /// the capture.
    pub(crate) fn new(
        comm: String,
        me: Rank,
        parts: Parts,
        end: Arc<Event>,
        in_flight: Arc<InFlight>,
        (library, spare): (Arc<VendorComm>, Arc<DeviceMemory>),
    ) -> GraphLibrary {
        let Parts { words, registered, width, topo, members, .. } = parts;
        let here = topo.hosts()[topo.host_of(me)].clone();
        let others = (0..members.len()).map(Rank::from).filter(|rank| *rank != me).collect();
        let memory = Mutex::new(Some(Memory { registered, width, _end: end, _spare: spare }));
        let (mark, state) = (GraphMark::default(), Mutex::default());
        GraphLibrary { comm, me, here, others, words, in_flight, library, mark, state, memory }
    }

    /// Has it live until the graph is gone for which `stream` is being captured.
    pub(crate) fn belong(&self, current: &Current<'_>, stream: &Stream) -> Result<(), CudaError> {
        self.library.hold(self.mark.shared());
        self.mark.belong(current, stream)
    }

    /// Whether its graph is still there.
    pub(crate) fn lives(&self) -> bool {
        self.mark.lives()
    }

    /// Has it given back although there is no graph.
    pub(crate) fn give_up(&self) {
        self.mark.give_up();
    }

    /// Puts calls into the capture of a stream.
    ///
    /// # Errors
    /// The driver or the library has refused something. The graph is of no use.
    ///
    /// # Panics
    /// When its graph is gone.
    pub(crate) fn submit(
        &self,
        current: &Current<'_>,
        stream: &Stream,
        operation: &LibraryCalls<'_>,
    ) -> Result<(), SubmitError> {
        let &LibraryCalls { call, limit, calls } = operation;
        let memory = lock(&self.memory);
        let Memory { registered, width, .. } = memory.as_ref().expect("a graph that is being captured lives");
        // Before the graph can run: the watch looks for it.
        let number = {
            let mut state = lock(&self.state);
            state.calls.push(Captured { call, limit });
            state.calls.len() as u64
        };
        let tell = |value| {
            let mut batch = Batch::new(*width);
            batch.write(registered.word(self.me.index()), value);
            flush(current, stream, &mut batch)
        };
        tell(number)?;
        let put = self.library.submit(current, stream, calls, Patience::Limit(limit));
        // After errors too: a part may be in the graph.
        let told = tell(0);
        put?;
        Ok(told?)
    }

    fn word(&self, rank: Rank) -> &AtomicU64 {
        self.words.word(rank.index())
    }

    /// Whether the call that the stream is in will not end, or takes too long. If so, tells other ranks and the log.
    fn breaks(&self, state: &mut State, busy: u64, now: Instant) -> bool {
        let seen = busy | SEEN;
        // Partner: none, the mark only tells one replay's call from the next one's. What the stream writes meanwhile stays.
        if busy != seen && self.word(self.me).compare_exchange(busy, seen, Ordering::AcqRel, Ordering::Relaxed).is_err()
        {
            return false;
        }
        let since = match state.found {
            Some((found, since)) if busy == seen && found == seen => since,
            _ => now,
        };
        state.found = Some((seen, since));
        let number = seen & !SEEN;
        let Some(captured) = state.calls.get(number as usize - 1) else { return false };
        let waited = now - since;
        // A rank may leave once it has done its part: what it has sent may still be on its way here.
        if waited.is_zero() {
            return false;
        }
        let Captured { call, limit } = captured;
        let failed = || {
            let cause = self.library.failure()?;
            Some(Error::Device { operation: call.to_string(), cause })
        };
        let late = || (waited >= *limit).then(|| self.timeout(*call, number, waited));
        let error = self.in_flight.obstacle(*call, &self.others).or_else(failed).or_else(late);
        let Some(error) = error else { return false };
        // At the end of the call the stream makes its word zero.
        if self.word(self.me).load(Ordering::Acquire) != seen {
            return false;
        }
        log::warn!(
            "communicator `{}`: a CUDA graph's replay cannot go on, and what it computes is undefined, now and later: {error}",
            self.comm
        );
        // Before anything wrong reaches another rank, and before the library's communicator is given up.
        self.in_flight.fail_all(error);
        true
    }

    fn timeout(&self, call: Signature, number: u64, waited: Duration) -> Error {
        let is_elsewhere = |rank: &Rank| self.word(*rank).load(Ordering::Acquire) & !SEEN != number;
        let elsewhere: Vec<Rank> = self.here.iter().copied().filter(is_elsewhere).collect();
        let detail = if elsewhere.is_empty() {
            "in a replay of a graph: all ranks of this host are in this operation, which does not end".to_owned()
        } else {
            format!("in a replay of a graph: rank(s) {} are not in this operation", rank_list(&elsewhere))
        };
        Error::Timeout { operation: call.to_string(), waited, detail }
    }
}

impl Replayed for GraphLibrary {
    fn tick(&self, now: Instant) -> Look {
        let mut state = lock(&self.state);
        let busy = self.word(self.me).load(Ordering::Acquire);
        if busy == 0 {
            state.found = None;
        } else if !state.is_broken && self.breaks(&mut state, busy, now) {
            state.is_broken = true;
            self.library.give_up();
        }
        Look::Later
    }

    fn is_busy(&self) -> bool {
        self.word(self.me).load(Ordering::Acquire) != 0
    }

    fn take(&self) -> Option<Left> {
        if self.lives() {
            return None;
        }
        let memory = lock(&self.memory).take()?;
        Some(Left::new(vec![self.in_flight.clone()], Box::new(memory)))
    }
}

/// The bit by which the watch marks a stream's word.
const SEEN: u64 = 1 << 31;
