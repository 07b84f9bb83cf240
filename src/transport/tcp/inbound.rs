//! The reading end of a connection that communicators share.

use rustc_hash::FxHashMap;

use crate::error::LinkDown;
use crate::sync::{Arc, Mutex, lock};
use crate::sys::fork::Origin;
use crate::sys::poller::{StreamName, Watched};
use crate::transport::auth::{Membership, PROOF_BYTES, Secret};
use crate::transport::tcp::channel::Source;
use crate::transport::tcp::connect::Held;
use crate::transport::tcp::greeting::Caller;
use crate::transport::tcp::lanes::piece::{Kind, PieceHeader};
use crate::transport::tcp::lanes::reader::Part;
use crate::transport::tcp::lanes::window::{CREDIT_BYTES, RecvWindow};
use crate::transport::tcp::member::{Arrival, Member, Members};
use crate::transport::tcp::trunk_end::{MUCH, TrunkEnd, Wire};
use crate::types::Rank;

/// A connection that another process has opened.
#[derive(Debug)]
pub(super) struct Inbound {
    terms: Terms,
    origin: Origin,
    state: Mutex<State>,
}

/// Who may open lanes.
#[derive(Debug)]
struct Terms {
    /// The connection's number among those that communicators of this process share.
    number: u32,
    /// What only the two ends know.
    session: Secret,
    /// How the listener that it came to makes and protects connections.
    manner: String,
    members: Arc<Members>,
}

#[derive(Debug)]
struct State {
    trunk_end: TrunkEnd,
    lanes: FxHashMap<u32, Lane>,
    /// How many lanes were taken in that their communicators have not begun to read.
    unread: usize,
    /// All were told that the connection is down.
    is_told: bool,
}

#[derive(Debug)]
enum Lane {
    Read(Reading),
    /// Nobody reads it, or nobody does any more. What comes until its end is dropped.
    Closed,
}

#[derive(Debug)]
struct Reading {
    member: Arc<Member>,
    from: Rank,
    window: RecvWindow,
    has_ended: bool,
    /// Its communicator is to be told once something comes.
    is_armed: bool,
}

impl Reading {
    fn name_if_armed(&mut self) {
        if std::mem::take(&mut self.is_armed) {
            self.member.name(StreamName::From(self.from));
        }
    }
}

impl Inbound {
    /// A connection that has proved itself to be of this manner, and gets this number among those of the process.
    pub(super) fn new(
        number: u32,
        caller: Watched<Caller>,
        session: Secret,
        manner: &str,
        members: &Arc<Members>,
        held: &Held,
    ) -> Inbound {
        let terms = Terms { number, session, manner: manner.to_owned(), members: members.clone() };
        let trunk_end = TrunkEnd::new(Wire::Accepted(caller), held);
        let state = State { trunk_end, lanes: FxHashMap::default(), unread: 0, is_told: false };
        Inbound { terms, origin: Origin::here(), state: Mutex::new(state) }
    }

    /// Goes on with whatever is under way.
    pub(super) fn drive(&self) {
        lock(&self.state).progress(&self.terms, MUCH);
    }

    /// Whether the connection is down, and all of its lanes are with those who read them.
    pub(super) fn is_over(&self) -> bool {
        let state = lock(&self.state);
        state.trunk_end.down().is_some() && state.unread == 0
    }

    /// The bytes of a lane that was taken in.
    pub(super) fn begin_to_read(self: &Arc<Inbound>, number: u32) -> LaneSource {
        lock(&self.state).unread -= 1;
        LaneSource { trunk: self.clone(), number }
    }

    /// Moves bytes of a lane into `into`, none if none have come. An error: none follow.
    fn read(&self, number: u32, into: &mut [u8]) -> Result<usize, LinkDown> {
        let state = &mut *lock(&self.state);
        let mut count = state.read_right_into(&self.terms, number, into);
        if count == 0
            && !state.can_read_right(number)
            && state.reading(number).is_some_and(|lane| lane.window.is_empty())
        {
            // What follows may go to its place by itself.
            state.progress(&self.terms, FEW);
        }
        if let Some(lane) = state.reading(number).filter(|lane| !lane.window.is_empty()) {
            count += lane.window.take(&mut into[count..]);
            count += state.read_right_into(&self.terms, number, &mut into[count..]);
        }
        let Some(lane) = state.reading(number) else { return Err(LinkDown::new("the stream has ended")) };
        let (has_ended, credit) = (lane.has_ended, lane.window.credit());
        if let Some(credit) = credit.filter(|_| !has_ended) {
            state.push((PieceHeader { lane: number, kind: Kind::Credit, len: 4 }, credit.to_le_bytes().to_vec()));
        }
        match state.trunk_end.down() {
            _ if count > 0 || into.is_empty() => Ok(count),
            _ if has_ended => Err(LinkDown::new("it closed the connection")),
            Some(down) => Err(down.clone()),
            None => Ok(0),
        }
    }

