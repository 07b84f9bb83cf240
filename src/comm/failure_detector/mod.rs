//! Notices ranks that are gone, also while nothing is in flight, and tells the others.
//!
//! Every rank keeps connections to a few others ([`neighbours`]) over which nothing but such news travel ([`notice`]). A
//! connection that ends without a goodbye, or a process of this host that ends, is a loss; who learns of one tells its
//! neighbours, so that all know. The same way goes round who waits in a collective ([`gossip`]). One thread a process
//! sleeps on the connections of all its communicators.

mod gossip;
mod monitor;
mod neighbours;
mod notice;

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::comm::bootstrap::RankInfo;
use crate::comm::failure_detector::gossip::Gossip;
use crate::comm::failure_detector::monitor::Edge;
use crate::comm::failure_detector::notice::{News, RANKS_MAX};
use crate::engine::connector::{Route, Way};
use crate::engine::driver::Driver;
use crate::engine::failures::{Departed, Departure};
use crate::engine::heartbeat::Heartbeat;
use crate::sync::{Arc, Condvar, Mutex, Weak, lock};
use crate::sys::fork::{Origin, PerProcess};
use crate::sys::poller::{Interest, Poller};
use crate::sys::process::Process;
use crate::transport::Transport;
use crate::types::Rank;

pub(in crate::comm) use neighbours::neighbours;

/// One communicator's part of the watch. Ends without a word when dropped.
pub(super) struct Watch {
    post: Arc<Post>,
    watchman: Arc<Watchman>,
    origin: Origin,
}

impl Watch {
    /// Begins to watch the ranks that `routes` lead to, on behalf of `driver`.
    pub(super) fn begin(
        me: Rank,
        ranks: &[RankInfo],
        mut transports: Vec<Box<dyn Transport>>,
        routes: Vec<(Rank, Vec<Route>)>,
        watchman: Arc<Watchman>,
        driver: &Arc<Driver>,
    ) -> io::Result<Watch> {
        let poller = &watchman.poller;
        // Those whom this rank does not watch do not come, since watching is mutual.
        let used: BTreeSet<usize> = routes.iter().flat_map(|(_, routes)| routes).map(|route| route.transport).collect();
        let mut place = 0..;
        transports.retain(|_| place.next().is_some_and(|place| used.contains(&place)));
        let edges = routes.into_iter().map(|(peer, routes)| {
            let place = |route: Route| Route { transport: used.range(..route.transport).count(), ..route };
            // Found before the connection is made: if that succeeds, the process was there, and the number was its.
            let process = Process::find(&ranks[peer.index()].process).ok();
            let process = process.and_then(|process| {
                let registration = poller.add(process.as_fd(), Interest::Read).ok()?;
                Some((process, registration))
            });
            let mut edge = Edge::new(peer, ranks.len(), Way::new(routes.into_iter().map(place)), process);
            edge.reach(&mut transports, Instant::now());
            edge
        });
        let edges = edges.collect();
        let state = State { me, transports, edges, known: HashSet::new(), gossip: Gossip::default(), leaves: false };
        let post = Arc::new(Post {
            state: Mutex::new(state),
            looked: Condvar::new(),
            own_heartbeats: Mutex::default(),
            driver: Arc::downgrade(driver),
        });
        watchman.add(Arc::clone(&post))?;
        let (listener, poller) = (Arc::downgrade(&post), watchman.poller.clone());
        driver.with_engine(|engine| {
            engine.send_heartbeat = Some(Box::new(move |heartbeat| {
                if let Some(post) = listener.upgrade() {
                    lock(&post.own_heartbeats).push(heartbeat);
                    poller.wake();
                }
            }));
        });
        Ok(Watch { post, watchman, origin: Origin::here() })
    }

    /// Tells the others that this rank leaves for good, which is no loss; waits until they can know, but not longer than
    /// `patience`.
    pub(super) fn say_goodbye(&self, patience: Duration) {
        self.say(&News::Bye, patience);
    }

