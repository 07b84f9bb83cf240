//! The thread that runs the failure detectors of all communicators of a process, while there are any.

use std::io;
use std::time::Instant;

use super::state::Registration;
use crate::sync::{Arc, Mutex, Weak, lock};
use crate::sys::fork::PerProcess;
use crate::sys::poller::Poller;

/// The detector thread of this process, and what it serves.
pub(crate) struct DetectorThread {
    poller: Poller,
    registrations: Mutex<Registrations>,
}

#[derive(Default)]
struct Registrations {
    registered: Vec<Arc<Registration>>,
    is_running: bool,
}

impl DetectorThread {
    /// The one of this process, which starts with the first registration.
    pub(crate) fn of_process() -> io::Result<Arc<DetectorThread>> {
        static CURRENT: PerProcess<Mutex<Weak<DetectorThread>>> = PerProcess::unset();
        let mut current = lock(CURRENT.get());
        if let Some(thread) = current.upgrade() {
            return Ok(thread);
        }
        let thread = Arc::new(DetectorThread { poller: Poller::new()?, registrations: Mutex::default() });
        *current = Arc::downgrade(&thread);
        Ok(thread)
    }

    /// The poller that the thread sleeps on.
    pub(crate) fn poller(&self) -> &Poller {
        &self.poller
    }

    pub(super) fn add(self: &Arc<Self>, registration: Arc<Registration>) -> io::Result<()> {
        let mut registrations = lock(&self.registrations);
        if !registrations.is_running {
            let thread = Arc::clone(self);
            std::thread::Builder::new().name("ncclx_rs_watch".to_owned()).spawn(move || thread.run())?;
            registrations.is_running = true;
        }
        registrations.registered.push(registration);
        self.poller.wake();
        Ok(())
    }

    pub(super) fn remove(&self, registration: &Arc<Registration>) {
        lock(&self.registrations).registered.retain(|known| !Arc::ptr_eq(known, registration));
        lock(&registration.state).close();
        self.poller.wake();
    }

    fn run(&self) {
        loop {
            let registered = {
                let mut registrations = lock(&self.registrations);
                registrations.is_running = !registrations.registered.is_empty();
                if !registrations.is_running {
                    return;
                }
                registrations.registered.clone()
            };
            let next_check = registered.iter().filter_map(|registration| registration.check()).min();
            drop(registered);
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
