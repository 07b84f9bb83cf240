//! Rings of two ranks of one host for their messages in CUDA graphs.
//!
//! Two ranks set them up at the first message between them in a capture, and use them in all their graphs. Each operation
//! counts from zero, and each direction has a [token](crate::device::tokens) that says when the words of the operation before
//! can begin anew. Nothing there counts operations or replays, so it does not matter which graph an operation is in, as long as
//! both ends run those of a direction one after the other, in one order, cut into calls alike.

use std::time::Instant;

use crate::device::counters::{Word, WordAccess};
use crate::device::graph_waits::Home;
use crate::device::in_flight::{InFlight, Watched};
use crate::device::pairs::{LANES, PairSetup, Pairs, lane};
use crate::device::replay::{COUNTS, TOKENS};
use crate::device::ring_lane::RingMemory;
use crate::device::rounds::{Flow, Rounds};
use crate::device::setup::{self, AllGather, Parts, Wanted};
use crate::device::signals::Step;
use crate::device::staging::Staging;
use crate::device::tokens;
use crate::device::words::WordLayout;
use crate::error::Error;
use crate::sync::{Arc, Ordering};
use crate::sys::cuda::{Batch, DeviceBytes, DeviceWord, RegisteredWords, Width};
use crate::sys::words::SharedWords;
use crate::types::Rank;

/// What the two ranks share. A graph keeps it alive.
#[derive(Clone, Debug)]
pub(crate) struct GraphRings {
    words: Arc<SharedWords>,
    registered: Arc<RegisteredWords>,
    staging: Arc<Staging>,
    width: Width,
    layout: WordLayout,
    /// This rank's place in the pair.
    me: Rank,
}

/// The version of the layout of words, apart from those of other lanes.
const VERSION: u32 = 1 << 17;

impl GraphRings {
    /// Sets the rings up with the other rank. `names` are both ranks, in order.
    ///
    /// # Errors
    /// Those of [`setup::set_up`].
    pub(crate) fn set_up(
        own: &PairSetup,
        names: [Rank; 2],
        until: Instant,
        all_gather: &mut AllGather<'_>,
        are_there: &dyn Fn() -> bool,
    ) -> Result<GraphRings, Error> {
        let layout = WordLayout::new(names.len(), 2);
        let me = Rank::from(usize::from(names[1] == own.me));
        let wanted = Wanted {
            comm: &own.comm,
            me,
            names: &names,
            device: own.device,
            host: &own.host,
            halves: &[own.cell],
            stages_alone: false,
            words: layout.count() + names.len() * LANES,
            layout: VERSION,
            timeout: until.saturating_duration_since(Instant::now()),
        };
        let Parts { words, registered, mut staging, width, .. } = setup::set_up(&wanted, all_gather, are_there)?;
        let staging = Arc::new(staging.pop().expect("one is wanted"));
        let rings = GraphRings { words, registered: Arc::new(registered), staging, width, layout, me };
        // At first every token is there.
        let token = rings.token(Word::Tail { sender: me, receiver: Rank(1 - me.0) });
        rings.words.word(token).store(1, Ordering::Release);
        setup::agree(&own.comm, &names, "rings for graphs", Ok::<_, Error>(rings), |_| {}, all_gather)
    }

    /// The words, and how many bits of a word streams look at.
    pub(crate) fn words(&self) -> (&Arc<SharedWords>, Width) {
        (&self.words, self.width)
    }

    /// The number of the word of a head or tail. Ranks are places in the pair.
    pub(crate) fn count(&self, word: Word) -> usize {
        self.layout.index(COUNTS, word)
    }

    /// The number of the word of the token of `tail`'s direction.
    pub(crate) fn token(&self, tail: Word) -> usize {
        self.layout.index(TOKENS, tail)
    }

    /// The number of the word by which this rank's stream says that it is in an operation of `lane`.
    pub(crate) fn busy(&self, lane: usize) -> usize {
        assert!(lane < LANES, "no lane {lane}");
        self.layout.count() + self.me.index() * LANES + lane
    }

