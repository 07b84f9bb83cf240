//! How a thread waits that may share its CPU with the rank that it waits for.
//!
//! A thread that polls takes nothing away from a rank on another CPU. A rank on the same CPU cannot run until that thread
//! stops. So the ranks of a host publish on which CPU they wait.

use std::time::{Duration, Instant};

/// What a thread that waits does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Polls again: no other rank needs its CPU.
    Spin,
    /// Gives its CPU away first: another rank waited there last, and may wait for the CPU now.
    Yield,
    /// Sleeps, for the same reason: a thread that is woken is mostly given another CPU, if one is free.
    Sleep,
}

/// What a rank knows of its CPU.
#[derive(Debug, Default)]
pub(crate) struct Cpu {
    /// Another rank waited on it, too, when this one waited last.
    pub(crate) is_shared: bool,
    /// When this rank last slept for that reason.
    last_slept: Option<Instant>,
}

impl Cpu {
    /// How to wait next. `is_shared`: another rank waited last on the CPU that this thread is on.
    pub(crate) fn next_wait(&mut self, is_shared: bool, now: Instant) -> Wait {
        self.is_shared = is_shared;
        if !is_shared {
            Wait::Spin
        } else if self.last_slept.is_none_or(|slept| now - slept >= SLEEP_INTERVAL) {
            self.last_slept = Some(now);
            Wait::Sleep
        } else {
            Wait::Yield
        }
    }
}

/// How often a rank that shares its CPU sleeps, to be given another one.
const SLEEP_INTERVAL: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_shares_its_cpu_sleeps_once_in_a_while_and_yields_in_between() {
        let (mut cpu, began) = (Cpu::default(), Instant::now());
        assert_eq!(cpu.next_wait(false, began), Wait::Spin);
        assert_eq!(cpu.next_wait(true, began), Wait::Sleep, "there may be another CPU");
        assert_eq!((cpu.next_wait(true, began), cpu.is_shared), (Wait::Yield, true), "there was none");
        assert_eq!((cpu.next_wait(false, began), cpu.is_shared), (Wait::Spin, false));
        assert_eq!(cpu.next_wait(true, began + SLEEP_INTERVAL), Wait::Sleep, "it tries again");
    }
}
