//! Pairs of ranks: what two ranks share for the messages between their devices, or one rank has for messages to itself.
//!
//! A pair is set up at its first message, by its two ranks alone. It has a control segment of its own, with a lane for each
//! direction, and each rank has the cells of its ring to the other one in staging memory. Where the ranks use a vendor's
//! library, each direction has a communicator of that library too, so that a wait or failure in one direction leaves the other
//! alone.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::config::{EngineChoice, NcclFields};
use crate::device::control::Control;
use crate::device::counters::Word;
use crate::device::far_pairs::{FarPair, FarPairs};
use crate::device::in_flight::{Ends, InFlight, Runner};
use crate::device::network::NetworkMemory;
use crate::device::parts::Awaited;
use crate::device::regions::Regions;
use crate::device::ring_lane::RingMemory;
use crate::device::rounds::{CELLS, Direction};
use crate::device::setup::{self, AllGather, Member, Parts, SetupFailure, Wanted};
use crate::device::staging::Staging;
use crate::device::vendor::choice::{Offer, no_streams, offer};
use crate::device::vendor::{Candidate, VendorComm};
use crate::device::words::ControlLayout;
use crate::error::Error;
use crate::sync::{Arc, Mutex};
use crate::sys::cuda::{
    Batch, Context, CudaError, DeviceBytes, DeviceWord, Event, Provider, RegisteredWords, Stream, StreamId, Width,
    provider,
};
use crate::sys::nccl::{Nccl, NcclCall, Vendor};
use crate::sys::words::SharedWords;
use crate::types::Rank;

/// What the setup of pairs needs to know of this rank.
#[derive(Clone, Debug)]
pub(crate) struct PairSetup {
    pub(crate) comm: String,
    pub(crate) me: Rank,
    pub(crate) size: usize,
    pub(crate) device: u32,
    /// The identity of its host.
    pub(crate) host: String,
    /// The bytes of a cell.
    pub(crate) cell: usize,
    pub(crate) libraries: Libraries,
}

/// Which vendor's library a rank is set to use.
#[derive(Clone, Debug)]
pub(crate) struct Libraries {
    pub(crate) engine: EngineChoice,
    /// The library files of NCCL and RCCL, where settings name them.
    pub(crate) files: [Option<PathBuf>; 2],
    /// The settings of the library's communicators.
    pub(crate) fields: Arc<NcclFields>,
    /// How many ranks meet at one when they begin a communicator; 0: all.
    pub(crate) ranks_per_root: usize,
    /// How long ranks wait for each other when they begin a communicator.
    pub(crate) limit: Duration,
    /// What the program has lent for calls of the library.
    pub(crate) lent: Arc<Mutex<Regions>>,
}

impl Libraries {
    /// Why programs do not run on the streams of this process's devices, if they do not.
    pub(crate) fn no_streams(&self) -> Option<&'static str> {
        no_streams(self.engine, provider().ok()?)
    }

    /// What this rank offers other ranks, with the library that it has.
    pub(crate) fn offer(&self) -> (Offer, Option<Arc<Nccl>>) {
        offer(self.engine, self.files.each_ref().map(Option::as_deref))
    }

    /// The library of whose devices this process has, or why there is none.
    pub(crate) fn own(&self) -> Result<Arc<Nccl>, String> {
        let vendor = match provider().map_err(|error| error.to_string())? {
            Provider::Cuda => Vendor::Nccl,
            Provider::Hip => Vendor::Rccl,
        };
        let named = self.files[usize::from(vendor == Vendor::Rccl)].as_deref();
        Nccl::load(vendor, named, &[]).map(Arc::new).map_err(|error| error.to_string())
    }

    /// This rank, `me` among `names`, as it decides with them on the library.
    pub(crate) fn candidate<'a>(&self, comm: &'a str, (me, names): (Rank, &'a [Rank])) -> Candidate<'a> {
        let (offer, library) = self.offer();
        let (limit, fields, lent) = (self.limit, self.fields.clone(), self.lent.clone());
        let ranks_per_root = self.ranks_per_root;
        Candidate { comm, me, names, limit, fields, ranks_per_root, offer, library, lent, part: None }
    }
}

/// Whether the driver could say if the caller's stream is being captured.
pub(crate) type Asked = Result<(), CudaError>;

/// The two directions of a pair.
pub(crate) const LANES: usize = 2;

/// The lane of the messages between this rank and a peer in one direction. Lane 0 has what the lower rank sends; of a rank with
/// itself, what it sends.
pub(crate) fn lane(me: Rank, peer: Rank, direction: Direction) -> usize {
    match direction {
        Direction::Send => usize::from(me > peer),
        Direction::Receive => usize::from(peer >= me),
    }
}

