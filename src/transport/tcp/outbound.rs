//! The writing end of a connection that communicators share. The connection ends with its last lane.

use std::io::IoSlice;

use rustc_hash::FxHashMap;

use crate::error::{Down, LinkDown};
use crate::sync::{Arc, Mutex, lock};
use crate::sys::fork::Origin;
use crate::sys::poller::StreamName;
use crate::sys::tcp_info::TcpStats;
use crate::transport::auth::{Membership, Secret};
use crate::transport::tcp::connect::{Connection, Held};
use crate::transport::tcp::lanes::piece::{Kind, PIECE_BYTES_MAX, PieceHeader, encode_open};
use crate::transport::tcp::lanes::reader::Part;
use crate::transport::tcp::lanes::window::{SendWindow, WINDOW_BYTES};
use crate::transport::tcp::member::Member;
use crate::transport::tcp::trunk_end::{MUCH, TrunkEnd, Wire};
use crate::transport::{LaneStats, SendStream};
use crate::types::Rank;

/// A connection that this process has opened.
#[derive(Debug)]
pub(super) struct Outbound {
    /// Its number among the connections that communicators of this process share.
    number: u32,
    held: Held,
    origin: Origin,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    stage: Stage,
    lanes: FxHashMap<u32, Lane>,
    /// The number of the next lane; none once all have been given out.
    next: Option<u32>,
    /// Lanes are armed that may be written to once a piece under way is.
    is_blocked: bool,
    /// All were told that the connection is down.
    is_told: bool,
}

#[derive(Debug)]
enum Stage {
    Opening(Box<Connection>),
    Open {
        trunk_end: Box<TrunkEnd>,
        session: Secret,
    },
    /// It could not be opened.
    Failed(LinkDown),
}

/// How far a lane is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// The connection is not open.
    Waiting,
    /// The peer was asked to take the lane.
    Asked,
    /// It has.
    Open,
}

#[derive(Debug)]
struct Lane {
    member: Arc<Member>,
    peer: Rank,
    progress: Progress,
    window: SendWindow,
    down: Option<LinkDown>,
    /// Up to where its last piece goes among the connection's bytes, if they are counted.
    sent: Option<u64>,
    has_sent: bool,
    /// Its communicator is to be told once there is room.
    is_armed: bool,
}

impl Lane {
    fn name(&self) {
        self.member.name(StreamName::To(self.peer));
    }

    /// Asks the peer to take it.
    fn ask(&mut self, number: u32, trunk_end: &mut TrunkEnd, session: &Secret) {
        let identity = &self.member.identity;
        let membership = Membership { comm: identity.comm, from: identity.me, to: self.peer };
        let open = encode_open(&membership, &membership.prove(&identity.secret, session));
        trunk_end.push(PieceHeader { lane: number, kind: Kind::Open, len: open.len() }, &open);
        self.progress = Progress::Asked;
    }
}

impl Outbound {
    /// A connection that is being opened, and gets this number among those of the process.
    pub(super) fn new(number: u32, connection: Connection, held: &Held) -> Outbound {
        let stage = Stage::Opening(Box::new(connection));
        let lanes = FxHashMap::default();
        let state = Mutex::new(State { stage, lanes, next: Some(0), is_blocked: false, is_told: false });
        Outbound { number, held: held.clone(), origin: Origin::here(), state }
    }

    /// Ends the connection without a word about its lanes.
    #[cfg(test)]
    pub(super) fn cut(&self) {
        if let Stage::Open { trunk_end, .. } = &mut lock(&self.state).stage {
            trunk_end.fail(LinkDown::new("it was cut"));
        }
    }

    /// As if so many lanes had been opened.
    #[cfg(test)]
    pub(super) fn skip_to(&self, next: u32) {
        lock(&self.state).next = Some(next);
    }

    /// Adds a lane to `peer`, and returns its number. None: the connection is of no use for another one.
    pub(super) fn join(&self, member: &Arc<Member>, peer: Rank) -> Option<u32> {
        let state = &mut *lock(&self.state);
        self.drive_all(state);
        let number = state.next.filter(|_| state.down().is_none())?;
        state.next = number.checked_add(1);
        let (member, window) = (member.clone(), SendWindow::new());
        let (progress, down, sent) = (Progress::Waiting, None, None);
        let mut lane = Lane { member, peer, progress, window, down, sent, has_sent: false, is_armed: false };
        if let Stage::Open { trunk_end, session } = &mut state.stage {
            lane.ask(number, trunk_end, session);
        }
        state.lanes.insert(number, lane);
        state.tell();
        Some(number)
    }

    /// Whether it is of use for another lane.
    pub(super) fn takes_lanes(&self) -> bool {
        let state = lock(&self.state);
        state.next.is_some() && state.down().is_none()
    }

    /// Goes on with whatever is under way.
    pub(super) fn drive(&self) {
        self.drive_all(&mut lock(&self.state));
    }

