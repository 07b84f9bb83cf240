//! The connections that communicators of this process share: one each way for each other process and each manner of making and
//! protecting connections, whatever the number of communicators.
//!
//! One poller watches all of them, and the listeners of all communicators that share. The poller of each communicator watches that
//! one, so that whichever thread is there goes on with whatever is under way, for all.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use rustc_hash::FxHashMap;

use crate::error::LinkDown;
use crate::sync::{Arc, Mutex, Weak, lock};
use crate::sys::fork::{Origin, PerProcess};
use crate::sys::poller::{Interest, Poller, StreamName, Watched};
use crate::sys::random;
use crate::sys::socket::PeerTimeout;
use crate::transport::auth::Identity;
use crate::transport::pending::Proved;
use crate::transport::tcp::connect::{Connection, Held};
use crate::transport::tcp::greeting::Greeting;
use crate::transport::tcp::inbound::{Inbound, LaneSource};
use crate::transport::tcp::listener::Listener;
use crate::transport::tcp::member::{Arrival, Member, Members, Place};
use crate::transport::tcp::outbound::{LaneSendStream, Outbound};
use crate::transport::tcp::paths::Target;
use crate::transport::tls::Tls;
use crate::types::Rank;

/// A process with the manner of its end, and the manner of this end: what leads there may be shared.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Way {
    process: String,
    manner: String,
}

/// All shared connections of this process, while it has communicators that share.
#[derive(Debug)]
pub(super) struct Trunks {
    /// Names this process to those that open connections to it.
    process: String,
    poller: Poller,
    held: Held,
    members: Arc<Members>,
    /// When to look at the latest after the connections of listeners of which no event may tell, by their communicators. Whichever
    /// communicator is there does.
    due: Mutex<FxHashMap<Place, Instant>>,
    tables: Mutex<Tables>,
}

#[derive(Debug, Default)]
struct Tables {
    /// The number of the next connection.
    next: u32,
    outbound: FxHashMap<Way, Weak<Outbound>>,
    /// Those of `outbound` and some that take no further lanes.
    writers: FxHashMap<u32, Weak<Outbound>>,
    readers: FxHashMap<u32, Arc<Inbound>>,
    listeners: Vec<Weak<SharedListener>>,
    /// Those of communicators that there were, each of which has its place.
    manners: Vec<String>,
}

impl Tables {
    fn take_number(&mut self) -> u32 {
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        number
    }

    /// The place of a manner.
    fn place(&mut self, manner: &str) -> usize {
        self.manners.iter().position(|known| known == manner).unwrap_or_else(|| {
            self.manners.push(manner.to_owned());
            self.manners.len() - 1
        })
    }

    /// Forgets connections that are over. Their lanes know that, and one of them may have been the first to.
    fn sweep(&mut self) {
        self.readers.retain(|_, reader| !reader.is_over());
    }
}

/// The listener of a communicator that shares.
#[derive(Debug)]
struct SharedListener {
    member: Arc<Member>,
    listener: Mutex<Listener>,
    origin: Origin,
}

/// How a communicator opens a connection.
pub(super) struct Opening<'a> {
    pub(super) tls: Option<&'a Tls>,
    pub(super) targets: VecDeque<Target>,
    pub(super) timeout: PeerTimeout,
}

impl Trunks {
    /// That of this process.
    pub(super) fn of_process() -> io::Result<Arc<Trunks>> {
        static CURRENT: PerProcess<Mutex<Weak<Trunks>>> = PerProcess::unset();
        CURRENT.shared(Trunks::new)
    }

    /// That of a process of which nobody knows yet.
    pub(super) fn new() -> io::Result<Trunks> {
        let process = random::any::<[u8; 16]>().iter().map(|byte| format!("{byte:02x}")).collect();
        let (held, members, due, tables) = Default::default();
        Ok(Trunks { process, poller: Poller::new()?, held, members, due, tables })
    }