    /// Has a stream wait for a word, or write it.
    pub(crate) fn add<'a>(&'a self, batch: &mut Batch<'a>, step: Step) {
        batch.set_width(self.width);
        match step {
            Step::Wait(index, value) => batch.wait(self.registered.word(index), value),
            Step::Write(index, value) => batch.write(self.registered.word(index), value),
        }
    }
}

/// The memory of a rank's rings in graphs, by peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InGraphs<'a> {
    pub(crate) pairs: &'a Pairs,
    pub(crate) rings: &'a [Option<GraphRings>],
}

impl<'a> InGraphs<'a> {
    /// The rings to and from a peer.
    ///
    /// # Panics
    /// When they are not set up.
    pub(crate) fn rings(&self, peer: Rank) -> &'a GraphRings {
        self.rings[peer.index()].as_ref().expect("rings are set up before the first message in a graph")
    }

    /// Has this rank's stream say that it is in an operation with the messages of these rounds, or in none.
    pub(crate) fn tell(&self, batch: &mut Batch<'a>, me: Rank, rounds: &Rounds, operation: u64) {
        for Flow { peer, direction, .. } in &rounds.flows {
            let rings = self.rings(*peer);
            rings.add(batch, Step::Write(rings.busy(lane(me, *peer, *direction)), operation));
        }
    }

    /// Has a stream take a step of tokens.
    pub(crate) fn add(&self, batch: &mut Batch<'a>, step: tokens::Step) {
        let (tokens::Step::Count(access) | tokens::Step::Token(access)) = step;
        let (WordAccess::Wait(word, _) | WordAccess::Write(word, _)) = access;
        let (rings, word) = self.local(word);
        let index = match step {
            tokens::Step::Count(_) => rings.count(word),
            tokens::Step::Token(_) => rings.token(word),
        };
        rings.add(
            batch,
            match access {
                WordAccess::Wait(_, value) => Step::Wait(index, value),
                WordAccess::Write(_, value) => Step::Write(index, value),
            },
        );
    }

    /// The rings of a word, and the word with the pair's numbers of ranks.
    pub(crate) fn local(&self, word: Word) -> (&'a GraphRings, Word) {
        let (Word::Head { sender, receiver } | Word::Tail { sender, receiver }) = word else {
            unreachable!("{word:?} is no word of a ring")
        };
        let (_, _, local) = self.pairs.local(word);
        (self.rings(self.pairs.peer(sender, receiver)), local)
    }
}

impl RingMemory for InGraphs<'_> {
    fn word(&self, word: Word) -> (DeviceWord<'_>, Width) {
        let (rings, word) = self.local(word);
        (rings.registered.word(rings.count(word)), rings.width)
    }

    fn edge(&self, peer: Rank, number: usize) -> (DeviceWord<'_>, Width) {
        let rings = self.rings(peer);
        (rings.registered.word(number), rings.width)
    }

    fn bytes(&self, sender: Rank, receiver: Rank, cell: usize, len: usize) -> DeviceBytes<'_> {
        let peer = self.pairs.peer(sender, receiver);
        self.rings(peer).staging.bytes(self.pairs.pair(peer).place(sender), cell, 0, len)
    }

    fn cell(&self, peer: Rank) -> usize {
        // What this rank sends itself in a graph takes no ring.
        self.rings[peer.index()].as_ref().map_or_else(|| self.pairs.cell(peer), |rings| rings.staging.half())
    }
}

impl Home for InFlight {
    fn obstacle(&self, call: &str, peer: Rank) -> Option<Error> {
        InFlight::obstacle(self, call, &[peer])
    }

    fn fail(&self, error: Error) {
        // A library's communicator is given up whole.
        if self.is_by_library() { self.fail_all(error) } else { self.fail_next(error) }
    }

    fn in_flight(self: Arc<Self>) -> Arc<dyn Watched> {
        self
    }
}
