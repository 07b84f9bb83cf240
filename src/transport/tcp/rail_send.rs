//! The sending end of a stream over several connections.

use std::io::IoSlice;
use std::time::{Duration, Instant};

use crate::error::{Down, LinkDown};
use crate::sync::{Arc, Mutex, Weak, lock};
use crate::sys::poller::StreamName;
use crate::sys::socket;
use crate::sys::tcp_info::{self, TcpStats, UnderWay};
use crate::transport::tcp::connect::{Connection, Held, Holding};
use crate::transport::tcp::failures::{Alarm, Failures};
use crate::transport::tcp::paths::{target, way};
use crate::transport::tcp::rails::link::{Link, Lost};
use crate::transport::tcp::rails::sender::Sender;
use crate::transport::tcp::reopening::{Opener, Reopening};
use crate::transport::tcp::tender::{Tended, Tender};
use crate::transport::{PATIENCE_WITH_CALLS, RailStats, SendStream};

/// A connection that is open.
struct Rail {
    connection: Connection,
    /// From where to where it goes, in words.
    way: String,
}

impl Link for Rail {
    fn write(&mut self, bytes: &[u8]) -> Result<usize, LinkDown> {
        self.connection.put(bytes)
    }

    fn read(&mut self, into: &mut [u8]) -> Result<usize, LinkDown> {
        self.connection.get(into)
    }

    fn flush(&mut self) -> Result<bool, LinkDown> {
        self.connection.pass_on()
    }
}

/// The stream's sending end, which a thread looks after, too.
pub(super) struct RailSendStream {
    rails: Arc<Mutex<SendRails>>,
    tender: Tender,
}

impl RailSendStream {
    /// Over these rails, which `tender` looks after.
    pub(super) fn new(rails: SendRails, tender: &Tender) -> Self {
        let rails = Arc::new(Mutex::new(rails));
        let tended: Weak<Mutex<SendRails>> = Arc::downgrade(&rails);
        tender.add(tended);
        RailSendStream { rails, tender: tender.clone() }
    }
}

/// The rails of a stream.
pub(super) struct SendRails {
    /// Those that are being opened for the first time, by number.
    opening: Vec<(usize, Connection)>,
    reopening: Reopening,
    sender: Sender<Rail>,
    /// The peer has taken one of them into its stream.
    has_joined: bool,
    failures: Failures,
    /// Why the last rail that does not work does not.
    last: Option<LinkDown>,
    /// What the rails have carried that work no longer.
    carried: Option<TcpStats>,
    /// How often one has broken or could not be opened, and how often one was opened again.
    dropped: u64,
    reopened: u64,
    holding: Holding,
    /// Names the stream after something has been done for it that the poller would have told of.
    nudge: Alarm,
}

impl SendRails {
    /// Over rails that are opened so, which are to be begun.
    pub(super) fn new(opener: Opener, held: &Held) -> Self {
        let (me, name, rails, poller) =
            (opener.identity.me, StreamName::To(opener.peer), opener.paths.len(), &opener.poller);
        SendRails {
            opening: Vec::new(),
            sender: Sender::new(rails),
            has_joined: false,
            failures: Failures::new(me, name, rails, poller),
            last: None,
            carried: None,
            dropped: 0,
            reopened: 0,
            holding: Holding::counted_in(held),
            nudge: Alarm::new(poller, name),
            reopening: Reopening::new(opener),
        }
    }

    /// Begins to open a rail.
    pub(super) fn begin(&mut self, number: usize) -> Result<(), LinkDown> {
        match self.reopening.opener().begin(number) {
            Ok(connection) => self.add(number, connection),
            // What this process lacks, it may lack for all of them.
            Err(down) if down.kind == Down::Lacking => return Err(down),
            Err(down) => self.miss(number, down),
        }
        Ok(())
    }

    /// Adds a rail, which is being opened.
    pub(super) fn add(&mut self, number: usize, connection: Connection) {
        self.opening.push((number, connection));
    }

    /// Does without a rail that cannot be opened.
    fn miss(&mut self, number: usize, down: LinkDown) {
        self.failures.note(number, format_args!("cannot be opened: {down}"));
        self.sender.miss(number);
        self.reopening.fails(number, Instant::now());
        self.dropped += 1;
        self.last = Some(down);
    }

    /// Has a rail carry bytes, of which this is the way.
    fn join(&mut self, number: usize, connection: Connection) -> Result<String, LinkDown> {
        socket::limit_unsent(connection.socket(), UNSENT_BYTES)?;
        let (way, opener) = (way(connection.socket(), "to"), self.reopening.opener());
        log::debug!("rank {}: rail {} to rank {}: {way}", opener.identity.me, number + 1, opener.peer);
        self.reopening.works(number, target(connection.socket()), Instant::now());
        self.sender.add(number, Rail { connection, way: way.clone() });
        self.has_joined = true;
        Ok(way)
    }

