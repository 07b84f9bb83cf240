//! The worker of a communicator, and whose messages come to it.
//!
//! Any thread's call for one stream may bring messages of others. A stream that is armed is then named to the engine, and the
//! thread that sleeps is woken.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::error::LinkDown;
use crate::sync::{Arc, Mutex, MutexGuard, lock};
use crate::sys::fork::Origin;
use crate::sys::lent_bytes::LentBytes;
use crate::sys::poller::{Interest, Poller, StreamName, Watched};
use crate::sys::random;
use crate::sys::ucx::{Arrived, Device, Messenger, RegisteredMemory};
use crate::transport::ucx::header::{Header, Kind};
use crate::transport::ucx::link::{Incoming, Link, Outgoing};
use crate::transport::ucx::offer::{Allowed, Need};
use crate::transport::ucx::reads::Spare;
use crate::transport::{Expose, Exposure, PATIENCE, PATIENCE_WITH_CALLS, Read, RemoteMemory, TakeRead};
use crate::types::Rank;

/// The worker and the links of one communicator.
#[derive(Debug)]
pub(super) struct Hub {
    me: Rank,
    allowed: Allowed,
    need: Need,
    poller: Poller,
    origin: Origin,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// None before the first stream.
    messenger: Option<Watched<Messenger>>,
    links: FxHashMap<Rank, Link>,
    /// The peers for which UCX still needs bytes of this process.
    busy: Vec<Rank>,
    /// Those for which software may still hold bytes that UCX has taken.
    unflushed: Vec<Rank>,
    /// Those of which memory is being read.
    reading: Vec<Rank>,
    spare: Spare,
    /// Armed streams that have become ready.
    ready: Vec<StreamName>,
    /// A caller's probe has come.
    must_accept: bool,
    /// Something has moved since the worker was armed.
    is_stale: bool,
    /// Where messages are put at first.
    arrived: Vec<Arrived>,
}

