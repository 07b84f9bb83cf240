//! The sending end of a stream over several connections.

use std::io::IoSlice;
use std::time::{Duration, Instant};

use crate::error::{Down, LinkDown};
use crate::sys::poller::{Poller, StreamName};
use crate::sys::socket;
use crate::sys::tcp_info::{self, TcpStats, UnderWay};
use crate::transport::tcp::connect::{Connection, Held, Holding};
use crate::transport::tcp::failures::Failures;
use crate::transport::tcp::paths::way;
use crate::transport::tcp::rails::link::{Link, Lost};
use crate::transport::tcp::rails::sender::Sender;
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

/// The stream's sending end.
pub(super) struct RailSendStream {
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
    /// When the connections were looked after.
    tended: Instant,
}

impl RailSendStream {
    /// To `peer`, over up to so many rails, which are added.
    pub(super) fn new(me: Rank, peer: Rank, rails: usize, poller: &Poller, held: &Held) -> Self {
        RailSendStream {
            me,
            peer,
            opening: Vec::new(),
            sender: Sender::new(rails),
            failures: Failures::new(me, StreamName::To(peer), rails, poller),
            last: None,
            carried: None,
            holding: Holding::counted_in(held),
            tended: Instant::now(),
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

    /// Looks after connections that are silent, from time to time.
    fn tend(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.tended) < TEND_INTERVAL {
            return;
        }
        self.tended = now;
        if self.sender.unacknowledged() >= UNACKNOWLEDGED_MAX {
            self.sender.ask();
        }
        let state = |rail: &Rail| tcp_info::under_way(rail.connection.socket()).ok();
        let is_alive = |state: &UnderWay| state.retries == 0;
        if self.sender.rails().any(|(rail, _)| state(rail).as_ref().is_some_and(is_alive)) {
            self.sender.give_up(|rail| {
                let is_silent = state(rail).is_some_and(|state| state.is_any && state.retries >= RETRIES_MAX);
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
            rail.connection.watch_room(has_rest);
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
}

impl SendStream for RailSendStream {
    fn write(&mut self, head: &[u8], body: &[IoSlice<'_>]) -> Result<usize, LinkDown> {
        if !self.opening.is_empty() {
            self.open()?;
        }
        let taken = if head.is_empty() && body.iter().all(|slice| slice.is_empty()) {
            self.sender.advance();
            0
        } else {
            self.sender.write(head, body)
        };
        self.tend();
        self.settle()?;
        Ok(taken)
    }

    fn arm(&mut self) -> bool {
        let has_room = self.sender.has_room();
        self.watch();
        has_room
    }

    fn disarm(&mut self) {}

    fn patience(&self) -> u32 {
        PATIENCE_WITH_CALLS
    }

    fn is_open(&self) -> bool {
        self.opening.is_empty() && self.sender.working() > 0 && !self.holding.holds()
    }

    fn tcp_stats(&self) -> Option<TcpStats> {
        let stats = self.sender.links().filter_map(|rail| tcp_info::tcp_stats(rail.connection.socket()).ok());
        stats.chain(self.carried).reduce(TcpStats::and)
    }

    fn flushed(&mut self) -> Result<bool, LinkDown> {
        if !self.opening.is_empty() {
            self.open()?;
        }
        self.sender.advance();
        self.settle()?;
        // An acknowledgement that comes after this process's end makes the system drop what it has not delivered.
        let is_delivered =
            |rail: &Rail| tcp_info::under_way(rail.connection.socket()).is_ok_and(|under_way| !under_way.is_any);
        let mut rails = self.sender.rails();
        Ok(rails.all(|(rail, has_rest)| !has_rest && !rail.connection.holds_bytes() && is_delivered(rail)))
    }
}

impl Drop for RailSendStream {
    fn drop(&mut self) {
        // To close a connection with unread bytes resets it.
        self.sender.advance();
    }
}

/// How much of what the system has taken for a connection it may not have sent: more would wait where another rail is faster.
const UNSENT_BYTES: u32 = 128 * 1024;

/// From how many bytes on that nobody has acknowledged this process stays ready to send them again, and asks.
const UNACKNOWLEDGED_MAX: usize = 64 * 1024;

/// How often to look after connections.
const TEND_INTERVAL: Duration = Duration::from_millis(250);

/// A connection counts as broken when the system has sent the same bytes so often in vain, while others work: 3 seconds where
/// the first time takes 0.2 seconds.
const RETRIES_MAX: u8 = 4;