    /// Advances the connections that are being opened.
    fn open(&mut self) -> Result<(), LinkDown> {
        let mut place = 0;
        while place < self.opening.len() {
            match self.opening[place].1.drive() {
                Ok(false) => place += 1,
                Ok(true) => {
                    let (number, connection) = self.opening.remove(place);
                    self.join(number, connection)?;
                }
                Err(down) => {
                    let (number, _) = self.opening.remove(place);
                    self.miss(number, down);
                }
            }
        }
        Ok(())
    }

    /// Begins to open the rails again whose time has come, as long as the stream goes on.
    fn reopen(&mut self) {
        if self.sender.working() == 0 {
            return;
        }
        let now = Instant::now();
        for number in self.reopening.take_due(now) {
            let generation = self.sender.reopen(number);
            if let Err(down) = self.reopening.begin(number, generation, now) {
                self.fail_again(number, &down);
            }
        }
    }

    /// Advances what is under way to open rails again. Returns how many work now.
    fn drive_reopening(&mut self) -> usize {
        let mut back = 0;
        for (number, outcome) in self.reopening.drive(Instant::now()) {
            match outcome.and_then(|connection| self.join(number, connection)) {
                Ok(way) => {
                    self.failures.note_back(number, &way);
                    self.reopened += 1;
                    back += 1;
                }
                Err(down) => self.fail_again(number, &down),
            }
        }
        back
    }

    /// A rail could not be opened again, of which the log has heard that it does not work.
    fn fail_again(&mut self, number: usize, down: &LinkDown) {
        let opener = self.reopening.opener();
        let (me, peer) = (opener.identity.me, opener.peer);
        log::debug!("rank {me}: rail {} to rank {peer} cannot be opened again yet: {down}", number + 1);
        self.sender.miss(number);
        self.reopening.fails(number, Instant::now());
    }

    /// Gives those rails up that are silent while others work.
    fn give_up_silent(&mut self) {
        let state = |rail: &Rail| tcp_info::under_way(rail.connection.socket()).ok();
        let is_alive = |state: &UnderWay| state.retries == 0;
        if self.sender.rails().any(|(rail, _)| state(rail).as_ref().is_some_and(is_alive)) {
            self.sender.give_up(|rail| {
                let is_silent = state(rail).is_some_and(|state| state.is_any() && state.retries >= RETRIES_MAX);
                is_silent.then(|| LinkDown::new("its bytes were sent again and again, and no answer came"))
            });
        }
    }

    /// Notes the rails that have broken, has the poller wake for what waits, and tells if no rail is left.
    fn settle(&mut self) -> Result<(), LinkDown> {
        loop {
            let lost = self.sender.take_lost();
            if lost.is_empty() {
                break;
            }
            for Lost { number, link, down } in lost {
                self.failures.note(number, format_args!("({}) has failed: {down}", link.way));
                let stats = tcp_info::tcp_stats(link.connection.socket()).ok();
                self.reopening.fails(number, Instant::now());
                self.dropped += 1;
                self.carried = [self.carried, stats].into_iter().flatten().reduce(TcpStats::and);
                self.last = Some(down);
            }
            // The others take what it had not delivered, and tell the peer.
            self.sender.advance();
        }
        self.watch();
        let left = self.sender.working() + self.opening.len();
        if left > 0 {
            self.failures.warn(left);
            return Ok(());
        }
        self.failures.forget();
        self.reopening.end();
        let down = self.last.clone().unwrap_or_else(|| LinkDown::new("it has no connection"));
        // What was taken is lost, so that no other stream may go on with the rest.
        Err(if self.sender.has_begun() && down.kind != Down::HungUp { LinkDown::new(down.cause) } else { down })
    }

    /// Has the poller wake when there is room on rails for which bytes wait. Acknowledgements always wake it.
    fn watch(&mut self) {
        for (rail, has_rest) in self.sender.rails() {
            rail.connection.watch(has_rest);
        }
        let holds = self.holds();
        self.holding.set(holds);
    }

    /// Whether this process is still needed for bytes that were taken: they wait for room, or are many that may have to be sent
    /// again.
    fn holds(&mut self) -> bool {
        let tls_holds = self.sender.rails().any(|(rail, _)| rail.connection.holds_bytes());
        tls_holds || self.sender.holds_bytes() || self.sender.unacknowledged() >= UNACKNOWLEDGED_MAX
    }