/// The messages of one direction with a peer.
pub(crate) type Channel = (Rank, Direction);

/// The part of a pair that needs no lock of the threads that submit.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) control: Arc<Control>,
    /// By lane.
    pub(crate) in_flight: [Arc<InFlight>; LANES],
}

/// This rank's side of a pair. It goes once nothing is in flight.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) link: Arc<Link>,
    pub(crate) context: Arc<Context>,
    /// By lane, what carries messages in place of the rings.
    library: Option<[Library; LANES]>,
    pub(crate) layout: ControlLayout,
    words: Arc<SharedWords>,
    registered: Arc<RegisteredWords>,
    width: Width,
    cells: Cells,
    /// This rank's place in the pair.
    me: Rank,
    /// By lane.
    pub(crate) ends: [End; LANES],
}

/// The vendor's library as it carries messages of one direction.
#[derive(Debug)]
pub(crate) struct Library {
    /// Of the two ranks.
    pub(crate) comm: Arc<VendorComm>,
    direction: Direction,
    /// The other rank's place in the communicator.
    peer: u32,
    /// For its calls in a group with other lanes' calls.
    pub(crate) branch: Arc<Branch>,
}

/// A stream beside the caller's, and the event that joins the two.
#[derive(Debug)]
pub(crate) struct Branch {
    pub(crate) stream: Stream,
    pub(crate) joined: Event,
}

impl Branch {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Branch, CudaError> {
        Ok(Branch { stream: Stream::new(context, 0)?, joined: Event::new(context)? })
    }
}

impl Library {
    pub(crate) fn call<'a>(&self, bytes: DeviceBytes<'a>) -> NcclCall<'a> {
        match self.direction {
            Direction::Send => NcclCall::Send { from: bytes, peer: self.peer },
            Direction::Receive => NcclCall::Receive { into: bytes, peer: self.peer },
        }
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // Unless it has ended. What is in flight keeps it, too.
        self.comm.give_up();
    }
}

/// The cells of a pair's rings.
#[derive(Debug)]
enum Cells {
    /// Of two ranks of one host, each of which maps the other's cells, or of this rank alone.
    Near(Staging),
    /// Of ranks of different hosts: this rank's memory has the cells of both rings.
    Far(Arc<NetworkMemory>),
}

/// This rank's end of the messages of one direction.
#[derive(Debug)]
pub(crate) struct End {
    /// The number of the last message.
    pub(crate) number: u64,
    /// That of the last one that a library has put on a stream; zero if there is none.
    pub(crate) by_library: u64,
    /// The stream of the last message, and the event at that message's end.
    pub(crate) last: Option<StreamId>,
    pub(crate) end: Event,
}

impl Pair {
    /// Sets the pair up, with the other rank if there is one.
    ///
    /// # Errors
    /// Those of [`setup::set_up`], and the driver's error in `asked`.
    pub(crate) fn set_up(
        own: &PairSetup,
        peer: Rank,
        asked: &Asked,
        until: Instant,
        (ends, far): (&Arc<dyn Ends>, &dyn FarPairs),
        all_gather: &mut AllGather<'_>,
        are_there: &dyn Fn() -> bool,
    ) -> Result<Pair, Error> {
        let PairSetup { comm, me, .. } = own;
        let mut names = vec![*me, peer];
        names.sort_unstable();
        names.dedup();
        let place = Rank::from(names.iter().position(|name| name == me).expect("one of them"));
        if let Err(error) = asked {
            let told: Result<serde_json::Value, _> = Err(SetupFailure::new("a look at its stream", error));
            return Err(setup::tell(comm, &names, all_gather, told).expect_err("this rank has told a failure"));
        }
        let layout = ControlLayout::new(names.len(), LANES);
        let wanted = Wanted {
            comm,
            me: place,
            names: &names,
            device: own.device,
            host: &own.host,
            halves: &[own.cell],
            stages_alone: false,
            words: layout.count() + names.len() * LANES,
            layout: ControlLayout::VERSION,
            timeout: until.saturating_duration_since(Instant::now()),
        };
        let Parts { context, words, registered, mut staging, network, width, members, .. } =
            setup::set_up(&wanted, all_gather, are_there)?;
        // No library carries what a rank sends itself.
        let library = match names.len() {
            1 => None,
            _ => library(own, peer, (place, &names), (&context, &members), wanted.timeout, all_gather, are_there)?,
        };
        let events = || -> Result<_, CudaError> { Ok([Event::new(&context)?, Event::new(&context)?]) };
        let made = events().map_err(setup::failed("its events"));
        let (events, told) = setup::split(made.map(|events| (events, ())));
        let seen_by = |rank| Control::new(words.clone(), layout, rank, width).of_some(names.clone(), own.size);
        let control = Arc::new(seen_by(place));
        let cells = match network {
            None => Cells::Near(staging.pop().expect("one is wanted")),
            Some(memory) => {
                let (memory, other) = (Arc::new(memory), Rank::from(1 - place.index()));
                // Before the other rank can send anything.
                far.open(
                    peer,
                    FarPair {
                        own: control.clone(),
                        other: seen_by(other),
                        memory: memory.clone(),
                        cell: memory.half(),
                        lanes: [Direction::Send, Direction::Receive].map(|direction| lane(*me, peer, direction)),
                        words: [
                            Word::Head { sender: place, receiver: other },
                            Word::Tail { sender: place, receiver: other },
                            Word::Head { sender: other, receiver: place },
                            Word::Tail { sender: other, receiver: place },
                        ],
                    },
                );
                Cells::Far(memory)
            }
        };
        let hosts = |lane| matches!(cells, Cells::Far(_)).then(|| far.lane(peer, lane));
        let in_flight = |lane| {
            let in_flight = InFlight::new(comm.clone(), lane, control.clone(), ends.clone(), hosts(lane));
            if let Some(library) = &library {
                in_flight.is_run_by(library[lane].comm.clone());
            }
            in_flight
        };
        let in_flight = [in_flight(0), in_flight(1)];
        // On both ranks, what may wait for a device is over before either puts anything on a stream.
        setup::tell(comm, &names, all_gather, told).inspect_err(|error| {
            in_flight.iter().for_each(|in_flight| in_flight.never_begins(error));
            far.forget(peer);
        })?;
        let events = events.expect("no rank has told a failure");
        let link = Link { in_flight, control };
        let ends = events.map(|end| End { number: 0, by_library: 0, last: None, end });
        let (link, registered) = (Arc::new(link), Arc::new(registered));
        Ok(Pair { link, context, library, layout, words, registered, width, cells, me: place, ends })
    }