    fn drive_all(&self, state: &mut State) {
        if let Stage::Opening(connection) = &mut state.stage {
            match self.open(connection) {
                Ok(None) => return,
                Ok(Some(session)) => state.opened(session, &self.held),
                // No lane has sent anything, so that another connection may be opened: the peer may have closed this one with the
                // communicator whose listener it came to.
                Err(down) => {
                    let is_closed = down.kind == Down::HungUp;
                    state.stage = Stage::Failed(if is_closed { LinkDown::refused(down.cause) } else { down });
                }
            }
        }
        state.progress();
    }

    /// Goes on to open the connection. Returns its session once it is open.
    fn open(&self, connection: &mut Connection) -> Result<Option<Secret>, LinkDown> {
        if !connection.drive()? {
            return Ok(None);
        }
        connection.name(StreamName::From(Rank(self.number)))?;
        Ok(connection.session())
    }

    /// As [`SendStream::write`] of a lane.
    fn write(&self, number: u32, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        let state = &mut *lock(&self.state);
        state.check(number)?;
        let len = head.len() + body.iter().map(|slice| slice.len()).sum::<usize>();
        let needs_more = |lane: &Lane| lane.progress != Progress::Open || lane.window.room() < WINDOW_BYTES / 2;
        let has_room = |state: &State| state.trunk_end().is_some_and(TrunkEnd::has_room);
        if len == 0 || state.lanes.get(&number).is_none_or(needs_more) || !has_room(state) {
            self.drive_all(state);
            state.check(number)?;
        }
        let State { stage: Stage::Open { trunk_end, .. }, lanes, .. } = state else { return Ok(0) };
        let Some(lane) = lanes.get_mut(&number).filter(|lane| lane.progress == Progress::Open) else { return Ok(0) };
        let count = len.min(lane.window.room()).min(PIECE_BYTES_MAX);
        if count == 0 || !trunk_end.has_room() {
            return Ok(0);
        }
        trunk_end.send(PieceHeader { lane: number, kind: Kind::Data, len: count }, head, body);
        lane.window.sent(count);
        lane.sent = trunk_end.sent();
        lane.has_sent = true;
        let down = trunk_end.down().cloned();
        state.tell();
        down.map_or(Ok(count), Err)
    }

    /// As [`SendStream::arm`] of a lane.
    fn arm(&self, number: u32) -> bool {
        let state = &mut *lock(&self.state);
        self.drive_all(state);
        let has_room = state.trunk_end().is_some_and(TrunkEnd::has_room);
        let is_down = state.check(number).is_err();
        let Some(lane) = state.lanes.get_mut(&number) else { return true };
        let is_ready = is_down || (lane.progress == Progress::Open && has_room && lane.window.room() > 0);
        lane.is_armed = !is_ready;
        state.is_blocked |= !is_ready && !has_room;
        is_ready
    }

    fn disarm(&self, number: u32) {
        if let Some(lane) = lock(&self.state).lanes.get_mut(&number) {
            lane.is_armed = false;
        }
    }

    fn is_open(&self, number: u32) -> bool {
        lock(&self.state).lanes.get(&number).is_some_and(|lane| lane.progress == Progress::Open)
    }

    /// As [`SendStream::flushed`] of a lane. Credit may be unread at this process's end, whose arrival would make the kernel drop what
    /// is under way, so the peer's kernel must have everything.
    fn flushed(&self, number: u32) -> Result<bool, LinkDown> {
        let state = &mut *lock(&self.state);
        self.drive_all(state);
        state.check(number)?;
        let Some(Lane { sent, has_sent: true, .. }) = state.lanes.get(&number) else { return Ok(true) };
        let sent = *sent;
        state.trunk_end().map_or(Ok(true), |trunk_end| trunk_end.is_delivered(sent))
    }

    fn tcp_stats(&self) -> Option<TcpStats> {
        lock(&self.state).trunk_end()?.tcp_stats()
    }

    fn lane_stats(&self, number: u32) -> LaneStats {
        LaneStats { connection: self.number, lane: number, lanes: lock(&self.state).lanes.len() }
    }

    /// The lane ends.
    fn leave(&self, number: u32) {
        let state = &mut *lock(&self.state);
        let lane = state.lanes.remove(&number);
        if let Stage::Open { trunk_end, .. } = &mut state.stage
            && lane.is_some_and(|lane| lane.progress != Progress::Waiting)
        {
            trunk_end.push(PieceHeader { lane: number, kind: Kind::End, len: 0 }, &[]);
        }
        state.tell();
    }
}

impl Drop for Outbound {
    fn drop(&mut self) {
        // A forked child has neither the connection nor its threads.
        if self.origin.is_here() {
            let state = self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
            let failed = Stage::Failed(LinkDown::new("it was closed"));
            if let Stage::Open { trunk_end, .. } = std::mem::replace(&mut state.stage, failed) {
                trunk_end.close_when_delivered();
            }
        }
    }
}

impl State {
    fn trunk_end(&self) -> Option<&TrunkEnd> {
        match &self.stage {
            Stage::Open { trunk_end, .. } => Some(trunk_end),
            Stage::Opening(_) | Stage::Failed(_) => None,
        }
    }

