//! Points in time that lie a timeout ahead, and short sleeps on the way there.

use std::time::{Duration, Instant};

/// The moment `timeout` after `start`. A timeout of more than a century counts as one, which no clock overflows.
pub(crate) fn deadline_after(start: Instant, timeout: Duration) -> Instant {
    start + timeout.min(Duration::from_secs(100 * 366 * 86400))
}

/// Sleeps between two looks at something that nobody announces: longer after a longer wait, a millisecond at most.
pub(crate) fn nap(waited: Duration) {
    std::thread::sleep((waited / 8).clamp(Duration::from_micros(5), Duration::from_millis(1)));
}
