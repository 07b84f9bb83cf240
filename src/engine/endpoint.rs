//! Endpoints: the streams to and from every other rank, when they are opened, and what their ends mean.
//!
//! An endpoint, as UCX calls it, is this rank's side of the connection to one peer: a stream each way, with its queue.
//! A rank opens a stream to a peer to send, and also to wait for a message: the end of that stream tells that the peer is
//! gone. A peer that turns out to be gone is marked as lost at once. What that ends is for the engine, which asks for
//! [`Endpoints::take_lost`].

mod waiting;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::engine::agenda::{Agenda, List};
use crate::engine::body::Body;
use crate::engine::completion::{Completion, OpId};
use crate::engine::connector::FindRoutes;
use crate::engine::frame::{FAIL_TEXT_MAX, FRAGMENT_BYTES, Failed, Header};
use crate::engine::inbox::Inbox;
use crate::engine::outbox::{LinkStats, Outbox};
use crate::engine::peers::{ACCEPT_TIMEOUT, DRAIN_TIMEOUT, Peer, Peers};
use crate::error::{LinkDown, beginning};
use crate::sys::poller::StreamName;
use crate::transport::{Expose, Read, RemoteMemory, RingStats, TakeRead, Transport, Watcher};
use crate::types::Rank;

/// What a look has found.
pub(crate) struct Looked {
    pub(crate) is_stream_ready: bool,
    /// A listener, or a connection in its handshake.
    pub(crate) is_other_ready: bool,
    /// The peers that have nothing more to say, as of [`Endpoints::check`].
    pub(crate) gone: Vec<(Rank, LinkDown)>,
}

/// The connections of one communicator.
pub(crate) struct Endpoints {
    me: Rank,
    /// The communicator's name, for the log.
    name: String,
    transports: Vec<Box<dyn Transport>>,
    peers: Peers,
    agenda: Agenda,
    watcher: Box<dyn Watcher>,
    /// What it has named, while that is dealt with.
    named: Vec<StreamName>,
    /// A thread sleeps until the watcher names a stream: all that may move are armed. What is put on the agenda wakes it.
    is_asleep: bool,
    /// Streams that were armed for that sleep alone.
    dozing: Vec<(List, Rank)>,
    /// When streams that are being opened were looked after last.
    tended: Option<Instant>,
    /// The CPU that peers know this rank to wait on.
    cpu: Option<u32>,
    /// Peers that are lost, of which the engine has not heard.
    lost: VecDeque<Rank>,
}

impl Endpoints {
    pub(crate) fn new(
        name: String,
        me: Rank,
        transports: Vec<Box<dyn Transport>>,
        size: usize,
        find_routes: FindRoutes,
        watcher: Box<dyn Watcher>,
    ) -> Endpoints {
        Endpoints {
            me,
            name,
            transports,
            peers: Peers::new(size, find_routes),
            agenda: Agenda::new(size),
            watcher,
            named: Vec::new(),
            is_asleep: false,
            dozing: Vec::new(),
            tended: None,
            cpu: None,
            lost: VecDeque::new(),
        }
    }

    /// The communicator's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// This rank.
    pub(crate) fn me(&self) -> Rank {
        self.me
    }

