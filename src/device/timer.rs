//! How long operations take by the device's clock, where that is asked for.
//!
//! Events before and after an operation are read when the communicator's next operations are submitted, by threads of the
//! program: no thread that makes progress or watches calls the driver. They are made in advance, since something may be in
//! flight later. Operations for which none is left are not timed.

use std::collections::VecDeque;

use crate::device::in_flight::Ends;
use crate::sync::Arc;
use crate::sys::cuda::{Context, CudaError, Current, Moment, Stream};
use crate::work::Work;

/// The times of the operations of one communicator.
pub(crate) struct Timer {
    ends: Arc<dyn Ends>,
    spare: Vec<Lap>,
    /// Those in flight, in order, and when they began and ended.
    running: VecDeque<(Work, Lap)>,
}

/// When an operation begins and ends.
#[derive(Debug)]
pub(crate) struct Lap([Moment; 2]);

impl Timer {
    /// A timer for up to `count` operations in flight.
    pub(crate) fn new(context: &Arc<Context>, ends: Arc<dyn Ends>, count: usize) -> Result<Timer, CudaError> {
        let lap = |_| Ok(Lap([Moment::new(context)?, Moment::new(context)?]));
        Ok(Timer { ends, spare: (0..count).map(lap).collect::<Result<_, CudaError>>()?, running: VecDeque::new() })
    }

    /// Reads what has ended, and puts the beginning of an operation on its stream.
    pub(crate) fn begin(&mut self, current: &Current<'_>, stream: &Stream) -> Result<Option<Lap>, CudaError> {
        self.read(current)?;
        let Some(lap) = self.spare.pop() else { return Ok(None) };
        lap.0[0].record(current, stream)?;
        Ok(Some(lap))
    }

    /// Puts the end of an operation on its stream.
    pub(crate) fn end(
        &mut self,
        current: &Current<'_>,
        stream: &Stream,
        lap: Option<Lap>,
        work: &Work,
    ) -> Result<(), CudaError> {
        let Some(lap) = lap else { return Ok(()) };
        lap.0[1].record(current, stream)?;
        self.running.push_back((work.clone(), lap));
        Ok(())
    }

    /// Whether it measures nothing just now.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// Tells how long operations took that have ended since the last time.
    pub(crate) fn read(&mut self, current: &Current<'_>) -> Result<(), CudaError> {
        while let Some((_, Lap([begin, end]))) = self.running.front() {
            let Some(took) = end.since(current, begin)? else { break };
            let (work, lap) = self.running.pop_front().expect("looked at above");
            self.ends.took(&work, took);
            self.spare.push(lap);
        }
        Ok(())
    }
}

/// As many operations as programs usually have under way.
pub(crate) const OPERATIONS: usize = 256;