impl Hub {
    pub(super) fn new(me: Rank, allowed: Allowed, need: Need, poller: Poller) -> Arc<Hub> {
        Arc::new(Hub { me, allowed, need, poller, origin: Origin::here(), state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// By which peers reach this process's worker.
    pub(super) fn address(&self) -> Result<Vec<u8>, String> {
        let mut state = self.state();
        self.messenger(&mut state)?.address().map_err(|error| error.to_string())
    }

    fn messenger<'a>(&self, state: &'a mut State) -> Result<&'a Messenger, String> {
        if state.messenger.is_none() {
            let messenger = Messenger::new(&self.allowed.load()?).map_err(|error| error.to_string())?;
            let watched = self.poller.watch(messenger, Interest::Read).map_err(|error| error.to_string())?;
            state.messenger = Some(watched);
            // It was never armed.
            state.is_stale = true;
        }
        Ok(state.messenger.as_ref().expect("it was just made"))
    }

    /// The link to a peer whose worker has this address, or why it is not taken.
    fn link<'a>(&self, state: &'a mut State, peer: Rank, address: &[u8]) -> Result<&'a mut Link, String> {
        if !state.links.contains_key(&peer) {
            let messenger = self.messenger(state)?;
            let recipient = messenger.recipient(address).map_err(|error| error.to_string())?;
            let version = messenger.context().ucx().version();
            let devices = recipient.devices();
            let names = devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            if self.need == Need::Better && !devices.iter().any(Device::is_rdma) {
                return Err(format!("UCX would go through {names}, none of which is an RDMA device"));
            }
            log::info!("rank {}: UCX to rank {peer} goes through {names}", self.me);
            state.links.insert(peer, Link::new(recipient, &devices, version));
        }
        Ok(state.links.get_mut(&peer).expect("it is there now"))
    }

    /// Begins the stream to a peer, which expects it: sends the probe.
    pub(super) fn open_to(self: &Arc<Hub>, peer: Rank, session: u64, address: &[u8]) -> Result<Outflow, String> {
        let mut state = self.state();
        let link = self.link(&mut state, peer, address)?;
        link.to = Some(Outgoing::new(session));
        let flow = Flow { hub: self.clone(), peer, session };
        let probe = Header { kind: Kind::Probe, from: self.me, session, number: 0 };
        let sent = link.send(probe);
        state.sent(peer);
        drop(state);
        let outflow = Outflow { flow };
        sent.map(|()| outflow).map_err(|down| down.to_string())
    }

    /// Begins the stream from a peer, which has asked for it.
    pub(super) fn open_from(self: &Arc<Hub>, peer: Rank, address: &[u8]) -> Result<Inflow, String> {
        let mut state = self.state();
        let link = self.link(&mut state, peer, address)?;
        if link.from.as_ref().is_some_and(|from| from.is_open) {
            return Err("it has a stream from this rank already".to_owned());
        }
        let session = random::any();
        link.from = Some(Incoming::new(session));
        Ok(Inflow { flow: Flow { hub: self.clone(), peer, session } })
    }

    /// Goes on before callers' handshakes do.
    pub(super) fn begin_to_accept(&self) {
        let state = &mut *self.state();
        self.progress_for_all(state);
        state.must_accept = false;
    }

    /// Goes on with whatever is under way, and leaves the worker's descriptor silent about it.
    #[cfg(test)]
    pub(super) fn progress(&self) {
        let state = &mut *self.state();
        self.progress_for_all(state);
        state.arm();
    }

    fn progress_for_all(&self, state: &mut State) {
        self.progress_for_streams(state);
        if state.has_got() {
            // As below, for reads.
            self.poller.wake();
        }
    }

    fn progress_for_streams(&self, state: &mut State) {
        let before = (state.ready.len(), state.must_accept);
        state.progress();
        if before != (state.ready.len(), state.must_accept) {
            // Whoever sleeps does so for streams that nothing else names.
            self.poller.wake();
        }
    }

    /// Whether no armed stream has become ready.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.state().ready.is_empty()
    }

    /// Appends the armed streams that have become ready. True: callers' handshakes go on.
    pub(super) fn look(&self, named: &mut Vec<StreamName>) -> bool {
        let state = &mut *self.state();
        state.progress();
        if state.is_stale {
            // The descriptor of a worker that is not armed stays readable for what was seen already.
            state.arm();
        }
        named.append(&mut state.ready);
        std::mem::take(&mut state.must_accept)
    }

    /// Has the poller tell of what comes. True: something is ready.
    pub(super) fn arm(&self) -> bool {
        let state = &mut *self.state();
        state.progress();
        state.arm();
        !state.ready.is_empty() || state.must_accept || state.is_stale || state.reads_are_due()
    }

    /// Goes on with reads, and tells of those that have ended.
    pub(super) fn take_reads(&self, take: &mut TakeRead<'_>) {
        let state = &mut *self.state();
        if state.reading.is_empty() {
            return;
        }
        self.progress_for_streams(state);
        let State { links, reading, spare, .. } = state;
        reading.retain(|peer| {
            let Some(link) = links.get_mut(peer) else { return false };
            link.reads.take(&mut link.recipient, spare, take);
            !link.reads.is_empty()
        });
    }

    /// Whether bytes that streams have taken are still in this process.
    pub(super) fn holds_bytes(&self) -> bool {
        let state = &mut *self.state();
        if state.busy.is_empty() && state.unflushed.is_empty() {
            return false;
        }
        self.progress_for_all(state);
        let State { links, unflushed, .. } = state;
        // What has failed holds nothing that could still leave.
        unflushed.retain(|peer| links.get_mut(peer).is_some_and(|link| link.recipient.flush() == Ok(false)));
        !state.busy.is_empty() || !state.unflushed.is_empty()
    }
}

impl Expose for Hub {
    fn expose(&self, bytes: &Arc<LentBytes>) -> Option<Exposure> {
        let known = self.state().messenger.as_ref().map(|messenger| messenger.context());
        // Where another transport may do, only a stream shows that UCX is used at all.
        let context = match (known, self.need) {
            (Some(context), _) => context,
            (None, Need::Any) => self.allowed.load().ok()?,
            (None, Need::Better) => return None,
        };
        let registered = RegisteredMemory::of(&context, bytes);
        let registered = registered
            .inspect_err(|error| log::debug!("rank {}: {} bytes are not exposed: {error}", self.me, bytes.len()))
            .ok()?;
        Some(Exposure::new(registered.key().to_vec(), Box::new((registered, bytes.clone()))))
    }
}

