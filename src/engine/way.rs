//! How a stream to another rank is opened: tried again where it cannot be now.

use std::time::{Duration, Instant};

use crate::error::{Down, LinkDown};
use crate::transport::{Outlet, Transport};
use crate::types::Rank;

/// How a peer is reached.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    /// Which of the transports.
    pub(crate) transport: usize,
    /// The peer's address on it.
    pub(crate) address: Vec<u8>,
}

/// The way to a peer, and how far this rank has come on it. The default leads nowhere.
#[derive(Debug, Default)]
pub(crate) struct Way {
    route: Option<Route>,
    obstacle: Option<Obstacle>,
}

/// Why there is no stream yet, although there may be one later.
#[derive(Debug)]
struct Obstacle {
    cause: String,
    /// It is this process that lacks something.
    is_shortage: bool,
    /// When to try again, and how long that is after the last time.
    again: Instant,
    pause: Duration,
}

impl Way {
    /// By this route, if there is one.
    pub(crate) fn new(route: Option<Route>) -> Way {
        Way { route, obstacle: None }
    }

    /// Opens a stream by one of `transports`. None: not now; again when it [is due](Way::due).
    pub(crate) fn open(
        &mut self,
        peer: Rank,
        transports: &mut [Box<dyn Transport>],
        now: Instant,
    ) -> Result<Option<Box<dyn Outlet>>, LinkDown> {
        if self.due().is_some_and(|due| now < due) {
            return Ok(None);
        }
        let Some(route) = &self.route else { return Err(LinkDown::new("no transport reaches it")) };
        match transports[route.transport].open(peer, &route.address) {
            Ok(outlet) => {
                self.obstacle = None;
                Ok(Some(outlet))
            }
            Err(down) => self.ended(down, now).map(|()| None),
        }
    }

    /// Opening the stream ended with `down`, now or when it was under way. Has it opened again later if that may help; gives
    /// `down` back if it does not.
    pub(crate) fn ended(&mut self, down: LinkDown, now: Instant) -> Result<(), LinkDown> {
        let is_shortage = match down.kind {
            Down::Busy => false,
            Down::Lacking => true,
            Down::Broken | Down::HungUp => {
                self.obstacle = None;
                return Err(down);
            }
        };
        if is_shortage {
            // Others that cannot be opened lack the same.
            static SAID: std::sync::Once = std::sync::Once::new();
            SAID.call_once(|| log::warn!("connections to other ranks have to wait: {}", down.cause));
        }
        let pause = self.obstacle.as_ref().map_or(FIRST_PAUSE, |obstacle| (obstacle.pause * 2).min(LONGEST_PAUSE));
        self.obstacle = Some(Obstacle { cause: down.cause, is_shortage, again: now + pause, pause });
        Ok(())
    }

    /// When to open again what could not be opened.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.obstacle.as_ref().map(|obstacle| obstacle.again)
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

const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
