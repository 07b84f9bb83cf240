//! The ends of a library's communicators, on threads of their own, since the library waits there: for the device, and for other ranks.

use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use crate::sync::{self, Arc};
use crate::sys::nccl::NcclComm;

/// How long an end is waited for.
const LIMIT: Duration = Duration::from_secs(5);

/// The end of a communicator that has begun. Dropped, it is waited for, for a while: the library may still have to send what calls have
/// left with it.
#[derive(Debug)]
pub(crate) struct Ending {
    /// Whose, and of which library.
    what: String,
    has_ended: Receiver<()>,
    until: Instant,
}

impl Ending {
    /// Ends a communicator, of which nothing is on a stream.
    ///
    /// An abort would drop what NCCL's network transports have still to send (`ncclProxyProgress` in its
    /// [proxy.cc](https://github.com/NVIDIA/nccl/blob/v2.30.7-1/src/proxy.cc)), and end what shares with the communicator.
    pub(super) fn begin(what: String, raw: Arc<NcclComm>) -> Ending {
        let (told, has_ended) = mpsc::channel();
        aside(move || {
            raw.destroy();
            // Nobody may wait any more.
            _ = told.send(());
        });
        Ending { what, has_ended, until: Instant::now() + LIMIT }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let left = self.until.saturating_duration_since(Instant::now());
        if self.has_ended.recv_timeout(left) == Err(mpsc::RecvTimeoutError::Timeout) {
            log::warn!(
                "{} has not ended within {LIMIT:?}: other ranks have not taken what they were sent, or not left",
                self.what
            );
        }
    }
}

/// Gives a communicator up.
pub(super) fn abort_aside(raw: Arc<NcclComm>) {
    aside(move || raw.abort());
}

fn aside(end: impl FnOnce() + Send + 'static) {
    if let Err(error) = sync::spawn("ncclx_rs vendor", end) {
        log::warn!("a communicator of the vendor's library stays: there is no thread to end it: {error}");
    }
}