    /// Whether the other rank is on another host.
    pub(crate) fn is_far(&self) -> bool {
        matches!(self.cells, Cells::Far(_))
    }

    /// The words, and the number of the one by which this rank's stream says that it is in a call of the library for `lane` in a
    /// graph.
    pub(crate) fn busy(&self, lane: usize) -> (&Arc<SharedWords>, usize) {
        assert!(lane < LANES, "no lane {lane}");
        (&self.words, self.layout.count() + self.me.index() * LANES + lane)
    }

    /// Has a stream write that word.
    pub(crate) fn tell<'a>(&'a self, batch: &mut Batch<'a>, lane: usize, value: u64) {
        batch.set_width(self.width);
        batch.write(self.registered.word(self.busy(lane).1), value);
    }

    /// What must stay while a stream may write that word.
    pub(crate) fn registered(&self) -> Arc<RegisteredWords> {
        self.registered.clone()
    }

    pub(crate) fn width(&self) -> Width {
        self.width
    }

    pub(crate) fn place(&self, rank: Rank) -> Rank {
        self.link.control.local(rank).expect("one of the pair")
    }
}

/// Decides with another rank on the library that carries their messages, and begins a communicator for each direction.
fn library(
    own: &PairSetup,
    peer: Rank,
    (place, names): (Rank, &[Rank]),
    (context, members): (&Arc<Context>, &[Member]),
    timeout: Duration,
    all_gather: &mut AllGather<'_>,
    are_there: &dyn Fn() -> bool,
) -> Result<Option<[Library; LANES]>, Error> {
    let PairSetup { comm, me, libraries, .. } = own;
    let Some((chosen, _)) = libraries.candidate(comm, (place, names)).choose(members, all_gather)? else {
        return Ok(None);
    };
    let made = || Ok::<_, CudaError>([Branch::new(context)?, Branch::new(context)?]);
    let made = setup::agree(comm, names, "streams for messages", made(), |_| {}, all_gather)?;
    let current = setup::agree(comm, names, "its context", context.enter(), |_| {}, all_gather)?;
    let sent = lane(*me, peer, Direction::Send);
    let mut begin = |(number, branch): (usize, Branch)| -> Result<Library, Error> {
        let direction = if number == sent { Direction::Send } else { Direction::Receive };
        let comm = chosen.begin(&current, timeout, all_gather, are_there)?;
        Ok(Library { comm, direction, peer: 1 - place.0, branch: Arc::new(branch) })
    };
    let [first, second] = made;
    let lanes = [begin((0, first))?, begin((1, second))?];
    log::debug!("communicator `{comm}`: messages of ranks {me} and {peer} on devices go by {}", chosen.library());
    Ok(Some(lanes))
}

/// The pairs of a rank, by peer.
#[derive(Debug)]
pub(crate) struct Pairs {
    me: Rank,
    pub(crate) by_peer: Vec<Option<Pair>>,
}

