//! Algorithms: pure functions from an operation's shape to one rank's [`Schedule`](crate::schedule::Schedule).

use crate::schedule::Schedule;
use crate::topo::Topology;
use crate::types::Rank;

/// The shape of a collective, all counts in elements. The input and output spaces of the schedule hold, end to end:
///
/// | collective | input | output |
/// |---|---|---|
/// | all_reduce, reduce, broadcast | `count` | `count`; may be the same memory |
/// | all_gather | `counts[me]` | the sum of `counts`, by rank |
/// | reduce_scatter | the sum of `counts`, by rank | `counts[me]` |
/// | all_to_all | the sum of `send`, by rank | the sum of `recv`, by rank |
/// | gather | `count` | on the root `count` a rank, else nothing |
/// | scatter | on the root `count` a rank, else nothing | `count` |
/// | barrier | nothing | nothing |
///
/// Inputs are never written unless they are the output's own memory. A broadcast reads the root's input and writes
/// every rank's output. A reduce writes the root's output alone; other ranks work in scratch memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// See the table; likewise below.
    AllReduce { count: usize },
    /// To `root`.
    Reduce { count: usize, root: Rank },
    /// From `root`.
    Broadcast { count: usize, root: Rank },
    /// Of `counts[r]` elements from rank r.
    AllGather { counts: Vec<usize> },
    /// With `counts[r]` elements for rank r.
    ReduceScatter { counts: Vec<usize> },
    /// With this rank's counts for and from every rank.
    AllToAll { send: Vec<usize>, recv: Vec<usize> },
    /// To `root`.
    Gather { count: usize, root: Rank },
    /// From `root`.
    Scatter { count: usize, root: Rank },
    /// No data.
    Barrier,
}

/// Everything but the data that a schedule depends on.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// The rank the schedule is for.
    pub me: Rank,
    /// Who shares a host with whom.
    pub topo: &'a Topology,
    /// Bytes per element.
    pub element: usize,
}

/// A schedule, or why there is none.
pub fn plan(collective: &Collective, setting: Setting<'_>) -> Schedule {
    let _ = (collective, setting);
    Schedule { name: "", steps: Vec::new(), scratch: 0 }
}
