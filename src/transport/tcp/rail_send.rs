//! The sending end of a stream over several connections.

use std::io::IoSlice;
use std::time::Duration;

use crate::error::{Down, LinkDown};
use crate::sync::{Arc, Mutex, Weak, lock};
use crate::sys::poller::{Poller, StreamName};
use crate::sys::socket;
use crate::sys::tcp_info::{self, TcpStats, UnderWay};
use crate::transport::tcp::connect::{Connection, Held, Holding};
use crate::transport::tcp::failures::{Alarm, Failures};
use crate::transport::tcp::paths::way;
use crate::transport::tcp::rails::link::{Link, Lost};
use crate::transport::tcp::rails::sender::Sender;
use crate::transport::tcp::tender::{Tended, Tender};
use crate::transport::{PATIENCE_WITH_CALLS, SendStream};
use crate::types::Rank;

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
    me: Rank,
    peer: Rank,
    /// Those that are being opened, by number.
    opening: Vec<(usize, Connection)>,
    sender: Sender<Rail>,
    failures: Failures,
    /// Why the last rail that does not work does not.
    last: Option<LinkDown>,
    /// What the rails have carried that work no longer.
    carried: Option<TcpStats>,
    holding: Holding,
    /// Names the stream after something has been done for it that the poller would have told of.
    nudge: Alarm,
}

impl SendRails {
    /// To `peer`, over up to so many rails, which are added.
    pub(super) fn new(me: Rank, peer: Rank, rails: usize, poller: &Poller, held: &Held) -> Self {
        let name = StreamName::To(peer);
        SendRails {
            me,
            peer,
            opening: Vec::new(),
            sender: Sender::new(rails),
            failures: Failures::new(me, name, rails, poller),
            last: None,
            carried: None,
            holding: Holding::counted_in(held),
            nudge: Alarm::new(poller, name),
        }
    }

    /// Adds a rail, which is being opened.
    pub(super) fn add(&mut self, number: usize, connection: Connection) {
        self.opening.push((number, connection));
    }

    /// Does without a rail that cannot be opened.
    pub(super) fn miss(&mut self, number: usize, down: LinkDown) {
        self.failures.note(number, format_args!("cannot be opened: {down}"));
        self.sender.miss(number);
        self.last = Some(down);
    }

    /// Advances the connections that are being opened.
    fn open(&mut self) -> Result<(), LinkDown> {
        let mut place = 0;
        while place < self.opening.len() {
            match self.opening[place].1.drive() {
                Ok(false) => place += 1,
                Ok(true) => {
                    let (number, connection) = self.opening.remove(place);
                    socket::limit_unsent(connection.socket(), UNSENT_BYTES)?;
                    let way = way(connection.socket(), "to");
                    log::debug!("rank {}: rail {} to rank {}: {way}", self.me, number + 1, self.peer);
                    self.sender.add(number, Rail { connection, way });
                }
                Err(down) => {
                    let (number, _) = self.opening.remove(place);
                    self.miss(number, down);
                }
            }
        }
        Ok(())
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

    fn write(&mut self, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        self.nudge.clear();
        self.open()?;
        let taken = if head.is_empty() && body.iter().all(|slice| slice.is_empty()) {
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
        let mut rails = self.sender.rails();
        Ok(rails.all(|(rail, has_rest)| !has_rest && !rail.connection.holds_bytes() && is_delivered(rail)))
    }
}

impl Tended for SendRails {
    fn tend(&mut self) -> bool {
        let (working, is_much) = (self.sender.working(), self.sender.unacknowledged() >= UNACKNOWLEDGED_MAX);
        if is_much {
            self.sender.ask();
        }
        self.give_up_silent();
        if is_much || self.sender.holds_bytes() || self.sender.working() < working {
            self.sender.advance();
        }
        let is_ended = self.settle().is_err();
        // What is done here is nothing that the poller tells the stream's user of: an end, room, or what is to be sent again.
        if is_ended || self.sender.working() < working || (is_much && self.sender.has_room()) {
            self.nudge.set(Duration::ZERO);
        }
        let is_under_way = self.holds() || self.sender.rails().any(|(rail, _)| !is_delivered(rail));
        !is_ended && (is_under_way || self.failures.is_any())
    }
}

impl SendStream for RailSendStream {
    fn write(&mut self, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        let taken = lock(&self.rails).write(head, body)?;
        if taken > 0 {
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

    fn tcp_stats(&self) -> Option<TcpStats> {
        let rails = lock(&self.rails);
        let stats = rails.sender.links().filter_map(|rail| tcp_info::tcp_stats(rail.connection.socket()).ok());
        stats.chain(rails.carried).reduce(TcpStats::and)
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
