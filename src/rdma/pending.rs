//! The end of an operation, to wait for.

use std::time::{Duration, Instant};

use crate::rdma::error::RdmaError;
use crate::sync::{Arc, Condvar, Mutex, lock};

/// An operation in flight or done. Dropping it does not end the operation.
#[derive(Clone, Debug)]
pub struct Pending {
    state: Arc<(Mutex<State>, Condvar)>,
}

#[derive(Debug)]
struct State {
    /// Spans that are not done yet.
    left: usize,
    /// The error of the first that failed.
    failed: Option<RdmaError>,
}

impl Pending {
    /// An operation of so many spans.
    pub(super) fn new(spans: usize) -> Pending {
        Pending { state: Arc::new((Mutex::new(State { left: spans, failed: None }), Condvar::new())) }
    }

    /// One more of its spans has ended. It is done when all have.
    pub(super) fn end_span(&self, result: Result<(), RdmaError>) {
        let (state, ended) = &*self.state;
        let mut state = lock(state);
        state.left = state.left.saturating_sub(1);
        if let Err(error) = result {
            state.failed.get_or_insert(error);
        }
        if state.left == 0 {
            ended.notify_all();
        }
    }

    /// Whether it has ended, well or badly.
    pub fn is_done(&self) -> bool {
        lock(&self.state.0).left == 0
    }

    /// Waits for the end, and at most for `limit`.
    ///
    /// # Errors
    /// The operation's own, or [`RdmaError::InFlight`]. Without a limit, it is the operation's own.
    pub fn wait(&self, limit: Option<Duration>) -> Result<(), RdmaError> {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let (state, ended) = &*self.state;
        let mut state = lock(state);
        while state.left > 0 {
            let Some(deadline) = deadline else {
                state = ended.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
                continue;
            };
            let now = Instant::now();
            if now >= deadline {
                return Err(RdmaError::InFlight { waited: limit.unwrap_or_default() });
            }
            let waited = ended.wait_timeout(state, deadline - now);
            state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        state.failed.clone().map_or(Ok(()), Err)
    }
}