    /// Tells all others that this rank is gone. Waits as above.
    pub(super) fn say_gone(&self, departed: Departed, patience: Duration) {
        self.say(&News::Departed(departed), patience);
    }

    fn say(&self, news: &News, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut state = lock(&self.post.state);
        state.edges.iter_mut().for_each(|edge| edge.tell(news));
        state.leaves = true;
        loop {
            state.look();
            let left = deadline.saturating_duration_since(Instant::now());
            if state.edges.iter_mut().all(Edge::is_flushed) || left.is_zero() {
                return;
            }
            let waited = self.post.looked.wait_timeout(state, left.min(SAYING_CHECK));
            state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // A forked child has no thread that watches, and may have inherited locks that nobody lets go.
        if self.origin.is_here() {
            self.watchman.remove(&self.post);
        }
    }
}

/// What the thread and the communicator share.
struct Post {
    state: Mutex<State>,
    /// The thread has looked.
    looked: Condvar,
    /// Heartbeats of this rank that are to go out. Locked for no longer than it takes to add or to take one: whoever adds
    /// one holds the engine's lock.
    own_heartbeats: Mutex<Vec<Heartbeat>>,
    driver: Weak<Driver>,
}

impl Post {
    /// Looks around and tells the communicator of what it did not know. The next moment at which to look again.
    fn turn(&self) -> Option<Instant> {
        let own = std::mem::take(&mut *lock(&self.own_heartbeats));
        let (learned, due) = {
            let mut state = lock(&self.state);
            state.pass_on(own);
            let learned = state.look();
            (learned, state.settle())
        };
        self.looked.notify_all();
        let told = self.driver.upgrade().and_then(|driver| {
            if !learned.heartbeats.is_empty() {
                driver.heartbeats_arrive(&learned.heartbeats);
            }
            driver.departed(&learned.departed)
        });
        due.into_iter().chain(told).min()
    }
}

/// What a look around has shown that this rank did not know.
struct Learned {
    /// Ranks that are gone.
    departed: Vec<Departed>,
    /// Ranks that wait in a collective.
    heartbeats: Vec<Heartbeat>,
}

struct State {
    me: Rank,
    transports: Vec<Box<dyn Transport>>,
    /// Those to ranks that are neither gone nor leaving.
    edges: Vec<Edge>,
    /// Ranks that all have been told of.
    known: HashSet<Rank>,
    gossip: Gossip,
    /// This rank has told the others that it leaves.
    leaves: bool,
}

impl State {
    /// Moves everything as far as it goes.
    fn look(&mut self) -> Learned {
        self.edges.iter_mut().for_each(Edge::disarm);
        for (from, recv_stream) in self.transports.iter_mut().flat_map(|transport| transport.accept()) {
            match self.edges.iter_mut().find(|edge| edge.peer == from) {
                Some(edge) => edge.accept(recv_stream),
                None => log::debug!("rank {from} is not one that rank {} watches", self.me),
            }
        }
        let now = Instant::now();
        self.edges.iter_mut().for_each(|edge| edge.reach(&mut self.transports, now));
        let (mut learned, mut over, mut heartbeats) = (Vec::new(), HashSet::new(), Vec::new());
        for edge in &mut self.edges {
            let seen = edge.look(now);
            for news in seen.news {
                match news {
                    News::Bye => _ = over.insert(edge.peer),
                    News::Departed(departed) => learned.push(departed),
                    News::Heartbeat(heartbeat) => heartbeats.push(heartbeat),
                }
            }
            if let Some(cause) = seen.loss
                && over.insert(edge.peer)
            {
                learned.push(Departed { rank: edge.peer, how: Departure::Lost, cause });
            }
        }
        // Those that know that this rank leaves close their ends of the connections.
        learned.retain(|departed| !self.leaves && self.known.insert(departed.rank));
        self.edges.retain(|edge| !over.contains(&edge.peer) && !self.known.contains(&edge.peer));
        for departed in &learned {
            let news = News::Departed(departed.clone());
            self.edges.iter_mut().for_each(|edge| edge.tell(&news));
        }
        // At once: who is told first may leave, and its leaving must not be seen before the reason for it.
        if !learned.is_empty() {
            self.edges.iter_mut().for_each(|edge| edge.write(now));
        }
        Learned { departed: learned, heartbeats: self.pass_on(heartbeats) }
    }

