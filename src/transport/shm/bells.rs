//! One socket for the bells of all of a communicator's rings, so that none needs one of its own.
//!
//! Each communicator has a datagram socket. A side that sleeps is woken by a datagram to its communicator's socket, which says
//! nothing: whoever takes it looks which of its rings have been rung for, since a flag in the ring's memory says so. A full queue
//! therefore loses nothing. The name of the socket follows from the communicator's secret, so its ranks know it.
//!
//! What a socket beside each ring would tell by its end is told in two ways: a communicator that leaves says so in the ring's
//! memory, and the end of a process is seen at a descriptor of that process, one for all communicators.

use std::io::{self, ErrorKind};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use crate::sync::{Arc, AtomicBool, Mutex, Ordering, fence, lock};
use crate::sys::fork::Origin;
use crate::sys::limits;
use crate::sys::poller::{Interest, Poller, StreamName, Watched};
use crate::sys::process::Process;
use crate::sys::ring_sync::Side;
use crate::sys::shm_ring::KeptWords;
use crate::transport::auth::Identity;
use crate::types::Rank;

/// The bells of one communicator.
#[derive(Debug)]
pub(super) struct Bells {
    identity: Identity,
    poller: Poller,
    origin: Origin,
    socket: Watched<UnixDatagram>,
    state: Mutex<State>,
    /// Whether somebody waits to be rung at, for those who ask often.
    has_waiting: AtomicBool,
    #[cfg(test)]
    lacks_descriptors: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    lines: Vec<Arc<Line>>,
    /// The processes at the other ends of these, each of which this communicator's poller watches.
    processes: Vec<Watched<Arc<Process>>>,
    /// At whom to ring once this process has what it takes, and when to try.
    waiting: Vec<SocketAddr>,
    retry_at: Option<Instant>,
}

/// What is known here of a ring that has no socket.
#[derive(Debug)]
struct Line {
    name: StreamName,
    side: Side,
    words: KeptWords,
    process: Arc<Process>,
    is_armed: AtomicBool,
    is_process_gone: AtomicBool,
    /// Whether its stream was named because the other side has left.
    is_told: AtomicBool,
}

impl Line {
    fn has_ended(&self) -> bool {
        self.is_process_gone.load(Ordering::Relaxed) || self.words.is_left_alone(self.side)
    }

    /// Whether the other side has cleared this one's flag, or has left. Says the latter once.
    fn is_rung(&self) -> bool {
        // Relaxed, here and below: all of this is done under the engine's lock.
        let is_flag_taken = self.is_armed.load(Ordering::Relaxed) && !self.words.is_armed(self.side);
        is_flag_taken || (self.has_ended() && !self.is_told.swap(true, Ordering::Relaxed))
    }
}

/// How a ring that has no socket rings at the other side. That it is dropped says that this side has left.
#[derive(Debug)]
pub(super) struct SharedLine {
    bells: Arc<Bells>,
    line: Arc<Line>,
    peer: SocketAddr,
    is_declined: bool,
}

/// What became of a bell that was to be rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rung {
    /// It was, or the other side's queue is so full that it looks at everything anyway.
    Yes,
    /// This process lacks what it takes.
    Later,
    /// There is nobody to hear it.
    Never,
}

impl Bells {
    /// Those of a communicator whose threads sleep on `poller`.
    pub(super) fn new(identity: &Identity, poller: &Poller) -> io::Result<Arc<Bells>> {
        let socket = UnixDatagram::bind_addr(&address(identity, identity.me)?)?;
        socket.set_nonblocking(true)?;
        // By a name that no stream has: there is none from a rank to itself.
        let socket = poller.watch_named(socket, Interest::Read, StreamName::From(identity.me))?;
        let (identity, poller, state) = (identity.clone(), poller.clone(), Mutex::default());
        Ok(Arc::new(Bells {
            identity,
            poller,
            origin: Origin::here(),
            socket,
            state,
            has_waiting: AtomicBool::new(false),
            #[cfg(test)]
            lacks_descriptors: AtomicBool::new(false),
        }))
    }

    /// Has this side of a ring ring at `peer`'s bells, which are another's of this communicator, in this process.
    pub(super) fn join(
        self: &Arc<Bells>,
        peer: Rank,
        side: Side,
        words: KeptWords,
        process: Arc<Process>,
    ) -> io::Result<SharedLine> {
        let name = match side {
            Side::Writer => StreamName::To(peer),
            Side::Reader => StreamName::From(peer),
        };
        let address = address(&self.identity, peer)?;
        let mut state = lock(&self.state);
        if !state.processes.iter().any(|watched| Arc::ptr_eq(watched, &process)) {
            // As above; it is ready once, when the process has ended.
            let name = StreamName::To(self.identity.me);
            state.processes.push(self.poller.watch_named(process.clone(), Interest::Read, name)?);
        }
        let [is_armed, is_process_gone, is_told] = [(); 3].map(|()| AtomicBool::new(false));
        let line = Arc::new(Line { name, side, words, process, is_armed, is_process_gone, is_told });
        state.lines.push(line.clone());
        Ok(SharedLine { bells: self.clone(), line, peer: address, is_declined: false })
    }