    /// Has the lane's communicator told once something comes. True: something is there now.
    fn arm(&self, number: u32) -> bool {
        let state = &mut *lock(&self.state);
        state.progress(&self.terms, MUCH);
        let is_due = state.trunk_end.down().is_some();
        let Some(lane) = state.reading(number) else { return true };
        let is_ready = is_due || lane.has_ended || !lane.window.is_empty();
        lane.is_armed = !is_ready;
        is_ready
    }

    fn disarm(&self, number: u32) {
        if let Some(lane) = lock(&self.state).reading(number) {
            lane.is_armed = false;
        }
    }

    /// Nobody reads the lane any more.
    pub(super) fn leave(&self, number: u32) {
        let state = &mut *lock(&self.state);
        let Some(Lane::Read(lane)) = state.lanes.remove(&number) else { return };
        if !lane.has_ended {
            state.lanes.insert(number, Lane::Closed);
            state.push(closed(number));
        }
    }
}

impl State {
    fn reading(&mut self, number: u32) -> Option<&mut Reading> {
        match self.lanes.get_mut(&number) {
            Some(Lane::Read(lane)) => Some(lane),
            Some(Lane::Closed) | None => None,
        }
    }

    /// Writes what waits, reads what has come, so many bytes at most, and tells those whom it concerns.
    fn progress(&mut self, terms: &Terms, most: usize) {
        self.trunk_end.flush();
        self.receive(terms, |trunk_end, take| trunk_end.receive(most, take));
    }

    /// Whether what comes next is a lane's, of which nothing waits.
    fn can_read_right(&mut self, number: u32) -> bool {
        let is_next = |lane: &mut Reading| lane.window.is_empty() && !lane.has_ended;
        self.trunk_end.is_within_piece_of(number) && self.reading(number).is_some_and(is_next)
    }

    /// Reads bytes of a lane to where they belong, as long as nothing else comes.
    fn read_right_into(&mut self, terms: &Terms, number: u32, into: &mut [u8]) -> usize {
        if !self.can_read_right(number) {
            return 0;
        }
        self.trunk_end.flush();
        // Not more, so that the writer is told of the first bytes while it sends others.
        let len = into.len().min(CREDIT_BYTES);
        let count = self.receive(terms, |trunk_end, take| {
            let count = trunk_end.receive_for(number, &mut into[..len], &mut *take);
            trunk_end.receive(0, take);
            count
        });
        let passed = self.reading(number).map_or(Ok(()), |lane| lane.window.pass(count));
        if let Err(down) = passed {
            self.trunk_end.fail(down);
            self.tell();
        }
        count
    }