    /// How many connections there are that this process has opened, and that others have.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        let mut tables = lock(&self.tables);
        tables.sweep();
        (tables.writers.values().filter(|writer| writer.strong_count() > 0).count(), tables.readers.len())
    }

    /// A connection that this process has opened.
    #[cfg(test)]
    pub(super) fn writer(&self, number: u32) -> Option<Arc<Outbound>> {
        lock(&self.tables).writers.get(&number)?.upgrade()
    }

    /// Ends the connections that this process has opened, as the system does at its end.
    #[cfg(test)]
    pub(super) fn cut(&self) {
        let writers: Vec<_> = lock(&self.tables).writers.values().filter_map(Weak::upgrade).collect();
        writers.iter().for_each(|writer| writer.cut());
    }

    /// Goes on with whatever is ready.
    fn drive(&self) {
        let mut named = Vec::new();
        // It is logged where the communicator's own poller fails alike.
        let has_callers = self.poller.look(&mut named).unwrap_or(true);
        for name in named {
            match name {
                StreamName::From(Rank(number)) => self.drive_trunk(number),
                // One that is being opened, and has no other name yet.
                StreamName::To(_) => self.drive_writers(),
            }
        }
        if has_callers || self.due().is_some_and(|due| due <= Instant::now()) {
            for shared_listener in self.listeners() {
                // If another thread is at it, that one takes what has come.
                if let Ok(mut listener) = shared_listener.listener.try_lock() {
                    self.take_callers(&shared_listener, &mut listener);
                }
            }
        }
    }

    fn listeners(&self) -> Vec<Arc<SharedListener>> {
        lock(&self.tables).listeners.iter().filter_map(Weak::upgrade).collect()
    }

    /// When to look after connections of any listener at the latest.
    fn due(&self) -> Option<Instant> {
        lock(&self.due).values().min().copied()
    }

    /// Notes when to look after the connections of a listener, whose lock the caller has.
    fn note_due(&self, member: &Member, due: Option<Instant>) {
        // A communicator that ends takes its own out with that lock.
        let Some(due) = due.filter(|_| !member.is_closed()) else {
            lock(&self.due).remove(&member.place());
            return;
        };
        let before = lock(&self.due).insert(member.place(), due);
        if before.is_none_or(|before| due < before) {
            // Their threads may sleep longer than that.
            self.members.wake();
        }
    }

    /// Goes on with the connection of this number.
    fn drive_trunk(&self, number: u32) {
        let (writer, reader) = {
            let tables = lock(&self.tables);
            (tables.writers.get(&number).and_then(Weak::upgrade), tables.readers.get(&number).cloned())
        };
        if let Some(writer) = writer {
            writer.drive();
        }
        if let Some(reader) = reader {
            reader.drive();
            if reader.is_over() {
                lock(&self.tables).readers.remove(&number);
            }
        }
    }

    fn drive_writers(&self) {
        // Their last owners may be gone meanwhile, and their ends are not for this lock.
        let writers: Vec<_> = lock(&self.tables).writers.values().filter_map(Weak::upgrade).collect();
        writers.iter().for_each(|writer| writer.drive());
    }

    /// Takes in what has come to a listener. Until all of it is where its communicator finds it, no other thread sees that nothing
    /// comes any more.
    fn take_callers(&self, shared_listener: &SharedListener, listener: &mut Listener) {
        let me = shared_listener.member.identity.me;
        for Proved { rank: from, stream: mut caller, received, session } in listener.proved() {
            if !received.is_some_and(|greeting| greeting.is_trunk()) {
                // Its communicator watches it once it has taken it.
                caller.leave();
                // Where the communicator has ended, the connection does, too.
                drop(shared_listener.member.arrive(Arrival::Connection { from, caller: Box::new(caller) }));
                continue;
            }
            let Some(session) = session else { continue };
            let number = lock(&self.tables).take_number();
            let named = caller.name(StreamName::From(Rank(number))).map_err(LinkDown::from);
            if let Err(down) = named.and_then(|()| caller.welcome()) {
                log::debug!("rank {me}: a connection of rank {from} was dropped: {down}");
                continue;
            }
            let manner = &shared_listener.member.manner;
            let reader = Inbound::new(number, caller, session, manner, &self.members, &self.held);
            let mut tables = lock(&self.tables);
            tables.sweep();
            tables.readers.insert(number, Arc::new(reader));
        }
        self.note_due(&shared_listener.member, listener.due());
    }

    /// A lane to a rank of this process, on the connection that there is or on one that is opened for it.
    fn open(
        &self,
        member: &Arc<Member>,
        peer: Rank,
        process: &str,
        opening: Opening<'_>,
    ) -> Result<LaneSendStream, LinkDown> {
        let way = Way { process: process.to_owned(), manner: member.manner.clone() };
        let known = lock(&self.tables).outbound.get(&way).and_then(Weak::upgrade);
        if let Some(trunk) = known
            && let Some(lane) = trunk.join(member, peer)
        {
            return Ok(LaneSendStream::new(trunk, lane));
        }
        let Opening { tls, targets, timeout } = opening;
        let identity = member.identity.clone();
        let connection = Connection::begin(identity, tls.cloned(), peer, targets, &self.poller, timeout, 1)?;
        let connection = connection.with(Some(Greeting::TRUNK));
        let trunk = {
            let mut tables = lock(&self.tables);
            // Another communicator may have opened one meanwhile.
            let other = tables.outbound.get(&way).and_then(Weak::upgrade).filter(|trunk| trunk.takes_lanes());
            other.unwrap_or_else(|| {
                let number = tables.take_number();
                let trunk = Arc::new(Outbound::new(number, connection, &self.held));
                tables.writers.retain(|_, writer| writer.strong_count() > 0);
                tables.outbound.retain(|_, writer| writer.strong_count() > 0);
                tables.writers.insert(number, Arc::downgrade(&trunk));
                tables.outbound.insert(way, Arc::downgrade(&trunk));
                trunk
            })
        };
        match trunk.join(member, peer) {
            Some(lane) => Ok(LaneSendStream::new(trunk, lane)),
            // It has failed at once, and another attempt tells why.
            None => Err(LinkDown::busy("a connection that was begun has failed")),
        }
    }
}