    pub(super) fn write(&mut self, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        self.nudge.clear();
        self.open()?;
        let taken = if head.is_empty() && body.iter().all(|slice| slice.is_empty()) {
            // The poller has named the stream, maybe for an attempt that has come further.
            self.drive_reopening();
            self.sender.advance();
            0
        } else {
            self.sender.write(head, body)
        };
        self.settle()?;
        Ok(taken)
    }

    fn flushed(&mut self) -> Result<bool, LinkDown> {
        self.open()?;
        self.sender.advance();
        self.settle()?;
        // Also what is to go again by another rail.
        if self.sender.holds_bytes() {
            return Ok(false);
        }
        let mut rails = self.sender.rails();
        Ok(rails.all(|(rail, has_rest)| !has_rest && !rail.connection.holds_bytes() && is_delivered(rail)))
    }
}

#[cfg(test)]
impl SendRails {
    /// How many rails work.
    pub(super) fn working(&self) -> usize {
        self.sender.working()
    }

    /// What tells the stream's user of what was done for it.
    pub(super) fn nudge(&mut self) -> &mut Alarm {
        &mut self.nudge
    }
}

impl Tended for SendRails {
    fn tend(&mut self) -> bool {
        let (working, is_much) = (self.sender.working(), self.sender.unacknowledged() >= UNACKNOWLEDGED_MAX);
        if is_much {
            self.sender.ask();
        }
        self.give_up_silent();
        self.reopen();
        let back = self.drive_reopening();
        let is_restless = self.reopening.is_any();
        if is_much || is_restless || back > 0 || self.sender.holds_bytes() || self.sender.working() < working {
            self.sender.advance();
        }
        let is_ended = self.settle().is_err();
        // What is done here is nothing that the poller tells the stream's user of: an end, room, or what is to be sent again.
        let has_lost = self.sender.working() < working + back;
        if is_ended || has_lost || back > 0 || (is_much && self.sender.has_room()) {
            self.nudge.set(Duration::ZERO);
        }
        let is_under_way = self.holds() || self.sender.rails().any(|(rail, _)| !is_delivered(rail));
        !is_ended && (is_under_way || self.failures.is_any() || self.reopening.is_any())
    }
}

impl SendStream for RailSendStream {
    fn write(&mut self, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        let (taken, is_short) = {
            let mut rails = lock(&self.rails);
            (rails.write(head, body)?, rails.reopening.is_any())
        };
        if taken > 0 || is_short {
            self.tender.wake();
        }
        Ok(taken)
    }

    fn arm(&mut self) -> bool {
        let mut rails = lock(&self.rails);
        let has_room = rails.sender.has_room();
        rails.watch();
        has_room
    }

    fn disarm(&mut self) {}

    fn patience(&self) -> u32 {
        PATIENCE_WITH_CALLS
    }

    fn is_open(&self) -> bool {
        let rails = lock(&self.rails);
        rails.opening.is_empty() && rails.sender.working() > 0 && !rails.holding.holds()
    }

    fn was_accepted(&self) -> bool {
        lock(&self.rails).has_joined
    }

    fn tcp_stats(&self) -> Option<TcpStats> {
        let rails = lock(&self.rails);
        let stats = rails.sender.links().filter_map(|rail| tcp_info::tcp_stats(rail.connection.socket()).ok());
        stats.chain(rails.carried).reduce(TcpStats::and)
    }

    fn rail_stats(&self) -> Option<RailStats> {
        let rails = lock(&self.rails);
        let (all, working) = (rails.reopening.opener().paths.len(), rails.sender.working());
        Some(RailStats { rails: all, working, dropped: rails.dropped, reopened: rails.reopened })
    }

    fn flushed(&mut self) -> Result<bool, LinkDown> {
        lock(&self.rails).flushed()
    }
}

impl Drop for SendRails {
    fn drop(&mut self) {
        // To close a connection with unread bytes resets it.
        self.sender.advance();
    }
}

/// Whether the other host has everything. An acknowledgement that comes after this process's end makes the system drop what it
/// has not delivered.
fn is_delivered(rail: &Rail) -> bool {
    tcp_info::under_way(rail.connection.socket()).is_ok_and(|under_way| !under_way.is_any())
}

/// How much of what the system has taken for a connection it may not have sent: more would wait where another rail is faster.
const UNSENT_BYTES: u32 = 128 * 1024;

/// From how many bytes on that nobody has acknowledged this process stays ready to send them again, and asks.
const UNACKNOWLEDGED_MAX: usize = 64 * 1024;

/// A connection counts as broken when the system has sent the same bytes so often in vain, while others work: 3 seconds where
/// the first time takes 0.2 seconds.
const RETRIES_MAX: u8 = 4;
