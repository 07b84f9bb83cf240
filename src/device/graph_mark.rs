//! Whether the graph is still there that something was captured for.

use crate::sync::{Arc, AtomicBool, Ordering};
use crate::sys::cuda::{CudaError, Current, Stream};

/// Is set when the graph is gone.
#[derive(Debug, Default)]
pub(crate) struct GraphMark(Arc<AtomicBool>);

impl GraphMark {
    /// Has it set once the graph is gone for which `stream` is being captured.
    pub(crate) fn belong(&self, current: &Current<'_>, stream: &Stream) -> Result<(), CudaError> {
        stream.mark_end_of_graph(current, &self.0)
    }

    /// Whether the graph is still there.
    pub(crate) fn lives(&self) -> bool {
        // Partner: the driver's thread that sets the mark.
        !self.0.load(Ordering::Acquire)
    }

    /// Has what it is for given back although there is no graph.
    pub(crate) fn give_up(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// For who looks at it too.
    pub(crate) fn shared(&self) -> &Arc<AtomicBool> {
        &self.0
    }
}
