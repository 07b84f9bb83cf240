//! The captures of graphs in which a communicator takes part.
//!
//! A graph may run beside eager operations, so it must not use what they use. Each graph has [lanes](GraphLane) of its own,
//! which the ranks set up together at the first operation in a capture that needs one; calls in a capture block the host until
//! all ranks have made them. The operations of one capture come one after the other, as eager ones do.

use std::time::Duration;

use crate::device::graph_lane::{Capturing, GraphLane, Purpose};
use crate::device::in_flight::InFlight;
use crate::device::lane::Kernels;
use crate::device::replay::TokenLayout;
use crate::device::setup::{self, AllGather, Wanted};
use crate::device::watch;
use crate::error::{Error, UsageError};
use crate::sync::{Arc, Weak};
use crate::sys::cuda::{Capture, Context, CudaError, Current, Event, Stream, StreamId};
use crate::types::Rank;

/// What captures need of their communicator.
pub(crate) struct Home {
    pub(crate) comm: String,
    pub(crate) me: Rank,
    pub(crate) size: usize,
    /// The identity of the host.
    pub(crate) host: String,
    pub(crate) context: Arc<Context>,
    pub(crate) in_flight: Arc<InFlight>,
}

pub(crate) struct Graphs {
    home: Home,
    captures: Vec<Recording>,
}

struct Recording {
    id: u64,
    lanes: Vec<Arc<GraphLane>>,
    /// The stream of its last operation.
    last: Option<StreamId>,
    /// Its end, which the lanes keep.
    end: Weak<Event>,
}

/// Where an operation is captured.
#[derive(Clone, Copy)]
pub(crate) struct CaptureSite<'a> {
    pub(crate) current: &'a Current<'a>,
    pub(crate) stream: &'a Stream,
    /// The capture's number.
    pub(crate) capture: u64,
}

impl Graphs {
    pub(crate) fn new(home: Home) -> Graphs {
        Graphs { home, captures: Vec::new() }
    }

    /// Whether a replay is in an operation.
    pub(crate) fn is_busy(&self) -> bool {
        self.captures.iter().flat_map(|capture| &capture.lanes).any(|lane| watch::Replayed::is_busy(&**lane))
    }

    /// Sets up a lane for the next operation of a capture, if there is none. All ranks call it, in the same order.
    ///
    /// # Errors
    /// The lane could not be made: the same on all ranks; or ranks are gone.
    pub(crate) fn prepare(
        &mut self,
        CaptureSite { current, stream, capture: id }: CaptureSite<'_>,
        purpose: Purpose,
        timeout: Duration,
        all_gather: &mut AllGather<'_>,
        are_there: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        if self.lane(id, purpose).is_some() {
            return Ok(());
        }
        let home = &self.home;
        let names: Vec<Rank> = (0..home.size).map(Rank::from).collect();
        let wanted = Wanted {
            comm: &home.comm,
            me: home.me,
            names: &names,
            device: home.context.device().ordinal(),
            host: &home.host,
            halves: &[purpose.half()],
            stages_alone: true,
            words: TokenLayout::new(home.size).count(),
            layout: VERSION,
            timeout,
        };
        let parts = setup::set_up(&wanted, all_gather, are_there)?;
        let known = self.captures.iter().find(|capture| capture.id == id).and_then(|capture| capture.end.upgrade());
        let make = || -> Result<(Arc<GraphLane>, Arc<Event>), Box<dyn std::error::Error>> {
            let end = match known {
                Some(end) => end,
                None => Arc::new(Event::new(&home.context)?),
            };
            let (comm, in_flight) = (home.comm.clone(), home.in_flight.clone());
            let lane = Arc::new(GraphLane::new(comm, home.me, purpose, parts, end.clone(), in_flight));
            watch::watch_graph(lane.clone());
            lane.belong(current, stream).inspect_err(|_| lane.give_up())?;
            Ok((lane, end))
        };
        let (lane, end) =
            setup::agree(&home.comm, &names, "a lane of a graph", make(), |(lane, _)| lane.give_up(), all_gather)?;
        self.captures.retain(|capture| capture.id == id || capture.lanes.iter().any(|lane| lane.lives()));
        if !self.captures.iter().any(|capture| capture.id == id) {
            self.captures.push(Recording { id, lanes: vec![], last: None, end: Arc::downgrade(&end) });
        }
        let capture = self.captures.iter_mut().find(|capture| capture.id == id);
        capture.expect("it was there, or has just come").lanes.push(lane);
        Ok(())
    }

    /// Puts an operation into a capture.
    ///
    /// # Errors
    /// A call of the driver has failed. The graph is of no use.
    ///
    /// # Panics
    /// When it was not prepared.
    pub(crate) fn submit(
        &mut self,
        CaptureSite { current, stream, capture: id }: CaptureSite<'_>,
        purpose: Purpose,
        operation: &Capturing<'_>,
        kernels: &impl Kernels,
    ) -> Result<(), CudaError> {
        let lane = self.lane(id, purpose).expect("it was prepared").clone();
        let capture = self.captures.iter_mut().find(|capture| capture.id == id).expect("it has a lane");
        let end = capture.end.upgrade().expect("a graph that is being captured lives");
        let id = stream.id(current)?;
        if capture.last.is_some_and(|last| last != id) {
            stream.wait(current, &end)?;
        }
        lane.submit(current, stream, operation, kernels)?;
        end.record(current, stream)?;
        capture.last = Some(id);
        Ok(())
    }

    /// The smallest lane of a capture that serves `purpose`.
    fn lane(&self, id: u64, purpose: Purpose) -> Option<&Arc<GraphLane>> {
        let capture = self.captures.iter().find(|capture| capture.id == id)?;
        let lanes = capture.lanes.iter().filter(|lane| lane.purpose().serves(purpose));
        lanes.min_by_key(|lane| lane.purpose().half())
    }
}

/// The number of the capture that a stream takes part in, if it does.
///
/// # Errors
/// The capture has failed. The error names `operation`.
pub(crate) fn number_of(capture: Capture, operation: impl FnOnce() -> String) -> Result<Option<u64>, UsageError> {
    match capture {
        Capture::Off => Ok(None),
        Capture::Active(number) => Ok(Some(number)),
        Capture::Spoilt => Err(UsageError {
            operation: operation(),
            argument: "stream",
            expected: "a stream whose operations run, or are being captured in a graph".to_owned(),
            got: "one whose capture has failed, and can only be ended".to_owned(),
        }),
    }
}

/// The version of the layout of words in a graph's lane, apart from those of the communicator's.
const VERSION: u32 = 1 << 16;
