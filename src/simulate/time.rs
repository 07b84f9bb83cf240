//! Times in whole femtoseconds, so that sums are exact and do not depend on their order.

use std::fmt;

/// A time, or how long something takes. Sums stop at [`Time::MAX`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(u64);

impl Time {
    /// None.
    pub const ZERO: Time = Time(0);

    /// About five hours: the end of what is counted.
    pub const MAX: Time = Time(u64::MAX);

    /// So many femtoseconds, 10⁻¹⁵ s.
    pub const fn femtoseconds(count: u64) -> Time {
        Time(count)
    }

    /// So many seconds, rounded to femtoseconds; nothing if they are negative, no number or more than an hour.
    ///
    /// ```
    /// use ncclx_rs::simulate::Time;
    /// assert_eq!(Time::from_seconds(2e-12), Some(Time::femtoseconds(2000)));
    /// assert_eq!(Time::from_seconds(-1.0), None);
    /// ```
    pub fn from_seconds(seconds: f64) -> Option<Time> {
        (0.0..=MAX_SECONDS).contains(&seconds).then(|| Time((seconds * PER_SECOND).round() as u64))
    }

    /// A measured one.
    pub(crate) fn of(duration: std::time::Duration) -> Time {
        Time(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1_000_000))
    }

    /// In femtoseconds.
    pub(super) fn in_femtoseconds(self) -> u64 {
        self.0
    }

    /// In seconds.
    pub fn seconds(self) -> f64 {
        self.0 as f64 / PER_SECOND
    }

    /// This and another one after it.
    pub fn plus(self, other: Time) -> Time {
        Time(self.0.saturating_add(other.0))
    }

    /// So many of these.
    pub fn times(self, count: u64) -> Time {
        Time(self.0.saturating_mul(count))
    }

    /// What is left of this after another one; nothing if that is longer.
    pub fn minus(self, other: Time) -> Time {
        Time(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} s", self.seconds())
    }
}

const PER_SECOND: f64 = 1e15;

/// The longest time that a parameter may be.
pub(super) const MAX_SECONDS: f64 = 3600.0;