    /// Has the connection read, and tells what it has read to those whom it concerns.
    fn receive<T>(
        &mut self,
        terms: &Terms,
        receive: impl FnOnce(&mut TrunkEnd, &mut dyn FnMut(u32, Part<'_>) -> Result<(), LinkDown>) -> T,
    ) -> T {
        let State { trunk_end, lanes, .. } = self;
        let mut answers = Vec::new();
        let received = receive(trunk_end, &mut |number, part| take(terms, lanes, &mut answers, number, part));
        let is_taken = |answer: &&Answer| answer.0.kind == Kind::Accepted;
        self.unread += answers.iter().filter(is_taken).count();
        answers.into_iter().for_each(|answer| self.push(answer));
        self.tell();
        received
    }

    /// Sends an answer.
    fn push(&mut self, (header, body): Answer) {
        self.trunk_end.push(header, &body);
        self.tell();
    }

    /// Tells of the connection's end.
    fn tell(&mut self) {
        if let Some(down) = self.trunk_end.down()
            && !std::mem::replace(&mut self.is_told, true)
        {
            log::debug!("a connection that communicators share has ended: {down}");
            for lane in self.lanes.values_mut() {
                if let Lane::Read(lane) = lane {
                    lane.name_if_armed();
                }
            }
        }
    }
}

/// What is said of a lane to its writer.
type Answer = (PieceHeader, Vec<u8>);

fn closed(lane: u32) -> Answer {
    (PieceHeader { lane, kind: Kind::Closed, len: 0 }, Vec::new())
}

/// Takes what the peer says of a lane. The error: it must not.
fn take(
    terms: &Terms,
    lanes: &mut FxHashMap<u32, Lane>,
    answers: &mut Vec<Answer>,
    number: u32,
    part: Part<'_>,
) -> Result<(), LinkDown> {
    match (part, lanes.get_mut(&number)) {
        (Part::Open(membership, proof), None) => {
            if lanes.len() >= LANES_MAX {
                return Err(LinkDown::new(format!("it opened more than {LANES_MAX} lanes of a shared connection")));
            }
            let opened = open(terms, number, &membership, &proof)?;
            answers.push(match &opened {
                Some(_) => (PieceHeader { lane: number, kind: Kind::Accepted, len: 0 }, Vec::new()),
                None => closed(number),
            });
            lanes.insert(number, opened.map_or(Lane::Closed, Lane::Read));
        }
        (Part::Data(bytes), Some(Lane::Read(lane))) if !lane.has_ended => {
            lane.window.arrive(bytes)?;
            lane.name_if_armed();
        }
        (Part::End, Some(Lane::Read(lane))) if !lane.has_ended => {
            lane.has_ended = true;
            lane.name_if_armed();
        }
        (Part::Data(_), Some(Lane::Closed)) => {}
        (Part::End, Some(Lane::Closed)) => _ = lanes.remove(&number),
        (Part::Open(..), Some(_)) => return Err(LinkDown::new(format!("it opened lane {number} twice"))),
        (Part::Data(_) | Part::End, _) => {
            return Err(LinkDown::new(format!("it wrote to lane {number}, which it has not opened or has ended")));
        }
        (other, _) => {
            return Err(LinkDown::new(format!("it said {other:?} of lane {number}, which is not its to say")));
        }
    }
    Ok(())
}

/// Takes a lane that a peer opens; none if nobody reads it. The error: it has not proved that it belongs to the communicator, or may
/// not share this connection.
fn open(
    terms: &Terms,
    number: u32,
    membership: &Membership,
    proof: &[u8; PROOF_BYTES],
) -> Result<Option<Reading>, LinkDown> {
    // A communicator is known here before any peer learns its address, so one that is not known has ended.
    let Some(member) = terms.members.find(membership) else { return Ok(None) };
    let from = membership.from;
    if let Err(error) = membership.check(proof, &member.identity.secret, &terms.session) {
        return Err(LinkDown::new(format!("it opened a stream of a communicator, but {error}")));
    }
    if from.index() >= member.identity.size || from == member.identity.me {
        return Err(LinkDown::new(format!("it opened a stream as rank {from} of {}", member.identity.size)));
    }
    if member.manner != terms.manner {
        return Err(LinkDown::new("it opened a stream on a connection that communicators with other settings share"));
    }
    let arrived = member.arrive(Arrival::Lane { from, trunk: terms.number, lane: number });
    let window = RecvWindow::default();
    Ok(arrived.is_ok().then(|| Reading { member, from, window, has_ended: false, is_armed: false }))
}

/// The bytes of a stream that is a lane of a connection which communicators share.
#[derive(Debug)]
pub(super) struct LaneSource {
    trunk: Arc<Inbound>,
    number: u32,
}

impl Source for LaneSource {
    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        self.trunk.read(self.number, into)
    }

    fn has_more(&mut self) -> bool {
        self.trunk.arm(self.number)
    }

    fn disarm(&mut self) {
        self.trunk.disarm(self.number);
    }
}

impl Drop for LaneSource {
    fn drop(&mut self) {
        // In a forked child, a thread may have had the lock that is not there.
        if self.trunk.origin.is_here() {
            self.trunk.leave(self.number);
        }
    }
}

/// How many bytes a lane's reader has read that is not in the middle of a piece: those of a short message.
const FEW: usize = 8 << 10;

/// How many lanes one connection may have, those that nobody reads among them.
const LANES_MAX: usize = 1 << 16;
