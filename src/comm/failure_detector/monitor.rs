//! The monitor of one neighbour: what its communicator says to it and hears of it.

use std::time::{Duration, Instant};

use crate::comm::failure_detector::incoming::Heard;
use crate::comm::failure_detector::links::{Cut, Links};
use crate::comm::failure_detector::manner::Way;
use crate::comm::failure_detector::notice::Notice;
use crate::comm::failure_detector::outgoing::{Member, Outgoing, Place};
use crate::engine::connector::Connector;
use crate::error::LinkDown;
use crate::transport::Transport;
use crate::transport::auth::Identity;
use crate::types::Rank;

/// What a check of a neighbour has shown.
#[derive(Debug, Default)]
pub(super) struct Observed {
    /// The notices that have come from it.
    pub(super) notices: Vec<Notice>,
    /// Why it counts as lost: it is gone, and did not say goodbye.
    pub(super) loss: Option<String>,
}

/// One neighbour in one communicator.
pub(super) struct PeerMonitor {
    pub(super) peer: Rank,
    size: usize,
    way: Way,
    /// Opens the connection if this communicator is the first that needs it.
    connector: Connector,
    /// This communicator's number on the connection to the neighbour.
    number: Option<u32>,
    /// What waits for that.
    waiting: Vec<Notice>,
    /// The neighbour speaks here.
    is_heard: bool,
    observed: Observed,
    /// The neighbour leaves, and listens until this rank speaks to it.
    has_left: bool,
    /// The first sign that the neighbour is gone, and when it was seen. A goodbye may still be on its way.
    end: Option<(String, Instant)>,
}

impl PeerMonitor {
    /// A monitor of `peer` without a connection yet.
    pub(super) fn new(peer: Rank, size: usize, connector: Connector, way: Way) -> PeerMonitor {
        PeerMonitor {
            peer,
            size,
            way,
            connector,
            number: None,
            waiting: Vec::new(),
            is_heard: false,
            observed: Observed::default(),
            has_left: false,
            end: None,
        }
    }

    /// Joins the connection to the neighbour's process, and opens it if there is none and the next attempt is due.
    pub(super) fn connect(
        &mut self,
        member: Member,
        identity: &Identity,
        transports: &mut [Box<dyn Transport>],
        links: &mut Links,
        now: Instant,
    ) {
        if !self.wants_number() {
            return;
        }
        let place = (member, self.peer);
        if links.get(&self.way).is_some() {
            // This one's own or another's, which has found a way.
            self.connector.give_up();
        } else if self.is_due(now) {
            // Looked up before the connection is made: if that succeeds, the process was alive and the number was its own.
            let process = links.find_process(&self.way.process);
            match self.connector.open(self.peer, transports, now) {
                Ok(Some(stream)) => links.insert(self.way.clone(), Outgoing::new(stream, place, process)),
                Ok(None) => return,
                Err(down) => return self.end = Some((down.cause, now)),
            }
        }
        let Some(link) = links.get(&self.way) else { return };
        self.number = link.join(place, identity);
        if let Some(number) = self.number {
            self.waiting.drain(..).for_each(|notice| link.push(number, &notice));
        }
    }

    fn wants_number(&self) -> bool {
        self.number.is_none() && self.end.is_none()
    }

    fn is_due(&self, now: Instant) -> bool {
        self.connector.due().is_none_or(|due| due <= now)
    }

    /// Whether [`PeerMonitor::connect`] has something to do now.
    pub(super) fn can_connect(&self, links: &Links, now: Instant) -> bool {
        self.wants_number() && links.peek(&self.way).map_or_else(|| self.is_due(now), Outgoing::has_opened)
    }

    /// The connection to the neighbour has ended or could not be opened.
    pub(super) fn cut(&mut self, cut: &Cut, is_opener: bool, now: Instant) {
        let down = &cut.down;
        self.number = None;
        if self.is_heard && cut.has_opened {
            self.end.get_or_insert((down.cause.clone(), now));
        } else if is_opener && let Err(down) = self.connector.ended(down.clone(), now) {
            self.end.get_or_insert((down.cause, now));
        }
        // Otherwise it was another communicator's, which goes on to try, and perhaps to a process that had this one's number before.
    }

    /// The neighbour begins to speak. False: it does already.
    pub(super) fn begin_to_hear(&mut self) -> bool {
        !std::mem::replace(&mut self.is_heard, true)
    }