    /// Why the connection is of no use, if it is not.
    fn down(&self) -> Option<&LinkDown> {
        match &self.stage {
            Stage::Opening(_) => None,
            Stage::Open { trunk_end, .. } => trunk_end.down(),
            Stage::Failed(down) => Some(down),
        }
    }

    /// The connection is open. Asks the peer to take all lanes that wait for that.
    fn opened(&mut self, session: Secret, held: &Held) {
        let closed = Stage::Failed(LinkDown::new("it was closed"));
        if let Stage::Opening(connection) = std::mem::replace(&mut self.stage, closed) {
            let mut trunk_end = Box::new(TrunkEnd::new(Wire::Opened(connection), held));
            for (number, lane) in &mut self.lanes {
                lane.ask(*number, &mut trunk_end, &session);
            }
            self.stage = Stage::Open { trunk_end, session };
        }
    }

    /// Why a lane takes no bytes any more, if it does not.
    fn check(&self, number: u32) -> Result<(), LinkDown> {
        let Some(lane) = self.lanes.get(&number) else { return Err(LinkDown::new("the stream has ended")) };
        if let Some(down) = &lane.down {
            return Err(down.clone());
        }
        match (&self.stage, self.down()) {
            (_, None) => Ok(()),
            // Nothing was sent, so another connection may be opened.
            (Stage::Open { .. }, Some(down)) if lane.progress != Progress::Open => {
                Err(LinkDown::refused(down.cause.clone()))
            }
            (_, Some(down)) => Err(down.clone()),
        }
    }

    /// Writes what waits, reads what has come, and tells those whom it concerns.
    fn progress(&mut self) {
        if let State { stage: Stage::Open { trunk_end, .. }, lanes, next, .. } = self {
            trunk_end.flush();
            trunk_end.receive(MUCH, |number, part| take(lanes, *next, number, part));
        }
        self.tell();
    }

    /// Tells of the connection's end, or of room for those that wait for it.
    fn tell(&mut self) {
        if self.down().is_some() {
            if !std::mem::replace(&mut self.is_told, true) {
                self.lanes.values().for_each(Lane::name);
            }
        } else if self.is_blocked && self.trunk_end().is_some_and(TrunkEnd::has_room) {
            self.is_blocked = false;
            for lane in self.lanes.values_mut() {
                if lane.window.room() > 0 && std::mem::take(&mut lane.is_armed) {
                    lane.name();
                }
            }
        }
    }
}

/// Takes what the peer says of a lane. The error: it must not.
fn take(lanes: &mut FxHashMap<u32, Lane>, next: Option<u32>, number: u32, part: Part<'_>) -> Result<(), LinkDown> {
    let Some(lane) = lanes.get_mut(&number) else {
        // What it says of one that has ended may have crossed that.
        return match next.is_none_or(|next| number < next) {
            true => Ok(()),
            false => Err(LinkDown::new(format!("it spoke of lane {number}, which nobody has opened"))),
        };
    };
    match part {
        Part::Accepted if lane.progress == Progress::Asked => {
            lane.progress = Progress::Open;
            lane.name();
        }
        Part::Credit(count) if lane.progress == Progress::Open => {
            lane.window.credit(count)?;
            if std::mem::take(&mut lane.is_armed) {
                lane.name();
            }
        }
        Part::Closed => {
            lane.down = Some(match lane.progress {
                Progress::Open => LinkDown::new("it closed the connection"),
                _ => LinkDown::refused("it has left the communicator"),
            });
            lane.name();
        }
        other => return Err(LinkDown::new(format!("it said {other:?} of lane {number}, which is not its to say"))),
    }
    Ok(())
}

/// The sending end of a stream: a lane of a connection that communicators share.
#[derive(Debug)]
pub(super) struct LaneSendStream {
    trunk: Arc<Outbound>,
    number: u32,
}

impl LaneSendStream {
    /// The lane with this number.
    pub(super) fn new(trunk: Arc<Outbound>, number: u32) -> LaneSendStream {
        LaneSendStream { trunk, number }
    }
}

impl SendStream for LaneSendStream {
    fn write(&mut self, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        self.trunk.write(self.number, head, body)
    }

    fn arm(&mut self) -> bool {
        self.trunk.arm(self.number)
    }

    fn disarm(&mut self) {
        self.trunk.disarm(self.number);
    }

    fn patience(&self) -> u32 {
        crate::transport::PATIENCE_WITH_CALLS
    }

    fn is_open(&self) -> bool {
        self.trunk.is_open(self.number)
    }

    fn tcp_stats(&self) -> Option<TcpStats> {
        self.trunk.tcp_stats()
    }

    fn lane_stats(&self) -> Option<LaneStats> {
        Some(self.trunk.lane_stats(self.number))
    }

    fn flushed(&mut self) -> Result<bool, LinkDown> {
        self.trunk.flushed(self.number)
    }
}

impl Drop for LaneSendStream {
    fn drop(&mut self) {
        // In a forked child, a thread may have had the lock that is not there.
        if self.trunk.origin.is_here() {
            self.trunk.leave(self.number);
        }
    }
}