    /// Appends the streams that were rung for, if the poller has named the socket, and those that have lost their process, if it
    /// has named one.
    pub(super) fn look(&self, named: &mut Vec<StreamName>) {
        let me = self.identity.me;
        let has_rung = named.contains(&StreamName::From(me));
        let has_lost = named.contains(&StreamName::To(me));
        if !has_rung && !has_lost {
            return;
        }
        if has_rung {
            self.take_bells();
        }
        let mut state = lock(&self.state);
        if has_lost {
            named.retain(|name| *name != StreamName::To(me));
            state.notice_ends();
        }
        named.extend(state.lines.iter().filter(|line| line.is_rung()).map(|line| line.name));
    }

    fn take_bells(&self) {
        for _ in 0..TAKEN_AT_ONCE {
            match self.socket.recv(&mut [0; 1]) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    /// Rings again where this process could not, if it is time to.
    pub(super) fn retry(&self) {
        if !self.has_waiting() {
            return;
        }
        let mut state = lock(&self.state);
        if state.retry_at.is_none_or(|at| Instant::now() < at) {
            return;
        }
        state.waiting.retain(|peer| self.send(peer) == Rung::Later);
        state.retry_at = (!state.waiting.is_empty()).then(|| Instant::now() + RETRY_AFTER);
        self.has_waiting.store(!state.waiting.is_empty(), Ordering::Relaxed);
    }

    /// Whether somebody waits to be rung at.
    pub(super) fn has_waiting(&self) -> bool {
        self.has_waiting.load(Ordering::Relaxed)
    }

    /// When to call [`Bells::retry`]; none if nobody waits.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        lock(&self.state).retry_at
    }

    fn ring(&self, state: &mut State, peer: &SocketAddr) -> Rung {
        let rung = self.send(peer);
        if rung == Rung::Later {
            let name = peer.as_abstract_name();
            if state.waiting.iter().all(|waiting| waiting.as_abstract_name() != name) {
                state.waiting.push(peer.clone());
            }
            state.retry_at.get_or_insert_with(|| Instant::now() + RETRY_AFTER);
            self.has_waiting.store(true, Ordering::Relaxed);
        }
        rung
    }

    /// By another socket if this one has no room: what others have not taken yet is counted as its own, also once it is closed.
    fn send(&self, peer: &SocketAddr) -> Rung {
        let sent = match send(&self.socket, peer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                // The flags that were set before are read behind a full queue.
                fence(Ordering::SeqCst);
                self.another_socket().and_then(|socket| send(&socket, peer))
            }
            sent => sent,
        };
        match sent {
            Ok(()) => Rung::Yes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => Rung::Yes,
            Err(error) if limits::is_shortage(&error) => Rung::Later,
            Err(error) => {
                log::debug!("rank {}: a rank of this host cannot be woken: {error}", self.identity.me);
                Rung::Never
            }
        }
    }

    fn another_socket(&self) -> io::Result<UnixDatagram> {
        #[cfg(test)]
        if self.lacks_descriptors.load(Ordering::Relaxed) {
            return Err(rustix::io::Errno::MFILE.into());
        }
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    }
}

impl Drop for Bells {
    fn drop(&mut self) {
        if self.origin.is_here() {
            let state = std::mem::take(&mut *lock(&self.state));
            state.waiting.iter().for_each(|peer| _ = self.send(peer));
        }
    }
}

fn send(socket: &UnixDatagram, peer: &SocketAddr) -> io::Result<()> {
    loop {
        match socket.send_to_addr(&[0], peer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            sent => return sent.map(|_| ()),
        }
    }
}

impl State {
    /// Marks the rings of processes that have ended.
    fn notice_ends(&mut self) {
        let State { lines, processes, .. } = self;
        processes.retain(|process| {
            let has_ended = process.has_ended();
            for line in lines.iter().filter(|line| has_ended && Arc::ptr_eq(&line.process, process)) {
                line.is_process_gone.store(true, Ordering::Relaxed);
            }
            !has_ended
        });
    }
}

impl SharedLine {
    /// The ring keeps its socket.
    pub(super) fn decline(mut self) {
        self.is_declined = true;
    }

    /// The line itself, if the other side can be woken by it; if not, the ring keeps its socket.
    pub(super) fn tried(self) -> Option<SharedLine> {
        if self.ring() {
            return Some(self);
        }
        self.decline();
        None
    }

    /// Whether nobody waits to be rung at.
    pub(super) fn flushed(&self) -> bool {
        !self.bells.has_waiting()
    }

    /// Wakes the other side. False: it is gone.
    pub(super) fn ring(&self) -> bool {
        self.bells.ring(&mut lock(&self.bells.state), &self.peer) != Rung::Never
    }

