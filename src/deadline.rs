//! Points in time that lie a timeout ahead.

use std::time::{Duration, Instant};

/// The moment `timeout` after `start`. A timeout of more than a century counts as one, which no clock overflows.
pub(crate) fn deadline_after(start: Instant, timeout: Duration) -> Instant {
    start + timeout.min(Duration::from_secs(100 * 366 * 86400))
}