    /// The number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.peers.size()
    }

    /// The ranks that this one has talked to or heard of, in that order. What is done for all peers, such as at an end, is done for
    /// these; a turn looks at those on the agenda.
    pub(crate) fn known(&self) -> &[Rank] {
        self.peers.known()
    }

    /// The other ranks that are told of a failure: all, and in large worlds some that can be reached, those that this rank
    /// knows first.
    pub(crate) fn others(&self) -> Vec<Rank> {
        let all = (0..self.size()).map(Rank::from).filter(|rank| *rank != self.me);
        if self.size() <= NOTIFY_MAX_RANKS {
            return all.collect();
        }
        let strangers = all.filter(|rank| self.peers.get(*rank).is_none());
        let known = self.known().iter().copied().filter(|rank| *rank != self.me && self.lost(*rank).is_none());
        known.chain(strangers).take(NOTIFY_MAX_RANKS).collect()
    }

    /// How often this was asked for something of a peer since this function was called last.
    #[cfg(test)]
    pub(crate) fn take_looks(&self) -> usize {
        self.peers.take_looks()
    }

    /// Why `peer` cannot be reached, if it cannot.
    #[inline]
    pub(crate) fn lost(&self, peer: Rank) -> Option<&str> {
        self.peers.lost(peer)
    }

    /// Since when `peer` cannot be reached, if its streams have ended.
    pub(crate) fn lost_at(&self, peer: Rank) -> Option<Instant> {
        self.peers.get(peer)?.lost_at
    }

    /// Whether a stream to `peer` has been opened, and the peer is not lost.
    pub(crate) fn is_connected(&self, peer: Rank) -> bool {
        self.peers.get(peer).is_some_and(|peer| peer.outbox.is_open() && peer.lost.is_none())
    }

    /// How the connections to `peer` do, or did when it was lost.
    pub(crate) fn link_stats(&self, peer: Rank) -> LinkStats {
        let stats = |peer: &Peer| if peer.lost.is_some() { peer.last_stats } else { peer.outbox.link_stats() };
        self.peers.get(peer).map(stats).unwrap_or_default()
    }

    /// The name of the transport by which `peer` is reached, once this rank has talked to it, and what bytes go through where that
    /// transport chooses.
    pub(crate) fn transport(&self, peer: Rank) -> Option<(&'static str, Vec<String>)> {
        let peer = self.peers.get(peer).filter(|peer| peer.outbox.is_open())?;
        Some((peer.connector.transport(&self.transports), peer.outbox.devices()))
    }

    /// How shared memory of `peer` is read, if there is a ring for it.
    pub(crate) fn ring_stats(&self, peer: Rank) -> Option<RingStats> {
        self.peers.get(peer).and_then(|peer| peer.inbox.as_ref()?.ring_stats())
    }

    /// Keeps what `peer` says of the loss of another rank, for which it will leave.
    pub(crate) fn set_reported(&mut self, peer: Rank, lost: Option<Rank>, text: String) {
        self.peers.meet(peer).reported = Some((lost, text));
    }

    /// The rank to blame for `peer`, which is gone, and why, if `peer` has left for the loss of another one. That one may have
    /// left for the loss of a third.
    pub(crate) fn culprit_behind(&self, peer: Rank) -> Option<(Rank, String)> {
        let mut culprit = None;
        let (mut last, mut blamed) = (peer, vec![self.me, peer]);
        while let Some((Some(lost), text)) = self.peers.get(last).and_then(|peer| peer.reported.as_ref())
            && !blamed.contains(lost)
        {
            culprit = Some((*lost, format!("rank {last} reported: {text}")));
            blamed.push(*lost);
            last = *lost;
        }
        culprit
    }

    /// Whether `peer` has said why it will leave.
    pub(crate) fn has_reported(&self, peer: Rank) -> bool {
        self.peers.get(peer).is_some_and(|peer| peer.reported.is_some())
    }

    /// The receiving side of `peer`, while there is a stream from it.
    #[inline]
    pub(crate) fn inbox(&mut self, peer: Rank) -> Option<&mut Inbox> {
        self.peers.get_mut(peer)?.inbox.as_deref_mut()
    }

    /// How often `peer` has invalidated memory, while there is a stream from it.
    pub(crate) fn invalidations(&self, peer: Rank) -> Option<u64> {
        self.peers.get(peer)?.inbox.as_ref().map(|inbox| inbox.invalidations())
    }

    /// Gives the inbox of `peer` away to be emptied, if there is one. It comes back by [`Endpoints::return_inbox`], unless the
    /// peer is lost meanwhile.
    pub(crate) fn take_inbox(&mut self, peer: Rank) -> Option<Box<Inbox>> {
        let entry = self.peers.get_mut(peer)?;
        let inbox = entry.inbox.take();
        entry.is_draining |= inbox.is_some();
        inbox
    }

    /// Takes the inbox of `peer` back, from which something has `moved` or not.
    pub(crate) fn return_inbox(&mut self, peer: Rank, mut inbox: Box<Inbox>, moved: bool) {
        let entry = self.peers.meet(peer);
        entry.is_draining = false;
        if entry.lost.is_some() {
            return;
        }
        let is_silent = inbox.is_silent(moved, self.agenda.ranks(List::Reading).len());
        entry.inbox = Some(inbox);
        if is_silent {
            self.silence(peer);
        }
    }

    // ---- the agenda ----

    /// The stream from this rank is the one to be read next in a turn that has read so many.
    #[inline]
    pub(crate) fn reading(&self, turn: usize) -> Option<Rank> {
        self.agenda.ranks(List::Reading).get(turn).copied()
    }

    /// What waits for this rank is to be written next in a turn that has done so for so many.
    #[inline]
    pub(crate) fn writing(&self, turn: usize) -> Option<Rank> {
        self.agenda.ranks(List::Writing).get(turn).copied()
    }

    /// How many turns may pass between two looks at which streams are ready; none if no stream is armed. A look costs a system
    /// call.
    #[inline]
    pub(crate) fn look_interval(&self) -> Option<u32> {
        self.agenda.has_armed().then(|| if self.agenda.is_empty() { 1 } else { LOOK_INTERVAL })
    }

    /// Puts the streams on the agenda that are ready.
    pub(crate) fn look(&mut self) -> Looked {
        let (mut named, mut gone) = (std::mem::take(&mut self.named), Vec::new());
        let mut is_other_ready = self.watcher.look(&mut named);
        for transport in &mut self.transports {
            is_other_ready |= transport.look(&mut named);
        }
        let is_stream_ready = !named.is_empty();
        for name in named.drain(..) {
            match name {
                StreamName::From(peer) if self.agenda.has(List::Silent, peer) => self.read_again(peer),
                StreamName::From(peer) => {
                    if let Some(inbox) = self.inbox(peer) {
                        inbox.named();
                    }
                }
                StreamName::To(peer) => gone.extend(self.tend(peer).map(|down| (peer, down))),
            }
        }
        self.named = named;
        Looked { is_stream_ready, is_other_ready, gone }
    }

    /// Has each turn read the armed stream from `peer`, from which something comes, and so the thread that sleeps.
    fn read_again(&mut self, peer: Rank) {
        if let Some(inbox) = self.inbox(peer) {
            inbox.expect_more();
        }
        self.read_on(peer);
    }

    /// The same, for as long as it would have been looked at before it was armed.
    fn read_on(&mut self, peer: Rank) {
        // Without its inbox, which is being emptied, it stays where it is.
        let Some(inbox) = self.inbox(peer) else { return };
        inbox.disarm();
        self.agenda.remove(List::Silent, peer);
        if self.agenda.insert(List::Reading, peer) {
            self.disturb();
        }
    }

    /// Arms the stream from `peer`. False: there is something to read now.
    fn silence(&mut self, peer: Rank) -> bool {
        let is_armed = self.inbox(peer).map(|inbox| inbox.arm());
        if is_armed == Some(false) {
            return false;
        }
        self.agenda.remove(List::Reading, peer);
        if is_armed.is_some() {
            self.agenda.insert(List::Silent, peer);
        }
        true
    }

    /// Has each turn write what waits for `peer`, unless its stream is armed because there was no room.
    fn write_on(&mut self, peer: Rank) {
        if !self.agenda.has(List::Blocked, peer) && self.agenda.insert(List::Writing, peer) {
            self.disturb();
        }
    }

    /// The same, also if its stream is armed.
    fn write_again(&mut self, peer: Rank) {
        if self.agenda.remove(List::Blocked, peer)
            && let Some(peer) = self.peers.get_mut(peer)
        {
            peer.outbox.disarm();
        }
        self.write_on(peer);
    }

    /// Has everything that waits be written in the next turn, also where there was no room.
    pub(crate) fn write_all(&mut self) {
        self.agenda.ranks(List::Blocked).to_vec().into_iter().for_each(|peer| self.write_again(peer));
    }

    /// Arms the stream to `peer`. False: there is room now.
    fn block(&mut self, peer: Rank) -> bool {
        if self.peers.get_mut(peer).is_some_and(|peer| !peer.outbox.arm()) {
            return false;
        }
        self.agenda.remove(List::Writing, peer);
        self.agenda.insert(List::Blocked, peer);
        true
    }

    /// Puts the connection to `peer` on the agenda as long as there is something to be done about it, or takes it off.
    fn settle(&mut self, peer: Rank) {
        let is_unsettled = self.peers.get(peer).is_some_and(|peer| {
            let is_opened = peer.connector.due().is_some() || peer.outbox.is_opening();
            peer.lost.is_none() && (peer.ending.is_some() || is_opened)
        });
        if is_unsettled {
            self.agenda.insert(List::Unsettled, peer);
            // Also if it was there: it may be due sooner than before.
            self.disturb();
        } else {
            self.agenda.remove(List::Unsettled, peer);
        }
    }

    /// Wakes the thread that sleeps, if one does: there is something on the agenda that it does not know of.
    fn disturb(&mut self) {
        if std::mem::take(&mut self.is_asleep) {
            self.watcher.wake();
        }
    }

    // ---- opening streams ----

    /// Opens the stream to `peer` if there is none. What is sent waits while it cannot be opened.
    #[inline]
    pub(crate) fn connect(&mut self, peer: Rank) {
        if !self.peers.get(peer).is_some_and(|peer| peer.outbox.is_open()) {
            self.open(peer);
        }
    }

    /// The same where something is expected from `peer`: the stream from it is looked at in each turn, so that nobody has to
    /// tell the poller. Where a thread sleeps, that is up to the poller all the same.
    pub(crate) fn expect(&mut self, peer: Rank) {
        self.connect(peer);
        if !self.is_asleep && self.agenda.has(List::Silent, peer) {
            self.read_again(peer);
        }
    }

    fn open(&mut self, peer: Rank) {
        if peer == self.me {
            return;
        }
        let entry = self.peers.meet(peer);
        if entry.ending.is_some() || entry.lost.is_some() {
            return;
        }
        match entry.connector.open(peer, &mut self.transports, Instant::now()) {
            Ok(Some(send_stream)) => {
                entry.outbox.open(send_stream);
                if let Some(cpu) = self.cpu {
                    entry.outbox.publish_cpu(cpu);
                }
                if entry.outbox.is_waiting() {
                    self.write_again(peer);
                }
            }
            Ok(None) => {}
            Err(down) => {
                self.send_stream_closed(peer, down.clone());
                self.accept();
                if self.patience(peer).is_zero() {
                    self.lose(peer, &down);
                }
            }
        }
        self.settle(peer);
    }

    /// Accepts the streams that peers have opened.
    pub(crate) fn accept(&mut self) {
        let mut is_any = false;
        for (number, transport) in self.transports.iter_mut().enumerate() {
            for (from, recv_stream) in transport.accept() {
                let peer = self.peers.meet(from);
                if !peer.outbox.is_open() {
                    peer.connector.follow(number);
                }
                if peer.inbox.is_none() && peer.lost.is_none() {
                    peer.inbox = Some(Box::new(Inbox::new(recv_stream)));
                    is_any |= self.agenda.insert(List::Reading, from);
                } else {
                    let (name, me) = (&self.name, self.me);
                    log::warn!("communicator `{name}` rank {me}: a second stream of rank {from} was refused");
                }
            }
        }
        if is_any {
            self.disturb();
        }
    }

    /// Looks after the connections that are being opened or end. The poller names those that break later. Returns the peers that
    /// have nothing more to say: what has come from them is to be taken, and then they are lost.
    pub(crate) fn check(&mut self) -> Vec<(Rank, LinkDown)> {
        if self.agenda.ranks(List::Unsettled).is_empty() {
            return Vec::new();
        }
        // The poller names those whose opening goes on. That is for what it does not see, such as time.
        let now = Instant::now();
        let is_due = self.tended.is_none_or(|tended| now.duration_since(tended) >= OPENING_TEND);
        self.tended = if is_due { Some(now) } else { self.tended };
        let mut gone = Vec::new();
        for rank in self.agenda.ranks(List::Unsettled).to_vec() {
            let is_opening = |peer: &Peer| peer.ending.is_none() && peer.connector.due().is_none();
            if is_due || !self.peers.get(rank).is_some_and(is_opening) {
                gone.extend(self.tend(rank).map(|down| (rank, down)));
            }
        }
        gone
    }

    /// Opens the stream to `rank` if it could not be opened before, and notices if it broke. Why nothing more is to come from
    /// there, if that is so.
    fn tend(&mut self, rank: Rank) -> Option<LinkDown> {
        let peer = self.peers.get_mut(rank).filter(|peer| peer.lost.is_none())?;
        match peer.ending.clone() {
            Some((down, since)) => {
                self.accept();
                return (since.elapsed() >= self.patience(rank)).then_some(down);
            }
            None if peer.connector.due().is_some() => self.connect(rank),
            None => {
                match peer.outbox.check_connection() {
                    Err(down) => self.send_stream_closed(rank, down),
                    Ok(()) => self.tell_of_detour(rank),
                }
                self.settle(rank);
                // To check takes away what would have told that there is room.
                if self.peers.get(rank).is_some_and(|peer| peer.outbox.is_waiting()) {
                    self.write_again(rank);
                }
            }
        }
        None
    }

    /// Logs that `rank` is reached in another way than the preferred one, once a stream is open.
    fn tell_of_detour(&mut self, rank: Rank) {
        if let Some(peer) = self.peers.get_mut(rank).filter(|peer| !peer.outbox.is_opening())
            && let Some(cause) = peer.connector.take_turn()
        {
            let (name, me, by) = (&self.name, self.me, peer.connector.transport(&self.transports));
            log::warn!("communicator `{name}` rank {me}: rank {rank} is reached by {by}, since {cause}");
        }
    }

    // ---- sending ----

    /// Sends a frame: at once if the stream takes it, else when it has room. True: it is written, which the completion
    /// is not told. Nothing is sent to a peer that is lost.
    pub(crate) fn send(&mut self, to: Rank, header: Header, body: Body, completion: Completion) -> bool {
        self.connect(to);
        self.write(to, header, body, completion).unwrap_or(false)
    }

    /// Sends a frame without a payload, of which no operation is told.
    pub(crate) fn send_control(&mut self, to: Rank, header: Header) {
        self.send(to, header, Body::Empty, Completion::NONE);
    }

    /// Tells `to` that an operation has failed here.
    pub(crate) fn send_failure(&mut self, to: Rank, failed: Failed, text: &str) {
        let text = beginning(text, FAIL_TEXT_MAX);
        self.send(to, failed.header(text.len()), Body::of_bytes(text.as_bytes()), Completion::NONE);
    }

    /// As [`Endpoints::send`], but opens no stream. None: the peer is lost.
    pub(crate) fn write(&mut self, to: Rank, header: Header, body: Body, completion: Completion) -> Option<bool> {
        let peer = self.peers.meet(to);
        if peer.lost.is_some() {
            return None;
        }
        if peer.ending.is_some() || peer.outbox.is_waiting() || body.len() > FRAGMENT_BYTES {
            peer.outbox.push(header, body, completion);
            self.write_on(to);
            return Some(false);
        }
        match peer.outbox.write(header, body, completion) {
            Ok(true) => return Some(true),
            Ok(false) => {}
            Err(down) => self.send_stream_closed(to, down),
        }
        self.write_on(to);
        Some(false)
    }

    /// Queues the rest of a message whose receiver has its first `offset` bytes.
    pub(crate) fn push_from(&mut self, to: Rank, offset: usize, header: Header, body: Body, completion: Completion) {
        self.peers.meet(to).outbox.push_from(offset, header, body, completion);
        self.write_on(to);
    }

    /// Writes what waits for `peer`, as far as there is room. Completions of what is written are appended to `done`. True:
    /// bytes moved, or the stream ended.
    pub(crate) fn progress_send(&mut self, peer: Rank, done: &mut Vec<Completion>) -> bool {
        let waits = |peer: &&mut Peer| peer.outbox.is_waiting() && peer.ending.is_none();
        let Some(entry) = self.peers.get_mut(peer).filter(waits) else {
            self.agenda.remove(List::Writing, peer);
            return false;
        };
        match entry.outbox.pump(done) {
            Ok(moved) => {
                if !entry.outbox.is_waiting() {
                    self.agenda.remove(List::Writing, peer);
                } else if entry.outbox.is_blocked(moved, self.agenda.ranks(List::Writing).len()) {
                    self.block(peer);
                }
                // To write has opened it. It may have ended by the time that it would be looked after.
                if moved && self.agenda.has(List::Unsettled, peer) {
                    self.tell_of_detour(peer);
                }
                moved
            }
            Err(down) => {
                self.send_stream_closed(peer, down);
                true
            }
        }
    }

    /// Whether the stream to `peer` lets it read this process's memory, if it is open.
    pub(crate) fn peer_can_read(&self, peer: Rank) -> Option<bool> {
        self.peers.get(peer).and_then(|peer| peer.outbox.peer_can_read())
    }

    /// Whether this rank reads what `peer` has exposed by itself.
    pub(crate) fn can_read(&self, peer: Rank) -> bool {
        self.peers.get(peer).is_some_and(|peer| peer.lost.is_none() && peer.outbox.can_read())
    }

    /// Marks as stale what `peer` reads of this process's memory, until it knows what has been invalidated.
    pub(crate) fn mark_reads_stale(&mut self, peer: Rank) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.outbox.invalidate();
        }
    }

    /// What lets peers read this rank's memory, where a transport can.
    pub(crate) fn exposer(&self) -> Option<crate::sync::Arc<dyn Expose>> {
        self.transports.iter().find_map(|transport| transport.exposer())
    }

    /// Begins to read what `peer` has exposed; see [`SendStream::begin_read`](crate::transport::SendStream::begin_read).
    pub(crate) fn begin_read(&mut self, peer: Rank, token: u64, from: RemoteMemory<'_>) -> Read {
        let entry = self.peers.get_mut(peer).filter(|peer| peer.lost.is_none() && peer.ending.is_none());
        entry.map_or(Read::Unable, |peer| peer.outbox.begin_read(token, from))
    }

    /// Tells of reads that have ended.
    pub(crate) fn take_reads(&mut self, take: &mut TakeRead<'_>) {
        self.transports.iter_mut().for_each(|transport| transport.take_reads(take));
    }

    // ---- one operation ----

    /// Drops what is queued and received for `op`, whose memory must not be touched any more. `unsent` is told of each
    /// message of which its peer never hears.
    pub(crate) fn cancel(&mut self, op: OpId, mut unsent: impl FnMut(Rank, Header)) {
        self.peers.for_each(|rank, peer| {
            peer.outbox.cancel(op, |header| unsent(rank, header));
            if let Some(inbox) = &mut peer.inbox {
                inbox.cancel(op);
            }
        });
        for list in [List::Writing, List::Blocked] {
            for rank in self.agenda.ranks(list).to_vec() {
                let is_empty = |peer: &&mut Peer| !peer.outbox.is_waiting();
                if let Some(peer) = self.peers.get_mut(rank).filter(is_empty) {
                    peer.outbox.disarm();
                    self.agenda.remove(list, rank);
                }
            }
        }
    }

    /// Whether a message of `op` is under way to or from `peer`.
    pub(crate) fn exchanges(&self, op: OpId, peer: Rank) -> bool {
        let Some(peer) = self.peers.get(peer) else { return false };
        peer.outbox.holds(op) || peer.inbox.as_ref().is_some_and(|inbox| inbox.serves(op))
    }

    /// The bytes of the engine in long messages that wait to be written.
    pub(crate) fn held(&self) -> usize {
        self.queues().map(|peer| peer.outbox.held()).sum()
    }

    /// The peers for which something waits that can be written.
    fn queues(&self) -> impl Iterator<Item = &Peer> {
        let lists = [List::Writing, List::Blocked].map(|list| self.agenda.ranks(list));
        lists.into_iter().flatten().filter_map(|rank| self.peers.get(*rank))
    }

    /// The peers whose connections are on the agenda.
    fn unsettled(&self) -> impl Iterator<Item = &Peer> {
        self.agenda.ranks(List::Unsettled).iter().filter_map(|rank| self.peers.get(*rank))
    }

    // ---- ends ----

    /// The stream to `peer` broke or cannot be opened, so that it takes nothing more. What the peer sent may be on its way in
    /// the other stream, whose own end tells when all has come.
    fn send_stream_closed(&mut self, peer: Rank, down: LinkDown) {
        let (entry, now) = (self.peers.meet(peer), Instant::now());
        if entry.lost.is_none() && entry.ending.is_none() {
            match entry.connector.ended(down, now) {
                Ok(()) => entry.outbox.close(),
                Err(down) => entry.ending = Some((down, now)),
            }
        }
        self.settle(peer);
    }

    /// For how long more may come from `peer` after its other stream has ended: from a stream, or one in its handshake.
    fn patience(&self, peer: Rank) -> Duration {
        let brings = |peer: &&Peer| peer.inbox.is_some() || peer.is_draining;
        match self.peers.get(peer).filter(brings) {
            None => ACCEPT_TIMEOUT * u32::from(self.transports.iter().any(|each| each.accepting_until().is_some())),
            Some(peer) if peer.outbox.was_accepted() => DRAIN_TIMEOUT,
            Some(_) => ACCEPT_TIMEOUT,
        }
    }

    /// Marks `peer` as gone. Its streams stay until [`Endpoints::drop_streams`], to tell which operations need them.
    pub(crate) fn lose(&mut self, peer: Rank, down: &LinkDown) {
        let entry = self.peers.meet(peer);
        if entry.lost.is_some() {
            return;
        }
        // A rank that leaves because another one was lost is not the culprit.
        let cause = match &entry.reported {
            Some((_, report)) => format!("{}, after it had reported: {report}", down.cause),
            None => down.cause.clone(),
        };
        log::debug!("communicator `{}` rank {}: the streams of rank {peer} have ended: {cause}", self.name, self.me);
        (entry.lost, entry.lost_at) = (Some(cause), Some(Instant::now()));
        entry.last_stats = entry.outbox.link_stats();
        self.lost.push_back(peer);
    }

    /// Whether a peer was marked as gone since [`Endpoints::take_lost`] was asked last.
    #[inline]
    pub(crate) fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// A peer that was marked as gone since this was asked last.
    pub(crate) fn take_lost(&mut self) -> Option<Rank> {
        self.lost.pop_front()
    }

    /// Drops the streams of a peer that is lost.
    pub(crate) fn drop_streams(&mut self, peer: Rank) {
        let entry = self.peers.meet(peer);
        entry.outbox = Outbox::default();
        entry.connector.give_up();
        entry.inbox = None;
        entry.ending = None;
        self.agenda.forget(peer);
    }

    /// Drops all streams: the communicator is `how` ("aborted: …").
    pub(crate) fn close(&mut self, how: &str) {
        self.peers.close(how);
        self.peers.known().iter().for_each(|rank| self.agenda.forget(*rank));
        self.transports.clear();
        self.lost.clear();
    }
}

/// How many turns that look at other streams pass between two looks at which of those that are armed are ready.
const LOOK_INTERVAL: u32 = 16;

/// How often at most to look after streams that are being opened, of which the poller has nothing to tell.
const OPENING_TEND: Duration = Duration::from_millis(5);

/// In larger worlds, failures are told to this many ranks, and they time out on the others.
const NOTIFY_MAX_RANKS: usize = 128;