impl State {
    /// Takes what has come, for all streams.
    fn progress(&mut self) {
        let Some(messenger) = &self.messenger else { return };
        let mut arrived = std::mem::take(&mut self.arrived);
        self.is_stale |= messenger.progress(&mut arrived);
        let has_failed = messenger.take_failed();
        arrived.drain(..).for_each(|message| self.take(message));
        self.arrived = arrived;
        let links = &mut self.links;
        self.busy.retain(|peer| links.get_mut(peer).is_some_and(|link| !link.recipient.sweep()));
        if has_failed {
            self.name_failed();
        }
    }

    /// Passes a message on to whom it is for.
    fn take(&mut self, message: Arrived) {
        let header = Header::decode(&message);
        let link = header.and_then(|header| Some((header, self.links.get_mut(&header.from)?)));
        let Some((Header { kind, from, session, number }, link)) = link else {
            log::debug!("a message of UCX was dropped: it is of no rank that is known");
            return;
        };
        match kind {
            Kind::Piece | Kind::Probe => {
                let Some(incoming) = link.from.as_mut().filter(|incoming| incoming.session == session) else { return };
                if kind == Kind::Probe {
                    incoming.is_probed = true;
                    self.must_accept = true;
                } else {
                    incoming.pieces.keep(number, message);
                    if incoming.pieces.has_next() && std::mem::take(&mut incoming.is_armed) {
                        self.ready.push(StreamName::From(from));
                    }
                }
            }
            Kind::Credit => {
                let Some(outgoing) = link.to.as_mut().filter(|outgoing| outgoing.session == session) else { return };
                // One that is being opened goes on by it, too.
                let is_awaited = std::mem::take(&mut outgoing.is_armed) || !outgoing.is_granted;
                outgoing.credit(number);
                if is_awaited {
                    self.ready.push(StreamName::To(from));
                }
            }
        }
    }

    /// Has the streams looked at whose links have failed.
    fn name_failed(&mut self) {
        for (peer, link) in &mut self.links {
            if link.down().is_none() {
                continue;
            }
            if link.from.as_mut().is_some_and(|from| std::mem::take(&mut from.is_armed)) {
                self.ready.push(StreamName::From(*peer));
            }
            if link.to.is_some() {
                self.ready.push(StreamName::To(*peer));
            }
        }
    }

    /// Notes that something was sent to a peer.
    fn sent(&mut self, peer: Rank) {
        let Some(link) = self.links.get_mut(&peer) else { return };
        if !link.recipient.sweep() && !self.busy.contains(&peer) {
            self.busy.push(peer);
        }
        if link.is_software && !self.unflushed.contains(&peer) {
            self.unflushed.push(peer);
        }
    }

    /// Arms the worker, unless there is more progress to make than a while takes.
    fn arm(&mut self) {
        for _ in 0..ARMS_MAX {
            let Some(messenger) = &self.messenger else { return self.is_stale = false };
            match messenger.arm() {
                Ok(true) => return self.is_stale = false,
                Ok(false) => self.progress(),
                Err(error) => {
                    // The next turn would log it again.
                    static LOGGED: std::sync::Once = std::sync::Once::new();
                    LOGGED.call_once(|| log::error!("waiting for UCX fails: {error}"));
                    break;
                }
            }
        }
        self.is_stale = true;
    }

    /// The peers of which memory is being read.
    fn readers(&self) -> impl Iterator<Item = &Link> {
        self.reading.iter().filter_map(|peer| self.links.get(peer))
    }

    /// Whether reads have ended that were not taken.
    fn has_got(&self) -> bool {
        self.readers().any(|link| link.recipient.has_got())
    }

    /// Whether reads wait for somebody to take or to bring them.
    fn reads_are_due(&self) -> bool {
        self.readers().any(|link| link.reads.are_due(&link.recipient))
    }

    /// Forgets a link of which no stream is left.
    fn settle(&mut self, peer: Rank) {
        if self.links.get(&peer).is_some_and(|link| link.to.is_none() && link.from.is_none()) {
            self.links.remove(&peer);
        }
    }
}

/// One end of a stream, as the hub knows it.
#[derive(Debug)]
struct Flow {
    hub: Arc<Hub>,
    peer: Rank,
    session: u64,
}

