//! Endpoints: the streams to and from every other rank, when they are opened, and what their ends mean.
//!
//! An endpoint, as UCX calls it, is this rank's side of the connection to one peer: a stream each way, with its queue.
//! A rank opens a stream to a peer to send, and also to wait for a message: the end of that stream tells that the peer is
//! gone. A peer that turns out to be gone is marked as lost at once. What that ends is for the engine, which asks for
//! [`Endpoints::take_lost`].

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::engine::body::Body;
use crate::engine::completion::{Completion, OpId};
use crate::engine::connector::{FindRoutes, OPENING_CHECK};
use crate::engine::frame::{FAIL_TEXT_MAX, FRAGMENT_BYTES, Failed, Header};
use crate::engine::inbox::Inbox;
use crate::engine::outbox::Outbox;
use crate::engine::peers::{Peer, Peers};
use crate::error::{Error, LinkDown};
use crate::sys::tcp_info::TcpStats;
use crate::transport::{RingStats, Transport};
use crate::types::Rank;

/// The connections of one communicator.
pub(crate) struct Endpoints {
    me: Rank,
    /// The communicator's name, for the log.
    name: String,
    transports: Vec<Box<dyn Transport>>,
    peers: Peers,
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
    ) -> Endpoints {
        Endpoints { me, name, transports, peers: Peers::new(size, find_routes), lost: VecDeque::new() }
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

    /// The ranks that this one has talked to or heard of, in that order. What is done for all peers is done for these.
    #[inline]
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

    /// Whether a stream to `peer` has been opened, and the peer is not lost.
    pub(crate) fn is_connected(&self, peer: Rank) -> bool {
        self.peers.get(peer).is_some_and(|peer| peer.outbox.is_open() && peer.lost.is_none())
    }

    /// What the kernel knows of the connection to `peer`, if there is one, or knew when it was lost.
    pub(crate) fn tcp_stats(&self, peer: Rank) -> Option<TcpStats> {
        self.peers.get(peer).and_then(|peer| peer.outbox.tcp_stats().or(peer.last_tcp_stats))
    }

    /// How shared memory of `peer` is read, if there is a ring for it.
    pub(crate) fn ring_stats(&self, peer: Rank) -> Option<RingStats> {
        self.peers.get(peer).and_then(|peer| peer.inbox.as_ref()?.ring_stats())
    }

    /// Keeps what `peer` says of a failure for which it will leave.
    pub(crate) fn set_reported(&mut self, peer: Rank, text: String) {
        self.peers.meet(peer).reported = Some(text);
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

    /// Gives the inbox of `peer` away to be emptied, if something may have come. It comes back by
    /// [`Endpoints::return_inbox`], unless the peer is lost meanwhile.
    pub(crate) fn take_inbox(&mut self, peer: Rank) -> Option<Box<Inbox>> {
        let entry = self.peers.get_mut(peer)?;
        let inbox = entry.inbox.take();
        entry.is_draining |= inbox.is_some();
        inbox
    }

    /// Takes the inbox of `peer` back.
    pub(crate) fn return_inbox(&mut self, peer: Rank, inbox: Box<Inbox>) {
        let entry = self.peers.meet(peer);
        entry.is_draining = false;
        if entry.lost.is_none() {
            entry.inbox = Some(inbox);
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

    fn open(&mut self, peer: Rank) {
        if peer == self.me {
            return;
        }
        let entry = self.peers.meet(peer);
        if entry.ending.is_some() || entry.lost.is_some() {
            return;
        }
        match entry.way.open(peer, &mut self.transports, Instant::now()) {
            Ok(Some(send_stream)) => entry.outbox.open(send_stream),
            Ok(None) => {}
            Err(down) => {
                self.send_stream_closed(peer, down.clone());
                self.accept();
                if !self.may_bring_more(peer) {
                    self.lose(peer, &down);
                }
            }
        }
    }

    /// Accepts the streams that peers have opened.
    pub(crate) fn accept(&mut self) {
        for (number, transport) in self.transports.iter_mut().enumerate() {
            for (from, recv_stream) in transport.accept() {
                let peer = self.peers.meet(from);
                if !peer.outbox.is_open() {
                    peer.way.follow(number);
                }
                if peer.inbox.is_none() && peer.lost.is_none() {
                    peer.inbox = Some(Box::new(Inbox::new(recv_stream)));
                } else {
                    let (name, me) = (&self.name, self.me);
                    log::warn!("communicator `{name}` rank {me}: a second stream of rank {from} was refused");
                }
            }
        }
    }

    /// Opens what could not be opened before, and notices streams that broke. Returns the peers that have nothing more to
    /// say: what has come from them is to be taken, and then they are lost.
    pub(crate) fn check(&mut self) -> Vec<(Rank, LinkDown)> {
        let mut gone = Vec::new();
        for rank in self.known().to_vec() {
            let Some(peer) = self.peers.get_mut(rank) else { continue };
            match peer.ending.clone() {
                Some((down, since)) => {
                    self.accept();
                    if !self.may_bring_more(rank) || since.elapsed() >= DRAIN_TIMEOUT {
                        gone.push((rank, down));
                    }
                }
                None if peer.way.due().is_some() => self.connect(rank),
                None => {
                    if let Err(down) = peer.outbox.check_connection() {
                        self.send_stream_closed(rank, down);
                    } else if !peer.outbox.is_opening()
                        && let Some(cause) = peer.way.take_turn()
                    {
                        let (name, me, by) = (&self.name, self.me, peer.way.transport(&self.transports));
                        log::warn!("communicator `{name}` rank {me}: rank {rank} is reached by {by}, since {cause}");
                    }
                }
            }
        }
        gone
    }

    /// Lets every transport see which streams have brought something.
    pub(crate) fn look(&mut self) {
        self.transports.iter_mut().for_each(|transport| transport.look());
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
        let mut end = text.len().min(FAIL_TEXT_MAX);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.send(to, failed.header(end), Body::of_bytes(&text.as_bytes()[..end]), Completion::NONE);
    }

    /// As [`Endpoints::send`], but opens no stream. None: the peer is lost.
    pub(crate) fn write(&mut self, to: Rank, header: Header, body: Body, completion: Completion) -> Option<bool> {
        let peer = self.peers.meet(to);
        if peer.lost.is_some() {
            return None;
        }
        if peer.ending.is_some() || peer.outbox.is_waiting() || body.len() > FRAGMENT_BYTES {
            peer.outbox.push(header, body, completion);
            return Some(false);
        }
        Some(peer.outbox.write(header, body, completion).unwrap_or_else(|down| {
            self.send_stream_closed(to, down);
            false
        }))
    }

    /// Queues the rest of a message whose receiver has its first `offset` bytes.
    pub(crate) fn push_from(&mut self, to: Rank, offset: usize, header: Header, body: Body, completion: Completion) {
        self.peers.meet(to).outbox.push_from(offset, header, body, completion);
    }

    /// Writes what waits for `peer`, as far as there is room. Completions of what is written are appended to `done`. True:
    /// bytes moved, or the stream ended.
    pub(crate) fn progress_send(&mut self, peer: Rank, done: &mut Vec<Completion>) -> bool {
        let Some(entry) = self.peers.get_mut(peer) else { return false };
        if !entry.outbox.is_waiting() || entry.ending.is_some() {
            return false;
        }
        entry.outbox.pump(done).unwrap_or_else(|down| {
            self.send_stream_closed(peer, down);
            true
        })
    }

    /// Whether the stream to `peer` lets it read this process's memory.
    pub(crate) fn peer_can_read(&self, peer: Rank) -> bool {
        self.peers.get(peer).is_some_and(|peer| peer.outbox.peer_can_read())
    }

    /// Marks as stale what `peer` reads of this process's memory, until it knows what has been invalidated.
    pub(crate) fn mark_reads_stale(&mut self, peer: Rank) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.outbox.invalidate();
        }
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
    }

    /// Whether a message of `op` is under way to or from `peer`.
    pub(crate) fn exchanges(&self, op: OpId, peer: Rank) -> bool {
        let Some(peer) = self.peers.get(peer) else { return false };
        peer.outbox.holds(op) || peer.inbox.as_ref().is_some_and(|inbox| inbox.serves(op))
    }

    /// The bytes of the engine in long messages that wait to be written.
    pub(crate) fn held(&self) -> usize {
        self.peers.iter().map(|(_, peer)| peer.outbox.held()).sum()
    }

    // ---- waiting ----

    /// Whether bytes wait to be written, or streams are being opened.
    pub(crate) fn is_busy(&self) -> bool {
        self.peers.iter().any(|(_, peer)| peer.outbox.is_waiting() || peer.outbox.is_opening())
    }

    /// Whether every byte that should has left this process.
    pub(crate) fn flushed(&mut self) -> bool {
        let mut flushed = true;
        self.peers.for_each(|_, peer| flushed &= peer.lost.is_some() || peer.outbox.flushed().unwrap_or(true));
        flushed
    }

    /// The bytes that wait to be written.
    pub(crate) fn unsent(&self) -> usize {
        self.peers.iter().map(|(_, peer)| peer.outbox.unsent()).sum()
    }

    /// Asks every stream to wake the poller. True: there is something to do now. Ended by [`Endpoints::disarm`].
    pub(crate) fn arm(&mut self) -> bool {
        let mut ready = false;
        self.peers.for_each(|_, peer| {
            ready |= peer.inbox.as_mut().is_some_and(|inbox| inbox.arm());
            ready |= peer.outbox.is_waiting() && peer.ending.is_none() && peer.outbox.arm();
        });
        ready
    }

    /// Ends what [`Endpoints::arm`] began.
    pub(crate) fn disarm(&mut self) {
        self.peers.for_each(|_, peer| {
            if let Some(inbox) = &mut peer.inbox {
                inbox.disarm();
            }
            peer.outbox.disarm();
        });
    }

    /// Publishes that this rank waits on `cpu`. True: a peer waited there last.
    pub(crate) fn publish_cpu(&mut self, cpu: u32) -> bool {
        let mut is_shared = false;
        self.peers.for_each(|_, peer| {
            peer.outbox.publish_cpu(cpu);
            is_shared |= peer.inbox.as_ref().is_some_and(|inbox| inbox.peer_cpu() == Some(cpu));
        });
        is_shared
    }

    /// When to look again at streams that end, that are in their handshake, that are being opened, or that could not be.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let known = || self.peers.iter().map(|(_, peer)| peer);
        let ending = known().filter_map(|peer| peer.ending.as_ref()).map(|(_, since)| *since + DRAIN_TIMEOUT);
        let accepting = self.transports.iter().filter_map(|transport| transport.accepting_until());
        let opening = known().filter_map(|peer| peer.way.due());
        let opened = known().any(|peer| peer.outbox.is_opening()).then(|| Instant::now() + OPENING_CHECK);
        ending.chain(accepting).chain(opening).chain(opened).min()
    }

    /// The error of an operation whose time is over, which waited for these ranks: `detail`, and why there are no streams.
    pub(crate) fn timeout(
        &self,
        ranks: Range<usize>,
        waited: Duration,
        mut detail: String,
    ) -> impl FnOnce(String) -> Error + use<> {
        let mut is_short = false;
        for rank in ranks {
            let Some(Peer { way, .. }) = self.peers.get(Rank::from(rank)) else { continue };
            is_short |= way.is_short();
            if let Some(cause) = way.obstacle() {
                detail += &format!("; there is no connection to rank {rank} yet: {cause}");
            }
        }
        for shortage in self.transports.iter().filter_map(|transport| transport.shortage()) {
            is_short = true;
            detail += &format!("; no connection can be accepted: {shortage}");
        }
        move |operation| match is_short {
            true => Error::Resource { operation, waited, detail },
            false => Error::Timeout { operation, waited, detail },
        }
    }

    // ---- ends ----

    /// The stream to `peer` broke or cannot be opened, so that it takes nothing more. What the peer sent may be on its way in
    /// the other stream, whose own end tells when all has come.
    fn send_stream_closed(&mut self, peer: Rank, down: LinkDown) {
        let (entry, now) = (self.peers.meet(peer), Instant::now());
        if entry.lost.is_none() && entry.ending.is_none() {
            match entry.way.ended(down, now) {
                Ok(()) => entry.outbox.close(),
                Err(down) => entry.ending = Some((down, now)),
            }
        }
    }

    /// Whether there is a stream from `peer`, or there may be one in its handshake.
    fn may_bring_more(&self, peer: Rank) -> bool {
        self.peers.get(peer).is_some_and(|peer| peer.inbox.is_some() || peer.is_draining)
            || self.transports.iter().any(|transport| transport.accepting_until().is_some())
    }

    /// Marks `peer` as gone. Its streams stay until [`Endpoints::drop_streams`], to tell which operations need them.
    pub(crate) fn lose(&mut self, peer: Rank, down: &LinkDown) {
        let entry = self.peers.meet(peer);
        if entry.lost.is_some() {
            return;
        }
        // A rank that leaves because another one was lost is not the culprit.
        let cause = match &entry.reported {
            Some(report) => format!("{}, after it had reported: {report}", down.cause),
            None => down.cause.clone(),
        };
        log::debug!("communicator `{}` rank {}: the streams of rank {peer} have ended: {cause}", self.name, self.me);
        entry.lost = Some(cause);
        entry.last_tcp_stats = entry.outbox.tcp_stats();
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
        entry.way.give_up();
        entry.inbox = None;
        entry.ending = None;
    }

    /// Drops all streams: the communicator is `how` ("aborted: …").
    pub(crate) fn close(&mut self, how: &str) {
        self.peers.close(how);
        self.transports.clear();
        self.lost.clear();
    }
}

/// In larger worlds, failures are told to this many ranks, and they time out on the others.
const NOTIFY_MAX_RANKS: usize = 128;

/// How long the stream from a peer may outlast the stream to it.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);
