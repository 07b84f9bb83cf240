//! What a thread that waits asks of the endpoints: whether it may sleep and until when, and what an operation waited for.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::Endpoints;
use crate::engine::agenda::List;
use crate::engine::connector::OPENING_CHECK;
use crate::engine::peers::{ACCEPT_TIMEOUT, Peer};
use crate::error::Error;
use crate::types::Rank;

impl Endpoints {
    /// Whether bytes wait to be written, or streams are being opened.
    pub(crate) fn is_busy(&self) -> bool {
        self.queues().chain(self.unsettled()).any(|peer| peer.outbox.is_waiting() || peer.outbox.is_opening())
            || self.holds_bytes()
    }

    /// Whether bytes that streams have taken wait in this process.
    pub(crate) fn holds_bytes(&self) -> bool {
        self.transports.iter().any(|transport| transport.holds_bytes())
    }

    /// Whether every byte that should has left this process.
    pub(crate) fn flushed(&mut self) -> bool {
        let mut flushed = true;
        self.peers.for_each(|_, peer| flushed &= peer.lost.is_some() || peer.outbox.flushed().unwrap_or(true));
        flushed
    }

    /// The bytes that wait to be written.
    pub(crate) fn unsent(&self) -> usize {
        self.queues().map(|peer| peer.outbox.unsent()).sum()
    }

    /// Arms every stream that is on the agenda. False: there is something to do now. True: a thread may sleep until the watcher
    /// names a stream; ended by [`Endpoints::disarm`].
    pub(crate) fn arm(&mut self) -> bool {
        let (mut ready, mut turn) = (false, 0);
        while let Some(peer) = self.reading(turn) {
            let stays = self.inbox(peer).is_some_and(|inbox| inbox.sleep());
            if !self.silence(peer) {
                (ready, turn) = (true, turn + 1);
            } else if stays {
                self.dozing.push((List::Silent, peer));
            }
        }
        turn = 0;
        while let Some(peer) = self.writing(turn) {
            let can_write = |peer: &&mut Peer| peer.outbox.is_waiting() && peer.ending.is_none();
            let Some(entry) = self.peers.get_mut(peer).filter(can_write) else {
                self.agenda.remove(List::Writing, peer);
                continue;
            };
            let stays = entry.outbox.sleep();
            if !self.block(peer) {
                (ready, turn) = (true, turn + 1);
            } else if stays {
                self.dozing.push((List::Blocked, peer));
            }
        }
        ready = ready || self.transports.iter_mut().any(|transport| transport.arm());
        self.is_asleep = !ready;
        !ready
    }

    /// Ends what [`Endpoints::arm`] began, also if that found something to do.
    pub(crate) fn disarm(&mut self) {
        self.is_asleep = false;
        let mut dozing = std::mem::take(&mut self.dozing);
        for (list, peer) in dozing.drain(..) {
            match list {
                _ if !self.agenda.has(list, peer) => {}
                List::Silent => self.read_on(peer),
                _ => self.write_again(peer),
            }
        }
        self.dozing = dozing;
    }

    /// Publishes that this rank waits on `cpu`. True: a peer whose messages are waited for waited there last.
    pub(crate) fn publish_cpu(&mut self, cpu: u32) -> bool {
        if self.cpu.replace(cpu) != Some(cpu) {
            self.peers.for_each(|_, peer| peer.outbox.publish_cpu(cpu));
        }
        let waits_here = |rank: &Rank| {
            let inbox = self.peers.get(*rank).and_then(|peer| peer.inbox.as_ref());
            inbox.is_some_and(|inbox| inbox.peer_cpu() == Some(cpu))
        };
        self.agenda.ranks(List::Reading).iter().any(waits_here)
    }

    /// When to look again at streams that end, that are in their handshake, that are being opened, or that could not be.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let ending = self.unsettled().any(|peer| peer.ending.is_some()).then(|| Instant::now() + ACCEPT_TIMEOUT);
        let accepting = self.transports.iter().filter_map(|transport| transport.accepting_until());
        let opening = self.unsettled().filter_map(|peer| peer.connector.due());
        let opened = self.unsettled().any(|peer| peer.outbox.is_opening()).then(|| Instant::now() + OPENING_CHECK);
        ending.into_iter().chain(accepting).chain(opening).chain(opened).min()
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
            let Some(Peer { connector, .. }) = self.peers.get(Rank::from(rank)) else { continue };
            is_short |= connector.is_short();
            if let Some(cause) = connector.obstacle() {
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
}