impl Flow {
    /// Runs `f` with the link, after progress.
    fn progressed<T>(&self, f: impl FnOnce(&mut Link) -> T) -> Option<T> {
        let mut state = self.hub.state();
        self.hub.progress_for_all(&mut state);
        state.links.get_mut(&self.peer).map(f)
    }

    /// Runs `f` with the link.
    fn link<T>(&self, f: impl FnOnce(&mut Link) -> T) -> Option<T> {
        self.hub.state().links.get_mut(&self.peer).map(f)
    }

    fn down(&self) -> Option<LinkDown> {
        self.link(|link| link.down()).flatten()
    }

    fn patience(&self) -> u32 {
        let is_software = self.link(|link| link.is_software).unwrap_or_default();
        if is_software { PATIENCE_WITH_CALLS } else { PATIENCE }
    }
}

/// The sending end of a stream. Dropping it gives the stream up.
#[derive(Debug)]
pub(super) struct Outflow {
    flow: Flow,
}

impl Outflow {
    /// Whether this is the process that has made it, and not a forked child.
    pub(super) fn is_here(&self) -> bool {
        self.flow.hub.origin.is_here()
    }

    /// Whether the peer has answered.
    pub(super) fn is_granted(&self) -> Result<bool, LinkDown> {
        let looked = self.flow.progressed(|link| (link.down(), link.to.as_ref().is_some_and(|to| to.is_granted)));
        match looked {
            // Its end is that of the other side's.
            Some((Some(down), false)) => Err(LinkDown::hung_up(down.cause)),
            looked => Ok(looked.is_some_and(|(_, is_granted)| is_granted)),
        }
    }

    /// Sends bytes, as far as there is room; how many.
    pub(super) fn write(&self, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        let Flow { hub, peer, .. } = &self.flow;
        let mut state = hub.state();
        let has_room = |state: &State| state.links.get(peer).and_then(|link| link.to.as_ref()?.has_room().into());
        if has_room(&state) != Some(true) || !state.busy.is_empty() {
            hub.progress_for_all(&mut state);
        }
        let Some(link) = state.links.get_mut(peer) else { return Ok(0) };
        if let Some(down) = link.down() {
            return Err(down);
        }
        let done = link.write(hub.me, head, body);
        state.sent(*peer);
        done
    }

    /// Whether memory that the peer has exposed is read, as far as is known.
    pub(super) fn can_read(&self) -> bool {
        self.flow.link(|link| link.down().is_none() && link.reads.is_able()) == Some(true)
    }

    /// Begins to read memory that the peer has exposed.
    pub(super) fn begin_read(&self, token: u64, from: RemoteMemory<'_>) -> Read {
        let Flow { hub, peer, .. } = &self.flow;
        let mut state = hub.state();
        let State { links, reading, spare, .. } = &mut *state;
        let Some(link) = links.get_mut(peer).filter(|link| link.down().is_none()) else { return Read::Unable };
        let begun = link.reads.begin(&mut link.recipient, spare, token, from);
        if begun == Read::Begun && !reading.contains(peer) {
            reading.push(*peer);
        }
        begun
    }

    /// How many pieces were sent.
    pub(super) fn sent(&self) -> u64 {
        self.flow.link(|link| link.to.as_ref().map_or(0, |to| to.sent)).unwrap_or_default()
    }

    /// Whether all that was written has left this process.
    pub(super) fn flushed(&self) -> Result<bool, LinkDown> {
        let flushed = self.flow.progressed(|link| link.recipient.sweep().then(|| link.recipient.flush()));
        match flushed {
            Some(Some(flushed)) => flushed.map_err(|error| LinkDown::new(format!("UCX: {error}"))),
            Some(None) => Ok(false),
            None => Ok(true),
        }
    }

    /// Sends what was written on its way before the stream ends, as far as that takes moments.
    pub(super) fn finish(&self) {
        let begin = Instant::now();
        while self.flushed() == Ok(false) && begin.elapsed() < FINISH_TIMEOUT {
            std::hint::spin_loop();
        }
    }

    /// Goes on, and tells why the stream is of no use any more, if that is so.
    pub(super) fn check(&self) -> Result<(), LinkDown> {
        self.flow.progressed(|link| link.down()).flatten().map_or(Ok(()), Err)
    }