impl Pairs {
    pub(crate) fn new(me: Rank, size: usize) -> Pairs {
        Pairs { me, by_peer: (0..size).map(|_| None).collect() }
    }

    pub(crate) fn me(&self) -> Rank {
        self.me
    }

    /// The pair with a peer.
    ///
    /// # Panics
    /// When the pair is not set up.
    pub(crate) fn pair(&self, peer: Rank) -> &Pair {
        self.by_peer[peer.index()].as_ref().expect("pairs are set up before their first message")
    }

    /// The communicators of a vendor's library that carry messages.
    pub(crate) fn libraries(&self) -> Vec<Arc<VendorComm>> {
        let libraries = self.by_peer.iter().flatten().filter_map(|pair| pair.library.as_ref()).flatten();
        libraries.map(|library| library.comm.clone()).collect()
    }

    /// The vendor's library that carries the messages of a channel, if one does.
    pub(crate) fn library(&self, (peer, direction): Channel) -> Option<&Library> {
        self.pair(peer).library.as_ref().map(|library| &library[lane(self.me, peer, direction)])
    }

    /// What is in flight of a channel.
    pub(crate) fn in_flight(&self, (peer, direction): Channel) -> &Arc<InFlight> {
        &self.pair(peer).link.in_flight[lane(self.me, peer, direction)]
    }

    /// This rank's end of a channel.
    pub(crate) fn end(&self, (peer, direction): Channel) -> &End {
        &self.pair(peer).ends[lane(self.me, peer, direction)]
    }

    pub(crate) fn end_mut(&mut self, (peer, direction): Channel) -> &mut End {
        let lane = lane(self.me, peer, direction);
        let pair = self.by_peer[peer.index()].as_mut().expect("pairs are set up before their first message");
        &mut pair.ends[lane]
    }

    /// A word that this rank waits for, as the pair's control segment has it, with lane and value.
    pub(crate) fn awaited(&self, word: Word, value: u64) -> Awaited {
        let (_, lane, word) = self.local(word);
        (lane, word, value)
    }

    /// The number of the word by which a stream says that it has come to a message, or is done with it.
    pub(crate) fn edge_of(&self, (peer, direction): Channel, number: u64, is_end: bool) -> usize {
        let (pair, lane) = (self.pair(peer), lane(self.me, peer, direction));
        match is_end {
            false => pair.layout.started(pair.me, lane, number),
            true => pair.layout.done(pair.me, lane, number),
        }
    }

    /// The pair of a ring's word, its lane there, and the word with the pair's numbers of ranks.
    pub(crate) fn local(&self, word: Word) -> (&Pair, usize, Word) {
        let (sender, receiver, is_head) = match word {
            Word::Head { sender, receiver } => (sender, receiver, true),
            Word::Tail { sender, receiver } => (sender, receiver, false),
            other => unreachable!("{other:?} is no word of a ring"),
        };
        let pair = self.pair(self.peer(sender, receiver));
        let (sender, receiver) = (pair.place(sender), pair.place(receiver));
        let local = if is_head { Word::Head { sender, receiver } } else { Word::Tail { sender, receiver } };
        (pair, sender.index(), local)
    }

    /// The rank at the other end of a ring.
    pub(crate) fn peer(&self, sender: Rank, receiver: Rank) -> Rank {
        if sender == self.me { receiver } else { sender }
    }
}

impl RingMemory for Pairs {
    fn word(&self, word: Word) -> (DeviceWord<'_>, Width) {
        let (pair, lane, word) = self.local(word);
        (pair.registered.word(pair.layout.lane_words().index(lane, word)), pair.width)
    }

    fn edge(&self, peer: Rank, number: usize) -> (DeviceWord<'_>, Width) {
        let pair = self.pair(peer);
        (pair.registered.word(number), pair.width)
    }

    fn bytes(&self, sender: Rank, receiver: Rank, cell: usize, len: usize) -> DeviceBytes<'_> {
        let pair = self.pair(self.peer(sender, receiver));
        match &pair.cells {
            // Each rank's staging memory has only the ring by which it sends.
            Cells::Near(staging) => staging.bytes(pair.place(sender), cell, 0, len),
            Cells::Far(memory) if sender == self.me => memory.outbound(cell).part(0, len),
            Cells::Far(memory) => memory.inbound(cell).part(0, len),
        }
    }

    fn cell(&self, peer: Rank) -> usize {
        match &self.pair(peer).cells {
            Cells::Near(staging) => staging.half(),
            Cells::Far(memory) => memory.half(),
        }
    }
}

// A half of a pair's staging memory is one cell.
const _: () = assert!(CELLS == 2);
