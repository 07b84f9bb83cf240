//! How long operations take by the device's clock, where that is asked for.
//!
//! Events before and after an operation are read when the communicator's next operations are submitted, by threads of the
//! program: no thread that makes progress or watches calls the driver, and no dump waits for it. The events are made in advance, since something may be in
//! flight later. Operations for which none is left are not timed.

use std::collections::VecDeque;

use crate::device::in_flight::Ends;
use crate::sync::Arc;
use crate::sys::cuda::{Context, CudaError, Current, Moment, Relaxed, Stream};
use crate::work::Work;

/// The times of the operations of one communicator.
pub(crate) struct Timer {
    ends: Arc<dyn Ends>,
    spare: Vec<Lap>,
    /// Those in flight, in order, and when they began and ended.
    running: VecDeque<(Work, Lap)>,
    has_failed: bool,
}

/// When an operation begins and ends.
#[derive(Debug)]
pub(crate) struct Lap([Moment; 2]);

impl Timer {
    /// A timer for some operations in flight, if they are to be timed; else for none.
    pub(crate) fn new(context: &Arc<Context>, ends: Arc<dyn Ends>, is_timed: bool) -> Result<Timer, CudaError> {
        let lap = |_| Ok(Lap([Moment::new(context)?, Moment::new(context)?]));
        let count = if is_timed { OPERATIONS } else { 0 };
        let spare = (0..count).map(lap).collect::<Result<_, CudaError>>()?;
        Ok(Timer { ends, spare, running: VecDeque::new(), has_failed: false })
    }

    /// Reads what has ended, and puts the beginning of an operation on its stream. Nothing that fails here fails the operation,
    /// which is not timed then.
    pub(crate) fn begin(&mut self, current: &Current<'_>, stream: &Stream) -> Option<Lap> {
        self.read(current);
        let lap = self.spare.pop()?;
        self.is_recorded(lap.0[0].record(current, stream)).then_some(lap)
    }

    /// Puts the end of an operation on its stream.
    pub(crate) fn end(&mut self, current: &Current<'_>, stream: &Stream, lap: Option<Lap>, work: &Work) {
        let Some(lap) = lap else { return };
        if self.is_recorded(lap.0[1].record(current, stream)) {
            self.running.push_back((work.clone(), lap));
        }
    }

    /// Tells how long operations took that have ended since the last time. Only of those the driver is asked, which answers then
    /// without a wait.
    fn read(&mut self, current: &Current<'_>) {
        // Where another thread captures a graph, the driver may take the question for a part of that otherwise.
        let _relaxed = (!self.running.is_empty()).then(Relaxed::enter);
        while self.running.front().is_some_and(|(work, _)| work.is_done()) {
            let (work, lap) = self.running.pop_front().expect("looked at above");
            let Lap([begin, end]) = &lap;
            match end.since(current, begin) {
                // Its words say that it has ended, and the event behind them is not reached yet.
                Ok(None) => return self.running.push_front((work, lap)),
                Ok(Some(took)) => self.ends.took(&work, took),
                Err(error) => self.tell(&error),
            }
            self.spare.push(lap);
        }
    }

    /// Whether a moment was put on a stream.
    fn is_recorded(&mut self, result: Result<(), CudaError>) -> bool {
        result.inspect_err(|error| self.tell(error)).is_ok()
    }

    /// Says why an operation is not timed, the first time.
    fn tell(&mut self, error: &CudaError) {
        if !std::mem::replace(&mut self.has_failed, true) {
            log::warn!("it is not known how long some operations took on a device: {error}");
        }
    }
}

/// As many operations as programs usually have under way.
const OPERATIONS: usize = 256;
