//! The thread that runs the failure detectors of all communicators of a process, while there are any.

use std::io;
use std::time::{Duration, Instant};

use super::notice::Notice;
use super::state::DetectorState;
use super::watch::{Registration, Report, Watch};
use crate::sync::{self, Arc, Condvar, Mutex, Weak, lock};
use crate::sys::fork::PerProcess;
use crate::sys::poller::Poller;

/// The detector thread of this process, and what it serves.
pub(crate) struct DetectorThread {
    poller: Poller,
    shared: Mutex<Shared>,
    /// Notified after each check of the thread.
    checked: Condvar,
}

struct Shared {
    watch: Watch,
    is_running: bool,
}

impl DetectorThread {
    /// The one of this process, which starts with the first registration.
    pub(crate) fn of_process() -> io::Result<Arc<DetectorThread>> {
        static CURRENT: PerProcess<Mutex<Weak<DetectorThread>>> = PerProcess::unset();
        CURRENT.shared(|| {
            let poller = Poller::new()?;
            let shared = Mutex::new(Shared { watch: Watch::new(poller.clone()), is_running: false });
            Ok(DetectorThread { poller, shared, checked: Condvar::new() })
        })
    }

    /// The poller that the thread sleeps on.
    pub(crate) fn poller(&self) -> &Poller {
        &self.poller
    }

    pub(super) fn add(self: &Arc<Self>, state: DetectorState, report: Report) -> io::Result<Arc<Registration>> {
        let mut shared = lock(&self.shared);
        if !shared.is_running {
            let thread = Arc::clone(self);
            sync::spawn("ncclx_rs_watch", move || thread.run())?;
            shared.is_running = true;
        }
        let registration = shared.watch.add(state, report);
        drop(shared);
        self.poller.wake();
        Ok(registration)
    }

    pub(super) fn remove(&self, registration: &Registration) {
        lock(&self.shared).watch.remove(registration.member);
        self.poller.wake();
    }

    /// Sends a rank's last notice, and waits until it is sent, at most for `timeout`.
    pub(super) fn announce(&self, registration: &Registration, notice: &Notice, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let mut shared = lock(&self.shared);
        shared.watch.leave(registration.member, notice);
        loop {
            let is_flushed = shared.watch.flush(registration.member);
            self.poller.wake();
            let left = deadline.saturating_duration_since(Instant::now());
            if is_flushed || left.is_zero() {
                return;
            }
            let waited = self.checked.wait_timeout(shared, left.min(FLUSH_CHECK));
            shared = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    fn run(&self) {
        loop {
            let checked = {
                let (mut shared, now) = (lock(&self.shared), Instant::now());
                let is_over = shared.watch.is_over(now);
                shared.is_running = !is_over;
                if is_over {
                    return;
                }
                shared.watch.check(now)
            };
            self.checked.notify_all();
            let report = |(registration, findings): &(Arc<Registration>, _)| registration.report(findings);
            let next_report = checked.findings.iter().filter_map(report).min();
            let next_check = checked.next.into_iter().chain(next_report).min();
            drop(checked);
            let timeout = next_check.map(|next| next.saturating_duration_since(Instant::now()));
            if timeout.is_none_or(|timeout| !timeout.is_zero())
                && let Err(error) = self.poller.wait(timeout)
            {
                // Logged once: the next turn would log it again.
                static LOGGED: std::sync::Once = std::sync::Once::new();
                LOGGED.call_once(|| log::error!("waiting for news of other ranks fails: {error}"));
            }
        }
    }
}

/// How often a leaving rank checks whether its notice has been sent.
const FLUSH_CHECK: Duration = Duration::from_millis(5);