    /// Whether this side waits to be rung for.
    pub(super) fn set_armed(&self, is_armed: bool) {
        self.line.is_armed.store(is_armed, Ordering::Relaxed);
    }

    /// Whether the other side has left, or its process is known to be gone.
    pub(super) fn has_ended(&self) -> bool {
        self.line.has_ended()
    }

    /// Whether the other side's process is gone, also if nobody was told yet.
    pub(super) fn is_process_gone(&self) -> bool {
        self.line.process.has_ended()
    }
}

impl Drop for SharedLine {
    fn drop(&mut self) {
        let SharedLine { bells, line, peer, is_declined } = self;
        // A forked child has neither the communicator nor its locks, and the ring's memory is still its parent's.
        if !bells.origin.is_here() {
            return;
        }
        let mut state = lock(&bells.state);
        if !*is_declined {
            line.words.leave(line.side);
            bells.ring(&mut state, peer);
        }
        state.lines.retain(|other| !Arc::ptr_eq(other, line));
        if state.lines.iter().all(|other| !Arc::ptr_eq(&other.process, &line.process)) {
            state.processes.retain(|process| !Arc::ptr_eq(process, &line.process));
        }
    }
}

/// Where the bells of a rank are.
fn address(identity: &Identity, rank: Rank) -> io::Result<SocketAddr> {
    let Identity { comm, secret, .. } = identity;
    let token = secret.derive("ncclx_rs bell", &[comm.as_slice(), &rank.0.to_le_bytes()].concat());
    let digits: String = token.bytes()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddr::from_abstract_name(format!("ncclx_rs-bell-{digits}"))
}

/// How many bells are taken before the rings are looked at. Others wake the poller again.
const TAKEN_AT_ONCE: usize = 64;

/// How long to wait for what this process lacks.
const RETRY_AFTER: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::sys::shm_ring::ShmRing;
    use crate::transport::auth::Secret;

    fn identity(comm: u8, me: u32) -> Identity {
        Identity { comm: [comm; 16], me: Rank(me), size: 2, secret: Secret::new([6; 32]) }
    }

    fn ring() -> ShmRing {
        ShmRing::create(rustix::param::page_size(), None).expect("a ring").0
    }

    fn names(bells: &Bells) -> Vec<StreamName> {
        let mut named = Vec::new();
        assert!(!bells.poller.look(&mut named).expect("a look"));
        bells.look(&mut named);
        named
    }

    #[test]
    fn the_end_of_a_process_is_the_end_of_its_rings_alone_and_is_told_once() {
        let poller = Poller::new().expect("a poller");
        let bells = Bells::new(&identity(101, 0), &poller).expect("a socket");
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("cat");
        let (near, _far) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let alive = Process::behind(near.as_fd()).expect("this process");
        let other = Arc::new(Process::with_number(child.id() as i32).expect("a child is seen"));
        let [mortal, kept] = [ring(), ring()];
        let join = |peer, ring: &ShmRing, process: &Arc<Process>| {
            bells.join(Rank(peer), Side::Reader, ring.kept_words(), process.clone()).expect("a place")
        };
        let (mortal, kept) = (join(1, &mortal, &other), join(2, &kept, &alive));
        assert_eq!(names(&bells), []);
        assert!(!mortal.has_ended() && !mortal.is_process_gone());
        child.kill().expect("it is alive");
        child.wait().expect("it ends");
        assert!(!mortal.has_ended() && mortal.is_process_gone(), "nobody has looked");
        assert_eq!(names(&bells), [StreamName::From(Rank(1))]);
        assert!(mortal.has_ended() && !kept.has_ended());
        assert_eq!(names(&bells), [], "it does not wake again and again");
    }

    #[test]
    fn what_this_process_cannot_ring_now_it_rings_later() {
        let poller = Poller::new().expect("a poller");
        let [ringing, rung] = [0, 1].map(|me| Bells::new(&identity(102, me), &poller).expect("a socket"));
        let (near, _far) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let process = Process::behind(near.as_fd()).expect("this process");
        let line = ringing.join(Rank(1), Side::Writer, ring().kept_words(), process).expect("a place");
        ringing.lacks_descriptors.store(true, Ordering::Relaxed);
        while !ringing.has_waiting() {
            assert!(line.ring(), "somebody is there");
        }
        assert!(ringing.retry_at().is_some() && !line.flushed());
        ringing.lacks_descriptors.store(false, Ordering::Relaxed);
        rung.take_bells();
        while ringing.has_waiting() {
            ringing.retry();
        }
        assert!(line.flushed() && ringing.retry_at().is_none());
        assert!(rung.socket.recv(&mut [0; 1]).is_ok());
        ringing.lacks_descriptors.store(true, Ordering::Relaxed);
        while !ringing.has_waiting() {
            assert!(line.ring(), "somebody is there");
        }
        rung.take_bells();
        drop(line);
        drop(ringing);
        assert!(rung.socket.recv(&mut [0; 1]).is_ok(), "the last one is rung at the end");
    }
}
