//! Points in time that lie a timeout ahead, short sleeps on the way there, and the heartbeats of who waits for long.

use std::time::{Duration, Instant};

/// The moment `timeout` after `start`. A timeout of more than a century counts as one, which no clock overflows.
pub(crate) fn deadline_after(start: Instant, timeout: Duration) -> Instant {
    start + timeout.min(Duration::from_secs(100 * 366 * 86400))
}

/// Sleeps between two looks at something that nobody announces: longer after a longer wait, a millisecond at most.
pub(crate) fn nap(waited: Duration) {
    std::thread::sleep((waited / 8).clamp(Duration::from_micros(5), Duration::from_millis(1)));
}

/// When a collective's next heartbeat is due.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pulse {
    /// When the collective started.
    pub(crate) began: Instant,
    /// None if it is beyond the clock's range.
    pub(crate) due: Option<Instant>,
    interval: Duration,
    round: u32,
}

impl Pulse {
    /// Of a collective that starts now and may take `timeout`.
    pub(crate) fn new(now: Instant, timeout: Duration) -> Pulse {
        let due = now.checked_add(HEARTBEAT_AFTER.min(timeout / 4));
        Pulse { began: now, due, interval: HEARTBEAT_AFTER.max(timeout / 8), round: 0 }
    }

    /// Takes the heartbeat that is due at `now`, if one is: its round, and after how long the next one follows.
    pub(crate) fn beat(&mut self, now: Instant) -> Option<(u32, Duration)> {
        self.due.filter(|due| *due <= now)?;
        let round = self.round;
        self.round = round.saturating_add(1);
        self.due = now.checked_add(self.interval);
        Some((round, self.interval))
    }
}

/// How long a collective waits before its first heartbeat, and at least before each further one.
const HEARTBEAT_AFTER: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_come_early_in_short_time_limits_and_seldom_in_long_ones() {
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let mut short = Pulse::new(now, second);
        assert_eq!(short.due, Some(now + second / 4));
        assert_eq!(short.beat(now), None, "it is not due yet");
        assert_eq!(short.beat(now + second / 4), Some((0, HEARTBEAT_AFTER)));
        assert_eq!(short.beat(now + second), Some((1, HEARTBEAT_AFTER)));
        let mut long = Pulse::new(now, second * 800);
        assert_eq!(long.due, Some(now + HEARTBEAT_AFTER));
        assert_eq!(long.beat(now + second), Some((0, second * 100)));
        assert_eq!(long.due, Some(now + second * 101));
    }
}
