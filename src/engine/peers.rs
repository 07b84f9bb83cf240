//! The other ranks, as far as this one knows them.
//!
//! A large world has ten thousand ranks, of which one rank talks to a few. One that it has not talked to takes an empty place
//! in a table here. What is done for all peers, such as at an end, is done for those that it knows.

use std::time::{Duration, Instant};

use crate::engine::connector::{Connector, FindRoutes};
use crate::engine::inbox::Inbox;
use crate::engine::outbox::{LinkStats, Outbox};
use crate::error::LinkDown;
use crate::types::Rank;

/// The connection to one other rank.
#[derive(Default)]
pub(crate) struct Peer {
    pub(crate) connector: Connector,
    pub(crate) outbox: Outbox,
    pub(crate) inbox: Option<Box<Inbox>>,
    /// The engine has the inbox, to empty it.
    pub(crate) is_draining: bool,
    /// The stream to it broke: why and when. What it sent before may still be on its way.
    pub(crate) ending: Option<(LinkDown, Instant)>,
    /// Why it cannot be reached any more.
    pub(crate) lost: Option<String>,
    /// When it was lost.
    pub(crate) lost_at: Option<Instant>,
    /// How the connections to it did when it was lost.
    pub(crate) last_stats: LinkStats,
    /// Which rank it said is lost, for which it will leave, and how that was found out.
    pub(crate) reported: Option<(Option<Rank>, String)>,
}

/// How long the stream from a peer may outlast the stream to it: TCP may have to send its last bytes several times.
pub(crate) const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// The same where the stream to the peer could not be opened, and of one from it in its handshake, which may be another peer's.
pub(crate) const ACCEPT_TIMEOUT: Duration = Duration::from_millis(500);

/// The peers of one rank.
pub(crate) struct Peers {
    find_routes: FindRoutes,
    /// By rank.
    table: Vec<Option<Box<Peer>>>,
    /// Those that are there, in the order in which this rank came to know them.
    known: Vec<Rank>,
    /// Why none can be reached any more.
    closed: Option<String>,
    /// How often a place of the table was looked at.
    #[cfg(test)]
    looks: std::cell::Cell<usize>,
}

impl Peers {
    /// Of a world of so many ranks, which are reached in these ways.
    pub(crate) fn new(size: usize, find_routes: FindRoutes) -> Peers {
        let mut table = Vec::new();
        table.resize_with(size, || None);
        Peers {
            find_routes,
            table,
            known: Vec::new(),
            closed: None,
            #[cfg(test)]
            looks: std::cell::Cell::default(),
        }
    }

    /// The number of ranks.
    #[inline]
    pub(crate) fn size(&self) -> usize {
        self.table.len()
    }

    /// The ranks that this one knows.
    pub(crate) fn known(&self) -> &[Rank] {
        &self.known
    }

    /// What is known of `rank`.
    #[inline]
    pub(crate) fn get(&self, rank: Rank) -> Option<&Peer> {
        self.note_look();
        self.table[rank.index()].as_deref()
    }

    /// The same, to be changed.
    #[inline]
    pub(crate) fn get_mut(&mut self, rank: Rank) -> Option<&mut Peer> {
        self.note_look();
        self.table[rank.index()].as_deref_mut()
    }

    /// `rank`, which this one knows from now on.
    #[inline]
    pub(crate) fn meet(&mut self, rank: Rank) -> &mut Peer {
        self.note_look();
        let Peers { find_routes, table, known, closed, .. } = self;
        table[rank.index()].get_or_insert_with(|| first_met(rank, find_routes, known, closed.as_deref()))
    }

    /// Why `rank` cannot be reached, if it cannot.
    #[inline]
    pub(crate) fn lost(&self, rank: Rank) -> Option<&str> {
        match self.get(rank) {
            Some(peer) => peer.lost.as_deref(),
            None => self.closed.as_deref(),
        }
    }

    /// Has `visit` change each one that this rank knows.
    #[inline]
    pub(crate) fn for_each(&mut self, mut visit: impl FnMut(Rank, &mut Peer)) {
        for place in 0..self.known.len() {
            let rank = self.known[place];
            if let Some(peer) = self.get_mut(rank) {
                visit(rank, peer);
            }
        }
    }

    /// Forgets all that is known. No rank can be reached any more, and this is why.
    pub(crate) fn close(&mut self, cause: &str) {
        self.find_routes = Box::new(|_| Vec::new());
        self.closed = Some(cause.to_owned());
        self.for_each(|_, peer| *peer = Peer { lost: Some(cause.to_owned()), ..Peer::default() });
    }

    #[inline(always)]
    fn note_look(&self) {
        #[cfg(test)]
        self.looks.set(self.looks.get() + 1);
    }

    /// How often a place of the table was looked at since this was asked last.
    #[cfg(test)]
    pub(crate) fn take_looks(&self) -> usize {
        self.looks.take()
    }
}

#[cold]
fn first_met(rank: Rank, find_routes: &FindRoutes, known: &mut Vec<Rank>, closed: Option<&str>) -> Box<Peer> {
    known.push(rank);
    Box::new(Peer { connector: Connector::new(find_routes(rank)), lost: closed.map(str::to_owned), ..Peer::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::connector::Route;

    fn peers(size: usize) -> Peers {
        Peers::new(size, Box::new(|rank| vec![Route { transport: 0, address: vec![rank.0 as u8] }]))
    }

    #[test]
    fn a_rank_that_was_never_met_takes_the_room_of_an_address() {
        assert_eq!(size_of::<Option<Box<Peer>>>(), size_of::<usize>());
        let mut peers = peers(10_000);
        assert!((peers.size(), peers.known()) == (10_000, &[]) && peers.get(Rank(9_999)).is_none());
        peers.meet(Rank(7)).is_draining = true;
        peers.meet(Rank(9_999));
        assert!(peers.meet(Rank(7)).is_draining, "it is the same");
        assert_eq!(peers.table.iter().flatten().count(), 2);
        assert_eq!(peers.known(), [Rank(7), Rank(9_999)]);
    }

    #[test]
    fn what_is_done_for_all_is_done_for_those_that_are_known() {
        let mut peers = peers(10_000);
        peers.meet(Rank(3));
        peers.meet(Rank(1));
        peers.take_looks();
        let mut visited = Vec::new();
        peers.for_each(|rank, _| visited.push(rank));
        assert_eq!((visited, peers.take_looks()), (vec![Rank(3), Rank(1)], 2));
    }

    #[test]
    fn no_rank_can_be_reached_after_the_end() {
        let mut peers = peers(3);
        peers.meet(Rank(1));
        assert_eq!((peers.lost(Rank(1)), peers.lost(Rank(2))), (None, None));
        peers.close("aborted");
        for rank in [Rank(1), Rank(2)] {
            assert_eq!(peers.lost(rank), Some("aborted"));
            assert_eq!(peers.meet(rank).lost.as_deref(), Some("aborted"));
            assert!(peers.meet(rank).connector.open(rank, &mut [], Instant::now()).is_err(), "no way leads there");
        }
    }
}
