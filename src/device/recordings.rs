//! The captures that have accesses to a communicator's windows, or messages of it.
//!
//! Within a capture the operations of one key come one after the other, whatever their streams, by events of the capture's own.

use std::collections::HashMap;
use std::hash::Hash;

use crate::device::graph_waits::GraphWaits;
use crate::device::pairs::Branch;
use crate::device::watch::{self, Replayed};
use crate::sync::{Arc, Weak};
use crate::sys::cuda::{Context, CudaError, Current, Event, Stream, StreamId};

/// The captures. Operations of one key follow each other.
pub(crate) struct Recordings<K> {
    all: Vec<Recording<K>>,
}

pub(crate) struct Recording<K> {
    id: u64,
    waits: Arc<GraphWaits>,
    chains: HashMap<K, Chain>,
    /// Streams beside those of the capture's program. The graph keeps them: outside of it others are used meanwhile.
    branches: HashMap<K, Weak<Branch>>,
}

/// The stream of the last operation of a key, and the event at its end.
struct Chain {
    last: StreamId,
    /// The graph keeps it.
    end: Weak<Event>,
}

impl<K: Copy + Eq + Hash> Recordings<K> {
    pub(crate) fn new() -> Recordings<K> {
        Recordings { all: Vec::new() }
    }

    /// The capture of this number, in which a stream takes part.
    pub(crate) fn of(
        &mut self,
        comm: &str,
        id: u64,
        current: &Current<'_>,
        stream: &Stream,
    ) -> Result<&mut Recording<K>, CudaError> {
        self.all.retain(|recording| recording.waits.lives());
        let index = match self.all.iter().position(|recording| recording.id == id) {
            Some(index) => index,
            None => {
                let waits = GraphWaits::new(comm.to_owned());
                waits.belong(current, stream)?;
                watch::watch_graph(waits.clone());
                self.all.push(Recording { id, waits, chains: HashMap::new(), branches: HashMap::new() });
                self.all.len() - 1
            }
        };
        Ok(&mut self.all[index])
    }

    /// Whether a stream is in an operation of a graph.
    pub(crate) fn is_busy(&self) -> bool {
        self.all.iter().any(|recording| recording.waits.is_busy())
    }

    /// Whether a graph that is still there keeps something of a place.
    pub(crate) fn keeps(&self, place: usize) -> bool {
        self.all.iter().any(|recording| recording.waits.keeps(place))
    }
}

impl<K: Copy + Eq + Hash> Recording<K> {
    /// What the host sees of its replays.
    pub(crate) fn waits(&self) -> &GraphWaits {
        &self.waits
    }

    /// The stream beside the caller's for a key.
    pub(crate) fn branch(&mut self, key: K, context: &Arc<Context>) -> Result<Arc<Branch>, CudaError> {
        if let Some(known) = self.branches.get(&key).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let made = Arc::new(Branch::new(context)?);
        self.waits.keep(made.clone());
        self.branches.insert(key, Arc::downgrade(&made));
        Ok(made)
    }

    /// Has a stream come after the last operation of a key.
    pub(crate) fn follow(&self, key: K, current: &Current<'_>, stream: &Stream) -> Result<(), CudaError> {
        let id = stream.id(current)?;
        match self.chains.get(&key) {
            Some(Chain { last, end }) if *last != id => {
                stream.wait(current, &end.upgrade().expect("a graph that is being captured lives"))
            }
            _ => Ok(()),
        }
    }

    /// Has the next operation of a key come after what is on a stream.
    pub(crate) fn ended(
        &mut self,
        key: K,
        context: &Arc<Context>,
        current: &Current<'_>,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let known = self.chains.get(&key).and_then(|chain| chain.end.upgrade());
        let end = match known {
            Some(end) => end,
            None => {
                let end = Arc::new(Event::new(context)?);
                self.waits.keep(end.clone());
                end
            }
        };
        end.record(current, stream)?;
        self.chains.insert(key, Chain { last: stream.id(current)?, end: Arc::downgrade(&end) });
        Ok(())
    }
}