    /// Whether the neighbour speaks.
    pub(super) fn is_heard(&self) -> bool {
        self.is_heard
    }

    /// What has come from it. The error says what is wrong with that.
    pub(super) fn hear(&mut self, heard: Heard) -> Result<(), LinkDown> {
        match heard {
            Heard::Begun => self.is_heard = true,
            Heard::Notice(bytes) => match Notice::decode(&bytes, self.size)? {
                Some((notice, len)) if len == bytes.len() => self.observed.notices.push(notice),
                _ => return Err(LinkDown::new(format!("it sent news of {} bytes that are none", bytes.len()))),
            },
            Heard::Left => self.lose("it closed its communicator"),
        }
        Ok(())
    }

    /// Nothing more comes from it.
    pub(super) fn lose(&mut self, cause: &str) {
        let cause = self.end.take().map_or_else(|| cause.to_owned(), |(cause, _)| cause);
        self.observed.loss.get_or_insert(cause);
    }

    /// It has said goodbye, and has nothing to be told any more.
    pub(super) fn take_goodbye(&mut self) {
        self.has_left = true;
        self.waiting.clear();
    }

    /// Whether it has said goodbye.
    pub(super) fn has_left(&self) -> bool {
        self.has_left
    }

    /// Whether it has said goodbye and has not heard this rank, for which it waits: for all that it knows, this rank may not
    /// have the communicator yet.
    pub(super) fn is_waited_for(&self) -> bool {
        self.has_left && self.wants_number()
    }

    /// Queues a notice.
    pub(super) fn send(&mut self, notice: &Notice, links: &mut Links) {
        if self.end.is_some() || self.has_left {
            return;
        }
        match (self.number, links.get(&self.way)) {
            (Some(number), Some(link)) => link.push(number, notice),
            _ => self.waiting.push(notice.clone()),
        }
    }

    /// Queues a notice that is repeated later; drops it if the neighbour has left much unread.
    pub(super) fn send_if_room(&mut self, notice: &Notice, links: &mut Links) {
        let unsent = links.get(&self.way).map_or(0, |link| link.unsent());
        if unsent < UNREAD_MAX && self.waiting.len() < WAITING_MAX {
            self.send(notice, links);
        }
    }

    /// Whether every notice has left this process for a neighbour that listens, or never can.
    pub(super) fn is_flushed(&self, links: &mut Links) -> bool {
        // What a neighbour is told before it has the communicator, it forgets with the connection.
        let is_listened_to = self.is_heard && self.number.is_some();
        self.end.is_some()
            || self.has_left
            || self.observed.loss.is_some()
            || (is_listened_to && links.get(&self.way).is_none_or(Outgoing::is_flushed))
    }

    /// Whether both sides speak, so that nobody has to connect for this any more.
    pub(super) fn is_settled(&self, links: &mut Links) -> bool {
        let is_open = |link: &mut Outgoing| link.is_open();
        self.is_heard && self.number.is_some() && links.get(&self.way).is_some_and(is_open)
    }

    /// What has been seen since this was asked last. A sign of an end is a loss unless a goodbye comes soon.
    pub(super) fn check(&mut self, now: Instant) -> Observed {
        if let Some((cause, since)) = &self.end
            && now.duration_since(*since) >= LINGER_TIMEOUT
        {
            self.observed.loss.get_or_insert(cause.clone());
        }
        std::mem::take(&mut self.observed)
    }

    /// Has nothing more to say, and listens no longer.
    pub(super) fn leave(&mut self, member: Member, links: &mut Links) {
        let place: Place = (member, self.peer);
        links.leave(&self.way, place, self.number.take());
    }

    /// When to check again although nothing happens.
    pub(super) fn next_check(&self) -> Option<Instant> {
        let end = self.end.as_ref().map(|(_, since)| *since + LINGER_TIMEOUT);
        end.into_iter().chain(self.connector.due()).min()
    }
}

/// How many bytes may wait for a process that does not read, such as a stopped one.
const UNREAD_MAX: usize = 64 << 10;

/// How many notices may wait for a connection.
const WAITING_MAX: usize = 64;

/// How long a goodbye may take after the first sign of an end.
const LINGER_TIMEOUT: Duration = Duration::from_millis(100);
