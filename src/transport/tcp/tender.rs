//! The thread that looks after streams over several connections, also while nobody uses them.
//!
//! A connection may become silent after the last byte was given to it: nothing comes of it that a poller could tell. Whoever has
//! sent that byte may be busy with something else, while the peer waits.

use std::io;
use std::time::Duration;

use crate::sync::{self, Arc, AtomicBool, Condvar, Mutex, Ordering, Weak, lock};
use crate::sys::fork::Origin;

/// What is to be looked after from time to time.
pub(super) trait Tended: Send {
    /// Looks after it. True: it is to be looked after again, although nobody uses it.
    fn tend(&mut self) -> bool;
}

/// The thread of one transport, which ends once this and its clones are dropped.
#[derive(Clone, Debug)]
pub(super) struct Tender(Arc<Owner>);

#[derive(Debug)]
struct Owner {
    shared: Arc<Shared>,
    origin: Origin,
}

impl Drop for Owner {
    fn drop(&mut self) {
        // A forked child has no such thread, and its lock may be held for ever.
        if self.origin.is_here() {
            lock(&self.shared.state).is_closing = true;
            self.shared.changed.notify_all();
        }
    }
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the thread will look after everything without being asked to. Changed under the lock of `state`.
    is_at_work: AtomicBool,
}

#[derive(Default)]
struct State {
    streams: Vec<Weak<Mutex<dyn Tended>>>,
    is_closing: bool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("is_at_work", &self.is_at_work).finish_non_exhaustive()
    }
}

impl Tender {
    /// Starts the thread.
    pub(super) fn start() -> io::Result<Tender> {
        let shared =
            Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), is_at_work: AtomicBool::new(false) });
        let own = Arc::clone(&shared);
        sync::spawn("ncclx_rs rails", move || own.run())?;
        Ok(Tender(Arc::new(Owner { shared, origin: Origin::here() })))
    }

    /// Looks after a stream, too, until it is dropped.
    pub(super) fn add(&self, stream: Weak<Mutex<dyn Tended>>) {
        lock(&self.0.shared.state).streams.push(stream);
    }

    /// Has the thread look after everything, in a while and until nothing asks for it any more. To be called when a stream has
    /// been used.
    pub(super) fn wake(&self) {
        let shared = &self.0.shared;
        // The thread clears it before it looks, so what has been done before this is seen.
        if !shared.is_at_work.load(Ordering::SeqCst) {
            let _state = lock(&shared.state);
            shared.is_at_work.store(true, Ordering::SeqCst);
            shared.changed.notify_all();
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            while !state.is_closing && !self.is_at_work.load(Ordering::SeqCst) {
                state = self.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
            }
            if !state.is_closing {
                let waited = self.changed.wait_timeout(state, TEND_INTERVAL);
                state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
            }
            if state.is_closing {
                return;
            }
            self.is_at_work.store(false, Ordering::SeqCst);
            state.streams.retain(|stream| stream.strong_count() > 0);
            let streams: Vec<_> = state.streams.iter().filter_map(Weak::upgrade).collect();
            drop(state);
            let mut is_restless = false;
            for stream in streams {
                is_restless |= lock(&stream).tend();
            }
            state = lock(&self.state);
            if is_restless {
                self.is_at_work.store(true, Ordering::SeqCst);
            }
        }
    }
}

/// How often to look after streams.
const TEND_INTERVAL: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct Counted {
        looks: mpsc::Sender<u32>,
        count: u32,
        again: u32,
    }

    impl Tended for Counted {
        fn tend(&mut self) -> bool {
            self.count += 1;
            self.looks.send(self.count).unwrap();
            self.again = self.again.saturating_sub(1);
            self.again > 0
        }
    }

    #[test]
    fn a_stream_is_looked_after_until_it_is_at_rest_and_once_it_is_used_again() {
        let tender = Tender::start().unwrap();
        let (looks, seen) = mpsc::channel();
        let stream = Arc::new(Mutex::new(Counted { looks, count: 0, again: 3 }));
        let tended: Weak<Mutex<Counted>> = Arc::downgrade(&stream);
        tender.add(tended);
        assert!(seen.recv_timeout(2 * TEND_INTERVAL).is_err(), "nobody has used it");
        tender.wake();
        assert_eq!([seen.recv(), seen.recv(), seen.recv()], [Ok(1), Ok(2), Ok(3)]);
        assert!(seen.recv_timeout(2 * TEND_INTERVAL).is_err(), "it is at rest");
        tender.wake();
        assert_eq!(seen.recv(), Ok(4));
        // The thread ends, and with it the last that knows the others.
        let shared = Arc::downgrade(&tender.0.shared);
        drop(tender);
        while shared.strong_count() > 0 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_stream_that_is_dropped_is_forgotten() {
        let tender = Tender::start().unwrap();
        let (looks, seen) = mpsc::channel();
        let gone: Arc<Mutex<dyn Tended>> = Arc::new(Mutex::new(Counted { looks: looks.clone(), count: 10, again: 0 }));
        let stays: Arc<Mutex<dyn Tended>> = Arc::new(Mutex::new(Counted { looks, count: 20, again: 0 }));
        [&gone, &stays].into_iter().for_each(|stream| tender.add(Arc::downgrade(stream)));
        drop(gone);
        tender.wake();
        assert_eq!(seen.recv(), Ok(21));
        assert_eq!(lock(&tender.0.shared.state).streams.len(), 1);
    }
}