/// What a communicator has to do with shared connections.
#[derive(Debug)]
pub(super) struct Sharer {
    trunks: Arc<Trunks>,
    shared_listener: Arc<SharedListener>,
    /// What it tells peers of its process and manner. Only that of one process may be the same, and says nothing to others.
    process: String,
    /// Wakes the communicator for whatever is ready.
    _watched: Watched<Poller>,
}

impl Sharer {
    /// Has a communicator share the connections of this manner, and opens its listener. Its threads sleep on `poller`.
    pub(super) fn take(
        trunks: Arc<Trunks>,
        identity: Identity,
        manner: String,
        tls: Option<Tls>,
        poller: &Poller,
        timeout: PeerTimeout,
    ) -> io::Result<Sharer> {
        let listener = Listener::open(identity.clone(), tls, &trunks.poller, 1, timeout, true)?;
        // By a name that no stream has, as other names would have the communicator look for callers each time.
        let name = StreamName::From(identity.me);
        let watched = poller.watch_named(trunks.poller.clone(), Interest::Read, name)?;
        let process = format!("{}-{}", trunks.process, lock(&trunks.tables).place(&manner));
        let member = Arc::new(Member::new(identity, manner, poller.clone()));
        let (listener, origin) = (Mutex::new(listener), Origin::here());
        let shared_listener = Arc::new(SharedListener { member: member.clone(), listener, origin });
        trunks.members.add(&member);
        lock(&trunks.tables).listeners.push(Arc::downgrade(&shared_listener));
        Ok(Sharer { trunks, shared_listener, process, _watched: watched })
    }

    /// What names this process, and the manner of this end, to its peers.
    pub(super) fn process(&self) -> &str {
        &self.process
    }

    /// Runs `f` with the listener.
    pub(super) fn with_listener<T>(&self, f: impl FnOnce(&Listener) -> T) -> T {
        f(&lock(&self.shared_listener.listener))
    }

    /// When to look after the connections of all listeners at the latest: any of them may be one on which this communicator waits.
    pub(super) fn due(&self) -> Option<Instant> {
        self.with_listener(Listener::due).into_iter().chain(self.trunks.due()).min()
    }

    /// What this process lacks to take connections in, if it does.
    pub(super) fn shortage(&self) -> Option<String> {
        self.trunks.listeners().into_iter().find_map(|listener| lock(&listener.listener).shortage())
    }

    /// A stream to a rank of this process.
    pub(super) fn open(&self, peer: Rank, process: &str, opening: Opening<'_>) -> Result<LaneSendStream, LinkDown> {
        self.trunks.open(&self.shared_listener.member, peer, process, opening)
    }

    /// Goes on with what has come to this communicator's listener and with what is ready, and takes what has come for it.
    pub(super) fn take_arrivals(&self) -> Vec<Arrival> {
        self.trunks.take_callers(&self.shared_listener, &mut lock(&self.shared_listener.listener));
        self.trunks.drive();
        self.shared_listener.member.take_arrivals()
    }

    /// The bytes of a lane that has come.
    pub(super) fn lane(&self, trunk: u32, lane: u32) -> Option<LaneSource> {
        let reader = lock(&self.trunks.tables).readers.get(&trunk).cloned()?;
        Some(reader.begin_to_read(lane))
    }

    /// Whether bytes that streams have taken wait in this process.
    pub(super) fn holds_bytes(&self) -> bool {
        self.trunks.held.is_any()
    }

    /// Goes on with whatever is ready, and appends this communicator's streams that have become so. True: others have come.
    pub(super) fn look(&self, named: &mut Vec<StreamName>) -> bool {
        self.trunks.drive();
        self.shared_listener.member.look(named)
    }

    /// Whether there is nothing to look at.
    pub(super) fn is_idle(&self) -> bool {
        self.shared_listener.member.is_idle()
    }
}

impl Drop for Sharer {
    fn drop(&mut self) {
        // In a forked child, a thread may have had a lock that is not there.
        if !self.shared_listener.origin.is_here() {
            return;
        }
        let Sharer { trunks, shared_listener, .. } = &*self;
        trunks.members.remove(&shared_listener.member);
        for arrival in shared_listener.member.close() {
            if let Arrival::Lane { trunk, lane, .. } = arrival {
                drop(self.lane(trunk, lane));
            }
        }
        self.with_listener(|_| trunks.note_due(&shared_listener.member, None));
        let mut tables = lock(&trunks.tables);
        tables.sweep();
        tables.listeners.retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(shared_listener)));
    }
}