    /// Tells the neighbours of heartbeats that are new here, which it returns.
    fn pass_on(&mut self, heartbeats: Vec<Heartbeat>) -> Vec<Heartbeat> {
        let learned = self.gossip.learn(heartbeats.into_iter());
        for heartbeat in &learned {
            for ranks in heartbeat.ranks.chunks(RANKS_MAX) {
                let news = News::Heartbeat(Heartbeat { ranks: ranks.to_vec(), ..heartbeat.clone() });
                self.edges.iter_mut().for_each(|edge| edge.mention(&news));
            }
        }
        learned
    }

    /// Sees that the poller wakes. When to look again; now, if there is something to see already.
    fn settle(&mut self) -> Option<Instant> {
        // All of them, also behind one that is ready.
        let ready = self.edges.iter_mut().filter_map(|edge| edge.arm().then_some(())).count() > 0;
        let now = Instant::now();
        let dues = self.edges.iter().filter_map(|edge| edge.due(now));
        let strangers = self.transports.iter().filter_map(|transport| transport.accepting_until());
        if ready { Some(now) } else { dues.chain(strangers).min() }
    }
}

/// The thread that watches for all communicators of the process, while there are any.
pub(super) struct Watchman {
    poller: Poller,
    roll: Mutex<Roll>,
}

#[derive(Default)]
struct Roll {
    posts: Vec<Arc<Post>>,
    is_awake: bool,
}

impl Watchman {
    /// The one of this process.
    pub(super) fn on_duty() -> io::Result<Arc<Watchman>> {
        static CURRENT: PerProcess<Mutex<Weak<Watchman>>> = PerProcess::unset();
        let mut current = lock(CURRENT.get());
        if let Some(watchman) = current.upgrade() {
            return Ok(watchman);
        }
        let watchman = Arc::new(Watchman { poller: Poller::new()?, roll: Mutex::default() });
        *current = Arc::downgrade(&watchman);
        Ok(watchman)
    }

    /// Where the streams that it watches are registered.
    pub(super) fn poller(&self) -> &Poller {
        &self.poller
    }

    fn add(self: &Arc<Self>, post: Arc<Post>) -> io::Result<()> {
        let mut roll = lock(&self.roll);
        if !roll.is_awake {
            let watchman = Arc::clone(self);
            std::thread::Builder::new().name("ncclx_rs_watch".to_owned()).spawn(move || watchman.watch())?;
            roll.is_awake = true;
        }
        roll.posts.push(post);
        self.poller.wake();
        Ok(())
    }

    fn remove(&self, post: &Arc<Post>) {
        lock(&self.roll).posts.retain(|known| !Arc::ptr_eq(known, post));
        let mut state = lock(&post.state);
        state.edges.clear();
        state.transports.clear();
        drop(state);
        self.poller.wake();
    }

    fn watch(&self) {
        loop {
            let posts = {
                let mut roll = lock(&self.roll);
                roll.is_awake = !roll.posts.is_empty();
                if !roll.is_awake {
                    return;
                }
                roll.posts.clone()
            };
            let due = posts.iter().filter_map(|post| post.turn()).min();
            drop(posts);
            let timeout = due.map(|due| due.saturating_duration_since(Instant::now()));
            if timeout.is_none_or(|timeout| !timeout.is_zero())
                && let Err(error) = self.poller.wait(timeout)
            {
                // The next turn would say it again.
                static SAID: std::sync::Once = std::sync::Once::new();
                SAID.call_once(|| log::error!("waiting for news of other ranks fails: {error}"));
            }
        }
    }
}

/// How often who leaves looks whether the others know.
const SAYING_CHECK: Duration = Duration::from_millis(5);