    /// Has the engine told once there is room. True: there is some now, or the link is down.
    pub(super) fn arm(&self) -> bool {
        let arm = |link: &mut Link| {
            let is_ready = link.down().is_some() || link.to.as_ref().is_none_or(Outgoing::has_room);
            if let Some(to) = &mut link.to {
                to.is_armed = !is_ready;
            }
            is_ready
        };
        self.flow.progressed(arm).unwrap_or(true)
    }

    pub(super) fn disarm(&self) {
        self.flow.link(|link| link.to.as_mut().map(|to| to.is_armed = false));
    }

    pub(super) fn devices(&self) -> Vec<String> {
        self.flow.link(|link| link.devices.clone()).unwrap_or_default()
    }

    pub(super) fn patience(&self) -> u32 {
        self.flow.patience()
    }
}

impl Drop for Outflow {
    fn drop(&mut self) {
        let Flow { hub, peer, session } = &self.flow;
        // In a forked child, a thread may have had the lock that is not there.
        if hub.origin.is_here() {
            let mut state = hub.state();
            if let Some(link) = state.links.get_mut(peer) {
                link.to.take_if(|to| to.session == *session);
            }
            state.settle(*peer);
        }
    }
}

/// The receiving end of a stream. Dropping it gives the stream up.
#[derive(Debug)]
pub(super) struct Inflow {
    flow: Flow,
}

impl Inflow {
    pub(super) fn session(&self) -> u64 {
        self.flow.session
    }

    /// Whether a message of the peer has arrived; its answer is sent then.
    pub(super) fn answer_probe(&self) -> Result<bool, LinkDown> {
        let incoming = |link: &mut Link| link.from.as_ref().is_some_and(|from| from.is_probed);
        if self.flow.link(incoming) != Some(true) {
            return self.flow.down().map_or(Ok(false), Err);
        }
        self.credit(0).map(|()| true)
    }

    /// Notes that both sides take the stream.
    pub(super) fn opened(&self) {
        self.flow.link(|link| link.from.as_mut().map(|from| from.is_open = true));
    }

    /// Appends the next pieces. Returns how many were taken in all, and why no more will come, if UCX knows.
    pub(super) fn receive(&self, into: &mut VecDeque<Arrived>) -> (u64, Option<LinkDown>) {
        let received = self.flow.progressed(|link| {
            let Some(from) = &mut link.from else { return (0, None) };
            from.pieces.take(into);
            let taken = from.pieces.taken();
            (taken, if into.is_empty() { link.down() } else { None })
        });
        received.unwrap_or((0, None))
    }

    /// Tells the peer the cost of what was read.
    pub(super) fn credit(&self, number: u64) -> Result<(), LinkDown> {
        let Flow { hub, peer, session } = &self.flow;
        let mut state = hub.state();
        let Some(link) = state.links.get_mut(peer) else { return Ok(()) };
        let sent = link.send(Header { kind: Kind::Credit, from: hub.me, session: *session, number });
        state.sent(*peer);
        sent
    }

    /// Has the engine told once there is a piece. True: there is one now, or none will come.
    pub(super) fn arm(&self) -> bool {
        let arm = |link: &mut Link| {
            let is_ready = link.down().is_some() || link.from.as_ref().is_none_or(|from| from.pieces.has_next());
            if let Some(from) = &mut link.from {
                from.is_armed = !is_ready;
            }
            is_ready
        };
        self.flow.progressed(arm).unwrap_or(true)
    }

    pub(super) fn disarm(&self) {
        self.flow.link(|link| link.from.as_mut().map(|from| from.is_armed = false));
    }

    pub(super) fn patience(&self) -> u32 {
        self.flow.patience()
    }
}

impl Drop for Inflow {
    fn drop(&mut self) {
        let Flow { hub, peer, session } = &self.flow;
        // As above.
        if hub.origin.is_here() {
            let mut state = hub.state();
            if let Some(link) = state.links.get_mut(peer) {
                link.from.take_if(|from| from.session == *session);
            }
            state.settle(*peer);
        }
    }
}

/// What a device takes to acknowledge messages, many times over.
const FINISH_TIMEOUT: Duration = Duration::from_millis(2);

/// How often to arm in one call while there is progress to make.
const ARMS_MAX: usize = 16;

#[cfg(test)]
mod tests;
