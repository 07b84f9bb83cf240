//! How a stream to another rank is opened: tried again where it cannot be now, and in another way where this one does not lead
//! there.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::error::{Down, LinkDown};
use crate::transport::{Detour, SendStream, Transport};
use crate::types::Rank;

/// How a peer is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Which of the transports.
    pub(crate) transport: usize,
    /// The peer's address on it.
    pub(crate) address: Vec<u8>,
}

/// How each rank is reached, the preferred way first; asked when this rank first talks to it.
pub(crate) type FindRoutes = Box<dyn Fn(Rank) -> Vec<Route> + Send>;

/// Opens the stream to one peer, by one of several routes. The default has none.
#[derive(Debug, Default)]
pub(crate) struct Connector {
    /// Those by which it may still be reached, the preferred ones first.
    routes: VecDeque<Route>,
    /// Why it was not reached by the others.
    failures: Vec<String>,
    /// Another route has been taken than the first, which has not been logged.
    has_turned: bool,
    obstacle: Option<Obstacle>,
    /// How long it has waited last for a peer that was busy, or for what this process lacks. It grows also where a stream is begun each
    /// time: what hangs up on it may be no rank of this communicator.
    pause: Duration,
    /// When nobody took the stream for the first time.
    refused: Option<Instant>,
}

/// Why there is no stream yet, although there may be one later.
#[derive(Debug)]
struct Obstacle {
    cause: String,
    /// It is this process that lacks something.
    is_shortage: bool,
    /// When to try again.
    again: Instant,
}

impl Connector {
    /// By the first of these routes that leads there.
    pub(crate) fn new(routes: impl IntoIterator<Item = Route>) -> Connector {
        Connector { routes: routes.into_iter().collect(), ..Connector::default() }
    }

    /// Opens a stream by one of `transports`. None: not now; again when it [is due](Connector::due).
    pub(crate) fn open(
        &mut self,
        peer: Rank,
        transports: &mut [Box<dyn Transport>],
        now: Instant,
    ) -> Result<Option<Box<dyn SendStream>>, LinkDown> {
        loop {
            if self.due().is_some_and(|due| now < due) {
                return Ok(None);
            }
            let Some(route) = self.routes.front() else { return Err(LinkDown::new("no transport reaches it")) };
            let detour = if self.routes.len() > 1 { Detour::Possible } else { Detour::Impossible };
            match transports[route.transport].open(peer, &route.address, detour) {
                Ok(send_stream) => {
                    self.obstacle = None;
                    return Ok(Some(send_stream));
                }
                Err(down) => self.ended(down, now)?,
            }
        }
    }

    /// Opening the stream ended with `down`, now or when it was under way. Has it opened again later, or now by another route,
    /// if that may help; gives `down` back if it does not.
    pub(crate) fn ended(&mut self, mut down: LinkDown, now: Instant) -> Result<(), LinkDown> {
        self.obstacle = None;
        let (is_shortage, pause) = match down.kind {
            Down::Busy | Down::Lacking => {
                self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
                (down.kind == Down::Lacking, self.pause)
            }
            // The failure detector may be about to say why, and to name another rank.
            Down::Refused if now - *self.refused.get_or_insert(now) < REFUSED_TIMEOUT => (false, REFUSED_TIMEOUT / 4),
            Down::Unfit if self.routes.len() > 1 => {
                self.routes.pop_front();
                self.failures.push(down.cause.clone());
                self.has_turned = true;
                (false, Duration::ZERO)
            }
            Down::Broken | Down::HungUp | Down::Refused | Down::Unfit => {
                self.failures.push(down.cause);
                down.cause = std::mem::take(&mut self.failures).join("; ");
                return Err(down);
            }
        };
        if is_shortage {
            // Others that cannot be opened lack the same.
            static SAID: std::sync::Once = std::sync::Once::new();
            SAID.call_once(|| log::warn!("connections to other ranks have to wait: {}", down.cause));
        }
        self.obstacle = Some(Obstacle { cause: down.cause, is_shortage, again: now + pause });
        Ok(())
    }

    /// The peer has come by `transport`. What it would rather have taken does not lead here, and so does not lead there.
    pub(crate) fn follow(&mut self, transport: usize) {
        if let Some(place) = self.routes.iter().position(|route| route.transport == transport) {
            self.routes.drain(..place);
        }
    }

    /// The name of the transport whose turn it is.
    pub(crate) fn transport(&self, transports: &[Box<dyn Transport>]) -> &'static str {
        self.routes.front().map_or("nothing", |route| transports[route.transport].name())
    }

    /// Why the preferred route is not the one that has led there, the first time that this is asked.
    pub(crate) fn take_turn(&mut self) -> Option<String> {
        std::mem::take(&mut self.has_turned).then(|| std::mem::take(&mut self.failures).join("; "))
    }

    /// When to open again what could not be opened.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.obstacle.as_ref().map(|obstacle| obstacle.again)
    }

    /// Nothing is to be opened any more.
    pub(crate) fn give_up(&mut self) {
        self.obstacle = None;
    }

    /// Whether it is this process that lacks what a stream takes.
    pub(crate) fn is_short(&self) -> bool {
        self.obstacle.as_ref().is_some_and(|obstacle| obstacle.is_shortage)
    }

    /// Why what was to be opened is not, if it is tried again.
    pub(crate) fn obstacle(&self) -> Option<&str> {
        self.obstacle.as_ref().map(|obstacle| obstacle.cause.as_str())
    }
}

/// How often to look after a stream that is being opened: an address that does not answer is given up some time.
pub(crate) const OPENING_CHECK: Duration = Duration::from_secs(1);

const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// How long to go on with a peer that takes no stream any more. A rank that leaves after a failure tells others of that, which takes
/// them milliseconds.
const REFUSED_TIMEOUT: Duration = Duration::from_millis(300);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_takes_no_stream_is_given_up_after_a_while() {
        let mut connector = Connector::new([Route { transport: 0, address: vec![] }]);
        let (begin, refused) = (Instant::now(), || LinkDown::refused("nobody is there"));
        assert_eq!(connector.ended(refused(), begin), Ok(()));
        assert!(connector.due() > Some(begin) && !connector.is_short());
        assert_eq!(connector.ended(refused(), begin + REFUSED_TIMEOUT / 2), Ok(()));
        assert_eq!(
            connector.ended(refused(), begin + REFUSED_TIMEOUT).expect_err("it is over").cause,
            "nobody is there"
        );
        let down = connector.ended(LinkDown::new("it broke"), begin).expect_err("at once");
        assert_eq!(down.cause, "it broke");
    }
}
