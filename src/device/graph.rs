//! The captures of graphs in which a communicator takes part.
//!
//! A graph may run beside eager operations, so it must not use what they use. Each graph has [lanes](GraphLane) of its own,
//! which the ranks set up together at the first operation in a capture that needs one; calls in a capture block the host until
//! all ranks have made them. The operations of one capture come one after the other, as eager ones do.

use std::time::Duration;

use crate::device::graph_lane::{Capturing, GraphLane, Purpose};
use crate::device::graph_library::{GraphLibrary, LibraryCalls};
use crate::device::in_flight::InFlight;
use crate::device::lane::Kernels;
use crate::device::replay::TokenLayout;
use crate::device::setup::{self, AllGather, Parts, Wanted};
use crate::device::vendor::{SubmitError, VendorComm};
use crate::device::watch;
use crate::error::{Error, UsageError};
use crate::sync::{Arc, Weak};
use crate::sys::cuda::{Capture, Context, CudaError, Current, DeviceMemory, Event, Stream, StreamId};
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
    /// The calls of a vendor's library, if there are any.
    library: Option<Arc<GraphLibrary>>,
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
        let lanes = self.captures.iter().flat_map(|capture| &capture.lanes);
        let libraries = self.captures.iter().filter_map(|capture| capture.library.as_ref());
        lanes.into_iter().any(|lane| watch::Replayed::is_busy(&**lane))
            || libraries.into_iter().any(|library| watch::Replayed::is_busy(&**library))
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
        let (home, halves) = (&self.home, &[purpose.half()]);
        let words = (TokenLayout::new(home.size).count(), VERSION);
        let parts = home.set_up(halves, words, timeout, all_gather, are_there)?;
        let make = || -> Result<(Arc<GraphLane>, Arc<Event>), CudaError> {
            let end = self.end(id)?;
            let (comm, in_flight) = (home.comm.clone(), home.in_flight.clone());
            let lane = Arc::new(GraphLane::new(comm, home.me, purpose, parts, end.clone(), in_flight));
            watch::watch_graph(lane.clone());
            lane.belong(current, stream).inspect_err(|_| lane.give_up())?;
            Ok((lane, end))
        };
        let (lane, end) = setup::agree(
            &home.comm,
            &home.names(),
            "a lane of a graph",
            make(),
            |(lane, _)| lane.give_up(),
            all_gather,
        )?;
        self.recording(id, &end).lanes.push(lane);
        Ok(())
    }

    /// As [`prepare`](Graphs::prepare), for calls of a vendor's library.
    pub(crate) fn prepare_library(
        &mut self,
        CaptureSite { current, stream, capture: id }: CaptureSite<'_>,
        (library, spare): (&Arc<VendorComm>, &Arc<DeviceMemory>),
        timeout: Duration,
        all_gather: &mut AllGather<'_>,
        are_there: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        if self.captures.iter().any(|capture| capture.id == id && capture.library.is_some()) {
            return Ok(());
        }
        let home = &self.home;
        let parts = home.set_up(&[], (home.size, LIBRARY_VERSION), timeout, all_gather, are_there)?;
        let make = || -> Result<(Arc<GraphLibrary>, Arc<Event>), CudaError> {
            let end = self.end(id)?;
            let (comm, in_flight) = (home.comm.clone(), home.in_flight.clone());
            let library = (library.clone(), spare.clone());
            let made = Arc::new(GraphLibrary::new(comm, home.me, parts, end.clone(), in_flight, library));
            watch::watch_graph(made.clone());
            made.belong(current, stream).inspect_err(|_| made.give_up())?;
            Ok((made, end))
        };
        let give_up = |(made, _): &(Arc<GraphLibrary>, _)| made.give_up();
        let (made, end) =
            setup::agree(&home.comm, &home.names(), "a library's part of a graph", make(), give_up, all_gather)?;
        self.recording(id, &end).library = Some(made);
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
        site: CaptureSite<'_>,
        purpose: Purpose,
        operation: &Capturing<'_>,
        kernels: &impl Kernels,
    ) -> Result<(), CudaError> {
        let lane = self.lane(site.capture, purpose).expect("it was prepared").clone();
        self.in_turn(site, || lane.submit(site.current, site.stream, operation, kernels))
    }

    /// As [`submit`](Graphs::submit), by the vendor's library.
    pub(crate) fn submit_library(
        &mut self,
        site: CaptureSite<'_>,
        operation: &LibraryCalls<'_>,
    ) -> Result<(), SubmitError> {
        let mut captures = self.captures.iter();
        let library = captures.find(|capture| capture.id == site.capture).and_then(|capture| capture.library.clone());
        let library = library.expect("it was prepared");
        self.in_turn(site, || library.submit(site.current, site.stream, operation))
    }

    /// Puts something into a capture, after its operation before.
    fn in_turn<E: From<CudaError>>(
        &mut self,
        CaptureSite { current, stream, capture: id }: CaptureSite<'_>,
        put: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let capture = self.captures.iter_mut().find(|capture| capture.id == id).expect("it was prepared");
        let end = capture.end.upgrade().expect("a graph that is being captured lives");
        let id = stream.id(current)?;
        if capture.last.is_some_and(|last| last != id) {
            stream.wait(current, &end)?;
        }
        put()?;
        end.record(current, stream)?;
        capture.last = Some(id);
        Ok(())
    }

    /// The event at the end of a capture's last operation.
    fn end(&self, id: u64) -> Result<Arc<Event>, CudaError> {
        let known = self.captures.iter().find(|capture| capture.id == id).and_then(|capture| capture.end.upgrade());
        known.map_or_else(|| Event::new(&self.home.context).map(Arc::new), Ok)
    }

    /// What is known of a capture, whose operations end at `end`. Forgets graphs that are gone.
    fn recording(&mut self, id: u64, end: &Arc<Event>) -> &mut Recording {
        self.captures.retain(|capture| capture.id == id || capture.lives());
        let index = self.captures.iter().position(|capture| capture.id == id).unwrap_or_else(|| {
            let end = Arc::downgrade(end);
            self.captures.push(Recording { id, lanes: vec![], library: None, last: None, end });
            self.captures.len() - 1
        });
        &mut self.captures[index]
    }

    /// The smallest lane of a capture that serves `purpose`.
    fn lane(&self, id: u64, purpose: Purpose) -> Option<&Arc<GraphLane>> {
        let capture = self.captures.iter().find(|capture| capture.id == id)?;
        let lanes = capture.lanes.iter().filter(|lane| lane.purpose().serves(purpose));
        lanes.min_by_key(|lane| lane.purpose().half())
    }
}

impl Recording {
    /// Whether the graph is still there.
    fn lives(&self) -> bool {
        self.lanes.iter().any(|lane| lane.lives()) || self.library.as_ref().is_some_and(|library| library.lives())
    }
}

impl Home {
    fn names(&self) -> Vec<Rank> {
        (0..self.size).map(Rank::from).collect()
    }

    /// Sets up so many words, of a version of their layout, and staging memory, for a graph.
    fn set_up(
        &self,
        halves: &[usize],
        (words, layout): (usize, u32),
        timeout: Duration,
        all_gather: &mut AllGather<'_>,
        are_there: &dyn Fn() -> bool,
    ) -> Result<Parts, Error> {
        let wanted = Wanted {
            comm: &self.comm,
            me: self.me,
            names: &self.names(),
            device: self.context.device().ordinal(),
            host: &self.host,
            halves,
            stages_alone: true,
            words,
            layout,
            timeout,
        };
        setup::set_up(&wanted, all_gather, are_there)
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
/// That of the words beside calls of a library.
const LIBRARY_VERSION: u32 = 1 << 18;
